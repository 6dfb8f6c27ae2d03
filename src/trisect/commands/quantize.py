"""`trisect quantize`: the linear weights of a dense or compressed model in fewer bits."""

import time
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any

from trisect.commands import _screen as screen
from trisect.commands._options import Json, Length, LoadOptions, Model, OutFolder, option, verb
from trisect.config.verbs import QuantizeConfig


@verb("Recover and shrink further")
def run(
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
    from trisect.models import fingerprint, save_model
    from trisect.quantize import count_bits, quantize_model, weights
    from trisect.support.files import check_disk_space
    from trisect.support.receipt import build_receipt, read_receipt

    weights.require(settings.backend)
    loaded = screen.load(model, loading, own_dtype=True)  # scales and zeros are saved in what weights are loaded in
    room = length or usual_length(loaded.model)
    tokens = None if data is None else evaluation_tokens(data, loaded.tokenizer, windows=windows, length=room)
    was, bits = fingerprint(loaded.model), [count_bits(loaded.model)]
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
    _show(settings, bits, measures)
    recipe = {"model": loaded.name, "fingerprint": was, "quantize": asdict(settings)}
    token_hash = None if tokens is None else tokens.hash
    receipt = build_receipt(recipe, seed=0, token_hash=token_hash, timings={"quantise": seconds})
    made = read_receipt(loaded.name)  # of the model that was quantised: kept inside
    receipt |= {"source": made.get("source"), "made_from": made} if made else {"source_bytes": loaded.num_bytes}
    save_model(loaded.model, loaded.tokenizer, out, receipt=receipt)
    screen.say(f"Saved to {out}")
    found = {"before": bits[0].to_dict(), "after": bits[1].to_dict()}
    if measures:
        found["perplexity"] = {"before": asdict(measures[0]), "after": asdict(measures[1])}
    screen.keep_measurement(json, {"model": model, "out": str(out), **found, "receipt": receipt})
    screen.say_next(f"trisect eval {screen.quoted(out)}")


def _show(config: QuantizeConfig, bits: list[Any], measures: list[Any]) -> None:
    rows = [("bits per decoder weight, scales included", *(f"{b.per_weight:.3f}" for b in bits))]
    if bits[0].decoder_weights != bits[0].original_decoder_weights:
        rows.append(("the same per weight of the dense model", *(f"{b.per_original_weight:.3f}" for b in bits)))
    rows.append(("bits per parameter, embeddings included", *(f"{b.per_parameter:.3f}" for b in bits)))
    rows.append(("whole model, MB", *(f"{b.model_bytes / 1e6:.1f}" for b in bits)))
    if measures:
        rows.append((f"perplexity on {measures[0].data}", *(f"{measure.perplexity:.4f}" for measure in measures)))
    screen.say_table(("",), rows, right=("before", "after"), title=f"{config.backend}, {config.bits} bits")
