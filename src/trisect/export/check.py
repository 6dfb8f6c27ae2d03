"""The exported model against the native one, before its files get their names."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trisect.errors import TrisectError
from trisect.export.llama_cpp import is_installed, run_apart


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
    transformers_4: bool = False
    vllm: bool = False
    mlx: bool = False
    """Whether these engines are known to load it."""
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
