"""The receipt: what is needed to repeat a run and to check its result."""

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trisect.errors import TrisectError
from trisect.support.checks import read_json, shown

LONGEST_TEXT = 1000
PACKAGES = ("torch", "transformers", "safetensors", "tokenizers", "numpy")


def build_receipt(
    recipe: Mapping[str, Any], *, seed: int, token_hash: str | None, timings: Mapping[str, float]
) -> dict[str, Any]:
    """A JSON-ready record of a run: `recipe` is the configuration, `timings` seconds by stage."""
    return {
        "recipe": dict(recipe),
        "seed": seed,
        "token_hash": token_hash,
        "timings": {stage: round(seconds, 3) for stage, seconds in timings.items()},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "trisect": package_version("trisect"),
        "commit": package_commit(),
        "python": platform.python_version(),
        "versions": {name: package_version(name) for name in PACKAGES},
        "hardware": hardware(),
    }


def read_receipt(folder: str | Path) -> dict[str, Any]:
    """The receipt in a model's folder, empty where there is none; its parts are what their readers expect."""
    path = Path(folder) / "receipt.json"
    if not path.is_file():
        return {}
    receipt: dict[str, Any] = read_json(path)
    wrong = _wrong_part(receipt) if isinstance(receipt, dict) else "it is no mapping"
    if wrong:
        raise TrisectError(f"{path} is no receipt of trisect: {wrong}. Mend it or remove it.")
    return receipt


def measured_perplexities(record: Mapping[str, Any]) -> list[Any]:
    """Perplexity before and after, one entry per text; older records have one text."""
    return [row for row in record.get("perplexities") or [record.get("perplexity")] if row]


def _wrong_part(receipt: dict[str, Any]) -> str | None:
    """What is wrong with a receipt, if anything."""
    kinds = {
        **dict.fromkeys(("recipe", "timings", "versions", "hardware", "perplexity", "target"), dict),
        **dict.fromkeys(("date", "trisect", "commit", "python", "source", "model", "token_hash"), str),
        **dict.fromkeys(("tuning", "perplexities"), list),
    }
    for key, kind in kinds.items():
        value = receipt.get(key)
        if value is not None and (not isinstance(value, kind) or (kind is str and not _one_line(value))):
            return f"{key} is {shown(value)}"
    recipe, measured = receipt.get("recipe") or {}, measured_perplexities(receipt)
    if not isinstance(recipe.get("calibration") or {}, dict):
        return f"calibration is {shown(recipe['calibration'])}"
    texts = [value for value in recipe.values() if isinstance(value, str) and not _one_line(value)]
    if texts:
        return f"its recipe says {shown(texts[0])}"
    if not all(isinstance(row, dict) for row in measured):
        return f"perplexities are {shown(measured)}"
    for entry in (entry for row in measured for entry in row.values()):
        known = isinstance(entry, dict) and {"data", "windows", "length", "perplexity"} <= set(entry)
        if not known or type(entry["perplexity"]) not in (int, float):
            return f"perplexity is {shown(entry)}"
    return None


def _one_line(text: str) -> bool:
    """Receipts end up in tables of model cards."""
    return text.isprintable() and len(text) <= LONGEST_TEXT


@cache
def package_version(name: str) -> str | None:
    """The installed version of a package, None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def package_commit() -> str | None:
    """The git commit this package runs from, "-dirty" if changed; None outside a checkout."""
    # The variable is for a copy of the files, without their history.
    return os.environ.get("TRISECT_COMMIT") or _checkout()


@cache
def _checkout() -> str | None:
    """The commit when a process first needs it: later changes are not in the code that it runs."""
    # A virtual environment may lie inside some other repository: ask whether this file is tracked.
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def hardware() -> dict[str, Any]:
    """The processor, its usable cores, and the GPU if there is one."""
    import torch

    # Whether a GPU may round what float32 products are made of moves a figure's end.
    rounds = "" if torch.get_float32_matmul_precision() == "highest" else " with TF32 products"
    gpu = torch.cuda.get_device_name() + rounds if torch.cuda.is_available() else None
    # Cores that this process may use, which may be fewer than the machine has.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"cpu": _cpu_model(), "cores": cores, "gpu": gpu}


@cache
def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*: *(.*)$", cpuinfo.read_text() if cpuinfo.exists() else "", re.MULTILINE)
    return named[1].strip() if named else platform.processor() or platform.machine()


def _git(*arguments: str) -> str | None:
    # Optional locks off: reading a commit must not disturb a git command that runs beside us.
    how: Any = {"env": {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}, "capture_output": True, "text": True, "timeout": 10}
    try:
        answer = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, **how)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
