"""Chapter 1: graphs, fake tensors and symbolic sizes."""
import operator

import torch
from torch import fx

from .. import behaviour, task
from .kit import SOURCES, keep_sources

# ---- last-uses ---------------------------------------------------------------------------------------------

task("last-uses", title="When is a value dead?", minutes=15, kind="write", about="""\
The interpreter of chapter 1 runs a graph node by node and drops each value after its last use, so that a graph needs no more memory
than eager code. For every node, find the values that nothing after it reads: those can be dropped once the node has run. A node
that reads a value twice drops it once. A value that nothing reads is never in the answer.""",
     hints=[
    "You need to know, at each node, whether a later node reads the same value. Which order of visiting the nodes makes that easy?",
    "Walk the nodes backwards. The first time you meet a value as an input, you are at its last use.",
    "Two tables are enough: the values met so far, and the answer. A node asks of each of its inputs whether it was met before. If it "
    "was not, this is its last use, and the node gets it; only then is it one of those met."])


def random_graph(rng, calls: int, inputs: int = 2) -> fx.Graph:
    """Sums and products of earlier values, some used twice by one node, some never."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(inputs)]
    for _ in range(calls):
        a, b = rng.choice(nodes), rng.choice(nodes)
        nodes.append(graph.call_function(rng.choice([operator.add, operator.mul]), (a, b)))
    graph.output(tuple(rng.sample(nodes, min(2, len(nodes)))))
    return graph


def graph_text(graph: fx.Graph) -> str:
    return "\n".join(f"{n} = {n.op if n.op != 'call_function' else n.target.__name__}({', '.join(map(str, n.args))})"
                     for n in graph.nodes)


def small_graphs(rng):
    return [random_graph(rng, calls) for calls in (1, 2, 3, 3, 4, 6, 9, 30)]


def names(dead: dict) -> dict:
    return {str(node): sorted(map(str, values)) for node, values in dead.items() if values}


@behaviour("last-uses", points=4, name="values die at their last use", cases=small_graphs, show=graph_text)
def values_die(function, graph):
    dead = names(function(graph))
    return {str(n): dead.get(str(n), []) for n in graph.nodes}


@behaviour("last-uses", points=2, name="a value used twice by one node dies once", show=graph_text,
           cases=lambda rng: [squares(rng.randrange(1, 6)) for _ in range(3)])
def dies_once(function, graph):
    return names(function(graph))


def squares(count: int) -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for _ in range(count):
        x = graph.call_function(operator.mul, (x, x))
    graph.output(x)
    return graph


@behaviour("last-uses", points=2, name="the interpreter holds few values at a time",
           cases=lambda rng: [random_graph(rng, n) for n in (3, 8, 20)], show=graph_text)
def interpreter_holds(function, graph):
    """How many values are alive after each node when chapter 1 interprets the graph."""
    import weakref

    from minicompile.ch01_graphs.graph import call_node, interpret
    alive, counts = weakref.WeakSet(), {}

    def on_node(node, args, kwargs):
        value = call_node(gm, node, args, kwargs)
        counts[str(node)] = sum(1 for _ in alive)
        alive.add(value)
        return value

    gm = fx.GraphModule(torch.nn.Module(), graph)
    generator = torch.Generator().manual_seed(0)
    result = interpret(gm, [torch.rand(3, generator=generator) for n in graph.nodes if n.op == "placeholder"], on_node)
    return {**counts, "result": result}


# ---- bounds ------------------------------------------------------------------------------------------------

task("bounds", title="Between which numbers?", minutes=45, kind="write", function="bounds", about="""\
`(64*i + j) // 64` is `i` where 0 <= j < 64: divisions disappear from generated kernels only if the compiler knows bounds. Find the
inclusive bounds of an expression: `e.terms` maps products of atoms (tuples) to coefficients, `e.const` is added.
`_atom_bounds(atom)` knows one atom; None is an unknown bound. A product of several atoms is bounded only where no atom can be
negative.""",
     hints=[
    "Which bounds does a sum have, if you know those of its terms? Of which expressions are the bounds known at once?",
    "Begin with the constant on both sides, and add the bounds of one term after the other. What does a negative coefficient do to a "
    "lower bound? Once one bound is unknown, the sum stays unknown on that side.",
    "For each term, first the bounds of its product: of one atom as they are, of several by multiplying side by side, and nothing is "
    "known as soon as one may be negative. Turn the pair round where the coefficient is negative, and add it, each side with its own "
    "None."])


def random_expressions(shape):
    def cases(rng):
        from minicompile.ch01_graphs.symbolic import Symbol, add, floordiv, mod, mul
        found = []
        for _ in range(14):
            atoms = [Symbol(n, rng.choice([None, rng.randrange(2, 40)]),
                            rng.choice([0, 0, 1, 2, 3, -3]) if shape != "one" else rng.randrange(3)).expr
                     for n in "abc"]
            e = mul(atoms[0], rng.choice([-5, -1, 1, 3]))
            if shape != "one":
                e = add(e, mul(mul(atoms[1], atoms[2]), rng.choice([-2, 1, 4])))
            if shape == "divided":
                e = add(e, mul(floordiv(mul(Symbol("d", None, 0).expr, -1), 2), atoms[2]))
                e = add(mod(e, rng.randrange(3, 9)), mul(floordiv(atoms[1], rng.randrange(2, 7)), rng.choice([-3, 2])))
            found.append(add(e, rng.randrange(-9, 9)))
        return found
    return cases


def expression_text(e) -> str:
    from minicompile.ch01_graphs.symbolic import symbols, to_text
    return f"{to_text(e)} with " + ", ".join(f"{s.lower} <= {s.name}" + (f" < {s.size}" if s.size else "")
                                             for s in sorted(symbols(e), key=lambda s: s.name))


for _points, _name, _shape in ((3, "one variable", "one"), (4, "sums and products", "sum"), (3, "divisions and remainders", "divided")):
    @behaviour("bounds", points=_points, name=_name, cases=random_expressions(_shape), show=expression_text)
    def _(function, e):
        low, high = function(e)
        return {"lower": low, "upper": high}


# ---- run-recorded ----------------------------------------------------------------------------------------

task("run-recorded", title="Every node knows where it came from", minutes=35, about="""\
Each stage of the compiler runs the graph of the stage before on fakes, while a recorder writes a new graph. A kernel can only name
the user's line if nothing is lost on the way. `interpret(gm, inputs, on_node)` calls `on_node(node, args, kwargs)` for each node
and takes the result; `call_node(gm, node, args, kwargs)` is the ordinary way to compute one. The recorder stamps what it writes
with `recorder.provenance`, a pair (location, names of origins), and with `recorder.recompute`. `recorder.remember_grad_fns(out)`
lets what autograd will do for a result inherit both.""", hints=[
    "A node of the old graph may become several operators of the new one, or none. When does the recorder have to know which node is "
    "running?",
    "Before a node is computed, the recorder has to know its location, its name and its mark. After it, the autograd nodes that it has "
    "made are there, and can be told.",
    "Write an `on_node` inside of the function, so that it sees the recorder: two assignments, the computation (by `call`, if there is "
    "one), one line that lets the autograd nodes inherit, the result. A node without a location or a mark must not keep those of the "
    "node before. The rest is `interpret`."])


def layer(x, w):
    return torch.nn.functional.gelu(x @ w.t()).softmax(-1) * 2


def split_apart(x, w):
    a, b = (x @ w.t()).chunk(2, dim=1)
    return torch.nn.functional.layer_norm(a, (2,)) + torch.tanh(b).sum(1, keepdim=True)


def torch_level(name, marked):
    """A graph of PyTorch's functions, whose nodes have locations."""
    from minicompile.ch01_graphs.graph import Location
    gm = fx.symbolic_trace(globals()[name])
    for line, node in enumerate(gm.graph.nodes, 1):
        node.meta["location"] = Location("model.py", line, node.name) if node.op != "placeholder" else None
        if marked and line % 2:
            node.meta["recompute"] = line
    return gm


