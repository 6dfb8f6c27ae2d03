"""The texts in runs/ that recipes and protocols read.

python experiments/texts.py                # stories-calibration.txt and stories-evaluation.txt: halves of TinyStories
python experiments/texts.py --synthetic    # also own-NAME.jsonl, which the stories models write (trisect sample)
"""

import os
import sys
from pathlib import Path

from trisect.cli import main as trisect

ROOT = Path(__file__).resolve().parents[1]
# Relative to the repository, so that receipts do not name this machine.
ASSETS = Path(os.path.relpath(os.environ.get("TRISECT_ASSETS") or ROOT.parent / "shared", ROOT))
RUNS = Path("runs")
HALVES = (RUNS / "stories-calibration.txt", RUNS / "stories-evaluation.txt")
WRITERS = {"own-stories15m.jsonl": "stories15m", "own-stories-mpt.jsonl": "stories-mpt-20m"}


def split_stories() -> None:
    """Every other story calibrates, the rest evaluate: the halves share no document."""
    text = (ASSETS / "data/tinystories/tinystories.txt").read_text(encoding="utf-8")
    stories = [story.strip() for story in text.split("<|endoftext|>") if story.strip()]
    RUNS.mkdir(exist_ok=True)
    for number, path in enumerate(HALVES):
        path.write_text("\n\n".join(stories[number::2]), encoding="utf-8")


def write_synthetic() -> None:
    """As many windows as the models are shown of real stories."""
    for name, model in WRITERS.items():
        if not (RUNS / name).exists():
            command = ["sample", str(ASSETS / "models" / model), "-o", str(RUNS / name)]
            if code := trisect([*command, "--samples", "256", "--length", "256"]):
                sys.exit(code)


if __name__ == "__main__":
    split_stories()
    if "--synthetic" in sys.argv[1:]:
        write_synthetic()
