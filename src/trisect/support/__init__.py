"""Files, clocks, processes and receipts; and here what is replaced for a while, or imported late.

`import trisect` registers compressed checkpoints with transformers: at once where that is imported already, else as
soon as it is.
"""

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__` that imports a module when one of its names is used; `homes` is module -> names."""
    # Looking for a file, or refusing a name, need not wait for torch.
    places = {name: module for module, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{places[name]}"), name)

    return find


@contextmanager
def replaced(*settings: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes have other values inside, each given as (owner, name, value)."""
    before = [getattr(owner, name) for owner, name, _ in settings]
    try:
        for owner, name, value in settings:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(settings, before, strict=True):
            setattr(owner, name, value)


TRANSFORMERS, MODELS = "transformers", "trisect.models.compressed"


def register_with_transformers() -> None:
    """Register now where transformers is there, else as soon as it is."""
    if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())
    if TRANSFORMERS in sys.modules:
        import_module(MODELS)


class _Watch(MetaPathFinder):
    """Finds what the other finders find, and calls `_act` when one of those modules has been executed."""

    sparing = False  # in a command of ours, which needs no optional library of transformers, nor every family
    depth = 0  # modules of `trisect.models` that are being imported, one inside the other

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        ours = fullname.startswith(MODELS.rpartition(".")[0] + ".")
        if not ours and fullname != TRANSFORMERS:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        loader = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                _Watch.depth += ours
                try:
                    execute(module)
                finally:
                    _Watch.depth -= ours
                _act(fullname)

            loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


OPTIONAL = ("is_hqq_available", "is_torchao_available", "is_scipy_available")
"""By which transformers decides whether to import libraries, two of which bring torch's compiler along."""


def spare_imports() -> None:
    """Import less for the rest of this process; a compressed model's family is registered when its config is read."""
    _Watch.sparing = True


def _act(name: str) -> None:
    if _Watch.sparing:
        for test in OPTIONAL if name == TRANSFORMERS else ():
            setattr(sys.modules["transformers.utils"], test, lambda: False)
    elif name == MODELS:
        sys.modules[MODELS].register_families()
    elif TRANSFORMERS in sys.modules and MODELS not in sys.modules and not _Watch.depth:
        import_module(MODELS)


# transformers imports torchao wherever it is installed, which then reports what it could not load.
for name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(name).setLevel(logging.ERROR)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No bars and no notes from transformers inside; errors still come through."""
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with replaced((gguf, "tqdm", lambda entries, **_: entries)):  # which the switch above does not reach
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
