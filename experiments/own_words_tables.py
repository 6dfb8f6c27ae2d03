"""Calibrated on what the model writes itself: beside WikiText-2, and alone."""

from a3plus_tables import WIKITEXT, row_name
from tables import Entry, found, read, table

CALIBRATED = {
    "uniform": "WikiText-2",
    "balanced": "WikiText-2",
    "own-words": "half of it, half own words",
    "own-words-alone": "own words alone",
}
"""Section of experiments/a3plus_protocol.py -> what its rows were calibrated on."""
FEATURED = 0.25
"""The ratio that the sentences below the table are about."""


def own_words_rows() -> list[tuple[str, Entry, Entry]]:
    """(calibrated on, row, perplexities of the dense model), by text, method and ratio."""
    rows = []
    for section, text in CALIBRATED.items():
        if found(f"a3plus-{section}.json"):
            file = read(f"a3plus-{section}.json")
            rows += [(text, row, file["dense"]) for row in file["rows"]]
    texts = list(CALIBRATED.values())
    return sorted(rows, key=lambda r: (texts.index(r[0]), row_name(r[1]), r[1]["settings"]["ratio"]))


def rises_of(row: Entry, dense: Entry) -> dict[str, float]:
    """Increase in perplexity by text."""
    return {text: row["perplexity"][text] - value for text, value in dense.items()}


def own_words_table() -> str:
    rows = own_words_rows()
    lines = [
        [calibrated, row_name(row), f"{row['removed']:.1%}"]
        + [f"{rise:+.2f}" for rise in rises_of(row, dense).values()]
        for calibrated, row, dense in rows
    ]
    return table(["calibrated on", "method", "removed", *rows[0][2]], lines)


def featured(name: str) -> dict[str, dict[str, float]]:
    """Of a method and allocation at the featured ratio: calibrated on -> text -> increase in perplexity."""
    return {
        calibrated: rises_of(row, dense)
        for calibrated, row, dense in own_words_rows()
        if row["settings"]["ratio"] == FEATURED and row_name(row) == name
    }


def own_words_short() -> list[str]:
    """What half own words do to a3+, text by text; and where text of one's own was chosen from."""
    lines = []
    for name in ("a3+ uniform", "a3+ balanced"):
        mine = featured(name)
        before, after = mine.get(CALIBRATED["uniform"]), mine.get(CALIBRATED["own-words"])
        if before and after:
            shares = {text: after[text] / before[text] for text in before}
            told = ", ".join(f"{share:.2f} on {text}" for text, share in shares.items() if text != WIKITEXT)
            lines.append(
                f"{name} at {FEATURED:.0%}, half own words: the increase becomes {told} of what WikiText-2 "
                f"alone gives, and {shares[WIKITEXT]:.2f} of it on {WIKITEXT} itself."
            )
    return [
        *lines,
        "That own words help was found on these four texts, with another sample of the model's words and two "
        "shares of them (docs/log.md); one sample, one seed. Balanced plans are from loss curves on "
        "WikiText-2 alone.",
    ]
