# %% [markdown]
# # When to stop compiling
#
# A function that meets what no version of it fits gets another version (`frames.py`). The limit
# (`config.recompile_limit`, 8) is for what goes on for ever: a counter, a name that is new at each call. Here `name` is one,
# and `scale` is either there or not:
#
#     def named(x, name, scale=None):
#         y = x + len(name)
#         return y if scale is None else y * scale
#
# It is called with names of ever other lengths:
#
#     eight names               8 compiled
#     the same with a scale     8 compiled
#     a ninth name              runs eagerly, with a warning
#     another call of it        runs eagerly
#     the first name            an existing version runs
#
#
# Whether an argument is None, flags and types are another matter than a name. A program has a few such patterns, and each of them
# is another program: for a batch with four optional tensors, sixteen. So the limit counts the versions of one pattern, those that fit
# the call at hand in all that is `finite`. For all patterns together it is four times as high, and for all models of a class 32
# times, as in torch.compile.
#
# What the program makes anew for each call is no pattern: classes of one name are alike, and versions
# that died with what they were made for are counted by themselves, for all models of that name. Of the classes of other models there
# may be twice as many of one name: a program can make one for each of its layers. Where somebody asked for strictness, with
# `fullgraph=True` or with a limit of their own, every version counts.
#
# A version whose model is gone stays, as it may serve the next model of that kind. A program that tries one architecture after another
# leaves many that serve nobody: of 64 the one that has waited longest makes room (`has_room`), unless compiling them has taken more
# than a tenth of the time since the first of them.
#
# `over_limit` tells for whom the limit is reached. It asks in this order:
#
# 1. whether too many classes of one name have been compiled: the answer is that name;
# 2. whether everybody together has too many, 256, or no room: `EVERYBODY`;
# 3. whether this model has four times the limit, or has lost as many as the limit: the model, held weakly;
# 4. whether it has less than the limit, which is the usual case: nobody;
# 5. and only then, how many of its versions were made for the pattern of this call.
#
# That costs a look at all versions, so at the next call `is_full` knows: a module that is made in each call would cost as many looks
# each time.

# %%
import time
from collections import Counter

import torch

from . import logs
from .ch01_graphs.floats import numpy_warnings
from .ch02_guards import cache as entries, codegen
from .ch02_guards.identity import full_name, strongly, weakly
from .ch02_guards.sources import ComputedSource
from .ch02_guards.torch_guards import TensorSpec
from .ch03_capture import hook
from .ch03_capture.capture import WORLD
from .config import Config, config
from .versions import FrameState, model_of, name_of_code

EVERYBODY = "everybody"


def over_limit(state: FrameState, function, args):
    """Whose limit this call has reached: a model, held weakly, all of a class name, code of no model (None), EVERYBODY; () for nobody's."""
    model, made, limit = model_of(args), state.cache.entries, config.recompile_limit
    state.cache.gone = [gone for gone in state.cache.gone if may_count(*gone)]
    if model is not None:
        twins, lost = (sum(is_twin_of(model, kind) for kind in kinds)
                       for kinds in ([entry.kind for entry in made], [kind for _, kind in state.cache.gone]))
        if lost >= limit or twins + lost >= 2 * limit and not state.context.fullgraph:
            return full_name(type(model))
    if len(made) >= 32 * limit or not has_room(state.cache, 8 * limit):
        return EVERYBODY
    same = [entry for entry in made if is_version_of(model, entry.model, entry.kind)]
    lost = sum(is_version_of(model, *gone) for gone in state.cache.gone)
    if len(same) + lost >= 4 * limit or lost >= limit:
        return weakly(model)
    if len(same) < limit:
        return ()
    strict = state.context.fullgraph or limit != Config.recompile_limit
    return weakly(model) if strict or sum(is_alike(state, entry, function, args) for entry in same) >= limit else ()


def has_room(cache, most: int) -> bool:
    """Whether less than `most` versions of models that are gone are kept, or one can be dropped for the next."""
    left = [entry for entry in cache.entries if entry.kind and strongly(entry.model) is None]
    if len(left) < most:
        return True
    if time.monotonic() - min(entry.born for entry in left) < 10 * sum(entry.seconds for entry in left):
        return False
    entries.drop_entry(cache, left[-1])
    return True


