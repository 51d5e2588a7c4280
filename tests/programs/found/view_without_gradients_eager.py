import collections, contextlib, copy, dataclasses, enum, functools, itertools, math, operator
from collections import OrderedDict, defaultdict, deque, Counter
from dataclasses import dataclass, field
from typing import NamedTuple
import torch
import torch.nn as nn
import torch.nn.functional as F


class Problem(Exception):
    def __init__(self, text, code=0):
        super().__init__(text)
        self.code = code

class Base:
    factor = 0
    created = 0
    registry = []

    def __init__(self, n, name='base'):
        self.n = n
        self.name = name
        self.f = n / 2
        self.v = torch.tensor([1.0, 2.0, 3.0]) * 0
        self.items = [n, 1]
        self.d = {'a': n}

    @property
    def prop(self):
        return 7

    @prop.setter
    def prop(self, value):
        self.n = value + 2

    @staticmethod
    def static(t):
        return (t ** 2 % 31)

    @classmethod
    def make(cls, n):
        cls.created += 1
        return cls(n + cls.factor)

    @staticmethod
    def twice(t):
        return t * 2

    @functools.cached_property
    def lazy(self):
        return self.n * 3

    def __getattr__(self, name):
        if name == 'missing_attr':
            return 11
        raise AttributeError(name)

    def __len__(self):
        return len(self.items)

    def __bool__(self):
        return self.n > 0

    def __eq__(self, other):
        return isinstance(other, Base) and self.n == other.n

    def __hash__(self):
        return hash(self.n)

    def __lt__(self, other):
        return self.n < other.n

    def __contains__(self, item):
        return item in self.items

    def __getitem__(self, k):
        return min(math.gcd(hash(k), 12), Color.RED.weight())

    def __setitem__(self, k, value):
        self.d[str(k)] = value

    def __delitem__(self, k):
        del self.d[str(k)]

    def __iter__(self):
        for item in self.items:
            yield item + 1

    def __int__(self):
        return self.n

    def __add__(self, k):
        new = copy.copy(self)
        new.n = self.n + k
        return new

    def __iadd__(self, k):
        self.n += k
        return self

    def __matmul__(self, t):
        return t + self.v

    def __rmul__(self, t):
        return t * self.n

    def __call__(self, t):
        return (t % 7)

    def __repr__(self):
        return f'{type(self).__name__}({self.n})'

    def scale(self, t, k=2):
        return (t.cumsum(1).clamp(-8, 8) + 0.0)

    def add(self, k):
        return self.n + k

    def bump(self):
        self.n += 1
        return self.n

    def log(self, k):
        self.registry.append(k)
        del self.registry[3:]

    def make_adder(self, k):
        return lambda t: t + self.n + k


class Child(Base):
    def __init__(self, n, name='child'):
        super().__init__(n, name)
        self.kind = 'c'

    @property
    def prop(self):
        return super().prop + 1

    @prop.setter
    def prop(self, value):
        Base.prop.fset(self, value)

    def scale(self, t, k=2):
        t = super().scale(t, k)
        return t

    def bump(self):
        return super().bump() + self.factor

    def __setattr__(self, name, value):
        object.__setattr__(self, name, value)

    def __str__(self):
        return 'child' + str(self.n)


class Slots:
    __slots__ = ('n', 't')

    def __init__(self, n):
        self.n = n

    def apply(self, t):
        self.t = t
        return (([v1 + 7 for v1 in (list(t.split(1)) and [t])])[-1] if ([v2 + 5 for v2 in list({'k': torch.ones(2, 3)}.values())]) else t)


@dataclass
class Point:
    n: int = 1
    f: float = 0.5
    tags: list = field(default_factory=list)
    t: object = None

    def __post_init__(self):
        if self.t is None:
            self.t = torch.ones(3) * self.n

    def scaled(self, t):
        v3 = (v4 := 5) + v4
        v5, v6 = [t.detach().dim() if 0 else len(frozenset([1, 2])) for _ in '12']
        return F.linear(t, torch.eye(3), torch.ones(3)).detach().sort(dim=1).values


class Pair(NamedTuple):
    a: int
    b: int = 2


class Color(enum.Enum):
    RED = 1
    BLUE = 2

    def weight(self):
        return self.value * 0

    def other(self):
        return Color.BLUE if self is Color.RED else Color.RED


class Recorder:
    def __init__(self, k):
        self.k = k

    def __enter__(self):
        G_LIST.append(self.k)
        return self.k

    def __exit__(self, kind, value, trace):
        G_LIST.append(0 if kind is None else 1)
        del G_LIST[6:]
        return False


