# %% [markdown]
# # Numbers of the host
#
# A training step computes a few numbers that are no tensors of the GPU: the learning rate, the corrections
# `1 - beta ** step` of Adam, the count of steps itself, which PyTorch keeps in 0-d tensors on the CPU. Eager computes
# them in Python and hands them to each kernel by value. So does the host program: a float is an argument of the
# kernels that use it, and a 0-d tensor on the CPU is read when such a kernel is launched.
#
# A CUDA graph has no arguments. What a launch was given when it was recorded is in the recording, and a learning rate
# that changes would need a new one for each value. Therefore, where a program is to be recorded, it comes apart. The
# *host's part* takes the numbers and the tensors on the CPU, counts up the counters, and gives a list of floats. The
# *device's part*, which is recorded, finds those floats in a small tensor, at an address as fixed as that of a
# parameter.
#
# A step that returns `p - g * (lr / 4)`, on a GPU, and `count + 1`, on the CPU, is lowered to two loops. `number0` is `lr / 4`, which
# the host computes in Python:
#
#     loop0: for i0 < 1000    # mul_tensor, sub_tensor
#         v0: f32 = load p[i0]
#         v1: f32 = load g[i0]
#         v2: f64 = index(number0)
#         v3: f32 = to_dtype(v2)
#         v4: f32 = mul(v1, v3)
#         v5: f32 = sub(v0, v4)
#         buf0[i0] = v5
#     loop1: for ()    # add_tensor
#         v0: f32 = load count[0]
#         v1: f32 = constant(1.0)
#         v2: f32 = add(v0, v1)
#         buf1[0] = v2
#
# Taken apart, the host's part has the second loop, and returns the number beside its result. The device's part has the first one, in
# which the number has become a load. These are the inputs and results of both, and the kernel of the device:
#
#     host: count, lr -> f0 / 4.0, buf1
#     device: p, g, numbers_5 -> buf0
#     loop0: for i0 < 1000    # mul_tensor, sub_tensor
#         v0: f32 = load p[i0]
#         v1: f32 = load g[i0]
#         v2: f64 = load numbers_5[0]
#         v3: f32 = to_dtype(v2)
#         v4: f32 = mul(v1, v3)
#         v5: f32 = sub(v0, v4)
#         buf0[i0] = v5

# %%
import threading
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Callable, Sequence

import torch
from torch.utils import _pytree as pytree

from ..ch01_graphs.floats import Float, free_names
from ..ch01_graphs.symbolic import Expr, Symbol
from ..ch05_autograd.callables import picker
from ..ch07_loops.ir import Buffer, Layout, Program, Value, Values, View, remake, written_by
from ..ch08_fusion.fuse import Schedule
from ..ch08_fusion.kernel import Kernel, KernelList, Piece
from ..ch08_fusion.memory import plan_memory

# %% [markdown]
# ## As arguments
#
# The lowering lets a loop of the GPU load a number from the CPU's memory (`by_value` in chapter 7), so fusion and the
# order of steps see who reads what, and when it is overwritten. No kernel could do that. Before code is generated,
# such a load becomes an argument of the kernel.

# %%
def with_values(kernel: Kernel, change: Callable[[Values, Value, tuple], Value | None], **fields) -> Kernel:
    """The kernel with other values in its loops: those for which `change(into, value, args)` makes one in `into`."""
    def step(into: Values, value: Value, args: tuple) -> Value:
        return change(into, value, args) or into.again(value, args)
    return replace(kernel, loops=[replace(loop, stores=remake(loop.body, Values(), step)) for loop in kernel.loops], **fields)


