"""The header of a safetensors file, checked against the file's length: what is damaged is named by tensor."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trisect.errors import TrisectError
from trisect.untrusted import parse_json, shown

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
