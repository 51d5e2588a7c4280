# %% [markdown]
# # Guards: when may yesterday's graph be used again?
#
# Tracing a function answers every question the Python code asks (is there a mask? how many layers? is this
# training?) with the answer of the moment. A **guard** writes one such answer down: *this source, looked at
# in this way, gave that*. If all guards of a compiled entry hold at the next call, running the function
# again would ask the same questions and get the same answers, so the graph may stand for it.
#
# A guard is data, (source, kind, expected), not code. That lets us do three different things with it:
#
# 1. turn all guards of an entry into one fast Python function (`codegen.py`);
# 2. when that function says no, walk the same guards slowly and say in words which one failed and why;
# 3. print them for a person.
#
# What a kind means is one small function that returns the conditions as Python text, each with its
# explanation.

# %%
from __future__ import annotations

import math
import re
import types
import weakref
from dataclasses import dataclass, field, replace
from typing import Any, Callable

import torch

from ..ch01_graphs.fake import stride_pattern
from .identity import held, is_found, strongly, weakly, weakly_found
from .sources import GlobalStateSource, InstanceDictSource, Source


@dataclass(frozen=True)
class Guard:
    source: Source | None
    kind: str
    expected: Any = None
    location: Any = None                      # the user's line that needed it

    def __str__(self):
        expected = "" if self.expected is None else f" {short(self.expected)}"
        return f"{self.kind}({self.source if self.source is not None else ''}){expected}"


@dataclass(frozen=True)
class Condition:
    """`text` must be true; `why(value)` explains a failure, given what the source read this time."""
    text: str
    why: Callable[[Any], str]


def short(value, limit: int = 80) -> str:
    """repr for messages: never huge, never raises."""
    try:
        text = value.__qualname__ if isinstance(value, (type, types.FunctionType)) else repr(value)
    except Exception:
        text = f"<{type(value).__name__}>"
    text = " ".join(text.split())
    return text if len(text) <= limit else text[:limit - 3] + "..."


def changed(what, expected, got) -> str:
    return f"{what} changed: expected {short(expected)}, got {short(got)}"


# %% [markdown]
# ## A set of guards
#
# Capture asks about the same things over and over: each of twelve layers reads `config.dropout`. `add`
# keeps the first of equal guards, so that the message names the first line that needed it. Two expected
# values are equal here only if no code could tell them apart: `1`, `1.0` and `True` are three different
# values, `0.0` and `-0.0` are two.

# %%
def identity_key(value):
    """A hashable stand-in for `value`, equal exactly when the expected values are interchangeable."""
    if isinstance(value, (tuple, list, frozenset)):
        return (type(value), tuple(map(identity_key, value)))
    if isinstance(value, float):
        return (float, "nan") if value != value else (float, value, math.copysign(1.0, value))
    if isinstance(value, (Source, TensorSpec, ModuleSpec, int, str, bytes, type(None))):
        return (type(value), value)
    return ("id", id(value))


def freeze(kind: str, expected):
    """Replace a live object by what the guard compares, so that no tensor or module is kept and nothing
    changes later."""
    if kind == "TENSOR_MATCH" and not isinstance(expected, TensorSpec):
        return TensorSpec.of(expected)
    if kind == "FUNCTION_CODE":
        return getattr(expected, "__code__", expected)
    if kind in STATE and expected is None:
        return STATE[kind]()
    return expected


@dataclass
class GuardSet:
    """Guards in the order in which the trace met them, without repeats."""
    guards: dict = field(default_factory=dict)

    def add(self, source: Source | None, kind: str, expected: Any = None, location: Any = None) -> None:
        """Record one fact. Raises KeyError on an unknown kind."""
        if kind not in GUARD_KINDS:
            raise KeyError(f"unknown guard kind {kind!r}")
        if source is None and kind in STATE:
            source = GlobalStateSource(kind)
        expected = freeze(kind, expected)
        key = (source, kind, identity_key(expected))
        if key not in self.guards:
            self.guards[key] = Guard(source, kind, expected, location)

    def __iter__(self):
        return iter(self.guards.values())

    def __len__(self):
        return len(self.guards)


# %% [markdown]
# ## Kinds
#
# `@guard("NAME")` registers a kind. The function gets the guard, the text `x` that reads its source, and
# `const`: `const(object)` is a name for any object, `const.read(source)` the text that reads a further
# source. It returns conditions; all must hold.

# %%
GUARD_KINDS: dict[str, Callable] = {}


