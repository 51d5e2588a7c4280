# %% [markdown]
# # The host program
#
# Somebody has to call the kernels: allocate a buffer, launch, drop a name, launch again. For small models
# this is where the time goes: a GPU that finishes a kernel in two microseconds waits for a host that needs
# ten for the next one. So the host program is *generated*, as plain Python, one line a step, with every
# decision already made. That of `relu((x + b) @ w.t())`:
#
# ```python
# def call(args):
#     x, w, b = args
#     args.clear()
#     with below_autograd():
#         buf0 = empty_float32((128, 64), (64, 1))
#         k0(x, b, buf0)  # fused_add_0
#         del x, b
#         buf1 = empty_float32((128, 256), (256, 1))
#         x0(buf0, w.t(), out=buf1)
#         del buf0, w
#         buf2 = buf1  # takes over its memory
#         k1(buf1, buf2)  # fused_full_maximum_2
#         del buf1
#         result = [buf2]
#     return result
# ```
#
# `k0` and `k1` are the kernels, `x0` is the library's matrix product. The second kernel overwrites its input, which nobody reads after it.
#
# There is no dictionary of values, no loop over steps, no check of anything the guards have checked.
# `args.clear()` matters: the caller's list held the last reference to the saved activations of a backward
# pass, and each can now die at its own last use. torch.compile generates the same kind of wrapper (or C++,
# with `cpp_wrapper`).

# %%
import functools
import keyword
import math
import os
import re
import types
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Callable, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .. import logs
from ..ch01_graphs import floats
from ..ch01_graphs.floats import Float, float_text
from ..ch01_graphs.layouts import copy_with_layout
from ..ch01_graphs.symbolic import Expr, Int, to_text
from ..ch02_guards.codegen import define
from ..ch02_guards.memory import empty_on_cpu, raise_versions, view, window
from ..ch02_guards.stable import below_autograd
from ..ch03_capture import hook
from ..ch07_loops.ir import Extern, Layout, Program, View, root_of
from ..ch08_fusion.canonical import canonical, canonical_key, canonical_names
from ..ch08_fusion.fuse import Schedule
from ..ch08_fusion.kernel import Kernel, KernelList, KernelSource, bits_of_float
from ..ch08_fusion.memory import OUT_FORMS
from ..ch08_fusion.reference import emit_reference, load_reference
from ..ch09_triton.emit import emit_triton
from ..ch09_triton.launch import load_triton
from ..ch10_cpp.build import load_cpp
from ..ch10_cpp.emit import emit_cpp
from ..config import config
from ..errors import MinicompileError, OutOfRange, Unsupported, words_of
from .numbers import Apart, as_arguments, take_apart

# %% [markdown]
# ## Names
#
# Each buffer is a Python local. Aliases share the local of their root. Everything that is not a name or a
# number (operators, dtypes, kernels, constants) is a global of the generated module.
#
# A name that Python, or the text around it, could take for another gets a prefix.
#
# A `Writer` has the lines, and two dictionaries of names: `locals` from the root of a buffer to its Python name, and `known`
# from an object to the global that holds it, so that a dtype that occurs in ten allocations is one `dtype0`.

# %%
@dataclass
class Writer:
    """The program text in the making."""

    program: Program
    lines: list[str] = field(default_factory=list)
    globals: dict[str, Any] = field(default_factory=dict)
    known: dict[tuple, str] = field(default_factory=dict)
    locals: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)          # the values of `locals`
    fresh: set[str] = field(default_factory=set)          # roots that this program allocated, at offset 0

    @cached_property
    def read(self) -> set[str]:
        """The buffers that kernels read."""
        return {name for node in self.program.nodes if not isinstance(node, Extern) for name in node.inputs}

    def emit(self, line: str) -> None:
        self.lines.append(line)

    def local(self, name: str) -> str:
        """The Python name of a buffer's memory."""
        root = root_of(self.program.buffers, name)
        if root not in self.locals:
            text = re.sub(r"\W", "_", root)
            if not text.isidentifier() or keyword.iskeyword(text) or text in RESERVED or \
                    NAMED_CONSTANT.match(text) or text in self.globals or text in self.taken or \
                    any(s.name == text for s in self.program.symbols.values()):
                text = f"t_{len(self.locals)}_{text}"
            self.locals[root] = text
            self.taken.add(text)
        return self.locals[root]

    def constant(self, value: Any, prefix: str) -> str:
        """A global that holds `value`."""
        key = (value if isinstance(value, (torch.device, torch.dtype)) else id(value), prefix)
        if key not in self.known:
            name = f"{prefix}{sum(1 for k in self.known if k[1] == prefix)}"
            self.known[key], self.globals[name] = name, value
        return self.known[key]


