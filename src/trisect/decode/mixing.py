"""Give a stock module another forward where it stands: its parameters, names and hooks stay as they are."""

from functools import cache
from typing import Any


def mix_in(mixin: Any, module: Any) -> None:
    """Make a module one of `mixin`, whose forward comes first; `isinstance` checks of others still hold."""
    if not isinstance(module, mixin):
        stock: Any = type(module)
        module.__class__ = _mixed_class(mixin, stock)


@cache
def _mixed_class(mixin: Any, stock: Any) -> Any:
    """One class for all layers, or a compiler would take them for different ones."""
    return type(f"Fused{stock.__name__}", (mixin, stock), {"__module__": __name__})
