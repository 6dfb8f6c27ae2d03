"""Kernels: rotation and attention as fast as the device allows, each with a plain-torch twin.

Triton is optional and imported only where a GPU runs it.
"""

from trisect.kernels.decoding import wants_decode_kernel
from trisect.kernels.operators import choice, has_triton, using
from trisect.kernels.rotary import rotate_qk

__all__ = ["choice", "has_triton", "rotate_qk", "using", "wants_decode_kernel"]
