"""`trisect finetune`: recover quality by tuning a compressed model, adapters merged into its weights."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trisect.commands import _options as options
from trisect.commands._names import completed, data_names, one_of
from trisect.errors import TrisectError

PANEL = "Recover and shrink further"
EXAMPLES = (
    ("Tune on instructions", "trisect finetune small --data alpaca.json -o tuned"),
    (
        "On plain text, with held-out text measured before and after",
        "trisect finetune small --data train.txt -o tuned --eval-data held_out.txt --device cuda",
    ),
    ("Go on after Ctrl-C", "trisect finetune small --data alpaca.json -o tuned --resume"),
)

if TYPE_CHECKING:
    from trisect.commands._screen import Report
    from trisect.finetune import Examples, TuneConfig, Tuned
    from trisect.finetune.training import HeldOut
    from trisect.models import Loaded


def run(
    model: options.Model,
    data: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help="Alpaca-style .json or .jsonl, or any text `eval` reads.",
            autocompletion=completed(data_names),
        ),
    ],
    out: options.OutFolder,
    rank: Annotated[int, typer.Option(help="Rank of the adapters.")] = 8,
    alpha: Annotated[int, typer.Option(help="Adapters count alpha / rank times.")] = 16,
    targets: Annotated[
        str | None, typer.Option(metavar="LIST", help="E.g. q,v of q,k,v,o,gate,up,down. (default: all)")
    ] = None,
    epochs: Annotated[int, typer.Option(help="Times that every example is seen.")] = 2,
    max_steps: Annotated[int | None, typer.Option(help="Stop after so many steps.")] = None,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = 2e-4,
    batch_size: Annotated[int, typer.Option(help="Examples per forward pass.")] = 4,
    accumulate: Annotated[int, typer.Option(help="Forward passes per step.")] = 4,
    length: Annotated[int, typer.Option(help="Tokens of an example, or of a window of text.")] = 512,
    loss: Annotated[
        str,
        typer.Option(
            metavar="response|all",
            help="What is learned of instruction data.",
            autocompletion=one_of("response", "all"),
        ),
    ] = "response",
    seed: Annotated[int, typer.Option(help="Seed of adapters and order.")] = 0,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Less memory, a third more time.")
    ] = False,
    save_every: Annotated[int, typer.Option(help="Steps between two savings of the run's state.")] = 50,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run of the same -o.")] = False,
    eval_data: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|FILE", help="Held-out text or instructions, measured before and after."),
    ] = None,
    eval_length: Annotated[int, typer.Option(help="Tokens per held-out window.")] = 1024,
    eval_windows: Annotated[int, typer.Option(help="Held-out windows of each text.")] = 16,
    dtype: options.Dtype = None,
    device: options.Device = "cpu",
    json: options.Json = None,
    quiet: options.Quiet = False,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Tune a model with LoRA on instructions or text, and save it as the same kind of folder."""
    _need_peft()
    from trisect.commands._screen import load
    from trisect.finetune import TuneConfig, load_examples
    from trisect.finetune.training import load_held_out
    from trisect.support.receipt import read_receipt

    config = TuneConfig(
        rank=rank,
        alpha=alpha,
        targets=None if targets is None else tuple(name.strip() for name in targets.split(",")),
        epochs=epochs,
        max_steps=max_steps,
        lr=lr,
        batch_size=batch_size,
        accumulate=accumulate,
        length=length,
        loss=loss,
        seed=seed,
        gradient_checkpointing=gradient_checkpointing,
    )
    state = _checked_state(out, resume=resume, save_every=save_every)
    receipt = read_receipt(model)
    loaded = load(model, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    examples = load_examples(data, loaded.tokenizer, length=length, loss=loss)
    cut: dict[str, Any] = {"length": eval_length, "windows": eval_windows, "loss": loss, "tuned_on": data}
    held_out = [load_held_out(source, loaded.tokenizer, **cut) for source in eval_data or []]
    tuning: dict[str, Any] = {"state": state, "save_every": save_every, "resume": resume}
    _carry_out(loaded, examples, config, held_out, tuning=tuning, out=out, receipt=receipt, json=json, quiet=quiet)


def _carry_out(
    loaded: "Loaded",
    examples: "Examples",
    config: "TuneConfig",
    held_out: "list[HeldOut]",
    *,
    tuning: dict[str, Any],
    out: Path,
    receipt: dict[str, Any],
    json: Path | None,
    quiet: bool,
) -> None:
    """Measure, tune, measure, save; the state goes when the folder is there."""
    from trisect.commands._screen import keep_measurement, of_stage, progress, quoted, say_next, say_saved
    from trisect.finetune import Stopped, finetune
    from trisect.finetune.training import extended, save_tuned

    try:
        with progress(quiet=quiet) as report:
            before = _measure(loaded.model, held_out, report, "before")
            tuned = finetune(loaded.model, examples, config, progress=of_stage(report, "tuning"), **tuning)
            after = _measure(loaded.model, held_out, report, "after")
    except Stopped as stopped:
        raise KeyboardInterrupt(
            f"Stopped after step {stopped.step} of {stopped.total}; the run is in {stopped.state}. Give the "
            "same command with --resume to go on."
        ) from stopped
    measured = [{"before": was, "after": now} for was, now in zip(before, after, strict=True)]
    entry = {**tuned.receipt, "model": loaded.name, "held_out": measured}
    save_tuned(tuned, loaded.tokenizer, out, receipt=extended(receipt, entry))
    tuning["state"].unlink(missing_ok=True)
    _show(tuned, examples, measured)
    say_saved(out)
    keep_measurement(json, {"out": str(out), **entry})
    say_next(f"trisect eval {quoted(out)}", f"trisect export {quoted(out)} -o OUT", quiet=quiet)


def _measure(model: Any, held_out: "list[HeldOut]", report: "Report", when: str) -> list[dict[str, Any]]:
    from trisect.commands._screen import of_stage
    from trisect.finetune.training import measure

    return [measure(model, part, progress=of_stage(report, f"{when}: {Path(part.source).name}")) for part in held_out]


def _need_peft() -> None:
    try:
        import peft  # noqa: F401
    except ImportError as error:
        raise TrisectError("Tuning needs peft: pip install 'trisect[finetune]'.") from error


def _checked_state(out: Path, *, resume: bool, save_every: int) -> Path:
    """The file of the run's state; everything about outputs that can be refused is refused here."""
    from trisect.finetune.training import state_path
    from trisect.support.files import check_new_folder

    if save_every < 1:
        raise TrisectError(f"--save-every must be 1 or more, not {save_every}.")
    check_new_folder(out)
    state = state_path(out)
    if resume and not state.is_file():
        raise TrisectError(f"There is nothing to resume: no {state}; leave --resume out to start.")
    if state.exists() and not resume:
        raise TrisectError(
            f"{state} is there from a run that was interrupted: add --resume to go on with it, or remove it."
        )
    return state


def _show(tuned: "Tuned", examples: "Examples", held_out: list[dict[str, Any]]) -> None:
    """The held-out table, and what happened to the data."""
    from rich.table import Column, Table

    from trisect.commands._screen import stdout

    console = stdout()
    steps = tuned.receipt["steps"]
    console.print(
        f"{steps} steps on {len(examples.items)} examples of {examples.source} "
        f"({examples.learned} learned tokens); loss {tuned.losses[0]:.4f} at the first, "
        f"{tuned.losses[-1]:.4f} at the last.",
        soft_wrap=True,
        markup=False,
    )
    if examples.cut or examples.left_out:
        console.print(
            f"{examples.cut} examples were cut to the length, {examples.left_out} had no response left "
            "and were left out."
        )
    if held_out:
        table = Table("held out", *(Column(name, justify="right") for name in ("before", "after", "change")))
        for entry in held_out:
            was, now = entry["before"]["perplexity"], entry["after"]["perplexity"]
            table.add_row(entry["before"]["data"], f"{was:.4f}", f"{now:.4f}", f"{now / was - 1:+.1%}")
        console.print(table)
