"""Weight files, tensor by tensor: layers that stay there until they run, and the check of a saved folder."""

import ctypes
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import MergeModulelist, WeightRenaming, dot_natural_key, rename_source_key

from trisect.errors import TrisectError, check_names
from trisect.models import LayerView, family_for, layer_views
from trisect.models.linear import refuse_nan
from trisect.models.source import INDEX, Source, read_header, tensor_files
from trisect.support.clock import stage
from trisect.support.files import write_json

M_MMAP_THRESHOLD, LARGE_BLOCK = -3, 1 << 20  # of malloc.h: freed blocks of so many bytes go back to the system
SMALL = 500_000_000  # parameters of a model that is loaded again and run on a few tokens
TOKENS = 16

Read = Callable[[], Mapping[str, Tensor]]  # gives a layer's tensors in main memory, by their names inside the layer


@dataclass(frozen=True)
class Place:
    """Where a tensor is in the files: as it is, or in pieces (experts that are stored one by one)."""

    names: dict[str, list[str]]  # pattern of the converter, if any -> the tensors that match it, in order
    converter: Any = None  # transformers' way to make it of several, by operations one after the other

    def merged(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The tensor, of its pieces by name."""
        found: Any = {pattern: [tensors[name] for name in names] for pattern, names in self.names.items()}
        if self.converter is not None:
            how = {f"{side}_patterns": getattr(self.converter, f"{side}_patterns") for side in ("source", "target")}
            how |= {"model": None, "config": None, "full_layer_name": "", "missing_keys": None}
            for operation in self.converter.operations:
                found = operation.convert(found, **how)
        (tensor,) = found.values()
        return tensor if self.converter is not None else tensor[0]

    def first(self, key: Any) -> "Place | None":
        """The pieces that rows `key` are made of; None where those are not pieces of their own."""
        stacked = self.converter.operations[0]
        if not isinstance(key, slice) or not isinstance(stacked, MergeModulelist) or stacked.dim != 0:
            return None
        return replace(self, names={pattern: names[key] for pattern, names in self.names.items()})


class Shards:
    """The weight files of a folder."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.files = tensor_files(self.folder)  # tensor name -> file name

    def shape(self, place: Place) -> tuple[int, ...]:
        """The shape of a tensor, from its files' headers."""
        shapes = self._each(place, lambda file, name: file.get_slice(name).get_shape())
        return tuple(place.merged({name: torch.empty(shape, device="meta") for name, shape in shapes.items()}).shape)

    def part(self, place: Place, key: Any) -> Tensor:
        """`tensor[key]`, without reading the rest where it can be avoided; the file is let go again, and its pages."""
        if place.converter is None:
            return place.merged(self._each(place, lambda file, name: file.get_slice(name)[key].clone()))
        few = place.first(key)
        return self.read(place)[key] if few is None else self.read(few)

    def read(self, place: Place, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor in memory of its own, floats in another dtype; one with NaN or inf is refused."""

        def checked(file: Any, name: str) -> Tensor:
            tensor = file.get_tensor(name)
            refuse_nan(tensor, f"{name} in {self.folder / self.files[name]}")
            tensor = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            return tensor.clone() if place.converter is None else tensor  # merging copies

        return place.merged(self._each(place, checked))

    def _each(self, place: Place, read: Callable[[Any, str], Any]) -> dict[str, Any]:
        """What is read of every piece, each file opened once."""
        by_file: dict[str, list[str]] = {}
        for name in (name for names in place.names.values() for name in names):
            by_file.setdefault(self.files[name], []).append(name)
        found: dict[str, Any] = {}
        for file_name, names in by_file.items():
            try:
                with safe_open(self.folder / file_name, framework="pt") as file:
                    found |= {name: read(file, name) for name in names}
            except (OSError, SafetensorError) as error:
                where = f"{names[0]} from {self.folder / file_name}"
                raise TrisectError(f"Cannot read {where}: {error}; download the file again.") from error
        return found


def names_in_files(model: Any, files: Iterable[str], state: dict[str, Tensor]) -> dict[str, Place]:
    """Name in the model -> place in the files; tensors that transformers would split are left out."""
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if not isinstance(entry, WeightRenaming)]
    found: dict[str, Place] = {}
    for name in sorted(files, key=dot_natural_key):
        ours, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if pattern is None:
            found[ours] = Place({"": [name]})
            continue
        converter = next(entry for entry in converters if pattern in entry.source_patterns)
        if len(converter.target_patterns) == 1:
            found.setdefault(ours, Place({}, converter)).names.setdefault(pattern, []).append(name)
    return found


def tied_names(model: Any) -> set[str]:
    """Tensors that are another's under a second name, and need not be in the files."""
    tied = getattr(model, "_tied_weights_keys", None) or ()
    return set(tied) if model.config.tie_word_embeddings else set()


class LayerStore:
    """Brings layers in and lets them go; the next one is read while this one is worked on."""

    def __init__(self, model: Any, sources: list[Read], *, device: str | torch.device, peek: Any = None):
        self.layers = [view.layer for view in layer_views(model)]
        self.sources, self.device = sources, torch.device(device)
        self.peek: Callable[[int, str, Any], Tensor] = peek or (lambda i, name, key: self.sources[i]()[name][key])
        """Layer, name and index -> that part of the tensor, without reading the rest where it can be avoided."""
        self.present_now: set[int] = set()
        self._called: set[int] = set()  # layers that are here for one call only
        self._ahead: tuple[int, Future[dict[str, Tensor]] | None] = -1, None
        self._last = -1
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trisect-read")
        for index, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(lambda *args, i=index: self._begin_call(i))
            layer.register_forward_hook(lambda *args, i=index: self._end_call(i), always_call=True)

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
            number, ahead = self._ahead
            tensors = ahead.result() if ahead is not None and number == index else self._read(index)
            self._ahead = -1, None
            # Whoever walks backwards comes from the layer behind.
            coming, self._last = index + (-1 if self._last == index + 1 else 1), index
            if 0 <= coming < len(self.layers):
                self._ahead = coming, self._reader.submit(self._read, coming)
            moved = {name: tensor.to(self.device, non_blocking=True) for name, tensor in tensors.items()}
            self.layers[index].load_state_dict(moved, assign=True)
        self.present_now.add(index)

    def release(self, index: int) -> None:
        """Let the weights go; the shapes stay as they are."""
        empty(self.layers[index])
        self.present_now.discard(index)

    def _read(self, index: int) -> dict[str, Tensor]:
        tensors = dict(self.sources[index]())
        if self.device.type == "cuda":
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        return tensors

    def _begin_call(self, index: int) -> None:
        if index not in self.present_now:
            self.bring(index)
            self._called.add(index)

    def _end_call(self, index: int) -> None:
        if index in self._called:
            self._called.discard(index)
            self.release(index)


def empty(layer: nn.Module) -> None:
    """Weights become shapes; what a checkpoint does not hold (tables, masks) stays."""
    nothing = {name: tensor.to("meta") for name, tensor in layer.state_dict().items()}
    layer.load_state_dict(nothing, assign=True)


def constant(tensors: Mapping[str, Tensor]) -> Read:
    """The same tensors whenever asked, in main memory."""
    kept = {name: tensor.detach().to("cpu") for name, tensor in tensors.items()}
    return lambda: kept


def move_rest(model: Any, device: str | torch.device) -> None:
    """Move whatever has a value, which is all but the layers."""
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    model.tie_weights()


def refuse_streamed(model: Any, what: str) -> None:
    """Some work has all layers in memory at a time."""
    if hasattr(model, "layer_store"):
        raise TrisectError(f"{what} needs the whole model in memory; use --stream off.")


def walk(model: Any, *, backwards: bool = False) -> Iterator[LayerView]:
    """Each layer, owned, and in memory until the caller asks for the next one."""
    store = getattr(model, "layer_store", None)
    for view in layer_views(model, own=True)[:: -1 if backwards else 1]:
        if store is None:
            yield view
        else:
            with store.present(view.index):
                yield view


STREAM = ("auto", "on", "off")
ROOM = 0.5  # a model may take this share of the memory that is free before its layers are streamed


def to_be_streamed(asked: str, source: Source, *, device: str, size: float) -> bool:
    """Whether layers are to be read one at a time: as asked, or where all, `size` bytes, is large."""
    check_names("way to stream", [asked], STREAM)
    possible = source.local and not source.gguf
    if asked == "on" and not possible:
        needed = f"Layers are streamed from a folder of safetensors, which {source.path} is not"
        raise TrisectError(f"{needed}; download it, or use --stream off.")
    if asked != "auto" or not possible:
        return asked == "on"
    return size > ROOM * available_bytes(device)


def available_bytes(device: str | torch.device) -> int:
    """Memory that is free for a model on a device."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)


def load_layers_later(model_class: Any, config: Any, folder: str | Path, *, dtype: Any, device: str) -> Any:
    """A model whose layers read their weights when they are needed."""
    from accelerate import init_empty_weights

    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "mallopt"):  # glibc keeps freed blocks of a layer's size by itself
        libc.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)
    shards = Shards(folder)
    with init_empty_weights(include_buffers=False):
        model = model_class._from_config(config, dtype=dtype)
    names = _names(model, shards)
    inside = family_for(config).layers
    outside = {name: place for name, place in names.items() if not name.startswith(f"{inside}.")}
    rest = {name: shards.read(place, dtype) for name, place in outside.items()}
    model.load_state_dict(rest, assign=True, strict=False)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if model.config.tie_word_embeddings and not head.weight.is_meta:  # two in the files: untied where they differ
        model.config.tie_word_embeddings = head.weight.equal(embedding.weight)
    move_rest(model, device)

    def read(prefix: str) -> dict[str, Tensor]:
        mine = {name.removeprefix(prefix): name for name in names if name.startswith(prefix)}
        return {name: shards.read(names[whole], dtype) for name, whole in mine.items()}

    def peek(index: int, name: str, key: Any) -> Tensor:
        return shards.part(names[f"{inside}.{index}.{name}"], key)

    sources: list[Read] = [partial(read, f"{inside}.{index}.") for index in range(len(layer_views(model)))]
    model.layer_store = LayerStore(model, sources, device=device, peek=peek)
    if (Path(folder) / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model.eval()


def _names(model: Any, shards: Shards) -> dict[str, Place]:
    """Where each tensor of the model is in the files, whose names may be those of an older version."""
    state = model.state_dict()
    known = names_in_files(model, shards.files, state)
    names: dict[str, Place] = {}
    for name in [name for name in state if name in known or name not in tied_names(model)]:
        if name not in known:
            unlike = "it is incomplete, or its weights need converting, for which there is --stream off"
            raise TrisectError(f"{shards.folder} has no tensor {name}: {unlike}.")
        tensor, shape = state[name], shards.shape(known[name])
        if shape != tuple(tensor.shape):
            sizes = f"file {shape}, config {tuple(tensor.shape)}"
            raise TrisectError(f"{shards.folder}: config.json does not fit the weights: {name} ({sizes}).")
        names[name] = known[name]
    return names


def write_shards(model: Any, layer_files: Sequence[Path], folder: Path) -> None:
    """Shards, index and configs of a model whose layers are in `layer_files`, in order."""
    count = len(layer_files) + 1
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    rest: dict[int, tuple[str, Tensor]] = {}  # by place in memory: tied weights once
    for name, tensor in model.state_dict().items():
        if not tensor.is_meta:
            rest.setdefault(tensor.data_ptr(), (name, tensor.detach().cpu().contiguous()))
    save_file(dict(rest.values()), folder / names[0], metadata={"format": "pt"})
    for path, name in zip(layer_files, names[1:], strict=True):
        try:
            os.link(path, folder / name)
        except OSError:  # not on this system, or not from that disk
            shutil.copyfile(path, folder / name)
    places = {tensor: name for name in names for tensor in read_header(folder / name)[0]}
    size = sum((folder / name).stat().st_size for name in names)
    write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))})
    model.config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def check_saved(model: Any, folder: Path) -> None:
    """Refuse a folder whose tensors, or whose logits, are not the model's."""
    shards, state = Shards(folder), model.state_dict()
    known = names_in_files(model, shards.files, state)
    missing = sorted(set(state) - set(known) - tied_names(model))
    if missing:
        raise _wrong(f"{missing[0]} is in none of them")
    for name, place in known.items():
        stored = shards.read(place)
        if name not in state or stored.shape != state[name].shape:
            raise _wrong(f"{name} has the shape {tuple(stored.shape)}")
        if not state[name].is_meta and not torch.equal(stored, state[name].cpu()):
            raise _wrong(f"{name} has other values")
    whole = not any(tensor.is_meta for tensor in state.values())
    if whole and sum(parameter.numel() for parameter in model.parameters()) <= SMALL:
        _check_logits(model, folder)


@torch.no_grad()
def _check_logits(model: Any, folder: Path) -> None:
    embedding = model.get_input_embeddings().weight
    ids = torch.arange(TOKENS, device=embedding.device).remainder(len(embedding)).unsqueeze(0)
    again = type(model).from_pretrained(folder, dtype=embedding.dtype, use_safetensors=True)
    again = again.to(embedding.device).train(model.training)
    found, expected = (m(input_ids=ids, use_cache=False).logits.float() for m in (again, model))
    # A model that was cast to 16 bits has cast its rotation tables too; a loaded one has them in float32.
    tolerance = 1e-4 if embedding.dtype.itemsize > 2 else 5e-2
    if (found - expected).abs().max() > tolerance * expected.abs().max():
        raise _wrong("its logits are not those of the model in memory")


def _wrong(what: str) -> TrisectError:
    files = f"The files that were written do not hold the model: {what}"
    return TrisectError(f"{files}. They were removed; check the disk, and report this if it happens again.")
