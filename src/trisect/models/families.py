"""Model families as records: where each projection lives and how its channels are laid out.

Nothing here computes. A new family is one more record; docs/extend.md, 'A new family', has the steps.
Paths are relative to the decoder layer, except `layers`, which is relative to the model.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from trisect.errors import TrisectError, unknown_name


@dataclass(frozen=True, kw_only=True)
class ExpertPaths:
    """Where a layer that has a mixture of experts keeps them; other layers of the family have one MLP."""

    routed: str = "mlp.experts"  # 3-D weights of the routed experts; the module around it is the whole MLP
    router: str = "mlp.gate"
    shared: str | None = None  # the MLP that every token passes, its maps named as in the family's other MLPs
    shared_gate: str | None = None  # a map to one number, whose sigmoid the shared expert's output is multiplied with
    apart: bool = False  # routed and shared experts are normalised apart before they are added (Gemma 4)
    interleaved: bool = False  # gate and up take turns in their tensor instead of lying side by side
    width: str = "moe_intermediate_size"  # the config's name for a routed expert's width
    shared_width: str | None = None  # the config's name for the shared expert's width


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Names inside attention whose keys and values come out of one latent per token (MLA)."""

    q: tuple[str, str, str] = ("q_a_proj", "q_a_layernorm", "q_b_proj")  # to the queries' latent, its norm, to heads
    plain_q: str = "q_proj"  # instead of those, where queries have no latent
    compress: str = "kv_a_proj_with_mqa"  # to [latent of keys and values | the rotated key that all heads share]
    norm: str = "kv_a_layernorm"
    kv: str = "kv_b_proj"  # from the latent to [key | value] of every head


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the checkpoints of one architecture are laid out."""

    name: str  # the `model_type` of the checkpoint's config
    model: str  # the transformers class with the language-model head
    layers: str = "model.layers"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Names inside the attention module; one name means one fused projection, [Q | K | V]."""
    per_head: bool = False  # the fused projection holds [queries | k | v] key head by key head instead
    o: str = "o_proj"
    up: str = "mlp.up_proj"
    gate: str | None = "mlp.gate_proj"  # None without; the same path as `up` where one projection holds [gate | up]
    down: str = "mlp.down_proj"
    experts: ExpertPaths | None = None
    rotary: Literal["half", "adjacent"] | None = "half"
    """Which channels make a rotation pair: (i, i + n) of the rotated 2n, or (2i, 2i + 1)."""
    paired_table: bool = False  # a frequency's two columns of the table lie side by side; else [all | all again]
    rotates: str | None = None  # attention attribute that says whether a layer rotates at all; None: every layer does
    rotates_by: str | None = None  # config entry that says "rope" in models that rotate; None means all do
    rotates_windows: bool = False  # only layers with a sliding window rotate, unless the model has no window at all
    kv_heads: str | None = None  # attention attribute with the number of key heads, where the config does not name it
    last_norm: str = "norm"  # the norm in front of the head: its name in the module that holds the layers
    latent: Latent | None = None  # MLA; config.rope_interleave, where there is one, decides about `rotary`
    norms: tuple[str, str] | None = None
    """Query and key norms between projection and rotation; a model that goes without has no such modules."""
    norm_over: Literal["head", "heads", "stack"] = "head"
    """The mean is over each head, over all heads together, or over each head in a module of its own."""
    norm_centred: bool = False  # they take the mean away first (LayerNorm); such heads stay as wide as they are
    norm_last: bool = False  # they stand behind the rotation
    one_norm: str | None = None  # the norm, without weights, that a stock module has in the place of both
    norm_offset: float = 0.0  # what is added to the weights of all norms: 1 in Gemma, whose norms store w - 1
    output_gate: bool = False  # queries come as [q | gate] head by head; head outputs are multiplied by sigmoid(gate)
    mixer: str | None = None  # what a layer without attention has in its place (Mamba, convolution, linear attention)
    post_norms: tuple[str, str] | None = None  # what attention and MLP put out passes them before it joins the stream
    residual_scale: tuple[str, str] | None = None
    """Where a layer has what the outputs of attention and MLP are multiplied with before they join the stream."""
    beside: tuple[str, str] | None = None  # what adds to the stream beside attention (Mamba), and what multiplies it
    scale: str = "scaling"  # attention attribute with the softmax scale of the original head width
    key_scale: str | None = None  # attention attribute that keys are multiplied with
    reads_head_dim: bool = True  # stock code takes the head width from `head_dim`, and not from the hidden size
    states_scale: bool = False  # the config states that scale; elsewhere it follows from the head width
    softcap: str | None = None  # attention attribute with the bound c of scores: softmax sees c tanh(score / c)
    dropout: str | None = "attention_dropout"
    output_dropout: str | None = None  # dropout, or its share, behind the attention's output projection
    clip: str | None = None  # attention attribute with the bound that projections are clamped to
    tuple_output: bool = False  # the decoder layer returns (hidden states, attention weights)
    sinks: str | None = None
    """Attention parameter with a logit per head that joins the softmax and adds nothing to its output."""
    short_table: bool = False  # the model's rotation table has every frequency once, where others have it twice
    position_scale: Literal["rotated", "unrotated"] | None = None  # queries are scaled by position (Llama 4)
    value_norm: str | None = None  # a norm of each head's values, whose channels then stay: OV keeps its width
    lends_keys: bool = False  # some layers attend to keys and values of an earlier one; layers differ in head width
    calls_differ: bool = False  # layers are called with something of the text, so that no call stands for another
    starts_with_bos: bool = False  # texts begin with BOS, or the model babbles: so does every window of a text
    refused: tuple[str, str] | None = None  # setting of the config with which the family is not supported, and why