RESERVED = {"args", "call", "empty", "as_strided", "relayout", "view", "window", "result", "exchange_device",
            "outer_device", "bits_of_float", "raise_versions", "below_autograd", "torch"}
NAMED_CONSTANT = re.compile(r"(k|x|c|dtype|device|number|unused_)\d+$|empty_")       # how globals are named


def int_text(e: Int) -> str:
    return str(e) if isinstance(e, int) else "(" + to_text(e) + ")"


def tuple_text(values) -> str:
    texts = [int_text(v) for v in values]
    return "(" + ", ".join(texts) + ("," if len(texts) == 1 else "") + ")"

# %% [markdown]
# ## Views
#
# A view that is the whole buffer is the buffer. Others are one `as_strided`. Memory that we allocated
# starts at offset 0; an input may itself be a window into something larger, and so may what a library call
# returns, so there the tensor's own offset is added at run time. An argument of a library call that only reads it need not be a view to
# autograd: it is a [`window`](ref:minicompile.ch02_guards.memory.window), made in a quarter of the time. Nor must a result be one that
# shares its memory with no other result and no input: eager's `repeat` gives a tensor of its own, and a `detach_()` of a view is an error.
# What a library call returns may be a view of memory that nobody else has, as attention's is.

# %%
def view_text(w: Writer, v: View, apart: bool = False) -> str:
    """apart: it need not be a view to autograd."""
    buffer, name = w.program.buffers[v.buffer], w.local(v.buffer)
    plain = Layout(buffer.layout.size, buffer.layout.stride)
    transposed = Layout(buffer.layout.size[::-1], buffer.layout.stride[::-1])
    if v.layout == plain and _same_layout(w, v.buffer):
        return name
    if len(buffer.layout.size) == 2 and v.layout == transposed and _same_layout(w, v.buffer):
        return f"{name}.t()"                       # half the cost of as_strided, and the most frequent view
    where = f"{tuple_text(v.layout.size)}, {tuple_text(v.layout.stride)}, {int_text(v.layout.offset)}"
    if apart:
        return f"window({name}, {where})"
    if root_of(w.program.buffers, v.buffer) in w.fresh:
        return f"as_strided({name}, {where})"
    return f"view({name}, {where})"


def apart_text(w: Writer, v: View) -> str:
    """The same, and no view to autograd."""
    text = view_text(w, v, apart=True)
    return f"{text}.detach()" if text.endswith(".t()") else text


def _same_layout(w: Writer, name: str) -> bool:
    a, b = w.program.buffers[name].layout, w.program.buffers[root_of(w.program.buffers, name)].layout
    return a.size == b.size and a.stride == b.stride


# %% tags=["exercise:relayout"]
def relayout(tensor: torch.Tensor, size, stride) -> torch.Tensor:
    """What a library call returned, in the layout that the kernels were compiled for: `tensor` itself if its
    strides are `stride`, else a copy with these strides. Strides of dims of size 1 do not matter, nor does
    any if the tensor is empty. Raises RuntimeError if the shape is not `size`. size, stride: tuples."""
    if tuple(tensor.shape) != size:
        raise RuntimeError(f"a library call returned a tensor of shape {tuple(tensor.shape)} where {size} "
                           "was expected")
    if all(a == b or n == 1 for a, b, n in zip(tensor.stride(), stride, size)) or 0 in size:
        return tensor
    return copy_with_layout(tensor, size, stride, tensor.dtype, tensor.device)


# %%
def argument_text(w: Writer, a: Any, only_read: bool) -> str:
    """One argument of a library call as text."""
    if isinstance(a, View):
        return view_text(w, a, only_read)
    if isinstance(a, (Expr, Float)):
        return float_text(a)
    if isinstance(a, (list, tuple)):            # fx keeps lists as a subclass of list
        inner = ", ".join(argument_text(w, x, only_read) for x in a)
        return f"[{inner}]" if isinstance(a, list) else f"({inner}{',' if len(a) == 1 else ''})"
    if a is None or type(a) in (bool, int, str) or type(a) is float and math.isfinite(a):
        return repr(a)
    return w.constant(a, "c")


