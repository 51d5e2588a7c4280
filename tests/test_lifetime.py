"""What is compiled dies with what it was compiled for: code, entries, graphs, kernels, and nothing is kept alive by them."""
import gc
import os
import queue
import subprocess
import sys
import textwrap
import threading
import types
import weakref
from collections import Counter

import pytest
import torch

import minicompile
from minicompile import frames
from minicompile.ch03_capture import hook
from minicompile.ch04_breaks import resume
from minicompile.ch10_cpp import build
from minicompile.ch11_runtime import collector

pytestmark = pytest.mark.usefixtures("fresh")


def graph_backend(kept):
    """Backend `eager` that remembers its graphs weakly."""
    def backend(gm, inputs):
        kept.append(weakref.ref(gm))
        return gm.forward
    return backend


def collect():
    """Twice: a code object is outside of the collector's view, and what dies with it may hold another cycle."""
    gc.collect()
    gc.collect()


def dead(references) -> bool:
    collect()
    return all(r() is None for r in references)


def define(text, name="f", **names):
    scope = {"torch": torch, "minicompile": minicompile, **names}
    exec(compile(text, "<program>", "exec"), scope)
    return scope[name]


# ---- one program of each kind: defined in a namespace of its own, compiled, called, dropped

PROGRAMS = {
    "plain": "def f(x): return x.sin() + 1",
    "globals and helpers": """
        scale = torch.ones(2)
        def helper(x, act=torch.relu, *, k=2): return act(x) * k * scale
        def other(x, then=helper): return then(x)
        def f(x): return other(x) + len([x])""",
    "classes": """
        class Out:
            __slots__ = ("a",)
            limit = 3
            def __init__(self, a): self.a = a
            @property
            def b(self): return self.a * self.limit
            @staticmethod
            def s(x): return x + 1
            @classmethod
            def c(cls, x): return cls(x)
        def f(x):
            o = Out.c(Out.s(x))
            return o.b, isinstance(o, Out), Out(o.a), o""",
    "the dict of an object": """
        class Settings:
            def scaled(self, x): return x * (1 + len(self.__dict__))
        settings = Settings()
        def f(x): return settings.scaled(x)""",
    "dataclass and enum": """
        import dataclasses, enum
        class Kind(enum.Enum):
            A = 1
            B = 2
        @dataclasses.dataclass
        class Out:
            a: object
            kind: Kind = Kind.A
        def f(x):
            o = Out(x + 1, Kind.B)
            return o if o.kind is Kind.B else None""",
    "recursion": """
        def g(x, n): return x if n == 0 else f(x + 1, n - 1)
        def f(x, n=3): return g(x, n) * 2""",
    "closures": """
        def make(k):
            def inner(x): return x * k + helper(x)
            return inner
        def helper(x): return x.cos()
        one, two = make(1.0), make(2.0)
        def f(x): return one(x) + two(x) + (lambda t: t + 1)(x)""",
    "breaks": """
        def g(x):
            y = x + 1
            print(end="")
            return y * 2
        def f(x):
            total = x
            for i in range(3):
                total = g(total) + i
                print(end="")
            try:
                total = total.sum().item()
            except ValueError:
                pass
            return [n + total for n in (1, 2)]""",
    "a break in a closure": """
        def f(x):
            n = 0
            def count(y):
                nonlocal n
                n += 1
                return y + n
            x = count(x)
            print(end="")
            x = count(x)
            return count(x), n, count""",
    "a method of super": """
        class A:
            def m(self, x): return x + 1
        class B(A):
            def m(self, x):
                y = super().m(x)
                print(end="")
                return super().m(y)
        def f(x): return B().m(x)""",
    "a module": """
        class M(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = torch.nn.Linear(2, 2)
                self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2) for _ in range(2)])
                self.register_buffer("count", torch.zeros(()))
            def forward(self, x):
                self.last = x
                for layer in self.layers:
                    x = layer(x)
                self.count += 1
                return self.linear(x).sum()
        f = M()""",
    "autograd": """
        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * 2
            @staticmethod
            def backward(ctx, grad): return grad * 2
        w = torch.ones(2, requires_grad=True)
        def f(x): return Double.apply(x * w).sum()""",
    "an lru_cache": """
        import functools
        @functools.lru_cache
        def table(n): return n * 2
        def f(x): return x * table(3)""",
    "a dispatcher": """
        import functools
        @functools.singledispatch
        def g(x): return x + 1
        @g.register
        def _(x: int): return x * 2
        def f(x): return g(x) + g(3)""",
    "an error": """
        def f(x):
            try:
                raise ValueError("no")
            except ValueError as error:
                return x + len(str(error))""",
    "a context manager": """
        class Manager:
            def __enter__(self): return self
            def __exit__(self, *_): return False
        def f(x):
            with Manager() as m, torch.no_grad():
                x = x + 1
                print(end="")
            return x * 2""",
    "globals are written": """
        state = 0
        def g(x):
            global state
            state += 1
            return x + state
        def f(x): return g(x)""",
}


