"""`--config` for every verb: a file says what the command line would have said; `init` writes such files."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command

from tiny_models import save_tiny
from trisect.cli import main
from trisect.commands import build_app, verbs
from trisect.commands._options import by_key, is_flag, takes_many
from trisect.commands.compress import at_pace
from trisect.config import CompressConfig
from trisect.errors import TrisectError

VERBS = sorted(verbs())
GROUP: Any = get_command(build_app())


def parsed(verb: str, *words: str) -> dict[str, Any]:
    """What a verb's `run` would be given; nothing is run."""
    with GROUP.make_context("trisect", []) as parent:
        context = GROUP.commands[verb].make_context(verb, list(words), parent=parent)
    return {name: value for name, value in context.params.items() if name not in ("config_file", "context")}


def kind_of(verb: str, name: str) -> type:
    """int or float where an option takes a number, else str: asked of the parser itself."""
    parameter = next(entry for entry in GROUP.commands[verb].params if entry.name == name)
    option = [] if parameter.param_type_name == "argument" else [max(parameter.opts, key=len)]
    for kind, word in ((str, "x"), (float, "0.5"), (int, "5")):
        try:
            value = parsed(verb, *needed(verb, without=name), *option, word)[name]
        except Exception as error:
            if not hasattr(error, "format_message"):
                raise
            continue
        return kind if not isinstance(value, list | tuple) else str
    raise AssertionError(f"{verb} takes nothing for {name}")


def needed(verb: str, *, without: str = "") -> list[str]:
    """Words for what a verb cannot be called without."""
    found: list[str] = []
    for entry in GROUP.commands[verb].params:
        if entry.required and entry.name != without:
            found += ["x"] if entry.param_type_name == "argument" else [max(entry.opts, key=len), "x"]
    return found


@pytest.mark.parametrize("verb", VERBS)
def test_every_option_says_the_same_in_a_file_as_on_the_command_line(verb: str, tmp_path: Path) -> None:
    told, words = {}, []
    for key, entry in by_key(GROUP.commands[verb].params).items():
        option = max(entry.opts, key=len)
        if is_flag(entry):
            value: Any = True
            words += [option]
        else:
            kind = kind_of(verb, entry.name)
            value = {int: 7, float: 0.125, str: f"some-{key}"}[kind]
            repeated = [value, value] if takes_many(entry) else [value]
            spelled = [str(word) for word in repeated]
            words += spelled if entry.param_type_name == "argument" else _each(option, spelled)
            value = repeated if takes_many(entry) else value
        told[key if len(told) % 2 else key.replace("_", "-")] = value
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(told))
    assert len(told) >= 2
    assert parsed(verb, "--config", str(file)) == parsed(verb, *words)


