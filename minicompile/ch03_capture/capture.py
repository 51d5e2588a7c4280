# %% [markdown]
# # Capture: one frame becomes one graph
#
# `capture` puts the pieces together. It wraps the arguments, runs the interpreter over the function's
# bytecode, and turns the value it returns into the text of a function:
#
#     __out = __graph(*__inputs)
#     return __out[0]
#
# The text plus the graph plus the guards *are* the compiled function. Where the real torch.compile
# assembles new bytecode by hand, we write Python and let Python compile it: easier to read, to print and to
# step through.
#
# Capture never runs the program's code and never changes its objects. If it fails half-way, nothing has
# happened, and the frame can simply be evaluated as it is.

# %%
import functools
import itertools
import re
import types
import weakref
from dataclasses import dataclass, field
from typing import Any, Callable

import torch
from torch import is_grad_enabled
from torch.utils import _pytree as pytree

from .. import marks
from ..ch01_graphs.fake import plain_tensors, storage_key
from ..ch01_graphs.generators import set_states, states_of
from ..ch01_graphs.graph import Location, graph_module
from ..ch01_graphs.shapes import is_symbolic
from ..ch02_guards.guards import GuardSet, class_lookup
from ..ch02_guards.identity import HEAP_TYPE, any_of, held, is_a
from ..ch02_guards.sources import ClosureCellSource, GlobalsSource, LocalSource, ModuleAttrSource
from ..ch02_guards.torch_guards import replaced_methods
from ..errors import SkipFrame, Unsupported, marked
from . import opcodes, opcodes_calls  # noqa: F401 (they fill tables)
from .binding import SUSPENDS
from .calls import HANDLED
from .comparisons import BRANCH_ON_VALUES
from .descriptors import DECISIVE, ORIGINAL_METHODS, fields_at, own_fields
from .effects import written_storages
from .epilogue import AHEAD, Epilogue, expression, output_text, pool, refuse_to_leave, write_effects
from .exceptions import UserError
from .hook import EVALUATE
from .inputs import fixed_marks, guard_counters, guard_sizes
from .interpreter import Frame, StopTrace, has_cleanup, run_instructions
from .library import (  # noqa: F401
    builtins_, caches, classes, containers, control_flow, fields, items, iterators, modules, regions, standard, tensor_attributes,
    torch_functions)
from .library.contexts import close_all, set_grad
from .library.graph_functions import OVERLOADS
from .lookup import MISSING, captures
from .tensors import replaced_operator
from .tracer import Globals, Tracer, constant_source, is_users, location, module_of, step_of
from .values import DictVal, Lazy, ObjVal, SymVal, TensorVal, TracebackVal, describe
from .wrap import guard_unseen, is_fixed, realize, wrap


# %% [markdown]
# ## What goes in and what comes out
#
# Methods that decide how attributes and operators work may be replaced by the program at any time. What they are at the beginning
# is noted here, once, for the classes that capture knows (`ORIGINAL_METHODS`).
#
# A capture is told how to go about it by `CaptureOptions`, made anew for each attempt, since the attempts differ: the second may have
# symbols where the first had numbers. What it gives is one of two. A `Captured` has all that an entry of the cache is made of. Or the trace
# stops at an instruction that cannot be in a graph; then chapter 4 makes a shorter `Captured` of what came before, with a
# `BreakReason` that says why. A `Trace` is what both begin with: a tracer whose graph is finished, and the frame as it was at the end.

# %%
_classes = [cls for cls in HANDLED if isinstance(cls, type) and cls.__flags__ & HEAP_TYPE]
ORIGINAL_METHODS.update({(cls, name): class_lookup(cls, name) for cls in _classes for name in DECISIVE})


@dataclass
class CaptureOptions:
    """fullgraph: a break is an error. dynamic: source -> set of dynamic dimensions (tensors), True or `FROM_ZERO`
    (numbers). fixed: why nothing may be a symbol, or ""; everything: whether all arguments are. used:
    becomes true when a symbol was made. unseen: why `torch.compiler.is_compiling()` is False, or "". inference: whether the
    caller is in inference mode. undo: what its traces have done ahead (`Effects`). trusting: whether a jump that only decides
    whether to raise may be assumed not to. unrolls: whether a loop that began before a graph break is unrolled; unrolled: becomes true when
    one was. max_ops: instructions to interpret before giving up on the frame."""
    fullgraph: bool = False
    dynamic: dict = field(default_factory=dict)
    fixed: str = ""
    everything: bool = False
    used: bool = False
    unseen: str = ""
    inference: bool = field(default_factory=torch.is_inference_mode_enabled)
    undo: list = field(default_factory=list)
    trusting: bool = True
    unrolls: bool = False
    unrolled: bool = False
    max_ops: int = 2_000_000


