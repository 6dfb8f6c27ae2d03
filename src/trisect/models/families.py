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

    routed: str = "mlp.experts"
    """The module with the routed experts' weights, one 3-D tensor each; the module around it is the whole MLP."""
    router: str = "mlp.gate"
    shared: str | None = None
    """The MLP that every token passes, its maps named as in the family's other MLPs."""
    shared_gate: str | None = None
    """A map to one number, whose sigmoid the shared expert's output is multiplied with."""
    apart: bool = False
    """Routed and shared experts are normalised apart before they are added (Gemma 4)."""
    interleaved: bool = False
    """Gate and up take turns in their tensor instead of lying side by side."""
    width: str = "moe_intermediate_size"
    """The config's name for a routed expert's width."""
    shared_width: str | None = None
    """The config's name for the shared expert's width."""


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Names inside attention whose keys and values come out of one latent per token (MLA)."""

    q: tuple[str, str, str] = ("q_a_proj", "q_a_layernorm", "q_b_proj")
    """To the queries' latent, its norm, and from there to the heads."""
    plain_q: str = "q_proj"
    """Instead of those, where queries have no latent."""
    compress: str = "kv_a_proj_with_mqa"
    """To [latent of keys and values | the rotated key that all heads share]."""
    norm: str = "kv_a_layernorm"
    kv: str = "kv_b_proj"
    """From the latent to [key | value] of every head."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """How the checkpoints of one architecture are laid out."""

    name: str
    """The `model_type` of the checkpoint's config."""
    model: str
    """The transformers class with the language-model head."""
    layers: str = "model.layers"
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Names inside the attention module; one name means one fused projection, [Q | K | V]."""
    per_head: bool = False
    """The fused projection holds [queries | k | v] key head by key head instead."""
    o: str = "o_proj"
    up: str = "mlp.up_proj"
    gate: str | None = "mlp.gate_proj"
    """None without a gate; the same path as `up` when one projection holds [gate | up]."""
    down: str = "mlp.down_proj"
    experts: ExpertPaths | None = None
    rotary: Literal["half", "adjacent"] | None = "half"
    """Which channels make a rotation pair: (i, i + n) of the rotated 2n, or (2i, 2i + 1)."""
    paired_table: bool = False
    """The model's table of angles has a frequency's two columns side by side; others have [all | all again]."""
    rotates: str | None = None
    """Attention attribute that says whether this layer rotates at all; None means every layer does."""
    rotates_by: str | None = None
    """Config entry that says "rope" in models that rotate; None means all do."""
    rotates_windows: bool = False
    """Only layers with a sliding window rotate, unless the model has no window at all."""
    kv_heads: str | None = None
    """Attention attribute with the number of key/value heads, where the config does not name it."""
    last_norm: str = "norm"
    """The norm in front of the head: its name in the module that holds the layers."""
    latent: Latent | None = None
    """Multi-head latent attention; config.rope_interleave, where there is one, decides about `rotary`."""
    norms: tuple[str, str] | None = None
    """Query and key norms between projection and rotation; a model that goes without has no such modules."""
    norm_over: Literal["head", "heads", "stack"] = "head"
    """The mean is over each head, over all heads together, or over each head in a module of its own."""
    norm_centred: bool = False
    """They take the mean away first (LayerNorm); such heads stay as wide as they are."""
    norm_last: bool = False
    """They stand behind the rotation."""
    one_norm: str | None = None
    """The norm, without weights, that a stock module has in the place of both."""
    norm_offset: float = 0.0
    """What is added to the weights of all norms of the model: 1 in Gemma, whose norms store w - 1."""
    output_gate: bool = False
    """The query projection has [q | gate] head by head; what heads put out is multiplied by sigmoid(gate)."""
    mixer: str | None = None
    """What a layer without attention has in its place (Mamba, convolution, linear attention)."""
    post_norms: tuple[str, str] | None = None
    """Norms that the outputs of attention and MLP pass before they join the residual stream."""
    residual_scale: tuple[str, str] | None = None
    """Where a layer has what the outputs of attention and MLP are multiplied with before they join the stream."""
    beside: tuple[str, str] | None = None
    """What adds to the stream beside attention (Mamba), and the layer's attribute that multiplies it."""
    scale: str = "scaling"
    """Attention attribute with the softmax scale of the original head width."""
    key_scale: str | None = None
    """Attention attribute that keys are multiplied with."""
    reads_head_dim: bool = True
    """Stock code takes the head width from the config's `head_dim`, and not from the hidden size."""
    states_scale: bool = False
    """The config states that scale; elsewhere it follows from the head width."""
    softcap: str | None = None
    """Attention attribute with the bound c of scores: softmax sees c tanh(score / c)."""
    dropout: str | None = "attention_dropout"
    output_dropout: str | None = None
    """Dropout, or its share, that the attention module applies after its output projection."""
    clip: str | None = None
    """Attention attribute with the bound that projections are clamped to."""
    tuple_output: bool = False
    """The decoder layer returns (hidden states, attention weights)."""
    sinks: str | None = None
    """Attention parameter with a logit per head that joins the softmax and adds nothing to its output."""
    short_table: bool = False
    """The model's rotation table has every frequency once, where others have it twice."""
    position_scale: Literal["rotated", "unrotated"] | None = None
    """Queries of such layers are scaled by position (Llama 4's attention temperature)."""
    value_norm: str | None = None
    """A norm of each head's values, whose channels cannot be mixed or left out: OV keeps its width."""
    lends_keys: bool = False
    """Some layers attend to keys and values of an earlier one; layers differ in head width."""
    calls_differ: bool = False
    """Layers are called with something that depends on the text, so that no call stands for another."""
    starts_with_bos: bool = False
    """Texts begin with BOS, or the model babbles: so does every window, whatever its tokenizer adds by itself."""
    refused: tuple[str, str] | None = None
    """Setting of the config with which the family is not supported, and why."""


