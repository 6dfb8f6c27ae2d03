"""llama.cpp on one file, here or in a process of its own; that process needs nothing of trisect, nor torch."""

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "xllamacpp"
Prompt = Sequence[int] | str


class LlamaCpp:
    """A server around one file, one request at a time; with a float32 cache only the weights are rounded."""

    def __init__(self, path: str | Path, *, context: int = 0, threads: int = 1, quiet: bool = True):
        """`context` in tokens; 0 for as many as the file says."""
        import xllamacpp

        settings = xllamacpp.CommonParams()
        settings.model.path = str(path)
        settings.n_ctx, settings.n_parallel, settings.n_gpu_layers = context, 1, 0
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
        settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        settings.warmup = settings.fit_params = settings.enable_chat_template = False
        if quiet:
            settings.verbosity = -1
        self.server = xllamacpp.Server(settings)

    def next_log_probabilities(self, prompt: Prompt, vocabulary: int) -> list[float]:
        """Of every token, behind the prompt."""
        (step,) = self.steps(prompt, 1, logprobs=vocabulary)
        found = {entry["id"]: entry["logprob"] for entry in step["top_logprobs"]}
        return [found[token] for token in range(vocabulary)]

    def steps(self, prompt: Prompt, count: int, **settings: Any) -> list[dict[str, Any]]:
        """What the server says of each new token, greedily; a text is cut into tokens by llama.cpp."""
        asked = {"logprobs": 1, "cache_prompt": False, "temperature": 0.0, "ignore_eos": True, **settings}
        prompt = prompt if isinstance(prompt, str) else list(prompt)
        answer = self.server.handle_completions({"prompt": prompt, "max_tokens": count, **asked})
        if "choices" not in answer:
            raise ValueError(f"llama.cpp refuses: {answer.get('message') or answer}")
        steps: list[dict[str, Any]] = answer["choices"][0]["logprobs"]["content"]
        return steps


def is_installed() -> bool:
    return find_spec(PACKAGE) is not None


def run_apart(path: Path, prompts: Sequence[Sequence[int]], vocabulary: int) -> list[list[float]]:
    """`next_log_probabilities` in a process of its own; RuntimeError with llama.cpp's words if that fails."""
    asked = json.dumps({"path": str(path), "prompts": [list(prompt) for prompt in prompts], "vocabulary": vocabulary})
    command = [sys.executable, "-c", Path(__file__).read_text(encoding="utf-8")]
    done = subprocess.run(command, input=asked, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(reason(done.stderr) or f"exit {done.returncode}")
    answer: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return answer


def reason(log: str) -> str:
    """The line that says what went wrong: llama.cpp's first error, or else the last line."""
    # Its log is written by a thread of its own, so the beginning of its line may stand before one of Python's.
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    mixed = [line for line in lines if "Traceback (most recent" not in line]
    errors = [line for line in mixed if " E " in line or "GGML_ASSERT" in line]
    told = [line for line in mixed if "gguf" in line or "llama" in line]
    return (errors or told or lines[-1:] or [""])[0]


if __name__ == "__main__":
    asked = json.loads(sys.stdin.read())
    server = LlamaCpp(asked["path"], quiet=False)
    answers = [server.next_log_probabilities(prompt, asked["vocabulary"]) for prompt in asked["prompts"]]
    print("\n" + json.dumps(answers))
