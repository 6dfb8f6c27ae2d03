"""How a stock model turns its heads, and where each layer's rotation pairs go in them.

k = key heads, p = a head's pairs, n = slots of the stock head
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trisect.errors import TrisectError
from trisect.export.rotation import common_slots, padded, places_in
from trisect.models import LayerView, family_of
from trisect.models.rotary import rotation_of
from trisect.parts import QK
from trisect.shapes import LayerShape


@dataclass(frozen=True, kw_only=True)
class Rotor:
    """How the stock model turns, and where each layer's pairs go."""

    pairs: int
    """Slots of the stock head: half its width."""
    slots: Tensor | None
    """(n,) radians per token; None where the source's own rotation stays."""
    places: list[Tensor]  # (k, p) of each layer
    scaling: float
    """What the stock table multiplies queries and keys with."""


def find_rotor(model: Any, views: list[LayerView], *, baked: bool) -> Rotor:
    """The source's own rotation if all pairs have a place in it, else one set of rates; or a refusal."""
    shapes = [view.shape() for view in views]
    own = rotation_of(_decoder(model))
    whole = max(_whole_width(view) for view in views)
    if own is None:
        return _changing(views, shapes, whole, baked=baked)
    own_rates = own.rates.float().double().cpu()
    layers = [_rates(view, own_rates) for view in views]
    slots = common_slots(layers)
    room = max(-(-max(shape.qk, shape.vo) // 2) for shape in shapes)
    if 2 * room == whole and all(places_in(rates, own_rates) is not None for rates in layers):
        slots, scaling = own_rates, 1.0 if baked else own.scaling
        places = [_placed(rates, slots) for rates in layers]
        return Rotor(pairs=room, slots=slots if baked else None, places=places, scaling=scaling)
    if len(slots) > room:
        raise TrisectError(
            f"The heads of this model turn at {len(slots)} different rates together, and stock heads of "
            f"width {2 * room} share one set of {room}: compress all layers again with --method a3+ "
            "--portable (or --rope-scope model), so that every head has the same set, or with --parts "
            "ov,mlp, which leaves queries and keys alone."
        )
    slots = padded(slots, room)
    places = [_placed(rates, slots) for rates in layers]
    return Rotor(pairs=room, slots=slots, places=places, scaling=1.0)


def _changing(views: list[LayerView], shapes: list[LayerShape], whole: int, *, baked: bool) -> Rotor:
    """A rotation that changes with the length of the text can stay, but cannot be written as rates."""
    cut = any(v.attention.rotary_index is not None or v.attention.rotary_rates is not None for v in views)
    if baked or cut or max(max(shape.qk, shape.vo) for shape in shapes) != whole:
        raise TrisectError(
            "This model's RoPE changes with the length of the text (dynamic or longrope), so narrower heads "
            "have no one set of rates to be exported with; compress with --parts mlp, and export --to hf."
        )
    places = [torch.arange(shape.pairs).expand(shape.kv_heads, -1) for shape in shapes]
    return Rotor(pairs=whole // 2, slots=None, places=places, scaling=1.0)


def _rates(view: LayerView, own: Tensor) -> Tensor:
    part = view.part("qk")
    assert isinstance(part, QK)
    return own[part.frequencies.cpu()] if part.rates is None else part.rates.cpu()


def _placed(rates: Tensor, slots: Tensor) -> Tensor:
    places = places_in(rates, slots)
    assert places is not None
    return places


def _decoder(model: Any) -> Any:
    return model.get_submodule(family_of(model).layers.rpartition(".")[0])


def own_scaling(model: Any) -> float:
    """What the source's table multiplies queries and keys with, on top of turning them (yarn)."""
    own = rotation_of(_decoder(model))
    return 1.0 if own is None else own.scaling


def _whole_width(view: LayerView) -> int:
    """The head width that the source's config gives, which its own rotation belongs to."""
    config = view.attention.config
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
