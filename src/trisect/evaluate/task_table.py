"""The tasks that trisect knows, where their documents come from, and the presets.

Prompts and metrics are lm-eval's own; shots are the paper's where it has the task, else 0. The paper
does not say whether it reports `acc` or `acc_norm`. We take it to be `acc`: its dense scores on
ARC-Challenge lie four to five points under the `acc_norm` that the same models are known for. Results
hold both.

Three of llm-foundry's files are not used, because their documents are not those of lm-eval's task:
arc_challenge.jsonl has 26 of 1172 questions with wrong choices or a wrong answer (papers with numbered
answers), boolq.jsonl lacks the passages' titles and breaks 22 passages at the word "question", and
piqa.jsonl has lost the spaces at the end of 118 questions' answers.
"""

import math
from dataclasses import dataclass
from typing import Any

from trisect.errors import TrisectError, unknown_name
from trisect.evaluate import local_tasks as documents
from trisect.evaluate.local_tasks import Documents, Fields, Place, Source, read_documents

HELD_OUT = 32
"""Questions at a file's end that serve as examples where no other split is at hand. They are not asked
then. (Not 40: in WinoGrande that would tear a pair of twin sentences apart.)"""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task of lm-eval, and local files that hold its documents."""

    name: str
    harness: str
    """lm-eval's name for it."""
    folder: str
    """Where its YAML is, below lm_eval/tasks."""
    shots: int
    metric: str
    """lm-eval's key: the metric, then the filter."""
    description: str
    questions: tuple[Source, ...]
    questions_split: str
    examples_split: str | None
    """The split that lm-eval takes few-shot examples from; None: it has none."""
    examples: Source | None = None
    """None: the last HELD_OUT questions are the examples, and are not asked."""
    distinct_by: str | None = None
    """Examples that share this field with a question are left out."""
    generates: bool = False


@dataclass(frozen=True)
class Request:
    """A task with a number of few-shot examples."""

    task: Task
    shots: int


def _asset(path: str) -> Place:
    return Place("asset", path)


def _arrow(path: str) -> Place:
    return Place("arrow", path)


