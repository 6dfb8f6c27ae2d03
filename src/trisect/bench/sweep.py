"""Time a model beside the dense one that it was made from, at every phase, batch and length that is asked for."""

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import chain, product
from typing import Any

import torch
import transformers

from trisect.bench import measure
from trisect.bench.rows import MODES, PHASES, Case, Variant
from trisect.decode import prepare_for_inference
from trisect.errors import TrisectError, check_names
from trisect.models import checkpoint, families, family_for, load_model, read_shape, source, streamed
from trisect.plan import budget_of, compare
from trisect.support import checks, receipt

TRACEBACK_LINES = 12
USUAL_LENGTH, USUAL_NEW = 1024, 128
TURNS = 8  # pieces that laps are taken in, where several models are timed in turn
NOT_ORIGINAL = ("trisect", "model_type", "architectures", "quantization_config", "transformers_version")
"""What a compressed checkpoint's config has and its original's must not inherit."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """All combinations of these."""

    phases: tuple[str, ...] = PHASES
    batches: tuple[int, ...] = (1,)
    lengths: tuple[int, ...] = (1024,)
    new: int = 128  # tokens that decoding adds to the prompt
    attentions: tuple[str, ...] = ("sdpa",)
    modes: tuple[str, ...] = ("plain",)
    layers: int | None = None
    device: str = "cpu"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_names("phase", self.phases, PHASES)
        check_names("mode", self.modes, MODES)
        check_names("dtype", (self.dtype,), checkpoint.DTYPES)
        if min((*self.batches, *self.lengths, self.new), default=0) < 1:
            raise TrisectError("Batches, lengths and new tokens are whole numbers of at least 1.")
        checks.check_device(self.device)
        if torch.device(self.device).type not in ("cpu", "cuda"):
            raise TrisectError(f"Times are taken on cpu and cuda, not on {self.device!r}.")
        if "graphs" in self.modes and not measure.is_cuda(self.device):
            raise TrisectError("CUDA graphs need a CUDA device: add --device cuda, or leave --graphs out.")


def fitting_lengths(
    name: str, lengths: tuple[int, ...], new: int | None, *, trust_remote_code: bool
) -> tuple[tuple[int, ...], int]:
    """Prompts and new tokens as asked for, else 1024 and 128; together never more than the model reads."""
    context = read_shape(name, trust_remote_code=trust_remote_code)[2]["context"] or USUAL_LENGTH + USUAL_NEW
    new = min(USUAL_NEW, context // 2) if new is None else new
    if max(lengths, default=1) + new > context:
        what = f"{name} reads {context} tokens, fewer than a prompt of {max(lengths, default=1)} and {new} new ones"
        raise TrisectError(f"{what}; try --length {max(1, context // 2)} --new {max(1, min(new, context // 2))}.")
    return lengths or (min(USUAL_LENGTH, context - new),), new


def cases_of(name: str, variant: Variant, sweep: Sweep) -> Iterator[Case]:
    """A variant's cases, those that share an attention kernel side by side."""
    whole = len(variant.shape.layers)
    names = ("kind", "asked", "widths", "folded")
    fixed: Any = {"subject": name, **{field: getattr(variant, field) for field in names}}
    fixed |= {"layers": sweep.layers or whole, "of_layers": whole}
    fixed |= {"dtype": sweep.dtype, "device": measure.device_name(sweep.device)}
    for attention, phase in product(sweep.attentions, [p for p in PHASES if p in sweep.phases]):
        # A prefill has nothing to win from a graph: it is launched once, and its shapes change.
        modes = dict.fromkeys("plain" if phase == "prefill" and m == "graphs" else m for m in sweep.modes)
        for mode, length, batch in product(modes, sweep.lengths, sweep.batches):
            new = sweep.new if phase == "decode" else 0
            yield Case(phase=phase, attention=attention, mode=mode, batch=batch, length=length, new=new, **fixed)


def failed(error: Exception) -> dict[str, Any]:
    """The row of a case that went wrong."""
    lines = "".join(traceback.format_exception(error)).splitlines()[-TRACEBACK_LINES:]
    return {"error": f"{type(error).__name__}: {error}", "traceback": lines}


def original_config(config: Any) -> Any:
    """The stock config of the dense model that a compressed one was made from; a stock one as it is."""
    if not hasattr(config, "trisect"):
        return config
    settings = {key: value for key, value in config.to_dict().items() if key not in NOT_ORIGINAL}
    return getattr(transformers, family_for(config).model).config_class.from_dict(settings)


