"""Write a model whose layers are in files already: those become its shards, and the rest one more."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from trisect.errors import TrisectError
from trisect.files import write_json
from trisect.models.names import tied_names
from trisect.models.source import INDEX


def write_shards(model: Any, layer_files: Sequence[Path], folder: Path) -> None:
    """Shards, index and configs of a model whose layers are in `layer_files`, in order."""
    count = len(layer_files) + 1
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    rest = _rest(model)
    save_file(rest, folder / names[0], metadata={"format": "pt"})
    for path, name in zip(layer_files, names[1:], strict=True):
        _link(path, folder / name)
    places, size = {}, 0
    for name in names:
        with safe_open(folder / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118, no mapping
                places[key] = name
        size += (folder / name).stat().st_size
    _check_complete(model, places, folder)
    write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))})
    model.config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def _rest(model: Any) -> dict[str, Tensor]:
    """Everything outside the layers; tied weights once."""
    kept: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict().items():
        if tensor.is_meta or tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        kept[name] = tensor.detach().cpu().contiguous()
    return kept


def _link(source: Path, target: Path) -> None:
    """The same file under another name; a copy where the system cannot do that."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _check_complete(model: Any, places: dict[str, str], folder: Path) -> None:
    tied = tied_names(model)
    for name, tensor in model.state_dict().items():
        if name not in places:
            if name in tied:
                continue
            raise TrisectError(
                f"{name} is in no shard of {folder.name}; nothing was written. Please report this."
            )
        with safe_open(folder / places[name], framework="pt") as file:
            shape = tuple(file.get_slice(name).get_shape())
        if shape != tuple(tensor.shape):
            raise TrisectError(
                f"{name} was written as {shape} and should be {tuple(tensor.shape)}; nothing was written. "
                "Please report this."
            )
