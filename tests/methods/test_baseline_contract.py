"""Every baseline on single linear maps, one contract: dtypes, full rank, curves, statistics, bytes."""

from dataclasses import replace

import pytest
import torch
from a3_problems import Size, mlp_problem, ov_problem, qk_problem
from baseline_problems import FACTORED, MASKED, LinearSize, linear_problem, mean_square, product, solved
from torch import Tensor

from trisect.errors import TrisectError
from trisect.methods import METHODS, solve
from trisect.methods.method import Options
from trisect.records.parts import INPUTS, Factored, Masked

pytestmark = pytest.mark.usefixtures("one_thread")

LINEAR = (*FACTORED, *MASKED)
CASES = [(method, name) for method in LINEAR for name in METHODS[method].solvers]
HALF = [torch.float16, torch.bfloat16]


def test_the_registry_has_every_baseline_behind_the_a3_family() -> None:
    names = list(METHODS)
    assert names[:6] == ["a3+", "a3", "a3-q-only", "a3-k-only", "a3-xkv", "a3-ov-overall"]
    assert set(names[6:]) == {*LINEAR, "clover", "reap", "magnitude", "wanda"}
    assert {name for name in names if METHODS[name].linear} == set(LINEAR)
    assert METHODS["palu"].parts == ("qk", "ov")
    assert METHODS["clover"].parts == ("qk", "ov")
    assert METHODS["wanda"].parts == ("qk", "mlp")
    for method in (METHODS[name] for name in LINEAR):
        assert method.rank is not None
        assert set(method.reads) == set(method.solvers)


@pytest.mark.parametrize(("method", "name"), CASES)
def test_solutions_have_the_promised_shapes_names_and_biases(method: str, name: str) -> None:
    problem = linear_problem(LinearSize(name=name, inputs=12, outputs=8, heads=8, bias=True))
    rule = METHODS[method].rank
    assert rule is not None
    width = rule(12, 8, 8, 0.5)
    solution = solve(METHODS[method], name, problem.part, problem.moments, width=width, options=Options())
    assert solution.name == name
    assert 0 <= solution.loss <= solution.total
    if isinstance(solution, Factored):
        groups = METHODS[method].groups
        assert solution.groups == (1 if groups is None else groups(8))
        assert solution.rank == width
        assert solution.cached == METHODS[method].cached
        assert solution.b is problem.part.b
        assert solution.A.shape == (12, solution.groups * width)
        assert solution.B.shape[0] * solution.B.shape[2] == 8
    else:
        assert isinstance(solution, Masked)
        assert METHODS[method].masks
        assert solution.W.shape == (12, 8)


@pytest.mark.parametrize("method", FACTORED)
@pytest.mark.parametrize("shape", [(12, 8), (8, 12), (9, 9)])
@pytest.mark.parametrize("tokens", [60, 3])
def test_full_rank_gives_the_map_back_whatever_the_tokens(method: str, shape: tuple[int, int], tokens: int) -> None:
    problem = linear_problem(LinearSize(name="k", inputs=shape[0], outputs=shape[1], tokens=tokens))
    solution = solved(method, problem, min(shape))
    torch.testing.assert_close(product(solution), problem.part.W, rtol=0, atol=1e-7)
    assert solution.loss <= 1e-12 * solution.total


@pytest.mark.parametrize("method", LINEAR)
@pytest.mark.parametrize("tokens", [60, 4])
def test_loss_never_rises_with_rank(method: str, tokens: int) -> None:
    problem = linear_problem(LinearSize(name="v", inputs=12, outputs=8, spread=1e3, tokens=tokens))
    found = [solved(method, problem, rank) for rank in range(1, 9)]
    for narrow, wide in zip(found, found[1:], strict=False):
        assert wide.loss <= narrow.loss + 1e-9 * wide.total


