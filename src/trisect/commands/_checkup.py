"""What `trisect doctor` finds: Python, packages, devices, and attention backends."""

import os
import platform
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, metadata
from typing import Any

from trisect.support.receipt import package_version, usable_cores

OK, NOTE, PROBLEM = "ok", "note", "problem"
GIB = 1 << 30
WIDTHS = {"equal widths": (64, 64), "QK 64 and V 48": (64, 48)}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the table; `fix` is what to type or do."""

    subject: str
    state: str
    says: str
    fix: str = ""


def check_python() -> Iterator[Finding]:
    """The interpreter, against what the package asks for."""
    from packaging.specifiers import SpecifierSet

    found = platform.python_version()
    asked = _metadata("Requires-Python")
    wanted = SpecifierSet(asked[0] if asked else "")
    says = f"{found} at {sys.executable}"
    if wanted.contains(found, prereleases=True):
        yield Finding(subject="Python", state=OK, says=says)
    else:
        fix = f"make an environment with Python {wanted}"
        yield Finding(subject="Python", state=PROBLEM, says=f"{says}; trisect needs {wanted}", fix=fix)


def check_packages() -> Iterator[Finding]:
    """Every requirement in the package's own metadata, those of its extras by the extra's name."""
    from packaging.requirements import Requirement

    lines = _metadata("Requires-Dist")
    if not lines:
        yield Finding(
            subject="trisect",
            state=NOTE,
            says="runs from source without being installed, so its requirements are not known",
            fix="pip install -e . in the folder with pyproject.toml",
        )
        return
    yield Finding(subject="trisect", state=OK, says=package_version("trisect") or "")
    requirements = [Requirement(line) for line in lines]
    for extra in ("", *_metadata("Provides-Extra")):
        for requirement in requirements:
            if _belongs(requirement, extra):
                yield _package(requirement, extra)


def check_torch(devices: list[str]) -> Iterator[Finding]:
    """The build, and memory and threads of every device."""
    import psutil
    import torch

    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    built = f"ROCm {torch.version.hip}" if torch.version.hip else built
    blind = bool(torch.version.cuda or torch.version.hip) and not torch.cuda.is_available()
    yield Finding(
        subject="torch build",
        state=NOTE if blind else OK,
        says=f"{torch.__version__}, {built}" + (", but it sees no GPU" if blind else ""),
        fix="compare the driver in `nvidia-smi` with this CUDA version" if blind else "",
    )
    for device in devices:
        if device == "cpu":
            free, total = psutil.virtual_memory().available, psutil.virtual_memory().total
            name = platform.machine()
        else:
            free, total = torch.cuda.mem_get_info(device)
            name = torch.cuda.get_device_name(device)
        says = f"{name}, {free / GIB:.1f} of {total / GIB:.1f} GiB free"
        yield Finding(subject=f"memory of {device}", state=OK, says=says)
    yield _threads(torch.get_num_threads())


def check_attention(devices: list[str]) -> Iterator[Finding]:
    """Which of torch's attention backends run on each device, for equal and for unequal widths."""
    for device in devices:
        usable = {kind: usable_backends(device, *widths) for kind, widths in WIDTHS.items()}
        equal, unequal = usable.values()
        says = "; ".join(f"{kind}: {', '.join(names) or 'none'}" for kind, names in usable.items())
        if unequal == ["math"] != equal:
            says += " (trisect pads such heads, docs/runtime.md)"
        state, fix = OK, ""
        if not equal or not unequal:
            state, fix = PROBLEM, "install torch anew: not even plain attention runs"
        elif equal == ["math"]:
            state, fix = NOTE, "attention will be slow: no fused kernel runs here"
        yield Finding(subject=f"SDPA on {device}", state=state, says=says, fix=fix)


def usable_backends(device: str, qk: int, vo: int) -> list[str]:
    """Backends that take one small call with these head widths, in the order torch names them."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    kinds = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }
    dtype = torch.float32 if device == "cpu" else torch.float16
    query, key = (torch.ones(1, 2, 16, qk, device=device, dtype=dtype) for _ in range(2))
    value = torch.ones(1, 2, 16, vo, device=device, dtype=dtype)
    found = []
    for name, backend in kinds.items():
        try:
            # torch says in warnings why a backend is out; that it is out is all we ask.
            with warnings.catch_warnings(), sdpa_kernel([backend]):
                warnings.simplefilter("ignore")
                answer = scaled_dot_product_attention(query, key, value, is_causal=True)
        except RuntimeError:
            continue
        if answer.isfinite().all():
            found.append(name)
    return found


def devices_here() -> list[str]:
    """The processor and every GPU."""
    import torch

    return ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]


def _package(requirement: Any, extra: str) -> Finding:
    subject = f"{requirement.name} [{extra}]" if extra else requirement.name
    command = f'pip install "trisect[{extra}]"' if extra else "pip install trisect"
    found = package_version(requirement.name)
    if found is None:
        state = NOTE if extra else PROBLEM
        return Finding(subject=subject, state=state, says="not installed", fix=command)
    if requirement.specifier.contains(found, prereleases=True):
        return Finding(subject=subject, state=OK, says=found)
    says = f"{found}, but trisect needs {requirement.specifier}"
    return Finding(subject=subject, state=PROBLEM, says=says, fix=f"{command} --upgrade")


def _belongs(requirement: Any, extra: str) -> bool:
    """Whether a requirement is asked for on this machine by this extra ("" for none), and only by it."""
    if requirement.marker is None:
        return extra == ""
    plain = bool(requirement.marker.evaluate({"extra": ""}))
    return plain if extra == "" else not plain and bool(requirement.marker.evaluate({"extra": extra}))


def _metadata(field: str) -> list[str]:
    try:
        return [str(value) for value in metadata("trisect").get_all(field) or []]
    except PackageNotFoundError:
        return []


def _threads(threads: int) -> Finding:
    cores = usable_cores()
    says = f"torch uses {threads} for {cores} cores"
    if threads > cores:
        fix = f"export OMP_NUM_THREADS={cores}"
        return Finding(subject="threads", state=NOTE, says=f"{says}: they get in each other's way", fix=fix)
    if 2 * threads < cores and "OMP_NUM_THREADS" in os.environ:
        fix = "unset OMP_NUM_THREADS to use them all"
        return Finding(subject="threads", state=NOTE, says=f"{says}: OMP_NUM_THREADS says so", fix=fix)
    return Finding(subject="threads", state=OK, says=says)
