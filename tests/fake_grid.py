"""A transport in one process, in virtual time: replies take as long as those of a fleet."""

import heapq
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf, prod

from latecomer.core.codec import decode, encode, storable
from latecomer.core.messages import Offer
from latecomer.engines.deployment_loop import DeploymentLoop, Timeouts
from latecomer.engines.task_codec import TaskCodec
from latecomer.engines.transport import Delivery
from latecomer.engines.virtual import Bounds
from latecomer.engines.wire import (
    Introduction,
    Order,
    Payload,
    Progress,
    ResumeOrder,
    decode_resume,
    decode_task,
    encode_introduction,
    encode_progress,
    encode_update,
)
from latecomer.fleet.fleet import Fleet
from latecomer.fleet.task_times import TaskTimes
from toy import EXAMPLES, SIZE, ToyTrainer, toy_fleet, toy_server

Answer = Callable[[str, Payload], Payload | str | None]


@dataclass
class ToyNode:
    """The device `name` behind a node. A reply that is a text is an error; None: no reply."""

    name: str
    key: str = ""
    trainer: ToyTrainer = field(default_factory=ToyTrainer)
    asked: list[str] = field(default_factory=list)
    order: Order | None = None
    done: int = 0
    newer: list[tuple[int, ResumeOrder]] = field(default_factory=list)

    def __call__(self, kind: str, payload: Payload) -> Payload | str | None:
        if kind == "query":
            return encode_introduction(
                Introduction(self.name, self.key or f"secret of {self.name}")
            )
        if "resume" in payload.fields:
            return self.resume(decode_resume(payload, SIZE))
        order = decode_task(payload, lambda name: (None, SIZE))
        self.asked.append(order.key)
        if order.until:
            return self.begin(order)
        return self.reply(encode_update(self.trainer.update(order.task), order.key))

    # A resumable task: its order, its epochs done, and the broadcast models with their epochs.

    def begin(self, order: Order) -> Payload:
        if self.order is None or self.order.key != order.key:
            self.order, self.done, self.newer = order, order.until, []
        return self.progress()

    def progress(self) -> Payload:
        last = self.newer[-1][1] if self.newer else ResumeOrder("", 0)
        return encode_progress(Progress(self.done, last.number, last.name), self.order.key)

    def resume(self, given: ResumeOrder) -> Payload | str | None:
        if self.order is None or self.order.key != given.key:
            return "the client raised an error: not in the middle of that task"
        if given.newer is not None:
            self.newer.append((self.done, given))
        self.done = given.until
        task = self.order.task
        if self.done < task.spec.local_epochs:
            return self.progress()
        most = max([each.number for _, each in self.newer], default=0)
        broadcasts = [None] * (most - len(task.offers))
        for _, each in self.newer:
            broadcasts[each.number - len(task.offers) - 1] = Offer("", 0, each.newer)
        rebases = tuple((done, each.number) for done, each in self.newer)
        update = self.trainer.update(replace(task, broadcasts=tuple(broadcasts)), rebases)
        name = self.newer[-1][1].name if self.newer else ""
        self.order = None
        return self.reply(encode_update(update, given.key, name))

    def reply(self, valid: Payload) -> Payload | str | None:
        return valid


