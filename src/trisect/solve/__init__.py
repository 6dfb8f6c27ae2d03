"""Pure linear algebra: tensors and numbers in, records out. Imports torch and nothing of trisect."""

from trisect.solve.basis import Basis, shared_basis
from trisect.solve.denominator import Denominator, denominator
from trisect.solve.psd import SOLVE_DTYPE, Factor, factor
from trisect.solve.select import neuron_scores, pair_scores, split_width, top

__all__ = [
    "SOLVE_DTYPE",
    "Basis",
    "Denominator",
    "Factor",
    "denominator",
    "factor",
    "neuron_scores",
    "pair_scores",
    "shared_basis",
    "split_width",
    "top",
]
