"""The compile pool, the cache, and the C launcher against a stand-in for the CUDA driver that records what it is asked to launch."""
import contextlib
import dataclasses
import os
import pickle
import re
import shutil
import subprocess
import sys
import types

import pytest
import torch

pytest.importorskip("triton")

from minicompile.ch09_triton import launch
from minicompile.ch09_triton.emit import emit_triton
from minicompile.ch09_triton.heuristics import Config

from .helpers import Body, buffer, kernel, sym

FAKE_DRIVER = r"""
#include <stdio.h>
#include <stdint.h>
int cuInit(unsigned f) { return 0; }
int cuModuleLoadData(void **m, const void *image) { *m = (void *)1; return 0; }
int cuModuleUnload(void *m) { return 0; }
int cuModuleGetFunction(void **f, void *m, const char *name) { *f = (void *)2; printf("function %s\n", name); return 0; }
int cuFuncSetAttribute(void *f, int a, int v) { printf("attribute %d %d\n", a, v); return 0; }
int cuFuncGetAttribute(int *v, int a, void *f) { *v = a; return 0; }
int cuGetErrorString(int c, const char **t) { *t = "made up"; return 0; }
int cuDeviceGet(int *d, int o) { *d = o; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)3; return 0; }
int cuCtxSetCurrent(void *c) { return 0; }
int cuCtxGetCurrent(void **c) { *c = (void *)3; return 0; }
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream,
                   void **params, void **extra) {
    printf("launch %u threads %u shared %u stream %lu: %lu %lu %d\n", gx, bx, shared, (unsigned long)stream,
           (unsigned long)*(uint64_t *)params[0], (unsigned long)*(uint64_t *)params[1], *(int32_t *)params[2]);
    fflush(stdout);
    return gx == 13 ? 1 : 0;
}
"""

SCRIPT = """
from minicompile.ch09_triton.launch import launcher
class T:
    def __init__(self, p): self.p = p
    def data_ptr(self): return self.p
def expect(error, *args):
    try: k(*args)
    except error as e: print(type(e).__name__, e, flush=True)
k = launcher().Kernel(b"cubin", "f", 0, 128, 65536, 2, 1, True, 0, lambda s: s * 2, lambda d: 77 + d, 15, lambda *a: print("fallback",
                                                                                                               a[2], flush=True))
k(T(160), T(1024), 5)
k(160, T(1032), 6)
k(T(160), T(1024), 0)
expect(TypeError, T(160), T(1024))
expect(OverflowError, T(160), T(1024), 2**40)
expect(AttributeError, None, T(1024), 2)
k = launcher().Kernel(b"cubin", "f", 0, 32, 0, 2, 1, False, 13, None, lambda d: 0, 0, None)
expect(RuntimeError, T(161), T(1024), -1)
"""

