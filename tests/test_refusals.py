"""What eager refuses to compute on a CPU because of the numbers that it is given, the compiled program refuses on every
rung: also where the result is not used, only in part, or could be told without looking."""
import contextlib
import itertools
import os

import pytest
import torch
import torch.nn.functional as F
from opinfo import OPERATORS
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import minicompile
from minicompile import logs
from minicompile.ch01_graphs.rules.operators import DATA_DEPENDENT
from minicompile.ch05_autograd.cleanup import REFUSING, REFUSING_INTEGERS
from minicompile.ch07_loops.ir import Extern
from minicompile.ch07_loops.lower import refusals

RUNGS = "eager", "aot_eager", "decomposed", "loops", "cpp"


def dead(f):
    def g(i, w):
        f(i, w)
        return w + 1
    return g


def first(f):
    return lambda i, w: (f(i, w).float() * 2)[:1] + 1


def whole(f):
    return f


@torch.library.custom_op("refusals::positive", mutates_args=())
def positive(i: torch.Tensor) -> torch.Tensor:
    if (i < 0).any():
        raise IndexError("negative")
    return i * 2


@positive.register_fake
def _(i):
    return torch.empty_like(i)


READING = {
    "embedding": lambda i, w: F.embedding(i, w),
    "index": lambda i, w: w[i],
    "index of two": lambda i, w: w[i, i.clamp(0, 2)],
    "index_select": lambda i, w: w.index_select(0, i),
    "gather": lambda i, w: w.gather(0, i[:, None]),
    "take": lambda i, w: w.take(i * 3),
    "take_along_dim": lambda i, w: torch.take_along_dim(w, i[:, None], 0),
    "embedding of ones": lambda i, w: F.embedding(i, torch.ones(5, 3)),
    "index of zeros": lambda i, w: torch.zeros(5)[i],
    "index of a sum of zeros": lambda i, w: (torch.zeros(5) + 1)[i],
    "index_select of ones": lambda i, w: torch.ones(5, 2).index_select(0, i),
    "gather of one row": lambda i, w: w[:1, 0].expand(5).gather(0, i),
    "index of one row": lambda i, w: w[:1].expand(5, 3)[i],
    "index of nothing": lambda i, w: F.embedding(i, w[:, :0]),
}
WRITING = {
    "scatter": lambda i, w: w.scatter(0, i[:, None], 1.0),
    "scatter_add": lambda i, w: w.scatter_add(0, i[:, None], w),
    "scatter_reduce": lambda i, w: w.scatter_reduce(0, i[:, None], w, "amax"),
    "index_add": lambda i, w: w.index_add(0, i, w[:3]),
    "index_copy": lambda i, w: w.index_copy(0, i, w[:3]),
    "index_fill": lambda i, w: w.index_fill(0, i, 2.0),
    "index_put": lambda i, w: w.index_put((i,), w[:3]),
    "put": lambda i, w: w.put(i * 3, torch.ones(3)),
    "setitem": lambda i, w: w.clone().__setitem__(i, 2.0) or w,
}
LOSSES = {
    "one_hot": lambda i, w: F.one_hot(i, 4),
    "cross_entropy": lambda i, w: F.cross_entropy(w[:3].repeat(1, 2)[:, :5], i, reduction="none"),
    "nll_loss": lambda i, w: F.nll_loss(w[:3].repeat(1, 2)[:, :5], i, weight=torch.ones(5), reduction="none"),
    "multi_margin_loss": lambda i, w: F.multi_margin_loss(w[:3].repeat(1, 2)[:, :5], i, reduction="none"),
    "binary_cross_entropy": lambda i, w: F.binary_cross_entropy(i / 4.0, torch.ones(3), reduction="none"),
    "binary_cross_entropy's target": lambda i, w: F.binary_cross_entropy(w[0] / 4.0, i / 4.0, reduction="none"),
    "a weight that is wider": lambda i, w: F.binary_cross_entropy_with_logits(w[:, :1], w[:, 1:2] / 15, weight=torch.ones(3)),
    "a positive weight that is wider": lambda i, w: F.binary_cross_entropy_with_logits(w[:, :1], w[:, 1:2] / 15, pos_weight=torch.ones(3)),
    "a user's operator": lambda i, w: positive(i),
    "linspace": lambda i, w: torch.linspace(1 / (5 - i[1]), 3.0, 4, dtype=torch.int64),
}
DIVIDING = {
    "floor_divide": lambda i, w: i // (i - i),
    "remainder": lambda i, w: i % (i - i),
    "fmod": lambda i, w: torch.fmod(i, i - i),
    "power": lambda i, w: i.pow(-1),
}
INDICES = {"too large": [0, 5, 2], "negative": [0, -1, 2], "too negative": [0, -9, 2], "right": [0, 3, 2]}


