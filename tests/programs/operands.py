"""Further families for random tensor programs: not other operators, but other operands. Numbers and tensors of many dtypes, results that
are written to tensors that do not fit, many dimensions and empty ones, and what eager refuses."""
from __future__ import annotations

import re

from .tensors import family

SCALARS = ["2", "-1.5", "True", "2.5", "0", "-1", "1e300", "300", "128", "-0.0", "2**40", "1e-50", "float('nan')", "float('-inf')", "1j",
           "2",
           "0.1", "7", "torch.tensor(2)", "torch.tensor(1.5, dtype=torch.float64)", "torch.tensor(True)",
           "torch.tensor(-3, dtype=torch.int8)",
           "torch.tensor(0.3, dtype=torch.float16)", "torch.tensor(0.7)", "torch.tensor([3], device=DEVICE)"]
DTYPES = ["torch.float32", "torch.float64", "torch.bfloat16", "torch.float16", "torch.int64", "torch.int32", "torch.int16", "torch.int8",
          "torch.uint8", "torch.bool"]


def scalars(form: str):
    """`form` with numbers for {s} and {u}, and a dtype for {t}."""
    def write(w):
        text = w.fill(form.replace("{s}", "<s>").replace("{u}", "<u>").replace("{t}", "<t>"))
        for name, table in (("<s>", SCALARS), ("<u>", SCALARS), ("<t>", DTYPES)):
            text = text.replace(name, w.rng.choice(table))
        return text
    return write


def operands(name: str, weight: float, *forms: str, write: bool = False) -> None:
    for form in forms:
        family(name, weight, write=write)(scalars(form))


# ---- numbers and dtypes

operands("promotions", 0.5, "{a} + {s}", "{a} * {s}", "{s} - {a}", "{a} / {s}", "{a} // {s}", "{a} % {s}", "{a} ** {s}", "{s} ** {a}",
         "{s} // {a}", "{s} % {a}", "{s} / {a}", "{a} > {s}", "{a} == {s}", "{s} <= {a}", "torch.where({m}, {a}, {s})",
         "torch.where({m}, {s}, {a})", "torch.where({b}, {s}, {u})", "torch.where({a} > 0, {a}, {y})", "torch.clamp({a}, {s}, {u})",
         "torch.clamp({a}, min={s})", "torch.clamp({a}, max={s})", "torch.clamp({a}, {y}, {y})", "{a}.clamp({y}, None)",
         "{a}.clamp_min({s})",
         "{a}.clamp(torch.as_tensor({s}, device=DEVICE))", "torch.maximum({a}, {y})", "torch.minimum({a}, {y})", "torch.fmax({a}, {y})",
         "{a}.masked_fill({m}, {s})", "torch.full({a}.shape, {s}, device=DEVICE)", "torch.full({a}.shape, {s}, dtype={t}, device=DEVICE)",
         "torch.full_like({a}, {s})", "torch.full_like({a}, {s}, dtype={t})", "{a}.new_full((2,), {s})", "torch.lerp({a}, {y}, {s})",
         "torch.lerp({x}, {f}, {f})", "torch.addcmul({a}, {y}, {y}, value={s})", "torch.addcdiv({a}, {y}, {y}, value={s})",
         "torch.addcmul({a}, {a}, torch.as_tensor({s}, device=DEVICE))", "torch.add({a}, {y}, alpha={s})", "torch.sub({a}, {y}, alpha={s})",
         "torch.rsub({a}, {s})", "torch.rsub({a}, {y}, alpha={s})", "torch.fmod({a}, {s})", "torch.remainder({s}, {a})",
         "torch.xlogy({s}, {a})", "torch.xlogy({a}, {y})", "{a} & {s}", "{a} ^ {y}", "{n} << {s}", "{n} >> {s}",
         "torch.nan_to_num({a}, {s})",
         "torch.hypot({a}, {y})", "torch.atan2({a}, {y})", "torch.copysign({a}, {s})", "torch.heaviside({a}, {y})", "{a}.float_power({s})",
         "torch.float_power({s}, {a})", "torch.ldexp({a}, {y})", "{a} * {b}", "{b} * {s}", "{b} + {y}", "{a} - {s}", "{b} - 1", "{b} * {m}",
         "{a}.to({t})", "{a}.to({t}) * {y}", "{a}.to({t}) + {s}", "{n}.to({t}) / {y}", "{b}.to({t}) - {y}", "{a}.type_as({y})",
         "torch.arange({s}, {u}, device=DEVICE)", "torch.arange(0, 6, int({s}) or 1, dtype={t}, device=DEVICE)", "torch.tensor([{s}, {u}])",
         "torch.linspace({s}, {u}, 4, device=DEVICE)", "torch.tensor([{s}, 1], dtype={t}, device=DEVICE)", "torch.stack([{a}, {y}])",
         "torch.cat([{a}.reshape(-1), {y}.reshape(-1)])", "torch.cat([{b}.reshape(-1), {y}.reshape(-1)])", "{n}.sqrt()", "{n}.sin()",
         "{b}.exp()", "{n}.sigmoid()", "{n}.exp2()", "{n}.reciprocal()", "{b}.tanh()", "{n}.rsqrt()", "{n}.softmax({d}, dtype={t})",
         "{x}.softmax({d}, dtype={t})", "{a}.log_softmax({d}, torch.float64)", "{a}.sum({d}, dtype={t})", "{a}.prod({d}, dtype={t})",
         "{a}.cumsum({d}, dtype={t})", "{a}.cumprod({d}, dtype={t})", "{a}.mean({d}, dtype={t})", "{a}.nansum({d}, dtype={t})",
         "{a}.norm(2, {d}, dtype={t})", "torch.isclose({a}, {y})", "torch.logical_or({a}, {y})", "{a}.bool() | {y}.bool()",
         "F.relu({n})", "F.hardtanh({n})", "F.leaky_relu({x}, {s})", "F.elu({x}, {s})", "F.threshold({a}, {s}, {u})",
         "F.softplus({x}, {s})",
         "F.celu({x}, 0.3)", "F.hardshrink({x}, 0.2)", "F.softshrink({x}, 0.2)",
         "F.prelu({x}, torch.tensor([0.2], device=DEVICE).to({x}.dtype))",
         "torch.sgn({a})", "torch.sign({b})", "torch.neg({n})", "torch.square({a})", "torch.abs({n})", "{n}.trunc()", "{n}.round()",
         "{x}.round(decimals=1)", "{x}.round(decimals=-1)", "torch.mul({a}, {s})", "torch.true_divide({a}, {s})", "{a}.equal({a}) + {a}",
         "torch.div({a}, {s}, rounding_mode='floor')", "torch.div({a}, {s}, rounding_mode='trunc')", "{n} * 1.5 + {i}", "{a}.sum() * {y}",
         "{a}.mean(dtype=torch.float64) + {y}", "torch.result_type({a}, {y}).itemsize + {a}",
         "torch.promote_types({a}.dtype, {t}).itemsize * {a}",
         "torch.bitwise_and({n}, {i})", "torch.special.xlog1py({a}, {y}.abs())", "torch.special.entr({x})", "torch.special.i0({x})",
         "torch.special.erfcx({x})", "torch.special.ndtr({x})", "torch.special.log_ndtr({x})", "torch.special.zeta({x}.abs() + 1.5, 2.0)",
         "torch.digamma({x}.abs() + 0.3)", "torch.lgamma({x}.abs() + 0.3)", "torch.polygamma(1, {x}.abs() + 0.3)",
         "torch.mvlgamma({x}.abs() + 3, 2)",
         "torch.sinc({n})", "torch.erfinv({x}.clamp(-0.9, 0.9))", "torch.logit({n}, 0.1)", "torch.deg2rad({a})", "torch.rad2deg({n})",
         "torch.frac({x})", "torch.isposinf({a})", "torch.isneginf({x})", "torch.isreal({a})", "torch.signbit({a})", "torch.positive({n})")
