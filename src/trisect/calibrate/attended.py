"""Attention to first order in W_q, W_k and W_v, over the calibration windows.   [math.md F-11]"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trisect.calibrate.linearised import FirstOrder, one_in
from trisect.calibrate.replay import Enough
from trisect.kernels import using
from trisect.models.heads import TANGENTS, attention_weights, to_canonical
from trisect.models.view import LayerView
from trisect.records.parts import INNER, OV
from trisect.solve.ridge import Metric, gram, product, products
from trisect.support.distributed import all_reduce

DIRECTIONS = 6
ROWS = 1 << 17
"""Calibration tokens in windows that are kept, where there are more; b and M of math.md F-11 are sums over all."""
NOISE = 1 << 14  # tokens with random answers
QUERIES = {"cpu": 64, "cuda": 1024}  # at a time: what becomes of their scores stays in a CPU's caches
SCORES = {"cpu": 1 << 22, "cuda": 1 << 28}  # attention weights at a time: so many are kept for the way back

KEPT = {"cpu": 1 << 28, "cuda": 1 << 30}  # attention weights of a layer that need not be found again

Blocks = list[tuple[slice, slice]]  # queries, and the keys that they may look at

# b = batch, t = tokens, D = d_model, h = query heads, N = columns of all three maps, K = directions


@dataclass(kw_only=True)
class Between:
    """What stands between the maps and the heads, and the attention weights that are known by their first query."""

    lift: Callable[..., Any]
    weights: dict[int, tuple[Tensor, Tensor | float]]
    room: int  # for as many more

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return self.lift(q, k, v)

    def weigh(self, first: int, find: Callable[[], tuple[Tensor, Tensor | float]]) -> tuple[Tensor, Tensor | float]:
        """The weights of queries from `first` on, and their slope: found once, as long as there is room."""
        known = self.weights.get(first)
        found = find() if known is None else known
        if known is None and found[0].numel() <= self.room:
            self.weights[first] = found
            self.room -= found[0].numel()
        return found


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Windows in front of a layer's attention, and what its output lacks."""

    x: Tensor  # (b, t, D)
    call: tuple[tuple[Any, ...], dict[str, Any]]  # what attention is called with besides
    root: Tensor  # (b, t, 1) roots of F-5's weights
    missing: Tensor  # (b, t, D) in F-9's metric, every token by its root
    held: bool
    weights: dict[int, tuple[Tensor, Tensor | float]] = field(default_factory=dict)


def every_window(count: int, length: int) -> int:
    """One window in so many is kept: a power of two that leaves ROWS tokens."""
    return one_in(count * length, ROWS)


