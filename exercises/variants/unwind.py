from functools import partial


def _unwind(frame, offset, exc, *, first=0, last=-1, lasti=True, on_top=False, keep=False, in_place=True, index=True, otherwise=False):
    for entry in frame.decoded.table:
        if entry.start + first <= offset <= entry.end + last:
            pushed = [exc, LASTI][::1 if on_top else -1] if entry.lasti and lasti else [exc]
            stack = frame.stack if in_place else list(frame.stack)
            stack[len(stack) if keep else entry.depth:] = pushed
            frame.stack = stack
            jump(frame, entry.target) if index else setattr(frame, "ip", entry.target)
            return True
    return otherwise


wrong_end_included = partial(_unwind, last=0)
wrong_start_excluded = partial(_unwind, first=1)
wrong_no_lasti = partial(_unwind, lasti=False)
wrong_lasti_on_top = partial(_unwind, on_top=True)
wrong_stack_kept = partial(_unwind, keep=True)
wrong_new_list = partial(_unwind, in_place=False)
wrong_offset_as_index = partial(_unwind, index=False)
wrong_always_handled = partial(_unwind, otherwise=True)


def right_search(frame, offset, exc):
    entry = next((e for e in reversed(frame.decoded.table) if offset in range(e.start, e.end)), None)
    if entry is not None:
        while len(frame.stack) > entry.depth:
            frame.stack.pop()
        frame.stack += [LASTI] * bool(entry.lasti) + [exc]
        jump(frame, entry.target)
    return entry is not None
