# %% [markdown]
# # The lane loop
#
# g++ makes vectors of an innermost loop if its iterations do the same: no branch, no check, no conversion that is not itself a
# vector instruction. This module turns four kinds of lane loops that are not so into ones that are. In each, what is in the way is
# taken out of the loop: positions that cost a search and a check are computed once for all rows, what jumps in memory is copied first,
# the ends of a row, where conditions change, become another loop than its inside, and halves are converted sixteen at a time before they
# are used.

# %%
import re
from typing import Iterable, Sequence

import torch

from ..ch01_graphs.symbolic import Int, Symbol, present, product, substitute, symbols, to_text
from ..ch07_loops.ir import Value, behind, body_of, in_order, replay
from ..ch07_loops.reference import GridHandler
from .nests import (SIMD, Emitter, Interior, Scope, along_lane, child, close, compute, first_position, for_, fresh, get, index_text,
                    known_name, lane_mask, masks_whole_lanes, of_loop, size_text, stays_inside)
from .ops import BITS, HALVES, memory_type, register_type

# %% [markdown]
# ## Positions that every row reads at
#
# Where nearest-neighbour resizing or a padding by reflection reads is the same in every row, takes ten operations and a check to find, and
# the check keeps the loop from becoming vectors. `tabulate` puts such positions, those which vary along one variable only, into an array,
# once for the kernel: a resize to 4 million elements takes 3 ms in place of 20. Of images whose channels are innermost the lane is the
# channel, and what would be computed for each pixel again is where its row and its column read: with 16 channels, five sixths of the time.
# There the scale and the shift of a batch norm depend on the lane only, and so do weights in a norm of rows: the root of the variance, and
# floats made of halves, have a table as well.

# %%
LONGEST_TABLE = 4096


def tabulate(e: Emitter, function: Scope, nest: Scope, lane: Symbol, outer: tuple[Symbol, ...]) -> None:
    """Compute the positions that depend on one variable in `function`, if they are needed again, and name them in `nest`, inside of it.
    So with floats that depend on the lane only and are worth a table, if what depends on more reads them."""
    for variable in (lane, *outer):
        again, size = present(product(v.size for v in outer if v is not variable)), variable.size
        needed = {o for v in e.graph.steps if v.dims != {lane} for o in v.operands if worth_a_table(o)} if variable is lane else ()
        positions = [v for v in e.graph.values if (v.op == "indirect" or v in needed) and v.dims == {variable}]
        if e.part or not positions or present(size) > LONGEST_TABLE or again < 4:
            continue
        loop = child(function, (variable,))
        compute(e, positions, loop)
        for value in positions:
            table = fresh(e, "table")
            function.lines += of_loop(e, value.loop, *array_lines(value.dtype, table, size, zeros=True))
            loop.lines += of_loop(e, value.loop, f"{table}[{variable.name}] = {get(e, value, loop)};")
            nest.names[value] = text = f"{table}[{variable.name}]"
            if variable is not lane:        # read once: g++ does not know that no lane writes to the table
                nest.names[value] = name = fresh(e, "v")
                nest.lines += of_loop(e, value.loop, f"const int64_t {name} = {text};")
        close(loop, [for_(variable.name, size_text(size))])


# %% [markdown]
# An array is on the stack if its length is a number. Where sizes vary, it is memory that each thread takes once, in front of its loops:
#
#     const mc_memory memory_table21(mc_lanes(2*s1), sizeof(int64_t));
#     int64_t* const table21 = (int64_t*)memory_table21.begin;
#     if (!table21) return mc_report(problem, 3, 0, 0);
#
# So such kernels have what others have. A softmax of 47 columns, whose number varies, takes a third of the time that it takes if each
# exponential is computed twice and the last fifteen one by one; a bilinear resize of small images takes a fourth of that without a table.

# %%
def room(size: Int) -> str:
    """The length of an array that a lane loop may read in whole vectors."""
    return f"mc_lanes({size_text(size)})" if size % STEP != 0 else size_text(size)


