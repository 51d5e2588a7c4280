"""What a program makes anew for each call needs no version for each call: values of all kinds, made before a break, given as an
argument, or found in an object. And where identity is all there is to tell by, compiling ends some day."""

import abc
import array
import collections
import contextlib
import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import inspect
import io
import itertools
import logging
import operator
import pathlib
import queue
import random
import re
import string
import struct
import sys
import threading
import time
import types
import typing
import weakref

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import minicompile
from minicompile import frames, limits
from minicompile.ch02_guards import codegen
from minicompile.ch02_guards.cache import MISSED, Entry, EntryCache, add_entry, connect_all, drop_entries, note_hit, search
from minicompile.ch02_guards.guards import GuardSet
from minicompile.ch03_capture import tracer

# What the texts below name
MODULES = (abc, array, collections, contextlib, copy, datetime, decimal, enum, fractions, functools, inspect, io, itertools, logging, np,
           operator, pathlib, queue, random, re, string, struct, threading, time, weakref, F)


@dataclasses.dataclass
class P:
    a: float = 2.0

    def m(self, x):
        return x * self.a

    @property
    def p(self):
        return self.a


@dataclasses.dataclass(frozen=True)
class Q:
    a: float = 2.0

    def m(self, x):
        return x * self.a


class S:
    __slots__ = ("a",)

    def __init__(self):
        self.a = 3.0

    def m(self, x):
        return x + self.a

    def __call__(self, x):
        return x * self.a

    def __getitem__(self, i):
        return i * 2


class L(list):
    def m(self, x):
        return x * len(self)


class D(dict):
    pass


class NT(typing.NamedTuple):
    a: float
    b: int


class T(torch.Tensor):
    pass


def gen(n):
    for i in range(n):
        yield i * 2.0


