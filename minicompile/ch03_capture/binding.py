# %% [markdown]
# # Binding arguments
#
# Which argument becomes which parameter, with positional-only and keyword-only ones, defaults, `*args` and
# `**kwargs`, is decided by CPython in C, with error messages of its own. The shortest way to have exactly its
# rules is to let it do the work: a lambda with the same parameters, whose body is a tuple of them. For
#
#     def f(x, *rest, scale=1.0): ...
#
# that is `lambda x, *rest, scale: (x, scale, rest)`. What the arguments are does not matter to it: capture
# calls it with values (`interpreter.py`), and the replacement for the frame hook with objects (`no_hook.py`).

# %%
import functools
import inspect
import types

SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR       # flags of code that is left and entered again


def binder_code(code) -> types.CodeType:
    """Code of a lambda with the parameters of `code` that returns them in the order of the frame's
    variables."""
    star, more = bool(code.co_flags & inspect.CO_VARARGS), bool(code.co_flags & inspect.CO_VARKEYWORDS)
    named = code.co_argcount + code.co_kwonlyargcount
    return binder_of(code.co_varnames[:named + star + more], code.co_posonlyargcount, code.co_argcount, named,
                     star, more)


@functools.lru_cache(4096)
def binder_of(names, positional_only: int, count: int, named: int, star: bool, more: bool) -> types.CodeType:
    """For parameters `names`, of which `count` may be positional; star, more: whether the last are `*args`
    and `**kwargs`."""
    places = [f"_{i}" for i in range(len(names))]                      # a name need not be an identifier: a comprehension's `.0`
    plain, keyword_only, rest = places[:count], places[count:named], places[named:]
    star = [rest.pop(0)] if star else []
    more = [rest.pop(0)] if more else []
    parameters = [*plain[:positional_only], *(["/"] if positional_only else []), *plain[positional_only:]]
    parameters += ["*" + name for name in star] or (["*"] if keyword_only else [])
    parameters += [*keyword_only, *("**" + name for name in more)]
    order = "".join(name + ", " for name in places)
    return eval(f"lambda {', '.join(parameters)}: ({order})", {}).__code__.replace(co_varnames=names)


def bind(code, defaults: tuple | None, kwdefaults: dict | None, args, kwargs, name=None) -> tuple:
    """The arguments of a call in the order of the frame's variables; TypeError, in Python's words, if they
    do not fit. name: the function's `__qualname__`, if that is not the code's."""
    binder = types.FunctionType(binder_code(code), {}, code.co_name, defaults)
    binder.__kwdefaults__, binder.__qualname__ = kwdefaults, name or code.co_qualname
    return binder(*args, **kwargs)
