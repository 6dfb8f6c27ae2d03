"""`make results` writes what the receipts say, all of it, and the check names what does not match."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from results_to_come import write_results

Script = Callable[[str], ModuleType]
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_every_table_number_and_figure_is_that_of_its_receipts(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    code = script("results_page").main(["--check"])
    assert code == 0, f"run `make results`:\n{capsys.readouterr().out}"


def test_the_page_has_a_place_for_every_section(script: Script) -> None:
    page = script("results_page")
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    marked = script("tables").BLOCK.findall(text)
    assert {name for name, _ in marked} == {name for name in page.blocks() if name.startswith("results-")}
    assert len(marked) == len({name for name, _ in marked})


def test_every_block_of_every_document_is_known(script: Script) -> None:
    page, tables = script("results_page"), script("tables")
    for path in page.documents():
        text = path.read_text(encoding="utf-8")
        assert {name for name, _ in tables.BLOCK.findall(text)} <= page.blocks().keys(), path.name
        assert text.count("<!-- table:") == len(tables.BLOCK.findall(text)), path.name
        assert text.count("<!-- n:") == len(tables.NUMBER.findall(text)), path.name


def test_no_inline_number_begins_a_line_where_markdown_would_break_the_paragraph(script: Script) -> None:
    for path in script("results_page").documents():
        assert "\n<!-- n:" not in path.read_text(encoding="utf-8"), path.name


def test_pictures_of_the_documents_are_there(script: Script) -> None:
    page = script("results_page")
    drawn = {path.name for path in page.pictures()}
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert drawn
    for name in drawn:
        assert f"(pictures/results/{name})" in text


@pytest.fixture
def small(script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Documents and receipts of one block and one number."""
    page, tables = script("results_page"), script("tables")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(page, "PICTURES", tmp_path / "pictures")
    monkeypatch.setattr(page, "pictures", lambda: {tmp_path / "pictures" / "a.svg": "<svg/>\n"})
    monkeypatch.setattr(page, "documents", lambda: [tmp_path / "page.md"])
    monkeypatch.setattr(page, "blocks", lambda: {"one": lambda: str(tables.read("r.json")["speed"])})
    (tmp_path / "r.json").write_text(json.dumps({"speed": 1.25, "of": {"bytes": 2_500_000_000}}))
    text = "<!-- table:one -->\n<!-- end:one -->\nTook <!-- n: r.json#of.bytes|GB -->?<!-- /n -->.\n"
    (tmp_path / "page.md").write_text(text)
    return page


def test_what_is_written_once_is_not_written_again(
    small: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert small.main(["--check"]) == 1
    assert small.main([]) == 0
    assert "1.25\n" in (tmp_path / "page.md").read_text()
    assert "-->2.50 GB<!--" in (tmp_path / "page.md").read_text()
    capsys.readouterr()
    assert small.main([]) == 0
    assert small.main(["--check"]) == 0
    assert capsys.readouterr().out == ""


def test_the_check_names_the_block_the_number_and_the_figure_and_changes_nothing(
    small: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small.main([])
    (tmp_path / "r.json").write_text(json.dumps({"speed": 1.5, "of": {"bytes": 3_000_000_000}}))
    (tmp_path / "pictures" / "a.svg").write_text("<svg>something else</svg>\n")
    (tmp_path / "pictures" / "old.svg").write_text("<svg/>\n")
    before = (tmp_path / "page.md").read_text()
    capsys.readouterr()
    assert small.main(["--check"]) == 1
    said = capsys.readouterr().out
    assert "page.md: block one differs" in said
    assert "-1.25\n+1.5\n" in said
    assert "page.md: r.json#of.bytes is 3.00 GB in its receipt, 2.50 GB in the document" in said
    assert "a.svg: the figure is not the one that the receipts give" in said
    assert "old.svg: no receipt for this figure is left" in said
    assert (tmp_path / "page.md").read_text() == before
    small.main([])
    assert not (tmp_path / "pictures" / "old.svg").exists()


def test_a_section_without_receipts_is_left_out_and_listed_as_missing(
    script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tables, page = script("tables"), script("results_page")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(script("comparison_tables"), "RESULTS", tmp_path)
    missing = page.missing_block()
    for section in script("results_sections").SECTIONS:
        assert section.text() == ""
        assert section.command in missing
    assert page.comparison_block() == ""
    assert "experiments/recipes/kv-stories-mpt.yaml" in missing


def test_receipts_that_land_appear_with_their_tables_figures_and_verdicts(
    script: Script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tables, sections = script("tables"), script("results_sections")
    rows = tables.read("bench-cpu-smollm2/rows.json")
    for row in rows["rows"]:
        row["case"]["subject"] = tables.targets()["speed_setting"]["subject"]
        # At the limit and far from it, whatever was measured last.
        dense = next(r for r in rows["rows"] if r["case"]["phase"] == row["case"]["phase"])
        if row["case"]["kind"] == "trisect":
            factor = {"prefill": 0.25, "decode": 2.0}[row["case"]["phase"]]
            row["times"] = {name: factor * time for name, time in dense["times"].items()}
    write_results(tmp_path, bench_rows=rows)
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(script("results_section"), "drawn", lambda section: section.pictures())
    said = {section.name: section.text() for section in sections.SECTIONS}
    assert "| a3+ uniform | 25.0% | +4.00 | +4.00 |" in said["from-c4"]
    assert "| 50 | 50 | 0 to 6 |" in said["kills"]
    assert "60 s, met" in said["shapes"]
    assert "180 s, **missed**" in said["shapes"]
    assert "8 s a layer, met; 40 GB, met" in said["shapes"]
    assert "1.00 (expected: at most 1)" in said["growth"]
    assert "| prefill | kernel | 10.0 | 3,000 | 0.90 |" in said["rotary"]
    assert "asked: 0.97, met" in said["bench-h200"]
    assert "asked: 0.95, **missed**" in said["bench-h200"]
    assert "trisect 0.25 takes 2.00 times as long as dense" in said["bench-h200"]
    assert "beside the dense model in it they are at" in said["bench-h200"]
    assert "At 25.0%, a3+ uniform: 0.267 (asked: at most 0.25, **missed**)" in said["a3plus"]
    assert all("Commit `0123456789ab`" in said[name] for name in ("kills", "shapes", "growth"))
