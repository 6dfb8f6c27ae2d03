"""Keeps transformers off the screen while it loads or saves, and leaves its settings as they were."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

# transformers imports torchao wherever it is installed, which then reports what it could not load.
for name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No bars and no notes from transformers inside; errors still come through."""
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    level, bars, loud = logging.get_verbosity(), logging.is_progress_bar_enabled(), gguf.tqdm
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # The one bar that asks nobody: its tqdm is not the one that the switch above governs.
    gguf.tqdm = lambda entries, **_: entries
    try:
        yield
    finally:
        gguf.tqdm = loud
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
