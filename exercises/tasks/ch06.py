"""Chapter 6: decompositions."""
import torch

from .. import behaviour, task
from .kit import without

aten = torch.ops.aten

# ---- promoted --------------------------------------------------------------------------------------------

task("promoted", title="Which dtype wins", minutes=35, about="""\
Eager computes int64 + float32 in float32, float32 + 1.5 in float32, bfloat16 + a float64 tensor without dims in bfloat16, and int64 + 1.5
in the default dtype. A compiler that decomposes operators has to know the rule: tensors with dims outrank tensors without, which outrank
numbers, and a lower rank only counts if its kind (bool, integer, floating, complex) is higher.""", hints=[
    "Which operands decide first: tensors with dims, tensors without, or numbers? Which dtype do two of one rank have together?",
    "Find one dtype for each rank first; `_promote` joins two of equal rank, and `number_dtype` knows numbers. Then go from the highest "
    "rank that is there to the lowest: `_kind` says whether a lower one matters.",
    "A dictionary from rank to dtype, filled in one walk over the operands. The result begins as the dtype of the highest rank. A lower "
    "rank takes its place only if its kind is higher than that of the result so far: an int64 tensor and 1.5, for instance."])

DTYPES = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64]
NUMBERS = [True, 3, 1.5]


def operands_text(case):
    return "promoted(" + ", ".join(f"{str(x[0])[6:]}{[2] * x[1]}" if isinstance(x, tuple) else repr(x) for x in case) + ")"


def pairs(a, b):
    return lambda rng: [(x, y) for x in a for y in b if rng.random() < 0.6] + [(a[-1], b[0])]


def tensors(dims):
    return [(d, dims) for d in DTYPES]


def mixtures(rng):
    def one():
        return rng.choice(NUMBERS) if rng.random() < 0.25 else (rng.choice(DTYPES), rng.randrange(2))
    return [tuple(one() for _ in range(rng.randrange(2, 5))) for _ in range(80)]


for _points, _name, _cases in ((2, "two tensors with dims", pairs(tensors(1), tensors(1))), (2, "a tensor and a number",
                                                                                             pairs(tensors(1), NUMBERS)),
                               (3, "a tensor with dims and one without", pairs(tensors(0), tensors(2))),
                               (2, "only numbers, or none with dims", pairs(tensors(0) + NUMBERS, NUMBERS)), (3, "mixtures", mixtures)):
    @behaviour("promoted", points=_points, name=_name, cases=_cases, show=operands_text)
    def dtype_of(function, case):
        return function(*(torch.zeros([2] * x[1], dtype=x[0]) if isinstance(x, tuple) else x for x in case))


# ---- gelu-backward ---------------------------------------------------------------------------------------

task("gelu-backward", title="The slope of GELU", minutes=25, about="""\
A decomposition is a small function in ordinary torch calls; the fusion stage turns it into a few lines inside a kernel. Write the
derivative of GELU: x times the standard normal distribution function, and its approximation by tanh. `gelu`, above it in the book, has the
formulas.""", hints=[
    "What is the derivative of a product, x times a function of x? Which calls of torch give the normal distribution function, and "
    "which its density?",
    "Exact: cdf(x) + x * pdf(x), with pdf(x) = exp(-x * x / 2) / sqrt(2 pi), and cdf by torch.erf. For tanh: y = 0.5 * x * (1 + t), "
    "with t = tanh(u), and u is the polynomial in `gelu`.",
    "For tanh the product rule gives two terms, and the second has two inner derivatives: that of tanh, which can be written by t "
    "alone, and that of the polynomial. Both ways end with a multiplication by grad."])


def slopes(approximate, dtype=torch.float64):
    def cases(rng):
        points = [0.0, 1.0, -1.0, 0.5, -3.0, 6.0, -40.0] + [rng.uniform(-4, 4) for _ in range(20)]
        return [(torch.tensor([x], dtype=dtype), torch.tensor([rng.uniform(-2, 2)], dtype=dtype), approximate) for x in points]
    return cases


def slope_text(case):
    return f"x = {case[0].item():.4g}, grad = {case[1].item():.4g}, {case[0].dtype}, approximate={case[2]!r}"


