"""Moments on disk: calibrate once, cut at any ratio."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trisect.errors import TrisectError
from trisect.files import new_file

FORMAT = "trisect-moments-1"


@dataclass(frozen=True, kw_only=True)
class MomentsInfo:
    """What a moments file was collected on, checked before it is used."""

    fingerprint: str
    """Of the model: its layer shapes and a sample of its weights."""
    num_layers: int
    token_hash: str
    source: str
    num_tokens: int


def save_moments(path: str | Path, layers: Mapping[int, Mapping[str, Tensor]], info: MomentsInfo) -> None:
    """Write all layers' moments to one safetensors file."""
    tensors = {
        f"{layer}.{name}": tensor.contiguous()
        for layer, moments in layers.items()
        for name, tensor in moments.items()
    }
    with new_file(path) as partial:
        save_file(tensors, partial, metadata={"format": FORMAT, "info": json.dumps(asdict(info))})


def read_info(path: str | Path) -> MomentsInfo:
    """The header of a moments file."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise TrisectError(f"Cannot read moments from {path}: {error}.") from error
    if metadata.get("format") != FORMAT:
        raise TrisectError(
            f"{path} is not a moments file of this version; write one with "
            "`trisect calibrate MODEL -o moments.safetensors`."
        )
    return MomentsInfo(**json.loads(metadata["info"]))


def load_moments(path: str | Path, *, fingerprint: str) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """One layer's moments after the other, for the model they were collected on."""
    info = read_info(path)
    if info.fingerprint != fingerprint:
        raise TrisectError(
            f"{path} holds moments of another model ({info.num_layers} layers, {info.source}); collect them "
            "again with `trisect calibrate MODEL -o moments.safetensors`."
        )
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        for layer in range(info.num_layers):
            mine = [name for name in names if name.startswith(f"{layer}.")]
            yield layer, {name.partition(".")[2]: file.get_tensor(name) for name in mine}
