"""A mixture of experts at equal size: narrowing its experts, dropping some, and both.

    .venv/bin/python experiments/experts.py                 # every row that is missing
    .venv/bin/python experiments/experts.py a3+ "a3+, experts only" --device cuda    # some of them, again
    .venv/bin/python experiments/experts.py --all --device cuda                      # all of them, again

stories-moe-22m (Qwen3-MoE, 8 layers, 8 experts, 2 per token), evaluated on 100 stories: each with BOS in front, its
first 256 tokens. Calibrated on all the others, which are 183 windows of 256 tokens. A quarter of the weights of the
named parts goes. Rows are in experiments/results/experts.json.
"""

import argparse
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from tables import Entry, keep_row, known, provenance, rows_of, table

from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.models import load_model, shape_of
from trisect.pipeline.run import compress
from trisect.plan import budget_of
from trisect.support.receipt import build_receipt

ASSETS = Path(os.environ.get("TRISECT_ASSETS") or Path(__file__).resolve().parents[2] / "shared")
FILE = "experts.json"
HELD_OUT, WINDOWS, LENGTH, BOS = 100, 183, 256, 1
MLP = {"parts": ("mlp",)}
CASES: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "a3": {"method": "a3"},
    "a3+": {"method": "a3+"},
    "a3+ balanced": {"method": "a3+", "allocate": "balanced"},
    "a3, --drop-experts": {"method": "a3", "drop_experts": True},
    "a3+, --drop-experts": {"method": "a3+", "drop_experts": True},
    "magnitude, experts only": {"method": "magnitude", **MLP},
    "wanda, experts only": {"method": "wanda", **MLP},
    "reap, experts only": {"method": "reap", **MLP},
    "a3, experts only": {"method": "a3", **MLP},
    "a3+, experts only": {"method": "a3+", **MLP},
    "a3+, --drop-experts, experts only": {"method": "a3+", "drop_experts": True, **MLP},
}


def stories() -> list[str]:
    text = (ASSETS / "data/tinystories/tinystories.txt").read_text("utf-8")
    return [story.strip() for story in text.split("<|endoftext|>") if story.strip()]


def calibration(tokenizer: Any) -> torch.Tensor:
    """Stories one after the other, each behind a BOS, cut into windows."""
    ids = [id for story in stories()[HELD_OUT:] for id in (BOS, *_ids(tokenizer, story))]
    return torch.tensor(ids[: WINDOWS * LENGTH]).reshape(WINDOWS, LENGTH)


@torch.no_grad()
def perplexity(model: Any, tokenizer: Any) -> float:
    """Over the tokens of the stories that took no part."""
    loss = count = 0.0
    for story in stories()[:HELD_OUT]:
        ids = torch.tensor([[BOS, *_ids(tokenizer, story)][:LENGTH]], device=next(model.parameters()).device)
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        loss += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    return math.exp(loss / count)


def _ids(tokenizer: Any, story: str) -> list[int]:
    found: list[int] = tokenizer(story, add_special_tokens=False)["input_ids"]
    return found


def measure(name: str, device: str = "cpu") -> Entry:
    """One row."""
    settings = CASES[name]
    loaded = load_model(str(ASSETS / "models/stories-moe-22m"), dtype="float32", device=device, stream="off")
    before = budget_of(shape_of(loaded.model)).linear_parameters
    tokens = tokens_from_tensor(calibration(loaded.tokenizer), "tinystories")
    began, config, notes = time.perf_counter(), None, []
    if settings is not None:
        config = CompressConfig(ratio=0.25, align=None, **settings)
        result = compress(loaded.model, config, tokens=tokens)
        notes = sorted({entry["note"] for entry in result.losses if "expert" in entry["note"]})
    seconds = {"compress": time.perf_counter() - began}
    receipt = build_receipt({} if config is None else config.to_dict(), seed=0, token_hash=tokens.hash, timings=seconds)
    after = budget_of(shape_of(loaded.model)).linear_parameters
    ids = torch.tensor([[BOS, *_ids(loaded.tokenizer, "Once upon a time")]], device=device)
    text = loaded.model.generate(ids, max_new_tokens=60, do_sample=False, pad_token_id=0)
    return {
        "name": name,
        "removed": 1 - after / before,
        "perplexity": perplexity(loaded.model, loaded.tokenizer),
        "notes": notes,
        "text": loaded.tokenizer.decode(text[0], skip_special_tokens=True),
        "receipt": receipt,
    }


def experts_table() -> str:
    """Perplexity of every row, and its increase as a share of a3's."""
    rows = {row["name"]: row for row in rows_of(FILE)}
    if not rows:
        return ""
    dense = rows["dense"]["perplexity"]
    lines = []
    for name in (name for name in CASES if name in rows):
        row, against = rows[name], rows.get("a3, experts only" if "only" in name else "a3", rows["dense"])
        rise = row["perplexity"] - dense
        share = f"{rise / (against['perplexity'] - dense):.2f}" if rise else ""
        lines.append([name, f"{row['removed']:.1%}", f"{row['perplexity']:.3f}", f"{rise:+.3f}" if rise else "", share])
    header = ["stories-moe-22m", "removed", "perplexity", "increase", "share of a3's"]
    return table(header, lines) + "\n\n" + provenance(rows.values())


def shapes_table() -> str:
    """Cost of compressing and speed of the result at true shapes, from experiments/scale_shapes.py --speed."""
    rows = [row for row in rows_of("scale-shapes.json") if "milliseconds" in row]
    if not rows:
        return ""
    lines = []
    for row in rows:
        dense, narrow = row["milliseconds"]["dense"], row["milliseconds"]["narrow"]
        ratios = [f"{dense[name] / narrow[name]:.2f}x" for name in ("prefill", "decode-1", "decode-8", "decode-32")]
        cost = [f"{row['seconds_per_layer']:.1f} s", f"{row['peak_bytes'] / 1e9:.1f} GB"]
        lines.append([row["shape"], row["method"], f"{row['tokens']:,}", *cost, *ratios])
    header = ["shape", "method", "tokens", "per layer", "peak", "prefill 2048", "decode 1", "decode 8", "decode 32"]
    return table(header, lines) + "\n\n" + provenance(rows)


TABLES = {"experts": experts_table, "experts-shapes": shapes_table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    for name in options.cases or [name for name in CASES if options.all or name not in known(FILE)]:
        row = measure(name, options.device)
        keep_row(FILE, row)
        print(f"{name}: {row['perplexity']:.3f}, {row['removed']:.1%} removed, {row['notes']}", flush=True)


if __name__ == "__main__":
    main()
