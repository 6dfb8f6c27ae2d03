"""Mixtures: the grammar, and shares by largest remainder."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trisect.data.catalogue import parse_mixture
from trisect.data.load import count_windows
from trisect.errors import TrisectError

weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


@given(weights, st.integers(1, 500))
def test_counts_sum_to_samples_and_stay_within_one_of_their_quota(raw: list[float], samples: int):
    shares = [weight / sum(raw) for weight in raw]
    counts = count_windows(shares, samples=samples)
    assert sum(counts) == samples
    for count, share in zip(counts, shares, strict=True):
        assert math.floor(share * samples) <= count <= math.floor(share * samples) + 1


@given(weights, st.integers(1, 500))
def test_whoever_gets_an_extra_window_has_the_larger_remainder(raw: list[float], samples: int):
    shares = [weight / sum(raw) for weight in raw]
    counts = count_windows(shares, samples=samples)
    remainders = [share * samples % 1 for share in shares]
    pairs = zip(counts, shares, remainders, strict=True)
    extra = [(count > math.floor(share * samples), rest) for count, share, rest in pairs]
    lucky = [rest for more, rest in extra if more]
    others = [rest for more, rest in extra if not more]
    assert not lucky or not others or min(lucky) >= max(others)


def test_weights_are_relative_and_default_to_equal():
    assert [(i.source, i.share) for i in parse_mixture("a:3+b:1")] == [("a", 0.75), ("b", 0.25)]
    assert [(i.source, i.share) for i in parse_mixture("a + b")] == [("a", 0.5), ("b", 0.5)]
    assert [(i.source, i.share) for i in parse_mixture("a")] == [("a", 1.0)]


def test_an_existing_file_may_have_plus_and_colon_in_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c++:2.txt").write_text("x")
    (tmp_path / "notes:1.txt").write_text("x")
    assert [i.source for i in parse_mixture("c++:2.txt")] == ["c++:2.txt"]
    assert [i.source for i in parse_mixture("notes:1.txt+ptb")] == ["notes:1.txt", "ptb"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a:0.5+b", "none for b"),
        ("a:-1+b:2", "above 0"),
        ("a:nan+b:2", "above 0"),
        ("a:many+b:2", "above 0"),
        ("a++b", "empty source"),
        ("", "empty source"),
        (":0.5", "empty source"),
    ],
)
def test_bad_mixtures_are_refused_with_an_example(text: str, words: str):
    with pytest.raises(TrisectError, match=words):
        parse_mixture(text)
