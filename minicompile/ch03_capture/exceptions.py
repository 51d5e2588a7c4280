# %% [markdown]
# # Exceptions of the traced program
#
# `UserError` carries an exception that the *traced* program raises, through the interpreter's own Python
# frames, to the interpreter frame whose exception table covers it. It must not be confused with
# `Unsupported`, which is ours.
#
# Much of the time Python itself does the work, and calls the interpreter back now and then: a sort asks which item is smaller.
# What Python raises there is the program's, what the interpreter raises is ours. `user_errors` tells them apart
# by the traceback, in which a function that goes on interpreting is marked with `interprets`.

# %%
import traceback

from ..errors import StrictError, Unsupported
from .values import AbstractValue, ExcVal, LITERALS, NotConstant, const


class UserError(Exception):
    def __init__(self, exc: ExcVal):
        super().__init__(exc.cls.__name__)
        self.exc = exc


def user_error(cls, *args, **attributes):
    """Raise `cls(*args)` in the traced program; args are values or constants, attributes are values."""
    args = [a if isinstance(a, AbstractValue) else const(a) for a in args]
    raise UserError(ExcVal(cls=cls, args=args, attrs=attributes))


INTERPRETING: set = set()            # codes of functions


def interprets(function):
    INTERPRETING.add(function.__code__)
    return function


class user_errors:
    """What Python raises inside, the traced program raises. (A generator as a context would be held by the traceback of
    what it catches, and hold it: see `Unsupported`.)"""

    def __enter__(self):
        pass

    def __exit__(self, kind, error, trace):
        if isinstance(error, Exception) and not isinstance(error, (Unsupported, UserError, NotConstant, StrictError)) and \
                not any(frame.f_code in INTERPRETING for frame, _ in traceback.walk_tb(trace)):
            if any(type(v) not in LITERALS for v in vars(error).values()):          # as the function of NumPy that has no loop for a text
                raise Unsupported(f"{kind.__name__}, which holds objects") from None
            fields = {name: const(v) for name, v in vars(error).items()}            # such as `pos` of a `re.error`
            raise UserError(ExcVal(cls=type(error), args=[const(a) for a in error.args], attrs=fields))
