"""A device of the simulation whose local training is an unchanged Flower ClientApp.

Its train and evaluate functions get the messages and the Context that a SuperNode would give them.
The state of the Context is part of the device's memory, so it lasts over tasks and is in
checkpoints.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from latecomer.core.messages import Task, Update
from latecomer.device.client import Rebases
from latecomer.device.memory import DeviceMemory
from latecomer.device.seeding import all_seeded
from latecomer.device.training import layer_stream, mixed
from latecomer.engines.app_loading import RUN, FirstRequest, Value
from latecomer.engines.flower import ARRAYS, CONFIG, from_records, to_records
from latecomer.engines.flower_private import allow_messages, set_message_id
from latecomer.engines.plain import EXAMPLES, ROUND, PlainFlowerCodec, decode_metrics
from latecomer.engines.virtual_grid import FIRST_NODE
from latecomer.engines.wire import InvalidPayload, Payload
from latecomer.errors import RunFailed
from latecomer.loading import at, first_line

STATE = "context"  # key of the Context's state in the device's memory
EVALUATION_STREAM = 7  # random stream of evaluations, beside those of tasks
RECORDS = {kind.__name__: kind for kind in (ArrayRecord, MetricRecord, ConfigRecord)}


@dataclass
class AppRuntime:
    """What all devices of an app share.

    `codec` makes the messages, as in a deployment. `config` is the run config of the Context,
    `node_config` the part of its node config that is the same for all devices, `devices` the number
    of partitions, `updates_per_version` the updates that the strategy merges in a commit.
    """

    app: ClientApp
    request: FirstRequest
    codec: PlainFlowerCodec
    config: Mapping[str, Value]
    node_config: Mapping[str, Value]
    devices: int
    seed: int
    updates_per_version: int = 1

    def round_of(self, version: int) -> int:
        """The round in which a version is trained, from 1: as many updates as there are devices."""
        return version * self.updates_per_version // self.devices + 1

    def records(self, payload: Payload) -> RecordDict:
        """The content of a message, with the names of records that the app's strategy has."""
        found, names = to_records(payload), self.request
        return RecordDict({names.arrays_key: found[ARRAYS], names.config_key: found[CONFIG]})

    def model(self, vector: Tensor, unaveraged: Mapping[str, Tensor]) -> ArrayRecord:
        """A model in Flower's form, with the dtypes of the initial arrays."""
        return to_records(self.codec.payload(vector, unaveraged, {})).array_records[ARRAYS]

    def reply(self, content: RecordDict) -> Payload:
        """The reply of the app; its number of examples under Flower's usual name."""
        payload, key = from_records(content), self.request.examples_key
        if key == EXAMPLES or key not in payload.metrics:
            return payload
        metrics = dict(payload.metrics)
        return replace(payload, metrics={EXAMPLES: metrics.pop(key), **metrics})


