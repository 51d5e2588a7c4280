"""chapters/tiny.py: each part alone, and the whole against eager."""
import ast
import builtins
import dis
import functools
import io
import keyword
import math
import os
import re
import subprocess
import sys
import tokenize
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from chapters import tiny
from tests.programs import tiny as random_tiny

FILE = Path(tiny.__file__)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
reads_bytecode = pytest.mark.skipif(sys.version_info >= (3, 13), reason="tiny's machine knows the bytecode of CPython 3.11 and 3.12")
compiled_by_recording = functools.partial(tiny.compile, backend=tiny.eager)


def code_lines(text):
    """Lines of the compiler that hold code: no blanks, comments, docstrings, imports, demonstrations, nor the GPT of the last part."""
    tree, ignored = ast.parse(text[:text.index("# ## Part 12.")]), set()
    for node in ast.walk(tree):
        shown = isinstance(node, ast.If) and ast.unparse(node.test).startswith("__name__ == '__main__'")
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if shown or docstring or isinstance(node, (ast.Import, ast.ImportFrom)):
            ignored |= set(range(node.lineno, node.end_lineno + 1))
    nothing = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text[:text.index("# ## Part 12.")]).readline) if t.type not in nothing]
    return {line for t in tokens for line in range(t.start[0], t.end[0] + 1)} - ignored


def test_it_is_small_and_stands_alone():
    text = FILE.read_text()
    assert len(code_lines(text)) <= 1000
    modules = {a.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import) for a in n.names}
    modules |= {n.module for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)}
    assert not [m for m in modules if m.startswith(("minicompile", "chapters", "torch._", "torch.fx"))]


# ---- recording -------------------------------------------------------------------------------------------------

def test_a_recording_computes_what_the_function_computes():
    def f(x, w):
        a, b = (x @ w).split(4, dim=1)
        return F.softmax(a, dim=-1), (b + torch.arange(4)).to(torch.float64)

    x, w = torch.randn(3, 5), torch.randn(5, 8)
    graph = tiny.record(f, x, w)
    for ours, eager in zip(tiny.interpret(graph, [x, w]), f(x, w)):
        torch.testing.assert_close(ours, eager, rtol=0, atol=0)
    assert [n.fake.dtype for n in graph.outputs] == [torch.float32, torch.float64]


def test_what_is_not_needed_is_left_out():
    def f(x):
        x.exp()
        return x.sin()
    assert [n.target for n in tiny.record(f, torch.ones(2)).nodes] == [None, torch.ops.aten.sin.default]


@reads_bytecode
@pytest.mark.parametrize("f", [lambda x: x.add_(1), lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x if x.sum() > 0 else -x])
def test_writes_and_data_end_the_graph(f):
    with pytest.raises((tiny.Break, RuntimeError, NotImplementedError)):
        tiny.record(f, torch.ones(3))
    compiled = compiled_by_recording(f)
    for x in (torch.tensor([1.0, -2.0, 3.0]), torch.tensor([-4.0, 1.0, 2.0])):
        assert torch.equal(torch.as_tensor(compiled(x.clone())), torch.as_tensor(f(x.clone())))
    assert compiled.breaks


# ---- guards ----------------------------------------------------------------------------------------------------

def entries(compiled):
    return sum(map(len, compiled.entries.values()))


def check(f, *calls, graphs):
    """f, compiled, gives eager's results on each call, with so many captured graphs."""
    compiled = compiled_by_recording(f)
    for args in calls:
        torch.testing.assert_close(compiled(*args), f(*args), rtol=0, atol=0)
    assert (entries(compiled), compiled.breaks) == (graphs, [])


settings = {"scale": 2.0}
x = torch.randn(4, 3)


@reads_bytecode
def test_a_guard_for_each_read():
    def f(x, n):
        return x * n + settings["scale"]
    compiled = compiled_by_recording(f)
    for n, scale, graphs in [(2, 2.0, 1), (2, 2.0, 1), (3, 2.0, 2), (3, 5.0, 3), (2, 2.0, 3), (True, 5.0, 4)]:
        settings["scale"] = scale
        assert torch.equal(compiled(x, n), f(x, n))
        assert entries(compiled) == graphs
    compiled(torch.randn(5, 3), 2)
    compiled(x.double(), 2)
    compiled(x.t().contiguous().t(), 2)
    assert entries(compiled) == 7


