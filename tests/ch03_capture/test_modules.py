"""nn.Module in its many forms: containers, hooks, buffers, library layers, custom __call__ and __getattr__."""
import copy
import functools

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from recorders import Recorder

import minicompile

pytestmark = pytest.mark.usefixtures("fresh")


class Containers(nn.Module):
    def __init__(self):
        super().__init__()
        self.list = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.table = nn.ModuleDict({"a": nn.Linear(4, 4), "relu": nn.ReLU()})
        self.seq = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Identity())
        self.weights = nn.ParameterList([torch.ones(4), torch.zeros(4)])
        self.named = nn.ParameterDict({"s": torch.ones(4)})
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x):
        for i, layer in enumerate(self.list):
            x = layer(x) + i
        for name, m in self.table.items():
            x = m(x) if name in ("a", "relu") else x
        x = self.table["a"](x) + self.list[-1](x) + self.seq[0](x)
        for w in self.weights:
            x = x * w
        for m in list(self.list)[1:]:
            x = x + m.weight.sum()
        x = x + len(self.list) + len(self.seq) + self.named["s"]
        for n, p in self.list[0].named_parameters():
            x = x + p.mean() * len(n)
        for p in self.seq.parameters():
            x = x + p.sum()
        return self.seq(x) * self.scale + sum(b.sum() for b in self.buffers())


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4))
        self.calls, self.history, self.cache = 0, [], None

    def forward(self, x):
        self.count += 1
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        self.calls += 1
        if self.cache is None:
            self.cache = x * 2
        self.history.append(self.calls)
        return x + self.mean + self.cache


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.seen = []
        self.inner.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
        self.inner.register_forward_hook(lambda m, args, out: out * 2)

    def forward(self, x):
        return self.inner(x)


class Wrapper(nn.Module):
    """Looks up missing names on the wrapped module, as many wrappers do; class and static attributes."""
    gain = 2.0

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.config = {"act": "gelu", "sizes": [1, 2]}
        self.fn = F.relu
        self.part = functools.partial(torch.add, other=1)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    @property
    def size(self):
        return self.in_features * 2

    @staticmethod
    def shift(x):
        return x + 1

    def forward(self, x, *, extra=None, **kwargs):
        x = self.inner(x) + self.weight.sum() + self.size * self.gain
        x = self.part(self.fn(self.shift(x)))
        if self.config["act"] == "gelu" and hasattr(self, "bias") and not hasattr(self, "nothing"):
            x = F.gelu(x)
        return x if extra is None else x + extra + kwargs.get("more", 0)


class Callable(nn.Linear):
    def __call__(self, x):
        return super().__call__(x) + 1


MODULES = [
    (Containers, (3, 4)), (Buffers, (3, 4)), (Hooked, (3, 4)), (lambda: Wrapper(nn.Linear(4, 4)), (3, 4)),
    (lambda: nn.Sequential(Callable(4, 4), nn.Dropout(0.1)).eval(), (3, 4)),
    (lambda: nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.AvgPool2d(2), nn.Flatten(),
                           nn.LayerNorm(16), nn.Softmax(-1)), (2, 3, 4, 4)),
    (lambda: nn.MultiheadAttention(8, 2, batch_first=True), None),
    (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (2, 5, 8)),
    (lambda: nn.Sequential(nn.ConvTranspose1d(4, 3, 2), nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
                           nn.PReLU(), nn.Upsample(scale_factor=2), nn.AdaptiveMaxPool1d(2)), (2, 4, 5)),
    (lambda: nn.Bilinear(4, 4, 2), "pair"),
    (lambda: nn.CosineSimilarity(), "pair"),
    (lambda: nn.Sequential(nn.ZeroPad2d(1), nn.PixelShuffle(2), nn.Hardswish(), nn.ELU(inplace=True)), (1, 4, 3, 3)),
]


@pytest.mark.parametrize("make, shape", MODULES, ids=range(len(MODULES)))
def test_module(make, shape):
    torch.manual_seed(0)
    model = make()
    other = copy.deepcopy(model)
    if shape is None:
        q = torch.randn(2, 3, 8)
        inputs = [(q, q, q)] * 2
    elif shape == "pair":
        inputs = [(torch.randn(3, 4), torch.randn(3, 4))] * 2
    else:
        inputs = [(torch.randn(shape),) for _ in range(3)]
    backend = Recorder()
    compiled = minicompile.compile(model, backend=backend, fullgraph=True)
    for args in inputs:
        torch.manual_seed(3)
        expected = other(*args)
        torch.manual_seed(3)
        result = compiled(*args)
        torch.testing.assert_close(result, expected)
    loss = lambda out: sum(o.sum() for o in (out if isinstance(out, tuple) else (out,)))
    loss(result).backward() if loss(result).requires_grad else None
    loss(expected).backward() if loss(expected).requires_grad else None
    for p, q in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(p.grad, q.grad)
    for p, q in zip(model.buffers(), other.buffers()):
        torch.testing.assert_close(p, q)
    assert backend.graphs
    if isinstance(model, Buffers):
        assert model.calls == other.calls and model.history == other.history
        assert "mean" in model._buffers and "mean" not in model.__dict__


