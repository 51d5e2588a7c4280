"""What was compiled: a backend that keeps the graphs it is given, and a block that sees all captures made inside it."""
from minicompile import backends, frames


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
    """`with Captures() as seen:` collects the graphs and the graph breaks of everything compiled inside, whatever the backend."""

    def __enter__(self):
        self.graphs, self.breaks = [], []
        frames.observers.append(self.see)
        return self

    def see(self, state, captured):
        if captured.gm is not None:
            self.graphs.append(captured.gm)
        self.breaks.extend(captured.breaks)

    def __exit__(self, *error):
        frames.observers.remove(self.see)
