"""What was compiled: a backend that keeps the graphs it is given, and a block that sees all captures made inside it. A recorder of CUDA
graphs that needs no GPU. And whether two results are the same."""
import torch

from minicompile import backends, logs


class Recorder:
    """A backend that runs graphs as they are. `graphs` holds them, `ran` counts their calls."""

    def __init__(self):
        self.graphs, self.ran = [], 0

    def __call__(self, gm, example_inputs):
        gm.graph.lint()
        self.graphs.append(gm)
        forward = backends.eager_callable(gm)

        def run(*inputs):
            self.ran += 1
            return forward(*inputs)
        return run


class Captures:
    """`with Captures() as seen:` collects the functions, graphs and graph breaks of everything compiled inside, whatever the backend."""

    def __enter__(self):
        self.functions, self.graphs, self.breaks = set(), [], []
        logs.watchers.append(self.see)
        return self

    def see(self, kind, captured=None, state=None, **data):
        if kind != "captured":
            return
        self.functions.add(state.code.co_name)
        if captured.gm is not None:
            self.graphs.append(captured.gm)
        self.breaks.extend(captured.breaks)

    def __exit__(self, *error):
        logs.watchers.remove(self.see)


class FakeRecorder:
    """A graph for machines without one: same addresses, same overwriting."""

    def usable(self, tensors) -> bool:
        return True

    def objection(self, compiled):
        return None

    def record(self, fn, inputs):
        values = [t.clone() for t in inputs if isinstance(t, torch.Tensor)]
        owned = {t.untyped_storage()._cdata for t in inputs if isinstance(t, torch.Tensor)}
        outputs = [o.clone() if isinstance(o, torch.Tensor) and o.untyped_storage()._cdata not in owned else o
                   for o in fn(list(inputs))]
        for t, value in zip((t for t in inputs if isinstance(t, torch.Tensor)), values):
            if not torch.equal(t, value):
                t.copy_(value)

        def replay():
            for kept, new in zip(outputs, fn(list(inputs))):
                if isinstance(kept, torch.Tensor) and kept is not new:
                    kept.data.copy_(new)          # a graph does not raise version counters
        return replay, outputs

    def borrow(self, tensor):
        return tensor

    def queue_behind(self, last):
        return None

    def leave_pool(self):
        pass


def same(a, b):
    """Equal, of the same types, down to the tensors."""
    assert type(a) is type(b), (a, b)
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b)
        assert a.requires_grad == b.requires_grad
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), (a, b)
        for x, y in zip(a, b):
            same(x, y)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for k in a:
            same(a[k], b[k])
    else:
        assert a == b
