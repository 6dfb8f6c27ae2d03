"""A3, the paper's method, and its published ablations.                          docs/math.md, sections 2-5

Every solver follows the same three lines: moments of the narrow quantities, a basis or a choice, new
weights. No d_model- or d_inter-sized root, inverse or SVD appears; math.md, section 1, says why.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from trisect.errors import TrisectError
from trisect.methods import fold
from trisect.methods.method import ComponentMethod, Method, Options, need, reads
from trisect.records.parts import MLP, OV, QK, Moments, Shrunk, Spectrum
from trisect.solve.lowrank import SOLVE_DTYPE, Basis, shared_basis, sum_groups
from trisect.solve.select import Channels, denominator, neuron_scores, pair_scores, split_width, top

# h = query heads, k = key heads, g = query heads per key head, D = d_model, d = head width, r = new width,
# P = rotation pairs, p = pairs kept


def solve_qk(part: QK, moments: Moments, width: int, options: Options, *, by_weight: str = "") -> Shrunk:
    """Pairs for the rotated channels, the joint SVD for the others.           [math.md QK-1, R-1, R-2]"""
    # Without RoPE there are no pairs and this is Theorem 2 (MHA) or the joint SVD (GQA); with full RoPE
    # there are no other channels and it is the paper's pair selection.
    C_q, C_k = qk_moments(part, moments, by_weight=by_weight)  # (k, d, d) each
    scores, rest = pair_energy(C_q, C_k, part.num_pairs), unrotated(part, C_q, C_k)
    carried = fold.head_spectrum(scores, rest.values)
    return keep_pairs(part, scores, rest, moments, width, options, spectrum=carried)


def keep_pairs(
    part: QK,
    scores: Tensor,
    rest: Basis | Channels,
    moments: Moments,
    width: int,
    options: Options,
    *,
    spectrum: Spectrum | None = None,
) -> Shrunk:
    """The rotation pairs with the largest scores (k, P), as they are, and the best of the other channels."""
    kept, lost = top(scores, split_width(scores, rest.values, width))  # (k, p)
    pairs = fold.pair_map(kept, part.num_pairs)
    solution = Shrunk(
        part=fold.map_pairs(part, pairs, pairs.repeat_interleave(part.group, dim=0), rest, width, kept=kept),
        loss=(lost.sum() + rest.loss(width - 2 * kept.shape[-1]).sum()).item(),
        total=(scores.sum() + rest.total.sum()).item(),
        clipped=rest.clipped,
        spectrum=spectrum,
    )
    return renormalise(part, solution, kept, rest, moments, options)


def unrotated(part: QK, C_q: Tensor, C_k: Tensor) -> Basis | Channels:
    """Channels that do not rotate: their best slots, or, where a norm stands behind them, some as they are."""
    C_q, C_k = (C[:, 2 * part.num_pairs :, 2 * part.num_pairs :] for C in (C_q, C_k))
    if part.norm_q is None:
        return shared_basis(C_k, C_q)
    return Channels(values=_diagonal(C_q).to(SOLVE_DTYPE) * _diagonal(C_k).to(SOLVE_DTYPE))


def solve_ov(part: OV, moments: Moments, width: int, options: Options, *, of: str = "a") -> Shrunk:
    """One value basis per value head, each query head's output rows mapped along.    [math.md OV-1, OV-2]"""
    refuse_shared_output(part)
    # C_a of each value head; shared ones, and those of `of` "v", before attention weights them; "W": with R = I.
    C = weight_moment(part.W_v, part.b_v) if of == "W" else need(moments, of if part.group == 1 else "v")  # (k, d, d)
    W_o = part.W_o.to(SOLVE_DTYPE)
    basis: Basis | Channels = shared_basis(C, sum_groups(W_o @ W_o.mT, part.group))
    if part.W_g is not None:
        basis = gated_channels(part, _diagonal(moments["a"]) if "a" in moments else None, _diagonal(C))
    v_map, o_map = basis.maps(width)  # (k, d, r)
    return Shrunk(
        part=fold.map_values(part, v_map, o_map.repeat_interleave(part.group, dim=0).mT @ W_o),
        loss=basis.loss(width).sum().item(),
        total=basis.total.sum().item(),
        clipped=basis.clipped,
        spectrum=fold.spectrum(fold.SINGULAR_VALUES, basis.values),
    )


def gated_channels(part: OV, put_out: Tensor | None, values: Tensor) -> Channels:
    """Value channels by what they add to the output: no basis passes through a gate.            [math.md OV-6]"""
    # Energies (h, d) of what heads put out, gated; where a method has none, those of the values (k, d).
    put_out = values.repeat_interleave(part.group, dim=0) if put_out is None else put_out
    rows = part.W_o.to(SOLVE_DTYPE).square().sum(dim=-1)  # (h, d)
    return Channels(values=sum_groups(put_out.to(SOLVE_DTYPE) * rows, part.group))


