"""Memory of a whole step: at most eager's, and at most that of the compiled model; what is checkpointed is computed again."""
import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import minicompile
from minicompile import logs
from minicompile.ch01_graphs.fake import FakeTensor
from minicompile.ch01_graphs.trace import trace
from minicompile.ch05_autograd.functionalize import functionalize_with_mutations
from minicompile.ch06_decompositions.decompose import decompose
from minicompile.ch07_loops.lower import lower
from minicompile.ch08_fusion.fuse import fuse
from minicompile.ch08_fusion.kernel import Kernel, KernelList
from minicompile.ch12_training.engine import gradients
from minicompile.ch12_training.memory import recompute_in_backward

pytestmark = pytest.mark.usefixtures("fresh")
aten = torch.ops.aten


class Block(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))) * 0.5)


class Net(torch.nn.Module):
    def __init__(self, checkpointed=False, width=16, depth=4):
        super().__init__()
        self.blocks, self.checkpointed = torch.nn.ModuleList(Block(width) for _ in range(depth)), checkpointed
        self.head = torch.nn.Linear(width, 5)

    def forward(self, x, y):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.cross_entropy(self.head(x), y)


def whole(net, run, optimizer):
    def step(x, y):
        loss = run(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()
    return step


def micro(net, run, optimizer):
    def step(x, y):
        total = 0.0
        for a, b in zip(x.chunk(4), y.chunk(4)):
            loss = run(a, b) / 4
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total
    return step


def peak(function, *args) -> int:
    """The most bytes that the CPU's allocator has given out at once during a call, above what was there before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function(*args)
    events = [(e.start_ns(), e.nbytes()) for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = top = 0
    for _, size in sorted(events, key=lambda event: event[0]):
        now += size
        top = max(top, now)
    assert top > 0
    return top


def measured(make, net):
    """Peaks of the third step in eager, with the model compiled, and as a whole; the last from eager's state, and with its loss."""
    x, y = torch.randn(32768, 16), torch.randint(0, 5, (32768,))            # what is computed is more than a megabyte
    found = {}
    for kind in ("eager", "model", "step"):
        own = copy.deepcopy(net)
        step = make(own, minicompile.compile(own) if kind == "model" else own, torch.optim.SGD(own.parameters(), lr=0.1))
        step = minicompile.compile(step, fullgraph=True) if kind == "step" else step
        losses = [step(x, y) for _ in range(2)]
        found[kind] = peak(step, x, y)
        torch.testing.assert_close(losses, found.setdefault("losses", losses))
    return found


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_whole_step_needs_no_more_than_its_parts(checkpointed):
    found = measured(whole, Net(checkpointed))
    assert found["step"] <= 1.01 * found["model"]
    assert checkpointed or found["step"] < 0.8 * found["eager"]


def test_checkpoints_save_memory_inside_of_one_graph():
    assert 1.5 * measured(whole, Net(True))["step"] < measured(whole, Net(False))["step"]


def test_micro_steps_do_not_add_up():
    assert (found := measured(micro, Net()))["step"] <= 1.01 * found["eager"]


def programs(f, *shapes):
    """The graph of `f` as the lower half gets it, before and after."""
    gm, _ = functionalize_with_mutations(trace(f, [FakeTensor(torch.empty(s, device="meta"), "cpu", True) for s in shapes]))
    return gm, recompute_in_backward(gm)


def chain(a, w):
    with torch.enable_grad():
        h = torch.sin(a).cos().exp()
        loss = (h @ w).sin().sum()
    return [loss.detach(), *gradients((loss,), (a, w), None, False, True)]


def test_cheap_values_are_computed_again_and_products_are_not():
    before, after = programs(chain, (64, 64), (64, 64))
    count = lambda gm, op: sum(n.target is op for n in gm.graph.nodes)
    assert count(after, aten.mm.default) == count(before, aten.mm.default) == 3
    assert {n.meta["turn"] for n in after.graph.nodes} == {0, 1, 2, 4}          # the output comes last
    again = [n for n in after.graph.nodes if n.meta["turn"] == 1]
    assert {n.target for n in again} <= {aten.sin.default, aten.cos.default, aten.exp.default, aten.neg.default}
    inputs = [torch.randn(64, 64), torch.randn(64, 64)]
    for one, other in zip(before(*inputs), after(*inputs)):
        assert torch.equal(one, other)


def test_each_of_two_passes_computes_its_own():
    def twice(a, w):
        found = []
        for k in (1, 2):
            with torch.enable_grad():
                loss = ((torch.sin(a) * k).exp() @ w).sin().sum()
            found += gradients((loss,), (a,), None, False, True)
        return found
    _, after = programs(twice, (64, 64), (64, 64))
    assert {1, 5} < {n.meta["turn"] for n in after.graph.nodes}


@pytest.mark.parametrize("backend", ["aot_eager", "decomposed"])
def test_what_backward_reads_of_a_tuple_that_forward_has_made(backend):
    cell = torch.nn.GRU(4, 4)                       # it writes to parts of a split, so the other parts are taken again in backward

    def step(x):
        cell.zero_grad()
        loss = cell(x)[0].pow(2).sum()
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in cell.parameters()]
    x = torch.randn(3, 2, 4)
    torch.testing.assert_close(minicompile.compile(step, backend=backend, fullgraph=True)(x), step(x))


