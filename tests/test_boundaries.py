"""The boundary of "from scratch", and the order of the chapters, read from the syntax of every module."""
import ast
import graphlib
import pathlib
import re
import subprocess
import sys

import pytest

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "minicompile"
FORBIDDEN = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.export", "torch._decomp", "torch._refs",
             "torch._prims", "torch._prims_common", "torch._subclasses", "torch.fx.experimental", "torch.compile",
             "torch._higher_order_ops", "functorch", "torch._C._dynamo", "torch._C._functorch")
ON_TOP = {"api", "backends", "driver", "frames", "learning", "limits", "topics", "versions", "__main__"}        # what no chapter may import
LOOKS_FROM_OUTSIDE = ("tools", "bench")                                # what no part of the compiler may import
MAY_IMPORT_TOOLS = ("tools/", "bench/", "__init__.py", "__main__.py")
PEER_ALLOWED = ("bench/", "__main__.py", "tools/standin.py")                               # these run or replace the peer
MODULES = sorted(p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py"))


def imports(tree, path):
    """Yield (line, dotted absolute name) for every import; `from a import b` gives a.b."""
    package = ["minicompile", *pathlib.PurePosixPath(path).parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[:len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def attribute_chains(tree):
    """Yield (line, "torch.a.b") for attribute accesses that begin at the name torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            parts, inner = [], node
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name) and inner.id == "torch":
                yield node.lineno, ".".join(["torch", *reversed(parts)])


def is_forbidden(name):
    return any(name == bad or name.startswith(bad + ".") for bad in FORBIDDEN)


def chapter_number(dotted):
    match = re.match(r"(?:minicompile\.)?ch(\d\d)_", dotted)
    return int(match.group(1)) if match else None


def violations(source, path):
    tree, found = ast.parse(source), []
    here = chapter_number(path)
    for line, name in imports(tree, path):
        if is_forbidden(name):
            found.append(f"{path}:{line} imports {name}")
        there = chapter_number(name)
        if here is not None and there is not None and there > here:
            found.append(f"{path}:{line} imports the later chapter {name}")
        if here is not None and name.split(".")[0] == "minicompile" and name.split(".")[1:2] and \
                name.split(".")[1] in ON_TOP:
            found.append(f"{path}:{line} imports {name}, which sits on top of the chapters")
        if not path.startswith(MAY_IMPORT_TOOLS) and name.startswith(tuple(f"minicompile.{folder}" for folder in LOOKS_FROM_OUTSIDE)):
            found.append(f"{path}:{line} imports {name}, which looks at the compiler from outside")
    for line, name in attribute_chains(tree):
        if is_forbidden(name):
            found.append(f"{path}:{line} uses {name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and is_forbidden(str(node.args[0].value)):
                found.append(f"{path}:{node.lineno} imports {node.args[0].value}")
    return found


@pytest.mark.parametrize("path", MODULES)
def test_module(path):
    found = violations((PACKAGE / path).read_text(), path)
    if path.startswith(PEER_ALLOWED):
        found = [v for v in found if not v.endswith(" uses torch.compile") and "torch._dynamo" not in v
                 and "torch._inductor" not in v]
    assert not found, "\n".join(found)


def circle(sources):
    """The modules of an import circle, wherever the imports stand, or None. sources: path -> text."""
    of_name = {".".join(("minicompile", *pathlib.PurePosixPath(p).with_suffix("").parts)).removesuffix(".__init__"): p for p in sources}
    needs = {}
    for path, text in sources.items():
        names = [name for _, name in imports(ast.parse(text), path)]
        needs[path] = {of_name.get(name, of_name.get(name.rpartition(".")[0])) for name in names} - {path, None}
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as error:
        return error.args[1]


def test_no_import_circle():
    assert circle({path: (PACKAGE / path).read_text() for path in MODULES}) is None


def test_a_circle_is_found():
    sources = {"__init__.py": "from .a import f", "a.py": "def f():\n    from .tools import b", "tools/b.py": "from ..c import g"}
    assert circle({**sources, "c.py": "import torch"}) is None
    assert circle({**sources, "c.py": "from . import a"}) and circle({**sources, "c.py": "from . import f"})


# What may bear one name in two modules: two stand for one interface (two generators, the C hook and its stand-in, two
# implementations of one algorithm), and `realize` is the term of both TorchDynamo and TorchInductor for the end of being lazy.
ONE_INTERFACE = {"convert", "emit_list", "form", "source_of", "set_callback", "set_target", "skip_code", "philox_uniform", "realize"}


def test_one_name_one_meaning():
    """A module-level function's name says what it does wherever it stands; what a decorator registers is named for its table."""
    homes = {}
    for path in MODULES:
        for node in ast.parse((PACKAGE / path).read_text()).body:
            if isinstance(node, ast.FunctionDef) and not node.decorator_list and not path.startswith("bench/"):
                homes.setdefault(node.name, []).append(path)
    assert {name for name, paths in homes.items() if len(paths) > 1} == ONE_INTERFACE


# Constants that bear one name in two modules, and mean the same: `aten` is short for `torch.ops.aten`.
ONE_MEANING = {"aten", "EVALUATE"}


def test_one_constant_one_meaning():
    homes = {}
    for path in MODULES:
        for node in ast.parse((PACKAGE / path).read_text()).body:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            for name in (t.id for t in targets if isinstance(t, ast.Name) and not t.id.startswith("_")):
                if not path.startswith(LOOKS_FROM_OUTSIDE):
                    homes.setdefault(name, []).append(path)
    assert {name for name, paths in homes.items() if len(paths) > 1} == ONE_MEANING


@pytest.mark.parametrize("text", [
    "import torch._dynamo", "from torch._inductor import config", "from torch import _dynamo", "import functorch",
    "def f():\n    from torch.fx.experimental import proxy_tensor", "x = torch._decomp.table", "torch.compile(f)",
    "from ..ch05_autograd import joint", "from minicompile.ch04_breaks.resume import make_resume", "from .. import driver",
    "from ..tools import apart", "from ..bench.data import lines",
    "import importlib\nimportlib.import_module('torch._refs')"])
def test_the_check_can_fail(text):
    assert violations(text, "ch03_capture/example.py")


def test_allowed_things_are_allowed():
    text = ("import torch\nfrom torch.utils import _pytree\nfrom ..ch02_guards import guards\nfrom ..errors import Unsupported\n"
            "from . import hook\ntorch.compiler.is_compiling()\n")
    assert not violations(text, "ch03_capture/example.py")


@pytest.mark.processes
def test_torch_compile_is_not_even_imported():
    done = subprocess.run([sys.executable, "-c", "import sys, torch, minicompile\nm = torch.nn.Linear(3, 3)\n"
                           "minicompile.compile(lambda x: torch.nn.functional.gelu(m(x)) + 1)(torch.ones(2, 3)).sum().backward()\n"
                           "print([n for n in sys.modules if n in ('torch._dynamo', 'torch._inductor')], m.bias.grad.shape)"],
                          cwd=PACKAGE.parent, capture_output=True, text=True, timeout=100)
    assert done.stdout == "[] torch.Size([3])\n", done.stderr
