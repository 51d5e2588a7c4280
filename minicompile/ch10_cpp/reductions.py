# %% [markdown]
# # Reductions in C++
#
# A sum in a plain loop is a chain: each addition waits for the last, and floating-point addition may not be
# reordered, so the compiler leaves it scalar. `#pragma omp simd reduction(+:s)` permits one partial sum per
# vector lane. That is fast, and also more accurate, for the same reason that pairwise summation is: each
# partial sum is shorter. But one vector of partial sums is a chain as well, of additions that take four cycles each, while the
# processor could begin two in a cycle. So long rows have 32 partial sums (`PARTIAL_SUMS`), which are several vectors. Rows longer
# than 1,024 are summed in chunks of that length, whose sums are added up in double.
#
# What OpenMP does not know (Welford's variance, the position of a maximum) works on
# chunks as well: the values of a chunk go to a small array that stays in the L1 cache, simple vectorised
# loops reduce it, and the chunk's result is merged into the row's. For a row of which `n` elements with the mean `m` and the sum of
# squared distances `q` have been seen, and a chunk of `nc` elements with `mc` and `qc`, that is
#
#     d = mc - m          m = m + d * nc / (n + nc)          q = q + qc + d * d * n * nc / (n + nc)
#
# These merging steps are C++, in `reductions.h`.

# %%
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Iterable, Sequence

import torch

from ..ch01_graphs.layouts import contiguous_strides
from ..ch01_graphs.symbolic import Int, Symbol, as_expr, present, product, substitute, symbols, to_text
from ..ch07_loops.builder import compute_dtype
from ..ch07_loops.ir import Value, behind, identity, in_order
from ..ch07_loops.lazy import linear
from ..ch07_loops.pointwise import HEAVY
from ..ch08_fusion.values import elements
from ..errors import Unsupported
from .lanes import (BYTES, STEP, TILE, WIDE, close_lanes, convert_halves, ends_ragged, half_blocks, inlined, jumping, read_ahead, room,
                    side_by_side, tabulate, worth_a_table)
from .nests import (SIMD, Count, Emitter, Scope, along_lane, best_lane, child, close, compute, direct_variable, for_, fresh, get,
                    index_text, lane_block, lane_headers, of_loop, shared, size_text, store_lines, unnamed)
from .ops import HALVES, literal, memory_type, register_type

CHUNK = 1024                 # elements of a row between two merges
SCRATCH = 1 << 18            # bytes of a row's expensive values that are kept rather than computed again
NARROW = 64                  # the fewest columns of a block for which expensive values are kept
PARTIAL_SUMS = 32            # partial sums of a long row
FLUSH = 64                   # column sums: rows between two flushes into double
CHUNKED = ("welford", "argmax", "argmin")       # reductions that take a chunk of a row from an array

# %% [markdown]
# ## The kinds
#
# `OPERATOR` is the step of a simple reduction. `max` and `min` propagate NaN, like torch: a NaN that has been
# accumulated stays.

# %%
OPERATOR = {"sum": "+", "prod": "*", "any": "|"}


def start_text(kind: str, dtype: torch.dtype) -> str:
    """The value that an accumulator starts with, in C++."""
    return literal(identity(kind, dtype), dtype)


def accumulator_type(value: Value) -> torch.dtype:
    kind, source, _ = value.args
    dtype = source.dtype if kind in ("argmax", "argmin") else value.dtype
    return compute_dtype(dtype)


def unknown(r: Value) -> Unsupported:
    return Unsupported(f"the C++ backend has no reduction {r.args[0]!r}", r.loop.location)

# %% [markdown]
# ## Passes
#
# Reductions of equal phase share a pass over the row. Stores of elements wait for the last pass, so that no
# pass reads an input that an output has already overwritten.

# %%
def emit_reductions(e: Emitter, function: Scope) -> None:
    """All loops of a kernel with reductions: the lane is a row's own variable, or goes across the rows, of which those of an embedding
    are summed like this. What then is loaded once for all lanes, as their indices, does not speak for walking along the rows. Of short
    rows each vector does more if it goes across them (`ragged`). Where both are as good, as of `x + y.t()`, columns can read ahead."""
    kernel = e.kernel
    column_lane, column_vote = best_lane(e, kernel.vars)
    row_lane, row_vote = best_lane(e, kernel.reduction_vars, column_lane)
    length = product(v.size for v in kernel.reduction_vars)
    short = isinstance(length, int) and length <= 32 and column_lane is not None
    tie = column_lane is not None and column_vote == row_vote and present(column_lane.size) >= STEP and along_columns(e, column_lane)
    if column_lane is not None and column_vote > row_vote or tie or short and (column_vote > 0 or ragged(e, length, row_lane, column_lane)):
        emit_columns(e, function, column_lane)
    else:
        emit_rows(e, function, row_lane)


# %% [markdown]
# Of a row of 21 floats, such as the scores of the classes of a pixel, two vectors of eight take 16, and the other five are computed one
# by one, each with an exponential of its own. Lanes across the rows leave nothing over. Then each load and store jumps, which costs as
# much as a few additions: for sums of floats, rows stay rows, and so they do for integers (`of_integers`). A softmax over 7, 10 or 19
# classes takes a fifth to a half of the time, and less of halves, which are converted sixteen at a time.
# Their sums, too, stay rows where the last step of a row has all lanes (`lanes.py`), and, longer than a step, where masks or bytes are
# converted next to them; but only if all that they read and write lies side by side along the row. An RMS norm of 24 halves takes a third
# of the time that way. (With lanes along the row, a masked mean of 12 halves, whose count of integers has no such last step, took 1.5
# times as long, and a sum of 15 halves that a table chooses twice.)

