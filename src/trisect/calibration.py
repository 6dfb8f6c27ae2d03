"""Which tokens a run calibrates on, as the user said it; `trisect.texts` settles what is left open."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trisect.errors import TrisectError, unknown_name
from trisect.untrusted import check_integer, refuse_unknown_keys

SAMPLINGS = ("random", "first")
STATES = ("auto", "device", "host", "disk")
MOST_TOKENS = 1 << 28
"""Of a calibration set; the paper's has 262,144."""


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """Which tokens the moments are collected on. None: as the model, the device and the machine suggest."""

    source: str | None = None
    """A name (`trisect ls data`), a text file, or a mixture, a:0.5+b:0.5; a list becomes a mixture."""
    samples: int | None = None
    """Windows."""
    length: int | None = None
    """Tokens of each window."""
    sampling: str = "random"
    """"random" windows, as in the paper, or consecutive ones from the "first" token on."""
    seed: int = 0
    batch_size: int | None = None
    """Windows per forward pass; None lets the calibration choose."""
    states: str = "auto"
    """Where hidden states of all windows are kept: on the device, in main memory ("host"), on disk."""

    def __post_init__(self) -> None:
        if self.source is not None:
            object.__setattr__(self, "source", as_mixture(self.source))
        for name, minimum in {"samples": 1, "length": 2, "batch_size": 1}.items():
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), minimum=minimum)
        if (self.samples or 1) * (self.length or 1) > MOST_TOKENS:
            raise TrisectError(f"{self.samples} windows of {self.length} are over {MOST_TOKENS:,} tokens.")
        check_integer("seed", self.seed, minimum=0)
        if self.sampling not in SAMPLINGS:
            raise unknown_name("sampling", str(self.sampling), SAMPLINGS)
        if self.states not in STATES:
            raise unknown_name("place for hidden states", str(self.states), STATES)

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, ready for JSON or YAML."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "CalibrationConfig":
        """The inverse of `to_dict`; keys that are left out have their default."""
        refuse_unknown_keys(data, cls, where="calibration")
        return cls(**data)

    @classmethod
    def read(cls, value: Any) -> "CalibrationConfig":
        """A record as it is, a mapping of its fields, or a source or a list of them by themselves."""
        if isinstance(value, CalibrationConfig):
            return value
        return cls.from_dict(value) if isinstance(value, Mapping) else cls(source=as_mixture(value))


def as_mixture(source: Any) -> str:
    """One source or several, as the mixture that they are."""
    several = [source] if isinstance(source, str) else source
    known = isinstance(several, Sequence) and all(isinstance(name, str) and name for name in several)
    if not known or not several:
        raise TrisectError(
            f"The calibration source must be a name, a file or a list of them, not {source!r}; "
            "try notes.txt or [notes.txt, c4]."
        )
    for name in several if len(several) > 1 else ():
        if "+" in name and Path(name).is_file():
            raise TrisectError(f"{name} cannot be part of a mixture, where + parts texts: rename the file.")
    return "+".join(several)
