"""Look at what was written before it gets its name: every tensor, and for small models what they compute."""

from pathlib import Path
from typing import Any

import torch

from trisect.errors import TrisectError
from trisect.models.names import names_in_files
from trisect.models.shards import Shards

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
