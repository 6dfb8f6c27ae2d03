"""Modules of this package as one text: imports among them fall away, names that clash are changed."""

import ast
import sys
from collections.abc import Sequence

from trisect.bundle.names import Names, Renames
from trisect.bundle.sources import PRESENT, Source, demands, is_ours, packages
from trisect.errors import TrisectError


def merged(sources: Sequence[Source], *, without: frozenset[str]) -> str:
    """Import lines, then the bodies of all modules; what wants a module of `without` finds it missing."""
    names = Names(sources)
    known = without | {source.name for source in sources}
    for source in sources:
        _check_imports(source, known)
    bodies = [_body(source, names.of(source), without) for source in sources]
    return "\n".join([*_import_lines(sources), "", *bodies])


def _import_lines(sources: Sequence[Source]) -> list[str]:
    """What the modules import from elsewhere, each thing once."""
    plain: set[str] = set()
    named: dict[str, set[str]] = {}
    for node in (node for source in sources for node in source.top_imports() if not is_ours(node)):
        if isinstance(node, ast.Import):
            plain |= {f"import {ast.unparse(alias)}" for alias in node.names}
        else:
            named.setdefault(str(node.module), set()).update(map(ast.unparse, node.names))
    lines = [*plain, *(f"from {module} import {', '.join(sorted(names))}" for module, names in named.items())]
    return sorted(lines, key=_by_kind)


def _body(source: Source, renames: Renames, without: frozenset[str]) -> str:
    lines: list[str | None] = list(source.text.splitlines())
    for line, column, old in sorted(
        _uses(source, renames), reverse=True
    ):  # from the right: columns stay true
        text = str(lines[line - 1])
        lines[line - 1] = text[:column] + renames[old] + text[column + len(old) :]
    for node in source.imports():
        if is_ours(node):
            missing = isinstance(node, ast.ImportFrom) and node.module in without
            # A statement has to stay where it may be the only one of a block.
            _replace(lines, node, 'raise ImportError("this needs trisect itself")' if missing else "pass")
    for statement in source.tree.body:
        if not _stays(statement):
            _replace(lines, statement, None)
    text = "\n".join(line for line in lines if line is not None).strip()
    return f"\n# {source.name}\n\n{text}\n"


def _replace(lines: list[str | None], node: ast.stmt, text: str | None) -> None:
    """Another statement in the same place; None leaves nothing. Line numbers stay."""
    assert node.end_lineno is not None
    for number in range(node.lineno, node.end_lineno + 1):
        lines[number - 1] = None
    if text is not None:
        lines[node.lineno - 1] = " " * node.col_offset + text


def _stays(node: ast.stmt) -> bool:
    """Imports stand at the top of the file, and what a star would import means nothing in it."""
    if isinstance(node, ast.Assign):
        return not any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
    typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    return not typing_only and not isinstance(node, ast.Import | ast.ImportFrom)


def _uses(source: Source, renames: Renames) -> set[tuple[int, int, str]]:
    """Line, column and name of everything that is called otherwise in the file."""
    found: set[tuple[int, int, str]] = set()
    top = {id(node) for statement in source.tree.body for node in _outside_blocks(statement)}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Name) and node.id in renames:
            if not isinstance(node.ctx, ast.Load) and id(node) not in top:
                raise _unfit(source, node, f"a local {node.id!r} has the name of something else")
            found.add((node.lineno, node.col_offset, node.id))
        elif isinstance(node, ast.arg) and node.arg in renames:
            raise _unfit(source, node, f"the argument {node.arg!r} has the name of something else")
    for node in source.tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in renames:
            keyword = "def " if isinstance(node, ast.FunctionDef) else "class "
            found.add((node.lineno, node.col_offset + len(keyword), node.name))
    return found


def _outside_blocks(statement: ast.stmt) -> list[ast.AST]:
    """The parts of a top-level statement that bind names of the module, not of a function or class."""
    blocks = isinstance(statement, ast.FunctionDef | ast.ClassDef)
    return [] if blocks else list(ast.walk(statement))


def _check_imports(source: Source, known: frozenset[str] | set[str]) -> None:
    """Refuse what transformers or this module could not make one file of."""
    for node in source.imports():
        if is_ours(node) and (isinstance(node, ast.Import) or node.module not in known):
            raise _unfit(source, node, "only `from MODULE import NAME` can be put into one file")
    for node in demands(source):
        missing = min(packages(node) - PRESENT)
        raise _unfit(source, node, f"{missing} may be missing elsewhere; import it inside `try`")


def _unfit(source: Source, node: ast.stmt | ast.expr | ast.arg, why: str) -> TrisectError:
    return TrisectError(
        f"{source.name}, line {node.lineno}, cannot go into the modelling file of a saved folder: {why}."
    )


def _by_kind(line: str) -> tuple[bool, str]:
    """Python's own modules first."""
    return line.split()[1].split(".")[0] not in sys.stdlib_module_names, line
