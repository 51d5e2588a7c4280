"""Compiling, loading, caching, threads and call cost."""
import gc
import os
import platform
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import minicompile.cache as cache
from minicompile.ch01_graphs.symbolic import Symbol
from minicompile.ch10_cpp import build
from minicompile.ch10_cpp.emit import emit_cpp
from minicompile.errors import MinicompileError

from .kernels import Body, kernel, variables
from .pipeline import compile_cpp


def scaled(size, factor, name="kernel0"):
    x, y = torch.arange(float(size)), torch.empty(size)
    i = variables("i", size)
    b = Body()
    b.store("y", i[0].expr, b.mul(b.load("x", i[0].expr, torch.float32),
                                  b.constant(factor, dtype=torch.float32)))
    return emit_cpp(kernel(i, (), [(i, (), b)], {"x": x}, {"y": y}, name=name)), x, y


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    """An empty cache, nothing loaded from another but the launcher."""
    build._launcher()
    monkeypatch.setenv("MINICOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(cache, "_fallback", None)
    return tmp_path / "cache"


def test_equal_kernels_are_compiled_once(fresh_cache):
    (a, x, y), (b, _, _), (c, _, _) = scaled(8, 3.0, "first"), scaled(8, 3.0, "second"), scaled(8, 4.0,
                                                                                                "third")
    f, g, h = build.load_cpp([a, b, c])
    assert f.resolve() is g.resolve() and f.resolve() is not h.resolve()
    h(x, y)
    assert torch.equal(y, x * 4)


def test_library_is_found_on_disk_and_rebuilt_when_damaged(fresh_cache, monkeypatch):
    source, x, y = scaled(9, 5.0)
    build.load_cpp([source])[0].resolve()
    assert len(list(fresh_cache.rglob("*.so"))) == 1
    monkeypatch.setattr(build, "_loaded", {})
    calls = []
    compile_ = build._compile
    monkeypatch.setattr(build, "_compile", lambda *a: (calls.append(1), compile_(*a)))
    build.load_cpp([source])[0].resolve()
    assert not calls
    source, x, y = scaled(9, 5.5)
    find = build.disk_cache

    def damaged(key, suffix, make, rebuild=False):
        if not rebuild:
            path = cache.cache_dir() / key[:2] / (key + suffix)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"\x7fELF damaged")
        return find(key, suffix, make, rebuild=rebuild)
    monkeypatch.setattr(build, "disk_cache", damaged)
    build.load_cpp([source])[0](x, y)
    assert calls and torch.equal(y, x * 5.5)


@pytest.mark.parametrize("damage", [None, "file", "no link", "link to nothing", "link to another", "no links here"])
def test_a_kernel_is_found_next_to_which_others_it_was_compiled(damage, fresh_cache, monkeypatch):
    """Each file that is compiled is of those kernels that no file of the cache has."""
    made, compile_ = [], build._compile
    monkeypatch.setattr(build, "_compile", lambda text, target: (made.append(text.count('extern "C" void mc_')), compile_(text, target)))
    monkeypatch.setattr(build, "cores", lambda: 1)
    if damage == "no links here":
        def refuse(*_):
            raise PermissionError("no links here")
        monkeypatch.setattr(Path, "symlink_to", refuse)

    def answers(*factors):
        monkeypatch.setattr(build, "_loaded", {})
        del made[:]
        programs = [scaled(9, factor) for factor in factors]
        for (source, x, y), factor, function in zip(programs, factors, build.load_cpp([source for source, _, _ in programs])):
            function(x, y.zero_())
            assert torch.equal(y, x * factor)
        return sorted(made)

    assert answers(2.0, 3.0, 5.0) == [3]
    link = next(path for path in sorted(fresh_cache.rglob("*.so")) if path.is_symlink() or damage == "no links here")
    if damage == "file":
        path = link.resolve()
        data = path.read_bytes()
        path.unlink()                                                    # what is loaded stays as it is
        path.write_bytes(data[:-100])
    elif damage in ("no link", "link to nothing", "link to another"):
        answers(7.0)
        alone, = (path for path in fresh_cache.rglob("*.so") if not path.is_symlink() and path != link.resolve())
        link.unlink()
        if damage != "no link":
            link.symlink_to(alone if damage == "link to another" else "../00/nothing.so")
    again = {None: [1], "file": [1, 3], "no link": [2], "no links here": [4]}.get(damage, [1, 1])
    assert answers(3.0, 11.0, 2.0, 5.0) == again
    assert answers(5.0, 11.0) == ([2] if damage == "no links here" else [])


