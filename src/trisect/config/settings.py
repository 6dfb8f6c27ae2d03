"""The records of a run: what a user chose, checked once, and readable back from YAML or JSON."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from trisect.config.goals import (
    GOALS,
    Floors,
    Goal,
    cached_parts,
    check_latency_table,
    goal_of,
    parse_bytes,
    parse_count,
    read_floors,
)
from trisect.config.goals import Increase as Increase
from trisect.config.goals import Limit as Limit
from trisect.config.goals import Share as Share
from trisect.errors import TrisectError, option_name, unknown_name
from trisect.records.shapes import COMPONENTS
from trisect.support.checks import check_integer, is_number, read_settings, refuse_unknown_keys

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


FIXED = {"method": "a3+", "rope_scope": "model", "allocate": "uniform", "layers": None}
STEPS = (16, 32)
"""Head steps that kernels know; 32 also suits quantised KV caches, and its MLP step of 256 K-quants."""
NARROWEST = 0.5


def portable_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a portable run; what was `given` may add to the preset, not contradict it."""
    for name, value in FIXED.items():
        if given.get(name, value) != value:
            raise _contradiction(
                name, given[name], f"{option_name(name)} {value}" if value else "every layer"
            )
    if given.get("align", STEPS[0]) not in STEPS:
        raise _contradiction("align", given["align"] or "none", "--align 16 or 32")
    parts = given.get("parts", COMPONENTS)
    if ("qk" in parts) != ("ov" in parts):
        raise _contradiction("parts", ",".join(parts), "qk and ov together: stock heads have one width")
    floor = read_floors(given.get("floor"))
    floor = replace(floor, qk=max(floor.qk, NARROWEST), ov=max(floor.ov, NARROWEST))
    return {**given, **FIXED, "align": given.get("align", STEPS[0]), "floor": floor}


def _contradiction(name: str, value: Any, means: str) -> TrisectError:
    return TrisectError(
        f"--portable means {means}, and {option_name(name)} {value} was given; leave one of the two out."
    )


ALIGNMENTS = (8, 16, 32)
ALLOCATIONS = ("uniform", "search", "balanced")
ROPE_SCOPES = ("head", "layer", "model")
DEFAULT_ALIGN = 16
MOST_LAYERS = 1000
"""Of a model whose number of layers is not known yet."""


@dataclass(frozen=True, kw_only=True)
class CompressConfig:
    """Everything that decides what `compress` does to a model."""

    ratio: float | None = None
    """Fraction of the chosen parts' `budget` to remove: by default, of the decoder layers' linear weights."""
    kv_ratio: float | None = None
    """Fraction of the KV cache to remove, from attention alone."""
    target_params: int | None = None
    """The most parameters the whole model may have, embeddings included."""
    target_kv_bytes: int | None = None
    """The most bytes of KV cache per token."""
    max_ppl_increase: str | float | None = None
    """The most that perplexity may rise on calibration windows held out: "5%", or 1.5 for that much of it."""
    budget: str = "params"
    """What `ratio` is a fraction of, and what `max_ppl_increase` makes as small as it can."""
    latency_table: str | None = None
    """A file of measured seconds, for `budget` latency."""
    floor: Floors = field(default_factory=Floors)
    """The share of its width that each component keeps at least."""
    method: str = "a3+"
    parts: tuple[str, ...] = COMPONENTS
    layers: tuple[int, ...] | None = None
    """Layer indices to compress; None means all of them."""
    align: int | None = DEFAULT_ALIGN
    """Head widths become multiples of this; None gives the paper's exact ranks."""
    allocate: str | None = None
    """How widths are spread: "uniform", by loss curves per layer ("search") or per component ("balanced");
    None means as the method does by default."""
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    qk_norm_tolerance: float = 0.1
    """QK-norm layers whose corrected denominator misses by more than this keep their QK whole."""
    rope_scope: str = "head"
    """Who shares one set of rotation frequencies: the query heads of a key head, a layer, or the model."""
    without: tuple[str, ...] = ()
    """Pieces of a3+ to leave out, to see what each brings."""
    portable: bool = False
    """Whether the result must fit stock architectures without padding: a preset for the settings above."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.portable, bool):
            raise TrisectError(f"portable is true or false, not {self.portable!r}.")
        if self.portable:
            self._be_portable()
        goal = self.goal
        check_latency_table(goal.budget, self.latency_table)
        if not isinstance(self.method, str) or not self.method:
            raise TrisectError(f"The method must be a name (`trisect ls methods`), not {self.method!r}.")
        _check_parts(self.parts)
        _check_layers(self.layers)
        if self.align is not None and self.align not in ALIGNMENTS:
            raise TrisectError(
                f"Cannot align widths to {self.align!r}; use 8, 16, 32, or none for exact ranks."
            )
        if not is_number(self.qk_norm_tolerance) or self.qk_norm_tolerance < 0:
            raise TrisectError(
                f"qk_norm_tolerance must be 0 or more, not {self.qk_norm_tolerance!r}; try 0.1."
            )
        if self.rope_scope not in ROPE_SCOPES:
            raise unknown_name("rope scope", str(self.rope_scope), ROPE_SCOPES)
        if not isinstance(self.without, tuple) or not all(isinstance(name, str) for name in self.without):
            raise TrisectError(f"without must be a list of names such as fold,values, not {self.without!r}.")
        check_integer("seed", self.seed, minimum=0)
        if self.allocate is not None and self.allocate not in ALLOCATIONS:
            raise unknown_name("allocation", str(self.allocate), ALLOCATIONS)
        if not isinstance(self.floor, Floors):
            raise TrisectError(f"floor must be a Floors record, not {self.floor!r}; try Floors(mlp=0.25).")
        if goal.budget == "kv":
            # What holds no cache is not touched for the cache's sake.
            object.__setattr__(self, "parts", cached_parts(self.parts))

    def _be_portable(self) -> None:
        """The preset's settings; those that have their default value count as not given."""
        plain = {entry.name: entry.default for entry in fields(self)}
        given = {name: value for name, value in vars(self).items() if value != plain[name]}
        for name, value in portable_settings(given).items():
            object.__setattr__(self, name, value)

    @property
    def goal(self) -> Goal:
        """How far to go: the one goal that was given."""
        return goal_of({name: getattr(self, name) for name in GOALS}, budget=self.budget)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings, ready for JSON or YAML."""
        data = asdict(self)
        data["parts"] = list(self.parts)
        data["without"] = list(self.without)
        data["layers"] = None if self.layers is None else list(self.layers)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "CompressConfig":
        """The inverse of `to_dict`; also takes the command line's spellings, e.g. layers "4-27"."""
        refuse_unknown_keys(data, cls, where="configuration")
        values = dict(data)
        readers: dict[str, Callable[[str], Any]] = {
            "parts": parse_parts,
            "without": parse_names,
            "layers": parse_layers,
            "align": parse_align,
            "target_params": parse_count,
            "target_kv_bytes": parse_bytes,
        }
        for name, read in readers.items():
            if isinstance(values.get(name), str):
                values[name] = read(values[name])
            elif isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        values["floor"] = read_floors(values.get("floor"))
        if values.get("portable"):
            values = portable_settings(values)
        if "calibration" in values:
            values["calibration"] = CalibrationConfig.read(values["calibration"])
        return cls(**values)


