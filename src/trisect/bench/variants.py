"""The models of one bench: dense, narrow, and factored with the same parameters."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trisect.config import CompressConfig
from trisect.errors import TrisectError, unknown_name
from trisect.methods import get_method
from trisect.methods.method import options_of
from trisect.pipeline.rank_search import linear_plan
from trisect.plan import apply_plan, budget_of, compare, plan_for
from trisect.plan.problem import pairs_at
from trisect.records.parts import COMPONENTS
from trisect.records.shapes import ModelShape

KINDS = {
    "dense": "the stock transformers model",
    "owned": "the dense model through trisect's attention: what the runtime alone changes",
    "trisect": "narrow components",
    "svd-llm": "two linear maps for one, with the narrow model's parameters",
}
FACTORED = "svd-llm"
WIDTHS = re.compile(r"(\d+)/(\d+)/(\d+)")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One model to be timed."""

    kind: str
    asked: str
    """The ratio or widths that were asked for; empty for dense models."""
    shape: ModelShape
    removed: float
    """Of the decoder's linear weights."""

    @property
    def widths(self) -> str:
        """E.g. "96/96/11008", with spans where layers differ; ranks for factored maps."""
        layers = self.shape.layers
        if any(layer.linears for layer in layers):
            ranks = [linear.rank for layer in layers for linear in layer.linears]
            return f"rank {_span(ranks)}"
        columns = ([layer.width(part) for layer in layers] for part in COMPONENTS)
        return "/".join(map(_span, columns))

    @property
    def folded(self) -> bool:
        """Whether heads turn at rates of their own."""
        return any(layer.folded for layer in self.shape.layers)


def variants_of(
    dense: ModelShape,
    *,
    kinds: Sequence[str],
    ratios: Sequence[float] = (),
    widths: Sequence[str] = (),
    narrowed: ModelShape | None = None,
    align: int | None = 16,
    folded: bool = False,
) -> list[Variant]:
    """Dense ones first, then per cut the narrow model and its factored twin."""
    for kind in kinds:
        if kind not in KINDS:
            raise unknown_name("variant", kind, KINDS)
    found = [
        Variant(kind=kind, asked="", shape=dense, removed=0.0) for kind in ("dense", "owned") if kind in kinds
    ]
    cuts = [] if narrowed is None else [("checkpoint", narrowed)]
    cuts += [(f"{ratio:g}", narrow_shape(dense, ratio=ratio, align=align)) for ratio in ratios]
    cuts += [(text, shape_of_widths(dense, text)) for text in widths]
    for asked, shape in cuts:
        narrow = _folded(shape) if folded and asked != "checkpoint" else shape
        removed = compare(budget_of(dense), budget_of(narrow)).ratio
        if "trisect" in kinds:
            found.append(Variant(kind="trisect", asked=asked, shape=narrow, removed=removed))
        if FACTORED in kinds and removed > 0:
            factored = factored_shape(dense, ratio=removed, align=align)
            truly = compare(budget_of(dense), budget_of(factored)).ratio
            found.append(Variant(kind=FACTORED, asked=asked, shape=factored, removed=truly))
    return found


def narrow_shape(dense: ModelShape, *, ratio: float, align: int | None) -> ModelShape:
    """The widths that `trisect compress --ratio` plans."""
    return apply_plan(dense, plan_for(dense, CompressConfig(ratio=ratio, align=align, allocate="uniform")))


def factored_shape(dense: ModelShape, *, ratio: float, align: int | None) -> ModelShape:
    """The ranks that `trisect compress --method svd-llm` plans."""
    config = CompressConfig(ratio=ratio, method=FACTORED, align=align, allocate="uniform")
    options = options_of(config)
    plan = linear_plan(dense, get_method(FACTORED), config, None, options=options, progress=None)
    return apply_plan(dense, plan)


def shape_of_widths(dense: ModelShape, text: str) -> ModelShape:
    """Widths written as QK/VO/MLP, the same in every layer."""
    match = WIDTHS.fullmatch(text.strip())
    if match is None:
        raise TrisectError(f"Cannot read the widths {text!r}; write QK/VO/MLP, e.g. --widths 96/96/11008.")
    qk, vo, mlp = map(int, match.groups())
    for layer in dense.layers:
        if not (0 < qk <= layer.qk and 0 < vo <= layer.vo and 0 < mlp <= layer.mlp):
            raise TrisectError(
                f"The widths {text} do not fit the model, whose are {layer.qk}/{layer.vo}/{layer.mlp}; "
                "none may be larger, and none 0."
            )
        if layer.pairs and 2 * layer.pairs == layer.qk and qk % 2:
            raise TrisectError(f"A rotated head has an even width, not {qk}; try {qk - 1}/{vo}/{mlp}.")
    layers = (
        layer.with_widths(qk=qk, pairs=pairs_at(layer, qk=qk), vo=vo, mlp=mlp) for layer in dense.layers
    )
    return replace(dense, layers=tuple(layers))


def _folded(shape: ModelShape) -> ModelShape:
    return replace(shape, layers=tuple(replace(layer, folded=layer.pairs > 0) for layer in shape.layers))


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low}..{high}"
