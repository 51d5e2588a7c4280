# %% [markdown]
# # Asked before
#
# A program asks the same question again and again: each of a hundred equal layers, and each of the stages that run
# the program, wants to know what an addition of two such tensors gives. A meta kernel, many of which are Python,
# takes fifty microseconds to answer. So answers are kept, under all that they depend on: the operator, how each tensor
# lies, and every number that is not data. They are forgotten when the compilation is over.
#
# Kept is a *recipe*, and each call makes tensors of its own from it: in new memory, or as views of the first argument.
# An elementwise operator that writes to its first argument gives this argument back, if its memory is no other's; the
# update of an optimizer consists of such. Other operators that write are asked each time, and so are operators of users,
# which may change. Where sizes are symbolic, an answer may need guards; these were recorded when the question was asked first, in the
# same environment, which is part of the question. There a meta kernel takes milliseconds. `fake_call` is what
# fakes call; `run_on_fakes` alone would do, and take longer.
#
# An operator on lists, such as `_foreach_add_`, is as many operators that know nothing of each other. Of 148 parameters most
# lie like another one, so `ask_by_form` asks for a short list, with one item of each form.

# %%
import contextlib
import functools
from typing import Any

import torch
from torch import get_default_dtype

from ..errors import Unsupported
from .fake import FakeTensor, storage_key
from .layouts import length_of
from .operators import NAMESPACES, leaves, owner_of, run_on_fakes
from .refusals import what_kernels_see
from .rules.operators import FLOATS_ARE_DATA, STRIDED
from .shapes import IN_NUMBERS, SizeNode, expr_of

PLAIN = frozenset((int, float, bool, complex, str, type(None), torch.dtype, torch.layout, torch.memory_format))
RECIPES: dict[tuple, Any] = {}


class NotKept(Exception):
    """A question or an answer that is of one call only."""


@functools.cache
def _may_be_kept(func) -> bool:
    kept = func.namespace in NAMESPACES and func.overloadpacket not in STRIDED and func not in IN_NUMBERS
    return kept and (not func._schema.is_mutable or _writes_first(func))


@functools.cache
def _writes_first(func) -> bool:
    """Whether it is elementwise, in place."""
    written = [a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments]
    elementwise = torch.Tag.pointwise in func.tags or func is torch.ops.aten.copy_.default
    return elementwise and written[:1] == [True] and True not in written[1:] and len(func._schema.returns) == 1


def _check_alone(first, others) -> None:
    """What is written has an element for each position, in memory of its own."""
    if type(first) is not FakeTensor or 0 in map(expr_of, first.meta.stride()) or storage_key(first) in {
            storage_key(x) for x in others if isinstance(x, FakeTensor)}:
        raise NotKept


# %% [markdown]
# The *question* is a tuple that can be a key of a dictionary. `asked` says what of an argument belongs into it. A tensor is its
# shape, strides, offset, dtype and device; which tensor it is, is not asked. A number that the operator treats as data
# (`FLOATS_ARE_DATA`) is only "a float", so that a learning rate of another step is the same question, and the dtypes that it fits: what
# does not fit may be refused. A symbolic size is its expression, since the object is another each time. What could answer in another way
# next time raises `NotKept`, and the operator runs.

# %%
def asked(x, floats: bool, symbols: bool = True):
    """What an answer may depend on, of one argument. floats: whether the values of floats are none of it. symbols: may sizes be such?"""
    kind = type(x)
    if floats and (kind is float or kind is torch.SymFloat):
        return float if kind is torch.SymFloat else what_kernels_see(x)
    if kind is FakeTensor and not (x.dtype.is_complex or x.meta.is_neg()):
        meta = x.meta
        form = meta.shape, meta.stride(), meta.storage_offset()
        return (asked(form, floats, symbols) if x._has_symbolic_sizes_strides else form), meta.dtype, x.device
    if kind is torch.SymInt and symbols and isinstance(x.node, SizeNode):
        return x.node.env, x.node.expr
    if kind in PLAIN or kind is torch.device and (x.type != "cuda" or x.index is not None):
        return kind, x
    if isinstance(x, (list, tuple)):
        return tuple([asked(item, floats, symbols) for item in x])
    raise NotKept


# %% [markdown]
# The *answer* must not be kept as it is: the next call wants new tensors, which nobody else writes to. So `_recipe` writes down
# how to make each result, and `_made` does it. A result is the first argument itself, or a window on its memory (`view`,
# `expand`), or it has memory of its own, which begins and ends with it; a list is a list of recipes. A result in the memory of
# another argument, or in memory that is larger than it is, has no recipe.

# %%
class Same:
    """In a recipe: the first argument."""


class SameMemory:
    """In a recipe: memory of the first argument."""


