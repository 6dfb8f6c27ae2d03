"""One cell: compress a fresh copy, count what is left of it, measure it, and write it all down."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trisect.compare.cells import FORMAT, Cell, allocation
from trisect.compare.count import Count, alignment_step, chosen_weights, count, ratio_of, removed_cache
from trisect.compare.recipe import Tasks
from trisect.config import CompressConfig
from trisect.data import Tokens
from trisect.evaluate.perplexity import perplexity
from trisect.models import shape_of
from trisect.pipeline.run import Compressed
from trisect.plan import budget_of, compare
from trisect.records.parts import COMPONENTS
from trisect.records.shapes import ModelShape
from trisect.support.receipt import build_receipt

Stage = Any  # (stage, done, total) -> None, or None


def dense_receipt(
    cell: Cell, model: Any, tokenizer: Any, *, fingerprint: str, texts: Sequence[Tokens], stage: Stage
) -> dict[str, Any]:
    """The dense row: sizes and measurements only."""
    budget = budget_of(shape_of(model))
    return {
        **_head(cell, fingerprint),
        "counts": {**asdict(count(model)), "kv_bytes_per_token": budget.kv_bytes_per_token},
        "widths": widths(shape_of(model)),
        **measurements(cell, model, tokenizer, texts, stage=stage),
        "receipt": _kept(build_receipt({}, seed=0, token_hash=None, timings={})),
    }


def cell_receipt(
    cell: Cell,
    result: Compressed,
    tokenizer: Any,
    *,
    fingerprint: str,
    dense: tuple[ModelShape, Count],
    texts: Sequence[Tokens],
    stage: Stage,
) -> dict[str, Any]:
    """A compressed model: what went, what it cost, what is left."""
    assert cell.config is not None
    model, (shape, before) = result.model, dense
    old, new, after = budget_of(shape), budget_of(shape_of(model)), count(model)
    change = compare(old, new)
    return {
        **_head(cell, fingerprint),
        "config": {**cell.config.to_dict(), "allocate": allocation(cell.config)},
        "counts": {**asdict(after), "kv_bytes_per_token": new.kv_bytes_per_token},
        "removed": {
            **removed((shape, shape_of(model)), (before, after), cell.config),
            "kv_bytes_per_token": change.kv_bytes_per_token,
            "flops": change.flops,
        },
        "widths": widths(shape_of(model)),
        "losses": summed_losses(result.losses),
        "notes": notes(result.losses),
        **measurements(cell, model, tokenizer, texts, stage=stage),
        "receipt": _kept(result.receipt),
    }


def removed(
    shapes: tuple[ModelShape, ModelShape], counts: tuple[Count, Count], config: CompressConfig
) -> dict[str, Any]:
    """Shares that are gone, counted from the modules; `chosen` is the one to hold against the asked ratio."""
    before, after = counts
    weights = chosen_weights(shapes[0], config)
    gone, zeroed = before.weights - after.weights, max(0, after.zeros - before.zeros)
    of = ratio_of(config)
    return {
        "of": of,
        "chosen": removed_cache(*shapes, config) if of == "KV" else (gone + zeroed) / weights,
        "step": alignment_step(shapes[0], config),
        "zeros": zeroed / weights,
        "decoder": gone / before.weights,
        "parameters": 1 - after.parameters / before.parameters,
    }


def measurements(
    cell: Cell, model: Any, tokenizer: Any, texts: Sequence[Tokens], *, stage: Stage
) -> dict[str, Any]:
    """Perplexity on every text, in the order of the recipe, and accuracy on its tasks."""

    def told(done: int, total: int) -> None:
        if stage is not None:
            stage("perplexity", done, total)

    values = []
    for text, tokens in zip(cell.model.evaluations, texts, strict=True):
        found = asdict(perplexity(model, tokens, progress=told))
        # The name as the recipe has it: where the file was found is this machine's affair.
        values.append({**found, "data": text.data})
    data: dict[str, Any] = {"perplexity": values}
    if cell.tasks is not None:
        data["tasks"] = task_results(cell.tasks, model, tokenizer, stage=stage)
    return data


def task_results(tasks: Tasks, model: Any, tokenizer: Any, *, stage: Stage) -> dict[str, Any]:
    """Scores by the task's name, and what was asked."""
    from trisect.evaluate.tasks import evaluate_tasks, parse_tasks

    asked = parse_tasks(tasks.names, shots=tasks.shots)
    return evaluate_tasks(model, tokenizer, asked, limit=tasks.limit, progress=stage).to_dict()


def summed_losses(losses: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Component (or linear map) -> predicted loss and the whole objective, summed over the layers."""
    sums: dict[str, dict[str, float]] = {}
    for entry in losses:
        total = sums.setdefault(entry["component"], {"loss": 0.0, "total": 0.0})
        total["loss"] += entry["loss"]
        total["total"] += entry["total"]
    return sums


def notes(losses: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the solvers want a reader to know, each remark once, with the number of layers it is about."""
    found = [f"{entry['component']}: {entry['note']}" for entry in losses if entry["note"]]
    kinds = [text for text in dict.fromkeys(found) if not text.endswith(": full width")]
    return [f"{text} ({found.count(text)} layers)" for text in kinds[:8]]


def widths(shape: ModelShape) -> dict[str, Any]:
    """Widths of all layers, and ranks of factored maps: a list, or one number where all are the same."""
    found: dict[str, Any] = {part: [layer.width(part) for layer in shape.layers] for part in COMPONENTS}
    names = dict.fromkeys(linear.name for layer in shape.layers for linear in layer.linears)
    for name in names:
        found[name] = [
            next((linear.rank for linear in layer.linears if linear.name == name), None)
            for layer in shape.layers
        ]
    return {name: values[0] if len(set(values)) == 1 else values for name, values in found.items()}


def _head(cell: Cell, fingerprint: str) -> dict[str, Any]:
    model = cell.model
    return {
        "format": FORMAT,
        "model": {"source": model.source, "dtype": model.dtype, "fingerprint": fingerprint},
        "method": "dense" if cell.config is None else cell.config.method,
    }


def _kept(receipt: Mapping[str, Any]) -> dict[str, Any]:
    """Without what the cell's own receipt says elsewhere, or what is too long to keep for every layer."""
    return {name: value for name, value in receipt.items() if name not in ("recipe", "plan", "losses")}
