"""Families of operators for random tensor programs. A program draws on two of them, so that what belongs together meets often."""
from __future__ import annotations

import re

import torch

from .tensors import Refused, family, index_into

FLOAT = torch.is_floating_point


def weights(w, t, *size: int, of: str = "") -> str:
    """The text of a tensor of numbers for a layer; sometimes a function of `of`, so that a gradient reaches it."""
    count = 1
    for s in size:
        count *= s
    text = f"torch.linspace(-1, 1, {count}, device=DEVICE).mul(7).sin().reshape({size}).to({t.dtype})"
    return f"({text} * {of}.mean())" if of and w.rng.random() < 0.4 else text


def spatial(w, *ranks: int) -> tuple[str, torch.Tensor, int]:
    x = w.tensor(lambda t: FLOAT(t) and t.dim() in (ranks or (3, 4, 5)) and t.numel() > 0)
    return x, w.env[x], w.env[x].dim() - 2


def each(w, n: int, *choices):
    """One of the choices for all of n dimensions, or one for each."""
    return w.rng.choice(choices) if w.rng.random() < 0.5 else tuple(w.rng.choice(choices) for _ in range(n))


# ---- scatters

def place(w, x: str, d: int) -> str:
    """Positions along d, as a tensor that `scatter` takes, possibly shorter than x."""
    t = w.env[x]
    if not t.numel():
        raise Refused
    size = t.shape[d]
    sizes = [size if w.rng.random() < 0.7 else w.rng.randint(1, size) for size in t.shape]
    length = sizes[d]
    return f"({index_into(w, size, length)} % {size}).view({', '.join('-1' if i == d else '1' for i in range(t.dim()))})" \
           f".expand({', '.join(map(str, sizes))})"


def scatter_target(w):
    x = w.tensor(lambda t: t.dim() > 0 and t.dtype is not torch.bool and not t.is_complex())
    d = w.rng.randrange(w.env[x].dim())
    return x, d


@family("scatters", 3.0)
def scatter_reduce(w):
    x, d = scatter_target(w)
    mode, own = w.rng.choice(["sum", "prod", "mean", "amax", "amin"]), w.rng.random() < 0.5
    source = w.rng.choice([x, f"{x} * 2", f"{x}.flip({d})", f"{x}.roll(1, 0)"])
    return f"{x}.scatter_reduce({d}, {place(w, x, d)}, {source}, '{mode}', include_self={own})"


@family("scatters", 2.0)
def index_reduce(w):
    x, d = scatter_target(w)
    at = f"{index_into(w, w.size(x, d), w.size(x, d))} % {w.size(x, d)}"
    mode, own = w.rng.choice(["prod", "mean", "amax", "amin"]), w.rng.random() < 0.5
    return w.rng.choice([f"{x}.index_reduce({d}, {at}, {x}, '{mode}', include_self={own})",
                         f"{x}.index_add({d}, {at}, {x}, alpha=2)", f"{x}.scatter_add({d}, {place(w, x, d)}, {x}.flip({d}))"])


def positions(w, x: str, distinct: bool, gap: str = "") -> str:
    """Indices for an `index_put`: one vector or more, that broadcast together, with gaps."""
    shape = w.env[x].shape
    length, out, seen = w.rng.randint(1, 4), [], False
    for size in shape[:w.rng.randint(1, len(shape))]:
        if gap and w.rng.random() < 0.3:
            out.append(gap)
        elif w.rng.random() < 0.2 and not distinct:
            out.append(f"{index_into(w, size, 2)}.view(2, 1)")
            seen = True
        elif distinct and seen:
            out.append(index_into(w, size, 1))
        else:
            out.append(index_into(w, size, min(length, size) if distinct else length, distinct))
            seen = True
    if not seen:
        raise Refused
    return f"[{', '.join(out)}]"


@family("scatters", 2.0)
def index_put(w):
    x = w.tensor(lambda t: t.dim() > 0 and not t.is_complex())
    accumulate = w.env[x].dtype is not torch.bool and w.rng.random() < 0.6
    at = positions(w, x, not accumulate)
    value = w.rng.choice([f"{x}.sum()", f"{x}.flatten()[:1]", f"torch.tensor(2, device=DEVICE).to({w.env[x].dtype})",
    f"{x}[..., :1].amax(0)"])
    return f"torch.index_put({x}, {at}, {value}.to({w.env[x].dtype}), accumulate={accumulate})"


@family("scatters", 1.5, write=True)
def index_put_(w):
    x, d = scatter_target(w)
    accumulate = w.rng.random() < 0.6
    return w.rng.choice([
        f"{x}.index_put_({positions(w, x, not accumulate)}, {x}.detach().flatten()[:1] * 2, accumulate={accumulate})",
        f"{x}{positions(w, x, True, ':')} = {w.rng.choice(['2', f'{x}.flatten()[-1]', f'{x}.sum()'])}",
        f"{x}{positions(w, x, True, ':')} *= 2",
        f"{x}.scatter_reduce_({d}, {place(w, x, d)}, {x}.clone(), '{w.rng.choice(['sum', 'prod', 'mean', 'amax', 'amin'])}', "
        f"include_self={w.rng.random() < 0.5})",
        f"{x}.scatter_add_({d}, {place(w, x, d)}, {x} * 2)", f"{x}.put_(torch.tensor([0, 0, -1], device=DEVICE), "
        f"{x}.detach().clone().flatten()[:1].expand(3), accumulate=True)"])


