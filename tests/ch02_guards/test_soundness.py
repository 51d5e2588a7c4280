"""Each kind of fact that a trace may rely on: compile, change the fact, call again, compare with the uncompiled function.

A case is (name, make, call, change): make() -> state, call(state, x) is compiled, change(state) changes one fact.
"""
import builtins
import collections
import contextlib
import copy
import dataclasses
import functools
import gc
import itertools
import math
import os
import re
import sys
import threading
import types
import weakref

import numpy
import pytest
import torch
import torch.nn.functional as F
from recorders import Recorder
from torch import nn

import minicompile
from minicompile import frames, marks
from minicompile.ch02_guards import codegen, guards, stable
from minicompile.ch02_guards.torch_guards import TensorSpec

SCALE, TABLE, LIST = 2.0, {"a": 1, "b": 2}, [1, 2]

pytestmark = pytest.mark.usefixtures("fresh")


class Block(nn.Module):
    scale = 2.0

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("offset", torch.ones(4))
        self.register_parameter("absent", None)
        self.rate, self.sizes, self.names, self.table = 0.5, (1, 2), ["a", "b"], {"k": 1}

    def helper(self, x):
        return x * self.rate

    @property
    def factor(self):
        return self.rate + 1

    @staticmethod
    def fixed(x):
        return x + 1

    @classmethod
    def of_class(cls, x):
        return x * cls.scale

    def forward(self, x):
        y = self.helper(self.linear(x)) + self.offset
        y = self.norm(y) * self.factor + self.sizes[0] + len(self.names) + self.table["k"]
        y = self.of_class(self.fixed(y)) * self.scale
        if self.absent is not None:
            y = y * self.absent
        if hasattr(self, "late"):
            y = y + 100
        if self.training:
            y = y - 1
        return y


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.config = types.SimpleNamespace(bias=1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x + self.config.bias


def model():
    torch.manual_seed(0)
    return Model()


def patched_forward(self, x):
    return x * 3


@contextlib.contextmanager
def attribute(owner, name, value):
    """Set (or delete, with value None) an attribute of a class for a while."""
    had = name in vars(owner)
    old = vars(owner).get(name)
    delattr(owner, name) if value is None else setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old) if had else delattr(owner, name)


def hook(module, args, output=None):
    return (args[0] * 2,) if output is None else output * 2


def set_(path, value):
    def change(m):
        *owner, name = path.split(".")
        owner = functools.reduce(getattr, owner, m)
        setattr(owner, name, value() if isinstance(value, types.LambdaType) and value.__name__ == "<lambda>" else value)
    return change


MODULE_CHANGES = {
    "plain attribute": set_("blocks.1.rate", 0.25),
    "its type": set_("blocks.1.rate", True),
    "through __dict__": lambda m: m.blocks[1].__dict__.update(rate=7.0),
    "through object.__setattr__": lambda m: object.__setattr__(m.blocks[0], "rate", 7.0),
    "many writes": lambda m: [setattr(m.blocks[0], "rate", float(i)) for i in range(50)],
    "attribute that was absent": set_("blocks.0.late", 1),
    "tuple": set_("blocks.0.sizes", (5, 2)),
    "list item": lambda m: m.blocks[0].names.append("c"),
    "dict item": lambda m: m.blocks[0].table.update(k=9),
    "attribute of a plain object": set_("config.bias", 5),
    "plain object": set_("config", lambda: types.SimpleNamespace(bias=7)),
    "training": lambda m: m.eval(),
    "training of a child": lambda m: m.blocks[1].norm.eval(),
    "parameter replaced": set_("blocks.0.linear.weight", lambda: nn.Parameter(torch.ones(4, 4))),
    "parameter.data replaced": lambda m: setattr(m.blocks[0].linear.weight, "data", torch.ones(4, 4)),
    "parameter.data, other strides": lambda m: setattr(m.blocks[0].linear.weight, "data", torch.randn(4, 4).t()),
    "parameter in place": lambda m: m.blocks[0].linear.weight.data.fill_(2.0),
    "requires_grad": lambda m: m.requires_grad_(False),
    "requires_grad of one": lambda m: m.blocks[1].linear.bias.requires_grad_(False),
    "dtype": lambda m: m.double(),
    "buffer": set_("blocks.1.offset", lambda: torch.zeros(4)),
    "buffer of another shape": set_("blocks.1.offset", lambda: torch.zeros(1)),
    "buffer in place": lambda m: m.blocks[1].offset.resize_(1),
    "parameter that was None": set_("blocks.1.absent", lambda: nn.Parameter(torch.full((4,), 3.0))),
    "child replaced": set_("blocks.0.linear", lambda: nn.Linear(4, 4, bias=False)),
    "child of another class": set_("blocks.0.linear", lambda: nn.Identity()),
    "child added": lambda m: m.blocks.append(Block()),
    "child removed": lambda m: m.blocks.__delitem__(1),
    "children in another order": lambda m: m.blocks._modules.update({"0": m.blocks[1], "1": m.blocks[0]}),
    "weights tied": lambda m: setattr(m.blocks[1], "linear", m.blocks[0].linear),
    "forward hook": lambda m: m.blocks[0].linear.register_forward_hook(hook),
    "forward pre-hook": lambda m: m.blocks[0].register_forward_pre_hook(hook),
    "forward of an instance": lambda m: setattr(m.blocks[0], "forward", lambda x: x + 5),
    "method of an instance": lambda m: setattr(m.blocks[0], "helper", lambda x: x + 5),
    "class of an instance": lambda m: setattr(m.blocks[0], "__class__", type("Other", (Block,), {"forward": patched_forward})),
    "class of the root": lambda m: setattr(m, "__class__", type("Root", (Model,), {"forward": patched_forward})),
    "__dict__ of an instance": lambda m: setattr(m.blocks[0], "__dict__", {**m.blocks[0].__dict__, "rate": 9.0}),
}


def double(dtype):
    return torch.linspace(-1, 1, 12, dtype=dtype).view(3, 4)


def same(function, compiled, state, twin, x):
    """Call both, on equal states; results, gradients' need and state afterwards must agree."""
    try:
        expected = function(twin, x.clone())
    except Exception as error:
        with pytest.raises(type(error)):
            compiled(state, x.clone())
        return
    got = compiled(state, x.clone())
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    assert got.requires_grad == expected.requires_grad


def apply(m, x):
    return m(x)


def write_everywhere(objects, value):
    """Give every dictionary of these objects another version; the compiled function does not read what is written."""
    for o in objects:
        o.__dict__["unread"] = value


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("name", MODULE_CHANGES)
def test_modules(name, written):
    state, twin = model(), model()
    compiled = minicompile.compile(apply, backend="eager")
    x = double(torch.float32)
    for i in range(4):
        same(apply, compiled, state, twin, x)
        write_everywhere([*state.modules(), *twin.modules()] if written else [], i)
    for m in (state, twin):
        torch.manual_seed(1)
        MODULE_CHANGES[name](m)
    x = x.to(state.blocks[0].linear.weight.dtype) if hasattr(state.blocks[0].linear, "weight") else x
    for _ in range(3):
        same(apply, compiled, state, twin, x)


