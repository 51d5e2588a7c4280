# %% [markdown]
# # From guards to one function
#
# A GPT with twelve layers has some 600 guards. Interpreting them as data would cost a microsecond each; a
# generated Python function does all of them in the time of its attribute reads, and most of them, as
# `stable.py` explains, only when something has changed. The naive version is one line:
#
#     " and ".join(condition.text for guard in guards for condition in ...)
#
# and it is slow for one reason: `self.transformer.h[0].attn.c_attn.weight` is spelled out in full a dozen
# times. The real one looks at sources as a tree, reads each inner node that has several uses once into a
# variable, and in the end returns the inputs of the graph, which the guards have fetched anyway.

# %%
import builtins
import functools
import inspect
import itertools
import linecache
import operator
import os
import re
import types
import weakref
from collections import Counter
from dataclasses import dataclass, field

import torch

from ..ch01_graphs import floats
from ..errors import interrupts
from ..marks import PASSED_OVER
from . import guards as g, sources, torch_guards
from .identity import strongly
from .memory import counters_agree, size_of
from .sources import CallSource, ComputedSource, ConstantSource, GlobalsSource, GlobalStateSource, LocalSource, Source, parameter_name
from .stable import ENOUGH, Scope, further_place, is_usual, made_for_the_call, make_memo, place, refresh, unchanged, varying_attributes

FREE = (LocalSource, ConstantSource, GlobalsSource)      # reading one is as cheap as reading a variable


def frame_parameters(code) -> list[str]:
    """Parameter names of the functions generated for `code`: its arguments in localsplus order, as
    identifiers."""
    count = (code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
             + bool(code.co_flags & inspect.CO_VARKEYWORDS))
    return [parameter_name(name) for name in code.co_varnames[:count]]


# %% [markdown]
# ## Reading common prefixes once
#
# The emitter writes the text twice. The first time every source gets a variable, whether it pays or not:
# `__v7 = __v6['weight']`. Counting how often each variable occurs tells which sources have several uses;
# the second time, only those get a variable, and the others are written where they are needed.
#
# An `Emitter` is called with an object to get a name for it in the globals of the text, `read` gives the text that reads a
# source, and `check` appends the line of a guard. What a memo answers, `read` takes from its tuple, `__w[3]`, and notes in
# `outputs` that it was wanted.

# %%
@dataclass
class Emitter:
    shared: set | None = None                              # sources worth a variable; None = all
    lines: list = field(default_factory=list)
    variables: dict = field(default_factory=dict)          # source -> variable
    constants: dict = field(default_factory=dict)          # name -> object
    constant_names: dict = field(default_factory=dict)     # id (value, for devices) -> name
    prefix: str = "__g"
    otherwise: str = "raise __Miss"                        # what to do when a guard does not hold
    by_form: bool = False                                  # a tensor's guard calls a function, one for all that lie alike
    forms: dict = field(default_factory=dict)              # condition of a tensor `x` -> that function
    memos: tuple = ()                                      # (scope, name of its memo's answer, stable source -> position in it)

    def __call__(self, value) -> str:
        """A name for an object in the generated function's globals."""
        key = value if isinstance(value, torch.device) else id(value)
        if key not in self.constant_names:
            self.constant_names[key] = name = f"{self.prefix}{len(self.constants)}"
            self.constants[name] = value
        return self.constant_names[key]

    def read(self, source: Source) -> str:
        """Text for the value of a source, sharing what has been read."""
        if source in self.variables:
            return self.variables[source]
        if isinstance(source, FREE):
            return source.text()
        for scope, answer, outputs in self.memos:
            if scope.is_stable(source):
                return f"{answer}[{outputs.setdefault(source, len(outputs))}]"
        text = source.spelled(self.read)
        if self.shared is None or source in self.shared:
            variable = self.variables[source] = f"__v{len(self.variables)}"
            self.lines.append(f"{variable} = {text}")
            return variable
        return text

    def check(self, guard) -> None:
        """Append the statement for when `guard` does not hold."""
        if isinstance(guard.source, (GlobalStateSource, type(None))):
            # A condition may have a faster way to ask
            x = "" if guard.source is None else guard.source.text()
        else:
            x = self.read(guard.source)
        if self.by_form and guard.kind == "TENSOR_MATCH":
            form = self.forms.setdefault(self.condition(guard, "x"), f"{self.prefix}_form{len(self.forms)}")
            self.lines.append(f"if not {form}({x}): {self.otherwise}")
        elif text := self.condition(guard, x):
            self.lines.append(f"if not ({text}): {self.otherwise}")

    def condition(self, guard, x: str) -> str:
        return " and ".join(c.text for c in g.GUARD_KINDS[guard.kind].conditions(guard, x, self))


