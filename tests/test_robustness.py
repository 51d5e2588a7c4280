"""Whatever happens around the compiler or inside it, the user's program gets its result, and the same exceptions."""
import copy
import cProfile
import functools
import gc
import inspect
import itertools
import logging
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import types
import warnings
import weakref

import pytest
import torch
import torch.utils.checkpoint

import minicompile
from minicompile import driver, frames, logs, versions
from minicompile.ch01_graphs.fake import FakeTensor
from minicompile.ch02_guards import codegen, guards
from minicompile.ch03_capture import capture, hook
from minicompile.ch03_capture.library import contexts
from minicompile.ch04_breaks import steps
from minicompile.ch11_runtime import host

ROOT = pathlib.Path(minicompile.__file__).parents[1]

pytestmark = pytest.mark.usefixtures("reset")


def chain(x):
    y = x.sin() * 2
    return y + 1


def broken_in_two(x):
    y = x.sin()
    print(end="")
    return y.cos() + 1


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()


def close(a, b):
    return torch.allclose(a, b, atol=1e-6)


def script(text, *, timeout=120, **env):
    """Run a script in a process of its own: what it printed. It must end well."""
    done = subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", textwrap.dedent(text)], cwd=ROOT, text=True,
                          capture_output=True, timeout=timeout,
                          env={**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT), **env})
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}{done.stderr[-3000:]}"
    return done.stdout


def warned(function, *args):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function(*args)
    return result, [str(w.message) for w in caught if w.category is RuntimeWarning]


# ---- errors of the compiler itself ---------------------------------------------------------------------------------

STAGES = {"capture": (capture, "trace_frame"), "epilogue": (capture, "finish_capture"), "guards": (codegen, "build_entry"),
          "callback": (frames, "target_for"),
          "differentiate": (driver, "compile_training"), "decompose": (driver, "decompose"), "lower": (driver, "lower"),
          "fuse": (driver, "fuse"), "emit": (driver, "compile_schedule")}


@pytest.mark.parametrize("stage", STAGES)
def test_an_internal_error_in_any_stage_runs_the_frame_eagerly(stage, monkeypatch):
    module, name = STAGES[stage]

    def fails(*args, **kwargs):
        raise IndexError(f"injected in {stage}")

    monkeypatch.setattr(module, name, fails)
    x = torch.randn(3)
    compiled = minicompile.compile(chain)
    texts = []
    for _ in range(3):
        result, more = warned(compiled, x)
        assert torch.equal(result, chain(x))
        texts += more
    assert len(texts) == 1, texts
    assert "chain" in texts[0] and "test_robustness.py" in texts[0] and f"injected in {stage}" in texts[0]
    assert "report" in texts[0] and "raise_on_internal_error" in texts[0]
    minicompile.reset()
    with minicompile.config.patch(raise_on_internal_error=True), pytest.raises(IndexError, match="injected"):
        minicompile.compile(chain)(x)
    monkeypatch.undo()
    minicompile.reset()
    result, texts = warned(compiled, x)
    assert close(result, chain(x)) and not texts


@pytest.mark.parametrize("backend", ["loops", "cpp"])
def test_an_internal_error_in_a_backward_that_is_compiled_late(backend, monkeypatch):
    """It was expected that only the loss is differentiated; when the other result is, forward has long run."""
    def program(x):
        return x.sin() * 2, (x.cos() * 3).sum()

    def fails(*args, **kwargs):
        raise IndexError("injected")

    def gradient(function):
        x = torch.linspace(0, 1, 5, requires_grad=True)
        function(x)[0].sum().backward()
        return x.grad

    compiled = minicompile.compile(program, backend=backend)
    strict = minicompile.compile(program, backend=backend, fullgraph=True)
    x = torch.linspace(0, 1, 5, requires_grad=True)
    compiled(x)[1].backward()
    strict(x)[1].backward()
    monkeypatch.setattr(driver, "fuse", fails)
    texts = []
    for _ in range(2):
        found, more = warned(gradient, compiled)
        assert close(found, gradient(program))
        texts += more
    assert len(texts) == 1 and "the backward of program" in texts[0] and "injected" in texts[0]
    with pytest.raises(minicompile.errors.InternalError, match="injected"):
        gradient(strict)


def test_an_internal_error_while_explaining_a_miss(monkeypatch):
    def fails(*args, **kwargs):
        raise IndexError("injected")

    compiled = minicompile.compile(chain, backend="eager")
    compiled(torch.ones(2))
    monkeypatch.setattr(codegen, "failing_guard", fails)
    result, texts = warned(compiled, torch.ones(2).double())
    assert result.dtype == torch.float64 and len(texts) == 1 and "injected" in texts[0]


def test_an_internal_error_after_a_break(monkeypatch):
    compiled = minicompile.compile(broken_in_two, backend="eager")
    original = capture.trace_frame

    def fails_in_the_rest(func, *args, **kwargs):
        if "resume" in func.__qualname__:
            raise IndexError("injected")
        return original(func, *args, **kwargs)
    monkeypatch.setattr(capture, "trace_frame", fails_in_the_rest)
    x = torch.randn(3)
    for expected in (1, 0):
        result, texts = warned(compiled, x)
        assert torch.equal(result, broken_in_two(x)) and len(texts) == expected


def test_making_the_resume_function_fails(monkeypatch):
    def fails(*args, **kwargs):
        raise IndexError("injected")
    monkeypatch.setattr(steps, "make_resume", fails)
    x = torch.randn(3)
    result, texts = warned(minicompile.compile(broken_in_two, backend="eager"), x)
    assert torch.equal(result, broken_in_two(x)) and len(texts) == 1 and "broken_in_two" in texts[0]


def test_memory_error_and_recursion_error_of_a_backend():
    for error in (MemoryError("no memory"), RecursionError("too deep"), AssertionError("assert"), StopIteration(3)):
        def backend(gm, inputs):
            raise error
        x = torch.randn(3)
        with pytest.raises(minicompile.BackendError, match=type(error).__name__) as caught:
            minicompile.compile(chain, backend=backend)(x)
        assert caught.value.__cause__ is error
        minicompile.reset()


def test_a_warning_that_is_an_error_does_not_lose_the_result(monkeypatch):
    def fails(*args):
        raise IndexError("injected")
    monkeypatch.setattr(driver, "lower", fails)
    x, compiled = torch.randn(3), minicompile.compile(chain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="injected"):
            compiled(x)
        assert torch.equal(compiled(x), chain(x)), "the state stays usable"


@pytest.mark.parametrize("wrong, words", [
    (lambda gm, inputs: None, "None"), (lambda gm, inputs: 3, "returned 3"),
    (lambda gm, inputs: lambda *a: 3, "1 output"), (lambda gm, inputs: lambda *a: (), "1 output"),
    (lambda gm: gm.forward, "argument")])
def test_what_a_backend_may_return(wrong, words):
    with pytest.raises(Exception) as caught:
        with minicompile.config.patch(raise_on_internal_error=True):
            minicompile.compile(chain, backend=wrong)(torch.ones(2))
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "backend '" in text and words in text, text


def test_a_broken_entry_guard_is_not_a_user_exception():
    class Odd:
        def __init__(self):
            self.value = 2

    odd = Odd()

    def f(x):
        return x * odd.value
    compiled = minicompile.compile(f, backend="eager")
    assert compiled(torch.ones(1)).item() == 2
    del odd.value
    with pytest.raises(AttributeError):
        compiled(torch.ones(1))
    odd.value = 3
    assert compiled(torch.ones(1)).item() == 3


