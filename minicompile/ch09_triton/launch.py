# %% [markdown]
# # Loading and launching
#
# Between a kernel's text and its first launch stands Triton's compiler, and between the host program and
# each launch stands Python. Both would cost more than the kernels do.
#
# Compiling: the training step of a GPT of six layers (nanoGPT's, with dropout, in bfloat16) has 42 different kernels, and Triton takes
# 30 to 210 ms of a processor for each. Results are cached on disk
# under a hash of the text, the options, the target and Triton's version; what is missing goes to a pool of
# processes (`worker.py`) that starts in the background when compilation begins. This process does not even
# import Triton.
#
# Launching: `JITFunction.run` inspects every argument to choose a specialisation, about 20 microseconds.
# Here the specialisation is known: sizes are in the text, and pointers are assumed to be 16-byte aligned,
# which one bit-mask checks. `launcher.c` turns a compiled kernel into a callable of about 2 microseconds.
# It also spares compile time, since Triton builds a C extension per kernel signature for the same purpose.

# %%
import atexit
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import itertools
import linecache
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import threading
from array import array
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Callable

import torch

from ..cache import cache_dir, cache_key, disk_cache, read_sealed
from ..ch08_fusion.kernel import KernelSource, LazyKernel
from . import worker


def interpreting() -> bool:
    """True where kernels run in Triton's Python interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"

# %% [markdown]
# ## Without the fast path
#
# The plain way to run a kernel is to define its `@triton.jit` function here and call it. Triton's
# interpreter needs this, and it is what is left when there is no C compiler or the pool fails. The text
# goes to `linecache`, where Triton's compiler looks for a function's source.

# %%
def jit_function(source: KernelSource):
    """The `@triton.jit` function of a kernel's text."""
    # The interpreter reads the text at the first launch: kernels of one name (every graph has a first) differ
    filename = f"<minicompile {source.name} {hashlib.sha256(source.code.encode()).hexdigest()[:12]}>"
    linecache.cache[filename] = (len(source.code), None, source.code.splitlines(True), filename)
    namespace = {"__name__": f"minicompile_{source.name}"}
    exec(compile(source.code, filename, "exec"), namespace)
    if interpreting():
        from .interpreted import InterpretedLibdevice, repair
        repair()
        library = InterpretedLibdevice()
        namespace |= {"libdevice": library, "exp2_float": library.exp2, "rsqrt_float": library.rsqrt}
    return namespace[source.name]


def pointer_names(source: KernelSource) -> list[str]:
    return [name for name, kind in source.options["signature"].items() if kind.startswith("*")]


def symbol_names(source: KernelSource) -> list[str]:
    return [name for name, kind in source.options["signature"].items() if not kind.startswith("*")]


def grid_function(source: KernelSource) -> Callable[..., int]:
    """The number of programs, given the size symbols."""
    return eval(f"lambda {', '.join(symbol_names(source))}: {source.options['grid']}")


def load_plain(source: KernelSource) -> Callable:
    """The kernel by way of Triton's own launcher."""
    function, grid, pointers = jit_function(source), grid_function(source), len(pointer_names(source))
    options = dict(source.options["constants"])
    if not interpreting():
        options |= {"num_warps": source.options["num_warps"], **worker.TRITON_OPTIONS}

    def run(*args):
        programs = grid(*args[pointers:])
        if programs:
            with contextlib.nullcontext() if interpreting() else worker.repairs():
                function[(programs,)](*args, **options)
    return run

# %% [markdown]
# ## The pool
#
# One server process, as many compiling children as there are cores. A reader thread turns result lines into
# results of futures.

# %%
ENDED = "the compile server ended"


# %% [markdown]
# A task is pickled, with its length in front, and written to the server's standard input; the server answers with
# one line per task on its standard output, in any order. So each task has a number, and `waiting` maps it to a
# future. If the server dies, its output ends, and everybody who waits is told so. A process that forks must not
# share these pipes with its parent, so a child forgets the pool and starts its own when it needs one.