def codes_of(scope) -> list:
    """All code objects that belong to a namespace."""
    found = {}

    def visit(code):
        found[id(code)] = code
        for inner in code.co_consts:
            if type(inner) is types.CodeType:
                visit(inner)
    for value in scope.values():
        for part in vars(value).values() if isinstance(value, type) else [value]:
            part = getattr(part, "__func__", getattr(part, "fget", part))
            if type(part) is types.FunctionType and part.__code__.co_filename == "<program>":
                visit(part.__code__)
    return list(found.values())


@pytest.mark.parametrize("backend", ["recorded", "aot_eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_everything_dies_with_the_program(name, backend):

    graphs = []
    scope = {"torch": torch}
    exec(compile(textwrap.dedent(PROGRAMS[name]), "<program>", "exec"), scope)
    compiled = minicompile.compile(scope["f"], backend=graph_backend(graphs) if backend == "recorded" else backend)
    for _ in range(3):
        compiled(torch.ones(2))
    codes = codes_of(scope) or [scope["f"].forward.__code__]
    seen = [code for code in codes if hook.targets_of(code)]
    assert seen and (graphs or backend != "recorded")
    references = [weakref.ref(code) for code in codes] + graphs
    references += [weakref.ref(target) for code in seen for target in hook.targets_of(code) if target is not None]
    del compiled, scope, codes, seen
    assert dead(references)


# ---- code that outlives its functions

def test_a_factory_makes_no_entries_pile_up():
    """10,000 functions of one code object share its entries."""
    def make(k):
        def inner(x):
            return x * k
        return inner

    graphs, x = [], torch.ones(2)
    backend = graph_backend(graphs)
    functions = []
    for n in range(10_000):
        f = minicompile.compile(make(3), backend=backend)
        if n % 100 == 0:
            functions.append(weakref.ref(f))
        if n % 100 == 0 or n < 3:
            assert torch.equal(f(x), x * 3)
    (code,) = [c for c in make.__code__.co_consts if type(c) is types.CodeType]
    assert len(graphs) == 1 and len(hook.targets_of(code)) == 1
    del f
    assert dead(functions)


def test_entries_for_objects_that_die_go_with_them():
    """Each call of the factory brings a class of its own; the code is the same."""
    def make():
        class Scale:
            def __init__(self, k):
                self.k = k
        scale = Scale(torch.ones(2))

        def inner(x):
            return Scale(x * scale.k).k
        return inner, weakref.ref(Scale)

    x, classes = torch.ones(2), []
    for _ in range(20):
        f, cls = make()
        classes.append(cls)
        assert torch.equal(minicompile.compile(f, backend="eager")(x), x)
        code = f.__code__
        del f
        collect()
    states = hook.record(code)[frames.states]
    assert dead(classes) and sum(len(state.cache.entries) for state in states.values()) <= 1


def test_subclasses_that_a_guard_knows_are_not_kept():
    class Base:
        pass

    compiled = minicompile.compile(lambda x: x * len(Base.__subclasses__()), backend="eager")
    for count in (1, 2, 0, 1):
        made = [type("Made", (Base,), {}) for _ in range(count)]
        assert compiled(torch.ones(())) == compiled(torch.ones(())) == count
        seen = list(map(weakref.ref, made))
        del made
        gc.collect()
        assert [r() for r in seen] == [None] * count


@pytest.mark.parametrize("backend", ["eager", "cpp"])
def test_parameters_are_freed_at_once(backend):
    """Without the collector, when the last reference goes: memory of a GPU must not wait for it."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.BatchNorm1d(8))
    compiled = minicompile.compile(model, backend=backend)
    for _ in range(3):
        compiled(torch.randn(4, 8)).sum().backward()
    references = [weakref.ref(t) for t in (*model.parameters(), *model.buffers())]
    gc.collect()
    gc.disable()
    try:
        del model, compiled
        assert [r() for r in references] == [None] * len(references)
    finally:
        gc.enable()


def test_a_backend_lives_as_long_as_what_it_compiled():
    class Backend:
        made = 0

        def __call__(self, gm, inputs):
            self.made += 1
            return gm.forward

    f, backend, x = define("def f(x): return x + 1"), Backend(), torch.ones(2)
    for _ in range(3):
        assert torch.equal(minicompile.compile(f, backend=backend)(x), x + 1)
        collect()
    assert backend.made == 1, "compiled code is shared, also when no wrapper is left"
    alive = weakref.ref(backend)
    del backend
    collect()
    assert alive() is not None
    del f
    assert dead([alive])


def test_activations_are_freed_with_the_result():
    def f(x):
        return x.sin().exp()

    compiled, kept = minicompile.compile(f), []
    x = torch.ones(4, requires_grad=True)
    for _ in range(2):
        y = compiled(x)
        kept.append(weakref.ref(y))
        y.sum().backward()
        del y
    assert dead(kept)


# ---- who holds on to what, and for how long

def test_a_frame_in_a_traceback_keeps_only_its_own():
    f = define("def f(x):\n    y = x + 1\n    print(end='')\n    return y.view(7)")
    kept, graphs = [], []
    try:
        minicompile.compile(f, backend=graph_backend(graphs))(torch.ones(2))
    except RuntimeError as error:
        kept.append(error)
    code = weakref.ref(f.__code__)
    del f
    collect()
    assert kept[0].__traceback__ is not None and graphs
    kept.clear()
    assert dead([code, *graphs])


@pytest.mark.parametrize("backend", ["loops", "cpp"])
@pytest.mark.parametrize("text", ["torch.nn.functional.nll_loss(x, torch.tensor([3 + len(box)]))", "x[0][torch.tensor([[4]]) - len(box)]",
                                  "x[0].index_select(0, torch.tensor([4]) - len(box))", "x[:, torch.arange(4)]"])
def test_an_error_of_a_kernel_keeps_nothing_alive(text, backend):
    """The frame that raises it does not hold it, or a checkpoint that it passes through would keep its hooks until the collector runs."""
    compiled = minicompile.compile(define(f"def f(x, box): return {text}"), backend=backend)
    events = []
    gc.disable()
    try:
        for size in (3, 3, 2):
            box = torch.ones(1)
            weakref.finalize(box, events.append, "freed")
            with pytest.raises((IndexError, RuntimeError)):
                compiled(torch.ones(1, size), box)
            del box
            events.append("raised")
    finally:
        gc.enable()
    assert events == ["freed", "raised"] * 3


def test_a_paused_generator_of_a_program_keeps_it_working():
    f = define("def f(x):\n    def g():\n        yield x + 1\n        yield x + 2\n    return g()")
    generator = minicompile.compile(f, backend="eager")(torch.ones(2))
    assert torch.equal(next(generator), torch.full((2,), 2.0))
    code = weakref.ref(f.__code__)
    del f
    collect()
    assert torch.equal(next(generator), torch.full((2,), 3.0))
    del generator
    assert dead([code])


def test_the_result_outlives_the_function():
    f = define("def f(x): return x.sin().exp()")
    x = torch.ones(3, requires_grad=True)
    y = minicompile.compile(f)(x)
    del f
    collect()
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.exp(torch.sin(torch.ones(3))) * torch.cos(torch.ones(3)))


def test_a_function_whose_code_is_replaced():
    f = define("def f(x): return x + 1")
    compiled = minicompile.compile(f, backend="eager")
    compiled(torch.ones(1))
    old = weakref.ref(f.__code__)
    f.__code__ = define("def f(x): return x + 5").__code__
    assert compiled(torch.ones(1)).item() == 6 and dead([old])


def test_reset_frees_all():
    f = define("def f(x):\n    y = x + 1\n    print(end='')\n    return y * 2")
    graphs = []
    compiled = minicompile.compile(f, backend=graph_backend(graphs))
    compiled(torch.ones(2))
    record = hook.record(f.__code__)
    pieces = [weakref.ref(p.code) for p in record[resume.pieces].values()]
    assert len(graphs) == 2 and len(pieces) == 2
    del record
    minicompile.reset()
    assert dead([*graphs, *pieces]) and set(hook.record(f.__code__)) == {"allowed"}
    compiled(torch.ones(2))
    assert len(graphs) == 4


@pytest.mark.parametrize("where", ["backend", "graph", "break", "callee"])
def test_reset_during_a_call(where):
    """At any moment: the call that runs ends well, later ones compile again, and nothing of before stays."""
    armed, graphs = [True], []

    def reset(*_):
        if armed:
            armed.clear()
            minicompile.reset()
            collect()

    def backend(gm, inputs):
        graphs.append(weakref.ref(gm))
        if where == "backend":
            reset()

        def run(*args):
            if where == "graph":
                reset()
            return gm.forward(*args)
        return run

    def callee(x):
        if where == "callee":
            print(end="")
            reset()
        return x * 2

    def f(x):
        for _ in range(3):
            x = callee(x + 1)
            print(end="")
            if where == "break":
                reset()
        return x * 2

    x = torch.ones(2)
    expected = f(x)
    compiled = minicompile.compile(f, backend=backend)
    armed[:] = [True]
    for _ in range(3):
        assert torch.equal(compiled(x), expected)
    assert not armed
    del backend
    minicompile.reset()
    assert dead(graphs)


def test_threads_that_compile_and_drop():
    errors, references = [], []

    def work(n):
        try:
            for i in range(15):
                f = define(f"def f(x):\n    y = x * {n * 100 + i}\n    print(end='')\n    return y + 1")
                assert torch.equal(minicompile.compile(f, backend="eager")(torch.ones(2)), torch.ones(2) * (n * 100 + i) + 1)
                references.append(weakref.ref(f.__code__))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not errors and len(references) == 60 and dead(references)


def test_a_thread_drops_what_another_runs():
    """The last reference to a function goes while its kernel runs."""
    x = torch.ones(1 << 20)

    def work(results):
        for i in range(6):
            holder = [minicompile.compile(define(f"def f(x):\n    return (x.sin() * {i}).cos() + x.exp()"))]
            ended = threading.Thread(target=lambda: results.append((i, holder[0](x))))
            ended.start()
            compiled = weakref.ref(holder[0])
            while not results and ended.is_alive() and compiled() is None:
                pass
            ended.join()
            holder.clear()
            collect()

    results = []
    work(results)
    for i, y in results:
        torch.testing.assert_close(y, (x.sin() * i).cos() + x.exp())
    assert len(results) == 6


# ---- globals: entries belong to code, and another function of the same code may have others

def test_functions_of_one_code_with_different_globals():
    source = compile("def g(x): return x * k\ndef f(x): return g(x) + k + len([x])", "<program>", "exec")
    scopes = [{"k": n} for n in (1, 2, 3)]
    for scope in scopes:
        exec(source, scope)
    mixed = types.FunctionType(scopes[0]["f"].__code__, {**scopes[1], "g": scopes[2]["g"]})
    shadowed = types.FunctionType(scopes[0]["f"].__code__, {**scopes[0], "len": lambda _: 10})
    x = torch.ones(1)
    for _ in range(2):
        for f in (*(s["f"] for s in scopes), mixed, shadowed):
            assert minicompile.compile(f, backend="eager")(x).item() == f(x).item()


def test_breaks_continue_with_the_globals_of_the_function():
    source = compile("def f(x):\n    y = x * k\n    print(end='')\n    return y + k, (lambda: k)()", "<program>", "exec")
    for n in (1, 2, 1):
        scope = {"k": n}
        exec(source, scope)
        x = torch.ones(1)
        assert minicompile.compile(scope["f"], backend="eager")(x) == scope["f"](x)


# ---- memory is flat

def objects() -> Counter:
    """By class, without the answers of `isinstance` that abstract classes note: a weak reference and its callback each. An idle thread of
    an executor has the exception that told it so."""
    collect()
    return Counter(type(o).__name__ for o in gc.get_objects()
                   if type(o) not in (queue.Empty, types.TracebackType)
                   and getattr(o.__callback__ if type(o) is weakref.ref else o if type(o) is types.BuiltinFunctionType else None,
                              "__name__", "") != "_destroy")


def resident() -> float:
    """Megabytes of this process."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def compile_and_drop(count, backend, start):
    x = torch.ones(3)
    for n in range(start, start + count):
        rest = "print(end='')" if n % 3 == 0 else "pass"
        f = define(f"def g(x): return x.sin()\ndef f(x):\n    y = g(x) * {n}\n    {rest}\n    return y.sum() + {n}")
        compiled = minicompile.compile(f, backend=backend)
        assert compiled(x) is not None and compiled(x) is not None


def check_flat(count, backend, rounds=3):
    for n in (-2, -1):                   # what is kept of the last ones is the same from the second time on
        compile_and_drop(count, backend, n * count)
    before, start, kept, blocks = objects(), resident(), len(hook._known), sys.getallocatedblocks()
    for n in range(1, rounds):
        compile_and_drop(count, backend, n * count)
    after = objects()
    grown = {name: n for name, n in (after - before).items() if n >= count // 2}
    assert not grown and len(hook._known) <= kept + 5 and sys.getallocatedblocks() - blocks < 20 * count + 300
    return resident() - start


def test_memory_of_graphs_is_flat():
    check_flat(40, "eager")


def test_memory_of_differentiated_graphs_is_flat():
    check_flat(15, "aot_eager")


def libraries() -> int:
    with open("/proc/self/maps") as f:
        return len({line.split()[-1] for line in f if os.environ["MINICOMPILE_CACHE_DIR"] in line})


def test_libraries_of_kernels_are_closed():
    build._launcher()                    # stays
    collect()
    before = libraries()                 # of functions that other tests keep
    check_flat(6, "cpp", rounds=2)
    assert libraries() <= before


@pytest.mark.slow
def test_ten_thousand_functions():
    assert check_flat(2000, "eager", rounds=6) < 20


@pytest.mark.slow
def test_two_hundred_functions_with_kernels():
    assert check_flat(40, "cpp", rounds=6) < 20 and libraries() <= 1


# ---- the collector, after a large compilation

class Loop:
    """In a cycle with itself."""

    def __init__(self):
        self.me = self


def make_old(count):
    """That many objects, and a cycle that nobody holds, made while the collector waits; the cycle, weakly, and one of the objects."""
    with collector.without_collection():
        reference, kept = weakref.ref(Loop()), [[i] for i in range(count)]
    return reference, kept[0]


@pytest.fixture
def unfrozen():
    """The tests freeze what their imports have made."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_what_a_large_compilation_leaves_is_old_without_being_looked_at(monkeypatch, unfrozen):
    monkeypatch.setattr(collector, "MANY", 1000)
    monkeypatch.setattr(collector, "MOST", 5000)
    monkeypatch.setattr(collector, "aged", 0)
    collect()
    garbage, one = make_old(2000)
    assert garbage() is not None and any(one is x for x in gc.get_objects(generation=2))
    assert gc.isenabled() and gc.get_freeze_count() < collector.IMMORTAL
    make_old(2000)
    assert garbage() is not None
    make_old(2000)
    assert garbage() is None, "what no collection has looked at adds up to no more than MOST"


def test_cycles_of_the_program_do_not_wait_for_a_full_collection(monkeypatch, unfrozen):
    monkeypatch.setattr(collector, "MANY", 0)
    collect()
    garbage = weakref.ref(Loop())
    make_old(10)
    assert garbage() is None


def test_what_the_program_has_frozen_stays_frozen(monkeypatch):
    monkeypatch.setattr(collector, "MANY", 1000)
    gc.freeze()
    frozen = gc.get_freeze_count()
    make_old(2000)
    assert gc.get_freeze_count() > 0.9 * frozen > 0


@pytest.mark.processes
def test_what_the_first_call_of_a_process_was_given_is_freed_without_the_collector():
    """What compiling imports leaves frames in cycles, which hold the frames below them."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent("""
        import gc, weakref
        import torch, minicompile
        gc.disable()
        model = torch.nn.Linear(8, 8)
        compiled = minicompile.compile(lambda model, x: model(x).relu().sum(), backend="aot_eager")
        x = torch.ones(4, 8)
        references = [weakref.ref(x), *map(weakref.ref, model.parameters())]
        compiled(model, x).backward()
        del x, model, compiled
        print([r() is None for r in references])
        """)], cwd=os.path.dirname(os.path.dirname(__file__)), capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[True, True, True]", done.stderr


def test_what_a_piece_deletes_is_gone():
    """Nobody on the way to a piece of a function holds on to its arguments."""
    made = []

    def rest(x, y):
        return y
    y = torch.ones(1)

    @minicompile.compile(backend="eager")
    def delete(y):
        x = y + 1
        seen = weakref.ref(x)                   # breaks the graph
        del x
        again = torch.empty(3)
        made.append(weakref.ref(again))
        del again
        return seen() is None, made[-1]() is None
    for _ in range(3):
        assert delete(y) == (True, True)
    before = sys.getrefcount(y)
    assert resume.finish(resume.TailCall((rest, (torch.ones(2), y)))) is y
    for wrong in ([rest], [rest, [y]], (rest, (y,)), None):
        with pytest.raises(TypeError, match="run_piece"):
            hook.run_piece(wrong)
    with pytest.raises(TypeError, match="positional argument"):
        hook.run_piece([rest, (y,)])
    assert sys.getrefcount(y) == before
