"""Published shapes by name: the configs of the checkpoints, without their weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trisect.errors import unknown_name


@dataclass(frozen=True, kw_only=True)
class PublishedShape:
    """What a transformers config needs to build a checkpoint's architecture."""

    checkpoint: str
    """Whose config.json this is."""
    config: str
    """The transformers config class."""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        """The transformers config."""
        import transformers

        return getattr(transformers, self.config)(**_copied(self.settings))


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


LLAMA3 = {
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}

SHAPES: dict[str, PublishedShape] = {
    "llama-2-13b": PublishedShape(
        checkpoint="meta-llama/Llama-2-13b-hf",
        config="LlamaConfig",
        settings={
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 40,
            "vocab_size": 32000,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "llama-3.1-8b": PublishedShape(
        checkpoint="meta-llama/Llama-3.1-8B",
        config="LlamaConfig",
        settings={
            **LLAMA3,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_parameters": _llama3_rope(8.0),
        },
    ),
    "llama-3.2-1b": PublishedShape(
        checkpoint="meta-llama/Llama-3.2-1B",
        config="LlamaConfig",
        settings={
            **LLAMA3,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "tie_word_embeddings": True,
            "rope_parameters": _llama3_rope(32.0),
        },
    ),
    "llama-3.2-3b": PublishedShape(
        checkpoint="meta-llama/Llama-3.2-3B",
        config="LlamaConfig",
        settings={
            **LLAMA3,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
            "rope_parameters": _llama3_rope(32.0),
        },
    ),
    "qwen3-32b": PublishedShape(
        checkpoint="Qwen/Qwen3-32B",
        config="Qwen3Config",
        settings={
            "hidden_size": 5120,
            "intermediate_size": 25600,
            "num_hidden_layers": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "mpt-7b": PublishedShape(
        checkpoint="mosaicml/mpt-7b",
        config="MptConfig",
        settings={
            "d_model": 4096,
            "n_layers": 32,
            "n_heads": 32,
            "expansion_ratio": 4,
            "vocab_size": 50432,
            "max_seq_len": 2048,
            "no_bias": True,
        },
    ),
    "phi-3-medium": PublishedShape(
        checkpoint="microsoft/Phi-3-medium-4k-instruct",
        config="Phi3Config",
        settings={
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
            "vocab_size": 32064,
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "sliding_window": 2047,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
}


def published(name: str) -> PublishedShape:
    """A shape by name, or an error that lists them."""
    if name not in SHAPES:
        raise unknown_name("shape", name, SHAPES, "Any other model is benched by its folder or hub id.")
    return SHAPES[name]


def _copied(value: Any) -> Any:
    """Configs keep and change the mappings they are given."""
    return {key: _copied(entry) for key, entry in value.items()} if isinstance(value, Mapping) else value
