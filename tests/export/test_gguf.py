"""GGUF files. References: the native model, transformers' GGUF reader, and llama.cpp's rules spelt out."""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from exports import bytewise, compressed, pieces, sliced
from tokenizers import Regex, pre_tokenizers

from tiny_models import tiny, tokens
from trisect.errors import TrisectError
from trisect.export import export_gguf, hf
from trisect.export.gguf import interleaved
from trisect.export.vocabulary import SPLITS, vocabulary_of
from trisect.models import layer_views, load_model

PROMPT = tokens(2, 60, seed=9)


def fields(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def test_channels_go_as_the_llama_cpp_converter_has_them() -> None:
    weight = torch.arange(4 * 6 * 3).reshape(4 * 6, 3)
    theirs = weight.numpy().reshape(4, 2, 3, 3).swapaxes(1, 2).reshape(24, 3)
    assert torch.equal(interleaved(weight, 4), torch.from_numpy(theirs.copy()))


@pytest.mark.parametrize(
    ("name", "architecture"), [("llama-gqa", "llama"), ("llama-mha", "llama"), ("qwen3_moe-all", "qwen3moe")]
)
def test_transformers_reads_the_same_model(name: str, architecture: str, tmp_path: Path) -> None:
    native = compressed(name, "whole-qk")
    done = export_gguf(native, pieces(), tmp_path / "model.gguf", kind="f32")
    assert (done.architecture, done.head_width) == (architecture, 16)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    with torch.no_grad():
        torch.testing.assert_close(stock(PROMPT).logits, native(PROMPT).logits, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("llama-gqa", "model-rates"),
        ("llama-3", "whole-qk"),
        ("llama-yarn", "whole-qk"),
        ("llama-biases", "model-rates"),
        ("qwen2", "model-rates"),
        ("mistral-window", "model-rates"),
    ],
)
def test_folded_rates_are_factors(name: str, setting: str, tmp_path: Path) -> None:
    done = export_gguf(compressed(name, setting), pieces(), tmp_path / "out", kind="f32")
    assert done.path == tmp_path / "out" / "model-f32.gguf"
    assert done.difference < hf.TOLERANCE
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(done.path).tensors}
    assert found["rope_freqs.weight"].data.shape == (done.head_width // 2,)
    said = fields(done.path)
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        assert said[f"llama.{key}"] == done.head_width
    assert ("blk.0.attn_q.bias" in found) == (name in ("llama-biases", "qwen2"))
    with pytest.raises(TrisectError, match="rotation factors .* Hugging Face folder"):
        load_model(str(done.path))
    if name == "mistral-window":
        assert said["llama.context_length"] == 7
        assert any("window" in note for note in done.notes)


@pytest.mark.parametrize(
    ("name", "setting", "said"),
    [
        ("qwen3_moe", "whole-qk", "layer 1 of this model has one MLP"),
        ("qwen3_moe-unnormalised", "whole-qk", "norm_topk_prob is False"),
        ("qwen2_moe", "model-rates", "qwen2moe takes no list of frequencies"),
        ("gpt_oss-unbiased", "whole-qk", "gpt-oss has biases in attention"),
        ("gpt_oss", "model-rates", "gpt-oss takes no list of frequencies"),
    ],
)
def test_a_mixture_that_llama_cpp_computes_otherwise_is_refused(
    name: str, setting: str, said: str, tmp_path: Path
) -> None:
    native = compressed(name.replace("unnormalised", "all"), setting)
    if name.endswith("unnormalised"):
        native = deepcopy(native)
        native.config.norm_topk_prob = False
        for view in layer_views(native):
            view.experts.router.norm_topk_prob = False
    with pytest.raises(TrisectError, match=re.escape(said)):
        export_gguf(native, pieces(), tmp_path / "model.gguf", kind="f32")
    assert not list(tmp_path.iterdir())


def test_experts_are_as_wide_as_the_widest_and_routers_are_not_rounded(tmp_path: Path) -> None:
    done = export_gguf(compressed("mixtral", "some-layers"), pieces(), tmp_path / "model.gguf", kind="f16")
    said, found = fields(done.path), {tensor.name: tensor for tensor in gguf.GGUFReader(done.path).tensors}
    assert (said["llama.expert_count"], said["llama.expert_used_count"]) == (4, 2)
    assert found["blk.1.ffn_up_exps.weight"].shape.tolist() == [48, 80, 4]
    assert found["blk.1.ffn_gate_inp.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    assert any("Expert widths from 56 to 80" in note for note in done.notes)


def test_widths_per_layer_are_deci(tmp_path: Path) -> None:
    done = export_gguf(compressed("llama-gqa", "some-layers"), pieces(), tmp_path / "model.gguf", kind="f32")
    assert done.architecture == "deci"
    said = fields(done.path)
    assert said["deci.feed_forward_length"] == [80, 56, 80]
    assert said["deci.attention.head_count_kv"] == [2, 2, 2]
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(done.path).tensors}
    assert found["blk.1.ffn_down.weight"].data.shape == (48, 56)


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_rows_that_fill_no_blocks_stay_in_16_bits(kind: str, tmp_path: Path) -> None:
    done = export_gguf(compressed("llama-gqa", "model-rates"), pieces(), tmp_path / "model.gguf", kind=kind)
    assert any("stay f16" in note for note in done.notes) == (kind == "q8_0")


def test_a_stock_model_can_be_written_too(tmp_path: Path) -> None:
    done = export_gguf(tiny("llama-gqa"), pieces(), tmp_path / "model.gguf", kind="f32")
    assert "rope_freqs.weight" not in {tensor.name for tensor in gguf.GGUFReader(done.path).tensors}


def merged_by_score(text: str, scores: dict[str, float]) -> list[str]:
    """llama.cpp's SentencePiece rule: join the neighbours that make the piece with the highest score."""
    parts = list("\u2581" + text.replace(" ", "\u2581"))
    while True:
        found = [(scores[a + b], -i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False)) if a + b in scores]
        if not found:
            return parts
        at = -max(found)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_pieces_merge_in_the_same_order() -> None:
    tokenizer = pieces()
    vocabulary = vocabulary_of(tokenizer, 97)
    assert [vocabulary[k] for k in ("tokenizer_model", "add_bos_token", "add_space_prefix")] == ["llama", True, True]
    scores = dict(zip(vocabulary["token_list"], vocabulary["token_scores"], strict=True))
    for text in ("hello world", "lo hell or word", "the world wore lo"):
        assert merged_by_score(text, scores) == tokenizer.tokenize(text)
    assert vocabulary["token_types"][:4] == [2, 3, 3, 6]  # unknown, control, control, byte
    assert vocabulary["token_list"][-1] == "[PAD96]"
    assert vocabulary["token_types"][-1] == 5


