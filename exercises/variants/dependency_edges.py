from functools import partial

from minicompile.ch07_loops.ir import Extern, written_by
from minicompile.ch08_fusion.dependencies import must_happen


def accesses(steps):
    return ({i: names(step) for i, step in steps.items()} for names in (lambda step: step.inputs, written_by))


def _edges(steps, buffers, *, flow=True, anti=True, output=True, chain=True, effects=True, loops=False, all_effects=False):
    reads, writes = accesses(steps)
    writer = {name: i for i, names in writes.items() for name in names}
    readers = {}
    for i, names in reads.items():
        for name in names:
            readers.setdefault(name, []).append(i)
    before = {i: set() for i in steps}
    drawing = sorted(i for i, s in steps.items() if isinstance(s, Extern) and (must_happen(s) or all_effects))
    for earlier, later in zip(drawing, drawing[1:]) if effects else ():
        before[later].add(earlier)
    for i in steps:
        if flow:
            before[i].update(writer[n] for n in reads[i] if n in writer)
        for name in writes[i]:
            old = buffers[name].alias_of
            while old is not None:
                if anti:
                    before[i].update(readers.get(old, ()))
                if output and old in writer:
                    before[i].add(writer[old])
                old = buffers[old].alias_of if chain else None
        if not loops:
            before[i].discard(i)
    return before


wrong_only_flow = partial(_edges, anti=False, output=False)
wrong_no_write_after_read = partial(_edges, anti=False)
wrong_no_write_after_write = partial(_edges, output=False)
wrong_one_alias_deep = partial(_edges, chain=False)
wrong_draws_in_any_order = partial(_edges, effects=False)
wrong_every_call_is_ordered = partial(_edges, all_effects=True)
wrong_before_itself = partial(_edges, loops=True)


def right_pairwise(steps, buffers):
    def below(name):
        found = []
        while (name := buffers[name].alias_of) is not None:
            found.append(name)
        return set(found)
    before, (reads, writes) = {}, accesses(steps)
    effects = [i for i in sorted(steps) if isinstance(steps[i], Extern) and must_happen(steps[i])]
    for i in steps:
        old = set().union(*(below(n) for n in writes[i])) if writes[i] else set()
        before[i] = {j for j in steps if j != i and (set(writes[j]) & (set(reads[i]) | old) or set(reads[j]) & old)}
        if i in effects and effects.index(i):
            before[i].add(effects[effects.index(i) - 1])
    return before


SAME = [
    '- effects = sorted((i for i, step in steps.items() if isinstance(step, Extern) and has_effect(step)))\n'
        '+ effects = sorted((i for i, step in steps.items() if has_effect(step)))',
]
