"""Tables, numbers and figures of the documents are those of the receipts, and the check names what is not."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Script = Callable[[str], ModuleType]


def test_every_table_number_and_figure_is_that_of_its_receipts(
    script: Script, capsys: pytest.CaptureFixture[str]
) -> None:
    code = script("results_page").main(["--check"])
    assert code == 0, f"run `make results`:\n{capsys.readouterr().out}"


def test_every_marker_is_closed_and_known_and_every_table_and_figure_is_shown(script: Script) -> None:
    page, tables = script("results_page"), script("tables")
    texts = {path.name: path.read_text(encoding="utf-8") for path in page.documents()}
    shown = set()
    for name, text in texts.items():
        blocks = [block for block, _ in tables.BLOCK.findall(text)]
        assert set(blocks) <= page.blocks().keys(), name
        assert text.count("<!-- table:") == len(blocks), name
        assert text.count("<!-- n:") == len(tables.NUMBER.findall(text)), name
        assert "\n<!-- n:" not in text, f"{name}: a number at the start of a line ends the paragraph"
        shown |= set(blocks)
    assert shown == page.blocks().keys()
    for path in page.pictures():
        assert any(f"(pictures/results/{path.name})" in text for text in texts.values()), path.name


def test_every_file_of_results_is_read_by_a_table_or_a_number(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    page, tables = script("results_page"), script("tables")
    read, seen = tables.read, set()

    def noted(name: str) -> object:
        seen.add(name)
        return read(name)

    for module in (tables, *page.MODULES):
        if hasattr(module, "read"):
            monkeypatch.setattr(module, "read", noted)
    for path in page.documents():
        tables.filled(path.read_text(encoding="utf-8"), page.blocks())
    assert {path.name for path in tables.RESULTS.glob("*.json")} == seen


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


def test_the_check_shows_what_differs_and_changes_nothing(
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
    assert "page.md differs" in said
    assert "-1.25\n" in said
    assert "+1.5\n" in said
    assert "+Took <!-- n: r.json#of.bytes|GB -->3.00 GB<!-- /n -->." in said
    assert "a.svg: the figure is not the one that the receipts give" in said
    assert "old.svg: no receipt for this figure is left" in said
    assert (tmp_path / "page.md").read_text() == before
    small.main([])
    assert not (tmp_path / "pictures" / "old.svg").exists()


def test_a_row_is_kept_in_the_place_of_the_one_with_its_key(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = script("tables")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.known("r.json") == set()
    for name, value in (("b", 1), ("a", 2), ("b", 3)):
        tables.keep_row("r.json", {"name": name, "value": value})
    assert tables.rows_of("r.json") == [{"name": "a", "value": 2}, {"name": "b", "value": 3}]
    assert tables.known("r.json") == {"a", "b"}
    assert len((tmp_path / "r.json").read_text().splitlines()) == 4


@pytest.mark.parametrize("study", ["stories15m", "smollm2"])
def test_at_least_two_narrow_quantised_points_lie_below_the_line_of_pure_hqq(script: Script, study: str) -> None:
    made = script("quantise_tables")
    points = made.points(study)
    line = made.pure_line(points)
    assert {point.setting[:2] for point in line} == {"b2", "b3", "b4", "b8"}
    there = {point: made.line_at(line, point.bits) for point in points if point.mixed}
    assert sum(value is not None and point.perplexity < value for point, value in there.items()) >= 2


def test_the_line_of_pure_hqq_leaves_out_what_another_point_beats(script: Script) -> None:
    made = script("quantise_tables")
    pairs = [(2.0, 90.0), (3.0, 40.0), (3.5, 50.0), (4.0, 10.0)]
    line = made.pure_line([made.Point("dense", 0.0, "b3-g8", *pair) for pair in pairs])
    assert [(point.bits, point.perplexity) for point in line] == [(2.0, 90.0), (3.0, 40.0), (4.0, 10.0)]
    assert made.line_at(line, 3.5) == pytest.approx(20.0)  # the geometric mean of 40 and 10
    assert made.line_at(line, 4.5) is None
