"""Decoding: a loop that rebuilds nothing per token, its fixed cache, and compiled layers."""

from trisect.decode.decoder import MODES, Decoder, drawn, likeliest
from trisect.decode.prepare import prepare_for_inference

__all__ = ["MODES", "Decoder", "drawn", "likeliest", "prepare_for_inference"]
