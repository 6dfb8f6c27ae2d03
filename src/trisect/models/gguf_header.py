"""The header of a GGUF file, checked against its length before any library follows what it says.

Readers loop as often as the header's counts tell them to, so a count is believed only if the file could hold
that much.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from trisect.errors import TrisectError
from trisect.untrusted import shown

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
