# %% [markdown]
# # From a kernel to Triton source
#
# Fusion decided which loops share a launch. What is left is to write the program that one block of the GPU
# runs. Three steps:
#
# 1. *Link* the bodies of all loops into one graph of values (chapter 8, `values.py`).
# 2. *Plan*: choose the axes and block sizes, and for reductions whether a row is held in registers or
#    walked along several times (`plan.py`).
# 3. *Print*: one line per value (`printer.py`), with the user's source line behind it as a comment.
#
# For `torch.relu(x) + 1` over 1,000 elements that is (without the comments, and with an `XBLOCK` of 128)
#
# ```python
# xpid = tl.program_id(0)
# xindex = xpid * XBLOCK + tl.arange(0, XBLOCK)
# xmask = xindex < 1000
# tmp0 = tl.load(in0 + (xindex), xmask)
# tmp2 = tl.maximum(tmp0, 0.0, propagate_nan=tl.PropagateNan.ALL)
# tmp4 = tmp2 + 1.0
# tl.store(out0 + (xindex), tmp4, xmask)
# ```
#
# Inductor does the same with strings through a handler object (`V.ops`) and keeps the tile shape of a value
# in a class per variable. Here a value's shape is the set of axes that it varies along, known before anything
# is printed.

# %%
import math

from ..ch01_graphs.symbolic import Int, product, substitute, symbols, to_text
from ..ch07_loops.ir import Loop, Value
from ..ch08_fusion.dependencies import storage_size
from ..ch08_fusion.kernel import Kernel, KernelList, KernelSource
from ..ch08_fusion.values import LinkedKernel, link
from ..errors import Unsupported
from . import heuristics, reductions
from .ops import convert, pointer_type, triton_type
from .passes import narrow_positions, schedule_passes, with_online_softmax
from .plan import draws_random, plan
from .printer import Printer, comment, describe_reduction, print_step, value_text
from .rules.prelude import prelude_for
from .tiling import Axis, Indexer, divides, fits_int32

# %% [markdown]
# ## Looped reductions
#
# A row that no tile holds is walked along, once for each reduction that needs the one before, and once more for what is
# computed from them. For `x - x.mean(1, keepdim=True)` with rows of 50,257 numbers there are two such passes:
#
# ```python
# red1_acc = tl.full([XBLOCK, RBLOCK], 0, tl.float32)
# for roffset in range(0, 50257, RBLOCK):
#     rindex = roffset + rbase
#     rmask = rindex < 50257
#     tmp0 = tl.load(in0 + (50257*xindex + rindex), rmask, eviction_policy="evict_last")
#     red1_acc = tl.where(rmask, red1_acc + tmp0, red1_acc)
# red1 = tl.sum(red1_acc, 1)[:, None].to(tl.float32)
# tmp3 = tl.div_rn(red1, 50257.0)
# for roffset in range(0, 50257, RBLOCK):
#     rindex = roffset + rbase
#     rmask = rindex < 50257
#     tmp0 = tl.load(in0 + (50257*xindex + rindex), rmask, eviction_policy="evict_first")
#     tmp4 = tmp0 - tmp3
#     tl.store(out0 + (50257*xindex + rindex), tmp4, rmask)
# ```
#
# The passes are printed one after the other. The start of an accumulator goes before the loop, its fold
# after it. Loads that a later pass repeats ask the cache to keep the line (`evict_last`), the last ones to
# let it go.

# %%
def print_passes(p: Printer) -> None:
    passes = schedule_passes(p.graph)
    for k, (before, inside) in enumerate(passes):
        for step in before:
            if step.op != "reduce":
                print_step(p, step)
        if inside:
            earlier, later = ({s for _, steps in part for s in steps}
                              for part in (passes[:k], passes[k + 1:]))
            p.policy = {s: "evict_last" if s in later else "evict_first" for s in inside
                        if s.op == "load" and (s in later or s in earlier)}
            print_pass(p, inside)
            p.policy = {}


# %% [markdown]
# One pass is printed into a list of its own, because the lines in front of the loop are only known when its body
# has been printed: each reduction in it contributes a start, an update in the loop, and an end. Then the parts are
# put together, with the index of the row and its mask at the top of the loop's body.

