# %% [markdown]
# # When memory is taken and given back
#
# The order of kernels decides how much memory is alive at once, and the plan decides who gets which. Both
# are settled here, at compile time, so that the host program has nothing left to decide: it allocates,
# calls, and drops names exactly where the plan says.
#
# Three ways to save:
#
# - *free at last use*: a name dies after the last step that reads it;
# - *in place*: an output may take over the memory of a value that dies in the same kernel, if each element
#   is read only at the index at which the output writes it. That includes inputs that the caller gives away:
#   the gradient of an activation overwrites the activation;
# - *reuse*: an allocation may take over dead memory of exactly the same size and dtype, which saves the call
#   to the allocator. But keeping dead memory around for a later reuse must not raise the peak.

# %%
import heapq
from collections import Counter
from dataclasses import dataclass, field, replace

import torch

from ..ch07_loops.ir import Buffer, Extern, Loop, Program, View, written_by
from .dependencies import dependency_edges, nbytes, storage_size
from .kernel import Kernel, pieces_of

aten = torch.ops.aten

# %% [markdown]
# ## The order
#
# Two orders are tried, and the one with the lower peak wins. The first keeps the program's own order: what
# the program computes early runs early. The second is list scheduling: among the steps that are ready, take
# the one that frees most and allocates least.

# %%
WINDOW = 16      # how many ready steps the greedy order compares


def order_for_memory(program: Program, steps: dict[int, Kernel | Extern],
                     before: dict[int, set[int]] | None = None) -> list[Kernel | Extern]:
    """`steps`, which are keyed by their position in the program, in a topological order. before: what each needs, if known."""
    before = dependency_edges(steps, program.buffers) if before is None else before
    orders = [[steps[i] for i in _topological(program, steps, before, greedy)] for greedy in (False, True)]
    peaks = [lifetimes(program, order).peak for order in orders]
    return orders[1] if peaks[1] < 0.95 * peaks[0] else orders[0]


# %% [markdown]
# A step is *ready* when everything that it needs has run. The program's own order takes the first ready step each
# time. The greedy order compares up to sixteen of them: `_balance` adds the bytes of what a step writes, and
# subtracts those of every input that it is the last to read.

# %%
def _topological(program: Program, steps, before: dict[int, set[int]], greedy: bool) -> list[int]:
    """Kahn's algorithm; the next step is the first ready one, or the one with the best balance of bytes."""
    waiting = {i: len(b) for i, b in before.items()}
    after: dict[int, list[int]] = {i: [] for i in steps}
    for i, b in before.items():
        for j in b:
            after[j].append(i)
    uses, pinned = _use_counts(program, steps.values())
    ready = [i for i in steps if not waiting[i]]
    heapq.heapify(ready)
    order = []
    while ready:
        pick = heapq.heappop(ready)
        if greedy and ready:
            options = [pick] + [heapq.heappop(ready) for _ in range(min(WINDOW - 1, len(ready)))]
            pick = min(options, key=lambda i: (_balance(program, steps[i], uses, pinned), i))
            for i in options:
                if i != pick:
                    heapq.heappush(ready, i)
        order.append(pick)
        for name in steps[pick].inputs:
            uses[program.roots[name]] -= 1
        for i in after[pick]:
            waiting[i] -= 1
            if not waiting[i]:
                heapq.heappush(ready, i)
    assert len(order) == len(steps), "the fused program has a cycle"
    return order


def _use_counts(program: Program, steps) -> tuple[dict[str, int], set[str]]:
    """How many steps read each root, and the roots that live to the end: inputs, constants and outputs."""
    uses = Counter(program.roots[name] for step in steps for name in step.inputs)
    pinned = {program.roots[v.buffer] for v in program.outputs if isinstance(v, View)}
    return uses, pinned | set(program.constants) | set(program.inputs) - program.owned


def _balance(program: Program, step, uses, pinned) -> int:
    """Bytes allocated minus bytes freed by running the step now."""
    b = program.buffers
    total = sum(nbytes(b[n]) for n in written_by(step) if b[n].alias_of is None)
    for root in {program.roots[n] for n in step.inputs}:
        if uses[root] == 1 and root not in pinned:
            total -= nbytes(b[root])
    return total

