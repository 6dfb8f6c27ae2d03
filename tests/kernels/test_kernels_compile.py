"""The kernels compile for a Hopper GPU, which takes no GPU: wide loads, and no registers spilt to memory."""

import re
from typing import Any

import pytest

pytest.importorskip("triton")

POINTERS = {"index": "*i16", "rates": "*i32", "positions": "*i64", "slot": "*i64", "start": "*i64", "stop": "*i64"}
HALVES = {"q", "k", "v", "q_out", "k_out", "cos", "sin", "keys", "values"}


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
    plain = {"tokens", "length", "window", "scale"}
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


def test_the_attention_kernel_uses_tensor_cores_and_copies_ahead() -> None:
    from trisect.kernels.triton_decode import attend_kernel

    constants = {
        **{"KV_HEADS": 8, "GROUP": 4, "GROUP_PAD": 16, "QK": 96, "QK_PAD": 128, "VO": 80, "VO_PAD": 128},
        **{"SPLITS": 4, "BLOCK": 64, "STAGES": 3, "HAS_START": False},
    }
    code = ptx(attend_kernel, constants, warps=4, singles=("out", "peaks", "sums"))
    assert "mma.sync" in code
    assert "cp.async" in code
    assert ".local" not in code


def test_the_write_kernel_compiles() -> None:
    from trisect.kernels.triton_decode import write_kernel

    constants = {
        **dict.fromkeys(("q_h", "k_h", "v_h"), 96),
        **{"GROUP": 1, "PAIRS": 48, "PAIRS_PAD": 64, "REST": 0, "REST_PAD": 1, "VO": 96, "VO_PAD": 128},
        **{"ADJACENT": False, "ANGLES": 1},
    }
    assert ".local" not in ptx(write_kernel, constants, warps=1)
