"""Read a file as documents or as token ids. The suffix decides; nothing is ever unpickled."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trisect.errors import TrisectError

TEXT_FIELDS = ("text", "content", "story", "sentence")
ID_SUFFIXES = (".safetensors", ".npy")
ID_KEYS = ("input_ids", "tokens")
PICKLES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt")
KNOWN = "text (.txt, .md, ...), .jsonl, .json, .parquet, or token ids in .safetensors or .npy"


def read_file(path: Path) -> list[str] | Tensor:
    """Documents of a text file, or token ids, (n,) or (n, length), of a .safetensors or .npy."""
    suffix = path.suffix.lower()
    if suffix in PICKLES:
        raise TrisectError(
            f"{path} is a pickle, which can run code when opened, so trisect does not open it: "
            "save the ids with safetensors.torch.save_file({'input_ids': ids}, 'ids.safetensors')."
        )
    try:
        return read_ids(path) if suffix in ID_SUFFIXES else read_documents(path)
    except OSError as error:
        raise TrisectError(f"{path} cannot be read ({error.strerror or error}).") from error


def read_documents(path: Path, *, fields: Sequence[str] = TEXT_FIELDS) -> list[str]:
    """Texts of a .jsonl, .json or .parquet file; any other file is one UTF-8 document."""
    match path.suffix.lower():
        case ".jsonl" | ".json":
            return [_text_of(entry, where=where, fields=fields) for where, entry in json_entries(path)]
        case ".parquet":
            return _parquet(path, fields=fields)
        case _:
            return [read_text(path)]


def read_ids(path: Path) -> Tensor:
    """Token ids, (n,) or (n, length), from a .safetensors (input_ids or tokens) or .npy file."""
    ids = _npy(path) if path.suffix.lower() == ".npy" else _safetensors(path)
    if ids.ndim not in (1, 2) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise TrisectError(
            f"{path} holds {ids.dtype} of shape {tuple(ids.shape)}; token ids are integers of "
            "shape (tokens,) or (windows, length)."
        )
    return ids.to(torch.int64)


def read_text(path: Path) -> str:
    """A file as UTF-8 text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TrisectError(f"{path} is not UTF-8 text (byte {error.start}). trisect reads {KNOWN}.") from error
    except OSError as error:
        raise TrisectError(f"{path} cannot be read ({error.strerror or error}).") from error


def json_entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Each entry of a JSON list or of a file of lines, with its place.

    C4 and others call a file of lines .json, so the content decides, not the name.
    """
    text = read_text(path)
    if text.lstrip().startswith("["):
        entries = _parsed(text, where=str(path), lines=True)
        yield from ((f"{path}, entry {number}", entry) for number, entry in enumerate(entries, start=1))
        return
    # Not splitlines(): JSON strings may hold U+2028 and its kin raw, which splitlines() would cut.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path}, line {number}", _parsed(line, where=f"{path}, line {number}")


def _parsed(text: str, *, where: str, lines: bool = False) -> Any:
    """JSON, or an error that says where; with `lines`, also the line inside a text of several."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"{where}, line {error.lineno}" if lines else where
        raise TrisectError(
            f"{place}: not JSON ({error.msg}, column {error.colno}). A .jsonl file has one object per "
            'line, such as {"text": "..."}; rename plain text to .txt.'
        ) from error
    except (ValueError, RecursionError) as error:
        raise TrisectError(f"{where}: JSON that cannot be read ({str(error)[:100]}).") from error


def _parquet(path: Path, *, fields: Sequence[str]) -> list[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, ValueError) as error:
        raise TrisectError(f"{path} is not a Parquet file ({error}).") from error
    with file:
        field = _field(file.schema_arrow.names, where=str(path), fields=fields)
        return [_string(text, where=str(path)) for text in file.read([field])[field].to_pylist()]


def _text_of(entry: Any, *, where: str, fields: Sequence[str]) -> str:
    if not isinstance(entry, dict):
        return _string(entry, where=where)
    return _string(entry[_field(entry, where=where, fields=fields)], where=where)


def _field(present: Iterable[str], *, where: str, fields: Sequence[str]) -> str:
    names = list(present)
    for field in fields:
        if field in names:
            return field
    raise TrisectError(
        f"{where}: no field with text; found {', '.join(map(str, names)) or 'none'}, "
        f"need one of {', '.join(fields)}. Rename the field, or write plain text to a .txt file."
    )


def _string(value: Any, *, where: str) -> str:
    if isinstance(value, str):
        if any("\ud800" <= letter <= "\udfff" for letter in value):
            raise TrisectError(f"{where}: the text holds half a letter (a lone surrogate); mend the file.")
        return value
    raise TrisectError(
        f"{where}: the text is {type(value).__name__}, not a string. "
        f"Give objects with one of the fields {', '.join(TEXT_FIELDS)}, or plain strings."
    )


def _npy(path: Path) -> Tensor:
    import numpy

    try:
        return torch.from_numpy(numpy.load(path, allow_pickle=False))
    except Exception as error:  # its reader of headers raises what it runs into
        raise TrisectError(
            f"{path} is not a plain array of integers ({error}). Write it with "
            "numpy.save(path, ids) from an int64 array."
        ) from error


def _safetensors(path: Path) -> Tensor:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            for key in ID_KEYS:
                if key in file.keys():  # noqa: SIM118, safe_open is no mapping
                    return file.get_tensor(key)
            found = ", ".join(sorted(file.keys())) or "none"
    except SafetensorError as error:
        raise TrisectError(f"{path} is not a safetensors file ({error}).") from error
    raise TrisectError(f"{path} has the tensors {found}; token ids are looked for under {' or '.join(ID_KEYS)}.")
