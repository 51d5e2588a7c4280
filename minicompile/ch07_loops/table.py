# %% [markdown]
# # The table of lowerings

# %%
from __future__ import annotations

from typing import Callable

import torch

aten = torch.ops.aten
LOWERINGS: dict[torch._ops.OpOverload, Callable] = {}
VIEWS: set[torch._ops.OpOverload] = set()          # results that look at the memory of their first argument
ANY_DTYPE: set[torch._ops.OpOverload] = set()      # rules that never touch an element, so any dtype will do


def overload(name: str):
    """The ATen overload called `name` ("add.Tensor", "relu"), or None where this version of torch lacks it."""
    packet, _, kind = name.partition(".")
    return getattr(getattr(aten, packet, None), kind or "default", None)


def lowering(*names, view: bool = False):
    """Register `rule(g, *args, **kwargs)` for overloads given by name or as objects. Tensor arguments are `Lazy`. A rule
    that cannot do a case returns NotImplemented before it emitted anything, and the ATen kernel is called instead."""
    def register(rule):
        for name in names:
            op = overload(name) if isinstance(name, str) else name
            if op is not None:
                LOWERINGS[op] = rule
                if view:
                    VIEWS.add(op)
                    ANY_DTYPE.add(op)
        return rule
    return register
