"""`trisect quantize`: the linear weights of a dense or compressed model in fewer bits."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trisect.commands import _options as options
from trisect.commands._names import completed, data_names, one_of
from trisect.errors import TrisectError

PANEL = "Recover and shrink further"
EXAMPLES = (
    ("Four bits per weight", "trisect quantize small -o small-4bit"),
    ("Three bits, with perplexity before and after", "trisect quantize small -o small-3bit --bits 3 --data builtin"),
    ("Eight bits with torchao's kernels", "trisect quantize small -o small-8bit --bits 8 --backend torchao"),
)

if TYPE_CHECKING:
    from trisect.evaluate.perplexity import Perplexity
    from trisect.models import Loaded
    from trisect.quantize import Bits, QuantizeConfig


def run(
    model: options.Model,
    out: options.OutFolder,
    bits: Annotated[int, typer.Option(metavar="8|4|3|2", help="Bits per weight, before scales.")] = 4,
    group_size: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            help="Inputs that share a scale; auto: per layer, the largest of 128, 64, 32, 16, 8 that fits.",
        ),
    ] = "auto",
    backend: Annotated[
        str,
        typer.Option(
            metavar="hqq|torchao",
            help="torchao: int8 with one scale per output.",
            autocompletion=one_of("hqq", "torchao"),
        ),
    ] = "hqq",
    parts: Annotated[str, typer.Option(metavar="LIST", help="What to quantise.")] = "qk,ov,mlp",
    lm_head: Annotated[
        bool, typer.Option("--lm-head", help="Also the head; where it shares the embedding, it stops to.")
    ] = False,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Text for perplexity before and after. (default: none)",
            autocompletion=completed(data_names),
        ),
    ] = None,
    length: Annotated[
        int | None, typer.Option(help="Tokens per window. (default: 2048, or the model's context)")
    ] = None,
    windows: Annotated[int, typer.Option(help="Windows of that text.")] = 8,
    dtype: options.Dtype = None,
    device: options.Device = "cpu",
    json: options.Json = None,
    quiet: options.Quiet = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Hold a model's linear weights in fewer bits, and save it as a folder that loads as it is."""
    from trisect.calibrate.texts import usual_length
    from trisect.commands._screen import keep_measurement, load, quoted, say_next, say_saved
    from trisect.data import load_tokens
    from trisect.models import save_model
    from trisect.quantize import QuantizeConfig
    from trisect.quantize.weights import require
    from trisect.support.files import check_new_folder

    if group_size != "auto" and not (group_size.isascii() and group_size.isdigit()):
        raise TrisectError(f"A group size is a number such as 64, or auto; got {group_size!r}.")
    config = QuantizeConfig(
        bits=bits,
        group_size=None if group_size == "auto" else int(group_size),
        backend=backend,
        parts=tuple(part.strip() for part in parts.split(",")),
        lm_head=lm_head,
    )
    check_new_folder(out)
    require(backend)
    loaded = load(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    tokens = None
    if data is not None:
        length = length or usual_length(loaded.model)
        choice: dict[str, Any] = {"samples": windows, "length": length, "sampling": "first", "seed": 0}
        tokens = load_tokens(data, loaded.tokenizer, split="evaluation", **choice)
    measured = _carry_out(loaded, config, tokens=tokens, quiet=quiet)
    save_model(loaded.model, loaded.tokenizer, out, receipt=measured["receipt"])
    say_saved(out)
    keep_measurement(json, {"model": model, "out": str(out), **measured})
    say_next(f"trisect eval {quoted(out)}", quiet=quiet)


def _carry_out(loaded: "Loaded", config: "QuantizeConfig", *, tokens: Any, quiet: bool) -> dict[str, Any]:
    """Measure, quantise, measure again; the measurement that `--json` writes."""
    from dataclasses import asdict

    from trisect.commands._screen import of_stage, progress
    from trisect.evaluate.perplexity import perplexity
    from trisect.models import fingerprint
    from trisect.quantize import count_bits, quantize_model
    from trisect.support.receipt import build_receipt, read_receipt

    was, before = fingerprint(loaded.model), count_bits(loaded.model)
    measures: list[Perplexity] = []
    with progress(quiet=quiet) as report:

        def measure(stage: str) -> None:
            if tokens is not None:
                measures.append(perplexity(loaded.model, tokens, progress=of_stage(report, stage)))

        measure("perplexity before")
        start = time.perf_counter()
        quantize_model(loaded.model, config, progress=of_stage(report, "quantise"))
        seconds = time.perf_counter() - start
        measure("perplexity after")
    after = count_bits(loaded.model)
    _show(config, (before, after), measures)
    receipt = build_receipt(
        {"model": loaded.name, "fingerprint": was, "quantize": asdict(config)},
        seed=0,
        token_hash=None if tokens is None else tokens.hash,
        timings={"quantise": seconds},
    )
    made = read_receipt(loaded.name)
    found = {"before": before.to_dict(), "after": after.to_dict()}
    if measures:
        found["perplexity"] = {"before": asdict(measures[0]), "after": asdict(measures[1])}
    if made:  # what was there before is kept, inside
        receipt = {**receipt, "source": made.get("source"), "made_from": made}
    return {**found, "receipt": receipt}


def _show(config: "QuantizeConfig", bits: "tuple[Bits, Bits]", measures: "list[Perplexity]") -> None:
    from rich.table import Column, Table

    from trisect.commands._screen import stdout

    title = f"{config.backend}, {config.bits} bits"
    numbers = [Column(name, justify="right") for name in ("before", "after")]
    table = Table("", *numbers, title=title, title_justify="left")
    table.add_row("bits per decoder weight, scales included", *(f"{b.per_weight:.3f}" for b in bits))
    if bits[0].decoder_weights != bits[0].original_decoder_weights:
        table.add_row("the same per weight of the dense model", *(f"{b.per_original_weight:.3f}" for b in bits))
    table.add_row("bits per parameter, embeddings included", *(f"{b.per_parameter:.3f}" for b in bits))
    table.add_row("whole model, MB", *(f"{b.model_bytes / 1e6:.1f}" for b in bits))
    if measures:
        label = f"perplexity on {measures[0].data}"
        table.add_row(label, *(f"{measure.perplexity:.4f}" for measure in measures))
    stdout().print(table)
