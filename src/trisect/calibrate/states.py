"""Hidden states of all calibration windows, kept where there is room: on the device, in main memory, on disk.

Reading gives a tensor on the device, writing puts one away. Copies share what neither has written since.
"""

import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import torch
from torch import Tensor

ROOM = {"cuda": 0.35, "host": 0.4}
"""Shares of the memory that is free that hidden states may take."""

Fetch = Callable[[], Tensor]


class States:
    """A list of tensors on one device, kept in some place."""

    def __init__(self, tensors: Sequence[Tensor] = (), *, place: str = "device"):
        self.place = place
        self._kept: list[Fetch] = []
        for tensor in tensors:
            self.append(tensor)

    def append(self, tensor: Tensor) -> None:
        self._kept.append(_KEEPERS[self.place](tensor))

    def clear(self) -> None:
        self._kept.clear()

    def copy(self) -> "States":
        other = States(place=self.place)
        other._kept = list(self._kept)
        return other

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, number: int) -> Tensor:
        return self._kept[number]()

    def __setitem__(self, number: int, tensor: Tensor) -> None:
        self._kept[number] = _KEEPERS[self.place](tensor)

    def __iter__(self) -> Iterator[Tensor]:
        return (fetch() for fetch in self._kept)


def choose_place(asked: str, *, device: torch.device, needed: int) -> str:
    """Where `needed` bytes of states go: the nearest place that has room, unless one was asked for."""
    if asked != "auto":
        return asked
    if device.type == "cuda" and needed <= ROOM["cuda"] * torch.cuda.mem_get_info(device)[0]:
        return "device"
    if needed <= ROOM["host"] * psutil.virtual_memory().available:
        return "host" if device.type == "cuda" else "device"
    return "disk"


def _beside(tensor: Tensor) -> Fetch:
    return lambda: tensor


def in_main_memory(x: Tensor) -> Tensor:
    """The tensor there, in pages that stay: a GPU fetches from those many times as fast as from others."""
    if not x.is_cuda:
        return x.to("cpu")
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x)


def _in_main_memory(tensor: Tensor) -> Fetch:
    device, kept = tensor.device, in_main_memory(tensor)
    return lambda: kept.to(device, non_blocking=True)


def _on_disk(tensor: Tensor) -> Fetch:
    """A file in the temporary folder that goes when nobody can ask for it any more."""
    handle, name = tempfile.mkstemp(prefix="trisect-states-")
    path, device, shape, dtype = Path(name), tensor.device, tensor.shape, tensor.dtype
    with os.fdopen(handle, "wb") as file:
        # numpy has no bfloat16, but bytes are bytes.
        file.write(tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy().data)

    def fetch() -> Tensor:
        content = torch.frombuffer(bytearray(path.read_bytes()), dtype=dtype)
        return content.reshape(shape).to(device)

    weakref.finalize(fetch, path.unlink, missing_ok=True)
    return fetch


_KEEPERS: dict[str, Callable[[Tensor], Fetch]] = {
    "device": _beside,
    "host": _in_main_memory,
    "disk": _on_disk,
}
