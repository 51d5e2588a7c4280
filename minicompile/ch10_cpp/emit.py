# %% [markdown]
# # C++ for a fused kernel
#
# The generated function is a nest of plain `for` loops over raw pointers. There are no vector intrinsics in
# it: the compiler vectorises the innermost loop, and our part is to write a loop that it can. That means
# choosing the right variable for the innermost loop, keeping its body branch-free, and telling the compiler
# what it cannot know: `#pragma omp simd` says that no iteration reads what another wrote. (Not
# `__restrict__`: an output may share its memory with an input that dies here, element for element, and that
# pragma is true of such a loop while `__restrict__` is not.)
#
# The one decision that matters is the *lane*: the variable of the innermost loop.
#
# - *Pointwise*: the variable that most accesses move along contiguously.
# - *Reduction of rows* (softmax over the last dimension): the row's own variable. Each thread takes rows.
# - *Reduction of columns* (the gradient of a bias): the row's variable would jump from line to line of the
#   matrix. The lane is an output variable instead, with a small array of accumulators, one per output, and
#   the reduction runs outside of it.

# %%
import torch

from ..ch01_graphs.symbolic import Int, Symbol, coefficient, product, substitute, to_text
from ..ch07_loops.ir import Value, root_of
from ..ch08_fusion.kernel import Kernel, KernelList, KernelSource
from ..ch08_fusion.values import LinkedKernel, link, relink
from .lanes import TILE, close_lanes, half_blocks, interior, jumping, read_ahead, tabulate
from .nests import (SIMD, Count, Emitter, Scope, best_lane, child, close, direct_variable, for_, lane_block,
                    lane_headers, least_work, shared, size_text, store_lines, taken_off, unnamed, vote)
from .ops import BITS, HALVES, memory_type
from .columns import emit_reductions

# %% [markdown]
# ## Pointwise kernels
#
# The lane loop runs over blocks, so that threads have something to share even if there is only one dimension.
# A transposition is contiguous for one variable where it writes and for another where it reads, and neither
# order is good: each element read brings in a whole cache line of which 15 in 16 elements are needed much
# later. So the nest is *tiled*: it finishes squares small enough that their lines are still in the cache.

# %%
def crossing_variable(e: Emitter, lane: Symbol, outer: tuple[Symbol, ...]) -> Symbol | None:
    """The variable along which accesses that jump with the lane are contiguous."""
    indices = [v.index for v in e.graph.values if v.op == "load"] + [s.index for s in e.graph.stores]
    return next((o for o in reversed(outer) for index in indices
                 if coefficient(index, lane) not in (0, 1) and coefficient(index, o) == 1 and lane.size != 1),
                 None)


# %% [markdown]
# In `x + y.t()` one operand jumps. `crossing_variable` finds the variable along which such an access would be
# contiguous, and the nest is written in squares of `TILE` by twice that: two loops over squares, and inside of
# them the two variables. What jumps is first copied to a block (`read_ahead` in `lanes.py`).

# %%
def emit_tiled(e: Emitter, function: Scope, lane: Symbol, other: Symbol, outer: tuple[Symbol, ...]) -> None:
    """The pointwise nest in tiles of `other` x `lane`."""
    rest = tuple(v for v in outer if v is not other)
    rows = child(function, ())
    nest = child(rows, outer)
    inner = child(nest, (lane,))
    tabulate(e, function, nest, lane, outer)
    read_ahead(e, rows, jumping(e, e.graph.values, lane, other), lane, Symbol("lane0").expr, "count", other, ("tile0", "tile1"))
    store_lines(e, e.graph.stores, inner)
    close(inner, [SIMD, for_("lane", "count")], [f"const int64_t {lane.name} = lane0 + lane;"])
    size, width = size_text(other.size), size_text(lane.size)
    loops = [Count(v.name, v.size) for v in rest]
    loops += [Count("tile0", other.size, TILE), Count("lane0", lane.size, 2 * TILE)]
    rows.lines[:0] = [f"const int64_t count = {width} - lane0 < {2 * TILE} ? {width} - lane0 : {2 * TILE};",
                      f"const int64_t tile1 = {size} - tile0 < {TILE} ? {size} : tile0 + {TILE};"]
    close(nest, [for_(other.name, "tile1", "tile0")])
    close(rows, shared(e, product(v.size for v in (*outer, lane)), loops))


