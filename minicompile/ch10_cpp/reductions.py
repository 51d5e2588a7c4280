# %% [markdown]
# # Reductions in C++
#
# A sum in a plain loop is a chain: each addition waits for the last, and floating-point addition may not be
# reordered, so the compiler leaves it scalar. `#pragma omp simd reduction(+:s)` permits one partial sum per
# vector lane. That is fast, and also more accurate, for the same reason that pairwise summation is: each
# partial sum is shorter. Long rows are summed in chunks of 1,024 whose sums are added up in double.
#
# What OpenMP does not know (Welford's variance, the online softmax, the position of a maximum) works on
# chunks as well: the values of a chunk go to a small array that stays in the L1 cache, simple vectorised
# loops reduce it, and the chunk's result is merged into the row's. For the softmax that is
#
# $$m' = \max(m, m_c), \qquad s' = s\,e^{m - m'} + \sum_j e^{x_j - m'}$$
#
# which reads the row once where the textbook reads it twice.

# %%
from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..ch01_graphs.symbolic import Expr, Symbol, product, substitute, to_text
from ..ch08_fusion.values import Store, Value, elements
from ..errors import Unsupported
from .emit import (SIMD, Emitter, Scope, best_lane, child, close, compute, direct_variable, for_, fresh, get,
                   index_text,
                   lane_block, lane_headers, parallel_pragma, store_lines)
from .ops import EXPENSIVE, literal, register_type

CHUNK = 1024                 # elements of a row between two merges
LONGEST_SCRATCH = 4096       # longest row of which expensive values are kept rather than computed again
FLUSH = 256                  # column sums: rows between two flushes into double

# %% [markdown]
# ## The kinds
#
# `IDENTITY` starts an accumulator; `COMBINE` is the step. `max` and `min` propagate NaN, like torch: a NaN
# that has been accumulated stays.

