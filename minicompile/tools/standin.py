"""`torch.compile` and its neighbours, for the time of one script, meaning minicompile's.

An unmodified script asks for compilation in several ways: `torch.compile(model)`, as a decorator,
`model.compile()` (which calls `torch.compile` inside), `torch.compiler.disable` and `.reset`. All of them are
replaced. What is torch's own and harmless stays, such as assignments to `torch._dynamo.config`: they set
options of a compiler that is not running. `torch.compiler.is_compiling` stays False everywhere, because
torch's own library asks it in order to suit its own compiler.
"""
import linecache
import runpy
import sys
from pathlib import Path

import torch

from .. import logs
from ..api import compile as our_compile, disable, reset
from ..config import ALIASES, OPTIONS
from ..errors import MinicompileError
from ..stances import set_stance

# Names of torch's backends that have a different one here.
BACKENDS = {"inductor": None, "aot_eager_decomp_partition": "decomposed"}


def compile_like_torch(model=None, *, fullgraph=False, dynamic=None, backend="inductor", mode=None,
                       options=None, disable=False, **other):
    """`minicompile.compile` with the signature of `torch.compile`: its default backend is ours, and its
    options that we have no use for are left out, with a note."""
    if backend == "inductor" and options:
        unknown = sorted(name for name in options if name not in OPTIONS and name not in ALIASES)
        if unknown:
            logs.warn_once(("options", *unknown), "minicompile has no use for the options "
                           f"{', '.join(unknown)} of torch's inductor; they are ignored.")
        options = {name: value for name, value in options.items() if name not in unknown} or None
    if isinstance(backend, str):
        backend = BACKENDS.get(backend, backend)
    if other:
        logs.warn_once(("arguments", *other), "minicompile has no use for the arguments "
                       f"{', '.join(other)} of torch.compile; they are ignored.")
    return our_compile(model, fullgraph=fullgraph, dynamic=dynamic, backend=backend, mode=mode,
                       options=options, disable=disable)


def install() -> None:
    """From now on, in this process."""
    torch.compile = torch.compiler.compile = compile_like_torch
    torch.compiler.disable, torch.compiler.reset, torch.compiler.set_stance = disable, reset, set_stance
    # Our CUDA graphs keep the outputs that escape valid without it
    torch.compiler.cudagraph_mark_step_begin = lambda: None


def run_script(arguments: list[str]) -> None:
    """Run arguments[0] as `__main__` with the rest as its arguments; behind `--explore PAGE` also write the explorer's
    page of its slowest frame. Raises MinicompileError if there is no such file."""
    if arguments and arguments[0].partition("=")[0] == "--explore":
        page, rest = (arguments[0].partition("=")[2], arguments[1:]) if "=" in arguments[0] else ("".join(arguments[1:2]), arguments[2:])
        if not page:
            raise MinicompileError("--explore needs the name of the page: python -m minicompile run --explore PAGE SCRIPT ARGS...")
        from .explore.script import explored
        with explored(page):
            return run_script(rest)
    if not arguments:
        raise MinicompileError("`run` needs a script: python -m minicompile run SCRIPT ARGS...")
    script = Path(arguments[0])
    if not script.is_file():
        raise MinicompileError(f"The script {arguments[0]!r} does not exist. Give the path of a Python file. "
                             "(What you have written for the book's exercises runs by `python -m exercises run`.)")
    install()
    sys.argv = list(arguments)
    sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except MinicompileError as error:
        raise type(error)(f"{error}{place_in_script(error, script)}") from None


def place_in_script(error: BaseException, script: Path) -> str:
    """Where in the script an error came from, as text to append."""
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(script):
            line = trace.tb_lineno
        trace = trace.tb_next
    return "" if line is None else f"\n  {script}:{line}: {linecache.getline(str(script), line).strip()}"
