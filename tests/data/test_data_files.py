"""What each kind of file gives, and what is said about files that cannot be read."""

import json
import pickle
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from trisect.data.read import read_documents, read_file, read_ids
from trisect.errors import TrisectError

DOCUMENTS = ["one", "two\nlines, an umlaut \u00fc and a separator \u2028 inside", ""]


@pytest.mark.parametrize("field", ["text", "content", "story"])
def test_lines_and_lists_give_the_same_documents(tmp_path: Path, field: str):
    entries = [{"id": 1, field: text} for text in DOCUMENTS]
    lines = [json.dumps(entry, ensure_ascii=False) for entry in entries]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    (tmp_path / "b.json").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "c.json").write_text(json.dumps(entries, indent=1), encoding="utf-8")
    (tmp_path / "d.json").write_text(json.dumps(DOCUMENTS), encoding="utf-8")
    for name in ("a.jsonl", "b.json", "c.json", "d.json"):
        assert read_documents(tmp_path / name) == DOCUMENTS


def test_parquet_gives_its_text_column(tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"id": [1, 2, 3], "sentence": DOCUMENTS})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert read_file(tmp_path / "a.parquet") == DOCUMENTS


def test_any_other_suffix_is_one_document(tmp_path: Path):
    path = tmp_path / "wiki.test.raw"
    path.write_text(" = Title = \n\nText\n", encoding="utf-8")
    assert read_file(path) == [" = Title = \n\nText\n"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"text": "a"}\n{"text": }\n', "line 2: not JSON"),
        ('{"text": "a"}\n\n{"prompt": "b", "id": 1}\n', "line 3: no field.*found prompt, id"),
        ('{"text": 3}\n', "line 1: the text is int"),
        ("{}\n", "found none"),
        ("[1, 2]\n", "entry 1: the text is int"),
    ],
)
def test_bad_jsonl_names_the_line(tmp_path: Path, content: str, words: str):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(TrisectError, match=words):
        read_file(path)


def test_a_bad_json_list_names_the_entry(tmp_path: Path):
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"}, {"text": null}]')
    with pytest.raises(TrisectError, match="entry 2: the text is NoneType"):
        read_file(path)
    path.write_text('[{"text": "a"},\n {"text"}]')
    with pytest.raises(TrisectError, match="line 2: not JSON"):
        read_file(path)


@settings(max_examples=20)
@given(st.lists(st.text(), max_size=4))
def test_jsonl_round_trips_any_text(tmp_path_factory, documents: list[str]):
    path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    assert read_documents(path) == documents


@pytest.mark.parametrize("suffix", ["pt", "pth", "bin", "pkl", "pickle", "PT"])
def test_pickles_are_refused_without_being_opened(tmp_path: Path, suffix: str):
    class Trap:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "sprung",))

    path = tmp_path / f"ids.{suffix}"
    path.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(TrisectError, match=r"pickle.*safetensors"):
        read_file(path)
    assert not (tmp_path / "sprung").exists()


def test_a_pickle_inside_npy_is_refused(tmp_path: Path):
    path = tmp_path / "ids.npy"
    numpy.save(path, numpy.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(TrisectError, match="plain array of integers"):
        read_file(path)


@pytest.mark.parametrize("key", ["input_ids", "tokens"])
def test_token_ids_come_back_as_they_were_saved(tmp_path: Path, key: str):
    ids = torch.arange(12, dtype=torch.int32).reshape(3, 4)
    save_file({key: ids}, tmp_path / "a.safetensors")
    numpy.save(tmp_path / "a.npy", ids.numpy().astype("uint16"))
    for name in ("a.safetensors", "a.npy"):
        read = read_ids(tmp_path / name)
        assert read.dtype == torch.int64
        assert torch.equal(read, ids.long())


def test_files_that_hold_no_ids_say_what_they_hold(tmp_path: Path):
    save_file({"weight": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(TrisectError, match=r"tensors weight.*input_ids or tokens"):
        read_file(tmp_path / "a.safetensors")
    save_file({"tokens": torch.zeros(2)}, tmp_path / "b.safetensors")
    with pytest.raises(TrisectError, match="float32"):
        read_file(tmp_path / "b.safetensors")
    (tmp_path / "c.safetensors").write_text("nonsense")
    with pytest.raises(TrisectError, match="not a safetensors file"):
        read_file(tmp_path / "c.safetensors")


def test_binary_content_under_a_text_name_is_refused(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"ok \xff\xfe")
    with pytest.raises(TrisectError, match=r"not UTF-8 text \(byte 3\)"):
        read_file(tmp_path / "a.txt")
    (tmp_path / "a.parquet").write_bytes(b"PK not parquet")
    with pytest.raises(TrisectError, match="not a Parquet file"):
        read_file(tmp_path / "a.parquet")
