"""Objects that live shortly, and values that look as before: a memo keeps nothing alive and must not believe an address."""

import collections
import gc
import random
import types

import pytest
import torch
import torch.nn as nn

import minicompile
from minicompile.ch02_guards import codegen, stable
from minicompile.ch03_capture import hook
from tests import soak_guards, soak_keys

X = torch.ones(2, 2)


def agrees(function, *args):
    """Compile it; the answer compares a call with eager."""
    compiled = minicompile.compile(function, backend="eager", dynamic=False)

    def check(*args):
        assert torch.equal(compiled(*args), function(*args))
    return check


class Out(collections.OrderedDict):
    """A dict with attributes, as transformers' outputs are."""


@pytest.mark.parametrize("cls", [Out, collections.OrderedDict, type("D", (dict,), {}), type("L", (list,), {}), type("T", (tuple,), {})])
def test_attributes_of_a_container(cls):
    number, nested = agrees(lambda o, x: x * o.k), agrees(lambda o, x: x * o.cfg.k)
    o = cls()
    for k in (2.0, 2.0, 2.0, 3.0, 3.0, 2.0, 4.0):
        if getattr(o, "k", None) != k:
            o.k, o.cfg = k, types.SimpleNamespace(k=k)
            gc.collect()
        number(o, X), nested(o, X)


def test_hundreds_of_outputs():
    nested = agrees(lambda o, x: x * o.cfg.k + len(o))
    for i in range(300):
        o = Out()
        o.cfg = Out()
        o.cfg.k = i // 100
        nested(o, X)


def test_an_attribute_that_a_module_does_not_have():
    read = agrees(lambda m, x: m(x) * getattr(m, "gain", 1.0))
    m = nn.Linear(2, 2)
    for gain in (None, None, 2.0, 3.0):
        if gain is not None:
            m.gain = gain
        read(m, X), read(m, X)


def test_an_attribute_that_hides_a_child():
    m = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    m.scale = nn.Parameter(torch.ones(()))
    read = agrees(lambda m, x: m(x) * m.scale)
    read(m, X), read(m, X), read(m, X)
    m.__dict__["scale"] = torch.full((), 2.0)
    read(m, X), read(m, X)


def test_children_in_an_ordered_dict():
    m = nn.Module()
    m.layer = nn.ReLU()
    read = agrees(lambda m, x: m.layer(x - 2))
    for kind in (dict, collections.OrderedDict):
        for layer in (nn.ReLU(), nn.Tanh()):
            m._modules = kind(layer=layer)
            read(m, X), read(m, X), read(m, X)
            m._modules["layer"] = nn.Sigmoid()
            read(m, X), read(m, X)


def test_defaults_at_the_address_of_others():
    def helper(x, more=2.0, *, most=1.0):
        return x * more * most

    def call(x):
        return helper(x)
    check = agrees(call)
    for i in range(20):
        check(X), check(X)
        helper.__defaults__ = None
        helper.__defaults__ = (float(i % 3),)
        if i % 5 == 0:
            helper.__kwdefaults__ = None
            helper.__kwdefaults__ = {"most": float(i)}


@pytest.mark.parametrize("number", range(12))
def test_soak(number):
    soak_guards.Soak(random.Random(number)).run(30)


@pytest.mark.parametrize("number", range(8))
def test_histories_of_dictionaries(number):
    soak_keys.History(random.Random(number)).run(30)


# ---- the memo by itself ------------------------------------------------------------------------------------------

needs_memo = pytest.mark.skipif(stable.unchanged is None, reason="the C extension is not built")


class Thing:
    pass


@needs_memo
def test_what_it_holds_is_freed():
    import weakref
    thing, thing.part = Thing(), Thing()
    memo = stable.Memo(1, (), ((stable.OBJECT, 0, ("part",)),), (1,), (), (1,))
    assert memo.record(thing) and memo(thing) == (thing.part,)
    references = weakref.ref(thing), weakref.ref(thing.part)
    del thing
    assert [r() for r in references] == [None, None]


