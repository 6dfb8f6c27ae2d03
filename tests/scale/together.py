"""Run by torchrun: every process compresses, and writes what it has."""

import os
import sys
import time
from pathlib import Path

from safetensors.torch import save_file
from scale_runs import TOKENS, config

from tiny_models import tiny
from trisect import workers
from trisect.pipeline import compress

told = workers.told


def told_late(value: object) -> object:
    """The second process does everything a moment after the first, which has then written more files."""
    found = told(value)
    time.sleep(0.5 * workers.rank())
    return found


workers.told = told_late
with workers.joined("cpu"):
    for method in sys.argv[2:]:
        work = Path(sys.argv[1]) / f"{method}.unfinished"
        result = compress(tiny("llama-gqa"), config(method), tokens=TOKENS, work=work)
        tensors = {name: tensor.contiguous() for name, tensor in result.model.state_dict().items()}
        save_file(tensors, f"{sys.argv[1]}/{method}-{os.environ['RANK']}.safetensors")
