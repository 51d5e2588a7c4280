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


def twice(x, t):
    return x * 2


def behind_another(x, t):
    effect(x)
    y = x + 1
    return twice(y, t)


def in_a_loop(x, t):
    for u in [t, t]:
        effect(x)
        y = x + 1
        x = y * twice(y, u)
    effect(x)
    y = x + 1
    return y, {u: x for u in (t, y)}[t]


@pytest.mark.parametrize("function", [
    behind_another, in_a_loop,
    lambda x, t: twice(x, t), lambda x, t: twice(x, t=t) + 1, lambda x, t: twice(x + 1, t) * x, lambda x, t: (x, t)[0] + 1,
    lambda x, t: [twice(y, t) for y in (x, x + 1)], lambda x, t: x * t, lambda x, t: twice(twice(x, t), t)], ids=range(9))
def test_an_argument_that_breaks_is_loaded_with_another(function):
    """By one instruction, from Python 3.13 on, in the middle of which no graph can end."""
    class Marked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            return super().__torch_function__(function, types, args, kwargs or {})

    compiled = minicompile.compile(function, backend="eager")
    for n in (2, 3):
        given = torch.arange(4.0), torch.tensor(n).as_subclass(Marked)
        got, want = compiled(*given), function(*given)
        same(got, want)


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


class Layer(nn.Module):
    def __init__(self, number, breaks):
        super().__init__()
        self.number, self.breaks, self.scale = number, breaks, nn.Parameter(torch.full((3,), 1.0 + number))

    def forward(self, x):
        if self.breaks:
            effect(x)
        return torch.tanh(x * self.scale + self.number)


class Layers(nn.Module):
    def __init__(self, count, breaks=(1,)):
        super().__init__()
        self.layers = nn.ModuleList(Layer(n, n in breaks) for n in range(count))


def goes_over(over, form=lambda x, n: x):
    """A loop over what `over` makes of the layers."""
    def loop(model, x):
        for item in over(model.layers):
            layer, n = item if isinstance(item, tuple) else (item, 1)
            x = form(layer(x), n)
        return x * 2
    return loop


def parts_of(pairs):
    return goes_over(pairs, lambda x, n: x * n)


LOOPS_OVER_LAYERS = [
    goes_over(lambda layers: layers), goes_over(lambda layers: layers[:6]), goes_over(list), goes_over(tuple),
    goes_over(lambda layers: dict(enumerate(layers)).values()), parts_of(lambda layers: [(layer, 2) for layer in layers]),
    parts_of(lambda layers: zip(layers, [1, 2.5, 3, 4, 5, 6])), parts_of(lambda layers: zip(layers, torch.ones(8, 3))),
    parts_of(lambda layers: {layer: n for n, layer in enumerate(layers)}.items())]


@pytest.mark.parametrize("number", range(len(LOOPS_OVER_LAYERS)))
def test_the_rest_of_a_loop_over_modules_is_one_graph(number):
    function, backend = LOOPS_OVER_LAYERS[number], Recorder()
    compiled, seen = minicompile.compile(function, backend=backend), []
    for model in (Layers(8), Layers(8), Layers(7, breaks=(2,))):
        for size in (2, 2, 3):
            x, before = torch.randn(size, 3), backend.ran
            same(compiled(model, x), function(model, x))
            seen.append(backend.ran - before)
    assert set(seen) == {3}                              # before the layer that breaks, in it behind the break, and all others


def counted(model, x):
    total = x
    for n, layer in enumerate(model.layers, 3):
        total = total + layer(x) * n
    return total, n


def left(model, x):
    for layer in model.layers:
        x = layer(x)
        if layer.number == 5:
            return x * 3


def not_left(model, x):
    for layer in model.layers:
        if layer.number % 3 == 2:
            continue
        x = layer(x)
        if layer.number == 50:
            break
    else:
        x = x * 100
    print(end="")
    return x + 1


def iterator_with_a_name(model, x):
    iterator = iter(list(model.layers))
    box = [iterator]
    for layer in iterator:
        x = layer(x)
        if layer.number == 5:
            break
    return x, [layer.number for layer in box[0]]


def exhausted(model, x):
    layers = list(model.layers)
    iterator = iter(layers)
    for layer in iterator:
        x = layer(x)
    layers.append(layers[0])
    return x, next(iterator, None)


def next_in_the_body(model, x):
    iterator = iter(model.layers)
    for layer in iterator:
        x = layer(x)
        if layer.number == 4:
            x = next(iterator)(x) * 3
    return x


def how_far_two_have_come(model, x):
    first, second = iter(model.layers), iter(list(model.layers)[:5])
    for a, b in zip(first, second):
        x = b(a(x))
    return x, next(first).number, next(second, None)


def pairs_of_one(model, x):
    iterator = iter(model.layers)
    for a, b in zip(iterator, iterator):
        x = b(a(x))
    return x


def shared_by_two_loops(model, x):
    iterator = iter(model.layers)
    for layer in iterator:
        x = layer(x)
        for inner in iterator:
            x = inner(x) * 2
            if inner.number % 3 == 0:
                break
    return x


def grows(model, x):
    layers = list(model.layers)
    for layer in layers:
        x = layer(x)
        if layer.number == 5:
            layers.append(layers[0])
    return x, len(layers)


