"""A run on disk, so that it can go on: one safetensors file with all that the next step depends on."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trisect.errors import TrisectError
from trisect.files import new_file
from trisect.finetune.training import Training, random_state, set_random_state

RECORD = "trisect_tuning"
FORMAT = 1
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps for every parameter."""


def state_path(out: str | Path) -> Path:
    """Where the run that makes `out` keeps its state."""
    out = Path(out)
    return out.with_name(out.name + ".tuning.safetensors")


def save_state(path: Path, training: Training, identity: dict[str, Any], *, seconds: float) -> None:
    """Replace the file by one for the step that was just finished; readers see the old or the new one."""
    record = {
        "format": FORMAT,
        "step": training.step,
        "losses": training.losses,
        "seconds": seconds,
        "identity": identity,
    }
    with new_file(path) as partial:
        save_file(_tensors(training), partial, metadata={RECORD: json.dumps(record)})


def load_state(path: Path, training: Training, identity: dict[str, Any]) -> float:
    """Put a fresh run where the saved one was; returns the seconds that one had taken."""
    record, tensors = _read(path)
    _check_identity(path, record["identity"], identity)
    states = random_state(training.device)
    kinds = [f"optimizer/{kind}" for kind in MOMENTS] if record["step"] else []
    shapes = {
        f"{kind}/{name}": torch.Size() if kind == "optimizer/step" else parameter.shape
        for kind in ("adapter", *kinds)
        for name, parameter in training.parameters.items()
    } | {f"random/{kind}": state.shape for kind, state in states.items()}
    if {name: tensor.shape for name, tensor in tensors.items()} != shapes:
        raise _damaged(path, "its tensors are not those of this run")
    for name, parameter in training.parameters.items():
        parameter.data.copy_(tensors[f"adapter/{name}"])
        if kinds:
            training.optimizer.state[parameter] = _moments(name, tensors, parameter.device)
    set_random_state({kind: tensors[f"random/{kind}"] for kind in states}, training.device)
    training.step, training.losses = record["step"], record["losses"]
    return float(record["seconds"])


def _tensors(training: Training) -> dict[str, Tensor]:
    tensors = {f"adapter/{name}": p.detach() for name, p in training.parameters.items()}
    for name, parameter in training.parameters.items():
        for kind, value in training.optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer/{kind}/{name}"] = value
    for kind, state in random_state(training.device).items():
        tensors[f"random/{kind}"] = state
    return {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}


def _moments(name: str, tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """AdamW's state of one parameter; it counts its steps on the CPU wherever the parameter is."""
    found = {kind: tensors[f"optimizer/{kind}/{name}"] for kind in MOMENTS}
    return {kind: value if kind == "step" else value.to(device) for kind, value in found.items()}


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise TrisectError(f"There is nothing to resume: no {path}; leave --resume out to start.")
    try:
        with safe_open(path, framework="pt") as file:
            record = json.loads((file.metadata() or {}).get(RECORD, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
    except (OSError, ValueError, SafetensorError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise _damaged(path, f"it holds no tuning state of format {FORMAT}")
    return record, tensors


def _check_identity(path: Path, saved: dict[str, Any], identity: dict[str, Any]) -> None:
    """The run that goes on must be the one that stopped."""
    names = [name for name in {**saved, **identity} if saved.get(name) != identity.get(name)]
    if names:
        apart = "; ".join(f"{name} was {saved.get(name)!r}, is {identity.get(name)!r}" for name in names)
        raise TrisectError(
            f"{path} is of another run: {apart}. Give what was given then, or remove the file to start anew."
        )


def _damaged(path: Path, why: str) -> TrisectError:
    return TrisectError(f"{path} cannot be resumed from ({why}); remove it and start anew without --resume.")
