"""Chapter 2: guards."""
import math
import re

import torch

from .. import behaviour, task
from .kit import program_file, questions

# ---- contiguous-strides ----------------------------------------------------------------------------------

task("contiguous-strides", title="The layout that needs no words", minutes=15, kind="write", function="contiguous_strides", about="""\
Most tensors are contiguous: a guard compares strides with those that follow from the sizes. Compute them: the last dimension has
stride 1, and each other one the stride of its right neighbour times the neighbour's size. As in PyTorch, a size of 0 counts as 1
here.""",
     hints=[
    "Which stride do you know without knowing any other?",
    "Go from the last dimension to the first with a running product.",
    "Keep the stride of the dimension that you look at in a variable. What does it become for the left neighbour, and what if the size "
    "is 0? You collect from the right, and the answer is read from the left."])


def shapes(smallest):
    return lambda rng: [(), (5,), *(tuple(rng.randrange(smallest, 7) for _ in range(n)) for n in (1, 2, 2, 3, 3, 4, 5, 5, 6))]


@behaviour("contiguous-strides", points=3, name="sizes of one and more", cases=shapes(1))
def strides(function, shape):
    return {"strides": tuple(function(shape))}


@behaviour("contiguous-strides", points=2, name="empty tensors", cases=lambda rng: [(2, 0), (0, 3), (2, 0, 3), *shapes(0)(rng)])
def empty(function, shape):
    return {"strides": tuple(function(shape))}


@behaviour("contiguous-strides", points=1, name="sizes that are symbols",
           cases=lambda rng: [("s", 3), (2, "s"), ("s", "t", 4), (0, "s", 2)], show=lambda shape: f"sizes {shape}")
def symbolic(function, shape):
    from minicompile.ch01_graphs.symbolic import Symbol, to_text
    return [to_text(n) for n in function(tuple(Symbol(n).expr if isinstance(n, str) else n for n in shape))]


# ---- same-constant ---------------------------------------------------------------------------------------

task("same-constant", title="Equal is not the same", minutes=25, function="same_constant", about="""\
A graph was traced with a constant in it; may it run for another value? Only if no program could tell the two apart. `==` gives wrong
answers, because `1 == 1.0 == True` and `0.0 == -0.0`, and needless recompiles, because `nan != nan`. Compare any two constants: numbers
(complex ones, too), texts, None, and tuples, lists, frozensets and slices of constants, nested. A loop over a frozenset was unrolled in
the order in which the set gives its items.""",
     hints=[
    "Which values can be told apart without looking at them at all?",
    "Values of different types always can. Of the others: which have two equal values that a program can tell apart, and which a value "
    "that differs from itself? A compound value is its parts, by the same rule.",
    "Once the types agree, go kind by kind: floats (two NaNs; the sign of a zero is math.copysign(1.0, a)), complex numbers as two "
    "floats, containers by length and by their items in order, slices as three values. The function may call itself for parts. "
    "Everything else has ==."])

PLAIN = [0, 1, 2, -1, True, False, None, 1.0, 2.0, "1", "", b"1", b"", 1 << 70, "a", ..., torch.float32, torch.float64,
         int("1000"), int("1000"), "".join(["two ", "words"]), "".join(["two ", "words"]), bytes([7, 8]), bytes([7, 8])]
FLOATS = [0.0, -0.0, math.nan, -math.nan, float("nan"), math.inf, -math.inf, 5e-324, 1.5, 0, 0j, -0j, complex(0.0, -0.0),
          complex(math.nan, 1), complex(1, math.nan),
          complex(float("nan"), 1), 1 + 0j, 1.0]
COMPOUND = [(), [], frozenset(), (1,), (1.0,), [1], (True,), (1, 2), (2, 1), [1, 2], (1, (2, 3)), (1, (2, 3.0)), ((1, 2), 3), (math.nan,),
            (float("nan"),), (0.0,), (-0.0,),
            frozenset({1}), frozenset({1.0}), frozenset({2, 3}), frozenset({(1, 2)}), frozenset({(1, 2.0)}), slice(1), slice(1.0),
            slice(None, 1), slice(1, 2, 3),
            slice(1, 2), (None,), ("a", None), ("a",), [(1, [0.0])], [(1, [-0.0])], (1, 2, None)]


def all_pairs(values):
    return lambda rng: [[(a, b) for a in values for b in values]]


def random_constants(rng):
    def value(depth):
        if depth and rng.random() < 0.5:
            return tuple(value(depth - 1) for _ in range(rng.randrange(3)))
        return rng.choice([0, 1, True, 1.0, 0.0, -0.0, math.nan, float("nan"), "a"])
    return [[(value(depth), value(depth)) for _ in range(60 * depth)] for depth in (1, 2, 3)]