def guard(kind: str):
    def register(make_conditions):
        GUARD_KINDS[kind] = make_conditions
        return make_conditions
    return register


@guard("TYPE_MATCH")
def type_match(g, x, const):
    return [Condition(f"type({x}) is {name_of(weakly(g.expected), const)}",
                      lambda v: changed(f"type of {g.source}", strongly(g.expected), type(v)))]


# %% [markdown]
# **Identity.** An object is compared with a weak reference to it (`identity.py` says which objects and why).

# %%
def name_of(expected, const) -> str:
    """Text for an object that `weakly` returned."""
    return const(expected) + "()" * isinstance(expected, weakref.ref)


@guard("ID_MATCH")
def id_match(g, x, const):
    expected = weakly(g.expected)
    alive = f"{x} is not None and " if isinstance(expected, weakref.ref) else ""
    return [Condition(f"{alive}{x} is {name_of(expected, const)}",
                      lambda v: f"{g.source} is another object: {short(v)}")]


def weak_identities(guards) -> GuardSet:
    """The same guards, with the objects and classes that they identify held weakly. A cache entry keeps this
    set, not the original."""
    result = GuardSet()
    for g in guards:
        expected = g.expected
        if g.kind in ("ID_MATCH", "TYPE_MATCH", "FUNCTION_CODE", "GLOBALS"):
            expected = weakly(expected)
        elif g.kind == "CONSTANT_MATCH":
            expected = held(expected)
        elif g.kind == "MODULE_STRUCTURE":
            expected = replace(expected, type=weakly(expected.type))
        elif g.kind == "CLASS_ATTR":
            expected = (weakly(expected[0]), expected[1], weakly_found(expected[2]))
        elif g.kind == "FUNCTION":
            expected = weak_facts(*expected)
        elif g.kind == "ANSWER":
            expected = (held(expected[0]), tuple(map(held, expected[1])), held(expected[2]))
        result.add(g.source, g.kind, expected, g.location)
    return result


# %% [markdown]
# **Constants.** Equality is too kind: `True == 1 == 1.0`, but `x * True` and `x * 1.0` have different
# dtypes, so types are compared first. It is also too strict: `nan != nan`. And `0.0 == -0.0` although `1 /
# x` differs.

