"""Where a model's files are and what their headers say, before anything is loaded (docs/security.md)."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGUFReader, GGUFValueType
from safetensors import SafetensorError, safe_open

from trisect.errors import TrisectError
from trisect.support import replaced
from trisect.support.checks import explained, read_json, shown

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
TEMPLATES = "additional_chat_templates"
ROPE_FACTORS = "rope_freqs.weight"
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Kinds of numbers, by their names in safetensors' headers and in torch."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
LARGEST_CONFIG = 8 << 20  # bytes
MOST_VALUES = 1 << 22  # of a GGUF header; the largest vocabularies with their merges come to three quarters of it
MOST_LAYERS, MOST_DIMENSIONS = 512, 4


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a safetensors file, from its header."""

    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of a safetensors file and its metadata, without reading any weight."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, no mapping
            tensors = {n: StoredTensor(s.get_dtype(), tuple(s.get_shape())) for n, s in slices.items()}
            return tensors, file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise TrisectError(f"{path} is damaged or cut short: {error}; download it again.") from error


class _BoundedReader(GGUFReader):
    """gguf's reader, which by itself loops, past the end of the file too, for as long as the file says."""

    num_values = 0

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        if not self.num_values:
            self.data = np.asarray(self.data)  # type: ignore[assignment]  # slices of a memmap are slow
        self._count(1)
        end = int(offset) + int(count) * np.dtype(dtype).itemsize
        if end > len(self.data):
            raise ValueError(f"it needs {end:,} bytes and has {len(self.data):,}")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == GGUFValueType.ARRAY:
            self._count(int(self._get(orig_offs + 4, np.uint64)[0]))
        return super()._get_field_parts(orig_offs, raw_type)

    def _count(self, more: int) -> None:
        self.num_values += more
        if self.num_values > MOST_VALUES:
            raise ValueError(f"its header has {self.num_values:,} values or more")


def read_gguf(path: Path) -> GGUFReader:
    """A GGUF file's header, checked; no weight is read."""
    with explained(f"Cannot read {path}, damaged or cut short"):
        reader = _BoundedReader(path)
        shapes = {tensor.name: tuple(tensor.shape.tolist()) for tensor in reader.tensors}
        for name, shape in shapes.items():
            if len(shape) > MOST_DIMENSIONS or min(shape, default=0) < 1:
                raise ValueError(f"the tensor {shown(name)} has the impossible shape {shown(shape)}")
        end = reader.data_offset
        for tensor in sorted(reader.tensors, key=lambda tensor: tensor.data_offset):
            if tensor.data_offset < end:
                raise ValueError(f"the tensor {shown(tensor.name)} starts inside another")
            end = tensor.data_offset + tensor.n_bytes
        # Configs make lists as long as the number of layers that a file announces.
        architecture = reader.get_field("general.architecture")
        count = architecture and reader.get_field(f"{architecture.contents()}.block_count")
        layers = count.contents() if count else 0
        if not isinstance(layers, int) or not 0 <= layers <= min(MOST_LAYERS, len(reader.tensors)):
            raise ValueError(f"it announces {shown(layers)} layers and holds {len(reader.tensors):,} tensors")
    return reader


def reading_once(reader: GGUFReader | None) -> AbstractContextManager[None]:
    """transformers reads a GGUF header for config, weights and tokenizer anew, seconds each: it gets this one."""
    return nullcontext() if reader is None else replaced((gguf, "GGUFReader", lambda *_: reader))


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What the weight files hold, from their headers alone."""

    shapes: dict[str, tuple[int, ...]]  # by the names in the files
    size: int  # bytes
    dtype: str | None = None  # of the first tensor of numbers with a fraction, by torch's name


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a model comes from."""

    path: str  # a folder, or a hub id
    trusted: bool = False  # whether code that it brings along may run
    file: str | None = None  # the name of a GGUF file in that folder
    gguf: GGUFReader | None = None  # the header of a GGUF file
    local: bool = True
    has_tokenizer: bool = True
    weights: Weights | None = None  # known at once for a GGUF file; `check_weights` reads a folder's

    @property
    def kwargs(self) -> dict[str, Any]:
        """Extra arguments for from_pretrained."""
        return {"trust_remote_code": self.trusted, **({} if self.file is None else {"gguf_file": self.file})}


def resolve(name: str, *, trusted: bool = False) -> Source:
    """A local folder, a GGUF file, or failing both a hub id."""
    path = Path(name)
    try:
        if path.is_dir():
            return Source(path=name, trusted=trusted, has_tokenizer=any((path / file).is_file() for file in TOKENIZERS))
        if path.is_file():
            return _resolve_file(path, trusted=trusted)
    except OSError as error:
        raise TrisectError(f"Cannot read a model at {shown(name)}: {error.strerror}.") from error
    if path.suffix or name.startswith((".", "/", "~")) or name.count("/") != 1:
        known = "a folder, a .gguf file, a hub id such as org/name, or a built-in name (`trisect ls models`)"
        raise TrisectError(f"There is no model at {name!r}: give {known}.")
    return Source(path=name, trusted=trusted, local=False)


