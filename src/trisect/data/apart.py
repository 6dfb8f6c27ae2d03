"""Windows to calibrate on and windows held out, of one text, with no token in both."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from trisect.data.tokens import rows, windows

HELD_OUT = 10
"""One token in so many, at the end of a text, is held out."""
TEST_SHARE = 4
"""One calibration window in so many judges: loss curves, and whether a bound on perplexity is kept."""


@dataclass(frozen=True, kw_only=True)
class Apart:
    """What became of one text."""

    solving: Tensor  # (n, length)
    judging: Tensor  # (m, length), of calibration, too: a bound on perplexity is kept on them
    rest: Tensor  # (tokens,) or (rows, length): nothing of it is in the others

    def held_out(self, count: int, *, length: int) -> Tensor:
        """The last `count` windows of what is held out, or as many as there are."""
        unit = _unit(self.rest, length)
        found = min(count, len(self.rest) // unit)
        return self.rest[len(self.rest) - found * unit :].reshape(-1, length)


def set_apart(
    ids: Tensor,
    *,
    samples: int,
    length: int,
    sampling: str,
    seed: int,
    source: str,
    whole: bool,
    judging: int = 0,
) -> Apart:
    """Choose `samples` windows, the last `judging` of them without a token of the others.

    `ids` are a stream of tokens or ready-made rows. A text that is not `whole` for calibration keeps its last
    tenth out of random windows, and whatever consecutive ones do not reach.
    """
    unit = _unit(ids, length)
    keep = len(ids) if whole or sampling == "first" else edge(len(ids), unit=unit)
    cut = partial(windows if ids.ndim == 1 else rows, length=length, sampling=sampling, seed=seed)
    if 0 < judging < samples and ids.ndim == 1 and sampling == "random":
        # Random windows of one stream overlap: those that judge come from its last part.
        at = keep - keep * judging // samples
        first = cut(ids[:at], samples=samples - judging, source=f"the first part of {source}")
        picked = torch.cat([first, cut(ids[at:keep], samples=judging, source=f"the last part of {source}")])
    else:
        name = source if keep == len(ids) else f"{source}, without its held-out end,"
        picked = cut(ids[:keep], samples=samples, source=name)
    used = keep if sampling == "random" else samples * unit
    rest = ids[:0] if whole else ids[used:]
    return Apart(
        solving=picked[: samples - judging],
        judging=picked[samples - judging :],
        rest=rest if rest.ndim == 1 else rest[:, :length],
    )


def room(ids: Tensor, *, length: int, whole: bool) -> int:
    """Windows that a text has for calibration without overlap, at least one."""
    unit = _unit(ids, length)
    return max(1, (len(ids) if whole else edge(len(ids), unit=unit)) // unit)


def edge(size: int, *, unit: int) -> int:
    """Where the held-out tenth begins: at least one window, nothing where there are no two."""
    return size - max(size // HELD_OUT, unit) if size >= 2 * unit else size


def _unit(ids: Tensor, length: int) -> int:
    """What one window takes of a stream of tokens, or of rows."""
    return length if ids.ndim == 1 else 1
