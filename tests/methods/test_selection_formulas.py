"""Structured magnitude and Wanda against loops over single weights.                        [math.md L-8]"""

from dataclasses import replace

import pytest
import torch
from a3_problems import Size, few, mlp_problem, normed_problem, qk_problem, sizes, solution_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trisect.records.parts import QK

pytestmark = pytest.mark.usefixtures("one_thread")

METHOD = pytest.mark.parametrize("method", ["magnitude", "wanda"])


def energies(size: Size) -> Tensor:
    generator = torch.Generator().manual_seed(size.seed + 1)
    return torch.rand(size.d_model, generator=generator, dtype=torch.float64) ** 4


def loop_sizes(W: Tensor, b: Tensor | None, norm: Tensor | None, x: list[float]) -> list[list[float]]:
    """[head][channel]: sum over inputs of |weight| times loudness, and the bias."""
    return [
        [
            (
                sum(abs(W[head, j, c].item()) * x[j] for j in range(W.shape[1]))
                + (0.0 if b is None else abs(b[head, c].item()))
            )
            * (1.0 if norm is None else abs(norm[head, c].item()))
            for c in range(W.shape[2])
        ]
        for head in range(W.shape[0])
    ]


def channel_scores(part: QK, x: list[float]) -> list[list[float]]:
    q = loop_sizes(part.W_q, part.b_q, part.norm_q, x)
    k = loop_sizes(part.W_k, part.b_k, part.norm_k, x)
    g = part.group
    return [[sum(q[key * g + i][c] for i in range(g)) * k[key][c] for c in range(part.width)] for key in range(len(k))]


def loudness(method: str, energy: Tensor) -> list[float]:
    return [1.0] * len(energy) if method == "magnitude" else energy.sqrt().tolist()


def best(scores: list[float], count: int) -> list[int]:
    return sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:count])


@METHOD
@few
@given(size=sizes, data=st.data())
def test_channels_without_rope_stay_one_by_one(method: str, size: Size, data: st.DataObject) -> None:
    part, x = qk_problem(size).part, energies(size)
    width = data.draw(st.integers(1, size.width - 1))
    solution = solution_of(method, "qk", part, {"x_energy": x}, width)
    lost = 0.0
    for key, scores in enumerate(channel_scores(part, loudness(method, x))):
        kept = best(scores, width)
        heads = slice(key * size.group, (key + 1) * size.group)
        assert solution.part.W_k[key].equal(part.W_k[key][:, kept])
        assert solution.part.W_q[heads].equal(part.W_q[heads][..., kept])
        if part.b_q is not None:
            assert solution.part.b_q[heads].equal(part.b_q[heads][..., kept])
        lost += sum(scores) - sum(scores[c] for c in kept)
    assert solution.loss == pytest.approx(lost, rel=1e-8, abs=1e-9 * solution.total)


@METHOD
@few
@given(
    seed=st.integers(0, 2**31 - 1), group=st.integers(1, 2), bias=st.booleans(), pairs=st.integers(1, 4), data=st.data()
)
def test_rotated_channels_stay_in_pairs_and_the_split_is_the_cheapest(
    method: str, seed: int, group: int, bias: bool, pairs: int, data: st.DataObject
) -> None:
    size = Size(seed=seed, width=8, group=group, bias=bias)
    part, x = qk_problem(size, pairs=pairs).part, energies(size)
    width = data.draw(st.sampled_from([w for w in range(1, 8) if pairs < 4 or w % 2 == 0]))
    solution = solution_of(method, "qk", part, {"x_energy": x}, width)
    scores = channel_scores(part, loudness(method, x))
    prices = {p: split_price(scores, pairs, p, width) for p in range(pairs + 1) if fits(pairs, p, width)}
    assert solution.loss == pytest.approx(min(prices.values()), rel=1e-8)
    p = solution.part.num_pairs
    assert prices[p] == pytest.approx(min(prices.values()))
    for key, row in enumerate(scores):
        kept = best([row[c] + row[c + pairs] for c in range(pairs)], p)
        rest = [2 * pairs + c for c in best(row[2 * pairs :], width - 2 * p)]
        channels = [*kept, *(pair + pairs for pair in kept), *rest]
        assert solution.part.W_k[key].equal(part.W_k[key][:, channels])
        assert solution.part.frequencies[key].tolist() == part.frequencies[key][kept].tolist()


