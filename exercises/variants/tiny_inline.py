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
    m.frames.append(first_frame(function, args, {}, m.outside))


def wrong_outermost(m, function, args, kwargs):
    _known(function)
    m.frames.insert(0, first_frame(function, args, kwargs, m.outside))


def wrong_result_pushed(m, function, args, kwargs):
    _known(function)
    m.frames.append(first_frame(function, args, kwargs, m.outside))
    return [None]


def wrong_never_supported(m, function, args, kwargs):
    raise Break("a call")


def wrong_no_defaults(m, function, args, kwargs):
    _known(function)
    m.frames.append(Frame(function, inspect.signature(function).bind(*args, **kwargs).arguments, []))


def wrong_in_place_of_the_caller(m, function, args, kwargs):
    _known(function)
    m.frames[-1] = first_frame(function, args, kwargs, m.outside)


def wrong_defaults_not_guarded(m, function, args, kwargs):
    _known(function)
    m.frames.append(first_frame(function, args, kwargs))


def right_other_order(m, function, args, kwargs):
    if supported(function.__code__):
        m.frames += [first_frame(function, tuple(args), dict(kwargs), outside=m.outside)]
        return None
    raise Break(f"{function} is left to Python")
