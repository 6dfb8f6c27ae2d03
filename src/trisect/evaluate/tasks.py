"""Tasks through lm-eval-harness, on a model in memory.

lm-eval makes the prompts, runs the model and scores; trisect chooses the documents and writes down what
was asked. Scores equal those of lm-eval itself on the same documents, to the last digit.
"""

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

from transformers import PreTrainedModel

from trisect.errors import TrisectError, unknown_name
from trisect.evaluate import harness
from trisect.evaluate.forward import check_batch_size
from trisect.evaluate.perplexity import fitting_batch_size
from trisect.evaluate.task_splits import LocalTask, local_task
from trisect.evaluate.task_table import PRESETS, TASKS, Request, parse_tasks

__all__ = [
    "PRESETS",
    "TASKS",
    "Request",
    "TaskResults",
    "TaskScore",
    "check_request",
    "evaluate_tasks",
    "parse_tasks",
]

log = logging.getLogger(__name__)

FEWSHOT_SEED = 1234
"""lm-eval's own default."""
TASK_SOURCES = ("local", "hub")
USUAL_PROMPT = 1024
"""Tokens of a long prompt, for choosing a batch size."""


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """One task's score, with what is needed to repeat it."""

    task: str
    shots: int
    metric: str
    """lm-eval's key: metric,filter."""
    value: float
    stderr: float | None
    questions: int
    """Asked; `limit` and examples taken from the same file make them fewer than `available`."""
    available: int | None
    other: dict[str, float]
    """lm-eval's further metrics of the task."""
    source: str
    sha256: str | None
    """Of all available documents."""
    examples: str
    truncated: bool
    """Some prompts exceeded the model's context and lost their beginning."""


@dataclass(frozen=True, kw_only=True)
class TaskResults:
    """Scores of several tasks, and their plain average."""

    scores: tuple[TaskScore, ...]
    limit: int | None
    seed: int
    task_source: str
    lm_eval: str

    @property
    def average(self) -> float:
        return sum(score.value for score in self.scores) / len(self.scores)

    @property
    def average_stderr(self) -> float | None:
        """Of the average, from the tasks' own errors, which are independent."""
        errors = [score.stderr for score in self.scores if score.stderr is not None]
        if len(errors) < len(self.scores):
            return None
        return math.sqrt(sum(error**2 for error in errors)) / len(errors)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: scores by the task's name."""
        settings = {name: getattr(self, name) for name in ("limit", "seed", "task_source", "lm_eval")}
        scores = {score.task: asdict(score) for score in self.scores}
        return {
            **settings,
            "average": self.average,
            "average_stderr": self.average_stderr,
            "scores": scores,
        }


