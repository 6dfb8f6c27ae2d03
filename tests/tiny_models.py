"""Tiny random models, one or more per family, built from configs in memory."""

import string
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch import Tensor, nn

from tiny_sizes import (
    DELTA,
    EXPERTS,
    FALCON,
    GEMMA,
    GEMMA4,
    GRANITE,
    HALF_ROTARY,
    KINDS,
    LATENT,
    LLAMA,
    LLAMA3_ROPE,
    LLAMA4,
    LONGROPE,
    MAMBA,
    MIXTURE,
    OTHER_SIZES,
    SIZES,
    SPARSE,
    STABLE,
    VOCAB,
    YARN,
)
from trisect.models import family_for


def _mistral3() -> Any:
    text = transformers.Ministral3Config(**{**LLAMA, "num_hidden_layers": 2})
    vision = transformers.PixtralVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    return transformers.Mistral3Config(text_config=text, vision_config=vision, image_token_index=VOCAB - 1)


EYE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 8}


def _gemma4() -> Any:
    text = transformers.Gemma4TextConfig(**{**GEMMA4, "num_hidden_layers": 2, "layer_types": KINDS})
    vision = transformers.Gemma4VisionConfig(**EYE, num_key_value_heads=2, head_dim=8, position_embedding_size=16)
    tokens = {"image_token_id": VOCAB - 1, "video_token_id": VOCAB - 2, "audio_token_id": VOCAB - 3}
    return transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None, **tokens)


def _llama4() -> Any:
    text = transformers.Llama4TextConfig(**{**LLAMA4, "num_hidden_layers": 2, "no_rope_layers": [1, 0]})
    vision = transformers.Llama4VisionConfig(
        **EYE, image_size=16, vision_output_dim=16, projector_input_dim=16, projector_output_dim=16
    )
    return transformers.Llama4Config(text_config=text, vision_config=vision, image_token_index=VOCAB - 1)


def _qwen3_5(moe: bool) -> Any:
    text: Any = transformers.Qwen3_5MoeTextConfig if moe else transformers.Qwen3_5TextConfig
    whole: Any = transformers.Qwen3_5MoeConfig if moe else transformers.Qwen3_5Config
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 8}
    return whole(
        text_config=text(**{**LLAMA, **DELTA, **(MIXTURE if moe else {})}).to_dict(),
        vision_config={**vision, "out_hidden_size": 48, "num_position_embeddings": 16},
        image_token_id=VOCAB - 1,
        video_token_id=VOCAB - 2,
    )