operands("promotions", 0.5, "{a}.add_({s})", "{a}.mul_({s})", "{a} += {y}", "{a} -= {s}", "{a} *= {y}", "{a} /= {s}", "{a} //= {s}",
         "{a} %= {s}", "{a} **= {s}", "{a}.copy_({y})", "{a}.div_({s}, rounding_mode='trunc')", "{a}.masked_fill_({m}, {s})",
         "{a}.fill_({s})", "{a}[...] = {s}", "{a}[:1] = {s}", "{a}[..., 0] = {y}[..., 0]", "{a}.clamp_({s}, {u})", "{a}.clamp_(min={y})",
         "{a}.pow_({s})", "{a}.addcmul_({y}, {y}, value={s})", "{a}.lerp_({y}, {s})", "{a}.eq_({y})", "{a}.gt_({s})",
         "{a}.logical_and_({y})",
         "{a}.remainder_({s})", "{a}.fmod_({s})", "{a}.floor_divide_({s})", "{a}.sub_({y}, alpha={s})", "{n}.bitwise_or_({i})",
         "{a}.copysign_({s})", "{a}.index_fill_(0, torch.tensor([0], device=DEVICE), {s})", "{a}.xlogy_({s})", "{x}.hypot_({f})",
         "{a}.scatter_(0, torch.zeros_like({a}, dtype=torch.long)[:1], {s})", "{a}[{a} > 0] = {s}", "{n}.sigmoid_()", "{n}.add_({b})",
         "{a}.nan_to_num_({s})", "{a}.ne_({s})", "{n} <<= {s}", "{b} |= {y}", "{b} &= {s}", "{a}.square_()", "{a}.cumsum_({d}, dtype={t})",
         "{x}.round_(decimals=1)", "{a}.addcdiv_({y}, {y}, value={s})", "{a}.heaviside_({y})", "{x}.copy_({n})", "{n}.copy_({x})",
         "{a}.fill_(torch.tensor({s}))", "{a}.index_put_((torch.tensor([0], device=DEVICE),), torch.tensor({s}).to({a}.dtype))", write=True)


# ---- results written to given tensors

CALLS = [("torch.mul", "{a}, {c}"), ("torch.add", "{a}, {y}"), ("torch.sin", "{a}"), ("torch.exp", "{a}.clamp(-3, 3)"), ("torch.neg",
         "{a}"),
         ("torch.sum", "{a}, {d}"), ("torch.mean", "{x}, {d}"), ("torch.cumsum", "{a}, {d}"), ("torch.amax", "{a}, {d}"),
         ("torch.matmul", "{x}, {x}.mT"), ("torch.cat", "[{a}, {a}]"), ("torch.stack", "[{a}, {a}]"), ("torch.gt", "{a}, {y}"),
         ("torch.where", "{m}, {a}, {y}"), ("torch.clamp", "{a}, 0, 1"), ("torch.argmax", "{a}, {d}"), ("torch.var", "{x}, {d}"),
         ("torch.index_select", "{a}, 0, torch.tensor([0, 0], device=DEVICE)"), ("torch.addmm", "{x}, {x}, {x}.mT"), ("torch.norm",
         "{x}, 2, {d}"),
         ("torch.logical_and", "{a}, {y}"), ("torch.diag", "{a}"), ("torch.prod", "{a}, {d}"), ("torch.eye", "3"),
         ("torch.softmax", "{x}.detach(), {d}"), ("torch.take", "{a}, torch.tensor([0, -1], device=DEVICE)"), ("torch.pow", "{a}, 2"),
         ("torch.arange", "5"),
         ("torch.pow", "2.0, {a}.clamp(-3, 3)"), ("torch.cumprod", "{a}.clamp(-1, 1), {d}"), ("torch.logsumexp", "{x}, {d}"),
         ("torch.zeros", "2, 3"),
         ("torch.full", "(2, 3), {c}"), ("torch.linspace", "0, 1, 5"), ("torch.true_divide", "{a}, 3"), ("torch.floor_divide", "{a}, 2"),
         ("torch.bitwise_not", "{n}"), ("torch.all", "{a}, {d}"), ("torch.any", "{a}, {d}"), ("torch.square", "{a}"), ("torch.abs", "{a}"),
         ("torch.gather", "{a}, 0, torch.zeros_like({a}, dtype=torch.long)"), ("torch.std", "{x}, {d}"), ("torch.sub", "{a}, {y}, alpha=2"),
         ("torch.lerp", "{x}, {x}, 0.5"), ("torch.addcmul", "{x}, {x}, {x}"), ("torch.nan_to_num", "{a}"), ("torch.sigmoid", "{a}"),
         ("torch.ones", "4"),
         ("torch.outer", "{x}.flatten()[:5], {x}.flatten()[:3]"), ("torch.bmm", "{x}, {x}.mT"), ("torch.dot",
         "{x}.flatten(), {x}.flatten()"),
         ("torch.mv", "{x}, {x}[0]"), ("torch.nansum", "{x}, {d}"), ("torch.median", "{x}"), ("torch.fmod", "{a}, 2"), ("torch.isin",
         "{a}, {a}[:1]"),
         ("torch.baddbmm", "{x}[..., :1], {x}, {x}.mT"), ("torch.scatter", "{a}, 0, torch.zeros_like({a}, dtype=torch.long)[:1], 2")]