EXPECTED = """
function f
attribute 8 65536
launch 10 threads 128 shared 65536 stream 77: 160 1024 5
fallback 6
TypeError the kernel takes 2 tensors and 1 integers, not 2 arguments
OverflowError a size exceeds 32 bits
AttributeError 'NoneType' object has no attribute 'data_ptr'
function f
launch 13 threads 32 shared 0 stream 0: 161 1024 -1
RuntimeError CUDA error while launching a kernel: made up
"""


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler")
def test_launcher_passes_arguments_to_the_driver(tmp_path):
    (tmp_path / "fake.c").write_text(FAKE_DRIVER)
    subprocess.run(["gcc", "-shared", "-fPIC", str(tmp_path / "fake.c"), "-o", str(tmp_path / "libcuda.so.1")], check=True)
    env = os.environ | {"LD_LIBRARY_PATH": str(tmp_path), "MINICOMPILE_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True)
    assert done.stdout.strip() == EXPECTED.strip(), done.stdout + done.stderr


def small_kernel(name="kernel", location=None):
    i = sym("i0", 1000)
    b = Body()
    b.store("out0", i.expr, b.tanh(b.load("in0", i.expr)))
    return kernel([b.loop((i,), location=location)], [buffer("in0", (1000,)), buffer("out0", (1000,))], ["in0"], ["out0"], (i,), name=name)


def test_cache_key_ignores_names_and_comments_but_not_options(monkeypatch):
    from minicompile.ch01_graphs.graph import Location
    key = lambda k, config=None, aligned=True, arch=90: launch.make_task(emit_triton(k, config), arch, aligned)["key"]
    base = key(small_kernel())
    located = small_kernel("other", Location(__file__, 1, "f"))
    assert "test_launch.py:1" in emit_triton(located).code
    assert key(located) == base
    assert len({base, key(small_kernel(), aligned=False), key(small_kernel(), arch=80), key(small_kernel(), Config({"x": 64}, 1))}) == 4


def test_pool_compiles_for_a_gpu_that_is_not_here(tmp_path, monkeypatch):
    """Real machine code for an H100, made by a worker process; a broken kernel reports its error and breaks nothing."""
    monkeypatch.setenv("MINICOMPILE_CACHE_DIR", str(tmp_path))
    task = launch.make_task(emit_triton(small_kernel()), 90, True)
    broken = task | {"code": task["code"].replace("tl.load", "tl.lode"), "path": str(tmp_path / "broken")}
    pool = launch.Pool()
    try:
        waits = [pool.submit(t) for t in (task, broken)]
        assert waits[0]() == "" and "lode" in waits[1]()
        result = launch.read_result(task)
        assert result["cubin"][:4] == b"\x7fELF" and result["name"] == "kernel" and result["num_warps"] == task["num_warps"]
        assert not os.path.exists(broken["path"])
        pool.process.kill()
        pool.process.wait()
        assert "ended" in pool.submit(task)()
    finally:
        pool.process.kill()


@pytest.mark.parametrize("extreme", ["minimum", "maximum"])
@pytest.mark.parametrize("quotient", ["truediv", "reciprocal"])
def test_an_extreme_of_a_quotient_does_not_end_the_compiler(tmp_path, monkeypatch, extreme, quotient):
    """LLVM takes `x / y` for an extreme where it stands beside an extreme of `x` and `y`."""
    monkeypatch.setenv("MINICOMPILE_CACHE_DIR", str(tmp_path))
    b, i, many = Body(), sym("i0", 1 << 20), (1 << 20,)
    x, y = b.load("in0", i.expr), b.load("in1", i.expr)
    one, of_both = b.constant(1.0), getattr(b, extreme)
    both = (b.truediv(x, y), of_both(x, y)) if quotient == "truediv" else (b.reciprocal(x), of_both(x, one))
    b.store("out0", i.expr, of_both(*both))
    source = emit_triton(kernel([b.loop((i,))], [buffer(name, many) for name in ("in0", "in1", "out0")], ["in0", "in1"], ["out0"], (i,)))
    pool = launch.Pool()
    try:
        assert pool.submit(launch.make_task(source, 90, True))() == ""
    finally:
        pool.process.kill()


def ptx_of(monkeypatch, body, i, *buffers) -> str:
    """The text for the GPU's assembler of a kernel from "in0" to "out0"."""
    import triton
    emitted, real = [], triton.compile

    def spy(*args, **kwargs):
        emitted.append(real(*args, **kwargs))
        return emitted[-1]
    monkeypatch.setattr(triton, "compile", spy)
    task = launch.make_task(emit_triton(kernel([body.loop((i,))], buffers, ["in0"], ["out0"], (i,))), 90, True)
    launch.worker.compile_kernel(task)
    return emitted[0].asm["ptx"]


def ptx_kernel(registers: str, body: str) -> str:
    """A kernel for sm_90 whose argument, an address, is in %rd1."""
    return f"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry kernel(.param .u64 where) {{
    .reg .b64 %rd<2>;  {registers}
    ld.param.u64 %rd1, [where];{body}    ret;
}}
"""


PAIR = ptx_kernel(".reg .b32 %r<4>;  .reg .b16 %rs<4>;", """
    ld.global.u16 %rs1, [%rd1];
    mov.b32 %r1, {%rs1, %rs2};
    mov.b32 %r2, 147;
    add.s16x2 \t%r3, %r1, %r2;
    mov.b32 {%rs3, _}, %r3;
    st.global.b16 [%rd1], %rs3;
""")


def machine_code(ptx, folder):
    """What `ptxas` makes of the repaired text, as `nvdisasm` shows it."""
    from triton import knobs
    text, binary = folder / "kernel.ptx", folder / "kernel.cubin"
    text.write_text(launch.worker.repaired(ptx))
    subprocess.run([knobs.nvidia.ptxas.path, "--gpu-name=sm_90", text, "-o", binary], check=True)
    return subprocess.run([knobs.nvidia.nvdisasm.path, binary], capture_output=True, text=True, check=True).stdout


def test_a_sum_of_pairs_keeps_its_constant(tmp_path):
    """Of which only one is of use: `ptxas` forgets what is added."""
    shown = machine_code(PAIR, tmp_path)
    assert re.search(r"ADD.*, 0x93\b", shown), shown


THREE = ptx_kernel(".reg .b32 %r<8>;", """
    ld.global.b32 %r1, [%rd1];
    ld.global.b32 %r2, [%rd1 + 4];
    ld.global.b32 %r3, [%rd1 + 8];
    neg.s32 \t%r4, %r1;
    neg.s32 \t%r5, %r2;
    max.s32 \t%r6, %r4, %r5;
    max.s32 \t%r7, %r6, %r3;
    st.global.b32 [%rd1], %r7;
