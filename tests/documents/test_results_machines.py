"""Receipts say what a machine is, never which one: no folder, no host, no user."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).resolve().parents[2] / "experiments" / "results"
FOLDERS = (
    "work|tmp|root|home|mnt|media|srv|opt|usr|var|etc|data|Users|private|scratch|workspace|content|kaggle"
)
PLACE = re.compile(rf"(?<![\w.~-])/(?:{FOLDERS})/\w|[A-Za-z]:\\\\|file://")
ADDRESS = re.compile(r"https?://|\b(?!127\.)\d{1,3}\.\d{1,3}\.\d{1,3}\.\d{1,3}\b|\w+@[\w-]+\.\w+")
NAMES = {"host", "hostname", "node", "user", "username", "login", "cwd", "home"}


def named_machines(text: str) -> list[str]:
    """Absolute folders and addresses."""
    return [match[0] for pattern in (PLACE, ADDRESS) for match in pattern.finditer(text)]


def keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner)


def files(*endings: str) -> list[Path]:
    """What may be committed: the caches of comparisons are not."""
    return [p for p in sorted(RESULTS.rglob("*")) if p.suffix in endings and "cache" not in p.parts]


def test_no_file_of_results_names_a_machine() -> None:
    written = files(".json", ".md", ".csv", ".yaml")
    assert written
    found = {
        str(path.relative_to(RESULTS)): named_machines(path.read_text(encoding="utf-8")) for path in written
    }
    assert not {name: places for name, places in found.items() if places}


def test_no_receipt_has_a_key_for_a_machine_or_a_person() -> None:
    for path in files(".json"):
        assert not NAMES.intersection(keys(json.loads(path.read_text(encoding="utf-8")))), path.name


@pytest.mark.parametrize(
    "text",
    [
        '"/srv/models/a"',
        '"out": "/home/me/x"',
        "see /var/run/1",
        "https://example.org",
        "10.0.0.7",
        "me@host.org",
    ],
)
def test_a_machine_is_recognised(text: str) -> None:
    assert named_machines(text)


def test_relative_paths_and_versions_are_no_machine() -> None:
    assert not named_machines(
        '"../shared/data/wikitext-2/test.txt", "2.13.0+cpu", "127.0.0.2", "runs/work/x"'
    )
