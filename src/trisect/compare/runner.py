"""Run a recipe: each cell at most once, compressed, counted and measured; one that fails leaves the others alone."""

import copy
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from trisect.bench.measure import release
from trisect.calibrate import Progress
from trisect.compare.recipe import FORMAT, CalibrationEntry, Cell, ModelEntry, Recipe, allocation, cells_of, hash_of
from trisect.compare.results import Folder
from trisect.config import CompressConfig
from trisect.data import Tokens, evaluation_tokens, load_tokens
from trisect.errors import TrisectError, check_names
from trisect.evaluate import perplexity, tasks
from trisect.methods import get_method
from trisect.models import Loaded, fingerprint, load_model, shape_of, zeros_of
from trisect.pipeline.run import Compressed, compress
from trisect.plan import budget, problem
from trisect.records.shapes import ModelShape
from trisect.support import files, receipt

log = logging.getLogger(__name__)

COPY_LIMIT = 3_000_000_000  # models with more parameters are loaded again for each cell: two of them may not fit


@dataclass
class RunCounts:
    """What a run did with its cells, some by their keys."""

    total: int = 0  # to run
    done: int = 0  # that had a receipt already
    ran: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    elsewhere: int = 0  # that another process is running or has just run


def run_recipe(
    recipe: Recipe,
    folder: Folder,
    *,
    device: str = "cpu",
    only: Sequence[str] = (),
    keep_errors: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> RunCounts:
    """Run every cell that has no receipt yet; with `keep_errors`, not those that failed before either."""
    check_names("method or model of this recipe", only, {word for cell in cells_of(recipe) for word in _words(cell)})
    folder.prepare()
    models = {model.name for model in recipe.models}.intersection(only)
    methods = set(only) - models
    wanted = [
        cell
        for cell in {cell.key: cell for cell in cells_of(recipe)}.values()
        if not models or cell.model.name in models
        # The dense model belongs to every choice of methods: increases are against it.
        if not methods or cell.method is None or not methods.isdisjoint(_words(cell))
    ]
    missing = [cell for cell in wanted if folder.receipt(cell.key, errors=keep_errors) is None]
    counts = RunCounts(total=len(missing), done=len(wanted) - len(missing))
    for model in recipe.models:
        cells = [cell for cell in missing if cell.model == model]
        if cells:
            run = ModelRun(recipe, model, folder=folder, device=device, progress=progress, say=say)
            _run_model(run, cells, counts)
    return counts


def _words(cell: Cell) -> set[str]:
    """What a cell goes by: its model, and its method by name and label."""
    return {cell.model.name} | ({cell.method.name, cell.method.label} if cell.method else set())


def _run_model(run: "ModelRun", cells: Sequence[Cell], counts: RunCounts) -> None:
    try:
        run.say(f"loading {run.model.name}")
        run.loaded  # noqa: B018, a model that cannot be loaded fails all its cells at once
    except Exception as error:
        for cell in cells:
            _fail(run, cell, error, counts)
        return
    for cell in cells:
        with run.folder.claimed(cell.key) as mine:
            if not mine or run.folder.receipt(cell.key) is not None:
                counts.elsewhere += 1
                continue
            number = len(counts.ran) + len(counts.failed) + 1
            run.say(f"cell {number} of {counts.total}: {cell.describe()}")
            try:
                files.write_json(run.folder.receipt_path(cell.key), run.run(cell))
                counts.ran.append(cell.key)
            except Exception as error:  # whatever it is, the other cells are worth having
                _fail(run, cell, error, counts)
        release()


def _fail(run: "ModelRun", cell: Cell, error: Exception, counts: RunCounts) -> None:
    message = explain(error, run.recipe)
    if not isinstance(error, TrisectError):
        log.warning("an error that is not the recipe's fault:", exc_info=error)
    run.say(f"failed: {cell.describe()}: {message}")
    config = {} if cell.config is None else cell.config.to_dict()
    made = receipt.build_receipt(config, seed=0, token_hash=None, timings={})
    about = {"model": cell.model.source, "method": cell.label, "error": message}
    files.write_json(run.folder.receipt_path(cell.key), {**about, "receipt": made})
    counts.failed.append(cell.key)


def explain(error: Exception, recipe: Recipe) -> str:
    """An error on one line that names no machine: assets as the recipe has them, other paths from here."""
    kind = "" if isinstance(error, TrisectError) else f"{type(error).__name__}: "
    text, here = " ".join(f"{kind}{error}".split()), Path.cwd()
    written, place = recipe.assets or ("", "/")
    names = {place: written, str(here): ".", str(here.parent): "..", str(Path.home()): "~"}
    for path, name in names.items():
        if path != "/":
            text = text.replace(path, name)
    return text[:500]


@dataclass
class ModelRun:
    """One model of a recipe, with what its cells share: weights and tokens, made when needed."""

    recipe: Recipe
    model: ModelEntry
    folder: Folder
    device: str = "cpu"
    progress: Progress | None = None
    say: Callable[[str], None] = lambda text: None
    _tokens: dict[str, Tokens] = field(default_factory=dict)
    _loaded: Loaded | None = None

    def run(self, cell: Cell) -> dict[str, Any]:
        """The receipt of one cell."""
        dense, texts, tokenizer = self.dense, self.texts, self.loaded.tokenizer
        weights = {"source": self.model.source, "dtype": self.model.dtype, "fingerprint": self.fingerprint}
        if cell.config is None or cell.calibration is None:
            model, made = self.loaded.model, receipt.build_receipt({}, seed=0, token_hash=None, timings={})
            body: dict[str, Any] = {"method": "dense", "counts": dense.counts}
        else:
            result = self._compressed(cell.config, cell.calibration)
            model, made = result.model, result.receipt
            body = compressed_receipt(cell.config, dense, result)
        # The losses of every layer are too long to keep for every cell.
        kept = {name: value for name, value in made.items() if name not in ("recipe", "losses")}
        report = None if self.progress is None else partial(self.progress, "perplexity")
        body["perplexity"] = [asdict(perplexity.perplexity(model, tokens, progress=report)) for tokens in texts]
        if cell.tasks is not None:
            asked = tasks.parse_tasks(cell.tasks.names, shots=cell.tasks.shots)
            how: Any = {"limit": cell.tasks.limit, "progress": self.progress}
            body["tasks"] = tasks.evaluate_tasks(model, tokenizer, asked, **how).to_dict()
        return {"format": FORMAT, "model": weights, **body, "receipt": kept}

    @property
    def loaded(self) -> Loaded:
        """The dense model; after a large one was compressed, it is loaded again."""
        if self._loaded is None:
            source = self.recipe.located(self.model.source)
            self._loaded = load_model(source, dtype=self.model.dtype, device=self.device)
        return self._loaded

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.loaded.model)

    @cached_property
    def dense(self) -> "Size":
        return Size(shape_of(self.loaded.model), zeros_of(self.loaded.model))

    @cached_property
    def texts(self) -> list[Tokens]:
        """The windows of every evaluation text, named as in the recipe: its place here does not matter."""
        found = []
        for text in self.model.evaluations:
            cut: Any = {"windows": text.windows, "length": text.length}
            tokens = evaluation_tokens(self.recipe.located(text.data), self.loaded.tokenizer, **cut)
            found.append(replace(tokens, source=text.data))
        return found

    def tokens(self, calibration: CalibrationEntry) -> Tokens:
        """The windows of a calibration set, tokenized once."""
        if calibration.name not in self._tokens:
            config = calibration.config
            settings: Any = {name: getattr(config, name) for name in ("samples", "length", "sampling", "seed")}
            source = self.recipe.located(str(config.source))
            self._tokens[calibration.name] = load_tokens(source, self.loaded.tokenizer, **settings)
        return self._tokens[calibration.name]

    def curves_path(self, config: CompressConfig, calibration: CalibrationEntry) -> Path | None:
        """Where a method's loss curves are kept: the same for every ratio and alignment."""
        if allocation(config) == "uniform" or get_method(config.method).linear:
            return None
        made_of = [self.fingerprint, self.tokens(calibration).hash, config.method, config.seed]
        return self.folder.cache / f"curves-{hash_of(made_of)}.json"

    def _compressed(self, config: CompressConfig, calibration: CalibrationEntry) -> Compressed:
        curves = self.curves_path(config, calibration)
        settings: Any = {"tokenizer": self.loaded.tokenizer, "tokens": self.tokens(calibration), "curves": curves}
        # One process measures curves that many cells share, while the others wait for it.
        with nullcontext() if curves is None or curves.exists() else files.locked(curves.with_suffix(".lock")):
            model = self.loaded.model
            if self.dense.cost.parameters <= COPY_LIMIT:
                model = copy.deepcopy(model)
            else:
                self._loaded = None
            return compress(model, config, progress=self.progress, **settings)


