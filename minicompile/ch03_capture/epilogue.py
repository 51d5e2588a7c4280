# %% [markdown]
# # The epilogue: back from values to objects
#
# The graph has run and its outputs are real tensors. What remains of the call is to build the objects that
# it returns and to apply the side effects that were only recorded. Both are written as Python text. Of
#
#     def refreshed(model, x):
#         old, model.cache = model.cache, x * 2
#         return [x + 1, old]
#
# the graph computes `x + 1` and `x * 2`, and this follows it:
#
#     __t1 = model.cache
#     __t2 = [__out[0], __t1, ]
#     model.cache = __out[1]
#     return __t2
#
# First everything is read that is needed, and objects are built; then it is written to what existed before.
# Reading comes first because a side effect may overwrite what a later line wants to read: after `a.x, a.y =
# a.y, a.x` the new `a.y` is the old `a.x`. An object that existed before the call is named by its source,
# never copied, so identity survives; an object of the trace is built once and named by a variable, so two
# references stay one object.

# %%
import collections
import contextlib
import functools
import itertools
import math
import re
import types
from dataclasses import dataclass, field

import torch

from ..ch01_graphs.graph import known_history
from ..ch02_guards.guards import class_lookup
from ..ch02_guards.identity import module_name
from ..ch02_guards.sources import ConstantSource, LocalSource, is_plain, readable
from ..errors import SkipFrame, Unsupported
from . import hook
from .effects import difference_of_dicts, difference_of_lists, settled
from .iterate import PLAIN_ITERATORS
from .keys import is_plain_key, value_of_key
from .lookup import class_in_c, native, native_new
from .tracer import Tracer, constant_source, globals_of, location
from .values import (
    AbstractValue, ByIdentity, ByValue, CellVal, Const, DELETED, DictVal, ExcVal, FuncVal, Identity, IterVal, Lazy, ListVal,
    MethodName, MethodVal, ObjVal, PartialVal, SetVal, SliceVal, SymVal, Table, TensorVal, TracebackVal, TupleVal, ViewVal,
    const, describe, is_unseen, like)
from .wrap import source_of_item


@dataclass(eq=False)
class Epilogue:
    """The text under construction. `reads` come before `writes`, and iterators over what is written to are
    made `late`, name -> text; `outputs` are the nodes that the graph returns, `weak` the indices of constants
    that the text names but the entry does not own, `unspent` the tensors that leave and can be differentiated."""
    tx: Tracer
    reads: list = field(default_factory=list)
    writes: list = field(default_factory=list)
    late: dict = field(default_factory=dict)
    outputs: list = field(default_factory=list)
    names: dict = field(default_factory=dict)
    weak: dict = field(default_factory=dict)
    unspent: list = field(default_factory=list)
    building: set = field(default_factory=set)


# %% [markdown]
# `expression` is what all of this calls. A constant is its text. What has a source is read from there, once, into a variable.
# An object of the trace is built by the function for its kind, below, and gets a variable, too, so that the second reference
# finds it in `names`. While it is being built it is in `building`: whoever comes back to it there would contain itself. A
# container that existed before is named as an object (`pool`), since its contents are not the text's concern. What has no
# function cannot leave (`refuse_to_leave`).

# %%
RECONSTRUCT = Table()                # kind of value -> function(ep, value) -> Python expression
reconstructs = RECONSTRUCT.of
NESTED = 100                         # a few calls of ours for each, of the thousand that Python allows


