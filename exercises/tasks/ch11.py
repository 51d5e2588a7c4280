"""Chapter 11: the host program, and replaying it."""
import weakref

import torch

from .. import behaviour, task
from .kit import SOURCES, keep_sources, lowered, made_schedule

# ---- mutated-inputs --------------------------------------------------------------------------------------

task("mutated-inputs", title="Which inputs were written", minutes=20, about="""\
A kernel writes memory behind PyTorch's back. Autograd notices changes of a saved tensor by its version counter, which somebody has to
advance. Find the inputs that a schedule writes: some step has an output whose memory, at the end of a chain of `alias_of`, is an
input.""", hints=[
    "root_of(p.buffers, name) is the name at the end of the chain. When is it an input?",
    "Go through the steps in order and through step.outputs; skip None. Each input once, in the order in which it is first written.",
    "One name may be written several times, and the first time decides the order. Which container keeps an order and has everything "
    "once?"])


def host_case(inputs, aliases, outputs):
    return inputs, aliases, outputs


def random_updates(rng):
    found = []
    for _ in range(20):
        names, aliases, outputs = ["x", "y", "z"], {}, []
        for k in range(rng.randrange(1, 8)):
            name = f"b{k}"
            if rng.random() < 0.6:
                aliases[name] = rng.choice(names)
            names.append(name)
            outputs.append((name,) if rng.random() < 0.7 else (None, name))
        found.append((["x", "y", "z"], aliases, outputs))
    return found


def updates_text(case):
    inputs, aliases, outputs = case
    return f"inputs {', '.join(inputs)}; steps write " + "; ".join(", ".join(
        str(n) + (f" (memory of {aliases[n]})" if n in aliases else "") for n in step) for step in outputs)


for _points, _name, _cases in (
        (2, "direct updates", lambda rng: [(["x"], {}, [("a",)]), (["x", "y"], {"a": "x"}, [("a",)]), (["x", "y"], {"a": "y", "b": "x"},
                                                                                                       [("a",), ("b",)])]),
        (2, "chains of updates, and of values that are not inputs", lambda rng: [(["x"], {"a": "x", "b": "a"}, [("a",), ("b",)]),
            (["x"], {"b": "a"}, [("a",), ("b",)]), (["x"], {"a": "x", "b": "a"}, [("b",)]),
                                                                                (["x", "y"], {"a": "x", "c": "b", "d": "a"},
                                                                                 [("a",), ("b",), ("c",), ("d",)])]),
        (2, "several outputs, None, sizes", lambda rng: [(["x", "s0"], {"b": "x"}, [(None, "a"), ("b", None)]),
                                                         (["s0", "x", "y"], {"a": "y", "b": "x"}, [("a", "b", None)])]),
        (2, "random programs", random_updates)):
    @behaviour("mutated-inputs", points=_points, name=_name, cases=_cases, show=updates_text)
    def written(function, case):
        return function(made_schedule(*case))


@behaviour("mutated-inputs", points=2, name="versions of inputs that a compiled function writes", cases=lambda rng: [0, 1, 2],
           show=lambda c: f"f(x, y) updates {['x', 'y', 'both'][c]}")
def versions(function, case):
    from minicompile.ch08_fusion.fuse import fuse
    from minicompile.ch11_runtime.host import compile_schedule

    def f(x, y):
        a, b = x + y, x * y
        if case != 1:
            x.copy_(a)
        if case != 0:
            y.copy_(b)
        return [a]
    x, y = torch.ones(4), torch.ones(4) * 2
    host = compile_schedule(fuse(lowered(f, x, y)), "loops")
    before = x._version, y._version
    host([x, y])
    return {"x written": x, "y written": y, "x advanced by": x._version - before[0], "y advanced by": y._version - before[1]}


# ---- relayout --------------------------------------------------------------------------------------------

