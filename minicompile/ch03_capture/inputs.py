# %% [markdown]
# # Inputs of the graph
#
# Parameters, arguments, globals: whatever tensor the trace touches becomes a placeholder, in the order of
# first use. The backend receives a function of flat tensors and knows nothing about modules.
#
# Dimensions named in `dynamic` (because the caller marked them, or because they differed from an earlier
# call) get a `SymInt` instead of a number. Each symbol is a graph input of its own.

# %%
import itertools
import operator
import re

import torch

from .. import marks
from ..ch01_graphs.fake import has_memory, storage_key
from ..ch01_graphs.floats import free_names
from ..ch01_graphs.layouts import dims_with_gaps
from ..ch01_graphs.shapes import is_symbolic
from ..ch01_graphs.symbolic import symbols
from ..ch02_guards.torch_guards import TensorSpec
from ..ch02_guards.sources import (
    CallSource, ComputedSource, ConstantSource, DictGetSource, ItemSource, LocalSource, SizeSource, Source, path_of)
from .tracer import constant_source, guard, location, unsupported
from .values import SymVal, TensorVal, const

TENSOR_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def placeholder_name(source: Source) -> str:
    """Not `self`, which is what fx calls the module whose method the graph is."""
    text = re.sub(r"\W+", "_", source.name()).strip("_").lower()
    return ("in_" if not text or text[0].isdigit() or text == "self" else "") + text


# %% [markdown]
# `wrap_tensor` does this for one tensor. First it refuses what no fake can stand for: subclasses, sparse and
# quantized tensors, those that a transform of `torch.func` has wrapped, one whose gradient has another form (`other_form`), and a view
# of a tensor that has other memory by now. (A tensor without a source was made at compile time, and gets one in the entry's tuple of
# constants.) Then it decides which dimensions vary, writes the guard on the metadata, with exactly these dimensions left open, and makes
# the fake, with a symbol in each of them. The placeholder and the fake go into a `TensorVal`, and `of_fake` leads from a fake back to
# it, for whoever meets only the fake, as the gradients of chapter 12 do. Marks of `mark_dynamic` with limits are asked about at the
# end, since a question about a symbol is what makes a guard.

# %%
def wrap_tensor(tx, real, source):
    if type(real) not in TENSOR_TYPES:
        unsupported(tx, f"a tensor of the subclass {type(real).__qualname__}")
    if real.layout is not torch.strided or real.is_quantized or real.is_nested:
        what = "quantized" if real.is_quantized else "nested" if real.is_nested else real.layout
        unsupported(tx, f"a tensor of layout {what}")
    if not has_memory(real):
        unsupported(tx, "a tensor that a transform of torch.func has wrapped")
    if real.requires_grad and other_form(real):
        unsupported(tx, "a tensor that was given memory of another shape or dtype, while its gradient has the old one")
    if real._is_view() and real._base.layout is torch.strided and real._base.untyped_storage()._cdata != real.untyped_storage()._cdata:
        unsupported(tx, "a view whose base was given other memory, and which gets a history where that gets one")
    if source is None:
        source = constant_source(tx, real)
    dynamic, steps = dynamic_dims(tx, real, source), dynamic_strides(tx, real, source)
    if not isinstance(source, ConstantSource):
        guard(tx, source, "TENSOR_MATCH", TensorSpec.of(real, dynamic, steps))
    sizes = tuple(symbol_for(tx, n, SizeSource(source, d)) if d in dynamic else n
                  for d, n in enumerate(real.shape)) if dynamic or steps else None
    fake = tx.tensors.mode.from_real(real, sizes, {d: new_symbol(tx, real.stride(d), stride_source(source, d)) for d in steps})
    value = TensorVal(node=add_input(tx, real, fake, source), fake=fake, real=real, source=source,
                      version=fake._version)
    tx.tensors.of_fake[id(fake)] = value
    tx.tensors.in_memory[storage_key(fake)].append(value)
    if real.is_inference() and not tx.options.inference:
        tx.tensors.made_in_inference.add(storage_key(fake))
    for d, (low, high) in getattr(real, marks.DYNAMIC, {}).items():
        size = fake.shape[d]
        tx.symbols.marked.append((source, d, size))
        if isinstance(size, torch.SymInt):           # to ask is to guard
            size.node.env.promised |= symbols(size.node.expr)
            bool(size >= low), high is None or bool(size <= high)
    return value


def other_form(real: torch.Tensor) -> bool:
    """Has an assignment to `data` left a tensor with a history of another shape or dtype? The engine asks for gradients of that form. A
    view is not asked, since a question for its history may change what autograd says next."""
    node = None if real._is_view() else real.grad_fn
    return node is not None and not is_form_of(node._input_metadata[real.output_nr], real)


def is_form_of(metadata, tensor: torch.Tensor) -> bool:
    """Has `tensor` the form of which the engine asks a gradient to be?"""
    return (tuple(metadata.shape), metadata.dtype) == (tuple(tensor.shape), tensor.dtype)


