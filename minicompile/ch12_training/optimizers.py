# %% [markdown]
# # Optimizers inside the graph
#
# `optimizer.step()` is Python around tensor operations: loops over parameter groups, a dictionary from each parameter
# to its state, a choice among three implementations. All of that is what capture inlines anyway. (State that an optimizer
# makes at its first step would make a version for this step alone, so it is made beforehand: the last section.)
#
# Three things stand in the way. PyTorch keeps some of these functions from its own compiler, with decorators. An
# optimizer counts its steps in a tensor and computes with the number, `1 - beta ** step.item()`. And the step asks
# whether the GPU is recording, which is no question for a program that is being compiled.

# %%
import collections
import functools
import operator

import torch
from torch import is_inference_mode_enabled
from torch.optim import adagrad, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import _use_grad_for_differentiable

from ..ch01_graphs.fake import storage_key
from ..ch01_graphs.symbolic import present
from ..ch03_capture import hook
from ..ch03_capture.calls import BY_CODE, DISABLED_BY_TORCH, handles, inline_code
from ..ch03_capture.comparisons import item_or_tensor
from ..ch03_capture.constants import as_number
from ..ch03_capture.effects import call_later, changed
from ..ch03_capture.inputs import counter
from ..ch03_capture.operations import emit_float
from ..ch03_capture.protocol import METHODS
from ..ch03_capture.tensors import call_tensor_method, emit
from ..ch03_capture.tracer import Tracer, call, is_library, unsupported
from ..ch03_capture.values import NONE, AbstractValue, Const, DictVal, Lazy, ObjVal, SymVal, TensorVal, const
from ..ch03_capture.wrap import wrap
from .slots import autograd

# %% [markdown]
# ## The decorators
#
# The decorator of `step` breaks graphs on purpose, for torch.compile's sake, and sets the grad mode. What remains of
# it is written here in Python, and is interpreted as if the program contained it.

# %%
def in_grad_mode(step, self, *args, **kwargs):
    """`step(self, ...)` in the grad mode that the optimizer asks for."""
    with torch.set_grad_enabled(self.defaults["differentiable"]):
        return step(self, *args, **kwargs)


def example(self, *args, **kwargs):
    """Something to decorate: all functions that a decorator makes have one code."""


@BY_CODE.of(_use_grad_for_differentiable(example).__code__)
def call_step(tx: Tracer, function, self, *args, **kwargs):
    """The step of an optimizer."""
    return call(tx, wrap(tx, in_grad_mode), [wrap(tx, function.real.__wrapped__), self, *args], kwargs)


@BY_CODE.of(torch._disable_dynamo(example).__code__, DISABLED_BY_TORCH)
def call_disabled(tx: Tracer, function, *args, **kwargs):
    """What torch keeps from its own compiler; of an optimizer, it may be inlined."""
    if not function.real.__module__.startswith("torch.optim"):
        unsupported(tx, f"a call of {function.real.__module__}.{function.real.__qualname__}")
    return call(tx, wrap(tx, function.real.__wrapped__), args, kwargs)


@handles(*(getattr(torch.optim.Optimizer, name) for name in ("_accelerator_graph_capture_health_check",
                                                             "_cuda_graph_capture_health_check")      # until torch 2.12
           if name in vars(torch.optim.Optimizer)))
def health_check(tx, self):
    return NONE


# %% [markdown]
# ## The learning rate
#
# It may be a tensor, so that a scheduler can change it in place. Then `param.add_(grad, alpha=-lr)` asks a tensor for its
# number, where PyTorch has only a signature that takes a number. The product says the same, and leaves the number where
# it is, if it is computed in the dtype in which eager adds: that of halves would be rounded before it is added to floats. Integers
# take the number as an integer, so there the tensor is asked, which breaks the graph.

# %%
SCALES = {"add": "alpha", "sub": "alpha", "addcmul": "value", "addcdiv": "value"}


