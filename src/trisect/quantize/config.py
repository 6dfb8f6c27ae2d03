"""What a quantisation is asked to do, checked before a model is loaded."""

from dataclasses import asdict, dataclass
from typing import Any

from trisect.errors import TrisectError, unknown_name
from trisect.models.quantized import BITS
from trisect.parts import COMPONENTS

BACKENDS = ("hqq", "torchao")
AUTO_SIZES = (128, 64, 32, 16, 8)
"""Group sizes that `auto` tries for a layer, in this order."""


@dataclass(frozen=True, kw_only=True)
class QuantizeConfig:
    """Which weights are held in how many bits, and by whose rule."""

    bits: int = 4
    group_size: int | None = None
    """None: for every layer the largest of AUTO_SIZES that divides its inputs (torchao: whole rows)."""
    backend: str = "hqq"
    parts: tuple[str, ...] = COMPONENTS
    lm_head: bool = False

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise unknown_name("backend", self.backend, BACKENDS)
        if self.bits not in BITS:
            raise TrisectError(
                f"Cannot quantise to {self.bits} bits; use one of {', '.join(map(str, BITS))}."
            )
        for part in self.parts:
            if part not in COMPONENTS:
                raise unknown_name("part", part, COMPONENTS)
        if not self.parts:
            raise TrisectError(f"No part was named to quantise; use some of {','.join(COMPONENTS)}.")
        if self.backend == "torchao" and (self.bits != 8 or self.group_size is not None):
            raise TrisectError(
                "torchao quantises to 8 bits with one scale per output here; type --backend torchao --bits 8 "
                "without --group-size, or --backend hqq."
            )
        if self.group_size is not None and (self.group_size < 8 or self.group_size % 8):
            raise TrisectError(
                f"A group size must be a multiple of 8, got {self.group_size}; try 64, or auto."
            )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse_group_size(text: str) -> int | None:
    """`auto` or a number."""
    if text == "auto":
        return None
    if not text.isascii() or not text.isdigit():
        raise TrisectError(f"A group size is a number such as 64, or auto; got {text!r}.")
    return int(text)
