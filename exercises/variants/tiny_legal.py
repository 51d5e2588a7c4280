from chapters.tiny import Read, nest, position, written


def _refused(first, second, *, nests=True, places=True, told=True, loops=None, crossing=False):
    loops = first.loops + second.loops
    shape = nest(loops)
    if shape is None:
        return "other rows" if nests else None
    made = {loop.node: written(loop, shape[0]) for loop in loops}
    for loop in second.loops if crossing else loops:
        for x in loop.operands:
            if isinstance(x, Read):
                at = position(x.seen, shape[0])
                if at is None and told or places and x.node in made and at != made[x.node]:
                    return "another place"
                if crossing and x.node in {one.node for one in first.loops}:
                    return "crossing"
    return None


def wrong_always(first, second):
    return None


def wrong_never(first, second):
    return "no"


def wrong_any_nest(first, second):
    return _refused(first, second, nests=False)


def wrong_any_place(first, second):
    return _refused(first, second, places=False)


def wrong_nothing_may_cross(first, second):
    return _refused(first, second, crossing=True)


def wrong_sizes(first, second):
    return None if {loop.size for loop in first.loops} == {loop.size for loop in second.loops} else "sizes"


def wrong_sentence_for_yes(first, second):
    return _refused(first, second) or "they can be one"


def right_set_of_places(first, second):
    both = [*first.loops, *second.loops]
    if not nest(both):
        return "there are no common rows and columns"
    rows, _ = nest(both)
    written_at = {(loop.node, written(loop, rows)) for loop in both}
    read_at = {(x.node, position(x.seen, rows)) for loop in both for x in loop.operands if isinstance(x, Read)}
    inside = {loop.node for loop in both}
    wrong = [node for node, at in read_at if at is None or node in inside and (node, at) not in written_at]
    return f"{wrong[0]} is read somewhere else" if wrong else None
