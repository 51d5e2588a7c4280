"""Chapter 3: capture."""
import contextlib
import dis
import gc
import weakref
from dataclasses import replace

import torch

from .. import behaviour, task
from .kit import SOURCES, keep_sources, program_file, questions

# ---- drop-dead -------------------------------------------------------------------------------------------

task("drop-dead", title="Sizes that nobody needs", minutes=20, function="drop_dead", about="""\
`n = x.shape[0] * 2` adds a node to the graph if that size is a symbol. Often it only served to build a message or to choose a branch, and
once the trace is done nobody reads it. Such nodes go, and so do those that only they read. Inputs and the output stay, and so does every
node that is not `is_pure`: a tensor operation may write or draw random numbers, which later stages know better. graph.erase_node(node)
removes a node that has no
`users`.""",
     hints=[
    "A node can become dead because another one went. In which order does each node have to be looked at only once?",
    "Walk the nodes backwards: all users of a node come after it. Take the list first, since erasing changes what you walk.",
    "One walk, and four questions to each node: is it an input, is it the output, does somebody read it, and would anything be missed "
    "if it did not run?"])


def random_sizes(rng, calls: int):
    """A graph of sizes and tensors as data: (kind, name of inputs), and which are returned."""
    nodes, made = [("size", ()), ("tensor", ())], []
    for _ in range(calls):
        kind = rng.choice(["size", "size", "tensor"])
        fitting = [k for k, (other, _) in enumerate(nodes) if other == "size" or kind == "tensor"]
        nodes.append((kind, tuple(rng.choice(fitting) for _ in range(2))))
        made.append(len(nodes) - 1)
    return nodes, rng.sample(made, min(len(made), rng.randrange(3)))


def size_graph(case):
    from minicompile.ch01_graphs.shapes import ShapeEnv
    nodes, returned = case
    graph, made = torch.fx.Graph(), []
    size = ShapeEnv().create(7)
    for k, (kind, inputs) in enumerate(nodes):
        if inputs:
            node = graph.call_function(torch.add, tuple(made[i] for i in inputs), name=f"{kind}{k}")
        else:
            node = graph.placeholder(f"{kind}{k}")
        node.meta["val"] = size + k if kind == "size" else torch.empty(2, device="meta")
        made.append(node)
    graph.output(tuple(made[k] for k in returned))
    return graph


def size_text(case):
    lines = [f"{n} = {n.op if n.op != 'call_function' else 'add'}({', '.join(map(str, n.args))})" for n in size_graph(case).nodes]
    return "\n".join(lines)


def remaining(function, case):
    graph = size_graph(case)
    function(graph)
    graph.lint()
    return {str(n): True for n in graph.nodes}


S, T = ("size", ()), ("tensor", ())
for _points, _name, _cases in (
        (2, "sizes that nothing reads", lambda rng: [([S, T, ("size", (0, 0))], []), ([S, T, ("size", (0, 0))], [2]),
                                                     ([S, ("size", (0, 0)), ("tensor", (1, 1))], [2])]),
        (3, "chains of them", lambda rng: [([S, T, ("size", (0, 0)), ("size", (2, 0))], []),
            ([S, T, ("size", (0, 0)), ("size", (2, 2)), ("size", (3, 2)), ("size", (2, 0))], [3])]),
        (2, "tensor operations and inputs stay", lambda rng: [([S, T, ("tensor", (1, 1))], []), ([S, T], []),
            ([S, T, ("size", (0, 0)), ("tensor", (1, 2)), ("size", (2, 2))], [])]),
        (2, "random graphs", lambda rng: [random_sizes(rng, n) for n in (2, 3, 4, 6, 8, 10, 12, 15, 20, 30, 40)])):
    behaviour("drop-dead", points=_points, name=_name, cases=_cases, show=size_text)(remaining)


def message(x):
    n, m = x.shape
    text = f"{n * m} elements" if n > 2 else ""  # noqa: F841
    return x + 1


