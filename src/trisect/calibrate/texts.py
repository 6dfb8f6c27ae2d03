"""Texts that a compressed model is measured on: held out of calibration, and one that took no part in it."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trisect.calibrate import Progress
from trisect.config import CompressConfig
from trisect.config.settings import CalibrationConfig
from trisect.data import Tokens, tokens_from_tensor
from trisect.data.catalogue import BUILTIN, DEFAULT_MIXTURE, OTHER_TEXTS, OWN_WORDS, STOPGAP
from trisect.data.hub import can_be_read
from trisect.data.load import (
    count_windows,
    decoded_bytes,
    has_two_parts,
    parse_mixture,
    read_source,
    share_out,
    tokenize,
)
from trisect.data.tokens import TEST_SHARE, Apart, room, set_apart, windows
from trisect.errors import TrisectError
from trisect.evaluate.perplexity import stated_contexts
from trisect.models.fingerprint import check_tokens
from trisect.support import distributed

USUAL_LENGTH = 2048
FEWEST, MOST = 16, 256
CPU_WORK = 9e12
"""Tokens times parameters that a CPU is given by default: SmolLM2-135M reads 32 windows of 2048."""

WRITTEN_ON_CPU = 16_384
"""Tokens of synthetic text that a CPU writes by default: writing is slower than reading."""


def usual_length(model: Any) -> int:
    """2048 tokens, or the model's context where that is shorter."""
    return min([USUAL_LENGTH, *stated_contexts(model)])


def usual_windows(model: Any, *, length: int) -> int:
    """256 windows on a GPU; on a CPU as many as keep its work within bounds."""
    if next(model.parameters()).device.type == "cuda":
        return MOST
    return windows_on_cpu(sum(parameter.numel() for parameter in model.parameters()), length=length)


