"""A whole job: load, read texts, measure, compress, measure again, save; resumed where it was interrupted.

`trisect.compress` and `trisect compress` both fill in a `Job` and call `carry_out`. Nothing is printed here:
`say` is called with lines for the user, `progress` with (stage, done, total).
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trisect.calibrate import Progress, read_info, replay, texts
from trisect.config import CompressConfig, Increase
from trisect.data import Tokens, evaluation_tokens, tokens_from_tensor
from trisect.errors import TrisectError, check_names
from trisect.evaluate.perplexity import Perplexity, perplexity
from trisect.methods import get_method
from trisect.models import FAMILIES, Loaded, checkpoint, looking, shape_of, source, streamed
from trisect.pipeline import loss_curves, run
from trisect.plan import CURVED, UNITS, Curves, Plan, apply_plan, budget_of, compare, outlook, read_curves
from trisect.records.shapes import ModelShape
from trisect.support import distributed, files

NO_TEXT = "none"  # as the text to evaluate on: measure nothing
FITTED = "windows calibrated on"
Pair = tuple[Perplexity, Perplexity]  # before and after


def _silent(line: str) -> None:
    """Say nothing."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What was asked for."""

    model: Any  # a name, folder or file; or a model that is loaded already, and then compressed in place
    config: CompressConfig
    source: str | None = None  # the name of a model that is loaded already
    tokenizer: Any = None
    tokens: Tokens | None = None  # to calibrate on, in place of the text that `config` names
    out: Path | None = None  # the folder to save to; finished layers are kept beside it until it is there
    moments: Path | None = None
    curves: Path | None = None
    evaluate: str | None = NO_TEXT
    """Text for perplexity before and after; None: what is held out of calibration, and another text."""
    eval_windows: int = 8
    other_text: bool = True  # whether that other text is wanted
    load_options: dict[str, Any] = field(default_factory=dict)
    fresh: bool = False  # forget what an interrupted run has finished
    say: Callable[[str], None] = _silent
    progress: Progress | None = None


@dataclass(frozen=True, kw_only=True)
class Result(run.Compressed):
    """A compressed model, the numbers on both sides of the cut, and the receipt with all of it."""

    tokenizer: Any
    before: ModelShape
    after: ModelShape
    perplexities: list[Pair]  # on one text after the other
    fitted: Pair | None  # on windows that were calibrated on


def carry_out(job: Job) -> Result:
    """Carry out a job; everything that can be refused is refused first."""
    refuse_early(job)
    with distributed.process_group(job.load_options.get("device", "cpu")) as device:
        job = replace(job, load_options={**job.load_options, "device": device})
        if not distributed.is_rank_zero():
            job = replace(job, say=_silent, progress=None)
        if job.out is not None and not (job.config.portable or job.config.removes_nothing):
            job.say("The result runs where trisect is installed; --portable: in stock engines too, less accurate.")
        keep = nullcontext(None) if job.out is None else distributed.unfinished(job.out, fresh=job.fresh)
        with keep as work:
            result = _compress_in_memory(job, work)
            if job.out is not None and distributed.is_rank_zero():
                shards = hasattr(result.model, "layer_store")  # finished layers of a streamed model are
                layers = sorted(work.glob("layer-*")) if work is not None and shards else None
                checkpoint.save_model(result.model, result.tokenizer, job.out, receipt=result.receipt, layers=layers)
            distributed.barrier()
    return result


