# %% [markdown]
# # The state around compiled code
#
# A compiled graph has the casts that autocast would insert in it already, so autocast must be off while it
# runs: an extern matmul would be cast a second time. Backward runs in whatever state the caller of
# `backward()` is in, often outside of the autocast region, sometimes inside.
#
# Grad mode is off inside of a `Function`. The inference path turns it off itself.
#
# Whoever runs a graph advances the version counters of the inputs that it writes (generated kernels write
# behind PyTorch's back, chapter 11), or a tensor that some other graph has saved could be overwritten
# unnoticed. What the program writes to `x.data` is meant to go unnoticed: there the compiled code gets
# `x.data`, too.

# %%
import functools
import operator
from typing import Callable, Sequence

import torch
from torch import fx, is_grad_enabled

from ..ch01_graphs.graph import interpret
from .output_plan import view_chain

aten = torch.ops.aten

Compile = Callable[..., Callable[[list], Sequence]]


def changing(compiled: Callable, positions: Sequence[int], change: Callable) -> Callable:
    """`compiled`, which gets `change(x)` for the inputs x at `positions`."""
    if not positions:
        return compiled

    @functools.wraps(compiled)
    def call(inputs: list):
        for i in positions:
            inputs[i] = change(inputs[i])
        return compiled(inputs)
    return call


def data_of(x: torch.Tensor) -> torch.Tensor:
    return x.data


def call_compiled(compiled: Callable, inputs: list):
    if torch._C._is_any_autocast_enabled():
        with torch._C._DisableAutocast():
            return compiled(inputs)
    return compiled(inputs)


def with_grad_mode(enabled: bool, function: Callable, *args):
    """Not `with torch.no_grad()`: a signal handler that raises inside its `__exit__` leaves gradients off."""
    before = is_grad_enabled()
    if before is enabled:
        return function(*args)
    try:
        torch._C._set_grad_enabled(enabled)
        return function(*args)
    finally:
        torch._C._set_grad_enabled(before)


def picker(positions: list[int]) -> Callable[[tuple], tuple]:
    """`f(values)`: those at `positions`, in one call of C."""
    if len(positions) == 1:
        only, = positions
        return lambda values: (values[only],)
    return operator.itemgetter(*positions) if positions else lambda values: ()

# %% [markdown]
# One operator asks for history although gradients are off: `as_strided_scatter` refuses memory with gaps, or in another order, of a tensor
# that requires a gradient. Eager's program may have given it an alias without history, and ours begins with the tensor itself.
# Where an input leads to it, the graph gets such an alias.

# %%
def without_history(compile_aten: Compile) -> Compile:
    def compile_graph(gm: fx.GraphModule, **settings):
        compiled = compile_aten(gm, **settings)
        roots = {view_chain(n.args[0])[0] for n in gm.graph.find_nodes(op="call_function", target=aten.as_strided_scatter.default)}
        asked = [i for i, p in enumerate(gm.graph.find_nodes(op="placeholder")) if p in roots]
        return changing(compiled, asked, torch.Tensor.detach)
    return compile_graph

# %% [markdown]
# ## The rung `aot_eager`
#
# With the interpreter in the place of a compiler the stage can be run, and compared with eager, on its own.

# %%
def interpret_aten(gm: fx.GraphModule, *, is_backward: bool = False) -> Callable[[list], list]:
    """The `compile_aten` of the backend `aot_eager`: the graph as it is, operator by operator."""
    def call(inputs: list) -> list:
        arguments = list(inputs)
        inputs.clear()
        return list(interpret(gm, arguments))
    return call
