"""Whole training steps on a GPU, launched and replayed, beside eager: every step begins where eager's does."""
import copy

import pytest
import torch
import torch.nn.functional as F
from test_optimizers import training as plain

import minicompile
from minicompile import driver
from minicompile.ch11_runtime import cudagraphs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh")]
MODES = ["default", "reduce-overhead"]
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "single": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=False),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "capturable": lambda ps: torch.optim.AdamW(ps, lr=0.01, capturable=True),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=0.01, amsgrad=True, weight_decay=0.1),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01, lr_decay=0.1),
    "radam": lambda ps: torch.optim.RAdam(ps, lr=0.01),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=0.01),
    "fused sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, fused=True),
    "lr on the CPU": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.01), foreach=False),
    "lr on the GPU": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.01, device="cuda"), capturable=True),
    "lr on the GPU, fused": lambda ps: torch.optim.AdamW(ps, lr=torch.tensor(0.01, device="cuda"), fused=True),
}


def network():
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Linear(64, 8)).cuda()


def batch(size=32):
    return torch.randn(size, 16, device="cuda"), torch.randint(0, 8, (size,), device="cuda")


def stable(net, optimizer):
    def step(x, y):
        optimizer.zero_grad(set_to_none=False)
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()
    return step


def micro(net, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        for part, target in zip(x.split(16), y.split(16)):
            loss = F.cross_entropy(net(part), target) / 2
            loss.backward()
        optimizer.step()
        return loss.detach()
    return step


def autocast(net, optimizer):
    def step(x, y):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()
    return step


PROGRAMS = {"plain": plain} | {f.__name__: f for f in (stable, micro, autocast)}
TOLERANCE = dict(rtol=1e-3, atol=2e-4)
ROUGH = dict(rtol=0.1, atol=0.02)


def start_as(net, optimizer, twin, other):
    with torch.no_grad():
        for p, q in zip(net.parameters(), twin.parameters()):
            p.copy_(q)
            for key, value in other.state[q].items():
                if isinstance(value, torch.Tensor):
                    optimizer.state[p][key].copy_(value)


class Members:
    """The CUDA graphs that are made inside."""

    def __enter__(self):
        self.all, self.made = [], cudagraphs.GraphSet.wrap
        cudagraphs.GraphSet.wrap = lambda *args, **kwargs: self.all.append(self.made(*args, **kwargs)) or self.all[-1]
        return self

    def __exit__(self, *error):
        cudagraphs.GraphSet.wrap = self.made


def run(program, optimizer, mode, change=None, steps=6, rough=False):
    """Train six steps beside eager. Returns the CUDA graphs and how many graphs were compiled."""
    net = network()
    twin = copy.deepcopy(net)
    mine, other = OPTIMIZERS[optimizer](net.parameters()), OPTIMIZERS[optimizer](twin.parameters())
    before, given = driver.counters.graphs, []
    with Members() as members:
        compiled = minicompile.compile(PROGRAMS[program](net, mine), mode=mode, fullgraph=True)
        eager = PROGRAMS[program](twin, other)
        for number in range(steps):
            x, y = batch()
            if change:
                change(mine, number), change(other, number)
            found, expected = compiled(x, y), eager(x, y)
            tolerance = ROUGH if rough else TOLERANCE
            close = lambda a, b, what, **other: torch.testing.assert_close(
                a, b, **tolerance | other, msg=lambda m: f"step {number}, {what}: {m}")
            close(found, expected, "outputs")
            for (name, p), q in zip(net.named_parameters(), twin.parameters()):
                close(p.grad, q.grad, f"gradient of {name}")
                close(p, q, name, atol=tolerance["atol"] * 10)
                one, two = mine.state[p], other.state[q]
                assert one.keys() == two.keys()
                for key, value in two.items():
                    if isinstance(value, torch.Tensor):
                        assert one[key].device == value.device and one[key].dtype == value.dtype
                        close(one[key], value, f"{key} of {name}")
            kept = [*(found if isinstance(found, tuple) else [found]), *(p.grad for p in net.parameters() if program != "stable")]
            given.append((kept, [t.clone() for t in kept]))
            start_as(net, mine, twin, other)
    for kept, copies in given:
        assert all(map(torch.equal, kept, copies)), "a later call has overwritten what an earlier one gave"
    return members.all, driver.counters.graphs - before


def halve(optimizer, number):
    for group in optimizer.param_groups:
        lr = group["lr"]
        if isinstance(lr, torch.Tensor):
            lr.mul_(0.9)
        else:
            group["lr"] = lr * 0.9


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer, mode):
    members, graphs = run("plain", optimizer, mode, halve, steps=10 if optimizer == "radam" else 6)
    assert graphs == (2 if optimizer == "radam" else 1)
    if mode == "reduce-overhead":
        assert [m.disabled for m in members] == [None] * graphs
        assert members[-1].counts["recorded"] == 1 and members[-1].counts["replayed"] >= 3, members[-1].counts
        recording, = members[-1].recordings.values()
        assert len(recording.copied) <= 3, "parameters and state are read where they are"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("program", ["stable", "micro", "autocast"])
def test_programs(program, mode):
    members, _ = run(program, "adamw", mode, halve, rough=program == "autocast")
    if mode == "reduce-overhead":
        assert members[-1].disabled is None and members[-1].counts["replayed"] >= 3


@pytest.mark.parametrize("mode", MODES)
def test_a_loaded_state(mode):
    """Its tensors are elsewhere."""
    def reload(optimizer, number):
        if number == 4:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    members, _ = run("plain", "adamw", mode, reload, steps=9)
    if mode == "reduce-overhead":
        assert members[-1].disabled is None and members[-1].counts["replayed"] >= 5
        recording, = members[-1].recordings.values()
        assert len(recording.copied) <= 3, "they stay where they are now"


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_per_batch_size(mode):
    net = network()
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    compiled = minicompile.compile(plain(net, optimizer), mode=mode, dynamic=True)
    losses = [compiled(*batch(size))[0] for size in (32, 16, 32, 16, 32, 16, 32, 16)]
    assert all(loss.isfinite() for loss in losses) and optimizer.state[net[0].weight]["step"] == 8


def test_no_waiting(monkeypatch):
    """A replayed step does not ask the GPU anything."""
    net = network()
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    compiled, data = minicompile.compile(plain(net, optimizer), mode="reduce-overhead"), [batch() for _ in range(20)]
    for x, y in data[:6]:
        compiled(x, y)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x, y in data[6:]:
            compiled(x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")
