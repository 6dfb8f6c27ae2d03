"""Parts of a layer to first order in their input maps, over the calibration tokens; an MLP.   [math.md F-8]"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trisect.calibrate.replay import States
from trisect.records.parts import INNER
from trisect.records.shapes import LayerShape
from trisect.solve.ridge import Metric, gram, krylov, product, products
from trisect.support.distributed import all_reduce
from trisect.support.products import short, short_product

DIRECTIONS = {0: 4, 32: 6, 64: 16}
"""How many, by calibration tokens for each neuron: few tokens cannot tell more of them from noise."""
FEW_DIRECTIONS = 6  # of a large MLP at most: each takes as long as a pass of the layer
LARGE = 1 << 24  # weights of an MLP's input maps
ROWS = 1 << 19  # calibration tokens kept row by row where there are more; an eighth of these costs accuracy
COARSE = 1 << 17  # weights: where so many are fitted, it averages out that rows are rounded to 8 bits
TOGETHER = {"cpu": 2048, "cuda": 1 << 30}  # tokens that J sees together: caches hold what becomes of so many
MAPS = ("up", "gate")  # input maps of an MLP, in the order of their slopes

# n = tokens, D = d_model, I = MLP width, N = I, or 2 I with a gate, K = directions


def every_token(windows: Tensor) -> int:
    """One token in so many is kept as rows: a power of two that leaves ROWS of them and divides the windows (n, t)."""
    return one_in(windows.numel(), ROWS, width=windows.shape[1])


def one_in(tokens: int, enough: int, *, width: int | None = None) -> int:
    """A power of two by which so many tokens are thinned: `enough` stay, and it divides `width`, if that is given."""
    every = 1
    while tokens >= 2 * every * enough and (width is None or width % (2 * every) == 0):
        every *= 2
    return every


def directions(tokens_per_neuron: float, weights: int) -> int:
    """In how many directions an MLP's input maps are refitted."""
    count = max(count for least, count in DIRECTIONS.items() if tokens_per_neuron >= least)
    return min(count, FEW_DIRECTIONS) if weights >= LARGE else count


