"""The model card of an export: what it is, how it was made, how to load it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trisect.bundle.card import front_matter, recipe_rows, source_of, title_of

if TYPE_CHECKING:
    from trisect.export.hf import Exported


def model_card(export: "Exported", receipt: Mapping[str, Any]) -> str:
    """README.md of a stock checkpoint, front matter included."""
    source = source_of(receipt)
    widths = export.mlp_widths
    mlp = (
        f"{max(widths)}"
        if len(set(widths)) == 1
        else f"{max(widths)} (needed: {min(widths)} to {max(widths)})"
    )
    rounding = "" if export.rounding is None else f", {export.rounding:.1e} after rounding to {export.dtype}"
    body = [
        f"# {title_of(source)}, compressed with trisect",
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
        *recipe_rows(receipt),
        "",
        "Kept rotation frequencies are listed as `longrope` factors where they are not the source's own; the "
        "attention scale of the original head width is in the query weights; zeros fill up narrower layers.",
        "",
    ]
    return "\n".join([*front_matter(source), "", *body])


LOADING = (
    "```python",
    "from transformers import AutoModelForCausalLM, AutoTokenizer",
    "",
    'model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")',
    'tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")',
    "```",
)