@family("view-scatters", 3.0)
def view_scatter(w):
    x = w.tensor(lambda t: t.dim() > 0)
    t = w.env[x]
    d, e = w.dim(x), w.dim(x)
    low = w.rng.randint(0, max(w.size(x, d) - 1, 0))
    high, step, at = w.rng.randint(low, w.size(x, d) + 1), w.rng.choice([1, 1, 2]), w.rng.choice([0, -1])
    offset = w.rng.choice([0, 1, -1])
    base = w.rng.choice([x, x, f"{x} * 2", f"{x}.mT", f"{x}.expand(2, *{x}.shape)"])
    strides = [w.rng.choice([0, 1, 2, s]) for s in t.stride()[-2:]]
    sizes = [w.rng.randint(1, 2) for _ in strides]
    return w.rng.choice([
        f"(q := {base}).diagonal_scatter(q.diagonal({offset}, {d}, {e}) * 2, {offset}, {d}, {e})",
        f"(q := {base}).diagonal_scatter(q.diagonal({offset}).sum() + q.diagonal({offset}), {offset})",
        f"(q := {base}).slice_scatter(q[tuple(slice(None) for _ in range({d % t.dim()}))][..., :] * 2, 0)",
        f"(q := {base}).slice_scatter(torch.ones_like(torch.ops.aten.slice(q, {d}, {low}, {high}, {step})), {d}, {low}, {high}, {step})",
        f"(q := {base}).slice_scatter(torch.ops.aten.slice(q, {d}, {low}, {high}, {step}).flip(0), {d}, {low}, {high}, {step})",
        f"(q := {base}).select_scatter(q.select({d}, {at}) * 2, {d}, {low})", f"(q := {base}).select_scatter(q.amax({d}), {d}, {at})",
        f"{x}.detach().as_strided_scatter({x}.as_strided({sizes}, {strides}) * 2, {sizes}, {strides})",
        f"{x}.contiguous().as_strided_scatter(torch.ones({sizes}, device=DEVICE).to({t.dtype}), "
        f"{sizes}, {t.stride()[-2:]}, {t.storage_offset()})"])


# ---- integers

family("shifts", 0.5, "{n} << {i}", "{n} >> {i}", "{n} << ({i} % 9)", "{n} >> ({i}.abs() % 9)", "{n} << 40", "{n} >> 40", "{n} >> 63",
       "{n} << 63", "{n} << -1", "{n} >> -2", "1 << {n}", "-5 >> {n}", "-5 >> {n}.abs()", "torch.bitwise_left_shift({n}, {i})", "{n} << 7",
       "torch.bitwise_right_shift({n}, {i})", "{n} << 8", "{n} >> 7", "{n} >> 8", "{n} >> 16", "{n} << 31", "{n} >> 31", "{n} << 32",
       "{n}.to(torch.uint8) >> {i}", "{n}.to(torch.int8) << {i}", "{n}.to(torch.int8) >> {i}.to(torch.int64)", "({n} << 2) >> 2",
       "{n} << torch.tensor(3, device=DEVICE)", "{n} >> torch.tensor(70, device=DEVICE)", "{b} << 1", "{b} >> {m}", "{n} << {m}")
family("shifts", 0.5, "{n} <<= {i} % 5", "{n} >>= {i}", "{n}.bitwise_left_shift_(9)", "{n}.bitwise_right_shift_(33)", "{n} >>= 1",
       write=True)
family("divisions", 0.5, *(f"torch.div({{a}}, {{y}}{fix}, rounding_mode={mode})" for mode in ("'floor'", "'trunc'", "None")
                           for fix in (".abs() + 1", " * 0 - 3", " * 0 + 0.7")),
       "{a} // {c}", "{a} % {c}", "{n} // ({i}.abs() + 1)", "{n} // ({i} * 2 + 1)", "{n} % ({i} * 2 + 1)", "torch.fmod({n}, {i} * 2 + 1)",
       "torch.remainder({a}, {y}.abs() + 1)", "torch.fmod({a}, {y}.abs() + 1)", "torch.remainder(7, {n} * 2 + 1)", "7.5 // ({n} * 2 + 1)",
       "{x} // ({f}.abs() + 0.5)", "{x} % ({f}.abs() + 0.5)", "{x} // 0", "{x} % 0.0", "torch.fmod({x}, 0)", "{n}.to(torch.uint8) // 7",
       "{n}.to(torch.uint8) - {n}", "-{n}.to(torch.uint8)", "torch.floor_divide({a}, 3)", "{n}.true_divide({i} * 2 + 1)",
       "torch.lcm({n}, {i})", "torch.gcd({n}, {i})", "{n} ** 3", "{n}.float_power(2)", "{n}.abs() ** 0.5", "{b} / 2", "{b} // True",
       "torch.where({m}, {a}, {y})", "torch.where({m}, {a}, 2.5)", "torch.where({m}, {n}, True)", "torch.where({m}, 1, {a})",
       "torch.where({a} > 0, {a}, {y}.double())", "torch.where({a} > 0, {a}, torch.tensor(7, device=DEVICE))", "torch.where({b}, {i}, {f})",
       "{a}.nan_to_num()", "{x}.nan_to_num(nan=1.5)", "{x}.nan_to_num(posinf=3, neginf=-3)",
       "({x} / 0).nan_to_num()", "({x} / 0).nan_to_num(0.5, 1, -1)", "({x}.log()).nan_to_num(0.0)", "{a} * 3 // 2", "{a}.sign() * {y}",
       "{x}.frexp().mantissa", "{x}.frexp().exponent", "torch.nextafter({x}, {x} + 1) > {x}", "torch.ldexp({x}, {i})",
       "{x}.trunc().long() // -2")
family("divisions", 0.5, "{n}.floor_divide_(3)", "{n}.remainder_(-4)", "{n}.fmod_(-4)", "{x}.div_(0.7, rounding_mode='floor')",
       "{x} //= 0.3",
       "{x}.remainder_({f}.abs() + 1)", "{x}.nan_to_num_(0.5)", "{n}.div_(2, rounding_mode='trunc')", "{x} %= -1.5", "{n}.gcd_({i})",
       write=True)


# ---- layers

