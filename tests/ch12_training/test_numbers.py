"""Training steps in which tensors of a GPU meet numbers of the host: counters, learning rates. The GPU is pretended."""
import copy
import weakref

import pytest
import torch
from pretended import GPU, Backend, pretend
from recorders import FakeRecorder
from test_optimizers import TOLERANCE, batches, compare, network, training

import minicompile
from minicompile.ch01_graphs.fake import FakeMode, FakeTensor
from minicompile.ch01_graphs.trace import trace
from minicompile.ch02_guards import memory
from minicompile.ch06_decompositions.decompose import decompose
from minicompile.ch07_loops.lower import lower
from minicompile.ch08_fusion.fuse import fuse
from minicompile.ch11_runtime.host import compile_apart, compile_schedule
from minicompile.ch11_runtime.numbers import Ring, take_apart

pytestmark = pytest.mark.usefixtures("fresh")
CONFIGURATIONS = [("AdamW", {}), ("AdamW", dict(foreach=True)), ("SGD", dict(momentum=0.9)), ("AdamW", dict(fused=True)),
                  ("SGD", dict(fused=True, momentum=0.9)), ("RAdam", dict(foreach=True)), ("Adagrad", dict(lr_decay=0.1)),
                  ("NAdam", dict(foreach=True)), ("NAdam", dict(foreach=False))]


def start_as(net, optimizer, twin, other):
    """The step begins where eager is."""
    net.load_state_dict(twin.state_dict())
    for p, q in zip(net.parameters(), twin.parameters()):
        for key, value in other.state[q].items():
            if isinstance(value, torch.Tensor):
                optimizer.state[p][key].copy_(value)


@pytest.mark.parametrize("recorder", [None, FakeRecorder], ids=["launched", "recorded"])
@pytest.mark.parametrize("name,options", CONFIGURATIONS, ids=lambda v: v if isinstance(v, str) else "-".join(v) or "plain")
def test_steps_as_eager(name, options, recorder, monkeypatch):
    pretend(monkeypatch)
    net = network()
    twin = copy.deepcopy(net)
    make = lambda n: getattr(torch.optim, name)(n.parameters(), lr=0.01, **options)
    optimizer, other, backend = make(net), make(twin), Backend(recorder)
    compiled, eager = minicompile.compile(training(net, optimizer), backend=backend, fullgraph=True), training(twin, other)
    given = []
    for number, (x, y) in enumerate(batches(12 if name == "RAdam" else 7)):
        for o in (optimizer, other):
            o.param_groups[0]["lr"] *= 0.9
        found = [*compiled(x, y), *(p.grad for p in net.parameters())]
        torch.testing.assert_close(found[:2], list(eager(x, y)), **TOLERANCE)
        compare(net, optimizer, twin, other, f"step {number}")
        given.append((found, [t.clone() for t in found]))
        start_as(net, optimizer, twin, other)
    for found, before in given:
        assert all(map(torch.equal, found, before)), "a later call has overwritten what an earlier one gave"
    assert len(backend.compiled) == (2 if name == "RAdam" else 1)
    if recorder:
        *_, member = [m for graphs in backend.graphs for m in graphs.members]
        assert member.disabled is None and len(member.recordings) == 1, member.disabled
        assert member.counts["plain"] == 1 and member.counts["replayed"] >= 4
        recording, = member.recordings.values()
        numbers, batch = 1, 2
        assert len(recording.copied) == numbers + batch, "parameters and state are read where they are"


def nothing_known_of_holders():
    return memory.unchanged is None or memory.holders([torch.ones(1)]) is None


KEEPS = {"the tensor": lambda g: g, "a view": lambda g: g.view(-1)[1:], "detached": lambda g: g.detach(),
         "its memory": lambda g: g.untyped_storage(), "NumPy": lambda g: g.numpy(),
         "saved by autograd": lambda g: (torch.ones((), requires_grad=True) * g).sum()}


@pytest.mark.skipif(nothing_known_of_holders(), reason="the C extension is not built")
@pytest.mark.parametrize("keep", KEEPS)
def test_gradients_that_nobody_keeps_are_lent(keep, monkeypatch):
    """A step that begins with zero_grad() gives the recording's own tensors, until the caller has kept one, in any way."""
    pretend(monkeypatch)
    torch.manual_seed(0)
    net = network()
    twin = copy.deepcopy(net)
    make = lambda n: torch.optim.AdamW(n.parameters(), lr=0.01, foreach=True)
    optimizer, other, backend = make(net), make(twin), Backend(FakeRecorder)
    compiled, eager = minicompile.compile(training(net, optimizer), backend=backend, fullgraph=True), training(twin, other)

    def both(count):
        for x, y in batches(count):
            torch.testing.assert_close(compiled(x, y), eager(x, y), **TOLERANCE)
            compare(net, optimizer, twin, other, keep)
            start_as(net, optimizer, twin, other)

    both(4)
    *_, member = [m for graphs in backend.graphs for m in graphs.members]
    parameters = list(net.parameters())
    lent = [id(p.grad) for p in parameters]
    both(2)
    assert [id(p.grad) for p in parameters] == lent and member.counts["recorded"] == 1
    kept, as_it_was = KEEPS[keep](parameters[0].grad), parameters[0].grad.clone()
    address = parameters[0].grad.data_ptr()
    both(3)
    assert member.counts["recorded"] == 2 and member.disabled is None and member.counts["plain"] == 1
    assert all(p.grad.data_ptr() != address for p in parameters)
    again = KEEPS[keep](as_it_was)
    if keep == "its memory":
        kept, again = (torch.empty(0).set_(memory_of) for memory_of in (kept, again))
    elif keep == "saved by autograd":
        kept, again = (torch.autograd.grad(v, v.grad_fn.next_functions[0][0].next_functions[0][0].variable)[0] for v in (kept, again))
    assert torch.equal(torch.as_tensor(kept), torch.as_tensor(again))


