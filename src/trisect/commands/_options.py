"""Options of verbs: shared ones, those derived from records, early checks, shell completion, files for --config.

The keys of `--config run.yaml` are the options' own names. The command line wins over the file, and the file over
defaults: typer's `default_map` is filled here, with values as the text that would be typed, so that both are
checked alike.
"""

import os
import re
import types
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from importlib import import_module
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from trisect.config import CalibrationConfig, CompressConfig, LoadOptions, goals, read_mapping, settings, verbs
from trisect.errors import TrisectError, check_names
from trisect.support import checks, files


def option(help: str, metavar: str | None = None, *names: str, panel: str | None = None, **more: Any) -> Any:
    """typer's record of an option, named like its parameter unless `names` are given."""
    return typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, **more)


def argument(help: str, metavar: str) -> Any:
    """typer's record of a positional argument."""
    return typer.Argument(help=help, metavar=metavar)


Model = Annotated[str, argument("Hub id, folder, GGUF file, or a name from `trisect ls models`.", "MODEL")]
NEW_FOLDER = "New folder."  # by this help it is known that --out must not exist
OutFolder = Annotated[Path, option(NEW_FOLDER, "DIR")]
Length = Annotated[int | None, option("Tokens per window. (default: 2048, or the model's context)")]
Device = Annotated[str, option("cpu, cuda, cuda:1, ...", "DEVICE", panel=settings.RUNNING)]
CurvesFile = Annotated[Path | None, option("Loss curves: read, or measured and written.", "FILE", panel=settings.CUT)]
TrustRemoteCode = Annotated[bool, option("Run code that the checkpoint brings along.", panel=settings.RUNNING)]
Json = Annotated[Path | None, option("Write the measurement as JSON.", "FILE")]


@dataclass
class Verb:
    """A verb: its function, where help lists it, and (what for, command line) pairs below its help."""

    run: Callable[..., None]
    panel: str
    examples: list[tuple[str, str]]


VERBS: dict[str, Verb] = {}


def verb(panel: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that registers a verb under its function's name, `eval_` as eval.

    The first paragraph of its docstring is the help, the others are examples: "what for: trisect ...".
    """

    def registered(run: Callable[..., None]) -> Callable[..., None]:
        run.__doc__, _, below = str(run.__doc__).partition("\n\n")
        examples = re.findall(r"^ *(\S.*?):\s+(trisect.*)", below, re.MULTILINE)
        VERBS[run.__name__.rstrip("_")] = Verb(run, panel, examples)
        return run

    return registered


SOURCE = "calibration"  # what the calibration record's `source` is called on the command line
RECORDS = (CompressConfig, CalibrationConfig, verbs.SampleConfig, verbs.QuantizeConfig, verbs.TuneConfig, LoadOptions)
"""A parameter of one of these types in a verb's `run` becomes the options that make the record."""


def expanded(parameter: Parameter) -> list[Parameter]:
    """The options for a parameter of `run`: itself, or one for each setting of its record."""
    kind = parameter.annotation
    found = [parameter]
    if kind in RECORDS:
        found = [_setting(name, about) for name, about in _settings(kind).items()]
    # Keyword-only throughout, so that an option without a default may follow one that has one.
    return [_completed(entry.replace(kind=Parameter.KEYWORD_ONLY)) for entry in found]


def build_record(kind: type, options: dict[str, Any]) -> Any:
    """A record, made of its settings, which are taken out of the options."""
    found = {name: options.pop(name) for name in _settings(kind)}
    given = {name: value for name, value in found.items() if value is not None and value != []}
    if kind not in (CompressConfig, CalibrationConfig):
        return kind(**given)
    calibration = {name: given[name] for name in settings.setting_names(CalibrationConfig) if name in given}
    if SOURCE in given:
        calibration["source"] = given[SOURCE]
    if kind is CalibrationConfig:
        return CalibrationConfig(**calibration)
    own = {name: value for name, value in given.items() if name not in calibration or name == "seed"}
    return CompressConfig.from_dict({**own, "calibration": calibration})


def _settings(kind: type) -> dict[str, Any]:
    """How each setting of a record is typed, by its name on the command line."""
    own = settings.options_of_record(kind)
    if kind is CalibrationConfig:
        return {SOURCE if name == "source" else name: about for name, about in own.items()}
    if kind is CompressConfig:
        own.pop(SOURCE)
        return {**goals.GOAL_OPTIONS, **own, **_settings(CalibrationConfig)}
    return own


def _setting(name: str, about: dict[str, Any]) -> Parameter:
    """The option for a setting; its default is None, so that the record's own default decides."""
    kind, default = about["typed"] or about["annotation"], about.get("default")
    if isinstance(kind, types.UnionType):
        kind = next(entry for entry in get_args(kind) if entry is not type(None))
    shown = isinstance(default, str | int | float) and not isinstance(default, bool)
    help = about["help"] + (f" (default: {default})" if shown else "")
    declared = option(help, about["metavar"], panel=about["panel"])
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, declared])


def _completed(parameter: Parameter) -> Parameter:
    """The option with its names for typer: flags without a --no-, others with what a shell completes."""
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


TEXTS = ("data", "calibration", "evaluate", "eval_data")  # options that name texts
NAMES: dict[str, Callable[[], list[str]]] = {
    "model": lambda: list(import_module("trisect.data.catalogue").REGISTRY_MODELS),
    **dict.fromkeys(TEXTS, lambda: list(import_module("trisect.data.catalogue").TEXTS)),
    "dtype": lambda: ["float32", "bfloat16", "float16"],
    "device": lambda: ["cpu", "cuda"],
    "tasks": lambda: ["paper", "zero-shot", "quick"],
    "verb": lambda: sorted(import_module("trisect.commands").verbs()),
}
"""What shells complete, by the name of an option, besides the words in its metavar."""


