"""HTML and SVG that no text can break out of: everything is escaped unless it is markup already."""

import html
import re
from typing import Any

UNWRITABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""What neither XML nor UTF-8 can hold, and what a terminal would obey."""
VOID = frozenset({"meta", "br", "input", "col"})


class Markup(str):
    """Text that is HTML or SVG already."""

    __slots__ = ()


def escape(value: Any) -> Markup:
    """Any value as text; markup stays as it is."""
    if isinstance(value, Markup):
        return value
    return Markup(html.escape(UNWRITABLE.sub("\ufffd", str(value)), quote=True))


def tag(_name: str, *children: Any, **attributes: Any) -> Markup:
    """An element. `class_` is class, `data_x` is data-x; attributes that are None are left out."""
    words = [_name]
    for name, value in attributes.items():
        if value is not None:
            words.append(f'{name.rstrip("_").replace("_", "-")}="{escape(value)}"')
    opening = f"<{' '.join(words)}>"
    if _name in VOID:
        return Markup(opening)
    return Markup(f"{opening}{join(*children)}</{_name}>")


def join(*pieces: Any, by: str = "") -> Markup:
    """Pieces one after the other, each escaped; None is nothing."""
    return Markup(by.join(escape(piece) for piece in pieces if piece is not None))
