"""A model prepared for inference is the same model in fewer kernels.

References: the unprepared model; transformers' own norm and MLP modules; the norm's formula in float64.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.helium.modeling_helium import HeliumRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo.modeling_olmo import OlmoLayerNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated
from transformers.models.t5.modeling_t5 import T5LayerNorm

from narrow_models import narrow
from tiny_models import CONFIGS, LLAMA, PLAIN, SDPA, logits, shake, tiny, tokens
from trisect.decode import prepare as gates
from trisect.decode import prepare_for_inference
from trisect.decode.prepare import FusedGate, FusedNorm, PackedGate, fuse_norm
from trisect.models.heads import HeadNorm

WITHOUT_RMS = (
    "mpt",
    "gpt2",
    "opt",
    "gpt_neox",
    "cohere",
    "falcon",
    "nemotron",
    "phi-",
    "phi$",
    "stablelm",
    "starcoder2",
)
GATED = ("cohere", "stablelm")


def norms_by_name(model: nn.Module) -> set[str]:
    """Modules that transformers calls RMS norms."""
    ours = {name for name, module in model.named_modules() if type(module).__name__.endswith("RMSNorm")}
    return set() if "gemma" in model.config.model_type else ours  # Gemma's multiply by 1 + weight


def fused(model: nn.Module, kind: type[nn.Module] = FusedNorm) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, kind)}


def example(norm: nn.Module, width: int, dtype: torch.dtype = torch.float32) -> tuple[Any, Any, Tensor]:
    """A norm with weights of its own, the same one fused, and rows of several sizes."""
    shake(norm, seed=width)
    norm = norm.to(dtype)
    ours = copy.deepcopy(norm)
    fuse_norm(ours)
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(6, width, generator=generator) * torch.logspace(-4, 2, 6)[:, None] + 0.1
    return norm, ours, x.to(dtype)


@pytest.mark.parametrize("name", PLAIN)
def test_every_family_prepared_computes_the_same_with_all_its_rms_norms_fused(name: str) -> None:
    model, ids = tiny(name, attention="sdpa" if name in SDPA else None), tokens()
    expected, rms = logits(model, ids), norms_by_name(model)
    prepare_for_inference(model)
    torch.testing.assert_close(logits(model, ids), expected, rtol=1e-5, atol=1e-5 * expected.abs().max())
    assert fused(model) == rms
    without = f"{name}$".startswith(WITHOUT_RMS)
    assert bool(rms) == (not without and "gemma" not in name)
    layers = model.config.get_text_config().num_hidden_layers
    gates_of = len(fused(model, FusedGate)), len(fused(model, PackedGate))
    none = without and not name.startswith(GATED)
    assert gates_of == ((0, 0) if none else (0, layers) if name.startswith("phi3") else (layers, 0))


def test_a_llama_has_two_norms_a_layer_and_one_behind_them_and_all_share_one_class() -> None:
    model = prepare_for_inference(tiny("llama-gqa"))
    names = fused(model)
    assert len(names) == 2 * 3 + 1
    assert len({type(model.get_submodule(name)) for name in names}) == 1
    assert all(isinstance(model.get_submodule(name), LlamaRMSNorm) for name in names)


@pytest.mark.parametrize("name", ["llama-gqa", "phi3", "qwen3"])
def test_preparing_again_changes_nothing_not_even_where_weights_lie(name: str) -> None:
    """A second Decoder of a model must leave the first one's graphs what they read."""
    model = prepare_for_inference(tiny(name))
    found = []
    for _ in range(2):
        kinds = [type(module) for module in model.modules()]
        found.append((kinds, [parameter.data_ptr() for parameter in model.parameters()]))
        prepare_for_inference(model)
    assert found[0] == found[1]


def test_norms_between_projection_and_rotation_are_fused_until_heads_have_their_own() -> None:
    whole, cut = prepare_for_inference(tiny("qwen3")), prepare_for_inference(narrow("qwen3"))
    assert len(fused(whole)) == 4 * 3 + 1
    assert len(fused(cut)) == 2 * 3 + 1
    assert len(fused(cut, HeadNorm)) == 2 * 3
    assert not fused(cut) & fused(cut, HeadNorm)


