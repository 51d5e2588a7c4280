"""Guards: what each kind accepts and refuses, the generated check, the explanation, and the chain of entries."""
import gc
import itertools
import math
import types
import weakref

import pytest
import torch

from minicompile.ch02_guards import cache as entries
from minicompile.ch02_guards import codegen, torch_guards
from minicompile.ch02_guards.guards import GUARD_KINDS, MISSING, GuardSet, class_lookup, same_constant
from minicompile.ch02_guards.torch_guards import ModuleSpec, TensorSpec
from minicompile.ch02_guards.sources import (
    AttrSource, CallSource, ClosureCellSource, ConstantSource, DictGetSource, GlobalsSource, ItemSource, LocalSource, SizeSource,
    ModuleAttrSource, parameter_name)

SOME_GLOBAL = 3
X = LocalSource("x")


def f(x, y=None, *rest, k=7, **kw):
    return x


def holds(guards, x, y=None, function=f, **changes):
    """The generated check and the slow path must agree; returns whether the guards hold."""
    args = (x, y, 7, (), {}) if function is f else (x, y)
    check = codegen.build_check(guards, [], function.__code__)
    fast = check(function, *args) is not None
    slow = codegen.failing_guard(guards, function.__code__, function, args)
    assert fast == (slow is None), slow
    return fast


def one(kind, expected, source=X):
    guards = GuardSet()
    guards.add(source, kind, expected, "file.py:1")
    return guards


class ATensor(torch.Tensor):
    pass


class SizedOtherwise:
    def size(self, dim):
        return (11, 12)[dim]


def why(guards, *args):
    guard, explanation = codegen.failing_guard(guards, f.__code__, f, (*args, 7, (), {}))
    return f"{explanation}  # {guard.location}"


def test_sources_read_what_they_say():
    class Box:
        def __init__(self):
            self.items = {"a": [1, 2], 3: "three"}

    z = 42

    def g(x, y=5, *, k=6):
        return x, y, k, z

    box = Box()
    cases = [(AttrSource(X, "items"), box.items), (ItemSource(AttrSource(X, "items"), 3), "three"),
             (ItemSource(ItemSource(AttrSource(X, "items"), "a"), 1), 2), (ItemSource(GlobalsSource(), "SOME_GLOBAL"), SOME_GLOBAL),
             (AttrSource(ClosureCellSource(0, "z"), "cell_contents"), 42), (CallSource(AttrSource(X, "items"), "get", ("a",)), [1, 2]),
             (DictGetSource(AttrSource(X, "items"), 3), "three"), (ConstantSource.of(0, "owned"), "owned")]
    check = codegen.build_check(GuardSet(), [s for s, _ in cases], g.__code__, ("owned",))
    assert check(g, box, 1, 2) == tuple(v for _, v in cases)
    assert hash(AttrSource(X, "a")) == hash(AttrSource(LocalSource("x"), "a")) and AttrSource(X, "a") != AttrSource(X, "b")
    assert parameter_name(".0") == "__argument_0" and parameter_name("x") == "x"
    assert str(ModuleAttrSource(ModuleAttrSource(X, "_modules", "0"), "_parameters", "weight")) == "x[0].weight"


@pytest.mark.parametrize("tensor", [torch.zeros(3, 5), torch.zeros(2, 4).to_sparse(), torch.zeros(3, 4).as_subclass(ATensor),
                                    torch.nn.Parameter(torch.zeros(7, 1)), torch.zeros(2, 3, device="meta"), SizedOtherwise()])
def test_sizes(tensor):
    """The extension reads those of PyTorch's own types; others are asked."""
    check = codegen.build_check(GuardSet(), [SizeSource(X, 0), SizeSource(X, 1)], f.__code__, ())
    assert check(f, tensor, None, 7, (), {}) == (tensor.size(0), tensor.size(1)) and str(SizeSource(X, 1)) == "x.size(1)"


