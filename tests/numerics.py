"""Numerical contracts, run again as on another CPU (`-m numerics`): which tests, and for which tiny models."""

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
NUMERICS = (
    "calibrate",
    "methods",
    "models",
    "quantize/test_quantize_models.py",
    "quantize/test_quantized_cache.py",
    "quantize/test_quantized_linear.py",
    "scale/test_streaming.py",
    "solve",
    "test_curve_files.py",
    "test_curves.py",
    "test_decode.py",
    "test_devices_agree.py",
    "test_prepare.py",
    "test_tolerances.py",
)
"""Files and folders of numerical contracts: what they claim must hold on any CPU (`-m numerics`)."""
STRUCTURE = (
    *("models/test_checkpoint.py", "models/test_factored_checkpoint.py", "models/test_looking.py"),
    *("models/test_generic.py", "models/test_left_whole.py"),
    *("test_no_family_reaches_the_math_backend_on_a_cpu", "test_parts_read_and_written_back_are_identical"),
    *("test_the_live_cache_is_as_small_as_the_budget_says", "test_gradients_reach_every_narrow_weight"),
    *("test_parameters_removed_are_what_the_plan_promised", "test_equal_parameters_are_really_removed"),
    *("test_dtype_is_preserved", "test_save_and_load_round_trip", "test_stored_moments_give_the_same_model"),
    *("test_untouched_layers_and_components_stay_untouched", "test_every_family_saves_and_loads_with_the_same_logits"),
    *("test_missing_statistics_name_the_command_that_collects_them", "test_the_budget_is_what_the_modules_hold"),
    *("test_the_bits_that_are_counted_are_the_bytes_of_the_file", "test_gradients_reach_every_factor"),
)
"""Of these, what another CPU cannot change: names, counts, and a model against itself from disk."""
KINDS = (
    *("llama-gqa", "llama-biases", "mistral-window", "qwen3", "smollm3", "helium", "phi3-longrope", "mpt-clip"),
    *("gpt2", "opt", "gpt_neox", "gemma2", "gemma3", "olmo2", "starcoder2", "phi", "falcon-grouped", "cohere-norms"),
    *("stablelm-parallel", "mixtral", "qwen2_moe", "granitemoehybrid-experts", "lfm2", "deepseek_v3", "qwen3_next"),
    *("nemotron_h", "gpt_oss"),
)
"""One tiny model of each kind of attention, norm, rotation and MLP: claims about families are repeated for these."""


def is_repeated(item: pytest.Item) -> bool:
    """Whether a test is a numerical contract; claims about every family are repeated for some of them."""
    if not any(item.path.is_relative_to(TESTS / name) for name in NUMERICS):
        return False
    assert isinstance(item, pytest.Function)
    family = item.callspec.params.get("name") if hasattr(item, "callspec") else None
    families = getattr(sys.modules.get("tiny_models"), "CONFIGS", {})
    left_out = item.originalname in STRUCTURE or any(item.path == TESTS / name for name in STRUCTURE)
    return not left_out and (family not in families or family in KINDS)
