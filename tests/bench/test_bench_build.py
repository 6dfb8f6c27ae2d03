"""Random models have the shape that was planned, real rotation tables, and run."""

from pathlib import Path

import pytest
import torch
import transformers
from bench_help import FAMILIES, KINDS, subject, tiny_variants
from random_models import (
    build,
    narrow_shape,
    random_pairs,
    shape_of_widths,
    subject_of_model,
    subject_of_shape,
    variants_of,
)

from tiny_models import tiny
from trisect.bench.measure import OwnStepper, StockStepper
from trisect.bench.rows import Variant
from trisect.config import CompressConfig
from trisect.data.tokens import tokens_from_tensor
from trisect.errors import TrisectError
from trisect.models import layer_views, shape_of
from trisect.models.compressed import CompressedModel
from trisect.models.heads import loaded_rates
from trisect.pipeline.run import compress
from trisect.plan import budget_of, compare, plan_for
from trisect.records.shapes import LayerShape, ModelShape


def llama_13b() -> ModelShape:
    """One layer of it."""
    config = subject_of_shape("llama-2-13b").config
    layer = LayerShape(
        d_model=config.hidden_size, heads=40, kv_heads=40, qk=128, pairs=64, vo=128, mlp=13824, gated=True
    )
    return ModelShape(layers=(layer,), other_parameters=0, bytes_per_element=2)


@pytest.mark.parametrize(("ratio", "widths"), [(0.2, "96/112/11008"), (0.4, "80/80/8192"), (0.6, "48/64/5376")])
def test_a_ratio_gives_the_widths_that_compress_plans(ratio: float, widths: str) -> None:
    dense = llama_13b()
    narrow = narrow_shape(dense, ratio=ratio, align=16)
    plan = plan_for(dense, CompressConfig(ratio=ratio))
    assert [layer.width("qk") for layer in narrow.layers] == [layer.qk for layer in plan.layers]
    assert narrow == shape_of_widths(dense, widths)


def test_the_factored_twin_has_the_narrow_models_parameters() -> None:
    narrow, factored = variants_of(llama_13b(), kinds=("trisect", "svd-llm"), ratios=(0.4,))
    assert (narrow.widths, factored.widths[:4]) == ("80/80/8192", "rank")
    assert factored.removed == pytest.approx(narrow.removed, abs=0.005)
    counts = [budget_of(variant.shape).linear_parameters for variant in (narrow, factored)]
    assert counts[0] == pytest.approx(counts[1], rel=0.01)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_built_model_has_the_planned_shape(family: str) -> None:
    name = subject(family)
    for variant in tiny_variants(name):
        model = build(name, variant, device="cpu", dtype=torch.float32)
        stock = type(transformers.AutoModelForCausalLM.from_config(name.config))
        assert (type(model) is stock) == (variant.kind in ("dense", "owned"))
        assert isinstance(model, CompressedModel) == (variant.kind in ("trisect", "svd-llm"))
        with torch.no_grad():
            assert model(input_ids=torch.ones(1, 6, dtype=torch.int64)).logits.isfinite().all()
        found = shape_of(model)
        assert found.layers == variant.shape.layers
        assert compare(budget_of(tiny_variants(name, ("dense",))[0].shape), budget_of(found)).ratio == (
            pytest.approx(variant.removed)
        )
        assert not any(p.requires_grad or p.is_meta for p in model.parameters())


def test_rotation_tables_are_the_checkpoints_own() -> None:
    for family in ("llama-3", "phi3-longrope", "gpt_neox"):
        name = subject(family)
        stock = transformers.AutoModelForCausalLM.from_config(name.config)
        (variant,) = tiny_variants(name, ("trisect",))
        # 16 bits would ruin frequencies: they stay in 32.
        model = build(name, variant, device="cpu", dtype=torch.bfloat16)
        mine, theirs = ([m.inv_freq for m in x.modules() if hasattr(m, "inv_freq")] for x in (model, stock))
        assert len(mine) == 1
        torch.testing.assert_close(mine[0], theirs[0], rtol=0, atol=0)


def test_every_head_keeps_its_own_frequencies_in_order() -> None:
    name = subject("llama-gqa")
    (variant,) = tiny_variants(name, ("trisect",), ratios=(0.5,))
    model = build(name, variant, device="cpu", dtype=torch.float32)
    chosen = [view.attention.rotary_index for view in layer_views(model)]
    for index in chosen:
        assert index is not None
        assert index.shape == (2, variant.shape.layers[0].pairs)
        assert (index.diff(dim=-1) > 0).all()
        assert 0 <= index.min() <= index.max() < 8
    assert len({tuple(row.tolist()) for index in chosen for row in index}) > 1


