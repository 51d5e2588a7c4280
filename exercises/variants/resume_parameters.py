from minicompile.ch04_breaks.resume import SUSPENDS, needed_locals
from minicompile.errors import Unsupported


def _names(code, offset, bound, *, live=True, cells=True, set_=True, order=True, none=True, flags=True):
    if code.co_flags & SUSPENDS and flags:
        raise Unsupported("generator")
    needed = needed_locals(code, offset) if live else set(code.co_varnames)
    shared = (*code.co_cellvars, *code.co_freevars) if cells else ()
    found = [n for n in code.co_varnames if n in needed and n not in shared
             and ((bound is None and none) or not set_ or n in (bound or ()))]
    return tuple(found if order else sorted(found, reverse=True))


def wrong_everything(code, offset, bound):
    return _names(code, offset, bound, live=False)


def wrong_cells_too(code, offset, bound):
    return _names(code, offset, bound, cells=False) + tuple(code.co_cellvars)


def wrong_not_only_bound(code, offset, bound):
    return _names(code, offset, bound, set_=False)


def wrong_order(code, offset, bound):
    return _names(code, offset, bound, order=False)


def wrong_none_is_nothing(code, offset, bound):
    return _names(code, offset, bound, none=False)


def wrong_generators(code, offset, bound):
    return _names(code, offset, bound, flags=False)


def wrong_parameters_of_the_original(code, offset, bound):
    return code.co_varnames[:code.co_argcount]


def right_by_sets(code, offset, bound):
    if code.co_flags & SUSPENDS:
        raise Unsupported("this code cannot be continued")
    wanted = needed_locals(code, offset) - {*code.co_cellvars, *code.co_freevars}
    if bound is not None:
        wanted &= set(bound)
    return tuple(sorted(wanted & set(code.co_varnames), key=code.co_varnames.index))


SAME = [
    "- live, cells = (needed_locals(code, offset), (*code.co_cellvars, *code.co_freevars))\n"
        "+ live, cells = (needed_locals(code, offset), (*code.co_cellvars,))",
]
