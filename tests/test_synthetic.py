"""Synthetic text is drawn from the model, the same for the same seed, and survive a kill.

References: softmax of stock transformers' logits; `generate(do_sample=False)`.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from command_line import run
from narrow_models import narrow
from tiny_models import PLAIN, VOCAB, character_tokenizer, logits, save_tiny, tiny, tokens
from tolerances import assert_same_text
from trisect.calibrate.texts import SampleConfig, Writer, write_synthetic
from trisect.decode import Decoder, drawn
from trisect.errors import TrisectError

SMALL = SampleConfig(samples=5, length=12, batch_size=2)


def with_bos() -> Any:
    """A tokenizer that puts a token before every text, as Llama's does."""
    tokenizer = character_tokenizer(bos_token="~")
    bos = tokenizer.convert_tokens_to_ids("~")
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="~ $A", special_tokens=[("~", bos)])
    return tokenizer


def texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def write(out: Path, config: SampleConfig = SMALL, **more: Any) -> bytes:
    write_synthetic(tiny("llama-gqa"), character_tokenizer(), config, out, **more)
    return out.read_bytes()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_are_as_frequent_as_softmax_says(temperature: float) -> None:
    row = torch.tensor([2.0, 0.5, -1.0, 0.0, 30.0])
    torch.manual_seed(0)
    found = drawn(temperature=temperature, vocabulary=4)(row.expand(40_000, -1))
    frequencies = found.bincount(minlength=5) / len(found)
    expected = (row[:4] / temperature).softmax(dim=-1)
    # Five standard errors of the most uncertain share; and what is behind the vocabulary never comes.
    assert (frequencies[:4] - expected).abs().max() < 5 * (0.25 / 40_000) ** 0.5
    assert frequencies[4] == 0


@pytest.mark.parametrize("name", PLAIN)
def test_cold_draws_are_greedy_in_every_family(name: str) -> None:
    model, ids = narrow(name), tokens(2, 5)
    settings: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, **settings)
    decoder = Decoder(model, batch=2, max_length=12, pick=drawn(temperature=1e-5))
    assert_same_text(model, decoder.generate(ids, 6), expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_texts_surprise_the_stock_model_as_much_as_its_entropy_says(device: str) -> None:
    """Over many steps: on a GPU each of them is a replay of one graph, which has to draw afresh."""
    writer = Writer(tiny("llama-gqa").to(device), with_bos(), SampleConfig(samples=64, length=64, batch_size=64))
    ids, known = writer.draw(0).cpu(), len(with_bos())
    stock = logits(tiny("llama-gqa"), ids)[:, 1:-1, :known].log_softmax(dim=-1)  # (b, t, v)
    drawn_at = stock.gather(-1, ids[:, 2:, None]).squeeze(-1)
    entropy = -(stock.exp() * stock).sum(dim=-1)
    variance = (stock.exp() * (stock + entropy.unsqueeze(-1)).square()).sum(dim=-1)
    # What a draw says beyond the entropy has no mean and is uncorrelated from step to step.
    assert (drawn_at + entropy).sum().abs() <= 5 * variance.sum().sqrt()
    assert len(ids.unique(dim=0)) == len(ids)


def test_texts_open_with_what_the_tokenizer_puts_there_and_an_ordinary_token() -> None:
    tokenizer = with_bos()
    writer = Writer(tiny("llama-gqa"), tokenizer, SampleConfig(samples=200, length=4, batch_size=200))
    opening = writer.draw(0)[:, :2]
    assert opening.shape == (200, 2)
    assert (opening[:, 0] == tokenizer.bos_token_id).all()
    special = {tokenizer.unk_token_id, tokenizer.bos_token_id}
    assert not special & set(opening[:, 1].tolist())
    assert len(opening[:, 1].unique()) > VOCAB // 2
    assert all(not text.startswith("~") for text in writer.write(0))


def test_the_same_seed_gives_the_same_bytes_and_leaves_torchs_own_alone(tmp_path: Path) -> None:
    model = tiny("llama-gqa")
    before = torch.get_rng_state()
    write_synthetic(model, character_tokenizer(), SMALL, tmp_path / "a.jsonl")
    assert torch.get_rng_state().equal(before)
    first = (tmp_path / "a.jsonl").read_bytes()
    assert write(tmp_path / "b.jsonl") == first
    assert write(tmp_path / "c.jsonl", SampleConfig(samples=5, length=12, batch_size=2, seed=1)) != first
    assert len(texts(tmp_path / "a.jsonl")) == SMALL.samples
    receipt = json.loads((tmp_path / "a.receipt.json").read_text())
    assert receipt["recipe"]["temperature"] == 1.0
    assert receipt["token_hash"]


def test_a_run_that_dies_goes_on_behind_its_last_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, out, begun = write(tmp_path / "whole.jsonl"), tmp_path / "out.jsonl", []
    written = Writer.write

    def dies(writer: Writer, number: int, progress: Any = None) -> list[str]:
        begun.append(number)
        if begun == [0, 1]:
            raise KeyboardInterrupt
        return written(writer, number, progress)

    monkeypatch.setattr(Writer, "write", dies)
    with pytest.raises(KeyboardInterrupt, match=r"files: 1.*the same command"):
        write(out)
    assert not out.exists()
    assert not out.with_suffix(".receipt.json").exists()
    assert write(out) == whole
    assert begun == [0, 1, 1, 2]
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.jsonl", "out.receipt.json"]


def test_pieces_of_other_settings_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, out = Writer.write, tmp_path / "out.jsonl"

    def dies(writer: Writer, number: int, progress: Any = None) -> list[str]:
        if number == 1:
            raise RuntimeError
        return written(writer, number, progress)

    monkeypatch.setattr(Writer, "write", dies)
    with pytest.raises(RuntimeError):
        write(out)
    monkeypatch.setattr(Writer, "write", written)
    other = SampleConfig(samples=5, length=12, batch_size=2, seed=3)
    assert write(out, other) == write(tmp_path / "alone.jsonl", other)


def test_a_device_that_is_too_small_is_told_what_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(writer: Writer) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Decoder, "step", full)
    with pytest.raises(TrisectError, match="type --batch-size 1, or --dtype bfloat16"):
        write(tmp_path / "a.jsonl")
    assert not list(tmp_path.iterdir())


