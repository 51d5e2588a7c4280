"""Small programs, compiled with backend "eager" against uncompiled: results, types, side effects, number of graphs.

Each program is a function of fresh inputs. It runs twice on two inputs. `graphs=1` means `fullgraph=True`."""
import collections
import collections.abc
import contextlib
import copy
import dataclasses
import enum
import functools
import itertools
import math
import operator
import types
import typing
from typing import Generic, NamedTuple, TypeVar

import numpy
import pytest
import torch
import torch.nn.functional as F
from recorders import Recorder
from torch.utils._pytree import tree_map_only

import minicompile

PROGRAMS = []
T = TypeVar("T")


def program(function=None, *, graphs=1, make=lambda: (torch.randn(2, 3),)):
    if function is None:
        return functools.partial(program, graphs=graphs, make=make)
    PROGRAMS.append((function, graphs, make))
    return function


def same(a, b, path="result"):
    assert type(a) is type(b), (path, type(a), type(b))
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, msg=path, equal_nan=True)
        assert a.requires_grad == b.requires_grad, path
    elif isinstance(a, (list, tuple, collections.deque)):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b)):
            same(x, y, f"{path}[{i}]")
    elif isinstance(a, dict):
        assert list(a) == list(b), (path, list(a), list(b))
        for k in a:
            same(a[k], b[k], f"{path}[{k!r}]")
    elif isinstance(a, (types.FunctionType, types.MethodType, functools.partial)):
        same(a(torch.ones(2)), b(torch.ones(2)), path + "()")
    elif isinstance(a, torch.autocast):
        pass                                     # entering it for real leaves notes in it
    elif hasattr(a, "__dict__") and not isinstance(a, (type, enum.Enum)):
        same(vars(a), vars(b), path + ".__dict__")
    elif isinstance(a, float) and a != a:
        assert b != b
    else:
        assert a == b, (path, a, b)

pytestmark = pytest.mark.usefixtures("fresh")


# ---- Python -------------------------------------------------------------------------------------------------------

@program
def arithmetic(x):
    return (x + 1) * 2 - x / 3 + (-x) ** 2 + 2 ** x + (5 - x) + x @ x.T.mT.T if False else (x + 1) * 2 - x / 3 + 2 ** x


@program
def loops_and_ranges(x):
    total = 0
    for i in range(1, 6, 2):
        if i == 3:
            continue
        total = total + x * i
    while i > 0:
        i -= 2
        total += i
    else:
        total = total * 2
    return total


@program
def keyword_and_star(x):
    def f(a, b=2, *rest, c, d=4, **more):
        return a * b + sum(rest) + c + d + sum(more.values())
    return f(x, c=1), f(x, 3, 4, 5, c=1, e=7), f(*[x, 1], **{"c": 2, "z": 3})


@program
def closures(x):
    n = 0
    fs = []
    for i in range(3):
        def f(y, i=i):
            nonlocal n
            n += 1
            return y + i
        fs.append(f)
    r = [f(x) for f in fs]
    return r, n, (lambda z: z * n)(x)


@program
def comprehensions(x):
    k = 3
    a = [i * k for i in range(4) if i % 2]
    b = {i: x + i for i in a}
    c = {i % 2 for i in range(5)}
    d = list(v.sum() for v in b.values())
    e = [[i * j for j in range(i)] for i in range(3)]
    return a, b, c, d, e


@program
def unpacking(x):
    a, (b, *c), *d = 1, (2, 3, 4), 5, 6
    h, w = x.shape
    first, *rest = x
    (p, q), r = (x, x + 1), x * 2
    return a, b, c, d, h, w, first, rest, p + q + r


@program
def f_strings(x):
    name, n = "layer", 3
    return {f"{name}_{n:03d}": x, f"{name!r:>10}": x * 2, f"{x.shape[0]}x{x.dtype}": 1, "%s-%d" % (name, n): 2,
            "{}:{a}".format(n, a=1): name.upper().split("A")}


@program
def walrus_and_chains(x):
    if (n := x.shape[0]) > 1 and 0 < n < 10 and not n == 5:
        y = x * n
    else:
        y = x
    z = None or n or 7
    return y, z, n if n else None, n is not None, 2 in (1, 2), 3 not in [1]