def test_folded_heads_turn_at_rates_near_the_models_frequencies() -> None:
    name = subject("llama-gqa")
    (variant,) = tiny_variants(name, ("trisect",), folded=True)
    assert variant.folded
    model = build(name, variant, device="cpu", dtype=torch.bfloat16)
    frequencies = model.model.rotary_emb.inv_freq
    for view in layer_views(model):
        stored, index = view.attention.rotary_rates, view.attention.rotary_index
        assert stored is not None
        assert index is not None
        torch.testing.assert_close(loaded_rates(stored), frequencies[index.long()], rtol=0.011, atol=0)
    moving = subject("phi3-longrope")
    (variant,) = tiny_variants(moving, ("trisect",), folded=True)
    with pytest.raises(TrisectError, match="cannot be folded"):
        build(moving, variant, device="cpu", dtype=torch.float32)


def test_random_pairs_are_different_ones() -> None:
    pairs = random_pairs(50, 5, 7, torch.Generator().manual_seed(1))
    assert all(len(set(row.tolist())) == 5 and row.tolist() == sorted(row.tolist()) for row in pairs)
    assert set(pairs.flatten().tolist()) == set(range(7))


def test_the_same_seed_builds_the_same_model_and_the_subject_is_left_alone() -> None:
    name = subject("llama-gqa")
    before = name.config.to_dict()
    (variant,) = tiny_variants(name, ("trisect",))
    one, two, three = (build(name, variant, device="cpu", dtype=torch.float32, seed=s) for s in (1, 1, 2))
    for (key, a), (_, b) in zip(one.state_dict().items(), two.state_dict().items(), strict=True):
        assert torch.equal(a, b), key
    assert not torch.equal(one.lm_head.weight, three.lm_head.weight)
    assert name.config.to_dict() == before
    assert type(name.config) is transformers.LlamaConfig


@pytest.mark.parametrize("kind", KINDS)
def test_steps_decode_what_the_model_says_is_next(kind: str) -> None:
    name = subject("llama-gqa")
    (variant,) = tiny_variants(name, (kind,))
    model = build(name, variant, device="cpu", dtype=torch.float32)
    prompt = torch.arange(1, 9).reshape(2, 4)
    steps = (StockStepper if kind == "dense" else OwnStepper)(model, prompt, new=4, mode="plain")
    steps.start()
    with torch.no_grad():
        expected = model.generate(prompt, max_new_tokens=3, do_sample=False, eos_token_id=None)[:, 4:]
    token = steps.token if kind == "dense" else steps.decoder.tokens  # type: ignore[attr-defined]
    token.copy_(expected[:, 0].reshape(token.shape))
    steps.step()
    assert token.flatten().tolist() == expected[:, 1].tolist()
    steps.step()
    assert token.flatten().tolist() == expected[:, 2].tolist()
    shape = variant.shape
    per_token = budget_of(shape).kv_bytes_per_token
    assert steps.cache_bytes() == 2 * 8 * per_token
    steps.close()
    assert all(getattr(view.attention_module, "live", None) is None for view in layer_views(model))


def test_a_compressed_folder_is_benched_beside_its_original(tmp_path: Path) -> None:
    model = tiny("llama-gqa")
    original = shape_of(model)
    config = CompressConfig(ratio=0.4, method="a3", align=None)
    ids = torch.randint(3, 90, (8, 16), generator=torch.Generator().manual_seed(0))
    narrow = compress(model, config, tokens=tokens_from_tensor(ids)).model
    narrow.save_pretrained(tmp_path / "narrow")
    given = subject_of_model(str(tmp_path / "narrow"))
    assert given.config.model_type == "llama"
    assert not hasattr(given.config, "trisect")
    dense = given.dense_shape(torch.float32)
    assert dense.layers == original.layers
    assert given.narrowed == shape_of(narrow).layers
    (variant,) = variants_of(dense, kinds=("trisect",), narrowed=given.narrowed)
    assert (variant.asked, variant.shape.layers) == ("checkpoint", given.narrowed)
    built = build(given, variant, device="cpu", dtype=torch.float32)
    assert shape_of(built).layers == given.narrowed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("96/96", "write QK/VO/MLP"),
        ("a/b/c", "write QK/VO/MLP"),
        ("129/96/11008", "whose are 128/128/13824"),
        ("0/96/11008", "none 0"),
        ("97/96/11008", "try 96/96/11008"),
    ],
)
def test_widths_that_no_model_can_have_are_refused(text: str, message: str) -> None:
    with pytest.raises(TrisectError, match=message):
        shape_of_widths(llama_13b(), text)


def test_variants_are_named_or_refused() -> None:
    with pytest.raises(TrisectError, match="Did you mean svd-llm"):
        variants_of(llama_13b(), kinds=("svdllm",))
    assert variants_of(llama_13b(), kinds=("dense",))[0] == Variant(
        kind="dense", asked="", shape=llama_13b(), removed=0.0
    )