# %%
class Pool:
    """Compiles tasks in other processes."""

    def __init__(self):
        slots = max(1, min(len(os.sched_getaffinity(0)), 32))
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        command = [sys.executable, "-P", "-u", worker.__file__, str(slots)]
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE)
        self.numbers, self.lock, self.ended = itertools.count(), threading.Lock(), False
        self.waiting: dict[int, Future] = {}
        threading.Thread(target=self._read, name="minicompile-answers", daemon=True).start()
        atexit.register(self._close)

    def _close(self):
        with contextlib.suppress(OSError):        # it was killed
            self.process.stdin.close()

    def _read(self):
        for line in self.process.stdout:
            number, _, message = line.decode(errors="replace").strip().partition(" ")
            self.waiting.pop(int(number)).set_result(message)
        with self.lock:                           # the server is gone: nobody will answer what is open
            while self.waiting:
                self.waiting.popitem()[1].set_result(ENDED)
            self.ended = True

    def submit(self, task: dict) -> Callable[[], str]:
        """Start a task. The function returned waits for it and gives an error text, '' if the result is
        there."""
        with self.lock:
            if self.ended or self.process.poll() is not None:
                return lambda: ENDED
            number, answer = next(self.numbers), Future()
            self.waiting[number] = answer
            data = pickle.dumps(task | {"number": number})
            try:
                self.process.stdin.write(struct.pack("<Q", len(data)) + data)
                self.process.stdin.flush()
            except (OSError, ValueError):
                return lambda: ENDED
        return answer.result


_pool: Pool | None = None
_launcher: list = []


def _forget_workers() -> None:
    """A forked child must not talk to its parent's compile processes; it starts its own."""
    global _pool, _launcher_lock
    _pool, _launcher_lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget_workers)


def compile_pool() -> Pool:
    global _pool
    if _pool is None or _pool.process.poll() is not None:
        _pool = Pool()
    return _pool


def start_workers() -> None:
    """Start the compile processes and build the launcher, in the background, when the first compilation
    starts."""
    if interpreting() or _pool is not None or not torch.cuda.is_available():
        return
    compile_pool()
    threading.Thread(target=launcher, name="minicompile-launcher", daemon=True).start()

# %% [markdown]
# ## Compiled kernels on disk
#
# What a worker is told is a *task*, a dictionary of plain values, since it goes through a pipe. Its `key` is also the name of the file that
# the worker writes and this process reads. The key leaves out what does not change the binary: comments and the kernel's name. So
# twelve equal layers, on twelve lines of the user's file, share one binary. For `torch.relu(x) + 1` on 1000 numbers, the parts that
# are not text, and what the key says of a kernel that is the same but for its name, and of one with other blocks:
#
#     signature     {'in0': '*fp32', 'out0': '*fp32'}
#     constants     {'XBLOCK': 128}
#     num_warps     2
#     aligned       ['in0', 'out0']
#     another name: the same key
#     another XBLOCK: another key

# %%
def make_task(source: KernelSource, arch: int, aligned: bool) -> dict:
    """What a worker needs. `aligned`: assume that all pointers are multiples of 16 bytes."""
    options = source.options
    text = re.sub(r"  # .*$", "", source.code, flags=re.M)
    anonymous = re.sub(rf"\b{re.escape(source.name)}\b", "kernel", text)
    settings = (sorted(options["signature"].items()), sorted(options["constants"].items()),
                options["num_warps"], arch, aligned)
    key = cache_key("triton", anonymous, settings, triton_version(), sorted(worker.TRITON_OPTIONS.items()), worker.REPAIRS)
    return dict(name=source.name, key=key, code=text, signature=options["signature"],
                constants=options["constants"], num_warps=options["num_warps"], arch=arch,
                aligned=pointer_names(source) if aligned else [],
                path=str(cache_dir() / key[:2] / f"{key}.cubin"))


def triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def read_result(task: dict) -> dict | None:
    """The cached result, or None. A damaged file is removed."""
    data = read_sealed(task["path"], task["key"])
    if data is None:
        with contextlib.suppress(OSError):
            os.unlink(task["path"])
    return data and pickle.loads(data)

# %% [markdown]
# ## The launcher
#
# The launcher is a file in C. It is compiled once for a machine and a version of Python, kept in the cache, and
# loaded as an extension module. `cubin` is the machine code that Triton has produced.

# %%
def build_launcher(path: Path) -> None:
    """Compile `launcher.c` to the shared library `path`; raises RuntimeError with the reason."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("no C compiler")
    source = Path(__file__).with_name("launcher.c")
    done = subprocess.run([*compiler.split(), "-O2", "-shared", "-fPIC", "-I", sysconfig.get_path("include"),
                           str(source), "-o", str(path), "-ldl"], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-400:])


_launcher_lock = threading.Lock()


def launcher():
    """The module of `launcher.c`, built once per machine; None where it cannot be built."""
    with _launcher_lock:
        if not _launcher:
            try:
                key = cache_key("launcher", Path(__file__).with_name("launcher.c").read_bytes(), sys.version)
                path = disk_cache(key, ".so", build_launcher)
                spec = importlib.util.spec_from_file_location("minicompile_launcher", path)
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                _launcher.append(module)
            except (RuntimeError, OSError, ImportError):
                _launcher.append(None)
    return _launcher[0]


# %% [markdown]
# `make_callable` makes a function of machine code. The grid is a number if all sizes are known, and a function of
# them otherwise. The kernel was compiled under the assumption that pointers are multiples of 16 bytes, which the
# launcher checks at each call. If one is not, `fallback` compiles the kernel once more without the assumption.

# %%
def make_callable(source: KernelSource, result: dict, device: int, aligned: bool) -> Callable:
    """Load a compiled kernel on `device`; the callable launches it on the device's current stream."""
    symbols = symbol_names(source)
    grid = grid_function(source)
    fixed = 0 if symbols else grid()
    if fixed >= 2**31:
        raise RuntimeError("a kernel needs more than 2^31 programs")
    unaligned: list = []

    def fallback(*args):
        # A tensor that starts in the middle of a 16-byte word (x[1:]) needs a kernel with narrower loads.
        if not unaligned:
            unaligned.append(start(source, device, aligned=False).resolve())
        return unaligned[0](*args)

    narrow = any(source.options["signature"][s] == "i32" for s in symbols)
    return launcher().Kernel(result["cubin"], result["name"], device, 32 * result["num_warps"],
                             result["shared"], len(pointer_names(source)), len(symbols), narrow, fixed,
                             grid if symbols else None, torch._C._cuda_getCurrentRawStream,
                             15 if aligned else 0, fallback)

# %% [markdown]
# ## Loading a list of kernels
#
# `load_triton` starts all compilations and returns at once, so that the compiler's own Python work on the
# next graph overlaps with them. Each callable waits for its kernel when it is first called (`LazyKernel`).

# %%
def start(source: KernelSource, device: int, aligned: bool = True, started: dict | None = None) -> LazyKernel:
    """The kernel on a device, being compiled. started: what is being compiled already, by key."""
    major, minor = torch.cuda.get_device_capability(device)
    task, wait, started = make_task(source, 10 * major + minor, aligned), None, {} if started is None else started
    if not os.path.exists(task["path"]):
        if task["key"] not in started:
            started[task["key"]] = compile_pool().submit(task)
        wait = started[task["key"]]
    return LazyKernel(lambda: finish(source, device, aligned, task, wait))


