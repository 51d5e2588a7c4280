"""Programs that break in awkward places. Each takes a tensor; `effect` is something no graph can hold."""
import collections
import contextlib
import io
import itertools
import sys
import types
import weakref

import torch

import minicompile

LOG = []


@minicompile.disable
def effect(*args):
    LOG.append([a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args])
    return args[0] if args else None


@minicompile.disable
def fail(x, error=ValueError):
    LOG.append("fail")
    raise error(f"failed at {len(LOG)}")


@minicompile.disable
def seen_state(box):
    LOG.append(repr(box))


def loop_over_list(x):
    out = []
    for y in [x, x + 1, x * 2]:
        effect(y)
        out.append(y * 3)
    return out


def loop_over_argument_list(x):
    items = [x, x + 1]
    total = x
    for i, y in enumerate(items):
        total = total + y * i
        if i == 0:
            items.append(total)
        effect(total, i)
    return total, items


def loop_over_attributes_just_written(x):
    box = types.SimpleNamespace(old=x)
    effect(x)                               # from here on the box is an object that came in
    box.new = x + 1
    seen, left = [], iter(vars(box).items())
    next(left)
    for name in vars(box):
        effect(box.new)
        seen.append(name)
    return seen, list(left), box.new


class InOrder(dict):
    def __iter__(self):
        there = super().__iter__()
        effect()
        return iter(sorted(there))

    def items(self):
        there = super().items()
        effect()
        return sorted(there)


def loop_over_a_dict_with_an_order_of_its_own(x):
    d = InOrder(b=2, a=1)
    effect(x)
    return [k for k in d], d.items(), x + 1


def loop_zip(x):
    total = x
    for a, (b, c) in zip([1, 2, 3], [(x, 1), (x + 1, 2), (x + 2, 3)]):
        total = total * a + b
        effect(total, c)
    return total


def loop_dict(x):
    d, out = {"a": x, "b": x + 1}, {}
    for k, v in d.items():
        effect(k, v)
        out[k] = v * 2
    for k in d:
        effect(k)
        out[k + k] = d[k] - 1
    return out


def loop_over_what_has_changed(x):
    """An iterator that waits at a break is over the changed container, and does not mind changes before it was made."""
    queue, d, members, out = collections.deque([1, 2], maxlen=3), {"a": 1, "b": 2}, {8, 0, 16}, []
    queue.append(3), d.update(c=3), members.add(24)
    for container in (queue, d.items(), members):
        for item in container:
            effect(item)
            out.append((item, x * 2))
    for item in queue:
        queue.rotate(1)
        try:
            effect(item)
        finally:
            break
    try:
        for item in members:
            effect(item)
            members.add(32)
    except RuntimeError as error:
        out.append(str(error))
    return x + 1, out, queue, members


def nested_loops(x):
    total = x
    for i in range(3):
        for j in range(i + 1):
            total = total + i * j
            if j == 1:
                continue
            effect(total, i, j)
        total = total * 2
    else:
        total = total - 1
    return total


def loop_break_continue(x):
    total = x
    for i in range(10):
        if i % 2:
            continue
        total = total + i
        effect(i)
        if i > 5:
            break
    else:
        total = total * 100
    return total


def while_item(x):
    n = 0
    while x.sum().item() < 30:
        x = x.abs() + 1
        n += 1
    return x, n


def while_tensor(x):
    x, n = x.abs(), 0
    while x.sum() < 50:
        x = x * 2 + 1
        n += 1
        if n > 8:
            break
    return x, n


class Countdown:
    def __init__(self, n):
        self.n = n

    def __iter__(self):
        return self

    def __next__(self):
        if self.n == 0:
            raise StopIteration
        self.n -= 1
        return self.n


def user_iterator(x):
    total, it = x, Countdown(3)
    for i in it:
        total = total + i
        effect(total)
    return total, it.n


def generator_on_stack(x):
    def numbers(n):
        for i in range(n):
            LOG.append(("yield", i))
            yield x + i
    total = x
    for y in numbers(3):
        total = total + y
        effect(total)
    return total


