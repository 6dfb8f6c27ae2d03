"""Models to be timed: a stock architecture, the variants of it, and random weights of a variant's shape.

Random weights are right for speed, wrong for accuracy: matrices are normal, norms are one, and heads keep
random frequencies. They are made where they are used, one model at a time.
"""

import copy
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers.modeling_utils import local_torch_dtype

from trisect.bench.rows import Variant
from trisect.bench.sweep import original_config
from trisect.config import CompressConfig
from trisect.decode import prepare_for_inference
from trisect.errors import TrisectError, check_names, unknown_name
from trisect.models import LayerView, family_for, layer_views, mark_compressed, shape_of
from trisect.models.compressed import compressed_class
from trisect.models.families import FAMILIES, PREFIX
from trisect.models.heads import rotation_of, stored_rates
from trisect.pipeline.rank_search import linear_plan
from trisect.plan import apply_plan, budget_of, compare, plan_for
from trisect.records.shapes import LayerShape, ModelShape, widths_of

SHAPES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("shapes.json").read_text("utf-8"))
"""Name -> config.json of a published checkpoint, as far as it decides the architecture."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An architecture to be built with random weights."""

    name: str
    config: Any
    """The stock transformers config of the dense model."""
    narrowed: tuple[LayerShape, ...] | None = None
    """Layers of a compressed checkpoint; None for a stock one."""

    @property
    def num_layers(self) -> int:
        return int(self.config.get_text_config().num_hidden_layers)

    def dense_shape(self, dtype: torch.dtype) -> ModelShape:
        """Sizes of the dense model, from its config alone."""
        shape = shape_of(stock_model(self.config, dtype=dtype, device="meta"))
        return replace(shape, bytes_per_element=dtype.itemsize)

    def sliced(self, layers: int | None) -> "Subject":
        """The same model with its first layers only."""
        if layers is None:
            return self
        if not 2 <= layers <= self.num_layers:
            raise TrisectError(
                f"--layers must be from 2 to {self.num_layers}, the layers of {self.name}, not {layers}."
            )
        config = copy.deepcopy(self.config)
        text = config.get_text_config()
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:layers]
        text.num_hidden_layers = layers
        return replace(self, config=config, narrowed=self.narrowed and self.narrowed[:layers])


def subject_of_shape(name: str) -> Subject:
    """A published shape by name, or an error that lists them."""
    if name not in SHAPES:
        raise unknown_name("shape", name, SHAPES, "Any other model: subject_of_model(name).")
    # A copy, because configs keep and change the mappings they are given.
    settings = copy.deepcopy(SHAPES[name])
    return Subject(name=name, config=transformers.AutoConfig.for_model(**settings))


def subject_of_model(name: str, *, trust_remote_code: bool = False) -> Subject:
    """A hub id, folder, GGUF file or built-in name: its config is read, its weights are not."""
    from trisect.models.checkpoint import fetched, read_config
    from trisect.models.source import resolve

    config = read_config(resolve(fetched(name), trusted=trust_remote_code))
    family = family_for(config)
    if family.name not in FAMILIES:
        raise TrisectError(
            f"{name} is a {config.model_type} model, of which only the text part could be timed; bench its text model."
        )
    if not config.model_type.startswith(PREFIX):
        return Subject(name=name, config=config)
    with torch.device("meta"):
        model = compressed_class(family.name)(config)
    layers = tuple(view.shape() for view in layer_views(model))
    return Subject(name=name, config=original_config(config), narrowed=layers)


def stock_model(config: Any, *, dtype: torch.dtype, device: str) -> Any:
    """The stock class for a config, built on a device (meta: sizes only).

    Its config is a copy: models write into theirs, and a compressed one changes its class.
    """
    stock = getattr(transformers, family_for(config).model)
    with torch.device(device):
        return stock._from_config(copy.deepcopy(config), dtype=dtype)


FACTORED = "svd-llm"
KINDS = ("dense", "owned", "trisect", FACTORED)
"""Stock; stock weights in our runtime; narrow; two maps for one with the narrow model's parameters."""
WIDTHS = re.compile(r"(\d+)/(\d+)/(\d+)")


def variants_of(
    dense: ModelShape,
    *,
    kinds: Sequence[str],
    ratios: Sequence[float] = (),
    widths: Sequence[str] = (),
    narrowed: tuple[LayerShape, ...] | None = None,
    align: int | None = 16,
    folded: bool = False,
) -> list[Variant]:
    """Dense ones first, then the narrow model and its factored twin for each checkpoint, ratio and widths."""
    check_names("variant", kinds, KINDS)
    found = [Variant(kind=kind, asked="", shape=dense, removed=0.0) for kind in ("dense", "owned") if kind in kinds]
    cuts = [] if narrowed is None else [("checkpoint", replace(dense, layers=narrowed))]
    cuts += [(f"{ratio:g}", narrow_shape(dense, ratio=ratio, align=align)) for ratio in ratios]
    cuts += [(text, shape_of_widths(dense, text)) for text in widths]
    for asked, narrow in cuts:
        if folded and asked != "checkpoint":
            narrow = replace(narrow, layers=tuple(replace(x, folded=x.pairs > 0) for x in narrow.layers))
        removed = compare(budget_of(dense), budget_of(narrow)).ratio
        if "trisect" in kinds:
            found.append(Variant(kind="trisect", asked=asked, shape=narrow, removed=removed))
        if FACTORED in kinds and removed > 0:
            factored = factored_shape(dense, ratio=removed, align=align)
            really = compare(budget_of(dense), budget_of(factored)).ratio
            found.append(Variant(kind=FACTORED, asked=asked, shape=factored, removed=really))
    return found


