"""`trisect ls`: what there is to choose from."""

from typing import Annotated

from trisect.commands import _screen as screen
from trisect.commands._options import argument
from trisect.errors import unknown_name

PANEL = "Start here"
EXAMPLES = (("Everything there is to choose from", "trisect ls"), ("One table", "trisect ls methods"))
KINDS = ("methods", "pieces", "families", "data", "models")


def run(kind: Annotated[str | None, argument("Leave it out for everything.", f"[{'|'.join(KINDS)}]")] = None) -> None:
    """List methods, pieces of a3+, model families, data sources and built-in models."""
    if kind is not None and kind not in KINDS:
        raise unknown_name("list", kind, KINDS)
    for wanted in (kind,) if kind else KINDS:
        table = screen.table(title=wanted, show_header=False)
        for name, summary in entries(wanted).items():
            table.add_row(name, summary)
        screen.say(table)


def entries(kind: str) -> dict[str, str]:
    """Name -> one line about it."""
    if kind == "methods":
        from trisect.methods import METHODS

        return {name: method.summary for name, method in METHODS.items()}
    if kind == "pieces":
        from trisect.methods.a3plus import PIECES

        return dict(PIECES)
    if kind == "families":
        from trisect.models import FAMILIES

        return {name: FAMILIES[name].model for name in sorted(FAMILIES)}
    if kind == "data":
        from trisect.data import list_sources

        return dict(list_sources())
    from trisect.data import REGISTRY_MODELS

    return {name: entry.description for name, entry in REGISTRY_MODELS.items()}
