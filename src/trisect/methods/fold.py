"""Maps folded into weights, neurons that stay, and spectra: what a cut is made on, in few numbers for a receipt."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trisect.records.parts import MLP, OV, QK, Spectrum, even_ranks
from trisect.solve.lowrank import SOLVE_DTYPE, Basis
from trisect.solve.select import Channels, real_map


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


def map_pairs(part: QK, k_pairs: Tensor, q_pairs: Tensor, rest: Basis | Channels, width: int, *, kept: Tensor) -> QK:
    """QK with complex maps of its pairs, (k, P, p) and (h, P, p), and as many of the other channels as have room."""
    k_rest, q_rest = rest.maps(width - 2 * k_pairs.shape[-1])
    q_rest = q_rest.repeat_interleave(part.group, dim=0)
    return map_heads(part, q_map=_beside(q_pairs, q_rest), k_map=_beside(k_pairs, k_rest), kept=kept)


def pair_map(kept: Tensor, num_pairs: int) -> Tensor:
    """The map (k, P, p) that keeps some pairs (k, p) as they are."""
    return torch.eye(num_pairs, dtype=torch.complex128, device=kept.device)[kept].mT


def _beside(pairs: Tensor, rest: Tensor) -> Tensor:
    """The whole head's map (n, d, r) from those of its pairs (n, P, p) and of its unrotated channels."""
    turned = real_map(pairs)
    whole = rest.new_zeros(len(rest), turned.shape[1] + rest.shape[1], turned.shape[2] + rest.shape[2])
    whole[:, : turned.shape[1], : turned.shape[2]], whole[:, turned.shape[1] :, turned.shape[2] :] = turned, rest
    return whole


def map_values(part: OV, v_map: Tensor, W_o: Tensor) -> OV:
    """OV behind the value map v_map (k, d, r), the gate's channels with it, and with new output weights."""
    of_head = v_map.repeat_interleave(part.group, dim=0)
    return replace(
        part,
        W_v=like(part.W_v, part.W_v.to(SOLVE_DTYPE) @ v_map),
        b_v=map_rows(part.b_v, v_map),
        W_o=like(part.W_o, W_o),
        W_g=None if part.W_g is None else like(part.W_g, part.W_g.to(SOLVE_DTYPE) @ of_head),
        b_g=map_rows(part.b_g, of_head),
    )


def map_rows(bias: Tensor | None, maps: Tensor) -> Tensor | None:
    """(heads, d) through (heads, d, r)."""
    if bias is None:
        return None
    return like(bias, (bias.to(SOLVE_DTYPE).unsqueeze(-2) @ maps).squeeze(-2))


def keep_neurons(part: MLP, kept: Tensor) -> MLP:
    """The MLP with only the neurons at `kept`."""
    index = kept.to(part.W_down.device)
    inner: dict[str, Any] = {name: getattr(part, name) for name in ("W_up", "W_gate", "b_up", "b_gate")}
    inner = {name: None if x is None else x[..., index] for name, x in inner.items()}
    return replace(part, W_down=part.W_down[index], **inner)


def like(old: Tensor, new: Tensor) -> Tensor:
    """A new tensor in the dtype and on the device of an old one."""
    return new.to(dtype=old.dtype, device=old.device).contiguous()


# Energies, not their roots: what lies behind the cut is then the share of the objective that is lost.
PAIRS, SINGULAR_VALUES, NEURONS = "rotation pairs", "squared singular values", "neuron scores"
POINTS, DIGITS = 64, 4

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
    few = torch.tensor(even_ranks(len(ranked), min(len(ranked), POINTS)), device=ranked.device)
    shares = (ranked[few] / total).tolist()
    return Spectrum(of=of, length=len(ranked), values=tuple(float(f"{share:.{DIGITS}g}") for share in shares))