def generator_breaks_inside(x):
    def values():
        y = x + 1
        effect(y)
        yield y
        yield from [y * 2, y * 3]
    total = x
    for v in values():
        total = total + v
    return total


def map_and_filter(x):
    out = []
    for y in map(lambda v: effect(v * 2), [x, x + 1]):
        out.append(y + 1)
    for y in filter(None, [1, 0, 2]):
        effect(y)
        out.append(x * y)
    return out


def itertools_loops(x):
    out = []
    for i, y in zip(itertools.count(3), itertools.chain([x], (x + 1,))):
        effect(i)
        out.append(y * i)
    return out


def loop_over_tensor(x):
    total = 0
    for row in x:
        effect(row)
        total = total + row * 2
    return total


def comprehension(x):
    return [effect(x * i) + 1 for i in range(4)], {i: effect(x + i) for i in (1, 2)}, {effect(i) for i in (1, 2)}


def nested_comprehension(x):
    y = x + 1
    return [[effect(y * i + j) for j in range(2)] for i in range(2)], y


def two_comprehensions(x):
    first = [n for n in (1, 2, 3) if effect(x.sum() * n) is not None]       # `n` is unbound again after it
    return x, first, [n + float(x.sum()) for i, n in enumerate(first)]


def comprehension_with_closure(x):
    fs = [lambda v: v * i + effect(x).sum() for i in range(3)]
    effect(x)
    return [f(x) for f in fs]


def comprehension_shadows(x):
    i = 5
    out = [effect(x + i) for i in range(3) if i != 1]
    return out, i


def comprehension_hides_shared(x):
    """Its variable has the name of one that a closure shares, whose place it takes from Python 3.12 on."""
    v, shared = x + 1, lambda: v
    out = [effect(v * x) for v in (1, 2)]
    return shared() + v, out


def comprehension_hides_shared_and_iterates(x):
    v, shared = x + 1, lambda: v
    effect(v)
    out = [v * x for v in Countdown(3) if v != 1]
    effect(out)
    return shared() + v, out, [[effect(v) + w for w in Countdown(2)] for v in (x, v)]


def comprehension_of_closures_fails(x):
    v = x + 1
    for w in (1, 2):
        try:
            [(lambda: effect(v))() / v for v in (w, 0)]
        except ZeroDivisionError as error:
            effect(str(error))
        v = v + (lambda: v * w)()
    return v


def comprehension_in_comprehension_hides(x):
    v = w = x + 1
    shared = lambda: (v, w)
    out = [[(lambda: effect(w + v))() for v in (x, 2)] for w in (1, 2)]
    return out, [[w + effect(v) for v in (x, w)] for w in (1, 2)], shared()


def try_before(x):
    y = x + 1
    try:
        effect(y)
        z = y * 2
        fail(z)
    except ValueError as error:
        return z + 1, str(error)
    return y


def try_in_handler(x):
    try:
        y = x + 1
        raise KeyError("k")
    except KeyError as error:
        effect(y, str(error))
        y = y * 2
        effect(y, sys.exc_info()[0])
        z = y + 1
    return z, sys.exc_info()[0]


def generator_is_closed_by_an_exception_that_leaves_a_handler(x):
    try:
        for number in closing(5, "handler"):
            try:
                x = x + number
                effect(x)
                raise ValueError("v")
            except KeyError:
                pass
    except ValueError:
        x = x * 2
    return x + 1


def try_finally(x):
    try:
        y = x * 2
        effect(y)
        y = y + 1
    finally:
        effect(x)
        y = x + 5
        effect(y)
    return y * 2


def try_finally_fails(x):
    box = []
    try:
        try:
            box.append(x + 1)
            fail(x)
        finally:
            box.append(effect(x * 2))
            box.append(x * 3)
    except ValueError as error:
        box.append(str(error))
    return box


def bare_raise(x):
    try:
        try:
            y = x + 1
            raise ValueError("inner")
        except ValueError:
            effect(y)
            y = y * 2
            raise
    except ValueError as error:
        effect(x)
        return y + 1, error.args


def raise_from_handler(x):
    try:
        y = x * 2
        raise KeyError("first")
    except KeyError:
        effect(y)
        raise RuntimeError("second") from None


