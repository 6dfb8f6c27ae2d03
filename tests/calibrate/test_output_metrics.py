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
    drawn, seen = fisher.Draws(seed), list[list[tuple[Tensor, Tensor]]]()
    layers = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    kept: list[tuple[Tensor, Tensor]] = []
    for layer in layers:
        layer.register_forward_hook(
            lambda m, args, out: kept.append((args[0].detach(), out[0] if isinstance(out, tuple) else out))
        )
    for window in ids.split(1):
        kept.clear()
        logits = model(window, use_cache=False).logits[0]
        chances, answers = logits.log_softmax(dim=-1), drawn(logits.detach(), 1)
        slopes = torch.autograd.grad(chances.gather(-1, answers).sum(), [out for _, out in kept])
        seen.append([(states.flatten(0, 1), g.flatten(0, 1)) for (states, _), g in zip(kept, slopes, strict=True)])
    return [tuple(map(torch.cat, zip(*layer, strict=True))) for layer in zip(*seen, strict=True)]


@pytest.mark.parametrize("batch_size", [6, 1])
@pytest.mark.parametrize("name", ["llama-gqa", "gpt2", "gemma2", "mpt", "falcon", "qwen2_moe"])
def test_a_metric_is_the_second_moment_of_gradients_times_the_stream(
    name: str, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the few longest gradients cut, whatever batch they are in."""
    monkeypatch.setattr(fisher, "METRIC_SHARE", 1)
    monkeypatch.setattr(fisher, "LARGEST", 1.2)  # so that some are cut
    model, ids = tiny(name, dtype=torch.float64), tokens(6, 12)
    model.config._experts_implementation = "eager"  # grouped products know no float64
    expected = gradients_of_drawn_answers(copy.deepcopy(model), ids, seed=4)
    found = fisher.output_metrics(model, layer_views(model, own=True), ids, batch_size=batch_size, seed=4)
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
    found = fisher.Draws(0)(chances.log(), 20000)
    shares = torch.stack([row.bincount(minlength=6) / 20000 for row in found])
    torch.testing.assert_close(shares, chances, rtol=0, atol=0.02)
    assert shares[chances == 0].sum() == 0
    # Rows are drawn apart from each other: two fair coins agree half of the time.
    one, other = fisher.Draws(1)(torch.zeros(2, 2), 20000)
    assert (one == other).float().mean().item() == pytest.approx(0.5, abs=0.02)


def test_answers_are_the_same_where_logits_differ_by_rounding() -> None:
    """Of a vocabulary as large as real ones, most of it unlikely."""
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(2000, 30_000, generator=generator)
    noise = 1 + torch.finfo(torch.float32).eps * torch.randn(logits.shape, generator=generator).clamp(-4, 4)
    whole = fisher.Draws(3)(logits, 1)
    # Two best ones are closer than rounding in one of some 100,000 rows.
    assert (fisher.Draws(3)(logits * noise, 1) != whole).sum() <= 1
    assert whole.unique().numel() > 500


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