@pytest.mark.skipif(nothing_known_of_holders(), reason="the C extension is not built")
@pytest.mark.parametrize("change", [
    lambda g: setattr(g, "note", 1), lambda g: g.requires_grad_(), lambda g: setattr(g, "data", torch.ones(g.shape)),
    lambda g: g.register_post_accumulate_grad_hook(print) if g.requires_grad_() is g else None, lambda g: setattr(g, "grad", g.clone()),
    lambda g: g.t_(), lambda g: g.__dict__.update(note=1)])
def test_what_a_caller_made_of_a_lent_tensor_is_seen(change):
    tensor = torch.ones(2, 3)
    tensor.__dict__ = {}
    tensors = [tensor]
    del tensor
    before = memory.holders(tensors)
    assert memory.holders(tensors) == before
    change(tensors[0])
    assert memory.holders(tensors) != before


@pytest.mark.skipif(nothing_known_of_holders(), reason="the C extension is not built")
def test_holders_come_and_go():
    tensors = [torch.ones(2, 3), torch.ones(4)]
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    for name, take in (*KEEPS.items(), ("", weakref.ref), ("", lambda t: [t]), ("", lambda t: setattr(parameter, "grad", t))):
        tensors[0] = torch.ones(2, 3)
        before = memory.holders(tensors)
        held = take(tensors[0])
        assert before is not None and memory.holders(tensors) != before
        del held
        parameter.grad = None
        assert name == "its memory" or memory.holders(tensors) == before        # PyTorch keeps the object for the memory
    one = torch.ones(4)
    view = one[:2]
    assert memory.holders([torch.ones(2).to_sparse()]) is memory.holders([view]) is None


def schedule_of(function, *args):
    """What is compiled for tensors with dims on a GPU; others, and those that `requires_grad` marks here, are on the CPU."""
    mode = FakeMode()
    fakes = [mode.from_real(a.detach()) for a in args]
    fakes = [f if a.requires_grad or not a.dim() else FakeTensor(f.meta, GPU) for a, f in zip(args, fakes)]
    return fuse(lower(decompose(trace(function, fakes))))


def on_cpu(t):
    return t.requires_grad_()


PROGRAMS = {
    "a counter": (lambda x, n: (x * (n + 1), n + 1), torch.randn(3, 4), torch.tensor(3.0)),
    "float64": (lambda x, n: (x * n,), torch.randn(3, 4), torch.tensor(1 / 3, dtype=torch.float64)),
    "an element": (lambda x, v: (x / v[1] + v[2],), torch.randn(3, 4), on_cpu(torch.tensor([1.0, 2.0, 3.0]))),
    "twice": (lambda x, n, m: (x * n - m, x.exp() * m), torch.randn(3, 4), torch.tensor(3.0), torch.tensor(0.25)),
    "padded": (lambda x, n: (torch.nn.functional.pad(x * n, (1, 1)), torch.where(x > n, n, x)), torch.randn(3, 4), torch.tensor(0.5)),
}


@pytest.mark.parametrize("language", ["cpp", "triton"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_reach_kernels(name, language, monkeypatch):
    pretend(monkeypatch, language)
    function, *args = PROGRAMS[name]
    schedule = schedule_of(function, *args)
    args = [a.detach() for a in args]
    expected = list(function(*[a.clone() for a in args]))
    for compiled in (compile_schedule(schedule, "default"), compile_apart(schedule, "default")):
        torch.testing.assert_close(compiled([a.clone() for a in args]), expected)
    assert all(b.device.type != "cpu" for b in compiled.parts.device.program.buffers.values())


def test_a_number_that_changes_after_it_was_read():
    """The host's part cannot run first."""
    def function(x, n):
        y = x * n
        n.copy_(n + 1)
        return y
    assert take_apart(schedule_of(lambda x, n: (x * (n + 1),), torch.randn(3), torch.tensor(2.0))) is not None
    from minicompile.ch05_autograd.joint import trace_joint
    graph = torch.fx.Graph()
    x, n = graph.placeholder("x"), graph.placeholder("n")
    n.meta["val"] = FakeMode().from_real(torch.tensor(2.0))
    x.meta["val"] = FakeTensor(torch.randn(3, device="meta"), GPU)
    graph.output((graph.call_function(function, (x, n)),))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    schedule = fuse(lower(decompose(trace_joint(gm, [x.meta["val"], n.meta["val"]]).gm)))
    assert take_apart(schedule) is None


def test_more_numbers_than_slots():
    ring = Ring(torch.device("cpu"), 2, slots=3)
    found = [ring.put([float(i), -float(i)]) for i in range(10)]
    assert [t.tolist() for t in found] == [[i, -i] for i in range(10)]