class AppClient:
    """Performs the tasks of one device with the app's train function.

    Tasks of a device are trained in the order of their numbers. `num_examples` is what the app
    reports in its first task; the time of every task is computed from it.
    """

    def __init__(self, device: int, runtime: AppRuntime, num_examples: int = 0) -> None:
        self.device, self.runtime, self.num_examples = device, runtime, num_examples
        self._first: tuple[Task, Update, DeviceMemory] | None = None

    def ask_examples(self, task: Task) -> int:
        """The examples that the app reports for its first task, which is kept for `perform`."""
        memory: DeviceMemory = {}
        update = self.perform(task, memory)
        self._first = (task, update, memory)
        self.num_examples = update.num_examples
        return self.num_examples

    def needs_memory(self, task: Task) -> bool:
        return True

    def divisible(self, task: Task) -> bool:
        return False

    def examples(self, task: Task) -> float:
        """The work of this task: passes over the examples of the device."""
        return self.num_examples * task.spec.local_epochs

    def perform(
        self, task: Task, memory: DeviceMemory | None = None, rebases: Rebases = ()
    ) -> Update:
        """The update of this task; changes the state in `memory`."""
        memory = {} if memory is None else memory
        first, self._first = self._first, None
        if first is not None and _same(first[0], task):
            memory |= first[2]
            return replace(first[1], task_id=task.id)
        runtime = self.runtime
        payload = runtime.codec.task_payload(task, runtime.round_of(task.version))
        seed = layer_stream(runtime.seed, self.device, task.number).seed
        content = self._call("train", payload, memory, seed)
        try:
            return runtime.codec.decode(runtime.reply(content), task, "", {})
        except InvalidPayload as error:
            raise self._failed("train", f"its reply: {error}") from error

    def evaluate(
        self, vector: Tensor, unaveraged: Mapping[str, Tensor], version: int, memory: DeviceMemory
    ) -> tuple[dict[str, float], int]:
        """The metrics of the app's evaluate function, and its number of examples.

        The state of the device is not changed.
        """
        runtime = self.runtime
        config = {**runtime.request.evaluate_config, ROUND: runtime.round_of(version) - 1}
        payload = runtime.codec.payload(vector, unaveraged, config)
        seed = mixed(runtime.seed, EVALUATION_STREAM, self.device)
        content = self._call("evaluate", payload, dict(memory), seed)
        try:
            examples, metrics = decode_metrics(runtime.reply(content))
        except InvalidPayload as error:
            raise self._failed("evaluate", f"its reply: {error}") from error
        return metrics, examples

    def _call(self, kind: str, payload: Payload, memory: DeviceMemory, seed: int) -> RecordDict:
        """The content of the app's reply to a message; the state in `memory` is replaced."""
        runtime = self.runtime
        partition = {"partition-id": self.device, "num-partitions": runtime.devices}
        context = Context(
            RUN,
            FIRST_NODE + self.device,
            {**partition, **runtime.node_config},
            unpacked_state(memory),
            dict(runtime.config),
        )
        with allow_messages(), all_seeded(seed), torch.enable_grad():
            message = Message(runtime.records(payload), FIRST_NODE + self.device, kind)
            set_message_id(message, f"{kind}-{self.device}")
            try:
                reply = runtime.app(message, context)
            except Exception as error:  # a user's app may raise anything
                raise self._failed(kind, f"{first_line(error)}{at(error)}") from error
        if not isinstance(reply, Message) or reply.has_error():
            reason = reply.error.reason if isinstance(reply, Message) else type(reply).__name__
            raise self._failed(kind, f"no reply but {reason}")
        for name in [name for name in memory if name.startswith(STATE)]:
            del memory[name]
        memory |= packed_state(context.state)
        return reply.content

    def _failed(self, kind: str, reason: str) -> RunFailed:
        return RunFailed(f"device {self.device}: the app's {kind} function: {reason}")


def _same(first: Task, task: Task) -> bool:
    """Whether two tasks of a device have the same update."""
    same = (first.number, first.version, first.spec) == (task.number, task.version, task.spec)
    return same and torch.equal(first.params, task.params)


def packed_state(state: RecordDict) -> DeviceMemory:
    """The state of a Context as tensors of bytes: JSON, and the data of each array."""
    tensors: DeviceMemory = {}
    tree: dict[str, Any] = {}
    for name, record in state.items():
        items: list[Any] = []
        for key, value in record.items():
            if isinstance(value, Array):
                place = f"{STATE}.{len(tensors)}"
                tensors[place] = _bytes(value.data)
                items.append([key, [value.dtype, list(value.shape), value.stype, place]])
            else:
                items.append([key, _plain(value)])
        tree[name] = [type(record).__name__, items]
    if tree:
        tensors[STATE] = _bytes(json.dumps(tree).encode())
    return tensors


def unpacked_state(memory: Mapping[str, Tensor]) -> RecordDict:
    """The state that `packed_state` was given."""
    if STATE not in memory:
        return RecordDict()
    state = RecordDict()
    for name, (kind, items) in json.loads(memory[STATE].numpy().tobytes()).items():
        if kind == ArrayRecord.__name__:
            arrays = {
                key: Array(dtype, tuple(shape), stype, memory[place].numpy().tobytes())
                for key, (dtype, shape, stype, place) in items
            }
            state[name] = ArrayRecord(arrays)
        else:
            state[name] = RECORDS[kind]({key: _restored(value) for key, value in items})
    return state


def _bytes(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def _plain(value: Any) -> Any:
    """A value of a record as JSON; bytes as a table of their hexadecimal digits."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _restored(value: Any) -> Any:
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"])
    return [_restored(each) for each in value] if isinstance(value, list) else value
