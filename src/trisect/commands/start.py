"""First steps: `trisect demo`, the whole flow in a few minutes; `init`, a file for --config; `ls`, what there is."""

import textwrap
from pathlib import Path
from typing import Annotated, Any

from trisect import commands
from trisect.commands import _options
from trisect.commands import _screen as screen
from trisect.commands._options import Json, LoadOptions, argument, option, verb
from trisect.commands.compare import RECIPE
from trisect.commands.compress import show_result
from trisect.errors import TrisectError, check_names

MODEL, PROMPT, NEW_TOKENS = "smollm2-135m", "A function in Python is", 40
# Enough that the moments settle, little enough that two cores finish within four minutes.
SAMPLES, LENGTH, EVAL_WINDOWS = 12, 512, 8
WIDTH = 100  # of the comments in a file of options
KINDS = ("methods", "pieces", "families", "data", "models")


@verb("Start here")
def demo(
    ratio: Annotated[str, option("Share of the decoder's weights to remove.", "0.25|25%")] = "0.25",
    method: Annotated[str, option("See `trisect ls methods`.", "NAME")] = "a3+",
    json: Json = None,
) -> None:
    """Fetch a small model, compress it, and show what it cost.

    The whole flow on a small real model: trisect demo
    The paper's method, and more removed: trisect demo --method a3 --ratio 0.4
    """
    from trisect.config import CalibrationConfig, CompressConfig
    from trisect.data import REGISTRY_MODELS, catalogue
    from trisect.methods import get_method
    from trisect.pipeline.job import Job, carry_out
    from trisect.report.page import continue_prompts

    calibration = CalibrationConfig(source=catalogue.BUILTIN, samples=SAMPLES, length=LENGTH)
    config = CompressConfig(ratio=ratio, method=get_method(method).name, calibration=calibration)

    def continued(loaded: Any) -> str:
        return " ".join((PROMPT + continue_prompts(loaded, [PROMPT], NEW_TOKENS)[0]).split())

    screen.say(f"{MODEL}: remove {config.ratio:.0%} with {method}")
    with screen.quiet_libraries(), screen.progress() as report:
        report("load", 0, 1)
        loaded = screen.load(MODEL, LoadOptions(dtype="float32"))
        report("load", 1, 1)
        dense_text = continued(loaded)
        how: Any = {"evaluate": None, "eval_windows": EVAL_WINDOWS, "other_text": False}
        how |= {"say": screen.say, "progress": report}
        job = Job(model=loaded.model, source=MODEL, tokenizer=loaded.tokenizer, config=config, **how)
        result = carry_out(job)
        texts = {"prompt": PROMPT, "before": dense_text, "after": continued(loaded)}
    show_result(result)
    screen.say(f"({MODEL}: {REGISTRY_MODELS[MODEL].note})")
    screen.say(f"before:     {texts['before']}", f"compressed: {texts['after']}")
    screen.keep_measurement(json, {**result.receipt, "texts": texts})
    screen.say_next(f"trisect compress {MODEL} -o small --ratio {ratio} --method {method}")


@verb("Start here")
def init(
    verb: Annotated[str, argument("Whose options.", "[VERB]")] = "compress",
    out: Annotated[Path, option("New file.", "FILE")] = Path("run.yaml"),
) -> None:
    """Write a YAML file with every option of a verb, its default and what it does; for compare, a recipe.

    A file for compress, and a run with it: trisect init compress -o run.yaml
    For another verb: trisect init finetune -o tune.yaml
    A recipe to compare methods by: trisect init compare -o recipe.yaml
    """
    from trisect.support.files import atomic_write_text

    check_names("verb", [verb], commands.verbs())
    if out.exists():
        raise TrisectError(f"{out} exists and may hold your own settings; name another file with -o.")
    recipe = verb == "compare"
    atomic_write_text(out, RECIPE.format(name=out.name) if recipe else commented_options(verb, out))
    screen.say(f"Saved to {out}")
    screen.say_next(f"edit it, then trisect {verb} {'' if recipe else '--config '}{screen.quoted(out)}")