# %%
@dataclass
class BreakReason:
    """Why and where a graph ended. location: the user's innermost line; chain: the calls that lead there,
    outermost first, as text; position: columns of the expression (`dis.Positions`) or None; hint: what to do
    about it, or ''."""
    reason: str
    location: Any = None
    chain: list = field(default_factory=list)
    position: Any = None
    hint: str = ""

    def __str__(self):
        return f"graph break: {self.reason} ({self.location})"


@dataclass
class Captured:
    """What one frame became. `body` is the text after the guards and the call of the graph; it names `__out`,
    `__inputs` and `__K`."""
    gm: torch.fx.GraphModule | None
    inputs: list
    example_inputs: list
    guards: GuardSet
    body: str
    constants: tuple
    breaks: list = field(default_factory=list)
    close: Callable = lambda: []         # adds the guards that later stages asked for, the last ones
    written: tuple = ()                  # attributes that the body writes: (source of the object, name)
    traceless: bool = False              # whether the graph may fail half-way without leaving a trace
    weak: tuple = ()                     # indices of the constants that the body names `__k0`, `__k1`, ...
    symbols: dict = field(default_factory=dict)         # where each symbol is read: name -> Source
    before: str = ""                     # text before the call of the graph
    retreat: str = "__EVALUATE"          # what to return after the call of the graph so that the frame is evaluated as it is
    ahead: tuple = ()                    # what is done before the call of the graph where it is missing (`Effects`)
    instructions: int = 0                # that the trace has interpreted


@dataclass(eq=False)
class Trace:
    """A trace that has ended: by a return (`result`) or at the instruction where the graph breaks (`result`
    None). active: the contexts that the program was in, grad_mode: whether gradients were enabled."""
    tx: Tracer
    frame: Any
    result: Any
    active: list
    grad_mode: bool


# %% [markdown]
# ## The state of the world
#
# Some of what a program means is in no variable: whether gradients are recorded, whether autocast is on,
# the default dtype. The trace starts in the caller's state, and guards it (`WORLD`).
#
# `start_trace` prepares a trace: a tracer with an empty graph, the guards on the state of the world, and a frame
# for the function whose arguments are `Lazy`. Such a value has not been looked at. It becomes a value, with
# guards, when an instruction takes it, so an argument that the function never reads is never guarded.
#
# The stack of a resume function (chapter 4) begins with objects that may never be looked at, too: the rest of an expression, or a
# loop's iterator. They are `Lazy` as well, and `WaitingStack` looks when an instruction takes one.

# %%
WORLD = ("GRAD_MODE", "INFERENCE_MODE", "DEFAULT_DTYPE", "DETERMINISTIC", "AUTOCAST", "TORCH_FUNCTION")


class WaitingStack(list):
    """The stack of a resumed frame. What waits there (`Lazy`) is looked at, and guarded, when an instruction
    takes it; the rest of an expression or a loop's iterator may wait until the graph breaks again."""

    def __init__(self, tx):
        self.tx = tx

    def __getitem__(self, index):
        found = super().__getitem__(index)
        if type(index) is slice:
            return [realize(self.tx, v) for v in found]
        return realize(self.tx, found)

    def pop(self, index=-1):
        return realize(self.tx, super().pop(index))


def start_trace(func, args: dict, options: CaptureOptions, stop_at: int | None) -> tuple:
    """A tracer and the outermost frame of `func` with its arguments wrapped. args: name -> object,
    localsplus order."""
    code = func.__code__
    tx = Tracer(options, Globals(func.__globals__), stop_at)
    # Tensors hold their sizes in C++, where the collector sees no cycle: from there nothing leads back
    tx.symbols.env.place = lambda trace=weakref.ref(tx): trace() and location(trace())
    tx.effects.undo = options.undo
    for kind in WORLD:
        tx.guards.add(None, kind)
    tx.guards.add(None, "TENSOR_METHODS", replaced := replaced_methods())
    if name := replaced_operator(replaced):
        raise SkipFrame(f"the program has replaced torch.Tensor.{name}, which the graph calls in many ways")
    tx.tensors.replaced = frozenset(replaced)
    frame = Frame(code, func.__globals__)
    if any(name.startswith("__stack") for name in args):
        frame.stack = WaitingStack(tx)
    for name, value in args.items():
        frame.locals[name] = Lazy(value, LocalSource(name))
    for i, cell in enumerate(func.__closure__ or ()):
        frame.closure.append(wrap(tx, cell, ClosureCellSource(i, code.co_freevars[i])))
    return tx, frame