def outcome(f, *args):
    try:
        return f(*args)
    except (RuntimeError, IndexError) as error:
        return f"{type(error)} {error}"


def same(a, b, what):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        torch.testing.assert_close(a, b)
    else:
        assert a is b or a == b, what


@pytest.mark.parametrize("use", [whole, first, dead])
@pytest.mark.parametrize("name", [*READING, *WRITING, *LOSSES, *DIVIDING])
def test_what_eager_refuses(name, use):
    f = use({**READING, **WRITING, **LOSSES, **DIVIDING}[name])
    w = torch.arange(15.0).reshape(5, 3)
    for kind, numbers in INDICES.items():
        i = torch.tensor(numbers)
        wanted = outcome(f, i, w)
        for rung in RUNGS:
            minicompile.reset()
            same(outcome(minicompile.compile(f, backend=rung), i, w), wanted, f"{rung}, {kind}")


@pytest.mark.parametrize("rung", ["aot_eager", "decomposed", "cpp"])
def test_in_training(rung):
    """Forward refuses; what backward looks at again is not looked at twice for it."""
    def f(i, w):
        w.gather(0, i[:, None])
        return (F.embedding(i, w) * w[i]).sum() + w[i][:1].sum()

    compiled = minicompile.compile(f, backend=rung)
    for numbers in ([0, 1, 2], [0, 5, 2], [4, 1, 2]):
        results = []
        for g in (f, compiled):
            w = torch.arange(15.0).reshape(5, 3).requires_grad_()
            out = outcome(g, torch.tensor(numbers), w)
            if isinstance(out, torch.Tensor):
                out.backward()
            results.append((out, w.grad))
        for a, b in zip(*results):
            same(a, b, f"{numbers}")


SIZES = {
    "put": lambda x, i: x.put_(i, x), "index_select": lambda x, i: x.index_select(0, i[None]), "empty maximum": lambda x, i: x[:0].max(),
    "masked_scatter": lambda x, i: x.masked_scatter_(i > 0, x), "index_put": lambda x, i: x.index_put_((i,), torch.ones(len(x) + 2)),
    "bernoulli_": lambda x, i: x.bernoulli_(3.0), "bernoulli": lambda x, i: torch.bernoulli(x, -0.5),
    "uniform_": lambda x, i: x.uniform_(2, 1), "random_": lambda x, i: x.random_(3, 2),
    "randint": lambda x, i: torch.randint(len(x) - 9, (3,)), "bytes": lambda x, i: torch.randint(0, 300, (3,), dtype=torch.uint8),
    "randint_like": lambda x, i: torch.randint_like(i, 3, 2), "multinomial": lambda x, i: torch.multinomial(x.abs(), 4),
    "of ints": lambda x, i: (i + 1).uniform_(),
    "conv1d": lambda x, i: F.conv1d(x.reshape(1, -1, 3), torch.ones(2, 4, 1)), "conv_transpose1d": lambda x, i: F.conv_transpose1d(
        x.reshape(1, -1, 3), torch.ones(4, 2, 1), output_padding=len(x) - 4),
    "nothing left of conv_transpose2d": lambda x, i: (
        F.conv_transpose2d(x.reshape(1, 3, 1, -1), torch.ones(3, 2, 2, 2), padding=(0, 3)), x.mul_(2))[1]}


@pytest.mark.parametrize("f", [lambda x, i: x.index_select(2, i).as_strided((2, 3), (1, 2)), lambda x, i: x[:, :, i][:, 0] + 1,
                               lambda x, i: torch.gather(x, 2, i[None, None])])
