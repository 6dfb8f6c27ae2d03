"""The Python interface: compress, save, load; or calibrate, plan, solve and rewrite one by one (docs/api.md).

Nothing is printed, and no setting of torch or transformers is left changed.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from trisect.calibrate import MomentsInfo, Progress, texts
from trisect.config import CalibrationConfig, CompressConfig, settings
from trisect.data import Tokens, evaluation_tokens, tokens_from_tensor
from trisect.errors import TrisectError
from trisect.evaluate import perplexity as measure
from trisect.evaluate.perplexity import Perplexity
from trisect.models import checkpoint, compressed, load_model, original_shape, original_widths, save_model, shape_of
from trisect.pipeline import resume, statistics
from trisect.pipeline import run as flow
from trisect.pipeline.job import Job, carry_out
from trisect.pipeline.run import Compressed, Run, Step, with_method_defaults
from trisect.plan import Plan, budget_of
from trisect.report.terminal import Summary
from trisect.support import clock, quiet_transformers

Calibration = str | Sequence[str] | CalibrationConfig | Tensor | Tokens
"""A name or a text file, or several; a record with more settings; or token ids (windows, length)."""


def compress(
    model: Any,
    ratio: float | None = None,
    *,
    max_ppl_increase: str | float | None = None,
    method: str | None = None,
    calibration: Calibration | None = None,
    tokenizer: Any = None,
    config: CompressConfig | None = None,
    device: str = "cpu",
    out: str | Path | None = None,
    evaluate: str | None = "none",
    fresh: bool = False,
    progress: Progress | None = None,
) -> Any:
    """Compress a model: a transformers object, or the name of anything that `load` takes.

    With a `ratio` to remove, an object is compressed in place. With `max_ppl_increase` ("5%"), the smallest copy
    inside this bound is returned, and the model stays as it is. `config` replaces goal and `method` where more
    settings are needed. With `out` the result is saved there, and an interrupted run continues after its finished
    layers (`fresh` starts anew). `evaluate` names a text for perplexity before and after; None takes what is held
    out of calibration. `progress` is called with (stage, done, total). Returns the model, with its `tokenizer` and
    its `receipt`.
    """
    goal = {"ratio": ratio, "max_ppl_increase": max_ppl_increase, "method": method}
    config = _config_for({name: value for name, value in goal.items() if value is not None}, config)
    tokens = None
    if isinstance(calibration, Tensor | Tokens):
        tokens = _ready(calibration)
    elif isinstance(calibration, CalibrationConfig):
        config = replace(config, calibration=calibration)
    elif calibration is not None:
        config = replace(config, calibration=replace(config.calibration, source=settings.as_mixture(calibration)))
    job = Job(
        model=str(model) if isinstance(model, Path) else model,
        config=config,
        tokenizer=_tokenizer(model, tokenizer),
        tokens=tokens,
        out=None if out is None else Path(out),
        evaluate=evaluate,
        load_options={"device": device},
        fresh=fresh,
        progress=progress,
    )
    with quiet_transformers():
        result = carry_out(job)
    result.model.tokenizer = result.tokenizer
    return result.model


def save(model: Any, out: str | Path, *, tokenizer: Any = None) -> Path:
    """Write a compressed model as a Hugging Face folder with its plan and receipt; returns the folder."""
    if not isinstance(model, compressed.CompressedModel):
        raise TrisectError("Only compressed models are saved by trisect; use model.save_pretrained for others.")
    with quiet_transformers():
        return save_model(model, _tokenizer(model, tokenizer), out, receipt=model.receipt or {})


def load(name: str | Path, *, dtype: str | None = None, device: str = "cpu", trust_remote_code: bool = False) -> Any:
    """A transformers model from a folder that `save` wrote, any other folder, a hub id or a GGUF file.

    It is in evaluation mode; its `tokenizer` is None where the checkpoint has none.
    """
    with quiet_transformers():
        loaded = load_model(str(name), dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    loaded.model.tokenizer = loaded.tokenizer
    return loaded.model


def calibrate(
    model: Any,
    config: CompressConfig,
    out: str | Path,
    *,
    tokens: Tensor | Tokens | None = None,
    tokenizer: Any = None,
    progress: Progress | None = None,
) -> MomentsInfo:
    """Collect the statistics that `config.method` reads and write them to the safetensors file `out`.

    Text comes from `config.calibration`, unless `tokens` (windows, length) are there. For methods that read the
    dense model alone: a3 does, a3+ does not. Returns the file's header.
    """
    text: Any = {"tokens": _ready(tokens), "tokenizer": _tokenizer(model, tokenizer)}
    return statistics.calibrate(model, config, out, **text, progress=progress)


def plan(
    model: Any,
    config: CompressConfig,
    *,
    tokens: Tensor | Tokens | None = None,
    tokenizer: Any = None,
    curves: str | Path | None = None,
    progress: Progress | None = None,
) -> Plan:
    """The widths of every layer for a config; the model stays as it is.

    Uniform plans follow from sizes alone. Those that look at text ("balanced", "search") read it as
    `calibrate` does; loss curves come from the file `curves`, or are measured and written there.
    """
    config, found = with_method_defaults(config), None
    if config.allocate != "uniform":
        how: Any = {"tokenizer": _tokenizer(model, tokenizer), "progress": progress}
        config, found = texts.with_tokens(model, config, _ready(tokens), **how)
    return flow.make_plan(Run(model=model, config=config, tokens=found, progress=progress), curves=curves)


def solve(
    model: Any,
    config: CompressConfig,
    plan: Plan,
    *,
    moments: str | Path | None = None,
    tokens: Tensor | Tokens | None = None,
    tokenizer: Any = None,
    progress: Progress | None = None,
) -> Iterator[Step]:
    """The solutions for a plan one after the other, from the file `moments` or from text as for `calibrate`.

    A step has a `layer`, `component`, `width` and `solution` (with its `loss` and `total`). The model changes only
    when `rewrite` applies a step. Methods such as a3+ solve each part behind those before it: their steps have to
    be applied as they come.
    """
    text: Any = {"tokenizer": _tokenizer(model, tokenizer), "tokens": _ready(tokens), "moments": moments}
    run = flow.open_run(model, config, plan=plan, progress=progress, **text)
    run.ledger = resume.Ledger(model)
    return flow.solve_layers(run)


def rewrite(model: Any, config: CompressConfig, plan: Plan, steps: Iterable[Step]) -> Compressed:
    """The compressed model, which `save` takes: solutions are applied in place.

    The record has the `model`, the `plan` with the widths it really has, the `losses` and the `receipt`.
    """
    config = with_method_defaults(config)
    original, losses, hashes = original_widths(model), [], set()
    with clock.timing(next(model.parameters()).device) as timer:
        for step in steps:
            # A step carries its layer with it: written elsewhere, or twice, it would go unnoticed.
            if all(step.view.layer is not module for module in model.modules()):
                raise TrisectError("These steps were solved for another model object; solve for the one you rewrite.")
            if step.applied:
                raise TrisectError("rewrite applies steps itself; give it those of solve() untouched.")
            step.apply()
            losses.append(step.entry())
            config = replace(config, calibration=step.run.config.calibration)
            hashes.add(step.run.token_hash)
        plan = flow.finish(Run(model=model, config=config, tokens=None, plan=plan), original)
    token_hash = hashes.pop() if len(hashes) == 1 else None
    return flow.with_receipt(model, config, plan, losses, token_hash, timer.seconds())


def perplexity(
    model: Any,
    data: str | Tensor | Tokens,
    *,
    length: int = 2048,
    windows: int | None = None,
    tokenizer: Any = None,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Perplexity on consecutive windows of a source, a text file or token ids (windows, length).

    `windows` None takes all of them; `progress` is called with (windows done, windows in all).
    """
    tokens = evaluation_tokens(data, _tokenizer(model, tokenizer), windows=windows, length=length)
    return measure.perplexity(model, tokens, progress=progress)


