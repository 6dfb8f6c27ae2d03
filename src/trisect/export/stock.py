"""A compressed model as the weights of a stock one: one head width, one set of rates, zeros to fill up.

h = query heads, k = key/value heads, D = d_model, p = a head's pairs, n = slots of the stock head
"""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad

from trisect.bundle import source_of
from trisect.config.goals import GOALS
from trisect.errors import TrisectError, option_name
from trisect.models import FAMILIES, WRAPPERS, Family, LayerView, families, family_for, layer_views, linear
from trisect.models.heads import HeadNorm, rotation_of
from trisect.records.parts import MLP, OV, QK
from trisect.records.shapes import LayerShape

SAME = 3e-7  # relative distance within which two rates are one: two units in the last place of float32

NUDGES = range(-4, 5)


class NotPortable(TrisectError):
    """No stock checkpoint can hold this model, though one of the same source, cut with --portable, would fit."""


def common_slots(layers: Sequence[Tensor]) -> Tensor:
    """The fewest slots (n,), fastest first, in which every head of rates (k, p) finds its own."""
    # A head may turn several pairs at one rate (folded frequencies do), and then needs as many such slots.
    kinds = _kinds(torch.cat([rates.flatten() for rates in layers]))
    most: Counter[int] = Counter()
    for rates in layers:
        for head in rates:
            most |= Counter(_kind_of(head, kinds))
    return torch.tensor([rate for kind, rate in enumerate(kinds) for _ in range(most[kind])]).double()


def places_in(rates: Tensor, slots: Tensor) -> Tensor | None:
    """Which slot each pair of `rates` (k, p) takes, (k, p); None where a head finds no room."""
    kinds = _kinds(torch.cat([rates.flatten(), slots]))
    free: dict[int, list[int]] = {}
    for place, kind in enumerate(_kind_of(slots, kinds)):
        free.setdefault(kind, []).append(place)
    found = []
    for head in rates:
        taken: Counter[int] = Counter()
        row = []
        for kind in _kind_of(head, kinds):
            if taken[kind] >= len(free.get(kind, [])):
                return None
            row.append(free[kind][taken[kind]])
            taken[kind] += 1
        found.append(row)
    return torch.tensor(found)


def padded(slots: Tensor, count: int) -> Tensor:
    """More slots, for pairs that are zero everywhere: any rate does, so the slowest is repeated."""
    return torch.cat([slots, slots[-1:].expand(count - len(slots))])


def stock_factors(rates: Tensor, base: float) -> list[float]:
    """Divisors f of the frequencies base^(-2j/2n), so that 1 / (f_j base^(2j/2n)) are the rates (n,)."""
    # Stock code does this in float32; of the neighbouring factors, the one that comes nearest is taken.
    n = len(rates)
    powers = base ** (torch.arange(0, 2 * n, 2, dtype=torch.int64).float() / (2 * n))
    exact = 1 / (rates.double() * powers.double())
    choices = torch.stack([exact * (1 + nudge * 2.0**-24) for nudge in NUDGES]).float()
    errors = (1.0 / (choices * powers) - rates.float()).abs()
    best: list[float] = choices.gather(0, errors.argmin(dim=0, keepdim=True))[0].tolist()
    return best


def listed_rope(factors: list[float], base: float, longest: int) -> dict[str, Any]:
    """Arbitrary frequencies, in the one kind of RoPE that lists a factor for each of them."""
    # Short and long factors are the same and the lengths are equal, so that nothing changes with the length of
    # a text and no engine finds a scale to multiply attention with.
    return {
        "rope_type": "longrope",
        "rope_theta": base,
        "short_factor": factors,
        "long_factor": list(factors),
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": longest,
    }


def _kinds(rates: Tensor) -> list[float]:
    """The distinct rates, fastest first."""
    kinds: list[float] = []
    for rate in rates.double().sort(descending=True).values.tolist():
        if not kinds or rate < kinds[-1] * (1 - SAME):
            kinds.append(rate)
    return kinds


