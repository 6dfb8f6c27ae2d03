"""Streaming second moments of what a layer computes: which there are, where they are heard, how they add up.

Sums run in float64: moments of a million bf16 activations keep the digits their small eigenvalues live in.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trisect.errors import TrisectError
from trisect.models.view import LayerView

# b = batch, t = tokens, n = b t, h = heads, d = head width, I = MLP width


def head_grams(x: Tensor) -> Tensor:
    """(b, t, h, d) -> (h, d, d), summed over tokens."""
    x = x.flatten(0, 1).double().transpose(0, 1)  # (n, h, d) -> (h, n, d)
    return x.mT @ x


def square_grams(x: Tensor) -> Tensor:
    """head_grams of the squared channels."""
    return head_grams(x.double().square())


def whole_gram(x: Tensor) -> Tensor:
    """(b, t, h, d) -> (h d, h d)."""
    x = x.flatten(0, 1).flatten(1).double()
    return x.mT @ x


def channel_energy(x: Tensor) -> Tensor:
    """(..., I) -> (I,)."""
    return x.flatten(0, -2).double().square().sum(dim=0)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One kind of moment: the tap it listens to and what it sums."""

    tap: str
    sum: Callable[[Tensor], Tensor]


READINGS: dict[str, Reading] = {
    "q": Reading(tap="q", sum=head_grams),
    "k": Reading(tap="k", sum=head_grams),
    "v": Reading(tap="v", sum=head_grams),
    "a": Reading(tap="a", sum=head_grams),
    "a_gram": Reading(tap="a", sum=whole_gram),
    "q_squares": Reading(tap="q_raw", sum=square_grams),
    "k_squares": Reading(tap="k_raw", sum=square_grams),
    "mlp": Reading(tap="down", sum=channel_energy),
}


class Accumulator:
    """Sums of the moments asked for, over all batches of one layer."""

    def __init__(self, names: frozenset[str]):
        self.names = names
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}

    def __call__(self, tap: str, x: Tensor) -> None:
        for name in sorted(self.names):
            reading = READINGS[name]
            if reading.tap == tap:
                value = reading.sum(x)
                self.sums[name] = self.sums[name] + value if name in self.sums else value
                tokens = x.numel() // x.shape[-1] if tap == "down" else x.shape[0] * x.shape[1]
                self.counts[name] = self.counts.get(name, 0) + tokens

    def means(self, layer: int) -> dict[str, Tensor]:
        """Second moments per token; a non-finite one names the layer and the tensor."""
        for name, total in self.sums.items():
            if not total.isfinite().all():
                raise TrisectError(
                    f"Layer {layer}: the activations behind {name!r} hold NaN or inf; load the model in a "
                    "wider dtype (--dtype float32), or check the checkpoint."
                )
        return {name: total / self.counts[name] for name, total in self.sums.items()}


@contextmanager
def listening(view: LayerView, names: frozenset[str]) -> Iterator[Accumulator]:
    """Collect the named moments while the layer runs; whatever was attached is taken off again."""
    accumulator = Accumulator(names)

    def hear_down(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        accumulator("down", args[0])

    handle = view.down.register_forward_pre_hook(hear_down)
    view.attention.tap = accumulator
    try:
        with torch.no_grad():
            yield accumulator
    finally:
        view.attention.tap = None
        handle.remove()
