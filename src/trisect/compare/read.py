"""From YAML to a Recipe: every key is known or refused by name, every value is checked before any work."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from trisect.compare.recipe import (
    FIGURES,
    Calibration,
    DerivedText,
    Drawing,
    Evaluation,
    MethodEntry,
    ModelEntry,
    Recipe,
    Tasks,
)
from trisect.config import CalibrationConfig, CompressConfig, read_mapping
from trisect.errors import TrisectError, unknown_name
from trisect.methods import get_method
from trisect.untrusted import is_number

# What a method entry may set, and a recipe for all of them; the rest of a config is the cell's own. A cell is
# asked for a ratio and for nothing else, or a table could not put two of them side by side.
NOT_SET = (
    "method",
    "calibration",
    "ratio",
    "kv_ratio",
    "target_params",
    "target_kv_bytes",
    "max_ppl_increase",
)
SETTINGS = tuple(entry.name for entry in fields(CompressConfig) if entry.name not in NOT_SET)
RECIPE_KEYS: tuple[str, ...] = (
    "name",
    "title",
    "note",
    "models",
    "methods",
    "ratios",
    "calibration",
    "evaluation",
)
RECIPE_KEYS += ("tasks", "kv", "figures", "texts", *SETTINGS)
REQUIRED = ("name", "models", "methods", "ratios")


def load_recipe(path: str | Path) -> Recipe:
    """Read and check a recipe."""
    data = read_mapping(path)
    with _at(str(path)):
        return recipe_from(data)


def recipe_from(data: Mapping[str, Any]) -> Recipe:
    """A recipe from its mapping."""
    _known(data, RECIPE_KEYS, required=REQUIRED)
    name = _text(data, "name")
    if Path(name).name != name or name.startswith("."):
        raise TrisectError(f"name: {name!r} is to be a folder's name; leave slashes and leading dots out.")
    models = _models(data)
    recipe = Recipe(
        name=name,
        title=_text(data, "title", name),
        note=_text(data, "note", ""),
        models=models,
        methods=_methods(data, models),
        tasks=_tasks(data.get("tasks")),
        kv=_flag(data, "kv"),
        figures=tuple(_drawing(entry, at, models) for at, entry in _items(data, "figures", ())),
        texts=tuple(_derived(entry, at) for at, entry in _items(data, "texts", ())),
    )
    _check_labels(recipe)
    return recipe


def _models(data: Mapping[str, Any]) -> tuple[ModelEntry, ...]:
    entries = []
    for at, entry in _items(data, "models"):
        entry = {"source": entry, "name": entry} if isinstance(entry, str) else entry
        with _at(at):
            keys = ("name", "source", "dtype", "note", "calibration", "evaluation")
            _known(entry, keys, required=("source",))
            own = {key: entry.get(key, data.get(key)) for key in ("calibration", "evaluation")}
            entries.append(
                ModelEntry(
                    name=_text(entry, "name", entry["source"]),
                    source=_text(entry, "source"),
                    dtype=_text(entry, "dtype", "") or None,
                    note=_text(entry, "note", ""),
                    calibrations=_calibrations(own["calibration"]),
                    evaluations=_evaluations(own["evaluation"]),
                )
            )
    _unique([entry.name for entry in entries], "models", "name")
    return tuple(entries)


def _calibrations(data: Any) -> tuple[Calibration, ...]:
    """One set, or a list of named ones."""
    known = [entry.name for entry in fields(CalibrationConfig)]
    if data is None:
        raise TrisectError("calibration is missing: give it here or for the whole recipe.")
    several = isinstance(data, list)
    sets = []
    for number, entry in enumerate(data if several else [data]):
        with _at(f"calibration[{number}]" if several else "calibration"):
            _known(entry, ("name", *known), required=("name",) if several else ("source",))
            config = CalibrationConfig.from_dict({key: entry[key] for key in entry if key != "name"})
            sets.append(Calibration(name=_text(entry, "name", config.source), config=config))
    _unique([entry.name for entry in sets], "calibration", "name")
    return tuple(sets)


def _evaluations(data: Any) -> tuple[Evaluation, ...]:
    texts = []
    for at, entry in _items({"evaluation": data}, "evaluation"):
        with _at(at):
            _known(entry, ("name", "data", "length", "windows"), required=("data",))
            texts.append(
                Evaluation(
                    name=_text(entry, "name", entry["data"]),
                    data=_text(entry, "data"),
                    length=_count(entry, "length", 2048, minimum=2),
                    windows=_count(entry, "windows", None, minimum=1),
                )
            )
    _unique([entry.name for entry in texts], "evaluation", "name")
    return tuple(texts)


def _methods(data: Mapping[str, Any], models: Sequence[ModelEntry]) -> tuple[MethodEntry, ...]:
    defaults = {key: data[key] for key in SETTINGS if key in data}
    ratios = _ratios(data["ratios"])
    methods = []
    for at, entry in _items(data, "methods"):
        entry = {"name": entry} if isinstance(entry, str) else entry
        with _at(at):
            _known(entry, ("name", "label", "ratios", "models", *SETTINGS), required=("name",))
            method = MethodEntry(
                name=_text(entry, "name"),
                label=_text(entry, "label", _default_label(entry)),
                settings={**defaults, **{key: entry[key] for key in SETTINGS if key in entry}},
                ratios=_ratios(entry["ratios"]) if "ratios" in entry else ratios,
                models=_model_names(entry.get("models"), models),
            )
            _check_method(method)
            methods.append(method)
    return tuple(methods)


def _check_method(entry: MethodEntry) -> None:
    """Refuse now what would make every one of its cells fail."""
    method = get_method(entry.name)
    if method.ratio is not None and set(entry.ratios) != {method.ratio}:
        raise TrisectError(
            f"{method.name} removes {method.ratio:g} and nothing else; give it ratios: [{method.ratio:g}]."
        )
    for ratio in entry.ratios:
        config = entry.config(ratio=ratio, calibration=CalibrationConfig())
    missing = [part for part in config.parts if part not in method.parts]
    if missing:
        raise TrisectError(
            f"{method.name} does not change {','.join(missing)}; give it "
            f"parts: [{', '.join(method.parts)}] or some of them."
        )


def _default_label(entry: Mapping[str, Any]) -> str:
    """The name and what this entry sets by itself."""
    own = []
    for key in SETTINGS:
        if key in entry and key in ("parts", "allocate"):
            own.append(",".join(map(str, entry[key])) if isinstance(entry[key], list) else str(entry[key]))
        elif key in entry:
            own.append(f"{key} {'none' if entry[key] is None else entry[key]}")
    return " ".join([str(entry.get("name")), *own])


def _model_names(names: Any, models: Sequence[ModelEntry]) -> tuple[str, ...]:
    known = [model.name for model in models]
    if names is None:
        return tuple(known)
    for name in names if isinstance(names, list) else [names]:
        if name not in known:
            raise unknown_name("model of this recipe", str(name), known)
    return tuple(names) if isinstance(names, list) else (names,)


def _check_labels(recipe: Recipe) -> None:
    for model in recipe.models:
        labels = [method.label for method in recipe.methods if model.name in method.models]
        _unique(labels, "methods", "label")


def _ratios(data: Any) -> tuple[float, ...]:
    values = data if isinstance(data, list) else [data]
    if not values or not all(map(is_number, values)):
        raise TrisectError(f"ratios must be a list such as [0.1, 0.2], not {data!r}.")
    _unique([f"{value:g}" for value in values], "ratios", "value")
    return tuple(float(value) for value in values)


def _tasks(data: Any) -> Tasks | None:
    if data is None:
        return None
    from trisect.evaluate.tasks import parse_tasks

    with _at("tasks"):
        data = {"names": data} if isinstance(data, str | list) else data
        _known(data, ("names", "limit", "shots"), required=("names",))
        names = ",".join(map(str, data["names"])) if isinstance(data["names"], list) else _text(data, "names")
        limit, shots = _count(data, "limit", None, minimum=1), _count(data, "shots", None, minimum=0)
        parse_tasks(names, shots=shots)
        return Tasks(names=names, limit=limit, shots=shots)


def _drawing(data: Any, at: str, models: Sequence[ModelEntry]) -> Drawing:
    data = {"kind": data} if isinstance(data, str) else data
    with _at(at):
        _known(data, tuple(entry.name for entry in fields(Drawing)), required=("kind",))
        if data["kind"] not in FIGURES:
            raise unknown_name("kind of figure", str(data["kind"]), FIGURES)
        known = [text.name for model in models for text in model.evaluations]
        if data.get("evaluation") is not None and data["evaluation"] not in known:
            raise unknown_name("evaluation of this recipe", str(data["evaluation"]), known)
        given = {key: data[key] for key in ("ratio", "parts") if data.get(key) is not None}
        parts = CompressConfig.from_dict({"ratio": 0.5, "parts": list(Drawing.parts), **given}).parts
        return Drawing(**{**data, "parts": parts})


def _derived(data: Any, at: str) -> DerivedText:
    with _at(at):
        _known(data, ("file", "from", "split", "every", "start"), required=("file", "from", "split"))
        return DerivedText(
            file=_text(data, "file"),
            source=_text(data, "from"),
            split=_text(data, "split"),
            every=_count(data, "every", 1, minimum=1) or 1,
            start=_count(data, "start", 0, minimum=0) or 0,
        )


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Say where in the recipe an error is."""
    try:
        yield
    except TrisectError as error:
        raise TrisectError(f"{where}: {error}") from error