def _resolve_file(path: Path, *, trusted: bool) -> Source:
    if path.suffix != ".gguf":
        raise TrisectError(f"{path} is a file; give the folder that holds config.json, or a .gguf file.")
    reader = read_gguf(path)
    shapes = {tensor.name: tuple(tensor.shape.tolist()) for tensor in reader.tensors}
    if ROPE_FACTORS in shapes:
        factors = f"{path} carries rotation factors ({ROPE_FACTORS}), which transformers leaves out when it reads GGUF"
        raise TrisectError(f"{factors}; give the Hugging Face folder instead.")
    weights = Weights(shapes=shapes, size=path.stat().st_size)
    return Source(path=str(path.parent), trusted=trusted, file=path.name, gguf=reader, weights=weights)


def read_raw_config(source: Source) -> Any:
    """A local folder's config.json as it stands."""
    return read_json(_checkpoint_folder(source) / "config.json", largest=LARGEST_CONFIG)


def check_weights(source: Source) -> Weights | None:
    """What a local model's files hold; pickles, missing shards and damaged headers are refused by name."""
    if not source.local or source.gguf:
        return source.weights
    folder = _checkpoint_folder(source)
    if (folder / ADAPTER).exists():
        adapter = f"{folder} holds an adapter ({ADAPTER}), which loads weights from elsewhere"
        raise TrisectError(f"{adapter}; merge it first (peft's merge_and_unload does), or remove it.")
    shapes: dict[str, tuple[int, ...]] = {}
    size, kinds = 0, []
    for shard, names in _shards(folder).items():
        if not shard.is_file():
            raise TrisectError(f"{folder} is incomplete: {shard.name} is missing; download it again.")
        tensors = read_header(shard)[0]
        kinds += [FLOATS[tensor.dtype] for tensor in tensors.values() if tensor.dtype in FLOATS]
        if missing := sorted(names - set(tensors)):
            raise TrisectError(f"{folder} is incomplete: {shard.name} has no {missing[0]}, which {INDEX} names.")
        shapes |= {name: tensor.shape for name, tensor in tensors.items()}
        size += shard.stat().st_size
    return Weights(shapes=shapes, size=size, dtype=next(iter(kinds), None))


def tensor_files(folder: Path) -> dict[str, str]:
    """The file in a folder that holds each tensor; `check_weights` has found them to be whole."""
    shards = {shard: names or read_header(shard)[0] for shard, names in _shards(folder).items()}
    return {tensor: shard.name for shard, names in shards.items() for tensor in names}


def _checkpoint_folder(source: Source) -> Path:
    """A local folder that has a config, and no text from elsewhere."""
    folder = Path(source.path)
    if not (folder / "config.json").is_file():
        raise TrisectError(f"{folder} has no config.json; give the folder of a Hugging Face checkpoint.")
    _check_links(folder)
    return folder


def _shards(folder: Path) -> dict[Path, set[str]]:
    """The weight files that transformers would read, with the tensors that the index expects in each."""
    if (folder / WEIGHTS).is_file():
        return {folder / WEIGHTS: set()}
    if not (folder / INDEX).is_file():
        pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
        if pickles:
            pickled = f"{folder} holds only pickled weights ({pickles[0]}), which can run code when opened"
            raise TrisectError(f"{pickled}; convert them to safetensors first (model.save_pretrained does).")
        raise TrisectError(f"{folder} has no {WEIGHTS} and no {INDEX}; the weights are missing.")
    data = read_json(folder / INDEX)
    places = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(places, dict) or not places:
        raise TrisectError(f"{folder / INDEX} is not a weight index: it has no weight_map.")
    shards: dict[Path, set[str]] = {}
    for tensor, name in places.items():
        if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name or "\0" in name:
            raise TrisectError(f"{folder / INDEX} points outside its folder ({shown(name)}); refused.")
        if not name.endswith(".safetensors"):
            raise TrisectError(f"{folder / INDEX} names {shown(name)}, which is no safetensors file; refused.")
        shards.setdefault(folder / name, set()).add(tensor)
    return dict(sorted(shards.items()))


def _check_links(folder: Path) -> None:
    """Refuse texts that lie elsewhere: what a config, tokenizer or template says is copied to outputs."""
    # The hub's cache keeps the files of a snapshot beside it; links to there are its own. Weights may lie on
    # another disk, and are only ever read as numbers.
    home = folder.resolve()
    allowed = home.parent.parent if home.parent.name == "snapshots" else home
    for file in (*folder.iterdir(), *folder.glob(f"{TEMPLATES}/*")):
        if not file.is_symlink() or file.suffix in (".safetensors", ".gguf"):
            continue
        try:
            target = file.resolve()
        except (OSError, RuntimeError) as error:
            raise TrisectError(f"{file} is a link that leads nowhere; remove it.") from error
        if not target.is_relative_to(allowed):
            raise TrisectError(f"{file} is a link to {target}, outside its folder; put the file itself there.")