@dataclass(frozen=True, kw_only=True)
class Wrapper:
    """A multimodal model around a text model of another family."""

    name: str
    model: str
    layers: str = "model.language_model.layers"


_GRANITE = ("residual_multiplier", "residual_multiplier")
WITH_SHARED = ExpertPaths(shared="mlp.shared_experts")
LLAMA = Family(name="llama", model="LlamaForCausalLM")

_RECORDS = (
    LLAMA,
    replace(LLAMA, name="mistral", model="MistralForCausalLM"),
    replace(LLAMA, name="ministral3", model="Ministral3ForCausalLM", position_scale="rotated"),
    replace(LLAMA, name="qwen2", model="Qwen2ForCausalLM"),
    replace(LLAMA, name="qwen3", model="Qwen3ForCausalLM", norms=("q_norm", "k_norm")),
    replace(LLAMA, name="smollm3", model="SmolLM3ForCausalLM", rotates="use_rope"),
    replace(LLAMA, name="helium", model="HeliumForCausalLM", rotary="adjacent"),
    replace(
        LLAMA, name="phi3", model="Phi3ForCausalLM", qkv=("qkv_proj",), up="mlp.gate_up_proj", gate="mlp.gate_up_proj"
    ),
    replace(LLAMA, name="mixtral", model="MixtralForCausalLM", experts=ExpertPaths(width="intermediate_size")),
    replace(LLAMA, name="qwen3_moe", model="Qwen3MoeForCausalLM", norms=("q_norm", "k_norm"), experts=ExpertPaths()),
    replace(
        LLAMA,
        name="qwen2_moe",
        model="Qwen2MoeForCausalLM",
        experts=ExpertPaths(
            shared="mlp.shared_expert",
            shared_gate="mlp.shared_expert_gate",
            shared_width="shared_expert_intermediate_size",
        ),
    ),
    Family(
        name="mpt",
        model="MptForCausalLM",
        layers="transformer.blocks",
        last_norm="norm_f",
        attention="attn",
        qkv=("Wqkv",),
        o="out_proj",
        up="ffn.up_proj",
        gate=None,
        down="ffn.down_proj",
        rotary=None,
        scale="softmax_scale",
        dropout="attn_dropout_p",
        clip="clip_qkv",
        tuple_output=True,
    ),
    Family(
        name="gpt2",
        model="GPT2LMHeadModel",
        layers="transformer.h",
        last_norm="ln_f",
        attention="attn",
        qkv=("c_attn",),
        o="c_proj",
        up="mlp.c_fc",
        gate=None,
        down="mlp.c_proj",
        rotary=None,
        dropout="attn_dropout",
        output_dropout="resid_dropout",
    ),
    Family(
        name="opt",
        model="OPTForCausalLM",
        layers="model.decoder.layers",
        last_norm="final_layer_norm",
        o="out_proj",
        up="fc1",
        gate=None,
        down="fc2",
        rotary=None,
        dropout="dropout",
    ),
    Family(
        name="gpt_neox",
        model="GPTNeoXForCausalLM",
        layers="gpt_neox.layers",
        last_norm="final_layer_norm",
        attention="attention",
        qkv=("query_key_value",),
        per_head=True,
        o="dense",
        up="mlp.dense_h_to_4h",
        gate=None,
        down="mlp.dense_4h_to_h",
    ),
    replace(
        LLAMA,
        name="lfm2",
        model="Lfm2ForCausalLM",
        last_norm="embedding_norm",
        mixer="conv",
        norms=("q_layernorm", "k_layernorm"),
        o="out_proj",
        up="feed_forward.w3",
        gate="feed_forward.w1",
        down="feed_forward.w2",
        dropout=None,
    ),
    replace(
        LLAMA,
        name="gpt_oss",
        model="GptOssForCausalLM",
        sinks="sinks",
        short_table=True,
        experts=ExpertPaths(router="mlp.router", interleaved=True, width="intermediate_size"),
    ),
    replace(
        LLAMA,
        name="deepseek_v2",
        model="DeepseekV2ForCausalLM",
        latent=Latent(),
        rotary="adjacent",
        experts=WITH_SHARED,
    ),
    replace(LLAMA, name="deepseek_v3", model="DeepseekV3ForCausalLM", latent=Latent(), experts=WITH_SHARED),
    replace(LLAMA, name="glm4_moe_lite", model="Glm4MoeLiteForCausalLM", latent=Latent(), experts=WITH_SHARED),
)

