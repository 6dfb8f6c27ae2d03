"""The model card of a saved folder: what it is, how it was made, how to load it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trisect.plan import budget_of, compare
from trisect.records.shapes import ModelShape
from trisect.support.files import atomic_write_text

SETTINGS = ("method", "ratio", "kv_ratio", "rope_scope", "portable", "align", "allocate", "seed")
Shapes = tuple[ModelShape, ModelShape]
"""Of a model before and after."""
REPRODUCE = ("date", "trisect", "commit")


def write_card(
    folder: Path, receipt: Mapping[str, Any], *, shapes: Shapes, entry: Mapping[str, Any], name: str
) -> None:
    """README.md of a native folder whose weights are there already.

    `entry` is the config's own record of the compression, `name` where the model was loaded from.
    """
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    source = source_of(receipt) or name
    old, new = (budget_of(shape) for shape in shapes)
    removed = compare(old, new).ratio
    packed, times = entry.get("quantization"), len(receipt.get("tuning") or ())
    quantised = f", linear layers quantised with {packed.get('backend')}" if packed else ""
    tuned = f"| fine-tuned | {times} {'time' if times == 1 else 'times'}, see receipt.json |"
    lines = [
        *heading(source),
        f"A language model with {removed:.1%} of its decoder's linear weights removed after training.",
        "",
        "| | before | after |",
        "|---|---|---|",
        f"| parameters | {old.parameters:,} | {new.parameters:,} |",
        f"| linear weights of the decoder | {old.linear_parameters:,} | {new.linear_parameters:,} |",
        f"| KV cache, bytes per token | {old.kv_bytes_per_token:,} | {new.kv_bytes_per_token:,} |",
        *_perplexity_rows(receipt),
        "",
        f"Weights in this folder: {weights / 1e6:.1f} MB{quantised}.",
        "",
        LOADING,
        "| how it was made | |",
        "|---|---|",
        *(recipe_rows(receipt) or [f"| method | {entry.get('method')} |"]),
        *([tuned] if times else []),
        "",
        "`receipt.json` has the whole recipe, `config.json` the width of every layer.",
        "",
    ]
    atomic_write_text(folder / "README.md", "\n".join(lines))


LOADING = """\
## Loading

With trisect installed, no code of this folder is run:

```python
import trisect
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")
tokenizer = AutoTokenizer.from_pretrained("THIS_FOLDER")
```

Without it, `modeling_trisect.py` does the same (read it first: it is run on your machine):

```python
model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER", trust_remote_code=True)
```

For software that runs neither, `trisect export THIS_FOLDER -o OUT` writes a stock checkpoint and
`trisect export THIS_FOLDER -o OUT.gguf --to gguf` a file for llama.cpp, where the heads allow it.
"""


def heading(source: str | None) -> list[str]:
    """The front matter that model hubs read, and the title: of a path its last part, not the whole of it."""
    front = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if source is not None and source.count("/") == 1 and not source.startswith((".", "/", "~")):
        front.append(f"base_model: {source}")
    title = (Path(source).name.removesuffix(".gguf") if source else "") or "A model"
    tags = ["tags:", "- trisect", "- compressed", "---"]
    return [*front, *tags, "", f"# {title}, compressed with trisect", ""]


def source_of(receipt: Mapping[str, Any]) -> str | None:
    """The model that was compressed, if the receipt says so."""
    recipe = receipt.get("recipe") or {}
    source = receipt.get("source") or receipt.get("model") or recipe.get("model")
    return str(source) if source else None


def recipe_rows(receipt: Mapping[str, Any]) -> list[str]:
    """The settings that decide what a compressed model is."""
    recipe = receipt.get("recipe") or {}
    rows = [f"| {key} | {recipe[key]} |" for key in SETTINGS if recipe.get(key)]
    calibration = recipe.get("calibration") or {}
    if calibration:
        rows.append(
            f"| calibration | {calibration.get('samples')} windows of {calibration.get('length')} tokens of "
            f"{Path(str(calibration.get('source'))).name} |"
        )
    return [*rows, *(f"| {key} | {receipt[key]} |" for key in REPRODUCE if receipt.get(key))]


def _perplexity_rows(receipt: Mapping[str, Any]) -> list[str]:
    """Where it was measured while compressing; older receipts have one text."""
    rows = []
    for measured in receipt.get("perplexities") or [receipt.get("perplexity") or {}]:
        if {"before", "after"} <= set(measured):
            was, now = measured["before"], measured["after"]
            text = f"{Path(str(now['data'])).name}, {now['windows']} windows of {now['length']} tokens"
            rows.append(f"| perplexity ({text}) | {was['perplexity']:.3f} | {now['perplexity']:.3f} |")
    return rows
