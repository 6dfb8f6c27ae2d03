"""Perplexity by position against a plain loop over tokens, and against the perplexity of the whole."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loading import module_at
from trisect.data.tokens import Tokens, tokens_from_tensor
from trisect.evaluate.perplexity import perplexity

POSITIONS = module_at(Path(__file__).resolve().parents[2] / "experiments" / "positions.py")
LENGTH = 21
WINDOWS = 5


@pytest.fixture
def model(random_model: Any) -> Any:
    return random_model[0]


@pytest.fixture
def tokens() -> Tokens:
    ids = torch.randint(2, 97, (WINDOWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return tokens_from_tensor(ids, "random ids")


def profile_of(model: Any, tokens: Tokens, **settings: Any) -> SimpleNamespace:
    return SimpleNamespace(**POSITIONS.perplexity_by_position(model, tokens, **settings))


def loss_at(model: Any, tokens: Tokens, position: int) -> float:
    """Mean over the windows, each token from a forward pass over nothing but what stands before it."""
    with torch.inference_mode():
        logits = model.eval()(tokens.ids[:, :position]).logits[:, -1].double()
    logs = logits.log_softmax(-1)
    return -sum(float(logs[w, tokens.ids[w, position]]) for w in range(WINDOWS)) / WINDOWS


@pytest.mark.parametrize("buckets", [1, 3, 8, LENGTH - 1])
def test_each_bucket_is_a_plain_loop_over_its_positions(model, tokens, buckets: int) -> None:
    profile = profile_of(model, tokens, buckets=buckets)
    assert len(profile.edges) == buckets + 1
    assert (profile.edges[0], profile.edges[-1]) == (1, LENGTH)
    assert (profile.data, profile.token_hash) == ("random ids", tokens.hash)
    for index in range(buckets):
        positions = range(profile.edges[index], profile.edges[index + 1])
        expected = sum(loss_at(model, tokens, position) for position in positions) / len(positions)
        assert profile.tokens[index] == WINDOWS * len(positions)
        assert profile.nll[index] == pytest.approx(expected, rel=1e-5)
        assert profile.perplexity[index] == math.exp(profile.nll[index])


@pytest.mark.parametrize("buckets", [1, 2, 7, LENGTH - 1])
def test_the_weighted_mean_of_the_buckets_is_the_whole(model, tokens, buckets: int) -> None:
    profile, whole = profile_of(model, tokens, buckets=buckets), perplexity(model, tokens)
    assert sum(profile.tokens) == whole.tokens
    weighted = sum(nll * count for nll, count in zip(profile.nll, profile.tokens, strict=True))
    assert weighted / whole.tokens == pytest.approx(whole.nll, rel=1e-13)


def test_one_bucket_is_the_whole(model, tokens) -> None:
    profile, whole = profile_of(model, tokens, buckets=1), perplexity(model, tokens)
    assert profile.edges == [1, LENGTH]
    assert profile.nll[0] == pytest.approx(whole.nll, rel=1e-13)


def test_buckets_differ_in_length_by_one_at_most(model, tokens) -> None:
    edges = profile_of(model, tokens, buckets=8).edges
    assert {end - start for start, end in zip(edges, edges[1:], strict=False)} == {2, 3}


def test_round_windows_have_round_edges(model) -> None:
    ids = tokens_from_tensor(torch.ones(1, 64, dtype=torch.int64))
    assert profile_of(model, ids, buckets=4).edges == [1, 16, 32, 48, 64]


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7])
def test_the_batch_size_does_not_change_the_profile(model, tokens, batch_size: int) -> None:
    profile = profile_of(model, tokens, buckets=4, batch_size=batch_size)
    assert profile.nll == pytest.approx(profile_of(model, tokens, buckets=4).nll, rel=1e-6)


def test_a_late_position_that_is_worse_is_seen_where_it_is(model, tokens) -> None:
    ids = tokens.ids.clone()
    before = profile_of(model, tokens, buckets=20)
    ids[:, -1] = (ids[:, -1] + 1) % 97  # the last token is predicted, and predicts nothing
    after = profile_of(model, tokens_from_tensor(ids), buckets=20)
    assert after.nll[:-1] == before.nll[:-1]
    assert after.nll[-1] != before.nll[-1]


def test_buckets_that_no_window_can_fill_are_refused(model, tokens) -> None:
    for buckets in (LENGTH, 0):
        with pytest.raises(ValueError, match="predict 20 positions"):
            profile_of(model, tokens, buckets=buckets)