def as_arguments(kernel: Kernel) -> tuple[Kernel, dict[str, View]]:
    """The kernel with what it loads from the CPU as arguments, and where the host reads each."""
    far = {n for n in kernel.inputs if kernel.buffers[n].device.type == "cpu"} if kernel.device.type != "cpu" else set()
    if not far:
        return kernel, {}
    found: dict[tuple, Symbol] = {}

    def change(into: Values, value: Value, args: tuple):
        if value.op == "load" and args[0] in far:
            symbol = found.setdefault(args[:2], Symbol(f"value{len(found)}", real=True))
            number = into.make("index", (symbol.expr,), torch.float64)
            number = number if value.dtype is torch.float64 else into.make("to_dtype", (number,), value.dtype)
            zero = into.make("constant", (0.0,), value.dtype)
            return number if args[2] is None else into.make("where", (args[2], number, zero), value.dtype)

    made = with_values(kernel, change, inputs=tuple(n for n in kernel.inputs if n not in far),
                       buffers={n: b for n, b in kernel.buffers.items() if n not in far})
    reads = {symbol.name: View(name, Layout((), (), at)) for (name, at), symbol in found.items()}
    return replace(made, symbols=(*made.symbols, *found.values())), reads

# %% [markdown]
# ## In memory
#
# For a recording it is the other way round: each float argument becomes a load.

# %%
def with_loads(kernel: Kernel, numbers: Buffer, place: dict[Symbol, int]) -> Kernel:
    """The kernel with its float arguments loaded from the buffer `numbers`, each from its place."""
    own = [s for s in kernel.symbols if s.real]
    if not own:
        return kernel
    if isinstance(kernel, KernelList):
        return list_with_loads(kernel, numbers, place)
    at = {s.expr: place[s] for s in own}

    def change(into: Values, value: Value, args: tuple):
        if value.op == "index" and args[0] in at:
            return into.make("load", (numbers.name, at[args[0]], None), numbers.dtype)

    return with_values(kernel, change, inputs=(*kernel.inputs, numbers.name), buffers=kernel.buffers | {numbers.name: numbers},
                       symbols=tuple(s for s in kernel.symbols if not s.real))


# %% [markdown]
# A list of tensors (chapter 8) has one body for many pieces, and a table that says which tensors each piece has.
# The numbers are one more tensor in each row of the table whose body uses them.

# %%
def list_with_loads(kernel: KernelList, numbers: Buffer, place: dict[Symbol, int]) -> KernelList:
    """The same for a list: every piece has the numbers as one more input, after the others."""
    bodies = [with_loads(body, replace(numbers, layout=Layout((), ())), place) for body in kernel.bodies]
    kernels = [with_loads(piece.kernel, numbers, place) for piece in kernel.pieces]
    made = replace(kernel, loops=[l for k in kernels for l in k.loops], inputs=(*kernel.inputs, numbers.name), bodies=bodies,
                   buffers=kernel.buffers | {numbers.name: numbers}, roots=kernel.roots | {numbers.name: numbers.name},
                   symbols=tuple(s for s in kernel.symbols if not s.real))
    before, at = kernel.tensors, {n: i for i, n in enumerate(made.tensors)}

    def row(piece: Piece) -> tuple[int, ...]:
        tensors = [at[before[i]] for i in piece.tensors]
        if numbers.name in bodies[piece.body].inputs:
            tensors.insert(len(bodies[piece.body].inputs) - 1, at[numbers.name])
        return tuple(tensors)

    pieces = [replace(piece, kernel=k, tensors=row(piece)) for piece, k in zip(kernel.pieces, kernels)]
    return replace(made, pieces=pieces)

# %% [markdown]
# ## Two programs
#
# The steps that touch only the CPU go to the host's part, in their order, and those that touch only the GPU to the
# device's. If some step touches both, as a copy from one to the other does, the program stays whole, and is not
# recorded.
#
# All of the host's part runs before all of the device's. So a number may not be read after the host has changed it
# again.

# %%
@dataclass
class Parts:
    """The two programs. The host's returns the numbers first, `count` of them. `host_inputs`, `device_inputs`:
    positions among the inputs of the whole; `device_outputs`: positions among its outputs, the others being the host's.
    The device's last input is the tensor with the numbers, if there are any."""

    host: Schedule
    device: Schedule
    host_inputs: list[int]
    device_inputs: list[int]
    device_outputs: list[int]
    count: int
    gpu: torch.device


