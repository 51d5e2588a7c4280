"""Graph breaks: same results and effects as eager, the expected number of graphs, a reason with a line."""
import ast
import contextlib
import types

import pytest
import torch
import torch.nn as nn
from recorders import Captures, Recorder, same

import minicompile
from minicompile.ch03_capture.capture import CaptureOptions
from minicompile.ch04_breaks.breaks import capture_frame
from minicompile.errors import GraphBreakError, SkipFrame

pytestmark = pytest.mark.usefixtures("fresh")


LOG = []


def effect(*args):
    """Something capture cannot look into."""
    LOG.append([a.clone() if isinstance(a, torch.Tensor) else a for a in args])
    return types.SimpleNamespace(value=len(LOG), __builtins__=None) and float(args[0].sum()) if args else None


effect = minicompile.disable(effect)


def straight(x):
    y = x + 1
    effect(y)
    z = y * 2
    effect(z, 3)
    return y + z


def on_stack(x):
    return [x + 1, x * 2, effect(x - 1), x * 3], {"a": effect(x)}


def branch(x):
    y = x * 2
    if y.sum() > 0:
        return y + 1
    elif y.sum() < -100:
        return y
    return y - 1


def conditional_expression(x):
    return (x * 2 if x.sum() > 0 else x * 3) + (x.sum() > 0 and x.mean())


def item(x):
    n = (x * 0 + 3).sum().item()
    return x * n


def callee_breaks(x):
    def inner(v):
        v = v * 2
        effect(v)
        return v + 1
    return inner(x) + inner(x + 1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3)
        with torch.no_grad():
            self.lin.weight.fill_(0.5), self.lin.bias.zero_()

    def forward(self, x):
        h = self.lin(x)
        effect(h)
        return h.relu()


LAYERS = nn.Sequential(Layer(), Layer())


def module_breaks(x):
    return LAYERS(x + 1) * 2


def with_no_grad(x):
    w = x.clone().requires_grad_(True) if False else x
    with torch.no_grad():
        y = w * 2
        effect(y)
        z = y + 1
    return z, w * 3


def nested_contexts(x):
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            a = x @ x.T
            effect(a)
            b = x @ x.T
        c = x @ x.T
    return a, b, c, torch.is_grad_enabled()


def closure_cells(x):
    n = 1
    def add(y):
        nonlocal n
        n += 1
        return y + n
    a = add(x)
    effect(a)
    b = add(a)
    return a, b, n, add(x)


def side_effects_in_order(x):
    box = [x]
    d = {"k": 1}
    box.append(x + 1)
    d["j"] = box[1]
    effect(len(box), d["k"]) if False else effect(box[1])
    box.append(d)
    d["k"] = 5
    return box, d


def loop_breaks(x):
    total = x
    for i in range(4):
        total = total + i
        effect(total)
    return total * 2


def loop_before_and_after(x):
    for i in range(3):
        x = x + i
    effect(x)
    out = []
    for i in range(3):
        out.append(x * i)
    return out


def try_breaks(x):
    y = x + 1
    try:
        effect(y)
        raise ValueError("no")
    except ValueError:
        y = y * 2
    finally:
        y = y - 1
    return y


def store_attribute(x):
    ns = types.SimpleNamespace(a=1)
    ns.a = x + 1
    ns.b = ns.a * 2
    return ns.a, ns.b


def tolist_and_f_string(x):
    y = x + 1
    s = f"{y.sum().item():.2f}"
    return s, [v * 2 for v in y.tolist()[0]], y


def unpack_starred(x):
    a, *b = effect(x), x, x + 1
    c, d = torch.nonzero(x + 5, as_tuple=True)
    return a, b, c, d


def mask_index(x):
    return x[x > 0] * 2 + 1


def star_call(x):
    args, kw = [x, 2], {}
    r = effect(*args, **kw)
    return x * 2, r


def in_place_operator(x):
    y = x.clone()
    y += torch.tensor(x.tolist())
    y[0] = effect(y)
    return y


def suppress(x):
    with contextlib.suppress(KeyError):
        y = x + 1
        effect(y)
        raise KeyError
    return y * 2


def generator_expression(x):
    return sum(effect(x * i) for i in range(3)) + x


PROGRAMS = [  # function, number of graphs over inputs (x, -x), or None when it depends on the Python version
    (straight, 3), (on_stack, None), (branch, None), (conditional_expression, None), (item, 2), (callee_breaks, None),
    (module_breaks, None), (with_no_grad, 2), (nested_contexts, 2), (closure_cells, None), (side_effects_in_order, None),
    (loop_breaks, 3), (loop_before_and_after, 2), (try_breaks, 2), (store_attribute, None), (tolist_and_f_string, None),
    (unpack_starred, None), (mask_index, None), (star_call, None), (in_place_operator, None), (suppress, None),
    (generator_expression, None)]


