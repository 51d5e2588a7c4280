# %% [markdown]
# # Loop nests as C++ text
#
# A kernel's body is a graph of values, and C++ wants statements, each in the right loop. This module has what the nests of all kernels are
# written with: scopes that know which values have a name, the text of a value, the choice of the *lane* (the variable of the innermost
# loop, the one that becomes vectors), the headers of loops and what their threads share. What else is done to an innermost loop, so
# that it does become vectors, is in `lanes.py`.
#
# The kernel of `(x - mean) * torch.rsqrt(variance + 1e-5)`, of 64 rows of 256 numbers with a mean and a variance for each row:
#
#     for (int64_t i0 = 0; i0 < 64; i0 += 1) {
#       const float v2 = in1[i0];
#       const float v4 = in2[i0];
#       const float v5 = v4 + 9.99999975e-06f;
#       const float v6 = (float)1 / __builtin_sqrtf(v5);
#       #pragma omp simd
#       for (int64_t lane = 0; lane < 256; lane += 1) {
#         const int64_t i1 = lane;
#         const float v1 = in0[256*i0 + i1];
#         const float v3 = v1 - v2;
#         const float v7 = v3 * v6;
#         out0[256*i0 + i1] = v7;
#       }
#     }
#
# There are three scopes: the function, the loop over rows, the lane loop. The printer was asked for one thing, the store. That needs `v7`,
# which needs `v3` and `v6`, and so on; each went into the outermost scope in which it can be computed. `v6`
# depends on `i0` only, so the root and the division are done 64 times, not 16,384 times. The numbers in the names say in which order
# they were made.

# %%
from dataclasses import dataclass, field
from typing import Iterable, NamedTuple

import torch

from ..ch01_graphs.symbolic import (Expr, Int, Symbol, bounds, coefficient, present, product, provably_less, provably_nonnegative,
                                    substitute, symbols, to_text)
from ..ch07_loops.ir import Layout, Loop, Value, behind
from ..ch07_loops.lazy import linear
from ..ch07_loops.pointwise import HEAVY
from ..ch08_fusion.kernel import Kernel
from ..ch08_fusion.values import LinkedKernel
from .ops import BITS, convert, from_memory, literal, memory_type, operation, register_type, to_memory

PARALLEL_WORK = 32768        # elements below which starting threads costs more than they save
SIMD = "#pragma omp simd"

# %% [markdown]
# ## Scopes
#
# A `Scope` is a brace level of the output: the variables bound there, the lines so far, and the name of every
# value already computed. A value is computed in the outermost scope that binds all its `dims`, which moves
# loop-invariant loads and arithmetic out of the loops. (The compiler would not do it for loads: it cannot
# know that no store in between hits the same address.)

# %%
@dataclass(eq=False)
class Scope:
    dims: frozenset[Symbol]
    parent: "Scope | None" = None
    lines: list[str] = field(default_factory=list)
    names: dict[object, object] = field(default_factory=dict)    # of a value the C++ text, or several in a tuple
    location: tuple = ()


@dataclass
class Interior:
    """Where in a row what depends on the lane is as in the middle of the row (`lanes.py`)."""

    begin: int | str                # a name if sizes vary
    end: int | str
    inside: dict[Value, str]        # what conditions and positions are there
    moves: dict[Value, int]         # by how much positions move on
    rows: list[Value]               # conditions that have to hold


@dataclass(eq=False)
class Emitter:
    """What the emitting functions share."""

    graph: LinkedKernel
    threads: int
    pointers: dict[str, str]             # buffer name -> C++ name, the same for equal kernels
    part: bool = False                   # emit a function for a part of the nest, from `begin` to `end`, by one thread
    window: tuple[Int, int] = (1, 1)     # of `part`: what the outermost loop counts to, in which steps
    blocks: dict[Value, str] = field(default_factory=dict)      # load, store -> where a copy of the element is
    interior: Interior | None = None
    padded: bool = False                 # the last step of the lane loop has as many lanes as the others
    pairs: bool = False                  # several outputs are stored through one pointer
    few: tuple[Int, int] | None = None   # if sizes vary: the work, and how much is worth threads
    count: int = 0

    def __post_init__(self):
        self.position = {id(loop): k for k, loop in enumerate(self.kernel.loops)}

    @property
    def kernel(self) -> Kernel:
        return self.graph.kernel


def fresh(e: Emitter, prefix: str) -> str:
    e.count += 1
    return f"{prefix}{e.count}"


