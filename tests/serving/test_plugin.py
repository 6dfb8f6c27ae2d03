"""Tiny models of every family in vLLM: same tokens and log-probabilities as in transformers, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engines import WHY, asked, engine, expected, largest_difference

from narrow_models import narrow
from tiny_models import CONFIGS, LLAMA, character_tokenizer, shake, tiny, tokens
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.errors import TrisectError
from trisect.models import FAMILIES, family_for, save_model
from trisect.models.compressed import compressed_class
from trisect.pipeline.run import compress
from trisect.serve import NOT_IN_VLLM

pytest.importorskip("vllm", reason=WHY)

PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in (40, 23)]  # longer than any short table of angles
ROUNDING = 2e-5
BY_FAMILY = {family_for(CONFIGS[name]()).name: name for name in reversed(CONFIGS) if not name.endswith("-wrapper")}
OTHERS = (
    "llama-3",
    "llama-biases",
    "phi3-longrope",
    "qwen2-window",
    "gemma3-one-key",
    "qwen3_moe-all",
    "falcon-grouped",
)
SERVED = [name for family, name in BY_FAMILY.items() if family not in NOT_IN_VLLM]


def saved(model: Any, folder: Path) -> Path:
    return save_model(model, character_tokenizer(bos_token="!", eos_token='"'), folder, receipt={})


def test_every_family_is_served_or_said_not_to_be() -> None:
    assert set(BY_FAMILY) == set(FAMILIES)
    assert set(NOT_IN_VLLM) <= set(FAMILIES)


@pytest.mark.parametrize("name", sorted({*SERVED, *OTHERS}))
def test_a_narrow_model_computes_the_same_in_vllm(name: str, tmp_path: Path) -> None:
    model = narrow(name)
    wanted = expected(model, PROMPTS)
    with engine(saved(model, tmp_path / "small")) as llm:
        assert largest_difference(asked(llm, PROMPTS), wanted) < ROUNDING


@pytest.mark.parametrize("family", NOT_IN_VLLM)
def test_other_families_are_refused_by_name(family: str, tmp_path: Path) -> None:
    folder = saved(narrow(BY_FAMILY[family]), tmp_path / "small")
    with pytest.raises(TrisectError, match=f"does not serve {family}"), engine(folder):
        pass


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama-gqa", {"method": "svd"}),  # factored maps
        ("qwen3_moe-all", {"drop_experts": True, "method": "a3+"}),
        ("llama-gqa", {"method": "a3+"}),  # folded rotations
    ],
)
def test_whatever_a_method_leaves_behind_is_served(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    config = CompressConfig(**{"ratio": 0.25, "align": None, "qk_norm_tolerance": 1.0, **settings})
    model = compress(tiny(name), config, tokens=tokens_from_tensor(tokens(8, 60))).model
    wanted = expected(model, PROMPTS)
    with engine(saved(model, tmp_path / "small")) as llm:
        assert largest_difference(asked(llm, PROMPTS), wanted) < ROUNDING


def one_layer_of_each(widths: tuple[int, ...], values: tuple[int, ...] | None = None) -> Any:
    """A random model whose layers have heads of these widths, cut from one of the widest."""
    values = values or tuple(width - 4 for width in widths)
    widest = max(widths)
    config = compressed_class("llama").config_class(
        **{**LLAMA, "head_dim": widest, "num_hidden_layers": len(widths), "num_attention_heads": 2}
    )
    original = {"qk": widest, "pairs": widest // 2, "vo": widest, "mlp": 80}
    both = zip(widths, values, strict=True)
    layers = [{**original, "qk": width, "pairs": width // 2, "vo": value} for width, value in both]
    config.trisect = {"format": 1, "method": "a3", "ratio": 0.0, "original": [original] * len(widths), "layers": layers}
    torch.manual_seed(0)
    model = compressed_class("llama")(config).eval()
    for layer in model.model.layers:
        index = layer.self_attn.rotary_index
        if index is not None:
            index.copy_(torch.randint(widest // 2, index.shape))
    shake(model, seed=0)
    config.architectures = [type(model).__name__]
    return model


def test_widths_of_the_table_are_computed_right_and_others_padded(tmp_path: Path) -> None:
    from trisect.serve.vllm import CPU_WIDTHS

    model = one_layer_of_each((*CPU_WIDTHS, 20, 40, 120))
    wanted = expected(model, PROMPTS)
    with engine(saved(model, tmp_path / "small")) as llm:
        found = llm.apply_model(lambda served: [layer.self_attn.attn.head_size for layer in served.model.layers])
        assert found == [[*CPU_WIDTHS, 32, 48, 128]]
        assert largest_difference(asked(llm, PROMPTS), wanted) < ROUNDING


def test_an_engine_that_computes_something_else_does_not_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trisect.serve import vllm as plugin

    folder = saved(narrow("llama-gqa"), tmp_path / "small")
    rows = plugin._rows
    # Frequencies of other key heads than the file has them for.
    monkeypatch.setattr(plugin, "_rows", lambda first, count: lambda p, x: rows(first, count)(p, x.flip(0, 1)))
    with pytest.raises(TrisectError, match="does not compute in this engine"), engine(folder):
        pass
    monkeypatch.setenv("TRISECT_SELF_CHECK", "0")
    with engine(folder) as llm:
        assert asked(llm, PROMPTS)


def test_a_folder_without_a_probe_is_served_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    import logging

    folder = saved(narrow("llama-gqa"), tmp_path / "small")
    (folder / "probe.json").unlink()
    logging.getLogger("trisect").propagate = True
    with engine(folder) as llm:
        assert asked(llm, PROMPTS)
    assert "was not compared" in caplog.text


def test_the_probe_is_what_transformers_computes_from_the_files(tmp_path: Path) -> None:
    folder = saved(narrow("gemma3"), tmp_path / "small")
    probe = json.loads((folder / "probe.json").read_text())
    again = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (answer,) = expected(again, [probe["prompt"]], new=len(probe["answer"]))
    assert answer.tokens == probe["answer"]
    assert answer.logprobs == pytest.approx(probe["logprobs"], abs=1e-4)
