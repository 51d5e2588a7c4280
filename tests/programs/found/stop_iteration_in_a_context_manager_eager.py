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
        self.v = torch.tensor([1.0, 2.0, 3.0]) * 2
        self.items = [n, 1]
        self.d = {'a': n}

    @property
    def prop(self):
        return (1 if functools.reduce(torch.add, [torch.ones(2, 3)]).requires_grad else (pow(([1, 2][1 % 3]) % 5, 2)))

    @prop.setter
    def prop(self, value):
        self.n = value + 2

    @staticmethod
    def static(t):
        v1 = 3
        while v1:
            v1 -= 1
            t += (pow(7 % 5, 2))
            if Base(1).n > (len({v2 % 3 for v2 in [1, 2][1:]})):
                continue
        else:
            try:
                v3 = ({v5: 1 for v5 in 'abc'})[str([-1, *[1, 2]])[:20]]
            except KeyError as v4:
                v3 = len(str(v4))
        return G_FUNCS['k'](t)

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
        return k

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
        return (((t.shape[0] + torch.ones(2, 3, dtype=torch.int64)).float()) + (3.0 + 7))

    def __repr__(self):
        return f'{type(self).__name__}({self.n})'

    def scale(self, t, k=2):
        return (G_FUNCS['neg']((next(v6 for v6 in list(map(torch.neg, [torch.ones(2, 3)]))))))

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
        if (t.topk(3, dim=1)[0].shape[0] > (0 // (3 % 5 + 1))):
            v7 = ({v8: -1 for v8 in 'abc'})
            v7['a'] += 3
        else:
            v9 = ({v10: v11 + -1 for v10, v11 in ({v12: v13 + 5 for v12, v13 in {'k': torch.ones(2, 3)}.items()}).items()})
        return F.relu(F.dropout(t, 0.5, False)).relu()


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
        return (next(v14 for v14 in ([t.unsqueeze(0).squeeze(0), *(list(t.split(1)) and [t])][:3])))


class Pair(NamedTuple):
    a: int
    b: int = 2


class Color(enum.Enum):
    RED = 1
    BLUE = 2

    def weight(self):
        return self.value * 1

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
        with contextlib.nullcontext((functools.reduce(lambda v16, v17: v16 * 2 + v17, [1, 7, -1], (7 ^ 3)) % 1000)) as v15, Recorder(2):
            v18 = (len({v19 % 3 for v19 in (([1, 2] * 2)[:5])}))
            t[0] = len('ab')
            v20 = G_FUNCS['neg']
        return t

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


g_count = 3
g_tensor = torch.zeros(2, 3)
G_LIST = [1, 2]
G_DICT = {'a': 1, 'k': 0}
G_T = torch.tensor([1.0, 0.0, 2.0])
G_FUNCS = {'neg': torch.neg, 'a': lambda t: t + 1}
G_MODEL = Model()


def entry(a0, a1, a2, a3, a4):
    global g_count, g_tensor
    v21 = (lambda v22, *, v23=-1: v22 * v23 % 50)
    with managed(5) as v24:
        try:
            try:
                for v28 in (([v29 + v24 for v29 in [torch.ones(2, 3)]])[::-1]):
                    v30 = (v31 := v24) + v31
                v32 = (Slots((int('n' or '0', 36) % 50)))
                raise StopIteration
            except KeyError as v25:
                raise Problem('inner', (divmod((G_LIST[0] if G_LIST else 0), 4)[1])) from v25
        except (Problem, ValueError) as v26:
            v27 = repr(v26.args)[:30] + str(type(v26.__cause__))
        v33 = (torch.cat([v28, a0], dim=-1)[..., 1:4].shape[0] + a0.argsort(1))
        (v34, v35), v36 = divmod(v24, 3), v28
    a0.copy_(torch.full(G_FUNCS['a'](a0).shape, len(list(itertools.chain([1, 2], [1, 2])))).float())
    return (v24, a3, a1, a0)

def drive(compile_, call):
    global g_count, G_T, cached, helper_i
    fn = compile_(entry)
    h_a1 = {1, 2}
    x0 = torch.arange(3.0 * 2).reshape(2, 3) % 4
    call(fn, x0, h_a1, False, Color.RED, Pair(1, 1))
    x0 = torch.arange(3.0 * 2).reshape(3, 2).t()
    call(fn, x0, h_a1, False, Color.RED, Pair(1, 3))
    G_MODEL.register_forward_hook(lambda m, a, out: out + 1)
    x0 = torch.ones(1, 3)
    call(fn, x0, h_a1, True, Color.RED, Pair(1, 1))
