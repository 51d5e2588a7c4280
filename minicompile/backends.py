# %% [markdown]
# # From a captured graph to a callable
#
# Capture (chapters 1 to 4) leaves a graph, a list of where its inputs come from, and guards. What is missing is a function that takes
# those inputs and computes what the graph says. Who makes it is the user's choice: `backend="cpp"` and the like name a rung of our
# own ladder (`driver.py`: each rung goes one stage further), and any callable `backend(gm, example_inputs)` will do, as for
# torch.compile.
#
# `call_backend` makes that choice. Around it stand three services, so that no backend has to think of them. Sizes that vary are inputs
# of their own (`add_size_inputs`). Arguments that overlap in memory, where the graph writes to one, do not reach code that assumes
# they are apart (`watch_overlaps`). What a user's backend returns is checked, so that a mistake in it is told as
# such (`custom_backend`).

# %%
import functools
from typing import Callable

import torch

from . import driver
from .ch01_graphs.fake import plain_tensors
from .ch01_graphs.graph import eager_callable, with_own_names
from .ch01_graphs.layouts import length_of, same_strides
from .ch01_graphs.symbolic import present
from .ch02_guards.memory import Spans
from .ch02_guards.sources import ModuleAttrSource
from .ch03_capture import hook
from .config import config
from .errors import BackendError, Unsupported


def call_backend(captured, context, late_error) -> Callable:
    """The captured graph as a callable of its flat inputs, returning a tuple. context: a `stances.Context`; late_error:
    for `driver.compile_graph`.

    It runs outside of the region: whatever Python a backend leaves to be run at call time is not the user's,
    and is not to be captured. (To leave takes 50 nanoseconds, and a program of C++ kernels, which calls nothing else, need not.)
    Its `as_captured` says whether compiling has gained nothing."""
    gains_nothing = False
    with config.options(dict(context.options)), plain_tensors(), torch._C.DisableTorchFunction():
        if callable(context.backend):
            compiled = custom_backend(captured, context)
        elif context.backend == "eager":
            compiled = eager_callable(captured.gm)
        else:
            compiled = driver.compile_graph(captured.gm, input_fakes(captured), context.backend, late_error)
            gains_nothing = isinstance(getattr(compiled, "__self__", None), torch.fx.GraphModule)
            compiled = watch_overlaps(captured, compiled)
    if getattr(compiled, "in_region", False):
        hook.skip_code(compiled.__code__)
        return compiled
    run = functools.partial(hook.run, None, compiled)
    run.as_captured = gains_nothing
    return run


def input_fakes(captured) -> list:
    """The fakes of the inputs, as they came in. After `x.squeeze_()` an input's fake has the new shape, as
    the tensor itself will have: that is left to eager."""
    fakes = [n.meta["val"] for n in captured.gm.graph.find_nodes(op="placeholder")]
    for fake, real in zip(fakes, captured.example_inputs):
        if isinstance(real, torch.Tensor):
            sizes, strides = ([present(n) for n in t] for t in (fake.shape, fake.stride()))
            if sizes != list(real.shape) or not (0 in sizes or same_strides(sizes, strides, real.stride())):
                raise Unsupported("an input changes its shape in place")
    return fakes


# %% [markdown]
# ## Inputs that share memory
#
# A graph that writes to an input was made functional (chapter 5): it computes the new values, and copies them into the input at the end.
# That is right as long as no other input shows the same memory. Take
#
#     def shifted(a, b):
#         a.add_(1)
#         return b * 2
#
# compiled for two separate tensors and then called with `shifted(buffer[:2], buffer[1:])`, where `buffer` has three ones. The second
# number of `a` is the first of `b`, so `b` is to be read after the addition:
#
#     eager                tensor([4., 2.])
#     without this check   tensor([2., 2.])
#     with it              tensor([4., 2.])
#
# No guard tells these calls apart. Guards compare objects and their attributes, and here are two tensors as before; whether
# they overlap depends on their addresses, which may differ in every call. So addresses are compared at each call, but only where
# the graph writes to an input. A call whose arguments do harm runs the captured graph, operation by operation.
#
# `watch_overlaps` sorts the tensors among the inputs: those that arguments and the like have brought (`loose`), and those of modules
# (`owned`), which are compared with each other when the graph is compiled, and not again. If nothing loose is written, only
# the written ones of modules matter; if then no pair is left of which one is written, the compiled graph is returned as it is, and a
# call costs nothing more. Otherwise `call` compares first. The extent of a tensor whose sizes are fixed is computed once, here.
#
# Most tensors are where they were at the last call, which was found harmless. `Spans` (chapter 2, in C) remembers it, and
# sorts those that have moved into their new places: 600 tensors take 4 microseconds. Where there is no C, `harm_each_other` decides.

