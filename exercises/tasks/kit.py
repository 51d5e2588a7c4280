"""What the task files of chapters 4 to 11 share: programs to compile at various stages, and short texts of cases."""
import linecache
import zlib

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

CPU = torch.device("cpu")


def program_file(text: str) -> dict:
    """The globals of a program that stands in a file: messages and the compiler want to see its lines."""
    filename = f"<program {zlib.crc32(text.encode()):08x}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    space = {"__name__": "program"}
    exec(compile(text, filename, "exec"), space)
    return space


def questions(**texts) -> str:
    """Lines of a starter that ask: a comment and `NAME = ...` for each."""
    return "".join(f"\n# {text}\n{name} = ...\n" for name, text in texts.items())


def flat(fn):
    def flattened(*args):
        out = fn(*args)
        return list(out) if isinstance(out, (tuple, list)) else [out]
    return flattened


def traced(fn, *inputs) -> fx.GraphModule:
    """The ATen graph of `fn`."""
    from minicompile.ch01_graphs.fake import FakeMode
    from minicompile.ch01_graphs.trace import trace
    mode = FakeMode()
    return trace(flat(fn), [mode.from_real(t) for t in inputs])


def lowered(fn, *inputs, **options):
    """The loop program of `fn`, lowered as for a CPU with one thread."""
    from minicompile.ch06_decompositions.decompose import decompose
    from minicompile.ch07_loops.lazy import Options
    from minicompile.ch07_loops.lower import lower
    return lower(decompose(traced(fn, *inputs)), Options(**{"threads": 1, **options}))


def run_program(program, inputs):
    """The results of a loop program on the CPU, also of one for a GPU: each loop by itself."""
    from dataclasses import replace

    from minicompile.ch08_fusion.fuse import fuse
    from minicompile.ch08_fusion.groups import FusionOptions
    from minicompile.ch11_runtime.host import compile_schedule
    buffers = {name: replace(b, device=CPU) for name, b in program.buffers.items()}
    schedule = fuse(replace(program, buffers=buffers), FusionOptions(enabled=False))
    with torch.no_grad():
        return compile_schedule(schedule, "loops")(list(inputs))


def joint_graph(fn, *inputs):
    """The joint graph of `fn` and its backward pass, in primitives. `fn` is captured from its bytecode."""
    import inspect

    from minicompile.ch04_breaks.breaks import capture_frame
    from minicompile.ch05_autograd.joint import simplify, trace_joint
    from minicompile.ch06_decompositions.decompose import decompose
    gm = capture_frame(fn, dict(zip(inspect.signature(fn).parameters, inputs))).gm
    fakes = [n.meta["val"] for n in gm.graph.nodes if n.op == "placeholder"]
    return simplify(trace_joint(gm, fakes), decompose)


def graph_lines(gm) -> dict:
    """name -> text of each operation of a graph."""
    return {n.name: f"{n.target}({', '.join(map(str, n.args))}{''.join(f', {k}={v}' for k, v in n.kwargs.items())})"
            for n in gm.graph.nodes if n.op != "placeholder"}


def graph_rows(gm) -> list:
    """An ATen graph as plain data: (name, what it is, operator or constant, arguments, keyword arguments)."""
    def plain(a):
        if isinstance(a, torch.memory_format):
            return str(a)
        return ("node", a.name) if isinstance(a, fx.Node) else [plain(b) for b in a] if isinstance(a, (list, tuple)) else a
    return [(n.name, n.op, getattr(gm, n.target) if n.op == "get_attr" else str(n.target), plain(n.args),
             {k: plain(v) for k, v in n.kwargs.items()})
            for n in gm.graph.nodes]


def run_rows(rows: list, inputs: list) -> list:
    """The results of a graph that came as data. Only operators of ATen run."""
    values, inputs = {}, iter(inputs)

    def real(a):
        if isinstance(a, str):
            return getattr(torch, a[6:]) if a.startswith("torch.") else a
        return values[a[1]] if isinstance(a, tuple) else [real(b) for b in a] if isinstance(a, list) else a
    for name, op, target, args, kwargs in rows:
        if op == "call_function":
            namespace, packet, overload = target.split(".")
            if namespace != "aten" or "file" in packet:
                raise ValueError(f"{target} is no operator of ATen")
            values[name] = getattr(getattr(torch.ops.aten, packet), overload)(*real(args), **{k: real(v) for k, v in kwargs.items()})
        elif op == "output":
            return real(args)[0]
        else:
            values[name] = next(inputs) if op == "placeholder" else target


def without(op, function, *args, **kwargs):
    """What `function` returns; an error if it calls the operator that it is to take the place of."""
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, called, types, args=(), kwargs=None):
            if called._overloadpacket is op:
                raise RuntimeError(f"{function.__name__} calls {op}, which it is to take the place of")
            return called(*args, **(kwargs or {}))
    with Watch():
        return function(*args, **kwargs)


def operand(size):
    """A value of chapter 7 of this size, whose elements nobody asks for."""
    from minicompile.ch07_loops.lazy import Lazy, contiguous_strides
    return Lazy(tuple(size), torch.float32, CPU, lambda builder, index: None, contiguous_strides(size))


def made_kernel(name, loops=(), variables=(), reduction_variables=(), outputs=()):
    from minicompile.ch08_fusion.kernel import Kernel
    return Kernel(name, CPU, tuple(variables), tuple(reduction_variables), list(loops), frozenset(), {}, (), tuple(outputs))


def made_schedule(inputs, aliases, outputs):
    """A schedule of one kernel for each of `outputs` over buffers [4]; aliases: buffer -> the one that it updates."""
    from minicompile.ch07_loops.ir import Buffer, Layout, Program
    from minicompile.ch08_fusion.fuse import Schedule
    from minicompile.ch08_fusion.memory import MemoryPlan
    names = {n for step in outputs for n in step if n} | {n for n in inputs if n != "s0"} | set(aliases)
    buffers = {n: Buffer(n, torch.float32, CPU, Layout((4,), (1,)), aliases.get(n)) for n in sorted(names)}
    return Schedule(Program(list(inputs), buffers, [], []), [made_kernel(f"kernel{k}", outputs=o) for k, o in enumerate(outputs)],
                    MemoryPlan([], [], 0))


def kernels_of(schedule) -> list:
    from minicompile.ch08_fusion.kernel import Kernel
    return [s for s in schedule.steps if isinstance(s, Kernel)]


def seeded(rng):
    """A torch generator that follows from `rng`."""
    return torch.Generator().manual_seed(rng.randrange(1 << 30))


def tensor_text(t) -> str:
    return f"{str(t.dtype)[6:]}{list(t.shape)}" + ("" if t.is_contiguous() else f" strides {t.stride()}")


SOURCES: dict = {}


def keep_sources(*functions) -> None:
    """Read the texts of functions while files may be opened: a graded process may not."""
    import inspect
    SOURCES.update((f.__name__, inspect.getsource(f)) for f in functions)
