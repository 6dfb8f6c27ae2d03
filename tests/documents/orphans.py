"""Numbers that nobody can trace: not made from a receipt, and not of a kind that needs none."""

import re
from collections.abc import Iterable, Iterator

FIGURE = r"(?<![\w.,/-])[+-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?"
WORD = "(?:two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|fifty|hundred)"
UNIT = r"(?:%|times|seconds?|s|ms|us|minutes?|hours?|[KMGT]i?B|tokens/s|points|-fold|percent)(?!\w)"

KINDS = {
    "a version": r"(?:Python|torch|transformers|lm-eval|olmo-eval) \d+(?:\.\d+)+",
    "a year of a publication": r"ICML 20\d\d",
    "generations of a family": r"llama \(1, 2, 3\.x",
    "bits of a format": r"\b(?:2|3|4|8|16|32)(?: to (?:2|3|4|8))? bits\b",
    "the grid that widths lie on": r"heads to 16, MLP to 128",
    "an item of a list": r"^\d+\. ",
    "how much text was read": r"(?:\d+ )?windows of \d+ tokens|first \d+ questions|first \d+(?= windows)",
    "a ratio that was asked for": r"\bat (?:10|12\.5|20|25|37\.5|40|50)%",
}
"""All kinds of numbers that a page of results may hold without a receipt."""
MEASURED = (
    rf"{FIGURE} ?(?:to \d[\d.,]* ?)?{UNIT}",
    rf"{FIGURE}x(?!\w)",
    r"perplexit(?:y|ies) (?:of |is |was |from |to )*\d[\d.,]*",
    rf"{FIGURE} (?:as )?(?:faster|slower|smaller|larger|less|more|fewer)\b",
    r"(?<![\w.])[+-]\d+\.\d+",
    rf"(?i)\b{WORD}(?:-fold| (?:to \w+ )?(?:times|percent)) (?:faster|slower|smaller|larger|as)",
    r"(?i)\b(?:twice|thrice) as (?:fast|slow|small|large|much|many)",
)
"""What a measured figure looks like in a sentence."""
LIMITS = (
    rf"(?:over|under|below|above|up to|more than|less than|at most|at least|within) {FIGURE} ?{UNIT}",
    r"\d+% (?:removed|cannot be removed)",
    r"\(`config\.json`: 8 MiB\)",
    r"`[^`]*`",
)
"""Bounds that the code keeps, ratios, and code."""

GENERATED = re.compile(
    r"<!-- table:([\w.+-]+) -->\n.*?<!-- end:\1 -->|<!-- n: \S+ -->[^<]*<!-- /n -->", re.DOTALL
)
FENCE = re.compile(r"^```.*?\n(.*?)^```", re.DOTALL | re.MULTILINE)
UNREAD = re.compile(r"<!--.*?-->|(?<=\])\([^)]*\)|https?://\S+", re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")


def blank(pattern: re.Pattern[str], text: str) -> str:
    """The text with matches made into blanks, so that lines and places stay."""
    return pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def orphans(text: str) -> Iterator[str]:
    """Lines with a number that is neither generated nor of an allowed kind; in code, only measured ones."""
    by_hand = blank(UNREAD, blank(GENERATED, text))
    yield from measured("\n".join(FENCE.findall(by_hand)))
    prose = blank(CODE, blank(FENCE, by_hand))
    yield from loose_numbers(prose)
    yield from measured(prose, patterns=MEASURED[-2:])


def loose_numbers(prose: str) -> Iterator[str]:
    """Numbers of no allowed kind."""
    allowed = _spans(KINDS.values(), prose)
    for found in re.finditer(FIGURE, prose):
        if not any(start <= found.start() and found.end() <= end for start, end in allowed):
            yield _told(prose, found)


def measured(text: str, patterns: tuple[str, ...] = MEASURED) -> Iterator[str]:
    """What looks like a figure that somebody measured."""
    text = blank(UNREAD, blank(GENERATED, text))
    bounds = _spans((*LIMITS, *KINDS.values()), text)
    for pattern in patterns:
        for found in re.finditer(pattern, text, flags=re.MULTILINE):
            if not any(start <= found.start() and found.end() <= end for start, end in bounds):
                yield _told(text, found)


def _spans(patterns: Iterable[str], text: str) -> list[tuple[int, int]]:
    return [found.span() for pattern in patterns for found in re.finditer(pattern, text, flags=re.MULTILINE)]


def _told(text: str, found: re.Match[str]) -> str:
    number = text.count("\n", 0, found.start()) + 1
    line = text.splitlines()[number - 1].strip()
    return f"line {number}: {found[0].strip()!r} in {line[:120]!r}"