@pytest.mark.parametrize("expected, same, different", [
    (1, [1], [True, 1.0, 2, "1", None]), (True, [True], [1, False, 1.0]), (1.5, [1.5], [2.5, "1.5"]),
    (float("nan"), [float("nan")], [0.0, None]), (0.0, [0.0], [-0.0, 0, False]), (-0.0, [-0.0], [0.0]),
    (math.inf, [math.inf], [-math.inf]), ("a", ["a"], ["b", b"a"]), (None, [None], [0, False]), (b"a", [b"a"], ["a"]),
    ((1, 2.0), [(1, 2.0)], [(1, 2), (1.0, 2.0), [1, 2.0], (1,)]), (torch.float32, [torch.float32], [torch.float64]),
    (frozenset({2}), [frozenset({2})], [frozenset({2.0}), frozenset({2, 3}), {2}]),
    (2j, [2j], [2, 3j]), (slice(1, 2), [slice(1, 2)], [slice(1, 2, 1)]), (Ellipsis, [Ellipsis], [None]),
    (torch.device("cpu"), [torch.device("cpu")], [torch.device("meta"), "cpu"])])
def test_constants(expected, same, different):
    guards = one("CONSTANT_MATCH", expected)
    assert all(holds(guards, v) for v in same)
    assert not any(holds(guards, v) for v in different)
    assert same_constant(expected, same[0])


def test_containers_attributes_and_types():
    assert holds(one("LENGTH", 2), [1, 2]) and not holds(one("LENGTH", 2), [1]) and not holds(one("LENGTH", 2), 5)
    assert holds(one("DICT_KEYS", ("a", "b")), {"a": 1, "b": 2})
    assert not holds(one("DICT_KEYS", ("a", "b")), {"b": 1, "a": 2})
    assert holds(one("DICT_KEYS", (1, 2)), {1: 0, 2: 0}) and not holds(one("DICT_KEYS", (1, 2)), {True: 0, 2: 0})
    assert holds(one("DICT_KEYS", ()), {}) and not holds(one("DICT_KEYS", ()), {1: 1})
    assert holds(one("TYPE_MATCH", int), 1) and not holds(one("TYPE_MATCH", int), True)
    assert holds(one("NO_ATTR", "foo"), 1) and not holds(one("NO_ATTR", "real"), 1)
    assert holds(one("NO_KEY", "q"), {}) and not holds(one("NO_KEY", "q"), {"q": 1})
    assert holds(one("HAS_KEY", (2, 3)), {(2, 3): 1, "q": 2}) and not holds(one("HAS_KEY", (2, 3)), {(3, 2): 1})
    assert holds(one("FUNCTION_CODE", f), f) and not holds(one("FUNCTION_CODE", f), test_constants)


def test_identity_is_weak():
    class Thing:
        pass

    thing, other = Thing(), Thing()
    guards = one("ID_MATCH", thing)
    assert holds(guards, thing) and not holds(guards, other) and not holds(guards, None)
    alive = weakref.ref(thing)
    check = codegen.build_check(guards, [], f.__code__)
    del thing
    gc.collect()
    assert alive() is None, "a guard keeps its object alive"
    assert check(f, None, None, 7, (), {}) is None and check(f, other, None, 7, (), {}) is None
    assert holds(one("ID_MATCH", len), len) and not holds(one("ID_MATCH", len), max)


@pytest.mark.parametrize("change, message", [
    (lambda: torch.zeros(8, 4), None), (lambda: torch.zeros(9, 4), "size mismatch at dimension 0: expected 8, got 9"),
    (lambda: torch.zeros(8, 4, 1), "rank mismatch: expected 2, got 3"), (lambda: torch.zeros(8, 4).double(), "dtype"),
    (lambda: torch.zeros(4, 8).t(), "stride"), (lambda: torch.zeros(8, 4, device="meta"), "device"),
    (lambda: torch.zeros(8, 4, requires_grad=True), "requires_grad"), (lambda: torch.nn.Parameter(torch.zeros(8, 4)), "class"),
    (lambda: torch.zeros(8, 4).to_sparse(), ""), (lambda: "no tensor", "class"), (lambda: None, "class")])
