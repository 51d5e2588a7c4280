# %% [markdown]
# # The table of lowerings
#
# One rule per primitive of chapter 6, and for primitives only: what decompositions translate never gets here.
# A primitive without a rule, an operator that nothing decomposes, and a rule that returns `NotImplemented`
# all end the same way, in a call of the ATen kernel.

# %%
from typing import Callable

import torch

from ..ch06_decompositions.table import aten, overload  # noqa: F401  (rooms take `aten` from here)

LOWERINGS: dict[torch._ops.OpOverload, Callable] = {}
VIEWS: set[torch._ops.OpOverload] = set()          # results that look at the memory of their first argument
REINDEXING: set[torch._ops.OpOverload] = set()     # results that read their operands at other positions
LOOPS: set[torch._ops.OpOverload] = set()          # rules that emit loops at once


def lowering(*names: str, view: bool = False, reindex: bool = False, loops: bool = False):
    """Register `rule(g, *args, **kwargs)` for overloads of ATen. Tensor arguments are `Lazy`. A rule that
    cannot do a case returns NotImplemented before it emitted anything.

    `view`: the result aliases the first operand, so no element is touched and any dtype will do. `reindex`:
    operands are read at positions other than that of the result. `loops`: the result is stored at once.
    """
    def register(rule):
        for op in filter(None, map(overload, names)):
            LOWERINGS[op] = rule
            for property, members in ((view, VIEWS), (view or reindex, REINDEXING), (loops, LOOPS)):
                if property:
                    members.add(op)
        return rule
    return register
