"""Listings in the prose of the chapters' modules are what the code prints."""
import dis
import functools
import inspect
import itertools
import math
import pathlib
import re
import sys
import tempfile
import warnings
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

import minicompile
from chapters._lib import folded, watch, watching
from minicompile import advice, backends, cache, driver, stances, versions
from minicompile.ch01_graphs import layouts as layouts_of
from minicompile.ch01_graphs.fake import FakeMode, FakeTensor, storage_key
from minicompile.ch01_graphs.graph import print_graph
from minicompile.ch01_graphs.operators import run_on_fakes
from minicompile.ch01_graphs.shapes import ShapeEnv
from minicompile.ch01_graphs.symbolic import Symbol
from minicompile.ch01_graphs.trace import Recorder, run_recorded, trace
from minicompile.ch02_guards import codegen
from minicompile.ch02_guards.guards import in_words
from minicompile.ch02_guards.identity import weakly
from minicompile.ch02_guards.sources import LocalSource, ModuleAttrSource
from minicompile.ch03_capture import attributes, no_hook, values
from minicompile.ch03_capture.capture import CaptureOptions, trace_frame
from minicompile.ch03_capture.hook import kept
from minicompile.ch04_breaks import steps
from minicompile.ch04_breaks.resume import pieces
from minicompile.ch05_autograd import partition as partitions
from minicompile.ch05_autograd.cleanup import clean
from minicompile.ch05_autograd.functionalize import functionalize
from minicompile.ch05_autograd.joint import simplify, trace_joint
from minicompile.ch05_autograd.outputs import build_finish
from minicompile.ch05_autograd.partition import partition
from minicompile.ch05_autograd.undefined import without_tangents
from minicompile.ch06_decompositions.decompose import decompose
from minicompile.ch07_loops.builder import Builder
from minicompile.ch07_loops.ir import Value
from minicompile.ch07_loops.lower import lower
from minicompile.ch07_loops.verify import print_loop, print_program, verify
from minicompile.ch08_fusion.canonical import canonical, canonical_names
from minicompile.ch08_fusion.fuse import fuse
from minicompile.ch08_fusion.kernel import Kernel
from minicompile.ch08_fusion.reference import emit_reference, verify_kernel, verify_schedule
from minicompile.ch08_fusion.values import link
from minicompile.ch09_triton import emit, launch
from minicompile.ch09_triton.emit import emit_triton
from minicompile.ch09_triton.plan import plan
from minicompile.ch10_cpp import nests
from minicompile.ch10_cpp.emit import emit_cpp
from minicompile.ch11_runtime.cudagraphs import GraphSet
from minicompile.ch11_runtime.host import compile_schedule
from minicompile.ch11_runtime.numbers import take_apart
from minicompile.ch13_tuning import layouts
from tests.pretended import moved
from tests.recorders import FakeRecorder

minicompile.config.raise_on_internal_error = False        # which _lib sets for the pages
PACKAGE = pathlib.Path(minicompile.__file__).parent


def graph_of(f, *inputs, gpu=False):
    mode = FakeMode()
    graph = decompose(trace(lambda *x: [f(*x)], [mode.from_real(x) for x in inputs], [*inspect.signature(f).parameters]))
    return moved(graph) if gpu else graph


def loops(*program, **where):
    return print_program(lower(graph_of(*program, **where)))


def kernel(emit, *program, **where):
    [fused] = fuse(lower(graph_of(*program, **where))).steps
    return emit(canonical(fused, canonical_names(fused))).code


def centred(x):
    return x - x.mean(1, keepdim=True)


def noisy(x):
    mean = x.mean(1, keepdim=True)
    print("mean of row 0:", mean[0])
    return x - mean


