"""Decoding with nothing rebuilt per token: a fixed cache, and one graph per stretch of its length.

b = batch, t = tokens of the prompt
"""

import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers.cache_utils import Cache, StaticLayer

from trisect.decode.prepare import compile_layers, prepare_for_inference
from trisect.errors import TrisectError, check_names
from trisect.kernels import wants_decode_kernel
from trisect.models import LayerView, heads, layer_views
from trisect.support import replaced

log = logging.getLogger(__name__)

Pick = Callable[[Tensor], Tensor]  # logits (b, v) -> tokens (b,), not asking the host: CUDA graphs record it


def likeliest(logits: Tensor) -> Tensor:
    """The token with the largest logit; of equals, the first."""
    return logits.argmax(dim=-1)


def drawn(*, temperature: float = 1.0, vocabulary: int | None = None) -> Pick:
    """Draw from softmax(logits / temperature) over the first `vocabulary` tokens.            [math.md W-1]

    Random numbers are those of torch's own generator.
    """

    def draw(logits: Tensor) -> Tensor:
        shares = (logits[:, :vocabulary].float() / temperature).softmax(dim=-1)
        # Not torch.multinomial: it looks at the shares on the host first.
        waits = torch.empty_like(shares).exponential_().clamp_(min=torch.finfo(shares.dtype).tiny)
        return (shares / waits).argmax(dim=-1)

    return draw


def resolved_mode(mode: str, model: Any, device: torch.device) -> str:
    """The mode that will run: graphs need a GPU, and a rotation that asks nothing of the host."""
    kinds = [rope.get("rope_type") for rope in heads.ropes_of(model.config.get_text_config())]
    # transformers compares the length with a number on the host to switch tables.
    moving = next((kind for kind in kinds if kind in ("dynamic", "longrope")), None)
    if mode == "auto":
        return "graphs" if device.type == "cuda" and not moving else "eager"
    if mode != "eager" and device.type != "cuda":
        raise TrisectError(f"Decoding mode {mode!r} replays CUDA graphs; on {device.type} use 'eager' or 'auto'.")
    if mode != "eager" and moving:
        host = f"This model's rotation ({moving}) looks at the length of the text on the host, which a graph cannot"
        raise TrisectError(f"{host}; use 'eager' or 'auto'.")
    return mode


def switch_of(model: Any) -> int | None:
    """The length at which a model's rotation changes for all tokens, those in the cache included."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    original = getattr(config, "original_max_position_embeddings", None)
    return int(original or rope["original_max_position_embeddings"])


def padded_after_end(new: Tensor, eos: int, pad: int) -> Tensor:
    """Pad behind each text's first end, and cut where every text has ended."""
    ended = (new == eos).cumsum(dim=1)
    behind = ended - (new == eos).long() > 0
    longest = int((~behind).sum(dim=1).max())
    return new.masked_fill(behind, pad)[:, :longest]


class StepClock:
    """Where all layers of a cache write next: tensors for captured graphs to read, integers to choose one."""

    def __init__(self, device: torch.device):
        self.slot = torch.zeros(1, dtype=torch.int64, device=device)
        self.start: Tensor | None = None  # first slot of each text (b,), behind its padding; None without any
        self.prompt = 0  # tokens of the prompt while it is being read, 0 afterwards
        self.live = 0  # slots that attention looks at; those not written yet are behind the mask


class LiveLayer(StaticLayer):
    """Keys and values of one layer, each as wide as they come."""

    def __init__(self, max_length: int, clock: StepClock):
        super().__init__(max_cache_len=max_length)
        self.clock = clock

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
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
    """One LiveLayer per decoder layer, all on one clock."""

    # Layers with a sliding window keep every token too: the mask hides what is outside the window.

    def __init__(self, num_layers: int, max_length: int, device: torch.device):
        self.clock = StepClock(device)
        super().__init__(layers=[LiveLayer(max_length, self.clock) for _ in range(num_layers)])


Mode = Literal["auto", "eager", "graphs", "compile"]
MODES = get_args(Mode)
BUCKET = 256
WARM_UP = 3
LOOK_EVERY = 16  # steps between two looks at whether all texts have ended: each look waits for the device
WORK = 1.3e11  # multiplications of a layer by prompts: half a millisecond of an H200, and of the host that launches it
LENGTHS = 8  # at which prompts are recorded, in each octave