def _requests(path: str) -> Place:
    return Place("requests", path)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            name="arc_challenge",
            harness="arc_challenge",
            folder="arc",
            shots=25,
            metric="acc,none",
            description="ARC-Challenge test, 1172 science questions",
            questions=(
                Source(
                    place=_requests("arc_challenge/test_rc_5shot"),
                    convert=documents.arc_from_requests,
                ),
            ),
            questions_split="test",
            examples_split="train",
            # lm-eval takes examples from the training split, which is in neither place.
            examples=Source(
                place=_arrow("ai2_arc/ARC-Challenge/validation"), convert=documents.arc_from_arrow
            ),
            distinct_by="question",
        ),
        Task(
            name="boolq",
            harness="boolq",
            folder="super_glue/boolq",
            shots=0,
            metric="acc,none",
            description="BoolQ validation (SuperGLUE), 3270 yes/no questions on a passage",
            questions=(Source(place=_requests("boolq/val_rc_5shot"), convert=documents.boolq_from_requests),),
            questions_split="validation",
            examples_split="train",
        ),
        Task(
            name="openbookqa",
            harness="openbookqa",
            folder="openbookqa",
            shots=0,
            metric="acc,none",
            description="OpenBookQA test, 500 elementary science questions",
            questions=(
                Source(place=_asset("openbook_qa.jsonl"), convert=documents.openbookqa_from_foundry),
                Source(
                    place=_requests("openbookqa/test_rc_5shot"),
                    convert=documents.openbookqa_from_requests,
                ),
            ),
            questions_split="test",
            examples_split="train",
            examples=Source(
                place=_arrow("openbookqa/main/validation"), convert=documents.openbookqa_from_arrow
            ),
            distinct_by="question_stem",
        ),
        Task(
            name="winogrande",
            harness="winogrande",
            folder="winogrande",
            shots=5,
            metric="acc,none",
            description="WinoGrande XL validation, 1267 gaps to fill",
            questions=(
                Source(place=_asset("winogrande.jsonl"), convert=documents.winogrande_from_foundry),
                Source(
                    place=_arrow("winogrande/winogrande_xl/validation"),
                    convert=documents.winogrande_from_arrow,
                ),
            ),
            questions_split="validation",
            examples_split="train",
        ),
        Task(
            name="gsm8k",
            harness="gsm8k",
            folder="gsm8k",
            shots=5,
            metric="exact_match,strict-match",
            description="GSM8K test, 1319 word problems, answers written out (strict match)",
            questions=(
                Source(place=_asset("gsm8k.jsonl"), convert=documents.gsm8k_from_foundry),
                Source(place=_requests("gsm8k/gold_bpb_5shot"), convert=documents.gsm8k_from_requests),
            ),
            questions_split="test",
            examples_split="train",
            generates=True,
        ),
        Task(
            name="mmlu",
            harness="mmlu",
            folder="mmlu/default",
            shots=5,
            metric="acc,none",
            description="MMLU test, 14042 exam questions of 57 subjects",
            questions=(Source(place=_arrow("hails/mmlu_no_train/*/test"), convert=documents.unchanged),),
            questions_split="test",
            examples_split="dev",
            examples=Source(place=_arrow("hails/mmlu_no_train/*/dev"), convert=documents.unchanged),
        ),
        Task(
            name="piqa",
            harness="piqa",
            folder="piqa",
            shots=0,
            metric="acc,none",
            description="PIQA validation, 1838 questions of physical common sense",
            questions=(Source(place=_arrow("piqa/plain_text/validation"), convert=documents.unchanged),),
            questions_split="validation",
            examples_split="train",
        ),
        Task(
            name="hellaswag",
            harness="hellaswag",
            folder="hellaswag",
            shots=0,
            metric="acc,none",
            description="HellaSwag validation, 10042 stories to continue",
            questions=(Source(place=_arrow("hellaswag/none/validation"), convert=documents.unchanged),),
            questions_split="validation",
            examples_split="train",
        ),
        Task(
            name="lambada",
            harness="lambada_openai",
            folder="lambada",
            shots=0,
            metric="acc,none",
            description="LAMBADA test (OpenAI), 5153 last words to predict",
            questions=(Source(place=_asset("lambada_openai.jsonl"), convert=documents.lambada_from_foundry),),
            questions_split="test",
            examples_split=None,
        ),
    )
}

PRESETS: dict[str, tuple[str, ...]] = {
    "paper": ("arc_challenge:25", "boolq:0", "openbookqa:0", "winogrande:5", "gsm8k:5", "mmlu:5"),
    "zero-shot": ("arc_challenge:0", "boolq:0", "winogrande:0", "piqa:0", "openbookqa:0", "lambada:0"),
    # Short prompts, no generation, and nothing to download where the assets are.
    "quick": ("winogrande:0", "openbookqa:0", "lambada:0"),
}


def parse_tasks(text: str, *, shots: int | None = None) -> list[Request]:
    """Presets and tasks, separated by commas; `name:N` asks for N examples.

    `shots` replaces the number of every entry that does not state its own in `text`.
    """
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    if not entries:
        raise TrisectError(f"No task in {text!r}: give one or more of {', '.join((*PRESETS, *TASKS))}.")
    requests: dict[str, Request] = {}
    for entry in entries:
        for request in _expand(entry, shots=shots):
            name = request.task.name
            if requests.setdefault(name, request) != request:
                raise TrisectError(
                    f"{text!r} asks for {name} with {requests[name].shots} and with {request.shots} "
                    "examples: name it once, or run twice."
                )
    return list(requests.values())


