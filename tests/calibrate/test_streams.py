"""Two streams and sampled scores: targets, held-out tokens and covariances, against hand-written passes."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tiny_models import FAMILIES, tiny, tokens
from trisect.calibrate import TwoStreams
from trisect.calibrate.scores import AWAKE, FEWEST, MOST_APART, QUERIES, PairGrams, QuerySampler, shares
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.errors import TrisectError
from trisect.methods import METHODS
from trisect.models import layer_views
from trisect.models.heads import gain, post_norm
from trisect.pipeline.run import compress
from trisect.pipeline.statistics import calibrate


def relative_gap(model: torch.nn.Module, reference: torch.nn.Module, ids: Tensor) -> float:
    with torch.no_grad():
        dense = reference(ids).logits
        return ((model(ids).logits - dense).square().sum() / dense.square().sum()).item()


@pytest.mark.parametrize("name", FAMILIES)
def test_repairing_beats_the_paper_on_every_family(name: str) -> None:
    calibration, fresh = tokens_from_tensor(tokens(40, 48, seed=5)), tokens(8, 48, seed=9)
    gaps = {}
    for method in ("a3", "a3+"):
        model = tiny(name)
        config = CompressConfig(ratio=0.25, method=method, align=None, qk_norm_tolerance=1.0)
        compress(model, config, tokens=calibration)
        gaps[method] = relative_gap(model, tiny(name), fresh)
    assert gaps["a3+"] < gaps["a3"]


@pytest.mark.parametrize("name", ["llama-gqa", "gpt_neox", "gpt2", "mpt", "gemma3"])
def test_at_the_first_layer_the_target_is_the_layers_own_output(name: str) -> None:
    """Both streams are the same there, so the dense projections solve the regression without error."""
    model, ids = tiny(name).double(), tokens(16, 12)
    views = layer_views(model, own=True)
    streams = TwoStreams(model, views, ids, batch_size=None, seed=0)
    view = views[0]
    streams.begin(view)
    for component, tap in (("ov", "a"), ("mlp", "mlp")):
        moments = streams.statistics(view, component, METHODS["a3+"].reads[component])
        part = view.part(component)
        W = part.W_o.flatten(0, 1) if component == "ov" else part.W_down
        for suffix in ("", "_held"):
            gram, cross = moments[f"{tap}_gram{suffix}"], moments[f"{tap}_target{suffix}"]
            torch.testing.assert_close(gram @ W, cross, rtol=1e-6, atol=1e-8)
            energy = (W * (gram @ W)).sum()
            torch.testing.assert_close(moments[f"{tap}_energy{suffix}"], energy, rtol=1e-6, atol=1e-8)
    total = moments["mlp_tokens"] + moments["mlp_tokens_held"]
    assert total == ids.numel()
    assert moments["mlp_tokens_held"] >= ids.numel() / 16


@pytest.mark.parametrize("name", ["llama-gqa", "gpt_neox", "lfm2", "falcon_h1"])
def test_the_targets_close_the_gap_to_the_dense_residual_stream(name: str) -> None:
    """Whatever a damaged first layer leaves undone is in the last layer's targets, attention there or not."""
    model, ids = tiny(name).double(), tokens(8, 12)
    *others, last = layer_views(model, own=True)
    streams = TwoStreams(model, [*others, last], ids, batch_size=None, seed=0)
    for view in others:
        streams.begin(view)
        with torch.no_grad():
            view.module("down").weight.mul_(0.5)
        streams.finish(view)
    streams.begin(last)
    states, dense = streams.narrow.hidden[0], streams.before[0]
    assert not torch.allclose(states, dense)
    attended = [torch.randn_like(states)]
    beside = [] if last.beside is None else [torch.randn_like(states)]
    target = streams._target(last, 0, states, attended, beside)
    biases = (getattr(module, "bias", None) for module in (last.mixer, last.module("down")))
    missing = sum(b for b in biases if isinstance(b, torch.Tensor))
    layer: Any = last.layer
    scales = (layer.attn_out_multiplier, layer.feed_forward.down_multiplier) if beside else (1.0, 1.0)
    whole = states + scales[0] * attended[0] + scales[1] * target("down")
    whole = whole + layer.ssm_out_multiplier * beside[0] if beside else whole
    torch.testing.assert_close(whole + missing, streams.dense.hidden[0], rtol=1e-9, atol=1e-9)


def test_one_window_is_not_enough_to_hold_any_out() -> None:
    config = CompressConfig(ratio=0.25, method="a3+", align=None)
    one = tokens_from_tensor(tokens(1, 40))
    with pytest.raises(TrisectError, match="at least two calibration windows"):
        compress(tiny("llama-gqa"), config, tokens=one)


