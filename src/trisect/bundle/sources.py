"""The package's own source files that a module needs, in an order in which they can stand in one file."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "trisect"
THEIRS = {"huggingface_hub", "numpy", "packaging", "regex", "safetensors", "tokenizers", "tqdm", "yaml"}
"""Packages that transformers itself cannot do without."""
PRESENT = {"torch", "transformers", *THEIRS, *sys.stdlib_module_names}
"""What may be imported outside of `try`: transformers refuses a modelling file that asks for more."""
Imports = ast.Import | ast.ImportFrom


@dataclass(frozen=True)
class Source:
    """One module of this package as text and tree."""

    name: str
    text: str
    tree: ast.Module

    def imports(self) -> list[Imports]:
        """Wherever they stand."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.Import | ast.ImportFrom)]

    def top_imports(self) -> list[Imports]:
        return [node for node in self.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]

    def defined(self) -> dict[str, ast.stmt]:
        """Names that the module gives a meaning at its top level, by the statement that does."""
        found: dict[str, ast.stmt] = {}
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [inner for target in targets for inner in ast.walk(target)]
                found |= {n.id: node for n in names if isinstance(n, ast.Name) and n.id != "__all__"}
        return found


def read_source(name: str) -> Source:
    """A module of this package; a package is its __init__.py."""
    path = Path(__file__).resolve().parents[1].joinpath(*name.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = path.read_text(encoding="utf-8")
    return Source(name, text, ast.parse(text))


def sources_for(name: str) -> tuple[list[Source], frozenset[str]]:
    """A module and everything of this package that it imports, each after what its top level needs.

    Second, what was left out: modules that functions import, and that need packages not everybody has.
    """
    ordered: dict[str, Source] = {}
    left_out: set[str] = set()
    waiting = [name]
    while waiting:
        found = list(_needed(waiting[0], set(ordered), ()))
        if len(ordered) and any(demands(source) for source in found):
            left_out.add(waiting[0])
            found = []
        waiting.pop(0)
        for source in found:
            ordered[source.name] = source
            # What functions import may stand anywhere in the file: it is looked up when they run.
            inner = [str(node.module) for node in source.imports() if isinstance(node, ast.ImportFrom)]
            waiting += [module for module in inner if _inside(module)]
    return list(ordered.values()), frozenset(left_out)


def demands(source: Source) -> list[Imports]:
    """Imports of packages that may be missing where only transformers is installed."""
    tries = [node for node in ast.walk(source.tree) if isinstance(node, ast.Try)]
    tried = {id(inner) for node in tries for inner in ast.walk(node)}
    return [node for node in source.imports() if id(node) not in tried and not packages(node) <= PRESENT]


def packages(node: Imports) -> set[str]:
    """The packages that a statement imports from, this one not counted."""
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
    return {module.split(".")[0] for module in modules} - {PACKAGE}


def is_ours(node: Imports) -> bool:
    """Whether a statement imports something of this package."""
    if isinstance(node, ast.Import):
        return any(_inside(alias.name) for alias in node.names)
    return _inside(str(node.module))


def _inside(module: str) -> bool:
    return module.split(".")[0] == PACKAGE


def _needed(name: str, known: set[str], above: tuple[str, ...]) -> Iterator[Source]:
    """Modules that are not known yet, dependencies first."""
    if name in known or name in above:
        return
    source = read_source(name)
    for node in source.top_imports():
        if isinstance(node, ast.ImportFrom) and is_ours(node):
            for found in _needed(str(node.module), known, (*above, name)):
                known.add(found.name)
                yield found
    yield source