# %% [markdown]
# `twice` is the trick of two passes. In the first pass every source gets a variable, so that each use of a source
# is a use of its variable's name, and counting names counts uses. A name that occurs more than twice (its
# definition is one occurrence) is worth a variable. The second pass writes the same text with only these.

# %%
def twice(write, parameters=(), **settings) -> tuple[str, Emitter]:
    """`write(emitter) -> text`, with every common prefix read once: the text and the emitter of the second
    time. parameters: sources that are the parameters `__a0`, `__a1`, ... of the function written."""
    given = {source: f"__a{i}" for i, source in enumerate(parameters)}
    first = Emitter(variables=dict(given), **settings)
    text = write(first)
    uses = Counter(re.findall(r"__v\d+", " ".join([*first.lines, text])))
    shared = {source for source, variable in first.variables.items() if uses[variable] > 2}
    second = Emitter(shared, variables=dict(given), **settings)
    return write(second), second


# %% [markdown]
# In the end a check returns the inputs of the graph as a tuple. Most of them come from a memo, which answers
# with a tuple `__w` of its own, and taking a slice of a tuple is much cheaper than taking 74 items one by one. So
# neighbours are put together.

# %%
def tuple_of_reads(reads) -> str:
    """An expression for a tuple. Neighbours in a memo's answer are taken as a slice: `(x, ) + __w[0:74]`. (`(x, *__w[0:74])`
    makes a list of it first: better for many parts.)"""
    parts, single, run = [], [], []

    def end(items, text):
        if items:
            parts.append(text)
            items.clear()

    for read in [*reads, None]:
        at = read and re.fullmatch(r"(__[wu])\[(\d+)\]", read)
        if run and (not at or (at[1], int(at[2])) != (run[-1][0], run[-1][1] + 1)):
            end(run, f"{run[0][0]}[{run[0][1]}:{run[-1][1] + 1}]")
        if at:
            end(single, f"({', '.join(single)}, )")
            run.append((at[1], int(at[2])))
        elif read:
            single.append(read)
    end(single, f"({', '.join(single)}, )")
    return " + ".join(parts) or "()" if len(parts) < 5 else f"({', '.join('*' + part for part in parts)})"


# %% [markdown]
# ## The parts of a check
#
# First the state of the library: one call of a `State` where that is as it was, else a few tests, of which it learns. Then what
# arguments themselves are, where these are numbers and the like: versions of a function often differ in that, as those of a loop's body do
# behind a graph break, and a version that is not meant should cost little. Then the stable guards: one call of their memo,
# which takes the roots and answers what else is needed, parameters above all. Where it pays, a second memo
# vouches for what is reached through lists and plain objects. Then the others one by one, in
# the order of the trace, and the metadata of tensors that nothing of this leads to, such as arguments, by
# one more memo. Last comes what the program's own code has to be run for, a function with a cache: a version that is meant for other
# sizes does not ask it. What a memo cannot vouch for is checked in full, by a function of its own:
#
#     __w = __stable(self)
#     if __w is None: __w = __refresh(__stable, __stable_full, (self, ))
#
# This function is only called when something has changed, so here a short text counts. An optimizer of 148 parameters has 592
# tensors, and of each eight things are known. Few of them differ, and each form gets a function.

# %%
MANY_TENSORS = 32                    # tensors: below, each is written in full


