"""`FILE:FUNCTION ARGUMENTS...` of the command line, as a function and what it is called with.

FILE is a Python file or the name of a module, FUNCTION an expression in it (`step`, `Model.forward`,
`Model(width=64)`), and every argument a Python expression there, or `name=expression`; `torch` is known.
"""
import importlib
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

import torch

from .. import marks
from ..errors import MinicompileError
from . import standin


def load(target: str, arguments: list[str]) -> tuple:
    """(function, args, kwargs). The file is imported, not run as a script. Raises MinicompileError with the reason
    where one of them makes no sense."""
    file, colon, name = target.partition(":")
    if not (file and colon and name):
        raise MinicompileError(f"{target!r} names no function. Write FILE:FUNCTION, such as model.py:step.")
    names = vars(load_module(file))
    function = evaluated(name, names, file)
    if not callable(function):
        raise MinicompileError(f"{name} in {file} is {type(function).__name__!r}, which cannot be called.")
    args, kwargs = [], {}
    for text in arguments:
        more, named = evaluated(f"(lambda *args, **kwargs: (args, kwargs))({text})", names, file, text)
        args.extend(more)
        kwargs.update(named)
    check_arguments(function, name, args, kwargs)
    return function, tuple(args), kwargs


def load_module(file: str) -> ModuleType:
    path = Path(file)
    if not file.endswith(".py"):
        sys.path.insert(0, "")
        try:
            return importlib.import_module(file)
        except ModuleNotFoundError as error:
            raise MinicompileError(f"{file} is neither a Python file nor a module: {error}.") from None
    if not path.is_file():
        raise MinicompileError(f"The file {file!r} does not exist.")
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)                   # classes in it can be pickled
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise MinicompileError(f"importing {file} failed: {type(error).__name__}: {error}"
                               f"{standin.place_in_script(error, path)}") from error
    return module


def evaluated(text: str, names: dict, file: str, shown: str = ""):
    try:
        return eval(text, {"torch": torch, **names})
    except Exception as error:
        raise MinicompileError(f"{shown or text} makes no sense in {file}: {type(error).__name__}: {error}") from None


def check_arguments(function, name: str, args, kwargs) -> None:
    target = marks.uncompiled(function)
    try:
        signature = inspect.signature(target.forward if isinstance(target, torch.nn.Module) else target)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise MinicompileError(f"{name}{signature}: {error}. Give one expression for each argument, "
                               f"such as 'torch.randn(8, 64)' or {next(iter(signature.parameters), 'x')}=3.") from None
