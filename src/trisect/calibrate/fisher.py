"""What needs a backward pass: gradients of drawn answers at every layer's output, what they say of its channels,
and the empirical Fisher information of linear maps, which two baselines read (fwsvd, palu).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trisect.calibrate.replay import Progress, States, Stream, answering, in_batches, in_main_memory
from trisect.calibrate.streams import wide
from trisect.errors import TrisectError
from trisect.models import LayerView, streamed
from trisect.solve.ridge import gram
from trisect.support.clock import stage
from trisect.support.distributed import all_reduce, world_size

BLOCK = 16  # tokens whose products with a change are added up before they are squared
METRIC_TOKENS = 1 << 15  # most tokens whose gradients a metric is made of,
METRIC_SHARE = 2  # and one window in so many: more would gain little for its time
DAMPING = 0.5
LARGEST = 10.0  # times the median: no token's gradient counts more than that
NOISE = 1 << 20  # numbers, of which every answer takes a stretch as long as the vocabulary
TOGETHER = 256  # rows of logits that answers are drawn of at a time


class Draws:
    """Tokens drawn from softmax(logits): the same on every machine, but where two are as good as equal."""

    # The largest of logits and Gumbel noise. Numbers that are compared with sums of chances would not do: a vocabulary
    # has thousands of tokens so unlikely that rounding decides between neighbours, once in some hundred answers.
    def __init__(self, seed: int):
        self._generator = torch.Generator().manual_seed(seed)  # on the host, so that devices draw alike
        self._noise: Tensor | None = None

    def __call__(self, logits: Tensor, count: int) -> Tensor:
        """So many for each row of logits (n, vocabulary): (n, count)."""
        n, vocabulary = logits.shape
        if self._noise is None:
            uniform = torch.rand(NOISE + vocabulary, dtype=torch.float64, generator=self._generator)
            self._noise = uniform.log_().neg_().log_().neg_().float().to(logits.device)
        starts = torch.randint(NOISE, (n, count), generator=self._generator).split(TOGETHER)
        found = []
        for some, some_starts in zip(logits.float().split(TOGETHER), starts, strict=True):
            noise = (torch.stack([self._noise[at : at + vocabulary] for at in one]) for one in some_starts.T.tolist())
            found.append(torch.stack([(some + each).argmax(dim=-1) for each in noise], dim=1))
        return torch.cat(found)


class OutputGradients:
    """Windows whose next tokens are drawn from the model itself, and their gradients at every layer's output.

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
        self._drawn = Draws(seed)
        self._onward, self._inputs = self.stream.copy(), list[States]()
        for view in streamed.walk(model):
            self._inputs.append(self._onward.hidden.copy())
            self._onward.advance(view)
        self.loss, self._last = self._draw(views, self._onward.hidden)
        """Mean loss of the text itself, in nats per predicted token."""

    def backward(self) -> Iterator[tuple[LayerView, States, list[States]]]:
        """Last layer first: a layer, its inputs, and for every draw the gradients at its output."""
        gradients = self._last
        for view in streamed.walk(self.model, backwards=True):
            inputs = self._inputs.pop()
            yield view, inputs, gradients
            if view.index:
                gradients = self._in_front(view, self._onward, inputs, gradients)

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
                answers = self._drawn(logits.detach()[0], self.draws)
                for number, answer in enumerate(answers.T):
                    slope = chances.neg().to(logits.dtype)
                    slope[0, torch.arange(len(answer), device=answer.device), answer] += 1
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


class DrawnAnswers(OutputGradients):
    """What a change of one layer's output costs, from gradients that are kept of all layers."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._at = {view.index: gradients for view, _, gradients in self.backward()}

    def begin(self, view: LayerView) -> None:
        """Run a layer as it is; what changes are measured against."""
        self.after = self.stream.copy()
        self.after.advance(view)

    @torch.no_grad()
    def rise(self, view: LayerView) -> float:
        """Nats per token that the model loses by what was changed in a layer since `begin`."""
        # Products are added up over BLOCK tokens before they are squared: what neighbours do to the same answers
        # adds up, and between distant tokens there is next to nothing but noise.
        total = torch.zeros((), dtype=torch.float64, device=next(self.model.parameters()).device)
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


def output_metrics(
    model: nn.Module,
    views: list[LayerView],
    ids: Tensor,
    *,
    batch_size: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[int, Tensor]:
    """Per layer a root (D, D) of how much the answers feel of each direction of its output, in main memory.  [F-9]"""
    few = ids[:: max(METRIC_SHARE, -(-ids.numel() // METRIC_TOKENS))]
    answers = OutputGradients(model, views, few, draws=1, batch_size=batch_size, seed=seed)
    roots = {}
    for view, inputs, (gradients,) in answers.backward():
        lengths = [wide(states).norm(dim=-1, keepdim=True) for states in inputs]
        sizes = [wide(slopes).norm(dim=-1, keepdim=True) * h for slopes, h in zip(gradients, lengths, strict=True)]
        # Of all batches, or results would hang on how many windows go together.
        limit = LARGEST * torch.cat([size.flatten() for size in sizes]).median()
        total = None
        for slopes, h, size in zip(gradients, lengths, sizes, strict=True):
            scale = h * (limit / size.clamp(min=torch.finfo(size.dtype).tiny)).clamp(max=1.0)
            total = gram((wide(slopes) * scale).reshape(-1, slopes.shape[-1]), total)
        assert total is not None
        if world_size() > 1:  # the same in all processes, to the last bit
            total = all_reduce({"sum": total})["sum"].div_(world_size())
        roots[view.index] = in_main_memory(_damped_root(total, view.index))
        if progress is not None:
            progress("gradients", len(roots), len(views))
    return roots


def _damped_root(total: Tensor, layer: int) -> Tensor:
    """Cholesky factor of a second moment with mean eigenvalue one, drawn towards the identity."""
    mean = total.diagonal().mean()
    if not mean.isfinite():
        instead = "load the model in a wider dtype (--dtype float32), or add --without fisher"
        raise TrisectError(f"Gradients behind layer {layer} hold NaN or inf; {instead}.")
    damped = total * ((1 - DAMPING) / mean.clamp(min=torch.finfo(total.dtype).tiny))
    damped.diagonal().add_(DAMPING)
    return torch.linalg.cholesky(damped).float()


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
                instead = "load the model in a wider dtype (--dtype float32), or check the checkpoint"
                raise TrisectError(f"The loss on the calibration text is not finite, so it has no gradient; {instead}.")
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
