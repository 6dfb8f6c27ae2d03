"""Every number on a screen, counted again from the files: nothing that a verb prints is taken on trust."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

from command_line import read, run
from tiny_models import LLAMA, character_tokenizer
from trisect.bench import measure

CEILINGS = measure.Ceilings(flops=1e9, copy_bytes=1e9, read_bytes=1e9, matrix=1)
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


def test_compress_says_how_far_more_text_could_get(assets: Path, tmp_path: Path, capsys: Any) -> None:
    """Of eight windows a model keeps more than of text that it was not fitted to; of sixty-four hardly."""
    stories, model = assets / "data" / "tinystories" / "tinystories.txt", assets / "models" / "stories15m"
    gains = {}
    for samples in (8, 64):
        out = tmp_path / str(samples)
        words = ["--ratio", 0.25, "--fast", "--calibration", stories, "--samples", samples]
        assert run("compress", model, "-o", out, *words) == 0
        receipt, printed = read(out / "receipt.json"), capsys.readouterr().out
        held, fitted = (
            math.log(row["after"]["perplexity"] / row["before"]["perplexity"])
            for row in (receipt["perplexity"], receipt["fitted"])
        )
        gains[samples] = 1 - math.exp(fitted - held)
        said = re.search(r"lower it by up to (\d+)%: try --samples (\d+) \(now (\d+)\)", " ".join(printed.split()))
        assert (said is not None) == (gains[samples] >= 0.05)
        if said is not None:
            assert [int(x) for x in said.groups()] == [round(100 * gains[samples]), 4 * samples, samples]
        last = rows(printed)["perplexity, windows calibrated on (8 x 256)"]
        assert shown(receipt["fitted"]["after"]["perplexity"], last[1])
    assert gains[8] > 0.1 > gains[64]


def test_export_counts_the_weights_of_the_files_it_wrote(half: Path, text: Path, tmp_path: Path, capsys: Any) -> None:
    native, stock = tmp_path / "native", tmp_path / "stock"
    words = ["--ratio", 0.25, "--calibration", text, "--eval", "none", "--portable", *QUICK[:4]]
    assert run("compress", half, "-o", native, *words) == 0
    capsys.readouterr()
    assert run("export", native, "-o", stock) == 0
    dtype, size = rows(capsys.readouterr().out)["weights"][0].split(", ")
    assert {str(x.dtype) for x in tensors(stock).values()} == {f"torch.{dtype}"}
    assert shown(weight_bytes(stock), size)
    assert linear(stock) == linear(native)


def test_bench_counts_the_bytes_of_the_file_and_of_the_cache(small: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(measure, "measure_ceilings", lambda *_: CEILINGS)
    words = ["--length", 8, "--new", 4, "--repeats", 1, "--dtype", "float16", "--json", tmp_path / "b.json"]
    assert run("bench", small, *words) == 0
    held = sum(x.nbytes for name, x in tensors(small).items() if "rotary" not in name)
    layers = json.loads((small / "config.json").read_text())["num_hidden_layers"]
    keys = [tensors(small)[f"model.layers.{n}.self_attn.{name}_proj.weight"] for n in range(layers) for name in "kv"]
    for row in read(tmp_path / "b.json")["rows"]:
        if row["case"]["kind"] == "trisect":
            assert row["parameter_bytes"] == held
            assert row["kv_bytes_per_token"] == sum(2 * len(key) for key in keys)
            assert row["tokens_per_second"] == pytest.approx(
                (8 if row["case"]["phase"] == "prefill" else 1) / row["times"]["p50"]
            )


def test_compare_shows_what_its_cells_measured(half: Path, text: Path, tmp_path: Path, capsys: Any) -> None:
    recipe = {
        "name": "two",
        "models": [{"name": "half", "source": str(half)}],
        "methods": ["a3", "svd-llm"],
        "ratios": [0.25],
        "align": 8,
        "calibration": {"source": str(text), "samples": 4, "length": 32},
        "evaluation": [{"name": "notes", "data": str(text), "length": 32, "windows": 4}],
    }
    (tmp_path / "two.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    assert run("compare", tmp_path / "two.yaml", "-o", tmp_path / "cells") == 0
    lines = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    table = {line[0].strip(): [cell.strip() for cell in line[1:]] for line in lines}
    cells = {cell["method"]: cell for cell in map(read, (tmp_path / "cells" / "cells").glob("*.json"))}
    assert set(cells) == {"dense", "a3", "svd-llm"}
    whole = linear(half)
    assert cells["dense"]["counts"]["weights"] == whole
    for method, cell in cells.items():
        found, dense = (c["perplexity"][0]["perplexity"] for c in (cell, cells["dense"]))
        value, *rise = table[method][2].strip("*").split(" ")
        assert shown(found, value)
        assert not rise or float(rise[0].strip("(+)")) == pytest.approx(found - dense, abs=0.005)
        if method != "dense":
            assert shown(1 - cell["counts"]["weights"] / whole, table[method][1])
