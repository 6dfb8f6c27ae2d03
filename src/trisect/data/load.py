"""load_tokens: any source to windows of token ids."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trisect.data import catalogue, read
from trisect.data.tokens import Tokens, check_request, started, tokens_from_tensor, windows
from trisect.errors import TrisectError, check_names
from trisect.support.checks import explained

NO_TOKENIZER = "is text, and the model came without a tokenizer: put the tokenizer's files into the model's folder"


def count_windows(shares: list[float], *, samples: int) -> list[int]:
    """Split `samples` by shares that sum to 1: largest remainders get what rounding down leaves."""
    exact = [share * samples for share in shares]
    counts = [math.floor(quota) for quota in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - exact[i])
    for index in by_remainder[: samples - sum(counts)]:
        counts[index] += 1
    return counts


def list_sources() -> list[tuple[str, str]]:
    """Every source by name, with what it is, its licence and where it is; a path is a source too."""
    found = {
        catalogue.BUILTIN: "Python's reference (pydoc topics), in the standard library; PSF licence; always here",
        catalogue.SYNTHETIC: "synthetic text, written by the model itself first (docs/sample.md); the model's licence",
    }
    for name, record in catalogue.DATASETS.items():
        most = record.calibration.max_characters
        amount = "read whole" if most is None else f"{most // 1_000_000} million characters read"
        place = "local copy" if read.is_local(name) else "from the hub"
        found[name] = f"{record.description}; {record.licence}; {amount}; {place}"
    for name in catalogue.DEFAULT_MIXTURE:
        found[name] += "; in the default mixture"
    for name in catalogue.STOPGAP.split("+"):
        found[name] += "; the default where no other can be read"
    return list(found.items())


def has_two_parts(name: str) -> bool:
    """Whether a source has an evaluation part of its own; of others a part is held out."""
    return name == catalogue.BUILTIN or name in catalogue.DATASETS


def read_source(name: str, *, split: str, tokenizer: Any = None) -> str | Tensor:
    """Text of a named source or file, or token ids, (n,) or (n, length), of a file that holds ids."""
    # A file is read whole, whatever the split: two files keep calibration and evaluation apart.
    check_names("split", [split], ("calibration", "evaluation"))
    if name == catalogue.BUILTIN:
        return "\n\n".join(catalogue.builtin_documents(split=split))
    if name in catalogue.DATASETS:
        return read.dataset_text(name, split=split)
    if name == catalogue.SYNTHETIC:
        why = f"{catalogue.SYNTHETIC} text is written by the model that is compressed, and only calibrated on"
        raise TrisectError(f"{why}; `trisect sample MODEL -o own.jsonl` writes it to a file.")
    content = read.read_file(catalogue.existing_file(name), tokenizer=tokenizer)
    return content if isinstance(content, Tensor) else "\n\n".join(content)


def load_tokens(
    source: str | Tensor | Tokens,
    tokenizer: Any,
    *,
    samples: int | None,
    length: int,
    sampling: str = "random",
    seed: int = 0,
    split: str = "calibration",
    fewer: bool = False,
) -> Tokens:
    """Windows of `length` tokens from a source: a name, a file, a mixture, or ready-made ids.

    A tensor (n, length) and Tokens are used as they are. `samples` None takes all windows, which
    needs `sampling="first"`; with `fewer`, a text that has less gives what it has. `tokenizer` is a Hugging Face
    tokenizer, or None for sources of ids.
    """
    if not isinstance(source, str):
        return source if isinstance(source, Tokens) else tokens_from_tensor(source)
    check_request(samples=samples, length=length, sampling=sampling)
    mixture = catalogue.parse_mixture(source)
    if samples is None and len(mixture) > 1:
        raise TrisectError(f"The mixture {source!r} needs a number of windows: --samples N (eval: --windows N).")
    counts: list[Any] = [None] if samples is None else share_out(mixture, samples=samples, name=source)
    pieces, is_text = [], True
    for index, (part, count) in enumerate(zip(mixture, counts, strict=True)):
        content = read_source(part.source, split=split, tokenizer=tokenizer)
        ids = tokenize(content, tokenizer, source=part.source) if isinstance(content, str) else content
        bos = bos_of(tokenizer) if ids.ndim == 1 else None
        # Another seed for each, so that a source named twice gives other windows the second time.
        choice: Any = {"length": length - (bos is not None), "sampling": sampling, "seed": seed + index}
        pieces.append(started(windows(ids, samples=count, source=part.source, fewer=fewer, **choice), bos))
        is_text = is_text and isinstance(content, str)
    ids = mixed(pieces, seed=seed)
    return tokens_from_tensor(ids, source, text_bytes=decoded_bytes(ids, tokenizer) if is_text else None)


def mixed(pieces: Sequence[Tensor], *, seed: int) -> Tensor:
    """The windows of all texts, shuffled where there are several."""
    ids = torch.cat([*pieces])
    return ids if len(pieces) == 1 else ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))]


def evaluation_tokens(source: Any, tokenizer: Any, *, windows: int | None, length: int, fewer: bool = False) -> Tokens:
    """What perplexity is measured on: the first windows of the evaluation split, all of them for None."""
    cut: Any = {"samples": windows, "length": length, "sampling": "first", "fewer": fewer}
    return load_tokens(source, tokenizer, split="evaluation", **cut)


def bos_of(tokenizer: Any) -> int | None:
    """The token that every window of a text begins with, for models that need one."""
    return int(tokenizer.bos_token_id) if getattr(tokenizer, "starts_with_bos", False) else None


def tokenize(text: str, tokenizer: Any, *, source: str) -> Tensor:
    """One stream of token ids, (num_tokens,): the whole text, without special tokens."""
    if tokenizer is None:
        raise TrisectError(f"{source} {NO_TOKENIZER}, or give token ids in a .safetensors file (input_ids).")
    # verbose=False: the warning that the text exceeds the context is beside the point, it is cut.
    with explained(f"The model's tokenizer fails on {source}"):
        encoded = tokenizer(text, add_special_tokens=False, verbose=False)
        return torch.tensor(encoded["input_ids"], dtype=torch.int64)


def decoded_bytes(ids: Tensor, tokenizer: Any) -> int:
    """UTF-8 bytes of the text that windows decode to, without the BOS in front of it."""
    bos = bos_of(tokenizer)
    if bos is not None and bool((ids[:, 0] == bos).all()):
        ids = ids[:, 1:]
    with explained("The model's tokenizer fails on its own tokens"):
        texts = tokenizer.batch_decode(ids.tolist(), clean_up_tokenization_spaces=False)
    # A window that starts inside a character decodes to U+FFFD or a lone surrogate: count it too.
    return sum(len(text.encode("utf-8", errors="surrogatepass")) for text in texts)


def share_out(mixture: list[catalogue.Ingredient], *, samples: int, name: str) -> list[int]:
    """How many of the windows each source of a mixture gives."""
    counts = count_windows([ingredient.share for ingredient in mixture], samples=samples)
    if 0 in counts:
        none = f"{mixture[counts.index(0)].source} gets none of the {samples} windows of {name!r}"
        raise TrisectError(f"{none}: give more --samples (eval: --windows), a larger weight, or leave it out.")
    return counts