def of_loop(e: Emitter, loop: Loop, *lines: str) -> list[str]:
    """These lines with a mark that says which loop of the kernel they compute; `taken_off` removes it."""
    return [f"{line}\0{e.position[id(loop)]}" for line in lines]


def taken_off(text: str) -> tuple[str, tuple[int | None, ...]]:
    """The text without marks, and for each line its loop (`KernelSource.lines`)."""
    parts = [line.partition("\0") for line in text.split("\n")]
    return "\n".join(line for line, _, _ in parts), tuple(int(k) if k else None for _, _, k in parts)


def child(scope: Scope, dims) -> Scope:
    return Scope(scope.dims | frozenset(dims), scope)


def close(scope: Scope, headers: list[str], prologue: list[str] = ()) -> None:
    """Append `scope`'s lines to its parent, wrapped in the loops `headers` (outermost first)."""
    lines, depth = scope.parent.lines, 0
    for header in headers:
        if header.startswith("#"):                       # a pragma opens no braces
            lines.append("  " * depth + header)
        else:
            lines.append("  " * depth + f"{header} {{".lstrip())
            depth += 1
    lines += ["  " * depth + line for line in (*prologue, *scope.lines)]
    lines += ["  " * k + "}" for k in reversed(range(depth))]


def for_(name: str, size: str, start: str = "0", step: int | str = 1) -> str:
    return f"for (int64_t {name} = {start}; {name} < {size}; {name} += {step})"

# %% [markdown]
# ## Values to text
#
# A value that has a name has it in some scope around the present one (`known_name`). Sizes and addresses are expressions of
# chapter 1, whose divisions C++ rounds to zero; a symbol in an address may stand for a value that was loaded, as in a gather,
# and then the value is asked for.

# %%
def known_name(value: Value, scope: Scope | None):
    while scope is not None:
        if value in scope.names:
            return scope.names[value]
        scope = scope.parent
    return None


def size_text(size: Int) -> str:
    """A size in C++."""
    return to_text(size, floordiv="/", truncates=True)


def index_text(e: Emitter, index: Int, scope: Scope) -> str:
    """An index expression in C++."""
    def name(s: Symbol) -> str:
        return get(e, e.graph.symbols[s], scope) if s in e.graph.symbols else s.name
    return to_text(index, name, "/", truncates=True)

# %% [markdown]
# `get` is the heart of the printer. Asked for a value in some scope, it returns a name. If the value has
# none yet, it finds the outermost scope in which all variables that the value depends on are known, and
# computes it there. So `rsqrt(variance)` ends up in front of the loop over the row, and a constant in front
# of everything. Nobody has to move code afterwards.

# %%
def get(e: Emitter, value: Value, scope: Scope) -> str:
    """The C++ name of `value`, computing it first in the outermost scope that can."""
    known = known_name(value, scope)
    if known is not None:
        return known
    home = scope
    while home.parent is not None and value.dims <= home.parent.dims:
        home = home.parent
    text = _expression(e, value, home)
    if e.interior is not None and value in e.interior.inside:
        text = f"inside ? {e.interior.inside[value]} : ({text})"
    if value.op not in ("constant", "get"):
        mention(e, home, value.loop)
        name = fresh(e, "v")
        home.lines += of_loop(e, value.loop, f"const {register_type(value.dtype)} {name} = {text};")
        text = name
    home.names[value] = text
    return text


def mention(e: Emitter, scope: Scope, loop: Loop) -> None:
    """Comments with the user's lines, when they are others than the last ones mentioned in this scope."""
    if loop.location is not None and loop.location.lines != scope.location:
        scope.location = loop.location.lines
        scope.lines += of_loop(e, loop, *(f"// {line}" for line in scope.location))


def _expression(e: Emitter, value: Value, scope: Scope) -> str:
    args, dtype = value.args, value.dtype
    if value.op == "constant":
        return literal(args[0], dtype)
    if value.op == "get":
        return known_name(args[0], scope)[args[1]]
    if value.op == "index":
        return index_text(e, args[0], scope)
    if value.op == "indirect":
        return f"mc_index({get(e, args[0], scope)}, {index_text(e, args[2], scope)}, problem)"
    lane = lane_of(scope)
    if value.op == "load":
        return from_memory(_loaded(e, value, lane, scope), dtype)
    if value.op == "where" and lane is not None and lane not in args[0].dims and dtype is not torch.bool:
        chosen = ", ".join([lane_mask(e, args[0], scope.parent), *(get(e, a, scope) for a in args[1:])])
        return f"mc_choose<{register_type(dtype)}>({chosen})"
    return operation(value, [unfused(e, value, a, get(e, a, scope)) for a in args if type(a) is Value])