def expression(ep: Epilogue, value) -> str:
    """A Python expression for `value`, short enough to be repeated: a literal or a variable."""
    value = settled(value)
    if type(value) is Const and value.source is None and not is_unseen(value):
        return constant_text(ep, value.value)
    if type(value) is Lazy:
        return constant_text(ep, value.real) if value.source is None else \
            ep.names.get(value) or variable(ep, value, source_of_item(ep.tx, value).text())
    name = ep.names.get(value)
    if name is not None:
        return name
    if value.source is not None:
        if isinstance(value.source, (LocalSource, ConstantSource)):
            ep.names[value] = source_text(ep, value.source)
            return ep.names[value]
        return variable(ep, value, source_text(ep, value.source))
    if value in ep.building:
        raise Unsupported(f"{describe(value)} that contains itself", location(ep.tx))
    if type(value) in (ListVal, DictVal, SetVal) and value.real is not None:
        return pool(ep, value.real)
    if len(ep.building) >= NESTED:
        raise SkipFrame(f"an object inside of {NESTED} others leaves the compiled function", location(ep.tx))
    ep.building.add(value)
    if type(value) not in RECONSTRUCT:
        refuse_to_leave(ep, describe(value), value)
    text = RECONSTRUCT[type(value)](ep, value)
    ep.building.discard(value)
    return variable(ep, value, text)


def refuse_to_leave(ep, what, value=None):
    """What cannot be rebuilt. If it is known when it was made, the graph can break there, before it is."""
    made = value.node.meta if type(value) is TensorVal else vars(value) if value is not None else {}
    raise Unsupported(f"{what} leaves the compiled function", made.get("location") or location(ep.tx), made.get("born", 0))


def variable(ep, value, text) -> str:
    """Read `text` once, now, and name it."""
    if value not in ep.names:
        name = ep.names[value] = f"__t{len(ep.names)}"
        ep.reads.append(f"{name} = {text}")
    return ep.names[value]


def constant_text(ep, value) -> str:
    kind = type(value)
    if value is None or kind in (bool, int, str, bytes) or kind is float and math.isfinite(value):
        return readable(value)
    if value is Ellipsis:
        return "..."
    if kind is Identity:
        numbers = ep.tx.objects.identities
        found = [(f, v) for v in ep.tx.objects.keep for f in (id, hash) if numbers.get((f, id(v))) == int(value)]
        if not found:
            refuse_to_leave(ep, "the id() of an object")
        function, of = found[0]
        return f"{pool(ep, function)}({expression(ep, of)})"
    return pool(ep, value)


def pool(ep, real) -> str:
    return source_text(ep, constant_source(ep.tx, real))


def source_text(ep, source) -> str:
    """What the entry does not own, it holds from its guards to its end."""
    if not isinstance(source, ConstantSource) or not source.is_weak:
        return source.text()
    ep.weak[source.index] = True
    return f"__k{source.index}"


def expressions(ep, values) -> str:
    return "".join(expression(ep, v) + ", " for v in values)


def keywords(ep, named) -> str:
    return "".join((f"{k}={text}, " if is_plain(k) else f"**{{{k!r}: {text}}}, ") for k, v in named.items() for text in [expression(ep, v)])


# %% [markdown]
# ## Each kind of value
#
# One function for each kind of value gives a Python expression that makes such an object when the generated
# code runs. A tensor is an output of the graph, by its position. A tuple, a list or a dictionary is a
# display of the expressions of its items. A class other than the builtin one is called, or, for classes
# whose `__init__` must not run twice, filled by hand.
#
# Order matters where an object may contain itself, or is named before it is complete. So an object is first
# made empty and given a name, and then its attributes are set, one line each. A cell of a closure is made
# before the function that holds it, and filled after it, because what it holds may be that very function.
# Iterators are remade from what they iterate over and how far they had come.
#
# Some values cannot leave: a generator, a class that the trace has made. They
# raise Unsupported, with the place where the value was made. If this place is known, the graph is broken in
# front of it, and CPython makes the object.

# %%
@reconstructs(TensorVal, SymVal)
def tensor_text(ep, value):
    if type(value) is SymVal:                   # a number that came in may be the whole of a graph, which then need not run
        came_in = value.node.op == "placeholder"
        number = source_text(ep, value.node.meta["source"]) if came_in else output_text(ep, value.node)
        return f"{pool(ep, value.scalar)}({number})" if value.scalar else number
    if type(value) is TensorVal and value.fake.requires_grad:
        return differentiable_text(ep, value)
    if type(value) is TensorVal and value.made is torch.nn.Parameter:
        return f"{pool(ep, torch.nn.Parameter)}({output_text(ep, value.node)}, False)"
    ep.names[value] = output_text(ep, value.node)
    return ep.names[value]