# %%
def print_pass(p: Printer, inside: list[Value]) -> None:
    """One loop along the row."""
    outer, p.lines = p.lines, []
    ends: list[tuple[str, Loop | None]] = []
    p.indexer.defs.pop("r", None)
    for step in inside:
        if step.op != "reduce":
            print_step(p, step)
            continue
        r = describe_reduction(p, step)
        start, update, end, p.names[step] = reductions.looped(r, "roffset // RBLOCK")
        outer += [(s, step.loop) for s in start]
        for s in update:
            p.say(s, step.loop)
        ends += [(s, step.loop) for s in end]
    rnumel = to_text(p.axes[-1].numel, truncates=True)
    head = ["rindex = roffset + rbase"]
    if "r" in p.masks:
        head.append(f"rmask = rindex < {rnumel}")
    head += [f"{n} = {text}" for n, text in p.indexer.defs.pop("r", {}).items()]
    body = [(s, None) for s in head] + p.lines
    loop = (f"for roffset in range(0, {rnumel}, RBLOCK):", None)
    p.lines = [*outer, loop, *(("    " + s, l) for s, l in body), *ends]

# %% [markdown]
# ## Rows, and columns on the way
#
# A program with `walked` variables takes a block of rows, a tile of whole rows at a time. Each tile is
# treated as in a persistent reduction, and added to the tiles of column sums. These are folded and stored
# behind the loop.
#
# There are few programs, of one warp each, so nobody else keeps the memory busy while a program computes. All loads of a tile therefore
# stand in front of its arithmetic, and are on their way together; Triton's compiler would not move one over a store. The same holds
# where random numbers are drawn.

# %%
def loads_first(g: LinkedKernel) -> list[Value]:
    """The steps of a kernel, those loads in front whose address and condition are known without a load. A load wants what was there before
    the kernel: what the kernel itself has written is a value already."""
    early = [s for s in g.steps if s.op == "load" and s.mask is None and g.symbols.keys().isdisjoint(symbols(s.index))]
    return [*early, *(s for s in g.steps if s not in set(early))]


def print_walk(p: Printer) -> None:
    kernel, (x, r) = p.graph.kernel, p.axes
    behind = Indexer([Axis("block", kernel.blocks, 0, 2), r], p.indexer.index_type)
    sums = {s: f"sum{p.number[s]}" for s in p.graph.steps if s.op == "column_sum"}
    ends: list[tuple[str, Loop | None]] = []
    for step in loads_first(p.graph):
        if step in sums:
            text = convert(value_text(p, step.args[0]), step.args[0].dtype, step.dtype)
            p.say(f"{sums[step]} += " + (f"tl.where({p.masks['x']}, {text}, 0)" if "x" in p.masks else text),
                  step.loop)
        elif step.op == "store" and step.value in sums:
            target = kernel.buffers[step.buffer].dtype
            text = convert(f"tl.sum({sums[step.value]}, 0)[None, :]", step.value.dtype, target)
            pointer = f"{p.parameters[step.buffer]} + ({behind.text(step.index)})"
            mask = f", {p.masks['r']}" if "r" in p.masks else ""
            ends.append((f"tl.store({pointer}, {text}{mask})", step.loop))
        else:
            print_step(p, step)
    length = to_text(product(v.size for v in kernel.walked))
    head = axis_lines(p, x, f"blockindex * {length} + xoffset + ", f"(blockindex + 1) * {length}")
    starts = [f"blockindex = tl.program_id(0){p.cast}", *axis_lines(p, r),
              *(f"{name} = tl.zeros([XBLOCK, RBLOCK], {triton_type(s.dtype)})" for s, name in sums.items()),
              f"for xoffset in range(0, {length}, XBLOCK):"]
    names = [f"{n} = {text}" for defs in behind.defs.values() for n, text in defs.items()]
    p.lines = [*((s, None) for s in starts), *(("    " + s, None) for s in head),
               *(("    " + s, loop) for s, loop in p.lines), *((s, None) for s in names), *ends]

# %% [markdown]
# ## The whole kernel
#
# In front of the statements stand the indices: the number of the program, for two axes taken apart by a division, the positions
# of its tile on each axis, a mask where the tile can hang over the end, and the parts of an index that addresses use.

# %%
def axis_lines(p: Printer, a: Axis, start: str = "", end: str | None = None) -> list[str]:
    """Statements that define the index of an axis, its mask, and the parts of it that offsets use."""
    lines = [f"{a.name}index = {start}tl.arange(0, {a.block}){a.slot}{p.cast}"]
    if a.name in p.masks:
        lines.append(f"{p.masks[a.name]} = {a.name}index < {end or to_text(a.numel, truncates=True)}")
    return lines + [f"{n} = {text}" for n, text in p.indexer.defs.get(a.name, {}).items()]


