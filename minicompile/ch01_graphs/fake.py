# %% [markdown]
# # Fake tensors
#
# A compiler runs the program once without its data: it needs the shape, dtype, device, strides and aliasing
# of every intermediate tensor, and none of the numbers. PyTorch already knows how to compute those. Every
# operator has a *meta kernel*, which is what runs on `device="meta"`: tensors that have everything except
# memory. What a meta tensor cannot say is on which device the real tensor would live, so a meta tensor alone
# would pick the wrong kernels and autocast rules.
#
# A `FakeTensor` is that pair: a meta tensor, and the device it pretends to be on. It is a *wrapper subclass*:
# to PyTorch's dispatcher it is a tensor on that device, autograd differentiates through it as usual, and when
# a kernel would run, `__torch_dispatch__` runs the meta kernel on the inner tensor and wraps the result. Two fakes alias when
# their meta tensors share a storage, so views and in-place operations keep their meaning.
#
# Here are the tensors and the mode. How an operator runs on them is in `operators.py`, and what a kernel has to be asked for in
# `refusals.py`; `recipes.py` keeps answers, and `composites.py` is for calls that want sizes as numbers.

# %%
import contextlib
import functools
import gc
import weakref
from typing import Callable

import torch
from torch import is_inference_mode_enabled
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import Unsupported
from .corrections import outside
from .layouts import contiguous_strides, present, symbolic_strides


class FakeTensor(torch.Tensor):
    """A tensor without data: `meta` has its shape, strides, dtype and storage; `device` is the pretence.
    entered: it stands for a real tensor that is neither a leaf nor a view. formers: how many fakes show what it was before it changed
    its shape. reshaped: has a view of it changed its shape in place? run: the function that runs an operator on fakes, of `recipes.py`."""

    meta: torch.Tensor
    entered = False
    formers = 0
    reshaped = False
    run: Callable

    @staticmethod
    def __new__(cls, meta: torch.Tensor, device: torch.device, requires_grad: bool = False):
        fake = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), storage_offset=meta.storage_offset(), dtype=meta.dtype,
            layout=meta.layout, device=device, requires_grad=requires_grad)
        fake.meta = meta
        return fake

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self):
        sizes = ", ".join(map(str, self.shape))
        return f"Fake({str(self.dtype).removeprefix('torch.')}[{sizes}] on {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return cls.run(func, args, kwargs or {})