for _points, _name, _cases in ((2, "kinds of constants", all_pairs(PLAIN)), (3, "floats and complex numbers", all_pairs(FLOATS)),
                               (3, "containers", all_pairs(COMPOUND)), (2, "random nested constants", random_constants)):
    @behaviour("same-constant", points=_points, name=_name, cases=_cases, show=lambda case: f"{len(case)} pairs of constants")
    def told_apart(function, case):
        return {f"same_constant({a!r}, {b!r}){', two objects' if a is not b and type(a) is type(b) else ''}": bool(function(a, b))
                for a, b in case}


@behaviour("same-constant", points=2, name="which values a generated guard lets pass", cases=lambda rng: [0.0, math.nan, (1, 2.0),
    (0.0, (True,)), [1, math.nan]],
           show=lambda value: f"f(n) was traced with n = {value!r}")
def accepted(function, value):
    from minicompile.ch02_guards.codegen import build_check
    from minicompile.ch02_guards.guards import GuardSet
    from minicompile.ch02_guards.sources import LocalSource

    def f(n):
        return n
    guards = GuardSet()
    guards.add(LocalSource("n"), "CONSTANT_MATCH", value)
    check = build_check(guards, [], f.__code__)
    return {f"the same graph for n = {n!r}": check(f, n) is not None
            for n in (0, 0.0, -0.0, False, math.nan, float("nan"), (1, 2.0), (1, 2), (True, 2.0), (0.0, (True,)), (-0.0, (True,)),
                      (0.0, (1,)), [1, math.nan], (1, math.nan))}


# ---- predict-guards --------------------------------------------------------------------------------------

GUARDED = '''\
import torch


def other_numbers(x):
    return x.relu() * 2


def number(x, n):
    return x * n


def unused(x, n):
    return x + 1


def longer(xs):
    for x in xs:
        total = x * 2
    return total


def tuple_for_list(xs):
    return xs[0] + xs[1]


def another_size(x):
    return x.sum(0)


def more_options(x, options):
    return x * options["scale"]


def bias_appears(x, options):
    if "bias" in options:
        x = x + options["bias"]
    return x * options["scale"]


def twice_the_same(x, y):
    x.add_(1)
    return x + y


def under_no_grad(x):
    return x.exp()

'''
SECOND_CALLS = {
    "other_numbers": "other_numbers(torch.ones(4)), then other_numbers(torch.zeros(4))",
    "number": "number(torch.ones(4), 2.5), then number(torch.ones(4), 3.5)",
    "unused": "unused(torch.ones(4), 2.5), then unused(torch.ones(4), 3.5)",
    "longer": "longer([torch.ones(4)]), then longer([torch.ones(4), torch.zeros(4)])",
    "tuple_for_list": "tuple_for_list([torch.ones(4), torch.ones(4)]), then tuple_for_list((torch.ones(4), torch.ones(4)))",
    "another_size": "another_size(torch.ones(4, 3)), then another_size(torch.ones(5, 3))",
    "more_options": 'more_options(torch.ones(4), {"scale": 2.5}), then more_options(torch.ones(4), {"scale": 2.5, "bias": 1.5})',
    "bias_appears": 'bias_appears(torch.ones(4), {"scale": 2.5}), then bias_appears(torch.ones(4), {"scale": 2.5, "bias": 1.5})',
    "twice_the_same": "with x = torch.ones(4): twice_the_same(x, torch.ones(4)), then twice_the_same(x, x)",
    "under_no_grad": "under_no_grad(torch.ones(4)), then under_no_grad(torch.ones(4)) within torch.no_grad()"}

task("predict-guards", title="Which guard fails?", minutes=25, kind="predict", about="""\
Each function is compiled at its first call. Does the same version serve the second call? Answer None if it does, and otherwise the
kind of the first guard that fails, as a text: one of "TYPE_MATCH", "CONSTANT_MATCH", "LENGTH", "DICT_KEYS", "NO_KEY",
"TENSOR_MATCH", "NOT_ALIASED", "GRAD_MODE".""",
     starter=GUARDED + questions(**{name.upper(): calls for name, calls in SECOND_CALLS.items()}), hints=[
         "A guard is written when capture looks at something. What did this function look at, and what about it?",
         "The numbers in a tensor are never guarded, its sizes are. An argument that nobody reads has no guard. A loop over a list was "
         "unrolled. A question whose answer is "
         "no is guarded, too.",
         "minicompile.explain(f)(*args).guards lists the guards; with MINICOMPILE_LOGS=recompiles in the environment, the second call says "
         "why it is compiled again."])


