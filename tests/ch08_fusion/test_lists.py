"""Lists of tensors as one kernel: which loops become pieces, what they share, and that the numbers are eager's on every rung."""
import itertools

import pytest
import torch

import minicompile
from minicompile import logs
from minicompile.ch08_fusion.kernel import KernelList
from minicompile.ch08_fusion.lists import contract, levels, reorder
from minicompile.driver import counters
from tests.ch08_fusion.test_fuse import check, kernels

pytestmark = pytest.mark.usefixtures("fresh")
MIXED = [(3, 5), (64, 128), (1,), (), (0, 4), (1000,), (7,), (513, 9), (40000,), (33,)]


def tensors(shapes=MIXED, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=g).to(dtype) for s in shapes]


def lists(schedule):
    return [s for s in schedule.steps if isinstance(s, KernelList)]


def test_a_list_is_one_kernel_of_one_body():
    s = check(lambda *xs: [(x * 2 + 1).relu() for x in xs], tensors([(3, 5), (100,), (7, 11), (4096,), (2, 3, 4)]))
    (k,) = kernels(s)
    assert isinstance(k, KernelList) and len(k.pieces) == 5 and len(k.bodies) == 1
    assert [p.parameters for p in k.pieces] == [(15,), (100,), (77,), (4096,), (24,)]


def test_what_pieces_share_is_no_parameter():
    s = check(lambda *xs: [x.exp() for x in xs], tensors([(4, 4)] * 5))
    (k,) = lists(s)
    assert all(p.parameters == () for p in k.pieces) and k.bodies[0].vars[0].size == 16


def test_strides_are_parameters_and_contiguity_is_not():
    s = check(lambda *xs: [(x.t().sin() * 2).contiguous() for x in xs], tensors([(5, 8), (6, 9), (7, 10), (8, 11)]))
    (k,) = lists(s)
    (body,) = k.bodies
    indices = [v.index for loop in body.loops for v in loop.body if v.op == "load" or v.op == "store" and v.buffer in k.bodies[0].outputs]
    assert len(body.vars) == 2 and len(k.pieces) == 4
    for index in indices:                                       # one variable walks along memory, the other jumps by a parameter
        factors = sorted((1 if len(term) == 1 else 2) * factor for term, factor in index.terms.items())
        assert factors == [1, 2]


def test_a_list_knows_the_memory_of_which_it_writes_parts():
    def sums(*xs):
        return [torch.stack([x.sum() for x in xs])]
    shapes = [(n + 9, 5) for n in range(20)]
    assert lists(check(sums, tensors(shapes)))                  # `verify_schedule` looks

    gradients = []
    for f in (sums, minicompile.compile(sums)):
        weights = [x.requires_grad_() for x in tensors(shapes)]
        f(*weights)[0].sum().backward()
        gradients.append([w.grad for w in weights])
    torch.testing.assert_close(*gradients)


def test_dependent_loops_are_no_pieces_of_one_list():
    def chain(*xs):
        out = []
        for x in xs:
            x = torch.mm(x, x).sin()
            out.append(torch.mm(x, x).sin())
        return out
    s = check(chain, tensors([(n, n) for n in (3, 4, 5, 6)]))
    assert [len(k.pieces) for k in lists(s)] == [4, 4]


def test_few_loops_and_other_operations_stay_kernels():
    assert not lists(check(lambda *xs: [x.exp() for x in xs], tensors([(3,), (5,), (7,)])))
    s = check(lambda *xs: [x.exp() if x.dim() == 1 else x.sin() for x in xs], tensors([(3,), (4,), (5,), (6,), (2, 2), (3, 3)]))
    assert sorted(len(k.pieces) for k in lists(s)) == [4] and len(kernels(s)) == 3


def test_a_list_takes_no_memory_that_another_piece_still_reads():
    """Results may overwrite what dies here, piece by piece; `c` is read by two pieces."""
    def f(a, b, c, d, e):
        a, b, c, d, e = (torch.mm(x, x) for x in (a, b, c, d, e))
        return [a + c, b + a, c * 2 + b, d + e]
    check(f, tensors([(4, 4)] * 5))


def test_levels_are_an_order():
    """On random graphs: groups of equal level are independent, and contracted they leave no cycle."""
    for seed in range(50):
        g = torch.Generator().manual_seed(seed)
        before = {i: {j for j in range(i) if torch.rand((), generator=g) < 0.15} for i in range(30)}
        for members in (range(0, 30, 2), range(1, 30, 3)):
            members = {i for i in members if i in before}
            found = levels(before, members)
            reorder(before, found, members)
            groups = {}
            for i in sorted(members):
                groups.setdefault(found[i], []).append(i)
            for group in groups.values():
                contract(before, group)
        done, left = set(), set(before)
        while left:
            ready = {i for i in left if before[i] <= done}
            assert ready, "a cycle"
            done, left = done | ready, left - ready


# ---- numbers, on the rungs

RUNGS = ["loops", "cpp"]


def same_as_eager(fn, make, backend, **options):
    """The number of kernels, after two calls with values of their own."""
    compiled = minicompile.compile(fn, backend=backend, **options)
    for seed in (1, 2):
        ours, eager = make(seed), make(seed)
        torch.testing.assert_close(compiled(*ours), fn(*eager), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours, eager, rtol=1e-4, atol=1e-5)
    return counters.kernels


@pytest.mark.parametrize("backend", RUNGS)
def test_foreach_over_mixed_shapes_and_dtypes(backend):
    def step(xs, ys):
        torch._foreach_mul_(xs, 0.5)
        torch._foreach_add_(xs, ys, alpha=2)
        return torch._foreach_sqrt(torch._foreach_abs(ys))

    def make(seed):
        return [[t for d in (torch.float32, torch.bfloat16) for t in tensors(dtype=d, seed=s)] for s in (seed, seed + 10)]
    assert same_as_eager(step, make, backend) <= 5           # two dtypes, and tensors of one element