# %% [markdown]
# The general case is a nest with the lane innermost: `#pragma omp simd` on it, and `#pragma omp parallel for` on
# the loops around it. Atomic additions, as in a scatter, are the exception. Two lanes may add to one address, so
# their loop is not vectorised, and the threads are given parts of a variable that leads to different addresses, if
# there is one (`direct_variable`). If it moves along rows, as the columns of an embedding do, it is the lane.

# %%
def emit_pointwise(e: Emitter, function: Scope, variables: tuple[Symbol, ...]) -> None:
    """All loops of a kernel without reductions, as one loop nest."""
    stores, atomic = e.graph.stores, any(s.mode == "atomic_add" for s in e.graph.stores)
    direct = direct_variable(e, variables) if atomic else None
    lane = direct if direct is not None and vote(e, direct) > 0 else best_lane(e, variables)[0]
    if lane is None:
        store_lines(e, stores, function)
        return
    outer = tuple(v for v in variables if v is not lane)
    other = None if atomic else crossing_variable(e, lane, outer)
    if other is not None:
        return emit_tiled(e, function, lane, other, outer)
    block = lane_block(e, lane, outer, 4096)
    if atomic and direct is lane:
        block = lane_block(e, lane, (), 1 << 20)
    elif atomic:
        block = None
        outer = tuple(sorted(outer, key=lambda v: v is not direct))
    blocks, prologue, first, count = lane_headers(lane, block)
    loops = [Count(v.name, v.size) for v in outer]
    work = product(v.size for v in variables)
    nest = child(function, outer)
    inner = child(child(nest, ()), (lane,))
    tabulate(e, function, nest, lane, outer)
    e.interior = interior(e, function, nest, lane, outer) if block is None and not atomic else None
    for value in e.interior.inside if e.interior else ():
        if value in nest.names:
            nest.names[value] = f"(inside ? {e.interior.inside[value]} : {nest.names[value]})"
    halves = half_blocks(e, inner.parent, () if atomic or e.interior else (*unnamed(stores, nest), *stores), lane,
                         pad=block is None and not (atomic or e.interior))
    store_lines(e, stores, inner)
    close_lanes(e, inner, [] if atomic and direct is not lane else [SIMD], lane, first, count, halves)
    if not atomic:
        close(nest, shared(e, work, loops + blocks), prologue)
    elif direct is lane:
        close(nest, shared(e, work, blocks + loops, 1), prologue)
    else:
        close(nest, shared(e, work, loops, int(direct is not None and bool(loops))))

# %% [markdown]
# ## What is only moved
#
# A copy, a transposition, a `cat`, a padding, a `where` compute nothing. Their half numbers need not become floats and be
# rounded again, which takes up to ten times as long as to move them. Nor need those of `neg` and `abs`, which change one bit.
# `moved_as_bits` finds the stores of half numbers behind which there is nothing but loads, choices, signs and constants, and makes
# these values once more, of the dtype `BITS`. Nothing else then asks for the floats, unless something computes with them as well.
# bfloat16 numbers that are read across rows and written along them are better off as floats: g++ makes vectors of 16 lanes then,
# and not of 32, and a transposition takes two thirds of the time.

# %%
SIGN_BITS = {"neg": ("bitwise_xor", 0x8000), "abs": ("bitwise_and", 0x7fff)}


