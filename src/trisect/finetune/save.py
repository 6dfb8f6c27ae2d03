"""Write what was tuned: the same kind of folder that was read, with one more entry in its receipt."""

from pathlib import Path
from typing import Any

from trisect.files import check_disk_space, new_folder, write_json
from trisect.finetune.curve import write_curve
from trisect.finetune.tune import Tuned
from trisect.models import save_model
from trisect.models.compressed import CompressedModel


def extended(receipt: dict[str, Any], tuning: dict[str, Any]) -> dict[str, Any]:
    """The receipt with another entry in the list `tuning`; a model may be tuned more than once."""
    return {**receipt, "tuning": [*receipt.get("tuning", []), tuning]}


def save_tuned(tuned: Tuned, tokenizer: Any, out: str | Path, *, receipt: dict[str, Any]) -> Path:
    """A compressed model's folder, or a stock one for a dense model; with the loss curve."""
    if isinstance(tuned.model, CompressedModel):
        save_model(tuned.model, tokenizer, out, receipt=receipt)
    else:
        _save_dense(tuned.model, tokenizer, out, receipt=receipt)
    write_curve(
        Path(out),
        tuned.losses,
        title=f"LoRA rank {tuned.receipt['recipe']['rank']}, {len(tuned.losses)} steps",
    )
    return Path(out)


def _save_dense(model: Any, tokenizer: Any, out: str | Path, *, receipt: dict[str, Any]) -> None:
    check_disk_space(out, int(1.05 * sum(p.numel() * p.element_size() for p in model.parameters())))
    with new_folder(out) as folder:
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        write_json(folder / "receipt.json", receipt)