class LinearisedAttention(FirstOrder):
    """What the heads' output lacks, and how it answers to a change of the maps in front of them.

    The owned forward is differentiated as it stands, forwards and backwards, so whatever a family does between its
    maps and its output is taken along.
    """

    def __init__(self, view: LayerView, *, metric: Tensor | None, shared: bool, every: int, last: int):
        """One window in `every` is kept, `last` among them: it is held out, so that there are some of both kinds."""
        super().__init__(shared=shared)
        self.view, self.attention = view, view.attention
        part = view.part("ov")
        assert isinstance(part, OV)
        self.W_o = part.W_o.flatten(0, 1)  # (h d, D)
        self.root = torch.eye(self.W_o.shape[-1], device=self.W_o.device) if metric is None else metric
        self.out = product(self.W_o.to(self.root), self.root).to(self.W_o.dtype)
        heads = view.heads
        self.heads = (heads.heads, heads.kv_heads, heads.kv_heads)
        self.sizes = [count * width for count, width in zip(self.heads, (heads.qk, heads.qk, heads.vo), strict=True)]
        self.batches: list[Batch] = []
        self.every, self.last, self.room = every, last, KEPT[self.W_o.device.type]

    @contextmanager
    def watched(self) -> Iterator[dict[str, Any]]:
        """What attention is called with and its heads put out, while a layer runs up to there."""
        seen: dict[str, Any] = {}

        def called(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            kwargs = dict(kwargs)
            seen["x"] = args[0] if args else kwargs.pop("hidden_states")
            seen["call"] = args[1:], kwargs

        handle = self.attention.register_forward_pre_hook(called, with_kwargs=True)
        try:
            with self._until_heads(seen), torch.no_grad():
                yield seen
        finally:
            handle.remove()

    @contextmanager
    def _until_heads(self, seen: dict[str, Any]) -> Iterator[None]:
        def tap(name: str, *observed: Any) -> None:
            if name == "a":
                seen["a"] = observed[0]
                raise Enough

        self.attention.tap = tap
        try:
            with suppress(Enough):
                yield
        finally:
            self.attention.tap = None

    def append(self, seen: dict[str, Any], target: Tensor, weight: Tensor, *, numbers: Tensor, held: bool) -> None:
        """What was watched of windows with these numbers, what W_o should put out (b, t, D), and their weights."""
        x, attended, root = seen["x"], seen["a"].flatten(2), weight.sqrt().unsqueeze(-1)
        missing = ((target - attended @ self.W_o) * root) @ self.root.to(target)
        kept = (self.last - numbers) % self.every == 0
        self._noted(missing.flatten(0, 1), int(kept.sum()) * x.shape[1], held=held)
        step = max(1, SCORES[x.device.type] // (self.heads[0] * x.shape[1] ** 2))
        for keep, chosen in ((True, kept), (False, ~kept)):
            for some in chosen.nonzero().squeeze(1).split(step) if bool(chosen.any()) else ():
                call = _rows(some, len(x), *seen["call"])
                at = Batch(x=x[some], call=call, root=root[some].to(x), missing=missing[some].to(x), held=held)
                if not held:
                    self._sum_up(at, numbers[some])
                if keep:
                    self.batches.append(at)
                else:
                    self.room += sum(weights.numel() for weights, _ in at.weights.values())

    def _sum_up(self, at: Batch, numbers: Tensor) -> None:
        x, length = at.x.flatten(0, 1), at.x.shape[1]
        # Random answers, the same in batches of every size: E|J^T u|^2 is the sum over outputs. A few windows tell it.
        noisy = (numbers < max(1, NOISE // length)).nonzero().squeeze(1).tolist()
        noise = torch.zeros_like(at.x)
        for place in noisy:
            noise[place] = torch.randn(at.x.shape[1:], generator=self.generator(int(numbers[place]))).to(noise)
        wanted, *felt = self.pull([at.missing, *([noise] if noisy else [])], at)
        self.sums["right"] = products(x, wanted.flatten(0, 1), self.sums.get("right"))
        self.sums["inputs"] = gram(x, self.sums.get("inputs"))
        columns = torch.zeros(wanted.shape[-1], dtype=torch.float64, device=x.device)  # other processes may have some
        self._add("outputs", felt[0].square().sum(dim=(0, 1), dtype=torch.float64) if felt else columns)
        self._add("noisy", torch.tensor(float(length * len(noisy)), dtype=torch.float64, device=x.device))

    def generator(self, window: int) -> torch.Generator:
        """Of a window's random answers, for every layer and run: torch seeds with 32 bits."""
        return torch.Generator().manual_seed(window)

    def _attend(self, at: Batch, lift: Callable[..., Any]) -> Tensor:
        """What the heads put out (b, t, h d), with `lift` between them and their maps."""
        seen: dict[str, Any] = {}
        self.attention.lift = between = Between(lift=lift, weights=at.weights, room=self.room)
        try:
            with self._until_heads(seen), using(rotary="plain"):
                self.attention.forward(at.x, *at.call[0], **at.call[1])
        finally:
            self.attention.lift = None
        self.room = between.room
        found: Tensor = seen["a"]
        return found.flatten(2)

    def change(self, v: Tensor, at: Batch) -> Tensor:
        """J v: what the output (b, t, D) gains with weights (D, N) more."""
        with torch.no_grad(), forward_ad.dual_level():
            return self._change(self._attend(at, self._lifted(v, at)), at)

    def pull(self, changes: list[Tensor], at: Batch) -> list[Tensor]:
        """What the maps put out (b, t, N) that would change the output by each of these (b, t, D)."""
        leaves: list[Tensor] = []

        def lift(*heads: Tensor) -> tuple[Tensor, ...]:
            leaves.extend(y.detach().requires_grad_() for y in heads)
            return tuple(leaves)

        with torch.enable_grad():
            attended = self._attend(at, lift)
        return [self._pull(u, attended, leaves, at) for u in changes]

    def _lifted(self, v: Tensor, at: Batch, leaves: list[Tensor] | None = None) -> Callable[..., Any]:
        """Queries, keys and values with what weights v (D, N) more would add to them as tangents."""
        added = (at.x @ v.to(at.x)).split(self.sizes, dim=-1)

        def lift(*heads: Tensor) -> tuple[Tensor, ...]:
            known = [y.detach() if leaves is None else y.detach().requires_grad_() for y in heads]
            if leaves is not None:
                leaves.extend(known)
            return tuple(forward_ad.make_dual(y, dy.view_as(y)) for y, dy in zip(known, added, strict=True))

        return lift

    def _change(self, attended: Tensor, at: Batch) -> Tensor:
        tangent = forward_ad.unpack_dual(attended).tangent
        return (tangent.detach() * at.root) @ self.out

    def _pull(self, u: Tensor, attended: Tensor, leaves: list[Tensor], at: Batch) -> Tensor:
        found = torch.autograd.grad(attended, leaves, (u * at.root) @ self.out.mT, retain_graph=True)
        return torch.cat([y.flatten(2) for y in found], dim=-1)

    def count(self, weights: int, tokens: float) -> int:
        return DIRECTIONS

    def metric(self, n: float) -> Metric:
        return Metric.damped(self.sums["inputs"] / n, self.sums["outputs"] / self.sums["noisy"].clamp(min=1.0))

    def product(self, v: Tensor) -> Tensor:
        total = torch.zeros(v.shape, dtype=torch.float64, device=v.device)
        for at in (at for at in self.batches if not at.held):
            leaves: list[Tensor] = []
            with torch.enable_grad(), forward_ad.dual_level():
                attended = self._attend(at, self._lifted(v, at, leaves))
                change = self._change(attended, at)
                primal = forward_ad.unpack_dual(attended).primal
            found = self._pull(change, primal, leaves, at)
            total = products(at.x.flatten(0, 1), found.flatten(0, 1), total)
        return all_reduce({"sum": total})["sum"] if self.shared else total

    def apart(self, vectors: Tensor) -> Tensor:
        total = torch.zeros(len(vectors), len(vectors) + 1, dtype=torch.float64, device=vectors.device)
        for at in (at for at in self.batches if at.held):
            features = torch.stack([*(self.change(v, at) for v in vectors), at.missing]).flatten(1)
            total += product(features[:-1], features.mT).double()
        return all_reduce({"sum": total})["sum"] if self.shared else total

    def moments(self) -> dict[str, Tensor]:
        """As of every part to first order, columns in canonical order: queries, keys, values."""
        found, name = super().moments(), f"{INNER}_vectors"
        pairs, rotary = self.view.heads.pairs, self.view.family.rotary
        *turned, values = found[name].split(self.sizes, dim=-1)
        counts = self.heads[:2]
        canonical = [
            to_canonical(y.unflatten(-1, (count, -1)), pairs, rotary).flatten(-2)
            for y, count in zip(turned, counts, strict=True)
        ]
        return {**found, name: torch.cat([*canonical, values], dim=-1)}


class _Attend(torch.autograd.Function):
    """Heads that look at values (b, h, t, d) by attention weights P, some queries at a time; P is kept for both ways.

    A change of scores moves P by P o (dS - rowsum(P o dS)); backwards that row sum is a row's output times what is
    asked of it. No further matrix of the size of P is made than dS.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, weigh: Callable[..., Any], blocks: Blocks) -> Tensor:
        """`weigh` gives weights, and what scores are multiplied with to first order, of some queries and keys."""
        ctx.seen, ctx.blocks = (q, k, v), []
        out = torch.empty_like(v)
        for rows, keys in blocks:
            P, slope = weigh(q[:, :, rows], k[:, :, keys], rows)
            out[:, :, rows] = found = P @ v[:, :, keys]
            ctx.blocks.append((rows, keys, P, slope, found))
        return out

    @staticmethod
    def jvp(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor, *_: Any) -> Tensor:
        q, k, v = ctx.seen
        found = torch.empty_like(v)
        for rows, keys, P, slope, out in ctx.blocks:
            moved = (dq[:, :, rows] @ k[:, :, keys].mT).add_(q[:, :, rows] @ dk[:, :, keys].mT).mul_(slope).mul_(P)
            change = (moved @ v[:, :, keys]).sub_(moved.sum(dim=-1, keepdim=True) * out)
            found[:, :, rows] = change.add_(P @ dv[:, :, keys])
        return found

    @staticmethod
    def backward(ctx: Any, asked: Tensor) -> Any:
        q, k, v = ctx.seen
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for rows, keys, P, slope, out in ctx.blocks:
            wanted = asked[:, :, rows]
            moved = (wanted @ v[:, :, keys].mT).sub_((wanted * out).sum(dim=-1, keepdim=True)).mul_(P).mul_(slope)
            dq[:, :, rows] = moved @ k[:, :, keys]
            dk[:, :, keys] += moved.mT @ q[:, :, rows]
            dv[:, :, keys] += P.mT @ wanted
        return dq, dk, dv, None, None


def _tangents(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, None]:
    """Attention of (b, heads, t, width), differentiable both ways."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scale, bound = kwargs["scaling"], kwargs.get("softcap")
    causal, length = mask is None and module.is_causal, q.shape[-2]
    edges = [(start, min(length, start + QUERIES[q.device.type])) for start in range(0, length, QUERIES[q.device.type])]

    def weigh(queries: Tensor, keys: Tensor, rows: slice) -> tuple[Tensor, Tensor | float]:
        found: tuple[Tensor, Tensor | float] = module.lift.weigh(rows.start, lambda: find(queries, keys, rows))
        return found

    def find(queries: Tensor, keys: Tensor, rows: slice) -> tuple[Tensor, Tensor | float]:
        seen = None if mask is None else mask[..., rows, :] if mask.shape[-2] > 1 else mask
        P = attention_weights(module, queries, keys, seen, **kwargs)
        if bound is None:
            return P, scale
        return P, scale * (1 - torch.tanh(queries @ keys.mT * (scale / bound)).square())

    # No query of a block sees keys behind it, where nothing but the order says who is seen.
    blocks = [(slice(start, end), slice(0, end if causal else length)) for start, end in edges]
    return _Attend.apply(q, k, v, weigh, blocks).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(TANGENTS, _tangents)


def _rows(some: Tensor, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What attention is called with for some of `count` windows: their own rows of what each has for itself."""

    def own(value: Any) -> Any:
        return value[some] if isinstance(value, Tensor) and value.ndim > 1 and len(value) == count > 1 else value

    named = {name: value if name == "position_bias" else tree_map(own, value) for name, value in kwargs.items()}
    return tree_map(own, args), named  # ALiBi's bias is (h, 1, longest), for all of them
