"""Ranks for methods on single linear maps: the same everywhere, or spread as the method's paper does it."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field
from torch import Tensor

from trisect.calibrate import Progress, collect, fisher_information
from trisect.config import CompressConfig
from trisect.data import Tokens, content_hash
from trisect.errors import TrisectError
from trisect.methods import get_method
from trisect.methods.method import LinearMethod, options_of, solve
from trisect.models import LayerView, fingerprint, layer_views, shape_of
from trisect.pipeline.loss_curves import HeldOutLoss
from trisect.plan import Plan, budget, chosen_layers, ranks
from trisect.records.parts import COMPONENTS, Factored
from trisect.records.shapes import LayerShape, LinearShape, ModelShape, widths_of
from trisect.support import checks, distributed
from trisect.support.files import write_json


class Sensitivity(BaseModel, strict=True):
    """A row of a file: the perplexity with one linear map alone cut to a share of its parameters."""

    layer: int
    map: str
    share: float = Field(gt=0, lt=1)
    perplexity: float


def read_sensitivities(
    path: Path, made_of: Mapping[str, str], needed: Mapping[ranks.Key, ranks.Size]
) -> dict[ranks.Key, dict[float, float]]:
    """What the file has of the maps needed; refused if it was measured on anything else."""
    data, curves = checks.read_table(path, Sensitivity, "sensitivities", what="sensitivities")
    for name, value in made_of.items():
        if data.get(name) != value:
            raise TrisectError(
                f"The sensitivities in {path} are of another {name.replace('_', ' ')}: "
                f"{checks.shown(data.get(name))}, not {value}; name a new file with --curves."
            )
    for layer, linear in needed:
        if (layer, linear) not in curves:
            raise TrisectError(f"{path} has no sensitivities of {linear} in layer {layer}; name a new file.")
    return {key: curves[key] for key in needed}


KEPT_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
"""Shares of a linear map's parameters at which ASVD's search looks at the loss."""
TEST_WINDOWS, TEST_TOKENS = 8, 4096
"""At most what ASVD's search looks at of the calibration text: it runs the model once per map and share."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Which linear maps are to have ranks, and everything a search may look at."""

    method: LinearMethod
    config: CompressConfig
    ratio: float
    sizes: dict[ranks.Key, ranks.Size]
    model: Any
    tokens: Tokens | None
    progress: Progress | None
    kept: Path | None  # where what a search measured stays for other ratios

    def statistics(self) -> Iterator[tuple[LayerView, dict[str, Tensor]]]:
        """Every layer with the moments that the method reads."""
        names = frozenset().union(*self.method.reads.values())
        size = self.config.calibration.batch_size
        return collect(self.model, self.ids, lambda layer: names, batch_size=size, progress=self.progress)

    def ranks(self, ratios: Mapping[ranks.Key, float] | None = None) -> dict[ranks.Key, int]:
        """The ranks at a ratio for each linear map, or at the common one, on the grid."""
        ratios = ratios or dict.fromkeys(self.sizes, self.ratio)
        return ranks.ranks_at(self.sizes, self.method.rank, ratios, None if self.method.masks else self.config.align)

    @property
    def ids(self) -> Tensor:
        """Calibration tokens (windows, length)."""
        if self.tokens is None:
            raise TrisectError(
                f"The rank search of {self.method.name} looks at calibration text, which a plan alone and "
                "stored moments do not have; use --allocate uniform (or compress without --moments)."
            )
        return self.tokens.ids


