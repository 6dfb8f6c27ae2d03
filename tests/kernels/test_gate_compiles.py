"""The gate kernel compiles for a Hopper GPU, which takes no GPU: wide loads, and rounding to the nearest."""

import re
from typing import Any

import pytest
import test_kernels_compile as compiling


def ptx(monkeypatch: pytest.MonkeyPatch, blocks: tuple[int, int, int], **constants: Any) -> str:
    from trisect.kernels.triton_elementwise import gate_kernel

    monkeypatch.setattr(compiling, "HALVES", {"y", "out"})
    rows, columns, warps = blocks
    return compiling.ptx(gate_kernel, {"ROWS": rows, "COLUMNS": columns, **constants}, warps=warps)


@pytest.mark.parametrize("blocks", [(1, 512, 2), (4, 512, 4), (2, 1024, 4)])
def test_the_gate_kernel_moves_sixteen_bytes_at_once(
    monkeypatch: pytest.MonkeyPatch, blocks: tuple[int, int, int]
) -> None:
    code = ptx(monkeypatch, blocks)
    rows, columns, warps = blocks
    each = rows * columns // (32 * warps * 8)
    assert len(re.findall(r"ld\.global\.v4\.b32", code)) == 2 * each
    assert len(re.findall(r"st\.global\.v4\.b32", code)) == each
    assert not re.search(r"(ld|st)\.global\.b(16|8)\b", code)
    assert "cvt.rn.bf16" in code
    assert "st.shared" not in code
    assert ".local" not in code


def test_the_gate_kernel_compiles_for_single_rows_and_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton makes constants of numbers that are one."""
    code = ptx(monkeypatch, (1, 512, 2), rows=1, blocks_per_row=1)
    assert len(re.findall(r"ld\.global\.v4\.b32", code)) == 2
    assert "st.global" in ptx(monkeypatch, (1, 512, 2), width=1)
