"""Ranks for methods on single linear maps: the same everywhere, or spread as the method's paper does it.

docs/math.md, L-4 and L-10 to L-12. A ratio is what is removed, a share what is kept.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from trisect.calibrate import Progress, collect, fisher_information
from trisect.config import CompressConfig
from trisect.data import Tokens
from trisect.errors import TrisectError
from trisect.methods import LinearMethod, RankRule, get_method, options_of, solve
from trisect.models import LayerView, layer_views, shape_of
from trisect.pipeline.loss_curves import HeldOutLoss
from trisect.plan import Plan, budget, chosen_layers
from trisect.records.parts import COMPONENTS, Factored, Solution
from trisect.records.shapes import LayerShape, LinearShape, ModelShape, widths_of

Key = tuple[int, str]  # (layer, name of the linear map)
Size = tuple[int, int, int]  # (inputs, outputs, heads)
Curve = Mapping[float, float]
"""Share of its parameters one linear map keeps -> perplexity of the model with only that map cut."""
Item = TypeVar("Item")

MOST_REMOVED = 0.95  # no linear map is cut by more than this on account of its small loss, unless all of them are
SMALLEST_LOSS = math.e
"""Below this, 1 / log(loss) grows without bound and then turns negative; smaller losses count as this."""
KEPT_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
"""Shares of a linear map's parameters at which ASVD's search looks at the loss."""
TEST_WINDOWS, TEST_TOKENS = 8, 4096
"""At most what ASVD's search looks at of the calibration text: it runs the model once per map and share."""


@dataclass(frozen=True, kw_only=True)
class RankSearch:
    """Which linear maps are to have ranks, and everything a search may look at."""

    method: LinearMethod
    config: CompressConfig
    ratio: float
    sizes: dict[Key, Size]
    model: Any
    tokens: Tokens | None
    progress: Progress | None

    def solved(self, widths: Mapping[Key, int]) -> Iterator[tuple[LayerView, dict[Key, Solution]]]:
        """Every layer with its maps solved at these widths, from the moments that the method reads."""
        names, options = frozenset().union(*self.method.reads.values()), options_of(self.config)
        size = self.config.calibration.batch_size
        for view, moments in collect(self.model, self.ids, lambda _: names, batch_size=size, progress=self.progress):
            keys = [key for key in self.sizes if key[0] == view.index]
            one = partial(solve, self.method, moments=moments, options=options)
            yield view, {key: one(key[1], view.linear(key[1]), width=widths[key]) for key in keys}

    def ranks(self, ratios: Mapping[Key, float] | None = None) -> dict[Key, int]:
        """The ranks at a ratio for each linear map, or at the common one, on the grid."""
        ratios = ratios or dict.fromkeys(self.sizes, self.ratio)
        return ranks_at(self.sizes, self.method.rank, ratios, None if self.method.masks else self.config.align)

    @property
    def ids(self) -> Tensor:
        """Calibration tokens (windows, length)."""
        if self.tokens is None:
            search = f"The rank search of {self.method.name} looks at calibration text"
            raise TrisectError(f"{search}, which a plan alone and --moments lack; use --allocate uniform.")
        return self.tokens.ids


def linear_plan(
    model: Any, config: CompressConfig, tokens: Tokens | None = None, *, progress: Progress | None = None
) -> Plan:
    """The ranks (or kept weights) of every linear map to change; for uniform ones `model` may be a ModelShape."""
    shape, method = model if isinstance(model, ModelShape) else shape_of(model), get_method(config.method)
    assert isinstance(method, LinearMethod)
    if any(layer.experts for layer in shape.layers) and {"mlp"} & set(method.parts) & set(config.parts):
        why = f"{method.name} takes linear maps one by one, and the experts of a layer are one tensor"
        raise TrisectError(f"{why}: use --parts qk,ov, or --method a3+, which narrows experts.")
    sizes: dict[Key, Size] = {}
    for index in chosen_layers(config.layers, num_layers=len(shape.layers)):
        layer = shape.layers[index]
        for name in maps_of(method, layer, config.parts):
            if any(linear.name == name for linear in layer.linears):
                raise TrisectError(f"Layer {index}: {name} is already factored; compress the original model.")
            sizes[index, name] = *budget.linear_sizes(layer, name), budget.linear_heads(layer, name)
    given: dict[str, Any] = {"model": model, "tokens": tokens, "progress": progress}
    problem = RankSearch(method=method, config=config, ratio=_ratio(method, config), sizes=sizes, **given)
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
        raise TrisectError(f"{method.name} leaves every width as it is, and a floor holds widths; leave --floor out.")
    ratio, counted = config.ratio, ("params", "kv") if method.cached else ("params",)
    if ratio is None or config.goal.budget not in counted:
        counts = "the KV cache" if method.cached else "their weights"
        goal = f"{method.name} works on single linear maps, whose goal is a ratio of {counts}"
        raise TrisectError(f"{goal}; use e.g. --ratio 0.25, and no --budget.")
    if method.ratio is not None and ratio != method.ratio:
        exactly = f"{method.name} removes exactly {method.ratio:g} of the weights, not {ratio:g}"
        raise TrisectError(f"{exactly}; use --ratio {method.ratio:g}, or --method wanda-sparse for any other.")
    return ratio