HISTORIES: list = []         # function(ep, tensor) -> its expression, if it does not leave with the history that the graph gives it


def differentiable_text(ep, value):
    for history_text in HISTORIES:
        if text := history_text(ep, value):
            return text
    ep.unspent.append(value)
    if not value.fake._is_view() and value.fake.grad_fn is None:
        return f"{pool(ep, torch.nn.Parameter if value.made is torch.nn.Parameter else new_leaf)}({output_text(ep, value.node)})"
    ep.names[value] = output_text(ep, value.node)
    return ep.names[value]


def output_text(ep, node) -> str:
    if node not in ep.outputs:
        ep.outputs.append(node)
    return f"__out[{ep.outputs.index(node)}]"


# %% [markdown]
# A leaf that the trace has made leaves as a new leaf. Nothing else that leaves, as a result or as an input that was written, may
# lead back to it, since the graph has another one; nor to such leaves only, since then the graph does not know that it requires a gradient.
# Each of these ends the graph before the leaf is made.

# %%
def new_leaf(tensor):
    return tensor.detach().requires_grad_()


def leaves_in(history) -> dict:
    return {id(n.variable): n.variable for n in history if type(n).__name__ == "AccumulateGrad"}


def written_with_history(tx) -> list[TensorVal]:
    """The inputs that have a history and were written."""
    return [t for t in tx.tensors.of_fake.values() if t.real is not None and t.fake.grad_fn is not None and t.fake._version != t.version]


def refuse_made_leaves(ep):
    for value in (*ep.unspent, *written_with_history(ep.tx)):
        history = known_history(value.fake)
        leaves = [ep.tx.tensors.of_fake[key] for key in leaves_in(history) if key in ep.tx.tensors.of_fake]
        made = [leaf for leaf in leaves if leaf.real is None or leaf.node.op != "placeholder"]
        alone = len(made) == len(leaves) and not any(type(n).__name__ == "EnterBackward" for n in history)
        for leaf in made:
            if alone or leaf in ep.unspent or leaf.real is not None:
                refuse_to_leave(ep, "a tensor that depends on a leaf that the function has made", leaf)


# %% [markdown]
# Now the kinds, one function each. Containers first. `expressions` writes the items, `pool` gives a name to an
# object that the generated code has to know, such as the class of a named tuple, and what cannot be built outside
# of the trace is refused, which makes the trace break before it.

# %%
@reconstructs(TupleVal)
def tuple_text(ep, value):
    if value.cls in ep.tx.classes.made:
        refuse_to_leave(ep, f"a {value.cls.__name__}, of a class made by the trace,", ep.tx.objects.tracked[id(value.cls)])
    items = expressions(ep, value.items)
    return f"({items})" if value.cls is tuple else f"{pool(ep, native_new(value.cls))}({pool(ep, value.cls)}, ({items}))"


@reconstructs(ListVal)
def list_text(ep, value):
    if value.cls is list:
        return f"[{expressions(ep, value.items)}]"
    return f"{pool(ep, value.cls)}([{expressions(ep, value.items)}], {value.items.maxlen})"


@reconstructs(DictVal)
def dict_text(ep, value):
    if type(value.owner) is Const:
        refuse_to_leave(ep, "the __dict__ of a function or an exception", value)
    if value.owner is not None:
        return f"{expression(ep, value.owner)}.{'keywords' if type(value.owner) is PartialVal else '__dict__'}"
    pairs = ", ".join(f"{expression(ep, k)}: {expression(ep, v)}" for k, v in value.items.values())
    if value.cls is dict:
        return "{" + pairs + "}"
    if value.factory is not None:
        return f"{pool(ep, value.cls)}({expression(ep, value.factory)}, {{{pairs}}})"
    if value.attrs:
        name = variable(ep, value, f"{pool(ep, value.cls)}({{{pairs}}})")
        return with_attributes(ep, name, value.attrs)
    first = "None, " if value.cls.__name__ == "defaultdict" else ""
    return f"{pool(ep, value.cls)}({first}{{{pairs}}})"