# %% [markdown]
# Which dimensions vary? Three people may say so: the caller, by a mark on the tensor or with `dynamic=True`, which
# means the sizes of all arguments but not those of parameters, and the earlier calls, whose differences `learning.py`
# has collected in `options.dynamic` under the source. A size of 0 or 1 never becomes a symbol, since such sizes
# behave differently from all others (chapter 1).

# %%
def is_argument(source) -> bool:
    """Whether a source is an argument, or an item of one: what `dynamic=True` means by "all sizes"."""
    while isinstance(source, (ItemSource, DictGetSource)):
        source = source.base
    return isinstance(source, LocalSource)


def varies(tx, source) -> bool:
    """Whether a number found here becomes a symbol."""
    options = tx.options
    return not options.fixed and (source in options.dynamic or options.everything and is_argument(source))


def all_vary(tx, real, source) -> bool:
    return tx.options.everything and is_argument(source) and not isinstance(real, torch.nn.Parameter)


def dynamic_dims(tx, real, source) -> frozenset:
    """The dims of a tensor whose sizes become symbols, if it was not made of numbers that vary by itself. Sizes 0 and 1 never do."""
    options = tx.options
    if options.fixed or 0 in real.shape:
        return frozenset()
    learned = options.dynamic.get(source, ())
    learned = () if learned in (True, FROM_ZERO) else learned            # it was a number then
    dims = {*learned, *getattr(real, marks.DYNAMIC, ())}
    if all_vary(tx, real, source) or any(type(step) is ComputedSource for step in path_of(source)):
        dims = range(real.dim())
    return frozenset(d for d in dims if d < real.dim() and real.shape[d] > 1)


def stride_source(source, dim: int):
    return CallSource(source, "stride", (dim,))


def dynamic_strides(tx, real, source) -> frozenset:
    """The dims of a tensor whose strides become symbols, in a layout that has no name: those that have varied by themselves, or all."""
    learned = [] if tx.options.fixed else [d for d, n in enumerate(real.shape) if n > 1 and (
        stride_source(source, d) in tx.options.dynamic or all_vary(tx, real, source))]
    return frozenset(learned and dims_with_gaps(real)).intersection(learned)


# %% [markdown]
# A mark is a promise to the caller: one version for all sizes. The program can break it, for example with
# `x.view(8, -1)`, which is a guard that the size is 8. That is an error, which names the guard. So is a mark on a size of 0
# or 1. Where the compiler can only compile fixed sizes, the program is not to blame, and unless `fullgraph=True` asks for more, it
# is a warning.

# %%
def fixed_marks(tx) -> list[tuple[str, bool]]:
    """What became of `mark_dynamic`: for each marked dimension that is fixed a sentence, and whether the program did it."""
    found = []
    for source, d, size in tx.symbols.marked:
        name = str(size)
        why = [(g, place) for g, place in tx.symbols.env.guards.items()
               if g.op == "eq" and g.answer and free_names(g.left) | free_names(g.right) == {name}]
        if isinstance(size, torch.SymInt) and not why:
            continue
        reason = (f"the program fixed it ({why[0][0].text()}, {why[0][1]})" if why else
                  f"it cannot vary, because {tx.options.fixed}" if tx.options.fixed else "0 and 1 never vary")
        found.append((f"dimension {d} of {source} was marked with mark_dynamic, but it is compiled for one "
                      f"size: {reason}. Drop the mark, or the code that needs the size.", not tx.options.fixed))
    return found


# %% [markdown]
# `add_input` makes the placeholder. Each has the source in its `meta`, and the entry reads the
# inputs by these at each call. `symbol_for` gives a size its symbol. A batch of 8 usually occurs as the first size
# of several tensors. It would be of little use to the program if these were different symbols, since the first
# addition of two of the tensors would have to ask whether they are equal. So equal sizes are taken for the same
# symbol, and a guard checks at each call that they still are.

# %%
def add_input(tx, real, fake, source) -> torch.fx.Node:
    """A placeholder of the graph, fed from `source`."""
    node = (tx.outer or tx.graph).placeholder(placeholder_name(source))
    node.target = node.name                     # the graph's code takes it for the argument's name; `x` and `X` are two
    node.meta.update(val=fake, location=location(tx), origins=(), source=source,
                     parameter=isinstance(real, torch.nn.Parameter))
    tx.tensors.inputs[node] = real
    return node


def symbol_for(tx, size: int, source):
    """A SymInt of value `size` (an int for 0 and 1), read from `source` at each call. Equal sizes share a
    symbol, guarded by their equality: a batch size is one number, however many tensors have it."""
    known = tx.symbols.by_size.get(size)
    if known is not None:
        name = str(known[0].node.expr)
        guard(tx, source, "SIZE", (f"{name} == n", ((name, known[1]), ("n", source))))
        return known[0]
    symbol = new_symbol(tx, size, source)
    if isinstance(symbol, torch.SymInt):
        tx.symbols.by_size[size] = symbol, source
    return symbol