# How a value is made of two tensors, and a use of it
VALUES = [line.split(" -> ") for line in """
x.add -> v(1)
x.masked_scatter -> v(x > 0, x)
x.__add__ -> v(1)
x.sum -> v()
torch.Tensor.add.__get__(x) -> v(2)
nn.Parameter(x).mul -> v(2)
x.as_subclass(T).add -> v(1)
x.add_ -> v(1)
x.view -> v(-1)
x.shape -> x * v[0]
x.size -> x * v(0)
x.shape.numel -> x * v()
x.dtype -> x.to(v)
x.stride() -> x * v[0]
x.device -> x.to(v)
x.grad_fn -> x if v is None else x*2
(x*y).grad_fn -> x if v is None else x*2
[1.0, 2.0] -> x * v[1]
[1.0].append -> v(2.0) or x
[3, 1] -> x * sorted(v)[0]
[1.0].__getitem__ -> x * v(0)
{'a': 2.0} -> x * v['a']
{'a': 2.0}.get -> x * v('a')
{'a': 2.0}.items() -> x * list(v)[0][1]
{'a': 2.0}.keys() -> x * len(v)
{'a': 2.0}.values() -> x * sum(v)
{1.0} -> x * len(v)
{1.0}.add -> v(2.0) or x
frozenset([1]) -> x * len(v)
(1.0, 2) -> x * v[0]
(1.0, 2).index -> x * v(2)
'ab'.upper -> x * len(v())
'a,b'.split -> x * len(v(','))
b'ab' -> x * len(v)
b'ab'.hex -> x * len(v())
bytearray(b'a') -> x * len(v)
slice(0, 1) -> x[v]
range(3) -> x * len(v)
iter([1.0, 2.0]) -> x * next(v)
iter((1.0, 2.0)) -> x * next(v)
iter({'a': 1.0}.items()) -> x * next(v)[1]
iter(range(3)) -> x * next(v)
reversed([1.0, 2.0]) -> x * next(v)
enumerate([1.0]) -> x * next(v)[1]
zip([1.0], [2.0]) -> x * next(v)[1]
map(abs, [1.0]) -> x * next(v)
filter(None, [1.0]) -> x * next(v)
itertools.count(1) -> x * next(v)
itertools.chain([1.0], [2.0]) -> x * next(v)
itertools.repeat(2.0, 3) -> x * next(v)
itertools.cycle([1.0]) -> x * next(v)
gen(3) -> x * next(v)
gen(3).send -> x + (v(None) or 0)
(i * 1.0 for i in range(3)) -> x * next(v)
itertools.islice([1.0, 2.0], 1) -> x * next(v)
itertools.product([1.0], [2.0]) -> x * next(v)[0]
lambda z: z * 2 -> v(x)
lambda z, k=2.0: z * k -> v(x)
(lambda c: lambda z: z * c)(3.0) -> v(x)
(lambda c: lambda z: z * c)(x) -> v(x)
functools.partial(torch.mul, 2.0) -> v(x)
functools.partial(lambda a, z: z * a, 2.0) -> v(x)
functools.partial(x.add, 1) -> v()
functools.partial(P().m, x) -> v()
functools.wraps(len)(lambda z: z * 2) -> v(x)
functools.cmp_to_key(lambda a, b: a - b) -> x * sorted([2, 1], key=v)[0]
P() -> v.m(x)
P().m -> v(x)
P() -> x * v.p
P() -> x * v.a
dataclasses.asdict(P()) -> x * v['a']
Q() -> v.m(x)
Q().m -> v(x)
S() -> v.m(x)
S().m -> v(x)
S() -> v(x)
S().__call__ -> v(x)
S() -> x * v[2]
L([1]) -> v.m(x)
L([1]).m -> v(x)
L([1]).append -> v(1) or x
D(a=2.0) -> x * v['a']
D(a=2.0).get -> x * v('a')
NT(2.0, 3) -> x * v.a
NT(2.0, 3)._replace -> x * v(a=3.0).a
NT(2.0, 3)._asdict() -> x * v['a']
types.SimpleNamespace(a=2.0) -> x * v.a
super(L, L([1])).__len__ -> x * v()
object() -> x if v else y
P -> v().m(x)
abc.ABC -> x if v else y
collections.OrderedDict(a=2.0) -> x * v['a']
collections.defaultdict(list) -> x * len(v['a'])
collections.deque([1.0]) -> x * v[0]
collections.deque([1.0]).popleft -> x * v()
collections.Counter('ab') -> x * v['a']
collections.ChainMap({'a': 1.0}) -> x * v['a']
types.MappingProxyType({'a': 2.0}) -> x * v['a']
nn.Linear(4, 4) -> v(x)
nn.Linear(4, 4).forward -> v(x)
nn.Linear(4, 4).weight -> x @ v
nn.ReLU() -> v(x)
nn.Sequential(nn.ReLU()) -> v(x)
nn.Sequential(nn.Linear(4, 4)) -> v(x)
nn.ModuleList([nn.ReLU()]) -> v[0](x)
nn.Linear(4, 4).parameters() -> x @ next(v)
list(nn.Linear(4, 4).parameters()) -> x @ v[0]
dict(nn.Linear(4, 4).named_parameters()) -> x @ v['weight']
nn.Linear(4, 4).state_dict() -> x @ v['weight']
nn.ParameterList([torch.ones(4)]) -> x * v[0]
nn.Module() -> x * v.training
nn.MultiheadAttention(4, 2) -> v(x, x, x)[0]
nn.LSTM(4, 4) -> v(x)[0]
nn.Dropout(0.0) -> v(x)
torch.no_grad() -> v.__enter__() or x
contextlib.nullcontext() -> v.__enter__() or x
contextlib.ExitStack() -> v.__enter__() and x
torch.Generator() -> x if v else y
torch.device('cpu') -> x.to(v)
torch.Size([4]) -> x + torch.ones(v)
torch.finfo(torch.float32) -> x * v.max
torch.iinfo(torch.int32) -> x * v.bits
torch.arange(3) -> x.sum() + v
torch.arange(3).tolist() -> x * v[1]
torch.tensor(2.0).item() -> x * v
torch.tensor(2.0).item -> x * v()
[t for t in x] -> v[0]
x.unbind(0) -> v[0]
torch.max(x, 0) -> v.values
x.topk(2) -> v[0]
torch.nn.utils.rnn.pack_padded_sequence(x[:, None], torch.tensor([3]), enforce_sorted=False) -> v.data
torch.distributions.Normal(x, 1.0) -> v.log_prob(x)
torch.distributions.Normal(x, 1.0).log_prob -> v(x)
torch.optim.SGD([nn.Parameter(x.clone())], lr=0.1) -> x * v.param_groups[0]['lr']
F.relu -> v(x)
torch.ops.aten.add -> v(x, 1)
torch.ops.aten.add.Tensor -> v(x, 1)
torch._C._nn.gelu -> v(x)
torch.float16 -> x.to(v)
torch.strided -> x if v else y
x.untyped_storage() -> x * (v.nbytes() > 0)
x.numpy() -> x * v.shape[0]
x.numpy().sum -> x * float(v())
np.float32(2) -> x * float(v)
np.array([2.0]) -> x * float(v[0])
np.array([2.0]) -> x + torch.from_numpy(v)
np.int64(2) -> x * int(v)
np.random.default_rng(0) -> x if v else y
np.random.default_rng(0).normal -> x * (v() > -100)
np.dtype('float32') -> x if v else y
random.Random(0) -> x * v.random()
random.Random(0).random -> x * v()
random.Random(0).randint -> x * v(1, 1)
re.compile('a') -> x * bool(v.match('a'))
io.StringIO('ab') -> x * len(v.read())
string.Template('a') -> x * len(v.template)
datetime.datetime(2020, 1, 1) -> x * v.year
datetime.timedelta(1) -> x * v.days
decimal.Decimal(2) -> x * float(v)
fractions.Fraction(1, 2) -> x * float(v)
pathlib.Path('a') -> x * len(str(v))
array.array('d', [1.0]) -> x * v[0]
logging.getLogger('q') -> x if v else y
threading.Lock() -> x if v else y
threading.Lock().acquire -> x if v() else y
threading.local() -> x if v else y
threading.current_thread() -> x if v else y
queue.Queue() -> x * v.empty()
weakref.ref(P) -> x if v() else y
weakref.ref(x) -> x if v() is x else y
weakref.WeakKeyDictionary() -> x * (len(v) + 1)
weakref.WeakSet() -> x * (len(v) + 1)
time.perf_counter -> x if v() else y
memoryview(b'ab') -> x * len(v)
struct.Struct('i') -> x * v.size
inspect.signature(gen) -> x * len(v.parameters)
ValueError('a') -> x * len(v.args)
complex(1, 2) -> x * v
2**70 -> x * (v > 3)
Ellipsis -> x[v]
NotImplemented -> x if v is NotImplemented else y
operator.itemgetter(0) -> v(x)
operator.attrgetter('shape') -> x * v(x)[0]
operator.methodcaller('add', 1) -> v(x)
copy.copy(P()) -> v.m(x)
copy.deepcopy(nn.Linear(4, 4)) -> v(x)
types.MethodType(lambda s, z: z * s, 2.0) -> v(x)
types.MethodType(lambda s, z: z * s, x) -> v(x)
typing.List[int] -> x if v else y
list[int] -> x if v else y
int | str -> x if v else y
type(x) -> x if v is torch.Tensor else y
(x * y).backward -> x if v else y
x.__class__ -> x if v else y
[].__iter__ -> x * len(list(v()))
x.__getitem__ -> v(0)
x.T.contiguous -> v()
nn.Linear(4,4).weight.detach().t -> x @ v()
float('inf') -> x * v
float('nan') -> x * v
-0.0 -> x * v
[[1.0, 2.0], [3.0]] -> x * v[0][1]
({'a': [x]},) -> v[0]['a'][0]
{P: 1.0} -> x * v[P]
{torch.float32: 1.0} -> x * v[torch.float32]
{(1, 2): 1.0} -> x * v[1, 2]
{Q(): 1.0} -> x * v[Q()]
Q() -> x * {v: 1.0}[Q()]
(Q(), Q()) -> x * len({v[0], v[1], Q(1.0)})
[P(), P()] -> x * v[1].a
{'m': P().m} -> v['m'](x)
[x.add] -> v[0](1)
(lambda: [x]) -> v()[0]
(lambda: P())() -> v.m(x)
""".strip().splitlines()]
# The versions of these are told apart by identity, or by value, and nothing else
IDENTICAL = [line.split(" -> ") for line in """
functools.lru_cache(lambda k: k * 2.0) -> x * v(2)
type('C', (), {'a': 2.0})() -> x * v.a
collections.namedtuple('N', 'a b')(1.0, 2) -> x * v.a
enum.Enum('E', 'a b').a -> x * v.value
io.StringIO('ab').read -> x * len(v())
{id(x): 1.0} -> x * len(v)
{x: 1.0} -> x * len(v)
""".strip().splitlines()]
WAYS = {"break": "def f(x, y):\n    v = {value}\n    apart()\n    return {use}", "argument": "def f(x, y, v):\n    return {use}",
        "attribute": "def f(x, y, o):\n    v = o.v\n    return {use}"}


