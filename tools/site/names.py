"""Every name that the package defines, and where: read from its source, without importing it."""
from __future__ import annotations

import ast
import graphlib
import hashlib
import pathlib
import re
from dataclasses import dataclass, field

from . import ROOT, SiteError, cells, highlight

PACKAGE = "minicompile"


@dataclass
class Definition:
    """kind: "function", "class", "method" or "value". first counts decorators, line does not. body: where what stands below a
    function's signature and docstring begins."""
    kind: str
    first: int
    line: int
    end: int
    doc: str = ""
    signature: str = ""
    body: int = 0


@dataclass
class Module:
    name: str
    path: str                       # from the root of the repository
    source: str
    doc: str = ""
    code: str = ""                  # hash of what Python makes of it: without comments, prose and lines
    public: list = field(default_factory=list)               # __all__
    listed: list = field(default_factory=list)               # CHAPTERS
    used: list = field(default_factory=list)                 # highlight.uses
    imported: list = field(default_factory=list)             # local names that statements at its top import
    definitions: dict = field(default_factory=dict)          # qualified name in the module -> Definition
    imports: dict = field(default_factory=dict)              # local name -> (module, name or None)
    cells: list = field(default_factory=list)
    exercises: dict = field(default_factory=dict)            # identifier -> line

    @property
    def chapter(self) -> str:
        """The chapter's folder, "bench" and the like, or "" for modules of the package itself."""
        parts = pathlib.PurePosixPath(self.path).parts
        return parts[1] if len(parts) > 2 else ""

    @property
    def is_coverage(self) -> bool:
        """In a folder of a chapter's folder: what registers with the chapter's tables, item by item."""
        return len(pathlib.PurePosixPath(self.path).parts) > 3

    @property
    def page(self) -> str:
        """The path of its page without ending."""
        return "code/" + self.path.removeprefix(PACKAGE + "/").removesuffix(".py").replace("__init__", "init").replace("__main__", "main")

    @property
    def title(self) -> str:
        short = self.path.rsplit("/", 1)[-1]
        return cells.title(self.cells, short)


def package_files(root: pathlib.Path = ROOT) -> list[pathlib.Path]:
    return sorted(p for p in (root / PACKAGE).rglob("*") if p.is_file() and p.suffix in (".py", ".c", ".cpp", ".h"))


def digest(*parts) -> str:
    """A short hash of strings and of the contents of files."""
    made = hashlib.sha256()
    for part in parts:
        made.update(part.read_bytes() if isinstance(part, pathlib.Path) else str(part).encode())
        made.update(b"\0")
    return made.hexdigest()[:20]


def read_package(root: pathlib.Path = ROOT, known: dict | None = None) -> dict[str, Module]:
    """Module name -> Module, for every Python file that has something in it. known: path -> Module as it was read last."""
    modules = {}
    for path in package_files(root):
        if path.suffix == ".py" and (source := path.read_text()).strip():
            module = (known or {}).get(path.relative_to(root).as_posix())
            if module is None or module.source != source:
                module = read_module(path, root)
            modules[module.name] = module
    return modules


def code_digest(tree: ast.Module) -> str:
    """A hash that neither comments nor prose nor places in the file change."""
    return digest(ast.dump(tree))


