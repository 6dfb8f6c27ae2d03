"""The page says what the receipts say, is the same every time, and lets no text act."""

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_runs import HOSTILE, Page, bench_file, eval_file, perplexity_entry, tasks_entry

from trisect.plan.budget import budget_of
from trisect.report.page import _template, render, report_sections
from trisect.report.runs import read_runs
from trisect.support import plots

ELEMENTS = set(
    "html head meta title style script body header nav main section h1 h2 h4 a ul li p div b small span code "
    "pre table thead tbody tr th td figure figcaption details summary button "
    "svg g defs use path rect clippath text".split()
)


def page_of(folders: list[Path], files: list[Path] | None = None) -> str:
    runs = read_runs(folders, files or [])
    return render(runs, report_sections(runs))


@pytest.fixture
def drawn() -> None:
    """For tests that look at figures."""
    pytest.importorskip("matplotlib")


@pytest.fixture(autouse=True)
def _tables_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests read tables, and drawing takes longer than all else."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(plots, "has_matplotlib", lambda: False)


def values(page: Page) -> set[str]:
    return {str(element.attributes["data-value"]) for element in page.all("td") if "data-value" in element.attributes}


def test_every_number_of_the_headline_is_that_of_the_model_and_its_receipt(real_run: Path) -> None:
    run = read_runs([real_run])[0]
    page = Page.of(page_of([real_run]))
    old, new = budget_of(run.before), budget_of(run.after)
    expected = [old.parameters, new.parameters, old.kv_bytes_per_token, new.kv_bytes_per_token]
    expected += [old.flops, new.flops, (real_run / "model.safetensors").stat().st_size]
    assert {repr(value) for value in expected} | {"20.0", "25.0"} <= values(page)
    shown = [element.text for element in page.all("td")]
    assert "20.000" in shown
    assert "x1.250" in shown
    assert f"{100 * (new.parameters / old.parameters - 1):+.1f}%" in shown


def test_losses_and_times_are_on_the_page_to_the_last_digit(real_run: Path) -> None:
    receipt = json.loads((real_run / "receipt.json").read_text())
    found = values(Page.of(page_of([real_run])))
    assert {repr(e["loss"] / e["total"]) for e in receipt["losses"]} <= found
    assert {repr(value) for stage, value in receipt["timings"].items() if stage != "compress"} <= found


def test_the_whole_receipt_can_be_read_off_the_page(real_run: Path) -> None:
    shown = Page.of(page_of([real_run])).all("pre")
    assert json.loads(shown[0].text) == json.loads((real_run / "receipt.json").read_text())


def test_what_was_not_measured_is_said_with_the_command_that_would(real_run: Path, tmp_path: Path) -> None:
    text = Page.of(page_of([real_run])).text
    assert text.count("not measured") == 2
    assert "trisect eval MODEL --tasks quick --json F" in text
    assert "trisect bench RUN --json F" in text
    assert "Tuning" not in text  # a section with nothing in it
    files = [
        eval_file(tmp_path / "t.json", real_run, tasks=tasks_entry(boolq=0.4321)),
        bench_file(tmp_path / "b.json", real_run, dense=0.5, narrow=0.25),
    ]
    measured = Page.of(page_of([real_run], files))
    assert {"0.4321", "2.0", "4.0"} <= values(measured)
    assert "trisect bench RUN" not in measured.text
    # The dense model's score is what is missing still.
    assert measured.text.count("not measured") == 1


def test_several_runs_stand_side_by_side_and_a_gap_is_said(copied: Callable[..., Path]) -> None:
    folders = [copied("one"), copied("two", perplexity=None)]
    page = Page.of(page_of(folders))
    groups = [element.text for element in page.all("th") if element.attributes.get("scope") == "colgroup"]
    assert groups == ["one", "two"]
    # Tasks, speed, and the perplexity of the second run.
    assert page.text.count("not measured") == 3
    names = [element.attributes["data-name"] for element in page.all("figure")]
    spectra = [f"spectra-{part}-{name}" for name in ("one", "two") for part in ("qk", "ov", "mlp")]
    assert names == ["plan-one", "losses-one", "plan-two", "losses-two", *spectra]


def test_runs_of_one_model_share_what_was_measured_of_it(copied: Callable[..., Path], tmp_path: Path) -> None:
    one, two = copied("one"), copied("two", perplexity=None)
    file = eval_file(tmp_path / "e.json", two, **perplexity_entry(30.0))
    page = Page.of(page_of([one, two], [file]))
    heads = [element.text for element in page.all("th") if element.attributes.get("scope") == "col"]
    assert heads[:6] == ["before", "after", "change"] * 2
    assert {"x1.250", "x1.500"} <= {element.text for element in page.all("td")}
    other = copied("three", source="another", perplexity=None)
    file = eval_file(tmp_path / "e.json", other, **perplexity_entry(30.0))
    assert "x1.500" not in {element.text for element in Page.of(page_of([one, other], [file])).all("td")}


