"""Without the C extension: the compiled function itself is captured, and nothing is wrong."""
import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

import minicompile
from minicompile.ch03_capture import binding

ROOT = pathlib.Path(minicompile.__file__).parents[1]


def python(text):
    script = "import sys, warnings\nsys.modules['minicompile.ch03_capture.frame_hook'] = None\n" + textwrap.dedent(text)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def bind_all(args, kwargs):
    return binding.bind(f_all.__code__, f_all.__defaults__, f_all.__kwdefaults__, args, kwargs)


def f_all(a, /, b, c=3, *rest, d, e=5, **more):
    return a, b, c, rest, d, e, more


@pytest.mark.parametrize("args, kwargs", [((1, 2), {"d": 4}), ((1,), {"b": 2, "d": 4, "z": 9}), ((1, 2, 3, 4, 5), {"d": 0, "e": 1})])
def test_arguments_are_bound_as_cpython_binds_them(args, kwargs):
    a, b, c, d, e, rest, more = bind_all(args, kwargs)
    assert (a, b, c, rest, d, e, more) == f_all(*args, **kwargs)
    for wrong in (((), {}), ((1, 2), {}), ((1,), {"a": 1, "d": 2})):
        with pytest.raises(TypeError):
            bind_all(*wrong)


@pytest.mark.processes
def test_the_compiled_function_is_captured():
    out, err = python("""
        import functools, torch, minicompile
        minicompile.config.raise_on_internal_error = True
        ran = []
        def backend(gm, inputs):
            def call(*args):
                ran.append(len(gm.graph.nodes))
                return gm.forward(*args)
            return call
        def f(x, y=2, *, z=1):
            return x.sin() * y + z
        compiled, x = minicompile.compile(f, backend=backend), torch.randn(3)
        for args, kwargs in (((x,), {}), ((x, 3), {}), ((x,), {"y": 4, "z": 5}), ((torch.randn(5),), {}), ((x,), {})):
            assert torch.equal(compiled(*args, **kwargs), f(*args, **kwargs))
        assert len(ran) == 5, ran

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = torch.nn.Linear(3, 3)
            def forward(self, x):
                return self.linear(x).relu()
            def helper(self, x):
                return x + 1
        net = Net()
        for function, args in ((net, (x,)), (net.helper, (x,)), (functools.partial(f, y=7), (x,)), (torch.no_grad()(f), (x,))):
            before = len(ran)
            assert torch.equal(minicompile.compile(function, backend=backend)(*args), function(*args))
            assert len(ran) == before + 1, function
        net.register_forward_hook(lambda m, i, o: o * 0)
        assert minicompile.compile(net, backend=backend)(x).abs().sum() == 0
        torch.testing.assert_close(minicompile.compile(f)(x), f(x))     # through the C++ backend
        try:
            compiled()
        except TypeError as error:
            print(error)
        minicompile.reset()
        compiled(x)
    """)
    assert "missing 1 required positional argument" in out
    assert err.count("python3-dev") == 1 and len([line for line in err.splitlines() if "Warning" in line]) == 1, err


@pytest.mark.processes
def test_after_a_break_and_inside_disable():
    python("""
        import torch, minicompile
        minicompile.config.raise_on_internal_error = True
        def f(x):
            y = x.sin()
            print("break")
            return y + 1 if y.sum() > 0 else y - 1
        for x in (torch.ones(3), -torch.ones(3)):
            for _ in range(2):
                torch.testing.assert_close(minicompile.compile(f)(x), f(x))
        try:
            minicompile.compile(f, fullgraph=True)(x)
        except minicompile.GraphBreakError as error:
            assert "print" in str(error)
        else:
            raise AssertionError
        @minicompile.disable
        def plain(x):
            return x * 10
        g = minicompile.compile(lambda x: plain(x + 1) + 1)
        assert torch.equal(g(x), (x + 1) * 10 + 1)
        import threading
        h = minicompile.compile(lambda x: x.cos() * 2)
        threads = [threading.Thread(target=lambda n=n: [h(torch.ones(n)) for _ in range(5)]) for n in (2, 3, 4)]
        [t.start() for t in threads]; [t.join() for t in threads]
    """)