CLASS_CHANGES = {
    "forward": (Block, "forward", patched_forward), "forward of the root": (Model, "forward", patched_forward),
    "method": (Block, "helper", lambda self, x: x - 3), "property": (Block, "factor", property(lambda self: 10)),
    "static method": (Block, "fixed", staticmethod(lambda x: x * 10)),
    "class method": (Block, "of_class", classmethod(lambda cls, x: x * 11)), "class attribute": (Block, "scale", 5.0),
    "new property shadows": (Block, "rate", property(lambda self: 9.0)), "attribute that was absent": (Block, "late", 1),
    "__call__": (Block, "__call__", lambda self, x: x + 50), "__getattr__": (Block, "__getattr__", lambda self, n: 1),
    "library class": (nn.Linear, "forward", patched_forward), "deleted": (Block, "scale", None),
    "base class": (nn.Module, "helper2", 1), "iteration": (nn.ModuleList, "__iter__", lambda self: iter([])),
}


@pytest.mark.parametrize("name", CLASS_CHANGES)
def test_classes(name):
    state, twin = model(), model()
    compiled = minicompile.compile(apply, backend="eager")
    x = double(torch.float32)
    for _ in range(2):
        same(apply, compiled, state, twin, x)
    with attribute(*CLASS_CHANGES[name]):
        for _ in range(2):
            same(apply, compiled, state, twin, x)
    same(apply, compiled, state, twin, x)


def made_per_call():
    def scaled(x, factor=2, *, shift=1):
        return x * factor + shift
    return scaled


def test_functions_made_for_each_call():
    """What counts is the code and the defaults, not which function it is: the one of the first call is gone."""
    def apply_it(g, x):
        return g(x)
    recorder, x = Recorder(), torch.ones(2)
    compiled = minicompile.compile(apply_it, backend=recorder)
    for _ in range(20):
        assert torch.equal(compiled(made_per_call(), x), x * 2 + 1)
        gc.collect()
    assert len(recorder.graphs) == 1
    for defaults, named in (((3,), {"shift": 1}), ((3,), {"shift": 4}), ((), {"shift": 4}), (None, {"shift": 4}), ((3,), None)):
        g = made_per_call()
        g.__defaults__, g.__kwdefaults__ = defaults, named
        try:
            expected = apply_it(g, x)
        except TypeError as error:
            with pytest.raises(TypeError, match=re.escape(str(error))):
                compiled(g, x)
        else:
            assert torch.equal(compiled(g, x), expected)


def test_function_changed_in_place():
    def helper(x, k=2):
        return x * k

    def other(x, k=3):
        return x - k

    def f(x):
        return helper(x) + 1
    compiled, x = minicompile.compile(f, backend="eager"), torch.ones(3)
    for change in (lambda: None, lambda: setattr(helper, "__defaults__", (7,)), lambda: setattr(helper, "__code__", other.__code__)):
        change()
        torch.testing.assert_close(compiled(x), f(x))


def test_methods_changed_in_place():
    class Part(nn.Module):
        def forward(self, x, k=2, *, j=3):
            return x * k + j

    def other(self, x, k=2, *, j=3):
        return x - k

    m = Part()
    compiled, x = minicompile.compile(apply, backend="eager"), torch.ones(3)
    for change in (lambda: None, lambda: setattr(Part.forward, "__defaults__", (7,)), lambda: setattr(Part.forward, "__kwdefaults__",
                                                                                                      {"j": 8}),
                   lambda: setattr(Part.forward, "__code__", other.__code__)):
        change()
        torch.testing.assert_close(compiled(m, x), apply(m, x))


# ---- the state of the library ------------------------------------------------------------------------

@contextlib.contextmanager
def setting(get, set, value):
    old = get()
    set(value)
    try:
        yield
    finally:
        set(old)


@contextlib.contextmanager
def global_hook():
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, args, out: out * 2)
    try:
        yield
    finally:
        handle.remove()


class Negate(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return -result if function is torch.mul else result


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


def no_autocast_cache():
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


WORLDS = {
    "no_grad": torch.no_grad, "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16), "autocast half": lambda: torch.autocast("cpu", torch.float16),
    "autocast without cache": no_autocast_cache,
    "default dtype": lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "deterministic": lambda: setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "matmul precision": lambda: setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "threads": lambda: setting(torch.get_num_threads, torch.set_num_threads, 2),
    "global module hook": global_hook, "torch function mode": Negate,
    "device": lambda: torch.device("meta"), "default device": lambda: default_device("meta"),
    "default device cpu": lambda: default_device("cpu"),
    "torch function off": torch._C.DisableTorchFunctionSubclass,
}


def worldly(m, x):
    y = torch.mul(m(x), 2) + torch.ones(4, device=x.device)
    numbers = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.are_deterministic_algorithms_enabled(),
               torch.get_float32_matmul_precision(), torch.get_num_threads(), torch.is_autocast_enabled("cpu"),
               torch.get_default_dtype()]
    return y, torch.ones(2), torch.tensor(1.5), x @ x.t(), numbers


@pytest.mark.parametrize("name", WORLDS)
def test_world(name):
    state, twin = nn.Linear(4, 4), nn.Linear(4, 4)
    twin.load_state_dict(state.state_dict())
    compiled = minicompile.compile(worldly, backend="eager")
    x = double(torch.float32)

    def check():
        expected, got = worldly(twin, x), compiled(state, x)
        assert got[-1] == expected[-1]
        for a, b in zip(got[:-1], expected[:-1]):
            assert (a.device, a.dtype, a.requires_grad, a.is_inference()) == (b.device, b.dtype, b.requires_grad, b.is_inference())
            if a.device.type == "cpu":
                torch.testing.assert_close(a, b)
    for context in (contextlib.nullcontext, WORLDS[name], contextlib.nullcontext, WORLDS[name], contextlib.nullcontext):
        with context():
            check()


def batched(function):
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda gradient: function())
    torch.autograd.grad(x * 2, x, torch.eye(3), is_grads_batched=True)


# Each calls a function in another state
STATES = {
    **{name: lambda f, name=name: within(WORLDS[name](), f) for name in (
        "no_grad", "inference_mode", "autocast", "default dtype", "deterministic", "torch function mode", "torch function off", "device")},
    "torch function off for all": lambda f: within(torch._C.DisableTorchFunction(), f),
    "torch dispatch mode": lambda f: within(torch.utils._python_dispatch.TorchDispatchMode(), f),
    "autocast of another device": lambda f: within(setting(
        lambda: torch.is_autocast_enabled("cuda"), lambda on: torch.set_autocast_enabled("cuda", on), True), f),
    "vmap": lambda f: torch.func.vmap(lambda x: [f(), x][1])(torch.ones(2)),
    "grad": lambda f: torch.func.grad(lambda x: [f(), x][1])(torch.ones(())),
    "jvp": lambda f: torch.func.jvp(lambda x: [f(), x][1], (torch.ones(2),), (torch.ones(2),)),
    "functionalize": lambda f: torch.func.functionalize(lambda x: [f(), x][1])(torch.ones(2)),
    "batched gradients": batched,
}


def within(context, function):
    with context:
        function()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", STATES)
