# %% [markdown]
# # A directory of things that took long to build
#
# Compiling a kernel takes a tenth of a second and its result depends on nothing but its source, the compiler,
# the flags and the processor. So the result is a file whose name is a hash of those. Two rules make such a
# directory safe when several processes share it. A file appears *atomically*: it is written under a temporary
# name and renamed, so a reader sees all of it or none. And nothing in it is trusted to be whole: whoever
# loads a file that turns out to be damaged deletes it and builds again.

# %%
from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
import warnings
from pathlib import Path
from typing import Callable

_fallback: Path | None = None


def cache_key(*parts: object) -> str:
    """A hash of the text of `parts`; the same in every process."""
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:32]


def cache_dir() -> Path:
    """The directory, created: `$MINICOMPILE_CACHE_DIR`, or `~/.cache/minicompile`. When it cannot be written,
    a temporary one that lives as long as the process, with one warning."""
    if _fallback is not None:
        return _fallback
    path = Path(os.environ.get("MINICOMPILE_CACHE_DIR") or Path.home() / ".cache" / "minicompile")
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(f"{path} is not writable")
    except OSError as error:
        return _use_temporary(path, error)
    return path


def _use_temporary(path: Path, error: OSError) -> Path:
    global _fallback
    if _fallback is None:
        _fallback = Path(tempfile.mkdtemp(prefix="minicompile-"))
        atexit.register(shutil.rmtree, _fallback, ignore_errors=True)
        warnings.warn(f"the kernel cache {path} cannot be used ({error}); compiled kernels go to {_fallback} "
                      "and are lost when the program ends. "
                      "Set MINICOMPILE_CACHE_DIR to a writable directory.", RuntimeWarning, stacklevel=3)
    return _fallback

# %% [markdown]
# `disk_cache` is the whole interface: a key, a suffix, and a function that writes the file when it is
# missing.

# %%
def disk_cache(key: str, suffix: str, build: Callable[[Path], None], *, rebuild: bool = False) -> Path:
    """The path of the cached file for `key`. If it is missing (or `rebuild`), calls `build(temporary_path)`,
    which must write that file, and renames it into place. A full or read-only directory is replaced by a
    temporary one and the build is tried once more."""
    for attempt in range(2):
        directory = cache_dir() / key[:2]
        path = directory / (key + suffix)
        if path.exists() and path.stat().st_size and not rebuild:
            return path
        temporary = None
        try:
            directory.mkdir(exist_ok=True)
            handle, name = tempfile.mkstemp(prefix=key[:8] + "-", suffix=suffix, dir=directory)
            os.close(handle)
            temporary = Path(name)
            build(temporary)
            os.replace(temporary, path)
            return path
        except OSError as error:
            if attempt or _fallback is not None:
                raise
            _use_temporary(cache_dir(), error)
        finally:
            if temporary is not None and temporary.exists():
                temporary.unlink()
    raise AssertionError("unreachable")
