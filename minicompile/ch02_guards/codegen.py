# %% [markdown]
# # From guards to one function
#
# A GPT with twelve layers has some 900 guards. Interpreting them as data would cost a microsecond each; a
# generated Python function does all of them in the time of its attribute reads. The naive version is one
# line:
#
#     " and ".join(condition.text for guard in guards for condition in ...)
#
# and it is slow for one reason: `self.transformer.h[0].attn.c_attn.weight` is spelled out in full a dozen
# times. The real one looks at sources as a tree, reads each inner node that has several uses once into a
# variable, and in the end returns the inputs of the graph, which the guards have fetched anyway.

# %%
from __future__ import annotations

import builtins
import inspect
import itertools
import linecache
import re
import types
import weakref
from collections import Counter
from dataclasses import dataclass, field

import torch

from . import guards as g
from .sources import ConstantSource, FunctionSource, GlobalStateSource, LocalSource, Source, parameter_name

FREE = (LocalSource, FunctionSource, ConstantSource)      # reading one is as cheap as reading a variable


def frame_parameters(code) -> list[str]:
    """Parameter names of the functions generated for `code`: its arguments in localsplus order, as
    identifiers."""
    count = (code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
             + bool(code.co_flags & inspect.CO_VARKEYWORDS))
    return [parameter_name(name) for name in code.co_varnames[:count]]


def helpers() -> dict:
    """Globals that the text of sources and guards may name."""
    return {"__torch": torch, "__dict_getitem": dict.__getitem__, "__same_constant": g.same_constant,
            "__autocast_state": g.autocast_state, "__torch_function_state": g.torch_function_state,
            "__new_cell": types.CellType, "__builtins__": builtins}


# %% [markdown]
# ## Reading common prefixes once
#
# The emitter writes the text twice. The first time every source gets a variable, whether it pays or not:
# `__v7 = __v6['weight']`. Counting how often each variable occurs tells which sources have several uses;
# the second time, only those get a variable, and the others are written where they are needed.

# %%
@dataclass
class Emitter:
    shared: set | None = None                              # sources worth a variable; None = all
    lines: list = field(default_factory=list)
    variables: dict = field(default_factory=dict)          # source -> variable
    constants: dict = field(default_factory=dict)          # name -> object
    constant_names: dict = field(default_factory=dict)     # id (value, for devices) -> name

    def __call__(self, value) -> str:
        """A name for an object in the generated function's globals."""
        key = value if isinstance(value, torch.device) else id(value)
        if key not in self.constant_names:
            self.constant_names[key] = name = f"__g{len(self.constants)}"
            self.constants[name] = value
        return self.constant_names[key]

    def read(self, source: Source) -> str:
        """Text for the value of a source, sharing what has been read."""
        if isinstance(source, FREE):
            return source.text()
        if source in self.variables:
            return self.variables[source]
        base, template = source.parts()
        text = template if base is None else template.replace("{}", self.read(base), 1)
        if self.shared is None or source in self.shared:
            variable = self.variables[source] = f"__v{len(self.variables)}"
            self.lines.append(f"{variable} = {text}")
            return variable
        return text


def emit_guards(emitter: Emitter, guards, inputs) -> str:
    """Append the statements that check all guards and return the text of the tuple of inputs."""
    for guard in guards:
        if isinstance(guard.source, (GlobalStateSource, type(None))):
            # A condition may have a faster way to ask
            x = "" if guard.source is None else guard.source.text()
        else:
            x = emitter.read(guard.source)
        conditions = g.GUARD_KINDS[guard.kind](guard, x, emitter)
        if conditions:
            emitter.lines.append(f"if not ({' and '.join(c.text for c in conditions)}): raise __Miss")
    reads = [emitter.read(source) for source in inputs]
    return "(" + "".join(read + ", " for read in reads) + ")"


def share_reads(guards, inputs) -> tuple[list[str], str, dict]:
    """(statements, tuple of inputs as text, constants): the guards with every common prefix read once."""
    first = Emitter()
    tuple_text = emit_guards(first, guards, inputs)
    uses = Counter(re.findall(r"__v\d+", " ".join([*first.lines, tuple_text])))
    second = Emitter({source for source, variable in first.variables.items() if uses[variable] > 2})
    tuple_text = emit_guards(second, guards, inputs)
    return second.lines, tuple_text, second.constants


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


