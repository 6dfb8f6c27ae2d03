"""Which documents of a local task are asked, and which are shown as examples: never the same ones."""

import math
from dataclasses import dataclass
from typing import Any

from trisect.errors import TrisectError
from trisect.evaluate.task_documents import Documents, Fields, read_documents
from trisect.evaluate.task_table import HELD_OUT, Request, Task

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
