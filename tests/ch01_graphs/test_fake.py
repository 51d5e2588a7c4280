"""Fakes agree with eager on metadata and aliasing; traced graphs run to eager's numbers, for other sizes too."""

import contextlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from minicompile.ch01_graphs import composites, recipes, refusals
from minicompile.ch01_graphs.composites import cast_as_autocast, with_symbols
from minicompile.ch01_graphs.fake import FakeMode, FakeTensor, storage_key
from minicompile.ch01_graphs.graph import interpret, print_graph
from minicompile.ch01_graphs.layouts import same_layout
from minicompile.ch01_graphs.operators import DataDependent, run_on_fakes
from minicompile.ch01_graphs.recipes import fake_call
from minicompile.ch01_graphs.shapes import ShapeEnv, expr_of
from minicompile.ch01_graphs.symbolic import evaluate
from minicompile.ch01_graphs.trace import trace
from minicompile.errors import Unsupported
from tests.opinfo import OPERATORS, samples_of, tensors_of


def metadata(t):
    return tuple(t.shape), t.stride(), t.storage_offset(), t.dtype, t.device, t.requires_grad


FUNCTIONS = [
    lambda x: x.t()[1:].reshape(-1), lambda x: x.to(torch.bfloat16).sum(0), lambda x: x.expand(3, *x.shape)[..., ::2],
    lambda x: F.softmax(x, -1).argmax(1), lambda x: x.unsqueeze(0).permute(2, 0, 1).contiguous(), lambda x: x.view(torch.int32),
    lambda x: torch.arange(5, device=x.device) + x[0, 0].long(), lambda x: torch.cat([x, x * 2], 1).chunk(2)[1],
    lambda x: x[[0, 2]], lambda x: x.new_zeros(2, 3), lambda x: (x > 0).any(), lambda x: x.masked_fill(x > 0, 1.0),
    lambda x: x[:, :1].norm(p=1, dim=-1), lambda x: torch._standard_gamma(x.abs()),
    lambda x: torch._standard_gamma(x.t().abs()), lambda x: torch._sample_dirichlet(x.t().abs()),
    lambda x: torch.binomial(x.t().abs().floor(), torch.sigmoid(x.t())),
]


@pytest.mark.parametrize("index", range(len(FUNCTIONS)))
def test_metadata_equals_eager(index):
    x = torch.randn(4, 6, requires_grad=True)
    mode = FakeMode()
    with mode:
        fake = FUNCTIONS[index](mode.from_real(x))
    assert isinstance(fake, FakeTensor)
    assert metadata(fake) == metadata(FUNCTIONS[index](x))


def test_aliasing_is_kept():
    base = torch.zeros(4, 6)
    mode = FakeMode()
    a, b, c = mode.from_real(base), mode.from_real(base[1:]), mode.from_real(torch.zeros(4, 6))
    assert storage_key(a) == storage_key(b) != storage_key(c)
    assert metadata(b) == metadata(base[1:])
    with mode:
        view = a.t()
        assert storage_key(view) == storage_key(a)
        assert a.add_(1) is a
        assert storage_key(a + 1) != storage_key(a)
    assert mode.from_real(base) is a


def test_data_dependent_results_are_refused():
    mode = FakeMode()
    x = mode.from_real(torch.ones(3))
    def write(place, value):
        y = (x * torch.ones(2, 1)).clone()
        y[place] = value
        return y.shape

    with mode:
        mask = x > 0
        for use in (lambda: x.sum().item(), lambda: x.nonzero(), lambda: x[mask], lambda: bool(x[0] > 0),
                    lambda: write((slice(None), mask), x), lambda: write((0, mask), x), lambda: x.index_put((mask,), x),
                    lambda: write(mask.expand(2, 3), x)):
            with pytest.raises(DataDependent):
                use()
        assert write(mask[:2], x) == write((slice(None), mask), x[:2, None]) == write(mask.expand(2, 3), 2.0) == (2, 3)


