"""vLLM in processes of its own: two of them sharing the heads, without the plugin, and as a server."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers
from engines import SETTINGS, WHY, Answer, expected, largest_difference

from narrow_models import narrow
from tiny_models import CONFIGS, LLAMA, character_tokenizer, tokens
from trisect.cli import main
from trisect.models import save_model

pytest.importorskip("vllm", reason=WHY)

PROMPTS = [tokens(1, 30)[0].tolist()]
ROUNDING = 2e-5
SCRIPT = """
import json, sys
{before}
if __name__ == "__main__":
    sys.path.append({here!r})
    from engines import asked, engine
    with engine({folder!r}, **{settings}) as llm:
        {inside}
        print("ANSWER", json.dumps([vars(answer) for answer in asked(llm, {prompts})]))
"""


def run_apart(
    folder: Path, tmp_path: Path, *, settings: dict[str, Any], more: dict[str, str], **lines: str
) -> list[Answer]:
    """The answers of vLLM in another process; `lines` are run there, `before` vLLM and `inside` the engine's life."""
    script, lines = tmp_path / "script.py", {"before": "", "inside": "", **lines}
    where = {"here": str(Path(__file__).parent), "folder": str(folder)}
    script.write_text(SCRIPT.format(**where, **lines, settings=settings, prompts=PROMPTS))
    environment = {**os.environ, **SETTINGS, **more}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=500)
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return [Answer(**answer) for answer in json.loads(lines[0].removeprefix("ANSWER "))]


@pytest.mark.parametrize("name", ["qwen3", "gemma3-one-key", "mixtral"])
def test_two_processes_compute_what_one_does(name: str, tmp_path: Path) -> None:
    model = narrow(name)
    wanted = expected(model, PROMPTS)
    folder = save_model(model, character_tokenizer(), tmp_path / "small", receipt={})
    settings = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    assert largest_difference(run_apart(folder, tmp_path, settings=settings, more={}), wanted) < ROUNDING


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_a_folder_runs_without_trisect_through_the_transformers_backend(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = {**LLAMA, "head_dim": 32}  # vLLM's cache has the dense width here, and 16 is too narrow for its kernel
    monkeypatch.setitem(CONFIGS, family, lambda: getattr(transformers, f"{family}Config")(**wide))
    model = narrow(family)
    wanted = expected(model, PROMPTS)
    folder = save_model(model, character_tokenizer(), tmp_path / "small", receipt={})
    more = {"VLLM_PLUGINS": "", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    found = run_apart(folder, tmp_path, settings={"trust_remote_code": True}, more=more)
    assert largest_difference(found, wanted) < ROUNDING


@pytest.mark.parametrize("name", ["stories15m", "stories-moe-22m"])
def test_a_stock_export_runs_without_trisect(name: str, stock: Callable[[str], Path], tmp_path: Path) -> None:
    folder = stock(name)
    wanted = expected(transformers.AutoModelForCausalLM.from_pretrained(folder), PROMPTS)
    found = run_apart(folder, tmp_path, settings={}, more={"VLLM_PLUGINS": ""})
    assert largest_difference(found, wanted) < ROUNDING


@pytest.fixture(scope="module")
def address(real: Callable[[str], tuple[Path, Path]]) -> Iterator[tuple[str, Path]]:
    """`trisect serve` with SmolLM2, once it answers."""
    _, folder = real("SmolLM2")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    options = ["--port", port, "--enforce-eager", "--dtype", "float32", "--max-model-len", "256"]
    command = [sys.executable, "-m", "trisect", "serve", str(folder), "--", *options]
    server = subprocess.Popen(command, env={**os.environ, **SETTINGS})
    try:
        yield _once_it_answers(server, int(port)), folder
    finally:
        server.send_signal(2)
        server.wait(60)


def _once_it_answers(server: subprocess.Popen[bytes], port: int) -> str:
    for _ in range(400):
        assert server.poll() is None, "the server ended"
        with socket.socket() as asked_for:
            if asked_for.connect_ex(("127.0.0.1", port)) == 0:
                return f"http://127.0.0.1:{port}/v1"
        time.sleep(1)
    raise AssertionError("the server does not answer")


def test_the_server_answers_the_openai_client(address: tuple[str, Path]) -> None:
    from openai import OpenAI

    url, folder = address
    client, name = OpenAI(base_url=url, api_key="none"), str(folder)
    how: dict[str, Any] = {"model": name, "temperature": 0, "max_tokens": 12}
    prompt = "The capital of France is"
    whole = client.completions.create(prompt=prompt, **how).choices[0].text
    pieces = [chunk.choices[0].text for chunk in client.completions.create(prompt=prompt, stream=True, **how)]
    assert "".join(pieces) == whole
    assert len(pieces) > 1
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    (wanted,) = expected(model, [tokenizer(prompt)["input_ids"]], new=12)
    assert whole == tokenizer.decode(wanted.tokens, skip_special_tokens=True)

    messages = [{"role": "user", "content": "What is the capital of France?"}]
    said = client.chat.completions.create(messages=messages, **how).choices[0].message.content  # type: ignore[call-overload]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    (wanted,) = expected(model, [ids], new=12)
    assert said
    assert tokenizer.decode(wanted.tokens, skip_special_tokens=True).startswith(said)


def test_perplexity_and_tasks_are_the_same_by_both_backends(
    real: Callable[[str], tuple[Path, Path]], assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import local_tasks

    monkeypatch.setattr("trisect.evaluate.tasks.load_task", local_tasks.load_locally)
    for name, value in {**SETTINGS, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
        monkeypatch.setenv(name, value)
    _, folder = real("stories15m")
    text = str(assets / "data" / "tinystories" / "tinystories.txt")
    what = ["--data", text, "--length", "128", "--windows", "4", "--tasks", "openbookqa", "--limit", "8"]
    found = []
    for backend in ("transformers", "vllm"):
        file = tmp_path / f"{backend}.json"
        assert main(["eval", str(folder), *what, "--dtype", "float32", "--backend", backend, "--json", str(file)]) == 0
        found.append(json.loads(file.read_text()))
    assert found[1]["backend"] == "vllm"
    assert found[1]["perplexity"] == pytest.approx(found[0]["perplexity"], rel=1e-4)
    values = [{task: score["value"] for task, score in each["tasks"]["scores"].items()} for each in found]
    assert values[0] == values[1]
