"""Programs about classes, protocols and the standard library's helpers for them. Each takes a tensor; `breaks` marks those that may be more
than one graph. See test_language.py."""
import abc
import collections
import contextlib
import copy
import dataclasses
import enum
import functools
import numbers
import types
import typing
import weakref

import numpy
import torch

PROGRAMS = []


def program(function=None, *, breaks=False, args=None):
    """Register a program. breaks: it may be cut or run uncompiled; args: makes further arguments, fresh for each run."""
    def register(function):
        PROGRAMS.append((function, breaks, args or tuple))
        return function
    return register if function is None else register(function)


# Attribute access

class Temperature:
    scale = 10

    def __init__(self, c):
        self._c = c

    @property
    def c(self):
        return self._c

    @c.setter
    def c(self, value):
        self._c = value * self.scale

    @c.deleter
    def c(self):
        self._c = -1

    @classmethod
    def freezing(cls, plus=0):
        return cls(plus)

    @staticmethod
    def twice(v):
        return v * 2

    def __call__(self, x):
        return x * self._c


@program
def properties(x):
    t = Temperature(3)
    t.c = 4
    a = t.c
    del t.c
    return t(x), a, t.c, Temperature.twice(x), Temperature.freezing(2).c, t.freezing().c, t.twice(3)


@program
def property_without_setter(x):
    class P:
        @property
        def a(self):
            return 1
    try:
        P().a = 2
    except AttributeError as e:
        return x + 1, type(e).__name__


class Fallback:
    def __init__(self):
        self.known = 1

    def __getattr__(self, name):
        if name.startswith("no"):
            raise AttributeError(name)
        return name + "!"


@program
def getattr_fallback(x):
    f = Fallback()
    return x + f.known, f.other, hasattr(f, "nothing"), getattr(f, "none", 5), getattr(f, "known"), hasattr(f, "known")


class Intercept:
    def __init__(self):
        self.v = 2

    def __getattribute__(self, name):
        if name == "magic":
            return 42
        return object.__getattribute__(self, name)

    def get(self):
        return self.v


@program
def getattribute(x):
    i = Intercept()
    return x * i.magic, i.v, i.get()


class Recording:
    def __init__(self):
        object.__setattr__(self, "log", [])

    def __setattr__(self, name, value):
        self.log.append(name)
        super().__setattr__(name, value)

    def __delattr__(self, name):
        self.log.append("-" + name)
        object.__delattr__(self, name)


@program
def setattr_override(x):
    r = Recording()
    r.a = x + 1
    r.b = 2
    setattr(r, "c", 3)
    del r.b
    return r.a, r.log, r, hasattr(r, "b")


@program(args=lambda: (Recording(),))
def setattr_override_on_argument(x, r):
    r.a = 1
    r.b = x * 2
    del r.a
    return r.b + 1


class Slots:
    __slots__ = ("a", "b", "__dict__")

    def __init__(self, a):
        self.a = a


class OnlySlots:
    __slots__ = ("a", "b")

    def __init__(self, a, b=2):
        self.a, self.b = a, b

    def total(self):
        return self.a + self.b


class DerivedSlots(OnlySlots):
    __slots__ = ("c",)


@program
def slots(x):
    s, o, d = Slots(x), OnlySlots(x), DerivedSlots(1, 3)
    s.extra = 4
    o.a = o.a * 2
    d.c = 5
    try:
        o.zzz = 1
    except AttributeError as e:
        name = type(e).__name__
    del d.a
    return s.a + s.extra, o.total(), d.c, hasattr(d, "a"), name, hasattr(s, "b")


@program
def slots_escape(x):
    return OnlySlots(x + 1), DerivedSlots(1)


@program(args=lambda: (OnlySlots(2, 3), Slots(1)))
def slots_arguments(x, o, s):
    o.a = x * o.b
    s.extra = 5
    s.b = o.total()
    return o.a


class AnsweringSlots:
    __slots__ = ("a", "b")

    def __init__(self, a):
        self.a = a

    def __getattr__(self, name):
        if name in "ab":
            return 7
        raise AttributeError(name)


@program(args=lambda: (AnsweringSlots(2),))
def slots_without_a_value_are_not_there_to_be_deleted(x, o):
    found = []
    for s in o, AnsweringSlots(3):
        for name in "a", "b", "a":
            try:
                delattr(s, name)
            except AttributeError as e:
                found.append(str(e))
        found.append(s.a + s.b)
    return x + 1, found


@program(args=lambda: (OnlySlots(2, 3), Slots(1)))
def slots_and_dictionaries(x, o, s):
    d = DerivedSlots(1)
    return x * s.__dict__.get("a", 2), [hasattr(v, "__dict__") for v in (o, s, d, Slots(2))], getattr(o, "__dict__", None)


class Typed:
    def __init__(self, kind):
        self.kind = kind

    def __set_name__(self, owner, name):
        self.name = "_" + name

    def __get__(self, obj, owner=None):
        if obj is None:
            return self
        return getattr(obj, self.name)

    def __set__(self, obj, value):
        if not isinstance(value, self.kind):
            raise TypeError(f"{self.name} must be {self.kind.__name__}")
        setattr(obj, self.name, value)

    def __delete__(self, obj):
        delattr(obj, self.name)


class Point3:
    x = Typed(int)
    y = Typed(int)

    def __init__(self, x, y):
        self.x, self.y = x, y


@program
def descriptors(x):
    p = Point3(1, 2)
    p.x = 7
    try:
        p.y = "a"
    except TypeError as e:
        message = str(e)
    del p.y
    return x * p.x, message, hasattr(p, "y"), isinstance(Point3.x, Typed), Point3.__dict__["x"].kind is int


class Lazy:
    def __init__(self, f):
        self.f = f

    def __get__(self, obj, owner):
        return self.f(owner)


class WithLazy:
    whole = Lazy(lambda owner: owner.__name__)
    factor = 3


@program
def non_data_descriptor(x):
    w = WithLazy()
    first = w.whole
    w.whole = "mine"
    return x * w.factor, first, w.whole, WithLazy.whole


@program
def attribute_functions(x):
    n = types.SimpleNamespace(a=1)
    setattr(n, "b", x)
    delattr(n, "a")
    return n.b + 1, hasattr(n, "a"), getattr(n, "a", None), sorted(vars(n)), n.__dict__.keys() == {"b"}


@program
def missing_attribute_message(x):
    class Thing:
        pass
    try:
        Thing().nope
    except AttributeError as e:
        return x + 1, str(e), e.name


class Base:
    tag = "base"

    def __init__(self, k):
        self.k = k

    def f(self, x):
        return x + self.k

    @classmethod
    def make(cls, k):
        return cls(k)

    @property
    def p(self):
        return self.k * 10

    @staticmethod
    def s(x):
        return x * 2


class Left(Base):
    tag = "left"

    def f(self, x):
        return super().f(x) * 2

    @property
    def p(self):
        return super().p + 1

    @classmethod
    def make(cls, k):
        obj = super().make(k + 1)
        obj.made = cls.__name__
        return obj


