"""Rotate queries and keys: the Triton kernel where it applies, its plain twin elsewhere.

Two custom operators, so that torch.compile, autograd and CUDA graphs know what happens: `trisect::rotate`
returns rotated copies and has a gradient, `trisect::rotate_` turns the heads where they lie.
"""

import math
from typing import Any, Literal

import torch
from torch import Tensor

from trisect.kernels.operators import has_triton, may_launch, on_its_device, register, wants_kernel

Layout = Literal["half", "adjacent"]  # which channels make a pair: (i, i + p) of the first 2p, or (2i, 2i + 1)


def head_angles(cos: Tensor, sin: Tensor, index: Tensor | None) -> tuple[Tensor, Tensor]:
    """Cosines and sines (b, t, k, 2 p) that each key head rotates by; k = 1 when all heads share them."""
    # `cos`, `sin` are the model's own (b, t, 2 n), every frequency twice, so that any RoPE scaling the
    # checkpoint uses is already inside. `index` (k, p) names the frequencies a head has kept.
    if index is None:
        return cos.unsqueeze(-2), sin.unsqueeze(-2)
    places = torch.cat([index, index + cos.shape[-1] // 2], dim=-1).int()
    grid = *cos.shape[:-1], *places.shape
    places = places.flatten()
    return cos.index_select(-1, places).view(grid), sin.index_select(-1, places).view(grid)


def rate_angles(rates: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (b, t, k, p) of rates (k, p) at positions (b, t), in float32."""
    # The product of two float32 numbers is exact in float64. In float32 it would be off by up to 0.004 radians
    # at position 100,000, the same for every token near it, and scores depend on differences of such angles.
    turns = positions[..., None, None].double() * rates.double() * (0.5 / math.pi)
    angles = (turns - turns.round()).float() * (2 * math.pi)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Rotate the leading pairs of the last dimension by cosines and sines (..., 2 p); channels beyond them pass."""
    # A table of a wider type than `x` is what the arithmetic is done in: one rounding, at the end.
    p = cos.shape[-1] // 2
    first, second = split_pairs(x, p, layout)
    if layout == "half" and x.shape[-1] == 2 * p:
        # The same sums in half as many calls: on a CPU those are most of what a single token takes.
        return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
    cos, sin = cos[..., :p], sin[..., :p]
    turned = first * cos - second * sin, second * cos + first * sin
    return joined_pairs(turned[0].to(x.dtype), turned[1].to(x.dtype), x[..., 2 * p :], layout)


def rotate_heads(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, layout: Layout, *, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Queries (b, t, h, d) and keys (b, t, k, d) turned by the angles (b, t, k or 1, 2 p) of their key head."""
    if inverse:
        sin = -sin
    b, t, kv_heads, width = k.shape
    both = torch.cat([q.view(b, t, kv_heads, -1, width), k.unsqueeze(3)], dim=3)  # (b, t, k, g + 1, d)
    turned = rotate(both, cos.unsqueeze(-2), sin.unsqueeze(-2), layout)
    return turned[..., :-1, :].flatten(2, 3), turned[..., -1, :]


def split_pairs(x: Tensor, p: int, layout: Layout) -> tuple[Tensor, Tensor]:
    """First and second channel of each of the leading `p` pairs."""
    if layout == "half":
        return x[..., :p], x[..., p : 2 * p]
    return x[..., 0 : 2 * p : 2], x[..., 1 : 2 * p : 2]


def joined_pairs(first: Tensor, second: Tensor, rest: Tensor, layout: Layout) -> Tensor:
    """Undo split_pairs, `rest` behind."""
    if layout == "half":
        return torch.cat([first, second, rest], dim=-1)
    return torch.cat([torch.stack([first, second], dim=-1).flatten(-2), rest], dim=-1)


def rotate_qk(
    q: Tensor,
    k: Tensor,
    *,
    pairs: int,
    layout: Layout,
    table: tuple[Tensor, Tensor] | None = None,
    index: Tensor | None = None,
    rates: Tensor | None = None,
    positions: Tensor | None = None,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """Queries (b, t, h, d) and keys (b, t, k, d), their leading pairs turned.

    Angles come from the model's `table` of cosines and sines (b or 1, t, 2 n), where `index` (k, p) says
    which frequencies a head has kept; or from `rates` (k, p), the bits of float32 radians per token as int32,
    at `positions` (b or 1, t). `in_place` is a permission, and only for heads that need no gradient.
    """
    table = None if rates is not None else table
    angles = *(table or (None, None)), index, rates, positions
    if not wants_kernel("rotary", q):
        return plain_rotation(q, k, *angles, layout=layout)
    arguments = (q, k, *angles, pairs, layout == "adjacent", False)
    if in_place and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)):
        if may_launch(q):
            _turn_in_place(*arguments)
        else:
            torch.ops.trisect.rotate_(*arguments)
        return q, k
    turned: tuple[Tensor, Tensor] = torch.ops.trisect.rotate(*arguments)
    return turned


def plain_rotation(
    q: Tensor, k: Tensor, *angles: Tensor | None, layout: Layout, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """What the kernel does, in plain torch; the angles are those of `ANGLES`, as for `rotate_qk`."""
    cos, sin, index, rates, positions = angles
    if rates is not None:
        assert positions is not None
        once = rate_angles(rates.view(torch.float32), positions)
        cos, sin = (torch.cat([x, x], dim=-1) for x in once)
    else:
        assert cos is not None
        assert sin is not None
        cos, sin = head_angles(cos, sin, index)
    return rotate_heads(q, k, cos, sin, layout, inverse=inverse)


def _rotate(q: Tensor, k: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    # Operators must not hand out their inputs, nor tensors that lie otherwise than the fake ones.
    out = _like(q), _like(k)
    _turn(out, q, k, *how)
    return out


def _rotate_in_place(q: Tensor, k: Tensor, *how: Any) -> None:
    _turn((q, k), q, k, *how)


_turn_in_place = on_its_device(_rotate_in_place)


def _turn(out: tuple[Tensor, Tensor], q: Tensor, k: Tensor, *how: Any) -> None:
    """Into `out`, which may be the heads themselves; the rest is what the operators take."""
    *angles, pairs, adjacent, inverse = how
    if has_triton() and q.is_cuda:
        from trisect.kernels.triton_rotary import fits, launch

        if fits(q, k, pairs):
            angles[:2] = readable(*angles[:2])
            launch(q, k, *out, *angles, pairs=pairs, adjacent=adjacent, inverse=inverse)
            return
    layout: Layout = "adjacent" if adjacent else "half"
    turned = plain_rotation(q, k, *angles, layout=layout, inverse=inverse)
    for target, value in zip(out, turned, strict=True):
        target.copy_(value)


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def readable(cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Tables whose columns lie side by side, and both alike: the kernel has one set of strides for them."""
    if cos is None or sin is None:
        return None, None
    if cos.stride(-1) == 1 and cos.stride() == sin.stride():
        return cos, sin
    return cos.contiguous(), sin.contiguous()


def _remember(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:
    *_, cos, sin, index, rates, positions, pairs, adjacent, inverse = inputs
    ctx.save_for_backward(cos, sin, index, rates, positions)
    ctx.turn = (pairs, adjacent, not inverse)  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, q: Tensor, k: Tensor) -> tuple[Tensor | None, ...]:
    """The transpose of a rotation is the rotation backwards, whatever factor its table carries."""
    turned = torch.ops.trisect.rotate(q, k, *ctx.saved_tensors, *ctx.turn)  # type: ignore[attr-defined]
    return *turned, *[None] * 8


ANGLES = "Tensor? cos, Tensor? sin, Tensor? index, Tensor? rates, Tensor? positions"
HOW = f"{ANGLES}, SymInt pairs, bool adjacent, bool inverse"
register(
    "rotate",
    f"(Tensor q, Tensor k, {HOW}) -> (Tensor, Tensor)",
    _rotate,
    fake=lambda q, k, *how: (_like(q), _like(k)),
    remember=_remember,
    backward=_backward,
)
register("rotate_", f"(Tensor(a0!) q, Tensor(a1!) k, {HOW}) -> ()", _rotate_in_place)
