# %% [markdown]
# # Compiling and loading kernels
#
# The source of a kernel needs companions before it: `prelude.h` and `reductions.h`, the mathematics. No torch header and no standard
# header is among them, nor does a kernel know of Python: `launch.cpp` does, which is compiled once for all. So g++ 12 takes 0.03 to
# 0.05 s of a processor for a file with one small kernel, and 0.15 to 0.25 s for one with five kernels of a GPT; a file that includes
# `torch/extension.h` takes it 40 s.
#
# Three things keep the total low. Equal kernels (the same text up to names and comments: every layer of a
# transformer) are one function. The kernels of a program are dealt into a few files that compile in parallel,
# in the background, while the compiler carries on; a kernel waits for its file when it is first called. And
# finished libraries stay on disk. In memory they stay as long as somebody has one of their functions.

# %%
import contextlib
import ctypes
import functools
import os
import platform
import re
import shutil
import subprocess
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Callable, TypeVar

import torch

from ..cache import cache_key, cached_under, disk_cache, link_key, whole_file
from ..ch02_guards.stable import unchanged
from ..ch08_fusion.kernel import KernelSource, LazyKernel
from ..ch08_fusion.values import ERF_Q
from ..errors import MinicompileError

# %% [markdown]
# ## Flags
#
# `-ffast-math` would make loops vectorise and answers wrong: it assumes that NaN and infinity do not occur.
# What vectorisation really needs from it are two small permissions, neither visible in results:
# `-fno-math-errno` (`sqrt` need not set `errno`) and `-fno-trapping-math` (a speculated operation may raise a
# hardware flag). `-ffp-contract=off` keeps `a*b + c` two roundings, as eager has: with a fused multiply-add,
# `a*b - a*b` is not zero. `-fwrapv` gives integers torch's wrap-around. `-fno-tree-pre` and `-fno-thread-jumps` leave out
# passes that make branches of selects that share a comparison: the maxima of a pool, a clamp before a cast, or a
# bfloat16 ReLU that keeps its mask then are no vectors, and take from four to a hundred times as long.
#
# For many processors that have registers of 512 bits, g++ chooses half of one, as if it were 2017, when the clock had to slow
# down for whole ones. Told to prefer them, it makes softmax and SiLU take two thirds of the time; on halves, whose conversions write
# whole registers that two loads then wait for, half. Of a loop that only copies, `-fno-tree-loop-distribute-patterns` makes vectors as
# well, not a call of `memcpy`, which of the sixteen floats before a conversion are two halves of a register again: a cast to half
# took four times as long.
#
# What is left of a row takes half a register, or a quarter. For these, AVX-512VL has the instructions of whole ones, among them masked
# loads. Where g++ 12 knows the mask, it makes of such a load a blend of the memory with zeros, and a blend reads all of the memory: in
# `F.pad(x, (1, 2))` up to 16 bytes behind the end of `x`. If nothing is mapped there, the process ends. Without AVX-512VL the loads of
# half a register are those of AVX2, which stay what they are. Slower become only integers of 64 bits, of which AVX2 has neither a maximum
# nor a conversion: the largest of rows of 5 to 13 of them takes 1.3 times as long.

# %%
FLAGS = ("-std=c++17 -O3 -march=native -fopenmp -fPIC -shared -fno-math-errno "
         "-fno-trapping-math -ffp-contract=off -fwrapv -fno-strict-aliasing "
         "-fno-exceptions -fno-rtti -fno-asynchronous-unwind-tables -w").split()
FLAGS += ["-mprefer-vector-width=512", "-mno-avx512vl"] if platform.machine() == "x86_64" else []
GXX_FLAGS = ("-fno-tree-pre", "-fno-thread-jumps", "-fno-tree-loop-distribute-patterns")  # clang refuses them
KERNELS_PER_FILE = 6


@functools.cache
def compiler() -> str:
    """Path of the C++ compiler: `$CXX`, else g++, else clang++. Raises MinicompileError when there is
    none."""
    asked = os.environ.get("CXX")
    for name in ([asked] if asked else ["g++", "clang++"]):
        path = shutil.which(name)
        if path is not None:
            return path
    raise MinicompileError(
        f"compiling for the CPU needs a C++ compiler, and {asked or 'g++'} was not found. Install g++ (for "
        "example `apt install g++`), set CXX to another compiler, or use backend=\"aot_eager\", which needs "
        "none.")


def _flags() -> list[str]:
    return FLAGS if "clang" in compiler() else [*FLAGS, *GXX_FLAGS]


@functools.cache
def _machine() -> str:
    """What a compiled file depends on besides its text: compiler version and processor. A directory of files may
    be carried to a machine that lacks some of the instructions of this one."""
    def told(*arguments) -> list[str]:
        return subprocess.run([compiler(), *arguments], capture_output=True, text=True, input="").stdout.splitlines()

    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    processor = sorted({line for line in lines
                        if line.startswith(("model name", "flags", "Features", "CPU part"))})
    processor = processor or told(*FLAGS[:3], "-dM", "-E", "-x", "c++", "-")     # what it may use, as macros
    return cache_key(told("--version")[:1], processor, _flags(), _openmp())


