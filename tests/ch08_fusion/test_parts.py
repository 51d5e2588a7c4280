"""The parts of the fusion stage on their own: accesses, alignment of nests, dead code, order, memory."""
import random

import pytest
import torch

from minicompile.ch01_graphs.symbolic import Symbol, evaluate, product, substitute
from minicompile.ch07_loops.builder import Builder, normal
from minicompile.ch07_loops.ir import Buffer, Extern, Layout, Loop, Program, View
from minicompile.ch07_loops.verify import print_loop
from minicompile.ch08_fusion.build import rewrite
from minicompile.ch08_fusion.dependencies import dependency_edges, remove_dead, storage_size
from minicompile.ch08_fusion.fuse import fuse
from minicompile.ch08_fusion.groups import FusionOptions
from minicompile.ch08_fusion.iteration import Space, combine, merge_dims, segments_by_access, segments_in_order
from minicompile.ch08_fusion.kernel import Kernel
from minicompile.ch08_fusion.memory import overwrites_safely
from minicompile.ch08_fusion.reference import verify_schedule
from minicompile.ch11_runtime.host import compile_schedule

F32, CPU = torch.float32, torch.device("cpu")
aten = torch.ops.aten


def dims(letter, *sizes):
    return tuple(Symbol(f"{letter}{k}", n) for k, n in enumerate(sizes))


def index(variables, strides, offset=0):
    return sum((v.expr * s for v, s in zip(variables, strides)), offset)


def points(variables):
    values = [{}]
    for v in variables:
        values = [{**p, v.name: i} for p in values for i in range(v.size)]
    return values


def buffers(**sizes):
    out = {}
    for name, size in sizes.items():
        alias = None
        if isinstance(size, str):
            alias, size = size, out[size].layout.size
        stride, running = [], 1
        for n in reversed(size):
            stride.insert(0, running)
            running *= n
        out[name] = Buffer(name, F32, CPU, Layout(tuple(size), tuple(stride)), alias)
    return out


def loop(name, size, sources, target, op="add"):
    v, b = Symbol("i0", size), Builder()
    b.store(target, v.expr, b.op(op if len(sources) > 1 else "neg", *(b.load(s, v.expr, F32) for s in sources)))
    return Loop(name, (v,), (), tuple(b.stores))


def call(name, op, sources, target, bufs, **kw):
    return Extern(name, op, tuple(View(s, bufs[s].layout) for s in sources), {}, (target,), **kw)


def test_a_body_is_what_its_stores_need_and_rewrite_makes_another():
    (v,), b = dims("i", 8), Builder()
    b.op("exp", b.load("x", v.expr, F32))                                     # nobody needs it
    b.indirect(b.load("other", v.expr, torch.int64), 5)                       # nor that
    row = b.indirect(b.load("idx", v.expr, torch.int64), 5, wrap=False)
    b.store("y", v.expr, b.load("x", row * 8 + v.expr, F32), "atomic_add")
    first = Loop("l", (v,), (), tuple(b.stores))
    assert [x.op for x in first.body] == ["load", "indirect", "load", "store"] and first.outputs == ("y",)
    assert [(x.buffer, x.anywhere) for x in first.loads] == [("idx", False), ("x", True)] and first.stores[0].mode == "atomic_add"
    i, j = dims("j", 2, 4)
    second = Loop("l", (i, j), (), rewrite(first.stores, {v: i.expr * 4 + j.expr}, {"x": "in0"}))
    assert print_loop(second).splitlines()[1:] == [
        "    v0: i64 = load idx[4*j0 + j1]", "    v1: i64 = indirect(v0, at0, 5)", "    v2: f32 = load in0[8*at0 + 4*j0 + j1]",
        "    y[4*j0 + j1] += v2"]
    assert [x.op for x in first.body] == ["load", "indirect", "load", "store"] and first.loads[1].buffer == "x"


