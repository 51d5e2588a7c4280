"""What was asked to fail fails, once and clearly: without `raise_on_internal_error`, which most other tests set."""
import ast
import copy
import dataclasses
import functools
import io
import pathlib
import sys
import warnings

import pytest
import torch
from recorders import Recorder
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import minicompile
from minicompile import driver, frames
from minicompile.config import OPTIONS, Config
from minicompile.errors import BackendError, GraphBreakError, InternalError, MarkError, MinicompileError, RecompileError

pytestmark = pytest.mark.usefixtures("reset")


def wave(x):
    return x.sin() + 1


def talks(x):
    x = x + 1
    print(end="")
    return x * 2


def strict(function, **settings):
    return minicompile.compile(function, fullgraph=True, **{"backend": "eager", **settings})


def only_python(x, out):
    out.append([n + 1 for n in (1, 2)])
    return x, {k: sorted(v for v in out[0]) for k in "ab"}


def test_a_function_without_a_graph_does_not_break_one():
    """What has nothing for the compiler is one graph, though an empty one: its comprehensions are no frames of their own."""
    x, eager, compiled = torch.ones(3), [], []
    want, got = only_python(x, eager), strict(only_python)(x, compiled)
    assert got[0] is x and got[1] == want[1] and compiled == eager == [[2, 3]]


def refused(error, words, call, *args):
    """`call(*args)` raises this error each time, with these words, and does not fall back to eager afterwards."""
    for _ in range(2):
        with pytest.raises(error) as caught:
            call(*args)
        assert all(w in str(caught.value) for w in words), caught.value
    return caught.value


# ---- the recompile limit -------------------------------------------------------------------------------------------

def test_beyond_the_recompile_limit():
    backend = Recorder()
    compiled = strict(wave, backend=backend, dynamic=False)
    for n in range(2, 10):
        compiled(torch.ones(n))
    words = ("fullgraph=True", "config.recompile_limit", "size mismatch", "mark_dynamic", "test_strict.py")
    refused(RecompileError, words, compiled, torch.ones(20))
    ran = backend.ran
    assert torch.equal(compiled(torch.ones(5)), wave(torch.ones(5))) and backend.ran == ran + 1
    with minicompile.config.patch(recompile_limit=9):
        assert torch.equal(compiled(torch.ones(20)), wave(torch.ones(20)))
    assert len(backend.graphs) == 9


def test_the_limit_counts_versions_of_one_module():
    model = torch.nn.Sequential(torch.nn.ReLU())
    compiled = strict(model, dynamic=False)
    with minicompile.config.patch(recompile_limit=1):
        compiled(torch.ones(2))
        refused(RecompileError, ("config.recompile_limit",), compiled, torch.ones(3))
        assert torch.equal(strict(torch.nn.Sequential(torch.nn.ReLU()), dynamic=False)(torch.ones(3)), torch.ones(3))


# ---- stances -------------------------------------------------------------------------------------------------------

def test_the_first_call_under_a_stance():
    backend, x = Recorder(), torch.ones(2)
    compiled = minicompile.compile(wave, backend=backend, fullgraph=True)
    with minicompile.set_stance("fail_on_recompile"):
        refused(RecompileError, ("wave", "would be compiled.", "'default'"), compiled, x)
    with minicompile.set_stance("eager_on_recompile"):
        assert torch.equal(compiled(x), wave(x))
    assert not backend.graphs
    compiled(x)
    for stance in ("fail_on_recompile", "eager_on_recompile"):
        with minicompile.set_stance(stance):
            assert torch.equal(compiled(x), wave(x))
    assert len(backend.graphs) == 1 and backend.ran == 3