@minicompile.disable
def apart():
    pass


def versions(monkeypatch, way, value, use, calls) -> list[int]:
    """How many versions each of so many calls made; the answers are eager's."""
    made, new_entry = [], frames.new_entry
    monkeypatch.setattr(frames, "new_entry", lambda *args: (made.__setitem__(-1, made[-1] + 1), new_entry(*args))[1])
    namespace = dict(globals())
    exec(WAYS[way].format(value=value, use=use) + f"\ndef make(x, y):\n    return {value}", namespace)
    compiled = minicompile.compile(namespace["f"], backend="eager")

    def arguments():
        x, y = torch.arange(12.0).view(3, 4), torch.ones(3, 4, requires_grad=True)
        random.seed(0), torch.manual_seed(0)
        v = {"break": lambda: (), "argument": lambda: (namespace["make"](x, y),),
             "attribute": lambda: (types.SimpleNamespace(v=namespace["make"](x, y)),)}[way]()
        torch.manual_seed(1)
        return x, y, *v
    for _ in range(calls):
        made.append(0)
        torch.testing.assert_close(compiled(*arguments()), namespace["f"](*arguments()), equal_nan=True)
    monkeypatch.undo()
    return made


@pytest.mark.parametrize("way", ["break", "argument", "attribute"])
def test_no_version_for_each_call(monkeypatch, way):
    made = {value: versions(monkeypatch, way, value, use, 5) for value, use in VALUES[::4 if way == "attribute" else 1]}
    assert {value: new for value, new in made.items() if any(new[3:])} == {}


