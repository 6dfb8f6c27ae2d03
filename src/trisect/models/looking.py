"""A model as a whole: shape, fingerprint, numbers that can be used; and fewer layers of it."""

import hashlib
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from trisect.errors import TrisectError
from trisect.kernels.sdpa import channel_step, kind_of
from trisect.models import LayerView, family_for, layer_views
from trisect.models.linear import is_linear, matrices_of, refuse_nan
from trisect.records.shapes import ModelShape
from trisect.support import replaced
from trisect.support.checks import explained

log = logging.getLogger(__name__)

SAMPLE = 64  # weights of each projection that go into a fingerprint


def shape_of(model: nn.Module) -> ModelShape:
    """Sizes of the model as it stands."""
    views = layer_views(model)
    parameters = list(model.parameters())
    inside = sum(_parameters_inside(view) for view in views)
    stored = getattr(model, "stored_dtype", None) or next(p for p in parameters if p.is_floating_point()).dtype
    layers = tuple(view.shape() for view in views)
    other = sum(p.numel() for p in parameters) - inside
    return ModelShape(layers=layers, other_parameters=other, bytes_per_element=stored.itemsize)


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
        tokens = f"The tokens go from {int(ids.min())} to {int(ids.max())}, but the model knows 0 to {rows - 1}"
        raise TrisectError(f"{tokens}; they were made with another tokenizer.")


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


def training_flags_kept(model: nn.Module) -> AbstractContextManager[None]:
    """The model may be switched to evaluation inside; every module gets its own training flag back."""
    return replaced(*((module, "training", module.training) for module in model.modules()))


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


def warn_of_slow_widths(model: Any) -> None:
    """Say once, when a compressed model is loaded, which layers leave the fast kernels of a GPU."""
    if not hasattr(model.config, "trisect"):
        return
    parameter = next(p for p in model.parameters() if p.is_floating_point())
    step = channel_step(kind_of(parameter.device), parameter.element_size())
    shapes = [(view.index, view.shape()) for view in layer_views(model)]
    slow = [str(n) for n, shape in shapes if any(w % step for w in (shape.qk, shape.vo, shape.mlp))]
    if slow:
        odd = f"layers {', '.join(slow)} have widths that are no multiple of {step}"
        log.warning("%s, which is slow on %s (--align 16 avoids it)", odd, parameter.device)


PLAIN = (bool, int, float, str)  # values by which one layer may differ from another
NUMBER = "layer_idx"  # the attribute with a module's place in the model, and in the KV cache


def parameters_apart(view: LayerView) -> int:
    """Parameters of a layer outside its components: norms, and what is left whole."""
    return sum(p.numel() for p in view.layer.parameters()) - _parameters_inside(view)


def _parameters_inside(view: LayerView) -> int:
    return sum(p.numel() for module in view.projections() for p in module.parameters())


def shape_without(model: Any, count: int) -> ModelShape:
    """The sizes of a model that has lost `count` layers, whichever; a model that cannot lose them is refused."""
    check_droppable(model, count)
    return shape_of(model).with_depth(len(layer_views(model)) - count, apart=parameters_apart(layer_views(model)[0]))


def check_droppable(model: Any, count: int) -> None:
    """Refuse models whose layers depend on each other, or on their place, and too many layers."""
    views, family = layer_views(model), family_for(model.config)
    reason = None
    if hasattr(model.config, "trisect"):
        reason = "it is compressed already: drop layers of the model it was made from"
    elif family.lends_keys:
        reason = f"{family.name} has layers that read the keys and values of earlier ones"
    elif family.mixer is not None or family.beside is not None:
        reason = f"{family.name} is a hybrid, whose kinds of layers follow a pattern"
    elif len({(view.shape(), parameters_apart(view)) for view in views}) > 1:
        reason = "its layers differ in rotation, experts or widths"
    if reason is not None:
        raise TrisectError(f"--drop-layers cannot drop layers of this model: {reason}; leave it out.")
    if count >= len(views):
        raise TrisectError(f"The model has {len(views)} layers: --drop-layers {len(views) - 1} or less.")
    config_without(model, range(1, count + 1))


def drop_layers(model: Any, dropped: Sequence[int]) -> None:
    """Take layers out of a stock model, in place; those left are numbered anew, in modules and in the config."""
    config, views = config_without(model, dropped), layer_views(model)
    kept = [view.layer for view in views if view.index not in dropped]
    model.set_submodule(views[0].family.layers, nn.ModuleList(kept))
    for place, layer in enumerate(kept):
        for module in layer.modules():
            if hasattr(module, NUMBER):
                setattr(module, NUMBER, place)
    # Modules hold the model's own config, or the text config inside it: these objects are to stay.
    mine, said = model.config.get_text_config(), config.get_text_config()
    for key in _changes(mine, dropped):
        setattr(mine, key, getattr(said, key))
    model.dropped_layers = sorted(dropped)


def config_without(model: Any, dropped: Sequence[int]) -> Any:
    """A new config of the model without these layers; refused where one built from it would not be what is left."""
    config = _copied(model.config)
    for key, value in _changes(config.get_text_config(), dropped).items():
        setattr(config.get_text_config(), key, value)
    refusal = f"--drop-layers cannot drop layers {', '.join(map(str, dropped))} of this model"
    with torch.device("meta"), explained(refusal):
        config = _copied(config)
        built = layer_views(type(model)(config))
    kept = [view for view in layer_views(model) if view.index not in dropped]
    for old, new in zip(kept, built, strict=True):
        said = {name: _told(module) for name, module in new.layer.named_modules()}
        for name, module in old.layer.named_modules():
            told = said.get(name)
            differs = [key for key, value in _told(module).items() if told is None or told.get(key, value) != value]
            if differs:
                where = ".".join(filter(None, (name, differs[0])))
                raise TrisectError(f"{refusal}: its config ties {where} of a layer to its number; leave it out.")
    return config


def _copied(config: Any) -> Any:
    """The config as it is read back from a file."""
    return type(config).from_dict(config.to_dict())


def _changes(text: Any, dropped: Sequence[int]) -> dict[str, Any]:
    """What a config says otherwise without these layers: how many there are, and lists with an entry for each."""
    count = text.num_hidden_layers
    found: dict[str, Any] = {"num_hidden_layers": count - len(dropped)}
    for key, value in text.to_dict().items():
        if isinstance(value, list | tuple) and "layer" in key and len(value) == count:
            found[key] = [entry for number, entry in enumerate(value) if number not in dropped]
    return found


def _told(module: nn.Module) -> dict[str, Any]:
    """What a module was told when it was made, but for its place; not its class, which work on it may change."""
    told = {key: value for key, value in vars(module).items() if isinstance(value, PLAIN) or value is None}
    return {key: value for key, value in told.items() if key not in ("training", NUMBER) and not key.startswith("_")}