def block(x, w):
    batch, time, width = x.shape
    y = F.gelu(with_symbols(torch.matmul, x, w.t())).view(batch, time, 4, width // 4).transpose(1, 2)
    y = F.scaled_dot_product_attention(y, y, y, is_causal=True)
    y = F.layer_norm(y.transpose(1, 2).reshape(batch, time, width), (width,)) + torch.arange(time)[:, None]
    y.mul_(2)
    loss = y.square().mean()
    return [loss, *torch.autograd.grad(loss, [x, w])]


def test_one_symbolic_trace_serves_all_sizes():
    env, mode = ShapeEnv(), FakeMode()
    b, t = env.create(4), env.create(8)
    x, w = torch.randn(4, 8, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
    gm = trace(lambda b, t, x, w: block(x, w), [b, t, mode.from_real(x, (b, t, 16)), mode.from_real(w)])
    assert "s0" in print_graph(gm)
    for batch, time in ((4, 8), (5, 3), (2, 17)):
        x = torch.randn(batch, time, 16, requires_grad=True)
        got = interpret(gm, [batch, time, x.detach(), w.detach()])
        torch.testing.assert_close(list(got), block(x, w))
        assert all(eval(g.text(), {}, {"s0": batch, "s1": time}) for g in env.guards)


def test_a_branch_on_a_size_becomes_a_guard():
    env = ShapeEnv()
    s = env.create(10)
    assert s * 2 > 3 and not env.guards, "bounds decide this one"
    assert s % 2 == 0
    assert [g.text() for g in env.guards] == ["s0 % 2 == 0"]
    assert int(s) == 10 and any(g.text() == "s0 == 10" for g in env.guards)
    assert evaluate(expr_of(s * 3 + 1), {"s0": 10}) == 31
    assert env.create(1) == 1 and not isinstance(env.create(1), torch.SymInt)


def test_backward_nodes_know_the_forward_line():
    mode = FakeMode()
    x = mode.from_real(torch.randn(3, requires_grad=True))
    from minicompile.ch01_graphs.graph import Location
    from minicompile.ch01_graphs.trace import Recorder
    recorder = Recorder()
    recorder.placeholder("x", x)
    with recorder:
        recorder.provenance = (Location("model.py", 7, "forward"), ("sin",))
        y = x.sin()
        recorder.remember_grad_fns(y)
        recorder.provenance = (None, ())
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    gm = recorder.finish([grad])
    cos = next(n for n in gm.graph.nodes if n.target is torch.ops.aten.cos.default)
    assert str(cos.meta["location"]) == "model.py:7 in forward" and cos.meta["origins"] == ("sin",)


def test_what_only_the_kernel_refuses():
    """Dtypes without a kernel, and writing what is also read, though the meta kernels take both."""
    mode = FakeMode()
    ints, square = mode.from_real(torch.ones(2, 3).long()), mode.from_real(torch.arange(9.0).reshape(3, 3))
    row = mode.from_real(torch.arange(3.0)).expand(3, 3)
    with mode:
        assert mode.from_real(torch.ones(0, 3).long()).softmax(-1).shape == (0, 3)          # nothing is computed
        for _ in range(2):
            with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
                ints.softmax(-1)
        assert ints.float().softmax(-1).shape == (2, 3) and square.add_(square) is square
        with pytest.raises(RuntimeError, match="refer to a single memory location"):
            square.sub_(square.t())
        with pytest.raises(RuntimeError, match="refers to a single memory location"):
            row.add_(1)
        assert square[0].copy_(square[1]).shape == (3,)


def test_asking_the_kernel_fixes_no_size():
    env, mode = ShapeEnv(), FakeMode()
    x = mode.from_real(torch.ones(4, 3, dtype=torch.int32), (env.create(4), 3))
    with mode:
        y = (x * 2).float().softmax(-1)
        x.add_(1)
    assert isinstance(y.shape[0], torch.SymInt) and not env.guards


OPERANDS = {"B": torch.tensor([True, False]), "I": torch.ones(2, 2, dtype=torch.int64), "I8": torch.ones(2, 2, dtype=torch.int8),
            "X": torch.ones(2, 2), "H": torch.ones(2, 2).bfloat16()}


def evaluate_text(text, operands):
    return eval(text, {"torch": torch}, operands)


REFUSED = {
    "number minus bools": "True - B", "one minus bools": "1 - B", "bools minus bools": "B - B",
    "argmax of bools": "B.argmax()", "celu": "torch.celu(X, 0.0)", "celu_": "X.double().celu_(0)",
    "topk of bools": "B.topk(1)", "relu of bools": "B.relu()",
    "variance of integers": "I.var()", "index of small integers": "X.index_select(0, I8[0])",
    "index_add of another index": "X.index_add(0, I8[0], X)", "index_copy of int32": "X.index_copy(0, I[0].int(), X)",
    "put of bools": "X.put(B, X[0])", "norm of two dtypes": "torch.layer_norm(X.double(), (2,), X[0])",
    "cross of two dtypes": "torch.cdist(X.double(), X)", "entropy of two dtypes": "torch.binary_cross_entropy_with_logits(B, X)",
    "addcdiv of integers": "torch.addcdiv(I, I, I)", "value of uint8": "torch.full_like(I8.to(torch.uint8), -300)",
    "beyond the memory": "X.as_strided((3, 3), (2, 1))", "two dtypes in index_put": "X.index_put((I[0],), H[0])",
    "float as result of integers": "I.clone().add_(0.5)", "division of integers in place": "I.clone().div_(2)",
    "multiples of bools": "B.add(B, alpha=1.5)", "multiples of integers": "I.clone().add_(I, alpha=1.5)",
    "complex multiples": "X.sub(X, alpha=1j)",
    "integers to bool": "B.clone().add_(I[0])", "negative power of integers": "I ** -1",
    "dim": "X.sum(2)", "select": "X[2]", "product": "X @ torch.ones(3, 2)",
    "view": "X.t().view(-1)", "bits of a bool": "~X", "shift of floats": "X << 1",
    "a larger kernel": "torch.conv2d(X[None, None], X[None, None, :, :1].expand(1, 1, 2, 3), stride=2)",
    "padding of an output": "torch.conv_transpose1d(X[None], X[None], None, 1, 0, 1)"}


@pytest.mark.parametrize("name", REFUSED)
def test_fakes_refuse_what_eager_refuses(name):
    with pytest.raises(Exception) as expected:
        evaluate_text(REFUSED[name], OPERANDS)
    mode = FakeMode()
    fakes = {name: mode.from_real(x) for name, x in OPERANDS.items()}
    with mode, pytest.raises(type(expected.value)):
        evaluate_text(REFUSED[name], fakes)


SIZES = (), (1,), (3,), (0,), (2, 3), (1, 3), (0, 3)
OF_SIZES = {
    "put": lambda x, i, y: x.put(i, y), "index_add": lambda x, i, y: x.index_add(0, i, y),
    "index_copy": lambda x, i, y: x.index_copy(-1, i, y), "index_reduce": lambda x, i, y: x.index_reduce(0, i, y, "mean"),
    "index_select": lambda x, i, y: x.index_select(-1, i), "index_fill": lambda x, i, y: x.index_fill(0, i, y),
    "index_put": lambda x, i, y: x.index_put((i,), y), "index": lambda x, i, y: torch.ops.aten.index.Tensor(x, [i]),
    "scatter": lambda x, i, y: x.scatter(0, i, y), "scatter_add": lambda x, i, y: x.scatter_add(-1, i, y),
    "take": lambda x, i, y: x.take(i), "scatter_reduce": lambda x, i, y: x.scatter_reduce(0, i, y, "sum"),
    "gather": lambda x, i, y: x.gather(-1, i), "masked_scatter": lambda x, i, y: x.masked_scatter(i > 0, y),
    "masked_fill": lambda x, i, y: x.masked_fill(i > 0, y), "embedding": lambda x, i, y: F.embedding(i, x),
    "nll_loss": lambda x, i, y: F.nll_loss(x.reshape(1, -1), i, y), "soft_margin_loss": lambda x, i, y: F.soft_margin_loss(x, y),
    "searchsorted": lambda x, i, y: torch.searchsorted(x, y), "bucketize": lambda x, i, y: torch.bucketize(x, y),
    "max": lambda x, i, y: x.max(), "max of rows": lambda x, i, y: x.max(-1), "median": lambda x, i, y: x.median(0),
    "mode": lambda x, i, y: x.mode(-1), "kthvalue": lambda x, i, y: x.kthvalue(1), "argmax": lambda x, i, y: x.argmax(0),
    "prelu": lambda x, i, y: F.prelu(x, y), "lerp": lambda x, i, y: x.lerp(y, y), "cross": lambda x, i, y: torch.linalg.cross(x, y),
    "addmv": lambda x, i, y: torch.addmv(x, y, y), "trapezoid": lambda x, i, y: torch.trapezoid(x, y),
    "renorm": lambda x, i, y: x.renorm(2, 0, 1.0),
    "affine_grid": lambda x, i, y: torch.affine_grid_generator(
        torch.ones(x.dim(), 2, 3).bfloat16(), [x.dim(), 1, *[*x.shape, 2, 2][:2]], True)}


@pytest.mark.parametrize("name", "bitwise_xor_ __iand__ eq_ clamp_ floor_divide_ pow_ add_ gcd_ bitwise_left_shift_".split())
def test_a_write_of_operands_that_are_too_large(name):
    """Meta kernels resize what they write to, which the program may use afterwards."""
    for shape in ((3,), (0,), (1, 3)):
        x, mode = torch.ones(shape, dtype=torch.int64), FakeMode()
        with mode:
            fake, other = mode.from_real(x), torch.ones(4, shape[-1], dtype=torch.int64)
            with pytest.raises(RuntimeError, match="broadcast"):
                getattr(fake, name)(other)
            assert fake.add(1).shape == fake.meta.shape == shape


@pytest.mark.parametrize("name", OF_SIZES)
def test_fakes_refuse_the_sizes_that_eager_refuses(name):
    """Also where the meta kernel takes them; and nothing else is refused, whichever sizes came before."""
    mode = FakeMode()

    def outcome(tensors):
        try:
            OF_SIZES[name](*tensors)
            return "returned"
        except Exception:
            return "raised"

    differ = []
    for sizes in itertools.product(SIZES, repeat=3):
        tensors = [torch.ones(sizes[0]), torch.zeros(sizes[1], dtype=torch.int64), torch.ones(sizes[2])]
        with mode:
            fakes = outcome([mode.from_real(t) for t in tensors])
        if (wanted := outcome(tensors)) != fakes:
            differ.append((sizes, wanted, fakes))
    assert not differ


def test_a_refusal_is_not_remembered_for_other_arguments():
    mode = FakeMode()
    fakes = {name: mode.from_real(x) for name, x in OPERANDS.items()}
    with mode:
        for refused, valid in [("1 - B", "1.5 * B"), ("X.cumsum(0, dtype=torch.complex32)", "X.cumsum(0)"),
                               ("X.index_select(0, I8[0])", "X.index_select(0, I[0])"),
                               ("X.as_strided((3, 3), (2, 1))", "X.as_strided((1, 3), (2, 1))")]:
            for _ in range(2):
                with pytest.raises(Exception):
                    evaluate_text(refused, fakes)
                evaluate_text(valid, fakes)


@pytest.mark.parametrize("op, factor", [("ldl_solve", torch.linalg.ldl_factor), ("lu_solve", torch.linalg.lu_factor)])
def test_kernels_that_trust_their_pivots_are_not_asked_with_zeros(op, factor, monkeypatch):
    """LAPACK writes outside of its memory where a pivot is 0: the process ended on torch 2.11."""
    asked = []
    monkeypatch.setattr(refusals, "_kernel_refuses", lambda func, flat, spec: asked.append(func))
    monkeypatch.setattr(refusals, "_ACCEPTED", set())
    monkeypatch.setattr(recipes, "RECIPES", {})
    solve = getattr(torch.ops.aten, f"linalg_{op}").default
    mode, matrix = FakeMode(), torch.eye(3) + 1
    tensors = [mode.from_real(t) for t in (*factor(matrix), torch.ones(3, 2))]
    assert fake_call(solve, tuple(tensors), {}).shape == (3, 2) and solve not in asked
    fake_call(torch.ops.aten.mul.Tensor, (tensors[0], tensors[0]), {})
    assert asked == [torch.ops.aten.mul.Tensor]


aten = torch.ops.aten
ASKED_TWICE = {
    "new memory": lambda x, y: (aten.add.Tensor, (x, y)), "a number": lambda x, y: (aten.mul.Tensor, (x, 2.5)),
    "turned": lambda x, y: (aten.add.Tensor, (x.t(), y.t())), "a view": lambda x, y: (aten.view.default, (x, [2, 12])),
    "a view of a view": lambda x, y: (aten.t.default, (x[2:],)), "views": lambda x, y: (aten.split.Tensor, (x, 3)),
    "a view that the schema hides": lambda x, y: (aten._unsafe_view.default, (x, [24])),
    "several results": lambda x, y: (aten.native_layer_norm.default, (x, [4], None, None, 1e-5)),
    "a list": lambda x, y: (aten._foreach_add.List, ([x, y], [y, x[:, :1]])), "no memory": lambda x, y: (aten.neg.default, (x[:0],)),
    "a list of few forms": lambda x, y: (aten._foreach_div.ScalarList, ([x, y.t(), x.t(), x, x, y.t()], [1, 2.0, 3.0, 4.0, 5, 6.0])),
    "a number and a list": lambda x, y: (aten._foreach_pow.ScalarAndTensor, (2.0, [x, y.t(), x])),
    "written": lambda x, y: (aten.add_.Tensor, (x, y)), "written in place of a view": lambda x, y: (aten.mul_.Scalar, (x[1:], 2.5)),
    "written from the same memory": lambda x, y: (aten.add_.Tensor, (x, x)), "turned in place": lambda x, y: (aten.t_.default, (x,)),
    "made": lambda x, y: (aten.full.default, ([2, 3], 1.5)),
}


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("name", ASKED_TWICE)
def test_a_result_that_is_made_again_is_as_the_first(name, symbolic, monkeypatch):
    """A recipe gives what the meta kernel gave: where the elements lie, and whose memory it is."""
    monkeypatch.setattr(recipes, "RECIPES", {})
    env = ShapeEnv()
    rows = env.create(6) if symbolic else 6

    def result(call):
        tensors = [FakeTensor(torch.empty(rows, 4, dtype=dtype, device="meta"), torch.device("cpu"))
                   for dtype in (torch.float32, torch.float64)]
        op, args = ASKED_TWICE[name](*tensors)
        out = call(op, args, {})
        memory = list(map(storage_key, tensors))
        found = [out] if isinstance(out, torch.Tensor) else list(out)
        keys = [storage_key(t) for t in found]
        return type(out), [(*map(str, (t.shape, t.stride(), t.storage_offset(), t.meta.untyped_storage().nbytes())), t.dtype, t.device,
                            memory.index(k) if k in memory else keys.index(k) + 2, [t is x for x in tensors])
                           for t, k in zip(found, keys)]
    expected, guards = result(run_on_fakes), list(env.guards)
    assert [result(fake_call) for _ in range(3)] == [expected] * 3 and list(env.guards) == guards
    assert len(recipes.RECIPES) >= (name not in ("written from the same memory", "turned in place"))


def test_a_question_about_symbolic_sizes_is_asked_once_in_an_environment(monkeypatch):
    """Its guards belong to the environment: another one asks again, and has them too."""
    asked, guards = [], []
    monkeypatch.setattr(recipes, "RECIPES", {})
    monkeypatch.setattr(recipes, "run_on_fakes", lambda func, args, kwargs: asked.append(func) or run_on_fakes(func, args, kwargs))
    weight = FakeTensor(torch.empty(3, 3, 3, 3, device="meta"), torch.device("cpu"))
    for env in (ShapeEnv(), ShapeEnv()):
        first, second = env.create(8), env.create(5)
        shapes = []
        for size in (first, first, second, first):
            x = FakeTensor(torch.empty(size, 3, size, 9, device="meta"), torch.device("cpu"))
            y = fake_call(aten.convolution.default, (x, weight, None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1), {})
            assert y.shape[0].node.env is env
            shapes.append(str(y.shape))
        guards.append([g.text() for g in env.guards])
        assert len(set(shapes)) == 2 and len(asked) == 2 * len(guards)
    assert guards[0] == guards[1] != []


@pytest.mark.parametrize("writes", [False, True])
def test_operators_on_lists_are_asked_once_for_each_form(writes, monkeypatch):
    monkeypatch.setattr(recipes, "RECIPES", {})
    lengths, op = [], aten._foreach_addcmul_.Scalar if writes else aten._foreach_addcmul.Scalar
    monkeypatch.setattr(recipes, "run_on_fakes",
                        lambda func, args, kwargs: lengths.append(len(args[0])) or run_on_fakes(func, args, kwargs))
    mode = FakeMode()
    lists = [[mode.from_real(torch.ones(shape)) for shape in ([2, 3], [4]) * 5] for _ in range(3)]
    out = fake_call(op, (*lists, 0.5), {})
    assert lengths == [2] and [t._version for t in lists[0]] == [int(writes)] * 10
    assert writes or [t.shape for t in out] == [t.shape for t in lists[0]] and len({storage_key(t) for t in out}) == 10
    with pytest.raises(RuntimeError, match="same number of tensors|same length"):
        fake_call(op, (lists[0], lists[1][:9], lists[2], 0.5), {})
    with pytest.raises(RuntimeError, match="size|shape|broadcast"):
        fake_call(op, (lists[0], lists[1], [lists[2][1], *lists[2][1:]], 0.5), {})


@pytest.mark.parametrize("op, args", [("add_.Tensor", lambda x, y: (x, y)), ("addcmul_.default", lambda x, y: (x, y, y)),
                                      ("_foreach_add_.Scalar", lambda x, y: ([x], 2.0))])
def test_a_write_is_counted_each_time(op, args, monkeypatch):
    monkeypatch.setattr(recipes, "RECIPES", {})
    mode, (packet, _, kind) = FakeMode(), op.partition(".")
    x, y = mode.from_real(torch.ones(3)), mode.from_real(torch.ones(3))
    versions = []
    for _ in range(3):
        getattr(getattr(aten, packet), kind)(*args(x, y))
        versions.append(x._version)
    assert versions == [1, 2, 3]


def test_memory_that_overlaps_is_refused_after_a_call_that_is_not():
    mode = FakeMode()
    with mode:
        for shape in ((4, 4), (1, 4)):
            x = torch.empty(shape).expand(4, 4)
            if shape == (4, 4):
                x.add_(1.0)
                x.add_(1.0)
            else:
                with pytest.raises(RuntimeError, match="single memory location"):
                    x.add_(1.0)
        memory = torch.empty(8)
        memory[:4].mul_(torch.empty(4))
        with pytest.raises(RuntimeError, match="refer to a single|some elements|overlap"):
            memory[:4].mul_(memory[1:5])


def test_a_recipe_is_not_used_under_another_default_dtype():
    found = []
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            found.append(fake_call(aten.full.default, ([2], 1.5), {}).dtype)
        finally:
            torch.set_default_dtype(torch.float32)
    assert found == [torch.float32, torch.float64, torch.float32]


def operators_of_numbers():
    """Those of PyTorch whose arguments are a tensor or two and a number or two, and whose results are new."""
    for name in dict.fromkeys(name.removeprefix("aten::").partition(".")[0] for name in torch._C._dispatch_get_all_op_names()):
        packet = getattr(torch.ops.aten, name, None)
        for op in (getattr(packet, kind) for kind in packet.overloads()) if packet and not name.startswith("_") else ():
            kinds = [str(a.type) for a in op._schema.arguments if not a.kwarg_only and not a.has_default_value()]
            if 0 < kinds.count("number") <= 2 and 0 < kinds.count("Tensor") <= 2 and set(kinds) == {"number", "Tensor"} \
                    and not op._schema.is_mutable:
                yield op, kinds


def test_what_operators_of_tensors_and_numbers_answer():
    """A number is a bool, an integer or a float, and may decide on the dtype by its value."""
    dtypes, asked, wrong = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.float64, torch.complex64), 0, []
    for op, kinds in operators_of_numbers():
        if op._schema.name.endswith("_backward"):               # some meta kernels promote the numbers; only derivatives call them
            continue
        for values in itertools.product(*(dtypes if kind == "Tensor" else (True, False, 1, 0, 1.0) for kind in kinds)):
            operands = [torch.ones(3).to(x) if isinstance(x, torch.dtype) else x for x in values]
            try:
                want = op(*operands)
                with FakeMode() as mode:
                    got = op(*(mode.from_real(x) if isinstance(x, torch.Tensor) else x for x in operands))
            except (RuntimeError, TypeError):                       # a graph breaks there
                continue
            asked += 1
            if isinstance(want, torch.Tensor) and (want.dtype, want.shape) != (got.dtype, got.shape):
                wrong.append((op, values, want.dtype, got.dtype))
    assert asked > 1900 and not wrong, (asked, wrong)


@contextlib.contextmanager
def autocast(device):
    torch.set_autocast_enabled(device, True)
    torch.set_autocast_dtype(device, torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, False)
        torch.clear_autocast_cache()


@pytest.mark.parametrize("mode, cast", [("bilinear", True), ("nearest", True), ("bicubic", True), ("area", False)])
@pytest.mark.parametrize("symbolic", [False, True])
def test_interpolation_under_autocast_on_a_gpu(mode, cast, symbolic, monkeypatch):
    """The segmentation models of torchvision answered in bfloat16, from their second batch size on."""
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)      # fakes need no device
    batch = ShapeEnv().create(3) if symbolic else 3
    x = FakeTensor(torch.empty((batch, 2, 8, 8), dtype=torch.bfloat16, device="meta"), torch.device("cuda", 0))
    for function in (F.interpolate, lambda x, **how: F.interpolate(x, **how)):
        with autocast("cuda"), FakeMode():
            y = with_symbols(function, x, scale_factor=2, mode=mode)
        assert y.dtype is (torch.float32 if cast else torch.bfloat16) and y.shape[2:] == (16, 16)
    assert cast_as_autocast(F.interpolate, (x,), {"mode": mode}) == ((x,), {"mode": mode}), "without autocast nothing is cast"


