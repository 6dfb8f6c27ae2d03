"""Files, clocks, processes and receipts; and lazy imports for packages."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__` that imports a module when one of its names is used; `homes` is module -> names."""
    # Looking for a file, or refusing a name, need not wait for torch.
    places = {name: module for module, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{places[name]}"), name)

    return find