@reads_bytecode
def test_two_names_for_one_tensor():
    check(lambda a, b: a * 2 + b, (x, x), (x, x.clone()), (x, x), graphs=2)
    both = compiled_by_recording(lambda a, b: a is b)
    assert both(x, x) is True and both(x, x.clone()) is False


@reads_bytecode
def test_attributes_and_closures_are_guarded():
    class Box:
        k = 2
    box, bound = Box(), [1.0]
    scale = 3.0

    def f(x):
        return x * box.k + scale + len(bound)
    compiled = compiled_by_recording(f)
    assert torch.equal(compiled(x), f(x))
    box.k = 5
    assert torch.equal(compiled(x), f(x))
    scale = 4.0
    assert torch.equal(compiled(x), f(x))
    bound.append(2.0)
    assert torch.equal(compiled(x), f(x))
    assert entries(compiled) == 4 and not compiled.breaks


@reads_bytecode
def test_functions_that_share_their_code():
    def f(x, g):
        return g(x)
    weight = torch.ones(3, requires_grad=True)
    positional = [lambda x, k=k: x * k for k in (1.0, 2.0, weight)]
    named = [lambda x, *, k=k: x * k for k in (1.0, 2.0, weight)]
    for functions in (positional, named):
        compiled = compiled_by_recording(f)
        for g in (*functions, *functions):
            ours = compiled(x, g)
            assert torch.equal(ours, g(x)) and ours.requires_grad == g(x).requires_grad
        assert entries(compiled) == 3 and not compiled.breaks
    positional[0].__defaults__ = (5.0,)
    assert torch.equal(compiled(x, positional[0]), x * 5)


def test_with_another_release_everything_runs_uncompiled(monkeypatch):
    assert tiny.supported((lambda x: x + 1).__code__) == (sys.version_info < (3, 13)) == bool(tiny.OPCODES)
    tiny.supported.cache_clear()
    monkeypatch.setattr(tiny, "OPCODES", {})
    try:
        compiled = tiny.compile(lambda x: torch.relu(x) + 1)
        assert compiled(torch.tensor([-1.0, 2.0])).tolist() == [1.0, 3.0] and not compiled.entries
    finally:
        tiny.supported.cache_clear()


@pytest.mark.parametrize("seed", range(60))
def test_random_programs(seed):
    """What is read changes between the calls; `python -m tests.programs.tiny` tries more of them."""
    assert random_tiny.difference(seed) is None


@pytest.mark.skipif(INTERPRETED, reason="kernels of C++")
@pytest.mark.parametrize("seed", range(12))
def test_random_kernels(seed):
    """Of numbers and truth values: generated kernels compute what eager does; `python -m tests.programs.tiny` tries more of them."""
    assert random_tiny.kernel_difference(seed) is None


def test_names_in_the_text_exist():
    text = FILE.read_text()
    prose = "\n".join(line for line in text.splitlines() if line.startswith("# "))
    known = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)} | vars(tiny).keys() | vars(builtins).keys()
    known |= {n.arg for n in ast.walk(ast.parse(text)) if isinstance(n, ast.arg)} | vars(tiny.Machine).keys() | set(dis.opmap)
    pieces = re.findall(r"^# - `([\w.]+)`: \[\]\(ref", prose, re.M)
    assert len(pieces) > 20 and [name for name in pieces if not hasattr(tiny, name)] == []
    words = set(re.findall(r"`([A-Za-z_]\w+)`", prose)) - set(keyword.kwlist)
    assert {w for w in words - known if not hasattr(torch, w)} <= {"append", "item", "keep_dims", "meta"}


def test_a_mode_of_autograd_is_part_of_the_key():
    compiled = compiled_by_recording(lambda x: x * 2)
    p = torch.ones(2, requires_grad=True)
    assert compiled(p).requires_grad
    with torch.no_grad():
        assert not compiled(p).requires_grad


# ---- capture ---------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "a b")


def comprehension(x):
    return torch.stack([x * i + x.shape[0] for i in range(3) if i != 1])


def nested(x):
    def inner(y, k=2, *, scale=1.0):
        return y * k + x * scale
    return inner(x), inner(x, 3, scale=0.5)


def containers(x):
    d = {"a": x, "b": [x + 1, x + 2]}
    d["c"] = d["b"][-1] * 2
    first, (second, _) = d["a"], (d["b"][0],) + (d["c"],)
    d["b"].append(first)
    return {**d, "n": second * len(d["b"])}, [t.sum() for t in d["b"]], first is x