def linear_plan(
    model: Any,
    config: CompressConfig,
    tokens: Tokens | None = None,
    *,
    progress: Progress | None = None,
    path: str | Path | None = None,
) -> Plan:
    """The ranks (or kept weights) of every linear map that a method on linear maps is to change.

    Uniform ranks need sizes only: there `model` may be a ModelShape. What a search measures stays in the file `path`.
    """
    shape, method = model if isinstance(model, ModelShape) else shape_of(model), get_method(config.method)
    assert isinstance(method, LinearMethod)
    if any(layer.experts for layer in shape.layers) and {"mlp"} & set(method.parts) & set(config.parts):
        raise TrisectError(
            f"{method.name} takes linear maps one by one, and the experts of a layer are one tensor: use "
            "--parts qk,ov, or a method that narrows experts, --method a3+."
        )
    sizes: dict[ranks.Key, ranks.Size] = {}
    for index in chosen_layers(config.layers, num_layers=len(shape.layers)):
        layer = shape.layers[index]
        for name in maps_of(method, layer, config.parts):
            if any(linear.name == name for linear in layer.linears):
                raise TrisectError(f"Layer {index}: {name} is already factored; compress the original model.")
            sizes[index, name] = *budget.linear_sizes(layer, name), budget.linear_heads(layer, name)
    given: dict[str, Any] = {"model": model, "tokens": tokens, "progress": progress}
    kept = None if path is None else Path(path)
    problem = Problem(method=method, config=config, ratio=_ratio(method, config), sizes=sizes, kept=kept, **given)
    if not sizes:
        asked, known = ",".join(config.parts), ",".join(method.parts)
        raise TrisectError(f"{method.name} changes nothing in {asked}; use --parts {known}.")
    found = _search(method, config)(problem)
    return Plan(
        layers=tuple(map(widths_of, shape.layers)),
        method=method.name,
        ratio=problem.ratio,
        align=config.align,
        linears=tuple(_entries(problem, found, index) for index in range(len(shape.layers))),
        masked=method.masks,
    )


def maps_of(method: LinearMethod, layer: LayerShape, parts: tuple[str, ...]) -> tuple[str, ...]:
    """The linear maps of a layer that a method changes, within the parts asked for."""
    # Not those behind a latent: their inputs are not the hidden states that moments are of. Nor those of experts.
    plain = [part for part in COMPONENTS if part in parts and not (part == "mlp" and layer.experts)]
    names = [name for part in plain for name in budget.linears_of(layer, part)]
    behind = ("q", "k", "v") if layer.kv_in else ()
    return tuple(name for name in names if name in method.solvers and name not in behind)


def _ratio(method: LinearMethod, config: CompressConfig) -> float:
    if config.floor > 0:
        raise TrisectError(
            f"{method.name} gives linear maps ranks and leaves every width as it is, so there is nothing for "
            "a floor to hold; leave --floor out."
        )
    ratio, counted = config.ratio, ("params", "kv") if method.cached else ("params",)
    if ratio is None or config.goal.budget not in counted:
        raise TrisectError(
            f"{method.name} works on single linear maps, whose goal is a ratio of "
            f"{'the KV cache' if method.cached else 'their weights'}; use e.g. --ratio 0.25, and no --budget."
        )
    if method.ratio is not None and ratio != method.ratio:
        raise TrisectError(
            f"{method.name} removes exactly {method.ratio:g} of the weights, not {ratio:g}; "
            f"use --ratio {method.ratio:g}, or --method wanda-sparse for any other ratio."
        )
    return ratio


def _search(method: LinearMethod, config: CompressConfig) -> Callable[[Problem], dict[ranks.Key, int]]:
    if config.allocate in (None, "uniform"):
        return Problem.ranks
    if config.allocate == "balanced":
        raise TrisectError("Methods on single linear maps have no loss curves; use --allocate uniform.")
    if method.search not in SEARCHES:
        raise TrisectError(f"The paper of {method.name} has no rank search; use --allocate uniform.")
    return SEARCHES[method.search]


