# %% [markdown]
# # The loop IR
#
# An ATen graph says *what* each operator computes. To fuse two operators one must know *how*: which element
# of which buffer is read to produce which element of the output. The loop IR says exactly that and no more. A
# `Loop` is a perfect loop nest, with a body that computes one element: it loads from buffers at index
# expressions, applies scalar operations, perhaps reduces over the inner dimensions, and stores.
#
# `relu(x @ w).sum(0)` for `x: [3, 4]` and `w: [4, 5]` is a library call and one loop
# (`print_program` of `verify` shows it so; `[3, 4]:4,1` are sizes and strides):
#
#     inputs: x, w
#     extern0: buf0 = aten.mm.default(x[3, 4]:4,1, w[4, 5]:5,1)
#     loop1: for i0 < 5 reduce r0 < 3    # full_default, maximum_default, sum_dim_int_list
#         v0: f32 = load buf0[i0 + 5*r0]
#         v1: f32 = constant(0.0)
#         v2: f32 = maximum(v0, v1)
#         v3: f32 = reduce(sum, v2)
#         buf1[i0] = v3
#     return buf1[5]:1
#
# Each line of a body is a `Value`, and these are the kinds:
#
# | value | meaning |
# |---|---|
# | `load(buffer, index, mask)` | the element at `index`; 0, without a load, where `mask` is false |
# | `store(buffer, index, mask, value, mode)` | write it; mode `"atomic_add"` accumulates |
# | `reduce(kind, value, index)` | combine `value` over all reduction variables; `index`: the place of an element, for `argmax` |
# | `get(values, i)` | one of the results of a reduction that has several: mean, spread and count |
# | `constant(number)` | a number, of the dtype of the value |
# | `index(expr)` | an index expression as an int64 value; as float64, a float argument of the kernel |
# | `indirect(value, symbol, size)` | binds an integer value to a symbol for later indices: a gather |
# | `to_dtype(value)` | another dtype |
# | `round_to(value, half)` | what a half type can hold of a float32 |
# | `bitcast(value)` | the same bits as another dtype |
# | `philox(seed, offset, index, layout)` | the random number that eager would have for an element, on a GPU |
# | any scalar operation | `add`, `exp`, `where`, ... on values |
#
# A value holds the values that it is computed from, so a body is a graph, and its ends are the stores. A `Loop`
# has its stores and nothing else: its body is whatever they are computed from. What no store needs is in no
# body, and no pass has to remove it.
#
# The same node serves to the end. The lowering of this chapter makes it, fusion asks it which memory it touches,
# and the code generators print it. A stage that changes something makes new nodes (`replay`), and leaves the old ones as
# they are. Inductor's loop IR keeps the Python closure that made the body and calls it again for every
# analysis; a graph is made once, can be printed, and can be compared.

# %%
from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, Callable, Iterable, Iterator, NamedTuple

import torch

from ..ch01_graphs.floats import Float
from ..ch01_graphs.graph import Location, closure
from ..ch01_graphs.symbolic import Expr, Int, Symbol, substitute, symbols

# %% [markdown]
# ## Memory
#
# A `Buffer` is named memory with a strided layout. A buffer made by updating another one in place (an input
# that the program mutates, a scatter into zeros) is a *new* name with `alias_of` set: readers of the old name
# must run before the update, readers of the new name after. A `View` names part of a buffer with its own
# layout; views cost nothing, and only graph outputs and library calls need them: inside loops a view is just
# a different index expression.

# %%
@dataclass(frozen=True)
class Layout:
    """Sizes and strides in elements, and the offset of the first element."""

    size: tuple[Int, ...]
    stride: tuple[Int, ...]
    offset: Int = 0


@dataclass
class Buffer:
    """Named memory. `layout.offset` is 0 for buffers that we allocate. `nbytes` (chapter 8) keeps its answer here."""

    name: str
    dtype: torch.dtype
    device: torch.device
    layout: Layout
    alias_of: str | None = None
    nbytes: int | None = field(default=None, init=False, repr=False, compare=False)


def root_of(buffers: dict[str, Buffer], name: str) -> str:
    """The buffer whose memory `name` is, as far as `buffers` knows."""
    while name in buffers and buffers[name].alias_of is not None:
        name = buffers[name].alias_of
    return name


class View(NamedTuple):
    """A strided window on a buffer: what a library call receives, or what the program returns."""

    buffer: str
    layout: Layout

# %% [markdown]
# ## Values
#
# Two values of a body are the same object exactly if operation, arguments and dtype are equal: `Values` makes them, and
# remembers what it made. So `x * sigmoid(x)` loads `x` once, and "is it the same?" is `is`. A store is an
# effect, and made each time. Constants are compared as text: 0.0 equals -0.0, and NaN differs from itself.
#
# An argument is a value, an index expression, a name or a number. `operands` are the values that must be there first:
# those among the arguments, and those that a symbol in an index stands for. `number` counts upwards, so sorting
# by it puts operands first.