def only_reads(op) -> bool:
    """Does a call of `op` neither write to a tensor nor return one that it was given?"""
    schema = getattr(op, "_schema", None)
    return getattr(op, "namespace", None) == "aten" and schema and not any(x.alias_info for x in (*schema.arguments, *schema.returns))

# %% [markdown]
# ## Library calls
#
# A matrix product can write into memory that the plan has chosen (`OUT_FORMS`). Other operators allocate their own result. What
# they return is compared with the promised strides each time; the comparison costs 0.1 microseconds, a wrong guess would be a
# wrong answer. Dtypes and sizes do not change from call to call as strides may, so they are compared in the first: a kernel
# that takes halves for floats, or four rows for five, reads beyond their memory. `FirstCall` stands in place of the operator
# until then.

# %%
@dataclass(eq=False)
class FirstCall:
    """An operator that has not been called yet. It gives results of the promised dtypes, and if it does so by itself, the next call is
    its own. Raises RuntimeError if a result has another shape than kernels that read it were compiled for. promised: for each result
    (dtype, size or None), or None."""

    op: Callable
    promised: list
    namespace: dict

    def __call__(self, *args, **kwargs):
        result = self.op(*args, **kwargs)
        found = [result] if isinstance(result, torch.Tensor) else list(result)
        for t, (_, size) in ((t, p) for t, p in zip(found, self.promised) if p and p[1] is not None):
            if t.dim() != len(size) or any(type(n) is int and n != m for n, m in zip(size, t.shape)):
                raise RuntimeError(f"{self.op} returned a tensor of shape {tuple(t.shape)} where {size} was expected")
        if all(p is None or p[0] == t.dtype for p, t in zip(self.promised, found)):
            self.namespace.update({name: self.op for name, value in self.namespace.items() if value is self})
            return result
        found = [t if p is None else t.to(p[0]) for p, t in zip(self.promised, found)]
        return found[0] if isinstance(result, torch.Tensor) else found


# %% [markdown]
# The functions of PyTorch's Python interface read their arguments a microsecond faster than the operators of `torch.ops`. Often one of
# the same name is there, which chooses among the overloads by its arguments. `binding` tries it on tensors without memory,
# and looks which operator arrives, and with which arguments: the defaults of the two may differ, as those of `multi_margin_loss` do.

