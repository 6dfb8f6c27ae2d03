"""a3+: the same three components, refitted, compensated and repaired, still in closed form.   docs/math.md, 9

Every solver works on the narrow stream (what the narrow model really feeds the layer) and aims at the dense
one: the output projections are fitted to the dense output plus whatever earlier layers have left undone.
"""

from dataclasses import replace

import torch
from torch import Tensor

from trisect.methods import a3, fold
from trisect.methods.method import ComponentMethod, Options, need, reads
from trisect.methods.slots import PAIR_RIDGES, candidates, choose_pairs, share_rates
from trisect.records.parts import INNER, MLP, OV, QK, REGRESSED, Moments, Shrunk, Slots, Spectrum
from trisect.solve.lowrank import SOLVE_DTYPE, Basis, pooled_basis, stacked, value_bases
from trisect.solve.ridge import STRENGTHS, Pairs, Regression, eliminate_rows, held_out_ridge, ridge
from trisect.solve.select import neuron_scores, split_width, top
from trisect.solve.slots import SlotScores, compensate, real_map


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


# h = query heads, k = key/value heads, g = h / k, D = d_model, d = head width, r = new width, P = pairs

SLOT_RIDGES = (*PAIR_RIDGES, 1e2)
ROW_RIDGE = 0.1
VALUE_ROUNDS = 8
AWAKE = 0.01  # share of tokens at which a head is taken to attend to any one token, when value bases are chosen
CHOICE_STRENGTH = 0.3
"""Ridge of the full-width weights that a choice is made against; what stays is fitted again afterwards."""

