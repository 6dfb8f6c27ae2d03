"""`trisect finetune` as a user meets it: compress, tune, evaluate, export; one line for bad input."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tuning import characters

from command_line import read, run
from tiny_models import tiny
from trisect.finetune.training import Watch
from trisect.models import load_model

FAST = ["--length", 300, "--batch-size", 2, "--accumulate", 1, "--quiet"]
RECORDS = [
    {"instruction": "Say it.", "input": "", "output": "one two three"},
    {"instruction": "Again.", "input": "x", "output": "three two one"},
    {"instruction": "Count.", "output": "1 2 3 4"},
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a dense folder, and a compressed one."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "alpaca.json").write_text(json.dumps(RECORDS))
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    (folder / "held.txt").write_text("pack my box with five dozen liquor jugs. " * 40)
    model = tiny("llama-gqa")
    model.config.max_position_embeddings = 512  # a prompt has one token per character
    model.save_pretrained(folder / "dense")
    characters().save_pretrained(folder / "dense")
    arguments = ["--ratio", 0.3, "--rope-scope", "model", "--align", "none", "--samples", 4, "--length", 32]
    arguments += ["--calibration", folder / "text.txt", "--eval", "none", "--quiet"]
    assert run("compress", folder / "dense", "-o", folder / "small", *arguments) == 0
    return folder


@pytest.fixture(scope="module")
def tuned(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tuned") / "tuned"
    arguments = ["--data", files / "alpaca.json", "-o", out, "--lr", 0.01, "--epochs", 3, *FAST]
    arguments += ["--eval-data", files / "held.txt", "--eval-length", 32, "--eval-windows", 4]
    assert run("finetune", files / "small", *arguments, "--json", out.parent / "t.json") == 0
    return out


def test_the_receipt_gains_an_entry_and_loses_none(files: Path, tuned: Path) -> None:
    before, after = read(files / "small" / "receipt.json"), read(tuned / "receipt.json")
    (entry,) = after.pop("tuning")
    assert after == before
    assert entry["steps"] == len(entry["losses"]) == 5
    assert entry["data"]["examples"] == 3
    assert entry["versions"]["peft"] is not None
    assert entry["recipe"]["rank"] == 8
    assert read(tuned.parent / "t.json")["losses"] == entry["losses"]
    assert sorted(p.name for p in tuned.parent.iterdir()) == ["t.json", "tuned"]


def test_held_out_figures_are_those_of_eval(files: Path, tuned: Path, tmp_path: Path) -> None:
    (held,) = read(tuned / "receipt.json")["tuning"][0]["held_out"]
    for folder, when in ((files / "small", "before"), (tuned, "after")):
        arguments = ["--data", files / "held.txt", "--length", 32, "--windows", 4, "--quiet"]
        assert run("eval", folder, *arguments, "--json", tmp_path / "e.json") == 0
        assert read(tmp_path / "e.json")["perplexity"] == pytest.approx(held[when]["perplexity"], rel=1e-6)
    assert held["before"]["perplexity"] != held["after"]["perplexity"]


def test_a_tuned_folder_exports_like_any_other(tuned: Path, tmp_path: Path) -> None:
    assert run("export", tuned, "-o", tmp_path / "hf") == 0
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert type(stock).__name__ == "LlamaForCausalLM"
    ids = torch.arange(3, 23).unsqueeze(0)
    native = load_model(str(tuned), dtype="float32").model
    torch.testing.assert_close(stock(ids).logits, native(ids).logits, rtol=1e-3, atol=1e-3)
    assert run("inspect", tuned, "--json", tmp_path / "i.json") == 0


def test_a_tuned_folder_can_be_tuned_again(files: Path, tuned: Path, tmp_path: Path) -> None:
    arguments = ["--data", files / "text.txt", "-o", tmp_path / "twice", "--max-steps", 1, *FAST]
    assert run("finetune", tuned, *arguments, "--targets", "q, v") == 0
    first, second = read(tmp_path / "twice" / "receipt.json")["tuning"]
    assert (first["data"]["kind"], second["data"]["kind"]) == ("instructions", "text")
    assert second["recipe"]["targets"] == ["q", "v"]


def test_a_dense_folder_stays_a_stock_one(files: Path, tmp_path: Path) -> None:
    arguments = ["--data", files / "alpaca.json", "-o", tmp_path / "out", "--max-steps", 1, *FAST]
    arguments += ["--eval-data", files / "held.txt", "--eval-length", 32]
    assert run("finetune", files / "dense", *arguments) == 0
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").model_type == "llama"
    assert len(read(tmp_path / "out" / "receipt.json")["tuning"]) == 1


def test_instructions_can_be_held_out_too(files: Path, tmp_path: Path) -> None:
    held = tmp_path / "held.jsonl"
    held.write_text("\n".join(map(json.dumps, RECORDS[:2])))
    arguments = ["--data", files / "alpaca.json", "-o", tmp_path / "out", "--epochs", 6, "--lr", 0.02, *FAST]
    assert run("finetune", files / "small", *arguments, "--eval-data", held, "--eval-length", 400) == 0
    (entry,) = read(tmp_path / "out" / "receipt.json")["tuning"][0]["held_out"]
    learned = sum(len(record["output"]) + 1 for record in RECORDS[:2])
    assert entry["before"]["tokens"] == learned
    assert entry["after"]["nll"] < entry["before"]["nll"]


def test_ctrl_c_leaves_a_run_that_resume_finishes(
    files: Path, tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ["--data", files / "alpaca.json", "-o", out, "--lr", 0.01, "--epochs", 3, *FAST]
    begin = Watch.on_step_begin

    def disturbed(watch: Watch, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt
        begin(watch, args, state, control, **more)

    monkeypatch.setattr(Watch, "on_step_begin", disturbed)
    assert run("finetune", files / "small", *arguments, "--save-every", 2) == 130
    said = capsys.readouterr().err
    assert "out.unfinished keeps what is finished (files: 1); the same command goes on from there." in said
    assert [p.name for p in tmp_path.iterdir()] == ["out.unfinished"]
    monkeypatch.setattr(Watch, "on_step_begin", begin)
    assert run("finetune", files / "small", *arguments, "--rank", 3) == 2
    assert "--fresh to start anew" in capsys.readouterr().err
    assert run("finetune", files / "small", *arguments) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (out / "model.safetensors").read_bytes() == (tuned / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "nowhere.json"], "There is no file nowhere.json"),
        (["--data", "FILES/bad.jsonl"], "bad.jsonl, record 2: output is missing"),
        (["--data", "FILES/alpaca.json", "--rank", 0], "rank must be greater than or equal to 1"),
        (["--data", "FILES/alpaca.json", "--targets", "q,vv"], "Unknown linear map 'vv'"),
        (["--data", "FILES/alpaca.json", "--dtype", "float16"], "--dtype float32"),
        (["--data", "FILES/alpaca.json", "--length", 20], "No response of"),
        (["--data", "FILES/alpaca.json", "--save-every", 0], "--save-every"),
        (["--data", "FILES/alpaca.json", "--eval-data", "FILES/alpaca.json"], "is the tuning data"),
        (["--data", "FILES/text.txt", "--length", 100000], "a window needs 100000"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    arguments: list[object], said: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "bad.jsonl").write_text("\n".join(map(json.dumps, [RECORDS[0], {"instruction": "a"}])))
    words = [str(word).replace("FILES", str(files)) for word in arguments]
    assert run("finetune", files / "small", "-o", tmp_path / "out", *FAST, *words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_damaged_receipt_is_not_thrown_away(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "receipt.json").write_text("{")
    (folder / "config.json").write_text("{}")
    assert run("finetune", folder, "--data", files / "alpaca.json", "-o", tmp_path / "out") == 2
    assert "receipt.json is not JSON" in capsys.readouterr().err


def test_a_full_disk_is_noticed_before_tuning(files: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    monkeypatch.setattr(Watch, "on_step_begin", lambda *_, **__: pytest.fail("it was tuned"))
    assert run("finetune", files / "dense", "--data", files / "text.txt", "-o", tmp_path / "out", *FAST) == 2
    assert "only 0.0 MB are free" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