PAIRS = [("torch.sort", "{a}, {d}"), ("torch.max", "{a}, {d}"), ("torch.topk", "{a}, 1, {d}"), ("torch.kthvalue", "{a}, 1, {d}"),
         ("torch.min", "{a}, {d}"), ("torch.cummax", "{a}, {d}"), ("torch.median", "{a}, {d}"), ("torch.mode", "{a}, {d}")]
PLACES = ["torch.empty(0, device=DEVICE)", "torch.empty(0, dtype={t}, device=DEVICE)", "torch.empty_like({r})",
          "torch.empty_like({r}, dtype={t})",
          "torch.zeros(7, device=DEVICE)", "torch.zeros(7, device=DEVICE).to({r}.dtype)",
          "torch.zeros(3, *{r}.shape, dtype={r}.dtype, device=DEVICE)[1]",
          "torch.empty({r}.shape[::-1], dtype={r}.dtype, device=DEVICE).T",
          "torch.zeros(1, dtype={r}.dtype, device=DEVICE).expand({r}.shape)",
          "torch.zeros(*{r}.shape, 2, dtype={r}.dtype, device=DEVICE)[..., 0]", "torch.empty(0, dtype={r}.dtype, device=DEVICE)",
          "torch.zeros({r}.numel(), dtype={r}.dtype, device=DEVICE)", "torch.zeros({r}.shape[1:], dtype={r}.dtype, device=DEVICE)"]


@family("outs", 6.0)
def out(w):
    name, args = w.rng.choice(CALLS)
    args = w.fill(args)
    if w.rng.random() < 0.85:                               # autograd refuses
        args = re.sub(r"(?<![\w.])([a-e]|v\d+)\b", r"\1.detach()", args)
    place = w.rng.choice(PLACES).replace("{r}", "r").replace("{t}", w.rng.choice(DTYPES))
    change = w.rng.choice(["o", "o", "o * 2", "(o.add_(1), o)[1]", "(o, o.sum())[1]", "o.view(-1)", "(o.shape[0], o * 3)[1]"])
    return f"(r := {name}({args}), o := {place}, {name}({args}, out=o), {change})[-1]"


@family("outs", 2.0)
def outs(w):
    name, args = w.rng.choice(PAIRS)
    args = w.fill(args)
    place = w.rng.choice(PLACES).replace("{r}", "r").replace("{t}", w.rng.choice(DTYPES))
    x = args.split(",")[0]
    args = args.replace(x, f"{x}.detach()", 1)
    other = w.rng.choice(["torch.empty(0, dtype=torch.long, device=DEVICE)", "torch.empty_like(r, dtype=torch.long)",
                          "torch.zeros(3, dtype=torch.long, device=DEVICE)"])
    value = w.rng.choice(["o", "o * 2", "i", "i + o"])
    return f"(r := {name}({args})[0], o := {place}, i := {other}, {name}({args}, out=(o, i)), {value})[-1]"


operands("outs", 1.0, "torch.add({a}, {y}, out={a})", "torch.mul({a}, {s}, out={a})", "torch.sub({a}[1:], {a}[:-1], out={a}[1:])",
         "torch.cumsum({a}, {d}, out={a})", "torch.sin({a}, out={a})", "torch.where({m}, {a}, {y}, out={a})",
         "torch.clamp({a}, 0, 1, out={a})",
         "torch.neg({a}, out={y})", "torch.cat([{a}, {a}], out={y})", "torch.abs({a}.T, out={a})", "torch.exp({x}.mT, out={x})",
         "torch.matmul({x}, {x}, out={x})", "torch.gt({a}, 0, out={y})", "torch.sum({a}, {d}, out={y})",
         "torch.copysign({a}, {s}, out={a})",
         write=True)


# ---- many dimensions, and none

BIG = [".unsqueeze(0).unsqueeze(-1)", "[None, :, None]", "[..., None, None]", "[None, None, ..., None]", ".unsqueeze({d})",
       ".expand(2, 1, 2, *[-1] * {k})",
       ".permute(*range({k})[::-1])", ".flip(0, -1)", ".roll((1, -1), (0, -1))", ".roll((1, 2), (0, {d}))", ".roll(3)",
       ".rot90(1, (0, -1))",
       ".rot90(-1, ({d}, 0))", ".rot90(3)", ".movedim((0, 1), (-1, 0))", ".flatten(1, 2)", ".flatten(0, -2)", ".unflatten(-1, (1, -1))",
       ".swapdims(0, -1)",
       ".sum((0, -1))", ".sum(0, keepdim=True)", ".amax((0, -1), keepdim=True)", ".mean((1, -1))", ".diagonal(0, 0, -1)",
       ".diagonal(1, -1, 0)",
       ".unfold(-1, 1, 1)", ".repeat(1, 2, *[1] * {k})", ".tile((2, 1, 1, 1, 1, 1))", ".squeeze((0, -1))", ".squeeze()", ".mT",
       ".cumsum(0)", ".softmax(0)",
       ".tril()", ".std((0, 1))", ".argmax(1)", ".sort(0).values", ".contiguous()", ".transpose(1, -2)", "[:, ..., -1]", "[..., 0, :]",
       "[0, ..., 1:]",
       ".logsumexp((0, 1))", ".norm(dim=(0, -1))", ".any(-1)", ".count_nonzero((0, -1))", ".fliplr()", ".flipud()", " * 2", ".abs()"]


@family("ranks", 8.0)
def big(w):
    x = w.tensor(lambda t: t.numel() <= 600)
    links = "".join(w.rng.choices(BIG, k=w.rng.randint(2, 5)))
    if " * 2" in links:
        links = links.replace(" * 2", "") + " * 2"
    return x + links.replace("{k}", str(w.env[x].dim())).replace("{d}", str(w.dim(x)))


SUMMATIONS = ["ij,jk->ik", "ii", "iij->ij", "...i,i->...", "ij,kj", "ab,cd->abcd", "i,i", "i,j->ij", "ijk,ijl->ikl", "bij,bjk,bkl->bil",
              "i->", "ij->",
              "...->...", "ij,ij,ij->j", "ij->i", "ii->i", "iijj->ij", "ijk->kij", "bhid,bhjd->bhij", "bhij,bhjd->bhid", "i,ij->j",
              "ij,ij->", "aab,b->a",
              "...ij,...jk", "i...,i...->...", "ijkl->lk", "ab,ba->", "xi,yi->xyi", "ij,jk,kl", "iii->i", "ij...->...ji"]


