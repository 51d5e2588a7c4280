"""What may be compiled, disabled, allowed in graphs and registered: the surface of the API, as torch.compile has it."""
import copy
import functools
import io
import pickle
import warnings

import pytest
import torch
from recorders import Recorder

import minicompile
from minicompile import stances
from minicompile.errors import GraphBreakError, MinicompileError

pytestmark = pytest.mark.usefixtures("fresh")


class Adder:
    def __init__(self, k):
        self.k = k

    def __call__(self, x):
        return x + self.k

    def method(self, x):
        return x * self.k

    @classmethod
    def of_class(cls, x):
        return x + len(cls.__name__)

    @staticmethod
    def static(x):
        return x - 1

    @minicompile.compile(backend="eager")
    def decorated(self, x):
        return x * self.k + 1


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x).relu()


def plain(x, k=3):
    return (x * k).sin()


def around(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs) + 100
    return wrapper


adder = Adder(5)
TARGETS = {
    "function": plain, "lambda": lambda x: x + 1, "method": adder.method, "class method": Adder.of_class,
    "static method": Adder.static, "object": adder, "partial": functools.partial(plain, k=4),
    "partial of a partial": functools.partial(functools.partial(plain), k=4), "partial of a method": functools.partial(adder.method),
    "partial of an object": functools.partial(adder), "wrapped": around(plain), "wrapped method": around(adder.method),
    "lru_cache": functools.lru_cache(plain), "builtin": torch.sin, "operator": torch.ops.aten.cos.default, "abs": abs,
    "method of a C type": torch.Tensor.add_, "method of a tensor class": torch.Tensor.exp, "functional": torch.nn.functional.gelu,
    "method of a module": torch.nn.ReLU().forward, "wrapped around a compiled one": around(minicompile.compile(plain, backend="eager")),
    "compiled twice": minicompile.compile(minicompile.compile(plain, backend="eager"), backend="eager"),
    "decorated method": adder.decorated, "partial of a compiled one": functools.partial(minicompile.compile(plain, backend="eager"), k=7),
}


@pytest.mark.parametrize("name", TARGETS)
def test_what_may_be_compiled(name):
    target, backend = TARGETS[name], Recorder()
    arguments = (torch.ones(3), 2) if name == "method of a C type" else (torch.rand(3),)
    compiled = minicompile.compile(target, backend=backend)
    for _ in range(2):
        fresh_arguments = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
        assert torch.allclose(compiled(*fresh_arguments), target(*[a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]))
    assert len(backend.graphs) == 1 and backend.ran == 2 - (name == "lru_cache"), name      # whose first call came while compiling
    for attribute in ("__name__", "__doc__", "__module__", "__qualname__"):
        if hasattr(target, attribute):
            assert getattr(compiled, attribute) == getattr(target, attribute)


@pytest.mark.parametrize("target, words", [(Adder, ("class Adder", "instance")), (3, ("3",)), ("text", ("text",)),
                                           ([plain], ("function",)), (torch.ones(1), ("tensor",))])
def test_what_may_not(target, words):
    with pytest.raises(MinicompileError) as caught:
        minicompile.compile(target)
    assert all(w in str(caught.value) for w in words) and "\n" not in str(caught.value)


def test_methods_and_descriptors_keep_working():
    a, b = Adder(2), Adder(3)
    x = torch.ones(2)
    assert a.decorated(x)[0] == 3 and b.decorated(x)[0] == 4 and Adder.decorated(a, x)[0] == 3

    wrapped = around(minicompile.compile(plain, backend="eager"))

    def calls(x):
        return a.decorated(x) + wrapped(x)
    backend = Recorder()
    assert torch.equal(minicompile.compile(calls, backend=backend)(x), calls(x)) and len(backend.graphs) == 1
    net = Net()
    expected = net(torch.ones(1, 3))
    net.forward = minicompile.compile(net.forward, backend=backend)             # in place
    assert torch.equal(net(torch.ones(1, 3)), expected) and len(backend.graphs) == 2 and type(net) is Net


def test_optimizer_step():
    for kind in (torch.optim.SGD, torch.optim.Adam):
        nets = [Net(), None]
        nets[1] = copy.deepcopy(nets[0])
        optimizers = [kind(n.parameters(), 0.1) for n in nets]
        step = minicompile.compile(optimizers[0].step, backend="eager")
        for _ in range(3):
            x = torch.randn(2, 3)
            for net in nets:
                net.zero_grad()
                net(x).sum().backward()
            step()
            optimizers[1].step()
        for p, q in zip(nets[0].parameters(), nets[1].parameters()):
            torch.testing.assert_close(p, q)


