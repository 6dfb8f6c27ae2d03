"""Custom operators of this package: registered once per process, whoever comes first."""

from collections.abc import Callable
from typing import Any

import torch

_kept: list[Any] = []
"""An operator is gone when nobody holds it."""


def nothing(*arguments: Any) -> None:
    """The twin of an operator that writes into its arguments and gives nothing back."""


def register(
    name: str,
    function: Callable[..., Any],
    *,
    fake: Callable[..., Any] = nothing,
    mutates: tuple[str, ...] = (),
    remember: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> None:
    """Make `function` torch.ops.trisect.NAME; `fake` is its twin for compilers, which only makes shapes.

    A saved folder's modelling file brings the same operators, without kernels: those that are there stay.
    """
    if hasattr(torch.ops.trisect, name):
        return
    operator = torch.library.custom_op(f"trisect::{name}", function, mutates_args=mutates)
    operator.register_fake(fake)
    if backward is not None:
        operator.register_autograd(backward, setup_context=remember)
    _kept.append(operator)