# %%
class Arrived(TorchDispatchMode):
    """Runs no operator, but raises an error that names it and its arguments."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        raise LookupError(op, args, kwargs or {})


def arrival(call, args, kwargs) -> list | None:
    """The operator that a call leads to, and its arguments, tensors by their identity; None if it takes others."""
    try:
        with Arrived():
            call(*args, **kwargs)
    except LookupError as arrived:
        return [id(x) if isinstance(x, torch.Tensor) else x for x in pytree.tree_leaves(arrived.args)]
    except Exception:
        pass
    return None


def binding(step: Extern, buffers: dict) -> Callable:
    """What to call for `step.op`."""
    def example(a):
        if isinstance(a, View):
            return torch.empty([1] * len(a.layout.size), dtype=buffers[a.buffer].dtype, device="meta")
        if isinstance(a, (list, tuple)):
            return [example(x) for x in a]
        return 1 if isinstance(a, Expr) else 1.0 if isinstance(a, Float) else a

    args, kwargs = example(step.args), {k: example(a) for k, a in step.kwargs.items()}
    for home in (torch._C._VariableFunctions, torch._C._nn) if getattr(step.op, "namespace", None) == "aten" else ():
        found = getattr(home, step.op.__name__.split(".")[0], None)
        arrived = found and arrival(found, args, kwargs)
        if arrived and arrived[0] is step.op and arrived == arrival(step.op, args, kwargs):
            return found
    return getattr(step.op, "_op", step.op)


# %% [markdown]
# `write_extern` writes the call in one of four forms. `mm` and its like write into memory that the plan has allocated,
# `out=buf2`. Memory of any value is allocated as the plan's own is, but where PyTorch has to fill it. What returns nothing that is read is
# only called. All others return tensors of their own: those are named, and behind each stands the question whether its strides are the
# promised ones.

# %%
def write_extern(w: Writer, step: Extern) -> None:
    only_read = only_reads(step.op)
    args = [argument_text(w, a, only_read) for a in step.args]
    args += [f"{k}={argument_text(w, a, only_read)}" for k, a in step.kwargs.items()]
    buffers = w.program.buffers
    if step.op in OUT_FORMS and step.outputs[0] is not None:
        fn = w.constant(OUT_FORMS[step.op], "x")
        out = step.outputs[0]
        w.emit(f"{fn}({', '.join(args)}, out={view_text(w, View(out, buffers[out].layout))})")
        return
    if step.op is torch.ops.aten.empty.memory_format and step.outputs[0] and not torch.are_deterministic_algorithms_enabled():
        return write_allocation(w, step.outputs[0])
    op = binding(step, buffers)
    if not any(step.outputs):
        w.emit(f"{w.constant(op, 'x')}({', '.join(args)})")
        return
    promised = [n and (buffers[n].dtype, buffers[n].layout.size if n in w.read else None) for n in step.outputs]
    fn = w.constant(FirstCall(op, promised, w.globals), "x")
    call = f"{fn}({', '.join(args)})"
    single = len(step.op._schema.returns) == 1 and str(step.op._schema.returns[0].type) == "Tensor" \
        if hasattr(step.op, "_schema") else len(step.outputs) == 1
    w.emit(f"{w.local(step.outputs[0]) if single else 'result'} = {call}")
    for i, name in enumerate(step.outputs):
        if name is None:
            continue
        local = w.local(name)
        if not single:
            w.emit(f"{local} = result[{i}]")
        layout = buffers[name].layout
        w.emit(f"if {local}.stride() != {tuple_text(layout.stride)}: "
               f"{local} = relayout({local}, {tuple_text(layout.size)}, {tuple_text(layout.stride)})")
    if not single:
        w.emit("del result")

# %% [markdown]
# ## Allocation
#
# The memory plan of chapter 8 has three kinds of entries, and each is a line: a new tensor, a new name for the memory of a dead
# one, and a `del`. `fresh` remembers which names begin at offset 0 of their memory. On a CPU a new tensor is made by
# [`empty_on_cpu`](ref:minicompile.ch02_guards.memory.empty_on_cpu), which takes half as long as `torch.empty_strided`.

# %%
def write_allocation(w: Writer, name: str) -> None:
    b = w.program.buffers[name]
    w.fresh.add(name)
    size, stride = tuple_text(b.layout.size), tuple_text(b.layout.stride)
    if b.device.type == "cpu" and allocate is torch.empty_strided:
        empty = f"empty_{str(b.dtype).removeprefix('torch.')}"
        w.globals[empty] = empty_on_cpu(b.dtype)
        w.emit(f"{w.local(name)} = {empty}({size}, {stride})")
    else:
        dtype, device = w.constant(b.dtype, "dtype"), w.constant(b.device, "device")
        w.emit(f"{w.local(name)} = empty({size}, {stride}, dtype={dtype}, device={device})")


def write_reuse(w: Writer, new: str, old: str) -> None:
    """`new` takes over the memory of `old`, which is dead (or dies in this very kernel)."""
    layout = w.program.buffers[new].layout
    text = apart_text(w, View(old, Layout(layout.size, layout.stride)))         # as a result, it is no view of what lay there
    w.emit(f"{w.local(new)} = {text}  # takes over its memory")
    if old in w.fresh:
        w.fresh.add(new)


def write_free(w: Writer, names: list[str]) -> None:
    if names:
        w.emit("del " + ", ".join(w.local(n) for n in names))

# %% [markdown]
# ## Putting it together
#
# `generate_host` is called once for each graph. It names the inputs, and those that are sizes get the name
# of their symbol. For each step it writes the allocations that the plan asks for in front of it, the names
# that take over memory, the call, and what dies behind it.

# %%
allocate = torch.empty_strided          # a test fills what it returns, to see who reads what no one wrote


# %% tags=["exercise:host-bug"]
def generate_host(schedule: Schedule, calls: list[tuple[Callable, list[str | View]] | None]) -> tuple[str, dict]:
    """Text of the module with `call(args)`, and its globals. `calls`: for each step that is a kernel, its
    callable and the buffer and symbol names to pass, or where to read a number that is passed."""
    p = schedule.program
    w = Writer(p)
    w.globals.update(torch=torch, empty=allocate, as_strided=torch.as_strided, relayout=relayout,
                     view=view, window=window, bits_of_float=bits_of_float,
                     below_autograd=below_autograd, **floats.NAMESPACE)
    for name, tensor in p.constants.items():
        w.globals[w.local(name)] = tensor
    names = []
    for name in p.inputs:
        if name in p.buffers:
            names.append(w.local(name))
        else:
            names.append(p.symbols[name].name if name in p.symbols else f"unused_{len(names)}")
    for symbol, e in p.numbers.items():
        w.emit(f"{symbol.name} = bits_of_float({float_text(e)})")
    for name in schedule.plan.first:
        write_allocation(w, name)
    current = first_gpu(schedule)
    for k, (step, plan) in enumerate(zip(schedule.steps, schedule.plan.steps)):
        for name in plan.allocate:
            write_allocation(w, name)
        for new, old in plan.reuse:
            write_reuse(w, new, old)
        if isinstance(step, Kernel):
            if step.device.type == "cuda" and step.device.index != current:
                current = step.device.index
                w.emit(f"exchange_device({current})")
            fn, arguments = calls[k]
            texts = [f"bits_of_float({view_text(w, a)}.item())" if isinstance(a, View) else
                     w.local(a) if a in p.buffers else a for a in arguments]
            w.emit(f"{w.constant(fn, 'k')}({', '.join(texts)})  # {step.name}")
        else:
            write_extern(w, step)
        write_free(w, plan.free)
    return module_text(w, schedule, names), w.globals


# %% [markdown]
# What surrounds these lines depends on all of them, and so is written last. Library calls run below autograd: the caller of
# this program differentiates it as a whole. A program may run on a GPU that is not the current one, or on several; then the device is
# exchanged around the body, and before a kernel that runs on another one than the kernel before. Inputs that kernels write get their
# version counter raised, because autograd uses it to notice that a saved tensor was changed, and a raw pointer write is invisible to it.
#
# The first line of the function takes the arguments out of the list, the second empties the list, so that each input dies
# with its last name.

# %%
def first_gpu(schedule: Schedule) -> int | None:
    """The number of the GPU that the first kernel for one runs on."""
    return next((s.device.index for s in schedule.steps if isinstance(s, Kernel) and s.device.type == "cuda"), None)


def module_text(w: Writer, schedule: Schedule, names: list[str]) -> str:
    """The lines of the steps as the body of `call(args)`. names: of the arguments."""
    changed = [w.local(n) for n in mutated_inputs(schedule)]
    outputs = ", ".join(result_text(w, o, apart) for o, apart in zip(schedule.program.outputs, stand_apart(schedule.program)))
    body = w.lines + [f"result = [{outputs}]"]
    calls_torch = any(isinstance(s, Extern) for s in schedule.steps)
    if calls_torch or any("as_strided(" in line or "view(" in line for line in body):
        body = ["with below_autograd():", *_indent(body)]
    index = first_gpu(schedule)
    if index is not None and torch.cuda.device_count() > 1:
        w.globals["exchange_device"] = torch.cuda._exchange_device
        body = [f"outer_device = exchange_device({index})", "try:", *_indent(body),
                "finally:", "    exchange_device(outer_device)"]
    unpack = [", ".join(names) + ("," if len(names) == 1 else "") + " = args"] if names else []
    if changed:
        w.globals["raise_versions"] = raise_versions
        body = [f"raise_versions({', '.join(changed)})", *body]
    body = [*unpack, "args.clear()", *body]
    return "\n".join(["def call(args):", *_indent(body + ["return result"]), ""])


def _indent(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


def stand_apart(program: Program) -> list[bool]:
    """For each output: does it alone leave with memory that the program has made?"""
    roots = [root_of(program.buffers, o.buffer) if isinstance(o, View) else None for o in program.outputs]
    return [root not in (None, *program.inputs, *program.constants) and roots.count(root) == 1 for root in roots]


def result_text(w: Writer, output, apart: bool) -> str:
    if isinstance(output, View):
        text = apart_text(w, output) if apart else view_text(w, output)
        of_library = apart and text == w.local(output.buffer) and root_of(w.program.buffers, output.buffer) not in w.fresh
        return f"({text}.detach() if {text}._is_view() else {text})" if of_library else text
    return "None" if output is None else f"({float_text(output)})"


# %% tags=["exercise:mutated-inputs"]
def mutated_inputs(schedule: Schedule) -> list[str]:
    """The inputs whose memory some step writes under another name, each once, in the order of the first
    writes. A step's output may be None."""
    p = schedule.program
    owned, found = set(p.inputs), {}
    for step in schedule.steps:
        for n in step.outputs:
            if n is not None and (root := root_of(p.buffers, n)) in owned:
                found[root] = True
    return list(found)

