"""What is planned against what was asked for: the right numbers, and what to type on too coarse a grid."""

import pytest
from plan_shapes import layer_shape, model_shape

from trisect.config import CompressConfig
from trisect.plan import budget_of, outlook, plan_for
from trisect.records.plan import apply_plan

STORIES = model_shape(
    *[layer_shape(qk=48, pairs=24, vo=48, mlp=768, heads=6, kv_heads=6, d_model=288)] * 6, other=9_219_744
)


def said(**settings: object) -> str:
    config = CompressConfig.from_dict(settings)
    return str(outlook(STORIES, config, plan_for(STORIES, config)))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"ratio": 0.25},
            "asked to remove 25.0%, planned 25.0% of the decoder weights (qk 32-48, ov 32-48, mlp 512-640)",
        ),
        (
            {"ratio": 0.25, "portable": True},
            "asked to remove 25.0%, planned 22.2% of the decoder weights (qk 32, ov 32, mlp 640); "
            "nearer: no --portable",
        ),
        (
            {"ratio": 0.5, "layers": [2], "parts": ["ov"]},
            "asked to remove 50.0%, planned 33.3% of the decoder weights (ov 32); nearer: --align 8 or --align none",
        ),
        ({"kv_ratio": 0.25}, "asked to remove 25.0%, planned 25.0% of the KV bytes per token (qk 32-48, ov 32-48)"),
        (
            {"target_params": "14M"},
            "asked for at most 14,000,000 parameters, planned 13,975,200 (qk 32-48, ov 32-48, mlp 512-640)",
        ),
    ],
)
def test_one_sentence_says_it(settings, sentence):
    assert said(**settings) == sentence


@pytest.mark.parametrize("ratio", [0.1, 0.125, 0.2, 0.25, 0.3, 0.375, 0.5])
def test_what_is_said_is_what_the_budget_counts(ratio):
    config = CompressConfig(ratio=ratio)
    plan = plan_for(STORIES, config)
    found, after = outlook(STORIES, config, plan), budget_of(apply_plan(STORIES, plan))
    assert found.planned == after.linear_parameters
    assert found.before == budget_of(STORIES).linear_parameters
    assert 0 <= ratio - found.removed < 0.01
    assert found.counts()["allowed"] == found.allowed


def test_what_is_named_as_nearer_is_nearer():
    one = {"ratio": 0.5, "layers": [2], "parts": ["ov"]}
    shares = []
    for align in ("16", "8", "none"):
        config = CompressConfig.from_dict({**one, "align": align})
        shares.append(outlook(STORIES, config, plan_for(STORIES, config)).removed)
    assert shares == sorted(shares)
    assert shares[-1] == 0.5
