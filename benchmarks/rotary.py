"""The rotary kernel against plain operations and a compiler: time, bytes, share of the copy bandwidth.

    python benchmarks/rotary.py --device cuda --json rotary.json
    python benchmarks/rotary.py --device cuda --tune --only prefill     # the kernel alone, in other blocks
    python benchmarks/rotary.py --device cpu                  # small sizes; plain against compiled only

Each row turns the queries and keys of one layer, lying in one matrix with the values as a fused projection
leaves them. Bytes are those that cannot be avoided: every head read once and written once. A lap goes over
several such matrices, and on a GPU it is one captured graph, so that the host's pace is not in it; at prefill
size they are more than a GPU's L2 cache holds. The copy bandwidth is measured in the same run; "negated" is
what the same heads take when nothing is to be known about them: in place, one launch of torch's.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from trisect.bench.measure import device_name, laps_on
from trisect.kernels import rotate_qk, using
from trisect.support.files import write_json
from trisect.support.receipt import build_receipt

LAPS, WARM_UP = 20, 3
SEED = 0


@dataclass(frozen=True)
class Size:
    """One layer's heads and how many tokens come at once."""

    name: str
    tokens: int
    heads: int
    kv_heads: int
    width: int
    kind: str = "index"
    layout: str = "half"

    @property
    def moved(self) -> int:
        """Elements of queries and keys, read and written."""
        return 2 * self.tokens * (self.heads + self.kv_heads) * self.width


GPU_SIZES = (
    Size("llama-2-13b prefill 2 x 2048", 4096, 40, 40, 96),
    Size("llama-2-13b prefill 2 x 2048, rates", 4096, 40, 40, 96, kind="rates"),
    Size("llama-2-13b prefill 2 x 2048, narrower", 4096, 40, 40, 64),
    Size("llama-3.1-8b prefill 2 x 2048", 4096, 32, 8, 96),
    Size("llama-3.1-8b prefill 2 x 2048, rates", 4096, 32, 8, 96, kind="rates"),
    Size("llama-2-13b decode, batch 1", 1, 40, 40, 96),
    Size("llama-2-13b decode, batch 32", 32, 40, 40, 96),
)
CPU_SIZES = (
    Size("smollm2-135m prefill 1 x 256", 256, 9, 3, 48),
    Size("smollm2-135m prefill 1 x 256, rates", 256, 9, 3, 48, kind="rates"),
    Size("smollm2-135m decode, batch 1", 1, 9, 3, 48),
)

Turn = Callable[[Tensor, Tensor], Any]


def main() -> None:
    arguments = _arguments()
    device, started = arguments.device, time.perf_counter()
    every = GPU_SIZES if device.startswith("cuda") else CPU_SIZES
    sizes = [size for size in every if arguments.only in size.name]
    if not sizes:
        raise SystemExit(f"--only {arguments.only!r} is in none of: {', '.join(size.name for size in every)}")
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    copy = copy_bandwidth(device)
    print(f"{device_name(device)}: copy {copy / 1e9:.0f} GB/s, read and written")
    rows = []
    for size in sizes:
        for row in measured(size, device, dtype, tune=arguments.tune):
            row = {**row, "share_of_copy": row["bytes_per_second"] / copy}
            rows.append(row)
            print(
                f"{row['name']:42} {row['way']:40} {1e6 * row['seconds']:9.2f} us "
                f"{row['bytes_per_second'] / 1e9:7.0f} GB/s {row['share_of_copy']:.2f}"
            )
    if arguments.json:
        took = {"total": time.perf_counter() - started}
        recipe = {"benchmark": "rotary", "device": device, "dtype": str(dtype)}
        recipe |= {"tune": arguments.tune, "only": arguments.only}
        receipt = build_receipt(recipe, seed=SEED, token_hash=None, timings=took)
        write_json(arguments.json, {"copy_bytes_per_second": copy, "rows": rows, "receipt": receipt})


def measured(size: Size, device: str, dtype: torch.dtype, *, tune: bool) -> Iterator[dict[str, Any]]:
    """Every way to turn heads of one size: a row each."""
    buffers, angles = made(size, device, dtype)
    moved = size.moved * dtype.itemsize
    for way, turn in ways(size, angles, device, tune=tune).items():
        seconds = lap_seconds(turn, buffers, device) / len(buffers)
        yield {**asdict(size), "way": way, "seconds": seconds, "bytes": moved, "bytes_per_second": moved / seconds}


