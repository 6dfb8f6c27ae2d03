"""Tasks against lm-eval itself on the same documents, and against log-probabilities added up by hand."""

import json
import logging
import math
import os
import random
import socket
from pathlib import Path
from typing import Any

import datasets
import numpy
import pytest
import torch
import yaml
from by_hand import log_probability
from local_tasks import TASKS, evaluate_locally, load_locally, read_local
from transformers import AutoTokenizer, LlamaForCausalLM

import trisect
from trisect.errors import TrisectError
from trisect.evaluate import tasks as evaluation
from trisect.evaluate.tasks import TaskResults, TaskScore, evaluate_tasks, load_task, parse_tasks

lm_eval = pytest.importorskip("lm_eval", reason="the extra trisect[eval] is not installed")

OWN_YAML = {
    "openbookqa": "openbookqa/openbookqa.yaml",
    "winogrande": "winogrande/default.yaml",
    "lambada_openai": "lambada/lambada_openai.yaml",
}


@pytest.fixture(scope="module", autouse=True)
def _task_files(assets: Path) -> None:
    if not (assets / "data" / "tasks").is_dir():
        pytest.skip(f"no task files at {assets}/data/tasks")


@pytest.fixture(scope="module")
def stories(assets: Path) -> Any:
    folder = assets / "models" / "stories15m"
    if not folder.is_dir():
        pytest.skip(f"no model at {folder}")
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


