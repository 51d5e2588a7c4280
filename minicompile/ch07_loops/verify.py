# %% [markdown]
# # What a program must obey, and how it reads
#
# `verify` is the specification of this chapter's output: names are defined before use, every index speaks
# only of variables that exist, every buffer is written by one node. The driver runs it in debug mode and the
# tests run it always.
#
# `written` grows along the program: constants and inputs are there from the beginning, each node may read what is in it and
# adds what it writes. A buffer that updates another in place needs that one to be written before. `verify_loop` does the same
# inside of a body, where the order is that of its values, and checks what code generators do not ask: a load has the dtype of
# its buffer, a store has none, an index mentions loop variables, sizes and the symbols of gathers only.
#
# Take the program that subtracts from each row its mean (`print_program` below):
#
#     inputs: x
#     loop0: for i0 < 64 reduce r0 < 256    # sum_dim_int_list
#         v0: f32 = load x[256*i0 + r0]
#         v1: f32 = reduce(sum, v0)
#         buf0[i0] = v1
#     loop1: for i0 < 64, i1 < 256    # div_tensor, sub_tensor
#         v0: f32 = load x[256*i0 + i1]
#         v1: f32 = load buf0[i0]
#         v2: f32 = constant(256.0)
#         v3: f32 = truediv(v1, v2)
#         v4: f32 = sub(v0, v3)
#         buf1[256*i0 + i1] = v4
#     return buf1[64, 256]:256,1
#
# A pass that put `loop1` in front of `loop0` would be told
#
#     loop1, load2: buf0 is not written yet
#
# `verify_devices` is run in every program, debug mode or not: a kernel that follows an address of another device's memory ends the
# process. Only a number on the CPU may be read by the loops of a GPU, since the host reads it for them.
#
# Whoever adds an operation to the IR adds it to `SCALAR` (`reference.py`), which says what it computes, and it is known here. One that
# is more than a function of its operands is named in `STRUCTURAL`.

# %%
from ..ch01_graphs.graph import dtype_text
from ..ch01_graphs.symbolic import Expr, Symbol, symbols, to_text
from ..errors import Unsupported
from .ir import Buffer, Loop, Program, Value, View, written_by
from .reference import REDUCE, SCALAR

STRUCTURAL = {"load", "store", "reduce", "index", "indirect", "constant", "to_dtype", "bitcast", "round_to",
              "where", "get", "philox"}
KNOWN_OPERATIONS = SCALAR.keys() | STRUCTURAL
REDUCE_KINDS = REDUCE.keys() | {"argmax", "argmin"}


def verify(program: Program) -> None:
    """Raise AssertionError (of devices: Unsupported) with a sentence about the first rule that `program` breaks."""
    written = set(program.constants) | {n for n in program.inputs if n in program.buffers}
    sizes = {*program.symbols.values(), *program.numbers}
    for node in program.nodes:
        if isinstance(node, Loop):
            verify_loop(node, program.buffers, written, sizes)
        else:
            for name in node.inputs:
                assert name in written, f"{node.name} reads {name} before anything writes it"
        for name in written_by(node):
            assert name in program.buffers, f"{node.name} writes {name}, which is no buffer"
            assert name not in written, f"{name} is written twice"
            alias = program.buffers[name].alias_of
            assert alias is None or alias in written, f"{node.name} updates {alias} before that is written"
            written.add(name)
    verify_devices(program)
    for output in program.outputs:
        assert not isinstance(output, View) or output.buffer in written, f"output {output} is never written"


def verify_devices(program: Program) -> None:
    """Raise Unsupported if a loop reads what lies on another device than its results, and is no number on the CPU."""
    sizes = {*program.symbols.values(), *program.numbers}
    for loop in program.nodes:
        for load in loop.loads if isinstance(loop, Loop) else ():
            own, there = program.buffers[loop.outputs[0]].device, program.buffers[load.buffer].device
            number = there.type == "cpu" and load.dtype.is_floating_point and symbols(load.index) <= sizes
            if there != own and not number:
                raise Unsupported(f"{loop.name} runs on {own} and reads {load.buffer} on {there}", loop.location)