task("relayout", title="The library's strides and ours", minutes=20, about="""\
Kernels are compiled for certain strides. What a library call returns usually has them, but nobody guarantees it, and a kernel that reads a
tensor by the wrong strides gives a wrong answer. So each result is checked, cheaply, and copied in the rare case.
`copy_with_layout(tensor, size, stride, dtype, device)` makes the copy.""", hints=[
    "Which three outcomes are there, and in which of them does the caller get the very tensor that came in?",
    "Strides of dims of size 1 do not matter, and none do if the tensor has no elements.",
    "Compare the shapes first, as tuples. Then each pair of strides, where a dim of one element is excused; an empty tensor is excused "
    "altogether. The copy needs memory of exactly these strides: `copy_with_layout` makes it."])


def relaid(function, case):
    shape, strides, size, stride, dtype = case
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides)) if 0 not in shape else 0
    t = torch.arange(extent).to(dtype).as_strided(shape, strides)
    try:
        out = function(t, size, stride)
    except RuntimeError:
        return "RuntimeError"
    return {"the same tensor": out is t, "strides": out.stride(), "dtype": out.dtype, "values": out}


def relayout_text(case):
    return (f"a {str(case[4])[6:]} tensor of size {list(case[0])}, strides {list(case[1])}; "
            f"wanted: size {list(case[2])}, strides {list(case[3])}")


def results(*cases):
    return lambda rng: [(*c, torch.float32) for c in cases]


def random_results(rng):
    found = []
    for _ in range(40):
        size = tuple(rng.choice([1, 1, 2, 3]) for _ in range(rng.randrange(1, 4)))
        def strides():
            order, stride, running = rng.sample(range(len(size)), len(size)), [0] * len(size), 1
            for d in order:
                stride[d], running = running if size[d] > 1 or rng.random() < 0.5 else 9, running * size[d]
            return tuple(stride)
        found.append((size, strides(), size, strides(), rng.choice([torch.float32, torch.int64, torch.bfloat16])))
    return found


for _points, _name, _cases in ((2, "as promised: the tensor itself, and only then", results(((3, 4), (4, 1), (3, 4), (4, 1)),
    ((), (), (), ()), ((3, 4), (1, 3), (3, 4), (1, 3)), ((3, 4), (1, 3), (3, 4), (4, 1)))),
                               (3, "other strides: a copy", results(((3, 4), (1, 3), (3, 4), (4, 1)), ((3, 4), (8, 2), (3, 4), (4, 1)),
                                                                    ((2, 3, 4), (12, 4, 1), (2, 3, 4), (12, 1, 3)))),
                               (2, "strides that do not matter", results(((1, 4), (77, 1), (1, 4), (4, 1)), ((0, 4), (9, 1), (0, 4),
                                   (4, 1)), ((3, 1), (1, 5), (3, 1), (1, 1)), ((1, 4), (77, 2), (1, 4), (4, 1)))),
                               (2, "another shape is an error", results(((3, 4), (1, 3), (3, 4), (4, 1)), ((3, 4), (4, 1), (4, 3), (3, 1)),
                                   ((4,), (1,), (1, 4), (4, 1)), ((4,), (1,), (4, 1), (1, 1)), ((), (), (1,), (1,)))),
                               (2, "random layouts and dtypes", random_results)):
    behaviour("relayout", points=_points, name=_name, cases=_cases, show=relayout_text)(relaid)


# ---- host-bug --------------------------------------------------------------------------------------------

task("host-bug", title="Memory that is never given back", minutes=35, kind="bug", function="generate_host",
     plant=[("write_free(w, plan.free)", "write_free(w, plan.free if isinstance(step, Kernel) else [])")], about="""\
The results are right, but a program needs more memory than its plan says. The host program drops each name after the step in which it
dies; here, some are not dropped. Compare the generated text, `HostProgram.source`, with the plan of the schedule.""", hints=[
         "Print the source for a chain of matrix products. Which `del` lines would you expect, and which are there?",
         "The plan has a list `free` for every step, be it a kernel or a library call.",
         "Look at the arguments of write_free: for which steps are they empty, and why should they be?"])


