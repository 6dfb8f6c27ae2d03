"""The weighted problem of low rank, against random rivals, and for singular weights.   [math.md L-1, L-2]"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from trisect.solve.lowrank import LowRank, factor, low_rank

few = settings(max_examples=40)
shapes = st.tuples(st.integers(1, 9), st.integers(1, 9))


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def error(W: Tensor, product: Tensor, root: Tensor) -> float:
    return (root @ (W - product)).square().sum().item()


def weights(kind: str, seed: int, inputs: int) -> tuple[Tensor | None, Tensor]:
    """A weight, and the same as a plain matrix L."""
    if kind == "none":
        return None, torch.eye(inputs, dtype=torch.float64)
    if kind == "diagonal":
        scale = draw(seed, inputs).abs()
        return scale, scale.diag()
    X = draw(seed, 3 * inputs, inputs) / (3 * inputs) ** 0.5
    return factor(X.mT @ X).root, X


@pytest.mark.parametrize("kind", ["none", "diagonal", "gram"])
@few
@given(shape=shapes, seed=st.integers(0, 2**31 - 1), data=st.data())
def test_no_rival_of_the_same_rank_does_better(
    kind: str, shape: tuple[int, int], seed: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(1, min(shape)))
    W = draw(seed, *shape)
    weight, root = weights(kind, seed + 1, shape[0])
    best = low_rank(W, rank, weight)
    measured = error(W, best.A @ best.B, root)
    assert best.total == pytest.approx(error(W, torch.zeros_like(W), root), rel=1e-9)
    assert measured == pytest.approx(best.loss, rel=1e-6, abs=1e-11 * best.total)
    for step in (1.0, 1e-1, 1e-3):
        A = best.A + step * draw(seed + 2, *best.A.shape)
        B = best.B + step * draw(seed + 3, *best.B.shape)
        assert error(W, A @ B, root) >= measured - 1e-11 * best.total
    # The best B for some other A is a rival, too.
    A = draw(seed + 4, shape[0], rank)
    B = torch.linalg.lstsq(root @ A, root @ W, driver="gelsd").solution
    assert error(W, A @ B, root) >= measured - 1e-11 * best.total


@few
@given(shape=shapes, seed=st.integers(0, 2**31 - 1), tokens=st.integers(1, 12), data=st.data())
def test_grams_of_few_tokens_work_and_full_rank_gives_the_map_back(
    shape: tuple[int, int], seed: int, tokens: int, data: st.DataObject
) -> None:
    W, X = draw(seed, *shape), draw(seed + 1, tokens, shape[0]) / tokens**0.5
    weight = factor(X.mT @ X).root
    rank = data.draw(st.integers(1, min(shape)))
    best = low_rank(W, rank, weight)
    assert best.A.isfinite().all()
    assert error(W, best.A @ best.B, X) == pytest.approx(best.loss, rel=1e-6, abs=1e-11 * best.total)
    whole = low_rank(W, min(shape), weight)
    torch.testing.assert_close(whole.A @ whole.B, W, rtol=0, atol=1e-9)
    assert whole.loss == 0.0


def test_ranks_to_spare_go_to_what_no_token_has_shown() -> None:
    W = draw(0, 8, 6)
    X = draw(1, 2, 8)  # two tokens, so that rank 2 is enough for them
    best = low_rank(W, 4, factor(X.mT @ X).root)
    torch.testing.assert_close(X @ best.A @ best.B, X @ W)
    two = low_rank(W, 2, factor(X.mT @ X).root)
    rest = torch.linalg.svdvals(W - two.A @ two.B)
    assert (W - best.A @ best.B).square().sum().item() == pytest.approx(rest[2:].square().sum().item())


@pytest.mark.parametrize("weight", [factor(torch.zeros(5, 5)).root, torch.zeros(5)])
def test_a_silent_input_leaves_the_plain_svd(weight: Tensor) -> None:
    W = draw(0, 5, 4)
    silent, plain = low_rank(W, 2, weight), low_rank(W, 2)
    torch.testing.assert_close(silent.A @ silent.B, plain.A @ plain.B)
    assert silent.total == 0.0


def test_a_map_of_zeros_stays_one() -> None:
    best = low_rank(torch.zeros(4, 3), 2)
    assert best.A.shape == (4, 2)
    assert best.B.isfinite().all()
    assert (best.A @ best.B).count_nonzero() == 0


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_both_sides_have_the_same_norm_and_survive_half_precision(size: float) -> None:
    W = size * draw(0, 12, 9)
    X = draw(1, 60, 12) * torch.logspace(0, -5, 12, dtype=torch.float64)
    best: LowRank = low_rank(W, 7, factor(X.mT @ X).root)
    torch.testing.assert_close(best.A.norm(dim=0), best.B.norm(dim=1))
    product = best.A.half().double() @ best.B.half().double()
    torch.testing.assert_close(product, best.A @ best.B, rtol=0, atol=4e-3 * size)


def test_wider_is_never_worse_and_narrower_is_a_slice() -> None:
    W, X = draw(0, 10, 8), draw(1, 40, 10)
    weight = factor(X.mT @ X).root
    found = [low_rank(W, rank, weight) for rank in range(1, 9)]
    for narrow, wide in zip(found, found[1:], strict=False):
        assert wide.loss <= narrow.loss
        torch.testing.assert_close(wide.A[:, : narrow.A.shape[1]], narrow.A)


def test_a_rank_beyond_the_map_is_its_full_rank() -> None:
    assert low_rank(draw(0, 3, 5), 9).A.shape == (3, 3)
