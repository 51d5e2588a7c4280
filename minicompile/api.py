# %% [markdown]
# # What users call
#
# `compile` compiles nothing. It checks its arguments, so that a mistake is told at once and not at the first call; it makes or finds the
# context of these settings (`stances.py`); and it returns a wrapper. A call of the wrapper runs the original inside of the context, which
# means: while the frame hook of chapter 3 is told that frames are to be compiled with these settings. All else follows from there, frame by
# frame (`frames.py`).

# %%
import builtins
import functools
import inspect
import operator
import types

import torch

from . import logs, marks
from .config import OPTIONS, config, did_you_mean, resolve_options
from .errors import MinicompileError, called_by
from .stances import context_for, contexts, current

# The ladder of backends, lowest rung first: each is an executable meaning of one stage.
BACKENDS = {
    "eager": "run the captured graph",
    "aot_eager": "run the graphs after differentiation",
    "decomposed": "run those graphs in primitives",
    "loops": "interpret the loop IR (slow)",
    "triton": "generated GPU kernels",
    "cpp": "generated CPU kernels",
    "cudagraphs": "aot_eager, replayed as CUDA graphs",
    "default": "triton for CUDA tensors, cpp for CPU tensors",
}
_registered: dict = {}
NEEDS = "compile needs a function, a method or a torch.nn.Module"


def list_backends() -> list[str]:
    return [*BACKENDS, *_registered]


def register_backend(function=None, *, name: str | None = None):
    """Make backend(gm, example_inputs) -> callable known by name. Also a decorator."""
    if function is None:
        return functools.partial(register_backend, name=name)
    if not callable(function):
        raise MinicompileError(f"A backend is a callable (gm, example_inputs) -> callable, not {function!r}.")
    _registered[name or function.__name__] = function
    return function


def _resolve_backend(backend):
    if backend is None:
        return "default"
    if isinstance(backend, str):
        if backend in _registered:
            return _registered[backend]
        if backend not in BACKENDS:
            raise MinicompileError(f"Unknown backend {backend!r}.{did_you_mean(backend, list_backends())}")
        return backend
    if callable(backend):
        return backend
    raise MinicompileError("backend must be a name or a callable (gm, example_inputs) -> callable, "
                           f"not {backend!r}.")


# %% [markdown]
# ## compile

# %%
def compile(model=None, *, fullgraph=False, dynamic=None, backend=None, mode=None, options=None,
            disable=False):
    """Compile a function, a bound method, or a module; with no model, a decorator with these settings.

    fullgraph: whatever would not run as one compiled graph raises: GraphBreakError for a graph break and where
        nothing can be compiled (inside torch.func.vmap, under a mode that watches every operation),
        RecompileError beyond the recompile limit, InternalError if the compiler fails.
    dynamic: True treats all sizes as symbols, False those marked with `mark_dynamic`, None (default) also those
        that are seen to change.
    backend: a name from `list_backends()` or a callable (gm, example_inputs) -> callable.
    mode: "default", "reduce-overhead", "max-autotune" or "max-autotune-no-cudagraphs".
    options: single settings instead of a mode.
    disable: return the model as it is.

    torch.jit.trace would record constants instead of the graph, so what is compiled refuses to be traced.
    """
    settings = dict(fullgraph=fullgraph, dynamic=dynamic, backend=backend, mode=mode, options=options,
                    disable=disable)
    if not isinstance(dynamic, bool | None):
        raise MinicompileError(f"dynamic must be True, False or None, not {dynamic!r}.")
    for name in ("fullgraph", "disable"):
        if not isinstance(settings[name], bool):
            raise MinicompileError(f"{name} must be True or False, not {settings[name]!r}.")
    resolved = resolve_options(mode, options)
    target = _resolve_backend(backend)
    _note_without_effect(target, resolved)
    if model is None:
        return functools.partial(_compile_decorated, settings)
    if isinstance(model, type):
        raise MinicompileError(f"{NEEDS}, not the class {model.__name__}. "
                               "Compile an instance or one of its methods.")
    if not callable(model):
        raise MinicompileError(f"{NEEDS}, not {model!r}.")
    if disable:
        return model
    from . import frames
    context = context_for(target, resolved, dynamic, fullgraph)
    if isinstance(model, torch.nn.Module):
        frames.check_code(model.forward, context)
        return OptimizedModule(model, context, settings)
    return _compile_function(model, context)


