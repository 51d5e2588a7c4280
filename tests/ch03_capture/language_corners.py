"""Programs about the corners of the language: the words of errors, the order in which methods are asked, patterns, groups of
exceptions. See language_classes.py and test_language.py."""
import array
import collections
import collections.abc
import contextlib
import dataclasses
import decimal
import enum
import fractions
import functools
import itertools
import operator
import random
import sys
import weakref

import numpy
import torch
from language_classes import program


def outcome_of(function, *args):
    """What a call gives, or its exception in words."""
    try:
        return function(*args)
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "name", None)


# Exceptions


@program
def exception_groups_taken_apart(x):
    out, group = [], ExceptionGroup("g", [ValueError(1), TypeError("t"), ExceptionGroup("h", [ValueError(2), KeyError(3)])])
    group.add_note("noted")
    try:
        raise group
    except* ValueError as part:
        out += [len(part.exceptions), part.message, part.exceptions[1].exceptions[0].args, part.__notes__, sys.exc_info()[1] is part]
        x = x + 1
    except* (TypeError, KeyError) as part:
        out += [[type(e).__name__ for e in part.exceptions], str(part), sys.exc_info()[1] is part]
        x = x * 2
    except* OSError:
        out.append("no")
    else:
        out.append("no")
    finally:
        out.append("finally")
    try:
        raise ValueError("naked")
    except* ValueError as part:
        out.append((type(part).__name__, part.exceptions[0].args))
    return x, out


@program(breaks=True)
def exception_groups_left_over(x):
    try:
        try:
            raise ExceptionGroup("g", [ValueError(1), TypeError(2), OSError(3)])
        except* ValueError:
            raise KeyError("new")
        except* TypeError as part:
            raise IndexError("newer") from part
    except BaseExceptionGroup as whole:
        return x * 2, [(repr(e), repr(e.__cause__), repr(e.__context__)) for e in whole.exceptions]


@program(breaks=True)
def exception_raised_twice(x):
    made = ValueError("made before")
    print("break")
    try:
        try:
            1 / 0
        except ZeroDivisionError:
            raise made
    except ValueError as caught:
        same, y = caught is made, x + 1
    return y, same, repr(made.__context__), made.__traceback__ is not None


def chain_of(error):
    words = []
    while error is not None and len(words) < 5:
        words.append(repr(error))
        error = error.__context__
    return words


def caught(function, *args):
    try:
        return function(*args)
    except Exception as error:
        return chain_of(error)


@program
def contexts_of_exceptions(x):
    def again(first, second, third):
        try:
            raise first
        except ValueError:
            try:
                raise second
            except KeyError:
                try:
                    raise third
                except IndexError:
                    raise first

    def circle(first, second):
        first.__context__, second.__context__ = second, first
        try:
            raise first
        except ValueError:
            raise IndexError(4)
    return x + 1, caught(again, ValueError(1), KeyError(2), IndexError(3)), caught(circle, ValueError(1), KeyError(2))


@program
def contexts_of_exceptions_thrown(x):
    def handling():
        try:
            raise KeyError(1)
        except KeyError:
            yield

    def looking():
        try:
            yield
        except ValueError as error:
            yield chain_of(error)

    def closed():
        try:
            raise KeyError(1)
        except KeyError:
            try:
                yield
            except GeneratorExit as error:
                found.append(chain_of(error))
                raise

    def thrown(generator, steps):
        for _ in range(steps):
            next(generator)
        try:
            1 / 0
        except ZeroDivisionError:
            return generator.throw(ValueError(2))

    found = []
    generator = closed()
    next(generator)
    generator.close()
    return x + 1, found, caught(thrown, handling(), 1), caught(thrown, looking(), 1), caught(thrown, looking(), 0)


@program
def tracebacks_given(x):
    try:
        raise IndexError
    except IndexError as error:
        traceback = error.__traceback__
    first, second = ValueError().with_traceback(traceback), ValueError()
    second.__traceback__ = traceback
    return x + 1, first.__traceback__ is traceback, second.__traceback__ is traceback, KeyError().with_traceback(None).__traceback__


@program
def arguments_for_object(x):
    class New:
        def __new__(cls, first, *args):
            return object.__new__(cls, *args)

    class Init:
        def __init__(self, first, *args):
            super().__init__(*args)

    class Both(New, Init):
        pass

    class Neither:
        pass
    made = [outcome_of(lambda: type(cls(*args)).__name__) for cls in (New, Init, Both, Neither) for args in ((), (1,), (1, 2))]
    return x + 1, made, [outcome_of(lambda: object.__init__(cls.__new__(cls, 1), *args)) for cls in (New, Init, Neither)
                         for args in ((), (1,))]


