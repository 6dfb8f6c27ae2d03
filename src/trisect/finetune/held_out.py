"""What tuning is judged by: text, or instructions, that it does not learn from."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trisect.data import Tokens, load_tokens
from trisect.data.instructions import holds_instructions
from trisect.errors import TrisectError
from trisect.evaluate.forward import evaluating, input_device
from trisect.evaluate.perplexity import exponential, perplexity
from trisect.finetune.batches import collate
from trisect.finetune.examples import Examples, load_examples
from trisect.finetune.training import summed_loss

HeldOut = Tokens | Examples
Progress = Callable[[int, int], None]


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
    total, device = 0.0, input_device(model)
    with evaluating(model):
        for done, example in enumerate(held_out.items, start=1):
            total += summed_loss(model, collate([example]).to(device)).item()
            if progress is not None:
                progress(done, len(held_out.items))
    nll = total / held_out.learned
    return {
        "perplexity": exponential(nll),
        "nll": nll,
        "tokens": held_out.learned,
        "examples": len(held_out.items),
        "data": held_out.source,
        "token_hash": held_out.hash,
    }
