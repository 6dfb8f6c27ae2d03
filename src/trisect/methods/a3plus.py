"""a3+: the same three components, refitted, compensated and repaired, still in closed form.   docs/math.md, 9

Every solver works on the narrow stream (what the narrow model really feeds the layer) and aims at the dense
one: the output projections are fitted to the dense output plus whatever earlier layers have left undone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trisect.errors import TrisectError
from trisect.methods import a3, fold
from trisect.methods.method import ComponentMethod, Options, need, reads
from trisect.records.parts import INNER, METRIC, MLP, OV, QK, REGRESSED, Moments, Shrunk, Slots, Spectrum
from trisect.solve import select
from trisect.solve.lowrank import SOLVE_DTYPE, Basis, pooled_basis, shared_basis, stacked, sum_groups, value_bases
from trisect.solve.ridge import STRENGTHS, Pairs, Regression, eliminate_pairs, eliminate_rows, held_out_ridge, ridge


def regressions(moments: Moments, name: str) -> tuple[Regression, Regression]:
    """The fitting problem and its held-out twin."""
    found = []
    for suffix in ("", "_held"):
        gram, cross, energy, tokens = (need(moments, f"{name}_{what}{suffix}") for what in REGRESSED)
        found.append(Regression(gram=gram, cross=cross, energy=energy, tokens=tokens.item()))
    return found[0], found[1]


def output_regressions(part: OV, moments: Moments) -> tuple[Regression, Regression, Regression]:
    """Fitting, held-out and joined problem of W_o, with what heads could put out as the penalty.   [F-6]

    A head that rests on the first token puts out next to nothing in most directions, on calibration text.
    What it would put out if it attended elsewhere is the second moment of its values; weights are held to
    the prior in that unit, or they would grow until they make sense of the nothing.
    """
    fit, held = regressions(moments, "a")
    both = fit.joined(held)
    h = part.heads
    own = both.gram.unflatten(0, (h, -1)).unflatten(-1, (h, -1)).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    values = need(moments, "a_values").to(own)  # (k, d, d)
    penalty = torch.block_diag(*(own + values.repeat_interleave(h // len(values), dim=0)))
    return replace(fit, penalty=penalty), replace(held, penalty=penalty), replace(both, penalty=penalty)


def projected(penalty: Tensor, features: Tensor, W: Tensor) -> Tensor:
    """The weights in the narrow features that come closest to W, every head by itself."""
    weighted = penalty @ features  # (h d, h r)
    system = features.mT @ weighted
    system.diagonal().add_(1e-9 * system.diagonal().mean())
    return torch.linalg.solve(system, weighted.mT @ W)


# h = query heads, k = key/value heads, g = h / k, D = d_model, d = head width, r = new width, P = pairs, p = slots

PAIR_RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
SLOT_RIDGES = (*PAIR_RIDGES, 1e2)
ROW_RIDGE = 0.1
VALUE_ROUNDS = 4
AWAKE = 0.01  # share of tokens at which a head is taken to attend to any one token, when value bases are chosen
CHOICE_STRENGTH = 0.3
"""Ridge of the full-width weights that a choice is made against; what stays is fitted again afterwards."""

PIECES = {
    "fisher": "weigh output channels by gradients of the model's own answers",
    "streams": "solve on what the narrow model feeds a layer, and repair what earlier layers left undone",
    "softmax": "choose rotation pairs by what softmax sees of them",
    "fold": "fold pairs of nearly equal frequency into fewer slots",
    "compensate": "multiply each kept pair or slot with a complex number per query head",
    "values": "alternate between value bases and output weights",
    "refit-o": "refit W_o over all heads",
    "eliminate": "choose neurons by optimal-brain-surgeon elimination",
    "refit-up": "refit W_up and W_gate to first order",
    "refit-down": "refit W_down",
    "ridge": "choose ridge strengths on held-out tokens",
    "tail": "scale the norm in front of the head to the dense model's",
}
"""What a3+ adds to a3, by the names `without` takes."""


def solve_qk(part: QK, moments: Moments, width: int, options: Options) -> Shrunk:
    """Pairs or slots by what softmax sees, compensated; unrotated channels by SVD.     [math.md E-2, QK-1]"""
    P = part.num_pairs
    if width == part.width:
        return Shrunk(part=part, loss=0.0, total=0.0, note="full width")
    paper = {"softmax", "fold", "compensate"} <= set(options.without) and options.rope_scope == "head"
    if P == 0 or paper:
        return a3.solve_qk(part, moments, width, options)
    C_q, C_k = a3.qk_moments(part, moments)
    rest = a3.unrotated(part, C_q, C_k)
    energy = a3.pair_energy(C_q, C_k, P)
    carried = fold.head_spectrum(energy, rest.values)
    if "slots0_gram" in moments:
        assert isinstance(rest, Basis)
        return replace(from_slots(part, moments, width, options, rest), spectrum=carried)
    p = select.split_width(energy, rest.values, width)
    pairs = choose_pairs(part, moments, p, options)
    # Keys stay as they are; the complex number a + ib turns a query so that the pair's score s becomes a s + b t.
    k_map = fold.pair_map(pairs.kept, P)
    number = torch.complex(pairs.real, pairs.quadrature).flatten(0, 1).unsqueeze(-2)  # (h, 1, p)
    q_map = k_map.repeat_interleave(part.group, dim=0) * number
    solution = Shrunk(
        part=fold.map_pairs(part, k_map, q_map, rest, width, kept=pairs.kept),
        loss=pairs.loss.sum().item() + rest.loss(width - 2 * p).sum().item(),
        total=pairs.total.sum().item() + rest.total.sum().item(),
        clipped=rest.clipped,
        spectrum=carried,
    )
    return a3.renormalise(part, solution, pairs.kept, rest, moments, options)


def from_slots(part: QK, moments: Moments, width: int, options: Options, rest: Basis) -> Shrunk:
    """For every key head the set of slots that erred least on held-out queries.            [math.md E-3]"""
    queries, held_queries = need(moments, "scores_tokens"), need(moments, "scores_tokens_held")
    share = (queries / (queries + held_queries)).item()
    ridges = () if "compensate" in options.without else SLOT_RIDGES
    tried = []
    for number in range(sum(name.startswith("slots") and name.endswith("k_map") for name in moments)):
        fit, held = (_slot_scores(moments, number, suffix) for suffix in ("", "_held"))
        tried.append((select.compensate(fit, held, share=share, ridges=ridges), fit.joined(held, share)))
    best = torch.stack([sum_groups(e, part.group) for (_, e), _ in tried]).argmin(dim=0)  # (n, k) -> (k,)
    best_h = best.repeat_interleave(part.group)
    c = _pick([c for (c, _), _ in tried], best_h)  # (h, 2p)
    loss = _pick([scores.error(c) for (c, _), scores in tried], best_h)
    k_map, q_map, rates = (
        _pick([need(moments, f"slots{n}_{name}") for n in range(len(tried))], best)
        for name in ("k_map", "q_map", "rates")
    )
    slots = Slots(k_map=k_map, q_map=q_map, rates=rates)
    mixed = ((k_map != 0).sum(dim=-2) > 1).any(dim=-1)  # (k,): a fold may also come to whole pairs
    folded = bool(mixed.any()) or options.rope_scope != "head"
    return Shrunk(
        part=_through_slots(part, moments, slots, c, rest, width, folded=folded),
        loss=loss.sum().item() + rest.loss(width - 2 * rates.shape[-1]).sum().item(),
        total=tried[0][1].energy.sum().item() + rest.total.sum().item(),
        clipped=rest.clipped,
        note=f"folded {int(mixed.sum())} of {len(mixed)} key heads" if len(tried) > 1 else "",
    )


def _through_slots(part: QK, moments: Moments, slots: Slots, c: Tensor, rest: Basis, width: int, *, folded: bool) -> QK:
    """Fold the slots' maps and the coefficients c (h, 2p) into the weights."""
    p = slots.rates.shape[-1]
    # Slots turn without the scaling that some tables carry, so it goes into the weights.
    scaling = need(moments, "rotary_scaling").item() if folded else 1.0
    number = torch.complex(c[:, :p], c[:, p:]).unsqueeze(-2)  # (h, 1, p)
    q_slots = slots.q_map.repeat_interleave(part.group, dim=0) * number * scaling
    nearest = (need(moments, "rates").unsqueeze(-1) - slots.rates.unsqueeze(-2)).abs().argmin(dim=-2)  # (k, p)
    narrow = fold.map_pairs(part, slots.k_map * scaling, q_slots, rest, width, kept=nearest)
    return replace(narrow, rates=slots.rates) if folded else narrow


