"""Tasks of lm-eval-harness on a model in memory, as lm-eval itself runs them.

Tasks, datasets, prompts and scores are lm-eval's own; datasets come from the Hugging Face hub. So scores
equal public ones of lm-eval, to the last digit on the same machine.
"""

import hashlib
import json
import logging
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from transformers import PreTrainedModel, set_seed

from trisect.data.read import short_patience
from trisect.errors import TrisectError, unknown_name
from trisect.evaluate.perplexity import check_batch_size, fitting_batch_size, not_finite
from trisect.models.looking import training_flags_kept
from trisect.support import checks, replaced

log = logging.getLogger(__name__)

PRESETS: dict[str, tuple[str, ...]] = {  # lm-eval's names, each with its number of examples
    "paper": ("arc_challenge:25", "boolq:0", "openbookqa:0", "winogrande:5", "gsm8k:5", "mmlu:5"),
    "zero-shot": ("arc_challenge:0", "boolq:0", "winogrande:0", "piqa:0", "openbookqa:0", "lambada_openai:0"),
    "quick": ("winogrande:0", "openbookqa:0", "lambada_openai:0"),  # short prompts and no generation
}
FOLDERS = {
    **{"arc_challenge": "arc", "boolq": "super_glue/boolq", "lambada_openai": "lambada", "mmlu": "mmlu/default"},
    **{name: name for name in ("gsm8k", "hellaswag", "openbookqa", "piqa", "winogrande")},
}
"""Where lm-eval defines the usual tasks: to index all of its tasks takes a quarter of a minute."""
FEWSHOT_SEED = 1234  # lm-eval's own default
GENERATED_TOKENS = 256  # lm-eval's default length of a written answer
USUAL_PROMPT = 1024  # tokens of a long prompt, for choosing a batch size


class Request(NamedTuple):
    """A task of lm-eval by name, with a number of few-shot examples (None: as lm-eval has it)."""

    name: str
    shots: int | None = None


class LoadedTask(NamedTuple):
    """A request with lm-eval's task or group of tasks, datasets included."""

    request: Request
    tasks: dict[str, Any]  # as lm-eval's `evaluate` takes it


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """One task's score, with what is needed to repeat it."""

    task: str
    version: Any  # lm-eval's of the task
    shots: int
    metric: str  # lm-eval's key: metric,filter
    value: float
    stderr: float | None
    questions: int  # with a `limit`, fewer than are available
    available: int
    other: dict[str, float]  # lm-eval's further metrics of the task
    source: str  # the dataset
    sha256: str  # of all prompts with their choices
    truncated: bool  # some prompts exceeded the model's context and lost their beginning


@dataclass(frozen=True, kw_only=True)
class TaskResults:
    """Scores of several tasks, and their plain average."""

    scores: tuple[TaskScore, ...]
    limit: int | None
    seed: int
    lm_eval: str

    @property
    def average(self) -> float:
        return sum(score.value for score in self.scores) / len(self.scores)

    @property
    def average_stderr(self) -> float | None:
        """The error of the average, from the tasks' own errors, which are independent."""
        errors = [score.stderr for score in self.scores if score.stderr is not None]
        total = math.sqrt(sum(error**2 for error in errors))
        return total / len(errors) if len(errors) == len(self.scores) else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with scores by the task's name."""
        names = ("limit", "seed", "lm_eval", "average", "average_stderr")
        scores = {score.task: asdict(score) for score in self.scores}
        return {**{name: getattr(self, name) for name in names}, "scores": scores}


def parse_tasks(text: str, *, shots: int | None = None) -> list[Request]:
    """Requests for presets and tasks, separated by commas; `name:N` has N examples, other entries have `shots`."""
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    if not entries:
        raise TrisectError(f"No task in {text!r}: give one or more of {', '.join((*PRESETS, *FOLDERS))}.")
    if shots is not None and shots < 0:
        raise TrisectError(f"{shots} examples were asked for; give --shots 0 or more.")
    found: dict[str, int | None] = {}
    for entry, member in [(each, member) for each in entries for member in PRESETS.get(each, (each,))]:
        name, colon, number = member.partition(":")
        if name not in FOLDERS and name not in _possible_names():
            raise _unknown_task(name)
        if colon and not (number.isascii() and number.isdigit()):
            raise TrisectError(f"{entry!r}: after the colon stands the number of examples, such as {name}:5.")
        wanted = shots if not colon or (entry in PRESETS and shots is not None) else int(number)
        if found.setdefault(name, wanted) != wanted:
            both = f"{name} with {found[name]} and with {wanted} examples"
            raise TrisectError(f"{text!r} asks for {both}: name it once, or run twice.")
    return [Request(name, wanted) for name, wanted in found.items()]


def _unknown_task(name: str) -> TrisectError:
    hint = f"Presets: {', '.join(PRESETS)}. All other names: `lm-eval ls tasks`."
    return unknown_name("task", name, (*FOLDERS, *PRESETS), hint=hint)


