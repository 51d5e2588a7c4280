"""minicompile: torch.compile from scratch, as a book whose chapters are the compiler.

    import minicompile
    fast = minicompile.compile(model)            # or @minicompile.compile on a function
"""
import importlib.util
import sys

if not (3, 11) <= sys.version_info[:2] <= (3, 13):
    raise ImportError(f"minicompile needs CPython 3.11, 3.12 or 3.13; this is {sys.version.split()[0]}.")

from . import logs
from .api import BACKENDS, OptimizedModule, compile, disable, list_backends, register_backend, reset
from .config import config
from .errors import BackendError, GraphBreakError, InternalError, MarkError, MinicompileError, RecompileError, StrictError, Unsupported
from .logs import set_logs
from .marks import allow_in_graph, is_compiling, mark_dynamic
from .stances import set_stance
from .tools.bisect import Bisection, bisect
from .tools.explain import Explanation, explain

__version__ = "0.1.0"

# The order of the book. Everything that depends on it (site, tests, exercises) reads it here.
CHAPTERS = [name for name in (
    "ch01_graphs", "ch02_guards", "ch03_capture", "ch04_breaks", "ch05_autograd", "ch06_decompositions",
    "ch07_loops", "ch08_fusion", "ch09_triton", "ch10_cpp", "ch11_runtime", "ch12_training", "ch13_tuning",
    "ch14_scale")
    if importlib.util.find_spec(f"{__name__}.{name}")]

__all__ = ["BACKENDS", "BackendError", "Bisection", "CHAPTERS", "Explanation", "GraphBreakError", "InternalError",
           "MarkError", "MinicompileError", "OptimizedModule", "RecompileError", "StrictError", "Unsupported",
           "allow_in_graph", "bisect", "compile", "config",
           "disable", "explain", "is_compiling", "list_backends", "logs", "mark_dynamic", "register_backend",
           "reset", "set_logs", "set_stance"]