def array_lines(dtype: torch.dtype, name: str, size: Int, zeros: bool = False, times: str = "") -> list[str]:
    """The declaration of an array for that many lanes, `times` as many. If sizes vary it belongs to the scope of the function.
    zeros: what is behind the lanes is zero."""
    t, length = register_type(dtype), f"{times} * {room(size)}" if times else room(size)
    if isinstance(size, int):
        return [f"{t} {name}[{length}]{' = {}' if zeros and size % STEP else ''};"]
    clear = f"{for_('k', room(size), size_text(size))} {name}[k] = 0;"
    return [f"const mc_memory memory_{name}({length}, sizeof({t}));", f"{t}* const {name} = ({t}*)memory_{name}.begin;",
            f"if (!{name}) return mc_report(problem, 3, 0, 0);", *([clear] if zeros and size % STEP != 0 else [])]


def worth_a_table(value: Value) -> bool:
    """Is it more to compute the number than to load it? Conditions are not: g++ finds out how they change along the lane."""
    return value.dtype.is_floating_point and (value.op not in ("load", "constant", "reduce", "get") or
                                              value.op == "load" and value.dtype in HALVES)

# %% [markdown]
# ## What jumps
#
# Where one operand lies in memory as the transposition of another, as in `x + y.t()`, no lane suits both. Rows that are a power of
# two apart fall into the same few places of the cache and drive each other out: of a matrix of 1,024 by 1,024 a column is read from
# memory, element by element. So what jumps along the lane is first copied to a block, along the variable in which it is contiguous
# (`read_ahead`), and jumps in the block, whose rows are an odd number of elements apart. A transposition takes 0.3 ms in place of 3.

# %%
TILE = 32


def jumping(e: Emitter, values: Iterable[Value], lane: Symbol, other: Symbol) -> list[Value]:
    """The loads that jump along the lane and move by one element along `other`."""
    return [v for v in values if v.op == "load" and v.mask is None and along_lane(e, v.index, other) == 1
            and along_lane(e, v.index, lane) not in (0, 1, None) and symbols(v.index).isdisjoint(e.graph.symbols)]


def read_ahead(e: Emitter, scope: Scope, loads: Iterable[Value], lane: Symbol, first: Int, count: str, other: Symbol,
               span: tuple[str, str]) -> None:
    """Copy what these loads read to blocks: for at most `2 * TILE` lanes, from `first` on, and a `span` of at most `TILE` of `other`."""
    for load in loads:
        block, begin = fresh(e, "block"), to_text(first + Symbol("lane").expr)
        e.blocks[load] = f"{block}[{TILE + 1}*lane + {other.name} - {span[0]}]"
        copied = f"{e.blocks[load]} = {e.pointers[load.buffer]}[{index_text(e, load.index, scope)}];"
        scope.lines += of_loop(e, load.loop, f"{memory_type(load.dtype)} {block}[{2 * TILE * (TILE + 1)}];",
                               for_("lane", count) + " {", f"  const int64_t {lane.name} = {begin};", f"  {SIMD}",
                               f"  {for_(other.name, span[1], span[0])} {copied}", "}")

# %% [markdown]
# ## The inside of a row
#
# In a padding by reflection or a pool whose windows reach over the edge, conditions and positions depend on the lane, and g++ makes no
# vectors where a condition guards a load that jumps, and slow ones where a table says what to load. (A load of what lies side by side has
# a mask for each vector, which costs less than the ends unless the row is long, or stores halves or bytes: a condition on eight 64-bit
# positions is no mask of 32 halves, and a padding of them took two to ten times as long.) But they do so only at both ends of a row: from
# the first lane to the last whose windows are inside, all conditions are what they are in the middle, and positions
# move on by equal steps. `interior` evaluates them for all lanes, by the reference of chapter 7, and finds where this is so. The lane loop
# becomes a function of a range, called for this inside with `inside` true, and for both ends with
# `inside` false; in the first the conditions are constants, and g++ drops them. What else guards a load, such as whether
# the row of the window is inside, has to hold as well: where it does not, the whole row is an end. A
# padding by reflection takes a third of the time, a pool over sequences a twentieth.
#
# Where sizes vary, present ones say what conditions are inside and by how much positions move on, and the function itself looks for the
# lanes of which that is true, from the middle of the row to both sides, before its loops (`find_inside`): what it finds is right for any
# sizes. Of the length of such a row g++ knows nothing, and vectors of a whole register would leave up to 63 bytes to be moved one by one.
# So what is only moved is copied at once (`moved_at_once`), and g++ decides by itself how wide the vectors of another inside are. A
# padding of 112 columns of bytes takes a fifth of the time.