@needs_memo
def test_another_object_at_the_same_address_is_told_apart():
    memo, thing, hits = stable.Memo(1, (), ((stable.OBJECT, 0, ("part",)), (stable.OBJECT, 1, ("k",))), (2,), (), (2,)), Thing(), 0
    for i in range(200):
        thing.part = Thing()
        thing.part.k = object()
        answer = memo(thing)
        assert answer is None or answer[0] is thing.part.k
        memo.record(thing)
        answer = memo(thing)
        assert answer is None or answer[0] is thing.part.k
        hits += answer is not None
    assert hits > 10


@needs_memo
@pytest.mark.parametrize("kind", [tuple, type("Pair", (tuple,), {})])
def test_another_tuple_at_the_same_address_is_told_apart(kind):
    """The argument itself, which no dict holds, and a tuple in it."""
    memo = stable.Memo(1, (), ((stable.TUPLE, 0, (0, 1)), (stable.TUPLE, 2, (0,))), (1, 3), (), (1, 3))
    seen, hits = set(), 0
    for i in range(200):
        pair = kind([1000 + i % 2, (2000 + i % 2,)])                # two numbers that are new each time
        hits += id(pair) in seen
        seen.add(id(pair))
        assert memo(pair) is None
        assert memo.record(pair) and all(memo(pair) == (1000 + i % 2, 2000 + i % 2) for _ in range(3))
        del pair
    assert hits > 10


@needs_memo
def test_a_tuple_that_was_told_apart_stays_so():
    """Nothing is learned from a proof that fails at last."""
    memo = stable.Memo(1, (), ((stable.OBJECT, 0, ("pair",)), (stable.TUPLE, 1, (0, 1))), (2, 3), (), (2, 3))
    thing, found = Thing(), 0
    for number in range(50):
        thing.pair = number, 1000
        assert memo.record(thing) and all(memo(thing) == (number, 1000) for _ in range(3))
        address = id(thing.pair)
        del thing.pair
        thing.pair = -number, 2000
        found += id(thing.pair) == address
        assert memo(thing) is None and memo(thing) is None
    assert found


@needs_memo
def test_what_may_move_is_compared_where_it_lies_now():
    """A list, a tuple and a tensor that are made anew, of which a memo knows what it compares."""
    things = (stable.OBJECT, 0, ("losses", "pair", "state")), (stable.LIST, 1, ()), (stable.TUPLE, 2, (0,)), (stable.OBJECT, 4, ())
    memo, thing = stable.Memo(1, (), things, (), (3,), (3,), (), (1, 2, 3, 4)), Thing()

    def write(losses=2, shape=(3,), part=0.5, pair=tuple):
        thing.losses, thing.pair, thing.state = [0] * losses, pair([part]), torch.ones(shape)
    write()
    assert memo.record(thing)
    for _ in range(20):
        write()
        assert memo(thing)[0] is thing.state and memo(thing)[0] is thing.state
        for other in (dict(losses=3), dict(shape=(4,)), dict(part=1), dict(pair=list)):
            write(**other)
            assert memo(thing) is None and memo(thing) is None
            if "losses" in other:
                thing.losses = [0, 0]
                assert memo(thing)[0] is thing.state
    del thing.state
    assert memo(thing) is None


@needs_memo
def test_lists_are_compared_item_by_item():
    things = ((stable.LIST, 0, (0, 2)), (stable.OBJECT, 1, ("k",)))
    memo, items = stable.Memo(1, (), things, (3,), (), (3,)), [Thing(), 0, Thing()]
    items[0].k = 5
    assert memo.record(items) and memo(items) == (5,)
    items[1] = 7                                                     # no place
    assert memo(items) == (5,)
    items[0].k = 6
    assert memo(items) is None and memo.record(items) and memo(items) == (6,)
    items.append(1)
    assert memo(items) is None
    items.pop()
    assert memo(items) == (6,)
    items[2] = None
    assert memo(items) is None
    del items[1:]
    assert memo(items) is None and not memo.record(items)
    assert not memo.record(type("L", (list,), {})(items)) and not memo.record((1, 2, 3))


