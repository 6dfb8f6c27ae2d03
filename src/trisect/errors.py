"""The one exception that is the user's to fix: what came, what would do, what to type next."""

from collections.abc import Collection, Iterable
from difflib import get_close_matches


class TrisectError(ValueError):
    """Bad input. The command line prints its message on one line and exits with code 2."""


def unknown_name(kind: str, name: str, known: Iterable[str], hint: str = "") -> TrisectError:
    """An error for a name that is not in a table: near names first, then everything there is."""
    names = sorted(known)
    near = f" Did you mean {' or '.join(found)}?" if (found := get_close_matches(name, names)) else ""
    tail = f" {hint}" if hint else ""
    return TrisectError(f"Unknown {kind} {name!r}.{near} Known: {', '.join(names)}.{tail}")


def check_names(kind: str, names: Iterable[str], known: Collection[str], hint: str = "") -> None:
    """Refuse a name that is not in a table."""
    for name in names:
        if name not in known:
            raise unknown_name(kind, name, known, hint)


def option_name(name: str) -> str:
    """A setting as it is typed: kv_ratio -> --kv-ratio."""
    return "--" + name.replace("_", "-")