# %%
def interior(e: Emitter, function: Scope, nest: Scope, lane: Symbol, outer: Iterable[Symbol]) -> Interior | None:
    """Where in a row conditions and positions are as in its middle, if that is most of it."""
    rows, size = present(product(v.size for v in outer)), present(lane.size)
    if not 8 <= size <= LONGEST_TABLE or rows < 4:
        return None
    needed = behind(e.graph.stores, lambda v: v.op != "indirect" or v.dims != {lane})
    positions = [v for v in e.graph.values if v.op == "indirect" and v.dims == {lane}]
    chosen = [v for v in needed if v.dtype is torch.bool and v.dims == {lane}] + positions
    steps = body_of(chosen)
    sizes = {s for v in steps if v.op in ("index", "indirect") for s in symbols(v.args[-1])} - {lane, *e.graph.symbols}
    varies = bool(sizes) or not isinstance(lane.size, int)
    if not chosen or any(v.op in ("load", "philox") for v in steps) or any(s.real for s in sizes) or varies and any(
            v not in nest.names for v in positions):
        return None
    try:
        found = replay(steps, GridHandler({}, {lane.name: torch.arange(size), **{s.name: s.hint for s in sizes}}, (size,), 1).step)
    except IndexError:
        return None
    inside, moves, steady, middle = {}, {}, torch.ones(size, dtype=torch.bool), size // 2
    for v in chosen:
        all_lanes = found[v].broadcast_to(size)
        if v.op == "indirect":
            moves[v] = step = (all_lanes[middle + 1] - all_lanes[middle]).item()
            all_lanes = all_lanes - step * torch.arange(size)
        there = all_lanes[middle].item()
        steady &= all_lanes == there
        inside[v] = to_text(step * lane.expr + there) if v.op == "indirect" else str(there).lower()
    ends = [-1, *(~steady).nonzero().flatten().tolist(), size]
    begin, end = max(k for k in ends if k <= middle) + 1, min(k for k in ends if k > middle)
    if end - begin < size // 2 or (begin, end) == (0, size):
        return None
    guarded = [v for v in needed if v.op == "load" and v.mask is not None and lane in v.mask.dims
               and not stays_inside(e.kernel.buffers[v.buffer].layout, v.index)]
    many_ends = size <= 4 * STEP * (size - (end - begin))
    narrow = any(e.kernel.buffers[s.buffer].dtype.itemsize < 4 for s in e.graph.stores)
    if many_ends and not narrow and not positions and all(along_lane(e, load.index, lane) == 1 for load in guarded):
        return None
    guards, masks = [], {}
    for load in guarded:
        terms = conjuncts(load.mask)
        holds = all(inside.get(t) == "true" for t in terms if lane in t.dims)
        if holds:
            guards += [t for t in terms if lane not in t.dims]
            masks[load.mask] = "true"
        elif not any(inside.get(t) == "false" for t in terms):
            return None
    if varies:
        begin, end = find_inside(e, function, nest, lane, inside, moves)
    return Interior(begin, end, inside | masks, moves, sorted(set(guards), key=in_order))


