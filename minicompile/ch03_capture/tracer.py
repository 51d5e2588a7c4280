# %% [markdown]
# # The tracer: one capture
#
# What a trace has written so far, and what it has come to know: the graph, the guards, the objects that it has
# met, the effects that wait for the end (`effects.py`). The interpreter (`interpreter.py`) carries a `Tracer`
# through every handler, and everything that a handler leaves behind is in it.
#
# That is no accident of style. A trace may fail at any instruction, and then must leave nothing behind. It is
# thrown away, and a second one is made that stops earlier ([chapter 4](chapter:04)). As no handler writes to a
# global or to an object of the program, throwing away the `Tracer` undoes the whole trace. The one rule for who
# adds a handler: what it has to remember gets a field here.
#
# Take
#
#     def counted(layer, x):
#         layer.calls += 1
#         return layer.norm(x)
#
# with a LayerNorm for `layer.norm`. Reading `layer.calls` adds a guard to `guards`; that this object was
# met, and which value stands for it, is in `objects`, so that a second path to it finds the same value. The
# addition is done at once, on a constant. The write goes to `effects`. `layer.norm` is a module, whose `forward` is inlined, so
# `frames` has two entries for a while, and `x` becomes a placeholder of `graph`, with an entry in `tensors` that
# says where the compiled function will find it. At the end the tracer has
#
#     graph.nodes       [x, layer_norm_weight, layer_norm_bias, layer_norm]
#     tensors.inputs    [x, layer_norm_weight, layer_norm_bias]
#     objects.tracked   layer, layer.norm, x, layer.norm.weight, layer.norm.bias
#     effects.changed   layer: {'calls': 1}
#
# beside the guards, most of them on what was found in classes and modules on the way (`objects.tracked` has those, too).
#
# What belongs together has a record of its own. `Tensors`, `Objects` and `Globals` are what the trace has met, `Symbols` the numbers that
# may be others at the next call. That of classes, `Classes`, is in `lookup.py`, where classes are searched.

# %%
import bisect
import collections
import functools
import inspect
import sys
import types
from dataclasses import dataclass, field
from typing import Any, Callable

import torch

from .. import marks
from ..ch01_graphs.fake import FakeMode
from ..ch01_graphs.graph import Graph, Location
from ..ch01_graphs.shapes import ShapeEnv
from ..ch02_guards.guards import GuardSet
from ..ch02_guards.identity import is_long_lived, module_name
from ..ch02_guards.sources import AttrSource, ConstantSource, GlobalsSource, InstanceDictSource, ItemSource, Source
from ..ch02_guards.torch_guards import FUNCTIONAL_MODULES, named_in
from ..errors import SkipFrame, Unsupported
from .effects import Effects
from .exceptions import interprets, user_error
from .lookup import Classes
from .values import AbstractValue, ObjVal, Table

PYTHON = sys.version_info[:2]


@dataclass(eq=False)
class Tensors:
    """mode: under which operations on fakes run. inputs: placeholder of the graph -> the object that it was made for; of_fake: id of a
    fake -> its value; in_memory: key of a storage -> values of the inputs that lie there; made_in_inference: keys of those whose
    inputs were made in inference mode, where the program is not in it; replaced: names of methods in whose place the program has others."""
    mode: FakeMode = field(default_factory=FakeMode)
    inputs: dict = field(default_factory=dict)
    of_fake: dict = field(default_factory=dict)
    in_memory: dict = field(default_factory=lambda: collections.defaultdict(list))
    made_in_inference: set[int] = field(default_factory=set)
    replaced: frozenset = frozenset()


@dataclass(eq=False)
class Objects:
    """What the trace has met. tracked: id of an object -> the value that stands for it; guarded: (kind of guard, id) -> a class
    or function (`guard_thing`); keep: objects that only the trace knows, and
    whose ids another one would get if they died; constants: id -> (index in `__K`, object); identities: what `id()` gives; unseen:
    source of a constant -> its class and where it was found, or None once it was looked at."""
    tracked: dict = field(default_factory=dict)
    guarded: dict = field(default_factory=dict)
    keep: list = field(default_factory=list)
    constants: dict = field(default_factory=dict)
    identities: dict = field(default_factory=dict)
    unseen: dict = field(default_factory=dict)


