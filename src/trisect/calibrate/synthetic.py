"""Text that a model writes itself, to calibrate on: the nearest thing at hand to what it was trained on.

A calibration text says little about neurons that other texts need. What a model writes when nobody leads it
has something of everything it has learnt.
"""

import copy
import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trisect.decode import Decoder, drawn
from trisect.errors import TrisectError
from trisect.evaluate.perplexity import stated_contexts
from trisect.models.fingerprint import fingerprint
from trisect.models.streamed import refuse_streamed
from trisect.support.checks import is_number
from trisect.support.clock import stage, timing
from trisect.support.distributed import unfinished
from trisect.support.files import atomic_write_text, check_writable, write_json
from trisect.support.receipt import build_receipt

Told = Callable[[int, int], None]
"""(tokens written, tokens to write), called again and again."""
TELL_EVERY = 16
LEAST = {"samples": 1, "length": 2, "batch_size": 1, "seed": 0}


@dataclass(frozen=True, kw_only=True)
class OwnWords:
    """How much to write, and how freely."""

    samples: int = 128
    length: int = 2048
    """Tokens of each text."""
    temperature: float = 1.0
    """1 is the model's own distribution; less keeps to what it finds likely."""
    seed: int = 0
    batch_size: int = 32
    """Texts that are written at once. Draws are shared out among them: another number gives other texts."""

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise TrisectError(f"{name} must be a whole number of at least {least}, not {value!r}.")
        if not is_number(self.temperature) or not 0 < self.temperature < math.inf:
            raise TrisectError(f"The temperature must be above 0, not {self.temperature!r}; try 1.")


def write_own_words(
    model: Any, tokenizer: Any, config: OwnWords, out: Path, *, name: str = "", told: Told | None = None
) -> dict[str, Any]:
    """Let a model write texts into `out`, a .jsonl file, with a receipt beside it, which comes back.

    A run that dies goes on behind its last whole batch. The model is prepared for inference by this
    (docs/runtime.md): load it again to compress it.
    """
    check_output(out)
    settings = {"fingerprint": fingerprint(model), "dtype": str(next(model.parameters()).dtype)}
    settings |= asdict(config)
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    device = next(model.parameters()).device
    with unfinished(out, pieces="texts-*") as folder, timing(device) as clock:
        writer = Writer(model, tokenizer, config)
        with stage("write"):
            written = "".join(_pieces(writer, folder, key, told))
        text = "".join(written.splitlines(keepends=True)[: config.samples])
        receipt = build_receipt(
            {"verb": "sample", "model": name, **settings},
            seed=config.seed,
            token_hash=hashlib.sha256(text.encode()).hexdigest(),
            timings=clock.seconds(),
        )
        write_json(receipt_beside(out), receipt)
        atomic_write_text(out, text)
    return receipt


def own_text(model: Any, tokenizer: Any, config: OwnWords, *, told: Told | None = None) -> str:
    """Texts of a model's own in one, written by a copy: the model stays as it is."""
    refuse_streamed(model, "Writing text of its own is done by a copy of the model, which")
    writer = Writer(copy.deepcopy(model), tokenizer, config)
    texts = [text for number in range(writer.batches) for text in writer.write(number, told)]
    return "\n\n".join(texts[: config.samples])


def check_output(out: Path) -> None:
    """Refuse an output that calibration could not read, or that is there already."""
    if out.suffix != ".jsonl":
        raise TrisectError(f"Texts are written as .jsonl, one to a line; try -o {out.with_suffix('.jsonl')}.")
    if out.exists():
        raise TrisectError(f"{out} is there already; name another file with -o, or remove it.")
    check_writable(out)


def receipt_beside(out: Path) -> Path:
    """Where the receipt of a written text is."""
    return out.with_name(f"{out.stem}.receipt.json")


def _pieces(writer: "Writer", folder: Path, key: str, told: Told | None) -> Iterator[str]:
    """The lines of one batch after the other; those of an earlier run are taken as they are."""
    for number in range(writer.batches):
        path = folder / f"texts-{key}-{number:05d}.jsonl"
        if not path.exists():
            with _explained(number, writer):
                texts = writer.write(number, told)
            atomic_write_text(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))
        yield path.read_text(encoding="utf-8")


@contextmanager
def _explained(done: int, writer: "Writer") -> Iterator[None]:
    """Say what is kept of a run that was interrupted, and what to change where memory is short."""
    try:
        yield
    except KeyboardInterrupt as error:
        kept = f"{done} of {writer.batches} batches are kept, and the same command goes on with them."
        raise KeyboardInterrupt(kept if done else "") from error
    except torch.OutOfMemoryError as error:
        raise TrisectError(
            f"{writer.batch} texts of {writer.config.length} tokens at once do not fit into the memory of "
            f"{writer.decoder.device}; give a smaller --batch-size than {writer.batch}, or --dtype bfloat16."
        ) from error


class Writer:
    """Writes batches of texts; each batch has a seed of its own, so any of them can be written alone."""

    def __init__(self, model: Any, tokenizer: Any, config: OwnWords):
        if tokenizer is None:
            raise TrisectError(
                "The model came without a tokenizer, so its words cannot be written down: put the "
                "tokenizer's files into the model's folder."
            )
        self.config, self.tokenizer = config, tokenizer
        self.before = torch.tensor(tokenizer("")["input_ids"], dtype=torch.int64)  # (t,), often one or none
        _check_length(model, config.length, opening=len(self.before) + 1)
        known = min(len(tokenizer), model.get_input_embeddings().num_embeddings)
        special = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
        self.ordinary = torch.tensor([token for token in range(known) if token not in special])
        self.batch = min(config.batch_size, config.samples)
        self.decoder = Decoder(
            model,
            batch=self.batch,
            max_length=config.length,
            pick=drawn(temperature=config.temperature, vocabulary=known),
        )

    @property
    def batches(self) -> int:
        return -(-self.config.samples // self.batch)

    def write(self, number: int, told: Told | None = None) -> list[str]:
        """The texts of one batch, without what the tokenizer puts before them."""
        ids = self.draw(number, told)[:, len(self.before) :]
        return [self.tokenizer.decode(row, clean_up_tokenization_spaces=False) for row in ids.tolist()]

    def draw(self, number: int, told: Told | None = None) -> Tensor:
        """The tokens of one batch, (b, length)."""
        seed = random.Random(f"{self.config.seed}/{number}").getrandbits(63)
        length, device = self.config.length, self.decoder.device
        opening = self._opening(seed)
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(seed)
            found = [opening.to(device), self.decoder.prefill(opening)[:, None]]
            for done in range(opening.shape[1] + 1, length):
                found.append(self.decoder.step()[:, None])
                if told is not None and done % TELL_EVERY == 0:
                    told(self.batch * (number * length + done), self.batch * self.batches * length)
        if told is not None:
            told(self.batch * (number + 1) * length, self.batch * self.batches * length)
        return torch.cat(found, dim=1)

    def _opening(self, seed: int) -> Tensor:
        """What stands before every text, and one token at random, so that texts part from the first on."""
        draw = torch.Generator().manual_seed(seed)
        first = self.ordinary[torch.randint(len(self.ordinary), (self.batch, 1), generator=draw)]
        return torch.cat([self.before.expand(self.batch, -1), first], dim=1)


def _check_length(model: Any, length: int, *, opening: int) -> None:
    known = stated_contexts(model)
    if known and length > min(known):
        raise TrisectError(
            f"The model reads {min(known)} tokens, and a text has {length}; give --length {min(known)}."
        )
    if length <= opening:
        raise TrisectError(f"A text of {length} tokens has none of the model's own; give --length 2048.")
