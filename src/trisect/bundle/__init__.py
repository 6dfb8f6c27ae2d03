"""What a saved folder brings along for people without trisect: a modelling file and a model card."""

from trisect.bundle.card import write_card
from trisect.bundle.modeling_file import MODULE, bundle_text, write_bundle

__all__ = ["MODULE", "bundle_text", "write_bundle", "write_card"]
