"""Custom operators of this package: registered once per process, whoever comes first."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_kept: list[Any] = []
"""An operator is gone when nobody holds it."""


def nothing(*arguments: Any) -> None:
    """The twin of an operator that writes into its arguments and gives nothing back."""


def beside_its_data(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run `function` with its first tensor's GPU as the current one: Triton launches on that one alone."""

    @wraps(function)
    def guarded(first: Tensor, *others: Any, **named: Any) -> Any:
        with torch.cuda.device_of(first):
            return function(first, *others, **named)

    return guarded


def unwatched(x: Tensor) -> bool:
    """Whether a kernel may run without its operator, which takes the host longer than the launch itself.

    Operators are for who looks on: compilers, autograd, and whoever traces or counts what is called.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    return type(x) is Tensor and not is_in_torch_dispatch_mode()


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
    operator = torch.library.custom_op(f"trisect::{name}", beside_its_data(function), mutates_args=mutates)
    operator.register_fake(fake)
    if backward is not None:
        operator.register_autograd(backward, setup_context=remember)
    _kept.append(operator)