def header(p: Printer, looped: bool, program: str) -> list[str]:
    """Statements that define the axes' indices and masks. `program`: the text of its number."""
    lines = [f"xpid = {program}"]
    if "y" in p.everything:
        count = f"(({to_text(p.axes[1].numel, truncates=True)} + XBLOCK - 1) // XBLOCK)"
        lines = [f"xpid = {program} % {count}", f"ypid = {program} // {count}"]
    for a in p.axes:
        if a.name != "r":
            lines += axis_lines(p, a, f"{a.name}pid{p.cast} * {a.block} + ")
        elif looped:
            lines.append(f"rbase = tl.arange(0, RBLOCK){a.slot}{p.cast}")
        else:
            lines += axis_lines(p, a)
    return lines

# %% [markdown]
# The statements are printed in one of three ways: straight, pass by pass for a row that does not fit a tile, or as a
# walk for column sums on the way along rows. An axis needs a mask only if its block does not divide its length.

# %%
def print_kernel(graph: LinkedKernel, axes: list[Axis], config: heuristics.Config, index_type: str, program: str = "tl.program_id(0)",
                 exact: bool = False) -> tuple[Printer, list[tuple[str, Loop | None]]]:
    """The statements of a kernel. `exact`: blocks are full, so there are no masks."""
    kernel = graph.kernel
    lengths = {a.name: a.numel for a in axes}
    if kernel.walked:
        lengths["x"] = product(v.size for v in kernel.walked)
    masks = {} if exact else {n: f"{n}mask" for n, length in lengths.items() if not divides(config.blocks[n], length)}
    parameters = {b: b if b.isidentifier() else f"buffer{k}" for k, b in enumerate(kernel.tensors)}
    p = Printer(graph, axes, Indexer(axes, index_type), masks, parameters)
    if config.blocks.get("y") == heuristics.ROWS and config.blocks["x"] >= 16 and not masks:      # a product needs 16 columns
        p.rows = axes[0].vars
    looped = bool(kernel.reduction_vars) and not config.persistent
    if looped:
        print_passes(p)
    elif kernel.walked:
        print_walk(p)
    else:
        for step in loads_first(graph) if draws_random(graph) else graph.steps:
            print_step(p, step)
    return p, p.lines if kernel.walked else [(line, None) for line in header(p, looped, program)] + p.lines

# %% [markdown]
# `emit_triton` goes through the stages in order. The kernel's bodies are linked to one graph, and pairs of
# a maximum and a sum of exponentials become one reduction. The plan gives axes and block sizes, unless the
# caller brings some. Positions are 32 bits wide if every buffer is small enough. Then the statements are printed.
#
# What is left is to put the text together (`source_of`): the signature, with block sizes as constants of the compilation,
# the header that computes indices and masks, the statements with the user's lines as comments, and in front
# of everything the helpers that are called. `lines` says for each line of the text which loop it came from;
# the explorer reads it.

# %%
def emit_triton(kernel: Kernel, config: heuristics.Config | None = None) -> KernelSource:
    """Triton source for `kernel`. `options`: `signature` (argument -> Triton type), `constants` (block
    sizes), `grid` (the number of programs, an expression over the size symbols), `num_warps`. Raises
    Unsupported."""
    if isinstance(kernel, KernelList):
        return emit_list(kernel)
    graph = with_online_softmax(link(kernel))
    axes, default = plan(graph)
    config = config or default
    graph, index_type = with_index_type(kernel, graph, [product(a.numel for a in axes)])
    p, body = print_kernel(graph, axes, config, index_type)
    signature = {p.parameters[b]: pointer_type(kernel.buffers[b].dtype) for b in kernel.tensors}
    wide = index_type == "tl.int64" or any(s.real for s in kernel.symbols)
    signature |= {s.name: "i64" if wide else "i32" for s in kernel.symbols}
    grid = " * ".join(f"(({to_text(a.numel)} + {config.blocks[a.name] - 1}) // {config.blocks[a.name]})"
                      for a in axes if a.name != "r")
    if kernel.walked:
        grid = to_text(product(v.size for v in kernel.blocks))
    constants = {a.block: config.blocks[a.name] for a in axes}
    return source_of(kernel, body, signature, constants, grid, config, {id(loop): k for k, loop in enumerate(kernel.loops)})


def with_index_type(kernel: Kernel, graph: LinkedKernel, spaces: list[Int]) -> tuple[LinkedKernel, str]:
    """Offsets are 32 bits wide where all buffers and iteration spaces are that small."""
    sizes = [storage_size(b) for n, b in kernel.buffers.items() if n not in kernel.local]
    return (narrow_positions(graph), "tl.int32") if fits_int32([*sizes, *spaces]) else (graph, "tl.int64")