@program
def generators(x):
    def gen(n):
        for i in range(n):
            got = yield x * i
            if got is not None:
                yield got
        return 5

    def outer():
        r = yield from gen(3)
        yield r
    g = gen(2)
    a = next(g)
    b = g.send(x + 10)
    return list(outer()), a, b, sum(v for v in gen(3)), next(iter([]), 4), any(i > 2 for i in range(9))


@program
def exceptions(x):
    log = []
    try:
        try:
            log.append(1)
            raise ValueError("bad", 3)
        except (KeyError, ValueError) as e:
            log.append(e.args)
            raise RuntimeError("again") from e
        finally:
            log.append("finally")
    except RuntimeError as e:
        log.append(str(e))
    else:
        log.append("never")
    try:
        {}["missing"]
    except KeyError:
        log.append("key")
    try:
        [][0]
    except IndexError:
        log.append("index")
    try:
        x.not_there
    except AttributeError:
        log.append("attribute")
    return x + len(log), log


@program
def finally_return(x):
    def f():
        for i in range(3):
            try:
                if i == 1:
                    return x + i
            finally:
                seen.append(i)
    seen = []
    return f(), seen


@program
def builtin_functions(x):
    l = [3, 1, 2]
    return (sorted(l), sorted(l, key=lambda v: -v), list(reversed(l)), max(l), min(1, 2, key=lambda v: -v), sum(l, 10),
            list(zip(l, "abc")), list(enumerate(l, 1)), list(map(lambda a, b: a + b, l, l)), list(filter(None, [0, 1])),
            abs(-3), round(2.567, 1), divmod(7, 2), pow(2, 5), all([]), isinstance(x, torch.Tensor), isinstance(3, (int, str)),
            callable(len), type(x) is torch.Tensor, hasattr(x, "foo"), getattr(x, "foo", 9), int("3"), float("1.5"), str(4),
            bool(l), list(range(3))[::-1], tuple("ab"), ord("a"), chr(98), len(x), max(1.5, 2), slice(1, 3).stop,
            issubclass(bool, int), x.sum().dim())


@program
def std_library(x):
    d = collections.OrderedDict(a=1, b=2)
    d.move_to_end("a")
    dd = collections.defaultdict(list)
    dd["k"].append(x)
    q = collections.deque([1, 2, 3], maxlen=3)
    q.append(4)
    q.appendleft(9)
    return (d, dd, q, math.sqrt(4.0), math.pi * 2, math.ceil(2.1), operator.mul(2, 3), functools.reduce(operator.add, [1, 2, 3]),
            list(itertools.chain([1], (2,))), list(itertools.product([1, 2], "ab")), list(itertools.islice(itertools.count(5), 2)),
            list(itertools.accumulate([1, 2, 3])), list(itertools.combinations([1, 2, 3], 2)), functools.partial(torch.mul, x)(2),
            list(itertools.zip_longest([1], [2, 3])), operator.itemgetter if False else 0, copy.copy([x]))


@program
def list_methods(x):
    l = [1, 2]
    l.append(x + 1)
    l.extend([3, 4])
    l.insert(0, "a")
    p = l.pop()
    l.remove(2)
    l[0] = "b"
    l[1:2] = [7, 8]
    del l[1]
    l += (9,)
    m = l * 2 + [0]
    m.reverse()
    return l, p, len(m), [3, 1, 2].index(1), [1, 1].count(1), l is l, [1, 2] == [1, 2], [1, 2] < [1, 3]


@program
def dict_methods(x):
    d = {"a": x + 1, "b": 2}
    d["c"] = 3
    d.update(e=5, **{"f": 6})
    d.setdefault("g", []).append(1)
    a = d.pop("b")
    del d["c"]
    keys = [k for k in d]
    items = [(k, v) for k, v in d.items() if k != "a"]
    return (d, a, keys, items, d.get("zz"), d.get("zz", 4), "e" in d, list(d.values())[1:], {**d, "n": 1}, d | {"o": 2},
            dict(zip("xy", (1, 2))), {k: v for k, v in [("q", 1)]}, len(d), dict.fromkeys([1, 2], 0), d.keys() - {"a", "e", "f"})


@program
def set_methods(x):
    s = {1, 2}
    s.add(3)
    s.discard(1)
    x = x + 1
    return x, s | {9}, s & {2}, 3 in s, s - {3}, frozenset([1, 2]), s == {2, 3}, s.issubset({2, 3, 4}), len(s)