class Right(Base):
    def f(self, x):
        return super(Right, self).f(x) * 3

    def s2(self, x):
        return super().s(x)


class Both(Left, Right):
    def f(self, x):
        return super().f(x) - 1 + len(super().tag)

    def g(self, x):
        return [super(Left, self).f(x), super(Both, self).f(x), Base.f(self, x)]


@program
def super_forms(x):
    b = Both.make(2)
    return b.f(x), b.g(x), b.p, b.made, b.s2(x), Both.__mro__[1].__name__, isinstance(b, Base), issubclass(Both, Right)


@program
def super_in_comprehension_and_closure(x):
    class D(Base):
        def f(self, x):
            inner = lambda v: super(D, self).f(v)
            return inner(x) + sum([super(D, self).f(i) for i in range(2)])
    return D(2).f(x)


# Operators

class Vec:
    def __init__(self, *v):
        self.v = list(v)

    def __add__(self, o):
        if not isinstance(o, Vec):
            return NotImplemented
        return Vec(*[a + b for a, b in zip(self.v, o.v)])

    def __radd__(self, o):
        return ("radd", o)

    def __rsub__(self, o):
        return Vec(*[o - a for a in self.v])

    def __mul__(self, k):
        return Vec(*[a * k for a in self.v])

    __rmul__ = __mul__

    def __imul__(self, k):
        self.v = [a * k for a in self.v]
        return self

    def __eq__(self, o):
        return isinstance(o, Vec) and self.v == o.v

    def __hash__(self):
        return hash(tuple(self.v))

    def __lt__(self, o):
        return self.v < o.v

    def __contains__(self, a):
        return a in self.v

    def __iter__(self):
        return iter(self.v)

    def __reversed__(self):
        return iter(["rev"] + self.v[::-1])

    def __len__(self):
        return len(self.v)

    def __bool__(self):
        return any(self.v)

    def __getitem__(self, i):
        return Vec(*self.v[i]) if isinstance(i, slice) else self.v[i]

    def __setitem__(self, i, value):
        self.v[i] = value

    def __delitem__(self, i):
        del self.v[i]

    def __neg__(self):
        return Vec(*[-a for a in self.v])

    def __pos__(self):
        return "pos"

    def __invert__(self):
        return "invert"

    def __abs__(self):
        return sum(abs(a) for a in self.v)

    def __round__(self, n=None):
        return ("round", n)

    def __index__(self):
        return len(self.v)

    def __int__(self):
        return 77

    def __float__(self):
        return 7.5

    def __complex__(self):
        return 1j

    def __floordiv__(self, o):
        return "floordiv"

    def __divmod__(self, o):
        return "divmod"

    def __pow__(self, o, mod=None):
        return ("pow", o, mod)

    def __matmul__(self, o):
        return "matmul"

    def __and__(self, o):
        return "and"

    def __ror__(self, o):
        return "ror"

    def __lshift__(self, o):
        return "lshift"

    def __repr__(self):
        return f"Vec{tuple(self.v)!r}"

    def __format__(self, spec):
        return f"<{spec}>"

    def __trunc__(self):
        return 5

    def __floor__(self):
        return 6

    def __ceil__(self):
        return 8


class Boxes(torch.Tensor):
    @property
    def shape(self):
        with torch._C.DisableTorchFunctionSubclass():
            return super().shape


@program(breaks=True)
def super_of_a_tensor_in_a_block(x):
    boxes = x.as_subclass(Boxes)
    return x * boxes.shape[0]


@program(breaks=True, args=lambda: (super(Both, Both(2)),))
def super_object_from_outside(x, parent):
    try:
        return x + 1, parent.tag, parent.f(x)
    except AttributeError:
        return x - 1


@program
def arithmetic_dunders(x):
    a, b = Vec(1, 2), Vec(3, 4)
    c = a + b
    d = 10 - a
    e = 3 * b
    b *= 2
    return (x * c[0], c.v, d.v, e.v, b.v, 5 + a, (-a).v, +a, ~a, abs(Vec(-1, 2)), a // 1, divmod(a, 2), a ** 2, pow(a, 2, 3),
            a @ b, a & 1, 1 | a, a << 1)


@program(breaks=True)
def conversion_dunders(x):
    import math
    v = Vec(1, 2, 3)
    return (x + 1, int(v), float(v), complex(v), round(v), round(v, 1), list(range(v)), [1, 2, 3, 4][v], f"{v}", f"{v:>3}",
            f"{v!r}", repr(v), str(v), format(v, "z"), bool(v), bool(Vec(0)), math.trunc(v), math.floor(v), math.ceil(v),
            "%s %r" % (v, v), "{} {!r} {:q}".format(v, v, v))


class Shown:
    def __init__(self, n):
        self.n = self.value = n

    def __str__(self):
        return f"shown {self.n}"

    def __getitem__(self, key):
        return self.n + int(key)


@program(breaks=True)
def formats_that_look_inside(x):
    shown, texts = Shown(4), []
    try:
        texts.append("{0.n} {0}".format(shown))
        texts.append("{0[2]}".format(shown))
        texts.append("{k[a].value} {0:.2f} {o}".format(2.5, k={"a": shown}, o=shown))
        texts.append("{0:{1.n}}".format(3, shown))
        texts.append("{0.nope}".format(shown))
    except (AttributeError, TypeError) as error:
        texts.append(str(error))
    return x + 1, texts


class Numbered:
    def __str__(self):
        return "numbered"

    def __index__(self):
        return 66


@program(breaks=True)
def printf_of_what_is_a_number_or_a_mapping(x):
    texts = ["%s %r" % (Shown(1), [1]), "%s%%d" % Numbered()]
    try:
        texts.append("%d|%-5x|%s" % (Numbered(), Numbered(), Numbered()))
        texts.append("%c" % Numbered())
        texts.append("%(a)d" % {"a": Numbered()})
        texts.append("%(3)s" % Shown(4))
        texts.append("nothing" % Shown(4))
        texts.append("%.2f" % (Shown(4),))
    except TypeError as error:
        texts.append(str(error))
    return x + 1, texts


@program
def failing_operators(x):
    words = []
    for f in (lambda: Vec(1) + "a", lambda: Vec(1) - 1, lambda: object() < object(), lambda: len(3), lambda: [] + (),
              lambda: {}[1], lambda: [][0], lambda: None.a, lambda: int("q"), lambda: "a" + 1, lambda: iter(3), lambda: int("3")(),
              lambda: "a".nope, lambda: [1, 2] @ 3, lambda: -"a", lambda: {1: 2}["k"], lambda: (1, 2)[5], lambda: {[]: 1},
              lambda: hash([]), lambda: set().pop(), lambda: [].pop(), lambda: 1 / 0, lambda: 5 % 0, lambda: max([]),
              lambda: next(iter([])), lambda: "abc".index("z"), lambda: [1].index(2), lambda: [1].remove(3),
              lambda: int([]), lambda: float("x"), lambda: chr(-1), lambda: (1,) < 2, lambda: 1 in 2):
        try:
            words.append(f())
        except Exception as e:
            words.append((type(e).__name__, str(e)))
    return x + 1, words


