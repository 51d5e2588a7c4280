# %% [markdown]
# # From fused loops to one graph of values
#
# A kernel arrives as a list of loop bodies that talk to each other through buffers. The first thing the C++
# backend does is to link them: a load of what an earlier body stored becomes that value, equal loads and
# equal operations become one, and every value learns two things that decide where its statement will stand:
#
# - `dims`, the loop variables it depends on. A value that does not depend on the innermost variable stands
#   outside the innermost loop.
# - `phase`, the number of complete reductions that must have run before it. In `x - mean(x)` the subtraction
#   has phase 1: it cannot share a loop with the sum, however much we fuse, because the sum needs the whole
#   row first.

# %%
from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..ch01_graphs.symbolic import Expr, Int, Symbol, substitute, symbols
from ..ch07_loops.ir import Inst, Loop, Ref
from ..ch08_fusion.kernel import Kernel
from ..errors import Unsupported
from .ops import EXPENSIVE


@dataclass(eq=False)
class Value:
    """One computed value. `args` hold Values, index expressions and constants."""

    op: str
    args: tuple
    dtype: torch.dtype
    dims: frozenset[Symbol]
    phase: int
    loop: Loop

    @property
    def operands(self) -> list["Value"]:
        return [a for a in self.args if isinstance(a, Value)]


@dataclass(eq=False)
class Store:
    """A write to memory: `element` says whether it happens for each element of a reduction's row, or once per
    row."""

    buffer: str
    index: Int
    value: Value
    mode: str | None
    mask: Value | None
    element: bool
    loop: Loop


@dataclass
class Linked:
    """The values of a kernel: `reductions` in order, `stores` in order, `indirect` what each indirect symbol
    stands for."""

    kernel: Kernel
    reductions: list[Value] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    indirect: dict[Symbol, Value] = field(default_factory=dict)
    known: dict = field(default_factory=dict)

# %% [markdown]
# ## The handler
#
# Linking is a `replay`-like walk: each instruction becomes a `Value`, found again by its key if an equal one
# exists. A buffer written in the kernel is remembered with the index it was written at. A later load at that
# index is the value; a load at another index would need an element that perhaps another thread has not
# written yet, which fusion never produces, so it is refused.

# %%
@dataclass
class _State:
    linked: Linked
    rows: frozenset[Symbol]                       # the kernel's reduction variables
    written: dict[str, tuple[Int, Value]] = field(default_factory=dict)
    version: dict[str, int] = field(default_factory=dict)


def link(kernel: Kernel) -> Linked:
    """Link the loops of `kernel`. Raises Unsupported when a load cannot be resolved."""
    state = _State(Linked(kernel), frozenset(kernel.reduction_vars))
    for loop in kernel.loops:
        _link_loop(state, loop)
    return state.linked


def root(kernel: Kernel, name: str) -> str:
    """The buffer whose memory `name` lives in."""
    while name in kernel.buffers and kernel.buffers[name].alias_of is not None:
        name = kernel.buffers[name].alias_of
    return name


def _make(state: _State, loop: Loop, op: str, args: tuple, dtype: torch.dtype, dims=frozenset(),
          phase: int = 0, key=None) -> Value:
    linked = state.linked
    for a in args:
        if isinstance(a, Value):
            dims, phase = dims | a.dims, max(phase, a.phase)
        elif isinstance(a, Expr):
            for s in symbols(a):
                source = linked.indirect.get(s)
                if source is not None:
                    dims, phase = dims | source.dims, max(phase, source.phase)
                elif s.size is not None and not (s in kernel_sizes(linked.kernel)):
                    dims = dims | {s}
    key = (op, tuple(id(a) if isinstance(a, Value) else (type(a), repr(a)) for a in args), dtype, key)
    if key not in linked.known:
        linked.known[key] = Value(op, args, dtype, frozenset(dims), phase, loop)
    return linked.known[key]


def kernel_sizes(kernel: Kernel) -> tuple[Symbol, ...]:
    return kernel.symbols


def _link_loop(state: _State, loop: Loop) -> None:
    values: list = []
    renamed: dict[Symbol, Int] = {}
    for inst in loop.body:
        args = [values[a.id] if type(a) is Ref else substitute(a, renamed) if isinstance(a, Expr) and renamed
                else a for a in inst.args]
        handler = _HANDLERS.get(inst.op, _link_operation)
        values.append(handler(state, loop, inst, args, renamed))


def _link_operation(state, loop, inst: Inst, args, renamed):
    kinds = [a.dtype for a in args if isinstance(a, Value)]
    if inst.op in ("round_to",):
        return _make(state, loop, inst.op, tuple(args), inst.dtype)
    args = [a if isinstance(a, Value) else _make(state, loop, "constant", (a,), kinds[0] if kinds
                                                 else inst.dtype) for a in args]
    return _make(state, loop, inst.op, tuple(args), inst.dtype)