# ---- interrupts ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupted_while_compiling(stage, error, monkeypatch):
    module, name = STAGES[stage]
    original, armed = getattr(module, name), [True]

    def interrupted(*args, **kwargs):
        if armed:
            armed.clear()
            raise error
        return original(*args, **kwargs)
    monkeypatch.setattr(module, name, interrupted)
    compiled, x = minicompile.compile(chain), torch.randn(3)
    with pytest.raises(error):
        compiled(x)
    assert hook._c.get_region() is None and torch.is_grad_enabled()
    before = driver.counters.graphs
    result, texts = warned(compiled, x)
    assert close(result, chain(x)) and not texts and driver.counters.graphs == before + 1


class Entered:
    def __init__(self, log):
        self.log = log

    def __enter__(self):
        self.log.append("enter")

    def __exit__(self, kind, *_):
        self.log.append(f"exit {kind and kind.__name__}")


def blocks_around_breaks(x, log):
    log.append(torch.is_grad_enabled())
    print(end="")
    try:
        with Entered(log), torch.no_grad():
            print(end="")
            for _ in range(2):
                x = x.sin() + 1
                print(end="")
        print(end="")
        return x.cos()
    finally:
        log.append("finally")


def endless(x, log):
    try:
        log.append("try")
        print(end="")
        return endless(x * 2, log)
    finally:
        log.append("finally")


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_limit_of_recursion_passes_the_blocks_around_a_break(backend):
    compiled, limit = minicompile.compile(endless, backend=backend), sys.getrecursionlimit()
    for depth in (250, 250, 251, 252, 253):
        log = []
        sys.setrecursionlimit(depth)
        try:
            compiled(torch.ones(2), log)
        except RecursionError:
            pass
        finally:
            sys.setrecursionlimit(limit)
        assert len(log) > 100 and log.count("try") == log.count("finally")


@pytest.mark.parametrize("where", ["compile_frame", "call_backend", "target_for", "why_not_here", "guards"])
def test_what_interrupts_the_rest_of_a_function_passes_its_blocks(where, monkeypatch):
    """Ctrl-C while a piece behind a break is met, compiled, or runs, or in its guards: `with` is left, and `finally` runs, as in eager."""
    class Interrupt(BaseException):
        pass

    def strike():
        passed.append(where)
        if len(passed) == moment:
            raise Interrupt

    def before(original):
        def run(*args, **kwargs):
            strike()
            return original(*args, **kwargs)
        hook.skip_code(run.__code__)
        return run
    hook.skip_code(strike.__code__)
    x, ends = torch.ones(2, requires_grad=True), set()
    if where == "guards":
        monkeypatch.setattr(codegen, "is_usual", lambda guard: False)
        monkeypatch.setitem(guards.STATE, "GRAD_MODE", before(torch.is_grad_enabled))
    elif where == "call_backend":
        monkeypatch.setattr(versions, where, lambda *args, original=versions.call_backend: before(original(*args)))
    else:
        monkeypatch.setattr(frames, where, before(getattr(frames, where)))
    for moment in range(1, 60):
        minicompile.reset()
        passed, log, compiled = [], [], minicompile.compile(blocks_around_breaks, backend="eager")
        try:
            compiled(x, log)
            break
        except Interrupt:
            pass
        assert torch.is_grad_enabled(), moment
        assert log.count("enter") == sum(str(item).startswith("exit") for item in log), (moment, log)
        ends.add(str(log[1:]))
    assert log == [True, "enter", "exit None", "finally"] and moment > 3
    assert {"['enter', 'exit Interrupt', 'finally']", "['enter', 'exit None', 'finally']"} <= ends


@pytest.mark.parametrize("leave", ["exit_autocast", "switch_grad"])
def test_interrupted_while_a_context_is_left(leave, monkeypatch):
    def f(x):
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            return x @ x

    def interrupted(*args):
        raise KeyboardInterrupt
    compiled, x = minicompile.compile(f, backend="eager"), torch.ones(4, 4)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(contexts, leave, interrupted)
        compiled(x)
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu") and not torch._C._len_torch_dispatch_stack()
    assert compiled(x).dtype == torch.bfloat16


@pytest.mark.parametrize("where", ["guards", "graph"])
def test_what_a_handler_of_signals_raises_in_compiled_code(where, monkeypatch):
    """It is neither a guard that fails nor an error of the graph, after which the frame would be evaluated."""
    calls, armed = [], []

    def handler(*_):
        armed.clear()
        raise TimeoutError

    def strike():
        if armed:
            signal.raise_signal(signal.SIGUSR1)
        return torch.is_grad_enabled()
    hook.skip_code(strike.__code__)

    def call_backend(*args, original=versions.call_backend):
        graph = original(*args)
        return lambda *inputs: (strike(), graph(*inputs))[1]
    if where == "guards":
        monkeypatch.setattr(codegen, "is_usual", lambda guard: False)           # a memo would vouch for it
        monkeypatch.setitem(guards.STATE, "GRAD_MODE", strike)
    else:
        monkeypatch.setattr(versions, "call_backend", call_backend)

    def f(x):
        calls.append(0)
        y = x + 1
        print(end="")
        return y * 2
    old, compiled, x = signal.signal(signal.SIGUSR1, handler), minicompile.compile(f, backend="eager"), torch.ones(2)
    try:
        compiled(x)
        before = driver.counters.graphs
        for _ in range(3):
            armed.append(True)
            calls.clear()
            with pytest.raises(TimeoutError):
                compiled(x)
            assert not calls and not armed and torch.is_grad_enabled()
        assert compiled(x).tolist() == [4, 4] and driver.counters.graphs == before
    finally:
        signal.signal(signal.SIGUSR1, old)


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")
def test_signals_at_any_moment():
    """A handler that raises, and one that calls compiled code, at many moments of a compilation. Afterwards nothing is held that
    another thread would wait for. In a process of its own: what such a signal leaves behind must not reach other tests."""
    assert script("""
        import signal, threading, torch, minicompile
        from minicompile.ch03_capture import hook

        def chain(x):
            return x.sin() * 2 + 1
        def broken_in_two(x):
            y = x.sin()
            print(end="")
            return y.cos() + 1
        class Stop(BaseException):
            pass
        def stop(*_):
            raise Stop

        x = torch.randn(3)
        expected = broken_in_two(x)
        inner = minicompile.compile(chain, backend="eager")
        results, threads = [], []
        signal.signal(signal.SIGALRM, stop)
        for n in range(60):
            minicompile.reset()
            compiled = minicompile.compile(broken_in_two, backend="aot_eager")
            if n == 40:
                signal.signal(signal.SIGALRM, lambda *_: results.append(inner(x)))
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0004 * (1 + n % 25))
                compiled(x)
            except Stop:
                pass
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert hook._c.get_region() is None and torch.is_grad_enabled()
            assert torch.allclose(compiled(x), expected)
            threads.append(threading.Thread(target=lambda: minicompile.compile(lambda x: x + n, backend="eager")(x), daemon=True))
            threads[-1].start()
            threads[-1].join(30)
            assert not threads[-1].is_alive(), "a lock is held for ever"
        assert results and torch.equal(inner(x), chain(x))
        assert all(type(r) is torch.Tensor and torch.equal(r, chain(x)) for r in results)
        print("ok")
        """) == "ok\n"


# ---- threads, recursion, re-entrance -------------------------------------------------------------------------------

