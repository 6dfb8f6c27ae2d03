"""The records of a run: checked by pydantic, readable back from YAML or JSON, and the command line's options too."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from trisect.config.goals import GOALS, Increase, Limit, Share, cached_parts, goal_of
from trisect.errors import TrisectError, check_names, option_name, unknown_name
from trisect.records.shapes import COMPONENTS
from trisect.support.checks import read_settings, shown

GOAL, CUT, CALIBRATION, RUNNING = "Goal", "How to cut", "Calibration", "Running"  # panels of the command line's help

T = TypeVar("T")


def option(
    default: Any,
    help: str,
    *,
    panel: str | None = CUT,
    metavar: str | None = None,
    choices: tuple[str, ...] = (),
    typed: Any = None,
    **checks: Any,
) -> Any:
    """A setting: its default, its help, and how it is typed on the command line.

    `choices` are all values there are; `typed` is the option's type where it is not the setting's; `checks` are
    pydantic's (ge, le, ...).
    """
    about = {"panel": panel, "metavar": metavar or "|".join(choices) or None, "choices": choices, "typed": typed}
    chosen = {"default_factory": default} if isinstance(default, type) else {"default": default}
    return Field(description=help, json_schema_extra=about, **chosen, **checks)


calibrating = partial(option, panel=CALIBRATION)
listed = partial(option, metavar="LIST", typed=str)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(Field,))
def record(cls: type[T]) -> type[T]:
    """A frozen dataclass with keyword arguments, whose bad values are refused by name with a TrisectError."""
    made: Any = dataclass(frozen=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid"))(cls)
    init: Callable[..., None] = made.__init__

    def checked_init(self: Any, **given: Any) -> None:
        try:
            init(self, **given)
            for name, about in options_of_record(made).items():
                value = getattr(self, name)
                if about["choices"] and value is not None:
                    check_names(name.replace("_", " "), [str(value)], about["choices"])
        except ValidationError as error:
            raise _refusal(made, error) from None

    made.__init__ = checked_init
    return made


def _refusal(cls: type, error: ValidationError) -> TrisectError:
    """The first problem that pydantic found, as one line."""
    first = error.errors()[0]
    raised = first.get("ctx", {}).get("error")
    if isinstance(raised, TrisectError):
        return raised
    name = str(first["loc"][0]) if first["loc"] else cls.__name__
    if first["type"] == "unexpected_keyword_argument":
        return unknown_name(f"{cls.__name__} setting", name, setting_names(cls))
    if first["type"] == "bool_type":
        return TrisectError(f"{name} is true or false, not {first['input']!r}.")
    return TrisectError(f"{name} must be {first['msg'].removeprefix('Input should be ')}, not {first['input']!r}.")


def options_of_record(cls: type) -> dict[str, Mapping[str, Any]]:
    """Settings by name, with their help, default and how they are typed."""
    declared: Any = cls.__pydantic_fields__  # type: ignore[attr-defined]
    found: dict[str, Mapping[str, Any]] = {}
    for name, entry in declared.items():
        if entry.json_schema_extra:
            about = {"help": entry.description, "annotation": entry.annotation}
            found[name] = {**entry.json_schema_extra, **about, "default": entry.get_default(call_default_factory=True)}
    return found


def setting_names(cls: type) -> list[str]:
    return [entry.name for entry in fields(cls)]


MOST_TOKENS = 1 << 28  # of a calibration set; the paper's has 262,144
MOST_LAYERS = 1000  # of a model whose number of layers is not known yet
ALIGNMENTS = (8, 16, 32)
ALLOCATIONS = ("uniform", "search", "balanced")
ROPE_SCOPES = ("head", "layer", "model")
PLACES = ("auto", "device", "host", "disk")
DEFAULT_ALIGN = 16
NARROWEST = 0.5  # share of a head that a portable model keeps at least: kernels know no narrower ones


def as_mixture(source: Any) -> str:
    """One source or several, as the mixture that they are."""
    several = [source] if isinstance(source, str) else source
    known = isinstance(several, Sequence) and all(isinstance(name, str) and name for name in several)
    if not known or not several:
        raise TrisectError(f"A calibration source is a name, a file or a list, as in [notes.txt, c4], not {source!r}.")
    for name in several if len(several) > 1 else ():
        if "+" in name and Path(name).is_file():
            raise TrisectError(f"{name} cannot be part of a mixture, where + parts texts: rename the file.")
    return "+".join(several)


def parse_layers(text: str, num_layers: int = MOST_LAYERS) -> tuple[int, ...] | None:
    """Layer indices from "4-27", "0,3,5-7" or "all" (None)."""
    if text.strip() == "all":
        return None
    layers: set[int] = set()
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or len(piece) > 12:
            raise TrisectError(f"Cannot read layers {text!r}; write e.g. 4-27, 0,3,5-7 or all.")
        low, high = int(first), int(last or first)
        if high < low:
            raise TrisectError(f"Layers {piece.strip()!r} run backwards; write {high}-{low}.")
        if high >= num_layers:
            raise layer_out_of_range(high, num_layers=num_layers)
        layers.update(range(low, high + 1))
    return tuple(sorted(layers))


def layer_out_of_range(layer: int, *, num_layers: int) -> TrisectError:
    """The error for a layer index that the model does not have."""
    return TrisectError(f"There is no layer {layer}: the model has {num_layers}; try --layers 0-{num_layers - 1}.")


def parse_align(value: Any) -> int | None:
    """The alignment step from 8, "16" or "32", or from None or "none" for exact ranks."""
    text = "none" if value is None else str(value).strip().lower()
    if text not in ("none", *map(str, ALIGNMENTS)):
        raise TrisectError(f"Cannot align widths to {value!r}; use --align 8, 16, 32, or none for exact ranks.")
    return None if text == "none" else int(text)


def parse_parts(value: Any) -> tuple[str, ...]:
    """Components from a list as it is, or from "mlp,qk" in the order of a layer."""
    if isinstance(value, str):
        return tuple(component for component in COMPONENTS if component in parse_parts(value.split(",")))
    if not value or not isinstance(value, tuple | list):
        raise TrisectError("No parts were named; use --parts qk,ov,mlp or some of the three.")
    parts = tuple(part.strip() if isinstance(part, str) else part for part in value)
    check_names("part", map(str, parts), COMPONENTS, "Use e.g. --parts qk,ov,mlp.")
    if len(set(parts)) != len(parts):
        raise TrisectError(f"A part is named twice in {','.join(parts)}; name each one once.")
    return parts


def parse_names(value: Any) -> tuple[str, ...]:
    """Names from a list, or from "fold,values"."""
    if isinstance(value, str):
        value = [piece.strip() for piece in value.split(",") if piece.strip()]
    if not isinstance(value, tuple | list) or not all(isinstance(name, str) for name in value):
        raise TrisectError(f"Give a list of names such as fold,values, not {value!r}.")
    return tuple(value)


Parts = Annotated[tuple[str, ...], BeforeValidator(parse_parts)]
Names = Annotated[tuple[str, ...], BeforeValidator(parse_names)]


def _layers(value: Any) -> Any:
    value = parse_layers(value) if isinstance(value, str) else value
    if value is not None and (not value or not isinstance(value, tuple | list)):
        raise TrisectError("No layers were named; write e.g. --layers 4-27, or leave it out for all.")
    return None if value is None else tuple(value)


@record
class CalibrationConfig:
    """Which tokens the moments are collected on. None: as the model, the device and the machine suggest."""

    source: Annotated[str | None, BeforeValidator(lambda s: None if s is None else as_mixture(s))] = calibrating(
        None,
        "Text: `trisect ls data`, or a file; several are mixed, also a:0.7+b:0.3. (default: a mixture from the hub)",
        metavar="NAME|FILE",
        typed=list[str],
    )
    samples: int | None = calibrating(None, "Windows. (default: 256; on a CPU fewer, the larger the model)", ge=1)
    length: int | None = calibrating(None, "Tokens per window. (default: 2048, or the model's context)", ge=2)
    sampling: str = calibrating("random", "Which windows are taken.", choices=("random", "first"))
    seed: int = calibrating(0, "Seed of the random windows.", ge=0)
    batch_size: int | None = option(None, "Windows per forward pass; chosen for you by default.", panel=RUNNING, ge=1)
    states: str = option("auto", "Where hidden states are kept.", panel=RUNNING, choices=PLACES)

    def __post_init__(self) -> None:
        if (self.samples or 1) * (self.length or 1) > MOST_TOKENS:
            raise TrisectError(f"{self.samples} windows of {self.length} are over {MOST_TOKENS:,} tokens.")

    @property
    def how_to_run(self) -> dict[str, Any]:
        """In which batches windows are run and where their hidden states lie; no result depends on it."""
        return {"batch_size": self.batch_size, "place": self.states}

    @classmethod
    def read(cls, value: Any) -> "CalibrationConfig":
        """A record as it is, a mapping of its fields, or a source or a list of them by themselves."""
        if isinstance(value, CalibrationConfig):
            return value
        given: Any = value if isinstance(value, Mapping) else {"source": as_mixture(value)}
        return cls(**{str(name): entry for name, entry in given.items()})


@record
class CompressConfig:
    """Everything that decides what `compress` does to a model.

    The goal is given as one of `ratio`, `kv_ratio`, `target_params`, `target_kv_bytes` and
    `max_ppl_increase`, with `budget` where that is not parameters (`trisect.config.goals`).
    """

    goal: Share | Limit | Increase
    latency_table: str | None = option(None, "Measured times, for --budget latency.", panel=GOAL, metavar="FILE")
    floor: float = option(0.0, "Share that every width keeps, e.g. 0.25.", panel=GOAL, metavar="SHARE", ge=0, le=1)
    method: str = option("a3+", "See `trisect ls methods`.", metavar="NAME", min_length=1)
    parts: Parts = listed(COMPONENTS, "What to narrow. (default: qk,ov,mlp)")
    layers: Annotated[tuple[Annotated[int, Field(ge=0)], ...] | None, BeforeValidator(_layers)] = listed(
        None, "E.g. 4-27 or 0,3,5-7. (default: all)"
    )
    align: Annotated[int | None, BeforeValidator(parse_align)] = option(
        DEFAULT_ALIGN, "Head widths in multiples; none = exact.", metavar="32|16|8|none", typed=str
    )
    allocate: str | None = option(None, "How widths are spread. (default: the method's)", choices=ALLOCATIONS)
    drop_experts: bool = option(False, "Drop whole experts where that costs less than narrowing all of them.")
    drop_layers: int = option(0, "Drop so many layers first; a ratio counts what is left.", metavar="N", ge=0)
    calibration: Annotated[CalibrationConfig, BeforeValidator(CalibrationConfig.read)] = option(CalibrationConfig, "")
    qk_norm_tolerance: float = option(0.1, "How far a QK-norm may be off; beyond it QK stays whole.", ge=0)
    rope_scope: str = option("head", "Who shares one set of RoPE frequencies, in a3+.", choices=ROPE_SCOPES)
    without: Names = listed((), "Pieces of a3+ to leave out, e.g. fold,values: `trisect ls pieces`.")
    refine: bool = option(False, "Refit query, key and value maps, too: slower, more accurate.")
    portable: bool = option(False, "Fit for `trisect export`: --rope-scope model, one head width, one MLP width.")
    seed: int = calibrating(0, "Seed of the random windows.", ge=0)

    if TYPE_CHECKING:

        def __init__(self, **settings: Any) -> None: ...

    @model_validator(mode="before")
    @classmethod
    def _settle(cls, given: ArgsKwargs) -> ArgsKwargs:
        """One goal from its five spellings, and the settings that follow from others."""
        values = dict(given.kwargs or {})
        goals = {name: values.pop(name, None) for name in GOALS}
        budget = values.pop("budget", "params")
        if "goal" not in values or any(value is not None for value in goals.values()):
            drops = values.get("drop_layers", 0) != 0
            values["goal"] = goal_of(goals, budget=budget, optional=drops)  # also a new one, in dataclasses.replace
        if values.get("portable") is True:
            settings = options_of_record(cls)  # what has its default value counts as not given
            plain = [name for name in values if name in settings and values[name] == settings[name]["default"]]
            values = _with_preset({name: value for name, value in values.items() if name not in plain})
        if values["goal"].budget == "kv":
            # What holds no cache is not touched for the cache's sake.
            values["parts"] = cached_parts(parse_parts(values.get("parts", COMPONENTS)))
        return ArgsKwargs((), values)

    def __post_init__(self) -> None:
        if (self.goal.budget == "latency") != (self.latency_table is not None):
            both = "--budget latency --latency-table FILE (`trisect bench --latency-table FILE` measures one)"
            raise TrisectError(f"A latency budget and a table of measured times belong together: give {both}.")
        if not self.drop_layers:
            if self.removes_nothing:
                raise TrisectError("A ratio of 0 leaves the model as it is; give --ratio 0.25, or --drop-layers.")
        elif isinstance(self.goal, Increase):
            raise TrisectError("--drop-layers says how much goes, --max-ppl-increase how much may be lost; keep one.")
        elif self.layers is not None:
            raise TrisectError("--layers numbers layers, and --drop-layers numbers them anew; leave one of them out.")

    @property
    def ratio(self) -> float | None:
        """The share to remove, where that is the goal."""
        return self.goal.removed if isinstance(self.goal, Share) else None

    @property
    def removes_nothing(self) -> bool:
        """Whether all widths stay: layers are dropped, and that is all."""
        return isinstance(self.goal, Share) and self.goal.removed == 0

    def floor_of(self, part: str) -> float:
        """The share of its width that a part keeps at least."""
        return max(self.floor, NARROWEST) if self.portable and part != "mlp" else self.floor

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings, ready for JSON or YAML; the goal by its own name."""
        data = {**dict.fromkeys(GOALS), **self.goal.settings(), **asdict(self)}
        del data["goal"]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in data.items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "CompressConfig":
        """The inverse of `to_dict`; also takes the command line's spellings, e.g. layers "4-27"."""
        check_names("configuration key", map(str, data), [*GOALS, "budget", *setting_names(cls)])
        return cls(**(_with_preset(data) if data.get("portable") is True else data))