def test_compiling_ends(monkeypatch):
    """Entries that die with what they were made for count, too."""
    made = {value: versions(monkeypatch, "argument", value, use, 44) for value, use in IDENTICAL}
    assert {value: new for value, new in made.items() if any(new[40:])} == {}


def test_a_method_of_one_name_and_another_class():
    def f(method, x):
        return x * method(2.0)
    compiled, x = minicompile.compile(f, backend="eager"), torch.ones(2)

    class Own(dict):
        def get(self, key):
            return 5.0
    ordered = collections.OrderedDict({2.0: 3.0, 4.0: 4.0})
    for method in (Own({2.0: 3.0}).get, dict.get.__get__(Own({2.0: 3.0})), {2.0: 7.0}.get, ordered.pop, dict.pop.__get__(ordered.copy())):
        calls = [method, copy.deepcopy(method)] if isinstance(method, types.MethodType) else [method]
        assert all(torch.equal(compiled(m, x), x * e) for m, e in zip(calls, [5.0, 5.0] if len(calls) == 2 else [
            {"Own": 3.0, "dict": 7.0, "OrderedDict": 3.0}[type(method.__self__).__name__]]))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_the_limit_counts_what_died(fullgraph):
    def f(x, double):
        return x * double(1.0)
    compiled = minicompile.compile(f, backend="eager", fullgraph=fullgraph)

    def run(times):
        for _ in range(times):
            assert torch.equal(compiled(torch.ones(2), functools.lru_cache(lambda k: k * 2)), torch.full((2,), 2.0))
    limit, gone = minicompile.config.recompile_limit, "the _lru_cache_wrapper that it was made for is gone"
    run(limit)
    if fullgraph:
        with pytest.raises(minicompile.RecompileError, match=gone):
            run(1)
    else:
        with pytest.warns(RuntimeWarning, match=f"compiled {limit} times.*{gone}"):
            run(1)
        run(10)


