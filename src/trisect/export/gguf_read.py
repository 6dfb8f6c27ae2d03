"""A GGUF file as llama.cpp would read it: what it says, and its weights under Hugging Face's names."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from trisect.errors import TrisectError
from trisect.export.rotation import listed_rope

FACTORS = "rope_freqs.weight"
HALVED = ("qwen3",)
"""Architectures whose channels llama.cpp pairs as Hugging Face does."""

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Module of a layer, or of the model -> llama.cpp's name."""

LOSSES = {"f32": 0.0, "f16": 1e-3, "q8_0": 2e-2}
"""The largest error of a matrix, relative to its norm, that a kind of weights explains."""


def interleaved(x: Tensor, heads: int) -> Tensor:
    """Rows (heads 2n, ...): from [firsts | seconds] of each head to adjacent pairs, as llama.cpp has them."""
    return x.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def halved(x: Tensor, heads: int) -> Tensor:
    """Undo `interleaved`."""
    return x.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What the file says, in a config's words, and its tensors in float32, MLPs filled up to one width."""
    reader = gguf.GGUFReader(path)
    said = _said(reader)
    found = {
        tensor.name: torch.from_numpy(
            np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        )
        for tensor in reader.tensors
    }
    base = said["rope_parameters"]["rope_theta"]
    if FACTORS in found:
        said["rope_parameters"] = listed_rope(
            found.pop(FACTORS).tolist(), base, said["max_position_embeddings"]
        )
    said["tie_word_embeddings"] = "output.weight" not in found
    heads = {"attn_q": said["num_attention_heads"], "attn_k": said["num_key_value_heads"]}
    if reader.fields["general.architecture"].contents() in HALVED:
        heads = {}
    tensors = {}
    for name, tensor in found.items():
        kind = name.split(".")[-2]
        tensor = halved(tensor, heads[kind]) if kind in heads else tensor
        tensors[_name(name)] = _filled(tensor, kind, name, said["intermediate_size"])
    if said["tie_word_embeddings"]:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return said, tensors


def check_tensors(found: dict[str, Tensor], expected: dict[str, Tensor], kind: str) -> None:
    """Refuse a file whose weights are not the ones that were to be written."""
    if set(found) != set(expected):
        odd = sorted(set(found) ^ set(expected))
        raise TrisectError(
            f"The GGUF file misses or invents {odd[0]}; nothing was written. Please report it."
        )
    for name, tensor in expected.items():
        error = float((found[name] - tensor).norm() / tensor.norm().clamp(min=1e-30))
        if not error <= LOSSES[kind]:
            raise TrisectError(
                f"{name} came back from the GGUF file with an error of {error:.2g}, where {kind} explains "
                f"{LOSSES[kind]:g}; nothing was written. Try --dtype f32, and please report it."
            )


def _said(reader: Any) -> dict[str, Any]:
    def value(key: str) -> Any:
        return reader.fields[key].contents()

    arch = value("general.architecture")
    widths, heads, kv_heads = (
        value(f"{arch}.{key}")
        for key in ("feed_forward_length", "attention.head_count", "attention.head_count_kv")
    )
    return {
        "vocab_size": value(f"{arch}.vocab_size"),
        "max_position_embeddings": value(f"{arch}.context_length"),
        "hidden_size": value(f"{arch}.embedding_length"),
        "num_hidden_layers": value(f"{arch}.block_count"),
        "intermediate_size": max(_list(widths)),
        "num_attention_heads": max(_list(heads)),
        "num_key_value_heads": max(_list(kv_heads)),
        "head_dim": value(f"{arch}.attention.key_length"),
        "rms_norm_eps": value(f"{arch}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": value(f"{arch}.rope.freq_base")},
    }


def _list(value: Any) -> list[int]:
    return list(value) if isinstance(value, list) else [value]


def _filled(tensor: Tensor, kind: str, name: str, width: int) -> Tensor:
    if kind in ("ffn_up", "ffn_gate"):
        more = width - tensor.shape[0]
        return torch.nn.functional.pad(tensor, (0, more) if tensor.ndim == 1 else (0, 0, 0, more))
    if kind == "ffn_down" and name.endswith(".weight"):
        return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]))
    return tensor


def _name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    back = {theirs: ours for ours, theirs in NAMES.items()}
    *place, kind, ending = name.split(".")
    return f"{back[kind]}.{ending}" if not place else f"model.layers.{place[1]}.{back[kind]}.{ending}"