@pytest.mark.parametrize("backend", RUNGS)
def test_reductions_and_transpositions_in_lists(backend):
    shapes = [(n, 2 * n + 1) for n in (3, 40, 64, 7, 130)]

    def rows(*xs):
        return [x.softmax(-1) for x in xs], [x.amax(0) for x in xs], [x.t() + x.t().contiguous().sum() for x in xs], [x.norm() for x in xs]
    same_as_eager(rows, lambda seed: tensors(shapes, seed=seed), backend)


@pytest.mark.parametrize("backend", RUNGS)
def test_norms_of_many_tensors_are_a_list_that_writes_parts_of_one_buffer(backend):
    def clip(*xs):
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x) for x in xs]))
        torch._foreach_mul_(xs, (1 / (norm + 1e-6)).clamp(max=1.0))
        return norm, torch.cat([x.flatten() * 2 for x in xs])
    same_as_eager(clip, lambda seed: tensors([(n + 9, 5) for n in range(20)], seed=seed), backend)
    assert counters.kernels <= 8


@pytest.mark.parametrize("backend", RUNGS)
def test_one_tensor_twice_in_a_list_and_views_of_one(backend):
    def twice(xs):
        return torch._foreach_add([xs[0], xs[0], xs[1], xs[2], xs[2]], 1.0), torch._foreach_mul([x[1:] for x in xs], 2.0)
    same_as_eager(twice, lambda seed: [tensors([(50,), (9, 4), (300,), (8,)], seed=seed)], backend)

    def in_place(x):
        parts = [x[0:10], x[10:37], x[40:44], x[50:90], x[3:5]]          # the last is part of the first
        torch._foreach_add_(parts, 1.0)
        return x * 2
    same_as_eager(in_place, lambda seed: tensors([(100,)], seed=seed), backend)


def test_updates_of_one_tensor_are_one_loop_however_far_apart(monkeypatch):
    """`_foreach` operators go over all tensors one after the other: what happens to one tensor is spread over the program."""
    def step(ps, gs, ms):
        torch._foreach_mul_(ms, 0.5)
        torch._foreach_add_(ms, gs)
        torch._foreach_addcmul_(ps, gs, ms, value=-0.1)

    seen = []
    monkeypatch.setattr(logs, "watchers", [*logs.watchers, lambda kind, schedule=None, **data: seen.append(schedule)])
    same_as_eager(step, lambda seed: [tensors([(n % 7 + 2, 3) for n in range(110)], seed=seed + k) for k in range(3)], "loops")
    (k,) = next(s for s in seen if s is not None).steps
    assert len(k.pieces) == 110 and all(len(p.kernel.outputs) == 2 for p in k.pieces)


def test_updates_with_gradients_of_the_program_are_one_loop(monkeypatch):
    """New parameters are computed long before new momenta; both read gradients that somebody has made."""
    def step(ps, xs, ms):
        torch._fused_sgd_(ps, [x @ x for x in xs], ms, weight_decay=0.1, momentum=0.9, lr=0.1, dampening=0.0, nesterov=False,
                          maximize=False, is_first_step=False)

    seen = []
    monkeypatch.setattr(logs, "watchers", [*logs.watchers, lambda kind, schedule=None, **data: seen.append(schedule)])
    same_as_eager(step, lambda seed: [tensors([(n % 7 + 2, n % 7 + 2) for n in range(110)], seed=seed + k) for k in range(3)], "loops")
    *products, k = next(s for s in seen if s is not None).steps
    assert len(products) == 110 and len(k.pieces) == 110 and all(len(p.kernel.outputs) == 2 for p in k.pieces)


def test_adamw_over_a_model_is_one_loop_on_a_cpu():
    shapes = [(64, 16), (16,), (48, 16), (48,), (1,), (16, 64), (64,), (7,), (), (33, 3)]
    for foreach, steps in itertools.product((True, False), (3,)):
        def make():
            ps = [torch.nn.Parameter(t) for t in tensors(shapes)]
            return ps, torch.optim.AdamW(ps, lr=1e-2, foreach=foreach)
        (ours, first), (eager, second) = make(), make()
        step = minicompile.compile(lambda: first.step(), fullgraph=True)
        for s in range(steps):
            for k, (p, q) in enumerate(zip(ours, eager)):
                p.grad = torch.full_like(p, 0.1 * (k + s - 4))
                q.grad = p.grad.clone()
            before = counters.kernels
            step()
            second.step()
            assert counters.kernels - before <= 3             # one list, and the two parameters of one element
            torch.testing.assert_close(ours, eager)
            for p, q in zip(ours, eager):
                torch.testing.assert_close(first.state[p], second.state[q])


def test_lists_in_the_explorer_and_as_triton():
    """A list is shown like any kernel, also in the language that it does not run in."""
    from minicompile.ch09_triton.emit import emit_triton
    from minicompile.tools.explore import recording
    s = check(lambda *xs: [x.exp() for x in xs], tensors([(3,), (4,), (50, 2), (1000,)]))
    source = emit_triton(lists(s)[0])
    assert "tl.load(pieces + tl.program_id(0))" in source.code and [n for n, _, _ in source.options["pieces"]] == [1, 1, 1, 8]
    both = check(lambda *xs: [x.exp() for x in xs[:4]] + [x.sin() for x in xs[4:]], tensors([(n,) for n in range(3, 11)]))
    assert len(lists(both)[0].bodies) == 2 and "different bodies" in recording.generated("triton", lists(both)[0])
