"""Experts of any width run. Reference: the stock module, expert by expert."""

import pytest
import torch

from tiny_models import logits, tiny, tokens
from tolerances import assert_same_but_for_rounding, steps_of
from trisect.models import layer_views


@pytest.mark.parametrize("width", [17, 18, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_widths_that_grouped_products_refuse_are_run_expert_by_expert(width: int, dtype: torch.dtype) -> None:
    model = tiny("qwen3_moe-all", dtype=dtype)
    for view in layer_views(model):
        blank = view.experts.blank(width, dropped=0)
        for tensors in (vars(mlp) for mlp in blank.routed):
            for tensor in tensors.values():
                if tensor is not None:
                    torch.nn.init.normal_(tensor, std=0.2)
        view.write(blank)
    found = logits(model, tokens())
    model.set_experts_implementation("eager")
    assert_same_but_for_rounding(found, logits(model, tokens()), steps=steps_of(model), dtype=torch.float32)