def find_inside(e: Emitter, function: Scope, nest: Scope, lane: Symbol, inside: dict[Value, str],
                moves: dict[Value, int]) -> tuple[str, str]:
    """Make `function` find the inside, if sizes vary, and return its names. moves: by how much the positions in `inside` move on."""
    loop, size, tests = child(function, (lane,)), f"({size_text(lane.size)})", []
    loop.names |= {v: text for v, text in nest.names.items() if v.dims == {lane}}
    for value in inside:
        text = get(e, value, loop)
        if value in moves:
            first, table = fresh(e, "first"), nest.names[value].partition("[")[0]
            function.lines.append(f"const int64_t {first} = {size} > 0 ? {table}[{size} / 2] - {moves[value]} * ({size} / 2) : 0;")
            inside[value] = f"{to_text(moves[value] * lane.expr)} + {first}"
        tests.append(f"{text} == {inside[value]}")
    as_there, begin, end = fresh(e, "same"), fresh(e, "begin"), fresh(e, "end")
    function.lines += [f"const auto {as_there} = [&](const int64_t {lane.name}) {{", *("  " + line for line in loop.lines),
                       f"  return {' && '.join(tests)};", "};", f"int64_t {begin} = {size} / 2, {end} = {begin};",
                       f"while ({begin} > 0 && {as_there}({begin} - 1)) {begin}--;",
                       f"while ({end} < {size} && {as_there}({end})) {end}++;"]
    return begin, end


def conjuncts(condition: Value) -> list[Value]:
    """Conditions that hold together if `condition` does."""
    return [c for a in condition.args for c in conjuncts(a)] if condition.op == "logical_and" else [condition]


def close_interior(e: Emitter, inner: Scope, pragma: list[str], lane: Symbol) -> None:
    """Put the lane loop `inner` into a function of a range, and its calls into the scope around."""
    around, found, size = inner.parent, e.interior, size_text(lane.size)
    holds = " && ".join(get(e, v, around) for v in found.rows)
    begin, end = (f"{holds} ? {k} : {size}" if holds else k for k in (found.begin, found.end))
    varies = isinstance(found.begin, str)
    copy = moved_at_once(e, child(around.parent, (lane,)), lane) if varies else []
    close(inner, [*([] if varies else pragma), for_(lane.name, "to", "from")])
    around.parent.lines += [
        *inlined(e, "const int64_t from, const int64_t to, const bool inside", copy + around.lines),
        f"const int64_t begin = {begin}, end = {end};", "run(begin, end, true);",
        for_("side", "2") + f" run(side ? end : 0, side ? {size} : begin, false);"]


def moved_at_once(e: Emitter, scope: Scope, lane: Symbol) -> list[str]:
    """Lines that copy the inside of a row at once, if all that happens there is that numbers which lie side by side are moved."""
    found, store = e.interior, e.graph.stores[0]
    value = store.value
    while value.op == "where" and value.args[0] in found.inside:
        value = value.args[1 if found.inside[value.args[0]] == "true" else 2]
    if len(e.graph.stores) > 1 or store.mode or store.mask is not None or value.op != "load" or value.buffer == store.buffer:
        return []
    buffers, moved = e.kernel.buffers, {s: found.moves[v] * lane.expr for s, v in e.graph.symbols.items() if v in found.moves}
    others = {s for access in (value, store) for s in symbols(substitute(access.index, moved) - lane.expr)}
    if buffers[value.buffer].dtype is not buffers[store.buffer].dtype or not (
            value.mask is None or found.inside.get(value.mask) == "true") or any(
            s is lane or s in e.graph.symbols and lane in e.graph.symbols[s].dims for s in others):
        return []
    source, target = (f"&{e.pointers[access.buffer]}[{index_text(e, access.index, scope)}]" for access in (value, store))
    copy = f"  if (from < to) __builtin_memmove({target}, {source}, (to - from) * sizeof({memory_type(value.dtype)}));"
    return ["if (inside) {", *(f"  {line}" for line in (f"const int64_t {lane.name} = from;", *scope.lines)),
            *of_loop(e, store.loop, copy), "  return;", "}"]


