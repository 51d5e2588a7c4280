"""Random training steps: a model, an optimizer, and a compiled function that trains, called several times while the program goes on to
change both. After each call parameters, gradients, buffers, the state of the optimizer and everything that was kept are compared."""
from __future__ import annotations

import random

HEAD = '''import copy, threading
import torch
import torch.nn as nn
import torch.nn.functional as F
KEPT = []

class Net(nn.Module):
    def __init__(self):
        super().__init__()
{layers}
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("last", torch.zeros(3))
        self.steps = 0

    def forward(self, x):
{forward}
        return x

def batch(seed, n=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 4, generator=generator), torch.randint(0, 3, (n,), generator=generator)

model = Net()
ps = [p for p in model.parameters()]
optimizer = {optimizer}
ema = [p.detach().clone() for p in ps]
{extra}
def state_of():
    numbers = [{{k: v for k, v in group.items() if k != "params"}} for group in optimizer.param_groups]
    return [[optimizer.state[p] for p in group["params"] if p in optimizer.state] for group in optimizer.param_groups], numbers

def in_a_thread(function, *args):
    found = []
    def work():
        try:
            found.append(function(*args))
        except Exception as error:
            found.append(type(error).__name__)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found

'''

LAYERS = [
    "nn.Linear(5, 5)", "nn.Linear(5, 5, bias=False)", "nn.BatchNorm1d(5)", "nn.LayerNorm(5)", "nn.Dropout(0.3)", "nn.GELU()", "nn.Tanh()",
    "nn.ReLU()", "nn.PReLU()", "nn.Sequential(nn.Linear(5, 5), nn.ReLU(inplace=True))"]
OPTIMIZERS = ["SGD({ps}, lr=0.1)", "SGD({ps}, lr=0.1, momentum=0.9)", "SGD({ps}, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)",
              "SGD({ps}, lr=0.1, momentum=0.5, dampening=0.1, maximize=True)", "Adam({ps}, lr=0.05)", "AdamW({ps}, lr=0.05, amsgrad=True)",
              "AdamW({ps}, lr=0.05, foreach=False)", "AdamW({ps}, lr=0.05, fused=True)", "Adam({ps}, lr=torch.tensor(0.05), foreach=False)",
              "RMSprop({ps}, lr=0.02)", "RMSprop({ps}, lr=0.02, centered=True, momentum=0.5)", "Adagrad({ps}, lr=0.1)", "Adadelta({ps})",
              "Adamax({ps}, lr=0.05)", "NAdam({ps}, lr=0.05)", "RAdam({ps}, lr=0.05)", "ASGD({ps}, lr=0.05)", "Rprop({ps}, lr=0.05)",
              "SGD({ps}, lr=0.1, differentiable=False, foreach=True)"]
GROUPS = ["ps", "ps", "ps", "[{'params': ps[:2]}, {'params': ps[2:], 'lr': 0.01}]", "ps[:3]", "(p for p in ps if p.dim() > 1)"]

BEFORE = ["optimizer.zero_grad()"] * 4 + ["optimizer.zero_grad(set_to_none=False)", "model.zero_grad()", "pass",
          "for p in ps: p.grad = None", "ps[0].grad = None", "for p in ps:\n        if p.grad is not None: p.grad.zero_()",
          "old = [p.grad for p in ps]; optimizer.zero_grad(); KEPT.append(old[0])"]
LOSSES = ["loss = F.cross_entropy(model(x)[:, :3], y)"] * 3 + [
    "loss = model(x).square().mean()", "loss = F.cross_entropy(model(x)[:, :3], y) + 0.1 * sum(p.square().sum() for p in ps)",
    "with torch.autocast('cpu', torch.bfloat16): out = model(x)\n    loss = out.float().square().mean()",
    "out = model(x); KEPT.append(out.detach()); loss = out.abs().sum() / 7", "x = x.requires_grad_(); loss = model(x).sin().mean()",
    "with torch.no_grad(): target = model(x * 0.5)\n    loss = F.mse_loss(model(x), target)",
    "loss = F.cross_entropy(model(x)[:, :3], y) * (1 if model.training else 2)"]