def moved_as_bits(g: LinkedKernel) -> LinkedKernel:
    """The graph in which half numbers that are only moved are bits."""
    moves: dict[Value, set] = {}            # value -> the half types in which it may be moved
    for v in g.values:
        if v.op == "load" and v.dtype in HALVES:
            moves[v] = {v.dtype}
        elif v.op == "constant" and v.dtype == torch.float32:
            moves[v] = set(HALVES)
        elif v.op in ("to_dtype", "where", *SIGN_BITS) and v.dtype == torch.float32:
            moves[v] = set(HALVES).intersection(*(moves.get(a, ()) for a in v.args[-2:]))
    moved: dict[Value, set] = {}            # value -> those in which it is
    for v in reversed(g.steps):
        if v.op == "store" and v.mode is None:
            half = g.kernel.buffers[v.buffer].dtype
            moved[v] = {half}.intersection(moves.get(v.value, ()))
        for a in (v.value,) if v.op == "store" else v.args[-2:] if v.op in ("to_dtype", "where", *SIGN_BITS) else ():
            moved[a] = moved.get(a, set()) | moved.get(v, set())
    if not any(moved.values()):
        return g
    bits = {}

    def step(new: LinkedKernel, value: Value, args: tuple) -> Value:
        for half in moved.get(value, ()):
            if value.op == "store":
                return new.again(value, (*args[:3], bits[value.value, half], args[4]))
            bits[value, half] = as_bits(new, value, args, half, [bits.get((a, half)) for a in value.args[-2:]])
        return new.again(value, args)

    return relink(g, step)


def as_bits(g: LinkedKernel, value: Value, args: tuple, half: torch.dtype, moved: list) -> Value:
    """`value` as a number of `half` in memory. moved: the last two arguments so."""
    if value.op == "to_dtype":
        return moved[-1]
    if value.op in SIGN_BITS:
        op, bits = SIGN_BITS[value.op]
        return g.make(op, (moved[-1], g.make("constant", (bits,), BITS)), BITS)
    if value.op == "constant":
        return g.make("constant", (torch.tensor(value.constant, dtype=half).view(torch.int16).item() & 0xffff,), BITS)
    return g.make(value.op, args if value.op == "load" else (args[0], *moved), BITS)

# %% [markdown]
# ## Dividing by a sum
#
# A softmax divides each exponential by their sum. A division takes as long as twenty other instructions, so `by_reciprocals` computes
# one for a row, and multiplies by it: a softmax takes a quarter less. It may be off by one place more than the quotient, and the
# exponential is so itself. The largest number of the row has the exponential 1, and equal ones the same, for which the two agree; and the
# sum, which is at least 1, has a reciprocal that is neither infinite nor subnormal.

# %%
def by_reciprocals(g: LinkedKernel) -> LinkedKernel:
    """The graph in which exponentials of what is less than its own maximum are multiplied by the reciprocal of their sum."""
    def of_softmax(value: Value) -> bool:
        x, total = value.args if value.op == "truediv" and value.dtype == torch.float32 else (value, value)
        return total.op == "reduce" and total.args[:2] == ("sum", x) and x.op == "exp" and x.args[0].op == "sub" and \
            x.args[0].args[1].op == "reduce" and x.args[0].args[1].args[:2] == ("max", x.args[0].args[0])

    def step(new: LinkedKernel, value: Value, args: tuple) -> Value:
        if of_softmax(value):
            return new.make("mul", (args[0], new.make("reciprocal", args[1:], value.dtype)), value.dtype)
        return new.again(value, args)

    return relink(g, step) if any(map(of_softmax, g.values)) else g

# %% [markdown]
# ## The function
#
# `emit_cpp` puts the nest into a function of a fixed signature: pointers to tensors, sizes, and a place to report a bad index. At its
# beginning each pointer and each size gets its name.

# %%
def emit_cpp(kernel: Kernel) -> KernelSource:
    """C++ source of `kernel`: `extern "C" void NAME(void** pointers, const int64_t* sizes, mc_problem*
    problem)`. Raises Unsupported for dtypes, operations or shapes of kernel that this backend has no code
    for."""
    if isinstance(kernel, KernelList):
        return emit_list(kernel)
    e, function = emitted(kernel, threads=torch.get_num_threads())
    lines = pointer_lines(e, [f"pointers[{k}]" for k in range(len(kernel.tensors))])
    lines += [number_line(s, f"sizes[{i}]") for i, s in enumerate(kernel.symbols)]
    lines += function.lines
    return source_of(kernel, for_threads(e, lines) if e.few else lines, product(v.size for v in kernel.vars + kernel.reduction_vars))