@program
def container_dunders(x):
    v = Vec(1, 2, 3)
    v[0] = 9
    del v[1]
    a, *rest = v
    return (x + len(v), 3 in v, 5 not in v, list(v), v[0:1].v, v[-1], list(reversed(v)), a, rest, sum(v), max(v), sorted(v),
            [*v, 0], {k: 1 for k in v}, any(v), tuple(v), dict(enumerate(v)), list(zip(v, v)), list(map(str, v)))


@program
def comparison_dunders(x):
    a, b = Vec(1), Vec(2)
    return x + 1, a == Vec(1), a != b, a < b, b > a, sorted([b, a]), min(b, a), max([a, b]).v, a in [b, Vec(1)], [a, b].index(Vec(2)), \
        [a, a, b].count(Vec(1)), a is Vec(1)


@program
def hashed_objects_as_keys(x):
    d = {Vec(1): x, Vec(2): 2}
    s = {Vec(1), Vec(1), Vec(3)}
    d[Vec(2)] = 5
    return d[Vec(1)] + d[Vec(2)], len(s), Vec(3) in s, Vec(9) in d, d.get(Vec(7), 0), len(d)


@functools.total_ordering
class Version:
    def __init__(self, n):
        self.n = n

    def __eq__(self, o):
        return self.n == o.n

    def __lt__(self, o):
        return self.n < o.n

    __hash__ = None


@program
def total_ordering(x):
    return x + 1, Version(1) <= Version(2), Version(3) > Version(2), Version(1) >= Version(2), Version(1) != Version(1)


class Manager:
    def __init__(self, log, swallow=False):
        self.log, self.swallow = log, swallow

    def __enter__(self):
        self.log.append("enter")
        return self

    def __exit__(self, cls, value, tb):
        self.log.append(("exit", None if cls is None else cls.__name__, str(value)))
        return self.swallow


@program
def context_managers(x):
    log = []
    with Manager(log) as m, Manager(log, swallow=True):
        x = x + 1
        if m is not None:
            raise ValueError("inside")
    try:
        with Manager(log):
            raise KeyError("k")
    except KeyError:
        log.append("caught")
    return x + 1, log


def early(x, log):
    for i in range(3):
        with Manager(log):
            if i == 1:
                return x + i
            continue


@program
def return_from_with(x):
    log = []
    return early(x, log), log


@contextlib.contextmanager
def added(log, name):
    log.append("in " + name)
    try:
        yield name
    except ValueError:
        log.append("swallowed")
    finally:
        log.append("out " + name)


@program
def generator_context_manager(x):
    log = []
    with added(log, "a") as a, added(log, "b"):
        x = x * 2
    with added(log, "c"):
        raise ValueError
    return x + 1, a, log


@program(breaks=True)
def exit_stack(x):
    log = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(added(log, "a"))
        stack.callback(log.append, "called")
        x = x + 1
    with contextlib.suppress(KeyError):
        {}["k"]
    return x + 1, log


# Dataclasses, tuples, enums

@dataclasses.dataclass
class Config:
    a: int
    b: float = 2.0
    c: list = dataclasses.field(default_factory=list)
    d: int = dataclasses.field(init=False, default=4)

    def __post_init__(self):
        self.c.append(self.a)

    def scaled(self, x):
        return x * self.a * self.b


@dataclasses.dataclass(frozen=True, order=True)
class Key:
    name: str
    n: int = 0


@dataclasses.dataclass(slots=True, kw_only=True)
class Slim:
    a: int
    b: typing.Any = None


@program
def dataclass_basics(x):
    c = Config(3)
    c2 = dataclasses.replace(c, b=5.0)
    return (c.scaled(x), c2, c == Config(3), c != c2, dataclasses.asdict(c), dataclasses.astuple(Key("k", 2)),
            [f.name for f in dataclasses.fields(c)], dataclasses.is_dataclass(c), repr(c), c2.c)


@program
def dataclass_frozen(x):
    k = Key("a", 1)
    try:
        k.n = 2
    except dataclasses.FrozenInstanceError as e:
        message = str(e)
    return x + 1, message, k < Key("b"), hash(k) == hash(Key("a", 1)), {k: 1}[Key("a", 1)], sorted([Key("b"), k]), repr(k), k


@program
def dataclass_slots(x):
    s = Slim(a=1)
    s.b = x + 1
    return s, s.b * 2, s == Slim(a=1, b=s.b) if False else 0


@program
def dataclass_with_tensors(x):
    c = Config(1, c=[])
    c.t = x * 2
    return c, c.t + 1


@program(args=lambda: (Config(2), Key("q", 3)))
def dataclass_arguments(x, c, k):
    c.a += 1
    c.c.append(k)
    c.e = x
    return x * c.a + k.n, dataclasses.replace(c, a=0, c=[])


@program
def dataclass_in_function(x):
    @dataclasses.dataclass
    class Local:
        a: int = 1
    return x + Local(3).a


class Pair(typing.NamedTuple):
    left: typing.Any
    right: int = 5

    def both(self):
        return self.left * self.right


Triple = collections.namedtuple("Triple", "a b c", defaults=(3,))


@program
def named_tuples(x):
    p, t = Pair(x), Triple(1, 2)
    p2 = p._replace(right=2)
    left, right = p2
    return (p.both(), p2.both() + right, t, t._asdict(), t.c, t._fields, Triple._make([4, 5, 6]), t[0:2], t + (1,),
            isinstance(t, tuple), len(p), p2, t == (1, 2, 3), hash(t) == hash((1, 2, 3)), repr(t), t.index(2), [*t])


class Color(enum.Enum):
    RED = 1
    GREEN = "g"
    ALIAS = 1

    def describe(self):
        return self.name.lower()

    @property
    def loud(self):
        return self.name + "!"

    @classmethod
    def default(cls):
        return cls.GREEN


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 5


class Perm(enum.Flag):
    R = enum.auto()
    W = enum.auto()
    X = enum.auto()
    RW = R | W


class Word(str, enum.Enum):
    A = "aa"


@program
def enums(x):
    d = {Color.RED: 1, Color.GREEN: 2}
    try:
        Color("nope")
    except ValueError as e:
        message = str(e)
    return (x * Level.HIGH, Color.RED.describe(), Color.GREEN.loud, Color.default(), Color("g"), Color["RED"], Color.ALIAS is Color.RED,
            [c.name for c in Color], len(Color), d[Color.GREEN], Level.LOW < Level.HIGH, Level(5), Color.RED in Color,
            isinstance(Color.RED, Color), message, sorted(Level, reverse=True), str(Color.RED), repr(Level.LOW), f"{Color.RED}",
            Word.A == "aa", Word.A.upper(), Color.RED == 1, max(Level), list(Color.__members__))


