"""Published shapes are those of the checkpoints: sizes, and parameters to the last one."""

import pytest
import torch
from random_models import SHAPES, subject_of_shape

from trisect.errors import TrisectError
from trisect.plan import budget_of

# hidden, heads, key heads, head width, intermediate, layers, vocabulary: from the checkpoints' config.json.
SIZES = {
    "llama-2-13b": (5120, 40, 40, 128, 13824, 40, 32000),
    "llama-3.1-8b": (4096, 32, 8, 128, 14336, 32, 128256),
    "llama-3.2-1b": (2048, 32, 8, 64, 8192, 16, 128256),
    "llama-3.2-3b": (3072, 24, 8, 128, 8192, 28, 128256),
    "qwen3-32b": (5120, 64, 8, 128, 25600, 64, 151936),
    "mpt-7b": (4096, 32, 32, 128, 16384, 32, 50432),
    "phi-3-medium": (5120, 40, 10, 128, 17920, 40, 32064),
}
# What the hub counts in the checkpoints' files.
PARAMETERS = {
    "llama-2-13b": 13_015_864_320,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen3-32b": 32_762_123_264,
    "mpt-7b": 6_649_286_656,
    "phi-3-medium": 13_960_238_080,
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_sizes_and_parameters_of_its_checkpoint(name: str) -> None:
    subject = subject_of_shape(name)
    shape = subject.dense_shape(torch.bfloat16)
    layer = shape.layers[0]
    text = subject.config.get_text_config()
    found = (layer.d_model, layer.heads, layer.kv_heads, layer.qk, layer.mlp, len(shape.layers), text.vocab_size)
    assert found == SIZES[name]
    assert layer.vo == layer.qk
    assert set(shape.layers) == {layer}
    assert budget_of(shape).parameters == PARAMETERS[name]
    assert shape.bytes_per_element == 2


def test_every_shape_of_the_issue_is_there_and_others_are_refused() -> None:
    assert set(SHAPES) == set(SIZES)
    with pytest.raises(TrisectError, match="Did you mean llama-2-13b"):
        subject_of_shape("llama-2-13")


def test_building_a_config_leaves_the_table_alone() -> None:
    subject_of_shape("llama-3.1-8b").config.rope_parameters["factor"] = 1.0
    assert subject_of_shape("llama-3.1-8b").config.rope_parameters["factor"] == 8.0