def loops(x, n=4):
    total = 0
    while n:
        n -= 1
        if n == 2:
            continue
        total = total + x * n
        if not n % 3 and n > 0:
            break
    for i, (a, b) in enumerate(zip([x, x + 1], [2, 3])):
        total = total + a * b - i
    return total


def arguments(x, *rest, **named):
    return sum(rest, x) * named.get("k", 1), -x if named else +x


def calls(x):
    return arguments(x, *[x, x * 2], **{"k": 3})


def conditions(x, flag=None):
    y = x if flag is None else x * 2
    assert y.dim() == 2 and "a" in {"a": 1}, f"not {x.dim()!r}"
    return (y > 0) & ~(y > 1), y[1:, None], y[..., -1], 0 < y.shape[0] <= 4 or y


def operators(x, n=3):
    a, b, c = n, n, [n]
    a **= 2
    a <<= 3
    a >>= 1
    b = (b << 4) + (b >> 1) + (b ^ 5) + (b & 2) + (b | 8) + n ** 3 + n // 2 + n % 2
    b //= 3
    b %= 7
    b ^= 1
    b |= 6
    b &= 30
    c *= 2
    c += [a]
    x = x @ x.t()
    x = x ** 2
    return x * a - b + len(c), x / n


@reads_bytecode
@pytest.mark.parametrize("f", [operators, comprehension, nested, containers, loops, arguments, calls, conditions], ids=lambda f: f.__name__)
def test_python_becomes_one_graph(f):
    check(f, (x,), (x + 1,), graphs=1)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.tail = nn.Sequential(nn.LayerNorm(6), nn.GELU(), nn.Dropout(0.5), nn.Linear(6, 2))
        self.register_buffer("offset", torch.randn(6))

    @property
    def width(self):
        return self.layers[0].in_features

    def forward(self, x):
        for layer in self.layers:
            x = x + F.relu(layer(x)) / self.width ** 0.5
        return self.tail(x + self.offset)


@reads_bytecode
def test_modules():
    model, compiled, inputs = Layers().eval(), None, torch.randn(5, 6)
    compiled = compiled_by_recording(model)
    assert torch.equal(compiled(inputs), model(inputs)) and compiled.breaks == []
    model.train()
    torch.manual_seed(1)
    ours = compiled(inputs)
    torch.manual_seed(1)
    assert torch.equal(ours, model(inputs))                  # the mask of a dropout on the CPU is written in place: a break
    assert entries(compiled) == 3 and len(compiled.breaks) == 1
    with torch.no_grad():
        model.layers[1].weight.zero_()
    model.layers[1] = nn.Linear(6, 6, bias=False)
    model.eval()
    assert torch.equal(compiled(inputs), model(inputs))


def test_what_others_see_is_written_at_each_call():
    seen, named = [1], {"a": 1}

    def f(x):
        grown = seen
        grown *= 2
        both = named
        both |= {"b": len(seen)}
        return x * len(grown)

    compiled = compiled_by_recording(f)
    for n in (2, 4, 8):
        assert torch.equal(compiled(x), x * n) and (len(seen), named) == (n, {"a": 1, "b": n})


@reads_bytecode
def test_what_python_must_do_is_left_to_python():
    def tries(x):
        try:
            return x / 0
        finally:
            x = None
    compiled = compiled_by_recording(tries)
    assert torch.equal(compiled(x), x / 0) and not compiled.entries

    def outer(x):
        return tries(x * 2) + sum(v for v in [1, 2])
    compiled = compiled_by_recording(outer)
    assert torch.equal(compiled(x), outer(x)) and torch.equal(compiled(x + 1), outer(x + 1)) and compiled.breaks


