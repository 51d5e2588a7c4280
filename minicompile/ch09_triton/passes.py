# %% [markdown]
# # Before printing
#
# Before any text is written: two improvements of a kernel's graph of values, and the question which steps happen
# on which walk along a row.

# %%
import torch

from ..ch07_loops.builder import COMPARISONS
from ..ch07_loops.ir import Value, in_order, root_of
from ..ch08_fusion.fuse import Schedule
from ..ch08_fusion.kernel import Kernel, pieces_of
from ..ch08_fusion.values import LinkedKernel, elements, link, relink

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
def schedule_passes(g: LinkedKernel) -> list[tuple[list, list]]:
    """For each pass, in order: the steps before its loop (once per row), and those inside it. The last pass
    has no loop.

    There are as many loops as the steps have phases. Loop k computes (`elements`: with all they need) the
    reductions of phase k + 1 and the element stores whose pass is k. A step that is no element stands before
    pass `phase`. A store's pass is at first its phase; it is moved to a later one as long as its memory
    (`root_of`) is loaded in a later loop: element stores to the loop of the last such load, others behind
    it."""
    count = 1 + max(s.phase for s in g.steps)
    when = {s: s.phase for s in g.stores}
    while True:
        inside = []
        for k in range(count):
            wanted = [r for r in g.reductions if r.phase == k + 1]
            wanted += [s for s in when if g.is_element(s) and when[s] == k]
            inside.append(sorted({*elements(g, wanted), *wanted}, key=in_order))
        last_load = {root_of(g.kernel.buffers, s.buffer): k for k, steps in enumerate(inside)
                     for s in steps if s.op == "load"}
        after = {s: last_load.get(root_of(g.kernel.buffers, s.buffer), -1) + (not g.is_element(s)) for s in when}
        late = {s: k for s, k in after.items() if k > when[s]}
        if not late:
            break
        when |= late
    before = [[s for s in g.steps if when.get(s, s.phase) == k and not g.is_element(s)]
              for k in range(count + 1)]
    return list(zip(before, inside + [[]]))


# %% [markdown]
# Chapter 8 has decided which result is written over which value that dies in the kernel, from its loops and its two `orders_of` them.
# Here are the steps themselves, in the order in which they are printed: walk by walk where a row is walked along, one after the other where
# it is held. With `config.check_passes` a schedule must bear this out.

# %%
def verify_in_place(schedule: Schedule) -> None:
    """No kernel loads from memory after it has stored there what takes it over. (Where a program walks over tiles of whole rows,
    all loads of a tile come first.)"""
    for step, plan in zip(schedule.steps, schedule.plan.steps, strict=True):
        for kernel in pieces_of(step) if plan.reuse and isinstance(step, Kernel) else ():
            g = with_online_softmax(link(kernel))
            walks = [s for before, inside in schedule_passes(g) for s in (*before, *inside)]
            for steps in (g.steps, walks) if not kernel.walked else ():
                for new, old in plan.reuse:
                    stored = next((k for k, s in enumerate(steps) if s.op == "store" and s.buffer == new), len(steps))
                    assert not any(s.op == "load" and s.buffer == old for s in steps[stored:]), f"{kernel.name}: {new} over {old}"


# %% [markdown]
# ## The online softmax
#
# A kernel that has both `max(x)` and `sum(exp(x - max(x)))` can compute the two in one walk along the row: the
# maximum becomes a `softmax` reduction of two results, and the sum becomes the second of them.

# %%
def with_online_softmax(g: LinkedKernel) -> LinkedKernel:
    """The graph with such sums turned into results of their maxima."""
    top_of = {s: top for s in g.reductions if s.args[0] == "sum" and (top := _shifted_by(s.args[1])) and top.dtype == s.dtype}
    tops = set(top_of.values())

    def step(new: LinkedKernel, value: Value, args: tuple) -> Value:
        if value in tops:
            return new.make("reduce", ("softmax", args[1], None), value.dtype)
        if value in top_of:
            return new.make("get", (_shifted_by(args[1]), 1), value.dtype)
        return new.again(value, args)

    return relink(g, step) if tops else g


def _shifted_by(value: Value) -> Value | None:
    """The maximum m of a floating-point `exp(x - m)`, if that is what `value` is."""
    if value.op == "exp" and value.args[0].op == "sub":
        x, top = value.args[0].args
        if top.op == "reduce" and top.args[0] in ("max", "softmax") and top.args[1] is x:
            return top
    return None

# %% [markdown]
# ## Narrow integers
#
# Positions are int64 in the IR, as index tensors are in PyTorch. A comparison of positions (is this element
# inside the window?) does not need the upper half. Values that are only compared, clamped or used as an
# index become int32, where the kernel's indices are; anything that could overflow or be seen from outside
# stays as it is.

# %%
CHOOSE = {"minimum", "maximum", "where"}


def narrow_positions(g: LinkedKernel) -> LinkedKernel:
    """The graph with int64 values that hold only positions as int32."""
    def may_be(v: Value) -> bool:
        return v.dtype == torch.int64 and (v.op == "index" or v.op in CHOOSE or
                                           v.op == "constant" and abs(int(v.constant)) < 2**31 - 1)

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
    if not narrow:
        return g
    return relink(g, lambda new, value, args: new.make(value.op, args, torch.int32) if value in narrow else new.again(value, args))
