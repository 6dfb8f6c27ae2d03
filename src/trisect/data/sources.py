"""From a source's name to its text or its token ids."""

from pathlib import Path

from torch import Tensor

from trisect.data import builtin
from trisect.data.files import KNOWN, read_file
from trisect.data.hub import DATASETS, dataset_text
from trisect.errors import TrisectError, unknown_name

BUILTIN = "builtin"
SPLITS = ("calibration", "evaluation")


def list_sources() -> list[tuple[str, str]]:
    """Every source by name, with what it is; a path to a file is a source too."""
    described = [(name, record.description) for name, record in DATASETS.items()]
    return [(BUILTIN, builtin.DESCRIPTION), *described]


def read_source(name: str, *, split: str) -> str | Tensor:
    """Text of a named source or file, or token ids, (n,) or (n, length), of a file that holds ids.

    A file is read whole, whatever the split: two files keep calibration and evaluation apart.
    """
    if split not in SPLITS:
        raise unknown_name("split", split, SPLITS)
    if name == BUILTIN:
        return "\n\n".join(builtin.builtin_documents(split=split))
    if name in DATASETS:
        return dataset_text(name, split=split)
    path = _existing_file(name)
    content = read_file(path)
    return content if isinstance(content, Tensor) else "\n\n".join(content)


def _existing_file(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise TrisectError(f"{name} is a folder; give one file: {KNOWN}.")
    if path.suffix or len(path.parts) > 1:
        raise TrisectError(
            f"There is no file {name} (looked from {Path.cwd()}). Give an existing file, or one of "
            f"{', '.join(known for known, _ in list_sources())}."
        )
    known = [known for known, _ in list_sources()]
    raise unknown_name("data source", name, known, hint="A path to a text file works too.")