# %%
def lowest(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return literal(float("-inf"), dtype)
    return literal(False if dtype is torch.bool else torch.iinfo(dtype).min, dtype)


def highest(dtype: torch.dtype) -> str:
    if dtype.is_floating_point:
        return literal(float("inf"), dtype)
    return literal(True if dtype is torch.bool else torch.iinfo(dtype).max, dtype)


IDENTITY = {"sum": lambda d: literal(0, d), "prod": lambda d: literal(1, d), "xor_sum": lambda d: literal(0,
                                                                                                          d),
            "max": lowest, "min": highest, "any": lambda d: "false", "all": lambda d: "true"}
COMBINE = {"sum": "({t})({0} + {1})", "prod": "({t})({0} * {1})", "xor_sum": "({t})({0} ^ {1})",
           "max": "mc_max<{t}>({0}, {1})",
           "min": "mc_min<{t}>({0}, {1})", "any": "{0} | ({1} != 0)", "all": "{0} & ({1} != 0)"}
SYMBOL = {"sum": "+", "prod": "*", "xor_sum": "^", "max": "max", "min": "min", "any": "|", "all": "&"}


def accumulator_type(value: Value) -> torch.dtype:
    kind, source, _ = value.args
    return source.dtype if kind in ("argmax", "argmin") else torch.float32 if value.dtype in (torch.bfloat16,
            torch.float16) else value.dtype

# %% [markdown]
# ## Passes
#
# Reductions of equal phase share a pass over the row. Stores of elements wait for the last pass, so that no
# pass reads an input that an output has already overwritten.

# %%
def emit_reductions(e: Emitter, function: Scope) -> None:
    """All loops of a kernel with reductions."""
    kernel = e.kernel
    row_lane, row_vote = best_lane(e, kernel.reduction_vars)
    column_lane, column_vote = best_lane(e, kernel.vars)
    length = product(v.size for v in kernel.reduction_vars)
    short = isinstance(length, int) and length <= 32 and column_lane is not None and column_vote > 0
    if column_lane is not None and (column_vote > row_vote or short):
        emit_columns(e, function, column_lane)
    else:
        emit_rows(e, function, row_lane)


def passes(e: Emitter) -> list[tuple[list[Value], list[Store]]]:
    """(reductions, element stores) of each pass."""
    reductions, stores = e.graph.reductions, [s for s in e.graph.stores if s.element]
    last = max([r.phase - 1 for r in reductions] + [s.phase for s in stores])
    plan = [([r for r in reductions if r.phase - 1 == p], stores if p == last else []) for p in range(last + 1)]
    return [step for step in plan if any(step)]


def operands_of(steps) -> list[Value]:
    return [o for s in steps for o in s.operands]

# %% [markdown]
# ## Rows
#
# The lane is the row's own variable. A value that is expensive (an `exp`, an `erf`) and used in two passes is
# kept in an array as long as the row; everything else is computed again from its loads, which are in the
# cache by then.

# %%
def emit_rows(e: Emitter, function: Scope, lane: Symbol) -> None:
    kernel = e.kernel
    atomic = any(s.mode == "atomic_add" for s in e.graph.stores)
    direct = direct_variable(e, kernel.vars) if atomic else None
    outer = tuple(sorted(kernel.vars, key=lambda v: v is not direct)) if atomic else kernel.vars
    nest = child(function, outer) if outer else function
    plan, kept = passes(e), {}
    uses = [elements(e.graph, reductions + stores) for reductions, stores in plan]
    if isinstance(lane.size, int) and lane.size <= LONGEST_SCRATCH and len(kernel.reduction_vars) == 1:
        twice = {v for i, u in enumerate(uses) for v in u if v.op in EXPENSIVE and any(v in later for later in uses[i + 1:])}
        kept = dict.fromkeys(sorted(twice, key=lambda v: v.number)[:4])
    for reductions, stores in plan:
        _row_pass(e, nest, lane, reductions, stores, kept, atomic)
    store_lines(e, [s for s in e.graph.stores if not s.element], nest)
    work = product(v.size for v in kernel.vars + kernel.reduction_vars)
    loops = [for_(v.name, to_text(v.size)) for v in outer]
    if loops:
        close(nest, (parallel_pragma(e, work, 1 if atomic else len(loops)) if not atomic or direct is not None
                     else []) + loops)


@dataclass(eq=False)
class RowStep:
    """What one reduction adds to a row pass: lines before the row, before a chunk, per element and after a
    chunk; clauses of the simd loop; results."""

    before: list[str]
    chunk: list[str]
    element: list[str]
    after: list[str]
    clauses: list[str]
    result: object


def _row_pass(e: Emitter, nest: Scope, lane: Symbol, reductions, stores, kept, atomic) -> None:
    others = tuple(v for v in e.kernel.reduction_vars if v is not lane)
    middle = child(nest, others)
    inner = child(middle, (lane,))
    compute(e, operands_of(reductions), inner)
    for value, array in kept.items():
        name = inner.names.get(value)
        if array is None and name is not None:
            kept[value] = array = fresh(e, "kept")
            nest.lines.append(f"{register_type(value.dtype)} {array}[{lane.size}];")
            inner.lines.append(f"{array}[{lane.name}] = {name};")
    steps = [_row_step(e, r, get(e, r.args[1], inner), lane) for r in reductions]
    for step in steps:
        inner.lines += step.element
    if stores:
        store_lines(e, stores, inner)
    for value, array in kept.items():      # later passes read the array
        if array is not None and value not in nest.names:
            nest.names[value] = f"{array}[{lane.name}]"
    size = to_text(lane.size)
    whole = isinstance(lane.size, int) and lane.size <= CHUNK
    chunk_loop = [] if whole else [for_("chunk", size, step=str(CHUNK))]
    start = ["const int64_t chunk = 0;"] if whole else []
    count = size if whole else f"{size} - chunk < {CHUNK} ? {size} - chunk : {CHUNK}"
    chunk = child(middle, ())
    inner.parent = chunk
    chunk.lines += start + [f"const int64_t count = {count};"] + [line for s in steps for line in s.chunk]
    clauses = "".join(" " + c for s in steps for c in s.clauses)
    unsafe = atomic and any(s.mode == "atomic_add" for s in stores) and direct_variable(e, (lane,)) is None
    pragma = [] if unsafe else [SIMD + clauses]
    close(inner, pragma + [for_("lane", "count")], [f"const int64_t {lane.name} = chunk + lane;"])
    chunk.lines += [line for s in steps for line in s.after]
    close(chunk, chunk_loop or [""])
    nest.lines += [line for s in steps for line in s.before]
    if others:
        close(middle, [for_(v.name, to_text(v.size)) for v in others])
    else:
        nest.lines += middle.lines
    for r, step in zip(reductions, steps):
        nest.names[r] = _named_results(e, r, step.result, nest)


def _named_results(e: Emitter, r: Value, result, nest: Scope):
    """Bind each result of a finished row reduction to a constant, so that the loops that follow do not
    evaluate it again."""
    if isinstance(result, tuple):
        return tuple(_named_results(e, r, part, nest) for part in result)
    name = fresh(e, "v")
    nest.lines.append(f"const {register_type(r.dtype)} {name} = {result};")
    return name

# %% [markdown]
# Each kind of reduction over a row, as a `RowStep`.

# %%
def _row_step(e: Emitter, r: Value, x: str, lane: Symbol) -> RowStep:
    kind, source, index = r.args
    dtype = accumulator_type(r)
    t, n = register_type(dtype), fresh(e, "_")
    if kind in ("welford", "softmax", "argmax", "argmin"):
        length = min(lane.size, CHUNK) if isinstance(lane.size, int) else CHUNK
        array = f"alignas(64) {register_type(source.dtype)} t{n}[{length}];"
        fill = f"t{n}[lane] = {x};"
        return _ROW_STEPS[kind](e, r, n, t, array, fill, lane, index)
    if kind not in IDENTITY:
        raise Unsupported(f"the C++ backend has no reduction {kind!r}", r.loop.location)
    start = IDENTITY[kind](dtype)
    if kind in ("max", "min") and dtype.is_floating_point:
        compare = ">" if kind == "max" else "<"
        return RowStep([f"{t} acc{n} = {start};", f"int nan{n} = 0;"], [f"{t} part{n} = {start};",
                                                                        f"int bad{n} = 0;"],
                       [f"part{n} = {x} {compare} part{n} ? {x} : part{n};", f"bad{n} |= {x} != {x};"],
                       [f"acc{n} = part{n} {compare} acc{n} ? part{n} : acc{n};", f"nan{n} |= bad{n};"],
                       [f"reduction({SYMBOL[kind]}:part{n})", f"reduction(|:bad{n})"],
                       f"(nan{n} ? ({t})MC_NAN : acc{n})")
    if kind in ("any", "all"):
        t, start, x = "int", "0" if kind == "any" else "1", f"({x} != 0)"
    total = "double" if kind in ("sum",) and t == "float" else t
    value = x if kind in ("any", "all") else f"({t}){x}"
    if kind in ("max", "min"):
        compare = ">" if kind == "max" else "<"
        element = f"part{n} = {value} {compare} part{n} ? {value} : part{n};"
        after = f"acc{n} = part{n} {compare} acc{n} ? part{n} : acc{n};"
    else:
        operator = SYMBOL[kind]
        element, after = f"part{n} {operator}= {value};", f"acc{n} {operator}= part{n};"
    result = f"({register_type(r.dtype)})acc{n}" if kind not in ("any", "all") else f"(acc{n} != 0)"
    return RowStep([f"{total} acc{n} = {start};"], [f"{t} part{n} = {start};"], [element], [after],
                   [f"reduction({SYMBOL[kind]}:part{n})"], result)


def _row_welford(e, r, n, t, array, fill, lane, index) -> RowStep:
    before = [f"double mean{n} = 0, m2{n} = 0, count{n} = 0;"]
    after = [f"{t} sum{n} = 0, square{n} = 0;", f"{SIMD} reduction(+:sum{n})",
             f"for (int64_t k = 0; k < count; k++) sum{n} += t{n}[k];",
             f"const {t} centre{n} = sum{n} / count;", f"{SIMD} reduction(+:square{n})",
             "for (int64_t k = 0; k < count; k++) {", f"  const {t} d = t{n}[k] - centre{n};",
             f"  square{n} += d * d;", "}",
             f"const double delta{n} = centre{n} - mean{n}, all{n} = count{n} + count;",
             f"m2{n} += square{n} + delta{n} * delta{n} * count{n} * count / all{n};",
             f"mean{n} += delta{n} * count / all{n};", f"count{n} = all{n};"]
    return RowStep(before, [array], [fill], after, [], (f"(({t})mean{n})", f"(({t})m2{n})",
                                                        f"(({t})count{n})"))


def _row_softmax(e, r, n, t, array, fill, lane, index) -> RowStep:
    before = [f"{t} max{n} = -MC_INF, sum{n} = 0;"]
    after = [f"{t} top{n} = max{n}, part{n} = 0;", f"int bad{n} = 0;",
             f"{SIMD} reduction(max:top{n}) reduction(|:bad{n})",
             "for (int64_t k = 0; k < count; k++) {", f"  top{n} = t{n}[k] > top{n} ? t{n}[k] : top{n};",
             f"  bad{n} |= t{n}[k] != t{n}[k];", "}",
             f"if (bad{n}) top{n} = MC_NAN;",
             f"if (!(top{n} == -MC_INF)) {{",
             f"  {SIMD} reduction(+:part{n})",
             f"  for (int64_t k = 0; k < count; k++) part{n} += mc_exp(t{n}[k] - top{n});",
             f"  sum{n} = (max{n} == -MC_INF ? 0 : sum{n} * mc_exp(max{n} - top{n})) + part{n};",
             f"  max{n} = max{n} != max{n} ? max{n} : top{n};", "}"]
    return RowStep(before, [array], [fill], after, [], (f"max{n}", f"sum{n}"))


def _row_arg(e, r, n, t, array, fill, lane, index) -> RowStep:
    kind, source, _ = r.args
    compare, floating = (">" if kind == "argmax" else "<"), source.dtype.is_floating_point
    start = lowest(source.dtype) if kind == "argmax" else highest(source.dtype)
    place = _linear_index(e, index, lane)
    before = [f"{t} best{n} = {start};", f"int64_t at{n} = -1;"]
    nan = [f"int bad{n} = 0;", f"{SIMD} reduction(|:bad{n})",
           f"for (int64_t k = 0; k < count; k++) bad{n} |= t{n}[k] != t{n}[k];",
           f"if (bad{n}) top{n} = MC_NAN;"] if floating else []
    same = f"(t{n}[k] == top{n} || (t{n}[k] != t{n}[k] && top{n} != top{n}))"
    after = [f"{t} top{n} = t{n}[0];", f"{SIMD} reduction({'max' if kind == 'argmax' else 'min'}:top{n})",
             f"for (int64_t k = 0; k < count; k++) top{n} = t{n}[k] {compare} top{n} ? t{n}[k] : top{n};",
             *nan,
             f"if (at{n} < 0 || top{n} {compare} best{n} || top{n} == best{n} || (top{n} != top{n})) {{",
             "  int64_t k = 0;", f"  while (!{same}) k++;",
             f"  const int64_t {lane.name} = chunk + k, here = {place};",
             f"  const bool equal = top{n} == best{n} || (top{n} != top{n} && best{n} != best{n});",
             f"  if (at{n} < 0 || (equal ? here < at{n} : !(best{n} != best{n}))) {{",
             f"    best{n} = top{n};", f"    at{n} = here;", "  }", "}"]
    return RowStep(before, [array], [fill], after, [], f"at{n}")


def _linear_index(e: Emitter, index, lane: Symbol) -> str:
    if index is None:
        raise Unsupported("argmax without an index")
    return to_text(index, lambda s: s.name, "({}) / ({})", "({}) % ({})")


_ROW_STEPS = {"welford": _row_welford, "softmax": _row_softmax, "argmax": _row_arg, "argmin": _row_arg}

# %% [markdown]
# ## Columns
#
# One accumulator per lane, in arrays. Every statement on them is a lane loop, so all kinds vectorise alike,
# including the position of a maximum. Values of the row's phase that the elements need, such as `rsqrt(var +
# eps)` per column, are computed once per column and kept in an array as well.

# %%
def emit_columns(e: Emitter, function: Scope, lane: Symbol) -> None:
    kernel = e.kernel
    atomic = any(s.mode == "atomic_add" for s in e.graph.stores)
    outer = tuple(v for v in kernel.vars if v is not lane)
    block = lane_block(e, lane, outer, 512)
    blocks, prologue, lane_header, define = lane_headers(e, lane, block)
    width = block if block is not None else lane.size
    nest = child(function, outer)

    def lanes(lines: list[str]) -> None:
        nest.lines.append(SIMD)
        nest.lines.append(lane_header + " {")
        nest.lines.extend("  " + line for line in lines)
        nest.lines.append("}")

    for reductions, stores in passes(e):
        steps = reductions + stores
        ready = {o for o in operands_of([*steps, *elements(e.graph, steps)]) if not e.graph.is_element(o)
                 and lane in o.dims and o.op not in ("load", "constant", "index", "reduce", "get")}
        _materialise(e, nest, lane, sorted(ready, key=lambda v: v.number), width, lane_header, define)
        rows = child(nest, kernel.reduction_vars)
        inner = child(rows, (lane,))
        compute(e, operands_of(steps), inner)
        steps = [_column_step(e, r, get(e, r.args[1], inner), width, inner) for r in reductions]
        for step in steps:
            inner.lines += step.element
        if stores:
            store_lines(e, stores, inner)
        unsafe = any(s.mode == "atomic_add" for s in stores)
        close(inner, ([] if unsafe else [SIMD]) + [lane_header], [define])
        for step in steps:
            nest.lines += step.arrays
        starts = [line for s in steps for line in s.start]
        if starts:
            lanes(starts)
        flush = [line for s in steps for line in s.flush]
        flushed = [line for s in steps for line in s.flushed]
        length = product(v.size for v in kernel.reduction_vars)
        counted = [line for s in steps for line in s.counted]
        rows.lines[:0] = counted
        if flush and not (isinstance(length, int) and length <= FLUSH):
            nest.lines.append("int64_t since = 0;")
            rows.lines += [f"if (++since == {FLUSH}) {{", "  since = 0;", "  " + SIMD, f"  {lane_header} {{",
                           *["    " + f for f in flush], "  }",
                           *["  " + f for f in flushed], "}"]
        close(rows, [for_(v.name, to_text(v.size)) for v in kernel.reduction_vars])
        if flush:
            lanes(flush)
            nest.lines += flushed
        for r, step in zip(reductions, steps):
            nest.names[r] = step.result
    final = child(nest, (lane,))
    stores = [s for s in e.graph.stores if not s.element]
    if stores:
        store_lines(e, stores, final)
        close(final, ([] if atomic else [SIMD]) + [lane_header], [define])
    loops = [for_(v.name, to_text(v.size)) for v in outer]
    work = product(v.size for v in kernel.vars + kernel.reduction_vars)
    pragma = [] if atomic else parallel_pragma(e, work, len(loops) + len(blocks)) * bool(loops or blocks)
    close(nest, pragma + loops + blocks or [""], prologue)


def _materialise(e: Emitter, nest: Scope, lane: Symbol, values: list[Value], width, lane_header: str,
                 define: str) -> None:
    values = [v for v in values if v not in nest.names]
    loop = child(nest, (lane,))
    for value in values:
        compute(e, [value], loop)
    for value in values:
        array = fresh(e, "column")
        nest.lines.append(f"alignas(64) {register_type(value.dtype)} {array}[{width}];")
        loop.lines.append(f"{array}[lane] = {get(e, value, loop)};")
        nest.names[value] = f"{array}[lane]"
    if values:
        close(loop, [SIMD, lane_header], [define])


@dataclass(eq=False)
class ColumnStep:
    """What one reduction adds to a column pass; `start`, `element` and `flush` are lines of lane loops,
    `counted` runs once per row and `flushed` once per flush."""

    arrays: list[str]
    start: list[str]
    element: list[str]
    flush: list[str]
    result: object
    counted: list[str]
    flushed: list[str] = field(default_factory=list)


def _column_step(e: Emitter, r: Value, x: str, width, inner: Scope) -> ColumnStep:
    kind, source, index = r.args
    dtype = accumulator_type(r)
    t, n = register_type(dtype), fresh(e, "_")

    def array(name: str, type_: str = t) -> str:
        return f"alignas(64) {type_} {name}{n}[{width}];"

    if kind == "welford":       # running mean within 256 rows, then merged in double
        return ColumnStep([array("mean"), array("m2"), array("centre", "double"), array("spread", "double"),
                           f"{t} count{n} = 0;", f"double all{n} = 0;"],
                          [f"{name}{n}[lane] = 0;" for name in ("mean", "m2", "centre", "spread")],
                          [f"const {t} delta{n} = {x} - mean{n}[lane];",
                           f"mean{n}[lane] += delta{n} * inverse{n};",
                           f"m2{n}[lane] += delta{n} * ({x} - mean{n}[lane]);"],
                          [f"const double gap{n} = mean{n}[lane] - centre{n}[lane];",
                           f"const double share{n} = count{n} / (all{n} + count{n});",
                           f"centre{n}[lane] += gap{n} * share{n};",
                           f"spread{n}[lane] += m2{n}[lane] + gap{n} * gap{n} * all{n} * share{n};",
                           f"mean{n}[lane] = 0;", f"m2{n}[lane] = 0;"],
                          (f"(({t})centre{n}[lane])", f"(({t})spread{n}[lane])", f"(({t})all{n})"),
                          [f"count{n} += 1;", f"const {t} inverse{n} = 1 / count{n};"],
                          [f"all{n} += count{n};", f"count{n} = 0;"])
    if kind == "softmax":
        shift = f"const {t} safe{n} = top{n} == -MC_INF ? 0 : top{n};"
        return ColumnStep([array("max"), array("sum")], [f"max{n}[lane] = -MC_INF;", f"sum{n}[lane] = 0;"],
                          [f"const {t} top{n} = mc_max<{t}>(max{n}[lane], {x});", shift,
                           f"sum{n}[lane] = sum{n}[lane] * mc_exp(max{n}[lane] - safe{n}) "
                           f"+ mc_exp({x} - safe{n});", f"max{n}[lane] = top{n};"],
                          [], (f"max{n}[lane]", f"sum{n}[lane]"), [])
    if kind in ("argmax", "argmin"):
        compare = ">" if kind == "argmax" else "<"
        start = lowest(source.dtype) if kind == "argmax" else highest(source.dtype)
        here = _linear_index(e, index, None)
        nan = ""
        if source.dtype.is_floating_point:
            nan = f" | (({x} != {x}) & (best{n}[lane] == best{n}[lane]))"
        keep = f"(best{n}[lane] == best{n}[lane]) & " if source.dtype.is_floating_point else ""
        return ColumnStep([array("best"), array("at", "int64_t")], [f"best{n}[lane] = {start};",
                                                                    f"at{n}[lane] = 0;"],
                          [f"const bool better{n} = ({keep}({x} {compare} best{n}[lane])){nan};",
                           f"best{n}[lane] = better{n} ? {x} : best{n}[lane];",
                           f"at{n}[lane] = better{n} ? ({here}) : at{n}[lane];"],
                          [], f"at{n}[lane]", [])
    if kind not in IDENTITY:
        raise Unsupported(f"the C++ backend has no reduction {kind!r}", r.loop.location)
    start = IDENTITY[kind](dtype)
    t = "uint8_t" if dtype is torch.bool else t
    if kind == "sum" and t == "float":
        return ColumnStep([array("acc"), array("total", "double")],
                          [f"acc{n}[lane] = 0;", f"total{n}[lane] = 0;"], [f"acc{n}[lane] += {x};"],
                          [f"total{n}[lane] += acc{n}[lane];", f"acc{n}[lane] = 0;"],
                          f"(float)total{n}[lane]", [])
    step = COMBINE[kind].format(f"acc{n}[lane]", f"({t}){x}" if kind not in ("any", "all") else x, t=t)
    result = f"(acc{n}[lane] != 0)" if dtype is torch.bool else f"({register_type(r.dtype)})acc{n}[lane]"
    return ColumnStep([array("acc", t)], [f"acc{n}[lane] = {start};"], [f"acc{n}[lane] = {step};"], [],
                      result, [])
