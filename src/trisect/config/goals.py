"""What a compression is to reach: a share to remove, a size to fit into, or a loss not to exceed."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from trisect.errors import TrisectError, check_names, option_name
from trisect.support.checks import is_number

BUDGETS = ("params", "kv", "flops", "latency")  # what a plan can be counted in
GOALS = ("ratio", "kv_ratio", "target_params", "target_kv_bytes", "max_ppl_increase")
"""The settings that say how far to go: exactly one of them is given."""
CACHED = ("qk", "ov")  # the components that the KV cache holds something of

COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
SIZES: dict[str, tuple[dict[str, int], str, str]] = {
    "target_params": (COUNTS, "parameters", "--target-params 100M (K, M, B or T)"),
    "target_kv_bytes": (BYTES, "bytes", "--target-kv-bytes 20K (thousands) or 20KiB (of 1024)"),
}
NUMBER = re.compile(r"([0-9][0-9_,]*\.?[0-9]*(?:e\+?[0-9]{1,2})?)\s*([a-z]*)")  # a number and its unit, in lower case


@dataclass(frozen=True, kw_only=True)
class Share:
    """Remove this share, and no more, of what the chosen parts of the chosen layers cost now."""

    budget: str
    removed: float

    def keeps(self, total: int) -> int:
        """The least that must be left of `total`; decimal, because 1 - 0.3 is not 0.7 in binary."""
        return math.ceil((1 - Fraction(str(self.removed))) * total)

    def settings(self) -> dict[str, Any]:
        """The goal as it is given."""
        if self.budget == "kv":
            return {"kv_ratio": self.removed, "budget": "params"}
        return {"ratio": self.removed, "budget": self.budget}

    def __str__(self) -> str:
        return f"a ratio of {self.removed:g}" + ("" if self.budget == "params" else f" of {self.budget}")


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The whole model may cost this much, whatever was chosen to be cut: parameters, or bytes per token."""

    budget: str
    most: int

    def settings(self) -> dict[str, Any]:
        name = "target_params" if self.budget == "params" else "target_kv_bytes"
        return {name: self.most, "budget": "params"}

    def __str__(self) -> str:
        return f"{self.most:,} " + ("parameters" if self.budget == "params" else "KV bytes per token")


@dataclass(frozen=True, kw_only=True)
class Increase:
    """The smallest model, by `budget`, whose perplexity rises by no more than this."""

    budget: str
    amount: float
    relative: bool  # whether `amount` is a share of the dense perplexity or perplexity itself
    typed: str = field(default="", compare=False)

    def settings(self) -> dict[str, Any]:
        return {"max_ppl_increase": str(self), "budget": self.budget}

    def __str__(self) -> str:
        return self.typed or (f"{100 * self.amount:g}%" if self.relative else f"{self.amount:g}")

    def nats(self, dense: float) -> float:
        """The same bound as a rise of the mean loss, given the dense model's."""
        if self.relative:
            return math.log1p(self.amount)
        # log((e^dense + amount) / e^dense), for losses whose exponential would not fit a float as well.
        return math.log1p(self.amount * math.exp(-dense))


Goal = Share | Limit | Increase


def goal_of(settings: Mapping[str, Any], *, budget: str, optional: bool = False) -> Goal:
    """The goal among the settings GOALS: exactly one, and no budget that contradicts it.

    Where it is `optional`, because layers are dropped anyway, none is a share of nothing.
    """
    given = [name for name in GOALS if settings[name] is not None]
    if not given and optional:
        given, settings = ["ratio"], {**settings, "ratio": 0.0}
    if not given:
        others = ", ".join(map(option_name, GOALS[1:]))
        raise TrisectError(f"No ratio was given; say how much to remove, --ratio 0.25, or another goal: {others}.")
    if len(given) > 1:
        names = " and ".join(map(option_name, given))
        raise TrisectError(f"{names} were given together; a run has one goal: keep one of them.")
    check_names("budget", [str(budget)], BUDGETS)
    name, value = given[0], settings[given[0]]
    own = {"kv_ratio": "kv", "target_params": "params", "target_kv_bytes": "kv"}.get(name, budget)
    if budget not in ("params", own):
        raise TrisectError(f"{option_name(name)} has its own budget; leave --budget {budget} out, or use --ratio.")
    if name in ("ratio", "kv_ratio"):
        return Share(budget=own, removed=_checked_ratio(value, zero=optional and name == "ratio"))
    if name == "max_ppl_increase":
        return parse_increase(value, budget=own)
    return Limit(budget=own, most=parse_size(name, value))


