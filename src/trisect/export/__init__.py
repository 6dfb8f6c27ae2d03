"""Exports: the compressed model as files that other software reads without trisect."""

from trisect.export.gguf import ExportedFile, export_gguf
from trisect.export.hf import Exported, export_hf

__all__ = ["Exported", "ExportedFile", "export_gguf", "export_hf"]
