"""Pure linear algebra: tensors and numbers in, records out. Imports torch and nothing of trisect."""

from trisect.solve.bands import band_slots, bands, bilinear_energies, complex_moment, real_map
from trisect.solve.basis import Basis, shared_basis
from trisect.solve.compensate import SlotScores, compensate
from trisect.solve.denominator import Denominator, denominator
from trisect.solve.eliminate import Pairs, eliminate_pairs, eliminate_rows
from trisect.solve.lowrank import InputWeight, LowRank, diagonal_weight, gram_weight, low_rank
from trisect.solve.psd import SOLVE_DTYPE, Factor, factor
from trisect.solve.ridge import STRENGTHS, Regression, held_out_ridge, ridge
from trisect.solve.select import neuron_scores, pair_scores, split_width, top
from trisect.solve.values import pooled_basis, stacked, value_bases

__all__ = [
    "SOLVE_DTYPE",
    "STRENGTHS",
    "Basis",
    "Denominator",
    "Factor",
    "InputWeight",
    "LowRank",
    "Pairs",
    "Regression",
    "SlotScores",
    "band_slots",
    "bands",
    "bilinear_energies",
    "compensate",
    "complex_moment",
    "denominator",
    "diagonal_weight",
    "eliminate_pairs",
    "eliminate_rows",
    "factor",
    "gram_weight",
    "held_out_ridge",
    "low_rank",
    "neuron_scores",
    "pair_scores",
    "pooled_basis",
    "real_map",
    "ridge",
    "shared_basis",
    "split_width",
    "stacked",
    "top",
    "value_bases",
]
