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
from exports import bytewise, compressed, pieces, quantized, sliced
from tokenizers import pre_tokenizers

from tiny_models import LLAMA, tiny, tokens
from tolerances import assert_same_text
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.errors import TrisectError
from trisect.export import export_hf, hf
from trisect.export.stock import plain_config, stock_factors
from trisect.export.vocabulary import split_digits, vocabulary_of
from trisect.models.source import read_header
from trisect.pipeline.run import compress

CASES = [
    *((name, "whole-qk") for name in ("llama-gqa", "llama-3", "llama-yarn", "qwen2")),
    *(
        (name, "model-rates")
        for name in ("llama-gqa", "llama-mha", "llama-3", "llama-biases", "llama-yarn", "mistral-window", "qwen2")
    ),
    ("qwen2-window", "model-rates"),
    ("llama-gqa", "some-layers"),
    ("llama-yarn", "some-layers"),
    ("llama-biases", "qk-alone"),
    ("llama-3", "wide-values"),
    ("ministral3", "model-rates"),
    ("phi3", "model-rates"),
    ("phi3", "whole-qk"),
    ("qwen3", "whole-qk"),
    ("smollm3", "whole-qk"),
    *((name, "whole-qk") for name in ("gemma3", "gemma2", "olmo2", "olmo3", "exaone4", "hunyuan", "seed_oss")),
    *((name, "model-rates") for name in ("gemma", "gemma2", "seed_oss")),
    ("granite", "model-rates"),
    ("mixtral", "model-rates"),
    ("mixtral", "some-layers"),
    ("qwen3_moe", "whole-qk"),
    ("qwen2_moe", "model-rates"),
    ("gpt_oss", "whole-qk"),
    ("gpt_oss-unbiased", "model-rates"),
    ("granitemoe", "model-rates"),
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
    assert done.difference < hf.TOLERANCE
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(stock) is getattr(transformers, done.architecture)
    torch.testing.assert_close(logits(stock), logits(native), rtol=0, atol=2e-4)


def test_sixteen_bits_leave_the_scale_of_embeddings_alone(tmp_path: Path) -> None:
    """sqrt(48) in bfloat16 would be off by a thousandth, and the files would not be what was checked."""
    done = export_hf(compressed("gemma3", "whole-qk"), None, tmp_path / "out", dtype=torch.bfloat16)
    assert done.difference < hf.TOLERANCE


def test_widths_are_the_largest_of_any_layer(tmp_path: Path) -> None:
    done = export_hf(compressed("llama-gqa", "some-layers"), None, tmp_path / "out", dtype=torch.float32)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert (config.head_dim, config.intermediate_size) == (16, 80)
    assert config.rope_parameters["rope_type"] == "default"  # all pairs have a place in the model's own
    assert sorted(set(done.mlp_widths)) == [56, 80]
    assert any("zeros" in note for note in done.notes)


def test_experts_are_on_disk_as_transformers_writes_them(tmp_path: Path) -> None:
    tiny("qwen2_moe").save_pretrained(tmp_path / "dense")
    config = CompressConfig(ratio=0.4, align=None, rope_scope="model")  # enough for one step of every expert
    native = compress(tiny("qwen2_moe"), config, tokens=tokens_from_tensor(tokens(4, 40))).model
    export_hf(native, None, tmp_path / "out", dtype=torch.float32)
    dense, out = (read_header(tmp_path / name / "model.safetensors")[0] for name in ("dense", "out"))
    assert set(dense) == set(out)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert config.shared_expert_intermediate_size == 2 * config.moe_intermediate_size < 48


def test_narrow_heads_stay_narrow(tmp_path: Path) -> None:
    export_hf(compressed("llama-gqa", "model-rates"), None, tmp_path / "out", dtype=torch.float32)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    rope = config.rope_parameters
    assert (config.head_dim, rope["rope_type"], len(rope["long_factor"])) == (12, "longrope", 6)
    assert rope["original_max_position_embeddings"] == config.max_position_embeddings  # vLLM's scale is 1 then


@pytest.mark.parametrize(
    ("width", "window", "config_class"),
    [
        (8, False, transformers.Qwen2Config),  # as wide as hidden size and heads say
        (4, False, transformers.LlamaConfig),
        (4, True, transformers.Qwen2Config),  # Llama has no window
    ],
)
def test_qwen2_is_called_llama_where_engines_would_not_read_its_head_width(
    width: int, window: bool, config_class: type
) -> None:
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2, "max_window_layers": 1}
    config = transformers.Qwen2Config(**sizes, use_sliding_window=window, sliding_window=7)
    assert type(plain_config(config, {"head_dim": width})) is config_class


