"""Tensors of a safetensors checkpoint by name, read one at a time; a damaged one is named with its file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trisect.errors import TrisectError
from trisect.models.source import tensor_files


class Shards:
    """The weight files of a folder."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.files = tensor_files(self.folder)
        """Tensor name -> file name."""

    def shape(self, name: str) -> tuple[int, ...]:
        with self.opened(name) as file:
            return tuple(file.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        with self.opened(name) as file:
            return _DTYPES[file.get_slice(name).get_dtype()]

    def slices(self, name: str) -> "Slices":
        """Parts of a tensor by index, without reading the rest."""
        return Slices(self, name)

    def read(self, name: str) -> Tensor:
        """A tensor in memory of its own; the file is let go again, and its pages with it."""
        with self.opened(name) as file:
            tensor: Tensor = file.get_tensor(name).clone()
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise TrisectError(
                f"{name} in {self.folder / self.files[name]} holds NaN or inf; the checkpoint is damaged or "
                "was saved from a run that diverged."
            )
        return tensor

    @property
    def num_bytes(self) -> int:
        return sum((self.folder / name).stat().st_size for name in set(self.files.values()))

    @contextmanager
    def opened(self, name: str) -> Iterator[Any]:
        """The file that holds a tensor."""
        path = self.folder / self.files[name]
        try:
            with safe_open(path, framework="pt") as file:
                yield file
        except (OSError, SafetensorError) as error:
            raise TrisectError(
                f"Cannot read {name} from {path}: {error}; download the file again."
            ) from error


class Slices:
    """A tensor in its file, of which only what is asked for is read."""

    def __init__(self, shards: Shards, name: str):
        self.shards, self.name = shards, name

    def __getitem__(self, key: Any) -> Tensor:
        with self.shards.opened(self.name) as file:
            part: Tensor = file.get_slice(self.name)[key]
            return part.clone()


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
