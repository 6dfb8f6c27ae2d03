"""The hub's real libraries against a hub on this machine: texts and models come, or it is said why not."""

import gzip
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import dropwhile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hub_server import Hub, Repository, reserved_port, serving

from narrow_models import narrow
from tiny_models import character_tokenizer, save_tiny
from trisect.models import save_model

SCRIPT = Path(__file__).with_name("on_loopback.py")
SOURCE = Path(__file__).resolve().parents[2] / "src"
SMALL = ["--ratio", "0.25", "--method", "a3", "--align", "none", "--length", "32"]
pytestmark = pytest.mark.slow
FOREVER = 10**6


def rows(subject: str, count: int = 700) -> list[str]:
    return [f"{subject} number {number} is about this and that" for number in range(count)]


def parquet(texts: list[str]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file, row_group_size=100)
    return file.getvalue()


def parquet_rows(rows: list[dict[str, object]]) -> bytes:
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


def json_lines(texts: list[str]) -> bytes:
    return gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())


def one_split(config: str, path: str, content: bytes) -> Repository:
    """A dataset whose card names its files, as most have it."""
    split = f"- config_name: {config}\n  data_files:\n  - split: train\n    path: {path}\n"
    return Repository(files={"README.md": f"---\nconfigs:\n{split}---\n".encode(), path: content})


@pytest.fixture(scope="module")
def model_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = save_tiny(tmp_path_factory.mktemp("model") / "tiny")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def hub(model_files: dict[str, bytes], port: int) -> Iterator[Hub]:
    c4 = {
        "en/c4-train.00000-of-01024.json.gz": json_lines(rows("page")),
        "en/c4-validation.00000-of-00008.json.gz": json_lines(rows("other page")),
    }
    datasets = {
        "allenai/c4": Repository(files=c4),
        "HuggingFaceFW/fineweb-edu": one_split("sample-10BT", "sample/10BT/000_00000.parquet", parquet(rows("lesson"))),
        "wikimedia/wikipedia": one_split("20231101.en", "20231101.en/train-00000.parquet", parquet(rows("article"))),
    }
    with serving(Hub(datasets=datasets, models={"org/tiny": Repository(files=dict(model_files))}), port) as found:
        yield found


Done = subprocess.CompletedProcess[str]
Typed = Callable[..., Done]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """The hub's; without the fixture `hub` nothing answers there."""
    with reserved_port() as found:
        yield found


@pytest.fixture(scope="module")
def typed(port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Typed]:
    """A function that runs a command in a process of its own, with empty caches, and says how it ended."""
    home = tmp_path_factory.mktemp("hub") / "home"
    settings = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(home), "PYTHONPATH": str(SOURCE)}
    settings |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_UPDATE_DOWNLOAD_COUNTS": "0", "HF_HUB_DISABLE_XET": "1"}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRISECT_")) and "proxy" not in k.lower()}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, SCRIPT], env={**kept, **settings}, text=True, **pipes) as process:

        def run(folder: Path, *words: object) -> Done:
            shutil.rmtree(home, ignore_errors=True)
            files = {name: folder / f"{name}.txt" for name in ("stdout", "stderr")}
            for file in files.values():
                file.unlink(missing_ok=True)
            job = {"words": [*map(str, words)], "folder": str(folder), **{name: str(f) for name, f in files.items()}}
            print(json.dumps(job), file=process.stdin, flush=True)
            code = int(process.stdout.readline())
            return Done(words, code, **{name: file.read_text() for name, file in files.items()})

        yield run
        process.kill()


def compressed(typed: Typed, folder: Path, model: str, *more: object) -> Done:
    return typed(folder, "compress", model, "-o", folder / "out", *SMALL, *more)


def from_calibrating(done: Done) -> list[str]:
    """The lines of a run from the one on that says what it is calibrated on."""
    return list(dropwhile(lambda line: not line.startswith("Calibrating"), done.stdout.splitlines()))


def measured(folder: Path) -> list[str]:
    receipt = json.loads((folder / "out" / "receipt.json").read_text())
    assert receipt["perplexity"] == receipt["perplexities"][0]
    return [row["after"]["data"] for row in receipt["perplexities"]]