def test_a_state_is_not_taken_for_another(name):
    """What a `State` remembers holds for the state that it was told in, in no other, and again in that one."""
    state, found = stable.unchanged.State(), []
    for _ in range(2):
        state(state())
        assert state() is None
        STATES[name](lambda: found.append(state()))
        assert found[-1] is not None and state() is None
        STATES[name](lambda: state(found[-1]) or found.append(state()))
        assert found[-1] is None and state() is not None
        state(found[0])
        assert state() is not None                  # that was another state than the present one


def test_each_thread_has_a_state():
    state, found = stable.unchanged.State(), []
    state(state())
    for enabled in (True, False, True):
        thread = threading.Thread(target=lambda: (torch.set_grad_enabled(enabled), found.append(state())))
        thread.start()
        thread.join()
    assert [f is None for f in found] == [True, False, True] and state() is None


def test_a_default_device_that_is_not_asked():
    """What disables `__torch_function__` for classes leaves modes on, and what disables it altogether does not."""
    compiled = minicompile.compile(lambda: torch.zeros(2) * 2, backend="eager")
    contexts = torch._C.DisableTorchFunction, torch._C.DisableTorchFunctionSubclass
    for off, expected in zip([*contexts, *contexts], ["cpu", "meta"] * 2):
        with torch.device("meta"), off():
            assert compiled().device.type == expected


def test_two_modes_of_one_kind():
    compiled = minicompile.compile(lambda x: torch.ones(2) + x.sum(), backend="eager")
    x = torch.ones(3)
    compiled(x)
    for device in ("cpu", "meta", "cpu"):
        with torch.device(device):
            assert torch.ones(2).device.type == device
            function = minicompile.compile(lambda: torch.ones(2) * 2, backend="eager")
    function = minicompile.compile(lambda: torch.ones(2) * 2, backend="eager")
    for device in ("cpu", "meta", "cpu"):
        with torch.device(device):
            assert function().device.type == device


# ---- arguments -------------------------------------------------------------------------------------------

class Sub(torch.Tensor):
    pass


def arguments(x, y, z):
    y.add_(1)
    return x * 2 + y + (0 if z is None else 1) + (1 if x is y else 0)


BASE = torch.arange(24.0)
TENSORS = {
    "size": lambda: torch.ones(3, 5), "rank": lambda: torch.ones(2, 3, 4), "strides": lambda: torch.ones(4, 3).t(),
    "expanded": lambda: torch.ones(1, 4).expand(3, 4), "dtype": lambda: torch.ones(3, 4, dtype=torch.float64),
    "int": lambda: torch.ones(3, 4, dtype=torch.int64), "bool": lambda: torch.ones(3, 4, dtype=torch.bool),
    "complex": lambda: torch.ones(3, 4, dtype=torch.complex64), "conjugate": lambda: torch.ones(3, 4, dtype=torch.complex64).conj(),
    "negative bit": lambda: (torch.ones(3, 4, dtype=torch.complex64) * 1j).conj().imag,
    "requires_grad": lambda: torch.ones(3, 4, requires_grad=True), "subclass": lambda: torch.ones(3, 4).as_subclass(Sub),
    "parameter": lambda: nn.Parameter(torch.ones(3, 4)), "device": lambda: torch.ones(3, 4, device="meta"),
    "sparse": lambda: torch.ones(3, 4).to_sparse(), "empty": lambda: torch.ones(0, 4), "one": lambda: torch.ones(1, 4),
    "number": lambda: 3, "none": lambda: None, "list": lambda: [1, 2], "numpy": lambda: torch.ones(3, 4).numpy(),
    "offset": lambda: torch.ones(24)[12:].view(3, 4), "inference": lambda: torch.inference_mode()(lambda: torch.ones(3, 4))(),
}


def metadata(x, flag):
    if not isinstance(x, torch.Tensor):
        return str(type(x))
    facts = (tuple(x.shape), x.dtype, x.device.type, x.requires_grad, x.is_contiguous(), x.dim(), type(x).__name__)
    return x + flag if x.layout is torch.strided else x, facts


@pytest.mark.parametrize("name", TENSORS)
def test_tensor_arguments(name):
    def plain(x, flag):
        return metadata(x, flag)
    compiled = minicompile.compile(plain, backend="eager")
    for make in (lambda: torch.ones(3, 4), TENSORS[name], lambda: torch.ones(3, 4), TENSORS[name], TENSORS[name]):
        value = make()
        expected, got = plain(value, 1), compiled(value, 1)
        if isinstance(expected, tuple):
            assert got[1] == expected[1]
            assert (got[0].dtype, got[0].shape, got[0].requires_grad) == (expected[0].dtype, expected[0].shape, expected[0].requires_grad)
            if value.layout is torch.strided and value.device.type == "cpu":
                torch.testing.assert_close(got[0].detach().resolve_neg(), expected[0].detach().resolve_neg())
        else:
            assert got == expected


def test_aliased_arguments():
    compiled = minicompile.compile(arguments, backend="eager")
    for make in (lambda: (torch.ones(4), torch.ones(4)), lambda: (torch.ones(4),) * 2,
                 lambda: (lambda b: (b[:4], b[1:5]))(torch.arange(6.0)), lambda: (lambda b: (b, b.view(4)))(torch.ones(4)),
                 lambda: (torch.ones(4), torch.ones(4))):
        a, b = make(), make()
        torch.testing.assert_close(compiled(*a, None), arguments(*b, None))
        torch.testing.assert_close(a, b)


class Holder:
    def __init__(self):
        self.v, self.items = 1, [1]


def counter():
    n = 0

    def count(x):
        nonlocal n
        n += 1
        return x * n
    return count


APART = {
    "list": (lambda x, a, b: (a.append(1), x * len(b))[1], lambda: [0]),
    "item": (lambda x, a, b: (a.__setitem__(0, 5), x * b[0])[1], lambda: [0]),
    "list in a tuple": (lambda x, a, b: (a[0].append(1), x * len(b[0]))[1], lambda: ([1],)),
    "dict": (lambda x, a, b: (a.update(k=5), x * b["k"])[1], lambda: {"k": 1}),
    "dict that grows": (lambda x, a, b: (a.update(z=5), x * len(b))[1], lambda: {"k": 1}),
    "set": (lambda x, a, b: (a.add(7), x * len(b))[1], lambda: {1}),
    "deque": (lambda x, a, b: (a.append(1), x * len(b))[1], lambda: collections.deque([1])),
    "attribute": (lambda x, a, b: (setattr(a, "v", 5), x * b.v)[1], Holder),
    "list of an object": (lambda x, a, b: (a.items.append(5), x * len(b.items))[1], Holder),
    "variable of a closure": (lambda x, a, b: (a(x), b(x))[1], counter),
    "tensor": (lambda x, a, b: (a.add_(1), x * b.sum())[1], lambda: torch.ones(2)),
    "is": (lambda x, a, b: x * (a is b), Holder), "eq": (lambda x, a, b: x * (a == b), Holder),
    "in": (lambda x, a, b: x * (a in [b]), Holder), "key": (lambda x, a, b: x * len({a, b}), Holder),
    "id": (lambda x, a, b: x * (id(a) == id(b)), Holder), "index": (lambda x, a, b: x * [a, b].index(b), Holder),
    "key, tensor": (lambda x, a, b: x * len({a, b}), lambda: torch.ones(2)),
    "key, module": (lambda x, a, b: x * len({a, b}), nn.ReLU), "key, closure": (lambda x, a, b: x * len({a, b}), counter),
}