@dataclass(eq=False)
class Globals:
    """Namespaces, by id. root: that of the outermost frame; sources: where others are read; written: the values that stand for those
    that are written to; read: (id of a holder, name) -> the value, and the holder (`read_once`)."""
    root: dict
    sources: dict = field(default_factory=dict)
    written: dict = field(default_factory=dict)
    read: dict = field(default_factory=dict)


@dataclass(eq=False)
class Symbols:
    """What may be another number at the next call. env: the questions that were asked about symbols; by_size: size ->
    (symbol, its source); sources: name -> source; nodes: (graph, node of a tensor, dim) -> its symbolic size; numbers: source -> value
    of a Python number; marked: (source, dim, size) of dimensions that the user marked; counters: number -> (its symbol, sources of the
    tensors); results: what was computed from symbolic floats, by operation and operands; assumptions: (tensor that says whether this one
    and all before it hold, location, birth, jump) of each `raise` that was left aside."""
    env: ShapeEnv = field(default_factory=ShapeEnv)
    by_size: dict = field(default_factory=dict)
    sources: dict = field(default_factory=dict)
    nodes: dict = field(default_factory=dict)
    numbers: dict = field(default_factory=dict)
    marked: list = field(default_factory=list)
    counters: dict = field(default_factory=dict)
    results: dict = field(default_factory=dict)
    assumptions: list = field(default_factory=list)


# %% [markdown]
# The tracer itself. `stop_at` is how a graph breaks: the first trace has failed at the outermost frame's thirtieth
# instruction, and a second one, new from the ground up, ends in front of it. Chapters that come later keep what they have to
# remember in `notes`, by a class of their own, so that this record need not know them.

# %%
@dataclass(eq=False)
class Tracer:
    """One capture. The trace ends in front of the outermost frame's instruction number `stop_at`, counted as they are executed."""
    options: Any                                     # CaptureOptions
    globals: Globals
    stop_at: int | None = None
    graph: Graph = field(default_factory=Graph)
    outer: Graph | None = None                       # the graph around `graph`, where that is of a backward (`library/regions.py`)
    lifted: dict = field(default_factory=dict)       # its nodes that are read here -> their placeholders
    guards: GuardSet = field(default_factory=GuardSet)
    tensors: Tensors = field(default_factory=Tensors)
    objects: Objects = field(default_factory=Objects)
    classes: Classes = field(default_factory=Classes)
    effects: Effects = field(default_factory=Effects)
    symbols: Symbols = field(default_factory=Symbols)
    frames: list = field(default_factory=list)       # the calls that are being interpreted, outermost first
    contexts: list = field(default_factory=list)     # the context managers that the program is in
    path: list = field(default_factory=list)         # of the outermost frame: (position, births until then)
    notes: dict = field(default_factory=dict)        # what later chapters have to remember: a record each, by its class
    ops: int = 0                                     # instructions interpreted, in all frames
    told: bool = False                               # the program was told that it is being compiled
    loop: Any = None                                 # of a loop that began before this frame: its iterator, weakly


def notes_of(tx: Tracer, record: type):
    """The record of this class that a later chapter keeps of the trace."""
    return tx.notes.get(record) or tx.notes.setdefault(record, record())


# %% [markdown]
# ## Where are we?
#
# Every node of the graph remembers the line of the *user's* program that caused it: the innermost frame
# whose file is not part of torch or of the standard library. `Linear.forward` says nothing to a reader;
# `model.py:94` does.
#
# A call chain lists all frames, and `unsupported` raises a break that carries the place. Under `fullgraph=True` the program
#
#     def total(x):
#         return x * x.sum().item()
#
#     def shifted(x):
#         return total(x + 1)
#
# is refused with words, among which these come from here:
#
#     model.py in total
#     return x * x.sum().item()
#     ^^^^^^^^^^^^^^
#     called from model.py in shifted
#
# `step_of` answers another question of place. What the trace makes is numbered (`born`), and `path` has the numbers that were
# reached after each instruction of the outermost frame. If the epilogue finds an object that it cannot rebuild, the two tell
# in which instruction it was made, and the graph can break before that.

# %%
LIBRARY_ROOTS = (torch.__path__[0] + "/", inspect.__file__.rsplit("/", 1)[0] + "/", "<frozen", "<minicompile")


