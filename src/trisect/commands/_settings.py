"""Options of a verb that derive from a record of settings: `settings: CompressConfig` in its `run`."""

import types
from collections.abc import Callable
from inspect import Parameter
from typing import Annotated, Any, get_args

import typer

from trisect.commands import _names
from trisect.config import CalibrationConfig, CompressConfig
from trisect.config.goals import GOAL_OPTIONS
from trisect.config.record import options_of_record, setting_names

RECORDS = (CompressConfig, CalibrationConfig)
SOURCE = "calibration"
"""What the calibration record's `source` is called on the command line."""

COMPLETED: dict[str, Callable[[], list[str]]] = {
    "methods": _names.method_names,
    "data": _names.data_names,
    "pieces": _names.piece_names,
    "alignments": lambda: ["32", "16", "8", "none"],
}


def parameters_for(record: type) -> list[Parameter]:
    """One keyword parameter of a verb per setting; None means "not given", so that a default may decide."""
    return [_parameter(name, about) for name, about in _options(record).items()]


def build_settings(record: type, options: dict[str, Any]) -> Any:
    """Take a record's settings out of the options that were given, and make the record of them."""
    found = {name: options.pop(name) for name in _options(record)}
    given = {name: value for name, value in found.items() if value is not None and value != []}
    calibration = {name: given[name] for name in setting_names(CalibrationConfig) if name in given}
    if SOURCE in given:
        calibration["source"] = given[SOURCE]
    if record is CalibrationConfig:
        return CalibrationConfig.from_dict(calibration)
    own = {name: value for name, value in given.items() if name not in calibration or name == "seed"}
    return CompressConfig.from_dict({**own, "calibration": calibration})


def _options(record: type) -> dict[str, Any]:
    calibration = {
        SOURCE if name == "source" else name: about for name, about in options_of_record(CalibrationConfig).items()
    }
    if record is CalibrationConfig:
        return calibration
    own = {name: about for name, about in options_of_record(record).items() if name != SOURCE}
    return {**GOAL_OPTIONS, **own, **calibration}


def _parameter(name: str, about: dict[str, Any]) -> Parameter:
    kind = about["typed"] or about["annotation"]
    if isinstance(kind, types.UnionType):
        kind = next(entry for entry in get_args(kind) if entry is not type(None))
    complete = COMPLETED.get(about["names"]) or (lambda: list(about["choices"]))
    flag = (f"--{name.replace('_', '-')}",) if kind is bool else ()
    declared = typer.Option(
        *flag,
        help=about["help"],
        metavar=about["metavar"],
        rich_help_panel=about["panel"],
        autocompletion=None if kind is bool else _names.completed(complete),
    )
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, declared])
