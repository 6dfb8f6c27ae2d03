"""The modelling file of a saved folder, which transformers loads with trust_remote_code=True."""

import ast
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trisect.errors import TrisectError
from trisect.support.files import atomic_write_text, write_json

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


Renames = dict[str, str]
"""A name in a module -> its name in the file, where they differ."""


class Names:
    """The names of all modules that go into a file."""

    def __init__(self, sources: Sequence[Source]):
        self.sources = {source.name: source for source in sources}
        self.own: dict[str, Renames] = {source.name: {} for source in sources}
        for name, meanings in self._meanings().items():
            if len(set(meanings.values())) > 1:
                for module in meanings:
                    self.own[module][name] = f"{name}_in_{module.rpartition('.')[2]}"

    def of(self, source: Source) -> Renames:
        """What has another name in the file, of its own names and of those it imports from the others."""
        found = dict(self.own[source.name])
        for node in source.imports():
            if isinstance(node, ast.ImportFrom) and node.module in self.sources:
                for alias in node.names:
                    here, there = alias.asname or alias.name, self._called(node.module, alias.name)
                    found |= {here: there} if here != there else {}
        return found

    def _called(self, module: str, name: str) -> str:
        """The name in the file of what `from module import name` gives, which may be passed on there."""
        source = self.sources[module]
        if name in source.defined():
            return self.own[module].get(name, name)
        for node in source.top_imports():
            if isinstance(node, ast.ImportFrom) and is_ours(node):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._called(str(node.module), alias.name)
        return name

    def _meanings(self) -> dict[str, dict[str, str]]:
        """Name -> module -> the statement that defines it; the same statement twice does no harm."""
        found: dict[str, dict[str, str]] = {}
        for module, source in self.sources.items():
            for name, node in source.defined().items():
                found.setdefault(name, {})[module] = ast.unparse(node)
        return found


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


MODULE = "modeling_trisect"
ROOT = "trisect.models.compressed"

HEADER = '''\
# Copyright the trisect authors. Licensed under the Apache License, Version 2.0 (the "License"); you may not
# use this file except in compliance with the License. You may obtain a copy at
#     http://www.apache.org/licenses/LICENSE-2.0
# Unless required by applicable law or agreed to in writing, software distributed under the License is
# distributed on an "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied.
# See the License for the specific language governing permissions and limitations under the License.
#
# Made from the sources of trisect: edit those, not this file.
"""A model compressed with trisect, for transformers without trisect."""

'''

FOOTER = """

# The classes of this folder


def has_triton() -> bool:
    return False  # the Triton kernels stay with trisect; their plain twins are above
"""


@cache
def _shared_text() -> str:
    sources, left_out = sources_for(ROOT)
    return HEADER + merged(sources, without=left_out) + FOOTER


def bundle_text(family: str, model_class: str, config_class: str, record: str | None = None) -> str:
    """The whole file: the modules that build compressed models, and the two classes of one family.

    A family from outside the package comes with its `record`, as Python writes it.
    """
    added = "" if record is None else f'\n\nFAMILIES["{family}"] = {record}\n'
    return (
        _shared_text()
        + added
        + f'\n\n{model_class} = compressed_class("{family}")\n'
        + f"{config_class} = {model_class}.config_class\n"
    )


def write_bundle(
    folder: Path, *, family: str, model_class: str, config_class: str, record: str | None = None
) -> None:
    """Put the modelling file into a saved folder, and say in its config.json what is in it."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("architectures") != [model_class]:
        raise TrisectError(f"{path} is of {config.get('architectures')}, not of {model_class}.")
    config["auto_map"] = {
        "AutoConfig": f"{MODULE}.{config_class}",
        "AutoModelForCausalLM": f"{MODULE}.{model_class}",
    }
    atomic_write_text(folder / f"{MODULE}.py", bundle_text(family, model_class, config_class, record))
    write_json(path, config)