def test_stances_and_what_is_not_compiled():
    compiled, x = minicompile.compile(talks, backend="eager"), torch.ones(2)
    compiled(x)
    with minicompile.set_stance("fail_on_recompile"):
        assert torch.equal(compiled(x), talks(x)), "a graph break is no recompile"
        refused(RecompileError, ("size mismatch",), compiled, torch.ones(3))
    for stance in ("force_eager", "eager_on_recompile"):
        with minicompile.set_stance(stance):
            assert torch.equal(strict(talks)(x), talks(x)), "these stances run eagerly what would not compile"
    with minicompile.set_stance("fail_on_recompile"):
        assert minicompile.explain(wave, backend="eager")(x).graph_count == 1, "who asks to see it, sees it"


# ---- backends ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("fullgraph", (False, True))
def test_a_backend_that_raises(fullgraph):
    calls = []

    def broken(gm, inputs):
        calls.append(1)
        raise IndexError("in the backend")

    compiled = minicompile.compile(wave, backend=broken, fullgraph=fullgraph)
    for n in (1, 2):
        with pytest.raises(BackendError, match="'broken' raised IndexError: in the backend") as caught:
            compiled(torch.ones(2))
        assert isinstance(caught.value.__cause__, IndexError) and len(calls) == n
    calls.clear()
    x = torch.ones(3)
    minicompile.mark_dynamic(x, 0)
    with pytest.raises(BackendError):
        compiled(x)
    assert len(calls) == 1, "not once more for fixed sizes"


def test_a_backend_that_raises_after_a_break():
    def broken(gm, inputs):
        if any("mul" in str(n.target) for n in gm.graph.nodes):
            raise ValueError("no products")
        return gm.forward
    refused(BackendError, ("ValueError: no products",), minicompile.compile(talks, backend=broken), torch.ones(2))


# ---- mark_dynamic --------------------------------------------------------------------------------------------------

def three_rows(x):
    return x.view(3, 2) * 2 if x.shape[0] == 3 else x


@pytest.mark.parametrize("dynamic", (None, True, False))
def test_a_mark_that_the_program_contradicts(dynamic):
    x = torch.ones(3, 2)
    minicompile.mark_dynamic(x, 0)
    words = ("dimension 0 of x was marked with mark_dynamic", "s0 == 3", "test_strict.py")
    refused(MarkError, words, strict(three_rows, dynamic=dynamic), x)
    for rung in ("eager", "cpp"):
        refused(MarkError, words, minicompile.compile(three_rows, backend=rung, dynamic=dynamic), x)


def rows_after_a_break(x):
    print(end="")
    return three_rows(x + 1)


def test_a_mark_that_the_rest_after_a_break_contradicts():
    x = torch.ones(3, 2)
    minicompile.mark_dynamic(x, 0)
    refused(MarkError, ("mark_dynamic", "== 3"), minicompile.compile(rows_after_a_break, backend="eager"), x)


def test_a_mark_where_only_fixed_sizes_can_be_compiled(monkeypatch):
    """`options.used`: the second capture, for fixed sizes, must not lose the mark."""
    def fails(gm, fakes, backend, late_error):
        if any(isinstance(n.meta["val"], torch.SymInt) for n in gm.graph.nodes if n.op == "placeholder"):
            raise IndexError("no symbols")
        return gm.forward
    monkeypatch.setattr(driver, "compile_graph", fails)
    x = torch.ones(3, 2)
    minicompile.mark_dynamic(x, 0)
    refused(MarkError, ("dimension 0 of x", "IndexError: no symbols"), strict(wave, backend="aot_eager"), x)
    with pytest.warns(RuntimeWarning, match="IndexError: no symbols"):
        minicompile.compile(wave, backend="aot_eager")(x)


def test_marks_hold_with_dynamic_false():
    backend, x = Recorder(), torch.ones(3, 2)
    minicompile.mark_dynamic(x, 0)
    compiled = strict(wave, backend=backend, dynamic=False)
    for n in (3, 4, 5):
        compiled(x if n == 3 else torch.ones(n, 2))
    compiled(torch.ones(5, 3))
    assert len(backend.graphs) == 2, "dimension 0 varies, dimension 1 does not"


