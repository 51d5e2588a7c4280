"""Chapter 12: a training step as one graph: leaves, gradients, counters, and a history that is used up."""
import copy

import torch

from .. import behaviour, task
from .kit import SOURCES, graph_lines, keep_sources, program_file, questions


class Net(torch.nn.Module):
    """Five parameters; `frozen` requires no gradient."""
    def __init__(self):
        super().__init__()
        for k, name in enumerate("abc"):
            setattr(self, name, torch.nn.Parameter(torch.arange(4.0) + k))
        self.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        self.square = torch.nn.Parameter(torch.arange(9.0).reshape(3, 3))


def captured(program, *args, **settings):
    """(what the versions of `program` were captured as, what each call returned or why its graph breaks). args: one tuple a call."""
    import minicompile
    from minicompile import logs
    minicompile.reset()
    compiled, found, results = minicompile.compile(program, fullgraph=True, **{"backend": "eager", **settings}), [], []

    def look(kind, **data):
        if kind == "captured":
            found.append(data["captured"])
    logs.watchers.append(look)
    try:
        for given in args:
            try:
                results.append(compiled(*given))
            except minicompile.GraphBreakError as error:
                results.append(str(error).splitlines()[0].partition("breaks: ")[2])
    finally:
        logs.watchers.remove(look)
    return found, results


def names_of(found) -> list[list[str]]:
    """The inputs of each captured graph."""
    return [[n.name for n in c.gm.graph.nodes if n.op == "placeholder"] if c.gm is not None else [] for c in found]


def grads(net) -> dict:
    return {name: p.grad if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}


def source(case):
    return SOURCES[case.__name__]


# ---- find-leaves -----------------------------------------------------------------------------------------

task("find-leaves", title="Where backward() ends", minutes=30, about="""\
`loss.backward()` names no leaves: the engine finds them by walking the autograd graph. Capture has to know them beforehand, since they
are arguments of the `gradients` node. The fakes of the trace are tensors to autograd, so they have such a graph as well. `outputs` are
values of the trace, and `o.fake` is the fake of one. `tx.tensors.of_fake` is a dictionary from the id of a fake to its value; the trace
filled it in the order in which it met them. The leaves are to be returned in this order, because the order of the graph's arguments
should not depend on the shape of a graph that nobody sees. `history_of(fakes)` is the set of all nodes behind some fakes, and
`type(node).__name__` tells their kinds apart. A history that goes on outside of the trace ends in a node called EnterBackward. There say
`unsupported(tx, "backward() into a tensor that was computed before the compiled function was called")`: it raises. So it does, with a
sentence of yours, for a leaf that `tx.tensors.of_fake` does not have. (Leaves behind such an end are unknown as well. There it is the end
that has to be named.)""",
     hints=[
    "In which kind of node does an autograd graph end, and what does such a node hold? Which other end can it have, if a tensor came in "
    "that was computed outside?",
    "Ends of the first kind are called AccumulateGrad, and their `variable` is the leaf's fake.",
    "Collect the ids of what the AccumulateGrad nodes hold; an EnterBackward breaks the graph. Then take the values of "
    "tx.tensors.of_fake whose id was collected: that gives the order. What does it mean if there are fewer of them than ids?"])


def one_leaf(net, x):
    (net.a * x).sum().backward()


def used_twice(net, x):
    (torch.tanh(net.a * x) * net.a).sum().backward()


def unused_and_frozen(net, x):
    y = net.a * x * net.frozen
    z = net.b * 2
    y.sum().backward()
    return z.detach()


def met_in_another_order(net, x):
    c, b, a = net.c, net.b, net.a
    (a * x + (b + c)).sum().backward()


def made_inside(net, x):
    z = torch.zeros(4, requires_grad=True)
    (net.a * z + x).sum().backward()
    return z.grad


def detached(net, x):
    ((net.a * x).detach() * net.b).sum().backward()


def under_no_grad(net, x):
    with torch.no_grad():
        scale = net.a * 2
    (scale * net.c).sum().backward()


def two_roots(net, x):
    shared = net.a * x
    torch.autograd.backward([shared.sum(), (shared * net.b).sum()])


def a_view_on_the_way(net, x):
    (net.square.t()[0].exp() * net.c[:3]).sum().backward()


def history_outside(net, x):
    (net.a * x).sum().backward()


def some_history_outside(net, x):
    y = (net.b * 3).sum()
    (y + (x * net.a).sum()).backward()