_SANDWICH = replace(LLAMA, post_norms=("post_attention_layernorm", "post_feedforward_layernorm"))
_GEMMA2 = replace(
    _SANDWICH,
    name="gemma2",
    model="Gemma2ForCausalLM",
    norm_offset=1.0,
    softcap="attn_logit_softcapping",
    starts_with_bos=True,
    states_scale=True,
)
_OLMO2 = replace(_SANDWICH, name="olmo2", model="Olmo2ForCausalLM", norms=("q_norm", "k_norm"), norm_over="heads")
_COHERE = replace(
    LLAMA,
    name="cohere",
    model="CohereForCausalLM",
    rotary="adjacent",
    paired_table=True,
    norms=("q_norm", "k_norm"),
    norm_centred=True,
)

_DENSE = (
    replace(LLAMA, name="gemma", model="GemmaForCausalLM", norm_offset=1.0, starts_with_bos=True),
    _GEMMA2,
    replace(_GEMMA2, name="gemma3_text", model="Gemma3ForCausalLM", norms=("q_norm", "k_norm"), softcap=None),
    _OLMO2,
    replace(_OLMO2, name="olmo3", model="Olmo3ForCausalLM"),
    replace(LLAMA, name="granite", model="GraniteForCausalLM", residual_scale=_GRANITE, states_scale=True),
    replace(_SANDWICH, name="exaone4", model="Exaone4ForCausalLM", norms=("q_norm", "k_norm"), rotates_windows=True),
    replace(LLAMA, name="seed_oss", model="SeedOssForCausalLM", output_dropout="residual_dropout"),
    replace(LLAMA, name="ernie4_5", model="Ernie4_5ForCausalLM", rotary="adjacent"),
    replace(
        LLAMA,
        name="hunyuan_v1_dense",
        model="HunYuanDenseV1ForCausalLM",
        norms=("query_layernorm", "key_layernorm"),
        norm_last=True,
    ),
    replace(LLAMA, name="nemotron", model="NemotronForCausalLM", gate=None, norm_offset=1.0),
    replace(
        LLAMA,
        name="starcoder2",
        model="Starcoder2ForCausalLM",
        up="mlp.c_fc",
        gate=None,
        down="mlp.c_proj",
        output_dropout="residual_dropout",
    ),
    replace(
        LLAMA,
        name="stablelm",
        model="StableLmForCausalLM",
        reads_head_dim=False,
        norms=("q_layernorm", "k_layernorm"),
        norm_over="stack",
        norm_centred=True,
    ),
    replace(
        LLAMA,
        name="phi",
        model="PhiForCausalLM",
        o="dense",
        up="mlp.fc1",
        gate=None,
        down="mlp.fc2",
        last_norm="final_layernorm",
        norms=("q_layernorm", "k_layernorm"),
        norm_centred=True,
    ),
    _COHERE,
    replace(_COHERE, name="cohere2", model="Cohere2ForCausalLM", norms=None, rotates="sliding_window"),
    Family(
        name="falcon",
        model="FalconForCausalLM",
        layers="transformer.h",
        last_norm="ln_f",
        attention="self_attention",
        qkv=("query_key_value",),
        per_head=True,
        kv_heads="num_kv_heads",
        o="dense",
        up="mlp.dense_h_to_4h",
        gate=None,
        down="mlp.dense_4h_to_h",
        scale="inv_norm_factor",
        tuple_output=True,
        refused=("alibi", "its attention adds a position bias that this family's record does not describe"),
    ),
)

