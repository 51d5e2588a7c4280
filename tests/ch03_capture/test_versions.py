"""Programs in long loops: what makes no new version. Each runs many times on fresh objects, with eager's answers, in a few versions."""
import datetime
import enum
import functools
import math
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import minicompile
from minicompile import logs
from tests.recorders import Captures


@pytest.fixture(autouse=True)
def strict(reset, monkeypatch):
    monkeypatch.setattr(minicompile.config, "raise_on_internal_error", True)


def plain(value):
    """What two results are compared as."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, dict):
        return [(k, plain(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [plain(v) for v in value]
    return (type(value), plain(vars(value))) if hasattr(value, "__dict__") and not isinstance(value, type) else (type(value), repr(value))


def count(make, graphs: int, breaks: int = 0, calls: int = 24):
    """make() -> (function, arguments of the i-th call); equal to eager in every call, with so many graphs."""
    (function, arguments), (expected, same) = make(), make()
    compiled = minicompile.compile(function, backend="eager")
    with Captures() as seen:
        for i in range(calls):
            assert plain(compiled(*arguments(i))) == plain(expected(*same(i))), i
    assert (len(seen.graphs), len(seen.breaks)) == (graphs, breaks), [str(b) for b in seen.breaks]


# ------------------------------------------------------------------ constants that are only handed on
@dataclass
class Output:
    loss: torch.Tensor
    name: str
    index: int = 0


def batch(i):
    return {"x": torch.full((3,), float(i)), "name": [f"n{i}", b"%d" % i], "index": i, "size": i / 7,
            "when": datetime.datetime.fromtimestamp(i)}


def returned():
    return lambda b: (b["x"].sum(), b["name"][0], b["name"][1], {"index": b["index"], "size": b["size"]}), lambda i: (batch(i),)


def stored():
    log, seen, holder = [], {}, SimpleNamespace(last="")

    def f(b):
        log.append(b["name"][0])
        seen["when"], holder.last = b["when"], b["index"]
        b["name"][0], b["index"] = "written", b["name"][0]
        return Output(b["x"] * 2, b["name"][1], index=b["index"]), log, seen, holder, b
    return f, lambda i: (batch(i),)


def carried_over_a_break():
    def f(x, name, step):
        y = x * 2
        print(end="")
        return y + 1, [name], step
    return f, lambda i: (torch.ones(2), f"n{i}", i)


@pytest.mark.parametrize("make, graphs, breaks", [(returned, 1, 0), (stored, 1, 0), (carried_over_a_break, 2, 1)])
def test_what_is_only_handed_on(make, graphs, breaks):
    count(make, graphs, breaks)


def looked_at_in_one_way():
    return lambda x, name: (x + 1 if name == "a" else x - 1, name), lambda i: (torch.ones(2), "ab"[i % 2])


def looked_at_later():
    """The second use is behind the first, which only hands it on."""
    def f(x, names):
        kept = list(names)
        return x * len(names[0]), kept
    return f, lambda i: (torch.ones(2), ["a" * (i % 3)])


@pytest.mark.parametrize("make, graphs", [(looked_at_in_one_way, 2), (looked_at_later, 3)])
def test_what_is_looked_at_is_guarded_by_value(make, graphs):
    count(make, graphs)


def dataclass_made_inside():
    def f(x):
        @dataclass(order=True)
        class Pair:
            a: int
            b: int = 2
        return x + Pair(1).b, repr(Pair(2)), Pair(1) < Pair(2)
    return f, lambda i: (torch.ones(2),)


def test_what_a_class_of_the_trace_can_do_is_not_guarded():
    count(dataclass_made_inside, 1)


def test_the_type_of_what_is_handed_on_is_guarded():
    f = minicompile.compile(lambda x, name: (x + 1, name, isinstance(name, str)), backend="eager")
    answers = [f(torch.ones(1), name)[1:] for name in ("a", 2, "b", 3.0, b"c", None)]
    assert answers == [("a", True), (2, False), ("b", True), (3.0, False), (b"c", False), (None, False)]


# ------------------------------------------------------------------ the largest of many numbers that vary
def texts(i):
    return [torch.full((2 + (i * 7 + k * 11) % 23,), float(k)) for k in range(4)]


def padded(pad):
    return lambda: (pad, lambda i: (texts(i),))


def filled(xs):
    out = xs[0].new_zeros(len(xs), max(len(x) for x in xs))
    for row, x in zip(out, xs):
        row[:len(x)] = x
    return out


def around(xs):
    longest = max([x.shape[0] for x in xs])
    return torch.stack([torch.nn.functional.pad(x, (0, longest - len(x))) for x in xs]), longest


def cut(xs):
    return torch.stack([x[:min(map(len, xs))] for x in xs]), max(len(xs[0]) / 7, len(xs[1]) / 3, len(xs[2]) / 5)


@pytest.mark.parametrize("pad", [filled, around, cut])
def test_which_of_many_is_the_largest_makes_no_version(pad):
    count(padded(pad), 2)


def test_values_are_made_in_the_order_of_python():
    def f(x, log):
        def numbers():
            for n in (len(x), 9, x.shape[1]):
                log.append(n)
                yield n
        return x + max(numbers()), max(len(x), x.shape[1], key=lambda n: -n), max([], default=x.shape[0]), log
    count(lambda: (f, lambda i: (torch.ones(10 + i, 4), [])), 2)


LARGE, HUGE = 2**53 + 1, 10**400
COMPARISONS = {"large": lambda v: (v >= LARGE, v > LARGE, v < LARGE, LARGE >= v, v == LARGE, v != LARGE, v > -LARGE, 0 < v < LARGE),
               "huge": lambda v: (v >= HUGE, v < HUGE, v == HUGE, v > -HUGE, HUGE < v),
               "items": lambda v: (v in [LARGE, 3], (v, 1) < (LARGE, 2)),
               "extremes": lambda v: (min(v, LARGE), max(v, LARGE), max(v, HUGE), sorted([v, LARGE, HUGE]))}


def answered(function, *args):
    try:
        return function(*args)
    except OverflowError as error:              # which NumPy raises of the huge one
        return str(error)


@pytest.mark.parametrize("ask", COMPARISONS.values(), ids=COMPARISONS)
@pytest.mark.parametrize("kind", [float, np.float64])
def test_a_float_that_varies_and_an_int_that_is_no_float(ask, kind):
    def f(x, v):
        return (x + 1 if v >= LARGE else x - 1), answered(ask, v)
    compiled = minicompile.compile(f, backend="eager")
    for number in map(kind, (1.5, 2.5, 2.0**53, 2.0**53 + 2, 1e300, math.inf, -3.5, -2.0**60)):
        assert repr(compiled(torch.ones(1), number)) == repr(f(torch.ones(1), number)), number


# ------------------------------------------------------------------ scalars of NumPy
@pytest.mark.parametrize("kind", [np.float16, np.float32])
def test_numpy_rounds_a_number_that_it_compares_with_a_short_float(kind):
    def f(x, t):
        s = kind(t)
        return x + 1, s == t, s == 0.1, s < 0.1, 0.1 < s, s > 1e-9, s == 2**24 + 1, s in [0.1, 2049], s == kind(0.1), s != np.float64(0.1)
    compiled = minicompile.compile(f, backend="eager")
    with np.errstate(all="ignore"):
        for number in (1.5, 2.5, 0.1, 0.3, 2049.0, 2.0**24, 1e300, math.nan, 0.1):
            assert repr(compiled(torch.ones(1), number)) == repr(f(torch.ones(1), number)), number


BETAS = np.linspace(1e-4, 0.02, 40)
ALPHAS = np.cumprod(1 - BETAS)


def on_both_sides(scalars):
    return lambda: (lambda x, s: (s * x, x * s, s - x, x / s, s / x, s ** x, s < x, x > s, s),
                    lambda i: (torch.arange(1, 4) / 2, scalars[i]))


def sampler():
    def f(x, a, b):
        y = (x - b / np.sqrt(1 - a) * x) / np.sqrt(a)
        return y + (1 - a) ** 0.5 * x - float(b), 1 - b, -a, a.item()
    return f, lambda i: (torch.arange(1, 4) / 2, ALPHAS[i], BETAS[i])


def table():
    """An array of the program, read at places that are known."""
    def f(x, scale):
        for t in reversed(range(4)):
            x = x * ALPHAS[t] + BETAS[-1 - t] * scale
        return x / len(ALPHAS)
    return f, lambda i: (torch.ones(3), i / 7)


def positions():
    return lambda x, n: (x[:n], x + (n + 1) // 2, int(n), n - 1, torch.tensor(n)), lambda i: (torch.arange(40), np.int64(2 + i))


def functions_of(*functions, of=lambda i: 1.5 + i / 4):
    return lambda: (lambda x, n: [f(x, n) for f in functions], lambda i: (torch.arange(24.).view(2, 3, 4).repeat(2 + i, 1, 1), of(i)))


SCHEDULES = functions_of(lambda x, t: x * (0.5 * (1 + np.cos(np.pi * t))), lambda x, t: x * np.exp(-t) + np.clip(t, 2.0, 4.0),
                         lambda x, t: (np.round(t, 1), np.round(t, decimals=2), np.float32(t) * np.float16(1.5), np.isnan(t)),
                         lambda x, t: x * np.interp(t, [0, 5, 9], [0.0, 1.0, 0.5]) + np.mean([t, 1.0]))
SIZES = functions_of(lambda x, _: x.view(np.prod(x.shape[:-1]), -1), lambda x, _: x.new_zeros(int(np.prod(x.size()))),
                     lambda x, _: x[:int(np.ceil(x.shape[0] / 2))] / np.sqrt(len(x)), lambda x, _: x[:np.floor(len(x) / 2).astype(int)],
                     lambda x, _: x.reshape(np.shape(x)[0], -1) * np.ndim(x), lambda x, _: f"{x.shape} {np.prod(x.shape)}",
                     lambda x, _: np.prod(x.shape, dtype=np.float32) + np.sum(list(x.shape)))
ASKED = lambda x, s: (s.dtype, s.shape, s.ndim, s.size, s.nbytes, x.double() if s.dtype == np.int64 else x + 1)
ARITHMETIC = functions_of(lambda x, s: (s // 2, s % 2, -s, abs(s), s * s, 2 ** s, 1 / s, x * (s * 2 - 1)), ASKED,
                          of=lambda i: np.float64(1.5 + i / 4))
INTEGERS = functions_of(lambda x, s: (s // 2, -s, abs(s), s * s, s << 1, 1 / s, s * 0.5, x * (s * 2)), ASKED, of=lambda i: np.int64(5 + i))


def overflow():
    return lambda x, n: x * np.prod([n, 2**40, 2**23]), lambda i: (torch.ones(2), 2 + i)


SCALARS = {"float64": BETAS, "float32": BETAS.astype("f"), "int64": np.arange(2, 40)}


@pytest.mark.parametrize("make", [*map(on_both_sides, SCALARS.values()), sampler, table, positions, SCHEDULES, SIZES, ARITHMETIC,
                                  INTEGERS],
                         ids=[*SCALARS, "sampler", "table", "positions", "schedules", "sizes", "arithmetic", "integers"])
def test_scalars_of_numpy(make):
    count(make, 2)


def test_a_product_of_numpy_that_does_not_fit_in_64_bits():
    count(overflow, 3, calls=3)


def test_where_scalars_of_numpy_differ_from_numbers():
    with np.errstate(all="ignore"):
        count(lambda: (lambda x, s: (x + 1, 1 / s, s ** 0.5, s // 2), lambda i: (torch.ones(2), np.float64(2 - i))), 4, calls=4)
    count(lambda: (lambda x, s: (s * x, s), lambda i: (torch.arange(3), np.bool_(i % 2))), 0, breaks=1)


@pytest.mark.parametrize("kind", [np.int64, np.uint8, int, enum.IntEnum("Place", ["first"])])
def test_an_array_of_numpy_at_positions_of_other_classes(kind):
    array, square, place = np.arange(3.0), np.arange(6.0).reshape(2, 3), kind(1)
    uses = [lambda x: x * array[place], lambda x: x * square[place, 0], lambda x: x * square[place][place] + array[kind(1)]]
    for f in uses:
        compiled = minicompile.compile(f, backend="eager")
        for _ in range(2):
            assert compiled(torch.ones(2)).tolist() == f(torch.ones(2)).tolist()
            array[1], square[1] = 5, 7


@pytest.mark.parametrize("place", [np.int64(-1), np.uint8(1), enum.IntEnum("Place", ["first"])(1), True])
def test_a_tuple_of_tensors_at_positions_of_other_classes(place):
    def f(x):
        rows = [*x.unbind(0)]
        try:
            rows[place] = rows[place] * 2
            return rows[place] + x.unbind(0)[place]
        except TypeError:
            return x
    assert minicompile.compile(f, backend="eager", fullgraph=True)(torch.ones(2, 3)).tolist() == [3, 3, 3]


def test_scalars_of_numpy_that_indexing_mistakes():
    def outcome(f, *args):
        try:
            return f(*args).tolist()
        except (IndexError, TypeError) as error:
            return type(error)

    def stored(x, v):
        x[0:1] = v
        return x
    uses = [stored, lambda x, v: x[[v]], lambda x, v: x[:, v], lambda x, v: x[:v], lambda x, v: x[v, v]]
    for use in uses:
        for kind in (np.float32, np.float16, np.float64, np.bool_, np.uint8, np.int32, np.int64):
            minicompile.reset()
            expected, found = (outcome(f, torch.ones(3, 4), kind(1)) for f in (use, minicompile.compile(use, backend="eager")))
            assert found == expected, kind


def test_an_array_that_shares_its_memory():
    array, step = np.zeros(3), torch.ones(3)

    def f(x, y):
        x += y
        return x * array[0]
    compiled = minicompile.compile(f, backend="eager")
    for i in range(1, 4):
        assert compiled(torch.from_numpy(array), step).tolist() == [i * i] * 3


# ------------------------------------------------------------------ what lies in classes
def counters():
    class Base:
        calls, rate, seen = 5, 0.5, None

        @classmethod
        def count(cls):
            cls.calls += 1

    class Derived(Base):
        pass

    class Model(torch.nn.Module):
        steps, average = 3, torch.zeros(2)

        def forward(self, x):
            type(self).steps += 2
            Model.average = 0.5 * self.average + x
            return x * self.steps + Model.average
    model, held = Model(), Derived()

    def f(x, i):
        Base.count()
        held.count()
        Derived.calls -= 1
        Base.rate, Base.seen = Base.rate * 0.9, ["seen", i]
        made = Derived()
        return x * made.calls + held.rate, held.seen, model(x), Base.calls, Derived.calls, getattr(made, "fresh", 1), hasattr(held, "other")
    return f, lambda i: (torch.ones(2), f"n{i}")


def first_written_by_the_program():
    class Registry:
        def __getattr__(self, name):
            return f"no {name}"
    registry = Registry()

    def f(x, i):
        before = registry.last
        if i > 2:
            Registry.last = x + i
        return before, registry.last, x
    return f, lambda i: (torch.ones(2), i)


@pytest.mark.parametrize("make, graphs", [(counters, 2), (first_written_by_the_program, 2)])
def test_data_in_classes(make, graphs):
    count(make, graphs)


def test_what_in_a_class_is_no_data():
    class Plain:
        level = 1

        @property
        def half(self):
            return self.level / 2

        def method(self):
            return 1

    def f(x, mode):
        p = Plain()
        if mode == "function":
            Plain.method = lambda self: 2
        elif mode == "property":
            Plain.level = property(lambda self: 3)
        elif mode == "delete":
            del Plain.level
        elif mode == "shadow":
            p.level = 7
            Plain.level = 8
        return x + p.method(), getattr(p, "level", None), type(p).__dict__.get("level", 0)
    compiled, x = minicompile.compile(f, backend="eager"), torch.zeros(1)
    for mode in ("shadow", "function", "property", "delete"):
        attributes = dict(vars(Plain))

        def run(g):
            answer = plain(g(x, mode)[:2])
            now = {k: plain(v) for k, v in vars(Plain).items() if k == "level" and not isinstance(v, property)}
            for k in ("level", "method"):
                setattr(Plain, k, attributes[k])
            return answer, now
        assert run(compiled) == run(f), mode


# ------------------------------------------------------------------ texts of numbers that vary
def logged():
    lines = []

    def f(x, i, name):
        y, loss = x * i, x.sum().item()
        lines.append(f"step {i:>4}: {name!r} {loss:.3f} {loss / 2:8.2e} {-i}")
        lines.append("%s: %5d of %d, %.1f%%" % (name, i, 100, i / 100))
        lines.append("%d %s" % (i, x.shape))
        lines.append("{0}/{n:.2f} {0:+}".format(i, n=loss) + name + ".pt")
        return y + 1, round(loss, 4), str(i), "end " + str(loss), lines
    return f, lambda i: (torch.full((3,), i / 7), 7 * i, f"n{i}")


def read_by_the_program():
    def f(x, i, known):
        name = f"layer{i}"
        return (x + 1 if name in known else x - 1), name, f"{i:c}"
    return f, lambda i: (torch.ones(2), 40 + i, {"layer41": 1})


def without_a_text():
    def f(x, i, text):
        try:
            return x + 1, text % i
        except TypeError as error:
            return x - 1, str(error)
    return f, lambda i: (torch.ones(2), i, "%d %d")


@pytest.mark.parametrize("make, graphs, breaks, calls", [
    (logged, 4, 2, 24), (read_by_the_program, 3, 0, 24), (without_a_text, 2, 0, 2)])
def test_texts_of_numbers(make, graphs, breaks, calls):
    count(make, graphs, breaks, calls)


@pytest.mark.parametrize("program", ["'a%d' % n", "'a%d' % n + str(len(f'{n}'))"])
def test_a_fault_of_ours_is_no_refusal_of_the_numbers(program, monkeypatch):
    from minicompile.ch03_capture.library import builtins_

    def broken(text, *values):
        raise AssertionError("a fault")

    monkeypatch.setattr(builtins_, "printed", broken)
    f = eval(f"lambda x, n: (x + 1, {program})")
    with pytest.raises(AssertionError, match="a fault"):
        minicompile.compile(f, backend="eager", dynamic=True)(torch.ones(2), 3)


# ------------------------------------------------------------------ what functions of C make of numbers that vary
ASKED = {
    "numbers": lambda x, n: (x * round(n, -1), n.__add__(1), int.__mul__(n, 2), (2).__rpow__(n), min(n, 7), max(n, 2.5), n.bit_length(),
                             float(n).hex(), hash(n), sorted([n, 3, 100]), hasattr(n, "size")),
    "floats": lambda x, n: (x * (n / 7).__mul__(2), math.isnan(n / 7), (n / 7 + 0.01).is_integer(), math.isclose(n / 7, 900.5),
                            math.fsum([n / 7, 1.0]), math.dist([n], [0.5]), (n / 7).conjugate()),
    "ranges": lambda x, n: (x * range(n)[-1], sum(range(n)), n in range(50), range(2, n).stop, list(enumerate("ab", n))),
    "texts": lambda x, n: (x * len(f"{n}"), len(str(n).zfill(8)), int(str(n) + "5"), float(f"{n}.5"), "-" * n, "%03d" % n + hex(n),
                           str((n, 1)) + repr([n]), "-".join([str(n), "a"]), f"{n:c}", str(n)[:1], len("ab" * n)),
    "answers": lambda x, n: (x + str(n).startswith("9"), f"{n}" == "3", "layer" + str(n) == "layer9", f"k{n}" in {"k3": 1}, str(n) in ["3"],
                             {"k3": 1}.get(f"k{n}", 4), n in {3, 4}, n in {3: 1}, {3: 1}.get(n, 5), n in [3, 4], str(n).isdigit())}


@pytest.mark.parametrize("name", ASKED)
def test_what_is_computed_from_numbers(name):
    """One version for a number that was seen once, and one for all others."""
    count(lambda: (ASKED[name], lambda i: (torch.ones(2), 20 + i)), 2)


def test_an_answer_of_a_number_is_asked_again():
    count(lambda: (lambda x, n: (x * (n in {23, 30}), str(n).endswith("5"), chr(n)), lambda i: (torch.ones(2), 20 + i)), 4)
    compiled = minicompile.compile(lambda x, n: x * int(f"{n}"[1]), backend="eager")
    for n in (20, 31, 42):
        assert compiled(torch.ones(1), n) == int(f"{n}"[1])
    with pytest.raises(IndexError):
        compiled(torch.ones(1), 5)
    spelt = minicompile.compile(lambda x, n: (x * n, list("{}{}".format(n, "b"))), backend="eager")
    for n in (2, 3, 42):
        assert spelt(torch.ones(1), n)[1] == [*f"{n}b"]


# ------------------------------------------------------------------ dictionaries with attributes
def averaged():
    """An average of all that a `state_dict()` has, and the `state_dict()` itself."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False), torch.nn.BatchNorm1d(3))
    torch.nn.init.ones_(model[0].weight)
    average = {name: value.clone() for name, value in model.state_dict().items()}

    def f(x, i):
        with torch.no_grad():
            for name, value in model.state_dict().items():
                average[name].mul_(i).add_(value)
        state = model.state_dict()
        return model(x), average, state, state._metadata, i
    return f, lambda i: (torch.arange(6.0).reshape(2, 3), i)