def test_a_model_and_the_default_mixture_come_from_the_hub_and_each_text_is_measured(
    hub: Hub, typed: Typed, tmp_path: Path
) -> None:
    done = compressed(typed, tmp_path, "org/tiny", "--quiet")
    assert done.returncode == 0, done.stderr
    first, *others = from_calibrating(done)
    line = r"Calibrating on c4, fineweb-edu and wikipedia: (\d+) windows of 32 tokens from 3 texts\."
    found = re.fullmatch(line, first)
    assert found is not None, first
    assert int(found[1]) == 256
    texts = ["held-out c4", "held-out fineweb-edu", "held-out wikipedia", "builtin"]
    assert measured(tmp_path) == texts
    for text in texts:
        assert any(f"perplexity, {text} (8 x 32)" in line for line in others), done.stdout


def test_a_text_of_the_default_mixture_that_cannot_be_read_is_left_out_and_named(
    hub: Hub, typed: Typed, tmp_path: Path
) -> None:
    del hub.datasets["wikimedia/wikipedia"]
    hub.datasets["HuggingFaceFW/fineweb-edu"].gated = True
    hub.datasets["Salesforce/wikitext"] = Repository(
        files={
            "README.md": b"---\nconfigs:\n- config_name: wikitext-2-raw-v1\n  data_files:\n"
            b"  - split: test\n    path: wikitext-2-raw-v1/test-*\n---\n",
            "wikitext-2-raw-v1/test-0.parquet": parquet(rows("entry")),
        }
    )
    done = compressed(typed, tmp_path, "org/tiny", "--samples", 16)
    assert done.returncode == 0, done.stderr
    first, second, third, *_ = from_calibrating(done)
    assert first == "Calibrating on c4: 16 windows of 32 tokens from 1 text."
    assert re.search(r"fineweb-edu is left out.*gated.*hf auth login", second)
    assert "wikipedia is left out" in third
    assert measured(tmp_path) == ["held-out c4", "wikitext2"]


def test_a_download_that_breaks_off_once_is_taken_up_again(hub: Hub, typed: Typed, tmp_path: Path) -> None:
    hub.models["org/tiny"].breaks_off = hub.datasets["allenai/c4"].breaks_off = 1
    done = compressed(typed, tmp_path, "org/tiny", "--calibration", "c4", "--samples", 8, "--eval", "none")
    assert done.returncode == 0, done.stderr
    assert hub.models["org/tiny"].breaks_off == hub.datasets["allenai/c4"].breaks_off == 0


@pytest.mark.parametrize(
    ("repository", "words"),
    [
        ({"gated": True}, r"org/tiny is gated.*hf auth login"),
        ({"breaks_off": FOREVER}, r"download of org/tiny broke off: type the same again"),
        (None, r"no model org/tiny.*check the id"),
    ],
)
def test_a_model_that_does_not_come_is_one_line_with_what_to_do(
    hub: Hub, typed: Typed, tmp_path: Path, repository: dict[str, int] | None, words: str
) -> None:
    files = hub.models.pop("org/tiny").files
    if repository is not None:
        hub.models["org/tiny"] = Repository(files=files, **repository)
    done = compressed(typed, tmp_path, "org/tiny")
    assert_one_line(done, words)
    assert len(hub.asked) < 40  # nothing is tried for ever
    assert not (tmp_path / "out").exists()


def test_a_hub_that_cannot_be_reached_is_tried_once_and_said(typed: Typed, tmp_path: Path) -> None:
    done = typed(tmp_path, "compress", "org/tiny", "-o", tmp_path / "out", *SMALL)
    assert_one_line(done, r"hub cannot be reached.*org/tiny.*a folder or a \.gguf file")
    assert "Retrying" not in done.stderr


