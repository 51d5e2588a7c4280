# %% [markdown]
# # Items
#
# `a[i]`, `a[i] = b`, `del a[i]` and `a in b`: one function each. What `container[key]` means depends on the container, and so does
# what has to be guarded; each kind has its rows (`library/items.py`). Of
#
#     def picked(x, sizes, rates, log):
#         if "warmup" not in rates:
#             x = x * rates["start"]
#         log["last"] = sizes[1]
#         return x + sizes[-1]
#
# called with `[2, 4, 8]`, `{"start": 0.1, "end": 0.01}` and an empty `log`, the version asks for
#
#     rates is a dict
#     rates has no key 'warmup'
#     rates['start'] == 0.1
#     sizes is a list
#     sizes has 3 elements
#     log is a dict
#     sizes[2] == 8
#     sizes[1] is an int
#     log is another object than globals()
#     rates is another object than log
#
# Nothing is said of `rates["end"]`, nor of how many rates there are. `sizes[-1]` was looked at, since it stands in the graph as a
# number, while `sizes[1]` was only handed on: any int will do, because the text after the graph reads it again. The last two lines
# are due to the write. The trace has two values for `rates` and `log`, and the write to one would not be seen in the other.
#
#     __t2 = sizes[1]
#     log['last'] = __t2
#
# `in` is a comparison with each item, except where a container has keys. Then the keys are looked up,
# and the answer is guarded in the weakest form: that a key is missing is a guard on this one key, and says
# nothing of the others.
#
# `operate` (`protocol.py`) finds the method, of the program's class or in the table. What has no row is left to Python if all
# is constant (`fold`). A key that varies from call to call would be looked at by a search; where the keys are plain, the entry
# makes the comparison at each call instead, and its answer is guarded (`is_among`).

# %%
import operator
import types

import numpy

from .builders import as_python
from .comparisons import equal, truth
from .exceptions import user_error
from .iterate import values_of
from .keys import guard_keys, guard_missing, key_in
from .operations import fold
from .protocol import operate, special
from .tracer import Tracer, unsupported
from .values import AbstractValue, DictVal, FALSE, NotConstant, TensorVal, const, describe
from .varying import computed, varies_in


def is_among(tx, keys, item: AbstractValue) -> AbstractValue | None:
    """Whether a number or a text that varies is one of `keys`, which is guarded; None where that takes a look at it."""
    plain = varies_in(item) and all(type(key) in (int, float, str, bool, type(None)) for key in keys)
    return computed(tx, operator.contains, [const(tuple(keys)), item], {}) if plain else None


def is_missing(tx, dictionary: DictVal, key: AbstractValue) -> bool:
    """Whether there is no such key, which is then guarded."""
    if is_among(tx, dictionary.items, key) is FALSE:
        guard_keys(tx, dictionary)
        return True
    k = key_in(tx, dictionary, key)
    if k not in dictionary.items:
        guard_missing(tx, dictionary, k)
    return k not in dictionary.items


# %% [markdown]
# The four operations. An answer of `operate` ends the matter; what follows is for values without a row, which are constants (a character
# of a text, an attribute of a `torch.Size`) or break the graph. An index into a sequence has to be a number now, and `index_of` asks
# an object of the program for its `__index__`.

# %%
def contains(tx: Tracer, container: AbstractValue, item: AbstractValue) -> bool:
    """item in container"""
    answer = operate(tx, container, "__contains__", item)
    return truth(tx, answer) if answer is not None else any(equal(tx, v, item) for v in values_of(tx, container))


def index_of(tx, key: AbstractValue):
    """A sequence index as an int or slice."""
    if type(key) is TensorVal:
        unsupported(tx, "a list index that is not a Python constant")
    try:
        index = as_python(tx, key)
        return operator.index(index) if isinstance(index, (int, numpy.integer)) else index       # of an IntEnum, say
    except NotConstant:
        index = special(tx, key, "__index__") or unsupported(tx, f"{describe(key)} as an index")
        return index.value


def get_item(tx: Tracer, container: AbstractValue, key: AbstractValue) -> AbstractValue:
    """container[key]"""
    return operate(tx, container, "__getitem__", key) or fold(
        tx, operator.getitem, [container, key], reason=f"a subscript of {describe(container)}")


def set_item(tx: Tracer, container: AbstractValue, key: AbstractValue, value: AbstractValue):
    """container[key] = value"""
    refuse_proxy(container, "assignment")
    if operate(tx, container, "__setitem__", key, value) is None:
        unsupported(tx, f"assigning to a subscript of {describe(container)}")


def refuse_proxy(container, what):
    """`vars(SomeClass)` can be read only, and is a dictionary of the trace like others."""
    if container.cls is types.MappingProxyType:
        user_error(TypeError, f"'mappingproxy' object does not support item {what}")


def delete_item(tx: Tracer, container: AbstractValue, key: AbstractValue):
    """del container[key]"""
    refuse_proxy(container, "deletion")
    if operate(tx, container, "__delitem__", key) is None:
        unsupported(tx, f"deleting a subscript of {describe(container)}")
