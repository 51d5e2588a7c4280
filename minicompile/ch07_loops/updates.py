# %% [markdown]
# # Writing a part of an input
#
# `cache[:, :, n] = key` becomes, in a functional graph, a whole new cache with one row exchanged, and at the end a copy of
# all of it into the old one. Eager writes one row. So does this part: where nobody needs the old contents, the window is
# stored straight into the input's memory, under an alias name, and that name is the new cache.
#
# Who reads the old name has to run before the store, so it must not wait for anything that comes after. `in_place_updates`
# allows it only if all that is made of the old contents ends in the value that is stored (`x[0] += 1` reads what it
# overwrites). A later write to the same input continues from the name that the last one made.

# %%
import torch
from torch import fx

from .builder import normal
from .ir import View, root_of
from .lazy import (Element, Lazy, Lowering, alias, as_view, copy_to_buffer, dense_strides, element_of, footprint, from_buffer, in_memory,
                   realize, store_into)
from .table import LOWERINGS, REINDEXING, VIEWS

aten = torch.ops.aten
# The write of a window -> the read of it
WINDOWS = {aten.slice_scatter.default: aten.slice.Tensor, aten.select_scatter.default: aten.select.int}
COPIES = (aten.clone.default, aten._to_copy.default)
SCATTERS = (aten.index_put.default, aten.scatter.src, aten.scatter_add.default)


def in_place_updates(graph: fx.Graph) -> set[fx.Node]:
    """The writes whose results need no memory but that of the input they will be copied to."""
    found: set[fx.Node] = set()
    for copy in graph.nodes:
        if copy.target is not aten.copy_.default:
            continue
        memory, value = copy.args[:2]
        writes: list[fx.Node] = []
        while value is not memory and (nest := assignment(value)) and only_feeds(nest, copy):
            writes += nest
            value = nest[0].args[0]
        if value is memory:
            found.update(writes)
    return found


def assignment(node) -> list[fx.Node]:
    """The writes that make one assignment through views, `x[0][2:4] = y`, the outermost first: each takes back into a tensor
    the view of it that the next one writes to."""
    nest: list[fx.Node] = []
    while isinstance(node, fx.Node) and (node.target in WINDOWS or node.target in SCATTERS):
        nest.append(node)
        source = node.args[1]
        base = source.args[0] if node.target in WINDOWS and isinstance(source, fx.Node) and source.args else None
        if not isinstance(base, fx.Node) or base.target is not WINDOWS[node.target] or \
                base.args != (node.args[0], *node.args[2:]) or set(source.users) != {node}:
            break
        node = source
    return nest


def only_feeds(nest: list[fx.Node], copy: fx.Node) -> bool:
    """Whether all that reads the old contents ends in the innermost write, or in an operand of it, which is then computed
    before the store (`apart`)."""
    inner, memory = nest[-1], [write.args[0] for write in nest]
    operands = {n for n in inner.all_input_nodes if n not in memory and n.target in LOWERINGS
                and not (n.target in VIEWS or n.target in REINDEXING or n.target in COPIES)}       # these may be what they read
    done: set[fx.Node] = {*memory, inner}
    reading = [user for base in memory for user in base.users if user not in nest and user is not copy]
    while reading:
        node = reading.pop()
        if node in done:
            continue
        done.add(node)
        if node in nest or node.op == "output" or node.target is aten.copy_.default:
            return False
        if node not in operands:
            reading.extend(node.users)
    return True


# %% [markdown]
# `x` is what is written to: the input, or a view of it. A source that reads the memory at other places than it
# is stored to (`x[1:] = x[:-1]`) goes through a temporary.
#
# An example: the program runs `x[1:4] = y`, which functionalization has made into a `slice_scatter` whose result
# is copied back to `x`. `window_of` is the slice, and says where it lies in the memory of `x`: offset one row, three
# rows. `update_window` gives this memory a new name, which is an alias of the old, and emits a loop that stores
# `y` there. The other rows are not touched. If the source was written there already, as by an inner slice of a
# slice, nothing is left to do.

# %%
def update_window(g: Lowering, x: Lazy, source: Lazy, *where) -> Lazy:
    """`x` with a window of its memory overwritten by `source`; where: the arguments that say which."""
    base = as_view(g, x)
    name = g.latest.get(root_of(g.program.buffers, base.buffer), base.buffer)
    layout = window_of(g, x, *where).relayout(base.layout)
    stored = in_memory(source) and as_view(g, source) == View(name, layout)        # by an inner write
    if not stored and 0 not in layout.size:
        if len(g.node.args[1].users) > 1 or reads_elsewhere(g, element_of(source, layout), root_of(g.program.buffers, name)):
            source = apart(g, source, x)
        name = alias(g, name)
        store_into(g, source, name, layout)
    return from_buffer(g, name, base.layout)


def window_of(g: Lowering, x: Lazy, *where) -> Lazy:
    """The view of `x` that is written to, which has the size of the source."""
    write, g.node = g.node, g.node.args[1]
    try:
        return LOWERINGS[WINDOWS[write.target]](g, x, *where)
    finally:
        g.node = write


# %% [markdown]
# In `x[1:] = x[:-1]` the loop would read elements that other iterations overwrite. `reads_elsewhere` finds this
# out by trying: it evaluates the source at an index and compares the addresses of its loads with the address that
# will be stored. If they differ, the source is computed into memory of its own first (`apart`).

# %%
def temporary(g: Lowering, x: Lazy) -> Lazy:
    return from_buffer(g, copy_to_buffer(g, x, dense_strides(x.size, x.stride)))


def apart(g: Lowering, x, base: Lazy):
    """`x`, in memory of its own if it reads that of `base`. Whoever else uses it reads it there as well."""
    own = root_of(g.program.buffers, as_view(g, base).buffer)
    reads = footprint(x)[1] if isinstance(x, Lazy) else ()
    if all(root_of(g.program.buffers, name) != own for name in reads):
        return x
    return realize(g, x) if x.view is None and x.base is None else temporary(g, x)


def reads_elsewhere(g: Lowering, element: Element, memory: str) -> bool:
    """Does evaluating the element load `memory`, under any of its names, at any position other than where it will be stored?"""
    return any(v.op == "load" and root_of(g.program.buffers, v.buffer) == memory and v.index != normal(element.at)
               for v in element.b.known.values())