def test_errors_are_the_users():
    with pytest.raises(ZeroDivisionError):
        compiled_by_recording(lambda x: x * (1 // 0))(x)
    with pytest.raises(RuntimeError, match="must match"):
        compiled_by_recording(lambda x: x + torch.ones(7))(x)
    with pytest.raises(KeyError):
        compiled_by_recording(lambda x: x + settings["none"])(x)


# ---- breaks ----------------------------------------------------------------------------------------------------

@reads_bytecode
def test_a_break_goes_on_with_a_second_graph():
    history = []

    def f(x, w):
        y = torch.tanh(x @ w)
        loss = y.square().mean()
        history.append(loss.item())
        return loss * 2, [y, {"y": y}]

    compiled = compiled_by_recording(f)
    for _ in range(4):
        a, w = torch.randn(3, 3), torch.randn(3, 3)
        torch.testing.assert_close(compiled(a, w), f(a, w), rtol=0, atol=0)
    assert len(history) == 8 and history[::2] == history[1::2]
    assert len(compiled.breaks) == 2 and all(len(known) == 1 for known in compiled.entries.values())
    assert (result := compiled(a, w)[1])[0] is result[1]["y"]


@reads_bytecode
def test_globals_are_named_and_not_copied():
    scope = {"torch": torch, "print": print}
    scope["itself"] = [scope]                               # as the builtins of some processes have
    exec("def f(x):\n    def inner(y): return y * two\n    print(end='')\n    return inner(x)\ntwo = 2", scope)
    compiled = compiled_by_recording(scope["f"])
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0)) and compiled.breaks
    scope["two"] = 3
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 3.0))


@reads_bytecode
def test_a_function_made_before_a_break_is_complete():
    def f(x):
        k = float(x[0, 0])

        def inner(y, n=2, *, scale=k):
            return y * n * scale
        print(end="")
        return inner(x), inner(x, scale=0.5)

    compiled = compiled_by_recording(f)
    torch.testing.assert_close(compiled(x), f(x), rtol=0, atol=0)
    assert len(compiled.breaks) == 2


def test_side_effects_happen_once_in_order():
    seen, box = [], type("Box", (), {"n": 0})()

    def helper(x):
        seen.append("helper")
        box.n += 1
        return x * box.n

    def f(x, n):
        for i in range(n):
            x = helper(x) + i
            seen.append(float(x.sum()))
        return x

    compiled = compiled_by_recording(f)
    for _ in range(3):
        box.n, before = 0, len(seen)
        ours = compiled(x, 3)
        noted, box.n = seen[before:], 0
        assert torch.equal(ours, f(x, 3)) and seen[before + 6:] == noted


def test_a_branch_on_data_takes_both_sides():
    def f(x):
        return (x * 2 if x.sum() > 0 else x - 1) + 1
    compiled = compiled_by_recording(f)
    for value in (1.0, -1.0, 1.0):
        assert torch.equal(compiled(x * 0 + value), f(x * 0 + value))


@reads_bytecode
def test_too_many_versions_fall_back_to_the_interpreter():
    def f(x, n):
        return x * n
    compiled = compiled_by_recording(f)
    for n in range(12):
        assert torch.equal(compiled(x, n), f(x, n))
    assert entries(compiled) == tiny.LIMIT


# ---- joint graph, decompositions, cut --------------------------------------------------------------------------

def joint_of(f, *examples):
    with tiny.Recorder() as recorder:
        outputs = list(f(*[recorder.input(x) for x in examples]))
    joint = tiny.joint_graph(recorder, outputs)
    return joint._replace(graph=tiny.decompose(joint.graph))


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x ** 3)))


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def test_a_joint_graph_has_eagers_gradients():
    def f(a, b):
        return F.layer_norm(gelu(a @ b), (4,)), a.sum(1)
    inputs, tangents = [leaf(3, 4), leaf(4, 4)], [torch.randn(3, 4), torch.randn(3)]
    joint = joint_of(f, *inputs)
    assert (joint.tangents, joint.outputs) == (2, 2)
    with torch.no_grad():
        made = tiny.interpret(joint.graph, inputs + tangents)
    eager = f(*inputs)
    for ours, right in zip(made, [*eager, *torch.autograd.grad(eager, inputs, tangents)]):
        torch.testing.assert_close(ours, right)


