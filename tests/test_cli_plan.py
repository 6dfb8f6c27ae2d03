"""`trisect plan`, and `compress` with goals other than a ratio, as a user meets them."""

import math
from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest
import transformers

from command_line import read, run
from tiny_models import LLAMA, character_tokenizer
from trisect.commands import command_of, verbs
from trisect.config import CalibrationConfig, CompressConfig
from trisect.config.goals import GOALS
from trisect.models import read_shape
from trisect.plan import budget_of

QUICK = ["--samples", "8", "--length", "32", "--quiet"]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    config = transformers.LlamaConfig(**{**LLAMA, "head_dim": 32, "intermediate_size": 256})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def curves(model_folder: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Loss curves, as `plan` measures them when their file does not exist."""
    path = tmp_path_factory.mktemp("curves") / "curves.json"
    arguments = ["--ratio", 0.2, "--allocate", "balanced", "--method", "a3", "--align", 8, *QUICK]
    assert run("plan", model_folder, "--curves", path, "--calibration", text, *arguments) == 0
    return path


def test_measured_curves_say_by_which_method_and_from_which_loss(curves: Path) -> None:
    data = read(curves)
    assert data["method"] == "a3"
    assert 0 < data["dense_loss"] < 10
    assert {(row["layer"], row["component"]) for row in data["points"]} == {
        (layer, part) for layer in range(3) for part in ("qk", "ov", "mlp")
    }


@pytest.mark.parametrize(
    ("goal", "field"),
    [
        (["--ratio", "0.25"], "linear_parameters"),
        (["--kv-ratio", "0.5"], "kv_bytes_per_token"),
        (["--ratio", "0.25", "--budget", "flops"], "flops"),
        (["--target-params", "140K"], "parameters"),
        (["--target-kv-bytes", "1KiB"], "kv_bytes_per_token"),
    ],
)
@pytest.mark.parametrize("allocate", ["uniform", "search", "balanced"])
def test_every_goal_is_planned_and_said_before_anything_else(
    model_folder: Path,
    curves: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    goal: list[str],
    field: str,
    allocate: str,
) -> None:
    out = tmp_path / "p.json"
    arguments = ["--allocate", allocate, "--curves", curves, "--align", 8, "--json", out]
    assert run("plan", model_folder, *goal, *arguments) == 0
    printed = capsys.readouterr().out
    assert "% kept" in printed
    first = printed.splitlines()[0]
    facts = read(out)
    budget = facts["budget"]
    if "--target" in goal[0]:
        assert budget["planned"] <= budget["allowed"] < budget["before"]
        assert f"asked for at most {budget['allowed']:,}" in first
        assert f"planned {budget['planned']:,}" in first
    else:  # a share: no more is removed than asked for
        assert budget["allowed"] <= budget["planned"] < budget["before"]
        removed = 1 - budget["planned"] / budget["before"]
        assert f"asked to remove {float(goal[1]):.1%}, planned {removed:.1%}" in first
    assert facts["after"][field] == facts["budget"]["planned"]
    assert facts["before"][field] == facts["budget"]["before"]
    if "kv" in goal[0]:
        assert {layer["mlp"] for layer in facts["plan"]["layers"]} == {256}
        assert facts["plan"]["ratio"] == pytest.approx(facts["ratio"])


def test_a_dry_run_of_compress_is_the_plan(model_folder: Path, tmp_path: Path) -> None:
    for verb, more in (("plan", []), ("compress", ["--dry-run", "-o", tmp_path / "out"])):
        goal = ["--kv-ratio", 0.25, "--align", 8, "--json", tmp_path / f"{verb}.json"]
        assert run(verb, model_folder, *goal, *more) == 0
    assert read(tmp_path / "plan.json") == read(tmp_path / "compress.json")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["svd", "palu", "wanda-sparse"])
def test_ranks_of_linear_maps_are_planned_from_the_configuration_alone(
    model_folder: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    goal = ["--ratio", 0.5, "--method", method, "--align", 8, "--allocate", "uniform"]
    assert run("plan", bare, *goal, "--json", tmp_path / "p.json") == 0
    printed = capsys.readouterr().out
    facts = read(tmp_path / "p.json")
    arguments = ["--calibration", text, "--eval", "none", "-o", tmp_path / "out", "--json", tmp_path / "r.json"]
    assert run("compress", model_folder, *goal, *arguments, *QUICK) == 0
    real = read(tmp_path / "r.json")
    assert facts["after"] == real["after"]
    assert facts["plan"] == real["plan"]
    budget = facts["budget"]
    if method == "wanda-sparse":
        assert "do not become zero" in printed
        assert "% kept" not in printed
        assert facts["ratio"] == 0
        assert budget["planned"] == 0.5 * budget["before"] == 0.5 * facts["before"]["linear_parameters"]
    else:
        assert "% kept" in printed
        assert "weights of the maps that change" in printed
        gone = facts["before"]["linear_parameters"] - facts["after"]["linear_parameters"]
        assert gone == budget["before"] - budget["planned"]
        # Palu's ratio is of the cache, and rotated keys are cached whole; its factors may even be larger.
        assert facts["kv_bytes_per_token"] == 0.25 if method == "palu" else gone > 0


def test_a_typed_goal_replaces_the_files(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("ratio: 0.5\nalign: 8\nparts: [ov]\n")
    out = tmp_path / "p.json"
    assert run("plan", model_folder, "--config", tmp_path / "run.yaml", "--kv-ratio", 0.1, "--json", out) == 0
    layers = read(out)["plan"]["layers"]
    assert {layer["qk"] for layer in layers} == {32}
    assert {layer["vo"] for layer in layers} == {24, 32}


def test_a_bound_on_perplexity_is_predicted_from_curves(model_folder: Path, curves: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    arguments = ["--curves", curves, "--allocate", "balanced", "--align", 8, "--json", out]
    assert run("plan", model_folder, "--max-ppl-increase", "5%", *arguments) == 0
    facts = read(out)
    assert facts["predicted_rise"] <= math.log(1.05)
    assert facts["ratio"] > 0


@pytest.mark.parametrize("allocate", ["uniform", "balanced"])
def test_compress_finds_the_smallest_model_within_a_bound(
    model_folder: Path, text: Path, curves: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], allocate: str
) -> None:
    out, result = tmp_path / "out", tmp_path / "r.json"
    arguments = ["--calibration", text, "--eval", text, "--eval-windows", 2, "--align", 8, *QUICK]
    arguments += ["--allocate", allocate, "--curves", curves, "--json", result, "-o", out]
    assert run("compress", model_folder, "--max-ppl-increase", "20%", *arguments) == 0
    assert "held-out calibration windows may rise by 20%" in capsys.readouterr().out
    target = read(out / "receipt.json")["target"]
    assert target["held_out"]["windows"] == 2
    inside = [trial for trial in target["trials"] if trial["inside"]]
    assert 1 <= len(target["trials"]) <= 6
    assert all(trial["rise"] <= math.log(1.2) for trial in inside)
    measured = read(result)
    assert measured["plan"]["ratio"] == max(trial["ratio"] for trial in inside)
    assert measured["plan"]["ratio"] == pytest.approx(measured["ratio"])
    now, was, _ = read_shape(str(out))
    assert budget_of(now).parameters < budget_of(was).parameters
    assert budget_of(was).parameters == measured["before"]["parameters"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--ratio 0.25"),
        (["--ratio", "0.2", "--kv-ratio", "0.5"], "one goal"),
        (["--target-params", "100Q"], "--target-params 100M"),
        (["--target-params", "100M"], "already fits"),
        (["--target-params", "1K"], "ask for that much or more"),
        (["--target-kv-bytes", "1"], "ask for that much or more"),
        (["--kv-ratio", "0.5", "--parts", "mlp"], "--parts qk,ov"),
        (["--ratio", "0.2", "--floor", "1.5"], "less than or equal to 1"),
        (["--ratio", "0.2", "--budget", "latency"], "--latency-table FILE"),
        (["--ratio", "0.2", "--budget", "latency", "--latency-table", "no.json"], "trisect bench"),
        (["--ratio", "0.2", "--allocate", "balanced"], "--curves FILE"),
        (["--ratio", "0.2", "--curves", "no.json"], "--allocate search or balanced"),
        (["--max-ppl-increase", "5%"], "--curves FILE"),
        (["--ratio", "0.2", "--method", "asvd"], "looks at calibration text"),
        (["--max-ppl-increase", "5%", "--method", "svd"], "--ratio 0.25"),
        (["--ratio", "0.2", "--method", "clover"], "no solution for mlp; use --parts qk,ov"),
        (["--ratio", "0.2", "--method", "svd", "--floor", "0.5"], "leave --floor out"),
        (["--ratio", "0.2", "--method", "a3", "--rope-scope", "model"], "for a3+, not for a3"),
    ],
)
def test_bad_input_is_one_line(
    model_folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run("plan", model_folder, *arguments) == 2
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0
    assert message in error


@pytest.mark.parametrize("verb", ["compress", "plan"])
def test_every_setting_is_an_option_of_both_verbs(verb: str) -> None:
    settings = {entry.name for record in (CompressConfig, CalibrationConfig) for entry in fields(record)}
    assert {*settings, *GOALS} - {"source", "goal"} <= signature(command_of(verbs()[verb].run)).parameters.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--method", "clover"], "use --parts qk,ov"), (["--method", "a3", "--without", "fold"], "for a3+, not for a3")],
)
def test_what_a_method_cannot_do_is_refused_before_weights_are_read(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    out = tmp_path / "out"
    assert run("compress", model_folder, "-o", out, "--ratio", 0.2, *arguments) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_bound_is_not_measured_on_moments(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "m.safetensors").touch()
    arguments = ["--max-ppl-increase", "5%", "--moments", tmp_path / "m.safetensors", "-o", tmp_path / "out"]
    assert run("compress", model_folder, *arguments) == 2
    assert "leave --moments out" in capsys.readouterr().err
