"""a3+: the same three components, refitted, compensated and repaired, still in closed form.   docs/math.md, 9

Every solver works on the narrow stream (what the narrow model really feeds the layer) and aims at the dense
one: the output projections are fitted to the dense output plus whatever earlier layers have left undone.
"""

from dataclasses import replace

import torch
from torch import Tensor

from trisect.methods import a3
from trisect.methods.fold import head_maps, keep_neurons, like, map_heads, map_rows
from trisect.methods.method import Method, Options, need
from trisect.parts import MLP, OV, QK, Moments, Shrunk
from trisect.solve import (
    SOLVE_DTYPE,
    Pairs,
    Regression,
    eliminate_pairs,
    eliminate_rows,
    held_out_ridge,
    ridge,
    shared_basis,
    split_width,
    stacked,
    value_bases,
)

# h = query heads, k = key/value heads, g = h / k, D = d_model, d = head width, r = new width, P = pairs

PAIR_RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
ROW_RIDGE = 1e-3
VALUE_ROUNDS = 6
CHOICE_STRENGTH = 0.3
"""Ridge of the full-width weights that a choice is made against; what stays is fitted again afterwards."""


def solve_qk(part: QK, moments: Moments, width: int, options: Options) -> Shrunk:
    """Pairs by what softmax sees, compensated; unrotated channels by SVD.              [math.md E-2, QK-1]"""
    P = part.num_pairs
    if width == part.width:
        return Shrunk(part=part, loss=0.0, total=0.0, note="full width")
    if P == 0:
        return a3.solve_qk(part, moments, width, options, second_moments=a3.activation_moments)
    C_q, C_k = a3.activation_moments(part, moments)
    rest = shared_basis(C_k[:, 2 * P :, 2 * P :], C_q[:, 2 * P :, 2 * P :])
    energy = a3.pair_energy(C_q, C_k, P)
    p = split_width(energy, rest.values, width)
    pairs = choose_pairs(part, moments, p)
    k_rest, q_rest = rest.maps(width - 2 * p)
    solution = Shrunk(
        part=map_heads(
            part,
            q_map=compensated(head_maps(pairs.kept, P, q_rest), pairs, P),
            k_map=head_maps(pairs.kept, P, k_rest),
            kept=pairs.kept,
        ),
        loss=pairs.loss.sum().item() + rest.loss(width - 2 * p).sum().item(),
        total=pairs.total.sum().item() + rest.total.sum().item(),
        clipped=rest.clipped,
    )
    if part.norm_q is None:
        return solution
    return a3.renormalise(part, solution, pairs.kept, moments, options)


def choose_pairs(part: QK, moments: Moments, keep: int) -> Pairs:
    """Pairs from all sampled queries, with the ridge that did best on the held-out ones.     [math.md E-2]"""
    fit, held = (
        need(moments, name).unflatten(0, (-1, part.group))  # (h, 2P, 2P) -> (k, g, 2P, 2P)
        for name in ("scores", "scores_held")
    )
    quadrature = part.norm_q is None  # a norm between projection and rotation lets only real factors through
    errors = {
        ridge: eliminate_pairs(fit, keep, ridge=ridge, quadrature=quadrature).error(held).sum().item()
        for ridge in PAIR_RIDGES
    }
    best = min(errors, key=errors.__getitem__)
    share = need(moments, "scores_tokens") / (
        need(moments, "scores_tokens") + need(moments, "scores_tokens_held")
    )
    return eliminate_pairs(share * fit + (1 - share) * held, keep, ridge=best, quadrature=quadrature)


def compensated(maps: Tensor, pairs: Pairs, num_pairs: int) -> Tensor:
    """Query maps (h, d, r) with each kept pair times its complex number a + ib.            [math.md E-2]

    The key stays as it is; q1' = a q1 - b q2 and q2' = a q2 + b q1 turn the pair's score s into a s + b t.
    """
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
    fit, held = regressions(moments, "a")
    both = fit.joined(held)
    prior = part.W_o.to(SOLVE_DTYPE).flatten(0, 1)  # (h d, D)
    T = None
    if width != part.width:
        heads = ridge(both, prior, CHOICE_STRENGTH).unflatten(0, (part.heads, -1))
        kv_heads = part.W_v.shape[0]
        T = value_bases(both.gram, heads, kv_heads=kv_heads, rank=width, rounds=VALUE_ROUNDS)
        features = stacked(T, part.heads)
        prior = _projected(both, features, prior)
        fit, held, both = (problem.mapped(features) for problem in (fit, held, both))
    wanted, _ = held_out_ridge(fit, held, prior)
    W_o = wanted.unflatten(0, (part.heads, -1))
    return Shrunk(
        part=replace(
            part,
            W_v=part.W_v if T is None else like(part.W_v, part.W_v.to(SOLVE_DTYPE) @ T),
            b_v=part.b_v if T is None else map_rows(part.b_v, T),
            W_o=like(part.W_o, W_o),
        ),
        loss=max(0.0, both.error(wanted).item()),
        total=both.energy.item(),
    )


def solve_mlp(part: MLP, moments: Moments, width: int, options: Options) -> Shrunk:
    """Neurons by elimination, then one refit of W_down.                          [math.md E-1, F-1, F-2]"""
    fit, held = regressions(moments, "mlp")
    prior = part.W_down.to(SOLVE_DTYPE)
    narrow = part
    if width != part.width:
        both = fit.joined(held)
        wanted = ridge(both, prior, CHOICE_STRENGTH)
        kept = eliminate_rows(both.gram, wanted, width, ridge=ROW_RIDGE)
        narrow, prior = keep_neurons(part, kept), prior[kept]
        fit, held = fit.chosen(kept), held.chosen(kept)
    wanted, _ = held_out_ridge(fit, held, prior)
    both = fit.joined(held)
    return Shrunk(
        part=replace(narrow, W_down=like(part.W_down, wanted)),
        loss=max(0.0, both.error(wanted).item()),
        total=both.energy.item(),
    )


def regressions(moments: Moments, name: str) -> tuple[Regression, Regression]:
    """The fitting problem and its held-out twin."""

    def problem(suffix: str) -> Regression:
        return Regression(
            gram=need(moments, f"{name}_gram{suffix}"),
            cross=need(moments, f"{name}_target{suffix}"),
            energy=need(moments, f"{name}_energy{suffix}"),
            tokens=need(moments, f"{name}_tokens{suffix}").item(),
        )

    return problem(""), problem("_held")


def _projected(problem: Regression, features: Tensor, W: Tensor) -> Tensor:
    """The weights in the narrow features that come closest to W: what is left of it without any refit."""
    narrow = problem.mapped(features)
    system = narrow.gram.clone()
    system.diagonal().add_(1e-9 * system.diagonal().mean())
    return torch.linalg.solve(system, features.mT @ problem.gram @ W)


A3_PLUS = Method(
    name="a3+",
    summary="Refitted, compensated, repaired: the paper's components on two streams.",
    solvers={"qk": solve_qk, "ov": solve_ov, "mlp": solve_mlp},
    reads={
        "qk": frozenset({"q", "k", "scores", "q_squares", "k_squares"}),
        "ov": frozenset({"a_gram", "a_target", "a_energy", "a_tokens"}),
        "mlp": frozenset({"mlp_gram", "mlp_target", "mlp_energy", "mlp_tokens"}),
    },
    repairs=True,
)