CHANGES = {
    "a buffer that was None": lambda m, x: setattr(m, "absent", x.sum()),
    "a buffer to None": lambda m, x: setattr(m, "scale", None),
    "registers a buffer, and sets it": lambda m, x: (m.register_buffer("late", x), setattr(m, "late", x * 2)),
    "writes to _buffers": lambda m, x: (m._buffers.update(late=x), setattr(m, "late", None)),
    "deletes a buffer": lambda m, x: delattr(m, "scale"),
    "a plain attribute": lambda m, x: setattr(m, "late", x),
    "registers a child": lambda m, x: m.add_module("late", nn.ReLU()),
    "a new child for None": lambda m, x: setattr(m, "child", nn.ReLU()),
    "another child for None": lambda m, x: setattr(m, "child", m.inner),
    "a parameter for None": lambda m, x: setattr(m, "bias", m.inner.bias),
    "a child to None": lambda m, x: setattr(m, "inner", None)}


@pytest.mark.parametrize("what", CHANGES)
def test_what_a_module_has_while_it_changes(what):
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.child = nn.Linear(2, 2), None
            self.register_buffer("absent", None)
            self.register_buffer("scale", torch.ones(2))
            self.register_parameter("bias", None)

        def forward(self, x):
            CHANGES[what](self, x)
            return names(self)

    def names(m):
        return [*map(list, (m.state_dict(), dict(m.named_children()), m._buffers, m._parameters, m._modules)), sorted(vars(m)),
                type(getattr(m, "late", None))]

    model, other, x = Changing(), Changing(), torch.ones(2)
    assert minicompile.compile(model)(x) == other(x)
    assert names(model) == names(other)


def test_attributes_of_a_new_module_are_moved_and_deleted():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.scale = nn.ReLU(), nn.Tanh(), 2

    def f(x):
        pair = Pair()
        del pair.first, pair.scale
        pair.second = None
        pair.third = nn.Sigmoid()
        return pair.third(x), hasattr(pair, "first"), hasattr(pair, "scale"), pair.second, [name for name, _ in pair.named_children()]

    x = torch.randn(3)
    got, want = minicompile.compile(f, backend="eager", fullgraph=True)(x), f(x)
    torch.testing.assert_close(got[0], want[0])
    assert got[1:] == want[1:]


def test_recompiles_on_what_the_trace_read():
    model = Wrapper(nn.Linear(4, 4))
    backend = Recorder()
    compiled = minicompile.compile(model, backend=backend)
    x = torch.randn(2, 4)
    changes = [lambda: None, lambda: setattr(model, "gain", 3.0), lambda: model.config.update(act="relu"),
               lambda: setattr(model, "fn", torch.tanh), lambda: setattr(model, "shift", lambda v: v + 5),
               lambda: model.inner.register_forward_hook(lambda m, a, o: o + 1),
               lambda: setattr(model, "inner", nn.Sequential(model.inner)) or setattr(model, "weight", torch.ones(3)) or setattr(
                   model, "in_features", 7)]
    for n, change in enumerate(changes, 1):
        change()
        torch.testing.assert_close(compiled(x), model(x))
        assert len(backend.graphs) == n, n
        torch.testing.assert_close(compiled(x), model(x))
        assert len(backend.graphs) == n