@program
def partials_of_partials(x):
    inner = functools.partial(lambda *args, **named: (args, named), 1, a=x)
    outer = functools.partial(inner, 2, a=3, b=4)
    return inner(), outer(5, b=6), outer.args, outer.func is inner.func, outer.keywords, outer


@program(breaks=True)
def keywords_of_partials(x):
    new = functools.partial(lambda *args, **named: (args, named), 1, a=x)
    new.keywords["b"] = 2
    kept = new.keywords
    kept.pop("a")
    seen = new.keywords is kept, new()
    kept[1] = 3
    return x + 1, seen, outcome_of(new), sorted(map(str, kept)), repr(new).count("1=3")


@program
def exceptions_rebuilt(x):
    def ends():
        yield 1
        return "result"
    generator = ends()
    next(generator)
    try:
        next(generator)
    except StopIteration as error:
        return x + 1, error, SystemExit(3), OSError(2, "no file"), str(UnicodeDecodeError("ascii", b"ab", 0, 1, "why"))


class NoManager:
    def __enter__(self):
        return 1


@program
def with_of_what_is_no_context_manager(x):
    def enter(manager):
        with manager:
            pass
    return x + 1, [outcome_of(enter, m) for m in (5, None, NoManager(), "text")]


@program(breaks=True)
def attribute_errors_name_the_object(x):
    class Empty:
        pass
    o = Empty()
    try:
        o.nope
    except AttributeError as error:
        return x + 1, error.name, error.obj is o


# Classes


class Left:
    def __add__(self, other):
        return "Left.add"

    def __radd__(self, other):
        return "Left.radd"

    def __lt__(self, other):
        return "Left.lt"


class Right(Left):
    def __radd__(self, other):
        return "Right.radd"

    def __gt__(self, other):
        return "Right.gt"


class Refuses:
    def __init__(self):
        self.asked = []

    def __add__(self, other):
        self.asked.append("add")
        return NotImplemented

    def __radd__(self, other):
        self.asked.append("radd")
        return NotImplemented


@program
def derived_operands_are_asked_first(x):
    a, b = Refuses(), Refuses()
    said = outcome_of(lambda: a + b)
    return x + 1, Left() + Right(), Right() + Left(), Left() + Left(), 1 + Right(), Left() < Right(), Right() < Left(), \
        said, a.asked, b.asked


class Count(int):
    def __radd__(self, other):
        return "Count.radd"

    def __gt__(self, other):
        return "Count.gt"

    __rmul__ = __rmatmul__ = __radd__


THREE = Count(3)


@program(breaks=True)
def numbers_on_the_left_take_numbers(x):
    n = THREE
    return x + 1, 2 + n, 2.0 + n, 2j * n, True + n, True < n, 2.0 < n, 2 < n, outcome_of(lambda: b"a" % n)


@program(breaks=True)
def tensors_on_the_left_take_numbers(x):
    n = THREE
    return x + n, x * n, x < n, x @ n, x + 2.0 * n


class Less(int):
    def __lt__(self, other):
        return "Less.lt"


class LessThanLess(Less):
    def __lt__(self, other):
        return "LessThanLess.lt"


class Word(str):
    __lt__ = Less.__lt__


class Row(tuple):
    __lt__ = Less.__lt__


OPERANDS = Less(1), Less(2), LessThanLess(3), Word("a"), Word("b"), Row((1,)), Row((2,))


@program(breaks=True)
def a_class_that_has_one_comparison_has_the_others_from_its_base(x):
    i, j, k, a, b, p, q = OPERANDS
    return x + 1, i < j, i > j, j > i, i >= j, i > k, k > i, i < k, 1 < j, j > 1, 1.0 < j, a > b, "a" < b, b < "a", \
        p > q, (1,) < q, q < (1,), outcome_of(lambda: i > a), i + THREE, THREE + i


class Unknown(int):
    def __le__(self, other):
        return NotImplemented

    __mul__ = __rmul__ = __pow__ = __rpow__ = __le__


UNKNOWN = Unknown(2)