def symbolic_fakes(value, device, dtype, env):
    """Each tensor as a fake on a device, floats of a dtype, with symbolic sizes if env is given."""
    def one(t):
        if not isinstance(t, torch.Tensor):
            return t
        sizes = [env.create(s) if env is not None and s > 1 else s for s in t.shape]
        meta = torch.empty(sizes, dtype=dtype if t.is_floating_point() else t.dtype, device="meta")
        return FakeTensor(meta, torch.device("cuda", 0) if device == "cuda" else torch.device("cpu"))
    return pytree.tree_map(one, value)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_casts_the_same_with_symbolic_sizes(device, monkeypatch):
    """Every operator that asks for numbers, so that PyTorch's version in Python may run: the dtypes are those with numbers."""
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    refused = []
    monkeypatch.setattr(composites, "cast_as_autocast", lambda *call: refused.append(call) or cast_as_autocast(*call))

    def dtypes(op, sample, env):
        (args, kwargs) = symbolic_fakes(((sample.input, *sample.args), sample.kwargs), device, torch.bfloat16, env)
        with autocast(device), FakeMode():
            return [t.dtype for t in pytree.tree_leaves(with_symbols(op, *args, **kwargs)) if isinstance(t, torch.Tensor)]

    compared = []
    for info in op_db:
        if torch.float32 not in info.dtypes or info.name.startswith("jiterator"):
            continue
        for sample in itertools.islice(info.sample_inputs("cpu", torch.float32), 1):
            refused.clear()
            with contextlib.suppress(RuntimeError, Unsupported):         # capture breaks the graph there
                symbolic = dtypes(info.op, sample, ShapeEnv())
                if refused:
                    compared.append(info.name)
                    assert symbolic == dtypes(info.op, sample, None), info.name
    assert {"nn.functional.interpolate", "linalg.multi_dot", "gradient"} <= set(compared)


