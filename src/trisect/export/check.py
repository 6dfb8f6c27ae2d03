"""The exported model against the native one, before its files get their names."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trisect.errors import TrisectError

PACKAGE = "xllamacpp"
Prompt = Sequence[int] | str
FORCE = 1e6
"""A bias that makes sure of a token; probabilities are reported without it."""


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

    def greedy(self, prompt: Prompt, count: int) -> list[int]:
        """The tokens that the model continues with; a text is cut into tokens by llama.cpp."""
        return [int(step["id"]) for step in self._steps(prompt, count)]

    def next_log_probabilities(self, prompt: Prompt, vocabulary: int) -> list[float]:
        """Of every token, behind the prompt."""
        (step,) = self._steps(prompt, 1, logprobs=vocabulary)
        found = {entry["id"]: entry["logprob"] for entry in step["top_logprobs"]}
        return [found[token] for token in range(vocabulary)]

    def log_probabilities(self, tokens: Sequence[int]) -> list[float]:
        """Of each token but the first, behind those before it; the server has to be asked for each."""
        found = []
        for place in range(1, len(tokens)):
            bias = [[tokens[place], FORCE]]
            (step,) = self._steps(tokens[:place], 1, cache_prompt=True, logit_bias=bias)
            assert step["id"] == tokens[place]
            found.append(float(step["logprob"]))
        return found

    def _steps(self, prompt: Prompt, count: int, **settings: Any) -> list[dict[str, Any]]:
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
    """The line that says what went wrong: llama.cpp's first error, or else the last line.

    Its log is written by a thread of its own, so the beginning of its line may stand before one of Python's.
    """
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    mixed = [line for line in lines if "Traceback (most recent" not in line]
    errors = [line for line in mixed if " E " in line or "GGML_ASSERT" in line]
    told = [line for line in mixed if "gguf" in line or "llama" in line]
    return (errors or told or lines[-1:] or [""])[0]


def _main() -> None:
    asked = json.loads(sys.stdin.read())
    server = LlamaCpp(asked["path"], quiet=False)
    print(
        "\n" + json.dumps([server.next_log_probabilities(prompt, asked["vocabulary"]) for prompt in asked["prompts"]])
    )


if __name__ == "__main__":
    _main()


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written, and how near it is to the native model."""

    path: Path
    architecture: str
    head_width: int
    mlp_widths: tuple[int, ...]
    dtype: str
    """Of the weights: torch's name in a folder, llama.cpp's in a GGUF file."""
    difference: float
    """Of float32 logits, relative to the largest one."""
    rounding: float | None
    """The same after rounding to `dtype`; None for float32."""
    llama_cpp: float | None = None
    """Nats between the native model's next token and llama.cpp's; None where that did not run."""
    notes: tuple[str, ...] = ()


TOLERANCE = 1e-4
"""Largest difference of logits, relative to the largest logit, that float32 arithmetic may make."""

LENGTH = 320
REACH = 2048
"""Positions are checked up to here, so that slow rotations show too."""
DIVERGENCE = {"f32": 1e-3, "f16": 1e-2, "q8_0": 0.1}
"""Nats between the native model's next token and llama.cpp's that a kind of weights explains."""
PROMPT = 64
MIXTURE_PROMPTS = 5
"""Rounding may send a token to another expert, and what follows it elsewhere: of so many prompts the median counts."""


@torch.no_grad()
def probe(model: Any, *, seed: int = 0) -> Tensor:
    """Logits (2, t, vocabulary) on random tokens: one text in a row, one spread over many positions."""
    config = model.config
    longest = int(config.max_position_embeddings)
    length = min(LENGTH, longest)
    ids = torch.randint(config.vocab_size, (2, length), generator=torch.Generator().manual_seed(seed))
    positions = torch.stack([torch.arange(length), torch.linspace(0, min(longest, REACH) - 1, length).long()])
    device = next(model.parameters()).device
    # A mask, because transformers takes a jump in the positions for the start of another text.
    out = model(
        input_ids=ids.to(device),
        position_ids=positions.to(device),
        attention_mask=torch.ones_like(ids).to(device),
        use_cache=False,
    )
    logits: Tensor = out.logits.float().cpu()
    return logits


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference, relative to the largest logit of `b`."""
    return float((a - b).abs().max() / b.abs().max())


def check_same(found: Tensor, expected: Tensor, what: str) -> float:
    """The difference, or a refusal to write files that compute something else."""
    apart = difference(found, expected)
    if not apart <= TOLERANCE:  # NaN is refused too
        raise TrisectError(
            f"{what} differs from the compressed model by {apart:.2g} of the largest logit, where rounding "
            f"explains {TOLERANCE:g}: nothing was written. This is a mistake of trisect; please report it "
            "with the receipt.json of the folder."
        )
    return apart


@torch.no_grad()
def check_in_llama_cpp(path: Path, model: Any, kind: str, *, longest: int, mixture: bool = False) -> float | None:
    """Nats between the next token's probabilities; None without llama.cpp. A wrong file is refused."""
    if not is_installed():
        return None
    size = int(model.config.vocab_size)
    prompts = MIXTURE_PROMPTS if mixture else 1
    ids = torch.randint(size, (prompts, min(PROMPT, longest - 1)), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    device = next(model.parameters()).device
    logits = model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False).logits
    expected = logits[:, -1].double().cpu().log_softmax(-1)
    try:
        found = torch.tensor(run_apart(path, ids.tolist(), size)).double().log_softmax(-1)
    except RuntimeError as error:
        raise TrisectError(
            f"llama.cpp cannot run the file, so it was not written: {error}. This is a mistake of trisect; "
            "please report it."
        ) from error
    apart = float((expected.exp() * (expected - found)).sum(dim=-1).median())
    if not apart <= DIVERGENCE[kind]:  # NaN is refused too
        raise TrisectError(
            f"llama.cpp's probabilities of a next token are {apart:.2g} nats from the compressed model's, "
            f"where {kind} explains {DIVERGENCE[kind]:g}: nothing was written. This is a mistake of trisect; "
            "please report it."
        )
    return apart
