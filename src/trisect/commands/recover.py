"""Recover and shrink further: `trisect finetune` tunes with adapters, `quantize` holds weights in fewer bits."""

import time
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from trisect import models
from trisect.commands import _screen as screen
from trisect.commands._options import Json, Length, LoadOptions, Model, OutFolder, option, verb
from trisect.config.verbs import QuantizeConfig, TuneConfig
from trisect.errors import TrisectError
from trisect.support.files import check_disk_space
from trisect.support.receipt import build_receipt, read_receipt


@verb("Recover and shrink further")
def finetune(
    model: Model,
    data: Annotated[str, option("Alpaca-style .json or .jsonl, or any text `eval` reads.", "NAME|FILE")],
    out: OutFolder,
    settings: TuneConfig,
    loading: LoadOptions,
    save_every: Annotated[int, option("Steps between two savings of the run's state.", min=1)] = 20,
    fresh: Annotated[bool, option("Start anew where a run was interrupted.")] = False,
    eval_data: Annotated[list[str] | None, option("Held-out texts, measured before and after.", "NAME|FILE")] = None,
    eval_length: Annotated[int, option("Tokens per held-out window.")] = 1024,
    eval_windows: Annotated[int, option("Held-out windows of each text.")] = 16,
    json: Json = None,
) -> None:
    """Tune a model with LoRA on instructions or text, and save it as the same kind of folder.

    Tune on instructions: trisect finetune small --data alpaca.json -o tuned
    On plain text, with held-out text measured before and after:
        trisect finetune small --data train.txt -o tuned --eval-data held_out.txt --device cuda
    Anew, where Ctrl-C left something: trisect finetune small --data alpaca.json -o tuned --fresh
    """
    if find_spec("peft") is None:
        raise TrisectError("Tuning needs peft: pip install 'trisect[finetune]'.")
    from trisect.finetune import load_examples, training
    from trisect.support.distributed import unfinished

    receipt, loaded = read_receipt(model), screen.load(model, loading)
    check_disk_space(out, loaded.num_bytes or 0)
    examples = load_examples(data, loaded.tokenizer, length=settings.length, loss=settings.loss)
    cut: dict[str, Any] = {"length": eval_length, "windows": eval_windows, "loss": settings.loss, "tuned_on": data}
    held_out = [training.load_held_out(source, loaded.tokenizer, **cut) for source in eval_data or []]
    with unfinished(out, fresh=fresh, pieces=training.COMPLETE) as state, screen.progress() as report:
        tuning: dict[str, Any] = {"state": state, "save_every": save_every, "progress": partial(report, "tuning")}

        def measured(when: str) -> list[dict[str, Any]]:
            stages = [partial(report, f"{when}: {Path(part.source).name}") for part in held_out]
            return [training.measure(loaded.model, part, progress=s) for part, s in zip(held_out, stages, strict=True)]

        before = measured("before")
        tuned = training.finetune(loaded.model, examples, settings, **tuning)
        changes = [{"before": was, "after": now} for was, now in zip(before, measured("after"), strict=True)]
        entry = {**tuned, "model": loaded.name, "held_out": changes}
        receipt["tuning"] = [*receipt.get("tuning", []), entry]  # a model may be tuned more than once
        models.save_model(loaded.model, loaded.tokenizer, out, receipt=receipt)
    _show_tuning(tuned, examples, changes)
    screen.say(f"Saved to {out}")
    screen.keep_measurement(json, {"out": str(out), **entry})
    screen.say_next(f"trisect eval {screen.quoted(out)}", f"trisect export {screen.quoted(out)} -o OUT")


def _show_tuning(tuned: dict[str, Any], examples: Any, held_out: list[dict[str, Any]]) -> None:
    """What happened to the data, and the held-out table."""
    seen, losses = tuned["seen"], tuned["losses"]
    screen.say(
        f"{tuned['steps']} steps on {seen['examples']} of {len(examples.items)} examples of {examples.source} "
        f"({seen['tokens']:,} learned tokens, as often as seen); loss {losses[0]:.4f} at the first, "
        f"{losses[-1]:.4f} at the last."
    )
    if examples.cut or examples.left_out:
        left_out = f"{examples.left_out} had no response left and were left out."
        screen.say(f"{examples.cut} examples were cut to the length, {left_out}")
    rows = []
    for entry in held_out:
        was, now = entry["before"]["perplexity"], entry["after"]["perplexity"]
        rows.append((entry["before"]["data"], f"{was:.4f}", f"{now:.4f}", f"{now / was - 1:+.1%}"))
    screen.say_table(("held out",), rows, right=("before", "after", "change"))