@program(breaks=True)
def what_is_inherited_from_a_builtin_answers_last(x):
    y, out = x + 1, []
    try:
        out += [UNKNOWN <= 2.5, 2.5 >= UNKNOWN, UNKNOWN <= UNKNOWN, 3 ** UNKNOWN, 2j * Unknown(2)]
    except TypeError as error:
        out.append(str(error))
    return y, out


@program(breaks=True)
def numbers_have_no_operators_of_their_classes(x):
    return x + 1, outcome_of(lambda: 2.0 | Count(1)), outcome_of(lambda: 2j & THREE)


class Pair(collections.namedtuple("Pair", "x y")):
    __slots__ = ()

    def __new__(cls, x):
        return super().__new__(cls, x, x * 2)

    def __add__(self, other):
        return Pair(self.x + other.x)

    def __mul__(self, other):
        return "times"


Point = collections.namedtuple("Point", "p q", defaults=[5])


@program
def named_tuples_with_methods(x):
    wrong = [outcome_of(f) for f in (Point, lambda: Point(1, 2, 3), lambda: Point(1, p=2), lambda: Point(z=1))]
    return Pair(x), Pair(1) + Pair(2), Pair(1) * 2, Point(q=1, p=x), wrong


class Slots:
    __slots__ = ("a", "b")


class Properties:
    written = property(None, lambda self, value: None)

    @property
    def read(self):
        return 1


@program
def words_of_attribute_errors(x):
    s, p = Slots(), Properties()
    s.b = 1
    del s.b

    def delete(o, name):
        delattr(o, name)
    attempts = (lambda: s.a, lambda: s.b, lambda: delete(s, "a"), lambda: p.written, lambda: setattr(p, "read", 1),
                lambda: delete(p, "read"),
                lambda: delete(p, "written"), lambda: getattr(p, 5), lambda: (5).__name__)
    return x + 1, [outcome_of(f)[:2] for f in attempts]


class Kind(type):
    table = {"a": 1}

    def __getattr__(cls, name):
        if name == "dynamic":
            return cls.__name__
        raise AttributeError("not in " + name)

    def __instancecheck__(cls, other):
        return other == 1


class OfKind(metaclass=Kind):
    pass


@program
def metaclass_attributes(x):
    OfKind.table["n"] = x.dim()
    return x + 1, OfKind.dynamic, OfKind.table, outcome_of(lambda: OfKind.nope), isinstance(1, OfKind), isinstance(2,
        (str, OfKind)), isinstance(2, OfKind)


@program
def comprehensions_in_class_bodies(x):
    k = 10

    class A:
        z = [k for k in range(3)]
        w = {k: v for k, v in zip("ab", [1, 2])}
        u = k
    return x * k, A.z, A.w, A.u, (lambda: k)(), (lambda: 0).__qualname__


# Patterns


class Place:
    __match_args__ = ("a", "b")

    def __init__(self, a, b):
        self.a, self.b = a, b


class Absent:
    __match_args__ = ("nope",)


class Listed(collections.abc.Mapping):
    def __init__(self, **items):
        self.items_, self.asked = items, []

    def __getitem__(self, key):
        self.asked.append(key)
        return self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return len(self.items_)


def matched(v):
    match v:
        case {"a": 1, "b": b, **rest}:
            return b, rest
        case Place(a=Place(a=p, b=[1, q])):
            return p, q
        case Absent(_):
            return "absent"
        case Absent():
            return "Absent"
        case Place(a, b):
            return a, b
        case int(n):
            return "int", n


@program
def patterns(x):
    listed = Listed(a=1, b=2, c=3), Listed(a=1), Listed()
    values = [{"a": 1, "b": x, "c": 2}, {"a": 1}, Place(Place(x, [1, 2]), 0), Place(1, 2), Absent(), 5, True, "text", *listed]
    return x + 1, [matched(v) for v in values], [m.asked for m in listed]


def too_many(v):
    match v:
        case Place(1, 2, 3):
            return 3


def of_number(v):
    match v:
        case int(1, 2):
            return 2


def twice(v):
    match v:
        case Place(1, a=1):
            return 1


@program(breaks=True)
def patterns_that_do_not_fit(x):
    return x + 1, outcome_of(too_many, Place(1, 2)), outcome_of(of_number, 1), outcome_of(twice, Place(1, 1))


# Calls and builtins


def keywords(*args, a=1, **more):
    return args, a, more


class Named:
    def __init__(self, value=0, *, flag):
        self.value = value