def as_product(tx: Tracer, number, x, operand) -> AbstractValue | None:
    """What x.add(operand, alpha=number) adds to x, where the number is a tensor; None where eager may refuse it, or reads it otherwise."""
    if not type(number) is type(x) is type(operand) is TensorVal or number.fake.requires_grad or number.fake.dtype is torch.bool:
        return None
    common, given = torch.result_type(x.fake, operand.fake), operand.fake.dtype
    if not torch.can_cast(number.fake.dtype, common) or not (given is common or given.is_floating_point):
        return None
    to_common = {"dtype": const(common)}
    if given is not common:
        operand = emit(tx, "to", [operand], to_common)
    if torch.result_type(operand.fake, number.fake) is not common:          # neither has dimensions
        number = emit(tx, "to", [number], to_common)
    return emit(tx, torch.mul, [operand, number])


def scaling_method(name: str, keyword: str):
    @METHODS.of((TensorVal, name))
    def scaled(tx: Tracer, self: TensorVal, *args, **kwargs):
        """self.name(operand, ..., keyword=number)"""
        if args and (product := as_product(tx, kwargs.get(keyword), self, args[0])) is not None:
            args, kwargs = [product, *args[1:]], {k: v for k, v in kwargs.items() if k != keyword}
        return call_tensor_method(tx, self, name, args, kwargs)


for _name, _keyword in SCALES.items():
    scaling_method(_name, _keyword)
    scaling_method(_name + "_", _keyword)


@handles(torch._foreach_add_)
def foreach_add_(tx: Tracer, tensors, others, *args, **kwargs):
    """torch._foreach_add_(tensors, others, alpha=number)"""
    if type(number := kwargs.get("alpha")) is TensorVal and not number.fake.requires_grad:
        others, kwargs = emit(tx, torch._foreach_mul, [others, number]), {}
    return emit(tx, torch._foreach_add_, [tensors, others, *args], kwargs)

# %% [markdown]
# The fused operators take the learning rate as a C++ number, which cannot be a symbol. Their other overloads take it as
# a tensor.

# %%
def handle_fused(operator):
    @handles(operator)
    def fused(tx: Tracer, *args, **kwargs):
        """A fused update of many parameters."""
        if type(lr := kwargs.get("lr")) is SymVal:
            kwargs["lr"] = emit(tx, torch.scalar_tensor, [lr], {"dtype": Const(value=torch.float64)})
        return emit(tx, operator, args, kwargs)


for _name in ("adam", "adamw", "sgd"):
    handle_fused(getattr(torch, f"_fused_{_name}_"))


# %% [markdown]
# Adagrad's has no such overload. It computes what the loop over single tensors computes, so the loop is interpreted.

# %%
@handles(adagrad._fused_adagrad)
def fused_adagrad(tx: Tracer, params, grads, state_sums, state_steps, grad_scale=NONE, found_inf=NONE, **options):
    if grad_scale is not NONE or found_inf is not NONE:
        unsupported(tx, "fused Adagrad with a GradScaler")
    return call(tx, wrap(tx, adagrad._single_tensor_adagrad), [params, grads, state_sums, state_steps, NONE, NONE], options)


# %% [markdown]
# `foreach_map(op, *lists)` is a loop as well. In PyTorch it is an operator of its own, to tell the compiler that the
# calls are independent; here this is found out (chapter 8).

# %%
def foreach_map(op, *operands):
    if not any(isinstance(one, (list, tuple)) for one in operands):
        return op(*operands)
    count = min([len(one) for one in operands if isinstance(one, (list, tuple))])
    return [op(*[one[i] if isinstance(one, (list, tuple)) else one for one in operands]) for i in range(count)]


@handles(("torch._higher_order_ops.foreach_map", "foreach_map"))
def map_over_lists(tx: Tracer, op, *operands):
    return call(tx, wrap(tx, foreach_map), [op, *operands])


