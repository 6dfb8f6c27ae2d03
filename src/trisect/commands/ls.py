"""`trisect ls`: what there is to choose from."""

from typing import Annotated, Any

from trisect.commands import _screen as screen
from trisect.commands._options import argument
from trisect.errors import unknown_name

PANEL = "Start here"
EXAMPLES = (("Everything there is to choose from", "trisect ls"), ("One table", "trisect ls methods"))
FAMILY_COLUMNS = ("family", "QK", "OV", "MLP", "experts", "HF export", "GGUF", "vLLM")
KINDS = ("methods", "pieces", "families", "data", "models")


def run(kind: Annotated[str | None, argument("Leave it out for everything.", f"[{'|'.join(KINDS)}]")] = None) -> None:
    """List methods, pieces of a3+, model families, data sources and built-in models."""
    if kind is not None and kind not in KINDS:
        raise unknown_name("list", kind, KINDS)
    for wanted in (kind,) if kind else KINDS:
        if wanted == "families":
            table = screen.table(*FAMILY_COLUMNS, title=wanted)
            for row in family_rows():
                table.add_row(*row)
        else:
            table = screen.table(title=wanted, show_header=False)
            for name, summary in entries(wanted).items():
                table.add_row(name, summary)
        screen.say(table)


def family_rows() -> list[tuple[str, ...]]:
    """What can be done to the models of each family, from its record and from what exporters write."""
    from trisect.export.gguf import ARCHITECTURES
    from trisect.export.stock import no_stock_form
    from trisect.models import FAMILIES, WRAPPERS

    rows = []
    for name in sorted(FAMILIES):
        family = FAMILIES[name]
        stock = no_stock_form(family) is None
        whole = ", QK whole" if family.norms is not None else ""
        experts = getattr(family, "experts", None) is not None
        rows.append(
            (
                name,
                _qk(family),
                "yes",
                "no" if experts else "yes",
                "yes" if experts else "no",
                f"yes{whole}" if stock else "no",
                f"yes{whole}" if stock and name in ARCHITECTURES else "no",
                "portable" if stock else "no",
            )
        )
    inside = ("as the text model inside", *["yes"] * 2, *["no"] * 4)
    return rows + [(name, *inside) for name in sorted(WRAPPERS)]


def _qk(family: Any) -> str:
    """How queries and keys are narrowed."""
    if family.rotary is None:
        return "SVD"
    if family.norms is None:
        return "pairs, folds"
    return "pairs, folds; whole behind a LayerNorm" if family.norm_centred else "pairs"


def entries(kind: str) -> dict[str, str]:
    """Name -> one line about it."""
    if kind == "methods":
        from trisect.methods import METHODS

        return {name: method.summary for name, method in METHODS.items()}
    if kind == "pieces":
        from trisect.methods.a3plus import PIECES

        return dict(PIECES)
    if kind == "data":
        from trisect.data import list_sources

        return dict(list_sources())
    from trisect.data import REGISTRY_MODELS

    return {name: entry.description for name, entry in REGISTRY_MODELS.items()}
