# %% [markdown]
# # Not looking twice
#
# Most guards of a model are about things that never change: the class of a block, the names of its children,
# that nobody registered a hook, the identity of its parameters. Checking them one by one costs 0.1
# microseconds each, and a 12-layer GPT has 900. But all of them are read through a few hundred dictionaries,
# starting from one object, and CPython keeps a number in each dictionary that changes with every write. If
# the object is the same and the numbers are the same, every guard that was true is true.
#
# So the guards are divided. **Stable** guards depend only on dictionaries, classes and the metadata of
# tensors. They are evaluated in full once; a `Memo` (`unchanged.c`) then remembers the numbers and answers
# the next calls, in one C call, with the tuple of parameters that the graph wants. When any number differs it
# answers None, the guards are evaluated in full again, and if they hold the memo learns the new numbers.
# Nothing is believed that a full check has not confirmed, so the memo needs no opinion on *what* changed.
#
# | per call, CPython 3.11 | guards one by one | with memos | torch.compile |
# |---|---|---|---|
# | two lines | 2.4 us | 1.5 us | 9.0 us |
# | GPT, 12 layers | 97 us | 8 us | 46 us |
# | ResNet-50 | 254 us | 15 us | 126 us |
# | Llama, 16 layers | | 12 us | 72 us |
#
# What is left of ResNet-50's 15 microseconds: 3.5 for the versions of 1300 dictionaries and objects, 6 for
# its 320 tensors, which must be looked at because `parameter.data = other` changes no number, and the rest
# for the calls around it. `python -m minicompile.bench.overhead` measures it.
#
# (torch.compile does the same for modules, with its dictionary tags, inside a C++ tree of guard managers.)

# %%
from __future__ import annotations

import ctypes
import functools
import weakref

import torch

from .guards import PLAIN_TYPES
from .identity import strongly
from .sources import InstanceDictSource, ItemSource, ModuleAttrSource, Source, TupleItemSource

try:
    from . import unchanged
except ImportError:                          # built without CPython's headers: every check is a full one
    unchanged = None

    class Memo:
        def __init__(self, roots: int, keys: tuple):
            pass

        def __call__(self, *arguments):
            return None

        def record(self, *facts) -> bool:
            return False
else:
    Memo = unchanged.Memo


# %% [markdown]
# ## What is a tensor, for C?
#
# Asking 160 parameters for seven facts through Python's methods costs more than everything else in a call.
# `is_neg()` alone takes 100 nanoseconds: it looks for modes, gives up the GIL and takes it again. So the memo
# asks through PyTorch's C interface, whose functions are found by name in the library that is loaded anyway:
# 20 nanoseconds a tensor. The place of the tensor in its Python object, and that of the dispatch keys in the
# tensor, have no function; `unchanged.c` looks for them in examples. If these do not agree, no memo knows any
# tensor and every check is a full one.

# %%
QUESTIONS = (*(f"aoti_torch_get_{fact}" for fact in (
    "dim", "sizes", "strides", "dtype", "device_type", "device_index", "layout")),
    "_ZNK3c1010TensorImpl13requires_gradEv")           # c10::TensorImpl::requires_grad() const


def examples() -> list[torch.Tensor]:
    """Tensors with different dispatch keys and classes."""
    z = torch.zeros(2, dtype=torch.complex64, device="cpu")
    x = torch.zeros(2, 2, device="cpu")
    with torch.inference_mode():
        inference = torch.zeros(1, device="cpu")
    return [x, x.to_sparse(), x.to("meta"), z, z.conj(), z.conj().imag, torch.nn.Parameter(x), inference]


def find_tensors() -> bool:
    """Tell the memos what a tensor is; False when that cannot be found out."""
    try:
        library = ctypes.CDLL(torch._C.__file__)           # the search goes on in the libraries that it needs
        addresses = tuple(ctypes.cast(library[name], ctypes.c_void_p).value for name in QUESTIONS)
    except (OSError, AttributeError):
        return False
    return unchanged.setup(PLAIN_TYPES, addresses, [
        (t, t._cdata, torch._C._dispatch_keys(t).raw_repr()) for t in examples()])


