"""Comparisons: models x methods x ratios x data from one recipe, as receipts, one table and figures."""

from trisect.compare.folder import Folder
from trisect.compare.read import load_recipe
from trisect.compare.recipe import Recipe
from trisect.compare.results import write_results
from trisect.compare.run import Tally, run_recipe

__all__ = ["Folder", "Recipe", "Tally", "load_recipe", "run_recipe", "write_results"]