# ---- classes ------------------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Box:
    value: torch.Tensor
    scale: float = 2.0
    tags: list = dataclasses.field(default_factory=list)

    def scaled(self):
        return self.value * self.scale

    @property
    def double(self):
        return self.value * 2

    @double.setter
    def double(self, v):
        self.value = v / 2

    @classmethod
    def make(cls, v):
        return cls(v, tags=["made"])

    @staticmethod
    def help(a):
        return a + 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: int
    b: torch.Tensor = None


class Point(NamedTuple):
    x: torch.Tensor
    y: int = 3

    def total(self):
        return self.x + self.y


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


class Base:
    factor = 3

    def __init__(self, n):
        self.n = n

    def run(self, x):
        return x * self.factor + self.n

    def __call__(self, x):
        return self.run(x)

    def __add__(self, other):
        return type(self)(self.n + (other.n if isinstance(other, Base) else other))

    __radd__ = __add__

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        if i >= self.n:
            raise IndexError
        return i * 10

    def __eq__(self, other):
        return self.n == other.n

    def __contains__(self, v):
        return v == self.n

    def __enter__(self):
        self.n += 1
        return self

    def __exit__(self, kind, value, tb):
        self.n += 100
        return kind is not None and issubclass(kind, ValueError)


class Derived(Base):
    factor = 4

    def __init__(self, n):
        super().__init__(n)
        self.extra = [n]

    def run(self, x):
        return super().run(x) + len(self.extra)

    def __getattr__(self, name):
        if name == "magic":
            return 42
        raise AttributeError(name)


@program
def dataclass_objects(x):
    b = Box(x)
    c = Box.make(x + 1)
    c.double = x
    c.tags.append(b)
    return b, b.scaled(), c.double, Box.help(x), c, Frozen(1, x), Frozen(2) == Frozen(2), dataclasses.replace(b, scale=3.0)


@program
def named_tuples(x):
    p = Point(x)
    a, b = p
    return p, p.total(), a + b, Point(y=1, x=x)._replace(y=5), p[1], p.x, len(p), isinstance(p, tuple)


@program
def enums(x):
    c = Color.RED
    return x * c.value if c is Color.RED else x, c, Color("b"), c == Color.BLUE, c.name, [m for m in Color], {Color.RED: 1}[c]


@program
def user_classes(x):
    d = Derived(2)
    e = d + 3
    f = 1 + d
    return (d(x), e, f.n, len(d), list(d), d.magic, hasattr(d, "nope"), d == Derived(2), d != Derived(3), 2 in d, bool(d),
            isinstance(d, Base), type(d).__name__, getattr(d, "run")(x), Derived.run(d, x), d.__class__ is Derived)


@program
def user_context_managers(x):
    b = Base(1)
    with b as c:
        x = x + c.n
    with Base(1) as d:
        raise ValueError
    with contextlib.suppress(KeyError):
        raise KeyError
    return x, b, d.n


@contextlib.contextmanager
def scaled(box, by):
    box.append(by)
    try:
        yield by * 2
    finally:
        box.pop()


@program
def generator_context_manager(x):
    box = []
    with scaled(box, 3) as s:
        y = x * s + len(box)
    return y, box


# ---- side effects -------------------------------------------------------------------------------------------------

class Holder:
    def __init__(self):
        self.calls, self.items, self.table, self.last = 0, [], {"n": 0}, None
        self.a, self.b = 1, 2


COUNTER, TABLE = 0, {}


@program(make=lambda: (Holder(), torch.randn(3)))
def attribute_effects(h, x):
    h.calls += 1
    h.last = x * 2
    h.a, h.b = h.b, h.a
    h.new = [h.last, h.last]
    h.items.append(h.last)
    h.items.append(h.items[0])
    h.table["n"] += 1
    h.table[h.calls] = x
    del h.b
    return h.calls, h.last + 1


@program(make=lambda: ([1, torch.ones(2)], {"a": 1, "b": [2]}, {1, 2}, collections.deque([1])))
def container_effects(l, d, s, q):
    l.append(l[1] + 1)
    l[0] += 5
    d["c"] = l[-1]
    del d["a"]
    d["b"].append(d["c"])
    s.add(7)
    q.appendleft(l[1])
    return l, d["b"]


@program(make=lambda: ([3, 1, 2], torch.ones(2)))
def list_reordered(l, x):
    l.sort()
    l.reverse()
    l.insert(1, x + 1)
    return x * l[0]