@program(breaks=True)
def words_of_call_errors(x):
    b = {"a": 5}
    calls = (lambda: keywords(**b, **b), lambda: Named(1, 2, flag=3), lambda: Named(), lambda: sum(["a"], ""), lambda: max(1, 2, default=3),
             lambda: max(),
             lambda: dict([(1, 2, 3)]), lambda: [1, 2][::0], lambda: isinstance(1, 5), lambda: vars(5),
             lambda: list(itertools.islice([1], -1)),
             lambda: list(itertools.combinations([1], -1)), lambda: collections.deque([1])[0:1])
    return x + 1, [outcome_of(f)[:2] for f in calls]


class Settings(dict):
    pass


def count_calls(owner, name):
    """`owner` calls a function of Python that has the name of its method, and calls that."""
    method = getattr(owner, name)

    def called(*args):
        COUNTED[name] += 1
        return method(*args)
    setattr(owner, name, called)
    return method


COUNTED, RNG, SETTINGS = collections.Counter(), random.Random(1), Settings(a=1)
FIRST, GET = count_calls(RNG, "random"), count_calls(SETTINGS, "get")


@program(breaks=True)
def a_method_of_c_behind_an_attribute_of_its_name(x):
    RNG.seed(0)
    COUNTED.clear()
    get = GET
    return x + RNG.random(), FIRST(), SETTINGS.get("a"), get("a"), get, dict(COUNTED)


@program()
def bounds_that_cannot_be_named(x):
    return x.clone().random_(**{"from": 3, "to": 4}), x.clone().uniform_(**{"from": 2, "to": 2})


def with_keyword_default(a, *, d=4):
    return a, d


@program(breaks=True)
def keyword_defaults_change(x):
    with_keyword_default.__kwdefaults__ = {"d": 40}
    before = with_keyword_default(x)
    with_keyword_default.__kwdefaults__["d"] = 41
    after = with_keyword_default(x)
    with_keyword_default.__kwdefaults__ = {"d": 4}
    return before, after


@program
def ordered_dicts_compare_their_order(x):
    a, b = collections.OrderedDict(a=1, b=2), collections.OrderedDict(b=2, a=1)
    return x + 1, a == b, a != b, a == {"b": 2, "a": 1}, {"b": 2, "a": 1} == a, a == collections.OrderedDict(a)


@program(breaks=True)
def tensors_in_text(x):
    t = x.sum() * 0 + 1.5
    return x + 1, "%s" % t, "%.1f" % t, b"%d" % t.long(), "{:.2f}".format(t), f"{t:.1f}"


@program(breaks=True)
def methods_of_numbers_leave(x):
    n = x.dim()
    return x + n, n.bit_length


class Text(str, enum.Enum):
    A = "a"
    __str__ = str.__str__
    __format__ = str.__format__


class Overridden(dict):
    def keys(self):
        raise AssertionError("dict() does not ask")

    __getitem__ = keys


@program(args=lambda: (Overridden(a=1, b=2),))
def derived_from_builtins(x, d):
    return x + d.__len__(), str(Text.A), f"{Text.A}", f"{Text.A:>3}", dict(d), {**d}, {"z": 0} | dict(d)


@program(breaks=True, args=lambda: (numpy.array([1.0, 2.0]), decimal.Decimal("NaN"), array.array("d", [numpy.nan])))
def objects_that_do_not_equal_themselves(x, numbers, number, items):
    return x + 1, (numbers == numbers).tolist(), (numbers != numbers).any().item(), number == number, items == items, [number] == [number]


@program(args=lambda: (collections.ChainMap({"a": 1}, {"b": 2}),))
def text_of_a_chain_of_dictionaries(x, maps):
    return x + 1, repr(maps), f"{maps}"


@program(args=lambda: (list[int],))
def names_of_a_generic_alias(x, alias):
    try:
        return x + 1, alias.__name__, alias.__module__, alias.__origin__
    except AttributeError:
        return x - 1


# What C code asks of items


class Asked:
    """Says what it was asked."""

    def __init__(self, n, log):
        self.n, self.log = n, log

    def __eq__(self, other):
        self.log.append(("==", self.n, getattr(other, "n", other)))
        return self.n == getattr(other, "n", other)

    def __lt__(self, other):
        self.log.append(("<", self.n, other.n))
        return self.n < other.n

    def __gt__(self, other):
        self.log.append((">", self.n, other.n))
        return self.n > other.n

    def __repr__(self):
        self.log.append(("repr", self.n))
        return f"<{self.n}>"


