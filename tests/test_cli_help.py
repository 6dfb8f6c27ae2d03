"""Help, version, refusals and completion: quick, because torch and transformers are not imported for them."""

import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from trisect import support
from trisect.cli import main
from trisect.commands import PANELS, _options, build_app, verbs

ROOT = Path(__file__).resolve().parents[1]
VERBS = verbs()
GROUP: Any = get_command(build_app())
HEAVY = ("torch", "transformers", "datasets", "numpy")


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter: what other tests imported does not count."""
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )


def completions(line: str, *, shell: str = "bash") -> list[str]:
    code = "import sys; from trisect.cli import main\n"
    code += "try: main([])\n"
    code += f"finally: print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)"
    count = str(len(line.split(" ")) - 1)
    given = {"_TRISECT_COMPLETE": f"complete_{shell}", "COMP_WORDS": line, "COMP_CWORD": count}
    done = python(code, **given)
    assert done.stderr.strip() == "[]", done.stderr
    return done.stdout.split()


def test_help_version_and_refusals_import_nothing_heavy() -> None:
    code = f"""
import sys
from trisect.cli import main
codes = [main(["--help"]), main(["--version"]), main(["ls", "--help"]), main(["compress", "--rato", "1"])]
codes += [main(["compress", "m", "--samples", "many"]), main(["export", "--help"]), main(["compres"])]
codes += [main([verb, "m", "--ratio", "1.5"]) for verb in ("plan", "compress")]
assert codes == [0, 0, 0, 2, 2, 0, 2, 2, 2], codes
assert not [name for name in {HEAVY} if name in sys.modules]
"""
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert "--ratio" in done.stderr
    assert "Did you mean 'compress'" in done.stderr


@pytest.mark.slow
def test_the_package_waits_with_heavy_imports_and_still_teaches_transformers() -> None:
    code = """
import sys, trisect
assert set(trisect.__all__) <= set(dir(trisect))
assert not hasattr(trisect, "decompress")
from trisect import TrisectError
assert "torch" not in sys.modules and "transformers" not in sys.modules
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.for_model("trisect_llama")
assert AutoModelForCausalLM._model_mapping[type(config)].__name__ == "TrisectLlamaForCausalLM"
from trisect import *
assert callable(compress) and callable(load) and CompressConfig(ratio=0.5).ratio == 0.5
"""
    done = python(code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "order",
    [
        ("register", "library"),
        ("library", "register"),
        ("register", "house.models"),
        ("register", "house.models", "library"),
        ("register", "library", "register", "house.models"),
        ("register", "house.view"),
    ],
)
def test_registering_happens_once_in_every_order_of_imports(
    order: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "house").mkdir()
    (tmp_path / "house" / "__init__.py").write_text("")
    (tmp_path / "library.py").write_text("known = []\n")
    (tmp_path / "house" / "models.py").write_text(
        "from house.view import ready, library\ndef register_families():\n    library.known.append('narrow')\n"
    )
    (tmp_path / "house" / "view.py").write_text("import library\nready = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [entry for entry in sys.meta_path if not _watches(entry)])
    monkeypatch.setattr(support, "TRANSFORMERS", "library")
    monkeypatch.setattr(support, "MODELS", "house.models")
    try:
        for step in order:
            support.register_with_transformers() if step == "register" else import_module(step)
        assert sys.modules["library"].known == ["narrow"]
    finally:
        for name in ("library", "house", "house.models", "house.view"):
            sys.modules.pop(name, None)


def _watches(finder: object) -> bool:
    return type(finder).__module__ == support.__name__


@pytest.mark.parametrize("name", VERBS)
def test_every_example_in_help_is_accepted_by_the_parser(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    examples = VERBS[name].examples
    assert 2 <= len(examples) <= 3
    assert any(shlex.split(line)[1] == name for _, line in examples)
    assert main([name, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for purpose, line in examples:
        assert line.startswith("trisect ")
        assert f"{purpose}: {line}" in shown
        _, called, *arguments = shlex.split(line)
        parsed = GROUP.commands[called].make_context(called, arguments)
        assert parsed.params


def test_verbs_are_grouped_with_the_first_steps_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    titles = [re.search(rf"[^\w\s] {panel} [^\w\s]", shown) for panel in PANELS]
    places = [title.start() for title in titles if title is not None]
    assert len(places) == len(PANELS)
    assert places == sorted(places)
    assert all(re.search(rf"\b{verb}\b", shown) for verb in VERBS)


SAME = {
    "model": "MODEL",
    "json": "FILE",
    "device": "DEVICE",
    "dtype": "DTYPE",
    "quiet": None,
    "verbose": None,
    "config_file": "FILE",
}


@pytest.mark.parametrize("name", VERBS)
def test_options_with_one_name_look_alike_in_all_verbs(name: str) -> None:
    parameters = {entry.name: entry for entry in GROUP.commands[name].params}
    for option in SAME.keys() & parameters.keys():
        assert (parameters[option].metavar or "").strip("[]") == (SAME[option] or "")
    assert {"config_file", "verbose", "quiet"} <= parameters.keys()
    assert "-q" in parameters["quiet"].opts
    if "out" in parameters:
        assert parameters["out"].opts == ["--out", "-o"]
        assert parameters["out"].metavar in ("DIR", "FILE", "DIR|FILE")
    assert all(entry.help for entry in parameters.values())


def test_the_page_about_the_command_line_names_every_verb_and_no_other() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `trisect (\w+)` \|", page, flags=re.MULTILINE)) == set(VERBS)


def test_shells_complete_verbs_names_and_fixed_values() -> None:
    assert completions("trisect com") == ["compress", "compare"]
    assert completions("trisect compress smol") == ["smollm2-135m"]
    assert completions("trisect plan m --stream o") == []
    assert completions("trisect compress m --stream o") == ["on", "off"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_of_each_shell_calls_back(shell: str) -> None:
    code = "import sys; from trisect.cli import main\n"
    code += "try: main([])\nfinally: print('torch' in sys.modules, file=sys.stderr)"
    done = python(code, _TRISECT_COMPLETE=f"source_{shell}")
    assert f"_TRISECT_COMPLETE=complete_{shell}" in done.stdout
    assert done.stderr.strip() == "False"


def test_names_that_shells_complete_are_those_of_the_tables() -> None:
    from trisect.data import REGISTRY_MODELS, list_sources

    assert _options.NAMES["data"]() == [name for name, _ in list_sources()]
    assert _options.NAMES["model"]() == list(REGISTRY_MODELS)
    assert _options.NAMES["verb"]() == sorted(VERBS)
