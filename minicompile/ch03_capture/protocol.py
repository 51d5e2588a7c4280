# %% [markdown]
# # Operators are methods
#
# `len(x)`, `x[i]`, `i in x`, `for v in x`: each is a method of a class, `__len__`, `__getitem__`, and so on. Where the
# class is the program's, the method is Python code, and is inlined: `special` calls it. Where it is a builtin class
# there is no code to look at, and what the method does to values is a row of the table `METHODS`, found by the kind of
# value and the name. `operate` asks one after the other.
#
# So what can be iterated over, or has items, is said by rows (`library/iterators.py`, `library/items.py`), one for each
# kind. The functions of `iterate.py` and `subscripts.py` only know what Python does when there is no such method.

# %%
import sys

from ..ch01_graphs.symbolic import present
from .builders import contents_of
from .exceptions import user_error
from .lookup import python_method
from .tracer import Tracer, call, unsupported
from .values import AbstractValue, DictVal, ExcVal, IterVal, ListVal, NONE, ObjVal, SymVal, Table, TupleVal
from .wrap import wrap

# (kind of value, name) -> function(tx, self, *args, **kwargs): values in, a value or None out. Of a binary operator, None means
# that it does not know the other operand.
METHODS = Table()


def method(kind, *names):
    """Register methods of a kind of value."""
    return METHODS.of(*((kind, name) for name in names))


def special(tx: Tracer, value: AbstractValue, name: str, *args) -> AbstractValue | None:
    """Call the method `name` that Python would call for an operator, when the program's own class defines it.

    None when there is no such method, or one written in C, which the interpreter must know by itself. An int is not asked for its index."""
    asked = type(value) in (ObjVal, ExcVal, TupleVal) and not (name == "__index__" and issubclass(value.cls, int))
    method = python_method(value.cls, name) if asked else None
    answer = method and call(tx, wrap(tx, method), [value, *args])
    if method and answer.cls is not ANSWERS.get(name, answer.cls):
        unsupported(tx, f"{value.cls.__name__}.{name} gives another type, which Python converts or refuses")
    if method and name == "__len__":
        number = answer.sym if type(answer) is SymVal else answer.value
        if number < 0:
            user_error(ValueError, "__len__() should return >= 0")
        if present(number) > sys.maxsize:
            user_error(OverflowError, "cannot fit 'int' into an index-sized integer")
    return answer


ANSWERS = {"__int__": int, "__index__": int, "__len__": int, "__hash__": int, "__bool__": bool,
           "__float__": float, "__complex__": complex, "__str__": str, "__repr__": str, "__format__": str}


def as_dict(tx: Tracer, container: AbstractValue, method: str) -> AbstractValue:
    """The dictionary, or list, inside an object whose class derives from dict or list and does not override `method`; another
    value as it is."""
    if type(container) is ObjVal and not python_method(container.cls, method):
        return contents_of(tx, container) or container
    return container


def operate(tx: Tracer, value: AbstractValue, name: str, *args) -> AbstractValue | None:
    """What the method `name` answers, of items or of iteration; None where nobody does. A row may leave some values of its kind to the
    class, by NotImplemented."""
    if (row := METHODS.get((type(value), name))) and (answer := row(tx, value, *args)) is not NotImplemented:
        return answer or NONE
    inner = as_dict(tx, value, name)
    if type(inner) not in (DictVal, ListVal):
        return special(tx, value, name, *args)
    answer = METHODS[type(inner), name](tx, inner, *args) or NONE
    if type(inner) is ListVal and inner.real is None and type(answer) is IterVal:        # there is no such list to hand an iterator over
        answer.over = None
    return answer