def in_threads(count, work):
    """work(n) in `count` threads at once; raises what they raise, and when they do not end."""
    errors, barrier = [], threading.Barrier(count)

    def run(n):
        try:
            barrier.wait(30)
            work(n)
        except BaseException as error:
            errors.append(error)
    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(count)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not any(t.is_alive() for t in threads), "deadlock"
    if errors:
        raise errors[0]


@pytest.mark.parametrize("backend", ["eager", "default"])
def test_eight_threads(backend):
    def other(x):
        y = x.cos()
        print(end="")
        return y * x.shape[0]

    def third(x, k=2):
        if x.sum() > 0:
            return x * k
        return x - k
    functions = [(minicompile.compile(f, backend=backend), f) for f in (chain, other, third, broken_in_two)]

    def work(n):
        for round in range(6):
            for compiled, f in functions[n % 4:] + functions[:n % 4]:
                x = torch.randn(2 + (n + round) % 5, 3, requires_grad=n % 2 == 0)
                y = compiled(x)
                torch.testing.assert_close(y, f(x))
                if n % 2 == 0:
                    grad, = torch.autograd.grad(y.sum(), x)
                    torch.testing.assert_close(grad, torch.autograd.grad(f(x).sum(), x)[0])
    in_threads(8, work)


def test_threads_that_compile_reset_and_forget():
    def work(n):
        for round in range(8):
            def mine(x, n=n):
                return x * n + round
            compiled = minicompile.compile(mine, backend="eager")
            for size in (2, 3, 4):
                assert torch.equal(compiled(torch.ones(size)), mine(torch.ones(size)))
            if n == 0:
                minicompile.reset()
            if n == 1:
                gc.collect()
    in_threads(8, work)


def test_options_and_stances_of_one_thread_do_not_leak_into_compilations_of_another():
    seen = {}

    def backend(gm, inputs):
        time.sleep(0.01)
        seen.setdefault(threading.current_thread().name, set()).add(minicompile.config.max_autotune)
        return gm.forward

    def work(n):
        threading.current_thread().name = f"worker{n % 2}"
        for k in range(3):
            minicompile.compile(lambda x: x * k + n, backend=backend,
                                options={"max_autotune": n % 2 == 0})(torch.ones(2))
    in_threads(4, work)
    assert seen == {"worker0": {True}, "worker1": {False}}


def factorial(x, n):
    return x if n <= 1 else factorial(x * n, n - 1)


def even(x, n):
    print(end="")
    return x.sin() if n == 0 else odd(x + 1, n - 1)


def odd(x, n):
    return x.cos() if n == 0 else even(x * 2, n - 1)


def test_recursion():
    x = torch.randn(3)
    assert close(minicompile.compile(factorial, backend="eager")(x, 6), factorial(x, 6))
    compiled = minicompile.compile(even, backend="eager")
    for n in (5, 4, 5):
        assert torch.equal(compiled(x, n), even(x, n))


def test_a_compiled_function_that_calls_itself():
    @minicompile.compile(backend="eager")
    def down(x, n):
        print(end="")
        return x if n == 0 else down(x + n, n - 1)
    assert down(torch.zeros(1), 6).item() == 21

    def ping(x, n):
        print(end="")
        return x if n == 0 else pong(x + 1, n - 1)

    @minicompile.compile(backend="eager")
    def pong(x, n):
        print(end="")
        return x if n == 0 else ping(x * 2, n - 1)
    ping = minicompile.compile(ping, backend="aot_eager")
    assert ping(torch.ones(1), 4).item() == 10


def test_endless_recursion_raises_as_in_eager():
    def forever(x, n):
        print(end="")
        return forever(x + 1, n + 1)
    compiled = minicompile.compile(forever, backend="eager")
    for _ in range(2):
        with pytest.raises(RecursionError):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compiled(torch.ones(1), 0)
    assert close(minicompile.compile(chain)(torch.ones(2)), chain(torch.ones(2)))


@pytest.mark.processes
def test_recursion_as_deep_as_eager_allows():
    """A graph break adds two frames to every level; they are not counted. And the end of the C stack is an error, no crash."""
    out = script("""
        import sys, torch, minicompile
        def deep(x, n):
            print(end="")
            return x.sin() if n == 0 else deep(x, n - 1)
        def forever(x, n):
            global reached
            reached = n
            print(end="")
            return forever(x, n + 1)
        print(torch.equal(minicompile.compile(deep, backend="eager")(torch.ones(2), 600), torch.ones(2).sin()))
        for limit in (1000, 1_000_000):
            sys.setrecursionlimit(limit)
            try:
                minicompile.compile(forever, backend="eager")(torch.ones(1), 0)
            except RecursionError:
                print(reached > 900)
    """)
    assert out == "True\nTrue\nTrue\n"


@pytest.mark.processes
def test_the_recursion_limit_inside_of_a_mode_of_functions():
    """There PyTorch cannot import the module whose function it is to hand to the mode, and goes on with what it has not got."""
    out = script("""
        import torch
        from minicompile.interrupts import ThreadState
        from minicompile.versions import leave_modes
        def deep(restore):
            try:
                deep(restore)
            except RecursionError as error:
                restore(error)
                raise
        before = ThreadState()
        for restore in (lambda error: leave_modes(True, error), lambda error: before.restore()):
            with torch.device("cpu"), torch.no_grad():
                before.depth = torch._C._len_torch_function_stack()
                try:
                    deep(restore)
                except RecursionError:
                    print(torch._C._len_torch_function_stack())
    """)
    assert out == "1\n1\n"


def at_depth(n, function):
    return function() if n == 0 else at_depth(n - 1, function)


@pytest.mark.processes
def test_the_recursion_limit_strikes_where_the_compiler_is_asked_about_a_frame_of_its_own():
    """Then the call runs eagerly: that is no exception of a handler of signals, which the program would be given. In a process of its own,
    since each code object is asked about once."""
    script("""
        import warnings, torch, minicompile
        from minicompile import interrupts
        asked, original = [], interrupts.is_of_library
        def strike(filename):
            asked.append(filename)
            if len(asked) == 20:
                raise RecursionError
            return original(filename)
        interrupts.is_of_library = strike
        warnings.simplefilter("ignore")
        x = torch.ones(2)
        torch.testing.assert_close(minicompile.compile(lambda x: x.sin() * 3 + 1)(x), x.sin() * 3 + 1)
        assert len(asked) > 20
    """)


