"""The texts of one run of `compress`, said before any work: what it calibrates and is measured on."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trisect.errors import TrisectError

if TYPE_CHECKING:
    from trisect.calibrate.texts import Prepared
    from trisect.commands._job import Job
    from trisect.config import CompressConfig
    from trisect.data import Tokens
    from trisect.models import Loaded


@dataclass(frozen=True, kw_only=True)
class RunTexts:
    """What a run reads."""

    config: "CompressConfig"
    """With nothing left open about calibration."""
    tokens: "Tokens | None"
    """To calibrate on; None where moments are stored."""
    evaluations: "list[Tokens]"


def read_texts(job: "Job", loaded: "Loaded") -> RunTexts:
    """Read the texts of a run and say which they are."""
    from trisect.calibrate.texts import prepare
    from trisect.commands._flow import say_text
    from trisect.commands._screen import progress
    from trisect.support.distributed import is_rank_zero

    if job.moments is not None:
        return _of_moments(job, loaded)
    with progress(quiet=job.quiet) as report:
        prepared = prepare(loaded.model, job.config, loaded.tokenizer, progress=report)
    if is_rank_zero():
        say_text(prepared)
    config = replace(job.config, calibration=prepared.calibration)
    evaluations = _evaluations(job, loaded, prepared)
    return RunTexts(config=config, tokens=prepared.tokens, evaluations=evaluations)


def _of_moments(job: "Job", loaded: "Loaded") -> RunTexts:
    """Nothing is calibrated now; the text of the moments is read for what is held out of it."""
    from trisect.calibrate import read_info
    from trisect.calibrate.texts import prepare, usual_length
    from trisect.commands._screen import stdout
    from trisect.pipeline.stored_moments import calibrated_as
    from trisect.support.distributed import is_rank_zero

    info = read_info(str(job.moments))
    config = calibrated_as(job.config, info)
    length = config.calibration.length or usual_length(loaded.model)
    config = replace(config, calibration=replace(config.calibration, length=length))
    if is_rank_zero():
        line = f"Calibrated on {info.source}: moments of {info.num_tokens:,} tokens."
        stdout().print(line, soft_wrap=True)
    prepared = None
    if job.evaluate is None:
        try:
            prepared = prepare(loaded.model, config, loaded.tokenizer)
        except TrisectError as error:
            raise TrisectError(
                f"What to measure on cannot be held out of the text of {job.moments}: {error} Or name a text "
                "with --eval, or --eval none."
            ) from error
    return RunTexts(config=config, tokens=None, evaluations=_evaluations(job, loaded, prepared))


def _evaluations(job: "Job", loaded: "Loaded", prepared: "Prepared | None") -> "list[Tokens]":
    """The text that was named, or what is held out of calibration."""
    from trisect.calibrate.texts import held_out_texts, usual_length
    from trisect.commands._screen import stdout
    from trisect.data import load_tokens
    from trisect.support.distributed import is_rank_zero

    if job.evaluate == "none":
        return []
    if job.evaluate is None:
        assert prepared is not None
        found, notes = held_out_texts(prepared, loaded.tokenizer, count=job.eval_windows)
        for note in notes if is_rank_zero() else ():
            stdout().print(note, soft_wrap=True)
        return found
    named = load_tokens(
        job.evaluate,
        loaded.tokenizer,
        samples=job.eval_windows,
        length=job.config.calibration.length or usual_length(loaded.model),
        sampling="first",
        seed=job.config.seed,
        split="evaluation",
    )
    return [named]
