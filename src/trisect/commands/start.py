"""Start here: `trisect demo` is the whole flow, `init` a file for --config, `ls` what there is; `doctor` checks."""

import platform
import textwrap
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
import yaml

from trisect import commands, data, models
from trisect.commands import _screen as screen
from trisect.commands._options import Json, LoadOptions, argument, by_key, is_flag, option, takes_many, verb
from trisect.config import CalibrationConfig, CompressConfig
from trisect.data import catalogue
from trisect.errors import TrisectError, check_names
from trisect.support import files, receipt

MODEL, PROMPT, NEW_TOKENS = "smollm2-135m", "A function in Python is", 40
# Enough that the moments settle, little enough that two cores finish within four minutes.
SAMPLES, LENGTH, EVAL_WINDOWS = 12, 512, 8
WIDTH = 100  # of the comments in a file of options
KINDS = ("methods", "pieces", "families", "data", "models")
STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}
RECIPE = Path(__file__).with_name("recipe.yaml")  # what `init compare` writes, with the file's name for NAME


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
    from trisect.methods import get_method
    from trisect.pipeline.job import Job, carry_out
    from trisect.report.terminal import result_lines

    calibration = CalibrationConfig(source=catalogue.BUILTIN, samples=SAMPLES, length=LENGTH)
    config = CompressConfig(ratio=ratio, method=get_method(method).name, calibration=calibration)

    screen.say(f"{MODEL}: remove {config.ratio:.0%} with {method}")
    with screen.quiet_libraries(), screen.progress() as report:
        report("load", 0, 1)
        loaded = screen.load(MODEL, LoadOptions(dtype="float32"))
        report("load", 1, 1)
        dense_text = continued(loaded)
        how: Any = {"evaluate": None, "eval_windows": EVAL_WINDOWS, "other_text": False}
        how |= {"say": screen.say, "progress": report}
        result = carry_out(Job(model=loaded.model, source=MODEL, tokenizer=loaded.tokenizer, config=config, **how))
        texts = {"prompt": PROMPT, "before": dense_text, "after": continued(loaded)}
    screen.say(*result_lines(result), f"({MODEL}: {catalogue.REGISTRY_MODELS[MODEL].note})")
    screen.say(f"before:     {texts['before']}", f"compressed: {texts['after']}")
    screen.keep_measurement(json, {**result.receipt, "texts": texts})
    screen.say_next(f"trisect compress {MODEL} -o small --ratio {ratio} --method {method}")


def continued(loaded: Any) -> str:
    """The prompt, and what a model writes after it, greedily."""
    ids = loaded.tokenizer(PROMPT, return_tensors="pt").input_ids
    greedy = {"do_sample": False, "num_beams": 1, "pad_token_id": loaded.tokenizer.eos_token_id}
    made = loaded.model.generate(ids, attention_mask=ids.new_ones(ids.shape), max_new_tokens=NEW_TOKENS, **greedy)
    return " ".join(loaded.tokenizer.decode(made[0], skip_special_tokens=True).split())


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
    check_names("verb", [verb], commands.verbs())
    if out.exists():
        raise TrisectError(f"{out} exists and may hold your own settings; name another file with -o.")
    recipe = verb == "compare"
    text = RECIPE.read_text(encoding="utf-8").replace("NAME", out.name) if recipe else commented_options(verb, out)
    files.atomic_write_text(out, text)
    screen.say(f"Saved to {out}")
    screen.say_next(f"edit it, then trisect {verb} {'' if recipe else '--config '}{screen.quoted(out)}")


def commented_options(verb: str, out: Path) -> str:
    """The text of a file of options: those with a default as they are, the others as comments to fill in."""
    command: Any = typer.main.get_command(commands.build_app())
    command = command.commands[verb]
    text = f"""# Options of `trisect {verb}`: {" ".join(command.help.split())}
# Run it with: trisect {verb} --config {out.name}
# What is typed on the command line wins over this file; lines left out have their default.
"""
    for key, parameter in by_key(command.params).items():
        needed = " Needed, here or on the command line." if parameter.required else ""
        kind = "true|false" if is_flag(parameter) else parameter.metavar
        about = f"{parameter.help}{needed}" + (f" [{kind.strip('[]')}]" if kind else "")
        comment = textwrap.fill(" ".join(about.split()), WIDTH, initial_indent="# ", subsequent_indent="# ")
        default = parameter.default
        line = f"# {key}: [...]" if takes_many(parameter) else f"# {key}: ..."
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
    from trisect.serve import NOT_IN_VLLM

    rows: list[tuple[str, ...]] = []
    for name, family in sorted(models.FAMILIES.items()):
        experts = "no" if family.experts is None else "yes"
        stock = "no" if no_stock_form(family) is not None else "yes" if family.norms is None else "yes, QK whole"
        known = ARCHITECTURES.get(name)
        gguf = "no" if known is None else "yes, QK whole" if known.halved else stock
        ov = "channels" if family.output_gate else "yes" if family.value_norm is None else "whole behind a norm"
        vllm = "plugin" if name not in NOT_IN_VLLM else "no" if stock == "no" else "portable"
        rows.append((name, _qk(family), ov, "yes", experts, stock, gguf, vllm))
    inside = ("as the text model inside", "", "", "")
    return rows + [(name, *inside, "no", "no", "no") for name in sorted(models.WRAPPERS)]


