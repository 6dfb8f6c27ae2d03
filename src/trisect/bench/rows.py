"""Rows of measurements in one file, written after every row, so that a run can be broken off and resumed."""

import csv
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trisect.errors import TrisectError
from trisect.support.files import atomic_write_text, write_json

FORMAT = 1
PHASES = ("prefill", "decode")
MODES = ("plain", "graphs", "compile")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one row is about: rows with equal cases measure the same."""

    subject: str
    kind: str
    asked: str
    widths: str
    folded: bool
    phase: str
    attention: str
    mode: str
    batch: int
    length: int
    """Tokens of the prompt."""
    new: int
    """Tokens decoded; 0 for prefill."""
    layers: int
    """Layers that ran."""
    of_layers: int
    """Layers of the whole model."""
    dtype: str
    device: str

    def baseline(self) -> "tuple[Any, ...]":
        """What the dense row to compare with has in common with this one."""
        own = ("kind", "asked", "widths", "folded")
        return tuple(value for name, value in asdict(self).items() if name not in own)

    def describe(self) -> str:
        """For progress and errors."""
        cut = f" {self.asked}" if self.asked else ""
        new = f"+{self.new}" if self.new else ""
        size = f"{self.batch} x {self.length}{new}"
        return f"{self.subject} {self.kind}{cut}, {self.phase} {size}, {self.attention}, {self.mode}"


@dataclass(kw_only=True)
class Rows:
    """The rows of one file, or of nothing but memory."""

    path: Path | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    receipts: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path | None) -> "Rows":
        """The rows of a file; none where it is not there yet."""
        if path is None or not path.exists():
            return cls(path=path)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']!r}, this version reads {FORMAT}")
            for row in data["rows"]:
                Case(**row["case"])
            return cls(path=path, rows=list(data["rows"]), receipts=list(data["receipts"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TrisectError(
                f"{path} does not hold rows of `trisect bench`: {error!r}; name another folder with -o."
            ) from error

    def begin(self, receipt: Mapping[str, Any]) -> None:
        """What follows was measured under this receipt."""
        self.receipts.append(dict(receipt))

    def done(self, case: Case, *, keep_errors: bool = False) -> bool:
        """Whether a case needs no measuring: it has a row, and one without an error unless those count."""
        row = self.find(case)
        return row is not None and (keep_errors or "error" not in row)

    def find(self, case: Case) -> dict[str, Any] | None:
        wanted = asdict(case)
        return next((row for row in self.rows if row["case"] == wanted), None)

    def add(self, case: Case, measured: Mapping[str, Any]) -> dict[str, Any]:
        """Put a row in, in place of an earlier one of the same case, and write the file."""
        row = {"case": asdict(case), **measured, "receipt": len(self.receipts) - 1}
        self.rows = [old for old in self.rows if old["case"] != row["case"]] + [row]
        self.write()
        return row

    def write(self) -> None:
        if self.path is not None:
            write_json(self.path, self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "receipts": self.receipts, "rows": self.rows}


def to_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """One line per row, nested values in columns of their own (`times.p50`)."""
    flat = [_flat(row) for row in rows]
    columns = list(dict.fromkeys(name for row in flat for name in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    atomic_write_text(path, to_csv(rows))


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, entry in value.items():
        if isinstance(entry, Mapping):
            found |= _flat(entry, "" if name == "case" else f"{prefix}{name}.")
        else:
            found[prefix + name] = entry
    return found