def fresh_object(kept=[]):
    class Fresh:
        def double(self, x):
            return x * 2
    kept.append(Fresh)
    return Fresh()


def test_classes_of_one_name_are_no_patterns():
    graphs, limit = [], minicompile.config.recompile_limit
    compiled = minicompile.compile(lambda made, x: made.double(x), backend=lambda gm, _: graphs.append(gm) or gm.forward)
    with pytest.warns(RuntimeWarning, match=f"compiled {limit} times"):
        for _ in range(3 * limit):
            assert torch.equal(compiled(fresh_object(), torch.ones(2)), torch.full((2,), 2.0))
    assert len(graphs) == limit + 1              # beyond it, `double` is a frame of its own


def model_of_a_class_of_its_own():
    class Scale(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.weight = nn.Parameter(torch.full((2,), float(n)))

        def forward(self, x):
            return x * self.weight
    return Scale


class Deep(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.depth = depth

    def forward(self, x):
        for _ in range(self.depth):
            x = x + 1
        return x


class Named(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.name = str(n)

    def forward(self, x):
        return x * int(self.name)


@pytest.mark.filterwarnings("ignore:minicompile. .*recompile_limit")
@pytest.mark.parametrize("make, most, kept", [
    (lambda n: model_of_a_class_of_its_own()(n), 2, False), (lambda n: model_of_a_class_of_its_own()(n), 2, True), (Deep, 8, False),
    (Named, 32, True)])
def test_a_model_for_each_call(make, most, kept, monkeypatch):
    """Classes of models that one statement makes are limited together. Beyond the limit no call looks for what differs."""
    graphs, limit, models = [], minicompile.config.recompile_limit, []

    def call(n):
        model = make(n)
        models.append(model if kept else None)
        assert torch.equal(minicompile.compile(model, backend=backend)(torch.ones(2)), model(torch.ones(2)))

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward
    for n in range(1, most * limit + 3):
        call(n)
    assert len(graphs) <= most * limit
    monkeypatch.setattr(frames, "explain_miss", None)
    for n in range(300, 303):
        call(n)


def test_guards_of_versions_of_other_models_are_not_all_evaluated_at_each_miss(monkeypatch):
    """The one that told such calls apart before does so again. All of them, for each of 20 models, would be 190 times."""
    asked, failing_guards = [], codegen.failing_guards
    monkeypatch.setattr(codegen, "failing_guards", lambda guards, *rest: (asked.append(len(guards)), failing_guards(guards, *rest))[1])
    models, x = [Named(n) for n in range(1, 21)], torch.ones(2)
    for model in models * 2:
        assert torch.equal(minicompile.compile(model, backend="eager")(x), x * int(model.name))
    assert len(asked) > 100 and sum(count > 2 for count in asked) <= 2 * len(models)


def test_models_of_one_class_are_limited_apart():
    graphs, models = [], [Deep(n) for n in range(1, 21)]

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward
    for model in models * 2:
        assert torch.equal(minicompile.compile(model, backend=backend)(torch.ones(2)), torch.full((2,), 1.0 + model.depth))
    assert len(graphs) == 20


def test_the_limit_forgets_dead_models():
    """A model at a time, as a search for hyperparameters makes them: each is compiled, however many there were."""
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.double = functools.lru_cache(lambda k: k * 2)

        def forward(self, x):
            return x * self.double(1.0)
    seen = []
    for _ in range(4 * minicompile.config.recompile_limit + 5):
        graphs = []
        minicompile.compile(Model(), backend=lambda gm, _: graphs.append(gm) or gm.forward)(torch.ones(2))
        seen.append(len(graphs))
    assert set(seen) == {1}


def architectures():
    """Different ones, of one class: each needs a version of its own."""
    for kinds in itertools.islice(itertools.product((nn.ReLU, nn.Tanh), repeat=7), 80):
        yield nn.Sequential(*(kind() for kind in kinds))


@pytest.mark.parametrize("hurried", [False, True])
def test_versions_of_models_that_are_gone_make_room(reset, monkeypatch, hurried):
    """A search for architectures: each is compiled, if the program does anything but compile."""
    later = -1e4 if hurried else 1e4                # than the versions were made, in seconds
    monkeypatch.setattr(limits, "time", types.SimpleNamespace(monotonic=lambda: time.monotonic() + later))
    graphs, x = [], torch.rand(2)
    backend = lambda gm, _: graphs.append(gm) or gm.forward                                          # noqa: E731
    with pytest.warns(match="compiled 64 times") if hurried else contextlib.nullcontext():
        for model in architectures():
            assert torch.equal(minicompile.compile(model, backend=backend)(x), model(x))
    whole = [gm for gm in graphs if sum(n.op.startswith("call") for n in gm.graph.nodes) == 7]
    assert len(whole) == (64 if hurried else 80)        # not `nn.Tanh.forward`, in what runs eagerly, if somebody has compiled that


def test_many_blocks_that_are_compiled_each(reset):
    """Versions of models that live are kept, and each block is served by the version that served it last."""
    graphs, x = [], torch.rand(2)
    blocks = [minicompile.compile(Named(i), backend=lambda gm, _: graphs.append(gm) or gm.forward) for i in range(100)]
    for _ in range(2):
        assert all(torch.equal(block(x), x * i) for i, block in enumerate(blocks))
    assert len(graphs) == 100


def test_search_begins_with_the_versions_that_served_that_argument():
    """Twenty blocks with three versions each, for three phases that follow each other, and all blocks in each phase."""
    asked, blocks, phases = [], [object() for _ in range(20)], range(3)

    def entry_for(wanted):
        def function(function, block, phase):
            asked.append(wanted)
            return wanted if (block, phase) == wanted else MISSED
        return Entry(function, [None], GuardSet())
    versions = EntryCache("", lambda *args: "none", lambda head: None)
    calls = [(block, phase) for phase in phases for block in blocks]
    for call in calls:
        add_entry(versions, entry_for(call))
    for _ in range(2):
        asked.clear()
        assert [search(versions, (None, *call), 0) for call in calls] == calls
    assert len(asked) <= 3 * len(calls)                       # at most the three versions of a block
    drop_entries(versions, list(versions.entries))
    assert search(versions, (None, *calls[0]), 0) == "none"


def test_a_question_that_another_thread_may_ask_is_complete():
    class Watched(EntryCache):
        def __setattr__(self, name, value):
            assert name != "question" or value is None or value.entries == 2
            super().__setattr__(name, value)

    def ask(entries, answers):
        return lambda *args: answers
    versions = Watched("", lambda *args: "none", lambda head: None, ask=ask)
    for number in range(2):
        add_entry(versions, Entry(lambda function, asked, number=number: number if number == asked else MISSED, [None], GuardSet()))
    assert [search(versions, (None, number), 0) for number in range(3)] == [0, 1, "none"] and versions.question is not None


def versions_for(numbers, published):
    """Versions that fit one number each, as the hook calls them: published[0](function, number)."""
    def version(number):
        def run(function, asked):
            return number if asked == number else following[0](function, asked)
        following = [None]
        return Entry(run, following, GuardSet())
    versions = EntryCache("", lambda *args: "none", lambda head: published.__setitem__(0, head))
    for number in numbers:
        add_entry(versions, version(number))
    return versions


@pytest.mark.parametrize("phase", [(0, 1), (0, 0, 1), (0, 1, 2, 2)])
def test_versions_that_take_turns_are_each_asked_at_once(phase):
    """A step that asks one network with gradients, and without: no version is a better head than another, and none is moved."""
    head, asked = [None], []
    versions = versions_for(range(4), head)
    for entry in versions.entries:
        entry.function = lambda *args, run=entry.function, number=entry.number: asked.append(number) or run(*args)
    connect_all(versions)
    for _ in range(20):
        assert [head[0](None, n) for n in phase] == [*phase]
    asked.clear()
    order, published = list(versions.entries), head[0]
    for _ in range(100):
        assert [head[0](None, n) for n in phase] == [*phase]
    assert len(asked) == 100 * len(phase) and versions.entries == order and head[0] is published
    for _ in range(60):                                                 # until the program stays with one
        head[0](None, 3)
    assert head[0] is versions.entries[0].function and head[0](None, 3) == 3


def test_who_connects_the_versions_last_is_not_who_moved_them_last():
    head = [None]
    versions = versions_for((2, 1, 0), head)
    publish, other = versions.publish, versions.entries[2]

    def interrupted(target):                                            # by another thread, which moves another version
        versions.publish, versions.candidate = publish, other
        note_hit(versions, None, other)
        publish(target)
    versions.publish, versions.candidate = interrupted, versions.entries[1]
    note_hit(versions, None, versions.entries[1])
    assert versions.entries[0] is other and [head[0](None, n) for n in (0, 1, 2, 3)] == [0, 1, 2, "none"]


def test_a_version_that_was_the_head_does_not_search():
    head = [None]
    versions = versions_for((1, 0), head)
    former, late = versions.entries[0], versions.entries[0].next[0]
    for versions.candidate in versions.entries[1:]:
        note_hit(versions, None, versions.candidate)
    former.next[0] = late                                               # written by a thread that was interrupted
    assert [head[0](None, n) for n in (0, 1, 2)] == [0, 1, "none"]


def test_threads_that_move_versions_find_each():
    head, found, before = [None], collections.Counter(), sys.getswitchinterval()
    versions_for(range(4), head)

    def ask(seed):
        rng = random.Random(seed)
        for n in rng.choices((0, 0, 1, 1, 2, 3), k=8000):
            result = head[0](None, n)
            found[result if result is MISSED or result == n else f"{result} for {n}"] += 1       # MISSED: runs as it is
    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(6)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert set(found) <= {MISSED, 0, 1, 2, 3} and [head[0](None, n) for n in range(5)] == [0, 1, 2, 3, "none"]


def made_by_exec(text="def made(x): return x * 2 + 1"):
    namespace = {}
    exec(text, namespace)
    return namespace["made"]


def test_code_of_ever_other_kinds_is_not_remembered_for_ever(reset, monkeypatch):
    monkeypatch.setattr(limits, "MOST_KINDS", 10)
    for n in range(40):
        function = compile(f"def made(x): return x * {n} + 1", f"<cell {n}>", "exec")
        exec(function, namespace := {})
        assert minicompile.compile(namespace["made"], backend="eager")(torch.ones(2)).tolist() == [n + 1.0] * 2
    assert len(limits.alike) <= 10
    assert tracer.is_users.cache_info().maxsize and tracer.is_library.cache_info().maxsize


def test_code_that_is_made_anew_is_not_compiled_for_ever(reset):
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm.forward
    kept, x = minicompile.compile(made_by_exec(), backend=backend), torch.ones(2)
    kept(x)
    with pytest.warns(match="was made anew 64 times"):
        for _ in range(80):
            assert minicompile.compile(made_by_exec(), backend=backend)(x).tolist() == [3.0, 3.0]
    assert len(graphs) == 64
    kept(torch.ones(2, dtype=torch.float64))                         # its code was one of the first
    minicompile.compile(made_by_exec("def made(x): return x * 2 + 2"), backend=backend)(x)
    minicompile.compile(made_by_exec(), backend=backend, fullgraph=True)(x)
    assert len(graphs) == 67
    minicompile.reset()
    minicompile.compile(made_by_exec(), backend=backend)(x)
    assert len(graphs) == 68