def history_that_is_not_used(net, x):
    y = x * 2
    (net.a * 3).sum().backward()
    return y.detach()


LEAVES = (one_leaf, used_twice, unused_and_frozen, met_in_another_order, made_inside, detached, under_no_grad, two_roots, a_view_on_the_way)
OUTSIDE = (history_outside, some_history_outside, history_that_is_not_used)
keep_sources(*LEAVES, *OUTSIDE)


def leaves_found(function, program):
    net = Net()
    x = (torch.ones(4, requires_grad=True) * 2) if program in OUTSIDE else torch.ones(4)
    found, results = captured(program, (net, x))
    calls = [n for c in found for n in c.gm.graph.nodes if getattr(n.target, "__name__", "") == "gradients"]
    return {"leaves, in order": [[str(leaf) for leaf in n.args[1]] for n in calls], "what came back, or the reason": results, **grads(net)}


for _points, _name, _programs in ((3, "a leaf, and a leaf that is used twice", (one_leaf, used_twice, a_view_on_the_way)),
                                  (3, "only what the outputs came from", (unused_and_frozen, detached, under_no_grad)),
                                  (2, "the order of the trace", (met_in_another_order,)),
                                  (2, "leaves made inside, and several outputs", (made_inside, two_roots)),
                                  (2, "a history that goes on outside", OUTSIDE)):
    behaviour("find-leaves", points=_points, name=_name, cases=lambda rng, programs=_programs: list(programs), show=source)(leaves_found)


# ---- gradient-slot ---------------------------------------------------------------------------------------

task("gradient-slot", title="Assign or add", minutes=25, about="""\
`backward()` has computed a gradient for a leaf, and now it has to get into the leaf's `.grad`. While the program is captured nothing is
assigned for real. Instead the trace keeps, for each leaf, what its `.grad` is at this moment: `gradient_of(tx, leaf)` is that value (a
`Const` stands for None), and `set_gradient(tx, leaf, gradient)` changes it; the end of the compiled function assigns what has changed.
`emit(tx, name, [values])` adds the call of a tensor's method to the graph. Decide what the engine would do. With
`create_graph` the gradients can be differentiated, and then the engine overwrites nothing: the slot gets a new tensor, the sum. (Without
it, where the gradient that is there requires a gradient itself, or has another `fake.layout`, the graph breaks:
`unsupported(tx, reason)`.)""",
     hints=[
    "Call backward() twice in eager, and hold on to the first gradient. What has become of it?",
    "There are three cases. In one the leaf has no gradient. In another somebody may hold the tensor that is there, and expects to see "
    "the sum in it.",
    "In the first case the slot is set; with `create_graph` it is set to a sum, `add`. Otherwise the graph changes the tensor that is "
    "there, in place: does the slot have to be set then? Before this stand the reasons for `unsupported`."])


def first_gradient(net, x):
    net.zero_grad()
    (net.a * x).sum().backward()


def second_gradient(net, x):
    (net.a * x).sum().backward()
    (net.a * net.b).sum().backward()


def after_none(net, x):
    (net.a * x).sum().backward()
    net.a.grad = None
    (net.a * 3).sum().backward()


def ten_parts(net, x):
    net.zero_grad()
    for k in range(4):
        (net.a * x * k + net.c).sum().backward()


def looks_between(net, x):
    (net.a * x).sum().backward()
    first = net.a.grad * 1
    (net.a * 2).sum().backward()
    return first, net.a.grad * 1


def given_by_hand(net, x):
    net.b.grad = x * 5
    (net.a * net.b).sum().backward()


def with_history(net, x):
    net.zero_grad()
    (net.a.square() * x).sum().backward(create_graph=True)
    first = net.a.grad
    (net.a ** 3).sum().backward(create_graph=True)
    return first * 1, net.a.grad * 1


def zeros_kept(net, x):
    net.zero_grad(set_to_none=False)
    (net.a * x).sum().backward()


SLOTS = (first_gradient, second_gradient, after_none, ten_parts, looks_between, given_by_hand, with_history, zeros_kept)
keep_sources(*SLOTS)


def slot(function, program):
    net, x = Net(), torch.tensor([1.0, 2.0, 3.0, 4.0])
    found, results, kept = [], [], []
    for call in range(2):
        more, result = captured(program, (net, x))
        found, results = found + more, results + result
        kept.append(net.a.grad)
    lines = [{k: v for k, v in graph_lines(c.gm).items() if "add" in v or "gradients" in v} for c in found]
    return {"what the graphs do to gradients": lines,
            "returned": results, **grads(net), "the tensor of the first call has become": kept[0] if kept[0] is None else kept[0].clone(),
            "one tensor in both calls": kept[0] is kept[1]}