# %% [markdown]
# Who counts as whose? An entry knows the model that it was made for, weakly, and the class of that with its full name (`kind`). A *twin*
# of a class is another class of the same name: one `class` statement, executed again.

# %%
def may_count(weak, kind) -> bool:
    """Whether a version that is gone counts for anybody: it was of no model, of one that lives, or of one whose class may have twins."""
    return not kind or strongly(weak) is not None or strongly(kind[0]) is None


def is_version_of(model, weak, kind) -> bool:
    return strongly(weak) is model and bool(kind) == (model is not None)


def is_twin_of(model, kind) -> bool:
    return bool(kind) and kind[1] == full_name(type(model)) and strongly(kind[0]) is not type(model)


def is_twin(cls: type, other: type) -> bool:
    """Whether these are two classes of one name: one statement has made both."""
    return cls is not other and full_name(cls) == full_name(other)


def is_full(state: FrameState, model) -> bool:
    of_all = EVERYBODY, None if model is None else full_name(type(model))
    for who in state.full:                           # each call beyond the limit comes here
        if who in of_all or model is not None and strongly(who) is model:
            return True
    return False


# %% [markdown]
# To see whether a version was made for the pattern of this call, its guards are checked against the call, and those that fail are
# sorted. A guard that expects an int 3 and finds a 4 says nothing about patterns. One that expects None and finds a tensor does, and so
# does one that finds another dtype, or other gradient mode. If any of these has failed, the version is of another pattern.

# %%
def is_alike(state: FrameState, entry, function, args) -> bool:
    """Whether the entry was made for the pattern of this call."""
    namespace = codegen.call_namespace(state.code, function, args, entry.constants)
    failing = codegen.failing_guards(entry.guards, state.code, function, args, entry.constants)
    with numpy_warnings("ignore"):
        return not any(differs_in_kind(guard, namespace) for guard, _ in failing)


def differs_in_kind(guard, namespace: dict) -> bool:
    """Whether a guard that fails has met something finite other than what it expects. What is asked about a number is as varied as that."""
    if guard.source is None:
        return guard.kind in WORLD
    if guard.kind not in ("TYPE_MATCH", "CONSTANT_MATCH", "TENSOR_MATCH") or type(guard.source) is ComputedSource:
        return False
    try:
        value = eval(guard.source.text(), namespace)
    except Exception:                                # it is not there: a list is shorter
        return False
    expected = strongly(guard.expected)
    if guard.kind == "TYPE_MATCH":
        return type(value) is not expected and (expected is None or not is_twin(type(value), expected))
    return finite(value) != finite(expected)


def finite(value):
    """What there are few of: types, flags, and all about a tensor but its sizes."""
    if isinstance(value, (torch.Tensor, TensorSpec)):
        return value.dtype, value.device, len(value.shape), value.requires_grad
    return value if type(value) is bool else type(value)


# %% [markdown]
# Code may be made anew as well. A program that calls `exec` for each batch has another code object each time, and nothing that is
# compiled for one serves the next. So of code objects that are alike as many are compiled as a class may have versions. Of a program
# that never makes the same code twice nothing is to be remembered, so the count begins anew before it grows large.

# %%
alike: Counter = Counter()                       # (file, numbers that tell code apart) -> how many code objects were compiled
MOST_KINDS = 10_000


def is_one_of_many(code) -> bool:
    """Whether enough code objects like this one have been compiled; if not, it counts."""
    kind, known = (code.co_filename, hash(code), hash(code.co_code)), hook.record(code)
    if is_one_of_many in known:
        return False
    if alike[kind] >= 8 * config.recompile_limit:
        logs.warn_once(("alike", kind), f"minicompile: {name_of_code(code)} was made anew {alike[kind]} times, and compiled each time; "
                       "from now on it runs eagerly. Make the function once, and give it as arguments what differs.")
        return True
    known[is_one_of_many] = False
    if len(alike) >= MOST_KINDS:
        alike.clear()
    alike[kind] += 1
    return False
