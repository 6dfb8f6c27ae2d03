"""The texts of a run: windows to calibrate on, windows held out to measure on, and text that the model writes.

A calibration text says little about neurons that other texts need. Synthetic text, drawn from the model itself
without a prompt, is the nearest thing to its training data and has something of everything it has learnt.
"""

import copy
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trisect.calibrate import Progress
from trisect.config import CalibrationConfig, CompressConfig, Increase
from trisect.config.verbs import SampleConfig
from trisect.data import Tokens, catalogue, load, read, tokens_from_tensor
from trisect.data.tokens import TEST_SHARE, WindowSplit, room, split_windows
from trisect.decode import Decoder, drawn
from trisect.errors import TrisectError
from trisect.evaluate.perplexity import stated_contexts
from trisect.models import fingerprint, looking, streamed
from trisect.support import clock, distributed, files, receipt

USUAL_LENGTH = 2048
FEWEST, MOST = 16, 256
CPU_WORK = 9e12  # tokens times parameters that a CPU is given by default: SmolLM2-135M reads 32 windows of 2048
SYNTHETIC_ON_CPU = 16_384  # tokens of synthetic text that a CPU writes by default: writing is slower than reading
SPARE = 1.25  # a model writes so much more than is calibrated on: some is held out, and its tokens read back are fewer
REPORT_EVERY = 16  # tokens of each text that is written
TOO_SHORT = "is too short to hold anything out, so nothing is measured on it; --eval FILE names another text"

TokensWritten = Callable[[int, int], None]  # called with (tokens written, tokens to write)


def usual_length(model: Any) -> int:
    """2048 tokens, or the model's context where that is shorter."""
    return min([USUAL_LENGTH, *stated_contexts(model)])


def usual_windows(model: Any, *, length: int) -> int:
    """256 windows on a GPU; on a CPU from 16 on, fewer the larger the model is."""
    if next(model.parameters()).device.type == "cuda":
        return MOST
    size = sum(parameter.numel() for parameter in model.parameters())
    return max(FEWEST, min(MOST, int(CPU_WORK / (size * length))))


