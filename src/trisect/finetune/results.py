"""Write what was tuned: the same kind of folder that was read, with one more entry in its receipt."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from trisect.data import Tokens, load_tokens
from trisect.errors import TrisectError
from trisect.evaluate.perplexity import evaluating, exponential, input_device, perplexity
from trisect.finetune.examples import Examples, collate, holds_instructions, load_examples
from trisect.finetune.training import Progress, Tuned, summed_loss
from trisect.models import save_model
from trisect.models.compressed import CompressedModel
from trisect.support.files import check_disk_space, new_folder, write_json
from trisect.support.plots import Chart, Series, has_matplotlib, write_figure

HeldOut = Tokens | Examples


def load_held_out(
    source: str, tokenizer: Any, *, tuned_on: str, length: int, windows: int | None, loss: str
) -> HeldOut:
    """Windows of a text, or all examples of instruction data; never the tuning data itself."""
    path = Path(source).expanduser()
    if source == tuned_on or (path.exists() and path.resolve() == Path(tuned_on).expanduser().resolve()):
        raise TrisectError(
            f"--eval-data {source} is the tuning data, on which any tuning looks good; give another text."
        )
    if path.is_file() and holds_instructions(path):
        return load_examples(source, tokenizer, length=length, loss=loss)
    cut: dict[str, Any] = {"samples": windows, "length": length, "sampling": "first"}
    return load_tokens(source, tokenizer, split="evaluation", **cut)


def measure(model: Any, held_out: HeldOut, *, progress: Progress | None = None) -> dict[str, Any]:
    """Perplexity of a text as `trisect eval` has it, or of the learned tokens of instructions."""
    if isinstance(held_out, Tokens):
        return asdict(perplexity(model, held_out, progress=progress))
    total, device, tokens = 0.0, input_device(model), held_out.learned
    with evaluating(model):
        for done, example in enumerate(held_out.items, start=1):
            total += summed_loss(model, collate([example], device)).item()
            if progress is not None:
                progress(done, len(held_out.items))
    found = {"perplexity": exponential(total / tokens), "nll": total / tokens, "tokens": tokens}
    return found | {"examples": len(held_out.items), "data": held_out.source, "token_hash": held_out.hash}


JSON_NAME, PICTURE_NAME = "loss.json", "loss.png"
SPAN = 0.1
"""The smooth line is a mean over this share of the steps."""


def write_curve(folder: Path, losses: list[float], *, title: str) -> list[Path]:
    """Write the curve beside the weights; the files that were written."""
    write_json(folder / JSON_NAME, {"unit": "nats per learned token", "loss": losses})
    if not has_matplotlib():
        return [folder / JSON_NAME]
    lines = {"step": losses, "running mean": running_mean(losses)}
    series = [Series(label=label, points=[*enumerate(line, start=1)]) for label, line in lines.items()]
    chart = Chart(name="loss", title=title, x_label="step", y_label="nats per learned token", series=series)
    return [folder / JSON_NAME, write_figure(folder / PICTURE_NAME, chart)]


def running_mean(losses: list[float]) -> list[float]:
    """Mean of the last tenth of the steps before each one, itself included."""
    span = max(1, round(SPAN * len(losses)))
    parts = [losses[max(0, end - span) : end] for end in range(1, len(losses) + 1)]
    return [sum(part) / len(part) for part in parts]


def extended(receipt: dict[str, Any], tuning: dict[str, Any]) -> dict[str, Any]:
    """The receipt with another entry in the list `tuning`; a model may be tuned more than once."""
    return {**receipt, "tuning": [*receipt.get("tuning", []), tuning]}


def save_tuned(tuned: Tuned, tokenizer: Any, out: str | Path, *, receipt: dict[str, Any]) -> Path:
    """A compressed model's folder, or a stock one for a dense model; with the loss curve."""
    if isinstance(tuned.model, CompressedModel):
        save_model(tuned.model, tokenizer, out, receipt=receipt)
    else:
        check_disk_space(out, int(1.05 * sum(p.numel() * p.element_size() for p in tuned.model.parameters())))
        with new_folder(out) as folder:
            tuned.model.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            write_json(folder / "receipt.json", receipt)
    title = f"LoRA rank {tuned.receipt['recipe']['rank']}, {len(tuned.losses)} steps"
    write_curve(Path(out), tuned.losses, title=title)
    return Path(out)
