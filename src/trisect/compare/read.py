"""From YAML to a Recipe: every key is known or refused by name, every value is checked before any work."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from trisect.compare.entries import at_place, check_keys, check_unique, count_of, flag_of, items_of, text_of
from trisect.compare.recipe import (
    FIGURES,
    Calibration,
    Drawing,
    Evaluation,
    MethodEntry,
    ModelEntry,
    Recipe,
    Tasks,
)
from trisect.compare.texts import read_text
from trisect.config import CalibrationConfig, CompressConfig, read_mapping
from trisect.errors import TrisectError, unknown_name
from trisect.methods import get_method
from trisect.support.checks import is_number

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
CALIBRATION = {"source": "builtin", "samples": 128, "length": 2048}
"""Fixed here: a table's cells must not depend on the machine that they are run on."""


def load_recipe(path: str | Path) -> Recipe:
    """Read and check a recipe."""
    data = read_mapping(path)
    with at_place(str(path)):
        return recipe_from(data)


def recipe_from(data: Mapping[str, Any]) -> Recipe:
    """A recipe from its mapping."""
    check_keys(data, RECIPE_KEYS, required=REQUIRED)
    name = text_of(data, "name")
    if Path(name).name != name or name.startswith("."):
        raise TrisectError(f"name: {name!r} is to be a folder's name; leave slashes and leading dots out.")
    models = _models(data)
    recipe = Recipe(
        name=name,
        title=text_of(data, "title", name),
        note=text_of(data, "note", ""),
        models=models,
        methods=_methods(data, models),
        tasks=_tasks(data.get("tasks")),
        kv=flag_of(data, "kv"),
        figures=tuple(_drawing(entry, at, models) for at, entry in items_of(data, "figures", ())),
        texts=tuple(read_text(entry, at) for at, entry in items_of(data, "texts", ())),
    )
    _check_labels(recipe)
    return recipe


def _models(data: Mapping[str, Any]) -> tuple[ModelEntry, ...]:
    entries = []
    for at, entry in items_of(data, "models"):
        entry = {"source": entry, "name": entry} if isinstance(entry, str) else entry
        with at_place(at):
            keys = ("name", "source", "dtype", "note", "calibration", "evaluation")
            check_keys(entry, keys, required=("source",))
            own = {key: entry.get(key, data.get(key)) for key in ("calibration", "evaluation")}
            entries.append(
                ModelEntry(
                    name=text_of(entry, "name", entry["source"]),
                    source=text_of(entry, "source"),
                    dtype=text_of(entry, "dtype", "") or None,
                    note=text_of(entry, "note", ""),
                    calibrations=_calibrations(own["calibration"]),
                    evaluations=_evaluations(own["evaluation"]),
                )
            )
    check_unique([entry.name for entry in entries], "models", "name")
    return tuple(entries)


def _calibrations(data: Any) -> tuple[Calibration, ...]:
    """One set, or a list of named ones."""
    known = [entry.name for entry in fields(CalibrationConfig)]
    if data is None:
        raise TrisectError("calibration is missing: give it here or for the whole recipe.")
    several = isinstance(data, list)
    sets = []
    for number, entry in enumerate(data if several else [data]):
        with at_place(f"calibration[{number}]" if several else "calibration"):
            check_keys(entry, ("name", *known), required=("name",) if several else ("source",))
            given = {key: entry[key] for key in entry if key != "name"}
            config = CalibrationConfig.from_dict({**CALIBRATION, **given})
            sets.append(Calibration(name=text_of(entry, "name", config.source), config=config))
    check_unique([entry.name for entry in sets], "calibration", "name")
    return tuple(sets)


def _evaluations(data: Any) -> tuple[Evaluation, ...]:
    texts = []
    for at, entry in items_of({"evaluation": data}, "evaluation"):
        with at_place(at):
            check_keys(entry, ("name", "data", "length", "windows"), required=("data",))
            texts.append(
                Evaluation(
                    name=text_of(entry, "name", entry["data"]),
                    data=text_of(entry, "data"),
                    length=count_of(entry, "length", 2048, minimum=2),
                    windows=count_of(entry, "windows", None, minimum=1),
                )
            )
    check_unique([entry.name for entry in texts], "evaluation", "name")
    return tuple(texts)


def _methods(data: Mapping[str, Any], models: Sequence[ModelEntry]) -> tuple[MethodEntry, ...]:
    defaults = {key: data[key] for key in SETTINGS if key in data}
    ratios = _ratios(data["ratios"])
    methods = []
    for at, entry in items_of(data, "methods"):
        entry = {"name": entry} if isinstance(entry, str) else entry
        with at_place(at):
            check_keys(entry, ("name", "label", "ratios", "models", *SETTINGS), required=("name",))
            method = MethodEntry(
                name=text_of(entry, "name"),
                label=text_of(entry, "label", _default_label(entry)),
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
    only = method.ratio
    if only is not None and set(entry.ratios) != {only}:
        raise TrisectError(f"{method.name} removes {only:g} and nothing else; give it ratios: [{only:g}].")
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
        check_unique(labels, "methods", "label")


def _ratios(data: Any) -> tuple[float, ...]:
    values = data if isinstance(data, list) else [data]
    if not values or not all(map(is_number, values)):
        raise TrisectError(f"ratios must be a list such as [0.1, 0.2], not {data!r}.")
    check_unique([f"{value:g}" for value in values], "ratios", "value")
    return tuple(float(value) for value in values)


def _tasks(data: Any) -> Tasks | None:
    if data is None:
        return None
    from trisect.evaluate.tasks import parse_tasks

    with at_place("tasks"):
        data = {"names": data} if isinstance(data, str | list) else data
        check_keys(data, ("names", "limit", "shots"), required=("names",))
        names = (
            ",".join(map(str, data["names"])) if isinstance(data["names"], list) else text_of(data, "names")
        )
        limit, shots = count_of(data, "limit", None, minimum=1), count_of(data, "shots", None, minimum=0)
        parse_tasks(names, shots=shots)
        return Tasks(names=names, limit=limit, shots=shots)


def _drawing(data: Any, at: str, models: Sequence[ModelEntry]) -> Drawing:
    data = {"kind": data} if isinstance(data, str) else data
    with at_place(at):
        check_keys(data, tuple(entry.name for entry in fields(Drawing)), required=("kind",))
        if data["kind"] not in FIGURES:
            raise unknown_name("kind of figure", str(data["kind"]), FIGURES)
        known = [text.name for model in models for text in model.evaluations]
        if data.get("evaluation") is not None and data["evaluation"] not in known:
            raise unknown_name("evaluation of this recipe", str(data["evaluation"]), known)
        given = {key: data[key] for key in ("ratio", "parts") if data.get(key) is not None}
        parts = CompressConfig.from_dict({"ratio": 0.5, "parts": list(Drawing.parts), **given}).parts
        return Drawing(**{**data, "parts": parts})
