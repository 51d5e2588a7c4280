# %% [markdown]
# # Tensors that are not there yet
#
# If every operator of the graph became a loop over memory, `gelu(x + bias)` would write and read a tensor six
# times. A `Lazy` is a tensor that *may* stay unwritten: a size, a dtype, and a function from an index to an
# element. An operator on lazy tensors gives a lazy tensor whose function calls theirs. Memory appears only
# when something *realises* the tensor, which emits one loop that evaluates the function at every index and
# stores the result.
#
# Views need no loop at all. `x.t()` is a lazy tensor whose element `(i, j)` is element `(j, i)` of `x`. It
# remembers its `base`, so that when `x` gets realised, the view too is known to be plain strided memory,
# which is what a library call wants to receive.
#
# `F.gelu(x + b).t() * 2`, where gelu has been taken apart, is a chain of eight lazy tensors. The last one is realised since it is returned,
# and that makes one loop, over the rows and columns of `x`:
#
#     loop0: for i0 < 64, i1 < 32    # add_tensor, mul_tensor, mul_tensor_1, erf_default, add_tensor_1, mul_tensor_2, mul_tensor_3
#         v0: f32 = load x[32*i0 + i1]
#         v1: f32 = load b[i1]
#         v2: f32 = add(v0, v1)
#         v3: f32 = constant(0.5)
#         v4: f32 = mul(v2, v3)
#         v5: f32 = constant(0.7071067811865476)
#         v6: f32 = mul(v2, v5)
#         v7: f32 = erf(v6)
#         v8: f32 = constant(1.0)
#         v9: f32 = add(v7, v8)
#         v10: f32 = mul(v4, v9)
#         v11: f32 = constant(2.0)
#         v12: f32 = mul(v10, v11)
#         buf0[32*i0 + i1] = v12
#     return buf0[32, 64]:1,32
#
# The transposition has left no trace in the loop, which runs in the order in which the result lies in memory: 32 by 64 elements with the
# strides 1 and 32, as in eager. `x + b` has two readers, and `v2` is there once: both asked for the element at the same index, and a body
# has equal values once.

# %%
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, NamedTuple

import torch
from torch import fx

from ..ch01_graphs import layouts
from ..ch01_graphs.graph import together
from ..ch01_graphs.layouts import contiguous_strides, same_strides
from ..ch01_graphs.shapes import expr_of
from ..ch01_graphs.symbolic import Int, Symbol, as_expr, present, product
from ..config import config
from ..errors import Unsupported
from .builder import SUPPORTED, Builder
from .ir import NONE, Buffer, Layout, Loop, Program, Value, View, root_of


@dataclass(eq=False)
class Lazy:
    """A tensor described by `inner(builder, index) -> Value`, one element at a time.

    `stride`: the strides that eager's result has, kept if it is realised. `view`: where it lies once it
    is in memory.
    `ops`, `reads`: names of the graph nodes and buffers that evaluating an element runs through (when not
    in memory). `heavy`: whether a function is among them that takes long on a CPU.
    `base`, `relayout`: for a view, what it looks at, and how the strides of that become its own (None if
    it cannot)."""

    size: tuple[Int, ...]
    dtype: torch.dtype
    device: torch.device
    inner: Callable[[Builder, tuple], Value]
    stride: tuple[Int, ...]
    view: View | None = None
    ops: frozenset[str] = NONE
    reads: frozenset[str] = NONE
    heavy: bool = False
    base: "Lazy | None" = None
    relayout: Callable[[Layout], Layout | None] | None = None


def in_memory(x: Lazy) -> bool:
    return x.view is not None or x.base is not None and in_memory(x.base)


def footprint(x: Lazy) -> tuple[frozenset[str], frozenset[str], bool]:
    """What evaluating one element costs: (graph nodes run, buffers read, whether an expensive function is
    among them)."""
    while x.base is not None and x.view is None:
        x = x.base
    return (NONE, x.reads, False) if x.view is not None else (x.ops, x.reads, x.heavy)


def linear(index, stride, offset: Int = 0) -> Int:
    """The memory position of an index: offset + index . stride."""
    for i, s in zip(index, stride):
        offset = offset + as_expr(i) * s
    return offset

# %% [markdown]
# ## Layouts
#
# A realised tensor takes the strides that eager's would have whenever these fill memory without holes, in any
# order of dims: contiguous, transposed, channels_last. So graph outputs look as in eager, and library calls
# get the layout their fakes promised. Sizes that are symbols sort by their present values.

# %%
def present_order(size, stride) -> list[int]:
    """`memory_order`, by present values."""
    return layouts.memory_order([*map(present, size)], [*map(present, stride)])


