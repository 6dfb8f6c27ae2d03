"""Finished layers of a run, one durable file each, so that a run that dies goes on where it stopped.

Hidden states are not kept: a run that goes on carries them through the finished layers again, which is a
forward pass and no solving.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from trisect.config import CompressConfig
from trisect.errors import TrisectError
from trisect.models.looking import fingerprint
from trisect.models.streamed import LayerStore, constant
from trisect.models.view import LayerView
from trisect.plan import Plan
from trisect.records.shapes import LayerShape, LinearShape
from trisect.support import distributed
from trisect.support.checks import read_record
from trisect.support.clock import stage
from trisect.support.files import new_file, plain, write_json
from trisect.support.receipt import package_version

MANIFEST = "manifest.json"


class Ledger:
    """What became of each layer so far, in memory only."""

    def __init__(self, store: LayerStore | None = None):
        self.store = store
        self.losses: dict[int, list[dict[str, Any]]] = {}
        self.last_norm_scale: float | None = None
        """What the norm in front of the head was multiplied with, by methods that do so."""

    def note(self, layer: int, entry: dict[str, Any]) -> None:
        """What a step left; a later step of the same component has the last word on its loss."""
        entries = self.losses.setdefault(layer, [])
        earlier = [old for old in entries if old["component"] == entry["component"]]
        if not earlier:
            entries.append(entry)
        for old in earlier:
            old |= {name: value for name, value in entry.items() if value != ""}

    def settle(self, plan: Plan) -> None:
        """The widths are decided."""

    def has(self, layer: int) -> bool:
        """Whether the layer was finished by an earlier run."""
        return False

    def keep(self, view: LayerView) -> None:
        """The layer is finished."""
        if self.store is not None:
            self.store.sources[view.index] = constant(view.layer.state_dict())

    def restore(self, view: LayerView) -> None:
        """Make the layer what the earlier run made of it."""
        raise AssertionError("nothing to restore")


class Journal(Ledger):
    """What became of each layer, on disk."""

    def __init__(self, folder: Path, model: Any):
        super().__init__(getattr(model, "layer_store", None))
        self.folder, self.working = folder, next(model.parameters()).dtype
        self.stored = getattr(model, "stored_dtype", None) or self.working
        found = {int(path.stem.removeprefix("layer-")) for path in folder.glob("layer-*.safetensors")}
        self.finished: set[int] = distributed.broadcast(found)

    def settle(self, plan: Plan) -> None:
        """A run that goes on has the same plan, and does not measure anything for it again."""
        if distributed.is_rank_zero():
            manifest = _read_manifest(self.folder)
            write_json(self.folder / MANIFEST, {**manifest, "plan": plan.to_dict()})
        distributed.barrier()

    def path(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:05d}.safetensors"

    def record(self, layer: int) -> Path:
        return self.folder / f"record-{layer:05d}.json"

    def has(self, layer: int) -> bool:
        return layer in self.finished

    def keep(self, view: LayerView) -> None:
        with stage("write"):
            if distributed.is_rank_zero():
                state = view.layer.state_dict(prefix=_prefix(view))
                own = {_prefix(view) + name for name, _ in view.layer.named_parameters()}
                kinds = {name: self.stored if name in own else tensor.dtype for name, tensor in state.items()}
                tensors = {name: tensor.detach().to("cpu", kinds[name]).contiguous() for name, tensor in state.items()}
                about = {"shape": asdict(view.shape()), "losses": self.losses.get(view.index, [])}
                # Beside the tensors, not in their header: safetensors writes two entries there in any order,
                # and this file becomes a shard of the result.
                write_json(self.record(view.index), plain(about))
                with new_file(self.path(view.index)) as partial_path:
                    save_file(tensors, partial_path, metadata={"format": "pt"})
            distributed.barrier()
        self._take_from_here(view)

    def restore(self, view: LayerView) -> None:
        about = read_record(self.record(view.index), what="record of a layer", instead="add --fresh to start anew")
        try:
            linears = tuple(LinearShape(**linear) for linear in about["shape"].pop("linears"))
            shape, losses = LayerShape(**about["shape"], linears=linears), list(about["losses"])
        except (KeyError, TypeError, AttributeError) as error:
            raise self._damaged(view.index, f"no record of a layer: {error!r}") from error
        view.resize(shape)
        device = next(view.layer.parameters()).device
        tensors = {name: tensor.to(device) for name, tensor in self.read(_prefix(view), view.index).items()}
        view.layer.load_state_dict(tensors, assign=True)
        self.losses[view.index] = losses
        self._take_from_here(view)

    def read(self, prefix: str, layer: int) -> dict[str, Tensor]:
        """The tensors of a finished layer, by their names inside it."""
        try:
            tensors = load_file(self.path(layer))
        except (OSError, SafetensorError) as error:
            raise self._damaged(layer, str(error)) from error
        kinds = {self.stored: self.working}
        return {
            name.removeprefix(prefix): tensor.to(kinds.get(tensor.dtype, tensor.dtype), copy=True)
            for name, tensor in tensors.items()
        }

    def _take_from_here(self, view: LayerView) -> None:
        if self.store is not None:
            self.store.sources[view.index] = partial(self.read, _prefix(view), view.index)

    def _damaged(self, layer: int, why: str) -> TrisectError:
        return TrisectError(f"{self.path(layer)} cannot be read ({why}); remove it, and the layer is solved again.")


def open_ledger(model: Any, config: CompressConfig, token_hash: str, work: Path | None) -> tuple[Ledger, Plan | None]:
    """The ledger of a run, and the plan if an earlier run has made it."""
    if work is None:
        return Ledger(getattr(model, "layer_store", None)), None
    manifest = {
        "trisect": package_version("trisect"),
        "model": fingerprint(model),
        "dtype": str(next(model.parameters()).dtype),
        "tokens": token_hash,
        "config": _deciding(config),
        "processes": distributed.world_size(),
    }
    known: dict[str, Any] = {}
    if distributed.is_rank_zero():
        if not (work / MANIFEST).is_file():
            work.mkdir(parents=True, exist_ok=True)
            write_json(work / MANIFEST, manifest)
        known = _read_manifest(work)
    # A process that reads for itself may come late and find what the first one has written since.
    known = distributed.broadcast(known)
    plan = known.pop("plan", None)
    different = list(_differences(known, json.loads(json.dumps(plain(manifest)))))
    if different:
        raise TrisectError(
            f"{work} holds an unfinished run with other settings: {'; '.join(different[:4])}. Give the same "
            "settings to go on with it, add --fresh to start anew, or name another output with -o."
        )
    return Journal(work, model), None if plan is None else Plan.from_dict(plan)


def _deciding(config: CompressConfig) -> dict[str, Any]:
    """The settings that decide about the result; batches may get smaller when memory is short."""
    data = config.to_dict()
    data["calibration"] = {
        name: value for name, value in data["calibration"].items() if name not in ("batch_size", "states")
    }
    return data


def _read_manifest(folder: Path) -> dict[str, Any]:
    return read_record(folder / MANIFEST, what="manifest of a run", instead="add --fresh to start anew")


def _prefix(view: LayerView) -> str:
    """Of the layer's tensors in a checkpoint: a file here is a shard of the result already."""
    return f"{view.family.layers}.{view.index}."


def _differences(known: Any, mine: Any, name: str = "") -> Iterator[str]:
    if isinstance(known, dict) and isinstance(mine, dict):
        for key in sorted({*known, *mine}):
            yield from _differences(known.get(key), mine.get(key), f"{name}.{key}" if name else key)
    elif known != mine:
        yield f"{name} was {known!r}, is {mine!r}"