def ways(size: Size, angles: dict[str, Any], device: str, *, tune: bool) -> dict[str, Turn]:
    """By name; the kernel only where there is a GPU, and nothing else if its blocks are to be tuned."""
    how = {"pairs": size.width // 2, "layout": size.layout, **angles}

    def plain(q: Tensor, k: Tensor) -> Any:
        with using(rotary="plain"):
            return rotate_qk(q, k, **how)

    def compiled_body(q: Tensor, k: Tensor) -> Any:
        return rotate_qk(q, k, **how)

    slow: dict[str, Turn] = {"plain": plain, "compiled": torch.compile(compiled_body, dynamic=False)}
    if not device.startswith("cuda"):
        return slow
    in_place: dict[str, Turn] = {
        "negated": lambda q, k: side_by_side(q, k).neg_(),
        "kernel, in place": lambda q, k: rotate_qk(q, k, in_place=True, **how),
    }
    if tune:
        return {**in_place, **tuned(size, angles)}
    return {**slow, **in_place, "kernel, copies": lambda q, k: rotate_qk(q, k, **how)}


def side_by_side(q: Tensor, k: Tensor) -> Tensor:
    """Queries and keys of a fused projection as one matrix (tokens, columns)."""
    columns = q.shape[2] * q.shape[3] + k.shape[2] * k.shape[3]
    return q.as_strided((q.shape[1], columns), (q.stride(1), 1))


def tuned(size: Size, angles: dict[str, Any]) -> dict[str, Turn]:
    """The kernel in place, each time with one thing other than it chooses."""
    from trisect.kernels.triton_rotary import Blocks, chosen_blocks, launch

    cos, sin = angles.get("table", (None, None))
    flat = cos, sin, angles.get("index"), angles.get("rates"), angles.get("positions")

    def with_blocks(blocks: Blocks) -> Turn:
        return lambda q, k: launch(
            q, k, q, k, *flat, pairs=size.width // 2, adjacent=False, inverse=False, blocks=blocks
        )

    own = chosen_blocks(size.tokens, size.kv_heads, size.width // 2, rates=size.kind == "rates")
    choices = {
        "loads late" if own.early else "loads early": own._replace(early=not own.early),
        "fewer tokens": own._replace(tokens=own.tokens // 2, warps=own.warps // 2),
        "more tokens": own._replace(tokens=2 * own.tokens, warps=2 * own.warps),
        "fewer heads": own._replace(tokens=2 * own.tokens, heads=own.heads // 2),
        "fewer warps": own._replace(warps=own.warps // 2),
        "one warp": own._replace(tokens=1, heads=max(1, own.tokens * own.heads // own.warps), warps=1),
    }
    possible = {what: blocks for what, blocks in choices.items() if min(blocks[:3]) > 0}
    return {f"kernel, {what} {tuple(blocks[:3])}": with_blocks(blocks) for what, blocks in possible.items()}


def made(size: Size, device: str, dtype: torch.dtype) -> tuple[list[tuple[Tensor, Tensor]], dict[str, Any]]:
    """Queries and keys as views into fused outputs, several times; and what turns them."""
    generator = torch.Generator().manual_seed(SEED)
    pairs, n = size.width // 2, 64
    columns = [size.heads * size.width, size.kv_heads * size.width, size.kv_heads * size.width]
    one = size.tokens * sum(columns) * dtype.itemsize
    copies = max(2, min(64, (256 << 20) // one)) if device.startswith("cuda") else 4
    buffers = []
    for _ in range(copies):
        fused = torch.randn(1, size.tokens, sum(columns), dtype=dtype, device=device)
        q, k, _ = fused.split(columns, dim=-1)
        buffers.append((q.unflatten(-1, (size.heads, -1)), k.unflatten(-1, (size.kv_heads, -1))))
    positions = torch.arange(size.tokens, device=device)[None] % 2048
    if size.kind == "rates":
        rates = torch.rand(size.kv_heads, pairs, generator=generator).to(device)
        return buffers, {"rates": rates.view(torch.int32), "positions": positions}
    turns = (positions[..., None] * (10000.0 ** (-torch.arange(n, device=device) / n))).repeat(1, 1, 2)
    order = [torch.randperm(n, generator=generator)[:pairs].sort().values for _ in range(size.kv_heads)]
    index = torch.stack(order).to(torch.int16).to(device)
    return buffers, {"table": (turns.cos().to(dtype), turns.sin().to(dtype)), "index": index}


@torch.no_grad()
def lap_seconds(turn: Turn, buffers: list[tuple[Tensor, Tensor]], device: str) -> float:
    """The median time of turning every buffer once."""

    def lap() -> None:
        for q, k in buffers:
            turn(q, k)

    work: Callable[[], Any] = lap
    for _ in range(WARM_UP):
        lap()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            lap()
        work = graph.replay
        work()
    return laps_on(device)(work, LAPS).median


def copy_bandwidth(device: str) -> float:
    """Bytes read and written per second by one large copy."""
    size = 2 << 30 if device.startswith("cuda") else 1 << 26
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    lap = laps_on(device)
    lap(lambda: target.copy_(source), WARM_UP)
    return 2 * size / lap(lambda: target.copy_(source), LAPS).median


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time the rotary kernel against plain and compiled code.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tune", action="store_true", help="the kernel only, in other blocks as well")
    parser.add_argument("--only", default="", help="sizes whose name contains this, such as 'prefill'")
    parser.add_argument("--json", help="write rows and a receipt to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
