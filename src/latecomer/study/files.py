"""The growing files of a run: events.jsonl and metrics.csv, which a resume cuts back."""

import csv
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from latecomer.core.messages import Note
from latecomer.errors import BadInput


class GrowingFile:
    """A text file that is only appended to, and can be cut back to an earlier length."""

    def __init__(self, path: Path, keep: int = 0) -> None:
        """Keep the first `keep` bytes of what is there, and go on from them."""
        path.touch()
        if path.stat().st_size < keep:
            raise BadInput(f"{path}: the checkpoint knows {keep} bytes of it, and some are gone")
        os.truncate(path, keep)
        self._file = path.open("a", encoding="utf-8", newline="")

    def write(self, text: str) -> None:
        self._file.write(text)

    def length(self) -> int:
        """Bytes written so far, all of them on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class EventLog:
    """One JSON object per event."""

    def __init__(self, path: Path, keep: int = 0) -> None:
        self.file = GrowingFile(path, keep)

    def write(self, time: float, note: Note) -> None:
        line = {"time": round(time, 6), "event": note.kind, **note.fields}
        self.file.write(json.dumps(line, separators=(",", ":")) + "\n")


class Table:
    """A CSV file with fixed columns, one row at a time."""

    def __init__(self, path: Path, columns: Sequence[str], keep: int = 0) -> None:
        self.file = GrowingFile(path, keep)
        self._writer = csv.DictWriter(self.file, columns, lineterminator="\n")
        if not keep:
            self._writer.writeheader()

    def write(self, row: Mapping[str, Any]) -> None:
        self._writer.writerow(row)
        self.file.flush()


def write_atomically(path: Path, text: str) -> None:
    """The whole file or the old one, never half of it."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
