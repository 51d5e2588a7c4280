"""The build track: parts of chapters/tiny.py, in the order in which a compiler grows."""
import ast
import collections
import os

import torch
import torch.nn.functional as F

from chapters import tiny

from .. import behaviour, task
from .kit import keep_sources, seeded


def source_of(case) -> str:
    from .kit import SOURCES
    return SOURCES[case if isinstance(case, str) else case[0]]


def graph_text(graph) -> list:
    return [f"{n} = {n.target or 'input'}({', '.join(map(str, n.args))})" for n in graph.nodes]


def compiled_run(f, *calls) -> dict:
    """What tiny makes of a function that is called some times: results, graphs as text, and how often it broke."""
    graphs = []

    def keep(recorder, outputs):
        graph = tiny.finish(recorder, outputs)
        graphs.append(graph_text(graph))
        return lambda *inputs: tiny.interpret(graph, inputs)

    compiled = tiny.compile(f, keep)
    results = [compiled(*args) for args in calls]
    return {"results": results, "graphs": graphs, "breaks": len(compiled.breaks)}


x = torch.arange(12.0).reshape(3, 4) / 4 - 1

# ---- tiny-loop -------------------------------------------------------------------------------------------

task("tiny-loop", title="An opcode handler: a loop", minutes=20, about="""\
Part 3 of chapters/tiny.py is a machine that runs Python's bytecode. Each instruction has a handler. `m` is the machine, and `i` the
instruction; `m.top()` is the value on top of the stack, `m.pop(1)` takes it away, `m.frames[-1].at` is the position of the next
instruction. A handler returns the list of what it pushes, or None. `for x in items:` makes an iterator, and then the instruction
FOR_ITER stands at the head of the loop. Write its handler; tiny registers it. It runs with real values, and also while tracing, when
`m.outside` is not None and values are fakes.""",
     hints=[
    "What is on the stack before the loop's body begins, and what when the loop is over?",
    "The iterator stays below the value, for the next round. How do you ask an iterator for one value, without an exception if there is "
    "none?",
    "A `for` statement whose body returns at once asks an iterator for one value, without an exception. What stands behind it runs when "
    "the iterator is empty: pop, and go on elsewhere. Before you ask at all: may this iterator be asked while tracing?"],
     demo='''
def collatz(numbers):
    longest = {}
    for n in numbers:
        steps = 0
        while n != 1:
            n = n // 2 if n % 2 == 0 else 3 * n + 1
            steps += 1
        longest[steps] = n
    return longest


machine = Machine([first_frame(collatz, [range(1, 30)], {})])
while machine.frames:
    step(machine)
print("your machine:", machine.result)
print("Python:      ", collatz(range(1, 30)))
''')


def summed(items):
    total = 0
    for item in items:
        total += item
    return total


def nested_loops(items):
    found = []
    for a in items:
        for b in range(a):
            if b == 3:
                break
            found.append((a, b))
        else:
            found.append(a)
    return found


def comprehended(items):
    return [[i * k for k in items if k != i] for i in items], {i: -i for i in items}


def unrolled(items):
    y = x
    for k, item in enumerate(items):
        y = y * item + k
    return y


def over_rows(items):
    return sum([row * k for row, k in zip(x, items)])


def from_outside(items):
    y = x
    for item in items:
        y = y + item
    return y


keep_sources(summed, nested_loops, comprehended, unrolled, over_rows, from_outside)


def numbers(*names):
    return lambda rng: [(name, [rng.randrange(6) for _ in range(count)]) for name in names for count in (0, 1, 3, 5)]


def shown_call(case):
    return f"{source_of(case)}\n{case[0]}({case[1]})"


@behaviour("tiny-loop", points=4, name="loops in the plain machine", cases=numbers("summed", "nested_loops", "comprehended"),
           show=shown_call)
def plain_machine(function, case):
    m = tiny.Machine([tiny.first_frame(globals()[case[0]], [case[1]], {})])
    for steps in range(3000):
        if not m.frames:
            return m.result, steps
        tiny.step(m)
    return "not finished after 3000 steps"


@behaviour("tiny-loop", points=3, name="each round is recorded", cases=lambda rng: [("unrolled", [2, 3]), ("over_rows", [1, 5, 2])],
           show=shown_call)
def rounds(function, case):
    return compiled_run(globals()[case[0]], [case[1]], [case[1]])


@behaviour("tiny-loop", points=2, name="an iterator from outside breaks the graph", show=lambda items: f"{source_of('from_outside')}\n"
           f"from_outside(iter({items})), twice", cases=lambda rng: [[1, 2], [4]])
def iterators(function, items):
    return compiled_run(from_outside, [iter(items)], [iter(items)])


# ---- tiny-record -----------------------------------------------------------------------------------------

task("tiny-record", title="Record one operator", minutes=25, about="""\
PyTorch hands every operator that a function reaches to the recorder, with fakes for tensors. Write what the recorder does with it.
`on_meta(op, args, kwargs)` gives the operator's result on meta tensors, and the device that it would be on. `recorder.note(target,
args, kwargs)` makes a node. `as_node(x)` is the node of a fake, and anything else as it is; `tree_map(f, structure)` applies f
inside of tuples, lists and dictionaries. `wrap(result, device, node)` makes the fake of a result.""",
     hints=[
    "What must a node know, so that `interpret` can run it again? Its arguments cannot be fakes: those belong to this one recording.",
    "Note the node with as_node applied to all arguments, and wrap the result. If the result is a tuple or a list, who makes its "
    "elements?",
    "The call's own node holds the whole result. Each of several results is what operator.getitem takes out of that node at its "
    "position: a node of its own, and a fake made for that node. The answer has the type of the result. One result needs only `wrap`."],
     demo='''
print(record(lambda x, w: F.gelu(x @ w) + 1, torch.randn(4, 8), torch.randn(8, 8)), end="\\n\\n")
print(record(lambda x: F.layer_norm(x, (8,)) + x.max(1, keepdim=True)[0], torch.randn(4, 8)))
''')


def one_call(x):
    return x.exp()


def chain(x):
    return F.gelu(x @ x.t()) + 1, x.sum(1).to(torch.float64)


def made_inside(x):
    return torch.arange(4) * 2 + x


def keywords(x):
    return torch.full((2, 2), 3.5, dtype=torch.float64), x.sum(0, keepdim=True)