class Size(NamedTuple):
    """A model's shape and its cost."""

    shape: ModelShape
    zeros: int  # weights that are exactly zero: what a mask takes without making anything smaller

    @property
    def cost(self) -> budget.Budget:
        return budget.budget_of(self.shape)

    @property
    def counts(self) -> dict[str, int]:
        """As receipts have them."""
        cost = self.cost
        counts = {"weights": cost.linear_parameters, "zeros": self.zeros, "parameters": cost.parameters}
        return counts | {"kv_bytes_per_token": cost.kv_bytes_per_token}


def compressed_receipt(config: CompressConfig, dense: Size, result: Compressed) -> dict[str, Any]:
    """What went and what it cost, as the solvers predicted it."""
    after, losses = Size(shape_of(result.model), zeros_of(result.model)), result.losses
    sums: dict[str, dict[str, float]] = {}
    for entry in losses:
        total = sums.setdefault(entry["component"], {"loss": 0.0, "total": 0.0})
        total["loss"] += entry["loss"]
        total["total"] += entry["total"]
    said = [f"{entry['component']}: {entry['note']}" for entry in losses if entry["note"]]
    kinds = [text for text in dict.fromkeys(said) if not text.endswith(": full width")]
    return {
        "method": config.method,
        "config": {**config.to_dict(), "allocate": allocation(config)},
        "counts": after.counts,
        "removed": removed_shares(dense, after, config),
        "losses": sums,
        "notes": [f"{text} ({said.count(text)} layers)" for text in kinds[:8]],
    }