# %% [markdown]
# ## The stage
#
# A language is a generator of text and a loader. All sources of a language are handed to the loader at once, which
# compiles them in parallel and may still be compiling when the host program is ready. `DEVICES` says which
# language a device speaks: a new kind of device is one line in each table.
#
# `backend` names a rung: `"loops"` interprets, `"triton"` and `"cpp"` generate code for the device of each
# kernel. A function `Kernel -> KernelSource` may stand in its place.
#
# A list that is filled and emptied, and the Python around that, take a fourth of a microsecond, as long as a small kernel. So of a program
# that only calls kernels `spread` makes a function of the arguments, `def call(x, b):` with `return (buf0,)` at its end. Its caller holds
# the arguments anyway.

# %%
class Language(NamedTuple):
    emit: Callable[[Kernel], KernelSource]
    load: Callable[[list[KernelSource]], list[Callable]]


LANGUAGES = {"reference": Language(emit_reference, load_reference), "triton": Language(emit_triton, load_triton),
             "cpp": Language(emit_cpp, load_cpp)}
DEVICES = {"cuda": "triton", "cpu": "cpp"}


def language_for(backend: str, device: torch.device) -> str:
    if backend == "loops":
        return "reference"
    if backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1":
        return "triton"
    if device.type not in DEVICES:
        raise Unsupported(f"no code generator for device {device}")
    return DEVICES[device.type]


