"""A3, the paper's method, and its published ablations.                          docs/math.md, sections 2-5

Every solver follows the same three lines: moments of the narrow quantities, a basis or a choice, new
weights. No d_model- or d_inter-sized root, inverse or SVD appears; math.md, section 1, says why.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trisect.errors import TrisectError
from trisect.methods.fold import (
    NEURONS,
    SINGULAR_VALUES,
    head_maps,
    head_spectrum,
    keep_neurons,
    like,
    map_heads,
    map_rows,
    spectrum,
)
from trisect.methods.method import ComponentMethod, Method, Options, need
from trisect.records.parts import MLP, OV, QK, Moments, Shrunk
from trisect.solve import (
    SOLVE_DTYPE,
    Basis,
    Channels,
    denominator,
    neuron_scores,
    pair_scores,
    shared_basis,
    split_width,
    top,
)

# h = query heads, k = key heads, g = query heads per key head, D = d_model, d = head width, r = new width,
# P = rotation pairs, p = pairs kept

QKMoments = Callable[[QK, Moments], tuple[Tensor, Tensor]]
OVMoment = Callable[[OV, Moments], Tensor]


def solve_qk(part: QK, moments: Moments, width: int, options: Options, *, second_moments: QKMoments) -> Shrunk:
    """Pairs for the rotated channels, the joint SVD for the others.           [math.md QK-1, R-1, R-2]

    Without RoPE there are no pairs and this is Theorem 2 (MHA) or the joint SVD (GQA); with full RoPE
    there are no other channels and it is the paper's pair selection.
    """
    C_q, C_k = second_moments(part, moments)  # (k, d, d) each
    P = part.num_pairs
    scores = pair_energy(C_q, C_k, P)  # (k, P)
    rest = shared_basis(C_k[:, 2 * P :, 2 * P :], C_q[:, 2 * P :, 2 * P :])
    p = split_width(scores, rest.values, width)
    kept, lost = top(scores, p)  # (k, p)
    k_rest, q_rest = rest.maps(width - 2 * p)
    q_map = head_maps(kept, P, q_rest).repeat_interleave(part.group, dim=0)  # (k, d, r) -> (h, d, r)
    solution = Shrunk(
        part=map_heads(part, q_map=q_map, k_map=head_maps(kept, P, k_rest), kept=kept),
        loss=(lost.sum() + rest.loss(width - 2 * p).sum()).item(),
        total=(scores.sum() + rest.total.sum()).item(),
        clipped=rest.clipped,
        spectrum=head_spectrum(scores, rest.values),
    )
    if part.norm_q is None:
        return solution
    return renormalise(part, solution, kept, moments, options)


def solve_ov(part: OV, moments: Moments, width: int, options: Options, *, second_moment: OVMoment) -> Shrunk:
    """One value basis per value head, each query head's output rows mapped along.    [math.md OV-1, OV-2]"""
    refuse_shared_output(part)
    C = second_moment(part, moments)  # (k, d, d)
    W_o = part.W_o.to(SOLVE_DTYPE)
    M = (W_o @ W_o.mT).unflatten(0, (-1, part.group)).sum(dim=1)  # (h, d, d) -> (k, d, d)
    basis: Basis | Channels = shared_basis(C, M)
    if part.W_g is not None:
        basis = gated_channels(part, _diagonal(moments["a"]) if "a" in moments else None, _diagonal(C))
    v_map, o_map = basis.maps(width)  # (k, d, r)
    return Shrunk(
        part=replace(
            part,
            W_v=like(part.W_v, part.W_v.to(SOLVE_DTYPE) @ v_map),
            b_v=map_rows(part.b_v, v_map),
            W_o=like(part.W_o, o_map.repeat_interleave(part.group, dim=0).mT @ W_o),
            **gate_behind(part, v_map),
        ),
        loss=basis.loss(width).sum().item(),
        total=basis.total.sum().item(),
        clipped=basis.clipped,
        spectrum=spectrum(SINGULAR_VALUES, basis.values),
    )


def gated_channels(part: OV, put_out: Tensor | None, values: Tensor) -> Channels:
    """Value channels by what they add to the output: no basis passes through a gate.            [math.md OV-6]

    Energies (h, d) of what heads put out, gated; where a method has none, those of the values (k, d).
    """
    put_out = values.repeat_interleave(part.group, dim=0) if put_out is None else put_out
    rows = part.W_o.to(SOLVE_DTYPE).square().sum(dim=-1)  # (h, d)
    return Channels(values=sum_groups(put_out.to(SOLVE_DTYPE) * rows, part.group))


