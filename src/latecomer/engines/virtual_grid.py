"""A strategy of Flower's in our virtual time: the same data, devices, links and clock.

`FlowerRoundsEngine` runs `strategy.start(grid=...)` with a grid whose nodes are the devices of the
fleet. While the strategy waits for replies, virtual time passes.
"""

import logging
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid
from torch import Tensor

from latecomer.core.messages import TimerExpired, TrainSpec, wire_bytes
from latecomer.core.outcomes import Logged
from latecomer.core.params import Layout
from latecomer.core.server import Server
from latecomer.core.strategy import Assignment
from latecomer.engines.flower import only
from latecomer.engines.flower_private import may_make_messages, number
from latecomer.engines.memory import keep_freed_memory, rare_collections
from latecomer.engines.trainers import Trainer
from latecomer.engines.virtual import Bounds, ServerCosts, VirtualEngine
from latecomer.errors import BadInput, RunFailed
from latecomer.fleet.fleet import Fleet
from latecomer.strategies.parts.flower_rounds import FlowerRounds

FIRST_NODE = 1000  # the node of device 0; Flower keeps small numbers to itself
ENDLESS = 10**9  # rounds
LOST, REFUSED = 5, 2  # Flower's error codes
EVALUATIONS = 10**6  # keeps the luck of evaluations apart from that of tasks
# What a config says to a client, and which part of our training program that is.
KNOWN = {
    "lr": "lr",
    "learning-rate": "lr",
    "local-epochs": "local_epochs",
    "batch-size": "batch_size",
    "proximal-mu": "prox",
}

# How a model does on a device's own held-back data: metrics and their number; None without any.
Evaluate = Callable[[int, Tensor], tuple[Mapping[str, float], int] | None]


class _Ended(BaseException):
    """The run is over while the strategy would go on; no `except Exception` may stop it."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class FlowerRoundsEngine(VirtualEngine):
    """The virtual engine under the direction of a strategy of Flower's.

    Such a strategy keeps its state to itself, so a run cannot be resumed: it begins anew.
    """

    resumable = False

    def __init__(
        self,
        server: Server,
        fleet: Fleet,
        trainer: Trainer,
        devices: Collection[int],
        layout: Layout,
        evaluate: Evaluate,
        costs: ServerCosts | None = None,
        on_note: Callable[[float, Logged], None] | None = None,
    ) -> None:
        super().__init__(server, fleet, trainer, devices, costs, on_note)
        merge = server.strategy.merge
        if not isinstance(merge, FlowerRounds):
            raise BadInput(f"strategy {server.strategy.name!r} is not directed by Flower")
        self.directed, self.layout, self.evaluate = merge, layout, evaluate
        self._timers = -1

    def run(self, bounds: Bounds, after_step: Callable[[], bool]) -> str:
        """Have the strategy run its rounds to the first bound; says why it ended."""
        keep_freed_memory()
        grid, directed = VirtualGrid(self, bounds, after_step), self.directed
        with rare_collections(), may_make_messages(), _own_luck(self.server.seed), _quiet():
            try:
                result = directed.director.start(
                    grid=grid,
                    initial_arrays=self.records(self.server.store.head_params()),
                    num_rounds=bounds.epochs or ENDLESS,
                    timeout=directed.timeout,
                    train_config=ConfigRecord(dict(directed.train)),
                    evaluate_fn=grid.seen,
                )
                if getattr(result, "arrays", None):
                    grid.seen(0, result.arrays)
                grid.settle()
            except _Ended as end:
                return end.reason
        return self._done(bounds) or "the strategy has done its rounds"

    def records(self, vector: Tensor) -> ArrayRecord:
        """A model as Flower's strategies know it: arrays by name."""
        named = self.layout.unflatten(vector)
        return ArrayRecord({name: Array(each.numpy()) for name, each in named.items()})

    def vector(self, records: ArrayRecord) -> Tensor:
        """The model in a record; RunFailed if it is not one of ours."""
        shapes = {name: tuple(array.shape) for name, array in records.items()}
        if shapes != dict(zip(self.layout.names, self.layout.shapes, strict=True)):
            raise RunFailed(f"{self._who} sends arrays that are not those of the model")
        tensors = {name: torch.tensor(array.numpy()) for name, array in records.items()}
        return self.layout.flatten(tensors)

    @property
    def _who(self) -> str:
        return type(self.directed.director).__name__

    def program(self, config: Mapping[str, Any]) -> TrainSpec:
        """The training program that a message's config asks for."""
        changes = {}
        for key, value in config.items():
            if key == "server-round":
                continue
            if key not in KNOWN:
                raise RunFailed(
                    f"{self._who} tells devices {key!r} in its config, which means nothing to"
                    f" Latecomer's client (known: {', '.join(KNOWN)})"
                )
            changes[KNOWN[key]] = value
        return replace(self.server.spec, **changes)

    # For the grid.

    def nudge(self) -> None:
        """The director has changed its mind: let the server act on it, at this moment."""
        self._handle([])

    def ring(self, at: float) -> int:
        """A timer; its number."""
        self._timers += 1
        self._push(at, TimerExpired("director", self._timers))
        return self._timers

    def one_step(self, bounds: Bounds) -> None:
        if (reason := self._reason_to_end(bounds)) is not None:
            raise _Ended(reason)
        self._step(bounds.updates)


