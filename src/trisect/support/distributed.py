"""The processes of one run: torchrun starts them, calibration windows are split over them, sums meet here.

Without torchrun there is one process, and everything here does nothing.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trisect.errors import TrisectError
from trisect.support.files import locked, remove_leftovers

SUFFIX = ".unfinished"
"""What a run on OUT keeps beside it until OUT is there."""
PATIENCE = timedelta(minutes=30)
"""How long a process waits for the others: the longest solve, and then some."""


@contextmanager
def process_group(device: str) -> Iterator[str]:
    """Join the processes that torchrun started; gives the device of this one. Inside another, only that."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count > 1 and device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    if count == 1 or dist.is_initialized():
        yield device
        return
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=PATIENCE)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def world_size() -> int:
    """Processes of this run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def is_rank_zero() -> bool:
    """Whether this process is the one that writes and speaks."""
    return rank() == 0


def barrier() -> None:
    """Until all processes are here."""
    if world_size() > 1:
        dist.barrier()


def broadcast(value: Any) -> Any:
    """Broadcast the value of rank 0: what depends on the disk or on time is decided once."""
    if world_size() == 1:
        return value
    values = [value if is_rank_zero() else None]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def all_reduce(sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The sums of all processes, the same bits in each."""
    if world_size() == 1:
        return dict(sums)
    names = sorted(sums)
    _check_same(names)
    total = {}
    for name in names:
        value = sums[name].contiguous()
        home = value.device
        # nccl knows tensors on GPUs only, and complex numbers are two real ones.
        value = (torch.view_as_real(value) if value.is_complex() else value).to(_wire(), copy=True)
        dist.all_reduce(value)
        value = value.to(home)
        total[name] = torch.view_as_complex(value) if sums[name].is_complex() else value
    return total


def broadcast_record(record: Any, *, owner: int, device: torch.device) -> Any:
    """A dataclass of tensors, numbers and strings as its owner has it; the others pass None."""
    if world_size() == 1:
        return record
    tensors: list[Tensor] = []
    outline = [_outline(record, tensors) if rank() == owner else None]
    dist.broadcast_object_list(outline, src=owner)
    found = []
    for number, (shape, dtype) in enumerate(_sizes(outline[0])):
        kept = getattr(torch, dtype)
        value = tensors[number] if rank() == owner else torch.empty(shape, dtype=kept)
        value = value.contiguous().to(_wire())
        dist.broadcast(value, src=owner)
        found.append(value.to(device))
    return record if rank() == owner else _rebuilt(outline[0], iter(found))


def _wire() -> torch.device:
    """Where a tensor must be to be sent."""
    on_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _check_same(names: list[str]) -> None:
    every: list[Any] = [None] * world_size()
    dist.all_gather_object(every, json.dumps(names))
    if len(set(every)) != 1:
        raise TrisectError(
            "The processes have gathered different moments: each needs calibration windows of its own to fit "
            f"and to hold out; raise --samples to at least {16 * world_size()}."
        )


def _outline(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return ("tensor", tuple(value.shape), str(value.dtype).removeprefix("torch."))
    if is_dataclass(value) and not isinstance(value, type):
        inner = {field.name: _outline(getattr(value, field.name), tensors) for field in fields(value)}
        return ("record", type(value), inner)
    if isinstance(value, tuple):
        return ("tuple", [_outline(inner, tensors) for inner in value])
    return ("plain", value)


def _sizes(outline: Any) -> list[tuple[tuple[int, ...], str]]:
    if outline[0] == "tensor":
        return [outline[1:]]
    if outline[0] == "record":
        return [size for inner in outline[2].values() for size in _sizes(inner)]
    if outline[0] == "tuple":
        return [size for inner in outline[1] for size in _sizes(inner)]
    return []


def _rebuilt(outline: Any, tensors: Iterator[Tensor]) -> Any:
    if outline[0] == "tensor":
        return next(tensors)
    if outline[0] == "record":
        return outline[1](**{name: _rebuilt(inner, tensors) for name, inner in outline[2].items()})
    if outline[0] == "tuple":
        return tuple(_rebuilt(inner, tensors) for inner in outline[1])
    return outline[1]


@contextmanager
def unfinished(out: Path, *, fresh: bool = False, pieces: str = "layer-*") -> Iterator[Path]:
    """The folder of a run on `out`, for this run alone; it goes when the run ends well.

    What an earlier run left that was killed while it wrote is removed, with `fresh` all that it left. A run
    that fails leaves the folder only if there are `pieces` in it to go on with.
    """
    folder = out.parent / f"{out.name}{SUFFIX}"
    if not is_rank_zero():
        yield folder
        return
    folder.mkdir(parents=True, exist_ok=True)
    refusal = f"Another run is writing {out}; wait for it, or name another output with -o."
    with locked(folder / "lock", refusal):
        remove_leftovers(out)
        for path in list(folder.iterdir()):
            if path.name != "lock" and (fresh or ".partial-" in path.name):
                path.unlink()
        try:
            yield folder
        except BaseException:
            if not any(folder.glob(pieces)):
                shutil.rmtree(folder)
            raise
        shutil.rmtree(folder)
