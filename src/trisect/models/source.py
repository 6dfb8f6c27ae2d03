"""Where a model's files are, checked before anything is loaded from them (docs/security.md)."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors import SafetensorError, safe_open

from trisect.errors import TrisectError
from trisect.support.checks import parse_json, read_json, shown

LONGEST = 100_000_000
"""Bytes of a header; the format's own limit."""

BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor by what the header says of it."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    """Bytes from the end of the header."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of a file and its metadata, without reading any weight."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(LONGEST, size - 8):
                raise _damaged(path, f"it has {size:,} bytes and announces a header of {length:,}")
            text = file.read(length)
    except OSError as error:
        raise TrisectError(f"Cannot read {path}: {error.strerror}.") from error
    try:
        header = parse_json(text.decode("utf-8"), where=f"the header of {path}")
    except UnicodeDecodeError as error:
        raise _damaged(path, "its header is no text") from error
    if not isinstance(header, dict):
        raise _damaged(path, "its header is no mapping")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(path, "its metadata are not texts by name")
    tensors = {name: _tensor(path, name, entry) for name, entry in header.items()}
    _check_places(path, tensors, size - 8 - length)
    return tensors, metadata


def _tensor(path: Path, name: str, entry: Any) -> StoredTensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(
            path, f"the tensor {shown(name)} needs dtype, shape and data_offsets, got {shown(entry)}"
        )
    dtype, shape, place = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _damaged(path, f"the tensor {shown(name)} has the unknown dtype {shown(dtype)}")
    if not _counts(shape) or not _counts(place) or len(place) != 2:
        raise _damaged(path, f"the tensor {shown(name)} has shape {shown(shape)} at bytes {shown(place)}")
    tensor = StoredTensor(dtype=dtype, shape=tuple(shape), start=place[0], end=place[1])
    bits = tensor.elements * BITS[dtype]
    if bits != 8 * (tensor.end - tensor.start):
        raise _damaged(
            path,
            f"the tensor {shown(name)} of shape {shown(tensor.shape)} in {dtype} needs {bits / 8:g} bytes, "
            f"but has {tensor.end - tensor.start:,}",
        )
    return tensor


def _check_places(path: Path, tensors: dict[str, StoredTensor], room: int) -> None:
    """One tensor behind the other, and the file ends where the last one does."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda entry: (entry[1].start, entry[1].end)):
        if tensor.start != end:
            raise _damaged(path, f"the tensor {shown(name)} starts at byte {tensor.start:,}, not at {end:,}")
        if tensor.end > room:
            raise _damaged(
                path, f"the tensor {shown(name)} ends at byte {tensor.end:,} of the {room:,} that are there"
            )
        end = tensor.end
    if end != room:
        raise _damaged(path, f"{room - end:,} bytes behind its last tensor belong to none")


def _counts(values: Any) -> bool:
    """Whether these are a few numbers that a file can be as long as."""
    return (
        isinstance(values, list)
        and len(values) <= 16
        and all(type(value) is int and 0 <= value < 2**48 for value in values)
    )


def _damaged(path: Path, what: str) -> TrisectError:
    return TrisectError(f"{path} is damaged or cut short: {what}; download it again.")


MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
# uint8, int8, uint16, int16, uint32, int32, float32, bool, uint64, int64, float64
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
INTEGERS = {0: False, 1: True, 2: False, 3: True, 4: False, 5: True, 10: False, 11: True}
"""Type -> whether it is signed."""

LONGEST_NAME = 1 << 16
MOST_ENTRIES = 1 << 21
"""Of all arrays together: vocabularies and merges have some hundred thousand, and the reader makes an object
of each."""
MOST_LAYERS = 512
DEFAULT_ALIGNMENT = 32


@dataclass(kw_only=True)
class GGUFHeader:
    """What a file says of itself, as far as it is needed before the file is loaded."""

    counts: dict[str, int] = field(default_factory=dict)
    """The integers that the file says by name."""
    architecture: str = ""
    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shape by name, in the file's order (columns first)."""

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.tensors.values())


def read_gguf_header(path: Path) -> GGUFHeader:
    """What a GGUF file says it holds, or an error that names what cannot be."""
    try:
        with path.open("rb") as file:
            return _Reader(path, file, path.stat().st_size).header()
    except OSError as error:
        raise TrisectError(f"Cannot read {path}: {error.strerror}.") from error


