"""Fewer bits: weights of dense or compressed models, and their KV caches."""

from trisect.quantize.count import Bits, count_bits
from trisect.quantize.kv_cache import cache_bytes, quantized_cache
from trisect.quantize.weights import QuantizeConfig, quantize_model

__all__ = ["Bits", "QuantizeConfig", "cache_bytes", "count_bits", "quantize_model", "quantized_cache"]