def test_what_is_nested_too_deeply_in_one_call_is_compiled_in_the_next():
    def nested(x, n):
        return x.sin() if n == 0 else nested(x, n - 1)

    def backend(gm, inputs):
        sizes.append(sum(n.op == "call_method" for n in gm.graph.nodes))
        return gm
    sizes, compiled = [], minicompile.compile(lambda x: nested(x.cos(), 70), backend=backend)
    for depth in (sys.getrecursionlimit() // 2 - 50, 0):
        at_depth(depth, lambda: compiled(torch.ones(2)))
    assert sizes[-1] == 2


def test_a_backward_that_was_nested_too_deeply_is_compiled_in_the_next_call(monkeypatch):
    calls, compile_aten = [], driver.compile_aten

    def too_deep_at_first(gm, *, is_backward, **named):
        calls.append(is_backward)
        if calls.count(True) == 2:                       # the first guesses which gradients will come
            raise RecursionError
        return compile_aten(gm, is_backward=is_backward, **named)
    monkeypatch.setattr(driver, "compile_aten", too_deep_at_first)
    compiled = minicompile.compile(lambda x: (x.sin().sum(), x.cos() * 3))
    for _ in range(3):
        x = torch.randn(3, requires_grad=True)
        compiled(x)[1].sum().backward()
        assert close(x.grad, -3 * x.detach().sin())
    assert calls == [False, True, True, True]


def test_a_kernel_waited_for_from_too_deep_is_there_in_the_next_call(monkeypatch):
    waits = []

    class Kernel:
        def resolve(self):
            waits.append(self)
            if len(waits) == 1:
                raise RecursionError
            return "built"
    program = types.SimpleNamespace(namespace={"k": Kernel()}, numbers={"k": 0}, resolved=False)
    with pytest.raises(RecursionError):
        host.resolve_kernels(program)
    assert not program.resolved
    host.resolve_kernels(program)
    assert program.resolved and program.namespace["k"] == "built"


def test_compiling_while_running_compiled_code():
    inner = minicompile.compile(chain, backend="eager")

    def backend(gm, inputs):
        first = inner(torch.ones(3))                             # while compiling
        assert torch.equal(first, chain(torch.ones(3)))

        def call(*inputs):
            assert torch.equal(inner(torch.ones(4)), chain(torch.ones(4)))     # while running
            return gm.forward(*inputs)
        return call

    def outer(x):
        print(end="")
        return inner(x) + minicompile.compile(broken_in_two, backend="aot_eager")(x)
    x = torch.randn(3)
    for _ in range(2):
        assert torch.equal(minicompile.compile(outer, backend=backend)(x), chain(x) + broken_in_two(x))


def test_compiled_code_inside_dispatch_and_function_modes():
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    compiled, calls = minicompile.compile(chain, backend="aot_eager"), []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(func)
            return func(*args, **(kwargs or {}))

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.sin.default:
                compiled(torch.ones(2))
            return func(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))
    x = torch.randn(3)
    for mode in (Dispatch, Calls, Function):
        for _ in range(2):
            with mode():
                assert close(compiled(x), chain(x))
    assert torch.ops.aten.sin.default in calls


# ---- processes -----------------------------------------------------------------------------------------------------

@pytest.mark.processes
@pytest.mark.parametrize("backend", ["eager", "default"])
def test_fork(backend):
    out = script(f"""
        import os, torch, minicompile, threading, time
        def f(x): return (x.sin() * 2).relu()
        def g(x):
            y = x.cos()
            print(end="")
            return y + 1
        f_, g_ = (minicompile.compile(h, backend={backend!r}) for h in (f, g))
        def check(n):
            x = torch.randn(n)
            torch.testing.assert_close(f_(x), f(x)); torch.testing.assert_close(g_(x), g(x))
        def slow(gm, inputs):
            time.sleep(0.5)
            return gm.forward
        def child(n):
            pid = os.fork()
            if pid == 0:
                check(n); check(n + 1); os._exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        child(3)                       # before anything is compiled
        check(3)
        child(3); child(5)             # with entries, and a new version
        t = threading.Thread(target=minicompile.compile(lambda x: x + 1, backend=slow), args=(torch.ones(2),)); t.start()
        time.sleep(0.1)
        child(6)                       # while another thread compiles
        t.join(); check(7); print("ok")
    """)
    assert out == "ok\n"


@pytest.mark.processes
def test_a_fork_waits_until_nobody_compiles():
    """The child would have the locks and the switched-off collector of a thread that it does not have."""
    out = script("""
        import gc, os, torch, minicompile, threading, time
        started, done = threading.Event(), []
        def slow(gm, inputs):
            started.set(); time.sleep(0.5); done.append(1)
            return gm.forward
        t = threading.Thread(target=minicompile.compile(lambda x: x + 1, backend=slow), args=(torch.ones(2),)); t.start()
        started.wait()
        if (pid := os.fork()) == 0:
            os._exit(0 if done and gc.isenabled() else 1)
        assert os.waitpid(pid, 0)[1] == 0
        t.join(); print(minicompile.compile(lambda x: x * 2)(torch.ones(1)).item())
    """)
    assert out == "2.0\n"


