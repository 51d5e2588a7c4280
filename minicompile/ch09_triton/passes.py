# %% [markdown]
# # Before printing
#
# Two questions about a kernel's graph of values are answered before any text is written: which steps happen
# on which walk along a row, and which integers may be narrow.

# %%
from __future__ import annotations

import torch

from ..ch07_loops.builder import COMPARISONS
from ..ch08_fusion.values import Graph, Store, Value, elements, memory_of

# %% [markdown]
# ## Passes
#
# A looped reduction walks along its row once per phase: LayerNorm twice, for the statistics and for the
# normalised row. A pass contains what its reductions and stores need, recomputed from loads if an earlier
# pass had it. What does not vary along the row is printed once, before the first pass that may use it.
#
# A store happens as early as its value is known, because its pass has that value in a register. One point
# of care: a buffer updated in place must not be stored before the last pass that loads it. Moving a store
# to a later pass moves its loads too, which may hold up another store, so the rule is applied until nothing
# moves.

# %%
def schedule_passes(g: Graph) -> list[tuple[list, list]]:
    """For each pass, in order: the steps before its loop (once per row), and those inside it. The last pass
    has no loop.

    There are as many loops as the steps have phases. Loop k computes (`elements`: with all they need) the
    reductions of phase k + 1 and the element stores whose pass is k. A step that is no element stands before
    pass `phase`. A store's pass is at first its phase; it is moved to a later one as long as its memory
    (`memory_of`) is loaded in a later loop: element stores to the loop of the last such load, others behind
    it."""
    count = 1 + max(s.phase for s in g.steps)
    when = {s: s.phase for s in g.stores}
    while True:
        inside = []
        for k in range(count):
            wanted = [r for r in g.reductions if r.phase == k + 1]
            wanted += [s for s in when if s.element and when[s] == k]
            inside.append(sorted(elements(g, wanted).union(wanted), key=lambda s: s.number))
        last_load = {memory_of(g.kernel, s.args[0]): k for k, steps in enumerate(inside)
                     for s in steps if s.op == "load"}
        after = {s: last_load.get(memory_of(g.kernel, s.buffer), -1) + (not s.element) for s in when}
        late = {s: k for s, k in after.items() if k > when[s]}
        if not late:
            break
        when |= late
    before = [[s for s in g.steps if when.get(s, s.phase) == k and not _is_element(g, s)]
              for k in range(count + 1)]
    return list(zip(before, inside + [[]]))


# %%
def _is_element(g: Graph, step: Value | Store) -> bool:
    return step.element if step.op == "store" else g.is_element(step)

# %% [markdown]
# ## Narrow integers
#
# Positions are int64 in the IR, as index tensors are in PyTorch. A comparison of positions (is this element
# inside the window?) does not need the upper half. Values that are only compared, clamped or used as an
# index become int32, where the kernel's indices are; anything that could overflow or be seen from outside
# stays as it is.

# %%
CHOOSE = {"minimum", "maximum", "where"}


def narrow_positions(g: Graph) -> None:
    """Retype int64 values that hold only positions to int32."""
    def may_be(v: Value) -> bool:
        return v.dtype == torch.int64 and (v.op == "index" or v.op in CHOOSE or
                                           v.op == "constant" and abs(int(v.args[0])) < 2**31 - 1)

    narrow = {v for v in g.values if may_be(v)}
    while True:
        wide: set[Value] = set()
        for step in g.steps:
            together = all(o in narrow or o.dtype != torch.int64 for o in step.operands)
            if step.op in CHOOSE and not together:
                wide.add(step)
            if step.op not in ("indirect", "to_dtype") and not (
                    together and (step.op in COMPARISONS or step.op in CHOOSE and step in narrow)):
                wide.update(step.operands)
        if narrow.isdisjoint(wide):
            break
        narrow -= wide
    for value in narrow:
        value.dtype = torch.int32
