"""Random rotation problems, and their answer in float64 by complex numbers."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# b = batch, t = tokens, h = query heads, k = key heads, n = the model's frequencies, p = a head's pairs


@dataclass
class Problem:
    """Heads and what turns them; `kind` is where angles come from."""

    q: Tensor
    k: Tensor
    pairs: int
    layout: str
    kind: str
    positions: Tensor
    table: tuple[Tensor, Tensor]
    index: Tensor | None
    rates: Tensor | None

    def angles(self) -> dict[str, Any]:
        """The arguments of rotate_qk that say how to turn."""
        if self.kind == "rates":
            assert self.rates is not None
            return {"rates": self.rates.view(torch.int32), "positions": self.positions}
        return {"table": self.table, "index": self.index}

    def flat(self) -> tuple[Tensor | None, ...]:
        """The same as operators take it: cos, sin, index, rates, positions."""
        angles = self.angles()
        cos, sin = angles.get("table", (None, None))
        return cos, sin, angles.get("index"), angles.get("rates"), angles.get("positions")


def problem(
    *,
    batch: int = 2,
    length: int = 3,
    kv_heads: int = 2,
    group: int = 3,
    pairs: int = 5,
    rest: int = 0,
    layout: str = "half",
    kind: str = "index",
    dtype: torch.dtype = torch.float32,
    first: int = 0,
    strided: bool = False,
    seed: int = 0,
    device: str = "cpu",
) -> Problem:
    """`strided` heads are views into one matrix with queries, keys and values side by side."""
    generator = torch.Generator().manual_seed(seed)
    heads, width, n = kv_heads * group, 2 * pairs + rest, pairs + (0 if kind == "shared" else 3)
    columns = [heads * width, kv_heads * width, kv_heads * 7 if strided else 0]
    fused = torch.randn(batch, length, sum(columns), generator=generator).to(dtype).to(device)
    q, k, _ = fused.split(columns, dim=-1)
    q, k = q.unflatten(-1, (heads, width)), k.unflatten(-1, (kv_heads, width))
    if not strided:
        q, k = q.contiguous(), k.contiguous()
    positions = first + torch.arange(length) + 5 * torch.arange(batch)[:, None]
    model_rates = torch.rand(n, generator=generator)
    turns = (positions[..., None].double() * model_rates.double()).repeat(1, 1, 2)
    table = turns.cos().float().to(device), turns.sin().float().to(device)
    order = [torch.randperm(n, generator=generator)[:pairs] for _ in range(kv_heads)]
    index = torch.stack(order).to(torch.int16).to(device) if kind == "index" else None
    rates = torch.rand(kv_heads, pairs, generator=generator)
    if kind == "index":
        own = model_rates[torch.stack(order)]
    else:
        own = rates if kind == "rates" else model_rates[:pairs].expand(kv_heads, -1)
    made = Problem(
        q=q, k=k, pairs=pairs, layout=layout, kind=kind, positions=positions.to(device), table=table,
        index=index, rates=own.contiguous().to(device),
    )  # fmt: skip
    return made


def answer(p: Problem, *, backwards: bool = False) -> tuple[Tensor, Tensor]:
    """Each pair as a complex number times exp(i rate position), in float64."""
    assert p.rates is not None
    angle = p.positions[..., None, None].double() * p.rates.double()  # (b, t, k, p)
    turn = torch.polar(torch.ones_like(angle), -angle if backwards else angle)
    group = p.q.shape[2] // p.k.shape[2]
    return _turned(p.q, turn.repeat_interleave(group, dim=2), p), _turned(p.k, turn, p)


def _turned(x: Tensor, turn: Tensor, p: Problem) -> Tensor:
    n, x = p.pairs, x.double()
    if p.layout == "half":
        z = torch.complex(x[..., :n], x[..., n : 2 * n]) * turn
        return torch.cat([z.real, z.imag, x[..., 2 * n :]], dim=-1)
    z = torch.view_as_complex(x[..., : 2 * n].unflatten(-1, (n, 2)).contiguous()) * turn
    return torch.cat([torch.view_as_real(z).flatten(-2), x[..., 2 * n :]], dim=-1)
