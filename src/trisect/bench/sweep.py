"""A sweep: every case that has no row yet, one model in memory at a time."""

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product, takewhile
from typing import Any

import torch

from trisect.bench import measure
from trisect.bench.random_models import Subject, Variant, build
from trisect.bench.rows import MODES, PHASES, Case, Rows
from trisect.errors import TrisectError, check_names
from trisect.models.checkpoint import DTYPES
from trisect.plan import budget_of
from trisect.support.receipt import build_receipt

ATTENTIONS = ("eager", "sdpa")
TRACEBACK_LINES = 12
LARGE = 10_000_000
"""Parameters of a model that is freed at once: collecting garbage takes time."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All combinations of these."""

    phases: tuple[str, ...] = PHASES
    batches: tuple[int, ...] = (1,)
    lengths: tuple[int, ...] = (1024,)
    new: int = 128
    """Tokens that decoding adds to the prompt."""
    attentions: tuple[str, ...] = ("sdpa",)
    modes: tuple[str, ...] = ("plain",)
    layers: int | None = None
    device: str = "cpu"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_names("phase", self.phases, PHASES)
        check_names("attention", self.attentions, ATTENTIONS)
        check_names("mode", self.modes, MODES)
        check_names("dtype", (self.dtype,), DTYPES)
        if min((*self.batches, *self.lengths, self.new), default=0) < 1:
            raise TrisectError("Batches, lengths and new tokens are whole numbers of at least 1.")
        check_device(self.device)
        if "graphs" in self.modes and not measure.is_cuda(self.device):
            raise TrisectError("CUDA graphs need a CUDA device: add --device cuda, or leave --graphs out.")


def check_device(device: str) -> None:
    """Refuse a device that is not there."""
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise TrisectError(f"Unknown device {device!r}; use cpu, cuda or cuda:1.") from error
    if kind not in ("cpu", "cuda"):
        raise TrisectError(f"Times are taken on cpu and cuda, not on {device!r}.")
    if kind == "cuda" and not torch.cuda.is_available():
        raise TrisectError("This machine has no CUDA device that torch can use; leave --device out.")


@dataclass(kw_only=True)
class Tally:
    """What a sweep did, in rows."""

    measured: int = 0
    done: int = 0
    """Rows that were there before."""
    failed: int = 0


def run_sweep(
    subject: Subject,
    variants: Sequence[Variant],
    sweeps: Sweep | Sequence[Sweep],
    rows: Rows,
    *,
    effort: measure.Effort | None = None,
    keep_errors: bool = False,
    say: Callable[[str], None] = lambda text: None,
    stop: Callable[[], bool] = lambda: False,
    lap: measure.Lapping | None = None,
    ceilings: measure.Ceilings | None = None,
) -> Tally:
    """Measure what is missing; a case that fails has its error for a row, and the others go on.

    Several sweeps on one device run model by model, so that each is built once. `stop` is asked before every
    case.
    """
    sweeps = (sweeps,) if isinstance(sweeps, Sweep) else tuple(sweeps)
    device, dtype = sweeps[0].device, DTYPES[sweeps[0].dtype]
    effort, lap, tally = effort or measure.Effort(), lap or measure.laps_on(device), Tally()
    if torch.device(device).index is not None:
        torch.cuda.set_device(device)
    waiting: list[tuple[Variant, list[Case]]] = []
    for variant in variants:
        cases = [case for sweep in sweeps for case in cases_of(subject, variant, sweep)]
        missing = [case for case in cases if not rows.done(case, keep_errors=keep_errors)]
        tally.done += len(cases) - len(missing)
        waiting.append((variant, missing))
    if not any(missing for _, missing in waiting):
        return tally
    ceilings = ceilings or measure.measure_ceilings(device, dtype, lap)
    measure.release()  # operands as large as a small model
    recipe = {
        "bench": subject.name,
        "sweeps": [asdict(sweep) for sweep in sweeps],
        **asdict(effort),
        "ceilings": asdict(ceilings),
        "threads": torch.get_num_threads(),
        "weights": "random: right for speed, wrong for accuracy",
    }
    rows.receipts.append(build_receipt(recipe, seed=effort.seed, token_hash=None, timings={}))
    settings = {"effort": effort, "ceilings": ceilings, "lap": lap}
    for variant, missing in waiting:
        for case, measured in _measured(subject, variant, takewhile(lambda _: not stop(), missing), device, settings):
            row = rows.add(case, measured)
            tally.failed += "error" in row
            tally.measured += "error" not in row
            if "error" in row:
                say(f"{case.describe()}: failed: {row['error'].splitlines()[0][:200]}")
            else:
                speed = f"{row['tokens_per_second']:,.1f} tokens/s, {1000 * row['times']['p50']:.3f} ms"
                say(f"{case.describe()}: {speed}")
        _make_room(variant)
    return tally


def cases_of(subject: Subject, variant: Variant, sweep: Sweep) -> Iterator[Case]:
    """A variant's cases, those that share an attention kernel side by side."""
    names = ("kind", "asked", "widths", "folded")
    fixed: Any = {"subject": subject.name, **{name: getattr(variant, name) for name in names}}
    fixed |= {"layers": sweep.layers or subject.num_layers, "of_layers": subject.num_layers}
    fixed |= {"dtype": sweep.dtype, "device": measure.device_name(sweep.device)}
    for attention, phase in product(sweep.attentions, [p for p in PHASES if p in sweep.phases]):
        # A prefill has nothing to win from a graph: it is launched once, and its shapes change.
        modes = dict.fromkeys("plain" if phase == "prefill" and m == "graphs" else m for m in sweep.modes)
        for mode, length, batch in product(modes, sweep.lengths, sweep.batches):
            new = sweep.new if phase == "decode" else 0
            yield Case(phase=phase, attention=attention, mode=mode, batch=batch, length=length, new=new, **fixed)


def _measured(
    subject: Subject, variant: Variant, cases: Iterable[Case], device: str, settings: dict[str, Any]
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """Build the model once and run its cases; whatever goes wrong becomes the row."""
    model: Any = None
    for case in cases:
        try:
            if model is None:
                sliced = subject.sliced(case.layers if case.layers < case.of_layers else None)
                dtype, seed = DTYPES[case.dtype], settings["effort"].seed
                model = build(sliced, variant, device=device, dtype=dtype, seed=seed)
            use_attention(model, case.attention)
            measured = measure.measure(model, variant, case, **settings)
        except Exception as error:  # one model that does not fit must not take the others' rows with it
            lines = traceback.format_exc().splitlines()[-TRACEBACK_LINES:]
            measured = {"error": f"{type(error).__name__}: {error}", "traceback": lines}
        if case.mode == "compile":
            torch.compiler.reset()
        yield case, measured
        _make_room(variant)


def _make_room(variant: Variant) -> None:
    if budget_of(variant.shape).parameters >= LARGE:
        measure.release()


def use_attention(model: Any, name: str) -> None:
    """Switch the attention kernel; models that have but one are not timed under another's name."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)
    elif name != "eager":
        raise TrisectError(f"{type(model).__name__} has one attention of its own; use --attention eager.")
