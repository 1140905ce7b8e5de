"""The server as a pure state machine: events in, commands out. No clock, no thread, no file."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import inf, isfinite
from typing import Any

from torch import Tensor

from latecomer.core.checks import Checks
from latecomer.core.messages import (
    MAIN,
    Arrived,
    Broadcast,
    Command,
    Contribution,
    Event,
    Failed,
    Joined,
    Later,
    Left,
    Note,
    Offer,
    Ready,
    Received,
    Send,
    ServingSettings,
    Task,
    TimerExpired,
    TrainSpec,
    Update,
    wire_bytes,
)
from latecomer.core.pool import Pool
from latecomer.core.store import ModelStore
from latecomer.core.strategy import (
    Absorb,
    Assignment,
    BroadcastHead,
    Commit,
    DelayedCompensation,
    Drop,
    FollowsLineages,
    Refines,
    Split,
    Strategy,
    Tells,
    WaitsForTimer,
)
from latecomer.core.submodel import Submodel, take

NOTHING: Mapping[str, float] = {}


class Server:
    """Drives one strategy over the store.

    `handle` takes all events of one moment, so that an epoch is closed by everybody who arrived
    at that moment and not by whoever happens to stand first in the queue. `networks` gives the
    network that devices with a sub-model (None: the whole) train, for strategies that run it too.
    """

    def __init__(
        self,
        initial: Tensor,
        strategy: Strategy,
        spec: TrainSpec,
        checks: Checks | None = None,
        seed: int = 0,
        networks: Callable[[Submodel | None], object | None] = lambda submodel: None,
    ) -> None:
        self.store = ModelStore(initial)
        self.strategy = strategy
        self.spec = strategy.prepare(spec)
        self.checks = checks or Checks()
        self.seed = seed
        self.network = networks
        self._refining = [part for part in strategy.slots.values() if isinstance(part, Refines)]
        self._telling = [part for part in strategy.slots.values() if isinstance(part, Tells)]
        self.idle = Pool()
        self.open_tasks: dict[int, Task] = {}
        self.working: dict[int, int] = {}  # device -> the task it is busy with
        self.tasks_given = 0
        self.accepted = 0
        self._numbers: dict[int, int] = {}  # device -> tasks it has been given
        self._homes: dict[int, str] = {}
        self._submodels: dict[int, Submodel | None] = {}
        self._carried: dict[int, Submodel | None] = {}  # what the last task was, where it matters
        self._retired: set[int] = set()  # devices that have spent their privacy budget

    def home(self, device: int) -> str:
        """The lineage whose model this device uses."""
        return self.store.resolve(self._homes.get(device, MAIN))

    def model(self, lineage: str = MAIN) -> Tensor:
        """The newest model of a lineage, as it is to be used."""
        own = self.strategy.own
        return self.store.head_params(lineage) if own is None else own.calibrated(lineage, self)

    def model_on_devices(self, lineage: str = MAIN) -> Tensor:
        """The newest model of a lineage, as devices have it that were sent it."""
        own = self.strategy.own
        return self.store.head_params(lineage) if own is None else own.as_sent(lineage, self)

    def use(self, lineage: str) -> ServingSettings | None:
        """What a device must know to use the newest model of a lineage."""
        own = self.strategy.own
        return None if own is None else own.use(lineage, self)

    def carries(self, device: int) -> Submodel | None:
        """The part of the model that this device uses."""
        return self._carried.get(device)

    def handle(self, *events: Event) -> list[Command]:
        """Take in all events of one moment; returns what the engine has to do now."""
        out: list[Command] = []
        for event in events:
            match event:
                case Arrived():
                    self._arrived(event, out)
                case Ready(contribution):
                    self._ready(contribution, out)
                case Joined(device, submodel):
                    if submodel is not None or device in self._submodels:
                        self._submodels[device] = submodel
                    self.working.pop(device, None)
                    if device not in self._retired:
                        self.idle.add(device)
                case Left(device):
                    self.idle.discard(device)
                case Failed(task_id, reason):
                    self._failed(task_id, reason, out)
                case TimerExpired():
                    self._due(event)
                case Received(usable):
                    self._let_go(usable)
        for commit in self.strategy.merge.settle(self):
            self._commit(commit, out)
        for refining in self._refining:
            for wish in refining.refine(self):
                self._refine(wish, out)
        for part in self._telling:
            out.extend(part.tell(self))
        self._dispatch(out)
        return out

    def _arrived(self, event: Arrived, out: list[Command]) -> None:
        """Close the task -> base -> route -> compensate; *weigh* and *merge* follow."""
        update, device = event.update, event.device
        if device in self.working and self.working[device] == update.task_id:
            del self.working[device]
            if device not in self._retired:
                self.idle.add(device)
        task, reason = self._admit(event)
        if task is None or reason is not None:
            out.append(self._refusal(event, task, reason))
            return
        self.accepted += 1
        if update.last:
            self._retire(device, update.epsilon, out)
        if update.delta is None:
            # A sign of life: the device had nothing worth sending.
            fields = {"device": device, "task": task.id, "sent": task.version, "skipped": True}
            saved = {"saved": wire_bytes(task.params)}
            out.append(Note("arrival", {**fields, **saved, **_privacy(update)}))
            return
        task = task.chosen(update.choice)
        sent_from = self.store.resolve(task.lineage)
        staleness = self.store.staleness(task.version, sent_from)
        contribution = Contribution(
            task, update, task.params, update.delta, sent_from, staleness, seconds=event.seconds
        )
        lineage = self.strategy.route(contribution, self)
        if lineage not in self.store:
            self.fork(sent_from, lineage)
            out.append(Note("split", {"lineage": sent_from, "into": lineage, "devices": [device]}))
        if lineage != self.home(device):
            self._homes[device] = lineage
        if lineage != sent_from:
            staleness = self.store.staleness(task.version, lineage)
            contribution = replace(contribution, lineage=lineage, staleness=staleness)
        compensated = self.strategy.compensate(contribution, self)
        if isinstance(compensated, Contribution):
            self._merge("arrival", compensated, staleness, out)
            return
        out.append(_line("arrival", contribution, self, staleness=staleness))
        if isinstance(compensated, Later):
            out.append(compensated)
        else:
            repaired, told = compensated
            self._merge("compensation", repaired, staleness, out, told)

    def _retire(self, device: int, epsilon: float, out: list[Command]) -> None:
        """The device has said its last word: it is given no more tasks."""
        self.idle.discard(device)
        if device not in self._retired:
            self._retired.add(device)
            reason = "its next release would exceed its privacy budget"
            out.append(Note("retire", {"device": device, "epsilon": epsilon, "reason": reason}))

    def _ready(self, contribution: Contribution, out: list[Command]) -> None:
        """A repair has ended; commits made meanwhile count, so it is finished on today's head."""
        if contribution.lineage not in self.store:
            # It was absorbed while the contribution was being repaired.
            lineage = self.store.resolve(contribution.lineage)
            contribution = replace(contribution, lineage=lineage)
        task, part = contribution.task, self.strategy.compensate
        # Its version is pinned no more: the store may have forgotten commits that old.
        counted = self.store.staleness(task.version, contribution.lineage)
        staleness = max(counted, contribution.staleness)
        told = NOTHING
        if isinstance(part, DelayedCompensation):
            contribution, told = part.finish(replace(contribution, staleness=staleness), self)
        self._merge("compensation", contribution, staleness, out, told)

    def _refusal(self, event: Arrived, task: Task | None, reason: str | None) -> Note:
        update = event.update
        number = update.task_id if isinstance(update.task_id, int) else None
        fields: dict[str, Any] = {"device": event.device, "task": number, "reason": reason}
        if task is not None:
            fields |= {"sent": task.version, "version": self.store.head(self.home(event.device))}
        if isinstance(update.delta, Tensor):
            fields["bytes"] = wire_bytes(update.delta)
        if type(update.epsilon) in (int, float) and 0 < update.epsilon < inf:
            # It was released, whatever becomes of it.
            fields["epsilon"] = update.epsilon
        return Note("refusal", fields)

    def _admit(self, event: Arrived) -> tuple[Task | None, str | None]:
        """The task this update answers, closed; or the reason why it is refused."""
        task_id = event.update.task_id
        task = self.open_tasks.get(task_id) if isinstance(task_id, int) else None
        if task is None:
            return None, "the task is unknown or already closed"
        if task.device != event.device:
            # The task stays open: its own device may still answer.
            return None, f"the task belongs to device {task.device}"
        self._close(task)
        return task, self.checks.reason_to_refuse(task, event.update)

    def _merge(
        self,
        kind: str,
        contribution: Contribution,
        staleness: int,
        out: list[Command],
        told: Mapping[str, float] = NOTHING,
    ) -> None:
        """Weigh -> merge -> commit."""
        weight = float(self.strategy.weigh(contribution, self))
        contribution = contribution.weighed(weight)
        out.append(_line(kind, contribution, self, staleness=staleness, weight=weight, **told))
        result: Commit | Drop | None
        if isfinite(weight):
            result = self.strategy.merge.add(contribution, self)
        else:
            result = Drop(f"its weight is {weight}")
        if isinstance(result, Drop):
            task = contribution.task
            fields = {"device": task.device, "task": task.id, "reason": result.reason}
            out.append(Note("drop", fields))
        elif result is not None:
            self._commit(result, out)

    def _commit(self, commit: Commit, out: list[Command]) -> None:
        if commit.lineage not in self.store:
            self.fork(MAIN, commit.lineage)
        version = self.store.commit(commit.lineage, commit.params)
        fields: dict[str, Any] = {
            "lineage": commit.lineage,
            "version": version,
            "updates": commit.contributions,
        }
        if commit.surrogates:
            fields["surrogates"] = commit.surrogates
        out.append(Note("commit", fields))

    def _refine(self, wish: Split | Absorb | BroadcastHead, out: list[Command]) -> None:
        match wish:
            case Split(parent, child, devices):
                self.fork(parent, child)
                self._homes.update(dict.fromkeys(devices, child))
                fields = {"lineage": parent, "into": child, "devices": list(devices)}
                out.append(Note("split", fields))
            case Absorb(into, gone, params, reason):
                self._commit(Commit(into, params, 0), out)
                self.absorb(into, gone)
                why = {"reason": reason} if reason else {}
                out.append(Note("merge", {"lineage": gone, "into": into, **why}))
            case BroadcastHead(lineage, devices):
                self._spread(lineage, devices, out)

    def _spread(self, lineage: str, devices: frozenset[int] | None, out: list[Command]) -> None:
        version, told = self.store.head(lineage), list[Task]()
        for device, task_id in self.working.items():
            task = self.open_tasks.get(task_id)
            # What it was sent last decides: its task may be of a lineage that was absorbed.
            if task is None or self.home(device) != lineage or task.versions[-1] == version:
                continue
            if devices is not None and device not in devices:
                continue
            task.broadcasts += (self._offer(lineage, task.submodel),)
            self.store.pin(version)
            told.append(task)
        if told:
            sent = sum(wire_bytes(task.params) for task in told)
            fields = {"lineage": lineage, "version": version, "devices": len(told), "bytes": sent}
            out.append(Note("broadcast", fields))
            out.append(Broadcast(tuple(told)))

    def _let_go(self, usable: tuple[tuple[int, tuple[int, ...]], ...]) -> None:
        """Keep of the broadcasts only what an update may still be from."""
        for task_id, numbers in usable:
            task = self.open_tasks.get(task_id)
            if task is None:
                continue
            kept = list(task.broadcasts)
            for place, offer in enumerate(kept):
                if offer is not None and len(task.offers) + place + 1 not in numbers:
                    self.store.unpin(offer.version)
                    kept[place] = None
            task.broadcasts = tuple(kept)

    def _failed(self, task_id: int, reason: str, out: list[Command]) -> None:
        task = self.open_tasks.get(task_id)
        if task is None:
            return
        self._close(task)
        if self.working.get(task.device) == task_id:
            del self.working[task.device]
        out.append(Note("drop", {"device": task.device, "task": task_id, "reason": reason}))

    def _due(self, due: TimerExpired) -> None:
        for part in self.strategy.slots.values():
            if isinstance(part, WaitsForTimer):
                part.on_timer(due, self)

    def _close(self, task: Task) -> None:
        del self.open_tasks[task.id]
        for version in task.versions:
            self.store.unpin(version)

    def _dispatch(self, out: list[Command]) -> None:
        for wish in self.strategy.dispatch(self):
            if isinstance(wish, Assignment):
                out.extend(self._assign(wish))
            else:
                out.append(wish)

    def _assign(self, wish: Assignment) -> Iterable[Command]:
        device, lineage = wish.device, wish.lineage
        if lineage not in self.store:
            self.fork(self.home(device), lineage)
        version = self.store.head(lineage)
        submodel = self._submodels.get(device) if wish.carry == "own" else wish.carry
        if submodel is not None or device in self._carried:
            self._carried[device] = submodel
        task = Task(
            id=self.tasks_given,
            device=device,
            number=self._numbers.get(device, 0),
            lineage=lineage,
            version=version,
            spec=wish.spec or self.spec,
            params=take(self.store.params(version), submodel),
            submodel=submodel,
            offers=tuple(self._offer(other, submodel) for other in wish.offers),
        )
        self.tasks_given += 1
        self._numbers[device] = task.number + 1
        if not task.offers and lineage != self._homes.get(device, MAIN):
            self._homes[device] = lineage
        for number in task.versions:
            self.store.pin(number)
        self.open_tasks[task.id] = task
        self.working[device] = task.id
        self.idle.discard(device)
        fields = {
            "device": device,
            "task": task.id,
            "lineage": lineage,
            "version": version,
            "bytes": task.bytes_down,
        }
        if task.offers:
            fields["offers"] = len(task.offers)
        return Note("dispatch", fields), Send(task)

    def _offer(self, lineage: str, submodel: Submodel | None) -> Offer:
        version = self.store.head(lineage)
        return Offer(lineage, version, take(self.store.params(version), submodel))

    def fork(self, parent: str, child: str) -> None:
        """Open a lineage on the head of another one, and let the parts that care know."""
        self.store.fork(parent, child)
        for part in self.strategy.slots.values():
            if isinstance(part, FollowsLineages):
                part.on_fork(parent, child)

    def absorb(self, into: str, gone: str) -> None:
        """Close a lineage in favour of another one, and let the parts that care know."""
        self.store.absorb(into, gone)
        for part in self.strategy.slots.values():
            if isinstance(part, FollowsLineages):
                part.on_absorb(into, gone)

    def branches(self) -> dict[str, list[int]]:
        """The devices on each lineage that some device uses, by its name."""
        found: dict[str, list[int]] = {}
        for device in sorted(self._numbers):
            found.setdefault(self.home(device), []).append(device)
        return found

    def state(self) -> dict[str, Any]:
        """Everything that `restore` needs, as plain values, tensors and messages."""
        return {
            "store": self.store.state(),
            "strategy": self.strategy.state(),
            "checks": self.checks.state(),
            "idle": list(self.idle),
            "open_tasks": list(self.open_tasks.values()),
            "working": dict(self.working),
            "tasks_given": self.tasks_given,
            "accepted": self.accepted,
            "numbers": dict(self._numbers),
            "homes": dict(self._homes),
            "submodels": dict(self._submodels),
            "carried": dict(self._carried),
            "retired": sorted(self._retired),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.store.restore(state["store"])
        self.strategy.restore(state["strategy"])
        self.checks.restore(state["checks"])
        self.idle = Pool(state["idle"])
        self.open_tasks = {task.id: task for task in state["open_tasks"]}
        self.working = dict(state["working"])
        self.tasks_given, self.accepted = state["tasks_given"], state["accepted"]
        self._numbers = dict(state["numbers"])
        self._homes = dict(state["homes"])
        self._submodels = dict(state["submodels"])
        self._carried = dict(state["carried"])
        self._retired = set(state["retired"])


def _line(kind: str, contribution: Contribution, server: Server, **more: float) -> Note:
    task = contribution.task
    fields = {
        "device": task.device,
        "task": task.id,
        "lineage": contribution.lineage,
        "sent": task.version,
        "version": server.store.head(contribution.lineage),
        **more,
    }
    if kind == "arrival":
        fields["bytes"] = wire_bytes(contribution.delta)
        fields |= _privacy(contribution.update)
    return Note(kind, fields)


def _privacy(update: Update) -> dict[str, float]:
    """What a line in the log tells of the device's ledger; nothing without one."""
    return {"epsilon": update.epsilon} if update.epsilon else {}
