"""What answers feel of a layer's output channels: against gradients of stock transformers, and brute force."""

import copy

import pytest
import torch
from torch import Tensor, nn

from tiny_models import tiny, tokens
from trisect.calibrate import fisher
from trisect.errors import TrisectError
from trisect.methods.a3plus import ROW_RIDGE, choose_neurons
from trisect.methods.method import Options
from trisect.models import layer_views
from trisect.records.parts import METRIC
from trisect.solve.ridge import Regression


def gradients_of_drawn_answers(model: nn.Module, ids: Tensor, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Per layer its input and the gradient at its output (n, D), all by one backward pass of the whole model."""
    generator, seen = torch.Generator().manual_seed(seed), list[list[tuple[Tensor, Tensor]]]()
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    kept: list[tuple[Tensor, Tensor]] = []
    for layer in layers:
        layer.register_forward_hook(
            lambda m, args, out: kept.append((args[0].detach(), out[0] if isinstance(out, tuple) else out))
        )
    for window in ids.split(1):
        kept.clear()
        chances = model(window, use_cache=False).logits.log_softmax(dim=-1)[0]
        answers = fisher.drawn(chances.detach().float().exp(), 1, generator)
        slopes = torch.autograd.grad(chances.gather(-1, answers).sum(), [out for _, out in kept])
        seen.append([(states.flatten(0, 1), g.flatten(0, 1)) for (states, _), g in zip(kept, slopes, strict=True)])
    return [tuple(map(torch.cat, zip(*layer, strict=True))) for layer in zip(*seen, strict=True)]


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "gemma2", "mpt", "falcon", "qwen2_moe"])
def test_a_metric_is_the_second_moment_of_gradients_times_the_stream(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fisher, "METRIC_SHARE", 1)
    model, ids = tiny(name, dtype=torch.float64), tokens(6, 12)
    model.config._experts_implementation = "eager"  # grouped products know no float64
    expected = gradients_of_drawn_answers(copy.deepcopy(model), ids, seed=4)
    found = fisher.output_metrics(model, layer_views(model, own=True), ids, batch_size=len(ids), seed=4)
    assert list(found) == list(reversed(range(len(expected))))
    for layer, (states, gradients) in enumerate(expected):
        rows = gradients * states.norm(dim=-1, keepdim=True)
        sizes = rows.norm(dim=-1)
        largest = fisher.LARGEST * sizes.median()
        rows = torch.stack(
            [row if size <= largest else row * largest / size for row, size in zip(rows, sizes, strict=True)]
        )
        moment = rows.T @ rows
        moment = (1 - fisher.DAMPING) * moment / moment.diagonal().mean() + fisher.DAMPING * torch.eye(len(moment))
        root = found[layer].double()
        torch.testing.assert_close(root @ root.T, moment, rtol=1e-5, atol=1e-6)  # roots are kept in float32


def test_answers_are_drawn_as_often_as_their_chances_say() -> None:
    chances = torch.tensor([[0.0, 0.5, 0.2, 0.0, 0.3, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]])
    found = fisher.drawn(chances, 20000, torch.Generator().manual_seed(0))
    shares = torch.stack([row.bincount(minlength=6) / 20000 for row in found])
    torch.testing.assert_close(shares, chances, rtol=0, atol=0.02)
    assert shares[chances == 0].sum() == 0


def test_one_token_in_a_thousand_does_not_decide_a_metric() -> None:
    """A gradient a hundred times the others counts ten times, not ten thousand."""
    rows = torch.randn(999, 4, generator=torch.Generator().manual_seed(0))
    outlier = torch.tensor([[1000.0, 0.0, 0.0, 0.0]])
    cut = fisher.cut(torch.cat([rows, outlier]))
    assert cut[:999].equal(rows)
    largest = fisher.LARGEST * rows.norm(dim=-1).median().item()
    assert cut[999].norm().item() == pytest.approx(largest, rel=1e-2)


def test_gradients_that_are_no_numbers_name_the_way_out() -> None:
    with pytest.raises(TrisectError, match="behind layer 3 hold NaN or inf.*--without fisher"):
        fisher._damped_root(torch.full((2, 2), torch.nan), 3)


@pytest.mark.parametrize("seed", range(4))
def test_the_neuron_that_goes_is_the_one_whose_loss_the_metric_feels_least(seed: int) -> None:
    """By brute force: each neuron is left out in turn, the others fitted to what all put out."""
    generator = torch.Generator().manual_seed(seed)
    x, W, root = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((90, 7), (7, 5), (5, 5)))
    root = (root * torch.tensor([4.0, 1.0, 0.3, 0.1, 2.0])).tril()
    half = [
        Regression(gram=(gram := part.T @ part / 45), cross=gram @ W, energy=torch.tensor(0.0), tokens=45)
        for part in x.split(45)
    ]
    options = Options()
    kept = choose_neurons(*half, W, 6, options, {METRIC: root})
    scale = x.square().mean(dim=0).sqrt()
    # The ridge of the choice as rows of data, in every neuron's own unit.
    rows = torch.cat([x / scale / 90**0.5, ROW_RIDGE**0.5 * torch.eye(7, dtype=x.dtype)])
    wanted = rows @ (W * scale.unsqueeze(-1)) @ root
    losses = []
    for out in range(7):
        others = [i for i in range(7) if i != out]
        fitted = torch.linalg.lstsq(rows[:, others], wanted).solution
        losses.append((rows[:, others] @ fitted - wanted).square().sum())
    gone = set(range(7)) - set(kept.tolist())
    assert gone == {int(torch.stack(losses).argmin())}