@family("ranks", 3.0)
def summation(w):
    text = w.rng.choice(SUMMATIONS)
    count = text.split("->")[0].count(",") + 1
    x = w.tensor(lambda t: t.dim() > 0 and t.is_floating_point() and t.numel() <= 400)
    others = [x + w.rng.choice(["", "", ".mT", " * 2", ".sin()", ".flip(0)"]) for _ in range(count)]
    return f"torch.einsum('{text}', {', '.join(others)})"


operands("ranks", 0.7, "torch.tensordot({x}, {f}, 0)", "torch.tensordot({x}, {x}.T, 1)", "torch.tensordot({x}, {x}, ([0], [0]))",
         "torch.kron({x} * 2, {x}[:1] * 2)",       # of a write to what it has saved eager does not know
         "torch.kron({a} * 2, {y} * 2)", "torch.block_diag({x}, {x}[:1], {f})", "torch.block_diag({a}, {a}.T)", "torch.atleast_3d({a})",
         "torch.dstack([{a}, {a}])",
         "torch.vstack([{a}, {a}])", "torch.column_stack([{a}, {a}])", "torch.diag({a}, {e})", "torch.diagflat({a})",
         "torch.broadcast_tensors({a}, {y})[0]",
         "torch.meshgrid({a}.flatten()[:3], {a}.flatten()[:2], indexing='ij')[0]",
         "torch.meshgrid({a}.flatten()[:3], {a}.flatten()[:2], indexing='xy')[1]",
         "torch.linalg.diagonal({a})", "torch.repeat_interleave({a}, 2)", "torch.narrow_copy({a}, 0, 0, 1)",
         "torch.linalg.vecdot({x}, {f})",
         "torch.triu_indices(3, 4, {e}, device=DEVICE)", "{a}[:0].sum({ds}{k})", "{a}[:0].sum()", "{x}[:0].mean({d})", "{a}[:0].amax({d})",
         "{a}[:0].prod({d})",
         "{x}[..., :0].cumsum({d})", "{x}[..., :0].softmax({d})", "{a}[..., :0].sort({d}).values", "{x}[:0] @ {x}.mT",
         "{x}[..., :0] @ {x}.mT[..., :0, :]",
         "{x}[:0].norm(2, {d})", "{x}[:0].std({d})", "{x}[..., :0].var({d}{k})", "torch.cat([{a}[:0], {a}])",
         "{x}[..., :0].logsumexp({d})", "{a}[:0].any({d})",
         "{a}[:0].all()", "F.linear({x}, {x}[:0])", "F.linear({x}[..., :0], {x}[..., :0])", "{a}[:0].flip(0)", "{a}[:0].roll(1, 0)",
         "{a}[:0].repeat_interleave(2, 0)",
         "{a}[..., :0].argmax({d})", "{a}[..., :0].count_nonzero({d})", "{a}[:0].reshape(-1)", "{a}[:0].max()", "{x}[:0].median()",
         "{x}[..., :0].norm()",
         "{x}[:0].var_mean()", "F.layer_norm({x}[:0], {x}.shape[-1:])", "F.pad({x}[:0], (1, 1))",
         "{a}[:0].index_select(0, torch.tensor([], dtype=torch.long, device=DEVICE))",
         "{a}[torch.tensor([], dtype=torch.long, device=DEVICE)]", "{a}[..., :0].nansum()", "torch.stack([{a}[:0]])",
         "torch.outer({x}[:0].flatten(), {x}.flatten()[:4])",
         "torch.zeros(3, 0, device=DEVICE) @ torch.zeros(0, 4, device=DEVICE)", "torch.zeros(0, 3, device=DEVICE).amax(1)",
         "{x}[:0].logcumsumexp(0)",
         "torch.zeros(2, 40000, device=DEVICE)[:, ::20000] + 1", "torch.ones(60000, device=DEVICE)[::30000] * {a}.sum()",
         "{a}.expand(2, 2, *{a}.shape)[1].contiguous()",
         "torch.ones(4, 1, 70000, device=DEVICE).as_strided((2, 2), (70000, 35000)) * 3", "{a}.cumsum(-1).cumsum(0)",
         "{x}.cumprod(-1).cumsum(-1)",
         "{n}.cumprod({d})", "{x}.logcumsumexp({d}).exp()", "{b}.cummax({d}).values", "{n}.cummin({d}).indices", "{n}.median({d}).values",
         "{n}.mode({d}).values",
         "{n}.kthvalue(1, {d}).values", "{x}.median({d}{k}).values", "{x}.nanmedian()", "{x}.float().quantile(0.5)",
         "{x}.float().quantile(0.25, {d}{k}, interpolation='midpoint')",
         "{x}.float().quantile(0.7, {d}, interpolation='higher')", "{x}.std({ds}, correction=2)", "{x}.var({d}, correction=0.5)",
         "torch.std_mean({x}, {ds})[1]",
         "{b}.argmax()", "{b}.sort({d}, stable=True).values", "{n}.sort({d}, descending=True, stable=True).indices", "{n}.logsumexp({d})",
         "torch.linalg.vector_norm({x}, 0)",
         "torch.linalg.vector_norm({x}, 0.5, {d})", "torch.linalg.vector_norm({x}, float('-inf'), {ds}{k})",
         "torch.linalg.matrix_norm({x}.float())",
         "torch.linalg.matrix_norm({x}.float(), 1)", "torch.linalg.matrix_norm({x}, float('inf'))",
         "{x}.aminmax(dim={d}{k}).min".replace("{k}", ""), "{n}.aminmax().max",
         "{n}.float().histc(4)", "torch.trapz({x})", "torch.diff({a}, dim={d})", "torch.diff({b})", "F.softmin({x}, {d})",
         "F.normalize({x}, 1.0, {d})",
         "{n}.abs().flatten().bincount()", "{n}.abs().flatten().bincount({n}.flatten() * 0.5, 4)", "{x}.sum((0, -1))",
         "{a}.all({ds})".replace("{ds}", "{d}"),
         "torch.searchsorted({x}.sort(-1).values, {x}[..., :1].contiguous())",
         "torch.bucketize({a}, torch.tensor([0, 1, 2], device=DEVICE))",
         "torch.unravel_index(torch.tensor([0, 1], device=DEVICE), {a}.shape)[0]",
         "torch.take_along_dim({a}, torch.tensor([0], device=DEVICE).view([1] * {a}.dim()))",
         "torch.combinations({a}.flatten()[:4], 3)", "torch.nn.functional.one_hot({n}.abs() % 3)", "torch.cosine_similarity({x}, {f}, 0)",
         "{x}.fmod({f})", "{x}.nanquantile(0.3)",
         "torch.argwhere({a})", "{a}.unique()", "{a}.nonzero()", "torch.unique_consecutive({a})", "{a}[{a} > 0]", "{a}.masked_select({m})",
         "{x}.histc(3, -1, 1)",
         "torch.corrcoef({x}.float())", "torch.cov({x}.float(), correction=0)", "torch.tril_indices(4, 2, {e}, device=DEVICE)",
         "{a}.index_select({d}, torch.tensor(0, device=DEVICE))")


