"""One run of `trisect compress`: load, measure, compress, measure, save; alone or under torchrun."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trisect.errors import TrisectError

if TYPE_CHECKING:
    from trisect.commands._flow import Outcome
    from trisect.config import CompressConfig
    from trisect.models import Loaded


@dataclass(frozen=True, kw_only=True)
class Job:
    """What was asked for."""

    model: str
    config: "CompressConfig"
    out: Path
    moments: Path | None
    curves: Path | None
    evaluate: str | None
    """None: what is held out of calibration."""
    eval_windows: int
    load_options: dict[str, Any]
    fresh: bool
    quiet: bool


def carry_out(job: Job, *, json: Path | None) -> None:
    """Everything that can be refused is refused first."""
    from trisect.commands._screen import keep_measurement, quoted, say_next, say_saved
    from trisect.methods import get_method
    from trisect.methods.method import check_parts
    from trisect.models import save_model
    from trisect.pipeline.run import checked
    from trisect.support import distributed
    from trisect.support.distributed import unfinished
    from trisect.support.files import check_new_folder

    check_new_folder(job.out)
    method = get_method(job.config.method)
    checked(job.config, method)
    check_parts(method, job.config.parts)
    if job.config.max_ppl_increase is not None and job.moments is not None:
        raise TrisectError(
            "--max-ppl-increase is measured on calibration windows, which moments do not hold; "
            "leave --moments out."
        )
    with (
        distributed.process_group(job.load_options["device"]) as device,
        unfinished(job.out, fresh=job.fresh) as work,
    ):
        job = replace(job, load_options={**job.load_options, "device": device})
        job = job if distributed.is_rank_zero() else replace(job, quiet=True)
        with _explained_interrupt(work):
            loaded, outcome = _outcome(job, work)
        model = outcome.compressed.model
        if distributed.is_rank_zero():
            layers = sorted(work.glob("layer-*")) if hasattr(model, "layer_store") else None
            save_model(model, loaded.tokenizer, job.out, receipt=_receipt(job, outcome), layers=layers)
            outcome.show()
            say_saved(job.out)
            keep_measurement(json, {"model": job.model, "out": str(job.out), **outcome.to_dict()})
            name = quoted(job.out)
            lines = [f"trisect eval {name}", f"trisect report {name}"]
            # Without --portable most models do not fit a stock architecture, and export would refuse them.
            lines += [f"trisect export {name} -o OUT"] if job.config.portable else []
            say_next(*lines, quiet=job.quiet)
        distributed.barrier()


def _outcome(job: Job, work: Path) -> "tuple[Loaded, Outcome]":
    """The compressed model; where the device runs out of memory, again with smaller batches."""
    import torch

    from trisect.commands._flow import compress_and_measure, load
    from trisect.commands._screen import progress
    from trisect.commands._texts import read_texts
    from trisect.pipeline.run import check_model

    texts = None
    while True:
        loaded = load(job.model, **job.load_options)
        check_model(loaded.model, job.config)
        if texts is None:
            texts = read_texts(job, loaded)
            job = replace(job, config=texts.config)
        try:
            with progress(quiet=job.quiet) as report:
                return loaded, compress_and_measure(
                    loaded,
                    job.config,
                    evaluations=texts.evaluations,
                    tokens=texts.tokens,
                    moments=job.moments,
                    curves=job.curves,
                    work=work,
                    report=report,
                )
        except torch.OutOfMemoryError as error:
            config = _smaller_batches(job.config, error)
            del loaded
            torch.cuda.empty_cache()
            job = replace(job, config=config)


def _receipt(job: Job, outcome: "Outcome") -> dict[str, Any]:
    """The run's receipt, with what the model card tells besides: where the model came from, what it lost."""
    return {**outcome.compressed.receipt, "source": job.model, **outcome.measured()}


def _smaller_batches(config: "CompressConfig", error: Exception) -> "CompressConfig":
    from trisect.calibrate.replay import TOKENS_PER_BATCH
    from trisect.support import distributed

    calibration = config.calibration
    assert calibration.length is not None
    size = calibration.batch_size or max(1, TOKENS_PER_BATCH // calibration.length)
    if distributed.world_size() > 1:
        # The other processes are in the middle of the same step: starting over is for all of them.
        raise TrisectError(
            f"Process {distributed.rank()} ran out of memory with batches of {size} windows; start all again "
            f"with --batch-size {max(1, size // 2)}: finished layers are kept."
        ) from error
    if size == 1:
        raise TrisectError(
            "The device has too little memory even for one window at a time; use --stream on, a shorter "
            "--length, or --states host."
        ) from error
    print(f"out of memory: again with batches of {size // 2} windows", file=sys.stderr)
    return replace(config, calibration=replace(calibration, batch_size=size // 2))


@contextmanager
def _explained_interrupt(work: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as error:
        done = len(list(work.glob("layer-*")))
        kept = f"{done} finished layers are kept: the same command goes on after them."
        raise KeyboardInterrupt(kept if done else "") from error
