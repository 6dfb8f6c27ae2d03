"""`trisect inspect`: the sizes of a model, and what was removed from it."""

from typing import TYPE_CHECKING, Any

from trisect.commands import _options as options

if TYPE_CHECKING:
    from trisect.shapes import ModelShape


def run(
    model: options.Model,
    json: options.Json = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Show a model's widths, parameters, cache and FLOPs; no weights are read."""
    from trisect.commands._screen import hushed, stdout
    from trisect.files import write_json
    from trisect.models import read_shape
    from trisect.report.table import compression_table

    with hushed():
        current, original, info = read_shape(model, trust_remote_code=trust_remote_code)
    measurement = {"model": model, **describe(current, original), **info}
    console = stdout()
    console.print(
        f"{model}: family {info.get('family')}, {len(current.layers)} layers, "
        f"method {info.get('method') or 'none'}",
        soft_wrap=True,
    )
    console.print(compression_table(original, current, labels=("original", "now")))
    if json is not None:
        write_json(json, measurement)


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