def _slot_scores(moments: Moments, number: int, suffix: str) -> select.SlotScores:
    gram, cross, energy = (need(moments, f"slots{number}_{name}{suffix}") for name in ("gram", "cross", "energy"))
    return select.SlotScores(gram=gram, cross=cross, energy=energy)


def _pick(options: list[Tensor], best: Tensor) -> Tensor:
    """Row i of the option that `best` (n,) names for it."""
    return torch.stack(options)[best, torch.arange(len(best), device=best.device)]


def solve_ov(part: OV, moments: Moments, width: int, options: Options) -> Shrunk:
    """Bases for all value heads together, then one refit of W_o over all heads.    [math.md V-1, F-1, F-2]"""
    a3.refuse_shared_output(part)
    fit, held, both = output_regressions(part, moments)
    prior = part.W_o.to(SOLVE_DTYPE).flatten(0, 1)  # (h d, D)
    narrow, carried = part, None
    if width != part.width:
        assert both.penalty is not None
        heads = felt(ridge(both, prior, CHOICE_STRENGTH), moments).unflatten(0, (part.heads, -1))
        kv_heads = part.W_v.shape[0]
        rounds = 0 if "values" in options.without else VALUE_ROUNDS
        awake = both.gram + AWAKE * both.penalty
        if part.W_g is None:
            T = value_bases(awake, heads, kv_heads=kv_heads, rank=width, rounds=rounds)
        else:
            energies = awake.diagonal().unflatten(0, (part.heads, -1))
            T = a3.gated_channels(replace(part, W_o=heads), energies, energies).maps(width)[0]
        carried = fold.spectrum(fold.SINGULAR_VALUES, pooled_basis(both.gram, heads, kv_heads=kv_heads).values)
        narrow, features = fold.map_values(part, T, part.W_o), stacked(T, part.heads)
        prior = projected(both.penalty, features, prior)
        fit, held, both = (problem.mapped(features) for problem in (fit, held, both))
    else:
        fit, held = fit.whole(), held.whole()
    # Where the maps in front of the heads are refitted behind it, held-out tokens take no part: they judge that, too.
    last = not options.refine
    wanted = prior if "refit-o" in options.without else _refit(fit, held, prior, options, all_tokens=last)
    W_o = fold.like(part.W_o, wanted.unflatten(0, (part.heads, -1)))
    return _fitted(replace(narrow, W_o=W_o), both, wanted, carried)