def two_products(x, w):
    return (x @ w) @ w


def product_chain(x, w):
    for _ in range(4):
        x = torch.relu(x @ w) @ w
    return x


def sorts(x, w):
    return torch.sort(torch.cumsum(x + 1, 0), 0)[0] @ w


def windows(x, w):
    return torch.relu(x.t()[1:] @ w) + 1, x.t()[2:]


def nothing_given():
    return torch.arange(4) * 2


PRODUCTS = {f.__name__: f for f in (two_products, product_chain, sorts)}
PROGRAMS = {**PRODUCTS, "windows": windows, "nothing_given": nothing_given}


keep_sources(*PROGRAMS.values())


def program_source(name):
    return SOURCES[name] + "# x, w: float32 [8, 8]"


def hosted(name, reuse_memory=False):
    from minicompile.ch08_fusion.fuse import fuse
    from minicompile.ch08_fusion.groups import FusionOptions
    from minicompile.ch11_runtime.host import compile_schedule
    inputs = [torch.ones(8, 8) / 8, torch.eye(8)] if name in PRODUCTS or name == "windows" else []
    return compile_schedule(fuse(lowered(PROGRAMS[name], *inputs), FusionOptions(reuse_memory=reuse_memory)), "loops"), inputs


@behaviour("host-bug", points=3, name="the lines of the program", cases=lambda rng: list(PROGRAMS), show=program_source)
def lines_of(function, case):
    return {f"{what}, line {k}": line.split("#")[0] for what, reuse in (("program", False), ("program that reuses memory", True))
            for k, line in enumerate(hosted(case, reuse)[0].source.splitlines())}


@behaviour("host-bug", points=3, name="tensors alive when each library call begins", cases=lambda rng: list(PRODUCTS), show=program_source)
def alive(function, case):
    from torch.utils._python_dispatch import TorchDispatchMode
    host, inputs = hosted(case)
    seen, counts = [], {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            counts[f"{len(counts)}: {op}"] = len({t.untyped_storage()._cdata for r in seen if (t := r()) is not None})
            out = op(*args, **(kwargs or {}))
            seen.extend(weakref.ref(t) for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor))
            return out
    with torch.no_grad(), Watch():
        result = host(list(inputs))
    return {**counts, "result": result[0]}


@behaviour("host-bug", points=2, name="inputs that are given away die early", cases=lambda rng: list(PRODUCTS), show=program_source)
def given_away(function, case):
    host, inputs = hosted(case)
    lines = [line.strip() for line in host.source.splitlines()]
    inputs_of = host.schedule.program.inputs
    return {f"{name} dropped after line": next((k for k,
        line in enumerate(lines) if line.startswith("del") and name in line[4:].split(", ")), None)
            for name in inputs_of}


# ---- run-recording ---------------------------------------------------------------------------------------

task("run-recording", title="Replay", minutes=50, about="""\
A CUDA graph replays kernels at the addresses at which they were recorded. So a call copies its inputs to where the recording reads,
replays, and copies the results out, because the next replay overwrites them. What is saved for backward may stay where it is, and what
aliases an input has to alias the input of this call. Here the graph is a Python function, as in the tests: a replay rewrites tensors in
place, which is all that matters.""", hints=[
    "What has to be where before the replay? What has to be brought to safety after it, before the next one?",
    "Memory for the results first: it may run out, and nothing is written yet. Then copy in, replay, written placeholders back, "
    "versions, copy out. torch._foreach_copy_ copies a list to a list, and fails on empty ones. All of it under "
    "torch._C._AutoDispatchBelowAutograd().",
    "For each of r.leaving there is fresh memory like it. Then one case for each kind of recipe: the fresh copy of that number; a new "
    "alias of what stays (`as_strided` with its own shape and strides), to which g.group.inside gets a weak reference; an alias of an "
    "argument of this call; a constant. At the end the arguments are emptied, and g.counts['replayed'] is one more."])


