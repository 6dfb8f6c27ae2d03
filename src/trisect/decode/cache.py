"""A KV cache of fixed size whose tensors never move, of which only the tokens so far are looked at.

b = batch, t = new tokens, k = key/value heads
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, StaticLayer


class Clock:
    """Where all layers of a cache write next: tensors for captured graphs to read, integers to choose one."""

    def __init__(self, device: torch.device):
        self.slot = torch.zeros(1, dtype=torch.int64, device=device)
        self.start: Tensor | None = None
        """First slot of each text (b,), behind its padding; None where no text is padded."""
        self.prompt = 0
        """Tokens of the prompt while it is being read, 0 afterwards."""
        self.live = 0
        """Slots that attention looks at; those not written yet are behind the mask."""


class LiveLayer(StaticLayer):
    """Keys and values of one layer, each as wide as they come."""

    def __init__(self, max_length: int, clock: Clock):
        super().__init__(max_cache_len=max_length)
        self.clock = clock

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write (b, k, t, width) and return what attention is to look at."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        prompt, live = self.clock.prompt, self.clock.live
        if prompt:
            self.keys[:, :, :prompt].copy_(key_states)
            self.values[:, :, :prompt].copy_(value_states)
        else:
            self.keys.index_copy_(2, self.clock.slot, key_states)
            self.values.index_copy_(2, self.clock.slot, value_states)
        return self.keys[:, :, :live], self.values[:, :, :live]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.clock.live, 0

    def get_seq_length(self) -> Any:
        """Tokens before the new ones: a number for the prompt, so that a plain causal mask is recognised."""
        return 0 if self.clock.prompt else self.clock.slot[0]


class LiveCache(Cache):
    """One LiveLayer per decoder layer, all on one clock.

    Layers with a sliding window keep every token too: the mask hides what is outside the window.
    """

    def __init__(self, num_layers: int, max_length: int, device: torch.device):
        self.clock = Clock(device)
        super().__init__(layers=[LiveLayer(max_length, self.clock) for _ in range(num_layers)])

    @property
    def nbytes(self) -> int:
        """Bytes the cache holds, once a prompt was read."""
        tensors = [x for layer in self.layers for x in (layer.keys, layer.values) if x is not None]
        return sum(x.nbytes for x in tensors)