@program
def flags(x):
    p = Perm.R | Perm.W
    return x + 1, p, p & Perm.R, Perm.R in p, Perm.X in p, bool(p & Perm.X), p == Perm.RW, ~p, p ^ Perm.R, p.value, Perm(3)


# Making classes

class Meta(type):
    registry = {}

    def __call__(cls, *args):
        obj = super().__call__(*args)
        obj.stamped = True
        return obj

    def __len__(cls):
        return 12

    def __getitem__(cls, key):
        return (cls.__name__, key)

    def __contains__(cls, key):
        return key == 1

    def __iter__(cls):
        return iter([1, 2])

    @property
    def loud(cls):
        return cls.__name__.upper()


class Made(metaclass=Meta):
    def __init__(self, a=1):
        self.a = a


class Singleton(type):
    instances = {}

    def __call__(cls, *args):
        if cls not in cls.instances:
            cls.instances[cls] = super().__call__(*args)
        return cls.instances[cls]


class Single(metaclass=Singleton):
    def __init__(self):
        self.n = 3


@program
def metaclasses(x):
    m = Made(2)
    return x * m.a, m.stamped, len(Made), Made["k"], 1 in Made, list(Made), Made.loud, type(Made).__name__


@program
def singleton_metaclass(x):
    return x * Single().n, Single() is Single()


@program
def class_in_function(x):
    class Local:
        k = 3
        names = [n for n in "ab"]

        def __init__(self, v):
            self.v = v

        def times(self):
            return self.v * self.k * x.shape[0]

    class Derived(Local):
        def times(self):
            return super().times() + 1
    return Derived(x).times(), Local.names, Derived.__name__, isinstance(Derived(1), Local), Derived.__mro__[1] is Local


@program
def type_calls(x):
    T = type("T", (Base,), {"extra": 4})
    t = T(2)
    return t.f(x), t.extra, type(t) is T, type(x) is torch.Tensor, type(t)(3).k, t.__class__(4).k, type([])((1, 2)), type(t).__name__


class Factory:
    made = 0

    def __new__(cls, n, *rest):
        if n < 0:
            return None
        obj = super().__new__(cls)
        obj.from_new = n
        return obj

    def __init__(self, n, extra=0):
        self.n = n + extra

    def __init_subclass__(cls, tag="none", **kwargs):
        super().__init_subclass__(**kwargs)
        cls.tag = tag


class Tagged(Factory, tag="tagged"):
    pass


class IntLike(int):
    def double(self):
        return self * 2


class ListLike(list):
    def last(self):
        return self[-1]

    def append(self, item):
        super().append(item)
        super().append("echo")


class StrLike(str):
    def shout(self):
        return self.upper() + "!"


class DictLike(dict):
    def __missing__(self, key):
        return f"missing {key}"

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@program
def new_and_init_subclass(x):
    f = Factory(2, 5)
    return x * f.n, f.from_new, Factory(-1), Tagged.tag, Tagged(1).tag


@program(breaks=True)
def init_subclass_in_function(x):
    class Sub(Factory, tag="inner"):
        pass
    return x + Sub(1).n, Sub.tag


@program(breaks=True)
def builtin_subclasses(x):
    l, d, s, i = ListLike([1]), DictLike(a=1), StrLike("ab"), IntLike(4)
    l.append(2)
    d["b"] = x
    return (x * i.double(), l.last(), len(l), [*l], d["zz"], d.b, d.a, s.shout(), s + "c", i + 1, isinstance(l, list), l, d,
            "a" in d, sorted(d), list(d.items())[0], d.get("q"), l == [1, 2, "echo"])


@program(breaks=True, args=lambda: (ListLike([1, 2]), DictLike(k=2), IntLike(3), StrLike("s")))
def builtin_subclass_arguments(x, l, d, i, s):
    l.append(5)
    d["n"] = x + 1
    return x * i * l[0] * d["k"], l.last(), d["absent"], s.shout(), i.double(), [*l], len(d)


@program
def bound_methods(x):
    b = Base(2)
    f, g = b.f, Base.f
    methods = {"f": b.f}
    return f(x), g(b, x), methods["f"](x), f.__self__ is b, f.__func__ is g, f == b.f, f.__name__, b.f.__func__ is Base.f


@program
def abstract_base_classes(x):
    import collections.abc as c

    class Shape(abc.ABC):
        @abc.abstractmethod
        def area(self): ...
    try:
        Shape()
    except TypeError as e:
        message = type(e).__name__
    v = Vec(1)
    return (x + 1, message, isinstance([], c.Sequence), isinstance({}, c.Mapping), isinstance(v, c.Iterable), isinstance(3, numbers.Number),
            isinstance(len, c.Callable), isinstance(v, c.Hashable), isinstance([], c.Hashable), issubclass(dict, c.MutableMapping),
            isinstance(iter([]), c.Iterator), isinstance((i for i in []), c.Generator), isinstance(x, torch.Tensor),
            isinstance(3, int | str), isinstance("a", (int, str)), isinstance(True, int), isinstance(None, type(None)))


class Stack(collections.abc.MutableSequence):
    def __init__(self, *items):
        self.items = list(items)

    def __getitem__(self, i):
        return self.items[i]

    def __setitem__(self, i, v):
        self.items[i] = v

    def __delitem__(self, i):
        del self.items[i]

    def __len__(self):
        return len(self.items)

    def insert(self, i, v):
        self.items.insert(i, v)


class Table(collections.abc.Mapping):
    def __init__(self, **d):
        self.d = d

    def __getitem__(self, k):
        return self.d[k]

    def __iter__(self):
        return iter(self.d)

    def __len__(self):
        return len(self.d)


def keyword_names(**kw):
    return sorted(kw)


@program
def collections_abc(x):
    s, t = Stack(1, 2), Table(a=1, b=x)
    s.append(3)
    s.extend([4])
    s.reverse()
    return (x * s.pop(), list(s), 2 in s, s.index(2), s.count(3), t.get("a"), "b" in t, list(t.keys()), list(t.values())[0],
            dict(t.items())["b"] + 1, t == Table(a=1), keyword_names(**t), {**t}["a"])


@program
def user_dict_and_list(x):
    d, l = collections.UserDict(a=1), collections.UserList([1, 2])
    d["b"] = x
    l.append(3)
    return d["b"] + d["a"], "a" in d, len(d), list(d), l[0], len(l), list(l), d.get("z", 4)


class Node:
    def __init__(self, value, *children):
        self.value, self.children, self.parent = value, list(children), None
        for c in children:
            c.parent = self

    def walk(self):
        yield self
        for c in self.children:
            yield from c.walk()


@program
def tree_of_objects(x):
    tree = Node(1, Node(2), Node(3, Node(4)))
    return x * sum(n.value for n in tree.walk()), [n.parent.value for n in tree.walk() if n.parent], len(list(tree.walk()))