def summary(model: Any) -> Summary:
    """Sizes before any compression and now; prints as a table."""
    method = (getattr(model.config, "trisect", None) or {}).get("method")
    return Summary(before=budget_of(original_shape(model)), after=budget_of(shape_of(model)), method=method)


def _config_for(given: dict[str, Any], config: CompressConfig | None) -> CompressConfig:
    """The config, or one of the goal and the method; both at once are refused."""
    if config is not None and given:
        both, values = " and ".join(given), ", ".join(f"{key}={value!r}" for key, value in given.items())
        raise TrisectError(f"{both} and config were given; put all into it, dataclasses.replace(config, {values}).")
    if config is None and not given.keys() & {"ratio", "max_ppl_increase"}:
        rise = "how much perplexity may rise, compress(model, max_ppl_increase='5%')"
        raise TrisectError(f"Say how much to remove, compress(model, ratio=0.25), or {rise}.")
    return CompressConfig(**given) if config is None else config


def _tokenizer(model: Any, given: Any) -> Any:
    """The tokenizer given, or the one that came with the model."""
    found = given if given is not None else getattr(model, "tokenizer", None)
    return found if isinstance(model, str | Path) else checkpoint.starting_texts(found, model)


def _ready(tokens: Tensor | Tokens | None) -> Tokens | None:
    return tokens_from_tensor(tokens) if isinstance(tokens, Tensor) else tokens


__all__ = ["Calibration", "Compressed", "MomentsInfo", "Perplexity", "Plan", "Progress", "Step", "Summary"]
__all__ += ["calibrate", "compress", "load", "perplexity", "plan", "rewrite", "save", "solve", "summary"]