def test_tensors(change, message):
    guards = one("TENSOR_MATCH", torch.zeros(8, 4))
    value = change()
    assert holds(guards, value) == (message is None)
    if message is not None:
        assert message in why(guards, value, None) and "file.py:1" in why(guards, value, None)


def test_tensor_layouts_and_dynamic_dimensions():
    transposed = torch.zeros(4, 8).t()
    assert holds(one("TENSOR_MATCH", transposed), transposed) and not holds(one("TENSOR_MATCH", transposed), torch.zeros(8, 4))
    dynamic = one("TENSOR_MATCH", TensorSpec.of(torch.zeros(8, 4), {0}))
    assert holds(dynamic, torch.zeros(9, 4)) and not holds(dynamic, torch.zeros(9, 5)) and not holds(dynamic, torch.zeros(1, 4))
    last = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    images = one("TENSOR_MATCH", TensorSpec.of(last, {0}))
    more = torch.zeros(7, 3, 4, 5)
    assert holds(images, more.to(memory_format=torch.channels_last)) and not holds(images, more)
    conj = torch.zeros(3, dtype=torch.complex64)
    assert holds(one("TENSOR_MATCH", conj), conj) and not holds(one("TENSOR_MATCH", conj), conj.conj())


def test_aliasing_and_sizes():
    a, b = torch.zeros(3), torch.zeros(3)
    y = LocalSource("y")
    assert holds(one("NOT_ALIASED", y), a, b) and not holds(one("NOT_ALIASED", y), a, a)
    assert holds(one("ALIASED", y), a, a) and not holds(one("ALIASED", y), a, b)
    many = one("NOT_ALIASED", (y, AttrSource(y, "grad")))
    assert holds(many, a, b) and not holds(many, a, a)
    size = one("SIZE", ("s0 % 4 == 0 and s0 <= s1", (("s0", CallSource(X, "size", (0,))), ("s1", y))), None)
    assert holds(size, torch.zeros(8), 8) and not holds(size, torch.zeros(9), 10) and not holds(size, torch.zeros(8), 7)
    assert "s0 % 4 == 0" in why(size, torch.zeros(9), 10)


def test_library_state():
    def guards_of(kind):
        return one(kind, None, None)
    g = guards_of("GRAD_MODE")
    assert holds(g, 0)
    with torch.no_grad():
        assert not holds(g, 0) and "grad mode changed: expected True, got False" in why(g, 0, 0)
    g = guards_of("AUTOCAST")
    assert holds(g, 0)
    with torch.autocast("cpu", torch.bfloat16):
        assert not holds(g, 0)
        inside = guards_of("AUTOCAST")
        assert holds(inside, 0)
    assert not holds(inside, 0)
    for kind, context in (("INFERENCE_MODE", torch.inference_mode()), ("TORCH_FUNCTION", torch._C.DisableTorchFunctionSubclass())):
        g = guards_of(kind)
        assert holds(g, 0)
        with context:
            assert not holds(g, 0), kind
    g = guards_of("DEFAULT_DTYPE")
    torch.set_default_dtype(torch.float64)
    try:
        assert not holds(g, 0)
    finally:
        torch.set_default_dtype(torch.float32)
    g = guards_of("DETERMINISTIC")
    torch.use_deterministic_algorithms(True)
    try:
        assert not holds(g, 0)
    finally:
        torch.use_deterministic_algorithms(False)


def test_modules():
    m = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    for change in (lambda: m.append(torch.nn.ReLU()), lambda: m.register_forward_hook(lambda *a: None),
                   lambda: m.register_buffer("b", torch.zeros(1)), lambda: setattr(m, "p", torch.nn.Parameter(torch.zeros(1)))):
        guards = one("MODULE_STRUCTURE", ModuleSpec.of(m))
        assert holds(guards, m)
        change()
        assert not holds(guards, m) and why(guards, m, None)
    weight = ModuleAttrSource(ModuleAttrSource(X, "_modules", "0"), "_parameters", "weight")
    check = codegen.build_check(one("TENSOR_MATCH", m[0].weight, weight), [weight], f.__code__)
    assert check(f, m, None, 7, (), {})[0] is m[0].weight
    m[0].weight = torch.nn.Parameter(torch.zeros(3, 2))
    assert check(f, m, None, 7, (), {})[0] is m[0].weight
    del m[0].weight
    assert check(f, m, None, 7, (), {}) is None


