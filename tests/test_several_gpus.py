"""Functions that run on a GPU that is not the current one, on several, and by turns on each."""
import threading
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import minicompile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
MODES = pytest.mark.parametrize("mode", [None, "reduce-overhead"])


def filled(*size, device, seed=0):
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(device)


def net(device):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Linear(64, 32)).to(device)


def in_turns(compiler):
    f = compiler(lambda x: (x.sin() * 2 + x.mean()).relu())
    return [f(filled(16, 16, device=f"cuda:{i % 2}", seed=i)) for i in range(10)]


def elsewhere(compiler):
    """On the second GPU, whichever is the current one, which stays so."""
    f, out = compiler(lambda x: (x.sin() * 2).sum(0)), []
    for i in range(10):
        with torch.cuda.device(i % 2):
            out.append(f(filled(16, 16, device="cuda:1", seed=i)))
            assert torch.cuda.current_device() == i % 2
    return out


def training(compiler):
    module, out = net("cuda:1"), []
    step = compiler(module)
    for i in range(8):
        loss = step(filled(8, 32, device="cuda:1", seed=i)).square().mean()
        loss.backward()
        out.append(loss.detach())
    return out + [p.grad for p in module.parameters()]


class Split(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(32, 64).to("cuda:0"), torch.nn.Linear(64, 8).to("cuda:1")

    def forward(self, x):
        h = F.gelu(self.first(x))
        return self.second(h.to("cuda:1")).softmax(-1), h.sin().sum(1)


def split(compiler):
    module, out = Split(), []
    f = compiler(module)
    for i in range(6):
        x = filled(8, 32, device="cuda:0", seed=i).requires_grad_()
        y, z = f(x)
        (y[:, 0].sum() + z.sum().to("cuda:1")).backward()
        out += [y, z, x.grad]
    return out + [p.grad for p in module.parameters()]


def moves(compiler):
    """Only its input tells where it begins."""
    f = compiler(lambda x: ((x * 2).cos().to("cuda:1") + 1).exp())
    return [f(filled(4, 4, device="cuda:0", seed=i)) for i in range(5)]


def data_parallel(compiler):
    module, out = net("cuda:0"), []
    f = torch.nn.DataParallel(compiler(module))
    for i in range(5):
        y = f(filled(8, 32, device="cuda:0", seed=i))
        y.square().mean().backward()
        out.append(y)
    return out + [p.grad for p in module.parameters()]


def threads(compiler):
    f, out = compiler(lambda x: (x @ x.mT).softmax(-1).sin()), {}

    def work(k):
        torch.cuda.set_device(k % 2)
        out[k] = [f(filled(16, 16, device="cuda", seed=20 * k + i)) for i in range(20)]
    started = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    return [t for k in sorted(out) for t in out[k]]


@MODES
@pytest.mark.parametrize("program", [in_turns, elsewhere, training, split, moves, data_parallel, threads])
def test_agrees_with_eager(program, mode):
    expected = program(lambda f: f)
    with minicompile.config.patch(raise_on_internal_error=True):
        out = program(partial(minicompile.compile, mode=mode))
    torch.testing.assert_close(out, expected, rtol=2e-3, atol=2e-3)