class _Reader:
    def __init__(self, path: Path, file: BinaryIO, size: int):
        self.path, self.file, self.size = path, file, size
        self.entries = 0

    def header(self) -> GGUFHeader:
        if self.file.read(4) != MAGIC:
            raise TrisectError(f"{self.path} does not start as a GGUF file; it is damaged or something else.")
        version = self.number(4)
        if version not in VERSIONS:
            raise self.wrong(f"it has version {version}, known are {VERSIONS[0]} and {VERSIONS[1]}")
        num_tensors, num_keys = self.count("tensors", least=24), self.count("keys", least=13)
        found, keys = GGUFHeader(), set()
        for _ in range(num_keys):
            key = self.text("a key")
            if key in keys:
                raise self.wrong(f"the key {shown(key)} comes twice")
            keys.add(key)
            self.value(key, self.number(4), found)
        places = [self.tensor(found) for _ in range(num_tensors)]
        self.check_places(found, places)
        self.check_layers(found)
        return found

    def value(self, key: str, kind: int, found: GGUFHeader) -> None:
        if kind == STRING:
            text = self.text(key, longest=self.size)
            if key == "general.architecture":
                found.architecture = text
        elif kind == ARRAY:
            self.array(key)
        elif kind in INTEGERS:
            found.counts[key] = self.number(WIDTHS[kind], signed=INTEGERS[kind])
        else:
            self.skip(self.width(key, kind), key)

    def array(self, key: str) -> None:
        kind = self.number(4)
        count = self.count(f"entries of {shown(key)}", least=8 if kind == STRING else self.width(key, kind))
        self.entries += count
        if self.entries > MOST_ENTRIES:
            raise self.wrong(f"its arrays have more than {MOST_ENTRIES:,} entries")
        if kind != STRING:
            self.skip(count * self.width(key, kind), key)
            return
        for _ in range(count):
            self.skip(self.number(8), key)

    def tensor(self, found: GGUFHeader) -> tuple[str, int, int]:
        """Name, first and last byte, counted from where the weights start."""
        name = self.text("a tensor's name")
        if name in found.tensors:
            raise self.wrong(f"the tensor {shown(name)} comes twice")
        dims = self.number(4)
        if not 1 <= dims <= 4:
            raise self.wrong(f"the tensor {shown(name)} has {dims} dimensions")
        shape = tuple(self.number(8) for _ in range(dims))
        kind, start = self.number(4), self.number(8)
        if kind not in {entry.value for entry in GGML_QUANT_SIZES}:
            raise self.wrong(f"the tensor {shown(name)} has the unknown type {kind}")
        block, width = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if not all(1 <= n < 2**40 for n in shape) or shape[0] % block:
            raise self.wrong(f"the tensor {shown(name)} has the impossible shape {shown(shape)}")
        found.tensors[name] = shape
        return name, start, start + math.prod(shape) // block * width

    def check_places(self, found: GGUFHeader, places: list[tuple[str, int, int]]) -> None:
        step = found.counts.get("general.alignment", DEFAULT_ALIGNMENT)
        if not 1 <= step <= 1 << 20 or step & (step - 1):
            raise self.wrong(f"an alignment of {step} is no power of two")
        room = self.size - (self.file.tell() + step - 1) // step * step
        before = 0
        for name, start, end in sorted(places, key=lambda place: place[1:]):
            if start < before or start % step:
                raise self.wrong(f"the tensor {shown(name)} starts at byte {start:,}, inside another")
            if end > room:
                raise self.wrong(
                    f"the tensor {shown(name)} ends at byte {end:,} of the {max(0, room):,} there"
                )
            before = end

    def check_layers(self, found: GGUFHeader) -> None:
        """Configs make lists as long as the number of layers they are told."""
        layers = found.counts.get(f"{found.architecture}.block_count", 0)
        if not 0 <= layers <= min(MOST_LAYERS, len(found.tensors)):
            raise self.wrong(f"it says {layers:,} layers but holds {len(found.tensors):,} tensors")

    def number(self, width: int, *, signed: bool = False) -> int:
        content = self.file.read(width)
        if len(content) < width:
            raise self.wrong("it ends inside its header")
        return int.from_bytes(content, "little", signed=signed)

    def count(self, what: str, *, least: int) -> int:
        """A number of things of which each takes at least so many bytes."""
        count = self.number(8)
        if count * least > self.size - self.file.tell():
            raise self.wrong(f"it announces {count:,} {what}, more than its {self.size:,} bytes can hold")
        return count

    def text(self, what: str, *, longest: int = LONGEST_NAME) -> str:
        length = self.number(8)
        if length > min(longest, self.size - self.file.tell()):
            raise self.wrong(f"{what} has a text of {length:,} bytes")
        try:
            return self.file.read(length).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.wrong(f"{what} is no text") from error

    def skip(self, length: int, key: str) -> None:
        if length > self.size - self.file.tell():
            raise self.wrong(f"{shown(key)} goes past its end")
        self.file.seek(length, 1)

    def width(self, key: str, kind: int) -> int:
        if kind not in WIDTHS:
            raise self.wrong(f"{shown(key)} has the unknown type {kind}")
        return WIDTHS[kind]

    def wrong(self, what: str) -> TrisectError:
        return TrisectError(f"Cannot read {self.path}, damaged or cut short: {what}; download it again.")


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
TEMPLATES = "additional_chat_templates"
ROPE_FACTORS = "rope_freqs.weight"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
LARGEST_CONFIG = 8 << 20
"""Bytes."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What the weight files hold, from their headers alone."""

    shapes: dict[str, tuple[int, ...]]
    """By the names in the files."""
    elements: int
    size: int
    """Bytes."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a model comes from."""

    path: str
    """A folder, or a hub id."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments for from_pretrained."""
    gguf: bool = False
    local: bool = True
    has_tokenizer: bool = True
    weights: Weights | None = None
    """Known at once for a GGUF file; `check_weights` reads a folder's."""