@verb("Recover and shrink further")
def quantize(
    model: Model,
    out: OutFolder,
    settings: QuantizeConfig,
    loading: LoadOptions,
    data: Annotated[str | None, option("Text for perplexity before and after. (default: none)", "NAME|FILE")] = None,
    length: Length = None,
    windows: Annotated[int, option("Windows of that text.")] = 8,
    json: Json = None,
) -> None:
    """Hold a model's linear weights in fewer bits, and save it as a folder that loads as it is.

    Four bits per weight: trisect quantize small -o small-4bit
    Three bits, with perplexity before and after: trisect quantize small -o small-3bit --bits 3 --data builtin
    Eight bits with torchao's kernels: trisect quantize small -o small-8bit --bits 8 --backend torchao
    """
    from trisect.calibrate.texts import usual_length
    from trisect.data import evaluation_tokens
    from trisect.evaluate.perplexity import perplexity
    from trisect.quantize import count_bits, quantize_model, require

    require(settings.backend)
    loaded = screen.load(model, loading, own_dtype=True)  # scales and zeros are saved in what weights are loaded in
    room = usual_length(loaded.model) if length is None else length
    tokens = None if data is None else evaluation_tokens(data, loaded.tokenizer, windows=windows, length=room)
    was, bits = models.fingerprint(loaded.model), [count_bits(loaded.model)]
    # Without scales and zeros, which are not known yet: saving counts them too.
    saved = bits[0].decoder_bytes - bits[0].decoder_weights * settings.bits // 8
    check_disk_space(out, bits[0].model_bytes - saved)
    with screen.progress() as report:

        def measured(when: str) -> list[Any]:
            stage = partial(report, f"perplexity {when}")
            return [] if tokens is None else [perplexity(loaded.model, tokens, progress=stage)]

        measures, start = measured("before"), time.perf_counter()
        quantize_model(loaded.model, settings, progress=partial(report, "quantise"))
        seconds = time.perf_counter() - start
        measures += measured("after")
    # Per parameter of the model that came: a head that no longer shares the embedding would count twice.
    bits.append(replace(count_bits(loaded.model), parameters=bits[0].parameters))
    _show_bits(settings, bits, measures)
    recipe = {"model": loaded.name, "fingerprint": was, "quantize": asdict(settings)}
    token_hash = None if tokens is None else tokens.hash
    receipt = build_receipt(recipe, seed=0, token_hash=token_hash, timings={"quantise": seconds})
    made = read_receipt(loaded.name)  # of the model that was quantised: kept inside
    receipt |= {"source": made.get("source"), "made_from": made} if made else {"source_bytes": loaded.num_bytes}
    models.save_model(loaded.model, loaded.tokenizer, out, receipt=receipt)
    screen.say(f"Saved to {out}")
    found = {"before": bits[0].to_dict(), "after": bits[1].to_dict()}
    if measures:
        found["perplexity"] = {"before": asdict(measures[0]), "after": asdict(measures[1])}
    screen.keep_measurement(json, {"model": model, "out": str(out), **found, "receipt": receipt})
    screen.say_next(f"trisect eval {screen.quoted(out)}")


def _show_bits(config: QuantizeConfig, bits: list[Any], measures: list[Any]) -> None:
    rows = [("bits per decoder weight, scales included", *(f"{b.per_weight:.3f}" for b in bits))]
    if bits[0].decoder_weights != bits[0].original_decoder_weights:
        rows.append(("the same per weight of the dense model", *(f"{b.per_original_weight:.3f}" for b in bits)))
    rows.append(("bits per parameter, embeddings included", *(f"{b.per_parameter:.3f}" for b in bits)))
    rows.append(("whole model, MB", *(f"{b.model_bytes / 1e6:.1f}" for b in bits)))
    if measures:
        rows.append((f"perplexity on {measures[0].data}", *(f"{measure.perplexity:.4f}" for measure in measures)))
    screen.say_table(("",), rows, right=("before", "after"), title=f"{config.backend}, {config.bits} bits")