def verify_loop(loop: Loop, buffers: dict[str, Buffer], written: set, sizes: set) -> None:
    known = {*loop.vars, *loop.reduction_vars, *sizes, *(v.args[1] for v in loop.body if v.op == "indirect")}
    before: set[Value] = set()
    for v in loop.body:
        where = f"{loop.name}, {v!r}"
        assert v.op in KNOWN_OPERATIONS, f"{where}: unknown operation"
        assert (v.dtype is None) == (v.op == "store"), f"{where}: dtype {v.dtype}"
        assert before.issuperset(v.operands), f"{where}: uses a later value"
        assert {a for a in v.args if type(a) is Value} <= before, f"{where}: an argument is no operand"
        for a in v.args:
            assert not isinstance(a, Expr) or symbols(a) <= known, f"{where}: {a} uses unknown variables"
        if v.op == "load":
            assert v.buffer in written, f"{where}: {v.buffer} is not written yet"
            assert buffers[v.buffer].dtype == v.dtype, f"{where}: wrong dtype"
        elif v.op == "reduce":
            assert v.args[0] in REDUCE_KINDS and len(v.args) == 3, f"{where}: bad reduction"
        before.add(v)

# %% [markdown]
# ## Printing
#
# A loop is printed as a head with its variables, then one line for each value of its body. Values have
# numbers in the order of the body; a reader of the text can follow each operand upwards. The comment names
# the nodes of the graph that went into the loop.

# %%
def print_loop(loop: Loop) -> str:
    """A loop as text, one value a line."""
    names = {v: f"v{i}" for i, v in enumerate(loop.body)}

    def ranges(variables):
        return ", ".join(f"{v.name} < {v.size}" for v in variables)

    def show(a) -> str:
        return names[a] if type(a) is Value else index_words(a)

    head = f"{loop.name}: for {ranges(loop.vars) or '()'}"
    if loop.reduction_vars:
        head += f" reduce {ranges(loop.reduction_vars)}"
    lines = [head + (f"    # {', '.join(loop.origins)}" if loop.origins else "")]
    for v in loop.body:
        if v.op in ("load", "store"):
            text = f"{v.buffer}[{show(v.index)}]" + (f" if {names[v.mask]}" if v.mask else "")
        if v.op == "store":
            lines.append(f"    {text} {'+=' if v.mode else '='} {names[v.value]}")
            continue
        text = f"load {text}" if v.op == "load" else f"{v.op}({', '.join(show(a) for a in v.args if a is not None)})"
        lines.append(f"    {names[v]}: {dtype_text(v.dtype)} = {text}")
    return "\n".join(lines)


def index_words(a) -> str:
    return to_text(a) if isinstance(a, Expr) else a.name if isinstance(a, Symbol) else \
        a if isinstance(a, str) else str(a).removeprefix("torch.")


def print_program(program: Program) -> str:
    """The whole program as text."""
    def place(v):
        if not isinstance(v, View):
            return str(v)
        offset = f"@{index_words(v.layout.offset)}" if v.layout.offset != 0 else ""
        return f"{v.buffer}{list(v.layout.size)}{offset}:{','.join(map(index_words, v.layout.stride))}"

    def argument(a):
        if isinstance(a, (list, tuple)) and not isinstance(a, View):
            return "[" + ", ".join(map(argument, a)) + "]"
        return place(a) if isinstance(a, View) else str(a).removeprefix("torch.")

    lines = [f"inputs: {', '.join(program.inputs)}"]
    for node in program.nodes:
        if isinstance(node, Loop):
            lines.append(print_loop(node))
        else:
            args = [argument(a) for a in node.args] + [f"{k}={argument(v)}" for k, v in node.kwargs.items()]
            lines.append(f"{node.name}: {', '.join(map(str, node.outputs))} = {node.op}({', '.join(args)})")
    lines.append(f"return {', '.join(place(o) for o in program.outputs)}")
    return "\n".join(lines)