PIECES = {
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
    p = split_width(energy, rest.values, width)
    pairs = choose_pairs(part, moments, p, options)
    k_rest, q_rest = rest.maps(width - 2 * p)
    solution = Shrunk(
        part=fold.map_heads(
            part,
            q_map=compensated(fold.head_maps(pairs.kept, P, q_rest), pairs, P),
            k_map=fold.head_maps(pairs.kept, P, k_rest),
            kept=pairs.kept,
        ),
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
        tried.append((compensate(fit, held, share=share, ridges=ridges), fit.joined(held, share)))
    best = torch.stack([a3.sum_groups(e, part.group) for (_, e), _ in tried]).argmin(dim=0)  # (n, k) -> (k,)
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


def _through_slots(
    part: QK, moments: Moments, slots: Slots, c: Tensor, rest: Basis, width: int, *, folded: bool
) -> QK:
    """Fold the slots' maps and the coefficients c (h, 2p) into the weights."""
    p = slots.rates.shape[-1]
    k_rest, q_rest = rest.maps(width - 2 * p)
    # Slots turn without the scaling that some tables carry, so it goes into the weights.
    scaling = need(moments, "rotary_scaling").item() if folded else 1.0
    number = torch.complex(c[:, :p], c[:, p:]).unsqueeze(-2)  # (h, 1, p)
    q_slots = slots.q_map.repeat_interleave(part.group, dim=0) * number
    nearest = (need(moments, "rates").unsqueeze(-1) - slots.rates.unsqueeze(-2)).abs().argmin(dim=-2)  # (k, p)
    narrow = fold.map_heads(
        part,
        q_map=_block_diagonal(scaling * real_map(q_slots), q_rest.repeat_interleave(part.group, dim=0)),
        k_map=_block_diagonal(scaling * real_map(slots.k_map), k_rest),
        kept=nearest,
    )
    return replace(narrow, rates=slots.rates) if folded else narrow


def _slot_scores(moments: Moments, number: int, suffix: str) -> SlotScores:
    gram, cross, energy = (need(moments, f"slots{number}_{name}{suffix}") for name in ("gram", "cross", "energy"))
    return SlotScores(gram=gram, cross=cross, energy=energy)


def _pick(options: list[Tensor], best: Tensor) -> Tensor:
    """Row i of the option that `best` (n,) names for it."""
    return torch.stack(options)[best, torch.arange(len(best), device=best.device)]


def _block_diagonal(pairs: Tensor, rest: Tensor) -> Tensor:
    """(n, a, b) and (n, c, d) -> (n, a + c, b + d)."""
    n, a, b = pairs.shape
    whole = pairs.new_zeros(n, a + rest.shape[1], b + rest.shape[2])
    whole[:, :a, :b], whole[:, a:, b:] = pairs, rest
    return whole


def compensated(maps: Tensor, pairs: Pairs, num_pairs: int) -> Tensor:
    """Query maps (h, d, r) with each kept pair times its complex number a + ib.            [math.md E-2]"""
    # The key stays as it is; q1' = a q1 - b q2 and q2' = a q2 + b q1 turn the pair's score s into a s + b t.
    k, g, p = pairs.real.shape
    maps = maps.repeat_interleave(g, dim=0).clone()  # (k, d, r) -> (h, d, r)
    a, b = pairs.real.flatten(0, 1), pairs.quadrature.flatten(0, 1)  # (h, p)
    first = pairs.kept.repeat_interleave(g, dim=0)  # (h, p)
    heads = torch.arange(k * g, device=maps.device).unsqueeze(-1)
    slots = torch.arange(p, device=maps.device)
    maps[heads, first, slots] = a
    maps[heads, first + num_pairs, slots] = -b
    maps[heads, first + num_pairs, slots + p] = a
    maps[heads, first, slots + p] = b
    return maps


def solve_ov(part: OV, moments: Moments, width: int, options: Options) -> Shrunk:
    """Bases for all value heads together, then one refit of W_o over all heads.    [math.md V-1, F-1, F-2]"""
    a3.refuse_shared_output(part)
    fit, held, both = output_regressions(part, moments)
    prior = part.W_o.to(SOLVE_DTYPE).flatten(0, 1)  # (h d, D)
    narrow, carried = part, None
    if width != part.width:
        assert both.penalty is not None
        heads = ridge(both, prior, CHOICE_STRENGTH).unflatten(0, (part.heads, -1))
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
    wanted = prior if "refit-o" in options.without else _refit(fit, held, prior, options)
    W_o = fold.like(part.W_o, wanted.unflatten(0, (part.heads, -1)))
    return _fitted(replace(narrow, W_o=W_o), both, wanted, carried)


def solve_mlp(part: MLP, moments: Moments, width: int, options: Options) -> Shrunk:
    """Neurons by elimination, then one refit of W_down.                          [math.md E-1, F-1, F-2]"""
    # Where W_up and W_gate are refitted behind it, held-out tokens take no part: they judge that refit as well.
    fit, held = regressions(moments, "mlp")
    prior = part.W_down.to(SOLVE_DTYPE)
    narrow, carried = part, None
    if width != part.width:
        carried = fold.spectrum(fold.NEURONS, neuron_scores(fit.energies(held), prior))
        kept = choose_neurons(fit, held, prior, width, options)
        narrow, prior = fold.keep_neurons(part, kept), prior[kept]
        fit, held = fit.chosen(kept), held.chosen(kept)
    else:
        fit, held = fit.whole(), held.whole()
    last = "refit-up" in options.without
    wanted = prior if "refit-down" in options.without else _refit(fit, held, prior, options, all_tokens=last)
    return _fitted(replace(narrow, W_down=fold.like(part.W_down, wanted)), fit.joined(held), wanted, carried)


def choose_neurons(fit: Regression, held: Regression, W: Tensor, width: int, options: Options) -> Tensor:
    """Neurons (width,) by elimination against refitted weights; without it, by a3's scores.   [E-1, M-1]"""
    if "eliminate" in options.without:
        return top(neuron_scores(fit.energies(held), W), width)[0]
    # Each step makes its own Gram of all tokens and overwrites it: a third would not fit for wide MLPs.
    wanted = ridge(fit.joined(held), W, CHOICE_STRENGTH, overwrite=True)
    return eliminate_rows(fit.joined(held).gram, wanted, width, ridge=ROW_RIDGE, overwrite=True)


def refit_up(part: MLP, moments: Moments, width: int, options: Options) -> Shrunk:
    """W_up and W_gate along a few directions, each of them one feature of a regression.       [F-8, F-1, F-2]"""
    fit, held = (
        replace(problem, penalty=need(moments, f"{INNER}_penalty")) for problem in regressions(moments, INNER)
    )
    vectors = need(moments, f"{INNER}_vectors")  # (K, D, N), W_up and W_gate side by side
    steps = _refit(fit, held, torch.zeros_like(fit.cross), options)  # (K, 1)
    change = torch.tensordot(steps.squeeze(-1).to(vectors), vectors, dims=1).split(part.width, dim=-1)
    maps = {name: getattr(part, name) for name in ("W_up", "W_gate") if getattr(part, name) is not None}
    changed = {name: fold.like(W, W.to(delta) + delta) for (name, W), delta in zip(maps.items(), change, strict=True)}
    return _fitted(replace(part, **changed), fit.joined(held), steps)


def refit_down(part: MLP, moments: Moments, width: int, options: Options) -> Shrunk:
    """W_down behind refitted neurons, from all tokens."""
    return solve_mlp(part, moments, part.width, replace(options, without=(*options.without, "refit-up")))


def _fitted(part: OV | MLP, both: Regression, W: Tensor, spectrum: Spectrum | None = None) -> Shrunk:
    """A part with fitted weights, and what they miss over all tokens."""
    loss = max(0.0, both.error(W).item())
    return Shrunk(part=part, loss=loss, total=both.energy.item(), spectrum=spectrum)


def _refit(fit: Regression, held: Regression, prior: Tensor, options: Options, *, all_tokens: bool = True) -> Tensor:
    """Weights from all tokens; the ridge chosen on held-out ones, or next to none.              [F-1, F-2]"""
    if "ridge" in options.without:
        return ridge(fit.joined(held) if all_tokens else fit, prior, STRENGTHS[0])
    return held_out_ridge(fit, held, prior, all_tokens=all_tokens)[0]


MLP_READS = "mlp_gram mlp_target mlp_energy mlp_tokens"
A3_PLUS = ComponentMethod(
    name="a3+",
    summary="Refitted, compensated, repaired: the paper's components on two streams.",
    solvers={"qk": solve_qk, "ov": solve_ov, "mlp": solve_mlp, "refit-up": refit_up, "refit-down": refit_down},
    reads={
        **reads(qk="q k scores q_squares k_squares", ov="a_gram a_target a_energy a_tokens a_values", mlp=MLP_READS),
        **reads(**{"refit-up": INNER, "refit-down": MLP_READS}),
    },
    streams="narrow",
    slot_reads=frozenset({"q", "k", "scores", "keys"}),
    slots=candidates,
    share=share_rates,
)