def sets_of_states(layer: LayerShape, every: int) -> int:
    """As many hidden states as the rows of a layer's MLPs take the room of, rounded up."""
    inputs = (2 if layer.gated else 1) * layer.mlp
    return -(-layer.active_mlps * (2 * layer.d_model + inputs) // (layer.d_model * every))


class FirstOrder:
    """What a part's output lacks, and how it answers to a change of its input maps: sums, and the problem they make."""

    def __init__(self, *, shared: bool):
        self.sums: dict[str, Tensor] = {}
        self.shared = shared  # other processes have rows of other windows

    def metric(self, n: float) -> Metric:
        """What J^T J would be if no columns of the maps had to do with each other, of sums over n tokens."""
        raise NotImplementedError

    def product(self, v: Tensor) -> Tensor:
        """J^T J v, added up over the tokens that fit."""
        raise NotImplementedError

    def apart(self, vectors: Tensor) -> Tensor:
        """Products (K, K + 1) of what directions change with each other and with what is missing, held-out tokens."""
        raise NotImplementedError

    def count(self, weights: int, tokens: float) -> int:
        """In how many directions the maps are refitted."""
        raise NotImplementedError

    def _add(self, name: str, value: Tensor) -> None:
        self.sums[name] = self.sums[name] + value if name in self.sums else value

    def _noted(self, missing: Tensor, rows: int, *, held: bool) -> None:
        """Count tokens (n, D) that are judged, and how many of them are kept as rows."""
        counts = {"tokens": len(missing), "rows": rows}
        self._add(f"energy{held}", missing.square().sum(dtype=torch.float64))
        for name, count in counts.items():
            self._add(f"{name}{held}", torch.tensor(float(count), dtype=torch.float64, device=missing.device))

    def moments(self) -> dict[str, Tensor]:
        """Directions (K, D, N), and the regressions of what is missing on what they change."""
        sums = self.sums = all_reduce(self.sums) if self.shared else self.sums
        tokens, rows = ({held: sums[f"{of}{held}"].item() for held in (False, True)} for of in ("tokens", "rows"))
        n, read = max(1.0, tokens[False]), max(1.0, rows[False])
        metric = self.metric(n)
        kept = torch.float32  # J sees rows, which have no more digits than that
        right = sums.pop("right").div_(n)
        count = self.count(right.numel(), n + tokens[True])
        found = krylov(right, lambda v: self.product(v).div_(read), metric, count, kept=kept)
        apart = self.apart(found.vectors) / max(1.0, rows[True])
        named = {
            f"{INNER}_vectors": found.vectors,
            f"{INNER}_penalty": found.penalty,
            f"{INNER}_gram": found.gram,
            f"{INNER}_target": found.cross.unsqueeze(-1),
            f"{INNER}_gram_held": apart[:, :-1],
            f"{INNER}_target_held": apart[:, -1:],
        }
        for held, suffix in ((False, ""), (True, "_held")):
            named[f"{INNER}_tokens{suffix}"] = torch.tensor(tokens[held], dtype=torch.float64)
            named[f"{INNER}_energy{suffix}"] = sums[f"energy{held}"] / max(1.0, tokens[held])
        return named


class Linearised(FirstOrder):
    """What an MLP's output lacks, and how it answers to a change of its input maps.

    What the changes are to bring, and the metric, are sums over all tokens in full precision; how changes of
    different weights work together is read from one token in `every`, in 8 bits where there are many weights.
    """

    def __init__(self, *, place: str, shared: bool, every: int = 1):
        super().__init__(shared=shared)
        self.x, self.slopes, self.missing = (States(place=place) for _ in range(3))
        self.held: list[bool] = []
        self.every = every

    def append(
        self, x: Tensor, slopes: Tensor, missing: Tensor, W_down: Tensor, *, held: bool, tokens: Tensor | None = None
    ) -> None:
        """Inputs (n, D), slopes (n, N) of neurons and what is missing (n, D), the last two in F-5's metric."""
        # `tokens` (n,) are their places in the batch, where they are not all of it.
        self.W_down = W_down.detach().to(x.dtype)  # (I, D)
        if not held:
            self.sums["right"] = products(x, self.pull(missing, slopes), self.sums.get("right"))
            self.sums["inputs"] = gram(x, self.sums.get("inputs"))
            self._add("slopes", slopes.square().sum(dim=0, dtype=torch.float64))
        some = slice(None, None, self.every) if tokens is None else tokens % self.every == 0
        self._noted(missing, len(x[some]), held=held)
        for states, rows in ((self.x, x), (self.slopes, slopes), (self.missing, missing)):
            kept = rows[some].clone() if self.every > 1 else rows
            states.append(short(kept) if x.shape[-1] * slopes.shape[-1] >= COARSE else kept)
        self.held.append(held)

    def change(self, v: Tensor, x: Tensor, slopes: Tensor) -> Tensor:
        """J v: what the output (n, D) of these tokens gains with weights (D, N) more."""
        answers, slopes = (y.unflatten(-1, (-1, len(self.W_down))) for y in (short_product(x, v.to(x.dtype)), slopes))
        neurons = answers[:, 0] * slopes[:, 0]
        for other in range(1, answers.shape[1]):
            neurons.addcmul_(answers[:, other], slopes[:, other])
        return short_product(neurons, self.W_down.to(neurons.dtype))

    def pull(self, u: Tensor, slopes: Tensor) -> Tensor:
        """What W_up and W_gate put out (n, N) that would change the output by u (n, D): J^T u, but for the inputs."""
        neurons = short_product(u, self.W_down.to(u.dtype).mT).unsqueeze(-2)  # (n, 1, I)
        return (slopes.unflatten(-1, (-1, len(self.W_down))) * neurons).flatten(1)

    def count(self, weights: int, tokens: float) -> int:
        return directions(tokens / len(self.W_down), weights)

    def _rows(self, held: bool) -> Iterator[tuple[Tensor, ...]]:
        for number, apart in enumerate(self.held):
            if apart == held:  # the others stay where they are
                rows = self.x[number], self.slopes[number], self.missing[number]
                yield from zip(*(x.split(TOGETHER[x.device.type]) for x in rows), strict=True)

    def _sum(self, held: bool, add: Callable[..., Tensor]) -> Tensor:
        """Over all batches of one set, in all processes; `add` takes rows and the sum so far, or None."""
        # Of no tokens first: a process that has none adds zeros of the right shape.
        total = add(self.x[0][:0], self.slopes[0][:0], self.missing[0][:0], None)
        for rows in self._rows(held):
            total = add(*rows, total)
        return all_reduce({"sum": total})["sum"] if self.shared else total

    def product(self, v: Tensor) -> Tensor:
        def add(x: Tensor, slopes: Tensor, missing: Tensor, total: Tensor | None) -> Tensor:
            found = self.pull(self.change(v, x, slopes), slopes)
            if x.is_cuda:
                return products(x, found, total)
            found = short_product(x.mT, found)  # exact products, rounded once for so many tokens
            return found.double() if total is None else total.add_(found)

        return self._sum(False, add)

    def apart(self, vectors: Tensor) -> Tensor:
        return self._sum(True, partial(self._projected, vectors))

    def metric(self, n: float) -> Metric:
        """Neurons have nothing to do with each other, nor slopes with inputs."""
        inputs, slopes = self.sums["inputs"] / n, self.sums["slopes"] / n
        sizes = self.W_down.double().square().sum(dim=-1)  # (I,)
        return Metric.damped(inputs, slopes * sizes.repeat(len(slopes) // len(sizes)))

    def _projected(self, vectors: Tensor, x: Tensor, slopes: Tensor, missing: Tensor, total: Tensor | None) -> Tensor:
        """Products (K, K + 1) of what directions change with each other and with what is missing, added up."""
        features = torch.stack([*(self.change(v, x, slopes) for v in vectors), missing]).flatten(1)
        found = product(features[:-1], features.mT).double()
        return found if total is None else total.add_(found)


def lift(modules: dict[str, nn.Module], down: nn.Module, tell: Callable[..., None], columns: Any) -> list[Any]:
    """Hooks that differentiate neurons by what the maps in front of them put out."""
    # `tell` gets inputs, slopes by map and neurons. Neurons answer to their own pre-activations only, so the gradient
    # of their sum has every slope. Between the maps and `down` gradients are on.
    leaves: dict[nn.Module, Tensor] = {}
    seen: dict[str, Tensor] = {}

    def start(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        seen["x"], leaves[module] = args[0], output.detach().requires_grad_()
        torch.set_grad_enabled(True)
        return leaves[module]

    def end(module: Any, args: Any) -> tuple[Tensor]:
        torch.set_grad_enabled(False)
        neurons: Tensor = args[0]
        found = torch.autograd.grad(neurons, list(leaves.values()), torch.ones_like(neurons))
        slopes = dict(zip(leaves, found, strict=True))
        leaves.clear()
        tell(seen.pop("x"), {name: columns(name, slopes[at]) for name, at in modules.items()}, neurons.detach())
        return (neurons.detach(),)

    handles: list[Any] = [module.register_forward_hook(start) for module in dict.fromkeys(modules.values())]
    return [*handles, down.register_forward_pre_hook(end)]
