"""Moments on disk: calibrate once, cut at any ratio."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import safetensors.torch
import torch
from pydantic import BaseModel
from torch import Tensor

from trisect.calibrate.moments import OBSERVED, READINGS
from trisect.errors import TrisectError
from trisect.models.source import StoredTensor, read_header
from trisect.records.shapes import LayerShape
from trisect.support import checks, files

FORMAT = "trisect-moments-1"
COLLECT = "collect them with `trisect calibrate MODEL -o moments.safetensors`"


class MomentsInfo(BaseModel, strict=True, extra="forbid", frozen=True):
    """What a moments file was collected on, checked before it is used."""

    fingerprint: str  # of the model: its layer shapes and a sample of its weights
    num_layers: int
    token_hash: str
    source: str
    num_tokens: int


def save_moments(path: str | Path, layers: Mapping[int, Mapping[str, Tensor]], info: MomentsInfo) -> None:
    """Write all layers' moments to one safetensors file."""
    every = ((layer, name, tensor) for layer, moments in layers.items() for name, tensor in moments.items())
    tensors = {f"{layer}.{name}": tensor.contiguous() for layer, name, tensor in every}
    about = {"format": FORMAT, "info": json.dumps(info.model_dump())}
    with files.new_file(path) as partial:
        safetensors.torch.save_file(tensors, partial, metadata=about)


def read_info(path: str | Path) -> MomentsInfo:
    """What a moments file says about itself."""
    return _header(path)[1]


def load_moments(
    path: str | Path, *, fingerprint: str, layers: Sequence[LayerShape]
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """One layer's moments after the other, for the model they were collected on."""
    stored, info = _header(path)
    if info.fingerprint != fingerprint or info.num_layers != len(layers):
        other = f"{path} holds moments of another model ({info.num_layers} layers, {checks.shown(info.source)})"
        raise TrisectError(f"{other}; {COLLECT}.")
    names = _by_layer(path, stored, layers)
    with safetensors.safe_open(path, framework="pt") as file:
        for layer in range(info.num_layers):
            found = {name: file.get_tensor(f"{layer}.{name}") for name in names[layer]}
            for name, moment in found.items():
                if not moment.isfinite().all():
                    raise TrisectError(f"{path}: {name} of layer {layer} holds NaN or inf; collect it again.")
            yield layer, found


def expected_shape(name: str, layer: LayerShape) -> tuple[int, ...] | None:
    """The shape of a moment, from what sums it up; None where a layer has no such moment."""
    expert, dot, name = name.rpartition(".")
    experts = [f"expert{number}" for number in range(layer.experts + layer.dropped_experts)]
    if dot and expert not in [*experts, *(["shared"] if layer.shared else [])]:
        return None
    if name not in READINGS:
        return () if dot and name == OBSERVED else None
    q, k = (layer.heads, layer.qk), (layer.kv_heads, layer.qk)
    taps = {
        "q": q,
        "k": k,
        "q_raw": (1, math.prod(q)) if layer.norm_together else q,
        "k_raw": (1, math.prod(k)) if layer.norm_together else k,
        "v": (layer.kv_heads, layer.vo),
        "a": (layer.heads, layer.vo),
        **dict.fromkeys(("x", "up"), (layer.d_model,)),
        "down": (layer.mlp * (layer.shared if expert == "shared" else 1),),
        "out": (layer.d_model,),
    }
    tap, total = READINGS[name]
    return tuple(total(torch.empty(1, 1, *taps[tap], device="meta")).shape)


def _header(path: str | Path) -> tuple[dict[str, StoredTensor], MomentsInfo]:
    if not Path(path).is_file():
        raise TrisectError(f"Cannot read moments from {path}: there is no such file.")
    stored, metadata = read_header(Path(path))
    if metadata.get("format") != FORMAT:
        raise TrisectError(f"{path} is not a moments file of this version; {COLLECT}.")
    info = checks.parse_json(metadata.get("info", ""), where=f"the description inside {path}")
    return stored, checks.validated(MomentsInfo, info, where=f"{path} does not describe its moments")


def _by_layer(path: str | Path, stored: Mapping[str, StoredTensor], layers: Sequence[LayerShape]) -> list[list[str]]:
    """Names of every layer's moments, after a look at their shapes."""
    names: list[list[str]] = [[] for _ in layers]
    places = {str(index): index for index in range(len(layers))}
    for key, tensor in stored.items():
        place, _, name = key.partition(".")
        expected = expected_shape(name, layers[places[place]]) if place in places else None
        if expected is None or tensor.dtype != "F64":
            raise TrisectError(f"{path}: {checks.shown(key)} in {tensor.dtype} is no moment of this model.")
        if tensor.shape != expected:
            wrong = f"{name} of layer {place} has the shape {tensor.shape}, not {expected}"
            raise TrisectError(f"{path}: {wrong}; collect it again.")
        names[places[place]].append(name)
    return names
