"""The verbs, one file each. To add one, write `commands/VERB.py` with a function `run`.

Its docstring is the help text. Files that start with an underscore hold what several verbs share.
Heavy imports (torch, transformers) belong inside functions: `trisect --help` must be fast.
"""