def half(x):
    half, rest = x.shape[0] // 2, x.shape[0] % 2
    return x[:half] if len(x) > 3 else x[:rest]


def dead_tensor(x):
    y = x * (x.shape[0] * 3)  # noqa: F841
    return x + 1


keep_sources(message, half, dead_tensor)


@behaviour("drop-dead", points=2, name="captured functions of a tensor with symbolic sizes", cases=lambda rng: ["message", "half",
                                                                                                                "dead_tensor"],
           show=lambda name: SOURCES[name] + "# x: float32 [6, 5], both sizes dynamic")
def captured_sizes(function, name):
    from minicompile.ch03_capture.capture import CaptureOptions, capture
    return called(capture(globals()[name], {"x": torch.zeros(6, 5)}, CaptureOptions(everything=True)).gm)


def called(gm) -> dict:
    """name -> text of each operation, without the address that the repr of a function has."""
    return {n.name: f"{getattr(n.target, '__name__', n.target)}({', '.join(map(str, n.args))})"
            for n in gm.graph.nodes if n.op != "placeholder"}


# ---- unwind ----------------------------------------------------------------------------------------------

task("unwind", title="Where an exception goes", minutes=35, function="unwind", about="""\
Since CPython 3.11 a `try` costs nothing: a table says which instructions a handler covers. When the instruction at `offset` raises, look
in `frame.decoded.table` for the entry that covers it: `start` is the first offset covered, `end` the first after it, and entries do not
overlap. The handler expects
`entry.depth` values on the stack, then LASTI if
`entry.lasti` is set (the place of the instruction, for a later re-raise), then the exception. `jump(frame, entry.target)` goes on there.
Return True then; without an entry leave everything as it is and return False. The interpreter holds on to the list `frame.stack`: change
it in place.""",
     hints=[
    "What is on the stack above `depth` belonged to the expression that raised. What becomes of it?",
    "start <= offset < end. The stack is cut to `depth` values before anything is pushed.",
    "For the entry that covers the offset three things happen, in this order: the stack is cut, in place; one or two things are pushed; "
    "the frame goes on at the handler. What is pushed, and in which order, is in the text above."])


def random_table(rng, entries):
    """(start, end, target, depth, lasti) of ranges that do not overlap, some with gaps between."""
    table, offset = [], rng.choice([0, 2, 6])
    for _ in range(entries):
        end = offset + 2 * rng.randrange(1, 5)
        table.append((offset, end, 2 * rng.randrange(40, 60), rng.randrange(4), rng.random() < 0.5))
        offset = end + 2 * rng.choice([0, 0, 1, 3])
    return table


def raising(entries):
    def cases(rng):
        found = []
        for n in entries:
            table = random_table(rng, n)
            for offset in sorted({0, table[0][0], table[-1][1], *(rng.choice(table)[rng.randrange(2)] for _ in range(4)),
                                  2 * rng.randrange(30)}):
                found.append((table, 4 + rng.randrange(3), offset))
        return found
    return cases


def raising_text(case):
    table, height, offset = case
    return f"offset {offset}, {height} values on the stack; table (start, end, target, depth, lasti): " + ", ".join(map(str, table))


