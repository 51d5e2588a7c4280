"""NaN and infinities through PyTorch's operators: among the inputs, and in incoming gradients. Where eager gives NaN or an infinity,
the compiled program does, and nowhere else."""
import math

import pytest
import torch
from opinfo import NOT_CLOSE, OPERATORS, differences_of_spoiled, program_of, samples_of, spoil, spoiled

import minicompile
from minicompile.ch01_graphs.rules import derivatives

FLOATING = {op.formatted_name: op for op in OPERATORS if torch.float32 in op.supported_dtypes("cpu")}
# Eager's CPU kernel of a GELU gives NaN for +inf, on a GPU inf; a grid sample reads memory that is not its own where a coordinate is NaN;
# the second derivative of a softmax is arithmetic in another order, and infinities meet elsewhere.
EXCEPT = {"nn_functional_gelu", "nn_functional_grid_sample", "grid_sampler_2d", "_softmax_backward_data"}
SOME = {"max_reduction_no_dim", "median", "prod", "cumprod", "amax", "norm_inf", "nn_functional_huber_loss", "nn_functional_smooth_l1_loss",
        "nn_functional_softplus", "logsumexp", "std", "where", "clamp", "nn_functional_layer_norm", "nn_functional_max_pool2d"}

pytestmark = pytest.mark.filterwarnings("ignore")


def check(name, backend, count):
    torch.set_num_threads(1)
    op = FLOATING[name]
    samples = [] if name in EXCEPT else samples_of(op, torch.float32, count)
    for sample in samples:
        found = differences_of_spoiled(program_of(op, [spoil(sample)]), backend, lambda seed: seed)
        if op.supports_autograd:
            found += differences_of_spoiled(program_of(op, [sample]), backend, lambda seed: spoiled(seed, [float("nan")]))
        assert not found or NOT_CLOSE.get(op.name), (found, sample)


@pytest.mark.parametrize("name", sorted(SOME & set(FLOATING)))
def test_some(name, reset):
    check(name, "decomposed", 1)


def test_what_is_looked_for_is_found(monkeypatch, reset):
    monkeypatch.setattr(derivatives, "DERIVED_OTHERWISE", {})
    with pytest.raises(AssertionError, match="nan"):
        check("max_reduction_no_dim", "decomposed", 1)


UNDER_A_SIGN = {"product": lambda x: (x.sqrt() * 2).sgn() + x, "quotient": lambda x: (x / x.exp()).sgn() + x,
                "views": lambda x: x.log().view(2, 3).t().sgn() * x.view(2, 3).t(), "sum": lambda x: (x.sqrt() + x.reciprocal()).sgn() + x,
                "difference": lambda x: (x.sqrt() - x).sgn(), "dot": lambda x: x.dot(x.log()).sgn(),
                "root of abs": lambda x: x.abs().sqrt()}


@pytest.mark.parametrize("backend", ["aot_eager", "decomposed", "cpp"])
@pytest.mark.parametrize("name", UNDER_A_SIGN)
def test_the_derivative_of_a_sign_is_zero_times_anything(name, backend, reset):
    """It is a tensor without memory, whose product with an infinity is zero in eager."""
    def derive(f):
        x = torch.tensor([0.0, float("inf"), -float("inf"), 1.0, -2.0, float("nan")]).requires_grad_()
        slope, = torch.autograd.grad(f(x).sum(), x, create_graph=True)
        return slope.detach(), *torch.autograd.grad(slope.sum(), x, materialize_grads=True)
    torch.testing.assert_close(derive(minicompile.compile(UNDER_A_SIGN[name], backend=backend)), derive(UNDER_A_SIGN[name]), equal_nan=True)


WITH_ZEROS = {"cross": torch.linalg.cross, "vdot": torch.vdot, "in the denominator": lambda z, y: y / z, "by itself": lambda z, y: z / z,
              "parts": lambda z, y: torch.cat([part * math.inf for part in z.chunk(2)])}


@pytest.mark.parametrize("backend", ["aot_eager", "decomposed", "cpp"])
@pytest.mark.parametrize("name", WITH_ZEROS)
def test_what_a_program_computes_with_zeros_that_have_no_memory(name, backend, reset):
    def function(x):
        return WITH_ZEROS[name](torch.autograd.grad(x.sgn().sum(), x)[0], x * torch.tensor([math.inf, -1, 0])).detach()
    x = torch.tensor([1.0, 2.0, -3.0]).requires_grad_()
    torch.testing.assert_close(minicompile.compile(function, backend=backend)(x), function(x), equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["decomposed", "cpp"])
@pytest.mark.parametrize("name", FLOATING)
def test_all(name, backend, reset):
    check(name, backend, 4)
