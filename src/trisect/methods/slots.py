"""Which slots may stand in for a head's rotation pairs: some of them, or folded ones. [math.md P-1 to P-5]

h = query heads, k = key heads, P = rotation pairs, p = slots
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trisect.errors import TrisectError
from trisect.methods import a3
from trisect.methods.method import Options, need
from trisect.records.parts import QK, Moments, Slots
from trisect.solve.lowrank import shared_basis
from trisect.solve.ridge import Pairs, eliminate_pairs
from trisect.solve.select import split_width, top
from trisect.solve.slots import band_slots, bands, bilinear_energies, complex_moment

PAIR_RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)

HORIZON = 256  # tokens over which attention mostly looks back: rates are near when they part little over so many

SPREAD = {"head": 1.0, "layer": 1.0, "model": 3.0}
"""Radians over the HORIZON within which pairs are folded, by who shares the rates: the more heads must agree
on one set, the more a wide band is worth."""

SILENT = 1e-30  # the least weight of a slot in the mean of rates, in squared scores


@dataclass(frozen=True, kw_only=True)
class SharedRates:
    """One set of slots for many heads."""

    counts: tuple[int, ...]  # slots of each band
    rates: Tensor  # (p,)


def candidates(
    part: QK, dense: Moments, width: int, options: Options, shared: SharedRates | None = None
) -> tuple[Slots, ...]:
    """Sets of slots worth measuring for a layer; none where only pairs themselves can be kept.

    `dense` are moments of the dense model. A norm between projection and rotation lets no mixing through.
    """
    if width == part.width or part.norm_q is not None or "keys" not in dense:
        return ()
    C_k, C_q, rates = _moments(part, dense)
    if options.rope_scope == "head":
        p = num_slots(part, dense, width)
        if "softmax" in options.without:
            kept = top(a3.pair_energy(*a3.qk_moments(part, dense), part.num_pairs), p)[0]
        else:
            kept = choose_pairs(part, dense, p, options).kept  # (k, p)
        chosen = _selected(kept, rates)
        if "fold" in options.without or not _common(rates):
            return (chosen,)
        return chosen, _folded_per_head(C_k, C_q, rates, kept)
    shared = shared or share_rates([(part, dense)], width, options)
    assert shared is not None
    return (_folded(C_k, C_q, rates[0], _spread(rates, options), shared.counts, shared.rates),)


def num_slots(part: QK, dense: Moments, width: int) -> int:
    """Slots for the rotated part of a head of `width`: all of it, unless some channels do not rotate."""
    P = part.num_pairs
    C_q, C_k = a3.qk_moments(part, dense)
    rest = shared_basis(C_k[:, 2 * P :, 2 * P :], C_q[:, 2 * P :, 2 * P :])
    return split_width(a3.pair_energy(C_q, C_k, P), rest.values, width)


def share_rates(layers: Sequence[tuple[QK, Moments]], width: int, options: Options) -> SharedRates | None:
    """One set of p slots for all heads of these layers: most slots where they carry most.  [math.md P-5]"""
    layers = [(part, dense) for part, dense in layers if part.num_pairs]
    if not layers:
        return None
    if any("keys" not in dense or part.norm_q is not None for part, dense in layers):
        raise TrisectError(
            "One set of frequencies for many heads needs a RoPE that is the same for every length and layer, "
            "and no norm between projection and rotation; use --rope-scope head."
        )
    moments = [_moments(part, dense) for part, dense in layers]
    rates = moments[0][2]
    wanted = [num_slots(part, dense, width) for part, dense in layers]
    p = round(sum(wanted) / len(wanted))
    if any(not _common(theirs) or not torch.equal(theirs[0], rates[0]) for _, _, theirs in moments):
        raise TrisectError(
            "The heads of this model already turn at rates of their own, so they cannot share one set; "
            "use --rope-scope head, or start from the original model."
        )
    groups = _spread(rates, options)
    # What each further slot of a band carries, summed over heads; a band's gains fall, so it gives its first ones.
    gains: list[tuple[float, int, int]] = []
    for number, band in enumerate(groups):
        index = torch.tensor(band, device=rates.device)
        blocks = [[C[:, index[:, None], index] for C in (C_k, C_q)] for C_k, C_q, _ in moments]
        found = torch.stack([bilinear_energies(a, b).sum(dim=0) for a, b in blocks]).sum(dim=0)
        gains += [(gain, -n, number) for n, gain in enumerate(found.tolist())]
    largest = [number for _, _, number in sorted(gains, reverse=True)[:p]]
    counts = tuple(map(largest.count, range(len(groups))))
    weighted = total = torch.zeros(p, dtype=torch.float64, device=rates.device)
    for C_k, C_q, theirs in moments:
        slots = _folded(C_k, C_q, theirs[0], groups, counts)
        energy = _slot_energy(slots.k_map, C_k) * _slot_energy(slots.q_map, C_q)
        energy = energy.clamp(min=SILENT)  # what carries no energy still has a rate inside its band
        weighted, total = weighted + (energy * slots.rates).sum(dim=0), total + energy.sum(dim=0)
    return SharedRates(counts=counts, rates=weighted / total)


def choose_pairs(part: QK, moments: Moments, keep: int, options: Options) -> Pairs:
    """Pairs from all sampled queries, with the ridge that did best on the held-out ones.     [math.md E-2]"""
    group = part.group if options.rope_scope == "head" else part.W_q.shape[0]
    # (h, 2P, 2P) -> (k, g, 2P, 2P)
    fit, held = (need(moments, name).unflatten(0, (-1, group)) for name in ("scores", "scores_held"))
    quadrature = part.norm_q is None  # a norm between projection and rotation lets only real factors through
    errors = {
        ridge: eliminate_pairs(fit, keep, ridge=ridge, quadrature=quadrature).error(held).sum().item()
        for ridge in PAIR_RIDGES
    }
    best = min(errors, key=errors.__getitem__)
    share = need(moments, "scores_tokens") / (need(moments, "scores_tokens") + need(moments, "scores_tokens_held"))
    both = share * fit + (1 - share) * held
    pairs = eliminate_pairs(both, keep, ridge=best, quadrature=quadrature)
    pairs = (pairs.untouched() if "compensate" in options.without else pairs).judged(both)
    return pairs if group == part.group else pairs.spread_over(part.W_k.shape[0])


def _selected(kept: Tensor, rates: Tensor) -> Slots:
    """The pairs at `kept` (k, p), as they are."""
    one_hot = torch.nn.functional.one_hot(kept, rates.shape[-1]).mT.to(torch.complex128)  # (k, P, p)
    return Slots(k_map=one_hot, q_map=one_hot, rates=rates.gather(-1, kept))


def _folded_per_head(C_k: Tensor, C_q: Tensor, rates: Tensor, kept: Tensor) -> Slots:
    """As many slots in each band as pairs were kept of it, and the kept pairs themselves outside."""
    groups = bands(rates[0], spread=SPREAD["head"] / HORIZON)
    heads = []
    for head, pairs in enumerate(kept.tolist()):
        counts = [len(set(band) & set(pairs)) for band in groups]
        one = slice(head, head + 1)
        if all(n in (0, len(band)) for band, n in zip(groups, counts, strict=True)):
            heads.append(_selected(kept[one], rates[one]))  # nothing to fold: the same slots, in their order
        else:
            heads.append(_folded(C_k[one], C_q[one], rates[head], groups, counts))
    return Slots(**{name: torch.cat([getattr(slots, name) for slots in heads]) for name in vars(heads[0])})


def _folded(
    C_k: Tensor,
    C_q: Tensor,
    rates: Tensor,
    groups: Sequence[Sequence[int]],
    counts: Sequence[int],
    common: Tensor | None = None,
) -> Slots:
    """`counts` slots for the bands `groups` of rates (P,), at the rates that suit each head, or `common`."""
    k, P = C_k.shape[:2]
    k_map = torch.zeros(k, P, sum(counts), dtype=torch.complex128, device=C_k.device)
    q_map, found = torch.zeros_like(k_map), torch.zeros(k, sum(counts), dtype=torch.float64).to(C_k.device)
    start = 0
    for band, n in zip(groups, counts, strict=True):
        index, slots = torch.tensor(band, device=C_k.device), slice(start, start + n)
        start += n
        if n == len(band):
            ones = torch.eye(n, dtype=k_map.dtype, device=k_map.device)
            k_map[:, index, slots], q_map[:, index, slots], found[:, slots] = ones, ones, rates[index]
        elif n:
            a, b = (C[:, index[:, None], index] for C in (C_k, C_q))
            k_map[:, index, slots], q_map[:, index, slots], found[:, slots] = band_slots(a, b, rates[index], n)
    return Slots(k_map=k_map, q_map=q_map, rates=found if common is None else common.expand(k, -1))


def _moments(part: QK, dense: Moments) -> tuple[Tensor, Tensor, Tensor]:
    """C_k and C_q (k, P, P) as complex moments, and the pairs' rates (k, P)."""
    P = part.num_pairs
    C_q = complex_moment(a3.sum_groups(need(dense, "q"), part.group)[:, : 2 * P, : 2 * P])
    return need(dense, "keys").to(torch.complex128), C_q, need(dense, "rates")


def _spread(rates: Tensor, options: Options) -> list[list[int]]:
    fold = "fold" not in options.without
    return bands(rates[0], spread=SPREAD[options.rope_scope] / HORIZON if fold else 0.0)


def _slot_energy(maps: Tensor, C: Tensor) -> Tensor:
    """Energy (k, p) behind the maps (k, P, p)."""
    return (maps.conj() * (C @ maps)).sum(dim=-2).real


def _common(rates: Tensor) -> bool:
    """Whether all heads turn at the same rates."""
    return bool((rates == rates[:1]).all())
