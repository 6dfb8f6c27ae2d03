"""Log-likelihoods without lm-eval, against lm-eval's own and against log-probabilities added up by hand."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from likelihood import answer, context_length
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from trisect.errors import TrisectError

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
TASKS = "openbookqa:0,winogrande:0,lambada_openai:0"


@pytest.fixture
def model(random_model: Any) -> Any:
    return random_model[0].eval()


def by_hand(model: Any, context: list[int], continuation: list[int], *, keep: int = 2048) -> Any:
    """One plain forward pass; `keep` is the most that the model reads."""
    whole = torch.tensor([(context + continuation)[:-1][-keep:]])
    with torch.inference_mode():
        logs = model(whole).logits[0, -len(continuation) :].double().log_softmax(-1)
    total = sum(float(row[token]) for row, token in zip(logs, continuation, strict=True))
    return total, logs.argmax(-1).tolist() == continuation


def some_requests(seed: int, *, count: int = 12, longest: int = 40) -> list[tuple[list[int], list[int]]]:
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int) -> list[int]:
        length = int(torch.randint(low, high, (), generator=generator))
        return torch.randint(0, 97, (length,), generator=generator).tolist()

    return [(ids(1, longest), ids(1, 6)) for _ in range(count)]


@pytest.fixture
def device_tasks(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("device_tasks")


@pytest.mark.parametrize("batch_size", [1, 5, 64])
def test_answers_are_log_probabilities_added_up_by_hand(model, batch_size: int) -> None:
    requests = some_requests(0)
    steps: list[tuple[int, int]] = []
    answers = answer(model, requests, batch_size=batch_size, progress=lambda *step: steps.append(step))
    for (context, continuation), (total, greedy) in zip(requests, answers, strict=True):
        expected, best = by_hand(model, context, continuation)
        assert total == pytest.approx(expected, abs=1e-4)
        assert greedy == best
    assert steps[-1] == (12, 12)


def test_what_the_model_would_write_is_greedy(model) -> None:
    context = [5, 6, 7]
    written: list[int] = []
    for _ in range(4):
        with torch.inference_mode():
            written.append(int(model(torch.tensor([context + written])).logits[0, -1].argmax()))
    other = [*written[:3], (written[3] + 1) % 97]
    assert [greedy for _, greedy in answer(model, [(context, written), (context, other)], batch_size=2)] == [
        True,
        False,
    ]


@settings(max_examples=10)
@given(st.integers(2, 9))
def test_long_prompts_lose_their_beginning(max_length: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=97, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    model = LlamaForCausalLM(config).eval()
    requests = [(context, continuation[:max_length]) for context, continuation in some_requests(1, count=4)]
    answers = answer(model, requests, batch_size=4, max_length=max_length)
    for (context, continuation), (total, _) in zip(requests, answers, strict=True):
        assert total == pytest.approx(by_hand(model, context, continuation, keep=max_length)[0], abs=1e-4)


def test_requests_that_differ_in_their_last_token_share_one_input(model, monkeypatch) -> None:
    seen: list[tuple[int, ...]] = []
    forward = type(model).forward

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(tuple(kwargs["input_ids"].shape))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "forward", spy)
    # The third splits the same tokens elsewhere: its continuation is longer.
    requests = [([3, 4, 5], [6]), ([3, 4, 5], [7]), ([3, 4], [5, 8]), ([9], [1])]
    answers = answer(model, requests, batch_size=8)
    monkeypatch.undo()
    assert seen == [(2, 3)]
    for (context, continuation), (total, _) in zip(requests, answers, strict=True):
        assert total == pytest.approx(by_hand(model, context, continuation)[0], abs=1e-4)


def test_the_training_flags_come_back(model) -> None:
    model.train()
    answer(model, [([1], [2])], batch_size=1)
    assert all(module.training for module in model.modules())


def test_the_context_is_the_configs(model) -> None:
    assert context_length(model) == 2048
    assert context_length(SimpleNamespace(config=SimpleNamespace(text_config=model.config))) == 2048
    with pytest.raises(TrisectError, match="give max_length"):
        context_length(SimpleNamespace(config=SimpleNamespace(max_seq_len=5)))


@pytest.mark.parametrize(
    ("requests", "options", "message"),
    [
        ([([1], [2]), ([], [2])], {}, "Request 1 of 2 has an empty context"),
        ([([1], [])], {}, "empty continuation"),
        ([([1], [2, 3, 4])], {"max_length": 2}, "continuation of 3 tokens, but the context holds 2"),
        ([([1, 97], [2])], {}, "holds the id 97, outside the model's vocabulary of 97"),
        ([([1], [2])], {"batch_size": 0}, "batch size is 0"),
    ],
)
def test_bad_requests_say_what_would_do(model, requests: Any, options: Any, message: str) -> None:
    with pytest.raises(TrisectError, match=message):
        answer(model, requests, **{"batch_size": 1, **options})


def test_logits_that_are_not_numbers_are_refused(model) -> None:
    torch.nn.init.constant_(model.lm_head.weight, math.nan)
    with pytest.raises(TrisectError, match="not finite on request 0 of 1"):
        answer(model, [([1], [2])], batch_size=1)


def test_no_requests_have_no_answers(model) -> None:
    assert answer(model, [], batch_size=4) == []


@pytest.mark.parametrize("batch_size", [1, 4])
def test_answers_are_lm_evals_own(random_model, batch_size: int) -> None:
    pytest.importorskip("lm_eval", reason="the extra trisect[eval] is not installed")
    from trisect.evaluate.tasks import language_model, quiet

    model, tokenizer = random_model
    requests = [*some_requests(2), ([3, 4], [5]), ([3, 4], [6]), ([50] * 3000, [7, 8])]
    with quiet():
        lm = language_model(model, tokenizer, batch_size=batch_size)
        theirs = lm._loglikelihood_tokens([(("", ""), *pair) for pair in requests])
    # Not merely close: the batches are the same ones.
    assert answer(model, requests, batch_size=batch_size) == theirs


def test_neither_lm_eval_nor_datasets_is_needed_to_answer() -> None:
    # The modules are made impossible to import, as where they are not installed.
    names = ("lm_eval", "datasets", "typer", "rich", "accelerate", "sentencepiece")
    blocked = "; ".join(f"sys.modules[{name!r}] = None" for name in names)
    code = f"import sys; sys.path.append({str(EXPERIMENTS)!r}); {blocked}; import device_tasks"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.fixture
def stories(assets: Path) -> Path:
    pytest.importorskip("lm_eval", reason="the extra trisect[eval] is not installed")
    folder = assets / "models" / "stories15m"
    for needed in (folder, assets / "data" / "tasks"):
        if not needed.is_dir():
            pytest.skip(f"nothing at {needed}")
    return folder


@pytest.mark.parametrize(("tasks", "limit"), [(TASKS, 6), ("winogrande:20", 1)], ids=["short", "cut"])
def test_recorded_answered_and_scored_is_evaluated(
    device_tasks, stories, tmp_path: Path, monkeypatch, capsys, tasks: str, limit: int
) -> None:
    from lm_eval.models.huggingface import HFLM
    from local_tasks import evaluate_locally

    theirs = []
    requests, answers, out = (str(tmp_path / name) for name in ("requests.json", "answers.json", "out.json"))
    choice = ["--model", str(stories), "--tasks", tasks, "--limit", str(limit)]
    device_tasks.main("record", requests, *choice)
    device_tasks.main("answer", requests, answers, "--batch-size", "4", "--dtype", "float32")
    device_tasks.main("score", requests, answers, out)

    ask = HFLM._loglikelihood_tokens

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        theirs.append(ask(self, *args, **kwargs))
        return theirs[-1]

    monkeypatch.setattr(HFLM, "_loglikelihood_tokens", spy)
    model = LlamaForCausalLM.from_pretrained(stories, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(stories)
    direct = evaluate_locally(model, tokenizer, tasks, limit=limit, batch_size=4)
    scored = json.loads(Path(out).read_text())
    for name, value in json.loads(json.dumps(direct.to_dict())).items():
        assert scored[name] == value
    ours = json.loads(Path(answers).read_text())["answers"]
    assert [len(call) for call in ours] == [len(call) for call in theirs]
    for mine, other in zip(sum(ours, []), sum(theirs, []), strict=True):
        assert mine[0] == pytest.approx(other[0], abs=1e-4)
        assert mine[1] == other[1]
    assert f"average {direct.average:.4f}" in capsys.readouterr().out


def test_answers_of_a_compressed_model_say_how_it_was_made(device_tasks, stories, tmp_path: Path) -> None:
    requests, answers = (str(tmp_path / name) for name in ("requests.json", "answers.json"))
    device_tasks.main("record", requests, "--model", str(stories), "--tasks", "openbookqa", "--limit", "2")
    how = ["--method", "a3", "--ratio", "0.25", "--align", "none", "--samples", "2", "--length", "64"]
    device_tasks.main("answer", requests, answers, *how)
    written = json.loads(Path(answers).read_text())
    recipe = written["about"]["compression"]["recipe"]
    assert (recipe["method"], recipe["ratio"], recipe["align"]) == ("a3", 0.25, None)
    assert len(written["answers"][0]) == 8


def test_what_was_not_asked_is_not_scored(device_tasks, stories, tmp_path: Path) -> None:
    recorded = device_tasks.record(str(stories), tasks="openbookqa", limit=2)
    good = [[(-1.0, False)] * 8]
    assert device_tasks.score(recorded, good)["scores"]["openbookqa"]["questions"] == 2
    path = tmp_path / "requests.json"
    device_tasks.write_compact(path, recorded)
    assert device_tasks.read_requests(path)["sha256"] == recorded["sha256"]
    recorded["calls"][0]["requests"][3] = ([1, 2], [3])
    with pytest.raises(TrisectError, match="asks other questions for openbookqa"):
        device_tasks.score(recorded, good)
    device_tasks.write_compact(path, recorded)
    with pytest.raises(TrisectError, match="record it again"):
        device_tasks.read_requests(path)
    device_tasks.write_answers(tmp_path / "answers.json", recorded, good, None)
    with pytest.raises(TrisectError, match="answers other requests"):
        device_tasks.read_answers(tmp_path / "answers.json", {"sha256": "another"})


def test_written_answers_cannot_come_from_elsewhere(device_tasks, stories, random_model) -> None:
    from local_tasks import evaluate_locally

    with (
        device_tasks.answered_by(lambda pairs: [(0.0, False)] * len(pairs)),
        pytest.raises(TrisectError, match="leave it out"),
    ):
        evaluate_locally(*random_model, "gsm8k:0", limit=1)
