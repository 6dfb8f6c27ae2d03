"""A recipe of models, methods, ratios and calibration sets, checked on reading, and the cells it names."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from trisect.config import CalibrationConfig, CompressConfig, goals, read_mapping
from trisect.config.settings import as_mixture, setting_names
from trisect.errors import TrisectError, check_names
from trisect.methods import get_method
from trisect.support.checks import shown, validated

FORMAT = 1  # part of every cell's key: raise it to retire all receipts
CALIBRATION = {"samples": 128, "length": 2048}
"""Fixed here: a table's cells must not depend on the machine that they are run on."""
ASSETS = re.compile(r"\$\{(\w+):-([^{}]+)\}")

CELL_KEYS = ("method", "calibration", *goals.GOALS)
SETTINGS = tuple(key for key in CompressConfig(ratio=0.5).to_dict() if key not in CELL_KEYS)
"""What a recipe may set for all methods, and each method for itself. The goal is always a ratio."""
ALWAYS_IN_KEY = {"ratio", "method", "parts", "layers", "align", "allocate", "qk_norm_tolerance"}
ALWAYS_IN_KEY |= {"calibration", "seed"}
"""Other settings are in a cell's key only where they differ from their default: a new one changes no key."""

Item = TypeVar("Item")


def load_recipe(path: str | Path) -> "Recipe":
    """The recipe in a YAML or JSON file; every mistake is refused with its place before any work."""
    return validated(Recipe, read_mapping(path), where=str(path), hint="docs/comparison.md describes all keys")


def _each_once(entries: list[Any], what: str = "name") -> list[Any]:
    """The entries as they are, no two of which have the same name, or label."""
    values = [getattr(entry, what, entry) for entry in entries]
    for value in values:
        if values.count(value) > 1:
            raise TrisectError(f"two entries have the {what} {value!r}; give each its own {what}.")
    return entries


def _folder_name(name: str) -> str:
    if Path(name).name != name or name.startswith("."):
        raise TrisectError(f"{name!r} must be the name of a folder; leave slashes and leading dots out.")
    return name


def _assets(text: Any) -> tuple[str, str]:
    match = ASSETS.fullmatch(str(text))
    if match is None:
        raise TrisectError(f"write ${{VARIABLE:-FOLDER}} such as ${{MY_DATA:-data}}, not {shown(text)}.")
    return match[2].rstrip("/"), (os.environ.get(match[1]) or match[2]).rstrip("/")


def _joined(names: Any) -> Any:
    return ",".join(map(str, names)) if isinstance(names, list) else names


AsList = BeforeValidator(lambda value: value if isinstance(value, list) else [value])
Text = Annotated[str, Field(min_length=1)]
Line = Annotated[str, AfterValidator(lambda text: " ".join(text.split()))]
Several = Annotated[list[Item], Field(min_length=1), AfterValidator(_each_once)]


class RecipeEntry(BaseModel):
    """A mapping in a recipe: unknown keys are refused by name, and values are not converted."""

    model_config = ConfigDict(strict=True, extra="allow")
    short: ClassVar[str] = ""  # the key that a value by itself stands for
    settings: ClassVar[tuple[str, ...]] = ()  # keys besides the fields, found in `model_extra`

    @model_validator(mode="before")
    @classmethod
    def _keys(cls, data: Any) -> Any:
        if cls.short and isinstance(data, str | list):
            data = {cls.short: data}
        known = [*(field.alias or name for name, field in cls.model_fields.items()), *cls.settings]
        if not isinstance(data, Mapping):
            raise TrisectError(f"a mapping with some of {', '.join(known)} is needed, not {shown(data)}.")
        check_names("key", map(str, data), known)
        return data


class CalibrationEntry(RecipeEntry):
    """A named set of calibration tokens."""

    settings = tuple(setting_names(CalibrationConfig))

    source: Annotated[Text, BeforeValidator(as_mixture)]
    name: Text = Field(default_factory=lambda given: given["source"])

    @cached_property
    def config(self) -> CalibrationConfig:
        """All settings of this set."""
        return CalibrationConfig(**{**CALIBRATION, **(self.model_extra or {}), "source": self.source})

    @model_validator(mode="after")
    def _possible(self) -> Self:
        self.config  # noqa: B018, refused now or never
        return self