for _points, _name, _programs in ((3, "an empty slot", (first_gradient, after_none)),
                                  (4, "a slot with a gradient", (second_gradient, zeros_kept)),
                                  (3, "what the program sees and writes", (looks_between, given_by_hand, ten_parts, with_history))):
    behaviour("gradient-slot", points=_points, name=_name, cases=lambda rng, programs=_programs: list(programs), tolerance=1e-6,
              show=source)(slot)


# ---- equal-counters --------------------------------------------------------------------------------------

task("equal-counters", title="A hundred counters, one number", minutes=25, function="counter", about="""\
An optimizer has a counter for each parameter, a tensor with one element on the CPU, and computes with its number. Capture reads the
number when the compiled function is called: it becomes a symbol, an input of the graph. `wrap_dynamic_number(tx, number, source)` makes
one for the number that is at `source`; the number in a tensor is read by calling its `item`, so its source is `CallSource(source,
"item")`. Counters that hold the same number share one symbol, and a guard will ask whether they still agree. The guard is written at the
end from `tx.symbols.counters`, a dictionary from a number to a pair: the symbol, and the list of the sources of all counters that
it stands for (the sources of the tensors, as they come in). Write the function: it returns the symbol.""",
     hints=[
    "What has to be there the first time that a number is seen, and what has to happen every time?",
    "The symbol is read from one of its counters, the first. The guard has to know all of them.",
    "Two steps. If this number is new, make its symbol, with an empty list. In any case the list gets the source."])


def adam_step(optimizer, net, x):
    optimizer.step()


def steps_of(change):
    """Three steps of Adam; `change(counters)` happens before the second. Returns what was captured, and the state."""
    net = Net()
    optimizer = torch.optim.Adam([net.a, net.b, net.c], lr=0.1)
    for p in (net.a, net.b, net.c):
        p.grad = torch.ones(4) * 0.5
    optimizer.step()
    counters = [optimizer.state[p]["step"] for p in (net.a, net.b, net.c)]
    found = []
    for call in range(3):
        if call == 1:
            change(counters)
        more, reasons = captured(adam_step, (optimizer, net, 0))
        found += [(c, None) for c in more] or [(None, reasons[0])]
    return found, net, counters


CHANGES = {
    "nothing is changed": lambda counters: None,
    "all of them": lambda counters: [c.add_(7) for c in counters],
    "one is ahead": lambda counters: counters[1].add_(1),
    "all are different": lambda counters: [c.add_(3 * k) for k, c in enumerate(counters)],
    "two groups": lambda counters: counters[2].add_(5),
    "half a step": lambda counters: counters[0].add_(0.5),
    "beyond what float32 can count": lambda counters: counters[0].fill_(2.0**24),
    "up to what float32 can count": lambda counters: [c.fill_(2.0**24 - 9) for c in counters],
}


def counters_shared(function, what):
    found, net, counters = steps_of(CHANGES[what])
    report = {}
    for call, (c, reason) in enumerate(found):
        if c is None:
            report[f"call {call}"] = reason
            continue
        inputs = [n.name for n in c.gm.graph.nodes if n.op == "placeholder"]
        report[f"call {call}: numbers that are inputs"] = [name for name in inputs if name.endswith("item")]
        report[f"call {call}: guards"] = [(g.kind, len(g.expected)) for g in c.guards if g.kind in ("COUNTERS", "SIZE")]
    return {**report, "counters": [float(c) for c in counters], "a": net.a.detach(), "b": net.b.detach()}


for _points, _name, _cases in ((3, "equal counters share", ["nothing is changed", "all of them"]),
                               (4, "different counters do not", ["one is ahead", "two groups", "all are different"]),
                               (3, "any number", ["half a step", "beyond what float32 can count", "up to what float32 can count"])):
    behaviour("equal-counters", points=_points, name=_name, cases=lambda rng, cases=_cases: cases, tolerance=1e-5,
              show=lambda what: f"three steps of Adam over three parameters; before the second: {what}")(counters_shared)


# ---- forget-gradients ------------------------------------------------------------------------------------

