"""docs/report.md names options and sections that are there, and its pictures are small."""

import inspect
import re
from pathlib import Path

import pytest

from trisect.commands import measure
from trisect.report.page import report_sections
from trisect.report.runs import read_runs

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "report.md").read_text(encoding="utf-8")
LARGEST_PICTURE = 200_000


def test_every_option_of_the_table_is_one_of_the_command() -> None:
    known = {f"--{name.replace('_', '-')}" for name in inspect.signature(measure.report).parameters}
    named = set(re.findall(r"^\| `(--[a-z-]+)", TEXT, flags=re.MULTILINE))
    assert named == {"--measured"}
    assert named <= known


def test_every_section_of_the_page_is_explained(real_run: Path) -> None:
    explained = "".join(line for line in TEXT.splitlines() if line.startswith("| "))
    assert all(section.title in explained for section in report_sections(read_runs([real_run])).values())


@pytest.mark.parametrize("picture", re.findall(r"\]\((pictures/[^)]+)\)", TEXT))
def test_pictures_are_there_and_small(picture: str) -> None:
    assert 0 < (DOCS / picture).stat().st_size < LARGEST_PICTURE
