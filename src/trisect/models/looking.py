"""What a model is, without changing it: its shape, a fingerprint, whether its numbers can be used, what is slow."""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trisect.errors import TrisectError
from trisect.kernels.sdpa import CUDNN_WIDEST, Heads, Kind, channel_step, kind_of, rounded, route
from trisect.models.attention import Attention
from trisect.models.families import Family, family_for
from trisect.models.linear import matrices_of, refuse_nan
from trisect.models.quantized import is_linear
from trisect.models.view import layer_views
from trisect.records.shapes import LayerShape, ModelShape

log = logging.getLogger(__name__)

SAMPLE = 64  # weights of each projection that go into a fingerprint
MLP_STEP = 128  # widths that matrix products on tensor cores run at full speed for


def family_of(model: Any) -> Family:
    """The family record of a loaded model."""
    return family_for(model.config)


def shape_of(model: nn.Module) -> ModelShape:
    """Sizes of the model as it stands."""
    views = layer_views(model)
    parameters = list(model.parameters())
    inside = [p for view in views for module in view.projections() for p in module.parameters()]
    stored = getattr(model, "stored_dtype", None) or next(p for p in parameters if p.is_floating_point()).dtype
    return ModelShape(
        layers=tuple(view.shape() for view in views),
        other_parameters=sum(p.numel() for p in parameters) - sum(p.numel() for p in inside),
        bytes_per_element=stored.itemsize,
    )


@torch.no_grad()
def round_as_stored(model: Any, module: nn.Module) -> None:
    """Round a part of a model to the dtype that it will be saved in: what is measured is what is saved."""
    stored = getattr(model, "stored_dtype", None)
    for parameter in module.parameters() if stored is not None else ():
        if parameter.dtype != stored and not parameter.is_meta:
            parameter.copy_(parameter.to(stored))


def zeros_of(model: nn.Module) -> int:
    """Weights of the decoder's linear maps that are zero; biases do not count."""
    modules: list[Any] = [module for view in layer_views(model) for module in view.projections()]
    return sum(int((weight == 0).sum()) for module in modules for weight in matrices_of(module))


def check_finite(model: Any) -> None:
    """Refuse a checkpoint with NaN or inf anywhere, by the parameter's name."""
    for name, parameter in model.named_parameters():
        refuse_nan(parameter, name)


def check_tokens(model: Any, ids: Tensor) -> None:
    """Refuse tokens the model has no embedding for."""
    rows = model.get_input_embeddings().weight.shape[0]
    if int(ids.max()) >= rows or int(ids.min()) < 0:
        raise TrisectError(
            f"The tokens go from {int(ids.min())} to {int(ids.max())}, but the model knows 0 to {rows - 1}; "
            "they were made with another tokenizer."
        )