# ---- modules -------------------------------------------------------------------------------------------------------

def test_optimized_module():
    net = Net()
    compiled = minicompile.compile(net, backend="eager")
    x = torch.randn(2, 3)
    assert isinstance(compiled, torch.nn.Module) and isinstance(compiled, minicompile.OptimizedModule)
    assert "Net" in repr(compiled) and compiled.linear is net.linear
    for other in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        assert isinstance(other, minicompile.OptimizedModule) and torch.equal(other(x), compiled(x))
        assert other._orig_mod.linear.weight is not net.linear.weight
    buffer = io.BytesIO()
    torch.save(compiled, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(x), compiled(x))
    seen = []
    handles = [compiled.register_forward_hook(lambda m, i, o: seen.append("wrapper")),
               net.register_forward_pre_hook(lambda m, i: seen.append("pre")),
               net.linear.register_forward_hook(lambda m, i, o: seen.append("child"))]
    compiled(x)
    assert sorted(seen) == ["child", "pre", "wrapper"]
    [h.remove() for h in handles]
    compiled(x)
    assert len(seen) == 3
    compiled.double()
    assert net.linear.weight.dtype is torch.float64 and compiled(x.double()).dtype is torch.float64
    compiled.requires_grad_(False).zero_grad()
    assert dict(compiled.named_parameters()).keys() == {"_orig_mod.linear.weight", "_orig_mod.linear.bias"}
    assert [type(m) for m in compiled.modules()] == [minicompile.OptimizedModule, Net, torch.nn.Linear]
    assert minicompile.compile(compiled, backend="eager")._orig_mod is net
    compiled.linear = torch.nn.Linear(3, 5).double()
    assert net.linear.out_features == 5 and compiled(x.double()).shape == (2, 5)
    assert compiled.apply(lambda m: None) is compiled and "linear" in dir(compiled)


def test_compiled_module_does_what_its_module_does():
    net = minicompile.compile(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU()), backend="eager")
    x = torch.randn(2, 3, requires_grad=True)
    assert len(net) == 2 and net and net[0] in net and [type(m) for m in net] == [torch.nn.Linear, torch.nn.ReLU]
    net[1], net[0].bias = torch.nn.Tanh(), None
    assert torch.equal(net(x), (x @ net[0].weight.T).tanh())
    del net[1]
    net.add_module("last", torch.nn.Sigmoid())
    assert torch.equal(net(x), (x @ net[0].weight.T).sigmoid()) and not minicompile.compile(torch.nn.Sequential())
    with pytest.raises(TypeError, match="'Net' object is not subscriptable"):
        minicompile.compile(Net())[0]
    assert minicompile.compile(Net())

    class Scaled(Net):
        def forward(self, x):
            return self.linear(x) * self.scale

    scaled = minicompile.compile(Scaled(), backend="eager")
    scaled.register_buffer("scale", torch.ones(3) * 2)
    assert torch.equal(scaled(x), scaled.linear(x) * 2) and "_orig_mod.scale" in scaled.state_dict()
    seen = []
    handle = scaled.register_full_backward_hook(lambda m, inputs, outputs: seen.append(type(m)))
    scaled(x).sum().backward()
    handle.remove()
    scaled(x).sum().backward()
    assert seen == [minicompile.OptimizedModule]


def test_compiled_module_inside_of_a_compiled_function_is_part_of_its_graph():
    net, recorder = Net(), Recorder()
    inner = minicompile.compile(net, backend="eager")
    outer = minicompile.compile(lambda x: inner(x) * 2, backend=recorder, fullgraph=True)
    x = torch.randn(2, 3)
    assert torch.equal(outer(x), net(x) * 2) and len(recorder.graphs) == 1
    inner.register_forward_hook(lambda m, args, y: y + 1)
    assert torch.equal(outer(x), (net(x) + 1) * 2)


def test_partial_is_the_one_that_was_given():
    scale = functools.partial(plain, k=2)
    compiled = minicompile.compile(scale, backend="eager")
    x = torch.randn(3)
    assert torch.equal(compiled(x), plain(x, 2))
    scale.keywords["k"] = 5
    assert torch.equal(compiled(x), plain(x, 5))


# ---- disable, allow_in_graph, backends, stances --------------------------------------------------------------------