def test_speeds_are_measured_beside_each_run(copied: Callable[..., Path], tmp_path: Path) -> None:
    one, two = copied("one"), copied("two")
    files = [
        bench_file(tmp_path / "1.json", one, dense=0.5, narrow=0.25),
        bench_file(tmp_path / "2.json", two, dense=0.4, narrow=0.25),
    ]
    page = Page.of(page_of([one, two], files))
    assert {"2.0 tokens/s", "2.5 tokens/s", "x2.000", "x1.600"} <= {element.text for element in page.all("td")}
    # The table of runs has tokens per second, and no second column that says the same in milliseconds.
    heads = [element.text for element in page.all("th") if element.attributes.get("scope") == "col"]
    runs = heads[heads.index("run") : heads.index("layer")]
    assert [head for head in runs if head.startswith("decode")] == ["decode, 1 x 64 + 8 tokens (tokens/s)"]


def test_the_changes_that_matter_most_stand_in_large_type(real_run: Path, tmp_path: Path) -> None:
    run = read_runs([real_run])[0]
    files = [
        eval_file(tmp_path / "a.json", real_run, tasks=tasks_entry(boolq=0.5, piqa=0.7)),
        eval_file(tmp_path / "b.json", run.source, tasks=tasks_entry(boolq=0.6, piqa=0.8)),
        bench_file(tmp_path / "s.json", real_run, dense=0.5, narrow=0.25),
    ]
    page = Page.of(page_of([real_run], files))
    tiles = [element.text for element in page.all("div") if element.attributes.get("class") == "tile"]
    sizes = ["parameters", "KV cache per token", "FLOPs"]
    assert tiles == [*sizes, "perplexity, text.txt", "average of 2 tasks", "decode, 1 x 64 + 8 tokens"]
    large = [(e.text, e.attributes.get("class")) for e in page.all("b")]
    assert large[3:] == [("x1.250", "worse"), ("-0.1000", "worse"), ("x2.000", "better")]


def test_runs_are_listed_with_the_average_of_their_tasks(copied: Callable[..., Path], tmp_path: Path) -> None:
    runs = [copied("one"), copied("two")]
    files = [eval_file(tmp_path / f"{run.name}.json", run, tasks=tasks_entry(boolq=0.5, piqa=0.7)) for run in runs]
    heads = [e.text for e in Page.of(page_of(runs, files)).all("th") if e.attributes.get("scope") == "col"]
    listed = heads[heads.index("run") : heads.index("layer")]
    assert "average of 2 tasks" in listed
    assert "boolq" not in listed


@pytest.mark.parametrize(("error", "css"), [(0.01, "worse"), (0.09, "open"), (None, "worse")])
def test_a_difference_within_twice_its_error_is_called_neither_better_nor_worse(
    real_run: Path, tmp_path: Path, error: float | None, css: str
) -> None:
    source = read_runs([real_run])[0].source
    files = []
    for name, model, value in (("a", real_run, 0.5), ("b", source, 0.6)):
        tasks = tasks_entry(boolq=value)
        tasks["scores"]["boolq"]["stderr"] = error
        files.append(eval_file(tmp_path / f"{name}.json", model, tasks=tasks))
    page = Page.of(page_of([real_run], files))
    changes = [e for e in page.all("td") if e.text == "-0.1000"]
    assert [e.attributes["class"] for e in changes] == [f"number {css}"]
    said = [e.text for e in page.all("small") if e.text.startswith("+-")]
    both = f"+-{2**0.5 * (error or 0):.4f}"
    tile = f"{both}, may be chance" if css == "open" else both
    assert said == ([tile, both] if error else [])


def test_a_list_of_numbers_takes_one_line_of_the_receipt(copied: Callable[..., Path]) -> None:
    texts = {"odd": ["[\n 1,\n 2\n]", "a"], "numbers": [1, -2.5e-07, None, True], "empty": []}
    shown = Page.of(page_of([copied("run", **texts)])).all("pre")[0].text
    assert {key: json.loads(shown)[key] for key in texts} == texts
    assert '"numbers": [ 1, -2.5e-07, null, true ]' in shown
    assert all(len(line.split(",")) > 3 for line in shown.splitlines() if '"values": [' in line)