def step(x, optimizer):
    loss = (x - x.mean(1, keepdim=True)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def convolved(x, w, v):
    return F.conv2d(torch.relu(F.conv2d(x, w)), v)


def graphs(*printed):
    """As text, without the lines of the user, which here are lines of this file."""
    return re.sub(r"  # .*", "", "\n".join(map(print_graph, printed)))


def captured(f, *inputs):
    return watch(f, *inputs, backend="eager")


def fakes_of(gm):
    return [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]


def recorded(rows):
    return trace(lambda x: [centred(x)], [FakeMode().from_real(torch.ones(64, 256), (rows, 256))], ["x"])


def guarded():
    found = captured(centred, torch.ones(64, 256))
    return "\n".join([*map(in_words, found.captured[0].guards), folded(found.entry_text())])


def instructions(code):
    return "\n".join(f"{i.opname} {i.argrepr}".strip() for i in dis.get_instructions(code))


def interpreted():
    return instructions(centred) + "\n" + graphs(*captured(centred, torch.ones(64, 256)).graphs)


def broken():
    found = captured(noisy, torch.ones(64, 256))
    (first, second), rest = found.graphs, [s.code for s in found.states if s.code.co_name == "noisy"][1]
    return "\n".join([inspect.getsource(noisy), graphs(first), found.entry_text(), instructions(rest), graphs(second)])


def cut():
    [gm] = captured(lambda x: torch.relu(x - x.mean(1, keepdim=True)), torch.ones(64, 256, requires_grad=True)).graphs
    joint = trace_joint(gm, fakes_of(gm))
    text = graphs(joint.gm)
    simplify(joint, decompose)
    return text + "\n" + graphs(partition(joint).forward)


def host():
    program = graph_of(lambda x, w: (x - x.mean(1, keepdim=True)) @ w, torch.ones(64, 256), torch.ones(256, 128))
    return compile_schedule(fuse(lower(program)), "loops").source


def host_of_a_layer():
    program = graph_of(lambda x, w, b: torch.relu((x + b) @ w.t()), torch.ones(128, 64), torch.ones(256, 64), torch.ones(64))
    return compile_schedule(fuse(lower(program)), "loops").source


def trained():
    x = torch.ones(64, 256, requires_grad=True)
    return inspect.getsource(step) + graphs(*captured(step, x, torch.optim.SGD([x], lr=0.1)).graphs)


def in_channels_last():
    [gm] = captured(convolved, torch.ones(2, 16, 9, 9), torch.ones(16, 16, 3, 3), torch.ones(16, 16, 3, 3)).graphs
    with mock.patch.object(layouts, "_wants_channels_last", lambda node: True):
        layouts.convolutions_to_channels_last(gm)
    layouts.keep_layouts(gm, fakes_of(gm))
    return inspect.getsource(convolved) + graphs(gm)


def told(f, *inputs):
    """A function, what its version asks for, what follows the graph, and the graph."""
    [found] = watch(f, *inputs, backend="eager").captured
    return "\n".join([inspect.getsource(f), *map(in_words, found.guards), found.body, graphs(found.gm)])


class Config:
    scale = 2.0


def configured(x):
    if hasattr(F, "my_relu"):
        return F.my_relu(x)
    return F.relu(x) * Config.scale


class Layer:
    factor = 2.0

    def double(self):
        return self.factor * 2

    @property
    def half(self):
        return self.factor / 2

    @classmethod
    def made(cls):
        return cls()

    @staticmethod
    def root(x):
        return x.sqrt()


def bound():
    """What lies in a class, and what reading it gives."""
    rows, bind_attribute = {}, attributes.bind_attribute

    def seen(tx, obj, name, found, *further):
        value = bind_attribute(tx, obj, name, found, *further)
        rows[name] = f"{name:<8}{type(found).__name__:<14}{values.describe(value)}"
        return value

    def read(layer, x):
        layer.factor, layer.double, layer.half, layer.made, layer.root
        return x + 1

    with mock.patch.object(attributes, "bind_attribute", seen):
        watch(read, Layer(), torch.ones(3), backend="eager")
    return inspect.getsource(Layer) + "\n".join(rows.values())


class Part:
    pass


def looked_up(x, table, part):
    if "bias" in table:
        return x + table["bias"]
    return x * table[part]


def unpacked(x, pair, log, options, method):
    first, second = pair
    log.append(first)
    return method(x) * options["scale"]


def unpacking():
    return told(unpacked, torch.ones(3), (1.5, 2.5), [7, 8], {"scale": 3.0, "shift": 1.0}, torch.nn.ReLU().forward)


class Scaled:
    factor = 2.0

    def __init__(self):
        self.calls = 0

    @property
    def shift(self):
        return self.calls / 4


def scaled(layer, x):
    layer.calls += 1
    return x * layer.factor + layer.shift


def picked(x, sizes, rates, log):
    if "warmup" not in rates:
        x = x * rates["start"]
    log["last"] = sizes[1]
    return x + sizes[-1]


def labelled(x, names):
    names.append("{}_{}".format(names[0], 2))
    return x.mul(2).add_(names.__len__())


class Price:
    def __init__(self, n):
        self.n = n

    def __radd__(self, other):
        return other + self.n


def totalled(x, names, price):
    names += ["y"]
    return x * (2 ** 3) + price


def counted(layer, x):
    layer.calls += 1
    return layer.norm(x)


def total(x):
    return x * x.sum().item()


def shifted(x):
    return total(x + 1)


def refreshed(model, x):
    old, model.cache = model.cache, x * 2
    return [x + 1, old]


def cached():
    made = Scaled()
    made.cache = torch.ones(3)
    return made


def asked():
    """Questions about a symbolic size, their answers, and the guards that these leave."""
    rows = []
    for question in "size + 2", "size // 2 * 4", "size > 100", "bool(2 * size > 3)", "bool(size > 100)", "bool(size % 2 == 0)", \
            "int(size // 3)":
        env = ShapeEnv()
        answer = str(eval(question, {"size": env.create(6)}))
        rows.append(f"{question:<21} {answer:<15} {''.join('guard: ' + guard.text() for guard in env.guards)}".strip())
    return "\n".join(rows)


def in_the_tracer():
    """What a tracer has at the end of a trace, and what is said of a break."""
    layer = torch.nn.Module()
    layer.calls, layer.norm = 0, torch.nn.LayerNorm(4)
    tx = trace_frame(counted, {"layer": layer, "x": torch.ones(2, 4)}, CaptureOptions()).tx
    named = (value.source and value.source.name() for value in tx.objects.tracked.values())
    [(written, _)] = tx.effects.changed.values()
    with pytest.raises(minicompile.GraphBreakError) as refused:
        minicompile.compile(shifted, fullgraph=True)(torch.ones(3))
    return "\n".join([
        inspect.getsource(counted),
        f"graph.nodes       {[*tx.graph.nodes]}",
        f"tensors.inputs    {[*tx.tensors.inputs]}",
        f"objects.tracked   {', '.join(name for name in named if name and re.fullmatch('x|layer|layer.norm(.weight|.bias)?', name))}",
        f"effects.changed   {written.source.name()}: { {name: v.value for name, v in written.attrs.items()} }",
        inspect.getsource(total), inspect.getsource(shifted), re.sub(r"\S+\.py:\d+", "model.py", str(refused.value))])


def appended(x, a, b):
    a.append(b[0])
    return x * len(b)


def applied(f, x):
    return f(x.mean(1), factor=2)


def measured(x):
    y = x.relu_()
    rows = x.size(0)
    same = x.contiguous()
    half = torch.div(x.shape[1], 2, rounding_mode="trunc")
    return y + same * rows, x.view(-1, half)


def spread(x):
    squares = (x - x.mean(1, keepdim=True)).square()
    return squares * (x - x.mean(1, keepdim=True)).sum()


def built():
    """A loop of half precision, and values that a builder is asked for."""
    b, i, rows = Builder(), Symbol("i", 9), [loops(padded, torch.ones(8).half())]

    def shown(v):
        parts = [shown(a) if isinstance(a, Value) else str(a).removeprefix("torch.") for a in v.args if a is not None]
        return "x" if v is x else f"{v.op}({', '.join(parts)})"

    x = b.load("x", i.expr, torch.float32)
    names = {"x": x, "i": i.expr, "index": b.index, "op": b.op, "between": b.between}
    for text in 'cast(x, bfloat16, float32)', 'cast(x, float32, float16)', 'cast(i, int64, bfloat16)', \
            'cast(constant(0.1), float32, float16)', 'op("mul", constant(2.0), constant(0.25))', 'op("mul", x, constant(1.0))', \
            'op("add", index(i), index(i))', 'op("ge", index(i), constant(0))', 'op("floordiv", index(i - 4), constant(3))', \
            'between(0, i - 1, 8)', 'between(0, i, 9)':
        def constant(value):
            return b.constant(value, torch.float32 if type(value) is float else torch.int64)

        def cast(value, source, target):
            return b.cast(value if isinstance(value, Value) else b.index(value), source, target)
        value = eval(text, vars(torch) | names | {"constant": constant, "cast": cast})
        rows.append(f"{text:<43}{shown(value)}")
    return "\n".join(rows)


def cleaned():
    graph = trace(lambda x: [spread(x)], [FakeMode().from_real(torch.ones(4, 8))], ["x"])
    return inspect.getsource(spread) + graphs(clean(graph))


def turned_around():
    """The loops of `centred`, and what is said of them in the other order."""
    program = lower(graph_of(*CENTRED))
    text = print_program(program)
    program.nodes.reverse()
    with pytest.raises(AssertionError) as found:
        verify(program)
    return f"{text}\n{found.value}"


def laid_out():
    rows = []
    for text in "zeros(2, 3, 4)", "zeros(2, 3, 4).transpose(1, 2)", "zeros(2, 8)[:, :4]", "zeros(1, 4).expand(3, 4)":
        t = eval(text, vars(torch))
        places = "dense" if layouts_of.is_dense(t) else "gaps" if layouts_of.each_has_its_place(t) else "shared"
        length, copy = layouts_of.length_of((t.shape, t.stride(), 0)), layouts_of.copied_strides(t.shape, t.stride())
        order = layouts_of.memory_order(t.shape, t.stride())
        rows.append(f"{text:<34}strides {t.stride()!s:<13}order {order!s:<12}{places:<8}length {length:<5}copy {copy}")
    return "\n".join(rows)


class Doubler(torch.nn.Module):
    def forward(self, x, factor=1.0):
        return x * factor


def peeled():
    """What `python_function` has after each step; a step is seen as the call of what is left."""
    def shown(args, kwargs):
        return f"({', '.join([*(a if isinstance(a, str) else 'Scaled()' for a in args), *(f'{k}={v}' for k, v in kwargs.items())])})"

    layer = Doubler()
    rows = [("partial", (functools.partial(layer, factor=2.0), ("x",), {})), ("Scaled", (layer, ("x",), {"factor": 2.0})),
            ("method", (layer.forward, ("x",), {"factor": 2.0})), ("Scaled.forward", (Doubler.forward, (layer, "x"), {"factor": 2.0}))]
    assert all(no_hook.python_function(*call) == rows[-1][1] for _, call in rows)
    source = inspect.getsource(Doubler).replace("Doubler", "Scaled") + "doubled = functools.partial(Scaled(), factor=2.0)"
    return "\n".join([source, *(f"{name:<16} {shown(*call[1:])}" for name, call in rows)])


def refused():
    """What the contract of kernels and schedules says of three that break it."""
    [step] = fuse(lower(graph_of(*CENTRED))).steps
    products = fuse(lower(graph_of(lambda x, w: torch.relu(torch.relu(x @ w) @ w), torch.ones(4, 4), torch.ones(4, 4))))
    products.plan.steps[0].free.append("w")
    said = []
    for check, wrong in (verify_kernel, replace(step, loops=step.loops[::-1])), \
            (verify_kernel, replace(step, local=step.local | {*step.outputs})), (verify_schedule, products):
        with pytest.raises(AssertionError) as found:
            check(wrong)
        said.append(str(found.value))
    return "\n".join(said)


def added_to_rows():
    rows = lambda g, i: torch.zeros(1000, 64).index_add(0, i, g)             # noqa: E731
    *_, step = fuse(lower(graph_of(rows, torch.ones(512, 64), torch.zeros(512, dtype=torch.int64)))).steps
    return emit_cpp(canonical(step, canonical_names(step))).code


def voted():
    [step] = fuse(lower(graph_of(lambda x, y: x.t() + y, torch.ones(256, 512), torch.ones(512, 256)))).steps
    step = canonical(step, canonical_names(step))
    emitter = nests.Emitter(link(step), 1, {})
    def row(name, graph):
        emitter.graph = graph
        return f"{name:<18}{''.join(f'    {v.name}   {nests.vote(emitter, v):+.0f}' for v in step.vars)}"

    graph = emitter.graph
    accesses = sorted((v for v in graph.steps if v.op in ("load", "store")), key=lambda v: v.buffer)
    rows = [row(f"{a.buffer}[{a.index}]", SimpleNamespace(steps=[a], reductions=[], symbols={}, kernel=step)) for a in accesses]
    return "\n".join([*rows, row("all", graph)])


def in_scopes():
    numbers = torch.ones(64, 256), torch.ones(64, 1), torch.ones(64, 1)
    text = kernel(emit_cpp, lambda x, mean, variance: (x - mean) * torch.rsqrt(variance + 1e-5), *numbers)
    return "\n".join([text, voted(), added_to_rows()])


def launched():
    """A task and its key, and what is in the table of a list."""
    [one] = fuse(lower(graph_of(lambda x: torch.relu(x) + 1, torch.ones(1000), gpu=True))).steps
    source = emit_triton(canonical(one, canonical_names(one)))
    task = launch.make_task(source, 90, aligned=True)

    def against(**changed):
        return "the same key" if launch.make_task(replace(source, **changed), 90, aligned=True)["key"] == task["key"] else "another key"

    other = replace(source, options=source.options | {"constants": {"XBLOCK": 256}})
    rows = [f"{name:<13} {task[name]}" for name in ("signature", "constants", "num_warps", "aligned")]
    rows += [f"another name: {against(name='other', code=source.code.replace(source.name, 'other'))}",
             f"another XBLOCK: {against(options=other.options)}"]
    many = [FakeMode().from_real(torch.ones(n)) for n in (1024, 100, 2048, 300) * 2]
    graph = trace(lambda *x: [p - 0.1 * g for p, g in zip(x[:4], x[4:])], many, [*"abcdefgh"])
    [step] = fuse(lower(moved(decompose(graph)))).steps
    kept = launch.ListKernel(emit_triton(step), lambda source: None)
    table = kept.table(tuple(4096 * (n + 1) for n in range(kept.count))).view(kept.form.shape)
    rows += [f"{row[0]:<2}" + "".join(f"{n:>7}" for n in row[1:]) for row in (*kept.form.tolist(), *table.tolist())]
    return "\n".join([*rows, " ".join(map(str, kept.piece_of.tolist()))])


def in_graphs():
    """What a recorded function does in each of some calls."""
    f = GraphSet(FakeRecorder()).wrap(lambda args: [args[0] * args[1] + args[2]])
    w, last = torch.ones(3), torch.ones(3)
    calls = [(torch.ones(3) * n, w, 1) for n in range(3)] + [(last, w, 2), (last, w, 2), (last, torch.ones(3) * 2, 2)]
    rows = []
    for words, args in zip(("x, w, 1", "another x, w, 1", "another x, w, 1", "x, w, 2", "x, w, 2", "another w"), calls):
        before = dict(f.counts)
        f([*args])
        did, = [name for name in ("recorded", "replayed", "plain") if f.counts[name] > before[name]][:1]
        there = f.recordings.get((args[2],))
        rows.append(f"{words:<33}{did:<11}{there and f'reads {len(there.static)} in place, copies {len(there.copied)}' or ''}")
    return "\n".join(rows)


def planned():
    matrix = torch.ones(128, 128)
    schedule = fuse(lower(graph_of(lambda x, w: torch.relu(torch.relu(x @ w) @ w) @ w, matrix, matrix.clone())))
    rows = []
    for step, memory in zip(schedule.steps, schedule.plan.steps):
        what = "relu" if isinstance(step, Kernel) else " @ ".join(step.inputs)
        rows += [f"{what:<22} {name}: allocated" for name in memory.allocate]
        rows += [f"{what:<22} {name}: takes over {old}" for name, old in memory.reuse]
    return "\n".join([*rows, f"bytes of one matrix: {matrix.nbytes}, peak: {schedule.plan.peak}"])


def stale(x):
    row = x[0]
    x.add_(1)
    return row * 2


def without_writes():
    graph = trace(lambda x: [stale(x)], [FakeMode().from_real(torch.ones(2, 3))], ["x"])
    return inspect.getsource(stale) + graphs(graph, functionalize(graph))


def column_written(x):
    x.t()[0].mul_(2)
    return x + 1


def linked():
    [step] = fuse(lower(graph_of(*CENTRED))).steps
    steps = link(canonical(step, canonical_names(step))).steps
    names = {value: f"v{n}" for n, value in enumerate(steps)}

    def said(v):
        return f"{v.buffer}[{v.index}]" if v.op in ("load", "store") else ", ".join(str(names.get(a, a)) for a in v.args if a is not None)
    return "\n".join(f"{name}  {f'{v.op} {said(v)}':<23} dims {', '.join(sorted(d.name for d in v.dims)):<8} phase {v.phase}"
                     for v, name in names.items())


def decided():
    """What became of each pair of loops of a program."""
    x, rows, i = torch.ones(64, 64), [], torch.zeros(64, dtype=torch.int64)
    programs = {"x.softmax(1)": (lambda x: x.softmax(1), x), "x.sum(0) + x.sum(1)": (lambda x: x.sum(0) + x.sum(1), x),
                "x.exp() @ w + x.exp()": (lambda x, w: x.exp() @ w + x.exp(), x, x.clone()),
                "torch.zeros(64, 64).index_add(0, i, x).relu()": (lambda x, i: torch.zeros(64, 64).index_add(0, i, x).relu(), x, i)}
    for text, program in programs.items():
        decisions = fuse(lower(graph_of(*program))).decisions
        rows += [text, *(f"{d.a} and {d.b}: {'one kernel' if d.accepted else 'apart'}, {d.reason}" for d in decisions)]
    return "\n".join(rows)


def tiled():
    rows, many, c = [], torch.ones(131072, 64).bfloat16(), torch.ones(64).bfloat16()
    for text, shapes, function, *inputs in (
            ("torch.relu(x) + 1", "x [64, 100]", lambda x: torch.relu(x) + 1, torch.ones(64, 100)),
            ("x.t() + y", "x [256, 512], y [512, 256]", lambda x, y: x.t() + y, torch.ones(256, 512), torch.ones(512, 256)),
            ("x * a + b", "x [131072, 64], a, b [64], bfloat16", lambda x, a, b: x * a + b, many, c, c.clone()),
            ("x.sum((0, 2))", "x [8, 32, 100]", lambda x: x.sum((0, 2)), torch.ones(8, 32, 100))):
        [step] = fuse(lower(graph_of(function, *inputs, gpu=True))).steps
        axes, config = plan(link(canonical(step, canonical_names(step))))
        names = ", ".join(f"{axis.name}: {', '.join(v.name for v in axis.vars)}" for axis in axes)
        rows.append(f"{text:<20} {shapes:<37} {names:<16}  {', '.join(f'{n.upper()}BLOCK {size}' for n, size in config.blocks.items())}")
    return "\n".join(rows)


def in_rows():
    """How rows of several lengths are dealt with."""
    rows = []
    for n in 64, 1024, 16384, 50257:
        [step] = fuse(lower(graph_of(centred, torch.empty(4096, n), gpu=True))).steps
        _, c = plan(link(canonical(step, canonical_names(step))))
        blocks = f"XBLOCK {c.blocks['x']}, RBLOCK {c.blocks['r']}"
        rows.append(f"{f'{n} numbers in a row':<25}{blocks:<24}{'in registers' if c.persistent else 'walked along'}, {c.num_warps} warps")
    return "\n".join(rows)


def step_by_step():
    rows, print_step = [], emit.print_step

    def seen(p, step):
        before = len(p.lines)
        print_step(p, step)
        rows.append(f"{step.op:<10}{' '.join(line for line, _ in p.lines[before:])}")

    with mock.patch.object(emit, "print_step", seen):
        picked = torch.zeros(40, dtype=torch.int64)
        kernel(emit_triton, lambda x, i: torch.relu(x[i]).half(), torch.ones(65, 100), picked, gpu=True)
    return "\n".join(rows)


def gelu_turned(x, b):
    return F.gelu(x + b).t() * 2


def padded(x):
    return F.pad(x * 2, (1, 0)) + torch.full((), 1.0)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.scale = torch.nn.ModuleList([torch.nn.Linear(4, 4)]), {"in": 2.0}

    def forward(self, x, sizes):
        return self.layers[0](x) * self.scale["in"] * sizes[-1]


def reached():
    [found] = captured(Net(), torch.ones(2, 4), [3, 4]).captured
    sources = {g.source.name(): g.source for g in found.guards if g.source}
    wanted = "self.layers[0]", "self.scale", "self.scale['in']", "sizes[1]", "grad mode", "torch.nn.functional.linear"
    rows = [(type(sources[name]).__name__, name, sources[name].text()) for name in wanted]
    return "\n".join(["ModuleAttrSource(ModuleAttrSource(LocalSource(\"self\"), \"_modules\", \"norm1\"), \"_parameters\", \"bias\")",
                      ModuleAttrSource(ModuleAttrSource(LocalSource("self"), "_modules", "norm1"), "_parameters", "bias").text(),
                      *(f"{kind:<21} {name:<29} {re.sub('__K.[0-9]+', '__K[0', text)}" for kind, name, text in rows)])


def apart():
    """A program that reads numbers of the host, whole and in two parts."""
    mode = FakeMode()
    given = [*map(mode.from_real, (torch.ones(1000), torch.ones(1000), torch.ones(()))), ShapeEnv().create_float(0.1)]
    graph = trace(lambda p, g, count, lr: [p - g * (lr / 4), count + 1], given, ["p", "g", "count", "lr"])
    schedule = fuse(lower(moved(decompose(graph))))
    whole, parts = print_program(schedule.program), take_apart(schedule)
    sides = [f"{name}: {', '.join(part.program.inputs)} -> {', '.join(str(getattr(o, 'buffer', o)) for o in part.program.outputs)}"
             for name, part in (("host", parts.host), ("device", parts.device))]
    return "\n".join([whole, *sides, *(print_loop(loop) for step in parts.device.steps for loop in step.loops)])


def learned():
    """Calls of a function, why each was compiled, and what is known to vary behind it."""
    rows = []
    minicompile.reset()
    f = minicompile.compile(times, backend="eager")
    with watching() as found:
        for n, count in (8, 2), (9, 2), (9, 3), (10, 4):
            before, versions = len(found.recompiles), len(found.captured)
            f(torch.ones(n, 4), count)
            why = found.recompiles[-1]["why"].split("  #")[0] if len(found.recompiles) > before else \
                "compiled" if len(found.captured) > versions else "an existing version fits"
            known = {source.name(): how for source, how in found.states[0].dynamic.items()}
            rows += [f"[{n}, 4] and {count}: {why}", str(known).replace("'", "")]
    return "\n".join(rows)


def named(x, name, scale=None):
    y = x + len(name)
    return y if scale is None else y * scale


def counted_by_pattern():
    """How many calls of each kind have made a version, ran one, or ran eagerly."""
    happened = Counter()

    def backend(gm, example_inputs):
        def run(*inputs):
            happened["ran"] += 1
            return gm.forward(*inputs)
        happened["compiled"] += 1
        return run

    minicompile.reset()
    f, rows, x = minicompile.compile(named, backend=backend), [inspect.getsource(named)], torch.ones(3)
    names = ["n" * n for n in range(1, 10)]
    for words, calls in (("eight names", [(x, name) for name in names[:8]]),
                         ("the same with a scale", [(x, name, x) for name in names[:8]]),
                         ("a ninth name", [(x, names[8])]), ("another call of it", [(x, names[8])]), ("the first name", [(x, names[0])])):
        happened.clear()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for call in calls:
                f(*call)
        made, ran = happened["compiled"], happened["ran"]
        done = f"{made} compiled" if made else "an existing version runs" if ran else "runs eagerly"
        rows.append(f"{words:<26}{done}{', with a warning' if told else ''}")
    return "\n".join(rows)


def times(x, n):
    return torch.relu(x) * n


def sealed():
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path, other = pathlib.Path(folder, "file"), pathlib.Path(folder, "other")

        def damaged(words, damage=lambda: None):
            for key, where in (("key", path), ("another", other)):
                cache.write_sealed(where, key, lambda file: file.write_bytes(b"machine code"))
            damage()
            rows.append(f"{words:<26} {cache.read_sealed(path, 'key')}")

        damaged("as it was written")
        damaged("its last byte is lost", lambda: path.write_bytes(path.read_bytes()[:-1]))
        damaged("copied from another key", lambda: path.write_bytes(other.read_bytes()))
        damaged("others may write to it", lambda: path.chmod(0o777))
    return "\n".join(rows)


def masked_layer(x, b, mask, w):
    a = x + b
    d = F.gelu(a) * mask
    return d @ w


def priced():
    b, mask, w = torch.ones(256, requires_grad=True), torch.ones(64, 256, dtype=torch.bool), torch.ones(256, 256, requires_grad=True)
    [gm] = captured(masked_layer, torch.ones(64, 256), b, mask, w).graphs
    joint = trace_joint(gm, fakes_of(gm))
    simplify(joint, decompose)
    halves = partitions.split_nodes(joint)
    saved = partitions.choose_saved(joint, halves)
    forward = [n for n in joint.gm.graph.nodes if n.op != "output" and n not in halves.backward]
    stage, rows = partitions.stages(forward, halves), []
    for node in forward:
        use = partitions.forward_use(node, halves, stage)
        cost = partitions.price(node, joint, use.library or use.far or use.output or not partitions.is_fusible(node))
        rows.append(f"{node.name:<16} {cost:>10}{'  saved' if node in saved else ''}")
    assert sum(row.endswith("saved") for row in rows) == 4
    return "\n".join(rows)


def overlapping(x):
    y = x * 2
    return y, y[0], y.t(), x + 1


def rows(x):
    return x.unbind()


def outputs():
    text = ""
    for f, x in (overlapping, torch.ones(4, 4, requires_grad=True)), (rows, torch.ones(3)):
        [gm] = captured(f, x).graphs
        joint = trace_joint(gm, fakes_of(gm))
        text += "\n".join([inspect.getsource(f), *map(str, joint.recipes), build_finish(joint).source_text])
    return text


def alone(x):
    return (x + 1).t()


def both(x):
    y = x + 1
    return y, y.t()


def handed_out(x):
    return x.t(), x.data


def who_sees():
    rows = []
    for f in alone, both, handed_out:
        given = f, torch.ones(4, 4, requires_grad=True)
        [gm] = captured(*given).graphs
        recipes = trace_joint(gm, fakes_of(gm)).recipes
        rows += [inspect.getsource(f), *map(str, recipes)]
    return "\n".join(rows)


def slope(x, w):
    y = torch.tanh(x @ w)
    return y.sum()


def traced_back():
    [gm] = captured(slope, torch.ones(4, 8), torch.ones(8, 8, requires_grad=True)).graphs
    recorder, mode = Recorder(), FakeMode()
    fakes = mode.from_real(torch.ones(4, 8)), mode.from_real(torch.ones(8, 8, requires_grad=True))
    for name, fake in zip("xw", fakes):
        recorder.placeholder(name, fake)
    with recorder:
        (total,) = run_recorded(recorder, gm, fakes)
        torch.autograd.grad(total, fakes[1])
    made = [n for n in recorder.graph.nodes if n.op != "placeholder"]
    return "\n".join([inspect.getsource(slope), print_graph(gm), *(
        f"{n.name:<22} of {', '.join(n.meta['origins']):<7} {n.meta['location'].source}" for n in made)])


def remembered():
    def function():
        pass

    def how(thing):
        return "by a weak reference" if weakly(thing) is not thing else "itself"

    things = {"torch.float32": torch.float32, "torch.nn.Linear": torch.nn.Linear, "math.sqrt": math.sqrt, "a class of the program": Net,
              "a function of the program": function, "a module, torch.nn.Linear(2, 2)": torch.nn.Linear(2, 2)}
    rows = [f"{words:<34} {how(thing)}" for words, thing in things.items()]
    return "\n".join([*rows, f"{'a list':<34} {how([])}: there are no weak references to it"])


def two_results(x, w):
    logits = torch.tanh(x * w)
    return logits, (logits * 3).sum()


def without_one():
    [gm] = captured(two_results, torch.ones(4), torch.ones(4, requires_grad=True)).graphs
    joint = trace_joint(gm, fakes_of(gm))
    simplify(joint, decompose)
    whole = partition(joint).backward
    return inspect.getsource(two_results) + graphs(whole, without_tangents(whole, {"tangent0"}))


def checked(x):
    if x.min() < 0:
        raise ValueError("negative")
    return x.sqrt()


def running(x, n):
    def sums():
        total = x * 0
        while True:
            total = total + (yield total)
    it = sums()
    next(it)
    return it.send(x), it.send(x * n)


def conditions():
    """Of a tensor, with sizes that vary and with fixed ones."""
    rows = []
    for dynamic in True, False:
        minicompile.reset()
        text = watch(lambda x: x + 1, torch.ones(4, 8), backend="eager", dynamic=dynamic).entry_text()
        rows += re.search(r"def __tensors_full.*\n    if not \((.*)\): raise", text)[1].split(" and ")
    assert rows.count("__a0.shape == (4, 8)") == 1
    return "\n".join(rows)


def hooked(p, x):
    h = p * x
    h.register_hook(lambda g: g * 2)
    h.sum().backward()


def twice(p, x):
    (p * x).sum().backward()
    (p * 3).sum().backward()
    return p.grad.norm()


def halved(p, x):
    (p * x).sum().backward()
    p.grad = p.grad / 2
    return p.grad.norm()


def noted(log, l, d, x):
    y = x + 1
    log.append(y)
    l[1] = y
    l.pop()
    d["n"] += 1
    del d["k"]
    return y


def statements():
    minicompile.reset()
    arguments = [1, 2], [1, 2, 3], {"k": 0, "n": 1}, torch.ones(3)
    [found] = watch(noted, *arguments, backend="eager").captured
    assert found.constants[0] is dict.pop
    return inspect.getsource(noted) + "\n" + found.body


CENTRED = centred, torch.ones(64, 256)
def shifted_in_place(a, b):
    a.add_(1)
    return b * 2


def printing(gm, example_inputs):
    print(gm.code)
    return gm.forward


def given_to_backends():
    """Overlapping arguments with and without the check, a graph before and after its symbols are inputs, and a backend without a result."""
    def called():
        minicompile.reset()
        compiled, buffer = minicompile.compile(shifted_in_place, backend="aot_eager"), torch.ones(3)
        compiled(torch.ones(2), torch.ones(2))
        return compiled(buffer[:2], buffer[1:])

    buffer, graph_before = torch.ones(3), []
    rows = [inspect.getsource(shifted_in_place).replace("shifted_in_place", "shifted"),
            f"{'eager':<21}{shifted_in_place(buffer[:2], buffer[1:])}"]
    with mock.patch.object(backends, "watch_overlaps", lambda captured, compiled: compiled):
        rows.append(f"{'without this check':<21}{called()}")
    rows.append(f"{'with it':<21}{called()}")

    def watched(captured):
        graph_before.append(graphs(captured.gm))
        backends.add_size_inputs(captured)

    with mock.patch.object(versions, "add_size_inputs", watched):
        [found] = watch(lambda x: x.sum() / x.size(0), torch.ones(4, 2), backend="eager", dynamic=True).captured
    rows += [*graph_before, graphs(found.gm), inspect.getsource(printing)]
    forgetful = lambda gm, example_inputs: None                             # noqa: E731
    forgetful.__name__ = "printing"
    with pytest.raises(minicompile.BackendError) as refused:
        minicompile.compile(centred, backend=forgetful)(torch.ones(3, 4))
    return "\n".join([*rows, str(refused.value).replace("outputs; ", "outputs;\n")])


def in_each_stance():
    """What a call does that a compiled version fits, and one that none fits."""
    happened = []

    def backend(gm, example_inputs):
        def run(*inputs):
            happened.append("runs what is compiled")
            return gm.forward(*inputs)
        happened.append("compiles")
        return run

    def done(compiled, x):
        happened.clear()
        try:
            compiled(x)
        except minicompile.RecompileError as error:
            return type(error).__name__
        return happened[0] if happened else "runs eagerly"

    rows = []
    for name in stances.STANCES:
        minicompile.reset()
        compiled = minicompile.compile(lambda x: x + 1, backend=backend)
        compiled(torch.ones(3))
        with minicompile.set_stance(name):
            rows.append(f"{name:<21}{done(compiled, torch.ones(3)):<24}{done(compiled, torch.ones(3).double())}")
    return "\n".join(rows)


def shown(x):
    y = x.relu()
    print(y.shape)
    return y + 1


def backwards(x, y):
    z = x + y
    factors = reversed([z, y])
    print(z.shape)
    for a in factors:
        z = z * a
    return z


def special(x):
    y = x * 2
    y.t_()
    return y.detach() + K


K = torch.tensor([1.0, 2.0, 3.0])


def answered():
    """What operators answer on fakes."""
    def fake(device, *shape, dtype=torch.float32):
        return FakeTensor(torch.empty(shape, dtype=dtype, device="meta"), torch.device(device))

    x, s, c = fake("cuda", 4, 8), fake("cpu", dtype=torch.float64), fake("cpu", 4, 8)
    rows = []
    for text in "add.Tensor(x, s)", "t.default(x)", "relu_.default(x)", "nonzero.default(x)", "add.Tensor(x, c)":
        packet, overload, names = re.fullmatch(r"(\w+)\.(\w+)\((.*)\)", text).groups()
        args = [{"x": x, "s": s, "c": c}[name] for name in names.split(", ")]
        try:
            found = run_on_fakes(getattr(getattr(torch.ops.aten, packet), overload), args, {})
            said = "x" if found is x else f"f32{list(found.shape)} on {found.device}, strides {found.stride()}, memory of " + \
                ("x" if storage_key(found) == storage_key(x) else "its own")
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        rows.append(f"{text:<21}{said}")
    return "\n".join(rows)


def steepest(x, w):
    h = x @ w
    loss = h.sin().exp().sum()
    loss.backward()
    return loss.detach()


def in_one_graph():
    """A step before and after what backward reads of forward was decided."""
    shown, decide = [], driver.recompute_in_backward

    def seen(gm):
        shown.append(graphs(gm))
        shown.append(graphs(decided_on := decide(gm)))
        return decided_on

    minicompile.reset()
    with mock.patch.object(driver, "recompute_in_backward", seen):
        minicompile.compile(steepest, backend="cpp")(torch.ones(64, 256), torch.ones(256, 256, requires_grad=True))
    return inspect.getsource(steepest) + "\n".join(shown)


def counted_up(x):
    for i in range(9):
        x = x + i
        print(i)
    return x


def pieces_of(f):
    """Resume functions and steps that were cut from `f`, each as its signature and its instructions."""
    watch(f, torch.ones(3), backend="eager")
    names = {}
    for (at, *_), piece in kept(pieces, f.__code__).items():
        parameters = piece.code.co_varnames[:piece.code.co_argcount]
        rows = [f"{i.offset:>3} {i.opname:<15} {i.argrepr}".rstrip() for i in dis.get_instructions(piece.code)]
        text = re.sub(r"<class '[\w.]+\.(\w+)'>", r"\1", "\n".join(rows))
        for point in piece.exits:
            text = re.sub(r"<code object [^>]+>", point.name, text, count=1)
        name = piece.name if type(at) is int else "step"
        names[name] = f"{name}({', '.join(parameters)})\n{text}"
    return names


def beside(left, right, width):
    """Two texts as two columns."""
    return "\n".join(f"{a:<{width}}{b}".rstrip() for a, b in itertools.zip_longest(left.splitlines(), right.splitlines(), fillvalue=""))


def cut_at_print():
    found = pieces_of(shown)
    return inspect.getsource(shown) + beside(found.pop("step"), *found.values(), 51)


def step_of_a_loop():
    """The step, and which of its rules `put_away` applied to each instruction behind the path."""
    rows = []

    def noted(name, rule):
        original = getattr(steps, name)

        def called(w, *further):
            if w.at >= 0:
                rows.append(f"{w.draft.instructions[w.at].name:<15}{rule}")
            return original(w, *further)
        return mock.patch.object(steps, name, called)

    def put_away(w, original=steps.put_away):
        rows[:] = rows[-1:]
        with noted("execute", 5), noted("branch", 3), noted("leave_here", 6):
            original(w)

    with mock.patch.object(steps, "put_away", put_away), noted("execute", "the path"):
        lines = pieces_of(counted_up)["step"].splitlines()
    shown = beside("\n".join(lines[:14]), "\n".join(lines[14:]), 47)
    return "\n".join([inspect.getsource(counted_up) + shown, *rows]).replace("counted_up", "counted")


def advised():
    """The reasons of a break and of a recompile, with what there is to do about them."""
    broken_at = captured(lambda x: x if x.sum() > 0 else -x, torch.ones(3)).captured[0].breaks[0].reason
    minicompile.reset()
    compiled = minicompile.compile(lambda x: x + 1, backend="eager", dynamic=False)
    with watching() as found:
        compiled(torch.ones(3)), compiled(torch.ones(4))
    [again] = found.recompiles
    return f"{broken_at}\n-> {advice.for_break(broken_at)}\n{again['why'].split('  #')[0]}\n-> " + \
        advice.for_recompile(again["why"]).replace(" Or pad", "\nOr pad")


def sized(x, sizes, mode):
    return x if mode is None else x * len(sizes)


def asked_of_arguments():
    """Guards as data and in words, one of them in the generated function, and what is said when it fails."""
    args = torch.ones(3), [2, 4], "fast"
    found = watch(sized, *args, backend="eager")
    entry = found.states[0].cache.entries[0]
    _, why = codegen.failing_guard(entry.guards, sized.__code__, sized, (args[0], [2], "fast"), entry.constants)
    return "\n".join([inspect.getsource(sized), *(f"{g!s:<39}{in_words(g)}" for g in entry.guards), found.entry_text(), why])


LISTINGS = {
    "advice.py": advised,
    "backends.py": given_to_backends,
    "cache.py": sealed,
    "learning.py": learned,
    "limits.py": counted_by_pattern,
    "stances.py": in_each_stance,
    "ch01_graphs/__init__.py": lambda: inspect.getsource(centred) + graphs(recorded(64), recorded(ShapeEnv().create(64))),
    "ch01_graphs/graph.py": traced_back,
    "ch01_graphs/layouts.py": laid_out,
    "ch01_graphs/operators.py": answered,
    "ch01_graphs/shapes.py": asked,
    "ch01_graphs/trace.py": lambda: inspect.getsource(special) + print_graph(trace(
        lambda x: [special(x)], [FakeMode().from_real(torch.ones(3, 4))], ["x"])),
    "ch02_guards/__init__.py": guarded,
    "ch02_guards/guards.py": asked_of_arguments,
    "ch02_guards/identity.py": remembered,
    "ch02_guards/sources.py": reached,
    "ch03_capture/__init__.py": interpreted,
    "ch03_capture/attributes.py": lambda: inspect.getsource(Scaled) + told(scaled, Scaled(), torch.ones(3)),
    "ch02_guards/torch_guards.py": conditions,
    "ch03_capture/builders.py": unpacking,
    "ch03_capture/class_attributes.py": lambda: inspect.getsource(Config) + told(configured, torch.ones(3)),
    "ch03_capture/descriptors.py": bound,
    "ch03_capture/comparisons.py": lambda: told(checked, torch.ones(3)),
    "ch03_capture/interpreter.py": lambda: told(running, torch.ones(3), 4),
    "ch03_capture/keys.py": lambda: told(looked_up, torch.ones(3), {(p := Part()): 2.0, "scale": 3.0}, p),
    "ch03_capture/no_hook.py": peeled,
    "ch03_capture/effects.py": statements,
    "ch03_capture/epilogue.py": lambda: told(refreshed, cached(), torch.ones(3)),
    "ch03_capture/methods.py": lambda: told(labelled, torch.ones(3), ["x"]),
    "ch03_capture/operations.py": lambda: told(totalled, torch.ones(3), ["x"], Price(5)),
    "ch03_capture/capture.py": lambda: captured(centred, torch.ones(4, 8)).entry_text() + told(appended, torch.ones(3), [1], [2]),
    "ch03_capture/opcodes_calls.py": lambda: inspect.getsource(applied) + instructions(applied),
    "ch03_capture/tensors.py": lambda: told(measured, torch.ones(3, 4)),
    "ch03_capture/tracer.py": in_the_tracer,
    "ch03_capture/subscripts.py": lambda: told(picked, torch.ones(3), [2, 4, 8], {"start": 0.1, "end": 0.01}, {}),
    "ch04_breaks/__init__.py": broken,
    "ch04_breaks/breaks.py": lambda: inspect.getsource(backwards) + captured(backwards, torch.ones(3), torch.ones(3)).captured[0].body,
    "ch04_breaks/resume.py": cut_at_print,
    "ch04_breaks/steps.py": step_of_a_loop,
    "ch05_autograd/__init__.py": cut,
    "ch05_autograd/aliases.py": lambda: graphs(functionalize(trace(
        lambda x: [column_written(x)], [FakeMode().from_real(torch.ones(2, 3))], ["x"]))),
    "ch05_autograd/cleanup.py": cleaned,
    "ch05_autograd/functionalize.py": without_writes,
    "ch05_autograd/outputs.py": outputs,
    "ch05_autograd/output_plan.py": who_sees,
    "ch05_autograd/partition.py": priced,
    "ch05_autograd/undefined.py": without_one,
    "ch06_decompositions/__init__.py": lambda: graphs(recorded(64), graph_of(*CENTRED)),
    "ch06_decompositions/decompose.py": lambda: print_graph(graph_of(lambda x: F.gelu(x).sum(1), torch.ones(4, 8).bfloat16())),
    "ch07_loops/__init__.py": lambda: loops(*CENTRED),
    "ch07_loops/builder.py": built,
    "ch07_loops/lazy.py": lambda: loops(gelu_turned, torch.ones(64, 32), torch.ones(32)),
    "ch07_loops/externs.py": lambda: loops(lambda x, w: torch.relu(x) @ w.t(), torch.ones(3, 4), torch.ones(5, 4)),
    "ch07_loops/verify.py": turned_around,
    "ch07_loops/ir.py": lambda: loops(lambda x, w: torch.relu(x @ w).sum(0), torch.ones(3, 4), torch.ones(4, 5)),
    "ch07_loops/reductions.py": lambda: loops(lambda x: x.sum(0), torch.ones(16384, 384), gpu=True),
    "ch08_fusion/__init__.py": lambda: loops(*CENTRED) + "\n" + kernel(emit_reference, *CENTRED),
    "ch08_fusion/legality.py": decided,
    "ch08_fusion/memory.py": planned,
    "ch08_fusion/reference.py": refused,
    "ch08_fusion/values.py": linked,
    "ch09_triton/__init__.py": lambda: kernel(emit_triton, *CENTRED, gpu=True),
    "ch09_triton/launch.py": launched,
    "ch09_triton/tiling.py": tiled,
    "ch09_triton/emit.py": lambda: "\n".join(kernel(emit_triton, *program, gpu=True) for program in (
        (lambda x: torch.relu(x) + 1, torch.ones(1000)), (centred, torch.empty(4096, 50257)))),
    "ch09_triton/plan.py": in_rows,
    "ch09_triton/printer.py": step_by_step,
    "ch10_cpp/__init__.py": lambda: kernel(emit_cpp, *CENTRED),
    "ch10_cpp/nests.py": in_scopes,
    "ch11_runtime/__init__.py": host,
    "ch11_runtime/cudagraphs.py": in_graphs,
    "ch11_runtime/host.py": host_of_a_layer,
    "ch11_runtime/numbers.py": apart,
    "ch12_training/__init__.py": trained,
    "ch12_training/backward.py": lambda: told(twice, torch.ones(3, requires_grad=True), torch.ones(3)),
    "ch12_training/walk.py": lambda: told(hooked, torch.ones(3, requires_grad=True), torch.ones(3)),
    "ch12_training/memory.py": in_one_graph,
    "ch12_training/slots.py": lambda: told(halved, torch.ones(3, requires_grad=True), torch.ones(3)),
    "ch13_tuning/__init__.py": in_channels_last}
# They show bytecode, or what a call has on the stack
OF_3_11 = {"ch03_capture/__init__.py", "ch03_capture/opcodes_calls.py", "ch04_breaks/__init__.py", "ch04_breaks/breaks.py",
           "ch04_breaks/resume.py", "ch04_breaks/steps.py"}


@pytest.mark.parametrize("path", LISTINGS)
def test_a_listing_is_what_the_code_prints(path):
    if path in OF_3_11 and sys.version_info[:2] != (3, 11):
        pytest.skip("another Python has other bytecode")
    printed, text = LISTINGS[path]().splitlines(), (PACKAGE / path).read_text()
    fenced = "".join(re.findall(r"^# ```python\n((?:# .*\n)+?)# ```", text, re.M))
    shown = re.sub("^# ", "", fenced, flags=re.M).splitlines() if fenced else re.findall(r"^#     (.+)", text, re.M)
    rest = iter([line.strip() for line in printed])                     # `in` goes on where it found the line before
    assert len(shown) >= 3 and [line for line in shown if line.strip() not in rest] == []
