"""The public API end to end on the eager backend: entries, recompiles, stances, modules, wrong use."""
import copy
import functools
import gc
import io
import logging
import pickle
import threading
import warnings
import weakref

import pytest
import torch
from recorders import Recorder

import minicompile
from minicompile import logs, versions
from minicompile.errors import GraphBreakError, MinicompileError, RecompileError

pytestmark = pytest.mark.usefixtures("fresh")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.drop = torch.nn.Dropout(0.5)
        self.calls = 0

    def forward(self, x, scale=1.0):
        self.calls += 1
        for block in self.blocks:
            x = self.drop(block(x).relu())
        return x * scale

    def helper(self, x):
        return x + len(self.blocks)


def scaled(x, factor=2, *, shift=0.0):
    return (x * factor + shift).sin()


# ---- functions -----------------------------------------------------------------------------------------------------

def test_function_and_decorator_forms():
    x = torch.randn(3)
    backend = Recorder()
    for compiled in (minicompile.compile(scaled, backend=backend), minicompile.compile(backend=backend)(scaled)):
        assert torch.equal(compiled(x), scaled(x)) and torch.equal(compiled(x, 3, shift=1.0), scaled(x, 3, shift=1.0))
    assert compiled.__name__ == "scaled" and len(backend.graphs) >= 2

    @minicompile.compile(backend="eager")
    def decorated(x):
        """doc"""
        return x + 1
    assert torch.equal(decorated(x), x + 1) and decorated.__doc__ == "doc"
    assert minicompile.compile(scaled, disable=True) is scaled


def test_same_settings_share_entries():
    backend, x = Recorder(), torch.randn(3)
    minicompile.compile(scaled, backend=backend)(x)
    minicompile.compile(scaled, backend=backend)(x)
    assert len(backend.graphs) == 1 and backend.ran == 2
    minicompile.reset()
    minicompile.compile(scaled, backend=backend)(x)
    assert len(backend.graphs) == 2


def test_method_partial_and_lambda():
    net, x = Net().eval(), torch.randn(2, 4)
    assert torch.equal(minicompile.compile(net.helper, backend="eager")(x), x + 2)
    assert torch.equal(minicompile.compile(functools.partial(scaled, factor=5), backend="eager")(x), scaled(x, 5))
    assert torch.equal(minicompile.compile(lambda t: t * 7, backend="eager")(x), x * 7)

    class Own(functools.partial):
        def __call__(self, x):
            return super().__call__(x) + 100

    class Hiding(functools.partial):
        __slots__ = "func"

    for derived in (Own(scaled, factor=5), Hiding(scaled, factor=5)):
        assert torch.equal(minicompile.compile(derived, backend="eager")(x), derived(x))


def test_closures_share_code_but_not_cells():
    def make(k):
        def inner(x):
            return x * k
        return inner

    backend, x = Recorder(), torch.ones(2)
    compiled = [minicompile.compile(make(k), backend=backend) for k in (2, 3)]
    assert [c(x)[0].item() for c in compiled] == [2.0, 3.0] and [c(x)[0].item() for c in compiled] == [2.0, 3.0]


def test_arguments_of_every_kind():
    def f(a, /, b, c=3, *rest, d, e=5, **more):
        return a + b + c + sum(rest) + d + e + more.get("z", 0)
    compiled, t = minicompile.compile(f, backend="eager"), torch.ones(2)
    for args, kwargs in (((t, 1), {"d": 2}), ((t, 1, 2, 3, 4), {"d": 2, "e": 0, "z": 9}), ((t,), {"b": t, "d": t})):
        assert torch.equal(compiled(*args, **kwargs), f(*args, **kwargs))


def test_exceptions_reach_the_caller():
    def f(x):
        if x.shape[0] == 3:
            raise ValueError("three")
        return x + 1
    compiled = minicompile.compile(f, backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    for _ in range(2):
        with pytest.raises(ValueError, match="three"):
            compiled(torch.ones(3))
    with pytest.raises(TypeError):
        compiled()


# ---- recompiles ----------------------------------------------------------------------------------------------------

def test_recompile_reason_is_logged(caplog):
    compiled = minicompile.compile(scaled, backend="eager", dynamic=False)
    compiled(torch.ones(8))
    with caplog.at_level(logging.DEBUG, "minicompile.recompiles"):
        compiled(torch.ones(9))
    assert "tensor 'x' size mismatch at dimension 0: expected 8, got 9" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "minicompile.recompiles"):
        compiled(torch.ones(9), 3)
    assert "factor changed: expected 2, got 3" in caplog.text and "test_api.py" in caplog.text


