"""The kernels compile for a Hopper GPU, which takes no GPU: wide loads, and no registers spilt to memory."""

import re
from typing import Any

import pytest

pytest.importorskip("triton")

POINTERS = {"index": "*i16", "rates": "*i32", "positions": "*i64", "slot": "*i64", "start": "*i64", "counters": "*i32"}
HALVES = {"q", "k", "v", "q_out", "k_out", "cos", "sin", "keys", "values", "out"}
HALVES |= {"x", "weight", "bias", "residual", "gain", "scaled"}


def ptx(kernel: Any, constants: dict[str, Any], *, warps: int, singles: tuple[str, ...] = ()) -> str:
    """PTX for bf16 heads whose rows begin at multiples of 16 elements; `singles` are pointers to float32."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in HALVES or name in POINTERS:
            return POINTERS.get(name, "*bf16")
        return "*fp32" if name in singles else "fp32" if name == "scale" else "i32"

    names = kernel.arg_names
    plain = {"tokens", "length", "window", "scale", "blocks_before"}
    aligned = [i for i, name in enumerate(names) if name not in constants and name not in plain]
    source = ASTSource(
        fn=kernel,
        signature={name: kind(name) for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    return str(compiled.asm["ptx"])


def rotary_constants(pairs: int, **settings: Any) -> dict[str, Any]:
    width = 2 * pairs
    return {
        **dict.fromkeys(("q_h", "k_h", "qo_h", "ko_h"), width),
        **{"GROUP": 1, "PAIRS": pairs, "PAIRS_PAD": 64, "REST": 0, "REST_PAD": 1, "ADJACENT": False},
        **{"INVERSE": False, "ANGLES": 1, "ALIGN": 16, "TOKENS": 2, "HEADS": 8, "KV_HEADS": 40},
        **{"AHEAD": 2, "EARLY": True},
        **settings,
    }


@pytest.mark.parametrize("settings", [{}, {"ADJACENT": True}, {"ANGLES": 0, "GROUP": 3}, {"ANGLES": 2}])
def test_the_rotary_kernel_moves_sixteen_bytes_at_once(settings: dict[str, Any]) -> None:
    from trisect.kernels.triton_rotary import rotate_kernel

    code = ptx(rotate_kernel, rotary_constants(48, **settings), warps=4)
    heads = settings.get("GROUP", 1) + 1
    assert len(re.findall(r"ld\.global\.v4\.b32", code)) >= 2 * heads
    assert len(re.findall(r"st\.global\.v4\.b32", code)) == 2 * heads
    assert not re.search(r"st\.global\.b(16|8)\b", code)
    assert ".local" not in code


@pytest.mark.parametrize("angles", [0, 1, 2])
def test_nothing_moves_from_thread_to_thread_in_the_rotary_kernel(angles: int) -> None:
    """A warp that waits for others asks for less at a time; the barrier behind the heads moves nothing."""
    from trisect.kernels.triton_rotary import rotate_kernel

    code = ptx(rotate_kernel, rotary_constants(48, ANGLES=angles), warps=4)
    assert "st.shared" not in code
    assert "shfl" not in code
    heads, others = code.split("bar.sync")
    assert len(re.findall(r"ld\.global", heads)) == 4
    assert len(re.findall(r"ld\.global", others)) > 2 - (angles == 0)


ATTEND: dict[str, Any] = {
    **{"KV_HEADS": 8, "GROUP": 4, "GROUP_PAD": 16, "QK": 96, "QK_1": 64, "QK_2": 32, "VO": 80, "VO_1": 64, "VO_2": 32},
    **{"PAIRS": 48, "ADJACENT": False, "ANGLES": 1, "SPLITS": 4, "BLOCK": 64, "STAGES": 3, "HAS_START": False},
    **{"AHEAD": 128, "EARLY": True},
}


@pytest.mark.parametrize("settings", [{}, {"GROUP": 1, "ANGLES": 2}, {"QK": 48, "QK_1": 64, "QK_2": 0, "PAIRS": 24}])
def test_the_attention_kernel_uses_tensor_cores_and_copies_ahead(settings: dict[str, Any]) -> None:
    from trisect.kernels.triton_decode import attend_kernel

    code = ptx(attend_kernel, ATTEND | settings, warps=4, singles=("parts", "peaks", "sums"))
    assert "mma.sync" in code
    assert "cp.async.cg.shared.global" in code
    assert "cp.async.ca" not in code  # all of them sixteen bytes
    assert code.index("cp.async.bulk.prefetch.L2") < code.index("griddepcontrol.wait")
    assert ".local" not in code


PRODUCT: dict[str, Any] = {
    **{"N": 4, "K": 512, "STAGES": 5, "EVEN": True, "GATE": False, "BIAS": False, "BEFORE": 1024},
    **{"RESIDUAL": False, "GAIN": False, "EARLY": True, "eps": 1e-5},
}


@pytest.mark.parametrize("settings", [{}, {"GATE": True}, {"BEFORE": 0, "RESIDUAL": True, "GAIN": True}])
def test_the_product_kernel_copies_weights_ahead_sixteen_bytes_at_once(settings: dict[str, Any]) -> None:
    from trisect.kernels.triton_product import product_kernel

    code = ptx(product_kernel, PRODUCT | settings, warps=4, singles=("before", "squares"))
    copies = re.findall(r"cp\.async\.cg\.shared\.global", code)
    each = 4 * 512 // (32 * 4 * 8) * (2 if settings.get("GATE") else 1)
    assert len(copies) == each * 5  # four tiles on their way, and the next one in the loop
    assert ".local" not in code
    assert (
        code.index("griddepcontrol.launch_dependents") < code.index("griddepcontrol.wait") < code.index("cp.async.cg")
    )
