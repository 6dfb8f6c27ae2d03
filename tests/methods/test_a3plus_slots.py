"""a3+ on rotation pairs: who shares rates, and what stands in for what.

References: moments built by hand, scores of both models compared query by query.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tiny_models import CONFIGS, LLAMA, tiny, tokens
from trisect.calibrate.scores import QuerySampler, SampledQueries
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.errors import TrisectError
from trisect.methods.a3plus import solve_qk
from trisect.methods.method import Options
from trisect.models import layer_views, shape_of
from trisect.models.heads import rotation_of
from trisect.pipeline.run import Compressed, compress
from trisect.plan import plan_for
from trisect.records.parts import QK, Shrunk
from trisect.solve.select import real_map

WINDOWS = tokens(6, 20, seed=5)
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}


def settings(**more: Any) -> CompressConfig:
    return CompressConfig(
        **{"ratio": 0.25, "method": "a3+", "align": None, "qk_norm_tolerance": 1.0, "parts": ("qk",), **more}
    )


def run(model: Any, **more: Any) -> Compressed:
    return compress(model, settings(**more), tokens=tokens_from_tensor(WINDOWS))


def rates_of(model: Any) -> list[Tensor]:
    """Radians per token (k, p) of every layer that rotates, whoever keeps them."""
    views = layer_views(model, own=True)
    rotation = rotation_of(model.get_submodule(views[0].family.layers.rpartition(".")[0]))
    assert rotation is not None
    parts = [part for view in views if isinstance(part := view.part("qk"), QK) and part.num_pairs]
    return [rotation.rates[part.frequencies] if part.rates is None else part.rates for part in parts]


@pytest.mark.parametrize("name", ["llama-gqa", "gpt_neox", "smollm3", "helium"])
def test_with_scope_layer_all_key_heads_of_a_layer_share_their_rates(name: str) -> None:
    for rates in rates_of(run(tiny(name), rope_scope="layer").model):
        assert rates.equal(rates[:1].expand_as(rates))


@pytest.mark.parametrize("name", ["llama-gqa", "gpt_neox"])
def test_with_scope_model_all_layers_share_them(name: str) -> None:
    found = rates_of(run(tiny(name), rope_scope="model").model)
    assert all(rates.equal(found[0][:1].expand_as(rates)) for rates in found)


@pytest.mark.parametrize("name", ["qwen3", "phi3-longrope"])
def test_where_nothing_can_be_folded_a_layer_shares_pairs_instead(name: str) -> None:
    """A norm in front of the rotation, or a rotation that depends on the length."""
    model = run(tiny(name), rope_scope="layer").model
    for view in layer_views(model, own=True):
        part = view.part("qk")
        assert part.rates is None
        assert part.frequencies.equal(part.frequencies[:1].expand_as(part.frequencies))


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("llama-gqa", {"layers": (0, 1)}, "one query/key width"),
        ("qwen3", {}, "no norm between projection and rotation"),
        ("phi3-longrope", {}, "the same for every length"),
    ],
)
def test_scope_model_refuses_what_cannot_share(name: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(TrisectError, match=message):
        run(tiny(name), rope_scope="model", **more)


def test_scope_model_refuses_layers_of_different_widths() -> None:
    model = tiny("llama-gqa")
    plan = plan_for(shape_of(model), settings())
    first = replace(plan.layers[0], qk=8, pairs=4)
    plan = replace(plan, layers=(first, *plan.layers[1:]))
    with pytest.raises(TrisectError, match=r"one query/key width.*--rope-scope layer"):
        compress(model, settings(rope_scope="model"), tokens=tokens_from_tensor(WINDOWS), plan=plan)


def test_heads_that_turn_at_rates_of_their_own_can_no_longer_share_them() -> None:
    model = tiny("llama-gqa")
    view = layer_views(model, own=True)[0]
    view.write(replace(view.part("qk"), rates=torch.rand(2, 8, generator=torch.Generator().manual_seed(0))))
    with pytest.raises(TrisectError, match="rates of their own"):
        run(model, rope_scope="layer")


class Notes:
    """Keeps what a sampler hears instead of summing it."""

    def __init__(self) -> None:
        self.heard: list[SampledQueries] = []

    def __call__(self, heard: SampledQueries) -> dict[str, Tensor]:
        self.heard.append(heard)
        return {}


def first_looks(model: Any) -> list[SampledQueries]:
    """Every sampled query of the first layer, the same ones that `compress` samples there."""
    notes = Notes()
    sampler = QuerySampler([notes], per_window=WINDOWS.shape[1], seed=0)
    attention = layer_views(model, own=True)[0].attention
    attention.tap = lambda tap, *heard: sampler(*heard) if tap == "rotated" else None  # type: ignore[assignment]
    with torch.no_grad():
        model(WINDOWS)
    attention.tap = None
    return notes.heard


@pytest.mark.parametrize("scope", ["head", "layer"])
@pytest.mark.parametrize("name", ["llama-gqa", "helium", "yarn"])
def test_the_loss_a_layer_reports_is_what_its_scores_miss(
    name: str, scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer has the same input in both models; cut twice, so that folds are folded again."""
    monkeypatch.setitem(CONFIGS, "yarn", lambda: transformers.LlamaConfig(**LLAMA, rope_parameters=dict(YARN)))
    model, before = tiny(name, seed=2), first_looks(tiny(name, seed=2))
    for ratio in (0.25, 0.4):
        reported = run(model, rope_scope=scope, layers=(0,), ratio=ratio).losses[0]
        assert shape_of(model).layers[0].folded
        after = first_looks(model)
        missed = sum(variance(old, new) for old, new in zip(before, after, strict=True))
        queries = WINDOWS.numel()
        assert reported["loss"] > 0
        assert missed / queries == pytest.approx(reported["loss"], rel=1e-3, abs=1e-6)
        before = after