@pytest.mark.parametrize("method", FACTORED)
def test_grams_of_fewer_tokens_than_channels_are_no_problem(method: str) -> None:
    problem = linear_problem(LinearSize(name="k", inputs=16, outputs=10, tokens=4))
    solution = solved(method, problem, 5)
    assert solution.A.isfinite().all()
    assert solution.B.isfinite().all()
    assert solution.A.abs().max() < 1e3
    if method in ("svd-llm", "svd-llm-v2", "palu"):
        assert solution.clipped == pytest.approx(12 / 16)
        assert mean_square(problem.X, problem.part.W - product(solution)) <= 1e-12 * solution.total


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("method", FACTORED)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_half_precision_weights_stay_half_and_lose_only_their_own_rounding(
    method: str, dtype: torch.dtype, scale: float
) -> None:
    problem = linear_problem(LinearSize(name="v", inputs=24, outputs=16, spread=1e6, bias=True))
    part = replace(problem.part, W=(scale * problem.part.W).to(dtype))
    problem = replace(problem, part=part)
    solution = solved(method, problem, 9)
    assert solution.A.dtype == solution.B.dtype == dtype
    assert solution.A.is_contiguous()
    assert solution.B.is_contiguous()
    exact = solved(method, replace(problem, part=replace(part, W=part.W.double())), 9)
    gap = (product(solution) - product(exact)).norm() / product(exact).norm()
    assert gap <= 8 * torch.finfo(dtype).eps
    assert solution.loss == pytest.approx(exact.loss, rel=1e-9)


@pytest.mark.parametrize("method", LINEAR)
def test_the_same_problem_gives_the_same_bytes(method: str) -> None:
    problem = linear_problem(LinearSize(name="k"))
    first, second = (vars(solved(method, problem, 4)) for _ in range(2))
    for field, value in first.items():
        assert value.equal(second[field]) if isinstance(value, Tensor) else value == second[field]


# The contract of a sequential method: NAME for the dense stream, narrow_NAME for the other.
@pytest.mark.parametrize(("method", "name"), CASES)
def test_what_a_method_says_it_reads_is_enough_and_needed(method: str, name: str) -> None:
    problem = linear_problem(LinearSize(name=name))
    reads = set(METHODS[method].reads[name])
    if METHODS[method].in_order:
        reads |= {f"narrow_{moment}" for moment in reads}
    solver = METHODS[method].solvers[name]
    solver(problem.part, {moment: problem.moments[moment] for moment in reads}, 3, Options())
    for missing in reads:
        rest = {moment: value for moment, value in problem.moments.items() if moment != missing}
        with pytest.raises(TrisectError, match=f"no '{missing}' moments.*trisect calibrate"):
            solver(problem.part, rest, 3, Options())


def test_inputs_decide_which_moments_are_read() -> None:
    for name, source in INPUTS.items():
        assert METHODS["svd-llm"].reads[name] == {f"{source}_gram"}
        assert METHODS["asvd"].reads[name] == {f"{source}_abs"}
        assert METHODS["fwsvd"].reads[name] == {f"{name}_fisher"}
        assert METHODS["svd"].reads[name] == set()


# -- the baselines on components ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
@pytest.mark.parametrize("method", ["clover", "magnitude", "wanda"])
def test_component_baselines_keep_dtypes_and_need_what_they_say(method: str, dtype: torch.dtype) -> None:
    mlp, X = mlp_problem(Size(bias=True, d_model=6), gated=True)
    parts = {"qk": qk_problem(Size(bias=True), pairs=1).part, "ov": ov_problem(Size(bias=True)).part, "mlp": mlp}
    moments = {"x_energy": torch.rand(12).double(), "down_energy": X.square().mean(dim=0)}
    for component, reads in METHODS[method].reads.items():
        part = parts[component]
        cast = {n: x.to(dtype) for n, x in vars(part).items() if isinstance(x, Tensor) and x.is_floating_point()}
        part = replace(part, **cast)
        solver = METHODS[method].solvers[component]
        solution = solver(part, {name: moments[name] for name in reads & set(moments)}, 4, Options())
        assert solution.part.width == 4
        assert 0 < solution.loss < solution.total
        for field, old in vars(part).items():
            if isinstance(old, Tensor):
                assert getattr(solution.part, field).dtype == old.dtype
        if any(name.endswith("_energy") for name in reads):
            with pytest.raises(TrisectError, match="trisect calibrate"):
                solver(part, {}, 4, Options())
