"""Trainers of the simulation: compute the updates of devices, one task at a time or in batches.

In virtual time an update is needed only when it arrives. When one is needed, all open tasks can be
trained in one batch, each from its own parameters and on the data of its device.
"""

from collections.abc import Mapping, Sequence
from heapq import nsmallest
from typing import Protocol

import torch
from torch import Tensor

from latecomer.core.messages import Task, TrainSpec, Update
from latecomer.core.strategy import Stateful
from latecomer.core.submodel import name_of
from latecomer.device.client import Client, Rebases
from latecomer.device.flat import FlatModel
from latecomer.device.memory import DeviceMemory
from latecomer.device.training import Plan, local_update

Signature = tuple[TrainSpec, str]


class TaskClient(Protocol):
    """What a trainer needs of a device; `Client` is the one with built-in training."""

    num_examples: int

    def examples(self, task: Task) -> float: ...
    def needs_memory(self, task: Task) -> bool: ...
    def divisible(self, task: Task) -> bool: ...
    def perform(
        self, task: Task, memory: DeviceMemory | None = None, rebases: Rebases = ()
    ) -> Update: ...


class OneByOne(Stateful):
    """Trains each task alone, when its update is requested.

    The tasks of a device with memory are trained in the order of their numbers: if a later one
    arrives first, the earlier ones are trained before it. Lost tasks are never announced by
    `expect`, and not trained.
    """

    kept = ("_memory", "_ready")

    def __init__(self, clients: Mapping[int, TaskClient]) -> None:
        self.clients = clients
        self._memory: dict[int, DeviceMemory] = {}
        self._with_memory: dict[int, dict[int, Task]] = {}  # device -> number -> task, expected
        self._ready: dict[int, Update] = {}  # trained and not requested yet

    def examples(self, task: Task) -> float:
        """The work of this task, in examples trained with the whole network."""
        return self.clients[task.device].examples(task)

    def expect(self, task: Task, arrives: float) -> None:
        """Announce that the update of this task will be requested at virtual time `arrives`."""
        if self._needs_memory(task) and task.id not in self._ready:
            self._with_memory.setdefault(task.device, {})[task.number] = task

    def renew(self, task: Task) -> bool:
        """Discard a computed update, for a broadcast in mid-task; False if it cannot be redone.

        Tasks of a device with memory may have been trained ahead of time.
        """
        return not self._needs_memory(task) and self.clients[task.device].divisible(task)

    def update(self, task: Task, rebases: Rebases = ()) -> Update:
        """The update of this task, with training rebased on broadcasts as `rebases` lists."""
        if not self._needs_memory(task):
            return self.clients[task.device].perform(task, rebases=rebases)
        if task.id not in self._ready:
            self._train_up_to(task)
        return self._ready.pop(task.id)

    def _needs_memory(self, task: Task) -> bool:
        return self.clients[task.device].needs_memory(task)

    def _train_up_to(self, task: Task) -> None:
        waiting = self._with_memory.setdefault(task.device, {})
        waiting[task.number] = task
        memory = self._memory.setdefault(task.device, {})
        for number in sorted(number for number in waiting if number <= task.number):
            due = waiting.pop(number)
            self._ready[due.id] = self.clients[task.device].perform(due, memory)

    def memory_of(self, device: int) -> DeviceMemory:
        """The tensors that the device keeps between its tasks."""
        return self._memory.get(device, {})

    def forget(self, task_id: int) -> None:
        """Drop a task whose update will not be requested."""
        self._ready.pop(task_id, None)
        for waiting in self._with_memory.values():
            for number in [number for number, task in waiting.items() if task.id == task_id]:
                del waiting[number]


class Batched(OneByOne):
    """Trains the requested task in one batch with up to `size` - 1 tasks that arrive next.

    A batch has one training program and one sub-model. Updates that were not requested yet are
    part of the state: a batch is rounded differently than a single task, and a resumed run must
    have the bits of an uninterrupted one. Tasks with memory are trained one by one.
    """

    def __init__(self, clients: Mapping[int, Client], size: int) -> None:
        super().__init__(clients)
        self.batched_clients, self.size = clients, size
        self._waiting: dict[Signature, dict[int, tuple[float, Task]]] = {}

    def expect(self, task: Task, arrives: float) -> None:
        super().expect(task, arrives)
        if not self._needs_memory(task) and task.id not in self._ready:
            self._waiting.setdefault(_signature(task), {})[task.id] = (arrives, task)

    def renew(self, task: Task) -> bool:
        if possible := super().renew(task):
            self.forget(task.id)
        return possible

    def update(self, task: Task, rebases: Rebases = ()) -> Update:
        if rebases or self._needs_memory(task):
            return super().update(task, rebases)
        if task.id not in self._ready:
            self._train(task)
        return self._ready.pop(task.id)

    def forget(self, task_id: int) -> None:
        super().forget(task_id)
        for waiting in self._waiting.values():
            waiting.pop(task_id, None)

    def _train(self, task: Task) -> None:
        waiting = self._waiting[_signature(task)]
        del waiting[task.id]
        # By arrival, then by id, which is unique: two tasks are never compared.
        soonest = nsmallest(
            self.size - 1, ((time, other.id, other) for time, other in waiting.values())
        )
        tasks = [task, *(other for _, _, other in soonest)]
        for _, number, _ in soonest:
            del waiting[number]
        if not waiting:
            # A strategy may give every task another training program.
            del self._waiting[_signature(task)]
        for each, update in zip(tasks, self._together(tasks), strict=True):
            self._ready[each.id] = update

    def _together(self, tasks: Sequence[Task]) -> list[Update]:
        clients = [self.batched_clients[task.device] for task in tasks]
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
            client.make_update(task, delta.clone(), choice)
            for client, task, delta, choice in zip(clients, tasks, deltas, choices, strict=True)
        ]


def _signature(task: Task) -> Signature:
    return task.spec, name_of(task.submodel)


def batch_size(model: FlatModel, spec: TrainSpec, examples: int, memory_mb: float) -> int:
    """The number of tasks, 1 to 32, whose training fits into `memory_mb`, roughly.

    Counts parameters, gradients, momentum, copies, data, and per-example gradients if they are
    clipped; not activations.
    """
    features = int(torch.tensor(model.input_shape).prod())
    copies = 8 + (min(spec.batch_size, examples) if spec.clip else 0)
    floats = copies * model.layout.size + 4 * examples * features
    return max(1, min(32, int(memory_mb * 2**20 // (4 * floats))))


def stack_plans(plans: Sequence[Plan]) -> tuple[Plan, bool]:
    """The plans stacked and padded with mask 0; and whether a plan has steps without examples."""
    steps = max(len(plan.order) for plan in plans)
    width = max(plan.order.shape[1] for plan in plans)
    order = torch.zeros(len(plans), steps, width, dtype=torch.int64)
    mask = torch.zeros(len(plans), steps, width)
    for i, plan in enumerate(plans):
        rows, columns = plan.order.shape
        order[i, :rows, :columns] = plan.order
        mask[i, :rows, :columns] = plan.mask
    return Plan(order, mask), any(len(plan.order) < steps for plan in plans)


def _stack(parts: Sequence[Tensor]) -> Tensor:
    """The tensors stacked, shorter ones padded with zeros that no plan refers to."""
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