@needs_memo
def test_a_dict_whose_keys_are_no_names():
    a, b = torch.ones(1), torch.ones(1)
    d = collections.defaultdict(dict, {a: Thing(), b: Thing()})
    memo = stable.Memo(1, (), ((stable.ALL, 0, (a, b)),), (), (), (2,))
    assert memo.record(d) and memo(d) == (d[b],)
    d[torch.ones(1)]
    assert memo(d) is None and memo.record(d) and memo(d) == (d[b],)
    d[b] = Thing()
    assert memo(d) is None
    ordered = collections.OrderedDict(a=1, b=2)
    assert not memo_of_keys().record(ordered) and memo_of_keys().record(dict(ordered))
    assert not memo_of_keys().record(type("D", (dict,), {"__iter__": lambda self: iter("ba")})(ordered))
    assert stable.Memo(1, (), ((stable.DICT, 0, ("a",)),), (1,), (), (1,)).record(ordered)


def memo_of_keys():
    return stable.Memo(1, (), ((stable.ALL, 0, ()),), (), (), ())


@needs_memo
def test_hooks_and_the_gradient_of_a_tensor():
    weight = nn.Parameter(torch.ones(2))
    hooks = stable.Memo(1, (), ((stable.HOOKS, 0, (0, 1)),), (), (), ())
    bare = stable.Memo(1, (), ((stable.OBJECT, 0, ()),), (), (), (), (0,))
    assert hooks.record(weight) and hooks(weight) == () and bare.record(weight) and bare(weight) == ()
    weight.grad = torch.ones(2)
    assert bare(weight) is None and not bare.record(weight) and hooks(weight) == ()
    weight.grad = None
    assert bare(weight) == ()
    for register in (weight.register_hook, weight.register_post_accumulate_grad_hook):
        handle = register(lambda _: None)
        assert hooks(weight) is None and hooks.record(weight) and hooks(weight) == () == bare(weight)
        handle.remove()
    assert not hooks.record(nn.Linear(1, 1)) and not bare.record(object())


@pytest.fixture
def full(monkeypatch):
    """The memos whose guards are checked in full from now on."""
    checked = []

    def refresh(memo, *rest):
        checked.append(memo)
        return stable.refresh(memo, *rest)
    hook.skip_code(refresh.__code__)
    monkeypatch.setattr(codegen, "refresh", refresh)
    return checked