def source_of(kernel: Kernel, body, signature: dict, constants: dict, grid: str, config: heuristics.Config,
              position: dict[int, int], **options) -> KernelSource:
    """The source with these statements. position: of loops, by id."""
    head = f"def {kernel.name}({', '.join([*signature, *(f'{c}: tl.constexpr' for c in constants)])}):"
    text = "\n".join([head, *(f"    {s}  # {c}" if (c := comment(loop)) else f"    {s}" for s, loop in body)]) + "\n"
    before = ("import triton\nimport triton.language as tl\nfrom triton.language.extra import libdevice\n\n\n"
              + prelude_for(text) + "@triton.jit\n")
    lines = [None] * (before.count("\n") + 1)
    for statement, loop in body:
        lines += [position.get(id(loop))] * (statement.count("\n") + 1)
    return KernelSource(kernel.name, "triton", before + text, dict(
        signature=signature, constants=constants, grid=grid, num_warps=config.num_warps,
        device=kernel.device.index, **options), (*lines, None))

# %% [markdown]
# ## A list of kernels
#
# A program of a list (chapter 8, `lists.py`) looks its piece up: `pieces` says for each program which piece it works
# on, and the piece's row of `table` has the number of its first program, its parameters, and the addresses of its
# tensors, as integers. The rest of the text is the kernel's as if it were alone, with the row's values for arguments.
#
# What the compiler of Triton knows about arguments, it has to be told about what comes from memory: that addresses are
# multiples of 16 (`ALIGN`; where they are not, another version runs), and sizes of a power of two. A mask at an unknown
# size would split each load of 16 bytes into words. Where sizes are odd, all programs but the last of a piece have full
# blocks, and take a branch without masks.

# %%
def emit_list(kernel: KernelList) -> KernelSource:
    """The source of a list with one body. Further options: `pieces`, for each piece the number of its programs, its
    parameters and which tensors are its own (`launch.py` makes the tables of it)."""
    if len(kernel.bodies) > 1:
        raise Unsupported("a list of different bodies is for the CPU")
    body = kernel.bodies[0]
    graph = with_online_softmax(link(body))
    values = [dict(zip(body.symbols, piece.parameters)) for piece in kernel.pieces]
    axes, config = plan(graph, values)
    spaces = [substitute(product(a.numel for a in axes), v) for v in values]
    if set(config.blocks) == {"x"}:
        accesses = sum(s.op in ("load", "store") for s in graph.steps)
        config = heuristics.pointwise_config(sum(spaces), accesses)
    graph, index_type = with_index_type(kernel, graph, spaces)
    own = body.symbols[:len(kernel.pieces[0].parameters)]
    width = 1 + len(own) + len(body.tensors)
    lines = ["piece = tl.load(pieces + tl.program_id(0))", f"row = table + piece * {width}",
             "program = tl.program_id(0) - tl.load(row).to(tl.int32)"]
    exact = False
    for k, s in enumerate(own):
        column = [piece.parameters[k] for piece in kernel.pieces]
        even = math.gcd(*column, 16)
        exact = exact or even < 16
        load = f"tl.load(row + {1 + k}).to({index_type})"
        lines.append(f"{s.name} = {load}" if even == 1 else f"{s.name} = tl.multiple_of({load}, {even})")
    for k, name in enumerate(body.tensors):
        kind = triton_type(body.buffers[name].dtype)
        lines.append(f"{name} = tl.multiple_of(tl.load(row + {1 + len(own) + k}).to(tl.pointer_type({kind})), ALIGN)")
    statements = [(line, None) for line in lines]
    p, rest = print_kernel(graph, axes, config, index_type, "program")
    if exact and list(p.masks) == ["x"] and len(axes) == 1:
        _, unmasked = print_kernel(graph, axes, config, index_type, "program", exact=True)
        full = f"if program * XBLOCK + XBLOCK <= {to_text(axes[0].numel)}:"
        statements += [(full, None), *indented(unmasked), ("else:", None), *indented(rest)]
    else:
        statements += rest
    counts = [math.prod(-(-substitute(a.numel, v) // config.blocks[a.name]) for a in axes if a.name != "r") for v in values]
    places = {id(loop): k for k, loop in enumerate(kernel.loops)}
    position = {id(new): places[id(old)] for new, old in zip(body.loops, kernel.pieces[0].kernel.loops)}
    return source_of(
        kernel, statements, {"pieces": "*i32", "table": "*i64"} | {s.name: "i64" for s in kernel.symbols},
        {a.block: config.blocks[a.name] for a in axes} | {"ALIGN": 16}, str(sum(counts)), config, position,
        pieces=[(n, piece.parameters, piece.tensors) for n, piece in zip(counts, kernel.pieces)], tensors=len(kernel.tensors))


def indented(lines: list[tuple[str, Loop | None]]) -> list[tuple[str, Loop | None]]:
    return [("    " + line, loop) for line, loop in lines]
