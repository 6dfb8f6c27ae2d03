"""Bits that a model really takes: packed weights with their scales and zeros, counted from its tensors."""

from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

from trisect.models import layer_views, original_shape, shape_of
from trisect.models.quantized import QuantizedLinear
from trisect.plan import budget_of


@dataclass(frozen=True, kw_only=True)
class Bits:
    """What a model takes, and what that comes to per weight."""

    decoder_bytes: int
    """All matrices of the decoder layers, quantised or not, with scales and zeros; no biases."""
    decoder_weights: int
    original_decoder_weights: int
    """Before any compression."""
    model_bytes: int
    """Every tensor that is saved, embeddings and norms included."""
    parameters: int

    @property
    def per_weight(self) -> float:
        return 8 * self.decoder_bytes / self.decoder_weights

    @property
    def per_original_weight(self) -> float:
        """Compression and quantisation together: what one weight of the dense decoder costs."""
        return 8 * self.decoder_bytes / self.original_decoder_weights

    @property
    def per_parameter(self) -> float:
        """Of the whole model, embeddings included."""
        return 8 * self.model_bytes / self.parameters

    def to_dict(self) -> dict[str, Any]:
        """Counts and quotients, ready for JSON."""
        return {
            **asdict(self),
            "per_weight": self.per_weight,
            "per_original_weight": self.per_original_weight,
            "per_parameter": self.per_parameter,
        }


def count_bits(model: Any) -> Bits:
    """Count a model as it stands, quantised or not."""
    now, before = budget_of(shape_of(model)), budget_of(original_shape(model))
    maps = [view.module(name) for view in layer_views(model) for name in view.linears()]
    # By id, because a fused matrix is the module of several maps.
    matrices = {id(x): x for module in maps for part in module.modules() for x in _matrices(part)}
    return Bits(
        decoder_bytes=sum(map(_bytes, matrices.values())),
        decoder_weights=now.linear_parameters,
        original_decoder_weights=before.linear_parameters,
        model_bytes=saved_bytes(model),
        parameters=now.parameters + _head_weights(model),
    )


def saved_bytes(model: nn.Module) -> int:
    """Bytes of the tensors that a folder holds; what is shared is saved once."""
    tensors = {(t.data_ptr(), t.shape): t for t in model.state_dict().values()}
    return sum(map(_bytes, tensors.values()))


def _matrices(module: nn.Module) -> list[Tensor]:
    """The tensors that stand for a module's own weight."""
    if isinstance(module, QuantizedLinear):
        return [module.packed, module.scale, *([] if module.zero is None else [module.zero])]
    weight = getattr(module, "weight", None)
    return [weight] if isinstance(weight, Tensor) else []


def _head_weights(model: Any) -> int:
    """Weights of a quantised head: they are no parameters, so that nobody else counted them."""
    head = model.get_output_embeddings()
    return head.in_features * head.out_features if isinstance(head, QuantizedLinear) else 0


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
