"""The state folder of a deployed device: secret, memory, privacy ledger, open task, last answer.

Files are written under another name and moved into place, so a process killed at any moment leaves
the old state or the new one. They are readable by their owner only.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from latecomer.core.codec import storable
from latecomer.device.local_training import LocalTraining
from latecomer.device.memory import DeviceMemory
from latecomer.device.optimizers import OptimizerState
from latecomer.errors import BadInput

SECRET_BYTES = 32
FORMAT = 2


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


@dataclass
class DeviceState:
    """What a device stores between two messages.

    `started` counts the tasks that were started, finished or not; it selects random streams, none
    of which may be used twice. `memory` belongs to the run `run`, except for the privacy ledger.
    `answered` is the key of the last task that was answered, `answer` and `delta` the content of
    that update.
    """

    started: int = 0
    memory: DeviceMemory = field(default_factory=dict)
    run: str = ""
    answered: str = ""
    answer: Mapping[str, Any] = field(default_factory=dict)
    delta: Tensor | None = None
    open_task: OpenTask | None = None


class DeviceDisk:
    """Reads and writes the state folder of one device."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def secret(self) -> bytes:
        """`SECRET_BYTES` random bytes that never leave the device, drawn at the first call."""
        path = self.folder / "secret"
        try:
            found = path.read_bytes()
        except FileNotFoundError:
            found = os.urandom(SECRET_BYTES)
            replace_file(path, found)
        if len(found) != SECRET_BYTES:
            raise BadInput(f"{path}: must have {SECRET_BYTES} bytes, has {len(found)}")
        return found

    def load(self) -> DeviceState:
        """The stored state, a new one if there is none; BadInput if it cannot be read."""
        path = self.folder / "state.safetensors"
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return DeviceState()
        try:
            tensors = load(data)
            length = int.from_bytes(data[:8], "little")
            metadata = json.loads(data[8 : 8 + length])["__metadata__"]
            if "state" not in metadata:
                raise BadInput(
                    f"{path}: the format of an earlier version, this one reads {FORMAT}; it holds"
                    " the device's privacy ledger: go on with the version that wrote it"
                )
            document = json.loads(metadata["state"])
            if document["format"] != FORMAT:
                raise BadInput(f"{path}: format {document['format']}, this version reads {FORMAT}")
            memory = {
                name.removeprefix("memory."): tensor
                for name, tensor in tensors.items()
                if name.startswith("memory.")
            }
            open_task = document["open_task"]
            return DeviceState(
                document["started"],
                memory,
                document["run"],
                document["answered"],
                document["answer"],
                tensors.get("delta"),
                None if open_task is None else _decoded_task(open_task, tensors),
            )
        except (ValueError, KeyError, TypeError, SafetensorError) as error:
            if isinstance(error, BadInput):
                raise
            # A new state would have an empty privacy ledger.
            raise BadInput(f"{path}: the device's state is damaged: {error}") from error

    def save(self, state: DeviceState) -> None:
        tensors = {f"memory.{name}": tensor for name, tensor in state.memory.items()}
        if state.delta is not None:
            tensors["delta"] = state.delta
        document: dict[str, Any] = {
            "format": FORMAT,
            "started": state.started,
            "run": state.run,
            "answered": state.answered,
            "answer": dict(state.answer),
            "open_task": None,
        }
        if state.open_task is not None:
            document["open_task"], more = _encoded_task(state.open_task)
            tensors |= more
        data = save(unshared(storable(tensors)), {"state": json.dumps(document)})
        replace_file(self.folder / "state.safetensors", data)


def _encoded_task(task: OpenTask) -> tuple[dict[str, Any], dict[str, Tensor]]:
    training = task.training
    document = {
        "fields": dict(task.fields),
        "number": task.number,
        "base": task.base,
        "training": [training.choice, training.started_from, training.passes],
    }
    tensors = {"models": task.models, "base": training.base, "params": training.params}
    tensors["anchor"] = training.anchor
    if training.optimizer is not None:
        tensors |= {f"optimizer.{n}": t for n, t in training.optimizer._asdict().items()}
    return document, {f"open_task.{name}": tensor for name, tensor in tensors.items()}


def _decoded_task(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> OpenTask:
    def of(name: str) -> Tensor:
        return tensors[f"open_task.{name}"]

    choice, started_from, passes = document["training"]
    optimizer = None
    if "open_task.optimizer.first" in tensors:
        optimizer = OptimizerState(*(of(f"optimizer.{name}") for name in OptimizerState._fields))
    params = of("base"), of("params"), of("anchor")
    training = LocalTraining(choice, started_from, *params, optimizer, passes)
    return OpenTask(
        document["fields"], of("models"), document["number"], training, document["base"]
    )


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
