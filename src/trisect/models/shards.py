"""Look at what was written before it gets its name: every tensor, and for small models what they compute."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from trisect.errors import TrisectError
from trisect.models.source import tensor_files


def names_in_files(model: Any, files: Iterable[str], state: dict[str, Tensor]) -> dict[str, str]:
    """Name in the model -> name in the files; tensors that transformers would put together are left out."""
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if not isinstance(entry, WeightRenaming)]
    prefix = model.base_model_prefix
    found = {}
    for name in files:
        ours, converted = rename_source_key(name, renamings, converters, prefix, state)
        if converted is None:
            found[ours] = name
    return found


def tied_names(model: Any) -> set[str]:
    """Tensors that are another's under a second name, and need not be in the files."""
    tied = getattr(model, "_tied_weights_keys", None) or ()
    return set(tied) if model.config.tie_word_embeddings else set()


class Shards:
    """The weight files of a folder."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.files = tensor_files(self.folder)
        """Tensor name -> file name."""

    def shape(self, name: str) -> tuple[int, ...]:
        with self.opened(name) as file:
            return tuple(file.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        with self.opened(name) as file:
            return _DTYPES[file.get_slice(name).get_dtype()]

    def slices(self, name: str) -> "Slices":
        """Parts of a tensor by index, without reading the rest."""
        return Slices(self, name)

    def read(self, name: str) -> Tensor:
        """A tensor in memory of its own; the file is let go again, and its pages with it."""
        with self.opened(name) as file:
            tensor: Tensor = file.get_tensor(name).clone()
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise TrisectError(
                f"{name} in {self.folder / self.files[name]} holds NaN or inf; the checkpoint is damaged or "
                "was saved from a run that diverged."
            )
        return tensor

    @property
    def num_bytes(self) -> int:
        return sum((self.folder / name).stat().st_size for name in set(self.files.values()))

    @contextmanager
    def opened(self, name: str) -> Iterator[Any]:
        """The file that holds a tensor."""
        path = self.folder / self.files[name]
        try:
            with safe_open(path, framework="pt") as file:
                yield file
        except (OSError, SafetensorError) as error:
            raise TrisectError(
                f"Cannot read {name} from {path}: {error}; download the file again."
            ) from error


class Slices:
    """A tensor in its file, of which only what is asked for is read."""

    def __init__(self, shards: Shards, name: str):
        self.shards, self.name = shards, name

    def __getitem__(self, key: Any) -> Tensor:
        with self.shards.opened(self.name) as file:
            part: Tensor = file.get_slice(self.name)[key]
            return part.clone()


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


SMALL = 500_000_000
"""Parameters of a model that is loaded again and run on a few tokens."""
TOKENS = 16


def check_saved(model: Any, folder: Path) -> None:
    """Refuse a folder whose tensors, or whose logits, are not the model's."""
    shards = Shards(folder)
    state = model.state_dict()
    for name, place in names_in_files(model, shards.files, state).items():
        stored = shards.read(place)
        if name not in state or stored.shape != state[name].shape:
            raise _wrong(f"{name} has the shape {tuple(stored.shape)}")
        if not state[name].is_meta and not torch.equal(stored, state[name].cpu()):
            raise _wrong(f"{name} has other values")
    whole = not any(tensor.is_meta for tensor in state.values())
    if whole and sum(parameter.numel() for parameter in model.parameters()) <= SMALL:
        _check_logits(model, folder)


@torch.no_grad()
def _check_logits(model: Any, folder: Path) -> None:
    embedding = model.get_input_embeddings().weight
    ids = torch.arange(TOKENS, device=embedding.device).remainder(len(embedding)).unsqueeze(0)
    again = type(model).from_pretrained(folder, dtype=embedding.dtype, use_safetensors=True)
    again = again.to(embedding.device).train(model.training)
    found, expected = (m(input_ids=ids, use_cache=False).logits.float() for m in (again, model))
    # A model that was cast to 16 bits has cast its rotation tables too; a loaded one has them in float32.
    tolerance = 1e-4 if embedding.dtype.itemsize > 2 else 5e-2
    if (found - expected).abs().max() > tolerance * expected.abs().max():
        raise _wrong("its logits are not those of the model in memory")


def _wrong(what: str) -> TrisectError:
    return TrisectError(
        f"The files that were written do not hold the model: {what}. They were removed; check the disk, and "
        "report this if it happens again."
    )