def several(log, *numbers):
    return [Asked(n, log) for n in numbers]


@program
def items_that_are_sorted(x):
    log, numbers = [], (3, 1, 2, 5, 4, 1)
    l = several(log, *numbers)
    l.sort()
    keyed = sorted(several(log, *numbers), reverse=True, key=lambda v: (log.append(v.n), v)[1])
    pairs = sorted([(2, Asked(1, log)), (2, Asked(0, log)), (1, Asked(5, log))])
    least, most = min(several(log, *numbers)), max(Asked(2, log), Asked(3, log), Asked(3, log))
    first = min(several(log, 2, 1), key=lambda v: -v.n)
    return x + 1, [v.n for v in (*l, *keyed)], [v.n for _, v in pairs], least.n, most.n, first.n, log


@program
def items_that_are_looked_for(x):
    log = []
    l, d = several(log, 3, 1, 2, 1), collections.deque(several(log, 1, 2, 1), 4)
    l.remove(Asked(1, log))
    d.remove(Asked(2, log))
    found = l.index(Asked(1, log), 1), tuple(l).index(Asked(2, log), -2, 99), l.count(Asked(3, log)), d.index(Asked(1, log), 1)
    words = [outcome_of(lambda: c.index(Asked(7, log))) for c in (l, tuple(l), d)]
    words += [outcome_of(lambda: c.remove(7)) for c in (l, d)]
    return x + 1, [v.n for v in l], [v.n for v in d], found, words, [k.n for k, _ in itertools.groupby(several(log, 1, 1, 2))], log


@program
def items_of_sequences_that_are_compared(x):
    log = []
    one, two, more = several(log, 1), several(log, 2), several(log, 1, 2)
    queue = collections.deque(one)
    found = one == more, one != more, tuple(one) == tuple(more), one < more, tuple(more) > tuple(one), one <= two, two >= one, [one] < [two]
    mixed = queue == one, one == queue, queue == collections.deque(one), outcome_of(lambda: queue < one), outcome_of(lambda: [1] < ["a"])
    return x + 1, found, mixed, [x] == [x], [x, 1] == [x], log


@program
def items_that_are_shown(x):
    log = []
    one, two = several(log, 1, 2)
    shown = str([one, (two,)]), f"{[one]} {(one, two)} {one}", "%s %r" % (one, [two]), "{} {:>5}".format({"a": one}, "b"), format([two])
    return x + 1, shown, log


@program
def extremes_of_nothing_and_of_one(x):
    refused = [outcome_of(f) for f in (
        lambda: min([]), lambda: max(v for v in ()), min, lambda: max(1, 2, default=3), lambda: min(1, "a"), lambda: max(3))]
    given = min([], default=None), max((), default=5), min([4], default=5)
    return (x + 1, refused, given, min([3, -1], key=abs), max("ab", "c", key=len), max([2, 1], key=None),
            [min(x.shape[0], 2), max(2, x.shape[0])])


# What runs when an object dies


class Mortal:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def __del__(self):
        self.log.append(self.name)


def takes_down(log, x):
    thing, y = Mortal("first", log), x + 1
    del thing
    log.append("between")
    thing = Mortal("second", log)
    thing = None
    bare = object.__new__(Mortal)
    bare.name, bare.log = "third", log
    bare = None                                          # noqa: F841
    log.append("after")
    return y * 2


@program(breaks=True)
def finalizers(x):
    log = []
    y = takes_down(log, x)
    log.append("end")
    return y, log


class Referent:
    def ask(self):
        return 3


@program(breaks=True)
def weak_references_to_new_objects(x):
    log, thing = [], Referent()
    weak = weakref.ref(thing, lambda _: log.append("dead"))
    alive, y = weak() is thing, x + 1
    del thing
    held, member, other = weakref.WeakSet(), Referent(), Referent()
    held.add(member)
    proxy, before = weakref.proxy(other), len(held)
    method = weakref.WeakMethod(other.ask)
    asked = proxy.ask() + method()()
    del member, other
    return y, alive, weak(), log, before, len(held), asked, method(), outcome_of(lambda: proxy.ask())[0]


def with_cleanup(x, log):
    try:
        with contextlib.suppress(KeyError):
            yield x
            yield from iter([x + 1, x + 2])
    finally:
        log.append("finally")


