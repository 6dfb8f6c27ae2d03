"""The same model, tokens and seed: the same bytes on one device, the same model up to rounding on two."""

from typing import Any

import pytest
import torch

from tiny_models import tiny, tokens
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.pipeline.run import compress

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CALIBRATION = tokens_from_tensor(tokens(16, 40, seed=5))
ASKED = tokens(2, 24, seed=6)


@pytest.fixture(autouse=True)
def exact_products() -> Any:
    """Float32 on a GPU is float32 here."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def compressed(name: str, method: str, device: str) -> Any:
    config = CompressConfig(method=method, ratio=0.25, align=None, refine=method == "a3+")
    return compress(tiny(name).to(device), config, tokens=CALIBRATION).model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(ASKED.to(model.device)).logits
    return found.cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("method", ["a3", "a3+"])
@pytest.mark.parametrize("name", ["llama-gqa", "mpt"])
def test_the_same_seed_gives_the_same_bytes(name: str, method: str, device: str) -> None:
    one, two = (compressed(name, method, device).state_dict() for _ in range(2))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["a3", "a3+", "svd-llm"])
@pytest.mark.parametrize("name", ["llama-gqa", "mpt", "qwen2", "phi3"])
def test_cpu_and_gpu_give_the_same_model_up_to_rounding(name: str, method: str) -> None:
    ours, theirs = (logits(compressed(name, method, device)) for device in ("cpu", "cuda"))
    dense = logits(tiny(name))
    # What rounding moves is small beside what compression moves.
    assert (ours - theirs).norm() <= 1e-3 * (ours - dense).norm()


@pytest.mark.parametrize("device", DEVICES)
def test_a_wide_gram_in_main_memory_gives_the_same_model(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = logits(compressed("llama-gqa", "a3+", device))
    monkeypatch.setattr("trisect.calibrate.moments.WIDE_GRAM", 0)
    away = logits(compressed("llama-gqa", "a3+", device))
    assert torch.allclose(beside, away, rtol=0, atol=1e-3 * beside.abs().max().item())
    assert not torch.equal(beside, away)  # it is rounded on the way, so this was another path