def test_several_entries_and_the_limit():
    backend = Recorder()
    compiled = minicompile.compile(scaled, backend=backend, dynamic=False)
    for _ in range(2):
        for n in range(2, 10):
            assert torch.equal(compiled(torch.ones(n)), scaled(torch.ones(n)))
    assert len(backend.graphs) == 8 and backend.ran == 16
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in (20, 21, 22, 3):
            assert torch.equal(compiled(torch.ones(n)), scaled(torch.ones(n)))
    messages = [str(w.message) for w in caught if "recompile_limit" in str(w.message)]
    assert len(messages) == 1 and "size mismatch at dimension 0" in messages[0] and "scaled" in messages[0]
    assert len(backend.graphs) == 8 and backend.ran == 17, "a known size still uses its entry"


def test_many_models_of_one_class_do_not_share_the_limit():
    backend, x = Recorder(), torch.randn(2, 4)
    for n in range(1, 13):
        model = torch.nn.Sequential(torch.nn.Linear(4, n))
        compiled = minicompile.compile(model, backend=backend)
        assert torch.equal(compiled(x), model(x)) and torch.equal(compiled(x), model(x))
    assert len(backend.graphs) == 12 and backend.ran == 24
    blocks = [minicompile.compile(torch.nn.Sequential(torch.nn.Linear(4, 5)), backend=backend) for _ in range(3)]
    assert [b(x).shape[1] for b in blocks] == [5] * 3 and len(backend.graphs) == 12, "equal blocks share one entry"


def test_global_attribute_and_mode_changes():
    net, x = Net(), torch.randn(2, 4)
    backend = Recorder()
    compiled = minicompile.compile(net, backend=backend)
    compiled.eval()
    assert torch.equal(compiled(x), net(x))
    with torch.no_grad():
        y = compiled(x)
        assert not y.requires_grad and torch.equal(y, net(x))
    net.blocks[0] = torch.nn.Linear(4, 4, bias=False)
    assert torch.equal(compiled(x), net(x))
    net.blocks.append(torch.nn.Linear(4, 4))
    assert torch.equal(compiled(x), net(x))
    with torch.no_grad():
        net.blocks[0].weight.zero_()
    assert torch.equal(compiled(x), net(x))
    net.double()
    assert torch.equal(compiled(x.double()), net(x.double()))
    net.blocks[0].register_forward_hook(lambda m, i, o: o + 100)
    assert torch.equal(compiled(x.double()), net(x.double()))


def test_training_step_matches_eager():
    torch.manual_seed(0)
    net = Net()
    twin = copy.deepcopy(net)
    compiled = minicompile.compile(net, backend="eager")
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (compiled, twin)]
    for step in range(3):
        x = torch.randn(5, 4)
        for model, optimizer in zip((compiled, twin), optimizers):
            torch.manual_seed(step)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(net.parameters(), twin.parameters()):
        assert torch.equal(a, b)
    assert net.calls == twin.calls == 3


def test_stances():
    backend = Recorder()
    compiled = minicompile.compile(scaled, backend=backend, dynamic=False)
    with minicompile.set_stance("force_eager"):
        compiled(torch.ones(2))
    assert backend.ran == len(backend.graphs) == 0
    compiled(torch.ones(2))
    with minicompile.set_stance("fail_on_recompile"):
        compiled(torch.ones(2))
        with pytest.raises(RecompileError, match="size mismatch"):
            compiled(torch.ones(3))
    with minicompile.set_stance("eager_on_recompile"):
        assert torch.equal(compiled(torch.ones(3)), scaled(torch.ones(3)))
    assert len(backend.graphs) == 1 and backend.ran == 2
    compiled(torch.ones(3))
    assert len(backend.graphs) == 2


# ---- modules -------------------------------------------------------------------------------------------------------

def test_module_wrapper_behaves_like_torchs():
    net = Net()
    compiled = minicompile.compile(net, backend="eager")
    assert isinstance(compiled, torch.nn.Module) and compiled._orig_mod is net
    assert list(compiled.state_dict()) == ["_orig_mod." + k for k in net.state_dict()]
    assert [p is q for p, q in zip(compiled.parameters(), net.parameters())] == [True] * 4
    compiled.eval()
    assert not net.training and not net.drop.training and not compiled.training
    compiled.train()
    assert net.training and compiled.training
    compiled.extra = 5
    assert net.extra == 5 and compiled.extra == 5 and torch.equal(compiled.helper(torch.ones(1)), torch.full((1,), 3.0))
    del compiled.extra
    assert not hasattr(net, "extra")
    with pytest.raises(AttributeError):
        compiled.missing
    stripped = {k.removeprefix("_orig_mod."): v for k, v in compiled.state_dict().items()}
    Net().load_state_dict(stripped)
    compiled.load_state_dict({"_orig_mod." + k: torch.zeros_like(v) for k, v in net.state_dict().items()})
    assert net.blocks[0].weight.abs().sum() == 0