operands("ranks", 0.7, "torch.ops.aten.view_copy({a}.mT, (-1,))", "torch.ops.aten.unfold_copy({a}, {d}, 1, 1)",
         "torch.ops.aten.permute_copy({a}.mT, (-1, -2))",
         "torch.ops.aten.diagonal_copy({a})", "torch.ops.aten._reshape_copy({a}.mT, (-1,))", "torch.mvlgamma({x}.abs() + 2, 2)",
         "torch.ldexp({x}, {i} % 5)", "F.max_pool1d({x}, 1)", "F.max_pool1d({x}.mT, 2)",
         "F.prelu({x}, torch.tensor(0.25, device=DEVICE).to({x}))",
         "torch.addmv(torch.ones((), device=DEVICE).to({x}), {x}, {x}.new_ones(0))", "torch.addmv({x}[..., 0], {x}, {x}[0])",
         "torch.rand_like({x}[..., :1]) * 0", "F.scaled_dot_product_attention({x}, {x}, {x})", "F.unfold({x}, (1, 2), 1, 1, 2)",
         "{a}.split(1, {d})[0].detach()", "{a}.unbind({d})[-1].detach()", "{a}[1:].detach()",
         "torch.tensor([2, torch.tensor(0.5, dtype={a}.dtype)])")
operands("ranks", 0.7, "{x}.split(1, {d})[0].detach().add_({f}.sum())", "{x}[..., :1].detach().mul_({f}.mean())", write=True)


# ---- numbers in tensors on the CPU

operands("hosts", 0.7, "{a} * torch.tensor(2.5)", "torch.tensor(3) - {a}", "{x} ** torch.tensor(2)",
         "torch.tensor(2.0) ** {x}.clamp(-3, 3)",
         "torch.where({m}, torch.tensor(1.5), {x})", "torch.where({m}, {x}, torch.tensor(2, dtype=torch.float64))",
         "torch.tensor(2.0) * torch.tensor(3) + {a}", "{x}.mean().cpu() * {x}", "{x}.sum().cpu().sin().to(DEVICE) + {y}",
         "{x}.sum().cpu() + torch.tensor(1.0)", "{a}[torch.tensor(0)]", "{a}[torch.tensor([0, 0])]", "{a}[..., torch.tensor([-1])]",
         "torch.stack([torch.tensor(1.0), torch.tensor(2.5)]).to(DEVICE).sum() * {x}", "{x}.clamp(max=torch.tensor(0.5))",
         "torch.lerp({x}, {f}, torch.tensor(0.25).to({x}.dtype))", "torch.addcmul({x}, {f}, torch.tensor(2.0).to({x}.dtype))",
         "torch.maximum({a}, torch.tensor(1))", "{a} > torch.tensor(0.25)", "{n} // torch.tensor(3)", "{n} % torch.tensor(-4)",
         "{n} << torch.tensor(2)", "{a}.masked_fill({m}, torch.tensor(2))", "{a}.eq(torch.tensor(True))",
         "torch.tensor(4.0).sqrt().item() * {a}", "(torch.tensor(7) // 2).item() + {a}", "torch.tensor({c}).to({a}) + {a}",
         "{a}.new_tensor({c}) * {y}", "torch.full((), 2.0) * {a}", "torch.arange(3)[1] * {a}", "torch.ones(2)[0] + {a}",
         "{x}.detach().cpu().sum().item() * {a}", "{a}.cpu().to(DEVICE) * 2", "torch.scalar_tensor(2.0) - {a}",
         "torch.tensor(0.5).expand(2)[0] * {a}", "({x}.amax().cpu() > 0) * {a}", "torch.atan2({x}, torch.tensor(1.5))",
         "torch.sub(torch.tensor(2), {a}, alpha=3)", "torch.add({x}, torch.tensor(1.0), alpha=torch.tensor(2.0).item())")
operands("hosts", 0.7, "{a}.add_(torch.tensor(2))", "{x}.mul_(torch.tensor(0.5))", "{a}[0] = torch.tensor(3)", "{a}.fill_(torch.tensor(2))",
         "{x} -= torch.tensor(1.5, dtype=torch.float64)", "{x}.copy_(torch.tensor(2))", "{x}.copy_({x}.cpu() * 2)",
         "{x} /= torch.tensor(4)",
         "{x}.masked_fill_({m}, torch.tensor(0.5))", "{x}[{m}] = torch.tensor(0.25)", "{x}.clamp_(max=torch.tensor(1.0))",
         "{a}.index_put_((torch.tensor([0]),), torch.tensor(2).to({a}))", "{x}.addcmul_({f}, torch.tensor(0.5).to({x}.dtype))",
         "{x}.lerp_({f}, torch.tensor(0.5).to({x}.dtype))", write=True)


# ---- what is set for a while, or for all

INSIDE = ["lambda a: torch.ones(3, device=DEVICE) * a.sum()", "lambda a: torch.tensor(1.5, device=DEVICE) + a", "lambda a: a / 2",
          "lambda a: torch.arange(3, device=DEVICE) / 2 + a.sum()", "lambda a: torch.full((2,), 0.5, device=DEVICE) * a.sum()",
          "lambda a: torch.linspace(0, 1, 3, device=DEVICE)", "lambda a: a.long().sqrt()", "lambda a: (a > 0) * 0.5",
          "lambda a: a.long() * 1.5",
          "lambda a: torch.zeros(2, device=DEVICE).add_(a.sum().nan_to_num())", "lambda a: torch.tensor(a.sum().item(), device=DEVICE)",
          "lambda a: a.to(torch.get_default_dtype())", "lambda a: torch.eye(2, device=DEVICE) @ torch.ones(2, 2, device=DEVICE)",
          "lambda a: torch.where(a > 0, 0.5, 2)", "lambda a: a.bool().float().mean()", "lambda a: torch.scalar_tensor(2) * a",
          "lambda a: torch.finfo(torch.get_default_dtype()).bits + a", "lambda a: (a > 0).softmax(-1, dtype=torch.get_default_dtype())",
          "lambda a: torch.arange(0, 1, 0.25, device=DEVICE)", "lambda a: torch.view_as_real(torch.tensor(1j, device=DEVICE)) * a.sum()",
          "lambda a: (a.long() * 1j).real", "lambda a: torch.complex(*torch.ones(2, 3, device=DEVICE)).imag"]