@family("convolutions", 3.0)
def any_convolution(w):
    x = w.tensor(lambda t: FLOAT(t) and t.dim() in (2, 3, 4, 5) and 0 not in t.shape)
    t = w.env[x]
    batched = t.dim() > 2 and (t.dim() == 5 or w.rng.random() < 0.8)
    n, channels = t.dim() - (2 if batched else 1), t.shape[1 if batched else 0]
    groups = w.rng.choice([g for g in range(1, channels + 1) if channels % g == 0])
    out, kernel = groups * w.rng.choice([1, 2, 3]), [w.rng.choice([1, 2, 3]) for _ in range(n)]
    if n == 3 and groups > 1 and t.dtype is torch.float16:
        raise Refused                   # it ends the process, on a CPU, in eager
    stride, dilation = each(w, n, 1, 1, 2, 3), each(w, n, 1, 1, 2)
    padding = each(w, n, 0, 1, 2)
    bias = w.rng.choice(["None", weights(w, t, out, of=x)])
    if w.rng.random() < 0.4:
        extra = each(w, n, 0, 0, 1)
        return f"F.conv_transpose{n}d({x}, {weights(w, t, channels, out // groups, *kernel, of=x)}, {bias}, stride={stride}, " \
               f"padding={padding}, output_padding={extra}, groups={groups}, dilation={dilation})"
    if w.rng.random() < 0.2:
        stride, padding = 1, w.rng.choice(["'same'", "'valid'"])
    return f"F.conv{n}d({x}, {weights(w, t, out, channels // groups, *kernel, of=x)}, {bias}, stride={stride}, padding={padding}, " \
           f"dilation={dilation}, groups={groups})"


@family("pooling", 3.0)
def pool(w):
    x = w.tensor(lambda t: FLOAT(t) and t.dim() in (2, 3, 4, 5) and 0 not in t.shape)
    t = w.env[x]
    n = t.dim() - (2 if t.dim() == 5 or t.dim() > 2 and w.rng.random() < 0.7 else 1)
    kernel, stride, padding = each(w, n, 1, 2, 3), each(w, n, 1, 2, 3), each(w, n, 0, 0, 1)
    ceil, size = w.rng.random() < 0.5, each(w, n, 1, 2, 3, 4)
    counts = w.rng.random() < 0.5
    largest = f"F.max_pool{n}d({x}, {kernel}, {stride}, {padding}, {each(w, n, 1, 1, 2)}, {ceil}"
    options = [f"{largest})", f"{largest})", f"{largest}, return_indices=True)[{w.rng.choice([0, 1])}]",
               f"F.avg_pool{n}d({x}, {kernel}, {stride}, {padding}, {ceil}, {counts})",
               f"F.adaptive_avg_pool{n}d({x}, {size})", f"F.adaptive_max_pool{n}d({x}, {size})",
               f"F.adaptive_max_pool{n}d({x}, {size}, return_indices=True)[1]",
               f"F.max_unpool{n}d(*F.max_pool{n}d({x}, 2, return_indices=True), 2)",
               f"F.max_pool{n}d({x} * 2, 2, ceil_mode=True) + F.avg_pool{n}d({x}, 2, ceil_mode=True)"]
    if n < 3:
        options += [f"F.lp_pool{n}d({x}.abs() + 0.1, 2, {w.rng.choice([1, 2, 3])}, ceil_mode={ceil})"]
    if n > 1:
        options += [f"F.avg_pool{n}d({x}, {kernel}, {stride}, {padding}, {ceil}, {counts}, divisor_override={w.rng.choice([1, 3])})"]
    return w.rng.choice(options)


@family("sampling", 2.0)
def sample(w):
    x, t, n = spatial(w, 4, 4, 5)
    modes = ["bilinear", "nearest", "bicubic"] if n == 2 else ["bilinear", "nearest"]
    mode, padding, corners = w.rng.choice(modes), w.rng.choice(["zeros", "border", "reflection"]), w.rng.random() < 0.5
    size = [t.shape[0], t.shape[1], *(w.rng.randint(1, 4) for _ in range(n))]
    theta = f"torch.eye({n}, {n + 1}, device=DEVICE).to({t.dtype}).add({w.rng.choice(['0.1', '0.3', '-0.2', x + '.mean()'])})" \
            f".expand({t.shape[0]}, {n}, {n + 1})"
    grid = w.rng.choice([f"F.affine_grid({theta}, {size}, align_corners={w.rng.random() < 0.5})",
                         f"torch.linspace(-1.3, 1.2, {t.shape[0] * 6 * n}, device=DEVICE)"
                         f".view({t.shape[0]}, {'2, 3' if n == 2 else '2, 3, 1'}, {n}).to({t.dtype})"])
    return w.rng.choice([f"F.grid_sample({x}, {grid}, '{mode}', '{padding}', {corners})"] * 3 + [grid + " * 2"])


@family("sampling", 3.0)
def resize(w):
    x, t, n = spatial(w)
    size = [w.rng.randint(1, 7) for _ in range(n)]
    scale = w.rng.choice(["2", "0.5", "1.5", "0.7", str(tuple(w.rng.choice([0.5, 1.3, 2.0]) for _ in range(n)))])
    linear = {1: "linear", 2: "bilinear", 3: "trilinear"}[n]
    mode = w.rng.choice(["nearest", "nearest-exact", "area", linear, linear] + ["bicubic"] * (n == 2) * 2)
    smooth = mode == linear or mode == "bicubic"
    how = f"size={size}" if w.rng.random() < 0.5 else f"scale_factor={scale}" + w.rng.choice(["", ", recompute_scale_factor=True"])
    corners = f", align_corners={w.rng.random() < 0.5}" if smooth and w.rng.random() < 0.6 else ""
    alias = ", antialias=True" if n == 2 and smooth and w.rng.random() < 0.25 else ""
    options = [f"F.interpolate({x}, {how}, mode='{mode}'{corners}{alias})"] * 4
    if n == 2:
        options += [f"F.pixel_unshuffle({x}[..., :{t.shape[2] // 2 * 2}, :{t.shape[3] // 2 * 2}], 2)", f"F.pixel_shuffle({x}, 2)",
                    f"F.channel_shuffle({x}.repeat(1, 2, 1, 1), {w.rng.choice([2, 2 * t.shape[1]])})",
                    f"F.interpolate({x}, scale_factor=0.5, mode='area')"]
    pads = [w.rng.choice([0, 1, 2, -1]) for _ in range(2 * n)]
    options += [f"F.pad({x}, {pads}, mode='{w.rng.choice(['reflect', 'replicate', 'circular', 'constant'])}')"]
    return w.rng.choice(options)