@needs_memo
def test_a_training_step_checks_nothing_twice(full):
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)

    def step(x):
        loss = net(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()
    compiled = minicompile.compile(step, backend="eager", fullgraph=True)
    for _ in range(4):
        compiled(X)
    full.clear()
    for n in range(4):
        optimizer.param_groups[0]["lr"] *= 0.9                       # a number that varies is no reason to look again
        compiled(X)
        if n == 0:
            full.clear()                                             # its second value made it a symbol
    assert full == []
    optimizer.param_groups[0]["weight_decay"] = 0.5
    before = [p.detach().clone() for p in net.parameters()]
    compiled(X)
    assert full and not any(map(torch.equal, before, net.parameters()))


class Lengths:
    def __init__(self, *lengths):
        self.lengths = lengths

    def total(self):
        return sum(self.lengths)


class Batch:
    def __init__(self, x, *lengths):
        self.x, self.lengths, self.model = x, Lengths(*lengths), LINEAR

    def tokens(self):
        return self.x * self.lengths.total()


LINEAR = nn.Linear(2, 2)


@needs_memo
@pytest.mark.parametrize("program", [lambda net, batch: net(batch.tokens()), lambda net, batch: batch.model(batch.tokens()),
                                     lambda net, batch: net(getattr(batch, "y", batch.x) if hasattr(batch, "total") else batch.x)])
def test_an_argument_that_is_made_for_the_call_leaves_the_model_its_memo(program, full):
    run = agrees(program)
    for i in range(6):
        if i == 3:
            full.clear()
        run(LINEAR, Batch(X + i, 1, 2))
    assert full == []
    batch = Batch(X, 1, 2)
    batch.tokens, batch.total, batch.y = lambda: X * 7, 1, X * 5
    run(LINEAR, batch)
    batch.lengths.total = lambda: 9
    del batch.tokens
    run(LINEAR, batch)
    batch.model = nn.ReLU()
    run(LINEAR, batch)


class Registry(dict):
    """A dict with a method of its own, as transformers keeps what its models record."""
    def __setitem__(self, key, value):
        super().__setitem__(str(key), value)


class Doubled(Registry):
    def __getitem__(self, key):
        return {"n": 2 * super().__getitem__(key)["n"]}


@needs_memo
@pytest.mark.parametrize("cls, again", [(Registry, False), (Doubled, True)])
def test_a_class_derived_from_dict_is_looked_at_once(cls, again, full, monkeypatch):
    registry = cls()
    for i in range(stable.ENOUGH + 2):
        registry[i] = {"n": i}
    read = agrees(lambda x: x * sum(registry[str(i)]["n"] for i in range(stable.ENOUGH + 2)))
    for _ in range(3):
        read(X)
    full.clear()
    read(X)
    assert bool(full) == again
    registry[3] = {"n": 5}
    read(X)
    registry["4"]["n"] = 7
    read(X), read(X)
    monkeypatch.setattr(Registry, "__getitem__", lambda self, key: {"n": 1}, raising=False)
    read(X), read(X)


@needs_memo
def test_a_comparison_of_keys_runs_no_program():
    class Key:
        def __hash__(self):
            return hash("part")

        def __eq__(self, other):
            ran.append(other)
            return False
    ran, thing = [], Thing()
    thing.part = 1
    memo = stable.Memo(1, (), ((stable.OBJECT, 0, ("part",)),), (1,), (), (1,))
    assert memo.record(thing) and memo(thing) == (1,)
    thing.__dict__[Key()] = 2
    ran.clear()
    assert memo(thing) is None and not memo.record(thing) and ran == []


@needs_memo
def test_a_finaliser_in_a_proof():
    """Making the answer may collect garbage, whose finaliser writes, calls the memo and makes it forget."""
    class Garbage:
        def __del__(self):
            thing.part = Thing()
            memo(thing)
            memo.record(thing)
            memo.forget()
    thing = Thing()
    thing.part = Thing()
    memo = stable.Memo(1, (), ((stable.OBJECT, 0, ("part",)), (stable.OBJECT, 1, ())), (), (), (1,) * 30)
    threshold = gc.get_threshold()
    try:
        for _ in range(50):
            memo.record(thing)
            garbage = Garbage()
            garbage.me = garbage
            del garbage
            before = thing.part
            gc.set_threshold(1)
            answer = memo(thing)
            gc.set_threshold(*threshold)             # from 3.12 on the finaliser runs after the call
            assert answer in (None, (before,) * 30, (thing.part,) * 30)
    finally:
        gc.set_threshold(*threshold)


@needs_memo
@pytest.mark.parametrize("plan", [
    (1, (), ((0, 1, ("a",)),), (), (), ()), (1, (), ((0, -1, ("a",)),), (), (), ()), (1, (), ((0, 0, (1,)),), (), (), ()),
    (1, (), ((3, 0, ("a",)),), (), (), ()), (1, (), ((4, 0, (3,)),), (), (), ()), (1, (), (), (), (1,), ()), (1, (), (), (), (), (0,)),
    (1, (), (), (0,), (), ()), (1, (), (), (), (), (), (), (1,)), (0, ("no reference",), (), (), (), ())])
def test_a_plan_that_reads_what_was_not_proved_is_refused(plan):
    with pytest.raises((ValueError, TypeError)):
        stable.Memo(*plan)