def refit_qk(part: QK, moments: Moments, width: int, options: Options) -> Shrunk:
    """W_q and W_k along directions that were found for them and W_v together.              [F-11, F-1, F-2]"""
    change, both, steps = inner_change(moments, options)
    queries, keys = (W.shape[0] * W.shape[-1] for W in (part.W_q, part.W_k))
    narrow = replace(part, W_q=_moved(part.W_q, change[:, :queries]))
    return _fitted(replace(narrow, W_k=_moved(part.W_k, change[:, queries : queries + keys])), both, steps)


def refit_v(part: OV, moments: Moments, width: int, options: Options) -> Shrunk:
    """W_v along the same."""
    change, both, steps = inner_change(moments, options)
    values = part.W_v.shape[0] * part.W_v.shape[-1]
    return _fitted(replace(part, W_v=_moved(part.W_v, change[:, -values:])), both, steps)


def _moved(W: Tensor, change: Tensor) -> Tensor:
    """Weights (heads, D, d) with a change (D, heads d)."""
    return fold.like(W, W.to(change) + change.unflatten(-1, (len(W), -1)).transpose(0, 1))


def refit_o(part: OV, moments: Moments, width: int, options: Options) -> Shrunk:
    """W_o behind refitted maps, from all tokens."""
    return solve_ov(part, moments, part.width, replace(options, refine=False))


def inner_change(moments: Moments, options: Options) -> tuple[Tensor, Regression, Tensor]:
    """What input maps (D, N) gain, each direction one feature of a regression; with that and its answer (K, 1)."""
    fit, held = (replace(problem, penalty=need(moments, f"{INNER}_penalty")) for problem in regressions(moments, INNER))
    vectors = need(moments, f"{INNER}_vectors")  # (K, D, N)
    steps = _refit(fit, held, torch.zeros_like(fit.cross), options)  # (K, 1)
    return torch.tensordot(steps.squeeze(-1).to(vectors), vectors, dims=1), fit.joined(held), steps


