"""Known datasets: `load_dataset` on local files, TRISECT_DATA, and a fast offline failure."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest
from huggingface_hub import constants

from trisect.data.catalogue import DATASETS, DatasetRecord, Split
from trisect.data.read import dataset_text, hub_documents
from trisect.errors import TrisectError

ROWS = [f"document {number}" for number in range(20)]


@pytest.fixture(autouse=True)
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRISECT_DATA", raising=False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets-cache")


def local_record(path: str, files: Path, *, field: str, **limits: int) -> DatasetRecord:
    part = Split(name="train", data_files=str(files), **limits)
    parts = {"calibration": part, "evaluation": part}
    return DatasetRecord(description="local", licence="ours", path=path, field=field, **parts)


def write_rows(folder: Path, kind: str) -> tuple[Path, str]:
    import pyarrow
    import pyarrow.parquet

    path = folder / f"rows.{kind}"
    if kind == "json":
        path.write_text("".join(json.dumps({"text": row}) + "\n" for row in ROWS))
        return path, "text"
    if kind == "text":
        path.write_text("\n".join(ROWS))
        return path, "text"
    pyarrow.parquet.write_table(pyarrow.table({"sentence": ROWS}), path)
    return path, "sentence"


@pytest.mark.parametrize("kind", ["json", "text", "parquet"])
def test_load_dataset_gives_the_rows_in_order(tmp_path: Path, kind: str):
    path, field = write_rows(tmp_path, kind)
    record = local_record(kind, path, field=field)
    assert hub_documents(record, name="x", split="calibration") == ROWS


def test_limited_splits_stream_and_stop_early(tmp_path: Path):
    path, field = write_rows(tmp_path, "json")
    five = local_record("json", path, field=field, max_documents=5)
    assert hub_documents(five, name="x", split="evaluation") == ROWS[:5]
    # 10 characters each: the third document is the one that reaches 25.
    some = local_record("json", path, field=field, max_characters=25)
    assert hub_documents(some, name="x", split="evaluation") == ROWS[:3]
    behind = local_record("json", path, field=field, skip_documents=5, max_documents=2)
    assert hub_documents(behind, name="x", split="calibration") == ROWS[5:7]


@pytest.mark.parametrize("name", list(DATASETS))
def test_no_document_of_a_dataset_both_calibrates_and_evaluates(name: str):
    one, two = DATASETS[name].calibration, DATASETS[name].evaluation
    if (one.name, one.data_files) == (two.name, two.data_files):
        assert two.max_documents is not None
        assert one.skip_documents >= two.max_documents
    assert DATASETS[name].licence


def test_documents_are_joined_as_the_record_says(tmp_path: Path):
    path, field = write_rows(tmp_path, "json")
    record = local_record("json", path, field=field)
    assert dataset_text("x", split="evaluation", records={"x": record}) == "\n\n".join(ROWS)


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_a_local_copy_is_read_before_the_hub(tmp_path: Path, monkeypatch, kind: str):
    folder = tmp_path / "ptb"
    folder.mkdir()
    monkeypatch.setenv("TRISECT_DATA", str(tmp_path))
    if kind == "txt":
        (folder / "evaluation.txt").write_text("a b\n")
    elif kind == "jsonl":
        (folder / "evaluation.jsonl").write_text('{"sentence": "a b\\n"}\n')
    else:
        import pyarrow
        import pyarrow.parquet

        table = pyarrow.table({"sentence": ["a b\n"]})
        pyarrow.parquet.write_table(table, folder / "evaluation.parquet")
    assert dataset_text("ptb", split="evaluation") == "a b\n"


def test_a_local_copy_is_limited_like_the_hub_one(tmp_path: Path, monkeypatch):
    (tmp_path / "c4").mkdir()
    lines = "".join(json.dumps({"text": str(number)}) + "\n" for number in range(1500))
    (tmp_path / "c4" / "evaluation.jsonl").write_text(lines)
    monkeypatch.setenv("TRISECT_DATA", str(tmp_path))
    assert dataset_text("c4", split="evaluation") == " ".join(map(str, range(1100)))


def test_a_wrong_setting_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("TRISECT_DATA", str(tmp_path / "absent"))
    with pytest.raises(TrisectError, match=r"TRISECT_DATA.*not a folder"):
        dataset_text("ptb", split="evaluation")


@pytest.mark.parametrize("name", list(DATASETS))
def test_an_unreachable_hub_fails_fast_and_says_what_to_do(name: str, monkeypatch):
    for proxy in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(proxy, raising=False)
        monkeypatch.delenv(proxy.upper(), raising=False)
    # Nothing listens on port 9 of this machine, so the refusal does not depend on the network.
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    before, asked = constants.HF_HUB_OFFLINE, []
    load_dataset = datasets.load_dataset

    def spy(*args: Any, **settings: Any) -> Any:
        asked.append(constants.HF_HUB_OFFLINE)
        return load_dataset(*args, **settings)

    monkeypatch.setattr(datasets, "load_dataset", spy)
    with pytest.raises(TrisectError, match=rf"dataset {name}.*text file.*TRISECT_DATA") as caught:
        dataset_text(name, split="calibration")
    assert asked == [True]  # in the mode that does not try again and again
    assert "\n" not in str(caught.value)
    assert before == constants.HF_HUB_OFFLINE


def test_missing_files_of_a_record_are_reported(tmp_path: Path):
    record = local_record("json", tmp_path / "absent.json", field="text")
    with pytest.raises(TrisectError, match="could not be loaded"):
        hub_documents(record, name="x", split="calibration")
