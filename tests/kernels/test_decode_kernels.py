"""Kernels for one new token per text: attention over the live slots, and the write into the cache.

References: softmax written out in float64 over the visible slots alone; rotation by complex numbers.
"""

from types import ModuleType
from typing import Any

import pytest
import torch
from caches import SCALE, cached, written_out
from hypothesis import given, settings
from hypothesis import strategies as st
from rotations import answer, problem


@given(
    heads=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 3)),
    widths=st.tuples(st.sampled_from([3, 8, 20]), st.sampled_from([5, 8, 20])),
    stop=st.integers(0, 39),
    splits=st.sampled_from([1, 4]),
    padded=st.booleans(),
    window=st.sampled_from([None, 9]),
)
@settings(max_examples=20)
def test_attention_over_the_live_slots_equals_softmax_written_out(
    kernels: dict[str, ModuleType],
    heads: tuple[int, int, int],
    widths: tuple[int, int],
    stop: int,
    splits: int,
    padded: bool,
    window: int | None,
) -> None:
    q, keys, values = cached(*heads, *widths, length=40)
    start = torch.tensor([0, 3][: heads[0]]).clamp(max=stop) if padded else None
    # What lies beyond the live slots must not matter.
    keys[:, :, stop + 1 :] = torch.nan
    values[:, :, stop + 1 :] = torch.nan
    module = kernels["triton_decode"]
    found = module.launch_attend(
        q, keys, values, start, torch.tensor([stop]),
        scale=SCALE, window=window, tiles=module.Tiles(block=16, splits=splits),
    )  # fmt: skip
    expected = written_out(q, keys, values, start, stop, window)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_twin_of_the_attention_kernel_gives_the_same() -> None:
    for window, start in ((None, None), (9, torch.tensor([0, 3]))):
        q, keys, values = cached(2, 2, 3, 12, 20, 40)
        found = torch.ops.trisect.attend_one(q, keys, values, start, torch.tensor([25]), SCALE, window)
        expected = written_out(q, keys, values, start, 25, window)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_low_precision_heads_are_summed_in_float32(kernels: dict[str, ModuleType]) -> None:
    # The interpreter has no products of bfloat16.
    q, keys, values = cached(1, 1, 4, 16, 16, 64, torch.float16)
    module = kernels["triton_decode"]
    found = module.launch_attend(
        q, keys, values, None, torch.tensor([63]), scale=SCALE, window=None, tiles=module.Tiles(16, 2)
    )
    expected = written_out(q, keys, values, None, 63, None)
    torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=2e-3)


def test_splits_fill_the_gpu_without_running_out_of_slots(kernels: dict[str, ModuleType]) -> None:
    choose = kernels["triton_decode"].chosen_tiles
    assert choose(40 * 32, 2048).splits == 1
    assert choose(40, 2048).splits * 40 >= 2 * 132
    assert choose(1, 256).splits * 2 * choose(1, 256).block <= 256


@pytest.mark.parametrize("kind", ["shared", "index", "rates"])
@pytest.mark.parametrize("layout", ["half", "adjacent"])
def test_the_write_kernel_and_its_twin_turn_heads_into_their_slot(
    kernels: dict[str, ModuleType], kind: str, layout: str
) -> None:
    for rest in (0, 3):
        made: dict[str, Any] = {"length": 1, "kind": kind, "layout": layout, "rest": rest, "first": 11}
        expected_q, expected_k = answer(problem(**made, strided=True))
        for write in (kernels["triton_decode"].launch_write, None):
            p = problem(**made, strided=True)
            v = torch.randn(2, 1, 2, 7, generator=torch.Generator().manual_seed(3))
            keys, values = torch.zeros(2, 2, 6, p.k.shape[3]), torch.zeros(2, 2, 6, 7)
            arguments = p.q, p.k, v, keys, values, torch.tensor([4]), *p.flat()
            if write is None:
                torch.ops.trisect.rotate_write_(*arguments, p.pairs, layout == "adjacent")
            else:
                write(*arguments, pairs=p.pairs, adjacent=layout == "adjacent")
            close = {"rtol": 3e-6, "atol": 3e-6}
            torch.testing.assert_close(p.q.double(), expected_q, **close)
            torch.testing.assert_close(keys[:, :, 4:5].double(), expected_k.transpose(1, 2), **close)
            assert values[:, :, 4:5].equal(v.transpose(1, 2))
            assert not keys[:, :, [0, 1, 2, 3, 5]].any()
            assert not values[:, :, [0, 1, 2, 3, 5]].any()


def test_the_operators_of_decoding_keep_the_rules_of_torch() -> None:
    q, keys, values = cached(2, 2, 2, 6, 4, 8)
    stop = torch.tensor([5])
    for start in (None, torch.tensor([0, 2])):
        torch.library.opcheck(torch.ops.trisect.attend_one.default, (q, keys, values, start, stop, SCALE, None))
    p = problem(length=1, group=2, pairs=3, kind="rates")
    v = torch.randn(2, 1, 2, 4)
    arguments = (p.q, p.k, v, keys, values, stop, *p.flat(), p.pairs, False)
    torch.library.opcheck(torch.ops.trisect.rotate_write_.default, arguments)
