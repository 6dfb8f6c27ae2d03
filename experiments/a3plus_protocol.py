"""SmolLM2-135M, 64 windows of 2048 tokens: shared rotation frequencies, synthetic calibration text.

    .venv/bin/python experiments/a3plus_protocol.py SECTION [--device cuda] [--out DIR]

Sections: uniform (a3 alone), scopes (who shares rotation frequencies), synthetic (a3 calibrated on half WikiText-2,
half text that the model generates), synthetic-alone (on that only). Perplexity of all methods is experiments/trust.py
accuracy, tasks are experiments/zero_shot.py, what each piece of a3+ brings the recipe experiments/recipes/pieces.yaml.
On one H200 a row takes about half a minute; on a CPU, hours.

Calibration: random windows of WikiText-2 valid (seed 0). Evaluation: first windows of WikiText-2 test and of
texts of other domains. The model is dequantised from 4 bits. Every finished row is written at once, and rows
that the file already has are not run again; several processes may share a section.
"""

import argparse
import copy
import json
import os
import time
from pathlib import Path
from typing import Any

from positions import perplexity_by_position

from trisect.calibrate.texts import SampleConfig, write_synthetic
from trisect.compare import Folder
from trisect.compare.recipe import hash_of
from trisect.config import CompressConfig
from trisect.data import load_tokens
from trisect.evaluate.perplexity import perplexity
from trisect.models import load_model, shape_of
from trisect.pipeline.run import compress
from trisect.plan import budget_of, compare
from trisect.support.files import locked, write_json
from trisect.support.receipt import build_receipt

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("TRISECT_ASSETS") or ROOT.parent / "shared") / "data"
MODEL = os.environ.get("TRISECT_MODEL", "smollm2-135m")
RATIOS = (0.125, 0.25, 0.375)
TEXTS = {
    "wikitext-2 test": ("wikitext-2/test.txt", 64),
    "c4": ("c4/c4.txt", 32),
    "wikipedia": ("wikipedia/wiki.txt", 16),
    "tinystories": ("tinystories/tinystories.txt", 8),
}
EXACT: dict[str, Any] = {"align": None}

SECTIONS: dict[str, list[dict[str, Any]]] = {
    "uniform": [{"method": "a3", "ratio": ratio, **EXACT} for ratio in RATIOS],
    "scopes": [
        {"method": "a3+", "ratio": ratio, "parts": ("qk",), "rope_scope": scope, **EXACT}
        for ratio in RATIOS
        for scope in ("head", "layer", "model")
    ]
    + [{"method": "a3", "ratio": ratio, "parts": ("qk",), **EXACT} for ratio in RATIOS],
}
SECTIONS["synthetic"] = SECTIONS["synthetic-alone"] = SECTIONS["uniform"]
WIKITEXT = DATA / "wikitext-2/valid.txt"
GENERATED = ROOT / "runs" / "synthetic.jsonl"
HALF_GENERATED = f"{WIKITEXT}:0.5+{GENERATED}:0.5"
CALIBRATION: dict[str, str | Path] = {"synthetic": HALF_GENERATED, "synthetic-alone": GENERATED}
"""Of sections that are not calibrated on WikiText-2 alone."""


class Protocol:
    """The model, the texts, and one file of rows."""

    def __init__(self, section: str, *, device: str, out: Path):
        self.section, self.path = section, out / f"a3plus-{section}.json"
        self.loaded = load_model(MODEL, device=device)
        self.locks = Folder(path=ROOT / "runs" / "a3plus-protocol")
        self.locks.prepare()
        if "synthetic" in section:
            self._generate(out / "synthetic-text.json")
        self.tokens = self._tokens(CALIBRATION.get(section, WIKITEXT), 64, sampling="random")
        self.texts = {name: self._tokens(DATA / file, n) for name, (file, n) in TEXTS.items()}
        self.before = budget_of(shape_of(self.loaded.model))
        self.dense = {name: perplexity(self.loaded.model, ids).perplexity for name, ids in self.texts.items()}

    def _tokens(self, source: str | Path, samples: int, *, sampling: str = "first") -> Any:
        cut = {"samples": samples, "length": 2048, "seed": 0, "sampling": sampling}
        return load_tokens(str(source), self.loaded.tokenizer, **cut)

    def _generate(self, receipt: Path) -> None:
        """Once, by whoever comes first: 64 texts of 2048 tokens."""
        with locked(self.locks.cache / "synthetic.lock"):
            if not GENERATED.exists():
                model, config = copy.deepcopy(self.loaded.model), SampleConfig(samples=64)
                write_json(receipt, write_synthetic(model, self.loaded.tokenizer, config, GENERATED, name=MODEL))

    def run(self, *, seconds: float) -> None:
        """Every row that is not there yet, as long as there is time to start one."""
        started = time.perf_counter()
        dense = [{"method": "dense"}] if self.section == "scopes" else []
        for settings in dense + SECTIONS[self.section]:
            if time.perf_counter() - started > seconds:
                print("out of time; run again for the rest", flush=True)
                return
            with self.locks.claimed(self.key(_plain(settings))) as mine:
                if mine and all(row["settings"] != _plain(settings) for row in self.rows):
                    self.measure(settings)

    def measure(self, settings: dict[str, Any]) -> None:
        model, begun = copy.deepcopy(self.loaded.model), time.perf_counter()
        if settings["method"] != "dense":
            compress(model, CompressConfig(**settings), tokens=self.tokens)
        self.add(settings, model, seconds=time.perf_counter() - begun)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """As the file has them now: other processes write to it, too."""
        done = json.loads(self.path.read_text(encoding="utf-8")) if self.path.exists() else {}
        rows: list[dict[str, Any]] = done.get("rows", [])
        return rows

    def key(self, *words: Any) -> str:
        return hash_of([str(self.path.resolve()), *words])

    def add(self, settings: dict[str, Any], model: Any, *, seconds: float) -> None:
        """Measure a model and write its row."""
        row = {
            "settings": _plain(settings),
            "removed": compare(self.before, budget_of(shape_of(model))).ratio,
            "perplexity": {name: perplexity(model, ids).perplexity for name, ids in self.texts.items()},
            "seconds": round(seconds, 1),
        }
        if self.section == "scopes":
            text = self.texts["wikitext-2 test"]
            found = perplexity_by_position(model, text, buckets=8)
            row["by_position"] = found | {"data": TEXTS["wikitext-2 test"][0]}
        rise = {name: round(value - self.dense[name], 3) for name, value in row["perplexity"].items()}
        print(row["settings"], rise, row["seconds"], flush=True)
        receipt = build_receipt(
            {"script": "experiments/a3plus_protocol.py", "section": self.section, "model": MODEL},
            seed=0,
            token_hash=self.tokens.hash,
            timings={},
        )
        with locked(self.locks.cache / f"{self.key()}.lock"):
            rows = [*self.rows, row]
            write_json(self.path, {"dense": self.dense, "rows": rows, "receipt": receipt})


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=ROOT / "experiments" / "results")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no row after this long")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    protocol = Protocol(given.section, device=given.device, out=given.out)
    protocol.run(seconds=given.seconds)


if __name__ == "__main__":
    main()