@family("windows", 3.0)
def window(w):
    x, t, _ = spatial(w, 3, 4)
    kernel, dilation, padding, stride = each(w, 2, 1, 2, 3), each(w, 2, 1, 1, 2), each(w, 2, 0, 1), each(w, 2, 1, 2)
    settings = f"{kernel}, {dilation}, {padding}, {stride}"
    d, step = w.rng.choice([-1, -2]), w.rng.choice([1, 2, 3])
    size = w.rng.randint(1, max(1, w.size(x, d)))
    return w.rng.choice([f"F.unfold({x}, {settings})", f"F.fold(F.unfold({x}, {settings}), {tuple(t.shape[-2:])}, {settings})",
                         f"F.fold(F.unfold({x}, {settings}) * 2, {tuple(t.shape[-2:])}, {settings})",
                         f"{x}.unfold({d}, {size}, {step})", f"{x}.unfold({d}, {size}, {step}).unfold({d}, 1, 1).sum(-1)",
                         f"{x}.unfold(-1, {w.rng.randint(1, t.shape[-1])}, {step}).unfold(-3, {w.rng.randint(1, t.shape[-2])}, {step})",
                         f"torch.cartesian_prod({x}.flatten()[:5], {x}.flatten()[:3])", f"torch.combinations({x}.flatten()[:5], 2)",
                         f"{x}.unfold({d}, {size}, {step}).amax(-1)", f"{x}.unfold({d}, {size}, {step}) * {x}[..., :1, :1, None]"])


@family("embeddings", 3.0)
def bag(w):
    x = w.tensor(lambda t: FLOAT(t) and t.dim() == 2 and t.shape[0] > 0 and not t.is_complex() and (t.numel() or w.device == "cpu"))
    t = w.env[x]                                  # on a GPU eager reads beyond memory for rows of no elements
    length, mode = w.rng.randint(1, 6), w.rng.choice(["sum", "mean", "max"])
    at = index_into(w, t.shape[0], length, False) + f" % {x}.shape[0]"       # another batch size may have fewer
    offsets = sorted([0] + [w.rng.randint(0, length) for _ in range(w.rng.randint(0, 3))])
    ignored = w.rng.choice(["", "", f", padding_idx={w.rng.randrange(t.shape[0])}", ", padding_idx=-1"])
    last = ", include_last_offset=True" if w.rng.random() < 0.3 else ""
    if last:
        offsets.append(length)
    weighted, weighted_row = "", ""
    if mode == "sum" and w.rng.random() < 0.5:
        weighted = f", per_sample_weights=torch.linspace(-1, 1, {length}, device=DEVICE).to({t.dtype})"
        weighted_row = weighted.replace(".to(", ".view(1, -1).to(")
    often = w.rng.choice(["", "", ", scale_grad_by_freq=True"])
    rows = f"{x}.detach().clone()" if w.device == "cpu" else f"F.pad({x}.detach(), (0, 1))"        # never empty
    return w.rng.choice([
        f"F.embedding_bag({at}, {x}, torch.tensor({offsets}, device=DEVICE), mode='{mode}'{weighted}{last}{ignored})",
        f"F.embedding_bag(({at}).view(1, -1), {x}, mode='{mode}'{weighted_row}{ignored})",
        f"F.embedding_bag(({at}).int(), {x}, torch.tensor({offsets}, dtype=torch.int32, device=DEVICE), mode='{mode}'{last})",
        f"F.embedding({at}, {x}{ignored})", f"F.embedding(({at}).view(-1, 1), {x}{ignored}{often})", f"F.embedding({at}, {x} * 2{often})",
        f"F.embedding({at}, {rows}, max_norm=1.0)", f"F.embedding(({at}).int(), {x})",
        f"F.embedding_bag({at}, {rows}, torch.tensor({offsets}, device=DEVICE), max_norm=0.5, mode='{mode}'{last})"])


