"""What examples and documents need: a folder to work in, and tables that are as before afterwards."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

import tiny_models
from trisect.methods import METHODS
from trisect.models import FAMILIES

WORDS = "once upon a time there was a small model that wanted to be smaller still ".split()


@pytest.fixture(autouse=True)
def tables() -> Iterator[None]:
    """Entries that a test adds are gone after it."""
    kept = [(table, dict(table)) for table in (METHODS, FAMILIES, tiny_models.CONFIGS)]
    yield
    for table, before in kept:
        table.clear()
        table.update(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model with a tokenizer, wide enough for the alignment that users get if they name none."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    sizes = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 512}
    config = transformers.LlamaConfig(
        **{**tiny_models.LLAMA, **sizes, "num_hidden_layers": 2, "max_position_embeddings": 128}
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    tiny_models.shake(model, seed=0)
    model.save_pretrained(folder)
    tiny_models.character_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    draws = torch.randint(0, len(WORDS), (900,), generator=torch.Generator().manual_seed(0))
    path.write_text(" ".join(WORDS[index] for index in draws), encoding="utf-8")
    return path
