"""The code on a device: its data, and the tasks it performs on them."""

from collections.abc import Callable

from torch import Tensor

from latecomer.core.messages import Task, Update
from latecomer.device.flat import FlatModel
from latecomer.device.memory import DeviceMemory, balanced, if_new
from latecomer.device.release import release
from latecomer.device.training import Plan, local_update, loss_rms, plan_batches, task_rng
from latecomer.errors import BadInput

Stream = Callable[[float], tuple[Tensor, Tensor]]


class Client:
    """Trains the whole model on the examples of one device.

    With a `stream` the data change: it gives them for the moment at which a task began, and `x`
    and `y` are only the most there ever are.
    """

    def __init__(
        self,
        device: int,
        model: FlatModel,
        x: Tensor,
        y: Tensor,
        seed: int,
        stream: Stream | None = None,
    ) -> None:
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
        self.stream = stream
        self.num_examples = len(y)

    def data(self, task: Task) -> tuple[Tensor, Tensor]:
        """The examples of this task."""
        return (self.x, self.y) if self.stream is None else self.stream(task.began)

    def plan(self, task: Task) -> Plan:
        """The mini-batches of this task, whenever and wherever it is executed."""
        return plan_batches(
            len(self.data(task)[1]), task.spec, task_rng(self.seed, self.device, task.number)
        )

    def examples(self, task: Task) -> int:
        """How many examples this task passes through, every pass counted."""
        return len(self.data(task)[1]) * task.spec.local_epochs

    def perform(self, task: Task, memory: DeviceMemory | None = None) -> Update:
        """Train as the task says; the same task always gives the same update.

        A task whose spec asks for it reads and renews what the device keeps in `memory`; without
        one it is treated as the device's first.
        """
        plan = self.plan(task)
        trained = local_update(self.model, task.params, *self.data(task), task.spec, plan)
        return self.answer(task, trained.sub_(task.params), memory)

    def answer(self, task: Task, delta: Tensor, memory: DeviceMemory | None = None) -> Update:
        """What the device sends back once it has trained."""
        memory = {} if memory is None else memory
        if task.spec.balance:
            delta = balanced(delta, task.spec, memory)
        sent = if_new(delta, task, memory) if task.spec.lazy else delta
        metrics = {}
        x, y = self.data(task)
        if task.spec.report_loss:
            metrics["loss_rms"] = loss_rms(self.model, task.params, x, y)
        return release(Update(task.id, sent, len(y), metrics))