def fake_like(t: torch.Tensor, requires_grad: bool = False) -> FakeTensor:
    """A fake with memory of its own that lies as `t` does."""
    return FakeTensor(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"), t.device, requires_grad)


def storage_key(t: torch.Tensor) -> int:
    """Equal for two fakes, or two real tensors, exactly when they share memory."""
    return (t.meta if isinstance(t, FakeTensor) else t).untyped_storage()._cdata


def version_of(t: torch.Tensor) -> int:
    """How often a tensor was written. An inference tensor does not count, and is not written where gradients are recorded."""
    return 0 if t.is_inference() else t._version


def has_memory(t: torch.Tensor) -> bool:
    """False of what a transform (`vmap`, `grad`) has wrapped: a batch of tensors that says it is one, and the like."""
    try:
        t.untyped_storage()
    except NotImplementedError:
        return False
    return True


def is_lazy(t: torch.Tensor) -> bool:
    """Is the memory of `t` not its value, because a conjugation or a negation is pending, or because it is a zero without memory?"""
    return t.is_conj() or t.is_neg() or t._is_zerotensor()


def form_of(t: FakeTensor) -> tuple:
    """(sizes, strides, offset) of the present call."""
    meta = t.meta
    return tuple(map(present, meta.shape)), tuple(map(present, meta.stride())), present(meta.storage_offset())


# %% [markdown]
# ## The mode
#
# `FakeMode` catches operators that have no fake argument (`torch.arange(10)`), and turns real tensors into
# fakes. A real tensor becomes the same fake each time, and real tensors that share memory become fakes that
# share memory: otherwise an in-place update through one of them would be lost on the others.

# %%
class DispatchMode(TorchDispatchMode):
    """A dispatch mode whose handler PyTorch does not wrap in `torch._dynamo.disable`, importing all of it."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False


@contextlib.contextmanager
def plain_tensors():
    """Inference mode is off inside: tensors made under it have no version counter, which is how capture
    notices that an operation writes to a tensor. Gradients stay off."""
    if not is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


# %% [markdown]
# A leaf is a tensor that no differentiable operation has made, such as a parameter. Autograd refuses to write
# to a leaf that requires gradients. An activation that enters a graph is no leaf, and programs do write to
# it. So its fake is passed through an operation that does nothing, `Enter`, and is no leaf afterwards.

# %%
class Enter(torch.autograd.Function):
    """The identity, of a fake. What comes out is no leaf, so it may be written in place."""
    @staticmethod
    def forward(ctx, fake):
        ctx.set_materialize_grads(False)
        return FakeTensor(fake.meta, fake.device)

    @staticmethod
    def backward(ctx, grad):
        return grad


@functools.cache
def load_meta_kernels():
    """The first call of a meta kernel that is written in Python imports much of PyTorch and of sympy. That comes before a trace: what the
    trace reads, such as the classes that pytree knows, must be true at its end. The imports leave cycles that hold
    the stack below them, with the arguments of the call that is compiled. They are not to wait until the collector works again."""
    torch.add(torch.empty((), device="meta"), 1)
    gc.collect(0)


# %% [markdown]
# The two tables of the mode answer the same question for tensors and for storages: has this one been seen
# before? A tensor is looked up by its identity, and a weak reference tells whether it is still the same
# object. A storage is kept alive, because its address is the key. `_meta_like` has two branches. With
# symbolic sizes, a fresh meta tensor is made, whose strides are expressions. Otherwise the meta tensor is
# laid over the blank storage that stands for the real one.

# %%
class FakeMode(DispatchMode):
    """Under this mode every operator runs on fakes. `from_real` converts."""

    def __init__(self):
        super().__init__()
        load_meta_kernels()
        self.draws = False                  # whether an operator has drawn random numbers
        self._fakes: dict[int, tuple[weakref.ref, FakeTensor]] = {}
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in func.tags
        return FakeTensor.run(func, args, kwargs or {})

    def from_real(self, tensor: torch.Tensor, sizes: tuple | None = None, steps: dict | None = None) -> FakeTensor:
        """The fake of a real tensor: same shape (or `sizes`, which may hold SymInts), strides (but for those in `steps`, by dim), dtype,
        device, requires_grad and, but for views, is_leaf."""
        known = self._fakes.get(id(tensor))
        if known is not None and known[0]() is tensor:
            return known[1]
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            raise Unsupported(f"a tensor of layout {tensor.layout} has no fake")
        if is_lazy(tensor):
            raise Unsupported("the memory of a lazily conjugated, negated or zero tensor is not its value")
        if tensor.requires_grad and not (tensor.is_floating_point() or tensor.is_complex()):
            raise Unsupported("integers that require gradients (a copy from floats makes them) have no fake")
        with outside():
            fake = FakeTensor(self._meta_like(tensor, sizes, steps or {}), tensor.device, tensor.requires_grad)
            # Whether a view is a leaf is not asked: the answer would change what PyTorch notes about it
            if not tensor._is_view() and not tensor.is_leaf:
                with torch.enable_grad():
                    fake = Enter.apply(fake)
                    fake.entered = True
        self._fakes[id(tensor)] = (weakref.ref(tensor), fake)
        return fake

    def _meta_like(self, tensor, sizes, steps):
        if steps or sizes is not None and any(isinstance(s, torch.SymInt) for s in sizes):
            if tensor.stride() == contiguous_strides(tensor.shape):
                return torch.empty(sizes, dtype=tensor.dtype, device="meta")
            strides = symbolic_strides(tensor, sizes, steps)
            if tensor.is_contiguous():          # and only dims of size 1 have other strides
                strides = [s if n == 1 else step for n, s, step in zip(tensor.shape, strides, contiguous_strides(sizes))]
            return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device="meta")
        real = tensor.untyped_storage()
        if real._cdata not in self._storages:
            blank = torch.empty(real.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
            self._storages[real._cdata] = (real, blank)
        blank = self._storages[real._cdata][1]
        meta = torch.empty(0, dtype=tensor.dtype, device="meta")
        return meta.set_(blank, tensor.storage_offset(), tensor.shape, tensor.stride())
