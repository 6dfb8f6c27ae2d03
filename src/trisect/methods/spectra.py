"""Spectra: what a cut is made on, in few enough numbers for a receipt.

Energies, not their roots: what lies behind the cut is then the share of the objective that is lost.
"""

import math

import torch
from torch import Tensor

from trisect.parts import Spectrum, even_ranks

PAIRS, SINGULAR_VALUES, NEURONS = "rotation pairs", "squared singular values", "neuron scores"
POINTS = 64
DIGITS = 4

# k = key or value heads, P = rotation pairs, s = unrotated slots


def head_spectrum(pairs: Tensor, slots: Tensor) -> Spectrum | None:
    """Channels of query/key heads: a pair (k, P) is two of half its energy, an unrotated slot (k, s) one."""
    both = {PAIRS: pairs.repeat_interleave(2, dim=-1) / 2, SINGULAR_VALUES: slots}
    there = [name for name, energies in both.items() if energies.shape[-1]]
    return spectrum(" and ".join(there), torch.cat(list(both.values()), dim=-1))


def spectrum(of: str, energies: Tensor) -> Spectrum | None:
    """Energies (..., n) by rank, heads added up rank by rank; None where all is silent."""
    ranked = energies.sort(dim=-1, descending=True).values.reshape(-1, energies.shape[-1]).sum(dim=0)
    total = ranked.sum().item()
    if not 0 < total < math.inf:
        return None
    length = len(ranked)
    few = torch.tensor(even_ranks(length, min(length, POINTS)), device=ranked.device)
    shares = (ranked[few] / total).tolist()
    return Spectrum(of=of, length=length, values=tuple(float(f"{share:.{DIGITS}g}") for share in shares))
