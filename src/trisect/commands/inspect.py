"""`trisect inspect`: the sizes of a model, and what was removed from it."""

from typing import TYPE_CHECKING, Any

from trisect.commands import _screen as screen
from trisect.commands._options import Json, Model, TrustRemoteCode

PANEL = "Measure"
EXAMPLES = (
    ("What was removed from a model", "trisect inspect small"),
    ("Its numbers as a file", "trisect inspect small --json sizes.json"),
)

if TYPE_CHECKING:
    from trisect.records.shapes import ModelShape


def run(model: Model, json: Json = None, trust_remote_code: TrustRemoteCode = False) -> None:
    """Show a model's widths, parameters, cache and FLOPs; no weights are read."""
    from trisect.models import read_shape
    from trisect.report.terminal import compression_table

    with screen.quiet_libraries():
        current, original, info = read_shape(model, trust_remote_code=trust_remote_code)
    name, method = screen.quoted(model), info.get("method")
    screen.say(
        f"{model}: family {info.get('family')}, {len(current.layers)} layers, method {method or 'none'}"
        + quantised(info.get("quantization"))
    )
    screen.say(compression_table(original, current, labels=("original", "now")))
    for line in info["left_whole"]:
        screen.say(f"left whole: {line}")
    screen.keep_measurement(json, {"model": model, **describe(current, original), **info})
    screen.say_next(f"trisect eval {name}" if method else f"trisect compress {name} -o OUT --ratio 0.25")


def quantised(packing: dict[str, Any] | None) -> str:
    """The end of the first line: in how many bits the linear maps are held."""
    if packing is None:
        return ""
    held = ", ".join(f"{count} linear maps in {bits} bits" for bits, count in packing["modules_by_bits"].items())
    return f"; {held} ({packing['backend']})"


def describe(current: "ModelShape", original: "ModelShape") -> dict[str, Any]:
    """The measurement: this model's numbers, and the original's under their own key."""
    from trisect.plan import budget_of, compare

    now, was = budget_of(current), budget_of(original)
    return {
        **now.to_dict(),
        "ratio": compare(was, now).ratio,
        "layers": _widths(current),
        "original": {**was.to_dict(), "layers": _widths(original)},
    }


def _widths(shape: "ModelShape") -> list[dict[str, int]]:
    return [{"qk": layer.qk, "vo": layer.vo, "mlp": layer.mlp} for layer in shape.layers]