# %% [markdown]
# Where the real and the imaginary part of products are stored side by side, g++ makes one vector of them, a difference in each even lane
# and a sum in each odd one, for which processors have an instruction that multiplies as well. g++ 12 takes it whatever
# `-ffp-contract` says, and a product less itself is no longer zero. So a product there is multiplied by `one`, a number that g++ does not
# know: to fuse that changes nothing.

# %%
def unfused(e: Emitter, value: Value, operand: Value, text: str) -> str:
    """The text of an operand such that g++ does not fuse its product into the sum `value` of vectors of pairs."""
    first = value.args[:{"add": 2, "sub": 1}.get(value.op, 0)] if e.pairs and value.dtype.is_floating_point else ()
    return f"{text} * one" if operand is next((a for a in first if a.op == "mul"), None) else text


# %% [markdown]
# A masked load is a branch, because the masked elements may lie outside of the memory, and a loop with a branch is
# not made into vector instructions. Where the position is inside of the memory whatever the mask says, as in
# `y[:, 0] += 1`, whose `select_scatter` reads the one column at every index, the load comes first and the mask
# selects.
#
# And where the mask is the same for all lanes, as in a padding or a pool of images whose channels are innermost, it says where they
# begin to read: if it is false, at the beginning of the memory (`first_position`). g++ makes no vectors of a loop with several
# conditions that do not vary in it, so what selects are the bits of a number, all or none (`lane_mask`, `mc_choose`).

# %%
def lane_of(scope: Scope) -> Symbol | None:
    """The variable of the loop that `scope` is the body of."""
    own = scope.dims - scope.parent.dims if scope.parent is not None else ()
    return next(iter(own)) if len(own) == 1 else None


def _loaded(e: Emitter, load: Value, lane: Symbol | None, scope: Scope) -> str:
    """The element that is loaded, as memory has it."""
    pointer, t = e.pointers[load.buffer], memory_type(load.dtype)
    whole = load.mask is not None and masks_whole_lanes(e, load, lane)
    if whole:
        steps = coefficient(load.index, lane) * lane.expr
        place = f"{first_position(e, load, lane, 0, scope.parent)} + {index_text(e, steps, scope)}"
    else:
        place = index_text(e, load.index, scope)
    text = e.blocks.get(load) or f"{pointer}[{place}]"
    if load.mask is None:
        return text
    if whole or stays_inside(e.kernel.buffers[load.buffer].layout, load.index):
        name = fresh(e, "m")
        scope.lines += of_loop(e, load.loop, f"const {t} {name} = {text};")
        text = name
    if whole:
        return f"mc_choose<{t}>({lane_mask(e, load.mask, scope.parent)}, {text}, 0)"
    return f"({get(e, load.mask, scope)} ? {text} : ({t})0)"


def last_position(layout: Layout) -> Int:
    return linear([size - 1 for size in layout.size], layout.stride, layout.offset)


def stays_inside(layout: Layout, index) -> bool:
    """Is memory position `index` in a tensor of this layout for all values of the loop variables?"""
    return 0 not in layout.size and provably_nonnegative(index) and provably_less(index, last_position(layout) + 1)


def along_lane(e: Emitter, index: Int, lane: Symbol) -> Int | None:
    """How far a step along the lane moves `index`; None where that varies."""
    found = e.graph.symbols
    return None if any(s in found and lane in found[s].dims for s in symbols(index)) else coefficient(index, lane)


def masks_whole_lanes(e: Emitter, load: Value, lane: Symbol | None) -> bool:
    """Is the mask the same for all lanes, and could they all read from the beginning of the memory on?"""
    layout = e.kernel.buffers[load.buffer].layout
    step = None if lane is None or lane in load.mask.dims else along_lane(e, load.index, lane)
    return isinstance(step, int) and step > 0 and 0 not in layout.size and \
        provably_less(layout.offset + step * (lane.size - 1), last_position(layout) + 1)


def first_position(e: Emitter, load: Value, lane: Symbol, first: Int, scope: Scope) -> str:
    """Where the lanes begin to read, from the lane `first` on: a name in `scope`, which is around their loop."""
    compute(e, [load.mask], scope)
    name, mask = fresh(e, "at"), get(e, load.mask, scope)
    begin = index_text(e, e.kernel.buffers[load.buffer].layout.offset, scope)
    place = index_text(e, substitute(load.index, {lane: first}), scope)
    scope.lines += of_loop(e, load.loop, f"const int64_t {name} = {mask} ? {place} : {begin};")
    return name