@functools.lru_cache(1000)
def is_library(filename: str) -> bool:
    """Whether a file belongs to torch or the standard library."""
    return filename.startswith(LIBRARY_ROOTS) and "site-packages" not in filename.replace(LIBRARY_ROOTS[0], "")


def line_of(frame) -> int:
    return frame.decoded.lines[max(frame.ip - 1, 0)]


OUR_CHAPTERS = marks.__file__.removesuffix("marks.py") + "ch"        # chapters write some functions of PyTorch in Python


@functools.lru_cache(1000)
def is_users(filename: str) -> bool:
    return not is_library(filename) and not filename.startswith(OUR_CHAPTERS)


def user_frame(tx: Tracer):
    for frame in reversed(tx.frames):
        if is_users(frame.code.co_filename):
            return frame
    return tx.frames[0]


def location(tx: Tracer):
    """The user's innermost line, or None outside any frame."""
    if not tx.frames:
        return None
    frame = user_frame(tx)
    if frame.place is None or frame.place[0] != frame.ip:        # it is asked for again and again
        name, i = frame.code.co_name, frame.decoded.instructions[max(frame.ip - 1, 0)]
        frame.place = frame.ip, Location(frame.code.co_filename, line_of(frame), name, i.offset & ~1)
    return frame.place[1]


def call_chain(tx: Tracer) -> list:
    """Lines from the outermost frame inwards, for messages."""
    return [f"{f.code.co_filename}:{line_of(f)} in {f.code.co_name}" for f in tx.frames]


def unsupported(tx: Tracer, reason: str):
    """Give up on the current instruction: a graph break."""
    raise say_where(tx, Unsupported(reason, location(tx)))


def step_of(tx: Tracer, born: int) -> int:
    """The step of the outermost frame in which something was made; -1 when that is not known."""
    return bisect.bisect_left([birth for _, birth in tx.path], born) - 1 if born else -1


def plain_python(tx: Tracer, reason: str):
    """Give up on the innermost frame. If it is not the outermost one, this is a break like any other; it then
    comes here as a frame of its own."""
    if len(tx.frames) == 1:
        raise SkipFrame(reason, location(tx))
    unsupported(tx, reason)


def say_where(tx: Tracer, error: Unsupported) -> Unsupported:
    """The error, with the call chain and the columns of the expression in the user's innermost line."""
    frame = user_frame(tx)
    error.chain = call_chain(tx)
    error.position = frame.decoded.instructions[max(frame.ip - 1, 0)].positions
    error.location = error.location or location(tx)
    return error


# %% [markdown]
# ## Guards and constants
#
# A guard is recorded with the line that needed it, so that a recompile can say why. Objects that the generated function must
# name but cannot spell go to its constant pool `__K`. A guard of `answer` or `bases` has no source, since it is about no
# variable of the program: the one asks a question of the world again in each call, such as whether a package is installed, the
# other asks whether a class still has the bases that it had (where it lives as long as the process, that is not asked).

# %%
def guard(tx: Tracer, source: Source | None, kind: str, expected=None):
    """Record a guard; no source means that the object is a constant of the trace."""
    if source is not None and not isinstance(source, ConstantSource):
        tx.guards.add(source, kind, expected, location(tx))


def answer(tx: Tracer, function, *args):
    """function(*args), now and in each call: a guard asks again."""
    result = function(*args)
    tx.guards.add(None, "ANSWER", (function, args, result), location(tx))
    return result


def guard_thing(tx: Tracer, kind: str, thing, *facts):
    """Record facts about a class or function, which are the same throughout the trace, and are asked for again and again."""
    if (kind, id(thing)) not in tx.objects.guarded:
        tx.objects.guarded[kind, id(thing)] = thing
        tx.guards.add(None, kind, (thing, *facts), location(tx))


def bases(tx: Tracer, cls: type) -> tuple:
    """`cls.__mro__`, which is guarded."""
    if cls not in tx.classes.made and not is_long_lived(cls):
        guard_thing(tx, "BASES", cls, cls.__mro__)
    return cls.__mro__


def constant_source(tx: Tracer, real) -> ConstantSource:
    index, _ = tx.objects.constants.setdefault(id(real), (len(tx.objects.constants), real))
    return ConstantSource.of(index, real)


