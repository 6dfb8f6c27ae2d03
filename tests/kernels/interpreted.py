"""Our Triton kernels on a CPU: fresh copies of their modules, made while Triton's interpreter is on."""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

MODULES = ("triton_rotary", "triton_decode", "triton_elementwise")


@contextmanager
def interpreted() -> Iterator[dict[str, ModuleType]]:
    """The kernels' modules by name. Others in this process may have, or get, compiled ones: those stay."""
    pytest.importorskip("triton")
    from triton.runtime import interpreter, jit

    names = [f"trisect.kernels.{name}" for name in MODULES]
    before = {name: sys.modules.pop(name, None) for name in names}
    switch = os.environ.get("TRITON_INTERPRET")
    patch, call = interpreter._patch_lang_tensor, jit.JITFunction.__call__
    os.environ["TRITON_INTERPRET"] = "1"
    interpreter._patch_lang_tensor = _with_plain_indices(patch)
    jit.JITFunction.__call__ = _interpreted_call
    try:
        yield {name.rpartition(".")[2]: importlib.import_module(name) for name in names}
    finally:
        interpreter._patch_lang_tensor, jit.JITFunction.__call__ = patch, call
        os.environ.pop("TRITON_INTERPRET")
        if switch is not None:
            os.environ["TRITON_INTERPRET"] = switch
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


def _with_plain_indices(patch: Any) -> Any:
    """Triton 3.6 makes integers of arrays with one element, which NumPy 2.4 no longer does by itself."""

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patched


def _interpreted_call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Triton's own helpers (sums, maxima) are compiled ones if it was imported before the switch."""
    from triton.runtime import interpreter

    scope = interpreter._patch_lang(self.fn)
    try:
        return interpreter.InterpretedFunction(self.fn).rewrite()(*args, **kwargs)
    finally:
        scope.restore()
