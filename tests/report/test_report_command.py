"""`trisect report` as a user types it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from report_runs import Page

from trisect.cli import main


def test_a_page_its_figures_and_where_they_are(
    real_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    page, figures = tmp_path / "new" / "report.html", tmp_path / "figures"
    assert main(["report", str(real_run), "-o", str(page), "--figures", str(figures)]) == 0
    assert f"Saved to {page}" in capsys.readouterr().out
    names = ["plan-run", "losses-run", *(f"spectra-{part}-run" for part in ("qk", "ov", "mlp")), "time"]
    files = [f"{n:02}-{name}.{kind}" for n, name in enumerate(names, start=1) for kind in ("png", "svg")]
    assert sorted(path.name for path in figures.iterdir()) == files
    assert len(Page.of(page.read_text(encoding="utf-8")).all("svg")) == len(names)
    assert (figures / "06-time.png").read_bytes().startswith(b"\x89PNG")
    assert list(page.parent.iterdir()) == [page]


def test_without_matplotlib_the_page_has_tables_and_figures_are_refused(
    real_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "report.html"
    assert main(["report", str(real_run), "-o", str(out), "--figures", str(tmp_path / "figures")]) == 2
    assert "pip install 'trisect[plots]'" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main(["report", str(real_run), "-o", str(out)]) == 0
    page = Page.of(out.read_text(encoding="utf-8"))
    assert not page.all("svg")
    assert page.text.count("pip install 'trisect[plots]'") == 1
    losses = [loss["loss"] / loss["total"] for loss in json.loads((real_run / "receipt.json").read_text())["losses"]]
    assert {repr(value) for value in losses} <= {cell.attributes.get("data-value") for cell in page.all("td")}
    assert sum("open" in element.attributes for element in page.all("details")) == len(page.all("figure")) == 6


def test_samples_are_what_the_models_generate(real_run: Path, tmp_path: Path) -> None:
    import transformers

    import trisect  # noqa: F401 - registers the compressed classes

    out = tmp_path / "r.html"
    words = ["report", str(real_run), "-o", str(out), "--sample", "the dog", "--sample-tokens", "5", "--quiet"]
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


def test_a_dense_model_that_is_not_here_is_said_and_not_fetched(copied: Callable[..., Path], tmp_path: Path) -> None:
    out, folder = tmp_path / "r.html", copied("run", source="org/model")
    words = ["report", str(folder), "-o", str(out), "--sample", "a", "--sample-tokens", "1", "--quiet"]
    assert main(words) == 0
    assert "(not sampled: org/model is not on this machine)" in out.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sample", ""], "A prompt is empty"),
        (["--sample", "a", "--sample-tokens", "0"], "greater than or equal to 1"),
        (["-o", "model.safetensors"], "should end in .html: -o model.html"),
        (["--figures", "taken"], "is a file; name a folder"),
        (["--measured", "nothing.json"], "Cannot read nothing.json"),
        (["--curves", "curves.json"], "start at other widths"),
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


def test_an_earlier_page_stays_where_the_next_one_fails(real_run: Path, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    assert main(["report", str(real_run), "-o", str(page)]) == 0
    first = page.read_bytes()
    assert main(["report", str(tmp_path / "nothing"), "-o", str(page)]) == 2
    assert page.read_bytes() == first