@pytest.mark.parametrize(("width", "missing"), [(48, ["FlashInfer"]), (64, []), (40, ["FlashInfer", "CPU"])])
def test_engines_without_a_kernel_for_the_width_are_named(width: int, missing: list[str], tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**{**LLAMA, "head_dim": width})
    torch.manual_seed(0)
    settings = CompressConfig(ratio=0.2, align=None, parts=("mlp",), method="a3")
    dense = transformers.LlamaForCausalLM(config).eval()
    native = compress(dense, settings, tokens=tokens_from_tensor(tokens(2, 20))).model
    done = export_hf(native, None, tmp_path / "out", dtype=torch.float32)
    said = " ".join(note for note in done.notes if "kernel" in note)
    assert [name for name in ("FlashAttention", "FlashInfer", "CPU") if name in said] == missing


def test_rounding_is_said(tmp_path: Path) -> None:
    done = export_hf(compressed("llama-gqa", "model-rates"), None, tmp_path / "out", dtype=torch.bfloat16)
    assert done.rounding is not None
    assert hf.TOLERANCE < done.rounding < 0.1
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
    text = native.generate(ids, max_new_tokens=12, do_sample=False)
    assert_same_text(native, found["text"], text)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| method | a3+ |" in card
    assert "from_pretrained" in card


@pytest.mark.parametrize(
    ("name", "setting", "said"),
    [
        ("llama-gqa", "per-head", "--rope-scope model"),
        ("llama-gqa", "factored", "--method a3+ --portable"),
        ("qwen3", "sliced", "one norm of queries and keys for all heads"),
        ("phi3-longrope", "sliced", "query channels rotate"),
        ("gpt2", "sliced", "not of the Llama kind"),
        ("helium", "sliced", "its config cannot list"),
        ("mixtral", "fewer-experts", "without --drop-experts"),
        ("mistral3-wrapper", "sliced", "inside a multimodal one"),
    ],
)
def test_refusals_say_why_and_what_to_type(name: str, setting: str, said: str, tmp_path: Path) -> None:
    native = sliced(name) if setting == "sliced" else compressed(name, setting)
    with pytest.raises(TrisectError, match=re.escape(said)):
        export_hf(native, None, tmp_path / "out", dtype=torch.float32)
    assert not list(tmp_path.iterdir())


def test_a_window_makes_phi3_a_mistral(tmp_path: Path) -> None:
    torch.manual_seed(0)
    dense = transformers.Phi3ForCausalLM(transformers.Phi3Config(**LLAMA, sliding_window=7)).eval()
    config = CompressConfig(ratio=0.3, align=None, parts=("mlp",), method="a3")
    native = compress(dense, config, tokens=tokens_from_tensor(tokens(2, 20))).model
    done = export_hf(native, None, tmp_path / "out", dtype=torch.float32)
    assert done.architecture == "MistralForCausalLM"
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert stock.config.sliding_window == 7
    torch.testing.assert_close(logits(stock), logits(native), rtol=0, atol=2e-4)


def test_a_quantised_model_is_exported_before_it_is_quantised(tmp_path: Path) -> None:
    with pytest.raises(TrisectError, match="quantised: export the folder it was made from"):
        export_hf(quantized(), None, tmp_path / "out", dtype=torch.float32)


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


def test_far_positions_are_checked_with_exact_angles() -> None:
    """A stock table turns in float32, which is off by 1e-4 at position 2000: no mistake of an export."""
    config = transformers.LlamaConfig(**LLAMA)
    table = type(tiny("llama-gqa").model.rotary_emb)(config)
    positions, x = torch.tensor([[0, 1, 1999, 2047]]), torch.zeros(1)
    exact = torch.cat([torch.outer(positions[0].double(), table.inv_freq.double())] * 2, dim=-1).cos()
    assert (table(x, positions)[0][0] - exact).abs().max() > 1e-5
    torch.testing.assert_close(hf._Exact(table)(x, positions)[0][0], exact.float(), rtol=0, atol=1e-7)


DIGITS = "0123456789 \n"


def test_digits_are_split_again_where_no_longer_number_is_known(tmp_path: Path) -> None:
    """As the tokenizer was before transformers read it from GGUF."""
    split = pre_tokenizers.Digits(individual_digits=True)
    original = bytewise(split, vocabulary=DIGITS, merges=[("\u0120", "\u0120")])
    lost = bytewise(vocabulary=DIGITS, merges=[("\u0120", "\u0120")])
    text = "12  34"
    assert lost.tokenize(text) != original.tokenize(text)
    done = export_hf(compressed("llama-gqa", "whole-qk"), lost, tmp_path / "out", dtype=torch.float32)
    assert any("digits" in note for note in done.notes)
    written = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert written.tokenize(text) == original.tokenize(text)
    assert vocabulary_of(split_digits(lost)[0], 97)["tokenizer_pre"] == "smollm"


def test_a_tokenizer_with_longer_numbers_stays(tmp_path: Path) -> None:
    for tokenizer in (bytewise(vocabulary=DIGITS, merges=[("1", "2")]), bytewise(), pieces(), None):
        found, notes = split_digits(tokenizer)
        assert found is tokenizer
        assert notes == ()
