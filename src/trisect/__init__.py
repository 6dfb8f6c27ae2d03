"""trisect: make language models smaller after training, in closed form.

    import trisect
    model = trisect.compress("path/or/name", ratio=0.25)
    trisect.save(model, "out")
    model = trisect.load("out")

Importing trisect also teaches transformers to load compressed folders through AutoModelForCausalLM.
Neither torch nor transformers is imported before something needs it: `trisect --help` must be fast.
"""

from typing import TYPE_CHECKING

from trisect.support import lazily, register_with_transformers

if TYPE_CHECKING:
    from trisect.api import compress, load, save
    from trisect.config import CalibrationConfig, CompressConfig
    from trisect.errors import TrisectError

__all__ = ["CalibrationConfig", "CompressConfig", "TrisectError", "compress", "load", "save"]

__getattr__ = lazily(
    __name__, {"config": "CalibrationConfig CompressConfig", "errors": "TrisectError", "api": "compress load save"}
)
register_with_transformers()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