def dense_strides(size, stride) -> tuple[Int, ...]:
    """`stride` if the tensor fills memory without holes or overlaps, else the closest strides that do
    (same order)."""
    if 0 in size:
        return contiguous_strides(size)
    running, dense, wanted = 1, True, [0] * len(size)
    for d in reversed(present_order(size, stride)):
        wanted[d] = running
        if size[d] != 1:
            dense = dense and stride[d] == running
            running = running * size[d]
    return tuple(stride) if dense else tuple(wanted) if 0 not in stride else contiguous_strides(size)


# %% [markdown]
# ## The state of a lowering
#
# How much is inlined into one body, and whether a reduction is split so that all processors have work, are limits that
# depend on the machine or on the user (`Options`).

# %%
def gpu_processors() -> int:
    """Streaming multiprocessors of the GPU; those of an H100 where there is none, or where none is in use: asking would start CUDA, which
    a program on the CPU must not notice (`torch.utils.checkpoint` refuses a forward pass that does so, and forked processes inherit it)."""
    in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.cuda.get_device_properties(0).multi_processor_count if in_use else 132


@dataclass
class Options:
    """What the machine and the user ask of the lowering."""

    split_reductions: bool = field(default_factory=lambda: config.split_reductions)
    emulate_precision_casts: bool = field(default_factory=lambda: config.emulate_precision_casts)
    processors: int = field(default_factory=gpu_processors)
    threads: int = field(default_factory=torch.get_num_threads)
    max_ops: int = 100                     # graph nodes inlined into one body
    max_reads: int = 10                    # distinct buffers read by one body
    reuse_ops: int = 12                    # a value read several times is recomputed if cheaper than this


# %% [markdown]
# `Lowering` is the record that all lowerings pass around. The buffers and loops made so far are in `program`;
# `values` leads from a graph node to its `Lazy` or its number. The next four are found out before the first node is lowered:
# `reuse[node]` is the number of loops that would evaluate a node if it stayed lazy, and `windows[node]` at
# how many positions each of them would. `wanted` holds the nodes that must be in memory anyway, because the
# program returns them or a library call reads them, and `refusals` those that have to be calls because they may refuse their operands.

# %%
@dataclass
class Lowering:
    """Everything known while one graph is being lowered."""

    options: Options
    program: Program
    values: dict[fx.Node, Any] = field(default_factory=dict)
    reuse: dict[fx.Node, int] = field(default_factory=dict)
    windows: dict[fx.Node, int] = field(default_factory=dict)
    wanted: set[fx.Node] = field(default_factory=set)
    refusals: set[fx.Node] = field(default_factory=set)
    node: fx.Node | None = None            # the graph node being lowered
    count: int = 0                         # of buffers that were named
    moved: dict = field(default_factory=dict)            # (id of a tensor, device) -> the tensor, and what it is there
    seen: dict[str, tuple[int, fx.Node]] = field(default_factory=dict)      # the nodes so far, with their places in the graph
    in_rows: set[str] = field(default_factory=set)       # buffers read together with numbers per row
    in_place: set[fx.Node] = field(default_factory=set)  # writes that go to the memory of an input
    latest: dict[str, str] = field(default_factory=dict)     # input -> the alias that the last of them made

    @property
    def val(self):
        """The fake result of the node being lowered."""
        return self.node.meta["val"]


# %% [markdown]
# Buffers get their names in one place. `alias` is for writes in place: the memory of an input gets a second name,
# so that a loop that reads the old contents and one that reads the new ones name different buffers, and the
# scheduler sees the order. `loader` turns a buffer into an element function: the address is the sum of index times
# stride.

# %%
def sizes_of(fake) -> tuple[Int, ...]:
    return tuple(expr_of(s) for s in fake.shape)


def strides_of(fake) -> tuple[Int, ...]:
    return tuple(expr_of(s) for s in fake.stride())


def new_buffer(g: Lowering, dtype, device, size, stride, alias_of: str | None = None) -> str:
    while (name := f"buf{g.count}") in g.program.buffers or name in g.program.symbols:        # an input that the program calls so
        g.count += 1
    g.count += 1
    g.program.buffers[name] = Buffer(name, dtype, device, Layout(tuple(size), tuple(stride)), alias_of)
    return name


def alias(g: Lowering, name: str) -> str:
    """A new name for the memory of an input, about to be written."""
    old = g.program.buffers[name]
    after = new_buffer(g, old.dtype, old.device, old.layout.size, old.layout.stride, alias_of=name)
    g.latest[root_of(g.program.buffers, name)] = after
    return after


def loader(name: str, dtype, layout: Layout):
    """The element function of memory."""
    def inner(b: Builder, index):
        return b.load(name, linear(index, layout.stride, layout.offset), dtype)
    return inner


