import inspect

from chapters.tiny import Break, Frame, first_frame, supported


def _known(function):
    if not supported(function.__code__):
        raise Break("not supported")


def wrong_called_at_once(m, function, args, kwargs):
    _known(function)
    return [function(*args, **kwargs)]


def wrong_keywords_lost(m, function, args, kwargs):
    _known(function)
    m.frames.append(first_frame(function, args, {}))


def wrong_outermost(m, function, args, kwargs):
    _known(function)
    m.frames.insert(0, first_frame(function, args, kwargs))


def wrong_result_pushed(m, function, args, kwargs):
    _known(function)
    m.frames.append(first_frame(function, args, kwargs))
    return [None]


def wrong_never_supported(m, function, args, kwargs):
    raise Break("a call")


def wrong_no_defaults(m, function, args, kwargs):
    _known(function)
    m.frames.append(Frame(function, inspect.signature(function).bind(*args, **kwargs).arguments, []))


def wrong_in_place_of_the_caller(m, function, args, kwargs):
    _known(function)
    m.frames[-1] = first_frame(function, args, kwargs)


def right_by_hand(m, function, args, kwargs):
    if supported(function.__code__):
        bound = inspect.signature(function).bind(*args, **kwargs)
        bound.apply_defaults()
        m.frames += [Frame(function, {name.replace("implicit", "."): v for name, v in bound.arguments.items()}, [])]
        return None
    raise Break(f"{function} is left to Python")