def test_rows_are_taken_by_a_loop(f, monkeypatch):
    """All rows are looked at, also where few are read, and where the table has dimensions of size 1."""
    programs, x = [], torch.randn(1, 4, 8)
    monkeypatch.setattr(logs, "watchers", [lambda kind, **data: kind == "schedule" and programs.append(data["program"])])
    compiled = minicompile.compile(f)
    for i in (torch.tensor([7, 0, 3, 3]), torch.tensor([0, 1, 2, 8])):
        same(outcome(compiled, x, i), outcome(f, x, i), "")
    assert len(programs) == 1 and not any(isinstance(n, Extern) for n in programs[0].nodes)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_was_written_before_a_refusal_stays_written(name, dynamic):
    """Sizes that a kernel refuses and its meta kernel does not end the graph before the call, for all sizes."""
    def f(x, i):
        x.add_(1)
        return SIZES[name](x, i)

    for rung in RUNGS:
        minicompile.reset()
        compiled = minicompile.compile(f, backend=rung, dynamic=dynamic)
        for rows in (4, 5, 6):
            results = []
            for g in (f, compiled):
                x = torch.arange(3.0 * rows).reshape(rows, 3)
                out = outcome(g, x, torch.tensor([0, 2]))
                results.append((out if isinstance(out, torch.Tensor) else out[:20], x))
            for a, b in zip(*results):
                same(a, b, f"{rung}, {rows}: {results}")


def test_what_a_model_does_stays_in_loops(monkeypatch):
    """Reading rows of a table, all of them, and a loss of targets: nothing more than that has to be looked at."""
    graphs = []
    model = torch.nn.Sequential(torch.nn.Embedding(10, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 10))

    def loss(x, y):
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    def listen(kind, **data):
        if kind == "stage" and data["name"] in ("forward", "backward"):
            graphs.append(data["gm"].graph)

    monkeypatch.setattr(logs, "watchers", [listen])
    minicompile.compile(loss)(torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.long)).backward()
    assert len(graphs) == 2 and not any(map(any, map(refusals, graphs)))


class Samples(TorchDispatchMode):
    """calls: operator -> dtypes of its tensors -> arguments with which PyTorch's database of operators calls it."""
    def __init__(self):
        super().__init__()
        self.calls = {}

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        pure = func.namespace == "aten" and not func._schema.is_mutable and func._schema.returns and func not in DATA_DEPENDENT
        if pure and tensors and all(t.layout == torch.strided and 0 < t.numel() < 3000 for t in tensors) and not any(
                "pivots" in a.name for a in func._schema.arguments):                # LAPACK trusts them
            variants, kinds = self.calls.setdefault(func, {}), tuple(t.dtype for t in tensors)
            if kinds not in variants:
                variants[kinds] = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        return func(*args, **kwargs)


def refused(func, args, kwargs) -> str:
    """The error of `func` for other numbers in a tensor, where it takes those of `args`."""
    flat, spec = pytree.tree_flatten((args, kwargs))
    try:
        func(*args, **kwargs)
    except RuntimeError:
        return ""
    for i, t in enumerate(flat):
        if not isinstance(t, torch.Tensor) or t.dtype is torch.bool or t.is_complex():
            continue
        for number in (float("nan"), float("inf"), -2.0, 0.0, 1.5) if t.is_floating_point() else (-1, 0, 5, 100):
            args, kwargs = pytree.tree_unflatten([*flat[:i], torch.full_like(t, number), *flat[i + 1:]], spec)
            try:
                func(*args, **kwargs)
            except (RuntimeError, IndexError) as error:
                return f"{number} in argument {i}: {str(error).splitlines()[0]}"
    return ""