def removed_shares(before: Size, after: Size, config: CompressConfig) -> dict[str, Any]:
    """Shares that were removed; `chosen`, of weights or of KV, is the one to compare with the ratio."""
    asked, weights = problem.problem_for(before.shape, config), chosen_weights(before.shape, config)
    linear, cached = (budget.Costs(shape=before.shape, unit=unit) for unit in ("linear", "kv"))
    old, new = before.cost, after.cost
    change, gone = budget.compare(old, new), old.linear_parameters - new.linear_parameters
    zeroed = 0 if gone else max(0, after.zeros - before.zeros)  # a mask's; a solver's few are in a narrower matrix
    of, chosen = "weights", (gone + zeroed) / weights
    if getattr(get_method(config.method), "cached", False) or config.goal.budget == "kv":
        lost = old.kv_bytes_per_token - new.kv_bytes_per_token
        of, chosen = "KV", lost / max(1, sum(cached.full(*key) for key in asked.keys))
    step = sum(linear.of(*key, asked.grid(key).step) for key in asked.keys)
    return {
        "of": of,
        "chosen": chosen,
        "step": step / sum(linear.full(*key) for key in asked.keys),
        "zeros": zeroed / weights,
        "decoder": change.ratio,
        "parameters": change.parameters,
        "kv_bytes_per_token": change.kv_bytes_per_token,
        "flops": change.flops,
    }


def chosen_weights(shape: ModelShape, config: CompressConfig) -> int:
    """Weights of the dense model that the config lets its method remove from."""
    solvers = get_method(config.method).solvers
    chosen = [(shape.layers[layer], part) for layer, part in problem.problem_for(shape, config).keys]
    maps = [(layer, part, name) for layer, part in chosen for name in budget.linears_of(layer, part)]
    return sum(budget.linear_parameters(layer, name) for layer, part, name in maps if {part, name} & set(solvers))
