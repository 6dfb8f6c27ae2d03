"""From a config to a plan."""

from trisect.config import CompressConfig
from trisect.errors import TrisectError
from trisect.plan.balanced import balanced_plan
from trisect.plan.curves import Curves
from trisect.plan.plan import Plan
from trisect.plan.uniform import uniform_plan
from trisect.shapes import ModelShape


def plan_for(shape: ModelShape, config: CompressConfig, curves: Curves | None = None) -> Plan:
    """The widths a config asks for."""
    asked = {
        "ratio": config.ratio,
        "parts": config.parts,
        "layers": config.layers,
        "align": config.align,
        "method": config.method,
    }
    if config.allocate == "uniform":
        return uniform_plan(shape, **asked)  # type: ignore[arg-type]
    if curves is None:
        raise TrisectError("A balanced plan needs measured loss curves: name their file with --curves.")
    return balanced_plan(shape, curves, **asked)  # type: ignore[arg-type]