def gate_behind(part: OV, maps: Tensor) -> dict[str, Any]:
    """Weight and bias of the gate behind maps (k, d, r) that choose value channels; nothing without a gate."""
    if part.W_g is None:
        return {}
    of_head = maps.repeat_interleave(part.group, dim=0)
    return {"W_g": like(part.W_g, part.W_g.to(SOLVE_DTYPE) @ of_head), "b_g": map_rows(part.b_g, of_head)}


def solve_ov_overall(part: OV, moments: Moments, width: int, options: Options) -> Shrunk:
    """The appendix's stacked solution: all heads share one output projection.            [math.md OV-3]

    For study: it removes the same parameters but every value head grows to the shared rank, and so does
    the KV cache.
    """
    refuse_shared_output(part)
    if part.W_g is not None:
        return Shrunk(part=part, loss=0.0, total=0.0, note="OV left whole: a gate stands in front of W_o")
    if part.group != 1:
        raise TrisectError(
            "a3-ov-overall needs one value head per query head (MHA); this layer shares each value head "
            f"among {part.group} query heads. Use --method a3."
        )
    h, _, d = part.W_v.shape
    rank = min(round(width * 2 * h / (h + 1)), h * d)  # as many parameters as `width` per head would have
    W_o = part.W_o.to(SOLVE_DTYPE).flatten(0, 1)  # (h, d, D) -> (h d, D)
    basis = shared_basis(need(moments, "a_gram"), W_o @ W_o.mT)
    v_map, o_map = basis.maps(rank)  # (h d, r)
    v_map = v_map.unflatten(0, (h, d))
    return Shrunk(
        part=replace(
            part,
            W_v=like(part.W_v, part.W_v.to(SOLVE_DTYPE) @ v_map),
            b_v=map_rows(part.b_v, v_map),
            W_o=like(part.W_o, (o_map.mT @ W_o).unsqueeze(0)),
        ),
        loss=basis.loss(rank).item(),
        total=basis.total.item(),
        clipped=basis.clipped,
        note=f"value heads of width {rank} share one output projection",
    )


def solve_mlp(part: MLP, moments: Moments, width: int, options: Options) -> Shrunk:
    """Keep the neurons with the largest E[x_i^2] |w_i|^2.                                [math.md M-1]"""
    scores = neuron_scores(need(moments, "mlp"), part.W_down)
    kept, lost = top(scores, width)
    return Shrunk(
        part=keep_neurons(part, kept), loss=lost.item(), total=scores.sum().item(), spectrum=spectrum(NEURONS, scores)
    )


def pair_energy(C_q: Tensor, C_k: Tensor, num_pairs: int) -> Tensor:
    """lambda of each rotation pair (k, P) from the moments of both sides."""
    return pair_scores(_diagonal(C_q), _diagonal(C_k), num_pairs)


def activation_moments(part: QK, moments: Moments) -> tuple[Tensor, Tensor]:
    """C_q summed over each group, and C_k, from the projections' outputs."""
    return sum_groups(need(moments, "q"), part.group), need(moments, "k")


def query_only_moments(part: QK, moments: Moments) -> tuple[Tensor, Tensor]:
    """The ablation with R_k = I: keys count by their weights alone."""
    return sum_groups(need(moments, "q"), part.group), weight_moment(part.W_k, part.b_k)


def key_only_moments(part: QK, moments: Moments) -> tuple[Tensor, Tensor]:
    """The ablation with R_q = I: queries count by their weights alone."""
    return sum_groups(weight_moment(part.W_q, part.b_q), part.group), need(moments, "k")


def attended_moment(part: OV, moments: Moments) -> Tensor:
    """C_a of each value head; shared value heads see tokens before attention weights them."""
    return need(moments, "a" if part.group == 1 else "v")


def value_moment(part: OV, moments: Moments) -> Tensor:
    """The ablation with x_kv: values before attention weights them."""
    return need(moments, "v")