@family("losses", 3.0)
def loss(w):
    x = w.tensor(lambda t: FLOAT(t) and t.dim() in (1, 2, 3, 4) and 0 not in t.shape)
    t = w.env[x]
    classes, how = t.shape[1 if t.dim() > 1 else 0], w.rng.choice(["mean", "sum", "none"])
    sizes = [t.shape[0], *t.shape[2:]] if t.dim() > 1 else []
    count = 1
    for s in sizes:
        count *= s
    labels = [w.rng.choice([w.rng.randrange(classes), 0]) for _ in range(count)]
    ignored = w.rng.choice([-100, 0, 1, -1])
    labels = [ignored if w.rng.random() < 0.2 and ignored < classes else n for n in labels]
    target = f"torch.tensor({labels}, device=DEVICE).view({', '.join(map(str, sizes)) or '()'})" if sizes else \
        f"torch.tensor({labels[0]}, device=DEVICE)"
    if count > 60:
        target = f"(torch.arange({count}, device=DEVICE) % {classes}).view({', '.join(map(str, sizes))})"
    weight = w.rng.choice(["", f", weight=torch.linspace(0, 1, {classes}, device=DEVICE).to({t.dtype})"])
    smooth = w.rng.choice(["", ", label_smoothing=0.1"])
    end, other = f", reduction='{how}')", w.rng.choice([f"{x}.roll(1, 0)", f"{x}.flip(-1).detach()", f"{x} * 0", f"{x}.detach() * 0.5"])
    rows = f"torch.linspace(-1, 1, {t.shape[0]}, device=DEVICE).sign().to({t.dtype})"
    return w.rng.choice([
        *[f"F.cross_entropy({x}, {target}, ignore_index={ignored}{weight}{smooth}{end}"] * 4,
        *[f"F.nll_loss({x}.log_softmax(1), {target}, ignore_index={ignored}{weight}{end}"] * 2,
        f"F.cross_entropy({x}, {x}.softmax(1){weight}{smooth}{end}", f"F.cross_entropy({x}, {x}.detach().softmax(1){weight}{smooth}{end}",
        f"F.binary_cross_entropy({x}.sigmoid(), ({other}).sigmoid(){w.rng.choice(['', f', weight={x}.detach().abs()'])}{end}",
        f"F.binary_cross_entropy_with_logits({x}, ({other} > 0).to({t.dtype}){weight.replace('weight', 'pos_weight')}{end}",
        f"F.binary_cross_entropy_with_logits({x}, ({other}).sigmoid(), {x}.detach().abs(){end}",
        f"F.kl_div({x}.log_softmax(-1), ({other}).log_softmax(-1), log_target=True{end}", f"F.kl_div({x}, ({other}).softmax(-1){end}",
        f"F.kl_div({x}.log_softmax(-1), ({other}).softmax(-1), reduction='batchmean')", f"F.mse_loss({x}, {other}{end}",
        f"F.smooth_l1_loss({x}, {other}, beta={w.rng.choice([0.5, 1.0, 0.0])}{end}", f"F.huber_loss({x}, {other}, delta=0.5{end}",
        f"F.l1_loss({x}, {other}{end}", f"F.soft_margin_loss({x}, ({other}).sign(){end}",
        f"F.hinge_embedding_loss({x}, ({other} > 0).to({t.dtype}) * 2 - 1, margin=0.5{end}",
        f"F.margin_ranking_loss({x}, {other}, ({x}.detach() > 0).to({t.dtype}) * 2 - 1, margin=0.1{end}",
        f"F.multi_margin_loss({x}, {target}, p={w.rng.choice([1, 2])}{end}",
        f"F.multilabel_soft_margin_loss({x}, ({other} > 0).to({t.dtype}){end}",
        f"F.multilabel_margin_loss({x}, ({target}).view(-1, 1).expand({x}.shape){end}",
        f"F.triplet_margin_loss({x}, {other}, {x} + 0.5, swap={w.rng.random() < 0.5}{end}",
        f"F.triplet_margin_with_distance_loss({x}, {other}, {x} - 0.5{end}",
        f"F.cosine_embedding_loss({x}, {other}, {rows}, margin=0.1{end}",
        f"F.poisson_nll_loss({x}.clamp(-3, 3), ({other}).abs(), log_input={w.rng.random() < 0.5}, full={w.rng.random() < 0.5}{end}",
        f"F.gaussian_nll_loss({x}, {other}, {x}.abs() + 0.1, full={w.rng.random() < 0.5}{end}",
        f"F.pairwise_distance({x}, {other}, p={w.rng.choice([1.0, 2.0])}, keepdim=True)"])


@family("attention", 4.0)
def attention(w):
    x = w.tensor(lambda t: FLOAT(t) and t.dim() in (2, 3, 4) and 0 not in t.shape)
    t = w.env[x]
    length, width = t.shape[-2:]
    key = w.rng.choice([x, f"{x}.flip(-2)", f"{x}[..., :{max(1, length - 1)}, :]"])
    keys = max(1, length - 1) if "[" in key else length
    lead = w.rng.choice(["", *(["".join(f"{s}, " for s in t.shape[:-2])] if t.dim() > 2 else [])])
    bools = f"(torch.arange({length * keys}, device=DEVICE).mul(7) % {w.rng.choice([2, 3, 5])} > 0).view({length}, {keys})"
    floats = f"torch.linspace(-1, 1, {length * keys}, device=DEVICE).view({length}, {keys}).to({t.dtype})"
    triangle = f"torch.ones({length}, {keys}, dtype=torch.bool, device=DEVICE).tril({w.rng.choice([0, 1, -1])})"
    mask = w.rng.choice([bools, triangle, floats, floats, f"({floats} * {x}.mean())", f"{floats}.masked_fill({triangle}, float('-inf'))",
                         f"{floats}.masked_fill(~{triangle}, -1e9)", f"torch.zeros({length}, {keys}, device=DEVICE).to({t.dtype})"
                         f".masked_fill({bools}, float('-inf'))", f"{bools}.expand({lead}{length}, {keys})", f"{triangle}[:1]"])
    scale = w.rng.choice(["", "", ", scale=0.3", ", scale=1.0"])
    how = w.rng.choice([f", attn_mask={mask}"] * 3 + [", is_causal=True", ""])
    value = w.rng.choice([key, f"{key} * 2", f"{key}[..., :1]", f"{key}.detach()"])
    group = ", enable_gqa=True" if t.dim() == 4 and t.shape[1] % 2 == 0 and w.rng.random() < 0.3 else ""
    narrow = (lambda k: f"({k})[:, ::2]") if group else (lambda k: k)
    scores = f"({x} @ ({key}).mT)"
    return w.rng.choice([*[f"F.scaled_dot_product_attention({x}, {narrow(key)}, {narrow(value)}{how}{scale}{group})"] * 4,
                         f"{scores}.masked_fill({triangle}, float('-inf')).softmax(-1) @ ({value})",
                         f"({scores} + {floats}).softmax(-1, dtype=torch.float32)",
                         f"{scores}.masked_fill({bools}, float('-inf')).log_softmax(-1)",
                         f"{scores}.masked_fill({triangle}, float('-inf')).logsumexp(-1)",
                         f"torch.where({bools}, {scores}, float('-inf')).amax(-1).exp()"])


# ---- memory, derivatives, complex numbers

family("memory", 0.5, "{x}.detach_()", "{x} = {x}.detach_()", "({x} * 2).detach_()", "{x}.requires_grad_()", "{a}.resize_({a}.shape)",
       "{x}.set_({x}.detach() * 2)", "{a}.set_({a}.flip(0))", "{x}.detach().resize_(2, 2)", "{x}.data = {x}.data[:1]",
       "{a}.data = {a}.clone().data", "{n}.resize_(({n}.numel() + 1) // 2)", "{x}.resize_as_({x})", "{a}.swapdims_(0, -1)",
       "{a}.unsqueeze_({d})", "{a}.squeeze_({d})",
       "{a}.transpose_(0, {d})", "{x}.set_({x}.untyped_storage(), 0, (2,), (1,))", "{x}.as_strided_((2,), (1,))", "{x}.detach().set_()",
       "{x}.requires_grad_(False)", "{x}.retain_grad()", "{a}.data.copy_({a}.roll(1, 0))", "{x}.grad = None", write=True)
