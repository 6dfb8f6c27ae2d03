"""What one component of one layer costs at a width: an integer in whatever the budget counts.

Every count of `budget_of` is a constant plus, per component, a price per channel times its width. So costs
of components add up, and the price is read off `budget_of` itself: the two cannot disagree.    [math.md A-2]
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from trisect.parts import COMPONENTS
from trisect.plan.budget import budget_of
from trisect.plan.latency import LatencyTable
from trisect.shapes import WIDTH_FIELDS, LayerShape, ModelShape

FIELDS = {
    "linear": "linear_parameters",  # matrices of the decoder: what a ratio counts
    "params": "parameters",  # biases too: what a whole model's size counts
    "kv": "kv_bytes_per_token",
    "flops": "flops",
}


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Prices in one unit: a key of FIELDS, or nanoseconds where a table is given."""

    shape: ModelShape
    unit: str
    table: LatencyTable | None = None

    def of(self, layer: int, component: str, width: int) -> int:
        """The cost of a component at this width."""
        if self.table is not None:
            return self.table.nanoseconds(self.shape.layers[layer], component, width)
        itemsize = self.shape.bytes_per_element
        return width * _price(self.shape.layers[layer], component, self.unit, itemsize)

    def full(self, layer: int, component: str) -> int:
        """Its cost as it is."""
        return self.of(layer, component, self.shape.layers[layer].width(component))

    def fixed(self, layer: int) -> int:
        """What a layer costs whatever its widths: norms, softmax, biases of outputs."""
        if self.table is not None:
            return self.table.rest(self.shape.layers[layer])
        bare = self.shape.layers[layer].with_widths(qk=0, pairs=0, vo=0, mlp=0)
        return _total(bare, self.unit, self.shape.bytes_per_element)

    def outside(self) -> int:
        """What the whole model costs beside its layers."""
        return self.shape.other_parameters if self.unit == "params" else 0

    def whole(self) -> int:
        """The whole model."""
        layers = range(len(self.shape.layers))
        parts = sum(self.full(layer, part) for layer in layers for part in COMPONENTS)
        return parts + sum(self.fixed(layer) for layer in layers) + self.outside()


@lru_cache(maxsize=4096)
def _price(layer: LayerShape, component: str, unit: str, itemsize: int) -> int:
    """Per channel of width."""
    width = layer.width(component)
    without = replace(layer, **{WIDTH_FIELDS[component]: 0})  # type: ignore[arg-type]
    return (_total(layer, unit, itemsize) - _total(without, unit, itemsize)) // max(1, width)


def _total(layer: LayerShape, unit: str, itemsize: int) -> int:
    alone = ModelShape(layers=(layer,), other_parameters=0, bytes_per_element=itemsize)
    return int(getattr(budget_of(alone), FIELDS[unit]))
