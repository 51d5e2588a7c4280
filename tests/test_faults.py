"""What the world does to a compiler: processes are killed, disks fill up, files are damaged or foreign, memory runs out. After each,
right answers or one clear error, and the next call works."""
import contextlib
import errno
import multiprocessing
import os
import pathlib
import pickle
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
import warnings

import pytest
import torch

import minicompile
from minicompile import cache
from minicompile.ch09_triton import launch
from minicompile.ch10_cpp import build

pytestmark = [pytest.mark.usefixtures("reset"), pytest.mark.processes]
ROOT = pathlib.Path(minicompile.__file__).parents[1]
X = torch.arange(12.0).reshape(3, 4) / 7
SHARED = os.environ.get("MINICOMPILE_CACHE_DIR", "")


def program(x):
    """One kernel, one file."""
    return (x.sin() * 3).relu() + 17.25


def check(f=program, **settings):
    """Compile anew, call twice, compare with eager."""
    minicompile.reset()
    compiled = minicompile.compile(f, **settings)
    for _ in range(2):
        torch.testing.assert_close(compiled(X), f(X))


def warned(function) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(w.message) for w in caught if w.category is RuntimeWarning]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """An empty cache, and nothing loaded from another but the launcher."""
    build._launcher()
    folder = tmp_path / "cache"
    monkeypatch.setenv("MINICOMPILE_CACHE_DIR", str(folder))
    monkeypatch.setattr(cache, "_fallback", None)
    monkeypatch.setattr(build, "_loaded", {})
    return folder


@pytest.fixture
def compilations(monkeypatch):
    """The files that were compiled, not found."""
    made, compile_ = [], build._compile
    monkeypatch.setattr(build, "_compile", lambda text, target: (made.append(target), compile_(text, target)))
    return made


def start(text, folder, **env):
    """A process that has the launcher and runs a script with `program`, `check` and a cache in `folder`."""
    text = "\n".join(["from tests.test_faults import *", "build._launcher()", f"os.environ['MINICOMPILE_CACHE_DIR'] = {str(folder)!r}",
                      textwrap.dedent(text)])
    return subprocess.Popen([sys.executable, "-W", "error::RuntimeWarning", "-c", text], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
                                 "MINICOMPILE_CACHE_DIR": SHARED, **env})


def ended(process) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, f"exit status {process.returncode}\n{out}{err[-3000:]}"
    return out


