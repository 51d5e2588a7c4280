"""The frame hook alone: no torch, no capture. Also runs as a script, on interpreters that have no pytest."""
import functools
import gc
import importlib.util
import pathlib
import sys
import sysconfig
import threading
import weakref


def load_hook():
    folder = pathlib.Path(__file__).resolve().parents[2] / "minicompile" / "ch03_capture"
    path = folder / ("frame_hook" + sysconfig.get_config_var("EXT_SUFFIX"))
    if "minicompile.ch03_capture.frame_hook" in sys.modules:
        return sys.modules["minicompile.ch03_capture.frame_hook"]
    spec = importlib.util.spec_from_file_location("minicompile.ch03_capture.frame_hook", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["minicompile.ch03_capture.frame_hook"] = module
    spec.loader.exec_module(module)
    return module


hook = load_hook()


class Context:
    pass


def hooked(targets, f, *args, **kwargs):
    """Run f with {function: target} installed; everything else is evaluated as it is. Returns (result, codes met)."""
    met = []
    by_code = {function.__code__: target for function, target in targets.items()}

    def callback(function, code, context):
        met.append(code)
        return by_code.get(code)

    for code in by_code:
        hook.forget_code(code)
    previous_callback = PREVIOUS[0]
    hook.set_callback(callback)
    try:
        return hook.run(Context(), f, *args, **kwargs), met
    finally:
        hook.set_callback(previous_callback)


PREVIOUS = [None]
if importlib.util.find_spec("torch") and importlib.util.find_spec("pytest"):
    import pytest

    @pytest.fixture(autouse=True)
    def without_the_compiler():
        """The tests set callbacks of their own; afterwards the compiler's is back."""
        from minicompile import frames
        hook.set_callback(None)
        yield
        hook.set_callback(frames.on_new_code)


def test_arguments_arrive_in_localsplus_order():
    def f(a, b=2, /, c=3, *rest, k, d=5, **kw):
        return "original"

    seen = []

    def target(function, *args):
        assert function is f
        seen.append(args)
        return "replaced"

    assert hooked({f: target}, f, 1, k=4)[0] == "replaced"
    assert hooked({f: target}, f, 1, 2, 3, 9, 10, k=4, z=7)[0] == "replaced"
    assert seen == [(1, 2, 3, 4, 5, (), {}), (1, 2, 3, 4, 5, (9, 10), {"z": 7})]


def test_many_arguments():
    names = ", ".join(f"a{i}" for i in range(60))
    scope = {}
    exec(f"def f({names}): return 0", scope)
    assert hooked({scope["f"]: lambda function, *args: sum(args)}, scope["f"], *range(60))[0] == sum(range(60))


def test_cell_arguments_and_closures():
    z = 100

    def f(x):
        def g():
            return x + z
        return g()

    assert hooked({f: lambda function, x: (x, function.__closure__[0].cell_contents)}, f, 7)[0] == (7, 100)
    assert hooked({}, f, 7)[0] == 107


def test_nested_calls_are_seen_and_evaluate_declines():
    def inner(x):
        return x + 1

    def outer(x):
        return inner(x) * 2

    (result, met) = hooked({inner: lambda function, x: hook.EVALUATE}, outer, 3)
    assert result == 8 and outer.__code__ in met and inner.__code__ in met
    assert hooked({inner: lambda function, x: 10}, outer, 3)[0] == 20


def test_evaluate_all_declines_for_what_is_called_too():
    def inner(x):
        return x + 1

    def outer(x):
        return inner(x) * 2

    def outermost(x):
        return outer(x) + inner(x)

    targets = {outer: lambda function, x: hook.EVALUATE_ALL, inner: lambda function, x: 10}
    assert hooked(targets, outermost, 3)[0] == 8 + 10
    assert hooked({outer: targets[outer]}, outermost, 3)[1].count(inner.__code__) == 1


def test_callback_is_asked_once_and_skip_is_remembered():
    def f(x):
        return x

    asked = []

    def callback(function, code, context):
        asked.append(code)
        return False if code is f.__code__ else None

    hook.forget_code(f.__code__)
    hook.set_callback(callback)
    try:
        for _ in range(3):
            assert hook.run(Context(), f, 1) == 1
    finally:
        hook.set_callback(PREVIOUS[0])
    assert asked.count(f.__code__) == 1


def test_exceptions_and_unwinding():
    def f(x):
        try:
            return x
        except ValueError:
            return "must not be reached"
        finally:
            pass

    def target(function, x):
        raise ValueError(x)

    for _ in range(3):
        try:
            hooked({f: target}, f, 5)
        except ValueError as error:
            assert error.args == (5,)
        else:
            raise AssertionError("the exception was lost")
    assert sys.exc_info() == (None, None, None)


def test_callback_exception_propagates():
    def f():
        return 1

    def callback(function, code, context):
        raise LookupError("callback")

    hook.forget_code(f.__code__)
    hook.set_callback(callback)
    try:
        hook.run(Context(), f)
    except LookupError:
        pass
    else:
        raise AssertionError
    finally:
        hook.set_callback(PREVIOUS[0])
    assert f() == 1


def test_no_leaks():
    class Thing:
        pass

    def f(x, *rest, y=None, **kw):
        local = x
        return local

    def fail(function, x, *rest):
        raise KeyError

    for target in (lambda function, x, *rest: x, lambda function, x, *rest: hook.EVALUATE,
                   lambda function, x, *rest: None, fail):
        thing = Thing()
        alive = weakref.ref(thing)
        for _ in range(5):
            try:
                hooked({f: target}, f, thing, thing, y=thing, z=thing)
            except KeyError:
                pass
        before = sys.getrefcount(thing)
        try:
            hooked({f: target}, f, thing, thing, y=thing, z=thing)
        except KeyError:
            pass
        assert sys.getrefcount(thing) == before
        del thing
        gc.collect()
        assert alive() is None


def test_memory_is_stable():
    def f(x):
        return x

    hook.forget_code(f.__code__)
    context = Context()
    hook.set_target(f.__code__, context, lambda function, x: x)

    def loop(n):
        for _ in range(n):
            hook.run(context, f, 1)

    loop(1000)
    gc.collect()
    before = sys.getallocatedblocks()
    loop(20000)
    gc.collect()
    assert sys.getallocatedblocks() - before < 200


def test_code_state_dies_with_the_code():
    scope = {}
    exec("def f(): return 1", scope)

    class Target:
        def __call__(self, function):
            return 2

    target = Target()
    alive = weakref.ref(target)
    context = Context()
    hook.set_target(scope["f"].__code__, context, target)
    assert hook.run(context, scope["f"]) == 2
    del target
    gc.collect()
    assert alive() is not None
    scope["f"].__code__ = (lambda: 3).__code__
    gc.collect()
    assert alive() is None


def test_generators_and_coroutines_are_untouched():
    def gen(n):
        for i in range(n):
            sent = yield i
            assert sent is None

    async def coro():
        return 5

    def f():
        g = gen(4)
        first = next(g)
        c = coro()
        try:
            c.send(None)
        except StopIteration as stop:
            return first, list(g), stop.value, [i * i for i in range(3)], list(i for i in "ab")

    result, met = hooked({gen: lambda *a: 1 / 0, coro: lambda *a: 1 / 0}, f)
    assert result == (0, [1, 2, 3], 5, [0, 1, 4], ["a", "b"])
    assert gen.__code__ not in met


def test_recursion():
    def fib(n):
        return n if n < 2 else fib(n - 1) + fib(n - 2)

    calls = []

    def target(function, n):
        calls.append(n)
        return hook.EVALUATE

    assert hooked({fib: target}, fib, 12)[0] == 144 and len(calls) > 100

    def deep(n):
        return 0 if n == 0 else 1 + deep(n - 1)

    assert hooked({deep: target}, deep, 200)[0] == 200

    def endless(n):
        return endless(n + 1)

    try:
        hooked({}, endless, 0)
    except RecursionError:
        pass
    else:
        raise AssertionError


def test_contexts_are_separate_and_none_leaves_the_region():
    def f():
        return "plain"

    a, b = Context(), Context()
    hook.forget_code(f.__code__)
    hook.set_callback(lambda function, code, context: None)
    try:
        hook.set_target(f.__code__, a, lambda function: "a")
        hook.set_target(f.__code__, b, lambda function: "b")
        assert (hook.run(a, f), hook.run(b, f), f()) == ("a", "b", "plain")
        assert hook.run(a, lambda: hook.run(None, f)) == "plain"
        assert hook.run(a, lambda: (hook.run(b, f), f())) == ("b", "a")
        assert hook.get_region() is None
    finally:
        hook.set_callback(PREVIOUS[0])


def test_a_region_keeps_its_context():
    """Who set it may be gone: greenlets take turns in the middle of calls."""
    context = Context()
    kept = weakref.ref(context)
    hook.set_region(context)
    del context
    try:
        assert kept() is not None and hook.get_region() is kept()
    finally:
        hook.set_region(None)
    assert kept() is None


def test_greenlets_take_turns_in_the_middle_of_pieces():
    try:
        from greenlet import getcurrent, greenlet
    except ImportError:
        return

    def piece(xs, n):
        getcurrent().parent.switch()
        return len(xs) + n if n == 0 else hook.run_piece([piece, (xs * 2, n - 1)])

    def start(n):
        return hooked({}, hook.run_piece, [piece, ([0], n)])[0]

    waiting = [greenlet(start) for _ in range(4)]
    results = {}
    for n, one in enumerate(waiting):
        one.switch(n)
    for _ in range(6):
        for n, one in enumerate(waiting):
            if not one.dead:
                results[n] = one.switch()
    assert results == {n: 2 ** n for n in range(4)}


def test_threads_are_separate():
    def f():
        return "plain"

    context = Context()
    hook.forget_code(f.__code__)
    hook.set_target(f.__code__, context, lambda function: "replaced")
    other = []

    def inside():
        thread = threading.Thread(target=lambda: other.append(f()))
        thread.start()
        thread.join()
        return f()

    hook.set_callback(lambda function, code, context: None)
    try:
        assert hook.run(context, inside) == "replaced" and other == ["plain"]
    finally:
        hook.set_callback(PREVIOUS[0])


def test_methods_partials_and_kwargs():
    class A:
        def m(self, x, *, k=1):
            return x

    a = A()
    f = functools.partial(a.m, k=5)
    assert hooked({A.m: lambda function, self, x, k: (self is a, x, k)}, f, 3)[0] == (True, 3, 5)


def test_target_may_be_changed_while_it_runs():
    def f():
        return "plain"

    context = Context()

    def first(function):
        hook.forget_code(f.__code__)
        hook.set_target(f.__code__, context, None)
        return "first"

    hook.forget_code(f.__code__)
    hook.set_target(f.__code__, context, first)
    assert hook.run(context, f) == "first" and hook.run(context, f) == "plain"


def test_inside_an_except_block():
    def f():
        return sys.exc_info()[0]

    def g():
        try:
            raise OSError
        except OSError:
            x = f()
            return x, sys.exc_info()[0]

    assert hooked({f: lambda function: "r"}, g)[0] == ("r", OSError)


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print("ok", name)
    import timeit
    def f(x):
        return x
    context = Context()
    hook.set_target(f.__code__, context, lambda function, x: x)
    hook.skip_code(timeit.Timer.timeit.__code__)
    n = 1000000
    for name, region in (("plain", None), ("hooked", context)):
        timer = timeit.Timer("f(1)", globals={"f": f})
        hook.skip_code(timer.inner.__code__)
        print(name, f"{hook.run(region, timer.timeit, n) / n * 1e9:.0f} ns")


def test_every_room_of_the_package_is_the_compilers_own():
    from minicompile.ch03_capture.hook import is_library_file
    package = pathlib.Path(hook.__file__).parent.parent
    seen = {str(p.relative_to(package)) for p in package.rglob("*.py") if not is_library_file(str(p))}
    assert {name.split("/")[0] for name in seen} == {"__main__.py", "bench"}