def nested_handlers(x):
    try:
        raise KeyError("outer")
    except KeyError:
        try:
            y = x + 1
            raise ValueError("inner")
        except ValueError:
            effect(y, str(sys.exc_info()[1]))
            y = y * 3
        effect(y, str(sys.exc_info()[1]))
        y = y + 1
    return y


def try_in_loop(x):
    out = []
    for i in range(4):
        try:
            y = x * i
            if i == 2:
                fail(y)
            effect(y)
            out.append(y + 1)
        except ValueError as error:
            out.append(str(error))
            continue
        finally:
            out.append(i)
    return out


def uncaught(x):
    y = x + 1
    effect(y)
    z = y * 2
    fail(z, KeyError)
    return z


def return_in_try(x):
    try:
        y = x + 1
        return effect(y) * 2
    finally:
        effect(x)


class Managed:
    def __init__(self, name, swallow=False):
        self.name, self.swallow = name, swallow

    def __enter__(self):
        LOG.append(("enter", self.name))
        return self

    def __exit__(self, kind, value, traceback):
        LOG.append(("exit", self.name, None if kind is None else kind.__name__))
        return self.swallow


def user_context(x):
    with Managed("a") as m:
        y = x + 1
        effect(y, m.name)
        y = y * 2
    return y + 1


def user_context_swallows(x):
    with Managed("a", swallow=True):
        y = x + 1
        fail(y)
        y = y * 2
    return y + 1


def several_contexts(x):
    with Managed("a"), torch.no_grad(), Managed("b"):
        y = x + 1
        effect(y, torch.is_grad_enabled())
        y = y * 2
    return y + 1, torch.is_grad_enabled()


@contextlib.contextmanager
def generator_context(x):
    LOG.append("before")
    try:
        yield x * 2
    finally:
        LOG.append("after")


def contextlib_context(x):
    with generator_context(x) as y:
        z = y + 1
        effect(z)
        z = z * 2
    return z


@contextlib.contextmanager
def quiet_gradients():
    with torch.no_grad():
        yield


def no_grad_in_generator_context(x):
    with quiet_gradients():
        y = x + 1
        effect(y, torch.is_grad_enabled())
        z = y * 2
    return z, torch.is_grad_enabled()


def contexts_of_torch(x):
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ x.T
            effect(y)
            z = x @ y.to(x.dtype)
            with torch.enable_grad():
                effect(z, torch.is_grad_enabled())
                w = z.float() * 2
    return y, z, w, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")


def set_grad_enabled_call(x):
    torch.set_grad_enabled(False)
    y = x * 2
    effect(y, torch.is_grad_enabled())
    torch.set_grad_enabled(True)
    return y + 1


def exit_stack(x):
    with contextlib.ExitStack() as stack:
        stack.enter_context(Managed("one"))
        y = x + 1
        effect(y)
        stack.enter_context(Managed("two"))
        y = y * 2
    return y


def redirect(x):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        y = x + 1
        print("inside", y.shape)
        y = y * 2
    return y, out.getvalue()


def middle_of_expression(x):
    return x.sum() + effect(x * 2).sum() * (1 + effect(x + 1)[0].sum()), [x, effect(x), *[effect(x), 3]]


def star_calls(x):
    def f(*args, a=1, **kw):
        return args, a, sorted(kw)
    args, kw = (x, x + 1), {"b": effect(x)}
    return f(*args, effect(2), a=effect(3), **kw), f(x, a=effect(x), c=x)


def method_on_stack(x):
    box = []
    box.append(effect(x + 1))
    box.extend([effect(x), x.add(effect(x), alpha=effect(2))])
    return box


def boolean_operators(x):
    a = x.sum() > 0 and x.mean() or x.max()
    b = x.sum().item() > 0 or effect("no")
    c = not (x > 0).all()
    return a, b, c, 1 if x.sum() > 0 else 2


def chained_comparison(x):
    return (0 < x.sum() < 10) + 0, x * 2


def assertion(x):
    y = x + 100
    assert y.sum() > 0, "no"
    z = y * 2
    assert z.sum() < 0, f"too large: {tuple(z.shape)}"
    return z


