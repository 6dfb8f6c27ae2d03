"""GGUF files in real llama.cpp. Reference: the native model, by log-probabilities and by greedy tokens."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from exports import compressed, continued, greedy, pieces

from tiny_models import LLAMA, VOCAB, tokens
from trisect.cli import main
from trisect.config import CompressConfig
from trisect.data import load_tokens
from trisect.errors import TrisectError
from trisect.export import export_gguf
from trisect.export.hf import check_in_llama_cpp
from trisect.export.llama_cpp import LlamaCpp, reason, run_apart
from trisect.models import layer_views, load_model
from trisect.pipeline.run import compress

pytest.importorskip("xllamacpp", reason="llama.cpp is not installed (pip install xllamacpp)")

PROMPT = tokens(1, 40, seed=5)[0].tolist()
WITHIN = {"f32": 1e-4, "f16": 0.02, "q8_0": 0.2}
"""Largest difference of log-probabilities of random models that rounding the weights explains."""
CASES = [
    ("llama-gqa", "model-rates", "llama"),
    ("llama-mha", "model-rates", "llama"),
    ("llama-biases", "model-rates", "llama"),
    ("qwen2", "model-rates", "llama"),
    ("llama-3", "whole-qk", "llama"),
    ("llama-yarn", "whole-qk", "llama"),
    ("llama-gqa", "some-layers", "deci"),
    ("phi3", "model-rates", "llama"),
    ("qwen3", "whole-qk", "qwen3"),
    ("olmo2-mha", "whole-qk", "olmo2"),
    ("granite", "model-rates", "granite"),
    ("gemma3-local", "whole-qk", "gemma3"),
    ("gpt_oss", "whole-qk", "gpt-oss"),
    ("granitemoe", "model-rates", "granitemoe"),
    ("mixtral", "model-rates", "llama"),
    ("mixtral", "some-layers", "llama"),
    ("qwen3_moe-all", "whole-qk", "qwen3moe"),
    ("qwen2_moe", "whole-qk", "qwen2moe"),
]


FORCE = 1e6  # a bias that makes sure of a token; probabilities are reported without it


def log_probabilities(server: LlamaCpp, tokens: list[int]) -> list[float]:
    """Of each token but the first, behind those before it; the server has to be asked for each."""
    found = []
    for place in range(1, len(tokens)):
        (step,) = server.steps(tokens[:place], 1, cache_prompt=True, logit_bias=[[tokens[place], FORCE]])
        assert step["id"] == tokens[place]
        found.append(float(step["logprob"]))
    return found


@torch.no_grad()
def next_log_probabilities(model: Any, prompt: list[int]) -> torch.Tensor:
    return model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)


@pytest.mark.parametrize(("name", "setting", "architecture"), CASES)
def test_llama_cpp_computes_the_same(name: str, setting: str, architecture: str, tmp_path: Path) -> None:
    """Factors of the frequencies, widths per layer and biases: all that these files say is carried out."""
    native = compressed(name, setting)
    tokenizer = pieces()
    if name == "phi3":  # where a file calls itself so, llama.cpp looks for this token
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|endoftext|>"]})
    done = export_gguf(native, tokenizer, tmp_path / "model.gguf", kind="f32")
    assert done.architecture == architecture
    found = LlamaCpp(done.path)
    assert continued(found, PROMPT, 24) == greedy(native, PROMPT, 24)
    assert done.llama_cpp is not None
    assert done.llama_cpp < 1e-6
    theirs = torch.tensor(found.next_log_probabilities(PROMPT, VOCAB))
    torch.testing.assert_close(theirs, next_log_probabilities(native, PROMPT), rtol=0, atol=WITHIN["f32"])


def test_the_range_of_yarn_is_rounded_as_llama_cpp_rounds_it_and_the_file_says_so(tmp_path: Path) -> None:
    native = deepcopy(compressed("gpt_oss", "whole-qk"))
    rope = {**native.config.rope_parameters, "rope_theta": 150000.0, "factor": 32.0, "truncate": False}
    native.config.rope_parameters = rope
    native.model.rotary_emb = type(native.model.rotary_emb)(native.config)
    done = export_gguf(native, pieces(), tmp_path / "model.gguf", kind="f32")
    assert done.llama_cpp is not None
    assert done.llama_cpp < 1e-6
    assert any("YaRN" in note for note in done.notes)
    theirs = torch.tensor(LlamaCpp(done.path).next_log_probabilities(PROMPT, VOCAB))
    assert (theirs - next_log_probabilities(native, PROMPT)).abs().max() > WITHIN["f32"]  # it is not the native one


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize(("name", "setting"), [("llama-gqa", "model-rates"), ("llama-gqa", "some-layers")])
def test_rounded_weights_stay_near(name: str, setting: str, kind: str, tmp_path: Path) -> None:
    native = compressed(name, setting)
    done = export_gguf(native, pieces(), tmp_path / "model.gguf", kind=kind)
    theirs = torch.tensor(LlamaCpp(done.path).next_log_probabilities(PROMPT, VOCAB))
    torch.testing.assert_close(theirs, next_log_probabilities(native, PROMPT), rtol=0, atol=WITHIN[kind])


def test_a_sliding_window_is_the_longest_text(tmp_path: Path) -> None:
    native = compressed("mistral-window", "model-rates")
    done = export_gguf(native, pieces(), tmp_path / "model.gguf", kind="f32")
    found = LlamaCpp(done.path)
    assert continued(found, PROMPT[:4], 2) == greedy(native, PROMPT[:4], 2)
    with pytest.raises(ValueError, match="exceeds the available context size"):
        continued(found, PROMPT, 2)


def test_a_real_model_tells_the_same_story(assets: Path, tmp_path: Path) -> None:
    """From text, so that the tokenizer is llama.cpp's own too. Two layers, for the sake of time."""
    loaded = load_model(str(assets / "models" / "stories15m"), dtype="float32")
    model = loaded.model
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    source = str(assets / "data" / "tinystories" / "tinystories.txt")
    ids = load_tokens(source, loaded.tokenizer, samples=2, length=48, seed=0, sampling="first")
    compress(model, CompressConfig(ratio=0.3, portable=True), tokens=ids)
    text = "Once upon a time, there was a little girl named Lily. She didn't"
    expected = greedy(model, loaded.tokenizer(text).input_ids, 24)
    done = export_gguf(model, loaded.tokenizer, tmp_path / "model.gguf", kind="f16")
    assert continued(LlamaCpp(done.path), text, 24) == expected


