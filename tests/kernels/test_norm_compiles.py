"""The norm kernel compiles for a Hopper GPU, which takes no GPU: wide loads and stores."""

import re
from typing import Any

import pytest
import test_kernels_compile as compiling


@pytest.mark.parametrize(("block", "warps"), [(4096, 16), (8192, 16), (2048, 8)])
def test_the_norm_kernel_moves_sixteen_bytes_at_once(monkeypatch: pytest.MonkeyPatch, block: int, warps: int) -> None:
    from trisect.kernels.triton_elementwise import norm_kernel

    monkeypatch.setattr(compiling, "HALVES", {"x", "weight", "out"})
    constants: dict[str, Any] = {"BLOCK": block, "eps": 1e-5}
    code = compiling.ptx(norm_kernel, constants, warps=warps)
    each = block // (32 * warps * 8)
    assert len(re.findall(r"ld\.global\.v4\.b32", code)) == 2 * each
    assert len(re.findall(r"st\.global\.v4\.b32", code)) == each
    assert ".local" not in code
