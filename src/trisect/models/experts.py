"""The mixture of experts of a layer: read as MLPs, written back, and run expert by expert.

Routed experts lie in 3-D tensors of one module, whose forward is transformers' own.

E = routed experts, D = d_model, I = expert width, n = tokens, k = experts per token
"""

from copy import copy
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trisect.errors import TrisectError
from trisect.models.families import ExpertPaths
from trisect.models.linear import Dense, as_maps, as_mlp, bias_of, built_from, resized, weight_of
from trisect.models.owned import mix_in
from trisect.records.parts import LINEARS, MLP, Experts

GROUPED, ROW_BYTES = "grouped_mm", 16  # transformers' way to run all experts in two products wants such rows


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
    def block(self) -> Any:
        """The module that puts out what all experts together add to the residual stream."""
        return self.module if self.paths.apart else self.layer.get_submodule(self.paths.routed.rpartition(".")[0])

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
        shared = None
        if self.shared is not None:
            linears = {name: getattr(self.shared, f"{name}_proj") for name in LINEARS["mlp"]}
            shared = as_mlp({name: (weight_of(module), bias_of(module)) for name, module in linears.items()})
        routed = tuple(self._routed(number) for number in range(self.count))
        return Experts(routed=routed, numbers=self.numbers, top_k=self.top_k, shared=shared)

    def _routed(self, number: int) -> MLP:
        """One routed expert."""
        W, b = self._dense(self._first, number)
        maps = {"up": (W, b)}
        if self.gated:
            biases = (None, None) if b is None else self._halves(b)
            maps = dict(zip(("gate", "up"), zip(self._halves(W), biases, strict=True), strict=True))
        return as_mlp({**maps, "down": self._dense("down", number)})

    @property
    def _first(self) -> str:
        """The map in front of the activation."""
        return "gate_up" if self.gated else "up"

    def _dense(self, name: str, number: int) -> Dense:
        """Weight (in, out) and bias (out,) of one expert's stored map."""
        W = getattr(self.module, f"{name}_proj").detach()[number]
        bias = getattr(self.module, f"{name}_proj_bias").detach()[number] if self.biased else None
        return W if self.transposed else W.mT, bias

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
        first = self._first
        found: dict[str, list[Any]] = {f"{first}_proj": [self._joined(mlp, "W") for mlp in part.routed]}
        found["down_proj"] = [mlp.W_down for mlp in part.routed]
        if not self.transposed:
            found = {name: [W.mT for W in each] for name, each in found.items()}
        if self.biased:
            found[f"{first}_proj_bias"] = [self._joined(mlp, "b") for mlp in part.routed]
            found["down_proj_bias"] = [mlp.b_down for mlp in part.routed]
        dtypes = {name: getattr(self.module, name).dtype for name in found}
        return {name: torch.stack([x.to(dtypes[name]) for x in each]) for name, each in found.items()}

    def write(self, part: Experts) -> None:
        """Put a module with these experts in the place of the old one, and so for the shared one."""
        old = self.module
        new = copy(old)
        if hasattr(old, "is_transposed"):
            mix_in(AnyWidth, new, "Narrow")
        new._parameters = dict(old._parameters)
        for name, value in self.stored(part).items():
            new._parameters[name] = nn.Parameter(value, requires_grad=getattr(old, name).requires_grad)
        if part.numbers != self.numbers:
            self._drop(new, part.numbers)
        shared = self.shared  # asked of the old width
        self.layer.set_submodule(self.paths.routed, new)
        if shared is not None and part.shared is not None:
            new = copy(shared)
            new._modules = dict(shared._modules)
            for name, dense in as_maps(part.shared).items():
                new._modules[f"{name}_proj"] = built_from(getattr(shared, f"{name}_proj"), *dense)
            self.layer.set_submodule(str(self.paths.shared), new)

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
            alike = "This router chooses among groups of experts, which must all be as large as each other"
            raise TrisectError(f"{alike}: use --method a3+ without --drop-experts.")

    def _drop(self, module: Any, numbers: tuple[int, ...]) -> None:
        """Take the other experts' rows out of the router."""
        self.check_droppable()
        kept = torch.tensor([self.numbers.index(number) for number in numbers])

        def rows(value: Any) -> Any:
            """The kept experts' rows of what the router has one of for every expert; anything else as it is."""
            if value is None or value.shape[:1] != (self.count,):
                return value
            found = value.detach().index_select(0, kept.to(value.device))
            return nn.Parameter(found, value.requires_grad) if isinstance(value, nn.Parameter) else found

        router = copy(self.router)
        router._parameters = {name: rows(value) for name, value in router._parameters.items()}
        router._buffers = {name: rows(value) for name, value in router._buffers.items()}
        for owner in (router, module):
            for name in ("num_experts", "n_routed_experts"):
                if hasattr(owner, name):
                    setattr(owner, name, len(kept))
        module.numbers, module.dropped = numbers, self.dropped + self.count - len(kept)
        self.layer.set_submodule(self.paths.router, router)

    def blank(self, width: int, *, dropped: int) -> Experts:
        """Experts of another width, or fewer of them, without values."""
        part = self.read()
        if dropped != self.dropped:
            kept = self.count - (dropped - self.dropped)
            part = replace(part, routed=part.routed[:kept], numbers=part.numbers[:kept])
        shared = None if part.shared is None else resized(part.shared, part.shared.width // part.width * width)
        return replace(part, routed=tuple(resized(mlp, width) for mlp in part.routed), shared=shared)

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
        """What its activation reads of inputs (n, D): (n, 2 I), or (n, I) without a gate."""
        W, b = self._dense(self._first, number)
        return x @ W if b is None else x @ W + b

    def _neurons(self, y: Tensor) -> Tensor:
        module = self.module
        if not self.gated or hasattr(module, "_apply_gate"):
            neurons: Tensor = module._apply_gate(y) if self.gated else module.act_fn(y)
            return neurons
        gate, up = self._halves(y)
        return module.act_fn(gate) * up

    def down_weight(self, number: int) -> Tensor:
        """A routed expert's down projection, (I, D)."""
        return self._dense("down", number)[0]

    def shared_gate(self, x: Tensor) -> Tensor | None:
        """What the shared expert's output is multiplied with, (n, 1); None where it is put out as it is."""
        path = self.paths.shared_gate
        return None if path is None else torch.sigmoid(self.layer.get_submodule(path)(x))
