"""Checkpoints: a state as safetensors + JSON, complete or not there at all.

Each is a folder of its own under `checkpoint/`; the file `latest` names the valid one and is
replaced in one step, so a run killed at any moment finds either the old or the new checkpoint.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from latecomer.core.codec import decode, encode, storable
from latecomer.errors import BadInput

FORMAT = 4


class Checkpoints:
    """The checkpoints of one run, in `folder`. Readable by the owner only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, state: Any, name: str) -> None:
        """Write `state` and make it the latest; older ones are removed."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        target = self.folder / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(mode=0o700)
        tree, tensors = encode(state)
        save_file(storable(tensors), target / "state.safetensors")
        document = {"format": FORMAT, "state": tree}
        (target / "state.json").write_text(json.dumps(document), encoding="utf-8")
        for file in target.iterdir():
            file.chmod(0o600)
            _sync(file)
        _sync(target)
        pointer = self.folder / "latest.new"
        pointer.write_text(name, encoding="utf-8")
        pointer.chmod(0o600)
        _sync(pointer)
        pointer.replace(self.folder / "latest")
        _sync(self.folder)
        for old in self.folder.iterdir():
            if old.is_dir() and old.name != name:
                shutil.rmtree(old)

    def load(self) -> Any | None:
        """The latest state, or None if there is none yet."""
        try:
            name = (self.folder / "latest").read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None
        source = self.folder / name
        try:
            document = json.loads((source / "state.json").read_text(encoding="utf-8"))
            if document["format"] != FORMAT:
                raise BadInput(
                    f"{source}: checkpoint format {document['format']}, this version reads {FORMAT}"
                )
            return decode(document["state"], load_file(source / "state.safetensors"))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            if isinstance(error, BadInput):
                raise
            raise BadInput(f"{source}: the checkpoint is damaged: {error}") from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
