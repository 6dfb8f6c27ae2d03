"""`trisect compare`: run a recipe of models, methods and ratios, and make its table."""

from pathlib import Path
from typing import Annotated, Any

import typer

from trisect.commands import _screen as screen
from trisect.commands._options import Device, Json, argument, option, verb

RECIPE = """# A recipe of `trisect compare`: every method at every ratio on every model, in one table.
# Run it with: trisect compare {name}
# All keys: docs/comparison.md. What has a receipt is not run again, so lines may be added later.
name: my-comparison
models:
  - smollm2-135m # a folder, a hub id, a GGUF file, or a name from `trisect ls models`
methods: [a3, a3+, svd-llm] # `trisect ls methods`
ratios: [0.25]
align: none # exact ranks, so that all methods remove the same share
calibration: {{source: builtin, samples: 12, length: 512}} # a text file, or `trisect ls data`
evaluation:
  - {{data: builtin, length: 512, windows: 8}}
"""


@verb("Measure")
def run(
    recipe: Annotated[Path, argument("YAML; see docs/comparison.md.", "RECIPE")],
    out: Annotated[Path | None, option("Folder of results. (default: ../results/NAME)", "DIR")] = None,
    only: Annotated[list[str] | None, option("Run this method or model only; may be repeated.", "NAME")] = None,
    keep_errors: Annotated[bool, option("Do not try cells again that failed before.")] = False,
    no_run: Annotated[bool, option("Run nothing: table and figures from the receipts there are.")] = False,
    no_figures: Annotated[bool, option("Table and CSV only.")] = False,
    dry_run: Annotated[bool, option("Check the recipe and list its cells.")] = False,
    device: Device = "cpu",
    json: Json = None,
) -> None:
    """Run every cell of a recipe that has no receipt yet, and write one table and figures.

    A recipe to start from: trisect init compare -o recipe.yaml
    What a recipe would run: trisect compare experiments/recipes/main-stories15m.yaml --dry-run
    Run what is missing, on a GPU: trisect compare recipe.yaml -o results --device cuda
    """
    from trisect.compare import Folder, load_recipe, results, run_recipe, runner

    loaded, chosen = load_recipe(recipe), only or ()
    runner.check_only(loaded, chosen)
    beside = recipe.parent.parent / "results" / loaded.name if recipe.parent.name == "recipes" else Path(loaded.name)
    folder = Folder(path=out or beside)
    if dry_run:
        _show_cells(loaded, folder)
        return
    counts = None
    if not no_run:
        how: dict[str, Any] = {"device": device, "only": chosen, "keep_errors": keep_errors}
        with screen.quiet_libraries(), screen.progress() as report:
            counts = run_recipe(loaded, folder, **how, progress=report, say=screen.stderr().print)
    written = results.write_results(loaded, folder, recipe, figures=not no_figures)
    models = results.outcomes_of(loaded, folder)
    failed = sum(outcome.error is not None for model in models for outcome in model.outcomes)
    done = {} if counts is None else {"ran": len(counts.ran), "done": counts.done}
    if counts is not None:
        elsewhere = f", {counts.elsewhere} run by other processes" if counts.elsewhere else ""
        before = f"{counts.done} done before, {failed} failed{elsewhere}"
        screen.say(f"{loaded.name}: {len(counts.ran)} cells run, {before}")
    table = folder.path / "table.md"
    screen.say(table.read_text(encoding="utf-8").strip(), f"Table: {table}" + ("" if written else " (unchanged)"))
    rows = list(results.measurements(models))
    screen.keep_measurement(json, {"recipe": loaded.name, **done, "failed": failed, "measurements": rows})
    if failed:
        screen.say_next("the same command tries the failed cells again (--keep-errors leaves them)")
        raise typer.Exit(code=1)


def _show_cells(recipe: Any, folder: Any) -> None:
    """Print the cells of a recipe, and which of them are done."""
    from trisect.compare.recipe import cells_of

    rows = []
    for cell in cells_of(recipe):
        record = folder.record(cell.key)
        ratio, text = (f"{cell.ratio:g}", cell.calibration.name) if cell.calibration else ("", "")
        state = "to run" if record is None else "failed before" if "error" in record else "done"
        rows.append((cell.model.name, cell.label, ratio, text, state))
    waiting = sum(state != "done" for *_, state in rows)
    screen.say_table(("model", "method", "ratio", "calibration", "state"), rows)
    screen.say(f"{recipe.name}: {len(rows)} cells, {waiting} to run; nothing was run.")