OPERATORS = [
    lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="tanh"), lambda x: torch.softmax(x, -1), lambda x: torch.softmax(x, 0),
    lambda x: F.layer_norm(x, (6,)), lambda x: F.layer_norm(x, (5, 6)), lambda x: x.pow(2) + x.pow(3) + x.square(),
    lambda x: torch.relu(x - 0.2),
    lambda x: 1 - x, lambda x: x.mean(-1) + x.mean((0, 1)).sum(), lambda x: torch.tanh(x) * x.abs().sqrt(), lambda x: x.mean(),
    lambda x: torch.cat([*x.split([2, 3], dim=0), 2 * x]), lambda x: x.amax(-1),
    lambda x: x.masked_fill(x > 0, 0.5), lambda x: torch.where(x > 0, x, x.t().reshape(5, 6)), lambda x: torch.cumsum(x, 0),
    lambda x: x.split(2, dim=1)[1].exp(), lambda x: (x.to(torch.float64) * 2).float(), lambda x: x / x.sum(-1, keepdim=True).exp(),
    lambda x: x[1:4, ::2].t() * 3, lambda x: x.unsqueeze(1).expand(5, 3, 6).sum(1), lambda x: torch.sigmoid(x) + F.silu(x),
    lambda x: x.t().exp().t().contiguous().view(6, 5) * 2, lambda x: x.t().reshape(5, 6).exp() + x, lambda x: x.exp().t().flatten().sin(),
]


@pytest.mark.parametrize("target", ["cpu", pytest.param("cuda", id="triton")])
@pytest.mark.parametrize("n", range(len(OPERATORS)))
def test_operators_compute_what_eager_computes(n, target, monkeypatch):
    if target == "cuda" and not INTERPRETED and not torch.cuda.is_available():
        pytest.skip("Triton needs a GPU or TRITON_INTERPRET=1")
    device = "cuda" if target == "cuda" and not INTERPRETED else "cpu"
    f, x = OPERATORS[n], leaf(5, 6).to(device).detach().requires_grad_()
    compiled = tiny.compile(f, functools.partial(tiny.loops, target=target))
    ours, right = compiled(x), f(x)
    torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-5)
    g = torch.randn_like(right)
    for a, b in zip(torch.autograd.grad(ours, x, g), torch.autograd.grad(right, x, g)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert compiled.breaks == []


def test_relu_of_infinities_and_nan():
    x = torch.tensor([-math.inf, -1.0, 2.0, math.inf, math.nan])
    torch.testing.assert_close(tiny.compile(lambda x: F.relu(x))(x), F.relu(x), equal_nan=True, rtol=0, atol=0)


def by_hand(x):
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


HIDDEN = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1], [1, 1, 1, 1]], dtype=torch.bool)
ODD = torch.tensor([[1.0, 1.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0], [0.0, 3.0, 3.0, float("nan")]])


@pytest.mark.parametrize("f", [
    lambda x: by_hand(x), lambda x: by_hand(x.masked_fill(HIDDEN, -1e9)), lambda x: x.masked_fill(HIDDEN, float("-inf")).softmax(-1),
    lambda x: x.amax(-1), lambda x: x.max(-1)[0], lambda x: x.max(), lambda x: torch.maximum(x, x.flip(-1)), lambda x: x.clamp(0, 1),
    lambda x: torch.relu(x), lambda x: torch.log_softmax(x, -1)])
def test_ties_and_nan_have_eagers_gradients(f):
    """Two equal maxima share a gradient. Some of these formulas write while they differentiate; those run operator by operator."""
    x = ODD.clone().requires_grad_()
    ours, right = tiny.compile(f)(x), f(x)
    torch.testing.assert_close(ours, right, equal_nan=True)
    g = torch.randn_like(right)
    torch.testing.assert_close(torch.autograd.grad(ours, x, g), torch.autograd.grad(right, x, g), equal_nan=True)


def test_no_elements():
    for shape in ((0,), (0, 5), (5, 0)):
        for f in (lambda x: x * 2 + 1, lambda x: (x + 1).sum(-1)):
            torch.testing.assert_close(tiny.compile(f)(torch.ones(shape)), f(torch.ones(shape)))


def saved_bytes(call, known):
    sizes = {}

    def note(t):
        if t.untyped_storage().data_ptr() not in known:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        keep = call()
    del keep
    return sum(sizes.values())


@reads_bytecode
def test_the_cut_saves_less_than_eager():
    x, w = leaf(64, 32), leaf(32, 32)
    known = {t.untyped_storage().data_ptr() for t in (x, w)}

    def f():
        return gelu(x @ w)
    compiled = tiny.compile(lambda x, w: gelu(x @ w))
    compiled(x, w)
    one = 64 * 32 * 4
    assert saved_bytes(f, known) >= 4 * one
    assert saved_bytes(lambda: compiled(x, w), known) == one                 # the product; the rest is arithmetic