@dataclass
class CheckText:
    """lines: statements that raise when a guard does not hold; inputs: the text of a tuple; functions:
    definitions that the lines need; names: objects that all of it names."""
    lines: list = field(default_factory=list)
    inputs: str = "()"
    functions: list = field(default_factory=list)
    names: dict = field(default_factory=lambda: {"__refresh": refresh})

    def add_memo(self, name: str, scope: Scope, guards, parameters, looks, outputs=()) -> None:
        """A memo of guards, its arguments being the sources `parameters`, and the full check of them, which
        returns a tuple of the values of `outputs`. looks: all that it must look at."""
        of_classes, guards = parted(guards, asks_classes) if parameters else ([], guards)
        known = f"{name}_classes"
        if of_classes:
            self.add_memo(known, scope, of_classes, (), [look for guard in of_classes for look in g.GUARD_KINDS[guard.kind].looks(guard)])

        def write(emitter):
            emitter.lines += memo_call(known, [], "__c") if of_classes else []
            for guard in guards:
                emitter.check(guard)
            return tuple_of_reads(map(emitter.read, outputs))

        by_form = sum(guard.kind == "TENSOR_MATCH" for guard in guards) > MANY_TENSORS
        text, emitter = twice(write, parameters, prefix=f"{name}_g", by_form=by_form)
        self.functions += [f"{form} = lambda x: {condition}\n" for condition, form in emitter.forms.items()]
        signature = ", ".join(f"__a{i}" for i in range(len(parameters)))
        body = [*emitter.lines, f"return {text}"]
        self.functions.append(f"def {name}_full({signature}):\n{indent(body, 4)}")
        self.names.update(emitter.constants)
        self.names[name] = make_memo(
            scope, parameters, looks, outputs, {guard.source: guard.expected.free_dims for guard in guards if guard.kind == "TENSOR_MATCH"})


def memo_call(name: str, arguments: list[str], result: str) -> list[str]:
    together = tuple_of_reads(arguments)
    given = f"*{together}" if len(together) < sum(map(len, arguments)) else ", ".join(arguments)
    return [f"{result} = {name}({given})",
            f"if {result} is None: {result} = __refresh({name}, {name}_full, {together})"]


# %% [markdown]
# The guards fall into groups. `stable` are guards that a memo can vouch for, because it can watch all that they look
# at (`looks`), `further` those of the second memo, if there are enough of them. `world` is the state of the library. `plain` ask arguments
# only (`asks_arguments`). The rest is asked in turns (`turns_of`), each call of the program in one of its own, after the guards that tell
# whether the program would get there. In each, the metadata of tensors, which neither memo covers, comes last.

# %%
@dataclass
class Groups:
    """The guards by who checks them. looks: what the first two groups look at, by `id` of the guard."""
    stable: list
    further: list
    world: list
    plain: list
    turns: dict                      # name of a memo -> (other guards, metadata of tensors, for which it vouches)
    looks: dict

    def looks_of(self, guards) -> list:
        return [look for guard in guards for look in self.looks[id(guard)]]


def group_guards(guards, scope: Scope, beyond: Scope) -> Groups:
    world, left = parted(guards, lambda guard: isinstance(guard.source, GlobalStateSource))
    looks = {id(guard): scope.looks_of(guard) for guard in left}
    stable, left = parted(left, lambda guard: looks[id(guard)] is not None)
    looks |= {id(guard): beyond.looks_of(guard) for guard in left}
    further, rest = parted(left, lambda guard: looks[id(guard)] is not None)
    if len(further) < ENOUGH:
        further, rest = [], left
    plain, rest = parted(rest, asks_arguments)
    turns = {f"__tensors{n or ''}": parted(guards, lambda guard: guard.kind != "TENSOR_MATCH") for n, guards in enumerate(turns_of(rest))}
    return Groups(stable, further, world, plain, turns, looks)


def turns_of(guards) -> list[list]:
    """First the guards that can be asked without calling the program, then, for each call in the order of the trace, those that are
    about its result and earlier ones."""
    numbers, turns = {}, {0: []}
    for guard in guards:
        calls = calls_of_program(guard)
        turns.setdefault(max((numbers.setdefault(call, len(numbers) + 1) for call in calls), default=0), []).append(guard)
    return [turns[n] for n in sorted(turns)]


def calls_of_program(guard) -> list:
    """What stands for the calls of functions of the program, which have a cache (`call_cached`), that are made to ask."""
    if guard.kind == "ANSWER":
        return [id(guard)] if has_cache(getattr(strongly(guard.expected[0]), "func", guard.expected[0])) else []
    add_ways((guard.source, guard.expected), ways := set())
    return [way for way in ways if isinstance(way, CallSource) and way.method == "__call__" or
            isinstance(way, ComputedSource) and any(isinstance(x, ConstantSource) and has_cache(x.value) for x in way.operands)]