def finish(source: KernelSource, device: int, aligned: bool, task: dict, wait: Callable | None) -> Callable:
    """Wait for the compiler and load the kernel; by Triton's own launcher where ours cannot be built. What a compiler that died could not
    compile is not tried in this process, which would die as well."""
    error = wait() if wait else ""
    if error.startswith(worker.DIED):
        raise RuntimeError(f"Triton cannot compile {source.name}: {error}\n{source.code}")
    result = None if error else read_result(task)
    if result is None:
        try:
            result = worker.compile_kernel(task)
        except Exception as problem:
            raise RuntimeError(f"Triton cannot compile {source.name}: {problem or error}\n{source.code}") from problem
    if launcher() is None:
        return load_plain(source)
    with torch.cuda.device(device):
        return make_callable(source, result, device, aligned)


# %% [markdown]
# ## Tables
#
# The kernel of a list reads addresses from memory, so somebody writes them there. A row of the table has the first
# program of a piece, its parameters and the addresses of its tensors. All but the addresses is known beforehand, so a
# table is a copy of `form` with the addresses in the columns that are theirs. Parameters and optimizer state stay where
# they are; where gradients do as well, a table serves again, and `ListKernel` keeps the last few.
#
# A list that subtracts a tenth of each of four gradients from its parameter, of 1024, 100, 2048 and 300 numbers, with 128 numbers to a
# program. `form`: the first program, the size, and *which* of the twelve tensors the piece reads and writes; then the table for tensors
# that happen to lie at multiples of 4096; then `piece_of`, in which program 9 finds that it is the first one of piece 2:
#
#     0    1024      0      1      8
#     8     100      2      3      9
#     9    2048      4      5     10
#     25    300      6      7     11
#
#     0    1024   4096   8192  36864
#     8     100  12288  16384  40960
#     9    2048  20480  24576  45056
#     25    300  28672  32768  49152
#
#     0 0 0 0 0 0 0 0 1 2 2 2 2 2 2 2 2 2 2 2 2 2 2 2 2 3 3 3
#
# A CUDA graph that uses a known table shares it. One with other addresses (its inputs are copied into its pool) has a table of
# its own, of `slots`: memory on the GPU and, pinned, of the host, both taken beforehand, outside of the pool. What is launched
# while a graph is recorded is run at each replay, so the copy from one to the other waits for the end of the recording
# (`tables_after_recording`). If somebody else records, nobody knows the end, and the copy becomes a part of the graph.
#
# All this concerns the thread that records. A table that another thread makes meanwhile, with pinned memory of its own, may make
# the recording invalid, so that thread waits for `RECORDING`.

# %%
RECORDING = threading.RLock()    # a recording begins by waiting for the device, which would break another one
REMEMBERED = 4        # sets of addresses that are remembered
SLOTS = 8         # recordings that can have a table of their own


class Waiting(threading.local):
    copies: list | None = None              # (table on the GPU, table in pinned memory) of the recording of this thread


WAITING = Waiting()


@contextlib.contextmanager
def tables_after_recording():
    """Tables of a CUDA graph that is recorded inside are written at the end, once and for all replays."""
    outer, WAITING.copies = WAITING.copies, []
    try:
        yield
    finally:
        copies, WAITING.copies = WAITING.copies, outer
        for table, slot in copies:
            table.copy_(slot, non_blocking=True)


# %% [markdown]
# A `ListKernel` is made in two steps. What is known of a list when it is compiled is computed once: `piece_of`, `form`, from which column
# on a row has addresses (`addressed`), and whose they are (`own`). What depends on addresses is decided in `run`, once for each set of
# them:
#
# - which version of the kernel: addresses that are no multiples of 16 forbid wide loads (`choose`);
# - which table. Outside of a recording it is copied to the GPU and remembered with the kernel. The first such call also takes the `slots`,
#   because nothing may be allocated while a graph is recorded;
# - inside of a recording, a known table is kept alive for the graph (`recorded`), and for an unknown one a slot is used up.
#
# Both, kernel and table, are then launched with the arguments that are no tensors.