@program
def cyclic_objects_escape(x):
    n = Node(x, Node(2))
    return n.children[0].parent.value


@program
def cycle_returned(x):
    a = types.SimpleNamespace(x=x)
    a.me = a
    l = [1]
    l.append(l)
    d = {"l": l}
    d["d"] = d
    return a.me.me.x + 1, a.me is a, l[1] is l


@program
def cycle_leaves(x):
    a = types.SimpleNamespace(x=x + 1)
    a.me = a
    return a.x, [a]


@program
def copies(x):
    n = types.SimpleNamespace(a=[1], b={"k": (1, [2])})
    shallow, deep = copy.copy(n), copy.deepcopy(n)
    deep.a.append(2)
    shallow.c = 1
    l = [[1], [2]]
    m = copy.deepcopy(l)
    m[0].append(3)
    k = copy.copy(l)
    return (x + 1, n.a, deep.a, shallow.a is n.a, deep.b, l, m, k[0] is l[0], copy.copy(Key("a")), copy.deepcopy(Config(1)).c,
            copy.copy({1: 2}), copy.deepcopy({1: [2]}), copy.copy({1}), hasattr(n, "c"))


@program
def copy_hooks(x):
    class C:
        def __copy__(self):
            return "copied"

        def __deepcopy__(self, memo):
            return "deeply"
    return x + 1, copy.copy(C()), copy.deepcopy([C()])


class Owner:
    pass


OWNER = Owner()


@program(breaks=True)
def weak_references(x):
    r = weakref.ref(OWNER)
    return x + 1, r() is OWNER


@program
def object_identity(x):
    a, b = Owner(), Owner()
    return x + 1, a is b, a == a, a != b, a == b, a in [b, a], [a, b].index(b), {a: 1, b: 2}[b], object() is object()


@program
def dynamic_class_attributes(x):
    class Counter:
        n = 0

        def __init__(self):
            Counter.n += 1
            type(self).last = self
    Counter()
    Counter()
    return x * Counter.n, isinstance(Counter.last, Counter)


class Counted:
    n = 0


@program(breaks=True)
def class_attribute_written(x):
    Counted.n += 1
    return x + 0


@program
def function_attributes(x):
    def f(a: int, b=2, *, c: str = "c") -> int:
        "doc"
        return a
    f.note = 5
    return x + 1, f.__name__, f.__doc__, f.__defaults__, f.__kwdefaults__, f.note, f.__annotations__, f.__qualname__.split(".")[-1], \
        hasattr(f, "zz"), f.__code__.co_argcount, f.__module__ == __name__


@program(breaks=True)
def generic_classes(x):
    T = typing.TypeVar("T")

    class Box(typing.Generic[T]):
        def __init__(self, v):
            self.v = v
    return Box(x).v + 1, Box[int](3).v


Box2T = typing.TypeVar("Box2T")


class Box2(typing.Generic[Box2T]):
    def __init__(self, v):
        self.v = v


@program
def generic_class(x):
    return Box2(x).v + 1, Box2[int](3).v


class Options(typing.TypedDict, total=False):
    a: int


@program(breaks=True)
def typing_helpers(x):
    o = Options(a=1)
    v: typing.Optional[int] = typing.cast(int, o["a"])
    return x + v, o, typing.get_origin(typing.List[int]) is list, typing.get_args(typing.Dict[str, int]), isinstance(o, dict)


@program
def matching_classes(x):
    @dataclasses.dataclass
    class P:
        a: int
        b: int

    def kind(v):
        match v:
            case P(a=0, b=b):
                return ("zero", b)
            case P(a, b) if a == b:
                return ("same", a)
            case Color.RED:
                return "red"
            case int() | float():
                return "number"
            case str(s):
                return "str " + s
            case {"k": k, **rest}:
                return (k, rest)
            case [a, *_, b]:
                return (a, b)
            case [one]:
                return one
            case Vec():
                return "vec"
            case None:
                return "none"
            case _:
                return "other"
    return x + 1, [kind(v) for v in (P(0, 5), P(2, 2), P(1, 2), Color.RED, 3, 2.5, "s", {"k": 1, "z": 2}, [1, 2, 3], (7,), Vec(1), None,
                                     {1},
                                 collections.deque([4]), {})]


class MatchArgs:
    __match_args__ = ("left", "right")

    def __init__(self, left, right):
        self.left, self.right = left, right


@program
def match_args(x):
    match MatchArgs(x, [1, {"a": 2}]):
        case MatchArgs(t, [1, {"a": n}]):
            return t * n


@program
def match_mapping_protocols(x):
    out = []
    for v in (Table(a=1), Stack(1, 2), collections.OrderedDict(a=2), range(2), Pair(1), "ab", b"ab"):
        match v:
            case {"a": n}:
                out.append(("map", n))
            case [a, b]:
                out.append(("seq", a, b))
            case _:
                out.append("none")
    return x + 1, out


class Interval(tuple):
    """A tuple with names of its own, such as the fields of a class made by attrs."""

    def __new__(cls, low, high):
        return super().__new__(cls, (low, high))

    @property
    def width(self):
        return self[1] - self[0]

    def __eq__(self, other):
        return "equal" if tuple(self) == tuple(other) else "not"

    __hash__ = tuple.__hash__

    def __add__(self, other):
        return Interval(self[0] + other[0], self[1] + other[1])


UNIT, UNIT_AGAIN = Interval(0.0, 1.0), Interval(0.0, 1.0)
BIND = object.__setattr__.__get__


@program
def tuples_of_a_class(x):
    low, high = UNIT
    total = UNIT + (1, 2)
    return x * high + low, [*UNIT], len(UNIT), UNIT.width, UNIT == UNIT_AGAIN, total, total.width, UNIT is UNIT_AGAIN


@program
def method_bound_by_its_descriptor(x):
    class Frozen:
        def __setattr__(self, name, value):
            raise AttributeError(name)
    frozen = Frozen()
    assign = BIND(frozen)
    assign("a", 2)
    return x * frozen.a, frozen.a, hasattr(frozen, "b")


class Catalogue(collections.namedtuple("Catalogue", "a b")):
    def __getattr__(self, name):
        return name.upper()

    def __contains__(self, item):
        return True

    def __hash__(self):
        return 7

    def __call__(self, x):
        return x + self.a

    def __index__(self):
        return 1


CATALOGUE = Catalogue(1, 2)


@program(breaks=True)
def named_tuple_with_special_methods(x):
    try:
        found = {CATALOGUE: 3}[CATALOGUE], CATALOGUE(x), [4, 5][CATALOGUE]
    except (KeyError, TypeError):
        found = None
    return x + 1, found, getattr(CATALOGUE, "other", None), hasattr(CATALOGUE, "other"), 9 in CATALOGUE


class Times:
    def __index__(self):
        return 2

    def __mul__(self, other):
        return NotImplemented


@program
def a_sequence_is_repeated_by_an_index(x):
    n, items = Times(), [x]
    items *= n
    try:
        n * 3
    except TypeError as error:
        return n * "ab", b"c" * n, n * (1, x), items, str(error)