def test_a_real_mixture_has_the_same_perplexity(assets: Path, tmp_path: Path) -> None:
    """Two layers of eight experts, for the sake of time; the router's choices and their weights are llama.cpp's."""
    loaded = load_model(str(assets / "models" / "stories-moe-22m"), dtype="float32")
    model = loaded.model
    model.model.layers = model.model.layers[:2]
    model.config.num_hidden_layers = 2
    source = str(assets / "data" / "tinystories" / "tinystories.txt")
    ids = load_tokens(source, loaded.tokenizer, samples=4, length=48, seed=0, sampling="first")
    compress(model, CompressConfig(ratio=0.25, portable=True, parts=("mlp",)), tokens=ids)
    done = export_gguf(model, loaded.tokenizer, tmp_path / "model.gguf", kind="f16")
    assert done.architecture == "qwen3moe"
    text = loaded.tokenizer("Once upon a time, there was a little girl named Lily. She didn't").input_ids
    with torch.no_grad():
        logits = model(torch.tensor([text])).logits[0, :-1].log_softmax(-1)
    native = -logits.gather(1, torch.tensor(text[1:]).unsqueeze(1)).mean().item()
    theirs = log_probabilities(LlamaCpp(done.path), text)
    assert abs(-sum(theirs) / len(theirs) - native) < 1e-3  # of perplexity, 0.1%


def test_compress_then_export_then_llama_cpp(tmp_path: Path) -> None:
    """The whole way by commands, on a tiny model."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**LLAMA, "head_dim": 32, "intermediate_size": 256})
    dense = transformers.LlamaForCausalLM(config)
    dense.save_pretrained(tmp_path / "dense")
    tokenizer = pieces()
    tokenizer.save_pretrained(tmp_path / "dense")
    (tmp_path / "text.txt").write_text("hello world the wolf told the world " * 60)
    folder, file = tmp_path / "native", tmp_path / "model.gguf"
    words = ["--ratio", "0.5", "--portable", "--samples", "2", "--length", "32", "--eval", "none"]
    words += ["--calibration", str(tmp_path / "text.txt"), "-o", str(folder), "--quiet"]
    assert main(["compress", str(tmp_path / "dense"), *words]) == 0
    assert main(["export", str(folder), "-o", str(file), "--to", "gguf", "--dtype", "f32"]) == 0
    native = load_model(str(folder)).model
    assert {(view.shape().qk, view.shape().vo, view.shape().mlp) for view in layer_views(native)} == {(16, 16, 128)}
    prompt = tokenizer("hello world").input_ids
    assert continued(LlamaCpp(file), "hello world", 24) == greedy(native, prompt, 24)


def test_each_token_of_a_text_has_its_probability(tmp_path: Path) -> None:
    """What perplexity is made from: asked token by token, against one forward pass."""
    native = compressed("llama-gqa", "model-rates")
    done = export_gguf(native, pieces(), tmp_path / "model.gguf", kind="f32")
    found = log_probabilities(LlamaCpp(done.path), PROMPT)
    with torch.no_grad():
        logits = native(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(PROMPT[1:]).unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=1e-4)


def test_a_file_that_llama_cpp_computes_otherwise_is_refused(tmp_path: Path) -> None:
    done = export_gguf(compressed("llama-gqa", "model-rates"), pieces(), tmp_path / "model.gguf", kind="f16")
    other = compressed("llama-gqa", "some-layers")
    with pytest.raises(TrisectError, match=r"where f16 explains 0.01: nothing was written"):
        check_in_llama_cpp(done.path, other, "f16", longest=64)


def test_a_file_that_llama_cpp_cannot_load_costs_only_its_own_process(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF but nothing else")
    with pytest.raises(RuntimeError, match="failed to load model|error loading model|gguf"):
        run_apart(tmp_path / "model.gguf", [[1, 2]], VOCAB)


def test_the_reason_is_found_in_a_log_that_python_wrote_into() -> None:
    whole = "0.00.008 I loading\n0.00.009 E gguf_init: failed to read magic\nTraceback (most recent call last):\n"
    assert reason(whole + "RuntimeError: no model") == "0.00.009 E gguf_init: failed to read magic"
    mixed = "0.00.009 E Traceback (most recent call last):\ngguf_init: failed to read magic\nRuntimeError: no"
    assert reason(mixed) == "gguf_init: failed to read magic"
    assert reason("Traceback (most recent call last):\nValueError: no such file") == "ValueError: no such file"
    assert reason("") == ""