def _expand(entry: str, *, shots: int | None) -> list[Request]:
    if entry in PRESETS:
        members = [_request(member, shots=None) for member in PRESETS[entry]]
        return members if shots is None else [_checked(member.task, shots) for member in members]
    return [_request(entry, shots=shots)]


def _request(entry: str, *, shots: int | None) -> Request:
    name, colon, number = entry.partition(":")
    if name not in TASKS:
        hint = f"Presets: {', '.join(PRESETS)}."
        raise unknown_name("task", name, (*TASKS, *PRESETS), hint=hint)
    if colon and not (number.isascii() and number.isdigit()):
        raise TrisectError(f"{entry!r}: after the colon stands the number of examples, such as {name}:5.")
    task = TASKS[name]
    if colon:
        return _checked(task, int(number))
    return _checked(task, task.shots if shots is None else shots)


def _checked(task: Task, shots: int) -> Request:
    if shots < 0:
        raise TrisectError(f"{shots} examples were asked for; give --shots 0 or more.")
    if shots > 0 and task.examples_split is None:
        raise TrisectError(f"{task.name} has no few-shot examples in lm-eval: give {task.name}:0.")
    if shots > HELD_OUT - 1 and task.examples is None:
        # One less than there are: lm-eval may draw one more than it shows.
        raise TrisectError(f"{task.name}:{shots}: at most {HELD_OUT - 1} examples are at hand.")
    return Request(task, shots)


Subsets = dict[str, list[Fields]]


@dataclass(frozen=True, kw_only=True)
class LocalTask:
    """The documents behind one request."""

    task: Task
    questions: Subsets
    examples: Subsets
    available: int
    """Documents of the questions' file, held-out ones included."""
    source: str
    sha256: str
    """Of all available documents."""
    examples_source: str

    def splits(self, name: str) -> dict[str, Any]:
        """Datasets in memory under lm-eval's split names; `name` is what it calls the subset."""
        from datasets import Dataset

        # A task with one subset has a name of its own for it, such as "main".
        subset = "" if "" in self.questions else name
        if subset not in self.questions:
            raise TrisectError(
                f"{self.source} has no {name}, which this lm-eval asks for: install the lm-eval version "
                "that trisect names, or use --task-source hub."
            )
        splits = {self.task.questions_split: Dataset.from_list(self.questions[subset])}
        if self.task.examples_split is not None:
            splits[self.task.examples_split] = Dataset.from_list(self.examples.get(subset, []))
        return splits


def local_task(request: Request, *, limit: int | None = None) -> LocalTask:
    """Read the documents that a request needs: examples only where it shows some.

    `limit` is shared out over the subsets and rounded up: MMLU asks at least one question per subject.
    """
    task = request.task
    found = read_documents(task.questions)
    questions, examples, origin = found.subsets, Subsets(), "none shown"
    if request.shots > 0 and task.examples is not None:
        other = read_documents([task.examples])
        examples, origin = _distinct(other, found, field=task.distinct_by), other.origin
    elif request.shots > 0:
        examples = {subset: documents[-HELD_OUT:] for subset, documents in questions.items()}
        questions = {subset: documents[:-HELD_OUT] for subset, documents in questions.items()}
        origin = f"the last {HELD_OUT} documents of the same file, which are not asked"
    each = None if limit is None else math.ceil(limit / len(questions))
    return LocalTask(
        task=task,
        questions={subset: documents[:each] for subset, documents in questions.items()},
        examples=examples,
        available=sum(len(documents) for documents in found.subsets.values()),
        source=found.origin,
        sha256=found.sha256,
        examples_source=origin,
    )


def _distinct(examples: Documents, questions: Documents, *, field: str | None) -> Subsets:
    """Without examples whose `field` is also a question's: ARC's validation repeats two of its test."""
    if field is None:
        return examples.subsets
    asked = {document[field] for documents in questions.subsets.values() for document in documents}
    return {
        subset: [document for document in documents if document[field] not in asked]
        for subset, documents in examples.subsets.items()
    }
