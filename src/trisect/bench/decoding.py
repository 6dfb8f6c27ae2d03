"""One token after the other behind a prompt, in steps that never wait for the device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

from trisect.decode import Decoder
from trisect.decode.decoder import WARM_UP, record_graph
from trisect.models import layer_views


class OwnStepper:
    """A model with our attention in trisect's Decoder, every graph recorded before a step is timed."""

    def __init__(self, model: Any, prompt: Tensor, *, new: int, mode: str):
        batch, length = prompt.shape
        self.model, self.prompt, self.new = model, prompt, new
        own: Any = "eager" if mode == "plain" else mode
        self.decoder = Decoder(model, batch=batch, max_length=length + max(new, WARM_UP), mode=own)

    def start(self) -> None:
        """Run the prompt and make every step ready: what is captured or compiled is so afterwards."""
        length = self.prompt.shape[1]
        self.decoder.prefill(self.prompt)
        for _ in range(WARM_UP):
            self.decoder.step()
        # A graph is recorded for each stretch of the cache, when a step first gets there.
        bucket = self.decoder.bucket
        for stretch in range(length // bucket + 1, (length + self.new - 1) // bucket + 1):
            self.decoder.seek(stretch * bucket)
            self.decoder.step()
        self.seek(0)

    def step(self) -> object:
        return self.decoder.step()

    def seek(self, position: int) -> None:
        self.decoder.seek(self.prompt.shape[1] + position)

    def cache_bytes(self) -> int:
        return self.decoder.cache_bytes

    def close(self) -> None:
        for view in layer_views(self.model):
            view.attention.live = None  # the layer's part of the cache
            view.layer._compiled_call_impl = None  # what nn.Module.compile leaves behind
        del self.decoder


class StockStepper:
    """transformers' model and static cache, with a CUDA graph or a compiled step around them."""

    def __init__(self, model: Any, prompt: Tensor, *, new: int, mode: str):
        self.model, self.prompt, self.mode = model, prompt, mode
        # Steps that warm up write to the cache as well, so there is room for them.
        self.cache = StaticCache(config=model.config, max_cache_len=prompt.shape[1] + max(new, WARM_UP))
        self.token = prompt[:, -1:].clone()
        self._next: Callable[[Tensor], Tensor] = self._forward
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def start(self) -> None:
        """Run the prompt and make every step ready: what is captured or compiled is so afterwards."""
        self.model(input_ids=self.prompt, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        if self.mode == "compile":
            overhead = "reduce-overhead" if self.prompt.is_cuda else None
            self._next = torch.compile(self._forward, dynamic=False, mode=overhead)
        if self.mode == "graphs":
            self._graph = record_graph(self._advance, rewind=lambda: self.seek(0))
            self.seek(0)
        for _ in range(WARM_UP):
            self.step()
        self.seek(0)

    @torch.no_grad()
    def step(self) -> None:
        """Decode one token of every sequence, greedily."""
        if self._graph is not None:
            self._graph.replay()
            return
        if self.mode == "compile":
            torch.compiler.cudagraph_mark_step_begin()
        self._advance()

    def seek(self, position: int) -> None:
        """Go on as if `position` tokens had been decoded; their keys and values are whatever is there."""
        length = self.prompt.shape[1] + position
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(length)
            if hasattr(layer, "cumulative_length_int"):  # sliding windows count on the host as well
                layer.cumulative_length_int = length

    def cache_bytes(self) -> int:
        return cache_bytes(self.cache)

    def close(self) -> None:
        del self.cache, self._graph

    def _advance(self) -> None:
        self.token.copy_(self._next(self.token))

    def _forward(self, token: Tensor) -> Tensor:
        logits = self.model(input_ids=token, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(dim=-1, keepdim=True)


def cache_bytes(cache: Any) -> int:
    """Bytes of the keys and values that a transformers cache holds."""
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(x.nbytes for x in tensors if isinstance(x, Tensor))
