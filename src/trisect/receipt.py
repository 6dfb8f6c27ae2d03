"""The receipt: everything needed to run the same thing again and to doubt the result."""

import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from trisect.files import write_json

PACKAGES = ("torch", "transformers", "safetensors", "tokenizers", "numpy")


def build_receipt(
    recipe: Mapping[str, Any],
    *,
    seed: int,
    token_hash: str | None,
    timings: Mapping[str, float],
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


def package_version(name: str) -> str | None:
    """The installed version of a package, None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def package_commit() -> str | None:
    """The git commit this package runs from, "-dirty" if changed; None outside a checkout."""
    if "TRISECT_COMMIT" in os.environ:  # a copy of the files, without their history
        return os.environ["TRISECT_COMMIT"]
    # A virtual environment may lie inside some other repository: ask whether this file is tracked.
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def hardware() -> dict[str, Any]:
    """The processor, its usable cores, and the GPU if there is one."""
    import torch

    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git(*arguments: str) -> str | None:
    # Optional locks off: reading a commit must not disturb a git command that runs beside us.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        answer = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


__all__ = ["build_receipt", "hardware", "package_commit", "package_version", "write_json"]
