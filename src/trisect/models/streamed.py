"""Models larger than the machine: layers without weights, each read when it is its turn.

Everything else (embeddings, norms, head, rotary tables) is loaded as usual. A layer called outside its turn
brings its weights in for that one call, so that a streamed model can be called like any other, slowly.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trisect.clock import stage
from trisect.models.families import family_for

M_MMAP_THRESHOLD = -3
"""Of malloc.h."""
LARGE_BLOCK = 1 << 20

Read = Callable[[], Mapping[str, Tensor]]
"""Gives a layer's tensors in main memory, by their names inside the layer."""

Peek = Callable[[int, str], Any]
"""Layer and name -> something that can be sliced like the tensor, without reading all of it."""


class LayerStore:
    """Brings layers in and lets them go; the next one is read while this one is worked on."""

    def __init__(
        self, model: Any, sources: list[Read], *, device: str | torch.device, peek: Peek | None = None
    ):
        self.layers = layers_of(model)
        self.sources, self.device = sources, torch.device(device)
        self.peek = peek or (lambda index, name: self.sources[index]()[name])
        self.present_now: set[int] = set()
        self._called: set[int] = set()
        """Layers that are here for one call only."""
        self._ahead: tuple[int, Future[dict[str, Tensor]]] | None = None
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trisect-read")
        for index, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(self._call_begins(index))
            layer.register_forward_hook(self._call_ends(index), always_call=True)

    @contextmanager
    def present(self, index: int) -> Iterator[None]:
        """The layer's weights are there inside."""
        self.bring(index)
        try:
            yield
        finally:
            self.release(index)

    def bring(self, index: int) -> None:
        """Put the layer's weights where they are used, and begin to read those of the next."""
        with stage("read"):
            tensors = self._taken(index)
            self._ahead = None
            if index + 1 < len(self.layers):
                self._ahead = index + 1, self._reader.submit(self._read, index + 1)
            moved = {name: tensor.to(self.device, non_blocking=True) for name, tensor in tensors.items()}
            self.layers[index].load_state_dict(moved, assign=True)
        self.present_now.add(index)

    def release(self, index: int) -> None:
        """Let the weights go; the shapes stay as they are."""
        empty(self.layers[index])
        self.present_now.discard(index)

    def _taken(self, index: int) -> dict[str, Tensor]:
        if self._ahead is not None and self._ahead[0] == index:
            return self._ahead[1].result()
        return self._read(index)

    def _read(self, index: int) -> dict[str, Tensor]:
        tensors = dict(self.sources[index]())
        if self.device.type == "cuda":
            tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
        return tensors

    def _call_begins(self, index: int) -> Callable[..., None]:
        def begin(module: Any, args: Any) -> None:
            if index not in self.present_now:
                self.bring(index)
                self._called.add(index)

        return begin

    def _call_ends(self, index: int) -> Callable[..., None]:
        def end(module: Any, args: Any, output: Any) -> None:
            if index in self._called:
                self._called.discard(index)
                self.release(index)

        return end


def give_large_blocks_back() -> None:
    """Have glibc return every large block to the system when it is freed, from now on.

    By itself it keeps blocks of a layer's size for later, and memory grows with the number of layers.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)


def empty(layer: nn.Module) -> None:
    """Weights become shapes; what a checkpoint does not hold (tables, masks) stays."""
    nothing = {name: tensor.to("meta") for name, tensor in layer.state_dict().items()}
    layer.load_state_dict(nothing, assign=True)


def hosted(model: Any, *, device: str | torch.device) -> Any:
    """Run a model that is in main memory layer by layer on a device it does not fit on."""
    layers = layers_of(model)
    sources = [constant(layer.state_dict()) for layer in layers]
    for layer in layers:
        empty(layer)
    move_rest(model, device)
    model.layer_store = LayerStore(model, sources, device=device)
    return model


def unhosted(model: Any) -> Any:
    """Bring all layers into main memory, to stay."""
    store: LayerStore = model.layer_store
    for layer, source in zip(store.layers, store.sources, strict=True):
        layer.load_state_dict(source(), assign=True)
        layer._forward_pre_hooks.clear()
        layer._forward_hooks.clear()
    del model.layer_store
    move_rest(model, "cpu")
    return model


def constant(tensors: Mapping[str, Tensor]) -> Read:
    """The same tensors whenever asked, in main memory."""
    kept = {name: tensor.detach().to("cpu") for name, tensor in tensors.items()}
    return lambda: kept


def layers_of(model: Any) -> list[nn.Module]:
    return list(model.get_submodule(family_for(model.config).layers).children())


def move_rest(model: Any, device: str | torch.device) -> None:
    """Move whatever has a value, which is all but the layers."""
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None or tensor.is_meta:
                    continue
                moved = tensor.to(device)
                if isinstance(tensor, nn.Parameter):
                    moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
                table[name] = moved
    model.tie_weights()