def guard_that_fails(name):
    """Kind of the first guard of the version made for the first call that does not hold for the second, and what was guarded."""
    from minicompile.ch02_guards.codegen import failing_guard
    from minicompile.ch02_guards.guards import in_words
    from minicompile.ch03_capture.capture import capture
    f, x = program_file(GUARDED)[name], torch.ones(4)
    first, second = {
        "other_numbers": ((x,), (torch.zeros(4),)), "number": ((x, 2.5), (x, 3.5)), "unused": ((x, 2.5), (x, 3.5)),
        "longer": (([x],), ([x, torch.zeros(4)],)),
        "tuple_for_list": (([x, torch.ones(4)],), ((x, torch.ones(4)),)), "another_size": ((torch.ones(4, 3),), (torch.ones(5, 3),)),
        "more_options": ((x, {"scale": 2.5}), (x, {"scale": 2.5, "bias": 1.5})), "bias_appears": ((x, {"scale": 2.5}),
            (x, {"scale": 2.5, "bias": 1.5})),
        "twice_the_same": ((x, torch.ones(4)), (x, x)), "under_no_grad": ((x,), (x,))}[name]
    made = capture(f, dict(zip(f.__code__.co_varnames, first)))
    made.close()
    with torch.set_grad_enabled(name != "under_no_grad"):
        found = failing_guard(made.guards, f.__code__, f, second, made.constants)
    about = re.compile("|".join(rf"\b{argument}\b" for argument in f.__code__.co_varnames))
    record = [f"{g.kind}: {in_words(g)}" for g in made.guards if found and g is found[0] or about.search(in_words(g))]
    failing = f"The second call fails {found[0].kind}: {found[1]}" if found else "All of them hold for the second call."
    return found and found[0].kind, "Guarded were, besides the state of PyTorch:\n  " + "\n  ".join(record) + "\n" + failing


for _name in SECOND_CALLS:
    @behaviour("predict-guards", points=1 + (_name in ("bias_appears", "twice_the_same")), name=_name, answer=_name.upper())
    def _(name=_name):
        return guard_that_fails(name)


# ---- cache-bug -------------------------------------------------------------------------------------------

task("cache-bug", title="A chain that bites its tail", minutes=30, kind="bug", function="link_entries",
     plant=[("entries[1:]", "entries[2:]")],
     about="""\
A function with several compiled versions asks them in turn: the head checks its guards; if they fail, its `next` is `search`, which asks
the others, and then the tail compiles a new version. A version that is not the head returns MISSED. One character of this function is
wrong. Programs with one or two versions run well; with three, the first call that the newest version does not fit never ends.""", hints=[
    "Which entries are in the list, and what is `next` of each, after the first, the second and the third version was added?",
    "A new version goes to the front. What was the `next` of the version that had been the head, and who changes it?",
    "After the second version is linked, the first one still calls the tail itself, and `search` takes what the tail returns for an "
    "answer of that version."])


def asked(function, calls):
    """For each call of a function whose versions fit one number each: who is asked, in order, and who serves it."""
    from minicompile.ch02_guards.cache import Entry, EntryCache, add_entry
    from minicompile.ch02_guards.guards import GuardSet
    log = []

    def compile_version(number):
        log.append("compiler")
        following = [None]

        def version(n):
            log.append(f"version for {number}")
            return f"version for {number}" if n == number else following[0](n)
        add_entry(cache, Entry(version, following, GuardSet()))
        return f"version for {number}"
    head = [compile_version]
    cache = EntryCache("f", compile_version, lambda function: head.__setitem__(0, function))
    found = {}
    for k, n in enumerate(calls):
        log.clear()
        try:
            served = head[0](n)
        except RecursionError:
            served = "RecursionError"
        found[f"call {k}, f({n})"] = {"asked": log[:12], "served by": served}
    return found


def some_calls(versions, *lengths):
    return lambda rng: [[*range(versions), *(rng.randrange(versions) for _ in range(n))] for n in lengths]


def as_they_come(versions, *lengths):
    """The first one is called again after the third, and others after each that is new."""
    return lambda rng: [[0, 1, 2, 0, *(n for new in range(3, versions) for n in (new, rng.randrange(new))),
                         *(rng.randrange(versions) for _ in range(n))] for n in lengths]