class Look(nn.Module):
    """A norm that is one of Llama's but for what a subclass changes."""

    def __init__(self, width: int = 12):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * self.factor(wide)).to(x.dtype)

    def factor(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


class EpsilonOutside(Look):
    def factor(self, x: Tensor) -> Tensor:
        return 1 / (x.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class Summed(Look):
    def factor(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.square().sum(-1, keepdim=True) + self.variance_epsilon)


class Centred(Look):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class Widening(Look):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float()


class WithBias(Look):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(12))


@pytest.mark.parametrize(
    "norm",
    [
        GemmaRMSNorm(12),
        OlmoLayerNorm(12),
        Qwen3NextRMSNormGated(12),
        nn.LayerNorm(12, bias=False),
        nn.LayerNorm(12),
        nn.RMSNorm(12),
        nn.Linear(12, 12, bias=False),
        HeadNorm(2, 6, 1e-6),
        EpsilonOutside(),
        Summed(),
        Centred(),
        Widening(),
        WithBias(),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_what_computes_something_else_is_left_alone(norm: nn.Module) -> None:
    kind = type(norm)
    fuse_norm(norm)
    assert type(norm) is kind


def test_a_norm_that_somebody_patched_or_that_has_no_weights_yet_is_left_alone() -> None:
    patched, empty = LlamaRMSNorm(8), LlamaRMSNorm(8).to("meta")
    patched.forward = lambda x: 2 * x  # type: ignore[method-assign]
    for norm in (patched, empty):
        fuse_norm(norm)
        assert type(norm) is LlamaRMSNorm


@given(
    kind=st.sampled_from([LlamaRMSNorm, HeliumRMSNorm, Olmo2RMSNorm, T5LayerNorm, Look]),
    width=st.one_of(st.integers(1, 70), st.sampled_from([80, 576, 688])),
)
@settings(max_examples=30)
def test_fused_norms_of_any_width_equal_the_stock_ones(kind: Any, width: int) -> None:
    stock, ours, x = example(kind(width), width)
    assert isinstance(ours, FusedNorm)
    torch.testing.assert_close(ours(x), stock(x), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [80, 576])
def test_in_sixteen_bits_a_fused_norm_is_closer_to_the_exact_one(dtype: torch.dtype, width: int) -> None:
    stock, ours, x = example(LlamaRMSNorm(width), width, dtype)
    exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + stock.variance_epsilon)
    exact = exact * stock.weight.double()
    errors = [(norm(x).double() - exact).abs().mean() for norm in (ours, stock)]
    assert ours(x).dtype == dtype
    assert 0 < errors[0] < errors[1]


@pytest.mark.parametrize(
    ("weight", "given"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
def test_types_that_torch_would_treat_otherwise_run_as_stock(weight: torch.dtype, given: torch.dtype) -> None:
    stock, ours, x = example(LlamaRMSNorm(24), 24, weight)
    assert isinstance(ours, FusedNorm)
    expected = stock(x.to(given))
    assert ours(x.to(given)).dtype == expected.dtype
    assert ours(x.to(given)).equal(expected)


def test_gradients_of_a_fused_norm_are_those_of_the_stock_one() -> None:
    stock, ours, x = example(LlamaRMSNorm(24), 24)
    found = []
    for norm in (ours, stock):
        given = x.clone().requires_grad_()
        norm(given).sin().sum().backward()
        found.append((given.grad, norm.weight.grad))
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def test_hooks_hear_calls_of_a_fused_norm_and_nothing_of_its_making() -> None:
    norm, heard = LlamaRMSNorm(8), []
    norm.register_forward_hook(lambda *_: heard.append(1))
    weight = norm.weight
    fuse_norm(norm)
    assert isinstance(norm, FusedNorm)
    assert not heard
    assert norm.weight is weight
    norm(torch.ones(1, 8))
    assert len(heard) == 1


@pytest.mark.parametrize("name", ["llama-gqa", "llama-biases", "phi3"])
def test_a_prepared_model_gates_in_one_call_only_where_the_activation_is_silu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Tensor] = []

    def counted(y: Tensor) -> Tensor:
        calls.append(y)
        return gated(y)

    gated = gates.gated
    monkeypatch.setattr(gates, "gated", counted)
    for activation, count in (("silu", 3), ("swish", 3), ("gelu", 0), ("relu", 0)):
        config = CONFIGS[name]()
        config.hidden_act = activation
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        expected = logits(model, tokens())
        prepare_for_inference(model)
        calls.clear()
        torch.testing.assert_close(logits(model, tokens()), expected, rtol=1e-5, atol=1e-5)
        assert len(calls) == count


def test_a_prepared_model_saves_what_the_stock_one_saves_and_moves_as_it_does(tmp_path: Path) -> None:
    stock = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).eval()
    model = prepare_for_inference(copy.deepcopy(stock))
    assert list(model.state_dict()) == list(stock.state_dict())
    for each, folder in ((stock, "stock"), (model, "ours")):
        each.save_pretrained(tmp_path / folder)
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("stock", "ours")]
    assert configs[0] == configs[1]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert not fused(loaded)
    assert all(loaded.state_dict()[key].equal(value) for key, value in stock.state_dict().items())
    halves, expected = model.to(torch.bfloat16), copy.deepcopy(stock).to(torch.bfloat16)
    for key, value in expected.state_dict().items():
        assert halves.state_dict()[key].equal(value)
    torch.testing.assert_close(logits(halves, tokens()), logits(expected, tokens()), rtol=0.05, atol=0.02)
