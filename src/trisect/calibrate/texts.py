"""The texts of a run: windows to calibrate on, and windows held out to measure on."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trisect.calibrate import Progress
from trisect.config import CompressConfig, Increase
from trisect.config.settings import CalibrationConfig
from trisect.data import Tokens, tokens_from_tensor
from trisect.data.catalogue import BUILTIN, DEFAULT_MIXTURE, OTHER_TEXTS, STOPGAP, SYNTHETIC, parse_mixture
from trisect.data.load import bos_of, count_windows, decoded_bytes, has_two_parts, read_source, share_out, tokenize
from trisect.data.read import can_be_read
from trisect.data.tokens import TEST_SHARE, WindowSplit, room, split_windows, started, windows
from trisect.errors import TrisectError
from trisect.evaluate.perplexity import stated_contexts
from trisect.models.looking import check_tokens
from trisect.support import distributed

USUAL_LENGTH = 2048
FEWEST, MOST = 16, 256
CPU_WORK = 9e12  # tokens times parameters that a CPU is given by default: SmolLM2-135M reads 32 windows of 2048
SYNTHETIC_ON_CPU = 16_384
"""Tokens of synthetic text that a CPU writes by default: writing is slower than reading."""
SPARE = 1.25
"""A model writes so much more than is calibrated on: some is held out, and its tokens read back are fewer."""
TOO_SHORT = "is too short to hold anything out, so nothing is measured on it; --eval FILE names another text"


def usual_length(model: Any) -> int:
    """2048 tokens, or the model's context where that is shorter."""
    return min([USUAL_LENGTH, *stated_contexts(model)])


def usual_windows(model: Any, *, length: int) -> int:
    """256 windows on a GPU; on a CPU as many as keep its work within bounds."""
    if next(model.parameters()).device.type == "cuda":
        return MOST
    return windows_on_cpu(sum(parameter.numel() for parameter in model.parameters()), length=length)


def windows_on_cpu(parameters: int, *, length: int) -> int:
    """Between 16 and 256, fewer the larger the model is."""
    return max(FEWEST, min(MOST, int(CPU_WORK / (parameters * length))))


