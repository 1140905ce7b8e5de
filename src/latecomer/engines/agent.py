"""The device's end of a deployment: introduces itself, performs tasks, repeats lost answers."""

import logging
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from torch import Tensor

from latecomer.core.messages import Offer, ServingSettings, Task, Update
from latecomer.core.submodel import Submodel, name_of
from latecomer.device.client import LEDGER, Client
from latecomer.device.deployed_model import DeployedModel, load_deployed_model, save_deployed_model
from latecomer.device.disk import DeviceDisk, Kept, UnderWay
from latecomer.device.flat import FlatModel
from latecomer.device.networks import Networks
from latecomer.device.privacy import Privacy
from latecomer.engines.wire import (
    Introduction,
    InvalidPayload,
    Order,
    Payload,
    Progress,
    decode_go_on,
    decode_task,
    encode_introduction,
    encode_progress,
    encode_update,
    pack,
    unpack,
)

log = logging.getLogger(__name__)

Data = Callable[[], tuple[Tensor, Tensor]]


class Agent:
    """One device: its name, network and data, and a folder that outlives the process.

    Random streams come from the device's own secret and from its own count of tasks. The server
    knows neither, so it cannot take the noise away; and after a restart it may give a number again
    that it has given before, which must not bring the same noise twice.

    A task is performed once. If it comes again, because the answer was lost, so does the answer:
    to train anew would be another release of the data.

    A task may be done in parts of so many passes over the data. Between two of them the device says
    how far it is, and hears of a newer model if there is one.
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

    def introduce(self) -> Payload:
        key = sha256(b"name:" + self.disk.secret()).hexdigest()
        return encode_introduction(Introduction(self.name, key, self.width))

    def answer(self, parcel: Payload) -> Payload:
        """Do what the parcel asks for; Refused if it cannot be understood."""
        if "go-on" in parcel.fields:
            return self._go_on(parcel)
        order = decode_task(parcel, self._size_of)
        key, kept = order.key, self.disk.load()
        if kept.answered == key:
            return _repeated(kept)
        if kept.under_way is not None and kept.under_way.told["task"] == key:
            # It was sent again: the server does not know how far it is.
            return _progress(kept.under_way)
        if kept.run != order.run:
            # Gradients and models of another run mean nothing here; what was spent stays spent.
            spent = {name: kept.memory[name] for name in (LEDGER,) if name in kept.memory}
            kept = Kept(kept.begun, spent, order.run)
        number, kept.begun = kept.begun, kept.begun + 1
        kept.under_way = None
        self.disk.save(kept)  # a device that is killed in mid-task must not use this number again
        client, task = self._client(), replace(order.task, device=0, number=number)
        if 0 < order.until < task.spec.local_epochs and not client.remembers(task):
            return self._begin(client, kept, parcel, order, task)
        update = client.perform(task, kept.memory)
        return self._answered(kept, key, task, update, order.use)

    def _begin(
        self, client: Client, kept: Kept, parcel: Payload, order: Order, task: Task
    ) -> Payload:
        part = client.begin(task)
        client.go_on(task, part, order.until)
        rows = unpack(parcel.array, 1 + len(task.offers), task.params.numel())
        kept.under_way = UnderWay(dict(parcel.fields), rows, task.number, part)
        self.disk.save(kept)
        return _progress(kept.under_way)

    def _go_on(self, parcel: Payload) -> Payload:
        kept = self.disk.load()
        key = parcel.fields.get("go-on")
        if kept.answered == key:
            return _repeated(kept)
        under_way = kept.under_way
        if under_way is None or under_way.told["task"] != key:
            raise InvalidPayload("this device is not in the middle of that task")
        part = under_way.part
        order = decode_go_on(parcel, part.local.numel())
        if order.until <= part.done:
            return _progress(under_way)  # it was sent again
        stored = Payload(under_way.told, array=pack(*under_way.models.unbind()))
        begun = decode_task(stored, self._size_of)
        task = replace(begun.task, device=0, number=under_way.number)
        if order.newer is not None and (not part.left_for or part.left_for == order.fits):
            part.take_up(order.number, order.newer)
            under_way.base = order.name
        client = self._client()
        client.go_on(task, part, min(order.until, task.spec.local_epochs))
        if part.done < task.spec.local_epochs:
            self.disk.save(kept)
            return _progress(under_way)
        if part.choice > len(task.offers):
            task = _with_broadcast(task, part.choice, part.base)
        update = client.answer(task, part.local - part.base, part.choice, kept.memory)
        return self._answered(kept, str(key), task, update, begun.use, under_way.base)

    def _answered(
        self,
        kept: Kept,
        key: str,
        task: Task,
        update: Update,
        use: ServingSettings | None,
        base: str = "",
    ) -> Payload:
        told = {
            "num_examples": update.num_examples,
            "metrics": dict(update.metrics),
            "noise_std": update.noise_std,
            "choice": update.choice,
            "epsilon": update.epsilon,
            "last": update.last,
        }
        if base:
            told["base"] = base
        # What it has cost is on disk before it leaves.
        self.disk.save(Kept(kept.begun, kept.memory, kept.run, key, told, update.delta))
        self._keep_model(task, update, use)
        return encode_update(update, key, base)

    def _keep_model(self, task: Task, update: Update, use: ServingSettings | None) -> None:
        """For use until the next task. What noise was added to is no change to go by."""
        use, sent = use or ServingSettings(), task.chosen(update.choice).params
        if 0 < update.choice <= len(task.offers):
            use = replace(use, class_prior=(), output_bias=())  # they are of the model it has left
        change = update.delta if use.interpolation and self.privacy is None else None
        try:
            save_deployed_model(self.disk.folder, sent, change, name_of(task.submodel), use)
        except OSError as error:
            log.warning("the model is not kept for use: %s", error)

    def load_deployed_model(self) -> DeployedModel:
        """What the device uses: its last model, made its own."""
        return load_deployed_model(self.disk.folder, self.networks, *self.data())

    def _client(self) -> Client:
        x, y = self.data()
        return Client(0, self.networks, x, y, self._seed(), self.privacy)

    def _seed(self) -> int:
        return int.from_bytes(sha256(b"seed:" + self.disk.secret()).digest()[:8], "little") >> 1

    def _size_of(self, name: str) -> tuple[Submodel | None, int]:
        for submodel in self.networks.submodels.values():
            network = self.networks(submodel)
            if name_of(submodel) == name and network is not None:
                return submodel, network.layout.size
        raise InvalidPayload(f"this device has no network for {name!r}")


def _with_broadcast(task: Task, number: int, newer: Tensor) -> Task:
    """The task as the server knows it: the others that it was sent are not needed any more."""
    others: tuple[Offer | None, ...] = (None,) * (number - len(task.offers) - 1)
    return replace(task, broadcasts=(*others, Offer("", 0, newer)))


def _progress(task: UnderWay) -> Payload:
    part = task.part
    number = part.choice if task.base else 0
    return encode_progress(Progress(part.done, number, task.base), task.told["task"])


def _repeated(kept: Kept) -> Payload:
    told = dict(kept.told)
    base = str(told.pop("base", ""))
    return encode_update(Update(0, kept.delta, **told), kept.answered, base)
