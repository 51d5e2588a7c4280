"""Chapter 5: functional graphs, the minimum cut, what is saved."""
import itertools

import torch
import torch.nn.functional as F

from minicompile.ch01_graphs.graph import Location

from .. import behaviour, task
from .kit import SOURCES, graph_lines, graph_rows, joint_graph, keep_sources, program_file, questions, run_rows, traced

aten = torch.ops.aten

# ---- is-dense --------------------------------------------------------------------------------------------

task("is-dense", title="No gaps, no overlaps", minutes=15, about="""\
Functionalization replaces an in-place operator by one that returns a new tensor, and brings the result into the strides of the old one.
That is possible with permutations exactly if the old tensor is dense: all its elements together fill a piece of memory, each with a place
of its own, the dims in whatever order.""", hints=[
    "Order the dims by stride. What has the smallest stride to be, and what the next one?",
    "Each stride is the product of the sizes of all faster dims. Leave dims of size 1 out: no address depends on them.",
    "Sort pairs of stride and size, and walk from the smallest stride with the stride that you expect next. What does a dim of size n "
    "do to that expectation? The first that is not as expected decides."])


def layouts(*pairs):
    return lambda rng: list(pairs)


def permutations(rng):
    base = [((2, 3, 4), (12, 4, 1)), ((2, 2, 4), (12, 4, 1))]
    return [tuple(tuple(x[d] for d in order) for x in case) for case in base for order in itertools.permutations(range(3))]


def odd_ones(rng):
    found = [((3, 1), (1, 7)), ((1,), (5,)), ((1, 4), (1, 1)), ((2, 1, 3), (3, 0, 1))]
    for _ in range(60):
        size = tuple(rng.choice([1, 1, 2, 3]) for _ in range(rng.randrange(1, 5)))
        found.append((size, tuple(rng.choice([1, 2, 3, 4, 6, 9]) for _ in size)))
    return found


for _points, _name, _cases in (
        (2, "contiguous tensors are dense, slices with gaps are not", layouts(((), ()), ((5,), (1,)), ((4, 6), (6, 1)), ((4, 3), (6, 1)),
                                                                              ((4, 3), (6, 2)), ((2, 6), (12, 1)), ((3,), (2,)))),
        (2, "any order of the dims", permutations),
        (2, "elements that share memory", layouts(((2, 3), (3, 1)), ((3, 4), (0, 1)), ((3, 3), (1, 1)), ((4, 2), (1, 2)),
                                                  ((2, 3), (2, 1)))),
        (2, "dims of size 1 do not count", odd_ones)):
    @behaviour("is-dense", points=_points, name=_name, cases=_cases, show=lambda c: f"sizes {c[0]}, strides {c[1]}")
    def dense(function, case):
        return {f"{case[0]} with strides {case[1]} is dense": bool(function(torch.zeros(256).as_strided(*case)))}


# ---- sink-side -------------------------------------------------------------------------------------------

task("sink-side", title="The cut nearest to the sink", minutes=25, about="""\
After the maximum flow, the minimum cut can be read off: the vertices that can still reach the sink are on one side of it. Of several
minimum cuts this is the one nearest to the sink, which saves values as late as possible. A `Network` numbers its edges: `out[v]` lists
those that leave the vertex v, `head[e]` is the vertex that the edge e leads to, and `room[e]` what it still has room for. The edge
`e ^ 1` is the reverse of e, and has room for what flows through e and could be led back.""", hints=[
    "Search backwards from the sink: who could still send it something?",
    "A vertex reaches v over an edge into v that has room. The edges listed in net.out[v] leave v; each has a reverse.",
    "A list of vertices grows while you walk over it; the sink is its first. At each vertex look at its edges from the other end: which "
    "of e and e ^ 1 leads into the vertex, which of the two has to have room, and from which vertex does it come?"])


def random_edges(rng, n):
    """Edges (from, to, capacity) of a network whose source is 0 and whose sink is n - 1."""
    return [(a, b, rng.randrange(1, 6)) for a in range(n) for b in range(n) if a != b and rng.random() < 0.4]


