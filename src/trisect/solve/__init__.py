"""Pure linear algebra: tensors and numbers in, records out. Imports torch and nothing of trisect."""

from trisect.solve.lowrank import SOLVE_DTYPE, factor, low_rank, shared_basis, sum_groups
from trisect.solve.ridge import Regression, held_out_ridge, ridge
from trisect.solve.select import Channels, neuron_scores, pair_scores, split_width, top
