# %% [markdown]
# # A directory of things that took long to build
#
# Compiling a file of kernels takes 0.03 to 0.25 s (`ch10_cpp/build.py`) and its result depends on nothing but its source, the compiler,
# the flags and the processor. So the result is a file whose name is a hash of those. Three rules make such a
# directory safe when several processes share it, and any of them may be killed.
#
# - A file appears *atomically*: it is written under a temporary name and renamed, so a reader sees all of it or
#   none.
# - It is *sealed*: it ends with a hash of its name and content. A disk that was full, a machine that lost power,
#   a copy that was cut short or that has another kernel's name: the seal does not fit, and the file is built
#   again. (A library that lacks its last page loads, and ends the process when that page is touched.)
# - Its entries are machine code that runs with the user's rights. So it is used only if nobody else can write
#   to it.

# %%
import atexit
import contextlib
import functools
import hashlib
import os
import shutil
import stat
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Callable, Iterable

MARK = b"minicompile"
_fallback: Path | None = None
_choosing = threading.RLock()


os.register_at_fork(after_in_child=_choosing._at_fork_reinit)        # whoever was choosing does not exist in the child


# %% [markdown]
# ## Names
#
# Each part of a key goes into the hash with its length in front, so that ("ab", "c") and ("a", "bc") are two keys.

# %%
def cache_key(*parts: object) -> str:
    """A hash of the text of `parts`; the same in every process."""
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:32]


# %% [markdown]
# ## The directory
#
# The third rule is checked each time the directory is asked for (`_prepare`): it has to belong to the user, and nobody else may write to
# it, nor to a directory above it, where they could put another in its place. (A directory with the sticky bit, such as `/tmp`, does not let
# them.) The mode of our own default directory is mended; one that the user has named is not touched, and not used. A temporary directory
# takes its place, and nothing fails.

# %%
def cache_dir() -> Path:
    """The directory, created: `$MINICOMPILE_CACHE_DIR`, or `~/.cache/minicompile`. When it cannot be written,
    or others can write to it, a temporary one that lives as long as the process, with one warning."""
    if _fallback is not None:
        return _fallback
    asked = os.environ.get("MINICOMPILE_CACHE_DIR")
    try:
        path = Path(asked or Path.home() / ".cache" / "minicompile")
        _prepare(path, not asked)
    except (OSError, RuntimeError) as error:             # RuntimeError: there is no home
        return _use_temporary(asked or "~/.cache/minicompile", error)
    return path


