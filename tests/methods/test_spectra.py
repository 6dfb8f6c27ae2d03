"""Spectra of the cuts, against singular values and scores of the paper's full matrices.  [math.md, 2-5]"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from a3_oracles import fused_qk, fused_vo, groups, paper_channel_scores, root_of, with_one
from a3_problems import Draw, Size, few, mlp_problem, narrower, ov_problem, qk_problem, sizes, solution_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tiny_models import tiny, tokens
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.methods.fold import spectrum
from trisect.pipeline.run import compress
from trisect.records.parts import Moments, Spectrum, even_ranks

pytestmark = pytest.mark.usefixtures("one_thread")


def by_rank(energies: list[Tensor], width: int) -> Tensor:
    """Heads added up rank by rank, as shares of all; ranks that a matrix does not have carry nothing."""
    padded = [torch.cat([e.sort(descending=True).values, e.new_zeros(width)])[:width] for e in energies]
    total = torch.stack(padded).sum(dim=0)
    return total / total.sum()


def check(found: Spectrum | None, expected: Tensor) -> None:
    assert found is not None
    assert found.length == len(expected) == len(found.values)  # all problems here have fewer than 64
    assert found.values == pytest.approx(expected.tolist(), rel=1e-3, abs=1e-9)
    assert sum(found.values) == pytest.approx(1, abs=1e-3)


@few
@given(size=sizes, data=st.data())
def test_ov_has_the_squared_singular_values_of_the_papers_matrix(size: Size, data: st.DataObject):
    rank, problem = narrower(size, data), ov_problem(size)
    part = problem.part
    P = with_one(problem.P, part.b_v)
    X = with_one(problem.X, part.b_v).expand(size.heads, -1, -1)
    roots = [root_of(inputs) for inputs in (P if size.group == 1 else X)[:: size.group]]
    values = [
        torch.linalg.svdvals(torch.cat(list(R.root @ W), dim=1)).square()
        for W, R in zip(groups(fused_vo(part), size.group), roots, strict=True)
    ]
    solution = solution_of("a3", "ov", part, problem.moments, rank)
    check(solution.spectrum, by_rank(values, size.width))
    assert solution.spectrum is not None
    behind = sum(solution.spectrum.values[rank:])
    assert behind == pytest.approx(solution.loss / solution.total, abs=1e-3)


@few
@given(size=sizes, data=st.data())
def test_qk_without_rope_has_the_squared_singular_values_of_the_papers_matrix(size: Size, data: st.DataObject):
    rank, problem = narrower(size, data), qk_problem(size)
    part = problem.part
    R_q, R_k = (root_of(with_one(X, part.b_q)) for X in (problem.X_q, problem.X_k))
    values = [
        torch.linalg.svdvals((R_q.root @ W @ R_k.root).flatten(0, 1)).square()
        for W in groups(fused_qk(part), size.group)
    ]
    found = solution_of("a3", "qk", part, problem.moments, rank).spectrum
    check(found, by_rank(values, size.width))
    assert found is not None
    assert found.of == "squared singular values"


@few
@given(size=sizes, pairs=st.integers(2, 4))
def test_qk_with_rope_has_each_pairs_score_shared_by_its_two_channels(size: Size, pairs: int):
    problem = qk_problem(replace(size, width=2 * pairs), pairs=pairs)
    part = problem.part
    R_q, R_k = (root_of(with_one(X, part.b_q)) for X in (problem.X_q, problem.X_k))
    channels = paper_channel_scores(problem, R_q, R_k)
    halves = (channels[:, :pairs] + channels[:, pairs:]).repeat(1, 2) / 2
    found = solution_of("a3", "qk", part, problem.moments, 2).spectrum
    check(found, by_rank(list(halves), 2 * pairs))
    assert found is not None
    assert found.of == "rotation pairs"


def test_qk_with_some_rotated_channels_ranks_both_kinds_together() -> None:
    problem = qk_problem(Size(width=6), pairs=1)
    part = problem.part
    q, k = problem.X_q @ part.W_q, problem.X_k @ part.W_k  # (h, t, d); channels 0 and 1 are the pair
    pair = (q.square().mean(dim=1) * k.square().mean(dim=1))[:, :2].sum(dim=-1)
    scores = q[..., 2:] @ k[..., 2:].mT / (q.shape[1] * k.shape[1]) ** 0.5
    values = [
        torch.cat([energy.expand(2) / 2, torch.linalg.svdvals(score)[:4].square()])
        for energy, score in zip(pair, scores, strict=True)
    ]
    found = solution_of("a3", "qk", part, problem.moments, 4).spectrum
    check(found, by_rank(values, 6))
    assert found is not None
    assert found.of == "rotation pairs and squared singular values"


def fitting(name: str, x: Tensor, y: Tensor) -> Moments:
    """Moments of a regression of y on x, the held-out half like the other."""
    found = {"gram": x.mT @ x, "target": x.mT @ y, "energy": y.square().sum()}
    halves = {key: value / len(x) for key, value in found.items()} | {"tokens": torch.tensor(float(len(x)))}
    return {f"{name}_{key}{half}": value for key, value in halves.items() for half in ("", "_held")}


@few
@given(size=sizes, gated=st.booleans())
def test_neurons_are_ranked_by_their_scores(size: Size, gated: bool):
    part, x = mlp_problem(size, gated=gated)
    scores = torch.stack([x[:, i].square().mean() * part.W_down[i].square().sum() for i in range(x.shape[1])])
    expected = by_rank([scores], len(scores))
    check(solution_of("a3", "mlp", part, {"mlp": x.square().mean(dim=0)}, 3).spectrum, expected)
    moments = fitting("mlp", x, x @ part.W_down)
    check(solution_of("a3+", "mlp", part, moments, 3).spectrum, expected)
    assert solution_of("a3+", "mlp", part, moments, part.width).spectrum is None  # refitted, not cut


def test_a3plus_value_heads_have_the_squared_singular_values_of_their_outputs() -> None:
    """With nothing to repair, the weights that bases are chosen for are the model's own."""
    size, draw = Size(d_model=12, width=5), Draw(3)
    part = ov_problem(size).part
    a = draw(size.heads, 400, size.width) * draw(size.heads, 1, size.width).exp()
    values = [torch.linalg.svdvals(heard @ W_o).square() for heard, W_o in zip(a, part.W_o, strict=True)]
    outputs = (a @ part.W_o).sum(dim=0)
    moments = fitting("a", a.transpose(0, 1).flatten(1), outputs)
    moments["a_values"] = torch.zeros(part.W_v.shape[0], size.width, size.width, dtype=a.dtype)
    check(solution_of("a3+", "ov", part, moments, 3).spectrum, by_rank(values, size.width))