# %% [markdown]
# To begin a parallel region takes a third of a microsecond, also if its `if` clause says that one thread is enough: as long as a small
# kernel and its call. So where sizes vary, the nest is a function, which is called by a team of threads, or without one
# (`omp_in_parallel`: if Python itself runs in a region of somebody's, the loop would be shared among its threads). In 256 rows of 64
# numbers, whose first is a size that varies, the sum of each is
#
#     extern "C" void KERNEL(void** pointers, const int64_t* sizes, mc_problem* problem) {
#       struct nest {
#         static __attribute__((noinline)) void run(void** pointers, const int64_t* sizes, mc_problem* problem) {
#           ...
#           #pragma omp for schedule(static) nowait
#           for (int64_t i0 = 0; i0 < s0; i0 += 1) { ... }
#         }
#       };
#       if (64*sizes[0] < 32768) return nest::run(pointers, sizes, problem);
#       #pragma omp parallel
#       nest::run(pointers, sizes, problem);
#     }

# %%
def for_threads(e: Emitter, lines: list[str]) -> list[str]:
    """The body of a kernel whose nest, in these lines, is for a team of threads if there is enough work."""
    work, limit = e.few
    places = {s: f"sizes[{i}]" for i, s in enumerate(e.kernel.symbols)}
    amount = to_text(work, places.get, "/", truncates=True)
    return ["struct nest {", "  static __attribute__((noinline)) void run(void** pointers, const int64_t* sizes, mc_problem* problem) {",
            *("    " + line for line in lines), "  }", "};",
            f"if ({amount} < {limit} && !omp_in_parallel()) return nest::run(pointers, sizes, problem);",
            "#pragma omp parallel", "nest::run(pointers, sizes, problem);"]


SMALL = 4096                 # elements for which the launcher keeps Python's lock


def source_of(kernel: Kernel, lines: list[str], work: Int) -> KernelSource:
    head = f'extern "C" void {kernel.name}(void** pointers, const int64_t* sizes, mc_problem* problem) {{'
    text, loops = taken_off("\n".join([head, *("  " + line for line in lines), "}", ""]))
    options = {"tensors": len(kernel.tensors), "sizes": len(kernel.symbols), "small": isinstance(work, int) and work <= SMALL}
    return KernelSource(kernel.name, "cpp", text, options, loops)


# %% [markdown]
# `emitted` chooses between the two kinds of nests.

# %%
def emitted(kernel: Kernel, **options) -> tuple[Emitter, Scope]:
    """The nest of a kernel, in the scope of its function. options: for the `Emitter`."""
    pointers = {name: f"in{i}" for i, name in enumerate(kernel.inputs)}
    written = {}                # memory -> its pointer: g++ makes vectors of stores side by side if they go through one
    for i, name in enumerate(kernel.outputs):
        pointers.setdefault(name, written.setdefault(root_of(kernel.buffers, name), f"out{i}"))
    pairs = len(written) < len(kernel.outputs)
    e = Emitter(moved_as_bits(by_reciprocals(link(kernel))), pointers=pointers, pairs=pairs, **options)
    function = Scope(frozenset())
    if pairs:
        function.lines.append('float one = 1; asm("" : "+m"(one));')
    if e.graph.reductions:
        emit_reductions(e, function)
    else:
        emit_pointwise(e, function, kernel.vars + kernel.reduction_vars)
    return e, function


def pointer_lines(e: Emitter, places: list[str]) -> list[str]:
    """The declaration of each pointer. places: where the addresses of the kernel's tensors are."""
    lines = {}
    for name, place in zip(e.kernel.tensors, places):
        t = ("" if name in e.kernel.outputs else "const ") + memory_type(e.kernel.buffers[name].dtype)
        lines.setdefault(e.pointers[name], f"{t}* {e.pointers[name]} = ({t}*){place};")
    return list(lines.values())