if unchanged is not None:
    find_tensors()


# %% [markdown]
# ## Which sources are stable
#
# Those that lead from an object through instance dictionaries: `self.blocks[2].norm.weight` is ten
# dictionary reads from `self`. The object they start from is the **root**; it is read at each call and
# compared by identity.

# %%
def holder(source: Source) -> Source | None:
    """The object whose instance dictionary (or dictionary of parameters, ...) holds what `source` reads."""
    if isinstance(source, (ModuleAttrSource, InstanceDictSource)):
        return source.base
    if isinstance(source, ItemSource) and isinstance(source.base, InstanceDictSource) \
            and type(source.key) is str:
        return source.base.base
    return holder(source.base) if isinstance(source, TupleItemSource) else None


def root_of(source: Source) -> Source:
    """Where the chain of dictionaries begins; a source that is not stable is its own root."""
    base = holder(source)
    return source if base is None else root_of(base)


@functools.lru_cache(4096)
def is_stable(source: Source, varying: frozenset = frozenset()) -> bool:
    """Whether `source` is a chain of dictionaries from a root that no other such chain leads to. varying:
    slots, as `slot` gives them, that every call finds written."""
    if holder(source) is None or slot(source) in varying:
        return False
    above, _ = root_of(source).parts()
    while above is not None and holder(above) is None:
        above, _ = above.parts()
    base = holder(source)
    return above is None and (not varying or holder(base) is None or is_stable(base, varying))


def slot(source: Source) -> tuple | None:
    """(object, name of the attribute) for the last dictionary read of a stable source, if there is one."""
    if isinstance(source, ModuleAttrSource):
        return source.base, source.attribute
    if isinstance(source, TupleItemSource):
        return slot(source.base)
    if isinstance(source, ItemSource) and isinstance(source.base, InstanceDictSource):
        return source.base.base, source.key
    return None


def path_to(source: Source) -> list[Source]:
    """The objects and dictionaries on the way from the root to `source`, outermost first, without itself."""
    base = holder(source)
    if base is None:
        return []
    if isinstance(source, TupleItemSource):
        return path_to(source.base)
    path = [*path_to(base), base]
    if isinstance(source, ModuleAttrSource):
        path.append(ItemSource(InstanceDictSource(base), source.kind))
    return path


# %% [markdown]
# ## Which guards are stable
#
# A guard is, when what it compares is fixed by the object that its source leads to: identity, class, a
# constant, what is found in a class. Not the length of a list: a list carries no number. `things` says what
# the memo must watch for a guard, besides the path.

# %%
WATCHED = ("CLASS_ATTR", "FUNCTION")
FIXED = (int, float, bool, str, bytes, type(None), complex, torch.dtype, torch.device)


def things(guard, varying: frozenset = frozenset()) -> list[Source] | None:
    """Sources of the objects and dictionaries to watch, or None for a guard that is not stable."""
    source, kind = guard.source, guard.kind
    if kind == "MODULE_STRUCTURE":
        if not is_stable(InstanceDictSource(source), varying):
            return None
        fields = InstanceDictSource(source)
        return [*path_to(source), source, *(ItemSource(fields, name) for name in structure(guard))]
    if kind in WATCHED:
        return []
    if source is None or not is_stable(source, varying):
        return None
    if kind == "TYPE_MATCH":
        return [*path_to(source), source]
    if kind == "NO_KEY" and isinstance(source, InstanceDictSource):
        return path_to(source) if (source.base, guard.expected) not in varying else None
    if kind in ("ID_MATCH", "TENSOR_MATCH", "TUPLE_LENGTH") \
            or kind == "CONSTANT_MATCH" and type(guard.expected) in FIXED:
        return path_to(source)
    if kind in ("ALIASED", "NOT_ALIASED"):
        stable = all(is_stable(other, varying) for other in others(guard))
        return [thing for s in (source, *others(guard)) for thing in path_to(s)] if stable else None
    return None


