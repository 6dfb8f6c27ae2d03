"""Good files of every kind that trisect reads, to be made hostile: a tiny model and what belongs to it."""

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuzz_gguf as gguf
import tokenizers
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file

from trisect.cli import main
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.models import fingerprint, save_model, shape_of
from trisect.pipeline.run import compress
from trisect.pipeline.statistics import calibrate
from trisect.plan import plan_for
from trisect.plan.budget import LatencyTable
from trisect.plan.curves import Curves

VOCAB = 40
CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WORDS = " ".join(f"w{n % 30}" for n in range(400))
RUN = {
    "ratio": 0.3,
    "method": "a3",
    "parts": "qk,ov,mlp",
    "layers": "0-1",
    "align": "none",
    "floor": 0.1,
    "qk_norm_tolerance": 0.1,
    "without": [],
    "allocate": "uniform",
    "calibration": {"source": "builtin", "samples": 2, "length": 8, "sampling": "first", "seed": 0},
}
RECIPE = {
    "name": "small",
    "title": "A small comparison",
    "models": [{"name": "tiny", "source": "dense", "dtype": "float32", "note": "random"}],
    "methods": ["a3", {"name": "a3", "label": "half", "parts": ["qk", "ov"], "ratios": [0.25], "models": "tiny"}],
    "ratios": [0.25, 0.5],
    "align": "none",
    "calibration": {"source": "text.txt", "samples": 2, "length": 8, "sampling": "first"},
    "evaluation": [{"name": "fox", "data": "text.txt", "length": 8, "windows": 2}],
    "tasks": {"names": ["piqa"], "limit": 2, "shots": 0},
    "kv": True,
}


@dataclass(frozen=True, kw_only=True)
class Seeds:
    root: Path
    """dense/, sharded/, narrow/ and the single files."""
    weights: dict[str, torch.Tensor]
    fingerprint: str
    shape: Any
    gguf_keys: list[tuple[str, bytes]]
    gguf_tensors: list[dict[str, Any]]
    gguf_data: bytes

    def json(self, name: str) -> Any:
        return json.loads((self.root / name).read_text())


def build_seeds(root: Path) -> Seeds:
    """Write all good files under `root`."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).eval()
    tokenizer = _tokenizer()
    for name, shards in (("dense", "1GB"), ("sharded", "8KB")):
        model.save_pretrained(root / name, max_shard_size=shards)
        tokenizer.save_pretrained(root / name)
    weights = load_file(root / "dense" / "model.safetensors")
    shape, mark = shape_of(model), fingerprint(model)
    (root / "text.txt").write_text(WORDS)
    tokens = tokens_from_tensor(torch.arange(64).reshape(4, 16) % VOCAB)
    save_file({"input_ids": tokens.ids}, root / "ids.safetensors")
    config = CompressConfig(ratio=0.3, method="a3", align=None)
    calibrate(model, config, root / "moments.safetensors", tokens=tokens)
    _write(root / "plan.json", plan_for(shape, config).to_dict())
    _write(root / "curves.json", _curves(shape, mark).to_dict())
    _write(root / "latency.json", _latency(shape).to_dict())
    (root / "run.yaml").write_text(yaml.safe_dump(RUN))
    (root / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    narrow = compress(model, config, tokens=tokens)
    save_model(narrow.model, tokenizer, root / "narrow", receipt=narrow.receipt)
    _compare(root)
    keys, tensors, data = _gguf(weights)
    return Seeds(
        root=root, weights=weights, fingerprint=mark, shape=shape, gguf_keys=keys, gguf_tensors=tensors, gguf_data=data
    )


def _tokenizer() -> Any:
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{n}": n + 3 for n in range(VOCAB - 3)}}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def _compare(root: Path) -> None:
    """Receipts of a small comparison, in results/."""
    model, text = str(root / "dense"), str(root / "text.txt")
    recipe = {
        "name": "cells",
        "models": [{"name": "tiny", "source": model}],
        "methods": ["a3"],
        "ratios": [0.3],
        "align": "none",
        "calibration": {"source": text, "samples": 2, "length": 8, "sampling": "first"},
        "evaluation": [{"name": "words", "data": text, "length": 8, "windows": 2}],
    }
    path = root / "cells.yaml"
    path.write_text(yaml.safe_dump(recipe))
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["compare", str(path), "-o", str(root / "results"), "--quiet"]) == 0


def _curves(shape: Any, mark: str) -> Curves:
    points = {
        (index, component): {layer.width(component) * part // 4: 0.1 * (4 - part) for part in (1, 2, 3, 4)}
        for index, layer in enumerate(shape.layers)
        for component in ("qk", "ov", "mlp")
    }
    return Curves(points=points, fingerprint=mark, token_hash="0" * 64, method="a3", dense_loss=3.5)


def _latency(shape: Any) -> LatencyTable:
    layer = shape.layers[0]
    seconds = {
        (component, layer.d_model, 0 if component == "mlp" else layer.heads, 0 if component == "mlp" else 2): {
            layer.width(component) * part // 4: 1e-5 * part for part in (1, 2, 3, 4)
        }
        for component in ("qk", "ov", "mlp")
    }
    return LatencyTable(seconds=seconds, device="cpu", dtype="float32")


def _gguf(weights: dict[str, torch.Tensor]) -> tuple[list[tuple[str, bytes]], list[dict[str, Any]], bytes]:
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        **{f"self_attn.{x}_proj": f"attn_{'output' if x == 'o' else x}" for x in "qkvo"},
        **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    }
    tensors, data = [], b""
    for name, tensor in weights.items():
        body = name.removesuffix(".weight")
        if body.startswith("model.layers."):
            _, _, layer, rest = body.split(".", 3)
            body = f"blk.{layer}.{names[rest]}"
        else:
            body = names[body]
        dims = list(reversed(tensor.shape))
        tensors.append({"name": f"{body}.weight", "dims": dims, "kind": 0, "offset": len(data)})
        data += tensor.float().numpy().tobytes()
        data += b"\0" * (-len(data) % 32)
    sizes = {
        "context_length": 64,
        "embedding_length": 16,
        "block_count": 2,
        "feed_forward_length": 24,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 8,
        "attention.value_length": 8,
        "rope.dimension_count": 8,
        "vocab_size": VOCAB,
    }
    keys = [("general.architecture", gguf.string("llama")), ("general.name", gguf.string("tiny"))]
    keys += [(f"llama.{key}", gguf.scalar("u32", value)) for key, value in sizes.items()]
    keys += [("llama.attention.layer_norm_rms_epsilon", gguf.scalar("f32", 1e-6))]
    keys += [("llama.rope.freq_base", gguf.scalar("f32", 10000.0))]
    words = ["<unk>", "<s>", "</s>", *(f"\u2581w{n}" for n in range(VOCAB - 3))]
    keys += [
        ("tokenizer.ggml.model", gguf.string("llama")),
        ("tokenizer.ggml.tokens", gguf.array("str", words)),
        ("tokenizer.ggml.scores", gguf.array("f32", [-float(n) for n in range(VOCAB)])),
        ("tokenizer.ggml.token_type", gguf.array("i32", [2, 3, 3, *[1] * (VOCAB - 3)])),
        ("tokenizer.ggml.bos_token_id", gguf.scalar("u32", 1)),
        ("tokenizer.ggml.eos_token_id", gguf.scalar("u32", 2)),
    ]
    return keys, tensors, data


def _write(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data))
