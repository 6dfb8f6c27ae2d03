"""What a3+ costs beside a3, counted in multiplications of linear maps."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from tiny_models import tiny, tokens
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.pipeline.run import compress


@contextmanager
def multiplications() -> Iterator[list[int]]:
    """Of all linear maps called inside; twice where a backward pass follows."""
    found: list[int] = []

    def count(module: Any, args: Any, output: Any) -> None:
        if isinstance(module, torch.nn.Linear):
            found.append(args[0].numel() * module.out_features * (2 if torch.is_grad_enabled() else 1))

    handle = register_module_forward_hook(count)
    try:
        yield found
    finally:
        handle.remove()


def cost(name: str, method: str) -> int:
    config = CompressConfig(ratio=0.25, method=method, align=None, allocate="uniform", qk_norm_tolerance=1.0)
    with multiplications() as found:
        compress(tiny(name), config, tokens=tokens_from_tensor(tokens(32, 16, seed=5)))
    return sum(found)


@pytest.mark.parametrize("name", ["llama-gqa", "mpt", "gpt_neox", "qwen3"])
def test_a3_plus_takes_at_most_seven_times_the_forward_passes_of_a3(name: str) -> None:
    """One for the dense stream; QK, OV, neurons, their two refits, and the narrow stream's own; one and a half for
    gradients of one window in two."""
    assert cost(name, "a3") < cost(name, "a3+") <= 7 * cost(name, "a3")