def number_line(s: Symbol, where: str) -> str:
    return f"const double {s.name} = mc_bits<double>({where});" if s.real else f"const int64_t {s.name} = {where};"

# %% [markdown]
# ## A list of kernels
#
# Each body of a list (chapter 8, `lists.py`) is a function for a part of its nest, from `begin` to `end` of its
# outermost loop. The kernel itself is one parallel loop over blocks of all pieces: `mc_piece` finds the piece of a block by
# bisection, and the piece's row of the table says which pointers and numbers are its own. A block has `GRAIN`
# elements, so a large tensor becomes many blocks, and the threads have equal shares whatever the sizes are. Where pieces
# reduce, a whole row is in one block, rows differ, and threads take the next block when they are done with one.

# %%
GRAIN = 4096


def emit_list(kernel: KernelList) -> KernelSource:
    """C++ source of a list; it is called like any other kernel."""
    places = {id(loop): k for k, loop in enumerate(kernel.loops)}
    numbers = {s: f"sizes[{i}]" for i, s in enumerate(kernel.symbols)}
    functions, emitters = [], []
    for b, body in enumerate(kernel.bodies):
        e, function = emitted(body, threads=1, part=True)
        first = next(p for p in kernel.pieces if p.body == b)
        e.position.update((id(own), places[id(loop)]) for own, loop in zip(body.loops, first.kernel.loops))
        emitters.append(e)
        count, own = len(body.tensors), len(first.parameters)
        lines = pointer_lines(e, [f"pointers[row[{k}]]" for k in range(count)])
        lines += [number_line(s, f"row[{count + k}]" if k < own else numbers[s]) for k, s in enumerate(body.symbols)]
        functions += [f"static void run{b}(void** pointers, const int64_t* sizes, const int64_t* row,",
                      "                 int64_t begin, int64_t end, mc_problem* problem) {",
                      *("  " + line for line in lines + function.lines), "}"]
    rows, table, total = [], [], 0
    for piece in kernel.pieces:
        e, values = emitters[piece.body], dict(zip(kernel.bodies[piece.body].symbols, piece.parameters))
        end, step = substitute(e.window[0], values), e.window[1]
        work = substitute(product(v.size for v in e.kernel.vars + e.kernel.reduction_vars), values)
        length = -(-GRAIN * end // work)
        table.append((piece.body, len(rows), end, -(-length // step) * step))
        rows += [*piece.tensors, *piece.parameters]
        total += work

    def array(name: str, values) -> str:
        return f"static const int64_t {name}[] = {{{', '.join(map(str, values))}}};"

    few = total < min(map(least_work, emitters)) * (4 if torch.get_num_threads() == 1 else 1)
    schedule = "dynamic" if any(e.graph.reductions for e in emitters) else "static"
    pieces = len(kernel.pieces)
    lines = [
        "struct body {", *("  " + line for line in functions), "};", array("rows", rows),
        *(array(name, column) for name, column in zip(("body_of", "row_of", "end_of", "length_of"), zip(*table))),
        f"int64_t first[{pieces + 1}];", f"const int64_t blocks = mc_blocks({pieces}, end_of, length_of, first);",
        *([] if few else [f"#pragma omp parallel for schedule({schedule})"]), for_("block", "blocks") + " {",
        f"  const int64_t piece = mc_piece({pieces}, first, block), length = length_of[piece];",
        "  const int64_t begin = (block - first[piece]) * length, rest = end_of[piece] - begin;",
        "  const int64_t end = begin + (rest < length ? rest : length);", "  switch (body_of[piece]) {",
        *(f"    case {b}: body::run{b}(pointers, sizes, rows + row_of[piece], begin, end, problem); break;"
          for b in range(len(emitters))), "  }", "}"]
    return source_of(kernel, lines, total)
