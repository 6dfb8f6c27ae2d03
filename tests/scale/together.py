"""One of several processes that compress together: each writes what it has."""

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from scale_runs import TOKENS, config

from tiny_models import tiny
from trisect.pipeline import run
from trisect.support import distributed

EXPERT = ("expert", "shared.")


def late(meet: Callable[..., Any]) -> Callable[..., Any]:
    """The second process leaves a meeting a moment after the first, which has then written more files."""

    def met(*values: Any) -> Any:
        found = meet(*values)
        time.sleep(0.2 * distributed.rank())
        return found

    return met


def noted(solve: Callable[..., Any], matrices: set[str]) -> Callable[..., Any]:
    """Notes which experts' matrices a process is given."""

    def solved(method: Any, component: str, part: Any, moments: Any, **given: Any) -> Any:
        matrices.update(name for name, value in moments.items() if name.startswith(EXPERT) and value.ndim > 1)
        return solve(method, component, part, moments, **given)

    return solved


def take_part(rank: int, count: int, port: int, folder: Path, cases: Sequence[tuple[str, str]]) -> None:
    """Compress models by methods, in a process with the variables that torchrun would set."""
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in given.items()})
    distributed.broadcast, distributed.barrier = late(distributed.broadcast), late(distributed.barrier)
    solve = run.solve
    with distributed.process_group("cpu"):
        for model, method in cases:
            matrices: set[str] = set()
            run.solve = noted(solve, matrices)
            work = folder / f"{model}-{method}.unfinished"
            result = run.compress(tiny(model), config(method), tokens=TOKENS, work=work)
            tensors = {name: tensor.contiguous() for name, tensor in result.model.state_dict().items()}
            save_file(tensors, folder / f"{model}-{method}-{rank}.safetensors")
            (folder / f"{model}-{method}-{rank}.json").write_text(json.dumps(sorted(matrices)))
