"""The kernel for one new token per text: heads turned, keys and values into their slot, attention over live slots.

References: softmax written out in float64 over the visible slots alone; rotation by complex numbers.
"""

from types import ModuleType
from typing import Any

import pytest
import torch
from caches import SCALE, written_out
from hypothesis import given, settings
from hypothesis import strategies as st
from rotations import Problem, answer, problem
from torch import Tensor

LENGTH = 40


def cache_for(p: Problem, vo: int, *, slot: int, seed: int = 3) -> tuple[Tensor, Tensor, Tensor]:
    """New values, and a cache in which whatever lies behind the live slots is no number."""
    g = torch.Generator().manual_seed(seed)
    batch, _, kv_heads, qk = p.k.shape
    v = torch.randn(batch, 1, kv_heads, vo, generator=g)
    keys, values = (torch.randn(batch, kv_heads, LENGTH, width, generator=g) for width in (qk, vo))
    keys[:, :, slot:], values[:, :, slot:] = torch.nan, torch.nan
    return v, keys, values


def expected_of(
    p: Problem, v: Tensor, keys: Tensor, values: Tensor, start: Tensor | None, slot: int, window: int | None
) -> tuple[Tensor, Tensor]:
    """Attention, and the new keys, of turned heads."""
    q, k = answer(p) if p.pairs else (p.q.double(), p.k.double())
    keys, values = keys.double(), values.double()
    keys[:, :, slot], values[:, :, slot] = k[:, 0], v[:, 0].double()
    return written_out(q.transpose(1, 2), keys, values, start, slot, window), k[:, 0]


@given(
    group=st.integers(1, 3),
    widths=st.tuples(st.sampled_from([(3, 3), (4, 0), (40, 16)]), st.sampled_from([5, 8, 48, 96])),
    slot=st.integers(0, LENGTH - 1),
    splits=st.sampled_from([1, 4]),
    padded=st.booleans(),
    window=st.sampled_from([None, 9]),
    kind=st.sampled_from(["shared", "index", "rates"]),
    layout=st.sampled_from(["half", "adjacent"]),
    twin=st.booleans(),
)
@settings(max_examples=30, deadline=None)
def test_attention_over_the_live_slots_equals_softmax_written_out(
    kernels: dict[str, ModuleType],
    group: int,
    widths: tuple[tuple[int, int], int],
    slot: int,
    splits: int,
    padded: bool,
    window: int | None,
    kind: str,
    layout: str,
    twin: bool,
) -> None:
    (pairs, rest), vo = widths
    p = problem(length=1, group=group, pairs=pairs, rest=rest, kind=kind, layout=layout, first=11, strided=True)
    v, keys, values = cache_for(p, vo, slot=slot)
    start = torch.tensor([0, 3]).clamp(max=slot) if padded else None
    expected, key = expected_of(p, v, keys, values, start, slot, window)
    before, counters = (keys.clone(), values.clone()), torch.zeros(4, dtype=torch.int32)
    arguments: Any = p.q, p.k, v, keys, values, start, torch.tensor([slot]), *p.flat(), counters
    if twin:
        for x in (keys, values):  # two plain products cannot leave out what is no number
            x[:, :, slot + 1 :] = 0
        found = torch.ops.trisect.attend_one(*arguments, pairs, layout == "adjacent", SCALE, window)
    else:
        module = kernels["triton_decode"]
        how: Any = {"pairs": pairs, "adjacent": layout == "adjacent", "scale": SCALE, "window": window}
        found = module.launch_attend(*arguments, **how, tiles=module.Tiles(block=16, splits=splits))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(keys[:, :, slot].double(), key, rtol=3e-6, atol=3e-6)
    assert values[:, :, slot].equal(v[:, 0])
    assert keys[:, :, :slot].equal(before[0][:, :, :slot])
    assert values[:, :, :slot].equal(before[1][:, :, :slot])
    assert not counters.any()


@pytest.mark.parametrize("twin", [False, True])
def test_heads_without_a_rotation_go_into_the_cache_as_they_are(kernels: dict[str, ModuleType], twin: bool) -> None:
    p = problem(length=1, pairs=6, kind="shared")
    p.pairs = 0
    v, keys, values = cache_for(p, 12, slot=LENGTH - 1)
    expected, _ = expected_of(p, v, keys, values, None, LENGTH - 1, None)
    nothing, counters = [None] * 5, torch.zeros(4, dtype=torch.int32)
    arguments: Any = p.q, p.k, v, keys, values, None, torch.tensor([LENGTH - 1]), *nothing, counters
    attend: Any = torch.ops.trisect.attend_one
    if twin:
        found = attend(*arguments, 0, False, SCALE, None)
    else:
        launch = kernels["triton_decode"].launch_attend
        found = launch(*arguments, pairs=0, adjacent=False, scale=SCALE, window=None)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert keys[:, :, -1].equal(p.k[:, 0])


def test_low_precision_heads_are_summed_in_float32(kernels: dict[str, ModuleType]) -> None:
    # The interpreter has no products of bfloat16.
    p = problem(length=1, group=4, pairs=8, dtype=torch.float16)
    v, keys, values = (x.half() for x in cache_for(p, 16, slot=LENGTH - 1))
    expected, _ = expected_of(p, v, keys, values, None, LENGTH - 1, None)
    arguments: Any = p.q, p.k, v, keys, values, None, torch.tensor([LENGTH - 1]), *p.flat()
    module = kernels["triton_decode"]
    found = module.launch_attend(
        *arguments, torch.zeros(4, dtype=torch.int32), pairs=8, adjacent=False, scale=SCALE, window=None,
        tiles=module.Tiles(16, 2),
    )  # fmt: skip
    torch.testing.assert_close(found.double(), expected, rtol=4e-3, atol=4e-3)


def test_splits_fill_the_gpu_without_running_out_of_slots(kernels: dict[str, ModuleType]) -> None:
    choose = kernels["triton_decode"].chosen_tiles
    assert choose(40 * 32, 2048).splits == 1
    assert choose(40, 2048).splits * 40 >= 2 * 132
    assert choose(1, 256).splits * 2 * choose(1, 256).block <= 256


def test_a_width_is_held_by_powers_of_two_with_little_to_spare(kernels: dict[str, ModuleType]) -> None:
    for width in range(1, 257):
        parts = kernels["triton_decode"].in_powers(width)
        assert sum(parts) >= width
        assert all(part == 0 or (part >= 16 and part & (part - 1) == 0) for part in parts)
        assert sum(parts) <= max(16, 2 * width)
    assert [kernels["triton_decode"].in_powers(width) for width in (48, 80, 96, 112)] == [
        (64, 0),
        (64, 32),
        (64, 32),
        (128, 0),
    ]


def test_the_operator_of_decoding_keeps_the_rules_of_torch() -> None:
    p = problem(length=1, group=2, pairs=3, kind="rates")
    v, keys, values = (x.nan_to_num() for x in cache_for(p, 4, slot=5))
    for start in (None, torch.tensor([0, 2])):
        arguments = (p.q, p.k, v, keys, values, start, torch.tensor([5]), *p.flat(), torch.zeros(4, dtype=torch.int32))
        torch.library.opcheck(torch.ops.trisect.attend_one.default, (*arguments, p.pairs, False, SCALE, None))
