"""load_tokens: any source to windows of token ids."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from trisect.data.mixture import Ingredient, count_windows, parse_mixture
from trisect.data.sources import read_source
from trisect.data.tokens import Tokens, check_request, rows, tokens_from_tensor, windows
from trisect.errors import TrisectError


def load_tokens(
    source: str | Tensor | Tokens,
    tokenizer: Any,
    *,
    samples: int | None,
    length: int,
    sampling: str = "random",
    seed: int = 0,
    split: str = "calibration",
) -> Tokens:
    """Windows of `length` tokens from a source: a name, a file, a mixture, or ready-made ids.

    A tensor (n, length) and Tokens are used as they are. `samples` None takes all windows, which
    needs `sampling="first"`. `tokenizer` is a Hugging Face tokenizer, or None for sources of ids.
    """
    if isinstance(source, Tokens):
        return source
    if isinstance(source, Tensor):
        return tokens_from_tensor(source)
    check_request(samples=samples, length=length, sampling=sampling)
    mixture = parse_mixture(source)
    counts = [samples] if len(mixture) == 1 else _shared(mixture, samples=samples, name=source)
    pieces, sizes = [], []
    for index, (ingredient, count) in enumerate(zip(mixture, counts, strict=True)):
        piece, text_bytes = _load_one(
            ingredient.source,
            tokenizer,
            samples=count,
            length=length,
            sampling=sampling,
            seed=seed + index,  # so that a source named twice gives other windows the second time
            split=split,
        )
        pieces.append(piece)
        sizes.append(text_bytes)
    ids = torch.cat(pieces)
    if len(mixture) > 1:
        ids = ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]
    return tokens_from_tensor(ids, source, text_bytes=_sum_known(sizes))


def tokenize(text: str, tokenizer: Any, *, source: str) -> Tensor:
    """One stream of token ids, (num_tokens,): the whole text, without special tokens."""
    if tokenizer is None:
        raise TrisectError(
            f"{source} is text, and the model came without a tokenizer: put the tokenizer's files "
            "into the model's folder, or give token ids in a .safetensors file (input_ids)."
        )
    # verbose=False: the warning that the text exceeds the context is beside the point, it is cut.
    with _blamed_on_the_tokenizer(source):
        encoded = tokenizer(text, add_special_tokens=False, verbose=False)
        return torch.tensor(encoded["input_ids"], dtype=torch.int64)


@contextmanager
def _blamed_on_the_tokenizer(source: str) -> Iterator[None]:
    """A tokenizer's files may say anything, and its library fails on that in many ways, panics included."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise TrisectError(f"The model's tokenizer fails on {source}: {reason}.") from error


def _load_one(
    name: str,
    tokenizer: Any,
    *,
    samples: int | None,
    length: int,
    sampling: str,
    seed: int,
    split: str,
) -> tuple[Tensor, int | None]:
    """(windows, length) and the bytes of their text, None where the source holds ids."""
    content = read_source(name, split=split)
    ids = content if isinstance(content, Tensor) else tokenize(content, tokenizer, source=name)
    cut = windows if ids.ndim == 1 else rows
    picked = cut(ids, samples=samples, length=length, sampling=sampling, seed=seed, source=name)
    return picked, None if isinstance(content, Tensor) else decoded_bytes(picked, tokenizer)


def decoded_bytes(ids: Tensor, tokenizer: Any) -> int:
    """UTF-8 bytes of the text that windows decode to."""
    with _blamed_on_the_tokenizer("its own tokens"):
        texts = tokenizer.batch_decode(ids.tolist(), clean_up_tokenization_spaces=False)
    # A window that starts inside a character decodes to U+FFFD or a lone surrogate: count it too.
    return sum(len(text.encode("utf-8", errors="surrogatepass")) for text in texts)


def _shared(mixture: list[Ingredient], *, samples: int | None, name: str) -> list[int | None]:
    if samples is None:
        raise TrisectError(
            f"The mixture {name!r} needs a number of windows to share out: give --samples N "
            "(eval: --windows N)."
        )
    return [*share_out(mixture, samples=samples, name=name)]


def share_out(mixture: list[Ingredient], *, samples: int, name: str) -> list[int]:
    """How many of the windows each source of a mixture gives."""
    counts = count_windows([ingredient.share for ingredient in mixture], samples=samples)
    for ingredient, count in zip(mixture, counts, strict=True):
        if count == 0:
            raise TrisectError(
                f"{ingredient.source} gets none of the {samples} windows of {name!r}: give more "
                "--samples (eval: --windows), a larger weight, or leave it out."
            )
    return counts


def _sum_known(sizes: list[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None
