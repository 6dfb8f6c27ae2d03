"""The table of real models: same texts and log-probabilities as transformers, and the room in a GiB of cache."""

from collections.abc import Callable
from pathlib import Path

import pytest
from engines import WHY, asked, engine, expected, largest_difference, tokens_per_gib

from trisect.models import load_model

pytest.importorskip("vllm", reason=WHY)

TEXTS = ("Once upon a time, there was a little girl named", "The dog ran to the", "One day")
NEW = 24
ROUNDING = 2e-4
CASES = ("stories15m", "stories15m/balanced", "stories-moe-22m", "SmolLM2", "gemma-3-270m")


@pytest.mark.parametrize("name", CASES)
def test_a_real_model_writes_the_same_in_vllm_and_leaves_more_room(
    name: str, real: Callable[[str], tuple[Path, Path]]
) -> None:
    dense, small = real(name)
    loaded = load_model(str(small), dtype="float32")
    prompts = [loaded.tokenizer(text)["input_ids"] for text in TEXTS]
    wanted = expected(loaded.model, prompts, new=NEW)
    with engine(small) as llm:
        found, room = asked(llm, prompts, new=NEW), tokens_per_gib(llm)
    with engine(dense) as llm:
        dense_room = tokens_per_gib(llm)
    off = largest_difference(found, wanted)
    print(f"\n| {name} | {len(prompts)}/{len(prompts)} | {off:.1e} | {room:,} ({dense_room:,}) |")
    assert off < ROUNDING
    assert room > dense_room
