"""LoRA recovery: perplexity before and after, on text that the tuning never saw. One receipt per row.

    .venv/bin/python experiments/finetune_smollm2.py                 # every row that has no receipt yet
    .venv/bin/python experiments/finetune_smollm2.py stories15m      # only rows whose name starts so
    .venv/bin/python experiments/finetune_smollm2.py --device cuda
    ... --folder smollm2-37.5=DIR                                    # a model that was compressed before

SmolLM2-135M (dequantised from 4 bits) with 37.5% of its decoder removed, as in a3plus_protocol.py, is tuned
for two epochs on Alpaca, on Wikipedia and on C4; that is for a GPU, and --max-steps makes it shorter. Story
models with 25% removed are tuned on one half of TinyStories. Dense models are tuned alike, because what
tuning does to them is no recovery. Every row counts the 12-word sequences that tuning and held-out text
share. An interrupted row goes on where it was.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core_protocol import HALVES, split_stories
from tables import keep_row, known

from trisect.finetune import TuneConfig, finetune, load_examples
from trisect.finetune.training import load_held_out, measure
from trisect.models import load_model, original_shape, save_model, shape_of
from trisect.plan import budget_of, compare
from trisect.support.files import write_json
from trisect.support.receipt import read_receipt

ROOT = Path(__file__).resolve().parents[1]
# Relative to the repository, so that receipts do not name this machine.
ASSETS = Path(os.path.relpath(os.environ.get("TRISECT_ASSETS") or ROOT.parent / "shared", ROOT))
RUNS = Path("runs")
ALPACA = (RUNS / "alpaca-tuning.json", RUNS / "alpaca-held-out.json")
WIKITEXT, C4 = ASSETS / "data/wikitext-2/test.txt", ASSETS / "data/c4/c4.txt"
SHARED_WORDS = 12

SMOLLM2 = os.environ.get("TRISECT_MODEL", "smollm2-135m")
DENSE = {
    "smollm2": SMOLLM2,
    "stories15m": str(ASSETS / "models/stories15m"),
    "stories-mpt": str(ASSETS / "models/stories-mpt-20m"),
}
STORY_WINDOWS = ["--ratio", 0.25, "--samples", 64, "--length", 256, "--calibration", HALVES[0]]
COMPRESS: dict[str, list[Any]] = {
    "smollm2-37.5": [SMOLLM2, "--ratio", 0.375, "--samples", 64, "--length", 2048]
    + ["--calibration", ASSETS / "data/wikitext-2/valid.txt"],
    "stories15m-25": [DENSE["stories15m"], *STORY_WINDOWS],
    "stories-mpt-25": [DENSE["stories-mpt"], *STORY_WINDOWS],
}
WORDY = {"lr": 5e-4, "batch_size": 8, "accumulate": 1, "length": 256}
STORIES = {"lr": 1e-3, "batch_size": 4, "accumulate": 2, "length": 256, "max_steps": 40}


@dataclass(frozen=True)
class Row:
    model: str
    data: Path
    config: dict[str, Any]
    held_out: dict[Path, tuple[int, int]] = field(default_factory=dict)
    """Text -> windows and their length; of instructions, all are taken."""


HELD_OUT = {WIKITEXT: (16, 1024), C4: (16, 1024), ALPACA[1]: (0, 512)}
TEXTS = {"alpaca": ALPACA[0], "wikipedia": ASSETS / "data/wikipedia/wiki.txt", "c4": ASSETS / "data/c4/c4_demo.jsonl"}
ROWS = {
    f"{model}-{text}": Row(model, data, WORDY, HELD_OUT)
    for model in ("smollm2-37.5", "smollm2-0")
    for text, data in TEXTS.items()
} | {
    f"{model}-stories": Row(model, HALVES[0], STORIES, {HALVES[1]: (32, 256)})
    for model in ("stories15m-25", "stories15m-0", "stories-mpt-25", "stories-mpt-0")
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prefix", nargs="?", default="")
    parser.add_argument("--folder", action="append", default=[], metavar="MODEL=DIR")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--max-steps", type=int, help="of the rows that have no number of their own")
    given = parser.parse_args()
    folders = {name: Path(path).resolve() for name, _, path in (entry.partition("=") for entry in given.folder)}
    os.chdir(ROOT)
    split_stories()
    split_alpaca()
    for name, row in ROWS.items():
        if name.startswith(given.prefix) and name not in known("finetune.json"):
            print(name, flush=True)
            run_row(
                name,
                row,
                folder=str(folders.get(row.model) or compressed(row.model, device=given.device)),
                device=given.device,
                max_steps=given.max_steps,
            )


def run_row(name: str, row: Row, *, folder: str, device: str, max_steps: int | None) -> None:
    """Measure, tune, measure, save; what was measured before is kept for the model's other rows."""
    loaded = load_model(folder, dtype="float32", device=device)
    config = TuneConfig(**{"max_steps": max_steps, **row.config})
    examples = load_examples(str(row.data), loaded.tokenizer, length=config.length, loss=config.loss)
    held_out = [
        load_held_out(
            str(path), loaded.tokenizer, tuned_on=str(row.data), length=length, windows=windows, loss=config.loss
        )
        for path, (windows, length) in row.held_out.items()
    ]
    removed = compare(budget_of(original_shape(loaded.model)), budget_of(shape_of(loaded.model))).ratio
    before = measured_before(row.model, loaded.model, held_out)
    state = RUNS / f"finetune-{name}.tuning"
    tuned = finetune(loaded.model, examples, config, state=state, save_every=10, progress=say)
    entry = {
        **tuned,
        "losses": [tuned["losses"][0], tuned["losses"][-1]],
        "compression": read_receipt(folder).get("recipe"),
        "removed": removed,
        "held_out": [
            {"before": was, "after": measure(loaded.model, part)} for was, part in zip(before, held_out, strict=True)
        ],
        "shared_word_sequences": {str(path): shared(row.data, path) for path in row.held_out},
    }
    out = RUNS / f"finetune-{name}"
    if not out.exists():
        made = read_receipt(folder)
        save_model(loaded.model, loaded.tokenizer, out, receipt={**made, "tuning": [*made.get("tuning", []), entry]})
    keep_row("finetune.json", {"name": name, **entry})
    shutil.rmtree(state)
    for part in entry["held_out"]:
        print(part["before"]["data"], part["before"]["perplexity"], part["after"]["perplexity"], flush=True)


