from functools import partial

from minicompile.ch01_graphs.symbolic import _atom_bounds, as_expr


def general(e, swap=True, const=True, negative=True, upper=0, unknown=False):
    e = as_expr(e)
    if isinstance(e, int):
        return e, e
    lows, highs = [e.const if const else 0], [e.const if const else 0]
    for term, c in e.terms.items():
        pairs = [_atom_bounds(a) for a in term]
        if len(pairs) > 1 and (negative and any(p[0] is None or p[0] < 0 for p in pairs)):
            pairs = [(None, None)]
        low = high = 1
        for a, b in pairs:
            low = None if a is None or low is None else low * a
            high = None if b is None or high is None else high * b
        if c < 0 and swap:
            low, high = high, low
        lows.append(None if low is None else low * c)
        highs.append(None if high is None else high * c)
    total = lambda xs: sum(x or 0 for x in xs) if unknown or None not in xs else None
    high = total(highs)
    return total(lows), high if high is None else high + upper


wrong_signs = partial(general, swap=False)
wrong_constant = partial(general, const=False)
wrong_products = partial(general, negative=False)
wrong_exclusive = partial(general, upper=1)
wrong_unknown_is_zero = partial(general, unknown=True)


def right_lists(e):
    return general(e)


SAME = [
    "- elif alow is None or alow < 0 or tlow is None:\n+ elif alow is None or alow < 0:",
    '- if c < 0:\n'
        '+ if c < 1:',
    '- if c < 0:\n'
        '+ if c <= 0:',
    '- break\n'
        '+ pass',
]