def variance(old: SampledQueries, new: SampledQueries) -> float:
    """Of the difference of scores, under the old weights, summed over queries and heads."""
    gap = (old.query @ old.key.mT.unsqueeze(1) - new.query @ new.key.mT.unsqueeze(1)).double()
    weights = old.weights.double()
    mean = (weights * gap).sum(dim=-1, keepdim=True)
    return (weights * (gap - mean).square()).sum().item()


P, SLOTS, WIDTH = 4, 2, 8
KEPT = torch.tensor([[0, 2], [1, 3]])


def by_hand(*, fold_errs: tuple[float, float], scaling: float = 1.0) -> tuple[QK, dict[str, Tensor]]:
    """Two key heads of four pairs; what the pairs err on held-out queries is 1, on the others 1 too.

    On the queries of the fit the fold is as bad as can be when it is good on the held-out ones.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, kind: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=kind)

    rates = torch.tensor([1.0, 0.3, 0.02, 0.01], dtype=torch.float64).expand(2, -1)
    part = QK(W_q=random(2, 6, WIDTH), W_k=random(2, 6, WIDTH), frequencies=torch.arange(P).expand(2, -1))
    one_hot = torch.nn.functional.one_hot(KEPT, P).mT.to(torch.complex128)
    moments: dict[str, Tensor] = {
        "q": torch.eye(WIDTH).double().expand(2, -1, -1),
        "k": torch.eye(WIDTH).double().expand(2, -1, -1),
        "rates": rates,
        "rotary_scaling": torch.tensor(scaling).double(),
        "scores_tokens": torch.tensor(700.0),
        "scores_tokens_held": torch.tensor(100.0),
        "slots0_k_map": one_hot,
        "slots0_q_map": one_hot,
        "slots0_rates": rates.gather(-1, KEPT),
        "slots1_k_map": random(2, P, SLOTS, kind=torch.complex128),
        "slots1_q_map": random(2, P, SLOTS, kind=torch.complex128),
        "slots1_rates": torch.tensor([[0.5, 0.016], [0.4, 0.011]], dtype=torch.float64),
    }
    errs = {0: {"": (1.0, 1.0), "_held": (1.0, 1.0)}, 1: {"": tuple(2 - e for e in fold_errs), "_held": fold_errs}}
    for number, suffixes in errs.items():
        for suffix, error in suffixes.items():
            # Slots that already fit as well as they can: (1, 0) solves the system, and `error` is left.
            gram = torch.eye(2 * SLOTS).double().expand(2, -1, -1)
            cross = torch.tensor([1.0] * SLOTS + [0.0] * SLOTS).double().expand(2, -1)
            moments[f"slots{number}_gram{suffix}"] = gram
            moments[f"slots{number}_cross{suffix}"] = cross
            moments[f"slots{number}_energy{suffix}"] = SLOTS + torch.tensor(error).double()
    return part, moments


def test_each_key_head_takes_what_errs_less_on_held_out_queries() -> None:
    part, moments = by_hand(fold_errs=(0.5, 1.5))
    solution = solve_qk(part, moments, 2 * SLOTS, Options())
    narrow = solution.part
    assert isinstance(narrow, QK)
    assert narrow.rates is not None
    assert solution.note == "folded 1 of 2 key heads"
    assert narrow.rates[0].equal(moments["slots1_rates"][0])
    assert narrow.rates[1].equal(moments["slots0_rates"][1])
    assert narrow.frequencies.tolist() == [[1, 2], [1, 3]]  # the nearest, where they are not the same
    for name, W, W_narrow in (("k", part.W_k, narrow.W_k), ("q", part.W_q, narrow.W_q)):
        torch.testing.assert_close(W_narrow[0], W[0] @ real_map(moments[f"slots1_{name}_map"][0]))
        torch.testing.assert_close(W_narrow[1], W[1][:, [1, 3, 1 + P, 3 + P]])
    assert solution.loss == pytest.approx(0.5 / 8 + 1.5 * 7 / 8 + 1.0)


def test_where_no_fold_is_better_the_pairs_stay_as_they_are() -> None:
    part, moments = by_hand(fold_errs=(1.5, 1.2), scaling=1.7)
    solution = solve_qk(part, moments, 2 * SLOTS, Options())
    narrow = solution.part
    assert isinstance(narrow, QK)
    assert narrow.rates is None
    assert narrow.frequencies.equal(KEPT)
    torch.testing.assert_close(narrow.W_k[0], part.W_k[0][:, [0, 2, 0 + P, 2 + P]])


def test_slots_that_leave_the_table_take_its_scaling_into_their_weights() -> None:
    part, moments = by_hand(fold_errs=(0.5, 1.5))
    _, scaled = by_hand(fold_errs=(0.5, 1.5), scaling=1.7)
    plain, loud = (solve_qk(part, m, 2 * SLOTS, Options()).part for m in (moments, scaled))
    assert isinstance(plain, QK)
    assert isinstance(loud, QK)
    torch.testing.assert_close(loud.W_q, 1.7 * plain.W_q)
    torch.testing.assert_close(loud.W_k, 1.7 * plain.W_k)


def test_without_compensation_slots_are_not_multiplied() -> None:
    part, moments = by_hand(fold_errs=(0.5, 0.5))
    moments |= {f"slots1_cross{suffix}": 1.5 * moments[f"slots1_cross{suffix}"] for suffix in ("", "_held")}
    plain: Shrunk = solve_qk(part, moments, 2 * SLOTS, Options(without=("compensate",)))
    more: Shrunk = solve_qk(part, moments, 2 * SLOTS, Options())
    assert isinstance(plain.part, QK)
    assert isinstance(more.part, QK)
    q_map = real_map(moments["slots1_q_map"])
    torch.testing.assert_close(plain.part.W_q, part.W_q @ q_map)
    factor = (more.part.W_q / plain.part.W_q).flatten()
    torch.testing.assert_close(factor, torch.full_like(factor, factor[0]))
    assert 1.0 < factor[0] <= 1.5


def test_an_unknown_scope_is_refused_with_near_ones() -> None:
    with pytest.raises(TrisectError, match="Did you mean layer"):
        settings(rope_scope="layers")


@pytest.mark.parametrize("setting", [{"rope_scope": "layer"}, {"without": ("fold",)}])
def test_settings_of_a3plus_are_refused_by_other_methods(setting: dict[str, Any]) -> None:
    config = CompressConfig(ratio=0.25, method="a3", align=None, **setting)
    with pytest.raises(TrisectError, match=r"are for a3\+, not for a3"):
        compress(tiny("llama-gqa"), config, tokens=tokens_from_tensor(WINDOWS))