class EvaluationEntry(RecipeEntry):
    """A text that every cell is measured on: its first windows, without overlap."""

    data: Text
    name: Text = Field(default_factory=lambda given: given["data"])
    length: int = Field(2048, ge=2)
    windows: int | None = Field(None, ge=1)  # None means all there are


class TaskEntry(RecipeEntry):
    """Downstream tasks that every cell is measured on."""

    short = "names"

    names: Annotated[Text, BeforeValidator(_joined)]
    """As `trisect eval --tasks` takes them: names with commas, or a preset."""
    limit: int | None = Field(None, ge=1)  # questions per task
    shots: int | None = Field(None, ge=0)  # examples in the prompt of tasks that do not state their own number

    @model_validator(mode="after")
    def _known(self) -> Self:
        from trisect.evaluate.tasks import parse_tasks

        parse_tasks(self.names, shots=self.shots)
        return self


class ModelEntry(RecipeEntry):
    """A model, the texts it is calibrated on, and those it is measured on."""

    source: Text
    name: Text = Field(default_factory=lambda given: given["source"])
    dtype: str | None = None
    note: Line = ""  # what to say beside every number taken on this model
    calibrations: Annotated[Several[CalibrationEntry], AsList] = Field(alias="calibration")
    evaluations: Several[EvaluationEntry] = Field(alias="evaluation")


class MethodEntry(RecipeEntry):
    """A method with its settings, the ratios it is asked for, and the models it is tried on."""

    settings = SETTINGS  # the recipe's defaults among them

    name: Text
    label: Text
    ratios: Annotated[Several[float], AsList]
    models: Annotated[list[Text], AsList] | None = None  # names of the models it is tried on; None means all

    def config(self, *, ratio: float, calibration: CalibrationConfig) -> CompressConfig:
        """The configuration of one cell."""
        cell = {"method": self.name, "ratio": ratio, "calibration": calibration}
        return CompressConfig.from_dict((self.model_extra or {}) | cell)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        """Refuse now what would make every cell of this method fail."""
        method = get_method(self.name)
        if method.ratio is not None and set(self.ratios) != {method.ratio}:
            only = f"{method.ratio:g}"
            raise TrisectError(f"{method.name} removes {only} and nothing else; give it ratios: [{only}].")
        for ratio in self.ratios:
            config = self.config(ratio=ratio, calibration=CalibrationConfig())
        missing = [part for part in config.parts if part not in method.parts]
        if missing:
            instead = f"give it parts: [{', '.join(method.parts)}] or some of them"
            raise TrisectError(f"{method.name} does not change {','.join(missing)}; {instead}.")
        return self


class Recipe(RecipeEntry):
    """Everything that a comparison runs and shows."""

    settings = (*SETTINGS, "ratios", "calibration", "evaluation")  # of entries that do not say it themselves

    name: Annotated[Text, AfterValidator(_folder_name)]
    title: Line = Field(default_factory=lambda given: given["name"])
    note: Line = ""
    models: Several[ModelEntry]
    methods: list[MethodEntry] = Field(min_length=1)
    tasks: TaskEntry | None = None
    kv: bool = False  # show KV bytes per token
    assets: Annotated[tuple[str, str] | None, BeforeValidator(_assets)] = None
    """From ${VARIABLE:-FOLDER}: the folder that names begin with, and where it is on this machine."""

    @model_validator(mode="before")
    @classmethod
    def _pass_down(cls, data: Any) -> Any:
        """Give models and methods what the recipe says for all of them."""
        if not isinstance(data, Mapping):
            return data
        texts = {key: data[key] for key in ("calibration", "evaluation") if key in data}
        settings = {key: data[key] for key in ("ratios", *SETTINGS) if key in data}
        models = [texts | entry for entry in _mappings(data, "models", "source")]
        methods = [settings | {"label": _default_label(entry)} | entry for entry in _mappings(data, "methods", "name")]
        return {**data, **({"models": models} if models else {}), **({"methods": methods} if methods else {})}

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        models = [model.name for model in self.models]
        for number, method in enumerate(self.methods):
            check_names(f"model in methods[{number}]", method.models or (), models)
        for model in self.models:
            _each_once(self.methods_of(model), "label")
        return self

    def methods_of(self, model: ModelEntry) -> list[MethodEntry]:
        """The methods that are tried on a model."""
        return [method for method in self.methods if method.models is None or model.name in method.models]

    def located(self, name: str) -> str:
        """A source, or a mixture of them, as this machine has it; keys and receipts keep the name."""
        written, place = self.assets or ("", "")
        return name.replace(f"{written}/", f"{place}/")


