"""Adapters sit on the decoder's own maps, learn, and merge into exactly the weights the formula says."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D
from tuning import OVERFIT, compressed, examples, settings

from tiny_models import CONFIGS, MIXTURES, tiny, tokens
from trisect.errors import TrisectError
from trisect.finetune import Examples, finetune
from trisect.finetune.examples import collate
from trisect.finetune.training import (
    LONGEST_GRADIENT,
    attach,
    logits_of,
    measure,
    merge,
    rate_at,
    summed_loss,
    target_modules,
)
from trisect.models import layer_views, shape_of


def loss_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    return summed_loss(model(**inputs), batch["labels"])


def shake_adapters(adapted: Any, *, seed: int = 0) -> None:
    """B starts at zero; make it count."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in MIXTURES])
def test_every_family_learns_when_compressed_and_merges_without_loss(name: str) -> None:
    model = compressed(name)
    shape, data = shape_of(model), examples(3)
    before = measure(model, data)["nll"]
    tuned = finetune(model, data, settings(**OVERFIT))
    assert measure(model, data)["nll"] < before - 0.05
    assert tuned["merge_difference"] < 1e-4
    assert shape_of(model) == shape
    assert not [n for n, _ in model.named_parameters() if "lora" in n]
    adapted = {id(m) for m in target_modules(model, None).values()}
    assert adapted == {id(m) for view in layer_views(model) for m in view.projections()}


def test_a_mixture_learns_in_its_attention_and_its_experts_stay() -> None:
    model, data = compressed("mixtral"), examples(3)
    before, weights = measure(model, data)["nll"], model.model.layers[0].mlp.experts.down_proj.clone()
    finetune(model, data, settings(**OVERFIT))
    assert measure(model, data)["nll"] < before - 0.05
    assert model.model.layers[0].mlp.experts.down_proj.equal(weights)
    assert all(".self_attn." in name for name in target_modules(model, None))
    with pytest.raises(TrisectError, match="Known: k, o, q, v"):
        target_modules(model, ("up",))


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2"])
def test_a_dense_model_is_tuned_too(name: str) -> None:
    model, data = tiny(name), examples(3)
    before = measure(model, data)["nll"]
    finetune(model, data, settings(**OVERFIT))
    assert measure(model, data)["nll"] < before - 0.05


@pytest.mark.parametrize("method", ["svd-llm", "palu"])
def test_factored_maps_are_tuned_factor_by_factor(method: str) -> None:
    model, data = compressed("llama-gqa", method), examples(3)
    before, shape = measure(model, data)["nll"], shape_of(model)
    tuned = finetune(model, data, settings(**OVERFIT))
    assert measure(model, data)["nll"] < before - 0.05
    assert tuned["merge_difference"] < 1e-4
    assert shape_of(model) == shape


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "phi3"])
def test_merging_adds_alpha_over_rank_times_b_a(name: str) -> None:
    model = compressed(name)
    before = {n: m.weight.detach().clone() for n, m in target_modules(model, None).items()}
    rest = {n: p.detach().clone() for n, p in model.named_parameters() if n.rpartition(".")[0] not in before}
    torch.manual_seed(1)
    adapted = attach(model, settings(rank=3, alpha=12))
    shake_adapters(adapted)
    factors = {
        n.removeprefix("base_model.model."): (m.lora_A.default.weight.detach(), m.lora_B.default.weight.detach())
        for n, m in adapted.named_modules()
        if hasattr(m, "lora_A")
    }
    ids = tokens(2, 9)
    logits = logits_of(adapted, ids)
    assert merge(adapted) is model
    torch.testing.assert_close(logits_of(model, ids), logits, rtol=1e-4, atol=1e-4)
    after = target_modules(model, None)
    assert factors.keys() == before.keys() == after.keys()
    for key, (A, B) in factors.items():
        delta = 12 / 3 * B @ A
        expected = before[key] + (delta.T if isinstance(after[key], Conv1D) else delta)
        torch.testing.assert_close(after[key].weight, expected, rtol=1e-5, atol=1e-6)
    now = dict(model.named_parameters())
    assert all(torch.equal(now[n], p) for n, p in rest.items())


