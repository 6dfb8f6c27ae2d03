"""Every family, one contract: parts come back as they were read, and the owned attention is the stock one.

References: the stock transformers model with the same weights; the stock model with narrow weights scattered
back into their full-width places; generation without a cache.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BloomConfig

from narrow_models import narrow
from tiny_models import CONFIGS, MIXTURES, SDPA, SECOND, left_padded, logits, tiny, tokens
from tolerances import assert_same_but_for_rounding, assert_same_text, steps_of
from trisect.calibrate import collect
from trisect.methods import METHODS
from trisect.methods.experts import solve_experts
from trisect.methods.method import Options
from trisect.models import WRAPPERS, families, layer_views, shape_of
from trisect.models.linear import matrices_of
from trisect.plan import budget_of
from trisect.records.parts import COMPONENTS, MLP, OV, QK, Experts

EXACT = {"rtol": 0, "atol": 0}
# A clamp that bites does not commute with mixing channels: there is nothing exact to compare with.
MIXABLE = [name for name in (*CONFIGS, *SECOND) if name != "mpt-clip"]


def test_every_family_has_two_shapes() -> None:
    shapes: dict[str, set[str]] = {}
    for name in (*CONFIGS, *SECOND):
        model = tiny(name)
        shapes.setdefault(model.config.model_type, set()).add(repr(shape_of(model)))
    assert {family: len(found) for family, found in shapes.items() if len(found) < 2} == {}


def test_the_tiny_models_cover_every_family_in_the_table() -> None:
    covered = {CONFIGS[name]().model_type for name in CONFIGS}
    assert covered == {*families.FAMILIES, *WRAPPERS}


@pytest.mark.parametrize("name", [*CONFIGS, *SECOND])
def test_parts_read_and_written_back_are_identical(name: str) -> None:
    model = tiny(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for view in layer_views(model):
        for component in view.components:
            view.write(view.part(component))
    after = model.state_dict()
    assert before.keys() == after.keys()
    for key, value in before.items():
        torch.testing.assert_close(after[key], value, **EXACT)


@pytest.mark.parametrize(
    ("name", "attention"), [(name, "eager") for name in (*CONFIGS, *SECOND)] + [(name, "sdpa") for name in SDPA]
)
def test_owned_attention_equals_the_stock_one(name: str, attention: str) -> None:
    """But for rounding: the products are the same, but heads lie otherwise in memory."""
    model, ids = tiny(name, attention=attention), tokens()
    mask = left_padded(ids)
    stock = logits(model, ids), logits(model, ids, attention_mask=mask), cached_logits(model, ids)
    layer_views(model, own=True)
    owned = logits(model, ids), logits(model, ids, attention_mask=mask), cached_logits(model, ids)
    seen, steps = mask.bool(), steps_of(model)
    assert_same_but_for_rounding(owned[0], stock[0], steps=steps)
    assert_same_but_for_rounding(owned[1][seen], stock[1][seen], steps=steps)
    assert_same_but_for_rounding(owned[2], stock[2], steps=steps)


@torch.no_grad()
def cached_logits(model: Any, ids: Tensor) -> Tensor:
    """Logits of the last tokens, fed one at a time behind a cached prompt."""
    output = model(ids[:, :6], use_cache=True)
    steps = []
    for position in range(6, ids.shape[1]):
        output = model(ids[:, position : position + 1], past_key_values=output.past_key_values, use_cache=True)
        steps.append(output.logits)
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize("name", MIXABLE)
def test_full_rank_solutions_mix_channels_but_keep_the_logits(name: str) -> None:
    model, ids = tiny(name).double(), tokens(4, 40)
    model.set_experts_implementation("eager")  # torch's grouped product knows no float64
    layer_views(model, own=True)  # some stock attention computes in float32 whatever it is given
    before = logits(model, ids)
    reads = frozenset().union(*METHODS["a3"].reads.values())
    for view, moments in collect(model, ids, lambda layer: reads):
        for component in view.components:
            part = view.part(component)
            solver = METHODS["a3"].solvers[component]
            solver = partial(solve_experts, solver) if isinstance(part, Experts) else solver
            view.write(solver(part, moments, part.width, Options()).part)
    # Routers compute in float32 whatever the model is, and so their weights round.
    tolerance = 1e-7 if name.removesuffix("+") not in MIXTURES else 1e-5
    torch.testing.assert_close(logits(model, ids), before, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", MIXABLE)
def test_a_narrow_model_equals_the_stock_model_with_its_weights_scattered_back(name: str) -> None:
    stock = tiny(name)
    # A norm over fewer channels has another denominator: QK-norm has a test of its own.
    parts = ("ov", "mlp") if any(layer.qk_norm for layer in shape_of(stock).layers) else COMPONENTS
    model = narrow(name, parts=parts)
    for view, wide in zip(layer_views(model), layer_views(stock), strict=True):
        for component in (part for part in parts if part in view.components):
            wide.write(scattered(view.part(component), wide.part(component)))
    ids = tokens(2, 30)
    assert shape_of(model) != shape_of(stock)
    assert_same_but_for_rounding(logits(model, ids), logits(stock, ids), steps=steps_of(model))


def scattered(part: Any, wide: Any) -> Any:
    """The narrow part at full width: kept pairs at their own frequency, zeros where nothing was kept."""
    if isinstance(part, QK):
        p, pairs, rest = part.num_pairs, wide.num_pairs, part.width - 2 * part.num_pairs
        places = [torch.cat([row, row + pairs, 2 * pairs + torch.arange(rest)]) for row in part.frequencies]
        assert all(len(row) == part.width for row in places)
        assert p <= pairs
        k = torch.stack(places)
        q = k.repeat_interleave(part.group, dim=0)
        return QK(
            W_q=put(part.W_q, q, wide.width),
            W_k=put(part.W_k, k, wide.width),
            b_q=None if part.b_q is None else put(part.b_q[:, None], q, wide.width)[:, 0],
            b_k=None if part.b_k is None else put(part.b_k[:, None], k, wide.width)[:, 0],
            frequencies=wide.frequencies,
            norm_q=wide.norm_q,
            norm_k=wide.norm_k,
        )
    if isinstance(part, OV):
        first = torch.arange(part.width).expand(part.heads, -1)
        values = first[: part.W_v.shape[0]]
        return OV(
            W_v=put(part.W_v, values, wide.width),
            W_o=put(part.W_o.mT, first, wide.width).mT,
            b_v=None if part.b_v is None else put(part.b_v[:, None], values, wide.width)[:, 0],
            b_o=part.b_o,
            W_g=None if part.W_g is None else put(part.W_g, first, wide.width),
            b_g=None if part.b_g is None else put(part.b_g[:, None], first, wide.width)[:, 0],
            heads=part.heads,
        )
    if isinstance(part, Experts):
        routed = tuple(map(scattered, part.routed, wide.routed))
        return replace(part, routed=routed, shared=part.shared and scattered(part.shared, wide.shared))
    grow = wide.width - part.width
    wider = torch.nn.functional.pad
    return MLP(
        W_up=wider(part.W_up, (0, grow)),
        W_gate=None if part.W_gate is None else wider(part.W_gate, (0, grow)),
        W_down=wider(part.W_down, (0, 0, 0, grow)),
        b_up=None if part.b_up is None else wider(part.b_up, (0, grow)),
        b_gate=None if part.b_gate is None else wider(part.b_gate, (0, grow)),
        b_down=part.b_down,
    )


def put(narrow_heads: Tensor, places: Tensor, width: int) -> Tensor:
    """(heads, D, r) -> (heads, D, width), column j of head i at places[i, j]."""
    wide = narrow_heads.new_zeros(*narrow_heads.shape[:2], width)
    return wide.scatter(2, places[:, None].expand_as(narrow_heads), narrow_heads)


@pytest.mark.parametrize("name", CONFIGS)
def test_generation_with_the_narrow_cache_equals_generation_without(name: str) -> None:
    model, ids = narrow(name), tokens(2, 9)
    mask = left_padded(ids)
    settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask, "pad_token_id": 0}
    settings["eos_token_id"] = None
    without = model.generate(ids, use_cache=False, **settings)
    assert_same_text(model, model.generate(ids, use_cache=True, **settings), without, mask)
    static = model.generate(ids, cache_implementation="static", **settings)
    assert_same_text(model, static, without, mask)


@pytest.mark.parametrize("name", [name for name in CONFIGS if not name.startswith(("mpt", "gemma2"))])
def test_eager_and_sdpa_agree_on_a_narrow_model(name: str) -> None:
    model, ids, found = narrow(name), tokens(2, 30), {}
    mask = left_padded(ids)
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        seen = logits(model, ids, attention_mask=mask)[mask.bool()]
        found[attention] = torch.cat([seen, logits(model, ids).flatten(0, 1), cached_logits(model, ids).flatten(0, 1)])
    assert_same_but_for_rounding(found["eager"], found["sdpa"], steps=steps_of(model))


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_reach_every_narrow_weight(name: str) -> None:
    model, ids = narrow(name), tokens()
    model.train()
    model(ids, labels=ids).loss.backward()
    projections = {
        f"{view.index}: {type(module).__name__}": module for view in layer_views(model) for module in view.projections()
    }
    for where, module in projections.items():
        for weight in matrices_of(module):
            assert weight.grad is not None, where
            assert weight.grad.abs().sum() > 0, where


@pytest.mark.parametrize("name", [*CONFIGS, *SECOND])
def test_the_live_cache_is_as_small_as_the_budget_says(name: str) -> None:
    # Five tokens are inside the shortest sliding window, beyond which a cache stops growing.
    model, ids = narrow(name), tokens(2, 5)
    cache = model(ids, use_cache=True).past_key_values
    held = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]  # others hold states
    live = sum(tensor.numel() * tensor.element_size() for layer in held for tensor in (layer.keys, layer.values))
    assert live == budget_of(shape_of(model)).kv_bytes_per_token * ids.numel()


def test_an_unknown_family_names_the_known_ones_and_the_steps() -> None:
    with pytest.raises(ValueError, match=r"Unknown model family 'bloom'.*llama.*CONTRIBUTING"):
        families.family_for(BloomConfig())