def asks_python(guard) -> bool:
    """Whether to ask is to let Python compute something of numbers, which only the guards before may have kept small; to look for one among
    constants is as quick for any number."""
    add_ways((guard.source, guard.expected), ways := set())
    return any(isinstance(way, ComputedSource) and not is_look_up(way.function) for way in ways)


def is_look_up(function) -> bool:
    return isinstance(function, ConstantSource) and strongly(function.value) is operator.contains


def has_cache(function) -> bool:
    return isinstance(strongly(function), functools._lru_cache_wrapper)


def asks_classes(guard) -> bool:
    """Whether the guard is about classes and functions only."""
    looks = g.GUARD_KINDS[guard.kind].looks(guard)
    return bool(looks) and all(what in g.OF_CLASSES for what, _ in looks)


def asks_arguments(guard) -> bool:
    """Whether the guard is about an argument's class or its value as a constant, or about sizes that are arguments."""
    if guard.kind == "SIZE":
        return all(type(source) is LocalSource for _, source in guard.expected[1])
    return type(guard.source) is LocalSource and guard.kind in ("TYPE_MATCH", "CONSTANT_MATCH")


def parted(guards, belongs) -> tuple[list, list]:
    """The guards that belong, and the others."""
    return [guard for guard in guards if belongs(guard)], [guard for guard in guards if not belongs(guard)]


# %% [markdown]
# `check_text` writes them down; the others by `write_rest` in the order of the trace. That order
# matters. A guard on `x.shape[0]` must not run before the guard that says that `x` is a tensor.
#
# The order of the writing is different from the order of the lines. The rest is written before the memos of the
# stable guards are made, because writing it tells which values (`outputs`) the memos have to answer with; and the second
# before the first, which answers with its roots.

# %%
def check_text(guards, inputs, written) -> CheckText:
    guards, result = list(guards), CheckText()
    varying, loose = varying_attributes(guards, written), made_for_the_call(guards)
    scope, first, second = Scope(place, varying, loose), {}, {}
    beyond = Scope(further_place, varying, loose, scope)
    groups = group_guards(guards, scope, beyond)
    memos = ((scope, "__w", first), (beyond, "__u", second))[:2 if groups.further else 1]

    def write_rest(emitter):
        for name, (others, loose) in groups.turns.items():
            for guard in others:
                emitter.check(guard)
            reads = list(dict.fromkeys(emitter.read(guard.source) for guard in loose))
            emitter.lines += memo_call(name, reads, "__t") if reads else []
        return tuple_of_reads([emitter.read(source) for source in inputs])

    def add(name, scope, guards, outputs) -> dict:
        """The memo of these guards; returns its roots."""
        looks = groups.looks_of(guards)
        roots = dict.fromkeys(map(scope.start_of, (*(at for what, at in looks if what not in g.OF_CLASSES), *outputs)))
        result.add_memo(name, scope, guards, roots, looks, outputs)
        return roots

    states, further_lines = Emitter(prefix="__s"), []
    usual, others = parted(groups.world, is_usual)
    for guard in usual:
        states.check(guard)
    if usual:
        result.names["__state"] = unchanged.State()
        states.lines = ["__s = __state()", "if __s is not None or __forward_ad._current_level >= 0:",
                        *(f"    {line}" for line in states.lines), "    __state(__s)"]
    for guard in (*others, *groups.plain):
        states.check(guard)
    result.inputs, rest = twice(write_rest, memos=memos)
    for name, (_, loose) in groups.turns.items():
        if tensors := dict.fromkeys(guard.source for guard in loose):
            result.add_memo(name, scope, loose, tensors, [(g.TENSOR, source) for source in tensors])
    if groups.further:
        roots = add("__further", beyond, groups.further, second)
        _, emitter = twice(lambda e: e.lines.extend(memo_call("__further", list(map(e.read, roots)), "__u")) or "", memos=memos[:1])
        further_lines = emitter.lines
    if groups.stable or first:
        roots = add("__stable", scope, groups.stable, first)
        states.lines += memo_call("__stable", [source.text() for source in roots], "__w")
    result.names.update(states.constants)
    result.names.update(rest.constants)
    result.lines = [*states.lines, *further_lines, *rest.lines]
    return result