def conversions(x):
    y = x + 1
    n = int(y.sum())
    f = float(y.mean())
    return y * n, f, bool(y[0, 0] > 0), y.tolist(), f"{y.sum().item():.3f}"


def printing(x):
    for i in range(3):
        x = x + i
        print("round", i, tuple(x.shape), float(x.sum()))
    return x


class Box:
    def __init__(self, value):
        self.value, self.history = value, []


def half_mutated(x):
    box, d = Box(1), {"n": 0}
    box.value = 2
    box.history.append("a")
    d["n"] += 1
    seen_state((box.value, box.history, d))
    box.value = x + 1
    box.history.append("b")
    del d["n"]
    try:
        fail(x)
    except ValueError:
        seen_state((tuple(box.value.shape), box.history, d))
        box.history.append("c")
        effect(x)
    return box.value * 2, box.history, d


def nested_functions(x):
    def inner(v, k):
        v = v + k
        effect(v)
        return v * 2

    def middle(v):
        for k in range(2):
            v = inner(v, k)
        return v
    return middle(x) + middle(x + 1)


def nonlocal_counter(x):
    n, fs = 0, []

    def bump(y):
        nonlocal n
        n += 1
        effect(n)
        return y + n
    for _ in range(3):
        x = bump(x)
        fs.append(lambda: n)
    return x, n, [f() for f in fs]


def walrus_and_match(x):
    if (s := effect(3)) > 2:
        x = x + s
    match effect([1, x]):
        case [1, y]:
            effect(y)
            return y * 2
    return x


def fresh_import(x):
    y = x + 1
    import colorsys
    effect(y)
    return y * 2, colorsys.rgb_to_hsv(0, 0, 0)


def uses_locals(x):
    y = x + 1
    names = sorted(locals())
    z = y * 2
    return names, z


def runs_text(x):
    exec("scale = 3")
    y = x + 1
    effect(y)
    return y * (eval("scale") if sys.version_info < (3, 13) else 2)


def writes_locals(x):
    locals()["scale"] = 4
    y = x + 1
    effect(y)
    return y * locals().get("scale", 5)                     # 5 since Python 3.13


def deletes(x):
    y = x + 1
    z = y * 2
    del y
    effect(z)
    w = z + 1
    try:
        return y
    except UnboundLocalError as error:
        return w, str(error)


def unbound_later(x):
    for i in range(effect(0)):
        y = i
    effect(x)
    z = x * 2
    return y, z


def shared_and_unbound(x):
    """A variable that a closure shares has no value, behind a break, and has one in a later round of the same loop."""
    found = []
    for i in range(3):
        try:
            effect(x)
            found.append(lambda: shared * i)
            if i == 1:
                shared = x + 1
                effect(x)
            x = x + shared
        except UnboundLocalError as error:
            found.append((str(error), sorted(locals())))
    del shared
    effect(x)
    try:
        del shared
    except UnboundLocalError as error:
        found.append(str(error))
    try:
        found[0]()
    except NameError as error:
        found.append((type(error), str(error)))
    shared = x * 2
    effect(x)
    return x + shared, [item() if callable(item) else item for item in found]


@minicompile.disable
def seen_variables(name):
    """What a debugger shows of the variables of the function of this name."""
    frame = sys._getframe()
    while frame.f_code.co_name != name:
        frame = frame.f_back
    shown = [variable for variable in frame.f_locals if variable != "__next_call"]
    return sorted(shown), {variable: value for variable, value in frame.f_locals.items() if type(value) is int}


def shared_and_hidden(x):
    """A comprehension has a variable of its own with the name of one that a closure shares, and lets it have a cell, too."""
    get = lambda: i                                                      # noqa: E731
    try:
        found = [fail(x) for i in range(3) if (lambda: i)() == 0]
    except ValueError:
        found = [(lambda: i * x)() for i in range(3) if effect(i) is not None]
    effect(x)
    seen = [seen_variables("shared_and_hidden")]
    i = 9
    effect(x)
    seen.append(seen_variables("shared_and_hidden"))
    return found, seen, get(), sorted(locals()), locals()["i"]


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def forward(self, x):
        return x * self.factor