# %% [markdown]
# ## Halves, sixteen at a time
#
# A processor converts sixteen float16 numbers by one instruction, g++ one number by ten, since it makes no vectors with that instruction.
# Of bfloat16 numbers, which are the upper halves of floats, it makes vectors, of 32 numbers, whose parts it then exchanges. So the lane
# loop of a kernel that computes with halves is cut into *steps* of sixteen lanes: those numbers that lie side by side along the
# lane are converted before a step, and those it computes after it. Since a step has a fixed length, it is a few vectors without
# a loop, and the arrays between are registers. The sum of two float16 tensors takes half as long as when a block of 1,024 was converted.
#
# `half_blocks` gives each such access an array, before the lines of the loop are made; `close_lanes` adds the conversions,
# afterwards, when all that their addresses need has a name, and makes a function of a step. It is called for the whole steps
# and for what remains, which has a loop. Where a condition that varies along the lane guards a load, g++ makes vectors of a long loop only.
# Where there are halves, or sums of 32 bits along the lane, masks and bytes are converted as well, to and from integers. Of sixteen of them
# next to sixteen floats g++ makes no vectors, and a masked mean of halves took ten times as long as one of floats; sixteen bytes that are
# added up as integers it makes wider by halves of vectors, in memory, which took six times as long.
#
# What remains of a row of 47 numbers behind two steps is 15 lanes. g++ makes a vector of eight and one of four of them, and computes
# three one by one, which took more time than all the steps. A processor with AVX-512 loads and stores any part of sixteen numbers. There
# the last step has all lanes, also of a loop over floats, whose loads and stores then have arrays as well: zeros are loaded
# for the lanes too many (`mc_widen_f32`), what they compute is not stored, and a reduction takes its identity from them (`there`). So all
# that they do must be harmless (`ends_ragged`): no look-up of a position, no division of integers. A softmax of 47 floats takes a
# quarter of the time, a sum of 33 halves a third. (Of rows of eight numbers, of four floats, or three in a sum, g++ makes what is as fast
# or faster: a sum of 3 took 2.4 times as long. With a condition on the lane in place of the arrays, g++ drops the zeros and computes
# with what was in the register, or takes the loop apart where the condition changes: both take three times as long for some lengths.)

# %%
STEP = 16
WIDE = torch.backends.cpu.get_cpu_capability() == "AVX512"      # the processor can load and store a part of sixteen numbers
LONGEST_PADDED = 512         # of a longer row the last step is a small part
BYTES = {torch.bool: "u8", torch.uint8: "u8", torch.int8: "i8"}
CONVERTED = HALVES | BYTES | {torch.float32: "f32"}


def side_by_side(e: Emitter, access: Value, lane: Symbol) -> bool:
    """Does this load or store take what lies side by side along the lane, all of it or none?"""
    whole = access.mask is None or access.op == "load" and masks_whole_lanes(e, access, lane)
    return whole and along_lane(e, access.index, lane) == 1 and lane not in symbols(access.index - lane.expr)