def two_results(x):
    values, indices = x.max(1)
    return values * 2, indices


def pieces(x):
    a, b = x.split(2, dim=1)
    return a - b, F.layer_norm(x, (4,))


keep_sources(one_call, chain, made_inside, keywords, two_results, pieces)
for _points, _name, _functions in ((2, "one call is one node", ["one_call", "chain"]), (2, "constants and keywords", ["made_inside",
                                                            "keywords"]),
                                   (3, "several results", ["two_results", "pieces"])):
    @behaviour("tiny-record", points=_points, name=_name, cases=lambda rng, names=_functions: names, show=source_of, tolerance=1e-5)
    def recordings(function, name):
        graph = tiny.record(globals()[name], x)
        return {"graph": str(graph), "outputs": [(type(n.fake).__name__, str(n.fake.dtype), list(n.fake.shape)) for n in graph.outputs],
                "computes": tiny.interpret(graph, [x * 2])}


# ---- tiny-guard ------------------------------------------------------------------------------------------

task("tiny-guard", title="The guard of a tensor", minutes=25, about="""\
A recording was made with certain tensors. With which others may it be used again? `outside` is the check that is being written:
`outside.test(text)` appends a line that fails the check unless the condition holds, `outside.name(object)` gives a name by which
the text can refer to an object, `describe(t)` is what the recording depends on, and the text may call it.
`outside.recorder.input(thing)` makes the fake of a new input. `outside.inputs` maps the `id` of each tensor that was read to (its
variable in the text, its fake).""",
     hints=[
    "Which properties of a tensor did the recording use? And if the function got one tensor twice, would the graph be the same for two?",
    "Two paths to one tensor: one input of the graph. At the next call the graph gets the tensor of the first path only, so what has to "
    "hold?",
    "First the fake, which is made once for each tensor and kept together with the variable that read it first. Then one test, of two "
    "kinds: the first variable asks for the same description, a later one for the very tensor that the first one holds."],
     demo='''
def f(a, b):
    return a * 2 + b


compiled, x = compile(f, backend=eager), torch.ones(2, 3)
for given in ((x, x.clone()), (x + 1, x), (x, x), (x.double(), x), (x.t(), x.t())):
    compiled(*given)
    versions = sum(map(len, compiled.entries.values()))
    print([f"{t.dtype} {tuple(t.shape)}" for t in given], "one tensor:", given[0] is given[1], "| versions:", versions)
''')


def doubled(a):
    return a * 2


def both(a, b):
    return a * 2 + b, a is b


def in_a_list(items, a):
    return items[0] + items[1] * a


keep_sources(doubled, both, in_a_list)
KINDS = {"plain": lambda: torch.ones(2, 3), "another": lambda: torch.zeros(2, 3), "wide": lambda: torch.ones(2, 5),
         "double": lambda: torch.ones(2, 3, dtype=torch.float64), "turned": lambda: torch.ones(3, 2).t(),
         "trained": lambda: torch.ones(2, 3, requires_grad=True), "flat": lambda: torch.ones(6)}


def versions(f, calls):
    compiled, found = tiny.compile(f, tiny.eager), []
    for args in calls:
        result = compiled(*args)
        found.append((result, sum(map(len, compiled.entries.values()))))
    return found


@behaviour("tiny-guard", points=4, name="one version for each kind of tensor", show=lambda kinds: f"{source_of('doubled')}\ncalled with "
                                                                                                  f"{kinds}",
           cases=lambda rng: [["plain", "another", "plain"], ["plain", "wide", "double", "plain"], rng.choices([*KINDS], k=9),
                              rng.sample([*KINDS], len(KINDS))])
def kinds_of_tensors(function, kinds):
    return versions(doubled, [[KINDS[kind]()] for kind in kinds])


@behaviour("tiny-guard", points=3, name="two names for one tensor",
           show=lambda same: f"{source_of('both')}\none tensor for a and b: {same}",
           cases=lambda rng: [[True, True], [False, False], [True, False, True], [False, True, False]])
def two_names(function, same):
    a = torch.ones(2, 3)
    return versions(both, [[a, a if s else a.clone()] for s in same])


@behaviour("tiny-guard", points=2, name="one tensor is one input", show=lambda n: source_of("in_a_list"), cases=lambda rng: [0, 1, 2])
def one_input(function, case):
    a, b = torch.ones(2), torch.zeros(2)
    args = [([a, a], a), ([a, b], a), ([a, a], b)][case]
    return compiled_run(in_a_list, args, args)


# ---- tiny-inline -----------------------------------------------------------------------------------------

task("tiny-inline", title="Inline a call", minutes=15, about="""\
While tiny traces, a call of a Python function is not executed: the machine goes into it, so that everything it reads is guarded,
too. `m.frames` is the list of frames, the innermost last, and the machine always executes the next instruction of the last one.
`first_frame(function, args, kwargs, m.outside)` makes a frame, in which the defaults of the function are guarded like everything that
is read from outside, and `supported(code)` tells whether the machine knows all instructions of a code object.""",
     hints=[
    "What would be missed if the function were simply called, with fakes?",
    "Nothing has to be executed here. The result of the call comes later: the instruction that returns pushes it.",
    "Two things happen: a function that the machine could not execute is refused, and a frame for the others becomes the innermost one."],
     demo='''
factor = 3


def scaled(x, power=2):
    return x ** power * factor


def f(x):
    return scaled(x) + scaled(x + 1, power=3)


compiled = compile(f, backend=eager)
print(compiled(torch.ones(2)), "| graphs:", sum(map(len, compiled.entries.values())))
factor = 5
print(compiled(torch.ones(2)), "after factor has changed")
''')
factor = 2


def scaled(x, power=2, *more, offset=0):
    return x ** power * factor + sum(more) - offset


def calls_with_arguments(x):
    return scaled(x) + scaled(x, 3, 4, 5) - scaled(offset=2, x=x)


def recursive(x, n=3):
    return x if n == 0 else recursive(x + n, n - 1) * 2


def tries(x):
    try:
        return x / 2
    finally:
        x = None


def calls_what_is_not_known(x):
    return tries(x * 2) + 1


def noted(x, log):
    log.append("called")
    return x * 2


def calls_with_an_effect(x, log):
    return noted(x + 1, log) + noted(x, log)


def calls_one(x, g):
    return g(x) + 1


