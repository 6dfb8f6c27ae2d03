"""Windows of token ids: cut out of a text, chosen, split into calibration and held-out ones, hashed."""

import hashlib
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from trisect.errors import TrisectError, check_names


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Windows of token ids and where they come from; compared by their hash."""

    ids: Tensor = field(compare=False)  # (n, length) int64, on the CPU
    source: str  # what a person would call it: a name, a path, a mixture
    hash: str  # sha256 over shape and content, both as little-endian int64
    text_bytes: int | None = None
    """UTF-8 bytes of the text that `ids` decode to, for bits per byte; None where it is unknown."""


def tokens_from_tensor(ids: Tensor, source: str = "tensor", *, text_bytes: int | None = None) -> Tokens:
    """Tokens that own a copy of `ids`, (n, length) non-negative integers."""
    came = f"Token ids from {source}"
    if ids.ndim != 2 or ids.numel() == 0:
        needed = "trisect needs (windows, length), neither of them 0. Give one sequence as ids.unsqueeze(0)"
        raise TrisectError(f"{came} have shape {tuple(ids.shape)}; {needed}.")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TrisectError(f"{came} are {ids.dtype}; trisect needs integers, e.g. torch.int64.")
    if (lowest := int(ids.min())) < 0:
        instead = "Replace padding or label masks (such as -100) by real tokens"
        raise TrisectError(f"{came} hold {lowest}; ids start at 0. {instead}.")
    # A copy, so that the hash stays true when the caller goes on to write into its tensor.
    owned = ids.detach().to(device="cpu", dtype=torch.int64, copy=True).contiguous()
    return Tokens(ids=owned, source=source, hash=content_hash(owned), text_bytes=text_bytes)


def content_hash(ids: Tensor) -> str:
    """sha256 over shape and content as little-endian int64, the same on every machine."""
    digest = hashlib.sha256()
    digest.update(b"".join(size.to_bytes(8, "little", signed=True) for size in ids.shape))
    digest.update(ids.to(device="cpu", dtype=torch.int64).contiguous().numpy().astype("<i8").data)
    return digest.hexdigest()


def windows(
    ids: Tensor,
    *,
    samples: int | None,
    length: int,
    sampling: str,
    seed: int,
    source: str = "the text",
    fewer: bool = False,
) -> Tensor:
    """(samples, length) windows of a stream of tokens, (num_tokens,), or of ready-made rows, (n, at least length).

    `first`: windows in order, without overlap; all of them if `samples` is None. `random`, of a stream: in random
    order, with random gaps between them; where the text is too short for that many, they overlap as little as they
    can. `random`, of rows: without replacement. Longer rows lose their end. With `fewer`, what there is will do.
    """
    check_request(samples=samples, length=length, sampling=sampling)
    generator, is_stream = torch.Generator().manual_seed(seed), ids.ndim == 1
    if is_stream and len(ids) < length:
        shorter = f", or --length {len(ids)} or less" if len(ids) > 1 else ""
        raise TrisectError(f"{source} has {len(ids)} tokens, a window needs {length}: give a longer text{shorter}.")
    if not is_stream and ids.shape[1] < length:
        short = f"{source} holds windows of {ids.shape[1]} tokens, and {length} were asked for"
        raise TrisectError(f"{short}: give --length {ids.shape[1]} or less, or another file.")
    if is_stream and sampling == "random":
        assert samples is not None
        spare = len(ids) - samples * length
        if spare >= 0:
            gaps = torch.randint(0, spare + 1, (samples,), generator=generator).sort().values
            starts = gaps + length * torch.arange(samples)
        else:
            starts = torch.arange(samples) * (len(ids) - length) // max(1, samples - 1)
        starts = starts[torch.randperm(samples, generator=generator)]
        return ids[starts[:, None] + torch.arange(length)]
    found = len(ids) // _unit(ids, length)
    if samples is not None and found < samples and not fewer:
        few = f"{source} has {found} windows of {length} tokens, and {samples} were asked for"
        less = f"--samples {found} (eval: --windows {found}), a smaller --length, or a longer text"
        raise TrisectError(f"{few}: give {less}.")
    wanted = found if samples is None else min(samples, found)
    if is_stream:
        return ids[: wanted * length].reshape(wanted, length)
    order = torch.randperm(found, generator=generator) if sampling == "random" else torch.arange(found)
    return ids[order[:wanted], :length]


def started(ids: Tensor, bos: int | None) -> Tensor:
    """Windows (n, length) behind BOS, (n, length + 1); as they are without one."""
    return ids if bos is None else torch.nn.functional.pad(ids, (1, 0), value=bos)


def check_request(*, samples: int | None, length: int, sampling: str) -> None:
    """Refuse what no text could satisfy, before anything is read or downloaded."""
    check_names("sampling", [sampling], ("random", "first"))
    if length < 1:
        raise TrisectError(f"--length is {length}; a window needs at least 1 token.")
    if samples is not None and samples < 1:
        raise TrisectError(f"{samples} windows were asked for; give --samples 1 or more (to evaluate: --windows).")
    if samples is None and sampling == "random":
        instead = "give --samples N (eval: --windows N), or --sampling first for all consecutive windows"
        raise TrisectError(f"Random sampling needs a number of windows: {instead}.")


HELD_OUT = 10  # one token in so many, at the end of a text, is held out
TEST_SHARE = 4  # one calibration window in so many is a test window: for loss curves, and for bounds on perplexity


@dataclass(frozen=True, kw_only=True)
class WindowSplit:
    """The windows of one text."""

    solve: Tensor  # (n, length)
    test: Tensor  # (m, length), of calibration, too: a bound on perplexity is kept on them
    rest: Tensor  # (tokens,) or (rows, length): nothing of it is in the others
    bos: int | None = None  # what windows of a text begin with; `rest` has none

    def held_out(self, count: int, *, length: int) -> Tensor:
        """The last `count` windows of what is held out, or as many as there are."""
        length -= self.bos is not None
        unit = _unit(self.rest, length)
        found = min(count, len(self.rest) // unit)
        return started(self.rest[len(self.rest) - found * unit :].reshape(-1, length), self.bos)


def split_windows(
    ids: Tensor,
    *,
    samples: int,
    length: int,
    sampling: str,
    seed: int,
    source: str,
    whole: bool,
    test: int = 0,
    bos: int | None = None,
) -> WindowSplit:
    """Choose `samples` windows, the last `test` of them without a token of the others.

    `ids` are a stream of tokens or ready-made rows. A text that is not `whole` for calibration keeps its last
    tenth out of random windows, and whatever consecutive ones do not reach. `bos` is the first token of every
    window; ready-made rows have theirs, if any.
    """
    bos = bos if ids.ndim == 1 else None
    length -= bos is not None
    unit = _unit(ids, length)
    keep = len(ids) if whole or sampling == "first" else _edge(len(ids), unit=unit)
    cut = partial(windows, length=length, sampling=sampling, seed=seed)
    if 0 < test < samples and ids.ndim == 1 and sampling == "random":
        # Random windows of a short stream overlap: test windows come from its last part.
        at = keep - keep * test // samples
        first = cut(ids[:at], samples=samples - test, source=f"the first part of {source}")
        picked = torch.cat([first, cut(ids[at:keep], samples=test, source=f"the last part of {source}")])
    else:
        name = source if keep == len(ids) else f"{source}, without its held-out end,"
        picked = cut(ids[:keep], samples=samples, source=name)
    used = keep if sampling == "random" else samples * unit
    rest = ids[:0] if whole else ids[used:]
    rest = rest if rest.ndim == 1 else rest[:, :length]
    solve, held = started(picked, bos).tensor_split((samples - test,))
    return WindowSplit(solve=solve, test=held, rest=rest, bos=bos)


def room(ids: Tensor, *, length: int, whole: bool) -> int:
    """Windows that a text has for calibration without overlap, at least one."""
    unit = _unit(ids, length)
    return max(1, (len(ids) if whole else _edge(len(ids), unit=unit)) // unit)


def _edge(size: int, *, unit: int) -> int:
    """Where the held-out tenth begins: at least one window, nothing where there are no two."""
    return size - max(size // HELD_OUT, unit) if size >= 2 * unit else size


def _unit(ids: Tensor, length: int) -> int:
    """What one window takes of a stream of tokens, or of rows."""
    return length if ids.ndim == 1 else 1