@reconstructs(Const)
def recipe_text(ep, value):
    """Of a constant that nobody has looked at, and that is made of others."""
    function, args, named = value.recipe
    return f"{pool(ep, function)}({expressions(ep, args)}{keywords(ep, named)})"


def set_content(ep, value) -> str:
    """What an empty set becomes this one by. The order of what hashes by identity is another one in each run, in eager too."""
    plain = all(map(is_plain_key, value.keys))
    content = like(value.keys, copied=plain)
    if content is None and not any(type(key) is ByIdentity for key in value.keys):
        refuse_to_leave(ep, "a set whose copy would have another order", value)
    return pool(ep, content) if plain else f"[{expressions(ep, [value_of_key(ep.tx, key) for key in content or value.keys])}]"


# %% [markdown]
# An iterator has a position. If it runs over a container that exists outside of the trace, the code makes a new
# one over this container and takes as many items as the trace has taken. What was made by `zip` and the
# like is made by it again, of the iterators that it takes from. If there is neither, the values that are left are put into a tuple.

# %%
@reconstructs(IterVal)
def iterator_text(ep, value):
    """Where the loop has come to: a real iterator over the real container, or over the values that are left.
    Over what the trace has changed it is made after the change: there may be no such position before. Dictionaries, sets and deques do
    not let themselves be changed while somebody iterates over them, so for these it matters whether the trace did so before it made
    the iterator."""
    if value.over is not None:
        if not value.unchanged():
            refuse_to_leave(ep, "an iterator over what has changed meanwhile", value)
        text = f"{pool(ep, iterator_at)}({expression(ep, value.over)}, {value.taken})"
        container = value.over.of if type(value.over) is ViewVal else value.over
        written = container.owner or container if type(container) is DictVal else container
        if id(written) in ep.tx.effects.changed:
            name = ep.names[value] = f"__t{len(ep.names)}"
            ep.late[name] = value, f"{name} = {text}"
        else:
            variable(ep, value, text)
        return ep.names[value]
    if value.made:
        return made_again(ep, value)
    if type(value.it) not in PLAIN_ITERATORS:
        refuse_to_leave(ep, "an iterator", value)
    return f"iter(({expressions(ep, value.it)}))"


def made_again(ep, value):
    """A `zip` has come as far as the iterators that it takes from, and they leave where they are. What counts goes on from its
    count. Others have forgotten what they were made by when something was asked of them."""
    function, args, named = value.made
    if value.taken and function in (enumerate, itertools.count):
        if len(args) != 1 + (function is enumerate) or named or type(args[-1]) is not Const or not isinstance(args[-1].value, int):
            refuse_to_leave(ep, "an iterator", value)
        args = [*args[:-1], const(args[-1].value + value.taken)]
    text = f"{pool(ep, function)}({expressions(ep, args)}{keywords(ep, named)})"
    if not any(re.search(rf"\b{name}\b", text) for name in ep.late):
        return text
    name = ep.names[value] = f"__t{len(ep.names)}"
    ep.late[name] = value, f"{name} = {text}"
    return name


def iterator_at(container, taken: int):
    """An iterator over what a container holds, whatever its class gives out, after `taken` items were taken from it."""
    iterator = native(type(container), "__iter__")(container)
    if hasattr(iterator, "__setstate__"):
        iterator.__setstate__(taken)
    else:
        collections.deque(itertools.islice(iterator, taken), 0)
    return iterator

# %% [markdown]
# An object that the trace has made is created without its `__init__`, whose effects the trace has seen. It
# gets its name before its attributes are set, because an attribute may refer to it. An exception is made by
# its class's `__new__`, and initialised by the nearest class that is written in C. Its traceback lists the frames that it came
# through, of which there is none, as the trace has not run them. C makes frames for this purpose that nobody runs. A function is
# put together from its code, its defaults and its cells.