task("forget-gradients", title="Gradients that nobody will read", minutes=40, about="""\
A step that begins with `zero_grad()` frees the old gradients before it needs memory for anything else. In compiled code, effects happen
at the end, so without care the old gradients live until the new ones are there. Find the gradients that can be given up before the graph
runs. `ep.tx` is the trace. The keys of the dictionary `autograd(tx).gradients` are the leaves whose `.grad` the program has changed. If the
program has looked at what was there before, `autograd(tx).found[leaf]` is the trace's value for it, a `TensorVal` unless there was None.
The tensor is needed if a node of the graph reads it (`old.node.users`), if the graph returns it (`ep.outputs` is a list of nodes), or if
the text that was written already reads it, or something that is reached through it: `ep.names` are the values that this text reads,
`value.source` is where from, and `path_of(source)` gives the source, its base, and so on to the root. Return the line `PATH.grad = None`
for each of the others, where PATH is `source_text(ep, leaf.source)`. If the program has not looked, as in `zero_grad()`, nobody knows
whether there is a gradient, and nobody needs it: it gets a line as well, if the leaf came in (it has a `source`). What is given up must
not be an input of the graph any more: erase its node, and remove it from `tx.tensors.inputs`, a dictionary whose keys are the
placeholders.""",
     hints=[
    "Who could still want to see the old tensor after the program has let go of it? Think of a program that returns it, one that hands "
    "it to another parameter, and one that computes its norm.",
    "Collect two things in one loop: the lines, and the nodes to erase. The sources that are read: for value in ep.names, all of "
    "path_of(value.source). Two leaves may have had one gradient, so keep the nodes in a set.",
    "A gradient that the program has seen goes if four things hold: a value of the trace, read by no node, not returned, and not read "
    "by the text. One that it has not seen goes if the leaf came in. Both get a line, but only the first kind has a node. The node goes "
    "from the graph and from tx.tensors.inputs."])


def clears(net, x):
    net.zero_grad()
    (net.a * x * net.b).sum().backward()


def asks_and_clears(net, x):
    for p in net.parameters():
        if p.grad is not None:
            p.grad = None
    (net.a * x * net.b).sum().backward()


def clears_one(net, x):
    net.a.grad = None
    (net.a * x * net.b).sum().backward()


def clears_and_stops(net, x):
    net.zero_grad()
    return x * 2


def looks_at_the_norm(net, x):
    norm = net.a.grad.norm()
    net.zero_grad()
    (net.a * x).sum().backward()
    return norm


def adds(net, x):
    (net.a * x * net.b).sum().backward()


def returns_it(net, x):
    old, net.a.grad = net.a.grad, None
    (net.a * x).sum().backward()
    return old


def hands_it_over(net, x):
    net.b.grad, net.a.grad = net.a.grad, None
    (net.a * x).sum().backward()


def swaps(net, x):
    net.a.grad, net.b.grad = net.b.grad, net.a.grad
    return x + 1


def puts_it_away(net, x):
    kept = {"a": [net.a.grad]}
    net.zero_grad()
    (net.a * x).sum().backward()
    return kept


def returns_its_tag(net, x):
    tag = net.a.grad.tag
    net.zero_grad()
    (net.a * x).sum().backward()
    return tag


def one_gradient_for_two(net, x):
    for p in (net.a, net.b):
        if p.grad is not None:
            p.grad = None
    (net.a * x).sum().backward()


def keeps_one_of_two(net, x):
    net.a.grad = None
    (net.a * x).sum().backward()
    return net.b.grad


FORGETS = (clears, asks_and_clears, clears_one, clears_and_stops, looks_at_the_norm, adds, returns_it, hands_it_over, swaps, puts_it_away,
           returns_its_tag, one_gradient_for_two, keeps_one_of_two)
keep_sources(*FORGETS)


def forgotten(function, program):
    net, x = Net(), torch.tensor([1.0, 2.0, 3.0, 4.0])
    for k, p in enumerate((net.a, net.b, net.c), 1):
        p.grad = torch.ones(4) * 10 * k
    net.a.grad.tag = {"text": "of the program"}
    if program in (one_gradient_for_two, keeps_one_of_two):
        net.b.grad = net.a.grad
    alive, twin = [], copy.deepcopy(grads(net))

    def spying(gm, inputs):
        def run(*args):
            alive.append({name: p.grad is not None for name, p in net.named_parameters() if name in twin})
            return gm(*args)
        return run
    found, results = captured(program, (net, x), backend=spying)
    return {"lines": sorted(line for c in found for line in c.before.splitlines()), "inputs of the graph": names_of(found),
            "inputs that are given": [len(c.inputs) for c in found], "gradients that are there while it runs": alive, "returned": results,
            **grads(net)}