@pytest.mark.usefixtures("drawn")
def test_the_same_runs_give_the_same_bytes_wherever_they_lie(real_run: Path, tmp_path: Path) -> None:
    shutil.copytree(real_run, tmp_path / "run")
    assert page_of([real_run]) == page_of([real_run]) == page_of([tmp_path / "run"])


@pytest.fixture
def hostile(copied: Callable[..., Path]) -> Path:
    """A run with bad text in every place that a stranger can write to."""
    folder = copied("<img src=x onerror=alert(1)>'\"&")
    receipt = json.loads((folder / "receipt.json").read_text())
    for loss in receipt["losses"]:
        loss["note"] = HOSTILE
        loss["component"] = f"{HOSTILE}{loss['component']}"
    entry = perplexity_entry(9.0, data=HOSTILE)
    receipt |= {
        "source": HOSTILE,
        "perplexity": {"before": entry, "after": entry},
        "timings": {HOSTILE: 1.0, "a": 2.0},
        "versions": {HOSTILE: HOSTILE},
        "hardware": {"cpu": HOSTILE, "\x00": "\x1b[31m"},
        "recipe": {"calibration": {"source": HOSTILE, "samples": HOSTILE}},
        "date": HOSTILE,
        "commit": HOSTILE,
        "python": HOSTILE,
        HOSTILE: HOSTILE,
        "tuning": [{"losses": [1.0], "held_out": [{"after": entry}]}],
    }
    (folder / "receipt.json").write_text(json.dumps(receipt))
    (folder / "measurements").mkdir()
    tasks = {"model": HOSTILE, "tasks": tasks_entry(**{HOSTILE: 0.5, "b": 0.5})}
    (folder / "measurements" / "t.json").write_text(json.dumps(tasks))
    bench_file(folder / "measurements" / "b.json", HOSTILE, dense=1.0, narrow=1.0)
    return folder


@pytest.mark.usefixtures("drawn")
def test_text_of_strangers_makes_no_element_attribute_or_script(hostile: Path) -> None:
    text = page_of([hostile])
    text.encode("utf-8")
    page = Page.of(text)
    assert {element.name for element in page.elements} <= ELEMENTS
    assert len(page.all("script")) == len(page.all("style")) == 1
    assert not page.comments
    names = {name for element in page.elements for name in element.attributes}
    assert not {name for name in names if name.startswith("on")}
    assert {str(link.attributes["href"])[0] for link in page.all("a")} == {"#"}
    assert page.text.count(HOSTILE) > 15


@pytest.mark.usefixtures("drawn")
def test_nothing_is_fetched_and_no_other_script_may_run(real_run: Path) -> None:
    text = page_of([real_run])
    page = Page.of(text)
    script = page.all("script")[0].text
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(e.attributes["content"] for e in page.all("meta") if "http-equiv" in e.attributes)
    assert policy is not None
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy
    assert not re.findall(r"(?:src|href)=\"(?!#)", text)
    assert not re.findall(r"url\((?!#)", text)
    assert "@import" not in text
    spaces = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\s\"<]+", text)) <= spaces


@pytest.mark.usefixtures("drawn")
def test_every_figure_has_its_numbers_in_a_table_and_a_label(real_run: Path) -> None:
    runs = read_runs([real_run])
    found = report_sections(runs)
    page = Page.of(render(runs, found))
    drawn = page.all("svg")
    assert len(drawn) == sum(len(section.figures) for section in found.values()) == 5
    assert all(element.attributes["role"] == "img" and element.attributes["aria-label"] for element in drawn)
    assert [e.text for e in page.all("summary")].count("Data") == len(drawn)


def test_links_lead_to_sections_that_are_there(real_run: Path) -> None:
    page = Page.of(page_of([real_run]))
    ids = {element.attributes["id"] for element in page.elements if "id" in element.attributes}
    assert {str(link.attributes["href"])[1:] for link in page.all("a")} <= ids


@given(st.text(st.characters(), max_size=30))
def test_any_text_is_read_back_as_it_went_in(text: str) -> None:
    written = plots.UNWRITABLE.sub("\ufffd", text)
    made = _template().environment.from_string('<p title="{{ text }}">{{ text }}</p>').render(text=text)
    made.encode("utf-8")
    (element,) = Page.of(made).elements
    assert element.text == written
    assert element.attributes == {"title": written}


def test_what_utf8_and_html_cannot_hold_is_replaced() -> None:
    assert plots.UNWRITABLE.sub("\ufffd", "a\x00b\ud800c\x1bd") == "a\ufffdb\ufffdc\ufffdd"
