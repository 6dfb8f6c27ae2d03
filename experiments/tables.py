"""Receipts and documents: rows are read and kept here, and the markers of documents are filled here.

A file of experiments/results holds one experiment: `rows`, one per line, and what they have in common.

A block of a document stands between `<!-- table:NAME -->` and `<!-- end:NAME -->`. A single number in a
sentence stands between `<!-- n: FILE#KEY.KEY|FORMAT -->` and `<!-- /n -->`: where it is in a receipt, and how
it is written (`GB` in units of a billion bytes, else a format specification). `make results` writes them all.
"""

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trisect.support.files import atomic_write_text

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
BLOCK = re.compile(r"<!-- table:([\w.+-]+) -->\n(.*?)<!-- end:\1 -->", re.DOTALL)
NUMBER = re.compile(r"<!-- n: (\S+?)#(\S+?)\|(\S+) -->([^<]*)<!-- /n -->")

Entry = dict[str, Any]
Blocks = Mapping[str, Callable[[], str]]


def read(name: str) -> Any:
    """A file of results by its name below experiments/results."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def found(pattern: str) -> list[Path]:
    """Files of results that fit the pattern; empty where nothing was measured."""
    return sorted(RESULTS.glob(pattern))


def rows_of(name: str) -> list[Entry]:
    """The rows of an experiment; none where it was not run."""
    return list(read(name)["rows"]) if found(name) else []


def write_rows(name: str, rows: Sequence[Entry], **common: Any) -> None:
    """Write an experiment's file, each row on a line of its own."""
    parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in common.items()]
    lines = ",\n".join(json.dumps(row) for row in rows)
    parts.append(f'"rows": [\n{lines}\n]')
    atomic_write_text(RESULTS / name, "{" + ",\n".join(parts) + "}\n")


def keep_row(name: str, row: Entry, *, key: str = "name") -> None:
    """Add a row to an experiment's file, in the place of the one with the same key; one process at a time."""
    folder = os.open(RESULTS, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    try:
        others = [other for other in rows_of(name) if other[key] != row[key]]
        write_rows(name, sorted([*others, row], key=lambda each: str(each[key])))
    finally:
        os.close(folder)


def known(name: str, *, key: str = "name") -> set[str]:
    """Keys of the rows that an experiment has."""
    return {row[key] for row in rows_of(name)}


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def provenance(entries: Iterable[Entry]) -> str:
    """Commits, days, machines and torch of receipts, which stand in a key of their own or are the file."""
    receipts = [entry.get("receipt", entry) for entry in entries]
    commits = _several(short_commit(receipt["commit"]) for receipt in receipts)
    days = _several(receipt["date"][:10] for receipt in receipts)
    machines = _several(_machine(receipt["hardware"]) for receipt in receipts)
    versions = _several(f"torch {receipt['versions']['torch']}" for receipt in receipts)
    return f"Commit {commits}; {days}; {machines}; {versions}."


def short_commit(commit: str | None) -> str:
    """A commit's first digits, as code."""
    if commit is None:
        return "unknown"
    return f"`{commit[:7]}`" + (" with changes" if commit.endswith("-dirty") else "")


def _machine(hardware: Entry) -> str:
    return hardware["gpu"] or f"{hardware['cpu']}, {hardware['cores']} cores"


def _several(words: Iterable[str]) -> str:
    return ", ".join(sorted(set(words)))


def filled(text: str, blocks: Blocks) -> str:
    """The document with every known block and every number made anew."""

    def block(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- table:{name} -->\n{blocks[name]()}\n<!-- end:{name} -->" if name in blocks else match[0]

    return NUMBER.sub(_number, BLOCK.sub(block, text))


def _number(match: re.Match[str]) -> str:
    file, path, form, _ = match.groups()
    value = read(file)
    for key in path.split("."):
        value = value[int(key) if isinstance(value, list) else key]
    shown = f"{value / 1e9:.2f} GB" if form == "GB" else format(value, form)
    return f"<!-- n: {file}#{path}|{form} -->{shown}<!-- /n -->"


def sourced(body: str, entries: Iterable[Entry], command: str) -> str:
    """A table, and below it the command and the commits, machines and versions it comes from."""
    return f"{body}\n\n`{command}`. {provenance(entries)}"