def test_a_state_dict():
    count(averaged, 2, calls=6)


# ------------------------------------------------------------------ numbers that nothing is computed with
CONVERSIONS = {"int": lambda n: int(n), "float": lambda n: float(n), "NumPy's float": lambda n: np.float64(n),
               "in a list": lambda n: [int(n), -n]}
NUMBERS = [3, 4, 5, -3, -4, 2.5, 3.5, np.int64(5), np.int64(7), np.float32(4.5), np.float32(5.5)]


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_number_that_came_in_is_the_result(name):
    function = CONVERSIONS[name]
    compiled = minicompile.compile(function, backend="eager")
    for n in NUMBERS:
        found, expected = compiled(n), function(n)
        assert repr(found) == repr(expected), n


# ------------------------------------------------------------------ items at places that vary
def schedule():
    """A sampler's: lists of numbers and of tensors, and a tuple, read at the step and beside it."""
    class Sampler(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.betas, self.alphas, self.counts = [i / 7 for i in range(40)], TENSORS[:40], (*range(3, 43),)

        def forward(self, x, t):
            return x * self.betas[t] + self.alphas[-t] * self.betas[t - 1], self.alphas[t], self.counts[t]
    return Sampler(), lambda i: (torch.ones(3), i + 2)


def behind_a_break():
    def f(x, t, rates):
        y = x * rates[t]
        print(end="")
        return y + TENSORS[t + 1]
    return f, lambda i: (torch.ones(3), i + 2, [j / 3 for j in range(i + 5)])


def of_other_sizes():
    """The first, of one size, then of any."""
    made = [torch.ones(i + 2) for i in range(30)]
    return lambda x, n: x + made[n].sum(), lambda i: (torch.ones(3), i + 2)


def learned():
    """Items that are written to, and read afterwards by another way."""
    state = [torch.zeros(3) for _ in range(40)]

    def f(x, n):
        state[n].add_(x)
        return state[n] + state[0], state[n] is state[3]
    return f, lambda i: (torch.ones(3), i + 2)


@pytest.mark.parametrize("make, graphs, breaks", [(schedule, 2, 0), (behind_a_break, 4, 2), (of_other_sizes, 3, 0), (learned, 3, 0)])
def test_items_at_places_that_vary(make, graphs, breaks):
    count(make, graphs, breaks)


def test_an_item_at_a_place_that_varies_is_guarded():
    class Doubled(list):
        def __getitem__(self, place):
            return super().__getitem__(place) * 2
    holder = SimpleNamespace(items=[*TENSORS[:30]])

    def f(x, n):
        return holder.items[n] + x
    compiled, x = minicompile.compile(f, backend="eager"), torch.ones(3)

    def check(*places):
        for n in places:
            assert plain(compiled(x, n)) == plain(f(x, n)), n
    check(2, 3, 4)
    holder.items[5] = torch.ones(3, dtype=torch.float64)
    holder.items[6] = 2.5
    holder.items[7] = None
    check(5, 6, 4)
    for n in (7, 30, -40):
        with pytest.raises((TypeError, IndexError)):
            compiled(x, n)
    holder.items = Doubled(TENSORS[:30])
    check(2, 3, 4)
    holder.items = (*TENSORS[:30],)
    check(2, 3, 4)

    def written(x, n):
        kept = holder.kept
        before = kept[n]
        kept[3] = x
        return before + kept[n]
    compiled = minicompile.compile(written, backend="eager")
    for n in (2, 4, 3, 5, 3):
        answers = []
        for g in (compiled, written):
            holder.kept = [*TENSORS[:30]]
            answers.append((plain(g(x, n)), plain(holder.kept)))
        assert answers[0] == answers[1], n


# ------------------------------------------------------------------ beyond the limit
TENSORS = [torch.full((3,), float(i)) for i in range(200)]
ROWS = [functools.partial(torch.mul, i) for i in range(200)]


def entered(function, *arguments) -> list:
    """Names of the compiled versions that a call enters."""
    names = []

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_name.startswith("__compiled_"):
            names.append(frame.f_code.co_name)
    sys.setprofile(note)
    try:
        result = function(*arguments)
    finally:
        sys.setprofile(None)
    return [result, *names]


BEYOND = {"an item": lambda x, n, c: x + ROWS[n](x), "a slice": lambda x, n, c: x + TENSORS[:n][-1],
          "a list": lambda x, n, c: x + len(["a"] * n), "a key": lambda x, n, c: x * {n: 1}.get(n, 2),
          "a loop": lambda x, n, c: x + sum(x[i % 3] for i in range(n)), "a norm": lambda x, n, c: x.norm(1 / (n + 1)),
          "in an object": lambda x, n, c: x + ROWS[c.number](x), "in a dict of a list": lambda x, n, c: x + ROWS[c.kept[0]["n"]](x),
          "a length": lambda x, n, c: x + sum(c.items)}


@pytest.mark.filterwarnings("ignore:minicompile. .*recompile_limit")
@pytest.mark.parametrize("name", BEYOND)
def test_beyond_the_limit_no_version_is_tried_that_cannot_fit(name):
    function, x = BEYOND[name], torch.arange(3.0)
    compiled = minicompile.compile(function, backend="eager")

    def arguments(n):
        return x, n, SimpleNamespace(number=n, kept=[{"n": n}], items=[*range(n)])
    for n in [*range(1, 12), *range(20, 30)]:
        compiled(*arguments(n))
    for n in range(100, 110):
        result, *tried = entered(compiled, *arguments(n))
        assert not tried and torch.equal(result, function(*arguments(n)))
    for n in [*range(1, 9)] * 2:
        result, *tried = entered(compiled, *arguments(n))
        assert len(tried) == 1 and torch.equal(result, function(*arguments(n)))
    tried = [len(entered(compiled, *arguments(5))) - 1 for _ in range(12)]
    assert tried == [2, *[1] * 11]                          # 1 has come after 7 and 8 till now: a guess


@pytest.mark.filterwarnings("ignore:minicompile. .*recompile_limit")
def test_what_differs_later_is_asked_first(monkeypatch):
    compiled = minicompile.compile(lambda x, n, m: ROWS[n](x) * len(["a"] * m), backend="eager")
    monkeypatch.setattr(minicompile.frames, "LOOKS", (4,))
    for n in range(1, 12):
        compiled(torch.ones(3), n, n)
    before = [len(entered(compiled, torch.ones(3), 5, 99)) for _ in range(8)]
    assert 2 in before and entered(compiled, torch.ones(3), 5, 98)[1:] == []
    assert len(entered(compiled, torch.ones(3), 5, 5)) == 2


@pytest.mark.filterwarnings("ignore:minicompile. .*recompile_limit")
def test_beyond_the_limit_a_mode_of_the_program_sees_what_it_sees_in_eager():
    class Log(torch.overrides.TorchFunctionMode):
        def __init__(self):
            self.seen = []

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.seen.append(str(function))
            return function(*args, **(kwargs or {}))
    function = lambda x: x * 2
    compiled = minicompile.compile(function, backend="eager", dynamic=False)
    for n in range(1, 30):
        compiled(torch.ones(n))
    seen = []
    for f in (compiled, function):
        with Log() as log:
            f(torch.ones(40)), f(torch.ones(3))
        seen.append(log.seen)
    assert seen[0] == seen[1]


@pytest.mark.filterwarnings("ignore:minicompile. .*recompile_limit")
def test_beyond_the_limit_code_of_a_class_runs_as_often_as_in_eager():
    class Numbered:
        def __init__(self, number):
            self.__dict__["number"] = number

    def function(x, c):
        return ROWS[c.number](x)
    compiled, reads = minicompile.compile(function, backend="eager"), []
    for n in range(1, 30):
        compiled(torch.ones(3), Numbered(n))
    Numbered.number = property(lambda self: reads.append(1) or self.__dict__["number"], lambda self, value: None)
    for n in (3, 50):
        assert torch.equal(compiled(torch.ones(3), Numbered(n)), TENSORS[n])
    assert len(reads) == 2


def test_beyond_the_limit_what_is_asked_for_strictly_raises():
    compiled = minicompile.compile(lambda x, n: x + ROWS[n](x), backend="eager", fullgraph=True)
    for n in range(1, 9):
        compiled(torch.ones(3), n)
    for n in range(9, 30):
        with pytest.raises(minicompile.RecompileError):
            compiled(torch.ones(3), n)
        assert compiled(torch.ones(3), n % 8 + 1).tolist() == [n % 8 + 2.0] * 3
    free = minicompile.compile(lambda x, n: x + ROWS[n + 1](x), backend="eager")
    with pytest.warns(match="recompile_limit"):
        for n in range(1, 30):
            free(torch.ones(3), n)
    with minicompile.set_stance("fail_on_recompile"), pytest.raises(minicompile.RecompileError):
        free(torch.ones(3), 99)


# ------------------------------------------------------------------ numbers that vary behind a graph break
def loop_with_item():
    def f(x):
        total, seen = 0.0, 0
        for i in range(6):
            x = x * 0.5 + i
            total += x.sum().item()
            seen += 1
            x = x + seen
        return x, total, seen
    return f, lambda i: (torch.full((3,), float(i)),)


def items_before_the_next_break():
    def f(x):
        a = x[0].item()
        y = x * a
        b = y[1].item()
        return y + a - b
    return f, lambda i: (torch.arange(3.0) + i,)


def position_that_was_found():
    def f(x):
        k = x.argmax().item()
        return x[k] * 2 + k
    return f, lambda i: (torch.eye(4)[i % 4],)


def sizes_behind_a_break():
    def f(x, late):
        y = x * 2
        if late:
            y[0].item()
            return y.softmax(0)
        return y
    return f, lambda i: (torch.ones(3 + i), i > 3)


@pytest.mark.parametrize("make, graphs, breaks", [
    (loop_with_item, 4, 4), (items_before_the_next_break, 3, 2), (position_that_was_found, 2, 1), (sizes_behind_a_break, 4, 1)])
def test_numbers_that_vary_behind_a_break(make, graphs, breaks):
    """What was a symbol before a break, what a loop counts, and what the break has computed is a symbol in the first version behind it."""
    count(make, graphs, breaks)


def rows_and_places():
    rows, cube = torch.tensor([2, 0]), torch.arange(120.0).reshape(5, 6, 4)

    def f(x, n):
        c = cube * x
        c[n, rows] = 0
        return (c[n, rows], c[rows, n], c[n, :, rows], c[:, rows, n], c[None, rows, n], c[n, rows, rows], c[rows[:, None], n, rows],
                c[n, 0, rows])
    return f, lambda i: (torch.tensor(float(i)), i % 4)


def test_tensors_of_indices_beside_a_place_that_varies():
    count(rows_and_places, 2)


def rows_of_a_range():
    def f(x, classes):
        hot = torch.zeros_like(x)
        hot[range(len(classes)), classes] = 1
        return hot, x[range(len(classes))], x[range(1, len(classes)), 0], x[range(len(classes) - 1, -1, -2), 0]
    return f, lambda i: (torch.randn(i + 4, 5, generator=torch.Generator().manual_seed(i)), torch.arange(i + 3) % 5)


def test_ranges_as_indices_need_no_version_for_each_length():
    count(rows_of_a_range, 2)


@pytest.mark.filterwarnings("ignore:minicompile. .*recompile_limit")
def test_comprehensions_beyond_the_limit_run_as_they_are(monkeypatch):
    """In Python 3.11 they are frames, whose iterator is a real one: they were broken at each turn."""
    def program(cache):
        keys = torch.cat([k for k, _ in cache])
        return keys, {i: v * 2 for i, (_, v) in enumerate(cache)}, sorted({v.shape[0] for _, v in cache})

    captured = []
    monkeypatch.setattr(logs, "watchers", [
        lambda kind, **data: captured.append(data["state"].code.co_name) if kind == "captured" else None])
    compiled = minicompile.compile(program, backend="eager")
    for size in range(1, 14):
        cache = [(torch.randn(2), torch.randn(3)) for _ in range(size)]
        torch.testing.assert_close(compiled(cache), program(cache), rtol=0, atol=0)
    assert captured == ["program"] * minicompile.config.recompile_limit


@pytest.mark.parametrize("kind", [np.float64, np.int64, float, int])
def test_a_number_computed_from_itself_many_times(kind):
    """The expression for it doubles in each turn: what has become too long is taken for a constant."""
    def f(x, s):
        for _ in range(40):
            s = s % 5 + s
        return x * s
    compiled, x = minicompile.compile(f, backend="eager"), torch.ones(2)
    for i in range(3):
        assert torch.equal(compiled(x, kind(i + 2)), f(x, kind(i + 2)))