def _each(option: str, values: list[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def test_init_compare_writes_a_recipe_that_compare_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recipe.yaml"
    assert main(["init", "compare", "-o", str(file)]) == 0
    assert main(["compare", str(file), "--dry-run"]) == 0
    assert "from 0 of 4 receipts" in capsys.readouterr().out


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "compare"])
def test_a_fresh_file_of_init_changes_nothing(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    assert main(["init", verb, "-o", str(file)]) == 0
    assert f"trisect {verb} --config" in capsys.readouterr().out
    text = file.read_text()
    assert parsed(verb, *needed(verb), "--config", str(file)) == parsed(verb, *needed(verb))
    for key, entry in by_key(GROUP.commands[verb].params).items():
        assert f"\n{key}: " in text or f"\n# {key}: " in text
        assert " ".join(entry.help.split()).split()[0] in text
    written = yaml.safe_load(text) or {}
    keyed = by_key(GROUP.commands[verb].params)
    assert {key: str(value) for key, value in written.items()} == {
        key: str(entry.default) for key, entry in keyed.items() if entry.default is not None and not entry.required
    }
    assert main(["init", verb, "-o", str(file)]) == 2
    assert "name another file with -o" in capsys.readouterr().err
    assert file.read_text() == text


def test_what_is_typed_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: in-file\nlength: 7\nlimit: 3\n")
    found = parsed("eval", "typed", "--limit", "5", "--config", str(file))
    assert (found["model"], found["length"], found["limit"]) == ("typed", 7, 5)


@given(st.dictionaries(st.sampled_from(["length", "windows", "shots", "limit"]), st.integers(-(10**9), 10**9)))
def test_numbers_come_through_unchanged(values: dict[str, int]) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        file.write_text(json.dumps(values))
        found = parsed("eval", "m", "--config", str(file))
    assert {name: found[name] for name in values} == values


@given(st.lists(st.sampled_from(["qk", "ov", "mlp"]), unique=True), st.floats(1e-9, 1e9))
def test_lists_and_fractions_are_those_that_would_be_typed(parts: list[str], share: float) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(yaml.safe_dump({"parts": parts, "ratio": share}))
        found = parsed("plan", "m", "--config", str(file))
    assert found["parts"] == ",".join(parts)
    assert found["ratio"] == str(share)


@pytest.mark.parametrize(
    ("verb", "text", "message"),
    [
        ("compress", "ratoi: 0.2", "Did you mean ratio"),
        ("compress", "tasks: paper", "Unknown option in"),
        ("ls", "ratio: 0.2", "Unknown option in"),
        ("eval", "length: long", "run.yaml gives 'long'"),
        ("eval", "length: 12.5", "'--length'"),
        ("eval", "length: true", "length takes no true"),
        ("eval", "length: [1, 2]", "length takes one value, not a list"),
        ("eval", "length: {a: 1}", "length takes one value, not a mapping"),
        ("eval", "length:", "length has no value"),
        ("eval", "quiet: maybe", "quiet is true or false, not 'maybe'"),
        ("eval", "- length", "must hold a mapping such as"),
        ("eval", "length: 1\nlength: 2", "comes twice"),
        ("eval", "batch-size: 1\nbatch_size: 2", "gives batch_size twice, with different values"),
        ("plan", "seed: 1\ncalibration: {seed: 2}", "gives seed twice, with different values"),
        ("plan", "calibration: {sample: 2}", "Did you mean samples"),
        ("eval", "config: other.yaml", "Unknown option in"),
        ("eval", "length: !!python/name:os.system ''", "not valid YAML"),
        ("compare", "only: [[a]]", "only takes one value, not a list"),
    ],
)
def test_a_bad_file_is_refused_with_what_would_do(
    verb: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text(text)
    assert main([verb, *needed(verb), "--config", str(tmp_path / "run.yaml")]) == 2
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0
    assert message in error


def test_on_and_off_mean_the_words_and_home_is_home(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("stream: off\ncalibration: ~/text.txt\n")
    found = parsed("compress", "m", "--config", str(file))
    assert found["stream"] == "off"
    assert found["calibration"] == [str(Path.home() / "text.txt")]


def test_calibration_settings_may_stand_together(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("seed: 3\ncalibration: {source: a.txt, samples: 4, seed: 3, batch-size: 2}\n")
    found = parsed("compress", "m", "--config", str(file))
    names = ("calibration", "samples", "seed", "batch_size")
    assert [found[name] for name in names] == [["a.txt"], 4, 3, 2]
    file.write_text("calibration: [a.txt, c4]\n")
    assert parsed("compress", "m", "--config", str(file))["calibration"] == ["a.txt", "c4"]


def test_a_whole_run_can_come_from_a_file(tmp_path: Path) -> None:
    model, text, out = tmp_path / "model", tmp_path / "text.txt", tmp_path / "out"
    save_tiny(model)
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    settings = {"model": str(model), "out": str(out), "ratio": 0.5, "calibration": str(text), "eval": "none"}
    settings |= {"samples": 4, "length": 32, "align": "none", "method": "a3", "layers": [0, 2], "quiet": True}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    assert main(["compress", "--config", str(tmp_path / "run.yaml"), "--kv-ratio", "0.25"]) == 0
    recipe = json.loads((out / "receipt.json").read_text())["recipe"]
    assert (recipe["ratio"], recipe["kv_ratio"], recipe["layers"]) == (None, 0.25, [0, 2])
    assert recipe["calibration"]["samples"] == 4


def test_an_unknown_verb_has_no_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "compres", "-o", str(tmp_path / "run.yaml")]) == 2
    assert "Did you mean compress" in capsys.readouterr().err
    assert not (tmp_path / "run.yaml").exists()


def test_best_means_balanced_widths_and_refitted_heads_where_the_method_knows_them() -> None:
    best = partial(at_pace, fast=False, best=True)
    usual = CompressConfig(ratio=0.25)
    assert best(usual) == replace(usual, allocate="balanced", refine=True)
    assert best(replace(usual, refine=True)) == best(usual)
    assert best(replace(usual, method="a3")) == replace(usual, method="a3", allocate="balanced")
    assert at_pace(usual, fast=False, best=False) == usual
    with pytest.raises(TrisectError, match="--best means --allocate balanced, and uniform was given"):
        best(replace(usual, allocate="uniform"))
