# %% [markdown]
# # Guards: may yesterday's graph be used again?
#
# *When may a recording be used again?* Capturing a function costs milliseconds, running its graph microseconds. So
# a graph has to be used many times. But it was made for one call, and the next call may bring another shape,
# another setting, another model. This chapter decides, at each call and in about a microsecond, whether the graph
# is still right.
#
# The decision has to be fast, and it must never be wrong in one direction. To compile once too often costs time. To
# use a graph that does not fit gives wrong numbers, without any error.

# %%

import torch
import torch.nn as nn
import torch.nn.functional as F

import minicompile
from chapters import tiny
from chapters._lib import (
    Block,
    Table,
    Walk,
    bars,
    best_time,
    check_of,
    drawing,
    example,
    folded,
    head,
    lines,
    results,
    tidy,
    watch,
    watching,
)

# %% [markdown]
# ## The naive version: a dictionary of shapes
#
# Many a small JIT compiler does this: the key is what the arguments look like, the value is the compiled
# code.
# %%
from minicompile.ch01_graphs.fake import FakeMode
from minicompile.ch01_graphs.graph import interpret, print_graph
from minicompile.ch01_graphs.trace import trace


def naive_compile(function):
    cache = {}

    def run(x):
        key = x.shape, x.dtype, x.device
        if key not in cache:
            cache[key] = trace(lambda t: [function(t)], [FakeMode().from_real(x)])
        return interpret(cache[key], [x])[0]

    return run


# %% [markdown]
# Here it compiles an activation whose slope is a setting, and then the setting changes:

# %%
config = {"slope": 0.1}


def activation(x):
    return F.leaky_relu(x, config["slope"])


fast = naive_compile(activation)
minus = -torch.ones(1)
print("first call:", fast(minus).item(), " eager:", activation(minus).item())
config["slope"] = 0.5
print("new slope: ", fast(minus).item(), " eager:", activation(minus).item())

# %% [markdown]
# The arguments look the same, so the old code runs, and the answer is wrong. A function reads much more
# than its arguments: globals, closures, attributes of modules, whether gradients are recorded, whether
# somebody registered a hook. One cannot list in advance what a program will look at. But the interpreter of
# [chapter 3](chapter:03) is there when it looks.
#
# ## The idea: write down each question with its answer
#
# Suppose that the interpreter reads something that existed before the call, such as the entry `"slope"` of a global
# dictionary. It gets 0.1 and goes on. If it got 0.1 again at the next call, it would go on in the same way. So it
# notes *how to read the same thing again*, and *what the answer was*. Such a note is a *guard*. If all guards hold
# at the next call, then running the function again would ask the same questions and get the same answers, one after
# the other, and would make the same graph. (This is a proof by induction: the first question depends on nothing,
# and each further question depends on the answers before it.)
#
# [Part 2 of tiny](chapter:tiny.2), the compiler in one file, does that with text. Each read writes a line which
# reads the same thing again, and a line which compares:

# %%
config["slope"] = 0.1
small = tiny.compile(activation, backend=tiny.eager)
small(minus)
text = list(small.entries.values())[0][0].text
print(text[: text.index("    def body")])

# %% [markdown]
# By hand: the check gets `frames`, the calls that are being executed ([chapter 3](chapter:03)), here only one. A frame
# has the local variables of the call, and its stack, which holds the values that an expression has computed so far.
# `v0` is the function that was called, and the guard says that it has the same code. `k1` is the
# dictionary of the global variables; objects which text cannot spell have such names. `v1` is what is found there
# under the name `F`, and it has to be the very same module. `v2` is the argument. It is compared by a description
# of its shape, strides, dtype, device, and whether it requires a gradient. `v3` is `config`, and the lines after it
# are about what it contains. If one comparison fails, the check returns None, and the next version is tried.
#
# ### What breaks it
#
# **It asks too much.** The whole dictionary is read as soon as one entry is. Here an entry changes that the
# function never looks at:

# %%
config["seen"] = 0
small, ours = tiny.compile(activation, backend=tiny.eager), minicompile.compile(activation, backend="eager")
with watching() as seen:
    for call in range(4):
        config["seen"] = call
        small(minus), ours(minus)
print("versions after four calls: tiny", *map(len, small.entries.values()), " minicompile", len(seen.captured))
del config["seen"]

