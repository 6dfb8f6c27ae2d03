"""How far apart two computations of the same thing may come out, whatever the CPU.

The same operations on the same memory layout give the same bits, and tests of those ask for equal bits.
Where kernels, layout, batch or cache differ, the same terms are added in another order; instruction set and
number of threads decide in which. Tests of those take their tolerance from here.
"""

from typing import Any

import torch
from torch import Tensor

ULPS = 4
"""Of one step: a sum of a hundred terms in two orders, in units in the last place of the largest result.

Every addition rounds by half a unit at most, and as often up as down: n of them come to about sqrt(n) / 2
units of a typical result, and the largest result of a tensor is worth a few typical ones. Longer sums of tiny
models are made of several that run side by side."""
LAYER_STEPS = 10
"""Of a decoder layer, one behind the other: norm, keys, rotation, scores, softmax, mix, o; norm, up, down."""

RECURRENT_STEPS = 40
"""More of a layer whose state goes from token to token: as many as the texts of these tests have tokens."""


def rounding(dtype: torch.dtype, *, steps: int) -> float:
    """What rounding may change after so many steps, as a share of the largest result."""
    return ULPS * steps * torch.finfo(dtype).eps


def steps_of(model: Any) -> int:
    """From tokens to logits: the layers, the last norm and the head."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return LAYER_STEPS * config.num_hidden_layers + RECURRENT_STEPS * list(kinds).count("linear_attention") + 2


def assert_same_but_for_rounding(
    found: Tensor, expected: Tensor, *, steps: int, dtype: torch.dtype | None = None
) -> None:
    """Within a share of the largest result: a small one beside it is the difference of large terms.

    `dtype` is that of the steps, where sums of them were gathered in a wider one.
    """
    share = rounding(dtype or expected.dtype, steps=steps)
    torch.testing.assert_close(found, expected, rtol=0, atol=share * expected.abs().max().item())


@torch.no_grad()
def assert_same_model(found: Any, expected: Any, ids: Tensor) -> None:
    """Equal bits in all tensors; equal logits but for rounding: files forget how a matrix lay in memory."""
    mine, others = found.state_dict(), expected.state_dict()
    assert mine.keys() == others.keys(), sorted(mine.keys() ^ others.keys())
    changed = [key for key, value in others.items() if not mine[key].equal(value)]
    assert not changed, changed
    assert_same_but_for_rounding(found(ids).logits, expected(ids).logits, steps=steps_of(expected))


@torch.no_grad()
def assert_same_text(model: Any, found: Tensor, expected: Tensor, mask: Tensor | None = None) -> None:
    """Greedy texts are the same, or part where two tokens are equally likely but for rounding."""
    if found.equal(expected):
        return
    assert found.shape == expected.shape, "one text is longer"
    seen = torch.ones_like(expected)
    if mask is not None:
        seen[:, : mask.shape[1]] = mask
    scores = model(expected, attention_mask=seen, use_cache=False).logits
    tie = rounding(scores.dtype, steps=steps_of(model)) * scores.abs().max()
    for row, differ in enumerate(found != expected):
        if differ.any():
            place = int(differ.nonzero()[0])
            rivals = scores[row, place - 1, torch.stack([found[row, place], expected[row, place]])]
            assert (rivals[0] - rivals[1]).abs() <= 2 * tie, f"text {row} parts at token {place}"
