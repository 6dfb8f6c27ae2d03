"""Tasks through lm-eval-harness, on a model in memory.

lm-eval makes the prompts, runs the model and scores; trisect chooses the documents and writes down what
was asked. Scores equal those of lm-eval itself on the same documents, to the last digit.
"""

import logging
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import torch
from transformers import PreTrainedModel

from trisect.errors import TrisectError, unknown_name
from trisect.evaluate import tasks as harness
from trisect.evaluate.perplexity import check_batch_size, fitting_batch_size, flags_kept
from trisect.evaluate.task_table import LocalTask, Request, local_task, parse_tasks

GENERATED_TOKENS = 256
"""lm-eval's default length of a written answer."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
Splits = Callable[[str], dict[str, Any]]
"""From lm-eval's name of a dataset's part ("" if it has none) to its splits."""
Pair = tuple[list[int], list[int]]
"""Token ids of a context, and of its continuation."""
Answers = Callable[[list[Pair]], Sequence[tuple[float, bool]]]
"""For each pair: the continuation's log-probability, and whether it is the greedy one."""


def check_installed() -> None:
    """Refuse tasks without lm-eval, before a model is loaded for them."""
    if find_spec("lm_eval") is None:
        raise TrisectError("Tasks need lm-eval, which is not installed: pip install 'trisect[eval]'.")


def language_model(
    model: PreTrainedModel, tokenizer: Any, *, batch_size: int, answers: Answers | None = None
) -> Any:
    """lm-eval's HFLM around a model in memory. The tokenizer is copied: HFLM sets its padding.

    Where `answers` is given, it is asked for log-likelihoods, and the model only lends its config.
    """
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=model, tokenizer=deepcopy(tokenizer), backend="causal", batch_size=batch_size)
    if answers is not None:
        lm._loglikelihood_tokens = partial(_ask, lm, answers)
    return lm


def _ask(lm: Any, answers: Answers, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
    """HFLM's `_loglikelihood_tokens`, with somebody else's answers."""
    pairs = [(context, continuation) for _, context, continuation in requests]
    if any(len(context) + len(continuation) > lm.max_length + 1 for context, continuation in pairs):
        # HFLM would say so; `Cuts` listens for it.
        logging.getLogger("lm_eval.models.huggingface").warning("Truncating a prompt.")
    answered = list(answers(pairs))
    for (texts, _, _), given in zip(requests, answered, strict=True):
        lm.cache_hook.add_partial("loglikelihood", texts, given)
    return answered


def load_task(name: str, *, folder: str, shots: int, seed: int) -> dict[str, Any]:
    """lm-eval's task or group of tasks by name, as its `evaluate` takes it."""
    import lm_eval
    from datasets.exceptions import DatasetsError
    from lm_eval.tasks import TaskManager

    # One folder only: to index all of lm-eval's tasks takes a quarter of a minute.
    path = Path(lm_eval.__file__).parent / "tasks" / folder
    manager = TaskManager(include_path=str(path), include_defaults=False)
    try:
        loaded: dict[str, Any] = manager.load([name])
    except TrisectError:
        raise
    except (OSError, ValueError, DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise TrisectError(
            f"lm-eval could not load {name} ({reason}): check the connection to the hub, or use local "
            "files (--task-source local)."
        ) from error
    for task in loaded["tasks"].values():
        task.set_config(key="num_fewshot", value=shots)
        task.set_fewshot_seed(seed=seed)
    return loaded


class Answered:
    """Told of every answer by lm-eval (as its cache would be): counts them and refuses NaN."""

    def __init__(self, loaded: dict[str, Any], *, report: Callable[[int, int], None] | None) -> None:
        self._tasks = list(loaded["tasks"].values())
        self._report = report
        self._done = 0

    def add_partial(self, kind: str, request: Any, answer: Any) -> None:
        """What lm-eval calls with every answer."""
        if kind == "loglikelihood" and math.isnan(answer[0]):
            raise TrisectError(
                f"The model's logits are not finite on a question of {self._tasks[0].task_name}: try "
                "--dtype float32; if that fails too, the weights are damaged."
            )
        self._done += 1
        if self._report is not None:
            self._report(self._done, sum(len(task.instances) for task in self._tasks))


class Cuts(logging.Filter):
    """Holds back lm-eval's lines about prompts longer than the context, and remembers that one came."""

    seen = False

    def filter(self, record: logging.LogRecord) -> bool:
        self.seen = self.seen or "runcat" in record.getMessage()
        return record.levelno >= logging.ERROR


@contextmanager
def quiet() -> Iterator[Cuts]:
    """No log lines and no bars from lm-eval and `datasets`; yields the filter that noticed cuts."""
    import datasets
    import lm_eval.api.metrics
    import lm_eval.api.model
    import lm_eval.api.task
    import lm_eval.models.huggingface

    bar = lm_eval.api.task.tqdm

    def hidden(*args: Any, **kwargs: Any) -> Any:
        return bar(*args, **{**kwargs, "disable": True})

    cuts = Cuts()
    model_log = logging.getLogger("lm_eval.models.huggingface")
    bars = not datasets.are_progress_bars_disabled()
    with ExitStack() as stack:
        for module in (lm_eval.api.model, lm_eval.api.task, lm_eval.models.huggingface):
            stack.enter_context(_replaced(module, "tqdm", hidden))
        # A hundred thousand resamplings, in a pool of processes, for an error that is not reported.
        stack.enter_context(_replaced(lm_eval.api.metrics, "bootstrap_stderr", lambda *_, **__: math.nan))
        stack.enter_context(_level(logging.getLogger("lm_eval"), logging.ERROR))
        stack.enter_context(_level(model_log, logging.WARNING))
        model_log.addFilter(cuts)
        stack.callback(model_log.removeFilter, cuts)
        datasets.disable_progress_bars()
        if bars:
            stack.callback(datasets.enable_progress_bars)
        yield cuts


@contextmanager
def local_documents(splits: Splits) -> Iterator[None]:
    """Tasks built inside take their dataset from `splits`; nothing asks the hub for anything."""
    from datasets import config
    from huggingface_hub import constants
    from lm_eval.api.task import ConfigurableTask

    def download(task: Any, *_: Any, **__: Any) -> None:
        task.dataset = splits(task.DATASET_NAME or "")

    with ExitStack() as stack:
        stack.enter_context(_replaced(ConfigurableTask, "download", download))
        stack.enter_context(_replaced(constants, "HF_HUB_OFFLINE", True))
        stack.enter_context(_replaced(config, "HF_HUB_OFFLINE", True))
        stack.enter_context(_environment(OFFLINE))
        yield


@contextmanager
def undisturbed(model: PreTrainedModel, *, seed: int) -> Iterator[None]:
    """Fixed seeds inside; random states and the modules' training flags come back as they were."""
    states = random.getstate(), numpy.random.get_state()
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        with flags_kept(model), torch.random.fork_rng(devices=devices):
            random.seed(seed)
            numpy.random.seed(seed)
            torch.manual_seed(seed)
            yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _level(logger: logging.Logger, level: int) -> Iterator[None]:
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


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