def test_dynamic_sizes():
    def f(x, w, n=3):
        b, t = x.shape
        y = (x @ w).view(b * t // 2, -1)
        for s in (x.shape[0],):
            y = y * s
        return y, b * 2 + 1, x[:b - 1].shape, torch.zeros(b, t) * n, x / b, [x.size(0)] + [1] * 2

    backend = Recorder()
    compiled = minicompile.compile(f, backend=backend)
    w = torch.randn(4, 6)
    for b in (4, 6, 8, 9, 10):
        x = torch.randn(b, 4)
        result, expected = compiled(x, w), f(x, w)
        torch.testing.assert_close(result, expected)
        assert [type(r) for r in result] == [type(r) for r in expected] and result[2] == expected[2]
    assert len(backend.graphs) == 2
    for n in (4, 5, 6):
        torch.testing.assert_close(compiled(x, w, n), f(x, w, n))
    assert len(backend.graphs) == 3


def test_same_tensor_twice_is_another_graph():
    def f(x, y):
        x.add_(1)
        return x + y
    compiled = minicompile.compile(f, backend="eager")
    a, b = torch.ones(2), torch.ones(2)
    torch.testing.assert_close(compiled(a, b), torch.full((2,), 3.0))
    torch.testing.assert_close(compiled(a, a), torch.full((2,), 6.0))
    torch.testing.assert_close(compiled(b, torch.zeros(2)), torch.full((2,), 2.0))


class Late(nn.Module):
    """Its constructor does something else before it lets nn.Module begin."""
    def __init__(self, f):
        print("before")                          # a graph break: the rest is captured as a frame of its own
        object.__setattr__(self, "early", 3)
        super(Late, self).__init__()
        self.f, self.layer = f, nn.Linear(2, 2)

    def forward(self, x):
        return self.f(x) * self.early


def test_modules_before_their_constructor(capsys):
    def make(x):
        m = Late(lambda x: x + 1)
        return m(x), [name for name, _ in m.named_parameters()]

    def call(x, m):
        try:
            return m(x)
        except AttributeError as error:
            return str(error)
    new = Late.__new__(Late)
    for f, args in ((make, ()), (call, (new,)), (lambda x, m: (x * (m is None), isinstance(m, nn.Module)), (new,))):
        for _ in range(2):
            assert repr(minicompile.compile(f, backend="eager")(torch.ones(2), *args)) == repr(f(torch.ones(2), *args))


SEPARATED, HAS = "-".join, frozenset({1, 2}).__contains__


def test_bound_methods_of_constants():
    """As `keyword.iskeyword`, which is one of a frozenset; a graph serves no other."""
    def f(x, k, count):
        return x + HAS(k), SEPARATED(["a", "b"]), count(2), list(filter(HAS, [0, 1, 2, 3]))
    compiled = minicompile.compile(f, backend="eager", fullgraph=True)
    for k in (1, 3):
        for count in ((1, 2, 2).count, (2, 3).count, [2].count):
            assert repr(compiled(torch.ones(1), k, count)) == repr(f(torch.ones(1), k, count))


def test_distributed_that_begins(tmp_path):
    def f(x):
        return x + (1 if torch.distributed.is_available() and torch.distributed.is_initialized() else 2)
    compiled = minicompile.compile(f, backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1)).item() == 2
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        assert compiled(torch.zeros(1)).item() == 1
    finally:
        torch.distributed.destroy_process_group()
    assert compiled(torch.zeros(1)).item() == 2


def test_hooks_of_all_modules_see_those_of_the_program():
    seen, compiled = [], minicompile.compile(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), backend="eager")
    whole = minicompile.compile(lambda x: compiled(x) + 1, backend="eager")
    x = torch.ones(3, 2)
    for call in (compiled, whole):
        call(x)
        handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, args: seen.append(type(module).__name__))
        try:
            call(x)
        finally:
            handle.remove()
        assert seen == ["Sequential", "Linear", "ReLU"]
        seen.clear()
    own = compiled.register_forward_hook(lambda module, args, out: out * 2)
    torch.testing.assert_close(compiled(x), compiled._orig_mod(x) * 2)
    torch.testing.assert_close(whole(x), compiled._orig_mod(x) * 2 + 1)
    own.remove()
    torch.testing.assert_close(whole(x), compiled._orig_mod(x) + 1)


def test_a_class_that_says_what_is_around_forward():
    class Doubled(nn.Linear):
        def _call_impl(self, *args, **kwargs):
            return super()._call_impl(*args, **kwargs) * 2

    model, x = nn.Sequential(Doubled(2, 2), nn.ReLU()), torch.randn(3, 2)
    torch.testing.assert_close(minicompile.compile(model, backend="eager")(x), model(x))
    torch.testing.assert_close(minicompile.compile(model[0], backend="eager")(x), model[0](x))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_module_of_torchscript_runs_eagerly():
    class Around(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.jit.script(torch.nn.Linear(3, 3))

        def forward(self, x):
            return self.inner(x + 1) * 2 + self.inner.weight.sum()

    module, alone = Around(), torch.jit.script(torch.nn.Linear(3, 3))
    for function in (module, lambda x: alone(x) * 2):
        compiled = minicompile.compile(function, backend="eager")
        for x in (torch.randn(2, 3), torch.randn(4, 3)):
            torch.testing.assert_close(compiled(x), function(x))
