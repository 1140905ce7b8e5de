"""The server as a pure state machine: events in, commands out. No clock, no thread, no file."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from latecomer.core.checks import MAX_STRIKES, Checks
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
    Offer,
    Ready,
    Received,
    Send,
    ServingSettings,
    Task,
    TimerExpired,
    TrainSpec,
    wire_bytes,
)
from latecomer.core.outcomes import (
    Accepted,
    BroadcastMade,
    ClusterMerged,
    ClusterSplit,
    Committed,
    Compensation,
    Dispatched,
    Dropped,
    Quarantined,
    Refused,
    Retired,
    RolledBack,
)
from latecomer.core.params import Layout
from latecomer.core.parts import Parts
from latecomer.core.pool import Pool
from latecomer.core.store import ModelStore
from latecomer.core.strategy import (
    Absorb,
    Action,
    Assignment,
    BroadcastHead,
    Commit,
    Compensated,
    DelayedCompensation,
    Drop,
    Split,
    Stateful,
    Strategy,
)
from latecomer.core.submodel import Submodel, take

SNAPSHOT_UPDATES = 50  # accepted updates between two stored models to roll back to
MAX_SNAPSHOTS = 2  # beside the initial model
MAX_ROLLBACKS = 3  # without a new snapshot between them; then the run ends
MIN_QUARANTINE = 20  # accepted updates
VOID = "the model was rolled back while the device trained"


class Server(Stateful):
    """The state of one run, and the order in which the strategy's slots are called.

    `handle` takes all events of one moment, so an epoch is closed by every update that arrived at
    that moment, whatever their order. `strategy` is a copy of the one given: a run never changes
    its caller's. `networks` returns the network that devices with a sub-model (None: the whole
    model) train, for strategies that run it on the server. `schedule` maps the version that a task
    starts from to a factor on its learning rate. `unaveraged` are arrays of the model that are not
    floats: each accepted update that has them replaces them.
    """

    kept = (
        "open_tasks",
        "working",
        "tasks_given",
        "accepted",
        "unaveraged",
        "stopped",
        "_task_counts",
        "_lineages",
        "_declared",
        "_submodels",
        "_retired",
        "_quarantined",
        "_held_back",
        "_void_before",
        "_snapshots",
        "_snapshot_at",
        "_rollbacks",
    )

    def __init__(
        self,
        initial: Tensor,
        strategy: Strategy,
        spec: TrainSpec,
        checks: Checks | None = None,
        seed: int = 0,
        networks: Callable[[Submodel | None], object | None] = lambda submodel: None,
        schedule: Callable[[int], float] | None = None,
        unaveraged: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.schedule = schedule
        self.unaveraged = unaveraged or {}
        self.store = ModelStore(initial)
        self.parts = Parts(strategy)
        self.strategy = self.parts.strategy
        self.spec = self.strategy.prepare(spec)
        self.checks = checks or Checks()
        self.seed = seed
        self.network = networks
        self.idle = Pool()
        self.open_tasks: dict[int, Task] = {}
        self.working: dict[int, int] = {}  # device -> id of the task it works on
        self.tasks_given = 0
        self.accepted = 0
        self._task_counts: dict[int, int] = {}  # device -> tasks it has been given
        self._lineages: dict[int, str] = {}  # device -> its lineage, if not the main one
        self._declared: dict[int, Submodel | None] = {}  # device -> sub-model it joined with
        self._submodels: dict[int, Submodel | None] = {}  # device -> sub-model of its last task
        self._retired: set[int] = set()  # devices that have spent their privacy budget
        self._quarantined: dict[int, int] = {}  # device -> accepted updates until its end
        self._held_back: set[int] = set()  # devices in quarantine that are reachable and free
        self._void_before = 0  # the first task after the last roll-back: earlier ones are void
        # To roll back to: the initial model and strategy, and models with their version.
        self._initial, self._initial_parts = initial, deepcopy(self.parts.state())
        self._initial_unaveraged = self.unaveraged
        self._snapshots: list[tuple[int, Tensor]] = []
        self._snapshot_at = self._rollbacks = 0
        self.stopped = ""  # why the run has to end

    def lineage_of(self, device: int) -> str:
        """The lineage whose model this device uses: its cluster assignment."""
        return self.store.resolve(self._lineages.get(device, MAIN))

    def submodel_of(self, device: int) -> Submodel | None:
        """The sub-model of the device's last task; None for the whole model."""
        return self._submodels.get(device)

    def model(self, lineage: str = MAIN) -> Tensor:
        """The parameters of a lineage to evaluate and save."""
        lineage = self.store.resolve(lineage)
        head = self.store.head_params(lineage)
        return self.parts.folded("deployed", head, lineage, self)

    def serving_settings(self, lineage: str) -> ServingSettings:
        """The settings with which devices use the head of a lineage between tasks."""
        lineage = self.store.resolve(lineage)
        return self.parts.folded("serving", ServingSettings(), lineage, self)

    def handle(self, *events: Event) -> list[Command]:
        """Process all events of one moment; returns what the engine has to do.

        Order: each event; a roll-back if the checks ask for one; `merge.settle`; a snapshot; `act`
        of all parts; `dispatch`.
        """
        out: list[Command] = []
        for event in events:
            match event:
                case Arrived():
                    self._arrived(event, out)
                case Ready(contribution):
                    self._ready(contribution, out)
                case Joined(device, submodel):
                    if submodel is not None or device in self._declared:
                        self._declared[device] = submodel
                    self.working.pop(device, None)
                    self._set_free(device)
                case Left(device):
                    self.idle.discard(device)
                    self._held_back.discard(device)
                case Failed(task_id, reason):
                    self._failed(task_id, reason, out)
                case TimerExpired():
                    self.parts.on_timer(event, self)
                case Received(usable):
                    self._release_broadcasts(usable)
        trouble = self.checks.trouble(len(self._task_counts))
        if trouble is None and 0 < len(self._task_counts) <= len(self._quarantined):
            trouble = "all devices are in quarantine"
            self.checks.reset()
        if trouble is not None:
            self._roll_back(trouble, out)
        self._end_quarantines()
        for commit in self.strategy.merge.settle(self):
            self._commit(commit, out)
        self._take_snapshot()
        for action in self.parts.act(self):
            self._act(action, out)
        for request in self.strategy.dispatch(self):
            if isinstance(request, Assignment):
                self._assign(request, out)
            else:
                out.append(request)
        return out

    # One update: admit -> route -> compensate -> weigh -> merge -> commit.

    def _arrived(self, event: Arrived, out: list[Command]) -> None:
        """Check, route, compensate, weigh and merge an update.

        If compensation takes time (`Later`), it is weighed and merged in `_ready`.
        """
        update, device = event.update, event.device
        if device in self.working and self.working[device] == update.task_id:
            del self.working[device]
            self._set_free(device)
        task, reason = self._admit(event)
        if task is None or reason is not None:
            out.append(self._refused(event, task, reason or ""))
            self._quarantine(device, out)
            return
        self.accepted += 1
        self.unaveraged = update.unaveraged or self.unaveraged
        if update.last:
            self._retire(device, update.epsilon, out)
        epsilon = update.epsilon or None
        if update.delta is None:
            # The device skipped its upload (`TrainSpec.lazy`, or its privacy budget is spent).
            saved = wire_bytes(task.params)
            skipped = Accepted(device, task.id, sent=task.version, skipped=True, saved=saved)
            skipped.epsilon = epsilon
            out.append(skipped)
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
            out.append(ClusterSplit(sent_from, lineage, [device]))
        if lineage != self.lineage_of(device):
            self._lineages[device] = lineage
        if lineage != sent_from:
            staleness = self.store.staleness(task.version, lineage)
            contribution = replace(contribution, lineage=lineage, staleness=staleness)
        contribution = self._with_head_buffers(contribution)
        self.parts.on_arrival(contribution, self)
        head, size = self.store.head(lineage), wire_bytes(contribution.delta)
        accepted = Accepted(
            device, task.id, lineage, task.version, head, staleness, bytes=size, epsilon=epsilon
        )
        out.append(accepted)
        compensated = self.strategy.compensate(contribution, self)
        if isinstance(compensated, Later):
            out.append(compensated)
        elif isinstance(compensated, Compensated):
            self._merge_compensated(compensated, staleness, out)
        else:
            contribution = self._weighed(compensated)
            accepted.weight = contribution.weight
            self._merge(contribution, out)

    def _with_head_buffers(self, contribution: Contribution) -> Contribution:
        """The same trained model, with base and delta relative to the head where buffers are.

        Buffers (BatchNorm statistics) are averaged, not moved by deltas: a mean of trained - base
        over stale bases, added to a head that has moved the same way, makes variances negative.
        """
        layout = getattr(self.network(None), "layout", None)
        if not isinstance(layout, Layout) or not layout.buffers:
            return contribution
        begin, base, delta = layout.trained, contribution.base, contribution.delta
        buffers = self.store.head_params(contribution.lineage)[begin:]
        if torch.equal(base[begin:], buffers):
            return contribution
        moved = base[begin:] + delta[begin:] - buffers
        return replace(
            contribution,
            base=torch.cat([base[:begin], buffers]),
            delta=torch.cat([delta[:begin], moved]),
        )

    def _admit(self, event: Arrived) -> tuple[Task | None, str | None]:
        """Close the task of this update; returns it (None if unknown) and the reason to refuse."""
        task_id = event.update.task_id
        task = self.open_tasks.get(task_id) if isinstance(task_id, int) else None
        if task is None:
            return None, "the task is unknown or already closed"
        if task.device != event.device:
            # The task stays open: its own device may still answer.
            return None, f"the task belongs to device {task.device}"
        self._close(task)
        if task.id < self._void_before:
            return task, VOID
        return task, self.checks.reason_to_refuse(task, event.update)

    def _refused(self, event: Arrived, task: Task | None, reason: str) -> Refused:
        update = event.update
        number = update.task_id if isinstance(update.task_id, int) else None
        refused = Refused(event.device, number, reason)
        if task is not None:
            refused.sent = task.version
            refused.version = self.store.head(self.lineage_of(event.device))
        if isinstance(update.delta, Tensor):
            refused.bytes = wire_bytes(update.delta)
        if type(update.epsilon) in (int, float) and 0 < update.epsilon < inf:
            refused.epsilon = update.epsilon  # the device has released it all the same
        return refused

    def _retire(self, device: int, epsilon: float, out: list[Command]) -> None:
        """The device has sent its last update and is given no more tasks."""
        self.idle.discard(device)
        if device not in self._retired:
            self._retired.add(device)
            reason = "its next release would exceed its privacy budget"
            out.append(Retired(device, epsilon, reason))

    def _ready(self, contribution: Contribution, out: list[Command]) -> None:
        """The server time of a compensation is over: finish it for the present head."""
        if contribution.task.id < self._void_before:
            out.append(Dropped(contribution.task.device, contribution.task.id, VOID))
            return
        if contribution.lineage not in self.store:
            # Its lineage was absorbed meanwhile.
            lineage = self.store.resolve(contribution.lineage)
            contribution = replace(contribution, lineage=lineage)
        # The base is no longer pinned, so the store may have dropped commits that old.
        counted = self.store.staleness(contribution.task.version, contribution.lineage)
        staleness = max(counted, contribution.staleness)
        part, compensated = self.strategy.compensate, Compensated(contribution, gamma=0.0)
        if isinstance(part, DelayedCompensation):
            compensated = part.finish(replace(contribution, staleness=staleness), self)
        self._merge_compensated(compensated, staleness, out)

    def _merge_compensated(
        self, compensated: Compensated, staleness: int, out: list[Command]
    ) -> None:
        contribution = self._weighed(compensated.contribution)
        task, lineage = contribution.task, contribution.lineage
        out.append(
            Compensation(
                task.device,
                task.id,
                lineage,
                task.version,
                self.store.head(lineage),
                staleness,
                contribution.weight,
                compensated.gamma,
                compensated.seconds,
                compensated.details,
            )
        )
        self._merge(contribution, out)

    def _weighed(self, contribution: Contribution) -> Contribution:
        return contribution.weighed(float(self.strategy.weigh(contribution, self)))

    def _merge(self, contribution: Contribution, out: list[Command]) -> None:
        """Hand a weighed contribution to the observers and the merge, and commit."""
        result: Commit | Drop | None
        if isfinite(contribution.weight):
            self.parts.on_contribution(contribution, self)
            result = self.strategy.merge.add(contribution, self)
        else:
            result = Drop(f"its weight is {contribution.weight}")
        if isinstance(result, Drop):
            out.append(Dropped(contribution.task.device, contribution.task.id, result.reason))
        elif result is not None:
            self._commit(result, out)

    def _commit(self, commit: Commit, out: list[Command]) -> None:
        if commit.lineage not in self.store:
            self.fork(self.store.resolve(MAIN), commit.lineage)
        self.parts.on_commit(commit, self)
        self._store(commit, out)

    def _store(self, commit: Commit, out: list[Command]) -> None:
        version = self.store.commit(commit.lineage, commit.params)
        out.append(
            Committed(commit.lineage, version, commit.contributions, commit.surrogates or None)
        )

    # Protection: quarantine and roll-back.

    def _set_free(self, device: int) -> None:
        """The device is reachable and has no task."""
        if device in self._quarantined:
            self._held_back.add(device)
        elif device not in self._retired:
            self.idle.add(device)

    def _quarantine(self, device: int, out: list[Command]) -> None:
        """Give a device with `MAX_STRIKES` no task for a number of accepted updates.

        It is the number of devices, at least `MIN_QUARANTINE`; every further strike doubles it.
        """
        further = self.checks.strikes.get(device, 0) - MAX_STRIKES
        if further < 0:
            return
        updates = max(MIN_QUARANTINE, len(self._task_counts)) << min(further, 30)
        self._quarantined[device] = self.accepted + updates
        if device in self.idle:
            self.idle.discard(device)
            self._held_back.add(device)
        reason = "its updates were refused repeatedly, or made a roll-back necessary"
        out.append(Quarantined(device, self._quarantined[device], reason))

    def _end_quarantines(self) -> None:
        for device, until in list(self._quarantined.items()):
            if self.accepted >= until:
                del self._quarantined[device]
                if device in self._held_back:
                    self._held_back.discard(device)
                    self._set_free(device)

    def _take_snapshot(self) -> None:
        """Store the head every `SNAPSHOT_UPDATES` accepted updates, if `Checks.undisturbed`."""
        if self.accepted - self._snapshot_at < SNAPSHOT_UPDATES or not self.checks.undisturbed:
            return
        lineage = self.store.resolve(MAIN)
        self._snapshot_at, self._rollbacks = self.accepted, 0
        self._snapshots.append((self.store.head(lineage), self.store.head_params(lineage)))
        del self._snapshots[:-MAX_SNAPSHOTS]

    def _roll_back(self, reason: str, out: list[Command]) -> None:
        """Make the newest snapshot the head and reset the strategy to its initial state.

        The snapshot is removed, so the next roll-back goes further back; without snapshots the
        initial model is used. The run ends instead if the merge keeps a model of its own
        (`keeps_model`); it ends afterwards if `Checks.stop` is set, and with the roll-back after
        `MAX_ROLLBACKS` without a new snapshot.
        """
        if getattr(self.strategy.merge, "keeps_model", False):
            self.stopped = reason
            return
        version, params = self._snapshots.pop() if self._snapshots else (0, self._initial)
        self._rollbacks += 1
        self._quarantined.clear()
        for device in sorted(self._held_back):
            self._set_free(device)
        self._held_back.clear()
        for device in sorted(self.checks.strikes):
            self._quarantine(device, out)
        if self.accepted:
            self._void_before = self.tasks_given
            self._lineages.clear()
            self.parts.restore(deepcopy(self._initial_parts))
            self.store.roll_back(params)
            self.unaveraged = self._initial_unaveraged
        out.append(RolledBack(self.store.commits, version, reason))
        if self.checks.stop or self._rollbacks > MAX_ROLLBACKS:
            self.stopped = f"{reason}; the model was rolled back to version {version}"

    # Actions of parts.

    def _act(self, action: Action, out: list[Command]) -> None:
        match action:
            case Split(parent, child, devices):
                self.fork(parent, child)
                self._lineages.update(dict.fromkeys(devices, child))
                out.append(ClusterSplit(parent, child, list(devices)))
            case Absorb(into, gone, params, reason):
                self._store(Commit(into, params, 0), out)
                self.absorb(into, gone)
                out.append(ClusterMerged(gone, into, reason or None))
            case BroadcastHead(lineage, devices):
                if not self.parts.broadcasts:
                    raise ValueError("a part returned BroadcastHead without `broadcasts = True`")
                self._broadcast(lineage, devices, out)
            case _:
                out.append(action)

    def _broadcast(self, lineage: str, devices: frozenset[int] | None, out: list[Command]) -> None:
        """Send the head to the working devices of the lineage that have an older version."""
        version, tasks = self.store.head(lineage), list[Task]()
        for device, task_id in self.working.items():
            task = self.open_tasks.get(task_id)
            # The last model it was sent decides: its task may be of a lineage that was absorbed.
            if task is None or self.lineage_of(device) != lineage or task.versions[-1] == version:
                continue
            if devices is not None and device not in devices:
                continue
            task.broadcasts += (self._offer(lineage, task.submodel),)
            self.store.pin(version)
            tasks.append(task)
        if tasks:
            size = sum(wire_bytes(task.params) for task in tasks)
            out.append(BroadcastMade(lineage, version, len(tasks), size))
            out.append(Broadcast(tuple(tasks)))

    def _release_broadcasts(self, usable: tuple[tuple[int, tuple[int, ...]], ...]) -> None:
        """Unpin the broadcasts of a task that its update can no longer be based on."""
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

    def fork(self, parent: str, child: str) -> None:
        """Open a lineage on the head of another one."""
        self.store.fork(parent, child)
        self.parts.on_fork(parent, child)

    def absorb(self, into: str, gone: str) -> None:
        """Close a lineage in favour of another one."""
        self.store.absorb(into, gone)
        self.parts.on_absorb(into, gone)

    # Tasks.

    def _failed(self, task_id: int, reason: str, out: list[Command]) -> None:
        task = self.open_tasks.get(task_id)
        if task is None:
            return
        self._close(task)
        if self.working.get(task.device) == task_id:
            del self.working[task.device]
        out.append(Dropped(task.device, task_id, reason))

    def _close(self, task: Task) -> None:
        del self.open_tasks[task.id]
        for version in task.versions:
            self.store.unpin(version)

    def _assign(self, request: Assignment, out: list[Command]) -> None:
        device, lineage = request.device, request.lineage
        if lineage not in self.store:
            self.fork(self.lineage_of(device), lineage)
        version = self.store.head(lineage)
        submodel = request.submodel
        if submodel == "declared":
            submodel = self._declared.get(device)
        if submodel is not None or device in self._submodels:
            self._submodels[device] = submodel
        spec = request.spec or self.spec
        if self.schedule is not None:
            spec = replace(spec, lr_scale=spec.lr_scale * self.schedule(version))
        task = Task(
            id=self.tasks_given,
            device=device,
            number=self._task_counts.get(device, 0),
            lineage=lineage,
            version=version,
            spec=spec,
            params=take(self.store.params(version), submodel),
            submodel=submodel,
            offers=tuple(self._offer(other, submodel) for other in request.offers),
            unaveraged=self.unaveraged,
        )
        self.tasks_given += 1
        self._task_counts[device] = task.number + 1
        if not task.offers and lineage != self._lineages.get(device, MAIN):
            self._lineages[device] = lineage
        for number in task.versions:
            self.store.pin(number)
        self.open_tasks[task.id] = task
        self.working[device] = task.id
        self.idle.discard(device)
        size, offers = task.bytes_down, len(task.offers) or None
        out.append(Dispatched(device, task.id, lineage, version, size, offers))
        out.append(Send(task))

    def _offer(self, lineage: str, submodel: Submodel | None) -> Offer:
        version = self.store.head(lineage)
        return Offer(lineage, version, take(self.store.params(version), submodel))

    def clusters(self) -> dict[str, list[int]]:
        """Lineage -> the devices assigned to it, for lineages that have any."""
        found: dict[str, list[int]] = {}
        for device in sorted(self._task_counts):
            found.setdefault(self.lineage_of(device), []).append(device)
        return found

    def state(self) -> dict[str, Any]:
        """Everything that `restore` needs, as plain values, tensors and messages."""
        return {
            **super().state(),
            "store": self.store.state(),
            "parts": self.parts.state(),
            "checks": self.checks.state(),
            "idle": list(self.idle),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.store.restore(state["store"])
        self.parts.restore(state["parts"])
        self.checks.restore(state["checks"])
        self.idle = Pool(state["idle"])
