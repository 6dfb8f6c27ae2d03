"""A compressed model as the weights of a stock one: one head width, one set of rates, zeros to fill up.

h = query heads, k = key/value heads, D = d_model, p = a head's pairs, n = slots of the stock head
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trisect.export.rotor import find_rotor, own_scaling
from trisect.export.targets import check_exportable
from trisect.models import LayerView, layer_views
from trisect.models.components import read_mlp, read_ov, read_qk
from trisect.parts import MLP, OV, QK


@dataclass(frozen=True, kw_only=True)
class Stock:
    """Everything that a stock checkpoint needs beside the config it started from."""

    head_width: int
    mlp_widths: tuple[int, ...]
    """What each layer's MLP needs; `tensors` are padded to the widest."""
    rates: Tensor | None
    """(n,) radians per token of the head's slots; None where the source's own rotation stays."""
    tensors: dict[str, Tensor]
    """Names of the stock checkpoint -> weights."""

    @property
    def mlp_width(self) -> int:
        return max(self.mlp_widths)


@torch.no_grad()
def stock_weights(model: Any, *, baked: bool = False) -> Stock:
    """The same function as weights of the stock class.

    `baked` lists the rates even where the source's own rotation could stay, and folds its scaling in.
    """
    check_exportable(model)
    views = layer_views(model)
    rotor = find_rotor(model, views, baked=baked)
    pairs = rotor.pairs
    widths = tuple(view.shape().mlp for view in views)
    tensors = _untouched(model)
    for view, places in zip(views, rotor.places, strict=True):
        prefix = f"{view.family.layers}.{view.index}"
        a = view.attention
        turned = 1.0 if a.rotary_rates is not None else own_scaling(model)
        scale = getattr(a, view.family.scale) * (2 * pairs) ** 0.5
        if a.num_pairs:  # a layer that does not rotate never meets the table
            scale *= (turned / rotor.scaling) ** 2
        found = _norms(view, scale)
        found |= _qk(read_qk(view), places, pairs, 1.0 if found else scale)
        found |= _ov(read_ov(view), 2 * pairs) | _mlp(read_mlp(view), max(widths))
        tensors |= {f"{prefix}.{name}": tensor.contiguous() for name, tensor in found.items()}
    return Stock(head_width=2 * pairs, mlp_widths=widths, rates=rotor.slots, tensors=tensors)


def _norms(view: LayerView, scale: float) -> dict[str, Tensor]:
    """Norms between projection and rotation: what stands before them cannot carry the scale."""
    if view.family.norms is None:
        return {}
    q_norm, k_norm = view.family.norms
    q, k = (getattr(view.attention, name).weight.detach() for name in (q_norm, k_norm))
    return {f"self_attn.{q_norm}.weight": q * scale, f"self_attn.{k_norm}.weight": k}


def _qk(part: QK, places: Tensor, n: int, scale: float) -> dict[str, Tensor]:
    W_q, b_q = (None if x is None else x * scale for x in (part.W_q, part.b_q))
    assert W_q is not None
    of_query = places.repeat_interleave(part.group, dim=0)
    maps = {"q_proj": (W_q, b_q, of_query), "k_proj": (part.W_k, part.b_k, places)}
    found = {}
    for name, (W, b, where) in maps.items():
        found[f"self_attn.{name}.weight"] = _spread(W, where, n).movedim(-1, 1).flatten(0, 1)  # (h 2n, D)
        if b is not None:
            found[f"self_attn.{name}.bias"] = _spread(b.unsqueeze(1), where, n).flatten()
    return found


def _spread(x: Tensor, places: Tensor, n: int) -> Tensor:
    """Channels (h, ., 2p) into the places (h, p) of n slots, first halves and second halves alike.

    Without pairs (p = 0) nothing turns, and zeros go behind whatever channels there are.
    """
    if places.shape[-1] == 0:
        return torch.nn.functional.pad(x, (0, 2 * n - x.shape[-1]))
    out = x.new_zeros(*x.shape[:-1], 2 * n)
    where = torch.cat([places, n + places], dim=-1).to(x.device)
    return out.scatter(-1, where.unsqueeze(1).expand_as(x), x)


def _ov(part: OV, width: int) -> dict[str, Tensor]:
    more = width - part.width
    W_v = torch.nn.functional.pad(part.W_v, (0, more))  # (k, D, width)
    W_o = part.W_o.expand(part.heads, -1, -1)  # one shared by all heads is repeated for each
    W_o = torch.nn.functional.pad(W_o, (0, 0, 0, more))  # (h, width, D)
    found = {
        "self_attn.v_proj.weight": W_v.mT.flatten(0, 1),
        "self_attn.o_proj.weight": W_o.flatten(0, 1).T,
    }
    if part.b_v is not None:
        found["self_attn.v_proj.bias"] = torch.nn.functional.pad(part.b_v, (0, more)).flatten()
    if part.b_o is not None:
        found["self_attn.o_proj.bias"] = part.b_o
    return found


def _mlp(part: MLP, width: int) -> dict[str, Tensor]:
    more = width - part.width
    assert part.W_gate is not None
    grown = {"up": part.W_up, "gate": part.W_gate}
    found = {f"mlp.{k}_proj.weight": torch.nn.functional.pad(W, (0, more)).T for k, W in grown.items()}
    found["mlp.down_proj.weight"] = torch.nn.functional.pad(part.W_down, (0, 0, 0, more)).T
    for name, b in {"up": part.b_up, "gate": part.b_gate}.items():
        if b is not None:
            found[f"mlp.{name}_proj.bias"] = torch.nn.functional.pad(b, (0, more))
    if part.b_down is not None:
        found["mlp.down_proj.bias"] = part.b_down
    return found


def _untouched(model: Any) -> dict[str, Tensor]:
    """Embeddings, norms and the head, under the names they have."""
    parts = (".self_attn.", ".mlp.")
    return {k: v for k, v in model.state_dict().items() if not any(part in k for part in parts)}