def make_replay(kinds):
    """A recording over x (copied), w (static), u (copied, written), and a callable state."""
    from minicompile.ch11_runtime.cudagraphs import GraphedCallable, GraphSet, Recording
    group = GraphSet(recorder=object())
    w = torch.tensor([2.0, 3.0])
    px, pu = torch.zeros(2), torch.zeros(2)
    out, kept, wide = torch.zeros(2), torch.zeros(2), torch.zeros(2, 3, dtype=torch.float64).t()
    copied = [i for i, k in ((0, "x"), (2, "u")) if k in kinds]

    def replay():
        out.copy_(px * w + pu)
        kept.copy_(px + 1)
        wide.copy_(torch.arange(6.0).reshape(3, 2) * px)
        if "u" in kinds:
            pu.add_(10)
        if "w" in kinds:
            w.numpy()[0] += 1                           # as a kernel writes: autograd does not see it
    recipes, leaving = [], []
    if "leaves" in kinds:
        recipes, leaving = [("leaves", 0), ("leaves", 1)], [out, wide]
    if "stays" in kinds:
        recipes.append(("stays", kept))
    if "input" in kinds:
        recipes += [("input", 0, torch.Size([2]), (1,), 0), ("input", 1, torch.Size([1]), (1,), 1)]
    if "constant" in kinds:
        recipes += [("constant", 7), ("constant", None)]
    written = [(2, pu)] if "u" in kinds else []
    r = Recording(replay, [1], [w.data_ptr()], copied, [{0: px, 2: pu}[i] for i in copied], written, recipes, leaving)
    g = GraphedCallable(group, replay, False, None, frozenset([2] * ("u" in kinds) + [1] * ("w" in kinds)))
    return g, r, w


def replayed(function, case):
    kinds, values = case
    g, r, w = make_replay(kinds)
    found, results = {}, []
    for k, value in enumerate(values):
        x, u = torch.tensor([value, value + 1.0]), torch.tensor([1.0, 2.0]) * (k + 1)
        version, w_version, args = u._version, w._version, [x, w, u]
        out = function(g, r, args)
        results.append(out)
        found[f"call {k}"] = {"outputs": [o.clone() if isinstance(o, torch.Tensor) else o for o in out],
                              "strides": [o.stride() if isinstance(o, torch.Tensor) else None for o in out], "u": u.clone(),
                              "u's version advanced": u._version > version,
                              "w's": w._version > w_version, "args left": len(args), "pending": g.group.pending,
                              "memory of x, w": [(o.data_ptr() == x.data_ptr(),
                                                  o.data_ptr() == w[1:].data_ptr()) for o in out if isinstance(o, torch.Tensor)],
                              "x itself": [o is x for o in out]}
    if "stays" not in kinds:
        found["all outputs at the end"] = [list(out) for out in results]
    results = out = None
    found["pending after all outputs are gone"] = g.group.pending
    found["replays"] = g.counts["replayed"]
    return found


for _points, _kinds in ((3, ("x", "leaves")), (2, ("leaves", "constant")), (3, ("x", "u", "leaves")), (3, ("x", "stays")),
                        (2, ("x", "input", "leaves")), (1, ("x", "w", "leaves")),
                        (2, ("x", "u", "leaves", "stays", "input", "constant"))):
    behaviour("run-recording", points=_points, name="inputs and outputs: " + ", ".join(_kinds), cases=lambda rng, kinds=_kinds: [
        (kinds, [float(rng.randrange(-5, 5)) for _ in range(n)]) for n in (1, 3)],
        show=lambda c: f"a recording with {', '.join(c[0])}; {len(c[1])} calls")(replayed)
