"""Where a recipe's files are: assets beside the repository, or elsewhere."""

from pathlib import Path

from trisect.compare.recipe import Calibration, Evaluation, Recipe
from trisect.compare.texts import DerivedText, located
from trisect.data import Tokens, load_tokens
from trisect.data.catalogue import BUILTIN, DATASETS
from trisect.data.load import parse_mixture


def calibration_tokens(calibration: Calibration, tokenizer: object) -> Tokens:
    """The windows of a recipe's calibration set."""
    config = calibration.config
    assert config.source is not None
    assert config.length is not None
    return load_tokens(
        located(config.source),
        tokenizer,
        samples=config.samples,
        length=config.length,
        sampling=config.sampling,
        seed=config.seed,
        split="calibration",
    )


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
        names += [calibration.config.source or BUILTIN for calibration in model.calibrations]
        names += [text.data for text in model.evaluations]
    found = [part.source for name in names for part in parse_mixture(located(name))]
    elsewhere = {BUILTIN, *DATASETS, *made}
    return [name for name in dict.fromkeys(found) if name not in elsewhere and not Path(name).is_file()]
