"""Windows and hashes, against the formulas that define them."""

import hashlib
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trisect.data.tokens import content_hash, tokens_from_tensor, windows
from trisect.errors import TrisectError

lengths = st.integers(1, 9)
seeds = st.integers(0, 2**31)


@given(extra=st.integers(0, 40), length=lengths)
def test_first_windows_laid_end_to_end_are_the_start_of_the_text(extra: int, length: int):
    ids = torch.arange(length + extra)
    cut = windows(ids, samples=None, length=length, sampling="first", seed=0)
    assert len(cut) == len(ids) // length
    assert cut.flatten().tolist() == list(range(len(cut) * length))


@given(extra=st.integers(0, 40), length=lengths, samples=st.integers(1, 12), seed=seeds)
def test_random_windows_are_consecutive_and_inside_the_text(extra: int, length: int, samples: int, seed: int):
    ids = torch.arange(length + extra)
    cut = windows(ids, samples=samples, length=length, sampling="random", seed=seed)
    assert cut.shape == (samples, length)
    assert 0 <= int(cut.min())
    assert int(cut.max()) < len(ids)
    assert torch.equal(cut - cut[:, :1], torch.arange(length).expand(samples, length))


@given(extra=st.integers(0, 40), length=lengths, samples=st.integers(1, 12), seed=seeds)
def test_random_windows_share_no_token_where_the_text_has_room(extra: int, length: int, samples: int, seed: int):
    cut = windows(torch.arange(samples * length + extra), samples=samples, length=length, sampling="random", seed=seed)
    assert len(cut.unique()) == cut.numel()


@given(length=st.integers(2, 9), samples=st.integers(2, 12), seed=seeds, data=st.data())
def test_windows_of_a_short_text_overlap_as_little_as_they_can(
    length: int, samples: int, seed: int, data: st.DataObject
):
    size = data.draw(st.integers(length, samples * length - 1))
    cut = windows(torch.arange(size), samples=samples, length=length, sampling="random", seed=seed)
    steps = cut[:, 0].sort().values.diff()
    assert int(steps.max() - steps.min()) <= 1  # evenly spread, from the first token to the last
    assert (int(cut.min()), int(cut.max())) == (0, size - 1)


def test_a_random_window_starts_at_every_position_that_fits_equally_often():
    starts = [int(windows(torch.arange(12), samples=1, length=9, sampling="random", seed=s)[0, 0]) for s in range(2000)]
    counts = torch.bincount(torch.tensor(starts))
    assert len(counts) == 4  # starts 0, 1, 2, 3
    assert (counts - 500).abs().max() < 5 * (2000 * 0.25 * 0.75) ** 0.5


@given(seed=seeds)
def test_same_seed_same_windows_and_another_seed_others(seed: int):
    def draw(chosen: int) -> torch.Tensor:
        return windows(torch.arange(100_000), samples=8, length=4, sampling="random", seed=chosen)

    assert torch.equal(draw(seed), draw(seed))
    assert not torch.equal(draw(seed), draw(seed + 1))


@pytest.mark.parametrize("sampling", ["first", "random"])
def test_a_text_shorter_than_a_window_says_both_numbers(sampling: str):
    with pytest.raises(TrisectError, match=r"5 tokens.*needs 8.*--length 5"):
        windows(torch.arange(5), samples=1, length=8, sampling=sampling, seed=0)


def test_an_empty_text_is_refused():
    with pytest.raises(TrisectError, match="0 tokens"):
        windows(torch.arange(0), samples=None, length=8, sampling="first", seed=0)


def test_too_few_first_windows_says_how_many_there_are():
    with pytest.raises(TrisectError, match=r"3 windows of 4.*7 were asked.*--samples 3"):
        windows(torch.arange(15), samples=7, length=4, sampling="first", seed=0)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"sampling": "frist"}, "Did you mean first"),
        ({"samples": 0}, "--samples 1"),
        ({"length": 0}, "--length"),
        ({"samples": None, "sampling": "random"}, "--sampling first"),
    ],
)
def test_impossible_requests_name_the_option(request_: dict, words: str):
    asked = {"samples": 1, "length": 2, "sampling": "first", "seed": 0} | request_
    with pytest.raises(TrisectError, match=words):
        windows(torch.arange(10), **asked)


def test_rows_are_drawn_without_replacement_and_cut_at_their_end():
    table = torch.arange(30).reshape(6, 5)
    drawn = windows(table, samples=6, length=3, sampling="random", seed=3, source="x")
    assert sorted(drawn.tolist()) == table[:, :3].tolist()
    first = windows(table, samples=2, length=5, sampling="first", seed=3, source="x")
    assert torch.equal(first, table[:2])
    with pytest.raises(TrisectError, match="windows of 5 tokens"):
        windows(table, samples=2, length=6, sampling="first", seed=3, source="x")
    with pytest.raises(TrisectError, match="--samples 6"):
        windows(table, samples=7, length=5, sampling="first", seed=3, source="x")


@given(st.lists(st.lists(st.integers(0, 2**40), min_size=3, max_size=3), min_size=1, max_size=5))
def test_the_hash_is_sha256_of_shape_and_content(table: list[list[int]]):
    flat = [len(table), 3, *(value for row in table for value in row)]
    expected = hashlib.sha256(struct.pack(f"<{len(flat)}q", *flat)).hexdigest()
    assert tokens_from_tensor(torch.tensor(table)).hash == expected


def test_the_hash_tells_shapes_and_contents_apart():
    ids = torch.arange(6)
    changed = ids.clone()
    changed[5] = 9
    shapes = [ids.reshape(2, 3), ids.reshape(3, 2), changed.reshape(2, 3)]
    assert len({content_hash(shape) for shape in shapes}) == 3


def test_writing_into_the_callers_tensor_leaves_the_tokens_alone():
    ids = torch.zeros(2, 3, dtype=torch.int64)
    tokens = tokens_from_tensor(ids)
    ids += 1
    assert tokens.hash == content_hash(tokens.ids)
    assert tokens == tokens_from_tensor(torch.zeros(2, 3, dtype=torch.int32))


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (torch.arange(4), "unsqueeze"),
        (torch.zeros(0, 4, dtype=torch.int64), "neither of them 0"),
        (torch.zeros(2, 2), "float32"),
        (torch.full((1, 2), -100), "-100"),
    ],
)
def test_tensors_that_are_not_token_ids_are_refused(ids: torch.Tensor, words: str):
    with pytest.raises(TrisectError, match=words):
        tokens_from_tensor(ids)
