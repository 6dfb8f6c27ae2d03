"""Texts that are known by name: datasets of the hub, and one inside Python's own standard library.

`builtin` is `pydoc_data.topics`, about 340 kB of English technical prose. Topics in alphabetical order: every
fourth, from the first, evaluates; the others calibrate. Some topics quote others at length, so calibration
also loses each paragraph that evaluation has: no paragraph is in both. The text differs a little between
Python versions; the token hash in every result says so.
"""

from dataclasses import dataclass
from pydoc_data.topics import topics

POOL_CHARACTERS = 8_000_000
"""How much of a web-sized split is read: about a thousand windows of 2048 tokens to draw from."""
HELD_OUT_DOCUMENTS = 500
"""The first documents of a dataset that has one split only: they evaluate, those behind them calibrate."""


@dataclass(frozen=True, kw_only=True)
class Split:
    """Which part of a dataset to read, and how much of it."""

    name: str
    """The hub's name for it. `datasets` calls every file that is listed by itself `train`."""
    data_files: str | None = None
    skip_documents: int = 0
    max_documents: int | None = None
    max_characters: int | None = None
    """Stop after the document that reaches this many."""


@dataclass(frozen=True, kw_only=True)
class DatasetRecord:
    """Where a dataset is and how its rows become text."""

    description: str
    licence: str
    path: str
    calibration: Split
    evaluation: Split
    config: str | None = None
    revision: str | None = None
    field: str = "text"
    joiner: str = "\n\n"

    @property
    def amount(self) -> str:
        """How much of it is read."""
        most = self.calibration.max_characters
        return "read whole" if most is None else f"{most // 1_000_000} million characters read"


# Datasets with one split.
BEHIND = Split(name="train", skip_documents=HELD_OUT_DOCUMENTS, max_characters=POOL_CHARACTERS)
BEGINNING = Split(name="train", max_documents=HELD_OUT_DOCUMENTS)

DATASETS: dict[str, DatasetRecord] = {
    "c4": DatasetRecord(
        description="C4, web pages in English: calibrate on the first train shard, evaluate on validation",
        licence="ODC-BY 1.0",
        path="allenai/c4",
        calibration=Split(
            name="train", data_files="en/c4-train.00000-of-01024.json.gz", max_characters=POOL_CHARACTERS
        ),
        # 1100 documents joined by a space, as GPTQ, SVD-LLM and their heirs read it; they then stop
        # at 256 windows (--windows 256).
        evaluation=Split(name="train", data_files="en/c4-validation.00000-of-00008.json.gz", max_documents=1100),
        joiner=" ",
    ),
    "fineweb-edu": DatasetRecord(
        description=f"FineWeb-Edu, web pages that teach, 10B-token sample: the first {HELD_OUT_DOCUMENTS} "
        "documents evaluate, those behind them calibrate",
        licence="ODC-BY 1.0",
        path="HuggingFaceFW/fineweb-edu",
        config="sample-10BT",
        calibration=BEHIND,
        evaluation=BEGINNING,
    ),
    "wikipedia": DatasetRecord(
        description=f"Wikipedia in English, November 2023: the first {HELD_OUT_DOCUMENTS} articles evaluate, "
        "those behind them calibrate",
        licence="CC BY-SA 3.0 and GFDL",
        path="wikimedia/wikipedia",
        config="20231101.en",
        calibration=BEHIND,
        evaluation=BEGINNING,
    ),
    "wikitext2": DatasetRecord(
        description="WikiText-2 raw: calibrate on train, evaluate on test",
        licence="CC BY-SA 3.0 and GFDL",
        path="Salesforce/wikitext",
        config="wikitext-2-raw-v1",
        calibration=Split(name="train"),
        evaluation=Split(name="test"),
    ),
    "slimpajama": DatasetRecord(
        description="SlimPajama, 6B-token sample: calibrate on train, evaluate on test",
        licence="those of its seven sources",
        path="DKYoon/SlimPajama-6B",
        calibration=Split(name="train", max_characters=POOL_CHARACTERS),
        evaluation=Split(name="test", max_characters=POOL_CHARACTERS),
    ),
    "ptb": DatasetRecord(
        description="Penn Treebank, plain text: calibrate on train, evaluate on test",
        licence="LDC User Agreement",
        path="ptb-text-only/ptb_text_only",
        # The dataset proper is a loading script, which `datasets` no longer runs.
        revision="refs/convert/parquet",
        calibration=Split(name="train", data_files="penn_treebank/train/0000.parquet"),
        evaluation=Split(name="train", data_files="penn_treebank/test/0000.parquet"),
        field="sentence",
    ),
}

BUILTIN = "builtin"
SYNTHETIC = "synthetic"
ALIASES = {"own-words": SYNTHETIC}
"""Names from before, still understood."""
DEFAULT_MIXTURE = ("c4", "fineweb-edu", "wikipedia")
"""The default calibration text. WikiText-2 is not in it: results are reported on that."""
STOPGAP = SYNTHETIC
"""Where none of those can be read; a mixture such as builtin+synthetic works here too. On anything but
manuals, text that the model writes itself serves better than `builtin` (docs/calibration.md)."""
OTHER_TEXTS = ("wikitext2", BUILTIN)
"""Evaluated on as well: the first of these that took no part in calibration and can be read."""


DESCRIPTION = "Python's language reference (pydoc topics), from the standard library"
LICENCE = "PSF licence"
EVALUATION_EVERY = 4


def builtin_documents(*, split: str) -> list[str]:
    """One document per topic of the `calibration` or the `evaluation` split."""
    names = sorted(topics)
    held_out = names[::EVALUATION_EVERY]
    if split == "evaluation":
        return [topics[name] for name in held_out]
    seen = {key for name in held_out for key in paragraph_keys(topics[name])}
    kept = [_without(topics[name], seen) for name in names if name not in held_out]
    return [text for text in kept if text]


def paragraph_keys(text: str) -> set[str]:
    """The paragraphs of a text with indentation and line breaks evened out, for comparison."""
    return {key for paragraph in text.split("\n\n") if (key := _key(paragraph))}


def _without(text: str, seen: set[str]) -> str:
    return "\n\n".join(p for p in text.split("\n\n") if _key(p) and _key(p) not in seen)


def _key(paragraph: str) -> str:
    return " ".join(paragraph.split())