def changes_its_size(model, x):
    layers = dict(enumerate(model.layers))
    try:
        for layer in layers.values():
            x = layer(x)
            if layer.number == 4:
                layers[99] = layer
    except RuntimeError as error:
        return x, str(error)


def raises_inside(model, x):
    seen = []
    try:
        for layer in model.layers:
            x = layer(x)
            seen.append(layer.number)
            if layer.number == 5:
                raise ValueError(seen)
    except ValueError as error:
        return x, error.args
    finally:
        seen.append("left")


def loop_in_a_loop(model, x):
    for n in range(3):
        for layer in model.layers:
            x = layer(x) + n
    return x


def grows_and_is_left(model, x):
    layers = {layer.number: layer for layer in model.layers}
    for number, layer in layers.items():
        x = layer(x)
        if number == 5:
            layers["new"] = layer
            break
    return x, len(layers)


def is_emptied_and_filled(model, x):
    layers, out = list(model.layers), []
    iterator = iter(layers)
    for layer in iterator:
        x = layer(x)
        if layer.number == 5:
            del layers[1:]
            break
    layers += model.layers
    for layer in iterator:
        out.append(layer.number)
    return x, out


def on_values(model, x):
    for layer in model.layers:
        x = layer(x)
        if layer.number == 6 and x.sum() > 0:
            x = x - 5
    return x


@pytest.mark.parametrize("breaks", [(1,), (0,), (1, 4), (7,), range(8)], ids=str)
@pytest.mark.parametrize("function", [
    counted, left, not_left, iterator_with_a_name, exhausted, next_in_the_body, how_far_two_have_come, pairs_of_one, shared_by_two_loops,
    grows, changes_its_size, grows_and_is_left, is_emptied_and_filled, raises_inside, loop_in_a_loop, on_values], ids=lambda f: f.__name__)
def test_loops_over_modules(function, breaks):
    compiled = minicompile.compile(function, backend="eager")
    for model in (Layers(8, breaks), Layers(8, breaks), Layers(10, breaks)):
        for x in (torch.randn(2, 3), -torch.ones(2, 3)):
            same(compiled(model, x), function(model, x))


def test_a_loop_that_breaks_at_each_turn_has_one_version_for_all():
    function, made = goes_over(lambda layers: layers), []
    for count in (5, 40):
        minicompile.reset()
        with Captures() as seen:
            model, x = Layers(count, range(count)), torch.randn(2, 3)
            for layer in model.layers:
                layer.number = 0
            same(minicompile.compile(function, backend="eager")(model, x), function(model, x))
        made.append((len(seen.graphs), len(seen.breaks)))
    assert made[0] == made[1]


def test_gradients_of_a_loop_that_was_unrolled():
    model, function = Layers(8), goes_over(lambda layers: layers)
    found = []
    for f in (function, minicompile.compile(function, backend="aot_eager")):
        model.zero_grad()
        f(model, torch.linspace(-1, 1, 6).view(2, 3)).sum().backward()
        found.append([p.grad for p in model.parameters()])
    same(*found)


def breaks_in_the_middle(x):
    y = x + 1
    effect(y)
    return y * 2


def ends_in_a_function(x):
    return breaks_in_the_middle(x)


def ends_by_name(x):
    found = x.nonzero()
    return found


def ends_after_a_write(x):
    LOG.append(1)
    return x.nonzero()


def ends_where_it_asks(x):
    if torch.compiler.is_compiling():
        return x.nonzero()
    return x


@pytest.mark.parametrize("function, evaluated", [
    (lambda x: x.nonzero(), True), (ends_by_name, True), (lambda x: x[x.bool()] if x is None else torch.unique(x), True),
    (ends_in_a_function, True), (ends_after_a_write, False), (breaks_in_the_middle, False), (lambda x: x.nonzero() + 1, False)])
def test_a_frame_that_returns_what_its_break_gives_is_evaluated(function, evaluated):
    x = torch.tensor([0.0, 2.0, 1.0])
    assert (capture_frame(function, {"x": x}).body == "return __EVALUATE") == evaluated
    with Captures() as seen:
        compiled = minicompile.compile(function, backend="eager")
        for _ in range(3):
            same(compiled(x), function(x))
    assert function is not ends_in_a_function or len(seen.graphs) == 2             # those of the function that it calls


def test_a_frame_that_was_told_that_it_is_compiled_goes_on_as_compiled():
    x = torch.tensor([0.0, 2.0, 1.0])
    same(minicompile.compile(ends_where_it_asks, backend="eager")(x), x.nonzero())


def nan_in_a_list(x, v, values):
    y = x + (2 if v != v else 1)
    effect(y)
    return y, v in values, v


def nan_of_an_object(x, v, values):
    holder = types.SimpleNamespace(v=v)
    y = x + (2 if values[0] != values[0] else 1)
    effect(y)
    return y, holder.v in values, values[0]


@pytest.mark.parametrize("function", [nan_in_a_list, nan_of_an_object])
@pytest.mark.parametrize("nan", [float, complex])
def test_a_nan_is_the_object_that_came_in(function, nan):
    compiled, first = minicompile.compile(function, backend="eager"), nan("nan")
    for v, values in ((first, [first]), (first, [nan("nan")]), (n := nan("nan"), [n]), (n, [first]), (first, [n, first])):
        got, expected = compiled(torch.ones(2), v, values), function(torch.ones(2), v, values)
        same(got[0], expected[0])
        assert got[1] == expected[1] and got[2] is expected[2]