family("memory", 0.5, "({x} * 1).detach_()", "{a}.clone().resize_(({a}.numel() + 1) // 2)", "torch.empty_like({a}).set_({a}.clone())",
       "{a}.clone().t_()", "torch.empty(0, device=DEVICE).set_({x}.detach().float())", "{a}.clone().swapaxes_(0, -1)",
       "{a}.clone().as_strided_((2,), (1,))",
       "{a}.new_empty(0).set_({a}.detach())", "{x}.detach().requires_grad_() * 2", "{a}.clone().data", "{x}.clone().requires_grad_(False)",
       "torch.zeros(0, device=DEVICE).resize_(3).fill_({c})", "{a}.clone().squeeze_().unsqueeze_(0)",
       "{a}.untyped_storage().nbytes() + {a}",
       "{x}.requires_grad + {x}", "{x}.is_leaf * {x}", "{a}.stride(-1) + {a}", "{a}.is_contiguous() + {a}",
       "{a}.storage_offset() * {a}", "({x}.grad_fn is None) + {x}", "{a}.data_ptr() * 0 + {a}")

CURVES = ["torch.sin", "lambda a: a * a", "lambda a: a ** 3", "lambda a: a.sigmoid() * a.sum()", "lambda a: a.softmax(-1)",
       "lambda a: a.abs()",
          "lambda a: (a * a).sum(0)", "lambda a: a[..., :1] * a", "lambda a: a.tanh().cumsum(-1)", "lambda a: F.gelu(a)",
          "lambda a: a.exp().log1p()",
          "lambda a: a @ a.mT", "lambda a: a.norm()", "lambda a: F.layer_norm(a, a.shape[-1:])", "lambda a: F.silu(a)",
          "lambda a: a.amax(-1) ** 2",
          "lambda a: a.flip(0) * a.detach()", "lambda a: torch.where(a > 0, a, a * a)", "lambda a: a.var(-1)",
          "lambda a: a.sort(-1).values ** 2",
          "lambda a: F.softplus(a)", "lambda a: torch.atan2(a, a * a + 1)", "lambda a: a.logsumexp(-1)",
          "lambda a: (a * a.flip(-1)).cumprod(-1)",
          "lambda a: a.index_select(0, torch.tensor([0, 0], device=DEVICE)) ** 2", "lambda a: a.abs().sqrt()",
          "lambda a: torch.cat([a, 1 - a], -1).abs().add(0.5).prod(-1)",      # under `Noise` a product is differentiated by another formula
          "lambda a: F.conv1d(a[:, None], a[:1, None, :2]) if a.dim() == 2 else a * a", "lambda a: a.clone().mul_(a)",
          "lambda a: a[1:] / a[:-1]"]


@family("derivatives", 4.0)
def derivative(w):
    if sum("slope" in line or "curvature" in line or "penalty" in line for line in w.lines) > 8:
        raise Refused                                       # each is a graph of hundreds of operators
    x = w.tensor(lambda t: FLOAT(t) and t.numel() <= 600)
    f, g = w.rng.choice(CURVES), w.rng.choice(CURVES)
    return w.rng.choice([f"slope({f}, {x})", f"slope(lambda a: slope({f}, a), {x})".replace("slope(", "slope_of(", 2),
    f"curvature({f}, {x})",
                         f"slope_of({f}, {x}) * {x}", f"curvature({f}, {x} * 2) + slope({g}, {x})", f"slope({f}, slope_of({g}, {x}))",
                         f"pulled({f}, {x})", f"slope(lambda a: ({f})(({g})(a)), {x})", f"penalty({f}, {x})", f"penalty({f}, {x}) * {x}"])


COMPLEX = ["torch.complex64", "torch.complex64", "torch.complex128"]
family("complex", 0.6, "torch.complex({x}.float(), {x}.float().flip(0))", "torch.complex({x}.double(), {x}.double())", "{x} * 1j",
       "{x} + (1 - 2j)",
       "torch.polar({x}.float().abs(), {x}.float())", "{x}.float().to(torch.complex64)", "torch.fft.rfft({x}.float(), dim={d})",
       "torch.fft.fft({x}.float(), dim={d})", "{n} * 1j", "torch.fft.fft2({x}.float())", "{x}.float().exp() * 1j ** 2",
       "torch.view_as_complex({x}.float().unflatten(-1, (-1, 2)).contiguous())")
family("complex", 1.0, "{z} * {c}", "{z} + {z}", "{z} * {z}.conj()", "{z}.conj()", "{z}.real", "{z}.imag", "{z}.abs()", "{z}.angle()",
       "torch.view_as_real({z})", "torch.view_as_real({z}.resolve_conj())", "{z}.conj().imag", "{z}.conj().real * 2", "{z}.mT", "{z}.mH",
       "{z}.sum({d})",
       "{z}.mean()", "{z}.exp().abs()", "{z} / (2 - 1j)", "{z}.sin()", "{z}.cos()", "{z} @ {z}.mH", "{z}.flip(0)", "{z}.reshape(-1)",
       "{z}[..., ::2]",
       "{z} * {y}", "{z} + {y}", "{z} - {y}", "{z} == {y}", "{z}.cumsum({d})", "{z}.square()", "{z}.reciprocal()", "{z}.sqrt()", "{z} ** 2",
       "{z}.to(torch.complex128)", "torch.where({z}.real > 0, {z}, {z}.conj())", "{z}.sgn()", "{z}.prod({d})", "{z}.norm()",
       "{z}.abs().sum({d})",
       "torch.fft.ifft({z}, dim={d})", "torch.fft.irfft({z}, dim={d})", "torch.stack([{z}, {z}.conj()])", "torch.cat([{z}, {z}], {d})",
       "{z}.isnan()",
       "{z}.conj().physical_conj() if False else {z}.conj().clone()", "{z}.conj().resolve_conj()", "{z}.is_conj() + {z}", "{z}.tanh()",
       "{z}.detach()",
       "{z}.gather(0, torch.zeros_like({z}, dtype=torch.long))", "{z}.index_select(0, torch.tensor([0, 0], device=DEVICE))",
       "{z}.diagonal().sum()",
       "{z}.conj() * {z}.imag", "{z}.masked_fill({z}.real > 0, 2j)", "torch.complex({z}.imag, {z}.real)",
       "torch.einsum('...i,...i->...', {z}, {z}.conj())",
       "{z}.cumprod({d})", "-{z}", "{z}.conj().neg().imag", "{z}.imag.neg() * 2", "{z}.pow(1.5)", "torch.nn.functional.pad({z}, (1, 1))",
       "{z}.unsqueeze(0)",
       "slope(lambda a: (a * {z}).abs(), {z}.abs())", "torch.tril({z})", "{z}.expand(2, *{z}.shape).sum(0)", "{z}.isfinite()",
       "{z}.conj().mT.contiguous()")