def mixed_step(schedule: Schedule) -> str | None:
    """A step that needs memory of the CPU and of a GPU, in words; None if there is none."""
    for step in schedule.steps:
        for name in (*step.inputs, *written_by(step)):
            if side(schedule, step) != "cpu" and schedule.program.buffers[name].device.type == "cpu" and \
                    not (isinstance(step, Kernel) and name in step.inputs):
                return f"{step.name} uses {name}, which is on the CPU"
    return None


def side(schedule: Schedule, step) -> str:
    """The type of the device that a step runs on: the CPU, if all that it touches is there."""
    devices = {schedule.program.buffers[n].device.type for n in (*step.inputs, *written_by(step))}
    return "cpu" if devices == {"cpu"} else next((d for d in devices if d != "cpu"), "none")


# %% [markdown]
# `take_apart` first says on which side each step runs. `sources` becomes the list of numbers that cross:
# expressions of the program's arguments, and elements of CPU tensors that a kernel of the GPU reads. Each gets a
# place in one small tensor, and the device's kernels load it from there. Then both programs are made with the
# inputs, buffers and outputs that are theirs, and each gets a memory plan of its own.

# %%
def take_apart(schedule: Schedule) -> Parts | None:
    """The program in two parts; None where there is nothing for the host to do, or where it cannot be divided."""
    p = schedule.program
    sides = [side(schedule, step) for step in schedule.steps]
    if mixed_step(schedule) is not None or set(sides) <= {"cpu", "none"}:
        return None
    sources: list[Any] = list(p.numbers.values())
    places = {s: k for k, s in enumerate(p.numbers)}
    on_device = []
    for step, where in zip(schedule.steps, sides):
        reads: dict[str, View] = {}
        if where != "cpu" and isinstance(step, Kernel):
            step, reads = as_arguments(step)
        for view in reads.values():
            if view not in sources:
                sources.append(view)
        if where != "cpu":
            on_device.append((step, {s: sources.index(reads[s.name]) if s.name in reads else places.get(s)
                                     for s in getattr(step, "symbols", ())}))
    if not {v.buffer for v in sources if isinstance(v, View)}.isdisjoint(b.alias_of for b in p.buffers.values()):
        return None                         # a kernel reads what is updated in place later
    if not sources and "cpu" not in sides and all(is_on_gpu(p, o) for o in p.outputs):
        return None
    gpu = next(b.device for b in p.buffers.values() if b.device.type != "cpu")
    numbers = Buffer(f"numbers_{len(p.buffers)}", torch.float64, gpu, Layout((len(sources),), (1,)))
    steps = [with_loads(step, numbers, place) if isinstance(step, Kernel) else step for step, place in on_device]
    outputs = [k for k, o in enumerate(p.outputs) if is_on_gpu(p, o)]
    device = subprogram(schedule, steps, [p.outputs[k] for k in outputs], cpu=False, more=[numbers] if sources else [])
    host = subprogram(schedule, [s for s, where in zip(schedule.steps, sides) if where == "cpu"],
                [*sources, *(o for k, o in enumerate(p.outputs) if k not in outputs)], cpu=True)
    inputs = [[p.inputs.index(n) for n in x.program.inputs if n != numbers.name] for x in (host, device)]
    return Parts(host, device, *inputs, outputs, len(sources), gpu)


def is_on_cpu(p: Program, name: str) -> bool:
    return p.buffers[name].device.type == "cpu"


def is_on_gpu(p: Program, output) -> bool:
    return isinstance(output, View) and not is_on_cpu(p, output.buffer)


# %% [markdown]
# `subprogram` cuts out one of the two: the buffers on its side, and of the inputs and symbols those that its steps
# mention. A size can be mentioned in a loop, in an argument of a library call, or in the layout of a buffer, so all three
# are searched. Memory is planned again for each part, since a buffer may now die earlier than in the whole.

