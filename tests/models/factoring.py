"""Factors of linear maps for the tests: by plain SVDs, written out here and not taken from the package."""

from typing import Any

import torch
from torch import Tensor

from tiny_models import tiny
from trisect.models import LayerView, layer_views
from trisect.records.parts import Factored, Linear


def factors(part: Linear, *, rank: int | None = None, groups: int = 1, cached: bool = False) -> Factored:
    """The best factors of every group of outputs; exact unless a rank is given."""
    W = part.W.double().unflatten(1, (groups, -1)).movedim(1, 0)  # (in, out) -> (g, in, out / g)
    rank = rank or min(W.shape[1:])
    U, s, Vh = torch.linalg.svd(W, full_matrices=False)
    A = (U * s.unsqueeze(1))[..., :rank].movedim(0, 1).flatten(1)  # (g, in, r) -> (in, g r)
    return Factored(name=part.name, A=A, B=Vh[:, :rank], b=part.b, cached=cached, loss=0.0, total=0.0)


def product(solution: Factored) -> Tensor:
    """The dense map that two factors stand for, (in, out)."""
    return solution.A @ torch.block_diag(*solution.B)


def mixed(name: str, **kwargs: Any) -> Any:
    """A tiny model with some or all maps of a fused module factored, in one group and in one per head."""
    model = tiny(name, **kwargs)
    first, second = layer_views(model)[:2]
    apply(first, v=4, k=5, up=7, per_head=True)
    gate = {"gate": 6} if "gate" in second.linears() else {}
    apply(second, q=9, k=3, v=6, o=11, up=5, down=8, **gate)
    return model


def apply(view: LayerView, *, per_head: bool = False, **ranks: int) -> None:
    """Factor maps in the given order; latents of keys and values are cached."""
    for name, rank in ranks.items():
        part = view.linear(name)
        groups = part.heads if per_head and name in ("k", "v") else 1
        view.apply(factors(part, rank=rank, groups=groups, cached=name in ("k", "v")))
