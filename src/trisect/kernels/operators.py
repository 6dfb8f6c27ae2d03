"""Which kernels run: chosen by shape and device unless somebody wants to compare."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from importlib.util import find_spec
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from trisect.errors import check_names

_kept: list[Any] = []  # an operator is gone when nobody holds it


def on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run `function` with its first tensor's GPU as the current one: Triton launches on that one alone."""

    @wraps(function)
    def guarded(first: Tensor, *others: Any, **named: Any) -> Any:
        with torch.cuda.device_of(first):
            return function(first, *others, **named)

    return guarded


def may_launch(x: Tensor) -> bool:
    """Whether a kernel may run without its operator, which takes the host longer than the launch itself."""
    # Compilers, autograd and tools that trace or count calls need the operator.
    if torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    return type(x) is Tensor and not is_in_torch_dispatch_mode()


def register(
    name: str,
    schema: str,
    function: Callable[..., Any],
    *,
    fake: Callable[..., Any] = lambda *arguments: None,
    remember: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> None:
    """Make `function` torch.ops.trisect.NAME of a torch schema; `fake` is its twin for compilers: shapes only."""
    # A saved folder's modelling file brings the same operators, without kernels: those that are there stay.
    if hasattr(torch.ops.trisect, name):
        return
    mutates = re.findall(r"!\) (\w+)", schema)
    operator = torch.library.custom_op(f"trisect::{name}", on_its_device(function), mutates_args=mutates, schema=schema)
    operator.register_fake(fake)
    if backward is not None:
        operator.register_autograd(backward, setup_context=remember)
    _kept.append(operator)


Choice = Literal["auto", "kernel", "plain"]
CHOICES = get_args(Choice)

_chosen: dict[str, Choice] = {"rotary": "auto", "decode": "auto", "gate": "auto", "norm": "auto"}


@cache
def has_triton() -> bool:
    """Whether Triton is installed; without it everything runs in plain torch."""
    return find_spec("triton") is not None


def choice(kernel: str) -> Choice:
    """What was chosen for a kernel: "auto" unless inside `using`."""
    return _chosen[kernel]


def wants_kernel(kernel: str, x: Tensor) -> bool:
    """Whether a kernel that has a plain twin is to work on `x`."""
    chosen = choice(kernel)
    if chosen == "auto":
        # A compiler fuses the plain form with what surrounds it, which an operator of ours would prevent.
        return x.is_cuda and has_triton() and x.dtype != torch.float64 and not torch.compiler.is_compiling()
    return chosen == "kernel"


@contextmanager
def using(**choices: Choice) -> Iterator[None]:
    """Force kernels on or off inside: `using(rotary="plain", decode="kernel")`.

    "kernel" calls the custom op even under torch.compile, which by itself would rather fuse plain torch.
    """
    check_names("kernel", choices, _chosen)
    check_names("choice", choices.values(), CHOICES)
    before = dict(_chosen)
    _chosen.update(choices)
    try:
        yield
    finally:
        _chosen.update(before)