# %% [markdown]
# ## Counters
#
# The number that a counter comes in with is read when the compiled function is called, and is a symbolic float of
# the trace. What the trace has done to the tensor meanwhile is done to it, and rounded as the tensor rounds: operands and
# result to float32. (A sum or product of two such numbers in float64, rounded to float32, is theirs in float32.)
# From there on `lr / (1 - beta ** step)` is arithmetic on the host before the kernels run, in float64 as in
# eager. Only PyTorch's own code is answered so. Where a program asks for a number, the graph breaks, unless it only decides whether
# to raise (`item_or_tensor` in chapter 3): what programs do with one is as often a decision as a computation.

# %%
@METHODS.of((TensorVal, "item"))
def item(tx: Tracer, self: TensorVal) -> AbstractValue:
    """tensor.item()"""
    known, (done, version) = as_number(self), self.updates or ((), self.version)
    if type(known) is Const or not can_be_read(tx, self, version):
        return item_or_tensor(tx, self)
    if type(known) is not SymVal:
        known = counter(tx, self.source, self.real.item())
        rounded = functools.partial(emit_float, tx, "float32") if self.fake.dtype is torch.float32 else operator.itemgetter(0)
        for op, amount in done:
            known = rounded([emit_float(tx, op, [known, amount if type(amount) is Const else rounded([amount])])])
        self.number = known, version
    return known


def can_be_read(tx: Tracer, tensor: TensorVal, version: int) -> bool:
    """Whether it is a 0-d tensor on the CPU that came in, to which the trace has done only what `updates` tells, up to `version`."""
    fake = tensor.fake
    return is_library(tx.frames[-1].code.co_filename) and tensor.real is not None and tensor.source is not None and \
        fake._version == version and fake.dim() == 0 and fake.device.type == "cpu" and not fake.requires_grad and \
        fake.dtype in (torch.float32, torch.float64) and is_alone(tx, fake)


def is_alone(tx: Tracer, fake: torch.Tensor) -> bool:
    """Whether no other tensor that came in has its memory."""
    return len(tx.tensors.in_memory.get(storage_key(fake), ())) == 1


# %% [markdown]
# ## The state of the first step
#
# An optimizer makes its state when it first needs it: `if len(state) == 0`. Interpreted like anything else, the moments
# would be new objects of the trace, the first step one version of the compiled function, and all later steps another,
# in which they are inputs. The second compilation is as long as the first, and all it knows better is where the moments
# come from.
#
# But the state does not depend on anything that the graph computes. It is zeros and counters, made by a method of its own,
# `_init_group`. So when the trace comes to this method, the method is called, on the program's own optimizer, and what
# it makes is there when it is interpreted. The first version then is the one for all steps.
#
# Only what nobody can see may happen while compiling. The program must not have looked at the state before, or the
# trace would have been told that there is none (`tx.objects.tracked` knows all that it has met). Nor may it have changed
# what the state is made from. And if the step is not taken after all, because the compilation fails or the call ends in
# an exception, what was made is taken back (`Effects.undo`).
#
# A program that trains one model after another, as in a cross-validation, comes with an optimizer that has no state to a version that
# expects one. The version knows how the state was made for the first (`Effects.ahead`). It is made again, for the optimizer of this
# call, and then the version fits (`done_ahead` in `frames.py`).

# %%
def take_back(table: dict, key, state: dict, items: list[tuple]) -> None:
    """Remove from the optimizer's `table` a state that no step has written to. items: (name, value, version) of when it was made."""
    if table.get(key) is state and len(state) == len(items) and all(
            state.get(name) is value and version_or_none(value) == version for name, value, version in items):
        del table[key]


def version_or_none(value) -> int | None:
    return value._version if isinstance(value, torch.Tensor) else None


