from functools import partial

from minicompile.ch08_fusion.memory import orders_of


def _safe(kernel, old, new, same_memory=frozenset(), *, names=True, masks=True, modes=True, places=True, later=True, rows=True, deep=True,
          orders=orders_of, needs_read=False):
    if names and same_memory - {old}:
        return False
    return all(_safe_in(loops, kernel, old, new, masks, modes, places, later, rows, deep, needs_read) for loops in orders(kernel))


def _safe_in(loops, kernel, old, new, masks, modes, places, later, rows, deep, needs_read):
    depends, at, found, after = {old}, None, [], False
    for loop in loops:
        reads, writes = loop.loads, loop.stores
        if after and later and any(r.buffer == old for r in reads):
            return False
        if after and rows and kernel.reduction_vars and any(r.buffer in depends for r in reads):
            return False
        found += [r for r in reads if r.buffer == old]
        if any(r.buffer in (depends if deep else {old}) for r in reads):
            depends.update(w.buffer for w in writes)
        for w in writes:
            if w.buffer == new:
                if modes and (w.mask is not None or w.mode is not None):
                    return False
                at, after = w.index, True
    if at is None or needs_read and not found:
        return False
    return all((not places or r.index == at) and (not masks or r.mask is None) for r in found)


wrong_other_names_do_not_matter = partial(_safe, names=False)
wrong_masked_reads = partial(_safe, masks=False)
wrong_atomic_writes = partial(_safe, modes=False)
wrong_any_index = partial(_safe, places=False)
wrong_later_reads = partial(_safe, later=False)
wrong_rows_are_walked_once = partial(_safe, rows=False)
wrong_one_step_of_dependence = partial(_safe, deep=False)
wrong_loops_as_they_stand = partial(_safe, orders=lambda kernel: orders_of(kernel)[:1])
wrong_walk_by_walk = partial(_safe, orders=lambda kernel: orders_of(kernel)[-1:])


def wrong_refuses_reductions(kernel, old, new, same_memory=frozenset()):
    return not kernel.reduction_vars and _safe(kernel, old, new, same_memory)


def right_in_two_parts(kernel, old, new, same_memory=frozenset()):
    if any(n != old for n in same_memory):
        return False
    return all(_safe_in_two_parts(loops, kernel, old, new) for loops in orders_of(kernel))


def _safe_in_two_parts(loops, kernel, old, new):
    touched = [(loop.loads, loop.stores) for loop in loops]
    where = [k for k, (_, writes) in enumerate(touched) if any(w.buffer == new for w in writes)]
    stores = [w for _, writes in touched for w in writes if w.buffer == new]
    if not where or any(w.mask is not None or w.mode for w in stores):
        return False
    loads = [(k, r) for k, (reads, _) in enumerate(touched) for r in reads if r.buffer == old]
    if any(r.mask is not None or r.index != stores[-1].index or k > where[0] for k, r in loads):
        return False
    tainted = {old}
    for k, (reads, writes) in enumerate(touched):
        if tainted & {r.buffer for r in reads}:
            if k > where[0] and kernel.reduction_vars:
                return False
            tainted |= {w.buffer for w in writes}
    return True
