"""The model card of an export: what it is, how it was made, how to load it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trisect.export.hf import Exported


def model_card(export: "Exported", receipt: Mapping[str, Any]) -> str:
    """README.md of a stock checkpoint, front matter included."""
    model = _source(receipt)
    front = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if model is not None and model.count("/") == 1 and not model.startswith((".", "/", "~")):
        front.append(f"base_model: {model}")
    front += ["tags:", "- trisect", "- compressed", "---"]
    widths = export.mlp_widths
    mlp = (
        f"{max(widths)}"
        if len(set(widths)) == 1
        else f"{max(widths)} (needed: {min(widths)} to {max(widths)})"
    )
    rounding = "" if export.rounding is None else f", {export.rounding:.1e} after rounding to {export.dtype}"
    body = [
        f"# {model or 'A model'}, compressed with trisect",
        "",
        "A language model with narrower attention heads and MLPs, written as a stock "
        f"`{export.architecture}` checkpoint: loading it needs no extra package and no remote code.",
        "",
        *LOADING,
        "",
        "| | |",
        "|---|---|",
        f"| head width | {export.head_width} |",
        f"| MLP width | {mlp} |",
        f"| dtype | {export.dtype} |",
        f"| largest difference of logits from trisect's own model | {export.difference:.1e} of the largest "
        f"logit in float32{rounding} |",
        *_recipe(receipt),
        "",
        "Kept rotation frequencies are listed as `longrope` factors where they are not the source's own; the "
        "attention scale of the original head width is in the query weights; zeros fill up narrower layers.",
        "",
    ]
    return "\n".join([*front, "", *body])


LOADING = (
    "```python",
    "from transformers import AutoModelForCausalLM, AutoTokenizer",
    "",
    'model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")',
    'tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")',
    "```",
)


def _source(receipt: Mapping[str, Any]) -> str | None:
    model = receipt.get("model") or (receipt.get("recipe") or {}).get("model")
    return str(model) if model else None


def _recipe(receipt: Mapping[str, Any]) -> list[str]:
    recipe = receipt.get("recipe") or {}
    keys = ("method", "ratio", "kv_ratio", "rope_scope", "align", "allocate", "seed")
    rows = [f"| {key} | {recipe[key]} |" for key in keys if recipe.get(key) is not None]
    calibration = recipe.get("calibration") or {}
    if calibration:
        rows.append(
            f"| calibration | {calibration.get('samples')} windows of {calibration.get('length')} tokens of "
            f"{calibration.get('source')} |"
        )
    for key in ("date", "trisect", "commit"):
        if receipt.get(key):
            rows.append(f"| {key} | {receipt[key]} |")
    return rows