def files(folder) -> list[pathlib.Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


# ---- entries of the cache ------------------------------------------------------------------------------------------

DAMAGES = {
    "empty": lambda path, data: path.write_bytes(b""),
    "the first page only": lambda path, data: path.write_bytes(data[:4096]),
    "without its last bytes": lambda path, data: path.write_bytes(data[:-100]),
    "a bit": lambda path, data: path.write_bytes(data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]),
    "zeros at the end, as after a loss of power": lambda path, data: path.write_bytes(data[:8192].ljust(len(data), b"\0")),
    "not a library": lambda path, data: path.write_bytes(b"hello" * 100),
    "a directory in its place": lambda path, data: (path.unlink(), path.mkdir()),
    "not readable": lambda path, data: path.chmod(0o333),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_built_again(damage, own_cache, compilations, monkeypatch):
    check()
    (path,) = files(own_cache)
    path, before = path.rename(path.with_suffix(".old")), path         # what is loaded stays as it is
    data = path.read_bytes()
    path.unlink()
    before.write_bytes(data)
    monkeypatch.setattr(build, "_loaded", {})
    check()
    assert len(compilations) == 1, "a whole copy is used"
    DAMAGES[damage](before, data)
    monkeypatch.setattr(build, "_loaded", {})
    texts = warned(check)
    assert len(compilations) in (2, 3) and not [t for t in texts if "cannot be used" not in t]
    monkeypatch.setattr(build, "_loaded", {})
    made = len(compilations)
    check()
    assert len(compilations) == made, "the new entry is whole"


def other(x):
    return (x.cos() * 5).relu() - 1.5


def test_entries_that_were_swapped(own_cache, compilations, monkeypatch):
    """The file of another kernel under this name: its functions have other names, but a file could be renamed to hold the same."""
    check()
    (first,) = files(own_cache)
    check(other)
    (second,) = set(files(own_cache)) - {first}
    one, two = first.read_bytes(), second.read_bytes()
    for path, data in ((first, two), (second, one)):
        path.unlink()
        path.write_bytes(data)
        path.chmod(0o700)
    monkeypatch.setattr(build, "_loaded", {})
    check()
    check(other)
    assert len(compilations) == 4 and cache.read_sealed(first, first.stem) and not cache.read_sealed(first, second.stem)


def test_code_of_another_processor_is_not_found(own_cache, compilations, monkeypatch):
    """The key says what the processor can do: code with AVX-512 ends the process where there is none."""
    read = pathlib.Path.read_text

    def cpuinfo(text):
        build._machine.cache_clear()
        monkeypatch.setattr(build, "_loaded", {})
        monkeypatch.setattr(pathlib.Path, "read_text",
                            lambda path, *rest: text if str(path) == "/proc/cpuinfo" else read(path, *rest))
    try:
        for text in ("model name : A\nflags : avx2 avx512f\n", "model name : A\nflags : avx2\n", "model name : B\nflags : avx2\n"):
            cpuinfo(text)
            check()
        assert len(compilations) == 3 == len(files(own_cache))
        cpuinfo("model name : A\nflags : avx2\nbogomips : 7\n")
        check()
        assert len(compilations) == 3
    finally:
        build._machine.cache_clear()


def test_without_cpuinfo_the_compiler_is_asked(monkeypatch):
    read, flags, keys = pathlib.Path.read_text, list(build.FLAGS), []

    def missing(path, *rest):
        if str(path) == "/proc/cpuinfo":
            raise FileNotFoundError(path)
        return read(path, *rest)
    monkeypatch.setattr(pathlib.Path, "read_text", missing)
    monkeypatch.setattr(build, "cache_key", lambda *parts: keys.append(parts) or cache.cache_key(*parts))
    try:
        for _ in range(2):
            build._machine.cache_clear()
            build._machine()
        assert keys[0] == keys[1] and any("__SSE" in line or "__ARM" in line for line in keys[0][1])
    finally:
        build._machine.cache_clear()
    assert "-march=native" in flags[:3]


def test_another_version_of_the_compiler_has_its_own_entries(own_cache, compilations, monkeypatch, tmp_path):
    wrapper = tmp_path / "cxx"
    wrapper.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "g++ 99.1" && exit 0\nexec {build.compiler()} "$@"\n')
    wrapper.chmod(0o755)
    check()
    monkeypatch.setenv("CXX", str(wrapper))
    monkeypatch.setattr(build, "_loaded", {})
    for memo in (build.compiler, build._machine):
        memo.cache_clear()
    try:
        check()
        assert len(compilations) == 2 == len(files(own_cache))
    finally:
        monkeypatch.undo()
        for memo in (build.compiler, build._machine):
            memo.cache_clear()


@pytest.mark.parametrize("moment", ["while compiling", "before the rename", "half written"])
def test_killed_while_writing(moment, own_cache):
    text = """
        import signal
        def die(*_): os.kill(os.getpid(), signal.SIGKILL)
        compile_ = build._compile
        def half(text, target):
            compile_(text, target)
            target.write_bytes(target.read_bytes()[:5000])
            die()
        moment = %r
        if moment == "while compiling":
            build._compile = die
        elif moment == "half written":
            build._compile = half
        else:
            os.replace = die
        check()
    """ % moment
    for _ in range(2):
        process = start(text, own_cache)
        process.communicate(timeout=120)
        assert process.returncode == -signal.SIGKILL
    left = files(own_cache)
    assert len(left) == 2 and all("-" in p.name for p in left)
    os.utime(left[0], (1, 1))
    check()
    names = [p.name for p in files(own_cache)]
    assert len([n for n in names if "-" in n]) == 1, "what is an hour old was swept away, what may be another's work not"
    assert len(names) == 2


def test_processes_that_compile_the_same_program_at_once(own_cache):
    text = """
        while time.time() < %r: pass
        check()
        print(len(files(pathlib.Path(os.environ["MINICOMPILE_CACHE_DIR"]))))
    """ % (time.time() + 6)
    processes = [start(text, own_cache) for _ in range(3)]
    for process in processes:
        assert int(ended(process)) >= 1
    assert len(files(own_cache)) == 1 and cache.read_sealed(files(own_cache)[0], files(own_cache)[0].stem)


def test_a_cache_that_is_removed_while_the_program_runs(own_cache, compilations, monkeypatch):
    check()
    shutil.rmtree(own_cache)
    monkeypatch.setattr(build, "_loaded", {})
    assert not warned(check) and len(compilations) == 2 == 1 + len(files(own_cache))


# ---- a full disk ---------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("where", ["the file", "its seal", "the directory"])
def test_a_full_disk(where, own_cache, monkeypatch):
    """One warning, a directory in its place, and no half file. (`/dev/full` is what a full disk is to a program.)"""
    full = OSError(errno.ENOSPC, "No space left on device")
    compile_, mkdir, seal = build._compile, pathlib.Path.mkdir, cache.seal

    def fail_here(target):
        if str(own_cache) in str(target):
            raise full

    def compiling(text, target):
        if str(own_cache) in str(target):
            target.unlink()
            target.symlink_to("/dev/full")
        compile_(text, target)

    def sealing(key, data):
        if cache._fallback is None and data:
            raise full
        return seal(key, data)
    if where == "the file":
        monkeypatch.setattr(build, "_compile", compiling)
    elif where == "its seal":
        monkeypatch.setattr(cache, "seal", sealing)
    else:
        own_cache.mkdir(mode=0o700)
        monkeypatch.setattr(pathlib.Path, "mkdir",
                            lambda path, *a, **k: (path.parent == own_cache and fail_here(path), mkdir(path, *a, **k)))
    texts = warned(check)
    assert len(texts) == 1 and "No space left" in texts[0] and "MINICOMPILE_CACHE_DIR" in texts[0], texts
    assert not files(own_cache)
    assert not warned(lambda: check(other)), "the next one works, without a word"


def test_a_disk_that_is_full_for_several_files_at_once(own_cache, monkeypatch):
    def several(x):
        return torch.softmax(x.sin(), -1).sum(0), x.cumsum(0), (x @ x.t()).exp().sum()

    write_sealed, seal, barrier, here = cache.write_sealed, cache.seal, threading.Barrier(2), threading.local()

    def writing(path, key, build):
        here.full = own_cache in path.parents
        return write_sealed(path, key, build)

    def sealing(key, data):
        if data and here.full:
            with contextlib.suppress(threading.BrokenBarrierError):
                barrier.wait(20)
            barrier.abort()
            raise OSError(errno.ENOSPC, "No space left on device")
        return seal(key, data)
    monkeypatch.setattr(cache, "write_sealed", writing)
    monkeypatch.setattr(cache, "seal", sealing)
    texts = warned(lambda: check(several))
    assert len(texts) == 1 and "No space left" in texts[0] and not files(own_cache), texts


# ---- whose code is it? ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("mode, above", [(0o777, False), (0o770, False), (0o1777, False), (0o700, True)])
def test_a_cache_that_others_can_write_is_refused(mode, above, own_cache, compilations):
    own_cache.mkdir(mode=0o700)
    own_cache.chmod(mode)
    if above:
        own_cache.parent.chmod(0o777)
    try:
        texts = warned(check)
        assert len(texts) == 1 and "others can write to it" in texts[0] and "chmod" in texts[0], texts
        assert not files(own_cache) and len(compilations) == 1
        assert cache._fallback.stat().st_mode & 0o077 == 0
        assert not warned(lambda: check(other))
    finally:
        own_cache.parent.chmod(0o700)


def test_the_usual_cache_is_made_private(tmp_path, monkeypatch):
    monkeypatch.delenv("MINICOMPILE_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".cache" / "minicompile"
    folder.mkdir(parents=True)
    folder.chmod(0o775)
    assert not warned(check)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755 and files(folder)
    shutil.rmtree(folder)
    mask = os.umask(0)
    try:
        assert not warned(lambda: check(other))
    finally:
        os.umask(mask)
    assert all(p.stat().st_mode & 0o022 == 0 for p in (folder, *folder.rglob("*")))


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
def test_files_of_another_user_are_not_loaded(own_cache, compilations, monkeypatch):
    check()
    (path,) = files(own_cache)
    os.chown(path, 12345, -1)
    monkeypatch.setattr(build, "_loaded", {})
    check()
    assert len(compilations) == 2 and path.stat().st_uid == os.geteuid()
    os.chown(own_cache, 12345, -1)
    monkeypatch.setattr(build, "_loaded", {})
    texts = warned(check)
    assert len(texts) == 1 and "its owner is user 12345" in texts[0], texts


# ---- the C++ compiler ----------------------------------------------------------------------------------------------

COMPILERS = {
    "fails": "echo 'internal compiler error' >&2; exit 1",
    "is killed": "kill -9 $$",
    "makes nothing": "exit 0",
    "makes nonsense": 'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo nonsense > "$2"; shift; done',
}


@pytest.mark.parametrize("behaviour", COMPILERS)
def test_a_compiler_that_fails_and_then_works(behaviour, own_cache, monkeypatch, tmp_path):
    """The interpreter runs the kernel, with one warning; the next program, and this one after a reset, get kernels."""
    broken, real = tmp_path / "cxx", build.compiler()
    broken.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "g++ 1.0" && exit 0\n'
                      f'[ -e {tmp_path}/mended ] && exec {real} "$@"\ncat > /dev/null\n{COMPILERS[behaviour]}\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    for memo in (build.compiler, build._machine):
        memo.cache_clear()
    try:
        compiled = minicompile.compile(program)
        texts = warned(lambda: torch.testing.assert_close(compiled(X), program(X)))
        assert len(texts) == 1 and "could not be built" in texts[0], texts
        (tmp_path / "mended").write_text("")
        assert not warned(lambda: check(other)) and not warned(check)
        assert [p for p in files(own_cache) if "-" not in p.name and cache.read_sealed(p, p.stem)]
    finally:
        monkeypatch.undo()
        for memo in (build.compiler, build._machine):
            memo.cache_clear()


def test_a_program_that_ignores_its_children():
    """With SIGCHLD ignored nobody learns how a compiler ended."""
    old = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        check()
        check(other)
    finally:
        signal.signal(signal.SIGCHLD, old)


def test_interrupted_while_a_kernel_is_built(monkeypatch):
    """Ctrl-C, which the compiler gets as well: the call ends, and the next one builds again."""
    compile_, calls = build._compile, []

    def slow(text, target):
        calls.append(1)
        if len(calls) > 1:
            return compile_(text, target)
        time.sleep(1.0)
        raise RuntimeError("the C++ compiler was interrupted")
    monkeypatch.setattr(build, "_compile", slow)

    def interrupt(*_):
        raise KeyboardInterrupt
    old = signal.signal(signal.SIGALRM, interrupt)
    compiled = minicompile.compile(program)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            compiled(X)
            time.sleep(5)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    warned(lambda: torch.testing.assert_close(compiled(X), program(X)))
    assert not warned(check) and len(calls) == 2


# ---- the compile server of Triton ----------------------------------------------------------------------------------

TASK = dict(name="kernel", code="import triton\nimport triton.language as tl\n\n@triton.jit\ndef kernel(a, b, XBLOCK: tl.constexpr):\n"
            "    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)\n    tl.store(b + i, tl.load(a + i, i < 100), i < 100)\n",
            signature={"a": "*fp32", "b": "*fp32"}, constants={"XBLOCK": 128}, aligned=["a", "b"], num_warps=4, arch=90)


def test_the_compile_server_is_killed(tmp_path, monkeypatch):
    """Whoever waits is told, and so is who asks later; the next one starts another server."""
    pytest.importorskip("triton")
    monkeypatch.setattr(launch, "_pool", None)
    task = TASK | dict(key="0123456789abcdef", path=str(tmp_path / "01" / "0123456789abcdef.cubin"))
    first = launch.compile_pool()
    try:
        waits = [first.submit(task | {"key": f"{n:016x}", "path": str(tmp_path / f"{n:016x}")}) for n in range(3)]
        os.kill(first.process.pid, signal.SIGKILL)
        assert all(launch.ENDED in wait() for wait in waits) and not first.waiting
        first.process.wait()
        assert launch.ENDED in first.submit(task)()
        second = launch.compile_pool()
        assert second is not first and second.submit(task)() == "" and not second.waiting
        result = launch.read_result(task)
        assert result["cubin"][:4] == b"\x7fELF"
        with open(task["path"], "r+b") as file:
            file.truncate(500)
        assert launch.read_result(task) is None and not os.path.exists(task["path"])
        second.process.kill()
    finally:
        first._close()


def test_a_result_of_another_kernel_is_not_read(tmp_path):
    result = {"cubin": b"", "name": "kernel"}
    path = str(tmp_path / "ab")
    def write(key):
        cache.write_sealed(pathlib.Path(path), key, lambda file: file.write_bytes(pickle.dumps(result)))
    write("key of another")
    assert launch.read_result({"path": path, "key": "mine"}) is None
    write("mine")
    assert launch.read_result({"path": path, "key": "mine"}) == result


# ---- processes -----------------------------------------------------------------------------------------------------

class Doubled(torch.utils.data.Dataset):
    """Compiles in the worker what the parent has compiled, too."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        compiled = minicompile.compile(program)
        return compiled(X + i), program(X + i)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader(method, own_cache):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(method)
    text = """
        if __name__ == "__main__":
            check()
            for epoch in range(2):
                loader = torch.utils.data.DataLoader(Doubled(), batch_size=4, num_workers=2, multiprocessing_context=%r)
                for got, expected in loader:
                    torch.testing.assert_close(got, expected)
            check(other)
            print("ok")
    """ % method
    assert ended(start(text, own_cache)) == "ok\n"


def test_fork_while_another_thread_compiles(own_cache):
    """The child has neither that thread nor what it would have finished."""
    text = """
        started, go_on = threading.Event(), threading.Event()
        compile_ = build._compile
        def slow(text, target):
            started.set()
            go_on.wait(20)
            compile_(text, target)
        build._compile = slow
        thread = threading.Thread(target=check)
        thread.start()
        started.wait()
        pid = os.fork()
        if pid == 0:
            build._compile = compile_
            check()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        go_on.set()
        thread.join()
        print("ok")
    """
    assert ended(start(text, own_cache)) == "ok\n"


# ---- out of memory -------------------------------------------------------------------------------------------------

class Weight(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64, 64))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return (x @ self.weight).relu(), x.sum() + self.calls


@pytest.mark.parametrize("at", range(1, 4))
def test_out_of_memory_in_the_middle_of_a_program(at, monkeypatch):
    """Simulated: the n-th allocation of a call fails. The caller gets that error, and the next call is right."""
    from minicompile.ch11_runtime import host
    model, x = Weight(), torch.randn(8, 64)
    allocate, countdown = torch.empty_strided, [0]

    def failing(*args, **kwargs):
        countdown[0] -= 1
        if countdown[0] == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return allocate(*args, **kwargs)
    monkeypatch.setattr(host, "allocate", failing)
    compiled = minicompile.compile(model, fullgraph=True)
    for call in range(4):
        calls = model.calls.item()
        countdown[0] = at if call == 2 else 0
        try:
            y, total = compiled(x)
        except torch.OutOfMemoryError:
            assert call == 2
            continue
        torch.testing.assert_close((y, total), ((x @ model.weight).relu(), x.sum() + calls + 1))


def test_out_of_memory_in_a_replay_leaves_no_trace(monkeypatch):
    """What a replay hands out is allocated before it writes anything."""
    from tests.ch11_runtime.test_cudagraphs import group
    f = group("cpu").wrap(lambda a: [a[0].add_(1) * 2], mutated=[0])
    x, allocate = torch.ones(3), torch.empty_strided
    kept = [f([x]) for _ in range(6)]          # what the caller holds is copied, and not lent
    assert f.counts["replayed"] >= 2

    def failing(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")
    before, version = x.clone(), x._version
    monkeypatch.setattr(torch, "empty_strided", failing)
    args = [x]
    with pytest.raises(torch.OutOfMemoryError):
        f(args)
    assert torch.equal(x, before) and x._version == version
    monkeypatch.setattr(torch, "empty_strided", allocate)
    assert torch.equal(f([x])[0], (before + 1) * 2) and torch.equal(x, before + 1)
    assert [k[0][0].item() for k in kept] == [4, 6, 8, 10, 12, 14]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_out_of_memory_on_a_gpu(mode):
    """The memory that a call needs is taken by the program: an OutOfMemoryError, and when it is given back, right answers."""
    def f(x, w):
        return (x @ w).relu().exp().cumsum(0), x.sum(0)

    x, w = torch.randn(4096, 4096, device="cuda"), torch.randn(4096, 4096, device="cuda") / 64
    compiled = minicompile.compile(f, mode=mode)
    expected = f(x, w)
    for _ in range(3):
        torch.testing.assert_close(compiled(x, w), expected, rtol=1e-3, atol=1e-3)
    kept = compiled(x, w)            # what a caller holds, a CUDA graph cannot lend again without memory for a copy
    torch.cuda.empty_cache()
    hoard = []
    size = 1 << 32
    while size >= 1 << 20:
        try:
            hoard.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            compiled(x, w)
    hoard.clear()
    torch.cuda.empty_cache()
    for _ in range(3):
        torch.testing.assert_close(compiled(x, w), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(kept, expected, rtol=1e-3, atol=1e-3)
