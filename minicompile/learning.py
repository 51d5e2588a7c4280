# %% [markdown]
# # Learning from a recompile
#
# No version fits a call, so there will be another one. Two questions come first. Which words tell the user why? And what should be a
# symbol in the new version, so that the next call of this kind fits it?
#
# Both are answered by the guards that fail, which is found out by evaluating the guards of each version one by one. The first that fails
# in the first version of the chain explains the recompile. If it was the size of a tensor or the value of a number, the next version treats
# that as a symbol, so that the third size does not compile a third version. What has been learned is kept by source in
# `dynamic` of the function's state. Four calls of a function of a tensor and a number:
#
#     [8, 4] and 2: compiled
#         {}
#     [9, 4] and 2: tensor 'x' size mismatch at dimension 0: expected 8, got 9
#         {x: {0}}
#     [9, 4] and 3: n changed: expected 2, got 3
#         {x: {0}, n: True}
#     [10, 4] and 4: an existing version fits
#         {x: {0}, n: True}

# %%
import torch

from .ch01_graphs.layouts import stride_pattern
from .ch02_guards import codegen
from .ch02_guards.cache import worst_guard
from .ch02_guards.identity import strongly
from .ch02_guards.sources import ModuleAttrSource
from .ch02_guards.torch_guards import present_strides
from .ch03_capture import hook
from .ch03_capture.inputs import FROM_ZERO, TENSOR_TYPES, stride_source
from .ch03_capture.values import NUMBERS
from .config import config
from .versions import FrameState, model_of


def explain_miss(state: FrameState, function, args) -> str:
    """Why no entry fits, for people. What varies is learned from the entries of the same model."""
    if not state.cache.entries:
        return worst_guard(state.cache)
    explanation, model = None, model_of(args)
    for entry in state.cache.entries:
        learns = config.automatic_dynamic and state.context.dynamic is None and strongly(entry.model) is model
        if explanation and not learns and codegen.failing_guard(entry.telling, state.code, function, args, entry.constants):
            continue                   # nothing else is to be known of this one
        found = codegen.failing_guards(entry.guards, state.code, function, args, entry.constants)
        if (first := next(found, None)) is None:
            continue
        guard, why = first
        ask_first(state, entry, guard)
        if learns:
            for failing, _ in (first, *found):
                learn_dynamic(state, failing, function, args, entry)
        explanation = explanation or (why if guard.location is None else f"{why}  # {guard.location}")
    explanation = explanation or "a value changed while it was being checked"
    state.cache.failures[explanation.split(": expected")[0]] += 1
    return explanation


# %% [markdown]
# The guard that failed is also one to ask first the next time, unless to ask is to call the program, which might not call that function
# then, or to compute what the guards before it keep small. `ask_first` collects such guards in the entry's `telling`. Of those
# `question_about` makes a small function for chapter 2's `search`, which is told what entries are worth the whole check. From the
# versions of another model nothing is learned. At a miss they, too, are asked for these guards first: a model in each of a hundred calls
# would otherwise have all guards of all the others evaluated.

# %%
def ask_first(state: FrameState, entry, guard) -> None:
    """Have the entry asked for this guard, which has failed, before all others."""
    if not codegen.calls_of_program(guard) and not codegen.asks_python(guard) and not any(guard is told for told in entry.telling):
        entry.telling.append(guard)
        entry.question = state.cache.question = None


def question_about(state: FrameState, made: list, answers: list, every=False):
    """question(function, *args) -> the answers of those entries whose guards hold, every one or those that have failed."""
    asked = [(answer, guards := list(entry.guards), guards if every else entry.telling, entry.constants)
             for entry, answer in zip(made, answers)]
    question = codegen.build_question(asked, state.code)
    hook.skip_code(question.__code__)
    return question


def look_again(state: FrameState, function, args) -> None:
    """The calls that no entry fits may differ from the entries in something else by now."""
    for entry in state.cache.entries:
        if (found := codegen.failing_guard(entry.guards, state.code, function, args, entry.constants)) is not None:
            ask_first(state, entry, found[0])


# %% [markdown]
# ## What is learned
#
# A dimension that has changed is learned if it is above 1 now. (1 is a case of its own, since it broadcasts. So where a size was 1, the
# next one is not yet a symbol, unless it was one before.) The size of a parameter is not learned at all: a model of another width is
# another program. A stride that is not what the sizes imply, as of a slice of a larger tensor, is learned by itself (`moved`).

# %%
def moved(spec, tensor) -> list[int]:
    """Dims whose strides are others than they were, and not because the sizes inside of them are: those of some other memory."""
    if isinstance(spec.stride, str) or tensor.is_contiguous():
        return []
    every = frozenset(range(tensor.dim()))
    before, now = (stride_pattern(t, every) for t in (torch.empty_strided(spec.shape, present_strides(spec), device="meta"), tensor))
    return [d for d in every if isinstance(before[d], int) and isinstance(now[d], int) and before[d] != now[d]]


def learn_dynamic(state: FrameState, guard, function, args, entry) -> None:
    if isinstance(guard.source, ModuleAttrSource) and guard.source.kind == "_parameters":
        return                         # they change size when the model changes: another program
    expected = guard.expected
    value = codegen.read_source(guard.source, state.code, function, args, entry.constants)
    has_sizes = guard.kind == "TENSOR_MATCH" and type(value) in TENSOR_TYPES and not value.is_nested and value.layout is torch.strided
    if has_sizes and value.dim() == len(expected.shape):
        dims = {d for d, (old, new) in enumerate(zip(expected.shape, value.shape))
                if old != new and new > 1 and (d in expected.dynamic_dims or old > 1)}
        if dims:
            known = state.dynamic.get(guard.source)
            state.dynamic[guard.source] = known | dims if isinstance(known, (set, frozenset)) else dims      # if not, it was a number then
        for d in moved(expected, value):
            state.dynamic[stride_source(guard.source, d)] = True
    elif guard.kind == "CONSTANT_MATCH" and type(value) in NUMBERS and type(expected) is type(value):
        state.dynamic[guard.source] = FROM_ZERO if type(value) is int and min(expected, value) in (0, 1) else True