def test_progress_ends_at_all_tokens(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write(
        tmp_path / "a.jsonl", SampleConfig(samples=4, length=40, batch_size=2), progress=lambda *now: seen.append(now)
    )
    assert seen[-1] == (160, 160)
    assert seen == sorted(seen)
    assert len(seen) > 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": 0}, "samples must be greater than or equal to 1"),
        ({"batch_size": True}, "batch_size must be"),
        ({"temperature": 0.0}, "temperature must be greater than 0"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"length": 1}, "length must be"),
    ],
)
def test_settings_that_make_no_text_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(TrisectError, match=message):
        SampleConfig(**settings)


def test_what_cannot_be_written_is_said_before_anything_is(tmp_path: Path) -> None:
    taken = tmp_path / "taken.jsonl"
    taken.write_text("mine\n")
    for out, message in ((taken, "is there already"), (tmp_path / "a.txt", r"try -o .*a\.jsonl")):
        with pytest.raises(TrisectError, match=message):
            write(out)
    with pytest.raises(TrisectError, match="without a tokenizer"):
        write_synthetic(tiny("llama-gqa"), None, SMALL, tmp_path / "b.jsonl")
    with pytest.raises(TrisectError, match=r"give --length \d+"):
        write(tmp_path / "c.jsonl", SampleConfig(samples=1, length=10**6))
    with pytest.raises(TrisectError, match="none drawn from the model"):
        write_synthetic(tiny("llama-gqa"), with_bos(), SampleConfig(length=2), tmp_path / "d.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["taken.jsonl"]
    assert taken.read_text() == "mine\n"


def test_a_user_samples_and_calibrates_on_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, own, small = save_tiny(tmp_path / "model"), tmp_path / "own.jsonl", tmp_path / "small"
    assert run("sample", model, "-o", own, "--samples", 4, "--length", 64) == 0
    shown = capsys.readouterr().out
    assert "4 texts, 256 tokens" in shown
    assert f"--calibration {own}" in shown
    text = tmp_path / "text.txt"
    text.write_text("some text of another kind " * 40)
    mixed = f"{text}:0.5+{own}:0.5"
    cut = ["--ratio", 0.25, "--align", "none", "--samples", 4, "--length", 32, "--calibration", mixed]
    assert run("compress", model, "-o", small, *cut) == 0
    receipt = json.loads((small / "receipt.json").read_text())
    assert receipt["recipe"]["calibration"]["source"] == mixed
    assert run("sample", model, "-o", own) == 2
    assert "is there already" in capsys.readouterr().err