def test_many_tensors_of_few_forms_are_few_functions():
    """And of each it is asked what is expected of it."""
    tensors, guards = [torch.zeros(3 + i % 2, requires_grad=i % 3 == 0) for i in range(codegen.MANY_TENSORS + 2)], GuardSet()
    for i, t in enumerate(tensors):
        guards.add(ItemSource(X, i), "TENSOR_MATCH", t, "file.py:1")
    assert codegen.build_check(guards, [], f.__code__).source_text.count("= lambda x: ") == 4
    assert holds(guards, tensors)
    for i, t in enumerate(tensors):
        for other in (torch.zeros(7 - len(t), requires_grad=t.requires_grad), torch.zeros(len(t), requires_grad=not t.requires_grad), 0):
            assert not holds(guards, [*tensors[:i], other, *tensors[i + 1:]])


def test_a_guard_that_raises_is_a_miss():
    class Bad:
        @property
        def a(self):
            raise ValueError("boom")

    guards = one("CONSTANT_MATCH", 1, AttrSource(X, "a"))
    assert not holds(guards, Bad()) and "boom" in why(guards, Bad(), None)
    assert not holds(one("CONSTANT_MATCH", 1, ItemSource(X, 5)), [1])


def test_repeated_guards_are_kept_once_and_unknown_kinds_refused():
    guards = GuardSet()
    guards.add(X, "CONSTANT_MATCH", 1, "first")
    guards.add(X, "CONSTANT_MATCH", 1, "second")
    guards.add(X, "CONSTANT_MATCH", True)
    guards.add(X, "CONSTANT_MATCH", 1.0)
    assert len(guards) == 3 and next(iter(guards)).location == "first"
    with pytest.raises(KeyError):
        guards.add(X, "NO_SUCH_KIND")
    assert {"TYPE_MATCH", "TENSOR_MATCH", "SIZE", "AUTOCAST"} <= set(GUARD_KINDS)


def test_common_prefixes_are_read_once():
    reads = []

    class Spy:
        @property
        def inner(self):
            reads.append(1)
            return [1, 2, 3]

    guards = GuardSet()
    for i, v in enumerate((1, 2, 3)):
        guards.add(ItemSource(AttrSource(X, "inner"), i), "CONSTANT_MATCH", v)
    check = codegen.build_check(guards, [ItemSource(AttrSource(X, "inner"), 0)], f.__code__)
    assert check(f, Spy(), None, 7, (), {}) == (1,) and len(reads) == 1


def make_entry(value, log):
    cell = [entries.missed]
    body = f"__log.append({value})\nreturn {value}"
    function = codegen.build_entry(one("CONSTANT_MATCH", value), [X], f.__code__, body, {"__next": cell, "__log": log})
    return entries.Entry(function, cell, one("CONSTANT_MATCH", value))


def test_chain_of_entries():
    head, log = [], []
    cache = entries.EntryCache("f", lambda *a: "tail", head.append)
    entries.link_entries(cache)
    call = lambda x: head[-1](f, x, None, 7, (), {})
    assert call(1) == "tail"
    for value in (1, 2, 3):
        entries.add_entry(cache, make_entry(value, log))
    assert [call(v) for v in (3, 1, 2, 9)] == [3, 1, 2, "tail"] and log == [3, 1, 2]
    assert call(1) == 1 and call(1) == 1 and cache.entries[0].number == 1
    assert call(3) == 3 and call(2) == 2
    entries.drop_entry(cache, cache.entries[0])
    assert call(1) == "tail" and call(2) == 2


