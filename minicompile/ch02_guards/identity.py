# %% [markdown]
# # Whom an entry keeps alive
#
# Most objects must not be kept alive by a cache entry: a compiled function that pins the user's model leaks
# gigabytes. So an object is remembered by a weak reference. Comparing `id(x)` with a remembered number would
# cost the same and be wrong: once the object is gone, a new one can get its address. Classes of
# libraries, Python modules, code and builtin functions live long anyway and are held directly. A class of the
# program is not: its methods lead to their code, to which the entries are attached, and that would be a cycle
# that the garbage collector does not see.

# %%
from __future__ import annotations

import sys
import types
import weakref

import torch

LONG_LIVED = (types.ModuleType, types.CodeType, types.BuiltinFunctionType, torch.dtype, torch.device)
LIBRARIES = frozenset((*sys.stdlib_module_names, "torch", "numpy"))
HEAP_TYPE = 1 << 9


def is_library_type(cls: type) -> bool:
    return not cls.__flags__ & HEAP_TYPE or str(cls.__module__).partition(".")[0] in LIBRARIES - {"__main__"}


def weakly(expected):
    """A weak reference to what a cache entry must not keep alive; long-lived objects as they are."""
    if isinstance(expected, (*LONG_LIVED, weakref.ref, type(None))):
        return expected
    if isinstance(expected, type) and is_library_type(expected):
        return expected
    try:
        return weakref.ref(expected)
    except TypeError:                          # no weak references to this type: hold it
        return expected


def strongly(expected):
    """The object behind what `weakly` returned; None when it is gone."""
    return expected() if isinstance(expected, weakref.ref) else expected