def narrow_shape(dense: ModelShape, *, ratio: float, align: int | None) -> ModelShape:
    """The widths that `trisect compress --ratio` plans."""
    return apply_plan(dense, plan_for(dense, CompressConfig(ratio=ratio, align=align, allocate="uniform")))


def factored_shape(dense: ModelShape, *, ratio: float, align: int | None) -> ModelShape:
    """The ranks that `trisect compress --method svd-llm` plans."""
    config = CompressConfig(ratio=ratio, method=FACTORED, align=align, allocate="uniform")
    return apply_plan(dense, linear_plan(dense, config))


def shape_of_widths(dense: ModelShape, text: str) -> ModelShape:
    """Widths written as QK/VO/MLP, the same in every layer."""
    match = WIDTHS.fullmatch(text.strip())
    if match is None:
        raise TrisectError(f"Cannot read the widths {text!r}; write QK/VO/MLP, e.g. --widths 96/96/11008.")
    qk, vo, mlp = map(int, match.groups())
    for layer in dense.layers:
        if not (0 < qk <= layer.qk and 0 < vo <= layer.vo and 0 < mlp <= layer.mlp):
            raise TrisectError(
                f"The widths {text} do not fit the model, whose are {layer.qk}/{layer.vo}/{layer.mlp}; "
                "none may be larger, and none 0."
            )
        if layer.pairs and 2 * layer.pairs == layer.qk and qk % 2:
            raise TrisectError(f"A rotated head has an even width, not {qk}; try {qk - 1}/{vo}/{mlp}.")
    layers = [replace(x, qk=qk, pairs=min(x.pairs, qk // 2), vo=vo, mlp=mlp) for x in dense.layers]
    return replace(dense, layers=tuple(layers))


DEVIATION = 0.02
"""Of random matrices: activations of the usual widths stay within what 16 bits hold."""
RATE_SHIFT = 0.01
"""How far a folded rate is from a frequency of the model, relatively: values matter little, kinds do."""


def build(subject: Subject, variant: Variant, *, device: str, dtype: torch.dtype, seed: int = 0) -> Any:
    """A model of the variant's shape with random weights, in evaluation mode."""
    with init_empty_weights(include_buffers=False):
        # Buffers are real: rotation tables are computed, not filled with noise.
        model = stock_model(subject.config, dtype=dtype, device="cpu")
    if variant.kind != "dense":
        with local_torch_dtype(dtype):  # new layers take the default dtype, as when a checkpoint is loaded
            _narrow(model, variant)
    generator = torch.Generator(device).manual_seed(seed)
    if variant.kind == "trisect":
        for view in layer_views(model):
            _choose_rotations(view, model, generator)
    fill(model, device=device, generator=generator)
    model.eval().requires_grad_(False)
    return model if variant.kind == "dense" else prepare_for_inference(model)


def _narrow(model: Any, variant: Variant) -> None:
    views = layer_views(model, own=True)
    original = [widths_of(view.shape()) for view in views]
    # A slice has the first of the variant's layers.
    for view, layer in zip(views, variant.shape.layers, strict=False):
        view.resize(layer)
    if variant.kind != "owned":
        mark_compressed(model, original=original, method=variant.kind, ratio=variant.removed)


def fill(model: Any, *, device: str, generator: torch.Generator) -> None:
    """Give every parameter random values on `device` (norms: one) and move the buffers there."""
    for path, parameter in [*model.named_parameters()]:
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if parameter.ndim == 1 and path.endswith(".weight"):
            values.fill_(1.0)
        else:
            values.normal_(std=DEVIATION, generator=generator)
        _put(model, path, nn.Parameter(values, requires_grad=False))
    for path, buffer in [*model.named_buffers(remove_duplicate=False)]:
        _put(model, path, buffer.to(device))
    model.tie_weights()


def _put(model: nn.Module, path: str, value: Tensor) -> None:
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, value)


def _choose_rotations(view: LayerView, model: Any, generator: torch.Generator) -> None:
    """Frequencies as a method would have left them: another ascending set for every key head."""
    a = view.attention_module
    if a is None or a.rotary_index is None:
        return
    heads, kept = a.rotary_index.shape
    rotary = getattr(model.get_submodule(view.family.layers.rpartition(".")[0]), "rotary_emb", None)
    available = kept if rotary is None else max(kept, int(rotary.inv_freq.shape[-1]))
    index = random_pairs(heads, kept, available, generator)
    a.rotary_index = index.to(torch.int16)
    if a.rotary_rates is not None:
        rotation = rotation_of(model)
        if rotation is None:
            raise TrisectError("The frequencies of this model change with the length and cannot be folded.")
        rates = rotation.rates.to(index.device)[index].float()
        shift = torch.rand(index.shape, generator=generator, device=index.device)
        a.rotary_rates = stored_rates(rates * (1 + RATE_SHIFT * shift))


def random_pairs(heads: int, kept: int, available: int, generator: torch.Generator) -> Tensor:
    """(heads, kept) different pairs of those available, ascending in each head."""
    order = torch.rand(heads, available, generator=generator, device=generator.device)
    return order.argsort(dim=-1)[:, :kept].sort(dim=-1).values
