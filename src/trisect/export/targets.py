"""Which stock architecture a compressed model can be written as, or why there is none."""

from typing import Any

import transformers

from trisect.errors import TrisectError
from trisect.models import LayerView, family_for, family_of, layer_views
from trisect.models.norm import HeadNorm
from trisect.models.quantized import QuantizedLinear

STOCK = ("llama", "mistral", "ministral3", "qwen2", "qwen3", "smollm3", "phi3")
"""Families with a stock architecture that reads its head width from the config."""
GGUF = ("llama", "mistral", "qwen2", "qwen3", "phi3")
"""Those that llama.cpp computes, all but one of them under Llama's name."""

REASONS = {
    "helium": "it rotates adjacent channels at frequencies that its config cannot list",
    "mistral3": "it is a text model inside a multimodal one",
}
OURS = ("trisect", "auto_map", "model_type", "architectures", "transformers_version")
WINDOWED = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
FUSED = ("resid_pdrop", "embd_pdrop", "original_max_position_embeddings", "partial_rotary_factor")
"""Settings of Phi-3 that Llama and Mistral do not have."""


def check_exportable(model: Any) -> None:
    """Refuse, with the reason, what no stock architecture can hold: before anything is computed."""
    family = family_of(model)
    if family.name not in STOCK:
        reason = REASONS.get(family.name, "it is not of the Llama kind: rotated, gated, with one norm type")
        raise TrisectError(
            f"A compressed {family.name} model has no stock form: {reason}. What can be exported is "
            f"{', '.join(STOCK)}; load this folder itself, with `import trisect` and AutoModelForCausalLM."
        )
    for view in layer_views(model):
        _check_layer(view)


def check_portable(model: Any, parts: tuple[str, ...]) -> None:
    """Refuse a cut of these parts whose result could not be exported."""
    check_exportable(model)
    if "qk" in parts and family_of(model).norms is not None:
        raise _norm_refusal(family_of(model).name)


def _check_layer(view: LayerView) -> None:
    if any(isinstance(module, QuantizedLinear) for module in view.layer.modules()):
        raise TrisectError(
            f"Layer {view.index} is quantised: export the folder it was made from, and let the engine "
            "quantise (--to gguf --dtype q8_0, or llama-quantize)."
        )
    shape, name = view.shape(), view.family.name
    if shape.linears:
        raise TrisectError(
            f"Layer {view.index}: {shape.linears[0].name} is two matrices, and a stock layer has one. "
            "Methods that narrow components can be exported: compress with --method a3+ --rope-scope model."
        )
    if shape.pairs and 2 * shape.pairs != shape.qk:
        raise TrisectError(
            f"Layer {view.index}: only {2 * shape.pairs} of {shape.qk} query channels rotate, and stock "
            f"{name} code rotates all of them; load the folder itself with `import trisect`."
        )
    if view.family.norms is not None:
        norms = [getattr(view.attention, norm) for norm in view.family.norms]
        if any(isinstance(norm, HeadNorm) for norm in norms):
            raise _norm_refusal(name)


def _norm_refusal(name: str) -> TrisectError:
    return TrisectError(
        f"{name} has a norm between projection and rotation with one set of weights for all heads, and "
        "narrow queries and keys need one for each: leave them whole to export, with --parts mlp (or ov,mlp, "
        "where values are padded to the old width)."
    )


def plain_config(source: Any, changes: dict[str, Any], *, as_llama: bool = False) -> Any:
    """A stock config with nothing of trisect in it."""
    values = {key: value for key, value in source.to_dict().items() if key not in OURS} | changes
    family = family_for(source)
    if family.name == "phi3":
        return _unfused_config(values)
    if as_llama and family.name != "llama":
        if family.name not in ("mistral", "qwen2"):
            raise TrisectError(f"{family.name} computes what Llama does not; export without --as-llama.")
        return _llama_config(values, biased=family.name == "qwen2")
    return getattr(transformers, family.model).config_class(**values)


def _unfused_config(values: dict[str, Any]) -> Any:
    """Phi-3 with its fused matrices taken apart is Llama, or Mistral where it looks back over a window."""
    values = {key: value for key, value in values.items() if key not in FUSED}
    rope = {key: value for key, value in values["rope_parameters"].items() if key != "partial_rotary_factor"}
    windowed = values.pop("sliding_window", None)
    if windowed is None:
        return transformers.LlamaConfig(**{**values, "rope_parameters": rope})
    return transformers.MistralConfig(**{**values, "rope_parameters": rope, "sliding_window": windowed})


def _llama_config(values: dict[str, Any], *, biased: bool) -> Any:
    """The same layers under Llama's name, which more engines read a head width for."""
    windows = {values.get("sliding_window"), *(values.get("layer_types") or ())} - {None, "full_attention"}
    if windows and (values.get("use_sliding_window", True)):
        raise TrisectError(
            "This model attends to a sliding window, which Llama's architecture has not; export without "
            "--as-llama."
        )
    values = {key: value for key, value in values.items() if key not in WINDOWED}
    return transformers.LlamaConfig(**{**values, "attention_bias": biased})
