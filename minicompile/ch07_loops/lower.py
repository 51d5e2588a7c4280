# %% [markdown]
# # From operators to loops
#
# `lower` walks the graph once. Each ATen overload has a function in the table `LOWERINGS`, registered with
# `@lowering(...)`, that turns lazy operands into a lazy result or emits loops. An overload that is not in the
# table becomes an `Extern`: its ATen kernel is called on whole tensors. So coverage is complete from the
# first day, and the table is a list of the operators that are worth fusing.
#
# torch.compile's Inductor has the same structure, in more than twenty thousand lines; most of the difference is
# hardware, layouts and templates that we leave to later chapters.

# %%
from __future__ import annotations

import operator
from collections import Counter, defaultdict
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Iterator

import torch
from torch import fx

from ..ch01_graphs.graph import call_node, map_args
from ..ch01_graphs.floats import Float
from ..ch01_graphs.layouts import each_has_its_place, same_strides
from ..ch01_graphs.shapes import expr_of, is_symbolic
from ..ch01_graphs.symbolic import Expr, Symbol, present, product, symbols
from ..ch05_autograd.cleanup import has_effect, may_refuse
from ..errors import Unsupported
from .builder import SUPPORTED
from .ir import Buffer, Layout, Program, View, root_of
from .lazy import (Element, Lazy, Lowering, Options, alias, as_view, copy_to_buffer, emit_loop, element_of, footprint, from_buffer,
                   realize, settle, sizes_of, spelled, strides_of, window)
from .table import LOOPS, LOWERINGS, REINDEXING, VIEWS
from .updates import WINDOWS, apart, in_place_updates, reads_elsewhere, temporary, update_window
from . import externs, pointwise, rules, views  # noqa: F401  (rules register)

aten = torch.ops.aten

# %% [markdown]
# ## Who reads what
#
# Before anything is lowered, one pass backwards asks of each node how often it would be evaluated if it
# stayed lazy. Counting its users would overstate it: in `x * sigmoid(x)` both users end up in one body, which
# evaluates `x` once. So we collect *sinks*, the places where evaluation ends: reductions, library calls,
# outputs. Within one sink a node can still be evaluated several times, at different positions: a 3x3 pool
# reads nine windows of its operand, and the gradient of a 2x2 pool looks from each of four pixels at one window. `windows` counts those.
#
# In a chain such as GELU every link has the sinks of the last one. The place to keep a value is where the
# paths part, so a node whose sinks are all reached through one of its users leaves the decision to that user
# (`later`), also through a view.
#
# Take `y = x.exp(); a = y.sum(0); b = y.sum(1)`. Backwards, both sums emit loops of their own, so they are the sinks of `y`:
# `reuse[y]` is 2, two loops would compute each exponential. On a CPU that is dear enough to store `y` (`worth_keeping`). In
# `count_readers`, `ends` asks of each user whether it is a sink, or a place where a value will probably be stored because it is
# read through four windows or more; other users pass on the sinks that they have themselves.

# %%
WHOLE = {aten.view.default, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dims}  # show all once


def is_lazy_view(node: fx.Node) -> bool:
    return node.target in VIEWS or node.target is operator.getitem


