"""The processes of one run: torchrun starts them, calibration windows are split over them, sums meet here.

Without torchrun there is one process, and everything here does nothing.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trisect.errors import TrisectError
from trisect.support import checks, files

SUFFIX = ".unfinished"  # what a run on OUT keeps beside it until OUT is there
MANIFEST = "manifest.json"  # in that folder: what must be the same for a run to be resumed
PATIENCE = timedelta(minutes=30)  # how long a process waits for the others: the longest solve, and then some


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
    """The number of processes of this run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def is_rank_zero() -> bool:
    """Whether this is the process that writes and prints."""
    return rank() == 0


def barrier() -> None:
    """Wait until all processes are here."""
    if world_size() > 1:
        dist.barrier()


def broadcast(value: Any) -> Any:
    """Broadcast the value of rank 0: what depends on the disk or on time is decided once."""
    if world_size() == 1:
        return value
    values = [value if is_rank_zero() else None]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def all_reduce(sums: Mapping[str, Tensor], *, owner: int | None = None) -> dict[str, Tensor]:
    """The sums over all processes, the same bits in each; with an `owner`, no other process has the matrices."""
    if world_size() == 1:
        return dict(sums)
    names = sorted(sums)
    every: list[Any] = [None] * world_size()
    dist.all_gather_object(every, names)
    if any(other != names for other in every):
        needs = f"each needs windows of its own; raise --samples to at least {16 * world_size()}"
        raise TrisectError(f"The processes have gathered different moments: {needs}.")
    total = {}
    for name in names:
        value = sums[name].contiguous()
        home = value.device
        # nccl knows tensors on GPUs only, and complex numbers are two real ones.
        value = (torch.view_as_real(value) if value.is_complex() else value).to(_wire(), copy=True)
        if owner is None or value.ndim < 2:
            dist.all_reduce(value)
        else:
            dist.reduce(value, dst=owner)
            if rank() != owner:
                continue
        value = value.to(home)
        total[name] = torch.view_as_complex(value) if sums[name].is_complex() else value
    return total


def broadcast_record(record: Any, *, owner: int, device: torch.device) -> Any:
    """A dataclass of tensors, numbers and strings as its owner has it; the others pass None."""
    if world_size() == 1:
        return record
    mine = rank() == owner
    outline = [_with_tensors(record, lambda tensor: tensor.detach().to("meta")) if mine else None]
    dist.broadcast_object_list(outline, src=owner)

    def shared(tensor: Tensor) -> Tensor:
        value = tensor.detach() if mine else torch.empty(tensor.shape, dtype=tensor.dtype)
        value = value.contiguous().to(_wire())
        dist.broadcast(value, src=owner)
        return value.to(device)

    found = _with_tensors(record if mine else outline[0], shared)
    return record if mine else found


def owner_of(expert: str) -> int:
    """The process that has an expert's Grams and solves it: the shared one has no number and comes last."""
    number = expert.removeprefix("expert")
    return (int(number) if number.isdigit() else -1) % world_size()


def by_owners(tasks: Mapping[str, Callable[[], Any]], *, device: torch.device) -> dict[str, Any]:
    """The record that each expert's task gives, in every process; its owner does it."""
    mine = {expert: task() for expert, task in tasks.items() if owner_of(expert) == rank()}
    return {one: broadcast_record(mine.get(one), owner=owner_of(one), device=device) for one in tasks}


def _with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A record with every tensor in it changed, always in the same order."""
    if isinstance(value, Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        inner = {entry.name: _with_tensors(getattr(value, entry.name), change) for entry in fields(value)}
        return type(value)(**inner)
    if isinstance(value, tuple):
        return tuple(_with_tensors(inner, change) for inner in value)
    return value


def _wire() -> torch.device:
    """The device that tensors must be on to be communicated."""
    on_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


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
    with files.locked(folder / "lock", refusal):
        files.remove_leftovers(out)
        for path in list(folder.iterdir()):
            if path.name != "lock" and (fresh or ".partial-" in path.name):
                files.remove(path)
        try:
            yield folder
        except BaseException as error:
            done = len(list(folder.glob(pieces)))
            if not done:
                shutil.rmtree(folder)
            elif isinstance(error, KeyboardInterrupt):
                kept = f"{folder} keeps what is finished (files: {done}); the same command goes on from there."
                raise KeyboardInterrupt(kept) from error
            raise
        shutil.rmtree(folder)


def manifest_of(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest in the folder of an unfinished run, written where there is none; one of another run is refused."""
    path, known = folder / MANIFEST, {}
    if is_rank_zero():
        if not path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            files.write_json(path, settings)
        known = checks.read_record(path, what="manifest of a run", instead="add --fresh to start anew")
    # A process that reads for itself may come late and find what the first one has written since.
    known = broadcast(known)
    if different := list(_differences({name: known.get(name) for name in settings}, files.plain(settings))):
        other = f"{folder} holds an unfinished run with other settings: {'; '.join(different[:4])}"
        raise TrisectError(f"{other}. Give the same to go on, add --fresh to start anew, or name another -o.")
    return known


def _differences(known: Any, mine: Any, name: str = "") -> Iterator[str]:
    if isinstance(known, dict) and isinstance(mine, dict):
        for key in sorted({*known, *mine}):
            yield from _differences(known.get(key), mine.get(key), f"{name}.{key}" if name else key)
    elif known != mine:
        yield f"{name} was {known!r}, is {mine!r}"
