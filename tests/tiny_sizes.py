"""Settings of the tiny configs that several families share."""

VOCAB = 97
SIZES = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA = {
    **SIZES,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
GEMMA = {**LLAMA, "query_pre_attn_scalar": 24, "sliding_window": 7, "layer_types": None}
STABLE = {**{key: value for key, value in LLAMA.items() if key != "head_dim"}, "partial_rotary_factor": 0.5}
STABLE |= {"num_attention_heads": 3, "num_key_value_heads": 1}
FALCON = {
    **SIZES,
    "hidden_size": 48,
    "ffn_hidden_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
KINDS = ["sliding_attention", "full_attention"]
MIXTURE = {"num_experts_per_tok": 2}
GRANITE = {
    **LLAMA,
    "num_hidden_layers": 2,
    "shared_intermediate_size": 40,
    "num_local_experts": 0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.2,
    "layer_types": ["mamba", "attention"],
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],
    "long_factor": [2.0 + 0.3 * i for i in range(6)],
    "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.75,
}

EXPERTS = {**LLAMA, "intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2}

LATENT = {
    **{name: value for name, value in LLAMA.items() if name != "head_dim"},
    "num_hidden_layers": 2,
    "num_key_value_heads": 6,
    "q_lora_rank": 40,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}

SPARSE = {
    name: LATENT[name]
    for name in (
        "first_k_dense_replace",
        "moe_intermediate_size",
        "n_routed_experts",
        "num_experts_per_tok",
        "n_shared_experts",
        "n_group",
        "topk_group",
    )
}
HALF_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_conv_kernel_dim": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}


MAMBA = {
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_d_ssm": 96,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
    "num_hidden_layers": 2,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.6,
    "ssm_out_multiplier": 0.8,
    "mlp_multipliers": [0.9, 0.5],
}
LLAMA4 = {
    **EXPERTS,
    "num_hidden_layers": 3,
    "intermediate_size_mlp": 80,
    "interleave_moe_layer_step": 2,
    "num_experts_per_tok": 1,
    "no_rope_layers": [1, 0, 1],
    "attention_chunk_size": 7,
    "attn_temperature_tuning": True,
    "floor_scale": 4,
    "attn_scale": 0.3,
}
GEMMA4 = {
    **{name: value for name, value in GEMMA.items() if name != "query_pre_attn_scalar"},
    "num_hidden_layers": 4,
    "global_head_dim": 24,
    "layer_types": 2 * KINDS,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
}

OTHER_SIZES = {
    "num_attention_heads": 4,
    **dict.fromkeys(("n_head", "n_heads"), 4),
    "num_key_value_heads": 4,
    "head_dim": 12,
    "intermediate_size": 56,
    "ffn_hidden_size": 56,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 56,
    "intermediate_size_mlp": 56,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "kv_lora_rank": 24,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 3),
}