def _mappings(data: Mapping[str, Any], key: str, short: str) -> list[dict[str, Any]]:
    """The entries of a list as mappings, or nothing where one of them cannot be read as such."""
    entries = data.get(key)
    found = [{short: e} if isinstance(e, str) else e for e in entries] if isinstance(entries, list) else []
    return found if all(isinstance(entry, dict) for entry in found) else []


def _default_label(entry: Mapping[str, Any]) -> str:
    """The name of a method, and what its entry sets by itself."""
    words = [str(entry.get("name"))]
    for key in SETTINGS:
        if key in entry and key in ("parts", "allocate"):
            words.append(str(_joined(entry[key])))
        elif key in entry:
            words.append(f"{key} {'none' if entry[key] is None else entry[key]}")
    return " ".join(words)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One thing to compress and measure: one model, method, ratio and calibration set."""

    model: ModelEntry
    method: MethodEntry | None = None  # None for the dense model
    calibration: CalibrationEntry | None = None
    config: CompressConfig | None = None
    tasks: TaskEntry | None = None

    @property
    def label(self) -> str:
        return "dense" if self.method is None else self.method.label

    @property
    def row(self) -> str:
        """The label, and the calibration set where there are several: the same for every ratio."""
        several = len(self.model.calibrations) > 1
        return self.label + (f" ({self.calibration.name})" if several and self.calibration else "")

    @property
    def ratio(self) -> float:
        """The ratio that was asked for; 0 for the dense model."""
        return 0.0 if self.config is None else self.config.ratio or 0.0

    @property
    def key(self) -> str:
        """A hash of what decides the result; names, labels, titles and figures are not in it."""
        decides = None
        if self.config is not None:
            default = CompressConfig(ratio=self.config.ratio).to_dict()
            config = self.config.to_dict().items()
            decides = {name: value for name, value in config if name in ALWAYS_IN_KEY or value != default[name]}
            del decides["calibration"]["states"]  # where hidden states are kept changes no result
            decides["allocate"] = allocation(self.config)
        said = {
            "format": FORMAT,
            "model": {"source": self.model.source, "dtype": self.model.dtype},
            "config": decides,
            "evaluation": [[text.data, text.length, text.windows] for text in self.model.evaluations],
            "tasks": None if self.tasks is None else self.tasks.model_dump(),
        }
        return hash_of(said)

    def describe(self) -> str:
        """One line for a person."""
        return f"{self.model.name}, {self.row}" + ("" if self.config is None else f" at {self.ratio:g}")


def cells_of(recipe: Recipe) -> Iterator[Cell]:
    """All cells: model by model, the dense one first, then calibration by calibration."""
    for model in recipe.models:
        yield Cell(model=model, tasks=recipe.tasks)
        for calibration in model.calibrations:
            for method in recipe.methods_of(model):
                for ratio in method.ratios:
                    config = method.config(ratio=ratio, calibration=calibration.config)
                    yield Cell(model=model, method=method, calibration=calibration, config=config, tasks=recipe.tasks)


def allocation(config: CompressConfig) -> str:
    """How widths are spread: as the config says, or as its method does by default."""
    return config.allocate or get_method(config.method).allocate


def hash_of(value: Any) -> str:
    """A short hash of plain data, the same on every machine."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:20]
