"""Where a recipe's files are: assets beside the repository or elsewhere, and texts made from others."""

import os
from dataclasses import replace
from pathlib import Path

from trisect.compare.recipe import Calibration, DerivedText, Evaluation, Recipe
from trisect.data import Tokens, load_tokens
from trisect.data.hub import DATASETS
from trisect.data.mixture import parse_mixture
from trisect.data.sources import BUILTIN
from trisect.errors import TrisectError
from trisect.files import atomic_write_text
from trisect.moments import tokens_for

ASSETS = "../shared/"
"""How recipes name the assets, so that receipts say the same on every machine."""


def located(name: str) -> str:
    """The same source where TRISECT_ASSETS says the assets are."""
    elsewhere = os.environ.get("TRISECT_ASSETS")
    return name.replace(ASSETS, f"{elsewhere.rstrip('/')}/") if elsewhere else name


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


def make_texts(recipe: Recipe) -> None:
    """Write the files that the recipe makes from others, unless they already say the same."""
    for text in recipe.texts:
        content, path = _derived(text), Path(text.file)
        if not path.is_file() or path.read_text(encoding="utf-8") != content:
            atomic_write_text(path, content)


def missing_sources(recipe: Recipe) -> list[str]:
    """Files the recipe names that are not here; datasets are looked up when they are needed."""
    made = {text.file for text in recipe.texts}
    names = [text.source for text in recipe.texts]
    for model in recipe.models:
        names += [calibration.config.source for calibration in model.calibrations]
        names += [text.data for text in model.evaluations]
    found = [part.source for name in names for part in parse_mixture(located(name))]
    elsewhere = {BUILTIN, *DATASETS, *made}
    return [name for name in dict.fromkeys(found) if name not in elsewhere and not Path(name).is_file()]


def _derived(text: DerivedText) -> str:
    path = Path(located(text.source))
    try:
        whole = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TrisectError(
            f"{text.file} is made from {text.source}, which cannot be read: {error}."
        ) from error
    documents = [document.strip() for document in whole.split(text.split) if document.strip()]
    return "\n\n".join(documents[text.start :: text.every])