def resolve(name: str) -> Source:
    """A local folder, a GGUF file, or failing both a hub id."""
    path = Path(name)
    try:
        if path.is_dir():
            return Source(path=name, has_tokenizer=_has_tokenizer(path))
        if path.is_file():
            return _resolve_file(path)
    except OSError as error:
        raise TrisectError(f"Cannot read a model at {shown(name)}: {error.strerror}.") from error
    if path.suffix or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise TrisectError(
            f"There is no model at {name!r}: give a folder, a .gguf file, a hub id such as org/name, "
            "or a built-in name (`trisect ls models`)."
        )
    return Source(path=name, local=False)


def _resolve_file(path: Path) -> Source:
    if path.suffix != ".gguf":
        raise TrisectError(f"{path} is a file; give the folder that holds config.json, or a .gguf file.")
    header = read_gguf_header(path)
    if ROPE_FACTORS in header.tensors:
        raise TrisectError(
            f"{path} carries rotation factors ({ROPE_FACTORS}), which transformers leaves out when it reads "
            "GGUF: the model would run with wrong frequencies. Give the Hugging Face folder instead."
        )
    weights = Weights(shapes=header.tensors, elements=header.elements, size=path.stat().st_size)
    return Source(path=str(path.parent), kwargs={"gguf_file": path.name}, gguf=True, weights=weights)


def read_raw_config(source: Source) -> Any:
    """A local folder's config.json as it stands."""
    folder = _checkpoint_folder(source)
    return read_json(folder / "config.json", largest=LARGEST_CONFIG)


def check_weights(source: Source) -> Weights | None:
    """What a local model's files hold; pickles, missing shards and damaged headers are refused by name."""
    if not source.local or source.gguf:
        return source.weights
    folder = _checkpoint_folder(source)
    if (folder / ADAPTER).exists():
        raise TrisectError(
            f"{folder} holds an adapter ({ADAPTER}), which loads weights from elsewhere; merge it into its "
            "model first (peft's merge_and_unload does), or remove it."
        )
    places = _shards(folder)
    tensors: dict[str, StoredTensor] = {}
    size = 0
    for shard, names in places.items():
        found = _read_shard(folder, shard)
        missing = sorted(names - set(found))
        if missing:
            raise TrisectError(
                f"{folder} is incomplete: {shard.name} has no {missing[0]}, which {INDEX} names."
            )
        tensors |= found
        size += shard.stat().st_size
    return Weights(
        shapes={name: tensor.shape for name, tensor in tensors.items()},
        elements=sum(tensor.elements for tensor in tensors.values()),
        size=size,
    )


def tensor_files(folder: Path) -> dict[str, str]:
    """The file in a folder that holds each tensor; `check_weights` has found them to be whole."""
    return {
        tensor: shard.name
        for shard, names in _shards(folder).items()
        for tensor in (names or read_header(shard)[0])
    }


def _checkpoint_folder(source: Source) -> Path:
    """A local folder that has a config, and no text from elsewhere."""
    folder = Path(source.path)
    if not (folder / "config.json").is_file():
        raise TrisectError(f"{folder} has no config.json; give the folder of a Hugging Face checkpoint.")
    _check_links(folder)
    return folder


def _read_shard(folder: Path, shard: Path) -> dict[str, StoredTensor]:
    if not shard.is_file():
        raise TrisectError(f"{folder} is incomplete: {shard.name} is missing; download it again.")
    found, _ = read_header(shard)
    try:
        # The library that reads the weights has the last word on its format.
        with safe_open(shard, framework="pt") as file:
            file.keys()
    except (OSError, SafetensorError) as error:
        raise TrisectError(f"{shard} is damaged or cut short: {error}; download it again.") from error
    return found


def _shards(folder: Path) -> dict[Path, set[str]]:
    """The weight files that transformers would read, with the tensors that the index expects in each."""
    if (folder / WEIGHTS).is_file():
        return {folder / WEIGHTS: set()}
    if not (folder / INDEX).is_file():
        pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
        if pickles:
            raise TrisectError(
                f"{folder} holds only pickled weights ({pickles[0]}), which can run code when opened. "
                "Convert them to safetensors first (model.save_pretrained does)."
            )
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
            raise TrisectError(
                f"{folder / INDEX} names {shown(name)}, which is no safetensors file; refused."
            )
        shards.setdefault(folder / name, set()).add(tensor)
    return dict(sorted(shards.items()))


def _check_links(folder: Path) -> None:
    """Refuse texts that lie elsewhere: what a config, tokenizer or template says is copied to outputs.

    The hub's cache keeps the files of a snapshot beside it; links to there are its own. Weights may lie on
    another disk, and are only ever read as numbers.
    """
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
            raise TrisectError(
                f"{file} is a link to {target}, outside its folder; put the file itself there."
            )


def _has_tokenizer(folder: Path) -> bool:
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    return any((folder / name).is_file() for name in names)