@program(breaks=True)
def generators_dropped_in_a_try(x):
    log, it = [], None
    for y in with_cleanup(x, log):
        break
    log.append("after the loop")
    it = with_cleanup(x, log)
    next(it)
    z = next(it)
    it = None
    log.append("after the assignment")
    return y, z, log


@program
def generators_dropped_elsewhere(x):
    def counting():
        try:
            start = 1
        finally:
            yield x
        yield from iter([x + start, x])

    for y in counting():
        break
    it = counting()
    next(it)
    return y, next(it), next(a for a in [x, y])


# Errors that name what the program wrote

class Fixed:
    __slots__ = ("slot",)
    shared = 1


class Fields(Exception):
    def __init__(self):
        object.__setattr__(self, "field", 5)


class Indexed:
    def __index__(self):
        return 2


def in_place(operator_, a, b):
    return lambda: operator_(a() if callable(a) else a, b)


def raises_from(cause):
    raise ValueError from cause


def imports_what_is_not_there():
    from math import nothing
    return nothing


@program
def errors_in_the_words_of_the_program(x):
    attempts = [in_place(operator.iadd, 1, "a"), in_place(operator.isub, "a", 1), in_place(operator.ior, {1}, [2]),
                in_place(operator.iadd, None, 1), in_place(operator.ilshift, 1.5, 1), in_place(operator.ipow, 1, "a"),
                in_place(operator.imul, [1], 1.5), in_place(operator.isub, Suit.HEARTS, 2),
                lambda: divmod(1, "a"), lambda: list(map(None, [1])), lambda: sorted([1], key=5), lambda: raises_from(5),
                lambda: raises_from(int), lambda: raises_from(None), imports_what_is_not_there, lambda: reversed(Fixed()),
                lambda: type("a", 5),
                lambda: x.shape[7], lambda: x.shape["a"], lambda: x.shape.nothing, lambda: setattr(Fixed(), "shared", 2),
                lambda: delattr(Fixed(), "shared"), lambda: delattr(Fixed(), "other"), lambda: setattr(Fixed(), "other", 1),
                lambda: delattr(Fixed(), "slot"), lambda: super().nothing, lambda: Fields().field, lambda: operator.index(Indexed())]
    items = same = [1]
    items *= 2
    return x + 1, [outcome_of(f)[:2] for f in attempts], same


class Suit(enum.Enum):
    HEARTS = 1


class Registry:
    table, asked = {"a": 1}, []

    def __class_getitem__(cls, key):
        cls.asked.append(key)
        return cls.table[key]


@program(args=lambda: (Registry.asked.clear(), Registry.table.update(a=1)))
def a_class_with_items(x, *_):
    Registry.table["a"] += 1
    return x * Registry["a"], outcome_of(lambda: Registry["b"])[:2], list(Registry.asked), outcome_of(lambda: Fixed[0])[:2]


@program
def imports_with_an_alternative(x):
    try:
        from math import nothing
    except ImportError as error:
        return x + 1, error.name, str(error)
    return x * nothing


@program(args=lambda: ({1: 0, 2: 0}, {True: 0}, True, 1.0))
def views_of_equal_keys(x, d, e, *keys):
    combined = [c for k in keys for c in (
        d.keys() & {k}, {k} & d.keys(), d.keys() | [k], {k} | d.keys(), e.keys() ^ [k, 2], d.keys() - e.keys(), d.items() & {(k, 0)},
        [(k, 0), (k, 1)] | d.items())]
    return x + 1, [sorted(map(repr, c)) for c in combined]


class Activation(enum.Enum):
    RELU, SINE = "relu", "sine"

    @classmethod
    def _missing_(cls, value):
        if value is not None:
            ASKED.append(value)
            return next((member for member in cls if member.value == str(value).lower()), None)


class Single(enum.Enum):
    ONE = 1

    @staticmethod
    def _missing_(value):
        ASKED.append(value)
        return Single.ONE


class ByShape(type):
    def __subclasscheck__(cls, other):
        ASKED.append(("subclass", other.__name__))
        return hasattr(other, "shape")


class Shaped(metaclass=ByShape):
    pass


class ShapedError(Exception, metaclass=ByShape):
    pass


ASKED = []