# An AttributeError, wherever it comes from, asks `__getattr__`

class Falling:
    def __init__(self):
        self.asked = []

    @property
    def typo(self):
        return self.asked.appendix

    @functools.cached_property
    def late(self):
        return self.nothing

    def __getattr__(self, name):
        if name in ("nothing", "asked"):
            raise AttributeError(f"no {name}")
        self.asked.append(name)
        return name


class Hiding(Falling):
    def __getattribute__(self, name):
        if name == "hidden":
            raise AttributeError(name)
        return super().__getattribute__(name)


class TypoModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 3)

    @property
    def device(self):
        return self.layer.weights.device


TYPO = TypoModule()


class Unfound(ImportError):
    def __init__(self, text, name):
        super().__init__(text, name=name)


class Reworded(Exception):
    def __init__(self, text, **more):
        super().__init__(text + "!", **more)


@program
def an_exception_passes_its_arguments_on(x):
    found = []
    for make in (lambda: Unfound("not here", "there"), lambda: Reworded("why"), lambda: Reworded("why", because=1)):
        try:
            raise make()
        except Exception as error:
            found.append((type(error).__name__, repr(error), error.name if isinstance(error, ImportError) else None))
    return x + 1, found


@program
def attribute_errors_ask_getattr(x):
    falling, hiding, module, said = Falling(), Hiding(), TYPO, []
    for obj, name in (falling, "nothing"), (module, "device"), (module, "layers"):
        try:
            getattr(obj, name)
        except AttributeError as error:
            said.append(str(error))
    try:
        object.__getattribute__(falling, "other")
    except AttributeError as error:
        said.append(str(error))
    return x + 1, falling.typo, getattr(falling, "late", 3), hiding.hidden, hiding.typo, falling.asked, said, hasattr(module, "device")


class Slotted:
    __slots__ = ("full", "empty")

    def __getattr__(self, name):
        if name != "empty":
            raise AttributeError(name)
        ASKED.append(name)
        return 7


ASKED = []


@program(args=lambda: (Slotted(),))
def an_empty_slot_asks_getattr(x, slotted):
    ASKED.clear()
    own = Slotted()
    own.full = own.empty + 1
    slotted.full = own.full + 1
    y = x * slotted.empty * slotted.full
    slotted.empty = 2
    del slotted.empty
    return y, slotted.empty, hasattr(own, "full"), hasattr(own, "other"), list(ASKED)


class Dotted(dict):
    __getattr__ = dict.get
    __setattr__ = dict.__setitem__
    __delattr__ = dict.__delitem__


@program(args=lambda: (Dotted(count=1),))
def attributes_are_keys(x, dotted):
    own = Dotted(a=1)
    own.b, dotted.count, dotted.last = x, dotted.count + 1, x
    del own.a, dotted.last
    try:
        del own.a
    except KeyError as error:
        return own, own.b * dotted.count, own.missing, repr(error)


# Copies of what lies in slots, and members of an IntEnum as numbers

class SlottedPoint:
    __slots__ = ("x", "__hidden", "empty")

    def __init__(self, x):
        self.x, self.__hidden = x, [1]

    def hidden(self):
        return self.__hidden


class SlottedAndMore(SlottedPoint):
    pass


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    n: int
    t: torch.Tensor = None


@program(args=lambda: (SlottedPoint(3),))
def copies_of_slots(x, outer):
    p, more = SlottedPoint(x), SlottedAndMore(2)
    more.extra = 5
    shallow, deep, copied, frozen = copy.copy(p), copy.deepcopy(p), copy.copy(more), copy.deepcopy(FrozenSlots(1, x))
    again = copy.copy(outer)
    again.x += 1
    return (shallow.x is p.x, shallow.hidden() is p.hidden(), deep.hidden() is p.hidden(), deep.x + 1, hasattr(shallow, "empty"),
            copied, vars(copied), frozen, again, outer.x)


class Axis(enum.IntEnum):
    ROWS = 0
    COLUMNS = 1
    SIZE = 5


@program
def members_of_an_int_enum_are_numbers(x):
    return (x.sum(Axis.COLUMNS), x.view(Axis.COLUMNS, -1), torch.ones(2, Axis.SIZE), x[Axis.ROWS], x[Axis.COLUMNS:], x[:, -Axis.COLUMNS],
            torch.softmax(x, dim=Axis.COLUMNS), torch.stack([x, x], Axis.COLUMNS) * Axis.SIZE, range(Axis.SIZE), [1] * Axis.SIZE)


# Classes derived from list

class Doubling(list):
    def total(self):
        return sum(self)

    def append(self, value):
        super().append(value * 2)


class Odd(list):
    def __init__(self, item, n):
        super().__init__([item] * n)
        self.n = n

    def __getitem__(self, i):
        return "got", super().__getitem__(i)

    def __len__(self):
        return 77

    def __contains__(self, item):
        return True


class Nine(list):
    def __iter__(self):
        return iter([9])

    def __eq__(self, other):
        return "equal"

    __hash__ = None


@program
def lists_of_a_class_of_the_program(x):
    m, odd, nine = Doubling([1, 2]), Odd(x, 2), Nine([1, 2])
    m.append(3)
    m.name, m[0] = "q", 7
    m.extend([4])
    m.insert(0, 5)
    del m[1]
    try:
        Doubling(5)
    except TypeError as error:
        words = str(error)
    a, *b = m
    match m:
        case [first, *_]:
            pass
    seen = [m[1:], m[-1], m == [5, 2, 6, 4], [5] == m, m != [1], 2 in m, m.index(2), m.count(1), m.pop(), sorted(m), bool(Doubling()),
            tuple(m), [*m], max(m), list(reversed(m)), isinstance(m, list), first, a, b, words]
    return (m, m.total() * x, len(m), seen, odd[0], len(odd), list(odd), vars(odd), 5 in odd, list(nine), nine == 3, 1 in nine, nine[0],
            torch.stack(Doubling([x, x])), odd)


@program(breaks=True)
def a_loop_over_a_list_that_grows_behind_a_break(x):
    m, r = Doubling([1, 2]), 0
    for i in m:
        print(i)
        if len(m) < 5:
            m.append(i)
        r += i
    return m, r * x


@program(breaks=True, args=lambda: (Odd(1, 2), Doubling([3])))
def lists_of_the_program_from_outside(x, odd, m):
    m.append(len(m))
    return x * m[-1], odd[0], m, list(odd)


@program
def a_class_of_the_trace_with_a_property_that_is_set(x):
    class Box:
        def __init__(self, v):
            self.v = v

        @property
        def v(self):
            return self._v

        @v.setter
        def v(self, new):
            self._v = new * 2

        @v.deleter
        def v(self):
            self._v = 0

    b = Box(x)
    b.v = b.v + 1
    first = b.v
    del b.v
    return first, b.v