def _qk(family: Any) -> str:
    """How queries and keys are narrowed."""
    if family.rotary is None or family.latent is not None:
        return "SVD" if family.latent is None else "SVD, rotated channels whole"
    if family.norms is None:
        return "pairs, folds"
    return "pairs, folds; whole behind a LayerNorm" if family.norm_centred else "pairs"


def entries(kind: str) -> list[tuple[str, str]]:
    """Names of one kind, each with one line about it."""
    from trisect.methods import METHODS, a3plus

    return {
        "methods": [(name, method.summary) for name, method in METHODS.items()],
        "pieces": list(a3plus.PIECES.items()),
        "data": data.list_sources(),
        "models": [(name, entry.description) for name, entry in catalogue.REGISTRY_MODELS.items()],
    }[kind]


class Finding(NamedTuple):
    """One line of doctor's table: `state` is ok, note or problem, `fix` is what to type or do."""

    subject: str
    state: str
    says: str
    fix: str = ""


@verb("Start here")
def doctor(json: Json = None) -> None:
    """Check packages, devices, the hub and one tiny run; say what to fix.

    Check everything: trisect doctor
    Only what needs a hand, and all of it as a file: trisect doctor --quiet --json doctor.json
    """
    checks = (check_packages, check_devices, check_hub, check_run)
    findings: list[Finding] = []
    with screen.quiet_libraries(), screen.progress() as report:
        for done, check in enumerate(checks, start=1):
            findings += check()
            report("checks", done, len(checks))
    shown = [entry for entry in findings if entry.state != "ok" or not screen.running().quiet]
    screen.say_table(("", "state", "found", "what to do"), shown, row_styles=[STYLES[e.state] for e in shown])
    problems = [entry.subject for entry in findings if entry.state == "problem"]
    screen.keep_measurement(json, {"problems": len(problems), "findings": [entry._asdict() for entry in findings]})
    if problems:
        screen.say(f"{len(problems)} to fix: {', '.join(problems)}")
        raise typer.Exit(code=1)
    screen.say("No problem was found.")
    screen.say_next("trisect demo")


def requirements() -> list[str]:
    """What the installed package asks for; nothing where it runs from source."""
    try:
        return metadata("trisect").get_all("Requires-Dist") or []
    except PackageNotFoundError:
        return []


def check_packages() -> Iterator[Finding]:
    """Every requirement in the package's own metadata; those of its extras may be missing."""
    from packaging.requirements import Requirement

    yield Finding("Python", "ok", platform.python_version())
    for one in map(Requirement, requirements()):
        found, extra = receipt.package_version(one.name), "extra" in str(one.marker)
        if one.marker is not None and not extra and not one.marker.evaluate():
            continue  # of another system
        says, state = found or "not installed", "note" if extra and found is None else "problem"
        if found is not None and one.specifier.contains(found, prereleases=True):
            yield Finding(one.name, "ok", found)
        else:
            fix = f'pip install "{one.name}{one.specifier}"'
            yield Finding(one.name, state, f"{says}; trisect needs {one.specifier or 'any version'}", fix)


def check_devices() -> Iterator[Finding]:
    """torch's build, and the free memory of every device."""
    import psutil
    import torch

    built = torch.version.cuda or torch.version.hip
    blind = built is not None and not torch.cuda.is_available()
    fix = "it sees no GPU: compare the driver in `nvidia-smi` with this version" if blind else ""
    yield Finding("torch build", "note" if fix else "ok", f"{torch.__version__}, {built or 'CPU only'}", fix)
    memory = psutil.virtual_memory()
    devices = {"cpu": (platform.machine(), memory.available, memory.total)}
    for index in range(torch.cuda.device_count()):
        devices[f"cuda:{index}"] = (torch.cuda.get_device_name(index), *torch.cuda.mem_get_info(index))
    for device, (name, free, total) in devices.items():
        yield Finding(device, "ok", f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")


def check_hub() -> Iterator[Finding]:
    """Whether models, texts and tasks can come from the hub; everything else works without."""
    from trisect.data.read import hub_answers

    fix = "check the connection and HF_HUB_OFFLINE, or give models and texts as files"
    yield Finding("hub", "ok", "answers") if hub_answers() else Finding("hub", "note", "does not answer", fix)


def check_run() -> Iterator[Finding]:
    """A tiny random model, compressed with the default method on each kind of device."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from trisect import compress

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 32}
    tiny = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, bos_token_id=1, eos_token_id=2)
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model, ids = LlamaForCausalLM(tiny).eval().to(device), torch.randint(64, (8, 16))
            before, good = model.num_parameters(), False
            try:
                model = compress(model, 0.5, calibration=ids)
                says = f"a random model went from {before:,} to {model.num_parameters():,} parameters"
                good = bool(model(ids.to(device)).logits.isfinite().all()) and model.num_parameters() < before
            # Whatever goes wrong here is what a user would meet in a real run; the table has to name it.
            except Exception as error:
                says = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        fix = "" if good else "run again with --verbose, and report what it says if the lines above are all ok"
        yield Finding(f"self-check on {device}", "ok" if good else "problem", says, fix)