# %% tags=["exercise:same-constant"]
def same_constant(a, b) -> bool:
    """Whether no program can tell `a` from `b`; for compound constants of tuples, frozensets, slices,
    floats."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return (a != a and b != b) or (a == b and math.copysign(1.0, a) == math.copysign(1.0, b))
    if isinstance(a, complex):
        return same_constant(a.real, b.real) and same_constant(a.imag, b.imag)
    if isinstance(a, (tuple, list, frozenset)):          # a loop over a set was unrolled in its order
        return len(a) == len(b) and all(map(same_constant, a, b))
    if isinstance(a, slice):
        return same_constant((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    return a is b or bool(a == b)


@guard("CONSTANT_MATCH")
def constant_match(g, x, const):
    e = held(g.expected)
    why = lambda v: changed(g.source, strongly(e), v)
    if e is None or isinstance(e, (bool, type, torch.dtype)) or e is Ellipsis:
        return [Condition(f"{x} is {e if e is None or isinstance(e, bool) else const(e)}", why)]
    if type(e) in (int, str, bytes):
        return [Condition(f"type({x}) is {type(e).__name__} and {x} == {e!r}", why)]
    if type(e) is float and e == e and e != 0.0 and not math.isinf(e):
        return [Condition(f"type({x}) is float and {x} == {e!r}", why)]
    return [Condition(f"__same_constant({x}, {name_of(e, const)})", why)]


# %% [markdown]
# **Containers and attributes.** A loop over a list was unrolled, so its length matters; a loop over a dict
# was unrolled in the order of its keys.

# %%
@guard("TUPLE_LENGTH")
@guard("LENGTH")
def length(g, x, const):
    return [Condition(f"len({x}) == {g.expected}",
                      lambda v: changed(f"length of {g.source}", g.expected, len(v)))]


@guard("DICT_KEYS")
def dict_keys(g, x, const):
    why = lambda v: changed(f"keys of {g.source}", list(g.expected), list(v))
    if not g.expected:
        return [Condition(f"not {x}", why)]
    if all(type(k) is str for k in g.expected):
        return [Condition(f"[*{x}] == {list(g.expected)!r}", why)]
    return [Condition(f"__same_constant([*{x}], {const(list(g.expected))})", why)]


@guard("NO_ATTR")
def no_attr(g, x, const):
    return [Condition(f"not hasattr({x}, {g.expected!r})",
                      lambda v: f"{g.source} has an attribute {g.expected!r} now")]


@guard("NO_KEY")
def no_key(g, x, const):
    key = repr(g.expected) if isinstance(g.expected, str) else const(g.expected)
    return [Condition(f"{key} not in {x}", lambda v: f"{g.source} has a key {g.expected!r} now")]


def weak_facts(function, code, defaults: tuple | None, kwdefaults: tuple) -> tuple:
    """What a FUNCTION guard expects, held weakly."""
    return (weakly(function), weakly(code), defaults and tuple(map(weakly, defaults)),
            tuple((name, weakly(value)) for name, value in kwdefaults))


def function_has(function, code, defaults, kwdefaults) -> bool:
    """Whether the function still is what `weak_facts` was given."""
    function = strongly(function)
    if function is None or function.__code__ is not strongly(code):
        return False
    pairs = [((None, value), (None, old)) for value, old in zip(function.__defaults__ or (), defaults or ())]
    now = tuple((function.__kwdefaults__ or {}).items())
    return len(pairs) == len(function.__defaults__ or ()) == len(defaults or ()) and \
        len(now) == len(kwdefaults) and all(name == other and value is strongly(old) for (name, value), (other, old)
                                            in (*pairs, *zip(now, kwdefaults)))


@guard("FUNCTION")
def function_facts(g, x, const):
    """No source; expected: a function that was inlined, its code, defaults, and keyword-only
    defaults (name, value)."""
    facts = weak_facts(*g.expected)
    return [Condition(f"__function_has({', '.join(map(const, facts))})",
                      lambda v: f"the code or a default of {short(strongly(facts[0]))} was replaced")]


@guard("FUNCTION_CODE")
def function_code(g, x, const):
    return [Condition(f"{x}.__code__ is {name_of(weakly(g.expected), const)}",
                      lambda v: f"{g.source} is another function: {short(v)}")]


@guard("GLOBALS")
def same_globals(g, x, const):
    """That the function being called has the globals of `expected`, a module or a function, or without it
    those of the function that the source reads. Functions of equal code may have others."""
    owner = x if g.expected is None else name_of(weakly(g.expected), const)
    name = "__dict__" if isinstance(strongly(g.expected), types.ModuleType) else "__globals__"
    return [Condition(f"{owner}.{name} is __G", lambda v: "the function has other globals")]


# %% [markdown]
# **Classes.** Calling `obj.method()` finds `method` in a dictionary of the class or of a base. Programs do
# replace methods (`Model.forward = patched`), and a class may gain a property that shadows an instance's
# attribute. So every search along the bases is guarded, also one that found nothing.

# %%
MISSING = object()


def class_lookup(cls: type, name: str):
    """The attribute as it lies in the dictionary of the first class that has it, or MISSING."""
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return MISSING


def class_has(cls, name: str, found) -> bool:
    """Whether the class still has this attribute; both as `weakly` and `weakly_found` give them."""
    cls = strongly(cls)
    return cls is not None and is_found(class_lookup(cls, name), found)


@guard("CLASS_ATTR")
def class_attr(g, x, const):
    """No source; expected: (class, name, what `class_lookup` finds)."""
    cls, name, found = g.expected
    return [Condition(f"__class_has({const(weakly(cls))}, {name!r}, {const(weakly_found(found))})",
                      lambda v: f"the attribute {name!r} of {short(strongly(cls))} was set, replaced or "
                                "removed")]


# %% [markdown]
# ## Modules
#
# For a module we inline `forward`, which is right as long as nobody swaps the class, registers a hook, or
# changes the names of its children. Reading `module.__dict__` once and subscripting it keeps a module's
# guard near 0.2 microseconds.

# %%
HOOK_DICTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
CHILD_DICTS = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class ModuleSpec:
    """type: the class; children: per dictionary its keys in order; hooks: the hook dictionaries that were
    empty; visible: children that no attribute in the module's `__dict__` hides."""
    type: type
    children: tuple
    hooks: tuple = HOOK_DICTS
    visible: frozenset = frozenset()

    @staticmethod
    def of(module: torch.nn.Module) -> "ModuleSpec":
        d = module.__dict__
        children = tuple((k, tuple(d[k])) for k in CHILD_DICTS)
        return ModuleSpec(type(module), children, tuple(h for h in HOOK_DICTS if not d.get(h)),
                          frozenset(key for _, keys in children for key in keys if key not in d))


