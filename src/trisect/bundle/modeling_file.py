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

    def names(self) -> dict[str, str]:
        """Names that the module binds at its top level, and what they mean: a statement, or an import."""
        found: dict[str, str] = {}
        for node in self.tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found[node.name] = ast.unparse(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                bound = [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
                found |= {name: ast.unparse(node) for name in bound if name != "__all__"}
            elif isinstance(node, ast.Import | ast.ImportFrom) and not is_ours(node):
                origin = getattr(node, "module", "")
                found |= {alias.asname or alias.name: f"import {origin}.{alias.name}" for alias in node.names}
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
        module = waiting.pop(0)
        found = list(_needed(module, set(ordered)))
        if ordered and any(demands(source) for source in found):
            left_out.add(module)
            continue
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


def _needed(name: str, known: set[str]) -> Iterator[Source]:
    """Modules that are not known yet, dependencies first."""
    if name in known:
        return
    known.add(name)
    source = read_source(name)
    for node in source.top_imports():
        if isinstance(node, ast.ImportFrom) and is_ours(node):
            yield from _needed(str(node.module), known)
    yield source


def merged(sources: Sequence[Source], *, without: frozenset[str]) -> str:
    """Import lines, then the bodies of all modules; what wants a module of `without` finds it missing."""
    known = without | {source.name for source in sources}
    meanings: dict[str, tuple[str, str]] = {}
    for source in sources:
        _check_imports(source, known)
        for name, meaning in source.names().items():
            other, before = meanings.setdefault(name, (source.name, meaning))
            if before != meaning:
                raise _unfit(source, source.tree.body[0], f"{name!r} means something else in {other}; rename it")
    return "\n".join([*_import_lines(sources), "", *(_body(source, without) for source in sources)])


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


def _body(source: Source, without: frozenset[str]) -> str:
    """The module's text without its imports."""
    lines: list[str | None] = list(source.text.splitlines())
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


def _check_imports(source: Source, known: frozenset[str] | set[str]) -> None:
    """Refuse what transformers or this module could not make one file of."""
    for node in source.imports():
        plain = isinstance(node, ast.ImportFrom) and all(alias.asname in (None, alias.name) for alias in node.names)
        if is_ours(node) and (not plain or getattr(node, "module", None) not in known):
            raise _unfit(source, node, "only `from MODULE import NAME` can be put into one file")
    for node in demands(source):
        missing = min(packages(node) - PRESENT)
        raise _unfit(source, node, f"{missing} may be missing elsewhere; import it inside `try`")


def _unfit(source: Source, node: ast.stmt, why: str) -> TrisectError:
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


def write_bundle(folder: Path, *, family: str, model_class: str, config_class: str, record: str | None = None) -> None:
    """Put the modelling file into a saved folder, and say in its config.json what is in it."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    if config.get("architectures") != [model_class]:
        raise TrisectError(f"{path} is of {config.get('architectures')}, not of {model_class}.")
    config["auto_map"] = {"AutoConfig": f"{MODULE}.{config_class}", "AutoModelForCausalLM": f"{MODULE}.{model_class}"}
    atomic_write_text(folder / f"{MODULE}.py", bundle_text(family, model_class, config_class, record))
    write_json(path, config)