@pytest.mark.parametrize("name", APART)
def test_objects_that_become_one(name):
    """What is written through one name is seen through another only if both are of one object."""
    function, make = APART[name]
    compiled, x = minicompile.compile(function, backend="eager"), torch.ones(3)
    for tied in (False, False, True, False, True):
        a, c = make(), make()
        b, d = (a, c) if tied else (make(), make())
        assert torch.equal(compiled(x, a, b), function(x, c, d))


class TwoBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("a", torch.ones(3))
        self.register_buffer("b", torch.ones(3) * 5)

    def forward(self, x):
        self.a.add_(1)
        self.b.mul_(2)
        return x + self.a + self.b


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_parts_of_a_module_that_become_one(backend):
    first, second, x = TwoBuffers(), TwoBuffers(), torch.ones(3)
    compiled = minicompile.compile(apply, backend=backend)
    for tie in (False, False, True, True):
        for m in (first, second):
            m.b = m.a if tie else m.b
        assert torch.equal(compiled(first, x), second(x))

    def tied(m, x):
        return x * len(list(m.modules())) * len(list(m.parameters()))
    compiled, m = minicompile.compile(tied, backend=backend), nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    for change in (lambda: None, lambda: setattr(m[0], "weight", m[1].weight), lambda: m.__setitem__(0, m[1])):
        change()
        assert torch.equal(compiled(m, x), tied(m, x))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_overlapping_memory(backend):
    def f(x, y):
        x.mul_(2)
        y.add_(1)
        return x + y
    compiled = minicompile.compile(f, backend=backend)
    for make in (lambda: (torch.ones(4), torch.ones(4)), lambda: (lambda b: (b[:4], b[1:5]))(torch.arange(6.0)),
                 lambda: (lambda b: (b[:4], b[4:]))(torch.arange(8.0)), lambda: (lambda b: (b, b))(torch.ones(4))):
        a, b = make(), make()
        torch.testing.assert_close(compiled(*a), f(*b))
        torch.testing.assert_close(a, b)


# ---- names of libraries ------------------------------------------------------------------------------------

def imports_inside(x):
    import made_package.part
    from made_package.part import scale
    return scale(x) + made_package.part.K