Search = Callable[[RankSearch], dict[Key, int]]


def _search(method: LinearMethod, config: CompressConfig) -> Search:
    if config.allocate in (None, "uniform"):
        return RankSearch.ranks
    if config.allocate == "balanced":
        raise TrisectError("Methods on single linear maps have no loss curves; use --allocate uniform.")
    if method.search not in SEARCHES:
        raise TrisectError(f"The paper of {method.name} has no rank search; use --allocate uniform.")
    return SEARCHES[method.search]


def _by_loss(problem: RankSearch) -> dict[Key, int]:
    """SVD-LLM v2: what each map would lose at the common rank decides its ratio."""
    losses: dict[Key, float] = {}
    for _, solutions in problem.solved(problem.ranks()):
        losses |= {key: truncation_loss(x.loss, tokens=problem.ids.numel()) for key, x in solutions.items()}
    return problem.ranks(loss_ratios(losses, problem.ratio))


def _by_fisher(problem: RankSearch) -> dict[Key, int]:
    """Palu: ranks in proportion to each map's Fisher information."""
    views = layer_views(problem.model, own=True)
    found = fisher_information(problem.model, views, problem.ids, progress=problem.progress)
    fisher = {(layer, name): found[layer][f"{name}_fisher"].sum().item() for layer, name in problem.sizes}
    return problem.ranks(fisher_ratios(fisher, problem.ratio))


