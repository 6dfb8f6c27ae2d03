"""Spectra: what a cut is made on, in few enough numbers for a receipt.

Energies, not their roots: what lies behind the cut is then the share of the objective that is lost.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from trisect.records.parts import MLP, QK, Spectrum, even_ranks
from trisect.solve import SOLVE_DTYPE


def map_heads(part: QK, *, q_map: Tensor, k_map: Tensor, kept: Tensor) -> QK:
    """QK behind the maps q_map (h, d, r) and k_map (k, d, r), in weights, biases, norms and frequencies."""
    return QK(
        W_q=like(part.W_q, part.W_q.to(SOLVE_DTYPE) @ q_map),
        W_k=like(part.W_k, part.W_k.to(SOLVE_DTYPE) @ k_map),
        b_q=map_rows(part.b_q, q_map),
        b_k=map_rows(part.b_k, k_map),
        norm_q=map_rows(part.norm_q, q_map),
        norm_k=map_rows(part.norm_k, k_map),
        frequencies=part.frequencies.gather(-1, kept.to(part.frequencies.device)),
        rates=None if part.rates is None else part.rates.gather(-1, kept.to(part.rates.device)),
    )


def head_maps(kept: Tensor, num_pairs: int, rest: Tensor) -> Tensor:
    """The whole head's map (k, d, r): ones for the kept pairs' channels, `rest` for the unrotated ones."""
    k, p = kept.shape
    s, r = rest.shape[-2:]
    whole = rest.new_zeros(k, 2 * num_pairs + s, 2 * p + r)
    heads, slots = (torch.arange(k, device=kept.device).unsqueeze(-1), torch.arange(p, device=kept.device))
    whole[heads, kept, slots] = 1.0
    whole[heads, kept + num_pairs, slots + p] = 1.0
    whole[:, 2 * num_pairs :, 2 * p :] = rest
    return whole


def map_rows(bias: Tensor | None, maps: Tensor) -> Tensor | None:
    """(heads, d) through (heads, d, r)."""
    if bias is None:
        return None
    return like(bias, (bias.to(SOLVE_DTYPE).unsqueeze(-2) @ maps).squeeze(-2))


def keep_neurons(part: MLP, kept: Tensor) -> MLP:
    """The MLP with only the neurons at `kept`."""
    index = kept.to(part.W_down.device)
    return replace(
        part,
        W_up=part.W_up[:, index],
        W_gate=None if part.W_gate is None else part.W_gate[:, index],
        W_down=part.W_down[index],
        b_up=None if part.b_up is None else part.b_up[index],
        b_gate=None if part.b_gate is None else part.b_gate[index],
    )


def like(old: Tensor, new: Tensor) -> Tensor:
    """A new tensor in the dtype and on the device of an old one."""
    return new.to(dtype=old.dtype, device=old.device).contiguous()


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
