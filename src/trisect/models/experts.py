"""The mixture of experts of a layer: read as MLPs, written back, and run expert by expert.

Routed experts lie in 3-D tensors of one module, whose forward is transformers' own.

E = routed experts, D = d_model, I = expert width, n = tokens, k = experts per token
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trisect.errors import TrisectError
from trisect.models.families import ExpertPaths
from trisect.models.linear import bias_of, built_from, weight_of
from trisect.models.owned import mixed_class
from trisect.records.parts import MLP, Experts

SHARED = ("gate_proj", "up_proj", "down_proj")
"""Maps of a shared expert."""
GROUPED = "grouped_mm"
"""transformers' way to run all experts in two products, which wants rows of so many whole bytes:"""
ROW_BYTES = 16


class AnyWidth(nn.Module):
    """Mixed in before a stock module of experts, whose grouped products refuse some widths."""

    config: Any
    down_proj: Tensor
    is_transposed: bool

    @property
    def fits_groups(self) -> bool:
        """Whether an expert's neurons are rows of whole 16 bytes, of a dtype that has such products."""
        width, dtype = self.down_proj.shape[1 if self.is_transposed else 2], self.down_proj.dtype
        return dtype != torch.float64 and width * dtype.itemsize % ROW_BYTES == 0

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the stock module, expert by expert where its products would refuse."""
        stock: Any = super().forward
        if self.config._experts_implementation != GROUPED or self.fits_groups:
            return stock(*args, **kwargs)
        return stock.__wrapped__(self, *args, **kwargs)


class Routed(NamedTuple):
    """What one expert gets of a batch."""

    tokens: Tensor  # (n,)
    inputs: Tensor  # (n, D)
    gate: Tensor  # (n, 1), what its outputs are multiplied with
    share: Tensor  # (n, 1), its part in what all experts of a token put out together


@dataclass(frozen=True)
class ExpertView:
    """The experts of one layer."""

    layer: nn.Module
    paths: ExpertPaths

    @property
    def module(self) -> Any:
        """The module that holds the routed experts."""
        return self.layer.get_submodule(self.paths.routed)

    @property
    def block(self) -> nn.Module:
        """The module that puts out what all experts together add to the residual stream."""
        if self.paths.apart:
            block: nn.Module = self.module
            return block
        return self.layer.get_submodule(self.paths.routed.rpartition(".")[0])

    @property
    def router(self) -> Any:
        return self.layer.get_submodule(self.paths.router)

    @property
    def shared(self) -> Any:
        """The shared expert; None where there is none whose width is a multiple of the routed ones'."""
        if self.paths.shared is None:
            return None
        shared: Any = self.layer.get_submodule(self.paths.shared)
        return None if shared.down_proj.in_features % self.width else shared

    @property
    def count(self) -> int:
        """Routed experts."""
        return int(self.module.down_proj.shape[0])

    @property
    def width(self) -> int:
        """Of a routed expert."""
        return int(self.module.down_proj.shape[1 if self.transposed else 2])

    @property
    def top_k(self) -> int:
        """Experts that a token is routed to."""
        found = getattr(self.router, "top_k", None) or getattr(self.module.config, "num_experts_per_tok", None)
        return int(found or self.module.config.top_k_experts)

    # What transformers notes about modules that can run in several ways; Llama 4's has one.

    @property
    def transposed(self) -> bool:
        """Weights are stored (in, out)."""
        return bool(getattr(self.module, "is_transposed", True))

    @property
    def gated(self) -> bool:
        return bool(getattr(self.module, "has_gate", True))

    @property
    def biased(self) -> bool:
        return bool(getattr(self.module, "has_bias", False))

    def routes(self, x: Tensor, index: Tensor | None = None, weights: Tensor | None = None) -> "list[Routed]":
        """What the module of routed experts was called with, expert by expert."""
        if index is None or weights is None:  # every expert's inputs (E n, D), zeros where it was not chosen
            inputs = x.reshape(self.count, -1, x.shape[-1])
            chosen = inputs.any(dim=-1)
            share = 1 / chosen.sum(dim=0).clamp(min=1)
            return [
                Routed(tokens, inputs[number, tokens], inputs.new_ones(len(tokens), 1), share[tokens].unsqueeze(-1))
                for number, tokens in enumerate(row.nonzero().flatten() for row in chosen)
            ]
        x, order, chosen = x.reshape(-1, x.shape[-1]), index.flatten().argsort(stable=True), index.flatten()
        shares = (weights / weights.sum(dim=-1, keepdim=True)).flatten()
        found = []
        for slots in order.split(chosen.bincount(minlength=self.count).tolist()):
            tokens = slots // index.shape[-1]
            gate = weights.flatten()[slots].unsqueeze(-1)
            found.append(Routed(tokens, x[tokens], gate, shares[slots].unsqueeze(-1)))
        return found

    def read(self) -> Experts:
        """All experts as MLPs, in views of the stored tensors where that is possible."""
        (W, W_down), (b, b_down) = self._tensors("_proj"), self._tensors("_proj_bias") if self.biased else (None, None)
        routed = tuple(
            self._expert(W[n], W_down[n], *(None if x is None else x[n] for x in (b, b_down)))
            for n in range(self.count)
        )
        shared = None if self.shared is None else _read_shared(self.shared)
        return Experts(routed=routed, numbers=self.numbers, top_k=self.top_k, shared=shared)

    def _tensors(self, suffix: str) -> tuple[Any, Any]:
        """The stored (E, ...) tensors of gate and up together, and of down."""
        first, module = "gate_up" if self.gated else "up", self.module
        tensors = (getattr(module, f"{name}{suffix}").detach() for name in (first, "down"))
        if suffix == "_proj" and not self.transposed:
            tensors = (x.mT for x in tensors)
        up, down = tensors
        return up, down

    def _expert(self, W: Tensor, W_down: Tensor, b: Tensor | None, b_down: Tensor | None) -> MLP:
        if not self.gated:
            return MLP(W_up=W, W_down=W_down, b_up=b, b_down=b_down)
        (W_gate, W_up), (b_gate, b_up) = self._halves(W), (None, None) if b is None else self._halves(b)
        return MLP(W_up=W_up, W_gate=W_gate, W_down=W_down, b_up=b_up, b_gate=b_gate, b_down=b_down)

    def _halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Gate and up (..., I) of (..., 2 I)."""
        if self.paths.interleaved:
            return x[..., ::2], x[..., 1::2]
        gate, up = x.chunk(2, dim=-1)
        return gate, up

    def _joined(self, mlp: MLP, name: str) -> Tensor:
        """Gate and up of one expert's weights ("W") or biases ("b"), (..., 2 I)."""
        up = getattr(mlp, f"{name}_up")
        if not self.gated:
            return up
        both = (getattr(mlp, f"{name}_gate"), up)
        return torch.stack(both, dim=-1).flatten(-2) if self.paths.interleaved else torch.cat(both, dim=-1)

    def stored(self, part: Experts) -> dict[str, Tensor]:
        """Routed experts as the tensors of their module, by name, in its dtype."""
        module, first = self.module, "gate_up" if self.gated else "up"
        weights = {f"{first}_proj": [self._joined(mlp, "W") for mlp in part.routed]}
        weights["down_proj"] = [mlp.W_down for mlp in part.routed]
        if not self.transposed:
            weights = {name: [W.mT for W in each] for name, each in weights.items()}
        if self.biased:
            weights[f"{first}_proj_bias"] = [self._joined(mlp, "b") for mlp in part.routed]
            weights["down_proj_bias"] = [_there(mlp.b_down) for mlp in part.routed]
        return {name: torch.stack([x.to(getattr(module, name).dtype) for x in each]) for name, each in weights.items()}

    def write(self, part: Experts) -> None:
        """Put a module with these experts in the place of the old one, and so for the shared one."""
        old = self.module
        new = copy(old)
        if not isinstance(new, AnyWidth) and hasattr(old, "is_transposed"):
            stock: Any = type(old)
            new.__class__ = mixed_class("Narrow", AnyWidth, stock)
        new._parameters = dict(old._parameters)
        for name, value in self.stored(part).items():
            new._parameters[name] = nn.Parameter(value, requires_grad=getattr(old, name).requires_grad)
        if part.numbers != self.numbers:
            self._drop(new, part.numbers)
        shared = self.shared
        self.layer.set_submodule(self.paths.routed, new)
        if shared is not None and part.shared is not None:
            assert self.paths.shared is not None
            self.layer.set_submodule(self.paths.shared, _written_shared(shared, part.shared))

    @property
    def numbers(self) -> tuple[int, ...]:
        """Which of the experts that were there at first each one is."""
        return getattr(self.module, "numbers", None) or tuple(range(self.count))

    @property
    def dropped(self) -> int:
        """Experts that are gone."""
        return getattr(self.module, "dropped", 0)

    def check_droppable(self) -> None:
        """Refuse to take experts from a router that chooses among groups of them."""
        if self.paths.apart:
            raise TrisectError("This router holds its map apart: use --method a3+ without --drop-experts.")
        if any((getattr(self.router, name, 1) or 1) > 1 for name in ("num_group", "n_group")):
            raise TrisectError(
                "This router chooses groups of experts first, which must all be as large as each other: no expert "
                "can be dropped; use --method a3+ without --drop-experts."
            )

    def _drop(self, module: Any, numbers: tuple[int, ...]) -> None:
        """Take the other experts' rows out of the router."""
        self.check_droppable()
        kept = torch.tensor([self.numbers.index(number) for number in numbers])
        router = copy(self.router)
        router._parameters = {name: self._rows(value, kept) for name, value in router._parameters.items()}
        router._buffers = {name: self._rows(value, kept) for name, value in router._buffers.items()}
        for owner in (router, module):
            for name in ("num_experts", "n_routed_experts"):
                if hasattr(owner, name):
                    setattr(owner, name, len(kept))
        module.numbers, module.dropped = numbers, self.dropped + self.count - len(kept)
        self.layer.set_submodule(self.paths.router, router)

    def _rows(self, value: Any, kept: Tensor) -> Any:
        """The kept experts' rows of what the router has one of for every expert; anything else as it is."""
        if value is None or value.shape[:1] != (self.count,):
            return value
        rows = value.detach().index_select(0, kept.to(value.device))
        return nn.Parameter(rows, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else rows

    def blank(self, width: int, *, dropped: int) -> Experts:
        """Experts of another width, or fewer of them, without values."""
        part = self.read()
        if dropped != self.dropped:
            kept = self.count - (dropped - self.dropped)
            part = replace(part, routed=part.routed[:kept], numbers=part.numbers[:kept])
        factor = 0 if part.shared is None else part.shared.width // part.width
        shared = None if part.shared is None else _blank_mlp(part.shared, factor * width)
        return replace(part, routed=tuple(_blank_mlp(mlp, width) for mlp in part.routed), shared=shared)

    def features(self, number: int, x: Tensor) -> Tensor:
        """What a routed expert's down projection reads of inputs (n, D): (n, I)."""
        return self._neurons(self._mapped(number, x))

    def slopes(self, number: int, x: Tensor) -> dict[str, Tensor]:
        """Derivatives (n, I) of a routed expert's neurons by what its maps put out, map by map."""
        y = self._mapped(number, x).detach().requires_grad_()
        with torch.enable_grad():
            slopes = torch.autograd.grad(self._neurons(y).sum(), y)[0]
        return dict(zip(("gate", "up"), self._halves(slopes), strict=True)) if self.gated else {"up": slopes}

    def _mapped(self, number: int, x: Tensor) -> Tensor:
        name = "gate_up_proj" if self.gated else "up_proj"
        W = getattr(self.module, name)[number]
        y = x @ (W if self.transposed else W.mT)
        return y + getattr(self.module, f"{name}_bias")[number] if self.biased else y

    def _neurons(self, y: Tensor) -> Tensor:
        module = self.module
        if not self.gated or hasattr(module, "_apply_gate"):
            neurons: Tensor = module._apply_gate(y) if self.gated else module.act_fn(y)
            return neurons
        gate, up = self._halves(y)
        return module.act_fn(gate) * up

    def down_weight(self, number: int) -> Tensor:
        """A routed expert's down projection, (I, D)."""
        W: Tensor = self.module.down_proj[number]
        return W if self.transposed else W.mT

    def shared_gate(self, x: Tensor) -> Tensor | None:
        """What the shared expert's output is multiplied with, (n, 1); None where it is put out as it is."""
        path = self.paths.shared_gate
        return None if path is None else torch.sigmoid(self.layer.get_submodule(path)(x))


def _read_shared(module: Any) -> MLP:
    gate, up, down = (getattr(module, name) for name in SHARED)
    return MLP(
        W_up=weight_of(up),
        W_gate=weight_of(gate),
        W_down=weight_of(down),
        b_up=bias_of(up),
        b_gate=bias_of(gate),
        b_down=bias_of(down),
    )


def _written_shared(old: Any, part: MLP) -> nn.Module:
    new = copy(old)
    new._modules = dict(old._modules)
    maps: Sequence[Any] = ((part.W_gate, part.b_gate), (part.W_up, part.b_up), (part.W_down, part.b_down))
    for name, (W, b) in zip(SHARED, maps, strict=True):
        new._modules[name] = built_from(getattr(old, name), W, b)
    return new


def _blank_mlp(mlp: MLP, width: int) -> MLP:
    def columns(x: Tensor | None) -> Any:
        return None if x is None else x.new_empty(*x.shape[:-1], width)

    wide = {name: columns(getattr(mlp, name)) for name in ("W_up", "W_gate", "b_up", "b_gate")}
    return replace(mlp, **wide, W_down=mlp.W_down.new_empty(width, mlp.W_down.shape[1]))


def _there(x: Tensor | None) -> Tensor:
    assert x is not None
    return x