# %% [markdown]
# `trace_frame` runs it. While it runs, each search for an attribute in a class (`lookup.py`) is noted, with what was found or that nothing
# was. One guard for each name is enough, however often it was looked for, so these guards are made when the trace ends, also when it ends
# in an error. A class that the trace itself has made is not there at the next call. What its bases have decides in its place.

# %%
def trace_frame(func, args: dict, options: CaptureOptions, stop_at: int | None = None) -> Trace:
    """Interpret the frame. Raises Unsupported with attributes `step` (which instruction, counted in
    execution order) and `chain`; SkipFrame when the frame is not worth or not capable of capture."""
    if func.__code__.co_flags & SUSPENDS:
        raise marked(SkipFrame("generators and coroutines are not captured"), quiet=True)       # no error, even under fullgraph
    tx, frame = start_trace(func, args, options, stop_at)
    captures.append(tx.classes)
    try:
        with plain_tensors():
            return run_frame(tx, frame, is_grad_enabled())
    finally:
        for (cls, name), found in captures.pop().found.items():
            guard_class(tx, cls, name, found)


def guard_class(tx: Tracer, cls: type, name: str, found):
    """`found` is what a search in the class found. Of a class that the trace has made, what its bases have decides."""
    if cls not in tx.classes.made:
        data = (cls, name) in tx.classes.data and found is not MISSING
        return tx.guards.add(None, "CLASS_ATTR", (cls, name, any_of(type(found)) if data else found))
    for base in cls.__mro__:
        if base not in tx.classes.made and base.__flags__ & HEAP_TYPE:
            guard_class(tx, base, name, class_lookup(base, name))
        if name in vars(base):
            break


# %% [markdown]
# `run_frame` sorts out how the frame can end.
#
# 1. It returns, or the trace has come to the instruction before which it is to stop (`StopTrace`). That is a `Trace`.
# 2. The program raises an exception that it does not catch itself (`UserError`). Then nothing is compiled, and eager raises it.
# 3. Something cannot be captured (`Unsupported`). The error says at which step, counted in instructions, so that the next attempt can
#    stop in front of it.
# 4. The program's calls are nested more deeply than Python allows.
#
# `marked` puts notes on an error for those who catch it: whether the program raises, whether the next call may well end otherwise
# (`passing`). In all cases the grad mode and the context managers that the trace has entered are put back, because it has
# entered them for real.

# %%
def run_frame(tx: Tracer, frame: Frame, mode: bool) -> Trace:
    """mode: whether gradients are enabled."""
    try:
        try:
            result = run_instructions(tx, frame).value
        except StopTrace:
            result = None
        if result is not None and tx.contexts:
            raise SkipFrame("a context manager is left open", location(tx))
        done = Trace(tx, frame, result, close_all(tx), is_grad_enabled())
        set_grad(tx, mode)
        return done
    except UserError as error:
        words = ", ".join(map(describe, error.exc.args))
        raise marked(Unsupported(f"the program raises {error.exc.cls.__name__}({words})", raised_at(error.exc)),
                     step=len(tx.path), chain=[], raises=True, told=tx.told) from None
    except Unsupported as error:
        if not hasattr(error, "step"):
            error.step = len(tx.path)
        error.told = tx.told and getattr(error, "failed", False)
        raise
    except RecursionError:
        raise marked(SkipFrame("the program's calls are nested too deeply"), passing=True) from None
    finally:
        close_all(tx)
        if is_grad_enabled() != mode:
            torch._C._set_grad_enabled(mode)


def raised_at(exc) -> Location | None:
    """The user's innermost line that an exception of the trace has come through."""
    passed = exc.traceback.passed if type(exc.traceback) is TracebackVal else ()
    return next((Location(code.co_filename, line, code.co_name, offset)
                 for code, _, offset, line in passed if is_users(code.co_filename)), None)