@program
def global_effects(x):
    global COUNTER
    COUNTER = COUNTER + 1
    TABLE["x"] = x + COUNTER
    r = x + COUNTER
    COUNTER -= 1
    return r


@program(make=lambda: (torch.randn(3), torch.randn(3)))
def tensor_mutation(x, y):
    x.add_(1)
    y[1:] = x[:2]
    z = y
    z *= 2
    x[0] += 5
    return z, x.view(3, 1), z is y


def make_counter():
    n = 0
    def count(x):
        nonlocal n
        n += 1
        return x * n
    return count


@program(make=lambda: (make_counter(), torch.ones(2)))
def cell_effects(count, x):
    return count(x) + count(x)


@program(make=lambda: ([[]], torch.ones(2)))
def returns_closures(box, x):
    n = 2
    def f(y):
        return y * n + x.sum()
    box[0].append(n)
    return f, functools.partial(torch.add, x.sum()), [f, f]


@program(make=lambda: (torch.ones(2),))
def aliased_outputs(x):
    y = x + 1
    l = [y]
    return l, l, y, x, {"l": l}


# ---- torch --------------------------------------------------------------------------------------------------------

@program(make=lambda: (torch.randn(2, 3, requires_grad=True),))
def grad_modes(x):
    with torch.no_grad():
        y = x * 2
        a = torch.is_grad_enabled()
        with torch.enable_grad():
            z = x * 3
    with torch.set_grad_enabled(False):
        w = x + 1
    return y, z, w, a, x.requires_grad, y.requires_grad, x.detach(), x.grad is None, x.grad_fn is None


@torch.no_grad()
def frozen(x):
    return x * 2


@program(make=lambda: (torch.randn(2, 3, requires_grad=True),))
def decorated(x):
    return frozen(x), x * 2


@program(make=lambda: (torch.randn(4, 4), contextlib.nullcontext(), torch.autocast("cpu", dtype=torch.bfloat16)))
def autocast(x, null, ctx):
    with torch.autocast("cpu", torch.bfloat16):
        a = x @ x
        b = torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", enabled=False):
            c = x @ x
    with null:
        d = x @ x
    with ctx:
        e = x @ x
    return a, b, c, d, e


@program
def tensor_metadata(x):
    return (x.shape, x.size(), x.size(-1), x.dim(), x.ndim, x.dtype, x.device, x.numel(), x.stride(), x.is_contiguous(),
            x.element_size(), x.is_cuda, x.layout, x.is_floating_point(), x.shape[0] * 2, x.shape[:-1], x.T.shape, x.mT,
            x.device.type == "cpu", x.dtype.is_floating_point, torch.finfo(x.dtype).min, x.size(dim=0), x.shape.numel(),
            x.new_zeros(2), torch.Size([1, 2]), x.is_leaf, x.requires_grad)


@program
def indexing(x):
    i = torch.tensor([1, 0])
    return x[0], x[:, 1:], x[..., None], x[i], x[:, [0, 2]], x[-1, -1], x[i, i], x[None], x[1:, ::2], x[(0, 1)]


@program
def factories(x):
    return (torch.zeros(2, 3), torch.ones_like(x), torch.arange(5), torch.full((2,), 3.0), torch.tensor([1.0, 2.0]),
            torch.tensor(3), torch.eye(2), torch.cat([x, x]), torch.stack([x, x], dim=1), torch.where(x > 0, x, 0.0),
            torch.linspace(0, 1, 3), torch.empty(0), torch.tensor([[1, 2]], dtype=torch.float64) + 1,
            torch.tensor([2, torch.tensor(0.5, dtype=torch.float16)]))


@program
def multiple_results(x):
    v, i = torch.max(x, dim=1)
    r = x.max(dim=0)
    a, b = x.split([1, 2], dim=1)
    c = x.chunk(3, dim=1)
    m = torch.topk(x, 2)
    return v, i, r.values, r.indices, a, b, c, m.values, x.unbind(0), torch.var_mean(x), x.sort()


@program
def functional(x):
    return (F.relu(x), F.softmax(x, dim=-1), F.layer_norm(x, (3,)), F.gelu(x, approximate="tanh"), F.dropout(x, 0.5, False),
            F.pad(x, (1, 1)), F.linear(x, torch.ones(4, 3)), torch.sigmoid(x), x.softmax(-1), F.mse_loss(x, x + 1),
            torch.einsum("ij,kj->ik", x, x), F.max_pool2d(x[None, None], 2), F.interpolate(x[None, None], scale_factor=2.0),
            F.one_hot(torch.tensor([0, 1]), 3), torch.nn.functional.normalize(x), x.clamp(min=0).to(torch.float64),
            F.relu(x.clone(), inplace=True))