for _points, _name, _programs in ((3, "what the program clears", (clears, asks_and_clears, clears_and_stops)),
                                  (2, "only what it clears", (clears_one, adds)),
                                  (2, "what the graph reads", (looks_at_the_norm,)),
                                  (3, "what leaves the function", (returns_it, puts_it_away, returns_its_tag)),
                                  (2, "what another parameter gets", (hands_it_over, swaps)),
                                  (2, "one tensor, two parameters", (one_gradient_for_two, keeps_one_of_two))):
    behaviour("forget-gradients", points=_points, name=_name, cases=lambda rng, programs=_programs: list(programs), show=source)(forgotten)


# ---- predict-spent ---------------------------------------------------------------------------------------

SPENT = '''\
import torch
import torch.nn.functional as F


def the_loss(w, v, x):
    loss = torch.tanh(x @ w).square().sum()
    loss.backward()
    return loss


def kept_graph(w, v, x):
    loss = torch.tanh(x @ w).square().sum()
    loss.backward(retain_graph=True)
    return loss


def hidden(w, v, x):
    h = x @ w
    torch.tanh(h).sum().backward()
    return h


def another_branch(w, v, x):
    h = x @ w
    h.sum().backward()
    return torch.tanh(x @ v)


def on_top(w, v, x):
    h = torch.tanh(x @ w)
    h.sum().backward()
    return h * v.sum()


def only_sums(w, v, x):
    y = (w + v).sum()
    y.backward()
    return y


def out_of_reach(w, v, x):
    h = torch.tanh(x @ w)
    (h.detach() * v.sum()).sum().backward()
    return h


def by_grad(w, v, x):
    loss = (x @ w).square().sum()
    torch.autograd.grad(loss, w)
    return loss

'''
ENDS = ("the_loss", "kept_graph", "hidden", "another_branch", "on_top", "only_sums", "out_of_reach", "by_grad")

task("predict-spent", title="Used up", minutes=20, kind="predict", about="""\
w and v are leaves of sizes [3, 3] that require gradients, x is a tensor [4, 3] that does not. Each function is compiled, and has called a
backward pass when it returns. Does `result.sum().backward()` on what it returns raise an error? Answer True or False.""",
     starter=SPENT + questions(**{n.upper(): f"does {n}(w, v, x).sum().backward() raise?" for n in ENDS}),
     hints=["Which nodes of the autograd graph lie behind the result, and which of them has the backward pass gone through?",
            "A node that was gone through has lost what it had saved. Some have saved nothing: a sum knows a shape, an addition nothing.",
            "The product saves x for the gradient of w, tanh its result, square its operand. retain_graph frees nothing. What was reached "
            "by neither, or had saved nothing, can be differentiated again."])


def raises(name):
    import minicompile
    from minicompile.ch01_graphs.graph import history_of
    torch.manual_seed(1)
    w, v, x = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3, requires_grad=True), torch.randn(4, 3)
    space = program_file(SPENT)
    result = minicompile.compile(space[name], backend="eager", fullgraph=True)(w, v, x)
    behind = sorted(type(n).__name__ for n in history_of([space[name](w, v, x)]))
    try:
        result.sum().backward()
        answer, said = False, "no error"
    except RuntimeError as error:
        answer, said = True, str(error).partition(" (")[0]
    return answer, f"In eager the result has behind it: {', '.join(behind)}.\nThe compiled one: {said}."


for _name in ENDS:
    @behaviour("predict-spent", points=1 + (_name in ("hidden", "only_sums")), name=_name, answer=_name.upper())
    def _(name=_name):
        return raises(name)


# ---- predict-steps ---------------------------------------------------------------------------------------

