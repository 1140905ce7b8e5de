"""The code on a device: its data, and the tasks it performs on them."""

from torch import Tensor

from latecomer.core.messages import Task, Update
from latecomer.device.flat import FlatModel
from latecomer.device.release import release
from latecomer.device.training import Plan, local_update, plan_batches, task_rng
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

    def examples(self, task: Task) -> int:
        """How many examples this task passes through, every pass counted."""
        return self.num_examples * task.spec.local_epochs

    def perform(self, task: Task) -> Update:
        """Train as the task says; the same task always gives the same update."""
        plan = self.plan(task)
        trained = local_update(self.model, task.params, self.x, self.y, task.spec, plan)
        return self.answer(task, trained.sub_(task.params))

    def answer(self, task: Task, delta: Tensor) -> Update:
        """What the device sends back once it has trained."""
        return release(Update(task.id, delta, self.num_examples))
