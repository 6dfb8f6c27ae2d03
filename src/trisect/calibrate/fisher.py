"""What needs a backward pass: gradients of drawn answers at every layer's output, and the empirical Fisher
information of linear maps, which two baselines read (fwsvd, palu).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from trisect.calibrate.replay import Progress, States, Stream, answering, in_batches
from trisect.calibrate.streams import wide
from trisect.errors import TrisectError
from trisect.models import LayerView, streamed
from trisect.support.clock import stage

BLOCK = 16  # tokens whose products with a change are added up before they are squared


class DrawnAnswers:
    """Windows whose next tokens are drawn from the model itself, and what they say of every layer's output.

    With answers y_s ~ p_s at every position s, g = the gradient of sum_s log p_s(y_s) at a layer's output and
    delta a change of that output, KL(dense || changed) is E <g, delta>^2 / 2 to second order.   [math.md A-6]
    """

    def __init__(
        self, model: nn.Module, views: list[LayerView], ids: Tensor, *, draws: int, batch_size: int | None, seed: int
    ):
        self.model, self.ids, self.draws = model, ids, draws
        batches = in_batches(ids, batch_size=batch_size).batches
        self.stream = Stream.embed(model, views, batches, copies=len(views) * draws)
        """The dense model's states in front of the layer whose turn it is."""
        self._generator = torch.Generator(next(model.parameters()).device).manual_seed(seed)
        onward, inputs = self.stream.copy(), []
        for view in streamed.walk(model):
            inputs.append(onward.hidden.copy())
            onward.advance(view)
        self.loss, gradients = self._draw(views, onward.hidden)
        """Mean loss of the text itself, in nats per predicted token."""
        self._at: dict[int, list[States]] = {}
        for view in streamed.walk(model, backwards=True):
            self._at[view.index] = gradients
            if view.index:
                gradients = self._in_front(view, onward, inputs.pop(), gradients)

    def _draw(self, views: list[LayerView], hidden: States) -> tuple[float, list[States]]:
        """The text's loss, and for every draw the gradients of its answers behind the last layer."""
        gradients = [States(place=hidden.place) for _ in range(self.draws)]
        total, start = 0.0, 0
        for states in hidden:
            ids, start = self.ids[start : start + len(states)].to(states.device), start + len(states)
            found: list[list[Tensor]] = [[] for _ in gradients]
            # One window at a time: logits of a large vocabulary are the largest tensors of all.
            for window, text in zip(states.split(1), ids.split(1), strict=True):
                window = window.detach().requires_grad_()
                with torch.enable_grad(), answering(self.model, views, window):
                    logits = self.model(input_ids=text, use_cache=False).logits
                chances = logits.detach().float().log_softmax(dim=-1)
                total -= chances[:, :-1].gather(-1, text[:, 1:, None]).double().sum().item()
                chances = chances.exp_()
                answers = torch.multinomial(chances[0], self.draws, replacement=True, generator=self._generator)
                for number, drawn in enumerate(answers.T):
                    slope = chances.neg().to(logits.dtype)
                    slope[0, torch.arange(len(drawn), device=drawn.device), drawn] += 1
                    last = number + 1 == self.draws
                    found[number] += torch.autograd.grad(logits, window, slope, retain_graph=not last)
            for states_of, parts in zip(gradients, found, strict=True):
                states_of.append(torch.cat(parts))
        return total / (self.ids.shape[0] * (self.ids.shape[1] - 1)), gradients

    def _in_front(self, view: LayerView, onward: Stream, inputs: States, behind: list[States]) -> list[States]:
        """Gradients at a layer's input from those at its output."""
        found = [States(place=inputs.place) for _ in behind]
        for number, states in enumerate(inputs):
            states = states.detach().requires_grad_()
            with stage("backward"), torch.enable_grad():
                output = onward.through(view, number, states)
                for draw, gradients in enumerate(behind):
                    more = draw + 1 < len(behind)
                    found[draw].append(torch.autograd.grad(output, states, gradients[number], retain_graph=more)[0])
        return found

    def begin(self, view: LayerView) -> None:
        """Run a layer as it is; what changes are measured against."""
        self.after = self.stream.copy()
        self.after.advance(view)

    @torch.no_grad()
    def rise(self, view: LayerView) -> float:
        """Nats per token that the model loses by what was changed in a layer since `begin`."""
        # Products are added up over BLOCK tokens before they are squared: what neighbours do to the same answers
        # adds up, and between distant tokens there is next to nothing but noise.
        total = torch.zeros((), dtype=torch.float64, device=self._generator.device)
        for number, states in enumerate(self.stream.hidden):
            with stage("forward"):
                change = wide(self.stream.through(view, number, states)) - wide(self.after.hidden[number])
            for gradients in self._at[view.index]:
                products = torch.einsum("btd,btd->bt", wide(gradients[number]), change)
                blocks = nn.functional.pad(products, (0, -products.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
                total += blocks.double().sum(dim=-1).square().sum()
        return total.item() / (2 * self.draws * self.ids.numel())

    def finish(self, view: LayerView) -> None:
        """Go on behind the layer."""
        self.stream = self.after
        del self._at[view.index]


def fisher_information(
    model: nn.Module, views: list[LayerView], ids: Tensor, *, progress: Progress | None = None
) -> list[dict[str, Tensor]]:
    """Per layer NAME_fisher (in,): squared gradients summed over the outputs."""
    # One window is one sample, as in FWSVD: the gradient of its mean loss is squared, then averaged.
    streamed.refuse_streamed(model, "A backward pass, which this method's Fisher information takes,")
    sums: list[dict[str, Tensor]] = [{} for _ in views]
    device = next(model.parameters()).device
    with _differentiating(model, views):
        for number, window in enumerate(ids.to(device)):
            logits = model(input_ids=window.unsqueeze(0), use_cache=False).logits
            loss = nn.functional.cross_entropy(logits[0, :-1].float(), window[1:])
            if not loss.isfinite():
                raise TrisectError(
                    "The loss on the calibration text is not finite, so it has no gradient; load the model in a "
                    "wider dtype (--dtype float32), or check the checkpoint."
                )
            loss.backward()
            for view, total in zip(views, sums, strict=True):
                for name in view.linears():
                    gradient, key = view.gradient(name), f"{name}_fisher"
                    assert gradient is not None
                    total[key] = total.get(key, 0.0) + gradient.double().square().sum(dim=1)  # (in, out) -> (in,)
            model.zero_grad(set_to_none=True)
            if progress is not None:
                progress("fisher", number + 1, len(ids))
    return [{name: total / len(ids) for name, total in layer.items()} for layer in sums]


@contextmanager
def _differentiating(model: nn.Module, views: list[LayerView]) -> Iterator[None]:
    """Only the linear maps' weights take gradients; every parameter gets its own flag back."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.requires_grad_(False)
    for module in (module for view in views for module in view.projections()):
        for parameter in module.parameters():
            parameter.requires_grad_(parameter.ndim > 1)
    try:
        with torch.enable_grad():
            yield
    finally:
        model.zero_grad(set_to_none=True)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