FAMILIES: dict[str, Family] = {}
LLAMA = Family(name="llama", model="LlamaForCausalLM")
_NORMS = ("q_norm", "k_norm")
_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_SHARED = ExpertPaths(shared="mlp.shared_experts")
_GATED_SHARED = ExpertPaths(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate")


def _add(name: str, kind: str, like: str = "llama", **fields: Any) -> None:
    """Add a family that differs from another one in some fields; `kind` is how the name of its class begins."""
    base = FAMILIES.get(like, LLAMA)
    FAMILIES[name] = replace(base, **{"name": name, "model": f"{kind}ForCausalLM", **fields})


def _mlp(up: str, down: str, gate: str | None = None) -> dict[str, Any]:
    return {"up": up, "down": down, "gate": gate}


_FEED_FORWARD = _mlp("feed_forward.up_proj", "feed_forward.down_proj", "feed_forward.gate_proj")
_FOUR_TIMES = _mlp("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")

# fmt: off
_add("llama", "Llama")
_add("mistral", "Mistral")
_add("ministral3", "Ministral3", position_scale="rotated")
_add("qwen2", "Qwen2")
_add("qwen3", "Qwen3", norms=_NORMS)
_add("smollm3", "SmolLM3", rotates="use_rope")
_add("helium", "Helium", rotary="adjacent")
_add("phi3", "Phi3", qkv=("qkv_proj",), up="mlp.gate_up_proj", gate="mlp.gate_up_proj")
_add("mixtral", "Mixtral", experts=ExpertPaths(width="intermediate_size"))
_add("qwen3_moe", "Qwen3Moe", norms=_NORMS, experts=ExpertPaths())
_add("qwen2_moe", "Qwen2Moe", experts=replace(_GATED_SHARED, shared_width="shared_expert_intermediate_size"))
_add("mpt", "Mpt", layers="transformer.blocks", last_norm="norm_f", attention="attn", qkv=("Wqkv",), o="out_proj",
     rotary=None, scale="softmax_scale", dropout="attn_dropout_p", clip="clip_qkv", tuple_output=True,
     **_mlp("ffn.up_proj", "ffn.down_proj"))
_add("gpt2", "GPT2", model="GPT2LMHeadModel", layers="transformer.h", last_norm="ln_f",
     attention="attn", qkv=("c_attn",), o="c_proj", rotary=None, dropout="attn_dropout",
     output_dropout="resid_dropout", **_mlp("mlp.c_fc", "mlp.c_proj"))
_add("opt", "OPT", layers="model.decoder.layers", last_norm="final_layer_norm", o="out_proj",
     rotary=None, dropout="dropout", **_mlp("fc1", "fc2"))
_add("gpt_neox", "GPTNeoX", layers="gpt_neox.layers", last_norm="final_layer_norm",
     attention="attention", qkv=("query_key_value",), per_head=True, o="dense", **_FOUR_TIMES)
_add("lfm2", "Lfm2", last_norm="embedding_norm", mixer="conv", norms=("q_layernorm", "k_layernorm"), o="out_proj",
     dropout=None, **_mlp("feed_forward.w3", "feed_forward.w2", "feed_forward.w1"))
_add("gpt_oss", "GptOss", sinks="sinks", short_table=True,
     experts=ExpertPaths(router="mlp.router", interleaved=True, width="intermediate_size"))
_add("deepseek_v2", "DeepseekV2", latent=Latent(), rotary="adjacent", experts=_SHARED)
_add("deepseek_v3", "DeepseekV3", latent=Latent(), experts=_SHARED)
_add("glm4_moe_lite", "Glm4MoeLite", latent=Latent(), experts=_SHARED)
_add("gemma", "Gemma", norm_offset=1.0, starts_with_bos=True)
_add("gemma2", "Gemma2", "gemma", post_norms=_POST_NORMS, softcap="attn_logit_softcapping", states_scale=True)
_add("gemma3_text", "Gemma3", "gemma2", norms=_NORMS, softcap=None)
_add("olmo2", "Olmo2", post_norms=_POST_NORMS, norms=_NORMS, norm_over="heads")
_add("olmo3", "Olmo3", "olmo2")
_add("granite", "Granite", residual_scale=("residual_multiplier", "residual_multiplier"), states_scale=True)
_add("exaone4", "Exaone4", post_norms=_POST_NORMS, norms=_NORMS, rotates_windows=True)
_add("seed_oss", "SeedOss", output_dropout="residual_dropout")
_add("ernie4_5", "Ernie4_5", rotary="adjacent")
_add("hunyuan_v1_dense", "HunYuanDenseV1", norms=("query_layernorm", "key_layernorm"), norm_last=True)
_add("nemotron", "Nemotron", gate=None, norm_offset=1.0)
_add("starcoder2", "Starcoder2", output_dropout="residual_dropout", **_mlp("mlp.c_fc", "mlp.c_proj"))
_add("stablelm", "StableLm", reads_head_dim=False, norms=("q_layernorm", "k_layernorm"), norm_over="stack",
     norm_centred=True)
_add("phi", "Phi", o="dense", last_norm="final_layernorm", norms=("q_layernorm", "k_layernorm"), norm_centred=True,
     **_mlp("mlp.fc1", "mlp.fc2"))
_add("cohere", "Cohere", rotary="adjacent", paired_table=True, norms=_NORMS, norm_centred=True)
_add("cohere2", "Cohere2", "cohere", norms=None, rotates="sliding_window")
_add("falcon", "Falcon", layers="transformer.h", last_norm="ln_f", attention="self_attention",
     qkv=("query_key_value",), per_head=True, kv_heads="num_kv_heads", o="dense", scale="inv_norm_factor",
     tuple_output=True, **_FOUR_TIMES,
     refused=("alibi", "its attention adds a position bias that this family's record does not describe"))
_add("olmoe", "Olmoe", norms=_NORMS, norm_over="heads", experts=ExpertPaths(),
     refused=("clip_qkv", "its queries and keys are clamped behind their norms"))
_add("granitemoehybrid", "GraniteMoeHybrid", "granite", rotates_by="position_embedding_type", mixer="mamba",
     **_mlp("shared_mlp.input_linear", "shared_mlp.output_linear", "shared_mlp.input_linear"))
_add("granitemoe", "GraniteMoe", "granite", experts=ExpertPaths(
     routed="block_sparse_moe.experts", router="block_sparse_moe.router", width="intermediate_size"))
_add("qwen3_next", "Qwen3Next", mixer="linear_attn", norms=_NORMS, norm_offset=1.0, output_gate=True,
     experts=_GATED_SHARED)
_add("qwen3_5_text", "Qwen3_5", "qwen3_next", experts=None)
_add("qwen3_5_moe_text", "Qwen3_5Moe", "qwen3_next")
_add("glm4_moe", "Glm4Moe", norms=_NORMS, experts=_SHARED)
_add("nemotron_h", "NemotronH", last_norm="norm_f", attention="mixer", rotary=None,
     **_mlp("mixer.up_proj", "mixer.down_proj"))
_add("falcon_h1", "FalconH1", last_norm="final_layernorm", beside=("mamba", "ssm_out_multiplier"),
     residual_scale=("attn_out_multiplier", "feed_forward.down_multiplier"), key_scale="key_multiplier",
     tuple_output=True, **_FEED_FORWARD)
_add("llama4_text", "Llama4", rotary="adjacent", rotates="use_rope", norms=_NORMS, one_norm="qk_norm", norm_last=True,
     position_scale="unrotated", **_FEED_FORWARD, experts=ExpertPaths(
     routed="feed_forward.experts", router="feed_forward.router", shared="feed_forward.shared_expert",
     width="intermediate_size"))
_add("gemma4_text", "Gemma4", post_norms=_POST_NORMS, norms=_NORMS, value_norm="v_norm", lends_keys=True,
     experts=ExpertPaths(routed="experts", router="router", shared="mlp", apart=True), calls_differ=True,
     starts_with_bos=True, states_scale=True)
# fmt: on
BUILT_IN = frozenset(FAMILIES)  # those of this table, and not of `register_family`

_WRAPPED = {"mistral3": "Mistral3", "gemma3": "Gemma3", "gemma4": "Gemma4"}
_WRAPPED |= {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe", "llama4": "Llama4"}
WRAPPERS = {
    name: Family(name=name, model=f"{kind}ForConditionalGeneration", layers="model.language_model.layers")
    for name, kind in _WRAPPED.items()
}
"""Multimodal models around a text model of another family, whose record they have but for these fields."""
WRAPPERS["llama4"] = replace(WRAPPERS["llama4"], layers="language_model.model.layers")

PREFIX = "trisect_"  # a compressed checkpoint names its family behind it, so that transformers finds our classes


def family_for(config: Any) -> Family:
    """The record for a transformers config, stock or compressed, wrapped or not."""
    model_type = config.model_type.removeprefix(PREFIX)
    wrapper = WRAPPERS.get(model_type)
    if wrapper is not None:
        inner = family_for(config.get_text_config())
        return replace(inner, name=wrapper.name, model=wrapper.model, layers=wrapper.layers)
    if model_type not in FAMILIES:
        steps = "To add one, write a Family record: docs/extend.md has the steps, CONTRIBUTING.md the rest."
        raise unknown_name("model family", model_type, [*FAMILIES, *WRAPPERS], steps)
    family = FAMILIES[model_type]
    if family.refused is not None and getattr(config, family.refused[0], None):
        setting, reason = family.refused
        raise TrisectError(f"This {family.name} model has {setting} set, which is not supported: {reason}.")
    return family
