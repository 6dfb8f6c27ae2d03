"""What compressing costs at true shapes: random weights in main memory, layers streamed to one GPU.

    python experiments/scale_shapes.py --device cuda                 # every case below, one receipt each
    python experiments/scale_shapes.py --device cuda 70b-a3 70b-a3+  # some of them

Random weights are right for time and memory and say nothing about accuracy. A case of a few layers says what
the whole model would take, since layers cost the same. On a GPU, seconds are those on the wall and the peak
is the device's; on a CPU (cost_growth.py) both are the process's, the peak counted from before the start.
"""

import argparse
import gc
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from tables import ROOT, keep_row

from trisect.config import CalibrationConfig, CompressConfig
from trisect.data import tokens_from_tensor
from trisect.models.streamed import LayerStore, constant, empty, layers_of, move_rest
from trisect.pipeline.run import compress
from trisect.support.receipt import build_receipt

sys.path.append(str(ROOT / "benchmarks"))
from random_models import fill  # noqa: E402

SHAPES: dict[str, dict[str, int]] = {
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "llama-2-7b": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
    },
    "llama-3.1-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: str
    method: str
    layers: int | None = None
    """Layers that are built; None means all."""
    states: str = "auto"
    """Where hidden states wait: those of the largest shape in main memory, as a smaller GPU would need."""


CASES = {
    "8b-a3": Case(shape="llama-3.1-8b", method="a3"),
    "8b-a3+": Case(shape="llama-3.1-8b", method="a3+"),
    "7b-a3": Case(shape="llama-2-7b", method="a3"),
    "70b-a3": Case(shape="llama-3.1-70b", method="a3", layers=2, states="host"),
    "70b-a3+": Case(shape="llama-3.1-70b", method="a3+", layers=2, states="host"),
}


class DeviceMeter:
    """Seconds on the wall and the device's peak memory since it was made."""

    def __init__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.began = time.perf_counter()

    def read(self) -> tuple[float, int]:
        torch.cuda.synchronize()
        return time.perf_counter() - self.began, torch.cuda.max_memory_allocated()


class ProcessMeter:
    """Seconds of this process on all cores, and what its memory rose by: other work does not count."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        self.resident = _resident("VmRSS")
        self.began = time.process_time()

    def read(self) -> tuple[float, int]:
        return time.process_time() - self.began, _resident("VmHWM") - self.resident


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def build(case: Case, *, device: str) -> Any:
    """The model with its layers in main memory; the numbers are drawn on the device, which is faster."""
    sizes = dict(SHAPES[case.shape])
    sizes["num_hidden_layers"] = case.layers or sizes["num_hidden_layers"]
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=4096)
    with init_empty_weights(include_buffers=False):
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    fill(model, device=device, generator=torch.Generator(device).manual_seed(0))
    return hosted(model.eval().requires_grad_(False), device=device)


def hosted(model: Any, *, device: str) -> Any:
    """The model with its layers in main memory, run layer by layer on a device it does not fit on."""
    layers = layers_of(model)
    sources = [constant(layer.state_dict()) for layer in layers]
    for layer in layers:
        empty(layer)
    move_rest(model, device)
    model.layer_store = LayerStore(model, sources, device=device)
    return model


def measure(name: str, *, device: str, samples: int, length: int) -> dict[str, Any]:
    case = CASES[name]
    whole = SHAPES[case.shape]["num_hidden_layers"]
    model = build(case, device=device)
    ids = torch.randint(0, model.config.vocab_size, (samples, length), generator=torch.Generator().manual_seed(0))
    config = CompressConfig(ratio=0.25, method=case.method, calibration=CalibrationConfig(states=case.states))
    meter = DeviceMeter() if torch.device(device).type == "cuda" else ProcessMeter()

    def say(stage: str, done: int, total: int) -> None:
        print(f"{name}: {stage} {done} of {total}", flush=True)

    result = compress(model, config, tokens=tokens_from_tensor(ids, "random ids"), progress=say)
    seconds, peak = meter.read()
    layers = case.layers or whole
    receipt = build_receipt(
        config.to_dict(), seed=0, token_hash=tokens_from_tensor(ids).hash, timings=result.receipt["timings"]
    )
    del model, result
    gc.collect()
    torch.cuda.empty_cache()
    return {
        "case": name,
        "shape": case.shape,
        "method": case.method,
        "layers": layers,
        "tokens": samples * length,
        "seconds": seconds,
        "seconds_per_layer": seconds / layers,
        "whole_model_seconds": seconds / layers * whole,
        "peak_bytes": peak,
        "receipt": receipt,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    options = parser.parse_args()
    for name in options.cases:
        found = measure(name, device=options.device, samples=options.samples, length=options.length)
        keep_row("scale-shapes.json", {"name": name, **found})
        stages = {stage: round(value, 1) for stage, value in found["receipt"]["timings"].items()}
        peak = found["peak_bytes"] / 1e9
        print(f"{name}: {found['seconds']:.1f} s, peak {peak:.1f} GB, {stages}", flush=True)


if __name__ == "__main__":
    main()