def make_state(tx: Tracer, optimizer: ObjVal, init_group, lists: int) -> None:
    """Make the state of the parameters that have a gradient by now, in all groups."""
    table, groups = getattr(optimizer.real, "state", None), groups_of(optimizer.real)
    seen = optimizer.attrs.keys() & {"state", "param_groups"} or id(table) in tx.objects.tracked or changed(tx, groups) or any(
        changed(tx, group) or changed(tx, group["params"]) for group in groups)
    if seen or tx.options.inference or any(type(c.manager) is Const for c in tx.contexts):
        return
    forms = {(i, j): gradient_to_be(tx, p) for i, group in enumerate(groups) for j, p in enumerate(group["params"])}
    again = functools.partial(state_of_first_step, init_group, lists, forms)
    undo = again(optimizer.real)
    tx.effects.undo += undo
    if undo and optimizer.source is not None:
        tx.effects.ahead.append((optimizer.source, again))


def gradient_to_be(tx: Tracer, p: torch.Tensor) -> tuple | None:
    """Shape, strides, dtype and device of the gradient that `p` has in the trace; () for the one that it came with, None for none."""
    leaf = tx.objects.tracked.get(id(p))
    if leaf not in autograd(tx).gradients:
        return None if p.grad is None else ()
    gradient = autograd(tx).gradients[leaf]
    if type(gradient) is not TensorVal:
        return None
    fake = gradient.fake                     # its sizes are those of `p`, but they may be known by the name of a symbol
    return *(tuple(map(present, form)) for form in (fake.shape, fake.stride())), fake.dtype, fake.device


def groups_of(optimizer) -> list:
    """Its groups of parameters; none if they are not what PyTorch makes of them."""
    groups = getattr(optimizer, "param_groups", None)
    usual = type(groups) is list and all(type(group) is dict and type(group.get("params")) is list for group in groups)
    return groups if usual else []


def state_of_first_step(init_group, lists: int, forms: dict, optimizer) -> list:
    """Make the state of all parameters without one. forms: (group, place in it) -> what `gradient_to_be` says. Returns functions that
    take back what was made."""
    table, groups, undo = getattr(optimizer, "state", None), groups_of(optimizer), []
    elsewhere = is_inference_mode_enabled() or torch._C._len_torch_function_stack()
    if not isinstance(optimizer, torch.optim.Optimizer) or type(table) is not collections.defaultdict or elsewhere or \
            any(group.get("differentiable") for group in groups):
        return undo
    for (i, j), form in forms.items():
        if form is None or i >= len(groups) or j >= len(groups[i]["params"]) or (p := groups[i]["params"][j]) in table:
            continue
        before = p.grad
        try:
            with torch.no_grad():
                if form:
                    p.grad = torch.empty_strided(*form[:2], dtype=form[2], device=form[3])       # its numbers do not matter
                init_group(optimizer, {**groups[i], "params": [p]}, *([] for _ in range(lists)))
                momentum_of_first_step(optimizer, groups[i], p)
        except Exception:                            # the program will raise it
            table.pop(p, None)
            break
        finally:
            p.grad = before
        if p in table:
            items = [(name, value, version_or_none(value)) for name, value in table[p].items()]
            undo.append(functools.partial(take_back, table, p, table[p], items))
    return undo


# %% [markdown]
# The momentum of SGD is no zeros: in the first step it is the gradient, and later `momentum * buffer + gradient`. There is
# a number to begin with for which the second is the first, to the last bit. It is `-0.0`: times a positive momentum it is
# `-0.0` again, and added to the gradient it changes nothing, not even the sign of a zero. (With `dampening` the later
# steps scale the gradient, and then the first is another program.)

# %%
def momentum_of_first_step(optimizer, group: dict, p: torch.Tensor) -> None:
    """For SGD: the buffer that makes the first step one like the others, if there is one."""
    if isinstance(optimizer, torch.optim.SGD) and type(group["momentum"]) is float and group["momentum"] > 0 and \
            type(group["dampening"]) in (int, float) and group["dampening"] == 0 and p.dtype.is_floating_point:
        optimizer.state[p]["momentum_buffer"] = torch.full_like(p.grad, -0.0)


# %% [markdown]
# What is left that differs between the first steps is the learning rate. A number becomes a symbol with its second value
# (chapter 2), but of this one it is known beforehand that it will have one. It is a symbol at once.

