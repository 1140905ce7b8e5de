"""The state folder of a deployed device: secret, privacy ledger, memory, open task, last answer.

Files are written under another name and moved into place, so a process killed at any moment leaves
the old content or the new one. They begin with a checksum and are readable by their owner only. A
process that changes them must hold the lock of the folder.

The ledger counts its charges, and the state has that count too. A ledger that is damaged, missing
or older than the state is refused, never replaced by an older one, which would undercharge. A
damaged state is replaced by a new one: the ledger is not in it.
"""

import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load, save
from torch import Tensor

from latecomer.core.codec import decode, encode, portable, storable
from latecomer.core.messages import Update
from latecomer.device.local_training import LocalTraining
from latecomer.device.lock import FolderLock
from latecomer.device.memory import DeviceMemory
from latecomer.device.optimizers import OptimizerState
from latecomer.errors import BadInput

log = logging.getLogger(__name__)

SECRET_BYTES = 32
FORMAT = b"latecomer 4 "  # enters the checksum: files of other versions do not match
LOCK_SECONDS = 30.0
for part in (LocalTraining, OptimizerState):
    portable(part)


@portable
@dataclass
class OpenTask:
    """A task that is trained in parts: the message that gave it, and the state of its training.

    `fields` and `models` (one row per model) are the content of that message. `number` is the
    device's own count of tasks, which selects the random stream. `base` is the server's name of
    the broadcast that training was rebased on; empty if there was none.
    """

    fields: Mapping[str, Any]
    models: Tensor
    number: int
    training: LocalTraining
    base: str = ""


@portable
@dataclass
class DeviceState:
    """What a device stores between two messages.

    `started` counts the tasks that were started, finished or not; it selects the random stream of
    mini-batches. `charges` is the count of charges of the privacy ledger. `memory` belongs to the
    run `run`. `answered` is the key of the last task that was answered, `answer` that update, and
    `answer_base` the name of the broadcast that it is from; empty if there was none. `day` counts
    UTC days since 1970, `day_tasks` the tasks that were started on it.
    """

    started: int = 0
    charges: int = 0
    memory: DeviceMemory = field(default_factory=dict)
    run: str = ""
    answered: str = ""
    answer: Update | None = None
    answer_base: str = ""
    open_task: OpenTask | None = None
    day: int = 0
    day_tasks: int = 0


class DeviceDisk:
    """Reads and writes the state folder of one device."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def secret(self) -> bytes:
        """`SECRET_BYTES` random bytes that never leave the device, drawn at the first call."""
        path = self.folder / "secret"
        if not path.exists():
            drawn = self.folder / f"secret.{os.getpid()}"
            replace_file(drawn, os.urandom(SECRET_BYTES))
            with suppress(FileExistsError):  # another process was first: its secret is used
                os.link(drawn, path)
            drawn.unlink()
        found = path.read_bytes()
        if len(found) != SECRET_BYTES:
            raise BadInput(f"{path}: must have {SECRET_BYTES} bytes, has {len(found)}")
        return found

    def lock(self, needed: bool) -> FolderLock:
        """The lock of the folder; BadInput if it is busy, or impossible though `needed`."""
        lock = FolderLock(self.folder, "device", LOCK_SECONDS)
        if needed and not lock.held:
            raise BadInput(f"{self.folder}: cannot be locked, which a privacy ledger needs")
        return lock

    def load_ledger(self, state: DeviceState) -> Tensor | None:
        """The rows of the privacy ledger (`Ledger.to_tensor`); None before the first charge.

        BadInput if the file is damaged, or has fewer charges than `state` counted.
        """
        path, charges = self.folder / "ledger.json", 0
        rows: list[list[float]] = []
        try:
            charges, rows = json.loads(_verified(path))
        except FileNotFoundError:
            problem = "is missing"
        except ValueError as error:
            charges, problem = -1, str(error)
        else:
            problem = f"has {charges} charges of {state.charges}"
        if charges < state.charges:
            raise BadInput(
                f"{path}: the privacy ledger {problem}, so the privacy spent is unknown and the"
                " device does not train; to start a new account, delete this file and"
                " state.safetensors"
            )
        state.charges = charges
        return torch.tensor(rows, dtype=torch.float64) if rows else None

    def save_ledger(self, state: DeviceState, rows: Tensor) -> None:
        """Replace the privacy ledger durably: after this the update may be released."""
        state.charges += 1
        data = json.dumps([state.charges, rows.tolist()]).encode()
        replace_file(self.folder / "ledger.json", _checksum(data) + data)

    def load(self) -> DeviceState:
        """The stored state; a new one if there is none, or it is damaged."""
        path = self.folder / "state.safetensors"
        try:
            data = _verified(path)
        except FileNotFoundError:
            return DeviceState()
        except ValueError as error:
            log.warning("%s: the device's state %s; it starts with a new one", path, error)
            return DeviceState(charges=1)  # unknown: without a ledger it must not train privately
        tensors = load(data)
        length = int.from_bytes(data[:8], "little")
        document = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["state"])
        return cast(DeviceState, decode(document, tensors))

    def save(self, state: DeviceState) -> None:
        document, tensors = encode(state)
        data = save(unshared(storable(tensors)), {"state": json.dumps(document)})
        replace_file(self.folder / "state.safetensors", _checksum(data) + data)


def _checksum(data: bytes) -> bytes:
    """The first line of a file with this content."""
    return sha256(FORMAT + data).hexdigest().encode() + b"\n"


def _verified(path: Path) -> bytes:
    """The content of a file after its checksum; ValueError if they do not match."""
    first, _, data = path.read_bytes().partition(b"\n")
    if first + b"\n" != _checksum(data):
        raise ValueError("is damaged or of another version: its checksum does not match")
    return data


def unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, copied where two share their storage, which safetensors refuses."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        found[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return found


def replace_file(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically and durably, readable by the owner only."""
    new = path.with_name(path.name + ".new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
