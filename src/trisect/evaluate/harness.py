"""What it takes to run lm-eval quietly, offline and on local documents, and to leave no trace of it.

The task definitions are the YAML files inside the lm_eval package, unchanged; in local mode only the
step that loads a task's dataset is answered by us.
"""

import logging
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import torch
from transformers import PreTrainedModel

from trisect.errors import TrisectError
from trisect.evaluate.forward import flags_kept

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