scalings = [lambda x, k=k: x * k for k in (2.0, 3.0)] + [lambda x, *, k=k: x * k for k in (2.0, 3.0)]
keep_sources(calls_with_arguments, recursive, calls_what_is_not_known, calls_with_an_effect, calls_one)


@behaviour("tiny-inline", points=3, name="one graph for several functions", cases=lambda rng: ["recursive", "calls_with_arguments"],
           show=source_of)
def inlined(function, name):
    return compiled_run(globals()[name], [x], [x + 1])


@behaviour("tiny-inline", points=3, name="what an inlined function reads is guarded",
           show=lambda n: f"{source_of('calls_with_arguments')}\n"
           f"with the global factor {n} at the second call", cases=lambda rng: [3, 7])
def read_inside(function, other):
    global factor
    factor, compiled = 2, tiny.compile(calls_with_arguments, tiny.eager)
    first, factor = compiled(x), other
    return first, compiled(x), sum(map(len, compiled.entries.values()))


@behaviour("tiny-inline", points=2, name="defaults are guarded", cases=lambda rng: [[0, 1, 0], [2, 3, 2]],
           show=lambda order: f"{source_of('calls_one')}\nwith g in turn two functions of one text, "
                              f"`lambda x, {'*, ' * (2 in order)}k=k: x * k`, whose defaults are 2.0 and 3.0")
def defaults_inside(function, order):
    compiled = tiny.compile(calls_one, tiny.eager)
    return [compiled(x, scalings[k]) for k in order], [len(known) for known in compiled.entries.values()]


@behaviour("tiny-inline", points=3, name="effects happen at every call, and what is not supported breaks", show=source_of,
           cases=lambda rng: ["calls_with_an_effect", "calls_what_is_not_known"])
def effects(function, name):
    log = []
    args = [x, log] if name == "calls_with_an_effect" else [x]
    return compiled_run(globals()[name], args, args), log


# ---- tiny-break ------------------------------------------------------------------------------------------

task("tiny-break", title="Go on after a break", minutes=30, about="""\
This is what happens when a compiled function is called. The machine `m` holds the function's frame. `find(compiled, m.frames)`
looks for compiled code whose guards hold, or compiles some; it returns None where there are too many versions. A call of that code,
without arguments, returns (frames, result): no frames if the function has ended, else the frames just before the instruction that could
not be compiled: execute exactly that one with `step(m)`, on real values, and look for compiled code again. Where `find` has given None,
execute the rest with `step` alone, without asking `find` again: no further state is compiled.""",
     hints=[
    "Who executes the instruction that broke? And how often must it be executed?",
    "After the code has run, execute exactly one instruction. Where are you then? In a state like the one at the beginning.",
    "One loop, as long as there are frames. If there is code, it gives new frames and a result, and one instruction follows if frames "
    "are left. If there is none, instructions follow until no frames are left, without asking again."],
     demo='''
history = []


def training_loss(x, w):
    y = torch.tanh(x @ w)
    loss = y.square().mean()
    history.append(loss.item())
    return loss * 2, y


compiled = compile(training_loss, backend=eager)
for _ in range(3):
    compiled(torch.randn(4, 4), torch.randn(4, 4))
print("breaks:", compiled.breaks)
print("calls noted:", len(history), "| versions for each state:", [len(known) for known in compiled.entries.values()])
''')


def whole(x, log):
    return x * 2 + 1


def noting(x, log):
    y = x.exp()
    log.append(float(y.sum()))
    z = y * 2
    log.append("second")
    return z - y


def rounds_with_breaks(x, log):
    for k in range(3):
        x = x * 2 + k
        log.append(k)
    return x


def branching(x, log):
    y = x * 3
    return y + 1 if y.sum() > 0 else y - 1


def many_numbers(x, log):
    log.append(len(log))
    return x * log[-1]


keep_sources(whole, noting, rounds_with_breaks, branching, many_numbers)


def executed(name, calls):
    log, graphs = [], []

    def keep(recorder, outputs):
        graphs.append(graph_text(tiny.finish(recorder, outputs)))
        return tiny.eager(recorder, outputs)
    compiled = tiny.compile(globals()[name], keep)
    return [compiled(x * sign, log) for sign in calls], log, graphs, sorted(map(len, compiled.entries.values()))


for _points, _name, _functions, _calls in (
        (2, "no break", ["whole"], [1, 1]), (4, "breaks at calls and in loops", ["noting", "rounds_with_breaks"], [1, 1, -1]),
        (2, "both sides of a branch", ["branching"], [1, -1, 1]), (2, "too many versions", ["many_numbers"], [1] * 11)):
    @behaviour("tiny-break", points=_points, name=_name, cases=lambda rng, names=_functions, calls=_calls: [(n, calls) for n in names],
               show=lambda case: f"{source_of(case)}\n{len(case[1])} calls")
    def states(function, case):
        return executed(*case)


# ---- tiny-joint ------------------------------------------------------------------------------------------

task("tiny-joint", title="Ask autograd", minutes=30, about="""\
The fakes of a recording are tensors to autograd, so it has noted how each was made. If it is asked for gradients while the recorder
is active (`with recorder:`), the operators of the backward pass are recorded, too. `recorder.input(like, requires_grad=False)`
makes one more input. `recorder.inputs` are the nodes of the inputs, and `node.fake` their fakes. `finish(recorder, outputs)` is the
graph of some fakes, or None for an output that does not exist. `Joint(graph, tangents, outputs)` holds the graph, how many inputs
are tangents, and how many outputs are those of forward. The engine has to run in this thread:
`torch.autograd.set_multithreading_enabled(False)`.""",
     hints=[
    "The gradient of an output is not known while compiling. What is it in the graph?",
    "torch.autograd.grad(outputs, inputs, grad_outputs) is all that is needed. Which outputs and inputs may it be asked about?",
    "Ask about the outputs that require a gradient, with respect to the inputs that do; some input may have had no influence "
    "(allow_unused). Tangents are new inputs, like those outputs, made while the recorder is active. If there is nothing to ask about, "
    "the graph is forward alone. Gradients come after the outputs."],
     demo='''
with Recorder() as recorder:
    y = torch.tanh(recorder.input(torch.ones(2, 3)) @ recorder.input(torch.ones(3, 3, requires_grad=True)))
print(joint_graph(recorder, [y]).graph)
''')


def product(a, b, c):
    return [torch.tanh(a @ b)]


