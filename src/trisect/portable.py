"""The portable preset: settings whose result fits stock architectures without padding.

A stock checkpoint has one head width, one MLP width and one set of frequencies (docs/export.md), and engines
have kernels for some head widths only: of the multiples of 16, those from half the original width on.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trisect.components import COMPONENTS
from trisect.errors import TrisectError, option_name
from trisect.goals import read_floors

FIXED = {"method": "a3+", "rope_scope": "model", "allocate": "uniform", "layers": None}
STEPS = (16, 32)
"""Head steps that kernels know; 32 also suits quantised KV caches, and its MLP step of 256 K-quants."""
NARROWEST = 0.5


def portable_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of a portable run; what was `given` may add to the preset, not contradict it."""
    for name, value in FIXED.items():
        if given.get(name, value) != value:
            raise _contradiction(
                name, given[name], f"{option_name(name)} {value}" if value else "every layer"
            )
    if given.get("align", STEPS[0]) not in STEPS:
        raise _contradiction("align", given["align"] or "none", "--align 16 or 32")
    parts = given.get("parts", COMPONENTS)
    if ("qk" in parts) != ("ov" in parts):
        raise _contradiction("parts", ",".join(parts), "qk and ov together: stock heads have one width")
    floor = read_floors(given.get("floor"))
    floor = replace(floor, qk=max(floor.qk, NARROWEST), ov=max(floor.ov, NARROWEST))
    return {**given, **FIXED, "align": given.get("align", STEPS[0]), "floor": floor}


def _contradiction(name: str, value: Any, means: str) -> TrisectError:
    return TrisectError(
        f"--portable means {means}, and {option_name(name)} {value} was given; leave one of the two out."
    )
