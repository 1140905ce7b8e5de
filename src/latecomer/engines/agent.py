"""Client side of a deployment: registers a device, trains its tasks, stores its state on disk."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from latecomer.core.messages import Offer, ServingSettings, Task, TrainSpec, Update
from latecomer.core.submodel import Submodel, name_of
from latecomer.device.client import BUFFERS, LEDGER, Client
from latecomer.device.deployed_model import DeployedModel, load_deployed_model, save_deployed_model
from latecomer.device.disk import DeviceDisk, DeviceState, OpenTask
from latecomer.device.flat import FlatModel
from latecomer.device.limits import Limits
from latecomer.device.networks import Networks
from latecomer.device.own_training import TrainFunction
from latecomer.device.privacy import Privacy
from latecomer.engines.wire import (
    Introduction,
    InvalidPayload,
    Order,
    Payload,
    Progress,
    decode_resume,
    decode_task,
    encode_introduction,
    encode_progress,
    encode_update,
    pack,
    unpack,
)

log = logging.getLogger(__name__)

DAY = 86_400  # seconds

Data = Callable[[], tuple[Tensor, Tensor]]


class Agent:
    """Answers the messages of a server for one device, whose state is in `folder`.

    The lock of the folder is held from reading the state to the end of `answer`, so two processes
    of a device work one after the other. Privacy noise is drawn from the operating system; the
    ledger is charged on disk before `answer` returns the update. Mini-batches without privacy are
    seeded by a secret of the device and its own count of tasks.

    A task is trained once. If its message comes again because the answer was lost, the stored
    answer is sent again: training anew would be another release of the data.

    A task may be trained in parts of whole passes over the data. After each part the device
    replies with its progress, and the next message may bring a newer model to rebase on.

    `train` replaces the built-in training (`device.own_training`) and gets `config`. Tasks beyond
    `limits` are refused before they are trained; `privacy` holds whatever a task asks for.
    """

    def __init__(
        self,
        name: str,
        model: FlatModel | Networks,
        data: Data,
        folder: Path,
        privacy: Privacy | None = None,
        width: float = 1.0,
        train: TrainFunction | None = None,
        config: Mapping[str, Any] | None = None,
        limits: Limits = Limits(),  # noqa: B008  (frozen)
    ) -> None:
        self.name, self.data, self.privacy, self.width = name, data, privacy, width
        self.train, self.config, self.limits = train, config, limits
        self.networks = model if isinstance(model, Networks) else Networks(model)
        self.disk = DeviceDisk(folder)

    @property
    def seed(self) -> int:
        """The seed of the device's random streams, derived from its secret."""
        return int.from_bytes(sha256(b"seed:" + self.disk.secret()).digest()[:8], "little") >> 1

    def introduce(self) -> Payload:
        """The registration message: name, a key derived from the secret, and sub-model width."""
        key = sha256(b"name:" + self.disk.secret()).hexdigest()
        return encode_introduction(Introduction(self.name, key, self.width))

    def answer(self, payload: Payload) -> Payload:
        """Start or resume the task of this message.

        InvalidPayload if the message is malformed, or the task is beyond the device's limits.
        BadInput if another process uses the folder, or if its privacy ledger cannot be trusted.
        """
        with self.disk.lock(needed=self.privacy is not None):
            if "resume" in payload.fields:
                return self._resume(payload)
            return self._begin(payload)

    def _begin(self, payload: Payload) -> Payload:
        """Train a new task, or its first part."""
        size = 0 if payload.array is None else len(payload.array.data)
        if 0 < self.limits.bytes < size:  # before it is copied
            raise InvalidPayload(self.limits.reason_to_refuse(TrainSpec(), 0, size, 0))
        order = decode_task(payload, self._size_of)
        key, state = order.key, self.disk.load()
        if state.answered == key:
            return _stored_answer(state)
        if state.open_task is not None and state.open_task.fields["task"] == key:
            return _progress(state.open_task)
        if state.run != order.run:
            # Gradients and models of another run are of no use.
            day, tasks = state.day, state.day_tasks
            state = DeviceState(state.started, state.charges, run=order.run, day=day)
            state.day_tasks = tasks
        self._admit(state, order.task.spec)
        ledger = None if self.privacy is None else self.disk.load_ledger(state)
        number, state.started = state.started, state.started + 1
        state.open_task = None
        self.disk.save(state)
        client, task = self._client(), replace(order.task, device=0, number=number)
        in_parts = client.divisible(task) and not client.needs_memory(task)
        if in_parts and 0 < order.until < task.spec.local_epochs:
            return self._start(client, state, payload, order, task)
        if ledger is not None:
            state.memory[LEDGER] = ledger
        update = client.perform(task, state.memory)
        charged = state.memory.pop(LEDGER, None)
        if charged is not None and charged is not ledger:
            self.disk.save_ledger(state, charged)
        return self._answered(state, key, task, update, order.serving)

    def _admit(self, state: DeviceState, spec: TrainSpec) -> None:
        """Count a new task; InvalidPayload if it is beyond the limits."""
        today = int(time.time() // DAY)
        if state.day != today:
            state.day, state.day_tasks = today, 0
        examples = len(self.data()[1])
        if reason := self.limits.reason_to_refuse(spec, examples, 0, state.day_tasks):
            log.warning("task refused: %s", reason)
            raise InvalidPayload(reason)
        state.day_tasks += 1

    def _start(
        self, client: Client, state: DeviceState, payload: Payload, order: Order, task: Task
    ) -> Payload:
        """Train the first part of a task."""
        training = client.start(task)
        client.advance(task, training, order.until)
        rows = unpack(payload.array, 1 + len(task.offers), task.params.numel())
        state.open_task = OpenTask(dict(payload.fields), rows, task.number, training)
        self.disk.save(state)
        return _progress(state.open_task)

    def _resume(self, payload: Payload) -> Payload:
        """Train the next part of the open task, rebased on a newer model if there is one."""
        state = self.disk.load()
        key = payload.fields.get("resume")
        if state.answered == key:
            return _stored_answer(state)
        open_task = state.open_task
        if open_task is None or open_task.fields["task"] != key:
            raise InvalidPayload("this device is not in the middle of that task")
        training = open_task.training
        order = decode_resume(payload, training.params.numel())
        if order.until <= training.passes:
            return _progress(open_task)  # the message came again
        first = Payload(open_task.fields, array=pack(*open_task.models.unbind()))
        given = decode_task(first, self._size_of)
        task = replace(given.task, device=0, number=open_task.number)
        if order.newer is not None and training.accepts(order.offer):
            training.rebase(order.number, order.newer)
            open_task.base = order.name
        client = self._client()
        client.advance(task, training, min(order.until, task.spec.local_epochs))
        if training.passes < task.spec.local_epochs:
            self.disk.save(state)
            return _progress(open_task)
        if training.choice > len(task.offers):
            task = _with_broadcast(task, training.choice, training.base)
        update = client.make_update(task, training.delta, training.choice, state.memory)
        return self._answered(state, str(key), task, update, given.serving, open_task.base)

    def _answered(
        self,
        state: DeviceState,
        key: str,
        task: Task,
        update: Update,
        settings: ServingSettings,
        base: str = "",
    ) -> Payload:
        """The message of this update, after it has been stored."""
        answered = replace(state, answered=key, answer=update, answer_base=base, open_task=None)
        self.disk.save(answered)
        self._store_model(task, update, settings, state.memory.get(BUFFERS))
        return encode_update(update, key, base)

    def _store_model(
        self, task: Task, update: Update, settings: ServingSettings, buffers: Tensor | None
    ) -> None:
        """Store the model to be used until the next task, with the `buffers` of this device.

        The class prior belongs to the task's own model and is left out if training started from
        an offer.
        """
        params = task.chosen(update.choice).params
        if 0 < update.choice <= len(task.offers):
            settings = replace(settings, class_prior=())
        name = name_of(task.submodel)
        if (network := self.networks(task.submodel)) is not None:
            params = network.extended(params, buffers)
        try:
            save_deployed_model(self.disk.folder, params, name, settings, task.spec)
        except OSError as error:
            log.warning("the deployed model could not be stored: %s", error)

    def load_deployed_model(self) -> DeployedModel:
        """The last model that the device trained, personalised with its data."""
        return load_deployed_model(self.disk.folder, self.networks, *self.data())

    def _client(self) -> Client:
        return Client(
            0,
            self.networks,
            *self.data(),
            self.seed,
            self.privacy,
            None,
            True,
            self.train,
            self.config,
        )

    def _size_of(self, name: str) -> tuple[Submodel | None, int]:
        """The sub-model of that name and its parameter count; InvalidPayload if there is none."""
        for submodel in self.networks.submodels.values():
            network = self.networks(submodel)
            if name_of(submodel) == name and network is not None:
                return submodel, network.layout.size
        raise InvalidPayload(f"this device has no network for {name!r}")


def _with_broadcast(task: Task, number: int, newer: Tensor) -> Task:
    """The task with `newer` as its broadcast of that number, and None for the earlier ones."""
    others: tuple[Offer | None, ...] = (None,) * (number - len(task.offers) - 1)
    return replace(task, broadcasts=(*others, Offer("", 0, newer)))


def _progress(task: OpenTask) -> Payload:
    number = task.training.choice if task.base else 0
    return encode_progress(Progress(task.training.passes, number, task.base), task.fields["task"])


def _stored_answer(state: DeviceState) -> Payload:
    assert state.answer is not None
    return encode_update(state.answer, state.answered, state.answer_base)