@program
def classes_that_answer_for_themselves(x):
    ASKED.clear()
    found = [outcome_of(Activation, value) for value in ("relu", "RELU", "Sine", "none", None, 3, Activation.SINE, "RELU")]
    ASKED.append("then")
    derived = issubclass(torch.Tensor, Shaped), issubclass(int, (str, (Shaped, float))), issubclass(int, (int, Shaped))
    no_class = outcome_of(issubclass, 3, collections.abc.Sized)
    return x + 1, found, derived, list(ASKED), Single(2), no_class, [outcome_of(caught_by, c) for c in (ShapedError, KeyError, int, 3)]


def caught_by(cls):
    try:
        [].pop()
    except cls:
        return "caught"
    except (KeyError, IndexError):
        return "not caught", list(ASKED)


class Shrinking:
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length


@program(args=lambda: (2, 0, -1))
def lengths_below_zero(x, *lengths):
    return x + 1, [outcome_of(function, Shrinking(n)) for n in lengths for function in (len, bool)]


class Unreachable(OSError):
    pass


def raised(error, *args):
    try:
        raise error(*args)
    except FileNotFoundError as found:
        return "not found", type(found).__name__, repr(found), found.errno, found.strerror, found.filename
    except OSError as found:
        return "other", type(found).__name__, repr(found), str(found), found.errno, found.strerror, found.filename


@program(breaks=True)
def system_errors(x):
    return x + 1, [raised(error, *args) for error in (OSError, Unreachable, FileNotFoundError, ConnectionError) for args in (
        (), (2,), (2, "gone"), (13, "denied"), (99999, "unknown"), ("2", "text"), (2, "gone", "f"), (17, "there", "f", None, "g"))]


@program
def system_errors_by_number(x):
    found = []
    for number in (2, 13, 99999):
        try:
            raise OSError(number, "text")
        except (FileNotFoundError, PermissionError) as error:
            found += [type(error).__name__, error.args, repr(error), str(error)]
        except OSError as error:
            found.append(str(error))
    return x + 1, found


# Methods in C that the program's classes build on


class Appending(list):
    def __add__(self, other):
        return Appending(super().__add__(other))

    def __eq__(self, other):
        answer = super().__eq__(other)
        return "left to the other" if answer is NotImplemented else answer


class Pair(tuple):
    def __eq__(self, other):
        answer = super().__eq__(other)
        return "left to the other" if answer is NotImplemented else answer

    def count(self, item):
        return super().count(one_behind_a_break(item))


class Plain:
    def __eq__(self, other):
        answer = super().__eq__(other)
        return "left to the other" if answer is NotImplemented else answer

    def __ne__(self, other):
        answer = super().__ne__(other)
        return "not known" if answer is NotImplemented else answer


def one_behind_a_break(item):
    print(end="")
    return item


@program(breaks=True)
def operands_that_methods_do_not_know(x):
    methods = ([1].__add__, (1,).__add__, [1].__mul__, {1: 2}.__or__, {1}.__or__, {1}.__le__, {1}.__ror__, {1}.__ior__,
               collections.deque([1]).__add__)
    out = [outcome_of(method, other) for method in methods for other in (3, (1,))]
    return x + 1, out, [[1].__eq__(3), {1: 2}.__eq__(3), frozenset([1]).__eq__([1]), range(3).__eq__(3), [1].__eq__([1])]


@program(breaks=True)
def super_of_methods_in_c(x):
    out = [Appending([1]) + [2], outcome_of(Appending([1]).__add__, (2,))]
    out += [value == other for value in (Appending([1]), Pair((1,)), Plain()) for other in (3, [1], (1,), value)]
    return x + 1, out, Plain() != 3, Pair((1, 2, 1)).count(1)


@program
def lists_while_they_are_sorted(x):
    items, seen = [3, 1, 2], []

    def watched(item):
        seen.append(list(items))
        return item

    items.sort(key=watched)
    return x + 1, items, seen, outcome_of(lambda: items.sort(key=lambda item: items.append(item) or item)), items, \
        outcome_of(lambda: items.sort(reverse="a"))


@program
def sets_among_sets(x):
    outer = {frozenset([1, 2]), frozenset()}
    out = [{1, 2} in outer, {3} in outer, set() in outer, outcome_of(outer.remove, {3}), outcome_of(outer.add, {3})]
    outer.discard(set())
    outer.remove({1, 2})
    return x + 1, out, outer, outcome_of(lambda: {1} in {1: 2})


# Attributes of exceptions that the program's classes have instead


