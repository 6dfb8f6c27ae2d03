"""FLOPs are those a profiler counts and those of the paper; bytes are those of real tensors."""

from typing import Any

import pytest
import torch
from bench_help import FAMILIES, KINDS, subject, tiny_variants
from hypothesis import given
from hypothesis import strategies as st
from random_models import build, subject_of_shape
from sweeps import use_attention
from torch.utils.flop_counter import FlopCounterMode

from tiny_models import tiny
from trisect.bench.measure import cache_bytes, head_parameters, model_flops, parameter_bytes, read_bytes
from trisect.models import shape_of
from trisect.plan import budget_of
from trisect.plan.budget import Flops, layer_flops
from trisect.records.shapes import LayerShape


def counted(model: Any, ids: torch.Tensor, **inputs: Any) -> int:
    """A profiler's count of a forward pass; some versions of transformers multiply matrices for angles."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, use_cache=True, logits_to_keep=1, **inputs)
    modules = counter.get_flop_counts().items()
    angles = sum(sum(flops.values()) for name, flops in modules if name.endswith("rotary_emb"))
    return int(counter.get_total_flops()) - angles


def matrices(flops: Flops) -> int:
    """Matrix products alone: what a profiler counts."""
    return flops.projections + flops.scores + flops.mlp + flops.head


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
def test_matrix_flops_are_those_a_profiler_counts(family: str, kind: str) -> None:
    name = subject(family)
    (variant,) = tiny_variants(name, (kind,))
    model = build(name, variant, device="cpu", dtype=torch.float32)
    use_attention(model, "eager")
    head = head_parameters(model)
    ids = torch.ones(2, 11, dtype=torch.int64)
    prefill = model_flops(variant.shape, batch=2, tokens=11, context=11, head=head)
    assert counted(model, ids) == matrices(prefill)
    with torch.no_grad():
        past = model(input_ids=ids, use_cache=True).past_key_values
    step = model_flops(variant.shape, batch=2, tokens=1, context=12, head=head)
    assert counted(model, ids[:, :1], past_key_values=past) == matrices(step)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_flops_and_bytes_of_a_mixture_are_those_of_the_experts_a_token_meets(name: str) -> None:
    model, ids = tiny(name), torch.ones(2, 11, dtype=torch.int64)
    use_attention(model, "eager")
    model.set_experts_implementation("batched_mm")  # a profiler does not know grouped products
    shape, head = shape_of(model), head_parameters(model)
    assert counted(model, ids) == matrices(model_flops(shape, batch=2, tokens=11, context=11, head=head))
    idle = sum(2 * layer.mlp.experts.down_proj[0].numel() * 3 for layer in model.model.layers)  # 2 of 4, 3 matrices
    everything = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    assert read_bytes(model) == everything - 4 * idle


@given(
    B=st.integers(1, 8),
    L=st.integers(1, 4096),
    H=st.integers(1, 8192),
    d=st.integers(1, 128),
    A=st.integers(1, 64),
    inter=st.integers(1, 30000),
)
def test_a_layer_has_the_flops_of_the_papers_formulas(B: int, L: int, H: int, d: int, A: int, inter: int) -> None:
    layer = LayerShape(d_model=H, heads=A, kv_heads=A, qk=d, vo=d, pairs=0, mlp=inter, gated=True)
    D = A * d  # in 8BLHD the paper's D is the width of all heads, in 4BL^2AD that of one
    attention, mlp = 8 * B * L * H * D + 4 * B * L**2 * A * d + B * L**2 * A, 6 * B * L * inter * H
    flops = layer_flops(layer, batch=B, tokens=L, context=L)
    assert flops.projections + flops.scores + flops.softmax == attention
    assert flops.mlp == mlp
    assert (flops.norms, flops.residuals) == (2 * B * L * H, 2 * B * L * H)
    assert flops.total == attention + mlp + 4 * B * L * H


@pytest.mark.parametrize(
    ("widths", "paper"), [((128, 13824), 2.77e12), ((96, 11008), 2.16e12), ((64, 8320), 1.56e12), ((48, 5504), 1.08e12)]
)
def test_the_papers_runtime_table_has_these_flops_at_these_widths(widths: tuple[int, int], paper: float) -> None:
    """Its ranks are misprinted; its FLOPs are those of widths on a grid of 16 and 128."""
    config = subject_of_shape("llama-2-13b").config
    head, inter = widths
    layer = LayerShape(
        d_model=config.hidden_size, heads=40, kv_heads=40, qk=head, vo=head, pairs=0, mlp=inter, gated=True
    )
    assert layer_flops(layer, batch=2, tokens=2048, context=2048).total == pytest.approx(paper, rel=0.004)


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_those_of_the_real_parameters_and_the_real_cache(family: str) -> None:
    name = subject(family)
    for variant in tiny_variants(name):
        model = build(name, variant, device="cpu", dtype=torch.bfloat16)
        ids = torch.ones(2, 9, dtype=torch.int64)
        with torch.no_grad():
            cache = model(input_ids=ids, use_cache=True).past_key_values
        shape = shape_of(model)  # of 16 bits, as the model is
        real = cache_bytes(cache)
        assert 2 * 9 * budget_of(shape).kv_bytes_per_token == real
        # Copies, because preparing for inference makes rows of one matrix out of several.
        assert parameter_bytes(model) == sum(p.clone().untyped_storage().nbytes() for p in model.parameters())


def test_a_step_reads_every_weight_but_tables_that_are_looked_up() -> None:
    for tied in (False, True):
        name = subject("llama-gqa", tie_word_embeddings=tied)
        (variant,) = tiny_variants(name, ("dense",))
        model = build(name, variant, device="cpu", dtype=torch.float32)
        table = model.model.embed_tokens.weight
        assert (model.lm_head.weight is table) == tied
        # Tied, the table makes the logits: it is read once, and there is no other.
        assert read_bytes(model) == parameter_bytes(model) - (0 if tied else 4 * table.numel())
    name = subject("gpt2")
    (variant,) = tiny_variants(name, ("dense",))
    model = build(name, variant, device="cpu", dtype=torch.float32)
    assert read_bytes(model) == parameter_bytes(model) - 4 * model.transformer.wpe.weight.numel()