def usual_written(model: Any, *, windows: int, length: int) -> int:
    """Windows of synthetic text where that many are usual of others."""
    if next(model.parameters()).device.type == "cuda":
        return windows
    return min(windows, max(FEWEST, WRITTEN_ON_CPU // length))


def windows_on_cpu(parameters: int, *, length: int) -> int:
    """Between 16 and 256, fewer the larger the model is."""
    return max(FEWEST, min(MOST, int(CPU_WORK / (parameters * length))))


SPARE = 1.25
"""A model writes so much more than is calibrated on: some is held out, and its tokens read back are fewer."""


@dataclass(frozen=True, kw_only=True)
class Text:
    """One source of the calibration windows."""

    source: str
    apart: Apart
    is_text: bool
    """And not ready-made token ids."""

    @property
    def name(self) -> str:
        return self.source if has_two_parts(self.source) else Path(self.source).name


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Calibration windows, and where they come from."""

    calibration: CalibrationConfig
    """With nothing left open."""
    tokens: Tokens
    texts: tuple[Text, ...]
    usual: int
    """Windows that nobody asked for in number; the text may have had fewer."""
    stopgap: bool
    notes: tuple[str, ...]
    """What of the default mixture could not be read."""

    def line(self) -> str:
        """What a run says first."""
        names, count = [text.name for text in self.texts], len(self.tokens.ids)
        several = f"{', '.join(names[:-1])} and {names[-1]}" if names[1:] else names[0]
        line = f"Calibrating on {several}: {count} windows of {self.calibration.length} tokens "
        line += f"from {len(names)} texts" if names[1:] else "from 1 text"
        if count < self.usual:
            line += f", all that there are ({self.usual} would be usual)"
        if self.stopgap:
            line += (
                ". This is a stopgap, because the Hugging Face hub cannot be reached: give text of the kind "
                "that the model is for, --calibration your_text.txt"
            )
        return line + "."


def with_tokens(
    model: Any,
    config: CompressConfig,
    tokens: Tokens | None,
    *,
    tokenizer: Any,
    progress: Progress | None = None,
) -> tuple[CompressConfig, Tokens]:
    """The tokens given, or those that a config comes to, fit for the model; and the config that says so."""
    if tokens is None:
        prepared = prepare(model, config, tokenizer, progress=progress)
        config, tokens = replace(config, calibration=prepared.calibration), prepared.tokens
    check_tokens(model, tokens.ids)
    return config, tokens


def prepare(
    model: Any, config: CompressConfig, tokenizer: Any, *, progress: Progress | None = None
) -> Prepared:
    """Settle what a config leaves open about calibration, and read its windows.

    Under a bound on perplexity the last quarter of the windows shares no token with the others.
    """
    asked = config.calibration
    length = asked.length or usual_length(model)
    wanted = asked.samples or usual_windows(model, length=length)
    known, notes = _default_contents() if asked.source is None else ({}, ())
    source = asked.source or distributed.broadcast("+".join(known)) or _stopgap(model)
    mixture = parse_mixture(source)
    counts = share_out(mixture, samples=wanted, name=source)
    streams: list[tuple[str, str | Tensor, Tensor]] = []
    for index, (name, count) in enumerate(zip((part.source for part in mixture), counts, strict=True)):
        content = known.get(name)
        if name == OWN_WORDS:
            if asked.samples is None:
                count = counts[index] = usual_written(model, windows=count, length=length)
            content = _written(model, tokenizer, count, length, asked.seed, progress)
        content = read_source(name, split="calibration") if content is None else content
        ids = tokenize(content, tokenizer, source=name) if isinstance(content, str) else content
        streams.append((name, content, ids))
        if asked.samples is None:
            counts[index] = min(count, room(ids, length=length, whole=has_two_parts(name)))
    judging = _judging(counts) if config.max_ppl_increase is not None else [0] * len(counts)
    texts = []
    for index, (name, content, ids) in enumerate(streams):
        apart = set_apart(
            ids,
            samples=counts[index],
            length=length,
            sampling=asked.sampling,
            seed=asked.seed + index,  # so that a source named twice gives other windows the second time
            source=name,
            whole=has_two_parts(name),
            judging=judging[index],
        )
        texts.append(Text(source=name, apart=apart, is_text=isinstance(content, str)))
    return Prepared(
        calibration=replace(asked, source=source, samples=sum(counts), length=length),
        tokens=tokens_from_tensor(_mixed([text.apart for text in texts], seed=asked.seed), source),
        texts=tuple(texts),
        usual=wanted if asked.samples is None else 0,
        stopgap=asked.source is None and not known,
        notes=notes,
    )


def _default_contents() -> tuple[dict[str, str | Tensor], tuple[str, ...]]:
    """The texts of the default mixture that can be read, and what was wrong with the others."""
    found: dict[str, str | Tensor] = {}
    notes = []
    for name in filter(can_be_read, DEFAULT_MIXTURE):
        try:
            found[name] = read_source(name, split="calibration")
        except TrisectError as error:
            notes.append(f"{name} is left out. {error}")
    return found, tuple(notes)


def _stopgap(model: Any) -> str:
    """Synthetic text, unless the model is read layer by layer: writing runs all of it for every token."""
    return BUILTIN if hasattr(model, "layer_store") else STOPGAP


def _written(
    model: Any, tokenizer: Any, windows: int, length: int, seed: int, progress: Progress | None
) -> str:
    """Synthetic text for so many windows, the same in every process."""
    from trisect.calibrate.synthetic import OwnWords, own_text

    def told(done: int, total: int) -> None:
        if progress is not None:
            progress("tokens written", done, total)

    config = OwnWords(samples=int(windows * SPARE) + 1, length=length, seed=seed)
    text: str = distributed.broadcast(own_text(model, tokenizer, config, told=told))
    return text


def _judging(counts: list[int]) -> list[int]:
    """Of the windows of each text, those that judge: a quarter of all of them, at least one."""
    total = sum(counts)
    return count_windows([count / total for count in counts], samples=max(1, total // TEST_SHARE))


def _mixed(aparts: list[Apart], *, seed: int) -> Tensor:
    """The windows of all texts, shuffled where there are several, those that judge last."""
    parts = [torch.cat([apart.solving for apart in aparts]), torch.cat([apart.judging for apart in aparts])]
    if len(aparts) > 1:
        parts = [part[torch.randperm(len(part), generator=_generator(seed))] for part in parts]
    return torch.cat(parts)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


TOO_SHORT = "is too short to hold anything out, so nothing is measured on it; --eval FILE names another text"


def held_out_texts(
    prepared: Prepared, tokenizer: Any, *, count: int, other: bool = True
) -> tuple[list[Tokens], list[str]]:
    """Up to `count` windows of each text of a calibration, and what there is to say of those without any.

    With `other`, also of a text that took no part in the calibration.
    """
    length = prepared.calibration.length
    assert length is not None
    found, notes = [], []
    for text in {text.source: text for text in prepared.texts}.values():
        try:
            ids = _held_out(text, tokenizer, count=count, length=length)
        except TrisectError as error:
            notes.append(f"Nothing is measured on held-out {text.name}. {error}")
            continue
        if len(ids):
            found.append(_named(f"held-out {text.name}", ids, tokenizer if text.is_text else None))
        else:
            notes.append(f"{text.name} {TOO_SHORT}.")
    if other and tokenizer is not None:
        found += _other_text({text.source for text in prepared.texts}, tokenizer, count=count, length=length)
    return found, notes


def _held_out(text: Text, tokenizer: Any, *, count: int, length: int) -> Tensor:
    """Windows of a known text's own evaluation part, or of what calibration left of a file."""
    if not has_two_parts(text.source):
        return text.apart.held_out(count, length=length)
    return _evaluation_windows(text.source, tokenizer, count=count, length=length)


def _other_text(taken: set[str], tokenizer: Any, *, count: int, length: int) -> list[Tokens]:
    """The first text that took no part and can be read; none is no reason to stop."""
    for name in OTHER_TEXTS:
        if name in taken or not (name == BUILTIN or can_be_read(name)):
            continue
        try:
            ids = _evaluation_windows(name, tokenizer, count=count, length=length)
        except TrisectError:
            continue
        if len(ids):
            return [_named(name, ids, tokenizer)]
    return []


def _evaluation_windows(name: str, tokenizer: Any, *, count: int, length: int) -> Tensor:
    """The first windows of a known text's evaluation part, as many as there are up to `count`."""
    content = read_source(name, split="evaluation")
    assert isinstance(content, str)
    ids = tokenize(content, tokenizer, source=name)
    found = min(count, len(ids) // length)
    if found == 0:
        return ids[:0].reshape(0, length)
    return windows(ids, samples=found, length=length, sampling="first", seed=0, source=name)


def _named(name: str, ids: Tensor, tokenizer: Any) -> Tokens:
    text_bytes = None if tokenizer is None else decoded_bytes(ids, tokenizer)
    return tokens_from_tensor(ids, name, text_bytes=text_bytes)