def lane_mask(e: Emitter, condition: Value, scope: Scope) -> str:
    """A name in `scope`, which is around the lane loop, of a number whose bits are all set if `condition` holds, and else none."""
    key = "lanes", condition
    name = known_name(key, scope)
    if name is None:
        compute(e, [condition], scope)
        name, test = fresh(e, "all"), get(e, condition, scope)
        scope.lines += of_loop(e, condition.loop, f"const int64_t {name} = -(int64_t)({test} != 0);")
        scope.names[key] = name
    return name


def compute(e: Emitter, steps: Iterable[Value], scope: Scope) -> None:
    """Compute what `steps` need in `scope`, operands first. Nothing recurses deeply."""
    for value in unnamed(steps, scope):
        get(e, value, scope)


def unnamed(steps: Iterable[Value], scope: Scope) -> list[Value]:
    """What is still to be computed for `steps`, operands first."""
    def unknown(value):
        return known_name(value, scope) is None
    return behind(filter(unknown, steps), unknown)


def store_lines(e: Emitter, stores: Iterable[Value], scope: Scope) -> None:
    """Emit `stores`. All their values come first: an output may overwrite an input at the same element."""
    compute(e, stores, scope)
    places = [f"{e.pointers[s.buffer]}[{index_text(e, s.index, scope)}]" for s in stores]
    for s, place in zip(stores, places):
        mention(e, scope, s.loop)
        value, dtype = get(e, s.value, scope), e.kernel.buffers[s.buffer].dtype
        dtype = BITS if s.value.dtype is BITS else dtype
        if register_type(s.value.dtype) != register_type(dtype):
            value = f"({convert(value, s.value.dtype, dtype)})"
        if s.mode == "atomic_add":
            value = f"{from_memory(place, dtype)} | {value}" if dtype is torch.bool else \
                f"({register_type(dtype)})({from_memory(place, dtype)} + {value})"
        elif s.mode is not None:
            raise AssertionError(f"store mode {s.mode}")
        guard = f"if ({get(e, s.mask, scope)}) " if s.mask is not None else ""
        if s in e.blocks:
            scope.lines += of_loop(e, s.loop, f"{e.blocks[s]} = {value};")
            continue
        scope.lines += of_loop(e, s.loop, f"{guard}{place} = {to_memory(value, dtype, s.mode is None and s.value.half == dtype)};")

# %% [markdown]
# ## Choosing the lane
#
# Each access votes: a variable that moves it by one element is worth its bytes, one that moves it further, or to wherever a
# table says, costs them, and two elements a part of them. Stores count double, since a strided store
# reads the line as well. Very short loops make poor lanes, whatever their stride.
#
# In `x.t() + y`, of 512 by 256 numbers of four bytes, the two operands disagree. The votes of their loads, of the store, and the sum:
#
#     in0[512*i0 + i1]      i0   -4    i1   +4
#     in1[i0 + 256*i1]      i0   +4    i1   -4
#     out0[512*i0 + i1]     i0   -8    i1   +8
#     all                   i0   -8    i1   +8
#
# So `i1` is the lane. (The operand that lost is read in tiles, `emit.py`.)

# %%
def vote(e: Emitter, variable: Symbol, other: Symbol | None = None) -> float:
    """How well `variable` serves as the innermost loop: bytes moved contiguously minus bytes moved in
    jumps. Against `other`, accesses that this one does not move, and that would leave its loop, do not count."""
    total = 0.0
    accesses = [v for v in e.graph.steps if v.op in ("load", "store") and (other is None or along_lane(e, v.index, other) != 0)]
    if e.graph.reductions:      # what happens once per row does not matter
        accesses = [a for a in accesses if e.graph.row & (a.dims if a.op == "load" else symbols(a.index))] or accesses
    for access in accesses:
        step = along_lane(e, access.index, variable)
        if step != 0:
            size = e.kernel.buffers[access.buffer].dtype.itemsize * (2 if access.op == "store" else 1)
            total += size if step == 1 else -size / 4 if step == 2 else -size
    return total * min(present(variable.size), 16) / 16 if total > 0 else total


def best_lane(e: Emitter, candidates: tuple[Symbol, ...], other: Symbol | None = None) -> tuple[Symbol | None, float]:
    """The best variable (later ones win ties) and its vote, against `other`."""
    best, score = None, float("-inf")
    for variable in candidates:
        v = vote(e, variable, other)
        if v >= score:
            best, score = variable, v
    return best, score