# %% [markdown]
# **It asks too little.** tiny compares the class of an object, and assumes that nobody changes the class:


# %%
class Layer:
    gain = 2.0

    def scale(self, x):
        return x * self.gain


layer = Layer()


def use(x):
    return layer.scale(x)


small, ours = tiny.compile(use, backend=tiny.eager), minicompile.compile(use, backend="eager")
small(minus), ours(minus)
Layer.scale = lambda self, x: x * 100
print("eager:", use(minus).item(), " tiny:", small(minus).item(), " minicompile:", ours(minus).item())

# %% [markdown]
# **It is slow.** The running example of this book is a block of a GPT: attention and a perceptron, each behind a
# norm. Its check has some eighty lines. Each costs a step of the interpreter, and `describe` asks a tensor five
# questions. Further down both are measured.
#
# The real stage keeps the idea and changes the form. A guard is *data*, so that it can be checked, explained,
# weakened and remembered.
#
# ## Guards as data
#
# The path to a thing is a [`Source`](ref:minicompile.ch02_guards.sources.Source). A source knows the source it
# starts from: the weight of a layer is an entry of a module, which is an attribute of the argument `self`. It can
# be written as text that reads, as words for a message, and as the left side of an assignment, which chapter 3
# needs for side effects.

# %% tags=["fold"]
drawing(
    {
        "self": ("self", "LocalSource", "input"),
        "up": ("self.up", "ModuleAttrSource", "compute"),
        "weight": ("self.up.weight", "ModuleAttrSource", "compute"),
        "g1": ("structure of a module", "class, names of children", "saved"),
        "g2": ("TENSOR_MATCH", "dtype, shape, ...", "saved"),
    },
    [("self", "up"), ("up", "weight"), ("self", "g1"), ("weight", "g2")],
    "self is an argument. self.up is an entry of this module, and self.up.weight an entry of that one. A guard about the structure of "
    "the module hangs on self, and a guard about the tensor on self.up.weight.",
    "Sources are blue; each has the source before it. Guards, green, are about one source each.",
    width=170,
)

# %% [markdown]
# With a source goes a *kind*, the way in which one looks, and what is expected. These are the guards of the
# activation:

# %%
config["slope"] = 0.1
facts = minicompile.explain(activation, backend="eager")(minus).guards
Table(["kind", "source", "in words"], [(f.guard.kind, f.guard.source or "", f) for f in facts])

# %% [markdown]
# The first six are about the state of the library, since a graph that was captured while gradients were recorded is
# not right when they are not. The seventh says that nobody has put another method into `torch.Tensor`. `config` is
# guarded by its type alone, and its one entry by value.
#
# The meaning of a kind is a function that answers with conditions in Python text. Here is the one for constants. It
# is longer than `==`, because `True == 1`, `0.0 == -0.0` and `nan != nan`, and for each of these a program can be
# written whose graph depends on the difference. ([`same_constant`](exercise:same-constant) is an exercise.)
#
# In the code, `x` is the text that reads the thing, and `g.expected` is what the guard expects. A `Condition` is a text
# that has to be true, and a function, `why`, which says in words what is different if it is not. `const(e)` makes a
# name for an object that text cannot spell, and `name_of` does the same if the object is held weakly; `strongly` gets
# such an object back. The line with `@guard_kind` registers the function under the name of the kind. It adds three
# functions: one says the guard in words (`said_of_constant`), one keeps what is expected without keeping it alive
# (`held`), and one, which becomes the field `looks` of the kind, is used by the memo of the section "Not looking twice".
#
# %show minicompile.ch02_guards.guards.constant_match
#
# ### How they are learnt
#
# Guards come into being while the interpreter runs, one for each thing that it looks at for the first time. Below,
# each frame is one guard, with the line of the program that was being executed.


# %% tags=["fold"]
from minicompile.ch02_guards.guards import GuardSet, in_words


def gated(x, w, steps):
    for _ in range(steps):
        x = x + F.gelu(x @ w) * config["slope"]
    return x


def learning(function, *args):
    """A frame for each guard that capturing a call adds."""
    frames, rows, add = [], [], GuardSet.add

    def noted(self, source, kind, expected=None, location=None):
        before = len(self)
        add(self, source, kind, expected, location)
        if len(self) > before:
            new = list(self)[-1]
            where = f"While it runs `{location.source}`" if location else "Before the first line"
            rows.append((len(rows) + 1, new.kind, in_words(new)))
            frames.append((f"{where}, it finds out that {in_words(new)}.", Table(["", "kind", "in words"], rows[-8:])))

    GuardSet.add = noted
    try:
        watch(function, *args, backend="eager")
    finally:
        GuardSet.add = add
    return frames