def lm_eval_alone(
    model: Any, tokenizer: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, *, text: str, limit: int
) -> dict[str, Any]:
    """lm-eval as its users run it: its YAML with another dataset_path, TaskManager, simple_evaluate."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    names = []
    for request in parse_tasks(text):
        name, task = request.name, TASKS[request.name]
        questions, examples, _ = read_local(request)
        files = {task.split: questions[""]}
        if task.examples_split is not None:
            files[task.examples_split] = examples.get("", questions[""][:1])
        paths = {}
        for split, documents in files.items():
            path = folder / f"{name}-{split}.jsonl"
            path.write_text("".join(json.dumps(document) + "\n" for document in documents))
            paths[split] = str(path)
        definition = {
            "include": str(Path(lm_eval.__file__).parent / "tasks" / OWN_YAML[name]),
            "task": name,
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": paths, "cache_dir": str(folder / "cache")},
            "num_fewshot": request.shots,
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(definition))
        names.append(name)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # five seconds of `pip list`
    monkeypatch.setenv("DISABLE_MULTIPROC", "1")
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model=lm, tasks=names, task_manager=manager, limit=limit, bootstrap_iters=2, log_samples=False
    )
    return results["results"]


def test_scores_equal_lm_evals_own_to_the_last_digit(stories, tmp_path, monkeypatch) -> None:
    text = "openbookqa:0,winogrande:2,lambada_openai:0"
    expected = lm_eval_alone(*stories, tmp_path, monkeypatch, text=text, limit=6)
    ours = evaluate_locally(*stories, text, limit=6, batch_size=1)
    assert [score.task for score in ours.scores] == list(expected)
    for score in ours.scores:
        assert score.value == expected[score.task]["acc,none"]
        assert score.stderr == expected[score.task]["acc_stderr,none"]
        for key, value in score.other.items():
            assert value == expected[score.task][key]
    assert {key for score in ours.scores for key in score.other} == {"acc_norm,none", "perplexity,none"}


def test_accuracy_is_the_most_probable_choice_worked_out_by_hand(stories, assets) -> None:
    lines = (assets / "data" / "tasks" / "openbook_qa.jsonl").read_text().splitlines()[:5]
    right, right_per_character = 0, 0
    for row in map(json.loads, lines):
        sums = [log_probability(*stories, row["query"], f" {choice}") for choice in row["choices"]]
        means = [total / len(choice) for total, choice in zip(sums, row["choices"], strict=True)]
        right += sums.index(max(sums)) == row["gold"]
        right_per_character += means.index(max(means)) == row["gold"]
    (score,) = evaluate_locally(*stories, "openbookqa", limit=5).scores
    assert score.value == right / 5
    assert score.other["acc_norm,none"] == right_per_character / 5


def test_lambada_perplexity_is_that_of_the_last_word(stories, assets) -> None:
    lines = (assets / "data" / "tasks" / "lambada_openai.jsonl").read_text().split("\n")[:3]
    rows = [json.loads(line) for line in lines]
    logs = [log_probability(*stories, row["context"], f" {row['continuation']}") for row in rows]
    (score,) = evaluate_locally(*stories, "lambada_openai", limit=3).scores
    assert score.other["perplexity,none"] == pytest.approx(math.exp(-sum(logs) / 3), rel=1e-4)


def test_the_batch_size_does_not_change_the_scores(stories) -> None:
    first, second = (
        evaluate_locally(*stories, "winogrande:1,openbookqa:0", limit=7, batch_size=size) for size in (1, 4)
    )
    assert first == second


def test_a_written_answer_is_scored_by_strict_match(random_model) -> None:
    seen: list[tuple[str, int, int]] = []
    result = evaluate_locally(*random_model, "gsm8k:1", limit=2, progress=lambda *step: seen.append(step))
    (score,) = result.scores
    assert (score.metric, score.value, score.questions) == ("exact_match,strict-match", 0.0, 2)
    assert set(score.other) == {"exact_match,flexible-extract"}
    assert seen == [("gsm8k", 1, 2), ("gsm8k", 2, 2)]


def test_a_compressed_model_scores_the_same_in_memory_and_saved(random_model, tmp_path) -> None:
    model, tokenizer = random_model
    ids = torch.randint(2, 97, (4, 64), generator=torch.Generator().manual_seed(0))
    config = trisect.CompressConfig(ratio=0.25, method="a3", align=None)
    small = trisect.compress(model, config=config, calibration=ids, tokenizer=tokenizer)
    loaded = trisect.load(trisect.save(small, tmp_path / "small"))
    in_memory = evaluate_locally(small, tokenizer, "winogrande:1,gsm8k:0", limit=2)
    assert in_memory == evaluate_locally(loaded, loaded.tokenizer, "winogrande:1,gsm8k:0", limit=2)


def test_the_result_states_limit_shots_and_documents(stories) -> None:
    result = evaluate_locally(*stories, "winogrande:3", limit=2)
    written = json.loads(json.dumps(result.to_dict()))
    assert (written["limit"], written["seed"]) == (2, 1234)
    score = written["scores"]["winogrande"]
    assert (score["shots"], score["questions"], score["available"]) == (3, 2, 1267 - 32)
    assert score["source"].startswith("data/tasks/winogrande.jsonl (llm-foundry)")
    assert score["version"] == 1.0
    again, other = (evaluate_locally(*stories, f"winogrande:{shots}", limit=2).scores[0] for shots in (3, 2))
    assert score["sha256"] == again.sha256 != other.sha256


def test_a_loaded_task_scores_the_same_every_time(stories) -> None:
    """Few-shot examples are drawn anew for every model, from the same seed."""
    loaded = [load_locally(request) for request in parse_tasks("winogrande:2")]
    assert evaluate_tasks(*stories, loaded, limit=3) == evaluate_tasks(*stories, loaded, limit=3)


def test_the_average_and_its_error() -> None:
    fields: dict[str, Any] = dict(shots=0, metric="acc,none", questions=1, available=1, other={}, source="")
    fields |= dict(sha256="", version=1, truncated=False)
    scores = [
        TaskScore(task=str(value), value=value, stderr=stderr, **fields) for value, stderr in ((0.5, 0.03), (0.7, 0.04))
    ]
    settings: dict[str, Any] = dict(limit=None, seed=0, lm_eval="")
    both = TaskResults(scores=tuple(scores), **settings)
    assert (both.average, both.average_stderr) == (pytest.approx(0.6), pytest.approx(0.025))
    without = TaskScore(task="x", value=1.0, stderr=None, **fields)
    assert TaskResults(scores=(*scores, without), **settings).average_stderr is None


def test_prompts_that_exceed_the_context_are_reported(stories, caplog) -> None:
    with caplog.at_level(logging.WARNING, logger="trisect"):
        (score,) = evaluate_locally(*stories, "winogrande:20", limit=1).scores
    assert score.truncated
    assert "winogrande: prompts exceed the model's context of 256 tokens" in caplog.text


def test_a_context_too_short_for_written_answers_is_refused(stories) -> None:
    with pytest.raises(TrisectError, match="write 256 tokens, but its context is 256"):
        evaluate_locally(*stories, "gsm8k:0", limit=1)


def test_logits_that_are_not_numbers_are_refused(random_model) -> None:
    model, tokenizer = random_model
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    with pytest.raises(TrisectError, match="not finite on a question of openbookqa"):
        evaluate_locally(model, tokenizer, "openbookqa", limit=1)


def test_nothing_is_left_changed_and_nothing_is_printed(random_model, capfd, monkeypatch) -> None:
    import lm_eval.api.task
    from datasets import config
    from huggingface_hub import constants

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "0")
    model, tokenizer = random_model
    model.train()

    def state() -> list[Any]:
        return [
            [module.training for module in model.modules()],
            (tokenizer.pad_token, tokenizer.padding_side, model.config.to_dict()),
            (random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
            (os.environ.get("HF_HUB_OFFLINE"), os.environ["HF_DATASETS_OFFLINE"]),
            (constants.HF_HUB_OFFLINE, config.HF_HUB_OFFLINE),
            (lm_eval.api.task.tqdm, lm_eval.api.task.ConfigurableTask.download),
            (logging.getLogger("lm_eval").level, logging.getLogger("lm_eval.models.huggingface").filters[:]),
            datasets.are_progress_bars_disabled(),
        ]

    before = state()
    evaluate_locally(model, tokenizer, "lambada_openai,winogrande:1", limit=2)
    assert state() == before
    assert capfd.readouterr() == ("", "")


def test_local_tasks_never_touch_the_network(random_model, monkeypatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert evaluate_locally(*random_model, "openbookqa", limit=1).scores[0].questions == 1


def test_without_lm_eval_the_message_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(evaluation, "find_spec", lambda name: None)
    with pytest.raises(TrisectError, match=r"pip install 'trisect\[eval\]'"):
        evaluate_tasks(None, None, "openbookqa")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({"limit": 0}, "give --limit 1 or more"), ({"batch_size": 0}, "batch size is 0"), ({}, "no tokenizer")],
)
def test_bad_requests_say_what_would_do(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(TrisectError, match=message.replace("?", r"\?")):
        evaluate_tasks(None, None, "openbookqa", **kwargs)  # type: ignore[arg-type]


def test_a_tokenizer_without_bos_and_eos_is_one_clear_line(random_model) -> None:
    model, tokenizer = random_model
    tokenizer.eos_token = None
    with pytest.raises(TrisectError, match="BOS or an EOS token"):
        evaluate_tasks(model, tokenizer, "openbookqa")


def test_from_the_hub_comes_lm_evals_own_dataset(random_model, monkeypatch) -> None:
    questions, _, _ = read_local(*parse_tasks("openbookqa:0"))
    asked: list[dict[str, Any]] = []

    def load_dataset(**arguments: Any) -> dict[str, datasets.Dataset]:
        asked.append(arguments)
        rows = datasets.Dataset.from_list(questions[""][:5])
        return {"train": rows, "validation": rows, "test": rows}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (score,) = evaluate_tasks(*random_model, "openbookqa", limit=3).scores
    assert asked == [{"path": "allenai/openbookqa", "name": "main"}]
    assert (score.questions, score.available, score.shots) == (3, 5, 0)
    assert score.source == "allenai/openbookqa"
    local = evaluate_locally(*random_model, "openbookqa", limit=3).scores[0]
    assert (score.value, score.sha256) == (local.value, local.sha256)


def test_a_hub_out_of_reach_is_one_clear_line(monkeypatch) -> None:
    def load_dataset(**_: Any) -> None:
        raise ConnectionError("Couldn't reach\nthe Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    message = r"could not load openbookqa: .*leave openbookqa out: Couldn't reach the Hub"
    with pytest.raises(TrisectError, match=message):
        load_task(*parse_tasks("openbookqa"))