class Suppress:
    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        return kind is not None and issubclass(kind, Exception)


@contextlib.contextmanager
def managed(k):
    G_DICT['m'] = k
    try:
        yield k + 1
    finally:
        G_DICT['m'] = -1


class Model(nn.Module):
    def __init__(self, n=3):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3) * 2)
        self.bias = nn.Parameter(torch.ones(3))
        self.register_buffer('scale', torch.ones(3))
        self.count = 0
        self.n = n
        self.parts = nn.ModuleList([nn.ReLU(), nn.Identity()])
        self.seq = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
        with torch.no_grad():
            self.seq[0].weight.copy_(torch.eye(3))
            self.seq[0].bias.fill_(1)

    def helper(self, t):
        return (t.expand(-1, 3).masked_fill((self.weight.sum(0) + t) > 2, (sum(Counter([1, 2]).values()) ^ 3)))

    def forward(self, t):
        pass
        t = t @ self.weight + self.bias
        for part in self.parts:
            t = part(t)
        return t * self.scale if self.training else self.seq(t)


def compose(f, g):
    return lambda t: f(g(t))

@functools.lru_cache(maxsize=None)
def cached(n):
    return n * 2 + 1

def countdown(n):
    while n > 0:
        yield n
        n -= 1

def echo():
    got = 0
    while True:
        got = (yield got) or 0

def zip_sum(a, b):
    for u, v in zip(a, b):
        yield u + v

def delegating(items):
    got = yield from items
    yield 5

def raiser(n):
    raise Problem('raiser', n)

def recurse(t, n):
    if n <= 0:
        return t
    return recurse(t + n, n - 1) * 1

def helper_star(t, *args, w=1, **rest):
    return t * w + sum(args) + len(rest), len(args)

def with_options(t, flag=True, **options):
    if flag:
        t = t + options.get('w', 1)
    return with_inner(t, **options)

def with_inner(t, w=3, q=4):
    return t * w - q


g_count = 1
g_tensor = torch.zeros(2, 3)
G_LIST = [1, 4]
G_DICT = {'a': 1, 'k': 3}
G_T = torch.tensor([1.0, 0.0, 2.0])
G_FUNCS = {'neg': torch.neg, 'a': lambda t: t + 1}
G_MODEL = Model()


def helper0(p0, p1):
    global g_count, g_tensor
    g_count += 1
    return (p0.chunk(2, 1)[0][:, :1] + p0)

def helper1(p0, p1):
    global g_count, g_tensor
    v7 = torch.utils._pytree.tree_map(lambda v8: v8 + 1, {'t': F.linear(p0, torch.eye(3), p0.mean(0))})['t']
    return v7

def entry(a0):
    global g_count, g_tensor
    v9 = a0
    with torch.no_grad():
        with Recorder(5) as v10:
            v11, *v12 = (a0, v10)[0]
            if a0.reshape(3, -1).t().requires_grad:
                v13 = sum(1 for _ in ((v14 * 2 for v14 in list(itertools.chain.from_iterable([[1, 2], [1, 2]]))[:5])))
            elif (sum(v15 * v16 for v15, v16 in zip(list(map(operator.add, [1, 2], [1, 2])), ([1, 2] + [v10])))) > v13:
                a0 -= Base.twice(F.linear(a0, torch.eye(3), v11))
                v9.copy_(((Base(1) @ a0) // 2))
                (v17, v18), v19 = ((int(-2.5),) + (v10,)), (G_MODEL.helper((torch.where(a0 > v9, v9, v10))))
            else:
                for v20 in (torch.neg, Base(v13).make_adder([1, 2].count(v13))):
                    a0 = v20(a0)
        if (Color.RED.other() is Color.RED):
            v21 = dict(Counter(str(v22) for v22 in [Base(1).missing_attr, *[1, 2][::-1]]).most_common(2)) | {'a': 1}
            v23 = ([1, 2].count(v10) ^ 3)
            def v24(v25):
                nonlocal v23
                v23 += 1
                return (v25.new_zeros(v25.shape) + (torch.arange(3) + G_T))
            a0 = v24(a0)
            a0 = v24(v9)
    for v26 in range(Color.RED.other().value % 4):
        pass
    return (a0, a0, v26, v26, a0)

def drive(compile_, call):
    global g_count, G_T, cached, helper_i
    fn = compile_(entry)
    x0 = torch.arange(3.0 * 2).reshape(2, 3).requires_grad_()
    call(fn, x0)
    x0 = torch.arange(3.0 * 1).reshape(3, 1).t()
    call(fn, x0)
    x0 = torch.arange(3.0 * 1).flip(0).reshape(1, 3)
    call(fn, x0)
