"""Options of verbs: those that several share, those that derive from a record, and what shells complete."""

import ast
import types
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, fields
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from trisect.config import CalibrationConfig, CompressConfig
from trisect.config.goals import GOAL_OPTIONS
from trisect.config.record import CUT, RUNNING, defaults_of, options_of_record, setting_names
from trisect.config.verbs import QuantizeConfig, SampleConfig, TuneConfig


def option(help: str, metavar: str | None = None, *names: str, panel: str | None = None, **more: Any) -> Any:
    """An option of a verb, named like its parameter where no name is given."""
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, **more)


def argument(help: str, metavar: str) -> Any:
    """A word of a verb without a name before it."""
    return typer.Argument(help=help, metavar=metavar)


Model = Annotated[str, argument("Hub id, folder, GGUF file, or a name from `trisect ls models`.", "MODEL")]
OutFolder = Annotated[Path, option("New folder.", "DIR")]
Length = Annotated[int | None, option("Tokens per window. (default: 2048, or the model's context)")]
Dtype = Annotated[
    str | None, option("float32, bfloat16 or float16; the checkpoint's own by default.", "DTYPE", panel=RUNNING)
]
Device = Annotated[str, option("cpu, cuda, cuda:1, ...", "DEVICE", panel=RUNNING)]
CurvesFile = Annotated[
    Path | None, option("Loss curves for search and balanced: read, or measured and written.", "FILE", panel=CUT)
]
TrustRemoteCode = Annotated[bool, option("Run code that the checkpoint brings along.", panel=RUNNING)]
Json = Annotated[Path | None, option("Write the measurement as JSON.", "FILE")]


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How a verb's model is loaded."""

    dtype: Dtype = None
    device: Device = "cpu"
    trust_remote_code: TrustRemoteCode = False


SOURCE = "calibration"
"""What the calibration record's `source` is called on the command line."""
RECORDS = (CompressConfig, CalibrationConfig, SampleConfig, QuantizeConfig, TuneConfig, LoadOptions)
"""A parameter of one of these types in a verb's `run` stands for the options that make the record."""


def expanded(parameter: Parameter) -> list[Parameter]:
    """The options that a parameter of `run` stands for: itself, or one for each setting of its record."""
    kind = parameter.annotation
    if kind is LoadOptions:
        found = [parameter.replace(name=e.name, annotation=e.type, default=e.default) for e in fields(kind)]
    elif kind in RECORDS:
        found = [_setting(name, about) for name, about in _settings(kind).items()]
    else:
        found = [parameter]
    # Keyword-only throughout, so that an option without a default may follow one that has one.
    return [_completed(entry.replace(kind=Parameter.KEYWORD_ONLY)) for entry in found]


def build_record(kind: type, options: dict[str, Any]) -> Any:
    """Take a record's settings out of the options that were given, and make the record of them."""
    names = [entry.name for entry in fields(kind)] if kind is LoadOptions else list(_settings(kind))
    found = {name: options.pop(name) for name in names}
    given = {name: value for name, value in found.items() if value is not None and value != []}
    if kind not in (CompressConfig, CalibrationConfig):
        return kind(**given)
    calibration = {name: given[name] for name in setting_names(CalibrationConfig) if name in given}
    if SOURCE in given:
        calibration["source"] = given[SOURCE]
    if kind is CalibrationConfig:
        return CalibrationConfig.from_dict(calibration)
    own = {name: value for name, value in given.items() if name not in calibration or name == "seed"}
    return CompressConfig.from_dict({**own, "calibration": calibration})


def _settings(kind: type) -> dict[str, Any]:
    """What is known about a record's settings, by the name on the command line."""
    defaults = defaults_of(kind)
    own = {name: {"default": defaults[name], **about} for name, about in options_of_record(kind).items()}
    if kind is CalibrationConfig:
        return {SOURCE if name == "source" else name: about for name, about in own.items()}
    if kind is CompressConfig:
        own.pop(SOURCE)
        return {**GOAL_OPTIONS, **own, **_settings(CalibrationConfig)}
    return own


def _setting(name: str, about: dict[str, Any]) -> Parameter:
    """An option of a record; None means "not given", so that the record's default may decide."""
    kind, default = about["typed"] or about["annotation"], about.get("default")
    if isinstance(kind, types.UnionType):
        kind = next(entry for entry in get_args(kind) if entry is not type(None))
    shown = (
        isinstance(default, str | int | float) and not isinstance(default, bool) and "(default" not in about["help"]
    )
    text = f"{about['help']} (default: {default})" if shown else about["help"]
    declared = option(text, about["metavar"], panel=about["panel"])
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, declared])


def _completed(parameter: Parameter) -> Parameter:
    """A flag by its name alone, without a --no-; other options with the names that a shell may complete."""
    kind, declared = get_args(parameter.annotation)
    declared, name = copy(declared), parameter.name
    if name == "out":
        declared.param_decls = ("--out", "-o")
    if kind in (bool, bool | None):
        declared.param_decls = declared.param_decls or (f"--{name.replace('_', '-')}",)
        return parameter.replace(annotation=Annotated[kind, declared])
    choices = (declared.metavar or "").strip("[]").split("|")
    words = [word for word in choices if word.isalnum() and word == word.lower()]
    known = NAMES.get(name, list)
    if declared.autocompletion is None and (words or name in NAMES):
        declared.autocompletion = lambda incomplete: [w for w in (*known(), *words) if w.startswith(incomplete)]
    return parameter.replace(annotation=Annotated[kind, declared])


SOURCES = Path(__file__).resolve().parents[1]
DATA_TABLES = ("BUILTIN", "SYNTHETIC", "DATASETS")


def method_names() -> list[str]:
    """Of `trisect.methods.METHODS`, without importing torch at every Tab: constants made by a call with a name."""
    constants = [entry for path in sorted((SOURCES / "methods").glob("*.py")) for entry in _constants(path)]
    return [name for _, value in constants if isinstance(value, ast.Call) and (name := _name_in(value))]


def table_names(path: str, constant: str) -> list[str]:
    """The texts in a constant of a source file: the keys of a dictionary, or the entries of a tuple."""
    value = dict(_constants(SOURCES / path))[constant]
    nodes = value.keys if isinstance(value, ast.Dict) else getattr(value, "elts", [value])
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def data_names() -> list[str]:
    """Texts that are known by name."""
    return [name for table in DATA_TABLES for name in table_names("data/catalogue.py", table)]


NAMES: dict[str, Callable[[], list[str]]] = {
    "model": lambda: table_names("data/registry.py", "REGISTRY_MODELS"),
    "method": method_names,
    "without": lambda: table_names("methods/a3plus.py", "PIECES"),
    **dict.fromkeys(("data", "calibration", "evaluate", "eval_data"), data_names),
    "dtype": lambda: ["float32", "bfloat16", "float16"],
    "device": lambda: ["cpu", "cuda"],
    "tasks": lambda: ["paper", "zero-shot", "quick"],
    "verb": lambda: sorted(path.stem for path in (SOURCES / "commands").glob("[a-z]*.py")),
}
"""What shells complete, by the name of an option, besides the words in its metavar."""


def _constants(path: Path) -> Iterator[tuple[str, ast.expr]]:
    """Assignments to NAMES at the top of a module."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and target.id.isupper() and value is not None:
            yield target.id, value


def _name_in(call: ast.Call) -> str | None:
    """`name=` of a call, else its first argument where that is a text."""
    first = next(iter([word.value for word in call.keywords if word.arg == "name"] or call.args), None)
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None
