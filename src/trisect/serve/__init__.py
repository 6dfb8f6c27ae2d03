"""Serving: a vLLM plugin for native folders, `trisect serve`, and measurements through vLLM."""

from trisect.bundle import NOT_IN_VLLM
from trisect.errors import TrisectError


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
