"""Folders and configs that are hostile as a whole: entries nobody expects, links, pipes, code and pickles."""

import json
import os
from pathlib import Path
from random import Random
from typing import Any

from fuzz_mutations import hostile, mutated

ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0},
    {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
)
FAMILIES = (
    *("llama", "mistral", "ministral3", "mistral3", "qwen2", "qwen3", "smollm3", "helium", "phi3", "mpt", "gpt2"),
    *("opt", "gpt_neox", "trisect_llama", "trisect_", "bert", "mystery", "mamba"),
)
EXTRAS: dict[str, tuple[Any, ...]] = {
    "model_type": FAMILIES,
    "rope_parameters": ROPES,
    "rope_scaling": ROPES,
    "rope_theta": (1e4, 0, -1e4),
    "partial_rotary_factor": (0.5, 0.25, 2.0, 1e9),
    "sliding_window": (4, 0, -1),
    "use_sliding_window": (True,),
    "layer_types": (["full_attention"] * 2, ["sliding_attention"] * 2, ["odd"] * 2, ["full_attention"] * 3),
    "max_window_layers": (1, 10**9),
    "attention_bias": (True, False),
    "mlp_bias": (True,),
    "attention_dropout": (0.5, 2.0, -1.0),
    "tie_word_embeddings": (True, False),
    "hidden_act": ("gelu", "silu", "odd", "eval"),
    "quantization_config": ({"quant_method": "gptq", "bits": 4}, {"quant_method": "hqq"}, {"bits": 4}),
    "auto_map": ({"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"},),
    "attn_implementation": ("eager", "sdpa", "evil/kernel", "flash_attention_2"),
    "_attn_implementation": ("evil/kernel",),
    "num_labels": (2, 10**9),
    "id2label": ({"0": "a"}, {"x": 1}),
    "per_layer_config": ({"0": {"intermediate_size": 12}}, {"0": {"num_key_value_heads": 1}}, {"9": {}}),
    "text_config": ({"model_type": "llama", "num_hidden_layers": 10**9}, {}),
    "vision_config": ({"num_hidden_layers": 10**9}, {"image_size": 10**9}),
    "no_rope_layers": ([1, 0], [0]),
    "transformers_weights": ("../../escaped.safetensors", "model.safetensors"),
    "torch_dtype": ("float16", "bfloat16", "load", "int8"),
    "pad_token_id": (10**6, -1),
    "tokenizer_class": ("LlamaTokenizer", "Odd"),
    "architectures": (["Evil"], "Evil", []),
    "trisect": ({}, {"format": 1, "layers": []}, "x"),
    "pretraining_tp": (2, 0, 10**9),
    "head_dim": (4, 8, 16),
    "generation_config": ({},),
    "output_attentions": (True,),
    "output_hidden_states": (True,),
    "return_dict": (False,),
    "torchscript": (True,),
    "is_encoder_decoder": (True,),
    "add_cross_attention": (True,),
    "is_decoder": (True,),
    "chunk_size_feed_forward": (2, -1),
    "pruned_heads": ({"0": [1]},),
    "initializer_range": (-1.0, "x"),
    "bos_token_id": ([1, 2], 10**9, "x"),
    "use_cache": (False, "x"),
    "problem_type": ("single_label_classification",),
    "base_model_tp_plan": ({"layers.*": "colwise"}, "x"),
}


def surprised(random: Random, config: dict[str, Any]) -> dict[str, Any]:
    """A config with a few entries that the good one has not; some of them hostile themselves."""
    config = dict(config)
    for key in random.sample(list(EXTRAS), random.choice((1, 1, 2, 3))):
        value = random.choice(EXTRAS[key])
        if random.random() < 0.3:
            value = mutated(random, value) if isinstance(value, dict | list) else hostile(random, value)
        config[key] = value
    return config


def rearrange(random: Random, folder: Path, outside: Path) -> None:
    """Something about the folder itself is not what it seems."""
    files = sorted(file.name for file in folder.iterdir())
    victim = folder / random.choice(files)
    action = random.randrange(10)
    if action == 0:
        victim.unlink()
    elif action == 1:
        victim.unlink()
        victim.symlink_to(outside / victim.name)
    elif action == 2:
        victim.unlink()
        victim.symlink_to(victim)
    elif action == 3:
        victim.unlink()
        os.mkfifo(victim)
    elif action == 4:
        victim.unlink()
        victim.mkdir()
    elif action == 5:
        victim.write_bytes(b"")
    elif action == 6:
        entry = {"base_model_name_or_path": str(outside), "peft_type": "LORA", "r": 10**9}
        (folder / "adapter_config.json").write_text(json.dumps(entry))
    elif action == 7:
        index = {"weight_map": {"model.norm.weight": "../model.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        if random.random() < 0.5:
            (folder / "model.safetensors").unlink(missing_ok=True)
    elif action == 8:
        for shard in folder.glob("*.safetensors"):
            shard.rename(shard.with_suffix(".bin"))
    else:
        victim.unlink()
        victim.symlink_to(random.choice(("/dev/zero", "/dev/null", "/proc/self/mem", "nowhere", "../..", ".")))
