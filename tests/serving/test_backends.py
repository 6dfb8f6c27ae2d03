"""Which widths of keys and values vLLM's attention backends take. Reference: the installed vLLM, read and run."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from engines import WHY, expected, largest_difference
from test_plugin import ROUNDING, one_layer_of_each, saved
from test_processes import PROMPTS, run_apart

vllm = pytest.importorskip("vllm", reason=WHY)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "serving.md"
MULTIPLES = list(range(8, 513, 8))
KEYS = {
    "FLASH_ATTN": MULTIPLES[:32],
    "FLASH_ATTN_DIFFKV": MULTIPLES[:32],
    "TRITON_ATTN": MULTIPLES[3:],
    "TRITON_ATTN_DIFFKV": MULTIPLES[3:],
    "FLEX_ATTENTION": MULTIPLES,
}
"""Head widths that the backends for GPUs say they run."""
INTERPRETED = """
from types import SimpleNamespace
import triton.backends
triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
"""
"""Has vLLM believe that Triton has a backend for CPUs; what then runs its kernels is Triton's interpreter."""
WIDTHS = """
        layers = llm.apply_model(lambda served: [layer.self_attn.attn for layer in served.model.layers])
        assert [[(layer.head_size, layer.head_size_v) for layer in each] for each in layers] == {widths}
"""


def reads_value_width(path: str) -> bool:
    """Whether the class that computes a backend's attention looks at the width of values, by its source."""
    module = Path(vllm.__file__).parent.joinpath(*path.split(".")[1:-1])
    source = next((file for file in (module.with_suffix(".py"), module / "__init__.py") if file.exists()), None)
    if source is None:  # named in the registry, and not in this build
        return False
    classes = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.ClassDef)]
    inside = (node for found in classes if found.name.endswith("Impl") for node in ast.walk(found))
    return any("head_size_v" in (getattr(node, "attr", None), getattr(node, "id", None)) for node in inside)


def test_values_apart_are_in_the_backends_of_the_table_and_in_no_other() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from trisect.serve.vllm import VALUES_APART

    found = {member.name for member in AttentionBackendEnum if member.value and reads_value_width(member.value)}
    assert found == set(VALUES_APART)
    rows = {row[0]: row[1] for row in re.findall(r"^\| `([A-Z_]+)` \|[^|]*\| ([^|]*) \|", PAGE.read_text(), re.M)}
    assert {*KEYS, "CPU_ATTN"} <= set(rows)
    assert {name for name, values in rows.items() if "own" in values} == found


@pytest.mark.parametrize("name", KEYS)
def test_backends_for_gpus_say_they_run_the_widths_of_the_table(name: str) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    backend = AttentionBackendEnum[name].get_class()
    assert [width for width in MULTIPLES if backend.supports_head_size(width)] == KEYS[name]


def test_values_apart_are_computed_without_padding(tmp_path: Path) -> None:
    """By vLLM's own Triton kernels, which Triton's interpreter runs on any machine."""
    model: Any = one_layer_of_each((64, 40, 20), values=(24, 40, 33))
    folder = saved(model, tmp_path / "small")
    lines = {"before": INTERPRETED, "inside": WIDTHS.format(widths=[[(64, 40), (40, 40), (32, 40)]])}
    settings, more = {"attention_backend": "TRITON_ATTN_DIFFKV"}, {"TRITON_INTERPRET": "1"}
    found = run_apart(folder, tmp_path, settings=settings, more=more, **lines)
    assert largest_difference(found, expected(model, PROMPTS)) < ROUNDING