def from_buffer(g: Lowering, name: str, layout: Layout | None = None) -> Lazy:
    """A buffer, or a window on it, as a tensor."""
    buffer = g.program.buffers[name]
    layout = layout or buffer.layout
    return Lazy(layout.size, buffer.dtype, buffer.device, loader(name, buffer.dtype, layout), layout.stride,
                view=View(name, layout), reads=frozenset([name]))

# %% [markdown]
# ## Emitting a loop
#
# A loop has variables and stores. Dims of size 1 get the index 0 and no variable. The order of variables is the
# order of the output in memory, slowest first.

# %%
def make_vars(prefix: str, size, order=None) -> tuple[tuple[Symbol, ...], tuple[Int, ...]]:
    """Variables for a space of `size`, nested in `order` (slowest dim first). Returns (variables, index
    per dim)."""
    order = range(len(size)) if order is None else order
    variables, index = [], [0] * len(size)
    for d in order:
        if size[d] != 1:
            symbol = Symbol(f"{prefix}{len(variables)}", size[d])
            variables.append(symbol)
            index[d] = symbol.expr
    return tuple(variables), tuple(index)


def emit_loop(g: Lowering, variables, reduction_vars, b: Builder, ops: frozenset[str], nodes: Iterable[fx.Node] | None = None) -> None:
    """Emit the loop with the body that `b` has collected. nodes: what it is emitted for, if not only the node being lowered."""
    names = [node.name for node in ([g.node] if nodes is None else nodes) if node is not None]
    origins = sorted(ops.union(names), key=lambda name: g.seen[name][0])
    location = together([g.seen[name][1].meta.get("location") for name in names + origins])
    turn = max([g.seen[name][1].meta.get("turn", 0) for name in ops or origins], default=0)
    g.program.nodes.append(Loop(f"loop{len(g.program.nodes)}", variables, reduction_vars, tuple(b.stores), location, tuple(origins), turn))


# %% [markdown]
# `store_into` is where lazy values end. It makes variables for the space, evaluates the value at them in a
# `Builder`, which records each operation (`element_of`), and emits a loop that stores the result. `realize` does this for a new
# buffer, and from then on the value is a load from it (`become`).

# %%
class Element(NamedTuple):
    """What a loop over `variables` computes (`value`, in the body that `b` collects) and at which position `at` it stores it."""

    variables: tuple[Symbol, ...]
    at: Int
    b: Builder
    value: Value


def element_of(x: Lazy, layout: Layout, b: Builder | None = None) -> Element:
    """`x` at the variables of a loop that stores it into a window of this layout. b: the body of such a loop, if there is one."""
    if x.dtype not in SUPPORTED:
        raise Unsupported(f"loops over {x.dtype}")
    variables, index = make_vars("i", x.size, present_order(x.size, layout.stride))
    b = b or Builder()
    return Element(variables, linear(index, layout.stride, layout.offset), b, b.read(x, index))


def store_into(g: Lowering, x: Lazy, name: str, layout: Layout) -> None:
    """Emit the loop that evaluates `x` everywhere and stores it into a window of buffer `name`."""
    variables, at, b, value = element_of(x, layout)
    b.store(name, at, value)
    emit_loop(g, variables, (), b, footprint(x)[0])


def realize(g: Lowering, x: Lazy) -> Lazy:
    """Put `x` (or, for a view, its base) into memory. Afterwards reading it is a load."""
    if x.view is not None:
        return x
    if x.base is not None:
        realize(g, x.base)
        return x
    name = copy_to_buffer(g, x, dense_strides(x.size, x.stride))
    become(x, View(name, g.program.buffers[name].layout))
    return x


def become(x: Lazy, view: View) -> None:
    """From now on `x` is what lies at `view`."""
    x.view, x.reads, x.ops, x.heavy = view, frozenset([view.buffer]), NONE, False
    x.stride, x.inner = view.layout.stride, loader(view.buffer, x.dtype, view.layout)


def copy_to_buffer(g: Lowering, x: Lazy, stride) -> str:
    """A new buffer with these strides that holds `x`."""
    name = new_buffer(g, x.dtype, x.device, x.size, stride)
    store_into(g, x, name, Layout(x.size, tuple(stride)))
    return name


# %% [markdown]
# A library call wants memory, and not an element function. `as_view` gives it: if the value is a view, its base is
# put into memory, and the view becomes another layout of that memory. Where no strides describe the view, or the
# library needs other ones, `window` makes a copy.

# %%
def as_view(g: Lowering, x: Lazy) -> View | None:
    """`x` as strided memory, realising its base; None for a view that strides cannot express."""
    if x.view is None and x.base is not None:
        base = as_view(g, x.base)
        layout = x.relayout(base.layout) if base is not None and x.relayout is not None else None
        return None if layout is None else View(base.buffer, layout)
    return realize(g, x).view


