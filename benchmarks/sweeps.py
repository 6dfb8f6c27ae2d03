"""Sweeps over random models: every case that has no row yet, one model in memory at a time, rows in a file."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain, product, takewhile
from pathlib import Path
from typing import Any

import torch
from random_models import Subject, build
from torch import nn

from trisect.bench import measure
from trisect.bench.measure import Run, parameter_bytes
from trisect.bench.rows import PHASES, TABLES, Case, Variant, cells
from trisect.bench.sweep import Sweep, cases_of, described, failed
from trisect.errors import TrisectError
from trisect.models import family_for
from trisect.models.checkpoint import DTYPES
from trisect.plan import budget_of
from trisect.plan.budget import bias_parameters, matrix_parameters
from trisect.records.parts import COMPONENTS
from trisect.records.shapes import ModelShape
from trisect.support.files import write_json
from trisect.support.receipt import build_receipt

FORMAT = 1
LARGE = 10_000_000
"""Parameters of a model that is freed at once: collecting garbage takes time."""


@dataclass(kw_only=True)
class Rows:
    """The rows of one file, or of memory alone."""

    path: Path | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    receipts: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path | None) -> "Rows":
        """The rows of a file; none if it does not exist yet."""
        if path is None or not path.exists():
            return cls(path=path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']!r}, this version reads {FORMAT}")
            for phase, columns in product(PHASES, TABLES.values()):
                cells(data["rows"], phase, columns)  # reads every field that is ever read
            return cls(path=path, rows=list(data["rows"]), receipts=list(data["receipts"]))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise TrisectError(
                f"{path} does not hold rows of a benchmark: {error!r}; name another folder with --out."
            ) from error

    def done(self, case: Case, *, keep_errors: bool = False) -> bool:
        """Whether a case has a row, and one without an error unless those count."""
        wanted = asdict(case)
        return any(r["case"] == wanted and (keep_errors or "error" not in r) for r in self.rows)

    def add(self, case: Case, measured: Mapping[str, Any]) -> dict[str, Any]:
        """Put a row in, in place of an earlier one of the same case, and write the file."""
        row = {"case": asdict(case), **measured, "receipt": len(self.receipts) - 1}
        self.rows = [old for old in self.rows if old["case"] != row["case"]] + [row]
        if self.path is not None:
            write_json(self.path, self.to_dict())
        return row

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "receipts": self.receipts, "rows": self.rows}


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
        cases = [case for sweep in sweeps for case in cases_of(subject.name, variant, sweep)]
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
            say(described(row))
        _make_room(variant)
    return tally


def _measured(
    subject: Subject, variant: Variant, cases: Iterator[Case], device: str, settings: dict[str, Any]
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """The rows of one model's cases."""
    first = next(cases, None)
    if first is None:
        return

    def made() -> Any:
        sliced = subject.sliced(first.layers if first.layers < first.of_layers else None)
        return build(sliced, variant, device=device, dtype=DTYPES[first.dtype], seed=settings["effort"].seed)

    def row(model: Any, case: Case) -> dict[str, Any]:
        use_attention(model, case.attention)
        return measured_row(model, variant, case, **settings)

    model: Any = None
    for case in chain([first], cases):
        try:
            model = made() if model is None else model
            found = row(model, case)
        except Exception as error:  # one model that does not fit must not take the others' rows with it
            found = failed(error)
        if case.mode == "compile":
            torch.compiler.reset()
        yield case, found
        _make_room(variant)


def measured_row(
    model: Any,
    variant: Variant,
    case: Case,
    *,
    effort: measure.Effort,
    ceilings: measure.Ceilings,
    lap: measure.Lapping,
) -> dict[str, Any]:
    """A row; of a slice of the layers it is extrapolated to all of them."""
    run, missing = run_case(model, case, effort, lap), 0
    if case.layers < case.of_layers:
        missing = missing_bytes(model, variant.shape, measured=case.layers)
        with first_layers(model, 1):
            one = run_case(model, case, effort, lap)
        run = _extrapolated(case, run, one, missing)
    return measure.row_of(run, model, variant, case, ceilings, missing=missing)


def run_case(model: Any, case: Case, effort: measure.Effort, lap: measure.Lapping) -> Run:
    """Run a model as the case says: seconds are those of one prefill, or of one decoding step."""
    (found,) = measure.in_turn([measure.turns_of(model, case, effort, lap, turns=1)])
    if isinstance(found, Exception):
        raise found
    return found


@contextmanager
def first_layers(model: Any, count: int) -> Iterator[None]:
    """Inside, the model has its first `count` decoder layers only."""
    path = family_for(model.config).layers
    whole, text = model.get_submodule(path), model.config.get_text_config()
    number = text.num_hidden_layers
    model.set_submodule(path, nn.ModuleList(list(whole)[:count]))
    text.num_hidden_layers = count
    try:
        yield
    finally:
        model.set_submodule(path, whole)
        text.num_hidden_layers = number


def missing_bytes(model: Any, shape: ModelShape, *, measured: int) -> int:
    """Parameters of the layers that a slice leaves out; their norms are those of the first layer."""
    first = model.get_submodule(family_for(model.config).layers)[0]
    linear = [
        (sum(matrix_parameters(layer, part) for part in COMPONENTS) + bias_parameters(layer)) * shape.bytes_per_element
        for layer in shape.layers
    ]
    norms = parameter_bytes(first) - linear[0]
    return sum(size + norms for size in linear[measured:])


def whole_from(many: float, one: float, *, measured: int, layers: int) -> float:
    """Time of all layers from those of `measured` layers and of one: every further layer costs the same."""
    if many <= one:
        raise TrisectError(
            f"{measured} layers were not slower than one ({many:.3g} s and {one:.3g} s), so nothing follows "
            "for all of them: use more --layers or --repeats, or a quieter machine."
        )
    return many + (layers - measured) * (many - one) / (measured - 1)


def _extrapolated(case: Case, many: Run, one: Run, missing: int) -> Run:
    """The whole model's run from that of a slice and that of one layer."""
    p50, peak = many["times"]["p50"], many["peak_memory"]
    whole = whole_from(p50, one["times"]["p50"], measured=case.layers, layers=case.of_layers)
    held = many["cache_bytes"] - one["cache_bytes"]
    cached = round(many["cache_bytes"] + (case.of_layers - case.layers) * held / (case.layers - 1))
    return {
        **many,
        # Only medians are steady enough to go by; the others keep their distance from it.
        "times": {name: whole * value / p50 for name, value in many["times"].items()},
        "peak_memory": None if peak is None else peak + missing + cached - many["cache_bytes"],
        "cache_bytes": cached,
    }


def _make_room(variant: Variant) -> None:
    if budget_of(variant.shape).parameters >= LARGE:
        measure.release()


def use_attention(model: Any, name: str) -> None:
    """Switch the attention kernel; models that have but one are not timed under another's name."""
    if model._can_set_attn_implementation():
        model.set_attn_implementation(name)
    elif name != "eager":
        raise TrisectError(f"{type(model).__name__} has one attention of its own; use --attention eager.")
