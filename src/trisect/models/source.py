"""Where a model's files are, checked before anything is loaded from them."""

import json
from dataclasses import dataclass, field
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from trisect.errors import TrisectError

INDEX = "model.safetensors.index.json"
ROPE_FACTORS = b"rope_freqs.weight"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, kw_only=True)
class Source:
    path: str
    """A folder, or a hub id."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments for from_pretrained."""
    gguf: bool = False
    local: bool = True
    has_tokenizer: bool = True


def resolve(name: str) -> Source:
    """A local folder, a GGUF file, or failing both a hub id."""
    path = Path(name)
    if path.is_dir():
        return Source(path=name, has_tokenizer=_has_tokenizer(path))
    if path.is_file():
        return _resolve_file(path)
    if path.suffix or name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise TrisectError(
            f"There is no model at {name!r}: give a folder, a .gguf file, a hub id such as org/name, "
            "or a built-in name (`trisect ls models`)."
        )
    return Source(path=name, local=False)


def _resolve_file(path: Path) -> Source:
    if path.suffix != ".gguf":
        raise TrisectError(f"{path} is a file; give the folder that holds config.json, or a .gguf file.")
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise TrisectError(f"{path} does not start as a GGUF file; it is damaged or something else.")
        with mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            if content.find(ROPE_FACTORS) >= 0:
                raise TrisectError(
                    f"{path} carries rotation factors ({ROPE_FACTORS.decode()}), which transformers leaves "
                    "out when it reads GGUF: the model would run with wrong frequencies. Give the Hugging "
                    "Face folder instead."
                )
    return Source(path=str(path.parent), kwargs={"gguf_file": path.name}, gguf=True)


def check_weights(source: Source) -> None:
    """Refuse pickles, missing shards and damaged headers by name."""
    if not source.local or source.gguf:
        return
    folder = Path(source.path)
    if not (folder / "config.json").is_file():
        raise TrisectError(f"{folder} has no config.json; give the folder of a Hugging Face checkpoint.")
    shards = _shards(folder)
    if not shards:
        pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
        if pickles:
            raise TrisectError(
                f"{folder} holds only pickled weights ({pickles[0]}), which can run code when opened. "
                "Convert them to safetensors first (model.save_pretrained does)."
            )
        raise TrisectError(f"{folder} has no model.safetensors and no {INDEX}; the weights are missing.")
    for shard in shards:
        if not shard.is_file():
            raise TrisectError(f"{folder} is incomplete: {shard.name} is missing; download it again.")
        try:
            with safe_open(shard, framework="pt") as file:
                file.keys()
        except (OSError, SafetensorError) as error:
            raise TrisectError(f"{shard} is damaged or cut short: {error}; download it again.") from error


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.is_file():
        return [file for file in [folder / "model.safetensors"] if file.is_file()]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise TrisectError(f"{index} is not a weight index: {error!r}.") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise TrisectError(f"{index} points outside its folder ({name!r}); refused.")
    return [folder / name for name in sorted(names)]


def _has_tokenizer(folder: Path) -> bool:
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    return any((folder / name).is_file() for name in names)