_GATED = replace(
    LLAMA,
    name="qwen3_next",
    model="Qwen3NextForCausalLM",
    mixer="linear_attn",
    norms=("q_norm", "k_norm"),
    norm_offset=1.0,
    output_gate=True,
    experts=ExpertPaths(shared="mlp.shared_expert", shared_gate="mlp.shared_expert_gate"),
)

_HYBRIDS = (
    replace(
        LLAMA,
        name="olmoe",
        model="OlmoeForCausalLM",
        norms=("q_norm", "k_norm"),
        norm_over="heads",
        experts=ExpertPaths(),
        refused=("clip_qkv", "its queries and keys are clamped behind their norms"),
    ),
    replace(
        LLAMA,
        name="granitemoehybrid",
        model="GraniteMoeHybridForCausalLM",
        rotates_by="position_embedding_type",
        mixer="mamba",
        residual_scale=_GRANITE,
        states_scale=True,
        up="shared_mlp.input_linear",
        gate="shared_mlp.input_linear",
        down="shared_mlp.output_linear",
    ),
    replace(
        LLAMA,
        name="granitemoe",
        model="GraniteMoeForCausalLM",
        residual_scale=_GRANITE,
        states_scale=True,
        experts=ExpertPaths(
            routed="block_sparse_moe.experts", router="block_sparse_moe.router", width="intermediate_size"
        ),
    ),
    _GATED,
    replace(_GATED, name="qwen3_5_text", model="Qwen3_5ForCausalLM", experts=None),
    replace(_GATED, name="qwen3_5_moe_text", model="Qwen3_5MoeForCausalLM"),
    replace(LLAMA, name="glm4_moe", model="Glm4MoeForCausalLM", norms=("q_norm", "k_norm"), experts=WITH_SHARED),
    replace(
        LLAMA,
        name="nemotron_h",
        model="NemotronHForCausalLM",
        last_norm="norm_f",
        attention="mixer",
        up="mixer.up_proj",
        gate=None,
        down="mixer.down_proj",
        rotary=None,
    ),
    replace(
        LLAMA,
        name="falcon_h1",
        model="FalconH1ForCausalLM",
        last_norm="final_layernorm",
        beside=("mamba", "ssm_out_multiplier"),
        residual_scale=("attn_out_multiplier", "feed_forward.down_multiplier"),
        key_scale="key_multiplier",
        up="feed_forward.up_proj",
        gate="feed_forward.gate_proj",
        down="feed_forward.down_proj",
        tuple_output=True,
    ),
    replace(
        LLAMA,
        name="llama4_text",
        model="Llama4ForCausalLM",
        rotary="adjacent",
        rotates="use_rope",
        norms=("q_norm", "k_norm"),
        one_norm="qk_norm",
        norm_last=True,
        position_scale="unrotated",
        up="feed_forward.up_proj",
        gate="feed_forward.gate_proj",
        down="feed_forward.down_proj",
        experts=ExpertPaths(
            routed="feed_forward.experts",
            router="feed_forward.router",
            shared="feed_forward.shared_expert",
            width="intermediate_size",
        ),
    ),
    replace(
        _SANDWICH,
        name="gemma4_text",
        model="Gemma4ForCausalLM",
        norms=("q_norm", "k_norm"),
        value_norm="v_norm",
        lends_keys=True,
        experts=ExpertPaths(routed="experts", router="router", shared="mlp", apart=True),
        calls_differ=True,
        starts_with_bos=True,
        states_scale=True,
    ),
)

