# %% [markdown]
# # Columns
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
from dataclasses import dataclass, replace
from typing import Iterable, Sequence

import torch

from ..ch01_graphs.layouts import contiguous_strides
from ..ch01_graphs.symbolic import Int, Symbol, as_expr, present, product, to_text
from ..ch07_loops.ir import Value, in_order
from ..ch07_loops.lazy import linear
from ..ch07_loops.pointwise import HEAVY
from ..ch08_fusion.values import elements
from .lanes import (
    BYTES,
    STEP,
    TILE,
    WIDE,
    close_lanes,
    convert_halves,
    ends_ragged,
    half_blocks,
    inlined,
    jumping,
    read_ahead,
    side_by_side,
    worth_a_table,
)
from .nests import (
    SIMD,
    Count,
    Emitter,
    Scope,
    best_lane,
    child,
    close,
    compute,
    for_,
    fresh,
    get,
    lane_block,
    lane_headers,
    of_loop,
    shared,
    size_text,
    store_lines,
    unnamed,
)
from .ops import HALVES, register_type
from .reductions import OPERATOR, SCRATCH, accumulator_type, compares, needed_again, passes, start_text, unknown
from .rows import added_up, emit_rows, of_integers

NARROW = 64                  # the fewest columns of a block for which expensive values are kept
FLUSH = 64                   # column sums: rows between two flushes into double


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
    if block is None and not isinstance(lane.size, int):        # the arrays of a block are on the stack
        block = widest
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

# %% [markdown]
# ## Rows or columns?
#
# A kernel's reductions are walked along their rows, or across them. The votes of its loads and stores for a lane (`nests.py`) decide,
# and where these are not of one mind, what is left over.

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