def test_without_a_hub_the_stopgap_says_that_it_is_one(typed: Typed, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    done = typed(tmp_path, "compress", folder, "-o", tmp_path / "out", *SMALL, "--samples", 16)
    assert done.returncode == 0, done.stderr
    first, *_ = from_calibrating(done)
    assert re.search(r"on synthetic: 16 windows of 32 tokens.*stopgap.*--calibration your_text\.txt", first)
    assert "Retrying" not in done.stderr
    assert measured(tmp_path) == ["held-out synthetic", "builtin"]


@pytest.mark.parametrize(
    ("repository", "words"),
    [
        (None, r"dataset c4 \(allenai/c4\).*text file.*TRISECT_DATA"),
        ({"breaks_off": FOREVER}, r"dataset c4.*could not be loaded"),
    ],
)
def test_a_dataset_that_does_not_come_is_one_line_with_what_to_do(
    hub: Hub, typed: Typed, tmp_path: Path, repository: dict[str, int] | None, words: str
) -> None:
    files = hub.datasets.pop("allenai/c4").files
    if repository is not None:
        hub.datasets["allenai/c4"] = Repository(files=files, **repository)
    done = compressed(typed, tmp_path, "org/tiny", "--calibration", "c4")
    assert_one_line(done, words)
    assert len(hub.asked) < 60


def test_a_task_comes_from_the_hub_as_lm_eval_loads_it(hub: Hub, typed: Typed, tmp_path: Path) -> None:
    choices = {"text": ["fog", "sand", "ice", "fire"], "label": ["A", "B", "C", "D"]}
    question = {"id": "1", "question_stem": "A marsh often has", "choices": choices, "answerKey": "A"}
    splits = ("train", "validation", "test")
    files = {f"main/{split}-0.parquet": parquet_rows([question] * 3) for split in splits}
    listed = "".join(f"  - split: {split}\n    path: main/{split}-*\n" for split in splits)
    card = f"---\nconfigs:\n- config_name: main\n  data_files:\n{listed}---\n"
    hub.datasets["allenai/openbookqa"] = Repository(files={"README.md": card.encode(), **files})
    folder = save_tiny(tmp_path / "tiny")
    character_tokenizer(bos_token="~").save_pretrained(folder)
    words = ["eval", folder, "--tasks", "openbookqa:0", "--limit", "2", "--json", tmp_path / "e.json"]
    done = typed(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    score = json.loads((tmp_path / "e.json").read_text())["tasks"]["scores"]["openbookqa"]
    assert (score["questions"], score["available"], score["source"]) == (2, 3, "allenai/openbookqa")


def test_tasks_without_a_hub_are_one_line_before_the_model_is_loaded(typed: Typed, tmp_path: Path) -> None:
    done = typed(tmp_path, "eval", "org/tiny", "--tasks", "quick")
    assert_one_line(done, r"lm-eval could not load winogrande.*Hugging Face hub")
    assert "Retrying" not in done.stderr


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A native folder."""
    return save_model(
        narrow("llama-gqa"), character_tokenizer(), tmp_path_factory.mktemp("small") / "small", receipt={}
    )


def sent(hub: Hub) -> int:
    return sum(line.startswith("PUT ") for line in hub.asked)


@pytest.mark.parametrize(("options", "private"), [((), True), (("--public",), False)])
def test_a_pushed_folder_is_on_the_hub_byte_for_byte_and_loads_from_there(
    hub: Hub, typed: Typed, small: Path, tmp_path: Path, options: tuple[str, ...], private: bool
) -> None:
    hub.uploads_break_off = 1  # and is taken up again
    done = typed(tmp_path, "push", small, "org/small", *options)
    assert done.returncode == 0, done.stderr
    found = hub.models["org/small"]
    assert found.private == private
    card = found.files.pop("README.md").decode()
    assert card == (small / "README.md").read_text().replace("THIS_FOLDER", "org/small")
    assert found.files == {path.name: path.read_bytes() for path in small.iterdir() if path.name != "README.md"}
    done = typed(tmp_path, "inspect", "org/small")
    assert done.returncode == 0, done.stderr


def test_a_push_that_is_cut_off_says_so_and_the_same_again_sends_no_large_file_twice(
    hub: Hub, typed: Typed, small: Path, tmp_path: Path
) -> None:
    hub.uploads_break_off = FOREVER
    done = typed(tmp_path, "push", small, "org/small")
    assert_one_line(done, r"upload of .*small to org/small broke off.*type the same again")
    assert hub.models["org/small"].files == {}
    hub.uploads_break_off, hub.commits_fail = 0, True
    assert_one_line(typed(tmp_path, "push", small, "org/small"), r"hub refuses org/small.*commit was refused")
    tried, hub.commits_fail = sent(hub), False
    assert typed(tmp_path, "push", small, "org/small").returncode == 0
    assert sent(hub) == tried
    assert "model.safetensors" in hub.models["org/small"].files


def test_a_hub_that_does_not_let_write_is_one_line(hub: Hub, typed: Typed, small: Path, tmp_path: Path) -> None:
    hub.read_only = True
    assert_one_line(typed(tmp_path, "push", small, "org/small"), r"hub refuses org/small.*hf auth login")
    assert "org/small" not in hub.models


def assert_one_line(done: Done, words: str) -> None:
    """An error as users see it; the hub's own libraries may have talked before."""
    assert done.returncode == 2, done.stderr
    *_, last = done.stderr.strip().splitlines()
    assert last.startswith("error: ")
    assert re.search(words, last), last
    assert "Traceback" not in done.stderr
