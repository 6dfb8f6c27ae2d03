"""The model cards of native and exported folders. Reference: counting by hand, and what the receipt says."""

import re
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from exports import compressed, pieces, sliced

from trisect.export import export_hf
from trisect.models import save_model, shape_of

MEASURED = {"data": "a/test.txt", "token_hash": "0f", "windows": 16, "length": 1024}
RECEIPT = {
    "source": "HuggingFaceTB/SmolLM2-135M",
    "recipe": {
        "method": "a3+",
        "ratio": 0.25,
        "portable": True,
        "calibration": {"source": "folder/of/mine/valid.txt", "samples": 24, "length": 1024},
    },
    "date": "2026-11-15T09:00:00+00:00",
    "trisect": "0.1.0",
    "perplexity": {"before": {"perplexity": 20.0, **MEASURED}, "after": {"perplexity": 25.1239, **MEASURED}},
}


def card(tmp_path: Path, receipt: dict, name: str = "llama-gqa") -> str:
    folder = save_model(sliced(name), None, tmp_path / "out", receipt=receipt)
    return (folder / "README.md").read_text(encoding="utf-8")


def test_the_numbers_of_the_receipt_are_told(tmp_path: Path) -> None:
    text = card(tmp_path, RECEIPT)
    assert "# SmolLM2-135M, compressed with trisect" in text
    assert "| perplexity (test.txt, 16 windows of 1024 tokens) | 20.000 | 25.124 |" in text
    assert "| calibration | 24 windows of 1024 tokens of valid.txt |" in text
    assert "| method | a3+ |" in text
    assert "folder/of" not in text
    front = yaml.safe_load(text.split("---")[1])
    assert front["base_model"] == "HuggingFaceTB/SmolLM2-135M"


def test_sizes_are_counted_from_the_model(tmp_path: Path) -> None:
    model = sliced("llama-gqa")
    text = card(tmp_path, {})
    now = sum(parameter.numel() for parameter in model.parameters())
    was = 97 * 48 * 2 + 48 + 3 * (2 * 48 + 48 * 16 * (6 + 2 + 2 + 6) + 3 * 48 * 80)
    assert f"| parameters | {was:,} | {now:,} |" in text
    bytes_each = sum(4 * 2 * (layer.qk + layer.vo) for layer in shape_of(model).layers)
    assert f"| KV cache, bytes per token | {4 * 2 * 32 * 3:,} | {bytes_each:,} |" in text
    assert "perplexity" not in text


@pytest.mark.parametrize(
    ("source", "title"),
    [("somewhere/on/this/machine/Model.gguf", "Model"), ("smollm2-135m", "smollm2-135m"), ("../folder/", "folder")],
)
def test_the_title_names_the_model_and_not_the_machine(source: str, title: str, tmp_path: Path) -> None:
    text = card(tmp_path, {"source": source})
    assert f"# {title}, compressed with trisect" in text
    assert "base_model" not in text


def test_a_folder_without_receipt_has_a_card_all_the_same(tmp_path: Path) -> None:
    text = card(tmp_path, {}, name="gpt2")
    assert "# A model, compressed with trisect" in text
    assert "trust_remote_code=True" in text


def blocks(text: str) -> list[str]:
    return re.findall(r"```(?:python)?\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("portable", [True, False])
def test_a_native_folder_says_how_each_engine_runs_it(portable: bool, tmp_path: Path) -> None:
    recipe = {**RECEIPT["recipe"], "portable": portable}
    found = "".join(blocks(card(tmp_path, {**RECEIPT, "recipe": recipe})))
    assert "import trisect" in found
    assert "trust_remote_code=True" in found
    assert "pip install vllm trisect\npython -m vllm.entrypoints.openai.api_server --model THIS_FOLDER" in found
    assert ("trisect export THIS_FOLDER" in found) == portable


@pytest.mark.parametrize(("name", "served"), [("qwen3", True), ("mpt", False), ("mistral3-wrapper", False)])
def test_the_plugin_for_vllm_is_named_where_it_serves_the_family(name: str, served: bool, tmp_path: Path) -> None:
    assert ("--model THIS_FOLDER --served" in card(tmp_path, RECEIPT, name=name)) == served


@pytest.mark.parametrize(
    ("name", "engines"),
    [
        ("llama-gqa", {"4.57", "--model THIS_FOLDER --served", "mlx_lm"}),
        ("granite", {"4.57", "--model THIS_FOLDER --served"}),
        ("ministral3", {"--model THIS_FOLDER --served", "mlx_lm"}),
        ("qwen2_moe", set()),
        ("gemma2", {"--model THIS_FOLDER --served"}),
        ("gpt_oss-unbiased", {"4.57"}),
    ],
)
def test_an_export_names_the_engines_that_load_it(name: str, engines: set[str], tmp_path: Path) -> None:
    export_hf(compressed(name, "model-rates"), None, tmp_path / "out", dtype=torch.float32, receipt=RECEIPT)
    text = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert {word for word in ("4.57", "--model THIS_FOLDER --served", "mlx_lm") if word in text} == engines
    assert "| perplexity (test.txt, 16 windows of 1024 tokens) | 20.000 | 25.124 |" in text
    assert "import trisect" not in text
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert f"| {model.num_parameters():,} |" in text


def test_the_python_of_an_exports_card_runs(tmp_path: Path) -> None:
    export_hf(compressed("llama-gqa", "model-rates"), pieces(), tmp_path / "out", dtype=torch.float32)
    block = blocks((tmp_path / "out" / "README.md").read_text(encoding="utf-8"))[0]
    found: dict = {}
    exec(block.replace("THIS_FOLDER", str(tmp_path / "out")), found)
    assert found["model"](**found["tokenizer"]("hello", return_tensors="pt")).logits.shape[-1] == 97