@lru_cache(maxsize=1)
def _possible_names() -> frozenset[str]:
    """Names of tasks, groups and tags in lm-eval's definitions, and some other words."""
    # Reading them takes half a second, so a typo is found before a model is loaded.
    value = re.compile(r"""(?:^|[:\-\[,])[ \t]*["']?([^\s:,\[\]"']+)["']?[ \t]*(?=,|\]|#|$)""", re.MULTILINE)
    files = (path for path in _task_folder().rglob("*") if path.suffix in ("", ".yaml") and path.is_file())
    return frozenset(name for path in files for name in value.findall(path.read_text(encoding="utf-8")))


def _task_folder() -> Path:
    found = find_spec("lm_eval")
    if found is None or found.origin is None:
        raise TrisectError("Tasks need lm-eval, which is not installed: pip install 'trisect[eval]'.")
    return Path(found.origin).parent / "tasks"


def check_request(*, limit: int | None, batch_size: int | None = None) -> None:
    """Refuse settings that cannot work, before a model is loaded."""
    if limit is not None and limit < 1:
        raise TrisectError(f"{limit} questions were asked for; give --limit 1 or more.")
    check_batch_size(batch_size)
    _task_folder()


def load_task(request: Request) -> LoadedTask:
    """lm-eval's task or group of tasks, its datasets fetched from the hub or its cache."""
    from lm_eval.tasks import TaskManager

    name, folder = request.name, FOLDERS.get(request.name)
    come = "its documents come from the Hugging Face hub; check the connection to it"
    with seeded(FEWSHOT_SEED), quiet(), short_patience():
        path = None if folder is None else str(_task_folder() / folder)
        manager = TaskManager(include_path=path, include_defaults=folder is None)
        if name not in manager.all_tasks:
            raise _unknown_task(name)
        with checks.explained(f"lm-eval could not load {name}: {come}, or leave {name} out"):
            loaded: dict[str, Any] = manager.load([name])
    for task in loaded["tasks"].values():
        # Like lm-eval: a task that says itself that it has no examples keeps to that.
        if request.shots is not None and task.config.num_fewshot != 0:
            task.set_config(key="num_fewshot", value=request.shots)
    return LoadedTask(request=request, tasks=loaded)


def evaluate_tasks(
    model: PreTrainedModel,
    tokenizer: Any,
    tasks: str | Sequence[Request | LoadedTask],
    *,
    limit: int | None = None,
    batch_size: int | None = None,
    seed: int = FEWSHOT_SEED,
    progress: Callable[[str, int, int], None] | None = None,
    lm: Any = None,
) -> TaskResults:
    """Scores of `model` on tasks: a text for `parse_tasks`, such as "paper", requests, or loaded tasks.

    `limit` takes the first questions only; a group such as MMLU splits it over its tasks, at least one each. The
    batch size (None: chosen to fit memory) changes speed only, up to rounding. `progress` is called with (task,
    answers done, answers in all). `lm` is lm-eval's own object where another engine answers.
    """
    requests = parse_tasks(tasks) if isinstance(tasks, str) else list(tasks)
    check_request(limit=limit, batch_size=batch_size)
    if tokenizer is None:
        raise TrisectError("Tasks are text, and the model has no tokenizer: put its files into the folder.")
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
        raise TrisectError("lm-eval needs a tokenizer with a BOS or an EOS token: name one in its files.")
    loaded = [task if isinstance(task, LoadedTask) else load_task(task) for task in requests]
    size = fitting_batch_size(model, length=USUAL_PROMPT) if batch_size is None else batch_size
    scores: list[TaskScore] = []
    with training_flags_kept(model), seeded(seed, model.device), quiet() as truncation:
        from lm_eval import evaluate

        lm = lm or language_model(model, tokenizer, batch_size=size)
        for task in loaded:
            _check_fits(task, context=lm.max_length)
        for task in loaded:
            name, truncation.seen, members = task.request.name, False, task.tasks["tasks"].values()
            for member in members:
                member.set_fewshot_seed(seed=seed)
            lm.set_cache_hook(AnswerHook(task, report=None if progress is None else partial(progress, name)))
            each = None if limit is None else math.ceil(limit / len(members))
            results = evaluate(lm=lm, task_dict=task.tasks, limit=each, log_samples=False)
            if truncation.seen:
                line = "%s: prompts exceed the model's context of %d tokens; their beginning was cut off."
                log.warning(line + " Fewer examples: %s:0.", name, lm.max_length, name)
            # A task or a group has a score; a tag of lm-eval has none of its own, only its tasks have.
            inside = task.tasks["tasks"]
            whole = {name: inside} if name in results["results"] else {key: {key: inside[key]} for key in inside}
            scores += [_score(key, each, results, truncated=truncation.seen) for key, each in whole.items()]
    return TaskResults(scores=tuple(scores), limit=limit, seed=seed, lm_eval=version("lm_eval"))