class FakeTransport:
    """Node i needs as long as device i of the fleet; introductions take no time.

    A node handles one message at a time, and never another if it does not answer one. `examples`
    are those that a task trains on, by device.
    """

    serial = True

    def __init__(
        self, fleet: Fleet, nodes: dict[int, Answer], examples: dict[int, float] | None = None
    ) -> None:
        self.fleet, self.answers, self.examples = fleet, dict(nodes), examples or {}
        self.time = 0.0
        self.rejects: set[int] = set()
        self.sent: list[tuple[float, int, str]] = []
        self._heap: list[tuple[float, int, Delivery]] = []
        self._numbers: dict[int, int] = {}
        self._task_times: dict[int, tuple[TaskTimes, int]] = {}  # and passes, of tasks in parts
        self._ids = count()
        self.busy_until: dict[int, float] = {}

    def now(self) -> float:
        return self.time

    def nodes(self) -> list[int]:
        self.busy_until = {n: until for n, until in self.busy_until.items() if n in self.answers}
        return list(self.answers)

    def send(self, node: int, kind: str, payload: Payload) -> str | None:
        if node not in self.answers or node in self.rejects:
            return None
        number = next(self._ids)
        self.sent.append((self.time, node, kind))
        free = self.busy_until.get(node, 0.0)
        arrives = max(self.time, free) if kind == "query" else self._arrives(node, payload)
        answer = self.answers[node](kind, payload)
        if kind == "train":
            self.busy_until[node] = inf if None in (answer, arrives) else arrives
        if answer is not None and arrives is not None and arrives < inf:
            parts = (None, answer) if isinstance(answer, str) else (answer, "")
            heapq.heappush(self._heap, (arrives, number, Delivery(f"m{number}", *parts)))
        return f"m{number}"

    def _arrives(self, node: int, payload: Payload) -> float | None:
        fields = payload.fields
        if "resume" not in fields:
            task_times = self._times_of(node, payload)
            if "until" not in fields:
                return task_times.arrives
            self._task_times[node] = task_times, fields["spec.local_epochs"]
        task_times, passes = self._task_times[node]
        if task_times.arrives is None or fields["until"] == passes:
            return task_times.arrives
        span = task_times.trained - task_times.downloaded
        # A device that is sent its task again has done a part of it already.
        return max(self.time, task_times.downloaded + span * fields["until"] / passes)

    def _times_of(self, node: int, payload: Payload) -> TaskTimes:
        number = self._numbers[node] = self._numbers.get(node, -1) + 1
        models, size = 1, 4 * sum(prod(each.shape) for each in payload.named.values())
        if payload.array is not None:
            models, size = payload.array.shape[0], 4 * payload.array.shape[1]
        device = node % len(self.fleet.devices)
        examples = self.examples.get(device, EXAMPLES)
        return self.fleet.task_times(device, number, self.time, examples, models * size, size)

    def again(self, delivery: Delivery, after: float = 0.0) -> None:
        """Deliver something after `after` seconds."""
        heapq.heappush(self._heap, (self.time + after, next(self._ids), delivery))

    def collect(self, until: float) -> list[Delivery]:
        if not self._heap or self._heap[0][0] > until:
            self.time = max(self.time, until)
            return []
        self.time, found = self._heap[0][0], []
        while self._heap and self._heap[0][0] == self.time:
            found.append(heapq.heappop(self._heap)[2])
        return found

    def forget(self, message: str) -> None: ...
    def close(self) -> None: ...


@dataclass
class ToyFederation:
    """The deployment loop over the toy problem, on the fake transport."""

    strategy: str = "fedasync"
    nodes: dict[int, Answer] | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    session: str = "s"
    options: dict = field(default_factory=dict)
    log: list = field(default_factory=list)
    codec: TaskCodec | None = None

    def __post_init__(self) -> None:
        fleet = toy_fleet()
        valid = {i: ToyNode(f"toy-{i}") for i in range(len(fleet.devices))}
        self.transport = FakeTransport(fleet, valid | (self.nodes or {}))
        self.server = toy_server(self.strategy, self.options)
        self.loop = DeploymentLoop(
            self.server,
            self.transport,
            self.timeouts,
            on_note=lambda time, note: self.log.append((time, note.kind, dict(note.fields))),
            session=self.session,
            codec=self.codec,
        )

    def until(self, updates: int = 0, **bounds: float) -> str:
        return self.loop.run(Bounds(updates, **bounds))

    def lines(self, kind: str) -> list[dict]:
        return [fields for _, k, fields in self.log if k == kind]

    def heads(self) -> dict[str, list[float]]:
        store = self.server.store
        return {name: store.head_params(name).tolist() for name in store.lineages}


def saved(run):
    tree, tensors = encode({"server": run.server.state(), "loop": run.loop.state()})
    return json.dumps(tree), storable(tensors)


def revived(state, nodes, session="t", **more):
    new = ToyFederation(nodes=nodes, session=session, **more)
    tree, tensors = state
    found = decode(json.loads(tree), tensors)
    new.server.restore(found["server"])
    new.loop.restore(found["loop"])
    return new
