"""Perplexity on windows of a text: the token at position j of a window is predicted from the j before it."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trisect.data.tokens import Tokens
from trisect.errors import TrisectError
from trisect.models.looking import training_flags_kept
from trisect.support.products import fast_products

log = logging.getLogger(__name__)

CONTEXT_NAMES = ("n_positions", "max_position_embeddings", "n_ctx")  # where configs state their context
Progress = Callable[[int, int], None] | None  # called with (windows done, windows in all)
CPU_LOGIT_BYTES = 1 << 30
CUDA_LOGIT_SHARE = 0.25  # share of the free memory that logits may take; activations need the rest
MAX_BATCH = 16  # beyond this many windows a batch gains no speed
CHUNK_ELEMENTS = 1 << 24  # logits turned to float32 log-probabilities at a time: 64 MiB
POSITION_TABLES = ("wpe", "embed_positions", "position_embeddings")


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Inference mode without dropout; every module gets its own training flag back."""
    with training_flags_kept(model), torch.inference_mode():
        model.eval()
        yield


def check_batch_size(batch_size: int | None) -> None:
    """Refuse batches of nothing; None lets the measurement choose."""
    if batch_size is not None and batch_size < 1:
        raise TrisectError(f"The batch size is {batch_size}; give 1 or more, or None to choose.")


def input_device(model: Any) -> torch.device:
    """The device that token ids must be on."""
    return next(model.get_input_embeddings().parameters()).device


def vocabulary(model: Any) -> int:
    """The number of ids that the model can read."""
    return int(next(model.get_input_embeddings().parameters()).shape[0])


def stated_contexts(model: Any) -> list[int]:
    """Every number of tokens that the config names as what the model reads at once."""
    config = model.config.get_text_config()
    named = [getattr(config, name, None) for name in CONTEXT_NAMES]
    return [length for length in named if isinstance(length, int) and length > 1]


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """A measurement, with what is needed to repeat it."""

    perplexity: float
    nll: float  # mean negative log-likelihood of a predicted token, in nats
    tokens: int  # predicted tokens: length - 1 per window
    windows: int
    length: int
    bits_per_byte: float | None  # bits per token over bytes per token: comparable between tokenizers
    data: str
    token_hash: str


def perplexity(
    model: PreTrainedModel,
    tokens: Tokens,
    *,
    batch_size: int | None = None,
    progress: Progress = None,
    losses_of: Callable[[Tensor], Tensor] | None = None,
) -> Perplexity:
    """The perplexity of `model` on all windows of `tokens`.

    The batch size (None: chosen to fit memory) only changes the speed. With `losses_of`, which gives
    the `window_losses` of ids, another engine computes, and the model needs no weights.
    """
    num_windows, length = tokens.ids.shape
    _check_windows(model, tokens)
    check_batch_size(batch_size)
    size = fitting_batch_size(model, length=length) if batch_size is None else batch_size
    device, total = input_device(model), 0.0

    def own(ids: Tensor) -> Tensor:
        # No name for the logits: they would live on through the next batch's forward pass.
        return window_losses(model(input_ids=ids.to(device), use_cache=False).logits, ids)

    with evaluating(model), fast_products(device):
        for start in range(0, num_windows, size):
            ids = tokens.ids[start : start + size]
            losses = (losses_of or own)(ids)
            bad = (~torch.isfinite(losses)).nonzero()
            if len(bad):
                raise not_finite(f"in window {start + int(bad[0])} of {num_windows} ({tokens.source})")
            total += losses.sum().item()
            if progress is not None:
                progress(start + len(ids), num_windows)
    predicted = num_windows * (length - 1)
    nll = total / predicted
    bits = nll / math.log(2) * tokens.ids.numel() / tokens.text_bytes if tokens.text_bytes else None
    found: Any = {"perplexity": exponential(nll), "nll": nll, "tokens": predicted, "bits_per_byte": bits}
    return Perplexity(**found, windows=num_windows, length=length, data=tokens.source, token_hash=tokens.hash)


def window_losses(logits: Tensor, ids: Tensor, *, chunk_elements: int = CHUNK_ELEMENTS) -> Tensor:
    """Summed negative log-likelihood of each window, (b, t, vocab) and (b, t) -> (b,) float64."""
    # Softmax in float32 over a few rows at a time, so that no second copy of the logits exists.
    step = max(1, chunk_elements // logits.shape[-1])
    targets = ids.to(logits.device)
    losses = torch.zeros(len(ids), dtype=torch.float64, device=logits.device)
    for window, (row, target) in enumerate(zip(logits[:, :-1], targets[:, 1:], strict=True)):
        for at in range(0, len(target), step):
            chunk = slice(at, at + step)
            nats = nn.functional.cross_entropy(row[chunk].float(), target[chunk], reduction="none")
            losses[window] += nats.sum(dtype=torch.float64)
    return losses


def fitting_batch_size(model: PreTrainedModel, *, length: int) -> int:
    """Windows whose logits fit: 1 GiB on the CPU, a quarter of the free memory on a GPU."""
    device = input_device(model)
    per_window = length * vocabulary(model) * max(model.dtype.itemsize, 4)
    on_gpu = device.type == "cuda"
    budget = CUDA_LOGIT_SHARE * torch.cuda.mem_get_info(device)[0] if on_gpu else CPU_LOGIT_BYTES
    return max(1, min(MAX_BATCH, int(budget // per_window)))


def _check_windows(model: PreTrainedModel, tokens: Tokens) -> None:
    length = tokens.ids.shape[1]
    if length < 2:
        raise TrisectError(f"Windows of {length} token predict nothing: give --length 2 or more (2048 is usual).")
    highest, known = int(tokens.ids.max()), vocabulary(model)
    if highest >= known:
        outside = f"Token id {highest} of {tokens.source} is outside the model's vocabulary of {known}"
        raise TrisectError(f"{outside}: make the ids with this model's own tokenizer.")
    check_positions(model, length=length)


def check_positions(model: PreTrainedModel, *, length: int) -> None:
    """Refuse windows longer than a table of positions; warn of those longer than the context."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] in POSITION_TABLES:
            # OPT's table starts with rows that no position uses, and says how many.
            limit = module.num_embeddings - int(getattr(module, "offset", 0))
            if length > limit:
                raise TrisectError(f"The model has learned {limit} positions: give --length {limit} or less.")
    trained = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(trained, int) and length > trained:
        exceed = f"Windows of {length} tokens exceed the model's context of {trained}"
        log.warning("%s: perplexity will look worse than the model is; --length %d stays inside.", exceed, trained)


def not_finite(where: str) -> TrisectError:
    """The error for logits that are NaN or infinite."""
    instead = "try --dtype float32; if that fails too, the weights are damaged"
    return TrisectError(f"The model's logits are not finite {where}: {instead}.")


def exponential(nll: float) -> float:
    """exp(nll), infinite where a float cannot hold it."""
    return math.exp(nll) if nll < math.log(1e308) else math.inf
