"""Exports: the compressed model as files that other software reads without trisect."""

from trisect.export.gguf import export_gguf
from trisect.export.hf import Exported, export_hf
from trisect.export.publish import export_arena, upload
from trisect.export.stock import NotPortable, portable_command

__all__ = ["Exported", "NotPortable", "export_arena", "export_gguf", "export_hf", "portable_command", "upload"]
