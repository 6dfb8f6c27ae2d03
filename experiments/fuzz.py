"""Ten thousand hostile inputs: what became of each kind (docs/security.md).

    python experiments/fuzz.py [--inputs 10000] [--first 0] [--out experiments/results/fuzz.json]

Inputs have numbers, and a number gives the same input everywhere: tests/fuzz runs the first few hundred. They
are tried in a worker process with a limit on time and memory for each; one that hangs or dies is replaced.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
SECONDS = 10
"""Of computing, for one input; a good one of the same size takes a tenth of a second."""
PATIENCE = 9
"""Times as many seconds, and a worker that has not heard its own alarms is ended."""
ADDRESS_SPACE = 3 << 30
"""Bytes beside those of the libraries."""
FINE = ("refused", "accepted")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--out", type=Path, default=REPOSITORY / "experiments/results/fuzz.json")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments.worker, range(arguments.first, arguments.first + arguments.inputs))
        return
    started = time.perf_counter()
    findings = list(supervise(range(arguments.first, arguments.first + arguments.inputs)))
    write(arguments, findings, time.perf_counter() - started)


def supervise(indices: range) -> Iterator[dict[str, Any]]:
    """The finding of every input, in order, whatever becomes of the process that tries it."""
    at = indices.start
    while at < indices.stop:
        with tempfile.TemporaryDirectory() as name:
            for finding in _one_worker(Path(name), range(at, indices.stop)):
                at = finding["index"] + 1
                if finding["outcome"] not in FINE:
                    print(json.dumps(finding, indent=2), flush=True)
                if at % 500 == 0:
                    print(f"{at - indices.start} of {len(indices)}", flush=True)
                yield finding


def _one_worker(home: Path, indices: range) -> Iterator[dict[str, Any]]:
    """Findings until the worker is done, or one that says how it ended."""
    command = [sys.executable, __file__, "--worker", str(home), "--first", str(indices.start)]
    log = (home / "log").open("w")
    worker = subprocess.Popen([*command, "--inputs", str(len(indices))], stdout=log, stderr=log)
    lines, heard, last = home / "findings", time.monotonic(), indices.start - 1
    read = 0
    while True:
        ended = worker.poll() is not None
        text = lines.read_text() if lines.exists() else ""
        for line in text[read:].splitlines(keepends=True):
            if line.endswith("\n"):
                read += len(line)
                finding = json.loads(line)
                heard, last = time.monotonic(), finding["index"]
                yield finding
        if ended:
            break
        # The first line waits for the libraries to be imported, and for the good files to be made.
        if time.monotonic() - heard > PATIENCE * SECONDS + (120 if last < indices.start else 0):
            worker.kill()
            worker.wait()
            yield {"index": last + 1, "kind": "?", "outcome": "hang", "detail": "did not hear its alarm"}
            return
        time.sleep(0.2)
    if last + 1 < indices.stop:
        detail = f"the process ended with {worker.returncode}: {(home / 'log').read_text()[-2000:]}"
        yield {"index": last + 1, "kind": "?", "outcome": "crash", "detail": detail}


def work(home: Path, indices: range) -> None:
    """Try inputs in this process and write what became of each, line by line."""
    sys.path[:0] = [str(REPOSITORY / "tests" / "fuzz"), str(REPOSITORY / "tests")]
    from fuzz_run import enter

    enter(home / "run")
    from fuzz_commands import quiet_libraries
    from fuzz_guard import limit_memory
    from fuzz_run import try_inputs
    from fuzz_seeds import build_seeds

    quiet_libraries()
    (home / "seeds").mkdir()
    seeds = build_seeds(home / "seeds")
    limit_memory(ADDRESS_SPACE)
    with (home / "findings").open("w") as lines:
        for finding in try_inputs(indices, seeds, home / "run", seconds=SECONDS):
            lines.write(json.dumps(finding.to_dict()) + "\n")
            lines.flush()


def write(arguments: argparse.Namespace, findings: list[dict[str, Any]], seconds: float) -> None:
    from trisect.support.files import write_json
    from trisect.support.receipt import build_receipt

    kinds = sorted({finding["kind"] for finding in findings})
    counts = {
        kind: dict(sorted(Counter(f["outcome"] for f in findings if f["kind"] == kind).items())) for kind in kinds
    }
    bad = [finding for finding in findings if finding["outcome"] not in FINE]
    recipe = {
        "inputs": arguments.inputs,
        "first": arguments.first,
        "seconds_per_input": SECONDS,
        "address_space_bytes": ADDRESS_SPACE,
    }
    receipt = build_receipt(recipe, seed=0, token_hash=None, timings={"inputs": seconds})
    totals = dict(sorted(Counter(finding["outcome"] for finding in findings).items()))
    write_json(arguments.out, {**receipt, "outcomes": totals, "kinds": counts, "findings": bad})
    print(f"{len(findings)} inputs in {seconds:.0f} s: {totals}")


if __name__ == "__main__":
    main()
