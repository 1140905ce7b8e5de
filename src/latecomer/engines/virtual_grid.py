"""Virtual engine for Flower strategies: same data, devices, links and clock as `VirtualEngine`.

`FlowerRoundsEngine` calls `strategy.start(grid=...)` with a grid whose nodes are the devices of the
fleet. While the strategy waits for replies, virtual time advances.
"""

import logging
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from latecomer.core.messages import TimerExpired, TrainSpec, wire_bytes
from latecomer.core.outcomes import Logged
from latecomer.core.params import Layout
from latecomer.core.server import Server
from latecomer.core.strategy import Assignment
from latecomer.engines.flower import only
from latecomer.engines.flower_private import allow_messages, set_message_id
from latecomer.engines.memory import keep_freed_memory, rare_collections
from latecomer.engines.trainers import OneByOne
from latecomer.engines.virtual import Bounds, ServerCosts, VirtualEngine
from latecomer.errors import BadInput, RunFailed
from latecomer.fleet.fleet import Fleet
from latecomer.strategies.parts.flower_rounds import FlowerRounds

FIRST_NODE = 1000  # the node of device 0; Flower reserves small numbers
MAX_ROUNDS = 10**9
LOST, REFUSED = 5, 2  # Flower's error codes
EVALUATIONS = 10**6  # offset of the random streams of evaluations from those of tasks
# Keys of a message's config, and the fields of `TrainSpec` that they set.
CONFIG_KEYS = {
    "lr": "lr",
    "learning-rate": "lr",
    "local-epochs": "local_epochs",
    "batch-size": "batch_size",
    "proximal-mu": "prox",
}

# Metrics of a model on a device's test data, and the number of examples; None without test data.
Evaluate = Callable[[int, Tensor], tuple[Mapping[str, float], int] | None]


class _Ended(BaseException):
    """Ends the strategy for a reason; passes through `except Exception`."""


class FlowerRoundsEngine(VirtualEngine):
    """Runs a Flower strategy in virtual time.

    evaluate: local test metrics of a model on one device, for the strategy's evaluate messages.

    The state of a Flower strategy is not accessible, so a run cannot be resumed: it starts again.
    """

    resumable = False

    def __init__(
        self,
        server: Server,
        fleet: Fleet,
        trainer: OneByOne,
        devices: Collection[int],
        layout: Layout,
        evaluate: Evaluate,
        costs: ServerCosts | None = None,
        on_note: Callable[[float, Logged], None] | None = None,
    ) -> None:
        super().__init__(server, fleet, trainer, devices, costs, on_note)
        merge = server.strategy.merge
        if not isinstance(merge, FlowerRounds):
            raise BadInput(f"strategy {server.strategy.name!r} is not a Flower strategy")
        self.rounds, self.layout, self.evaluate = merge, layout, evaluate
        self._timers = -1

    def run(self, bounds: Bounds, after_step: Callable[[], bool]) -> str:
        """Run the strategy to the first bound; returns the reason for the end."""
        keep_freed_memory()
        grid, rounds = VirtualGrid(self, bounds, after_step), self.rounds
        with rare_collections(), allow_messages(), _flower_settings(self.server.seed):
            try:
                result = rounds.flower_strategy.start(
                    grid=grid,
                    initial_arrays=self.records(self.server.store.head_params()),
                    num_rounds=bounds.epochs or MAX_ROUNDS,
                    timeout=rounds.timeout,
                    train_config=ConfigRecord(dict(rounds.train)),
                    evaluate_fn=grid.commit,
                )
                if getattr(result, "arrays", None):
                    grid.commit(0, result.arrays)
                grid.finish_step()
            except _Ended as end:
                return str(end)
        return bounds.reached(self.server) or "the strategy has done its rounds"

    def records(self, vector: Tensor) -> ArrayRecord:
        """A model in Flower's form: arrays by name."""
        named = self.layout.unflatten(vector)
        return ArrayRecord({name: Array(each.numpy()) for name, each in named.items()})

    def vector(self, records: ArrayRecord) -> Tensor:
        """The model in a record as a vector; RunFailed if its arrays are not those of the model."""
        shapes = {name: tuple(array.shape) for name, array in records.items()}
        if shapes != dict(zip(self.layout.names, self.layout.shapes, strict=True)):
            raise RunFailed(f"{self.strategy_name} sends arrays that are not those of the model")
        tensors = {name: torch.tensor(array.numpy()) for name, array in records.items()}
        return self.layout.flatten(tensors)

    @property
    def strategy_name(self) -> str:
        return type(self.rounds.flower_strategy).__name__

    def train_spec(self, config: Mapping[str, Any]) -> TrainSpec:
        """The `TrainSpec` with the changes of a message's config."""
        changes = {}
        for key, value in config.items():
            if key == "server-round":
                continue
            if key not in CONFIG_KEYS:
                raise RunFailed(
                    f"{self.strategy_name} sends {key!r} in its config, which Latecomer's client"
                    f" does not know (known: {', '.join(CONFIG_KEYS)})"
                )
            changes[CONFIG_KEYS[key]] = value
        return replace(self.server.spec, **changes)

    # For the grid.

    def handle_now(self) -> None:
        """Let the server act on new assignments and a new model, without an event."""
        self._handle([])

    def set_timer(self, at: float) -> int:
        """Set a timer for this virtual time; returns its number."""
        self._timers += 1
        self._push(at, TimerExpired("flower", self._timers))
        return self._timers

    def one_step(self, bounds: Bounds) -> None:
        if (reason := self._reason_to_end(bounds)) is not None:
            raise _Ended(reason)
        self._step(bounds.updates)


