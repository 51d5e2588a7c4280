# %% [markdown]
# # Rows
#
# The lane is the row's own variable. What is expensive and used in two passes is kept in an array as long as the row (`needed_again`,
# `array_lines`).
# `passes` has divided the work: each pass walks along the row once, computes some reductions, and stores
# what is known by then. A softmax has three, for the maximum, the sum, and the quotients. (Chapter 9 finds maximum and sum in one walk,
# at the price of computing each exponential again. Here that is what takes time.)

# %%
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Sequence

import torch

from ..ch01_graphs.layouts import contiguous_strides
from ..ch01_graphs.symbolic import Symbol, as_expr, present, product, substitute, symbols, to_text
from ..ch07_loops.ir import Value, behind, identity, in_order
from ..ch07_loops.lazy import linear
from ..ch07_loops.pointwise import HEAVY
from ..ch08_fusion.values import elements
from .lanes import STEP, WIDE, array_lines, close_lanes, half_blocks, room, tabulate, worth_a_table
from .nests import (
    SIMD,
    Count,
    Emitter,
    Scope,
    along_lane,
    child,
    close,
    compute,
    direct_variable,
    for_,
    fresh,
    get,
    index_text,
    known_name,
    of_loop,
    shared,
    size_text,
    store_lines,
    unnamed,
)
from .ops import HALVES, literal, memory_type, register_type
from .reductions import OPERATOR, SCRATCH, accumulator_type, needed_again, passes, start_text, unknown

CHUNK = 1024                 # elements of a row between two merges
PARTIAL_SUMS = 32            # partial sums of a long row
CHUNKED = ("welford", "argmax", "argmin")       # reductions that take a chunk of a row from an array


def emit_rows(e: Emitter, function: Scope, lane: Symbol) -> None:
    kernel = e.kernel
    atomic = any(s.mode == "atomic_add" for s in e.graph.stores)
    direct = direct_variable(e, kernel.vars) if atomic else None
    outer = tuple(sorted(kernel.vars, key=lambda v: v is not direct)) if atomic else kernel.vars
    plan, kept = passes(e), {}
    if len(kernel.reduction_vars) == 1:
        twice = needed_again(e, plan, lane)
        most = SCRATCH // (present(lane.size) * max((v.dtype.itemsize for v in twice), default=1))
        kept = dict.fromkeys(twice[:most])
    group = outer[-1] if outer and not atomic and in_groups(e, plan, lane, outer, list(kept)) else None
    nest = child(function, outer if group is None else outer[:-1]) if outer else function
    if outer:
        tabulate(e, function, nest, lane, outer)
    together = "" if group is None else str(GROUP)
    if group is not None and not isinstance(lane.size, int) and not e.part:
        together = fresh(e, "together")
        function.lines.append(f"const int64_t {together} = {size_text(lane.size)} < {LONG} ? {GROUP} : 1;")
    of_rows = [s for s in e.graph.stores if not e.graph.is_element(s)]
    for reductions, stores in plan:
        if group is None:
            _row_pass(e, function, nest, nest, lane, reductions, stores, kept, together)
        else:
            _row_values(e, nest, group, reductions + stores)
            row = child(nest, (group,))
            _row_pass(e, function, row, nest, lane, reductions, stores, kept, together, group)
            close(row, [for_(group.name, "row1", "row0")])
    if of_rows and group is not None:
        row = child(nest, (group,))
        store_lines(e, of_rows, row)
        close(row, [SIMD, for_(group.name, "row1", "row0")])
    else:
        store_lines(e, of_rows, nest)
    work = product(v.size for v in kernel.vars + kernel.reduction_vars)
    loops = [Count(v.name, v.size) for v in outer]
    if group is not None:
        size = size_text(group.size)
        end = f"row0 + {together}" if group.size % GROUP == 0 else f"{size} - row0 < {together} ? {size} : row0 + {together}"
        step = GROUP if e.part else together
        close(nest, shared(e, work, [*loops[:-1], Count("row0", group.size, step)]), [f"const int64_t row1 = {end};"])
    elif loops:
        close(nest, shared(e, work, loops, None if not atomic else int(direct is not None)))