FAMILIES: dict[str, Family] = {record.name: record for record in (*_RECORDS, *_DENSE, *_HYBRIDS)}
BUILT_IN = frozenset(FAMILIES)
"""Those of this table, and not of `register_family`."""

_WRAPPERS = (
    Wrapper(name="mistral3", model="Mistral3ForConditionalGeneration"),
    Wrapper(name="gemma3", model="Gemma3ForConditionalGeneration"),
    Wrapper(name="gemma4", model="Gemma4ForConditionalGeneration"),
    Wrapper(name="qwen3_5", model="Qwen3_5ForConditionalGeneration"),
    Wrapper(name="qwen3_5_moe", model="Qwen3_5MoeForConditionalGeneration"),
    Wrapper(name="llama4", model="Llama4ForConditionalGeneration", layers="language_model.model.layers"),
)
WRAPPERS: dict[str, Wrapper] = {record.name: record for record in _WRAPPERS}

# A compressed checkpoint names its family behind this prefix, so that transformers finds our classes.
PREFIX = "trisect_"


def family_for(config: Any) -> Family:
    """The record for a transformers config, stock or compressed, wrapped or not."""
    model_type = config.model_type.removeprefix(PREFIX)
    wrapper = WRAPPERS.get(model_type)
    if wrapper is not None:
        inner = family_for(config.get_text_config())
        return replace(inner, name=wrapper.name, model=wrapper.model, layers=wrapper.layers)
    if model_type not in FAMILIES:
        raise unknown_name(
            "model family",
            model_type,
            [*FAMILIES, *WRAPPERS],
            "To add one, write a Family record in trisect/models/families.py or register it from outside: "
            "docs/extend.md has the steps, CONTRIBUTING.md the rest.",
        )
    family = FAMILIES[model_type]
    if family.refused is not None and getattr(config, family.refused[0], None):
        setting, reason = family.refused
        raise TrisectError(f"This {family.name} model has {setting} set, which is not supported: {reason}.")
    return family