def _known(data: Any, known: Sequence[str], *, required: Sequence[str] = ()) -> None:
    if not isinstance(data, Mapping):
        raise TrisectError(f"a mapping with some of {', '.join(known)} is needed here, not {data!r}.")
    for key in data:
        if key not in known:
            raise unknown_name("key", str(key), known)
    for key in required:
        if data.get(key) is None:
            raise TrisectError(f"the key {key} is missing; docs/comparison.md describes all of them.")


def _items(data: Mapping[str, Any], key: str, default: Any = None) -> list[tuple[str, Any]]:
    """The entries of a list, each with its place."""
    found = data.get(key, default)
    if not isinstance(found, list | tuple) or (default is None and not found):
        raise TrisectError(f"{key} must be a list with at least one entry, not {found!r}.")
    return [(f"{key}[{number}]", entry) for number, entry in enumerate(found)]


def _text(data: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = data.get(key, default)
    if not isinstance(value, str) or (not value and default is None):
        raise TrisectError(f"{key} must be text, not {value!r}.")
    return " ".join(value.split()) if key in ("title", "note") else value


def _count(data: Mapping[str, Any], key: str, default: Any, *, minimum: int) -> Any:
    value = data.get(key, default)
    if value is None and default is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise TrisectError(f"{key} must be a whole number of at least {minimum}, not {value!r}.")
    return value


def _flag(data: Mapping[str, Any], key: str) -> bool:
    value = data.get(key, False)
    if not isinstance(value, bool):
        raise TrisectError(f"{key} must be true or false, not {value!r}.")
    return value


def _unique(values: Sequence[str], key: str, what: str) -> None:
    for twice in (value for value in values if values.count(value) > 1):
        raise TrisectError(f"{key}: two entries have the {what} {twice!r}; give each its own {what}.")