def usual_synthetic(model: Any, *, windows: int, length: int) -> int:
    """Windows of synthetic text where that many are usual of other texts."""
    if next(model.parameters()).device.type == "cuda":
        return windows
    return min(windows, max(FEWEST, SYNTHETIC_ON_CPU // length))


@dataclass(frozen=True, kw_only=True)
class Text:
    """One source of the calibration windows."""

    source: str
    split: WindowSplit
    is_text: bool  # and not ready-made token ids

    @property
    def name(self) -> str:
        return self.source if has_two_parts(self.source) else Path(self.source).name


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
    model: Any, config: CompressConfig, tokens: Tokens | None, *, tokenizer: Any, progress: Progress | None = None
) -> tuple[CompressConfig, Tokens]:
    """The config with its calibration decided, and its tokens (or those given), checked against the model."""
    if tokens is None:
        prepared = prepare(model, config, tokenizer, progress=progress)
        config, tokens = replace(config, calibration=prepared.calibration), prepared.tokens
    check_tokens(model, tokens.ids)
    return config, tokens


def prepare(model: Any, config: CompressConfig, tokenizer: Any, *, progress: Progress | None = None) -> Prepared:
    """Decide what a config leaves open about calibration, and read its windows.

    Under a bound on perplexity the last quarter of the windows shares no token with the others.
    """
    asked = config.calibration
    length = asked.length or usual_length(model)
    wanted = asked.samples or usual_windows(model, length=length)
    known, notes = _default_contents() if asked.source is None else ({}, ())
    source = asked.source or distributed.broadcast("+".join(known)) or _stopgap(model)
    mixture = parse_mixture(source)
    names, counts = [part.source for part in mixture], share_out(mixture, samples=wanted, name=source)
    contents, streams = [], []
    for index, name in enumerate(names):
        content = known.get(name)
        if name == SYNTHETIC:
            if asked.samples is None:
                counts[index] = usual_synthetic(model, windows=counts[index], length=length)
            content = _synthetic(model, tokenizer, counts[index], length, asked.seed, progress)
        content = read_source(name, split="calibration") if content is None else content
        ids = tokenize(content, tokenizer, source=name) if isinstance(content, str) else content
        if asked.samples is None:
            counts[index] = min(counts[index], room(ids, length=length, whole=has_two_parts(name)))
        contents.append(content)
        streams.append(ids)
    tests = _test_counts(counts) if isinstance(config.goal, Increase) else [0] * len(counts)
    texts = []
    for index, name in enumerate(names):
        split = split_windows(
            streams[index],
            samples=counts[index],
            length=length,
            sampling=asked.sampling,
            seed=asked.seed + index,  # so that a source named twice gives other windows the second time
            source=name,
            whole=has_two_parts(name),
            test=tests[index],
            bos=bos_of(tokenizer),
        )
        texts.append(Text(source=name, split=split, is_text=isinstance(contents[index], str)))
    return Prepared(
        calibration=replace(asked, source=source, samples=sum(counts), length=length),
        tokens=tokens_from_tensor(_mixed([text.split for text in texts], seed=asked.seed), source),
        texts=tuple(texts),
        usual=wanted if asked.samples is None else 0,
        stopgap=asked.source is None and not known,
        notes=notes,
    )


def _default_contents() -> tuple[dict[str, str | Tensor], tuple[str, ...]]:
    """The texts of the default mixture that can be read, and what was wrong with the others."""
    found, notes = {}, []
    for name in filter(can_be_read, DEFAULT_MIXTURE):
        try:
            found[name] = read_source(name, split="calibration")
        except TrisectError as error:
            notes.append(f"{name} is left out. {error}")
    return found, tuple(notes)


def _stopgap(model: Any) -> str:
    """Synthetic text, unless the model is read layer by layer: writing runs all of it for every token."""
    return BUILTIN if hasattr(model, "layer_store") else STOPGAP


def _synthetic(model: Any, tokenizer: Any, windows: int, length: int, seed: int, progress: Progress | None) -> str:
    """Synthetic text for so many windows, the same in every process."""
    from trisect.calibrate.synthetic import SampleConfig, synthetic_text

    report = None if progress is None else partial(progress, "tokens written")
    config = SampleConfig(samples=int(windows * SPARE) + 1, length=length, seed=seed)
    text: str = distributed.broadcast(synthetic_text(model, tokenizer, config, progress=report))
    return text


def _test_counts(counts: list[int]) -> list[int]:
    """How many windows of each text are test windows: a quarter of all of them, at least one."""
    total = sum(counts)
    return count_windows([count / total for count in counts], samples=max(1, total // TEST_SHARE))


def _mixed(splits: list[WindowSplit], *, seed: int) -> Tensor:
    """The windows of all texts, shuffled where there are several, test windows last."""
    parts = [torch.cat([split.solve for split in splits]), torch.cat([split.test for split in splits])]
    if len(splits) > 1:
        shuffles = [torch.randperm(len(part), generator=torch.Generator().manual_seed(seed)) for part in parts]
        parts = [part[shuffle] for part, shuffle in zip(parts, shuffles, strict=True)]
    return torch.cat(parts)


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
            if has_two_parts(text.source):
                ids = _evaluation_windows(text.source, tokenizer, count=count, length=length)
            else:
                ids = text.split.held_out(count, length=length)
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


def _other_text(taken: set[str], tokenizer: Any, *, count: int, length: int) -> list[Tokens]:
    """Windows of the first text that took no part and can be read, if there is one."""
    for name in OTHER_TEXTS:
        if name in taken or not (name == BUILTIN or can_be_read(name)):
            continue
        try:
            return [_named(name, _evaluation_windows(name, tokenizer, count=count, length=length), tokenizer)]
        except TrisectError:
            continue
    return []


def _evaluation_windows(name: str, tokenizer: Any, *, count: int, length: int) -> Tensor:
    """The first windows of a known text's evaluation part, as many as there are up to `count`."""
    content = read_source(name, split="evaluation")
    assert isinstance(content, str)
    ids, bos = tokenize(content, tokenizer, source=name), bos_of(tokenizer)
    length -= bos is not None
    found = max(1, min(count, len(ids) // length))
    return started(windows(ids, samples=found, length=length, sampling="first", seed=0, source=name), bos)


def _named(name: str, ids: Tensor, tokenizer: Any) -> Tokens:
    text_bytes = None if tokenizer is None else decoded_bytes(ids, tokenizer)
    return tokens_from_tensor(ids, name, text_bytes=text_bytes)
