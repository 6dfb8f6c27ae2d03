"""Model cards: what a folder holds, how to run it, how it was made. The text is in card.md.jinja."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trisect.plan import budget_of, compare
from trisect.records.shapes import ModelShape
from trisect.support.files import atomic_write_text
from trisect.support.receipt import measured_perplexities

SETTINGS = ("method", "ratio", "kv_ratio", "rope_scope", "portable", "align", "allocate", "seed")
REPRODUCE = ("date", "trisect", "commit")

_HYBRIDS = "falcon_h1 granitemoehybrid lfm2 nemotron_h qwen3_next qwen3_5_text qwen3_5_moe_text".split()
NOT_IN_VLLM = {
    **dict.fromkeys(_HYBRIDS, "its layers without attention need a cache of their own"),
    "llama4_text": "vLLM's transformers backend would replace its router by a plain linear map",
    "mpt": "transformers' code for it takes no positions",
}
"""Families that our vLLM plugin does not serve, and why; wrappers around a text model are not served either."""


def write_card(
    folder: Path,
    receipt: Mapping[str, Any],
    *,
    shapes: tuple[ModelShape, ModelShape],
    entry: Mapping[str, Any],
    name: str,
    family: str | None = None,
    stock: Any = None,
) -> None:
    """README.md of a folder whose weights are there already.

    `shapes` are those before and after, `entry` is the config's own record of the compression, `name` where the
    model was loaded from, `family` that of a native folder whose text model is all of it; of an export, `stock` is the
    `Exported` record.
    """
    old, new = (budget_of(shape) for shape in shapes)
    counted = ("parameters", "linear_parameters", "kv_bytes_per_token")
    titles = ("parameters", "linear weights of the decoder", "KV cache, bytes per token")
    sizes = [(title, f"{getattr(old, c):,}", f"{getattr(new, c):,}") for title, c in zip(titles, counted, strict=True)]
    facts = {
        "removed": compare(old, new).ratio,
        "sizes": [*sizes, *_perplexity_rows(receipt)],
        "weights": weights_size(folder),
        "backend": (entry.get("quantization") or {}).get("backend"),
        "times_tuned": len(receipt.get("tuning") or ()),
        "served": family is not None and family not in NOT_IN_VLLM and not entry.get("quantization"),
        "portable": (receipt.get("recipe") or {}).get("portable"),
        "stock": stock,
    }
    made = _recipe_rows(receipt) or [("method", entry.get("method"))]
    atomic_write_text(folder / "README.md", _card(source_of(receipt) or name, made, facts))


def weights_size(folder: Path) -> int:
    """Bytes of the weights alone."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def _card(source: str | None, made: list[tuple[str, Any]], facts: dict[str, Any]) -> str:
    """The filled template. The title is the last part of a path, not the whole of it."""
    from jinja2 import Template

    title = (shown_source(source).rpartition("/")[2] if source else "") or "A model"
    base_model = source if source is not None and is_hub_id(source) else None
    text = Path(__file__).with_name("card.md.jinja").read_text(encoding="utf-8")
    template = Template(text, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    return template.render(title=title, base_model=base_model, made=made, **facts)


def is_hub_id(source: str) -> bool:
    return source.count("/") == 1 and not source.startswith((".", "/", "~"))


def shown_source(source: str) -> str:
    """A model's name as others may read it: without the folders of this machine."""
    return source if is_hub_id(source) else Path(source).name.removesuffix(".gguf")


def source_of(receipt: Mapping[str, Any]) -> str | None:
    """The model that was compressed, if the receipt says so."""
    recipe = receipt.get("recipe") or {}
    source = receipt.get("source") or receipt.get("model") or recipe.get("model")
    return str(source) if source else None


def _recipe_rows(receipt: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The settings that decide what a compressed model is."""
    recipe = receipt.get("recipe") or {}
    rows = [(key, recipe[key]) for key in SETTINGS if recipe.get(key)]
    if text := recipe.get("calibration"):
        name = Path(str(text.get("source"))).name
        rows.append(("calibration", f"{text.get('samples')} windows of {text.get('length')} tokens of {name}"))
    return rows + [(key, receipt[key]) for key in REPRODUCE if receipt.get(key)]


def _perplexity_rows(receipt: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What was measured while compressing."""
    rows = []
    for measured in measured_perplexities(receipt):
        if {"before", "after"} <= set(measured):
            was, now = measured["before"], measured["after"]
            text = f"{Path(str(now['data'])).name}, {now['windows']} windows of {now['length']} tokens"
            rows.append((f"perplexity ({text})", f"{was['perplexity']:.3f}", f"{now['perplexity']:.3f}"))
    return rows