def read_module(path: pathlib.Path, root: pathlib.Path) -> Module:
    short = path.relative_to(root)
    dotted = ".".join(short.with_suffix("").parts).removesuffix(".__init__")
    source = path.read_text()
    tree = ast.parse(source)
    module = Module(dotted, short.as_posix(), source, ast.get_docstring(tree) or "", code_digest(tree), cells=cells.split(source))
    package = dotted if path.name == "__init__.py" else dotted.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = package.split(".")[:len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                if origin.split(".")[0] == PACKAGE:
                    module.imports[alias.asname or alias.name] = origin, alias.name
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "CHAPTERS":
            module.listed = re.findall(r'"(ch\d\d_\w+)"', ast.unparse(node).replace("'", '"'))
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            module.public = literal(node.value) or []
    collect(module, tree.body, "")
    module.used = highlight.uses(tree, {*module.imports, *(n for n, d in module.definitions.items() if d.kind in ("function", "class"))})
    module.imported = [a.asname or a.name for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names]
    for cell in module.cells:
        for tag in cell.tags:
            if tag.startswith("exercise:"):
                module.exercises[tag.partition(":")[2]] = cell.line
    return module


def literal(node):
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def collect(module: Module, body: list, prefix: str):
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
            module.definitions[prefix + node.name] = Definition(
                "method" if prefix else "function", first, node.lineno, node.end_lineno,
                ast.get_docstring(node) or "", f"({ast.unparse(node.args)}){returns}", body_line(node, module.source))
        elif isinstance(node, ast.ClassDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            bases = ", ".join(ast.unparse(b) for b in node.bases)
            module.definitions[prefix + node.name] = Definition(
                "class", first, node.lineno, node.end_lineno, ast.get_docstring(node) or "", f"({bases})" if bases else "")
            collect(module, node.body, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name):
                        module.definitions.setdefault(prefix + name.id, Definition("value", node.lineno, node.lineno, node.end_lineno))
        elif isinstance(node, (ast.If, ast.Try, ast.With)):
            collect(module, node.body, prefix)


def body_line(function: ast.FunctionDef, source: str) -> int:
    if ast.get_docstring(function):
        return function.body[0].end_lineno + 1
    lines, line = source.splitlines(), function.body[0].lineno
    while not lines[line - 2].strip() or lines[line - 2].lstrip().startswith("#"):
        line -= 1
    return line


def find(modules: dict[str, Module], dotted: str) -> tuple[Module, Definition | None]:
    """The module and the definition that a dotted name means; KeyError for one that does not exist."""
    if dotted in modules and not (dotted.rpartition(".")[0] in modules
                                  and dotted.rpartition(".")[2] in modules[dotted.rpartition(".")[0]].imports):
        return modules[dotted], None
    parts = dotted.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        module, rest = modules.get(".".join(parts[:cut])), ".".join(parts[cut:])
        if module is None:
            continue
        if rest in module.definitions:
            return module, module.definitions[rest]
        head, _, tail = rest.partition(".")
        if head in module.imports:
            origin, name = module.imports[head]
            target = ".".join(filter(None, [origin, name, tail]))
            if target != dotted:
                return find(modules, target)
            return modules[dotted], None
        break
    raise KeyError(dotted)


def reading_order(modules: list[Module]) -> list[Module]:
    """Modules of one chapter: the opening, what it names, in that order, then the others, those first that others import; coverage last."""
    names = {m.name: m for m in modules}
    graph = {}
    for m in sorted(modules, key=lambda m: m.name):
        wanted = {m.imports[name] for name in m.imported if name in m.imports}
        graph[m.name] = {origin for origin, name in wanted if origin in names and origin != m.name} | {
            f"{origin}.{name}" for origin, name in wanted if f"{origin}.{name}" in names}
        graph[m.name] = sorted(graph[m.name] - {m.name})         # a set would give another order each time
    try:
        order = [names[n] for n in graphlib.TopologicalSorter(graph).static_order()]
    except graphlib.CycleError:
        order = sorted(modules, key=lambda m: m.name)
    opening = next((m.source for m in modules if m.path.endswith("/__init__.py") and not m.is_coverage), "")
    named = ["__init__", *re.findall(r"`(\w+)(?:\.py)?`", opening)]

    def place(m: Module) -> int:
        stem = pathlib.PurePosixPath(m.path).stem
        return named.index(stem) if stem in named else len(named)
    return sorted(order, key=lambda m: (m.is_coverage, place(m)))


def chapter_names(modules: dict[str, Module]) -> list[str]:
    """`minicompile.CHAPTERS`, those that exist, without importing torch."""
    if listed := modules[PACKAGE].listed:
        return [name for name in listed if any(m.chapter == name for m in modules.values())]
    raise SiteError("minicompile/__init__.py defines no CHAPTERS")
