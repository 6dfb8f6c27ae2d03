"""What the names of many modules are called in one file, where several may mean different things by one."""

import ast
from collections.abc import Sequence

from trisect.bundle.sources import Source, is_ours

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
