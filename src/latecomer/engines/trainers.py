"""Who computes what a device would send back: one task at a time, or many at once.

In virtual time a result is needed only when it arrives. At the first moment one is needed, all
tasks under way can be trained together, each from its own start and on its own data.
"""

from collections.abc import Mapping, Sequence
from heapq import nsmallest
from typing import Any, Protocol

import torch
from torch import Tensor

from latecomer.core.messages import Task, TrainSpec, Update
from latecomer.core.submodel import name_of
from latecomer.device.client import Client, Rebases
from latecomer.device.flat import FlatModel
from latecomer.device.memory import DeviceMemory
from latecomer.device.training import Plan, local_update

Signature = tuple[TrainSpec, str]


class Trainer(Protocol):
    """Computes what devices send back."""

    def examples(self, task: Task) -> float:
        """How many examples the device passes through in this task."""

    def expect(self, task: Task, arrives: float) -> None:
        """The result of this task will be asked for at that time."""

    def update(self, task: Task, rebases: Rebases = ()) -> Update:
        """What the device sends; it went on from newer models as `rebases` say."""

    def renew(self, task: Task) -> bool:
        """A broadcast reaches the device in mid-task; False if its training cannot be changed."""

    def forget(self, task_id: int) -> None:
        """The result of this task will not be asked for."""

    def state(self) -> dict[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...


class OneByOne:
    """Trains each task on its own, when its result is asked for.

    A device with a memory does its tasks in the order it was given them: what arrives first may
    have been begun later, and then the earlier ones are trained before it. Tasks that are lost
    are not expected, so they leave no trace.
    """

    def __init__(self, clients: Mapping[int, Client]) -> None:
        self.clients = clients
        self._memory: dict[int, DeviceMemory] = {}
        self._waiting: dict[int, dict[int, Task]] = {}  # device -> number -> task that remembers
        self._ready: dict[int, Update] = {}

    def examples(self, task: Task) -> float:
        return self.clients[task.device].examples(task)

    def expect(self, task: Task, arrives: float) -> None:
        if self.clients[task.device].remembers(task) and task.id not in self._ready:
            self._waiting.setdefault(task.device, {})[task.number] = task

    def renew(self, task: Task) -> bool:
        # Tasks of a device with a memory may have been trained ahead of time.
        return not self.clients[task.device].remembers(task)

    def update(self, task: Task, rebases: Rebases = ()) -> Update:
        if not self.clients[task.device].remembers(task):
            return self.clients[task.device].perform(task, rebases=rebases)
        if task.id not in self._ready:
            self._train_up_to(task)
        return self._ready.pop(task.id)

    def _train_up_to(self, task: Task) -> None:
        waiting = self._waiting.setdefault(task.device, {})
        waiting[task.number] = task
        memory = self._memory.setdefault(task.device, {})
        for number in sorted(number for number in waiting if number <= task.number):
            due = waiting.pop(number)
            self._ready[due.id] = self.clients[task.device].perform(due, memory)

    def forget(self, task_id: int) -> None:
        self._ready.pop(task_id, None)
        for waiting in self._waiting.values():
            for number in [number for number, task in waiting.items() if task.id == task_id]:
                del waiting[number]

    def state(self) -> dict[str, Any]:
        memory = {device: dict(kept) for device, kept in self._memory.items()}
        return {"memory": memory, "early": dict(self._ready)}

    def restore(self, state: Mapping[str, Any]) -> None:
        # Checkpoints of runs without such devices need not have it.
        memory = state.get("memory", {})
        self._memory = {device: dict(kept) for device, kept in memory.items()}
        self._ready = dict(state.get("early", {}))


class Batched:
    """Trains the task that is asked for together with those that will be asked for next.

    Only tasks of the same training program and sub-model go together. Results that are not asked
    for yet are part of the state: sums in a batch are rounded differently than alone, and a
    resumed run must find the numbers that the uninterrupted one would have. Tasks of devices with
    a memory are left to `OneByOne`.
    """

    def __init__(self, clients: Mapping[int, Client], size: int) -> None:
        self.clients, self.size = clients, size
        self._waiting: dict[Signature, dict[int, tuple[float, Task]]] = {}
        self._ready: dict[int, Update] = {}
        self._alone = OneByOne(clients)

    def examples(self, task: Task) -> float:
        return self.clients[task.device].examples(task)

    def expect(self, task: Task, arrives: float) -> None:
        if self.clients[task.device].remembers(task):
            self._alone.expect(task, arrives)
        elif task.id not in self._ready:
            self._waiting.setdefault(_signature(task), {})[task.id] = (arrives, task)

    def renew(self, task: Task) -> bool:
        self._ready.pop(task.id, None)
        for waiting in self._waiting.values():
            waiting.pop(task.id, None)
        return self._alone.renew(task)

    def update(self, task: Task, rebases: Rebases = ()) -> Update:
        if rebases or self.clients[task.device].remembers(task):
            return self._alone.update(task, rebases)
        if task.id not in self._ready:
            self._train(task)
        return self._ready.pop(task.id)

    def forget(self, task_id: int) -> None:
        self._alone.forget(task_id)
        self._ready.pop(task_id, None)
        for waiting in self._waiting.values():
            waiting.pop(task_id, None)

    def _train(self, task: Task) -> None:
        waiting = self._waiting[_signature(task)]
        del waiting[task.id]
        # By arrival, then by id, which no two tasks share: never compares two tasks.
        soonest = nsmallest(
            self.size - 1, ((time, other.id, other) for time, other in waiting.values())
        )
        tasks = [task, *(other for _, _, other in soonest)]
        for _, number, _ in soonest:
            del waiting[number]
        if not waiting:
            # A strategy may send each task with a program of its own.
            del self._waiting[_signature(task)]
        for each, update in zip(tasks, self._together(tasks), strict=True):
            self._ready[each.id] = update

    def _together(self, tasks: Sequence[Task]) -> list[Update]:
        clients = [self.clients[task.device] for task in tasks]
        plans = [client.plan(task) for client, task in zip(clients, tasks, strict=True)]
        xs, ys = zip(*(c.data(t) for c, t in zip(clients, tasks, strict=True)), strict=True)
        spec, model = tasks[0].spec, clients[0].network(tasks[0].submodel)
        plan, ragged = stack_plans(plans)

        def train(params: Tensor, x: Tensor, y: Tensor, order: Tensor, mask: Tensor) -> Tensor:
            return local_update(
                model, params, x, y, spec, Plan(order, mask), functional=True, ragged=ragged
            )

        choices = [client.choose(task) for client, task in zip(clients, tasks, strict=True)]
        start = torch.stack([t.chosen(i).params for t, i in zip(tasks, choices, strict=True)])
        with torch.no_grad():
            trained = torch.func.vmap(train)(start, _stack(xs), _stack(ys), *plan)
        deltas = trained.sub_(start)
        return [
            client.answer(task, delta.clone(), choice)
            for client, task, delta, choice in zip(clients, tasks, deltas, choices, strict=True)
        ]

    def state(self) -> dict[str, Any]:
        return {"ready": dict(self._ready), "alone": self._alone.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._ready = dict(state["ready"])
        self._alone.restore(state.get("alone", {}))


def _signature(task: Task) -> Signature:
    return task.spec, name_of(task.submodel)


def batch_size(model: FlatModel, spec: TrainSpec, examples: int, memory_mb: float) -> int:
    """How many tasks fit, roughly: parameters, gradients, momentum and copies, and the data.

    Activations are not counted; gradients of single examples are, if they are clipped.
    """
    features = int(torch.tensor(model.input_shape).prod())
    copies = 8 + (min(spec.batch_size, examples) if spec.clip else 0)
    floats = copies * model.layout.size + 4 * examples * features
    return max(1, min(32, int(memory_mb * 2**20 // (4 * floats))))


def stack_plans(plans: Sequence[Plan]) -> tuple[Plan, bool]:
    """One plan for all, padded with masked places; and whether some steps are empty for some."""
    steps = max(len(plan.order) for plan in plans)
    width = max(plan.order.shape[1] for plan in plans)
    order = torch.zeros(len(plans), steps, width, dtype=torch.int64)
    mask = torch.zeros(len(plans), steps, width)
    for i, plan in enumerate(plans):
        own_steps, own_width = plan.order.shape
        order[i, :own_steps, :own_width] = plan.order
        mask[i, :own_steps, :own_width] = plan.mask
    return Plan(order, mask), any(len(plan.order) < steps for plan in plans)


def _stack(parts: Sequence[Tensor]) -> Tensor:
    """One tensor of all, shorter ones filled up with zeros that no plan points to."""
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
