"""docs/design.md lists the files that `trisect compress` walks through: few, and a run enters each of them."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from command_line import run
from tiny_models import save_tiny

REPOSITORY = Path(__file__).resolve().parents[1]
SOURCE = REPOSITORY / "src" / "trisect"
MOST = 35


def listed() -> list[str]:
    """The files of the table, in its order."""
    page = (REPOSITORY / "docs" / "design.md").read_text(encoding="utf-8")
    table = page.partition("## The walk")[2].partition("\n## ")[0]
    return re.findall(r"`([\w/]+\.py)`", "".join(line for line in table.splitlines() if line.startswith("| ")))


def test_the_walk_is_short_and_its_files_are_there() -> None:
    names = listed()
    assert 20 < len(names) == len(set(names)) <= MOST
    assert not [name for name in names if not (SOURCE / name).is_file()]


def test_a_run_enters_every_listed_file(tmp_path: Path, text: Path) -> None:
    model, entered = save_tiny(tmp_path / "tiny"), set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            entered.add(frame.f_code.co_filename)

    words = ["compress", model, "-o", tmp_path / "out", "--ratio", 0.25, "--align", "none", "--calibration", text]
    sys.setprofile(note)
    try:
        assert run(*words, "--length", 32, "--samples", 16, "--eval-windows", 2) == 0
    finally:
        sys.setprofile(None)
    assert not [name for name in listed() if str(SOURCE / name) not in entered]