# %% [markdown]
# ## Lifetimes
#
# `Lifetimes` says for each root at which step it is born and after which it is dead. Roots that live to the
# end have no death. Inputs that the caller gives away (the activations saved for a backward pass) are alive
# from the start and die after their last use: most of the memory that a backward pass frees is theirs.

# %%
@dataclass
class Lifetimes:
    birth: dict[str, int]
    death: dict[str, int]
    live: list[int]                # bytes alive during each step, allocated by the program itself

    @property
    def peak(self) -> int:
        """Bytes of the largest set of own buffers alive at once."""
        return max(self.live, default=0)


def lifetimes(program: Program, steps: list[Kernel | Extern]) -> Lifetimes:
    b, roots = program.buffers, program.roots
    birth, death = {}, {}
    for k, step in enumerate(steps):
        for n in step.outputs:
            if n is not None:
                root = roots[n]
                birth.setdefault(root, k)
                death[root] = k
        for n in step.inputs:
            death[roots[n]] = k
    given = {*program.inputs, *program.constants}
    birth = {root: k for root, k in birth.items() if root not in given}
    lasting = {*program.constants, *(roots[v.buffer] for v in program.outputs if isinstance(v, View))}
    death = {root: k for root, k in death.items() if root not in lasting}
    delta = [0] * (len(steps) + 1)
    for root, k in birth.items():
        size = nbytes(b[root])
        delta[k] += size
        if root in death:
            delta[death[root] + 1] -= size
    for root in program.owned & death.keys():
        delta[0] += nbytes(b[root])
        delta[death[root] + 1] -= nbytes(b[root])
    live, now = [], 0
    for d in delta[:-1]:
        now += d
        live.append(now)
    return Lifetimes(birth, death, live)


# %% [markdown]
# ## The plan
#
# For each step: which names to allocate before it, which to take over from a dead name, and which names to
# drop after it. Names are roots; an alias buffer is another Python name for the same tensor, bound by the
# host when the step has run.

# %%
@dataclass
class StepPlan:
    allocate: list[str] = field(default_factory=list)
    reuse: list[tuple[str, str]] = field(default_factory=list)      # (new name, name whose memory it takes)
    free: list[str] = field(default_factory=list)


@dataclass
class MemoryPlan:
    """`first`: outputs that no step writes (empty tensors). `peak`: bytes, estimated for symbolic sizes.
    `overwritten`: inputs whose memory other values take over."""

    steps: list[StepPlan]
    first: list[str]
    peak: int
    overwritten: frozenset[str] = frozenset()

# %% [markdown]
# `plan_memory` goes through the steps once, in the order in which they will run. For each value that is
# born in a step it asks three questions. Is there a value that dies in this very step, and may it be
# overwritten element by element (`_in_place`)? Then the new value gets this memory, and both of them
# together need it only once. Is there memory of the same size that died earlier (`_from_pool`)? To take it
# saves an allocation, but it means that this memory was kept in between, so it is taken only where the peak
# does not rise. If neither, the value is allocated. Behind the step everything that died is freed, and
# memory that nobody has taken over goes into the pool.
#
# The plan for `torch.relu(torch.relu(x @ w) @ w) @ w`, where all matrices are of one size. A product cannot be computed in place, since it
# reads its operands many times; a relu can:
#
#     x @ w                  buf0: allocated
#     relu                   buf1: takes over buf0
#     buf1 @ w               buf2: allocated
#     relu                   buf3: takes over buf2
#     buf3 @ w               buf4: takes over buf1
#     bytes of one matrix: 65536, peak: 131072
#
# The third product finds memory that died in the step of the second one. So five values live in two pieces of memory. Fewer would not do:
# while a product runs, its operand and its result are both alive.