def test_ranges_of_marks():
    backend, x = Recorder(), torch.ones(4, 2)
    minicompile.mark_dynamic(x, 0, min=3, max=6)
    compiled = minicompile.compile(wave, backend=backend)
    for n in (4, 3, 6):
        compiled(x if n == 4 else torch.ones(n, 2))
    assert len(backend.graphs) == 1
    compiled(torch.ones(7, 2))
    assert len(backend.graphs) == 2, "a size outside of the range is another version"


@pytest.mark.parametrize("arguments, named, error", [
    ((5,), {}, IndexError), (("a",), {}, MinicompileError), ((True,), {}, MinicompileError),
    ((0,), {"min": 5}, MinicompileError), ((0,), {"max": 3}, MinicompileError),
    ((0,), {"min": 6, "max": 2}, MinicompileError), ((0,), {"max": 4.5}, MinicompileError)])
def test_marks_that_make_no_sense(arguments, named, error):
    with pytest.raises(error, match="mark_dynamic"):
        minicompile.mark_dynamic(torch.ones(4, 2), *arguments, **named)
    with pytest.raises(MinicompileError, match="needs a tensor"):
        minicompile.mark_dynamic(3, 0)


# ---- fullgraph: what breaks, wherever it is ------------------------------------------------------------------------

@minicompile.disable
def off(x):
    return x + 1


def nested(x):
    return [talks(t) for t in x.unbind()][0]


def generated(x):
    def items():
        yield x
        yield talks(x)
    return sum(items())


def calls_disabled(x):
    return off(x) * 2


def caught(x):
    try:
        return talks(x)
    except RuntimeError:
        return x


def in_context(x):
    with torch.no_grad():
        return talks(x)


def in_lambda(x):
    return max([x, x], key=lambda t: talks(t).sum().item())


def checkpointed(x):
    return torch.utils.checkpoint.checkpoint(talks, x, use_reentrant=False)


class Descriptor:
    @property
    def value(self):
        return talks(torch.ones(2))


def through_a_property(x):
    return Descriptor().value + x


@pytest.mark.parametrize("function", (nested, generated, calls_disabled, caught, in_context, in_lambda, checkpointed,
                                      through_a_property), ids=lambda f: f.__name__)
def test_fullgraph_and_a_break_inside(function):
    refused(GraphBreakError, ("fullgraph=True", function.__name__, "test_strict.py"), strict(function), torch.ones(2, 2))


def test_fullgraph_and_hooks_of_modules():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    model[0].register_forward_hook(lambda module, inputs, output: talks(output))
    refused(GraphBreakError, ("print",), strict(model), torch.ones(2, 2))
    model = torch.nn.Linear(2, 2)
    model.register_forward_hook(lambda module, inputs, output: talks(output))
    refused(GraphBreakError, ("print",), strict(model), torch.ones(2, 2))


