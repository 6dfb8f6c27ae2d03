"""What compressing costs at true shapes: random weights in main memory, layers streamed to one GPU.

    python experiments/scale_shapes.py --device cuda                 # every case below, one receipt each
    python experiments/scale_shapes.py --device cuda 70b-a3 70b-a3+  # some of them
    python experiments/scale_shapes.py --device cuda --samples 32 --speed 30b-a3b-a3+ gpt-oss-20b-a3+

Random weights are right for time and memory and say nothing about accuracy. A case of a few layers says what
the whole model would take, since layers cost the same. `--speed` also times prefill and decoding of the built
layers, dense and narrow, with transformers' own experts: a decoding step is one CUDA graph. On a GPU, seconds
are those on the wall and the peak is the device's; on a CPU (cost_growth.py) both are the process's, the peak
counted from before the start.
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
from trisect.models.streamed import LayerStore, constant, empty, move_rest
from trisect.models.view import layer_views
from trisect.pipeline.run import compress
from trisect.support.receipt import build_receipt

sys.path.append(str(ROOT / "benchmarks"))
from random_models import fill  # noqa: E402

KINDS = {"qwen3-30b-a3b": "Qwen3Moe", "gpt-oss-20b": "GptOss"}
"""Shapes that are not Llama's, by the names of their classes."""
SHAPES: dict[str, dict[str, int]] = {
    "qwen3-30b-a3b": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    "gpt-oss-20b": {
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 201088,
        "sliding_window": 4096,  # longer than the texts here, so that one mask serves all layers
    },
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    },
    "llama-3.2-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
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
    "1b-a3": Case(shape="llama-3.2-1b", method="a3"),
    "1b-a3+": Case(shape="llama-3.2-1b", method="a3+"),
    "8b-a3": Case(shape="llama-3.1-8b", method="a3"),
    "8b-a3+": Case(shape="llama-3.1-8b", method="a3+"),
    "7b-a3": Case(shape="llama-2-7b", method="a3"),
    "70b-a3": Case(shape="llama-3.1-70b", method="a3", layers=2, states="host"),
    "70b-a3+": Case(shape="llama-3.1-70b", method="a3+", layers=2, states="host"),
    "30b-a3b-a3": Case(shape="qwen3-30b-a3b", method="a3", layers=2),
    "30b-a3b-a3+": Case(shape="qwen3-30b-a3b", method="a3+", layers=2),
    "gpt-oss-20b-a3": Case(shape="gpt-oss-20b", method="a3", layers=2),
    "gpt-oss-20b-a3+": Case(shape="gpt-oss-20b", method="a3+", layers=2),
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


def build(case: Case, *, device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model with its layers in main memory; the numbers are drawn on the device, which is faster."""
    sizes = dict(SHAPES[case.shape])
    sizes["num_hidden_layers"] = case.layers or sizes["num_hidden_layers"]
    kind = KINDS.get(case.shape, "Llama")
    config = getattr(transformers, f"{kind}Config")(**sizes, max_position_embeddings=4096)
    with init_empty_weights(include_buffers=False):
        model = getattr(transformers, f"{kind}ForCausalLM")._from_config(config, dtype=dtype)
    fill(model, device=device, generator=torch.Generator(device).manual_seed(0))
    return hosted(model.eval().requires_grad_(False), device=device)


def hosted(model: Any, *, device: str) -> Any:
    """The model with its layers in main memory, run layer by layer on a device it does not fit on."""
    layers = [view.layer for view in layer_views(model)]
    sources = [constant(layer.state_dict()) for layer in layers]
    for layer in layers:
        empty(layer)
    move_rest(model, device)
    model.layer_store = LayerStore(model, sources, device=device)
    return model


@torch.no_grad()
def speeds(model: Any) -> dict[str, float]:
    """Milliseconds of the built layers: a prompt of 2048 tokens, and one step behind 1024 tokens by batch."""
    store = model.layer_store
    for number in range(len(store.layers)):
        store.bring(number)
    ids = torch.zeros(1, 2048, dtype=torch.int64, device=store.device)
    ids.random_(0, model.config.vocab_size, generator=torch.Generator(store.device).manual_seed(0))
    model.set_experts_implementation("grouped_mm")
    found = {"prefill": median_ms(lambda: model.model(ids, use_cache=False))}
    for batch in (1, 8, 32):
        found[f"decode-{batch}"] = step_ms(model, ids[0, :batch].unsqueeze(-1))
    for number in range(len(store.layers)):
        store.release(number)
    return found


def step_ms(model: Any, token: torch.Tensor) -> float:
    """One decoding step as a CUDA graph, behind a static cache."""
    cache = transformers.StaticCache(config=model.config, max_cache_len=1088)
    prompt = token.expand(-1, 1024)
    model.set_experts_implementation("grouped_mm")
    model.model(prompt, past_key_values=cache, use_cache=True)
    place = torch.full_like(token, 1024)
    # Batched products copy every token's experts: right for one token, too much for a prompt.
    model.set_experts_implementation("batched_mm" if len(token) == 1 else "grouped_mm")

    # Masks are made beforehand: eager attention (gpt-oss) would make them inside the graph.
    mask = torch.zeros(len(token), 1, 1, 1088, dtype=torch.bfloat16, device=token.device)
    mask[..., 1025:] = torch.finfo(mask.dtype).min
    kinds = set(getattr(model.config, "layer_types", None) or ())
    masks = dict.fromkeys(kinds, mask) if len(kinds) > 1 else mask

    def step() -> Any:
        return model.model(token, past_key_values=cache, position_ids=place, attention_mask=masks, use_cache=True)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return median_ms(graph.replay)


def median_ms(run: Any, *, times: int = 20) -> float:
    for _ in range(3):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False))[times // 2]


def measure(name: str, *, device: str, samples: int, length: int, speed: bool) -> dict[str, Any]:
    case = CASES[name]
    whole = SHAPES[case.shape]["num_hidden_layers"]
    model = build(case, device=device)
    dense = speeds(model) if speed else {}
    ids = torch.randint(0, model.config.vocab_size, (samples, length), generator=torch.Generator().manual_seed(0))
    config = CompressConfig(ratio=0.25, method=case.method, calibration=CalibrationConfig(states=case.states))
    meter = DeviceMeter() if torch.device(device).type == "cuda" else ProcessMeter()

    def say(stage: str, done: int, total: int) -> None:
        print(f"{name}: {stage} {done} of {total}", flush=True)

    result = compress(model, config, tokens=tokens_from_tensor(ids, "random ids"), progress=say)
    seconds, peak = meter.read()
    layers = case.layers or whole
    narrow = speeds(model) if speed else {}
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
        **({"milliseconds": {"dense": dense, "narrow": narrow}} if speed else {}),
        "receipt": receipt,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--speed", action="store_true")
    options = parser.parse_args()
    for name in options.cases:
        found = measure(
            name, device=options.device, samples=options.samples, length=options.length, speed=options.speed
        )
        keep_row("scale-shapes.json", {"name": name, **found})
        stages = {stage: round(value, 1) for stage, value in found["receipt"]["timings"].items()}
        peak = found["peak_bytes"] / 1e9
        print(f"{name}: {found['seconds']:.1f} s, peak {peak:.1f} GB, {stages}", flush=True)
        print(found.get("milliseconds", ""), flush=True)


if __name__ == "__main__":
    main()