# %%
def plan_memory(program: Program, steps: list[Kernel | Extern], reuse: bool = True) -> MemoryPlan:
    """Who gets which memory: a `StepPlan` for each of `steps`, in their order.

    A value is a root (`root_of`) that a kernel or a call writes for the first time (`lifetimes` says when,
    and when it dies). Before that step it is allocated, or with `reuse` takes over the memory of another
    root. A call of an operator that is not in `OUT_FORMS` allocates its own results: neither. Candidates for a take-over:
    first, in place, a root that dies in this step (`_in_place`: of values born earlier, and of inputs in
    `program.owned`); then, `_from_pool`, a value that died earlier, of equal `_memory_class`, if keeping it
    until now does not raise the peak above that of the lifetimes. No root is taken twice. A root is freed
    after the step in which it dies, or, if its memory is taken over, after the step that takes it."""
    b = program.buffers
    times = lifetimes(program, steps)
    peak, live = times.peak, times.live
    plans = [StepPlan() for _ in steps]
    dying: dict[int, list[str]] = {}
    for root, k in times.death.items():
        dying.setdefault(k, []).append(root)
    pool: dict[tuple, list[tuple[int, str]]] = {}        # dead memory: (step of death, name)
    for k, step in enumerate(steps):
        plan, taken = plans[k], set()
        own = [d for d in dying.get(k, ()) if d in program.owned or times.birth.get(d, k) < k]
        donors = _donors(program, step, own) if reuse else {}
        for n in written_by(step):
            if times.birth.get(n) != k or isinstance(step, Extern) and step.op not in OUT_FORMS:
                continue
            donor = None
            if reuse:
                donor = _in_place(b[n], donors, taken)
                if donor is not None:
                    live[k] -= nbytes(b[n])          # one memory, not two, during this step
                else:
                    donor = _from_pool(pool.get(_memory_class(b[n]), []), k, live, peak, nbytes(b[n]))
            if donor is not None:
                taken.add(donor)
                plan.reuse.append((n, donor))
            else:
                plan.allocate.append(n)
        for root in dying.get(k, ()):
            plan.free.append(root)
            if root in times.birth and root not in taken:
                pool.setdefault(_memory_class(b[root]), []).append((k, root))
    _postpone_frees(plans)
    roots = program.roots
    written = {roots[n] for step in steps for n in written_by(step)}
    wanted = {n for step in steps for n in step.inputs}
    wanted |= {v.buffer for v in program.outputs if isinstance(v, View)}
    first = {roots[n] for n in wanted} - written - set(program.inputs) - set(program.constants)
    overwritten = frozenset(old for plan in plans for _, old in plan.reuse) & program.owned
    return MemoryPlan(plans, sorted(first), max(live, default=0), overwritten)


# %% [markdown]
# The host can give a matrix product the tensor to write into, through its `out=` form. The Python bindings
# (`torch.mm`) parse their arguments about twice as fast as the generic operator object, which
# matters when a call is all there is.

# %%
OUT_FORMS = {aten.mm.default: torch.mm, aten.bmm.default: torch.bmm, aten.addmm.default: torch.addmm,
             aten.baddbmm.default: torch.baddbmm}


def _memory_class(buffer: Buffer) -> tuple:
    return buffer.device, buffer.dtype, storage_size(buffer)


def _from_pool(dead: list[tuple[int, str]], k: int, live: list[int], peak: int, size: int) -> str | None:
    """The youngest dead buffer that can be kept from its death to step k without raising the peak."""
    for position in range(len(dead) - 1, -1, -1):
        death, name = dead[position]
        if all(live[m] + size <= peak for m in range(death + 1, k)):
            for m in range(death + 1, k):
                live[m] += size
            del dead[position]
            return name
        if k - death > 64:
            break
    return None


def _postpone_frees(plans: list[StepPlan]) -> None:
    """A name whose memory is taken over later must not be dropped before."""
    taken_at = {old: k for k, plan in enumerate(plans) for _, old in plan.reuse}
    for k, plan in enumerate(plans):
        plan.free = [n for n in plan.free if n not in taken_at]
    for old, k in taken_at.items():
        plans[k].free.append(old)