def commented_options(verb: str, out: Path) -> str:
    """The text of a file of options: those with a default as they are, the others as comments to fill in."""
    import yaml
    from typer.main import get_command

    command = get_command(commands.build_app()).commands[verb]  # type: ignore[attr-defined]
    text = f"""# Options of `trisect {verb}`: {" ".join(command.help.split())}
# Run it with: trisect {verb} --config {out.name}
# What is typed on the command line wins over this file; lines left out have their default.
"""
    for key, parameter in _options.by_key(command.params).items():
        needed = " Needed, here or on the command line." if parameter.required else ""
        kind = "true|false" if _options.is_flag(parameter) else parameter.metavar
        about = f"{parameter.help}{needed}" + (f" [{kind.strip('[]')}]" if kind else "")
        comment = textwrap.fill(" ".join(about.split()), WIDTH, initial_indent="# ", subsequent_indent="# ")
        default = parameter.default
        line = f"# {key}: [...]" if _options.takes_many(parameter) else f"# {key}: ..."
        if default is not None and not parameter.required:
            value = default if isinstance(default, bool | int | float) else str(default)
            line = yaml.safe_dump({key: value}, width=10**6).strip()
        text += f"\n{comment}\n{line}\n"
    return text


@verb("Start here")
def ls(kind: Annotated[str | None, argument("Leave it out for everything.", f"[{'|'.join(KINDS)}]")] = None) -> None:
    """List methods, pieces of a3+, model families, data sources and built-in models.

    Everything there is to choose from: trisect ls
    One table: trisect ls methods
    """
    check_names("list", [kind] if kind else [], KINDS)
    for wanted in (kind,) if kind else KINDS:
        if wanted == "families":
            columns = ("family", "QK", "OV", "MLP", "experts", "HF export", "GGUF", "vLLM")
            screen.say_table(columns, family_rows(), title=wanted)
        else:
            screen.say_table((), entries(wanted), title=wanted, show_header=False)


def family_rows() -> list[tuple[str, ...]]:
    """What can be done to the models of each family, from its record and from what exporters write."""
    from trisect.export.gguf import ARCHITECTURES
    from trisect.export.stock import no_stock_form
    from trisect.models import FAMILIES, WRAPPERS
    from trisect.serve import NOT_IN_VLLM

    rows: list[tuple[str, ...]] = []
    for name, family in sorted(FAMILIES.items()):
        experts = "no" if family.experts is None else "yes"
        stock = "no" if no_stock_form(family) is not None else "yes" if family.norms is None else "yes, QK whole"
        known = ARCHITECTURES.get(name)
        gguf = "no" if known is None else "yes, QK whole" if known.halved else stock
        ov = "channels" if family.output_gate else "yes" if family.value_norm is None else "whole behind a norm"
        vllm = "plugin" if name not in NOT_IN_VLLM else "no" if stock == "no" else "portable"
        rows.append((name, _qk(family), ov, "yes", experts, stock, gguf, vllm))
    inside = ("as the text model inside", "", "", "")
    return rows + [(name, *inside, "no", "no", "no") for name in sorted(WRAPPERS)]


def _qk(family: Any) -> str:
    """How queries and keys are narrowed."""
    if family.rotary is None or family.latent is not None:
        return "SVD" if family.latent is None else "SVD, rotated channels whole"
    if family.norms is None:
        return "pairs, folds"
    return "pairs, folds; whole behind a LayerNorm" if family.norm_centred else "pairs"


def entries(kind: str) -> list[tuple[str, str]]:
    """Names of one kind, each with one line about it."""
    from trisect import data, methods
    from trisect.methods.a3plus import PIECES

    return {
        "methods": [(name, method.summary) for name, method in methods.METHODS.items()],
        "pieces": list(PIECES.items()),
        "data": data.list_sources(),
        "models": [(name, entry.description) for name, entry in data.REGISTRY_MODELS.items()],
    }[kind]