def refuse_early(job: Job) -> None:
    """Refuse what cannot work before any weight is read: the plan, the length, and room for the result."""
    if job.out is not None:
        files.check_new_folder(job.out)
    config = run.with_method_defaults(job.config)
    if job.moments is not None and (isinstance(config.goal, Increase) or config.drop_layers):
        reading = "--drop-layers" if config.drop_layers else "--max-ppl-increase"
        raise TrisectError(f"{reading} reads calibration windows, which moments do not hold; leave --moments out.")
    check_names("way to stream", [job.load_options.get("stream", "off")], streamed.STREAM)
    if not isinstance(job.model, str):
        return
    trusted = job.load_options.get("trust_remote_code", False)
    shape, _, info = checkpoint.read_shape(job.model, trust_remote_code=trusted, drop_layers=config.drop_layers)
    if config.portable and info["family"] in FAMILIES:
        from trisect.export.stock import check_family

        check_family(FAMILIES[info["family"]], config.parts)
    source.check_weights(source.resolve(checkpoint.fetched(job.model)))
    length, context = config.calibration.length, info["context"]
    if context is not None and length is not None and length > context:
        most = f"The model reads {context} tokens at once"
        raise TrisectError(f"{most}, and --length {length} asks for more; use {context}.")
    if config.allocate == "uniform" and not isinstance(config.goal, Increase):
        shape = apply_plan(shape, run.plan_from_shape(shape, config))
        if job.out is not None:  # finished layers lie beside the result until it is whole
            files.check_disk_space(job.out, 2 * budget_of(shape).parameters * shape.bytes_per_element)


def _compress_in_memory(job: Job, work: Path | None) -> Result:
    """Load, compress and measure; where the device runs out of memory, again with smaller batches."""
    evaluations = None
    while True:
        loaded = _loaded(job)
        run.check_model(loaded.model, job.config)
        if evaluations is None:
            job, evaluations = read_texts(job, loaded)
        try:
            return _compress_and_measure(job, loaded, evaluations, work)
        except torch.OutOfMemoryError as error:
            if not isinstance(job.model, str):
                raise
            job = _with_smaller_batches(job, error)
            del loaded
            torch.cuda.empty_cache()


def _loaded(job: Job) -> Loaded:
    if not isinstance(job.model, str):
        return Loaded(model=job.model, tokenizer=job.tokenizer, name=job.source or "")
    options = job.load_options
    loaded = checkpoint.load_model(job.model, **{**options, "dtype": options.get("dtype") or checkpoint.WORKING})
    return loaded if job.tokenizer is None else replace(loaded, tokenizer=job.tokenizer)


def _compress_and_measure(job: Job, loaded: Loaded, evaluations: list[Tokens], work: Path | None) -> Result:
    """Compress, with perplexity before and after on each of the evaluation texts."""
    # Beside what is held out, as many of the windows that are fitted: the difference is what more text could gain.
    fitted = job.evaluate is None and job.tokens is not None and bool(evaluations)
    if fitted and job.tokens is not None:
        evaluations = [*evaluations, tokens_from_tensor(job.tokens.ids[: job.eval_windows], FITTED)]

    def measure(model: Any, when: str) -> list[Perplexity]:
        stages = [f"perplexity {when}, {text.source}" for text in evaluations]
        reports = [job.progress and partial(job.progress, stage) for stage in stages]
        return [perplexity(model, text, progress=report) for text, report in zip(evaluations, reports, strict=True)]

    before, fewer = shape_of(loaded.model), job.config.drop_layers
    planned = _say_outlook(job, looking.shape_without(loaded.model, fewer) if fewer else before)
    was = measure(loaded.model, "before")
    if fewer:
        _drop_layers(job, loaded.model)
    given: dict[str, Any] = {"tokens": job.tokens, "curves": job.curves, "progress": job.progress}
    if not isinstance(job.config.goal, Increase):
        found = run.compress(loaded.model, job.config, moments=job.moments, work=work, planned=planned, **given)
    else:
        found = run.compress_within(loaded.model, job.config, **given)
    pairs = list(zip(was, measure(found.model, "after"), strict=True))
    return _result(job, loaded, found, before, pairs, fitted=fitted)


def _drop_layers(job: Job, model: Any) -> None:
    """Take the layers out that change the hidden states of the calibration windows least, and say which."""
    assert job.tokens is not None
    looking.check_tokens(model, job.tokens.ids)
    how = job.config.calibration.how_to_run
    # Every process has all windows and comes to the same; rank 0 decides where rounding does.
    changes = replay.layer_influence(model, job.tokens.ids, progress=job.progress, **how)
    changes = distributed.broadcast(changes)
    dropped = replay.least_influential(changes, job.config.drop_layers)
    looking.drop_layers(model, dropped)
    found = ", ".join(f"{layer} ({changes[layer]:.4f})" for layer in dropped)
    others = [value for layer, value in enumerate(changes[:-1]) if layer not in (0, *dropped)]
    rest = f"; of those left between the ends {min(others):.4f} or more" if others else ""
    job.say(f"Dropped of {len(changes)} layers, with their influence: {found}{rest}.")


