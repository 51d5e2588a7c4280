# %% [markdown]
# # Guards of PyTorch: modules, tensors, the state of the library
#
# The kinds of guards that a program without tensors has no use for.

# %%
import dis
import functools
import math
import sys
import types
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..ch01_graphs.layouts import from_inside, stride_pattern
from .guards import ALL, SAME, STATE, TENSOR, WATCHED, Condition, Spec, changed_in_words, class_lookup, guard_kind, name_of, one, short
from .identity import LIBRARIES, held, is_found, module_name, strongly, weakly, weakly_found
from .sources import InstanceDictSource, ItemSource

# %% [markdown]
# ## Modules
#
# For a module we inline `forward`, which is right as long as nobody swaps the class, registers a hook, or
# changes the names of its children. Reading `module.__dict__` once and subscripting it keeps a module's
# guard near 0.2 microseconds.

# %%
HOOK_DICTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
CHILD_DICTS = ("_parameters", "_buffers", "_modules")


class ModuleSpec(NamedTuple):
    """type: the class, held weakly; children: per dictionary its keys in order; hooks: the hook dictionaries that
    were empty; visible: children that no attribute in the module's `__dict__` hides."""
    type: Any
    children: tuple
    hooks: tuple = HOOK_DICTS
    visible: frozenset = frozenset()

    @staticmethod
    def of(module: torch.nn.Module) -> "ModuleSpec":
        d = module.__dict__
        children = tuple((k, tuple(d[k])) for k in CHILD_DICTS)
        return ModuleSpec(weakly(type(module)), children, tuple(h for h in HOOK_DICTS if not d.get(h)),
                          frozenset(key for _, keys in children for key in keys if key not in d))


# %% [markdown]
# A module's guard has four conditions: the class, the names of its children in each of three dictionaries, no
# attribute that hides a child, and no hooks. `module_looks` says which dictionaries these read, so that a memo can
# watch them: the condition holds as long as none of them was changed. The second function writes the conditions as
# text for the case that they have to be checked in full, and each with a sentence for the user.

# %%
def module_looks(g) -> list[tuple]:
    """The dictionaries of children and of hooks."""
    fields, spec = InstanceDictSource(g.source), g.expected
    return [*((ALL, ItemSource(fields, name)) for name in (*dict(spec.children), *spec.hooks)),
            *((SAME, ItemSource(fields, name)) for name in spec.visible)]


@guard_kind("MODULE_STRUCTURE",
            lambda g: f"{g.source} is {one(strongly(g.expected.type).__qualname__)} with the same children and no hooks",
       looks=module_looks)
