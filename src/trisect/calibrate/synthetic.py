"""Synthetic text, drawn from the model itself, to calibrate on: the nearest thing to its training data.

A calibration text says little about neurons that other texts need. Text drawn without a prompt has something
of everything the model has learnt.
"""

import copy
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trisect.calibrate.texts import usual_length
from trisect.config.verbs import SampleConfig
from trisect.decode import Decoder, drawn
from trisect.errors import TrisectError
from trisect.evaluate.perplexity import stated_contexts
from trisect.models import fingerprint, streamed
from trisect.support import clock, distributed, files
from trisect.support.receipt import build_receipt

Progress = Callable[[int, int], None]  # called with (tokens written, tokens to write)
REPORT_EVERY = 16


def write_synthetic(
    model: Any, tokenizer: Any, config: SampleConfig, out: Path, *, name: str = "", progress: Progress | None = None
) -> dict[str, Any]:
    """Write synthetic texts into `out`, a .jsonl file, with a receipt beside it, which is returned."""
    # A run that dies resumes after its last whole batch. The model is prepared for inference by this
    # (docs/runtime.md): load it again to compress it.
    check_output(out)
    config = replace(config, length=config.length or usual_length(model))
    first = next(model.parameters())
    settings = {"fingerprint": fingerprint(model), "dtype": str(first.dtype), **asdict(config)}
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    with distributed.unfinished(out, pieces="texts-*") as folder, clock.timing(first.device) as times:
        writer = Writer(model, tokenizer, config)
        with clock.stage("write"):
            written = "".join(_pieces(writer, folder, key, progress))
        text = "".join(written.splitlines(keepends=True)[: config.samples])
        recipe, token_hash = {"verb": "sample", "model": name, **settings}, hashlib.sha256(text.encode()).hexdigest()
        receipt = build_receipt(recipe, seed=config.seed, token_hash=token_hash, timings=times.seconds())
        files.write_json(receipt_beside(out), receipt)
        files.atomic_write_text(out, text)
    return receipt


def synthetic_text(model: Any, tokenizer: Any, config: SampleConfig, *, progress: Progress | None = None) -> str:
    """Synthetic texts joined to one, written by a copy of the model."""
    streamed.refuse_streamed(model, "Synthetic text is written by a copy of the model, which")
    writer = Writer(copy.deepcopy(model), tokenizer, config)
    texts = [text for number in range(writer.batches) for text in writer.write(number, progress)]
    return "\n\n".join(texts[: config.samples])


def check_output(out: Path) -> None:
    """Refuse an output that calibration could not read, or that is there already."""
    if out.suffix != ".jsonl":
        raise TrisectError(f"Texts are written as .jsonl, one to a line; try -o {out.with_suffix('.jsonl')}.")
    if out.exists():
        raise TrisectError(f"{out} is there already; name another file with -o, or remove it.")
    files.check_writable(out)


def receipt_beside(out: Path) -> Path:
    return out.with_name(f"{out.stem}.receipt.json")


def _pieces(writer: "Writer", folder: Path, key: str, progress: Progress | None) -> Iterator[str]:
    """The lines of one batch after the other; those of an earlier run are reused."""
    for number in range(writer.batches):
        path = folder / f"texts-{key}-{number:05d}.jsonl"
        try:
            texts = [] if path.exists() else writer.write(number, progress)
        except KeyboardInterrupt as error:
            kept = f"{number} of {writer.batches} batches are kept, and the same command goes on with them."
            raise KeyboardInterrupt(kept if number else "") from error
        except torch.OutOfMemoryError as error:
            raise TrisectError(
                f"{writer.batch} texts of {writer.length} tokens at once do not fit into the memory of "
                f"{writer.decoder.device}; give a smaller --batch-size than {writer.batch}, or --dtype bfloat16."
            ) from error
        if texts:
            files.atomic_write_text(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))
        yield path.read_text(encoding="utf-8")


class Writer:
    """Writes batches of texts; each batch has a seed of its own, so any of them can be written alone."""

    def __init__(self, model: Any, tokenizer: Any, config: SampleConfig):
        if tokenizer is None:
            raise TrisectError(
                "The model came without a tokenizer, so it cannot write text: put the tokenizer's files into "
                "the model's folder."
            )
        self.config, self.tokenizer = config, tokenizer
        self.before = torch.tensor(tokenizer("")["input_ids"], dtype=torch.int64)  # (t,), often one or none
        self.length = length = config.length or usual_length(model)
        context = min(stated_contexts(model), default=length)
        if length > context:
            raise TrisectError(f"The model reads {context} tokens, and a text has {length}; give --length {context}.")
        if length <= len(self.before) + 1:
            raise TrisectError(f"A text of {length} tokens has none drawn from the model; give --length 2048.")
        known = min(len(tokenizer), model.get_input_embeddings().num_embeddings)
        special = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
        self.ordinary = torch.tensor([token for token in range(known) if token not in special])
        self.batch = min(config.batch_size, config.samples)
        self.batches = -(-config.samples // self.batch)
        pick = drawn(temperature=config.temperature, vocabulary=known)
        self.decoder = Decoder(model, batch=self.batch, max_length=self.length, pick=pick)

    def write(self, number: int, progress: Progress | None = None) -> list[str]:
        """The texts of one batch, without what the tokenizer puts before them."""
        ids = self.draw(number, progress)[:, len(self.before) :]
        return [self.tokenizer.decode(row, clean_up_tokenization_spaces=False) for row in ids.tolist()]

    def draw(self, number: int, progress: Progress | None = None) -> Tensor:
        """The tokens of one batch, (b, length)."""
        seed = random.Random(f"{self.config.seed}/{number}").getrandbits(63)
        length, device, chance = self.length, self.decoder.device, torch.Generator().manual_seed(seed)
        # What stands before every text, and one token at random, so that texts part from the first on.
        first = self.ordinary[torch.randint(len(self.ordinary), (self.batch, 1), generator=chance)]
        opening = torch.cat([self.before.expand(self.batch, -1), first], dim=1)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            found = [opening.to(device), self.decoder.prefill(opening)[:, None]]
            for done in range(opening.shape[1] + 1, length + 1):
                if progress is not None and (done % REPORT_EVERY == 0 or done == length):
                    progress(self.batch * (number * length + done), self.batch * self.batches * length)
                if done < length:
                    found.append(self.decoder.step()[:, None])
        return torch.cat(found, dim=1)
