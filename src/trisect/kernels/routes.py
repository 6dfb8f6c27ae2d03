"""Which attention kernel takes which widths, as rules: pure functions of sizes, the same for every device.

torch picks its kernel silently, and the one that takes everything (the math backend) is many times slower
than the others. These rules say what has to be done to heads so that it is never picked: docs/runtime.md has
the table in words.
"""

import os
from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["cpu", "cudnn", "cuda"]
"""A CPU; a GPU where torch tries cuDNN attention first (Hopper, Blackwell); any other GPU."""

CUDNN_WIDEST = 128


@dataclass(frozen=True, kw_only=True)
class Heads:
    """What a call brings along."""

    qk: int
    vo: int
    group: int
    """Queries per key head."""
    masked: bool
    single: bool
    """One new token per text: everything else comes out of the cache, and a copy would be of all of it."""
    bytes_per_element: int = 2


@dataclass(frozen=True, kw_only=True)
class Route:
    """What is done to heads before a kernel gets them."""

    pad: int | None = None
    """Zero channels up to this width, for queries, keys and values alike."""
    repeat: bool = False
    """Keys and values once per query head: the kernel knows no groups."""
    plain: bool = False
    """Two matrix products instead of a kernel: for one query, they copy nothing."""

    @property
    def copies(self) -> bool:
        """Whether keys and values are written again for every call."""
        return self.pad is not None or self.repeat


AS_THEY_ARE = Route()


def route(kind: Kind, heads: Heads) -> Route:
    """The way through torch's attention that avoids the math backend at the least cost."""
    found = _on_cpu(heads) if kind == "cpu" else _on_gpu(kind, heads)
    return Route(plain=True) if heads.single and found.copies else found


def _on_cpu(heads: Heads) -> Route:
    return AS_THEY_ARE if heads.qk == heads.vo else Route(pad=max(heads.qk, heads.vo))


def _on_gpu(kind: Kind, heads: Heads) -> Route:
    if heads.bytes_per_element != 2:
        return _memory_efficient(heads, step=4)
    step = channel_step(kind, heads.bytes_per_element)
    pad = None if heads.qk % step == 0 == heads.vo % step else rounded(max(heads.qk, heads.vo), step)
    if kind == "cudnn" and (pad or max(heads.qk, heads.vo)) <= CUDNN_WIDEST:
        return Route(pad=pad)
    if heads.masked:
        return _memory_efficient(heads, step=step)
    equal = heads.qk == heads.vo and pad is None
    return AS_THEY_ARE if equal else Route(pad=rounded(max(heads.qk, heads.vo), step))


def _memory_efficient(heads: Heads, *, step: int) -> Route:
    """Takes unequal widths and masks, but neither groups nor widths off the grid."""
    off_grid = heads.qk % step or heads.vo % step
    pad = rounded(max(heads.qk, heads.vo), step) if off_grid else None
    return Route(pad=pad, repeat=heads.group > 1)


def channel_step(kind: Kind, bytes_per_element: int) -> int:
    """Head widths have to be multiples of this, or channels are added at every call."""
    return 1 if kind == "cpu" else 16 // bytes_per_element


def rounded(width: int, step: int) -> int:
    """Up to the next multiple."""
    return -(-width // step) * step


def kind_of(device: torch.device) -> Kind:
    """Which rules hold on a device; a CPU's for anything unknown."""
    if device.type != "cuda":
        return "cpu"
    return "cudnn" if _prefers_cudnn(device.index) else "cuda"


@torch.compiler.assume_constant_result
def _prefers_cudnn(index: int | None) -> bool:
    """torch's own rule (check_prefer_cudnn_attention), and its switches."""
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1" or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    major, minor = torch.cuda.get_device_capability(index)
    version = torch.backends.cudnn.version() or 0
    return major in (9, 10) and minor in (0, 3) and version > 91500
