"""`trisect compare`: run a recipe of models, methods and ratios, and make its table."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trisect.commands import _options as options

if TYPE_CHECKING:
    from trisect.compare import Folder, Recipe, RunCounts

PANEL = "Measure"
EXAMPLES = (
    ("What a recipe would run", "trisect compare experiments/recipes/main-stories15m.yaml --dry-run"),
    ("Run what is missing, on a GPU", "trisect compare recipe.yaml -o results --device cuda"),
    ("Only the table, from the receipts there are", "trisect compare recipe.yaml -o results --no-run"),
)
FAILED_CELLS = 1


def run(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML; see docs/comparison.md.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Folder of results. (default: ../results/NAME)")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Run this method or model only; may be repeated.")
    ] = None,
    keep_errors: Annotated[
        bool, typer.Option("--keep-errors", help="Do not try cells again that failed before.")
    ] = False,
    no_run: Annotated[
        bool, typer.Option("--no-run", help="Run nothing: table and figures from the receipts there are.")
    ] = False,
    no_figures: Annotated[bool, typer.Option("--no-figures", help="Table and CSV only.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the recipe and list its cells.")] = False,
    device: options.Device = "cpu",
    json: options.Json = None,
    quiet: options.Quiet = False,
) -> None:
    """Run every cell of a recipe that has no receipt yet, and write one table and figures."""
    from trisect.commands._screen import progress, quiet_libraries, stderr
    from trisect.compare import Folder, load_recipe, run_recipe
    from trisect.compare.runner import check_only

    loaded = load_recipe(recipe)
    check_only(loaded, only or ())
    folder = Folder(path=out or default_folder(recipe, loaded.name))
    if dry_run:
        show_cells(loaded, folder)
        return
    counts = None
    if not no_run:
        console = stderr(quiet=quiet)
        with quiet_libraries(), progress(quiet=quiet) as report:
            counts = run_recipe(
                loaded,
                folder,
                device=device,
                only=only or (),
                keep_errors=keep_errors,
                progress=report,
                say=console.print,
            )
    finish(loaded, folder, recipe, counts, figures=not no_figures, json=json, quiet=quiet)


def default_folder(recipe: Path, name: str) -> Path:
    """Beside the folder of recipes, or here."""
    return recipe.parent.parent / "results" / name if recipe.parent.name == "recipes" else Path(name)


def finish(
    recipe: "Recipe",
    folder: "Folder",
    source: Path,
    counts: "RunCounts | None",
    *,
    figures: bool,
    json: Path | None,
    quiet: bool,
) -> None:
    """Write table and figures, print what was done, and end with code 1 if a cell failed."""
    from trisect.commands._screen import keep_measurement, say_next, stdout
    from trisect.compare import write_results
    from trisect.compare.outcomes import measurements, outcomes_of

    console = stdout()
    written = write_results(recipe, folder, source, figures=figures)
    models = outcomes_of(recipe, folder)
    failed = sum(outcome.error is not None for model in models for outcome in model.outcomes)
    done = {} if counts is None else {"ran": len(counts.ran), "done": counts.done}
    if counts is not None:
        console.print(
            f"{recipe.name}: {done['ran']} cells run, {done['done']} done before, {failed} failed"
            + (f", {counts.elsewhere} run by other processes" if counts.elsewhere else ""),
            markup=False,
        )
    place = folder.path / "table.md"
    console.print(f"Table: {place}" + ("" if written else " (unchanged)"), soft_wrap=True, markup=False)
    rows = list(measurements(models))
    keep_measurement(json, {"recipe": recipe.name, **done, "failed": failed, "measurements": rows})
    if failed:
        say_next("the same command tries the failed cells again (--keep-errors leaves them)", quiet=quiet)
        raise typer.Exit(code=FAILED_CELLS)


def show_cells(recipe: "Recipe", folder: "Folder") -> None:
    """The cells of a recipe, and what is not at hand for them."""
    from rich.table import Table

    from trisect.commands._screen import quiet_libraries, stdout
    from trisect.compare.runner import dry_run

    with quiet_libraries():
        cells, remarks = dry_run(recipe, folder)
    table = Table("model", "method", "ratio", "calibration", "removes", "state")
    for entry in cells:
        cell = entry.cell
        table.add_row(
            cell.model.name,
            cell.label,
            f"{cell.ratio:g}" if cell.config else "",
            cell.calibration.name if cell.calibration else "",
            "" if entry.removed is None else f"{entry.removed:.1%}",
            f"would fail: {entry.problem}" if entry.problem else entry.state,
        )
    console = stdout()
    console.print(table)
    for remark in remarks:
        console.print(remark, soft_wrap=True, markup=False)
    waiting = sum(entry.state != "done" for entry in cells)
    console.print(f"{recipe.name}: {len(cells)} cells, {waiting} to run; nothing was run.", markup=False)