# %%
def let_vary(tx: Tracer, group: AbstractValue) -> None:
    _, lr = group.items.get("lr", (None, None)) if type(group) is DictVal else (None, None)
    if type(lr) is Lazy and lr.value is None and type(lr.real) is float and lr.source is not None:
        tx.options.dynamic.setdefault(lr.source, True)


def handle_init_group(function):
    @handles(function)
    def init_group(tx: Tracer, self, group, *lists, **more):
        """The lists of tensors that a step works on."""
        if type(self) is ObjVal and isinstance(self.real, torch.optim.Optimizer) and not more:
            make_state(tx, self, function, len(lists))
        let_vary(tx, group)
        return inline_code(tx, wrap(tx, function), [self, group, *lists], more)


def defined_by(classes: list[type], name: str) -> set:
    """The functions of this name that the classes themselves define."""
    return {vars(c)[name] for c in classes if name in vars(c)}


for _function in defined_by([c for c in vars(torch.optim).values() if isinstance(c, type)], "_init_group"):
    handle_init_group(_function)


# %% [markdown]
# ## The scheduler
#
# `scheduler.step()` counts in Python integers, asks whether it is called for the first time, and computes the learning
# rate of the *next* step. Interpreted, it would make a version for the first count, one for the second, and one in which
# the count is a symbol. Mostly it is the last thing that a step does that anybody could notice (`is_last`). Then there is nothing to
# interpret: the end of the compiled function calls it.
#
# When is it the last thing? In each frame that is being interpreted, what follows it is looked at before it is executed: names,
# constants, tuples, methods of tensors that the trace has made, and the return. No `try` may wait for an exception, either.

# %%
QUIET = frozenset("""NOP POP_TOP LOAD_FAST LOAD_FAST_CHECK LOAD_CONST LOAD_METHOD LOAD_ATTR PRECALL CALL
    BUILD_TUPLE BUILD_LIST BUILD_MAP BUILD_CONST_KEY_MAP""".split())
QUIET_METHODS = frozenset(("clone", "cpu", "detach", "double", "float", "item", "mean", "sum"))


def is_last(tx) -> bool:
    """Whether nothing is left to do after the call at hand that could notice what it does."""
    return not tx.effects.pure_since and all(ends_quietly(frame, tx.tensors.in_memory) for frame in tx.frames)


def ends_quietly(frame, inputs) -> bool:
    """The same for one frame. inputs: keys of storages that are older than the trace."""
    instructions, methods = frame.decoded.instructions, 0
    here = instructions[frame.ip - 1].offset
    if any(entry.start <= here < entry.end for entry in frame.decoded.table):
        return False
    for before, i in zip(instructions[frame.ip - 1:], instructions[frame.ip:]):
        if i.opname in ("RETURN_VALUE", "RETURN_CONST"):
            return True
        if i.opname not in QUIET:
            return False
        if i.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            owner = frame.locals.get(before.argval) if before.opname.startswith("LOAD_FAST") else None
            if type(owner) is not TensorVal or storage_key(owner.fake) in inputs or i.argval not in QUIET_METHODS:
                return False
            methods += 1
        elif i.opname == "CALL":
            methods -= 1
            if methods < 0:
                return False
    return False


def handle_scheduler(function):
    @handles(function)
    def step(tx: Tracer, self, *args, **kwargs) -> AbstractValue:
        """scheduler.step()"""
        if args or kwargs or type(self) is not ObjVal or self.source is None or not is_last(tx):
            return inline_code(tx, wrap(tx, function), [self, *args], kwargs)
        call_later(tx, functools.partial(hook.run, None, function), self)
        return NONE


for _function in defined_by([c for c in vars(lr_scheduler).values() if isinstance(c, type) and issubclass(c, LRScheduler)
                             and c is not ReduceLROnPlateau], "step"):          # that one is given a metric
    handle_scheduler(_function)