def others(guard) -> tuple:
    """The further sources of ALIASED and NOT_ALIASED."""
    return guard.expected if isinstance(guard.expected, tuple) else (guard.expected,)


def structure(guard) -> list[str]:
    """The dictionaries of a module that MODULE_STRUCTURE looks at: of children, and of hooks."""
    return [name for name, _ in guard.expected.children] + list(guard.expected.hooks)


def watched(guards) -> list[weakref.ref]:
    """The classes of which attributes were read and the functions that were inlined."""
    found = [strongly(guard.expected[0]) for guard in guards if guard.kind in WATCHED]
    return list({id(target): weakref.ref(target) for target in found}.values())


# %% [markdown]
# ## Objects that are written to
#
# `self.step += 1` in a model, or `model.epoch = 3` around it, changes the version of a dictionary through
# which every parameter is read. The naive memo then never answers, and a GPT that counts its calls pays 160
# microseconds instead of 12. So when `record` finds a dictionary with another version than the time before,
# another version is no longer a change: the values at the keys that guards need are compared, a lookup each,
# and if they are the same, the version is learned. For that the memo is told, for each thing, which keys
# those are. (`model.train()` writes to all modules, once; and so does, on CPython 3.12, whoever *watches* a
# dictionary, as torch.compile does: the version holds a bit for each watcher.)
#
# The written attribute itself has no place in a memo, if the function reads it: its value is new each time.
# Such **varying** slots are numbers that became inputs of the graph, and what the function itself writes.

# %%
def keys_read(guards, sources) -> dict[Source, set | None]:
    """thing -> the keys of its dictionary that these stable guards and sources depend on; None: on all."""
    found: dict = {}

    def add(thing, key):
        keys = found.setdefault(thing, set())
        if type(key) is not str:
            found[thing] = None
        elif keys is not None:
            keys.add(key)

    def follow(source):
        if isinstance(source, ModuleAttrSource):
            add(ItemSource(InstanceDictSource(source.base), source.kind), source.attribute)
            add(source.base, source.kind)
        elif slot(source) is not None:
            add(*slot(source))
        if holder(source) is not None:
            follow(holder(source))

    for source in (*sources, *(guard.source for guard in guards if guard.source is not None)):
        follow(source)
    for guard in guards:
        if guard.kind == "NO_KEY":
            add(guard.source.base, guard.expected)
        elif guard.kind in ("ALIASED", "NOT_ALIASED"):
            for source in others(guard):
                follow(source)
        elif guard.kind == "MODULE_STRUCTURE":
            for name in structure(guard):
                add(guard.source, name)
                add(ItemSource(InstanceDictSource(guard.source), name), None)
    return found


def varying_slots(guards, written) -> frozenset:
    """Slots that differ from call to call. written: those that the function writes, (object, name)."""
    numbers = (slot(guard.source) for guard in guards
               if guard.kind == "TYPE_MATCH" and strongly(guard.expected) in (int, float))
    return frozenset(written).union(found for found in numbers if found is not None)


# %% [markdown]
# ## The full check, and learning from it
#
# What is learned must be true of the state that was checked. Another thread may write between the check and
# the reading of a number, so the numbers are read first: check, record, check again.

# %%
def refresh(memo, full, arguments: tuple) -> tuple:
    """Evaluate the guards in full (`full` raises when one fails) and let the memo answer next time. full:
    arguments -> (things, tensors, outputs). Returns the outputs."""
    facts = full(*arguments)
    if memo.record(arguments, *facts):
        try:
            again = full(*arguments)
        except Exception:
            memo.forget()
            raise
        if any(a is not b for old, new in zip(facts, again) for a, b in zip(old, new, strict=True)):
            memo.forget()
    return facts[2]