def language_model(model: PreTrainedModel, tokenizer: Any, *, batch_size: int) -> Any:
    """lm-eval's HFLM around a model in memory. The tokenizer is copied: HFLM sets its padding."""
    from lm_eval.models.huggingface import HFLM

    return HFLM(pretrained=model, tokenizer=deepcopy(tokenizer), backend="causal", batch_size=batch_size)


def _check_fits(task: LoadedTask, *, context: int) -> None:
    """Refuse tasks that a text model with this context cannot run."""
    name = task.request.name
    for member in task.tasks["tasks"].values():
        wanted = (member.config.generation_kwargs or {}).get("max_gen_toks", GENERATED_TOKENS)
        if member.OUTPUT_TYPE == "generate_until" and context <= wanted:
            raise TrisectError(f"The model may write {wanted} tokens, but its context is {context}: leave {name} out.")
        if getattr(member, "UNSAFE_CODE", False) or getattr(member, "MULTIMODAL", False):
            raise TrisectError(f"{name} runs code that models write, or shows pictures: leave {name} out.")


def _score(name: str, members: dict[str, Any], results: dict[str, Any], *, truncated: bool) -> TaskScore:
    values, first = results["results"][name], next(iter(members))
    metrics = [key for key in values if "," in key and "_stderr," not in key]
    metric = "acc,none" if "acc,none" in metrics else metrics[0]
    counts = [results["n-samples"][member] for member in members]
    error = values.get(metric.replace(",", "_stderr,", 1))  # "N/A" where a single question allows none
    prompts = [instance.args for member in members.values() for instance in member.instances]
    return TaskScore(
        task=name,
        version=results["versions"].get(name),
        shots=results["n-shot"][first],
        metric=metric,
        value=float(values[metric]),
        stderr=error if isinstance(error, float) and math.isfinite(error) else None,
        questions=sum(count["effective"] for count in counts),
        available=sum(count["original"] for count in counts),
        other={key: float(values[key]) for key in metrics if key != metric},
        source=", ".join(sorted({str(member.DATASET_PATH) for member in members.values()})),
        sha256=hashlib.sha256(json.dumps(prompts, default=str, sort_keys=True).encode()).hexdigest(),
        truncated=truncated,
    )


class AnswerHook:
    """Counts answers and refuses NaN, in the place of lm-eval's cache."""

    def __init__(self, task: LoadedTask, *, report: Callable[[int, int], None] | None) -> None:
        self.task, self.report, self.done = task, report, 0

    def add_partial(self, kind: str, request: Any, answer: Any) -> None:
        """Called by lm-eval with every answer."""
        if kind == "loglikelihood" and math.isnan(answer[0]):
            raise not_finite(f"on a question of {self.task.request.name}")
        self.done += 1
        if self.report is not None:
            self.report(self.done, sum(len(task.instances) for task in self.task.tasks["tasks"].values()))


class TruncationFilter(logging.Filter):
    """Hides lm-eval's lines about prompts longer than the context, and notes that there was one."""

    seen = False

    def filter(self, record: logging.LogRecord) -> bool:
        self.seen = self.seen or "runcat" in record.getMessage()
        return record.levelno >= logging.ERROR


@contextmanager
def quiet() -> Iterator[TruncationFilter]:
    """No log lines and no bars from lm-eval and `datasets`; yields the filter that notices truncation."""
    import datasets
    from lm_eval.api import metrics, model, task
    from lm_eval.models import huggingface

    bar = task.tqdm
    truncation, model_logger = TruncationFilter(), logging.getLogger("lm_eval.models.huggingface")
    levels = ((logging.getLogger("lm_eval"), logging.ERROR), (model_logger, logging.WARNING))
    modules = (model, task, huggingface)
    hidden = [(module, "tqdm", lambda *args, **how: bar(*args, **{**how, "disable": True})) for module in modules]
    # A hundred thousand resamplings, in a pool of processes, for an error that is not reported.
    resampling = (metrics, "bootstrap_stderr", lambda *_, **__: math.nan)
    with ExitStack() as stack:
        stack.enter_context(replaced(*hidden, resampling))
        for each, level in levels:
            stack.callback(each.setLevel, each.level)
            each.setLevel(level)
        model_logger.addFilter(truncation)
        stack.callback(model_logger.removeFilter, truncation)
        if not datasets.are_progress_bars_disabled():
            datasets.disable_progress_bars()
            stack.callback(datasets.enable_progress_bars)
        yield truncation


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Fixed seeds inside; all random states come back as they were."""
    states = random.getstate(), numpy.random.get_state()
    devices = [device] if device is not None and device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            set_seed(seed)
            yield
    finally:
        random.setstate(states[0])
        numpy.random.set_state(states[1])