STEPS = '''\
import torch

# Every program is compiled, and called six times with tensors x of the same size. `net` is torch.nn.Linear(3, 2). For each call that
# compiles there is one version more. (A graph break would raise.)


def descent(net, optimizer, x):
    optimizer.zero_grad()
    net(x).square().sum().backward()
    with torch.no_grad():
        for p in net.parameters():
            p -= 0.1 * p.grad


def looks_for_itself(net, optimizer, x):
    for p in net.parameters():
        if p.grad is not None:
            p.grad = None
    net(x).square().sum().backward()
    optimizer.step()


def with_adam(net, optimizer, x):
    optimizer.zero_grad()
    net(x).square().sum().backward()
    optimizer.step()


def with_adam_and_a_rate(net, optimizer, x):
    optimizer.zero_grad()
    net(x).square().sum().backward()
    optimizer.step()


def never_cleared(net, optimizer, x):
    net(x).square().sum().backward()


def cleared_at_the_end(net, optimizer, x):
    net(x).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def with_momentum(net, optimizer, x):
    optimizer.zero_grad()
    net(x).square().sum().backward()
    optimizer.step()


def with_momentum_and_dampening(net, optimizer, x):
    optimizer.zero_grad()
    net(x).square().sum().backward()
    optimizer.step()


def counts_the_state(net, optimizer, x):
    known = len(optimizer.state)
    optimizer.zero_grad()
    net(x).square().sum().backward()
    optimizer.step()
    return known


def every_second_call(net, optimizer, x):
    net(x).square().sum().backward()
    net.calls = not net.calls
    if net.calls:
        optimizer.zero_grad()

'''
RUNS = {
    "descent": "descent; before the first call no parameter has a gradient",
    "looks_for_itself": "looks_for_itself; optimizer = torch.optim.SGD(net.parameters(), lr=0.1); no gradients before the first call",
    "with_adam": "with_adam; optimizer = torch.optim.Adam(net.parameters(), lr=0.1); no gradients before the first call",
    "with_adam_and_a_rate": "with_adam_and_a_rate; Adam as above; before each call but the first, the learning rate of its group is "
                            "multiplied by 0.9",
    "never_cleared": "never_cleared; no gradients before the first call",
    "cleared_at_the_end": "cleared_at_the_end; SGD as above; no gradients before the first call",
    "with_momentum": "with_momentum; SGD with lr=0.1 and momentum=0.9; no gradients before the first call",
    "with_momentum_and_dampening": "with_momentum_and_dampening; the same with dampening=0.5; no gradients before the first call",
    "counts_the_state": "counts_the_state; SGD with lr=0.1 and momentum=0.9; no gradients before the first call",
    "every_second_call": "every_second_call; net.calls is True before the first call; no gradients"}

task("predict-steps", title="How many versions of a step?", minutes=25, kind="predict", about="""\
The first call of a training step is often not like the second: there is no gradient yet, and an optimizer has no state. How many versions
of each program are compiled in six calls?""",
     starter=STEPS + questions(**{name.upper(): f"versions of {text}" for name, text in RUNS.items()}),
     hints=["For each program: what does it look at that is different in the second call? In the third?",
            "`.grad` is looked at by a program that asks and by backward(), and None or not is a guard; zero_grad does not ask. The state "
            "of an optimizer is made before the first step is captured, if the program has not looked at it, and if there is a state "
            "with which the first step computes what the others do.",
            "A gradient that was None and is there later costs one version. With dampening the first step takes the gradient as it is, and "
            "later ones half of it: no buffer to begin with does both. What counts_the_state returns is different in the second call. "
            "MINICOMPILE_LOGS=recompiles says why each version is made."])


def versions(name):
    import minicompile
    from minicompile import logs
    minicompile.reset()
    torch.manual_seed(1)
    net, found, whys = torch.nn.Linear(3, 2), [], []
    net.calls = True
    options = {"momentum": 0.9} if "momentum" in name or name == "counts_the_state" else {}
    options |= {"dampening": 0.5} if "dampening" in name else {}
    optimizer = (torch.optim.Adam if "adam" in name else torch.optim.SGD)(net.parameters(), lr=0.1, **options)

    def look(kind, **data):
        if kind == "captured":
            found.append(data)
        if kind == "recompile":
            whys.append(data["why"].partition("  #")[0])
    compiled = minicompile.compile(program_file(STEPS)[name], backend="eager", fullgraph=True)
    logs.watchers.append(look)
    try:
        for call in range(6):
            if call and name == "with_adam_and_a_rate":
                optimizer.param_groups[0]["lr"] *= 0.9
            compiled(net, optimizer, torch.randn(5, 3))
    finally:
        logs.watchers.remove(look)
    return len(found), "Compiled again because:\n  " + "\n  ".join(whys or ["nothing: one version served all calls"])


for _name in RUNS:
    @behaviour("predict-steps", points=1 + (_name in ("with_adam_and_a_rate", "every_second_call")), name=_name, answer=_name.upper())
    def _(name=_name):
        return versions(name)
