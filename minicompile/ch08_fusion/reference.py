# %% [markdown]
# # Kernels, executed
#
# Fusion has put loops into one kernel, and chapters 9 and 10 will make text of it. If a number is wrong in the end, which of the
# two was it? This module answers without them. A kernel *means*: run its loops one after the other, each over all its elements.
# Whatever a code generator does with registers, tiles and threads must give the same numbers. Here kernels are run
# just so, with the interpreter of loops that chapter 7 has (`run_loop`), slowly. Local buffers, which a generator keeps
# in registers, get memory here, like any other.

# %%
import torch

from ..ch01_graphs.layouts import flat_storage
from ..ch01_graphs.symbolic import evaluate
from ..ch07_loops.ir import View, written_by
from ..ch07_loops.reference import run_loop
from ..ch07_loops.verify import print_loop, verify_loop
from .dependencies import storage_size
from .fuse import Schedule
from .kernel import Kernel, KernelList, KernelSource, float_of_bits, pieces_of


def run_kernel(kernel: Kernel, tensors: dict[str, torch.Tensor], sizes: dict[str, int]) -> None:
    """Run one kernel; `tensors` holds its inputs and outputs by name, `sizes` the size symbols."""
    storages = {name: flat_storage(t) for name, t in tensors.items()}
    for name in kernel.buffers:
        if name not in storages:
            b = kernel.buffers[name]
            storages[name] = torch.empty(evaluate(storage_size(b), sizes), dtype=b.dtype, device=b.device)
    for loop in kernel.loops:
        run_loop(loop, storages, sizes)

# %% [markdown]
# The same as a backend: `emit_reference` is a code generator whose "code" is a description, and
# `load_reference` turns it into callables. With it, fusion, memory planning and host programs are tested
# without a compiler in sight; it is the rung `loops` of the ladder. (The description of the running example's kernel stands on the
# first page of this chapter.)

# %%
def emit_reference(kernel: Kernel) -> KernelSource:
    lines = [f"kernel {kernel.name} over {kernel.vars} reducing {kernel.reduction_vars}"]
    for loop in kernel.loops:
        lines.append(print_loop(loop))
    return KernelSource(kernel.name, "reference", "\n".join(lines), {"kernel": kernel})


def load_reference(sources: list[KernelSource]) -> list:
    """Callables `k(*args)` with args in the order of `Kernel.args`."""
    def bind(source):
        kernel: Kernel = source.options["kernel"]
        count = len(kernel.tensors)

        def run(*values):
            sizes = {s.name: float_of_bits(n) if s.real else n
                     for s, n in zip(kernel.symbols, values[count:])}
            tensors = dict(zip(kernel.tensors, values))
            if isinstance(kernel, KernelList):
                tensors |= {name: tensors[root] for name, root in kernel.roots.items()}
            with torch.no_grad():               # a kernel leaves no history, and these are operators
                run_kernel(kernel, tensors, sizes)
        return run
    return [bind(s) for s in sources]

# %% [markdown]
# ## What a kernel must obey
#
# The contract with the code generators, as assertions. The driver checks it in debug mode, the tests always.
#
# Of a kernel: its loops run over its own variables, what one loop reads of another is at the index at which it was
# written, and each store is either local or an output. Of a schedule: nothing is read before it is written, or
# after it was freed.
#
# What is said when a rule is broken: by the kernel of `x - x.mean(1, keepdim=True)` with its two loops in the other order, by the same
# kernel with its result declared local as well, and by a schedule of two matrix products that drops `w` after the first:
#
#     loop1, load2: buf0 is not written yet
#     buf1 is both local and an output
#     extern2 reads w after it was dropped

# %%
def verify_kernel(kernel: Kernel) -> None:
    """Raise AssertionError with a sentence about the first rule that `kernel` breaks."""
    vars, rvars = kernel.vars, kernel.reduction_vars
    assert vars == kernel.blocks + kernel.walked, "the walked variables are not the last ones"
    shapes = {(vars, ()), (vars + rvars, ()), (vars, rvars), (kernel.blocks + rvars, kernel.walked)}
    written: dict[str, object] = {}
    for loop in kernel.loops:
        assert (loop.vars, loop.reduction_vars) in shapes, f"{loop.name} runs over other variables"
        verify_loop(loop, kernel.buffers, {*kernel.inputs, *written}, set(kernel.symbols))
        for a in loop.loads:
            same = a.buffer not in written or a.index == written[a.buffer] and a.mask is None
            assert same, f"{loop.name} reads {a.buffer} elsewhere"
        for a in loop.stores:
            known_output = a.buffer in kernel.local or a.buffer in kernel.outputs
            assert known_output, f"{a.buffer} is neither local nor output"
            written[a.buffer] = a.index if a.mode is None and a.mask is None else None
    for name in kernel.local:
        assert name in written, f"{name} is local and never written"
        assert name not in kernel.outputs, f"{name} is both local and an output"


def verify_schedule(schedule: Schedule) -> None:
    """Every kernel is well formed, and everything is written before it is read, and read before it is
    dropped."""
    program, dropped = schedule.program, set()
    written = set(program.constants) | set(program.inputs) | set(schedule.plan.first)
    for step, plan in zip(schedule.steps, schedule.plan.steps, strict=True):
        for kernel in pieces_of(step) if isinstance(step, Kernel) else ():
            verify_kernel(kernel)
        assert not isinstance(step, Kernel) or set(step.tensors) <= set(step.buffers), f"{step.name} is passed what it does not know"
        for name in step.inputs:
            assert name in written, f"{step.name} reads {name} before it is written"
            assert program.roots[name] not in dropped, f"{step.name} reads {name} after it was dropped"
        written.update(written_by(step))
        dropped.update(plan.free)
    for output in program.outputs:
        if isinstance(output, View):
            assert output.buffer in written and program.roots[output.buffer] not in dropped