def chain(*widths):
    return [(k, k + 1, w) for k, w in enumerate(widths)], len(widths) + 1


def network(edges, n):
    from minicompile.ch05_autograd.maxflow import Network, add_edge, add_vertex
    net = Network()
    for _ in range(n):
        add_vertex(net)
    for edge in edges:
        add_edge(net, *edge)
    return net


def saturate(net, source, sink):
    """Maximum flow, one shortest path after the other. Returns its value."""
    total = 0
    while True:
        came, queue = {source: None}, [source]
        for v in queue:
            for e in net.out[v]:
                if net.room[e] and net.head[e] not in came:
                    came[net.head[e]] = e
                    queue.append(net.head[e])
        if sink not in came:
            return total
        path, v = [], sink
        while came[v] is not None:
            path.append(came[v])
            v = net.head[came[v] ^ 1]
        amount = min(net.room[e] for e in path)
        for e in path:
            net.room[e] -= amount
            net.room[e ^ 1] += amount
        total += amount


def network_text(case):
    edges, n = case
    return f"source 0, sink {n - 1}, edges " + " ".join(f"{a}-{c}->{b}" for a, b, c in edges)


for _points, _name, _cases in (
        (2, "a chain is cut at its narrowest edge", lambda rng: [chain(1), chain(1, 2), chain(2, 1), chain(1, 2, 3), chain(2, 1, 2)]),
        (2, "of equal cuts the nearest to the sink", lambda rng: [chain(2, 2), chain(1, 2, 1), chain(3, 1, 1, 3), chain(2, 2, 2, 2)]),
        (4, "random networks", lambda rng: [(random_edges(rng, 3 + k // 12), 3 + k // 12) for k in range(60)])):
    @behaviour("sink-side", points=_points, name=_name, cases=_cases, show=network_text)
    def side(function, case):
        net = network(*case)
        saturate(net, 0, case[1] - 1)
        before = list(net.room)
        return {"sink's side": set(function(net, case[1] - 1)), "room unchanged": net.room == before, "room": list(net.room)}


# ---- flow-bug --------------------------------------------------------------------------------------------

task("flow-bug", title="A flow that cannot change its mind", minutes=40, kind="bug", function="maximum_flow",
     plant=[("net.room[e ^ 1] += pushed", "net.room[e ^ 1] = pushed")], about="""\
One character of this function is missing. On most networks it still finds the maximum flow, on some it finds less, and then the
partitioner saves too much, or the wrong values. Find it by hand on the smallest network that a report shows.""", hints=[
    "Draw the smallest network that a behaviour reports, and push flow by hand, along the paths that the function takes. Where does it "
    "get stuck?",
    "Flow that took a wrong way is led back along reverse edges. How much room has the reverse of an edge after two pushes along it?",
    "For every edge, its room and that of its reverse (e ^ 1) always add up to the capacity. Which of the two updates of a push breaks "
    "that?"])


def rerouting(w):
    """Both shortest paths use 1 -> 4. All of that flow has to be led back from 4 to 1, to make room at 4 for a longer way."""
    return [(0, 1, 2 * w), (1, 4, 2 * w), (4, 5, w), (4, 6, w), (5, 10, w), (6, 10, w), (0, 2, 2 * w), (2, 3, 2 * w), (3, 4, 2 * w),
            (1, 7, 2 * w),
            (7, 8, 2 * w), (8, 9, 2 * w), (9, 10, 2 * w)], 11


def flow_outcome(function, case):
    edges, n = case
    net = network(edges, n)
    try:
        return function(net, 0, n - 1), net
    except (IndexError, StopIteration, ValueError) as error:
        return f"{type(error).__name__}: {error}", net


def networks(rng):
    return [rerouting(w) for w in (1, 2, 5)] + [(random_edges(rng, 4 + k % 5), 4 + k % 5) for k in range(300)]


@behaviour("flow-bug", points=3, name="a flow that has to be led another way", cases=lambda rng: [rerouting(w) for w in (1, 2, 5)],
           show=network_text)
def rerouted(function, case):
    return {"value": flow_outcome(function, case)[0]}


@behaviour("flow-bug", points=3, name="random networks", cases=networks, show=network_text)
def random_flow(function, case):
    return {"value": flow_outcome(function, case)[0]}


@behaviour("flow-bug", points=3, name="room is moved, never made, and nothing gets lost on the way", cases=networks, show=network_text)
def conserved(function, case):
    edges, n = case
    value, net = flow_outcome(function, case)
    found = {"value": value}
    for e, (a, b, _) in enumerate(edges):
        found[f"room of {a}->{b} and its reverse"] = net.room[2 * e] + net.room[2 * e + 1]
    flow = [(a, b, c - net.room[2 * e]) for e, (a, b, c) in enumerate(edges)]
    for v in range(1, n - 1):
        found[f"flow into {v} less flow out of it"] = sum(f for _, b, f in flow if b == v) - sum(f for a, _, f in flow if a == v)
    return found


# ---- merge-cse -------------------------------------------------------------------------------------------

task("merge-cse", title="Nothing is computed twice", minutes=40, about="""\
The autograd engine computes the same transpose or cast in forward and in backward. On a functional graph, two operations with equal
operator and equal arguments are the same value, so the second can go. The exceptions are what makes this interesting: random draws, fresh
memory, and numbers that Python thinks are equal.""", hints=[
    "When do two nodes surely compute the same? What do you have to remember of the nodes that you have seen?",
    "One walk, in order, with a dictionary from what decides (operator, arguments and keyword arguments, in the form that `_key` gives "
    "them) to the first such node. If a node is replaced before the next one is looked at, that one's arguments are the merged ones "
    "already. What is unique (`is_unique`), and what has an effect, takes no part.",
    "A node that has an earlier twin hands over three things before it goes: its origins (after the twin's, each once), its location "
    "(`together`), and its readers. A key that cannot be hashed raises a TypeError, and such a node stays."])


def sines(x):
    return (x.sin() + 1).exp() * (x.sin() + 1).exp()


def sums(x):
    return [x.sum(0), x.sum(1), x.sum(0)]


def kinds_of_one(x):
    n = (x * 10).long()
    return [x.sin(), x.sin(), n + 1, n + 1.0, n * 1, n * True]


def kinds_of_zero(x):
    return [x.cos() * 0.0, x.cos() * -0.0]


def keepdims(x):
    return [x.cos().sum(0, True), x.cos().sum(0, False)]


def keyword_arguments(x):
    s = x.cos()
    return [torch.var(s, 0, correction=0), torch.var(s, 0, correction=1), torch.add(s, x, alpha=2), torch.add(s, x, alpha=3),
            torch.var(s, 0, correction=1)]


def draws(x):
    return [x.sin() + x.sin(), torch.bernoulli(x), torch.bernoulli(x)]


def fresh(x):
    return [torch.empty(3).fill_(1.0) + x.sin(), torch.empty(3).fill_(2.0) * x.sin()]


def random_program(rng):
    """A program as data: operations on two of the latest values."""
    return [(rng.choice("sin cos add mul".split()), rng.random(), rng.random(), rng.choice([1, 1.0, 2])) for _ in range(14)]


def merged(function, case):
    if callable(case):
        fn = case
    else:
        def fn(x):
            values = [x, x * 2]
            for op, u, v, n in case:
                a, b = values[int(u * min(len(values), 5))], values[int(v * min(len(values), 5))]
                values.append(a.sin() if op == "sin" else a.cos() if op == "cos" else a + b if op == "add" else a * n)
            return values[2:]
    gm = traced(fn, torch.rand(3, 3))
    for k, n in enumerate(gm.graph.nodes):
        n.meta["origins"], n.meta["location"] = (f"origin{k // 2}", "common"), Location(f"line{k}.py", k, "f")
    function(gm)
    gm.graph.lint()
    left = [n for n in gm.graph.nodes if n.op == "call_function"]
    return {"operations": graph_lines(gm), "origins": {n.name: tuple(n.meta["origins"]) for n in left},
            "lines": {n.name: [line.lineno for line in n.meta["location"].lines] for n in left}}


keep_sources(sines, sums, kinds_of_one, kinds_of_zero, keepdims, keyword_arguments, draws, fresh)


def program_text(case):
    return SOURCES[case.__name__] if callable(case) else "random program of " + ", ".join(op for op, *_ in case)


for _points, _name, _cases in (
        (3, "equal operations, and operations on them", lambda rng: [sines, sums]),
        (3, "1, 1.0 and True are different, and so are 0.0 and -0.0", lambda rng: [kinds_of_one, kinds_of_zero, keepdims]),
        (2, "keyword arguments are part of an operation", lambda rng: [keyword_arguments]),
        (3, "random draws, fresh memory and effects stay", lambda rng: [draws, fresh]),
        (3, "random programs", lambda rng: [random_program(rng) for _ in range(12)])):
    behaviour("merge-cse", points=_points, name=_name, cases=_cases, show=program_text)(merged)


# ---- predict-saved ---------------------------------------------------------------------------------------

SAVED = '''\
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def bias_gelu(x, b):
    return F.gelu(x + b)


def dropout(x, b):
    return F.dropout(F.gelu(x + b), 0.5)


def two_products(x, b):
    return torch.relu(x @ b.T) @ b


def softmax(x, b):
    return torch.softmax(x * b, -1)


def checkpointed(x, b):
    return checkpoint(lambda x, b: torch.relu(x @ b.T) @ b, x, b, use_reentrant=False)

'''
SAVING = ("bias_gelu", "dropout", "two_products", "softmax", "checkpointed")

task("predict-saved", title="What the forward pass keeps", minutes=30, kind="predict", about="""\
x and b are float32 tensors of sizes [64, 64] that require gradients: 16384 bytes each. They stay alive anyway, but the program may write
into them before backward runs. Where eager itself saves an input, such a write is an error, so backward may read it; any other input would
have to be copied in forward, at its full price. How many bytes does the compiled forward pass save besides x and b themselves?""",
     starter=SAVED + questions(**{n.upper(): f"bytes that {n}(x, b) saves besides x and b" for n in SAVING}),
     hints=[
    "What does the derivative of each operation read? Is that cheap to compute again from something that is there, and surely unchanged?",
    "Cheap are pointwise operations. Random numbers cannot be drawn again; a mask has one byte an element. What a matrix product "
    "returns is not computed twice, and what it reads in both passes is in memory already. The maximum and the sum of a row are "
    "reductions: small.",
    "A float32 [64, 64] has 16384 bytes, a mask of it 4096, one float32 for each row 256. partition(...).saved of chapter 5 is the "
    "list."])


def saved_bytes(name) -> tuple:
    from minicompile.ch05_autograd.partition import partition, size_in_bytes
    inputs = [torch.randn(64, 64, requires_grad=True) for _ in range(2)]
    joint = joint_graph(program_file(SAVED)[name], *inputs)
    cut, nodes = partition(joint), {n.name: n for n in joint.gm.graph.nodes}
    saved = [nodes[n] for n, place in zip(cut.saved, cut.saved_inputs) if place is None]
    inputs = [n for n, place in zip(cut.saved, cut.saved_inputs) if place is not None]
    record = [f"{n.name}, {n.meta['val'].dtype} {list(n.meta['val'].shape)}: {size_in_bytes(n)} bytes" for n in saved] or ["nothing"]
    record += [f"{n}, an input, which is there anyway" for n in inputs]
    return sum(map(size_in_bytes, saved)), "\n  ".join(["Kept for the backward pass were:", *record])


for _name in SAVING:
    @behaviour("predict-saved", points=3 if _name == "softmax" else 2, name=_name, answer=_name.upper())
    def _(name=_name):
        return saved_bytes(name)


# ---- choose-saved ----------------------------------------------------------------------------------------

task("choose-saved", title="What to save, what to recompute", minutes=240, seconds=30, about="""\
The heart of chapter 5. Each forward value has a price at which it can be saved. Every path from a value that exists anyway, or must
not be computed twice, to a value that backward reads, has to be cut by saving something on it. Find the cheapest set: a minimum
cut, with `Network`, `maximum_flow` and `sink_side`. Your function then decides what every training step saves.""", hints=[
    "Make each node two vertices, enter and leave, with an edge between them that has the price of saving as capacity. Which edges "
    "connect different nodes, and what is connected to the source and to the sink?",
    "An operand's leave leads to the reader's enter, INFINITE. The source leads to the enter of placeholders and of what must not be "
    "recomputed, the leave of what backward reads leads to the sink, both INFINITE. Only nodes that something needed depends on matter "
    "(with_ancestors).",
    "Three parts. Who takes part: what backward reads, what is itself a gradient, and their ancestors. The network: an edge inside of "
    "each of them, and four kinds of edges that nothing can cut. `forward_use`, with `stages`, tells what `must_not_recompute` and "
    "`price` want to know, and `is_fusible` belongs to `written`. The answer: after the flow, a saved node has its two vertices on "
    "different sides. Which one is on the sink's?"])


def two_layers(x, w, v):
    h = x + torch.relu(x @ w) @ v
    return h + torch.relu(h @ w) @ v


def with_output(x, w, v):
    h = torch.tanh(x @ w)
    return h, torch.sin(h)


def checkpointed(x, w, v):
    from torch.utils.checkpoint import checkpoint
    return checkpoint(lambda x: F.gelu(x @ w) @ v, x, use_reentrant=False).relu()


def small_inside(x, w, v):
    """Inside of the checkpoint is a smaller value than at its entrance, but it must not be saved."""
    from torch.utils.checkpoint import checkpoint
    return checkpoint(lambda h: h.sum(1, True).exp().sin(), x @ w, use_reentrant=False)


def read_after_a_checkpoint(x, w, v):
    from torch.utils.checkpoint import checkpoint
    return checkpoint(lambda x: F.gelu(x @ w), x, use_reentrant=False) * x[:, :1]


def read_later(x, w, v):
    h = torch.sin(x @ w)
    return (torch.exp(h) @ v) @ w + h, torch.tanh(h[:, :16])


class WithoutTangent(torch.autograd.Function):
    """Its gradient is its result, whatever the tangent."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, tangent):
        return ctx.saved_tensors[0]


CUTS = {
    "relu(x + x)": lambda x, w, v: torch.relu(x + x), "gelu(sin(x)) * x": lambda x, w, v: F.gelu(torch.sin(x)) * x,
    "exp(sin(x) * cos(x))": lambda x, w, v: torch.exp(torch.sin(x) * torch.cos(x)),
    "gelu(x @ w) @ v": lambda x, w, v: F.gelu(x @ w) @ v, "relu(x @ w).sum()": lambda x, w, v: torch.relu(x @ w).sum(),
    "round(x @ w)": lambda x, w, v: torch.round(x @ w),
    "round(sin(x))": lambda x, w, v: x.sin().round(),
    "two layers": two_layers,
    "dropout(gelu(x))": lambda x, w, v: F.dropout(F.gelu(x), 0.5), "softmax(x * x)": lambda x, w, v: F.softmax(x * x, -1),
    "layer_norm(sin(x))": lambda x, w, v: F.layer_norm(torch.sin(x), (16,)),
    "y = exp(x), and y is its gradient": lambda x, w, v: WithoutTangent.apply(x),
    "h = tanh(x @ w); h, sin(h)": with_output, "checkpoint(gelu(x @ w) @ v)": checkpointed,
    "h = x @ w; checkpoint(sin(exp(h.sum(1))))": small_inside, "checkpoint(gelu(x @ w)) * x[:, :1]": read_after_a_checkpoint,
    "exp(x @ w).sum()": lambda x, w, v: torch.exp(x @ w).sum(), "h = sin(x @ w); (exp(h) @ v) @ w + h, tanh(h[:, :16])": read_later,
}
PRICES = {"": None, "each value costs 1": lambda node, joint, written: 1, "no value can be saved": lambda node, joint, written: 1 << 62}


def random_layers(rng, count):
    return [(rng.choice("sin relu mm dropout mul add softmax gelu".split()), rng.random(), rng.random()) for _ in range(count)]


def build(layers):
    def fn(x, w, v):
        values = [x]
        for op, u, t in layers:
            a, b = values[int(u * len(values))], values[int(t * len(values))]
            values.append({"mm": lambda: a @ w @ v, "dropout": lambda: F.dropout(a, 0.5), "mul": lambda: a * b, "add": lambda: a + b,
                           "softmax": lambda: torch.softmax(a, -1), "gelu": lambda: F.gelu(a), "sin": a.sin, "relu": a.relu}[op]())
        return values[-1] + values[-1].sum()
    return fn


def cut_of(function, case):
    """The cost, and the names."""
    from minicompile.ch05_autograd import partition
    what, *prices = case
    inputs = [torch.randn(*s, requires_grad=True) for s in ((8, 16), (16, 32), (32, 16))]
    joint = joint_graph(CUTS[what] if isinstance(what, str) else build(what), *inputs)
    try:
        saved = function(joint, partition.split_nodes(joint), *[PRICES[p] for p in prices])
    except AssertionError:
        return "every cut is INFINITE"
    halves = partition.split_nodes(joint)
    found = {"saved": [n.name for n in saved]}
    found["recomputed"] = sorted(n.name for n in recomputed(saved, halves))
    return found


def recomputed(saved, halves):
    """Forward nodes that backward would compute, given what is saved."""
    found, pending = set(), [a for n in halves.backward for a in n.all_input_nodes]
    while pending:
        node = pending.pop()
        if node not in found and node not in halves.backward and node not in saved and node.op != "placeholder":
            found.add(node)
            pending += node.all_input_nodes
    return found


def cut_text(case):
    what, *prices = case
    return (what if isinstance(what, str) else "layers " + ", ".join(op for op, *_ in what)) + \
        "".join(f", prices: {p}" for p in prices if p) + "    x: [8, 16], w: [16, 32], v: [32, 16]"


def cuts(*names):
    return lambda rng: [(n,) for n in names]


for _points, _name, _cases in (
        (4, "pointwise chains are recomputed from their inputs", cuts("relu(x + x)", "gelu(sin(x)) * x", "exp(sin(x) * cos(x))",
                                                                       "round(sin(x))")),
        (4, "matrix products are not computed twice", cuts("relu(x @ w).sum()", "gelu(x @ w) @ v", "two layers",
                                                                         "round(x @ w)")),
        (3, "random numbers, reductions, and values that are small", cuts("dropout(gelu(x))", "softmax(x * x)", "layer_norm(sin(x))")),
        (3, "what is in memory anyway costs half", cuts("gelu(x @ w) @ v", "h = tanh(x @ w); h, sin(h)", "two layers",
                                                        "y = exp(x), and y is its gradient",
                                                        "exp(x @ w).sum()", "h = sin(x @ w); (exp(h) @ v) @ w + h, tanh(h[:, :16])")),
        (3, "what a checkpoint contains is never saved", cuts("checkpoint(gelu(x @ w) @ v)", "h = x @ w; checkpoint(sin(exp(h.sum(1))))",
                                                                    "checkpoint(gelu(x @ w)) * x[:, :1]")),
        (2, "other prices", lambda rng: [(what, p) for what in ("relu(x + x)", "gelu(x @ w) @ v", "two layers") for p in PRICES]),
        (3, "random programs", lambda rng: [(random_layers(rng, 3 + k),) for k in range(8)])):
    behaviour("choose-saved", points=_points, name=_name, cases=_cases, show=cut_text)(cut_of)


# ---- write-through-view ----------------------------------------------------------------------------------

task("write-through-view", title="A write through a view", minutes=60, about="""\
Functionalization turns a program that writes into tensors into one that only makes new ones. Each tensor of the old program is an
`Alias`: its `memory` is shared by all tensors that share storage, and for a view, `parent` is the alias that it looks at and `step`
the view operation. `memory.value` is the node that holds the contents of the whole block, and `memory.version` counts its writes.
`alias.node` are the contents of one alias, valid if `alias.version == memory.version`. `read(b, alias)` gives the present contents,
and makes views again where they are out of date. `undo(b, step, parent, new)` gives the contents of a parent after its view `step`
was overwritten with `new`. `conform(b, new, fake)` brings a node to the dtype and shape of a tensor, and `restride(b, new, fake)`
to its strides. `same_layout(a, b)` compares them. If the step is an `as_strided`, which counts places in memory, the parent's contents
have to be brought into eager's order first: `as_it_lies(b, contents, alias)`. And a parent of which two elements are in one place
(`each_has_its_place` says no) cannot be written through a view: raise `Unsupported`. Write what an in-place operator does: `new`
becomes the contents of `alias`.""",
     hints=[
    "y = x.t(); y[0].zero_(): which tensors have other contents now, and how do they find out?",
    "Writing a view is writing its parent, with contents in which the view's part is new. And the parent may be a view. Only the one "
    "that is no view changes the memory.",
    "The function calls itself. First the new contents get the dtype and shape of the alias. A tensor that is no view changes the "
    "memory: its contents, in the tensor's strides, and the count of its writes. A view takes its parent's present contents, undoes its "
    "own step with the new part in them, and writes the result into the parent. In the end the alias may remember its contents, if they "
    "are laid out as it is."])


def base_written(x):
    y = x.exp()
    turned = y.t()
    y.add_(1)
    return turned, y


def row_written(x):
    y = x.clone()
    y[1] = 5
    y[:, 2].mul_(3)
    return y


def view_of_a_view(x):
    y = x * 1
    z = y.t()[1:]
    z[0].neg_()
    y.view(-1)[3:5].fill_(7)
    return y, z


def several_views(x):
    y = x + 0
    a, b = y[0], y[:, 1]
    a.add_(b.sum())
    b.zero_()
    return a * 2, b + 1, y


def an_input(x):
    x[1].neg_()
    x.t()[0].add_(10)
    return x * 2


def other_dtype(x):
    y = (x * 10).to(torch.int64)
    y[0].copy_(x[1])
    y.t().copy_(torch.ones(3))
    return y


def turned_back(x):
    y = x.clone()
    z = y.t()
    z.copy_(x * 2)
    flat = z.t().view(-1)
    return flat, z


def seen_by_strides(x):
    x.as_strided((3,), (2,), x.storage_offset() + 1).neg_()
    return x * 2


def rows_in_one_place(x):
    y = x.exp().as_strided((3, 3), (1, 1))
    y[0].add_(1)
    return y * 2


keep_sources(base_written, row_written, view_of_a_view, several_views, an_input, other_dtype, turned_back, seen_by_strides,
             rows_in_one_place)


def numbered():
    """An input [3, 3] that does not begin where its memory does."""
    return (torch.arange(12.0) - 5)[3:].view(3, 3)


def functional(function, name):
    """The functional graph, as data."""
    from minicompile.ch05_autograd.functionalize import functionalize
    from minicompile.errors import Unsupported
    try:
        gm = functionalize(traced(globals()[name], numbered()))
    except Unsupported:
        return None
    writes = [str(n.target) for n in gm.graph.nodes if n.op == "call_function" and str(n.target).split(".")[1].endswith("_")
              and not str(n.target).startswith("aten._")]
    return graph_rows(gm), writes


def functional_results(name, value):
    if value is None:
        return "refused"
    rows, writes = value
    x = numbered()
    return {"writes that are left": writes, "outputs": run_rows(rows, [x]), "input afterwards": x}


for _points, _name, _programs in ((3, "a write that views see", ["base_written"]), (4, "writes through views", ["row_written",
                                                            "view_of_a_view"]),
                                  (3, "several views of one memory", ["several_views"]), (3, "inputs, and other dtypes", ["an_input",
                                                            "other_dtype"]),
                                  (3, "memory in another order, or in one place", ["turned_back", "seen_by_strides",
                                                                                   "rows_in_one_place"])):
    behaviour("write-through-view", points=_points, name=_name, cases=lambda rng, programs=_programs: programs,
              show=lambda name: SOURCES[name],
              then=functional_results)(functional)

# ---- tangents-behind -------------------------------------------------------------------------------------

task("tangents-behind", title="Which gradients exist", minutes=20, about="""\
A joint graph has an input for the gradient of each output, a *tangent*. If the caller uses only some of the outputs, some tangents
do not exist, and neither do gradients that depend on no other. In eager such a parameter has no `.grad` at all, and a compiled
function must not answer with zeros. So find, for each gradient of a joint graph, on which tangents it depends. Tangents are the
nodes with "tangent" in `node.meta`, numbered in the order of the graph. `node.all_input_nodes` are the nodes that a node uses. A
gradient that is no node, such as None, depends on none.""",
     hints=[
    "On what does a node depend? On whatever the nodes depend that it uses.",
    "The nodes of a graph stand in an order in which each uses earlier ones only. So one walk is enough.",
    "A dictionary from node to a set of numbers: a tangent has its own number, every other node what the nodes that it uses have "
    "together. At the end look up each gradient; one that is no node is not in there."])


def random_joint(rng, inputs, tangents, calls):
    """A graph as data: what each node uses; the first are inputs, then tangents come between."""
    rows = [()] * inputs
    marks = [False] * inputs
    for k in range(calls + tangents):
        is_tangent = k < tangents if rng.random() < 0.7 else k >= calls
        if is_tangent and sum(marks) < tangents:
            rows.append(())
        else:
            is_tangent = False
            rows.append(tuple(rng.choice(range(len(rows))) for _ in range(rng.randrange(1, 3))))
        marks.append(is_tangent)
    return rows, marks, [rng.choice([None, *range(len(rows))]) for _ in range(5)]


def dependencies(function, case):
    from torch import fx
    rows, marks, wanted = case
    graph, nodes = fx.Graph(), []
    for k, (uses, mark) in enumerate(zip(rows, marks)):
        nodes.append(graph.call_function(max, tuple(nodes[u] for u in uses)) if uses else graph.placeholder(f"n{k}"))
        if mark:
            nodes[-1].meta["tangent"] = True
    graph.output(tuple(nodes))
    found = function(fx.GraphModule(torch.nn.Module(), graph), [None if w is None else nodes[w] for w in wanted])
    return [set(f) for f in found]


def joint_text(case):
    rows, marks, wanted = case
    kinds = [" is a tangent" if mark else " uses " + ", ".join(f"n{u}" for u in uses) if uses else " is an input" for uses,
             mark in zip(rows, marks)]
    gradients = ", ".join("None" if w is None else f"n{w}" for w in wanted)
    return "; ".join(f"n{k}{kind}" for k, kind in enumerate(kinds)) + f"; gradients: {gradients}"


ONE_STEP = [([(), (), (0, 1)], [False, True, False], [2, 1, 0, None]), ([(), (), (), (1, 2)], [False, True, True, False], [3, 2])]
for _points, _name, _cases in ((3, "one step", lambda rng: ONE_STEP),
                               (4, "chains", lambda rng: [random_joint(rng, 2, 3, n) for n in (3, 5, 8, 12, 20)])):
    behaviour("tangents-behind", points=_points, name=_name, cases=_cases, show=joint_text)(dependencies)


@behaviour("tangents-behind", points=2, name="outputs that are not used", cases=lambda rng: [(0,), (1,), (0, 1)],
           show=lambda used: f"a, b -> (a * 2, sin(b)), backward from outputs {used}")
def existing_gradients(function, used):
    import minicompile
    minicompile.reset()
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    outputs = minicompile.compile(lambda a, b: (a * 2, b.sin()), backend="aot_eager")(a, b)
    sum(outputs[k].sum() for k in used).backward()
    return a.grad, b.grad