def several(a, b, c):
    return [a * b, (a + c).sum(1), b > 0]


def not_all(a, b, c):
    return [F.gelu(a).sum(), b.exp()]


def no_gradient(a, b, c):
    return [a.detach() * 2, b.argmax(1)]


keep_sources(product, several, not_all, no_gradient)


def joint_of(name, wanted):
    g = torch.Generator().manual_seed(3)
    inputs = [torch.randn(3, 3, generator=g).requires_grad_(w) for w in wanted]
    with tiny.Recorder() as recorder:
        outputs = globals()[name](*[recorder.input(t) for t in inputs])
    return tiny.joint_graph(recorder, outputs), inputs, g


for _points, _name, _functions in ((4, "gradients of one output", ["product"]), (3, "several outputs", ["several", "not_all"]),
                                   (2, "nothing to differentiate", ["no_gradient"])):
    @behaviour("tiny-joint", points=_points, name=_name, tolerance=1e-5, show=lambda case: f"{source_of(case)}\nrequires_grad of a, b, c: "
                                                                                           f"{case[1]}",
               cases=lambda rng, names=_functions: [(n, w) for n in names for w in ((True, True, True), (True, False, False), (False, True,
                                                            True))])
    def joints(function, case):
        joint, inputs, g = joint_of(*case)
        like = [n.fake for n in joint.graph.inputs[len(inputs):]]
        with torch.no_grad():
            results = tiny.interpret(joint.graph, [*inputs, *[torch.randn(t.shape, generator=g) for t in like]])
        return {"tangents": joint.tangents, "outputs": joint.outputs, "inputs": len(joint.graph.inputs), "results": results}


# ---- tiny-rule -------------------------------------------------------------------------------------------

task("tiny-rule", title="A rule for softmax", minutes=15, about="""\
Part 6 writes an operator as several simpler ones. softmax(x) divides exp(x) by the sum of exp(x) over one dimension. Write the
rule, in ordinary PyTorch, with operators that tiny can turn into loops: arithmetic, exp, `sum` and `amax`. exp(100) is infinite in
float32, and the softmax of (100, 101) is not.""",
     hints=[
    "What happens to the result if the same number is subtracted from all elements of a row?",
    "Subtract the largest element of each row. Every exponential is then at most 1, and one of them is 1.",
    "Three steps: shift, exponential, division. Maximum and sum have to keep their dimension, or they do not broadcast along the rows."],
     demo='''
graph = decompose(record(lambda x: torch.softmax(x, -1), torch.randn(4, 8)))
print(graph)
steps, _ = fused(graph)
print("kernels:", len(steps))
''')


def matrices(scale):
    return lambda rng: [(torch.randn(shape, generator=seeded(rng)) * scale, dim) for shape, dim in (((3, 4), -1), ((3, 4), 0), ((2, 3, 5),
                                                            1))]


for _points, _name, _scale in ((3, "rows and columns", 1.0), (3, "large numbers, far apart", 300.0)):
    @behaviour("tiny-rule", points=_points, name=_name, cases=matrices(_scale), tolerance=1e-5,
               show=lambda case: f"{case[0].tolist()}, dim {case[1]}")
    def soft(function, case):
        return function(case[0], case[1], False)


@behaviour("tiny-rule", points=3, name="one kernel", cases=lambda rng: [(6, 4), (3, 16)], show=lambda shape: f"softmax(x, -1) of "
                                                                                                             f"{list(shape)}")
def one_kernel(function, shape):
    graph = tiny.decompose(tiny.record(lambda x: torch.softmax(x, -1), torch.randn(shape)))
    calls = [str(n.target) for n in graph.nodes if n.target and tiny.packet(n) not in {*tiny.POINTWISE, *tiny.VIEWS, *tiny.REDUCTIONS}]
    return {"calls of PyTorch's kernels": calls, "kernels": len(tiny.fused(graph)[0]),
            "result": [list(n.fake.shape) for n in graph.outputs]}


# ---- tiny-cut --------------------------------------------------------------------------------------------

task("tiny-cut", title="A minimum cut", minutes=45, about="""\
What is kept for the backward pass is a minimum cut of a network of pipes: `capacity[a][b]` is how much water can flow from a to b.
The cheapest set of pipes that separates the source from the sink carries just as much as the largest flow. Find the nodes that are
still reached from the source when the largest flow runs. You may change `capacity`.""",
     hints=["Push water along some path with room in all its pipes. What is left of the network afterwards?",
            "An unlucky path may block a better flow. So water that flows from a to b gives room for a flow back from b to a: a later "
            "path may send it "
            "elsewhere.",
            "Search from the source, breadth first, over pipes with room > 0, and remember from where each node was reached. If the sink "
            "was not "
            "reached, return the nodes that were. Else walk back along the path, take its smallest room, subtract it forwards and add it "
            "backwards "
            "(capacity[b][a] may not exist yet); repeat."],
     demo='''
with Recorder() as recorder:
    y = spelled_gelu(recorder.input(torch.randn(64, 32)) @ recorder.input(torch.randn(32, 32, requires_grad=True)))
joint = joint_graph(recorder, [y])
forward, backward = partition(joint._replace(graph=decompose(joint.graph)))
print("saved for the backward pass of x @ w and a GELU:", [f"{n}: {shown(n.fake)}" for n in backward.inputs])
''')


def networks(nodes, pipes):
    def cases(rng):
        found = []
        for _ in range(12):
            names = ["s", *[f"n{k}" for k in range(rng.randrange(1, nodes))], "t"]
            capacity = {n: {} for n in names}
            for _ in range(rng.randrange(2, pipes)):
                a, b = rng.sample(range(len(names)), 2)
                if names[a] != "t" and names[b] != "s":
                    capacity[names[a]][names[b]] = rng.randrange(0, 9)
            found.append(capacity)
        return found
    return cases


