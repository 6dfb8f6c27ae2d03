"""Token batches for calibration and evaluation, and models from the package registry."""

from typing import TYPE_CHECKING

from trisect.support import lazily

if TYPE_CHECKING:
    from trisect.data.catalogue import REGISTRY_MODELS, fetch_model
    from trisect.data.load import evaluation_tokens, list_sources, load_tokens
    from trisect.data.tokens import TEST_SHARE, Tokens, content_hash, tokens_from_tensor, windows

_HOMES = {"catalogue": "REGISTRY_MODELS fetch_model", "load": "evaluation_tokens list_sources load_tokens"}
_HOMES["tokens"] = "TEST_SHARE Tokens content_hash tokens_from_tensor windows"
__getattr__ = lazily(__name__, _HOMES)
