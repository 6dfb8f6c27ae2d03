"""The portable preset. Reference: the list of head widths that kernels know, and what exports need."""

from pathlib import Path

import pytest
import torch
import transformers
from exports import pieces
from hypothesis import given
from hypothesis import strategies as st

from tiny_models import LLAMA, tiny, tokens
from trisect.cli import main
from trisect.config import CompressConfig
from trisect.data import tokens_from_tensor
from trisect.errors import TrisectError
from trisect.export import export_gguf, export_hf
from trisect.pipeline.run import compress
from trisect.plan import plan_for
from trisect.records.shapes import LayerShape, ModelShape

KERNELS = {128: {64, 80, 96, 112, 128}, 64: {32, 48, 64}}
"""Original head width -> the widths that run everywhere, the original one included."""


def shape(width: int) -> ModelShape:
    layer = LayerShape(
        d_model=8 * width, heads=8, kv_heads=2, qk=width, pairs=width // 2, vo=width, mlp=4096, gated=True
    )
    return ModelShape(layers=(layer,) * 3, other_parameters=0, bytes_per_element=2)


@given(
    width=st.sampled_from(sorted(KERNELS)),
    goal=st.one_of(
        st.floats(0.2, 0.55).map(lambda ratio: {"ratio": ratio}),
        st.floats(0.2, 0.5).map(lambda ratio: {"kv_ratio": ratio}),
    ),
    align=st.sampled_from([16, 32]),
)
def test_every_layer_has_one_head_width_that_kernels_know(width: int, goal: dict, align: int) -> None:
    config = CompressConfig(**goal, portable=True, align=align)
    if "kv_ratio" in goal and goal["kv_ratio"] < align / width:  # less than one step of all heads
        with pytest.raises(TrisectError, match="removes nothing"):
            plan_for(shape(width), config)
        return
    plan = plan_for(shape(width), config)
    assert len({(layer.qk, layer.vo, layer.mlp) for layer in plan.layers}) == 1
    layer = plan.layers[0]
    assert layer.qk == layer.vo
    assert layer.qk in KERNELS[width]
    assert layer.mlp % (256 if align == 32 else 128) == 0


def test_the_preset_is_the_same_from_python_from_a_file_and_after_a_round_trip() -> None:
    made = CompressConfig(ratio=0.25, portable=True)
    assert made == CompressConfig.from_dict({"ratio": 0.25, "portable": True})
    assert made == CompressConfig.from_dict(made.to_dict())
    assert (made.rope_scope, made.method, made.allocate, made.align) == ("model", "a3+", "uniform", 16)
    assert [made.floor_of(part) for part in ("qk", "ov", "mlp")] == [0.5, 0.5, 0.0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rope_scope": "head"}, "--rope-scope head was given"),
        ({"method": "a3"}, "means --method a3+"),
        ({"allocate": "balanced"}, "--allocate balanced was given"),
        ({"layers": "1-2"}, "means every layer"),
        ({"drop_experts": True}, "means every expert"),
        ({"align": "8"}, "--align 16 or 32"),
        ({"align": "none"}, "--align none was given"),
        ({"parts": "qk,mlp"}, "qk and ov together"),
        ({"portable": "yes"}, "true or false"),
    ],
)
def test_contradictions_are_refused(settings: dict, said: str) -> None:
    with pytest.raises(TrisectError) as error:
        CompressConfig.from_dict({"ratio": 0.25, "portable": True, **settings})
    assert said in str(error.value)


def test_a_portable_model_is_exported_without_padding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**LLAMA, "head_dim": 64, "intermediate_size": 256})
    dense = transformers.LlamaForCausalLM(config).eval()
    settings = CompressConfig(ratio=0.4, portable=True)
    native = compress(dense, settings, tokens=tokens_from_tensor(tokens(4, 40))).model
    hf = export_hf(native, None, tmp_path / "hf", dtype=torch.float32)
    gguf = export_gguf(native, pieces(), tmp_path / "model.gguf", kind="f32")
    for done in (hf, gguf):
        assert (done.head_width, set(done.mlp_widths)) == (48, {128})
    stock = transformers.AutoModelForCausalLM.from_pretrained(hf.path)
    assert stock.num_parameters() == native.num_parameters()


@pytest.mark.parametrize(
    ("name", "said"), [("gpt2", "no stock form"), ("qwen3", "--parts mlp"), ("helium", "no stock form")]
)
def test_what_could_not_be_exported_is_refused_before_the_work(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny(name).save_pretrained(tmp_path / "dense")
    out = tmp_path / "out"
    assert main(["compress", str(tmp_path / "dense"), "--ratio", "0.3", "--portable", "-o", str(out)]) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()