# %% [markdown]
# ## Threads and atomics
#
# Iterations of the outer loops are shared among threads with a static schedule. A store that *accumulates* at
# a computed address, such as the gradient of an embedding, needs care: two iterations may hit one element.
# Atomic instructions would make the sum depend on timing. But in such kernels some variable usually enters
# the address directly: the column of the embedding table. Different columns never collide, so threads that
# each own a range of columns need no atomics and give the same bits every time. Where no variable is direct,
# the kernel runs on one thread. In the kernel that adds 512 rows of 64 numbers to rows of a table, the store is
#
#     out0[64*v8 + i1] = (float)(out0[64*v8 + i1] + v1);
#
# `v8`, the row, was loaded, and any two of the 512 may be equal. `i1` is direct: it counts to 64, all else moves the address in steps of
# 64, so two columns never meet.

# %%
def is_direct(store: Value, variable: Symbol) -> bool:
    """True if different values of `variable` can never store to the same element."""
    step = coefficient(store.index, variable)
    if not isinstance(step, int) or step == 0 or not isinstance(variable.size, int):
        return False
    spread = 0
    index = store.index
    for term, c in index.terms.items():
        if term == (variable,) or c % (step * variable.size) == 0:
            continue
        high = bounds(Expr({term: abs(c)}, 0))[1]
        if high is None:
            return False
        spread += high
    return spread < abs(step)


def direct_variable(e: Emitter, candidates: tuple[Symbol, ...]) -> Symbol | None:
    atomics = [s for s in e.graph.stores if s.mode == "atomic_add"]
    return next((v for v in reversed(candidates) if all(is_direct(s, v) for s in atomics)), None)


class Count(NamedTuple):
    """A loop: `name` counts from 0 to `size`."""

    name: str
    size: Int
    step: int | str = 1

    @property
    def header(self) -> str:
        return for_(self.name, size_text(self.size), step=self.step)


def shared(e: Emitter, work: Int, loops: list[Count], collapse: int | None = None) -> list[str]:
    """The headers of perfectly nested loops. The threads share the first `collapse` (by default all), unless the work is
    certainly too small; an emitter of a part has them from `begin` to `end`."""
    headers = [loop.header for loop in loops]
    if e.part and loops:
        e.window = loops[0].size, loops[0].step
        return [for_(loops[0].name, "end", "begin", loops[0].step), *headers[1:]]
    collapse = len(loops) if collapse is None else collapse
    return parallel_pragma(e, work, collapse) + headers if collapse else headers


def least_work(e: Emitter) -> int:
    """The number of elements from which threads are worth their start."""
    return PARALLEL_WORK // (1 + sum(v.op in HEAVY for v in e.graph.values))


def parallel_pragma(e: Emitter, work: Int, collapse: int) -> list[str]:
    """The directive in front of `collapse` perfectly nested loops, or nothing when the work is certainly too small. Where that is not
    known yet, the function asks (`for_threads`)."""
    limit = least_work(e) * (4 if e.threads == 1 else 1)
    if isinstance(work, int) and work < limit:
        return []
    together = f" collapse({collapse})" if collapse > 1 else ""
    if isinstance(work, int):
        return [f"#pragma omp parallel for{together} schedule(static)"]
    e.few = work, limit
    return [f"#pragma omp for{together} schedule(static) nowait"]

# %% [markdown]
# ## Blocks of lanes
#
# The *lane* is the variable of the innermost loop, the one that is vectorised. `lane_block` decides whether this
# loop has to be cut into blocks. It need not be, if the loops around it have iterations enough for all threads.
# Otherwise each thread should get a share, in multiples of 16 elements and not larger than `largest`.

# %%
def lane_block(e: Emitter, lane: Symbol, outer: tuple[Symbol, ...], largest: int) -> int | None:
    """How many lanes one block has; None when the lane loop need not be split."""
    if present(lane.size) <= largest and present(product(v.size for v in outer)) >= 8 * e.threads:
        return None
    if isinstance(lane.size, int):
        share = -(-lane.size // e.threads)
        return max(16, min(largest, -(-share // 16) * 16))
    return largest


def lane_headers(lane: Symbol, block: int | None) -> tuple[list[Count], list[str], Int, str]:
    """(the block loop, prologue inside it, the first value of the lane's variable in it, the text of the number of lanes)."""
    size = size_text(lane.size)
    if block is None:
        return [], [], 0, size
    prologue = [f"const int64_t count = {size} - lane0 < {block} ? {size} - lane0 : {block};"]
    return [Count("lane0", lane.size, block)], prologue, Symbol("lane0").expr, "count"