def _by_loss(problem: Problem) -> dict[ranks.Key, int]:
    """SVD-LLM v2: what each map would lose at the common rank decides its ratio."""
    common, options = problem.ranks(), options_of(problem.config)
    losses: dict[ranks.Key, float] = {}
    for view, statistics in problem.statistics():
        for key in (key for key in problem.sizes if key[0] == view.index):
            part = view.linear(key[1])
            solution = solve(problem.method, key[1], part, statistics, width=common[key], options=options)
            losses[key] = ranks.truncation_loss(solution.loss, tokens=problem.ids.numel())
    return problem.ranks(ranks.loss_ratios(losses, problem.ratio))


def _by_fisher(problem: Problem) -> dict[ranks.Key, int]:
    """Palu: ranks in proportion to each map's Fisher information."""
    views = layer_views(problem.model, own=True)
    found = fisher_information(problem.model, views, problem.ids, progress=problem.progress)
    fisher = {(layer, name): found[layer][f"{name}_fisher"].sum().item() for layer, name in problem.sizes}
    return problem.ranks(ranks.fisher_ratios(fisher, problem.ratio))


def _by_sensitivity(problem: Problem) -> dict[ranks.Key, int]:
    """ASVD: the perplexity with each map alone cut, at a few shares, on a few calibration windows."""
    path, ids = problem.kept, problem.ids
    made_of = {"fingerprint": fingerprint(problem.model), "token_hash": content_hash(ids)}
    made_of["method"] = problem.method.name
    if path is not None and distributed.broadcast(path.exists()):
        curves = read_sensitivities(path, made_of, problem.sizes)
    else:
        curves = _sensitivities(problem)
        if path is not None and distributed.is_rank_zero():
            write_json(path, {**made_of, "sensitivities": checks.table_rows(Sensitivity, curves)})
    return ranks.sensitivity_ranks(curves, problem.sizes, problem.method.rank, problem.ratio)


def _sensitivities(problem: Problem) -> dict[ranks.Key, dict[float, float]]:
    ids, method = problem.ids, problem.method
    few = max(1, min(TEST_WINDOWS, TEST_TOKENS // ids.shape[1]))
    views = layer_views(problem.model, own=True)
    held_out = HeldOutLoss(problem.model, views, ids[:few], batch_size=problem.config.calibration.batch_size)
    curves: dict[ranks.Key, dict[float, float]] = {}
    for view, statistics in replace(problem, progress=None).statistics():
        for key in (key for key in problem.sizes if key[0] == view.index):
            name, part = key[1], view.linear(key[1])
            widths = {share: method.rank(*problem.sizes[key], 1 - share) for share in KEPT_SHARES}
            most = max(widths.values())
            widest = solve(method, name, part, statistics, width=most, options=options_of(problem.config))
            assert isinstance(widest, Factored)
            curves[key] = {}
            for share, width in widths.items():
                with view.trial():
                    view.apply(leading(widest, width))
                    curves[key][share] = math.exp(held_out.loss(view.index))
            if problem.progress is not None:
                problem.progress("sensitivity", len(curves), len(problem.sizes))
        held_out.stream.advance(view)
    return curves


def leading(solution: Factored, width: int) -> Factored:
    """The solution of a smaller rank: singular vectors come in order, so none is computed again."""
    return replace(solution, A=solution.A[:, :width], B=solution.B[:, :width])


SEARCHES: dict[str, Callable[[Problem], dict[ranks.Key, int]]] = {
    "loss": _by_loss,
    "fisher": _by_fisher,
    "sensitivity": _by_sensitivity,
}


def _entries(problem: Problem, widths: dict[ranks.Key, int], index: int) -> tuple[LinearShape, ...]:
    method, found = problem.method, []
    for name, rank in ((name, rank) for (layer, name), rank in widths.items() if layer == index):
        inputs, outputs, heads = problem.sizes[index, name]
        groups = 1 if method.groups is None else method.groups(heads)
        # At full rank a map stays whole, as a search counted it: its two factors would be larger.
        if method.masks or rank < min(inputs, outputs // groups):
            found.append(LinearShape(name=name, rank=rank, groups=groups, cached=method.cached))
    return tuple(found)
