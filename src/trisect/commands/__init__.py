"""The verbs, one file each. To add one, write `commands/VERB.py` with a function `run`.

Its docstring is the help text; PANEL says where help lists the verb, EXAMPLES what stands below its help.
Every verb gets --config and --verbose by itself (`_verb.py`); one that does work also takes `quiet`.
Files that start with an underscore hold what several verbs share.
Heavy imports (torch, transformers) belong inside functions: `trisect --help` must be fast.
"""
