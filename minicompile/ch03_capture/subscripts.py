# %% [markdown]
# # Items
#
# `a[i]`, `a[i] = b`, `del a[i]` and `a in b`: one function each. What `container[key]` means depends on the container, and so does
# what has to be guarded; each kind has its rows (`library/items.py`).
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

from .exceptions import user_error
from .iterate import values_of
from .comparisons import equal, truth
from .operations import fold
from .protocol import operate, special
from .tracer import Tracer, unsupported
from .values import AbstractValue, DictVal, FALSE, NotConstant, TensorVal, const, describe
from .varying import computed, varies_in
from .wrap import as_python, guard_keys, guard_missing, key_in


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


def contains(tx: Tracer, container: AbstractValue, item: AbstractValue) -> bool:
    """item in container"""
    answer = operate(tx, container, "__contains__", item)
    return truth(tx, answer) if answer is not None else any(equal(tx, v, item) for v in values_of(tx, container))


def index_of(tx, key: AbstractValue):
    """A sequence index as an int or slice."""
    if type(key) is TensorVal:
        unsupported(tx, "a list index that is not a Python constant")
    try:
        return as_python(tx, key)
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
    if container.cls is types.MappingProxyType:
        user_error(TypeError, f"'mappingproxy' object does not support item {what}")


def delete_item(tx: Tracer, container: AbstractValue, key: AbstractValue):
    """del container[key]"""
    refuse_proxy(container, "deletion")
    if operate(tx, container, "__delitem__", key) is None:
        unsupported(tx, f"deleting a subscript of {describe(container)}")
