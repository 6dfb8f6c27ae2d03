"""Exports for others: an entry for LowRankArena, a repository on the Hugging Face hub."""

import csv
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trisect.bundle import MODULE, shown_source, source_of
from trisect.data.read import hub_answers
from trisect.errors import TrisectError
from trisect.export.hf import Exported, export_hf
from trisect.models import original_shape, shape_of
from trisect.models.source import check_weights, read_raw_config, resolve
from trisect.plan import budget_of
from trisect.support.files import new_folder, write_json

COLUMNS = "name model_family variant method source repo_id revision subpath benchmarks enabled notes".split()
"""Of `checkpoints/index.csv` in LowRankArena's repository."""
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def export_arena(
    model: Any, tokenizer: Any, out: str | Path, *, dtype: torch.dtype, receipt: Mapping[str, Any] | None = None
) -> Exported:
    """Write what LowRankArena takes: `weights`, a stock checkpoint; `manifest.json`; `index.csv`, with its row.

    The folder's place is `compress/artifacts/ID` in their repository, where the row says it is.
    """
    receipt = dict(receipt or {})
    with new_folder(out) as folder:
        done = export_hf(model, tokenizer, folder / "weights", dtype=dtype, receipt=receipt)
        before, after = (budget_of(shape) for shape in (original_shape(model), shape_of(model)))
        entry = arena_entry(receipt, done, kept=after.linear_parameters / before.linear_parameters)
        counts = {"before": before.parameters, "after": after.parameters}
        write_json(folder / "manifest.json", {**entry, "parameters": counts})
        row = {**entry, "benchmarks": "|".join(entry["benchmarks"]), "enabled": "true"}
        with (folder / "index.csv").open("w", encoding="utf-8", newline="") as file:
            table = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
            table.writeheader()
            table.writerow(row)
    note = f"LowRankArena finds it as compress/artifacts/{entry['id']}, with the row of index.csv in its own index.csv"
    return replace(done, path=Path(out) / "weights", notes=(*done.notes, note))


def arena_entry(receipt: Mapping[str, Any], done: Exported, *, kept: float) -> dict[str, Any]:
    """The manifest, by the names that LowRankArena's registry reads."""
    recipe = receipt.get("recipe") or {}
    method = str(recipe.get("method") or "a3").replace("+", "plus")
    source = shown_source(source_of(receipt) or "model")
    family = re.sub(r"[^a-z0-9._-]+", "-", source.rpartition("/")[2].lower()).strip("-_.")
    name = f"{family}_{method}_r{round(100 * kept):02d}"
    text = recipe.get("calibration") or {}
    return {
        "schema_version": "1.0",
        "id": name,
        "name": name,
        "model": source,
        "base_model": source,
        "model_family": family,
        "variant": "instruct" if "instruct" in family else "base",
        "family": "svd",
        "method": method,
        "ratio": round(kept, 4),
        "precision": PRECISIONS[done.dtype],
        "calibration": shown_source(str(text.get("source"))),
        "calibration_samples": text.get("samples"),
        "calibration_length": text.get("length"),
        "seed": recipe.get("seed"),
        "recovery": "none",
        "source": "local",
        "repo_id": "",
        "revision": "",
        "subpath": f"compress/artifacts/{name}/weights",
        "benchmarks": ["main", "speed"],
        "enabled": True,
        "format": "transformers",
        "output_format": "transformers",
        "status": "completed",
        "ready_for_load": True,
        "eval_compatible": done.transformers_4,
        "speed_compatible": done.vllm,
        "created_at": receipt.get("date"),
        "notes": f"A stock {done.architecture}, head width {done.head_width}, written by trisect export --to arena.",
    }


def upload(folder: Path, repo: str, *, private: bool) -> str:
    """Put a whole folder on the hub and return its address; the card there names the repository."""
    check_whole(folder)
    if not hub_answers():
        raise TrisectError(f"The Hugging Face hub cannot be reached: nothing of {folder} was uploaded.")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        made = api.create_repo(repo, private=private, exist_ok=True)
        card = (folder / "README.md").read_text(encoding="utf-8").replace("THIS_FOLDER", made.repo_id)
        about: Any = {"repo_id": made.repo_id, "commit_message": "Upload with trisect"}
        api.upload_folder(folder_path=folder, ignore_patterns=["README.md"], **about)
        api.upload_file(path_or_fileobj=card.encode(), path_in_repo="README.md", **about)
    except Exception as error:  # of the hub's client, or of whichever HTTP library it uses
        reason = " ".join(str(error).split())[:200]
        what = f"The upload of {folder} to {repo} broke off ({reason}): type the same again, and it goes on from there."
        if isinstance(error, HfHubHTTPError | ValueError):
            what = f"The hub refuses {repo}: {reason}. `hf auth login` with a token that may write."
        raise TrisectError(what) from error
    return str(made)


def check_whole(folder: Path) -> None:
    """Refuse to publish a folder that others could not load."""
    source = resolve(str(folder))
    if not source.local or source.gguf:
        raise TrisectError(f"{folder} is no folder of a model; give one that trisect compress or export wrote.")
    check_weights(source)
    needed = ["README.md", "tokenizer_config.json"]
    if "trisect" in read_raw_config(source):
        needed += ["receipt.json", f"{MODULE}.py"]
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        raise TrisectError(f"{folder} is not complete, {missing[0]} is missing: write it again, then push it.")
