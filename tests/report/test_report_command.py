"""`trisect report` as a user types it."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from report_runs import Page

from trisect.cli import main
from trisect.report.drawing import Figure
from trisect.report.write import file_names


def test_a_page_its_figures_and_where_they_are(
    real_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    page, figures = tmp_path / "new" / "report.html", tmp_path / "figures"
    assert main(["report", str(real_run), "-o", str(page), "--figures", str(figures)]) == 0
    said = capsys.readouterr().out
    assert f"Saved to {page}" in said
    assert "pip install 'trisect[plots]'" in said
    names = ["losses-run", "plan-run", *(f"spectra-{part}-run" for part in ("mlp", "ov", "qk")), "time"]
    assert sorted(path.name for path in figures.iterdir()) == [f"{name}.svg" for name in names]
    drawn = Page.of(page.read_text(encoding="utf-8")).all("svg")
    assert len(drawn) == len(names)
    assert (figures / "time.svg").read_text() in f"{page.read_text()}\n".replace("</svg>", "</svg>\n")
    assert list(page.parent.iterdir()) == [page]


def test_figures_are_png_too_where_matplotlib_is(real_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures = tmp_path / "figures"
    assert main(["report", str(real_run), "-o", str(tmp_path / "r.html"), "--figures", str(figures)]) == 0
    assert (figures / "time.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(figures.iterdir())) == 12


def test_samples_are_what_the_models_generate(real_run: Path, tmp_path: Path) -> None:
    import transformers

    import trisect  # noqa: F401 - registers the compressed classes

    out = tmp_path / "r.html"
    words = [
        "report",
        str(real_run),
        "-o",
        str(out),
        "--sample",
        "the dog",
        "--sample-tokens",
        "5",
        "--quiet",
    ]
    assert main(words) == 0
    expected = []
    for folder in (real_run.parent / "dense", real_run):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        ids = tokenizer("the dog", return_tensors="pt").input_ids
        made = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
        # With the blank that a word has before it, which a text that begins with the word has not.
        expected.append(" " + tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True))
    page = Page.of(out.read_text(encoding="utf-8"))
    assert [e.text for e in page.all("p") if e.attributes.get("class") == "sample"] == expected


def test_a_dense_model_that_is_not_here_is_said_and_not_fetched(
    copied: Callable[..., Path], tmp_path: Path
) -> None:
    out, folder = tmp_path / "r.html", copied("run", source="org/model")
    words = ["report", str(folder), "-o", str(out), "--sample", "a", "--sample-tokens", "1", "--quiet"]
    assert main(words) == 0
    assert "(not sampled: org/model is not on this machine)" in out.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sample", ""], "A prompt is empty"),
        (["--sample", "a", "--sample-tokens", "0"], "1 or more, not 0"),
        (["-o", "model.safetensors"], "should end in .html: -o model.html"),
        (["--figures", "taken"], "is a file; name a folder"),
        (["--measured", "nothing.json"], "Cannot read nothing.json"),
        (["--curves", "curves.json"], "start at other widths"),
        (["--layers", "0,7"], "There is no layer 7: the model has 3"),
        (["--layers", "some"], "Cannot read layers 'some'"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    real_run: Path,
    tmp_path: Path,
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    point = {"layer": 0, "component": "qk", "width": 999, "loss": 0.0}
    (tmp_path / "curves.json").write_text(
        json.dumps({"points": [point], "fingerprint": "f", "token_hash": "t", "method": "a3"})
    )
    before = sorted(tmp_path.iterdir())
    assert main(["report", str(real_run), *words]) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("asked", "shown"), [("1", [1]), ("0,2", [0, 2]), ("all", [0, 1, 2])])
def test_layers_say_whose_spectra_are_shown(
    real_run: Path, tmp_path: Path, asked: str, shown: list[int]
) -> None:
    out = tmp_path / "r.html"
    assert main(["report", str(real_run), "-o", str(out), "--layers", asked]) == 0
    figures = [part for part in out.read_text(encoding="utf-8").split("<figure")[1:] if "spectra-" in part]
    named = [re.findall(r"<button[^>]*>layer (\d+)</button>", figure) for figure in figures]
    assert named == [[str(layer) for layer in shown]] * 3


def test_an_earlier_page_stays_where_the_next_one_fails(real_run: Path, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    assert main(["report", str(real_run), "-o", str(page)]) == 0
    first = page.read_bytes()
    assert main(["report", str(tmp_path / "nothing"), "-o", str(page)]) == 2
    assert page.read_bytes() == first


def test_files_of_figures_have_plain_names_none_twice() -> None:
    names = ["plan-a/b", "plan-a b", "PLAN-A-B", "../..", "time", "plan-" + 300 * "x"]
    found = file_names([Figure(name=name, title="") for name in names])
    assert found[:5] == ["plan-a-b", "plan-a-b-2", "PLAN-A-B-3", "figure", "time"]
    assert all(len(name) <= 84 and "/" not in name for name in found)
