# %% [markdown]
# # Control flow as functions
#
# `torch.cond(pred, f, g, operands)` and `associative_scan(combine, xs, dim)` take functions, and say what no
# Python statement can say: that both branches exist, that a recurrence may be evaluated in any order. In
# eager PyTorch they call torch.compile. Here they are captured like everything else.
#
# A branch on a number is Python's own `if`. A branch on the value of a tensor breaks the graph, as an `if`
# would: to compute both sides and select would run code that the program means not to run.
#
# A scan becomes a tree. To scan `n` items with an associative function, combine neighbours into `n / 2` pairs,
# scan those (which gives every second result), and combine each with the item after it:
#
#     items     a         b         c         d          e
#     pairs            a.b                 c.d
#     scanned          a.b             (a.b).(c.d)
#     result    a      a.b     (a.b).c     a.b.c.d     (a.b.c.d).e
#
# (`a.b` is what the function makes of `a` and `b`.) That is `2 * n` combinations in `2 * log2(n)` steps, each of which is elementwise
# over a slice, so that it is differentiated, fused and generated as any other operation. A loop over the items would be a graph of `n`
# steps.

# %%
import operator

import torch

from ..calls import handles
from ..constants import is_pointwise
from ..iterate import unpack
from ..tensors import emit
from ..tracer import Tracer, call, unsupported
from ..values import FALSE, ListVal, TensorVal, TupleVal, AbstractValue, const, describe


@handles(torch.cond)
def cond(tx: Tracer, pred, true_fn, false_fn, operands=TupleVal()):
    if type(pred) is TensorVal:
        unsupported(tx, "torch.cond branches on the values of a tensor")
    return call(tx, true_fn if pred.value else false_fn, unpack(tx, operands), {})

# %% [markdown]
# `scan` checks what eager checks, and a little more. The items may be several tensors of one shape. The
# combining function is called with a slice of all left items and a slice of all right ones, so it must not
# change shapes, and it must work element by element. Whether it does can be seen from the nodes that it
# adds to the graph. `scanned` is the tree of the picture: combine neighbours, scan the pairs by calling
# itself, combine once more for the items between, and put the two together like the teeth of a zip.

# %%
@handles(("torch._higher_order_ops.associative_scan", "associative_scan"))
def scan(tx: Tracer, combine, xs, dim, reverse=FALSE, combine_mode=const("pointwise")):
    tree, leaves = type(xs), items_of(tx, xs)
    if not leaves or any(type(x) is not TensorVal or x.fake.shape != leaves[0].fake.shape for x in leaves):
        unsupported(tx, "associative_scan of anything but tensors of one shape")
    if combine_mode.value == "pointwise" and any(x.fake.device.type == "cpu" for x in leaves):
        unsupported(tx, "associative_scan(combine_mode='pointwise') of tensors on the CPU")
    rank = leaves[0].fake.dim()
    at = operator.index(dim.value) % rank

    def combined(left: list, right: list) -> list:
        last = next(iter(reversed(tx.graph.nodes)))
        both = [x[0] if tree is TensorVal else TupleVal(items=x, cls=tuple) if tree is TupleVal else ListVal(items=x)
                for x in (left, right)]
        out = items_of(tx, call(tx, combine, both, {}))
        like = [(x.fake.shape, x.fake.dtype) for x in left]
        if [type(x) is TensorVal and (x.fake.shape, x.fake.dtype) for x in out] != like:
            unsupported(tx, f"associative_scan: {describe(combine)} changes shapes or dtypes")
        if combine_mode.value != "pointwise" and not all(
                n.op == "placeholder" or is_pointwise(n.target) for n in after(tx.graph, last)):
            unsupported(tx, f"associative_scan: {describe(combine)} is not pointwise")
        return out

    if reverse.value:
        leaves = [flipped(tx, x, at) for x in leaves]
    out = scanned(tx, combined, leaves, at)
    if reverse.value:
        out = [flipped(tx, x, at) for x in out]
    return out[0] if tree is TensorVal else tree(items=out)


def items_of(tx, value: AbstractValue) -> list:
    return unpack(tx, value) if type(value) in (TupleVal, ListVal) else [value]


def scanned(tx, combined, leaves: list, dim: int) -> list:
    """Inclusive scan along `dim` by the tree above. combined(left, right): leaves of slices to leaves."""
    n = int(leaves[0].fake.shape[dim])
    if n < 2:
        return leaves

    def every(xs, start, stop=None, step=None):
        index = TupleVal(items=[*[const(slice(None))] * dim, const(slice(start, stop, step))])
        return [emit(tx, operator.getitem, [x, index]) for x in xs]

    odd = scanned(tx, combined, combined(every(leaves, 0, n - 1, 2), every(leaves, 1, None, 2)), dim)
    even = every(leaves, 0, 1)
    if n > 2:
        before = odd if n % 2 else every(odd, 0, n // 2 - 1)
        even = concatenated(tx, torch.cat, even, combined(before, every(leaves, 2, None, 2)), dim)
    pairs = concatenated(tx, torch.stack, every(even, 0, n // 2) if n % 2 else even, odd, dim + 1)
    out = [emit(tx, "flatten", [x, const(dim), const(dim + 1)]) for x in pairs]
    return concatenated(tx, torch.cat, out, every(even, n // 2, None), dim) if n % 2 else out


def concatenated(tx, function, left: list, right: list, dim: int) -> list:
    return [emit(tx, function, [TupleVal(items=[a, b]), const(dim)]) for a, b in zip(left, right)]


def flipped(tx, x, dim):
    return emit(tx, "flip", [x, const(dim)])


# %% [markdown]
# With `combine_mode="generic"` the function is meant to see one item at a time. On a slice of many it
# computes the same if all it does is elementwise.

# %%
def after(graph, node) -> list:
    """The nodes of the graph that come after `node`."""
    found = []
    for other in reversed(graph.nodes):
        if other is node:
            break
        found.append(other)
    return found
