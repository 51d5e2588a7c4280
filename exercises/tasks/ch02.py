"""Chapter 2: guards."""
from .. import behaviour, task

task("contiguous-strides", title="The layout that needs no words", minutes=15, kind="write", function="contiguous_strides", about="""\
Most tensors are contiguous: a guard compares strides with those that follow from the sizes. Compute them: the last dimension has stride 1, and
each other one the stride of its right neighbour times the neighbour's size. As in PyTorch, a size of 0 counts as 1 here.""",
     hints=["Which stride do you know without knowing any other?", "Go from the last dimension to the first with a running product.",
            "step = 1; for size in reversed(shape): append step, then step *= max(size, 1). Reverse what you collected, as a tuple."])


def shapes(smallest):
    return lambda rng: [(), (5,), *(tuple(rng.randrange(smallest, 7) for _ in range(n)) for n in (1, 2, 2, 3, 3, 4, 5, 5, 6))]


@behaviour("contiguous-strides", points=3, name="sizes of one and more", cases=shapes(1))
def strides(function, shape):
    return {"strides": tuple(function(shape))}


@behaviour("contiguous-strides", points=2, name="empty tensors", cases=lambda rng: [(2, 0), (0, 3), (2, 0, 3), *shapes(0)(rng)])
def empty(function, shape):
    return {"strides": tuple(function(shape))}
