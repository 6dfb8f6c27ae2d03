"""One set of rates for many heads. Reference: transformers' own longrope, and counting by hand."""

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trisect.export.stock import common_slots, listed_rope, padded, places_in, stock_factors


def test_a_rate_has_as_many_slots_as_one_head_needs_of_it() -> None:
    layers = [torch.tensor([[1.0, 0.5, 0.5], [0.5, 0.1, 0.1]]), torch.tensor([[0.1, 1.0, 0.5]])]
    assert common_slots(layers).tolist() == pytest.approx([1.0, 0.5, 0.5, 0.1, 0.1])


def test_rates_one_unit_apart_are_one() -> None:
    near = torch.nextafter(torch.tensor(0.3), torch.tensor(1.0))
    assert len(common_slots([torch.stack([near, torch.tensor(0.3)]).unsqueeze(1)])) == 1
    assert len(common_slots([torch.tensor([[0.3], [0.30001]])])) == 2


def test_every_pair_finds_a_slot_of_its_rate() -> None:
    rates = torch.tensor([[0.1, 0.5, 0.5], [1.0, 0.1, 0.5]])
    slots = torch.tensor([1.0, 0.5, 0.5, 0.1])
    places = places_in(rates, slots)
    assert places is not None
    assert torch.equal(slots[places], rates)
    assert all(len(set(row)) == 3 for row in places.tolist())
    assert places_in(rates, slots[[0, 1, 3]]) is None


def test_padding_repeats_the_slowest() -> None:
    assert padded(torch.tensor([1.0, 0.25]), 4).tolist() == [1.0, 0.25, 0.25, 0.25]


@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_transformers_turns_at_the_rates_asked_for(base: float) -> None:
    rates = torch.rand(24, generator=torch.Generator().manual_seed(0)).sort(descending=True).values
    rope = listed_rope(stock_factors(rates, base), base, 4096)
    config = transformers.LlamaConfig(
        hidden_size=96, num_attention_heads=2, head_dim=48, max_position_embeddings=4096, rope_parameters=rope
    )
    for length in (None, 8192):
        found, scaling = ROPE_INIT_FUNCTIONS["longrope"](config, None, seq_len=length)
        assert scaling == 1.0
        torch.testing.assert_close(found, rates, rtol=1.2e-7, atol=0)