@pytest.mark.parametrize("function, graphs", PROGRAMS, ids=[p[0].__name__ for p in PROGRAMS])
def test_break(function, graphs):
    backend = Recorder()
    compiled = minicompile.compile(function, backend=backend)
    torch.manual_seed(0)
    x = torch.randn(2, 3)
    for value in (x, x, -x.abs(), x.abs()):
        LOG.clear()
        expected, log = function(value.clone()), list(LOG)
        LOG.clear()
        same(compiled(value.clone()), expected)
        same(LOG, log)
    if graphs is not None:
        assert len(backend.graphs) == graphs


def test_fullgraph_names_reason_line_and_chain():
    with pytest.raises(GraphBreakError) as info:
        minicompile.compile(callee_breaks, backend="eager", fullgraph=True)(torch.ones(2))
    text = str(info.value)
    assert "effect" in text and "test_breaks.py" in text and "inner" in text and "callee_breaks" in text


def test_break_reason_has_a_line():
    captured = capture_frame(item, {"x": torch.ones(3)}, CaptureOptions())
    assert [b.location.function for b in captured.breaks] == ["item"]
    assert "item()" in captured.breaks[0].reason and captured.gm is not None


def test_users_exception_surfaces():
    def f(x):
        y = x + 1
        if y.shape[0] == 2:
            raise KeyError("two")
        return y @ torch.ones(5)
    compiled = minicompile.compile(f, backend="eager")
    with pytest.raises(KeyError, match="two"):
        compiled(torch.ones(2))
    minicompile.reset()
    with pytest.raises(RuntimeError, match="size|shape"):
        minicompile.compile(f, backend="eager")(torch.ones(3))


def test_many_rounds_do_not_nest():
    def f(x):
        n = 0
        while n < 3000:
            effect(x)
            n += 1
        return x + n
    compiled = minicompile.compile(f, backend="eager")
    assert torch.equal(compiled(torch.zeros(1)), torch.full((1,), 3000.0))


def test_generators_are_not_captured():
    with pytest.raises(SkipFrame):
        capture_frame(lambda x: (yield), {"x": 1})


def test_a_grad_switch_made_before_a_break_restores_the_mode_it_was_made_in():
    def f(x):
        with torch.no_grad():
            with torch.set_grad_enabled(False):
                try:
                    x.view(5, 11)
                except RuntimeError as e:
                    name = type(e).__name__
        return x + 1, name, torch.is_grad_enabled()
    compiled = minicompile.compile(f, backend="eager")
    for _ in range(3):
        assert compiled(torch.ones(4, 4))[1:] == ("RuntimeError", True)
        assert torch.is_grad_enabled()


REWRITTEN = """
def rewritten(x, scale):
    kept, item = x + 1, Thing()
    inner = lambda y: y * kept + scale
    effect(x)
    for step in [1, 2]:
        kept = kept * step
        item.value = inner(kept)
        effect(x)
    return inner(item.value) + known
"""


def test_names_that_are_no_identifiers():
    """Who rewrites code chooses names that no source has: the asserts of pytest leave locals `@py_assert1` behind."""
    tree = ast.parse(REWRITTEN)
    new = {name: f"@{name}.1" for name in ("x", "kept", "inner", "step", "known", "y", "value")} | {"item": "class", "scale": "\N{SNOWMAN}"}
    for node in ast.walk(tree):
        for field in ("id", "arg", "attr"):
            if getattr(node, field, None) in new:
                setattr(node, field, new[getattr(node, field)])
    scope = {"effect": effect, "Thing": type("Thing", (), {}), "@known.1": 5}
    exec(compile(tree, "rewritten", "exec"), scope)
    compiled = minicompile.compile(scope["rewritten"], backend="eager")
    for n in (3, 4, 3):
        x = torch.randn(n)
        same(compiled(x, 2), scope["rewritten"](x, 2))


class Fields(dict):
    """An output as libraries have them: attributes are items, and each assignment looks at all names."""

    NAMES = ("loss", "logits", "states")

    def __init__(self, **values):
        for name in self.NAMES:
            setattr(self, name, values.get(name))

    def __setattr__(self, name, value):
        if name in {known for known in self.NAMES} and value is not None:
            self[name] = value
        super().__setattr__(name, value)


def puts_into_fields(x):
    loss = (x * 2).sum()
    loss.item()
    return Fields(loss=loss, logits=x)


def test_what_a_frame_without_a_graph_calls_is_not_captured_by_itself():
    """The rest of this function only makes an object. Its methods and their comprehensions have nothing for the compiler either."""
    with Captures() as seen:
        for n in (2, 3, 4):
            x = torch.ones(n)
            got = minicompile.compile(puts_into_fields, backend="eager")(x)
            assert type(got) is Fields and got.logits is got["logits"] is x and got.loss.item() == 2 * n and list(got) == ["loss", "logits"]
    assert seen.functions == {"puts_into_fields"} and len(seen.breaks) == 2          # the second version is for any size
