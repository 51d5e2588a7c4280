"""How far apart two right answers may be: eager run again with every result disturbed by a rounding or two.

Under the mode, what an operator computes with rounding is multiplied by 1 + u for a random u of a few units in the last place; what it
adds up is disturbed before, too, because sums may be taken in any order. What only chooses or moves numbers stays exact, so `x == x.amax()`
holds as before. What is cast to half precision is disturbed, because a compiler may go on with the number from before the cast; but not
for what looks at the cast itself, as `x - x.half().float()` and `x.half() > 1` do. Where the answers of such runs differ from one
another, rounding decides, and a compiler may answer otherwise as well: by a little, where they differ by a little, and anything, where a
comparison or a cast falls to either side."""
from __future__ import annotations

import itertools

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

EXACT = set("""
clone _to_copy copy_ copy cat stack index index_select gather take where masked_fill masked_fill_ flip roll repeat max min amax
amin maximum minimum fmax fmin clamp clamp_ clamp_min clamp_max relu relu_ abs neg neg_ sign sgn floor ceil round trunc frac sort
topk kthvalue median cummax cummin aminmax fill fill_ zero_ zeros zeros_like ones ones_like full full_like arange eye tril triu
tril_ triu_ diag_embed constant_pad_nd max_pool2d_with_indices _adaptive_max_pool2d adaptive_max_pool2d slice_backward
select_backward select_scatter slice_scatter diagonal_scatter diagonal_backward embedding threshold_backward unfold
lift_fresh detach new_zeros new_ones new_full new_empty empty empty_like nan_to_num isnan isinf signbit copysign reflection_pad1d
reflection_pad2d replication_pad1d replication_pad2d index_fill index_fill_ index_copy index_copy_ scatter scatter_ masked_scatter
masked_scatter_ put put_ take_along_dim _unsafe_index contiguous scalar_tensor upsample_nearest2d upsample_nearest1d
im2col pixel_shuffle pixel_unshuffle hardtanh threshold heaviside where_ rot90 expand_copy zeros_ set_ resize_ bitwise_and_
_index_put_impl_ gt ge lt le eq ne nextafter _reshape_copy channel_shuffle native_dropout as_strided_scatter
_efficientzerotensor logical_not logical_and logical_or logical_xor any all isin
""".split())
ACCUMULATES = {"index_put": "accumulate", "index_put_": "accumulate", "_index_put_impl_": "accumulate"}
BATCH_NORMS = {"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}      # they write to the arguments 3 and 4; no schema says so
SUMS = {torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList, torch.ops.aten.mean.default, torch.ops.aten.mean.dim,
        torch.ops.aten.linalg_vector_norm.default}              # whose kernel adds up one by one
LOGARITHMS = {"_log_softmax", "logsumexp", "logcumsumexp", "logaddexp", "logaddexp2", "logit"}
SLOPES = {"silu_backward", "gelu_backward", "mish_backward"}      # a sum of terms of the size of the gradient that comes in
POWERS = {torch.ops.aten.pow.Tensor_Scalar, torch.ops.aten.pow_.Scalar}
UNITS = 2.0
# Kernels that compare a number with two limits; of NaN they make zero where they take several numbers at once, and the gradient
# (that of logit is divided by NaN) elsewhere
BETWEEN = {"hardtanh_backward", "hardshrink_backward", "softshrink_backward", "logit_backward"}
# The same of those that make NaN, or a slope of another piece: the place of the operand
PIECES = {"elu_backward": 5, "hardswish_backward": 1}
HALF = torch.float16, torch.bfloat16
# Of two zeros of different signs either may be the larger: eager's loops answer by place, and `relu` is a maximum to a compiler. Of NaN
# they make one sort of NaN, or keep it, or set all bits, as where a comparison's mask is taken for the number
LARGER = {"maximum", "minimum", "fmax", "fmin", "relu", "relu_", "clamp", "clamp_", "clamp_min", "clamp_max"}
QUESTIONS = {"gt", "ge", "lt", "le", "eq", "ne", "logical_not", "logical_and", "logical_or", "logical_xor", "sign", "sgn", "any", "all"}
SIGNS = {"neg", "neg_", "abs", "abs_"}        # of NaN a kernel changes the sign bit, or makes one sort, as a product with -1 does


class Noise(TorchDispatchMode):
    """Disturbs what is computed; `seed` says how. known: what the runs before with other seeds were asked about."""

    def __init__(self, seed: int, known: dict | None = None):
        super().__init__()
        self.known, self.asked = known, itertools.count()
        self.generators: dict = {}
        self.seed = seed
        self.undisturbed: dict = {}     # id of what a cast to half precision gave -> (it, its version, what it was undisturbed)

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def disturb_(self, t, dtype=None, place=0):
        """By roundings of its own dtype, or of a coarser one. place: of an operand that is not disturbed as the other ones are."""
        if t.is_complex() and t.numel() and not overlaps(t):       # either part is as inexact as the number is large
            parts = torch.view_as_real(t.conj() if t.is_conj() else t)
            self.disturb_as_(parts, t.abs().unsqueeze(-1))
            return
        if not t.is_floating_point() or not t.numel() or t._is_zerotensor() or overlaps(t):
            return
        if t.device not in self.generators:
            self.generators[t.device] = torch.Generator(t.device)
        # The same computation done twice is disturbed in the same way
        self.generators[t.device].manual_seed(hash((self.seed, place, t.shape, t.double().nan_to_num(0, 0, 0).sum().item())) % 2**60)
        u = torch.rand(t.shape, generator=self.generators[t.device], device=t.device, dtype=torch.float64) * 2 - 1
        eps = max(torch.finfo(d).eps for d in (t.dtype, dtype or t.dtype))
        if self.seed % 4 == 3:                                  # to fewer bits: what differs by rounding only may be equal, too
            mantissa, exponent = t.double().frexp()
            steps, shift = mantissa / (UNITS * eps), self.seed // 4 / 10     # at first none: a number and its negative
            t.copy_(torch.where(t.isfinite() & (t != 0), ((steps + shift).round() - shift).mul(UNITS * eps).ldexp(exponent), t.double()))
            return
        factor = torch.where(t == 0, u.sign(), 1 + u * (UNITS * eps))     # a zero may have the other sign, and so may what is no number
        nan = t.double() if self.seed % 2 else torch.full_like(u, torch.nan)        # or another sort of NaN, which shows in its bits
        t.copy_(torch.where(t.isnan(), nan.copysign(u), t.double() * factor))
        if t.dtype in HALF and not self.seed % 2:               # a loop that converts several numbers at once makes one sort only
            nan = torch.tensor(torch.nan, dtype=t.dtype, device=t.device).view(torch.int16)
            t.view(torch.int16).copy_(torch.where(t.isnan(), torch.where(u < 0, nan, nan | -2**15), t.view(torch.int16)))

    def disturb_as_(self, t, size):
        """By roundings of numbers of another size."""
        size = size.expand(t.shape).contiguous()
        changed = size.clone()
        self.disturb_(changed)
        t.add_(changed - size)

    def disturbed(self, t, dtype=None, place=0):
        if not t.is_floating_point() and not t.is_complex():
            return t
        # Equal elements are disturbed one by one as well: the deviation of a constant is zero only in one order of its sums
        out = torch.empty_like(t) if overlaps(t) else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
        out.copy_(t)
        self.disturb_(out, dtype, place)
        return out

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        exact = name in EXACT or torch.Tag.nondeterministic_seeded in func.tags
        if name in ACCUMULATES:
            exact = not (kwargs.get("accumulate") or len(args) > 3 and args[3])
        if name in ("_to_copy", "copy_", "copy"):
            source = args[1] if name != "_to_copy" else args[0]
            target = args[0].dtype if name != "_to_copy" else kwargs.get("dtype") or source.dtype
            exact = not (isinstance(source, torch.Tensor) and source.is_floating_point() and target.is_floating_point
                         and target.itemsize < source.dtype.itemsize)
        if exact:
            if self.known is not None and (name in QUESTIONS or name == "_to_copy" and not target.is_floating_point):
                args = tuple(self.without_rests(a) if isinstance(a, torch.Tensor) else a for a in args)
            out = self.run_exact(func, args, kwargs)
            if self.seed % 2 and name in LARGER | SIGNS and out.is_floating_point() and not overlaps(out):
                nan = torch.full((1,), torch.nan, dtype=out.dtype, device=out.device)
                if self.seed % 4 == 3:
                    nan.view(torch.uint8).fill_(255)
                out.copy_(torch.where(out.isnan(), nan[0], torch.where(out == 0, -out, out) if name in LARGER else out))
            return out
        schema = func._schema
        written = {i for i, spec in enumerate(schema.arguments) if spec.alias_info is not None and spec.alias_info.is_write}
        written |= {3, 4} if name in BATCH_NORMS and args[5] else set()
        pointwise = torch.Tag.pointwise in func.tags
        given = kwargs.get("dtype")         # a sum in float32 of float64 rounds what it adds up
        dtype = given if name != "_to_copy" and given is not None and given.is_floating_point else None

        def given_to(a, spec, i):
            # Of a half a compiler may know what was not rounded yet, here and not there
            known = self.seed % 4 == 1 and isinstance(a, torch.Tensor) and a.dtype in HALF
            if not isinstance(a, torch.Tensor) or i in written or (not known if pointwise else spec.alias_info is not None):
                return a
            return self.disturbed(a, None if pointwise else dtype, i if known else 0)
        args = tuple(given_to(a, spec, i) for i, (a, spec) in enumerate(zip(args, schema.arguments)))
        if name == "binary_cross_entropy":      # which refuses probabilities above 1: on a GPU that ends the process
            args = *(torch.where((t - 0.5).abs() < 0.6, t.clamp(0, 1), t) for t in args[:2]), *args[2:]
        if func in POWERS and self.seed % 2 and args[0].dtype is torch.float32:         # some of eager's loops round the exponent
            args = args[0], torch.tensor(args[1], dtype=torch.float32).item()
        out = self.run_widened(func, args, kwargs) if self.seed % 2 else func(*args, **kwargs)
        for i, spec in enumerate(schema.arguments):
            a = args[i] if i < len(args) else kwargs.get(spec.name)
            for t in a if isinstance(a, (list, tuple)) else [a]:
                if i in written and isinstance(t, torch.Tensor):
                    self.disturb_(t)
        results = out if isinstance(out, (tuple, list)) else [out]
        for t in results if self.seed % 4 == 1 else ():
            self.flush_(t, args if torch.Tag.pointwise in func.tags else ())
        for t, spec in zip(results, schema.returns * (len(results) if len(schema.returns) == 1 else 1)):
            if isinstance(t, torch.Tensor) and spec.alias_info is None:
                if name in BETWEEN:
                    inside = torch.full_like(t, torch.nan) if name == "logit_backward" else args[0]
                    t.copy_(torch.where(args[1].isnan(), torch.zeros_like(t) if self.seed % 2 else inside, t))
                if name in PIECES:
                    t.copy_(torch.where(args[PIECES[name]].isnan(), torch.nan if self.seed % 2 else args[0], t))
                if self.seed % 2 and t.dtype is torch.float16:
                    self.keep_finite_(t, func, args, kwargs)
                    self.keep_small_(t, func, args, kwargs)
                before = t.clone() if name == "_to_copy" else None
                if name == "linspace" and t.numel():                # what is zero in the middle is rounding
                    self.disturb_as_(t, t.abs().amax())
                else:
                    if name in LOGARITHMS and not overlaps(t):      # of about 1 they are as inexact as 1
                        self.disturb_as_(t, torch.where(t.isfinite(), t.abs().clamp(min=1), 1))
                    if name in SLOPES and not overlaps(t):
                        self.disturb_as_(t, torch.where(args[0].isfinite(), args[0].abs(), 0))
                    self.disturb_(t)
                if before is not None:
                    self.undisturbed[id(t)] = t, t._version, before
        return out

    def keep_finite_(self, t, func, operands, kwargs):
        """What is too large for half precision a compiler may go on with, in float32; not what is infinite there, too, as a reciprocal of
        zero, and not what an operand's infinities can have made."""
        if torch.Tag.pointwise in func.tags and all(spec.alias_info is None for spec in func._schema.arguments):
            large = t.isinf() & self.widened(func, operands, kwargs).isfinite()
        else:
            large = t.isinf() & ~torch.tensor([x.isinf().any() for x in operands if isinstance(x, torch.Tensor)]).any().to(t.device)
        t.copy_(torch.where(large, t.sign() * 0.9 * torch.finfo(t.dtype).max, t))

    def widened(self, func, args, kwargs):
        return func(*(x.float() if isinstance(x, torch.Tensor) and x.dtype in HALF else x for x in args), **kwargs)

    def keep_small_(self, t, func, args, kwargs):
        """What is too small for half precision as well."""
        if torch.Tag.pointwise in func.tags and (t == 0).any() and not overlaps(t):
            wide = self.widened(func, args, kwargs)
            if wide.shape == t.shape:
                smallest = torch.finfo(t.dtype).smallest_normal * torch.finfo(t.dtype).eps
                t.copy_(torch.where((t == 0) & (wide != 0), wide.sign() * smallest, t))

    def flush_(self, t, operands):
        """What a GPU makes of numbers below the normal ones may be zero, and so may such a result: Triton's functions, `sin` as well as
        `fmod`, take them for it."""
        for x in (t, *operands) if isinstance(t, torch.Tensor) and not overlaps(t) else ():
            if isinstance(x, torch.Tensor) and x.is_cuda and x.dtype is torch.float32:
                t.masked_fill_((x != 0) & (x.abs() < torch.finfo(x.dtype).tiny), 0)

    def without_rests(self, x):
        """What differs from run to run by half of its size or more is the rest of a cancellation, which may leave none."""
        number = next(self.asked)
        low, high = self.known.get(number, (x, x))
        if not x.is_floating_point() or low.shape != x.shape:
            return x
        rest = high - low > high.abs().maximum(low.abs()) / 2
        self.known[number] = low.minimum(x).clone(), high.maximum(x).clone()
        return torch.where(rest, 0, x) if self.seed % 2 else x

    def run_widened(self, func, args, kwargs):
        """What an operator of several steps rounds between them, as `logsumexp` of half precision does, need not be rounded: where
        it is functional, it runs in float32 and rounds its results."""
        out, leaves = func(*args, **kwargs), pytree.tree_leaves((args, kwargs))
        if func is torch.ops.aten.gelu.default and not kwargs:      # far below zero 1 + erf(x) is all rounding; of inf eager makes NaN
            x = args[0].float() if args[0].dtype in HALF else args[0]
            return (x * 0.5 * (1 + self.disturbed((x * 0.5 ** 0.5).erf()))).to(out.dtype)
        if func is torch.ops.aten.gelu_backward.default and not kwargs:
            x = args[1].float() if args[1].dtype in HALF else args[1]
            slope = 0.5 * (1 + self.disturbed((x * 0.5 ** 0.5).erf())) + x * (-0.5 * x * x).exp() * (0.5 / torch.pi) ** 0.5
            return torch.where(x.isfinite(), args[0] * slope, out).to(out.dtype)
        if func in SUMS and self.seed % 4 == 3 and args[0].is_floating_point() and not kwargs.get("dtype"):
            return func(args[0].double(), *args[1:], **kwargs).to(out.dtype)            # what cancels may do so without a rest
        if func is torch.ops.aten.var_mean.correction:              # of infinities eager makes NaN, or not, by where they stand
            return out[0], args[0].mean(args[1] if len(args) > 1 else None, keepdim=kwargs.get("keepdim", False))
        if func is torch.ops.aten._fused_rms_norm.default:          # as well, of the whole row
            x, shape, weight, eps = (*args, None, None)[:4]
            x, eps = x.float() if x.dtype in HALF else x, torch.finfo(x.dtype).eps if eps is None else eps
            scale = ((x * x).mean(tuple(range(-len(shape), 0)), keepdim=True) + eps).rsqrt()
            return (x * scale * (1 if weight is None else weight)).to(out[0].dtype), out[1]
        halves = any(isinstance(x, torch.Tensor) and x.dtype in HALF for x in leaves)
        one_step = torch.Tag.pointwise in func.tags or torch.Tag.core in func.tags and func is not torch.ops.aten._log_softmax.default
        writes = func.overloadpacket.__name__ in BATCH_NORMS or any(
            a.alias_info is not None for a in (*func._schema.arguments, *func._schema.returns))
        if not halves or one_step or writes or any(isinstance(x, torch.dtype) for x in leaves):
            return out
        wide = pytree.tree_map(lambda x: x.float() if isinstance(x, torch.Tensor) and x.dtype in HALF else x, (args, kwargs))
        return pytree.tree_map(lambda t, w: w.to(t.dtype) if isinstance(t, torch.Tensor) else t, out, func(*wide[0], **wide[1]))

    def run_exact(self, func, args, kwargs):
        """Give `func` the casts as they were, unless its own result is of half precision."""
        def before(x):
            t, version, value = self.undisturbed.get(id(x), (None, 0, None))
            return value if t is not None and t._version == version else x

        exact = pytree.tree_map(before, (args, kwargs))
        schema = func._schema
        if not all(a.alias_info is None for a in (*schema.arguments, *schema.returns)) or all(
                a is b for a, b in zip(pytree.tree_leaves((args, kwargs)), pytree.tree_leaves(exact))):
            return func(*args, **kwargs)
        out = func(*exact[0], **exact[1])
        halves = any(isinstance(t, torch.Tensor) and t.dtype in HALF for t in pytree.tree_leaves(out))
        return func(*args, **kwargs) if halves else out


def overlaps(t) -> bool:
    return any(stride == 0 and size > 1 for size, stride in zip(t.shape, t.stride()))


class Trimmed(TorchDispatchMode):
    """Gives each new tensor memory of its size: of a loss that is a number eager keeps what the losses of all elements were in."""

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        new = all(spec.alias_info is None for spec in func._schema.returns)
        return pytree.tree_map(lambda t: t.clone() if has_more_memory(t) else t, out) if new else out


def has_more_memory(t) -> bool:
    return isinstance(t, torch.Tensor) and t.layout is torch.strided and not t._is_zerotensor() and \
        t.untyped_storage().nbytes() > t.element_size() * (1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride())))