def slope(function, case):
    x, grad, approximate = case
    return without(aten.gelu_backward, function, grad, x, approximate)


for _points, _name, _cases in ((3, "exact", slopes("none")), (3, 'approximate="tanh"', slopes("tanh")),
                               (1, "float32", slopes("none", torch.float32))):
    behaviour("gelu-backward", points=_points, name=_name, cases=_cases, show=slope_text, tolerance=1e-5)(slope)


@behaviour("gelu-backward", points=2, name="bfloat16 through the table of decompositions", tolerance=1e-2, cases=lambda rng: [
    slopes(a, torch.bfloat16)(rng)[k] for a in ("none", "tanh") for k in (1, 2, 3, 4)], show=slope_text)
def through_the_table(function, case):
    from minicompile.ch06_decompositions.table import TABLE
    x, grad, approximate = case
    return without(aten.gelu_backward, TABLE[aten.gelu_backward.default], grad, x, approximate=approximate)


# ---- layer-norm-backward ---------------------------------------------------------------------------------

task("layer-norm-backward", title="Layer norm, backwards", minutes=60, about="""\
With n = (x - mean) * rstd and g = grad * weight, the gradient of x is rstd * (g - mean(g) - n * mean(g * n)): two sums over each row, then
arithmetic. The gradients of weight and bias are sums of grad * n and of grad over the other dims. In a fused kernel that is one read of
the row.""",
     hints=[
    "Which dims are normalized? The last len(normalized_shape); `_inner` lists them. The parameters' gradients sum over the others.",
    "`widen` makes half types float32 and leaves the rest alone. `_input_gradient(g, n, rstd, dims)` is the formula of the text; "
    "`_affine(grad, weight, None)` is grad * weight, or grad if there is no weight; `_folded` sums over dims, of which there may be "
    "none.",
    "Widen what comes in. Then come three parts that do not depend on each other, each only if `output_mask` asks for it, and the last "
    "two only if there is such a parameter: the formula over the normalized dims, and two sums over the other dims. Each result goes "
    "back to the dtype of what it is the gradient of."])


def norms(shapes, masks=((True, True, True),), parameters=(True,), dtype=torch.float32):
    return lambda rng: [(size, k, m, p, dtype, rng.randrange(1000)) for size, k in shapes for m in masks for p in parameters]


def norm_text(case):
    size, k, mask, parameters, dtype, seed = case
    return f"x: {str(dtype)[6:]}{list(size)}, normalized_shape {list(size[-k:])}, output_mask {list(mask)}" + (
        "" if parameters else ", no parameters")


def norm_gradients(function, case):
    size, k, mask, parameters, dtype, seed = case
    g = torch.Generator().manual_seed(seed)
    x, grad = (torch.randn(size, generator=g).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(size[-k:], generator=g).to(dtype) if parameters else None for _ in range(2))
    _, mean, rstd = aten.native_layer_norm.default(x, list(size[-k:]), weight, bias, 1e-5)
    dx, dw, db = without(aten.native_layer_norm_backward, function, grad, x, list(size[-k:]), mean, rstd, weight, bias, list(mask))
    return {"gradient of x": dx, "gradient of weight": dw, "gradient of bias": db}


SOME = [m for m in ((True, False, False), (False, True, False), (False, False, True), (True, True, False))]
for _points, _name, _cases, _tolerance in (
        (4, "one normalized dim", norms([((2, 3), 1), ((4, 8), 1), ((2, 3, 5), 1)]), 1e-4),
        (3, "several normalized dims, or all", norms([((2, 3, 4), 2), ((3, 4), 2), ((2, 2, 3, 2), 3)]), 1e-4),
        (2, "without parameters", norms([((2, 3), 1), ((4, 2, 3), 2)], parameters=(False,)), 1e-4),
        (2, "only what output_mask asks for", norms([((2, 3), 1), ((5, 4), 1)], SOME), 1e-4),
        (2, "bfloat16, computed in float32", norms([((4, 16), 1), ((2, 3, 64), 1)], dtype=torch.bfloat16), 8e-3)):
    behaviour("layer-norm-backward", points=_points, name=_name, cases=_cases, show=norm_text, tolerance=_tolerance)(norm_gradients)