def test_a_copy_for_another_device_leaves_the_module_alone():
    """As DataParallel makes one for each GPU: it sets what is below the copy, and says that it is one."""
    net = Net()
    fast = minicompile.compile(net, backend=Recorder())
    below, copy = net._replicate_for_data_parallel(), fast._replicate_for_data_parallel()
    copy._orig_mod = below
    assert copy._orig_mod is below and copy._is_replica and fast._orig_mod is net
    assert not hasattr(net, "_orig_mod") and not hasattr(net, "_is_replica")


def test_module_copies_and_pickles():
    compiled = minicompile.compile(Net().eval(), backend="eager")
    x = torch.randn(2, 4)
    expected = compiled(x)
    twin = copy.deepcopy(compiled)
    assert twin._orig_mod is not compiled._orig_mod and torch.equal(twin(x), expected)
    loaded = pickle.loads(pickle.dumps(compiled))
    assert torch.equal(loaded(x), expected)
    buffer = io.BytesIO()
    torch.save(compiled.state_dict(), buffer)


def test_library_modules_are_compiled_when_asked_for():
    backend = Recorder()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    compiled, x = minicompile.compile(model, backend=backend), torch.randn(2, 4)
    assert torch.equal(compiled(x), model(x)) and len(backend.graphs) == backend.ran == 1


def test_hooks_of_the_module_run():
    net, x, seen = Net().eval(), torch.randn(2, 4), []
    net.register_forward_hook(lambda m, i, o: seen.append(1))
    compiled = minicompile.compile(net, backend="eager")
    compiled(x)
    compiled(x)
    assert len(seen) == 2


def test_entries_do_not_keep_models_or_tensors_alive():
    net = Net().eval()
    compiled = minicompile.compile(net, backend="eager")
    x = torch.randn(2, 4)
    compiled(x)
    alive = [weakref.ref(o) for o in (net, net.blocks[0].weight, x)]
    del net, compiled, x
    gc.collect()
    assert [a() is None for a in alive] == [True, True, True]


# ---- breaks and fallbacks ------------------------------------------------------------------------------------------

def test_graph_breaks_and_fullgraph(capsys):
    def f(x):
        y = x * 2
        print("break")
        return y + 1

    backend, x = Recorder(), torch.ones(2)
    compiled = minicompile.compile(f, backend=backend)
    for _ in range(2):
        assert torch.equal(compiled(x), x * 2 + 1)
    assert len(backend.graphs) == 2 and capsys.readouterr().out == "break\n" * 2
    with pytest.raises(GraphBreakError, match="print"):
        minicompile.compile(f, fullgraph=True, backend="eager")(x)
    assert capsys.readouterr().out == ""


def test_data_dependent_branch_takes_both_ways():
    def f(x):
        if x.sum() > 0:
            return x.sin()
        y = x.cos()
        return y * 2
    compiled = minicompile.compile(f, backend="eager")
    for x in (torch.ones(3), -torch.ones(3), torch.ones(3)):
        assert torch.equal(compiled(x), f(x))


def test_calls_inside_an_uncompilable_frame_are_compiled():
    def inner(x):
        return x.sin() + 1

    def outer(x):
        results = []
        for i in range(3):
            try:
                results.append(inner(x + i))
            finally:
                print(end="")
        return results

    backend, x = Recorder(), torch.ones(2)
    result = minicompile.compile(outer, backend=backend)(x)
    assert all(torch.equal(a, b) for a, b in zip(result, outer(x))) and backend.ran >= 3


def test_disable_of_what_has_no_code_of_its_own():
    """Without what it calls: a function in C has no frame, a partial runs that of its function, an object that of its class."""
    class Calls:
        def __call__(self, x):
            assert not torch.compiler.is_compiling()
            return x + 1

    def called(x, more):
        assert not torch.compiler.is_compiling()
        return x + more

    for function in (torch.cos, functools.partial(called, more=1), Calls(), functools.partial(torch.add, other=1)):
        disabled = minicompile.disable(function, recursive=False)
        assert minicompile.compile(lambda x, disabled=disabled: disabled(x * 0))(torch.ones(2)).tolist() == [1, 1], function
    assert type(minicompile.disable(torch.nn.Tanh, recursive=False)()) is torch.nn.Tanh