def test_the_question_of_several_entries_is_that_of_each():
    """Lines that entries begin with are written once, and what cannot be read rules out those that read it."""
    def sets():
        for i, expected in enumerate(itertools.product((1, 2), ("a", "b"))):
            guards = one("TYPE_MATCH", list)
            for source, value in zip((ItemSource(X, 0), AttrSource(ItemSource(X, 1), "name"), ConstantSource(i % 2, i, 0)), (*expected, 0)):
                guards.add(source, "CONSTANT_MATCH", value, "file.py:1")
            yield guards

    made = [(i, list(guards), [*guards][1 + i % 2:3 + i % 3 // 2], (0, i)) for i, guards in enumerate(sets())]
    alone = [codegen.build_question([entry], f.__code__) for entry in made]
    together, nothing = codegen.build_question(made, f.__code__), codegen.build_question([(5, [], [], ())], f.__code__)
    for x in ([1, types.SimpleNamespace(name="a")], [2, types.SimpleNamespace(name="a")], [2, types.SimpleNamespace(name="b")],
              [1, 0], [1], [], (1, 2), None):
        args = f, x, None, 7, (), {}
        assert sorted(together(*args)) == [i for question in alone for i in question(*args)] and nothing(*args) == [5]
        for i, guards, telling, constants in made:
            held = codegen.failing_guard([guards[0], *telling], f.__code__, f, args[1:], constants) is None
            assert held == (i in together(*args)), (x, telling)
    assert together(f, [1, types.SimpleNamespace(name="a")], None, 7, (), {})
    numbers = [list(one("CONSTANT_MATCH", v, ItemSource(ItemSource(X, 0), 1))) for v in range(8)]
    same = codegen.build_question([(v, guards, guards, ()) for v, guards in enumerate(numbers)], f.__code__)
    assert [same(f, [[0, v]], None, 7, (), {}) for v in (0, 7, 8)] == [[0], [7], []]


def test_an_exception_in_the_body_is_not_a_miss():
    cell = [lambda *a: "next"]
    function = codegen.build_entry(GuardSet(), [], f.__code__, "raise KeyError(x)", {"__next": cell})
    with pytest.raises(KeyError):
        function(f, 1, None, 7, (), {})


def test_entry_dies_with_its_object():
    class Thing:
        pass

    thing, head = Thing(), []
    cache = entries.EntryCache("f", lambda *a: "tail", head.append)
    cell = [entries.missed]
    guards = one("ID_MATCH", thing)
    function = codegen.build_entry(guards, [], f.__code__, "return 1", {"__next": cell})
    entries.add_entry(cache, entries.Entry(function, cell, guards))
    assert head[-1](f, thing, None, 7, (), {}) == 1
    del thing, guards
    gc.collect()
    assert cache.entries == []


def test_methods_of_tensors_are_not_looked_up_one_by_one(monkeypatch):
    """A memo that looks again asks this each time: models whose parameters are frozen and thawed in turn pay for it in each call."""
    looked_up = []
    monkeypatch.setattr(torch_guards, "class_lookup", lambda cls, name: looked_up.append(name) or class_lookup(cls, name))
    assert torch_guards.replaced_methods() == {} and not looked_up
    own, mine = torch.Tensor.__contains__, lambda self, *args: self
    monkeypatch.setattr(torch.Tensor, "no_method_of_pytorch", mine, raising=False)
    assert torch_guards.replaced_methods() == {}
    monkeypatch.setattr(torch.Tensor, "relu", mine)                      # PyTorch's lies in a base
    monkeypatch.setattr(torch.Tensor, "__add__", None)
    monkeypatch.delattr(torch.Tensor, "__contains__")
    assert torch_guards.replaced_methods() == {"relu": mine, "__add__": None, "__contains__": MISSING}
    assert sorted(looked_up) == ["__add__", "__contains__", "relu"]
    monkeypatch.setattr(torch.Tensor, "__contains__", own, raising=False)
    assert list(torch_guards.replaced_methods()) == ["relu", "__add__"]