def solve_mlp(part: MLP, moments: Moments, width: int, options: Options) -> Shrunk:
    """Neurons by elimination, then one refit of W_down.                          [math.md E-1, F-1, F-2]"""
    # Where W_up and W_gate are refitted behind it, held-out tokens take no part: they judge that refit as well.
    fit, held = regressions(moments, "mlp")
    prior = part.W_down.to(SOLVE_DTYPE)
    narrow, carried = part, None
    if width != part.width:
        carried = fold.spectrum(fold.NEURONS, select.neuron_scores(fit.energies(held), prior))
        kept = choose_neurons(fit, held, prior, width, options, moments)
        narrow, prior = fold.keep_neurons(part, kept), prior[kept]
        fit, held = fit.chosen(kept), held.chosen(kept)
    else:
        fit, held = fit.whole(), held.whole()
    last = "refit-up" in options.without
    wanted = prior if "refit-down" in options.without else _refit(fit, held, prior, options, all_tokens=last)
    return _fitted(replace(narrow, W_down=fold.like(part.W_down, wanted)), fit.joined(held), wanted, carried)


def felt(W: Tensor, moments: Moments) -> Tensor:
    """Weights (n, D) whose sizes are what the model's answers feel of them.                          [F-9]"""
    return W @ moments[METRIC].to(W) if METRIC in moments else W


def choose_neurons(
    fit: Regression, held: Regression, W: Tensor, width: int, options: Options, moments: Moments
) -> Tensor:
    """Neurons (width,) by elimination against refitted weights; without it, by a3's scores.   [E-1, M-1]"""
    if "eliminate" in options.without:
        return select.top(select.neuron_scores(fit.energies(held), W), width)[0]
    # Each step makes its own Gram of all tokens and overwrites it: a third would not fit for wide MLPs.
    wanted = ridge(fit.joined(held), W, CHOICE_STRENGTH, overwrite=True)
    return eliminate_rows(fit.joined(held).gram, felt(wanted, moments), width, ridge=ROW_RIDGE, overwrite=True)


def refit_up(part: MLP, moments: Moments, width: int, options: Options) -> Shrunk:
    """W_up and W_gate along a few directions, each of them one feature of a regression.       [F-8, F-1, F-2]"""
    change, both, steps = inner_change(moments, options)
    maps = {name: getattr(part, name) for name in ("W_up", "W_gate") if getattr(part, name) is not None}
    sides = zip(maps.items(), change.split(part.width, dim=-1), strict=True)
    changed = {name: fold.like(W, W.to(delta) + delta) for (name, W), delta in sides}
    return _fitted(replace(part, **changed), both, steps)


def refit_down(part: MLP, moments: Moments, width: int, options: Options) -> Shrunk:
    """W_down behind refitted neurons, from all tokens."""
    return solve_mlp(part, moments, part.width, replace(options, without=(*options.without, "refit-up")))


def _fitted(part: QK | OV | MLP, both: Regression, W: Tensor, spectrum: Spectrum | None = None) -> Shrunk:
    """A part with fitted weights, and what they miss over all tokens."""
    loss = max(0.0, both.error(W).item())
    return Shrunk(part=part, loss=loss, total=both.energy.item(), spectrum=spectrum)


def _refit(fit: Regression, held: Regression, prior: Tensor, options: Options, *, all_tokens: bool = True) -> Tensor:
    """Weights from all tokens; the ridge chosen on held-out ones, or next to none.              [F-1, F-2]"""
    if "ridge" in options.without:
        return ridge(fit.joined(held) if all_tokens else fit, prior, STRENGTHS[0])
    return held_out_ridge(fit, held, prior, all_tokens=all_tokens)[0]


# Which slots may stand in for a head's rotation pairs: some of them, or folded ones.              [math.md P-1 to P-5]

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
            kept = select.top(a3.pair_energy(*a3.qk_moments(part, dense), part.num_pairs), p)[0]
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
    return select.split_width(a3.pair_energy(C_q, C_k, P), rest.values, width)