Walk("Guards, as they are learnt", learning(gated, torch.randn(4, 4), torch.randn(4, 4), 2))

# %% [markdown]
# Look at how `range` is found. The interpreter looks for a global variable of this name, finds none, and takes the
# builtin. If somebody defines a global function `range` tomorrow, the program will do something else. So *that
# there is none* is a guard as well. In the second round of the loop no guard is added, since nothing new is read.
#
# ### The weak form
#
# What a guard expects may be an object, such as a function or a module. It must not keep this object alive. If it
# did, then a model that has been deleted would stay in memory because it was compiled once. So a guard holds a weak
# reference, and "it is still the same object" includes that there still is one. Below, a global function is
# compiled into a graph, and then replaced by another one:

# %% tags=["unheard"]
import gc
import weakref


def made(factor):
    return lambda x: x * factor


shrink = made(0.5)


def through_a_global(x):
    return shrink(x).relu()


compiled = minicompile.compile(through_a_global, backend="eager")
print("before:", compiled(torch.ones(1)).item())
old, shrink = weakref.ref(shrink), made(0.25)
gc.collect()
print("the old function is", "still in memory" if old() else "gone")
print("after: ", compiled(torch.ones(1)).item())

# %% [markdown]
# A guard can also be too strong in what it asks. `shrink` was called, and so its *code* was followed. Had somebody made
# an equal function anew, from the same `lambda` with the same factor, the graph would still be right. Programs do
# that all the time, with functions inside of functions. So for a function the guard does not ask for the very
# object. It asks for the same code, and for what was read from the function: its closure, its defaults. Each of
# these has a guard of its own. One rule is behind both, the weak reference and the weak question: a guard should be as
# weak as it can be while it still implies that the trace would go the same way ([exercise](exercise:function-guard)).
#
# ### Two names for one thing
#
# Not all that a trace assumes is about one object. This program writes to its first argument and reads its second:


# %%
def write_and_read(x, y):
    x.add_(1)
    return y * 2


compiled = minicompile.compile(write_and_read, backend="eager")
with watching() as seen:
    compiled(torch.zeros(1), torch.zeros(1))
    same = torch.zeros(1)
    print("the same tensor twice:", compiled(same, same).item(), " eager:", write_and_read(same.zero_(), same).item())
print("because", seen.recompiles[-1]["why"].partition("  #")[0])

# %% [markdown]
# With two different tensors the product has nothing to do with the sum, and the graph says so. With one tensor
# under two names it has. Every guard on `x` alone and on `y` alone holds for both calls. So among things of one
# kind, of which one was written to or which the program has compared with `is`, capture adds a guard that they are
# different objects (NOT_ALIASED), or that they are one (ALIASED).
#
# ## From guards to one function
#
# How should they be checked? A loop over the list is the obvious way:

# %%
from minicompile.ch02_guards import codegen

block, x = example()
seen = watch(block, x, backend="eager")
captured, forward = seen.captured[0], Block.forward
check = check_of(captured, forward)


def one_by_one(block, x):
    return codegen.failing_guard(captured.guards, forward.__code__, forward, (block, x), captured.constants)


print("guards of the GPT block:", len(list(captured.guards)))
print("all hold:", check(forward, block, x) is not None, one_by_one(block, x) is None)
slow = best_time(one_by_one, block, x, repeat=5)
quick = best_time(lambda: [check(forward, block, x) for _ in range(200)]) / 200
bars(
    [("guard after guard", slow * 1e6, "bad"), ("one generated function", quick * 1e6)],
    "us",
    "Time to check the guards of the GPT block.",
    form="{:,.1f}",
)

# %% [markdown]
# The loop is what we use to *explain* a failure, where time does not matter: it asks Python to compile the text of
# each condition, every time. The function that runs at every call is generated from the same conditions. Common
# beginnings of paths are read once, and the function returns the values that the graph takes as inputs, since it
# has read them anyway. The same block in tiny:

# %%
in_one_file = tiny.compile(block, backend=tiny.eager)
in_one_file(x)
tiny_check, frames = list(in_one_file.entries.values())[0][0], [tiny.first_frame(forward, (block, x), {})]
tiny_time = best_time(lambda: [tiny_check(frames) for _ in range(50)]) / 50
lines_of_check = tiny_check.text[: tiny_check.text.index("def body")].strip().splitlines()
print(f"tiny: {len(lines_of_check)} lines of check, {tiny_time * 1e6:.1f} us")

# %% [markdown]
# Both checks are Python functions made of text. Ours has three parts. The first is a list of conditions on what a
# number or a flag says: the state of PyTorch, and the globals of the function. They are evaluated at each call. The
# second part is one call, `__stable(...)`. It answers for all that is reached through dictionaries and classes, which
# rarely change: children, parameters, methods, hooks. The third is another call, `__tensors(...)`, and answers for
# the tensors among the arguments. Both of these calls are short cuts. They say whether everything is as it was when
# it was last checked in full, and `None` means that they cannot say so. Then `__refresh` calls the full check,
# `__stable_full` or `__tensors_full`, and if that holds, the short cut notes what it has seen.
#
# In the text, `__F` is the function and `__G` are its globals. `__K`, `__s0` and `__g0` stand for objects that the
# guards compare with; what is held weakly, such as `__g0`, is called to get the object. `__hooks0` and its like are
# the dictionaries of hooks that PyTorch keeps for all modules at once, which have to be empty. `raise __Miss` ends
# the check: this version does not fit, and the last line asks the next one. Any other exception does the same, since
# something that cannot be read any more is not what it was. Otherwise the inputs of the graph are
# returned, `x` and what `__stable` has read on its way, the parameters.

# %%
text = check.source_text
head(folded(text[text.index("def __compiled_") :]), 40)

# %% [markdown]
# This is the full check of the third part, with what is assumed about `x`:

# %%
start = text.index("def __tensors_full(")
print(folded(text[start : text.index("def __", start + 1)]))

# %% [markdown]
# The short cut `__tensors` compares the metadata of `x` with what was accepted before, in C. The other full check,
# `__stable_full`, has most of the guards; what it wants to know of classes, it asks through a short cut of its own,
# `__stable_classes`. How can these be true without being evaluated? That takes an argument of its own.

# %% [markdown] tags=["page"]
# ## Not looking twice
#
# All those guards are read through dictionaries, because the attributes of an object, the children of a module and
# the variables of a file are entries of dictionaries. CPython gives each dictionary a number, and a new one at each
# write. All dictionaries draw their numbers from one counter, so no two ever have the same one, not even one after the
# other. So if we have evaluated all guards once, and noted the numbers of all dictionaries that were read on the
# way, then the next time it is enough to compare numbers. If no dictionary was written, whatever was true is true.
# Such a notebook is called a *memo*. Here is one in Python, for dictionaries that count their writes:


# %%
class Counted(dict):
    """A dictionary with a number that no other dictionary has had, and a new one at each write."""

    numbers = iter(range(10**9))

    def __init__(self, **entries):
        super().__init__(**entries)
        self.number = next(Counted.numbers)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        self.number = next(Counted.numbers)


# %% [markdown]
# A memo of a tree of such dictionaries notes all of their numbers, and returns a function that compares them again:


# %%
def children(d):
    yield d
    for value in d.values():
        if isinstance(value, Counted):
            yield from children(value)


def memo_of(root):
    """A function that says whether anything under `root` was written since now."""
    seen = [(d, d.number) for d in children(root)]
    return lambda: all(d.number == number for d, number in seen)


model = Counted(up=Counted(weight="W1", bias="b1"), norm=Counted(eps=1e-5))
unchanged = memo_of(model)
print("nothing written:", unchanged())
model["norm"]["eps"] = 1e-6
print("one entry written:", unchanged())

# %% [markdown]
# Two things are wrong with it. The first is small. It notices that *something* was written, even if it is not what
# the guards are about. So the real memo, when a number differs, compares the values that the guards have read from
# this dictionary. If they are the same objects, it notes the new number and goes on.
#
# The second is serious. The list `seen` keeps all dictionaries alive, as long as the compiled function lives. A
# memo must not do that, for the same reason for which a guard must not. So the real memo remembers *addresses*. But
# an address is not an object. When an object is freed, the next one of the same size is often put into the same
# place:


# %%
class Settings:
    def __init__(self, slope):
        self.slope = slope


remembered = {}


def slope_of(settings):
    if id(settings) not in remembered:  # seen before?
        remembered[id(settings)] = settings.slope
    return remembered[id(settings)]


print("right:", [Settings(s).slope for s in (0.1, 0.5, 0.9)])
print("by address:", [slope_of(Settings(s)) for s in (0.1, 0.5, 0.9)])

# %% [markdown]
# This is no rare accident. Programs that make an object anew for each call, such as a dataclass of inputs or a
# cache of keys and values, do it all the time. A memo that reads a number at a remembered address may read it from
# another object, or from memory that does not belong to any object.
#
# So each step needs a reason why the thing at the address is still the thing that was there. It goes by induction
# again.
#
# - **The beginning.** The memo begins at the *arguments*. The caller holds them, so they are alive, and it is safe to read from them.
# - **From an object to its dictionary.** An object that is alive keeps its dictionary alive. So its number may be read.
# - **The number.** It is compared with the one that was noted. Another dictionary may lie at the same address now, or this one
#   may have been written. In both cases the number is another one, because a number is never given twice, neither to two
#   dictionaries nor to one dictionary before and after a write. So if the number is the same, it is the same dictionary,
#   and it has not been written.
# - **From a dictionary to its values.** Then it holds the same objects as before, at the same addresses. A dictionary keeps its
#   values alive. So the memo may go on to these objects, and read *their* numbers.
#
# At no point does the memo read through an address before it has seen that something alive still holds what is there. In the
# example above, the three objects may lie at one address, but each has a dictionary of its own, with a number of its own.

# %% tags=["fold"]
drawing(
    {
        "arg": ("self", "the caller holds it", "input"),
        "d1": ("self.__dict__", "number as noted?", "compute"),
        "m": ("_modules", "held by self.__dict__", "saved"),
        "d2": ("its number", "as noted?", "compute"),
        "up": ("up", "held by _modules", "saved"),
        "d3": ("up.__dict__", "number as noted?", "compute"),
    },
    [("arg", "d1"), ("d1", "m"), ("m", "d2"), ("d2", "up"), ("up", "d3")],
    "self is held by the caller. Its dictionary has the number that was noted, so the dictionary of modules that it holds is the same. "
    "That one has its number, so the module up is the same, and its dictionary can be asked for its number.",
    "Each blue question makes the green object below it certain: alive, and the same.",
    width=190,
)

# %% [markdown]
# The memo is written in C (`unchanged.c`), and its head has the argument in full. In the check above it is called as
# `__stable(...)`. If a number differs and a value with it, the answer is None: then `__stable_full` evaluates all
# guards, and if they hold, the memo looks at everything anew. Nothing is believed that a full check has not
# confirmed.
#
# Not every guard can be left to the memo. It can vouch for a fact if nobody can change the fact without writing
# a dictionary or a class: that an entry of a dictionary is a certain object is such a fact. What a list contains is
# not, since a list has no number. But it takes little to compare the addresses in it at every call, and there is a second memo for
# what is reached through lists and the like. Why a second one? A program often makes a new list for each call, and rarely
# a new module. A memo that begins at an object which is new in each call never answers, so a list in the first memo
# would keep it from answering for the modules. The field `looks` of each kind of guard says what
# a memo would have to look at. What none can look at, such as the cell of a closure, the guard itself compares.
#
# The numbers are no part of the language, and releases of CPython treat them differently. In 3.11 a number changes
# with every write. Since 3.12 its lowest bits say who *watches* the dictionary, so it changes without a write, too.
# In 3.13 an object keeps its attributes in itself, and its `__dict__` is a view of them, whose number stays the
# same when an attribute is written. So before the memo trusts such a dictionary, it makes CPython move the attributes
# from the object into the dictionary, by giving the object another dictionary for a moment.
#
# Tensors need something else. `parameter.data = other` changes no dictionary. So the memo looks at each parameter's
# metadata, in C, at every call, which is most of what is left of its time.
#
# So depth is cheap, but not free:

# %%
points = []
for depth in (1, 2, 4, 8):
    stack = nn.Sequential(*[Block() for _ in range(depth)])
    deep = watch(stack, x, backend="eager").captured[0]
    fn = nn.Sequential.forward
    c = check_of(deep, fn)
    c(fn, stack, x), c(fn, stack, x)
    points.append(
        (depth, len(list(deep.guards)), best_time(lambda: [c(fn, stack, x) for _ in range(50)]) / 50 * 1e6)
    )