def recorded(case, differentiate=False):
    from minicompile.ch01_graphs.fake import FakeMode
    from minicompile.ch01_graphs.trace import Recorder, run_recorded
    name, marked = case
    gm, mode, recorder = torch_level(name, marked), FakeMode(), Recorder()
    fakes = [mode.from_real(torch.randn(3, 4)), mode.from_real(torch.randn(4, 4))]
    for k, fake in enumerate(fakes):
        recorder.placeholder(f"arg{k}", fake.requires_grad_(differentiate))
    with recorder:
        out = run_recorded(recorder, gm, fakes)
        grads = list(torch.autograd.grad(out, fakes, torch.ones_like(out))) if differentiate else []
    made = recorder.finish([out, *grads])
    return {n.name: (str(n.target), n.meta["location"] and n.meta["location"].lineno, tuple(n.meta["origins"]), n.meta.get("recompute"))
            for n in made.graph.nodes if n.op == "call_function"}


def program_text(case):
    return SOURCES[case[0]] + ("# odd nodes are marked for recomputing" if case[1] else "")


keep_sources(layer, split_apart)
for _points, _name, _marked, _backward in ((3, "location and origin of each operator", False, False), (2, "marks for recomputing", True,
                                                            False),
                                           (4, "the backward pass inherits them", False, True)):
    @behaviour("run-recorded", points=_points, name=_name, show=program_text, cases=lambda rng, marked=_marked: [("layer", marked),
                                                            ("split_apart", marked)])
    def provenance(function, case, backward=_backward):
        return recorded(case, backward)


@behaviour("run-recorded", points=2, name="another way to compute a node", show=program_text, cases=lambda rng: [("layer", False)])
def another_way(function, case):
    """What each node is called with when `call` computes it, and the final value."""
    from minicompile.ch01_graphs.fake import FakeMode
    from minicompile.ch01_graphs.trace import Recorder
    asked, mode, recorder = [], FakeMode(), Recorder()
    x, w = mode.from_real(torch.randn(3, 4)), mode.from_real(torch.randn(4, 4))
    gm = torch_level(*case)

    def call(node, args, kwargs):
        asked.append((node.name, len(args), recorder.provenance[1]))
        return x
    recorder.placeholder("x", x)
    recorder.placeholder("w", w)
    with recorder:
        out = function(recorder, gm, [x, w], call)
    return asked, list(out.shape)