def _link_load(state, loop, inst: Inst, args, renamed):
    buffer, index, mask = args[0], args[1], args[2] if len(args) > 2 else None
    kernel = state.linked.kernel
    if buffer not in state.written:
        version = state.version.get(root(kernel, buffer), 0)
        return _make(state, loop, "load", (buffer, index, mask), inst.dtype, key=version)
    where, value = state.written[buffer]
    if where != index:
        raise Unsupported(f"kernel {kernel.name} reads {buffer} at {index} after writing it at {where}",
                          loop.location)
    if mask is not None:
        zero = _make(state, loop, "constant", (0,), value.dtype)
        return _make(state, loop, "where", (mask, value, zero), value.dtype)
    return value


def _link_store(state, loop, inst: Inst, args, renamed):
    buffer, index, value, mode = args[:4]
    mask = args[4] if len(args) > 4 else None
    kernel, dtype = state.linked.kernel, state.linked.kernel.buffers[args[0]].dtype
    if value.dtype != dtype:
        value = _make(state, loop, "to_dtype", (value,), dtype)
    reducing = bool(loop.reduction_vars)
    over = frozenset(loop.vars) | frozenset(loop.reduction_vars)
    element = bool(symbols(index) & state.rows) if reducing else bool(over & state.rows)
    if mode is None and mask is None:
        state.written[buffer] = (index, value)
    if buffer not in kernel.local:
        state.linked.stores.append(Store(buffer, index, value, mode, mask, element, loop))
        memory = root(kernel, buffer)
        state.version[memory] = state.version.get(memory, 0) + 1
    return None


def _link_reduce(state, loop, inst: Inst, args, renamed):
    kind, value = args[0], args[1]
    index = args[2] if len(args) > 2 else None
    linked = state.linked
    if not loop.reduction_vars:
        return _reduce_one(state, loop, kind, value, index, inst.dtype)
    if frozenset(loop.reduction_vars) != state.rows:
        raise Unsupported("reductions over different variables in one kernel", loop.location)
    operands = (kind, value, index) if index is not None else (kind, value)
    key = ("reduce", kind, id(value), repr(index), inst.dtype)
    if key in linked.known:
        return linked.known[key]
    result = Value("reduce", operands, inst.dtype, frozenset(linked.kernel.vars), value.phase + 1, loop)
    linked.known[key] = result
    linked.reductions.append(result)
    return result


def _reduce_one(state, loop, kind: str, x: Value, index, dtype):
    """A reduction over a single element, whose variable (of size 1) is gone. Several results come as a
    tuple."""
    def make(op, *args, dtype=x.dtype):
        return _make(state, loop, op, args, dtype)
    zero, one = (make("constant", n, dtype=x.dtype) for n in (0, 1))
    rest = make("sub", x, x)                       # 0, or NaN where x is not finite
    if kind == "welford":
        return x, make("mul", rest, rest), one
    if kind == "softmax":
        empty = make("eq", x, make("constant", float("-inf")), dtype=torch.bool)
        return x, make("where", empty, zero, make("exp", rest))
    if kind in ("argmax", "argmin"):
        return make("index", index, dtype=torch.int64)
    return make("to_dtype", x, dtype=dtype)


def _link_get(state, loop, inst: Inst, args, renamed):
    source, i = args
    return source[i] if isinstance(source, tuple) else _make(state, loop, "get", (source, i), inst.dtype)


def _link_indirect(state, loop, inst: Inst, args, renamed):
    value, symbol, size = args
    checked = _make(state, loop, "indirect", (value, size), torch.int64)
    unique = next((s for s, v in state.linked.indirect.items() if v is checked), None)
    if unique is None:
        unique = Symbol(f"ind{len(state.linked.indirect)}", size)
        state.linked.indirect[unique] = checked
    renamed[symbol] = unique.expr
    return checked


_HANDLERS = {
    "load": _link_load, "store": _link_store, "reduce": _link_reduce, "indirect": _link_indirect,
    "index": lambda state, loop, inst, args, renamed: _make(state, loop, "index", (args[0],), torch.int64),
    "constant": lambda state, loop, inst, args, renamed: _make(state, loop, "constant", (args[0],),
                                                               inst.dtype),
    "get": _link_get,
}

# %% [markdown]
# ## What a pass needs
#
# The reductions of phase `p` run in pass `p`, a loop over the row. `needed` lists the values that a pass
# computes per element, so that one can see which of them two passes would compute twice.

# %%
def operands_of(linked: Linked, value: Value) -> list[Value]:
    """The Values that computing `value` needs, those behind its indirect indices included."""
    found = value.operands
    for a in value.args:
        if isinstance(a, Expr):
            found += [linked.indirect[s] for s in symbols(a) if s in linked.indirect]
    return found


def needed(linked: Linked, roots: list[Value], is_element) -> set[Value]:
    """All values with `is_element(value)` that the `roots` are computed from."""
    seen: set[Value] = set()
    stack = list(roots)
    while stack:
        value = stack.pop()
        if value in seen or not is_element(value) or value.op == "reduce":
            continue
        seen.add(value)
        stack += operands_of(linked, value)
    return seen


def is_expensive(value: Value) -> bool:
    return value.op in EXPENSIVE