SAME = ["lambda a: torch.empty(3, device=DEVICE).isnan()", "lambda a: torch.empty_like(a).nan_to_num(1.0, 1.0, 1.0) * a",
        "lambda a: a.detach().clone().resize_(2, 2)",
        "lambda a: a.index_add(0, torch.tensor([0, 0], device=DEVICE), a[:1].expand(2, *a.shape[1:]))",
        "lambda a: a.clone().index_put_((torch.tensor([0, 0], device=DEVICE),), a[:1] * 2, accumulate=True)", "lambda a: a.cumsum(0)",
        "lambda a: a.scatter_add(0, torch.zeros_like(a, dtype=torch.long), a)",
        "lambda a: a.clone().put_(torch.tensor([0], device=DEVICE), a.reshape(-1)[:1])",
        "lambda a: a.gather(0, torch.zeros_like(a, dtype=torch.long))", "lambda a: a.median()", "lambda a: a.new_empty(2, 3).isnan()",
        "lambda a: a.flatten().long().clamp(0, 99).bincount()", "lambda a: torch.are_deterministic_algorithms_enabled() + a",
        "lambda a: a.index_copy(0, torch.tensor([0], device=DEVICE), a[:1] * 3)", "lambda a: a.repeat_interleave(2, 0)",
        "lambda a: F.embedding(torch.tensor([0, 0], device=DEVICE), a)",
        "lambda a: torch.empty_strided((2, 2), (1, 2), device=DEVICE).isnan()",
        "lambda a: a.scatter_reduce(0, torch.zeros_like(a, dtype=torch.long), a, 'amax')", "lambda a: a.new_empty(2, dtype=torch.long) * 0"]


@family("settings", 6.0)
def set_for_a_while(w):
    x = w.tensor(lambda t: t.is_floating_point() and t.numel() > 0)
    if w.rng.random() < 0.5:
        dtype = w.rng.choice(["torch.float64", "torch.bfloat16", "torch.float16", "torch.float32"])
        return f"default({dtype}, {w.rng.choice(INSIDE)}, {x})"
    return f"deterministic({w.rng.choice(SAME)}, {x}, warn_only={w.rng.random() < 0.5})"


operands("settings", 0.5, "torch.get_default_dtype().itemsize + {x}", "torch.are_deterministic_algorithms_enabled() + {a}",
         "torch.get_num_threads() * {a}", "torch.is_grad_enabled() + {a}", "torch.ones(3, device=DEVICE) * {a}.sum()", "{n} / 2",
         "{n} * 0.5",
         "torch.tensor(0.5, device=DEVICE) * {n}", "{b} * 0.5", "torch.arange(3.0, device=DEVICE) * {a}.sum()", "{n}.sin()", "{n} ** 0.5",
         "torch.full((2,), 0.25, device=DEVICE)", "torch.empty(0, device=DEVICE).sum() + {a}", "{x}.float() * 1e-39",
         "({x}.float() * 1e-30) * 1e-10",
         "{x}.float() * 1e-39 * 1e38 * 1e3", "({x}.float() * 1e-40).abs() > 0", "({x}.float() * 1e-42).sum() * 1e40",
         "torch.get_float32_matmul_precision() == 'highest'"
         " and {x}", "{x}.double() * 1e-310 * 1e305 * 1e5", "torch.tensor(1e-40, dtype=torch.float32, device=DEVICE) * 1e38 * {x}",
         "{n}.abs().sqrt().cumsum(0)",
         "torch.backends.mkldnn.is_available() + {a}", "F.one_hot({n}.abs() % 3, 3) * 0.5",
         "torch.finfo(torch.get_default_dtype()).eps * {x}",
         "{x}.nan_to_num().tolist() and torch.tensor({x}.detach().nan_to_num().flatten().tolist(), device=DEVICE)")
operands("settings", 0.5, "torch.set_default_dtype(torch.get_default_dtype())", "{x}.resize_({x}.shape)", "{n}.fill_(2.5)",
         "{x}.mul_(1e-39)", write=True)

# ---- memory exchanged, and bits that stand for a sign

operands("memory", 0.7, "{a}.data = {y}.data", "{x}.data = {f}.data.to({x}.dtype)", "{a}.set_({y})", "{a}.set_({y}.detach()[..., :1])",
         "{x}.data = {x}.data.double()", "{a}.data = {a}.data.T", "{a}.data = {a}.data.contiguous()", "{a}.data = {a}.data.clone().mul_(2)",
         "{x}.data, {f}.data = {f}.data, {x}.data", "{x}[0].data = {x}.data[-1]", "{a}.data.resize_(2, 3)",
         "{a}.data.set_({a}.data.flip(0))",
         "{a}.untyped_storage().copy_({a}.clone().contiguous().untyped_storage())", "{x}.detach().set_({x}.detach() * 2)",
         "with torch.no_grad(): {x}.set_({x} * 2)", "with torch.no_grad(): {x}.resize_(({x}.numel() + 1) // 2)",
         "{a}.resize_(*{a}.shape[::-1])", "{x}.data.copy_({f})", "{x}.data[..., :1] *= 2", "{x}.data.add_({x}.data.mean())",
         "{a}.t_().data = {a}.t()",
         "torch.mul({x}, 2, out={x}.data)", "torch.sin({x}.detach(), out={x}.data)", "{a}.swapaxes_(0, -1)", write=True)
operands("memory", 0.7, "torch._neg_view({x})", "torch._neg_view({x}).mT", "torch._neg_view({x}) * {y}",
         "torch._neg_view({x}).resolve_neg()",
         "torch._neg_view({a}).is_neg() + {a}", "torch._neg_view({x})[..., 1:]", "torch._neg_view({x} * 2).sum({d})",
         "torch._neg_view({x}).clone()", "(s := {x}.clone(), s.data).__getitem__(1) * 2",
         "torch.complex({x}.float(), {x}.float()).conj().imag",
         "torch.complex({x}.float(), {x}.float()).conj().imag.cumsum({d})", "torch.complex({x}.float(), {x}.float()).conj().imag[..., 1:]",
         "(s := torch.complex({x}.float(), {x}.float()).conj(), s.imag.mul_(2), s.real + s.imag)[-1]",
         "(s := {x} * 1, torch._neg_view(s).add_(1), s)[-1]", "(s := {x} * 1, torch._neg_view(s)[..., :1].copy_({x}[..., :1]), s)[-1]",
         "torch.cat([torch._neg_view({x}), {x}])", "torch.empty_like(torch._neg_view({x})).is_neg() + {x}")