# %%
NONE: frozenset = frozenset()


@dataclass(eq=False, slots=True, repr=False)
class Value:
    """What `op` makes of `args`; `dtype` is None for a store. The last four fields are known where the loops of a
    kernel are linked (chapter 8)."""

    op: str
    args: tuple
    dtype: torch.dtype | None
    operands: tuple[Value, ...]
    number: int
    loop: Loop | None = None
    dims: frozenset[Symbol] = NONE              # the loop variables that it varies along
    phase: int = 0                              # complete reductions that must have run before
    half: torch.dtype | None = None             # the half type that holds this float32 exactly, if one is known to

    def __repr__(self):
        return f"{self.op}{self.number}"

    @property
    def buffer(self) -> str: return self.args[0]            # of a load or store, as the next two
    @property
    def index(self) -> Int: return self.args[1]
    @property
    def mask(self) -> Value | None: return self.args[2]
    @property
    def value(self) -> Value: return self.args[3]           # of a store
    @property
    def mode(self) -> str | None: return self.args[4]
    @property
    def constant(self) -> int | float | bool | None: return self.args[0] if self.op == "constant" else None

    @property
    def anywhere(self) -> bool:
        """Does this load or store happen under a mask, or at a position that is data?"""
        return self.mask is not None or any(o.op == "indirect" for o in self.operands)


# %% [markdown]
# `make` looks up whether the same operation on the same operands was made before. An index expression may contain
# a symbol that stands for a value, in `x[table[i0]]` for example: then this value must be there before the load,
# so `new` counts it among the operands. `position` makes such symbols.

# %%
class Values:
    """Makes the values of one body, equal ones once."""

    def __init__(self):
        self.known: dict[tuple, Value] = {}
        self.symbols: dict[Symbol, Value] = {}          # of indices -> the value that binds it
        self.stores: list[Value] = []
        self.count = 0

    def make(self, op: str, args: tuple, dtype: torch.dtype) -> Value:
        """The value `op(*args)`, new or known."""
        key = (op, repr(args) if op == "constant" else args, dtype)
        value = self.known.get(key)
        if value is None:
            value = self.known[key] = self.new(op, args, dtype)
        return value

    def new(self, op: str, args: tuple, dtype: torch.dtype | None) -> Value:
        operands = [a for a in args if type(a) is Value]
        if self.symbols:
            operands += [self.symbols[s] for a in args if type(a) is Expr for s in symbols(a) if s in self.symbols]
        self.count += 1
        return Value(op, args, dtype, tuple(operands), self.count)

    def position(self, value: Value, size: Int) -> Value:
        """The `indirect` that lets indices mention an integer value."""
        key = ("indirect", value, size)
        if key not in self.known:
            symbol = Symbol(f"at{len(self.symbols)}", size)
            self.known[key] = self.symbols[symbol] = self.new("indirect", (value, symbol, size), torch.int64)
        return self.known[key]

    def write(self, buffer: str, index: Int, mask: Value | None, value: Value, mode: str | None) -> Value:
        self.stores.append(self.new("store", (buffer, index, mask, value, mode), None))
        return self.stores[-1]

    def again(self, value: Value, args: tuple) -> Value:
        """The operation of `value`, of any body, on other arguments."""
        return self.write(*args) if value.op == "store" else self.make(value.op, args, value.dtype)


# %% [markdown]
# The other functions walk. `behind` collects what some values are computed from. `replay` goes through a body
# forwards and hands each value, with its arguments replaced, to a function. What the function does is the meaning:
# to compute with tensors runs the body, to write text prints it, to make values in another `Values` rewrites it
# (`remake`). `with_places` is such a rewriting, in which loads and stores get other buffers and indices.

# %%
def behind(ends: Iterable[Value], keep: Callable[[Value], bool] | None = None) -> list[Value]:
    """All values (with `keep(value)`) that the `ends` are computed from, in order."""
    operands = (o for end in ends for o in end.operands)
    return sorted(closure(filter(keep, operands), lambda value: filter(keep, value.operands)), key=in_order)


def body_of(stores: Iterable[Value]) -> tuple[Value, ...]:
    """The stores and all that they are computed from, in order."""
    return tuple(sorted([*behind(stores), *stores], key=in_order))


in_order = attrgetter("number")


def replay(body: Iterable[Value], step: Callable[[Value, tuple], Any]) -> dict[Value, Any]:
    """Go through `body` forwards: what `step(value, args)` gives for each value, where `args` are its arguments
    with what was given for them in the place of values. Running a body is one such walk, rewriting it another."""
    given: dict[Value, Any] = {}
    for value in body:
        given[value] = step(value, tuple([given[a] if type(a) is Value else a for a in value.args]))
    return given


