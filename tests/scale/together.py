"""Run by torchrun: every process compresses, and writes what it has."""

import os
import sys
import time
from collections.abc import Callable
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
        time.sleep(0.5 * distributed.rank())
        return found

    return met


distributed.broadcast, distributed.barrier = late(distributed.broadcast), late(distributed.barrier)
with distributed.process_group("cpu"):
    for method in sys.argv[2:]:
        work = Path(sys.argv[1]) / f"{method}.unfinished"
        result = compress(tiny("llama-gqa"), config(method), tokens=TOKENS, work=work)
        tensors = {name: tensor.contiguous() for name, tensor in result.model.state_dict().items()}
        save_file(tensors, f"{sys.argv[1]}/{method}-{os.environ['RANK']}.safetensors")
