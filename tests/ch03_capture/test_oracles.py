"""PyTorch's own samples as an oracle for capture: every module of `module_db`, every operator of `op_db`, through backend "eager".

With that backend nothing is compiled but the frame, so a difference from eager is an error of capture, of guards or of graph
breaks. Each program runs forward and backward, twice, the second time through the guards of the first. A sixth of the operators
runs always, all of them under `-m slow`. The modules and operators that may break the graph are listed."""

import pytest
import torch
from opinfo import NOT_CLOSE, OPERATORS, compare, dtypes_of, observe, program_of, samples_of
from recorders import Captures
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

import minicompile

MODULES = {m.formatted_name: m for m in module_db}
NAMES = {op.formatted_name: op for op in OPERATORS}

# Modules whose forward is more than one graph, by the reason.
BROKEN_MODULES = {
    "train": {"nn_BatchNorm1d", "nn_BatchNorm2d", "nn_BatchNorm3d",       # momentum=None asks for the number of batches
              "nn_FractionalMaxPool2d", "nn_CTCLoss",                     # no fake result
              "nn_FractionalMaxPool3d",                                   # the kernel refuses the sample's random numbers: they are double
              "nn_GaussianNLLLoss"},                                      # checks the sign of the variance
    "eval": {"nn_FractionalMaxPool2d", "nn_FractionalMaxPool3d", "nn_CTCLoss", "nn_GaussianNLLLoss"}}
# Operators whose result depends on values (its shape, or as a Python number), and those without a meta kernel. `torch.masked` defines a
# class per call.
BROKEN_OPERATORS = {
    "item", "allclose", "combinations", "corrcoef", "cov", "equal", "geqrf", "masked_select", "tensor_split", "unique",
    "unique_consecutive", "histogram", "histogramdd", "bincount", "to_sparse", "nonzero", "nn_functional_one_hot", "argwhere",
    "nn_functional_gaussian_nll_loss", "linalg_lstsq", "linalg_lstsq_grad_oriented"}
BROKEN_OPERATORS |= {name for name in NAMES if name.startswith("masked_")}

pytestmark = [pytest.mark.usefixtures("fresh"), pytest.mark.filterwarnings("ignore")]


# ---- Modules --------------------------------------------------------------------------------------------------------------

def seen_of(module, function, args, kwargs) -> list:
    """Outputs, gradients, state and random stream of two calls."""
    torch.manual_seed(5)
    seen = []
    for _ in range(2):
        try:
            result = function(*args, **kwargs)
        except Exception as error:
            seen.append((type(error), str(error)[:60]))
            continue
        flat = pytree.tree_leaves(result)
        roots = [t for t in flat if isinstance(t, torch.Tensor) and t.requires_grad]
        if roots:
            sum((r.abs() ** 2).sum() for r in roots).backward()
        seen += flat
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    tensors += [*module.parameters(), *module.buffers()]
    return [*seen, *tensors, *[t.grad if t.is_leaf else None for t in tensors], torch.get_rng_state()]


def same(got, want) -> bool:
    if not isinstance(want, torch.Tensor):
        return got == want
    return isinstance(got, torch.Tensor) and got.requires_grad == want.requires_grad and got.dtype == want.dtype \
        and got.shape == want.shape and torch.allclose(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)


def copied(tree):
    return pytree.tree_map(lambda t: t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t, tree)


def check_module(info, training, limit) -> tuple[int, list]:
    """How many samples ran, and why graphs broke."""
    inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float32, requires_grad=True, training=training)
    ran, reasons = 0, []
    for sample in list(inputs)[:limit]:
        if sample.forward_input is None:
            continue
        results = []
        for compiled in (False, True):
            torch.manual_seed(1)
            module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).train(training)
            args, kwargs = copied((sample.forward_input.args, sample.forward_input.kwargs))
            with Captures() as seen:
                function = minicompile.compile(module, backend="eager") if compiled else module
                results.append(seen_of(module, function, args, kwargs))
        want, got = results
        ran, reasons = ran + 1, reasons + [str(b.reason) for b in seen.breaks]
        assert len(got) == len(want) and all(map(same, got, want)), (sample, got, want)
    return ran, reasons


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", MODULES)
def test_module(name, training):
    _, reasons = check_module(MODULES[name], training, 2)
    assert not reasons or name in BROKEN_MODULES["train" if training else "eval"], reasons


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", MODULES)
def test_module_samples(name, training):
    check_module(MODULES[name], training, 40)


# ---- Operators ------------------------------------------------------------------------------------------------------------

def check_operator(op, counts) -> tuple[int, list]:
    samples = [s for dtype, count in zip(dtypes_of(op), counts) for s in samples_of(op, dtype, count)]
    programs = [program_of(op, [s]) for s in samples]
    wanted = []
    for program in programs:
        try:
            wanted.append((program, observe(program.function, program.inputs)))
        except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError):
            continue
    reasons = []
    for program, want in wanted:
        minicompile.reset()
        function = minicompile.compile(program.function, backend="eager")
        with Captures() as seen:
            for _ in range(2):
                problems = compare(observe(function, program.inputs), want, **NOT_CLOSE.get(op.name, {}))
                assert not problems, "\n".join([*problems, program.text])
        reasons += [str(b.reason) for b in seen.breaks]
    return len(wanted), reasons


@pytest.mark.parametrize("name", list(NAMES)[::6])
def test_operator(name):
    ran, reasons = check_operator(NAMES[name], (1, 1))
    assert not reasons or name in BROKEN_OPERATORS, reasons


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_operator_samples(name):
    _, reasons = check_operator(NAMES[name], (4, 4))
    assert not reasons or name in BROKEN_OPERATORS, reasons
