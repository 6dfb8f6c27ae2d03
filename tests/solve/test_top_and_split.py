"""Selection [math.md R-1, R-2, M-1]: scores against their definition on samples, `top` and `split_width`
against exhaustive enumeration, ties by position."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from solve_problems import SEEDS, few
from torch import Tensor

from trisect.solve.select import neuron_scores, pair_scores, split_width, top

# Whole numbers: sums are exact and ties are common.
ENERGIES = st.integers(0, 9).map(float)


def table(draw: st.DataObject, *, heads: int, width: int) -> Tensor:
    row = st.lists(ENERGIES, min_size=width, max_size=width)
    rows = draw.draw(st.lists(row, min_size=heads, max_size=heads))
    return torch.tensor(rows, dtype=torch.float64).reshape(heads, width)


@few
@given(st.data(), st.integers(1, 3), st.integers(1, 6))
def test_top_drops_no_more_than_any_other_choice(data: st.DataObject, heads: int, width: int):
    count = data.draw(st.integers(0, width))
    scores = table(data, heads=heads, width=width)
    kept, lost = top(scores, count)
    assert kept.shape == (heads, count)
    for row, indices, loss in zip(scores, kept, lost, strict=True):
        assert loss == row.sum() - row[indices].sum()
        assert loss == min((row.sum() - row[list(c)].sum()).item() for c in combinations(range(width), count))


@few
@given(st.data(), st.integers(1, 40))
def test_ties_go_to_the_earlier_position_and_indices_ascend(data: st.DataObject, width: int):
    count = data.draw(st.integers(0, width))
    scores = table(data, heads=1, width=width)[0]
    kept, _ = top(scores, count)
    by_hand = sorted(range(width), key=lambda i: (-scores[i].item(), i))[:count]
    assert kept.tolist() == sorted(by_hand)


def test_pair_scores_multiply_energies_channel_by_channel_and_ignore_unrotated_ones():
    q = torch.tensor([[2.0, 3.0, 5.0, 7.0, 100.0]])
    k = torch.tensor([[11.0, 13.0, 17.0, 19.0, 100.0]])
    assert pair_scores(q, k, 2).tolist() == [[2 * 11 + 5 * 17, 3 * 13 + 7 * 19]]


@few
@given(SEEDS)
def test_a_neuron_scores_the_mean_squared_output_it_makes_alone(seed: int):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(30, 6, generator=generator, dtype=torch.float64)
    W_down = torch.randn(6, 4, generator=generator)
    scores = neuron_scores(x.square().mean(dim=0), W_down)
    assert scores.dtype == torch.float64
    for i in range(6):
        alone = x[:, i : i + 1] @ W_down[i : i + 1].double()
        assert scores[i].item() == pytest.approx(alone.square().sum(dim=-1).mean().item(), rel=1e-12)


@few
@given(SEEDS, st.integers(1, 3), st.integers(0, 5), st.integers(0, 6))
def test_split_width_is_the_cheapest_of_all_splits(seed: int, heads: int, num_pairs: int, num_slots: int):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 9, (heads, num_pairs), generator=generator).double()
    slots = torch.randint(0, 6, (heads, num_slots), generator=generator).double()

    def cost(pairs: int, width: int) -> float:
        return (top(scores, pairs)[1].sum() + top(slots, width - 2 * pairs)[1].sum()).item()

    for width in range(2 * num_pairs + num_slots + 1):
        splits = [p for p in range(num_pairs + 1) if 0 <= width - 2 * p <= num_slots]
        if splits:  # none at odd widths of heads without unrotated channels, which no plan asks for
            # min() takes the first of equals: ties keep fewer pairs.
            assert split_width(scores, slots, width) == min(splits, key=lambda p: cost(p, width))