# %% [markdown]
# ## The whole frame
#
# The graph returns what the epilogue asked for, each once. If it asked for nothing and no node has an
# effect, there is no graph: the function was not about tensors.
#
# `capture` traces the frame, asks for an expression of what it returns, and writes the side effects. Asking
# for an expression may ask for tensors, and these are the outputs of the graph. If something cannot be
# rebuilt, the error carries the step at which it was made, since the graph can break before that.
#
# `finish_capture` adds the guards that concern several values at once: the sizes that were assumed, the objects
# that must be different ones, the numbers that have changed. It drops nodes that nobody needs, and collects
# what an entry of the cache consists of: the graph, the sources of its inputs, the guards, and the text of
# the function.
#
# In between it deals with assumptions. On a CPU a branch that only decides whether to raise, such as an `assert` about a tensor, is taken
# to go well, and the graph gets an output that says whether that was right. The text behind the graph looks at it first. If it was wrong,
# the call has to be done over by Python, so this is possible only where the graph leaves no trace: if the only traces are random numbers
# that were drawn, the generators are put back (`__retreat`); otherwise the graph breaks at that branch after all.

# %%
def capture(func, args: dict, options: CaptureOptions | None = None) -> Captured:
    """Capture all of `func(**args)` as one graph; raises Unsupported where the graph would break."""
    options = options or CaptureOptions()
    done = trace_frame(func, args, options)
    ep = Epilogue(done.tx)
    try:
        result = expression(ep, done.result)
        return finish_capture(ep, [*closing_lines(ep, done), f"return {result}"])
    except Unsupported as error:
        error.step = step_of(done.tx, error.born) + 1      # it may break before that was made
        raise


def closing_lines(ep: Epilogue, done: Trace) -> list:
    """Side effects and the text up to the return. Reading everything comes before writing anything."""
    write_effects(ep)
    if done.grad_mode != is_grad_enabled():
        ep.writes.append(f"__torch._C._set_grad_enabled({done.grad_mode})")
    for name, (value, _) in ep.late.items():
        if any(re.search(rf"\b{name}\b", line) for line in (*ep.reads, *ep.writes)):
            refuse_to_leave(ep, "an iterator that something else refers to", value)
    return [*ep.reads, *ep.writes, *(line for _, line in ep.late.values())]


def finish_capture(ep: Epilogue, lines: list, breaks=()) -> Captured:
    tx = ep.tx
    if any(not generator.done and has_cleanup(generator.frame) for generator in tx.effects.generators):
        raise SkipFrame("a generator is dropped in the middle of a try or a with")
    guard_unseen(tx)
    guard_sizes(tx)
    guard_aliasing(tx)
    guard_counters(tx)
    before, retreat = "".join(line + "\n" for lines_ahead in AHEAD for line in lines_ahead(ep)), "__EVALUATE"
    assumed = tx.symbols.assumptions
    right = output_text(ep, assumed[-1][0].node) if assumed else None
    gm, traceless = finished_graph(ep), leaves_no_trace(tx)
    if right is not None:
        if before or not on_cpu(tx.graph) or not traceless and not leaves_no_trace(tx, tx.tensors.mode.draws):
            _, place, born, _ = assumed[0]
            raise Unsupported(BRANCH_ON_VALUES, place, born)
        if not traceless:
            traceless, before, retreat = True, f"__retreat = {pool(ep, keep_generators)}()\n", "__retreat()"
        lines = [f"if not {right}: __refuted(); return {retreat}", *lines]
    inputs = tx.tensors.inputs if gm is not None else {}
    written = [(value.source, name) for value, _ in tx.effects.changed.values()
               if type(value) is ObjVal and value.cls is not types.ModuleType and value.source for name in value.attrs]
    return Captured(gm, [node.meta["source"] for node in inputs], list(inputs.values()), tx.guards,
                    "\n".join(lines),
                    tuple(held(real) for _, real in tx.objects.constants.values()), list(breaks), functools.partial(close_guards, tx),
                    tuple(written), traceless or leaves_no_trace(tx, calls=True), tuple(ep.weak), tx.symbols.sources, before, retreat,
                    tuple(tx.effects.ahead), tx.ops)