class One:
    """Equals a number."""

    def __init__(self, number=1):
        self.number = number

    def __eq__(self, other):
        return self.number == (other.number if isinstance(other, One) else other)

    def __hash__(self):
        return hash(self.number)


@program(args=lambda: (One(), One(2)))
def keys_that_equal_numbers(x, one, two):
    d, s = {1: x, (1, "a"): 5}, {1, 3}
    d[one] = x + 1
    s.add(one)
    found = one in d, d.get(One(), 0), (one, "a") in d, two in d, {one: 1}[1], 1 in {one}, {two: 1, 2: 3}, {True: 4}[one], {1.0: 5}[one]
    removed = {1: 6}.pop(one), {1, 2} & {two}, {one} | {1}, {1, 2} - {one, two}, {1, 2} == {one, two}
    return d[one], list(d), s, found, removed, collections.Counter([1, one, 2]), {one: 0} == {1: 0}, frozenset([one]) in {frozenset([1])}


@program(args=lambda: (One(), One(2)))
def objects_that_equal_numbers(x, one, two):
    items = [2, 1]
    items.remove(one)
    match two:
        case 1: named = "one"
        case 2: named = "two"
    differ = one != 1, 1 != one, 1 != two, [1] != [one], sorted([1, 2, 3], key=lambda v: v != two)
    return x + 1, items, named, differ, one in (2, 1), [1, 2].index(two), [one, 1].count(1), (two,).index(2)


class NotHashed:
    def __eq__(self, other):
        return True


@functools.lru_cache
def cached_class(value):
    return type(value).__name__


@program
def a_cached_function_of_what_has_no_hash(x):
    try:
        return x + 1, cached_class(NotHashed())
    except TypeError as error:
        return x - 1, str(error)


@program
def a_named_tuple_of_the_trace(x):
    Pair = collections.namedtuple("Pair", ["a", "b"], defaults=[5])
    p, (first, second) = Pair(x), Pair(1, b=2)
    try:
        Pair(1, 2, 3)
    except TypeError as error:
        said = str(error)
    changed = p._replace(b=7)
    return p.a * p.b, changed.b, first, second, Pair._fields, Pair(1) == (1, 5), Pair(1)._asdict(), repr(Pair(1)), Pair.__name__, said


@program
def enums_made_inside(x):
    class Mode(enum.Enum):
        OFF, ON, ALSO = 1, "two", 1

        def text(self):
            return self.name + str(self.value)

        @classmethod
        def first(cls):
            return cls.OFF

    class Level(enum.IntEnum):
        LOW = enum.auto()
        HIGH = enum.auto()

    class Bits(enum.Flag):
        A = 1
        B = 2

    table = {Mode.OFF: 2, Mode.ON: 3}
    try:
        Mode(5)
    except ValueError as error:
        words = str(error)
    match Mode("two"):
        case Mode.ON:
            x = x * Level.HIGH
    return (x + table[Mode["ON"]] * len(Mode), [m.name for m in Mode], Mode.ALSO is Mode.OFF, Mode.ON.text(), Mode.first().value, words,
            Mode.ON in table, hasattr(Mode.ON, "missing"), (Bits.A | Bits.B).value, bool(Bits.A & Bits.B), Level.HIGH > Level.LOW)


@program
def named_tuples_made_inside(x):
    weight = x * 3

    class Pair(typing.NamedTuple):
        a: torch.Tensor
        b: int = 2

        def total(self):
            return self.a * self.b + weight

        @classmethod
        def seven(cls, a):
            return cls(a, 7)

    class Options(typing.TypedDict):
        scale: int

    first, _ = pair = Pair(x)._replace(b=5)
    return pair.total() + Pair.seven(x).b + first * Options(scale=2)["scale"], Pair._fields, Pair._field_defaults, isinstance(pair, tuple)


@program
def dataclasses_with_fields_made_inside(x):
    start = x * 3

    @dataclasses.dataclass(order=True)
    class Config:
        a: object = dataclasses.field(compare=False)
        b: list = dataclasses.field(default_factory=lambda: [start], repr=False)
        c: int = dataclasses.field(default=4, repr=False)
        d: int = dataclasses.field(init=False)

        def __post_init__(self):
            self.d = self.c * 2

    made = dataclasses.make_dataclass("Made", ["a", ("b", int, 3), ("c", list, dataclasses.field(default_factory=list))])(1)
    made.c.append(2)
    one, other = Config(x), Config(x, b=[1], c=5)
    return one.a + one.b[0] * one.d + other.d, Config(1, [2]) < Config(0, [3]), repr(Config(1)), dataclasses.asdict(made)


@program(breaks=True)
def a_member_leaves(x):
    class Mode(enum.Enum):
        ON = 1
    return x * 2, Mode.ON.name, type(Mode.ON).__name__, [Mode.ON][0].value, str(Mode.ON)


@program(breaks=True)
def a_named_tuple_of_the_trace_that_leaves(x):
    pair = collections.namedtuple("Pair", "a b")(x + 1, 2)
    return x + 1, pair


@program
def a_class_of_the_trace_with_slots(x):
    class Point:
        __slots__ = ("a", "b")

        def __init__(self, a):
            self.a = a

    class Listed(Point):
        __slots__ = ["c"]

    class Named(Listed):
        __slots__ = "name"

    class Open(Point):
        pass

    p, said = Named(x), []
    p.name, o = "n", Open(1)
    o.anything = 4
    for wrong in (lambda: p.b, lambda: setattr(p, "d", 1), lambda: p.c, lambda: delattr(p, "b")):
        try:
            wrong()
        except AttributeError as error:
            said.append(str(error))
    p.b = 3
    return p.a * p.b, p.name, said, hasattr(p, "__dict__"), o.anything, dict(vars(o)), Named.__slots__


@program
def a_class_of_the_trace_with_total_ordering(x):
    @functools.total_ordering
    class Version:
        def __init__(self, n):
            self.n = n

        def __eq__(self, other):
            return self.n == other.n if isinstance(other, Version) else NotImplemented

        def __lt__(self, other):
            return self.n < other.n if isinstance(other, Version) else NotImplemented

    a, b = Version(1), Version(2)
    try:
        a <= 3
    except TypeError as error:
        said = str(error)
    return x + 1, a < b, a <= b, a > b, a >= b, a >= a, max(a, b).n, said


@program
def lists_of_a_class_of_the_program_are_added(x):
    m = Doubling([1, 2])
    both = m + [3], [0] + m, m + m, m * 2, 2 * m
    before = m
    m += [9]
    return x + len(both[0]), [type(v).__name__ for v in both], [list(v) for v in both], m is before, list(m)


@program
def simple_namespaces_are_compared(x):
    a, b = types.SimpleNamespace(u=1, v=[x]), types.SimpleNamespace(v=[x], u=1)
    return x + 1, a == b, a != b, a == types.SimpleNamespace(u=1), a == 3, a in [b], [b, a].index(a)