BACKWARDS = ["loss.backward()"] * 6 + [
    "(loss * 0.5).backward()", "loss.backward(retain_graph=True); (loss * 2).backward()", "loss.backward(gradient=torch.tensor(0.5))",
    "torch.autograd.backward([loss, ps[0].sum() * 0.1])", "loss.backward(inputs=ps[:2])",
    "for p, g in zip(ps, torch.autograd.grad(loss, ps, allow_unused=True)): p.grad = g",
    "for half in (x[:2], x[2:]): (model(half).square().mean() / 2).backward()\n    loss = loss.detach()",
    "loss.backward(); model(x).mean().backward()", "with torch.enable_grad(): loss.backward()", "loss.backward(); loss.backward()",
    "try:\n        loss.backward(); loss.backward()\n    except RuntimeError as error: KEPT.append(str(error)[:30])",
    "if loss > 100: loss = loss / 2\n    loss.backward()", "with torch.no_grad(): loss.backward()",
    "grads = torch.autograd.grad(loss, [ps[0]], retain_graph=True); KEPT.append(grads); loss.backward()"]
BETWEEN = ["pass"] * 3 + [
    "nn.utils.clip_grad_norm_(ps, 0.5)", "KEPT.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False))",
    "nn.utils.clip_grad_value_(ps, 0.05)", "for p in ps:\n        if p.grad is not None: p.grad.mul_(0.5)", "KEPT.append(ps[0].grad)",
    "if ps[0].grad is not None: ps[0].grad = ps[0].grad.clone()", "ps[1].grad = None", "ps[0].grad = torch.ones_like(ps[0])",
    "if ps[0].grad is not None: ps[0].grad = ps[0].grad + 0.1 * ps[0].detach()", "KEPT.append([p.grad is None for p in ps])",
    "if ps[0].grad is not None: ps[0].grad.data = ps[0].grad.data * 2",
    "KEPT.append(ps[0].grad.norm().item() if ps[0].grad is not None else 0)", "if model.steps == 2: raise ValueError('in the middle')",
    "with torch.no_grad():\n        for p in ps:\n            p.mul_(0.99)",
    "with torch.no_grad(): ps[0].grad = None if ps[0].grad is None else ps[0].grad.sign()", "ps[0].requires_grad_(model.steps % 2 == 0)",
    "torch.set_grad_enabled(model.steps != 3)", "optimizer.param_groups[0]['lr'] *= 0.9",
    "optimizer.param_groups[-1]['weight_decay'] = 0.01", "KEPT.append(sum(p.grad.sum() for p in ps if p.grad is not None))",
    "ps[0].grad, ps[1].grad = ps[0].grad, None", "ps[0].data.add_(0.01)", "ps[0].data = ps[0].data * 0.9",
    "torch._foreach_mul_([p.grad for p in ps if p.grad is not None], 0.5)"]
STEPS = ["optimizer.step()"] * 8 + [
    "if model.steps % 2: optimizer.step(); optimizer.zero_grad()", "optimizer.step(); optimizer.step()",
    "with torch.no_grad():\n        for p in ps:\n            if p.grad is not None: p.sub_(0.1 * p.grad)",
    "with torch.no_grad():\n        for p in ps:\n            if p.grad is not None: p.data = p.data - 0.1 * p.grad",
    "optimizer.step(lambda: loss)", "try: optimizer.step()\n    finally: KEPT.append('done')",
    "def closure():\n        optimizer.zero_grad(); l = model(x).square().mean(); l.backward(); return l\n    optimizer.step(closure)"]
AFTER = ["pass"] * 3 + [
    "model.count.add_(1)", "model.last = loss.detach().expand(3).clone()", "model.last.copy_(loss.detach())", "optimizer.zero_grad()",
    "with torch.no_grad():\n        for e, p in zip(ema, ps): e.lerp_(p, 0.1)", "torch._foreach_lerp_(ema, [p.detach() for p in ps], 0.1)",
    "KEPT.append(loss)", "KEPT.append(float(loss))", "print(model.steps)", "optimizer.param_groups[0]['lr'] = 0.1 / (1 + model.steps)",
    "KEPT.append([p.grad for p in ps])", "KEPT.append(len(optimizer.state))", "KEPT.append(optimizer.state.get(ps[0]))", "scheduler.step()",
    "KEPT[:] = KEPT[-2:]"]