def _by_sensitivity(problem: RankSearch) -> dict[Key, int]:
    """ASVD: the perplexity with each map alone cut, at a few shares, on a few calibration windows."""
    ids, rule = problem.ids, problem.method.rank
    few = max(1, min(TEST_WINDOWS, TEST_TOKENS // ids.shape[1]))
    views = layer_views(problem.model, own=True)
    held_out = HeldOutLoss(problem.model, views, ids[:few], batch_size=problem.config.calibration.batch_size)
    widths = {key: {share: rule(*size, 1 - share) for share in KEPT_SHARES} for key, size in problem.sizes.items()}
    widest = {key: max(found.values()) for key, found in widths.items()}
    curves: dict[Key, dict[float, float]] = {key: {} for key in widths}
    for view, solutions in replace(problem, progress=None).solved(widest):
        for key, solution in solutions.items():
            assert isinstance(solution, Factored)
            for share, width in widths[key].items():
                with view.trial():
                    view.apply(leading(solution, width))
                    curves[key][share] = math.exp(held_out.loss(view.index))
            if problem.progress is not None:
                problem.progress("sensitivity", sum(map(bool, curves.values())), len(problem.sizes))
        held_out.stream.advance(view)
    return sensitivity_ranks(curves, problem.sizes, rule, problem.ratio)


def leading(solution: Factored, width: int) -> Factored:
    """The solution of a smaller rank: singular vectors come in order, so none is computed again."""
    return replace(solution, A=solution.A[:, :width], B=solution.B[:, :width])


SEARCHES: dict[str, Search] = {"loss": _by_loss, "fisher": _by_fisher, "sensitivity": _by_sensitivity}


def _entries(problem: RankSearch, widths: dict[Key, int], index: int) -> tuple[LinearShape, ...]:
    method, found = problem.method, []
    for name, rank in ((name, rank) for (layer, name), rank in widths.items() if layer == index):
        inputs, outputs, heads = problem.sizes[index, name]
        groups = 1 if method.groups is None else method.groups(heads)
        # At full rank a map stays whole, as a search counted it: its two factors would be larger.
        if method.masks or rank < min(inputs, outputs // groups):
            found.append(LinearShape(name=name, rank=rank, groups=groups, cached=method.cached))
    return tuple(found)


# From losses, Fisher information or sensitivities to a rank for each map: numbers alone.


def ranks_at(
    sizes: Mapping[Key, Size], rule: RankRule, ratios: Mapping[Key, float], align: int | None
) -> dict[Key, int]:
    """A ratio of its own for every linear map."""
    return {key: aligned(rule(*size, ratios[key]), most=rule(*size, 0.0), align=align) for key, size in sizes.items()}


def aligned(rank: int, *, most: int, align: int | None) -> int:
    """The nearest multiple of `align`, ties down, from one step up to the last one within `most`."""
    # Where not even one step fits, there is nothing to align to and the rank stays.
    if align is None or most < align:
        return min(rank, most)
    below = rank // align * align
    nearest = below if rank - below <= below + align - rank else below + align
    return max(align, min(nearest, most // align * align))


def truncation_loss(mean_square: float, *, tokens: int) -> float:
    """|X W - X W'|_F over all calibration tokens, the unit of SVD-LLM V2, from a loss per token."""
    return math.sqrt(mean_square * tokens)


def loss_ratios(losses: Mapping[Key, float], ratio: float) -> dict[Key, float]:
    """SVD-LLM V2: linear maps of one type are cut in proportion to 1 / log(loss).           [math.md L-10]"""
    # Losses are Frobenius norms over all calibration tokens at the common ratio; the mean over each type is `ratio`.
    ratios: dict[Key, float] = {}
    for kind in {name for _, name in losses}:
        weights = {key: 1 / math.log(max(loss, SMALLEST_LOSS)) for key, loss in losses.items() if key[1] == kind}
        ratios |= spread(weights, mean=ratio, most=max(MOST_REMOVED, ratio))
    return {key: ratios[key] for key in losses}


def fisher_ratios(fisher: Mapping[Key, float], ratio: float) -> dict[Key, float]:
    """Palu: ranks in proportion to Fisher information, over all keys and values together.   [math.md L-11]"""
    # Full ranks are taken as equal, as keys and values of one model are. The mean over all is `ratio`.
    return {key: 1 - share for key, share in spread(fisher, mean=1 - ratio, most=1.0).items()}


def spread(weights: Mapping[Item, float], *, mean: float, most: float) -> dict[Item, float]:
    """Shares in proportion to `weights`, none above `most`, with this mean (not above `most` either)."""
    # What a full share has no room for goes to the others, again in proportion.
    shares: dict[Item, float] = {}
    rest, left = dict(weights), mean * len(weights)
    while rest:
        total = sum(rest.values())
        # Where nothing is left to tell the rest apart, they are alike.
        portions = {key: weight / total if total > 0 else 1 / len(rest) for key, weight in rest.items()}
        full = [key for key, portion in portions.items() if left * portion > most]
        if not full:
            shares |= {key: left * portion for key, portion in portions.items()}
            break
        for key in full:
            shares[key] = most
            del rest[key]
        left = max(0.0, left - most * len(full))
    return {key: shares[key] for key in weights}


def sensitivity_ranks(
    curves: Mapping[Key, Curve], sizes: Mapping[Key, Size], rule: RankRule, ratio: float
) -> dict[Key, int]:
    """ASVD's STRS: every cut whose own perplexity is below one threshold, the lowest.       [math.md L-12]"""
    # Every linear map takes the deepest of its cuts below the threshold, or stays whole (its full rank) if it
    # has none. The result never has more parameters than the ratio allows.
    budget = math.floor((1 - ratio) * sum(inputs * outputs for inputs, outputs, _ in sizes.values()))
    # Every cut of every curve, the most harmful first; a model that broke down is worse than any other.
    known = ((key, share, perplexity) for key, curve in curves.items() for share, perplexity in curve.items())
    harm = [(-math.inf if math.isnan(perplexity) else -perplexity, key, share) for key, share, perplexity in known]
    cuts = [(key, share) for _, key, share in sorted(harm) if share < 1]

    def ranks(harmful: int) -> dict[Key, int]:
        """With the `harmful` most sensitive cuts forbidden."""
        shares = dict.fromkeys(sizes, 1.0)
        for key, share in cuts[harmful:]:
            shares[key] = min(shares[key], share)
        whole = {key: min(sizes[key][:2]) for key in shares}
        return {key: whole[key] if share >= 1 else rule(*sizes[key], 1 - share) for key, share in shares.items()}

    # Forbidding more never makes a model smaller, so bisection finds the most that can be.
    most = bisect_right(range(len(cuts) + 1), budget, key=lambda harmful: _parameters(ranks(harmful), sizes)) - 1
    if most < 0:
        raise TrisectError(f"No measured sensitivity reaches a ratio of {ratio:g}; use less, or --allocate uniform.")
    return ranks(most)


def _parameters(ranks: Mapping[Key, int], sizes: Mapping[Key, Size]) -> int:
    """Of factored maps; one at its full rank is not factored."""
    maps = [(rank, *sizes[key][:2]) for key, rank in ranks.items()]
    return sum(n * m if rank >= min(n, m) else rank * (n + m) for rank, n, m in maps)
