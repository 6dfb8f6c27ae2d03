"""One decoding step kernel by kernel, against the bytes that each kernel must move.

    PYTHONPATH=src python3 benchmarks/decode_profile.py                  # 13B, 8B, 3B; dense in our runtime and 60%
    PYTHONPATH=src python3 benchmarks/decode_profile.py --device cpu --tiny

Random weights. A step is a CUDA graph that the profiler watches being replayed. Every layer has four products (qkv,
o, gate-up, down), in this order, and the head follows, so a product's place says which weights it reads; other
kernels are known by their names. `between` is the step's own time less that of its kernels. Figures go to
$OUT/decode-profile.json (without OUT, to the folder at hand).
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from random_models import Subject, build, subject_of_shape, variants_of
from torch.profiler import ProfilerActivity, profile

from trisect.bench.measure import Ceilings, OwnStepper, laps_on, measure_ceilings, release
from trisect.models import layer_views
from trisect.models.checkpoint import DTYPES
from trisect.support.files import write_json
from trisect.support.receipt import build_receipt

FILE = "decode-profile.json"
SHAPES = ("llama-2-13b", "llama-3.1-8b", "llama-3.2-3b")
TINY = {"hidden_size": 64, "intermediate_size": 640, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"head_dim": 80, "vocab_size": 50}
PRODUCTS = ("qkv", "o", "gate-up", "down")
KINDS = {
    "attention": ("attend_kernel", "merge_kernel", "attend_one", "flash", "fmha"),
    "rotate and write": ("write_kernel", "rotate_write"),
    "gate": ("gate_kernel", "gate_split", "silu"),
    "norm": ("norm",),
    "angles": ("sgemm",),
    "product": ("gemm", "gemv", "nvjet", "cutlass", "xmma", "dot_kernel", "product_kernel", "aten::mm", "aten::addmm"),
    "product's sum": ("splitk", "reduce_1block"),
    "choice of a token": ("argmax", "reduce_kernel"),
}
"""What a kernel is, by what its name contains; the rest (sums, copies) is `other`."""
STEPS = 5


@dataclass(frozen=True)
class Kernel:
    name: str
    micros: float


def kind_of(name: str) -> str:
    low = name.lower()
    return next((kind for kind, marks in KINDS.items() if any(mark in low for mark in marks)), "other")


def labelled(kernels: Sequence[Kernel], *, layers: int, steps: int) -> dict[str, dict[str, Any]]:
    """Microseconds, launches and names per step, by what a kernel does; products by their place."""
    products = [index for index, kernel in enumerate(kernels) if kind_of(kernel.name) == "product"]
    per_step = len(PRODUCTS) * layers + 1
    fits = len(products) == per_step * steps
    found: dict[str, dict[str, Any]] = {}
    count = -1
    label = "other"
    for kernel in kernels:
        kind = kind_of(kernel.name)
        if kind == "product":
            count += 1
            place = count % per_step
            label = ("head" if place == per_step - 1 else PRODUCTS[place % 4]) if fits else "products"
        name = label if kind in ("product", "product's sum") else kind
        entry = found.setdefault(name, {"micros": 0.0, "launches": 0.0, "kernels": {}})
        entry["micros"] += kernel.micros / steps
        entry["launches"] += 1 / steps
        entry["kernels"][kernel.name] = entry["kernels"].get(kernel.name, 0.0) + kernel.micros / steps
    return found


def watched(step: Any, *, device: str) -> list[Kernel]:
    """The kernels of some steps, in the order in which they ran; on a CPU, torch's operations."""
    cuda = torch.device(device).type == "cuda"
    activities = [ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        for _ in range(STEPS):
            step()
        if cuda:
            torch.cuda.synchronize()
    if not cuda:
        return [Kernel(e.name, e.self_cpu_time_total) for e in profiler.events() if e.self_cpu_time_total > 0]
    events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels: list[Kernel] = []
    end = 0.0
    for e in sorted(events, key=lambda event: event.time_range.end):
        if not e.name.startswith("Mem"):
            # A kernel that is launched early waits for the one before it: what counts is by how much it ends later.
            kernels.append(Kernel(e.name, e.time_range.end - max(e.time_range.start, end)))
            end = e.time_range.end
    return kernels


def bytes_of(model: Any, *, batch: int, context: int) -> dict[str, int]:
    """What a step must move for each label: weights once, keys and values once, activations in and out."""
    item = next(model.parameters()).element_size()
    total = dict.fromkeys((*PRODUCTS, "head", "attention", "rotate and write", "gate", "norm"), 0)
    hidden = model.config.get_text_config().hidden_size
    for view in layer_views(model):
        shape = view.shape()
        queries, keys, values = shape.heads * shape.qk, shape.kv_heads * shape.qk, shape.kv_heads * shape.vo
        qkv, outputs = queries + keys + values, shape.heads * shape.vo
        for label, size, ends in (
            ("qkv", hidden * qkv, hidden + qkv),
            ("o", hidden * outputs, hidden + outputs),
            ("gate-up", 2 * hidden * shape.mlp, hidden + 2 * shape.mlp),
            ("down", hidden * shape.mlp, hidden + shape.mlp),
            ("attention", 0, (keys + values) * context + queries + outputs),
            ("rotate and write", 0, 2 * qkv),
            ("gate", 0, 3 * shape.mlp),
            ("norm", 2 * hidden, 4 * hidden),
        ):
            total[label] += item * (size + batch * ends)
    head = model.get_output_embeddings().weight
    total["head"] = head.nbytes + item * batch * sum(head.shape)
    return total


def measure(model: Any, *, device: str, batch: int, length: int, ceilings: Ceilings) -> dict[str, Any]:
    prompt = torch.zeros(batch, length, dtype=torch.int64, device=device)
    prompt.random_(0, model.config.vocab_size, generator=torch.Generator(device).manual_seed(0))
    cuda = torch.device(device).type == "cuda"
    stepper = OwnStepper(model, prompt, new=64, mode="graphs" if cuda else "plain")
    stepper.start()
    seconds = median(laps_on(device)(stepper.step, 50))
    stepper.seek(0)
    found = labelled(watched(stepper.step, device=device), layers=len(layer_views(model)), steps=STEPS)
    moved = bytes_of(model, batch=batch, context=length + 32)
    bandwidth = max(ceilings.copy_bytes, ceilings.read_bytes)
    for label, entry in found.items():
        entry["bytes"] = moved.get(label, 0)
        entry["share"] = entry["bytes"] / bandwidth / (entry["micros"] / 1e6) if entry["micros"] else 0.0
    stepper.close()
    floor = sum(moved.values()) / bandwidth
    between = seconds * 1e6 - sum(entry["micros"] for entry in found.values())
    return {
        "step_micros": seconds * 1e6,
        "floor_micros": floor * 1e6,
        "share": floor / seconds,
        "between_micros": between,
        "kernels": found,
    }


def show(name: str, found: dict[str, Any]) -> None:
    print(
        f"\n{name}: step {found['step_micros']:.0f} us, floor {found['floor_micros']:.0f} us "
        f"({found['share']:.2f}), between kernels {found['between_micros']:.0f} us"
    )
    for label, entry in sorted(found["kernels"].items(), key=lambda item: -item[1]["micros"]):
        slowest = max(entry["kernels"], key=entry["kernels"].__getitem__)
        print(
            f"  {label:18} {entry['micros']:8.1f} us {entry['launches']:6.1f} x  {entry['bytes'] / 1e6:9.1f} MB  "
            f"{entry['share']:.2f}  {slowest[:60]}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--ratios", default="0.6")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    given = parser.parse_args()
    dtype = DTYPES["bfloat16" if given.device != "cpu" else "float32"]
    sizes = {"matrix": 256, "size": 1 << 20} if given.tiny else {}
    ceilings = measure_ceilings(given.device, dtype, laps_on(given.device), **sizes)
    length = 16 if given.tiny else given.length
    kept: dict[str, Any] = {"ceilings": vars(ceilings), "length": length}
    kept["receipt"] = build_receipt({}, seed=0, token_hash=None, timings={})
    ratios = [float(ratio) for ratio in given.ratios.split(",")]
    for shape in given.shapes:
        subject = subject_of_shape(shape)
        if given.tiny:
            subject = Subject(name=shape, config=transformers.LlamaConfig(**TINY))
        for variant in variants_of(subject.dense_shape(dtype), kinds=("owned", "trisect"), ratios=ratios):
            model = build(subject, variant, device=given.device, dtype=dtype)
            for batch in map(int, given.batches.split(",")):
                name = f"{shape} {variant.kind} {variant.asked} batch {batch}"
                kept[name] = measure(model, device=given.device, batch=batch, length=length, ceilings=ceilings)
                release()
                write_json(Path(os.environ.get("OUT", ".")) / FILE, kept)
                show(name, kept[name])
            del model
            release()
    print(f"\nread {ceilings.read_bytes / 1e12:.2f} TB/s, copy {ceilings.copy_bytes / 1e12:.2f} TB/s")


if __name__ == "__main__":
    main()