# %%
def subprogram(schedule: Schedule, steps: list, outputs: list, cpu: bool, more: Sequence[Buffer] = ()) -> Schedule:
    """A program of some of the steps, with what it needs of the inputs, and `more` inputs."""
    p = schedule.program
    buffers = {n: b for n, b in p.buffers.items() if is_on_cpu(p, n) == cpu}
    needed = names_needed(steps, buffers.values(), outputs)
    arguments = {s: e for s, e in p.numbers.items() if s.name in needed}          # of kernels on the CPU
    needed = needed.union(*map(free_names, arguments.values()))
    inputs = [n for n in p.inputs if n in buffers or n in p.symbols and p.symbols[n].name in needed]
    inputs, buffers = inputs + [b.name for b in more], buffers | {b.name: b for b in more}
    program = Program(inputs, buffers, list(steps), outputs, {n: s for n, s in p.symbols.items() if n in inputs}, arguments,
                      {n: t for n, t in p.constants.items() if n in buffers}, p.owned & set(inputs))
    return Schedule(program, steps, plan_memory(program, steps), schedule.decisions)


def names_needed(steps, buffers, outputs) -> set[str]:
    """The names of all symbols that are mentioned."""
    def names(tree):
        for x in pytree.tree_leaves(tree):
            if isinstance(x, Symbol):
                yield x.name
            elif isinstance(x, (Expr, Float)):
                yield from free_names(x)
            elif isinstance(x, Layout):
                yield from names((x.size, x.stride, x.offset))

    mentioned = [step.symbols if isinstance(step, Kernel) else (step.args, step.kwargs) for step in steps]
    return set(names((mentioned, [b.layout for b in buffers], outputs)))

# %% [markdown]
# ## From the host to the device
#
# A copy from ordinary memory makes the host wait. A copy from pinned memory does not, and for the same reason the
# memory may not be written again before the copy has been made, which on the GPU is whenever its turn comes. So there
# are several pinned buffers, used in turn, each with an event that says when it has been read. Where the host is that
# far ahead, it waits for the oldest.

# %%
class Ring:
    """Brings lists of floats to a device."""

    def __init__(self, device: torch.device, count: int, slots: int = 8):
        self.device, self.lock, self.turn = device, threading.Lock(), 0
        pinned = device.type == "cuda"
        self.slots = [torch.empty(count, dtype=torch.float64, device="cpu", pin_memory=pinned) for _ in range(slots)]
        self.read = [torch.cuda.Event() if pinned else None for _ in range(slots)]

    def put(self, values: list[float]) -> torch.Tensor:
        """A tensor on the device with these values."""
        out = torch.empty(len(values), dtype=torch.float64, device=self.device)
        with self.lock:
            k = self.turn = (self.turn + 1) % len(self.slots)
            if self.read[k] is not None:
                self.read[k].synchronize()
            self.slots[k].numpy()[:] = values
            out.copy_(self.slots[k], non_blocking=True)
            if self.read[k] is not None:
                self.read[k].record()
        return out


@dataclass
class Apart:
    """A program in two parts, called like the whole: with a list of inputs, which it empties."""

    parts: Parts
    host: Callable[[list], list]
    device: Callable[[list], list]
    ring: Ring | None = None

    def __call__(self, args: list) -> list:
        parts = self.parts
        given, of_host = self.split(args)
        found = self.host(of_host)
        args.clear()
        if parts.count:
            if self.ring is None:
                self.ring = Ring(parts.gpu, parts.count)
            given.append(self.ring.put([v.item() if isinstance(v, torch.Tensor) else v for v in found[:parts.count]]))
        outputs = found[parts.count:]
        for k, out in zip(parts.device_outputs, self.device(given)):
            outputs.insert(k, out)
        return outputs

    @cached_property
    def split(self) -> Callable[[list], tuple[list, list]]:
        """A function from the inputs to those of the device and those of the host."""
        device, host = map(picker, (self.parts.device_inputs, self.parts.host_inputs))
        return lambda args: (list(device(args)), list(host(args)))

    @property
    def overwritten(self) -> list[int]:
        """Positions of the inputs whose memory the program uses for other values."""
        return [self.parts.device_inputs[i] for i in self.device.overwritten]