@dataclass(slots=True)
class _Sent:
    """A message of the strategy, its device, its task, and the reply when there is one."""

    message: Message
    device: int
    task: int = -1
    reply: Message | None = None


class SimulatedGrid(Grid):  # type: ignore[misc, unused-ignore]  # without Flower it is Any
    """A grid without a Flower run; subclasses say what happens to messages."""

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        raise RunFailed("there is no Flower run in virtual time")

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)


class VirtualGrid(SimulatedGrid):
    """Flower's `Grid` over a simulated fleet; waiting for replies advances virtual time."""

    def __init__(
        self, engine: FlowerRoundsEngine, bounds: Bounds, after_step: Callable[[], bool]
    ) -> None:
        self.engine, self.bounds, self.after_step = engine, bounds, after_step
        self._open: dict[str, _Sent] = {}
        self._sent = 0
        self._node_queries = 0  # since the last message
        self._step_due = False  # `after_step` is called once the strategy has used the replies

    # The interface of `Grid`.

    def get_node_ids(self) -> Iterable[int]:
        """The idle devices. Repeated queries wait until there are more of them."""
        server, strategy = self.engine.server, self.engine.rounds.flower_strategy
        need = max(1, getattr(strategy, "min_available_nodes", 1))
        self._until(lambda: len(server.idle) >= need)
        self._node_queries += 1
        if self._node_queries > 2:
            count = len(server.idle)
            self._until(lambda: len(server.idle) > count)
        return sorted(FIRST_NODE + device for device in server.idle)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        sent = [self._register(message) for message in messages]
        if sent:
            self._node_queries = 0
            self._take_model([each.message for each in sent])
            self.finish_step()
            self._train([each for each in sent if _kind(each.message) == "train"])
            self._evaluate([each for each in sent if _kind(each.message) != "train"])
        return [str(each.message.metadata.message_id) for each in sent]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that have arrived; waits for the first one if there are none."""
        wanted = [self._open[name] for name in message_ids if name in self._open]
        if not wanted:
            return []
        self._until(lambda: any(self._answered(each) for each in wanted))
        return self._taken(wanted)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        names = list(self.push_messages(messages))
        wanted = [self._open[name] for name in names]
        rounds = self.engine.rounds
        timer = None if timeout is None else self.engine.set_timer(self.engine.now + timeout)
        self._until(
            lambda: (
                all(self._answered(each) for each in wanted)
                or (timer is not None and rounds.last_timer >= timer)
            )
        )
        replies = self._taken(wanted)
        for each in wanted:  # later replies are not collected
            rounds.awaited.discard(each.task)
            self._open.pop(str(each.message.metadata.message_id), None)
        return replies

    # The model.

    def commit(self, server_round: int, arrays: ArrayRecord) -> None:
        """Commit the global model of the strategy, if it differs from the head."""
        if self._is_new(model := self.engine.vector(arrays)):
            self.engine.rounds.model = model
            self.finish_step()

    def _is_new(self, model: Tensor) -> bool:
        return not torch.equal(model, self.engine.server.store.head_params())

    def _take_model(self, messages: list[Message]) -> None:
        records = [only(message.content, ArrayRecord) for message in messages]
        models = {id(record): record for record in records if record is not None}
        vectors = [self.engine.vector(record) for record in models.values()]
        if any(not torch.equal(vectors[0], other) for other in vectors[1:]):
            raise RunFailed(
                f"{self.engine.strategy_name} sends different models to different nodes: only"
                " strategies with one global model can be run in virtual time"
            )
        if vectors and self._is_new(vectors[0]):
            self.engine.rounds.model = vectors[0]

    def finish_step(self) -> None:
        """Commit the model that was taken, and call `after_step` if it is due."""
        if self.engine.rounds.model is not None:
            self.engine.handle_now()
        if self._step_due:
            self._call_after_step()
            if (reason := self.bounds.reached(self.engine.server)) is not None:
                raise _Ended(reason)

    # Messages.

    def _register(self, message: Message) -> _Sent:
        self._sent += 1
        name = f"virtual-{self._sent}"
        set_message_id(message, name)
        sent = self._open[name] = _Sent(message, message.metadata.dst_node_id - FIRST_NODE)
        if _kind(message) not in ("train", "evaluate"):
            raise RunFailed(
                f"{self.engine.strategy_name} sends a {_kind(message)!r} message: only train and"
                " evaluate are known in virtual time"
            )
        return sent

    def _train(self, sent: list[_Sent]) -> None:
        server, rounds = self.engine.server, self.engine.rounds
        free: list[_Sent] = []
        for each in sent:
            if each.device in server.idle and each.device not in [o.device for o in free]:
                free.append(each)
                config = only(each.message.content, ConfigRecord) or {}
                spec = self.engine.train_spec(config)
                rounds.assignments.append(Assignment(each.device, spec=spec))
            else:
                each.reply = _failed(each, "the node is busy or absent")
        # The server creates the tasks in this call.
        self.engine.handle_now()
        for each in free:
            each.task = server.working[each.device]
            rounds.awaited.add(each.task)

    def _evaluate(self, sent: list[_Sent]) -> None:
        """Evaluate on devices; takes a download and a third of the time of a training epoch."""
        engine, ends = self.engine, [self.engine.now]
        for each in sent:
            model = engine.vector(only(each.message.content, ArrayRecord))
            found = engine.evaluate(each.device, model)
            if found is None:
                each.reply = _failed(each, "the device has no data to evaluate on")
                continue
            metrics, examples = found
            engine.bytes_down += wire_bytes(model)
            task_times = engine.fleet.task_times(
                each.device, EVALUATIONS + self._sent, engine.now, examples / 3,
                wire_bytes(model), 0,
            )  # fmt: skip
            if task_times.arrives is None:
                ends.append(engine.now if task_times.reported is None else task_times.reported)
                each.reply = _failed(each, "the device was lost while it evaluated")
                continue
            ends.append(task_times.arrives)
            record = MetricRecord({**metrics, "num-examples": examples})
            each.reply = Message(RecordDict({"metrics": record}), reply_to=each.message)
        if sent and max(ends) > engine.now:
            timer = engine.set_timer(max(ends))
            self._until(lambda: engine.rounds.last_timer >= timer)

    def _answered(self, each: _Sent) -> bool:
        if each.reply is None:
            contribution = self.engine.rounds.arrived.pop(each.task, None)
            if contribution is not None:
                trained = self.engine.records(contribution.base + contribution.delta)
                metrics: dict[str, Any] = {
                    **contribution.update.metrics,
                    "num-examples": contribution.update.num_examples,
                }
                content = RecordDict({"arrays": trained, "metrics": MetricRecord(metrics)})
                each.reply = Message(content, reply_to=each.message)
            elif each.task not in self.engine.server.open_tasks:
                each.reply = _failed(each, "the task was lost, or its update refused", REFUSED)
        return each.reply is not None

    def _taken(self, sent: list[_Sent]) -> list[Message]:
        found = [each for each in sent if self._answered(each)]
        for each in found:
            self.engine.rounds.awaited.discard(each.task)
            del self._open[str(each.message.metadata.message_id)]
        return [each.reply for each in found if each.reply is not None]

    # Time.

    def _until(self, done: Callable[[], bool]) -> None:
        """Advance virtual time until `done`; `after_step` follows each step.

        After the last step it waits for the model that the strategy makes of the replies.
        """
        while not done():
            self._call_after_step()
            self.engine.one_step(self.bounds)
            self._step_due = True

    def _call_after_step(self) -> None:
        """Call `after_step` if it is due."""
        is_due, self._step_due = self._step_due, False
        if is_due and not self.after_step():
            raise _Ended("interrupted")


def _kind(message: Message) -> str:
    return str(message.metadata.message_type).partition(".")[0]


def _failed(sent: _Sent, reason: str, code: int = LOST) -> Message:
    return Message(Error(code, reason), reply_to=sent.message)


@contextmanager
def _flower_settings(seed: int) -> Iterator[None]:
    """Seed Python's global generator, with which Flower samples nodes; silence Flower's log."""
    log = logging.getLogger("flwr")
    before, level = random.getstate(), log.level
    random.seed(seed)
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        random.setstate(before)
        log.setLevel(level)