# %%
@reconstructs(ObjVal)
def object_text(ep, value):
    bound = type(value.real) in (types.BuiltinFunctionType, types.MethodWrapperType)           # a class method in C
    cls = value.real.__self__ if bound else value.real
    if value.cls in ep.tx.classes.made or isinstance(cls, type) and cls in ep.tx.classes.made:
        refuse_to_leave(ep, f"{describe(value)}, of a class made by the trace,", ep.tx.objects.tracked[id(cls)] if bound else value)
    if value.real is not None:
        kind = type(value.real)
        if module_name(kind).startswith("torch.autograd") or "Backward" in kind.__name__:
            refuse_to_leave(ep, "a node of the autograd graph")
        return pool(ep, value.real)
    base = value.contents.cls if value.contents is not None else \
        value.cls if value.cls is types.SimpleNamespace else object
    name = variable(ep, value, f"{pool(ep, base.__new__)}({pool(ep, value.cls)})")
    if type(value.contents) is ListVal:
        ep.reads.append(f"{pool(ep, list.extend)}({name}, [{expressions(ep, value.contents.items)}])")
    elif value.contents is not None:
        for k, v in value.contents.items.values():
            ep.reads.append(f"{pool(ep, base.__setitem__)}({name}, {expression(ep, k)}, {expression(ep, v)})")
    return with_attributes(ep, name, value.attrs, pool(ep, object.__setattr__))


@reconstructs(ExcVal)
def exception_text(ep, value):
    if type(value.cls.__new__) is not types.BuiltinFunctionType:
        refuse_to_leave(ep, describe(value), value)
    args = expressions(ep, value.args)
    name = variable(ep, value, f"{pool(ep, value.cls.__new__)}({pool(ep, value.cls)}, {args})")
    ep.reads.append(f"{pool(ep, class_in_c(value.cls).__init__)}({name}, {args})")       # `args`, and others such as `value`
    links = {"__cause__": value.cause, "__context__": value.context, "__traceback__": value.traceback if value.seen else None}
    return with_attributes(ep, name, {**value.attrs, **{k: v for k, v in links.items() if v is not None}})


@reconstructs(TracebackVal)
def traceback_text(ep, value):
    entries = "".join(f"({pool(ep, code)}, {namespace_text(ep, namespace)}, {offset}, {line}), "
                      for code, namespace, offset, line in value.passed)
    return variable(ep, value, f"{pool(ep, traceback_of)}(({entries}))")


def traceback_of(passed: tuple) -> types.TracebackType | None:
    """A traceback with these entries (`TracebackVal`). Its frames have no locals, and no callers, which they would keep."""
    found = None
    for code, namespace, offset, line in passed:
        whole = code.replace(co_freevars=()) if code.co_freevars else code          # there are no cells for them
        found = types.TracebackType(found, hook.frame_of(whole, namespace), offset, line)
    return found


# %% [markdown]
# A function is made by `types.FunctionType`, from the parts that the trace knows. Cells can be shared by several
# functions, and a recursive function is in a cell of its own closure. So the empty cells are made first, then the
# function, and then the cells are filled. Defaults of keywords and attributes have to be set afterwards.

# %%
@reconstructs(FuncVal)
def function_text(ep, value):
    globals_text = namespace_text(ep, value.globals)
    name = ep.names[value] = f"__t{len(ep.names)}"
    new = [c for c in value.closure if c.source is None and c not in ep.names]
    cells = "".join((variable(ep, c, "__new_cell()") if c in new else expression(ep, c)) + ", "
                    for c in value.closure)
    defaults = f"({expressions(ep, value.defaults)})" if value.defaults else "None"
    ep.reads.append(f"{name} = {pool(ep, types.FunctionType)}({pool(ep, value.code)}, {globals_text}, "
                    f"{value.name!r}, {defaults}, ({cells}))")
    if value.kwdefaults:
        pairs = ", ".join(f"{k!r}: {expression(ep, v)}" for k, v in value.kwdefaults.items())
        ep.reads.append(f"{name}.__kwdefaults__ = {{{pairs}}}")
    for cell in new:                                 # what it holds may be this function
        fill_cell(ep, cell, ep.names[cell])
    return with_attributes(ep, name, value.attrs)