# %%
def watch_overlaps(captured, compiled) -> Callable:
    """Calls whose arguments overlap, `f(buffer[:2], buffer[1:])`, run the captured graph as it is. Two
    tensors of modules are compared when the graph is compiled (capture gives them fakes that share memory),
    and not again."""
    written = getattr(getattr(compiled, "joint", None), "mutated", ())
    loose, owned = [], []              # (position, bytes from the first to the last or None, is it written)
    for i, (n, source) in enumerate(zip(captured.gm.graph.find_nodes(op="placeholder"), captured.inputs)):
        if isinstance(n.meta["val"], torch.Tensor):
            of_module = isinstance(source, ModuleAttrSource)
            static = of_module or not any(isinstance(v, torch.SymInt) for v in (*n.meta["val"].shape, *n.meta["val"].stride()))
            size = extent(captured.example_inputs[i]) if static else None
            (owned if of_module else loose).append((i, size, n.name in written))
    if not any(is_written for *_, is_written in loose):
        owned = [item for item in owned if item[2]]
    if not loose or len(loose) + len(owned) < 2 or not (owned or any(is_written for *_, is_written in loose)):
        return compiled
    gm, items = captured.gm, [item[:2] for item in (*loose, *owned)]
    kinds = [(is_written, of_module) for group, of_module in ((loose, False), (owned, True)) for *_, is_written in group]
    spans = Spans and Spans([(i, -1 if size is None else size, captured.example_inputs[i].element_size(), *kind)
                             for (i, size), kind in zip(items, kinds)])

    def call(*inputs):
        are_apart = spans and spans(*inputs)
        if are_apart is None:
            where = ((inputs[i].data_ptr(), extent(inputs[i]) if size is None else size) for i, size in items)
            are_apart = not harm_each_other([(at, at + size) for at, size in where], kinds)
        return compiled(*inputs) if are_apart else eager_callable(gm)(*inputs)
    return call


# %% [markdown]
# To compare all pairs of 600 tensors would take 180,000 comparisons. In the order of addresses one pass is enough: a range overlaps an
# earlier one if it begins before the farthest end so far. Which end counts depends on the range. One that is written is harmed by any
# other, one that is only read by a written one; and of two that are of modules nothing is asked. So there are four farthest ends.

# %%
def harm_each_other(spans: list, kinds: list) -> bool:
    """Whether two of the ranges (first byte, the one after the last) have memory in common, one of them is
    written, and not both are of modules. kinds: (is it written, is it of a module) for each."""
    farthest = [[0, 0], [0, 0]]        # by kind: of all, of the written; loose ones, those of modules
    for (start, end), (is_written, of_module) in sorted(zip(spans, kinds)):
        if start == end:
            continue
        others = farthest[:1] if of_module else farthest
        if any(start < ends[not is_written] for ends in others):
            return True
        ends = farthest[of_module]
        ends[0] = max(ends[0], end)
        if is_written:
            ends[1] = max(ends[1], end)
    return False


def extent(t) -> int:
    """Bytes from the first of a strided tensor to the last."""
    return length_of((t.shape, t.stride(), 0)) * t.element_size()


