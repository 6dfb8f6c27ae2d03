"""What a section of docs/results.md is."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from tables import Entry, provenance, read_all


def nothing() -> list[str]:
    return []


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of the page; without receipts it is left out."""

    name: str
    title: str
    what: str
    command: str
    entries: Callable[[], list[Entry]]
    """The receipts, or files that hold one."""
    body: Callable[[], str]
    short: Callable[[], list[str]] = nothing
    pictures: Callable[[], dict[str, bytes]] = dict
    """File name -> SVG."""

    def text(self) -> str:
        """Markdown; empty where nothing was measured."""
        entries = self.entries()
        if not entries:
            return ""
        images = "\n".join(image(name) for name in drawn(self))
        source = f"Receipts: `{self.command}`. {provenance(entries)}"
        short = "\n".join(f"- {line}" for line in self.short())
        pieces = [f"## {self.title}", self.what, source, self.body(), images, short]
        return "\n\n".join(piece for piece in pieces if piece)


@cache
def drawn(section: Section) -> dict[str, bytes]:
    """Its figures, drawn once for the page and for their files."""
    return section.pictures() if section.entries() else {}


def image(name: str) -> str:
    return f"![{name.removesuffix('.svg').replace('-', ' ')}](pictures/results/{name})"


def files(pattern: str) -> Callable[[], list[Entry]]:
    """Receipts by the names of their files; experiments that failed wrote none."""
    return lambda: list(read_all(pattern).values())
