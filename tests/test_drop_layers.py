"""Layers that a model misses least: which they are, and that what is left is the model without them."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import trisect
from command_line import read, run
from tiny_models import CONFIGS, character_tokenizer, logits, shake, tiny, tokens
from tolerances import assert_same_but_for_rounding, assert_same_model, rounding, steps_of
from trisect import CompressConfig, api
from trisect.calibrate.replay import layer_influence, least_influential
from trisect.errors import TrisectError
from trisect.models import family_for, layer_views
from trisect.models.limits import check_entry
from trisect.models.looking import check_droppable, drop_layers
from trisect.pipeline import run as pipeline

NAMES = ["llama-gqa", "qwen3", "gemma3", "gpt2", "mpt", "qwen2-window", "mixtral", "gpt_oss", "gemma3-wrapper"]
KINDS = {"gemma3": ["sliding_attention", "full_attention"], "gpt_oss": ["sliding_attention", "full_attention"]}
DEPTH = 5


def config_of(name: str, kept: list[int]) -> Any:
    """A tiny config of five layers, of which some are kept: written by hand."""
    config = CONFIGS[name]()
    text = config.get_text_config()
    text.num_hidden_layers = len(kept)
    if getattr(text, "layer_types", None) is not None:
        kinds = KINDS.get(name.partition("-")[0], ["full_attention", "sliding_attention"])
        kinds = kinds if name not in ("llama-gqa", "qwen3", "mixtral") else ["full_attention"]
        text.layer_types = [kinds[layer % len(kinds)] for layer in kept]
    return type(config).from_dict(config.to_dict())


def built(config: Any) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, family_for(config).model)._from_config(config).eval()


def deep(name: str) -> Any:
    model = built(config_of(name, list(range(DEPTH))))
    shake(model, seed=0)
    return model


def by_hand(name: str, whole: nn.Module, dropped: list[int]) -> Any:
    """A stock model that never had the dropped layers, with the weights of the others."""
    kept = [layer for layer in range(DEPTH) if layer not in dropped]
    model = built(config_of(name, kept))
    prefix = re.escape(family_for(model.config).layers)
    weights = {}
    for key, tensor in whole.state_dict().items():
        found = re.fullmatch(rf"({prefix}\.)(\d+)(\..*)", key)
        if found is None:
            weights[key] = tensor
        elif int(found[2]) in kept:
            weights[f"{found[1]}{kept.index(int(found[2]))}{found[3]}"] = tensor
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dropped", [[1], [1, 2], [0, 3]])
def test_what_is_left_is_the_stock_model_without_these_layers(name: str, dropped: list[int]) -> None:
    model = deep(name)
    expected = by_hand(name, model, dropped)
    drop_layers(model, dropped)
    ids = tokens(2, 24)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected(ids).logits)
        assert torch.equal(model.generate(ids, max_new_tokens=6), expected.generate(ids, max_new_tokens=6))
    assert model.config.get_text_config().to_dict() == expected.config.get_text_config().to_dict()
    assert model.num_parameters() == expected.num_parameters()


@pytest.mark.parametrize("name", NAMES)
def test_layers_that_work_has_owned_can_go(name: str) -> None:
    """As after synthetic text, which the model has decoded."""
    model = deep(name)
    expected = by_hand(name, model, [1, 2])
    layer_views(model, own=True)
    check_droppable(model, 2)
    drop_layers(model, [1, 2])
    ids = tokens(2, 24)
    assert_same_but_for_rounding(logits(model, ids), logits(expected, ids), steps=steps_of(expected))
    assert torch.equal(model.generate(ids, max_new_tokens=6), expected.generate(ids, max_new_tokens=6))


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "gpt2", "mpt"])
def test_influence_is_one_minus_the_mean_cosine_of_what_enters_and_leaves_a_layer(name: str) -> None:
    model, ids = deep(name), tokens(5, 12)
    cosines: list[list[float]] = [[] for _ in range(DEPTH)]

    def note(layer: int, args: tuple[Tensor, ...], kwargs: dict[str, Any], output: Any) -> None:
        before = args[0] if args else kwargs["hidden_states"]
        after = output[0] if isinstance(output, tuple) else output
        for x, y in zip(before.flatten(0, 1).double(), after.flatten(0, 1).double(), strict=True):
            cosines[layer].append(float(x @ y / (x.norm() * y.norm())))

    hooks = [
        view.layer.register_forward_hook(
            lambda _, args, kwargs, output, layer=view.index: note(layer, args, kwargs, output), with_kwargs=True
        )
        for view in layer_views(model)
    ]
    for window in ids:
        with torch.no_grad():
            model(window[None])
    for hook in hooks:
        hook.remove()
    model.train()
    found = layer_influence(model, ids, batch_size=2)
    assert model.training
    expected = [1 - sum(values) / len(values) for values in cosines]
    # A cosine is at most one, and inputs of a layer are as exact as the layers before it.
    torch.testing.assert_close(
        torch.tensor(found), torch.tensor(expected), rtol=0, atol=rounding(torch.float32, steps=steps_of(model))
    )
    assert max(expected) - min(expected) > 0.05, "the layers differ by more than rounding"


@pytest.mark.parametrize(
    ("influence", "count", "dropped"),
    [
        ([0.0, 0.3, 0.2, 0.4, 0.0], 2, [1, 2]),  # never the ends
        ([0.5, 0.2, 0.2, 0.2, 0.5], 2, [1, 2]),  # the first of equals
        ([0.1, 0.2, 0.2, 0.2, 0.05], 4, [1, 2, 3, 4]),  # the ends last of all, the one that does less first
    ],
)
def test_the_least_influential_go_and_the_ends_only_when_nothing_else_is_left(
    influence: list[float], count: int, dropped: list[int]
) -> None:
    assert least_influential(influence, count) == dropped


def saved(folder: Path, name: str) -> Path:
    deep(name).save_pretrained(folder / "dense")
    character_tokenizer().save_pretrained(folder / "dense")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return folder / "dense"


def typed(folder: Path, out: Path, *words: object) -> list[object]:
    text = ["--calibration", folder / "text.txt", "--samples", 8, "--length", 16, "--eval", folder / "text.txt"]
    return ["compress", folder / "dense", "-o", out, *text, "--align", "none", *words]


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "gemma3", "gpt2", "mpt"])
def test_dropping_alone_leaves_the_other_layers_as_they_were(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, name)
    out = tmp_path / "out"
    assert run(*typed(tmp_path, out, "--drop-layers", 2)) == 0
    table = capsys.readouterr().out
    receipt = read(out / "receipt.json")
    dropped = receipt["dropped_layers"]
    whole = deep(name)
    assert len(dropped) == 2
    expected = by_hand(name, whole, dropped)
    for found in (trisect.load(out), transformers.AutoModelForCausalLM.from_pretrained(out)):
        assert_same_model(found, expected, tokens(2, 24))
        assert found.num_parameters() == expected.num_parameters()
    before, after = receipt["before"], receipt["after"]
    assert (before["parameters"], after["parameters"]) == (whole.num_parameters(), expected.num_parameters())
    assert after["kv_bytes_per_token"] * DEPTH == before["kv_bytes_per_token"] * (DEPTH - 2)
    assert receipt["recipe"]["drop_layers"] == 2
    assert f"{dropped[0]} (" in table
    assert re.search(r"decoder layers\W+5\W+3\W+40.0%", table)
    assert run("inspect", out, "--json", tmp_path / "sizes.json") == 0
    sizes = read(tmp_path / "sizes.json")
    assert sizes["dropped_layers"] == dropped
    assert sizes["original"]["parameters"] == whole.num_parameters()
    assert f"as they were numbered: {dropped[0]}, {dropped[1]}" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "gemma3", "gpt2", "mpt"])
def test_layers_that_are_left_are_compressed_as_a_model_that_never_had_the_others(name: str, tmp_path: Path) -> None:
    ids, parts = tokens(24, 16), ("ov", "mlp")
    small: dict[str, Any] = {"ratio": 0.3, "parts": parts, "method": "a3", "align": None}
    model = deep(name)
    dropped = least_influential(layer_influence(model, ids), 2)
    expected = trisect.compress(by_hand(name, model, dropped), config=CompressConfig(**small), calibration=ids)
    found = trisect.compress(
        model, config=CompressConfig(drop_layers=2, **small), calibration=ids, out=tmp_path / "out"
    )
    assert found.receipt["dropped_layers"] == dropped
    assert found.receipt["plan"] == expected.receipt["plan"]
    assert_same_model(trisect.load(tmp_path / "out"), expected, tokens(2, 24))
    assert api.summary(trisect.load(tmp_path / "out")).before.parameters == deep(name).num_parameters()


@pytest.mark.parametrize("name", ["llama-gqa", "qwen3", "gemma3"])
def test_the_stock_export_is_the_stock_model_without_these_layers(name: str, tmp_path: Path) -> None:
    saved(tmp_path, name)
    assert run(*typed(tmp_path, tmp_path / "out", "--drop-layers", 2)) == 0
    assert run("export", tmp_path / "out", "-o", tmp_path / "stock") == 0
    config = read(tmp_path / "stock" / "config.json")
    assert config["num_hidden_layers"] == 3
    assert len(config.get("layer_types") or range(3)) == 3
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    assert "Trisect" not in type(stock).__name__
    dropped = read(tmp_path / "out" / "receipt.json")["dropped_layers"]
    expected, ids = by_hand(name, deep(name), dropped), tokens(2, 24)
    # An export may keep the scale of scores in other weights, so that only what comes out is the same.
    assert_same_but_for_rounding(logits(stock, ids), logits(expected, ids), steps=steps_of(expected))


def test_a_run_that_was_killed_ends_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, "llama-gqa")
    words = ("--drop-layers", 2, "--ratio", 0.3)
    assert run(*typed(tmp_path, tmp_path / "at-once", *words)) == 0
    solve, solved = pipeline.solve_step, []

    class Killed(BaseException):
        pass

    def killed(*given: Any) -> Any:
        if len(solved) == 5:
            raise Killed
        solved.append(given[1].index)
        return solve(*given)

    monkeypatch.setattr(pipeline, "solve_step", killed)
    with pytest.raises(Killed):
        run(*typed(tmp_path, tmp_path / "out", *words))
    monkeypatch.setattr(pipeline, "solve_step", lambda *given: solved.append(given[1].index) or solve(*given))
    first = set(solved)
    solved.clear()
    assert run(*typed(tmp_path, tmp_path / "out", *words)) == 0
    assert 0 in first
    assert set(solved) == {1, 2}, "the finished layer is not solved again"
    at_once, resumed = ((tmp_path / out / "model.safetensors").read_bytes() for out in ("at-once", "out"))
    assert at_once == resumed
    assert read(tmp_path / "at-once" / "config.json") == read(tmp_path / "out" / "config.json")


def test_a_model_that_lost_layers_can_be_compressed_again_and_remembers_them(tmp_path: Path) -> None:
    ids, model = tokens(24, 16), deep("llama-gqa")
    whole = model.num_parameters()
    trisect.compress(model, config=CompressConfig(drop_layers=1), calibration=ids, out=tmp_path / "out")
    narrower = CompressConfig(ratio=0.5, method="a3", align=None)
    again = trisect.compress(trisect.load(tmp_path / "out"), config=narrower, calibration=ids, out=tmp_path / "two")
    assert again.receipt["dropped_layers"] == model.receipt["dropped_layers"]
    assert api.summary(trisect.load(tmp_path / "two")).before.parameters == whole


@pytest.mark.parametrize("dropped", [[9], [2, 1], [1, 1], [-1], ["1"], 1])
def test_numbers_of_layers_that_there_cannot_have_been_are_refused(dropped: Any) -> None:
    model = trisect.compress(deep("llama-gqa"), config=CompressConfig(drop_layers=1), calibration=tokens(8, 16))
    check_entry(model.config.trisect)
    with pytest.raises(TrisectError, match=r"config\.json: trisect"):
        check_entry({**model.config.trisect, "dropped_layers": dropped})


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma4", "read the keys and values of earlier ones"),
        ("qwen3_next", "is a hybrid"),
        ("falcon_h1", "is a hybrid"),
        ("smollm3", "differ in rotation"),
        ("qwen3_moe", "differ in rotation, experts"),
    ],
)
def test_layers_that_depend_on_each_other_or_on_their_place_stay(name: str, reason: str) -> None:
    model = tiny(name)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(TrisectError, match=reason):
        trisect.compress(model, config=CompressConfig(drop_layers=1), calibration=tokens(8, 16))
    assert model.state_dict().keys() == before.keys()


def test_a_setting_that_depends_on_the_place_of_a_layer_is_named() -> None:
    """Such as a scale that each layer has by its number."""
    model = deep("llama-gqa")
    for view in layer_views(model):
        view.layer.self_attn.scaling = 1 / (1 + view.index)
    with pytest.raises(TrisectError, match=r"its config ties self_attn\.scaling of a layer to its number"):
        check_droppable(model, 1)
    assert len(layer_views(model)) == DEPTH


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--drop-layers", 5], "has 5 layers: --drop-layers 4 or less"),
        (["--drop-layers", -1], "drop_layers must be greater than or equal to 0"),
        (["--drop-layers", 1, "--max-ppl-increase", "5%"], "keep one"),
        (["--drop-layers", 1, "--layers", "0-2"], "leave one of them out"),
        (["--drop-layers", 1, "--ratio", "1.5"], "above 0 and below 1"),
        (["--drop-layers", 1, "--stream", "on"], "--drop-layers needs the whole model in memory; use --stream off"),
        (["--drop-layers", 1, "--moments", __file__], "leave --moments out"),
        (["--ratio", 0], "above 0 and below 1"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    words: list[object], answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path, "llama-gqa")
    assert run(*typed(tmp_path, tmp_path / "out", *words)) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert answer in said
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_steps_one_by_one_do_not_drop_and_say_so() -> None:
    with pytest.raises(TrisectError, match="leave drop_layers out here"):
        api.plan(deep("llama-gqa"), CompressConfig(drop_layers=1, ratio=0.25, align=None))


def test_a_ratio_of_zero_needs_layers_to_drop() -> None:
    config = CompressConfig(drop_layers=1, ratio=0)
    assert config == CompressConfig(drop_layers=1)
    assert CompressConfig.from_dict(config.to_dict()) == config
    with pytest.raises(TrisectError, match="No ratio was given"):
        CompressConfig(drop_layers=0)


def test_a_plan_counts_without_the_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(tmp_path, "llama-gqa")
    words = ["--drop-layers", 2, "--align", "none", "--json", tmp_path / "plan.json"]
    assert run("plan", tmp_path / "dense", *words) == 0
    model = deep("llama-gqa")
    facts = read(tmp_path / "plan.json")
    assert facts["before"]["parameters"] == model.num_parameters()
    assert facts["after"]["parameters"] == by_hand("llama-gqa", model, [1, 2]).num_parameters()
    assert re.search(r"decoder layers\W+5\W+3", capsys.readouterr().out)


def test_a_ratio_beside_dropped_layers_says_that_it_counts_what_is_left(tmp_path: Path, capsys: Any) -> None:
    saved(tmp_path, "llama-gqa")
    words = ["--drop-layers", 2, "--ratio", 0.25, "--align", "none"]
    assert run("plan", tmp_path / "dense", *words) == 0
    planned = capsys.readouterr().out.splitlines()[0]
    assert planned.startswith("2 of 5 layers dropped; of what is left asked to remove 25.0%, planned ")
    assert run(*typed(tmp_path, tmp_path / "out", *words)) == 0
    assert planned in capsys.readouterr().out.splitlines()