print("guards:", {d: n for d, n, _ in points})
lines(
    {"us per call": [(d, t) for d, _, t in points]},
    "blocks",
    "",
    "Time to check all guards against the number of blocks.",
)

# %% [markdown] tags=["page"]
# ## When a guard fails
#
# A compiled function may have several *versions*, each with its guards. If a guard of one version fails, the call goes to
# the next version, if there is one, and finally to the compiler. The compiler says which guard has failed:

# %%
minicompile.reset()


def scaled(x, n):
    return F.relu(x) * n


compiled = minicompile.compile(scaled, backend="eager")
with watching() as seen:
    for rows, n in ((8, 2), (9, 2), (10, 2), (11, 3), (11, 4), (11, True)):
        before = len(seen.recompiles)
        compiled(torch.randn(rows, 4), n)
        why = (
            seen.recompiles[-1]["why"].split("  #")[0]
            if len(seen.recompiles) > before
            else "compiled" if rows == 8 else "an existing version fits"
        )
        print(f"[{rows}, 4], {n!s:5}", why)

# %% [markdown]
# The second batch size taught the compiler that this size varies. The version made then has a symbol for it
# ([chapter 1](chapter:01)), so the batch sizes 10 and 11 need no version of their own. The fourth call is compiled
# because of `n`: it was 2 and is 3 now, so it becomes a symbol as well. The newest version is the first of the entries,
# that for `True`. The one behind it has symbols for both. Here is what its guards still ask about `x` and `n`:

# %%

_, with_symbols, *older = seen.states[0].cache.entries
for guard in with_symbols.guards:
    if guard.kind in ("TENSOR_MATCH", "SIZE", "CONSTANT_MATCH"):
        print(guard.kind, "-", in_words(guard))

# %% [markdown]
# Both symbols stand for numbers *above 1*. A size of 0 or 1 gets a version of its own, because such a size has
# other consequences: a dimension of size 1 is broadcast, and an empty tensor has no maximum ([chapter
# 1](chapter:01)). An integer of -1, 0 or 1 gets a version of its own, too, and so does one of 2**31 or more. (A negative
# integer below -1 can be an input as well, but as minus a symbol, so it never shares a version with positive ones.) What
# sizes and integers teach is not the same.
# An integer that was 1 and is 5 has varied, and is a symbol from then on. A size that was 1 and is 5
# may be two cases of broadcasting, so 5 is a version of its own, and only the next size makes it a symbol.
#
# `True` is not 4: a bool is another type, and the function may ask `type(n)`. Every version costs time at
# each miss, so there is a limit of eight, as in torch.compile. (Versions that differ in a flag, a type or a None count apart, since
# there is an end of those.) Beyond it calls that fit nothing run eagerly, with one warning that names the guard to blame.
#
# Floats vary as well, and more often: a learning rate changes at every step. The second value makes it an
# input, too, and what is computed from it stays Python arithmetic on numbers, written into the graph:

# %%
minicompile.reset()


def update(weight, gradient, rate, step):
    return weight - rate / (1 - 0.9**step) * gradient


stepping = minicompile.compile(update, backend="eager")
weight, gradient = torch.ones(3), torch.ones(3)
with watching() as varying:
    for step in range(1, 6):
        now = weight, gradient, 0.1 / step, step
        assert torch.equal(stepping(*now), update(*now))
print(f"5 rates, {len(varying.graphs)} graphs. The second:\n")
print(print_graph(varying.graphs[-1]), "\n")
for guard in varying.captured[-1].guards:
    if guard.kind in ("TYPE_MATCH", "SIZE"):
        print(guard.kind, "-", in_words(guard))

