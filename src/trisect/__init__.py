"""trisect: make language models smaller after training, in closed form.

    import trisect
    model = trisect.compress("path/or/name", ratio=0.25)
    trisect.save(model, "out")
    model = trisect.load("out")

Importing trisect also teaches transformers to load compressed folders through AutoModelForCausalLM.
"""

from trisect import _quiet  # noqa: F401
from trisect.api import compress, load, save
from trisect.config import CalibrationConfig, CompressConfig
from trisect.errors import TrisectError
from trisect.models import register

register()

__all__ = ["CalibrationConfig", "CompressConfig", "TrisectError", "compress", "load", "save"]
