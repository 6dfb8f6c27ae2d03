"""A model on the bench: loaded once, with its tokens and moments, each made once and when first needed."""

import copy
import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from trisect.calibrate import Progress
from trisect.compare.cache import Stored, reads_of, stored_moments
from trisect.compare.cells import Cell, allocation, content_key
from trisect.compare.count import Count, count
from trisect.compare.folder import Folder
from trisect.compare.measure import cell_receipt, dense_receipt
from trisect.compare.recipe import Calibration, ModelEntry
from trisect.compare.sources import calibration_tokens, evaluation_tokens
from trisect.compare.texts import located
from trisect.data import Tokens
from trisect.methods import get_method
from trisect.models import Loaded, fingerprint, load_model, shape_of
from trisect.pipeline.run import compress
from trisect.records.shapes import ModelShape

COPY_LIMIT = 3_000_000_000
"""Models with more parameters are loaded again for each cell: two of them may not fit."""
LARGE = 10_000_000
"""Parameters of a model that is not left to Python to free when it likes."""

Say = Callable[[str], None]


class Bench:
    """One model of a recipe, and what its cells share."""

    def __init__(
        self,
        entry: ModelEntry,
        cells: Sequence[Cell],
        *,
        folder: Folder,
        device: str,
        progress: Progress | None,
        say: Say,
    ):
        self.entry, self.folder, self.device = entry, folder, device
        self.cells = cells
        """All cells of the model, finished ones too: what they read together decides what is cached."""
        self.progress, self.say = progress, say
        self._tokens: dict[str, Tokens] = {}
        self._stored: dict[str, Stored | None] = {}
        self._loaded: Loaded | None = None

    def run(self, cell: Cell) -> dict[str, Any]:
        """The receipt of one cell."""
        if cell.config is None or cell.calibration is None:
            return dense_receipt(
                cell,
                self.loaded.model,
                self.loaded.tokenizer,
                fingerprint=self.fingerprint,
                texts=self.texts,
                stage=self.progress,
            )
        dense, tokens = self.dense, self.tokens(cell.calibration)
        # Nobody collects what the cell at hand could not use.
        stored = None if reads_of(cell.config) is None else self.stored(cell.calibration)
        moments = None if stored is None else stored.path_for(cell.config)
        tokenizer, curves = self.loaded.tokenizer, self.curves_path(cell)
        with nullcontext() if curves is None or curves.exists() else self.folder.waiting(curves.stem):
            result = compress(
                self._fresh(),
                cell.config,
                tokenizer=tokenizer,
                tokens=tokens,
                moments=moments,
                curves=curves,
                progress=self.progress,
            )
        receipt = cell_receipt(
            cell,
            result,
            tokenizer,
            fingerprint=self.fingerprint,
            dense=dense,
            texts=self.texts,
            stage=self.progress,
        )
        return {**receipt, "stored_moments": moments is not None}

    @property
    def loaded(self) -> Loaded:
        """The dense model; after a large one was cut, it is loaded again."""
        if self._loaded is None:
            entry = self.entry
            self._loaded = load_model(located(entry.source), dtype=entry.dtype, device=self.device)
        return self._loaded

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.loaded.model)

    @cached_property
    def dense(self) -> tuple[ModelShape, Count]:
        return shape_of(self.loaded.model), count(self.loaded.model)

    @cached_property
    def texts(self) -> list[Tokens]:
        return [evaluation_tokens(text, self.loaded.tokenizer) for text in self.entry.evaluations]

    def tokens(self, calibration: Calibration) -> Tokens:
        if calibration.name not in self._tokens:
            self._tokens[calibration.name] = calibration_tokens(calibration, self.loaded.tokenizer)
        return self._tokens[calibration.name]

    def stored(self, calibration: Calibration) -> Stored | None:
        """Moments for all cells of a calibration set that can be solved from them."""
        # The pipeline reads a moments file into main memory, beside the weights only where those are too.
        if torch.device(self.device).type != "cpu":
            return None
        if calibration.name not in self._stored:
            with self.folder.waiting("moments"):
                self._stored[calibration.name] = stored_moments(
                    self.loaded.model,
                    self.tokens(calibration),
                    [cell for cell in self.cells if cell.calibration == calibration],
                    folder=self.folder.cache,
                    batch_size=calibration.config.batch_size,
                    progress=self.progress,
                    say=self.say,
                )
        return self._stored[calibration.name]

    def release(self) -> None:
        """Free the last model before the next one is made, where it is large enough to matter."""
        if "dense" in vars(self) and self.dense[1].parameters >= LARGE:
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def _fresh(self) -> Any:
        """A dense model to cut: a copy, or the loaded one itself where two are too many."""
        model = self.loaded.model
        if self.dense[1].parameters <= COPY_LIMIT:
            return copy.deepcopy(model)
        _ = self.fingerprint, self.texts  # taken from the dense model while it is there
        self._loaded = None
        return model

    def curves_path(self, cell: Cell) -> Path | None:
        """Where a method's loss curves or sensitivities are kept: the same for every ratio and alignment."""
        config = cell.config
        if config is None or cell.calibration is None or allocation(config) == "uniform":
            return None
        method = get_method(config.method)
        if method.linear and getattr(method, "search", None) != "sensitivity":
            return None
        made_of = [self.fingerprint, self.tokens(cell.calibration).hash, config.method, config.seed]
        if method.linear:  # sensitivities are of the maps that are cut
            made_of.append(config.parts)
        return self.folder.cache / f"curves-{content_key(made_of)}.json"