def _kind_of(rates: Tensor, kinds: list[float]) -> list[int]:
    """The number of each rate's kind: the slowest that is not slower than it."""
    rising = torch.tensor(kinds[::-1]).double()
    found = torch.searchsorted(rising, rates.detach().double().cpu())
    return [len(kinds) - 1 - int(index) for index in found]


@dataclass(frozen=True, kw_only=True)
class StockRotation:
    """How the stock model turns, and where each layer's pairs go."""

    pairs: int  # slots of the stock head: half its width
    slots: Tensor | None  # (n,) radians per token; None where the source's own rotation stays
    places: list[Any]  # (k, p) of each layer
    scaling: float  # what the stock table multiplies queries and keys with


def stock_rotation(model: Any, views: list[LayerView], *, baked: bool) -> StockRotation:
    """The source's own rotation if all pairs have a place in it, else one set of rates; or a refusal."""
    shapes = [view.shape() for view in views]
    own = rotation_of(model)
    config = views[0].config  # whose head width the source's own rotation belongs to
    whole = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    if own is None:
        return _changing(views, shapes, whole, baked=baked)
    own_rates, parts = own.rates.float().double().cpu(), [view.read_qk() for view in views]
    layers = [own_rates[qk.frequencies.cpu()] if qk.rates is None else qk.rates.cpu() for qk in parts]
    slots = common_slots(layers)
    room = max(-(-max(shape.qk, shape.vo) // 2) for shape in shapes)
    places = [places_in(rates, own_rates) for rates in layers]
    if 2 * room == whole and all(found is not None for found in places):
        scaling = 1.0 if baked else own.scaling
        return StockRotation(pairs=room, slots=own_rates if baked else None, places=places, scaling=scaling)
    if len(slots) > room:
        stock = f"stock heads of width {2 * room} share one set of {room}"
        instead = "compress with --portable (or --rope-scope model)"
        raise NotPortable(f"Heads turn at {len(slots)} different rates, and {stock}: {instead}.")
    slots = padded(slots, room)
    places = [places_in(rates, slots) for rates in layers]
    return StockRotation(pairs=room, slots=slots, places=places, scaling=1.0)


def _changing(views: list[LayerView], shapes: list[LayerShape], whole: int, *, baked: bool) -> StockRotation:
    """A rotation that changes with the length of the text can stay, but cannot be written as rates."""
    cut = any(getattr(view.attention_module, "rotary_index", None) is not None for view in views)
    if baked or cut or max(max(shape.qk, shape.vo) for shape in shapes) != whole:
        moving = "This model's RoPE changes with the length of the text (dynamic or longrope), which no rates can say"
        raise TrisectError(f"{moving}; compress with --parts mlp, and export --to hf.")
    places = [torch.arange(shape.pairs).expand(shape.kv_heads, -1) for shape in shapes]
    return StockRotation(pairs=whole // 2, slots=None, places=places, scaling=1.0)


LIKE_LLAMA = ("layers", "attention", "qkv", "o", "up", "gate", "down")
UNFUSED = ("phi3",)  # families that become Llama's kind when their fused matrices are taken apart
MIXTURES = ("mixtral", "qwen3_moe", "qwen2_moe", "gpt_oss", "granitemoe")
"""Those whose experts are written under the stock names."""
OURS = ("trisect", "auto_map", "model_type", "architectures", "transformers_version")
WINDOWED = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
FUSED = ("resid_pdrop", "embd_pdrop", "original_max_position_embeddings", "partial_rotary_factor")
"""Settings of Phi-3 that Llama and Mistral do not have."""


def no_stock_form(family: Family) -> str | None:
    """Why a family's stock architecture cannot hold narrow layers; None where it reads its widths from the config."""
    same = (getattr(family, name) == getattr(families.LLAMA, name) for name in LIKE_LLAMA)
    reasons = {
        "it is a text model inside a multimodal one": family.name in WRAPPERS,
        "its layers differ in head width and share keys": family.lends_keys,
        "it rotates adjacent channels at frequencies that its config cannot list": family.rotary == "adjacent",
        "its experts are not written under stock names yet": family.experts and family.name not in MIXTURES,
        "it has layers of another kind (Mamba, convolutions, linear attention)": family.mixer or family.beside,
        "its queries, keys and values are made of latents": family.latent,
        "it is not of the Llama kind: rotated, gated, with one norm type": (
            family.rotary is None or family.output_gate or not (family.name in UNFUSED or all(same))
        ),
        "its config states no head width": not family.reads_head_dim,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def check_exportable(model: Any, parts: tuple[str, ...] = ()) -> None:
    """Refuse what no stock architecture can hold, now or with these parts cut: before anything is computed."""
    check_family(family_for(model.config), parts)
    for view in layer_views(model):
        if any(isinstance(module, linear.QuantizedLinear) for module in view.layer.modules()):
            instead = "export the folder it was made from, with --to gguf --dtype q8_0 or to an engine that quantises"
            raise TrisectError(f"Layer {view.index} is quantised: {instead}.")
        shape, name = view.shape(), view.family.name
        if shape.dropped_experts:
            fewer = f"Layer {view.index} has lost {shape.dropped_experts} experts, and stock layers have as many each"
            raise NotPortable(f"{fewer}: compress again without --drop-experts, or with --portable.")
        if shape.linears:
            two = f"Layer {view.index}: {shape.linears[0].name} is two matrices, and a stock layer has one"
            raise NotPortable(f"{two}; compress with a method that narrows: --method a3+ --portable.")
        if shape.pairs and 2 * shape.pairs != shape.qk:
            stock = f"stock {name} code rotates all; load the folder itself with `import trisect`"
            some = f"only {2 * shape.pairs} of {shape.qk} query channels rotate"
            raise TrisectError(f"Layer {view.index}: {some}, and {stock}.")
        if any(isinstance(norm, HeadNorm) for norm in view.norms):
            raise _norm_refusal(name)


def check_family(family: Family, parts: tuple[str, ...] = ()) -> None:
    """Refuse a family that no stock architecture can hold, with these parts cut."""
    reason = no_stock_form(family)
    if reason is not None:
        known = ", ".join(name for name, record in FAMILIES.items() if no_stock_form(record) is None)
        what = f"A compressed {family.name} model has no stock form: {reason}. What can be exported is {known}"
        raise TrisectError(f"{what}; load this folder itself, with `import trisect` and AutoModelForCausalLM.")
    if "qk" in parts and family.norms is not None:
        raise _norm_refusal(family.name)


def _norm_refusal(name: str) -> NotPortable:
    norm = f"{name} has one norm of queries and keys for all heads, and narrow heads need one each"
    return NotPortable(f"{norm}: compress with --parts mlp, or ov,mlp (values are padded to the old width).")


def portable_command(model: Any, receipt: Mapping[str, Any], folder: str) -> str:
    """The command line that makes the nearest model that can be exported: the same goal and texts."""
    recipe = receipt.get("recipe") or {}
    text = recipe.get("calibration") or {}
    given = {name: recipe.get(name) for name in GOALS} | {"calibration": text.get("source")}
    given |= {name: text.get(name) for name in ("samples", "length")}
    given["drop_layers"] = recipe.get("drop_layers") or None
    given["parts"] = None if family_for(model.config).norms is None else "mlp"
    options = [word for name in given if given[name] is not None for word in (option_name(name), str(given[name]))]
    source = source_of(receipt) or "MODEL"
    return shlex.join(["trisect", "compress", source, "-o", f"{folder.rstrip('/')}-portable", "--portable", *options])


def plain_config(source: Any, changes: dict[str, Any]) -> Any:
    """A stock config with nothing of trisect in it."""
    values = {key: value for key, value in source.to_dict().items() if key not in OURS} | changes
    family = family_for(source)
    if family.name == "phi3":  # with its fused matrices taken apart it is Llama, or Mistral where it has a window
        values = {key: value for key, value in values.items() if key not in FUSED}
        rope = values["rope_parameters"]
        values["rope_parameters"] = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
        window = values.pop("sliding_window", None)
        llama, mistral = transformers.LlamaConfig, transformers.MistralConfig
        return llama(**values) if window is None else mistral(**values, sliding_window=window)
    narrow = values["head_dim"] * values["num_attention_heads"] != values["hidden_size"]
    if family.name == "qwen2" and narrow and "sliding_attention" not in values["layer_types"]:
        # Under Llama's name: not every engine reads the head width of a Qwen2, and all read Llama's.
        values = {key: value for key, value in values.items() if key not in WINDOWED}
        return transformers.LlamaConfig(**{**values, "attention_bias": True})
    return getattr(transformers, family.model).config_class(**values)


@dataclass(frozen=True, kw_only=True)
class Stock:
    """Everything that a stock checkpoint needs beside the config it started from."""

    head_width: int
    mlp_widths: tuple[int, ...]
    """What each layer's MLP, or each of its experts, needs; `tensors` are padded to the widest of either kind."""
    widths: dict[str, int]  # the config's names for the widths -> what `tensors` are padded to
    rates: Tensor | None  # (n,) radians per token of the head's slots; None where the source's own rotation stays
    tensors: dict[str, Tensor]  # names of the stock model -> weights
    mixtures: frozenset[int] = frozenset()  # layers that have experts
    experts: int = 0  # how many each of them has


@torch.no_grad()
def stock_weights(model: Any, *, baked: bool = False) -> Stock:
    """The same function as weights of the stock class."""
    # `baked` lists the rates even where the source's own rotation could stay, and folds its scaling in.
    check_exportable(model)
    views = layer_views(model)
    rotation, own = stock_rotation(model, views, baked=baked), rotation_of(model)
    pairs = rotation.pairs
    # Embeddings, norms and the head keep the names they have.
    inside, state = (".self_attn.", ".mlp."), model.state_dict()
    tensors = {name: x for name, x in state.items() if not any(part in name for part in inside)}
    widths = _padded_widths(views)
    for view, places in zip(views, rotation.places, strict=True):
        prefix = f"{view.family.layers}.{view.index}"
        shape = view.shape()
        # What the source's table multiplies queries and keys with, on top of turning them (yarn).
        turned = 1.0 if shape.folded or own is None else own.scaling
        stated = view.family.states_scale
        scale = 1.0 if stated else getattr(view.attention_module, view.family.scale) * (2 * pairs) ** 0.5
        if shape.pairs:  # a layer that does not rotate never meets the table
            scale *= (turned / rotation.scaling) ** 2
        found = _norms(view, scale)
        found |= _qk(view.read_qk(), places, pairs, 1.0 if found else scale)
        found |= _ov(view.read_ov(), 2 * pairs) | _mlps(view, widths)
        if view.family.sinks is not None:
            found[f"self_attn.{view.family.sinks}"] = view.attention_module.get_parameter(view.family.sinks).detach()
        tensors |= {f"{prefix}.{name}": tensor.contiguous() for name, tensor in found.items()}
    return Stock(
        head_width=2 * pairs,
        mlp_widths=tuple(view.shape().mlp for view in views),
        widths=widths,
        rates=rotation.slots,
        tensors=tensors,
        mixtures=frozenset(view.index for view in views if view.experts is not None),
        experts=max(view.shape().experts for view in views),
    )


def _padded_widths(views: list[LayerView]) -> dict[str, int]:
    """The widest MLP, the widest expert and the shared expert beside it, by the config's names for them."""
    widths: dict[str, int] = {}
    for view in views:
        shape, paths = view.shape(), None if view.experts is None else view.experts.paths
        needed = {"intermediate_size" if paths is None else paths.width: shape.mlp}
        if paths is not None and paths.shared_width is not None and shape.shared:
            needed[paths.shared_width] = shape.shared * shape.mlp
        widths |= {name: max(width, widths.get(name, 0)) for name, width in needed.items()}
    return widths


def _norms(view: LayerView, scale: float) -> dict[str, Tensor]:
    """Norms between projection and rotation: what stands before them cannot carry the scale."""
    if not view.norms or view.family.norms is None:
        return {}
    (q_norm, k_norm), more = view.family.norms, view.family.norm_offset
    q, k = (norm.get_parameter("weight").detach() for norm in view.norms)
    return {f"self_attn.{q_norm}.weight": (q + more) * scale - more, f"self_attn.{k_norm}.weight": k}


def _qk(part: QK, places: Tensor, n: int, scale: float) -> dict[str, Tensor]:
    W_q, b_q = (None if x is None else x * scale for x in (part.W_q, part.b_q))
    assert W_q is not None
    of_query = places.repeat_interleave(part.group, dim=0)
    maps = {"q_proj": (W_q, b_q, of_query), "k_proj": (part.W_k, part.b_k, places)}
    found = {}
    for name, (W, b, where) in maps.items():
        found[f"self_attn.{name}.weight"] = _spread(W, where, n).movedim(-1, 1).flatten(0, 1)  # (h 2n, D)
        if b is not None:
            found[f"self_attn.{name}.bias"] = _spread(b.unsqueeze(1), where, n).flatten()
    return found


def _spread(x: Tensor, places: Tensor, n: int) -> Tensor:
    """Channels (h, ., 2p) into the places (h, p) of n slots, first halves and second halves alike."""
    # Without pairs (p = 0) nothing turns, and zeros go behind whatever channels there are.
    if places.shape[-1] == 0:
        return pad(x, (0, 2 * n - x.shape[-1]))
    out = x.new_zeros(*x.shape[:-1], 2 * n)
    where = torch.cat([places, n + places], dim=-1).to(x.device)
    return out.scatter(-1, where.unsqueeze(1).expand_as(x), x)


def _ov(part: OV, width: int) -> dict[str, Tensor]:
    part = linear.resized(part, width)
    W_o = part.W_o.expand(part.heads, -1, -1)  # one shared by all heads is repeated for each
    weights = {"v_proj.weight": part.W_v.mT.flatten(0, 1), "o_proj.weight": W_o.flatten(0, 1).T}
    found = {**weights, "v_proj.bias": None if part.b_v is None else part.b_v.flatten(), "o_proj.bias": part.b_o}
    return {f"self_attn.{name}": tensor for name, tensor in found.items() if tensor is not None}


def _mlps(view: LayerView, widths: dict[str, int]) -> dict[str, Tensor]:
    """The MLP of a layer, or its experts with all that stands around them."""
    part = view.read_mlp()
    if isinstance(part, MLP):
        return _named(view.family.up.rpartition(".")[0], _mlp(linear.resized(part, widths["intermediate_size"])))
    assert view.experts is not None
    paths = view.experts.paths
    block = paths.routed.rpartition(".")[0]
    found = {name: tensor for name, tensor in view.layer.state_dict().items() if name.startswith(f"{block}.")}
    routed = tuple(linear.resized(mlp, widths[paths.width]) for mlp in part.routed)
    found |= _named(paths.routed, view.experts.stored(replace(part, routed=routed)))
    if part.shared is not None:
        assert paths.shared is not None
        wide = part.shared.width // part.width * widths[paths.width]
        found |= _named(paths.shared, _mlp(linear.resized(part.shared, wide)))
    return found


def _named(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def _mlp(part: MLP) -> dict[str, Tensor]:
    maps = {name: linear.as_maps(part)[name] for name in ("up", "gate", "down")}  # in the order of files
    found = {f"{name}_proj.weight": W.T for name, (W, _) in maps.items()}
    return found | {f"{name}_proj.bias": b for name, (_, b) in maps.items() if b is not None}
