from functools import partial

from minicompile.ch04_breaks.bytecode import LOCAL_OPS, NO_INDEX, disassemble, successors


def _backwards(code, *, rounds=100, union=True, kill=True, with_handlers=True, before=True, stores_read=False):
    instructions, handlers = disassemble(code)
    follow = successors(instructions, handlers if with_handlers else [])
    live = [frozenset()] * len(instructions)
    result = list(live)
    for _ in range(rounds):
        old = list(live)
        for n in range(len(instructions) - 1, -1, -1):
            i = instructions[n]
            sets = [live[m] for m in follow[n]]
            after = frozenset().union(*sets) if union or not sets else frozenset.intersection(*sets)
            result[n] = after
            if i.op in LOCAL_OPS and i.op not in NO_INDEX:
                if i.name == "STORE_FAST":
                    after = after | {i.arg} if stores_read else after - {i.arg} if kill else after
                elif i.name != "MAKE_CELL":
                    after = after | {i.arg}
            live[n] = after
        if old == live:
            break
    return {i.offset: s for i, s in reversed(list(zip(instructions, live if before else result)))}


wrong_one_round = partial(_backwards, rounds=1)
wrong_two_rounds = partial(_backwards, rounds=2)
wrong_live_on_all_ways = partial(_backwards, union=False)
wrong_writes_do_not_end_it = partial(_backwards, kill=False)
wrong_no_handlers = partial(_backwards, with_handlers=False)
wrong_after_instead_of_before = partial(_backwards, before=False)
wrong_writes_read = partial(_backwards, stores_read=True)


def right_worklist(code):
    instructions, handlers = disassemble(code)
    follow = successors(instructions, handlers)
    preceding = {n: [] for n in follow}
    for n, targets in follow.items():
        for m in targets:
            preceding[m].append(n)
    live = {n: set() for n in follow}
    for n, i in enumerate(instructions):
        if i.op not in LOCAL_OPS or i.op in NO_INDEX or i.name in ("STORE_FAST", "MAKE_CELL"):
            continue
        pending = [n]
        while pending:
            m = pending.pop()
            if i.arg in live[m]:
                continue
            live[m].add(i.arg)
            pending += [p for p in preceding[m] if not (instructions[p].name == "STORE_FAST" and instructions[p].arg == i.arg)]
    found = {}
    for n, i in enumerate(instructions):
        found.setdefault(i.offset, frozenset(live[n]))
    return found


SAME = [
    '- for n in range(len(instructions) - 1, -1, -1):\n'
        '+ for n in range(len(instructions) - 2, -1, -1):',
]