# %% [markdown]
# Most of a short row is waiting: for the largest of the sixteen lanes, for their sum, for its logarithm, one after the other, and a row
# of sixty numbers is too short for the processor to find enough to do meanwhile in the next. So `GROUP` rows do each pass together. What a
# pass leaves of its rows stands in arrays, one element for each (`_for_later`), and what later passes need of these numbers, such as
# their logarithms, is computed for all rows of the group at once, as a vector (`_row_values`). So are the stores of rows. Of the kernel
# of a softmax of 256 rows of 32 floats what is left is
#
#     for (int64_t row0 = 0; row0 < 256; row0 += 16) {
#       const int64_t row1 = row0 + 16;
#       alignas(64) float row4[16];
#       for (int64_t i0 = row0; i0 < row1; i0 += 1) { ... row4[i0 - row0] = v3; }
#       float kept8[16 * 32]; alignas(64) float row11[16];
#       for (int64_t i0 = row0; i0 < row1; i0 += 1) { ... row11[i0 - row0] = v10; }
#       alignas(64) float row13[16];
#       #pragma omp simd
#       for (int64_t i0 = row0; i0 < row1; i0 += 1) { const float v12 = (float)1 / row11[i0 - row0]; row13[i0 - row0] = v12; }
#       for (int64_t i0 = row0; i0 < row1; i0 += 1) { ... kept8[(i0 - row0)*32 + r0] * row13[i0 - row0] ... }
#     }
#
# A log-softmax of rows of 16 to 64 floats takes two thirds of the time, a softmax four fifths, and the logarithm of a sum half. Long rows
# have enough to do, and sixteen of them may be more than the nearest cache holds next to what else a pass touches: floats gain up to 100
# columns, or 256 where there is a logarithm or the like to wait for, halves up to 512. What is kept of sixteen rows has to fit on the stack
# of a thread, too, of which a server may give it 256 KiB (`KEPT`). Where sizes vary, those of the call that is compiled decide. In a later
# one the rows may be long, and few. Each then goes alone (`LONG`): what sixteen keep, no cache holds, or no memory, and one thread
# would have them all.

# %%
GROUP = 16                   # rows that do each pass together
LONG = 1024                  # columns of a row that does not, though its kernel has groups
LONGEST = 400                # bytes of a row that does
LONGEST_WAITING = 1024       # the same for halves, and where there is something expensive to wait for
KEPT = 1 << 16               # bytes of expensive values that a group keeps


def in_groups(e: Emitter, plan: list, lane: Symbol, outer: tuple[Symbol, ...], kept: list[Value]) -> bool:
    """Do the rows of this kernel, the last of these variables, go through its passes in groups, where each keeps these values?"""
    rows, of_rows = present(product(v.size for v in outer)), [v for v in e.graph.values if not e.graph.is_element(v) and v.phase]
    if len(e.kernel.reduction_vars) > 1 or present(outer[-1].size) < GROUP or rows < 2 * GROUP * e.threads or \
            any(v.op == "indirect" for v in e.graph.values):
        return False
    loads = [v.dtype for v in e.graph.values if v.op == "load" and lane in v.dims]
    longest = LONGEST_WAITING if any(v.op in HEAVY for v in of_rows) or any(d in HALVES for d in loads) else LONGEST
    bytes_of_row = present(lane.size) * max((d.itemsize for d in loads), default=1)
    bytes_kept = GROUP * present(lane.size) * sum(max(4, v.dtype.itemsize) for v in kept)
    return (len(plan) > 1 or any(map(worth_a_table, of_rows))) and bytes_of_row <= longest and bytes_kept <= KEPT


def _row_values(e: Emitter, nest: Scope, group: Symbol, steps: list[Value]) -> None:
    """Compute what these need of rows, for all rows of a group at once."""
    needed = {o for s in (*steps, *elements(e.graph, steps)) for o in s.operands if not e.graph.is_element(o)
              and group in o.dims and worth_a_table(o) and known_name(o, nest) is None}
    if not needed:
        return
    values, loop = sorted(needed, key=in_order), child(nest, (group,))
    compute(e, values, loop)
    found = {value: _for_later(e, value, get(e, value, loop), loop, nest, group) for value in values}
    close(loop, [SIMD, for_(group.name, "row1", "row0")])
    nest.names.update(found)


def _for_later(e: Emitter, value: Value, names: str | tuple, row: Scope, nest: Scope, group: Symbol):
    """Store a number of a row, or several, in an array of the group each. Returns the texts of the elements."""
    if isinstance(names, tuple):
        return tuple(_for_later(e, value, name, row, nest, group) for name in names)
    text = f"{(array := fresh(e, 'row'))}[{group.name} - row0]"
    nest.lines += of_loop(e, value.loop, f"alignas(64) {register_type(value.dtype)} {array}[{GROUP}];")
    row.lines += of_loop(e, value.loop, f"{text} = {names};")
    return text


def _kept_at(lane: Symbol, group: Symbol | None) -> str:
    return lane.name if group is None else f"({group.name} - row0)*{room(lane.size)} + {lane.name}"


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
def _row_pass(e: Emitter, function: Scope, nest: Scope, around: Scope, lane: Symbol, reductions, stores, kept: dict,
              together: str, group: Symbol | None = None) -> None:
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
            home = around if isinstance(lane.size, int) else function
            home.lines += of_loop(e, value.loop, *array_lines(value.dtype, array, lane.size, times=together))
            inner.lines += of_loop(e, value.loop, f"{array}[{_kept_at(lane, group)}] = {name};")
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
            around.names.setdefault(value, f"{array}[{_kept_at(lane, group)}]")
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
        if group is not None:
            around.names[r] = _for_later(e, r, nest.names[r], nest, around, group)


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
