"""Finished layers of a run, one durable file each, so that a run that dies resumes where it stopped.

Hidden states are not kept: they are carried through the finished layers again, a forward pass and no solving.
"""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from trisect.config import CompressConfig
from trisect.errors import TrisectError
from trisect.models import LayerView, fingerprint, streamed
from trisect.plan import Plan
from trisect.records.shapes import LayerShape, LinearShape
from trisect.support import checks, clock, distributed, files, receipt


class Ledger:
    """What became of each layer so far: in memory, and on disk where there is a folder for it."""

    def __init__(self, model: Any = None, folder: Path | None = None, manifest: dict[str, Any] | None = None):
        self.manifest = manifest
        self.store: streamed.LayerStore | None = getattr(model, "layer_store", None)
        self.folder = folder
        self.losses: dict[int, list[dict[str, Any]]] = {}
        self.last_norm_scale: float | None = None  # what the norm in front of the head was multiplied with, if at all
        self.finished: set[int] = set()  # layers of an earlier run
        if folder is not None:
            self.working = next(model.parameters()).dtype
            self.stored = getattr(model, "stored_dtype", None) or self.working
            found = {int(path.stem.removeprefix("layer-")) for path in folder.glob("layer-*.safetensors")}
            self.finished = distributed.broadcast(found)

    def note(self, entry: dict[str, Any]) -> None:
        """What a step left; a later step of the same component has the last word on its loss."""
        entries = self.losses.setdefault(entry["layer"], [])
        for old in entries:
            if old["component"] == entry["component"]:
                old |= {name: value for name, value in entry.items() if value != ""}
                return
        entries.append(entry)

    def settle(self, plan: Plan) -> None:
        """The widths are decided: a run that resumes does not measure anything for them again."""
        if self.folder is not None and distributed.is_rank_zero():
            files.write_json(self.folder / distributed.MANIFEST, {**(self.manifest or {}), "plan": plan.to_dict()})
        distributed.barrier()

    def keep(self, view: LayerView) -> None:
        """The layer is finished."""
        if self.folder is not None:
            with clock.stage("write"):
                if distributed.is_rank_zero():
                    self._write(view)
                distributed.barrier()
        if self.store is not None:
            on_disk = self.folder is not None
            source = partial(self._read, view) if on_disk else streamed.constant(view.layer.state_dict())
            self.store.sources[view.index] = source

    def _write(self, view: LayerView) -> None:
        state = view.layer.state_dict(prefix=_prefix(view))
        own = {_prefix(view) + name for name, _ in view.layer.named_parameters()}
        kinds = {name: self.stored if name in own else tensor.dtype for name, tensor in state.items()}
        tensors = {name: tensor.detach().to("cpu", kinds[name]).contiguous() for name, tensor in state.items()}
        about = {"shape": asdict(view.shape()), "losses": self.losses.get(view.index, [])}
        # Beside the tensors, not in their header: safetensors writes two entries there in any order,
        # and this file becomes a shard of the result.
        files.write_json(self._path("record", view, "json"), files.plain(about))
        with files.new_file(self._path("layer", view, "safetensors")) as partial_path:
            safetensors.torch.save_file(tensors, partial_path, metadata={"format": "pt"})

    def restore(self, view: LayerView) -> None:
        """Make the layer what the earlier run made of it."""
        record = self._path("record", view, "json")
        about = checks.read_record(record, what="record of a layer", instead="add --fresh to start anew")
        try:
            linears = tuple(LinearShape(**linear) for linear in about["shape"].pop("linears"))
            shape, self.losses[view.index] = LayerShape(**about["shape"], linears=linears), list(about["losses"])
        except (KeyError, TypeError, AttributeError) as error:
            raise self._damaged(view, f"no record of a layer: {error!r}") from error
        view.resize(shape)
        device = next(view.layer.parameters()).device
        view.layer.load_state_dict({name: x.to(device) for name, x in self._read(view).items()}, assign=True)
        if self.store is not None:
            self.store.sources[view.index] = partial(self._read, view)

    def _read(self, view: LayerView) -> dict[str, Tensor]:
        """The tensors of a finished layer, by their names inside it."""
        try:
            tensors = safetensors.torch.load_file(self._path("layer", view, "safetensors"))
        except (OSError, safetensors.SafetensorError) as error:
            raise self._damaged(view, str(error)) from error
        kinds = {self.stored: self.working}
        return {
            name.removeprefix(_prefix(view)): tensor.to(kinds.get(tensor.dtype, tensor.dtype), copy=True)
            for name, tensor in tensors.items()
        }

    def _path(self, what: str, view: LayerView, suffix: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{what}-{view.index:05d}.{suffix}"

    def _damaged(self, view: LayerView, why: str) -> TrisectError:
        path = self._path("layer", view, "safetensors")
        return TrisectError(f"{path} cannot be read ({why}); remove it, and the layer is solved again.")


def open_ledger(model: Any, config: CompressConfig, token_hash: str, work: Path | None) -> tuple[Ledger, Plan | None]:
    """The ledger of a run, and the plan if an earlier run has made it."""
    if work is None:
        return Ledger(model), None
    settings = config.to_dict()
    for name in ("batch_size", "states"):  # batches may get smaller when memory is short: they decide nothing
        del settings["calibration"][name]
    manifest = {
        "trisect": receipt.package_version("trisect"),
        "model": fingerprint(model),
        "dtype": str(next(model.parameters()).dtype),
        "tokens": token_hash,
        "config": settings,
        "processes": distributed.world_size(),
    }
    known = distributed.manifest_of(work, manifest)
    plan = known.pop("plan", None)
    return Ledger(model, work, known), None if plan is None else Plan.from_dict(plan)


def _prefix(view: LayerView) -> str:
    """Of the layer's tensors in a checkpoint: a file here is a shard of the result already."""
    return f"{view.family.layers}.{view.index}."