class Overlaps(TorchDispatchMode):
    """`found`: whether some operator read elements, at another place, that it wrote."""

    def __init__(self):
        super().__init__()
        self.found = False

    @classmethod
    def _should_skip_dynamo(cls):
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, operands = func(*args, **(kwargs or {})), []
        given = {**dict(zip((a.name for a in func._schema.arguments), args)), **(kwargs or {})}
        for spec in func._schema.arguments:
            value = given.get(spec.name)
            written = spec.alias_info is not None and spec.alias_info.is_write
            operands += [(t, written) for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor) and t.layout is torch.strided]
        if func.overloadpacket.__name__ not in ("set_", "resize_"):
            self.found |= any(meet(t, u) for t, written in operands if written for u, _ in operands if u is not t)
        return out


def meet(t, u) -> bool:
    """Whether two tensors share elements, and are not one in all positions."""
    if t.untyped_storage()._cdata != u.untyped_storage()._cdata or form(t) == form(u):
        return False
    return bool(places(t) & places(u))


def form(t) -> tuple:
    return t.dtype, t.shape, t.stride(), t.storage_offset()


def places(t) -> set:
    """Where the elements are, in bytes."""
    out = torch.tensor([t.storage_offset()])
    for size, stride in zip(t.shape, t.stride()):
        out = (out[:, None] + torch.arange(size) * stride).flatten()
    return set((out * t.element_size()).tolist())