def share_rates(layers: Sequence[tuple[QK, Moments]], width: int, options: Options) -> SharedRates | None:
    """One set of p slots for all heads of these layers: most slots where they carry most.  [math.md P-5]"""
    layers = [(part, dense) for part, dense in layers if part.num_pairs]
    if not layers:
        return None
    if any("keys" not in dense or part.norm_q is not None for part, dense in layers):
        needed = "a RoPE that is the same for every length and layer, and no norm between projection and rotation"
        raise TrisectError(f"One set of frequencies for many heads needs {needed}; use --rope-scope head.")
    moments = [_moments(part, dense) for part, dense in layers]
    rates = moments[0][2]
    wanted = [num_slots(part, dense, width) for part, dense in layers]
    p = round(sum(wanted) / len(wanted))
    if any(not _common(theirs) or not torch.equal(theirs[0], rates[0]) for _, _, theirs in moments):
        why = "The heads of this model already turn at rates of their own, so they cannot share one set"
        raise TrisectError(f"{why}; use --rope-scope head, or start from the original model.")
    groups = _spread(rates, options)
    # What each further slot of a band carries, summed over heads; a band's gains fall, so it gives its first ones.
    gains: list[tuple[float, int, int]] = []
    for number, band in enumerate(groups):
        index = torch.tensor(band, device=rates.device)
        blocks = [[C[:, index[:, None], index] for C in (C_k, C_q)] for C_k, C_q, _ in moments]
        found = torch.stack([select.bilinear_energies(a, b).sum(dim=0) for a, b in blocks]).sum(dim=0)
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
    chosen = fold.pair_map(kept, rates.shape[-1])
    return Slots(k_map=chosen, q_map=chosen, rates=rates.gather(-1, kept))


def _folded_per_head(C_k: Tensor, C_q: Tensor, rates: Tensor, kept: Tensor) -> Slots:
    """As many slots in each band as pairs were kept of it, and the kept pairs themselves outside."""
    groups = select.bands(rates[0], spread=SPREAD["head"] / HORIZON)
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
            k_map[:, index, slots], q_map[:, index, slots], found[:, slots] = select.band_slots(a, b, rates[index], n)
    return Slots(k_map=k_map, q_map=q_map, rates=found if common is None else common.expand(k, -1))


def _moments(part: QK, dense: Moments) -> tuple[Tensor, Tensor, Tensor]:
    """C_k and C_q (k, P, P) as complex moments, and the pairs' rates (k, P)."""
    P = part.num_pairs
    C_q = select.complex_moment(sum_groups(need(dense, "q"), part.group)[:, : 2 * P, : 2 * P])
    return need(dense, "keys").to(torch.complex128), C_q, need(dense, "rates")


def _spread(rates: Tensor, options: Options) -> list[list[int]]:
    return select.bands(rates[0], spread=0.0 if "fold" in options.without else SPREAD[options.rope_scope] / HORIZON)


def _slot_energy(maps: Tensor, C: Tensor) -> Tensor:
    """Energy (k, p) behind the maps (k, P, p)."""
    return (maps.conj() * (C @ maps)).sum(dim=-2).real


def _common(rates: Tensor) -> bool:
    """Whether all heads turn at the same rates."""
    return bool((rates == rates[:1]).all())


OV_READS = "a_gram a_target a_energy a_tokens a_values"
MLP_READS = "mlp_gram mlp_target mlp_energy mlp_tokens"
A3_PLUS = ComponentMethod(
    name="a3+",
    summary="Refitted, compensated, repaired: the paper's components on two streams.",
    solvers={
        **{"qk": solve_qk, "ov": solve_ov, "refit-qk": refit_qk, "refit-v": refit_v, "refit-o": refit_o},
        **{"mlp": solve_mlp, "refit-up": refit_up, "refit-down": refit_down},
    },
    reads={
        **reads(qk="q k scores q_squares k_squares", ov=OV_READS, mlp=MLP_READS),
        **reads(**{"refit-qk": INNER, "refit-v": INNER, "refit-o": OV_READS}),
        **reads(**{"refit-up": INNER, "refit-down": MLP_READS}),
    },
    streams="narrow",
    slot_reads=frozenset({"q", "k", "scores", "keys"}),
    slots=candidates,
    share=share_rates,
)
