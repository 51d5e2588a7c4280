"""Everything as it was: `with restored(roots)` runs a program, and afterwards what it reached has its old values.

Tensors get their numbers back, and their gradients; lists, dictionaries, sets and attributes of objects what they
held; globals and closure cells what they named; Python's, numpy's and PyTorch's random streams their positions. What
a program did outside of these (files, generators, objects of C extensions) stays.
"""
import collections
import contextlib
import inspect
import random
import sys
import types

import torch

CONTAINERS = (list, set, dict, collections.deque, bytearray)
# Objects of these libraries are handles, or belong to the compiler, except where a program keeps its own state in them
CLOSED, OPEN = ("torch", "minicompile", "numpy", "threading", "logging"), ("torch.nn", "torch.optim", "torch.utils.data")
MOST = 200_000


def is_open(module: str) -> bool:
    return module.partition(".")[0] not in CLOSED


class Snapshot:
    def __init__(self, roots):
        self.memory, self.tensors, self.containers, self.names, self.cells, self.seen = {}, [], [], [], [], {}
        pending = list(roots)
        while pending and len(self.seen) < MOST:
            value = pending.pop()
            if id(value) not in self.seen:
                self.seen[id(value)] = value             # held, so that no other thing gets its id
                pending += self.take(value)

    def take(self, value) -> list:
        """Note a value, and return what can be reached from it."""
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided and (value.is_leaf or not value.requires_grad):
                memory = value.untyped_storage()
                self.memory.setdefault(memory._cdata, (memory, memory.clone()))
                self.tensors.append((value, value.detach(), value.grad))
                return [value.grad] if value.grad is not None else []
        elif isinstance(value, CONTAINERS):
            self.containers.append((value, value.copy()))
            return [*value, *value.values()] if isinstance(value, dict) else list(value)
        elif isinstance(value, (tuple, frozenset)):
            return list(value)
        elif isinstance(value, types.MethodType):
            return [value.__self__, value.__func__]
        elif isinstance(value, types.FunctionType):
            value = inspect.unwrap(value)
            return self.take_function(value) if is_open(value.__module__ or "") else []
        elif isinstance(value, (type, types.ModuleType)) or not hasattr(value, "__dict__"):
            return []
        else:
            home = type(value).__module__
            if isinstance(value, torch.nn.Module) and home.startswith("minicompile"):
                return list(value._modules.values())     # a compiled module: the original is a child
            return [vars(value)] if isinstance(value, torch.nn.Module) or home.startswith(OPEN) or is_open(home) else []
        return []

    def take_function(self, function) -> list:
        found = [vars(function)] if vars(function) else []
        names = {n: function.__globals__[n] for n in function.__code__.co_names if n in function.__globals__}
        self.names.append((function.__globals__, names))
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):
                self.cells.append((cell, cell.cell_contents))
                found.append(cell.cell_contents)
        return found + list(names.values())

    def restore(self) -> None:
        for memory, numbers in self.memory.values():
            if memory.nbytes() == numbers.nbytes():
                memory.copy_(numbers)
        for tensor, old, gradient in self.tensors:
            if tensor.is_leaf:
                tensor.data, tensor.grad = old, gradient
        for container, old in self.containers:
            if isinstance(container, (list, bytearray)):
                container[:] = old
            else:
                container.clear()
                (container.extend if isinstance(container, collections.deque) else container.update)(old)
        for names, old in self.names:
            names.update(old)
        for cell, old in self.cells:
            cell.cell_contents = old


@contextlib.contextmanager
def restored(roots):
    """roots: what the program can reach, such as a function, its arguments."""
    snapshot, numpy = Snapshot(roots), sys.modules.get("numpy")
    python, arrays = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        if arrays is not None:
            numpy.random.set_state(arrays)
        snapshot.restore()
