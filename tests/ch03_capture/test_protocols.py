"""Python's protocols on user classes: descriptors, iterators, metaclasses, dict subclasses, formatting, pattern matching."""
import abc
import collections
import contextlib
import dataclasses
import decimal
import functools
import itertools
import linecache
import operator
import sys
import types
import typing

import pytest
import torch
import torch.nn.functional as F
from recorders import Recorder
from test_programs import same

import minicompile

pytestmark = pytest.mark.usefixtures("fresh")


class ModelOutput(collections.OrderedDict):
    """A dataclass that is a dictionary of its fields that are not None, as model libraries return them."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                self[field.name] = value

    def __getitem__(self, key):
        return dict(self.items())[key] if isinstance(key, str) else self.to_tuple()[key]

    def __setattr__(self, name, value):
        if name in self.keys() and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def to_tuple(self):
        return tuple(self[k] for k in self.keys())


@dataclasses.dataclass
class Output(ModelOutput):
    loss: typing.Optional[torch.Tensor] = None
    logits: torch.Tensor = None
    hidden: typing.Optional[tuple] = None


def makes_model_output(x):
    o = Output(loss=x.sum(), logits=x + 1)
    o.hidden = (x,)
    return o, o[0], o["logits"], o.to_tuple(), len(o), "loss" in o, o.logits * 2, list(o.keys())


def takes_model_output(x):
    o = Output(loss=x.mean(), logits=x * 2) if not isinstance(x, Output) else x
    o["hidden"] = o.logits + 1
    return o.loss + o["logits"], [k for k in o], len(o), o.get("zz", 1), {**o}


class Abstract(abc.ABC):
    @abc.abstractmethod
    def f(self, x): ...

    @functools.cached_property
    def cached(self):
        return 7


class Concrete(Abstract):
    def __init__(self):
        self.a = 3

    def f(self, x):
        return x * self.a + self.cached


def abstract_classes(x):
    return Concrete().f(x), isinstance(Concrete(), Abstract), Concrete().cached


def doubled(fn):
    @functools.wraps(fn)
    def inner(*args, **kwargs):
        return fn(*args, **kwargs) * 2
    return inner


@doubled
def decorated(x, k=1):
    return x + k


@functools.lru_cache(None)
def memoized(n):
    return n * 2


def decorators(x):
    @functools.wraps(F.relu)
    def g(*args, **kwargs):
        return F.relu(*args, **kwargs) + 1
    return decorated(x), decorated(x, k=3), decorated.__name__, g(x), x * memoized(3)


def getters(x):
    return (operator.itemgetter(0)([x + 1]), operator.itemgetter(1, 0)((1, x)), operator.attrgetter("shape")(x),
            sorted({"b": 1, "a": 2}.items(), key=operator.itemgetter(1)), sorted([(2, "b"), (1, "c")]))


class Upto:
    def __init__(self, n):
        self.n, self.i = n, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.i >= self.n:
            raise StopIteration
        self.i += 1
        return self.i


def iterators(x):
    it, z = iter([1, 2, 3]), zip([1, 2], [3, 4])
    return ([x * i for i in Upto(3)], sum(Upto(4)), list(zip(Upto(2), Upto(3))), 2 in Upto(3), next(it), list(it), next(z),
            list(z), dict(enumerate("ab")), list(itertools.starmap(pow, [(2, 3)])))


class Tenfold:
    def __get__(self, obj, cls=None):
        return 5 if obj is None else obj.z + 1

    def __set__(self, obj, value):
        obj.z = value * 10


class Described:
    d = Tenfold()

    def __init__(self):
        self.d = 2


def descriptors(x):
    h = Described()
    return x * h.d, Described.d, h.z


class Number:
    def __init__(self, v):
        self.v = v

    def __iadd__(self, other):
        self.v = self.v + other
        return self

    def __lt__(self, other):
        return self.v < other.v

    def __neg__(self):
        return Number(-self.v)

    def __matmul__(self, other):
        return self.v * other

    def __getitem__(self, key):
        return key, self.v

    def __setitem__(self, key, value):
        self.v = value

    def __bool__(self):
        return self.v > 0

    def __format__(self, spec):
        return "Number" + spec

    def __str__(self):
        return "text"

    def __repr__(self):
        return "repr"


def operators_of_classes(x):
    n = Number(2)
    n += 3
    n[1] = 4
    return (n.v, Number(1) < Number(2), (-n).v, n @ 3, n[1:2, ...], bool(n), f"{n} {n!r} {n!s} {n:>3}", x + 1, str(n),
            [v.v for v in sorted([Number(3), Number(1)])])


def namespaces(x):
    n = types.SimpleNamespace(a=x + 1, b=2)
    n.c = 3
    return n.a + n.b, n


def recursion(x):
    def factorial(n):
        return 1 if n < 2 else n * factorial(n - 1)
    return x * factorial(5)


def loop_else(x):
    for i in range(3):
        if i == 1:
            break
    else:
        x = x + 100
    while True:
        x = x + 1
        if x.shape[0] == 2:
            break
    return x, i


def matching(x):
    match [1, (2, 3), {"k": x}]:
        case [a, (b, c), {"k": v}]:
            r = v * a * b * c
    match x.dim():
        case 1:
            return r
        case 2 if x.shape[0] == 2:
            return r * 2


PROGRAMS = [makes_model_output, takes_model_output, abstract_classes, decorators, getters, iterators, descriptors,
            operators_of_classes, namespaces, recursion, loop_else, matching]


@pytest.mark.parametrize("function", PROGRAMS, ids=[p.__name__ for p in PROGRAMS])
def test_protocol(function):
    backend = Recorder()
    compiled = minicompile.compile(function, backend=backend, fullgraph=True)
    for _ in range(2):
        x = torch.randn(2, 3)
        same(compiled(x), function(x))
    assert len(backend.graphs) == 1


def test_model_output_as_argument():
    compiled = minicompile.compile(takes_model_output, backend="eager", fullgraph=True)
    for _ in range(2):
        x = torch.randn(2)
        a, b = (Output(loss=x.mean(), logits=x * 2) for _ in range(2))
        same(compiled(a), takes_model_output(b))
        same(a, b)


def test_unknown_context_manager_runs_eagerly():
    def f(x):
        with torch.device("cpu"):
            return torch.zeros(2) + x
    with contextlib.nullcontext():
        same(minicompile.compile(f, backend="eager")(torch.ones(2)), f(torch.ones(2)))


class Odd:
    """Its special methods give other types than Python asks for."""

    def __int__(self):
        return 0.5

    def __float__(self):
        return 1

    def __len__(self):
        return True

    def __bool__(self):
        return 1

    def __str__(self):
        return 1

    def __hash__(self):
        return True


def test_answers_of_another_type():
    def f(x, odd):
        answers = []
        for function in (int, float, len, bool, str, hash, lambda o: f"{o}", lambda o: not o):
            try:
                answers.append(function(odd))
            except TypeError as error:
                answers.append(str(error))
        return x + 1, answers
    plain, compiled = f(torch.ones(2), Odd()), minicompile.compile(f, backend="eager")(torch.ones(2), Odd())
    same(compiled, plain)
    assert list(map(type, compiled[1])) == list(map(type, plain[1]))


def test_a_gradient_written_to_an_input_that_is_a_view():
    """Whether eager goes on or refuses depends on what the input is a view of, and the graph cannot know."""
    weight = torch.ones(3, requires_grad=True)

    def f(x):
        try:
            x[0] += weight
            x += 1
        except RuntimeError as error:
            return str(error)[:40]
        return x * 2
    views = [lambda: torch.ones(2, 3), lambda: torch.ones(6).reshape(2, 3), lambda: torch.ones(1, 2, 3).unbind(0)[0],
             lambda: torch.no_grad()(lambda: torch.ones(1, 2, 3)[0])(), lambda: (torch.ones(6) * 1).view(2, 3)]
    for order in (views, views[::-1]):
        backend = Recorder()
        compiled = minicompile.compile(f, backend=backend)
        for make in order:
            same(compiled(make()), f(make()))
    with torch.no_grad():                               # no gradient: one graph for both
        backend = Recorder()
        compiled = minicompile.compile(f, backend=backend, fullgraph=True)
        for make in views:
            same(compiled(make()), f(make()))
    assert len(backend.graphs) == 1


class Hashed(Odd):
    def __init__(self, number):
        self.number = number

    def __hash__(self):
        return self.number


def test_a_hash_is_not_hashed_again():
    """Python folds a hash that is too large for its integers, and no other. The order of a set shows it, too."""
    numbers = (-1, 2**61, -2**62, 2**63 - 1, 2**70, hash((1, 2.0)), hash("a"))

    def f(x):
        objects = [Hashed(n) for n in numbers]
        return x + 1, [hash(o) for o in objects], hash(tuple(objects)), [o.number for o in set(objects)]
    same(minicompile.compile(f, backend="eager", fullgraph=True)(torch.ones(2)), f(torch.ones(2)))


class OfNoModule(type):
    @property
    def __module__(cls):
        return 4


@pytest.mark.parametrize("name", ["gone", None, 5, [], "torch"])
def test_names_of_modules_that_are_no_text(name):
    """`__module__` and `__name__` can be written and deleted. They say nothing about what a thing does."""
    asked, module = [], types.ModuleType("somewhere")
    globals_ = {"namedtuple": collections.namedtuple, "__name__": name, "__builtins__": __builtins__}

    class Plain:
        a = 2

        def f(self):
            return self.missing

    class Kind(dict):
        a = 3

    class Above(metaclass=OfNoModule):
        a = 4

    def function(n=1):
        return n + 1

    def missing(name):
        asked.append(name)
        raise AttributeError(name)

    module.a, module.__getattr__ = 5, missing
    if name == "gone":
        del module.__name__, function.__module__, globals_["__name__"]
        Plain.__module__ = Kind.__module__ = None
    else:
        module.__name__ = Plain.__module__ = Kind.__module__ = function.__module__ = name
    exec("def made(x):\n    pair = namedtuple('Pair', 'a b')\n"
         "    return pair(1, 2).b, type('D', (), {'z': 3})().z, pair.__module__", globals_)

    def f(x):
        y, said = x + 1, []
        for wrong in (lambda: Plain().f(), lambda: module.b, lambda: Kind()(), lambda: Above.q):
            try:
                wrong()
            except (AttributeError, TypeError) as error:
                said.append(str(error))
        module.c = x
        return y, Plain.a, Kind.a, Kind(u=1)["u"], len(Kind()), Above.a, Above().a, function(), module.a, \
            hasattr(module, "z"), said, globals_["made"](x)

    compiled = minicompile.compile(f, backend="eager")
    for _ in range(2):
        same(compiled(torch.ones(2)), f(torch.ones(2)))
        assert asked[:len(asked) // 2] == asked[len(asked) // 2:]


class Counted:
    count = 0

    def __get__(self, obj, cls):
        self.count += 1
        return f"{cls.__name__} {self.count}"


def test_a_doc_that_is_computed():
    class Documented:
        __doc__ = Counted()

    compiled = minicompile.compile(lambda x: (x + 1, Documented.__doc__), backend="eager", fullgraph=True)
    assert [compiled(torch.ones(2))[1] for _ in range(3)] == ["Documented 1", "Documented 2", "Documented 3"]


def test_keys_of_a_cache_that_the_trace_makes():
    """By the rules of CPython: one number alone is a key itself, numbers among others are equal, and no cache is none."""
    def f(x):
        called = []

        def note(*args):
            called.append(args)
            return len(called)

        class Owner:
            @functools.lru_cache
            def method(self, n):
                return note(n), n

        owner = Owner()
        cached = [functools.lru_cache(note), *(functools.lru_cache(n, t)(note) for n, t in ((9, True), (0, False), (-1, False)))]
        results = [[c(1), c(1.0), c(True), c(1), c(1, 2), c(1.0, 2), c("a"), c("a")] for c in cached]
        return x + 1, results, owner.method(3), owner.method(3), called

    same(minicompile.compile(f, backend="eager", fullgraph=True)(torch.ones(2)), f(torch.ones(2)))


def test_a_function_that_is_not_cached():
    called = []

    @functools.lru_cache(maxsize=0)
    def count(n):
        called.append(n)
        return len(called)

    compiled = minicompile.compile(lambda x: (x + 1, count(1), count(1)), backend="eager")
    assert [compiled(torch.ones(2))[1:] for _ in range(3)] == [(1, 2), (3, 4), (5, 6)]


def by_function(name, bases, namespace):
    return name, bases


def test_classes_that_python_refuses_to_make_or_change():
    def f(x):
        class Plain(list):
            pass

        def change(name, *value):
            (setattr if value else delattr)(Plain, name, *value)

        said = []
        for wrong in (lambda: change("__bases__", (dict,)), lambda: change("__bases__", ()), lambda: change("__qualname__"),
                      lambda: change("missing"), lambda: change("__name__", 3), lambda: change("__mro__", ())):
            try:
                wrong()
            except (TypeError, AttributeError) as error:
                said.append(str(error))
        return x + 1, said, Plain.__name__

    same(minicompile.compile(f, backend="eager", fullgraph=True)(torch.ones(2)), f(torch.ones(2)))

    def g(x, which):
        y = x + 1
        try:
            if which:
                return y, type("Derived", (which,), {})

            class Strange(metaclass=by_function):
                pass
            return y, Strange
        except TypeError as error:
            return y, str(error)

    for base in (None, 3, len, same):
        same(minicompile.compile(g, backend="eager")(torch.ones(2), base), g(torch.ones(2), base))


class Seen:
    """A descriptor that says who asked."""
    def __get__(self, obj, cls=None):
        ASKED.append("get")
        return len(ASKED), obj.__name__


class Missing:
    def __get__(self, obj, cls=None):
        ASKED.append("missing")
        raise AttributeError("gone")


class Speaking(type):
    seen, missing = Seen(), Missing()

    def __bool__(cls):
        ASKED.append("bool")
        return len(ASKED) % 2 == 0

    def __lt__(cls, other):
        ASKED.append("less")
        return cls.rank < other.rank

    def __repr__(cls):
        ASKED.append("repr")
        return f"{cls.__name__} {len(ASKED)}"


class First(metaclass=Speaking):
    rank = 2


class Second(metaclass=Speaking):
    rank = 1


ASKED: list = []


def test_what_a_metaclass_says_is_asked_in_each_call():
    def f(x):
        y, said = x + 1, []
        for ask in (lambda: First.seen, lambda: First.missing, lambda: getattr(First, "missing", 5), lambda: bool(First),
                    lambda: not Second, lambda: sorted([First, Second])[0] is Second, lambda: str(First), lambda: f"{Second!r}",
                    lambda: "%s" % First):
            try:
                said.append(ask())
            except AttributeError as error:
                said.append(str(error))
        return y, said

    compiled, results = minicompile.compile(f, backend="eager", fullgraph=True), []
    for function in (f, compiled):
        ASKED.clear()
        results.append([(function(torch.ones(2))[1], list(ASKED)) for _ in range(3)])
    assert results[0] == results[1]


def of_equal_classes(hashed, k):
    class ByName(type):
        def __eq__(self, other):
            return self.__name__ == other.__name__
        if hashed:
            def __hash__(self):
                return hash(self.__name__)

    class Sized(metaclass=ByName):
        def __len__(self):
            return k
    return Sized()


@pytest.mark.parametrize("hashed", [False, True])
def test_classes_that_are_equal_or_have_no_hash(hashed):
    def f(x, a, b):
        return x + len(a), len(b), type(a) is type(b), type(a)().__len__()

    compiled, one, two = minicompile.compile(f, backend="eager"), of_equal_classes(hashed, 1), of_equal_classes(hashed, 2)
    for a, b in ((one, two), (two, one), (one, one), (two, one)):
        (x, *got), (y, *expected) = compiled(torch.ones(2), a, b), f(torch.ones(2), a, b)
        assert torch.equal(x, y) and got == expected


def test_a_context_of_decimal_numbers():
    """Its class finds the flags in C, and arithmetic raises them."""
    def f(x, context):
        with decimal.localcontext(context) as inner:
            inner.traps[decimal.InvalidOperation] = False
            third, flags = decimal.Decimal(1) / 3, dict(inner.flags)
            inner.clear_flags()
            exact, unordered = decimal.Decimal(1) / 4, decimal.Decimal("NaN") < 1
            try:
                context.missing
            except AttributeError:
                x = x + 1
            return x, third, flags, exact, unordered, dict(inner.flags), hasattr(context, "traps"), hasattr(context, "missing")

    compiled = minicompile.compile(f, backend="eager")
    for precision in (5, 5, 7, 5):
        (x, *got), (y, *expected) = (function(torch.ones(2), decimal.Context(prec=precision)) for function in (compiled, f))
        assert torch.equal(x, y) and got == expected


@typing.runtime_checkable
class Numbered(typing.Protocol):
    number: int


class Raising(abc.ABC):
    @classmethod
    def __subclasshook__(cls, other):
        raise KeyError("hook")


@pytest.mark.parametrize("ask", [
    lambda: issubclass(Recorder, Numbered), lambda: isinstance(Recorder(), Numbered), lambda: issubclass(Recorder, Raising),
    lambda: isinstance(Recorder(), Raising)])
def test_questions_about_classes_that_raise(ask):
    def f(x):
        try:
            return x + 1, ask()
        except (TypeError, KeyError) as error:
            return x + 2, str(error)

    compiled = minicompile.compile(f, backend="eager")
    for _ in range(2):
        (x, got), (y, expected) = compiled(torch.ones(2)), f(torch.ones(2))
        assert torch.equal(x, y) and got == expected


def test_lines_of_files_among_which_are_ours():
    def f(x):
        linecache.clearcache()
        return x + 1, linecache.getline(__file__, 1), len(linecache.cache) > 0

    compiled = minicompile.compile(f, backend="eager")
    for _ in range(3):
        assert compiled(torch.ones(2))[1:] == f(torch.ones(2))[1:]


def test_the_rest_of_a_division_by_a_complex_number():
    def f(x, n):
        return x + n, n % 1j

    compiled = minicompile.compile(f, backend="eager", dynamic=True)
    for n in (3, 2.5):
        for function in (f, compiled):
            with pytest.raises(TypeError, match="can't mod complex|unsupported operand"):
                function(torch.ones(2), n)


def test_a_number_that_varies_is_a_decimal_number():
    def f(x, n):
        three = decimal.Decimal(3)
        return x + n, n == three, three != n, n < three, three >= n

    compiled = minicompile.compile(f, backend="eager", dynamic=True)
    for n in (3, 2, 4, 3, 2.5, 3.0):
        assert compiled(torch.ones(2), n)[1:] == f(torch.ones(2), n)[1:]


@pytest.mark.parametrize("largest", [2 ** 31 - 1, 2 ** 31 - 2, 2 ** 31 - 3])
def test_a_number_that_was_zero_becomes_the_largest(largest):
    def f(x, n):
        return x + 1, n + 1

    compiled = minicompile.compile(f, backend="eager")
    for n in (0, 1, largest, 5, largest):
        assert compiled(torch.ones(2), n)[1] == n + 1


def test_which_method_makes_a_number():
    """Python asks an int for no index, and for the first of several methods that a class has, also if that is written in C."""
    class Index(int):
        def __index__(self):
            return 3

    class Whole(float):
        def __index__(self):
            return 3

        def __trunc__(self):
            return 4

    class Plain:
        def __index__(self):
            return 3

    def converted(x, o):
        return x + float(o), float(o), int(o), complex(o)

    def counted(x, o):
        return x * [4, 5, 6, 7][o], "a" * o, operator.index(o), (1, 2, 3, 4)[o:], list(range(o)), o.__index__(), x[:o].shape, hex(o)

    for f, makes in ((converted, (lambda: Index(2), lambda: Whole(2.5), Plain)), (counted, (lambda: Index(2), Plain))):
        for make in makes:
            compiled = minicompile.compile(f, backend="eager")
            for n in (3, 4, 5):
                assert repr(compiled(torch.ones(n), make())) == repr(f(torch.ones(n), make()))


def test_who_makes_a_list_asks_how_long_it_will_be():
    log = []

    class Indexed:
        def __init__(self, error=None):
            self.error = error

        def __len__(self):
            log.append("len")
            if self.error:
                raise self.error
            return 3

        def __getitem__(self, i):
            log.append(i)
            return [1, 2, 3][i]

    class Hinted:
        def __init__(self, hint):
            self.hint = hint

        def __iter__(self):
            log.append("iter")
            return iter([1, 2])

        def __length_hint__(self):
            log.append("hint")
            if isinstance(self.hint, Exception):
                raise self.hint
            return self.hint

    class Counter:
        left = 3

        def __iter__(self):
            log.append("iter")
            return self

        def __next__(self):
            log.append("next")
            self.left -= 1
            if self.left < 0:
                raise StopIteration
            return self.left

        def __length_hint__(self):
            log.append("hint")
            return self.left

    def f(x, make):
        (a, *b), (*c, d), items = make(), make(), [0]
        items.extend(make())
        items += make()
        items[1:2] = make()
        found = [list(make()), tuple(make()), [*make()], {*make()}, set(make()), sorted(make()), (lambda *v: len(v))(*make()), sum(make()),
                 [v for v in make()], dict.fromkeys(make()), list(zip(make(), make())), collections.deque(make()),
                 "".join(map(str, make()))]
        try:
            a, b = Counter()
        except ValueError as error:
            found.append(str(error))
        return x + 1, a, b, c, d, items, found

    makers = [Indexed, Counter, lambda: Hinted(4), lambda: Hinted(NotImplemented),
              *(functools.partial(of, error) for of in (Indexed, Hinted) for error in (TypeError("none"), KeyError("none"))),
              lambda: Hinted(-1), lambda: Hinted("4")]
    compiled = minicompile.compile(f, backend="eager")
    for make in makers:
        seen = []
        for function in (f, compiled, compiled):
            log.clear()
            try:
                seen.append((function(torch.ones(2), make)[1:], log.copy()))
            except Exception as error:
                seen.append((type(error), str(error), log.copy()))
        assert seen[0] == seen[1] == seen[2], make


def test_a_question_to_a_set_takes_no_more_of_an_iterator_than_it_needs():
    def f(x, make):
        its = [make() for _ in range(4)]
        answers = {1}.isdisjoint(its[0]), {2}.issuperset(its[1]), {4}.isdisjoint(its[2]), frozenset((1, 2)).issuperset(its[3])
        return x + 1, answers, [list(it) for it in its]

    for make in (lambda: iter([1, 2, 3]), lambda: (v for v in (1, 2, 3)), lambda: map(abs, (1, 2, 3))):
        compiled = minicompile.compile(f, backend="eager", fullgraph=True)
        assert compiled(torch.ones(2), make)[1:] == f(torch.ones(2), make)[1:]


@pytest.mark.parametrize("take", [list, tuple, sorted, lambda it: [v for v in it], lambda it: [next(it), next(it), next(it, 0), *it]])
@pytest.mark.parametrize("last", [2, 3, 4, 5, 0])
def test_reversed_asks_for_items_and_for_its_length_as_python_does(take, last):
    log = []

    class Sequence:
        def __len__(self):
            log.append("len")
            return last

        def __getitem__(self, i):
            log.append(i)
            if i == 3 or i == 0 and last == 5:
                raise IndexError if last == 4 else StopIteration if last == 5 else KeyError(i)
            return i

    def f(x):
        it = reversed(Sequence())
        try:
            return take(it), x + 1
        except StopIteration as error:
            return type(error), list(it), x

    def outcome(function):
        log.clear()
        return function(torch.ones(2))[:-1], log.copy()

    assert outcome(minicompile.compile(f, backend="eager", fullgraph=True)) == outcome(f)


@pytest.mark.parametrize("ask", [len, bool, list, reversed])
def test_a_length_that_no_size_can_have(ask):
    class Long:
        __getitem__ = int

        def __len__(self):
            return sys.maxsize + 1

    def f(x):
        try:
            return ask(Long()), x + 1
        except OverflowError as error:
            return str(error), x + 2

    assert minicompile.compile(f, backend="eager", fullgraph=True)(torch.ones(2))[0] == f(torch.ones(2))[0]