def test_fullgraph_and_code_that_is_never_captured():
    def numbers(x):
        yield x + 1

    async def later(x):
        return x + 1

    for function in (numbers, later):
        for how in (lambda f: strict(f), lambda f: minicompile.compile(fullgraph=True)(f)):
            with pytest.raises(GraphBreakError, match=f"{function.__name__} is a generator or a coroutine"):
                how(function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(torch.nn.Linear(2, 2))
    with pytest.raises(GraphBreakError, match="no Python code"):
        strict(scripted)
    assert torch.equal(next(minicompile.compile(numbers, backend="eager")(torch.ones(1))), torch.full((1,), 2.))


class SeesFunctions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class SeesOperators(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("compiled_before", (False, True))
def test_fullgraph_where_nothing_can_be_compiled(compiled_before):
    compiled, x = strict(wave), torch.ones(2, 3)
    if compiled_before:
        compiled(x), compiled(x[0])
    for mode in (SeesFunctions(), SeesOperators()):
        with mode:
            refused(GraphBreakError, ("fullgraph=True", "wave", "mode"), compiled, x)
    refused(GraphBreakError, ("torch.func.vmap",), torch.vmap(compiled), x)
    refused(GraphBreakError, ("torch.func.vmap",), torch.func.grad(lambda t: compiled(t).sum()), x)
    with torch.autograd.forward_ad.dual_level():
        refused(GraphBreakError, ("forward-mode",), compiled, torch.autograd.forward_ad.make_dual(x, x))
    loose = minicompile.compile(wave, backend="eager")
    with SeesOperators():
        assert torch.equal(loose(x), wave(x))
    assert torch.equal(torch.vmap(loose)(x), wave(x))
    with torch.device("cpu"):
        assert torch.equal(compiled(x), wave(x)), "a default device is no obstacle"


def test_fullgraph_deep_in_a_recursion():
    compiled, x, depth = strict(wave), torch.ones(2), sys.getrecursionlimit() // 2 + 50

    def down(n):
        return compiled(x) if n == 0 else down(n - 1)
    refused(GraphBreakError, ("sys.setrecursionlimit",), down, depth)
    assert torch.equal(compiled(x), wave(x))


def test_the_programs_own_exception_is_not_a_reason_to_give_up():
    def function(x):
        if x.shape[0] == 3:
            raise ValueError("three")
        if x.shape[0] == 4:
            print()
        return x + 1

    backend = Recorder()
    compiled = strict(function, backend=backend, dynamic=False)
    for _ in range(12):
        with pytest.raises(ValueError, match="three"):
            compiled(torch.ones(3))
    refused(GraphBreakError, ("print",), compiled, torch.ones(4))
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.)) and backend.ran == 1
    backend = Recorder()
    compiled = minicompile.compile(function, backend=backend)
    with pytest.raises(ValueError, match="three"):
        compiled(torch.ones(3))
    compiled(torch.ones(2))
    assert backend.ran == 1, "the next call compiles"


# ---- fullgraph: failures of the compiler ---------------------------------------------------------------------------

STAGES = {"callback": (frames, "target_for"), "differentiate": (driver, "compile_training"), "lower": (driver, "lower"),
          "emit": (driver, "compile_schedule")}


@pytest.mark.parametrize("stage", STAGES)
def test_fullgraph_and_an_internal_error(stage, monkeypatch):
    def fails(*args, **kwargs):
        raise IndexError(f"injected in {stage}")
    monkeypatch.setattr(*STAGES[stage], fails)
    compiled = strict(wave, backend=None)
    error = refused(InternalError, ("fullgraph=True", "wave", f"injected in {stage}", "report"), compiled, torch.ones(2))
    assert isinstance(error.__cause__, IndexError)
    monkeypatch.undo()
    assert torch.equal(compiled(torch.zeros(2)), wave(torch.zeros(2)))


def test_fullgraph_and_a_machine_that_lacks_something(monkeypatch):
    def fails(*args):
        raise MinicompileError("There is no C++ compiler.")
    monkeypatch.setattr(driver, "compile_schedule", fails)
    refused(MinicompileError, ("no C++ compiler",), strict(wave, backend=None), torch.ones(2))


# ---- settings ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("settings, words", [
    ({"dynamic": 0}, "dynamic"), ({"dynamic": 1}, "dynamic"), ({"fullgraph": "no"}, "fullgraph"), ({"fullgraph": None}, "fullgraph"),
    ({"disable": "no"}, "disable"), ({"options": {"cudagraphs": 1}}, "cudagraphs")])
def test_settings_of_the_wrong_kind(settings, words):
    with pytest.raises(MinicompileError, match=words):
        minicompile.compile(wave, **settings)


@pytest.mark.parametrize("name, value", [("recompile_limit", 0), ("recompile_limit", -1), ("recompile_limit", "8"),
                                         ("recompile_limit", True), ("cudagraphs", 1), ("automatic_dynamic", None)])
def test_config_of_the_wrong_kind(name, value):
    before = getattr(minicompile.config, name)
    with pytest.raises(MinicompileError, match=name):
        setattr(minicompile.config, name, value)
    with pytest.raises(MinicompileError, match=name), minicompile.config.patch(**{name: value}):
        pass
    assert getattr(minicompile.config, name) is before