LIBRARIES = {
    "function of torch": (F, "linear", lambda *a: torch.zeros(4), lambda x: F.linear(x, x)),
    "through a module's code": (F, "linear", lambda *a: torch.zeros(4), lambda x, m=nn.Linear(4, 4): m(x)),
    "global of a module's code": (nn.modules.linear, "F", types.SimpleNamespace(linear=lambda *a: torch.zeros(4)),
                                  lambda x, m=nn.Linear(4, 4): m(x)),
    "class": (nn, "ReLU", nn.Tanh, lambda x: nn.ReLU()(x)), "constant": (math, "pi", 3.0, lambda x: x * math.pi),
    "function of Python": (math, "sqrt", lambda v: 9.0, lambda x: x * math.sqrt(4)),
    "name that was absent": (math, "tau2", 9.0, lambda x: x * (2 if hasattr(math, "tau2") else 3)),
    "flag": (torch.backends.cudnn, "benchmark", True, lambda x: x * (2 if torch.backends.cudnn.benchmark else 3)),
    "builtin": (builtins, "divmod", lambda a, b: (9, 9), lambda x: x * divmod(7, 3)[0]),
    "environment": (os, "environ", {"MADE": "abc"}, lambda x: x * len(os.getenv("MADE", ""))),
    "import": (sys.modules, "made_package.part", types.SimpleNamespace(scale=lambda x: x * 7, K=1), imports_inside),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_names_of_libraries(name, monkeypatch):
    package, part = types.ModuleType("made_package"), types.ModuleType("made_package.part")
    package.part, part.K, part.scale = part, 2, lambda x: x * part.K
    settings = torch.backends.ContextProp.__set__.__globals__         # PyTorch's own test helpers freeze them
    monkeypatch.setitem(settings, "flags_frozen", lambda: False)
    monkeypatch.setitem(sys.modules, "made_package", package)
    monkeypatch.setitem(sys.modules, "made_package.part", part)
    owner, attribute, value, function = LIBRARIES[name]
    compiled, x = minicompile.compile(function, backend="aot_eager"), double(torch.float32)
    for patch in (False, True, False):
        with monkeypatch.context() as m:
            if patch and owner is sys.modules:
                m.setitem(owner, attribute, value)
            elif patch:
                m.setattr(owner, attribute, value, raising=False)
            torch.testing.assert_close(compiled(x), function(x))
    part.K = 5
    torch.testing.assert_close(compiled(x), function(x))


# ---- containers and plain Python -------------------------------------------------------------------------

@dataclasses.dataclass
class Slotted:
    __slots__ = ("a",)
    a: int


class Plain:
    kind = 1

    def __init__(self):
        self.a, self.items, self.table, self.tags = 1, [1, [2]], {"x": 1, "y": 2}, {1, 2}
        self.order, self.queue, self.slot = collections.OrderedDict(p=1, q=2), collections.deque([1, 2]), Slotted(3)
        self.default, self.nested = collections.defaultdict(int, z=1), (1, (2, [3]))
        self.call = functools.partial(torch.mul, other=2)

    def method(self, x):
        return x + self.a

    def __len__(self):
        return self.a


def reads(s, x):
    y = s.method(x) * len(s) + s.kind
    y = y + sum(v if isinstance(v, int) else v[0] for v in s.items)
    for n, (k, v) in enumerate(s.table.items()):
        y = y * (n + 1) + v * len(k)
    for n, k in enumerate(s.order):
        y = y * (n + 1) + len(k)
    y = y + len(s.tags) + (3 in s.tags) + ("missing" in s.table) + s.table.get("maybe", 0)
    y = y + s.slot.a + s.default["z"] + s.nested[1][1][0] + len(s.queue) + s.queue[0]
    return s.call(y) + (1 if hasattr(s, "extra") else 0) + getattr(s, "maybe", 0) + isinstance(s, list) + (SCALE * TABLE["a"] + len(LIST))


PLAIN_CHANGES = {
    "attribute": lambda s: setattr(s, "a", 2), "attribute's type": lambda s: setattr(s, "a", True),
    "__dict__": lambda s: s.__dict__.update(a=4), "new __dict__": lambda s: setattr(s, "__dict__", {**s.__dict__, "a": 6}),
    "list": lambda s: s.items.append(5), "nested list": lambda s: s.items[1].__setitem__(0, 7), "other list": lambda s: setattr(s, "items",
        [3]),
    "dict value": lambda s: s.table.update(x=5), "dict order": lambda s: s.table.update(x=s.table.pop("x")),
    "dict key": lambda s: s.table.update(zz=3), "key that was absent": lambda s: s.table.update(missing=0),
    "get that missed": lambda s: s.table.update(maybe=4), "ordered dict": lambda s: s.order.move_to_end("p"),
    "set": lambda s: s.tags.add(3), "set of the same size": lambda s: (s.tags.remove(2), s.tags.add(3)),
    "deque": lambda s: s.queue.appendleft(9), "slot": lambda s: setattr(s.slot, "a", 8), "default dict": lambda s: s.default.update(z=5),
    "list in tuple": lambda s: s.nested[1][1].__setitem__(0, 9), "partial": lambda s: setattr(s, "call", functools.partial(torch.mul,
        other=3)),
    "keywords of a partial": lambda s: s.call.keywords.update(other=5), "absent attribute": lambda s: setattr(s, "extra", 0),
    "getattr that missed": lambda s: setattr(s, "maybe", 5), "class": lambda s: setattr(s, "__class__",
        type("P", (Plain,), {"method": lambda self, x: x * 9})),
    "method on the instance": lambda s: setattr(s, "method", lambda x: x - 1), "class attribute on the instance": lambda s: setattr(s,
        "kind", 4),
    "global": lambda s: globals().update(SCALE=3.0), "global's type": lambda s: globals().update(SCALE=2),
    "global dict": lambda s: TABLE.update(a=8), "global list": lambda s: LIST.append(3),
    "builtin": lambda s: globals().update(len=lambda v: 9),
}


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("name", PLAIN_CHANGES)
def test_plain_objects(name, written, monkeypatch):
    monkeypatch.setitem(globals(), "SCALE", SCALE), monkeypatch.setitem(globals(), "TABLE", dict(TABLE))
    monkeypatch.setitem(globals(), "LIST", list(LIST))
    state, x = Plain(), torch.ones(3)
    compiled = minicompile.compile(reads, backend="eager")
    for i in range(4):
        torch.testing.assert_close(compiled(state, x), reads(state, x))
        write_everywhere([state] if written else [], i)
    try:
        PLAIN_CHANGES[name](state)
        for _ in range(2):
            torch.testing.assert_close(compiled(state, x), reads(state, x))
    finally:
        globals().pop("len", None)


def test_a_cache_that_is_cleared():
    @functools.lru_cache
    def looked_up(n):
        return table[n]
    table, x = {1: 2}, torch.ones(3)
    compiled = minicompile.compile(lambda x: x * looked_up(1), backend="eager", fullgraph=True)
    for change in (lambda: None, lambda: table.update({1: 7}), looked_up.cache_clear):
        change()
        assert torch.equal(compiled(x), x * looked_up(1))


def test_a_version_for_other_sizes_does_not_call_the_cached_function():
    """It would do all of its work, in a cache of one entry at every call."""
    @functools.lru_cache(maxsize=1)
    def mask(n):
        asked.append(n)
        return torch.ones(n, n).tril()

    @functools.lru_cache(maxsize=1)
    def scale(n, *, by):
        asked.append(-n)
        return by / n
    asked = []
    compiled = minicompile.compile(lambda x: x @ mask(len(x)) * scale(len(x), by=2), backend="eager", fullgraph=True)
    inputs = [torch.rand(n, n) for n in (2, 3, 4)]
    for x in inputs:
        compiled(x)
    asked.clear()
    for x in inputs:
        assert torch.equal(compiled(x), x @ torch.ones_like(x).tril() * (2 / len(x)))
    assert sorted(asked) == [-4, -3, -2, 2, 3, 4]


def test_attributes_of_a_partial():
    def f(p, x):
        return p(x) * getattr(p, "scale", 3)
    compiled, x = minicompile.compile(f, backend="eager", fullgraph=True), torch.ones(3)
    part = functools.partial(torch.add, other=1)
    for change in (lambda: None, lambda: setattr(part, "scale", 5), lambda: setattr(part, "scale", 6), lambda: delattr(part, "scale")):
        change()
        assert torch.equal(compiled(part, x), f(part, x))


class Field:
    """A data descriptor that keeps its value under its own name."""

    def __set_name__(self, owner, name):
        self.name = name

    def __get__(self, obj, owner=None):
        return obj.__dict__[self.name] * 2

    def __set__(self, obj, value):
        obj.__dict__[self.name] = value


class WithField:
    rate = Field()

    def __init__(self):
        self.rate = 3


FACTS = {
    "data descriptor": (lambda s, x: x * s.rate, WithField(), lambda s: setattr(s, "rate", 5)),
    "bound of a deque": (lambda q, x: (q.append(5), x * sum(q))[1], collections.deque([1, 2]), lambda q: collections.deque([1, 2],
        maxlen=2)),
    "key of bytes": (lambda d, x: x * d.get(b"k", 1), {b"a": 1}, lambda d: d.update({b"k": 3})),
    "offset": (lambda t, x: x * t.storage_offset(), BASE[:4], lambda t: BASE[4:8]),
    "offset of a view": (lambda t, x: x * t[1:].storage_offset(), BASE[:4], lambda t: BASE[4:8]),
}


@pytest.mark.parametrize("name", FACTS)
def test_facts_of_an_argument(name):
    function, argument, change = FACTS[name]
    compiled, x = minicompile.compile(function, backend="eager", fullgraph=True), torch.ones(3)
    for made in (lambda a: a, change, lambda a: a):
        changed = made(argument)
        argument = argument if changed is None else changed
        twin = copy.copy(argument) if not isinstance(argument, torch.Tensor) else argument
        assert torch.equal(compiled(argument, x), function(twin, x))


@pytest.mark.parametrize("number", [numpy.bool_(True), numpy.bool_(False), 2**63, 2**63 + 5, -2**63])
def test_numbers_that_are_not_what_they_seem(number):
    """PyTorch takes a truth value of NumPy for a float, and the bits of an unsigned number for a signed one."""
    for f in (lambda x, n: x * n, lambda x, n: x + n, lambda x, n: n - x):
        x = torch.arange(4)
        for backend in ("eager", "loops"):
            minicompile.reset()
            got = minicompile.compile(f, backend=backend)(x, number)
            assert got.dtype == f(x, number).dtype and torch.equal(got, f(x, number))


@pytest.mark.parametrize("name", ["method", "kind", "__len__", "a", "extra"])
def test_plain_classes(name):
    state, x = Plain(), torch.ones(3)
    compiled = minicompile.compile(reads, backend="eager")
    compiled(state, x)
    value = {"method": lambda self, x: x * 4, "kind": 6, "__len__": lambda self: 12, "a": property(lambda self: 5), "extra": 1}[name]
    with attribute(Plain, name, value):
        torch.testing.assert_close(compiled(state, x), reads(state, x))
    torch.testing.assert_close(compiled(state, x), reads(state, x))


# ---- nothing is compiled twice without need, and nothing is kept ----------------------------------------

def versions(function, calls):
    made = []
    compiled = minicompile.compile(function, backend=lambda gm, inputs: made.append(gm) or gm.forward)
    for call in calls:
        compiled(*call)
    return len(made)


def test_one_version_serves_equal_calls():
    m, x = model(), double(torch.float32)
    assert versions(apply, [(m, x)] * 5) == 1
    s = Plain()
    assert versions(reads, [(s, torch.ones(3)), (s, torch.zeros(3)), (s, torch.ones(3))]) == 1
    state = types.SimpleNamespace(f=make_closure(3))
    assert versions(lambda s, x: s.f(x), [(state, x)] * 4) == 1
    models = [nn.Linear(4, 4) for _ in range(100)]
    assert versions(lambda m, x: m(x), [(m, x) for m in models * 2]) == 1


def make_closure(n):
    return lambda x: x * n


def test_models_of_one_class_share_an_entry_and_nothing_else():
    first, second, x = nn.Linear(4, 4), nn.Linear(4, 4), double(torch.float32)
    compiled = minicompile.compile(apply, backend="eager")
    for m in (first, second, first, second):
        torch.testing.assert_close(compiled(m, x), m(x))
    second.weight.data = torch.zeros(4, 4)
    first.bias = nn.Parameter(torch.full((4,), 9.0))
    for m in (first, second, first, second):
        torch.testing.assert_close(compiled(m, x), m(x))


def test_addresses_used_again():
    """Objects die and others get their addresses."""
    compiled = minicompile.compile(apply, backend="eager")
    x = double(torch.float32)
    for i in range(60):
        m = nn.Sequential(nn.Linear(4, 4), nn.ReLU() if i % 3 else nn.Tanh())
        m.scale = float(i)
        torch.testing.assert_close(compiled(m, x), m(x))
        del m
    holder = types.SimpleNamespace(m=nn.Linear(4, 4))
    compiled = minicompile.compile(lambda h, x: h.m(x) * h.m.gain, backend="eager")
    for i in range(30):
        holder.m.gain = i + 0.5
        torch.testing.assert_close(compiled(holder, x), holder.m(x) * holder.m.gain)


def test_a_model_that_writes_to_itself():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.seen = nn.Linear(4, 4), torch.zeros(())

        def forward(self, x):
            self.seen = self.seen + 1
            return self.linear(x) + self.seen
    m, x = Counting(), double(torch.float32)
    twin = copy.deepcopy(m)
    compiled = minicompile.compile(m, backend="eager")
    for _ in range(40):
        torch.testing.assert_close(compiled(x), twin(x))
    assert m.seen == 40


@pytest.fixture
def full_checks(monkeypatch):
    """The memos that were not enough, in order."""
    if stable.unchanged is None:
        pytest.skip("the C extension is not built")
    checks, refresh = [], codegen.refresh
    monkeypatch.setattr(codegen, "refresh", lambda *args: checks.append(args[0]) or refresh(*args))
    return checks


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.state = nn.Linear(4, 4), 0, torch.zeros(4)

    def forward(self, x):
        self.last = self.linear(x) * self.calls + self.state
        self.state = self.state + 1
        self.calls += 1
        return self.last


def test_objects_that_are_written_to_need_no_full_checks(full_checks):
    m, x = Counting(), double(torch.float32)
    twin, compiled = copy.deepcopy(m), minicompile.compile(m, backend="eager")
    for i in range(60):
        if i == 20:
            full_checks.clear()
        if i == 40:                                  # what is read is still checked
            m.linear.weight.data, twin.linear.weight.data = torch.ones(4, 4), torch.ones(4, 4)
            m.state, twin.state = torch.zeros(3, 4), torch.zeros(3, 4)
        m.epoch = i
        torch.testing.assert_close(compiled(x), twin(x))
    assert len(full_checks) < 10 and m.calls == 60


class Collecting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x):
        self.sums = []
        for i, layer in enumerate(self.layers):
            x = layer(x) + (x.flip(0) if i % 2 else x)
            self.sums.append(x.sum().item())
        return x


