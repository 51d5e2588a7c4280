"""Compiling takes time in proportion to the program. What is counted are calls of Python functions, which depend on no clock."""
import sys

import pytest
import torch

import minicompile

N = 30


def numbers_from_a_tensor(n):
    def f(x):
        numbers = x.tolist()
        return torch.tensor(numbers) + x
    return f, (torch.randn(8 * n),)


def numbers_in_a_list(n):
    def f(x, numbers):
        s = 0.0
        for v in numbers:
            s = s + v
        return x * s
    return f, (torch.ones(3), [i + 0.5 for i in range(n)])


def tensors_in_a_list(n):
    def f(tensors):
        return [t * 2 for t in tensors]
    return f, ([torch.ones(3) for _ in range(n)],)


def tensors_that_are_written(n):
    def f(tensors):
        for t in tensors:
            t.add_(1)
    return f, ([torch.ones(3) for _ in range(n)],)


def tensors_in_a_dict(n):
    def f(d):
        return {k: v + 1 for k, v in d.items()}
    return f, ({f"k{i}": torch.ones(2) for i in range(n)},)


def parts_of_a_split(n):
    def f(x):
        return [part * 2 for part in x.split(1)]
    return f, (torch.ones(n, 3),)


def parts_with_gradients(n):
    def f(x):
        return torch.stack([part.sin() for part in x.unbind()])
    return f, (torch.ones(n, 3, requires_grad=True),)


def views_that_are_written(n):
    def f(x):
        for v in [x[i] for i in range(n)]:
            v.add_(1)
        return x * 2
    return f, (torch.ones(n, 2),)


def variables_at_a_break(n):
    lines = [*(f"    v{i} = x + {i}" for i in range(n)), "    print(end='')", "    return x" + "".join(f" + v{i}" for i in range(n))]
    names: dict = {}
    exec("def f(x):\n" + "\n".join(lines), names)
    return names["f"], (torch.ones(3),)


def layers(n):
    layers = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(n)])
    return layers.forward, (torch.ones(2, 3),)


def objects_that_count(n):
    class Counter:
        def __init__(self):
            self.count, self.total = 0, torch.zeros(2)

    def f(counters):
        for c in counters:
            c.count += 1
        return counters[0].total + len(counters)
    return f, ([Counter() for _ in range(n)],)


def calls_of_python(run) -> int:
    count = 0

    def one(frame, event, arg):
        nonlocal count
        count += event == "call"
    before = sys.getprofile()
    sys.setprofile(one)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("make", [numbers_from_a_tensor, numbers_in_a_list, tensors_in_a_list, tensors_that_are_written, tensors_in_a_dict,
                                  parts_of_a_split, parts_with_gradients, views_that_are_written, variables_at_a_break, layers,
                                  objects_that_count])
def test_compiling_takes_time_in_proportion(make):
    def calls(n):
        f, args = make(n)
        fast = minicompile.compile(f, backend="aot_eager")
        return calls_of_python(lambda: fast(*args))

    calls(2)                                # what is done once
    small, large = calls(N), calls(4 * N)
    assert small > N and large < 5.5 * small, (small, large)
