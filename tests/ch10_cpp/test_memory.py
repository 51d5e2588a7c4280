"""What a kernel reads lies in its tensors: behind and in front of these nothing is mapped here."""
import ctypes
import mmap
import os
import random
import resource
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import minicompile

PROGRAMS = {
    "pad": lambda x: F.pad(x, (1, 2)) * 2, "pad, sum": lambda x: F.pad(x, (1, 2)).sum(-1), "pad, amax": lambda x: F.pad(x, (3, 0)).amax(-1),
    "pad of rows": lambda x: F.pad(x, (0, 0, 1, 1)) * 2, "pad, sum of columns": lambda x: F.pad(x, (1, 2)).sum(0),
    "crop": lambda x: F.pad(x, (-1, 2)) + 1, "cat": lambda x: torch.cat([x, x * 2], -1) + 1, "roll": lambda x: x.roll(3, -1) * 2,
    "flip": lambda x: x.flip(-1) + 1, "shift": lambda x: x + F.pad(x[:, :-1], (1, 0)), "stack": lambda x: torch.stack([x, x], -1) * 2,
    "select": lambda x: torch.where(torch.arange(x.shape[-1]) < x.shape[-1] - 2, x, 0).sum(-1), "convert": lambda x: x.float() * 2 + 1,
    "pad, softmax": lambda x: F.pad(x.float(), (0, 1)).softmax(-1), "average": lambda x: F.avg_pool1d(x[None].float(), 3, 1, 1),
    "maximum": lambda x: F.max_pool1d(x[None].float(), 3, 1, 1), "norm": lambda x: F.layer_norm(x.float(), x.shape[-1:])}
DTYPES = torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8
SIZES = *range(1, 36), 47, 63, 65, 100, 129, 197, 505, 509, 513


def alone(shape, dtype, at_end: bool, keep: list) -> torch.Tensor:
    """Ones at one end of pages between two that cannot be read."""
    libc, page, size = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE, shape[0] * shape[1] * dtype.itemsize
    pages = -(-size // page)
    memory = mmap.mmap(-1, (pages + 2) * page)
    keep.append(memory)
    begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for place in (begin, begin + (pages + 1) * page):
        assert libc.mprotect(ctypes.c_void_p(place), page, 0) == 0
    offset = page + (pages * page - size if at_end else 0)
    return torch.frombuffer(memory, dtype=dtype, count=shape[0] * shape[1], offset=offset).fill_(1).view(shape)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the process that reads there ends")
@pytest.mark.parametrize("varies", [False, True])
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_a_kernel_reads_nothing_around_its_tensor(name, varies):
    rng, run = random.Random(name), PROGRAMS[name]
    cases = [((2, 513), torch.float32, True), ((2, 24), torch.float32, True)]
    cases += [((rng.choice([1, 2, 3, 7]), rng.choice(SIZES)), rng.choice(DTYPES), rng.random() < 0.7) for _ in range(2)]
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        code, keep, compiled = 1, [], minicompile.compile(run, backend="cpp", fullgraph=True, dynamic=varies)
        try:
            torch.set_num_threads(1)                # OpenMP's threads have not come along
            for number, (shape, dtype, at_end) in enumerate(cases):
                os.write(tell, bytes([number]))
                x = alone(shape, dtype, at_end, keep)
                with torch.no_grad():
                    torch.testing.assert_close(compiled(x), run(torch.ones(shape, dtype=dtype)))
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert status == 0, cases[os.read(told, len(cases))[-1]]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="memory is limited in a process of its own")
def test_few_long_rows_keep_no_more_than_one_each():
    """Also where the kernel was compiled for many short ones, of which sixteen go together."""
    x, compiled = torch.zeros(2, 1 << 23), minicompile.compile(lambda x: x.softmax(-1), backend="cpp", fullgraph=True, dynamic=True)
    compiled(torch.zeros(64, 47))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28), resource.RLIM_INFINITY))
            code = 0 if (compiled(x) == 0.5 ** 23).all() else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
