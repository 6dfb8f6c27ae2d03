"""Load a checkpoint without its layers: those stay in their files until it is their turn."""

from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from torch import Tensor, nn

from trisect.errors import TrisectError, unknown_name
from trisect.models.families import family_for
from trisect.models.names import names_in_files, tied_names
from trisect.models.shards import Shards, Slices
from trisect.models.source import Source
from trisect.models.streamed import LayerStore, Read, give_large_blocks_back, layers_of, move_rest

STREAM = ("auto", "on", "off")
ROOM = 0.5
"""A model may take this share of the memory that is free before its layers are streamed."""

Names = dict[str, str]
"""Tensor name in the model -> its name in the files."""


def to_be_streamed(asked: str, source: Source, *, device: str) -> bool:
    """Whether layers are to be read one at a time: as asked, or where the whole would not fit well."""
    if asked not in STREAM:
        raise unknown_name("way to stream", asked, STREAM)
    possible = source.local and not source.gguf
    if asked == "on" and not possible:
        raise TrisectError(
            f"Layers are streamed from a folder of safetensors, which {source.path} is not; download it, or "
            "use --stream off."
        )
    if asked != "auto" or not possible:
        return asked == "on"
    return Shards(source.path).num_bytes > ROOM * available_bytes(device)


def available_bytes(device: str) -> int:
    """Memory that is free for a model on a device."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)


def load_layers_later(
    model_class: Any, config: Any, folder: str | Path, *, dtype: torch.dtype | str, device: str
) -> Any:
    """A model whose layers read their weights when they are needed."""
    from accelerate import init_empty_weights

    give_large_blocks_back()
    shards = Shards(folder)
    if dtype == "auto":
        dtype = config.dtype or shards.dtype(next(iter(shards.files)))
    with init_empty_weights(include_buffers=False):
        model = model_class._from_config(config, dtype=dtype)
    names = _names(model, shards)
    inside = family_for(config).layers
    outside = [name for name in names if not name.startswith(f"{inside}.")]
    _fill(model, outside, names, shards, dtype)
    _keep_two_heads(model)
    move_rest(model, device)
    prefixes = [f"{inside}.{index}." for index in range(len(layers_of(model)))]
    sources: list[Read] = [partial(_read_layer, prefix, names, shards, dtype) for prefix in prefixes]

    def peek(index: int, name: str) -> Slices:
        return shards.slices(names[prefixes[index] + name])

    model.layer_store = LayerStore(model, sources, device=device, peek=peek)
    _adopt_generation_config(model, folder)
    return model.eval()


def _names(model: Any, shards: Shards) -> Names:
    """Where each tensor of the model is in the files, whose names may be those of an older version."""
    tied, state = tied_names(model), model.state_dict()
    known = names_in_files(model, shards.files, state)
    names: Names = {}
    for name, tensor in state.items():
        if name not in known:
            if name in tied:
                continue
            raise TrisectError(
                f"{shards.folder} has no tensor {name}: it is incomplete, or its weights need converting, "
                "which transformers does when it loads the whole model; use --stream off."
            )
        shape = shards.shape(known[name])
        if shape != tuple(tensor.shape):
            raise TrisectError(
                f"{shards.folder}: config.json does not fit the weights: {name} (file {shape}, "
                f"config {tuple(tensor.shape)})."
            )
        names[name] = known[name]
    return names


def _fill(model: Any, wanted: list[str], names: Names, shards: Shards, dtype: Any) -> None:
    for name in wanted:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        tensor = _cast(shards.read(names[name]), dtype)
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        else:
            module._buffers[leaf] = tensor


def _keep_two_heads(model: Any) -> None:
    """A head that its file holds beside another embedding is not tied, whatever the config says.

    transformers decides so when it loads the whole model.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if model.config.tie_word_embeddings and not head.weight.is_meta:
        model.config.tie_word_embeddings = head.weight.equal(embedding.weight)


def _read_layer(prefix: str, names: Names, shards: Shards, dtype: Any) -> dict[str, Tensor]:
    mine = {name: place for name, place in names.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): _cast(shards.read(place), dtype) for name, place in mine.items()}


def _cast(tensor: Tensor, dtype: Any) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _adopt_generation_config(model: Any, folder: str | Path) -> None:
    if (Path(folder) / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
