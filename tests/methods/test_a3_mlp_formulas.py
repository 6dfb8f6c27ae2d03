"""A3's MLP solver, against the paper's formulas at full size.    [math.md, section 5]"""

import pytest
import torch
from a3_oracles import check_curve, root_of
from a3_problems import Draw, Size, few, mlp_problem, sizes, solution_of
from hypothesis import given
from hypothesis import strategies as st

from trisect.calibrate.moments import channel_energy

pytestmark = pytest.mark.usefixtures("one_thread")


@few
@given(size=sizes, gated=st.booleans(), data=st.data())
def test_mlp_keeps_the_neurons_with_the_largest_column_of_the_root_times_row_of_w_down(
    size: Size, gated: bool, data: st.DataObject
):
    part, X = mlp_problem(size, gated=gated)
    width = data.draw(st.integers(1, part.width - 1))
    root = root_of(X).root
    scores = root.square().sum(dim=0) * part.W_down.square().sum(dim=1)
    kept = sorted(sorted(range(part.width), key=lambda i: -scores[i].item())[:width])
    dropped = sorted(set(range(part.width)) - set(kept))

    moments = {"mlp": channel_energy(X.unsqueeze(0)) / len(X)}
    solution = solution_of("a3", "mlp", part, moments, width)
    assert solution.part.W_down.equal(part.W_down[kept])
    assert solution.part.W_up.equal(part.W_up[:, kept])
    for old, new in (
        (part.W_gate, solution.part.W_gate),
        (part.b_up, solution.part.b_up),
        (part.b_gate, solution.part.b_gate),
    ):
        assert (old is None) == (new is None)
        if old is not None and new is not None:
            assert new.equal(old[..., kept])
    assert solution.part.b_down is part.b_down
    assert solution.loss == pytest.approx(scores[dropped].sum().item(), rel=1e-8)
    assert solution.total == pytest.approx(scores.sum().item(), rel=1e-8)


def test_the_mlp_loss_is_the_output_error_when_neurons_are_uncorrelated():
    part, _ = mlp_problem(Size(d_model=12), gated=True)
    X = torch.linalg.qr(Draw(3)(40, 12)).Q * torch.arange(1, 13)
    solution = solution_of("a3", "mlp", part, {"mlp": channel_energy(X) / 40}, 7)
    kept = [part.W_down.tolist().index(row) for row in solution.part.W_down.tolist()]
    error = X @ part.W_down - X[:, kept] @ solution.part.W_down
    assert solution.loss == pytest.approx(error.square().sum(dim=-1).mean().item(), rel=1e-8)


@few
@given(size=sizes)
def test_mlp_loss_never_rises_with_width_and_full_width_keeps_everything(size: Size):
    part, X = mlp_problem(size, gated=True)
    moments = {"mlp": channel_energy(X) / len(X)}
    solutions = [solution_of("a3", "mlp", part, moments, w) for w in range(1, part.width + 1)]
    check_curve(solutions)
    assert solutions[-1].part.W_down.equal(part.W_down)