def renormalise(part: QK, solution: Shrunk, kept: Tensor, moments: Moments, options: Options) -> Shrunk:
    """Correct the norms' denominators for the channels that are gone, or leave QK whole.   [math.md Q-1]"""
    if 2 * part.num_pairs != part.width:
        raise TrisectError("QK-norm together with unrotated channels is not supported; use --parts ov,mlp.")
    channels = torch.cat([kept, kept + part.num_pairs], dim=-1)  # (k, r)
    q = denominator(*_as_normed(need(moments, "q_squares"), channels.repeat_interleave(part.group, dim=0), part.width))
    k = denominator(*_as_normed(need(moments, "k_squares"), channels, part.width))
    error = torch.cat([q.error, k.error]).clamp(min=0).mean().sqrt().item()
    if error > options.qk_norm_tolerance:
        return Shrunk(
            part=part,
            loss=0.0,
            total=solution.total,
            note=f"QK left whole: its norm would be off by {error:.1%} (qk_norm_tolerance "
            f"{options.qk_norm_tolerance:.1%})",
        )
    assert isinstance(solution.part, QK)
    narrow = solution.part
    assert narrow.norm_q is not None
    assert narrow.norm_k is not None
    return replace(
        solution,
        part=replace(
            narrow,
            norm_q=like(narrow.norm_q, narrow.norm_q / q.factor.sqrt().unsqueeze(-1)),
            norm_k=like(narrow.norm_k, narrow.norm_k / k.factor.sqrt().unsqueeze(-1)),
        ),
        note=f"norm corrected, off by {error:.1%}",
    )


def _as_normed(squares: Tensor, channels: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Squares and kept channels as the norm sees heads: one by one, or as one head of all channels."""
    if len(squares) == len(channels):
        return squares, channels
    starts = width * torch.arange(len(channels), device=channels.device)
    return squares, (channels + starts.unsqueeze(-1)).flatten().unsqueeze(0)


def refuse_shared_output(part: OV) -> None:
    """Heads that share one output projection have no rows of their own to map."""
    if part.W_o.shape[0] != part.heads:
        raise TrisectError(
            "This layer's heads already share one output projection (a3-ov-overall), which is not cut again; "
            "start from the original model, or use --parts qk,mlp."
        )


def weight_moment(W: Tensor, b: Tensor | None) -> Tensor:
    """E[y^T y] of y = x W + b when x has the identity as second moment and no mean."""
    W = W.to(SOLVE_DTYPE)
    moment = W.mT @ W
    if b is None:
        return moment
    b = b.to(SOLVE_DTYPE)
    return moment + b.unsqueeze(-1) * b.unsqueeze(-2)


def sum_groups(per_head: Tensor, group: int) -> Tensor:
    """(h, ...) -> (k, ...): over the query heads that share a key head."""
    return per_head.unflatten(0, (-1, group)).sum(dim=1)


def _diagonal(C: Tensor) -> Tensor:
    return C.diagonal(dim1=-2, dim2=-1)


def _a3(name: str, summary: str, *, qk: QKMoments = activation_moments, ov: OVMoment = attended_moment) -> Method:
    """The paper's method with one of its moments exchanged."""
    return ComponentMethod(
        name=name,
        summary=summary,
        solvers={
            "qk": partial(solve_qk, second_moments=qk),
            "ov": partial(solve_ov, second_moment=ov),
            "mlp": solve_mlp,
        },
        reads={
            "qk": frozenset({"q", "k", "q_squares", "k_squares"}),
            "ov": frozenset({"a", "v"}),
            "mlp": frozenset({"mlp"}),
        },
    )


A3 = _a3("a3", "The paper's closed-form solutions, exactly as published.")
A3_Q_ONLY = _a3("a3-q-only", "Ablation: QK from query statistics, keys by weight.", qk=query_only_moments)
A3_K_ONLY = _a3("a3-k-only", "Ablation: QK from key statistics, queries by weight.", qk=key_only_moments)
A3_XKV = _a3("a3-xkv", "Ablation: OV from values before attention weights them.", ov=value_moment)
A3_OV_OVERALL = replace(
    A3,
    name="a3-ov-overall",
    summary="Study: the appendix's stacked OV solution (MHA only; grows the KV cache).",
    solvers={**A3.solvers, "ov": solve_ov_overall},
    reads={**A3.reads, "ov": frozenset({"a_gram"})},
)