# %%
def finished_graph(ep: Epilogue) -> torch.fx.GraphModule | None:
    """The graph with its outputs, in order; None if there is nothing to compute."""
    graph = ep.tx.graph
    if all(n.op == "placeholder" for n in graph.nodes) or not (ep.outputs or has_effects(graph)):
        assert not ep.outputs, "outputs without a graph"
        return None
    output = graph.output(tuple(ep.outputs))
    output.meta.update(val=tuple(n.meta["val"] for n in ep.outputs), location=None, origins=())
    order_placeholders(graph)
    drop_dead(graph)
    return graph_module(torch.nn.Module(), graph)


# %% [markdown]
# ## One object or two
#
# Two values of a trace are two objects. The trace meets an object on a path; if a second path leads to the same one, it
# finds the same value (`objects.tracked`). In another call these paths may lead to two objects, or two paths that led to two to one. As
# long as nothing is written that makes no difference. In
#
#     def appended(x, a, b):
#         a.append(b[0])
#         return x * len(b)
#
# it does: called with one list twice, the answer is another. So what the trace has written to, and what it has compared by
# `is`, must be apart from all else of its class, and two tensors from each other if one of them was written in place
# (`NOT_ALIASED`; an object to which no source leads, such as one in a key of a dictionary, is a constant there). Called with two
# lists, the version asks for
#
#     b has 1 element
#     a is another object than b
#
# There are objects of which Python shows two: an instance and its `__dict__`, a module and the dictionary of its variables. Those are
# guarded as well, or the frame is left to Python (`guard_dicts`, `guard_namespaces`).

# %%
def guard_aliasing(tx):
    """What was written to, or told apart from others, has to be apart from what was found elsewhere. A tensor
    of a module and another one are left to the runtime, which compares addresses. Tensors whose guards differ are not one. Objects
    that share a `__dict__` are two values of the trace, which would not see each other's writes."""
    found, unnamed = {}, {}
    for value in dict.fromkeys(tx.objects.tracked.values()):
        if type(value) is SymVal or is_fixed(getattr(value, "real", None)):
            continue
        if value.source is not None:
            found.setdefault(value.cls, []).append(value)
        elif value.cls in tx.classes.told_apart and getattr(value, "real", None) is not None:
            unnamed.setdefault(value.cls, []).append(value)
    changed = {type(v.real) for v, _ in tx.effects.changed.values()}        # of a dictionary inside an object, the object's
    for cls in changed:
        objects = [v.real for v in found.get(cls, ()) if type(v) is ObjVal and v.real is not None and cls.__dictoffset__]
        owned = [object.__getattribute__(o, "__dict__") for o in objects]
        if len(set(map(id, owned))) < len(objects):
            raise SkipFrame("two objects have one __dict__, and one of them is written to")
    if changed:
        guard_dicts(tx, found)
        guard_namespaces(tx, found)
    groups = [found[cls] + unnamed.get(cls, []) for cls in tx.classes.told_apart | changed if cls in found]
    tensors = [v for values in found.values() for v in values if type(v) is TensorVal]
    if written_storages(tx) & {storage_key(v.fake) for v in tensors}:
        alike: dict = {}
        for v in tensors:
            facts = type(v.real), v.real.dtype, v.real.device, v.real.requires_grad, v.real.dim()
            alike.setdefault((isinstance(v.source, ModuleAttrSource), *facts), []).append(v)
        groups += alike.values()
    for group in groups:
        if len(group) > 1:
            tx.guards.add(group[0].source, "NOT_ALIASED", tuple(v.source or constant_source(tx, v.real) for v in group[1:]))


def guard_dicts(tx, found: dict):
    """A dictionary that is the `__dict__` of an object, and was not reached through it: two values as well. An argument, or what a local
    variable held at a graph break, may be that at another call."""
    dicts = {id(v.real): v for v in found.get(dict, ()) if type(v) is DictVal and v.owner is None}
    for obj in itertools.chain.from_iterable(found.values()):
        own = own_fields(obj.real) if type(obj) is ObjVal and obj.cls is not types.ModuleType and (dicts or obj.contents) else None
        if own is None:
            continue
        written = id(obj) in tx.effects.changed
        twin = obj.contents if own is obj.real else dicts.get(id(own))
        if twin is not None and (written or id(twin) in tx.effects.changed):
            raise SkipFrame("an object and its __dict__, and one of them is written to")
        others = tuple(d.source for d in dicts.values() if type(d.source) is LocalSource and (written or id(d) in tx.effects.changed))
        if others and obj.fields is None:
            tx.guards.add(fields_at(obj), "NOT_ALIASED", others)