# %% [markdown]
# ## In place
#
# A kernel may write `y` over `x` when `x` dies here, and each element of `x` is read only at the index at
# which `y` is written, by the same iteration and not by a later loop. A reduction kernel walks its elements
# more than once: there, nothing after the loop that writes `y` may depend on `x`, not even through a local
# value, because code generators recompute local values from their inputs. What is after what depends on who runs the kernel: C++
# stores in its last walk, in the order of the loops, and Triton in the first walk that knows the value. `orders_of` gives both,
# and the answer has to be yes in both.

# %%
def _donors(program: Program, step, dying: list[str]) -> dict[tuple, list[tuple[str, list[Kernel], set[str]]]]:
    """What a kernel may write over, by class of memory: the name, the pieces of the kernel that read it, and all its names there."""
    if not isinstance(step, Kernel):
        return {}
    b, readers, names = program.buffers, {}, {}
    for piece in pieces_of(step):
        for n in piece.inputs:
            readers.setdefault(n, []).append(piece)
    for n in step.inputs + step.outputs:
        names.setdefault(program.roots[n], set()).add(n)
    donors: dict[tuple, list] = {}
    for x in dying:
        if x in readers and b[x].alias_of is None:
            donors.setdefault(_memory_class(b[x]), []).append((x, readers[x], names[x]))
    return donors


def _in_place(new: Buffer, donors: dict, taken: set[str]) -> str | None:
    if new.alias_of is None:
        for x, pieces, names in donors.get(_memory_class(new), ()):
            if x not in taken and all(new.name in p.outputs and overwrites_safely(p, x, new.name, names) for p in pieces):
                return x
    return None


def orders_of(kernel: Kernel) -> list[list[Loop]]:
    """The orders in which its loops may run: as they stand, and, where there are reductions, those of an earlier walk first, store by
    store. The walk of a store is the number of complete reductions that it waits for; one over nothing but dims of size 1 is none."""
    if not kernel.reduction_vars:
        return [kernel.loops]
    known: dict[str, int] = {}
    walks: list[tuple[int, Loop]] = []
    for loop in kernel.loops:
        for part in [loop] if len(loop.stores) == 1 else [replace(loop, stores=(store,)) for store in loop.stores]:
            walk = max((known.get(n, 0) for n in part.inputs), default=0)
            walks.append((walk, part))
            known[part.stores[0].buffer] = walk + (bool(loop.reduction_vars) and any(v.op == "reduce" for v in part.body))
    return [kernel.loops, [part for _, part in sorted(walks, key=lambda pair: pair[0])]]


# %% [markdown]
# The question is then asked of one order at a time. `depends` grows from `old` to all buffers of the kernel that are computed from it;
# `at` is where `new` is written. A loop after that write which reads `old`, or, where rows are walked again, anything in `depends`,
# says no. So does a read of `old` at another index than `at`, or a masked one: those are collected in `found` and compared at the end,
# because a read may come before the write is known.

# %% tags=["exercise:overwrites-safely"]
def overwrites_safely(kernel: Kernel, old: str, new: str, same_memory: set[str] = frozenset()) -> bool:
    """May `new` be written into the memory of `old`, a buffer that dies in this kernel?

    Ask the `loads` and `stores` of its loops, in each of the orders of `orders_of`. Yes only if in all of them some loop writes
    `new`, neither masked nor with a mode; every read of `old` is unmasked and at the very index of that write; no loop after
    that one reads `old`; in a kernel that reduces (it walks its rows again), no loop after it reads anything computed from
    `old` either, through any number of this kernel's buffers; and `same_memory`, all names of the kernel that
    are memory of `old`, has no other name in it."""
    if same_memory - {old}:
        return False
    for loops in orders_of(kernel):
        depends: set[str] = {old}        # buffers of this kernel computed from `old`
        at, found, after = None, [], False
        for loop in loops:
            if after and any(r.buffer == old or kernel.reduction_vars and r.buffer in depends for r in loop.loads):
                return False
            found += [r for r in loop.loads if r.buffer == old]
            if any(r.buffer in depends for r in loop.loads):
                depends.update(loop.outputs)
            for w in loop.stores:
                if w.buffer == new:
                    if w.mask is not None or w.mode is not None:
                        return False
                    at, after = w.index, True
        if at is None or any(r.index != at or r.mask is not None for r in found):
            return False
    return True