def cached_parts(parts: tuple[str, ...]) -> tuple[str, ...]:
    """The parts that a KV budget can cut."""
    cached = tuple(part for part in parts if part in CACHED)
    if not cached:
        raise TrisectError(f"Nothing of {','.join(parts)} is in the KV cache; use --parts qk,ov.")
    return cached


def parse_size(name: str, value: Any) -> int:
    """What a whole model may cost: "100M" or "1.2B" parameters, "20K" (20,000) or "20KiB" (20,480) bytes."""
    units, what, example = SIZES[name]
    text = str(value).strip().lower()
    match = NUMBER.fullmatch(text.removesuffix("b") if units is BYTES else text)
    known = isinstance(value, int | float | str) and not isinstance(value, bool)
    number = Fraction(0)
    if known and match is not None and match[2] in units:
        number = Fraction(match[1].replace("_", "").replace(",", "")) * units[match[2]]
    if number < 1:
        raise TrisectError(f"Cannot read {value!r} as a number of {what}; write e.g. {example}.")
    return math.floor(number)


def parse_increase(value: Any, *, budget: str = "params") -> Increase:
    """A bound on the rise of perplexity: "5%" of the dense one, or "1.5" perplexity."""
    text = str(value).strip()
    relative = text.endswith("%")
    try:
        amount = float(text.removesuffix("%")) / (100 if relative else 1)
    except ValueError:
        amount = math.nan
    if isinstance(value, bool) or not 0 < amount < math.inf:
        wrong = f"Perplexity may rise by a share such as 5% or by an amount such as 1.5, not {value!r}"
        raise TrisectError(f"{wrong}; write e.g. --max-ppl-increase 5%.")
    return Increase(budget=budget, amount=amount, relative=relative, typed=text)


def _checked_ratio(value: Any, *, zero: bool) -> float:
    """The ratio of 0.25 or "25%"; 0 is refused unless `zero`."""
    ratio = value
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d*\.?\d+|\d+\.)(e-?\d{1,2})?\s*(%?)\s*", value, re.ASCII)
        number = Fraction(f"{found[1]}{found[2] or ''}") if found else Fraction(-1)
        ratio = float(number / 100 if found and found[3] else number)
    # Written so that NaN is refused as well.
    if not is_number(ratio) or not (0 < ratio < 1 or (zero and ratio == 0)):
        raise TrisectError(f"The ratio is the share to remove, above 0 and below 1, not {value!r}; try 0.25 or 25%.")
    return float(ratio)


_HELP = {
    "ratio": ("Share of the decoder's weights to remove.", "0.25|25%"),
    "kv_ratio": ("Instead: share of the KV cache to remove, from attention alone.", "0.5|50%"),
    "target_params": ("Instead: parameters of the whole model, e.g. 100M or 1.2B.", "N"),
    "target_kv_bytes": ("Instead: KV cache bytes per token, e.g. 20K (20,000) or 20KiB (20,480).", "N"),
    "max_ppl_increase": ("Instead: the smallest model whose held-out perplexity rises by no more.", "5%|1.5"),
    "budget": ("What --ratio is a fraction of. (default: params)", "|".join(BUDGETS)),
}
_COMMON: dict[str, Any] = {"typed": str, "annotation": str, "panel": "Goal"}
GOAL_OPTIONS = {name: {**_COMMON, "help": help, "metavar": metavar} for name, (help, metavar) in _HELP.items()}
"""The goal as the command line takes it: one of five options, and what it counts in."""