def _prepare(path: Path, ours: bool) -> None:
    """Create the directory, writable by its owner only. ours: whether we have chosen it, and may change that.
    Raises OSError if it cannot be used."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(0o700, exist_ok=True)
    if not os.access(path, os.W_OK | os.X_OK):
        raise PermissionError(f"{path} is not writable")
    found = path.stat()
    if ours and found.st_uid == os.geteuid() and found.st_mode & BY_OTHERS:
        path.chmod(found.st_mode & ~BY_OTHERS & 0o7777)
        found = path.stat()
    why = f"its owner is user {found.st_uid}" if found.st_uid != os.geteuid() else \
        f"its mode is {stat.filemode(found.st_mode)}; chmod go-w {path}" if found.st_mode & BY_OTHERS else \
        _replaceable(path)
    if why:
        raise PermissionError(f"it holds machine code, and others can write to it: {why}")


BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


@functools.cache
def _replaceable(path: Path) -> str:
    """Words for a directory above `path` in which anybody may put another in its place, or ""."""
    modes = {parent: parent.stat().st_mode for parent in path.resolve().parents}
    return next((f"anybody may write to {parent}; chmod o-w {parent}" for parent, mode in modes.items()
                 if mode & stat.S_IWOTH and not mode & stat.S_ISVTX), "")


def _use_temporary(path: Path | str, error: Exception) -> Path:
    global _fallback
    with _choosing:
        if _fallback is not None:
            return _fallback
        _fallback = Path(tempfile.mkdtemp(prefix="minicompile-"))
        atexit.register(shutil.rmtree, _fallback, ignore_errors=True)
        warnings.warn(f"the kernel cache {path} cannot be used ({error}); compiled kernels go to {_fallback} "
                      "and are lost when the program ends. "
                      "Set MINICOMPILE_CACHE_DIR to a writable directory of your own.", RuntimeWarning, stacklevel=3)
    return _fallback


# %% [markdown]
# ## Files
#
# The first two rules are `write_sealed` and `read_sealed`. Four files of one key, and what is read from each:
#
#     as it was written          b'machine code'
#     its last byte is lost      None
#     copied from another key    None
#     others may write to it     None
#
# To the reader all damage is the same as no file: it is built again.

# %%
def seal(key: str, data: bytes) -> bytes:
    """What a file of this key has behind `data`."""
    return MARK + hashlib.sha256(key.encode() + data).digest()


def write_sealed(path: Path, key: str, build: Callable[[Path], object]) -> None:
    """Make a file of the cache: `build(temporary_path)` writes it, it is sealed and renamed into place."""
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    _sweep(path.parent)
    handle, name = tempfile.mkstemp(prefix=key[:8] + "-", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        build(temporary)
        with open(temporary, "r+b") as file:
            file.write(seal(key, file.read()))
        temporary.chmod(0o700)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_sealed(path: Path | str, key: str) -> bytes | None:
    """The content of a cached file without its seal; None if there is none that is whole and ours."""
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            everything = file.read()
    except OSError:
        return None
    data = everything[:-len(seal(key, b""))]
    foreign = found.st_uid != os.geteuid() or found.st_mode & BY_OTHERS
    return None if foreign or everything != data + seal(key, data) else data

# %% [markdown]
# ## Asking for a file
#
# `disk_cache` is all that most callers need: a key, a suffix, and a function that writes the file when it is
# missing. (Triton's kernels are written by other processes, which call `write_sealed` themselves.)

# %%
def disk_cache(key: str, suffix: str, build: Callable[[Path], None], *, rebuild: bool = False) -> Path:
    """The path of the cached file for `key`. If it is missing or damaged (or `rebuild`), calls
    `build(temporary_path)`, which must write that file, seals it and renames it into place. A full or read-only
    directory is replaced by a temporary one and the build is tried once more."""
    for attempt in range(2):
        base = cache_dir()
        path = base / _place(key, suffix)
        if not rebuild and read_sealed(path, key) is not None:
            return path
        try:
            write_sealed(path, key, build)
            return path
        except OSError as error:
            if attempt or base == _fallback:
                raise
            _use_temporary(base, error)
    raise AssertionError("unreachable")


def _place(key: str, suffix: str) -> str:
    return f"{key[:2]}/{key}{suffix}"


def _sweep(directory: Path) -> None:
    """Remove what a process that was killed has left: temporary files that are an hour old."""
    for path in directory.glob("*-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > 3600:
                path.unlink()

# %% [markdown]
# ## Several things in one file
#
# A file of kernels is one for the linker and for the disk, but another program may need two of its six kernels, next to others. So each of
# them has a key of its own, and under that a symbolic link says which file it is in. Nobody reads a file through the link: its name is all
# that counts, and the file of that name is read and proved like any other.

# %%
def cached_under(keys: Iterable[str], suffix: str) -> list[str | None]:
    """For each key, that of the file in which to look: its own, or the one that a link names. None: nothing is there."""
    base = cache_dir()

    def look(path: str, key: str) -> str | None:
        try:
            return Path(os.readlink(path)).stem
        except OSError:
            return key if os.path.exists(path) else None
    return [look(f"{base}/{_place(key, suffix)}", key) for key in keys]


def whole_file(key: str, suffix: str) -> Path | None:
    """The path of the cached file for `key`, if it is as it was written."""
    path = cache_dir() / _place(key, suffix)
    return path if read_sealed(path, key) is not None else None


def link_key(key: str, inside: str, suffix: str) -> None:
    """What `key` stands for is in the file for `inside`. Where there are no links, it is looked for in vain, and built again."""
    path = cache_dir() / _place(key, suffix)
    with contextlib.suppress(OSError):
        path.parent.mkdir(0o700, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(Path("..", _place(inside, suffix)))
