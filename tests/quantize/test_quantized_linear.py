"""Quantised weights are those that hqq and torchao themselves make."""

import math

import pytest
import torch
from quantize_models import need_hqq
from torch import nn

from trisect.config import verbs
from trisect.errors import TrisectError
from trisect.models.linear import BITS, QuantizedLinear
from trisect.quantize import QuantizeConfig, group_sizes, quantized_linear


def linear(d_in: int = 96, d_out: int = 40, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(d_in, d_out, bias=bias)


def made(layer: nn.Linear, *, group_size: int, **settings: object) -> QuantizedLinear:
    return quantized_linear(layer, QuantizeConfig(**settings), group_size)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("group_size", [32, 8])
def test_the_weight_is_the_one_of_hqqs_own_linear_layer(bits: int, group_size: int) -> None:
    need_hqq()
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    layer = linear(bias=True)
    x = torch.randn(3, 5, 96)
    ours = made(layer, bits=bits, group_size=group_size)
    config = BaseQuantizeConfig(nbits=bits, group_size=group_size, axis=1)
    theirs = HQQLinear(layer, config, compute_dtype=torch.float32, device="cpu")
    # Their scales and zeros are float32 here and ours float16, as theirs are on a GPU.
    assert torch.allclose(ours.dequantized(), theirs.dequantize(), rtol=2e-3, atol=2e-4)
    assert torch.allclose(ours(x), theirs(x), rtol=1e-2, atol=2e-3)
    levels = (theirs.dequantize().view(-1, group_size) / theirs.meta["scale"] + theirs.meta["zero"]).round()
    back = (levels.half() - theirs.meta["zero"].half()).float() * theirs.meta["scale"].half().float()
    assert torch.allclose(ours.dequantized(), back.view(40, 96), rtol=1e-3, atol=1e-6)


def test_torchao_int8_gives_torchaos_outputs() -> None:
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    layer = linear(d_in=52, bias=True)
    x = torch.randn(3, 5, 52)
    ours = made(layer, bits=8, backend="torchao", group_size=52)
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig(set_inductor_config=False))
    assert torch.equal(ours.dequantized(), layer.weight.dequantize())
    assert torch.allclose(ours(x), layer(x), atol=1e-6)


def test_no_weight_is_much_further_off_than_half_a_step_and_more_bits_are_nearer() -> None:
    need_hqq()
    layer = linear()
    weight = layer.weight.detach()
    groups = weight.view(40, -1, 16)
    means = []
    for bits in (8, 4, 3, 2):
        error = (made(layer, bits=bits, group_size=16).dequantized() - weight).abs()
        means.append(error.mean().item())
        step = (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)
        # HQQ moves zeros, so that the outermost weights of a group may be rounded by more than half a step.
        assert (error.view(40, -1, 16).amax(-1) <= 1.1 * step).all()
    assert means == sorted(means)


def test_casting_a_model_leaves_the_quantised_weight_alone() -> None:
    need_hqq()
    layer = made(linear(bias=True), bits=4, group_size=32)
    before = layer.dequantized()
    layer.to(torch.bfloat16)
    assert torch.equal(layer.dequantized(), before)
    assert layer.bias is not None
    assert layer.bias.dtype == layer(torch.randn(2, 96, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_groups_far_from_zero_keep_wide_scales() -> None:
    need_hqq()
    layer = linear()
    with torch.no_grad():
        layer.weight.copy_(100 + 1e-3 * torch.rand(40, 96))
    quantised = made(layer, bits=4, group_size=32)
    assert quantised.packing.scales == "float32"
    assert torch.allclose(quantised.dequantized(), layer.weight, atol=0.1)


def test_gradients_pass_through_to_the_input() -> None:
    need_hqq()
    layer = made(linear(), bits=4, group_size=32)
    x = torch.randn(2, 96, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert torch.allclose(x.grad, layer.dequantized().sum(0).expand(2, -1), atol=1e-5)
    assert not list(layer.parameters())


@pytest.mark.parametrize(("inputs", "size"), [(1152, 128), (576, 64), (432, 16), (96, 32), (80, 16), (40, 8)])
def test_auto_takes_the_largest_size_that_divides(inputs: int, size: int) -> None:
    with torch.device("meta"):
        modules: dict[str, nn.Module] = {"q": nn.Linear(inputs, 8)}
    assert group_sizes(modules, QuantizeConfig()) == {"q": size}


def test_groups_that_would_straddle_rows_are_refused_with_those_that_do_not() -> None:
    need_hqq()
    from hqq.core.quantize import BaseQuantizeConfig, Quantizer

    layer = linear(d_in=200, d_out=32)
    # hqq itself takes it: 200 * 32 weights are whole groups of 64, though no row is.
    settings = BaseQuantizeConfig(nbits=4, group_size=64, axis=1)["weight_quant_params"]
    assert Quantizer.quantize(layer.weight, **settings, device="cpu")[0].numel() == math.prod(layer.weight.shape) // 2
    with pytest.raises(TrisectError, match="Groups of 64 do not divide the 200 inputs of q; 8 do") as caught:
        group_sizes({"q": layer}, QuantizeConfig(group_size=64))
    assert "--group-size auto" in str(caught.value)
    with pytest.raises(TrisectError, match="q has 52 inputs, which no group size divides"):
        group_sizes({"q": linear(d_in=52)}, QuantizeConfig())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 5}, "Cannot quantise to 5 bits; use one of 8, 4, 3, 2"),
        ({"backend": "gptq"}, "Known: hqq, torchao"),
        ({"group_size": 12}, "must be a multiple of 8"),
        ({"backend": "torchao"}, "--bits 8 without"),
        ({"parts": ("attention",)}, "Known: mlp, ov, qk"),
        ({"parts": ()}, "No parts were named"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(TrisectError, match=message):
        QuantizeConfig(**settings)  # type: ignore[arg-type]
    assert verbs.BITS == BITS, "the command line offers what can be packed"
