"""Small integers side by side in bytes, with none of the bits unused."""

import torch
from torch import Tensor

# n = values of a row, w = bytes of a word


def pack(values: Tensor, bits: int) -> Tensor:
    """(rows, n) integers below 2^bits -> (rows, n * bits / 8) bytes."""
    word, count = _word(bits)
    kind = _kind(word)
    spread = values.to(kind).unflatten(-1, (-1, count)) << _shifts(bits, count, kind, values.device)
    words = spread.sum(dim=-1, dtype=kind)  # no bit is set twice, so a sum is a union
    if word == 1:
        return words
    split = words.unsqueeze(-1) >> _shifts(8, word, kind, values.device)  # (rows, words, w)
    return (split & 0xFF).to(torch.uint8).flatten(-2)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """(rows, n * bits / 8) bytes -> (rows, n) integers below 2^bits."""
    word, count = _word(bits)
    kind = _kind(word)
    words = packed
    if word > 1:
        split = packed.unflatten(-1, (-1, word)).to(kind)
        words = (split << _shifts(8, word, kind, packed.device)).sum(dim=-1, dtype=kind)
    values = words.unsqueeze(-1) >> _shifts(bits, count, kind, packed.device)
    return (values & (2**bits - 1)).to(torch.uint8).flatten(-2)


def _word(bits: int) -> tuple[int, int]:
    """Bytes of the smallest word that whole values fill, and how many do: 3 bits need three bytes."""
    word = 1 if 8 % bits == 0 else bits
    return word, word * 8 // bits


def _kind(word: int) -> torch.dtype:
    return torch.uint8 if word == 1 else torch.int32


def _shifts(step: int, count: int, kind: torch.dtype, device: torch.device) -> Tensor:
    return torch.arange(0, step * count, step, dtype=kind, device=device)
