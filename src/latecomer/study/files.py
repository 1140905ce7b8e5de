"""Append-only files of a run (events.jsonl, metrics.csv), which a resume truncates."""

import csv
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from latecomer.core.messages import MAIN
from latecomer.core.outcomes import Logged
from latecomer.core.server import Server
from latecomer.device.array_model import ArrayModel
from latecomer.device.flat import FlatModel
from latecomer.errors import BadInput

# Folder of the run of a Flower app that is not given one, set by `latecomer deploy`.
RUN_FOLDER_VARIABLE = "LATECOMER_RUN_FOLDER"


class AppendOnlyFile:
    """A text file that is appended to; opening truncates it to its first `keep` bytes."""

    def __init__(self, path: Path, keep: int = 0) -> None:
        path.touch()
        if (size := path.stat().st_size) < keep:
            raise BadInput(f"{path}: has {size} bytes, fewer than the {keep} of the checkpoint")
        os.truncate(path, keep)
        self._file = path.open("a", encoding="utf-8", newline="")

    def write(self, text: str) -> None:
        self._file.write(text)

    def length(self) -> int:
        """Flushes to disk; returns the bytes written so far."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class EventLog:
    """events.jsonl: one JSON object per event."""

    def __init__(self, path: Path, keep: int = 0) -> None:
        self.file = AppendOnlyFile(path, keep)

    def write(self, time: float, note: Logged) -> None:
        line = {"time": round(time, 6), "event": note.kind, **note.fields}
        self.file.write(json.dumps(line, separators=(",", ":")) + "\n")


class Table:
    """A CSV file with fixed columns, to which rows are appended."""

    def __init__(self, path: Path, columns: Sequence[str], keep: int = 0) -> None:
        self.file = AppendOnlyFile(path, keep)
        self._writer = csv.DictWriter(self.file, columns, lineterminator="\n")
        if not keep:
            self._writer.writeheader()

    def write(self, row: Mapping[str, Any]) -> None:
        self._writer.writerow(row)
        self.file.flush()


def numbered_folder(parent: Path, name: str) -> Path:
    """parent/NAME-N with the first N that is free; it is not created."""
    number = 1
    while (path := parent / f"{name}-{number}").exists():
        number += 1
    return path


def write_atomically(path: Path, text: str) -> None:
    """Writes a new file and renames it: readers see the old text or the new one."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def write_models(folder: Path, server: Server, lineages: Iterable[str], model: FlatModel) -> None:
    """model.safetensors for the main lineage, model-LINEAGE.safetensors for every other cluster.

    The files hold the complete state_dict of the module, frozen parameters included, or all arrays
    of an app's model.
    """
    for lineage in lineages:
        name = "model" if lineage == MAIN else f"model-{lineage}"
        params = server.model(lineage)
        named = (
            model.named(params, server.unaveraged)
            if isinstance(model, ArrayModel)
            else model.state_dict(params)
        )
        save_file(named, folder / f"{name}.safetensors")