def test_gradients_of_the_factors_are_those_of_the_merged_weight() -> None:
    """With W = W0 + s B A: dB = s dW A^T and dA = s B^T dW, where dW comes from the dense model."""
    model = compressed()
    batch = collate(examples(3).items)
    adapted = attach(model, settings(rank=3, alpha=6))
    shake_adapters(adapted)
    loss_of(adapted, batch).backward()
    layers = {n.removeprefix("base_model.model."): m for n, m in adapted.named_modules() if hasattr(m, "lora_A")}
    factors = {n: (m.lora_A.default.weight, m.lora_B.default.weight) for n, m in layers.items()}
    merged = merge(copy.deepcopy(adapted))
    loss_of(merged, batch).backward()
    for name, (A, B) in factors.items():
        dW = merged.get_submodule(name).weight.grad
        torch.testing.assert_close(B.grad, 2 * dW @ A.T, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(A.grad, 2 * B.T @ dW, rtol=1e-3, atol=1e-4)


def test_the_step_is_adamw_on_the_mean_over_learned_tokens() -> None:
    """By hand: one batch of all examples, torch's AdamW, the same seed; accumulation must not show."""
    data = examples(4)
    apart = compressed()
    torch.manual_seed(0)
    adapted = attach(apart, settings())
    parameters = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(3):
        loss = loss_of(adapted, collate(data.items)) / data.learned
        losses.append(loss.item())
        loss.backward()
        length = torch.nn.utils.clip_grad_norm_(parameters, LONGEST_GRADIENT)
        assert length > LONGEST_GRADIENT
        optimizer.param_groups[0]["lr"] = 1e-2 * rate_at(step, 3)
        optimizer.step()
        optimizer.zero_grad()
    merge(adapted)
    model = compressed()
    tuned = finetune(model, data, settings(epochs=3, lr=1e-2))
    assert tuned["losses"] == pytest.approx(losses, rel=1e-4)
    for mine, theirs in zip(model.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_checkpointing_computes_layers_twice_and_gradients_the_same() -> None:
    def run(**changes: Any) -> tuple[list[float], int]:
        model, calls = compressed(), []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        losses = finetune(model, examples(4), settings(**changes))["losses"]
        assert not model.is_gradient_checkpointing
        return losses, len(calls)

    plain, once = run()
    saving, often = run(gradient_checkpointing=True)
    assert saving == pytest.approx(plain, rel=1e-5)
    assert often == once + 2  # two batches; merging is checked with two more passes either way


def test_targets_choose_the_maps() -> None:
    model = compressed()
    assert set(target_modules(model, ("v", "down"))) == {
        f"model.layers.{i}.{path}" for i in range(3) for path in ("self_attn.v_proj", "mlp.down_proj")
    }
    with pytest.raises(TrisectError, match=r"Unknown linear map 'dwn'.*down"):
        finetune(model, examples(), settings(targets=("dwn",)))
    fused = target_modules(compressed("phi3"), ("v",))
    assert {n.rpartition(".")[2] for n in fused} == {"qkv_proj"}


def test_block_diagonal_factors_stay_and_the_rest_learns() -> None:
    model = compressed("llama-gqa", "palu")
    modules = [m for view in layer_views(model) for m in view.projections()]
    grouped = [m.weight.clone() for m in modules if not isinstance(m, nn.Linear)]
    finetune(model, examples(3), settings())
    modules = [m for view in layer_views(model) for m in view.projections()]
    assert all(
        torch.equal(a, b.weight)
        for a, b in zip(grouped, (m for m in modules if not isinstance(m, nn.Linear)), strict=True)
    )


def test_half_precision_keeps_its_dtype_and_float16_is_refused() -> None:
    model = compressed().to(torch.bfloat16)
    adapted = attach(copy.deepcopy(model), settings())
    assert {p.dtype for p in adapted.parameters() if p.requires_grad} == {torch.float32}
    tuned = finetune(model, examples(3), settings(lr=1e-2))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert tuned["merge_difference"] < 0.1
    with pytest.raises(TrisectError, match="--dtype float32"):
        finetune(compressed().to(torch.float16), examples(), settings())


def test_zeros_would_be_filled_in() -> None:
    with pytest.raises(TrisectError, match="wanda-sparse saved zeros"):
        finetune(compressed("llama-gqa", "wanda-sparse"), examples(), settings())


def test_a_loss_that_is_no_number_stops_the_run() -> None:
    model = compressed()
    with torch.no_grad():
        model.lm_head.weight.mul_(1e38)
    with pytest.raises(TrisectError, match=r"The loss is (inf|nan) at step 1; no model was written"):
        finetune(model, examples(), settings())


def test_tokens_of_another_tokenizer_are_refused() -> None:
    items = (*examples().items, type(examples().items[0])((5, 500, 5), 1))
    with pytest.raises(TrisectError, match="made with another tokenizer"):
        finetune(compressed(), Examples(items=items, source="s", kind="text"), settings())


def test_random_numbers_elsewhere_go_on_as_if_nothing_had_happened() -> None:
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    finetune(compressed("gpt2"), examples(), settings())
    assert torch.equal(torch.rand(3), expected)