for _points, _name, _cases in (
        (2, "one path, two paths", lambda rng: [{"s": {"a": 3}, "a": {"t": 2}, "t": {}}, {"s": {"a": 2, "b": 3}, "a": {"t": 4},
                                                            "b": {"t": 1}, "t": {}},
                                                {"s": {}, "t": {}}]),
        (3, "a path that has to be taken back", lambda rng: [{"s": {"a": k, "b": k}, "a": {"b": k, "t": k}, "b": {"t": k},
                                                            "t": {}} for k in (1, 2, 5)]
         + [{"s": {"a": 1, "b": 1}, "a": {"c": 1, "d": 1}, "b": {"c": 1}, "c": {"t": 1}, "d": {"e": 1}, "e": {"t": 1}, "t": {}},
            {"s": {"c": 1, "a": 7}, "a": {"b": 6}, "b": {"c": 3, "t": 4}, "c": {"b": 2, "d": 4}, "d": {"t": 1}, "t": {}},
            {"s": {"d": 6, "b": 4}, "a": {"t": 6}, "b": {"c": 7}, "c": {"t": 1}, "d": {"c": 8, "a": 7}, "t": {}}]),
        (4, "random networks", networks(7, 22))):
    @behaviour("tiny-cut", points=_points, name=_name, cases=_cases, show=str)
    def cuts(function, capacity):
        copy = collections.defaultdict(dict, {a: dict(rooms) for a, rooms in capacity.items()})
        return sorted(function(copy, "s", "t"))


# ---- tiny-halves -----------------------------------------------------------------------------------------

task("tiny-halves", title="Cut the joint graph in two", minutes=30, about="""\
The joint graph of forward and backward has to become two, since the loss is only known in between. `joint.graph.inputs` are the
inputs of the function, and then `joint.tangents` tangents; `joint.graph.outputs` are `joint.outputs` outputs of the function, and
then gradients. `operands(node)` are the nodes that a node uses, `part(graph, inputs, outputs)` is the graph that leads from some
nodes to others, and `to_save(graph, forward)` chooses which of the nodes `forward` are saved.""",
     hints=[
    "Which nodes can be computed before the tangents are known?",
    "Everything that uses a tangent, or uses what uses one, belongs to backward. The nodes are in order, so one walk finds them all.",
    "A set that begins with the tangents grows in one walk. The rest of the nodes, as far as they follow from the inputs (`part` "
    "tells), is what `to_save` chooses from. Then two parts: what is saved stands at the end of the first one's outputs and at the "
    "beginning of the second one's inputs."],
     demo='''
with Recorder() as recorder:
    x, w = recorder.input(torch.randn(4, 4)), recorder.input(torch.randn(4, 4, requires_grad=True))
    outputs = [torch.exp(torch.sin(x @ w))]
forward, backward = partition(joint_graph(recorder, outputs))
print("forward:", forward, sep="\\n")
print("\\nbackward:", backward, sep="\\n")
''')


def wave(a, b, c):
    return [torch.exp(torch.sin(a @ b))]


def normalised(a, b, c):
    return [F.layer_norm(a + c, (3,)) @ b, (c * 2).relu()]


keep_sources(wave, normalised)


@behaviour("tiny-halves", points=5, name="both halves compute what the joint graph computes", tolerance=1e-5,
           show=lambda case: f"{source_of(case)}\nrequires_grad of a, b, c: {case[1]}",
           cases=lambda rng: [(n, w) for n in ("wave", "normalised", "several") for w in ((True, True, True), (False, True, False))])
def halves(function, case):
    joint, inputs, g = joint_of(*case)
    joint = joint._replace(graph=tiny.decompose(joint.graph))
    forward, backward = function(joint)
    with torch.no_grad():
        results = tiny.interpret(forward, inputs)
        tangents = [torch.randn(n.fake.shape, generator=g) for n in joint.graph.inputs[len(inputs):]]
        gradients = tiny.interpret(backward, [*results[joint.outputs:], *tangents])
    return {"outputs": results[:joint.outputs], "gradients": gradients}


@behaviour("tiny-halves", points=4, name="what is saved, and what is computed again",
           show=lambda case: f"{source_of(case)}\nrequires_grad of a, b, c: {case[1]}",
           cases=lambda rng: [("wave", (True, True, True)), ("wave", (False, True, False)), ("normalised", (True, True, True))])
def saved(function, case):
    joint, inputs, g = joint_of(*case)
    forward, backward = function(joint._replace(graph=tiny.decompose(joint.graph)))
    kept = sorted((list(n.fake.shape), n in forward.inputs) for n in backward.inputs[:len(backward.inputs) - joint.tangents])
    return {"saved: shape, and whether it is an input": kept, "products in forward": products(forward),
            "products in backward": products(backward),
            "inputs of forward": len(forward.inputs), "tangents last": [n.target is None for n in backward.inputs[-joint.tangents:]]}


def products(graph):
    return sum(tiny.packet(n) is torch.ops.aten.mm for n in graph.nodes if n not in graph.inputs)


# ---- tiny-view -------------------------------------------------------------------------------------------

task("tiny-view", title="Where does a view lie?", minutes=35, about="""\
A kernel runs over rows `r` and columns `c`. Write the text of the position in memory at which it reads a view: a sum like "12 + 6 *
r + c". `seen` is a meta tensor, so its strides and its `storage_offset()` are there. `digits(seen, rows, columns)` splits it into
digits (variable "r" or "c", how many values of the variable are one step, how many steps the digit has, stride), the last dimension
first: the digit of a clock's hours is ("r", 60, 24, stride). Two texts for the same positions have to be equal, since fusion
compares them.""",
     hints=[
    "How do you get the hours out of a number of minutes, and how the minutes of the hour?",
    "A digit is variable // inner % count. When is the division not needed, and when the remainder? An expanded dimension has stride 0.",
    "One term for each digit with a stride: divided if one step is several values of the variable, with a remainder unless the digit is "
    "the variable's highest one (inner times count is all that the variable has), times the stride. Leave out whatever changes nothing. "
    "The offset is a term as well, and there may be no term at all."],
     demo='''
views = {"as it is": lambda x: x, "turned": lambda x: x.t(), "a part": lambda x: x[1:, 2:], "a row for all": lambda x: x[:1].expand(6, 8)}
for what, view in views.items():
    seen = view(torch.empty(6, 8, device="meta"))
    print(f"{what:14} {str(tuple(seen.shape)):8} strides {str(seen.stride()):8}  {position(seen, seen.shape[0])}")
''')
VIEWS = {
    "t": lambda t: t, "t.t()": lambda t: t.t(), "t[1:3, ::2]": lambda t: t[1:3, ::2], "t.reshape(3, 8)": lambda t: t.reshape(3, 8),
    "t[2]": lambda t: t[2], "t[:, 3:4].expand(4, 9)": lambda t: t[:, 3:4].expand(4, 9), "t[1:2].expand(4, 6)": lambda t: t[1:2].expand(4,
                                                            6),
    "t.flatten()": lambda t: t.flatten(), "t[1, 2]": lambda t: t[1, 2], "t.reshape(2, 2, 6).permute(2, 0, 1)": lambda t: t.reshape(2, 2,
                                                            6).permute(2, 0, 1),
    "t.reshape(2, 2, 2, 3).permute(3, 1, 0, 2)": lambda t: t.reshape(2, 2, 2, 3).permute(3, 1, 0, 2), "t[None, :, None]": lambda t: t[None,
                                                            :, None],
    "t[None].expand(5, 4, 6)": lambda t: t[None].expand(5, 4, 6), "t.t().t()": lambda t: t.t().t(),
         "t.view(8, 3)[::2]": lambda t: t.view(8, 3)[::2], "t[0, 0]": lambda t: t[0, 0],
         "t[:1, :1].expand(4, 6)": lambda t: t[:1, :1].expand(4, 6)}