def test_fusion_does_not_bring_them_together():
    """The product's operand is computed again, by a loop that reads what the original reads."""
    def marked(a, w):
        with torch.enable_grad():
            loss = (torch.relu(a) @ w).sin().sum()
        return [loss.detach(), *gradients((loss,), (w,), None, False, True)]
    gm, _ = programs(marked, (64, 64), (64, 64))
    gm = decompose(gm)
    for node in gm.graph.nodes:
        if node.target in (aten.maximum.default, aten.mm.default) and "backward" not in node.meta:
            node.meta["recompute"] = 1
    schedule = fuse(lower(recompute_in_backward(gm)))
    relus = [[loop.turn for loop in step.loops] for step in schedule.steps if isinstance(step, Kernel) and "maximum" in str(step.origins)]
    assert relus == [[0], [1]]
    assert any("computes again" in d.reason for d in schedule.decisions)


def test_a_list_that_would_cost_memory_does_not_keep_the_optimizer_from_being_one():
    """The sums that are the gradients of biases would have to wait for each other; the updates need no more than the norm does."""
    torch.manual_seed(0)
    net, seen = torch.nn.Sequential(*(m for _ in range(12) for m in (torch.nn.Linear(96, 96), torch.nn.Tanh()))), []
    optimizer, parameters = torch.optim.AdamW(net.parameters(), lr=1e-3), list(net.parameters())
    watch = lambda kind, **data: seen.append(data["schedule"]) if kind == "schedule" else None

    @minicompile.compile(fullgraph=True)
    def step(x):
        optimizer.zero_grad(set_to_none=True)
        net(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    logs.watchers.append(watch)
    try:
        step(torch.randn(2048, 96))
    finally:
        logs.watchers.remove(watch)
    (schedule,) = seen
    pieces = [p.kernel for s in schedule.steps if isinstance(s, KernelList) for p in s.pieces]
    updates = [k for k in pieces if sum("exp_avg" in n for n in k.inputs) == 2]
    assert len(updates) == len(parameters) and all(len(k.outputs) == 4 for k in updates)       # gradient, parameter, both moments
    alone = [s for s in schedule.steps if isinstance(s, Kernel) and not isinstance(s, KernelList)]
    assert sum(any(loop.reduction_vars for loop in k.loops) for k in alone) >= 10


@pytest.mark.parametrize("loss", [lambda v: v.amax(-1), lambda v: torch.where(v > 0, v, v * v).amax(-1), lambda v: v.amin(0),
                                  lambda v: v.norm(p=float("inf"), dim=-1), lambda v: v.sin().amin(-1)])
@pytest.mark.parametrize("shape", [(64, 1), (33, 64)])
def test_a_maximum_is_found_among_what_it_was_taken_from(loss, shape):
    """What is equal to it is asked in forward: computed again, from numbers that forward has rounded, nothing may be."""
    def step(x, c):
        w = (x - c) * -1.5
        total = w.sum()
        w = w * 2
        v = w.sin().detach().requires_grad_()
        return torch.autograd.grad((loss(v) ** 2).sum(), v)[0], w, total

    compiled = minicompile.compile(step, backend="cpp")
    torch.manual_seed(0)
    for _ in range(4):
        found, *_ = compiled(torch.randn(shape).bfloat16(), torch.randn(()))
        assert found.isfinite().all() and found.count_nonzero() >= min(shape)