""")


def test_a_maximum_of_three_keeps_its_signs(tmp_path):
    """`ptxas` makes one instruction of the two, and forgets one of the negations: here both are complements."""
    shown = machine_code(THREE, tmp_path)
    assert len(re.findall(r"LOP3\.LUT R\d+, RZ, R\d+, RZ, 0x33", shown)) == 2, shown


NARROW = ptx_kernel(".reg .b16 %rs<3>;  .reg .b32 %r<2>;", """
    ld.global.b16 %rs1, [%rd1];
    CHANGE.s16 \t%rs2, %rs1;
    cvt.s32.s16 \t%r1, %rs2;
    st.global.b32 [%rd1], %r1;
""")


@pytest.mark.parametrize("change", ["neg", "abs"])
def test_the_smallest_int16_is_its_own_negative(change, tmp_path):
    """`ptxas` makes 32 bits of it first: here what is negated is made wide at the end."""
    shown = machine_code(NARROW.replace("CHANGE", change), tmp_path)
    last = re.findall(r"\b(\w+)[.\w]* [^;]*;", shown.partition("STG")[0])[-1]
    assert last == "PRMT", shown


REMAINDER = ptx_kernel(".reg .bBITS %r<4>;", """
    ld.global.bBITS %r1, [%rd1];
    abs.sBITS \t%r2, %r1;
    rem.sBITS \t%r3, %r2, 9;
    st.global.bBITS [%rd1], %r3;
""")


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_a_remainder_of_an_absolute_number_may_be_negative(bits, tmp_path):
    """`ptxas` takes what `abs` has given for positive, and the smallest number is not: here no `abs` is left."""
    ptx = launch.worker.repaired(REMAINDER.replace("BITS", str(bits)))
    assert "abs" not in ptx and f"max.s{bits}" in ptx
    assert machine_code(ptx, tmp_path)


MINIMA = ptx_kernel(".reg .b16 %rs<9>;", """
    ld.global.u16 %rs1, [%rd1];
    ld.global.u16 %rs2, [%rd1 + 2];
    ld.global.u16 %rs3, [%rd1 + 4];
    ld.global.u16 %rs4, [%rd1 + 6];
    min.s16 \t%rs5, %rs1, %rs2;
    max.s16 \t%rs6, %rs5, 0;
    min.s16 \t%rs7, %rs3, %rs4;
    st.global.b16 [%rd1], %rs6;
    st.global.b16 [%rd1 + 2], %rs7;
""")


def test_of_two_minima_one_stays_negative(tmp_path):
    """`ptxas` makes a pair of them, and takes the maximum with 0 of both."""
    shown = machine_code(MINIMA, tmp_path)
    assert "VIMNMX" in shown and "RELU" not in shown, shown


COMPARED = ptx_kernel(".reg .b32 %r<4>;  .reg .pred %p<2>;", """
    ld.global.b32 %r1, [%rd1];
    MADE;
    mov.b32 %r3, 0f00000000;
    setp.COMPARE.f32 \t%p1, OPERANDS;
    selp.b32 %r1, 1, 0, %p1;
    st.global.b32 [%rd1], %r1;
""")


@pytest.mark.parametrize("made", ["abs.f32 %r2, %r1", "mul.f32 %r2, %r1, %r1", "ex2.approx.ftz.f32 %r2, %r1"])
@pytest.mark.parametrize("compare, operands", [
    ("ge", "%r2, 0f00000000"), ("gt", "%r2, 0fBF800000"), ("le", "%r3, %r2"), ("lt", "0fBF800000, %r2")])
def test_what_is_never_negative_may_be_nan(made, compare, operands, tmp_path):
    """`ptxas` answers without to compare."""
    assert "FSETP" in machine_code(COMPARED.replace("MADE", made).replace("COMPARE", compare).replace("OPERANDS", operands), tmp_path)


@pytest.mark.skipif(launch.interpreting(), reason="compiles for a GPU")
def test_kernels_are_assembled_without_sums_of_pairs(monkeypatch, tmp_path):
    from triton import knobs
    from triton.backends.nvidia.compiler import CUDABackend
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    real, assembled, seen = CUDABackend.make_ptx, [], []
    monkeypatch.setattr(CUDABackend, "make_ptx", lambda *args: real(*args) + "// add.s16x2 \t%r3, %r1, %r2;\n")
    monkeypatch.setattr(CUDABackend, "make_cubin", lambda self, ptx, *rest: assembled.append(ptx) or b"")
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", own := lambda *args: seen.append(args) or ("own", "own"))
    b, i = Body(), sym("i0", 1000)
    b.store("out0", i.expr, b.load("in0", i.expr))
    launch.worker.compile_kernel(launch.make_task(emit_triton(kernel(
        [b.loop((i,))], (buffer("in0", (1000,)), buffer("out0", (1000,))), ["in0"], ["out0"], (i,))), 90, True))
    text, = assembled
    assert "16x2" not in text and "add.s16 low, low, plus_low;" in text
    assert seen and knobs.runtime.add_stages_inspection_hook is own


EQUAL_TO_THE_LEAST = """
import triton
import triton.language as tl

