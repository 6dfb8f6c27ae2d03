"""The page in a real Chromium: it renders without errors, its controls work, and hostile text does nothing.

Chromium is found by the variable CHROMIUM, or on the PATH; without one these tests are skipped.
"""

import base64
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_runs import HOSTILE, Page, perplexity_entry

from trisect.report.page import render, report_sections
from trisect.report.runs import read_runs

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 120
"""Seconds: a browser starts slowly on a busy machine."""

PROBE = """
const seen = { errors: window.failures.length };
const all = (selector, from = document) => Array.from(from.querySelectorAll(selector));
seen.flat = all("svg").filter((svg) => svg.getBoundingClientRect().width < 100).length;
seen.drawings = all("svg").length;
seen.wider = document.documentElement.scrollWidth - document.documentElement.clientWidth;

const table = document.querySelector("#runs table");
const column = all("thead th", table).findIndex((th) => th.textContent.startsWith("perplexity"));
const order = () => all("tbody tr", table).map((row) => row.cells[column].textContent);
const sorter = all("thead th button", table)[column];
sorter.click();
seen.up = order();
sorter.click();
seen.down = order();
seen.sorted = all("thead th", table)[column].getAttribute("aria-sort");

seen.errors = window.failures;
const answer = document.createElement("pre");
answer.id = "answer";
answer.textContent = JSON.stringify(seen);
document.body.append(answer);
"""
LISTENER = """
window.failures = [];
addEventListener("error", (event) => window.failures.push(String(event.message)));
addEventListener("securitypolicyviolation", (event) => window.failures.push(event.violatedDirective));
"""


@pytest.fixture(scope="module")
def chromium() -> str:
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium: put one on the PATH, or name it by the variable CHROMIUM")
    return found


def browse(chromium: str, page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Open a page with a fresh profile and nothing else."""
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={page.parent / 'profile'}", "--window-size=1280,1000", *options, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def allowing(page: str, *scripts: str) -> str:
    """The page with scripts of ours that its policy allows: the first in the head, others at the end."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts]
    page = page.replace("script-src ", "script-src " + "".join(f"'sha256-{one}' " for one in hashes), 1)
    page = page.replace("<title>", f"<script>{scripts[0]}</script><title>", 1)
    return page.replace("</body>", "".join(f"<script>{text}</script>" for text in scripts[1:]) + "</body>", 1)


def answer_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What a script of ours left in the page, with nothing on the console."""
    assert "CONSOLE" not in done.stderr, done.stderr
    answers = [e.text for e in Page.of(done.stdout).all("pre") if e.attributes.get("id") == "answer"]
    assert answers, done.stdout[-2000:]
    found: dict[str, Any] = json.loads(answers[0])
    return found


@pytest.fixture
def three_runs(copied: Callable[..., Path]) -> str:
    """A page with every kind of figure."""
    folders = []
    for name, value in (("low", 21.5), ("high", 104.0), ("middle", 30.0)):
        measured = {"before": perplexity_entry(20.0), "after": perplexity_entry(value)}
        folders.append(copied(name, perplexity=measured))
    runs = read_runs(folders)
    return render(runs, report_sections(runs))


def test_the_page_renders_and_its_controls_work(chromium: str, three_runs: str, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(allowing(three_runs, LISTENER, PROBE), encoding="utf-8")
    seen = answer_of(browse(chromium, page, "--dump-dom"))
    assert seen["errors"] == []
    assert seen["drawings"] == 6 + 9  # plan and losses of each run, three spectra of each
    assert seen["flat"] == 0
    assert seen["wider"] <= 0
    assert seen["up"] == ["21.500", "30.000", "104.000"]  # as numbers: as text, 104 would come first
    assert seen["down"] == seen["up"][::-1]
    assert seen["sorted"] == "descending"


FITS = """
const answer = document.createElement("pre");
answer.id = "answer";
const page = document.documentElement;
const wide = Array.from(document.querySelectorAll("figure.wide .drawing"));
const seen = { errors: window.failures, wider: page.scrollWidth - page.clientWidth };
seen.inside = wide.map((drawing) => drawing.scrollWidth > drawing.clientWidth);
answer.textContent = JSON.stringify(seen);
document.body.append(answer);
"""


def test_a_narrow_window_scrolls_wide_figures_and_never_the_page(chromium: str, real_run: Path, tmp_path: Path) -> None:
    run = read_runs([real_run])[0]
    deep = {"before": run.before, "after": run.after}
    deep = {side: replace(shape, layers=shape.layers * 20) for side, shape in deep.items()}
    runs = [replace(run, name="deep", **deep)]
    page = tmp_path / "report.html"
    page.write_text(allowing(render(runs, report_sections(runs)), LISTENER, FITS), encoding="utf-8")
    seen = answer_of(browse(chromium, page, "--window-size=500,900", "--dump-dom"))
    assert seen == {"errors": [], "wider": 0, "inside": [True, True]}


def test_hostile_text_does_nothing_and_could_not_even_unescaped(
    chromium: str, copied: Callable[..., Path], tmp_path: Path
) -> None:
    runs = read_runs([copied("run", source=HOSTILE, date=HOSTILE)])
    text = render(runs, report_sections(runs))
    page = tmp_path / "report.html"
    page.write_text(text, encoding="utf-8")
    done = browse(chromium, page, "--dump-dom")
    assert "CONSOLE" not in done.stderr
    assert "<title>trisect report: run</title>" in done.stdout
    raw = "<script>document.title = 'broken'</script>" + HOSTILE
    page.write_text(text.replace("<main>", f"<main>{raw}", 1), encoding="utf-8")
    done = browse(chromium, page, "--dump-dom")
    assert "<title>trisect report: run</title>" in done.stdout
    assert "Content Security Policy" in done.stderr


def test_it_prints(chromium: str, three_runs: str, tmp_path: Path) -> None:
    page, paper = tmp_path / "report.html", tmp_path / "report.pdf"
    page.write_text(three_runs, encoding="utf-8")
    browse(chromium, page, f"--print-to-pdf={paper}", "--no-pdf-header-footer")
    content = paper.read_bytes()
    assert content.startswith(b"%PDF")
    assert content.count(b"/Type /Page\n") + content.count(b"/Type /Page ") + content.count(b"/Type /Page/") >= 2