def _result(
    job: Job, loaded: Loaded, found: run.Compressed, before: ModelShape, pairs: list[Pair], *, fitted: bool
) -> Result:
    """The one receipt: in `model.receipt`, in receipt.json and in the file of --json."""
    after = shape_of(found.model)
    rows = [{"before": asdict(was), "after": asdict(now)} for was, now in pairs]
    held_out = len(pairs) - fitted
    known: dict[str, Any] = {
        "source": loaded.name or None,
        "model": loaded.name or None,
        "source_bytes": loaded.num_bytes,
        "out": None if job.out is None else str(job.out),
        **sizes(before, after),
        "perplexity": rows[0] if held_out else None,
        "perplexities": rows[:held_out] or None,
        "fitted": rows[-1] if fitted else None,
    }
    receipt = {**found.receipt, **{name: value for name, value in known.items() if value is not None}}
    found.model.receipt = receipt
    facts = {**vars(found), "receipt": receipt, "before": before, "after": after, "perplexities": pairs[:held_out]}
    return Result(tokenizer=loaded.tokenizer, fitted=pairs[-1] if fitted else None, **facts)


def sizes(before: ModelShape, after: ModelShape) -> dict[str, Any]:
    """What both sides of a cut count, and the shares that are gone: the part that receipt and plan share."""
    old, new = budget_of(before), budget_of(after)
    return {**asdict(compare(old, new)), "before": asdict(old), "after": asdict(new)}


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan before the work: the shapes on both sides, and what it comes to."""

    plan: Plan
    before: ModelShape
    after: ModelShape
    outlook: str
    facts: dict[str, Any]  # ready for JSON
    lines: list[str]  # what it counts and is predicted to cost


def plan_before_work(job: Job) -> Planned:
    """Plan from the model's configuration alone, and from loss curves where the allocation needs them."""
    config = run.with_method_defaults(job.config)
    job = replace(job, config=config)
    trusted = job.load_options["trust_remote_code"]
    shape, before, _ = checkpoint.read_shape(job.model, trust_remote_code=trusted, drop_layers=config.drop_layers)
    if not config.drop_layers:
        before = shape
    known = _known_curves(job)
    plan = run.plan_from_shape(shape, config, known)
    after, outcome, said = apply_plan(shape, plan), outlook(shape, config, plan), _outlook_line(shape, config, plan)
    rise = None if known is None else known.rise(shape, plan)
    facts = {**sizes(before, after), "plan": plan.to_dict(), "allocate": config.allocate}
    facts |= {"budget": outcome.counts(), "predicted_rise": rise}
    allowed = "" if outcome.allowed is None else f", {outcome.allowed:,} asked for"
    lines = [f"{UNITS[outcome.unit]}: {outcome.planned:,} planned{allowed}, {outcome.before:,} before"]
    if rise is not None:
        factor = f"perplexity x{math.exp(rise):.3f} (+{rise:.4f} nats per token)"
        below = "nothing, the plan goes below them"
        lines.append(f"predicted from the curves: {factor if math.isfinite(rise) else below}")
    return Planned(plan=plan, before=before, after=after, outlook=said, facts=facts, lines=lines)


def _outlook_line(shape: ModelShape, config: CompressConfig, plan: Plan) -> str:
    """What is planned for a model of this shape, from which layers may have gone."""
    said, fewer = str(outlook(shape, config, plan)), config.drop_layers
    if not fewer:
        return said
    first = f"{fewer} of {len(shape.layers) + fewer} layers dropped"
    return first if config.removes_nothing else f"{first}; of what is left {said}"


