"""What every generated part of the documents shares: receipts are read here, and markers are filled here.

A block stands between `<!-- table:NAME -->` and `<!-- end:NAME -->`. A single number in a sentence stands
between `<!-- n: FILE#KEY.KEY|FORMAT -->` and `<!-- /n -->`: where it is in a receipt, and how it is written
(`GB` in units of a billion bytes, else a format specification). `make results` writes all of them.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"
BLOCK = re.compile(r"<!-- table:([\w.+-]+) -->\n(.*?)<!-- end:\1 -->", re.DOTALL)
NUMBER = re.compile(r"<!-- n: (\S+?)#(\S+?)\|(\S+) -->([^<]*)<!-- /n -->")

Entry = dict[str, Any]
Blocks = Mapping[str, Callable[[], str]]


def read(name: str) -> Any:
    """A file of results by its name below experiments/results."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def read_all(pattern: str) -> dict[str, Any]:
    """Name -> content of every file of results that fits the pattern; empty where nothing was measured."""
    return {str(path.relative_to(RESULTS)): read(str(path.relative_to(RESULTS))) for path in found(pattern)}


def found(pattern: str) -> list[Path]:
    return sorted(RESULTS.glob(pattern))


@cache
def targets() -> Entry:
    """What was asked for; experiments/targets.json says where that comes from."""
    told: Entry = json.loads((ROOT / "experiments" / "targets.json").read_text(encoding="utf-8"))
    return told


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
    if commit is None:
        return "unknown"
    return f"`{commit[:12]}`" + (" with changes" if commit.endswith("-dirty") else "")


def _machine(hardware: Entry) -> str:
    return hardware["gpu"] or f"{hardware['cpu']}, {hardware['cores']} cores"


def _several(words: Iterable[str]) -> str:
    return ", ".join(sorted(set(words)))


def verdict(value: float, limit: float, *, shown: str, asked: str) -> str:
    """A measured figure beside the most it was to be."""
    return f"{shown} (asked: at most {asked}, {'met' if value <= limit else '**missed**'})"


def filled(text: str, blocks: Blocks) -> str:
    """The document with every known block and every number made anew."""

    def block(match: re.Match[str]) -> str:
        name = match[1]
        if name not in blocks:
            return match[0]
        made = blocks[name]()
        return f"<!-- table:{name} -->\n" + (f"{made}\n" if made else "") + f"<!-- end:{name} -->"

    return NUMBER.sub(_number, BLOCK.sub(block, text))


def _number(match: re.Match[str]) -> str:
    file, path, form, _ = match.groups()
    value = read(file)
    for key in path.split("."):
        value = value[int(key) if isinstance(value, list) else key]
    shown = f"{value / 1e9:.2f} GB" if form == "GB" else format(value, form)
    return f"<!-- n: {file}#{path}|{form} -->{shown}<!-- /n -->"


if __name__ == "__main__":
    from results_page import main

    main()