def guard_namespaces(tx, found: dict):
    """The variables of a Python module are a dictionary, too. A program that has it, as `globals()` behind a graph break or as an
    argument, and writes to it or to the variables, has two values for one thing."""
    met = (v.real for v in tx.objects.tracked.values() if type(v) is ObjVal and is_a(v.real, types.ModuleType))
    spaces = {id(tx.globals.root), *tx.globals.sources, *(id(vars(module)) for module in met)}
    for d in found.get(dict, ()):
        if type(d) is not DictVal or id(d) not in tx.effects.changed and not tx.globals.written:
            continue
        if id(d.real) in spaces or module_of(d.real) is not None:
            raise SkipFrame("the variables of a Python module, also as a dictionary, and one of them is written to")
        if type(d.source) is LocalSource:
            tx.guards.add(d.source, "NOT_ALIASED", GlobalsSource())


# %%
def on_cpu(graph) -> bool:
    """Whether all tensors of the graph are on a CPU."""
    tensors = (x for node in graph.nodes for x in pytree.tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor))
    return all(x.device.type == "cpu" for x in tensors)


# %% [markdown]
# A frame can be evaluated from its beginning after a part of its graph has run, if that part left no trace: it wrote to
# no input, and called nothing of the user's. Random numbers from the default generators are taken back (`keep_generators`).
# Operators of the user's are functions of tensors, or so they promise. Where one raises, the frame is evaluated: that calls it a second
# time, but all that comes before it in the program has happened then, as in eager. Only other processes must not be called twice.

# %%
def leaves_no_trace(tx, draws: bool = False, calls: bool = False) -> bool:
    """Whether running a part of the graph changes nothing but modes. An index out of range is noticed
    by the kernel only, and the program may handle it; then the frame can be evaluated from its beginning. draws: it may
    draw random numbers from the default generators. calls: it may call what the user has promised to be a function of tensors."""
    def harmless(node):
        target = node.target
        if draws and isinstance(node.kwargs.get("generator"), torch.Generator):
            return False
        if isinstance(target, OVERLOADS):
            return not str(target).startswith(COLLECTIVES) if calls else str(target).startswith(("aten.", "prims."))
        return calls or id(target) not in marks.IN_GRAPH

    return tx.tensors.in_memory.keys().isdisjoint(written_storages(tx)) and tx.tensors.mode.draws in (False, draws) and all(
        harmless(n) for n in tx.graph.nodes if n.op == "call_function")


COLLECTIVES = ("c10d", "_c10d", "symm_mem.")


def keep_generators():
    """A function that puts the default generators back to where they are now, and asks for the frame to be evaluated."""
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    states = states_of((torch.default_generator, *cuda))

    def retreat():
        set_states(states)
        return EVALUATE
    return retreat


# %% [markdown]
# The last steps put the graph in order. Guards about sizes are written now, and `frozen` makes any later question
# an error that does not follow from them. Nodes that compute sizes nobody reads are dropped, and the placeholders,
# which were made wherever the trace first touched a tensor, go to the front.

# %%
def close_guards(tx) -> list[tuple[str, bool]]:
    """Decompositions and meta kernels of later stages ask about sizes, too. Now the guards get written: from
    here on a question that they do not answer is an error. Returns `fixed_marks`."""
    guard_sizes(tx)
    tx.symbols.env.frozen = True
    return fixed_marks(tx)


def has_effects(graph) -> bool:
    """Whether some node is worth running although nobody reads it: it writes to a tensor or returns
    nothing."""
    return any(n.op in ("call_function", "call_method") and not is_pure(n) for n in graph.nodes)


def is_pure(node) -> bool:
    """A node may be dropped when nobody reads it: arithmetic on sizes. Dead tensor operations are left for
    later stages, which know the random streams and the writes."""
    return is_symbolic(node.meta.get("val"))


def order_placeholders(graph):
    """Inputs first: a placeholder is created when the trace first touches a tensor, which may be late."""
    first = next((n for n in graph.nodes if n.op != "placeholder"), None)
    for node in list(graph.nodes):
        if node.op == "placeholder" and first is not None:
            first.prepend(node)


# %% tags=["exercise:drop-dead"]
def drop_dead(graph):
    """Forget nodes whose results nobody reads, when running them has no other effect."""
    for node in reversed(list(graph.nodes)):
        if node.op != "placeholder" and not node.users and node.op != "output" and is_pure(node):
            graph.erase_node(node)
