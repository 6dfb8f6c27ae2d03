"""Write a model whose layers are in files already: those become its shards, and the rest one more."""

import ctypes
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from trisect.errors import TrisectError, unknown_name
from trisect.models.families import family_for
from trisect.models.shards import Shards, Slices, names_in_files, tied_names
from trisect.models.source import INDEX, Source
from trisect.models.view import LayerView, layer_views
from trisect.support.clock import stage
from trisect.support.files import write_json

M_MMAP_THRESHOLD = -3
"""Of malloc.h."""
LARGE_BLOCK = 1 << 20

Read = Callable[[], Mapping[str, Tensor]]
"""Gives a layer's tensors in main memory, by their names inside the layer."""

Peek = Callable[[int, str], Any]
"""Layer and name -> something that can be sliced like the tensor, without reading all of it."""


class LayerStore:
    """Brings layers in and lets them go; the next one is read while this one is worked on."""

    def __init__(
        self, model: Any, sources: list[Read], *, device: str | torch.device, peek: Peek | None = None
    ):
        self.layers = layers_of(model)
        self.sources, self.device = sources, torch.device(device)
        self.peek = peek or (lambda index, name: self.sources[index]()[name])
        self.present_now: set[int] = set()
        self._called: set[int] = set()
        """Layers that are here for one call only."""
        self._ahead: tuple[int, Future[dict[str, Tensor]]] | None = None
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trisect-read")
        for index, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(self._call_begins(index))
            layer.register_forward_hook(self._call_ends(index), always_call=True)

    @contextmanager
    def present(self, index: int) -> Iterator[None]:
        """The layer's weights are there inside."""
        self.bring(index)
        try:
            yield
        finally:
            self.release(index)

    def bring(self, index: int) -> None:
        """Put the layer's weights where they are used, and begin to read those of the next."""
        with stage("read"):
            tensors = self._taken(index)
            self._ahead = None
            if index + 1 < len(self.layers):
                self._ahead = index + 1, self._reader.submit(self._read, index + 1)
            moved = {name: tensor.to(self.device, non_blocking=True) for name, tensor in tensors.items()}
            self.layers[index].load_state_dict(moved, assign=True)
        self.present_now.add(index)

    def release(self, index: int) -> None:
        """Let the weights go; the shapes stay as they are."""
        empty(self.layers[index])
        self.present_now.discard(index)

    def _taken(self, index: int) -> dict[str, Tensor]:
        if self._ahead is not None and self._ahead[0] == index:
            return self._ahead[1].result()
        return self._read(index)

    def _read(self, index: int) -> dict[str, Tensor]:
        tensors = dict(self.sources[index]())
        if self.device.type == "cuda":
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        return tensors

    def _call_begins(self, index: int) -> Callable[..., None]:
        def begin(module: Any, args: Any) -> None:
            if index not in self.present_now:
                self.bring(index)
                self._called.add(index)

        return begin

    def _call_ends(self, index: int) -> Callable[..., None]:
        def end(module: Any, args: Any, output: Any) -> None:
            if index in self._called:
                self._called.discard(index)
                self.release(index)

        return end


def give_large_blocks_back() -> None:
    """Have glibc return every large block to the system when it is freed, from now on.

    By itself it keeps blocks of a layer's size for later, and memory grows with the number of layers.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)


def empty(layer: nn.Module) -> None:
    """Weights become shapes; what a checkpoint does not hold (tables, masks) stays."""
    nothing = {name: tensor.to("meta") for name, tensor in layer.state_dict().items()}
    layer.load_state_dict(nothing, assign=True)


def hosted(model: Any, *, device: str | torch.device) -> Any:
    """Run a model that is in main memory layer by layer on a device it does not fit on."""
    layers = layers_of(model)
    sources = [constant(layer.state_dict()) for layer in layers]
    for layer in layers:
        empty(layer)
    move_rest(model, device)
    model.layer_store = LayerStore(model, sources, device=device)
    return model


def unhosted(model: Any) -> Any:
    """Bring all layers into main memory, to stay."""
    store: LayerStore = model.layer_store
    for layer, source in zip(store.layers, store.sources, strict=True):
        layer.load_state_dict(source(), assign=True)
        layer._forward_pre_hooks.clear()
        layer._forward_hooks.clear()
    del model.layer_store
    move_rest(model, "cpu")
    return model


def constant(tensors: Mapping[str, Tensor]) -> Read:
    """The same tensors whenever asked, in main memory."""
    kept = {name: tensor.detach().to("cpu") for name, tensor in tensors.items()}
    return lambda: kept


def layers_of(model: Any) -> list[nn.Module]:
    return list(model.get_submodule(family_for(model.config).layers).children())


def move_rest(model: Any, device: str | torch.device) -> None:
    """Move whatever has a value, which is all but the layers."""
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None or tensor.is_meta:
                    continue
                moved = tensor.to(device)
                if isinstance(tensor, nn.Parameter):
                    moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
                table[name] = moved
    model.tie_weights()


def refuse_streamed(model: Any, what: str) -> None:
    """Some work has all layers in memory at a time."""
    if hasattr(model, "layer_store"):
        raise TrisectError(f"{what} needs the whole model in memory; use --stream off.")


def walk(model: Any) -> Iterator[LayerView]:
    """Each layer, in memory until the caller asks for the next one."""
    store = getattr(model, "layer_store", None)
    for view in layer_views(model):
        if store is None:
            yield view
        else:
            with store.present(view.index):
                yield view


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
