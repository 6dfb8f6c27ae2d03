"""What decoding depends on and the device does not know: modes, switches of rotation, where texts end."""

from typing import Any

import torch
from torch import Tensor

from trisect.errors import TrisectError


def settled(mode: str, model: Any, device: torch.device) -> str:
    """The mode that will run: graphs need a GPU, and a rotation that asks nothing of the host."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    # transformers compares the length with a number on the host to switch tables.
    moving = rope.get("rope_type") in ("dynamic", "longrope")
    if mode == "auto":
        return "graphs" if device.type == "cuda" and not moving else "eager"
    if mode != "eager" and device.type != "cuda":
        raise TrisectError(
            f"Decoding mode {mode!r} replays CUDA graphs; on {device.type} use 'eager' or 'auto'."
        )
    if mode != "eager" and moving:
        raise TrisectError(
            f"This model's rotation ({rope['rope_type']}) looks at the length of the text on the host, which "
            "a graph cannot; use 'eager' or 'auto'."
        )
    return mode


def switch_of(model: Any) -> int | None:
    """The length at which a model's rotation changes for all tokens, those in the cache included."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    original = getattr(config, "original_max_position_embeddings", None)
    return int(original or rope["original_max_position_embeddings"])


def all_ended(found: list[Tensor], eos: int) -> bool:
    return bool((torch.stack(found, dim=1) == eos).any(dim=1).all())


def filled_up(new: Tensor, eos: int, pad: int) -> Tensor:
    """Pad behind each text's first end, and cut where every text has ended."""
    ended = (new == eos).cumsum(dim=1)
    behind = ended - (new == eos).long() > 0
    longest = int((~behind).sum(dim=1).max())
    return new.masked_fill(behind, pad)[:, :longest]