operands("memory", 0.7, "torch._neg_view({x}).add_(1)", "torch._neg_view({x}).mul_({f})", "{x}.copy_(torch._neg_view({f}))",
         "torch._neg_view({x})[..., 0] = 2", "torch.sin({x}.detach(), out=torch._neg_view({x}))", write=True)


# ---- what eager refuses

operands("refusals", 0.5, "{a}.view(7, 11)", "{a}.expand(5, 7)", "{a}.reshape(-1, 13)", "{x} @ {y}", "{a}.squeeze(9)",
         "{a}.transpose(0, 8)", "{a}.permute(0, 0)",
         "{a}.sum(11)", "{n}.mean()", "{b} - {m}", "-{b}", "{n}.softmax(0)", "{x}[{x}]", "{a}[99]",
         "{a}.index_select(0, torch.tensor([99], device=DEVICE))",
         "{a}.gather(0, {x})", "torch.cat([{a}, {a}[None]])", "torch.stack([{a}, {a}[1:]])", "{a}.split_with_sizes([1, 1, 9])",
         "{a}.chunk(0)", "{a}.unfold(0, 99, 1)",
         "{a}.narrow(0, 0, 99)", "torch.empty(-1)", "F.conv2d({x}, {x})", "F.cross_entropy({x}, {x}.long() + 99)",
         "F.layer_norm({x}, [99])", "F.linear({x}, {y})",
         "{a} + torch.ones(11, 13, device=DEVICE)", "{b} ** {m}", "~{x}", "{x} & 1", "{n} << 1.5", "{x}.diagonal(0, 0, 0)",
         "{a}.flip(0, 0)", "{a}.roll((1, 2), 0)",
         "{a}.rot90(1, (0, 0))", "torch.einsum('ij,jk', {x}, {x})", "torch.tensordot({x}, {x}, 9)", "{a}.unflatten(0, (99, -1))",
         "{a}.movedim(0, 9)", "{a}.item()",
         "{x}.kthvalue(99)", "{x}.topk(99)", "{x}.quantile(2.0)", "{n}.std()", "{x}.sum(dtype=torch.long)",
         "{n}.prod(dtype=torch.float64)", "{x}.median(9)",
         "torch.where({x}, {x}, {x})", "torch.clamp({a})", "{a}.repeat(2)", "{a}.tile()", "{x}.masked_fill({n}, 1)",
         "{x}.masked_fill({m}, torch.ones(2))",
         "{x}.index_add(0, torch.tensor([0, 9], device=DEVICE), {x}[:2])", "{x}.scatter(0, torch.tensor([0]), 1)",
         "torch.complex({x}, {f}.double())",
         "torch.lerp({x}, {f}, {n})", "torch.addmm({x}, {x}, {x})", "torch.bmm({x}, {x})", "torch.outer({x}, {x})",
         "torch.cross({x}, {x}, dim=0)", "torch.dot({x}, {x})",
         "torch.cdist({x}, {x}[..., :1])", "{x}.cholesky()", "torch.bucketize({x}, {x})", "F.one_hot({n} - 99)", "F.embedding({x}, {x})",
         "F.pad({x}, (1, 2, 3))",
         "F.max_pool2d({x}, 99)", "F.interpolate({x}, 0)", "F.pixel_shuffle({x}, 7)", "F.glu({x}, 0)", "F.nll_loss({x}, {n})",
         "F.gelu({n})", "F.silu({n})", "{n}.mean(0)",
         "F.dropout({n}, 0.5)", "F.softmax({n}, 0)", "{n}.norm()", "{x}.view(torch.int8)[..., 1:].view(torch.float64)", "{a}.T.view(-1)",
         "torch.zeros(2, 3).to({x}) @ {x}",
         "{x}.new_full((2,), 'a')", "{a}.sum(0, 0)", "{a}.swapaxes(5, 6)", "torch.arange(3, 1)", "torch.linspace(0, 1, -3)",
         "torch.eye(-2)", "torch.full((2,), 1j, dtype=torch.float32)",
         "torch.tensor([1, [2]])", "{x}.pow(2j)", "{n} ** -1", "{n} // 0", "{n} % 0", "{n}.argmax(9)", "{a}.cumsum(9)",
         "{b}.cumprod(0) - {b}", "{x}.to(torch.device('nowhere'))")
operands("refusals", 0.5, "{x}.expand(2, *{x}.shape).add_(1)", "{x}.expand(2, *{x}.shape)[0].add_(1)", "{n}.add_({x})", "{n} /= 2",
         "{b} += 1", "{n}.mul_(0.5)", "{x}[0] = {x}", "{x}.t_().view(99)",
         "{x}.copy_(torch.ones(11, 13))", "{x}[:, 99] = 1", "{x}[{n}] = {x}[:1, :1]", "{x}[1:] += {x}[:-1]",
         "{x}.add_(torch.ones(2, *{x}.shape))", "{x}.unfold(0, 2, 1).mul_(2)",
         "{n}.sin_()", "{b}.neg_()", "{x}.fill_(torch.ones(2))", "{x}.index_fill_(0, torch.tensor([99]), 1)", "{x}.masked_fill_({n}, 0)",
         "{x}.clamp_()", "{n}.clamp_(0.5)",
         "{x}.scatter_(0, {n}, 1)", "{x}.unsqueeze_(9)", "{a}.data = {a}.sum().bool()", "torch.sin({x}, out={n})", "{x} @= {x}",
         "{x}.diagonal().copy_(torch.ones(99))", "{b} ^= {x}", "{x}.lerp_({n}, 1)",
         "{x}.put_(torch.tensor([999]), torch.ones(1))", "{n}.copy_({x} * 1j)", "{b}.logical_not_().sub_({b})", "{x}.bernoulli_(3)",
         "{x}.normal_(0, -1)", write=True)


# ---- dtypes that nobody computes with, only converts to and from, and looks at

SMALL = ["torch.float8_e4m3fn", "torch.float8_e5m2", "torch.uint16", "torch.uint32", "torch.uint64", "torch.complex32"]


def formats(form: str):
    def write(w):
        text = w.fill(form)
        for name, table in (("<t>", SMALL), ("<f>", SMALL[:2]), ("<u>", SMALL[2:5])):
            text = text.replace(name, w.rng.choice(table))
        return text
    return write


