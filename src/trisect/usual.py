"""How long calibration windows are and how many, where nobody says: by model and device, not by a clock."""

from typing import Any

from trisect.evaluate.likelihood import stated_contexts

USUAL_LENGTH = 2048
FEWEST, MOST = 16, 256
CPU_WORK = 9e12
"""Tokens times parameters that a CPU is given by default: SmolLM2-135M reads 32 windows of 2048."""

WRITTEN_ON_CPU = 16_384
"""Tokens of synthetic text that a CPU writes by default: writing is slower than reading."""


def usual_length(model: Any) -> int:
    """2048 tokens, or the model's context where that is shorter."""
    return min([USUAL_LENGTH, *stated_contexts(model)])


def usual_windows(model: Any, *, length: int) -> int:
    """256 windows on a GPU; on a CPU as many as keep its work within bounds."""
    if next(model.parameters()).device.type == "cuda":
        return MOST
    return windows_on_cpu(sum(parameter.numel() for parameter in model.parameters()), length=length)


def usual_written(model: Any, *, windows: int, length: int) -> int:
    """Windows of synthetic text where that many are usual of others."""
    if next(model.parameters()).device.type == "cuda":
        return windows
    return min(windows, max(FEWEST, WRITTEN_ON_CPU // length))


def windows_on_cpu(parameters: int, *, length: int) -> int:
    """Between 16 and 256, fewer the larger the model is."""
    return max(FEWEST, min(MOST, int(CPU_WORK / (parameters * length))))
