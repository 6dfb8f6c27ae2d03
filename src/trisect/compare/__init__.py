"""Comparisons: models x methods x ratios x data from one recipe, as receipts, one table and figures."""

from trisect.compare.recipe import Recipe, load_recipe
from trisect.compare.results import Folder, write_results
from trisect.compare.runner import RunCounts, run_recipe
