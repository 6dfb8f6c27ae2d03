"""Widths on the hardware's grid: off it, a narrow model runs slower than the dense one."""

import math
from dataclasses import dataclass

from trisect.shapes import LayerShape

MLP_STEPS = {8: 64, 16: 128, 32: 256}
"""Head step -> MLP step: what an MLP's GEMM tiles need beside heads of that step."""

MINIMUM_HEAD = 2
MINIMUM_MLP = 1


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Where one component's width may land."""

    width: int
    """The width now: always allowed, even off the grid, and never exceeded."""
    step: int
    """Distance of the grid's points; with `nearest` False, of the points rounded down to."""
    minimum: int
    nearest: bool
    """Go to the nearest point (ties down), or round to an integer and then down (exact ranks)."""

    def width_at(self, ratio: float) -> int:
        """The width with `ratio` of it removed; may lie below the minimum, which is an error."""
        # 1 - 0.3 is not 0.7 in binary; nine digits keep such dust from deciding a tie.
        target = round((1 - ratio) * self.width, 9)
        if not self.nearest:
            exact = round(target)
            return exact if exact == self.width else exact - exact % self.step
        below = int(target // self.step) * self.step
        above = min(below + self.step, self.width)
        return below if target - below <= above - target else above

    def at_least(self, share: float) -> int:
        """The narrowest allowed width that keeps this share, and never less than the minimum."""
        return max(self.minimum, self.up(math.ceil(round(share * self.width, 9))))

    def up(self, width: int) -> int:
        """The narrowest point of the grid that is not below `width`."""
        return min(self.width, -(-width // self.step) * self.step)

    def holds(self, ratio: float) -> bool:
        """Whether the width at this ratio is one that a model can have."""
        return self.width_at(ratio) >= self.minimum


def grid_of(layer: LayerShape, component: str, *, align: int | None) -> Grid:
    """The widths `component` may take in this layer."""
    width = layer.width(component)
    if align is None:
        rotary = component == "qk" and layer.pairs > 0
        smallest = MINIMUM_MLP if component == "mlp" else MINIMUM_HEAD
        return Grid(
            width=width,
            step=2 if rotary else 1,  # a rotation turns two channels, so they leave together
            minimum=min(smallest, width),
            nearest=False,
        )
    step = MLP_STEPS[align] if component == "mlp" else align
    return Grid(width=width, step=step, minimum=min(step, width), nearest=True)


def pairs_at(layer: LayerShape, *, qk: int) -> int:
    """Rotation pairs in a head narrowed to `qk`: exact with full RoPE, at most with partial."""
    return min(layer.pairs, qk // 2)
