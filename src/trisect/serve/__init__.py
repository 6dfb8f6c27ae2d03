"""Serving: a vLLM plugin for native folders, `trisect serve`, and measurements through vLLM."""

from trisect.errors import TrisectError

_ONE_CACHE = "its layers without attention need a cache of their own"
NOT_IN_VLLM = {
    "falcon_h1": _ONE_CACHE,
    "granitemoehybrid": _ONE_CACHE,
    "lfm2": _ONE_CACHE,
    "gemma4_text": "its layers differ in head width and are told something of the text, which was not tried there",
    "llama4_text": "vLLM's transformers backend would replace its router by a plain linear map",
    "nemotron_h": _ONE_CACHE,
    "qwen3_next": _ONE_CACHE,
    "qwen3_5_text": _ONE_CACHE,
    "qwen3_5_moe_text": _ONE_CACHE,
    "mpt": "transformers' code for it takes no positions",
}
"""Families that the plugin does not serve, and why; wrappers around a text model are not served either."""


def register() -> None:
    """What vLLM calls in each of its processes, maybe more than once (entry point `vllm.general_plugins`)."""
    from vllm import ModelRegistry

    from trisect.models import FAMILIES
    from trisect.serve.check import check_engines

    known = ModelRegistry.get_supported_archs()
    for record in FAMILIES.values():
        name = f"Trisect{record.model}"
        if name not in known:
            kind = "NarrowForCausalLM" if record.experts is None else "NarrowMoEForCausalLM"
            ModelRegistry.register_model(name, f"trisect.serve.vllm:{kind}")
    check_engines()


def check_served(family: str) -> None:
    """Refuse a family that the plugin does not serve."""
    if family in NOT_IN_VLLM:
        raise TrisectError(
            f"The vLLM plugin does not serve {family}: {NOT_IN_VLLM[family]}; `transformers serve` does, and so may "
            "vLLM with a stock export (docs/serving.md)."
        )