@pytest.mark.parametrize("a, b, expected", [((8, 64), (512,), (8, 64)), ((512,), (8, 64), (8, 64)), ((2, 12), (6, 4), (2, 3, 4)),
                                            ((6, 4), (4, 6), None), ((3, 5), (3, 5), (3, 5)), ((), (), ())])
def test_refinement_in_order(a, b, expected):
    a, b = dims("i", *a), dims("j", *b)
    segments = segments_in_order(a, b)
    if expected is None:
        assert segments is None
        return
    found = combine(Space(a, ()), segments, b)
    assert tuple(d.size for d in found.space.vars) == expected and not found.permuted
    flat_a, flat_b = (index(d, [product(x.size for x in d[k + 1:]) for k in range(len(d))]) for d in (a, b))
    assert substitute(flat_a, found.a) == substitute(flat_b, found.b)


@pytest.mark.parametrize("seed", range(20))
def test_alignment_by_access_visits_the_same_elements(seed):
    rng = random.Random(seed)
    factors = [rng.choice([2, 3, 4]) for _ in range(4)]
    strides = [24 * 7, 1, 24, 600]
    def nest(letter):
        order = list(range(4))
        rng.shuffle(order)
        v = dims(letter, *[factors[k] for k in order])
        return v, index(v, [strides[k] for k in order])
    (a, index_a), (b, index_b) = nest("i"), nest("j")
    found = combine(Space(a, ()), segments_by_access(index_a, a, index_b, b), b)
    assert substitute(index_a, found.a) == substitute(index_b, found.b)


def test_no_common_nest_of_an_empty_and_a_symbolic_dimension():
    """A size that is 0 divides nothing, whatever the other one will be."""
    n = Symbol("n", None, 2, hint=8).expr
    rows, none = dims("i", n, 4), dims("j", 0, 4)
    for a, b in ((rows, none), (none, rows)):
        assert segments_in_order(a, b) is None
        assert segments_by_access(index(a, [4, 1]), a, index(b, [4, 1]), b) is None