def fits(pairs: int, p: int, width: int) -> bool:
    return 0 <= width - 2 * p <= 8 - 2 * pairs


def split_price(scores: list[list[float]], pairs: int, p: int, width: int) -> float:
    lost = 0.0
    for row in scores:
        paired = sorted(row[c] + row[c + pairs] for c in range(pairs))
        single = sorted(row[2 * pairs :])
        lost += sum(paired[: pairs - p]) + sum(single[: len(single) - (width - 2 * p)])
    return lost


@METHOD
@pytest.mark.parametrize("gated", [True, False])
@few
@given(size=sizes, data=st.data())
def test_neurons_stay_by_their_rows_of_the_down_projection(
    method: str, gated: bool, size: Size, data: st.DataObject
) -> None:
    part, X = mlp_problem(size, gated=gated)
    energy = X.square().mean(dim=0)
    width = data.draw(st.integers(1, part.width - 1))
    solution = solution_of(method, "mlp", part, {"down_energy": energy}, width)
    x = loudness(method, energy)
    scores = [x[i] * sum(abs(w) for w in part.W_down[i].tolist()) for i in range(part.width)]
    kept = best(scores, width)
    assert solution.part.W_down.equal(part.W_down[kept])
    assert solution.part.W_up.equal(part.W_up[:, kept])
    if gated:
        assert solution.part.W_gate.equal(part.W_gate[:, kept])
    assert solution.total == pytest.approx(sum(scores))
    assert solution.loss == pytest.approx(sum(scores) - sum(scores[i] for i in kept), abs=1e-9 * sum(scores))


@METHOD
def test_a_norms_denominator_is_corrected_as_in_a3(method: str) -> None:
    problem = normed_problem(jitter=0.05)
    x = energies(Size())
    moments = {**problem.moments, "x_energy": x}
    solution = solution_of(method, "qk", problem.part, moments, 4)
    assert solution.note.startswith("norm corrected")
    scores = channel_scores(problem.part, loudness(method, x))
    for key, row in enumerate(scores):
        kept = best([row[c] + row[c + 3] for c in range(3)], 2)
        assert solution.part.frequencies[key].tolist() == problem.part.frequencies[key][kept].tolist()


def test_scaling_queries_up_and_keys_down_changes_nothing() -> None:
    part = qk_problem(Size(group=2), pairs=3).part
    scaled = replace(part, W_q=8 * part.W_q, W_k=part.W_k / 8)
    before, after = (solution_of("magnitude", "qk", p, {}, 4).part for p in (part, scaled))
    assert before.frequencies.equal(after.frequencies)


def test_wanda_is_neither_magnitude_nor_a3() -> None:
    """Row sums of magnitudes are not norms: a spread-out row counts more than a peaked one of equal norm."""
    part, _ = mlp_problem(Size(d_model=6), gated=True)
    W = torch.zeros_like(part.W_down)
    W[0, 0], W[1] = 2.0, 2.0 / 5**0.5
    part = replace(part, W_down=W)
    energy = torch.tensor([1.1, 1.0, 0, 0, 0, 0], dtype=torch.float64)
    kept = {
        method: solution_of(method, "mlp", part, {name: energy}, 1).part.W_down[0]
        for method, name in (("a3", "mlp"), ("wanda", "down_energy"))
    }
    assert kept["a3"].equal(W[0])
    assert kept["wanda"].equal(W[1])
