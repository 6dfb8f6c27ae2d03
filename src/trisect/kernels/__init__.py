"""Kernels: rotation and attention as fast as the device allows, each with a plain-torch twin.

Triton is optional and imported only where a GPU runs it.
"""

from trisect.kernels.decoding import wants_decode_kernel
from trisect.kernels.rotary import rotate_qk
from trisect.kernels.switch import choice, has_triton, using

__all__ = [
    "choice",
    "has_triton",
    "rotate_qk",
    "using",
    "wants_decode_kernel",
]
