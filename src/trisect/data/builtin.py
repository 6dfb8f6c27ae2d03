"""The source that is always there: the language reference inside Python's own standard library.

`pydoc_data.topics` is about 340 kB of English technical prose. Topics in alphabetical order: every
fourth, from the first, evaluates; the others calibrate. Some topics quote others at length, so
calibration also loses each paragraph that evaluation has: no paragraph is in both.
The text differs a little between Python versions; the token hash in every result says so.
"""

from pydoc_data.topics import topics

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
