# %% [markdown]
# # From a captured graph to a callable
#
# Who compiles a graph is the user's choice: a rung of our own ladder (`driver.py`), or any callable
# `backend(gm, example_inputs)`, as for torch.compile. This module calls it and takes care of what every
# backend may rely on: sizes are inputs, and inputs that are written do not overlap.

# %%
import functools
from typing import Callable

import torch

from . import driver
from .ch01_graphs.fake import plain_tensors
from .ch01_graphs.graph import eager_callable
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
    and is not to be captured."""
    with config.options(dict(context.options)), plain_tensors(), torch._C.DisableTorchFunction():
        if callable(context.backend):
            compiled = custom_backend(captured, context)
        elif context.backend == "eager":
            compiled = eager_callable(captured.gm)
        else:
            compiled = driver.compile_graph(captured.gm, input_fakes(captured), context.backend, late_error)
            compiled = watch_overlaps(captured, compiled)
    return functools.partial(hook.run, None, compiled)


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
# A graph that writes to an input was made functional, on the assumption that its inputs are apart. Which
# tensors are the same object is guarded; whether two different ones overlap depends on addresses, which
# change with every call. So it is looked up at each call, but only where the graph writes to something. Most
# tensors are where they were at the last call, which was found harmless. `Spans` (chapter 2) remembers it, and
# sorts those that have moved into their new places: 600 tensors take 4 microseconds.

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


def harm_each_other(spans: list, kinds: list) -> bool:
    """Whether two of the ranges (first byte, the one after the last) have memory in common, one of them is
    written, and not both are of modules. kinds: (is it written, is it of a module) for each.

    In the order of addresses a range overlaps one before it if it begins before the farthest end so far."""
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

# %%
def custom_backend(captured, context) -> Callable:
    """What the user's backend made of the graph, with checks of what it returns."""
    name = context.backend_name
    captured.gm.real_recompile()                        # backends take hold of `forward`
    try:
        compiled = context.backend(captured.gm, list(captured.example_inputs))
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