def test_dims_merge_only_where_every_index_allows():
    a, b, c = dims("i", 4, 6, 8)
    contiguous, bias, rows = index((a, b, c), (48, 8, 1)), c.expr, index((a, b), (6, 1))
    assert [d.size for d in merge_dims((a, b, c), [contiguous], "i")[0]] == [192]
    assert [d.size for d in merge_dims((a, b, c), [contiguous, bias], "i")[0]] == [24, 8]
    assert [d.size for d in merge_dims((a, b, c), [contiguous, bias, rows], "i")[0]] == [24, 8]
    assert [d.size for d in merge_dims((a, b, c), [index((a, b, c), (1, 4, 24))], "i")[0]] == [4, 6, 8]
    wrapped = (index((a, b), (6, 1))) % 8
    for indices in ([contiguous], [contiguous, wrapped], [contiguous // 16, wrapped]):
        new, mapping = merge_dims((a, b, c), indices, "m")
        for e in indices:
            seen = sorted(evaluate(e, p) for p in points((a, b, c)))
            assert seen == sorted(evaluate(substitute(e, mapping), p) for p in points(new))


def test_storage_size_counts_to_the_last_element():
    assert storage_size(Buffer("x", F32, CPU, Layout((3, 4), (10, 1)))) == 24
    assert storage_size(Buffer("x", F32, CPU, Layout((0, 4), (4, 1)))) == 0
    assert storage_size(Buffer("x", F32, CPU, Layout((), ()))) == 1


def test_dead_nodes_go_and_owned_memory_stays():
    bufs = buffers(x=(8,), a=(8,), b=(8,), c=(8,), x2="x")
    nodes = [loop("l1", 8, ["x"], "a"), loop("l2", 8, ["a"], "b"), loop("l3", 8, ["x"], "c"), loop("l4", 8, ["a"], "x2")]
    p = Program(["x"], bufs, nodes, [])
    assert [n.name for n in remove_dead(p)] == ["l1", "l4"]


def edges_of(nodes, bufs):
    return dependency_edges(dict(enumerate(nodes)), bufs)


def test_random_calls_are_kept_and_ordered():
    bufs = buffers(x=(8,), a=(8,), b=(8,), c=(8,))
    nodes = [call("r1", aten.bernoulli.default, ["x"], "a", bufs), call("r2", aten.bernoulli.default, ["x"], "b", bufs),
             loop("l", 8, ["b"], "c")]
    p = Program(["x"], bufs, nodes, [View("c", bufs["c"].layout)])
    assert edges_of(nodes, bufs)[1] == {0}
    assert [s.name for s in fuse(p).steps][:2] == ["r1", "r2"]


def test_updates_come_after_readers_even_of_old_aliases():
    bufs = buffers(x=(8,), a=(8,), b=(8,), x1="x", x2="x1")
    nodes = [loop("read", 8, ["x"], "a"), loop("u1", 8, ["a"], "x1"), loop("read1", 8, ["x1"], "b"), loop("u2", 8, ["b"], "x2")]
    edges = edges_of(nodes, bufs)
    assert edges[1] == {0} and edges[2] == {1} and {0, 1, 2} <= edges[3]


def test_scattered_writes_end_a_kernel():
    bufs = buffers(i=(8,), x=(8,), z=(8,), y=(8,), z2="z")
    bufs["i"] = Buffer("i", torch.int64, CPU, Layout((8,), (1,)))
    (v,) = dims("i", 8)
    b, c = Builder(), Builder()
    b.store("z", v.expr, b.constant(0.0, F32))
    fill = Loop("fill", (v,), (), tuple(b.stores))
    c.store("z2", c.indirect(c.load("i", v.expr, torch.int64), 8), c.load("x", v.expr, F32), "atomic_add")
    scatter = Loop("scatter", (v,), (), tuple(c.stores))
    p = Program(["i", "x"], bufs, [fill, scatter, loop("use", 8, ["z2"], "y")], [View("y", bufs["y"].layout)])
    s = fuse(p)
    verify_schedule(s)
    assert len(s.steps) == 3
    i, x = torch.tensor([0, 0, 1, 7, 7, 7, 2, 3]), torch.randn(8)
    torch.testing.assert_close(compile_schedule(s, "loops")([i, x])[0], -torch.zeros(8).index_add(0, i, x))


def test_something_in_between_prevents_a_cycle():
    bufs = buffers(x=(8,), a=(8,), m=(8,), y=(8,))
    nodes = [loop("l1", 8, ["x"], "a"), call("sin", aten.sin.default, ["a"], "m", bufs), loop("l2", 8, ["a", "m"], "y")]
    s = fuse(Program(["x"], bufs, nodes, [View("y", bufs["y"].layout)]))
    assert len(s.steps) == 3
    assert any("between" in d.reason for d in s.decisions)


def test_limits_are_respected_and_fusion_can_be_off():
    names = {f"b{k}": (8,) for k in range(20)}
    bufs = buffers(x=(8,), **names)
    nodes = [loop(f"l{k}", 8, ["x" if k == 0 else f"b{k - 1}"], f"b{k}") for k in range(20)]
    p = Program(["x"], bufs, nodes, [View("b19", bufs["b19"].layout)])
    assert len(fuse(p).steps) == 1
    assert len(fuse(p, FusionOptions(enabled=False)).steps) == 20
    limited = fuse(p, FusionOptions(max_loops=5))
    assert max(len(k.loops) for k in limited.steps) <= 5


def test_in_place_needs_the_same_index_and_no_later_reader():
    bufs = buffers(x=(8,), y=(8,), z=(8,), w=(8,))
    def kernel(*nodes, outputs):
        s = fuse(Program(["x", "w"], bufs, list(nodes), [View(o, bufs[o].layout) for o in outputs]))
        assert len(s.steps) == 1
        return s.steps[0]
    k = kernel(loop("a", 8, ["x"], "y"), loop("b", 8, ["y"], "z"), outputs=["y", "z"])
    assert overwrites_safely(k, "x", "y") and overwrites_safely(k, "x", "z")
    k = kernel(loop("a", 8, ["x"], "y"), loop("b", 8, ["y", "x"], "z"), outputs=["y", "z"])
    assert not overwrites_safely(k, "x", "y") and overwrites_safely(k, "x", "z")


def test_in_place_counts_walks_as_well_as_loops():
    """Triton stores in the first walk that knows the value, before a loop that is earlier in the kernel but waits for a sum; C++ and
    the interpreter store in the order of the loops."""
    r = Symbol("r0", 8)
    bufs = buffers(x=(8,), y=(8,), z=(8,), t=(8,), u=(8,), v=(8,), s=())

    def element(name, sources, target):
        b = Builder()
        b.store(target, r.expr, b.op("add", *(b.load(n, 0 if n == "s" else r.expr, F32) for n in sources)))
        return Loop(name, (), (r,), tuple(b.stores))

    b = Builder()
    b.store("s", 0, b.make("reduce", ("sum", b.load("t", r.expr, F32), None), F32))
    total = Loop("total", (), (r,), tuple(b.stores))

    def kernel(*loops):
        return Kernel("k", torch.device("cpu"), (), (r,), list(loops), frozenset("ts"), bufs, ("x",), ("y", "z"))
    t, y, z = element("t", "xx", "t"), element("y", "tt", "y"), element("z", "ts", "z")
    assert overwrites_safely(kernel(t, total, y, z), "x", "z") and not overwrites_safely(kernel(t, total, z, y), "x", "z")
    assert not overwrites_safely(kernel(t, total, y, z), "x", "y") and not overwrites_safely(kernel(t, total, z, y), "x", "y")
    # what was summed over dims of size 1 is there at once; and of two stores of a loop one may be early, the other late
    b = Builder()
    b.store("u", r.expr, b.make("reduce", ("sum", b.load("t", r.expr, F32), None), F32))
    of_one = Loop("of_one", (r,), (), tuple(b.stores))
    b = Builder()
    b.store("y", r.expr, b.load("t", r.expr, F32))
    b.store("v", r.expr, b.load("s", 0, F32))
    both = Loop("both", (r,), (), tuple(b.stores))
    for late in (both, element("y", "uu", "y")):
        assert not overwrites_safely(kernel(t, total, of_one, z, late), "x", "y")


def test_the_order_frees_early():
    """Two large values that are reduced at once should not be alive together."""
    bufs = buffers(x=(1000,), a=(1000,), b=(1000,), c=(1000,), sa=(), sb=(), sc=(), s1=(), s=())
    nodes = [call(f"make_{n}", aten.sin.default, ["x"], n, bufs) for n in "abc"]
    nodes += [call(f"sum_{n}", aten.sum.default, [n], f"s{n}", bufs) for n in "abc"]
    nodes += [call("add", aten.add.Tensor, ["sa", "sb"], "s1", bufs), call("add2", aten.add.Tensor, ["s1", "sc"], "s", bufs)]
    s = fuse(Program(["x"], bufs, nodes, [View("s", bufs["s"].layout)]))
    assert s.plan.peak < 2 * 4000
    x = torch.randn(1000)
    torch.testing.assert_close(compile_schedule(s, "loops")([x])[0], 3 * x.sin().sum())


def test_normal_form_joins_remainder_and_quotient():
    (x,) = dims("i", 128)
    e = (x.expr % 32) * 256 + (x.expr // 32) * 8192 + 3
    assert normal(e) == x.expr * 256 + 3
    for other in ((x.expr % 32) * 256 + (x.expr // 32) * 4096, (x.expr % 32) * 256, (x.expr % 32) * 2 + (x.expr // 16) * 64):
        assert normal(other) == other