def solve_ov_overall(part: OV, moments: Moments, width: int, options: Options) -> Shrunk:
    """The appendix's stacked solution: all heads share one output projection.            [math.md OV-3]"""
    # For study: it removes the same parameters but every value head grows to the shared rank, and so does
    # the KV cache.
    refuse_shared_output(part)
    if part.W_g is not None:
        return Shrunk(part=part, loss=0.0, total=0.0, note="OV left whole: a gate stands in front of W_o")
    if part.group != 1:
        shares = f"this layer shares each value head among {part.group} query heads"
        raise TrisectError(f"a3-ov-overall needs one value head per query head (MHA); {shares}. Use --method a3.")
    h, _, d = part.W_v.shape
    rank = min(round(width * 2 * h / (h + 1)), h * d)  # as many parameters as `width` per head would have
    W_o = part.W_o.to(SOLVE_DTYPE).flatten(0, 1)  # (h, d, D) -> (h d, D)
    basis = shared_basis(need(moments, "a_gram"), W_o @ W_o.mT)
    v_map, o_map = basis.maps(rank)  # (h d, r)
    return Shrunk(
        part=fold.map_values(part, v_map.unflatten(0, (h, d)), (o_map.mT @ W_o).unsqueeze(0)),
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
        part=fold.keep_neurons(part, kept),
        loss=lost.item(),
        total=scores.sum().item(),
        spectrum=fold.spectrum(fold.NEURONS, scores),
    )


def pair_energy(C_q: Tensor, C_k: Tensor, num_pairs: int) -> Tensor:
    """lambda of each rotation pair (k, P) from the moments of both sides."""
    return pair_scores(_diagonal(C_q), _diagonal(C_k), num_pairs)


def qk_moments(part: QK, moments: Moments, *, by_weight: str = "") -> tuple[Tensor, Tensor]:
    """C_q summed over each group, and C_k, from the projections' outputs; with R = I for sides in `by_weight`."""
    C_q = weight_moment(part.W_q, part.b_q) if "q" in by_weight else need(moments, "q")
    C_k = weight_moment(part.W_k, part.b_k) if "k" in by_weight else need(moments, "k")
    return sum_groups(C_q, part.group), C_k


def renormalise(
    part: QK, solution: Shrunk, kept: Tensor, rest: Basis | Channels, moments: Moments, options: Options
) -> Shrunk:
    """Correct the norms' denominators for the channels that are gone, or leave QK whole.   [math.md Q-1]"""
    if part.norm_q is None:
        return solution
    assert isinstance(solution.part, QK)
    assert isinstance(rest, Channels)
    single = rest.kept(solution.part.width - 2 * kept.shape[-1])
    channels = torch.cat([kept, kept + part.num_pairs, single + 2 * part.num_pairs], dim=-1)  # (k, r)
    kept_of = {"q": channels.repeat_interleave(part.group, dim=0), "k": channels}
    errors, norms = [], {}
    for side, theirs in kept_of.items():
        squares = need(moments, f"{side}_squares")
        if len(squares) != len(theirs):  # the norm sees one head of all channels
            starts = part.width * torch.arange(len(theirs), device=theirs.device)
            theirs = (theirs + starts.unsqueeze(-1)).flatten().unsqueeze(0)
        factor, missed = denominator(squares, theirs)
        errors.append(missed)
        norm = getattr(solution.part, f"norm_{side}")
        norms[f"norm_{side}"] = fold.like(norm, norm / factor.sqrt().unsqueeze(-1))
    error = torch.cat(errors).clamp(min=0).mean().sqrt().item()
    if error > options.qk_norm_tolerance:
        limit = f"qk_norm_tolerance {options.qk_norm_tolerance:.1%}"
        note = f"QK left whole: its norm would be off by {error:.1%} ({limit})"
        return Shrunk(part=part, loss=0.0, total=solution.total, note=note)
    return replace(solution, part=replace(solution.part, **norms), note=f"norm corrected, off by {error:.1%}")


def refuse_shared_output(part: OV) -> None:
    """Heads that share one output projection have no rows of their own to map."""
    if part.W_o.shape[0] != part.heads:
        shared = "This layer's heads already share one output projection (a3-ov-overall), which is not cut again"
        raise TrisectError(f"{shared}; start from the original model, or use --parts qk,mlp.")


def weight_moment(W: Tensor, b: Tensor | None) -> Tensor:
    """E[y^T y] of y = x W + b when x has the identity as second moment and no mean."""
    W, b = W.to(SOLVE_DTYPE), None if b is None else b.to(SOLVE_DTYPE)
    return W.mT @ W if b is None else W.mT @ W + b.unsqueeze(-1) * b.unsqueeze(-2)


def _diagonal(C: Tensor) -> Tensor:
    return C.diagonal(dim1=-2, dim2=-1)


def _a3(name: str, summary: str, *, by_weight: str = "", of: str = "a") -> Method:
    """The paper's method with one of its moments exchanged."""
    return ComponentMethod(
        name=name,
        summary=summary,
        solvers={"qk": partial(solve_qk, by_weight=by_weight), "ov": partial(solve_ov, of=of), "mlp": solve_mlp},
        reads=reads(qk="q k q_squares k_squares", ov="a v", mlp="mlp"),
    )


A3 = _a3("a3", "The paper's closed-form solutions, exactly as published.")
A3_Q_ONLY = _a3("a3-q-only", "Ablation: QK from query statistics, keys by weight.", by_weight="k")
A3_K_ONLY = _a3("a3-k-only", "Ablation: QK from key statistics, queries by weight.", by_weight="q")
A3_XKV = _a3("a3-xkv", "Ablation: OV from values before attention weights them.", of="v")
A3_OV_OVERALL = replace(
    A3,
    name="a3-ov-overall",
    summary="Study: the appendix's stacked OV solution (MHA only; grows the KV cache).",
    solvers={**A3.solvers, "ov": solve_ov_overall},
    reads={**A3.reads, **reads(ov="a_gram")},
)
PUBLISHED = (A3, A3_Q_ONLY, A3_K_ONLY, A3_XKV, A3_OV_OVERALL)
