"""The command line as a user meets it: the spellings of design.md, JSON out, one line for bad input.

The model is tiny and random, with a character tokenizer; the text is the built-in one or a file.
"""

from pathlib import Path

import pytest
import torch

from command_line import read, run
from tiny_models import character_tokenizer, save_tiny, tiny
from trisect.commands.start import family_rows
from trisect.models import FAMILIES, WRAPPERS, load_model

FAST = ["--samples", "4", "--length", "32", "--eval-windows", "2", "--align", "none", "--quiet"]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return file


def test_compress_writes_a_folder_that_inspect_and_eval_understand(
    model_folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, result = tmp_path / "out", tmp_path / "r.json"
    arguments = ["--ratio", 0.25, "--calibration", text, "--eval", text, "--json", result, *FAST]
    assert run("compress", model_folder, "-o", out, *arguments) == 0
    assert "QK" in capsys.readouterr().out
    measured = read(result)
    assert measured["ratio"] == pytest.approx(0.25)
    assert {"before", "after"} <= measured["perplexity"].keys()
    assert sorted(p.name for p in out.iterdir() if p.suffix in {".json", ".safetensors"}) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "probe.json",
        "receipt.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert run("inspect", out, "--json", tmp_path / "i.json") == 0
    seen = read(tmp_path / "i.json")
    model = load_model(str(out)).model
    assert seen["parameters"] == sum(p.numel() for p in model.parameters())
    assert seen["ratio"] == pytest.approx(0.25)
    assert seen["layers"][0] == {"qk": 12, "vo": 12, "mlp": 60}
    ids = torch.ones(1, 5, dtype=torch.long)
    cache = model(ids, use_cache=True).past_key_values
    live = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
    assert seen["kv_bytes_per_token"] * 5 == live
    arguments = ["--data", text, "--length", 32, "--windows", 2, "--json", tmp_path / "e.json"]
    assert run("eval", out, *arguments) == 0
    assert read(tmp_path / "e.json")["perplexity"] == pytest.approx(measured["perplexity"]["after"]["perplexity"])


def test_inspect_and_plan_show_experts(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny("qwen2_moe").save_pretrained(tmp_path / "dense")
    character_tokenizer().save_pretrained(tmp_path / "dense")
    goal = ["--ratio", 0.25, "--method", "reap", "--parts", "mlp"]
    assert run("plan", tmp_path / "dense", *goal) == 0
    assert "2 per token and the shared one" in capsys.readouterr().out
    out = tmp_path / "out"
    assert run("compress", tmp_path / "dense", "-o", out, *goal, "--calibration", text, "--eval", "none", *FAST) == 0
    capsys.readouterr()
    assert run("inspect", out, "--json", tmp_path / "i.json") == 0
    seen = read(tmp_path / "i.json")
    shown = " ".join(capsys.readouterr().out.split())
    assert "expert 24" in shown
    assert seen["original"]["layers"][0] == {"qk": 16, "vo": 16, "mlp": 24, "experts": 4, "top_k": 2, "shared": 2}
    assert seen["layers"][0]["experts"] == 3
    assert seen["parameters"] == sum(p.numel() for p in load_model(str(out)).model.parameters())


def test_moments_are_collected_once_and_cut_at_two_ratios(model_folder: Path, text: Path, tmp_path: Path) -> None:
    moments = tmp_path / "m.safetensors"
    arguments = ["--calibration", text, "--samples", 4, "--length", 32, "--quiet"]
    assert run("calibrate", model_folder, "-o", moments, *arguments) == 0
    widths = []
    for ratio in (0.25, 0.5):
        out = tmp_path / f"out{ratio}"
        arguments = ["--ratio", ratio, "--method", "a3", "--moments", moments, "--eval", "none", *FAST]
        assert run("compress", model_folder, "-o", out, *arguments) == 0
        widths.append(read(out / "config.json")["trisect"]["layers"][0]["mlp"])
    assert widths == [60, 40]


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--ratio", 0.5, "--align", "none", "--dry-run", "--json", tmp_path / "p.json"]
    assert run("compress", model_folder, "-o", tmp_path / "out", *arguments) == 0
    assert "50.0%" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert read(tmp_path / "p.json")["plan"]["layers"][0] == {"qk": 8, "pairs": 4, "vo": 8, "mlp": 40}


def test_parts_and_layers_limit_the_cut(model_folder: Path, text: Path, tmp_path: Path) -> None:
    arguments = ["--ratio", 0.25, "--calibration", text, "--eval", "none", *FAST]
    arguments += ["--parts", "ov", "--layers", "1-2"]
    assert run("compress", model_folder, "-o", tmp_path / "out", *arguments) == 0
    layers = read(tmp_path / "out" / "config.json")["trisect"]["layers"]
    assert [layer["vo"] for layer in layers] == [16, 12, 12]
    assert {layer["qk"] for layer in layers} == {16}


def test_the_scope_of_rotations_and_pieces_left_out_reach_the_model_and_its_receipt(
    model_folder: Path, text: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("rope_scope: model\nwithout: [streams]\nmethod: a3+\n")
    typed = ["--rope-scope", "layer", "--without", "values,refit-o"]
    goal = ["--ratio", 0.25, "--config", recipe, *typed]
    assert run("plan", model_folder, *goal, "--align", "none") == 0
    out = tmp_path / "out"
    assert run("compress", model_folder, "-o", out, "--calibration", text, "--eval", "none", *goal, *FAST) == 0
    written = read(out / "receipt.json")["recipe"]
    assert (written["rope_scope"], written["without"]) == ("layer", ["values", "refit-o"])
    assert [layer["folded"] for layer in read(out / "config.json")["trisect"]["layers"]] == [True] * 3
    rates = [layer.self_attn.rotary_rates for layer in load_model(str(out)).model.model.layers]
    assert all(rows[0].equal(rows[1]) for rows in rates)


KNOWN = {
    "methods": "a3",
    "pieces": "fold pairs of nearly equal frequency",
    "families": "qwen3_moe",
    "data": "wikitext2",
    "models": "smollm2-135m",
}


@pytest.mark.parametrize("kind", KNOWN)
def test_ls_lists_every_table(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("ls", kind) == 0
    assert KNOWN[kind] in capsys.readouterr().out


def test_ls_families_says_what_each_supports() -> None:
    rows = {name: row for name, *row in family_rows()}
    assert {*FAMILIES, *WRAPPERS} == set(rows)
    assert rows["llama"] == ["pairs, folds", "yes", "yes", "no", "yes", "yes", "plugin"]
    assert rows["gemma3_text"] == ["pairs", "yes", "yes", "no", "yes, QK whole", "yes, QK whole", "plugin"]
    assert rows["gpt2"] == ["SVD", "yes", "yes", "no", "no", "no", "plugin"]
    assert rows["gemma4_text"] == ["pairs", "whole behind a norm", "yes", "yes", "no", "no", "plugin"]
    assert rows["llama4_text"] == ["pairs", "yes", "yes", "yes", "no", "no", "no"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ratio", "1.5"], "ratio"),
        (["--ratio", "0"], "ratio"),
        (["--ratio", "0.99"], "out of reach"),
        (["--ratio", "0.25", "--method", "a4"], "Known: a3,"),
        (["--ratio", "0.25", "--parts", "qk,vo"], "vo"),
        (["--ratio", "0.25", "--layers", "0-9"], "layer"),
        (["--ratio", "0.25", "--calibration", "nowhere.txt"], "nowhere.txt"),
        (["--ratio", "0.25", "--length", "100000"], "tokens"),
        (["--ratio", "0.25", "--dtype", "float8"], "float32"),
        (["--ratio", "0.25", "--rope-scope", "heads"], "Did you mean head?"),
        (["--ratio", "0.25", "--without", "value"], "Did you mean values?"),
        ([], "ratio"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing_behind(
    model_folder: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    fast = [word for word in FAST if word not in arguments]
    if "--length" in arguments:
        fast = ["--samples", "4", "--align", "none"]
    base = ["compress", model_folder, "-o", tmp_path / "out", "--eval", "none", *fast]
    if "--calibration" not in arguments:
        base += ["--calibration", text]
    before = sorted(tmp_path.iterdir())
    assert run(*base, *arguments) == 2
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0
    assert error.startswith("error: ")
    assert message in error
    assert sorted(tmp_path.iterdir()) == before


def test_empty_calibration_text_is_refused(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").write_text("")
    arguments = ["--ratio", 0.25, "--calibration", tmp_path / "empty.txt", "--eval", "none", *FAST]
    assert run("compress", model_folder, "-o", tmp_path / "out", *arguments) == 2
    assert "tokens" in capsys.readouterr().err


def test_an_existing_output_is_refused_before_any_work(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("keep")
    assert run("compress", model_folder, "-o", tmp_path / "out", "--ratio", 0.25, *FAST) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert (tmp_path / "out" / "precious").read_text() == "keep"


def test_nan_in_the_weights_names_the_tensor(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny("llama-gqa")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    model.save_pretrained(tmp_path / "bad")
    arguments = ["--ratio", 0.25, "--calibration", text, "--eval", "none", *FAST]
    assert run("compress", tmp_path / "bad", "-o", tmp_path / "out", *arguments) == 2
    assert "model.layers.1.mlp.up_proj.weight" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
