"""Stock checkpoints. Reference: the native model, by logits and by greedy text."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from exports import compressed, pieces

from tiny_models import tiny, tokens
from trisect.errors import TrisectError
from trisect.export import check, export_hf, hf
from trisect.export.rotation import stock_factors

CASES = [
    *((name, "whole-qk") for name in ("llama-gqa", "llama-3", "llama-yarn", "qwen2")),
    *(
        (name, "model-rates")
        for name in (
            "llama-gqa",
            "llama-mha",
            "llama-3",
            "llama-biases",
            "llama-yarn",
            "mistral-window",
            "qwen2",
        )
    ),
    ("mistral-window", "model-rates"),
    ("qwen2-window", "model-rates"),
    ("llama-gqa", "some-layers"),
    ("llama-yarn", "some-layers"),
    ("llama-biases", "qk-alone"),
    ("llama-3", "wide-values"),
]
PROMPT = tokens(2, 60, seed=9)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(PROMPT).logits


@pytest.mark.parametrize(("name", "setting"), CASES)
def test_stock_model_computes_the_same(name: str, setting: str, tmp_path: Path) -> None:
    native = compressed(name, setting)
    done = export_hf(native, None, tmp_path / "out", dtype=torch.float32)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not [key for key in config if "trisect" in str(key) or "trisect" in str(config[key]).lower()]
    assert config["architectures"] == [done.architecture]
    assert done.difference < check.TOLERANCE
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(stock) is getattr(transformers, done.architecture)
    torch.testing.assert_close(logits(stock), logits(native), rtol=0, atol=2e-4)


def test_widths_are_the_largest_of_any_layer(tmp_path: Path) -> None:
    done = export_hf(compressed("llama-gqa", "some-layers"), None, tmp_path / "out", dtype=torch.float32)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.head_dim, config.intermediate_size) == (16, 80)
    assert config.rope_parameters["rope_type"] == "default"  # all pairs have a place in the model's own
    assert sorted(set(done.mlp_widths)) == [56, 80]
    assert any("zeros" in note for note in done.notes)


def test_narrow_heads_stay_narrow(tmp_path: Path) -> None:
    export_hf(compressed("llama-gqa", "model-rates"), None, tmp_path / "out", dtype=torch.float32)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    rope = config.rope_parameters
    assert (config.head_dim, rope["rope_type"], len(rope["long_factor"])) == (12, "longrope", 6)
    assert (
        rope["original_max_position_embeddings"] == config.max_position_embeddings
    )  # vLLM's scale is 1 then


def test_qwen2_as_llama(tmp_path: Path) -> None:
    native = compressed("qwen2", "model-rates")
    done = export_hf(native, None, tmp_path / "out", dtype=torch.float32, as_llama=True)
    assert done.architecture == "LlamaForCausalLM"
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(stock), logits(native), rtol=0, atol=2e-4)


def test_a_window_is_not_llama(tmp_path: Path) -> None:
    with pytest.raises(TrisectError, match="without --as-llama"):
        export_hf(
            compressed("mistral-window", "model-rates"),
            None,
            tmp_path / "out",
            dtype=torch.float32,
            as_llama=True,
        )


def test_rounding_is_said(tmp_path: Path) -> None:
    done = export_hf(compressed("llama-gqa", "model-rates"), None, tmp_path / "out", dtype=torch.bfloat16)
    assert done.rounding is not None
    assert check.TOLERANCE < done.rounding < 0.1
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert stock.dtype == torch.bfloat16


LOADER = """
import sys
sys.modules["trisect"] = None
import torch, transformers
folder, out = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(folder)
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
ids = tokenizer("hello world", return_tensors="pt").input_ids
with torch.no_grad():
    found = {"ids": ids, "logits": model(ids).logits}
    found["text"] = model.generate(ids, max_new_tokens=12, do_sample=False)
torch.save(found, out)
"""


def test_loads_where_trisect_cannot_be_imported(tmp_path: Path) -> None:
    native, tokenizer = compressed("llama-gqa", "model-rates"), pieces()
    receipt = {"recipe": {"method": "a3+", "ratio": 0.3}, "date": "2026-11-01"}
    export_hf(native, tokenizer, tmp_path / "out", dtype=torch.float32, receipt=receipt)
    command = [sys.executable, "-c", LOADER, str(tmp_path / "out"), str(tmp_path / "found.pt")]
    subprocess.run(command, check=True, cwd=tmp_path, capture_output=True)
    found = torch.load(tmp_path / "found.pt")
    ids = tokenizer("hello world", return_tensors="pt").input_ids
    assert torch.equal(found["ids"], ids)
    with torch.no_grad():
        torch.testing.assert_close(found["logits"], native(ids).logits, rtol=0, atol=2e-4)
        assert torch.equal(found["text"], native.generate(ids, max_new_tokens=12, do_sample=False))
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| method | a3+ |" in card
    assert "from_pretrained" in card


@pytest.mark.parametrize(
    ("name", "setting", "said"),
    [
        ("llama-gqa", "per-head", "--rope-scope model"),
        ("llama-gqa", "factored", "--method a3+ --rope-scope model"),
        ("qwen3", "whole-qk", "norm between projection and rotation"),
        ("gpt2", "whole-qk", "not of the Llama kind"),
    ],
)
def test_refusals_say_why_and_what_to_type(name: str, setting: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(TrisectError, match=re.escape(said)):
        export_hf(compressed(name, setting), None, tmp_path / "out", dtype=torch.float32)
    assert not list(tmp_path.iterdir())


def test_a_stock_model_is_one_already(tmp_path: Path) -> None:
    with pytest.raises(TrisectError, match="stock checkpoint already"):
        export_hf(tiny("llama-gqa"), None, tmp_path / "out", dtype=torch.float32)


def test_a_wrong_export_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(rates: torch.Tensor, base: float) -> list[float]:
        factors = stock_factors(rates, base)
        factors[-2] *= 1.01  # the slowest rotation that is used (the last slot is padding): hardest to notice
        return factors

    monkeypatch.setattr(hf, "stock_factors", wrong)
    with pytest.raises(TrisectError, match="nothing was written"):
        export_hf(compressed("llama-gqa", "model-rates"), None, tmp_path / "out", dtype=torch.float32)
    assert not list(tmp_path.iterdir())
