"""Names that shells complete, read from the sources: importing their tables imports torch, at every Tab."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[1]

DATA_TABLES = ("BUILTIN", "SYNTHETIC", "DATASETS")

Completer = Callable[[str], list[str]]


def method_names() -> list[str]:
    """Of `trisect.methods.METHODS`: constants made by a call that is told the method's name."""
    found = []
    for path in sorted((SOURCES / "methods").glob("*.py")):
        for _, value in _constants(path):
            if isinstance(value, ast.Call) and (name := _told_name(value)):
                found.append(name)
    return found


def table_names(path: str, constant: str) -> list[str]:
    """The texts in a constant of a source file: the keys of a dictionary, or the entries of a tuple."""
    value = dict(_constants(SOURCES / path))[constant]
    nodes = value.keys if isinstance(value, ast.Dict) else getattr(value, "elts", [value])
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def model_names() -> list[str]:
    """Built-in models; a folder or a file is a model too, and shells complete those by themselves."""
    return table_names("data/registry.py", "REGISTRY_MODELS")


def data_names() -> list[str]:
    """Texts that are known by name."""
    return [name for table in DATA_TABLES for name in table_names("data/catalogue.py", table)]


def allocation_names() -> list[str]:
    """How widths can be spread."""
    return table_names("config/settings.py", "ALLOCATIONS")


def piece_names() -> list[str]:
    """Pieces of a3+."""
    return table_names("methods/a3plus.py", "PIECES")


def completed(names: Callable[[], list[str]]) -> Completer:
    """What typer asks at a Tab: the names that start like the word so far."""
    return lambda incomplete: [name for name in names() if name.startswith(incomplete)]


def one_of(*words: str) -> Completer:
    """The same for a few fixed words."""
    return completed(lambda: list(words))


def _constants(path: Path) -> Iterator[tuple[str, ast.expr]]:
    """Assignments to NAMES at the top of a module."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and target.id.isupper() and value is not None:
            yield target.id, value


def _told_name(call: ast.Call) -> str | None:
    """`name=` of a call, else its first argument where that is a text."""
    told = [word.value for word in call.keywords if word.arg == "name"] or call.args[:1]
    first = told[0] if told else None
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None