@dataclass(slots=True)
class _Order:
    """A message of the director's: what has become of it."""

    message: Message
    device: int
    task: int = -1
    reply: Message | None = None


class VirtualGrid(Grid):  # type: ignore[misc, unused-ignore]  # without Flower it is Any
    """Flower's `Grid` over a simulated fleet; who waits on it lets virtual time pass."""

    def __init__(
        self, engine: FlowerRoundsEngine, bounds: Bounds, after_step: Callable[[], bool]
    ) -> None:
        self.engine, self.bounds, self.after_step = engine, bounds, after_step
        self._orders: dict[str, _Order] = {}
        self._sent = 0
        self._looks = 0  # at the nodes, since the last message
        self._owes_step = False  # `after_step` waits for what the director makes of the replies

    # What a strategy may call.

    def get_node_ids(self) -> Iterable[int]:
        """The devices that are free. Who asks again and again is waiting for more of them."""
        server, director = self.engine.server, self.engine.directed.director
        need = max(1, getattr(director, "min_available_nodes", 1))
        self._until(lambda: len(server.idle) >= need)
        self._looks += 1
        if self._looks > 2:
            there = len(server.idle)
            self._until(lambda: len(server.idle) > there)
        return sorted(FIRST_NODE + device for device in server.idle)

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        raise RunFailed("in virtual time there is no run of Flower's to ask about")

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        orders = [self._order(message) for message in messages]
        if orders:
            self._looks = 0
            self._note_model([order.message for order in orders])
            self._settle()
            self._give([o for o in orders if _kind(o.message) == "train"])
            self._ask([o for o in orders if _kind(o.message) != "train"])
        return [str(order.message.metadata.message_id) for order in orders]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies that are there; if there are none, after the time that it takes for one."""
        wanted = [self._orders[name] for name in message_ids if name in self._orders]
        if not wanted:
            return []
        self._until(lambda: any(self._answered(order) for order in wanted))
        return self._taken(wanted)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        names = list(self.push_messages(messages))
        wanted = [self._orders[name] for name in names]
        directed = self.engine.directed
        late = None if timeout is None else self.engine.ring(self.engine.now + timeout)
        self._until(
            lambda: (
                all(self._answered(order) for order in wanted)
                or (late is not None and directed.rung >= late)
            )
        )
        replies = self._taken(wanted)
        for order in wanted:  # nobody asks for what comes later
            directed.awaited.discard(order.task)
            self._orders.pop(str(order.message.metadata.message_id), None)
        return replies

    # The model.

    def seen(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """The global model as the director has it now: what differs from the head is committed."""
        model = self.engine.vector(arrays)
        if not torch.equal(model, self.engine.server.store.head_params()):
            self.engine.directed.model = model
            self._settle()
        return None

    def settle(self) -> None:
        """The director has ended."""
        self._settle()

    def _note_model(self, messages: list[Message]) -> None:
        records = [only(message.content, ArrayRecord) for message in messages]
        models = {id(record): record for record in records if record is not None}
        vectors = [self.engine.vector(record) for record in models.values()]
        if any(not torch.equal(vectors[0], other) for other in vectors[1:]):
            raise RunFailed(
                f"{self.engine._who} sends different models to different nodes: only strategies"
                " with one global model can be run in virtual time"
            )
        head = self.engine.server.store.head_params()
        if vectors and not torch.equal(vectors[0], head):
            self.engine.directed.model = vectors[0]

    def _settle(self) -> None:
        """Commit what there is to commit, and let the run look at it."""
        if self.engine.directed.model is not None:
            self.engine.nudge()
        if self._owes_step:
            self._owes_step = False
            self._look()
            if (reason := self.engine._done(self.bounds)) is not None:
                raise _Ended(reason)

    # Messages.

    def _order(self, message: Message) -> _Order:
        self._sent += 1
        name = f"virtual-{self._sent}"
        number(message, name)
        order = self._orders[name] = _Order(message, message.metadata.dst_node_id - FIRST_NODE)
        if _kind(message) not in ("train", "evaluate"):
            raise RunFailed(
                f"{self.engine._who} sends a {_kind(message)!r} message: only train and evaluate"
                " are known in virtual time"
            )
        return order

    def _give(self, orders: list[_Order]) -> None:
        server, directed = self.engine.server, self.engine.directed
        free: list[_Order] = []
        for order in orders:
            if order.device in server.idle and order.device not in [o.device for o in free]:
                free.append(order)
                config = only(order.message.content, ConfigRecord) or {}
                spec = self.engine.program(config)
                directed.wishes.append(Assignment(order.device, spec=spec))
            else:
                order.reply = _failed(order, "the node is busy, or not there")
        # The server names the tasks in this very call.
        self.engine.nudge()
        for order in free:
            order.task = server.working[order.device]
            directed.awaited.add(order.task)

    def _ask(self, orders: list[_Order]) -> None:
        """Evaluation takes time, too: the download, and a third of a pass over the data."""
        engine, ends = self.engine, [self.engine.now]
        for order in orders:
            model = engine.vector(only(order.message.content, ArrayRecord))
            found = engine.evaluate(order.device, model)
            if found is None:
                order.reply = _failed(order, "the device has no data to evaluate on")
                continue
            metrics, examples = found
            engine.bytes_down += wire_bytes(model)
            task_times = engine.fleet.task_times(
                order.device, EVALUATIONS + self._sent, engine.now, examples / 3,
                wire_bytes(model), 0,
            )  # fmt: skip
            if task_times.arrives is None:
                ends.append(engine.now if task_times.reported is None else task_times.reported)
                order.reply = _failed(order, "the device was lost while it evaluated")
                continue
            ends.append(task_times.arrives)
            told = MetricRecord({**metrics, "num-examples": examples})
            order.reply = Message(RecordDict({"metrics": told}), reply_to=order.message)
        if orders and max(ends) > engine.now:
            bell = engine.ring(max(ends))
            self._until(lambda: engine.directed.rung >= bell)

    def _answered(self, order: _Order) -> bool:
        if order.reply is None:
            contribution = self.engine.directed.came.pop(order.task, None)
            if contribution is not None:
                trained = self.engine.records(contribution.base + contribution.delta)
                metrics: dict[str, Any] = {
                    **contribution.update.metrics,
                    "num-examples": contribution.update.num_examples,
                }
                content = RecordDict({"arrays": trained, "metrics": MetricRecord(metrics)})
                order.reply = Message(content, reply_to=order.message)
            elif order.task not in self.engine.server.open_tasks:
                order.reply = _failed(order, "the task was lost, or its update refused")
        return order.reply is not None

    def _taken(self, orders: list[_Order]) -> list[Message]:
        found = [order for order in orders if self._answered(order)]
        for order in found:
            self.engine.directed.awaited.discard(order.task)
            del self._orders[str(order.message.metadata.message_id)]
        return [order.reply for order in found if order.reply is not None]

    # Time.

    def _until(self, done: Callable[[], bool]) -> None:
        """Let virtual time pass; the run looks at every step, at the last once it has its model."""
        while not done():
            if self._owes_step:
                self._owes_step = False
                self._look()
            self.engine.one_step(self.bounds)
            self._owes_step = True

    def _look(self) -> None:
        if not self.after_step():
            raise _Ended("interrupted")


def _kind(message: Message) -> str:
    return str(message.metadata.message_type).partition(".")[0]


def _failed(order: _Order, reason: str) -> Message:
    code = REFUSED if "refused" in reason else LOST
    return Message(Error(code, reason), reply_to=order.message)


@contextmanager
def _own_luck(seed: int) -> Iterator[None]:
    """Flower samples nodes by Python's global generator: the same nodes for the same seed."""
    before = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Flower tells of every round; here the run does."""
    log = logging.getLogger("flwr")
    before = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(before)