RETURNS = ["loss", "loss.detach()", "loss.item()", "None", "(loss, ps[0].grad)", "model(x)", "[p.grad for p in ps]", "loss, model.steps"]
OUTSIDE = ["pass"] * 4 + [
    "optimizer.param_groups[0]['lr'] = 0.03", "ps[0].requires_grad_(False)", "ps[0].requires_grad_(True)",
    "ps[0].grad = torch.ones_like(ps[0])", "optimizer.zero_grad()", "model.eval()", "model.train()",
    "optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))",
    "optimizer.add_param_group({'params': [nn.Parameter(torch.ones(2))]})",
    "model.load_state_dict({k: v * 1.1 if v.is_floating_point() else v for k, v in model.state_dict().items()})",
    "optimizer.state.clear()", "KEPT.clear()", "ps[0].grad = None", "ps[0].data = torch.ones_like(ps[0])",
    "model.scale = nn.Parameter(torch.tensor(0.5))", "model.last = torch.ones(3)", "model.double().float()",
    "torch.set_grad_enabled(True)", "optimizer.state.get(ps[0], {}).clear()", "ps[0].register_hook(lambda g: g * 2)",
    "ps[0].register_post_accumulate_grad_hook(lambda p: KEPT.append(1))",
    "model.first.weight = nn.Parameter(model.first.weight.detach() * 2)",
    "optimizer.register_step_post_hook(lambda *a: KEPT.append('stepped'))", "optimizer = torch.optim.SGD(ps, lr=0.01, momentum=0.9)",
    "model = copy.deepcopy(model); ps = list(model.parameters())", "model.requires_grad_(False)", "model.requires_grad_(True)",
    "ps[1].grad = ps[1].detach()", "ps[1].grad = ps[0].grad", "torch.autograd.set_detect_anomaly(True)"]


def program(seed: int) -> str:
    rng = random.Random(seed)
    names, layers, forward = ["first"], ["self.first = nn.Linear(4, 5)"], ["x = self.first(x)"]
    for number in range(rng.randint(0, 4)):
        names.append(f"layer{number}")
        layers.append(f"self.{names[-1]} = {rng.choice(LAYERS)}")
        forward.append(f"x = self.{names[-1]}(x)" + rng.choice(["", "", " + x", " * self.scale"]))
    linear = [name for name, layer in zip(names, layers) if layer.endswith("Linear(5, 5)")]
    if len(linear) > 1 and rng.random() < 0.5:
        layers.append(f"self.{linear[0]}.weight = self.{linear[1]}.weight")
    forward.append(rng.choice(["", "self.steps += 1", "self.count += 1", "self.last = x.detach().mean(0)[:3]"]) or "pass")
    if rng.random() < 0.2:
        layers.append("self.first.bias.requires_grad_(False)")
    extra = ""
    after = rng.choices(AFTER, k=rng.randint(0, 2))
    if "scheduler.step()" in after:
        extra = "scheduler = torch.optim.lr_scheduler." + rng.choice(["StepLR(optimizer, 2)", "ExponentialLR(optimizer, 0.9)",
                                                                       "LambdaLR(optimizer, lambda n: 1 / (n + 1))"]) + "\n"
    body = [rng.choice(BEFORE), "model.steps += 1", loss := rng.choice(LOSSES), backward := rng.choice(BACKWARDS),
            *rng.choices(BETWEEN, k=rng.randint(0, 2)), rng.choice(STEPS), *after]
    if rng.random() < 0.15:
        body.insert(rng.randrange(len(body)), rng.choice(BETWEEN))
    if rng.random() < 0.1:
        a, b = rng.sample(range(len(body)), 2)
        body[a], body[b] = body[b], body[a]
    first, last = sorted((body.index(loss), body.index(backward)))
    body = ["pass" if first < i < last and "ps[0].data" in line else line for i, line in enumerate(body)]      # unnoticed: see README
    head = HEAD.replace("{{", "{").replace("}}", "}")
    parts = {"layers": "\n".join(f"        {line}" for line in layers), "forward": "\n".join(f"        {line}" for line in forward),
             "optimizer": "torch.optim." + rng.choice(OPTIMIZERS).replace("{ps}", rng.choice(GROUPS)), "extra": extra}
    for name, text in parts.items():
        head = head.replace("{" + name + "}", text)
    lines = "".join(f"    {line}\n" for line in body)
    calls = ""
    for number in range(rng.randint(4, 7)):
        size = rng.choice(["", "", "", ", 6"])
        how = "call(lambda *args: in_a_thread(fast, *args), " if rng.random() < 0.05 else "call(fast, "
        outside = rng.choice(OUTSIDE) if number > 1 else "pass"
        calls += f"    try: {outside}\n    except (RuntimeError, KeyError): pass\n    {how}*batch({number}{size}))\n    call(state_of)\n"
    return (f"{head}def entry(x, y):\n{lines}    return {rng.choice(RETURNS)}\n\n"
            f"def drive(compile_, call):\n    global model, ps, optimizer\n    fast = compile_(entry)\n{calls}"
            "    torch.set_grad_enabled(True)\n    torch.autograd.set_detect_anomaly(False)\n")
