"""Where a model's files are, checked before anything is loaded from them (docs/security.md)."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from trisect.errors import TrisectError
from trisect.models.gguf_header import read_gguf_header
from trisect.models.safetensors_header import StoredTensor, read_header
from trisect.untrusted import read_json, shown

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
