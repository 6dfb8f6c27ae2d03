"""Decoding: a loop that rebuilds nothing per token, its fixed cache, and compiled layers."""

from trisect.decode.decoder import Decoder, drawn
from trisect.decode.prepare import prepare_for_inference

__all__ = ["Decoder", "drawn", "prepare_for_inference"]
