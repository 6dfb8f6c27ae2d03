"""One of several processes that compress together: each writes what it has."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from scale_runs import TOKENS, config

from tiny_models import tiny
from trisect.pipeline.run import compress
from trisect.support import distributed


def late(meet: Callable[..., Any]) -> Callable[..., Any]:
    """The second process leaves a meeting a moment after the first, which has then written more files."""

    def met(*values: Any) -> Any:
        found = meet(*values)
        time.sleep(0.2 * distributed.rank())
        return found

    return met


def take_part(rank: int, count: int, port: int, folder: Path, methods: Sequence[str]) -> None:
    """Compress in a process with the variables that torchrun would set."""
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in given.items()})
    distributed.broadcast, distributed.barrier = late(distributed.broadcast), late(distributed.barrier)
    with distributed.process_group("cpu"):
        for method in methods:
            result = compress(tiny("llama-gqa"), config(method), tokens=TOKENS, work=folder / f"{method}.unfinished")
            tensors = {name: tensor.contiguous() for name, tensor in result.model.state_dict().items()}
            save_file(tensors, folder / f"{method}-{rank}.safetensors")