@guard("MODULE_STRUCTURE")
def module_structure(g, x, const):
    """expected: a ModuleSpec. The class, the names of children, and the absence of hooks and of attributes
    that hide a child."""
    spec, d, module = g.expected, const.read(InstanceDictSource(g.source)), f"module {g.source}"
    result = [Condition(f"type({x}) is {name_of(weakly(spec.type), const)}",
                        lambda v: changed(f"class of {module}", strongly(spec.type), type(v)))]
    for kind, keys in spec.children:
        what = f"{kind.strip('_')} of {module}"
        text = f"[*{d}[{kind!r}]] == {list(keys)!r}" if keys else f"not {d}[{kind!r}]"
        result.append(Condition(text, lambda v, what=what, kind=kind, keys=keys: changed(
            what, list(keys), list(v.__dict__[kind]))))
    if spec.visible:
        result.append(Condition(f"{const(spec.visible)}.isdisjoint({d})",
                                lambda v: f"an attribute of {module} hides a child of the same name"))
    if spec.hooks:
        text = " or ".join(f"{d}[{h!r}]" for h in spec.hooks)
        result.append(Condition(f"not ({text})", lambda v: f"a hook was registered on {module}"))
    return result


# %% [markdown]
# ## Tensors
#
# A graph is specialised to a tensor's class, dtype, device, shape, strides and need of gradients. Each
# condition is one attribute read implemented in C, together about 0.4 microseconds (`stable.py` takes 0.02
# for metadata that was accepted before). Strides are the interesting one: in the common case of a contiguous
# tensor, `is_contiguous()` is cheaper than building and comparing a tuple, and ignores the strides of
# dimensions of size one, which nothing can observe.
#
# Dimensions in `dynamic_dims` are symbols in the graph. Their size is not compared, except that sizes 0 and
# 1 get their own graph: broadcasting makes them different programs.

