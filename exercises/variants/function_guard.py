from minicompile.ch02_guards.identity import strongly


def _has(function, code, defaults, kwdefaults, *, same=lambda a, b: a is b, ask_code=True, positional=True, keywords=True, count=True,
         gone=False,
         names=True):
    function = strongly(function)
    if function is None:
        return gone
    now, old = function.__defaults__ or (), defaults or ()
    pairs, kept = list((function.__kwdefaults__ or {}).items()), list(kwdefaults)
    if ask_code and function.__code__ is not strongly(code) or count and (len(now) != len(old) or len(pairs) != len(kept)):
        return False
    if positional and not all(same(a, strongly(b)) for a, b in zip(now, old)):
        return False
    return not keywords or all((n == m or not names) and same(a, strongly(b)) for (n, a), (m, b) in zip(pairs, kept))


def wrong_code_only(function, code, defaults, kwdefaults):
    return _has(function, code, defaults, kwdefaults, positional=False, keywords=False, count=False)


def wrong_equal_is_enough(function, code, defaults, kwdefaults):
    return _has(function, code, defaults, kwdefaults, same=lambda a, b: a == b)


def wrong_any_count(function, code, defaults, kwdefaults):
    return _has(function, code, defaults, kwdefaults, count=False)


def wrong_gone_is_unchanged(function, code, defaults, kwdefaults):
    return _has(function, code, defaults, kwdefaults, gone=True)


def wrong_any_names(function, code, defaults, kwdefaults):
    return _has(function, code, defaults, kwdefaults, names=False)


def wrong_any_code(function, code, defaults, kwdefaults):
    return _has(function, code, defaults, kwdefaults, ask_code=False)


def wrong_references_compared(function, code, defaults, kwdefaults):
    function = strongly(function)
    return function is not None and function.__code__ is code and function.__defaults__ == defaults


def right_one_list(function, code, defaults, kwdefaults):
    target = strongly(function)
    if target is None:
        return False
    now = [("code", target.__code__), *enumerate(target.__defaults__ or ()), *(target.__kwdefaults__ or {}).items()]
    old = [("code", code), *enumerate(defaults or ()), *kwdefaults]
    return [n for n, _ in now] == [n for n, _ in old] and all(a is strongly(b) for (_, a), (_, b) in zip(now, old))
