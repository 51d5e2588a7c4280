# %% [markdown]
# # From a captured graph to a callable
#
# Who compiles a graph is the user's choice: a rung of our own ladder (`driver.py`), or any callable
# `backend(gm, example_inputs)`, as for torch.compile. This module calls it and takes care of what every
# backend may rely on: sizes are inputs, and inputs that are written do not overlap.

# %%
from __future__ import annotations

import functools
from typing import Callable

import torch

from .ch01_graphs.fake import plain_tensors, present
from .ch02_guards.sources import CallSource, ModuleAttrSource
from .ch03_capture import hook
from .config import config
from .errors import BackendError, Unsupported


def compile_graph(captured, context) -> Callable:
    """The captured graph as a callable of its flat inputs, returning a tuple. context: a `frames.Context`.

    It runs outside of the region: whatever Python a backend leaves to be run at call time is not the user's,
    and is not to be captured."""
    with config.options(dict(context.options)), plain_tensors(), torch._C.DisableTorchFunction():
        if callable(context.backend):
            compiled = custom_backend(captured, context)
        elif context.backend == "eager":
            compiled = eager_callable(captured.gm)
        else:
            from .driver import compile_graph as compile_with_driver
            compiled = compile_with_driver(captured.gm, input_fakes(captured), context.backend,
                                           dict(context.options))
            compiled = watch_overlaps(captured, compiled)
    return functools.partial(hook.run, None, compiled)


def input_fakes(captured) -> list:
    """The fakes of the inputs, as they came in. After `x.squeeze_()` an input's fake has the new shape, as
    the tensor itself will have: that is left to eager."""
    fakes = [n.meta["val"] for n in placeholders_of(captured.gm)]
    for fake, real in zip(fakes, captured.example_inputs):
        if isinstance(real, torch.Tensor):
            sizes, strides = ([present(n) for n in t] for t in (fake.shape, fake.stride()))
            if sizes != list(real.shape) or any(
                    s != t for n, s, t in zip(sizes, strides, real.stride()) if n > 1 and 0 not in sizes):
                raise Unsupported("an input changes its shape in place")
    return fakes


# %% [markdown]
# ## Inputs that share memory
#
# A graph that writes to an input was made functional, on the assumption that its inputs are apart. Which
# tensors are the same object is guarded; whether two different ones overlap depends on addresses, which
# change with every call. So it is looked up at each call, but only where the graph writes to something.

# %%
def watch_overlaps(captured, compiled) -> Callable:
    """Calls whose arguments overlap, `f(buffer[:2], buffer[1:])`, run the captured graph as it is. Two
    tensors of modules are compared when the graph is compiled (capture gives them fakes that share memory),
    and not again."""
    written = getattr(getattr(compiled, "joint", None), "mutated", ())
    loose, of_modules = [], []
    for i, (n, source) in enumerate(zip(placeholders_of(captured.gm), captured.inputs)):
        if isinstance(n.meta["val"], torch.Tensor):
            (of_modules if isinstance(source, ModuleAttrSource) else loose).append((i, n.name in written))
    any_loose, owned = any(is_written for _, is_written in loose), []
    for i, is_written in of_modules:
        if is_written or any_loose:
            start, end = memory_range(captured.example_inputs[i])
            owned.append((i, end - start, is_written))
    if not loose or len(loose) + len(owned) < 2 or not (any_loose or owned):
        return compiled
    eager = eager_callable(captured.gm)

    def call(*inputs):
        ranges = [(*memory_range(inputs[i]), is_written) for i, is_written in loose]
        for n, (start, end, is_written) in enumerate(ranges):
            for other_start, other_end, other_written in ranges[:n]:
                if start < other_end and other_start < end and (is_written or other_written):
                    return eager(*inputs)
        for i, size, is_written in owned:
            at = inputs[i].data_ptr()
            for start, end, other_written in ranges:
                if start < at + size and at < end and (is_written or other_written):
                    return eager(*inputs)
        return compiled(*inputs)
    return call


def placeholders_of(gm) -> list:
    return [n for n in gm.graph.nodes if n.op == "placeholder"]


def memory_range(t) -> tuple[int, int]:
    """First byte of a strided tensor and the one after its last."""
    start = t.data_ptr()
    if t.numel() == 0:
        return start, start
    return start, start + (1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride()))) * t.element_size()


# %% [markdown]
# ## Symbols as inputs

# %%
def add_size_inputs(captured) -> None:
    """Give every size symbol a placeholder of its own. Later stages then find the value of a symbol among the
    inputs, and never have to ask a tensor for it."""
    graph, placeholders = captured.gm.graph, placeholders_of(captured.gm)
    of_symbol = {str(n.meta["val"]): n for n in placeholders if isinstance(n.meta["val"], torch.SymInt)}
    last = placeholders[-1] if placeholders else None
    for node, source, example in list(zip(placeholders, captured.inputs, captured.example_inputs)):
        for d, size in enumerate(getattr(node.meta["val"], "shape", ())):
            name = str(size)
            if isinstance(size, torch.SymInt) and name.isidentifier() and name not in of_symbol:
                with graph.inserting_after(last):
                    of_symbol[name] = last = graph.placeholder(name)
                last.meta.update(val=size, location=node.meta.get("location"), origins=())
                captured.inputs.append(CallSource(source, "size", (d,)))
                captured.example_inputs.append(example.shape[d])
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.sym_size.int and str(node.meta["val"]) in of_symbol:
            node.replace_all_uses_with(of_symbol[str(node.meta["val"])])
            graph.erase_node(node)
    captured.gm.recompile()


# %% [markdown]
# ## Backends of the user

# %%
def eager_callable(gm) -> Callable:
    """Backend `eager`: the graph's own Python code."""
    return gm.forward


def custom_backend(captured, context) -> Callable:
    """What the user's backend made of the graph, with checks of what it returns."""
    name = context.backend_name
    try:
        compiled = context.backend(captured.gm, list(captured.example_inputs))
    except Exception as error:
        error.add_note(f"raised by the backend {name!r}")
        raise
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
