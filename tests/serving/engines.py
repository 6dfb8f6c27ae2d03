"""vLLM inside a test: one engine at a time in this process, and what transformers says to the same tokens."""

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
"""For every process with vLLM in it."""
WHY = "needs vLLM: `make test-serving` makes an environment of its own"
NEW = 8


@dataclass(frozen=True)
class Answer:
    """Tokens behind a prompt, and the log-probability of every token but the first."""

    tokens: list[int]
    logprobs: list[float]


@contextmanager
def engine(folder: Path, **settings: Any) -> Iterator[Any]:
    """vLLM's LLM around a folder, float32 and eager; all that it holds is gone afterwards."""
    os.environ |= {**SETTINGS, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    usual = {"dtype": "float32", "enforce_eager": True, "max_model_len": 100, "max_num_seqs": 8}
    try:
        llm = LLM(model=str(folder), **{**usual, **settings})
        yield llm
        del llm
    finally:
        cleanup_dist_env_and_memory()
        gc.collect()


def asked(llm: Any, prompts: Sequence[list[int]], *, new: int = NEW) -> list[Answer]:
    """Greedy answers to prompts of token ids."""
    from vllm import SamplingParams

    how = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    found = llm.generate([{"prompt_token_ids": ids} for ids in prompts], how, use_tqdm=False)
    answers = []
    for ids, output in zip(prompts, found, strict=True):
        (choice,) = output.outputs
        rows = [*output.prompt_logprobs[1:], *choice.logprobs]
        tokens = [*ids[1:], *choice.token_ids]
        logprobs = [row[token].logprob for row, token in zip(rows, tokens, strict=True)]
        answers.append(Answer(list(choice.token_ids), logprobs))
    return answers


@torch.no_grad()
def expected(model: Any, prompts: Sequence[list[int]], *, new: int = NEW) -> list[Answer]:
    """The same by transformers, without a cache."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        for _ in range(new):
            ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        found = model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)
        logprobs = found.gather(-1, ids[:, 1:, None]).flatten().tolist()
        answers.append(Answer(ids[0, len(prompt) :].tolist(), logprobs))
    return answers


def largest_difference(one: Sequence[Answer], other: Sequence[Answer]) -> float:
    """Of log-probabilities, where both wrote the same."""
    assert [answer.tokens for answer in one] == [answer.tokens for answer in other]
    pairs = [zip(a.logprobs, b.logprobs, strict=True) for a, b in zip(one, other, strict=True)]
    return max(abs(x - y) for pair in pairs for x, y in pair)


def tokens_per_gib(llm: Any) -> int:
    """Tokens that the KV cache of one GiB has room for."""
    config = llm.llm_engine.vllm_config.cache_config
    return int(config.num_gpu_blocks * config.block_size)
