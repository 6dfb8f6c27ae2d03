"""`trisect doctor`: whether this installation works, and what to do where it does not."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from trisect.commands import _options as options

if TYPE_CHECKING:
    from trisect.commands._checkup import Finding

PANEL = "Start here"
EXAMPLES = (
    ("Check everything", "trisect doctor"),
    ("Only what needs a hand, and all of it as a file", "trisect doctor --quiet --json doctor.json"),
)
UNFIT = 1
"""The exit code where there is a problem."""


def run(json: options.Json = None, quiet: options.Quiet = False) -> None:
    """Check Python, packages, devices, attention, folders and one tiny run; say what to fix."""
    from trisect.commands._checkup import OK, PROBLEM
    from trisect.commands._screen import keep_measurement, progress, quiet_libraries, say_next, stdout

    with quiet_libraries(), progress(quiet=quiet) as report:
        findings = list(examine(report))
    shown = [finding for finding in findings if not (quiet and finding.state == OK)]
    stdout().print(_table(shown))
    problems = [finding for finding in findings if finding.state == PROBLEM]
    keep_measurement(json, {"problems": len(problems), "findings": [asdict(entry) for entry in findings]})
    if problems:
        stdout().print(f"{len(problems)} to fix: {', '.join(finding.subject for finding in problems)}")
        raise typer.Exit(code=UNFIT)
    stdout().print("No problem was found.")
    say_next("trisect demo", quiet=quiet)


def examine(report: Callable[[str, int, int], None]) -> "Iterator[Finding]":
    """Every finding; what comes later may rely on what came before."""
    from trisect.commands import _checkup as machine
    from trisect.commands import _checkup_files as files

    yield from machine.check_python()
    yield from machine.check_packages()
    devices = machine.devices_here()
    checks = (
        lambda: machine.check_torch(devices),
        lambda: machine.check_attention(devices),
        files.check_cache,
        files.check_assets,
        files.check_demo_model,
        lambda: files.check_run(devices),
    )
    for done, check in enumerate(checks):
        report("checks", done, len(checks))
        yield from check()
    report("checks", len(checks), len(checks))


def _table(findings: "list[Finding]") -> object:
    from rich.table import Table

    from trisect.commands._checkup import NOTE, OK, PROBLEM

    styles = {OK: "green", NOTE: "yellow", PROBLEM: "bold red"}
    table = Table("", "state", "found", "what to do")
    for entry in findings:
        table.add_row(entry.subject, entry.state, entry.says, entry.fix, style=styles[entry.state])
    return table
