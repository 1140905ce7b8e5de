"""The code on a device: its data, and the tasks it performs on them."""

from torch import Tensor

from latecomer.core.messages import Task, Update
from latecomer.device.flat import FlatModel
from latecomer.device.memory import DeviceMemory, balanced, if_new
from latecomer.device.release import release
from latecomer.device.training import (
    Plan,
    average_loss,
    local_update,
    loss_rms,
    plan_batches,
    task_rng,
)
from latecomer.errors import BadInput


class Client:
    """Trains the whole model on the examples of one device."""

    def __init__(self, device: int, model: FlatModel, x: Tensor, y: Tensor, seed: int) -> None:
        if len(x) != len(y) or not len(x):
            raise BadInput(
                f"device {device}: {len(x)} examples and {len(y)} labels; "
                f"needs as many of each, and at least one"
            )
        self.device = device
        self.model = model
        self.x = x
        self.y = y
        self.seed = seed
        self.num_examples = len(y)

    def plan(self, task: Task) -> Plan:
        """The mini-batches of this task, whenever and wherever it is executed."""
        return plan_batches(
            self.num_examples, task.spec, task_rng(self.seed, self.device, task.number)
        )

    def examples(self, task: Task) -> float:
        """How many examples this task passes through, every pass counted.

        Looking at an example to choose among models takes a third of training on it.
        """
        looks = (1 + len(task.offers)) / 3 if task.offers else 0.0
        return self.num_examples * (task.spec.local_epochs + looks)

    def choose(self, task: Task) -> int:
        """The number of the model with the least loss on this device's examples."""
        if not task.offers:
            return 0
        models = [task.params, *(offer.params for offer in task.offers)]
        losses = [average_loss(self.model, params, self.x, self.y) for params in models]
        return losses.index(min(losses))

    def perform(self, task: Task, memory: DeviceMemory | None = None) -> Update:
        """Train as the task says; the same task always gives the same update.

        A task whose spec asks for it reads and renews what the device keeps in `memory`; without
        one it is treated as the device's first.
        """
        choice = self.choose(task)
        base = task.chosen(choice).params
        trained = local_update(self.model, base, self.x, self.y, task.spec, self.plan(task))
        return self.answer(task, trained.sub_(base), choice, memory)

    def answer(
        self, task: Task, delta: Tensor, choice: int = 0, memory: DeviceMemory | None = None
    ) -> Update:
        """What the device sends back once it has trained from the model of number `choice`."""
        task, memory = task.chosen(choice), {} if memory is None else memory
        if task.spec.balance:
            delta = balanced(delta, task.spec, memory)
        sent = if_new(delta, task, memory) if task.spec.lazy else delta
        metrics = {}
        if task.spec.report_loss:
            metrics["loss_rms"] = loss_rms(self.model, task.params, self.x, self.y)
        return release(Update(task.id, sent, self.num_examples, metrics, choice=choice))