def test_disable_says_why_and_keeps_its_meaning():
    @minicompile.disable(reason="it talks to a server")
    def server(x):
        """doc"""
        assert not minicompile.is_compiling()
        return helper(x) + 1

    def helper(x):
        return x * 2

    def f(x):
        return server(x.sin())
    assert server.__doc__ == "doc" and server.__name__ == "server"
    found = minicompile.explain(f, backend="eager")(torch.ones(2))
    assert found.graph_count == 1, "helper is not compiled"
    assert "it talks to a server" in found.breaks[0].reason and "minicompile.disable" in found.breaks[0].advice
    with pytest.raises(GraphBreakError, match="talks to a server"):
        minicompile.compile(f, fullgraph=True, backend="eager")(torch.ones(2))

    backend = Recorder()

    @minicompile.disable(recursive=False)
    def only_this(x):
        return helper(x) + 1
    assert torch.equal(minicompile.compile(lambda x: only_this(x), backend=backend)(torch.ones(2)), torch.full((2,), 3.0))
    assert len(backend.graphs) == 1, "helper is compiled"
    backend = Recorder()
    wrapped = around(server)                                   # carries copies of the marks of `server`
    minicompile.compile(lambda x: around(lambda y: y.cos())(wrapped(x + 1)), backend=backend)(torch.ones(2))
    assert len(backend.graphs) >= 2
    net = minicompile.disable(Net())
    backend = Recorder()
    minicompile.compile(lambda x: net(x * 2) + 1, backend=backend)(torch.ones(1, 3))
    assert len(backend.graphs) == 2 and minicompile.disable(adder.method)(torch.ones(1)).item() == 5


def test_allow_in_graph():
    @minicompile.allow_in_graph
    def opaque(x, k):
        if len(x.shape) > 5:                                   # pragma: no cover
            breakpoint()
        return x * k

    def f(x):
        return opaque(x + 1, 3) - 1
    for name in ("eager", "aot_eager", "default"):
        x = torch.randn(3, requires_grad=True)
        y = minicompile.compile(f, backend=name, fullgraph=True)(x)
        y.sum().backward()
        assert torch.allclose(y, f(x)) and torch.equal(x.grad, torch.full((3,), 3.0))
    backend = Recorder()
    minicompile.compile(f, backend=backend)(torch.ones(1))
    assert [n.target for n in backend.graphs[0].graph.nodes if n.op == "call_function"][1] is opaque
    with pytest.raises(MinicompileError, match="allow_in_graph"):
        minicompile.allow_in_graph(3)


def test_custom_operators_and_backends():
    @torch.library.custom_op("minicompile_test::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @double.register_fake
    def _(x):
        return torch.empty_like(x)

    def f(x):
        return torch.ops.minicompile_test.double(x.sin()) + 1
    for name in ("eager", "default"):
        assert torch.allclose(minicompile.compile(f, backend=name, fullgraph=True)(torch.ones(2)), f(torch.ones(2)))

    seen = []

    @minicompile.register_backend(name="printing")
    def backend(gm, example_inputs):
        seen.append((type(gm), [type(e) for e in example_inputs]))
        return gm                                              # a GraphModule is callable, too
    assert "printing" in minicompile.list_backends()
    assert torch.allclose(minicompile.compile(plain, backend="printing")(torch.ones(2)), plain(torch.ones(2)))
    assert issubclass(seen[0][0], torch.fx.GraphModule) and seen[0][1] == [torch.Tensor]


def test_stances():
    backend = Recorder()
    compiled = minicompile.compile(plain, backend=backend, dynamic=False)
    minicompile.set_stance("force_eager")
    compiled(torch.ones(2))
    assert not backend.graphs
    minicompile.set_stance("default")
    compiled(torch.ones(2))
    with pytest.raises(ZeroDivisionError):
        with minicompile.set_stance("fail_on_recompile"):
            compiled(torch.ones(2))
            1 / 0
    compiled(torch.ones(3))
    assert len(backend.graphs) == 2, "the stance ended with the block, although it raised"

    @minicompile.compile(backend=backend)
    def nested(x):
        with minicompile.set_stance("force_eager"):
            return compiled(x)
    assert torch.equal(nested(torch.ones(4)), plain(torch.ones(4))) and stances.current.name == "default"

    @minicompile.set_stance("force_eager")
    def eagerly(x):
        return compiled(x)
    count = len(backend.graphs)
    assert torch.equal(eagerly(torch.ones(7)), plain(torch.ones(7))) and len(backend.graphs) == count
    assert stances.current.name == "default"


def test_reset_forgets():
    backend = Recorder()
    compiled = minicompile.compile(plain, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(3):
            compiled(torch.ones(2))
            minicompile.reset()
    assert len(backend.graphs) == 3
