"""The empirical Fisher information of every linear map: mean squared gradients of the loss.

The one statistic here that needs a backward pass; two baselines read it (fwsvd, palu).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trisect.calibrate.replay import Progress
from trisect.errors import TrisectError
from trisect.models.streamed import refuse_streamed
from trisect.models.view import LayerView


def fisher_information(
    model: nn.Module, views: list[LayerView], ids: Tensor, *, progress: Progress | None = None
) -> list[dict[str, Tensor]]:
    """Per layer NAME_fisher (in,): squared gradients summed over the outputs.

    One window is one sample, as in FWSVD: the gradient of its mean loss is squared, then averaged.
    """
    refuse_streamed(model, "A backward pass, which this method's Fisher information takes,")
    sums: list[dict[str, Tensor]] = [{} for _ in views]
    device = next(model.parameters()).device
    with _differentiating(model, views):
        for number, window in enumerate(ids):
            _backward(model, window.unsqueeze(0).to(device))
            for view, total in zip(views, sums, strict=True):
                _add_squares(view, total)
            model.zero_grad(set_to_none=True)
            if progress is not None:
                progress("fisher", number + 1, len(ids))
    return [{name: total / len(ids) for name, total in layer.items()} for layer in sums]


def _backward(model: nn.Module, window: Tensor) -> None:
    logits = model(input_ids=window, use_cache=False).logits
    loss = nn.functional.cross_entropy(logits[0, :-1].float(), window[0, 1:])
    if not loss.isfinite():
        raise TrisectError(
            "The loss on the calibration text is not finite, so it has no gradient; load the model in a "
            "wider dtype (--dtype float32), or check the checkpoint."
        )
    loss.backward()


def _add_squares(view: LayerView, total: dict[str, Tensor]) -> None:
    for name in view.linears():
        gradient = view.gradient(name)
        assert gradient is not None
        key, rows = f"{name}_fisher", gradient.double().square().sum(dim=1)  # (in, out) -> (in,)
        total[key] = total[key] + rows if key in total else rows


@contextmanager
def _differentiating(model: nn.Module, views: list[LayerView]) -> Iterator[None]:
    """Only the linear maps' weights take gradients; every parameter gets its own flag back."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.requires_grad_(False)
    for view in views:
        for module in view.projections():
            for parameter in module.parameters():
                parameter.requires_grad_(parameter.ndim > 1)
    try:
        with torch.enable_grad():
            yield
    finally:
        model.zero_grad(set_to_none=True)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