def test_real_pieces_merge_in_the_same_order(assets: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(assets / "models" / "stories15m")
    vocabulary = vocabulary_of(tokenizer, 32000)
    normal = zip(vocabulary["token_list"], vocabulary["token_scores"], vocabulary["token_types"], strict=True)
    scores = {token: score for token, score, kind in normal if kind == 1}
    text = "Once upon a time, there was a little girl named Lily. She wouldn't share 123 unbelievable crayons!"
    assert merged_by_score(text, scores) == tokenizer.tokenize(text)


def test_the_tokenizer_comes_back_from_the_file(tmp_path: Path) -> None:
    export_gguf(compressed("llama-gqa", "model-rates"), bytewise(), tmp_path / "model.gguf", kind="f16")
    found = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    for text in ("hello world", "word or hell"):
        assert found.tokenize(text) == bytewise().tokenize(text)


@pytest.mark.parametrize(
    ("tokenizer", "pre"), [(bytewise(), "gpt-2"), (bytewise(pre_tokenizers.Digits(individual_digits=True)), "smollm")]
)
def test_names_of_pre_tokenizers(tokenizer: Any, pre: str) -> None:
    vocabulary = vocabulary_of(tokenizer, 97)
    assert (vocabulary["tokenizer_model"], vocabulary["tokenizer_pre"]) == ("gpt2", pre)
    assert "token_scores" not in vocabulary
    assert vocabulary["token_merges"][0] == "h e"


@pytest.mark.parametrize("pattern", SPLITS)
def test_names_of_regular_expressions(pattern: str) -> None:
    tokenizer = bytewise()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    assert vocabulary_of(tokenizer, 97)["tokenizer_pre"] == SPLITS[pattern]


def test_refusals(tmp_path: Path) -> None:
    native = compressed("llama-gqa", "model-rates")
    with pytest.raises(TrisectError, match="needs a tokenizer"):
        export_gguf(native, None, tmp_path / "model.gguf")
    with pytest.raises(TrisectError, match="Known: f16, f32, q8_0"):
        export_gguf(native, pieces(), tmp_path / "model.gguf", kind="float16")
    with pytest.raises(TrisectError, match="tokens and the model .* embeddings"):
        export_gguf(native, pieces(vocabulary="ehlowrdt" + "".join(map(chr, range(300, 400)))), tmp_path / "model.gguf")
    with pytest.raises(TrisectError, match="--rope-scope model"):
        export_gguf(compressed("llama-gqa", "per-head"), pieces(), tmp_path / "model.gguf")
    for name, said in (("gpt2", "no stock form"), ("mistral3-wrapper", "no stock form")):
        with pytest.raises(TrisectError, match=said):
            export_gguf(sliced(name), pieces(), tmp_path / "model.gguf")
    with pytest.raises(TrisectError, match="no GGUF files of ministral3"):
        export_gguf(compressed("ministral3", "model-rates"), pieces(), tmp_path / "model.gguf")
    assert not list(tmp_path.iterdir())
