"""Tables and figures of what `trisect compare` has measured so far, recipe by recipe."""

import re
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from comparison_claims import shortfalls
from tables import RESULTS, ROOT, Entry, found, provenance

from trisect.compare import Folder, load_recipe
from trisect.compare.figures import draw
from trisect.compare.markdown import page
from trisect.compare.outcomes import ModelOutcome, outcomes_of
from trisect.compare.recipe import Recipe

RECIPES = ROOT / "experiments" / "recipes"
ORDER = ("main-", "why-", "svd-llm-core", "kv-", "ablation-", "diagnostic", "calibration-", "pieces")
"""Names of recipes as the page has them; others follow."""
COMMON = "Perplexity, in brackets"
"""Begins what every page of a recipe says; here it is said once."""
LEGEND = (
    "Perplexity, in brackets its increase over the dense model; *removed* is counted from the modules, as a "
    "share of what the ratio was asked of: the weights of the parts cut, unless it says KV. Tasks: accuracy."
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A recipe, and what has come of it."""

    recipe: Recipe
    source: Path
    models: tuple[ModelOutcome, ...]
    """Rows that were begun, of models that were begun."""
    missing: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def entries(self) -> list[Entry]:
        outcomes = [outcome for model in self.models for outcome in model.outcomes]
        folder = Folder(path=RESULTS / self.name)
        return [entry for outcome in outcomes if (entry := folder.receipt(outcome.cell.key)) is not None]

    @cached_property
    def pictures(self) -> dict[str, bytes]:
        """The recipe's own figures, of models with more than one row."""
        made = draw(self.recipe, [model for model in self.models if len(model.rows) > 1])
        return {f"{self.name}-{name}": svg for name, svg in made.items()}


def recipes() -> list[Path]:
    """Those that can be run without weights that nobody here has."""
    paths = [path for path in sorted(RECIPES.glob("*.yaml")) if not path.stem.startswith("paper-")]
    return sorted(paths, key=lambda path: _place(path.stem))


def _place(name: str) -> int:
    return next((at for at, start in enumerate(ORDER) if name.startswith(start)), len(ORDER))


def measured() -> list[Comparison]:
    """Every recipe with a receipt."""
    begun = [comparison(path) for path in recipes() if found(f"{path.stem}/cells/*.json")]
    return [each for each in begun if each.entries]


@cache
def comparison(path: Path) -> Comparison:
    recipe = load_recipe(path)
    models, missing = [], []
    for model in outcomes_of(recipe, Folder(path=RESULTS / recipe.name)):
        begun = [row for row in model.rows if any(_tried(outcome) for outcome in row.cells.values())]
        name = model.model.name
        if not begun and not _tried(model.dense):
            missing.append(name)
            continue
        missing += [f"{name} {model.label(row)}" for row in model.rows if row not in begun]
        models.append(replace(model, rows=tuple(begun)))
    return Comparison(recipe=recipe, source=path, models=tuple(models), missing=tuple(missing))


def _tried(outcome: object) -> bool:
    return getattr(outcome, "receipt", None) is not None or getattr(outcome, "error", None) is not None


def command(path: Path) -> str:
    """As the recipe's own comment has it."""
    line = re.search(r"^#\s+(trisect compare .*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return line[1] if line else f"trisect compare {path.relative_to(ROOT)}"


def what(path: Path) -> str:
    """The recipe's first comment, up to the command."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#") or "trisect compare" in line:
            break
        lines.append(line.removeprefix("#").strip())
    return " ".join(lines)


def tables_of(entry: Comparison) -> str:
    """The recipe's own page without its title and last line, headings two levels lower."""
    text = page(entry.recipe, [model for model in entry.models if model.rows])
    blocks = [block for block in text.strip().split("\n\n")[1:-1] if not block.startswith(COMMON)]
    return "\n\n".join(f"##{block}" if block.startswith("#") else block for block in blocks)


def section(entry: Comparison, images: str) -> str:
    """One recipe on the page; `images` are links to its figures."""
    pieces = [
        f"### {entry.recipe.title}",
        f"{what(entry.source)} Receipts: `{command(entry.source)}`. {provenance(entry.entries)}",
        tables_of(entry),
        images,
        "\n".join(f"- {line}" for line in shortfalls(entry)),
    ]
    if entry.missing:
        pieces.append(f"Not run yet: {', '.join(entry.missing)}.")
    return "\n\n".join(piece for piece in pieces if piece)
