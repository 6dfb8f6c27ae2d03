"""Where a recipe's files are: assets beside the repository, or elsewhere."""

from dataclasses import replace
from pathlib import Path

from trisect.compare.recipe import Calibration, Evaluation, Recipe
from trisect.compare.texts import DerivedText, located
from trisect.data import Tokens, load_tokens
from trisect.data.hub import DATASETS
from trisect.data.mixture import parse_mixture
from trisect.data.sources import BUILTIN
from trisect.moments import tokens_for


def calibration_tokens(calibration: Calibration, tokenizer: object) -> Tokens:
    """The windows of a recipe's calibration set."""
    config = calibration.config
    return tokens_for(replace(config, source=located(config.source)), tokenizer)


def evaluation_tokens(text: Evaluation, tokenizer: object) -> Tokens:
    """The windows of a recipe's evaluation text."""
    return load_tokens(
        located(text.data),
        tokenizer,
        samples=text.windows,
        length=text.length,
        sampling="first",
        split="evaluation",
    )


def missing_sources(recipe: Recipe) -> list[str]:
    """Files the recipe names that are not here; datasets are looked up when they are needed."""
    made = {text.file for text in recipe.texts}
    names = [text.source for text in recipe.texts if isinstance(text, DerivedText)]
    for model in recipe.models:
        names += [calibration.config.source for calibration in model.calibrations]
        names += [text.data for text in model.evaluations]
    found = [part.source for name in names for part in parse_mixture(located(name))]
    elsewhere = {BUILTIN, *DATASETS, *made}
    return [name for name in dict.fromkeys(found) if name not in elsewhere and not Path(name).is_file()]