def test_a_loop_with_breaks_needs_no_full_checks(full_checks):
    """The first piece makes a list, of which the others know the class, and the versions of the loop's body differ by a number, of
    which each version sees one value."""
    m, x, sums = Collecting(), double(torch.float32), []
    twin, compiled = copy.deepcopy(m), minicompile.compile(m, backend="eager")
    for i in range(30):
        if i == 15:
            full_checks.clear()
        torch.testing.assert_close(compiled(x), twin(x))
        sums += [m.sums, twin.sums]
    assert sums[::2] == sums[1::2] and not full_checks


def test_values_that_replace_others_in_a_written_object():
    """A value that died and another at its address: numbers, modules, containers, functions, tuples."""
    def f(s, x):
        return s.layer(x) * s.rate + len(s.names) + s.pair[0] + s.scale(x)
    s, x = types.SimpleNamespace(), double(torch.float32)
    scales = [lambda x: x + 1, lambda x: x * 2]
    compiled = minicompile.compile(f, backend="eager")
    for i in range(40):
        s.__dict__.clear()
        gc.collect()
        s.noise, s.rate, s.names, s.pair = i, float(i // 10), ["a"] * (1 + i // 10), (i // 20, [1])
        s.layer = nn.Linear(4, 4)
        s.scale = scales[i // 20]
        for _ in range(3):
            s.noise += 1
            torch.testing.assert_close(compiled(s, x), f(s, x))


def test_dead_models_are_freed():
    def train(make):
        m, x = make(), double(torch.float32)
        compiled = minicompile.compile(m, backend="aot_eager")
        compiled(x).sum().backward()
        compiled(x)
        return weakref.ref(m), weakref.ref(next(m.parameters()))
    for make in (Model, lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())):
        references = train(make)
        gc.collect()
        assert [r() for r in references] == [None, None]


def test_dead_closures_and_classes_are_freed():
    def local():
        class Local(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(4, 4)

            def forward(self, x):
                return self.linear(x) + 1
        m = Local()
        big = torch.ones(100)

        def f(x):
            return m(x) + big.sum()
        compiled, x = minicompile.compile(f, backend="eager"), double(torch.float32)
        compiled(x), compiled(x)
        return [weakref.ref(o) for o in (m, m.linear.weight, big, f, Local)]
    references = local()
    gc.collect()
    assert [r() for r in references] == [None] * 5


def test_a_dead_object_takes_its_entry_along():
    def f(x, m):
        return x * 2 if m is HELD else x
    compiled = minicompile.compile(f, backend="eager")
    global HELD
    for _ in range(3):
        HELD = nn.Linear(2, 2)
        compiled(torch.ones(2), HELD)
        reference = weakref.ref(HELD)
        HELD = None
        gc.collect()
        assert reference() is None


HELD = None


def test_reset_frees_classes_whose_parts_were_read():
    def used():
        class Made:
            rows = [1, 2]

            def method(self, x):
                return x * self.rows[0]
        compiled, x = minicompile.compile(lambda x: Made().method(x), backend="eager", fullgraph=True), torch.ones(3)
        assert torch.equal(compiled(x), x)
        return weakref.ref(Made)
    made = used()
    minicompile.reset()
    gc.collect()
    assert made() is None


def test_reset_removes_everything():
    def f(m, x):
        return m(x) + 1
    m, x = nn.Linear(4, 4), double(torch.float32)
    compiled = minicompile.compile(f, backend="eager")
    compiled(m, x)
    (target,) = frames.hook.targets_of(f.__code__)
    target = weakref.ref(target)
    minicompile.reset()
    gc.collect()
    assert frames.hook.targets_of(f.__code__) is None and not frames.hook.is_installed()
    assert target() is None
    assert torch.equal(compiled(m, x), f(m, x)) and not frames.hook.is_installed()


def memo_of(things, same=(), tensors=(), outputs=(), arguments=1, references=()):
    return stable.Memo(arguments, references, tuple(things), same, tensors, outputs)


# ---- what the memo asks of tensors ------------------------------------------------------------------------

def complex_part(conjugate):
    """The imaginary parts of the same memory, with the negation done or pending: nothing else differs."""
    z = torch.ones(3, 4, dtype=torch.complex64) * 1j
    return (z.conj() if conjugate else z).imag, z


def written(before, after):
    """make, change: `t.data` is set to two tensors in turn."""
    def make():
        t = nn.Parameter(torch.ones(3, 4))
        t.data = before()
        return t
    return make, lambda t: setattr(t, "data", after())


def same_memory(before, after):
    held = []

    def make():
        held[:] = before()
        return held[0]
    return make, lambda t: setattr(t, "data", after(*held))


IN_PLACE = {
    "size": written(lambda: torch.ones(3, 4), lambda: torch.ones(3, 5)),
    "rank": written(lambda: torch.ones(3, 4), lambda: torch.ones(12)),
    "strides": written(lambda: torch.ones(4, 4), lambda: torch.ones(4, 4).t()),
    "dtype": written(lambda: torch.ones(3, 4), lambda: torch.ones(3, 4, dtype=torch.float16)),
    "dtype without a kernel": (lambda: torch.ones(4), lambda t: setattr(t, "data", torch.empty(4, dtype=torch.uint3))),
    "bits": (lambda: torch.ones(4), lambda t: setattr(t, "data", torch.ones(4).view(torch.int32))),
    "device": (lambda: torch.ones(3), lambda t: torch.utils.swap_tensors(t, torch.ones(3, device="meta"))),
    "negation pending": same_memory(lambda: complex_part(False), lambda t, z: z.conj().imag),
    "conjugation pending": same_memory(lambda: (torch.ones(3, dtype=torch.complex64) * 1j,), lambda t: t.clone().conj()),
    "requires_grad": (lambda: torch.ones(3), lambda t: t.requires_grad_()),
    "requires_grad of a parameter": (lambda: nn.Parameter(torch.ones(3)), lambda t: t.requires_grad_(False)),
    "grad_fn": (lambda: torch.ones(3), lambda t: t.mul_(torch.ones(3, requires_grad=True))),
    "resize_": (lambda: torch.ones(3), lambda t: t.resize_(2)), "t_": (lambda: torch.ones(3, 4), lambda t: t.t_()),
    "as_strided_": (lambda: torch.ones(4, 4), lambda t: t.as_strided_((4, 4), (1, 4))),
    "unsqueeze_": (lambda: torch.ones(3), lambda t: t.unsqueeze_(0)), "set_": (lambda: torch.ones(3), lambda t: t.set_(torch.ones(5))),
    "no memory": (lambda: torch.zeros(3), lambda t: torch.utils.swap_tensors(t, torch._efficientzerotensor(3))),
    "sparse": (lambda: torch.ones(3, 3), lambda t: torch.utils.swap_tensors(t, torch.ones(3, 3).to_sparse())),
    "inference": (lambda: torch.ones(3), lambda t: torch.utils.swap_tensors(t, torch.inference_mode()(torch.ones)(3))),
    "class": (lambda: torch.ones(3), lambda t: setattr(t, "__class__", Sub)),
    "parameter": (lambda: nn.Parameter(torch.ones(3)), lambda t: setattr(t, "__class__", torch.Tensor)),
}


@pytest.mark.skipif(stable.unchanged is None, reason="the C extension is not built")
@pytest.mark.parametrize("free", [(0,), (1,), (0, 2), (0, 1, 2)])
def test_a_memo_knows_sizes_that_vary_by_what_guards_know_of_them(free):
    sizes, x = list(itertools.product((0, 1, 3, 4), (1, 2, 4), (2, 4))), torch.ones(3, 4, 2)
    memo = stable.Memo(1, (), (), (), (0,), (), (), (), (TensorSpec.of(x, free).free_dims,))
    assert memo.record(x) and memo(x) == ()
    for t in (t for size in sizes for t in (torch.ones(size), torch.ones(size[::-1]).permute(2, 1, 0), torch.ones(*size, 2)[..., 0])):
        fits = all(n > 1 if d in free else n == x.shape[d] for d, n in enumerate(t.shape)) and t.is_contiguous()
        assert (memo(t) is not None) == fits, (t.shape, t.stride())
    for t in (x[0], x.double(), x.clone().requires_grad_(), nn.Parameter(x), x.to("meta"), x.unsqueeze(0)):
        assert memo(t) is None


def test_strides_that_do_not_follow_from_sizes_are_no_matter_of_a_memo():
    image = torch.ones(4, 3, 2, 5).to(memory_format=torch.channels_last)
    for t, steps in ((image, ()), (torch.ones(4, 3).t(), ()), (torch.ones(4, 6)[:, :3], (0,))):
        assert TensorSpec.of(t, (0,), steps).free_dims == 0


def test_a_sequence_that_grows_is_no_reason_to_check_all_again(monkeypatch):
    checked, real = [], codegen.refresh

    @marks.passed_over
    def counted(memo, full, arguments):
        checked.append(full.__name__)
        return real(memo, full, arguments)
    monkeypatch.setattr(codegen, "refresh", counted)
    f = minicompile.compile(lambda x, y: torch.cat([x, y]) * x.shape[0], backend="eager")
    for n in range(3, 40):
        if n == 8:
            checked.clear()
        x, y = torch.ones(n, 4), torch.ones(1, 4)
        assert torch.equal(f(x, y), torch.cat([x, y]) * n)
    assert not checked or stable.unchanged is None
    assert torch.equal(f(torch.ones(4, 4).t(), y), torch.ones(5, 4) * 4) and torch.equal(f(torch.ones(1, 4), y), torch.ones(2, 4))


@pytest.mark.skipif(stable.unchanged is None, reason="the C extension is not built")
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_memo_sees_every_change_of_a_tensor_in_place(name):
    make, change = IN_PLACE[name]
    with torch.no_grad() if name != "grad_fn" else contextlib.nullcontext():
        reached, argument = make(), make()
        parts = {"weight": reached}
        by_root, by_value = memo_of([(stable.DICT, 0, ("weight",))], tensors=(1,), outputs=(1,)), memo_of([], tensors=(0,))
        assert by_root.record(parts) and by_value.record(argument)
        for _ in range(2):
            assert by_root(parts) == (reached,) and by_value(argument) == ()
        change(reached)
        assert by_root(parts) is None
        change(argument)
        assert by_value(argument) is None


@pytest.mark.skipif(stable.unchanged is None, reason="the C extension is not built")
def test_tensors_that_cannot_be_asked_are_checked_in_full(monkeypatch):
    m, x = model(), double(torch.float32)
    wrong = [(t, t._cdata, torch._C._dispatch_keys(t).raw_repr() + i) for i, t in enumerate(stable.examples())]
    real_setup, memo = stable.unchanged.setup, memo_of([], tensors=(0,))
    try:
        assert not real_setup(stable.PLAIN_TYPES, (0,) * len(stable.QUESTIONS), stable.HAS_VERSION, wrong, (None, None))
        assert not memo.record(x) and memo(x) is None
        compiled = minicompile.compile(apply, backend="eager")
        for _ in range(3):
            torch.testing.assert_close(compiled(m, x), apply(m, x))
        m.blocks[0].linear.weight.data = torch.ones(4, 4)
        torch.testing.assert_close(compiled(m, x), apply(m, x))
    finally:
        assert stable.find_tensors()
    assert memo.record(x) and memo(x) == ()


@pytest.mark.parametrize("name", ["negation pending", "no memory"])
def test_memory_that_is_not_the_value(name):
    """Neither is visible in sizes, strides or dtype, and generated code reads the memory."""
    class Bias(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.ones(3, 4))

        def forward(self, x):
            return x * 2 + self.p

    m, x, (part, z) = Bias(), torch.ones(3, 4), complex_part(False)
    m.p.data = part
    compiled = minicompile.compile(m)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), m(x))
    if name == "no memory":
        x = torch._efficientzerotensor((3, 4))
    else:
        m.p.data = z.conj().imag
    for _ in range(2):
        torch.testing.assert_close(compiled(x), m(x))