@triton.jit
def nan_min(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)

@triton.jit
def kernel(in0, out0, out1, out2, out3, out4, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
    rindex = tl.arange(0, RBLOCK)[None, :]
    rmask = rindex < 24
    tmp0 = tl.div_rn(tl.load(in0 + rindex, rmask).to(tl.float32), 1.0)
    red1 = tl.reduce(tl.where(rmask, tl.broadcast_to(tmp0, [XBLOCK, RBLOCK]), float("inf")), 1, nan_min)[:, None].to(tl.float32)
    tl.store(out0 + tl.full([XBLOCK, 1], 0, tl.int32), red1.to(tl.float16))
    tmp2 = red1.to(tl.float16).to(tl.float32)
    tmp3 = tl.sqrt_rn(tl.abs(tmp2) * tl.abs(tmp2))
    tmp4 = tmp3.to(tl.float16).to(tl.float32)
    tl.store(out1 + tl.full([XBLOCK, 1], 0, tl.int32), tmp3.to(tl.float16))
    tmp5 = tl.where(tmp4 == 0.0, 0.0, tl.div_rn(red1, tmp4))
    tl.store(out2 + tl.full([XBLOCK, 1], 0, tl.int32), tmp5.to(tl.float16))
    tmp6 = tmp2 == tmp0.to(tl.float16).to(tl.float32)
    tl.store(out3 + tl.broadcast_to(rindex, [XBLOCK, RBLOCK]), tmp6, rmask)
    red7 = tl.sum(tl.where(rmask, tmp6.to(tl.int64), tl.full([1, 1], 0, tl.int64)), 1)[:, None].to(tl.int64)
    tl.store(out4 + tl.full([XBLOCK, 1], 0, tl.int32), red7.to(tl.float32).to(tl.float16))
"""


@pytest.mark.skipif(launch.interpreting(), reason="compiles for a GPU")
@pytest.mark.parametrize("fails", [False, True], ids=["this Triton", "one that fails"])
def test_layouts_that_triton_does_not_find(monkeypatch, fails):
    """Triton 3.6 ends with an error at this kernel."""
    import triton
    texts, real = [], triton.compile

    def compile_source(source, **kwargs):
        texts.append(source.fn.src)
        if fails and len(texts) == 1:
            raise RuntimeError("PassManager::run failed")
        return real(source, **kwargs)
    monkeypatch.setattr(triton, "compile", compile_source)
    pointers = {"in0": "*fp16", "out0": "*fp16", "out1": "*fp16", "out2": "*fp16", "out3": "*i1", "out4": "*fp16"}
    task = {"name": "kernel", "key": "0" * 64, "code": EQUAL_TO_THE_LEAST, "signature": pointers, "constants": {"XBLOCK": 1, "RBLOCK": 32},
            "aligned": list(pointers), "num_warps": 1, "arch": 90}
    assert launch.worker.compile_kernel(task)["cubin"][:4] == b"\x7fELF"
    if fails:
        assert [t.count("tl.reshape(tl.") for t in texts] == [0, 2] and "1, nan_min), [XBLOCK, 1]).to(tl.float32)" in texts[1]


@pytest.mark.skipif(launch.interpreting(), reason="compiles for a GPU")
def test_a_product_and_a_sum_are_two_roundings(monkeypatch):
    """As in eager, where they are two operators: no fused multiply-add."""
    b, i = Body(), sym("i0", 1000)
    x = b.load("in0", i.expr)
    b.store("out0", i.expr, b.sub(b.mul(x, x), x))
    text = ptx_of(monkeypatch, b, i, buffer("in0", (1000,)), buffer("out0", (1000,)))
    assert "mul.rn.f32" in text and "sub.rn.f32" in text and "fma" not in text


@pytest.mark.skipif(launch.interpreting(), reason="compiles for a GPU")
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("what", ["sign", "truth minus one", "minus a truth", "chosen"])
def test_a_truth_value_keeps_its_sign_as_a_bfloat16(monkeypatch, what, source):
    """The LLVM of Triton 3.6 makes 1 of -1 where it converts such a number to a bfloat16 by itself."""
    b, i, many = Body(), sym("i0", 1 << 20), (1 << 20,)
    x = b.load("in0", i.expr, dtype=source)
    negative, one, zero = b.lt(x, b.constant(0.0), dtype=torch.bool), b.constant(1, dtype=torch.int32), b.constant(0, dtype=torch.int32)
    number = b.to_dtype(negative, dtype=torch.int32)
    value = {"sign": lambda: b.sign(x), "truth minus one": lambda: b.to_dtype(b.sub(number, one), dtype=torch.float32),
             "minus a truth": lambda: b.to_dtype(b.neg(number), dtype=torch.float32),
             "chosen": lambda: b.to_dtype(b.where(negative, b.constant(-1, dtype=torch.int32), zero), dtype=torch.float32)}[what]()
    b.store("out0", i.expr, value)
    text = ptx_of(monkeypatch, b, i, buffer("in0", many, source), buffer("out0", many, torch.bfloat16))
    assert "cvt.rn.bf16.s32" not in text and "st.global" in text


def test_damaged_cache_file_is_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("MINICOMPILE_CACHE_DIR", str(tmp_path))
    task = launch.make_task(emit_triton(small_kernel()), 90, True)
    os.makedirs(os.path.dirname(task["path"]))
    with open(task["path"], "wb") as f:
        f.write(pickle.dumps({"a": 1})[:-3])
    assert launch.read_result(task) is None and not os.path.exists(task["path"])


def test_kernels_compile_in_the_background_and_are_loaded_at_their_first_call(tmp_path, monkeypatch):
    """As on a GPU, up to the driver: equal kernels are compiled once, and one that the pool refuses is compiled here, which says why."""
    monkeypatch.setenv("MINICOMPILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(launch.torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(launch.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launch.torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(launch, "interpreting", lambda: False)
    monkeypatch.setattr(launch, "launcher", lambda: True)
    monkeypatch.setattr(launch, "make_callable", lambda source, result, device, aligned:
                        lambda *args: (source.name, result["name"], aligned, args))
    tasks, pool = [], launch.Pool()
    monkeypatch.setattr(launch, "compile_pool", lambda: types.SimpleNamespace(
        submit=lambda task: tasks.append(task["key"]) or pool.submit(task)))
    try:
        one, two = emit_triton(small_kernel("one")), emit_triton(small_kernel("two"))
        first, second = launch.load_triton([one, two])
        assert len(tasks) == 1 and first.resolve() is first.resolve()
        assert first(5) == ("one", "one", True, (5,)) and second.resolve()(6) == ("two", "one", True, (6,))
        assert launch.load_triton([one])[0](7)[3] == (7,) and len(tasks) == 1          # it is on disk
        broken = dataclasses.replace(one, code=one.code.replace("tl.load", "tl.lode"))
        with pytest.raises(RuntimeError, match="lode"):
            launch.load_triton([broken])[0](8)
        deadly = dataclasses.replace(one, code="import os, sys\n'pytest' in sys.modules or os.abort()\n" + one.code)
        with pytest.raises(RuntimeError, match="died"):                # and is not compiled here
            launch.load_triton([deadly])[0](9)
    finally:
        pool.process.kill()


def test_the_pool_starts_before_the_first_capture_of_a_program_that_uses_a_gpu(monkeypatch):
    import minicompile
    from minicompile import versions

    order = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", ())
    monkeypatch.setattr(versions, "start_workers", lambda: order.append("start"))
    capture = versions.capture_best
    monkeypatch.setattr(versions, "capture_best", lambda *args: order.append("capture") or capture(*args))
    minicompile.compile(lambda x: x + 1, backend="triton")(torch.ones(3))
    assert order == ["start", "capture"]
    minicompile.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
    assert order == ["start", "capture", "capture"]


def test_the_server_does_not_read_all_of_triton_before_its_first_task(monkeypatch):
    """A hash of Triton's files takes longer than the rest of the server's start."""
    from triton.runtime import cache

    from minicompile.ch09_triton import worker

    def read_all():
        raise AssertionError("Triton's files are read")

    monkeypatch.setattr(cache, "triton_key", read_all)
    worker.leave_out_hash()
    assert cache.triton_key() == ""