# %% tags=["exercise:contiguous-strides"]
def contiguous_strides(shape) -> tuple:
    """The strides of a row-major tensor; sizes may be symbolic."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step = step * (max(size, 1) if isinstance(size, int) else size)
    return tuple(reversed(strides))


PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)       # classes without behaviour of their own


@dataclass(frozen=True)
class TensorSpec:
    """What a graph assumes about one strided tensor. `stride` is a tuple (a `stride_pattern` if sizes may
    vary), "contiguous" or "channels_last". `dynamic_dims` are the dimensions whose size may vary (but stays
    above 1)."""
    type: type
    dtype: torch.dtype
    device: torch.device
    shape: tuple
    stride: tuple | str
    requires_grad: bool
    is_conj: bool = False
    is_neg: bool = False
    is_inference: bool = False
    dynamic_dims: frozenset = frozenset()

    @staticmethod
    def of(t: torch.Tensor, dynamic_dims=()) -> "TensorSpec":
        stride, dynamic_dims = tuple(t.stride()), frozenset(dynamic_dims)
        if t.is_contiguous():
            stride = "contiguous"
        elif dynamic_dims and t.ndim == 4 and t.is_contiguous(memory_format=torch.channels_last):
            stride = "channels_last"
        elif dynamic_dims:
            stride = stride_pattern(t, dynamic_dims)
        return TensorSpec(type(t), t.dtype, t.device, tuple(t.shape), stride, t.requires_grad, t.is_conj(),
                          t.is_neg(), t.is_inference(), dynamic_dims)


# %%
@guard("TENSOR_MATCH")
def tensor_match(g, x, const):
    """expected: a TensorSpec (`add` takes a tensor too)."""
    s = g.expected
    name, result = f"tensor '{g.source}'", []

    def condition(text, what, expected, got):
        result.append(Condition(
            text, lambda v: f"{name} {what} mismatch: expected {short(expected)}, got {short(got(v))}"))

    condition(f"type({x}) is {const(s.type)}", "class", s.type, type)
    condition(f"{x}.dtype is {const(s.dtype)}", "dtype", s.dtype, lambda v: v.dtype)
    if s.dynamic_dims:
        result.append(Condition(f"{x}.dim() == {len(s.shape)}",
                                lambda v: f"{name} rank mismatch: expected {len(s.shape)}, got {v.dim()}"))
        for d, size in enumerate(s.shape):
            text = f"{x}.size({d}) > 1" if d in s.dynamic_dims else f"{x}.size({d}) == {int(size)}"
            result.append(Condition(text, lambda v: shape_mismatch(name, s, v)))
    else:
        result.append(Condition(f"{x}.shape == {tuple(map(int, s.shape))}",
                                lambda v: shape_mismatch(name, s, v)))
    if isinstance(s.stride, str):
        layout = "" if s.stride == "contiguous" else f"memory_format=__torch.{s.stride}"
        condition(f"{x}.is_contiguous({layout})", "stride", s.stride, lambda v: v.stride())
    elif s.dynamic_dims:
        for d, pattern in enumerate(s.stride):
            base, dims = (pattern, ()) if isinstance(pattern, int) else pattern
            text = " * ".join([str(base), *(f"{x}.size({i})" for i in dims)])
            if s.shape[d] != 1 or d in s.dynamic_dims:
                condition(f"{x}.stride({d}) == {text}", "stride", text.replace("__x", ""),
                          lambda v: v.stride())
    else:
        condition(f"{x}.stride() == {tuple(map(int, s.stride))}", "stride", s.stride, lambda v: v.stride())
    condition(f"{x}.device == {const(s.device)}", "device", s.device, lambda v: v.device)
    condition(f"{x}.requires_grad is {bool(s.requires_grad)}", "requires_grad", s.requires_grad,
              lambda v: v.requires_grad)
    if s.dtype.is_complex:
        condition(f"{x}.is_conj() is {s.is_conj}", "conjugate bit", s.is_conj, lambda v: v.is_conj())
    # `z.conj().imag` is float32, and can be the `data` of a parameter
    if s.dtype.is_complex or s.dtype.is_floating_point and s.type in PLAIN_TYPES:
        condition(f"{x}.is_neg() is {s.is_neg}", "negative bit", s.is_neg, lambda v: v.is_neg())
    if s.type in PLAIN_TYPES:                          # tangents of forward-mode AD may be without memory
        condition(f"{x}._is_zerotensor() is False", "zero bit", False, lambda v: v._is_zerotensor())
    if s.is_inference:
        condition(f"{x}.is_inference()", "inference flag", True, lambda v: False)
    return result


def shape_mismatch(name, spec, value) -> str:
    shape = tuple(value.shape)
    if len(shape) != len(spec.shape):
        return f"{name} rank mismatch: expected {len(spec.shape)}, got {len(shape)}"
    for d, (expected, got) in enumerate(zip(spec.shape, shape)):
        if d in spec.dynamic_dims and got <= 1:
            return f"{name} size mismatch at dimension {d}: expected a dynamic size above 1, got {got}"
        if d not in spec.dynamic_dims and expected != got:
            return f"{name} size mismatch at dimension {d}: expected {expected}, got {got}"
    return f"{name} size mismatch: expected {spec.shape}, got {shape}"


@guard("NOT_A_VIEW")
def not_a_view(g, x, const):
    """expected: whether it is a leaf. Of a view that is not asked: PyTorch would make its `grad_fn` anew."""
    return [Condition(f"not {x}._is_view()", lambda v: f"{g.source} is a view of another tensor"),
            Condition(f"{x}.is_leaf is {g.expected}", lambda v: f"is_leaf of {g.source} changed")]


# %% [markdown]
# Two arguments may be the *same* tensor, or the same list. A graph traced with two different ones reads the
# second after writing the first and sees no change, so identity among what was found is part of what was
# assumed: for tensors and objects of a class of which one was written to, or that the program told apart.
# `NOT_ALIASED` takes one other source or a tuple of them; all are compared at once by the size of a set.

# %%
def others(g) -> tuple:
    """The further sources of ALIASED and NOT_ALIASED."""
    return g.expected if isinstance(g.expected, tuple) else (g.expected,)


@guard("ALIASED")
def aliased(g, x, const):
    return [Condition(f"{x} is {const.read(g.expected)}",
                      lambda v: f"{g.source} and {g.expected} are not the same object now")]


@guard("NOT_ALIASED")
def not_aliased(g, x, const):
    first, *more = others(g)
    if not more:
        return [Condition(f"{x} is not {const.read(first)}",
                          lambda v: f"{g.source} and {first} are the same object now")]
    ids = ", ".join(f"id({text})" for text in (x, *map(const.read, others(g))))
    names = [str(source) for source in (g.source, *others(g))]
    return [Condition(f"len({{{ids}}}) == {len(names)}",
                      lambda v: f"two of {short(names)} are the same object now")]


# %% [markdown]
# **Sizes.** A branch on a symbolic size, `if n % 8 == 0`, was answered for the traced size. The guard is
# the predicate itself: its text over symbol names, and the source that each symbol is read from.

# %%
@guard("SIZE")
def size(g, x, const):
    """expected: (predicate text, ((symbol, Source), ...)), e.g. ("s0 % 8 == 0", (("s0", CallSource(x,
    "size", (0,))),))."""
    predicate, symbols = g.expected
    where = ", ".join(f"{name} = {source}" for name, source in symbols)
    reads = {name: const.read(source) for name, source in symbols}
    text = re.sub(r"[A-Za-z_]\w*", lambda m: reads.get(m.group(), m.group()), predicate)
    return [Condition(f"({text})", lambda v: f"size guard failed: {predicate}" + (f" with {where}"
                                                                                  if where else ""))]


# %% [markdown]
# ## State of the library
#
# `torch.no_grad()` around a compiled call, another autocast dtype, a new default dtype: none is an
# argument, all change what the code means.

# %%
def autocast_state() -> tuple:
    """((device, enabled, dtype) for each device with a kernel set here, cache enabled)."""
    return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d))
                 for d in ("cpu", "cuda") if torch.is_autocast_enabled(d))


def torch_function_state() -> tuple:
    """(torch functions enabled, TorchFunctionModes by device or class, number of TorchDispatchModes,
    inside of torch.func.vmap and its like, inside of forward-mode differentiation)."""
    modes = torch.overrides._get_current_function_mode_stack() if torch._C._len_torch_function_stack() else ()
    return (torch._C._is_torch_function_enabled(), tuple(str(getattr(m, "device", type(m))) for m in modes),
            torch._C._len_torch_dispatch_stack(), torch._C._are_functorch_transforms_active(),
            torch.autograd.forward_ad._current_level >= 0)


@guard("ANSWER")
def answer(g, x, const):
    """No source; expected: (function, its arguments, what it answered), for other settings of the library."""
    function, args, result = held(g.expected[0]), tuple(map(held, g.expected[1])), held(g.expected[2])
    now = f"{name_of(function, const)}({', '.join(name_of(a, const) for a in args)})"
    return [Condition(f"__same_constant({now}, {name_of(result, const)})",
                      lambda v: changed(f"{strongly(function).__name__}{tuple(map(strongly, args))}", strongly(result),
                                        strongly(function)(*map(strongly, args))))]


def global_hooks() -> tuple:
    """The hooks that run around every module's call."""
    return tuple(hook for hooks in GLOBAL_HOOKS for hook in hooks.values())