@pytest.mark.processes
def test_multiprocessing_spawn(tmp_path):
    (tmp_path / "spawned.py").write_text(textwrap.dedent("""
        import multiprocessing, torch, minicompile
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = torch.nn.Linear(2, 2)
            def forward(self, x):
                return self.linear(x).relu()
        def work(model, x, queue):
            queue.put(model(x).tolist())
        if __name__ == "__main__":
            torch.manual_seed(0)
            model, x = minicompile.compile(Net(), backend="eager"), torch.ones(1, 2)
            expected = model(x).tolist()
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            process = context.Process(target=work, args=(model, x, queue))
            process.start()
            assert queue.get(timeout=100) == expected
            process.join()
            print("ok")
    """))
    done = subprocess.run([sys.executable, str(tmp_path / "spawned.py")], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.stdout == "ok\n", done.stderr


@pytest.mark.processes
def test_shutdown_with_compiled_functions():
    out = script("""
        import atexit, torch, minicompile, threading, weakref
        def f(x):
            y = x.sin()
            print(end="")
            return y * 2
        compiled = minicompile.compile(f)
        compiled(torch.ones(3))
        atexit.register(lambda: print("atexit", compiled(torch.ones(3)).shape, compiled(torch.ones(4)).shape))
        class Last:
            def __del__(self, compiled=compiled, x=torch.ones(3)):           # the globals may be gone
                try:
                    compiled(x)
                except Exception as error:
                    print("error", type(error))
        keep = Last()
        def later():
            threading.main_thread().join()
            print("thread", [len(compiled(torch.ones(n))) for n in range(2, 5)])
        threading.Thread(target=later).start()
    """)
    assert out == "thread [2, 3, 4]\natexit torch.Size([3]) torch.Size([4])\n"


# ---- exceptions ----------------------------------------------------------------------------------------------------

def divide(x, n):
    y = x + 1
    print(end="")
    return y, 1 // n


def calls_divide(x, n):
    try:
        return divide(x, n)
    except ZeroDivisionError as error:
        raise ValueError("wrapped") from error


def test_exceptions_through_compiled_frames():
    for f, name in ((divide, ZeroDivisionError), (calls_divide, ValueError)):
        compiled, x = minicompile.compile(f, backend="eager"), torch.ones(2)
        assert compiled(x, 1)[1] == 1
        for _ in range(2):
            with pytest.raises(name) as eager:
                f(x, 0)
            with pytest.raises(name) as caught:
                compiled(x, 0)
            lines = [e.line for e in traceback.extract_tb(caught.value.__traceback__) if e.filename == __file__]
            assert "return y, 1 // n" in lines or name is ValueError, lines
            assert [type(caught.value.__cause__), type(caught.value.__context__)] == [
                type(eager.value.__cause__), type(eager.value.__context__)]


def test_a_traceback_names_each_line_once():
    def raises(x):
        raise ValueError(1)

    def broken(x):
        y = x + 1
        print(end="")
        return raises(y)

    def outer(x):
        return broken(x)

    def lines(function):
        try:
            function(torch.ones(2))
        except ValueError as error:
            entries = traceback.extract_tb(error.__traceback__)
            return [(e.name.split("__resume")[0], e.lineno) for e in entries if e.filename == __file__]
    compiled = minicompile.compile(outer, backend="eager")
    assert lines(compiled) == lines(compiled) == lines(outer)


def test_context_of_an_exception_raised_while_handling_another():
    def f(x):
        if x.shape[0] == 2:
            raise KeyError("inner")
        return x + 1
    compiled = minicompile.compile(f, backend="eager")
    for _ in range(2):
        try:
            try:
                raise ValueError("outer")
            except ValueError:
                compiled(torch.ones(2))
        except KeyError as error:
            assert isinstance(error.__context__, ValueError) and error.__context__.__context__ is None
        try:
            compiled(torch.ones(2))
        except KeyError as error:
            assert error.__context__ is None


def deprecated(x, message):
    warnings.warn(message, FutureWarning, stacklevel=2)
    return x + 1


class Warns(torch.nn.Module):
    def forward(self, x, k, broken):
        warnings.warn(f"call {k}")
        if broken:
            print(end="")
        x = deprecated(x, "inner")
        try:
            warnings.warn(DeprecationWarning("own"))
        except DeprecationWarning as error:
            return x * 3, str(error)
        warnings.warn("of the caller", stacklevel=2)
        warnings.warn("of nobody", stacklevel=100)
        if k == 2:
            warnings.warn("no category", int)
        return x * 2, None


@pytest.mark.parametrize("action", ["always", "default", "error", "module"])
def test_warnings_come_from_the_line_that_gives_them(action):
    def calls(function):
        globals().pop("__warningregistry__", None)
        seen = []
        for k in (1, 1, 2):
            for broken in (False, True):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    if action == "module":
                        warnings.filterwarnings("ignore", module=__name__)
                    elif action != "always":
                        warnings.simplefilter(action, DeprecationWarning)
                    try:
                        result = function(torch.ones(2), k, broken)
                        seen += [result[0].tolist(), result[1]]
                    except TypeError as error:
                        seen.append(str(error))
                seen += [(str(w.message), w.category, w.filename, w.lineno) for w in caught]
        return seen
    module = Warns()
    for target in (module, module.forward):
        minicompile.reset()
        assert calls(minicompile.compile(target, backend="eager")) == calls(target)


def warns_and_looks(told, x):
    for k in range(3):
        x = x + 1
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            deprecated(x, "first")
            told.append(len(caught))
            deprecated(x, "second")
            told.append([str(w.message) for w in caught])
    return x


def warns_and_asks(told, x):
    shown = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *rest: shown.append(str(message))
        x = deprecated(x, "first")
        told.append(len(shown))
    return x


@pytest.mark.parametrize("program", [warns_and_looks, warns_and_asks])
def test_a_program_that_looks_at_its_warnings_finds_them_in_time(program):
    told, compiled, by_compiled = [], minicompile.compile(program, backend="eager"), []
    for _ in range(2):
        assert torch.equal(program(told, torch.ones(2)), compiled(by_compiled, torch.ones(2)))
    assert told == by_compiled


def test_locals_do_not_outlive_a_call():
    def f(x, bad):
        y = x * 2
        print(end="")
        if bad:
            raise ValueError
        return y.sum()
    compiled = minicompile.compile(f, backend="eager")
    for bad in (False, True, False, True):
        x = torch.randn(5)
        alive = weakref.ref(x)
        try:
            compiled(x, bad)
        except ValueError:
            pass
        del x
        gc.collect()
        assert alive() is None


def test_an_exception_of_a_kernel_reaches_the_caller():
    def f(table, index):
        return table[index] * 2
    compiled = minicompile.compile(f)
    table = torch.randn(4)
    assert torch.equal(compiled(table, torch.tensor([1, 2])), f(table, torch.tensor([1, 2])))
    with pytest.raises(IndexError):
        compiled(table, torch.tensor([1, 9]))
    assert torch.equal(compiled(table, torch.tensor([3, 0])), f(table, torch.tensor([3, 0])))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_exception_of_a_kernel_is_raised_where_eager_raises_it(backend):
    """After the side effects that come before it, and inside of the `try` and the `with` around it."""
    log = []

    def f(table, index):
        log.append("before")
        try:
            with torch.no_grad():
                return table[index] * 2
        except IndexError:
            log.append(torch.is_grad_enabled())
        return table.index_select(0, index - 9)
    compiled = minicompile.compile(f, backend=backend)
    table = torch.randn(4)
    assert torch.equal(compiled(table, torch.tensor([1, 2])), table[1:3] * 2) and log == ["before"]
    assert torch.equal(compiled(table, torch.tensor([9, 10])), table[:2])
    assert log == ["before", "before", True] and torch.is_grad_enabled()
    with pytest.raises(IndexError):
        compiled(table, torch.tensor([5]))
    assert log[3:] == ["before", True] and torch.is_grad_enabled()


@pytest.fixture(scope="module")
def refusing():
    """An operator of the program's, which raises where its argument is negative."""
    def refuse(x):
        if (x < 0).any():
            raise LookupError("negative")
        return x + 1
    library = torch.library.Library("test_robustness", "DEF")
    library.define("refuse(Tensor x) -> Tensor")
    library.impl("refuse", refuse, "CompositeExplicitAutograd")
    library.impl("refuse", torch.empty_like, "Meta")
    yield torch.ops.test_robustness.refuse
    library._destroy()


REFUSALS = {
    "operator": "x = refuse(x)",
    "index": "x = x + table[x.long().clamp(max=0) * 9 + 2]",
    "autocast": "with torch.autocast('cpu', torch.bfloat16):\n    x = x + table[x.long().clamp(max=0) * 9 + 2]",
    "random": "x = x + torch.rand(2) * 0\nx = refuse(x)",
    "write": "written.add_(1)\nx = refuse(x)"}
AROUND = {
    "inside": "with Entered(log):\n    BREAK\n    RAISE",
    "behind": "with Entered(log), torch.no_grad():\n    BREAK\nlog.append('left')\nRAISE",
    "handled": "try:\n    with Entered(log):\n        BREAK\n        RAISE\nexcept LookupError:\n    log.append('handled')",
    "not handled": "try:\n    BREAK\nexcept LookupError:\n    return x * 0\nRAISE",
    "finally": "try:\n    BREAK\nfinally:\n    log.append('finally')\nlog.append('left')\nRAISE",
    "no break": "with Entered(log), torch.no_grad():\n    log.append('in')\n    RAISE"}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("what", REFUSALS)
def test_what_a_graph_raises_passes_the_blocks_as_in_eager(what, around, backend, refusing):
    """Exactly, where the graph leaves no trace. Otherwise every block that was entered is left, and nobody else has the exception."""
    text = AROUND[around].replace("BREAK", "print(end='')")
    indent = re.search("( *)RAISE", text)[1]
    text = text.replace("RAISE", REFUSALS[what].replace("\n", "\n" + indent))
    log, written = [], torch.zeros(2)
    names = {"torch": torch, "Entered": Entered, "log": log, "refuse": refusing, "table": torch.ones(3), "written": written}
    exec("def f(x):\n" + textwrap.indent(text, "    ") + "\n    log.append('end')\n    return x * 2", names)

    def outcome(function, x):
        log.clear()
        try:
            result = function(x).tolist()
        except LookupError:
            result = "raised"
        assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
        return result, log[:]
    compiled = minicompile.compile(names["f"], backend=backend)
    for x in (torch.ones(2), -torch.ones(2), torch.ones(2), -torch.ones(2)):
        result, events = outcome(compiled, x)
        expected, in_eager = outcome(names["f"], x)
        assert result == expected
        if what in ("random", "write") and x[0] < 0:
            assert events.count("enter") == sum(event.startswith("exit") for event in events)
        else:
            assert events == in_eager


def test_a_faulty_kernel_is_not_hidden(monkeypatch):
    def faulty(inputs):
        raise RuntimeError("injected")
    monkeypatch.setattr(driver, "compile_aten", lambda *args, **kwargs: faulty)
    with pytest.raises(RuntimeError, match="injected"):
        minicompile.compile(chain, backend="aot_eager")(torch.ones(2))


# ---- copies --------------------------------------------------------------------------------------------------------

@minicompile.compile(backend="eager")
def decorated(x):
    return x * 3


class Holder(torch.nn.Module):
    """A module that holds a compiled child and a compiled function, and has a compiled method."""

    def __init__(self):
        super().__init__()
        self.net = minicompile.compile(Net(), backend="eager")
        self.function = decorated

    def forward(self, x):
        return self.method(self.function(self.net(x)))

    @minicompile.compile(backend="eager")
    def method(self, x):
        return x + 1


def test_copies_of_modules_that_hold_compiled_things():
    holder, x = Holder(), torch.randn(2, 4)
    expected = holder(x)
    for twin in (copy.deepcopy(holder), copy.copy(holder), pickle.loads(pickle.dumps(holder))):
        assert torch.equal(twin(x), expected) and torch.equal(twin.net._orig_mod(x) * 3 + 1, expected)
    twin = copy.deepcopy(holder)
    with torch.no_grad():
        twin.net._orig_mod.linear.weight.zero_()
    assert torch.equal(holder(x), expected) and not torch.equal(twin(x), expected)
    outer = minicompile.compile(holder, backend="eager")
    assert torch.equal(outer(x), expected) and torch.equal(copy.deepcopy(outer)(x), expected)


def test_pickles_of_compiled_functions():
    """Like any function, it is pickled by its name: what a decorator made is found there, what a call made is not."""
    loaded = pickle.loads(pickle.dumps(decorated))
    assert loaded is decorated
    for other in (minicompile.compile(chain, backend="eager"), minicompile.compile(lambda x: x)):
        with pytest.raises((pickle.PicklingError, AttributeError), match="pickle"):
            pickle.dumps(other)
    assert copy.deepcopy(decorated)(torch.ones(1)).item() == 3


# ---- debuggers, tracers, collectors --------------------------------------------------------------------------------

def test_tracers_and_profilers():
    x, events = torch.randn(3), []

    def tracer(frame, event, arg):
        events.append((frame.f_code.co_name, event))
        return tracer

    def check():
        minicompile.reset()
        compiled = minicompile.compile(broken_in_two, backend="aot_eager")
        for _ in range(3):
            assert close(compiled(x), broken_in_two(x))

    old = sys.gettrace()
    sys.settrace(tracer)
    try:
        check()
    finally:
        sys.settrace(old)
    assert events
    sys.setprofile(lambda *_: None)
    try:
        check()
    finally:
        sys.setprofile(None)
    profile = cProfile.Profile()
    profile.runcall(check)
    assert any("broken_in_two" in str(entry.code) for entry in profile.getstats())


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is new in 3.12")
def test_monitoring():
    monitoring, seen, x = sys.monitoring, [], torch.randn(3)
    compiled = minicompile.compile(broken_in_two, backend="eager")
    compiled(x)
    monitoring.use_tool_id(4, "minicompile test")
    try:
        E = monitoring.events
        for event in (E.PY_START, E.LINE, E.INSTRUCTION, E.PY_RETURN, E.BRANCH, E.CALL):
            monitoring.register_callback(4, event, lambda *a: seen.append(1))
        monitoring.set_events(4, E.PY_START | E.LINE | E.INSTRUCTION | E.PY_RETURN | E.CALL)
        for _ in range(2):
            assert torch.equal(compiled(x), broken_in_two(x))
            minicompile.reset()                          # the second round captures instrumented code
    finally:
        monitoring.set_events(4, 0)
        monitoring.free_tool_id(4)
    assert seen and torch.equal(compiled(x), broken_in_two(x))


@pytest.mark.processes
def test_pdb_steps_through_a_compiled_function():
    out = subprocess.run([sys.executable, "-c", textwrap.dedent("""
        import pdb, torch, minicompile
        def f(x):
            y = x + 1
            breakpoint()
            return y * 2
        print(minicompile.compile(f, backend="eager")(torch.ones(1)))
    """)], input="p y\nc\n", cwd=ROOT, text=True, capture_output=True, timeout=100,
        env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert "tensor([2.])" in out.stdout and "tensor([4.])" in out.stdout, out.stdout + out.stderr


def test_generators_and_coroutines():
    import asyncio

    def numbers(x):
        for n in range(3):
            yield x * n

    async def wait(x):
        await asyncio.sleep(0)
        return chain(x)

    async def stream(x):
        for n in range(2):
            await asyncio.sleep(0)
            yield x + n
    x = torch.randn(3)
    compiled = minicompile.compile(numbers, backend="eager")
    assert all(torch.equal(a, b) for a, b in zip(compiled(x), numbers(x), strict=True))
    assert torch.equal(asyncio.run(minicompile.compile(wait, backend="eager")(x)), chain(x))

    async def collect():
        return [y async for y in minicompile.compile(stream, backend="eager")(x)]
    assert len(asyncio.run(collect())) == 2

    async def concurrent():
        inner = minicompile.compile(chain, backend="eager")

        async def one(n):
            await asyncio.sleep(0)
            return inner(torch.full((2 + n,), float(n)))
        return await asyncio.gather(*map(one, range(6)))
    for n, y in enumerate(asyncio.run(concurrent())):
        assert torch.equal(y, chain(torch.full((2 + n,), float(n))))


def test_the_collector_and_weak_callbacks_while_compiling():
    x = torch.randn(3)
    inner = minicompile.compile(chain, backend="eager")
    ran = []

    class Node:
        pass

    def backend(gm, inputs):
        node = Node()
        node.self = node
        weakref.finalize(node, lambda: ran.append(inner(x)))
        del node
        gc.collect()
        return gm.forward
    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        assert torch.equal(minicompile.compile(broken_in_two, backend=backend)(x), broken_in_two(x))
    finally:
        gc.set_threshold(*threshold)
    assert ran and torch.equal(ran[0], chain(x))


class Handler:
    """Something that Python calls when it comes to that."""

    def __init__(self, ran):
        self.ran = ran

    def __call__(self, *_):
        self.ran.append(helper(torch.ones(3)))

    method = __del__ = __call__


def helper(x):
    return x.sin() + 1


@pytest.mark.parametrize("kind", ["collector", "handler", "method", "partial", "finaliser", "finalize", "unraisable"])
def test_what_python_calls_by_itself_is_no_part_of_the_compiled_call(kind, monkeypatch):
    """Neither a callback, that Python runs in the middle of the function, is compiled, nor what it calls."""
    ran = []
    handler = Handler(ran)
    callback = handler if kind in ("collector", "handler") else functools.partial(handler.method) if kind == "partial" else handler.method

    class Raises:
        def __del__(self):
            raise ValueError

    def program(x):
        y = x.cos()
        if kind == "collector":
            gc.collect()
        elif kind == "finaliser":
            Handler(ran)
        elif kind == "finalize":
            weakref.finalize(type("Other", (), {})(), callback)
        elif kind == "unraisable":
            Raises()
        else:
            signal.raise_signal(signal.SIGUSR1)
        return y * 2

    old = signal.signal(signal.SIGUSR1, callback)
    if kind == "collector":
        gc.callbacks.append(callback)
    if kind == "unraisable":
        monkeypatch.setattr(sys, "unraisablehook", callback)
    try:
        compiled, names = minicompile.compile(program), set()
        logs.watchers.append(watch := lambda kind, **data: kind == "captured" and names.add(data["state"].code.co_name))
        torch.testing.assert_close(compiled(torch.ones(3)), torch.ones(3).cos() * 2)
    finally:
        logs.watchers.remove(watch)
        signal.signal(signal.SIGUSR1, old)
        if callback in gc.callbacks:
            gc.callbacks.remove(callback)
        monkeypatch.undo()
    assert len(ran) >= 1 and not names & {"__call__", "helper"}
    torch.testing.assert_close(ran[0], helper(torch.ones(3)))


@pytest.mark.parametrize("change", ["number", "child", "hook"])
def test_objects_that_change_while_they_are_compiled(change):
    """A finaliser or another thread wrote to what capture has read: the version is made once more, and is right."""
    calls = []
    model = torch.nn.Sequential(torch.nn.Linear(3, 3))
    model.k = 2.0
    write = {"number": lambda: setattr(model, "k", 3.0), "child": lambda: model.append(torch.nn.Tanh()),
             "hook": lambda: model.register_forward_hook(lambda m, a, y: y * 2)}[change]

    def backend(gm, example_inputs):
        calls.append(len(calls))
        if len(calls) == 1:
            write()
        return gm

    f = minicompile.compile(lambda m, x: m(x) * m.k, backend=backend)
    x = torch.randn(2, 3)
    for _ in range(2):
        assert torch.equal(f(model, x), model(x) * model.k)
    assert calls == [0, 1]


def test_a_backward_that_the_program_calls_is_not_captured():
    """Which outputs have tangents is known when it runs: then, too, the compiler does not compile itself."""
    def f(x):
        a, b = (x * 2).exp(), x.sin().exp()
        print(end="")
        b.sum().backward()
        return a
    seen = []

    def watch(kind, state=None, **data):
        if state is not None:
            seen.append(state.code.co_filename)
    logs.watchers.append(watch)
    try:
        x = torch.ones(3, requires_grad=True)
        minicompile.compile(f)(x)
    finally:
        logs.watchers.remove(watch)
    assert set(seen) == {__file__} and close(x.grad, x.cos() * x.sin().exp())


def test_reset_and_compile_while_a_compiled_function_runs():
    def f(x, again):
        y = x * 2
        if again:
            callback()
        return y + 1

    def callback():
        print(end="")
        minicompile.reset()
        compiled(torch.ones(3), False)
    compiled = minicompile.compile(f, backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(torch.ones(2), True), torch.full((2,), 3.0))


@pytest.mark.processes
def test_reset_forgets_every_code():
    """And what was met as a part of the library, and skipped, is compiled when somebody asks for it."""
    assert script("""
        import torch, minicompile
        from minicompile import driver
        from minicompile.ch03_capture import hook
        class Odd(torch.Tensor):
            pass
        def f(x):
            return layer(x)
        layer, x = torch.nn.Linear(2, 2), torch.ones(2).as_subclass(Odd)
        codes = f.__code__, torch.nn.Linear.forward.__code__
        minicompile.compile(f, backend="eager")(x)
        print([len(hook.targets_of(code)) for code in codes])
        minicompile.compile(layer, backend="aot_eager")(torch.ones(2))
        print(driver.counters.graphs, len(hook.targets_of(codes[1])))
        minicompile.reset()
        print([hook.targets_of(code) for code in codes])
    """) == "[1, 0]\n1 1\n[None, None]\n"


@pytest.mark.processes
def test_without_the_hook():
    out = script("""
        import sys, warnings
        sys.modules["minicompile.ch03_capture.frame_hook"] = None
        warnings.simplefilter("ignore")
        import torch, minicompile, threading
        from minicompile.ch03_capture import hook
        assert "no_hook" in hook._c.__name__
        def f(x):
            y = x.sin()
            print(end="")
            return y * 2
        def forever(x):
            print(end="")
            return forever(x)
        c = minicompile.compile(f, backend="eager")
        def work(n):
            for k in range(2, 6):
                assert torch.equal(c(torch.ones(k)), f(torch.ones(k)))
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        [t.start() for t in threads]; [t.join() for t in threads]
        try:
            minicompile.compile(forever, backend="eager")(torch.ones(1))
        except RecursionError:
            print("ok")
        def bad(gm, i): raise KeyboardInterrupt
        try:
            minicompile.compile(f, backend=bad)(torch.ones(2))
        except KeyboardInterrupt:
            print("interrupted", hook._c.get_region())
        else:
            print(torch._C._len_torch_dispatch_stack(), hook._c._rules)
    """)
    assert out == "ok\ninterrupted None\n"


@pytest.mark.processes
def test_what_the_first_trace_imports_is_not_a_change():
    """PyTorch's meta kernels import its own compiler, which registers pytree nodes: the first graph of a process may depend on those."""
    assert script("""
        import torch, minicompile
        minicompile.config.raise_on_internal_error = True
        f = lambda x: torch.utils._pytree.tree_map(lambda v: v + 1, {"t": x})["t"]
        print(minicompile.compile(f, backend="eager", fullgraph=True)(torch.ones(2)).tolist())
    """) == "[2.0, 2.0]\n"


# ---- who called it -------------------------------------------------------------------------------------------------

def says(x):
    logging.getLogger("test").warning("logged", stacklevel=2)
    warnings.warn("warned", stacklevel=2)
    return x + 1


def says_after_a_break(x):
    y = x * 2
    print(end="")
    return says_directly(y)


def says_directly(x):
    warnings.warn("deeper", stacklevel=3)
    logging.getLogger("test").warning("deeper", stacklevel=3)
    return x


class Says(torch.nn.Module):
    def forward(self, x):
        return says(x)


@pytest.mark.parametrize("make", (lambda f: f, lambda f: minicompile.disable(f), lambda f: minicompile.compile(f),
                                  lambda f: minicompile.compile(f, backend="eager")))
def test_warnings_and_logs_name_the_caller(make, caplog):
    """Not a frame of the compiler's: neither of a compiled function nor of what runs its pieces after a break."""
    for function in (says, says_after_a_break):
        compiled = make(function)
        for _ in range(3):
            caplog.clear()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                here = sys._getframe().f_lineno + 1
                compiled(torch.ones(2))
            found = [(w.filename, w.lineno) for w in caught] + [(r.pathname, r.lineno) for r in caplog.records]
            assert found == [(__file__, here)] * 2


def test_a_module_that_warns(caplog):
    compiled, lines = minicompile.compile(Says()), []
    for module in (Says(), compiled, compiled):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module(torch.ones(2))
        lines.append([(w.filename, w.lineno) for w in caught])
    assert lines[0] == lines[1] == lines[2] and len(lines[0]) == 1


@pytest.mark.parametrize("rung", ("aot_eager", "cpp"))
def test_hooks_that_copy_keep_what_is_written_later(rung):
    """In eager the copy is of what the tensor was when it was saved."""
    def function(a):
        a.add_(a.sin())
        return a

    gradients = []
    for f in (function, minicompile.compile(function, backend=rung)):
        for _ in range(2):
            leaf = torch.tensor([1.0, 2.0], requires_grad=True)
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
                out = f(leaf * 1.5)
            out.sum().backward()
            gradients.append(leaf.grad)
    assert all(torch.allclose(g, gradients[0]) for g in gradients)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        minicompile.compile(function, backend=rung)(torch.ones(2, requires_grad=True) * 1.5).sum().backward()


def test_a_negative_number_to_the_power_of_a_tensor():
    """In the text of a graph `-2.0 ** x` would be another number."""
    def f(x):
        return (-2.0) ** x, (-3) ** x
    for backend in ("eager", "aot_eager", "cpp"):
        for got, want in zip(minicompile.compile(f, backend=backend)(torch.arange(4.0)), f(torch.arange(4.0))):
            torch.testing.assert_close(got, want)


def test_a_hook_beside_a_view_that_autograd_has_made_invalid():
    def f(d, e):
        with torch.no_grad():
            d.unbind(0)[0].copy_(d[-1])
        w = e[1:]
        w.register_hook(lambda g: g * 0.5)
        return w * 2
    for run in (f, minicompile.compile(f, backend="aot_eager")):
        e = torch.ones(4, requires_grad=True)
        run(torch.ones(4, 3, requires_grad=True), e).sum().backward()
        assert e.grad.tolist() == [0.0, 1.0, 1.0, 1.0]


def turned_in_place(x):
    c = torch.view_as_complex((x * 1).view(4, 3, 2))
    c.mul_(1j)
    return torch.view_as_real(c)


def diagonal_states(x):
    return torch.exp(1j * x / (3 - 2j) - x[0, 0] * 0.1j).real


def gradient_of_a_phase(x):
    return torch.autograd.grad((torch.exp(1j * x) * (2 - 1j)).real.sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("f", [turned_in_place, diagonal_states, gradient_of_a_phase])
@pytest.mark.parametrize("backend", ["aot_eager", "cpp"])
def test_the_derivative_of_a_product_of_complex_numbers_with_a_number(f, backend):
    leaves = [torch.arange(24.0).view(4, 6).div(7).requires_grad_() for _ in range(2)]
    out = [run(leaf) for run, leaf in zip((f, minicompile.compile(f, backend=backend, fullgraph=True)), leaves)]
    [(o * torch.arange(24.0).view(o.shape)).sum().backward() for o in out]
    torch.testing.assert_close(*out)
    torch.testing.assert_close(*(leaf.grad for leaf in leaves))


def names_of_callers():
    return [sorted(frame.f_locals) for frame in (sys._getframe(1), inspect.currentframe().f_back.f_back)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_locals_of_callers(backend):
    def inner(x):
        half = x / 2
        return names_of_callers(), half

    def program(x):
        y, unused = x * 2, 5                                                   # noqa: F841
        return inner(y)

    for _ in range(2):
        names, half = minicompile.compile(program, backend=backend)(torch.ones(3))
        assert names == [["half", "x"], ["inner", "unused", "x", "y"]] and half.tolist() == [1.0] * 3


def test_a_signal_handler_that_calls_compiled_code_while_it_is_compiled():
    """The handler runs in the middle of a compilation, in the thread that compiles, and starts none of its own."""
    compiled, inside = [], []

    def backend(gm, inputs):
        if not inside:
            inside.append(None)
            signal.raise_signal(signal.SIGUSR1)
        return gm.forward

    def handler(number, frame):
        inside[0] = compiled[0](torch.ones(3)), compiled[1](torch.ones(4))

    made = []
    minicompile.logs.watchers.append(watch := lambda kind, **data: made.append(kind))
    old = signal.signal(signal.SIGUSR1, handler)
    try:
        compiled += [minicompile.compile(f, backend=backend) for f in (lambda x: x.sin() + 1, lambda x: x.cos() * 2)]
        torch.testing.assert_close(compiled[0](torch.zeros(2)), torch.ones(2))
    finally:
        signal.signal(signal.SIGUSR1, old)
        minicompile.logs.watchers.remove(watch)
    torch.testing.assert_close(inside, [(torch.ones(3).sin() + 1, torch.ones(4).cos() * 2)])
    assert made.count("entry") == 1


@pytest.mark.parametrize("kind", ["handler", "partial", "finaliser"])
def test_what_python_calls_while_an_operator_is_traced_computes_as_in_eager(kind, monkeypatch):
    """It comes below `no_grad`, autocast, the modes of the tracer and autograd, and sees nothing of them."""
    w, net, seen, run, calls = torch.arange(8.0, requires_grad=True), torch.nn.Linear(8, 4), [], FakeTensor.run, itertools.count()
    expected = net(w)

    def handler(*_):
        out = net(w)
        gradient, = torch.autograd.grad(out.sum(), w)
        seen.append((out, torch.ones(2) + 1, gradient, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    class Dies:
        __del__ = types.FunctionType(handler.__code__.replace(co_name="__del__"), globals(), None, None, handler.__closure__)

    def interrupted(*args):
        if next(calls) % 3:
            Dies() if kind == "finaliser" else signal.raise_signal(signal.SIGUSR1)
        return run(*args)

    def program(x, m):
        with torch.no_grad():
            a = x.sin().sum()
        with torch.autocast("cpu", torch.bfloat16):
            b = m(x)
        return torch.softmax(b.float(), -1) * a

    old = signal.signal(signal.SIGUSR1, functools.partial(handler) if kind == "partial" else handler)
    monkeypatch.setattr(FakeTensor, "run", interrupted)
    try:
        x, m = torch.ones(2, 8, requires_grad=True), torch.nn.Linear(8, 3)
        out = minicompile.compile(program)(x, m)
    finally:
        signal.signal(signal.SIGUSR1, old)
        monkeypatch.undo()
    torch.testing.assert_close(out, program(x, m))
    assert len(seen) >= 3
    for out, two, gradient, grad, autocast in seen:
        assert {type(out), type(two), type(gradient)} == {torch.Tensor} and (grad, autocast) == (True, False)
        assert torch.equal(out, expected) and two.tolist() == [2.0, 2.0] and torch.equal(gradient, net.weight.sum(0))


@pytest.mark.parametrize("stage", ["operator", "backend"])
def test_what_a_signal_handler_raises_while_a_function_is_compiled_reaches_the_program(stage, monkeypatch):
    """As where a call may take so long and no longer. It is no mistake of the compiler, and the next call compiles."""
    def late(*_):
        raise TimeoutError("late")

    armed, run = [True], FakeTensor.run

    def interrupted(*args):
        if armed:
            armed.clear()
            signal.raise_signal(signal.SIGUSR1)

    def backend(gm, inputs):
        interrupted()
        return gm.forward

    old = signal.signal(signal.SIGUSR1, late)
    if stage == "operator":
        monkeypatch.setattr(FakeTensor, "run", lambda *args: (interrupted(), run(*args))[1])
    monkeypatch.setattr(minicompile.config, "raise_on_internal_error", False)
    compiled, x = minicompile.compile(chain, backend=backend if stage == "backend" else "eager"), torch.ones(3)
    try:
        with warnings.catch_warnings(), pytest.raises(TimeoutError, match="late"):
            warnings.simplefilter("error")
            compiled(x)
    finally:
        signal.signal(signal.SIGUSR1, old)
    torch.testing.assert_close(compiled(x), chain(x))
    assert not armed and torch.is_grad_enabled() and hook._c.get_region() is None


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_program_on_the_cpu_does_not_start_cuda(mode, monkeypatch):
    """On a machine with a GPU: `torch.utils.checkpoint` refuses a forward pass that starts CUDA, and forked processes inherit it."""
    started = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: started.append("".join(traceback.format_stack(limit=6))))

    def f(x, w):
        return torch.utils.checkpoint.checkpoint(lambda x: torch.nn.functional.dropout((x @ w).relu(), 0.5), x, use_reentrant=False).sum(0)

    x, w = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8)
    torch.manual_seed(1)
    expected = f(x, w)
    compiled = minicompile.compile(f, mode=mode, fullgraph=True)
    torch.manual_seed(1)
    actual = compiled(x, w)
    actual.sum().backward()
    torch.testing.assert_close(actual, expected)
    assert not started, started[0]
