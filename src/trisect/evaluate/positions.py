"""Perplexity by position in the window: does a model hold over its whole context?

The token at position j of a window is predicted from the j tokens before it. Buckets are runs of positions,
as equal in length as they can be; the mean over all predicted tokens is the nll of `perplexity`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from trisect.data.tokens import Tokens
from trisect.errors import TrisectError
from trisect.evaluate.perplexity import Losses, exponential, sum_losses


@dataclass(frozen=True, kw_only=True)
class PositionProfile:
    """A measurement per bucket of positions, with what is needed to repeat it."""

    edges: tuple[int, ...]
    """Bucket i is about the tokens at positions edges[i] to edges[i + 1] - 1 of each window, from 0."""
    nll: tuple[float, ...]
    """Mean negative log-likelihood of a predicted token, in nats."""
    perplexity: tuple[float, ...]
    tokens: tuple[int, ...]
    """Predicted tokens, of all windows."""
    data: str
    token_hash: str


def perplexity_by_position(
    model: PreTrainedModel,
    tokens: Tokens,
    *,
    buckets: int = 8,
    batch_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> PositionProfile:
    """Measure `model` on all windows of `tokens`, each bucket of positions by itself.

    Takes as long as `perplexity`; where both are wanted, `sum_losses` gives them in one pass.
    """
    check_buckets(buckets, length=tokens.ids.shape[1])
    return profile_from(
        sum_losses(model, tokens, batch_size=batch_size, progress=progress), tokens, buckets=buckets
    )


def profile_from(losses: Losses, tokens: Tokens, *, buckets: int) -> PositionProfile:
    """The profile that a pass over `tokens` amounts to."""
    num_windows, length = tokens.ids.shape
    check_buckets(buckets, length=length)
    # Position 0 has nothing before it and is not predicted.
    edges = tuple(1 + i * (length - 1) // buckets for i in range(buckets + 1))
    runs = list(zip(edges, edges[1:], strict=False))
    counts = tuple(num_windows * (end - start) for start, end in runs)
    sums = [losses.by_position[start - 1 : end - 1].sum().item() for start, end in runs]
    nll = tuple(total / count for total, count in zip(sums, counts, strict=True))
    return PositionProfile(
        edges=edges,
        nll=nll,
        perplexity=tuple(exponential(value) for value in nll),
        tokens=counts,
        data=tokens.source,
        token_hash=tokens.hash,
    )


def check_buckets(buckets: int, *, length: int) -> None:
    """Refuse buckets that no window of `length` tokens can fill: also of use before a model is loaded."""
    if buckets < 1:
        raise TrisectError(f"{buckets} buckets of positions were asked for; give --by-position 1 or more.")
    if buckets > length - 1:
        fewer = f", or --by-position {length - 1} or less" if length > 1 else ""
        raise TrisectError(
            f"Windows of {length} tokens predict {length - 1} positions, too few for {buckets} buckets: give "
            f"--length {buckets + 1} or more{fewer}."
        )