# %% [markdown]
# ## The function around them
#
# A guard may fail by an exception: the attribute is gone, the list is shorter. That is a miss like any
# other, so the statements stand in a `try`, which costs nothing in CPython 3.11 and later until something
# is raised.
#
# An **entry** is the whole compiled call in one Python function: guards, then the body that capture wrote
# (call the graph, rebuild the outputs, apply side effects), and on a miss a call of the next entry. The
# body stands in the `else`, so that an exception from user code is never mistaken for a miss.

# %%
class Miss(Exception):
    """A guard does not hold."""


def indent(lines, by: int) -> str:
    return "".join(" " * by + line + "\n" for line in lines) or " " * by + "pass\n"


def entry_text(name: str, parameters: list[str], check: CheckText, body: list[str]) -> str:
    arguments, lines = ", ".join(["__F", *parameters]), check.lines
    if any("__G" in line for line in (*lines, *body)):
        lines = ["__G = __F.__globals__", *lines]
    return ("".join(check.functions) +
            f"def {name}({arguments}):\n    try:\n{indent(lines, 8)}    except __Miss:\n        pass\n"
            "    except __Exception as __error:\n        if __interrupts(__error): raise\n"
            f"    else:\n{indent(body, 8)}    return __next[0]({arguments})\n")


_numbers = itertools.count()


def define(text: str, name: str, namespace: dict, what: str):
    """Execute the text of a function and return it. Tracebacks show its lines, and `source_text` is all of
    it."""
    filename = PASSED_OVER.format(f"{what} {next(_numbers)}")
    exec(compile(text, filename, "exec"), namespace)
    function = namespace.pop(name)                         # whoever drops it frees it: no cycle
    function.source_text = text
    linecache.cache[filename] = len(text), None, text.splitlines(True), filename
    weakref.finalize(function.__code__, linecache.cache.pop, filename, None)
    return function


def item_of_dict(d: dict, key):
    """`d[key]` without `__missing__`, which of a `defaultdict` would add the item that a check only looks for."""
    value = dict.get(d, key, _ABSENT)
    if value is _ABSENT:
        raise KeyError(key)
    return value


_ABSENT = object()


def base_namespace() -> dict:
    """What the text of sources and guards may name."""
    return {"__Miss": Miss, "__Exception": Exception, "__interrupts": interrupts, "__torch": torch,
            "__dict_getitem": item_of_dict, "__list_getitem": list.__getitem__, "__list_len": list.__len__,
            "__same_constant": g.same_constant, "__same_keys": g.same_keys,
            "__agree": counters_agree, "__size": size_of, "__class_has": g.class_has,
            "__methods_are": torch_guards.methods_are, "__class_derives": g.class_derives, "__function_has": g.function_has,
            "__class_leads_to": g.class_leads_to,
            "__find_plainly": object.__getattribute__, "__slot": g.slot, "__slot_is_empty": g.slot_is_empty, "__in_class": g.class_lookup,
            "__runs_code_at_death": g.runs_code_at_death, "__rest": sources.rest_of_loop, **torch_guards.ASK,
            "__new_cell": types.CellType, "__function": types.FunctionType, "__builtins__": builtins, **floats.NAMESPACE,
            **{f"__{kind.lower()}": read for kind, read in g.STATE.items()}}


# %% [markdown]
# An entry is the check with a body behind it. `build_entry` puts the text together: the parameters of the frame, the
# guards, one line that collects the inputs, and the body that capture wrote. Where the body reads something that is
# an input anyway, `reading_inputs` replaces the path by its place among the inputs. Constants that are held weakly
# are fetched first, and one that is gone counts as a guard that fails.

# %%
def reading_inputs(lines: list[str], sources) -> list[str]:
    """The lines with what they read, or drop the gradient of, taken from `__inputs` where it is there: a path of six
    dictionaries for each of 150 parameters takes longer than some graphs."""
    at = {source.text(): f"__inputs[{i}]" for i, source in enumerate(sources) if not isinstance(source, FREE)}

    def shorter(line: str) -> str:
        target, equals, value = line.partition(" = ")
        owner = target.removesuffix(".grad")
        if owner != target and owner in at:              # any other target is a place that an input was read from
            target = f"{at[owner]}.grad"
        return target + equals + at.get(value, value)
    return list(map(shorter, lines))


