"""`trisect report` as a user types it."""

import json
import sys
from pathlib import Path

import pytest
from report_runs import Page

from trisect.cli import main


def test_a_page_and_where_it_is(real_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "new" / "report.html"
    assert main(["report", str(real_run), "-o", str(page)]) == 0
    assert f"Saved to {page}" in capsys.readouterr().out
    figures = ["plan", "losses", "QK spectra", "OV spectra", "MLP spectra"]
    assert len(Page.of(page.read_text(encoding="utf-8")).all("svg")) == len(figures)
    assert list(page.parent.iterdir()) == [page]


def test_without_matplotlib_the_page_has_tables(
    real_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "report.html"
    assert main(["report", str(real_run), "-o", str(out)]) == 0
    page = Page.of(out.read_text(encoding="utf-8"))
    assert not page.all("svg")
    assert page.text.count("pip install 'trisect[plots]'") == 1
    losses = [loss["loss"] / loss["total"] for loss in json.loads((real_run / "receipt.json").read_text())["losses"]]
    assert {repr(value) for value in losses} <= {cell.attributes.get("data-value") for cell in page.all("td")}
    assert sum("open" in element.attributes for element in page.all("details")) == len(page.all("figure")) == 5


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-o", "model.safetensors"], "should end in .html: -o model.html"),
        (["--measured", "nothing.json"], "Cannot read nothing.json"),
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
