"""Where the time of a3+ and of loss curves goes: stages inside stages, per layer, at true shapes.

    PYTHONPATH=src python3 benchmarks/profile_a3plus.py                   # 8b smollm2 8b-curves 70b
    PYTHONPATH=src python3 benchmarks/profile_a3plus.py 8b --samples 512
    PYTHONPATH=src python3 benchmarks/profile_a3plus.py --device cpu --tiny

Random weights (bfloat16, on a CPU float32), layers in main memory and streamed to the device. The first layer of a
case warms up and is left out where there are others. Figures go to $OUT/profile-a3plus.json (without OUT, to the folder
at hand), case by case.
"""

import argparse
import functools
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "experiments"))
import scale_shapes  # noqa: E402

from trisect.calibrate import fisher, linearised, replay, scores, streams  # noqa: E402
from trisect.calibrate.moments import Accumulator  # noqa: E402
from trisect.config import CalibrationConfig, CompressConfig  # noqa: E402
from trisect.data import tokens_from_tensor  # noqa: E402
from trisect.methods import METHODS, a3plus  # noqa: E402
from trisect.pipeline import loss_curves, run  # noqa: E402
from trisect.support import clock  # noqa: E402
from trisect.support.files import write_json  # noqa: E402
from trisect.support.products import fast_products  # noqa: E402
from trisect.support.receipt import build_receipt  # noqa: E402

FILE = "profile-a3plus.json"
TINY = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"head_dim": 64, "vocab_size": 64}


@dataclass(frozen=True, kw_only=True)
class Profile:
    shape: str
    layers: int
    curves: bool = False
    states: str = "auto"


PROFILES = {
    "8b": Profile(shape="llama-3.1-8b", layers=3),
    "smollm2": Profile(shape="smollm2-135m", layers=3),
    "8b-curves": Profile(shape="llama-3.1-8b", layers=1, curves=True),
    "70b": Profile(shape="llama-3.1-70b", layers=2, states="host"),
}


class PathClock(clock.Clock):
    """A clock that knows stages by the stages around them, and the layer at hand."""

    layer = -1

    def mark(self) -> None:
        name = " > ".join(self.open)
        super().mark()
        self.marks[-1] = f"{self.layer}|{name}", self.marks[-1][1]


def staged(owner: Any, name: str, label: str | Callable[..., str]) -> None:
    """Let a function's time be a stage of its own."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def outer(*args: Any, **kwargs: Any) -> Any:
        with clock.stage(label if isinstance(label, str) else label(*args)):
            return inner(*args, **kwargs)

    setattr(owner, name, outer)


def watch_layers() -> None:
    inner = streams.TwoStreams.begin

    def begin(self: Any, view: Any, *args: Any, **kwargs: Any) -> Any:
        running = clock._running.get()
        assert isinstance(running, PathClock)
        running.mark()
        running.layer = view.index
        with clock.stage("dense pass"):
            return inner(self, view, *args, **kwargs)

    streams.TwoStreams.begin = begin  # type: ignore[method-assign]


def instrument() -> None:
    """Finer stages than a run's own; the names are the functions'."""
    clock.Clock = PathClock  # type: ignore[misc]
    watch_layers()
    staged(streams.TwoStreams, "statistics", lambda self, view, part, *_: f"pass for {part}")
    staged(streams.TwoStreams, "finish", "last pass")
    staged(scores.QuerySampler, "__call__", "scores")
    staged(Accumulator, "_regress", "regression")
    staged(Accumulator, "means", "means")
    staged(linearised.Linearised, "append", "keep rows")
    staged(linearised.Linearised, "moments", "linearised")
    staged(linearised.Linearised, "_product", "J^T J v")
    staged(linearised.Linearised, "_projected", "held out")
    staged(replay, "in_main_memory", "host copies")
    for name in ("held_out_ridge", "ridge", "eliminate_rows", "value_bases", "pooled_basis", "projected"):
        if hasattr(a3plus, name):
            staged(a3plus, name, name)
    for name in ("begin", "rise"):
        staged(fisher.DrawnAnswers, name, f"answers {name}")
    staged(fisher, "DrawnAnswers", "answers")
    staged(loss_curves, "solve", lambda method, part, *_: f"solve {part}")


def measure(profile: Profile, *, device: str, samples: int, length: int) -> dict[str, Any]:
    """Seconds by stage of the layers behind the first, per layer, and the peaks of memory."""
    case = scale_shapes.Case(shape=profile.shape, method="a3+", layers=profile.layers, states=profile.states)
    cuda = torch.device(device).type == "cuda"
    model = scale_shapes.build(case, device=device, dtype=torch.bfloat16 if cuda else torch.float32)
    ids = torch.randint(0, model.config.vocab_size, (samples, length), generator=torch.Generator().manual_seed(0))
    config = CompressConfig(ratio=0.25, method="a3+", calibration=CalibrationConfig(states=profile.states))
    tokens = tokens_from_tensor(ids, "random ids")
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    with clock.timing(device) as running, fast_products(torch.device(device)):
        if profile.curves:
            loss_curves.measure_curves(model, tokens, METHODS["a3+"], config)
        else:
            compress_without_clock(model, config, tokens)
    seconds = running.seconds()
    wall = time.perf_counter() - began
    split = [(*key.split("|", 1), value) for key, value in seconds.items()]
    first = 0 if profile.layers == 1 else 1
    counted = profile.layers - first
    stages: dict[str, float] = {}
    for layer, path, value in split:
        if int(layer) >= first:
            stages[path or "other"] = stages.get(path or "other", 0.0) + value / counted
    return {
        "layers": profile.layers,
        "tokens": samples * length,
        "wall_seconds": wall,
        "seconds_per_layer": sum(stages.values()),
        "before_layers": sum(value for layer, _, value in split if int(layer) < 0),
        "stages": dict(sorted(stages.items())),
        "peak_device_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "peak_host_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "receipt": build_receipt({}, seed=0, token_hash=tokens.hash, timings=seconds),
    }


def compress_without_clock(model: Any, config: CompressConfig, tokens: Any) -> None:
    """A run whose stages go to the clock that is running, not to one of its own."""
    opened = run.open_run(model, config, tokens=tokens)
    opened.plan = run.make_plan(opened, curves=None)
    for step in run.solve_layers(opened):
        step.apply()


def show(name: str, found: dict[str, Any]) -> None:
    """A tree of stages: what is inside is not in the line above."""
    peak = found["peak_device_bytes"] or 0
    print(
        f"\n{name}: {found['seconds_per_layer']:.3f} s per layer ({found['tokens']} tokens), before the layers "
        f"{found['before_layers']:.1f} s, wall {found['wall_seconds']:.1f} s; peak {peak / 1e9:.1f} GB device, "
        f"{found['peak_host_bytes'] / 1e9:.1f} GB host"
    )
    for path, value in sorted(found["stages"].items(), key=lambda item: -item[1]):
        if value >= 0.003 * found["seconds_per_layer"]:
            print(f"  {value:8.4f}  {path}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profiles", nargs="*", default=list(PROFILES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    given = parser.parse_args()
    if given.tiny:
        given.samples, given.length = 16, 128
        for shape in scale_shapes.SHAPES.values():
            shape |= TINY
    out = Path(os.environ.get("OUT", "."))
    instrument()
    kept: dict[str, Any] = {}
    for name in given.profiles:
        profile = PROFILES[name] if not given.tiny else replace(PROFILES[name], states="auto")
        kept[name] = measure(profile, device=given.device, samples=given.samples, length=given.length)
        write_json(out / FILE, kept)
        show(name, kept[name])


if __name__ == "__main__":
    main()
