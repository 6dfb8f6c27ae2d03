"""Keeps other libraries' notes about kernels that this machine lacks off the screen; imported first."""

import logging

# transformers imports torchao wherever it is installed, which then reports what it could not load.
for name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(name).setLevel(logging.ERROR)