family("complex", 0.6, "{z}.mul_({c})", "{z}.add_(1j)", "{z}.real.add_(1)", "{z}.imag.mul_(2)", "{z}[0] = 2j", "{z}.conj().mul_(1j)",
       "{z}.conj_physical_()",
       "torch.view_as_real({z})[..., 0].mul_(0.5)", "{z}.copy_({z}.conj())", "{z} *= {z}.conj()", "{z}.zero_()", "{z}.imag.zero_()",
       "{z}.neg_()",
       "{z}.conj().imag.add_(1)", "{z}.conj()[..., 0].zero_()", "{z}.mH.copy_({z}.T)", "{z}.imag = {z}.real", "{z}.real = {c}", write=True)


# ---- searching, distances and the rest of linear algebra

@family("searches", 3.0)
def search(w):
    x = w.tensor(lambda t: FLOAT(t) and t.dim() > 0 and not t.is_complex())
    a, right, small = w.partner(x), w.rng.random() < 0.5, w.rng.random() < 0.3
    d, t = w.dim(x), w.env[x]
    options = f"right={right}, out_int32={small}"
    bounds = w.rng.choice(["[-0.5, 0.05, 1.0]", "[0.0, 0.0, 1.0]", "[]", "[0.0]", "[-1.0, float('inf')]"])
    bounds = f"torch.tensor({bounds}, device=DEVICE)"
    k = w.rng.randint(1, max(1, w.size(x, d)))
    return w.rng.choice([
        f"torch.bucketize({x}, {bounds}.to({t.dtype}), {options})", f"torch.bucketize({a}, {bounds}, {options})",
        f"torch.searchsorted({x}.sort(-1).values, {x}, {options})", f"torch.searchsorted({x}.sort(-1).values, {x}[..., :1], {options})",
        f"torch.searchsorted({bounds}, {x}.float(), side='{w.rng.choice(['left', 'right'])}')",
        f"torch.searchsorted({bounds}, 0.05, {options})",
        f"torch.searchsorted({x}.argsort(-1).sort(-1).values, torch.ones_like({x}, dtype=torch.long), {options})",
        f"torch.searchsorted({x}.float(), {x}.float(), sorter={x}.float().argsort(-1, stable=True))",
        f"{x}.topk({k}, {d}, largest={right}).values", f"{x}.topk({k}, {d}).indices.sort({d}).values", f"{x}.kthvalue({k}, {d}).values",
        f"{x}.mode({d}).values", f"{x}.msort()", f"{x}.nanmedian({d}).values", f"{x}.quantile(0.3, {d})",
        f"{x}.float().nanquantile(0.5, {d})",
        f"{x}.float().quantile(torch.tensor([0.1, 0.9], device=DEVICE), {d}, "
        f"interpolation='{w.rng.choice(['linear', 'lower', 'nearest'])}')",
        f"torch.isin({a}, {a}.flatten()[:2])", f"{x}.float().histc(4, -1, 1)", f"({a} > 0).long().flatten().bincount(minlength=3)",
        f"{x}.cummax({d}).indices",
        f"torch.isin({x}, 0.5)", f"{x}.sort({d}, descending=True, stable=True).indices",
        f"{x}.argsort({d}, stable=True).argsort({d}, stable=True)",
        f"{x}.cummin({d}).values", f"torch.diff({x}, n=2, dim={d})", f"torch.diff({x}, dim={d}, prepend={x}.narrow({d}, 0, 1))"])