def models_beside_dense(
    name: str, sweep: Sweep, *, seed: int, trust_remote_code: bool
) -> tuple[dict[Variant, Callable[[], Any]], str]:
    """How to make the dense model (random weights), stock and in our runtime, and the model if it is compressed."""
    # With them the name of the attention kernel that the stock model takes by itself.
    narrow, dense, _ = read_shape(name, trust_remote_code=trust_remote_code)
    config = checkpoint.read_config(source.resolve(checkpoint.fetched(name), trusted=trust_remote_code))
    dtype, family = checkpoint.DTYPES[sweep.dtype], family_for(config)
    if family.name not in families.FAMILIES:
        raise TrisectError(f"{name} is a {config.model_type} model: bench the text model inside.")
    stock = getattr(transformers, family.model)

    def made() -> Any:
        with torch.random.fork_rng(), torch.device(sweep.device):
            torch.manual_seed(seed)
            return stock._from_config(original_config(config), dtype=dtype).eval().requires_grad_(False)

    def loaded() -> Any:
        how: Any = {"dtype": dtype, "device": sweep.device, "trust_remote_code": trust_remote_code}
        return prepare_for_inference(load_model(name, **how).model)

    before, after = (replace(shape, bytes_per_element=dtype.itemsize) for shape in (dense, narrow))
    models = {
        Variant(kind="dense", asked="", shape=before, removed=0.0): made,
        Variant(kind="owned", asked="", shape=before, removed=0.0): lambda: prepare_for_inference(made()),
    }
    if hasattr(config, "trisect"):
        removed = compare(budget_of(before), budget_of(after)).ratio
        models[Variant(kind="trisect", asked="checkpoint", shape=after, removed=removed)] = loaded
    return models, "sdpa" if stock._supports_sdpa else "eager"


def timed_together(models: Mapping[Variant, Any], device: str) -> list[list[Variant]]:
    """Models whose laps are taken in turn: all of them, or each by itself."""
    # On a GPU nobody else is at work, and the most memory that a model takes is one of its figures.
    needed = sum(budget_of(variant.shape).parameters * variant.shape.bytes_per_element for variant in models)
    apart = measure.is_cuda(device) or needed > streamed.ROOM * streamed.available_bytes(device)
    return [[variant] for variant in models] if apart else [list(models)]


def time_beside_dense(
    name: str,
    sweep: Sweep,
    *,
    effort: measure.Effort,
    trust_remote_code: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Rows and a receipt; a case that fails has its error for a row."""
    models, attention = models_beside_dense(name, sweep, seed=effort.seed, trust_remote_code=trust_remote_code)
    sweep, lap = replace(sweep, attentions=(attention,)), measure.laps_on(sweep.device)
    if torch.device(sweep.device).index is not None:
        torch.cuda.set_device(sweep.device)
    ceilings = measure.measure_ceilings(sweep.device, checkpoint.DTYPES[sweep.dtype], lap)
    rows: dict[Variant, list[dict[str, Any]]] = {variant: [] for variant in models}
    for group in timed_together(models, sweep.device):
        measure.release()
        built = {variant: cache(models[variant]) for variant in group}

        def turns(variant: Variant, case: Case, built: Any = built, alone: bool = len(group) == 1) -> measure.Turns:
            model = built[variant]()
            run = yield from measure.turns_of(model, case, effort, lap, turns=1 if alone else TURNS)
            return measure.row_of(run, model, variant, case, ceilings)

        for cases in zip(*(cases_of(name, variant, sweep) for variant in group), strict=True):
            pairs = list(zip(group, cases, strict=True))
            for (variant, case), found in zip(pairs, measure.in_turn([turns(*pair) for pair in pairs]), strict=True):
                row = failed(found) if isinstance(found, Exception) else found
                rows[variant].append({"case": asdict(case), **row, "receipt": 0})
                say(described(rows[variant][-1]))
            if cases[0].mode == "compile":
                torch.compiler.reset()
    recipe = {"bench": name, "sweeps": [asdict(sweep)], **asdict(effort), "ceilings": asdict(ceilings)}
    recipe["threads"] = torch.get_num_threads()
    made = receipt.build_receipt(recipe, seed=effort.seed, token_hash=None, timings={})
    return {"receipts": [made], "rows": [*chain(*rows.values())]}


def described(row: Mapping[str, Any]) -> str:
    """A row on one line, for who waits."""
    said = Case(**row["case"]).describe()
    if "error" in row:
        return f"{said}: failed: {row['error'].splitlines()[0][:200]}"
    return f"{said}: {row['tokens_per_second']:,.1f} tokens/s, {1000 * row['times']['p50']:.3f} ms"