GLOBAL_HOOKS = tuple(vars(torch.nn.modules.module)["_global" + name] for name in HOOK_DICTS)

# A guard for each state, compared with what is read at the beginning of the trace
STATE = {"GRAD_MODE": torch.is_grad_enabled, "INFERENCE_MODE": torch.is_inference_mode_enabled,
         "DEFAULT_DTYPE": torch.get_default_dtype,
         "DETERMINISTIC": torch.are_deterministic_algorithms_enabled, "AUTOCAST": autocast_state,
         "TORCH_FUNCTION": torch_function_state, "GLOBAL_HOOKS": global_hooks}

# The usual values of some, tested without building a tuple: these run on every compiled call
USUAL = {("GLOBAL_HOOKS", ()): "not (__hooks[0] or __hooks[1] or __hooks[2] or __hooks[3])",
         ("AUTOCAST", ()): "not __torch._C._is_any_autocast_enabled()",
         ("TORCH_FUNCTION", (True, (), 0, False, False)):
         "__torch._C._is_torch_function_enabled() and not (__torch._C._len_torch_function_stack() or "
         "__torch._C._len_torch_dispatch_stack() or __torch._C._are_functorch_transforms_active() or "
         "__torch.autograd.forward_ad._current_level >= 0)"}


def state_match(g, x, const):
    """expected: a value that `STATE` gave (`add` without one takes the state of the moment)."""
    e = g.expected
    plain = e if isinstance(e, bool) else const(e)
    text = f"{x} is {plain}" if isinstance(e, (bool, torch.dtype)) else f"{x} == {plain}"
    return [Condition(USUAL.get((g.kind, e), text), lambda v: changed(g.source, e, v))]


GUARD_KINDS.update(dict.fromkeys(STATE, state_match))
