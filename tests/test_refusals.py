"""Bad input is one line with what to do, in a moment, and leaves nothing behind; whatever is typed."""

import os
import random
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from refusals import LINES, prepared
from trisect import models
from trisect.cli import main
from trisect.commands import build_app
from trisect.commands._options import is_flag, takes_many
from trisect.models import checkpoint

VERBS = typer.main.get_command(build_app()).commands  # type: ignore[attr-defined]
PLAIN = ("inspect", "plan", "ls", "init", "compress", "quantize", "finetune", "calibrate", "export", "report", "eval")
WORDS = ["", "0", "-1", "1", "3", "0.25", "25%", "1e9", "nan", "none", "auto", "a3", "a3+", "svd", "cpu", "cuda:9"]
WORDS += [
    "float16",
    "model",
    "text.txt",
    "nofile",
    "empty",
    "full",
    "qk,mlp",
    "0-1",
    "builtin",
    "[x",
    "\u2603",
    "a" * 300,
]


@pytest.fixture(autouse=True, scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files that the lines name; no weights are read and no hub is asked, or the line was not early."""
    before, offline = Path.cwd(), os.environ.get("HF_HUB_OFFLINE")
    folder = tmp_path_factory.mktemp("refusals")
    os.chdir(folder)
    prepared()
    real = checkpoint.load_model
    with pytest.MonkeyPatch.context() as patch:
        for owner in (models, checkpoint):  # this order: what the package gives is looked up in the last
            patch.setattr(owner, "load_model", _unwanted)
        yield folder
    for name, module in list(sys.modules.items()):  # those imported meanwhile took the stand-in for the function
        if name.startswith("trisect.") and vars(module).get("load_model") is _unwanted:
            vars(module)["load_model"] = real
    os.chdir(before)
    if offline is None:
        del os.environ["HF_HUB_OFFLINE"]


class Loads(Exception):
    """A model was about to be loaded."""


def _unwanted(*_: object, **__: object) -> None:
    raise Loads


@pytest.mark.parametrize("line", LINES)
def test_bad_input_is_refused_in_one_line_before_weights_are_read(
    line: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = sorted(path.name for path in here.rglob("*"))
    assert main(shlex.split(line)) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.strip().count("\n") == 0
    assert len(said) < 400, "cut off, or too much to read"
    assert sorted(path.name for path in here.rglob("*")) == there


def _words(verb: str, choose: random.Random) -> list[str]:
    """A few of a verb's options with values that may or may not suit them."""
    parameters = [entry for entry in VERBS[verb].params if entry.name != "help"]
    chosen = [entry for entry in parameters if entry.required and choose.random() < 0.9]
    chosen += choose.sample(parameters, k=choose.randint(0, min(5, len(parameters))))
    words = []
    for entry in dict.fromkeys(chosen):
        suited = (entry.metavar or "").strip("[]").split("|")
        value = choose.choice(["model"] if entry.name == "model" and choose.random() < 0.8 else WORDS + suited)
        if entry.param_type_name == "argument":
            words.append(value)
        else:
            words += [max(entry.opts, key=len)] + ([] if is_flag(entry) else [value])
            words += (
                [max(entry.opts, key=len), choose.choice(WORDS)] if takes_many(entry) and choose.random() < 0.3 else []
            )
    return words


@settings(
    max_examples=int(os.environ.get("TRISECT_FUZZ", "60")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(number=st.integers(0, 10**9), verb=st.sampled_from(PLAIN))
def test_no_combination_of_options_ends_in_a_traceback(number: int, verb: str) -> None:
    """A command line is fine, refused, or about to load the model: never anything else."""
    words = _words(verb, random.Random(number))
    try:
        assert main([verb, *words]) in (0, 2), words
    except Loads:
        pass
