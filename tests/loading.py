"""Modules that are no part of a package, by their files."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def module_at(path: Path) -> ModuleType:
    """The module in a file, made anew every time."""
    # It can be imported by its name: what it leaves with transformers is compiled by other tests, which look there.
    spec = importlib.util.spec_from_file_location(f"{path.stem}_{len(sys.modules)}", path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