@family("distances", 3.0)
def distance(w):
    x = w.tensor(lambda t: FLOAT(t) and 0 < t.dim() < 5)
    d, t, p = w.dim(x), w.env[x], w.rng.choice([0.0, 1.0, 2.0, 3.0, "float('inf')"])
    f = x + w.rng.choice(["", ".flip(0)", ".roll(1, -1)", " * 2", "[..., :2, :]", ".detach()"])
    mode = w.rng.choice(["", ", compute_mode='donot_use_mm_for_euclid_dist'"])
    small = f"{x}.flatten()[:6]"
    return w.rng.choice([
        f"torch.cdist({x}, {f}, {p}{mode})", f"torch.cdist({x}.float(), ({f}).float(), {p})", f"F.pdist({x}.float(), {p})",
        f"{x}.logcumsumexp({d})",
        f"(q := {x}.float()).logcumsumexp({d}) - q", f"torch.cross({x}, {x}.flip({d}), dim={d})",
        f"torch.linalg.cross({x}, {x}[:1] * 2, dim={d})",
        f"torch.kron({small} * 2, {small}[:3] * 2)", f"torch.kron({x}.flatten()[:4].view(-1, 1) * 2, {small}[:3] * 2)",
        f"{x}.renorm({w.rng.choice([1, 2, 0.5])}, {d}, 0.7)",
        f"torch.vander({small}.clamp(-1.5, 1.5), 4)", f"torch.trapezoid({x}, dim={d})", f"torch.cumulative_trapezoid({x}, dim={d})",
        f"torch.linalg.norm({x}, {w.rng.choice(['1', '-1', '2.5', chr(39) + 'fro' + chr(39), '3'])}, "
        f"dim={d if w.rng.random() < 0.5 else (-2, -1)})",
        f"torch.block_diag({small}[:2], {small})", f"torch.cov({x}.flatten(1).float())", f"torch.corrcoef({x}.flatten(1)[:4].float())",
        f"torch.inner({x}, {x})", f"torch.vdot({small}, {small})", f"torch.dot({small}, {small}.flip(0))", f"torch.mv({x}, {x}[0])",
        f"torch.addr({x}[:1, :1].mean(), {small}, {small})", f"torch.addmv({x}[:, 0], {x}, {x}[0], beta=0.5)",
        f"torch.chain_matmul({x}, {x}.mT, {x})",
        f"torch.einsum('ij,ij->i', {x}, {x})", f"torch.einsum('ij->ji', {x})", f"torch.einsum('ii->i', {x})",
        f"torch.einsum('...ij->...', {x})",
        f"torch.matrix_power(({x}.float() @ {x}.float().mT) * 0.1, 2)", f"torch.linalg.multi_dot([{x}, {x}.mT, {x}]) * 0.1",
        f"torch.tensordot({x}, {x}, {x}.dim())", f"torch.bilinear({x}, {x}, torch.ones(2, {w.size(x, -1)}, {w.size(x, -1)}, device=DEVICE)"
        f".to({t.dtype}), None)", f"torch.cumprod({x}.clamp(-1.2, 1.2), {d})",
        f"torch.logdet(({x}.float() @ {x}.float().mT) + 3 * torch.eye("
        f"{w.size(x, -2) if t.dim() > 1 else 1}, device=DEVICE))", f"F.cosine_similarity({x}, {f}, dim={d})",
        f"F.normalize({x}, p={p}, dim={d})",
        f"torch.addbmm({x}[0, :, :1], {x}, {x}.mT, beta=0.5, alpha=0.1)", f"{x}.heaviside({x} * 0)",
        f"torch.combinations({small}, 2, True)",
        f"F.local_response_norm({x}, 2)", f"torch.linalg.vecdot({x}, {f}, dim={d})", f"torch.logaddexp2({x}, {f})"])


# ---- sizes, and numbers made of them: {a} whole, {f} any

WHOLE = "{a} + {a}|{a} - {a}|{a} * {a}|{a} // {a}|{a} % {a}|-{a}|abs({a})|min({a}, {a})|max({a}, {a})|int({f})|round({f})|math.ceil({f})|" \
        "math.floor({f})|{a} ** 2|{a} if {a} > {f} else {a}|divmod({a}, {a})[1]|{a} >> 1|{a} & 3|int({a} == {a})|math.isqrt(abs({a}))|" \
        "len(range({a}, {a}))|math.prod([{a}, {a}])|sorted([{a}, {a}, {a}])[1]".split("|")
ANY = "{a} / {a}|{f} + {a}|{f} * {a}|{a} / {f}|{f} - {f}|{f} // {a}|{f} % {a}|abs({a}) ** 0.5|(abs({a}) + 1) ** -0.5|float({a})|" \
      "min({f}, {a})|math.sqrt(abs({f}))|math.log(abs({a}) + 1)|math.exp(-abs({f}))|round({f}, 2)|2.0 ** ({a} % 5)|1 / {a}".split("|")


def with_numbers(w, x: str, form: str, depth: int) -> str:
    """`form` with an expression of the sizes of x in the place of each {a} and {f}."""
    def number(place):
        if depth == 0 or w.rng.random() < 0.3:
            whole = [f"{x}.shape[{w.rng.randrange(w.env[x].dim())}]", f"{x}.numel()", f"len({x})", str(w.rng.randint(-3, 9))]
            return w.rng.choice(whole if place[1] == "a" else [*whole, "0.3", "-1.5"])
        return "(" + with_numbers(w, x, w.rng.choice(WHOLE if place[1] == "a" else ANY), depth - 1) + ")"
    return re.sub(r"\{([af])\}", number, form)


@family("sizes", 4.0)
def numbers_of_sizes(w):
    x = w.tensor(lambda t: FLOAT(t) and t.dim() > 0 and t.numel() > 0)
    d = w.rng.randrange(w.env[x].dim())
    return with_numbers(w, x, w.rng.choice([
        f"{x} * {{f}}", f"{x} + {{a}}", f"{x} / {{f}}", f"{{f}} - {x}", f"{{f}} / ({x}.abs() + 1)", f"{x} // {{a}}", f"{x} % {{f}}",
        f"torch.where({x} > {{f}}, {x}, {{a}})", f"{x}.clamp(max={{f}})", f"{x} ** (abs({{a}}) % 4)", f"{x}.roll({{a}}, {d})",
        f"{x}[:{{a}} % 4]", f"{x}[{{a}} % 3:]", f"{x}.narrow({d}, 0, abs({{a}}) % {x}.shape[{d}] + 1)", f"F.pad({x}, (abs({{a}}) % 3, 1))",
        f"{x}.flatten()[::abs({{a}}) % 3 + 1]", f"{x}.expand(abs({{a}}) % 3 + 1, *{x}.shape)",
        f"{x}.repeat_interleave(abs({{a}}) % 3, {d})", f"{x}.new_full((2, abs({{a}}) % 3), {{f}})",
        "torch.arange(abs({a}) % 9, device=DEVICE) * {f}",
        f"{x}.unfold({d}, abs({{a}}) % {x}.shape[{d}] + 1, 1)", f"{x}.chunk(abs({{a}}) % 3 + 1, {d})[0]", f"{x}.index_select({d}, "
        f"torch.arange(abs({{a}}) % {x}.shape[{d}], device=DEVICE))", f"torch.addcmul({x}, {x}, {x}, value={{f}})"]), 3)