def evaluate_tasks(
    model: PreTrainedModel,
    tokenizer: Any,
    tasks: str | Sequence[Request],
    *,
    limit: int | None = None,
    batch_size: int | None = None,
    seed: int = FEWSHOT_SEED,
    task_source: str = "local",
    answers: harness.Answers | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> TaskResults:
    """Score `model` on tasks: a text for `parse_tasks`, such as "paper", or what it returned.

    `limit` asks the first questions only; MMLU shares it out over its 57 subjects, at least one each.
    The batch size (None: chosen to fit memory) changes speed only, up to rounding. Where `answers` is given,
    it is asked in the model's stead, once per task: the model may have run elsewhere. `progress` is told
    (task, answers done, answers in all).
    """
    requests = parse_tasks(tasks) if isinstance(tasks, str) else list(tasks)
    check_request(limit=limit, task_source=task_source, batch_size=batch_size)
    if tokenizer is None:
        raise TrisectError("Tasks are text, and the model has no tokenizer: put its files into the folder.")
    if answers is not None:
        _check_chooses(requests)
    local = {}
    if task_source == "local":
        local = {request: local_task(request, limit=limit) for request in requests}
    size = fitting_batch_size(model, length=USUAL_PROMPT) if batch_size is None else batch_size
    scores = []
    with harness.undisturbed(model, seed=seed), harness.quiet() as cuts:
        lm = harness.language_model(model, tokenizer, batch_size=size, answers=answers)
        _check_context(requests, context=lm.max_length)
        for request in requests:
            cuts.seen = False
            report = None if progress is None else partial(progress, request.task.name)
            results = _run(lm, request, local.get(request), limit=limit, seed=seed, report=report)
            _say_cut(request, context=lm.max_length, cut=cuts.seen)
            scores.append(_score(request, results, local.get(request), truncated=cuts.seen))
    return TaskResults(
        scores=tuple(scores), limit=limit, seed=seed, task_source=task_source, lm_eval=version("lm_eval")
    )


def check_request(*, limit: int | None, task_source: str, batch_size: int | None = None) -> None:
    """Refuse what cannot work: also of use before a model is loaded."""
    if task_source not in TASK_SOURCES:
        raise unknown_name("task source", task_source, TASK_SOURCES)
    if limit is not None and limit < 1:
        raise TrisectError(f"{limit} questions were asked for; give --limit 1 or more.")
    check_batch_size(batch_size)
    harness.check_installed()


def _run(
    lm: Any,
    request: Request,
    local: LocalTask | None,
    *,
    limit: int | None,
    seed: int,
    report: Callable[[int, int], None] | None,
) -> dict[str, Any]:
    """lm-eval's results of one task."""
    from lm_eval import evaluate

    task = request.task
    with nullcontext() if local is None else harness.local_documents(local.splits):
        loaded = harness.load_task(task.harness, folder=task.folder, shots=request.shots, seed=seed)
        lm.set_cache_hook(harness.Answered(loaded, report=report))
        each = None if limit is None else math.ceil(limit / len(loaded["tasks"]))
        results: dict[str, Any] = evaluate(lm=lm, task_dict=loaded, limit=each, log_samples=False)
    return results


def _score(
    request: Request, results: dict[str, Any], local: LocalTask | None, *, truncated: bool
) -> TaskScore:
    task = request.task
    values = results["results"][task.harness]
    name, _, chosen = task.metric.partition(",")
    others = [key for key in values if "," in key and "_stderr," not in key and key != task.metric]
    counts = results["n-samples"].values()
    return TaskScore(
        task=task.name,
        shots=request.shots,
        metric=task.metric,
        value=float(values[task.metric]),
        stderr=_finite(values[f"{name}_stderr,{chosen}"]),
        questions=sum(count["effective"] for count in counts),
        available=sum(count["original"] for count in counts) if local is None else local.available,
        other={key: float(values[key]) for key in others},
        source="hub" if local is None else local.source,
        sha256=None if local is None else local.sha256,
        examples="hub" if local is None else local.examples_source,
        truncated=truncated,
    )


def _finite(value: Any) -> float | None:
    """lm-eval's error of a score; it writes "N/A" where a single question allows none."""
    return float(value) if isinstance(value, float) and math.isfinite(value) else None


def _check_chooses(requests: Sequence[Request]) -> None:
    for request in requests:
        if request.task.generates:
            raise TrisectError(
                f"{request.task.name} lets the model write, and nobody else can answer for it: "
                f"leave {request.task.name} out."
            )


def _check_context(requests: Sequence[Request], *, context: int) -> None:
    for request in requests:
        if request.task.generates and context <= harness.GENERATED_TOKENS:
            raise TrisectError(
                f"{request.task.name} lets the model write {harness.GENERATED_TOKENS} tokens, but its "
                f"context is {context}: leave {request.task.name} out."
            )


def _say_cut(request: Request, *, context: int, cut: bool) -> None:
    if cut:
        log.warning(
            "%s: prompts with %d examples exceed the model's context of %d tokens; their beginning was "
            "cut off. Fewer examples: %s:0.",
            request.task.name,
            request.shots,
            context,
            request.task.name,
        )