def unwound(what):
    def observe(function, case):
        from minicompile.ch03_capture.interpreter import LASTI, Frame
        table, height, offset = case
        stack = [f"value {k}" for k in range(height)]
        frame = Frame(dead_tensor.__code__, {}, stack=stack, ip=1000)
        frame.decoded = replace(frame.decoded, table=[dis._ExceptionTableEntry(*entry) for entry in table],
                                index={k: k // 2 + 100 for k in range(0, 200, 2)})
        handled = bool(function(frame, offset, "the exception"))
        return {"handled": handled, "next instruction": frame.ip} if what == "jump" else \
            {"stack": ["LASTI" if v is LASTI else v for v in stack], "the same list": frame.stack is stack, "handled": handled}
    return observe


behaviour("unwind", points=3, name="which handler, and where it begins", cases=raising((1, 1, 2, 3, 5, 8)),
          show=raising_text)(unwound("jump"))
behaviour("unwind", points=3, name="what the handler finds on the stack", cases=raising((1, 1, 2, 3, 5, 8)),
          show=raising_text)(unwound("stack"))


def two_errors(x):
    for k in range(4):
        try:
            if k % 2:
                raise ValueError(k)
            x = x * {"a": k}["b"]
        except KeyError:
            x = x + 1
        except ValueError as error:
            x = x - error.args[0]
    return x


def cleaned_up(x):
    log = []

    def inner(y):
        try:
            return y + [1.5, 2.5][3]
        finally:
            log.append(y * 2)
    try:
        return x + (x * 3 + inner(x))
    except IndexError:
        return x, log


@contextlib.contextmanager
def counted(log):
    try:
        yield
    except ZeroDivisionError:
        log.append(7.5)


def in_a_context(x):
    log = []
    with counted(log):
        x = x.sin()
        x = x * (1 // 0)
    with torch.no_grad():
        y = x * log[0]
    return x + y


def raised_again(x):
    try:
        try:
            raise TypeError("first")
        except TypeError as error:
            x = x.cos()
            raise RuntimeError("second") from error
    except RuntimeError as error:
        return x * len(error.args[0]) * len(error.__cause__.args[0])


keep_sources(two_errors, cleaned_up, in_a_context, raised_again)


def observe_program(function, name):
    from minicompile.ch03_capture.capture import capture
    made = capture(globals()[name], {"x": torch.zeros(3)})
    return {**called(made.gm), "result": made.gm(*made.example_inputs)}


for _points, _name, _programs in ((2, "programs that catch", ["two_errors", "raised_again"]),
                                  (3, "finally and with, through several frames", ["cleaned_up", "in_a_context"])):
    behaviour("unwind", points=_points, name=_name, cases=lambda rng, programs=_programs: programs,
              show=lambda name: SOURCES[name])(observe_program)


# ---- for-iter --------------------------------------------------------------------------------------------

task("for-iter", title="An opcode handler", minutes=25, about="""\
The interpreter of chapter 3 runs a function's bytecode on stand-ins for values, and each instruction has a handler. At the head of
a loop stands FOR_ITER. Its handler gets what it pops, the iterator, and returns what it pushes: a list, or None for nothing.
`next_value(tx, iterator)` gives the stand-in of the next value, or None if there is none; it knows every kind of iterator.
`jump(frame, offset)` goes on at an offset. There the code that ends a loop cleans up: in 3.12 with one instruction, END_FOR, in
3.13 with two, END_FOR and POP_TOP. They are skipped, as CPython does, because the iterator is gone already. `frame.ip` is the
position of the next instruction, and `PYTHON` the version, such as (3, 12).""",
     hints=[
    "The loop's body may itself use the stack. What has to lie under the value, so that the next round finds it?",
    "Returning [iterator, value] pushes both. If there is no value nothing is pushed, since the handler has popped the iterator.",
    "There are two ends: a value, or none. The second one goes on elsewhere, and then moves `frame.ip` past as many instructions as "
    "this version of Python has there: none in 3.11. A stand-in of the value None is a value, too."])


def loop_with_else(x):
    for k in range(4):
        for name in "ab":
            if k == 3:
                break
            x = x * (k + ord(name))
        else:
            x = x + 1
    return x


def over_a_dict(x):
    totals = {}
    for key, value in {"a": 1, "b": 2}.items():
        for part in (x, x + 1):
            totals[key] = totals.get(key, 0) + part * value
    return [totals[key] for key in totals]


def with_a_generator(x):
    def doubled(items):
        for item in items:
            yield item * 2
    return sum(doubled(y - 1 for y in (x, x.sin(), x.cos())), x)


def nothing_to_do(x):
    for _ in ():
        x = x * 2
    for _ in [[]]:
        for _ in _:
            x = x * 3
    return [x + k for k in range(0)], x + 1


def one_iterator(x):
    numbers = iter([1, 2, 3, 4, 5])
    for n in numbers:
        x = x * n
        for m in numbers:
            x = x + m
            break
    return x


keep_sources(loop_with_else, over_a_dict, with_a_generator, nothing_to_do, one_iterator)
for _points, _name, _programs in ((3, "nested loops", ["loop_with_else", "over_a_dict"]), (2, "loops that end at once", ["nothing_to_do"]),
                                  (3, "generators, and an iterator that two loops share", ["with_a_generator", "one_iterator"])):
    behaviour("for-iter", points=_points, name=_name, cases=lambda rng, programs=_programs: programs,
              show=lambda name: SOURCES[name])(observe_program)


# ---- list-effects ----------------------------------------------------------------------------------------

task("list-effects", title="What the call did to a list", minutes=25, function="difference_of_lists", about="""\
While a function is captured, nothing outside may change: the program appends to a stand-in of the list. At the end the compiler
compares the stand-in with a snapshot, and the generated code does to the real list, at each call, what the program did. It must do
no more: what was not touched stays as it is, also if somebody else has put another object there by then. Find the one assignment
`before[start:stop] = items` that makes `after` of `before` and replaces as little as possible; of several, any will do. Items are
compared by identity; `settled(item)` is what an item has become.""",
     hints=[
    "What do the two lists have in common at the beginning? And at the end?",
    "Count the common items from the front. Then from the back, but not further than to where the front ended: [a, a] and [a].",
    "Settle the items of both lists first. Count from the front while both have one object. Then from the back, over no more than the "
    "front has left of the shorter list. What stands between the two counts in `before` is replaced by what stands between them in "
    "`after`."])


class Same:
    """An object that is equal to all others of its kind."""
    def __init__(self, name):
        self.name = name

    def __eq__(self, other):
        return isinstance(other, Same)

    __hash__ = None


def random_lists(rng):
    """Two lists as positions in a pool of objects."""
    found = []
    for _ in range(30):
        before = [rng.randrange(5) for _ in range(rng.randrange(7))]
        after = list(before)
        for _ in range(rng.randrange(3)):
            at = rng.randrange(len(after) + 1)
            after[at:at + rng.randrange(3)] = [rng.randrange(5) for _ in range(rng.randrange(3))]
        found.append((before, after))
    return found


def difference_found(function, case):
    pool = [Same(n) for n in range(5)]
    start, stop, items = function(*([pool[n] for n in names] for names in case))
    return start, stop, [item.name for item in items]


def least_assignment(case, got, expected):
    """None if the assignment is right and as short as the original's."""
    before, after = case
    start, stop, items = got
    if not 0 <= start <= stop <= len(before) or before[:start] + items + before[stop:] != after:
        return f"before[{start}:{stop}] = {items} gives {before[:start] + items + before[stop:]}"
    if stop - start + len(items) > expected[1] - expected[0] + len(expected[2]):
        return f"before[{start}:{stop}] = {items} replaces more than it has to"
    return None


LISTS = [([], []), ([0], [0]), ([], [1]), ([0, 1], [0, 1, 2]), ([0, 1, 2], [0, 2]), ([0, 0], [0]), ([0], [0, 0]),
         ([0, 1, 2, 3], [0, 4, 2, 3]),
         ([0, 0, 1, 0], [0, 0]), ([0, 0], [0, 0, 1, 0])]
for _points, _name, _cases in ((3, "appended, removed, replaced", lambda rng: LISTS), (4, "random lists of objects that are all equal",
                                                            random_lists)):
    behaviour("list-effects", points=_points, name=_name, cases=_cases, check=least_assignment,
              show=lambda case: f"before {case[0]}, after {case[1]} (each number one object)")(difference_found)


def appends(x, items):
    items.append(x + 1)
    return x * 2


def replaces(x, items):
    items[1] = x
    items.insert(0, len(items))
    return x


def removes(x, items):
    items.pop()
    items[:1] = [x, x]
    return x + len(items)


def undoes(x, items):
    items.append(x)
    items.pop()
    return x * 3


keep_sources(appends, replaces, removes, undoes)


@behaviour("list-effects", points=3, name="compiled functions that change a list", cases=lambda rng: ["appends", "replaces", "removes",
                                                            "undoes"],
           show=lambda name: SOURCES[name])
def changed_lists(function, name):
    import minicompile
    minicompile.reset()
    compiled, x, items = minicompile.compile(globals()[name], backend="eager"), torch.ones(2), ["a", "b", "c"]
    results = [compiled(x, items) for _ in range(2)]
    return results, items


# ---- own-backward ----------------------------------------------------------------------------------------

task("own-backward", title="A region with a backward of its own", minutes=45, about="""\
A `torch.autograd.Function` in a program says: do not differentiate my forward, call my backward. Capture inlines the forward
without gradients, so its operations are ordinary nodes, and records the backward as a graph of its own. One node has to join the two:
it passes the values of the forward through, and tells autograd what their gradient is. `spec` is all that is known about one such
region. Make the function that this node calls. The stage that asks autograd for the backward pass then finds the recorded graph
where it would have found the derivatives of the operators.""",
     hints=[
    "What tells autograd that it shall not look inside? Which of the operands does that thing have to see, and which does it have to "
    "give a gradient, if only None?",
    "Make a class with type(spec.name, (torch.autograd.Function,), {...}) inside of the function, so that its two methods see spec. "
    "What the backward reads may be one of the outputs: collect it after they have been made. The gradients of the graph belong to the "
    "operands after the outputs.",
    "forward: make the outputs, detached or not; put outputs and operands into one list as `spec.sources` counts them; give those with "
    "the flag to autograd and keep the others on ctx; say which outputs have no gradient, and whether absent tangents become zeros. "
    "backward: bring the values back into the order of `spec.sources`, choose the graph by which tangents are there, call it, and put "
    "None before its gradients."])


class Cube(torch.autograd.Function):
    """Its gradient is five times what it should be: so one sees whose it is."""
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x ** 3

    @staticmethod
    def backward(ctx, grad):
        x, = ctx.saved_tensors
        return 15 * grad * x ** 2


class Pair(torch.autograd.Function):
    """Two outputs, of which one has no gradient; a value hung on ctx; an argument that is no tensor."""
    @staticmethod
    def forward(ctx, x, factor, y):
        ctx.other = y
        out = x * factor + y.exp()
        sign = out.sign()
        ctx.mark_non_differentiable(sign)
        ctx.save_for_backward(out)
        return sign, out

    @staticmethod
    def backward(ctx, _, grad):
        out, = ctx.saved_tensors
        return grad * out, None, grad + ctx.other


class Perhaps(torch.autograd.Function):
    """Is told which of its outputs nobody used."""
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx, a, b):
        if a is None:
            return b * 3
        return a * 2 if b is None else a - b


class Through(torch.autograd.Function):
    """Gives a view of its input, and turns its gradient round."""
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Kept(torch.autograd.Function):
    """Reads two values that are neither its inputs nor its outputs."""
    @staticmethod
    def forward(ctx, x):
        h, ctx.slope = x.tanh(), x.cos()
        ctx.save_for_backward(h)
        return h * 2 + x.sin()

    @staticmethod
    def backward(ctx, grad):
        h, = ctx.saved_tensors
        return grad * (2 - 2 * h * h + ctx.slope)


def cubed(x, y):
    return Cube.apply(x * 2).sum(), Cube.apply(y) * x


def in_pairs(x, y):
    sign, out = Pair.apply(x, 3.0, y)
    return sign * 2, out * sign + y


def pair_itself(x, y):
    return Pair.apply(x, 3.0, y)


def first_only(x, y):
    return Perhaps.apply(x)[0] * y


def second_only(x, y):
    return Perhaps.apply(x)[1] * y


def both(x, y):
    a, b = Perhaps.apply(x)
    return a * y + b


def turned_round(x, y):
    return Through.apply(x * y), Through.apply(y) * 2


def inside_each_other(x, y):
    return Cube.apply(Through.apply(x)) + Pair.apply(x, 2, Cube.apply(y))[1]


def with_values_kept(x, y):
    return Kept.apply(x * 2) * y


keep_sources(cubed, in_pairs, pair_itself, first_only, second_only, both, turned_round, inside_each_other, with_values_kept)


def with_gradients(name):
    """The captured graph of a program, its inputs, its outputs."""
    from minicompile.ch03_capture.capture import capture
    g = torch.Generator().manual_seed(7)
    x, y = [torch.randn(3, generator=g).requires_grad_() for _ in range(2)]
    made = capture(globals()[name], {"x": x, "y": y})
    outputs = made.gm(*made.example_inputs)
    return made.gm, (x, y), [o for o in (outputs if isinstance(outputs, (tuple, list)) else [outputs]) if isinstance(o, torch.Tensor)]


def region_runs(function, name):
    """What the captured graph gives, and its gradients."""
    gm, inputs, outputs = with_gradients(name)
    differentiable = [o for o in outputs if o.requires_grad]
    gradients = torch.autograd.grad(sum(o.sum() * k for k, o in enumerate(differentiable, 1)), inputs, allow_unused=True)
    return {"graph": called(gm), "outputs": [o.detach() for o in outputs], "which have a gradient": [o.requires_grad for o in outputs],
            "gradients of x and y": list(gradients)}


def region_joint(function, name):
    """The joint graph, as it is recorded."""
    from .kit import graph_lines, joint_graph
    x, y = [torch.randn(3).requires_grad_() for _ in range(2)]
    joint = joint_graph(globals()[name], x, y)
    return {**graph_lines(joint.gm), "gradients of": joint.gradients, "reached by": [sorted(r) for r in joint.reached]}


def region_memory(function, name):
    """What autograd notices and what it cannot: a saved tensor that is overwritten, a second derivative, a view."""
    gm, (x, y), outputs = with_gradients(name)
    found, out = {"freed with its last name": freed(name)}, next(o for o in outputs if o.requires_grad)
    found["name"] = next(type(f).__name__ for f in behind(out.grad_fn) if "Backward0" not in type(f).__name__)
    first, = torch.autograd.grad((out * out.detach()).sum(), x, create_graph=True, retain_graph=True)
    found["second derivative"] = torch.autograd.grad(first.sum(), x, allow_unused=True)[0] if first.requires_grad else "none"
    for which in ("x", "y", "the last output"):
        _, again, results = with_gradients(name)
        changed = {"x": again[0], "y": again[1], "the last output": results[-1]}[which]
        try:
            with torch.no_grad():
                changed.detach().mul_(2)
            found[f"gradient after {which} was doubled"] = torch.autograd.grad(sum(r.sum() for r in results if r.requires_grad), again,
                                                                               allow_unused=True)
        except RuntimeError as error:
            found[f"gradient after {which} was doubled"] = "modified by an inplace operation" in str(error)
    for k in range(len(outputs)):
        try:
            found[f"output {k}, multiplied in place"] = with_gradients(name)[2][k].mul_(2).detach()
        except RuntimeError as error:
            found[f"output {k}, multiplied in place"] = "is a view and is being modified inplace" in str(error)
    return {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}


def freed(name):
    """Whether the outputs die with their last name, though the history knows them."""
    gc.disable()
    outputs = [weakref.ref(o) for o in with_gradients(name)[2]]
    found = [o() is None for o in outputs]
    gc.enable()
    return found


def behind(node):
    seen, pending = [], [node]
    while pending:
        f = pending.pop(0)
        if f is not None and f not in seen:
            seen.append(f)
            pending += [g for g, _ in f.next_functions]
    return seen


def region_text(name):
    return SOURCES[name] + "# x, y: float32 [3] that require gradients"


for _points, _name, _programs, _observe in (
        (3, "outputs and gradients", ["cubed", "in_pairs", "inside_each_other", "with_values_kept"], region_runs),
        (3, "outputs that nobody used, outputs that are views", ["first_only", "second_only", "both", "turned_round"], region_runs),
        (2, "the joint graph has the backward of the region", ["cubed", "in_pairs", "both", "inside_each_other"], region_joint),
        (3, "what is saved is watched", ["cubed", "in_pairs", "turned_round", "pair_itself"], region_memory)):
    behaviour("own-backward", points=_points, name=_name, cases=lambda rng, programs=_programs: programs, show=region_text,
              tolerance=1e-6)(_observe)


# ---- predict-graph ---------------------------------------------------------------------------------------

PROGRAMS = '''\
import torch
import torch.nn.functional as F


def formula(x):
    scale = 2 * 3 ** 2
    return F.gelu(x) * scale


def unrolled(x):
    for k in range(3):
        x = x * k
    return x


def collected(x):
    results = {}
    for name in ("a", "b"):
        results[name] = x.relu()
    results["c"] = len(results)
    return results


def guarded(x):
    try:
        return x / {}["missing"]
    except KeyError:
        return x - 1


def looked_at(x):
    if x.dim() == 2 and x.dtype == torch.float32 and x.shape[0] > 3:
        return x.t()
    return x.sin().t()


def thrown_away(x):
    y = torch.exp(x)
    z = x.shape[0] * 100
    return x + 1


def no_change(x):
    return x.contiguous().float()


def in_place(x):
    y = x.clone()
    y += 1
    y[0] = 2
    return y


def total(x):
    return sum(row * k for k, row in enumerate([x, x]))


def closure(x):
    def twice(f):
        return lambda y: f(f(y))
    return twice(twice(torch.sin))(x)

'''
GRAPHS = ("formula", "unrolled", "collected", "guarded", "looked_at", "thrown_away", "no_change", "in_place", "total", "closure")

task("predict-graph", title="What reaches the graph", minutes=25, kind="predict", about="""\
Each function is captured with x = torch.randn(4, 4). How many operations are in its graph: nodes that are neither inputs nor the output?
No stage but capture has seen it yet.""", starter=PROGRAMS + questions(
    **{name.upper(): f"operations in the graph of {name}" for name in GRAPHS}), hints=[
    "The interpreter runs the Python, once. What does it write down when an operation on a tensor runs, and what otherwise?",
    "Sizes and dtypes are known and leave no node. A loop is unrolled. An operation that gives back the very tensor that it got is no "
    "node. Tensor operations whose results nobody reads are left for later stages.",
    "minicompile.explain(f, backend='eager')(x) shows the graph. sum() begins with 0 + its first item; y[0] = 2 is one operation that "
    "writes."])


def nodes_in_graph(name) -> tuple:
    import minicompile
    found = minicompile.explain(program_file(PROGRAMS)[name], backend="eager")(torch.randn(4, 4))
    operations = [o for g in found.graphs for o in g.operations]
    record = [f"{o.call}: {o.source}" for o in operations]
    return len(operations), "The captured graph, and the line of each operation:\n  " + "\n  ".join(record or ["it is empty"])


for _name in GRAPHS:
    @behaviour("predict-graph", points=1 + (_name in ("in_place", "total", "closure")), name=_name, answer=_name.upper())
    def _(name=_name):
        return nodes_in_graph(name)
