"""Which kernels run: chosen by shape and device unless somebody wants to compare."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from trisect.errors import unknown_name

Choice = Literal["auto", "kernel", "plain"]
CHOICES = ("auto", "kernel", "plain")

_chosen: dict[str, Choice] = {"rotary": "auto", "decode": "auto", "gate": "auto"}


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
    for kernel, value in choices.items():
        if kernel not in _chosen:
            raise unknown_name("kernel", kernel, _chosen)
        if value not in CHOICES:
            raise unknown_name("choice", value, CHOICES)
    before = dict(_chosen)
    _chosen.update(choices)
    try:
        yield
    finally:
        _chosen.update(before)