for _points, _name, _cases in ((2, "calls that the newest of three versions does not fit", lambda rng: [[0, 1, 0, 2, 1],
                                                                                                        [0, 1, 2, 0, 0, 1]]),
                               (3, "three versions", some_calls(3, 3, 8, 12)),
                               (3, "six versions: who is asked, and who moves to the front", as_they_come(6, 10, 30, 60))):
    behaviour("cache-bug", points=_points, name=_name, cases=_cases,
              show=lambda calls: "calls " + ", ".join(f"f({n})" for n in calls))(asked)

# ---- function-guard --------------------------------------------------------------------------------------

task("function-guard", title="A guard that keeps nothing alive", minutes=25, function="function_has", about="""\
A function that was inlined is part of the compiled version: if somebody replaces its code or a default, the version is wrong. So
the version has a guard for it. The guard must not keep the function alive, since compiled code would then never be freed. What it
expects is therefore in weak form: `weakly(x)` is a weak reference to x, or x itself if that does not matter, and `strongly(w)`
gives x back, or None if x is gone. Write the check. `code`, each of `defaults` and each value of `kwdefaults` are in weak form,
too.""",
     hints=[
    "Which three attributes of a function decide what a call does? Which of them may be None?",
    "A default that is equal is not the same object: the trace may have asked `is`. And a default may be None, which is also what "
    "strongly gives for what is gone.",
    "After the function itself come three comparisons: its code, its defaults by position, its keyword defaults by name and in order. "
    "None stands for having none. Compare lengths before you pair two lists, since zip stops at the shorter one. Each pair asks whether "
    "the old object, from its weak form, is the very object that is there now."])


def made_function():
    def f(a, b=1000.5, c="x" * 50, *, k=2000.5, m=None):
        return a
    return f


CHANGES = {
    "nothing": lambda f: None,
    "another code": lambda f: setattr(f, "__code__", made_function.__code__.replace(co_freevars=(), co_cellvars=())),
    "a default": lambda f: setattr(f, "__defaults__", (f.__defaults__[0], "other")),
    "an equal default": lambda f: setattr(f, "__defaults__", (float("1000.5"), f.__defaults__[1])),
    "one default less": lambda f: setattr(f, "__defaults__", f.__defaults__[1:]),
    "one default more": lambda f: setattr(f, "__defaults__", (None, *f.__defaults__)),
    "no defaults": lambda f: setattr(f, "__defaults__", None),
    "a keyword default": lambda f: f.__kwdefaults__.update(k=3),
    "an equal keyword default": lambda f: f.__kwdefaults__.update(k=float("2000.5")),
    "a keyword default gone": lambda f: f.__kwdefaults__.pop("m"),
    "another keyword": lambda f: setattr(f, "__kwdefaults__", {"k": f.__kwdefaults__["k"], "n": None}),
    "no keyword defaults": lambda f: setattr(f, "__kwdefaults__", None),
    "a keyword default None": lambda f: f.__kwdefaults__.update(k=None),
}


def checked_function(function, change):
    """The answer before and after a change."""
    from minicompile.ch02_guards.guards import weak_function
    f = made_function()
    keep = f.__code__, f.__defaults__, dict(f.__kwdefaults__)
    facts = weak_function((f, f.__code__, f.__defaults__, tuple(f.__kwdefaults__.items())))
    before = function(*facts)
    CHANGES[change](f)
    return bool(before), bool(function(*facts)), len(keep)


for _points, _name, _changes in ((2, "code and defaults", ["nothing", "another code", "a default", "no defaults"]),
                                 (3, "equal is not the same, and more or fewer", ["nothing", "an equal default", "one default less",
                                                            "one default more"]),
                                 (3, "defaults of keywords", ["nothing", *[c for c in CHANGES if "keyword" in c]])):
    behaviour("function-guard", points=_points, name=_name, cases=lambda rng, changes=_changes: changes,
              show=lambda change: f"def f(a, b=1000.5, c='xx...', *, k=2000.5, m=None); changed: {change}")(checked_function)


@behaviour("function-guard", points=2, name="a function that is gone, and one without defaults", cases=lambda rng: ["gone", "plain",
                                                            "None"],
           show=str)
def gone_or_plain(function, what):
    from minicompile.ch02_guards.guards import weak_function
    f = made_function() if what == "gone" else eval("lambda a: a" if what == "plain" else "lambda a=None, *, b=None: a")
    code, given = f.__code__, tuple((f.__kwdefaults__ or {}).items())
    facts = weak_function((f, code, f.__defaults__, given))
    if what == "gone":
        del f
    return bool(function(*facts)), code.co_argcount