# %% [markdown]
# ## Symbols as inputs
#
# With `dynamic=True`, `x.sum() / x.size(0)` for a matrix `x` is captured as
#
#     x: f32[s0, s1] = input
#     sum_1: f32[] = x.sum()
#     sym_size_int: s0 = aten.sym_size.int(x, 0)
#     truediv: f32[] = truediv(sum_1, sym_size_int)
#     return (truediv,)
#
# Here a number is asked of a tensor. Later stages would have to know which tensors can be asked, and whether they are still there. So the
# symbols become inputs, and the guards' check, which reads them anyway, hands their values over:
#
#     x: f32[s0, s1] = input
#     s0: s0 = input
#     s1: s1 = input
#     sum_1: f32[] = x.sum()
#     truediv: f32[] = truediv(sum_1, s0)
#     return (truediv,)
#
# A size such as `2*s0` needs no input of its own: it is computed from `s0`.

# %%
def add_size_inputs(captured) -> None:
    """Give every size symbol a placeholder of its own. Later stages then find the value of a symbol among the
    inputs, and never have to ask a tensor for it. Where it is read was noted when it was made: the program may have
    changed the shape of the input since."""
    graph = captured.gm.graph
    placeholders = graph.find_nodes(op="placeholder")
    of_symbol = {str(n.meta["val"]): n for n in placeholders if isinstance(n.meta["val"], torch.SymInt)}
    last = placeholders[-1] if placeholders else None
    for node in placeholders:
        fake = node.meta["val"]
        for size in (*fake.shape, *fake.stride()) if isinstance(fake, torch.Tensor) else ():
            name = str(size)
            if isinstance(size, torch.SymInt) and name.isidentifier() and name not in of_symbol:
                with graph.inserting_after(last):
                    of_symbol[name] = last = graph.placeholder(name)
                last.meta.update(val=size, location=node.meta.get("location"), origins=())
                captured.inputs.append(captured.symbols[name])
                captured.example_inputs.append(present(size))
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.sym_size.int and str(node.meta["val"]) in of_symbol:
            node.replace_all_uses_with(of_symbol[str(node.meta["val"])])
            graph.erase_node(node)
    captured.gm.recompile()


# %% [markdown]
# ## Backends of the user
#
# A backend is called with the graph and with the arguments of the call at hand, and returns a callable. The shortest useful one prints
# the graph and runs it:
#
#     def printing(gm, example_inputs):
#         print(gm.code)
#         return gm.forward
#
# Two mistakes are common: to forget the `return`, and to return one tensor of several. Both would come up far from their cause, in the
# generated function around the graph. So a backend's result is asked whether it can be called, and what the first call returns
# is compared with the outputs of the graph. A `printing` without its last line:
#
#     The backend 'printing' returned None. It must return a callable that takes the graph's inputs and returns a tuple of its outputs;
#     gm.forward is one.

# %%
def custom_backend(captured, context) -> Callable:
    """What the user's backend made of the graph, with checks of what it returns."""
    name = context.backend_name
    gm = with_own_names(captured.gm)
    gm.real_recompile()                                 # backends take hold of `forward`
    try:
        compiled = context.backend(gm, list(captured.example_inputs))
    except Exception as error:
        raise BackendError(f"The backend {name!r} raised {type(error).__name__}: {error}") from error
    if not callable(compiled):
        raise BackendError(f"The backend {name!r} returned {compiled!r}. It must return a callable that "
                           "takes the graph's inputs and returns a tuple of its outputs; gm.forward is one.")

    promised = captured.gm.graph.output_node().args[0]
    promised = [isinstance(getattr(n, "meta", {}).get("val"), torch.Tensor) for n in promised]
    checked = []

    def call(*inputs):
        result = compiled(*inputs)
        result = tuple(result) if isinstance(result, (tuple, list)) else (result,)
        if not checked:
            is_tensor = [isinstance(r, torch.Tensor) for r in result]
            if len(result) != len(promised) or any(t and not r for t, r in zip(promised, is_tensor)):
                got = ", ".join(type(r).__name__ for r in result) or "nothing"
                raise BackendError(f"What the backend {name!r} compiled returned {got}; the graph has "
                                   f"{len(promised)} output{'s' * (len(promised) != 1)}. "
                                   "Return all of them, in order, as a tuple.")
            checked.append(True)
        return result
    return call