@program
def type_conversions(x):
    return x.float(), x.to(torch.int64), x.half(), x.to("cpu"), x.type_as(x.double()), x.long(), x.to(x.device, torch.bool)


@program(make=lambda: (torch.tensor([1, 2]), torch.tensor(3)))
def integers(x, y):
    return x + y, x // y, x % 2, x & 1, ~x, x << 1, y.item if False else x.float().mean(), x == y, x != 2, -x, abs(-x)


@program
def warns_and_asserts(x):
    assert x.shape[0] == 2, "shape"
    torch._assert(x.dim() == 2, "dim")
    assert isinstance(x, torch.Tensor)
    return x + 1


@program
def random_numbers(x):
    return torch.rand(2), torch.randn_like(x), F.dropout(x, 0.5), torch.randperm(4), torch.bernoulli(torch.full((3,), 0.5))


# ---- graph breaks -------------------------------------------------------------------------------------------------

@program(graphs=2)
def breaks_on_item(x):
    y = x * 2
    n = y.sum().item()
    return y + n


@program(graphs=2)
def breaks_on_branch(x):
    y = x * 2
    if y.sum() > 0:
        z = y + 1
    else:
        z = y - 1
    return z


@program
def dictionaries_from_keys(x):
    d = collections.defaultdict.fromkeys("ab", x + 1)
    d["c"] = x
    o = collections.OrderedDict.fromkeys("ba")
    o.move_to_end("b")
    try:
        d["d"]
    except KeyError as error:
        return d, o, dict.fromkeys([1], [x]), str(error)


class Scaled(NamedTuple, Generic[T]):
    value: T
    factor: int = 2

    def product(self):
        return self.value * self.factor


class Tripled(Scaled[int]):
    pass


@program
def generic_named_tuples(x):
    s = Scaled(x, 3)
    return s, s.product(), s._replace(factor=4), Tripled(x, factor=3).product(), [*Tripled(x)]


def test_a_shape_is_a_key():
    def f(x, d):
        d.setdefault(x.shape, x * 2)
        return d[x.shape] + 1, d.get((3,)), torch.Size([4]) in d, [type(k) for k in d], {x.shape: 1, **d}
    compiled = minicompile.compile(f, fullgraph=True, backend="eager")
    for keys in ([], [torch.Size([3])], [(3,)], [torch.Size([4])], [torch.Size([])]):
        for _ in range(2):
            d, e = ({k: torch.ones(3) for k in keys} for _ in range(2))
            same(compiled(torch.ones(3), d), f(torch.ones(3), e))
            same(d, e)


@pytest.mark.parametrize("key_of", [lambda x: x.shape, lambda x: (x.shape[0], 3), lambda x: x.shape[0]], ids=["shape", "tuple", "number"])
def test_a_cache_that_is_filled_compiles_a_version_for_what_it_lacks_and_one_for_what_it_has(key_of):
    cache = {}

    def f(x):
        if key_of(x) not in cache:
            cache[key_of(x)] = x * 2
        return x + cache[key_of(x)]
    backend = Recorder()
    compiled = minicompile.compile(f, dynamic=False, backend=backend)
    for n in (2, 3, 2, 3, 4, 2, 3, 4):
        same(compiled(torch.ones(n)), torch.full((n,), 3.0))
    assert len(backend.graphs) == 6


@program
def annotations_with_arguments(x):
    def twice(f: collections.abc.Callable[[T], T], *v: typing.Union[int, T], **n: typing.Dict[str, list[T]]) -> typing.Callable[..., T]:
        return f(f(*v))
    try:
        typing.Optional[1, 2]
    except TypeError as error:
        return twice(lambda v: v + 1, x), list(map(str, twice.__annotations__.values())), str(error)


@program
def a_tree_is_mapped_where_it_holds_tensors(x):
    return tree_map_only(torch.Tensor, lambda t: t + 1, {"a": [x, 2], "b": (x,)}), tree_map_only((int, float), lambda n: -n, [x, 2, 3.0])