# %% [markdown]
# `rate` and `step` were guarded by value in the first graph. In the second they are inputs. But Python's arithmetic
# itself asks questions about numbers, and the answers to two of them have become guards. What kind of number is
# `0.9**step`? A power may also be a complex number, namely of a negative base and a fraction. And is the divisor
# zero? Then the quotient would be an error. A float that a program branches on is an input as well, and the guard is
# the condition: `if rate > 0.5` leaves `not (f0 > 0.5)`, which holds for all rates up to one half. Only where an
# operator wants a constant, such as the probability of a dropout, does the guard by value stay.
#
# The versions form a chain. An *entry* is one version: a function that checks its guards and runs its graph, or returns
# `MISSED` if a guard fails. The first entry is called directly. If its guards fail, `search` tries the others, and
# at last calls the *tail*, which calls the compiler. Of entries that were asked in vain before it is known which guards failed then, and
# usually they fail again. So those come first: a few lines for all entries together (`order_of_search`). Where there are many entries,
# the search begins with those that have served the same first argument, since the blocks of a model share the code of their class, but
# often not the version.
#
# %show minicompile.ch02_guards.cache.search
#
# Before all these comes a guess. A program that goes from one version to another at each call, such as a step that trains a network and
# asks it without gradients as well, does so in the same order each time: `then` knows, for two entries in succession, which one came
# next.
#
# An entry moves to the front when it has served two of the calls that the first one missed, with no third entry between; where
# the first one has missed eight, none is better than another until one has served many. That is what `candidate` is for: it is the entry
# that has served the last of these calls. `connect_all`, at the end of `move_to_front`, connects the chain again:
#
# %show minicompile.ch02_guards.cache.note_hit
#
# In a benchmark or in production a recompile may be worse than an error. A *stance* says so:

# %%
from minicompile import RecompileError, set_stance

with set_stance("fail_on_recompile"):
    try:
        compiled(torch.randn(8, 4).double(), 2)
    except RecompileError as error:
        print(tidy(str(error)))

# %% [markdown]
# ## What is not guarded
#
# A guard that is missing is a wrong answer, so the rule is: what capture reads, it guards. Whoever puts another function in
# the place of `F.relu`, or other code or defaults into a function of torch, is noticed. Exceptions are deliberate. What is in
# a list that lies in a class of torch or of the standard library is not looked at again. A tensor's *contents* are
# never guarded, since the graph takes them as input. Parameters of a module are guarded by shape and dtype,
# not by identity, since the check fetches the present one.

# %%
block, x = example()
compiled = minicompile.compile(block, backend="eager")
compiled(x)
changes = {
    "other numbers in a weight": lambda: block.up.weight.data.mul_(2),
    "another layer in its place": lambda: setattr(block, "up", nn.Linear(64, 256)),
    "a layer of another class": lambda: setattr(block, "norm1", nn.Identity()),
}
with watching() as seen:
    for what, change in changes.items():
        change()
        right = torch.equal(compiled(x), block(x))
        print(f"{what}: {'right' if right else 'WRONG'}, {len(seen.recompiles)} recompiles so far")
print("because", seen.recompiles[-1]["why"].split("  #")[0])

# %% [markdown]
# ## What torch.compile does differently
#
# Its guards are a tree of C++ objects (guard managers), one node for each access path. The numbers of dictionaries,
# which it calls version tags, are its shortcuts, and that is the idea of our memo. Ours are Python text. That is fast
# enough, because CPython replaces instructions that have run several times by quicker ones for the types that they have
# met (its *specialising interpreter*). Here is what a call costs if its graph does nothing. What is left are the guards,
# the entry, and the hook of [chapter 3](chapter:03), through which each call of a Python function comes.
# "It writes to itself" is a GPT that counts its calls and keeps its last loss:

# %% tags=["fold", "gpu-result", "results:cpu-overhead"]
Table(
    ["one call without kernels", "minicompile", "torch.compile"],
    [(work, *(f"{row[c]['median']:.1f} us" for c in ("minicompile", "torch"))) for work, row in results("cpu-overhead")["call_us"].items()],
)

# %% [markdown]
# torch.compile guards global state of torch in one C++ call, specialises integers with *automatic dynamic shapes* on the
# second value as we do, has more than fifty kinds of sources, and lets users drop guards with a filter function.
#
# ## Exercises
#
# <!-- exercises -->
#
# ## Further reading
#
# - L. P. Deutsch, A. M. Schiffman, *Efficient Implementation of the Smalltalk-80 System* (1984): inline
#   caches, the oldest guards.
# - U. Hölzle, C. Chambers, D. Ungar, *Optimizing Dynamically-Typed Object-Oriented Languages With
#   Polymorphic Inline Caches* (1991): several entries for one place.
# - PEP 509, *Add a private version to dict*, and PEP 659, *Specializing Adaptive Interpreter*.
