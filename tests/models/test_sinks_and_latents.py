"""Attention sinks and latent attention: what is computed, what is solved, what is cached.

References: softmax written out; the weighted SVD of the whole bilinear form; the tensors in the cache.
"""

from typing import Any

import pytest
import torch

from narrow_models import narrow
from tiny_models import left_padded, tiny, tokens
from tolerances import assert_same_but_for_rounding, assert_same_text
from trisect.calibrate import collect
from trisect.calibrate.scores import AWAKE, PairGrams, QuerySampler
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.decode import Decoder
from trisect.errors import TrisectError
from trisect.kernels.sdpa import sdpa
from trisect.methods import METHODS
from trisect.methods.method import Options
from trisect.models import layer_views, shape_of
from trisect.pipeline.run import compress
from trisect.plan import budget_of
from trisect.plan.budget import cached_channels


def heads(*, length: int = 5, seen: int = 5) -> tuple[torch.Tensor, ...]:
    """Queries of 6 heads, keys and values of 2, logits of the sinks."""
    draw = torch.Generator().manual_seed(0)
    shapes = (2, 6, length, 8), (2, 2, seen, 8), (2, 2, seen, 4), (6,)
    q, k, v, sinks = (torch.randn(shape, generator=draw) for shape in shapes)
    return q, k, v, sinks


@pytest.mark.parametrize("mask", ["causal", "bool", "float", "one token"])
def test_a_sink_joins_the_softmax_and_adds_nothing(mask: str) -> None:
    q, k, v, sinks = heads(length=1 if mask == "one token" else 5)
    visible = torch.ones(q.shape[2], 5, dtype=torch.bool)
    visible = visible if mask == "one token" else visible.tril()
    if mask in ("bool", "float"):
        visible = visible & torch.ones_like(visible).triu(-2)
    given = {"bool": visible[None, None], "float": torch.where(visible, 0.0, -1e9)[None, None]}.get(mask)
    found = sdpa(q, k, v, given, scale=0.3, sinks=sinks)
    for head in range(6):
        scores = (q[:, head] @ k[:, head // 3].mT * 0.3).masked_fill(~visible, -torch.inf)
        shares = torch.cat([scores, sinks[head].expand(*scores.shape[:2], 1)], dim=-1).softmax(dim=-1)[..., :-1]
        assert (shares.sum(dim=-1) < 1).all()
        assert_same_but_for_rounding(found[:, :, head], shares @ v[:, head // 3], steps=4)


def test_sampled_scores_have_the_sink_as_one_more_key_of_zeros() -> None:
    draw = torch.Generator().manual_seed(1)
    q, key = torch.randn(1, 9, 4, 8, generator=draw), torch.randn(1, 9, 2, 8, generator=draw)
    sinks = torch.randn(4, generator=draw)
    sampler = QuerySampler([PairGrams(4)], per_window=5, seed=7)
    found, _ = sampler(q, key, None, sinks)
    expected = torch.zeros(4, 8, 8, dtype=torch.float64)
    for m in sampler.positions(0, 9).tolist():
        for head in range(4):
            x, y = q[0, m, head].double(), key[0, : m + 1, head // 2].double()
            shares = torch.cat([y @ x, sinks[head, None].double()]).softmax(0)
            p = (1 - AWAKE) * shares + AWAKE * torch.cat([torch.ones(m + 1), torch.zeros(1)]) / (m + 1)
            s = x[:4] * y[:, :4] + x[4:] * y[:, 4:]
            quad = x[:4] * y[:, 4:] - x[4:] * y[:, :4]
            z = torch.cat([torch.cat([s, quad], dim=1), torch.zeros(1, 8)])
            z = z - p @ z
            expected[head] += z.mT @ (p[:, None] * z)
    torch.testing.assert_close(found["scores"], expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v3-plain-q"])
def test_the_unrotated_scores_of_a_narrow_head_are_the_best_of_their_rank(name: str) -> None:
    """In the metric of the latents: against the SVD of the whole form, roots of moments on both sides."""
    model, ids = tiny(name).double(), tokens(8, 20)
    model.set_experts_implementation("eager")
    inputs: dict[str, torch.Tensor] = {}
    first = layer_views(model, own=True)[0]
    for linear in ("q", "k"):
        first.module(linear).register_forward_pre_hook(
            lambda module, args, linear=linear: inputs.update({linear: args[0].flatten(0, 1)})
        )
    view, moments = next(collect(model, ids, lambda layer: METHODS["a3"].reads["qk"]))
    part = view.part("qk")
    solution = METHODS["a3"].solvers["qk"](part, moments, 6, Options())
    roots = {}
    for linear, x in inputs.items():
        values, vectors = torch.linalg.eigh(x.mT @ x / len(x))
        roots[linear] = vectors * values.clamp(min=0).sqrt() @ vectors.mT
    best = lost = 0.0
    for head in range(len(part.W_q)):
        form = roots["q"] @ part.W_q[head] @ part.W_k[head].mT @ roots["k"]
        best += torch.linalg.svdvals(form)[6:].square().sum().item()
        kept = solution.part.W_q[head] @ solution.part.W_k[head].mT
        lost += (form - roots["q"] @ kept @ roots["k"]).square().sum().item()
    assert lost == pytest.approx(best, rel=1e-6)
    assert solution.loss == pytest.approx(best, rel=1e-6)


def test_latents_are_cached_and_no_width_changes_them() -> None:
    before, after = (shape_of(model) for model in (tiny("deepseek_v3"), narrow("deepseek_v3")))
    assert [cached_channels(layer) for layer in after.layers] == [32 + 8, 32 + 8]
    assert budget_of(after).kv_bytes_per_token == budget_of(before).kv_bytes_per_token
    assert all(new.qk < old.qk and new.vo < old.vo for old, new in zip(before.layers, after.layers, strict=True))
    assert all(layer.rotated == 8 for layer in after.layers)


@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss-unbiased", "deepseek_v3", "deepseek_v2", "glm4_moe"])
def test_the_decoder_writes_what_generate_does(name: str) -> None:
    model, ids = narrow(name), tokens(2, 8)
    mask = left_padded(ids)
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(ids, attention_mask=mask, **settings)
    decoder = Decoder(model, batch=2, max_length=16, bucket=4)
    assert_same_text(model, decoder.generate(ids, 6, attention_mask=mask), expected, mask)


def test_methods_on_maps_of_the_hidden_states_pass_over_those_of_latents() -> None:
    settings = CompressConfig(ratio=0.25, method="svd-llm")
    done = compress(tiny("deepseek_v3-plain-q"), settings, tokens=tokens_from_tensor(tokens(8, 40)))
    assert {entry["component"] for entry in done.losses} == {"o", "gate", "up", "down"}
    config = CompressConfig(ratio=0.25, method="wanda", parts=("qk", "mlp"), align=None)
    with pytest.raises(TrisectError, match=r"made of latents.*--parts mlp"):
        compress(tiny("deepseek_v3"), config, tokens=tokens_from_tensor(tokens(8, 40)))