def namespace_text(ep, namespace: dict) -> str:
    return "__G" if namespace is ep.tx.globals.root else globals_of(ep.tx, namespace).text()


def with_attributes(ep, name, attributes, setter="setattr") -> str:
    """`name`, after setting attributes of what it names."""
    for attribute, item in attributes.items():
        ep.reads.append(f"{setter}({name}, {attribute!r}, {expression(ep, item)})")
    return name


@reconstructs(CellVal)
def cell_text(ep, value):
    name = variable(ep, value, "__new_cell()")
    fill_cell(ep, value, name)
    return name


def fill_cell(ep, value, name):
    if value.content is not None:
        content = expression(ep, value.content)
        ep.reads.append(f"{name}.cell_contents = {content}")


# %% [markdown]
# The others are small: a set, a view, a slice, a bound method, a partial. (Context managers: `library/contexts.py`.) A method of C is
# fetched from the class that has it in C, where an attribute of the object or a method of the program may have its name, and call it.

# %%
def fetch_method(owner, name: str):
    methods = (vars(cls)[name] for cls in type(owner).__mro__ if name in vars(cls))
    return next(m for m in methods if not isinstance(m, types.FunctionType)).__get__(owner, type(owner))


def rebuild_method(ep, value: MethodName) -> str:
    owner = expression(ep, value.self)
    cls = value.self.cls
    own = type(value.self) is not TensorVal and (
        cls.__dictoffset__ != 0 or isinstance(class_lookup(cls, value.name), types.FunctionType))
    return f"{pool(ep, fetch_method)}({owner}, {value.name!r})" if own else f"({owner}).{value.name}"


RECONSTRUCT.update({
    SetVal: lambda ep, value: f"{pool(ep, value.cls)}({set_content(ep, value)})",
    ViewVal: lambda ep, value: f"{pool(ep, native(value.of.cls, value.kind))}({expression(ep, value.of)})",
    SliceVal: lambda ep, value: f"slice({expressions(ep, (value.start, value.stop, value.step))})",
    MethodVal: lambda ep, value: f"{pool(ep, types.MethodType)}({expressions(ep, (value.func, value.self))})",
    MethodName: rebuild_method,
})


@reconstructs(PartialVal)
def partial_text(ep, value):
    args = expressions(ep, (value.func, *value.args))
    name = variable(ep, value, f"{pool(ep, functools.partial)}({args}{keywords(ep, {k: v for k, (_, v) in value.keywords.items.items()})})")
    return with_attributes(ep, name, value.attrs)


# %% [markdown]
# ## Side effects
#
# For each object that existed before and was written to, statements that make the difference between what it
# held then and what it holds now (`effects.py`). They change it in place, because others may hold it too.

# %%
ENDINGS: list = []           # function(ep): writes, or refuses, what later chapters have noted
AHEAD: list = []             # function(ep) -> lines of text that run before the graph


def write_effects(ep: Epilogue):
    """Text for everything the program changed outside of itself. An iterator is asked before what it goes over changes."""
    call_all(ep, ep.tx.effects.calls_before)
    for value, before in list(ep.tx.effects.changed.values()):
        WRITERS[type(value)](ep, value, before)
    for write in ENDINGS:
        write(ep)
    refuse_made_leaves(ep)
    call_all(ep, ep.tx.effects.calls)


def call_all(ep, calls):
    for function, args in calls:
        ep.writes.append(f"{pool(ep, function)}({expressions(ep, args)})")