def meta_view(name):
    return VIEWS[name](torch.empty(4, 6, device="meta"))


def visited(text, rows, columns):
    """The positions that a text names, iteration by iteration."""
    return None if text is None else [eval(text, {}, {"r": r, "c": c}) for r in range(rows) for c in range(columns)]


for _points, _name, _views in ((3, "whole matrices", ["t", "t.t()", "t.flatten()", "t.reshape(3, 8)"]),
                               (3, "parts and repetitions", ["t[2]", "t[1:3, ::2]", "t[:, 3:4].expand(4, 9)", "t[1:2].expand(4, 6)",
                                                            "t[1, 2]", "t[0, 0]", "t[:1, :1].expand(4, 6)"]),
                               (3, "several dimensions, all divisions into rows", [*VIEWS])):
    @behaviour("tiny-view", points=_points, name=_name, cases=lambda rng, views=_views: views,
               show=lambda name: f"{name}, t contiguous [4, 6]")
    def places(function, name):
        seen = meta_view(name)
        return {rows: visited(function(seen, rows), rows, seen.numel() // rows) for rows in range(1,
                                                            seen.numel() + 1) if seen.numel() % rows == 0}


@behaviour("tiny-view", points=2, name="equal positions have equal texts", cases=lambda rng: [4, 24, 1],
           show=lambda rows: f"the views of t with 24 "
           f"elements, in {rows} rows: for each the first with the same text")
def same_texts(function, rows):
    texts = {name: function(meta_view(name), rows) for name in VIEWS if meta_view(name).numel() == 24}
    return {name: next(other for other in texts if texts[other] == text) for name, text in texts.items()}


# ---- tiny-legal ------------------------------------------------------------------------------------------

task("tiny-legal", title="May these two be one kernel?", minutes=40, about="""\
Two kernels become one if each iteration of the second needs only what the same iteration of the first has made. `first.loops` and
`second.loops` are their loops. `nest(loops)` is (rows, columns) over which all of them can run, or None. Each loop writes the
buffer of `loop.node`, at `written(loop, rows)`; each of its `loop.operands` that is a `Read` reads the buffer of `x.node` at
`position(x.seen, rows)`, a text, or None if that position cannot be told.""",
     hints=[
    "If iteration 5 of the second loop reads what iteration 7 of the first one makes, what is in memory at that time?",
    "All loops together need a nest. Then look at each read of a value that one of these loops makes: where is it made, and where is it "
    "read?",
    "A table: the value of each loop, and where it is written. Then all reads of all loops: one whose position cannot be told is a "
    "refusal, and one of a value in the table at another position than there, too."],
     demo='''
for what, f in {"softmax": lambda x: torch.softmax(x, -1), "a matrix and its transpose": lambda x: x.exp() + x.exp().t()}.items():
    steps, _ = fused(decompose(record(f, torch.randn(4, 4))), refused := [])
    print(f"{what}: {len(steps)} kernels", *[reason for _, _, reason in refused], sep="\\n    ")
''')


def turned(x):
    return x.exp() + x.exp().t()


def rows_sum(x):
    return x * 2 + (x * 2).sum(-1)


def soft_rows(x):
    return torch.softmax(x * 2, -1).sum(-1)


def shifted(x):
    y = x.exp()
    return y[1:] + y[:-1]


def other_rows(x):
    return x.sum(-1), x.view(8, 2).sum(-1)


def normed(x):
    return F.layer_norm(x.sin() + x, (4,)) * x[0]


keep_sources(turned, rows_sum, soft_rows, shifted, other_rows, normed)
LEGAL = ["turned", "rows_sum", "soft_rows", "shifted", "other_rows", "normed"]


def alone(name):
    """The kernels of a program before fusion."""
    lowered, _ = tiny.lower(tiny.decompose(tiny.record(globals()[name], torch.randn(4, 4))))
    return [tiny.kernel([loop]) for loop in lowered if isinstance(loop, tiny.Loop)]


@behaviour("tiny-legal", points=6, name="every pair of kernels", cases=lambda rng: LEGAL, show=source_of)
def pairs(function, name):
    kernels = alone(name)
    verdicts = {f"{a.loops[0].node} and {b.loops[0].node}": function(a, b) for n, a in enumerate(kernels) for b in kernels[n + 1:]}
    return {pair: "refused" if type(v) is str and v else v for pair, v in verdicts.items()}


@behaviour("tiny-legal", points=3, name="what is fused in the end", cases=lambda rng: LEGAL, show=source_of)
def groups(function, name):
    steps, _ = tiny.fused(tiny.decompose(tiny.record(globals()[name], torch.randn(4, 4))))
    return [sorted(str(loop.node) for loop in s.loops) for s in steps]


# ---- tiny-order ------------------------------------------------------------------------------------------

task("tiny-order", title="Where does the fused kernel go?", minutes=35, about="""\
Two kernels become one, and what stood between them has to go before it or after it. `steps` is the list in which they run; each
step has sets `reads` and `writes` of nodes. `kernel(loops)` makes a step of loops: those of the earlier one first. a and b may come
in any order.""",
     hints=[
    "What must not stand before the fused kernel? What must not stand after it?",
    "What needs a, or needs something that needs a, goes after it. Everything else between can stay before. And if b needs something of "
    "the first group?",
    "See which of a and b comes first. Walk over the steps between with a set of late values, at first those of the earlier kernel: a "
    "step that reads one of them goes after, and what it writes is late, too. If the later kernel reads something late that the earlier "
    "one has not made itself, there is no order."],
     demo='''
def f(x, w):
    y = x.exp()
    z = (y @ w).sin()
    return y + 1, z


steps, _ = fused(decompose(record(f, torch.randn(4, 4), torch.randn(4, 4))))
for s in steps:
    print("call  " if s.call else "kernel", [str(loop.node) for loop in s.loops] or s.call)
''')


