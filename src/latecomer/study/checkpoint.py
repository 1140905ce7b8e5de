"""Checkpoints: a state as safetensors and JSON with checksums, complete or not there at all.

Each is a folder under `checkpoint/`. The file `latest` names the newest and is replaced in one
step, so a run killed at any moment finds either the old or the new checkpoint. The one before it is
kept too: if a checksum of the newest does not match, the older one is loaded.

A checkpoint also has the settings of the run (`latecomer.study.resumed`). If those of the process
that resumes it differ, it is refused with the list of differences.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from latecomer.core.codec import decode, encode, storable
from latecomer.core.server import Server
from latecomer.errors import BadInput
from latecomer.study.resumed import Settings, differences, listed

FORMAT = 12
FILES = ("state.json", "state.safetensors")
CHECKSUMS = "sha256.json"  # file -> sha256 of its content


class OtherSettingsError(BadInput):
    """The checkpoint is of a run with other settings."""


class Checkpoints:
    """The checkpoints of one run with these `settings`, in `folder`. Readable by the owner only.

    A checkpoint whose settings differ is loaded only if all of the differing ones are `changeable`.
    After `load`, `changed` lists them, and `fallback` says why the newest checkpoint was not used;
    empty if none differ and if it was.
    """

    def __init__(
        self, folder: Path, settings: Settings | None = None, changeable: Collection[str] = ()
    ) -> None:
        self.folder, self.changeable = folder, changeable
        self.settings = json.loads(json.dumps(dict(settings or {})))
        self.fallback = self.changed = ""

    def save(self, state: Any, name: str) -> None:
        """Write `state` and make it the latest; the one before is kept, older ones are removed."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        target = self.folder / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(mode=0o700)
        tree, tensors = encode(state)
        save_file(storable(tensors), target / "state.safetensors")
        document = {"format": FORMAT, "settings": self.settings, "state": tree}
        (target / "state.json").write_text(json.dumps(document), encoding="utf-8")
        checksums = {file: _sha256(target / file) for file in FILES}
        (target / CHECKSUMS).write_text(json.dumps(checksums), encoding="utf-8")
        for file in target.iterdir():
            file.chmod(0o600)
            _sync(file)
        _sync(target)
        before = self._named("latest")
        self._point("previous", before)
        self._point("latest", name)
        for old in self.folder.iterdir():
            if old.is_dir() and old.name not in (name, before):
                shutil.rmtree(old)

    def load(self) -> Any | None:
        """The newest state that is undamaged, or None if there is none yet."""
        newest, before = self._named("latest"), self._named("previous")
        if newest is None:
            return None
        try:
            return self._load(newest)
        except OtherSettingsError:
            raise
        except BadInput as error:
            if before is None or before == newest or not (self.folder / before).is_dir():
                raise
            state = self._load(before)
            self.fallback = f"{error}; continued from the one before, {before}"
            return state

    def restore(self, apply: Callable[[Any], Any]) -> Any:
        """`apply` of the newest state, None if there is none; BadInput if it does not fit."""
        if (state := self.load()) is None:
            return None
        try:
            return apply(state)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise BadInput(
                f"{self.folder}: the checkpoint does not fit the run: {error}"
            ) from error

    def check_settings(self, settings: Settings) -> None:
        """OtherSettingsError if one of these differs from that of the newest checkpoint, if any."""
        if (newest := self._named("latest")) is None:
            return
        try:
            saved = _read(self.folder / newest)["settings"]
        except BadInput:  # `load` may find the one before it
            return
        self._differences(self.folder / newest, {key: saved.get(key) for key in settings}, settings)

    def _differences(self, source: Path, saved: Settings, now: Settings) -> dict[str, str]:
        """The changed settings; OtherSettingsError if one of them is not changeable."""
        found = differences(saved, now)
        if found.keys() - set(self.changeable):
            raise OtherSettingsError(
                f"{source}: the run was saved with other settings: {listed(found)}; resume it with"
                " the former ones, or start a new run"
            )
        return found

    def _load(self, name: str) -> Any:
        """The state in this folder; BadInput if it is damaged, or does not fit settings or code."""
        source = self.folder / name
        document, tensors = _read(source), _tensors(source)
        found = self._differences(source, document["settings"], self.settings)
        try:
            state = decode(document["state"], tensors)
        except (LookupError, ValueError, TypeError) as error:  # the checksums are right
            raise BadInput(
                f"{source}: the checkpoint does not fit the code that reads it: {error}"
            ) from error
        self.changed = listed(found)
        return state

    def _named(self, pointer: str) -> str | None:
        try:
            return (self.folder / pointer).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None

    def _point(self, pointer: str, name: str | None) -> None:
        """Replace the file `pointer` in one step."""
        if name is None:
            return
        new = self.folder / f"{pointer}.new"
        new.write_text(name, encoding="utf-8")
        new.chmod(0o600)
        _sync(new)
        new.replace(self.folder / pointer)
        _sync(self.folder)


def _tensors(source: Path) -> dict[str, Tensor]:
    try:
        return load_file(source / "state.safetensors")
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{source}: the checkpoint is damaged: {error}") from error


def _read(source: Path) -> Any:
    """The document in this folder; BadInput if a file is damaged or of another version."""
    try:
        document = json.loads((source / "state.json").read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise BadInput(
                f"{source}: checkpoint format {document['format']}, this version reads {FORMAT};"
                " resume with the version that wrote it, or start again in a new folder"
            )
        checksums = json.loads((source / CHECKSUMS).read_text(encoding="utf-8"))
        for file in FILES:
            if checksums[file] != _sha256(source / file):
                raise ValueError(f"the checksum of {file} does not match")
        return document
    except (OSError, LookupError, ValueError, TypeError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{source}: the checkpoint is damaged: {error}") from error


def restore_server(server: Server, state: Mapping[str, Any]) -> None:
    """Restore the server; ValueError if its models are of another size than they were."""
    size = server.model().numel()
    server.restore(state)
    for lineage in server.store.lineages:
        if (found := server.store.head_params(lineage).numel()) != size:
            raise ValueError(f"a model of {found} parameters, by config.toml it has {size}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
