"""Every number on a screen, counted again from the files: nothing that a verb prints is taken on trust."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from command_line import read, run
from tiny_models import LLAMA, character_tokenizer

QUICK = ["--samples", 8, "--length", 32, "--align", 8]
UNITS = {"": 1, "k": 1e3, "M": 1e6, "B": 1e9, " B": 1, " kB": 1e3, " MB": 1e6}


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model saved in 16 bits, as most are."""
    folder = tmp_path_factory.mktemp("screens") / "half"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**LLAMA, "head_dim": 32, "intermediate_size": 256})
    transformers.LlamaForCausalLM(config).half().save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "notes.txt"
    path.write_text(" ".join(f"line {number} of notes about many things" for number in range(400)))
    return path


@pytest.fixture(scope="module")
def small(half: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("small") / "small"
    assert run("compress", half, "-o", out, "--ratio", "25%", "--calibration", text, "--eval", text, *QUICK) == 0
    return out


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, no mapping
    return found


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def linear(folder: Path) -> int:
    return sum(x.numel() for name, x in tensors(folder).items() if ".layers." in name and name.endswith("proj.weight"))


def rows(printed: str) -> dict[str, list[str]]:
    """The lines of a table by their first cell."""
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in printed.splitlines() if "│" in line]
    return {line[0]: line[1:] for line in cells}


def shown(number: float, text: str) -> bool:
    """Whether a text is the number to as many digits as it shows."""
    value, decimals, unit = re.fullmatch(r"([\d,]+\.?(\d*))((?: ?[kMBG]B?)?)", text.replace("%", "")).groups()
    scale = 100 if text.endswith("%") else 1 / UNITS[unit]
    return abs(float(value.replace(",", "")) - number * scale) <= 0.5000001 * 10 ** -len(decimals)


def test_compress_says_what_the_files_hold(
    half: Path, small: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    out = tmp_path / "again"
    assert run("compress", half, "-o", out, "--ratio", 0.25, "--calibration", text, "--eval", text, *QUICK) == 0
    table = rows(capsys.readouterr().out)
    old, new = linear(half), linear(out)
    was, now, removed, _ = table["decoder linear weights"]
    assert shown(old, was)
    assert shown(new, now)
    assert shown(1 - new / old, removed)
    was, now, removed, _ = table["weight files"]
    assert shown(weight_bytes(half), was)
    assert shown(weight_bytes(out), now)
    assert shown(1 - weight_bytes(out) / weight_bytes(half), removed)
    assert shown(sum(x.numel() for x in tensors(half).values()), table["whole model"][0])
    measured = next(cells for name, cells in table.items() if name.startswith("perplexity"))
    for folder, said in ((half, measured[0]), (out, measured[1])):
        assert run("eval", folder, "--data", text, "--length", 32, "--windows", 8, "--json", tmp_path / "e.json") == 0
        assert abs(read(tmp_path / "e.json")["perplexity"] / float(said) - 1) < 1e-3
    assert tensors(out).keys() == tensors(small).keys()
    assert all(x.equal(tensors(small)[name]) for name, x in tensors(out).items())


def test_a_model_of_16_bits_comes_back_in_16_bits_whatever_it_was_worked_on_in(
    half: Path, small: Path, text: Path, tmp_path: Path
) -> None:
    assert {x.dtype for x in tensors(small).values() if x.is_floating_point()} == {torch.float16}
    assert read(small / "config.json")["dtype"] == "float16"
    cut = ["--ratio", 0.25, "--calibration", text, "--eval", "none", *QUICK]
    for name, how in (("stream", ["--stream", "on"]), ("wide", ["--dtype", "float32"])):
        assert run("compress", half, "-o", tmp_path / name, *cut, *how) == 0
        found = tensors(tmp_path / name)
        assert all(found[key].equal(x) for key, x in tensors(small).items()), name
    tuned = tmp_path / "tuned"
    assert run("finetune", small, "--data", text, "-o", tuned, "--length", 32, "--max-steps", 2, "--epochs", 1) == 0
    assert {x.dtype for x in tensors(tuned).values() if x.is_floating_point()} == {torch.float16}


def test_report_has_the_source_file_for_before(half: Path, small: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert run("report", small, "-o", page) == 0
    values = set(re.findall(r'data-value="([^"]+)"', page.read_text()))
    assert {str(float(weight_bytes(folder))) for folder in (half, small)} <= {str(float(v)) for v in values if v}


def test_inspect_counts_the_tensors_of_the_file(small: Path, tmp_path: Path) -> None:
    assert run("inspect", small, "--json", tmp_path / "i.json") == 0
    found = read(tmp_path / "i.json")
    assert found["parameters"] == sum(x.numel() for x in tensors(small).values() if x.is_floating_point())
    state = tensors(small)
    heads = LLAMA["num_key_value_heads"]
    cached = sum(len(x) for name, x in state.items() if name.endswith(("k_proj.weight", "v_proj.weight")))
    assert found["kv_bytes_per_token"] == 2 * cached
    assert cached % heads == 0


def test_finetune_counts_what_it_saw(small: Path, text: Path, tmp_path: Path, capsys: Any) -> None:
    words = ["--length", 32, "--max-steps", 2, "--batch-size", 3, "--accumulate", 2, "--json", tmp_path / "t.json"]
    assert run("finetune", small, "--data", text, "-o", tmp_path / "tuned", *words) == 0
    # Two steps of two batches of three windows, each of which teaches all tokens but its first.
    assert "2 steps on 12 of" in capsys.readouterr().out
    assert read(tmp_path / "t.json")["seen"] == {"examples": 12, "tokens": 12 * 31}


def test_quantize_says_bits_per_parameter_of_the_model_that_came(small: Path, tmp_path: Path) -> None:
    pytest.importorskip("hqq")
    words = ["-o", tmp_path / "bits", "--lm-head", "--bits", 8, "--json", tmp_path / "q.json"]
    assert run("quantize", small, *words) == 0
    found = json.loads((tmp_path / "q.json").read_text())
    for side, folder in (("before", small), ("after", tmp_path / "bits")):
        held = sum(x.nbytes for x in tensors(folder).values())
        assert found[side]["model_bytes"] == held
        assert found[side]["per_parameter"] == pytest.approx(8 * held / found["before"]["parameters"])