ONLY_KERNELS = re.compile(r"def call\(args\):\n(?:    (.+) = args\n)?    args\.clear\(\)\n((?:    .+\n)*)"
                          r"    result = \[(.+)\]\n    return result\n")


@dataclass
class HostProgram:
    """A compiled schedule. Calling it takes a *list* of inputs, which it empties, and returns a list of
    outputs."""

    schedule: Schedule
    source: str
    sources: list[KernelSource]                     # unique kernels
    kernels: list[Kernel]                           # what each source was emitted from
    namespace: dict                                 # globals of the host program: kernels are bound here
    numbers: dict[str, int]                         # name in the namespace -> position in `sources`
    run: Callable[[list], list]
    source_of: list[int | None]                     # step of the schedule -> position in `sources`
    resolved: bool = False

    def __call__(self, args: list) -> list:
        if not self.resolved:
            resolve_kernels(self)
        try:
            return self.run(args)
        except (IndexError, RuntimeError) as error:         # of a library call that stands in place of another operator
            if isinstance(error, OutOfRange) or not (isinstance(error, IndexError) or "out of bounds" in str(error)):
                raise
            found = OutOfRange(*error.args).with_traceback(error.__traceback__)
        try:
            raise found
        finally:
            del found                       # a frame that holds its own exception lives until the garbage is collected

    def spread(self) -> Callable | None:
        """`run`, if it only calls kernels, as a function of the arguments themselves, which returns a tuple. The first call of a kernel
        waits for all. None also if something else is called in the place of `run`: somebody measures. `in_region`: it runs no Python of
        others, such as Triton's, which the hook would capture."""
        if (found := ONLY_KERNELS.fullmatch(self.source)) is None or type(self.run) is not types.FunctionType:
            return None

        in_region = all(source.language == "cpp" for source in self.sources)

        def unseen(function):                                   # the reference may be in the place of a kernel
            python = in_region and not isinstance(function, types.BuiltinFunctionType)
            return functools.partial(hook.run, None, function) if python else function

        def first_call(name, *args):
            hook.run(None, resolve_kernels, self)
            call.__globals__.update((kernel, unseen(self.namespace[kernel])) for kernel in self.numbers)
            return call.__globals__[name](*args)
        parameters, body, results = found.groups("")
        kernels = {name: functools.partial(first_call, name) for name in self.numbers}
        call = define(f"def call({parameters}):\n{body}    return ({results},)\n", "call", {**self.namespace, **kernels}, "host")
        call.in_region = in_region
        return call

    @cached_property
    def calls_library(self) -> bool:
        """Whether an operator of PyTorch, or of somebody else, is called: what raises as one does, and asks for the state of PyTorch."""
        return any(isinstance(s, Extern) for s in self.schedule.steps)

    @cached_property
    def leaves_history(self) -> bool:
        """Whether gradients must be off while it runs: an operator of somebody else may call an `autograd.Function`."""
        return any(isinstance(s, Extern) and getattr(s.op, "namespace", None) != "aten" for s in self.schedule.steps)

    @cached_property
    def overwritten(self) -> list[int]:
        """Positions of the inputs whose memory the program uses for other values."""
        return [i for i, name in enumerate(self.schedule.program.inputs)
                if name in self.schedule.plan.overwritten]

