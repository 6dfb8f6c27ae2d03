"""`trisect finetune`: recover quality by tuning a compressed model, adapters merged into its weights."""

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from trisect.commands import _screen as screen
from trisect.commands._options import Json, LoadOptions, Model, OutFolder, option, verb
from trisect.config.verbs import TuneConfig
from trisect.errors import TrisectError


@verb("Recover and shrink further")
def run(
    model: Model,
    data: Annotated[str, option("Alpaca-style .json or .jsonl, or any text `eval` reads.", "NAME|FILE")],
    out: OutFolder,
    settings: TuneConfig,
    loading: LoadOptions,
    save_every: Annotated[int, option("Steps between two savings of the run's state.", min=1)] = 50,
    fresh: Annotated[bool, option("Start anew where a run was interrupted.")] = False,
    eval_data: Annotated[
        list[str] | None, option("Held-out text or instructions, measured before and after.", "NAME|FILE")
    ] = None,
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
    from trisect.finetune import finetune, load_examples, training
    from trisect.support.files import check_disk_space
    from trisect.support.receipt import read_receipt

    state, receipt = training.state_path(out), read_receipt(model)
    if fresh:
        state.unlink(missing_ok=True)
    loaded = screen.load(model, loading)
    check_disk_space(out, loaded.num_bytes or 0)
    examples = load_examples(data, loaded.tokenizer, length=settings.length, loss=settings.loss)
    cut: dict[str, Any] = {"length": eval_length, "windows": eval_windows, "loss": settings.loss, "tuned_on": data}
    held_out = [training.load_held_out(source, loaded.tokenizer, **cut) for source in eval_data or []]
    tuning: dict[str, Any] = {"state": state, "save_every": save_every}
    with screen.progress() as report:

        def measured(when: str) -> list[dict[str, Any]]:
            stages = [partial(report, f"{when}: {Path(part.source).name}") for part in held_out]
            return [training.measure(loaded.model, part, progress=s) for part, s in zip(held_out, stages, strict=True)]

        before = measured("before")
        tuned = finetune(loaded.model, examples, settings, progress=partial(report, "tuning"), **tuning)
        changes = [{"before": was, "after": now} for was, now in zip(before, measured("after"), strict=True)]
    entry = {**tuned.receipt, "model": loaded.name, "held_out": changes}
    training.save_tuned(tuned, loaded.tokenizer, out, receipt=training.extended(receipt, entry))
    state.unlink(missing_ok=True)
    _show(tuned, examples, changes)
    screen.say(f"Saved to {out}")
    screen.keep_measurement(json, {"out": str(out), **entry})
    screen.say_next(f"trisect eval {screen.quoted(out)}", f"trisect export {screen.quoted(out)} -o OUT")


def _show(tuned: Any, examples: Any, held_out: list[dict[str, Any]]) -> None:
    """What happened to the data, and the held-out table."""
    receipt, seen = tuned.receipt, tuned.receipt["seen"]
    screen.say(
        f"{receipt['steps']} steps on {seen['examples']} of {len(examples.items)} examples of {examples.source} "
        f"({seen['tokens']:,} learned tokens, as often as seen); loss {tuned.losses[0]:.4f} at the first, "
        f"{tuned.losses[-1]:.4f} at the last."
    )
    if examples.cut or examples.left_out:
        left_out = f"{examples.left_out} had no response left and were left out."
        screen.say(f"{examples.cut} examples were cut to the length, {left_out}")
    rows = []
    for entry in held_out:
        was, now = entry["before"]["perplexity"], entry["after"]["perplexity"]
        rows.append((entry["before"]["data"], f"{was:.4f}", f"{now:.4f}", f"{now / was - 1:+.1%}"))
    screen.say_table(("held out",), rows, right=("before", "after", "change"))
