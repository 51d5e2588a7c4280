from chapters.tiny import kernel


def _between(steps, a, b):
    a, b = sorted((a, b), key=steps.index)
    return a, b, steps[:steps.index(a)], steps[steps.index(a) + 1:steps.index(b)], steps[steps.index(b) + 1:]


def wrong_at_the_first(steps, a, b):
    a, b, before, between, after = _between(steps, a, b)
    return [*before, kernel(a.loops + b.loops), *between, *after]


def wrong_at_the_second(steps, a, b):
    a, b, before, between, after = _between(steps, a, b)
    return [*before, *between, kernel(a.loops + b.loops), *after]


def wrong_never(steps, a, b):
    return None


def wrong_only_neighbours(steps, a, b):
    a, b, before, between, after = _between(steps, a, b)
    return None if between else [*before, kernel(a.loops + b.loops), *after]


def wrong_direct_needs_only(steps, a, b):
    a, b, before, between, after = _between(steps, a, b)
    late = [s for s in between if s.reads & a.writes]
    if any(b.reads & s.writes for s in late):
        return None
    return [*before, *[s for s in between if s not in late], kernel(a.loops + b.loops), *late, *after]


def wrong_order_of_loops(steps, a, b):
    found = right_from_below(steps, b, a)
    _, second, *_ = _between(steps, a, b)
    return found and [kernel(s.loops[::-1]) if second.loops[0] in s.loops and len(s.loops) > 1 else s for s in found]


def wrong_list_changed(steps, a, b):
    found = right_from_below(steps, a, b)
    if found:
        steps[:] = found
    return found


def right_from_below(steps, a, b):
    a, b, before, between, after = _between(steps, a, b)
    needed, early = set(b.reads), []
    for s in reversed(between):
        if s.writes & needed:
            if s.reads & a.writes:
                return None
            early.insert(0, s)
            needed |= s.reads
    return [*before, *early, kernel(a.loops + b.loops), *[s for s in between if s not in early], *after]