for _form in ("{x}.to(<f>).to({x}.dtype)", "({x} * 3).to(<f>).float() + {y}", "{x}.to(<f>).view(torch.uint8)",
              "{x}.detach().to(<f>).mT.float()",
              "{n}.to(<u>).to({n}.dtype)", "{n}.abs().to(<u>).view(-1)[:3].long()", "{b}.to(<t>).float()", "{a}.to(<t>).to({a}.dtype)",
              "torch.cat([{x}.to(<f>), {x}.to(<f>)]).float()", "torch.stack([{x}.to(<f>)] * 2)[1].to({x}.dtype)",
              "{x}.to(<f>)[..., :1].double()",
              "torch.zeros_like({x}, dtype=<t>).to({x}.dtype)", "{n}.view(torch.uint8)", "{x}.to(<f>).clone().float()",
              "{x}.to(<f>).reshape(-1).flip(0).float()", "{x}.to(<f>).T.contiguous().float()", "torch.where({m}, {x}.to(<f>).float(), {x})",
              "{x}.to(torch.complex64).to(torch.complex32).to(torch.complex64).real",
              "torch.full({a}.shape, 3, dtype=<t>, device=DEVICE).float()",
              "{x}.to(torch.float16).view(torch.uint16).int()", "{x}.float().view(torch.uint32).long()",
              "{n}.long().view(torch.uint64).long()",
              "({x}.to(<f>) == {x}.to(<f>)).float()", "{x}.to(<f>).isnan()", "{x}.to(<f>).to(torch.bfloat16) * {x}.bfloat16()",
              "torch.empty_like({x}, dtype=<f>).copy_({x}.detach()).float()", "{n}.to(<u>).to(<f>).float()", "{x}.abs().to(<u>).float()"):
    family("formats", 1.0)(formats(_form))
operands("formats", 1.0, "{x}.copy_({x}.to(torch.float8_e5m2))", "{x}.mul_({f}.detach().to(torch.float8_e4m3fn).to({x}.dtype))",
         "{n}.copy_({n}.to(torch.uint16))", "{x}[..., :1] = {x}[..., :1].detach().to(torch.float8_e4m3fn)", write=True)


# ---- histories that are cut, begun, watched and asked for in the middle, and transforms of functions

operands("histories", 1.0, "(y := {x} * 1, y.detach_(), y + 1)[-1]",
         "(y := {x}.sin(), y.requires_grad_() if y.is_leaf else y, y * y)[-1].detach()",
         "(y := {x} * {s}, y.register_hook(lambda g: None if g is None else g * 2) if y.requires_grad else None, y.sin() + 1)[-1]",
         "(y := {x} * 2, y.retain_grad() if y.requires_grad else None, y.cos())[-1]",
         "{x}.detach().clone().requires_grad_().sin().detach()",
         "({x} * 1).requires_grad_({x}.requires_grad).exp().clamp(-3, 3)",
         "torch.utils.checkpoint.checkpoint(torch.sin, {x}, use_reentrant=False)",
         "torch.utils.checkpoint.checkpoint(lambda a, b: (a * b).tanh(), {x}, {f}, use_reentrant=False)",
         "(lambda a: torch.autograd.grad([a.sin().sum(), (a * a).mean()], [a])[0])({x}.detach().requires_grad_())",
         "(lambda a, b: torch.autograd.grad((a * 2).sum(), [a, b], allow_unused=True)[0])"
         "({x}.detach().requires_grad_(), {f}.detach().requires_grad_())",
         "(lambda a, b: torch.autograd.grad((a * 2).sum(), [a, b], allow_unused=True, materialize_grads=True)[1])"
         "({x}.detach().requires_grad_(), {f}.detach().requires_grad_())",
         "(lambda a: torch.autograd.grad(a.unbind(0)[0].sin().sum(), a)[0])({x}.detach().requires_grad_())",
         "(lambda a: ((a * a).sum().backward(), a.grad)[1])({x}.detach().requires_grad_())",
         "(lambda a: ((y := a * 2, y.add_(1), y[..., :1].mul_(2), y.sum().backward()), a.grad)[1])({x}.detach().requires_grad_())",
         "(lambda a: (a.sin().sum().backward(), a.cos().sum().backward(), a.grad)[2])({x}.detach().requires_grad_())",
         "(lambda a: (a.register_hook(lambda g: g + 1), (a * 3).sum().backward(), a.grad)[2])({x}.detach().requires_grad_())",
         "(lambda a: ((y := a.sin(), z := y.detach()), z.requires_grad_(), (z * z).sum().backward(), z.grad)[3])({x})",
         "torch.enable_grad()(lambda a: a * 2)({x})", "torch.no_grad()(lambda a: a.requires_grad_())({x}.detach()).requires_grad * {x}",
         "(y := {x} * 2, z := y.view(-1), y.add_(1), z * z)[-1]", "(y := {x} * 2, z := y[..., :1], z.sin_(), y, y.view(-1))[-1]",
         "(y := {x} * 2, z := y.detach(), z.mul_(2), y + 1)[-1]", "(y := {x}.detach().clone(), y.add_({x}), y)[-1]",
         "(y := torch.zeros_like({x}), y.copy_({x}), y * 2)[-1]", "(y := torch.zeros_like({x}), y[..., :1].copy_({x}[..., :1]), y.mT)[-1]",
         "(y := {x} * 2, y.set_({x} * 3), y + 0)[-1].detach()", "(y := {x}.detach().clone(), y.resize_(y.numel()), y * 2)[-1]",
         "(y := {x}.detach().clone(), y.unsqueeze_(0), y.transpose_(0, -1), y * 1)[-1]",
         "torch.func.grad(lambda a: a.sin().sum())({x}.detach())",
         "torch.func.vmap(lambda a: a * 2 + a.sum())({x}.detach())", "torch.func.jvp(torch.sin, ({x}.detach(),), ({x}.detach(),))[1]",
         "torch.func.vjp(lambda a: a * a, {x}.detach())[1]({x}.detach())[0]")
operands("histories", 0.5, "{x}.detach_()", "{x}.requires_grad_() if {x}.is_leaf else None",
         "{x}.register_hook(lambda g: None if g is None else g * 0.5) if {x}.grad_fn is not None else None",
         "{x}.retain_grad() if {x}.grad_fn is not None else None",
         "with torch.no_grad(): {x}.set_({x} * 1) if {x}.grad_fn is None else None", "{x}.grad = None", write=True)