# %% [markdown]
# Building goes on in the background until the first call, which waits and binds the bare functions. A
# kernel that cannot be built is a defect of the code generator, but not a reason to stop the user's
# program: the reference interpreter takes its place.

# %%
def resolve_kernels(program: HostProgram) -> None:
    """Replace kernels that are still being built by what was built."""
    for name, function in list(program.namespace.items()):
        if hasattr(function, "resolve"):
            number = program.numbers[name]
            try:
                program.namespace[name] = function.resolve()
            except (MinicompileError, RecursionError):           # the next call tries again
                raise
            except Exception as error:
                if config.raise_on_internal_error:
                    raise
                source, kernel = program.sources[number], program.kernels[number]
                logs.warn_once(source.name, f"minicompile: kernel {source.name} could not be built and runs "
                               f"in the slow reference interpreter: {words_of(error)}")
                program.namespace[name] = load_reference([emit_reference(kernel)])[0]
    program.resolved = True


# %% [markdown]
# `compile_schedule` goes through the steps. Two kernels that differ only in the names of their buffers, as in two
# equal layers, have the same *canonical* form, which is emitted once. All texts of a language are loaded together.
# `bindings` remembers for each step which function it calls and with which arguments, and `generate_host` writes
# the program.

# %%
def compile_schedule(schedule: Schedule, backend: str | Callable[[Kernel], KernelSource]) -> HostProgram:
    """Emit, build and bind all kernels, and generate the host program.

    Raises Unsupported if a kernel cannot be emitted."""
    unique: dict[tuple, int] = {}
    sources: list[KernelSource] = []
    kernels: list[Kernel] = []
    bindings: list[tuple[int, list[str | View]] | None] = []
    for step in schedule.steps:
        if not isinstance(step, Kernel):
            bindings.append(None)
            continue
        step, reads = as_arguments(step)
        listed = isinstance(step, KernelList)            # its bodies are canonical
        names = {} if listed else canonical_names(step)
        key = ("list", len(bindings)) if listed else canonical_key(step, names)
        if key not in unique:
            twin = step if listed else canonical(step, names)
            emit = backend if callable(backend) else LANGUAGES[language_for(backend, step.device)].emit
            unique[key] = len(sources)
            sources.append(emit(twin))
            kernels.append(twin)
        bindings.append((unique[key], [reads.get(a, a) for a in step.args]))
    functions: list[Callable] = [None] * len(sources)
    for language in dict.fromkeys(s.language for s in sources):
        which = [i for i, s in enumerate(sources) if s.language == language]
        for i, fn in zip(which, LANGUAGES[language].load([sources[i] for i in which])):
            functions[i] = fn
    text, namespace = generate_host(schedule, [b and (functions[b[0]], b[1]) for b in bindings])
    numbers = {name: i for i, fn in enumerate(functions) for name, value in namespace.items() if value is fn}
    run = define(text, "call", namespace, "host")
    return HostProgram(schedule, text, sources, kernels, namespace, numbers, run, [b and b[0] for b in bindings])


def compile_apart(schedule: Schedule, backend: str) -> Apart | None:
    """The schedule in two programs, so that the one of the device can be recorded; None if it is one already."""
    parts = take_apart(schedule)
    return parts and Apart(parts, compile_schedule(parts.host, backend), compile_schedule(parts.device, backend))