# %% [markdown]
# A global variable is read from its namespace, a dictionary, and the generated text has to name that dictionary.
# The globals of inlined functions are read from their Python module, or from a function that has them. Those
# of the function that is being called are `__G`. Entries belong to code, and another function of the same code
# may have other globals (`exec` of one code object in two namespaces), so an entry that takes `__G` for the
# globals of something else as well asks whether it still is.

# %%
def module_of(namespace: dict) -> types.ModuleType | None:
    """The Python module whose globals these are, if it is still the one that is imported by this name."""
    module = sys.modules.get(module_name(namespace))
    return module if type(module) is types.ModuleType and vars(module) is namespace else None


def globals_of(tx: Tracer, namespace: dict) -> Source:
    """Where a namespace is read."""
    module = module_of(namespace)
    if namespace is tx.globals.root:
        if module is None:
            return GlobalsSource()
        tx.guards.add(None, "GLOBALS", module, location(tx))
    if module is not None:
        return InstanceDictSource(constant_source(tx, module))
    return tx.globals.sources.get(id(namespace)) or constant_source(tx, namespace)


def enter_namespace(tx: Tracer, function: types.FunctionType, source: Source | None):
    """`function` is inlined. source: where it is read if it may be another one next time."""
    namespace = function.__globals__
    if namespace is not tx.globals.root:
        if module_of(namespace) is None:
            at = constant_source(tx, function) if source is None else source
            tx.globals.sources.setdefault(id(namespace), AttrSource(at, "__globals__"))
    elif source is not None:
        guard(tx, source, "GLOBALS")
    else:
        tx.guards.add(None, "GLOBALS", module_of(namespace) or function, location(tx))


def writable_globals(tx: Tracer, namespace: dict) -> ObjVal:
    """What stands for a namespace; `attrs` is what the program writes there."""
    if id(namespace) not in tx.globals.written:
        source = GlobalsSource() if namespace is tx.globals.root else globals_of(tx, namespace)
        tx.globals.written[id(namespace)] = ObjVal(real=namespace, cls=types.ModuleType, source=source)
    return tx.globals.written[id(namespace)]


def read_once(tx: Tracer, holder, name: str, read: Callable[[], AbstractValue]) -> AbstractValue:
    """What `read()` gives for a global variable, or for an attribute of a Python module, that the trace has not written to. Loops read the
    same few again and again, and one guard is enough. holder: a namespace or a module."""
    found, _ = tx.globals.read.get((id(holder), name), (None, None))
    if found is None:
        found = read()
        if type(found) is ObjVal:                        # a constant is made anew
            tx.globals.read[id(holder), name] = found, holder
    return found


def written_global(tx: Tracer, namespace: dict, name: str):
    """What the program wrote to a global variable (DELETED if it deleted it), or None."""
    value = tx.globals.written.get(id(namespace))
    return value and value.attrs.get(name)


def names_its_own(tx: Tracer, function: types.FunctionType) -> bool:
    """Whether what a function of PyTorch calls is PyTorch's, which is guarded. One for which the program has put in others is no
    function that is known. (Of the program's own functions nothing is known anyway.)"""
    if function.__globals__.get("__name__") not in FUNCTIONAL_MODULES:
        return True
    places, names = named_in(function)
    if not tx.tensors.replaced.isdisjoint(names):
        return False
    if any(vars(m).get(name) is not own or written_global(tx, vars(m), name) is not None for (m, name), own in places.items()):
        return False
    if places:
        guard_thing(tx, "NAMED_IN", function, tuple(
            (ItemSource(InstanceDictSource(constant_source(tx, module)), name), own) for (module, name), own in places.items()))
    return True


# %% [markdown]
# ## Calls
#
# What a call does depends on the kind of value that is called; `calls.py` fills the table.

# %%
CALLS = Table()                       # kind of value -> function(tx, callee, args, kwargs)


@interprets
def call(tx: Tracer, callee: AbstractValue, args, kwargs=None) -> AbstractValue:
    """callee(*args, **kwargs); args: list of values, kwargs: dict of values."""
    if type(callee) not in CALLS:
        user_error(TypeError, f"'{callee.cls.__name__}' object is not callable")
    return CALLS[type(callee)](tx, callee, args, kwargs or {})
