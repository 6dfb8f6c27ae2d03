"""A real model, 25% removed with --portable, exported and run where trisect is not.

    .venv/bin/python experiments/export_smollm2.py [smollm2 | stories15m | stories-moe | gemma] [--device cuda]

Compresses once (the folder stays in runs/), exports to a stock Hugging Face checkpoint and to GGUF, and
compares with the native model: logits and greedy text of the stock checkpoint in a process where trisect
cannot be imported; greedy tokens and perplexity of the GGUF files in llama.cpp, through the log-probabilities
of its server. Only compressing uses the device. Writes a row of experiments/results/export.json.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from core_protocol import ASSETS, HALVES, split_stories
from gemma import find_gemma
from safetensors.torch import load_file
from tables import keep_row

from trisect.data import load_tokens
from trisect.export.llama_cpp import LlamaCpp
from trisect.models import load_model
from trisect.support.receipt import build_receipt, package_version

ROOT = Path(__file__).resolve().parents[1]
RUNS = Path("runs")
PROMPTS = (
    "The capital of France is",
    "Once upon a time there was a little dog who",
    "In 1969, three astronauts",
    "Tom and Lily went to the park. They",
)
NEW_TOKENS = 48
WINDOWS, LENGTH = 4, 256


@dataclass(frozen=True)
class Subject:
    """A model, and the texts it is calibrated and measured on."""

    model: str
    calibration: Path
    test: Path
    cut: tuple[str, ...]
    settings: tuple[str, ...] = ("--ratio", "0.25")


SUBJECTS = {
    "smollm2": Subject(
        "smollm2-135m",
        ASSETS / "data/wikitext-2/valid.txt",
        ASSETS / "data/wikitext-2/test.txt",
        ("--samples", "24", "--length", "1024"),
    ),
    "stories15m": Subject(
        str(ASSETS / "models/stories15m"), HALVES[0], HALVES[1], ("--samples", "32", "--length", "256")
    ),
    "stories-moe": Subject(
        str(ASSETS / "models/stories-moe-22m"),
        HALVES[0],
        HALVES[1],
        ("--samples", "64", "--length", "256"),
        ("--ratio", "0.25", "--parts", "mlp"),
    ),
    # Behind its norms of queries and keys no stock form has narrow ones: MLPs alone.
    "gemma": Subject(
        "gemma-3-270m",
        ASSETS / "data/wikitext-2/valid.txt",
        ASSETS / "data/wikitext-2/test.txt",
        ("--samples", "8", "--length", "512", "--eval-windows", "2"),
        ("--ratio", "0.25", "--parts", "mlp"),
    ),
}
SETTINGS = ("--portable", "--dtype", "float32")

APART = """
import json, sys
sys.modules["trisect"] = None
import torch, transformers
from safetensors.torch import save_file
folder, asked, out = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(folder)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
asked = json.loads(asked)
with torch.no_grad():
    save_file({"logits": model(torch.tensor(asked["windows"])).logits.contiguous()}, out)