PRESET = {"method": "a3+", "rope_scope": "model", "allocate": "uniform", "layers": None, "drop_experts": False}
"""What --portable means, besides a head width that kernels know."""
_MEANS = {"layers": "every layer", "drop_experts": "every expert"}
STEPS = (16, 32)  # head steps that kernels know; 32 also suits quantised KV caches, and its MLP step of 256 K-quants


def _with_preset(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a portable run; others may be added to the preset, not contradict it."""
    given = {**given, "layers": _layers(given.get("layers")), "align": parse_align(given.get("align", STEPS[0]))}
    for name, value in PRESET.items():
        if given.get(name, value) != value:
            raise _contradiction(name, given[name], _MEANS.get(name, f"{option_name(name)} {value}"))
    if given["align"] not in STEPS:
        raise _contradiction("align", given["align"] or "none", "--align 16 or 32")
    parts = parse_parts(given.get("parts", COMPONENTS))
    if ("qk" in parts) != ("ov" in parts):
        raise _contradiction("parts", ",".join(parts), "qk and ov together: stock heads have one width")
    return {**given, **PRESET}


def _contradiction(name: str, value: Any, means: str) -> TrisectError:
    other = f"{option_name(name)} {value} was given"
    return TrisectError(f"--portable means {means}, and {other}; leave one of the two out.")


def read_mapping(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file, not yet checked against any record; none where all lines are comments."""
    data = read_settings(path)
    data = {} if data is None else data
    if not isinstance(data, dict):
        raise TrisectError(f"{path} must hold a mapping such as `ratio: 0.25`, not {shown(data)}.")
    return data