def generate_function(name: str, parameters: list[str], lines: list[str], hit: list[str], miss: str) -> str:
    signature = ", ".join(["__F", *parameters])
    return (f"def {name}({signature}):\n    try:\n{indent(lines, 8)}    except __Exception:\n        pass\n"
            f"    else:\n{indent(hit, 8)}    return {miss}\n")


_numbers = itertools.count()


def define(text: str, name: str, namespace: dict, what: str):
    """Execute the text of a function and return it. Tracebacks show its lines, and `source_text` is all of
    it."""
    filename = f"<minicompile {what} {next(_numbers)}>"
    exec(compile(text, filename, "exec"), namespace)
    function = namespace[name]
    function.source_text = text
    linecache.cache[filename] = len(text), None, text.splitlines(True), filename
    weakref.finalize(function.__code__, linecache.cache.pop, filename, None)
    return function


def base_namespace(func_globals: dict) -> dict:
    namespace = helpers()
    namespace.update(__G=func_globals, __Miss=Miss, __Exception=Exception)
    return namespace


# %%
def build_check(guards, input_sources, code, func_globals=None, constants=()):
    """check(function, *frame_args) -> tuple of the values of `input_sources`, or None when a guard fails."""
    lines, inputs, consts = share_reads(guards, input_sources)
    text = generate_function("__check", frame_parameters(code), lines, [f"return {inputs}"], "None")
    namespace = base_namespace(func_globals if func_globals is not None else {})
    namespace.update(consts, __K=constants)
    return define(text, "__check", namespace, "guards")


def build_entry(guards, input_sources, code, func_globals, body: str, namespace: dict):
    """One compiled call: entry(function, *frame_args). `__inputs` in the body is the tuple of inputs.

    body: statements ending in a return. namespace: what the body names (`__graph`, `__K`, resume
    functions), and `__next`, a one-element list holding the function to call with the same arguments when a
    guard fails. """
    lines, inputs, consts = share_reads(guards, input_sources)
    parameters = frame_parameters(code)
    hit = [f"__inputs = {inputs}", *body.splitlines()]
    miss = f"__next[0]({', '.join(['__F', *parameters])})"
    name = f"__compiled_{code.co_name}" if code.co_name.isidentifier() else "__compiled_frame"
    text = generate_function(name, parameters, lines, hit, miss)
    scope = base_namespace(func_globals)
    scope.update(consts)
    scope.update(namespace)
    return define(text, name, scope, f"entry {code.co_name}")


# %% [markdown]
# ## Saying why
#
# The fast function only knows that something failed. The slow path evaluates guard after guard with the
# very same conditions and stops at the first that does not hold.

# %%
class Plain:
    """The emitter's interface without sharing: every source is its own full text."""

    def __init__(self, namespace):
        self.namespace = namespace

    def __call__(self, value) -> str:
        name = f"__g{len(self.namespace)}"
        self.namespace[name] = value
        return name

    def read(self, source) -> str:
        return source.text()


def call_namespace(code, function, args, constants) -> dict:
    namespace = base_namespace(function.__globals__)
    namespace.update(zip(frame_parameters(code), args))
    namespace.update(__F=function, __K=constants)
    return namespace


def read_source(source, code, function, args, constants=()):
    """The value behind a source for this call, or None when it cannot be read."""
    try:
        return eval(source.text(), call_namespace(code, function, args, constants))
    except Exception:
        return None


def failing_guard(guards, code, function, args, constants=()):
    """(guard, explanation) of the first guard that does not hold for this call, or None."""
    namespace = call_namespace(code, function, args, constants)
    for guard in guards:
        value = None
        try:
            if guard.source is not None:
                value = namespace["__x"] = eval(guard.source.text(), namespace)
            for condition in g.GUARD_KINDS[guard.kind](guard, "__x", Plain(namespace)):
                if not eval(condition.text, namespace):
                    return guard, in_users_words(condition.why(value), code)
        except Exception as error:
            why = f"{guard.source or guard} cannot be checked any more: {type(error).__name__}: {error}"
            return guard, in_users_words(why, code)
    return None


def in_users_words(text: str, code) -> str:
    """Closure cells get the names that the variables have in the code, stack slots of resume functions a
    phrase."""
    for index, name in enumerate(code.co_freevars):
        text = text.replace(f"__F.__closure__[{index}].cell_contents", name)
    return re.sub(r"\b__stack(\d+)\b", r"(value \1 pending at the graph break)", text)
