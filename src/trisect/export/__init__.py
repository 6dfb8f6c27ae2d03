"""Exports: the compressed model as files that other software reads without trisect."""

from trisect.export.check import Exported
from trisect.export.gguf import export_gguf
from trisect.export.hf import export_hf

__all__ = ["Exported", "export_gguf", "export_hf"]
