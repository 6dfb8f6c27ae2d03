"""Mixtures of experts against brute force: stock modules run by hand, token by token.

References: the stock experts' own forward; sums over single tokens; every choice of experts tried.
"""

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tiny_models import MIXTURES, logits, tiny, tokens
from tolerances import assert_same_but_for_rounding, steps_of
from trisect.calibrate import TwoStreams, collect
from trisect.calibrate.moments import Accumulator, Goal, recording
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.errors import TrisectError
from trisect.methods import METHODS, a3
from trisect.methods.experts import choose_experts, drop_experts, moments_of, solve_experts
from trisect.methods.method import Options
from trisect.models import layer_views, shape_of, streamed
from trisect.pipeline.run import compress
from trisect.plan import apply_plan, budget_of, plan_for
from trisect.records.parts import MLP, Experts

ROUNDING = {"rtol": 1e-4, "atol": 1e-7}  # norms and routers compute in float32 whatever the model is


def routed(model: Any, ids: Tensor, layer: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """What a layer's experts are called with: inputs (n, D), chosen experts and their weights (n, k)."""
    seen: list[Any] = []
    handle = model.model.layers[layer].mlp.experts.register_forward_pre_hook(lambda module, args: seen.append(args))
    with torch.no_grad():
        model(ids, use_cache=False)
    handle.remove()
    return seen[0]


def alone(mlp: MLP, x: Tensor) -> tuple[Tensor, Tensor]:
    """Features and output of one expert for one token, from its weights."""
    assert mlp.W_gate is not None
    h = nn.functional.silu(x @ mlp.W_gate) * (x @ mlp.W_up)
    return h, h @ mlp.W_down


@pytest.fixture
def mixture() -> tuple[Any, Tensor]:
    model = tiny("mixtral").double()
    model.set_experts_implementation("eager")  # torch's grouped product knows no float64
    return model, tokens(4, 24)


def test_experts_moments_are_sums_over_their_tokens_times_what_the_router_gives(mixture: Any) -> None:
    model, ids = mixture
    x, index, weights = routed(model, ids)
    view, moments = next(collect(model, ids, lambda layer: frozenset({"mlp", "down_gram", "out_norm"})))
    part = view.part("mlp")
    for number, mlp in enumerate(part.routed):
        gram, norms, count = torch.zeros(mlp.width, mlp.width, dtype=torch.float64), 0.0, 0
        for token, slot in (index == number).nonzero().tolist():
            h, y = alone(mlp, x[token])
            g = weights[token, slot]
            gram += g**2 * torch.outer(h, h)
            norms, count = norms + (g * y.norm()).item(), count + 1
        found = moments_of(moments, f"expert{number}")
        assert found["observed"].item() == count
        torch.testing.assert_close(found["down_gram"] * count, gram, **ROUNDING)
        torch.testing.assert_close(found["mlp"] * count, gram.diagonal(), **ROUNDING)
        assert found["out_norm"].item() * count == pytest.approx(norms)


def test_every_experts_target_and_rows_add_up_to_the_layers_own_regression(mixture: Any) -> None:
    """At the first layer both streams are one: an expert's target is what it puts out, times the weights of F-5."""
    model, ids = mixture
    x, index, weights = routed(model, ids)
    views = layer_views(model, own=True)
    streams = TwoStreams(model, views, ids, batch_size=3, seed=0)
    streams.begin(views[0])
    names = METHODS["a3+"].reads["mlp"]
    moments = streams.statistics(views[0], "mlp", names)
    before = streams.before
    stream = torch.cat([before[n] + streams.attention_out[n].reshape(before[n].shape) for n in range(len(before))])
    importance = 1 / stream.square().sum(dim=-1).flatten()
    held = len(ids) // 4 * ids.shape[1]
    for number, mlp in enumerate(views[0].part("mlp").routed):
        cross = torch.zeros(mlp.width, x.shape[-1], dtype=torch.float64)
        count = 0
        for token, slot in (index == number).nonzero().tolist():
            if token < len(x) - held:
                h, y = alone(mlp, x[token])
                cross += importance[token] * weights[token, slot] ** 2 * torch.outer(h, y)
                count += 1
        found = moments_of(moments, f"expert{number}")
        assert found["mlp_tokens"].item() == count
        torch.testing.assert_close(found["mlp_target"] * count, cross, **ROUNDING)


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_what_is_missing_is_shared_out_by_the_routers_weights(name: str) -> None:
    """A target that the experts do not put out: each is fitted to its own output and its share of the rest."""
    model, ids = tiny(name), tokens(3, 20)
    x, index, weights = routed(model, ids)
    view = layer_views(model, own=True)[0]
    target = torch.randn(*ids.shape, x.shape[-1], generator=torch.Generator().manual_seed(4))
    accumulator = Accumulator(METHODS["a3+"].reads["mlp"])
    accumulator.goal = Goal(target=lambda tap: target, weight=lambda tap: torch.ones(ids.shape))
    put_out: list[Tensor] = []
    keep = view.experts.block.register_forward_hook(
        lambda module, args, output: put_out.append(output[0] if isinstance(output, tuple) else output)
    )
    with recording(view, accumulator):
        model(ids, use_cache=False)
    keep.remove()
    moments = accumulator.means(0)
    missing = (target - put_out[0]).flatten(0, 1)
    half = 0.5 if view.experts.shared is not None else 1.0
    for number in range(view.experts.count):
        cross, count = torch.zeros_like(moments[f"expert{number}.mlp_target"]), 0
        for token, slot in (index == number).nonzero().tolist():
            g, h = weights[token, slot], view.experts.features(number, x[token : token + 1])[0]
            wanted = g * h @ view.experts.down_weight(number) + half * g / weights[token].sum() * missing[token]
            cross += torch.outer(g * h, wanted).double()
            count += 1
        torch.testing.assert_close(moments[f"expert{number}.mlp_target"] * count, cross, rtol=1e-4, atol=1e-4)
    if view.experts.shared is not None:
        shared, gate = view.experts.shared, view.experts.shared_gate(x)
        h = gate * shared.act_fn(shared.gate_proj(x)) * shared.up_proj(x)
        cross = h.mT @ (shared.down_proj(h) + missing / 2)
        torch.testing.assert_close(moments["shared.mlp_target"] * len(x), cross.double(), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_where_the_router_scales_inputs_experts_are_seen_behind_that() -> None:
    """Llama 4: features of g x with nothing in front; what is missing goes half to the shared expert."""
    model, ids = tiny("llama4-plain").double(), tokens(3, 20)
    view = layer_views(model, own=True)[0]
    inputs: list[Tensor] = []
    keep = view.experts.block.register_forward_pre_hook(lambda module, args: inputs.append(args[0].flatten(0, 1)))
    target = torch.randn(*ids.shape, 48, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    accumulator = Accumulator(METHODS["a3+"].reads["mlp"])
    accumulator.goal = Goal(target=lambda tap: target, weight=lambda tap: torch.ones(ids.shape).double())
    with recording(view, accumulator):
        model(ids, use_cache=False)
    keep.remove()
    moments, x, block = accumulator.means(0), inputs[0], view.experts.block
    scores, missing = x @ block.router.weight.mT, target.flatten(0, 1) - block(x)[0]
    for number, mlp in enumerate(view.part("mlp").routed):
        chosen = (scores.topk(2, dim=-1).indices == number).any(dim=-1)
        g = scores[chosen, number].float().sigmoid().double()  # the router rounds so
        rows = [alone(mlp, gx) for gx in g[:, None] * x[chosen]]
        wanted = [y + rest / 4 for (_, y), rest in zip(rows, missing[chosen], strict=True)]
        cross = sum(torch.outer(h, y) for (h, _), y in zip(rows, wanted, strict=True))
        assert moments[f"expert{number}.observed"].item() == len(rows)
        found = moments[f"expert{number}.mlp_target"] * len(rows)
        torch.testing.assert_close(found, cross, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_experts_behind_norms_of_their_own_have_their_own_dense_outputs_as_targets() -> None:
    """Gemma 4: routed and shared are weighed by what the norm behind each divides by."""
    model, ids = tiny("gemma4-experts").double(), tokens(8, 20)
    model.set_experts_implementation("eager")
    first, view, *others = layer_views(model, own=True)
    streams = TwoStreams(model, [first, view, *others], ids, batch_size=None, seed=0)
    streams.begin(first)
    first.experts.shared.down_proj.weight.mul_(0.5)
    streams.finish(first)
    streams.begin(view)
    moments = streams.statistics(view, "mlp", METHODS["a3+"].reads["mlp"])
    norm = view.layer.post_attention_layernorm
    stream = streams.before[0] + norm(streams.attention_out[0])
    kept = {"shared": streams.shared_out[0], "routed": streams.mlp_out[0].reshape(stream.shape)}
    eps = norm.eps
    for name, output in kept.items():
        weight = 1 / ((output.square().mean(dim=-1) + eps) * stream.square().sum(dim=-1))
        if name == "shared":
            expected = (weight * output.square().sum(dim=-1)).mean().item()
            assert moments["shared.mlp_energy"].item() == pytest.approx(expected, rel=1e-4)
            assert not torch.allclose(streams.narrow.hidden[0], streams.before[0])
        else:  # what all routed experts are to put out together: each its own, and its share of what is missing
            found = streams._target(view, 0, streams.narrow.hidden[0], [streams.attention_out[0]])("down")
            torch.testing.assert_close(found, output)


@pytest.mark.parametrize("name", [name for name in MIXTURES if name != "deepseek_v3-plain-q"])  # all layers dense
def test_each_expert_is_solved_as_the_mlp_it_is(name: str) -> None:
    model, ids = tiny(name), tokens(12, 40)  # so that each sees enough tokens
    layers = collect(model, ids, lambda layer: frozenset({"mlp"}))
    view, moments = next((view, moments) for view, moments in layers if view.experts is not None)
    part = view.part("mlp")
    assert isinstance(part, Experts)
    width = part.width // 2
    found = solve_experts(a3.solve_mlp, part, moments, width, Options()).part
    for number, (mlp, narrow) in enumerate(zip(part.routed, found.routed, strict=True)):
        wanted = a3.solve_mlp(mlp, moments_of(moments, f"expert{number}"), width, Options()).part
        torch.testing.assert_close(narrow.W_down, wanted.W_down, rtol=0, atol=0)
    if part.shared is not None:
        assert found.shared is not None
        assert found.shared.width * part.width == width * part.shared.width


def test_an_expert_that_saw_nothing_is_chosen_by_its_weights_and_named() -> None:
    model, ids = tiny("mixtral"), tokens(12, 40)
    view, moments = next(collect(model, ids, lambda layer: frozenset({"mlp"})))
    starved = {k: v for k, v in moments.items() if not k.startswith("expert2.")}
    part = view.part("mlp")
    solution = solve_experts(a3.solve_mlp, part, starved, 16, Options())
    mlp = part.routed[2]
    sizes = [(mlp.W_up[:, i].norm() * mlp.W_gate[:, i].norm() * mlp.W_down[i].norm()).item() for i in range(mlp.width)]
    kept = sorted(sorted(range(mlp.width), key=lambda i: -sizes[i])[:16])
    torch.testing.assert_close(solution.part.routed[2].W_down, mlp.W_down[kept], rtol=0, atol=0)
    assert solution.note.startswith("1 of 4 experts saw fewer than 32 tokens")


def test_experts_are_dropped_exactly_where_the_objective_loses_least(mixture: Any) -> None:
    model, ids = mixture
    view, moments = next(collect(model, ids, lambda layer: frozenset({"mlp"})))
    part, width = view.part("mlp"), 48
    solution = choose_experts(part, moments, width, Options())
    neurons = width * len(part.routed)

    def lost(kept: tuple[int, ...]) -> float:
        each = -(-neurons // len(kept))
        total = 0.0
        for number, mlp in enumerate(part.routed):
            found = moments_of(moments, f"expert{number}")
            scores = (found["mlp"] * mlp.W_down.square().sum(-1) * found["observed"]).sort(descending=True).values
            total += scores[each if number in kept else 0 :].sum().item()
        return total

    possible = [
        kept
        for count in range(2, len(part.routed) + 1)
        if neurons <= count * part.width
        for kept in combinations(range(len(part.routed)), count)
    ]
    assert len(possible) > 1
    assert lost(solution.part.numbers) == pytest.approx(min(map(lost, possible)))


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen2_moe"])
def test_a_dropped_expert_is_one_that_the_router_never_chooses(name: str) -> None:
    """Reference: the stock model, whose router sees minus infinity for the same expert."""
    stock, model, ids = tiny(name), tiny(name), tokens(2, 20)
    view = layer_views(model)[0]
    part = view.part("mlp")
    assert isinstance(part, Experts)
    kept = (0, 2, 3)
    view.write(Experts(routed=tuple(part.routed[n] for n in kept), numbers=kept, top_k=2, shared=part.shared))
    router = stock.model.layers[0].mlp.gate

    def without(module: Any, args: Any) -> Any:
        x = args[0].reshape(-1, args[0].shape[-1])
        scores = (x @ module.weight.T).index_fill(-1, torch.tensor([1]), -torch.inf).softmax(dim=-1)
        values, chosen = scores.topk(2, dim=-1)
        values = values / values.sum(-1, keepdim=True) if getattr(module, "norm_topk_prob", True) else values
        return scores, values, chosen

    router.forward = lambda x: without(router, (x,))
    assert view.shape().experts == 3
    assert view.shape().dropped_experts == 1
    assert_same_but_for_rounding(logits(model, ids), logits(stock, ids), steps=steps_of(model))


@pytest.mark.parametrize("method", ["a3", "a3+", "reap"])
def test_dropping_removes_what_was_asked_and_comes_back_from_disk(method: str, tmp_path: Any) -> None:
    from trisect.models import load_model, save_model

    model, ids = tiny("qwen2_moe"), tokens(8, 40)
    before = budget_of(shape_of(model)).components["mlp"]
    settings: dict[str, Any] = {"parts": ("mlp",)} if method == "reap" else {"drop_experts": True}
    config = CompressConfig(ratio=0.25, method=method, align=None, qk_norm_tolerance=1.0, **settings)
    result = compress(model, config, tokens=tokens_from_tensor(ids))
    after = budget_of(shape_of(model)).components["mlp"]
    assert after < before
    save_model(model, None, tmp_path / "out", receipt=result.receipt)
    again = load_model(str(tmp_path / "out")).model
    assert shape_of(again) == shape_of(model)
    assert_same_but_for_rounding(logits(again, ids), logits(model, ids), steps=steps_of(model))


def test_flops_count_the_experts_a_token_passes_and_parameters_all_of_them() -> None:
    shape = shape_of(tiny("qwen2_moe")).layers[0]
    one = 3 * shape.d_model * shape.mlp
    assert budget_of(shape_of(tiny("qwen2_moe"))).components["mlp"] == 3 * one * (4 + 2)
    from trisect.plan.budget import layer_flops

    assert layer_flops(shape, batch=1, tokens=1, context=1).mlp == 2 * one * (2 + 2)


@pytest.mark.parametrize("name", ["gpt_oss", "granitemoe", "glm4_moe"])
@pytest.mark.parametrize("share", [0.1, 0.25, 0.4])
def test_no_more_is_removed_of_a_mixture_than_asked(name: str, share: float) -> None:
    shape = shape_of(tiny(name))
    plan = plan_for(shape, CompressConfig(ratio=share, method="a3", align=None))
    before, after = (budget_of(each).linear_parameters for each in (shape, apply_plan(shape, plan)))
    step = max(8 * 3 * layer.d_model * layer.mlps for layer in shape.layers)  # eight neurons of every expert
    assert share - step / before <= 1 - after / before <= share


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("llama-gqa", {"drop_experts": True}, "--drop-experts drops experts, and this model has none"),
        ("llama-gqa", {"method": "reap", "parts": ("mlp",)}, "--method reap drops experts, and this model has none"),
        ("mixtral", {"drop_experts": True, "parts": ("qk", "ov")}, "no part of qk,ov; add mlp"),
        ("deepseek_v3", {"drop_experts": True}, "chooses among groups of experts"),
    ],
)
def test_experts_that_cannot_go_are_refused_before_anything_is_touched(
    name: str, settings: dict[str, Any], message: str
) -> None:
    model = tiny(name)
    for view in layer_views(model):
        if view.experts is not None and name == "deepseek_v3":
            view.experts.router.num_group = 2
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(TrisectError, match=message):
        compress(model, CompressConfig(ratio=0.25, align=None, **settings), tokens=tokens_from_tensor(tokens(4, 40)))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_reap_keeps_as_many_experts_as_a_token_needs() -> None:
    view, moments = next(collect(tiny("mixtral"), tokens(4, 40), lambda layer: frozenset({"out_norm"})))
    part = view.part("mlp")
    assert len(drop_experts(part, moments, part.width // 8, Options()).part.routed) == part.top_k


@pytest.mark.parametrize("name", ["qwen2_moe", "llama4-plain"])
def test_experts_whose_sums_find_no_room_at_once_are_gathered_in_turn_to_the_same_bytes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = tokens_from_tensor(tokens(16, 24))
    expected = compress(tiny(name), CompressConfig(ratio=0.3, method="a3+", align=None), tokens=windows).model
    asked: list[Any] = []
    gather = TwoStreams.statistics

    def statistics(*args: Any, **given: Any) -> Any:
        asked.append(given["chosen"])
        return gather(*args, **given)

    monkeypatch.setattr(TwoStreams, "statistics", statistics)
    view = layer_views(tiny(name), own=True)[0]
    some = 2 * 2 * 2 * 8 * view.experts.width * (view.experts.width + 48)  # half of it is room for two
    monkeypatch.setattr(streamed, "available_bytes", lambda device: some)
    found = compress(tiny(name), CompressConfig(ratio=0.3, method="a3+", align=None), tokens=windows).model
    assert {range(0, 2), range(2, 4), range(4, 6)} <= set(asked)
    for key, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[key], value), key