# %% [markdown]
# One writer for each kind of object turns a difference into lines. A list gets one assignment of a slice,
# or an `extend` where something was only appended. (A deque has no slices: it is cleared and filled.) A
# dictionary gets a deletion for each key that is gone and an assignment for each that was written, in the order of the program: at
# another call these keys may be new. A set is
# cleared and filled, since the order of a set is that of its history. An object gets its attributes. Where
# the class has a `__setattr__` or a `__setitem__` of its own, that has run during the trace already, so it
# must not run again: the generated text calls the method of the builtin class.

# %%
def write_list(ep, value, before):
    start, stop, new = difference_of_lists(before, value.items)
    if start == stop and not new:
        return
    target, items = expression(ep, value), expressions(ep, value.items if value.cls is not list else new)
    if value.cls is not list:
        ep.writes.append(f"{target}.clear()")
    appends, derived = value.cls is not list or start == len(before), type(value.real) is not value.cls
    if derived:                                              # then the class may override these methods
        change, at = (list.extend, "") if appends else (list.__setitem__, f"{pool(ep, slice)}({start}, {stop}), ")
        ep.writes.append(f"{pool(ep, change)}({target}, {at}[{items}])")
    else:
        ep.writes.append(f"{target}.extend([{items}])" if appends else f"{target}[{start}:{stop}] = [{items}]")


def write_dict(ep, value, before):
    target, (gone, written) = expression(ep, value), difference_of_dicts(before, value.items)
    for key in gone:
        pop = pool(ep, collections.OrderedDict.pop if value.cls is collections.OrderedDict else dict.pop)
        ep.writes.append(f"{pop}({target}, {key_expression(ep, key)}, None)")
    if not gone:                                             # else all keys are guarded
        written.sort(key=lambda pair: value.writes.get(id(pair[0]), 0))
    for pair in written:
        k, v = (expression(ep, item) for item in pair)
        derived = type(value.real) is not value.cls          # then the class may override `__setitem__`
        ep.writes.append(f"{pool(ep, value.cls.__setitem__)}({target}, {k}, {v})" if derived else f"{target}[{k}] = {v}")


def key_expression(ep, key):
    if isinstance(key, ByValue):
        return expression(ep, key.value)
    if isinstance(key, ByIdentity):
        return expression(ep, key.value) if isinstance(key.value, AbstractValue) else pool(ep, key.value)
    if type(key) is tuple:
        return "(" + "".join(f"{key_expression(ep, part)}, " for part in key) + ")"
    return constant_text(ep, key)


def write_set(ep, value, before):
    if list(value.keys) != list(before):
        target = expression(ep, value)
        ep.writes.append(f"{target}.clear()")
        ep.writes.append(f"{target}.update({set_content(ep, value)})")


def write_object(ep, value, before):
    """Attributes of an object, or names in a namespace."""
    target, plain = expression(ep, value), value.cls.__setattr__ in (object.__setattr__, type.__setattr__, torch.nn.Module.__setattr__)
    for name, item in value.attrs.items():
        if value.cls is types.ModuleType:
            ep.writes.append(f"{target}.pop({name!r}, None)" if item is DELETED else f"{target}[{name!r}] = {expression(ep, item)}")
            continue
        if item is DELETED or name in value.moved:
            ep.writes.append(f"{pool(ep, delete_attribute)}({target}, {name!r})")
        if item is DELETED:
            continue
        if plain and is_plain(name) and not name.startswith("__"):
            ep.writes.append(f"{target}.{name} = {expression(ep, item)}")
        else:
            ep.writes.append(f"{pool(ep, object.__setattr__)}({target}, {name!r}, {expression(ep, item)})")


def delete_attribute(obj, name):
    """Delete an attribute, which the program may have written just before: then there need not be one now."""
    with contextlib.suppress(AttributeError):
        object.__delattr__(obj, name)


def write_cell(ep, value, before):
    if settled(value.content) is not settled(before):
        ep.writes.append(f"{expression(ep, value)}.cell_contents = {expression(ep, value.content)}")


WRITERS = {ListVal: write_list, DictVal: write_dict, SetVal: write_set, ObjVal: write_object,
           CellVal: write_cell}