# %%
class ListKernel:
    """The kernel of a list as a callable of tensors and numbers."""

    def __init__(self, source: KernelSource, load: Callable[[KernelSource], Callable]):
        self.source, self.load, self.aligned = source, load, load(source)
        self.unaligned: Callable | None = None
        self.pieces, self.count = source.options["pieces"], source.options["tensors"]
        programs = torch.tensor([n for n, _, _ in self.pieces], device="cpu")
        self.piece_of = torch.repeat_interleave(programs).int()
        first = (programs.cumsum(0) - programs).tolist()
        rows = [[start, *parameters, *own] for start, (_, parameters, own) in zip(first, self.pieces)]
        self.form = torch.tensor(rows, device="cpu")
        self.addressed = len(rows[0]) - len(self.pieces[0][2])     # the column from which on there are addresses
        self.own = self.form[:, self.addressed:].clone()
        self.tables: dict[tuple[int, ...], tuple[Callable, torch.Tensor]] = {}
        self.slots: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.recorded: list = []                         # what graphs may use as long as they live

    def resolve(self) -> Callable:
        if hasattr(self.aligned, "resolve"):
            self.aligned = self.aligned.resolve()
        return self.run

    def __call__(self, *args):
        return self.resolve()(*args)

    def run(self, *args):
        addresses = tuple([t.data_ptr() for t in args[:self.count]])
        on_gpu = args[0].is_cuda
        recording = on_gpu and torch.cuda.is_current_stream_capturing()
        known = self.tables.get(addresses)
        if known is None:
            kernel, table = self.choose(addresses), self.table(addresses)
            if recording:
                if not self.slots:
                    raise RuntimeError(f"a kernel of a list of tensors has tables for {SLOTS} recordings")
                slot, own = self.slots.pop()
                self.recorded.append((slot.copy_(table), own))
                if WAITING.copies is None:
                    own.copy_(slot, non_blocking=True)
                else:
                    WAITING.copies.append((own, slot))
                table = own
            elif on_gpu:
                with RECORDING:
                    if not self.slots:
                        rows = torch.empty(SLOTS, len(table), dtype=table.dtype, device="cpu", pin_memory=True)
                        self.slots = [(row, torch.empty_like(row, device=args[0].device, pin_memory=False)) for row in rows]
                        self.piece_of = self.piece_of.to(args[0].device)
                    table = table.pin_memory().to(args[0].device, non_blocking=True)
            known = kernel, table
            if not recording:
                while len(self.tables) >= REMEMBERED:
                    del self.tables[next(iter(self.tables))]
                self.tables[addresses] = known
        elif recording:
            self.recorded.append(known)
        kernel, table = known
        kernel(self.piece_of, table, *args[self.count:])

    def table(self, addresses: tuple[int, ...]) -> torch.Tensor:
        """For each piece: its first program, its parameters, the addresses of its tensors."""
        table = self.form.clone()
        table[:, self.addressed:] = torch.frombuffer(array("q", addresses), dtype=torch.int64)[self.own]
        return table.flatten()

    def choose(self, addresses: tuple[int, ...]) -> Callable:
        """The version of the kernel for these addresses."""
        if not any(a % 16 for a in addresses):
            return self.aligned
        if self.unaligned is None:
            options = self.source.options
            self.unaligned = self.load(replace(self.source, options=options | {"constants": options["constants"] | {"ALIGN": 1}}))
        return self.unaligned


# %% [markdown]
# `load_triton` is what the host program calls for all its kernels at once: each begins to compile, and none is waited for. Kernels of a
# list get a `ListKernel` around them.

# %%
def load_triton(sources: list[KernelSource]) -> list[Callable]:
    """A callable per kernel, `k(*tensors, *sizes)` in the order of `Kernel.args`. Compilation runs in
    parallel and goes on after the return."""
    started: dict = {}

    def load(s: KernelSource) -> Callable:
        if interpreting():
            return load_plain(s)
        device = s.options.get("device")
        return start(s, torch.cuda.current_device() if device is None else device, started=started)

    return [ListKernel(s, load) if "pieces" in s.options else load(s) for s in sources]