@program
def a_module_that_is_not_there(x):
    try:
        import not_a_module_anywhere as found
    except ImportError as error:
        found = error.name, error.msg, error.path, str(error), type(error).__name__
    try:
        from not_a_package_anywhere.part import name
    except ModuleNotFoundError as error:
        name = error.name, str(error)
    return x + 1, found, name


@program
def super_and_what_it_refuses(x):
    def said(function):
        try:
            return function()
        except (TypeError, RuntimeError) as error:
            return str(error)

    class Plain(Doubling):
        def deleted(self):
            del self
            return super()

        def star(*args):
            return super()

        def nested(self):
            return lambda: super()

        def inside(self):
            return (lambda: self.other)() if self is None else super()

    plain = Plain()
    found = plain.inside()
    return x + 1, [said(f) for f in (
        plain.deleted, plain.star, plain.nested(), lambda: super(1, int), lambda: super([], int), lambda: super(lambda: 0, plain),
        lambda: super(x, plain), lambda: super(), lambda: super(object=plain))], \
        found.__self__ is plain, found.__thisclass__ is Plain, found.__self_class__ is Plain, found.__class__ is super


class OwnSlotPartial(functools.partial):
    __slots__ = "func"


class OwnCallPartial(functools.partial):
    def __call__(self, x):
        return super().__call__(x) + 100


class HidingPartial(functools.partial):
    args = property(lambda self: (self.func, 5))

    def more(self, x):
        return self(x) * 2


@program(args=lambda: [cls(torch.add, alpha=3, other=2) for cls in (OwnSlotPartial, OwnCallPartial, HidingPartial)])
def partials_of_derived_classes(x, slot, own, hiding):
    slot_is_empty = not hasattr(slot, "func")
    return slot(x), own(x), hiding(x), hiding.more(x), slot_is_empty, type(own).__name__, hiding.args[1], own.keywords, list(map(own, [x]))


@program(breaks=True, args=lambda: [cls(torch.add, alpha=3) for cls in (OwnSlotPartial, OwnCallPartial)])
def partials_of_partials_of_derived_classes(x, slot, own):
    a, b = functools.partial(slot, other=x), functools.partial(own, x)
    return a(x), a.func is torch.add, b.func is own, type(a).__name__, type(OwnCallPartial(torch.add, other=x)).__name__


class TenTimes(staticmethod):
    def __get__(self, instance, owner=None):
        return lambda x: self.__func__(x) * 10


class OnItself(classmethod):
    def __get__(self, instance, owner=None):
        return lambda x: (self.__func__(owner, x), instance is None)


class OfClassToo(property):
    def __get__(self, instance, owner=None):
        return 12 if instance is None else self.fget(instance)


class HasDerivedMethods:
    ten = TenTimes(lambda x: x + 1)
    own = OnItself(lambda cls, x: (cls.__name__, x))
    both = OfClassToo(lambda self: 3)
    static = abc.abstractstaticmethod(lambda x: x * 3)
    of_class = abc.abstractclassmethod(lambda cls, x: (cls.__name__, x))


@program
def methods_of_derived_classes_of_methods(x):
    cls, made = HasDerivedMethods, HasDerivedMethods()
    return [(at.ten(x), at.own(x), at.both, at.static(x), at.of_class(x)) for at in (cls, made)]


class Backend:
    name = None


class Slow(Backend):
    name = "slow"


class Quick(Slow):
    name = "quick"


@program
def subclasses_are_found(x):
    found, rest = [], Backend.__subclasses__()
    while rest:
        cls = rest.pop()
        rest += cls.__subclasses__()
        found.append(cls.name)
    return x + len(found), found, next(cls() for cls in Slow.__subclasses__()).name


@program(breaks=True)
def a_subclass_made_on_the_way(x):
    class Another(Quick):
        pass
    return x + len(Quick.__subclasses__()[-1:]), Quick.__subclasses__()[-1] is Another


# Operators whose builtin base answers them in C, beside methods of the program

def says(name):
    return lambda self, other: (name, type(other).__name__)


class Asked:
    __radd__ = __ror__ = says("asked")

    def __iter__(self):
        return iter([1, 2])


def derived(base, *names):
    return type(base.__name__.title(), (base,), {name: says(name) for name in names})


AddingList, RightList, TimesList = derived(list, "__add__"), derived(list, "__radd__"), derived(list, "__rmul__")
OrDict, OrOrdered, OrSet, RightSet, RightFrozen = (derived(base, name) for base, name in (
    (dict, "__or__"), (collections.OrderedDict, "__or__"), (set, "__or__"), (set, "__ror__"), (frozenset, "__ror__")))
OPERANDS = [
    ("+", lambda: (AddingList([1]), 3)), ("+", lambda: (AddingList([1]), [2])), ("+", lambda: ([1], RightList([2]))),
    ("+", lambda: (RightList([1]), RightList([2]))), ("*", lambda: (TimesList([1]), 2)), ("+", lambda: ([1], Asked())),
    ("+", lambda: (derived(list)([1]), Asked())), ("|", lambda: (OrDict({1: 2}), {3: 4})), ("|", lambda: (OrOrdered({1: 2}), 3)),
    ("|", lambda: (OrSet({1}), {2})), ("|", lambda: ({1}, RightSet({2}))), ("|", lambda: ({1}, RightFrozen({2}))),
    ("|", lambda: (derived(dict)({1: 2}), Asked())), ("+", lambda: (derived(bytearray, "__add__")(b"a"), 3)),
    ("+", lambda: (derived(collections.deque, "__add__")([1]), [2])), ("*", lambda: ([1], numpy.int64(2))),
    ("|", lambda: ({1: 2}, collections.OrderedDict({3: 4}))), ("|", lambda: ({1: 2}, collections.defaultdict(int, {3: 4})))]


def operated(symbol, inplace):
    def of_operands(x, a, b):
        kept, answer = a, None
        try:
            if symbol == "+":
                if inplace:
                    a += b
                else:
                    a = a + b
            elif symbol == "*":
                if inplace:
                    a *= b
                else:
                    a = a * b
            elif inplace:
                a |= b
            else:
                a = a | b
        except TypeError as error:
            answer = str(error)
        return x + 1, a, type(a).__name__, a is kept, kept, answer
    return of_operands


for _symbol, _operands in OPERANDS:
    for _inplace in (False, True):
        program(operated(_symbol, _inplace), breaks=True, args=_operands)


ASKED = []


class CountedKey:
    def __init__(self, n):
        self.n = n

    def __hash__(self):
        ASKED.append("hash")
        return self.n

    def __eq__(self, other):
        ASKED.append("eq")
        return self.n == other.n


@program(breaks=True)
def a_key_is_hashed_as_often_as_in_python(x):
    ASKED.clear()
    key, table = CountedKey(1), {}
    table[key] = 2
    found = [table[key], table.get(CountedKey(1)), key in table, table.setdefault(key, 3), table.pop(key)]
    return x + 1, found, {key: 1}[key], list(ASKED)