def fills_its_memory(x: FakeTensor) -> bool:
    """Whether the memory of `x` begins and ends with it, so that `empty_strided` makes one like it."""
    form = [expr_of(n) for n in x.meta.shape], [expr_of(n) for n in x.meta.stride()], expr_of(x.meta.storage_offset())
    return form[2] == 0 and expr_of(x.meta.untyped_storage().nbytes()) == length_of(form) * x.dtype.itemsize


def _recipe(x, first, memory: set):
    """How to make a result like `x`. memory: the storages of the arguments, and of results that were met before."""
    kind = type(x)
    if x is first:
        return Same, None
    if kind in PLAIN:
        return kind, x
    if kind is list or kind is tuple:
        return kind, [_recipe(item, first, memory) for item in x]
    if kind is not FakeTensor or x.dtype.is_complex or x.meta.is_neg():
        raise NotKept
    sizes, strides, _ = form = x.meta.shape, x.meta.stride(), x.meta.storage_offset()
    if type(first) is FakeTensor and storage_key(x) == storage_key(first) and x.dtype == first.dtype and x.device == first.device:
        return SameMemory, form
    if storage_key(x) in memory or not fills_its_memory(x):
        raise NotKept
    memory.add(storage_key(x))
    return kind, (sizes, strides, x.dtype, x.device)


def _made(kind, how, first):
    """A result by its recipe."""
    if kind is Same:
        return first
    if kind is FakeTensor or kind is SameMemory:
        env = next((n.node.env for n in (*how[0], *how[1], how[2]) if type(n) is torch.SymInt), None)
        with env.asked_nothing() if env else contextlib.nullcontext():
            if kind is SameMemory:
                return FakeTensor(first.meta.as_strided(*how), first.device)
            sizes, strides, dtype, device = how
            return FakeTensor(torch.empty_strided(sizes, strides, dtype=dtype, device="meta"), device)
    return kind([_made(*part, first) for part in how]) if kind is list or kind is tuple else how


# %% [markdown]
# An operator on lists is asked for one item of each form. If it writes, the items of one form must also share their memory in
# the same way among the lists (`_memory_in_common`) and be as free to be written (`reshaped`), and the version counters of those that
# were left out are raised here.

# %%
def _memory_in_common(tensors) -> tuple:
    """Which of some tensors share their memory."""
    keys = [storage_key(x) if isinstance(x, FakeTensor) else None for x in tensors]
    return tuple(map(keys.index, keys))


def ask_by_form(func, args, kwargs):
    """`run_on_fakes`; if `func` is an operator on lists, once for all items of one form."""
    lists = [x for x in args if isinstance(x, (list, tuple))]
    length = len(lists[0]) if lists and func._schema.name.startswith("aten::_foreach_") else 0
    if length < 2 or any(len(x) != length for x in lists) or any(isinstance(x, torch.Tensor) and x.dim() for x in args):
        return run_on_fakes(func, args, kwargs)
    writes, floats = func._schema.is_mutable, func in FLOATS_ARE_DATA
    try:
        forms = [(asked(item, floats), writes and (_memory_in_common(item), owner_of(item[0]).reshaped)) for item in zip(*lists)]
        items = {form: i for i, form in enumerate(forms)}
        short = [[x[i] for i in items.values()] if isinstance(x, (list, tuple)) else x for x in args]
        if writes:
            others = {id(t): t for t in args[0]}.keys() - set(map(id, short[0]))
            out = run_on_fakes(func, short, kwargs)
            torch.autograd.graph.increment_version([t for t in args[0] if id(t) in others])
            return out
        memory = {storage_key(x) for x in leaves(short, kwargs) if isinstance(x, FakeTensor)}
        recipes = dict(zip(items, [_recipe(x, None, memory) for x in run_on_fakes(func, short, kwargs)]))
        return [_made(*recipes[form], None) for form in forms]
    except (NotKept, Unsupported):
        return run_on_fakes(func, args, kwargs)


# %% [markdown]
# `fake_call` puts it together: may it be kept, what is the question, is there a recipe, and otherwise run and keep one.

# %%
def fake_call(func, args, kwargs):
    """Run one ATen operator on fakes, or make again what it gave for such arguments."""
    if not _may_be_kept(func):
        return ask_by_form(func, args, kwargs)
    floats = func in FLOATS_ARE_DATA
    try:
        if func._schema.is_mutable:
            _check_alone(args[0], leaves(args[1:], kwargs))
        key = func, get_default_dtype(), asked(args, floats), tuple(kwargs), asked(tuple(kwargs.values()), floats)
    except NotKept:
        return run_on_fakes(func, args, kwargs)
    first = args[0] if args else None
    with contextlib.suppress(Unsupported):
        if (recipe := RECIPES.get(key)) is not None:
            return _made(*recipe, first)
    out = ask_by_form(func, args, kwargs)
    with contextlib.suppress(NotKept):
        recipe = _recipe(out, first, {storage_key(x) for x in leaves(args, kwargs) if isinstance(x, FakeTensor)})
        RECIPES[key] = recipe
    return out


FakeTensor.run = staticmethod(fake_call)