def module_structure(g, x, const):
    """expected: a ModuleSpec. The class, the names of children, and the absence of hooks and of attributes
    that hide a child."""
    spec, d, module = g.expected, const.read(InstanceDictSource(g.source)), f"module {g.source}"
    result = [Condition(f"type({x}) is {name_of(spec.type, const)}",
                        lambda v: changed_in_words(f"class of {module}", strongly(spec.type), type(v)))]
    for kind, keys in spec.children:
        what = f"{kind.strip('_')} of {module}"
        text = f"[*{d}[{kind!r}]] == {list(keys)!r}" if keys else f"not {d}[{kind!r}]"
        result.append(Condition(text, lambda v, what=what, kind=kind, keys=keys: changed_in_words(
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
# dimensions of size one, which no operator looks at. (A program that reads them with `x.stride(0)` gets a guard on
# what it read.)
#
# Dimensions in `dynamic_dims` are symbols in the graph. Their size is not compared, except that sizes 0 and
# 1 get their own graph: broadcasting makes them different programs.

# %%
PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)       # classes without behaviour of their own


@dataclass(frozen=True)
class TensorSpec(Spec):
    """What a graph assumes about one strided tensor. `stride` is a tuple (a `stride_pattern` if sizes or strides may
    vary), "contiguous" or "channels_last". `dynamic_dims` are the dimensions whose size may vary (but stays
    above 1), `steps` those whose stride may vary."""
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
    steps: frozenset = frozenset()

    @staticmethod
    def of(t: torch.Tensor, dynamic_dims=(), steps=()) -> "TensorSpec":
        stride, dynamic_dims, steps = tuple(t.stride()), frozenset(dynamic_dims), frozenset(steps)
        if t.is_contiguous():
            stride = "contiguous"
        elif dynamic_dims and t.ndim == 4 and t.is_contiguous(memory_format=torch.channels_last):
            stride = "channels_last"
        elif dynamic_dims or steps:
            stride = stride_pattern(t, dynamic_dims, steps)
        return TensorSpec(type(t), t.dtype, t.device, tuple(t.shape), stride, t.requires_grad, t.is_conj(),
                          t.is_neg(), t.is_inference(), dynamic_dims, steps)

    @property
    def free_dims(self) -> int:
        """A bit for each dim of which a memo need not know the size: the strides, which it looks at, too, follow from the sizes."""
        return sum(1 << d for d in self.dynamic_dims) if self.stride == "contiguous" and not self.steps else 0


# %%
def tensor_in_words(g) -> str:
    spec = g.expected
    shape = ", ".join("any" if d in spec.dynamic_dims else str(n) for d, n in enumerate(spec.shape))
    layout = spec.stride if isinstance(spec.stride, str) else f"strides {spec.stride}"
    kind = "tensor" if spec.type is torch.Tensor else spec.type.__name__
    grad = ", requires grad" if spec.requires_grad else ""
    return f"{g.source} is {one(str(spec.dtype).removeprefix('torch.'))} {kind} [{shape}] on {spec.device}, {layout}{grad}"

# %% [markdown]
# A generated kernel has everything about its operands built in that is not their numbers: the class, the
# dtype, the sizes, the strides, the device. So the guard of a tensor is the longest of all, one condition
# for each. They are ordered by how often they fail. If all sizes are fixed, they are one comparison of
# shapes. Otherwise each dimension has its own: a number for a fixed size, "above 1" for a symbolic one.
# Strides are a word where possible, *contiguous* or *channels last*, because this word holds for all sizes.
# Where neither is true and sizes vary, each stride must be the same product of sizes that it was
# (`stride_pattern`). A stride that has varied while the sizes inside of it did not, as that of the last column of a longer
# and longer sequence, may be any that leaves the dims in their order in memory, each beyond those inside of it, and with a gap where there
# was one.
#
# Four bits come at the end, which most programs never set: conjugation and negation, which PyTorch leaves
# for later; the zero tensor of forward-mode differentiation; inference tensors, which autograd refuses. A
# kernel that reads the memory would not see them.
#
# For a contiguous tensor of 4 by 8 numbers whose two sizes may vary, these are the conditions. They stand in one function for all tensors
# of a call, whose first argument is this one, and which has class, dtype and device as constants of its own:
#
#     type(__a0) is __tensors_g0
#     __a0.dtype is __tensors_g1
#     __a0.dim() == 2
#     __a0.size(0) > 1
#     __a0.size(1) > 1
#     __a0.is_contiguous()
#     __a0.device == __tensors_g2
#     __a0.requires_grad is False
#     __a0.is_neg() is False
#     __a0._is_zerotensor() is False
#     __a0.is_inference() is False
#
# With fixed sizes three of them are the one comparison `__a0.shape == (4, 8)`.

# %%
@guard_kind("TENSOR_MATCH", tensor_in_words, lambda t: t if isinstance(t, TensorSpec) else TensorSpec.of(t),
       lambda g: [(TENSOR, g.source)])
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
    elif s.dynamic_dims or s.steps:
        for d, text in strides_in_words(s, x):
            condition(f"{x}.stride({d}) {text}", "stride", text.replace("__x", ""), lambda v: v.stride())
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
    if not s.requires_grad:                            # what requires a gradient is none
        condition(f"{x}.is_inference() is {s.is_inference}", "inference flag", s.is_inference, lambda v: v.is_inference())
    return result


# %% [markdown]
# What must be true of strides, where sizes vary and no word fits. A dim whose stride follows from sizes has to have that product again.
# One whose stride may vary (`steps`) has to lie beyond the dim inside of it, all of whose elements its step passes.

# %%
def present_strides(spec: TensorSpec) -> list[int]:
    """Those of the tensor that the spec was made of, where it has no name for its layout."""
    return [p if isinstance(p, int) else math.prod([spec.shape[i] for i in p[1]], start=p[0]) for p in spec.stride]


def strides_in_words(spec: TensorSpec, x: str):
    """What must be true of the strides of dims: (dim, "== ...", "> ..." or ">= ..."). x: the text of the tensor."""
    def product(first, dims):
        return " * ".join([str(first), *(f"{x}.size({i})" for i in dims)])

    for d, pattern in enumerate(spec.stride):
        base, dims = (pattern, ()) if isinstance(pattern, int) else pattern
        if d not in spec.steps and (spec.shape[d] != 1 or d in spec.dynamic_dims):
            yield d, "== " + product(f"{x}.stride({dims[0]})" if not spec.steps.isdisjoint(dims[:1]) else base, dims)
    order = [d for d in from_inside(spec.shape, present_strides(spec)) if spec.shape[d] != 1]
    for within, d in zip([None, *order], order if spec.steps else ()):
        if d in spec.steps:
            yield d, "> " + ("1" if within is None else product(f"{x}.stride({within})", [within]))
        elif isinstance(spec.stride[d], int) and within is not None:
            yield d, ">= " + product(f"{x}.stride({within})", [within])


# %% [markdown]
# When a guard has failed, somebody wants to know which size was another one, and whether it was meant to vary (`shape_mismatch`). The two
# kinds after it are about views, for graphs that differentiate (chapter 12).

# %%
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


@guard_kind("NOT_A_VIEW", lambda g: f"{g.source} is not a view, and {'a' if g.expected else 'no'} leaf")
def not_a_view(g, x, const):
    """expected: whether it is a leaf. Of a view that is not asked: PyTorch would make its `grad_fn` anew."""
    return [Condition(f"not {x}._is_view()", lambda v: f"{g.source} is a view of another tensor"),
            Condition(f"{x}.is_leaf is {g.expected}", lambda v: f"is_leaf of {g.source} changed")]


@guard_kind("GRADIENT_OF_ITS_OWN",
            lambda g: f"{g.source} is no view that was taken, while gradients were off, of a tensor that requires one")
def gradient_of_its_own(g, x, const):
    """Such a view says that it requires a gradient, has no history, and none comes to it."""
    return [Condition(f"not ({x}._is_view() and {x}.grad_fn is None and {x}._base.requires_grad)",
                      lambda v: f"{g.source} is a view that was taken, while gradients were off, of a tensor that requires one")]


# %% [markdown]
# The hundred counters of an optimizer are tensors on the CPU with one number, of which the trace has made one symbol
# (chapter 3). To ask each for its number takes a hundred calls, so all are asked in one (`memory.py`).

# %%
@guard_kind("COUNTERS", lambda g: f"{g.source} and {len(g.expected)} other counters have the same number, and memory of their own")
def counters(g, x, const):
    """expected: the other sources. All have one number."""
    everyone = ", ".join([x, *map(const.read, g.expected)])
    return [Condition(f"__agree({everyone})", lambda v: f"{g.source}, which is {v.item()}, and {len(g.expected)} other counters do not "
                                                        "have one number any more, or share memory")]


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


BATCHING = torch._C._parse_dispatch_key("VmapMode")


def is_transforming() -> bool:
    """Inside of torch.func.vmap and its like, or of what `torch.autograd.grad(..., is_grads_batched=True)` batches with?"""
    return torch._C._are_functorch_transforms_active() or torch._C._dispatch_tls_is_dispatch_key_included(BATCHING)


def torch_function_state() -> tuple:
    """(torch functions enabled, TorchFunctionModes by device or class, number of TorchDispatchModes,
    inside of a transform, inside of forward-mode differentiation)."""
    modes = torch.overrides._get_current_function_mode_stack() if torch._C._is_torch_function_mode_enabled() else ()
    return (torch._C._is_torch_function_enabled(), tuple(str(getattr(m, "device", type(m))) for m in modes),
            torch._C._len_torch_dispatch_stack(), is_transforming(),
            torch.autograd.forward_ad._current_level >= 0)


@guard_kind("ANSWER", lambda g: f"{call_in_words(g)} is {short(strongly(g.expected[2]))}",
       lambda facts: (held(facts[0]), tuple(map(held, facts[1])), held(facts[2])))
def answer(g, x, const):
    """No source; expected: (function, its arguments, what it answered), for other settings of the library."""
    function, args, result = g.expected
    now = f"{name_of(function, const)}({', '.join(name_of(a, const) for a in args)})"
    return [Condition(f"__same_constant({now}, {name_of(result, const)})",
                      lambda v: changed_in_words(call_in_words(g), strongly(result), strongly(function)(*map(strongly, args))))]


def call_in_words(g) -> str:
    return f"{strongly(g.expected[0]).__name__}{tuple(map(strongly, g.expected[1]))}"


# %% [markdown]
# Hooks that were registered for *all* modules lie in four dictionaries of PyTorch. They are nearly always empty,
# as there is nearly never a mode, and autocast is off in most calls. The exact comparison would build tuples at
# every call to find that out. So each state may come with a faster test for its usual value, a few C functions
# that answer True or False. `ASK` names these functions in the generated text.

# %%
def global_hooks() -> tuple:
    """The hooks that run around every module's call."""
    return tuple(hook for hooks in GLOBAL_HOOKS for hook in hooks.values())


GLOBAL_HOOKS = tuple(vars(torch.nn.modules.module)["_global" + name] for name in HOOK_DICTS)

# What the usual values are tested with, function by function: these run on every compiled call
ASK = {"__any_autocast": torch._C._is_any_autocast_enabled, "__overrides": torch._C._is_torch_function_enabled,
       "__function_modes": torch._C._len_torch_function_stack, "__dispatch_modes": torch._C._len_torch_dispatch_stack,
       "__transforms": torch._C._are_functorch_transforms_active, "__forward_ad": torch.autograd.forward_ad,
       "__included": torch._C._dispatch_tls_is_dispatch_key_included, "__batching": BATCHING,
       **{f"__hooks{i}": hooks for i, hooks in enumerate(GLOBAL_HOOKS)}}


# %% [markdown]
# `state` makes a guard kind of a function that reads a state: the condition is `is` for booleans and dtypes, `==`
# for tuples, or the fast test if the expected value is the usual one.

# %%
def state(kind: str, read, words, usual=None, test: str = "") -> None:
    """A guard for one state. words(expected); test: text that tells whether it has the `usual` value, without making a tuple."""
    def conditions(g, x, const):
        e = g.expected
        plain = e if isinstance(e, bool) else const(e)
        text = f"{x} is {plain}" if isinstance(e, (bool, torch.dtype)) else f"{x} == {plain}"
        return [Condition(test if test and e == usual else text, lambda v: changed_in_words(g.source, e, v))]

    STATE[kind] = read
    guard_kind(kind, lambda g: words(g.expected), lambda expected: read() if expected is None else expected)(conditions)


def on_or_off(what: str):
    return lambda expected: f"{what} {'on' if expected else 'off'}"


state("GRAD_MODE", torch.is_grad_enabled, lambda e: f"gradients are {'' if e else 'not '}recorded")
state("INFERENCE_MODE", torch.is_inference_mode_enabled, on_or_off("inference mode is"))
state("DEFAULT_DTYPE", torch.get_default_dtype, lambda e: f"default dtype is {e}")
state("DETERMINISTIC", torch._C._get_deterministic_algorithms, on_or_off("deterministic algorithms are"))
USUAL = {"AUTOCAST": (), "TORCH_FUNCTION": (True, (), 0, False, False)}
state("AUTOCAST", autocast_state, lambda e: f"autocast is {short(e) if e else 'off'}", USUAL["AUTOCAST"], "not __any_autocast()")
state("TORCH_FUNCTION", torch_function_state, lambda e: "no mode sees operations" if e[0] and not any(e[1:]) else
      f"the modes that see operations are the same ({short(e)})", USUAL["TORCH_FUNCTION"],
      "__overrides() and not (__function_modes() or __dispatch_modes() or __transforms() "
      "or __included(__batching) or __forward_ad._current_level >= 0)")
state("GLOBAL_HOOKS", global_hooks, lambda e: f"hooks of all modules are {short(e) if e else 'none'}", (),
      "not (__hooks0 or __hooks1 or __hooks2 or __hooks3)")


# %% [markdown]
# **The methods of tensors** are the library's: `x + 1` becomes a node without a question about `__add__`. A program may replace one all the
# same. So it is guarded which of those that PyTorch has are others, and what these are. What a program can write to is the dictionary of
# `torch.Tensor`, its bases are of C: comparing the 72 items there takes 4 microseconds, looking up all 700 methods a millisecond, which a
# model whose parameters are frozen and thawed in turn would pay in each call.

# %%
METHODS_OF_TENSORS = {name: class_lookup(torch.Tensor, name) for name in (*dir(torch.Tensor), "__getattr__")}
OWN_ITEMS = dict(vars(torch.Tensor))


def replaced_methods() -> dict:
    """What lies in torch.Tensor by a name that has something else in PyTorch."""
    now = vars(torch.Tensor)
    others = [name for name, found in now.items() if name not in OWN_ITEMS or OWN_ITEMS[name] is not found]
    others += [name for name in OWN_ITEMS if name not in now]
    return {name: found for name in others
            if name in METHODS_OF_TENSORS and (found := class_lookup(torch.Tensor, name)) is not METHODS_OF_TENSORS[name]}


def methods_are(expected) -> bool:
    replaced = replaced_methods()
    return len(replaced) == len(expected) and all(name in replaced and is_found(replaced[name], found) for name, found in expected)


def methods_in_words(g) -> str:
    return "the methods of tensors are PyTorch's" + (f", but for {', '.join(dict(g.expected))}" if g.expected else "")


@guard_kind("TENSOR_METHODS", methods_in_words,
            lambda replaced: tuple((name, weakly_found(found)) for name, found in replaced.items()),
            lambda g: [(WATCHED, weakly(torch.Tensor))])
def tensor_methods(g, x, const):
    """No source; expected: what `replaced_methods` gives."""
    return [Condition(f"__methods_are({const(g.expected)})", lambda v: "a method of torch.Tensor was replaced")]


# %% [markdown]
# **What a function of the library calls.** A graph has a call of `F.layer_norm`, a function in Python, which finds `torch.layer_norm` by
# its name. A program may put another there, and functions that name it are others then. So of each function that goes into a graph as a
# whole it is guarded that what it names, and what that names in turn, are PyTorch's functions. They were noted when this module was
# imported. Methods of tensors, which such a function calls, too, have the guard above.

# %%
FUNCTIONAL_MODULES = (
    "torch", "torch.functional", "torch.nn.functional", "torch.nn._reduction", "torch.linalg", "torch.special", "torch.fft",
    "torch._tensor", "torch._jit_internal", "torch._C", "torch._C._nn", "torch._C._linalg", "torch._C._fft", "torch._C._special")
OWN_FUNCTIONS = {name: {key: f if type(f) is types.BuiltinFunctionType or module_name(f).partition(".")[0] in LIBRARIES else False
                        for key, f in vars(sys.modules[name]).items() if type(f) in (types.FunctionType, types.BuiltinFunctionType)}
                 for name in FUNCTIONAL_MODULES}          # False: what a program has put there before


def chains(code: types.CodeType) -> list[list[str]]:
    """The globals that code reads, each with the attributes that are read from it at once: `torch._C._nn.mse_loss` as four names."""
    found, last = [], []
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            found.append(last := [instruction.argval])
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            last.append(instruction.argval)
        else:
            last = []
    return found + [chain for inner in code.co_consts if type(inner) is types.CodeType for chain in chains(inner)]


@functools.cache
def named_in(function: types.FunctionType) -> tuple[dict, set]:
    """Where a function of PyTorch finds others: {(module, name): PyTorch's function}, and the names of all attributes that it reads."""
    places, names, todo = {}, set(), [function]
    for f in todo:
        names.update(f.__code__.co_names)
        for chain in chains(f.__code__):
            space = f.__globals__
            for name in chain:
                own = OWN_FUNCTIONS.get(space["__name__"], {}).get(name)
                if own is not None and own is not function:
                    places[sys.modules[space["__name__"]], name] = own
                    todo += [own] if type(own) is types.FunctionType and own.__module__ in FUNCTIONAL_MODULES and own not in todo else []
                if own is not None or type(space.get(name)) is not types.ModuleType:
                    break
                space = vars(space[name])
        todo += [own for cell in f.__closure__ or () if type(own := cell.cell_contents) is types.FunctionType and own not in todo]
    return places, names


@guard_kind("NAMED_IN", lambda g: f"what {g.expected[0].__name__} calls is PyTorch's",
            looks=lambda g: [(SAME, at) for at, _ in g.expected[1]])
def named(g, x, const):
    """No source; expected: a function of PyTorch, and where it finds others (a source and what is there)."""
    return [Condition(f"{const.read(at)} is {const(own)}", lambda v, at=at: f"{at}, which {g.expected[0].__name__} calls, was replaced")
            for at, own in g.expected[1]]
