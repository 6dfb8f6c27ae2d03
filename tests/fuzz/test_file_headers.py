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
from fuzz_mutations import flipped
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trisect.errors import TrisectError
from trisect.models.source import BITS, MOST_ENTRIES, read_gguf_header, read_header

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
            assert tensor.elements * BITS[tensor.dtype] == 8 * library.get_tensor(name).nbytes
        assert metadata == library.metadata()


def test_what_the_library_refuses_is_refused(file: Path) -> None:
    """Over damaged files: ours may be stricter (repeated keys), never laxer."""
    content, stricter = file.read_bytes(), 0
    for seed in range(400):
        file.write_bytes(flipped(Random(seed), content))
        try:
            with safe_open(file, framework="pt") as library:
                theirs = set(library.keys())
        except (SafetensorError, OSError):
            theirs = None
        try:
            ours = set(read_header(file)[0])
        except TrisectError:
            ours = None
        if theirs is None:
            assert ours is None, seed
        stricter += theirs is not None and ours is None
        assert ours is None or ours == theirs
    assert stricter <= 4


def test_the_tensor_where_a_file_was_cut_is_named(tmp_path: Path) -> None:
    tensors = {f"layer.{n}": torch.ones(5, n + 1) for n in range(6)}
    path = tmp_path / "x.safetensors"
    save_file(tensors, path)
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    for cut in range(start, len(content), 7):
        path.write_bytes(content[:cut])
        hit = min(
            entry["data_offsets"][0] for entry in header.values() if start + entry["data_offsets"][1] > cut
        )
        name = next(name for name, entry in header.items() if entry["data_offsets"][0] == hit)
        with pytest.raises(
            TrisectError, match=rf"x\.safetensors is damaged or cut short: the tensor '{name}'"
        ):
            read_header(path)


def test_sizes_are_refused_before_they_are_believed(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for length in (2**63, 2**40, 10**8 + 1, 0, 1):
        path.write_bytes(struct.pack("<Q", length) + b"{}")
        with pytest.raises(TrisectError, match="announces a header"):
            read_header(path)
    for shape in ([2**40, 2**40], [-1], [1.5], ["1"], [True], 3, [2**62], [1] * 99):
        text = json.dumps({"t": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 4)
        with pytest.raises(TrisectError, match="the tensor 't'"):
            read_header(path)


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


def test_a_gguf_header_says_what_the_library_says(tmp_path: Path) -> None:
    path = written(tmp_path)
    library, ours = gguf.GGUFReader(path), read_gguf_header(path)
    assert ours.tensors == {tensor.name: tuple(tensor.shape.tolist()) for tensor in library.tensors}
    assert ours.architecture == library.fields["general.architecture"].contents()
    assert ours.counts == {"llama.block_count": library.fields["llama.block_count"].contents()}
    assert ours.elements == sum(tensor.n_elements for tensor in library.tensors)


@pytest.mark.parametrize("count", [2**64 - 1, 2**40, 10**6])
def test_gguf_counts_beyond_the_file_are_refused(tmp_path: Path, count: int) -> None:
    for name in ("tensors", "keys"):
        with pytest.raises(TrisectError, match=f"announces .* {name}"):
            read_gguf_header(written(tmp_path, header={name: count}))
    lie = struct.pack("<IIQ", 9, 0, count)  # an array of bytes, at which gguf's reader would loop for ever
    with pytest.raises(TrisectError, match="entries of 'words'"):
        read_gguf_header(written(tmp_path, keys=[*KEYS[:2], ("words", lie)]))
    with pytest.raises(TrisectError, match="text of"):
        read_gguf_header(written(tmp_path, keys=[("name", struct.pack("<IQ", 8, count))]))


def test_gguf_arrays_are_short_enough_to_be_read(tmp_path: Path) -> None:
    body = struct.pack("<IIQ", 9, 0, MOST_ENTRIES + 1) + bytes(MOST_ENTRIES + 1)
    with pytest.raises(TrisectError, match="its arrays have more than"):
        read_gguf_header(written(tmp_path, keys=[*KEYS, ("bytes", body)]))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({"dims": [2**39, 2**39]}, "ends at byte"),
        ({"dims": [0, 4]}, "impossible shape"),
        ({"dims": [5, 4], "kind": 2}, "impossible shape"),
        ({"kind": 4096}, "unknown type"),
        ({"rank": 9}, "9 dimensions"),
        ({"offset": 2**50}, "ends at byte"),
        ({"offset": 33}, "inside another"),
        ({"name": TENSORS[1]["name"]}, "comes twice"),
    ],
)
def test_impossible_gguf_tensors_are_named(tmp_path: Path, tensor: dict, message: str) -> None:
    with pytest.raises(TrisectError, match=message):
        read_gguf_header(written(tmp_path, tensors=[{**TENSORS[0], **tensor}, TENSORS[1]]))


def test_gguf_files_cut_anywhere_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    content = path.read_bytes()
    for cut in range(len(content)):
        path.write_bytes(content[:cut])
        with pytest.raises(TrisectError, match=r"x\.gguf"):
            read_gguf_header(path)


def test_more_gguf_layers_than_tensors_are_refused(tmp_path: Path) -> None:
    keys = [KEYS[0], ("llama.block_count", fuzz_gguf.scalar("u32", 10**9))]
    with pytest.raises(TrisectError, match="1,000,000,000 layers"):
        read_gguf_header(written(tmp_path, keys=keys))