def test_disable():
    @minicompile.disable
    def plain(x):
        assert not minicompile.is_compiling()
        return x * 10

    def f(x):
        return plain(x + 1) + 1

    backend, x = Recorder(), torch.ones(2)
    assert torch.equal(minicompile.compile(f, backend=backend)(x), f(x))
    assert len(backend.graphs) == 2
    assert minicompile.compile(plain) is plain

    @minicompile.disable(recursive=False)
    def only_me(x):
        return scaled(x)
    assert torch.equal(minicompile.compile(lambda x: only_me(x), backend=backend)(x), scaled(x))


def test_explain_and_is_compiling():
    def f(x):
        y = x.sin()
        print(end="")
        return y.cos() + 1

    found = minicompile.explain(f)(torch.ones(2))
    assert (found.graph_count, found.graph_break_count, found.op_count) == (2, 1, 3)
    assert "print" in str(found) and "test_api.py" in str(found)
    assert minicompile.is_compiling() is False

    def g(x):
        return x + 1 if minicompile.is_compiling() else x - 1
    assert minicompile.compile(g, backend="eager")(torch.zeros(1)).item() == 1


def test_threads():
    compiled, errors = minicompile.compile(scaled, backend="eager"), []

    def work(n):
        try:
            for _ in range(20):
                assert torch.equal(compiled(torch.ones(n)), scaled(torch.ones(n)))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in (2, 3, 4, 5)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not errors


def test_dynamic_sizes():
    def f(x):
        return x.sin() * x.shape[0]

    backend = Recorder()
    compiled = minicompile.compile(f, backend=backend)
    for n in (4, 5, 6, 7, 4):
        assert torch.equal(compiled(torch.ones(n, 3)), f(torch.ones(n, 3)))
    assert len(backend.graphs) == 2, "the second size makes the dimension a symbol"
    minicompile.reset()
    x, backend = torch.ones(4, 3), Recorder()
    minicompile.mark_dynamic(x, 0)
    compiled = minicompile.compile(f, backend=backend)
    for t in (x, torch.ones(9, 3)):
        assert torch.equal(compiled(t), f(t))
    assert len(backend.graphs) == 1


def test_inputs_that_share_memory():
    def f(x, y):
        x.add_(1)
        return y * 2

    for backend in ("eager", "aot_eager"):
        compiled = minicompile.compile(f, backend=backend)
        for make in (lambda: (torch.ones(2), torch.ones(2)), lambda: (torch.ones(2),) * 2,
                     lambda: (lambda b: (b[:2], b[1:3]))(torch.ones(4)), lambda: (lambda b: (b[1:3], b[:2]))(torch.ones(4)),
                     lambda: (lambda b: (b[:2], b[2:]))(torch.ones(4))):
            ours, theirs = make(), make()
            assert torch.equal(compiled(*ours), f(*theirs)) and all(map(torch.equal, ours, theirs)), backend


# ---- optimizers ----------------------------------------------------------------------------------------------------

def test_optimizer_step():
    a, b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    b.load_state_dict(a.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (a, b)]
    steps = [minicompile.compile(optimizers[0].step, backend="eager"), optimizers[1].step]
    for i in range(3):
        for model, step in zip((a, b), steps):
            for p in model.parameters():
                p.grad = torch.full_like(p, i + 0.5)
            step()
    for p, q in zip(a.parameters(), b.parameters()):
        torch.testing.assert_close(p, q)


# ---- callables without Python code ---------------------------------------------------------------------------------

def test_builtin_callables():
    x, y = torch.tensor([3.5, -2.0]), torch.tensor([2.0, 3.0])
    add = torch.ops.aten.add
    for function in (torch.fmod, torch.Tensor.mul, add, add.Tensor, functools.partial(torch.atan2, other=y)):
        backend = Recorder()
        arguments = (x,) if isinstance(function, functools.partial) else (x, y)
        assert torch.equal(minicompile.compile(function, backend=backend, fullgraph=True)(*arguments), function(*arguments))
        assert backend.ran == 1
    compiled = minicompile.compile(torch.fmod, backend="eager")
    assert compiled.__name__ == "fmod" and minicompile.compile(len, backend="eager")([1, 2]) == 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager", lambda gm, _: gm.forward, lambda gm, _: gm])
def test_a_tensor_that_is_called_self(backend):
    def doubled(self):
        self.add_(1)
        return self * 2

    def added(x, self):
        return self.add_(x), x + self
    for f, n in ((doubled, 1), (added, 2)):
        given, others = [[torch.ones(2) for _ in range(n)] for _ in range(2)]
        torch.testing.assert_close(minicompile.compile(f, backend=backend)(*given), f(*others))
        torch.testing.assert_close(given, others)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "cpp", lambda gm, _: gm.forward, lambda gm, _: copy.deepcopy(gm)])