def made_steps(case):
    """case: a list of (name, the names that it reads), and which two are to be one. Steps with one loop each."""
    rows, *pair = case
    nodes = {name: tiny.Node(name, None, (), {}, torch.empty(4)) for name, _ in rows}
    steps = [tiny.kernel([tiny.Loop(nodes[name], "", [tiny.Read(nodes[n], None) for n in reads], 4)]) for name, reads in rows]
    return steps, steps[pair[0]], steps[pair[1]]


def random_orders(count, uses):
    def cases(rng):
        found = []
        for _ in range(14):
            names = [f"n{k}" for k in range(rng.randrange(3, count))]
            rows = [(name, rng.sample(names[:k], min(k, rng.randrange(uses)))) for k, name in enumerate(names)]
            found.append((rows, *rng.sample(range(len(rows)), 2)))
        return found
    return cases


def order_text(case):
    rows, a, b = case
    return "; ".join(f"{name} reads {', '.join(reads) or 'nothing'}" for name, reads in rows) + f"; fuse {rows[a][0]} and {rows[b][0]}"


def right_order(case, got, expected):
    """None if the order is possible; several may be."""
    rows, *pair = case
    steps, unchanged = got if type(got) is tuple and len(got) == 2 else (0, None)
    if unchanged != [name for name, _ in rows]:
        return "the list that was given has changed"
    if (steps is None) != (expected[0] is None):
        return "there is no such order" if steps is not None else "there is an order"
    if steps is None:
        return None
    if sorted(n for s in steps for n in s) != sorted(name for name, _ in rows) or [rows[k][0] for k in sorted(pair)] not in steps:
        return f"these are not the steps, with {' and '.join(rows[k][0] for k in sorted(pair))} as one, in this order: {steps}"
    place = {n: k for k, s in enumerate(steps) for n in s}
    late = [f"{name} needs {n}" for name, reads in rows for n in reads if place[n] > place[name]]
    return f"in the order {steps}, {late[0]}, which comes later" if late else None


for _points, _name, _cases in ((2, "neighbours", lambda rng: [([("a", []), ("b", ["a"])], 0, 1), ([("a", []), ("b", []), ("c", ["a"])], 0,
                                                            1),
                                                             ([("a", []), ("b", ["a"])], 1, 0)]),
                               (3, "something between", lambda rng: [([("a", []), ("m", r), ("b", s)], 0, 2) for r in ([], ["a"])
                                                                    for s in (["a"], ["m"], ["a", "m"], [])]),
                               (4, "random orders", random_orders(9, 3))):
    @behaviour("tiny-order", points=_points, name=_name, cases=_cases, show=order_text, check=right_order)
    def orders(function, case):
        steps, a, b = made_steps(case)
        given = list(steps)
        after = function(given, a, b)
        return (None if after is None else [[str(loop.node) for loop in s.loops] for s in after],
                [str(s.loops[0].node) for s in given if len(s.loops) == 1])


# ---- tiny-triton -----------------------------------------------------------------------------------------

task("tiny-triton", title="A fused reduction in Triton", minutes=50, seconds=30.0, about="""\
Write the lines of Triton for one loop of a fused kernel. Its program works on a block of rows and columns. There are already the
variables `r` (a column of row numbers), `c` (a row of column numbers), and `row` and `column` (which of them exist).
`triton_value(draft, x)` is the text of an operand; it may append a load. `loop.text` is a formula with holes for them, like
"exp({0})"; Triton calls the functions of `TRITON_NAMES` tl.exp and so on. If `loop.row` is not 0, the loop reduces each row with
`loop.text`, "sum" or "maximum": functions of two values in the kernel's file; NEUTRAL has the texts of their neutral elements.
tl.reduce(block, axis, function, keep_dims=True) reduces. `draft.pointers[node]` is the pointer of a stored node, `written(loop,
draft.rows)` the position. A loop of `aten._to_copy` has to convert to the dtype of its node.""",
     hints=[
    "Blocks are powers of two, rows mostly are not. What is in a block beyond the end of a row, and what would it do to a sum, or to a "
    "maximum of negative numbers?",
    "Before a reduction, tl.where(row & column, value, neutral) replaces what does not exist. With keep_dims the result is a block of "
    "one column.",
    "The right side is one of three: the formula with its operands (and tl. before Triton's functions), a conversion, or tl.reduce over "
    "what exists, with the neutral element elsewhere. Assign it to the register. A stored node also needs a tl.store at its position, "
    "under the mask of both; a position that only mentions rows has the shape of a column, and adding 0 * (r + c) makes it a block."],
     demo='''
import os
os.environ["TRITON_INTERPRET"] = "0" if torch.cuda.is_available() else "1"
device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(5, 6, device=device)
compiled = compile(lambda x: torch.softmax(x, -1), functools.partial(loops, target="cuda"))
print("softmax, by your kernel:", compiled(x), "by PyTorch:", torch.softmax(x, -1), sep="\\n")
print(*[text for text in LOADED if "tl.reduce" in text], sep="\\n")
''')


def activation(x):
    return F.gelu(x * 2) + 1, x > 0


def softmax_rows(x):
    return torch.softmax(x, -1)


def negative_maximum(x):
    return (x.abs() * -1 - 1).amax(-1), x.sum()


def layer_norm(x):
    return F.layer_norm(x, (5,)) * x


def converted(x):
    return (x > 0).to(torch.float32) * 3, torch.where(x > 1, x, -x).sum(-1), x.t() * 2


def counted(x):
    some = x.relu().to(torch.bool)
    return (x > 0).to(torch.float32) + (x > -1).to(torch.float32), some, torch.where(some, x, 7.0)