def fingerprint(model: nn.Module) -> str:
    """A hash of shapes and some weights of every layer: the same in memory and still in its files."""
    digest, all_of_it = hashlib.sha256(repr(shape_of(model).layers).encode()), slice(None)
    for view in layer_views(model):
        names = {id(parameter): name for name, parameter in view.layer.named_parameters()}
        for module in view.projections():
            transposed = is_linear(module)  # others are stored as (in, out), in groups, or as experts
            for weight in matrices_of(module):
                rows = slice(-(-SAMPLE // (weight.shape[0] if transposed else weight[0].numel())))
                key: Any = (all_of_it, rows) if transposed else rows
                store: Any = getattr(model, "layer_store", None)
                first = store.peek(view.index, names[id(weight)], key) if weight.is_meta else weight.detach()[key]
                sample = (first.T if transposed else first).flatten()[:SAMPLE].float().cpu()
                digest.update(sample.contiguous().numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def training_flags_kept(model: nn.Module) -> Iterator[None]:
    """The model may be switched to evaluation inside; every module gets its own training flag back."""
    training = [module for module in model.modules() if module.training]
    try:
        yield
    finally:
        for module in training:
            module.training = True


PROBE = "probe.json"  # the file of a saved folder with what `probe_of` gives
PROMPT, ANSWER = 24, 4  # tokens of a probe
STREAMED_ANSWER = 2  # where every token of the answer reads all layers from the disk


@torch.no_grad()
def probe_of(model: Any) -> dict[str, Any]:
    """A few tokens and what the model makes of them, for whoever loads its files to compare with."""
    # `logprobs` are those of every token behind the first; the model chose the answer's tokens itself.
    config = model.config.get_text_config()
    ids = torch.randint(config.vocab_size, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    start = getattr(config, "bos_token_id", None)
    ids[0, 0] = start if isinstance(start, int) and start < config.vocab_size else ids[0, 0]
    embedding = model.get_input_embeddings().weight
    ids = ids.to(embedding.device)
    with training_flags_kept(model):
        model.eval()
        for _ in range(STREAMED_ANSWER if hasattr(model, "layer_store") else ANSWER):
            logits = model(input_ids=ids, use_cache=False).logits
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
    found = logits.float().log_softmax(-1)
    logprobs = found.gather(-1, ids[:, 1:, None]).flatten().tolist()
    dtype = str(embedding.dtype).removeprefix("torch.")
    tokens = ids[0].tolist()
    return {"dtype": dtype, "prompt": tokens[:PROMPT], "answer": tokens[PROMPT:], "logprobs": logprobs}


def slow_attention(shape: LayerShape, kind: Kind, bytes_per_element: int) -> str | None:
    """Why heads of this shape are padded at every call, and which would not be; None where they are not."""
    # On a CPU the padding costs little beside what the kernel saves; single tokens are not padded at all.
    if not shape.kv_heads:
        return None  # no attention
    group, size = shape.heads // shape.kv_heads, bytes_per_element
    heads = Heads(shape.qk + shape.rotated, shape.vo, group, masked=False, single=False, bytes_per_element=size)
    way, step = route(kind, heads), channel_step(kind, size)
    if kind == "cpu" or way.pad is None:
        return None
    widths, equal = f"head widths {shape.qk}/{shape.vo}", rounded(max(shape.qk, shape.vo), step)
    if shape.qk % step or shape.vo % step:
        qk, vo = rounded(shape.qk, step), rounded(shape.vo, step)
        better = f"{qk}/{vo}" if kind == "cudnn" and max(qk, vo) <= CUDNN_WIDEST else f"{equal}/{equal}"
        why = f"are not both multiples of {step}: every call adds zero channels"
        return f"{widths} {why}; {better} would run at full speed"
    why = f"differ, which this device's kernels do not take: prompts are padded to {way.pad}"
    return f"{widths} {why}; {equal}/{equal} would run at full speed"


def slow_products(shape: LayerShape, kind: Kind, bytes_per_element: int) -> str | None:
    """Which matrix products have rows off the grid, and what would not; None where all are aligned."""
    step = channel_step(kind, bytes_per_element)
    widths = {
        "MLP width": shape.mlp,
        "query width": shape.heads * shape.qk,
        "key width": shape.kv_heads * shape.qk,
        "value width": shape.kv_heads * shape.vo,
    }
    slow = [f"{name} {width}" for name, width in widths.items() if width % step]
    if not slow:
        return None
    low = shape.mlp // MLP_STEP * MLP_STEP
    wanted = [f"MLP {low or MLP_STEP} or {low + MLP_STEP}"] if shape.mlp % step else []
    wanted += [f"head widths in steps of {step}"] if len(slow) > len(wanted) else []
    why = f"not a multiple of {step}: matrix products leave the fast kernels"
    return f"{' and '.join(slow)} {why}; {' and '.join(wanted)} would run at full speed"


def warn_of_slow_paths(model: Any) -> None:
    """Say once, when a model is loaded, which of its widths are slow here and which would not be."""
    if not any(isinstance(module, Attention) for module in model.modules()):
        return  # a stock model runs stock code
    parameter = next(p for p in model.parameters() if p.is_floating_point())
    kind, size = kind_of(parameter.device), parameter.element_size()
    slow: dict[str, list[str]] = {}
    for view in layer_views(model):
        for reason in (slow_attention(view.shape(), kind, size), slow_products(view.shape(), kind, size)):
            if reason is not None:
                slow.setdefault(reason, []).append(str(view.index))
    if slow:
        lines = [f"layers {', '.join(layers)}: {reason}" for reason, layers in slow.items()]
        log.warning("some widths will be slow on %s: %s", parameter.device, "; ".join(lines))