def measured_before(model: str, loaded: Any, held_out: list[Any]) -> list[dict[str, Any]]:
    """Perplexity of the compressed model as it came."""
    path = RUNS / f"finetune-before-{model}.json"
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        if [part["token_hash"] for part in found] == [part.hash for part in held_out]:
            return found
    found = [measure(loaded, part) for part in held_out]
    write_json(path, found)
    return found


def compressed(model: str, *, device: str) -> str:
    """The compressed model, made if it is not there; the dense one where nothing is to be removed."""
    if model not in COMPRESS:
        return DENSE[model.removesuffix("-0")]
    out = RUNS / f"finetune-{model}"
    if not out.exists():
        command = [sys.executable, "-m", "trisect", "compress", *COMPRESS[model], "-o", out]
        command += ["--dtype", "float32", "--align", "none", "--eval", "none", "--device", device]
        subprocess.run([str(word) for word in command], check=True)
    return str(out)


def split_alpaca() -> None:
    """Every twentieth example is held out."""
    records = json.loads((ASSETS / "data/alpaca/alpaca_en_demo.json").read_text(encoding="utf-8"))
    write_json(ALPACA[0], [record for number, record in enumerate(records) if number % 20])
    write_json(ALPACA[1], records[::20])


def shared(a: Path, b: Path) -> int:
    """Sequences of twelve words that two texts have in common."""
    found = []
    for path in (a, b):
        words = re.findall(r"[a-z0-9]+", path.read_text(encoding="utf-8").lower())
        found.append({tuple(words[i : i + SHARED_WORDS]) for i in range(len(words) - SHARED_WORDS + 1)})
    return len(found[0] & found[1])


def say(done: int, total: int) -> None:
    if done % 10 == 0:
        print(f"  step {done} of {total}", flush=True)


if __name__ == "__main__":
    main()