def test_every_setting_is_read_somewhere():
    folder, read = pathlib.Path(minicompile.__file__).parent, set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "config":
                read.add(node.attr)
    assert {f.name for f in dataclasses.fields(Config)} <= read
    assert set(OPTIONS) <= {f.name for f in dataclasses.fields(Config)} and set(OPTIONS.values()) <= set(minicompile.BACKENDS)


@pytest.mark.parametrize("how", ("option", "config"))
@pytest.mark.parametrize("name, words", [("max_autotune", "not tuned"), ("cudagraphs", "need a GPU")])
def test_settings_that_change_nothing_here_say_so(name, words, how, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with minicompile.config.patch(**({name: True} if how == "config" else {})):
        compiled = minicompile.compile(wave, options={name: True} if how == "option" else None)
        with pytest.warns(RuntimeWarning, match=words) as caught:
            for n in (2, 3):
                compiled(torch.ones(n))
    assert len([w for w in caught if words in str(w.message)]) == 1


@pytest.mark.parametrize("backend, unused", [("eager", set(OPTIONS)), ("aot_eager", set(OPTIONS) - {"cudagraphs", "max_autotune"}),
                                             ("cpp", set())])
def test_options_that_a_backend_has_no_use_for(backend, unused):
    for name in OPTIONS:
        minicompile.reset()
        value = not getattr(Config, name)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            minicompile.compile(wave, backend=backend, options={name: value})
        assert [name in str(w.message) for w in caught] == [True] * (name in unused), (name, caught)


# ---- other tracers, other compilers --------------------------------------------------------------------------------

def linear():
    return minicompile.compile(torch.nn.Linear(2, 2), backend="eager")


@pytest.mark.parametrize("make", (linear, lambda: minicompile.compile(wave, backend="eager"),
                                  lambda: torch.nn.Sequential(linear(), torch.nn.ReLU())), ids=("module", "function", "inside"))
def test_jit_trace_is_refused(make, tmp_path):
    compiled, x = make(), torch.ones(3, 2)
    for ran_before in (False, True):
        with pytest.raises(MinicompileError, match="torch.jit.trace"):
            torch.jit.trace(compiled, x)
        if isinstance(compiled, torch.nn.Module):
            with pytest.raises(MinicompileError, match="torch.onnx.export"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.onnx.export(compiled, (x,), str(tmp_path / "model.onnx"), dynamo=False)
        with minicompile.set_stance("force_eager"):
            traced = torch.jit.trace(compiled, x)
        y = torch.randn(5, 2)
        torch.testing.assert_close(traced(y), compiled(y))


def test_a_trace_inside_a_compiled_function():
    def function(x):
        return torch.jit.trace(wave, x)(x) + wave(x)
    compiled = minicompile.compile(function, backend="eager")
    for n in (2, 3, 2):
        torch.testing.assert_close(compiled(torch.ones(n)), function(torch.ones(n)))


@pytest.mark.filterwarnings("ignore")
def test_torch_compile_and_minicompile_call_each_other():
    lin, x = torch.nn.Linear(2, 2), torch.randn(3, 2)

    def around(function):
        return lambda x: function(x) * 2

    def decorated(function):
        @functools.wraps(function)                  # copies the marks that compilers leave on functions
        def hundred(x):
            return function(x) * 100
        return hundred

    for inner in (wave, lin):
        for one, other in ((torch.compile, minicompile.compile), (minicompile.compile, torch.compile)):
            compiled = other(around(one(inner, backend="eager")), backend="eager", fullgraph=True)
            for _ in range(2):
                torch.testing.assert_close(compiled(x), inner(x) * 2)
            compiled = other(around(decorated(one(inner, backend="eager"))), backend="eager")
            torch.testing.assert_close(compiled(x), inner(x) * 200)
            torch._dynamo.reset()
    broken = minicompile.compile(around(torch.compile(talks, backend="eager")), backend="eager")
    for n in (2, 3, 4):
        torch.testing.assert_close(broken(torch.ones(n)), talks(torch.ones(n)) * 2)


@pytest.mark.filterwarnings("ignore")
def test_tracers_see_the_program():
    from torch.fx.experimental.proxy_tensor import make_fx
    x, compiled = torch.randn(3, 2), minicompile.compile(wave, backend="eager")
    module = torch.nn.Sequential(linear(), torch.nn.ReLU())
    for _ in range(2):                              # the second time there are compiled versions
        assert [n.target for n in make_fx(compiled)(x).graph.nodes if n.op == "call_function"] == [
            torch.ops.aten.sin.default, torch.ops.aten.add.Tensor]
        for is_strict in (False, True):
            exported = torch.export.export(module, (x,), strict=is_strict)
            torch.testing.assert_close(exported.module()(x), module(x))
            assert "linear" in str(exported.graph)
        scripted = torch.jit.script(module)
        torch.testing.assert_close(scripted(x), module(x))
        compiled(x), module(x)


# ---- what the program is told --------------------------------------------------------------------------------------

def picks_a_path(x, mask):
    """As transformers makes masks: all ones are left out, unless a compiler looks, which cannot ask for values."""
    if torch.compiler.is_compiling() or not bool((mask == 1).all()):
        x = x + mask.view(-1, 1, 2)
    return helper(x)


def helper(x):
    return x.sin() @ torch.ones(3)


@pytest.mark.parametrize("backend", ("eager", None))
def test_a_path_for_compilers_that_raises(backend):
    x, ones, zeros = torch.randn(4, 3), torch.ones(2), torch.zeros(2)
    compiled = minicompile.compile(picks_a_path, backend=backend)
    for _ in range(10):
        torch.testing.assert_close(compiled(x, ones), picks_a_path(x, ones))
        with pytest.raises(RuntimeError, match="must match"):
            compiled(x, zeros)
    recorded = Recorder()
    compiled = minicompile.compile(picks_a_path, backend=recorded)
    compiled(x, ones), compiled(x, ones)
    assert recorded.ran >= 2, "what follows the question is compiled"
    refused(GraphBreakError, ("fullgraph=True", "picks_a_path", "is_compiling() True: add raised"), strict(picks_a_path), x, ones)
    assert minicompile.explain(picks_a_path, backend="eager")(x, ones).graph_count >= 1
    x = torch.randn(4, 2)
    assert strict(lambda x: x + 1 if torch.compiler.is_compiling() else x)(x).equal(x + 1)


def test_an_error_for_compilers_names_its_line():
    def f(x):
        if torch.compiler.is_compiling():
            raise ValueError("too fast")
        return float(x.sum())
    line = f.__code__.co_firstlineno + 2
    refused(GraphBreakError, ("float", f"True: the program raises ValueError(str 'too fast') ({__file__}:{line} in f)"),
            strict(f), torch.ones(2))


def test_a_piece_for_compilers_that_raises_is_followed_by_pieces_that_are_not_told():
    def f(x):
        for _ in range(3):
            print(end="")
            if torch.compiler.is_compiling():
                raise ValueError("before a break")
            print(end="")
            if torch.compiler.is_compiling():
                raise ValueError("behind it")
            x = x.sin()
        return x

    compiled = minicompile.compile(f, backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(2)), f(torch.ones(2)))


# ---- tools of torch around compiled functions ----------------------------------------------------------------------

def tools():
    import torch.autograd.forward_ad as forward_ad
    from torch._subclasses import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    def flops(f, net, x):
        with FlopCounterMode(display=False) as counted:
            net(x).sum().backward()
        return counted.get_total_flops()

    def fake(f, net, x):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            outside = mode.from_tensor(x)
            return [(type(y).__name__ == "FakeTensor", y.shape) for y in (f(outside), net(outside))]

    def dual(f, net, x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent

    def saved(f, net, x):
        buffer = io.BytesIO()
        torch.save(net, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)(x)

    def functional(f, net, x):
        zeros = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
        return torch.func.functional_call(net, zeros, (x,)), net(x)

    def parallel(f, net, x):
        """On a machine with GPUs it takes the module to one of them."""
        out = torch.nn.DataParallel(net)(x).cpu()
        net.cpu()
        return out

    return {"flops": flops, "fake": fake, "dual": dual, "saved": saved, "functional": functional,
            "vmap": lambda f, net, x: torch.vmap(f)(x), "grad": lambda f, net, x: torch.func.grad(lambda y: f(y).sum())(x),
            "jvp": lambda f, net, x: torch.func.jvp(f, (x,), (x,)), "jacrev": lambda f, net, x: torch.func.jacrev(f)(x),
            "hessian": lambda f, net, x: torch.func.hessian(lambda y: f(y).sum())(x),
            "jacobian": lambda f, net, x: torch.autograd.functional.jacobian(f, x), "deepcopy": lambda f, net, x: copy.deepcopy(net)(x),
            "parallel": parallel, "gradcheck": lambda f, net, x: torch.autograd.gradcheck(
                f, (x.double().requires_grad_(),)), "fx": lambda f, net, x: torch.fx.symbolic_trace(f)(x)}


def summed_wave(x):
    return (x.sin() * 2).sum(-1)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ("eager", None))
@pytest.mark.parametrize("name", sorted(tools()))
def test_tools_around_compiled_functions(name, backend):
    tool, x = tools()[name], torch.randn(3, 4)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU()).eval()
    want = tool(summed_wave, net, x)
    f, compiled = (minicompile.compile(t, backend=backend) for t in (summed_wave, net))
    for _ in range(2):
        torch.testing.assert_close(tool(f, compiled, x), want)
        torch.testing.assert_close(f(x), summed_wave(x))            # the second time there is a compiled version
        compiled(x).sum().backward()