@dataclass(frozen=True, kw_only=True)
class Text:
    """One source of the calibration windows."""

    source: str
    split: WindowSplit
    is_text: bool  # and not ready-made token ids

    @property
    def name(self) -> str:
        return self.source if load.has_two_parts(self.source) else Path(self.source).name


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Calibration windows, and where they come from."""

    calibration: CalibrationConfig  # all of its defaults decided
    tokens: Tokens
    texts: tuple[Text, ...]
    usual: int  # the default number of windows, which the text may not have; 0 where a number was given
    stopgap: bool
    notes: tuple[str, ...]  # what of the default mixture could not be read

    def line(self) -> str:
        """The first line that a run prints."""
        names, count = [text.name for text in self.texts], len(self.tokens.ids)
        several = f"{', '.join(names[:-1])} and {names[-1]}" if names[1:] else names[0]
        line = f"Calibrating on {several}: {count} windows of {self.calibration.length} tokens "
        line += f"from {len(names)} text{'s' if names[1:] else ''}"
        if count < self.usual:
            line += f", all that there are ({self.usual} would be usual)"
        if self.stopgap:
            line += ". This is a stopgap, as the Hugging Face hub cannot be reached: give --calibration your_text.txt"
        return line + "."


def with_tokens(
    model: Any, config: CompressConfig, tokens: Tokens | None, *, tokenizer: Any, progress: Progress | None = None
) -> tuple[CompressConfig, Tokens]:
    """The config with its calibration decided, and its tokens (or those given), checked against the model."""
    if tokens is None:
        prepared = prepare(model, config, tokenizer, progress=progress)
        config, tokens = replace(config, calibration=prepared.calibration), prepared.tokens
    looking.check_tokens(model, tokens.ids)
    return config, tokens


def prepare(model: Any, config: CompressConfig, tokenizer: Any, *, progress: Progress | None = None) -> Prepared:
    """Decide what a config leaves open about calibration, and read its windows."""
    # Under a bound on perplexity the last quarter of the windows shares no token with the others.
    asked = config.calibration
    length = asked.length or usual_length(model)
    wanted = asked.samples or usual_windows(model, length=length)
    known, notes = _default_contents() if asked.source is None else ({}, ())
    # Writing runs a whole model for every token, which one read layer by layer has no time for.
    stopgap = catalogue.BUILTIN if hasattr(model, "layer_store") else catalogue.STOPGAP
    source = asked.source or distributed.broadcast("+".join(known)) or stopgap
    mixture = catalogue.parse_mixture(source)
    names, counts = [part.source for part in mixture], load.share_out(mixture, samples=wanted, name=source)
    streams, from_text = [], []
    for index, name in enumerate(names):
        content = known.get(name)
        if name == catalogue.SYNTHETIC:
            if asked.samples is None and next(model.parameters()).device.type != "cuda":
                counts[index] = min(counts[index], max(FEWEST, SYNTHETIC_ON_CPU // length))
            content = _synthetic(model, tokenizer, counts[index], length, asked.seed, progress)
        if content is None:
            content = load.read_source(name, split="calibration", tokenizer=tokenizer)
        ids = load.tokenize(content, tokenizer, source=name) if isinstance(content, str) else content
        if asked.samples is None:
            counts[index] = min(counts[index], room(ids, length=length, whole=load.has_two_parts(name)))
        streams.append(ids)
        from_text.append(isinstance(content, str))
    tests = [0] * len(counts)
    if isinstance(config.goal, Increase):  # a quarter of all windows, at least one
        shares = [count / sum(counts) for count in counts]
        tests = load.count_windows(shares, samples=max(1, sum(counts) // TEST_SHARE))
    texts = []
    for index, name in enumerate(names):
        # Another seed for each, so that a source named twice gives other windows the second time.
        cut: Any = {"length": length, "sampling": asked.sampling, "seed": asked.seed + index}
        cut |= {"samples": counts[index], "test": tests[index], "bos": load.bos_of(tokenizer)}
        split = split_windows(streams[index], source=name, whole=load.has_two_parts(name), **cut)
        texts.append(Text(source=name, split=split, is_text=from_text[index]))
    both = zip(*((text.split.solve, text.split.test) for text in texts), strict=True)  # test windows last
    ids = torch.cat([load.mixed(pieces, seed=asked.seed) for pieces in both])
    return Prepared(
        calibration=replace(asked, source=source, samples=sum(counts), length=length),
        tokens=tokens_from_tensor(ids, source),
        texts=tuple(texts),
        usual=wanted if asked.samples is None else 0,
        stopgap=asked.source is None and not known,
        notes=notes,
    )


def _default_contents() -> tuple[dict[str, str | Tensor], tuple[str, ...]]:
    """The texts of the default mixture that can be read, and what was wrong with the others."""
    found, notes = {}, []
    for name in filter(read.can_be_read, catalogue.DEFAULT_MIXTURE):
        try:
            found[name] = load.read_source(name, split="calibration")
        except TrisectError as error:
            notes.append(f"{name} is left out. {error}")
    return found, tuple(notes)


def _synthetic(model: Any, tokenizer: Any, windows: int, length: int, seed: int, progress: Progress | None) -> str:
    """Synthetic text for so many windows, written by a copy of the model, the same in every process."""
    streamed.refuse_streamed(model, "Synthetic text is written by a copy of the model, which")
    report = None if progress is None else partial(progress, "tokens written")
    config = SampleConfig(samples=int(windows * SPARE) + 1, length=length, seed=seed)
    writer = Writer(copy.deepcopy(model), tokenizer, config)
    written = [text for number in range(writer.batches) for text in writer.write(number, report)]
    text: str = distributed.broadcast("\n\n".join(written[: config.samples]))
    return text


def held_out_texts(
    prepared: Prepared, tokenizer: Any, *, count: int, other: bool = True
) -> tuple[list[Tokens], list[str]]:
    """Up to `count` windows of each text of a calibration, and what there is to say of those without any."""
    # With `other`, also of a text that took no part in the calibration.
    length, found, notes = prepared.calibration.length, [], []
    assert length is not None
    texts = {text.source: text for text in prepared.texts}
    read_windows: Any = partial(load.evaluation_tokens, tokenizer=tokenizer, windows=count, length=length, fewer=True)
    for text in texts.values():
        if load.has_two_parts(text.source):
            try:
                found.append(replace(read_windows(text.source), source=f"held-out {text.name}"))
            except TrisectError as error:
                notes.append(f"Nothing is measured on held-out {text.name}. {error}")
        elif len(ids := text.split.held_out(count, length=length)):
            text_bytes = load.decoded_bytes(ids, tokenizer) if text.is_text else None
            found.append(tokens_from_tensor(ids, f"held-out {text.name}", text_bytes=text_bytes))
        else:
            notes.append(f"{text.name} {TOO_SHORT}.")
    others = [name for name in catalogue.OTHER_TEXTS if name not in texts] if other and tokenizer is not None else []
    for name in (name for name in others if name == catalogue.BUILTIN or read.can_be_read(name)):
        with suppress(TrisectError):  # the first that can be read is enough
            found.append(read_windows(name))
            break
    return found, notes


def write_synthetic(
    model: Any, tokenizer: Any, config: SampleConfig, out: Path, name: str = "", progress: TokensWritten | None = None
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
        written_by = receipt.build_receipt(recipe, seed=config.seed, token_hash=token_hash, timings=times.seconds())
        files.write_json(out.with_suffix(".receipt.json"), written_by)
        files.atomic_write_text(out, text)
    return written_by


def check_output(out: Path) -> None:
    """Refuse an output that calibration could not read, or that is there already."""
    if out.suffix != ".jsonl":
        raise TrisectError(f"Texts are written as .jsonl, one to a line; try -o {out.with_suffix('.jsonl')}.")
    if out.exists():
        raise TrisectError(f"{out} is there already; name another file with -o, or remove it.")
    files.check_writable(out)


def _pieces(writer: "Writer", folder: Path, key: str, progress: TokensWritten | None) -> Iterator[str]:
    """The lines of one batch after the other; those of an earlier run are reused."""
    for number in range(writer.batches):
        path = folder / f"texts-{key}-{number:05d}.jsonl"
        try:
            texts = [] if path.exists() else writer.write(number, progress)
        except torch.OutOfMemoryError as error:
            few = f"--batch-size {writer.batch // 2}" if writer.batch > 1 else f"--length {writer.length // 2}"
            many = f"{writer.batch} texts of {writer.length} tokens do not fit into memory"
            raise TrisectError(f"{many} ({writer.decoder.device}); type {few}, or --dtype bfloat16.") from error
        if texts:
            files.atomic_write_text(path, "".join(json.dumps({"text": text}) + "\n" for text in texts))
        yield path.read_text(encoding="utf-8")


class Writer:
    """Writes batches of texts; each batch has a seed of its own, so any of them can be written alone."""

    def __init__(self, model: Any, tokenizer: Any, config: SampleConfig):
        if tokenizer is None:
            why = "The model came without a tokenizer, so it cannot write text"
            raise TrisectError(f"{why}: put the tokenizer's files into the model's folder.")
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

    def write(self, number: int, progress: TokensWritten | None = None) -> list[str]:
        """The texts of one batch, without what the tokenizer puts before them."""
        ids = self.draw(number, progress)[:, len(self.before) :]
        return [self.tokenizer.decode(row, clean_up_tokenization_spaces=False) for row in ids.tolist()]

    def draw(self, number: int, progress: TokensWritten | None = None) -> Tensor:
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