@pytest.mark.parametrize("name", ["gemma3"])
def test_behind_a_post_norm_the_targets_close_the_gap_at_the_dense_denominator(name: str) -> None:
    """A channel that the norm silences has its own output as target, however large its gap."""
    model, ids = tiny(name).double(), tokens(8, 12)
    views = layer_views(model, own=True)
    silent = 5
    with torch.no_grad():
        for path in views[1].family.post_norms:
            views[1].layer.get_submodule(path).weight[silent] = 1e-9 - views[1].family.norm_offset
    streams = TwoStreams(model, views, ids, batch_size=None, seed=0)
    streams.begin(views[0])
    with torch.no_grad():
        views[0].mlp_output.weight.mul_(0.5)
    streams.finish(views[0])
    streams.begin(views[1])
    states, dense = streams.narrow.hidden[0], streams.before[0]
    target = streams._target(views[1], 0, states, [streams.attention_out[0]])
    heard = torch.arange(dense.shape[-1]) != silent
    for tap, component, output in (("a", "ov", streams.attention_out[0]), ("down", "mlp", streams.mlp_out[0])):
        weight, eps = post_norm(views[1].layer, views[1].family, component)
        size = (output.square().mean(-1, keepdim=True) + eps).sqrt()
        front = target(tap) / gain(views[1].layer, views[1].family, component)
        moved = weight * (front - output) / size
        torch.testing.assert_close(moved[..., heard], (dense - states)[..., heard], rtol=1e-6, atol=1e-9)
        assert front[..., silent].equal(output[..., silent])


@pytest.mark.parametrize("mask", ["none", "bool", "float"])
def test_sampled_scores_are_attention_weighted_covariances(mask: str) -> None:
    generator = torch.Generator().manual_seed(0)
    b, t, h, k, d, P = 2, 9, 4, 2, 8, 3
    q = torch.randn(b, t, h, d, generator=generator)
    key = torch.randn(b, t, k, d, generator=generator)
    window = torch.ones(t, t).tril().triu(-4).bool()[None, None]
    given = {"none": None, "bool": window, "float": torch.where(window, 0.0, -1e9)}[mask]
    sampler = QuerySampler([PairGrams(P)], per_window=5, seed=7)
    found, count = sampler(q, key, given)
    assert count == 10
    assert found.keys() == {"scores"}
    expected = torch.zeros(h, 2 * P, 2 * P, dtype=torch.float64)
    for i in range(b):
        for m in sampler.positions(i, t).tolist():
            visible = [n for n in range(m + 1) if mask == "none" or n >= m - 4]
            for head in range(h):
                x, y = q[i, m, head].double(), key[i, visible, head // 2].double()
                p = (1 - AWAKE) * (y @ x).softmax(0) + AWAKE / len(visible)
                s = x[:P] * y[:, :P] + x[P : 2 * P] * y[:, P : 2 * P]
                quad = x[:P] * y[:, P : 2 * P] - x[P : 2 * P] * y[:, :P]
                z = torch.cat([s, quad], dim=1)
                z = z - p @ z
                expected[head] += (z * p[:, None]).T @ z
    torch.testing.assert_close(found["scores"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("numbers", [[0, 1, 2, 3], [3, 4, 5, 6], [5, 6, 7, 9]])
def test_of_many_windows_some_are_sampled_the_same_in_any_batch(numbers: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(4, 9, heads, 8, generator=generator) for heads in (4, 2))
    sampler = QuerySampler([PairGrams(3)], per_window=5, seed=7, every=4)
    sampler.numbers = numbers
    found, count = sampler(q, k)
    alone = QuerySampler([PairGrams(3)], per_window=5, seed=7)
    expected = torch.zeros_like(found["scores"])  # also of a batch without any, for other processes to add theirs
    for place, number in enumerate(numbers):
        if number % 4 == 0:
            alone.numbers = [number]
            expected += alone(q[place : place + 1], k[place : place + 1])[0]["scores"]
    assert count == 5 * sum(number % 4 == 0 for number in numbers)
    torch.testing.assert_close(found["scores"], expected, rtol=1e-6, atol=1e-9)


@given(windows=st.integers(1, 5000), tokens=st.integers(64, 8192))
def test_queries_are_as_many_as_wanted_and_not_all_of_a_few_windows(windows: int, tokens: int) -> None:
    each, every = shares(windows, tokens)
    sampled = -(-windows // every)
    assert every <= MOST_APART
    assert each * sampled >= min(QUERIES, sampled * max(64, tokens // 8))
    assert each <= max(64, tokens // 8)
    if windows >= QUERIES // FEWEST and every < MOST_APART:
        assert FEWEST <= each <= 2 * FEWEST


def test_stored_moments_are_refused_for_a_method_that_repairs() -> None:
    config = CompressConfig(ratio=0.25, method="a3+", align=None)
    with pytest.raises(TrisectError, match="--method a3"):
        calibrate(tiny("llama-gqa"), config, "unused")
    with pytest.raises(TrisectError, match="--method a3"):
        compress(tiny("llama-gqa"), config, moments="unused")