class Telling(ValueError):
    args = "of the class"
    __cause__ = "none of yours"

    @property
    def __notes__(self):
        return "noted"

    def with_traceback(self, traceback):
        return "with", traceback

    def add_note(self, note):
        return "added " + note

    def __bool__(self):
        return False


class Ending(StopIteration):
    @property
    def value(self):
        return "computed"


@program
def exceptions_with_attributes_of_their_own(x):
    error = Telling(1)
    return x + 1, error.args, error.__cause__, error.__notes__, error.with_traceback(None), error.add_note("n"), 1 if error else 2, \
        str(error), Ending(3).value


@program
def exceptions_that_check_their_arguments(x):
    return x + 1, [outcome_of(error, "a") for error in (UnicodeDecodeError, UnicodeEncodeError, UnicodeTranslateError)], \
        outcome_of(SyntaxError, "a", 3), outcome_of(lambda: ImportError("a", q=1)), outcome_of(lambda: ImportError("a", name="n").name), \
        UnicodeDecodeError("a", b"b", 0, 1, "r").args


# Classes made by the function


@program(breaks=True)
def data_classes_that_are_refused(x):
    def of_fields():
        @dataclasses.dataclass
        class Mixed:
            first: int = 1
            second: int

    def of_a_list():
        @dataclasses.dataclass
        class Shared:
            items: list = []

    return x + 1, outcome_of(of_fields), outcome_of(of_a_list)


@program
def names_of_a_class_in_order(x):
    made = type("Made", (), {"second": 2, "first": 1})
    return x + 1, list(vars(made))[:3], made.__module__, type("Other", (), {"__module__": "elsewhere"}).__module__


@program(breaks=True)
def values_in_many_others(x):
    chain = None
    for _ in range(300):
        chain = [chain]
    return x + 1, chain


class Options(dict):
    def __eq__(self, other):
        return super().__eq__(other)


class Row(list):
    def __eq__(self, other):
        return super().__eq__(other)


class Column(list):
    def __eq__(self, other):
        return super().__eq__(other)


class Mixin:
    pass


class Mixed(Mixin, ValueError):
    pass


ROW, COLUMN, OPTIONS = Row([1, 2]), Column([1, 2]), Options(a=1)


@program
def equality_with_objects_of_other_classes(x):
    made = Options(a=1)
    out = [one == other for one in (made, OPTIONS, ROW) for other in (None, 3, "a", (1, 2), {"a": 1}, [1, 2], COLUMN, OPTIONS)]
    return x + 1, out, made != 3, [1].__eq__(x), "a".__eq__(1), (1).__eq__("a"), (1.0).__eq__(1), (1).__eq__(1.0), (5).__mod__(3), \
        fractions.Fraction(3).__eq__(3), 1j.__eq__(x), {}.__eq__([]), collections.OrderedDict(a=1).__eq__({"a": 1}), \
        None.__eq__(None), None.__eq__(1)


@program
def attributes_of_an_exception_with_two_bases(x):
    error = Mixed("text")
    error.more = 3
    return x + 1, error.__dict__["more"], vars(error)["more"], error.args, error.__module__


LONG = 10 ** 5000                    # Python writes no such number in decimal digits


@program
def numbers_of_many_digits(x):
    made = 10 ** 5000
    return x + 1, made, LONG, made == LONG, LONG % 7, {LONG: 1}[made], [made].count(LONG), -LONG


class Degrees(float):
    pass


class Phasor(complex):
    pass


@program(breaks=True, args=lambda: (Degrees("nan"), Phasor("nan")))
def nans_of_classes_of_ones_own(x, a, b):
    return x + 1, a == a, a != a, b == b, b != b, a in [a], Degrees("nan") == 1


class Reflecting:
    def __radd__(self, other):
        return "reflected"

    def __eq__(self, other):
        return "equal"


class ReflectingNumber(Reflecting, float):
    pass


class First(Reflecting):
    __array_ufunc__ = None


@program(breaks=True, args=lambda: (numpy.float32(1), ReflectingNumber(2), First()))
def a_scalar_of_numpy_takes_whatever_is_a_number(x, scalar, number, first):
    return x + 1, scalar + number, scalar == number, scalar == first, scalar + first


@program(breaks=True, args=lambda: (numpy.arange(2), ReflectingNumber(2), Reflecting(), First()))
def an_array_takes_what_does_not_say_otherwise(x, a, number, other, first):
    return x + 1, (a + number).tolist(), (a == number).tolist(), (a + other).tolist(), (a == other).tolist(), a + first, a == first