def times_read(user: fx.Node, node: fx.Node) -> int:
    """How often `user`, which reads at other positions, reads each element: `table[i // 2]` every one twice."""
    if is_lazy_view(user) or user.args[0] is not node:
        return 1
    read, written = (present(product(sizes_of(n.meta["val"]))) for n in (node, user))
    return max(1, written // max(1, read))


def count_readers(g: Lowering, graph: fx.Graph) -> None:
    sinks: dict[fx.Node, frozenset] = {}
    later: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if "saved" in node.meta:
            g.wanted.add(node)
        stays_lazy = node.target in LOWERINGS and node not in g.refusals or is_lazy_view(node)
        if not stays_lazy and node.target is not aten.copy_.default:
            g.wanted.update(node.all_input_nodes)
        if node in g.wanted and is_lazy_view(node):
            g.wanted.update(node.all_input_nodes[:1])
        found, same, moved = set(), 1, 0
        for user in node.users:
            ends = user.op == "output" or user.target in LOOPS or \
                not is_lazy_view(user) and (user.target not in LOWERINGS or user in g.wanted) or \
                g.windows[user] >= 4 and user.target not in REINDEXING
            found |= {user} if ends else sinks[user]
            windows = 1 if ends else g.windows[user]
            if user.target in REINDEXING:
                moved += windows * times_read(user, node)
            else:
                same = max(same, windows)
        sinks[node] = frozenset(found)
        if any(sinks[user] == sinks[node] and user not in found and
               (user in later if user.target in WHOLE else user.target not in REINDEXING)
               for user in node.users):
            later.add(node)
        g.reuse[node] = 1 if node in later else len(found)
        g.windows[node] = max(same, moved)

# %% [markdown]
# ## What may refuse
#
# A lazy value is evaluated where it is read. `table[indices][:1]` then looks at one index, where eager looks at all of them and raises
# if one is out of range. The same if the table is made of one number: nothing is read, so nothing can be out of range. What may
# refuse its numbers is therefore a library call, as in eager, unless everything that it is given will be looked at: each of
# its elements is read, through operators that read all they are given (`looks_at_all`), and a table is in memory. Rows that are taken
# from a table are all looked at where they are put into memory.

# %%
READ_ALL = {*WHOLE, aten.expand.default, aten.flip.default, aten.cat.default, aten.copy_.default}


def refusals(graph: fx.Graph) -> tuple[set[fx.Node], set[fx.Node]]:
    """The nodes that may refuse and of which not all would be evaluated: those that are calls, and those that are put into memory."""
    read, called, stored = set(), set(), set()
    for node in reversed(graph.nodes):
        if any(user.op == "output" or user in read and looks_at_all(user, node) for user in node.users) or \
                not node.users and has_effect(node):
            read.add(node)
        if may_refuse(node):
            if not node.users or (not has_rows(node) if node.target in TABLES else node not in read):
                called.add(node)
            elif node not in read:
                stored.add(node)
    return called, stored


def looks_at_all(user: fx.Node, node: fx.Node) -> bool:
    """Whether `user`, of which each element is read, reads each of `node`: what is no lazy view does, and a table of its indices."""
    return user.target not in REINDEXING or user.target in LOOPS or user.target not in LOWERINGS and not is_lazy_view(user) or \
        user.target in READ_ALL or user.target in TABLES and node not in user.all_input_nodes[:1]


TABLES = {aten.embedding.default, aten.gather.default, aten.index_select.default, aten.index.Tensor}


def has_rows(node: fx.Node) -> bool:
    """Whether reading two rows of the table reads two places: there are two, and they were not made of one number. A size that is a
    symbol counts as it is now: should it be 1 later, the generated code has an index and its check all the same."""
    table, where = node.args[0], node.args[1]
    dims = [0] if node.target is aten.embedding.default else [where] if isinstance(where, int) else \
        [d for d, i in enumerate(where) if i is not None]
    shape = table.meta["val"].shape
    return len(shape) > 0 and all(present(shape[d]) > 1 for d in dims) and is_spread(table)


def is_spread(table: fx.Node) -> bool:
    """Whether all elements have places of their own."""
    while table.target in WHOLE:
        table = table.args[0]
    val = table.meta["val"]
    spread = all(present(n) == 1 or present(s) != 0 for n, s in zip(val.shape, val.stride()))
    given = table.op == "placeholder" or table.target not in LOWERINGS
    return spread and (given or table.target not in REINDEXING and any(
        n.meta["val"].shape == val.shape and is_spread(n) for n in table.all_input_nodes if isinstance(n.meta["val"], torch.Tensor)))

# %% [markdown]
# ## The walk
#
# Sizes that are symbols arrive as placeholders of their own, and as expressions inside arguments; neither
# needs lowering. A node that nobody reads is skipped, unless it draws random numbers: later ones would be
# others than eager's.
#
# `lower` goes through the graph once. For each node it keeps what the node has become: a lazy tensor for a
# tensor, an expression for a size, a list of these for an operator with several results. The copies
# into inputs that stand at the end of the graph are done last, in their order.

# %%
def lower(gm: fx.GraphModule, options: Options | None = None) -> Program:
    """The loops and library calls that compute the functional ATen graph `gm` (every node with a fake `val`).

    Mutation is allowed in one form: `aten.copy_(placeholder, value)` at the end of the graph.
    """
    program = Program([], {}, [], [])
    g = Lowering(options or Options(), program)
    g.refusals, stored = refusals(gm.graph)
    g.wanted |= stored
    count_readers(g, gm.graph)
    g.in_place = in_place_updates(gm.graph)
    copies = []
    for position, node in enumerate(gm.graph.nodes):
        g.node = node
        g.seen[node.name] = position, node
        if node.op == "placeholder":
            g.values[node] = lower_input(g, node)
            if node.meta.get("owned"):
                program.owned.add(node.name)
        elif node.op == "get_attr":
            g.values[node] = lower_constant(g, gm, node)
        elif node.op == "output":
            store_copies(g, copies, node)
            g.node = None
            program.outputs = [lower_output(g, value) for value in returned(node)]
            g.values.clear()                # lazy values and their rules hold each other: nothing else ends that at once
        elif node.target is aten.copy_.default:
            copies.append(node)
            g.values[node] = g.values[node.args[0]]
        elif node.users or has_effect(node):
            g.values[node] = lower_node(g, node)
    return program


def returned(output: fx.Node) -> tuple:
    return output.args[0] if isinstance(output.args[0], (tuple, list)) else (output.args[0],)


# %% [markdown]
# Two kinds of nodes are there before anything is computed. An input is a buffer, or a number that the program is given,
# and then the symbols of its loops take their values from it. A constant is a buffer that belongs to the program.

# %%
def lower_input(g: Lowering, node: fx.Node):
    val = node.meta["val"]
    g.program.inputs.append(node.name)
    if not isinstance(val, torch.Tensor):
        expr = expr_of(val)
        if isinstance(expr, Float) and expr.op == "symbol":
            g.program.symbols[node.name] = Symbol(expr.args[0], real=True)
        for symbol in symbols(expr) if isinstance(expr, Expr) else ():
            if symbol.expr == expr:
                g.program.symbols[node.name] = symbol
        return expr
    layout = Layout(sizes_of(val), strides_of(val))
    g.program.buffers[node.name] = Buffer(node.name, val.dtype, val.device, layout)
    return from_buffer(g, node.name)


def lower_constant(g: Lowering, gm: fx.GraphModule, node: fx.Node):
    """A tensor that the program made of constants. A single number is inlined: `mask[:, :4] = 1` would copy it
    to the GPU in every call."""
    value = call_node(gm, node, (), {})
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 0 and not value.is_complex() and value.device.type == "cpu":
        return LOWERINGS[aten.full.default](g, [], value.item())
    name = node.name
    g.program.constants[name] = value
    layout = Layout(tuple(value.shape), value.stride())
    g.program.buffers[name] = Buffer(name, value.dtype, value.device, layout)
    return from_buffer(g, name)


# %% [markdown]
# For an operator, `lower_node` looks into the table of rules and calls the rule with lazy tensors in place of nodes. A
# rule returns a lazy tensor, which has cost nothing so far. If there is no rule, or the rule declines, or a
# dtype is one that loops cannot hold, the operator becomes a call of PyTorch's own kernel, and its operands
# are stored first. A write into an input that can go straight to its memory has been found before, by
# [](ref:minicompile.ch07_loops.updates.in_place_updates). It keeps its operands apart from what it writes.
# A loop can read only the memory of its own device, so what eager lets an operator take from another, a number or some positions, is
# brought over before a rule sees it ([](ref:minicompile.ch07_loops.pointwise.on_device)).
#
# `check_result` compares each result with the fake that the recording has made. Sizes and dtypes must
# agree. Then the question of [](ref:minicompile.ch07_loops.lazy.settle) is asked: is this value to be put into memory now?

# %%
def lower_node(g: Lowering, node: fx.Node):
    """Lower one call; tensors come back as `Lazy`, sizes as `Int`, several results as a list."""
    val = node.meta.get("val")
    if node.target is operator.getitem:
        return g.values[node.args[0]][node.args[1]]
    if isinstance(val, int) and not isinstance(val, bool) or is_symbolic(val):
        return expr_of(val)
    if not isinstance(node.target, torch._ops.OpOverload):
        if val is None or isinstance(val, (bool, float, torch.SymBool)):
            return val
        raise Unsupported(f"{node.target} has no loop form", node.meta.get("location"))
    args, kwargs = map_args(lambda a: g.values[a] if isinstance(a, fx.Node) else expr_of(a),
                            (node.args, node.kwargs))
    rule, out = LOWERINGS.get(node.target), NotImplemented
    if node in g.in_place and not all_supported(node):
        g.in_place.remove(node)
    if node in g.in_place and node.target in WINDOWS:
        rule = update_window
    elif node in g.in_place:
        args = args[0], *map_args(lambda x: apart(g, x, args[0]), args[1:])
    if rule is not None and node not in g.refusals and (node.target in VIEWS or all_supported(node)):
        if isinstance(val, torch.Tensor) and node.target is not aten._to_copy.default:
            args = map_args(lambda x: pointwise.on_device(g, x, val.device), args)
        out = rule(g, *args, **kwargs)
    if out is NotImplemented:
        out = externs.call_extern(g, node.target)
    return check_result(g, node, out)


def all_supported(node: fx.Node) -> bool:
    fakes = [n.meta.get("val") for n in node.all_input_nodes] + [node.meta.get("val")]
    flat = [f for v in fakes for f in (v if isinstance(v, (tuple, list)) else [v])]
    return all(f.dtype in SUPPORTED for f in flat if isinstance(f, torch.Tensor))


def check_result(g: Lowering, node: fx.Node, out):
    """A lowering must give the sizes and dtypes of the fake. Then decide whether the result goes to
    memory."""
    val = node.meta.get("val")
    pairs = zip(out, val) if isinstance(val, (tuple, list)) else [(out, val)]
    for x, fake in pairs:
        if isinstance(x, Lazy) and isinstance(fake, torch.Tensor):
            if x.size != sizes_of(fake) or x.dtype != fake.dtype:
                raise AssertionError(f"{node.target}: lowered to {x.dtype}{list(x.size)}, expected {fake!r}")
    if isinstance(out, Lazy):
        settle(g, out, node)
    return out

# %% [markdown]
# ## Inputs that change
#
# The functional graph ends with `copy_(input, new value)`. The loop that computes a new value may write
# straight into the input's memory, under a new name that is an alias of the old one. This is what makes an
# optimizer step or the running statistics of a batch norm update in place. It is only right when the old
# contents are not needed any more. If the value of another copy reads them, that copy comes first: the new parameter of an optimizer
# is made of the old moments, and stored before the new ones. If two read each other's destination, or a value reads its own
# destination at *other* elements than it writes (`x.copy_(x.flip(0))`), it goes through a temporary. A value that
# was updated in place (`updates`) is there already.
#
# The moments of an optimizer are stored by the loop of their parameter, which has read and computed them. So is any update of what
# only one loop reads, at the elements that this loop writes, if it needs nothing else. Fusion would come to the same, pair by
# pair, for each of hundreds of parameters.

# %%
def store_copies(g: Lowering, copies: list[fx.Node], output: fx.Node) -> None:
    if not copies:
        return
    targets = {g.values[c.args[0]].view.buffer for c in copies}
    for node in returned(output):
        if isinstance(node, fx.Node) and node.target is not aten.copy_.default and \
                isinstance(g.values[node], Lazy):
            protect(g, g.values[node], targets)
    updates: dict[str, Update] = {}
    for copy in copies:
        g.node = copy
        own = g.values[copy.args[0]].view.buffer
        layout = g.program.buffers[own].layout
        value = broadcast_cast(g, g.values[copy.args[1]], copy)
        if value.view is not None and value.view.layout == layout and root_of(g.program.buffers, value.view.buffer) == own:
            continue                                        # it is there: updated in place, or copied onto itself
        reads = {root_of(g.program.buffers, name) for name in footprint(value)[1]}
        updates[own] = Update(copy, value, reads & targets - {own})
    for update in updates.values():
        if not update.reads <= updates.keys():
            by_temporary(g, update)
    readers: dict[str, set[Update]] = defaultdict(set)
    loops: dict[Update, list[Update]] = {}                  # the updates of one loop, by the first
    for own, update in readers_first(g, updates):
        g.node, layout = update.copy, g.program.buffers[own].layout
        update.first = first = shared_loop(g, own, update, {reader.first for reader in readers[own]})
        update.element = element_of(update.value, layout, first.element and first.element.b)
        if reads_elsewhere(g, update.element, own):
            by_temporary(g, update)
            update.first, update.element = (first := update), element_of(update.value, layout)
        for name in update.reads:
            readers[name].add(update)
        name = alias(g, g.latest.get(own, own))
        first.element.b.store(name, update.element.at, update.element.value)
        g.values[update.copy] = from_buffer(g, name)
        loops.setdefault(first, []).append(update)
    for first, members in loops.items():
        ops = frozenset().union(*(footprint(update.value)[0] for update in members))
        emit_loop(g, first.element.variables, (), first.element.b, ops, [update.copy for update in members])


# %% [markdown]
# `store_copies` goes in four steps. What the program returns and what still looks at an input is put into memory of its own
# (`protect`). Each copy that has something to do becomes an `Update`, with the other inputs whose old contents it reads.
# `readers_first` gives them in an order in which nobody reads what was overwritten before, and breaks circles by temporaries.
# For each, `shared_loop` says whether its one reader stores it as well, and in the end each loop is emitted, with all of its
# stores.

# %%
def shared_loop(g: Lowering, own: str, update: Update, firsts: set[Update]) -> Update:
    """The update whose loop is to store this one: itself, if it gets a loop. firsts: of the loops that read what it overwrites."""
    if len(firsts) == 1:
        first, = firsts
        one, other = (g.program.buffers[g.values[u.copy.args[0]].view.buffer] for u in (first, update))
        if one.layout == other.layout and one.device == other.device and footprint(update.value)[1] <= footprint(first.value)[1] and \
                not reads_elsewhere(g, first.element, own):
            return first
    return update


@dataclass(eq=False)
class Update:
    """A copy of `value` into an input. reads: other inputs that are copied into, whose old contents it reads; element: what it stores;
    first: the first update that its loop makes."""
    copy: fx.Node
    value: Lazy
    reads: set[str]
    element: Element | None = None
    first: Update | None = None


def by_temporary(g: Lowering, update: Update) -> None:
    g.node = update.copy
    update.value, update.reads = temporary(g, update.value), set()


def readers_first(g: Lowering, updates: dict[str, Update]) -> Iterator[tuple[str, Update]]:
    """Each update when no other one that is still to come reads what it overwrites."""
    readers = Counter(name for update in updates.values() for name in update.reads)
    place = {own: i for i, own in enumerate(updates)}
    ready = [(i, own) for own, i in place.items() if not readers[own]]       # in this order, a heap
    left = dict(updates)
    while left:
        own = heappop(ready)[1] if ready else next(own for own, update in left.items() if update.reads)
        reads = left[own].reads
        if readers[own]:                                    # they read each other's, in a circle
            by_temporary(g, left[own])
        else:
            yield own, left.pop(own)
        for name in reads:
            readers[name] -= 1
            if not readers[name]:
                heappush(ready, (place[name], name))


# %% [markdown]
# The rest are small. A copy may broadcast, cast, and move to another device, as eager's does (`broadcast_cast`). And what the
# program returns is a window on memory with the strides of the fake, for which a copy is made where it lies otherwise
# (`lower_output`).

# %%
def broadcast_cast(g: Lowering, value: Lazy, copy: fx.Node) -> Lazy:
    target = g.values[copy.args[0]]
    value = pointwise.on_device(g, value, target.device) if value.size == () else value
    if value.device != target.device:
        value = externs.move(g, value, target.device)
    value = views.broadcast(g, value)
    return value if value.dtype == target.dtype else pointwise.cast(g, value, target.dtype)


def protect(g: Lowering, value: Lazy, targets: set[str]) -> None:
    """A returned value that still looks at an input about to change is copied out first."""
    root = value
    while root.view is None and root.base is not None:
        root = root.base
    if root.view is not None and root_of(g.program.buffers, root.view.buffer) in targets:
        copy = temporary(g, value)
        value.view, value.base, value.inner = copy.view, None, copy.inner
    else:
        realize(g, value)


def lower_output(g: Lowering, value):
    """What the program returns: a window on a buffer with the strides of the fake, an integer, or None. Whoever gets it counts on
    these strides, also where an operator such as `select_scatter` has kept the gaps of what it was given."""
    if not isinstance(value, fx.Node):
        return expr_of(value)
    x = g.values[value]
    if not isinstance(x, Lazy):
        return x
    view, val = as_view(g, x) or window(g, x), value.meta["val"]
    stride = strides_of(val)
    if 0 not in x.size and not same_strides(x.size, view.layout.stride, stride):
        if not each_has_its_place(val):
            raise Unsupported(f"{value.target} returns elements that share memory", value.meta.get("location"))
        name = copy_to_buffer(g, x, stride)
        view = View(name, g.program.buffers[name].layout)
    return spelled(view, stride)
