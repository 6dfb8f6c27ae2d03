"""Run by torchrun: every process compresses, and writes what it has."""

import os
import sys

from safetensors.torch import save_file
from scale_runs import TOKENS, config

from tiny_models import tiny
from trisect import workers
from trisect.pipeline import compress

with workers.joined("cpu"):
    for method in sys.argv[2:]:
        result = compress(tiny("llama-gqa"), config(method), tokens=TOKENS)
        tensors = {name: tensor.contiguous() for name, tensor in result.model.state_dict().items()}
        save_file(tensors, f"{sys.argv[1]}/{method}-{os.environ['RANK']}.safetensors")