def new_symbol(tx, number: int, source):
    """A SymInt (an int for 0 and 1) or SymFloat of this value that no other number shares, read from `source` at each call."""
    env, tx.options.used = tx.symbols.env, True
    symbol = env.create_float(number) if type(number) is float else env.create(number)
    if is_symbolic(symbol):
        tx.symbols.sources[str(symbol)] = source
    return symbol


# %% [markdown]
# Numbers of Python that vary become inputs as well. A symbol is above 1 (`ShapeEnv.create`), and an integer keeps its sign: a negative
# number is the negative of a symbol, so that its bounds are known (`x[:, -n:]`). A 0 or 1, the first values of most counters, is a symbol
# less 2: who asks whether it is 0 or 1, as a size does, gets a guard, and to who does not ask it may be any number from 0 on. So is a
# number that has been, or is expected to be, 0 or 1 in other calls (`FROM_ZERO` in `options.dynamic`). It is not
# identified with a size that happens to be equal; if the program needs them equal, it asks, and that is a guard. A float is a symbol
# whatever it is. A scalar of NumPy is the number that tensors take it for, `x.item()`, with a note of its class.

# %%
FROM_ZERO = "from zero"


def wrap_dynamic_number(tx, real, source):
    if source in tx.symbols.numbers:
        return tx.symbols.numbers[source]
    kind = type(real)
    if kind not in (int, float):
        guard(tx, source, "TYPE_MATCH", kind)
        known = wrap_dynamic_number(tx, real.item(), CallSource(source, "item"))
        return const(real) if type(known) is not SymVal else SymVal(node=known.node, sym=known.sym, scalar=kind, source=source)
    if kind is int and (real == -1 or abs(real) >= 2**31 - 2):              # to which 2 may be added
        guard(tx, source, "CONSTANT_MATCH", real)
        return const(real)
    guard(tx, source, "TYPE_MATCH", kind)
    at, number, back = source, real, ()
    if kind is int and (real < 2 or tx.options.dynamic.get(source) == FROM_ZERO):
        at, number, back = (CallSource(source, "__add__", (2,)), real + 2, (operator.sub, 2)) if real >= 0 else \
            (CallSource(source, "__neg__"), -real, (operator.neg,))
    symbol = new_symbol(tx, number, at)
    if kind is int:
        guard(tx, source, "SIZE", ("1 < n < 2147483648", (("n", at),)))
    node = add_input(tx, number, symbol, at)
    if back:
        function, *others = back
        node, symbol = tx.graph.call_function(function, (node, *others)), function(symbol, *others)
        node.meta.update(val=symbol, location=location(tx), origins=())
    value = tx.symbols.numbers[source] = SymVal(node=node, sym=symbol, source=source)
    return value


# %% [markdown]
# The number in a tensor on the CPU can be read when the compiled function is called, too. The hundred counters of an
# optimizer have one number; then they have one symbol, and a guard asks whether they still agree. It also asks whether
# they are apart, since counting up one must not be seen in another.

# %% tags=["exercise:equal-counters"]
def counter(tx, source, number: float):
    """The number of the 0-d tensor at `source` as a symbol. `tx.symbols.counters` has, for a number, the symbol that stands for all
    tensors that hold it, and the list of their sources."""
    if number not in tx.symbols.counters:
        tx.symbols.counters[number] = wrap_dynamic_number(tx, number, CallSource(source, "item")), []
    symbol, sources = tx.symbols.counters[number]
    sources.append(source)
    return symbol


# %% [markdown]
# When the trace is over the counters are guarded, with one guard for all that share a symbol: their numbers are equal to each
# other, and their addresses differ. If there are several symbols, one guard more asks for all addresses to differ.
# `guard_sizes` does the same for the questions that the trace has asked about sizes: each is a condition on symbols, and
# is guarded together with the sources from which the symbols in it are read.

# %%
def guard_counters(tx):
    groups = [dict.fromkeys(sources) for _, sources in tx.symbols.counters.values()]        # some were read twice
    for first, *others in groups:
        guard(tx, first, "COUNTERS", tuple(others))
    everyone = list(dict.fromkeys(itertools.chain.from_iterable(groups)))
    if len(groups) > 1:
        names = [f"p{i}" for i in range(len(everyone))]
        guard(tx, everyone[0], "SIZE", (f"len({{{', '.join(names)}}}) == {len(names)}",
                                        tuple((n, CallSource(s, "data_ptr")) for n, s in zip(names, everyone))))


def guard_sizes(tx):
    """The questions that were asked about symbols, with their answers, become guards."""
    for g, place in tx.symbols.env.guards.items():
        text = g.text()
        names = tuple((name, tx.symbols.sources[name]) for name in dict.fromkeys(re.findall(r"\w+", text)) if name in tx.symbols.sources)
        tx.guards.add(names[0][1] if names else None, "SIZE", (text, names), place)
