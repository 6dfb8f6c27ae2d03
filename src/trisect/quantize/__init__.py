"""Fewer bits: weights of dense or compressed models, and their KV caches."""

from trisect.quantize.kv_cache import cache_bytes, quantized_cache
from trisect.quantize.weights import Bits, QuantizeConfig, count_bits, quantize_model

__all__ = ["Bits", "QuantizeConfig", "cache_bytes", "count_bits", "quantize_model", "quantized_cache"]
