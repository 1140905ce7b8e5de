"""The device's end of a deployment: introduces itself, performs tasks, repeats lost answers."""

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from torch import Tensor

from latecomer.core.messages import Update
from latecomer.core.submodel import Submodel, name_of
from latecomer.device.client import LEDGER, Client
from latecomer.device.disk import DeviceDisk, Kept
from latecomer.device.flat import FlatModel
from latecomer.device.networks import Networks
from latecomer.device.privacy import Privacy
from latecomer.engines.wire import (
    Introduction,
    Parcel,
    Refused,
    decode_task,
    encode_introduction,
    encode_update,
)

Data = Callable[[], tuple[Tensor, Tensor]]


class Agent:
    """One device: its name, network and data, and a folder that outlives the process.

    Random streams come from the device's own secret and from its own count of tasks. The server
    knows neither, so it cannot take the noise away; and after a restart it may give a number again
    that it has given before, which must not bring the same noise twice.

    A task is performed once. If it comes again, because the answer was lost, so does the answer:
    to train anew would be another release of the data.
    """

    def __init__(
        self,
        name: str,
        model: FlatModel | Networks,
        data: Data,
        folder: Path,
        privacy: Privacy | None = None,
        width: float = 1.0,
    ) -> None:
        self.name, self.data, self.privacy, self.width = name, data, privacy, width
        self.networks = model if isinstance(model, Networks) else Networks(model)
        self.disk = DeviceDisk(folder)

    def introduce(self) -> Parcel:
        key = sha256(b"name:" + self.disk.secret()).hexdigest()
        return encode_introduction(Introduction(self.name, key, self.width))

    def answer(self, parcel: Parcel) -> Parcel:
        """Perform the task that the parcel brings; Refused if it cannot be understood."""
        order = decode_task(parcel, self._size_of)
        key, kept = order.key, self.disk.load()
        if kept.answered == key:
            return encode_update(_repeated(kept), key)
        if kept.run != order.run:
            # Gradients and models of another run mean nothing here; what was spent stays spent.
            spent = {name: kept.memory[name] for name in (LEDGER,) if name in kept.memory}
            kept = Kept(kept.begun, spent, order.run)
        number, kept.begun = kept.begun, kept.begun + 1
        self.disk.save(kept)  # a device that is killed in mid-task must not use this number again
        x, y = self.data()
        client = Client(0, self.networks, x, y, self._seed(), self.privacy)
        update = client.perform(replace(order.task, device=0, number=number), kept.memory)
        told = {
            "num_examples": update.num_examples,
            "metrics": dict(update.metrics),
            "noise_std": update.noise_std,
            "choice": update.choice,
            "epsilon": update.epsilon,
            "last": update.last,
        }
        # What it has cost is on disk before it leaves.
        self.disk.save(Kept(kept.begun, kept.memory, kept.run, key, told, update.delta))
        return encode_update(update, key)

    def _seed(self) -> int:
        return int.from_bytes(sha256(b"seed:" + self.disk.secret()).digest()[:8], "little") >> 1

    def _size_of(self, name: str) -> tuple[Submodel | None, int]:
        for submodel in self.networks.submodels.values():
            network = self.networks(submodel)
            if name_of(submodel) == name and network is not None:
                return submodel, network.layout.size
        raise Refused(f"this device has no network for {name!r}")


def _repeated(kept: Kept) -> Update:
    return Update(0, kept.delta, **kept.told)
