"""Families that are in no table: treated as Llama where a small random model of theirs computes what Llama does."""

import copy
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trisect.errors import TrisectError
from trisect.models import FAMILIES, WRAPPERS, Family, LayerView, register_family
from trisect.models.families import LLAMA, PREFIX

log = logging.getLogger(__name__)

WIDTHS = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
OTHERS = {"head_dim": 16, "vocab_size": 64, "max_position_embeddings": 64}
TOKENS = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
ELSEWHERE = ("model_type", "architectures", "auto_map", "trisect", "dtype", "torch_dtype", "quantization_config")
"""Entries of a config that say nothing of what a layer computes."""
NORMS = ("input_layernorm", "post_attention_layernorm")
MOST = 64  # a larger number is a size, of something that this file does not know
CLOSE = 1e-4  # of the largest number: what float32 may make of the same sums in another order, with room to spare


def recognise(raw: Mapping[str, Any]) -> None:
    """Give a config's family a record, if it has none and computes what Llama does; refuse any other."""
    name = str(raw.get("model_type")).removeprefix(PREFIX)
    if name in FAMILIES or name in WRAPPERS or name not in list(transformers.CONFIG_MAPPING):
        return
    if raw.get("is_encoder_decoder") or transformers.CONFIG_MAPPING[name]().is_encoder_decoder:
        raise TrisectError(f"{name} is an encoder-decoder model; trisect narrows decoder-only language models.")
    found = _compared(name, raw)
    if isinstance(found, str):
        known = "`trisect ls families` lists the known ones; docs/extend.md says how to add one"
        raise TrisectError(f"{name} is no known family, and its layers are not Llama's: {found}. {known}.")
    register_family(found)
    log.warning(
        "%s is no known family. On random weights its layers compute what Llama's do, so it is treated as Llama.", name
    )


def _compared(name: str, raw: Mapping[str, Any]) -> Family | str:
    """The record of a family, or what tells its layers from Llama's."""
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "transformers has no language model of it"
    missing = [key for key in WIDTHS if not hasattr(transformers.CONFIG_MAPPING[name](), key)]
    if missing:
        return f"its config has no {missing[0]}"
    try:
        with torch.random.fork_rng(devices=[]):  # building a model draws numbers that are the caller's
            return _first_difference(_small(name, raw), name)
    except TrisectError as error:
        return str(error)
    except Exception as error:  # whatever the code of an unknown family runs into
        return f"a small model of it cannot be run ({' '.join(str(error).split())[:120]})"


def _small(name: str, raw: Mapping[str, Any]) -> Any:
    """A random model with the settings of a config, but of few and narrow layers."""
    # Settings that choose what is computed; sizes that nobody checked stay behind.
    plain = {key: value for key, value in raw.items() if isinstance(value, bool | float | str | int | None)}
    kept: Any = {k: v for k, v in plain.items() if k not in ELSEWHERE and not (isinstance(v, int) and v > MOST)}
    grouped = raw.get("num_key_value_heads") not in (None, raw.get("num_attention_heads"))
    kept |= {**WIDTHS, **OTHERS, **TOKENS, "num_key_value_heads": 2 if grouped else 4}
    if isinstance(raw.get("layer_types"), list):
        kept["layer_types"] = raw["layer_types"][: WIDTHS["num_hidden_layers"]]
    rope = raw.get("rope_parameters")
    share = rope.get("partial_rotary_factor", 1.0) if isinstance(rope, dict) else 1.0
    kept["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share}
    config = transformers.CONFIG_MAPPING[name](**kept)
    model_class: Any = transformers.AutoModelForCausalLM
    model = model_class.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.3 * noise if parameter.ndim == 1 else noise / parameter.shape[-1] ** 0.5)
    return model


@torch.no_grad()
def _first_difference(model: Any, name: str) -> Family | str:
    paths = [f"{LLAMA.attention}.{part}" for part in (*LLAMA.qkv, LLAMA.o)] + [LLAMA.up, LLAMA.down, *NORMS]
    inside = [f"{LLAMA.layers}.0.{path}" for path in (*paths, str(LLAMA.gate))]
    modules = dict(model.named_modules())
    for path in (LLAMA.layers, f"{LLAMA.layers.rpartition('.')[0]}.{LLAMA.last_norm}", *inside):
        if path not in modules:
            return f"there is no {path}"
    ids = torch.randint(3, OTHERS["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(1))
    family = replace(LLAMA, name=name, model=MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])
    if not _scales(model.get_submodule(LLAMA.layers.rpartition(".")[0]).get_submodule(LLAMA.last_norm)):
        return "its last norm is not one that its weights multiply"
    loud = copy.deepcopy(model)  # what clips values (OLMo may) does nothing to small ones
    for layer in loud.get_submodule(LLAMA.layers).children():
        layer.get_submodule(f"{LLAMA.attention}.{LLAMA.qkv[2]}").weight.mul_(1000)
    for rotary in ("half", "adjacent"):
        record = replace(family, rotary=rotary)
        if all(_close(_as_llama(stock, record)(ids).logits, stock(ids).logits) for stock in (model, loud)):
            return record
    return "its layers compute something else"


def _as_llama(model: Any, record: Family) -> Any:
    """A copy whose layers do what Llama's do with norms and an activation of their own."""
    found = copy.deepcopy(model)
    for index, layer in enumerate(found.get_submodule(LLAMA.layers).children()):
        LayerView(index, layer, record, found.config).own()
        layer.forward = partial(_llama_layer, layer, ACT2FN[found.config.hidden_act])
    return found


def _llama_layer(layer: Any, activate: Any, x: Tensor, **kwargs: Any) -> Tensor:
    first, second = (getattr(layer, norm) for norm in NORMS)
    middle = x + layer.self_attn(first(x), **kwargs)[0]
    inside, mlp = second(middle), layer.mlp
    output: Tensor = middle + mlp.down_proj(activate(mlp.gate_proj(inside)) * mlp.up_proj(inside))
    return output


def _scales(norm: nn.Module) -> bool:
    """Whether twice the weights are twice the norm."""
    x, twice = torch.randn(5, WIDTHS["hidden_size"], generator=torch.Generator().manual_seed(3)), copy.deepcopy(norm)
    for parameter in twice.parameters():
        parameter.mul_(2)
    return not list(norm.parameters()) or _close(twice(x), 2 * norm(x))


def _close(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).abs().max() <= CLOSE * expected.abs().max())
