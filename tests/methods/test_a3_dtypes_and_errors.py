"""What A3's solutions keep (dtypes, fields, bytes, the very part at full width) and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from a3_oracles import assert_same, qk_scores
from a3_problems import Size, mlp_problem, normed_problem, ov_problem, project, qk_problem, solution_of
from torch import Tensor

from trisect.calibrate.moments import channel_energy
from trisect.errors import TrisectError
from trisect.methods import METHODS, get_method, solve
from trisect.methods.method import Options
from trisect.records.parts import Moments, Part

OPTIONS = Options()
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
A3_FAMILY = [name for name in METHODS if name.startswith("a3")]  # the baselines have their own contract
pytestmark = pytest.mark.usefixtures("one_thread")


def cast(part: Any, dtype: torch.dtype) -> Any:
    """The part with all its floating tensors in another dtype."""
    tensors = {name: x.to(dtype) for name, x in vars(part).items() if isinstance(x, Tensor) and x.is_floating_point()}
    return replace(part, **tensors)


def problems() -> dict[str, tuple[str, Part, Moments]]:
    qk, rope = qk_problem(Size(bias=True, group=2)), qk_problem(Size(bias=True), pairs=3)
    partial, norm = qk_problem(Size(bias=True), pairs=1), normed_problem(jitter=0.05)
    mha, gqa = ov_problem(Size(bias=True)), ov_problem(Size(bias=True, group=2))
    mlp, X = mlp_problem(Size(bias=True, d_model=6), gated=True)
    return {
        "qk": ("qk", qk.part, qk.moments),
        "qk rope": ("qk", rope.part, rope.moments),
        "qk partial rotary": ("qk", partial.part, partial.moments),
        "qk norm": ("qk", norm.part, norm.moments),
        "ov": ("ov", mha.part, mha.moments),
        "ov shared values": ("ov", gqa.part, gqa.moments),
        "mlp": ("mlp", mlp, {"mlp": channel_energy(X) / len(X)}),
    }


PROBLEMS = problems()
SOLVABLE = [
    (method, name)
    for method in A3_FAMILY
    for name in PROBLEMS
    if (method, name) != ("a3-ov-overall", "ov shared values")  # refused for what it is
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_solutions_keep_dtypes_and_fields_and_only_narrow_one_width(name: str, dtype: torch.dtype):
    component, part, moments = PROBLEMS[name]
    part = cast(part, dtype)
    solution = solve(get_method("a3"), component, part, moments, width=4, options=OPTIONS)
    assert type(solution.part) is type(part)
    assert solution.part.width == 4
    for field, old in vars(part).items():
        new = getattr(solution.part, field)
        assert (old is None) == (new is None), field
        if not isinstance(old, Tensor):
            assert new == old
            continue
        assert new.dtype == old.dtype, field
        assert new.is_contiguous(), field
        wanted = [4 if n == 6 else n for n in old.shape]
        if field == "frequencies":
            wanted[-1] = solution.part.num_pairs
        assert list(new.shape) == wanted, field
        if new.is_floating_point():
            assert new.isfinite().all(), field


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_same_problem_gives_the_same_bytes(name: str):
    component, part, moments = PROBLEMS[name]
    first, second = (solve(get_method("a3"), component, part, moments, width=4, options=OPTIONS) for _ in range(2))
    for field, value in vars(first.part).items():
        if isinstance(value, Tensor):
            assert value.equal(getattr(second.part, field))


@pytest.mark.parametrize(("q_scale", "k_scale"), [(1e-6, 1.0), (1.0, 1e-6), (1e3, 1e-3)])
def test_lopsided_heads_are_balanced_so_that_half_precision_holds_both_sides(q_scale: float, k_scale: float):
    problem = qk_problem(Size())
    part = replace(problem.part, W_q=q_scale * problem.part.W_q, W_k=k_scale * problem.part.W_k)
    moments = {"q": q_scale**2 * problem.moments["q"], "k": k_scale**2 * problem.moments["k"]}
    narrow = solution_of("a3", "qk", part, moments, 4).part
    rounded = cast(cast(narrow, torch.float16), torch.float64)
    q, k = (project(X, W, None).square().mean(dim=1) for X, W in ((problem.X_q, narrow.W_q), (problem.X_k, narrow.W_k)))
    torch.testing.assert_close(q, k, rtol=1e-6, atol=0)
    exact, half = (qk_scores(p, problem.X_q, problem.X_k) for p in (narrow, rounded))
    assert_same(half, exact, dense=exact, tolerance=4 * 2**-11)


@pytest.mark.parametrize("method", A3_FAMILY)
@pytest.mark.parametrize("name", PROBLEMS)
def test_full_width_returns_the_very_part_and_reads_nothing(method: str, name: str):
    component, part, _ = PROBLEMS[name]
    solution = solve(get_method(method), component, part, {}, width=part.width, options=OPTIONS)
    assert solution.part is part
    assert solution.loss == 0.0


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_part_cannot_be_widened(name: str):
    component, part, moments = PROBLEMS[name]
    with pytest.raises(TrisectError, match=f"width {part.width} and cannot be widened to 9"):
        solve(get_method("a3"), component, part, moments, width=9, options=OPTIONS)


@pytest.mark.parametrize(("method", "name"), SOLVABLE)
def test_missing_moments_name_themselves_and_the_command_that_collects_them(method: str, name: str):
    component, part, _ = PROBLEMS[name]
    with pytest.raises(TrisectError, match="trisect calibrate MODEL -o") as error:
        solve(get_method(method), component, part, {"other": torch.zeros(1)}, width=4, options=OPTIONS)
    assert any(f"no {read!r} moments" in str(error.value) for read in get_method(method).reads[component])
    assert "it has: other" in str(error.value)


# Methods that repair read regressions of two streams: tests/calibrate/test_streams.py has those.
@pytest.mark.parametrize(("method", "name"), [case for case in SOLVABLE if METHODS[case[0]].streams != "narrow"])
def test_what_a_method_says_it_reads_is_enough(method: str, name: str):
    component, part, moments = PROBLEMS[name]
    reads = get_method(method).reads[component]
    declared = {moment: value for moment, value in moments.items() if moment in reads}
    solution = solve(get_method(method), component, part, declared, width=4, options=OPTIONS)
    assert 0 <= solution.loss <= solution.total
