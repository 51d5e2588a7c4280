# %% [markdown]
# # The pipeline
#
# The whole compiler, in the order in which a program passes through it:
#
#     guard -> capture -> differentiate -> decompose -> lower -> fuse -> emit -> run
#
# The first two happen per call and per frame (`frames.py`). This module is the rest: it takes one captured graph and
# returns a callable with the same meaning. Each stage is one function call; stopping after any of them and *running what is there* gives a backend. The
# backends form a ladder, and the first rung whose answer differs from eager's names the stage that is wrong:
#
# | backend | runs |
# |---|---|
# | `eager` | the captured graph |
# | `aot_eager` | the ATen graphs after differentiation and partitioning |
# | `decomposed` | those graphs in primitives only |
# | `loops` | the fused loop IR, by a slow interpreter |
# | `triton`, `cpp` | generated kernels |
# | `cudagraphs` | `aot_eager`, replayed as CUDA graphs |

# %%
from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import Callable

import torch
from torch import fx

from .errors import MinicompileError, Unsupported

log = logging.getLogger("minicompile")


@dataclass
class Counters:
    """What has been compiled in this process since the last `reset`; times in seconds."""

    graphs: int = 0
    kernels: int = 0
    externs: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def clear(self):
        self.graphs = self.kernels = self.externs = 0
        self.seconds.clear()


counters = Counters()


class timed:
    """Adds the time spent inside to `counters.seconds[stage]`."""

    def __init__(self, stage: str):
        self.stage = stage

    def __enter__(self):
        self.start = time.perf_counter()

    def __exit__(self, *exc):
        counters.seconds[self.stage] = counters.seconds.get(self.stage, 0.0) + time.perf_counter() - self.start

# %% [markdown]
# ## From ATen graph to callable
#
# `compile_aten` is the lower half of the pipeline. The autograd stage calls it for the forward and the backward graph.

# %%
def decomposed_callable(gm: fx.GraphModule) -> Callable[[list], list]:
    from .ch01_graphs.graph import interpret
    return lambda inputs: list(interpret(gm, inputs))


def compile_aten(gm: fx.GraphModule, fakes: list, *, rung: str, is_backward: bool = False, mode: str | None = None) -> Callable:
    """Compile one functional ATen graph. Returns a callable from a list of inputs (which it clears) to a list of outputs.

    rung: "aot_eager", "decomposed", "loops", "triton" or "cpp"."""
    counters.graphs += not is_backward
    if rung == "aot_eager":
        return decomposed_callable(gm)
    from .ch06_decompositions.decompose import decompose
    with timed("decompose"):
        gm = decompose(gm)
    if rung == "decomposed":
        return decomposed_callable(gm)
    from .ch07_loops.lower import lower
    from .ch08_fusion.fuse import fuse
    from .ch11_runtime.host import compile_schedule
    with timed("lower"):
        program = lower(gm)
    with timed("fuse"):
        schedule = fuse(program)
    with timed("emit and build"):
        return compile_schedule(schedule, rung)
