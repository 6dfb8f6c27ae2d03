"""Headers of weight files: read as the libraries read them, and refused before a library follows a lie."""

import json
import struct
from pathlib import Path
from random import Random
from typing import Any

import fuzz_gguf
import gguf
import pytest
import torch
from fuzz_guard import peak_memory, time_limit
from fuzz_mutations import flipped
from safetensors import safe_open
from safetensors.torch import save_file

from trisect.errors import TrisectError
from trisect.models.source import MOST_VALUES, read_gguf, read_header, reading_once, resolve

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16),
    *(torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tensors = {f"t{n}": torch.ones(n % 4, 3).to(dtype) for n, dtype in enumerate(DTYPES)}
    tensors["scalar"] = torch.tensor(1.0)
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    return tmp_path / "x.safetensors"


def test_a_safetensors_header_says_what_the_library_says(file: Path) -> None:
    found, metadata = read_header(file)
    with safe_open(file, framework="pt") as library:
        assert set(found) == set(library.keys())
        for name, tensor in found.items():
            theirs = library.get_slice(name)
            assert (tensor.dtype, list(tensor.shape)) == (theirs.get_dtype(), theirs.get_shape())
        assert metadata == library.metadata()


def test_a_damaged_header_is_read_as_the_library_reads_it_or_refused(file: Path) -> None:
    content, refused = file.read_bytes(), 0
    for seed in range(400):
        file.write_bytes(flipped(Random(seed), content))
        try:
            found = set(read_header(file)[0])
        except TrisectError as error:
            refused += "damaged or cut short" in str(error) and "\n" not in str(error)
        else:
            with safe_open(file, framework="pt") as library:
                assert found == set(library.keys())
    assert 20 < refused < 400


def test_a_file_that_was_cut_is_refused(file: Path) -> None:
    content = file.read_bytes()
    for cut in range(0, len(content), 7):
        file.write_bytes(content[:cut])
        with pytest.raises(TrisectError, match=r"x\.safetensors is damaged or cut short"):
            read_header(file)


def test_sizes_are_refused_before_they_are_believed(tmp_path: Path) -> None:
    path, before = tmp_path / "x.safetensors", peak_memory()
    for length in (2**63, 2**40, 10**8 + 1, 0, 1):
        path.write_bytes(struct.pack("<Q", length) + b"{}")
        with pytest.raises(TrisectError, match="damaged or cut short"):
            read_header(path)
    for shape in ([2**40, 2**40], [-1], [1.5], ["1"], [True], 3, [2**62], [2] * 99):
        text = json.dumps({"t": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 4)
        with pytest.raises(TrisectError, match="damaged or cut short"):
            read_header(path)
    assert peak_memory() - before < 50 << 20


KEYS = [
    ("general.architecture", fuzz_gguf.string("llama")),
    ("llama.block_count", fuzz_gguf.scalar("u32", 1)),
    ("words", fuzz_gguf.array("str", ["a", "bc", ""])),
    ("numbers", fuzz_gguf.array("f32", [1.0, 2.0])),
    ("flag", fuzz_gguf.scalar("bool", True)),
]
TENSORS = [
    {"name": "token_embd.weight", "dims": [4, 8], "kind": 0, "offset": 0},
    {"name": "blk.0.attn_q.weight", "dims": [32, 2], "kind": 2, "offset": 128},
]
DATA = bytes(128 + 2 * 18)


def written(tmp_path: Path, *, keys: Any = KEYS, tensors: Any = TENSORS, header: Any = None) -> Path:
    path = tmp_path / "x.gguf"
    path.write_bytes(fuzz_gguf.build(keys, tensors, DATA, header=header or {}))
    return path


def refused(path: Path, message: str) -> None:
    with time_limit(5), pytest.raises(TrisectError, match=rf"x\.gguf, damaged or cut short: {message}") as caught:
        read_gguf(path)
    assert "\n" not in str(caught.value)


def test_gguf_shapes_are_what_the_library_says(tmp_path: Path) -> None:
    library = gguf.GGUFReader(written(tmp_path))
    expected = {tensor.name: tuple(tensor.shape.tolist()) for tensor in library.tensors}
    weights = resolve(str(tmp_path / "x.gguf")).weights
    assert weights is not None
    assert weights.shapes == expected
    assert len(expected) == 2


def test_inside_a_loading_a_gguf_header_is_read_once(tmp_path: Path) -> None:
    stock, reader = gguf.GGUFReader, read_gguf(written(tmp_path))
    with reading_once(reader):
        assert gguf.GGUFReader(tmp_path / "x.gguf") is reader
    assert gguf.GGUFReader is stock
    with reading_once(None):
        assert gguf.GGUFReader is stock


@pytest.mark.parametrize("count", [2**64 - 1, 2**40, 10**6])
def test_gguf_counts_beyond_the_file_are_refused(tmp_path: Path, count: int) -> None:
    before = peak_memory()
    for name in ("tensors", "keys"):
        refused(written(tmp_path, header={name: count}), ".")
    lie = struct.pack("<IIQ", 9, 0, count)  # an array of bytes, at which gguf's reader would loop for ever
    refused(written(tmp_path, keys=[*KEYS[:2], ("words", lie)]), ".*(bytes and has|values or more)")
    refused(written(tmp_path, keys=[("name", struct.pack("<IQ", 8, count))]), ".*bytes and has")
    assert peak_memory() - before < 50 << 20


def test_gguf_arrays_are_short_enough_to_be_read(tmp_path: Path) -> None:
    body = struct.pack("<IIQ", 9, 0, MOST_VALUES + 1) + bytes(MOST_VALUES + 1)
    refused(written(tmp_path, keys=[*KEYS, ("bytes", body)]), ".*values or more")


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({"dims": [2**39, 2**39]}, "."),
        ({"dims": [2**33, 2**31 + 1]}, "."),
        ({"dims": [0, 4]}, ".*impossible shape"),
        ({"dims": [5, 4], "kind": 2}, "."),
        ({"kind": 4096}, ".*4096"),
        ({"rank": 9}, "."),
        ({"offset": 2**50}, ".*bytes and has"),
        ({"offset": 33}, ".*inside another"),
        ({"name": TENSORS[1]["name"]}, ".*duplicated"),
    ],
)
def test_impossible_gguf_tensors_are_refused(tmp_path: Path, tensor: dict, message: str) -> None:
    refused(written(tmp_path, tensors=[{**TENSORS[0], **tensor}, TENSORS[1]]), message)


def test_gguf_files_cut_anywhere_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    content = path.read_bytes()
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        refused(path, ".")


def test_more_gguf_layers_than_tensors_are_refused(tmp_path: Path) -> None:
    for count in (fuzz_gguf.scalar("u32", 10**9), fuzz_gguf.string("2"), fuzz_gguf.array("u8", [1, 1])):
        refused(written(tmp_path, keys=[KEYS[0], ("llama.block_count", count)]), ".*layers")