def ends_ragged(lane: Symbol, values: Sequence[Value]) -> bool:
    """Does this lane loop, which computes `values`, end with less than a step, and are lanes too many harmless there?"""
    size, halves = lane.size, any(v.op == "load" and v.dtype in HALVES for v in values)
    as_fast = {STEP // 2} if halves else {STEP // 2, 4 if any(v.op == "store" for v in values) else 3}
    return WIDE and 2 < present(size) < LONGEST_PADDED and size % STEP != 0 and size not in as_fast and all(
        v.op in ("load", "store", "index", "constant") or v.op not in ("indirect", "philox") and
        (v.dtype.is_floating_point or v.dtype is torch.bool) for v in values if v.op == "store" or lane in v.dims)


def half_blocks(e: Emitter, scope: Scope, accesses: Iterable[Value], lane: Symbol, counts: bool = False, pad: bool = False) -> list[Value]:
    """Those of these loads and stores that read or write an array in the steps of a lane loop in `scope`. counts: it has sums of 32
    bits; pad: its last step may have more lanes than there are numbers."""
    accesses = [a for a in accesses if known_name(a, scope) is None]
    guarded = any(a.op == "load" and a.mask is not None and lane in a.mask.dims for a in accesses)
    e.padded = pad and not guarded and ends_ragged(lane, accesses)
    if guarded or isinstance(lane.size, int) and lane.size < STEP and not e.padded:
        return []
    converted = (*HALVES, torch.float32) if e.padded else HALVES
    chosen = [a for a in accesses if a.op in ("load", "store") and e.kernel.buffers[a.buffer].dtype in converted and
              (a.dtype if a.op == "load" else a.value.dtype) is not BITS and not (a.op == "store" and a.mode) and side_by_side(e, a, lane)]
    small = [a for a in accesses if (chosen or counts) and a.op in ("load", "store") and a.mask is None and side_by_side(e, a, lane) and
             (a.dtype if a.op == "load" else a.mode or a.value.dtype) == e.kernel.buffers[a.buffer].dtype in BYTES]
    if e.padded and not {a for a in accesses if a.op == "store" or a.op == "load" and lane in a.dims} == {*chosen, *small} > set():
        return half_blocks(e, scope, accesses, lane, counts)
    for access in chosen + small:
        block = fresh(e, "wide")
        scope.lines += of_loop(e, access.loop, f"alignas(64) {'int32_t' if access in small else 'float'} {block}[{STEP}];")
        e.blocks[access] = text = f"{block}[step]"
        if access.op == "load" and access in small:
            scope.names[access] = f"({text} != 0)" if access.dtype is torch.bool else text
        elif access.op == "load":
            scope.names[access] = text if access.mask is None else f"mc_choose<float>({lane_mask(e, access.mask, scope)}, {text}, 0)"
    return chosen + small


def close_lanes(e: Emitter, inner: Scope, pragma: list[str], lane: Symbol, first: Int, count: Int | str, halves: list[Value],
                width: int = 0, behind: Sequence[str] = ()) -> None:
    """Put the lane loop `inner`, of `count` lanes from `first` on, into the scope around, and that into the one around it:
    in steps if there are `halves`, or a `width` of them is asked for. behind: what follows each step."""
    around, define = inner.parent, f"const int64_t {lane.name} = {to_text(first + Symbol('lane').expr)};"
    if e.interior is not None:
        return close_interior(e, inner, pragma, lane)
    width = STEP if halves else width
    if not width:
        close(inner, [*pragma, for_("lane", str(count))], [define])
        return close(around, [])
    after = convert_halves(e, around, halves, lane, first + Symbol("at").expr)
    close(inner, [*pragma, for_("step", str(STEP) if e.padded else "steps")], ["const int64_t lane = at + step;", define])
    e.padded = False
    around.lines += [*behind, *after]
    rest = lane.size % width if isinstance(lane.size, int) else f"{count} - done"
    rest = [f"if (done < {count}) run(done, {rest});"] if rest else []
    around.parent.lines += [*inlined(e, "const int64_t at, const int64_t steps", around.lines), "int64_t done = 0;",
                            f"for (; done + {width} <= {count}; done += {width}) run(done, {width});", *rest]


def inlined(e: Emitter, parameters: str, lines: list[str]) -> list[str]:
    """The function `run`, whose body is `lines`. It has copies of all it reads, whose addresses would else be known, but arrays."""
    indexed, own = (set(re.findall(pattern, "\n".join(lines))) for pattern in (r"\b(\w+)\[", r"alignas\(64\) \w+ (\w+)\["))
    arrays = [f"&{name}" for name in sorted(indexed - own - set(e.pointers.values()))]
    return [f"const auto run = [{', '.join(['=', *arrays])}]({parameters}) __attribute__((always_inline)) {{",
            *("  " + line for line in lines), "};"]


def convert_halves(e: Emitter, scope: Scope, accesses: list[Value], lane: Symbol, first: Int) -> list[str]:
    """Add what is converted before a step, whose lanes begin at `first`, and return what is converted after it."""
    after = []
    for a in accesses:
        place = index_text(e, substitute(a.index, {lane: first}), scope) if a.mask is None else first_position(e, a, lane, first, scope)
        place, half = f"&{e.pointers[a.buffer]}[{place}]", e.kernel.buffers[a.buffer].dtype
        block = e.blocks.pop(a).removesuffix("[step]")
        if a.op == "load":
            scope.lines += of_loop(e, a.loop, f"mc_widen_{CONVERTED[half]}({block}, {place}, steps);")
        else:
            kind = "cut" if half is torch.bfloat16 and a.value.half == half else CONVERTED[half]
            after += of_loop(e, a.loop, f"mc_narrow_{kind}({place}, {block}, steps{', true' if e.padded else ''});")
    return after