def test_the_cut_is_minimal():
    capacity = {"s": {"a": 3, "b": 2}, "a": {"c": 2, "b": 1}, "b": {"c": 2, "t": 1}, "c": {"t": 9}, "t": {}}
    import itertools
    nodes, best = "abc", 99
    for k in range(4):
        for side in itertools.combinations(nodes, k):
            side = {"s", *side}
            best = min(best, sum(room for a in side for b, room in capacity[a].items() if b not in side))
    total = {a: dict(rooms) for a, rooms in capacity.items()}
    side = tiny.minimum_cut(total, "s", "t")
    assert sum(room for a in side for b, room in capacity.get(a, {}).items() if b not in side) == best


def test_a_cheap_chain_is_computed_again_and_a_product_is_not():
    joint = joint_of(lambda x, w: [torch.exp(torch.sin(x @ w))], leaf(4, 4), leaf(4, 4))
    forward, backward = tiny.partition(joint)
    assert [n.target for n in forward.nodes].count(torch.ops.aten.mm.default) == 1
    assert [n.target for n in backward.nodes].count(torch.ops.aten.exp.default) == 1
    assert len([n for n in backward.inputs if n not in joint.graph.inputs]) == 1


# ---- loops and fusion ------------------------------------------------------------------------------------------

def visited(seen, rows):
    """The positions that the text names, iteration by iteration."""
    text = tiny.position(seen, rows)
    return text and [eval(text, {}, {"r": r, "c": c}) for r in range(rows) for c in range(seen.numel() // rows)]


VIEWS = [lambda t: t, lambda t: t.t(), lambda t: t.reshape(3, 8), lambda t: t[1:3, ::2], lambda t: t[None].expand(5, 4, 6), lambda t: t[2],
         lambda t: t.reshape(2, 2, 6).permute(2, 0, 1), lambda t: t.flatten(), lambda t: t[:, 3:4].expand(4, 9), lambda t: t[1, 2],
         lambda t: t.reshape(2, 2, 2, 3).permute(3, 1, 0, 2)[:, :, None]]


@pytest.mark.parametrize("view", VIEWS)
def test_positions_of_a_view(view):
    data = torch.arange(24).reshape(4, 6)
    seen, right = view(torch.empty(4, 6, device="meta")), view(data).flatten().tolist()
    told = {rows: visited(seen, rows) for rows in range(1, len(right) + 1) if len(right) % rows == 0}
    assert all(found in (None, right) for found in told.values())
    assert told[math.prod(seen.shape[:-1])] == told[len(right)] == right            # rows of its own last dimension; one column


def test_equal_positions_have_equal_texts():
    def text(view, rows=4):
        return tiny.position(view(torch.empty(4, 6, device="meta")), rows)
    for same in (lambda t: t, lambda t: t.reshape(2, 12), lambda t: t.t().t(), lambda t: t[None, :, None]):
        assert text(same) == "c + 6 * r"
    assert text(lambda t: t, 24) == "r" and text(lambda t: t, 1) == "c" and text(lambda t: t[:, :1].expand(4, 6)) == "6 * r"
    assert text(lambda t: t.t(), 6) == "6 * c + r" and text(lambda t: t[2:, 1:], 2) == "13 + c + 6 * r"
    assert text(lambda t: t[:3].t(), 9) is None                    # six rows of three cannot be seen as nine


def kernels_of(f, *examples, refused=None):
    steps, _ = tiny.fused(tiny.decompose(tiny.record(f, *examples)), refused)
    return [s for s in steps if s.loops]


def test_what_runs_in_step_is_one_kernel():
    a, b = torch.randn(8, 16), torch.randn(16)
    assert len(kernels_of(lambda a, b: gelu(a + b), a, b)) == 1
    assert len(kernels_of(lambda a, b: F.layer_norm(a + a, (16,), b, b), a, b)) == 1
    assert len(kernels_of(lambda a, b: torch.softmax(a * 2, -1).sum(-1), a, b)) == 1
    assert len(kernels_of(lambda a, b: (a.exp(), a.sin(), a.sum(-1)), a, b)) == 1          # they share what they read


def test_what_would_be_wrong_is_refused():
    square = torch.randn(16, 16)
    refused = []
    assert len(kernels_of(lambda a: a.exp() + a.exp().t(), square, refused=refused)) == 2
    assert any("which is made at" in reason for _, _, reason in refused)
    assert len(kernels_of(lambda a: a * 2 + (a * 2).sum(-1), square)) == 2                  # a row's sum is needed in all rows
    assert len(kernels_of(lambda a: (a.exp() @ a).exp() + a.exp(), square)) == 2            # the product stands between
    assert len(kernels_of(lambda a: (a.sum(-1), a.view(8, 32).sum(-1)), square)) == 2
    for f in (lambda a: a.exp() + a.exp().t(), lambda a: a * 2 + (a * 2).sum(-1), lambda a: (a.exp() @ a).exp() + a.exp()):
        torch.testing.assert_close(tiny.compile(f)(square), f(square), rtol=1e-4, atol=1e-5)


def test_no_order_for_two_steps():
    x, y, z = [tiny.Node(n, None, (), {}, torch.empty(4)) for n in "xyz"]
    first, between, last = [tiny.Step(set(reads), {w}, ["loop"]) for reads, w in (((), x), ((x,), y), ((x, y), z))]
    assert tiny.merged([first, between, last], first, last) is None


# ---- the whole -------------------------------------------------------------------------------------------------

@reads_bytecode
def test_the_host_program_frees_what_is_done():
    model, (x, w) = tiny.GPT(layers=1, width=16, heads=2, length=8), (torch.randint(256, (2, 8)), torch.randint(256, (2, 8)))
    texts = []

    def keep(recorder, outputs):
        call = tiny.loops(recorder, outputs)
        texts.append(call)
        return call
    compiled = tiny.compile(model, keep)
    compiled(x, w).backward()
    assert compiled.breaks == [] and len(texts) == 1
    graph = tiny.decompose(tiny.record(lambda a, b: ((a @ b).exp() @ b), torch.randn(4, 4), torch.randn(4, 4)))
    lines = tiny.program(graph, "cpu").text.splitlines()
    assert any("; del " in line for line in lines) and lines[-1].startswith("    return")


@reads_bytecode
def test_kernels_run_when_their_files_are_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny.tempfile, "tempdir", str(tmp_path))
    on_a_cpu = functools.partial(tiny.loops, target="cpu")
    f, x = tiny.compile(lambda x: (x * 3.25).exp() - 7.5, on_a_cpu), torch.randn(3, 5)
    tiny.LOADED.clear()
    for x in x, torch.randn(4, 5):
        assert torch.allclose(f(x), (x * 3.25).exp() - 7.5) and list(tmp_path.iterdir()) == []
    assert tiny.LOADED


def test_a_gpt_trains_to_eagers_losses():
    sizes = dict(steps=8, device="cpu", batch=4, layers=2, width=32, heads=2, length=16)
    eager, _ = tiny.train(lambda model: model, **sizes)
    ours, _ = tiny.train(tiny.compile, **sizes)
    assert eager[-1] < eager[0]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(eager), rtol=1e-4, atol=1e-4)


