"""Small random problems for A3's solvers: parts, the tokens they see, and the moments of those tokens.

h = query heads, k = key/value heads, g = h / k, t = tokens, D = d_model, d = head width, r = new width
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from trisect.calibrate.moments import head_grams, square_grams, whole_gram
from trisect.methods import METHODS
from trisect.methods.method import Options
from trisect.records.parts import MLP, OV, QK, Moments, Part, Shrunk

few = settings(max_examples=25)


@dataclass(frozen=True, kw_only=True)
class Size:
    seed: int = 0
    tokens: int = 60
    d_model: int = 12
    kv_heads: int = 2
    group: int = 1
    width: int = 6
    spread: float = 1.0
    """Ratio of the largest to the smallest eigenvalue of the input's covariance."""
    bias: bool = False

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


sizes = st.builds(
    Size,
    seed=st.integers(0, 2**31 - 1),
    d_model=st.integers(8, 24),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 2),
    width=st.integers(2, 8),
    spread=st.sampled_from([1.0, 1e4, 1e8, 1e10]),
    bias=st.booleans(),
)
mha_sizes = sizes.map(lambda size: replace(size, kv_heads=size.heads, group=1))


def narrower(size: Size, data: st.DataObject) -> int:
    """Some rank below the width of the heads."""
    return data.draw(st.integers(1, size.width - 1))


class Draw:
    """Seeded float64 tensors."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def inputs(self, size: Size) -> Tensor:
        """(t, D) tokens: correlated channels, a mean, and a covariance as ill-conditioned as asked."""
        D = size.d_model
        mix = torch.linalg.qr(self(D, D)).Q
        scale = size.spread ** -torch.linspace(0, 0.5, D, dtype=torch.float64)
        return (self(size.tokens, D) + 0.3 * self(D)) * scale @ mix


@dataclass(frozen=True, kw_only=True)
class QKProblem:
    part: QK
    X_q: Tensor  # (t, D)
    X_k: Tensor  # (t', D)
    moments: Moments


@dataclass(frozen=True, kw_only=True)
class OVProblem:
    part: OV
    X: Tensor  # (t, D)
    P: Tensor  # (h, t, D) tokens mixed by each head's attention
    moments: Moments


def project(X: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
    """(t, D) or (heads, t, D) through (heads, D, d) -> (heads, t, d)."""
    return X @ W if b is None else X @ W + b.unsqueeze(-2)


def heads_gram(y: Tensor) -> Tensor:
    """The second moment calibration would collect of (heads, t, d)."""
    return head_grams(y.transpose(0, 1).unsqueeze(0)) / y.shape[1]


def qk_problem(size: Size, *, pairs: int = 0) -> QKProblem:
    """Queries and keys of different tokens, so that swapped sides cannot pass."""
    draw = Draw(size.seed)
    h, k, D, d = size.heads, size.kv_heads, size.d_model, size.width
    X_q, X_k = draw.inputs(size), draw.inputs(replace(size, tokens=size.tokens - 7))
    part = QK(
        W_q=draw(h, D, d),
        W_k=draw(k, D, d),
        b_q=draw(h, d) if size.bias else None,
        b_k=draw(k, d) if size.bias else None,
        # As in a head that has lost some frequencies before: not simply 0, 1, 2, ...
        frequencies=torch.arange(pairs).mul(3).add(1).expand(k, -1) + torch.arange(k).unsqueeze(-1),
    )
    q, keys = project(X_q, part.W_q, part.b_q), project(X_k, part.W_k, part.b_k)
    return QKProblem(part=part, X_q=X_q, X_k=X_k, moments={"q": heads_gram(q), "k": heads_gram(keys)})


def normed_problem(*, jitter: float, dead_key: bool = False) -> QKProblem:
    """Full RoPE behind an RMS-norm whose channels' shares of the energy vary by `jitter`."""
    problem = qk_problem(Size(width=6, tokens=80, group=2), pairs=3)
    draw = Draw(5)
    part = replace(problem.part, norm_q=draw(4, 6).abs() + 0.5, norm_k=draw(2, 6).abs() + 0.5)
    assert part.norm_q is not None
    assert part.norm_k is not None
    moments = {}
    for name, heads, norm in (("q", 4, part.norm_q), ("k", 2, part.norm_k)):
        loudness = draw(heads, 80, 1).abs() + 0.1
        x = loudness * (1 + jitter * draw(heads, 80, 6))
        if name == "k" and dead_key:
            x[0] = 0
        moments[f"{name}_squares"] = square_grams(x.transpose(0, 1).unsqueeze(0)) / 80
        scale = (x.square().mean(dim=-1, keepdim=True) + 1e-6).rsqrt()
        moments[name] = heads_gram(x * scale * norm.unsqueeze(1))
    return replace(problem, part=part, moments=moments)


def ov_problem(size: Size) -> OVProblem:
    draw = Draw(size.seed)
    h, k, D, d, t = size.heads, size.kv_heads, size.d_model, size.width, size.tokens
    X = draw.inputs(size)
    attention = torch.softmax(4 * draw(h, t, t), dim=-1)  # rows sum to one
    part = OV(
        W_v=draw(k, D, d),
        W_o=draw(h, d, D),
        b_v=draw(k, d) if size.bias else None,
        b_o=draw(D) if size.bias else None,
        heads=h,
    )
    v = project(X, part.W_v, part.b_v)
    a = attention @ v.repeat_interleave(size.group, dim=0)
    moments = {"v": heads_gram(v), "a": heads_gram(a), "a_gram": whole_gram(a.transpose(0, 1).unsqueeze(0)) / t}
    return OVProblem(part=part, X=X, P=attention @ X, moments=moments)


def mlp_problem(size: Size, *, gated: bool) -> tuple[MLP, Tensor]:
    draw = Draw(size.seed)
    D, inner = 5, size.d_model
    part = MLP(
        W_up=draw(D, inner),
        W_gate=draw(D, inner) if gated else None,
        W_down=draw(inner, D),
        b_up=draw(inner) if size.bias else None,
        b_gate=draw(inner) if gated and size.bias else None,
        b_down=draw(D) if size.bias else None,
    )
    return part, draw.inputs(size)


def solution_of(method: str, component: str, part: Part, moments: Moments, width: int, **options: Any) -> Shrunk:
    """The solver itself, without the full-width shortcut of `solve`."""
    return METHODS[method].solvers[component](part, moments, width, Options(**options))