# ---- transforms inside, and around what is compiled --------------------------------------------------------------------

def value(x):
    return x.sin() * x


def total(x):
    return value(x).sum()


def many_gradients(x):
    x = x.detach().requires_grad_()
    return torch.autograd.grad(value(x), x, torch.eye(3), is_grads_batched=True)[0]


def mapped_gradients(x):
    x = x.detach().requires_grad_()
    y = value(x)
    return torch.vmap(lambda v: torch.autograd.grad(y, x, v, retain_graph=True)[0])(torch.eye(3).t())


TRANSFORMS = {
    "linearize": lambda x: torch.func.linearize(value, x)[1](x), "vjp": lambda x: torch.func.vjp(value, x)[1](x)[0],
    "jvp": lambda x: torch.func.jvp(value, (x,), (x,))[1], "hessian": lambda x: torch.func.hessian(total)(x),
    "jacfwd": lambda x: torch.func.jacfwd(value)(x), "jacrev": lambda x: torch.func.jacrev(value)(x),
    "vmap of grad": lambda x: torch.vmap(torch.func.grad(total))(x.expand(2, 3) + torch.ones(2, 1)),
    "jacobian": lambda x: torch.autograd.functional.jacobian(value, x),
    "vectorized jacobian": lambda x: torch.autograd.functional.jacobian(value, x, vectorize=True),
    "functional vjp": lambda x: torch.autograd.functional.vjp(value, x, x)[1],
    "many gradients": many_gradients, "mapped gradients": mapped_gradients,
}


@pytest.mark.parametrize("rung", ("aot_eager", "cpp"))
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_give_what_eager_gives_without_a_warning(name, rung, monkeypatch):
    transform, x = TRANSFORMS[name], torch.tensor([0.5, 1.0, -2.0])
    wanted = transform(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        inside = minicompile.compile(transform, backend=rung)
        for _ in range(3):
            torch.testing.assert_close(inside(x), wanted)
        for part in (value, total):
            monkeypatch.setitem(globals(), part.__name__, minicompile.compile(part, backend=rung))
        for _ in range(3):
            torch.testing.assert_close(transform(x), wanted)