def remake(body: Iterable[Value], into: Values, step: Callable[[Values, Value, tuple], Any],
           mapping: dict[Symbol, Int] | None = None) -> tuple[Value, ...]:
    """`replay` with values of `into` for results, `step(into, value, args)`: index expressions are rewritten by `mapping`, and
    symbols of `indirect` values are those of `into`. Returns its stores."""
    mapping = dict(mapping or {})

    def with_indices(value: Value, args: tuple):
        if mapping:
            args = tuple([substitute(a, mapping) if type(a) is Expr else a for a in args])
        if value.op != "indirect":
            return step(into, value, args)
        made = into.position(args[0], args[2])
        mapping[value.args[1]] = made.args[1].expr
        return made

    replay(body, with_indices)
    return tuple(into.stores)


def with_places(stores: Iterable[Value], place: Callable[[str, Int], tuple], mapping: dict[Symbol, Int] | None = None) -> tuple[Value, ...]:
    """These stores and all behind them, made anew: what was loaded from or stored to a buffer at an index is at `place(buffer, index)`."""
    def step(into: Values, value: Value, args: tuple) -> Value:
        return into.again(value, (*place(*args[:2]), *args[2:]) if value.op in ("load", "store") else args)
    return remake(body_of(stores), Values(), step, mapping)

# %% [markdown]
# `identity` belongs to the meaning of `reduce`: it is what a reduction of no elements gives, what an
# accumulator starts with, and what a masked lane contributes.

# %%
IDENTITY = {"sum": 0, "prod": 1, "any": False}       # the kinds of reduction that are defined on no elements


def identity(kind: str, dtype: torch.dtype):
    """The number that changes nothing when it is reduced."""
    if kind in IDENTITY:
        return IDENTITY[kind]
    lowest = kind in ("max", "argmax")
    if dtype.is_floating_point:
        return -math.inf if lowest else math.inf
    if dtype is torch.bool:
        return not lowest
    return torch.iinfo(dtype).min if lowest else torch.iinfo(dtype).max

# %% [markdown]
# ## Nodes of a program
#
# `vars` index the output, `reduction_vars` are folded by `reduce`. Values that use the result of a `reduce`
# are computed once per output element. Whatever has no loop form is an `Extern`: an ATen kernel called on whole
# tensors.

# %%
@dataclass
class Loop:
    """A loop nest over `vars` x `reduction_vars`, and what it stores."""

    name: str
    vars: tuple[Symbol, ...]
    reduction_vars: tuple[Symbol, ...]
    stores: tuple[Value, ...]
    location: Location | None = None
    origins: tuple[str, ...] = ()
    turn: int = 0                # 4 for each backward pass before it; odd: it computes something again, for the pass that comes

    @cached_property
    def body(self) -> tuple[Value, ...]:
        return body_of(self.stores)

    @cached_property
    def loads(self) -> tuple[Value, ...]:
        return tuple(v for v in self.body if v.op == "load")

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The names of the buffers that it reads."""
        return tuple(dict.fromkeys(load.buffer for load in self.loads))

    @cached_property
    def outputs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(s.buffer for s in self.stores))


# %% [markdown]
# A library call is a node of the program as well. Its arguments are what the operator takes, with a `View` (a
# buffer and a layout) in the place of each tensor. `Program` at the end is the whole: named buffers, and nodes in
# an order in which each reads only what was written before.

# %%
@dataclass
class Extern:
    """A call of an ATen operator that writes nothing. `args`/`kwargs` are pytrees with `View`s for tensors
    and `Int`s for sizes. `outputs`: one name per tensor result, None where a result is not used or not a
    tensor. `asked`: it is called although nothing reads its results, because it may refuse its operands."""

    name: str
    op: Any
    args: tuple
    kwargs: dict
    outputs: tuple[str | None, ...]
    location: Location | None = None
    origins: tuple[str, ...] = ()
    asked: bool = False

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(view.buffer for view in views_in((self.args, self.kwargs))))


def views_in(tree) -> Iterator[View]:
    """All `View`s in the arguments of a library call."""
    if isinstance(tree, View):
        yield tree
    elif isinstance(tree, (tuple, list, dict)) and not isinstance(tree, Layout):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from views_in(value)


def written_by(step) -> list[str]:
    """The names of the buffers that a loop, a library call or a kernel writes."""
    return [name for name in step.outputs if name is not None]


@dataclass
class Program:
    """A lowered graph. `inputs` are buffer or symbol names in call order; `outputs` are `View`s, `Int`s
    or None."""

    inputs: list[str]
    buffers: dict[str, Buffer]
    nodes: list[Loop | Extern]
    outputs: list[View | Int | None]
    symbols: dict[str, Symbol] = field(default_factory=dict)
    numbers: dict[Symbol, Float] = field(default_factory=dict)    # float arguments of kernels, from the host
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    owned: set[str] = field(default_factory=set)    # inputs that nobody else needs after their last use

    @cached_property
    def roots(self) -> dict[str, str]:
        """`root_of` each buffer, once all of them are there; an alias comes after its buffer."""
        roots: dict[str, str] = {}
        for name, buffer in self.buffers.items():
            roots[name] = name if buffer.alias_of is None else roots[buffer.alias_of]
        return roots