@functools.cache
def _openmp() -> tuple[str, ...]:
    """Linker arguments for the OpenMP runtime that torch has loaded. A second runtime would bring a second
    pool of threads that fight over the cores and ignore `torch.set_num_threads`. With it, kernels need the
    compiler's own small helpers and the library of C, which each process has: for the linker to read it and that
    of C++ would take half of the time of linking."""
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
        paths = {line.split(maxsplit=5)[5] for line in maps if "libgomp" in line}
    except OSError:
        paths = set()
    inside = [p for p in sorted(paths) if "torch" in p] or sorted(paths)
    if not inside or "clang" in compiler():
        return ()
    return inside[0], "-Wl,--as-needed", "-nodefaultlibs", "-lgcc"


def _glibc() -> int:
    """The version of glibc, 235 for 2.35; 0 for another library of C."""
    try:
        name, version = os.confstr("CS_GNU_LIBC_VERSION").split()
        major, minor = version.split(".")[:2]
        return int(major) * 100 + int(minor) if name == "glibc" else 0
    except (ValueError, AttributeError, OSError):
        return 0


@functools.cache
def _companions() -> str:
    """All of them."""
    defined = f"#define MC_GLIBC {_glibc()}\n#define MC_ERF_Q {', '.join(f'{c}f' for c in ERF_Q)}\n"
    return defined + _text("prelude.h") + _text("reductions.h")


def _text(name: str) -> str:
    return (Path(__file__).parent / name).read_text()


# %% [markdown]
# To read and translate all companions takes g++, the assembler and the linker 10 ms, a fourth of what a file with one small kernel takes.
# So a file has only the sections that its kernels need. They are found by names, and a name that is declared in several sections (`mc_exp`
# of a `float` and of a `double`) brings all of them: were one left out, C++ would convert the argument and take the other.

# %%
@functools.cache
def _sections() -> list[tuple[str, set[str], set[str]]]:
    """The companions in order: text, names that are declared in it, names that stand in it. The first is needed by all others."""
    def declared(text: str) -> set[str]:
        heads = "\n".join(line.partition("{")[0] for line in text.splitlines() if re.match(r"[^\s#/}]", line))
        libm = re.findall(r"\bMC_LIBM\d\((\w+)\)", heads)
        return {*re.findall(r"\bmc_\w+", heads), *(f"__builtin_{name}{f}" for name in libm for f in ("", "f"))}

    texts = re.split(r"(?m)^(?=// ----)", _companions())
    return [(text, declared(text), set(re.findall(r"\w+", text))) for text in texts]


def _companions_of(code: str) -> str:
    """Those of some kernels."""
    used, kept = set(re.findall(r"\w+", code)), []
    first, *others = _sections()
    for text, declared, names in reversed(others):          # each uses itself and earlier ones only
        if declared & used:
            used |= names
            kept.append(text)
    return "".join([first[0], *reversed(kept)])

# %% [markdown]
# ## One file
#
# A kernel's function is renamed to a hash of its text, so equal kernels have equal names, and the key of a
# library is a hash of the names in it.

# %%
def _named(source: KernelSource) -> tuple[str, str]:
    """(name, code) with the kernel's name replaced by a hash of its text without comments."""
    bare = re.sub(rf"\b{re.escape(source.name)}\b", "KERNEL", source.code)
    name = "mc_" + cache_key(re.sub(r"(?m)^\s*//.*\n", "", bare), source.options["tensors"],
                             source.options["sizes"])[:20]
    return name, bare.replace("KERNEL", name)


# %% [markdown]
# A file is the companions and the kernels. The compiler reads it from its standard input and writes a shared library into the cache. A
# library that cannot be loaded, because the file was damaged or comes from another machine, is built once more.
#
# Which kernels share a file is chance: a program that differs from one of yesterday in a single kernel deals them out otherwise. So
# each kernel of a library is found by a key of its own, the one that a library of this kernel alone has.

# %%
Group = list[tuple[str, str, KernelSource]]           # kernels of one file: name, code, source


def _file_text(group: Group) -> str:
    code = "\n".join(code for _, code, _ in group)
    return _companions_of(code) + code


def _compile(text: str, target: Path) -> None:
    command = [compiler(), *_flags(), "-x", "c++", "-", "-x", "none", *_openmp(), "-lm", "-Wl,--gc-sections", "-o", str(target)]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        if "No space left" in done.stderr:
            raise OSError(28, "No space left on device", str(target))
        raise RuntimeError("the C++ compiler rejected a generated kernel:\n" + done.stderr[:2000])


Loaded = TypeVar("Loaded")


def _built(key: str, text: str, load: Callable[[Path], Loaded]) -> Loaded:
    """What `load` makes of the library of this text, found on disk or compiled."""
    for attempt in range(2):
        path = disk_cache(key, ".so", lambda target: _compile(text, target), rebuild=attempt > 0)
        try:
            return load(path)
        except OSError:
            if attempt:
                raise
    raise AssertionError("unreachable")