keep_sources(activation, softmax_rows, negative_maximum, layer_norm, converted, counted)
KERNEL_NODES = (ast.Assign, ast.Expr, ast.Call, ast.Name, ast.Attribute, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Constant, ast.keyword,
                ast.Tuple,
                ast.Subscript, ast.Slice, ast.operator, ast.unaryop, ast.cmpop, ast.expr_context, ast.FunctionDef, ast.arguments, ast.arg,
                ast.Module)


def only_a_kernel(text):
    """ValueError if a text does something else than a kernel of Triton does."""
    for node in ast.walk(ast.parse(text)):
        named = isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id in ("tl",
                                                            "triton") or node.attr == "to")
        if not isinstance(node, KERNEL_NODES) or named or isinstance(node, ast.Constant) and isinstance(node.value, str) or \
                isinstance(node, ast.Name) and node.id.startswith("__"):
            raise ValueError(f"a kernel has no {ast.unparse(node)}")


def kernel_steps(name):
    steps, views = tiny.fused(tiny.decompose(tiny.record(globals()[name], torch.randn(6, 5))))
    return [(s, {loop.node for loop in s.loops}) for s in steps if s.loops]


def kernel_texts(function, name):
    """For each kernel: its text, its buffers by name, and how many programs to start. Every node is stored."""
    found = []
    for s, nodes in kernel_steps(name):
        made = tiny.triton_kernel(s, nodes)
        only_a_kernel(made.text)
        found.append((made.text, [str(n) for n in made.buffers], made.blocks))
    return found


def run_kernels(name, texts):
    """What the kernels fill their buffers with, in Triton's interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    g, values, found = torch.Generator().manual_seed(1), {}, {}
    for (s, nodes), (text, names, blocks) in zip(kernel_steps(name), texts, strict=True):
        only_a_kernel(text)
        buffers = {str(n): n for n in [*nodes, *s.reads]}
        for n in sorted(names):
            fake = buffers[n].fake
            fresh = torch.zeros(fake.shape, dtype=fake.dtype) if buffers[n] in nodes else torch.randn(fake.shape,
                                                            generator=g).to(fake.dtype)
            values.setdefault(n, fresh)
        tiny.load_triton([tiny.Kernel(text, names, blocks)])
        tiny.LOADED[text](*[values[n] for n in names])
        found |= {n: values[n].clone() for n in names if buffers[n] in nodes}
    return found


for _points, _name, _programs in ((4, "arithmetic", ["activation", "converted", "counted"]), (6, "reductions of rows", ["negative_maximum",
                                                            "softmax_rows", "layer_norm"])):
    behaviour("tiny-triton", points=_points, name=_name, cases=lambda rng, programs=_programs: programs, show=source_of, tolerance=1e-5,
              then=run_kernels)(kernel_texts)


# ---- tiny-train ------------------------------------------------------------------------------------------

task("tiny-train", title="Train a GPT with your compiler", minutes=45, seconds=20.0, about="""\
Two compiled programs have to become one operation of autograd, so that `loss.backward()` runs the second one. Write it as a
torch.autograd.Function: its `forward(ctx, *inputs)` runs the forward program, keeps what is saved with `ctx.save_for_backward`, and
returns the tuple of the outputs; its `backward(ctx, *tangents)` gets one gradient for each output, and returns one for each input,
None where none is wanted. An output that is not differentiable has to be named with `ctx.mark_non_differentiable`. When this
passes, `python -m exercises run tiny-train` trains a GPT with your tiny, beside eager and the book's.""",
     hints=[
    "How many results does the forward program have, and which of them are for the caller?",
    "forward gives outputs and saved values in one list: len(differentiable) of them are outputs. backward gets a tangent for every "
    "output, also for those that have no gradient.",
    "forward: run, cut the list in two, keep the second piece, name the outputs without gradient. backward: leave out the tangents of "
    "those outputs, run, and deal the gradients out to the inputs that want one, None to the others. Inside of the class `forward` and "
    "`backward` are methods; the programs are found by the enclosing function's names."],
     demo="print('`python -m exercises run tiny-train` trains.')")


def hand_forward(a, b, c):
    y = torch.sin(a) * b
    return [y, torch.sign(y), a + c, torch.cos(a), y]


def hand_backward(cosine, y, gy, gsum):
    return [gy * cosine * 2 + gsum, gsum * 3]


@behaviour("tiny-train", points=4, name="one operation from two programs", tolerance=1e-6,
           cases=lambda rng: [rng.randrange(1000) for _ in range(3)],
           show=lambda seed: "outputs sin(a) * b, its sign, and a + c, of which the second is not differentiable; gradients of a and c")
def one_operation(function, seed):
    g = torch.Generator().manual_seed(seed)
    a, b, c = [torch.randn(3, generator=g).requires_grad_(w) for w in (True, False, True)]
    outputs = function(hand_forward, hand_backward, [True, False, True], [True, False, True])(a, b, c)
    (outputs[0] * 2 + outputs[2]).sum().backward()
    return {"outputs": [o.detach() for o in outputs], "require gradients": [o.requires_grad for o in outputs], "gradients": [a.grad,
                                                            b.grad, c.grad],
            "type": type(outputs).__name__}


def halves_interpreted(recorder, outputs):
    """A backend without kernels: both halves are run node by node."""
    inputs = list(recorder.inputs)
    joint = tiny.joint_graph(recorder, outputs)
    if not joint.tangents:
        return lambda *given: tiny.interpret(joint.graph, given)
    forward, backward = tiny.partition(joint._replace(graph=tiny.decompose(joint.graph)))
    return tiny.in_autograd(interpreted(forward), interpreted(backward), [t.requires_grad for t in outputs],
                            [n.fake.requires_grad for n in inputs])


def interpreted(graph):
    """What a compiled program is to autograd: nothing that it can differentiate."""
    return torch.no_grad()(lambda *given: tiny.interpret(graph, given))


@behaviour("tiny-train", points=6, name="a GPT trains", tolerance=1e-3, cases=lambda rng: [rng.randrange(1000)],
           show=lambda seed: "four steps of a GPT of one layer, both halves run operator by operator")
def trains(function, seed):
    torch.manual_seed(seed)
    model = tiny.GPT(layers=1, width=16, heads=2, length=8, letters=32)
    compiled, optimizer, losses = tiny.compile(model, halves_interpreted), torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(4):
        text = torch.randint(32, (4, 9))
        loss = compiled(text[:, :-1], text[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [round(float(p.grad.norm()), 3) for p in model.parameters()]