aten = torch.ops.aten
NORMS = {
    "group": (lambda x, p: aten.native_group_norm(x, p, p, 2, 8, 16, 2, 1e-5),
              lambda x, p, mean, rstd, mask: aten.native_group_norm_backward(x, x, mean, rstd, p, 2, 8, 16, 2, mask)),
    "layer": (lambda x, p: aten.native_layer_norm(x.mT, [8], p, p, 1e-5),
              lambda x, p, mean, rstd, mask: aten.native_layer_norm_backward(x.mT, x.mT, [8], mean, rstd, p, p, mask)),
    "batch": (lambda x, p: aten.native_batch_norm(x, p, p, None, None, True, 0.1, 1e-5),
              lambda x, p, mean, rstd, mask: aten.native_batch_norm_backward(x, x, p, None, None, mean, rstd, True, 1e-5, mask)),
    "evaluated": (lambda x, p: aten.native_batch_norm(
        x, p, p, *2 * [x.new_ones(8, dtype=torch.float32 if p is None else p.dtype)], False, 0.1, 1e-5), None)}


@pytest.mark.parametrize("parameter", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("norm", NORMS)
def test_dtypes_of_a_norm_of_halves(norm, parameter):
    """Under autocast on a CPU the operand is bfloat16 and the parameters float32; the meta kernels tell other dtypes than the kernels."""
    x, (forward, backward) = torch.randn(2, 8, 16).bfloat16(), NORMS[norm]
    weight = None if parameter is None else torch.ones(8, dtype=parameter)

    def both(x, weight):
        out = forward(x, weight)
        return [*out, *(backward(x, weight, *out[1:], [True, weight is not None, weight is not None]) if backward else ())]

    mode = FakeMode()
    with mode:
        fakes = both(mode.from_real(x), None if weight is None else mode.from_real(weight))
    assert [t is not None and t.dtype for t in fakes][:4 if weight is None else 6] == \
        [t is not None and t.dtype for t in both(x, weight)][:4 if weight is None else 6]


class AskedOfFakes(TorchDispatchMode):
    """Runs each call of an operator on fakes too, and keeps those whose results have other dtypes, sizes or strides."""

    def __init__(self):
        super().__init__()
        self.compared, self.wrong = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        flat, spec = pytree.tree_flatten((args, kwargs or {}))
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        plain = func is not aten.as_strided.default and all(t.layout is torch.strided and not t.is_neg() for t in tensors)
        fakes = pytree.tree_unflatten([self.fake(x) if plain and isinstance(x, torch.Tensor) else x for x in flat], spec)
        out = func(*args, **(kwargs or {}))
        if plain and tensors:
            with contextlib.suppress(Unsupported):
                said, real = map(self.form, (run_on_fakes(func, *fakes), out))
                self.compared += 1
                self.wrong += [] if said == real else [(str(func), [(t.dtype, t.shape) for t in tensors], real, said)]
        return out

    def fake(self, t):
        return FakeTensor(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"), t.device)

    def form(self, results):
        return [(t.dtype, t.shape, t.stride() if t.numel() else ()) for t in pytree.tree_leaves(results) if isinstance(t, torch.Tensor)]


@pytest.mark.filterwarnings("ignore")
def test_results_in_half_precision_have_the_form_that_fakes_say():
    """Each call of an operator on a CPU behind the samples of PyTorch's database, and behind their gradients."""
    asked = AskedOfFakes()
    for op in OPERATORS:
        for sample in samples_of(op, torch.bfloat16, 3) if torch.bfloat16 in op.supported_dtypes("cpu") else []:
            with asked, contextlib.suppress(RuntimeError):
                out = [t for t in pytree.tree_leaves(op(sample.input, *sample.args, **sample.kwargs)) if isinstance(t, torch.Tensor)]
                leaves = [t for t in tensors_of(sample) if t.requires_grad]
                if leaves and any(t.requires_grad for t in out):
                    out = [t for t in out if t.requires_grad]
                    torch.autograd.grad(out, leaves, [torch.ones_like(t) for t in out], allow_unused=True)
    assert asked.compared > 1000 and not asked.wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("transposed", [False, True])
def test_strides_of_a_convolution_along_one_dim(dtype, transposed):
    """Sizes of 1 and permuted operands: what looks as if channels vary fastest decides about the strides of the result."""
    op, rest = torch.ops.aten.convolution.default, (None, [1], [0], [1], transposed, [0], 1)
    for n, channels, length, out in itertools.product((1, 2), (1, 2, 4), (1, 3), (1, 2)):
        for order, turned in itertools.product(itertools.permutations(range(3)), [(0, 1, 2), (1, 0, 2), (0, 2, 1)]):
            shapes = (n, channels, length), ((channels, out, 1) if transposed else (out, channels, 1))
            x, w = (torch.ones([shape[d] for d in p], dtype=dtype).permute([p.index(d) for d in range(3)])
                    for shape, p in zip(shapes, (order, turned)))
            fake = run_on_fakes(op, (*(FakeTensor(t.to("meta"), t.device) for t in (x, w)), *rest), {})
            assert same_layout(op(x, w, *rest), fake), (x.shape, x.stride(), w.shape, w.stride())


@pytest.mark.parametrize("shape", [(6, 2, 1), (1, 3, 3), (0, 2, 1)])
def test_a_flip_keeps_strides_of_size_1(shape):
    for stride in itertools.product((0, 1, 2, 13), repeat=3):
        x = torch.ones(100).as_strided(shape, stride)
        fake = run_on_fakes(torch.ops.aten.flip.default, (
            FakeTensor(torch.empty(100, device="meta").as_strided(shape, stride), x.device), [0]), {})
        assert fake.stride() == x.flip(0).stride()


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("scaled", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of", [torch.int64, torch.float16])
def test_a_power_of_two_of_integers_is_of_the_default_dtype(scaled, of, default):
    x, power, before = torch.ones(3, dtype=scaled), torch.ones(3, dtype=of), torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        mode = FakeMode()
        with mode:
            found = torch.ldexp(mode.from_real(x), mode.from_real(power))
        assert found.dtype == torch.ldexp(x, power).dtype
    finally:
        torch.set_default_dtype(before)