# %% [markdown]
# `mc_function` of `launch.cpp` makes the function that Python calls: an object that holds the address of a kernel, how many
# tensors and sizes it takes, and the library. The library is closed when the last of its functions is gone.
#
# To ask a tensor for its address by its method takes 35 nanoseconds, as long as to add sixty of its numbers; to let other threads of Python
# run meanwhile takes 70. The extension of the memos asks in three (`memory_of`), and a kernel that computes a few thousand numbers,
# which is `small`, keeps the lock. A sum of two tensors of four numbers takes 0.98 microseconds in place of 1.19.

# %%
_launching = threading.Lock()          # files are loaded in several threads: one of them makes the launcher


@functools.cache
def _launcher() -> Callable:
    """`mc_function(path of a library, name of a kernel, tensors, sizes, small, data_ptr, address of memory_of or None)`."""
    text = _companions() + _text("launch.cpp")
    make = _built(cache_key(text, _machine()), text, lambda path: ctypes.PyDLL(str(path)).mc_function)
    make.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.py_object, ctypes.c_void_p]
    make.restype = ctypes.py_object
    return make


def _library_key(*names: str) -> str:
    return cache_key(list(names), _companions(), _machine())


def _load_file(group: Group, known: str | None = None) -> dict[str, Callable]:
    """Load the functions of a group, by name: from the library of the key `known`, which has them and perhaps more, or from one that is
    compiled for them, or was."""
    with _launching:
        function = _launcher()

    def load(path: Path) -> dict[str, Callable]:
        return {name: function(os.fsencode(path), name.encode(), s.options["tensors"], s.options["sizes"], s.options.get("small", False),
                               torch._C.TensorBase.data_ptr, unchanged and unchanged.memory_of) for name, _, s in group}

    if known is not None and (path := whole_file(known, ".so")) is not None:
        with contextlib.suppress(OSError):
            return load(path)
    names = [name for name, _, _ in group]
    functions = _built(key := _library_key(*names), _file_text(group), load)
    for name in names if len(names) > 1 else ():
        link_key(_library_key(name), key, ".so")
    return functions

# %% [markdown]
# ## All kernels of a program
#
# `load_cpp` returns at once. What it returns for a kernel can be called like the kernel; a host program that wants the
# lowest cost per call asks it to `resolve()` to the C function itself. Then what is left is to ask each tensor for its
# address.
#
# Files are compiled by threads, one for each core (the compiler
# is a process of its own, so Python's lock does not matter). `_loaded` remembers for every kernel the file that it
# is in, as long as anybody uses it: a kernel that another program has already is not compiled again, nor is one that
# the cache has.

# %%
_loaded: weakref.WeakValueDictionary[str, Future] = weakref.WeakValueDictionary()     # kernel -> its file
_pool: list[ThreadPoolExecutor] = []


def _forget_builds() -> None:
    """In the child of a fork there are no threads: forget the pool and the jobs that nobody will finish."""
    _launching._at_fork_reinit()
    _pool.clear()
    for name in [name for name, future in _loaded.items() if not future.done()]:
        _loaded.pop(name, None)


os.register_at_fork(after_in_child=_forget_builds)


def cores() -> int:
    return len(os.sched_getaffinity(0))


def _executor() -> ThreadPoolExecutor:
    if not _pool:
        _pool.append(ThreadPoolExecutor(cores(), "minicompile-cpp"))
    return _pool[0]


def _start(*group) -> Future:
    """When the main thread has ended, pools take no more work, but other threads and exit handlers still
    compile: here."""
    try:
        return _executor().submit(_load_file, *group)
    except RuntimeError:
        future = Future()
        future.set_result(_load_file(*group))
        return future


def failed(file: Future) -> bool:
    """The next program that needs this file tries again."""
    return file.done() and file.exception() is not None


# %% [markdown]
# The kernels that are missing are dealt out to files, the longest texts first, so that all files take about
# equally long.

# %%
def load_cpp(sources: list[KernelSource]) -> list[LazyKernel]:
    """Start compiling `sources`; one callable each, taking tensors then ints in the order of
    `KernelSource.args`. The tensors must have the layouts that the kernel was generated for. Raises
    MinicompileError when there is no compiler."""
    compiler()
    named = [(*_named(s), s) for s in sources]
    found = {name: file for name, _, _ in named if (file := _loaded.get(name)) is not None and not failed(file)}
    wanted = {name: entry for entry in named if (name := entry[0]) not in found}
    missing, known = [], {}
    for entry, key in zip(wanted.values(), cached_under(map(_library_key, wanted), ".so")):
        (missing if key is None else known.setdefault(key, [])).append(entry)
    for key, group in known.items():
        future = _start(group, key)
        found.update((name, future) for name, _, _ in group)
    files = max(1, -(-len(missing) // KERNELS_PER_FILE), min(len(missing), cores()))
    ordered = sorted(missing, key=lambda entry: (-len(entry[1]), entry[0]))
    for i in range(files):
        group = ordered[i::files]
        if group:
            future = _start(group)
            found.update((name, future) for name, _, _ in group)
    _loaded.update(found)
    return [LazyKernel(lambda file=found[name], name=name: file.result()[name]) for name, _, _ in named]