@pytest.mark.parametrize("grad", [False, True])
def test_a_graph_calls_a_function_that_has_the_name_of_another(backend, grad, monkeypatch):
    """`torch._VF.cdist` says that its name is `torch.cdist`, which takes other arguments."""
    def refused(*_):
        raise AssertionError("the graph raised")

    monkeypatch.setattr(versions, "graph_refused", refused)
    a, b = torch.rand(4, 4, requires_grad=grad), torch.rand(4, 4)
    for function in (torch.cdist, torch.tensordot, torch.chain_matmul):
        arguments = (a, b, 1) if function is torch.tensordot else (a, b)
        compiled, want = minicompile.compile(function, backend=backend, fullgraph=True), function(*arguments)
        for _ in range(2):
            torch.testing.assert_close(compiled(*arguments), want)
        if grad:
            torch.testing.assert_close(torch.autograd.grad(compiled(*arguments).sum(), a), torch.autograd.grad(want.sum(), a))


# ---- wrong use -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("call, words", [
    (lambda: minicompile.compile(5), ("5", "function")),
    (lambda: minicompile.compile("f"), ("'f'", "function")),
    (lambda: minicompile.compile(Net), ("class Net", "instance")),
    (lambda: minicompile.compile()(None), ("None",)),
    (lambda: minicompile.compile(scaled, mode="max-autotun"), ("max-autotun", "Did you mean 'max-autotune'")),
    (lambda: minicompile.compile(scaled, mode="zzz"), ("zzz", "Known", "reduce-overhead")),
    (lambda: minicompile.compile(scaled, backend="egaer"), ("egaer", "Did you mean 'eager'")),
    (lambda: minicompile.compile(scaled, backend=3), ("backend", "callable")),
    (lambda: minicompile.compile(scaled, options={"cudagraph": True}), ("cudagraph", "Did you mean 'cudagraphs'")),
    (lambda: minicompile.compile(scaled, options={"cudagraphs": 3}), ("cudagraphs", "bool")),
    (lambda: minicompile.compile(scaled, options=[1]), ("options", "dict")),
    (lambda: minicompile.compile(scaled, options={}, mode="default"), ("mode", "options")),
    (lambda: minicompile.compile(scaled, dynamic="yes"), ("dynamic", "yes")),
    (lambda: minicompile.set_stance("eager"), ("eager", "stance")),
    (lambda: minicompile.set_logs("graf"), ("graf", "MINICOMPILE_LOGS")),
    (lambda: minicompile.disable(3), ("disable",)),
    (lambda: minicompile.register_backend(3), ("backend",)),
    (lambda: setattr(minicompile.config, "recompile_limt", 3), ("recompile_limt", "Did you mean 'recompile_limit'"))])
def test_wrong_use_gives_one_clear_sentence(call, words):
    with pytest.raises(MinicompileError) as caught:
        call()
    text = str(caught.value)
    assert all(w in text for w in words) and "\n" not in text, text


def test_backends_and_chapters():
    assert {"eager", "aot_eager", "decomposed", "loops", "triton", "cpp", "cudagraphs"} <= set(minicompile.list_backends())

    @minicompile.register_backend
    def my_backend(gm, example_inputs):
        return gm.forward
    assert "my_backend" in minicompile.list_backends()
    assert torch.equal(minicompile.compile(scaled, backend="my_backend")(torch.ones(2)), scaled(torch.ones(2)))
    assert minicompile.CHAPTERS[:4] == ["ch01_graphs", "ch02_guards", "ch03_capture", "ch04_breaks"]


def test_options_reach_the_configuration():
    seen = []

    def backend(gm, inputs):
        seen.append((minicompile.config.cudagraphs, minicompile.config.max_autotune))
        return gm.forward
    minicompile.compile(scaled, backend=backend, mode="max-autotune")(torch.ones(2))
    minicompile.compile(scaled, backend=backend)(torch.ones(2))
    assert seen == [(True, True), (False, False)] and minicompile.config.max_autotune is False
    with minicompile.config.patch(recompile_limit=2):
        assert minicompile.config.recompile_limit == 2
    assert minicompile.config.recompile_limit == 8


def test_logs_switch_on():
    before = logs.get("code").level
    minicompile.set_logs("code")
    try:
        assert logs.on("code") and not logs.on("fusion")
    finally:
        logs.get("code").setLevel(before)
        logging.getLogger("minicompile").propagate = True
