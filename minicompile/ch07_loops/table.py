# %% [markdown]
# # The table of lowerings

# %%
from __future__ import annotations

from typing import Callable

import torch

aten = torch.ops.aten
LOWERINGS: dict[torch._ops.OpOverload, Callable] = {}
PRIVATE: dict[str, Callable] = {}
VIEWS: set[torch._ops.OpOverload] = set()          # results that look at the memory of their first argument
REINDEXING: set[torch._ops.OpOverload] = set()     # results that read their operands at other positions
LOOPS: set = set()                                 # rules that emit loops at once
ANY_DTYPE: set[torch._ops.OpOverload] = set()      # rules that never touch an element, so any dtype will do


def overload(name: str):
    """The ATen overload called `name` ("add.Tensor", "relu"), or None where this version of torch lacks
    it."""
    packet, _, kind = name.partition(".")
    return getattr(getattr(aten, packet, None), kind or "default", None)


def lowering(*names, view: bool = False, reindex: bool = False, loops: bool = False):
    """Register `rule(g, *args, **kwargs)` for overloads given by name or as objects. Tensor arguments are
    `Lazy`. A rule
    that cannot do a case returns NotImplemented before it emitted anything, and the ATen kernel is called
    instead.
    `view`: the result aliases the operand. `reindex`: it reads operands at positions other than its own.
    `loops`: it is stored at once."""
    def register(rule):
        for name in names:
            op = overload(name) if isinstance(name, str) else name
            if op is not None:
                LOWERINGS[op] = rule
                if reindex or view:
                    REINDEXING.add(op)
                if loops:
                    LOOPS.add(op)
                if view:
                    VIEWS.add(op)
                    ANY_DTYPE.add(op)
        return rule
    return register


def private(name: str):
    """Register a rule for our own operator `minicompile::name` (chapter 6), which may not be defined yet."""
    def register(rule):
        PRIVATE[name] = rule
        return rule
    return register


def rule_for(target) -> Callable | None:
    """The lowering of an overload, or None."""
    rule = LOWERINGS.get(target)
    if rule is None and isinstance(target, torch._ops.OpOverload) and target.namespace == "minicompile":
        rule = PRIVATE.get(target._schema.name.split("::")[1])
    return rule