def recorded_length(tokens: int) -> int:
    """The length at which prompts of so many tokens are recorded: the same or longer, by less than an eighth."""
    step = max(1, (1 << tokens.bit_length() - 1) // LENGTHS)
    return -(-tokens // step) * step


@dataclass(kw_only=True)
class RecordedPrompt:
    """A graph that reads prompts of one length, and of fewer tokens."""

    ids: Tensor  # (b, t)
    last: Tensor  # (1,) the place of the last token
    logits: Tensor | None = None  # (b, v) behind that token
    graph: Any = None

    def read(self, ids: Tensor) -> Tensor:
        """Logits (b, v) behind prompts (b, up to t)."""
        # No token of a prompt sees what is left behind it, and the cache writes over that before it is read.
        assert self.logits is not None
        self.ids[:, : ids.shape[1]].copy_(ids)
        self.last.fill_(ids.shape[1] - 1)
        self.graph.replay()
        return self.logits


class Decoder:
    """Reads prompts and continues them, one token per text and step.

        decoder = Decoder(model, batch=8, max_length=2048)
        decoder.prefill(ids)                # (b, t) -> the first new token of each text, (b,)
        decoder.step()                      # the next one, (b,), on the device, without waiting for it
        decoder.generate(ids, 100)          # all at once: (b, t + 100)

    Modes: "eager" calls the model for every token; "graphs" replays a CUDA graph of that call, and of short
    prompts whose length comes again; "compile" compiles the decoder layers first (once for all layers of equal
    widths); "auto" is "graphs" on a GPU and "eager" elsewhere.

    Our own attention kernel reads the live part of the cache only. Where torch's attention is used instead,
    it looks at the cache in steps of `bucket` slots, with one graph for each; without graphs, at what is
    written. `pick` makes tokens (b,) of logits (b, v): the likeliest ones, or what `drawn` draws
    (trisect.decode.decoder).
    """

    def __init__(
        self,
        model: Any,
        *,
        batch: int,
        max_length: int,
        mode: Mode = "auto",
        bucket: int | None = None,
        pick: Pick = likeliest,
    ):
        check_names("decoding mode", [mode], MODES)
        if batch < 1 or max_length < 2 or (bucket is not None and bucket < 1):
            needed = "a batch of 1 or more, room for 2 tokens or more and a bucket of 1 or more"
            raise TrisectError(f"Decoding needs {needed}; got {batch}, {max_length} and {bucket}.")
        self.model, self.batch, self.max_length = model.eval(), batch, max_length
        self.device = next(model.parameters()).device
        self.mode = resolved_mode(mode, model, self.device)
        self._asked, self._records = mode, self.mode != "eager"  # steps
        self._views = layer_views(model, own=True)
        for view in self._views:
            if view.why_no_decoder is not None:
                other = f"Layer {view.index} has {view.why_no_decoder}, which the Decoder's cache cannot hold"
                raise TrisectError(f"{other}; use model.generate of transformers, and calibrate on a text file.")
        prepare_for_inference(model)
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        # Experts of many tokens are found by asking the device; a compiler has its own way with lengths.
        plain = self._takes_positions and all(view.experts is None for view in self._views)
        self._records_prompts = self.mode == "graphs" and plain
        self._layer_size = max(sum(p.numel() for p in view.layer.parameters()) for view in self._views)
        self.cache = LiveCache(len(self._views), max_length, self.device)
        for view, layer in zip(self._views, self.cache.layers, strict=True):
            view.attention.live = layer
        self.bucket = bucket or self._default_bucket()
        for layer in self.cache.layers:  # without graphs attention sees what is written, and needs no mask
            layer.is_compileable = self.bucket > 1
        self.tokens = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self._positions = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        self._mask = torch.ones(batch, max_length, dtype=torch.int64, device=self.device)
        self._start_slots = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self._masked = False
        self._seen = 0
        self._switch = switch_of(model)
        self._text: list[Tensor] = []
        self._graphs: dict[tuple[int, bool], Any] = {}
        self._prompts: dict[int, RecordedPrompt | None] = {}
        self._pool: Any = None
        self._pick = pick

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values, for all `max_length` slots of all texts."""
        tensors = [x for layer in self.cache.layers for x in (layer.keys, layer.values) if x is not None]
        return sum(x.nbytes for x in tensors)

    @torch.no_grad()
    def prefill(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Read prompts (b, t), padded on the left where `attention_mask` is 0, and start over with them."""
        self._check_prompt(ids, attention_mask)
        self._start(ids, attention_mask)
        self._text = [ids.to(self.device)]
        return self._read(self._text[0])

    @torch.no_grad()
    def step(self) -> Tensor:
        """The next token of each text, (b,). The tensor is a copy that later steps leave alone."""
        if self._seen == 0:
            raise TrisectError("Nothing to continue: call prefill(ids) before step().")
        if self._seen >= self.max_length:
            full = f"The cache is full after {self.max_length} tokens"
            raise TrisectError(f"{full}; give the Decoder a larger max_length.")
        if self._seen == self._switch:
            return self._read(torch.cat(self._text, dim=1))
        live = min(self.max_length, -(-(self._seen + 1) // self.bucket) * self.bucket)
        self.cache.clock.live = live
        graph = self._graph(live) if self._records else None
        if graph is None:
            self._advance()
        else:
            graph.replay()
        self._seen += 1
        return self._new_tokens()

    def seek(self, length: int) -> None:
        """Go on as if each text had `length` tokens in the cache, whatever is there: for measuring a step."""
        if not 0 < length < self.max_length:
            raise TrisectError(f"A cache of {self.max_length} slots has no step behind {length} tokens.")
        self._positions.add_(length - self._seen)
        self.cache.clock.slot.fill_(length)
        self._seen = length

    @torch.no_grad()
    def generate(
        self,
        ids: Tensor,
        new_tokens: int,
        *,
        attention_mask: Tensor | None = None,
        eos_token_id: int | None = None,
        pad_token_id: int = 0,
    ) -> Tensor:
        """Prompts and what follows, (b, t + new_tokens), fewer if every text has reached `eos_token_id`.

        As transformers' generate(do_sample=False), unless `pick` draws: texts that ended early are padded
        with `pad_token_id`.
        """
        if ids.shape[1] + new_tokens > self.max_length + 1:
            many = f"{ids.shape[1]} tokens and {new_tokens} new ones do not fit a cache of {self.max_length}"
            raise TrisectError(f"{many}; make the Decoder with max_length={ids.shape[1] + new_tokens}.")
        found = [self.prefill(ids, attention_mask)]
        while len(found) < new_tokens:
            if eos_token_id is not None and len(found) % LOOK_EVERY == 0:
                if torch.stack(found, dim=1).eq(eos_token_id).any(dim=1).all():
                    break
            found.append(self.step())
        new = torch.stack(found[:new_tokens], dim=1)
        if eos_token_id is not None:
            new = padded_after_end(new, eos_token_id, pad_token_id)
        return torch.cat([ids.to(self.device), new], dim=1)

    def _check_prompt(self, ids: Tensor, attention_mask: Tensor | None) -> None:
        if ids.ndim != 2 or ids.shape[0] != self.batch or not 0 < ids.shape[1] <= self.max_length:
            shape = f"({self.batch}, 1 to {self.max_length})"
            raise TrisectError(f"This Decoder reads prompts of shape {shape}, got {tuple(ids.shape)}.")
        if attention_mask is None:
            return
        same = attention_mask.shape == ids.shape
        if not same or not attention_mask[:, -1].all() or (attention_mask.diff(dim=1) < 0).any():
            needed = "have the prompt's shape and pad on the left: zeros, then ones to the end of every row"
            raise TrisectError(f"The attention mask must {needed}.")

    def _start(self, ids: Tensor, attention_mask: Tensor | None) -> None:
        length, self._seen = ids.shape[1], ids.shape[1]
        self._mask.fill_(1)
        self._positions.fill_(length)
        self._masked = attention_mask is not None and not bool(attention_mask.all())
        if self._masked:
            assert attention_mask is not None
            self._mask[:, :length] = attention_mask.to(self.device)
            self._positions.copy_(self._mask[:, :length].sum(1, keepdim=True))
        self._start_slots.copy_(length - self._positions[:, 0])
        self.cache.clock.start = self._start_slots if self._masked else None

    def _read(self, ids: Tensor) -> Tensor:
        """Put a whole text (b, t) into the cache; the first token behind it."""
        length, clock = ids.shape[1], self.cache.clock
        recorded = self._recorded_prompt(length)
        clock.prompt = clock.live = length
        if recorded is None:
            mask = self._mask[:, :length] if self._masked else None
            positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
            logits = self._logits(ids, mask, positions)
        else:
            logits = recorded.read(ids)
        self.tokens.copy_(self._pick(logits))
        clock.prompt = 0
        clock.slot.fill_(length)
        self._positions.add_(length - self._seen)
        self._seen = length
        return self._new_tokens()

    def _new_tokens(self) -> Tensor:
        token = self.tokens.clone()
        if self._switch is not None and self._seen <= self._switch:
            self._text.append(token[:, None])
        return token

    def _logits(self, ids: Tensor, mask: Tensor | None, positions: Tensor | None, keep: int | Tensor = 1) -> Tensor:
        """Logits (b, v) of the last token, or of the one that `keep` (1,) names."""
        extra = {"position_ids": positions} if self._takes_positions and positions is not None else {}
        given: Any = {"attention_mask": mask, "past_key_values": self.cache, "use_cache": True, "logits_to_keep": keep}
        logits: Tensor = self.model(ids, **given, **extra).logits
        return logits[:, -1]

    def _advance(self) -> None:
        """One token for every text; all that changes from call to call is on the device."""
        # MPT makes up its own mask, of a size it would have to ask the device for.
        mask = self._mask[:, : self.cache.clock.live] if self._masked or not self._takes_positions else None
        self.tokens.copy_(self._pick(self._logits(self.tokens[:, None], mask, self._positions)))
        self._positions.add_(1)
        self.cache.clock.slot.add_(1)

    def _graph(self, live: int) -> Any:
        """The graph for a stretch of the cache, recorded when it is first needed; None where none can be."""
        key = live, self._masked
        if key not in self._graphs:
            if self.mode == "compile" and not self._graphs:  # the prompt was read by now, and the cache has its place
                compile_layers(self._views)
            state = self.tokens, self._positions, self.cache.clock.slot
            before = [x.clone() for x in state]

            def rewind() -> None:
                for x, value in zip(state, before, strict=True):
                    x.copy_(value)

            graph = self._recorded(self._advance, rewind, "decoding")
            self._records = graph is not None
            if graph is None:
                return None
            self._graphs[key] = graph
        return self._graphs[key]

    def _recorded_prompt(self, length: int) -> RecordedPrompt | None:
        """The graph for prompts of so many tokens, recorded when the second of them comes; None where none can be."""
        padded = recorded_length(length)
        short = padded <= self.max_length and padded * self.batch * self._layer_size <= WORK
        if not (self._records_prompts and short) or self._masked:
            return None
        if padded not in self._prompts:
            self._prompts[padded] = None
        elif self._prompts[padded] is None:
            made = [torch.zeros(*size, dtype=torch.int64, device=self.device) for size in ((self.batch, padded), (1,))]
            found = RecordedPrompt(ids=made[0], last=made[1])
            self.cache.clock.prompt = self.cache.clock.live = padded

            def read() -> None:
                found.logits = self._logits(found.ids, None, None, found.last)

            found.graph = self._recorded(read, lambda: None, "reading prompts")
            self._records_prompts = found.graph is not None
            self._prompts[padded] = found if self._records_prompts else None
        return self._prompts[padded]

    def _recorded(self, step: Callable[[], None], rewind: Callable[[], None], what: str) -> Any:
        """A graph; None where a model cannot be recorded (some make tensors on the host) and nobody asked for one."""
        try:
            with recordable_experts(self._views, batch=self.batch):
                graph = record_graph(step, rewind=rewind, pool=self._pool)
        except RuntimeError as error:
            if self._asked != "auto":
                raise
            rewind()
            log.warning("%s without CUDA graphs, more slowly: %s", what, str(error).splitlines()[0])
            return None
        self._pool = graph.pool()
        return graph

    def _default_bucket(self) -> int:
        """All slots where every layer reads the live ones only; MPT's bias is no business of our kernel."""
        alone = self._takes_positions and wants_decode_kernel(next(self.model.parameters())[:1])
        for view in self._views:
            cached = any(linear.cached for linear in view.shape().linears)
            alone = alone and view.attention.prepared and view.attention.has_kernel and not cached
        return self.max_length if alone else 1 if self.mode == "eager" else BUCKET


def recordable_experts(views: Sequence[LayerView], *, batch: int) -> AbstractContextManager[None]:
    """Run mixtures so that a graph can hold them: without asking the device which experts are needed."""
    # Grouped products ask nothing in bfloat16. Else every token's experts are gathered, for one token the faster way.
    modules = [view.experts.module for view in views if view.experts is not None]
    modules = [module for module in modules if hasattr(module, "config")]  # Llama 4's run in one way only
    fit = all(m.down_proj.dtype == torch.bfloat16 and getattr(m, "fits_groups", True) for m in modules)
    grouped = fit and batch > 1
    configs = {id(m.config): m.config for m in modules}.values()
    way = "grouped_mm" if grouped else "batched_mm"
    return replaced(*((config, "_experts_implementation", way) for config in configs))


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    """The one that steps warm up on: each stream keeps 64 MiB of working space of cuBLAS for good."""
    return torch.cuda.Stream(device)


def record_graph(step: Callable[[], None], *, rewind: Callable[[], None], pool: Any = None) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one step; `rewind` undoes the steps before it, which allocate and compile."""
    side = _side_stream(torch.cuda.current_device())
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
            rewind()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        step()
    return graph
