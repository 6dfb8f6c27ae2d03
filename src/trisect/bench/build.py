"""Random weights of a given shape, made where they are used: never on another device, one model at a time.

Right for speed, wrong for accuracy: matrices are normal, norms are one, and heads keep random frequencies.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from trisect.bench.subject import Subject, stock_model
from trisect.bench.variants import Variant
from trisect.decode import prepare_for_inference
from trisect.errors import TrisectError
from trisect.models import LayerView, layer_views, mark_compressed
from trisect.models.rotary import rotation_of, stored_rates
from trisect.records.shapes import widths_of

DEVIATION = 0.02
"""Of random matrices: activations of the usual widths stay within what 16 bits hold."""
RATE_SHIFT = 0.01
"""How far a folded rate is from a frequency of the model, relatively: values matter little, kinds do."""


def build(
    subject: Subject,
    variant: Variant,
    *,
    device: str,
    dtype: torch.dtype,
    attention: str | None = None,
    seed: int = 0,
) -> Any:
    """A model of the variant's shape, in evaluation mode."""
    with init_empty_weights(include_buffers=False):
        # Buffers are real: rotation tables are computed, not filled with noise.
        model = stock_model(subject.config, dtype=dtype, device="cpu", attention=attention)
    if variant.kind != "dense":
        with _default_dtype(dtype):  # as loading a checkpoint sets it: layers that are made anew take it
            _narrow(model, variant)
    generator = torch.Generator(device).manual_seed(seed)
    if variant.kind == "trisect":
        for view in layer_views(model):
            _choose_rotations(view, model, generator)
    fill(model, device=device, generator=generator)
    model.eval().requires_grad_(False)
    return model if variant.kind == "dense" else prepare_for_inference(model)


def _narrow(model: Any, variant: Variant) -> None:
    views = layer_views(model, own=True)
    original = [widths_of(view.shape()) for view in views]
    # A slice has the first of the variant's layers.
    for view, layer in zip(views, variant.shape.layers, strict=False):
        view.resize(layer)
    if variant.kind != "owned":
        mark_compressed(model, original=original, method=variant.kind, ratio=variant.removed)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def fill(model: nn.Module, *, device: str, generator: torch.Generator) -> None:
    """Give every parameter that has no memory yet random values on `device`; move the buffers there."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = _random(parameter, name, device, generator)
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                assert not buffer.is_meta, f"{type(module).__name__}.{name} has no values"
                module._buffers[name] = buffer.to(device)
    model.tie_weights()  # type: ignore[operator]


@torch.no_grad()
def _random(parameter: nn.Parameter, name: str, device: str, generator: torch.Generator) -> nn.Parameter:
    values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    if parameter.ndim == 1 and name == "weight":
        values.fill_(1.0)
    else:
        values.normal_(std=DEVIATION, generator=generator)
    return nn.Parameter(values, requires_grad=False)


def _choose_rotations(view: LayerView, model: Any, generator: torch.Generator) -> None:
    """Frequencies as a method would have left them: another ascending set for every key head."""
    a = view.attention
    if a.rotary_index is None:
        return
    heads, kept = a.rotary_index.shape
    rotary = getattr(model.get_submodule(view.family.layers.rpartition(".")[0]), "rotary_emb", None)
    available = kept if rotary is None else max(kept, int(rotary.inv_freq.shape[-1]))
    index = random_pairs(heads, kept, available, generator)
    a.rotary_index = index.to(torch.int16)
    if a.rotary_rates is not None:
        rotation = rotation_of(model)
        if rotation is None:
            raise TrisectError("The frequencies of this model change with the length and cannot be folded.")
        rates = rotation.rates.to(index.device)[index].float()
        shift = torch.rand(index.shape, generator=generator, device=index.device)
        a.rotary_rates = stored_rates(rates * (1 + RATE_SHIFT * shift))


def random_pairs(heads: int, kept: int, available: int, generator: torch.Generator) -> Tensor:
    """(heads, kept) different pairs of those available, ascending in each head."""
    order = torch.rand(heads, available, generator=generator, device=generator.device)
    return order.argsort(dim=-1)[:, :kept].sort(dim=-1).values
