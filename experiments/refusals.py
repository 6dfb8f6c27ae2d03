"""What bad input is answered with, and how soon: every line of tests/refusals.py, each as a process of its own.

    python experiments/refusals.py            # runs them: experiments/results/refusals.json and docs/refusals.md

Seconds are of computing (user and system), so that other work on the machine does not count.
"""

import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "src")]
RECEIPT, PAGE = REPOSITORY / "experiments/results/refusals.json", REPOSITORY / "docs/refusals.md"
LIBRARIES = "import torch; from transformers import LlamaForCausalLM"
HEAD = """# What bad input is answered with

Every line was typed as it stands, in a folder with a small model (`model`), a text (`text.txt`) and files that are
wrong in the ways their names say. Each is refused in one line, with code 2, before a weight is read.
`python experiments/refusals.py` types them again and writes this page; tests/test_refusals.py runs them all, and
random combinations of options. Seconds are of computing, on {cpu}; importing torch and a model class of
transformers takes
<!-- n: refusals.json#libraries_seconds|.1f -->{libraries:.1f}<!-- /n --> of them there, for which lines wait that
need a model's shape.
"""


def main() -> None:
    """Type every line, and write what was said."""
    from refusals import REFUSED, prepared
    from trisect.support.receipt import build_receipt, hardware

    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        prepared()
        told = {kind: [told_of(line) for line in lines] for kind, lines in REFUSED.items()}
        libraries = seconds_of([sys.executable, "-c", LIBRARIES])[0]
    os.chdir(REPOSITORY)
    receipt = build_receipt({"refusals": "tests/refusals.py"}, seed=0, token_hash=None, timings={})
    found = {"libraries_seconds": libraries, "refused": told, "receipt": receipt}
    RECEIPT.write_text(json.dumps(found, indent=2) + "\n")
    PAGE.write_text(page(found, str(hardware()["cpu"])))
    slowest = max((entry["seconds"], entry["line"]) for entries in told.values() for entry in entries)
    print(f"{sum(map(len, told.values()))} lines; the slowest took {slowest[0]:.1f} s: {slowest[1]}")


def told_of(line: str) -> dict[str, Any]:
    """What a line is answered with, and the seconds of computing until then."""
    seconds, done = seconds_of([sys.executable, "-m", "trisect", *shlex.split(line)])
    said = done.stderr.strip().replace(f"{Path.cwd()}/", "").replace(str(Path.cwd()), "here")
    if done.returncode != 2 or not said.startswith("error: ") or "\n" in said:
        sys.exit(f"trisect {line}: code {done.returncode}\n{said}")
    return {"line": line, "seconds": round(seconds, 2), "said": said.removeprefix("error: ")}


def seconds_of(command: list[str]) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Run a process; user and system seconds of it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done


def page(found: dict[str, Any], cpu: str) -> str:
    """The document."""
    parts = [HEAD.format(cpu=cpu, libraries=found["libraries_seconds"])]
    for kind, entries in found["refused"].items():
        rows = [f"| `{e['line']}` | {e['seconds']:.1f} | {e['said'].replace('|', chr(92) + '|')} |" for e in entries]
        parts.append("\n".join([f"## {kind.capitalize()}", "", "| typed | s | said |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    main()
