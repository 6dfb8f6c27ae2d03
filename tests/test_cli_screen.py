"""What a user sees around the work: one line for Ctrl-C, hints that can be typed, no colour in pipes."""

import functools
import logging
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from command_line import run
from tiny_models import save_tiny
from trisect.commands import _options, build_app, verbs

GROUP: Any = get_command(build_app())
COLOUR = re.compile(r"\x1b\[[0-9;]*(3[0-7]|9[0-7])(;[0-9]+)*m")
WISHES = ("NO_COLOR", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS")
CLEAN = {name: value for name, value in os.environ.items() if name not in WISHES}
CALM = ["--samples", "4", "--length", "32", "--calibration"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    save_tiny(folder / "model")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return folder


def hints(text: str) -> list[str]:
    return [line.removeprefix("Next: ") for line in text.splitlines() if line.startswith("Next: ")]


def test_every_hint_can_be_typed_and_quiet_leaves_it_out(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, text, out = home / "model", home / "text.txt", tmp_path / "out"
    cut = ["--ratio", 0.5, "--align", "none", "--method", "a3"]
    commands = [
        ["inspect", model],
        ["plan", model, *cut],
        ["calibrate", model, "-o", tmp_path / "m.safetensors", *CALM, text],
        ["compress", model, "-o", out, "--moments", tmp_path / "m.safetensors", "--eval", "none", *cut],
        ["eval", out, "--data", text, "--length", 32, "--json", tmp_path / "e.json"],
    ]
    for command in commands:
        assert run(*command) == 0
        found = hints(capsys.readouterr().out)
        assert found, command[0]
        for line in found:
            _, verb, *arguments = shlex.split(line.partition(",")[0])
            assert GROUP.commands[verb].make_context(verb, arguments).params
    for command in (commands[0], commands[1], commands[4]):
        assert run(*command, "--quiet") == 0
        streams = capsys.readouterr()
        assert not hints(streams.out)
        assert streams.err == ""


@pytest.mark.parametrize("name", verbs())
def test_ctrl_c_is_one_line_and_code_130(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verb = verbs()[name]

    @functools.wraps(verb.run)
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    needed = [entry for entry in GROUP.commands[name].params if entry.required]
    monkeypatch.setattr(verb, "run", interrupted)
    monkeypatch.setattr(_options, "CHECKS", {})  # there is no model called x
    arguments = [word for entry in needed for word in (*_option(entry), "x")]
    arguments += ["--ratio", "0.5"] if name in ("compress", "plan") else []
    assert run(name, *arguments) == 130
    error = capsys.readouterr().err
    assert error == "error: interrupted: no half-written output was left behind.\n"


def _option(parameter: Any) -> list[str]:
    return [] if parameter.param_type_name == "argument" else [max(parameter.opts, key=len)]


def test_the_real_signal_does_the_same() -> None:
    code = """
import sys, time
from trisect.commands import start
def entries(kind):
    print("ready", flush=True)
    time.sleep(300)
start.entries = entries
from trisect.cli import main
sys.exit(main(["ls", "data"]))
"""
    # Started from a shell's background job, a process may inherit that Ctrl-C is ignored.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)" + code
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error == "error: interrupted: no half-written output was left behind.\n"


def on_a_terminal(*arguments: str, **environment: str) -> str:
    """What a command writes to a terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "trisect", *arguments]
    settings: Any = {"env": {**CLEAN, "TERM": "xterm-256color", **environment}, "stdin": subprocess.DEVNULL}
    with subprocess.Popen(command, stdout=theirs, stderr=theirs, **settings) as process:
        os.close(theirs)
        shown = b""
        while chunk := _read(ours):
            shown += chunk
    os.close(ours)
    assert process.returncode == 0
    return shown.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # how a terminal says that the other side is gone
        return b""


def test_colour_is_for_terminals_that_want_it() -> None:
    assert COLOUR.search(on_a_terminal("compress", "--help"))
    assert not COLOUR.search(on_a_terminal("compress", "--help", NO_COLOR="1"))
    command = [sys.executable, "-m", "trisect", "compress", "--help"]
    piped = subprocess.run(command, capture_output=True, env=CLEAN)
    assert piped.returncode == 0
    assert b"\x1b" not in piped.stdout + piped.stderr


def test_piped_work_has_neither_colour_nor_bars(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval", home / "model", "--data", home / "text.txt", "--length", 32) == 0
    streams = capsys.readouterr()
    assert "\x1b" not in streams.out + streams.err
    assert "\r" not in streams.out + streams.err
    assert streams.err == "perplexity ...\n"


def test_verbose_adds_time_memory_and_tracebacks_and_is_over_afterwards(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    level = logging.getLogger("trisect").level
    assert run("inspect", home / "model", "--verbose") == 0
    assert re.search(r"took \d+\.\d s, at most \d+\.\d\d GB of memory", capsys.readouterr().err)
    assert run("inspect", home / "nowhere", "-v") == 2
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert "error: " in error
    assert run("inspect", home / "nowhere") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert logging.getLogger("trisect").level == level


def test_a_measurement_that_cannot_be_written_is_refused_before_the_work(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verb = verbs()["inspect"]

    @functools.wraps(verb.run)
    def started(**_: object) -> None:
        raise AssertionError("the work was begun")

    monkeypatch.setattr(verb, "run", started)
    assert run("inspect", home / "model", "--json", home / "text.txt" / "i.json") == 2
    assert "is a file, not a folder" in capsys.readouterr().err
