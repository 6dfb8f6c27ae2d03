"""The metric of a3+'s regressions: errors relative to the dense residual stream, against sums by hand."""

import pytest
import torch
from torch import Tensor

from tiny_models import tiny, tokens
from trisect.calibrate import TwoStreams
from trisect.methods import METHODS
from trisect.models import layer_views


def heard(module: torch.nn.Module, run: torch.nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Input and output (n, ...) of a module while the model runs, a row per token."""
    found: list[tuple[Tensor, Tensor]] = []
    handle = module.register_forward_hook(lambda m, args, out: found.append((args[0], out)))
    with torch.no_grad():
        run(ids)
    handle.remove()
    return tuple(x.flatten(0, 1) for x in found[0])


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2"])
def test_rows_count_by_the_inverse_square_of_the_dense_residual_stream(name: str) -> None:
    model, ids = tiny(name).double(), tokens(8, 12)
    layer = model.model.layers[0]
    x, _ = heard(layer.mlp.down_proj, model, ids)
    a, attended = heard(layer.self_attn.o_proj, model, ids)
    _, v = heard(layer.self_attn.v_proj, model, ids)
    before = model.model.embed_tokens(ids).flatten(0, 1)
    behind_attention = before + attended
    weights = {"a": before.square().sum(-1), "mlp": behind_attention.square().sum(-1)}
    views = layer_views(model, own=True)
    streams = TwoStreams(model, views, ids, batch_size=3, seed=0)
    streams.begin(views[0])
    fit = len(ids) * 3 // 4 * ids.shape[1]  # the last quarter of the windows is held out
    for component, tap, features in (("ov", "a", a), ("mlp", "mlp", x)):
        found = streams.statistics(views[0], component, METHODS["a3+"].reads[component])
        rows = features / weights[tap].sqrt().unsqueeze(-1)
        for suffix, some in (("", slice(0, fit)), ("_held", slice(fit, None))):
            expected = rows[some].T @ rows[some] / len(rows[some])
            torch.testing.assert_close(found[f"{tap}_gram{suffix}"], expected, rtol=1e-9, atol=1e-12)
        if tap == "a":
            heads = (v / weights["a"].sqrt().unsqueeze(-1)).unflatten(-1, (2, -1))
            expected = torch.einsum("nki,nkj->kij", heads, heads) / len(heads)
            torch.testing.assert_close(found["a_values"], expected, rtol=1e-9, atol=1e-12)