def test_attention_by_hand():
    def f(x, w):
        q, k, v = [t.view(2, 8, 2, 4).transpose(1, 2) for t in (x @ w).split(8, dim=2)]
        scores = (q @ k.transpose(2, 3) / 2).masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), float("-inf"))
        return (torch.softmax(scores, -1) @ v).transpose(1, 2).reshape(2, 8, 8)
    x, w = leaf(2, 8, 8), leaf(8, 24)
    compiled = tiny.compile(f)
    for a, b in zip(torch.autograd.grad(compiled(x, w).square().sum(), (x, w)), torch.autograd.grad(f(x, w).square().sum(), (x, w))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-6 * b.abs().max().item())          # sums of numbers up to 300
    assert compiled.breaks == []


def test_a_broken_function_trains():
    seen = []

    def f(x, w):
        y = gelu(x @ w)
        seen.append(y.sum().item())
        return (y * x).sum()
    x, w = leaf(4, 4), leaf(4, 4)
    compiled = tiny.compile(f)
    for a, b in zip(torch.autograd.grad(compiled(x, w), (x, w)), torch.autograd.grad(f(x, w), (x, w))):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert len(seen) == 2


@pytest.mark.processes
@pytest.mark.skipif(INTERPRETED or torch.cuda.is_available(), reason="the Triton kernels run in this process")
def test_the_triton_kernels_in_its_interpreter():
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider",
                           "-k", "operators and triton", __file__],
                          env=dict(os.environ, TRITON_INTERPRET="1"), capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-4000:]
