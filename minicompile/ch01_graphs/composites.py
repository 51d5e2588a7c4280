# %% [markdown]
# # Operators that ask for numbers
#
# Some operators are composed of others in C++, with sizes as plain numbers (`interpolate`, `lstm_cell`), and
# ask a fake whose sizes are symbolic for them. Of many, PyTorch has a version in Python, which takes symbols:
# such a call is made again, with these. If that asks as well, it gets the sizes at hand, and a guard fixes
# them.
#
# One thing would be lost on the way. Autocast attaches its casts to operators, and the version in Python may be composed of
# others than that in C++: on a GPU the parts of `interpolate` are cast to float32, and the arithmetic that computes it in
# Python is not. So the version in C++ is watched first, on fakes that have the sizes at hand. What it does nothing with but
# cast it is cast here.
#
# Two versions in Python give something else than those in C++: that of a recurrent network forgets the dropout between layers
# (`rules/recurrent.py`), and that of the nearest neighbours along one dim leaves them in the order of the operand, not row by row.

# %%
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from .corrections import outside
from .fake import DispatchMode, FakeTensor, form_of
from .layouts import present
from .recipes import fake_call
from .rules.floats import with_floats
from .rules.recurrent import RECURRENT, layer_by_layer
from .shapes import answering, needs_numbers

aten = torch.ops.aten


def cast_as_autocast(function, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments, as autocast hands them to the operators that `function` is composed of in C++."""
    if not torch._C._is_any_autocast_enabled():
        return args, kwargs
    flat, spec = pytree.tree_flatten((args, kwargs))
    twins = list(map(_with_numbers, flat))
    uses: dict = {id(t): set() for t in twins if isinstance(t, FakeTensor)}

    class Watch(DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            cast = func is aten._to_copy.default and kwargs.keys() == {"dtype"}
            for x in pytree.tree_leaves((args, kwargs)):
                if id(x) in uses:
                    uses[id(x)].add(kwargs["dtype"] if cast else None)
            return fake_call(func, args, kwargs or {})

    with outside(), Watch():
        twin_args, twin_kwargs = pytree.tree_unflatten(twins, spec)
        try:
            function(*twin_args, **twin_kwargs)
        except Exception:               # the call itself will raise it
            return args, kwargs
    casts = [next(iter(found)) if len(found := uses.get(id(t), ())) == 1 else None for t in twins]
    return pytree.tree_unflatten([x if dtype is None else x.to(dtype) for x, dtype in zip(flat, casts)], spec)


def _with_numbers(x):
    """The same with the sizes of the present call; a fake shares no memory with the given one."""
    if not isinstance(x, FakeTensor):
        return present(x)
    sizes, strides, _ = form_of(x)
    return FakeTensor(torch.empty_strided(sizes, strides, dtype=x.dtype, device="meta"), x.device)


def by_python(function, *args, **kwargs):
    if function in RECURRENT:
        return layer_by_layer(function, *args)
    out = function(*args, **kwargs)
    return out.contiguous() if function is F.interpolate and out.dim() == 3 else out


def with_symbols(function, *args, **kwargs):
    """function(*args, **kwargs), where sizes of fakes and floats may be symbolic."""
    if (out := with_floats(function, args, kwargs)) is not NotImplemented:
        return out
    try:
        return function(*args, **kwargs)
    except RuntimeError as error:
        if not needs_numbers(error):
            raise
    args, kwargs = cast_as_autocast(function, args, kwargs)
    try:
        with torch._C._EnablePythonDispatcher():
            return by_python(function, *args, **kwargs)
    except RuntimeError as error:
        if not needs_numbers(error):
            raise
    with answering():
        args, kwargs = pytree.tree_map_only(torch.SymInt, int, (args, kwargs))
        return function(*args, **kwargs)