def build_entry(guards, input_sources, code, body: str, namespace: dict, written=(), weak=()):
    """One compiled call: entry(function, *frame_args). `__inputs` in the body is the tuple of inputs.

    body: statements ending in a return. namespace: what the body names (`__graph`, `__K`), and `__next`, a
    one-element list holding the function to call with the same arguments when a guard fails. written: the
    attributes that the body writes, (source of the object, name). weak: indices of the weak constants that the
    body names `__k0`, `__k1`, ...; they are held for the time of the call."""
    check, parameters = check_text(guards, input_sources, written), frame_parameters(code)
    for i in weak:
        check.lines += [f"__k{i} = __K[{i}]()", f"if __k{i} is None: raise __Miss"]
    name = f"__compiled_{code.co_name}" if code.co_name.isidentifier() else "__compiled_frame"
    text = entry_text(name, parameters, check, [f"__inputs = {check.inputs}", *reading_inputs(body.splitlines(), input_sources)])
    scope = base_namespace()
    scope.update(check.names)
    scope.update(namespace)
    return define(text, name, scope, f"entry {code.co_name}")


def build_check(guards, input_sources, code, constants=()):
    """check(function, *frame_args) -> tuple of the values of `input_sources`, or None when a guard fails: an entry without a graph."""
    return build_entry(guards, input_sources, code, "return __inputs", {"__K": constants, "__next": [lambda *arguments: None]})


# %% [markdown]
# ## A question before all others
#
# Of an entry that was asked in vain it is known which guards failed. Those alone are a few lines. Before them come the guards
# about what lies on the way to the same sources, since a list is not read before it is known to be one; those that say that reading an
# attribute runs no code of its class; and the one about modes of the program, which would see a tensor being asked for its shape.
#
# Several entries are asked by one function, which returns those whose guards hold. They mostly begin with the same lines, and those are
# written once. Here are two, for two lengths of a name:
#
#     __fit = []
#     try:
#         while True:
#             if not (type(names) is __g0): break
#             __v0 = names[0]
#             while True:
#                 if not (type(__v0) is str and __v0 == 'a'): break
#                 __fit.append(__e0)
#                 break
#             while True:
#                 if not (type(__v0) is str and __v0 == 'b'): break
#                 __fit.append(__e1)
#                 break
#             break
#     except __Exception as __error:
#         if __interrupts(__error): raise

# %%
def build_question(asked, code):
    """question(function, *frame_args) -> the answers of those in `asked` whose guards hold; one that cannot be checked does not.
    asked: (answer, guards, those of them that are in question, constants), each."""
    namespace, names, groups, lines = base_namespace(), {}, {}, []
    for number, (answer, guards, telling, constants) in enumerate(asked):
        namespace[f"__e{number}"], namespace[f"__K{number}"] = answer, constants
        text = question_lines(guards, telling, namespace, names)
        if any("__K" in line for line in text):
            text = [f"__K = __K{number}", *text]
        groups.setdefault(text[0] if text else "", []).append([*text, f"__fit.append(__e{number})"])
    for texts in groups.values():
        shared = len(os.path.commonprefix(texts))
        rests = [line for text in texts for line in attempt(text[shared:])]
        lines += attempt([*texts[0][:shared], *rests]) if shared else rests
    function = f"def __question({', '.join(['__F', *frame_parameters(code)])}):\n    __G = __F.__globals__\n    __fit = []\n"
    return define(f"{function}{indent(lines, 4)}    return __fit\n", "__question", namespace, f"question {code.co_name}")


def attempt(lines: list[str]) -> list[str]:
    """Lines that end with the first that says `break` or raises."""
    return ["try:", "    while True:", *(f"        {line}" for line in lines), "        break", "except __Exception as __error:",
            "    if __interrupts(__error): raise"]


