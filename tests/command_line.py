"""`trisect` as a user types it: words of any kind, and the JSON that it writes."""

import json
from pathlib import Path
from typing import Any

from trisect.cli import main


def run(*words: object) -> int:
    """The exit code of a command, run in this process."""
    return main([str(word) for word in words])


def read(path: Path) -> Any:
    return json.loads(path.read_text())
