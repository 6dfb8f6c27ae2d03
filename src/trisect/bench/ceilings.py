"""What the device can do at best, measured in the same run: a large matrix product, a copy, a read."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from trisect.bench.timing import Lapping, is_cuda

WARM_UP, LAPS = 3, 10


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Per second."""

    flops: float
    copy_bytes: float
    """Read plus written."""
    read_bytes: float
    matrix: int
    """Side of the square product that gave `flops`."""

    @property
    def bytes(self) -> float:
        """The faster of both: reading weights needs no writes, but a sum may not run at the memory's pace."""
        return max(self.copy_bytes, self.read_bytes)

    def floor(self, *, flops: float, moved: float) -> float:
        """Seconds below which no version of this much work can run."""
        return max(flops / self.flops, moved / self.bytes)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_ceilings(
    device: str, dtype: torch.dtype, lap: Lapping, *, matrix: int | None = None, size: int | None = None
) -> Ceilings:
    """`matrix` is the side of the product, `size` the bytes that are copied; chosen by device otherwise."""
    side = matrix or (8192 if is_cuda(device) else 1024)
    size = size or (4 << 30 if is_cuda(device) else 1 << 28)
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, dtype=dtype, device=device).normal_(generator=generator)

    product = _product_seconds(lap, random(side, side), random(side, side))
    copy, read = _pass_seconds(lap, random(size // dtype.itemsize))
    return Ceilings(
        flops=2 * side**3 / product, copy_bytes=2 * size / copy, read_bytes=size / read, matrix=side
    )


def _product_seconds(lap: Lapping, a: torch.Tensor, b: torch.Tensor) -> float:
    out = torch.empty_like(a)
    return _median(lap, lambda: torch.mm(a, b, out=out))


def _pass_seconds(lap: Lapping, source: torch.Tensor) -> tuple[float, float]:
    target = torch.empty_like(source)
    return _median(lap, lambda: target.copy_(source)), _median(lap, source.sum)


def _median(lap: Lapping, work: Any) -> float:
    lap(work, WARM_UP)
    return lap(work, LAPS).median
