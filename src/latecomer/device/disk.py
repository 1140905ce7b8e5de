"""What a device keeps on its own disk: its secret, its memory and its last answer.

Everything is written anew and put in place in one step: a device that is killed at any moment
finds the old state or the new one. Readable by the owner only.
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
from latecomer.device.memory import DeviceMemory
from latecomer.device.optimizers import Memory
from latecomer.device.parts import Part
from latecomer.errors import BadInput

SECRET_BYTES = 32
FORMAT = 1


@dataclass
class Kept:
    """The state of a device between two tasks.

    `begun` counts the tasks that were begun, finished or not: it names random streams, of which
    none may be used twice. `run` is what the memory, but for the ledger, belongs to. `answered` is
    the key of the last task that was answered, with `told` and `delta` as they were sent.
    """

    begun: int = 0
    memory: DeviceMemory = field(default_factory=dict)
    run: str = ""
    answered: str = ""
    told: Mapping[str, Any] = field(default_factory=dict)
    delta: Tensor | None = None
    under_way: "UnderWay | None" = None


@dataclass
class UnderWay:
    """A task that is done in parts: as it came (`told`, `models`), and how far it is.

    `number` names its random stream. `base` is what the server calls the newer model that the
    device has taken up; empty if it has not.
    """

    told: Mapping[str, Any]
    models: Tensor
    number: int
    part: Part
    base: str = ""


class DeviceDisk:
    """The state folder of one device."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def secret(self) -> bytes:
        """Random bytes that this device alone knows, drawn when they are first needed."""
        path = self.folder / "secret"
        try:
            found = path.read_bytes()
        except FileNotFoundError:
            found = os.urandom(SECRET_BYTES)
            replace_file(path, found)
        if len(found) != SECRET_BYTES:
            raise BadInput(f"{path}: must have {SECRET_BYTES} bytes, has {len(found)}")
        return found

    def load(self) -> Kept:
        path = self.folder / "state.safetensors"
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return Kept()
        try:
            tensors = load(data)
            length = int.from_bytes(data[:8], "little")
            document = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["kept"])
            if document["format"] != FORMAT:
                raise BadInput(f"{path}: format {document['format']}, this version reads {FORMAT}")
            under_way = document.get("under_way")
            memory = {
                name.removeprefix("memory."): tensor
                for name, tensor in tensors.items()
                if name.startswith("memory.")
            }
            return Kept(
                document["begun"],
                memory,
                document["run"],
                document["answered"],
                document["told"],
                tensors.get("delta"),
                None if under_way is None else _taken_up(under_way, tensors),
            )
        except (ValueError, KeyError, TypeError, SafetensorError) as error:
            if isinstance(error, BadInput):
                raise
            # To begin anew would be to forget what has been spent of the device's privacy.
            raise BadInput(f"{path}: the device's state is damaged: {error}") from error

    def save(self, kept: Kept) -> None:
        tensors = {f"memory.{name}": tensor for name, tensor in kept.memory.items()}
        if kept.delta is not None:
            tensors["delta"] = kept.delta
        document = {
            "format": FORMAT,
            "begun": kept.begun,
            "run": kept.run,
            "answered": kept.answered,
            "told": dict(kept.told),
        }
        if kept.under_way is not None:
            document["under_way"], parts = _put_down(kept.under_way)
            tensors |= parts
        data = save(apart(storable(tensors)), {"kept": json.dumps(document)})
        replace_file(self.folder / "state.safetensors", data)


def _put_down(task: UnderWay) -> tuple[dict[str, Any], dict[str, Tensor]]:
    part = task.part
    document = {
        "told": dict(task.told),
        "number": task.number,
        "base": task.base,
        "part": [part.choice, part.left_for, part.done],
    }
    tensors = {"models": task.models, "base": part.base, "local": part.local}
    tensors["anchor"] = part.anchor
    if part.memory is not None:
        tensors |= {f"optimiser.{n}": t for n, t in part.memory._asdict().items()}
    return document, {f"under_way.{name}": tensor for name, tensor in tensors.items()}


def _taken_up(document: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> UnderWay:
    def of(name: str) -> Tensor:
        return tensors[f"under_way.{name}"]

    choice, left_for, done = document["part"]
    memory = None
    if "under_way.optimiser.first" in tensors:
        memory = Memory(*(of(f"optimiser.{name}") for name in Memory._fields))
    part = Part(choice, left_for, of("base"), of("local"), of("anchor"), memory, done)
    return UnderWay(document["told"], of("models"), document["number"], part, document["base"])


def apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """No two share their memory, as safetensors wants it."""
    seen: set[int] = set()
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        found[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return found


def replace_file(path: Path, data: bytes) -> None:
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