class Shifted(Scaled):
    def forward(self, x):
        get = lambda: self.factor                                        # noqa: E731

        def replace():
            nonlocal self
            self = Shifted(4)
        for i in range(3):
            x = super().forward(x) + get()
            effect(i)
        if get() == 3:
            replace()
        effect(sorted(locals()), locals()["self"] is self)
        return super().forward(x), get()

    def without(self, x):
        get = lambda: self.factor                                        # noqa: E731
        effect(get())
        del self
        x = x + 1
        effect(x)
        try:
            return super().forward(x)
        except (RuntimeError, NameError) as error:
            return type(error), str(error), x + 1


    def of_any(*args):
        effect(len(args))
        try:
            return super().forward(args[1])
        except RuntimeError as error:
            return str(error), super(__class__, args[0]).forward(args[1])


def super_of_a_self_that_a_closure_shares(x):
    return Shifted(2).forward(x), Shifted(3).forward(x), Shifted(2).without(x)


def super_without_a_first_argument(x):
    return Shifted(2).of_any(x)


def class_that_is_no_cell_of_the_compiler(x):
    __class__ = Box
    get = lambda: __class__                                              # noqa: E731
    effect(x)
    try:
        return super().__init__
    except RuntimeError as error:
        return str(error), get().__name__, x + 1


def unpacking(x):
    a, (b, *c) = effect((x, (x + 1, 2, 3)))
    d, e = effect(x), x * 2
    effect(a)
    return a + b, c, d * e


def augmented(x):
    box = Box(x.clone())
    box.value += effect(x)
    d = {"k": x}
    d["k"] = d["k"] * 2 + effect(1)
    y = x.clone()
    y[effect(0)] *= 3
    return box.value, d, y


def generator_expression(x):
    return sum(effect(x * i) for i in range(3)), max(effect(i) for i in (3, 1)), any(effect(i) for i in (0, 1, 2))


def returned_iterator(x):
    it = iter([x, x + 1, x + 2])
    next(it)
    effect(x)
    return next(it) * 2, len(list(it))