@pytest.mark.parametrize("reads, text", [
    (["x", "__w[0]", "__w[1]"], "(x, ) + __w[0:2]"), ([], "()"), (["__w[0]", "__u[1]", "__u[2]"], "__w[0:1] + __u[1:3]"),
    (["__w[1]", "__w[0]", "y", "z"], "__w[1:2] + __w[0:1] + (y, z, )"),
    (["__w[3]", "x", "__w[0]", "y", "__w[2]"], "(*__w[3:4], *(x, ), *__w[0:1], *(y, ), *__w[2:3])")])
def test_inputs_are_put_together(reads, text):
    known = {"__w": ("a", "b", "c", "d"), "__u": ("e", "f", "g"), "x": 1, "y": 2, "z": 3}
    assert codegen.tuple_of_reads(reads) == text
    assert eval(text, known) == tuple(eval(r, known) for r in reads)


@pytest.mark.skipif(stable.unchanged is None, reason="the C extension is not built")
def test_a_version_is_believed_only_after_the_values_were_compared():
    d = {"read": nn.Linear(2, 2), "unread": 0}
    memo, first = memo_of([(stable.DICT, 0, ("read", "absent"))], same=(1,), outputs=(1,)), d["read"]
    assert memo.record(d) and memo(d) == (first,)
    for i in range(3):
        d["unread"] = i
        assert memo(d) == (first,) and memo(d) == (first,)
    d["read"] = nn.Linear(2, 2)
    assert memo(d) is None and memo(d) is None
    d["unread"] = 7
    assert memo(d) is None
    d["read"] = first
    assert memo(d) == (first,) and memo(d) == (first,)
    d["absent"] = 1
    assert memo(d) is None
    del d["absent"], first
    for _ in range(20):                                                  # at the address of the first, perhaps
        d["read"] = None
        gc.collect()
        d["read"] = nn.Linear(2, 2)
        assert memo(d) is None


