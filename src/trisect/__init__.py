"""trisect: make language models smaller after training, in closed form.

    import trisect
    model = trisect.compress("path/or/name", ratio=0.25)
    trisect.save(model, "out")
    model = trisect.load("out")

Importing trisect also teaches transformers to load compressed folders through AutoModelForCausalLM.
Neither torch nor transformers is imported before something needs it: `trisect --help` must be fast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trisect.support.with_transformers import register_with_transformers

if TYPE_CHECKING:
    from trisect.api import compress, load, save
    from trisect.config import CalibrationConfig, CompressConfig
    from trisect.errors import TrisectError

__all__ = ["CalibrationConfig", "CompressConfig", "TrisectError", "compress", "load", "save"]

_HOMES = {
    "CalibrationConfig": "trisect.config",
    "CompressConfig": "trisect.config",
    "TrisectError": "trisect.errors",
    "compress": "trisect.api",
    "load": "trisect.api",
    "save": "trisect.api",
}

register_with_transformers()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