# %%
def _note_without_effect(backend, options: dict) -> None:
    """Say once which options the backend, a rung of the ladder, has no use for."""
    rungs = list(BACKENDS)
    rung = rungs.index("aot_eager" if backend == "cudagraphs" else backend) if backend in rungs else len(rungs)
    unused = [name for name, value in options.items()
              if value != getattr(type(config), name) and rung < rungs.index(OPTIONS[name])]
    if unused:
        logs.warn_once((backend, *unused), f"minicompile: backend={backend!r} has no use for {', '.join(unused)}: "
                       f"{'it' if len(unused) == 1 else 'they'} would change what later stages do.")


def _compile_decorated(settings, model):
    if model is None:
        raise MinicompileError(f"{NEEDS}, not None.")
    return compile(model, **settings)


# %% [markdown]
# ## Functions
#
# What can be called is not always a function with code. `_compile_function` looks for the code that a frame would have (`target`): that of
# a method's function, of what is inside of a `functools.partial`, of the `__call__` of an object's class. A method stays a method. What is
# written in C never has a frame that the hook could see, so a small Python function that calls it takes its place.
#
# The wrapper asks three things before it enters the context. Under `force_eager` the original runs outside of every context. Where
# torch.compile or torch.export is looking, it gets the original. And `torch.jit.trace` would record what the compiler does,
# so that is an error.

# %%
def _compile_function(function, context):
    from . import frames
    run, stance = frames.hook.run, current
    function = marks.original(function)
    if marks.is_disabled(function):
        return function
    if inspect.ismethod(function) and inspect.isfunction(function.__func__):     # a method again: learning rate schedulers ask for
        return types.MethodType(_compile_function(function.__func__, context), function.__self__)        # its `__func__`
    target = function
    if type(function) is functools.partial:
        target = marks.original(function.func)
        if target is not function.func:
            function = functools.partial(target, *function.args, **function.keywords)
    elif not hasattr(function, "__code__") and not inspect.ismethod(function):
        target = type(function).__call__
    operator = isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket))
    if operator or not hasattr(target, "__code__") and not inspect.ismethod(target):
        function = target = _written_in_python(function)
    frames.check_code(target, context)
    frames.allow(target)
    enter = functools.partial(run, context, function)           # a call that only hands on a tuple is a fourth of a longer one

    @marks.passed_over
    def compiled(*args, **kwargs):
        if stance.name == "force_eager":       # also when Python ends, and the names below are gone
            return run(None, function, *args, **kwargs)
        if torchs():
            return function(*args, **kwargs)
        if traced():
            raise MinicompileError(TRACED)
        return enter(*args, **kwargs) if kwargs else enter(*args)

    marks.look_like(compiled, function)
    marks.put_mark(compiled, marks.ORIGINAL, function)
    return compiled


# True where torch.compile or torch.export looks at our code (if they run it, no guards hold, and nothing is compiled)
torchs = torch.compiler.is_dynamo_compiling
traced = torch._C._is_tracing                  # True while torch.jit.trace is at work
TRACED = ("torch.jit.trace and torch.onnx.export(dynamo=False) cannot trace what minicompile.compile returned. "
          "Trace the original (the child _orig_mod of a compiled module), or trace under "
          "minicompile.set_stance('force_eager').")


def _written_in_python(builtin):
    """A Python function that calls `builtin` (`torch.fmod`, a method of a C type), which has no frame.
    Its code object is a copy, so that each function has its own entries."""
    def call(*args, **kwargs):
        return builtin(*args, **kwargs)

    call.__code__ = call.__code__.replace()
    return marks.look_like(call, builtin)


# %% [markdown]
# ## Modules
#
# A compiled module has to be a module: optimizers ask for its parameters, `.to()` moves it, `state_dict` saves it, and a program may set
# any of its attributes. So it is one, whose only child is the original, and hands on whatever else is asked of it. `__call__` of a module
# calls hooks and then `forward`; where the wrapper has no hooks of its own, it calls `forward` directly, and those of the original are
# called as a part of that. `Module.__call__` would take half a microsecond to find that the wrapper has none.

