"""What llama.cpp computes under each name that trisect writes, and why it would compute something else."""

from dataclasses import dataclass
from typing import Any

from trisect.errors import TrisectError
from trisect.export.stock import Stock
from trisect.models import family_for
from trisect.models.rotary import ropes_of


@dataclass(frozen=True)
class Architecture:
    """What llama.cpp computes under one name."""

    name: str
    halved: bool = False
    """Its channels are paired as in Hugging Face, and it reads no list of frequencies."""
    square: bool = False
    """Its heads are together as wide as the residual stream."""
    normalised: bool | None = None
    """Whether the weights of a token's experts are made to add up to one; None without experts."""
    activation: str = "silu"
    pattern: int = 0
    """It knows sliding windows, and each layer of this many looks at everything; 0 where it knows none."""
    yarn: bool = False
    """It stretches rotations by YaRN."""
    width: str | None = None
    """llama.cpp's name for the width of experts, where it is not the usual one of the config's."""
    biased: bool = False
    """Its attention has biases."""
    numbers: tuple[tuple[str, str], ...] = ()
    """More entries of the file: GGUFWriter's name, the config's."""


SCALES = (
    ("attention_scale", "attention_multiplier"),
    ("embedding_scale", "embedding_multiplier"),
    ("residual_scale", "residual_multiplier"),
    ("logit_scale", "logits_scaling"),
)
WINDOW = (("sliding_window", "sliding_window"),)
ARCHITECTURES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "phi3"), Architecture("llama")),
    "qwen3": Architecture("qwen3", halved=True),
    "mixtral": Architecture("llama", normalised=True),
    "qwen3_moe": Architecture("qwen3moe", halved=True, normalised=True),
    "qwen2_moe": Architecture("qwen2moe", halved=True, square=True, normalised=False),
    "olmo2": Architecture("olmo2", halved=True, square=True),
    "granite": Architecture("granite", numbers=SCALES),
    "granitemoe": Architecture("granitemoe", normalised=True, numbers=SCALES),
    "gemma3_text": Architecture("gemma3", halved=True, activation="gelu_pytorch_tanh", pattern=6, numbers=WINDOW),
    "gpt_oss": Architecture(
        "gpt-oss",
        halved=True,
        normalised=True,
        pattern=2,
        yarn=True,
        biased=True,
        width="expert_feed_forward_length",
        numbers=WINDOW,
    ),
}
"""By family."""
LOCAL_BASE, CLAMP = 10_000.0, 7.0
"""What llama.cpp takes for granted: the base of Gemma 3's local rotations; where gpt-oss clamps its gates."""
WIDTHS = {
    "intermediate_size": "feed_forward_length",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
"""Widths by their names in a config -> in llama.cpp's file."""


def known_architecture(config: Any) -> Architecture:
    """llama.cpp's for a config, or a refusal."""
    family = family_for(config).name
    if family not in ARCHITECTURES:
        raise TrisectError(
            f"trisect writes no GGUF files of {family} models, only of {', '.join(ARCHITECTURES)}; use --to hf."
        )
    return ARCHITECTURES[family]


def check_computed(config: Any, stock: Stock, *, listed: bool) -> None:
    """Refuse what llama.cpp would compute otherwise; `listed` says that frequencies need a list."""
    known = known_architecture(config)
    activation = getattr(config, "hidden_act", None) or config.hidden_activation
    if activation != known.activation:
        raise TrisectError(f"llama.cpp computes {activation!r} MLPs as {known.activation}; use --to hf.")
    if known.halved and listed:
        raise TrisectError(
            f"llama.cpp takes no list of frequencies for {known.name}, and this model's are scaled; use --to hf."
        )
    if known.square and stock.head_width * config.num_attention_heads != config.hidden_size:
        raise TrisectError(
            f"llama.cpp's {known.name} has heads that are together as wide as the residual stream; use --to hf."
        )
    if known.normalised is not None:
        _check_mixture(config, stock, known)
    for what, same in _granted(config, known).items():
        if not same:
            raise TrisectError(
                f"llama.cpp's {known.name} has {what}, whatever the file says, but this model differs. Use --to hf."
            )


def _granted(config: Any, known: Architecture) -> dict[str, bool]:
    """What llama.cpp takes for granted of models with sliding windows, and whether it holds."""
    if not known.pattern:
        return {}
    whole = [(number + 1) % known.pattern == 0 for number in range(len(config.layer_types))]
    kinds = ("default", "yarn") if known.yarn else ("default",)
    local = config.rope_parameters.get("sliding_attention", {}).get("rope_theta", LOCAL_BASE)
    return {
        f"one layer in {known.pattern} that looks at everything": whole
        == [kind == "full_attention" for kind in config.layer_types],
        f"rotations of the kind {' or '.join(kinds)}": all(rope["rope_type"] in kinds for rope in ropes_of(config)),
        "local rotations to the base 10000": local == LOCAL_BASE,
        "scores over the root of the head width": getattr(config, "query_pre_attn_scalar", config.head_dim)
        == config.head_dim,
        "gates clamped at 7": getattr(config, "swiglu_limit", CLAMP) == CLAMP,
        "biases in attention": not known.biased or config.attention_bias,
    }


def _check_mixture(config: Any, stock: Stock, found: Architecture) -> None:
    """Refuse experts that llama.cpp routes otherwise, or does not have in some layers."""
    dense = set(range(config.num_hidden_layers)) - stock.mixtures
    if dense:
        raise TrisectError(
            f"llama.cpp's {found.name} has experts in every layer, and layer {min(dense)} of this model has one "
            "MLP; use --to hf."
        )
    if getattr(config, "norm_topk_prob", found.normalised) != found.normalised:
        raise TrisectError(
            f"llama.cpp's {found.name} {'makes' if found.normalised else 'does not make'} the weights of a token's "
            f"experts add up to one, and norm_topk_prob is {config.norm_topk_prob} here; use --to hf."
        )
