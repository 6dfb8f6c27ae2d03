"""Perplexity by position against a plain loop over tokens, and against the perplexity of the whole."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from trisect.cli import main
from trisect.data.tokens import Tokens, tokens_from_tensor
from trisect.errors import TrisectError
from trisect.evaluate.perplexity import PositionProfile, perplexity
from trisect.evaluate.perplexity import perplexity_by_position as both_measurements

LENGTH = 21
WINDOWS = 5


@pytest.fixture
def model(random_model: Any) -> Any:
    return random_model[0]


@pytest.fixture
def tokens() -> Tokens:
    ids = torch.randint(2, 97, (WINDOWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return tokens_from_tensor(ids, "random ids")


def profile_of(model: Any, tokens: Tokens, **settings: Any) -> PositionProfile:
    return both_measurements(model, tokens, **settings)[1]


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
    assert profile.edges == (1, LENGTH)
    assert profile.nll[0] == pytest.approx(whole.nll, rel=1e-13)


def test_buckets_differ_in_length_by_one_at_most(model, tokens) -> None:
    edges = profile_of(model, tokens, buckets=8).edges
    assert {end - start for start, end in zip(edges, edges[1:], strict=False)} == {2, 3}


def test_round_windows_have_round_edges(model) -> None:
    ids = tokens_from_tensor(torch.ones(1, 64, dtype=torch.int64))
    assert profile_of(model, ids, buckets=4).edges == (1, 16, 32, 48, 64)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7])
def test_the_batch_size_does_not_change_the_profile(model, tokens, batch_size: int) -> None:
    steps: list[tuple[int, int]] = []
    settings: dict[str, Any] = {"batch_size": batch_size, "progress": lambda *step: steps.append(step)}
    profile = profile_of(model, tokens, buckets=4, **settings)
    assert profile.nll == pytest.approx(profile_of(model, tokens, buckets=4).nll, rel=1e-6)
    assert steps == [(min(at + batch_size, 5), 5) for at in range(0, 5, batch_size)]


def test_one_pass_gives_both_measurements(model, tokens) -> None:
    whole, _ = both_measurements(model, tokens, buckets=5)
    assert whole == perplexity(model, tokens)


def test_a_late_position_that_is_worse_is_seen_where_it_is(model, tokens) -> None:
    ids = tokens.ids.clone()
    before = profile_of(model, tokens, buckets=20)
    ids[:, -1] = (ids[:, -1] + 1) % 97  # the last token is predicted, and predicts nothing
    after = profile_of(model, tokens_from_tensor(ids), buckets=20)
    assert after.nll[:-1] == before.nll[:-1]
    assert after.nll[-1] != before.nll[-1]


def test_buckets_that_no_window_can_fill_are_refused(model, tokens) -> None:
    with pytest.raises(TrisectError, match=r"predict 20 positions.*--length 22 or more.*--by-position 20"):
        profile_of(model, tokens, buckets=LENGTH)
    with pytest.raises(TrisectError, match="--by-position 1 or more"):
        profile_of(model, tokens, buckets=0)


def test_the_command_prints_a_row_per_bucket_and_writes_them(
    random_model: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in random_model:
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    common = ["eval", str(tmp_path / "model"), "--data", str(tmp_path / "text.txt"), "--length", "32", "-q"]
    assert main([*common, "--json", str(tmp_path / "whole.json")]) == 0
    assert "positions" not in capsys.readouterr().out
    assert main([*common, "--by-position", "4", "--json", str(tmp_path / "both.json")]) == 0
    printed = capsys.readouterr().out
    assert [row in printed for row in ("1 to 7", "8 to 15", "16 to 23", "24 to 31")] == [True] * 4
    both = json.loads((tmp_path / "both.json").read_text())
    profile = both.pop("by_position")
    assert both == json.loads((tmp_path / "whole.json").read_text())
    assert profile["edges"] == [1, 8, 16, 24, 32]
    assert sum(profile["tokens"]) == both["tokens"]
    assert set(profile) == {"edges", "nll", "perplexity", "tokens", "data", "token_hash"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--by-position", "32", "--length", "32"], "--by-position 31 or less"),
        (["--by-position", "0"], "--by-position 1 or more"),
        (["--by-position", "4", "--tasks", "openbookqa"], "add --data builtin"),
    ],
)
def test_a_bad_command_fails_before_a_model_is_loaded(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "no-such-model", *arguments]) == 2
    assert message in capsys.readouterr().err