def in_a_process(function) -> str:
    """What it returns; nothing if it ends the process, which kernels may that trust their operands."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            os.write(writing, function().encode()[:4000])
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        found = pipe.read().decode()
    os.waitpid(pid, 0)
    return found


@pytest.mark.processes
def test_which_operators_look_at_numbers():
    """What raises for numbers, on any sample of the database, is in the list of those that may refuse."""
    torch.set_num_threads(1)                     # a child of a process with more threads would wait for them
    watch = Samples()
    for op, dtype in itertools.product(OPERATORS, (torch.float32, torch.int64)):
        if dtype in op.supported_dtypes("cpu"):
            torch.manual_seed(0)
            with contextlib.suppress(RuntimeError, ImportError):            # a library that is not there
                for sample in list(itertools.islice(op.sample_inputs_func(op, "cpu", dtype, False), 6)):
                    with watch:
                        op(sample.input, *sample.args, **sample.kwargs)
    found = {}
    for func, variants in watch.calls.items():
        random = torch.Tag.nondeterministic_seeded in func.tags
        why = not random and in_a_process(lambda: next(filter(None, (refused(func, *call) for call in variants.values())), ""))
        if why:
            found[func._schema.name.removeprefix("aten::")] = why
    assert {"gather", "nll_loss_forward", "segment_reduce", "remainder"} <= found.keys()
    assert not {name: why for name, why in found.items() if name not in REFUSING | REFUSING_INTEGERS}


SCATTERED_VIEWS = {
    "select": lambda x, s: x.select_scatter(s(x[0]), 0, 1),
    "select beyond": lambda x, s: x.select_scatter(s(x[0]), 0, 7),
    "slice": lambda x, s: x.slice_scatter(s(x[:2]), 0, 0, 2),
    "diagonal": lambda x, s: x.diagonal_scatter(s(x.diagonal())),
    "as_strided": lambda x, s: x.as_strided_scatter(s(x[:2, :2]), (2, 2), (1, 2)),
    "as_strided that meets itself": lambda x, s: x.as_strided_scatter(s(x[:2, :2]), (2, 2), (0, 1)),
    "index_add": lambda x, s: x.index_add(0, torch.tensor([1, 0]), s(x[:2])),
    "index_add_": lambda x, s: (x * 1).index_add_(1, torch.tensor([1, 0]), s(x[:, :2])),
    "soft_margin_loss": lambda x, s: F.soft_margin_loss(x, s(x)),
}
SOURCES = {"fits": lambda t: t * 2, "broadcasts": lambda t: t[..., :1] * 2, "is a number": lambda t: t.sum(), "row": lambda t: t[:1] * 2}


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("write", SCATTERED_VIEWS)
def test_sources_that_only_broadcast_are_refused_where_eager_refuses_them(write, rung):
    for source in SOURCES.values():
        minicompile.reset()
        x = torch.arange(12.0).view(3, 4)

        def f(x):
            return SCATTERED_VIEWS[write](x * 2, source) + 1
        try:
            expected = f(x)
        except (RuntimeError, IndexError) as error:
            with pytest.raises(type(error)):
                minicompile.compile(f, backend=rung)(x)
        else:
            torch.testing.assert_close(minicompile.compile(f, backend=rung)(x), expected)


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("name", ["addmm", "addmm_", "addmv", "addmv_", "baddbmm", "baddbmm_", "addbmm", "addbmm_", "addr", "addr_"])
def test_a_product_is_added_to_no_tensor_of_more_dimensions(name, rung):
    sizes = {"addmm": ((2, 4), (4, 3)), "addmv": ((2, 4), (4,)), "addr": ((2,), (3,))}.get(name.strip("_"), ((5, 2, 4), (5, 4, 3)))

    def f(x, a, b):
        return getattr(x, name)(a, b)[0] + 1

    def add(f, *sizes):
        return type(outcome(f, *map(torch.ones, sizes)))

    for size in ((5, 2, 3), (2, 3), (3,), (2,), (1, 2), (1, 2, 3), (1, 5, 2, 3)):
        minicompile.reset()
        assert add(minicompile.compile(f, backend=rung), size, *sizes) is add(f, size, *sizes), size


@pytest.mark.parametrize("dim", [-2, -1, 0, 1])
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "cumsum", "sum", "amax", "sort", "logsumexp"])
def test_dimensions_of_a_number(name, dim):
    def f(x):
        return getattr(x, name)(dim)

    minicompile.reset()
    assert type(outcome(minicompile.compile(f, backend="decomposed"), torch.ones(()))) is type(outcome(f, torch.ones(())))


@pytest.mark.parametrize("rung", RUNGS)
def test_a_softmax_over_a_dimension_that_is_not_there(rung):
    for dtype in (torch.float32, torch.int64):
        with pytest.raises(IndexError, match="Dimension out of range"):
            minicompile.compile(lambda x: x.softmax(1), backend=rung)(torch.arange(3).to(dtype))


def test_an_error_about_a_call_accepts_no_dtype():
    x = torch.arange(3)
    with pytest.raises(IndexError, match="Dimension out of range"):
        minicompile.compile(lambda x: x.softmax(1), backend="aot_eager")(x)
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        minicompile.compile(lambda x: (x.softmax(0), x)[1], backend="aot_eager")(x)          # what nobody needs is not computed


def test_a_gradient_for_a_view_that_a_write_has_invalidated(monkeypatch):
    monkeypatch.setattr(minicompile.config, "raise_on_internal_error", True)
    def f(v):
        return torch.autograd.grad((v * v).sum(), v)
    x = torch.ones(3, requires_grad=True) * 1
    with torch.no_grad():
        v = x[...]
    x.sub_(1)
    for g in (f, minicompile.compile(f, backend="aot_eager")):
        with pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
            g(v)


@pytest.mark.parametrize("rung", RUNGS)
def test_what_writes_to_a_part_of_varying_size_is_not_refused(rung):
    def f(x):
        y = x * 2
        y[1:, :1].add_(1)
        y.diagonal()[:2].mul_(3)
        return y, x.slice_scatter(x[1:] * 2, 0, 1), x.select_scatter(x[:, 0] * 2, 1, -1), x.index_add(0, torch.tensor([0]), x[-1:])
    fast = minicompile.compile(f, backend=rung)
    for n in (4, 6, 7):
        x = torch.arange(5.0 * n).view(n, 5)
        torch.testing.assert_close(fast(x), f(x))


NUMBERS = {
    "full": lambda x, n: torch.full((2,), n),
    "full_like": lambda x, n: torch.full_like(x, n),
    "where": lambda x, n: torch.where(x > 0, x, n),
    "masked_fill": lambda x, n: x.masked_fill(x > 0, n),
    "fill_": lambda x, n: x.clone().fill_(n),
    "fill_ with a tensor": lambda x, n: x.long().fill_(torch.tensor(n)),
    "masked_fill with a tensor": lambda x, n: x.half().masked_fill(x > 0, torch.tensor(n)),
    "index_fill with a tensor": lambda x, n: torch.index_fill(x.half(), 0, torch.tensor([1]), value=torch.tensor(n)),
    "bytes": lambda x, n: torch.full((2,), n, dtype=torch.int8),
    "one": lambda x, n: torch.full((1,), n, dtype=torch.float16),
}


@pytest.mark.parametrize("rung", ["aot_eager", "loops", "cpp"])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_do_not_fit(name, rung):
    """That a kernel accepts a number does not mean that it accepts a larger one."""
    for number in (1.0, 3e4, 1e300, 300, float("inf"), -5):
        minicompile.reset()
        f = lambda x: NUMBERS[name](x, number)          # noqa: E731
        same(outcome(minicompile.compile(f, backend=rung), torch.ones(3)), outcome(f, torch.ones(3)), number)


@pytest.mark.gpu
def test_numbers_that_do_not_fit_on_a_gpu():
    def f(x, number):
        return x.fill_(torch.tensor(number))
    for number in (1.0, 1e300, 1e30, -1.0, 300.0, float("inf")):
        for dtype in (torch.int64, torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32):
            minicompile.reset()
            x = torch.ones(3, dtype=dtype, device="cuda")
            same(outcome(minicompile.compile(f), x.clone(), number), outcome(f, x.clone(), number), (number, dtype))


OF_VALUES = {"gather", "scatter", "scatter_add", "multinomial"}            # have a sample that is refused for its values


def refused_samples(device):
    """What PyTorch's own tests give each operator that it has to refuse."""
    for op in OPERATORS:
        for error in op.error_inputs(device) if op.error_inputs_func else ():
            sample = error.sample_input
            yield op, (sample.input, *sample.args), sample.kwargs


@pytest.mark.parametrize("rung, dynamic", [("eager", None), ("aot_eager", True), ("cpp", None)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_an_operator_refuses_by_its_arguments(rung, dynamic, device):
    """Nothing reads the result. What is written before it is written, what comes after it is not, unless values decide it."""
    def copies(values):
        return pytree.tree_map(lambda t: t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t, values)

    wrong, tried = [], 0
    for op, args, kwargs in refused_samples(device):
        def f(y, *args, **kwargs):
            y.add_(1)
            op.op(*args, **kwargs)
            return y.mul_(2)
        minicompile.reset()
        found = []
        for g in (f, minicompile.compile(f, backend=rung, dynamic=dynamic)):
            try:
                g(y := torch.ones(2), *copies(args), **copies(kwargs))
                found.append((None, "", y.tolist()))
            except Exception as error:
                found.append((error, str(error), op.name in OF_VALUES or y.tolist()))
        (want, *seen), (got, *others) = found
        if not isinstance(got, type(want)) or seen != others:
            wrong.append(f"{op.name} {[getattr(a, 'shape', a) for a in args]} {kwargs}: {found}")
        tried += 1
    assert not wrong, "\n".join(wrong)
    assert tried > 500
