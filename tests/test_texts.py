"""What is calibrated on, how much of it, and that nothing held out of it takes part."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from command_line import read, run
from tiny_models import character_tokenizer, save_tiny, tiny
from trisect.calibrate.texts import MOST, Prepared, held_out_texts, prepare, usual_windows
from trisect.config import CalibrationConfig, CompressConfig
from trisect.data import load_tokens
from trisect.errors import TrisectError

LENGTH = 50


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama-gqa")


def prepared(model: Any, source: object, tokenizer: Any = None, **settings: Any) -> Prepared:
    calibration = CalibrationConfig(source=source, **{"length": LENGTH, **settings})
    return prepare(model, CompressConfig(ratio=0.5, calibration=calibration), tokenizer)


def ids_file(folder: Path, ids: torch.Tensor, name: str = "ids") -> str:
    save_file({"input_ids": ids.contiguous()}, folder / f"{name}.safetensors")
    return str(folder / f"{name}.safetensors")


@pytest.mark.parametrize(
    ("parameters", "length", "windows"),
    [
        (134_515_008, 2048, 32),  # SmolLM2-135M
        (15_191_712, 256, 256),  # stories15m
        (7_000_000_000, 2048, 16),
        (1_000, 16, 256),
    ],
)
def test_on_a_cpu_the_windows_follow_from_the_models_size(parameters: int, length: int, windows: int) -> None:
    model = nn.Linear(parameters, 1, bias=False, device="meta")
    assert usual_windows(model, length=length) == windows


def test_on_cuda_there_are_256_windows_whatever_the_model(model: Any) -> None:
    class OnCuda:
        def parameters(self) -> Any:
            device = torch.device("cuda")
            yield type("Parameter", (), {"device": device, "numel": lambda self: 70_000_000_000})()

    assert usual_windows(OnCuda(), length=8192) == 256
    assert usual_windows(model, length=LENGTH) == MOST


@pytest.mark.parametrize("sampling", ["random", "first"])
@pytest.mark.parametrize("kind", ["stream", "rows"])
def test_what_is_held_out_of_a_file_is_in_no_calibration_window(
    model: Any, tmp_path: Path, sampling: str, kind: str
) -> None:
    ids = torch.arange(2000)  # every token has its position as its name
    source = ids_file(tmp_path, ids if kind == "stream" else ids.reshape(-1, LENGTH))
    found = prepared(model, source, samples=20, sampling=sampling)
    texts, notes = held_out_texts(found, None, count=3)
    (text,) = texts
    assert text.source == "held-out ids.safetensors"
    assert not notes
    assert text.ids.flatten().tolist() == list(range(1850, 2000))
    assert not set(text.ids.flatten().tolist()) & set(found.tokens.ids.flatten().tolist())
    if sampling == "first":
        assert found.tokens.ids.flatten().tolist() == list(range(1000))
    else:
        assert found.tokens.ids.max() < 1800


def test_without_a_number_a_short_file_gives_what_it_has_and_the_first_line_says_so(model: Any, tmp_path: Path) -> None:
    found = prepared(model, ids_file(tmp_path, torch.arange(2000)))
    assert len(found.tokens.ids) == 36  # of 40 windows a tenth is held out
    assert found.calibration.samples == 36
    assert found.line() == (
        "Calibrating on ids.safetensors: 36 windows of 50 tokens from 1 text, all that there are (256 would be usual)."
    )


@pytest.mark.parametrize("settings", [{"samples": 1}, {"samples": 2, "sampling": "first"}])
def test_a_text_too_short_to_hold_anything_out_is_said_and_not_measured(
    model: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    size = LENGTH * settings["samples"] + LENGTH // 2
    found = prepared(model, ids_file(tmp_path, torch.arange(size)), **settings)
    texts, notes = held_out_texts(found, None, count=8)
    assert texts == []
    assert len(notes) == 1
    assert notes[0].startswith("ids.safetensors is too short to hold anything out")


def test_known_texts_give_the_windows_that_load_tokens_gives(model: Any) -> None:
    tokenizer = character_tokenizer()
    for source in ("builtin", "builtin:0.75+builtin:0.25"):
        found = prepared(model, source, tokenizer, samples=8, seed=3)
        direct = load_tokens(source, tokenizer, samples=8, length=LENGTH, seed=3, split="calibration")
        assert found.tokens.hash == direct.hash


def test_a_text_that_took_no_part_is_measured_beside_a_file(model: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    tokenizer = character_tokenizer()
    found = prepared(model, str(tmp_path / "notes.txt"), tokenizer, samples=8)
    texts, _ = held_out_texts(found, tokenizer, count=4)
    assert [text.source for text in texts] == ["held-out notes.txt", "builtin"]
    expected = load_tokens("builtin", tokenizer, samples=4, length=LENGTH, sampling="first", split="evaluation")
    assert texts[1] == expected  # bits per byte included
    alone, _ = held_out_texts(prepared(model, "builtin", tokenizer, samples=8), tokenizer, count=4)
    assert [text.source for text in alone] == ["held-out builtin"]


def test_several_sources_are_a_mixture_however_they_are_written(model: Any, tmp_path: Path) -> None:
    names = [ids_file(tmp_path, torch.arange(2000) + 2000 * number, f"{number}") for number in range(2)]
    listed, written = prepared(model, names, samples=8), prepared(model, "+".join(names), samples=8)
    assert listed.tokens == written.tokens
    assert sorted((listed.tokens.ids[:, 0] // 2000).tolist()) == [0] * 4 + [1] * 4
    assert "from 2 texts" in listed.line()
    odd = tmp_path / "a+b.txt"
    odd.write_text("text")
    assert CalibrationConfig(source=[str(odd)]).source == str(odd)
    with pytest.raises(TrisectError, match="rename the file"):
        CalibrationConfig(source=[str(odd), "c4"])


def test_local_copies_stand_in_for_the_hub(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split in ("calibration", "evaluation"):
        (tmp_path / "c4").mkdir(exist_ok=True)
        (tmp_path / "c4" / f"{split}.txt").write_text(f"a page of the {split}. " * 300)
    monkeypatch.setenv("TRISECT_DATA", str(tmp_path))
    found = prepared(model, None, character_tokenizer(), samples=8)
    assert (found.calibration.source, found.stopgap) == ("c4", False)
    texts, _ = held_out_texts(found, character_tokenizer(), count=2)
    assert [text.source for text in texts] == ["held-out c4", "builtin"]


def test_the_default_can_be_synthetic_text_mixed_with_another(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trisect.data.catalogue.STOPGAP", "builtin+own-words")  # the name from before
    before = {name: value.clone() for name, value in model.state_dict().items()}
    told: list[tuple[str, int, int]] = []
    config = CompressConfig(ratio=0.5, calibration=CalibrationConfig(samples=8, length=LENGTH))
    tokenizer = character_tokenizer()
    found = prepare(model, config, tokenizer, progress=lambda *what: told.append(what))
    assert "builtin and synthetic: 8 windows of 50 tokens from 2 texts. This is a stopgap" in found.line()
    assert told[-1][0] == "tokens written"
    assert told[-1][1] == told[-1][2]
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert prepare(model, config, tokenizer).tokens == found.tokens
    texts, _ = held_out_texts(found, tokenizer, count=2)
    assert "held-out synthetic" in [text.source for text in texts]


def test_the_table_and_the_receipt_have_a_row_for_each_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = save_tiny(tmp_path / "tiny"), tmp_path / "out"
    names = []
    for word in ("fox", "dog"):
        names += ["--calibration", tmp_path / f"{word}.txt"]
        (tmp_path / f"{word}.txt").write_text(f"the quick brown {word} jumps over the lazy cat. " * 60)
    told = ["--ratio", 0.25, "--method", "a3", "--align", "none", "--length", 32, "--quiet"]
    assert run("compress", folder, "-o", out, *names, *told, "--json", tmp_path / "r.json") == 0
    said = capsys.readouterr().out
    assert "\nCalibrating on fox.txt and dog.txt: " in f"\n{said}"
    rows = ["held-out fox.txt", "held-out dog.txt", "builtin"]
    for row in rows:
        assert f"perplexity, {row} (8 x 32)" in said
    for record in (read(out / "receipt.json"), read(tmp_path / "r.json")):
        assert [row["after"]["data"] for row in record["perplexities"]] == rows
        assert record["perplexity"] == record["perplexities"][0]
    card = (out / "README.md").read_text()
    assert all(f"perplexity ({row}, 8 windows of 32 tokens)" in card for row in rows)
    assert run("report", out, "-o", tmp_path / "page.html") == 0
    page = (tmp_path / "page.html").read_text()
    assert all(f"perplexity, {row}" in page for row in rows)
