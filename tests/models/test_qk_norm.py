"""QK-norm: the corrected denominator, and QK left whole where the correction would lie.

Reference: RMS-norm over the full head, computed by hand.
"""

import pytest
import torch

from tiny_models import tiny, tokens
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.errors import TrisectError
from trisect.models import layer_views, shape_of
from trisect.models.heads import HeadNorm
from trisect.pipeline.run import compress

CALIBRATION = tokens_from_tensor(tokens(6, 40))


def silence_pairs(model: torch.nn.Module, pairs: list[int]) -> None:
    """Make some rotation pairs carry almost nothing, so that dropping them is nearly free."""
    for view in layer_views(model):
        for name in ("q_proj", "k_proj"):
            weight = getattr(view.attention_module, name).weight
            heads = weight.view(-1, 16, weight.shape[-1])
            with torch.no_grad():
                heads[:, pairs + [p + 8 for p in pairs]] *= 1e-4


def test_dropping_silent_pairs_keeps_the_logits_of_a_normed_model() -> None:
    model, ids = tiny("qwen3"), tokens()
    silence_pairs(model, [1, 4])
    with torch.no_grad():
        before = model(ids).logits
    result = compress(model, CompressConfig(ratio=0.25, method="a3", parts=("qk",), align=None), tokens=CALIBRATION)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, before, rtol=1e-3, atol=1e-3)
    assert shape_of(model).layers[0].qk == 12
    assert all("norm corrected" in entry["note"] for entry in result.losses)


def test_the_narrow_norm_divides_by_the_calibrated_full_mean_square() -> None:
    model = tiny("qwen3")
    stock = layer_views(tiny("qwen3"))[0].attention_module
    config = CompressConfig(ratio=0.25, method="a3", parts=("qk",), align=None, qk_norm_tolerance=1.0)
    compress(model, config, tokens=CALIBRATION)
    narrow = layer_views(model)[0].attention
    assert isinstance(narrow.q_norm, HeadNorm)
    kept = narrow.rotary_index.long()
    channels = torch.cat([kept, kept + 8], dim=1).repeat_interleave(3, dim=0)  # (h, r)
    x = torch.randn(2000, 48)
    full = stock.q_proj(x).unflatten(-1, (6, 16))
    mean_full = full.square().mean(-1)
    mean_kept = full.gather(2, channels.expand(2000, -1, -1)).square().mean(-1)
    weight = stock.q_norm.weight[channels] / narrow.q_norm.weight  # sqrt of the factor, per channel
    factor = weight.square().mean(-1)
    torch.testing.assert_close(weight.square(), factor[:, None].expand_as(weight), rtol=1e-4, atol=1e-4)
    # A least-squares factor is unbiased on the inputs' own scale to first order.
    ratio = (mean_full.mean(0) / mean_kept.mean(0)).detach()
    torch.testing.assert_close(factor.detach(), ratio, rtol=0.35, atol=0)


def test_a_norm_over_all_heads_is_corrected_by_one_factor() -> None:
    """Against mean squares over all heads, gathered by hand."""
    model, stock = tiny("olmo2"), layer_views(tiny("olmo2"))[0].attention_module
    config = CompressConfig(ratio=0.25, method="a3", parts=("qk",), align=None, qk_norm_tolerance=1.0)
    compress(model, config, tokens=CALIBRATION)
    narrow = layer_views(model)[0].attention
    kept = narrow.rotary_index.long()
    channels = torch.cat([kept, kept + 8], dim=1).repeat_interleave(3, dim=0)  # (h, r)
    places = (channels + 16 * torch.arange(6).unsqueeze(-1)).flatten()
    x = model.get_input_embeddings()(CALIBRATION.ids).flatten(0, 1)  # OLMo 2 has no norm in front
    squares = stock.q_proj(x).square().double()
    full, some = squares.mean(-1), squares[:, places].mean(-1)
    factor = (full * some).mean() / some.square().mean()
    expected = stock.q_norm.weight.unflatten(0, (6, 16)).gather(1, channels) / factor.sqrt()
    torch.testing.assert_close(narrow.q_norm.weight, expected.float(), rtol=1e-5, atol=1e-6)


def test_queries_behind_a_layer_norm_keep_their_width_and_the_run_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("stablelm-parallel")
    compress(model, CompressConfig(ratio=0.25, method="a3", align=None), tokens=CALIBRATION)
    shape = shape_of(model).layers[0]
    assert (shape.qk, shape.vo) == (16, 12)
    assert "qk of layers 0-2: a LayerNorm between projection and score" in caplog.text
    with pytest.raises(TrisectError, match="None of the layers has qk to narrow"):
        compress(tiny("phi-norms"), CompressConfig(ratio=0.25, method="a3", parts=("qk",)), tokens=CALIBRATION)


def test_qk_stays_whole_where_the_norm_would_be_off() -> None:
    model = tiny("qwen3")
    before = {k: v.clone() for k, v in model.state_dict().items() if "self_attn" in k}
    config = CompressConfig(ratio=0.5, method="a3", parts=("qk", "mlp"), align=None, qk_norm_tolerance=0.01)
    result = compress(model, config, tokens=CALIBRATION)
    notes = [entry["note"] for entry in result.losses if entry["component"] == "qk"]
    assert notes
    assert all("QK left whole" in note for note in notes)
    assert shape_of(model).layers[0].qk == 16
    assert result.plan.layers[0].qk == 16
    after = model.state_dict()
    assert all(after[key].equal(value) for key, value in before.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_norm_equals_rms_norm_written_out(dtype: torch.dtype) -> None:
    norm = HeadNorm(3, 5, eps=1e-6).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(2, 4, 3, 5).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.double()
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(norm(x).double(), expected, rtol=tolerance, atol=tolerance)