def preprocessed(text) -> str:
    command = [build.compiler(), *build._flags(), "-E", "-P", "-x", "c++", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def declarations(text) -> dict[str, list[str]]:
    """What stands outside of all braces, by the names of functions and types that it declares."""
    outside = text
    while (shorter := re.sub(r"\{[^{}]*\}", ";", outside)) != outside:
        outside = shorter
    outside = re.sub(r"__(attribute|asm)__ ?\((\((simd\(\"\w+\"\)|[^()])*\)|[^()]*)\)", "", outside)
    found = {}
    for head in outside.split(";"):
        for name in re.findall(r"\bmc_\w+|\w+(?=\()", head.partition(")")[0]):
            found.setdefault(name, []).append(" ".join(head.split()))
    return found


def test_a_kernel_has_all_that_is_declared_under_a_name_that_it_uses():
    """Without `mc_exp` of a double, that of a float would take its argument, rounded; without glibc's vectors, `exp` takes one number."""
    everything = declarations(preprocessed(build._companions()))
    assert {len(everything[name]) for name in ("mc_exp", "mc_sigmoid", "mc_copysign")} == {2} and "mc_widen_few_bf16" in everything
    libraries, seen = {"exp", "expf", "pow", "powf", "atan2f"} & everything.keys(), {}
    for name in {name for name in everything if name.startswith("mc_") and not name.startswith("mc_libm")} | libraries:
        code = f"auto x = {'__builtin_' * (name in libraries)}{name}(1);"
        text = build._companions_of(code)
        if text not in seen:
            seen[text] = declarations(preprocessed(text))
            subprocess.run([build.compiler(), *build._flags(), "-fsyntax-only", "-x", "c++", "-"], input=text, text=True, check=True)
        assert seen[text][name] == everything[name], name
    assert len(seen) > 10 and len(build._companions_of("x + 1")) < 0.1 * len(build._companions())


def test_the_launcher_is_a_file_of_its_own_and_built_again_when_damaged(fresh_cache, monkeypatch):
    source, x, y = scaled(9, 6.5)
    made, compile_ = [], build._compile
    monkeypatch.setattr(build, "_compile", lambda text, target: (made.append("mc_launch" in text), compile_(text, target)))
    build._launcher.cache_clear()
    build.load_cpp([source, scaled(9, 6.75)[0]])[0](x, y)
    assert torch.equal(y, x * 6.5) and made.count(True) == 1
    text = build._companions() + build._text("launch.cpp")
    path, = (p for p in fresh_cache.rglob("*.so") if p.stem == cache.cache_key(text, build._machine()))
    for damage, count in ((lambda data: data, 1), (lambda data: data[:-100], 2), (lambda data: b"", 3)):
        data = path.read_bytes()
        path.unlink()                                                    # what is loaded stays as it is
        path.write_bytes(damage(data))
        build._launcher.cache_clear()
        monkeypatch.setattr(build, "_loaded", {})
        build.load_cpp([source])[0](x, y.zero_())
        assert torch.equal(y, x * 6.5) and made.count(True) == count


def test_a_library_is_closed_with_the_last_of_its_functions(fresh_cache):
    sources = [scaled(9, factor)[0] for factor in (7.5, 7.75)]
    text = build._file_text([(*build._named(s), s) for s in sources])
    build._compile(text, path := fresh_cache.parent / "two.so")

    def function(number):
        name = build._named(sources[number])[0]
        return name, build._launcher()(os.fsencode(path), name.encode(), 2, 0, 0, torch._C.TensorBase.data_ptr, None)

    def is_open():
        return str(path) in Path("/proc/self/maps").read_text()
    (name, first), (_, second) = function(0), function(1)
    x, y = torch.arange(9.0), torch.empty(9)
    assert first.__name__ == name and first != second
    del first
    second(x, y)
    assert torch.equal(y, x * 7.75) and is_open()
    cycle = [second]
    cycle.append(cycle)
    del second, cycle
    gc.collect()
    assert not is_open()
    with pytest.raises(OSError, match="no_such_kernel"):
        build._launcher()(os.fsencode(path), b"no_such_kernel", 2, 0, 0, torch._C.TensorBase.data_ptr, None)
    assert not is_open()


def test_a_small_kernel_keeps_the_lock_and_asks_any_tensor_for_its_memory():
    class Shifted(torch.Tensor):
        def data_ptr(self):
            return super().data_ptr() + 4

    (source, _, y), (large, _, _) = scaled(8, 2.5), scaled(5000, 2.5)
    assert source.options["small"] and not large.options["small"]
    kernel = build.load_cpp([source])[0].resolve()
    kernel(torch.arange(9.0).as_subclass(Shifted), y)
    assert torch.equal(y, torch.arange(1.0, 9) * 2.5)
    for wrong in (None, [1.0], torch.eye(2).to_sparse()):
        with pytest.raises((AttributeError, TypeError, RuntimeError)):
            kernel(wrong, y)


def test_cache_directory_that_cannot_be_used(tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("MINICOMPILE_CACHE_DIR", str(blocked / "below"))
    monkeypatch.setattr(cache, "_fallback", None)
    monkeypatch.setattr(build, "_loaded", {})
    source, x, y = scaled(10, 6.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build.load_cpp([source])[0](x, y)
        build.load_cpp([scaled(10, 7.0)[0]])[0].resolve()
    assert torch.equal(y, x * 6)
    assert len([w for w in caught if "MINICOMPILE_CACHE_DIR" in str(w.message)]) == 1


def test_missing_compiler_names_the_way_out(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    build.compiler.cache_clear()
    try:
        with pytest.raises(MinicompileError, match="no-such-compiler was not found. Install g"):
            build.load_cpp([scaled(8, 2.0)[0]])
    finally:
        build.compiler.cache_clear()


def test_wrong_number_of_arguments(fresh_cache):
    source, x, y = scaled(8, 2.5)
    f = build.load_cpp([source])[0].resolve()
    with pytest.raises(TypeError, match="takes 2 arguments, got 1"):
        f(x)


def test_linking_reads_no_library_of_c(fresh_cache):
    """It takes as long as the rest of linking, and each process has one."""
    if not build._openmp():
        pytest.skip("the compiler links what it always does")
    build.load_cpp([scaled(8, 2.25)[0]])[0].resolve()
    library, = fresh_cache.rglob("*.so")
    assert b"libc.so" not in library.read_bytes()


@pytest.mark.parametrize("size", [20_000, 400_000])
def test_sizes_that_vary_need_a_team_for_much_work_only(fresh_cache, size):
    """Also called from a region of somebody else, each element is computed: no loop is shared among the threads there."""
    n, x = Symbol("n", None, 2), torch.randn(size)
    i, b = (Symbol("i0", n.expr),), Body()
    b.store("y", i[0].expr, b.add(b.load("y", i[0].expr, torch.float32), b.load("x", i[0].expr, torch.float32)))
    y = torch.zeros(size)
    source = emit_cpp(kernel(i, (), [(i, (), b)], {"x": x}, {"y": y}, name="inside", symbols=(n,)))
    region = [source.code, 'extern "C" void outside(void** pointers, const int64_t* sizes, mc_problem* problem) {',
              "#pragma omp parallel num_threads(2)", "#pragma omp single", "inside(pointers, sizes, problem);", "}"]
    plain, nested = build.load_cpp([source, replace(source, name="outside", code="\n".join(region))])
    for k, function in enumerate((plain, nested), 1):
        function(x, y, size)
        assert torch.equal(y, k * x)


@pytest.mark.processes
def test_there_is_one_openmp_runtime_and_it_obeys_set_num_threads():
    script = """
import sys, torch
torch.set_num_threads(2)
from tests.ch10_cpp.test_build import scaled, build
source, x, y = scaled(1 << 20, 2.0)
assert "omp parallel" in source.code
build.load_cpp([source])[0](x, y)
assert torch.equal(y, x * 2)
maps = open("/proc/self/maps").read()
runtimes = {line.split()[-1] for line in maps.splitlines() if "omp.so" in line or "iomp5" in line}
assert len(runtimes) == 1, runtimes
import os
before = len(os.listdir("/proc/self/task"))
torch.set_num_threads(1)
build.load_cpp([source])[0](x, y)
assert len(os.listdir("/proc/self/task")) <= before
"""
    root = Path(build.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "2"})
    assert done.returncode == 0, done.stderr


def vectorised(source) -> str:
    """What g++ says of the loops that it has made vectors of."""
    text = build._file_text([(*build._named(source), source)])
    command = [build.compiler(), *build._flags(), "-fopt-info-vec-optimized", "-x", "c++", "-", "-o", os.devnull]
    return subprocess.run([c for c in command if c != "-w"], input=text, capture_output=True, text=True).stderr


@pytest.mark.skipif(platform.machine() != "x86_64" or build._glibc() < 235, reason="asks for the vectors of glibc 2.35 for x86")
@pytest.mark.parametrize("names, dtype", [("exp log tanh erf sin cosh pow sigmoid", torch.float64),
                                          ("tan asin sinh atanh erfc atan2 hypot pow", torch.float32)])
def test_functions_of_libm_are_called_for_vectors(names, dtype, fresh_cache):
    if "clang" in build.compiler():
        pytest.skip("asks g++ what it has vectorised")
    x, y = torch.rand(512, dtype=dtype), torch.empty(512, dtype=dtype)
    for name in names.split():
        i, b = variables("i", 512), Body()
        v = b.load("x", i[0].expr, dtype)
        b.store("y", i[0].expr, getattr(b, name)(*[v, v][:2 if name in ("pow", "atan2", "hypot") else 1]))
        told = vectorised(emit_cpp(kernel(i, (), [(i, (), b)], {"x": x}, {"y": y})))
        assert "loop vectorized" in told, name


def test_clamped_bytes_are_made_in_vectors(fresh_cache):
    """What becomes of `max`, `min` and a cast must stay straight-line code: g++ has made branches of it."""
    if "clang" in build.compiler():
        pytest.skip("asks g++ what it has vectorised")
    x, y, i, b = torch.randn(512), torch.empty(512, dtype=torch.int8), variables("i", 512), Body()
    value = b.round(b.load("x", i[0].expr, torch.float32))
    low, high = (b.constant(number, dtype=torch.float32) for number in (-128.0, 127.0))
    value = b.minimum(b.maximum(value, low), high)
    b.store("y", i[0].expr, b.to_dtype(value, torch.int8))
    told = vectorised(emit_cpp(kernel(i, (), [(i, (), b)], {"x": x}, {"y": y})))
    assert "loop vectorized" in told, told


@pytest.mark.skipif(platform.machine() != "x86_64", reason="looks at the conversions that x86 has")
@pytest.mark.parametrize("given, wanted", [(torch.int64, torch.float32), (torch.int64, torch.float64), (torch.int64, torch.bfloat16),
                                           (torch.float32, torch.int64), (torch.float64, torch.int64)])
def test_int64_and_floats_become_each_other_in_vectors(given, wanted, fresh_cache):
    """AVX2 has no instruction for it, so that g++ made no vectors of all that stands in the loop."""
    if "clang" in build.compiler():
        pytest.skip("asks g++ what it has vectorised")
    x, y, i, b = torch.ones(512, dtype=given), torch.empty(512, dtype=wanted), variables("i", 512), Body()
    b.store("y", i[0].expr, b.to_dtype(b.load("x", i[0].expr, given), wanted))
    told = vectorised(emit_cpp(kernel(i, (), [(i, (), b)], {"x": x}, {"y": y})))
    assert "loop vectorized" in told, told


@pytest.mark.parametrize("function", [torch.tanh, torch.nn.functional.gelu, torch.nn.functional.silu])
def test_a_variance_of_columns_of_a_long_function_is_made_in_vectors(function, fresh_cache):
    """g++ has made branches of a select that differs from column to column, and then took ten times as long."""
    if "clang" in build.compiler():
        pytest.skip("asks g++ what it has vectorised")
    _, (source,) = compile_cpp(lambda x: torch.var(function(x), 0), torch.randn(100, 512))
    lines = build._file_text([(*build._named(source), source)]).splitlines()
    step = next(k for k, line in enumerate(lines) if line.strip().startswith("mc_column_welford"))
    loop = next(k for k in range(step, 0, -1) if "#pragma omp simd" in lines[k])
    lines = [int(line.split(":")[1]) - 1 for line in vectorised(source).splitlines()]
    assert any(loop < line <= step for line in lines), lines


def test_clang_is_given_no_flags_that_it_refuses(monkeypatch):
    for name, given in (("/usr/bin/clang++-17", False), ("/usr/bin/g++", True)):
        monkeypatch.setattr(build, "compiler", lambda name=name: name)
        monkeypatch.setattr(build, "_openmp", lambda: ())               # which is asked once per process, about another compiler
        seen = []
        done = subprocess.CompletedProcess((), 0, "", "")
        monkeypatch.setattr(build.subprocess, "run", lambda command, seen=seen, done=done, **rest: seen.append(command) or done)
        build._compile("", Path("x.so"))
        assert ("-fno-tree-pre" in seen[0], "-fno-thread-jumps" in seen[0]) == (given, given)


def test_a_half_relu_and_its_mask_are_made_in_vectors(fresh_cache):
    """g++ has made branches of the two selects on one comparison, and then took a hundred times as long."""
    if "clang" in build.compiler():
        pytest.skip("asks g++ what it has vectorised")
    dtype = torch.bfloat16
    x, y, mask = torch.randn(512, dtype=dtype), torch.empty(512, dtype=dtype), torch.empty(512, dtype=torch.bool)
    i, b = variables("i", 512), Body()
    zero = b.constant(0.0, dtype=torch.float32)
    value = b.maximum(b.to_dtype(b.load("x", i[0].expr, dtype), torch.float32), zero)
    b.store("y", i[0].expr, value)
    b.store("mask", i[0].expr, b.le(value, zero, dtype=torch.bool))
    told = vectorised(emit_cpp(kernel(i, (), [(i, (), b)], {"x": x}, {"y": y, "mask": mask})))
    assert "loop vectorized" in told, told


def assembly(source) -> str:
    """What g++ makes of a kernel; skips on a processor without AVX-512."""
    flags = [f for f in build._flags() if f != "-shared"]

    def told(*more, text=""):
        return subprocess.run([build.compiler(), *flags, *more, "-x", "c++", "-", "-o", "-"], input=text, capture_output=True, text=True,
                              check=True).stdout
    if "__AVX512F__" not in told("-dM", "-E"):
        pytest.skip("needs AVX-512")
    return told("-S", text=build._companions() + source.code)


def test_vectors_are_as_wide_as_the_processor_has_them():
    assert "%zmm" in assembly(scaled(4096, 3.0)[0])


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_what_a_cast_to_half_reads_does_not_go_through_memory_again(half):
    if "clang" in build.compiler():
        pytest.skip("asks for what g++ makes")
    x, y, i, b = torch.randn(4096), torch.empty(4096, dtype=half), variables("i", 4096), Body()
    b.store("y", i[0].expr, b.load("x", i[0].expr, torch.float32))
    text = assembly(emit_cpp(kernel(i, (), [(i, (), b)], {"x": x}, {"y": y})))
    assert "%zmm" in text and "(%rsp)" not in text and "memcpy" not in text, text