def read_mapping(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file, not yet checked against any record."""
    data = read_settings(path)
    if not isinstance(data, dict):
        raise TrisectError(f"{path} must hold a mapping such as `ratio: 0.25`, not {type(data).__name__}.")
    return data


def load_config(path: str | Path) -> CompressConfig:
    """A CompressConfig from a YAML or JSON file."""
    return CompressConfig.from_dict(read_mapping(path))


def parse_layers(text: str, num_layers: int | None = None) -> tuple[int, ...] | None:
    """Layer indices from "4-27", "0,3,5-7" or "all" (None). `num_layers`, if known, bounds them."""
    if text.strip() == "all":
        return None
    layers: set[int] = set()
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(piece) > 12:
            raise TrisectError(f"Cannot read layers {text!r}; write e.g. 4-27, 0,3,5-7 or all.")
        low, high = int(first), int(last or first)
        if num_layers is None and high >= MOST_LAYERS:
            raise layer_out_of_range(high, num_layers=MOST_LAYERS)
        if high < low:
            raise TrisectError(f"Layers {piece.strip()!r} run backwards; write {high}-{low}.")
        if num_layers is not None and high >= num_layers:
            raise layer_out_of_range(high, num_layers=num_layers)
        layers.update(range(low, high + 1))
    return tuple(sorted(layers))


def layer_out_of_range(layer: int, *, num_layers: int) -> TrisectError:
    """The error for a layer index that the model does not have."""
    return TrisectError(
        f"There is no layer {layer}: the model has {num_layers}, numbered 0 to {num_layers - 1}; "
        f"try --layers 0-{num_layers - 1}."
    )


def parse_align(text: str) -> int | None:
    """The alignment step from "8", "16", "32", or "none" for exact ranks."""
    if text.strip().lower() == "none":
        return None
    if text.strip() in map(str, ALIGNMENTS):
        return int(text)
    raise TrisectError(f"Cannot align widths to {text!r}; use --align 8, 16, 32 or none.")


def parse_names(text: str) -> tuple[str, ...]:
    """Names from "fold,values"; nothing from an empty text."""
    return tuple(piece.strip() for piece in text.split(",") if piece.strip())


def parse_parts(text: str) -> tuple[str, ...]:
    """Components from "qk,ov,mlp" or any part of that list, in the order of a layer."""
    names = [piece.strip() for piece in text.split(",")]
    _check_parts(tuple(names))
    return tuple(component for component in COMPONENTS if component in names)


def _check_parts(parts: tuple[str, ...]) -> None:
    if not parts or not isinstance(parts, tuple):
        raise TrisectError("No parts were named; use --parts qk,ov,mlp or some of the three.")
    for part in parts:
        if part not in COMPONENTS:
            raise unknown_name("part", str(part), COMPONENTS, "Use e.g. --parts qk,ov,mlp.")
    if len(set(parts)) != len(parts):
        raise TrisectError(f"A part is named twice in {','.join(parts)}; name each one once.")


def _check_layers(layers: tuple[int, ...] | None) -> None:
    if layers is None:
        return
    if not layers or not isinstance(layers, tuple):
        raise TrisectError("No layers were named; write e.g. --layers 4-27, or leave it out for all.")
    for layer in layers:
        check_integer("A layer index", layer, minimum=0)