def _check_model(name: str | Path) -> None:
    from trisect.models.source import read_raw_config, resolve

    if name not in NAMES["model"]():
        source = resolve(str(name))
        if source.local and not source.gguf:
            read_raw_config(source)


def _check_texts(names: str | list[str]) -> None:
    from trisect.data.catalogue import check_source

    for name in [names] if isinstance(names, str) else names:
        if name != "none":
            check_source(name)


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise TrisectError(f"There is no file {path}; give one that exists.")


CHECKS: dict[str, Callable[[Any], None]] = {
    "json": files.check_writable,
    **dict.fromkeys(("model", "folder"), _check_model),
    "dtype": lambda name: check_names("dtype", [name], NAMES["dtype"]()),
    "device": checks.check_device,
    "moments": _check_file,
    "curves": files.check_writable,  # read, or measured and written
    **dict.fromkeys(TEXTS, _check_texts),
}
"""What can be refused in a second, by the name of the option and in this order: no torch, no weights, no text read."""


def check_early(context: typer.Context, options: dict[str, Any]) -> None:
    """Refuse a verb's options that name what is not there, before the verb does anything."""
    if any(entry.name == "out" and getattr(entry, "help", None) == NEW_FOLDER for entry in context.command.params):
        files.check_new_folder(options["out"] or ".new")
    own = {"dtype"} if "to" in options else set()  # export has the dtypes of its formats, and refuses others itself
    for name, check in CHECKS.items():
        if name not in own and options.get(name) not in (None, []):
            check(options[name])


def read_options(context: typer.Context, path: Path | None) -> Path | None:
    """The callback of --config: gives the verb's options the file's values as defaults."""
    if path is None or context.resilient_parsing:
        return path
    parameters = by_key(context.command.params)
    found: dict[str, Any] = {}
    for key, value in _entries(path, nested=SOURCE in parameters):
        check_names(f"option in {path}:", [key], parameters)
        if found.setdefault(key, value) != value:
            raise TrisectError(f"{path} gives {key} twice, with different values; keep one.")
    typed = {parameters[key].name: _as_typed(f"{path}: {key}", parameters[key], found[key]) for key in found}
    context.default_map = {**(context.default_map or {}), **typed}
    return path


def by_key(parameters: Iterable[Any]) -> dict[str, Any]:
    """The parameters that a file can give: `kv_ratio` for --kv-ratio, arguments by the name in the verb's `run`."""
    keyed = {max(entry.opts, key=len).lstrip("-").replace("-", "_"): entry for entry in parameters}
    return {key: entry for key, entry in keyed.items() if key not in ("config", "help")}


def takes_many(parameter: Any) -> bool:
    return bool(getattr(parameter, "multiple", False)) or parameter.nargs == -1


def is_flag(parameter: Any) -> bool:
    return bool(getattr(parameter, "is_flag", False))


def without_replaced_goals(context: typer.Context, options: dict[str, Any]) -> dict[str, Any]:
    """A run has one goal, so that one which is typed replaces the file's."""
    sources = {name: _source(context, name) for name in goals.GOALS if name in options}
    if "COMMANDLINE" not in sources.values():
        return options
    return {**options, **{name: None for name, source in sources.items() if source == "DEFAULT_MAP"}}


def blame(error: Any) -> str:
    """The file and the value in it that typer refuses; empty where the value was typed."""
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    if context is None or parameter is None or _source(context, parameter.name) != "DEFAULT_MAP":
        return ""
    return f"{context.params['config_file']} gives {checks.shown(context.default_map[parameter.name])}. "


def _source(context: typer.Context, name: str) -> str:
    return getattr(context.get_parameter_source(name), "name", "")


def _entries(path: Path, *, nested: bool) -> Iterator[tuple[str, Any]]:
    """Options with underscores, and their values; `calibration` may hold its settings, as in CompressConfig."""
    for key, value in read_mapping(path).items():
        if nested and key == SOURCE and isinstance(value, dict):
            for inner, setting in value.items():
                yield SOURCE if inner == "source" else inner.replace("-", "_"), setting
        else:
            yield key.replace("-", "_"), value


def _as_typed(where: str, parameter: Any, value: Any) -> Any:
    """A value of the file as the command line would have it."""
    if value is None:
        raise TrisectError(f"{where} has no value; give it one, or leave the line out for the default.")
    if is_flag(parameter):
        if not isinstance(value, bool):
            raise TrisectError(f"{where} is true or false, not {checks.shown(value)}.")
        return value
    many = takes_many(parameter)
    several = isinstance(value, list) and (many or "LIST" in (parameter.metavar or ""))
    words = [_word(where, parameter, entry) for entry in (value if several else [value])]
    return words if many else ",".join(words)


def _word(where: str, parameter: Any, value: Any) -> str:
    """One value as the word that would have been typed; the shell's `~/` included."""
    if isinstance(value, bool):
        word = "on" if value else "off"  # YAML reads these two as true and false
        if word not in (parameter.metavar or "").split("|"):
            raise TrisectError(f"{where} takes no {str(value).lower()}; put it in quotes if it is a name.")
        return word
    if value is None or isinstance(value, list | dict):
        kind = "nothing" if value is None else "a list" if isinstance(value, list) else "a mapping"
        raise TrisectError(f"{where} takes one value, not {kind}.")
    text = str(value)
    return os.path.expanduser(text) if text.startswith("~/") else text
