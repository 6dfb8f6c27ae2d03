"""A model of 3 GB on disk, compressed layer by layer and in memory: peak memory of both, the same weights.

    python experiments/stream_cpu.py

The weights are random: this is about memory. Each run is a process of its own, whose peak the system reports.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from trisect.data import tokens_from_tensor
from trisect.models.streamed import Place, Shards
from trisect.support.files import write_json
from trisect.support.receipt import build_receipt

RESULT = Path(__file__).resolve().parent / "results" / "stream-cpu.json"
SIZES = {
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "num_hidden_layers": 26,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 8000,
}


def write_model(folder: Path) -> int:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model.save_pretrained(folder, max_shard_size="500MB")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def run(model: Path, out: Path, tokens: Path, *, stream: str, method: str) -> dict[str, Any]:
    """One process: its peak memory and the seconds it took."""
    words = [sys.executable, __file__, "--child", str(model), str(out), str(tokens), stream, method]
    answer = subprocess.run(words, check=True, capture_output=True, text=True)
    seconds, peak = answer.stdout.split()[-2:]
    return {"peak_bytes": int(peak), "seconds": float(seconds)}


def child(model: str, out: str, tokens: str, stream: str, method: str) -> None:
    """What `trisect compress --stream` does, for tokens instead of text: the model has no tokenizer."""
    import time

    from safetensors.torch import load_file

    from trisect.config import CompressConfig
    from trisect.models import load_model, save_model
    from trisect.pipeline.run import compress
    from trisect.support.distributed import unfinished

    began = time.perf_counter()
    loaded = load_model(model, dtype="float32", stream=stream)
    ids = tokens_from_tensor(load_file(tokens)["ids"])
    with unfinished(Path(out)) as work:
        result = compress(loaded.model, CompressConfig(ratio=0.25, method=method), tokens=ids, work=work)
        layers = sorted(work.glob("layer-*")) if stream == "on" else None
        save_model(result.model, None, out, receipt=result.receipt, layers=layers)
    print(time.perf_counter() - began, peak_bytes())


def peak_bytes() -> int:
    """The most this program has had in memory; `getrusage` would count what its parent had when it forked."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def differences(one: Path, other: Path) -> int:
    """Tensors that are not the same, one at a time."""
    a, b = Shards(one), Shards(other)
    if a.files.keys() != b.files.keys():
        raise SystemExit("the two folders hold different tensors")
    places = [Place({"": [name]}) for name in a.files]
    return sum(not torch.equal(a.read(place), b.read(place)) for place in places)


def main() -> None:
    from safetensors.torch import save_file

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="a3")
    parser.add_argument("--folder", type=Path, help="where the models go; a temporary folder by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        home = Path(folder)
        size = write_model(home / "model")
        ids = torch.randint(0, SIZES["vocab_size"], (16, 128), generator=torch.Generator().manual_seed(1))
        save_file({"ids": ids}, home / "ids.safetensors")
        found = {}
        for stream in ("on", "off"):
            place = home / stream
            found[stream] = run(home / "model", place, home / "ids.safetensors", stream=stream, method=options.method)
            print(stream, found[stream], flush=True)
        unequal = differences(home / "on", home / "off")
    recipe = {"sizes": SIZES, "method": options.method, "ratio": 0.25, "windows": list(ids.shape)}
    receipt = build_receipt(recipe, seed=1, token_hash=tokens_from_tensor(ids).hash, timings={})
    result = {"model_bytes": size, "streamed": found["on"], "in_memory": found["off"]}
    write_json(RESULT, {**result, "tensors_that_differ": unequal, "receipt": receipt})
    print(
        f"{size / 1e9:.2f} GB: peak {found['on']['peak_bytes'] / 1e9:.2f} GB streamed, "
        f"{found['off']['peak_bytes'] / 1e9:.2f} GB in memory; {unequal} tensors differ"
    )


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