class Layer(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        x = x * self.scale
        effect(x)
        return x.relu() + 1


LAYERS = torch.nn.ModuleList(Layer(i / 7) for i in range(12))


def module_list(x):
    for layer in LAYERS:
        x = layer(x)
    return x


def many_rounds(x):
    total = x
    for i in range(100):
        total = total + i * 0.5
        effect(i)
    return total


def logger_name(x):
    y = x + 1
    name = minicompile.disable(lambda: sys._getframe(1).f_code.co_name)()
    return y * 2, name


class Loud:
    def __init__(self, swallow):
        self.swallow = swallow

    def __enter__(self):
        effect("in")
        return self

    def __exit__(self, kind, value, traceback):
        effect("out", kind)
        return self.swallow


def raise_in_loud_context(x):
    with Loud(True):
        y = x + 1
        with Loud(False):
            y = y * 2
            raise KeyError("traced")
    return y + 1


def loud_context_in_loop(x):
    for i in range(3):
        with Loud(i == 1) as m:
            x = x + i
            if i == 1:
                raise ValueError(i)
            x = x * 2
    return x, m.swallow


def loud_context_uncaught(x):
    with Loud(False):
        y = x + 1
        raise ValueError(f"of {tuple(y.shape)}")


def next_until_stop(x):
    it, n = iter([x, x + 1, x + 2]), 0
    while True:
        try:
            y = next(it)
        except StopIteration:
            effect(n)
            break
        effect(y)
        n += 1
        x = x + y
    return x, n


def next_of_generator(x):
    def g():
        for i in range(2):
            yield x * i
            effect(i)
    it = g()
    a = next(it)
    effect(a)
    b = next(it, None)
    c = next(it, None)
    return a, b + 1, c


def dict_changes_in_loop(x):
    d = {"a": x, "b": 2}
    for k in d:
        effect(k)
        d[k + k] = x + 1
    return d


def odd_iterables(x):
    for c in "ab":
        effect(c)
        x = x + ord(c)
    for i in range(10, 0, -4):
        effect(i)
        x = x + i
    for y in reversed([x, x + 1]):
        effect(y)
    for s in {"one"}:
        effect(s)
        x = x * 2
    for k, v in sorted({"b": x, "a": 1}.items(), key=lambda kv: effect(kv[0])):
        x = x + v
    return x


def training_loop(x):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for i in range(4):
        optimizer.zero_grad()
        loss = (model(x.detach() + i) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(i, f"{loss.item():.4f}")
    return [round(v, 3) for v in losses], model.weight.detach().clone()


def class_in_function(x):
    y = x + 1

    class Local:
        scale = effect(3)

        def apply(self, v):
            effect(v)
            return v * self.scale + y
    return Local().apply(x) * 2


def constructor_breaks(x):
    class_ = type("C", (), {"__init__": lambda self, v: setattr(self, "v", effect(v + 1))})
    a, b = class_(x), Counted(x)
    return a.v * 2, b.total, b.double


class Counted:
    def __init__(self, x):
        self.parts = [x]
        effect(x)
        self.parts.append(x * 2)
        self.total = sum(self.parts)

    @property
    def double(self):
        effect(self.total)
        return self.total * 2


def recursion(x, n=4):
    if n == 0:
        return x
    y = recursion(x + n, n - 1)
    effect(y, n)
    return y * 2


def break_in_callbacks(x):
    import functools
    a = sorted([3, 1, 2], key=lambda k: effect(-k))
    b = functools.reduce(lambda p, q: effect(p + q), [x, x + 1, x * 2])
    c = list(map(lambda v: effect(v), (1, 2)))
    return a, b * 2, c, max([1, 5, 3], key=effect)


def return_in_finally(x):
    try:
        fail(x)
    finally:
        effect(x)
        return x + 1


def break_in_finally_of_loop(x):
    for i in range(3):
        try:
            if i == 1:
                continue
            if i == 2:
                break
            x = x + 1
        finally:
            effect(x, i)
            x = x * 2
    return x


def exception_groups(x):
    out = []
    try:
        raise ExceptionGroup("g", [ValueError(1), KeyError(2)])
    except* ValueError as group:
        effect(x)
        out.append(len(group.exceptions))
    except* KeyError:
        out.append("key")
    return out, x + 1


def exception_attributes(x):
    class Custom(Exception):
        def __init__(self, code):
            super().__init__(f"code {code}")
            self.code = code
    y = x + 1
    try:
        raise Custom(7)
    except Custom as error:
        effect(error.code)
        y = y * error.code
        return y, str(error), error.code


def exception_keeps_identity(x):
    saved = None
    try:
        raise ValueError("mine")
    except ValueError as error:
        saved = error
        effect(x)
        y = x + 1
        same = saved is sys.exc_info()[1]
    return y, same, saved.args


def context_of_exceptions(x):
    try:
        try:
            raise KeyError("a")
        except KeyError:
            effect(x)
            y = x + 1
            fail(y)
    except ValueError as error:
        return type(error.__context__), error.__context__.args, y * 2


def error_from_operator(x):
    try:
        effect(x)
        y = x + 1
        return y @ torch.ones(7, 7)
    except RuntimeError as error:
        return "shapes", "shape" in str(error), x * 2


def assignments(x):
    a = b = effect(x)
    c, box = [0, 1, 2, 3], Box(1)
    c[effect(1):3] = [effect(x), 5, 6]
    box.value, c[0] = effect((7, 8))
    del c[effect(1)]
    text = f"{effect(3.14159):>{effect(8)}.2f}|{effect('s')!r}"
    return a + b, c, box.value, text, effect(2) in c, effect(None) is None, -effect(3), not effect(0), 1 < effect(2) < 3


def default_arguments(x):
    def f(v, items=effect([]), *, k=effect(2)):
        items.append(v)
        return len(items) * k
    return f(x), f(x), f(x, []), x * 2


TOTAL = 0


def globals_written(x):
    global TOTAL
    TOTAL = 0
    for i in range(3):
        TOTAL += i
        effect(TOTAL)
        x = x + TOTAL
    return x, TOTAL


def closure_in_loop(x):
    fs = []
    for i in range(3):
        def f(v, i=i):
            return v + i + len(fs)
        fs.append(f)
        effect(i)
        x = f(x)
    return x, [f(1) for f in fs]


def cell_changes_between(x):
    n = 1

    def get():
        return n
    for i in range(3):
        n = n + i
        effect(get())
        x = x * get()
    return x, get()


def long_while(x):
    n, s = 0, "s"
    while n < 40:
        effect(n)
        n += 1
        if n % 7 == 0:
            s += "!"
            x = x + n
    return x, s


def floats_in_loop(x):
    v = 1.0
    for _ in range(20):
        v = v * 1.5
        x = x + v
        effect(v)
    return x, v


def item_in_loop(x):
    total = 0.0
    for i in range(15):
        x = x + 1
        total += x.sum().item()
    return x, total


def two_loops_share(x):
    for i in range(3):
        if effect(i) == 1:
            x = x * 2
        else:
            x = x + 1
        x = x - 0.5
    return x


def inference_and_default(x):
    with torch.inference_mode(False), torch.enable_grad():
        y = x * 2
        effect(y)
        z = y + 1
    return z


def autocast_and_user(x):
    with Managed("a"), torch.autocast("cpu", torch.bfloat16), Managed("b"):
        y = x @ x.T
        effect(y)
        z = x @ x.T
    return y, z, torch.is_autocast_enabled("cpu")


def fails_in_no_grad(x):
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            y = x * 2
            fail(y)
    except ValueError:
        pass
    effect(torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))
    return x * 3, torch.is_grad_enabled()


def recursive_closure(x):
    def flatten(items):
        for item in items:
            if isinstance(item, list):
                effect(len(item))
                yield from flatten(item)
            else:
                yield item
    return x + 1, list(flatten([1, [2, [3]], 4]))


def result_of_generator(x):
    def generator():
        yield 1
        return "result"
    items = generator()
    next(items)
    try:
        next(items)
    except StopIteration as error:
        effect(error.args)
        return x + 1, error.value


class OneEach(type):
    made = {}

    def __call__(cls, *args):
        if cls not in cls.made:
            cls.made[cls] = super().__call__(*args)
        return cls.made[cls]


class Only(metaclass=OneEach):
    def __init__(self):
        self.n = 3


def attribute_of_metaclass(x):
    OneEach.made.clear()
    effect(x)
    return x * Only().n, Only() is Only(), len(OneEach.made)


class ByNumber:
    def __init__(self, n):
        self.n = n

    def __hash__(self):
        return self.n

    def __eq__(self, other):
        return self.n == other.n


def hashed_by_the_program(x):
    d = {ByNumber(1): x, ByNumber(2): 2}
    y = x + 1
    effect(y)
    d[ByNumber(2)] = 5
    return y, d[ByNumber(1)] * d[ByNumber(2)], len(d)


def exception_compared(x):
    made, y = ValueError("made"), x * 2
    effect(y)
    try:
        try:
            raise KeyError("first")
        except KeyError:
            raise made
    except ValueError as caught:
        same = caught is made
    return y, same, repr(made.__context__)


def comprehension_over_a_cell(x):
    k = 10

    def outer():
        return k
    effect(x)
    inner = [lambda: k for k in range(3)]
    made = [(effect(j), lambda: (j, k))[1] for j in range(2)]
    return x + k, outer(), [f() for f in inner], [f() for f in made]


def group_left_over(x):
    out, y = [], x * 2
    try:
        try:
            raise ExceptionGroup("g", [ValueError(1), KeyError(2)])
        except* ValueError as part:
            effect(len(part.exceptions))
            out.append(sys.exception() is part)
            raise IndexError("new")
    except BaseExceptionGroup as whole:
        out += [(type(e).__name__, repr(e.__context__)) for e in whole.exceptions]
    return y, out


def closing(count, name):
    try:
        yield from range(count)
    finally:
        LOG.append(f"closed {name}")


def generator_left_by_break(x):
    with quiet_gradients():
        for n, i in enumerate(closing(5, "inner")):
            x = x + i
            effect(n)
            if i == 2:
                break
        LOG.append(("behind the loop", torch.is_grad_enabled()))
        y = x * 2
    return y


def generators_left_by_break_in_nested_loops(x):
    for _, j in zip(closing(3, "first"), closing(3, "second")):
        for i in map(abs, closing(5, "inner")):
            x = x + i
            effect(i)
            if x.sum() > 4:
                break
        LOG.append("behind the inner loop")
        if j == 1:
            break
    LOG.append("behind both")
    return x * 2


def generator_left_by_return(x):
    try:
        for i in closing(5, "inner"):
            x = x + i
            effect(i)
            if i == 2:
                return x * 3
    finally:
        LOG.append("finally")


def generators_left_by_exceptions(x):
    for i in closing(2, "outer"):
        try:
            for j in closing(5, "inner"):
                x = x + j
                effect(j)
                if j == 1:
                    [].pop()
        except IndexError:
            LOG.append("caught")
            x = x * 2
        LOG.append("behind the try")
    return x


def generator_deleted(x):
    it = closing(3, "it")
    x = x + next(it)
    effect(x)
    del it
    LOG.append("deleted")
    return x * 2


def generator_where_a_list_was(x):
    for make in (lambda: [1, 2], lambda: closing(3, "second"), lambda: (4, 5)):
        for n, i in enumerate(make()):
            x = x + i
            effect(n)
            if n == 1:
                break
        LOG.append("behind the loop")
    return x


class Thing:
    pass


@minicompile.disable
def refer(thing):
    return weakref.ref(thing)


def weak_reference_to_an_object_that_nobody_reads(x):
    thing = Thing()
    reference = refer(thing)
    y = x * 2
    effect(y)
    return y + 1, reference() is None


def weak_references_in_a_loop(x):
    references = []
    for i in range(3):
        thing = Thing()
        references.append(refer(thing))
        x = x + i
        effect(i)
    return x, [r() is None for r in references]


def weak_reference_to_an_object_that_is_replaced(x):
    thing = Thing()
    reference = refer(thing)
    effect(1)
    LOG.append(reference() is None)
    thing = None
    effect(2)
    LOG.append(reference() is None)
    return x * 2


def weak_reference_that_is_asked_before_the_object_is_replaced(x):
    thing = Thing()
    reference = refer(thing)
    x = x + 1
    effect(0)
    before = reference() is None
    thing = Thing()
    effect(thing is None)
    return x, before


@minicompile.disable
def made():
    return Thing()


def weak_reference_to_an_object_that_a_break_replaces(x):
    thing = made()
    reference = refer(thing)
    thing = made()
    effect(1)
    LOG.append(reference() is None)
    thing, other = made(), made()
    effect(2)
    LOG.append(reference() is None)
    y = x * 2
    effect(y)
    return y + 1


def hook_of_a_module_that_nobody_calls_again(x):
    layer = torch.nn.Sigmoid()
    handle = layer.register_forward_hook(lambda module, inputs, output: output * 2)
    y = layer(x)
    effect(y)
    LOG.append(len(handle.hooks_dict_ref()))
    handle.remove()
    return y


def backward_hook_of_a_module_that_nobody_calls_again(x):
    x = x.detach().requires_grad_()
    layer = torch.nn.Sigmoid()
    layer.register_backward_hook(lambda module, before, after: (before[0] * 2,))
    y = layer(x * 2)
    effect(y)
    y.sum().backward()
    return x.grad


ALL = [f for f in list(globals().values()) if isinstance(f, types.FunctionType) and f.__module__ == __name__
       and f.__name__ not in (
           "effect", "fail", "seen_state", "seen_variables", "generator_context", "quiet_gradients", "closing", "refer", "made")]
# Nothing to compile, or it raises each time
EAGER = ("unbound_later", "return_in_finally", "generator_expression", "runs_text", "writes_locals")
if sys.version_info < (3, 12):           # a comprehension that breaks is a frame of its own, and runs as it is
    EAGER += ("comprehension", "two_comprehensions", "comprehension_shadows")