# %%
class OptimizedModule(torch.nn.Module):
    """A compiled module. It has the original as its only child `_orig_mod`, so parameters, buffers, hooks of
    children, `.to()`, `.train()` and optimizers work as before, and keys of its state dict begin with
    `_orig_mod.`, as torch's do. Other attributes are read from and written to the original."""

    def __init__(self, module, context, settings):
        super().__init__()
        if isinstance(module, OptimizedModule):
            module = module._orig_mod
        self.__dict__["_compile_settings"] = settings
        self.__dict__["_context"] = context
        self._modules["_orig_mod"] = module
        from . import frames
        self.__dict__["_run"], self.__dict__["_stance"] = frames.hook.run, current
        frames.allow(module.forward)

    @marks.passed_over
    def forward(self, *args, **kwargs):
        own = self.__dict__                     # a class with a `__getattr__` makes each attribute slow
        module, run = own["_modules"]["_orig_mod"], own["_run"]
        if own["_stance"].name == "force_eager":
            return run(None, module, *args, **kwargs)
        if torchs():
            return module(*args, **kwargs)
        if traced():
            raise MinicompileError(TRACED)
        return run(own["_context"], module, *args, **kwargs) if kwargs else run(own["_context"], module, *args)

    @marks.passed_over
    def __call__(self, *args, **kwargs):
        own = self.__dict__
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]:
            return super().__call__(*args, **kwargs)
        return self.forward(*args, **kwargs) if kwargs else self.forward(*args)

    @marks.passed_over
    def _call_impl(self, *args, **kwargs):
        """Hooks for all modules of the program are called around the original, not a second time around this."""
        own = self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks
        return super()._call_impl(*args, **kwargs) if own else self.forward(*args, **kwargs)

    def __prepare_scriptable__(self):
        """What torch.jit.script takes in its place."""
        return self._orig_mod

    def _is_built(self) -> bool:
        """False inside of `Module.__init__`, which sets attributes before there is an original."""
        return "_orig_mod" in self.__dict__.get("_modules", ())

    @property
    def training(self):
        return self._orig_mod.training if self._is_built() else True

    @training.setter
    def training(self, mode):
        if self._is_built():
            self._orig_mod.training = mode

    def __getattr__(self, name):
        if name == "_orig_mod":
            return self.__dict__["_modules"]["_orig_mod"]
        return getattr(self._orig_mod, name)

    def __setattr__(self, name, value):
        # what Module keeps about hooks of its own, and what DataParallel says to a copy of this
        if name in ("training", "_orig_mod", "_is_replica") or name in self.__dict__ or not self._is_built():
            super().__setattr__(name, value)
        else:
            setattr(self._orig_mod, name, value)

    def __delattr__(self, name):
        delattr(self._orig_mod, name)

    def __dir__(self):
        return [*super().__dir__(), *self._orig_mod.__dir__()]

    def __reduce__(self):
        return _rebuild_module, (self._orig_mod, self._compile_settings)


# %%
def _rebuild_module(module, settings):
    return compile(module, **settings)


# What capture takes in the place of `forward`: a compiled function that calls a compiled module is one graph.
marks.put_mark(OptimizedModule.forward, marks.ORIGINAL, lambda self, *args, **kwargs: self._modules["_orig_mod"](*args, **kwargs))
marks.put_mark(OptimizedModule.__call__, marks.ORIGINAL, torch.nn.Module.__call__)

# Python finds special methods on classes only, and those that register things would register them with the wrapper.
for _name in ("len", "bool", "iter", "contains", "getitem", "setitem", "delitem"):
    setattr(OptimizedModule, f"__{_name}__", lambda self, *args, _do=getattr(builtins, _name, None) or getattr(operator, _name):
            _do(self._orig_mod, *args))
for _name in ("register_buffer", "register_parameter", "register_module", "add_module"):
    setattr(OptimizedModule, _name, lambda self, *args, _name=_name, **kwargs: getattr(self._orig_mod, _name)(*args, **kwargs))


# %% [markdown]
# ## Around it

# %%
def disable(function=None, recursive=True, *, reason=None):
    """Never compile this function, nor (by default) what it calls. Call or decorator."""
    if function is None:
        return functools.partial(disable, recursive=recursive, reason=reason)
    if isinstance(function, torch.nn.Module):
        function.forward = disable(function.forward, recursive, reason=reason)
        return function
    if not callable(function):
        raise MinicompileError(f"disable needs a function or a module, not {function!r}.")
    from . import frames
    inner = marks.original(function)
    if not recursive and (code := called_by(inmost(inner))) is not None:        # what is written in C has no frame to skip
        frames.hook.skip_code(code)
    run = functools.partial(frames.hook.run, None) if recursive else operator.call
    return marks.mark_disabled(inner, run, reason)


def inmost(function):
    return inspect.unwrap(function.__func__ if inspect.ismethod(function) else function)


def reset() -> None:
    """Drop all compiled code and all decisions, as in a new process."""
    from . import frames, limits
    from .driver import counters
    frames.hook.forget_all()
    limits.alike.clear()
    contexts.clear()
    logs._warned.clear()
    counters.clear()
