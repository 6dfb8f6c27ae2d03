"""From a source's name to its text or its token ids."""

from pathlib import Path

from torch import Tensor

from trisect.data import builtin
from trisect.data.catalogue import BUILTIN, DATASETS, DEFAULT_MIXTURE, OWN_WORDS, STOPGAP
from trisect.data.files import KNOWN, read_file
from trisect.data.hub import dataset_text, is_local
from trisect.errors import TrisectError, unknown_name

SPLITS = ("calibration", "evaluation")
OWN_WORDS_DESCRIPTION = "synthetic text, written by the model itself before anything else (docs/sample.md)"


def list_sources() -> list[tuple[str, str]]:
    """Every source by name, with what it is; a path to a file is a source too."""
    return [(name, _described(name)) for name in (BUILTIN, OWN_WORDS, *DATASETS)]


def has_two_parts(name: str) -> bool:
    """Whether a source has an evaluation part of its own; of others a part is held out."""
    return name == BUILTIN or name in DATASETS


def _described(name: str) -> str:
    """What a source is, its licence, how much of it is read, where it is, and whether it is a default."""
    if name == BUILTIN:
        facts = [builtin.DESCRIPTION, builtin.LICENCE, "always here"]
    elif name == OWN_WORDS:
        facts = [OWN_WORDS_DESCRIPTION, "the model's licence"]
    else:
        record = DATASETS[name]
        local = is_local(name)
        facts = [record.description, record.licence, record.amount, "local copy" if local else "from the hub"]
    if name in DEFAULT_MIXTURE:
        facts.append("in the default mixture")
    if name in STOPGAP.split("+"):
        facts.append("the default where no other can be read")
    return "; ".join(facts)


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
    if name == OWN_WORDS:
        raise TrisectError(
            f"{OWN_WORDS} is written by a model that is about to be compressed, and is only calibrated on; "
            "`trisect sample MODEL -o own.jsonl` writes it to a file."
        )
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