@program
def methods_of_functions(x):
    def add(a, *, b=2):
        return a + b
    part = functools.partial(add, b=3)
    names = "__call__", "__get__", "__eq__", "__reduce__", "__subclasshook__", "__name__", "__wrapped__", "func", "nothing"
    return [hasattr(f, n) for f in (add, part) for n in names], add.__call__(x), part.__call__(x, b=4), part.__doc__ is None


@program
def class_attributes_of_containers(x):
    return x + 1, [].__hash__ is None, {}.__hash__ is None, [].__doc__ == list.__doc__, {x.ndim}.__new__ is set.__new__


def test_a_partial_stays_without_a_dict():
    """Python flattens only a partial that has none."""
    def f(x, p):
        return x + 1, p(3), getattr(p, "k", None), functools.partial(p, 2).args

    def make(kind):
        p = functools.partial(lambda *args: args, 1)
        if kind:
            p.k = kind
        if kind == 2:
            del p.k                                        # an empty dict
        return p
    compiled = minicompile.compile(f, backend="eager", fullgraph=True)
    for kind in (0, 1, 0, 2, 3, 0, *[0] * 9):
        p = make(kind)
        assert f(torch.ones(2), make(kind))[1:] == compiled(torch.ones(2), p)[1:]
        assert functools.partial(p, 2).args == ((2,) if kind else (1, 2))


LIMITS, RANGE = numpy.finfo(numpy.float32), numpy.iinfo(numpy.int16)


@program
def limits_of_numpy(x):
    info = numpy.finfo(numpy.float16)
    return x * info.max, float(info.eps), info.bits, LIMITS.max, numpy.iinfo("int8").max, RANGE.min, x + numpy.finfo("float64").tiny


@pytest.mark.filterwarnings("ignore:To copy construct")
class Settable:
    def __get__(self, obj, owner=None):
        return 7

    def __set__(self, obj, value):
        raise AttributeError("read only")


class Kind(type):
    size, width = property(lambda cls: 40), Settable()


class OfKind(metaclass=Kind):
    @staticmethod
    def size():
        return 3

    @property
    def width(self):
        return 5


@program
def what_a_metaclass_defines_comes_before_its_class(x):
    return x * OfKind.size + OfKind.width, OfKind().size(), OfKind().width


@program
def a_tensor_of_a_tensor(x):
    y = torch.tensor(x, dtype=torch.float64)
    y.add_(1)
    return y, torch.tensor(data=x.T), torch.tensor(data=[1, 2]), torch.tensor(x[:, :1].expand(2, 3)).stride()


@program
def settings_of_autocast(x):
    return x.to(torch.get_autocast_dtype("cpu")), x.to(torch.get_autocast_gpu_dtype()), x.to(torch.get_autocast_cpu_dtype())


@program(graphs=2)
def breaks_with_stack(x):
    return [x + 1, (x * 2).tolist(), {"k": x - 1}]


@pytest.mark.parametrize("function, graphs, make", PROGRAMS, ids=[p[0].__name__ for p in PROGRAMS])
def test_program(function, graphs, make):
    backend = Recorder()
    compiled = minicompile.compile(function, backend=backend, fullgraph=graphs == 1)
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        args = make()
        torch.manual_seed(seed)
        other = make()
        torch.manual_seed(5)
        TABLE.clear()
        expected = function(*args)
        table = dict(TABLE)
        torch.manual_seed(5)
        TABLE.clear()
        result = compiled(*other)
        same(result, expected)
        same(other, args, "arguments")
        same(dict(TABLE), table, "globals")
        if seed == 0:
            assert len(backend.graphs) <= graphs
    assert len(backend.graphs) >= 1 or graphs == 0


def test_a_function_with_a_call_of_its_own():
    def given(own):
        def q(x):
            return x * 2
        if own:
            q.__call__ = lambda x: x * 100
        return q

    fast = minicompile.compile(lambda x, q: q.__call__(x), backend="eager")
    assert [fast(torch.ones(()), given(own)).item() for own in (False, True, False, True)] == [2, 100, 2, 100]


def test_a_warning_of_pytorch_is_not_given_while_compiling():
    def copied(x):
        return torch.tensor(x, requires_grad=True) * 2
    with pytest.warns(UserWarning, match="copy construct") as said:
        minicompile.compile(copied, backend="aot_eager")(torch.ones(2))
    assert {w.filename for w in said if "copy construct" in str(w.message)} == {__file__}
