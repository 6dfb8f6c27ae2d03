"""HQQ on dense and narrow models: bits per weight against perplexity, one receipt per point.

    .venv/bin/python experiments/quantise_pareto.py stories15m
    .venv/bin/python experiments/quantise_pareto.py smollm2 --device cuda
    .venv/bin/python experiments/quantise_tables.py              # figures and tables of docs/quantize.md

Points that have a receipt are not run again. SmolLM2-135M is dequantised from 4 bits, calibrated on 24 random
windows of 1024 tokens of WikiText-2 valid and measured on the first 16 of WikiText-2 test. stories15m is
calibrated on 64 random windows of 256 tokens of one half of TinyStories and measured on the first 64 of the
other. Everything is in float32. On one core a point of SmolLM2 takes minutes, and compressing it much longer.
"""

import argparse
import copy
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from core_protocol import ASSETS, HALVES, ROOT, split_stories
from tables import keep_row, known

from trisect.config import CompressConfig
from trisect.data import load_tokens
from trisect.evaluate.perplexity import perplexity
from trisect.models import fingerprint, load_model
from trisect.pipeline.run import compress
from trisect.quantize import QuantizeConfig, count_bits, quantize_model
from trisect.support.receipt import build_receipt

FILE = "quantise.json"
Setting = tuple[int, int | None] | None
"""Bits and group size. Size None: auto, the largest of 128 to 8 that divides; no setting: not quantised."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """One model, its texts, and the points to run."""

    model: str
    calibration: tuple[Path, int]
    """Text, and how many windows of it."""
    evaluation: tuple[Path, int]
    length: int
    align: int
    dense: tuple[Setting, ...]
    narrow: tuple[Setting, ...] = (None, (4, None), (3, None))
    bases: tuple[str, ...] = ("dense", "a3+-0.125", "a3+-0.25", "a3+-0.375", "a3-0.125", "a3-0.25")
    """Method and ratio."""


STUDIES = {
    "smollm2": Study(
        model="smollm2-135m",
        calibration=(ASSETS / "data/wikitext-2/valid.txt", 24),
        evaluation=(ASSETS / "data/wikitext-2/test.txt", 16),
        length=1024,
        align=16,
        # 192 is the largest group that divides all inputs: the fewest bits that 4 and 3 bits can take.
        dense=(None, (8, None), (4, None), (4, 192), (3, 32), (3, None), (3, 192), (2, 16), (2, None)),
    ),
    "stories15m": Study(
        model=str(ASSETS / "models/stories15m"),
        calibration=(HALVES[0], 64),
        evaluation=(HALVES[1], 64),
        length=256,
        align=8,
        dense=(None, (8, None), (4, 16), (4, None), (4, 96), (3, 16), (3, None), (3, 96), (2, 16), (2, None), (2, 96)),
    ),
}


def main() -> None:
    """Run the points that are missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    split_stories()
    study = STUDIES[arguments.study]
    for base in study.bases:
        settings = study.dense if base == "dense" else study.narrow
        names = {f"{arguments.study}/{base}-{label(s)}": s for s in settings}
        missing = {name: s for name, s in names.items() if name not in known(FILE)}
        if missing:
            run_base(study, base, missing, device=arguments.device)


def label(setting: Setting) -> str:
    """b4-auto, b3-g32; whole for no quantisation."""
    if setting is None:
        return "whole"
    bits, group = setting
    return f"b{bits}-" + ("auto" if group is None else f"g{group}")


def run_base(study: Study, base: str, missing: dict[str, Setting], *, device: str) -> None:
    """Compress a model once, then quantise and measure copies of it."""
    loaded = load_model(study.model, dtype="float32", device=device)
    model, recipe = loaded.model, {"model": study.model, "base": base}
    recipe["fingerprint"] = fingerprint(model)
    if base != "dense":
        method, _, ratio = base.rpartition("-")
        config = CompressConfig(method=method, ratio=float(ratio), align=study.align)
        tokens = windows(study.calibration, loaded.tokenizer, study.length, sampling="random")
        recipe |= {"compress": config.to_dict(), "calibration": {"source": tokens.source, "hash": tokens.hash}}
        model = compress(model, config, tokens=tokens).model
    tokens = windows(study.evaluation, loaded.tokenizer, study.length, sampling="first")
    for name, setting in missing.items():
        print(name, flush=True)
        row = point(copy.deepcopy(model), setting, tokens, recipe)
        keep_row(FILE, {"name": name, "study": name.partition("/")[0], **row})


def windows(text: tuple[Path, int], tokenizer: Any, length: int, *, sampling: str) -> Any:
    return load_tokens(
        str(text[0]), tokenizer, samples=text[1], length=length, sampling=sampling, seed=0, split="evaluation"
    )


def point(model: Any, setting: Setting, tokens: Any, recipe: dict[str, Any]) -> dict[str, Any]:
    """Quantise, count, measure."""
    start = time.perf_counter()
    config = None
    if setting is not None:
        config = QuantizeConfig(bits=setting[0], group_size=setting[1])
        quantize_model(model, config)
    quantised = time.perf_counter()
    measured = perplexity(model, tokens, batch_size=4)
    timings = {"quantise": quantised - start, "perplexity": time.perf_counter() - quantised}
    recipe = {**recipe, "quantize": None if config is None else asdict(config)}
    return {
        "base": recipe["base"],
        "setting": label(setting),
        "perplexity": asdict(measured),
        "bits": count_bits(model).to_dict(),
        "receipt": build_receipt(recipe, seed=0, token_hash=tokens.hash, timings=timings),
    }


if __name__ == "__main__":
    main()