def question_lines(guards, telling, constants: dict, names: dict) -> list[str]:
    """Statements that say `break` unless these guards hold, and those that they need."""
    told, ways = set(map(id, telling)), set()
    for guard in telling:
        add_ways((guard.source, guard.expected), ways)
    attributes = {"__getattribute__", *(source.attribute for source in ways if hasattr(source, "attribute"))}
    plain = {type(source) for source in ways} <= {LocalSource, ComputedSource} and all(guard.kind != "TENSOR_MATCH" for guard in telling)
    asked = [guard for guard in guards if id(guard) in told or guard.source in ways or not plain and (
             guard.kind == "TORCH_FUNCTION" or guard.kind == "CLASS_ATTR" and guard.expected[1] in attributes)]

    def write(emitter):
        for guard in sorted(asked, key=lambda guard: type(guard.source) not in (GlobalStateSource, type(None))):
            emitter.check(guard)
        return ""
    _, emitter = twice(write, otherwise="break", constants=constants, constant_names=names)
    return emitter.lines


def add_ways(x, ways: set) -> None:
    """Add to `ways` the sources in x, a source or a tuple, and those that lead to them."""
    if isinstance(x, tuple):
        for part in x:
            add_ways(part, ways)
    elif isinstance(x, Source) and x not in ways and not isinstance(x, ConstantSource):
        ways.add(x)
        add_ways((x.parts()[0], *x.__dict__.values()), ways)


# %% [markdown]
# ## Saying why
#
# The fast function only knows that something failed. The slow path evaluates guard after guard with the
# very same conditions, written by an emitter that shares nothing, and stops at the first that does not hold.
# Whoever goes on must not ask an object of another class than expected for what that class has. `[*l]` would use up an iterator in the
# place of a list, and attributes may be code of the program.
#
# A call's frame is laid out as names for it: the parameters, the function, its globals and the constants. `value_of`
# reads a source step by step, and remembers each step. A source that cannot be read any more is an answer as well.

# %%
def call_namespace(code, function, args, constants) -> dict:
    namespace = base_namespace()
    namespace.update(zip(frame_parameters(code), args))
    namespace.update(__F=function, __G=function.__globals__, __K=constants)
    return namespace


def read_source(source, code, function, args, constants):
    """The value behind a source for this call, or None when it cannot be read."""
    try:
        return eval(source.text(), call_namespace(code, function, args, constants))
    except Exception:
        return None


def failing_guard(guards, code, function, args, constants=()):
    """(guard, explanation) of the first guard that does not hold for this call, or None."""
    with floats.numpy_warnings("ignore"):            # the call itself will warn
        return next(failing_guards(guards, code, function, args, constants), None)


def failing_guards(guards, code, function, args, constants):
    """(guard, explanation) of each guard that does not hold for this call. For a version that does not fit the program is not called, and
    nothing is computed: `2 ** n` may be asked behind `n < 20`, and does not end for any n."""
    namespace = call_namespace(code, function, args, constants)
    emitter, known, strange, failed = Emitter(frozenset(), constants=namespace), {}, set(), False
    for calls, guard in ((n > 0, guard) for n, turn in enumerate(turns_of(guards)) for guard in turn):
        if failed and calls:
            return
        if failed and asks_python(guard):
            continue
        if strange:
            add_ways((guard.source, guard.expected), ways := set())
            if ways & strange:
                continue
        value = None
        try:
            if guard.source is not None:
                value = namespace["__x"] = value_of(guard.source, namespace, known)
            for condition in g.GUARD_KINDS[guard.kind].conditions(guard, "__x", emitter):
                if not eval(expression(condition.text), namespace):
                    if guard.kind == "TYPE_MATCH":
                        strange.add(guard.source)
                    failed = True
                    yield guard, condition.why(value)
                    break
        except Exception as error:
            words, failed = g.short(error.args[0]) if error.args else "", True
            yield guard, f"{guard.source or guard} cannot be checked any more: {type(error).__name__}: {words}"


def value_of(source, namespace: dict, known: dict):
    """What is found at `source`. known: what was found before; a hundred parameters share most of their paths."""
    if source not in known:
        base, template = source.parts()
        if base is not None:
            namespace["__base"] = value_of(base, namespace, known)
            template = template.replace("{}", "__base", 1)
        known[source] = eval(expression(template), namespace)
    return known[source]


@functools.lru_cache(10000)
def expression(text: str) -> types.CodeType:
    return compile(text, "<guard>", "eval")