def _gemma3() -> Any:
    text = transformers.Gemma3TextConfig(**{**GEMMA, "num_hidden_layers": 2})
    vision = transformers.SiglipVisionConfig(**EYE, image_size=16)
    return transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=VOCAB - 1
    )


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama-gqa": lambda: transformers.LlamaConfig(**LLAMA),
    "llama-mha": lambda: transformers.LlamaConfig(**{**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 3}),
    "llama-3": lambda: transformers.LlamaConfig(**LLAMA, rope_parameters=dict(LLAMA3_ROPE)),
    "llama-biases": lambda: transformers.LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True),
    "mistral-window": lambda: transformers.MistralConfig(**LLAMA, sliding_window=7),
    "ministral3": lambda: transformers.Ministral3Config(**LLAMA),
    "mistral3-wrapper": _mistral3,
    "qwen2": lambda: transformers.Qwen2Config(**LLAMA),
    "qwen3": lambda: transformers.Qwen3Config(**LLAMA),
    "smollm3": lambda: transformers.SmolLM3Config(**{**LLAMA, "num_hidden_layers": 4}, no_rope_layers=[1, 0, 1, 0]),
    "helium": lambda: transformers.HeliumConfig(**{**LLAMA, "hidden_size": 64, "num_attention_heads": 4}),
    "phi3": lambda: transformers.Phi3Config(**LLAMA),
    "phi3-longrope": lambda: transformers.Phi3Config(
        **{**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 1},
        original_max_position_embeddings=16,
        rope_parameters={k: list(v) if isinstance(v, list) else v for k, v in LONGROPE.items()},
    ),
    "mixtral": lambda: transformers.MixtralConfig(**LLAMA, **MIXTURE, num_local_experts=4),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **LLAMA, **MIXTURE, num_experts=4, moe_intermediate_size=24, mlp_only_layers=[1]
    ),
    "qwen3_moe-all": lambda: transformers.Qwen3MoeConfig(
        **LLAMA, **MIXTURE, num_experts=4, moe_intermediate_size=24, norm_topk_prob=True
    ),
    "olmoe": lambda: transformers.OlmoeConfig(
        **{name: value for name, value in LLAMA.items() if name != "head_dim"} | {"num_hidden_layers": 2},
        **MIXTURE,
        num_experts=4,
    ),
    "granitemoehybrid": lambda: transformers.GraniteMoeHybridConfig(**GRANITE, position_embedding_type="rope"),
    "granitemoehybrid-experts": lambda: transformers.GraniteMoeHybridConfig(
        **{**GRANITE, "num_local_experts": 4}, num_experts_per_tok=2, position_embedding_type="nope"
    ),
    "granitemoe": lambda: transformers.GraniteMoeConfig(
        **LLAMA, **MIXTURE, num_local_experts=4, residual_multiplier=0.3, attention_multiplier=0.2
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **{**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 1},
        **MIXTURE,
        num_experts=4,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=48,
    ),
    "mpt": lambda: transformers.MptConfig(vocab_size=VOCAB, d_model=48, n_layers=2, n_heads=3, max_seq_len=128),
    "mpt-clip": lambda: transformers.MptConfig(
        vocab_size=VOCAB,
        d_model=48,
        n_layers=2,
        n_heads=3,
        max_seq_len=128,
        attn_config={"clip_qkv": 1.0, "alibi": True},
    ),
    "gpt2": lambda: transformers.GPT2Config(**SIZES, n_embd=48, n_layer=2, n_head=3, n_positions=128),
    "opt": lambda: transformers.OPTConfig(
        **SIZES,
        hidden_size=48,
        ffn_dim=80,
        num_hidden_layers=2,
        num_attention_heads=3,
        word_embed_proj_dim=48,
        max_position_embeddings=128,
    ),
    "opt-norm-after": lambda: transformers.OPTConfig(
        **SIZES,
        hidden_size=48,
        ffn_dim=80,
        num_hidden_layers=2,
        num_attention_heads=3,
        word_embed_proj_dim=32,
        do_layer_norm_before=False,
        max_position_embeddings=128,
    ),
    "gpt_neox-sequential": lambda: transformers.GPTNeoXConfig(
        **SIZES,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=3,
        use_parallel_residual=False,
        attention_bias=False,
        max_position_embeddings=128,
    ),
    "qwen2-window": lambda: transformers.Qwen2Config(
        **LLAMA, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(
        **SIZES,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=3,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "gemma": lambda: transformers.GemmaConfig(**LLAMA),
    "gemma2": lambda: transformers.Gemma2Config(**GEMMA, attn_logit_softcapping=2.0),
    "gemma2-mha": lambda: transformers.Gemma2Config(
        **{**GEMMA, "num_attention_heads": 3, "num_key_value_heads": 3, "num_hidden_layers": 2}
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**{**GEMMA, "layer_types": [*KINDS, KINDS[0]]}),
    "gemma3-one-key": lambda: transformers.Gemma3TextConfig(
        **{**GEMMA, "num_hidden_layers": 2, "num_key_value_heads": 1, "layer_types": KINDS}
    ),
    "gemma3-local": lambda: transformers.Gemma3TextConfig(
        **{**GEMMA, "num_hidden_layers": 2, "query_pre_attn_scalar": 16, "layer_types": 2 * KINDS[:1]}
    ),
    "gemma3-wrapper": _gemma3,
    "olmo2": lambda: transformers.Olmo2Config(**LLAMA),
    "olmo2-mha": lambda: transformers.Olmo2Config(
        **{**LLAMA, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3}
    ),
    "olmo3": lambda: transformers.Olmo3Config(**{**LLAMA, "num_hidden_layers": 2}, sliding_window=7, layer_types=KINDS),
    "granite": lambda: transformers.GraniteConfig(
        **LLAMA, residual_multiplier=0.3, attention_multiplier=0.2, embedding_multiplier=3.0, logits_scaling=2.0
    ),
    "exaone4": lambda: transformers.Exaone4Config(
        **{**LLAMA, "num_hidden_layers": 2}, sliding_window=7, layer_types=KINDS
    ),
    "exaone4-full": lambda: transformers.Exaone4Config(**LLAMA, sliding_window=None, layer_types=3 * KINDS[1:]),
    "seed_oss": lambda: transformers.SeedOssConfig(**LLAMA, attention_bias=True, attention_out_bias=True),
    "ernie4_5": lambda: transformers.Ernie4_5Config(**LLAMA, use_bias=True),
    "hunyuan": lambda: transformers.HunYuanDenseV1Config(**LLAMA),
    "nemotron": lambda: transformers.NemotronConfig(**LLAMA, attention_bias=True),
    "starcoder2": lambda: transformers.Starcoder2Config(**LLAMA, sliding_window=7),
    "stablelm": lambda: transformers.StableLmConfig(**STABLE),
    "stablelm-parallel": lambda: transformers.StableLmConfig(
        **STABLE, use_parallel_residual=True, qk_layernorm=True, use_qkv_bias=True
    ),
    "phi": lambda: transformers.PhiConfig(**STABLE),
    "phi-norms": lambda: transformers.PhiConfig(**{**STABLE, "num_hidden_layers": 2}, qk_layernorm=True),
    "cohere": lambda: transformers.CohereConfig(**LLAMA, logit_scale=0.5),
    "cohere-norms": lambda: transformers.CohereConfig(
        **{**LLAMA, "num_hidden_layers": 2}, logit_scale=0.5, use_qk_norm=True
    ),
    "cohere2": lambda: transformers.Cohere2Config(
        **{**LLAMA, "num_hidden_layers": 2}, sliding_window=7, layer_types=KINDS
    ),
    "falcon": lambda: transformers.FalconConfig(**FALCON),
    "falcon-grouped": lambda: transformers.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "falcon-heads": lambda: transformers.FalconConfig(**FALCON, multi_query=False, parallel_attn=False, bias=True),
    "lfm2": lambda: transformers.Lfm2Config(
        **{**LLAMA, "hidden_size": 96}, layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**LATENT),
    "deepseek_v3-plain-q": lambda: transformers.DeepseekV3Config(
        **{**LATENT, "q_lora_rank": None, "first_k_dense_replace": 2},
        rope_interleave=False,
        attention_bias=True,
        rope_parameters={**YARN, "mscale_all_dim": 1.0},
    ),
    "deepseek_v2": lambda: transformers.DeepseekV2Config(**LATENT),
    "glm4_moe_lite": lambda: transformers.Glm4MoeLiteConfig(**LATENT, mlp_layer_types=["dense", "sparse"]),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **{**LLAMA, **SPARSE}, use_qk_norm=True, rope_parameters=dict(HALF_ROTARY)
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(**{**LLAMA, **DELTA, **MIXTURE}, mlp_only_layers=[0]),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**{**LLAMA, **DELTA}),
    "qwen3_5_moe": lambda: transformers.Qwen3_5MoeTextConfig(**{**LLAMA, **DELTA, **MIXTURE}),
    "glm4_moe-unnormed": lambda: transformers.Glm4MoeConfig(
        **{**LLAMA, **SPARSE, "num_hidden_layers": 2}, attention_bias=True, rope_parameters=dict(HALF_ROTARY)
    ),
    "nemotron_h": lambda: transformers.NemotronHConfig(
        **{**LLAMA, "num_hidden_layers": 4},
        layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"],
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=16,
    ),
    "falcon_h1": lambda: transformers.FalconH1Config(**{**LLAMA, **MAMBA}),
    "llama4": lambda: transformers.Llama4TextConfig(**LLAMA4),
    "llama4-plain": lambda: transformers.Llama4TextConfig(
        **{**LLAMA4, "num_experts_per_tok": 2, "interleave_moe_layer_step": 1}, use_qk_norm=False, attention_bias=True
    ),
    "gemma4": lambda: transformers.Gemma4TextConfig(**GEMMA4),
    "gemma4-lent": lambda: transformers.Gemma4TextConfig(
        **{**GEMMA4, "num_hidden_layers": 6, "layer_types": 3 * KINDS},
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        attention_k_eq_v=False,
    ),
    "gemma4-experts": lambda: transformers.Gemma4TextConfig(
        **{**GEMMA4, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
        attention_k_eq_v=True,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=16,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(**EXPERTS, sliding_window=7, rope_parameters=dict(YARN)),
    "gpt_oss-unbiased": lambda: transformers.GptOssConfig(
        **{**EXPERTS, "num_key_value_heads": 6},
        attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
}


CONFIGS |= {
    "gemma4-wrapper": _gemma4,
    "llama4-wrapper": _llama4,
    "qwen3_5-wrapper": lambda: _qwen3_5(moe=False),
    "qwen3_5_moe-wrapper": lambda: _qwen3_5(moe=True),
}


def _in_other_sizes(name: str) -> Any:
    """A config of CONFIGS with other heads, widths and experts; the stream keeps its width."""
    config = CONFIGS[name]()
    text = config.get_text_config()
    # By the class, once more: some sizes follow from others.
    new = type(text)(**{key: OTHER_SIZES.get(key, value) if value else value for key, value in text.to_dict().items()})
    if new.model_type == config.model_type:
        return new
    config.text_config = new
    return config


ONCE = [one for one in CONFIGS if [CONFIGS[name]().model_type for name in CONFIGS].count(CONFIGS[one]().model_type) < 2]
SECOND: dict[str, Callable[[], Any]] = {f"{name}+": partial(_in_other_sizes, name) for name in (*ONCE, "qwen2", "mpt")}
"""Families that have one config above, in a second shape: for the numerical contracts."""
SECOND["helium+"] = lambda: transformers.HeliumConfig(  # its heads are together as wide as the stream
    **{**LLAMA, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
)
WRAPPED: dict[str, Any] = {
    "mistral3-wrapper": transformers.Mistral3ForConditionalGeneration,
    "gemma3-wrapper": transformers.Gemma3ForConditionalGeneration,
    "gemma4-wrapper": transformers.Gemma4ForConditionalGeneration,
    "llama4-wrapper": transformers.Llama4ForConditionalGeneration,
    "qwen3_5-wrapper": transformers.Qwen3_5ForConditionalGeneration,
    "qwen3_5_moe-wrapper": transformers.Qwen3_5MoeForConditionalGeneration,
}


def tiny(name: str, *, seed: int = 0, attention: str | None = None, dtype: Any = None) -> Any:
    """A random model whose every parameter matters: biases and norms are not left at zero and one."""
    config, wrapped = (CONFIGS.get(name) or SECOND[name])(), WRAPPED.get(name.removesuffix("+"))
    torch.manual_seed(seed)
    kwargs = {} if attention is None else {"attn_implementation": attention}
    if wrapped is not None:
        model = wrapped._from_config(config, **kwargs)
    else:
        model = transformers.AutoModelForCausalLM.from_config(config, **kwargs)
    shake(model, seed=seed)
    return model.to(dtype or torch.float32).eval()


@torch.no_grad()
def shake(model: nn.Module, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed + 1)
    for name, parameter in model.named_parameters():
        if "embed" in name or "wte" in name or "wpe" in name:
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            parameter.add_(0.3 * noise)
        else:
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)


def save_tiny(folder: Path, **settings: Any) -> Path:
    """A checkpoint of the usual tiny Llama with a tokenizer; `settings` are those of save_pretrained."""
    tiny("llama-gqa").save_pretrained(folder, **settings)
    character_tokenizer().save_pretrained(folder)
    return folder


def tokens(batch: int = 2, length: int = 11, *, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB - 2, (batch, length), generator=generator)


def left_padded(ids: Tensor) -> Tensor:
    """The attention mask (batch, length) of a batch whose first text is shorter than the rest."""
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return mask


@torch.no_grad()
def logits(model: Any, ids: Tensor, **kwargs: Any) -> Tensor:
    return model(ids, **kwargs).logits


def character_tokenizer(**special: str) -> Any:
    """One token per printable character, within VOCAB."""
    characters = [c for c in string.printable if c.isprintable()][: VOCAB - 2]
    vocabulary = {token: index for index, token in enumerate(["<unk>", *characters])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", **special)


FIXED_QK = ("cohere-norms", "phi-norms", "stablelm-parallel", "exaone4")
"""Their queries and keys keep their width, in some layers at least."""
OTHERS = ("lfm2", "granitemoehybrid", "gpt_oss", "deepseek", "glm4_moe", "qwen3_next", "qwen3_5", "nemotron_h")
OTHERS += ("falcon_h1", "llama4", "gemma4")
HYBRID = [name for name in CONFIGS if name in FIXED_QK or name.startswith(OTHERS)]
"""Layers that lack a component, or attention of another kind: the family contract covers them."""
FAMILIES = list({family_for(make()).name: name for name, make in reversed(CONFIGS.items())}.values())[::-1]
"""The first tiny model of each family."""
DENSE = ("gemma4", "gemma4-lent", "gemma4-wrapper")
"""Without experts, in a family that may have some."""
MIXTURES = [name for name in CONFIGS if family_for(CONFIGS[name]()).experts is not None and name not in DENSE]
"""Experts in place of one MLP."""
PLAIN = [name for name in CONFIGS if name not in (*HYBRID, *MIXTURES)]
"""QK, OV and MLP of plain matrices in every layer: what is tried on these holds for each of their maps."""
STORED = ("llama-gqa", "llama-biases", "qwen3", "helium", "phi3", "mpt", "mpt-clip", "gpt2", "opt", "gpt_neox")
STORED += ("mistral3-wrapper", "gemma3", "olmo2", "starcoder2", "falcon-grouped", "falcon-heads")
"""One or two of each way in which maps are stored, for what is done to single maps."""

# The stock attention of these has no SDPA path to compare with.
SDPA = [name for name in CONFIGS if not name.startswith(("mpt", "gpt_oss", "gemma2"))]
