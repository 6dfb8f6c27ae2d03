"""What every part of a recipe is read with: mappings, lists and values, refused by their place in it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from trisect.errors import TrisectError, unknown_name


@contextmanager
def at_place(where: str) -> Iterator[None]:
    """Say where in the recipe an error is."""
    try:
        yield
    except TrisectError as error:
        raise TrisectError(f"{where}: {error}") from error


def check_keys(data: Any, known: Sequence[str], *, required: Sequence[str] = ()) -> None:
    """Refuse what is no mapping, keys that nobody knows, and the want of required ones."""
    if not isinstance(data, Mapping):
        raise TrisectError(f"a mapping with some of {', '.join(known)} is needed here, not {data!r}.")
    for key in data:
        if key not in known:
            raise unknown_name("key", str(key), known)
    for key in required:
        if data.get(key) is None:
            raise TrisectError(f"the key {key} is missing; docs/comparison.md describes all of them.")


def items_of(data: Mapping[str, Any], key: str, default: Any = None) -> list[tuple[str, Any]]:
    """The entries of a list, each with its place."""
    found = data.get(key, default)
    if not isinstance(found, list | tuple) or (default is None and not found):
        raise TrisectError(f"{key} must be a list with at least one entry, not {found!r}.")
    return [(f"{key}[{number}]", entry) for number, entry in enumerate(found)]


def text_of(data: Mapping[str, Any], key: str, default: str | None = None) -> str:
    """A text; of titles and notes, on one line."""
    value = data.get(key, default)
    if not isinstance(value, str) or (not value and default is None):
        raise TrisectError(f"{key} must be text, not {value!r}.")
    return " ".join(value.split()) if key in ("title", "note") else value


def count_of(data: Mapping[str, Any], key: str, default: Any, *, minimum: int) -> Any:
    """A whole number."""
    value = data.get(key, default)
    if value is None and default is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise TrisectError(f"{key} must be a whole number of at least {minimum}, not {value!r}.")
    return value


def flag_of(data: Mapping[str, Any], key: str) -> bool:
    """True or false."""
    value = data.get(key, False)
    if not isinstance(value, bool):
        raise TrisectError(f"{key} must be true or false, not {value!r}.")
    return value


def check_unique(values: Sequence[str], key: str, what: str) -> None:
    """Refuse a name that two entries have."""
    for twice in (value for value in values if values.count(value) > 1):
        raise TrisectError(f"{key}: two entries have the {what} {twice!r}; give each its own {what}.")