@given(length=st.integers(1, 5000), points=st.integers(1, 64))
def test_ranks_run_from_the_first_to_the_last_without_repeating(length: int, points: int) -> None:
    points = min(length, points)
    ranks = even_ranks(length, points)
    assert len(set(ranks)) == points
    assert ranks == sorted(ranks)
    assert ranks[0] == 0
    assert points == 1 or ranks[-1] == length - 1


def test_long_spectra_are_sampled_and_rounded_and_silent_ones_left_out() -> None:
    energies = Draw(0)(3000).abs()
    found = spectrum("neuron scores", energies)
    assert found is not None
    assert (found.length, len(found.values)) == (3000, 64)
    ranked = (energies.sort(descending=True).values / energies.sum()).tolist()
    assert list(found.values) == [float(f"{ranked[rank]:.4g}") for rank in even_ranks(found.length, len(found.values))]
    assert spectrum("neuron scores", torch.zeros(8)) is None


@pytest.mark.parametrize("method", ["a3", "a3+"])
def test_a_receipt_has_a_spectrum_for_every_cut(method: str) -> None:
    config = CompressConfig(ratio=0.25, method=method, align=None)
    made = compress(tiny("llama-gqa"), config, tokens=tokens_from_tensor(tokens(16, 24)))
    lengths = {"qk": 16, "ov": 16, "mlp": 80}
    for entry in made.receipt["losses"]:
        found: dict[str, Any] = entry["spectrum"]
        assert found["length"] == lengths[entry["component"]] > entry["width"]
        assert found["values"] == sorted(found["values"], reverse=True)
        assert len(found["values"]) == min(64, found["length"])
