"""`trisect doctor`: whether this installation works, and what to do where it does not."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import NamedTuple

import typer

from trisect.commands import _screen as screen
from trisect.commands._options import Json, verb
from trisect.errors import TrisectError
from trisect.support.receipt import package_version, usable_cores

STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}
LITTLE = 2 * 10**9  # bytes of free disk: less does not hold a fetched model and what is made of it


class Finding(NamedTuple):
    """One line of the table: `state` is ok, note or problem, `fix` is what to type or do."""

    subject: str
    state: str
    says: str
    fix: str = ""


def note(subject: str, says: str, fix: str = "", *, state: str = "note") -> Finding:
    """A finding: ok, unless there is something to fix."""
    return Finding(subject, state if fix else "ok", says, fix)


problem = partial(note, state="problem")


@verb("Start here")
def run(json: Json = None) -> None:
    """Check Python, packages, devices, folders, the hub and one tiny run; say what to fix.

    Check everything: trisect doctor
    Only what needs a hand, and all of it as a file: trisect doctor --quiet --json doctor.json
    """
    checks = (check_python, check_packages, check_devices, check_folders, check_hub, check_run)
    findings: list[Finding] = []
    with screen.quiet_libraries(), screen.progress() as report:
        for done, check in enumerate(checks, start=1):
            findings += check()
            report("checks", done, len(checks))
    shown = [entry for entry in findings if entry.state != "ok" or not screen.running().quiet]
    styles = [STYLES[entry.state] for entry in shown]
    screen.say_table(("", "state", "found", "what to do"), shown, row_styles=styles)
    problems = [entry.subject for entry in findings if entry.state == "problem"]
    screen.keep_measurement(json, {"problems": len(problems), "findings": [entry._asdict() for entry in findings]})
    if problems:
        screen.say(f"{len(problems)} to fix: {', '.join(problems)}")
        raise typer.Exit(code=1)
    screen.say("No problem was found.")
    screen.say_next("trisect demo")


def check_python() -> Iterator[Finding]:
    """The interpreter, against what the package requires."""
    from packaging.specifiers import SpecifierSet

    found, wanted = platform.python_version(), SpecifierSet(next(iter(_metadata("Requires-Python")), ""))
    fix = "" if wanted.contains(found, prereleases=True) else f"make an environment with Python {wanted}"
    yield problem("Python", f"{found} at {sys.executable}", fix)


def check_packages() -> Iterator[Finding]:
    """Every requirement in the package's own metadata, those of its extras by the extra's name."""
    from packaging.requirements import Requirement

    requirements = [Requirement(line) for line in _metadata("Requires-Dist")]
    if not requirements:
        says = "runs from source without being installed, so its requirements are not known"
        yield note("trisect", says, "pip install -e . in the folder with pyproject.toml")
        return
    yield note("trisect", package_version("trisect") or "")
    for extra in ("", *_metadata("Provides-Extra")):
        command = f'pip install "trisect[{extra}]"' if extra else "pip install trisect"
        for one in requirements:
            wanted = [name for name in ("", extra) if one.marker is None or one.marker.evaluate({"extra": name})]
            if wanted[:1] != [extra]:
                continue
            subject, found = f"{one.name} [{extra}]" if extra else one.name, package_version(one.name)
            if found is None:
                yield (note if extra else problem)(subject, "not installed", command)
            elif one.specifier.contains(found, prereleases=True):
                yield note(subject, found)
            else:
                yield problem(subject, f"{found}, but trisect needs {one.specifier}", f"{command} --upgrade")


def check_devices() -> Iterator[Finding]:
    """torch's build, its threads, and the free memory of every device."""
    import psutil
    import torch

    built = next((f"{k} {v}" for k, v in (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip)) if v), "CPU only")
    blind = built != "CPU only" and not torch.cuda.is_available()
    fix = "it sees no GPU: compare the driver in `nvidia-smi` with this CUDA version" if blind else ""
    yield note("torch build", f"{torch.__version__}, {built}", fix)
    threads, cores = torch.get_num_threads(), usable_cores()
    fix = f"export OMP_NUM_THREADS={cores}" if threads > cores else ""
    yield note("threads", f"torch uses {threads} for {cores} cores", fix)
    memory = psutil.virtual_memory()
    devices = {"cpu": (platform.machine(), memory.available, memory.total)}
    for index in range(torch.cuda.device_count()):
        devices[f"cuda:{index}"] = (torch.cuda.get_device_name(index), *torch.cuda.mem_get_info(index))
    for device, (name, free, total) in devices.items():
        yield note(device, f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free")


def check_folders() -> Iterator[Finding]:
    """The folder of fetched models, and that of local datasets where one is set."""
    from trisect.data.catalogue import cache_folder
    from trisect.support.files import check_writable, existing_parent

    folder = cache_folder() / "models"
    try:
        check_writable(folder)
        free = shutil.disk_usage(existing_parent(folder)).free
        fix = "make room, or set TRISECT_CACHE to a larger disk" if free < LITTLE else ""
        yield note("cache folder", f"{folder.parent}, {free / 1e9:.1f} GB free", fix)
    except TrisectError as error:
        yield problem("cache folder", str(error), "set TRISECT_CACHE to a folder that can be written")
    if data := os.environ.get("TRISECT_DATA"):
        there = Path(data).expanduser().is_dir()
        fix = "" if there else "set TRISECT_DATA to the right folder, or unset it"
        yield problem("TRISECT_DATA", data if there else f"no folder {data}", fix)


def check_hub() -> Iterator[Finding]:
    """Whether models, texts and tasks can come from the hub; everything else works without."""
    from huggingface_hub import constants

    from trisect.data.read import hub_answers

    if hub_answers():
        yield note("hub", f"{constants.ENDPOINT} answers")
    else:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} does not answer"
        yield note("hub", why, "check the connection, or give models and texts as files")


def check_run() -> Iterator[Finding]:
    """A tiny random model, compressed with the default method on each kind of device."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import trisect

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 32}
    tiny = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, bos_token_id=1, eos_token_id=2)
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        fix = "run again with --verbose, and report what it says if the lines above are all ok"
        try:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                model, ids = LlamaForCausalLM(tiny).eval().to(device), torch.randint(64, (8, 16))
                before = model.num_parameters()
                model = trisect.compress(model, 0.5, calibration=ids)
                finite, after = bool(model(ids.to(device)).logits.isfinite().all()), model.num_parameters()
            says = f"a random model went from {before:,} to {after:,} parameters"
            says += f", its logits are {'' if finite else 'not '}finite"
            fix = "" if finite and after < before else fix
        # Whatever goes wrong here is what a user would meet in a real run; the table has to name it.
        except Exception as error:
            says = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        yield problem(f"self-check on {device}", says, fix)


def _metadata(field: str) -> list[str]:
    try:
        return [str(value) for value in metadata("trisect").get_all(field) or []]
    except PackageNotFoundError:
        return []
