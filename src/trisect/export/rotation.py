"""How a stock model turns its heads, and where each layer's rotation pairs go in them.

k = key heads, p = a head's pairs, n = slots of the stock head
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trisect.errors import TrisectError
from trisect.models import LayerView, family_of
from trisect.models.rotary import Rotation, rotation_of
from trisect.records.shapes import LayerShape

SAME = 3e-7
"""Relative distance within which two rates are one: two units in the last place of float32."""

NUDGES = range(-4, 5)


class NotPortable(TrisectError):
    """No stock checkpoint can hold this model, though one of the same source, cut with --portable, would fit."""


def common_slots(layers: Sequence[Tensor]) -> Tensor:
    """The fewest slots (n,), fastest first, in which every head of rates (k, p) finds its own."""
    # A head may turn several pairs at one rate (folded frequencies do), and then needs as many such slots.
    kinds = _kinds(torch.cat([rates.flatten() for rates in layers]))
    most: Counter[int] = Counter()
    for rates in layers:
        for head in rates:
            most |= Counter(_kind_of(head, kinds))
    return torch.tensor([rate for kind, rate in enumerate(kinds) for _ in range(most[kind])]).double()


def places_in(rates: Tensor, slots: Tensor) -> Tensor | None:
    """Which slot each pair of `rates` (k, p) takes, (k, p); None where a head finds no room."""
    kinds = _kinds(torch.cat([rates.flatten(), slots]))
    free: dict[int, list[int]] = {}
    for place, kind in enumerate(_kind_of(slots, kinds)):
        free.setdefault(kind, []).append(place)
    found = []
    for head in rates:
        taken: Counter[int] = Counter()
        row = []
        for kind in _kind_of(head, kinds):
            if taken[kind] >= len(free.get(kind, [])):
                return None
            row.append(free[kind][taken[kind]])
            taken[kind] += 1
        found.append(row)
    return torch.tensor(found)


def padded(slots: Tensor, count: int) -> Tensor:
    """More slots, for pairs that are zero everywhere: any rate does, so the slowest is repeated."""
    return torch.cat([slots, slots[-1:].expand(count - len(slots))])


def stock_factors(rates: Tensor, base: float) -> list[float]:
    """Divisors f of the frequencies base^(-2j/2n), so that 1 / (f_j base^(2j/2n)) are the rates (n,)."""
    # Stock code does this in float32; of the neighbouring factors, the one that comes nearest is taken.
    n = len(rates)
    powers = base ** (torch.arange(0, 2 * n, 2, dtype=torch.int64).float() / (2 * n))
    exact = 1 / (rates.double() * powers.double())
    choices = torch.stack([exact * (1 + nudge * 2.0**-24) for nudge in NUDGES]).float()
    errors = (1.0 / (choices * powers) - rates.float()).abs()
    best: list[float] = choices.gather(0, errors.argmin(dim=0, keepdim=True))[0].tolist()
    return best


def listed_rope(factors: list[float], base: float, longest: int) -> dict[str, Any]:
    """Arbitrary frequencies, in the one kind of RoPE that lists a factor for each of them."""
    # Short and long factors are the same and the lengths are equal, so that nothing changes with the length of
    # a text and no engine finds a scale to multiply attention with.
    return {
        "rope_type": "longrope",
        "rope_theta": base,
        "short_factor": factors,
        "long_factor": list(factors),
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": longest,
    }


def _kinds(rates: Tensor) -> list[float]:
    """The distinct rates, fastest first."""
    kinds: list[float] = []
    for rate in rates.double().sort(descending=True).values.tolist():
        if not kinds or rate < kinds[-1] * (1 - SAME):
            kinds.append(rate)
    return kinds


def _kind_of(rates: Tensor, kinds: list[float]) -> list[int]:
    """The number of each rate's kind: the slowest that is not slower than it."""
    rising = torch.tensor(kinds[::-1]).double()
    found = torch.searchsorted(rising, rates.detach().double().cpu())
    return [len(kinds) - 1 - int(index) for index in found]


@dataclass(frozen=True, kw_only=True)
class StockRotation:
    """How the stock model turns, and where each layer's pairs go."""

    pairs: int
    """Slots of the stock head: half its width."""
    slots: Tensor | None
    """(n,) radians per token; None where the source's own rotation stays."""
    places: list[Any]  # (k, p) of each layer
    scaling: float
    """What the stock table multiplies queries and keys with."""


def stock_rotation(model: Any, views: list[LayerView], *, baked: bool) -> StockRotation:
    """The source's own rotation if all pairs have a place in it, else one set of rates; or a refusal."""
    shapes = [view.shape() for view in views]
    own = own_rotation(model)
    config = views[0].config  # whose head width the source's own rotation belongs to
    whole = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    if own is None:
        return _changing(views, shapes, whole, baked=baked)
    own_rates, parts = own.rates.float().double().cpu(), [view.read_qk() for view in views]
    layers = [own_rates[qk.frequencies.cpu()] if qk.rates is None else qk.rates.cpu() for qk in parts]
    slots = common_slots(layers)
    room = max(-(-max(shape.qk, shape.vo) // 2) for shape in shapes)
    places = [places_in(rates, own_rates) for rates in layers]
    if 2 * room == whole and all(found is not None for found in places):
        scaling = 1.0 if baked else own.scaling
        return StockRotation(pairs=room, slots=own_rates if baked else None, places=places, scaling=scaling)
    if len(slots) > room:
        raise NotPortable(
            f"The heads of this model turn at {len(slots)} different rates together, and stock heads of width "
            f"{2 * room} share one set of {room}: compress with --portable (or --rope-scope model), which gives every "
            "head the same set."
        )
    slots = padded(slots, room)
    places = [places_in(rates, slots) for rates in layers]
    return StockRotation(pairs=room, slots=slots, places=places, scaling=1.0)


def _changing(views: list[LayerView], shapes: list[LayerShape], whole: int, *, baked: bool) -> StockRotation:
    """A rotation that changes with the length of the text can stay, but cannot be written as rates."""
    cut = any(getattr(view.attention_module, "rotary_index", None) is not None for view in views)
    if baked or cut or max(max(shape.qk, shape.vo) for shape in shapes) != whole:
        raise TrisectError(
            "This model's RoPE changes with the length of the text (dynamic or longrope), so narrower heads "
            "have no one set of rates to be exported with; compress with --parts mlp, and export --to hf."
        )
    places = [torch.arange(shape.pairs).expand(shape.kv_heads, -1) for shape in shapes]
    return StockRotation(pairs=whole // 2, slots=None, places=places, scaling=1.0)


def own_rotation(model: Any) -> Rotation | None:
    """The source's rotation, if it is one for all lengths."""
    return rotation_of(model.get_submodule(family_of(model).layers.rpartition(".")[0]))