prompts = [tokenizer(text, return_tensors="pt").input_ids for text in asked["prompts"]]
texts = [
    model.generate(ids, max_new_tokens=asked["count"], do_sample=False)[0, ids.shape[1]:].tolist()
    for ids in prompts
]
print(json.dumps({"class": type(model).__name__, "texts": texts}))
"""


def trisect(*words: object) -> None:
    command = [Path(sys.executable).with_name("trisect"), *words]
    subprocess.run([str(word) for word in command], check=True)


def compress(name: str, device: str) -> Path:
    """The native folder, made once; later runs find it."""
    out, subject = RUNS / f"export-{name}", SUBJECTS[name]
    if not out.exists():
        words = ["--calibration", subject.calibration, "--eval", subject.test, "--eval-windows", 16]
        words += [
            *subject.cut,
            *subject.settings,
            *SETTINGS,
            "--device",
            device,
            "-o",
            out,
            "--json",
            f"{out}.json",
            "-q",
        ]
        trisect("compress", find_gemma() if name == "gemma" else subject.model, *words)
    return out


def exported(native: Path, ending: str, *words: str) -> tuple[Path, dict[str, Any]]:
    """An export, made once, and what the command said about it."""
    out, facts = Path(f"{native}{ending}"), Path(f"{native}{ending}.json")
    if not out.exists():
        trisect("export", native, "-o", out, *words, "--json", facts)
    return out, json.loads(facts.read_text(encoding="utf-8"))


@torch.no_grad()
def logits_of(model: Any, windows: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(window.unsqueeze(0)).logits for window in windows])


FORCE = 1e6  # a bias that makes sure of a token; probabilities are reported without it


def log_probabilities(server: LlamaCpp, tokens: list[int]) -> list[float]:
    """Of each token but the first, behind those before it; the server has to be asked for each."""
    found = []
    for place in range(1, len(tokens)):
        (step,) = server.steps(tokens[:place], 1, cache_prompt=True, logit_bias=[[tokens[place], FORCE]])
        found.append(float(step["logprob"]))
    return found


def continued(server: LlamaCpp, prompt: list[int] | str) -> list[int]:
    """The tokens that llama.cpp continues with."""
    return [int(step["id"]) for step in server.steps(prompt, NEW_TOKENS)]


def perplexity_of(log_probabilities: list[float]) -> float:
    return math.exp(-sum(log_probabilities) / len(log_probabilities))


def greedy(model: Any, ids: list[int]) -> list[int]:
    found = model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False)
    return found[0, len(ids) :].tolist()


def agreement(found: list[list[int]], expected: list[list[int]]) -> dict[str, int]:
    """Texts that are the same up to where the native model ends its own."""
    same = [theirs[: len(ours)] == ours for theirs, ours in zip(found, expected, strict=True)]
    return {"texts": len(same), "same": sum(same)}


def stock_row(
    native: Path, windows: torch.Tensor, native_logits: torch.Tensor, texts: list[list[int]]
) -> dict[str, Any]:
    folder, facts = exported(native, "-hf", "--dtype", "float32")
    asked = {"windows": windows[:2].tolist(), "prompts": PROMPTS, "count": NEW_TOKENS}
    out = Path(f"{native}-hf.safetensors")
    words = [sys.executable, "-c", APART, str(folder), json.dumps(asked), str(out)]
    printed = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(printed.splitlines()[-1])
    difference = (load_file(out)["logits"] - native_logits[:2]).abs().max()
    return {
        "class": found["class"],
        "largest_difference_of_logits": float(difference),
        "largest_logit": float(native_logits[:2].abs().max()),
        "greedy": agreement(found["texts"], texts),
        "notes": facts["notes"],
    }


@torch.no_grad()
def partings(
    model: Any, prompts: list[list[int]], found: list[list[int]], expected: list[list[int]]
) -> list[dict[str, Any]]:
    """Where texts part, and by how many nats the native model preferred its own token there."""
    parted = []
    for prompt, theirs, ours in zip(prompts, found, expected, strict=True):
        at = next((i for i, pair in enumerate(zip(theirs, ours, strict=False)) if len(set(pair)) > 1), None)
        if at is not None:
            logits = model(torch.tensor([prompt + ours[:at]])).logits[0, -1]
            parted.append({"after": at, "nats": float(logits[ours[at]] - logits[theirs[at]])})
    return parted


def gguf_row(
    native: Path,
    model: Any,
    kind: str,
    windows: torch.Tensor,
    dense: float,
    prompts: list[list[int]],
    texts: list[list[int]],
) -> dict[str, Any]:
    path, facts = exported(native, f"-{kind}.gguf", "--to", "gguf", "--dtype", kind)
    server, begun = LlamaCpp(path, context=1024), time.perf_counter()
    found = [continued(server, text) for text in PROMPTS]
    from_ids = [continued(server, ids) for ids in prompts]
    values = [value for window in windows.tolist() for value in log_probabilities(server, window)]
    perplexity = perplexity_of(values)
    return {
        "architecture": facts["architecture"],
        "bytes": path.stat().st_size,
        "nats_from_native_at_one_token": facts["llama_cpp"],
        "greedy": agreement(found, texts),
        "greedy_from_tokens": agreement(from_ids, texts),
        "partings": partings(model, prompts, from_ids, texts),
        "perplexity": perplexity,
        "relative_to_native": perplexity / dense - 1,
        "notes": facts["notes"],
        "seconds": round(time.perf_counter() - begun, 1),
    }


def main(name: str, device: str) -> None:
    os.chdir(ROOT)
    split_stories()
    native, begun = compress(name, device), time.perf_counter()
    loaded = load_model(str(native), dtype="float32")
    cut = {"samples": WINDOWS, "length": LENGTH, "seed": 0, "sampling": "first"}
    tokens = load_tokens(str(SUBJECTS[name].test), loaded.tokenizer, **cut)
    windows = tokens.ids
    logits = logits_of(loaded.model, windows)
    values = logits[:, :-1].log_softmax(-1).gather(2, windows[:, 1:].unsqueeze(2)).flatten()
    perplexity = perplexity_of(values.tolist())
    prompts = [loaded.tokenizer(text).input_ids for text in PROMPTS]
    texts = [greedy(loaded.model, ids) for ids in prompts]
    made = json.loads(Path(f"{native}.json").read_text(encoding="utf-8"))
    rows: dict[str, Any] = {
        "native": {
            "perplexity": perplexity,
            "predicted_tokens": len(values),
            "removed": made["ratio"],
            "compressing": {side: made["perplexity"][side] for side in ("before", "after")},
        },
        "hf float32": stock_row(native, windows, logits, texts),
    }
    for kind in ("f16", "q8_0"):
        rows[f"gguf {kind}"] = gguf_row(native, loaded.model, kind, windows, perplexity, prompts, texts)
        print(kind, rows[f"gguf {kind}"], flush=True)
    recipe = {
        "script": f"experiments/export_smollm2.py {name}",
        "compress": [*SUBJECTS[name].cut, *SUBJECTS[name].settings, *SETTINGS],
        "windows": WINDOWS,
        "length": LENGTH,
        "xllamacpp": package_version("xllamacpp"),
    }
    seconds = {"compare": time.perf_counter() - begun}
    receipt = build_receipt(recipe, seed=0, token_hash=tokens.hash, timings=seconds)
    keep_row("export.json", {"name": name, "exports": rows, "receipt": receipt})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", choices=SUBJECTS, default="smollm2")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    main(given.model, given.device)