# %%
def ragged(e: Emitter, length: int, along: Symbol, across: Symbol) -> bool:
    """Do rows of this length leave so much work to scalars that lanes `across` them are better, though each load jumps?"""
    if present(across.size) < STEP:
        return False
    more = any(v.op in HEAVY for v in e.graph.values) or compares(e.graph.reductions) and not of_integers(e.graph.reductions)
    loads = [v for v in e.graph.values if v.op == "load"]
    if any(v.dtype in HALVES for v in loads):
        accesses = [*(v for v in loads if along in v.dims), *filter(e.graph.is_element, e.graph.stores)]
        beside = all(side_by_side(e, v, along) for v in accesses)
        whole = ends_ragged(along, e.graph.values) or WIDE and length > STEP and any(v.dtype in BYTES for v in loads)
        rows = length > STEP // 2 and beside and whole
        return length % STEP != 0 and (more or not rows)
    return length % (STEP // 2) != 0 and more


def compares(reductions: list[Value]) -> bool:
    return any(r.args[0] not in ("sum", "prod") for r in reductions)


def passes(e: Emitter) -> list[tuple[list[Value], list[Value]]]:
    """(reductions, element stores) of each pass."""
    reductions, stores = e.graph.reductions, [s for s in e.graph.stores if e.graph.is_element(s)]
    last = max([r.phase - 1 for r in reductions] + [s.phase for s in stores])
    plan = [([r for r in reductions if r.phase - 1 == p], stores if p == last else [])
            for p in range(last + 1)]
    return [step for step in plan if any(step)]

# %% [markdown]
# ## Rows
#
# The lane is the row's own variable. A value that is expensive (an `exp`, an `erf`, a load whose elements lie apart along the
# row) and used in two passes is kept in an array as long as the row; everything else is computed again from its loads, which are in the
# cache by then.
#
# `passes` (above) has divided the work: each pass walks along the row once, computes some reductions, and stores
# what is known by then. A softmax has three, for the maximum, the sum, and the quotients. (Chapter 9 finds maximum and sum in one walk,
# at the price of computing each exponential again. Here that is what takes time.) `needed_again` are the values worth an array: they are
# expensive, and a later pass needs them again. The second walk of a softmax puts its exponentials there, and the third divides them.

# %%
def needed_again(e: Emitter, plan: list[tuple[list[Value], list[Value]]], lane: Symbol) -> list[Value]:
    """The expensive values that more than one pass needs: also what lies apart along the lane, and is loaded one by one."""
    def expensive(v: Value) -> bool:
        return v.op in HEAVY or v.op == "load" and along_lane(e, v.index, lane) not in (-1, 0, 1)

    uses = [elements(e.graph, reductions + stores) for reductions, stores in plan]
    return sorted({v for i, used in enumerate(uses) for v in used if expensive(v) and any(v in later for later in uses[i + 1:])},
                  key=in_order)


def emit_rows(e: Emitter, function: Scope, lane: Symbol) -> None:
    kernel = e.kernel
    atomic = any(s.mode == "atomic_add" for s in e.graph.stores)
    direct = direct_variable(e, kernel.vars) if atomic else None
    outer = tuple(sorted(kernel.vars, key=lambda v: v is not direct)) if atomic else kernel.vars
    nest = child(function, outer) if outer else function
    if outer:
        tabulate(e, function, nest, lane, outer)
    plan, kept = passes(e), {}
    if isinstance(lane.size, int) and len(kernel.reduction_vars) == 1:
        twice = needed_again(e, plan, lane)
        most = SCRATCH // (lane.size * max((v.dtype.itemsize for v in twice), default=1))
        kept = dict.fromkeys(twice[:most])
    for reductions, stores in plan:
        _row_pass(e, nest, lane, reductions, stores, kept)
    store_lines(e, [s for s in e.graph.stores if not e.graph.is_element(s)], nest)
    work = product(v.size for v in kernel.vars + kernel.reduction_vars)
    loops = [Count(v.name, v.size) for v in outer]
    if loops:
        close(nest, shared(e, work, loops, None if not atomic else int(direct is not None)))


# %% [markdown]
# The row is walked in chunks. Inside of a chunk the compiler vectorises the loop, and keeps the sum of a chunk in
# several partial sums, one for each element of a vector. After the chunk these go into the row's accumulator,
# which for a float sum of several chunks is a double. So a `RowStep` has text for five places: before the row, before a chunk, for
# an element, after a chunk, and the result.

# %%
@dataclass(eq=False)
class RowStep:
    """What one reduction adds to a row pass: declarations before the row and before a chunk, the statement
    per element, statements after a chunk, clauses of the simd loop, the text of the result or results, and statements after the row
    and after a step of lanes."""

    row: str
    chunk: str
    element: str
    after: list[str]
    clauses: str
    result: str | tuple[str, ...]
    end: Sequence[str] = ()
    behind: Sequence[str] = ()


# %% [markdown]
# `_row_pass` puts the pieces in their places. `nest` is the code of one row, `chunk` that of one chunk, `inner` the
# lane loop. If more than one dimension is folded, `middle` is the loop over the others, around the chunks. First
# `compute` writes what the reductions need into `inner`. Then each reduction says, as a `RowStep`, which lines it wants
# in which of these places, and they are put there from the inside to the outside: `close` ends a scope with the head of
# its loop, and its lines become lines of the scope around it.
#
# Two details. `kept` are values that a later pass over the same row will want again: each gets an array of the row's
# length. And a row that is no longer than a chunk needs no loop over chunks; `chunk` is then the constant 0, which
# leaves one form for the rest of the text.

# %%
def _row_pass(e: Emitter, nest: Scope, lane: Symbol, reductions, stores, kept: dict) -> None:
    others = tuple(v for v in e.kernel.reduction_vars if v is not lane)
    middle = child(nest, others)
    chunk = child(middle, ())
    inner = child(child(chunk, ()), (lane,))
    collide = any(s.mode == "atomic_add" for s in stores) and direct_variable(e, (lane,)) is None
    accesses = () if collide else dict.fromkeys([*unnamed(reductions + stores, middle), *stores])
    counts = any(r.args[0] == "sum" and width_behind(added_up(r)) <= 4 for r in reductions)
    pad = not collide and not (others and any(r.args[0] in CHUNKED for r in reductions))
    halves = half_blocks(e, inner.parent, accesses, lane, counts, pad)
    width = STEP if halves else 0 if collide else step_width(e, reductions, stores, lane)
    compute(e, reductions, inner)
    for value, array in kept.items():
        name = inner.names.get(value)
        if array is None and name is not None:
            kept[value] = array = fresh(e, "kept")
            nest.lines += of_loop(e, value.loop, f"{register_type(value.dtype)} {array}[{room(lane.size)}];")
            inner.lines += of_loop(e, value.loop, f"{array}[{lane.name}] = {name};")
    integers = of_integers(reductions) and not (stores or width)
    few = integers and not others and isinstance(lane.size, int) and lane.size < 2 * STEP
    steps = [_position_step(e, r, get(e, r.args[1], inner)) if few and r.args[0] in ("argmax", "argmin") else
             _row_step(e, r, _taken(e, r, inner), lane, bool(stores)) for r in reductions]
    steps = [_in_steps(s, width) if width else s for s in steps]
    marked = [(s, partial(of_loop, e, r.loop)) for r, s in zip(reductions, steps)]
    inner.lines += [line for s, mark in marked for line in mark(s.element)]
    if stores:
        store_lines(e, stores, inner)
    for value, array in kept.items():      # later passes read the array
        if array is not None:
            nest.names.setdefault(value, f"{array}[{lane.name}]")
    size = size_text(lane.size)
    if isinstance(lane.size, int) and lane.size <= CHUNK:
        chunks, count = [""], size
        chunk.lines.append("const int64_t chunk = 0;")
    else:
        chunks = [for_("chunk", size, step=CHUNK)]
        count = f"{size} - chunk < {CHUNK} ? {size} - chunk : {CHUNK}"
    chunk.lines += [f"const int64_t count = {count};", *(line for s, mark in marked if s.chunk for line in mark(s.chunk))]
    pragma = [] if collide or integers else [SIMD + "".join(s.clauses for s in steps)]
    behind = [line for s, mark in marked if s.behind for line in mark(*s.behind)]
    close_lanes(e, inner, pragma, lane, Symbol("chunk").expr, "count", halves, width, behind)
    chunk.lines += [line for s, mark in marked for line in mark(*s.after)]
    close(chunk, chunks)
    nest.lines += [line for s, mark in marked for line in mark(s.row)]
    close(middle, [for_(v.name, size_text(v.size)) for v in others])
    nest.lines += [line for s, mark in marked for line in mark(*s.end)]
    for r, step in zip(reductions, steps):
        nest.names[r] = _named_results(e, r, step.result, nest)


def _taken(e: Emitter, r: Value, scope: Scope) -> str:
    """What a reduction takes from a lane: its identity, if the step has more lanes than there are numbers and this is one too many."""
    source, x = added_up(r), get(e, added_up(r), scope)
    if not e.padded or r.args[0] in CHUNKED:
        return x
    declared = f"alignas(64) int32_t there[{STEP}]; mc_there(there, steps);"
    if declared not in scope.parent.lines:
        scope.parent.lines.append(declared)
    name, nothing = fresh(e, "x"), literal(identity(r.args[0], source.dtype), source.dtype)
    scope.lines += of_loop(e, r.loop, f"const {register_type(source.dtype)} {name} = steps == {STEP} || there[step] ? {x} : {nothing};")
    return name


def _named_results(e: Emitter, r: Value, result, nest: Scope):
    """Bind each result of a finished row reduction to a constant, so that the loops that follow do not
    evaluate it again."""
    if isinstance(result, tuple):
        return tuple(_named_results(e, r, part, nest) for part in result)
    name = fresh(e, "v")
    nest.lines += of_loop(e, r.loop, f"const {register_type(r.dtype)} {name} = {result};")
    return name

# %% [markdown]
# An accumulator of another width than what it takes costs conversions at each element, which are most of the work where elements are
# bytes. So what notes whether a condition held is as wide as the numbers that are compared (`width_behind`), and conditions and
# integers of at most 16 bits, whose sum over a chunk has less than 32, are added up in an `int32_t` there (`added_up`).

# %%
def width_behind(value: Value) -> int:
    """The bytes of a number, in registers; of a condition those of the numbers that decide it."""
    def decided(v: Value) -> bool:
        return v.dtype is torch.bool and v.op != "load"
    steps = [value, *behind([value], decided)] if decided(value) else []
    numbers = [o for v in steps for o in v.operands if not decided(o)] or [value]
    return max(4 if v.dtype in HALVES else v.dtype.itemsize for v in numbers)


def added_up(r: Value) -> Value:
    """What is added up in a chunk: of a conversion to int64 its operand, if 32 bits suffice."""
    kind, source, _ = r.args
    given = source.args[0] if kind == "sum" and source.op == "to_dtype" and source.dtype is torch.int64 else source
    small = not given.dtype.is_floating_point and given.dtype.itemsize <= 2 and width_behind(given) <= 4
    return given if small else source


# %% [markdown]
# Each kind of reduction over a row, as a `RowStep`. In the texts, `n` is a number that makes names unique, and `x` what is `added_up`.
#
# A maximum takes more than one text. C++'s `>` is false for a NaN, so a second accumulator notes whether there was
# one, and the result is NaN then. For sums and products OpenMP's `reduction` clause does the work.

# %% tags=["exercise:row-bug"]
def _row_step(e: Emitter, r: Value, x: str, lane: Symbol, stores: bool) -> RowStep:
    kind = r.args[0]
    if kind in CHUNKED:
        return _chunked_step(e, r, x, lane, stores)
    dtype = accumulator_type(r)
    t, n, start = register_type(dtype), fresh(e, "_"), start_text(kind, dtype)
    acc, part, noted = f"acc{n}", f"part{n}", f"int{8 * width_behind(r.args[1])}_t"
    if kind in ("max", "min"):
        sign, t = ">" if kind == "max" else "<", "uint8_t" if dtype is torch.bool else t
        step = RowStep(f"{t} {acc} = {start};", f"{t} {part} = {start};",
                       f"{part} = {x} {sign} {part} ? {x} : {part};",
                       [f"{acc} = {part} {sign} {acc} ? {part} : {acc};"], f" reduction({kind}:{part})", acc)
        if dtype.is_floating_point:
            step.row += f" {noted} nan{n} = 0;"
            step.chunk += f" {noted} bad{n} = 0;"
            step.element += f" bad{n} |= {x} != {x};"
            step.after.append(f"nan{n} |= bad{n};")
            step.clauses += f" reduction(|:bad{n})"
            step.result = f"(nan{n} ? ({t})MC_NAN : {acc})"
        return step
    if kind not in OPERATOR:
        raise unknown(r)
    result, op, small = f"({register_type(r.dtype)}){acc}", OPERATOR[kind], "int32_t" if added_up(r) is not r.args[1] else t
    value = f"({small}){x}"
    if kind == "any":
        t, small, start, value, result = noted, noted, "0", f"({x} != 0)", f"({acc} != 0)"
    one_chunk = len(e.kernel.reduction_vars) == 1 and isinstance(lane.size, int) and lane.size <= CHUNK
    total = "double" if kind == "sum" and t == "float" and not one_chunk else t
    return RowStep(f"{total} {acc} = {start};", f"{small} {part} = {start};", f"{part} {op}= {value};",
                   [f"{acc} {op}= {part};"], f" reduction({op}:{part})", result)


# %% [markdown]
# A loop in steps (`close_lanes`) ends too soon for a `reduction` clause, which would fold the vector of partial sums
# after each step. So a step adds to an array of partial sums, as many as it has lanes, which are vectors in registers, and this array
# is folded when the chunk is done.
#
# A loop with halves is in steps of sixteen lanes anyway. Another one is made so, with `PARTIAL_SUMS` lanes, if its row is long and
# additions are what takes time: a sum of rows of a thousand floats takes two thirds as long. Next to an exponential they are done
# in its shadow, and it needs the registers.
#
# With AVX-512 the partial sums are one vector or two, or four in a row of 512 and more where sums are all that is made. g++ adds the lanes
# of a short row one by one, and each addition waits for the last, where halves of the vector are added in a quarter of the steps
# (`mc_fold`). So there short rows of floats are in steps as well, if these are whole: a sum of rows of 16 to 64 takes seven tenths of the
# time, a softmax eight tenths.
#
# Of a maximum g++ makes one instruction only where the numbers come from memory. The last operation behind them it does once more under
# the mask of the comparison, and each step waits for the mask of the last. So there a step puts its numbers into an array, and
# `mc_most_max` takes the larger ones (`behind`).

# %%
def step_width(e: Emitter, reductions: list[Value], stores: list[Value], lane: Symbol) -> int:
    """How many lanes a step of a pass without halves has; 0 for a loop without steps."""
    folded = any(r.args[0] not in CHUNKED for r in reductions)
    heavy = any(v.op in HEAVY for v in elements(e.graph, reductions + stores))
    if present(lane.size) < 4 * PARTIAL_SUMS:
        floats = any(r.args[0] == "sum" and accumulator_type(r) is torch.float32 for r in reductions)
        return STEP if WIDE and floats and isinstance(lane.size, int) and lane.size % STEP == 0 else 0
    only_sums = len(reductions) <= 2 and all(r.args[0] == "sum" and accumulator_type(r) is torch.float32 for r in reductions)
    more = WIDE and only_sums and present(lane.size) >= 16 * PARTIAL_SUMS
    return (1 + more) * PARTIAL_SUMS if folded and not heavy else 0


def _in_steps(step: RowStep, width: int) -> RowStep:
    """`step` for a lane loop that is cut into steps: each variable of its clauses is an array in the chunk."""
    starts = {name: (t, start) for t, name, start in re.findall(r"(\w+) (\w+) = ([^;]+);", step.chunk)}
    chunk, element, fold, sums, behind = step.chunk, step.element, "", [], []
    for op, part in re.findall(r"reduction\((\S+):(\w+)\)", step.clauses):
        t, start = starts[part]
        chunk += f" alignas(64) {t} {part}s[{width}]; {for_('k', width)} {part}s[k] = {start};"
        if WIDE and op in ("max", "min") and t == "float":
            x = re.match(rf"{part} = (.+?) [<>] {part} ", element)[1]
            chunk += f" alignas(64) float {part}x[{width}]; {for_('k', width)} {part}x[k] = {start};"
            element = f"{part}x[step] = {x};" + element[element.index(";") + 1:]
            behind.append(f"mc_most_{op}<{width}>(&{part}s[0], &{part}x[0]);")
        element = re.sub(rf"\b{part}\b", f"{part}s[step]", element)
        if op == "+" and t == "float":
            sums.append(f"{part} = mc_fold<{width}>({part}s);")
            continue
        each = f"{part}s[k]"
        fold += f" {part} = {each} {'>' if op == 'max' else '<'} {part} ? {each} : {part};" if op in ("max", "min") else \
            f" {part} {op}= {each};"
    if fold:
        fold = [SIMD + step.clauses, f"{for_('k', width)} {{{fold} }}"]
    return replace(step, chunk=chunk, element=element, after=[*sums, *fold, *step.after], clauses="", behind=behind)


# %% [markdown]
# For mean and variance and the position of a maximum there is no clause. There the values of a chunk go
# into a small array, and a function of `reductions.h` folds it into the row's result. (What lies in memory as it is needed is read there.)
# To merge two means takes as long as to compute one of 50 numbers. So a row of several dimensions, as the channels of a group are, is one
# chunk for all of them if it is no longer than one: a group norm of images of 7 by 7 takes half as long.

# %%
def _chunked_step(e: Emitter, r: Value, x: str, lane: Symbol, stores: bool) -> RowStep:
    """The kinds that OpenMP does not know: a chunk goes to an array, which a function merges into the row's
    result. One that lies in memory is read there, unless the pass `stores` elements, perhaps in their place."""
    kind, source, index = r.args
    t, n = register_type(accumulator_type(r)), fresh(e, "_")
    there = not stores and source.op == "load" and source.mask is None and memory_type(source.dtype) == t and \
        symbols(source.index).isdisjoint(e.graph.symbols) and along_lane(e, source.index, lane) == 1
    if kind == "welford":
        row = f"double mean{n} = 0, m2{n} = 0, count{n} = 0;"
        result = tuple(f"({t}){name}{n}" for name in ("mean", "m2", "count"))
        length = product(v.size for v in e.kernel.reduction_vars)
        if isinstance(length, int) and 0 < length <= CHUNK and not (there and len(e.kernel.reduction_vars) == 1):
            others = [v for v in e.kernel.reduction_vars if v is not lane]
            first = linear([v.expr for v in others], [lane.size * s for s in contiguous_strides([v.size for v in others])])
            array = f"alignas(64) {register_type(source.dtype)} t{n}[{room(length)}];"
            return RowStep(f"{row} {array}", "", f"t{n}[{to_text(as_expr(first))} + lane] = {x};", [], "", result,
                           [f"mc_row_welford(t{n}, {length}, mean{n}, m2{n}, count{n});"])
        after = [f"mc_row_welford(t{n}, count, mean{n}, m2{n}, count{n});"]
    else:
        largest = "true" if kind == "argmax" else "false"
        row = f"{t} best{n} = {start_text(kind, source.dtype)}; int64_t at{n} = -1;"
        after = [f"const {t} top{n} = mc_{'largest' if kind == 'argmax' else 'smallest'}(t{n}, count);",
                 f"if (mc_beats<{largest}>(top{n}, -1, best{n}, at{n})) {{",
                 f"  const int64_t {lane.name} = chunk + mc_find(t{n}, top{n});",
                 f"  const int64_t here = {size_text(index)};",
                 f"  if (mc_beats<{largest}>(top{n}, here, best{n}, at{n})) {{",
                 f"    best{n} = top{n};", f"    at{n} = here;", "  }", "}"]
        result = f"at{n}"
    if there:
        place = index_text(e, substitute(source.index, {lane: Symbol("chunk").expr}), Scope(frozenset()))
        return RowStep(row, f"const {t}* t{n} = &{e.pointers[source.buffer]}[{place}];", "", after, "", result)
    length = min(lane.size, CHUNK) if isinstance(lane.size, int) else CHUNK
    array = f"alignas(64) {register_type(source.dtype)} t{n}[{room(length)}];"
    return RowStep(row, array, f"t{n}[lane] = {x};", after, "", result)


# %% [markdown]
# Integers may be added up in any order, so g++ makes vectors of such a loop by itself. With a `reduction` clause it keeps partial sums in
# memory, and the largest of 17 int64 numbers takes three times as long. The position of the largest of a few integers is found by one
# walk over them, in a quarter of the time.

# %%
def of_integers(reductions: list[Value]) -> bool:
    return not any(accumulator_type(r).is_floating_point for r in reductions)


def _position_step(e: Emitter, r: Value, x: str) -> RowStep:
    """A position that each element may change, in a loop that does not become vectors."""
    kind, source, index = r.args
    t, n, largest = register_type(accumulator_type(r)), fresh(e, "_"), "true" if kind == "argmax" else "false"
    return RowStep(f"{t} best{n} = {start_text(kind, source.dtype)}; int64_t at{n} = 0;", "",
                   f"mc_column_extreme<{largest}, {t}>({x}, {size_text(index)}, best{n}, at{n});", [], "", f"at{n}")


# %% [markdown]
# ## Columns
#
# One accumulator per lane, in arrays. Every statement on them is a lane loop, so all kinds vectorise alike,
# including the position of a maximum. Values of the row's phase that the elements need, such as `rsqrt(var +
# eps)` per column, are computed once per column and kept in an array as well.
#
# What is expensive and needed by two passes is kept for all rows of the block, as with rows, and the block is so narrow that
# `SCRATCH` bytes hold it.
#
# g++ would do two rows at once, which is good for sums, and makes branches of what compares: the maxima of 7 columns took seven times
# as long. An empty `asm` in the loop over the rows keeps it from that.
#
# A sum over the *rows* of a matrix is laid out differently. The memory is contiguous along the columns, so the
# lanes are columns, and each lane has an accumulator of its own: an array `acc[lane]`, to which every row is
# added. Columns are divided among threads in blocks of at most 512, whose accumulators stay in the first-level
# cache.
#
# Of what is contiguous along the rows instead, as the gradient of an image in another layout than its own, the next `TILE` rows of a
# block are read ahead (`lanes.py`). A softmax over 256 channels whose image is channels-last, and the gradient not, takes a tenth of the
# time backward.

# %%
def along_columns(e: Emitter, lane: Symbol) -> list[Value]:
    """The loads that are contiguous along the columns, if these are long enough to read ahead in them."""
    last = e.kernel.reduction_vars[-1]
    return jumping(e, e.graph.values, lane, last) if present(last.size) >= TILE else []


def emit_columns(e: Emitter, function: Scope, lane: Symbol) -> None:
    kernel = e.kernel
    atomic = any(s.mode == "atomic_add" for s in e.graph.stores)
    outer = tuple(v for v in kernel.vars if v is not lane)
    length, plan, widest = product(v.size for v in kernel.reduction_vars), passes(e), 512
    twice = () if atomic or not isinstance(length, int) else needed_again(e, plan, lane)
    if twice:
        widest = min(widest, SCRATCH // (length * len(twice) * max(v.dtype.itemsize for v in twice)) // NARROW * NARROW)
    twice, widest = (twice, widest) if widest else ((), 512)
    last = kernel.reduction_vars[-1]
    apart = [] if atomic else along_columns(e, lane)
    widest = min(widest, 2 * TILE) if apart else widest
    block = lane_block(e, lane, outer, widest)
    blocks, prologue, first, count = lane_headers(lane, block)
    width = block if block is not None else lane.size
    nest = child(function, outer)
    row = linear([v.expr for v in kernel.reduction_vars], contiguous_strides([v.size for v in kernel.reduction_vars]))
    kept = {value: f"{fresh(e, 'kept')}[{width}*({to_text(as_expr(row))}) + lane]" for value in twice}

    def lanes(scope: Scope, lines: list[str]) -> None:
        """A loop over the lanes with these lines."""
        loop = child(child(scope, ()), (lane,))
        loop.lines += lines
        close_lanes(e, loop, [SIMD], lane, first, count, [])

    for reductions, stores in plan:
        both = reductions + stores
        ready = {o for s in (*both, *elements(e.graph, both)) for o in s.operands if not e.graph.is_element(o)
                 and lane in o.dims and (worth_a_table(o) or o.op == "indirect")}
        _materialise(e, nest, lane, sorted(ready, key=in_order), width, lanes)
        now = set(unnamed(both, nest))
        if not stores and now.isdisjoint([*kept, *apart]) and stays_in_registers(e, reductions, now, lane):
            _register_pass(e, nest, lane, reductions, (first, count, block), width, lanes)
            continue
        rows, ahead = child(nest, kernel.reduction_vars), child(nest, kernel.reduction_vars[:-1])
        read_ahead(e, ahead, [load for load in apart if load in now], lane, first, count, last, ("begin", "end"))
        inner = child(child(rows, ()), (lane,))
        halves = half_blocks(e, inner.parent, () if atomic else dict.fromkeys([*unnamed(both, nest), *stores]), lane)
        compute(e, both, inner)
        for value in [v for v in kept if v in inner.names]:
            place = kept.pop(value)
            nest.lines += of_loop(e, value.loop, f"{register_type(value.dtype)} {place.partition('[')[0]}[{length * width}];")
            inner.lines += of_loop(e, value.loop, f"{place} = {inner.names[value]};")
            nest.names[value] = place
        long = not (isinstance(length, int) and length <= FLUSH)
        steps = [_column_step(e, r, get(e, r.args[1], inner), long) for r in reductions]
        for r, step in zip(reductions, steps):
            inner.lines += of_loop(e, r.loop, *step.element)
            nest.lines += [f"alignas(64) {t} {name}[{width}];" for t, name, _ in step.state]
            nest.lines += step.counters
        if stores:
            store_lines(e, stores, inner)
        starts = [f"{name}[lane] = {start};" for step in steps for _, name, start in step.state]
        if starts:
            lanes(nest, starts)
        light = not any(v.op in HEAVY for v in elements(e.graph, both))
        rows.lines += ['asm("");'] * (not light or compares(reductions))
        rows.lines += [line for s in steps for line in s.each_row]
        close_lanes(e, inner, [] if any(s.mode == "atomic_add" for s in stores) else [SIMD], lane, first, count, halves)
        _flushed_rows(e, nest, rows, steps, lanes, TILE if ahead.lines else FLUSH * light, ahead)
        for r, step in zip(reductions, steps):
            nest.names[r] = step.result
    stores = [s for s in e.graph.stores if not e.graph.is_element(s)]
    if stores:
        final = child(child(nest, ()), (lane,))
        store_lines(e, stores, final)
        close_lanes(e, final, [] if atomic else [SIMD], lane, first, count, [])
    loops = [Count(v.name, v.size) for v in outer] + blocks
    work = product(v.size for v in kernel.vars + kernel.reduction_vars)
    close(nest, shared(e, work, loops, 0 if atomic else None) or [""], prologue)


# %% [markdown]
# An accumulator in an array costs a load and a store for each number. Where a pass only adds or compares, and has nothing to compute for
# a row, some `LANES` are therefore walked down `FLUSH` rows at once (down all rows, each would be in another page of memory). Their
# accumulators are `part`, an array of fixed length, which g++ keeps in registers, and go to the arrays behind these rows:
#
#     for (int64_t begin = 0; begin < 1000; begin += 64) {
#       const int64_t end = 1000 - begin < 64 ? 1000 : begin + 64;
#       const auto run = [=, &acc_2, &total_2](const int64_t at, const int64_t steps) __attribute__((always_inline)) {
#         alignas(64) float part3[64];
#         for (int64_t step = 0; step < steps; step += 1) part3[step] = 0;
#         for (int64_t r0 = begin; r0 < end; r0 += 1) {
#           for (int64_t step = 0; step < steps; step += 1) { ... part3[step] += v1; }
#         }
#         for (int64_t step = 0; step < steps; step += 1) { ... acc_2[lane] += part3[step]; total_2[lane] += acc_2[lane]; ... }
#       };
#       int64_t done = 0;
#       for (; done + 64 <= count; done += 64) run(done, 64);
#       if (done < count) run(done, 40);
#     }
#
# Sums of a thousand rows of a thousand floats take two thirds of the time, maxima three quarters. It does not pay, by measurement, for sums
# next to extremes, for extremes of halves, and for sums of bytes and conditions in an int64.

# %%
LANES = 64                   # whose accumulators are kept in registers


def stays_in_registers(e: Emitter, reductions: list[Value], needed: Iterable[Value], lane: Symbol) -> bool:
    """Should the accumulators of some lanes stay in registers while rows are walked? needed: what the pass computes."""
    kinds = {r.args[0] for r in reductions}
    alike = kinds <= {"sum", "prod"} or kinds <= {"max", "min", "any"} and not any(v.op == "load" and v.dtype in HALVES for v in needed)
    simple = alike and all(r.args[0] != "sum" or added_up(r) is r.args[1] for r in reductions)
    per_row = any(e.graph.is_element(v) and lane not in v.dims and v.op != "load" for v in needed)
    return simple and not per_row and not any(v.op in HEAVY for v in needed) and present(e.kernel.reduction_vars[-1].size) >= STEP // 2


def _register_pass(e: Emitter, nest: Scope, lane: Symbol, reductions: list[Value], block: tuple, width: Int, lanes) -> None:
    """A pass whose accumulators are in registers. block: its first lane, how many lanes it has, and how many one has, if not all."""
    first, count, length = block
    *others, row = e.kernel.reduction_vars
    rows = product(v.size for v in e.kernel.reduction_vars)
    ahead = child(nest, others)
    run = child(ahead, ())
    walk = child(run, (row,))
    inner = child(child(walk, ()), (lane,))
    around = inner.parent
    halves = half_blocks(e, around, dict.fromkeys(unnamed(reductions, nest)), lane)
    most = STEP if halves else max(LANES // len(reductions) // STEP * STEP, STEP)
    compute(e, reductions, inner)
    starts, merges, end = [], [], []
    for r in reductions:
        step, part = _column_step(e, r, "{x}", not (isinstance(rows, int) and rows <= FLUSH)), fresh(e, "part")
        (t, acc, start), update = step.state[0], step.element[0]
        nest.lines += [f"alignas(64) {t} {name}[{width}];" for t, name, _ in step.state]
        starts += [f"{name}[lane] = {start};" for _, name, start in step.state]
        run.lines += [f"alignas(64) {t} {part}[{most}];", SIMD, f"{for_('step', 'steps')} {part}[step] = {start};"]
        inner.lines += of_loop(e, r.loop, update.replace(f"{acc}[lane]", f"{part}[step]").format(x=get(e, r.args[1], inner)))
        merges += [update.format(x=f"{part}[step]"), *step.flush]
        end += step.end
        nest.names[r] = step.result
    lanes(nest, starts)
    convert_halves(e, around, halves, lane, first + Symbol("at").expr)
    at = "const int64_t lane = at + step;"
    close(inner, [SIMD, for_("step", "steps")], [at, f"const int64_t {lane.name} = {to_text(first + Symbol('lane').expr)};"])
    close(around, [])
    walk.lines += ['asm("");'] * compares(reductions)
    close(walk, [for_(row.name, "end", "begin")])
    run.lines += [SIMD, f"{for_('step', 'steps')} {{ {at} {' '.join(merges)} }}"]
    size = size_text(row.size)
    fixed = isinstance(lane.size, int) and (length is None or length % most == 0 or lane.size <= length)
    rest = lane.size % most if fixed else f"{count} - done"
    whole, last = f"for (; done + {most} <= {count}; done += {most}) run(done, {most});", f"if (done < {count}) run(done, {rest});"
    calls = [f"run(0, {rest});"] if rest == lane.size else ["int64_t done = 0;", whole, *([last] if rest else [])]
    ahead.lines += [f"const int64_t end = {size} - begin < {FLUSH} ? {size} : begin + {FLUSH};",
                    *inlined(e, "const int64_t at, const int64_t steps", run.lines), *calls]
    close(ahead, [*(for_(v.name, size_text(v.size)) for v in others), for_("begin", size, step=FLUSH)])
    if end:
        lanes(nest, end)


def _materialise(e: Emitter, nest: Scope, lane: Symbol, values: list[Value], width, lanes) -> None:
    """Compute `values` once per lane, into arrays."""
    values = [v for v in values if v not in nest.names]
    loop = child(nest, (lane,))
    compute(e, values, loop)
    texts = [get(e, value, loop) for value in values]
    for value, text in zip(values, texts):
        array = fresh(e, "column")
        nest.lines += of_loop(e, value.loop, f"alignas(64) {register_type(value.dtype)} {array}[{width}];")
        loop.lines += of_loop(e, value.loop, f"{array}[lane] = {text};")
        nest.names[value] = f"{array}[lane]"
    if values:
        lanes(nest, loop.lines)


# %% [markdown]
# A float that has summed up a million rows has lost digits, and one that has summed up 256 has an error of five times eager's, which
# adds partial sums of 16. So after every `FLUSH` rows the float accumulators are added to double ones and begin again at zero; with 16
# and 32 this would take more time than the sums. A loop over blocks of rows has no condition inside: a sum of a thousand rows of 512
# takes three quarters of the time. Where more than additions is done, a counter of rows costs less.

# %%
def _flushed_rows(e: Emitter, nest: Scope, rows: Scope, steps: list["ColumnStep"], lanes, block: int, ahead: Scope) -> None:
    """The loop over the rows. Float accumulators are flushed into double ones, every `FLUSH` rows and at the
    end. block: how many rows one of the loops inside has, 0 for all; ahead: what comes in front of such a loop, if not empty."""
    flush = [line for s in steps for line in s.flush]
    counts = [line for s in steps for line in s.each_flush]
    *others, row = e.kernel.reduction_vars
    if ahead.lines or flush and block and not counts and not others:
        size = size_text(row.size)
        ahead.lines.insert(0, f"const int64_t end = {size} - begin < {block} ? {size} : begin + {block};")
        close(replace(rows, parent=ahead), [for_(row.name, "end", "begin")])
        if flush:
            lanes(ahead, flush)
            ahead.lines += counts
        close(ahead, [*(for_(v.name, size_text(v.size)) for v in others), for_("begin", size, step=block)])
    else:
        if flush:
            since = fresh(e, "since")
            nest.lines.append(f"int64_t {since} = 0;")
            now = child(rows, ())
            now.lines.append(f"{since} = 0;")
            lanes(now, flush)
            now.lines += counts
            close(now, [f"if (++{since} == {FLUSH})"])
        close(rows, [for_(v.name, size_text(v.size)) for v in (*others, row)])
    end = [line for s in steps for line in s.end]
    if end:
        lanes(nest, end)
    if flush:
        nest.lines += counts


# %% [markdown]
# As for rows, a reduction is described by texts for each place in the nest, and one function has a case for each
# kind.

# %%
@dataclass(eq=False)
class ColumnStep:
    """What one reduction adds to a column pass. `state`: arrays with one element per lane, as (type, name,
    start). `element`, `flush` and `end`, in the place of the last flush, are statements for one lane, `each_row` and `each_flush`
    for all lanes."""

    state: list[tuple[str, str, str]]
    element: list[str]
    result: str | tuple[str, ...]
    flush: Sequence[str] = ()
    end: Sequence[str] = ()
    counters: Sequence[str] = ()
    each_row: Sequence[str] = ()
    each_flush: Sequence[str] = ()


# %% [markdown]
# Each kind is an update of one lane's accumulator by one value, as text. A lane is a column here, so nothing has to be
# combined between lanes, and the element of a row is added to the accumulator of its column. What differs between the
# kinds is how many accumulators they have and whether these can hold a long column. A float that has taken thousands of
# numbers loses the small ones. So sums and variances count in float for `FLUSH` rows, and are then flushed into a double,
# which is what `flush` and `each_flush` are for; what the double holds at the end becomes a float once, and not for each
# element that is divided by it. A maximum loses nothing and needs no flush. The variance divides by
# the count at each step; the quotient is the same for all columns and is computed once for a row (`each_row`). Its mean is the sum of
# two floats, since of one near 10,000 the last place is a thousandth. After 1, 2, 4, 8 rows and so on (`settle`) the first takes over what
# it can of the second, which in between is small and the only one that changes.

# %%
def _column_step(e: Emitter, r: Value, x: str, long: bool) -> ColumnStep:
    """long: are there more rows than are added up without a flush?"""
    kind, source, index = r.args
    dtype = accumulator_type(r)
    t, n = register_type(dtype), fresh(e, "_")
    acc, total = f"acc{n}[lane]", f"total{n}[lane]"
    if kind == "welford":       # running mean within some rows, then merged in double
        names = [f"{name}{n}" for name in ("mean", "rest", "m2", "centre", "spread")[:5 if long else 3]]
        mean, rest, m2, *total = [f"{name}[lane]" for name in names]
        flush = f"mc_column_flush<{t}>({', '.join([mean, rest, m2, f'count{n}', *total, f'all{n}'])});"
        return ColumnStep(
            [(kind, name, "0") for kind, name in zip((t, t, t, "double", "double"), names)],
            element=[f"mc_column_welford<{t}>({x}, inverse{n}, settle{n}, {mean}, {rest}, {m2});"],
            result=(mean, m2, f"({t})all{n}" if long else f"count{n}"),
            flush=[flush] if long else [],
            end=[flush, *(f"{place} = ({t}){whole};" for place, whole in zip((mean, m2), total))] if long else [f"{mean} += {rest};"],
            counters=[f"{t} count{n} = 0;", f"double all{n} = 0;"],
            each_row=[f"const bool settle{n} = ((int64_t)count{n} & (int64_t)count{n} - 1) == 0;", f"count{n} += 1;",
                      f"const {t} inverse{n} = 1 / count{n};"],
            each_flush=[f"all{n} += count{n};", f"count{n} = 0;"])
    if kind in ("argmax", "argmin"):
        extreme = f"mc_column_extreme<{'true' if kind == 'argmax' else 'false'}, {t}>"
        return ColumnStep([(t, f"best{n}", start_text(kind, dtype)), ("int64_t", f"at{n}", "0")],
                          [f"{extreme}({x}, {size_text(index)}, best{n}[lane], at{n}[lane]);"],
                          f"at{n}[lane]")
    if kind == "sum" and t == "float":
        state = [(t, f"acc{n}", "0"), ("double", f"total{n}", "0")]
        return ColumnStep(state if long else state[:1], [f"{acc} += {x};"], acc,
                          [f"{total} += {acc};", f"{acc} = 0;"] if long else [], [f"{acc} = (float)({total} + {acc});"] if long else [])
    t = "uint8_t" if dtype is torch.bool else t
    if kind in ("max", "min"):
        value = f"mc_{kind}<{t}>({acc}, ({t}){x})"
    elif kind == "any":
        value = f"{acc} {OPERATOR[kind]} ({x} != 0)"
    elif kind in OPERATOR:
        value = f"({t})({acc} {OPERATOR[kind]} ({t}){x})"
    else:
        raise unknown(r)
    result = f"({acc} != 0)" if dtype is torch.bool else f"({register_type(r.dtype)}){acc}"
    return ColumnStep([(t, f"acc{n}", start_text(kind, dtype))], [f"{acc} = {value};"], result)
