"""Make a model ready for inference where it stands; its weights keep their names and values."""

from typing import Any

from trisect.decode.gates import fuse_gate
from trisect.decode.norms import fuse_norm
from trisect.models import layer_views


def prepare_for_inference(model: Any) -> Any:
    """Fuse q, k and v, and gate and up, into one product each, and let heads be rotated in place.

    The projections' weights become rows of one matrix, so nothing is stored twice, saving is as before and
    gradients still flow (through the projections one by one). Moving or casting the model undoes it. What is
    done to single numbers, in norms and behind the gate, takes one kernel each instead of several, and that
    stays wherever the model goes.
    """
    for view in layer_views(model):
        view.attention.prepare()
        fuse_gate(view.layer, view.family)
    for module in model.modules():
        fuse_norm(module)
    return model