def _known_curves(job: Job) -> Curves | None:
    """From their file; one that does not exist yet is measured and written, as `compress` does."""
    path = job.curves
    if path is None or get_method(job.config.method).linear:  # ranks of linear maps have no use for curves
        return None
    if path.exists():
        return read_curves(path)
    if job.config.allocate not in CURVED:
        raise TrisectError(f"There are no loss curves at {path}; --allocate search or balanced measures them.")
    if job.config.drop_layers:
        raise TrisectError("Curves are measured behind the layers dropped: compress --curves FILE writes them.")
    files.check_writable(path)
    loaded = _loaded(job)
    tokens = _prepared(job, loaded).tokens
    return loss_curves.curves_for(loaded.model, job.config, tokens, path=path, progress=job.progress)


def _prepared(job: Job, loaded: Loaded) -> texts.Prepared:
    """Calibration tokens; says what they are."""
    prepared = texts.prepare(loaded.model, job.config, loaded.tokenizer, progress=job.progress)
    for line in (prepared.line(), *prepared.notes):
        job.say(line)
    return prepared


def _say_outlook(job: Job, shape: ModelShape) -> Callable[[Plan], None] | None:
    """Say what is planned at once where the plan follows from sizes; else give what says it later."""
    # Neither under a bound on perplexity: what stays within it is found by trying.
    config = run.with_method_defaults(job.config)
    if isinstance(config.goal, Increase) or config.removes_nothing:
        return None
    if config.allocate != "uniform":
        return lambda plan: job.say(_outlook_line(shape, config, plan))
    job.say(_outlook_line(shape, config, run.plan_from_shape(shape, config)))
    return None


def read_texts(job: Job, loaded: Loaded) -> tuple[Job, list[Tokens]]:
    """The job with nothing left open about its calibration, and the texts to evaluate on; says which they are."""
    prepared = None
    if job.tokens is None and job.moments is None:
        prepared = _prepared(job, loaded)
        config = replace(job.config, calibration=prepared.calibration)
        job = replace(job, config=config, tokens=prepared.tokens)
    elif job.tokens is None:
        # Nothing is calibrated now; the text of the moments is read for what is held out of it.
        info = read_info(str(job.moments))
        length = job.config.calibration.length or texts.usual_length(loaded.model)
        calibration = replace(job.config.calibration, source=info.source, length=length)
        job = replace(job, config=replace(job.config, calibration=calibration))
        job.say(f"Calibrated on {info.source}: moments of {info.num_tokens:,} tokens.")
        try:
            prepared = texts.prepare(loaded.model, job.config, loaded.tokenizer) if job.evaluate is None else None
        except TrisectError as error:
            nothing = f"Nothing can be held out of the text of {job.moments} to measure on"
            raise TrisectError(f"{nothing}: {error} Or name a text with --eval, or --eval none.") from error
    return job, [] if job.evaluate == NO_TEXT else _evaluations(job, loaded, prepared)


def _evaluations(job: Job, loaded: Loaded, prepared: texts.Prepared | None) -> list[Tokens]:
    """The text that was named, or what is held out of calibration."""
    if job.evaluate is None:
        if prepared is None:
            raise TrisectError("Calibration tokens have nothing held out; name a text to evaluate on.")
        found, notes = texts.held_out_texts(prepared, loaded.tokenizer, count=job.eval_windows, other=job.other_text)
        for note in notes:
            job.say(note)
        return found
    length = job.config.calibration.length or texts.usual_length(loaded.model)
    return [evaluation_tokens(job.evaluate, loaded.tokenizer, windows=job.eval_windows, length=length)]


def _with_smaller_batches(job: Job, error: Exception) -> Job:
    calibration = job.config.calibration
    assert calibration.length is not None
    size = calibration.batch_size or max(1, replay.TOKENS_PER_BATCH // calibration.length)
    if distributed.world_size() > 1:
        # The other processes are in the middle of the same step: starting over is for all of them.
        again = f"start all again with --batch-size {max(1, size // 2)}: finished layers are kept"
        raise TrisectError(f"Process {distributed.rank()} ran out of memory; {again}.") from error
    if size == 1:
        instead = "use --stream on, a shorter --length, or --states host"
        raise TrisectError(f"The device has too little memory even for one window at a time; {instead}.") from error
    job.say(f"out of memory: again with batches of {size // 2} windows")
    return replace(job, config=replace(job.config, calibration=replace(calibration, batch_size=size // 2)))