def window(g: Lowering, x: Lazy, stride=None) -> View:
    """`x` as strided memory, copied when its own layout will not do. `stride`: the strides that are
    required, if any."""
    view = as_view(g, x)
    if view is None or stride is not None and 0 not in x.size and not same_strides(x.size, view.layout.stride, stride):
        name = copy_to_buffer(g, x, dense_strides(x.size, stride or x.stride))
        view = View(name, g.program.buffers[name].layout)
    return view if stride is None else spelled(view, stride)


def spelled(view: View, stride) -> View:
    """`view` with `stride` for its own, where these differ in dimensions of size 1 only. No address depends on those, but attention
    kernels ask whether they are aligned, and convolutions tell channels last by them."""
    layout = view.layout
    same = same_strides(layout.size, layout.stride, stride)
    return View(view.buffer, Layout(layout.size, tuple(stride), layout.offset)) if same else view

# %% [markdown]
# ## When to put a value into memory
#
# Recomputing costs reads and arithmetic in every reader; keeping costs one write and one read each, and
# nothing at all where the scheduler fuses the readers with the writer, because then the value stays in a
# register. With `n` reading loops and `r` buffers read, recomputing moves `n*r` tensors and keeping `r + 1 +
# n`. So a value is kept when `(n-1)*(r-1) > 2`, or when its arithmetic is long; on a CPU also when it is expensive at
# all: there `exp`, `log`, `erf` or `tanh` of numbers in the cache takes as long as adding ten more operands to them
# (4,096 float32 numbers, one core of an EPYC). A value that is read through four or more windows is
# kept unless it is nearly free. Casts, broadcasts and constants always stay lazy. Where a cast of a narrower
# value would be kept, the narrower value is: half the bytes, and the rounding of eager.

# %%
def worth_keeping(g: Lowering, x: Lazy, readers: int, windows: int) -> bool:
    ops, reads, heavy = footprint(x)
    if not reads or in_memory(x):
        return False
    expensive = heavy and x.device.type == "cpu"
    elements = present(product(x.size))
    big = sum(1 for name in reads if present(product(g.program.buffers[name].layout.size)) * 2 > elements)
    if windows >= 4 and (len(ops) > 2 or big > 1 or expensive):
        return True
    return readers > 1 and ((readers - 1) * (big - 1) > 2 or len(ops) > g.options.reuse_ops or expensive)


def settle(g: Lowering, x: Lazy, node: fx.Node) -> None:
    """Decide, right after `node` was lowered to `x`, whether it goes to memory now."""
    if node in g.wanted and x.base is not None and x.relayout is None:
        x.base = None                  # an index map that is no view: in eager it is memory of its own
    if x.view is not None or x.base is not None:
        return
    if node in g.wanted:
        realize(g, x)
    elif worth_keeping(g, x, g.reuse[node], g.windows[node]):
        narrow = g.values.get(node.args[0]) if node.target is torch.ops.aten._to_copy.default else None
        if isinstance(narrow, Lazy) and narrow.dtype.itemsize < x.dtype.itemsize and narrow.size == x.size:
            realize(g, narrow)
            x.reads, x.ops, x.heavy = footprint(narrow)[1], frozenset([node.name]), False
        else:
            realize(g, x)


def make_lazy(g: Lowering, inner, operands, *, val=None, heavy: bool = False) -> Lazy:
    """The result of the current node as a function of `operands`, with size, dtype and strides of its fake `val`.
    Operands are realised, the most expensive first, while the combined body would be too large."""
    val = g.val if val is None else val
    while True:
        prints = [footprint(x) for x in operands]
        ops = frozenset([g.node.name]).union(*[p[0] for p in prints])
        reads = NONE.union(*[p[1] for p in prints])
        if len(ops) <= g.options.max_ops and len(reads) <= g.options.max_reads:
            break
        candidates = [(len(p[0]) + 4 * len(p[1]), i) for i, (p, x) in enumerate(zip(prints, operands)) if p[0]
                      and p[1] and not in_memory(x)]
        if not candidates:
            break
        realize(g, operands[max(candidates)[1]])
    heavy = heavy or any(p[2] for p in prints)
    return Lazy(sizes_of(val), val.dtype, val.device, inner, strides_of(val), ops=ops, reads=reads, heavy=heavy)


def make_view(g: Lowering, x: Lazy, index_map, relayout) -> Lazy:
    """The current node as a view of `x`: element `index` is element `index_map(index)` of `x`."""
    def inner(b: Builder, index):
        return b.read(x, index_map(index))
    return Lazy(sizes_of(g.val), x.dtype, x.device, inner, strides_of(g.val), base=x, relayout=relayout)
