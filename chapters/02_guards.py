# %% [markdown]
# # Guards: may yesterday's graph be used again?
#
# Capturing a function costs milliseconds, running its graph microseconds. So a graph has to be used many
# times. But it was made for one call, and the next call may bring another shape, another setting, another
# model. This chapter decides, at each call and in about a microsecond, whether the graph is still right.
#
# The smallest version of this stage is [part 2 of tiny](chapter:tiny.2), the compiler in one file.

# %%
import torch
import torch.nn as nn
import torch.nn.functional as F

import minicompile
from chapters._lib import Block, Table, bars, best_time, check_of, example, head, lines, tidy, watch, watching

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
# Whenever capture reads something that existed before the call, it notes the *path* to it (a
# [`Source`](ref:minicompile.ch02_guards.sources.Source)) and what it relied on. That pair is a guard. If
# all guards hold, running the function again would ask the same questions and get the same answers.

# %%
config["slope"] = 0.1
facts = minicompile.explain(activation, backend="eager")(minus).guards
Table(["kind", "source", "in words"], [(f.guard.kind, f.guard.source or "", f) for f in facts])

# %% [markdown]
# Guards are data: source, kind, expected value. The meaning of a kind is a function that answers with
# conditions in Python text. Here is the one for constants. It is longer than `==`, because `True == 1`,
# `0.0 == -0.0` and `nan != nan`:
#
# %show minicompile.ch02_guards.guards.constant_match
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
# The loop is what we use to *explain* a failure, where time does not matter: it asks Python to compile the
# text of each condition, every time. The function that runs at every call is generated from the same
# conditions. Common beginnings of paths are read once, and it returns the values that the graph takes as
# inputs, since it has read them anyway.

# %%
text = check.source_text
head(text[text.index("def __check(") :], 40)

# %% [markdown]
# Most guards are not even in there as conditions, but in functions of their own. This one has what is assumed
# about `x`, whose metadata is checked again only when it differs from what was accepted before:

# %%
start = text.index("def __tensors_full(")
print(text[start : text.index("def __", start + 1)].replace(" and ", "\n            and "))

# %% [markdown]
# The other, `__stable_full`, has all that is reached through dictionaries and classes, which rarely change:
# children, parameters, methods, global variables. CPython gives a dictionary a new number at each write. A
# *memo* remembers the numbers. `__stable(self, ...)` compares them in C and answers with the parameters;
# while they are the same, whatever was true is true. If one differs, it compares the values that the guards
# read from that dictionary, and learns the new number if they are the same objects. Otherwise it answers
# None, `__stable_full` evaluates the guards, and the memo looks at everything anew
# ([`stable.py`](code:minicompile/ch02_guards/stable.py)).
#
# A memo keeps nothing alive, so it remembers addresses, and the objects behind them may be gone: many programs
# make an object for each call, and the next one gets the same address. The proof therefore begins at the
# arguments, which the caller holds, and reads nothing through an address before it has seen that something
# alive still holds it. The comment at the head of `unchanged.c` is that argument in full.
#
# The number is no part of the language, and releases of CPython treat it differently. In 3.11 it changes with
# every write. Since 3.12 its lowest bits say who *watches* the dictionary, so it changes without a write,
# too. In 3.13 an object keeps its attributes in itself, and its `__dict__` is a view of them, whose number
# stays the same when an attribute is written. Before it trusts such a dictionary, the memo makes the
# attributes move into it (`settled_dict` in `unchanged.c`).
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

# %% [markdown]
# ## When a guard fails
#
# The call goes to the next compiled version, if there is one, and finally to the compiler. It says why:

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
# ([chapter 1](chapter:01)), so the third and fourth batch size compile nothing. The same happened with the
# integer `n`. What is left of the checks of `x` and `n` in the version with symbols for both:

# %%
from minicompile.ch02_guards.guards import in_words

newest = seen.states[0].cache.entries[1]
for guard in newest.guards:
    if guard.kind in ("TENSOR_MATCH", "SIZE", "CONSTANT_MATCH"):
        print(guard.kind, "-", in_words(guard))

# %% [markdown]
# `True` is not 4: a bool is another type, and the function may ask `type(n)`. Every version costs time at
# each miss, so there is a limit of eight, as in torch.compile. Beyond it calls that fit nothing run
# eagerly, with one warning that names the guard to blame.
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
# `rate` and `step` were guarded by value in the first graph; in the second they are inputs, and two
# questions that Python's arithmetic asks have become guards: `0.9**step` is a float (it would be complex for
# a negative base and a fraction), and the quotient is one (no division by zero). A float that a program
# branches on, or that an operator needs as a constant, stays a guard by value.
#
# The versions form a chain. An entry whose guards fail calls the next with the same arguments; the last
# calls the compiler.
#
# %show minicompile.ch02_guards.cache.search
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
# A guard that is missing is a wrong answer, so the rule is: what capture reads, it guards. Exceptions are
# deliberate. Whoever puts another function in the place of `F.relu` is noticed; whoever changes the code or
# the defaults *inside* a function of torch or of the standard library is not. A tensor's *contents* are
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
# Its guards are a tree of C++ objects (guard managers), one node for each access path, with dictionary
# version tags as shortcuts, which is the idea of our memo. Ours are Python text, in which CPython's
# specialising interpreter is fast enough. The measured comparison, microseconds per call, is in
# [`stable.py`](code:minicompile/ch02_guards/stable.py). torch.compile guards global state of torch in one
# C++ call, specialises integers with *automatic dynamic shapes* on the second value as we do, has about
# forty kinds of sources, and lets users drop guards with a filter function.
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
