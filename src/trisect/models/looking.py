"""What a model is, without changing it: its shape, a fingerprint, and whether its numbers can be used."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trisect.errors import TrisectError
from trisect.models.families import Family, family_for
from trisect.models.linear import matrices_of, refuse_nan
from trisect.models.quantized import is_linear
from trisect.models.view import LayerView, layer_views
from trisect.records.shapes import ModelShape

SAMPLE = 64
"""Weights of each projection that go into a fingerprint."""


def family_of(model: Any) -> Family:
    """The family record of a loaded model."""
    return family_for(model.config)


def shape_of(model: nn.Module) -> ModelShape:
    """Sizes of the model as it stands."""
    views = layer_views(model)
    parameters = list(model.parameters())
    inside = [p for view in views for module in view.projections() for p in module.parameters()]
    stored = getattr(model, "stored_dtype", None) or next(p for p in parameters if p.is_floating_point()).dtype
    return ModelShape(
        layers=tuple(view.shape() for view in views),
        other_parameters=sum(p.numel() for p in parameters) - sum(p.numel() for p in inside),
        bytes_per_element=stored.itemsize,
    )


@torch.no_grad()
def round_as_stored(model: Any, module: nn.Module) -> None:
    """Round a part of a model to the dtype that it will be saved in: what is measured is what is saved."""
    stored = getattr(model, "stored_dtype", None)
    for parameter in module.parameters() if stored is not None else ():
        if parameter.dtype != stored and not parameter.is_meta:
            parameter.copy_(parameter.to(stored))


def zeros_of(model: nn.Module) -> int:
    """Weights of the decoder's linear maps that are zero; biases do not count."""
    modules: list[Any] = [module for view in layer_views(model) for module in view.projections()]
    return sum(int((weight == 0).sum()) for module in modules for weight in matrices_of(module))


def check_finite(model: Any) -> None:
    """Refuse a checkpoint with NaN or inf anywhere, by the parameter's name."""
    for name, parameter in model.named_parameters():
        refuse_nan(parameter, name)


def check_tokens(model: Any, ids: Tensor) -> None:
    """Refuse tokens the model has no embedding for."""
    rows = model.get_input_embeddings().weight.shape[0]
    if int(ids.max()) >= rows or int(ids.min()) < 0:
        raise TrisectError(
            f"The tokens go from {int(ids.min())} to {int(ids.max())}, but the model knows 0 to {rows - 1}; "
            "they were made with another tokenizer."
        )


def fingerprint(model: nn.Module) -> str:
    """A hash of shapes and some weights of every layer: the same in memory and still in its files."""
    digest = hashlib.sha256(repr(shape_of(model).layers).encode())
    for view in layer_views(model):
        for module in view.projections():
            transposed = is_linear(module)  # others are stored as (in, out), in groups, or as experts
            for weight in matrices_of(module):
                sample = _corner(model, view, weight, transposed=transposed).flatten()[:SAMPLE].float().cpu()
                digest.update(sample.contiguous().numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def training_flags_kept(model: nn.Module) -> Iterator[None]:
    """The model may be switched to evaluation inside; every module gets its own training flag back."""
    training = [module for module in model.modules() if module.training]
    try:
        yield
    finally:
        for module in training:
            module.training = True


PROBE = "probe.json"
"""The file of a saved folder with what `probe_of` gives."""
PROMPT, ANSWER = 24, 4
"""Tokens of a probe."""
STREAMED_ANSWER = 2
"""Where every token of the answer reads all layers from the disk."""


@torch.no_grad()
def probe_of(model: Any) -> dict[str, Any]:
    """A few tokens and what the model makes of them, for whoever loads its files to compare with.

    `logprobs` are those of every token behind the first; the model chose the answer's tokens itself.
    """
    config = model.config.get_text_config()
    ids = torch.randint(config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    start = getattr(config, "bos_token_id", None)
    ids[0, 0] = start if isinstance(start, int) and start < config.vocab_size else ids[0, 0]
    embedding = model.get_input_embeddings().weight
    ids = ids.to(embedding.device)
    with training_flags_kept(model):
        model.eval()
        for _ in range(STREAMED_ANSWER if hasattr(model, "layer_store") else ANSWER):
            logits = model(input_ids=ids, use_cache=False).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    found = logits.float().log_softmax(-1)
    logprobs = found.gather(-1, ids[:, 1:, None]).flatten().tolist()
    dtype = str(embedding.dtype).removeprefix("torch.")
    return {
        "dtype": dtype,
        "prompt": ids[0, :PROMPT].tolist(),
        "answer": ids[0, PROMPT:].tolist(),
        "logprobs": logprobs,
    }


def _corner(model: Any, view: LayerView, weight: Tensor, *, transposed: bool) -> Tensor:
    """The first elements of a weight in (in, out) order, without touching the rest."""
    rows = -(-SAMPLE // (weight.shape[0] if transposed else weight[0].numel()))
    key: Any = (slice(None), slice(rows)) if transposed else slice(rows)
    if weight.is_meta:
        name = next(name for name, parameter in view.layer.named_parameters() if parameter is weight)
        corner: Tensor = model.layer_store.peek(view.index, name, key)
    else:
        corner = weight.detach()[key]
    return corner.T if transposed else corner