STRIDES_READ = dict(
    number=lambda x: x * x.stride(0), from_the_end=lambda x: x * x.stride(-2), branch=lambda x: x.sum() + (1 if x.stride()[0] > 50 else 0),
    window=lambda x: torch.as_strided(x, (1, 2), (x.stride(0), 1)) * x.stride(0), of_a_view=lambda x: x * x[:, 1:].stride(0),
    of_a_result=lambda x: x * torch.stack([x])[0].stride(0), shared=lambda x: x.sum() + x.is_shared())


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("f", STRIDES_READ.values(), ids=STRIDES_READ)
@pytest.mark.parametrize("wrapped", [lambda t: t, torch.nn.Parameter])
def test_strides_that_no_operator_looks_at_are_guarded_when_the_program_reads_them(f, dynamic, wrapped):
    compiled = minicompile.compile(f, backend="eager", dynamic=dynamic)
    memory = torch.ones(200)
    for x in (torch.ones(1, 4), memory.as_strided((1, 4), (99, 1)), torch.ones(1, 4), torch.ones(1, 6)[:, :4],
              torch.ones(1, 4).share_memory_(), torch.ones(0, 4), memory.as_strided((0, 4), (99, 2)),
              torch.ones(1, 5), memory.as_strided((1, 5), (99, 1))):
        if x.numel() or f is not STRIDES_READ["window"]:
            assert torch.equal(compiled(wrapped(x)), f(wrapped(x)))


class Counted(nn.Module):
    calls, scale = 0, 1.0

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        Counted.calls += 1
        return self.twice(self.linear(x)) * self.scale + Counted.calls

    def twice(self, x):
        return x * 2


def test_classes_that_are_written_to_need_no_full_checks(full_checks):
    """And what is read in them is still checked: methods, also at the address of one that died, data of other types, bases."""
    m, x = Counted(), double(torch.float32)
    Counted.calls = 0
    compiled = minicompile.compile(m, backend="eager")
    for i in range(2500):                            # CPython 3.13 gives a class a thousand versions
        torch.testing.assert_close(compiled(x), m.linear(x) * 2 + i + 1)
        if i == 20:
            full_checks.clear()
    assert len(full_checks) < 5 and Counted.calls == 2500
    usual = Counted.twice
    for i in range(20):
        scale = (1.5, 3, 2.0)[i % 3]
        Counted.twice, Counted.scale, Counted.calls = (lambda self, x, i=i: x * i), scale, 0
        torch.testing.assert_close(compiled(x), m.linear(x) * i * scale + 1)
    Counted.twice, Counted.scale = usual, 1.0

    class Other(nn.Module):
        def twice(self, x):
            return x * 5
    del Counted.twice
    try:
        for bases, factor in (((nn.Module, ), None), ((Other, ), 5), ((nn.Module, ), None), ((Other, ), 5)):
            Counted.__bases__, Counted.calls = bases, 0
            if factor is None:
                with pytest.raises(AttributeError):
                    compiled(x)
            else:
                torch.testing.assert_close(compiled(x), m.linear(x) * factor + 1)
    finally:
        Counted.__bases__, Counted.twice = (nn.Module, ), usual


def test_an_object_of_a_class_that_was_written_to():
    """The class gets a `__dict__` or a `__getattribute__` of its own, or an attribute that hides the object's."""
    class Plain:
        k, calls = 1.0, 0
    read, x, o = minicompile.compile(lambda o, x: x * o.k * o.n, backend="eager", dynamic=False), double(torch.float32), Plain()
    o.n = 2
    for name, value in (("k", 2.0), ("calls", 5), ("n", 7), ("n", property(lambda self: 3)), ("k", property(lambda self: 4.0)),
                        ("calls", 6), ("__getattribute__", lambda self, name: 5 if name == "n" else object.__getattribute__(self, name)),
                        ("calls", 7)):
        read(o, x), read(o, x)
        setattr(Plain, name, value)
        torch.testing.assert_close(read(o, x), x * o.k * o.n)


def test_modules_made_for_the_call_do_not_ask_for_their_classes_again(monkeypatch, full_checks):
    """Another module is checked in full, but what its class has was asked once."""
    def f(m, x):
        return m(x).relu()
    asked, class_has = [], guards.class_has
    monkeypatch.setattr(guards, "class_has", lambda *args: asked.append(args[1]) or class_has(*args))
    compiled, x = minicompile.compile(f, backend="eager"), double(torch.float32)
    for i in range(100):
        if i == 30:
            asked.clear(), full_checks.clear()
        m = nn.Linear(4, 4)
        torch.testing.assert_close(compiled(m, x), f(m, x))
    assert len(full_checks) >= 70 and not asked
