"""The code on a device: its data, and the tasks it performs on them."""

from collections.abc import Callable

import torch
from torch import Tensor

from latecomer.core.messages import Task, TrainSpec, Update
from latecomer.core.submodel import Submodel, name_of
from latecomer.device.feedback import feedback
from latecomer.device.flat import FlatModel
from latecomer.device.ledger import Ledger
from latecomer.device.local_training import LocalTraining
from latecomer.device.memory import DeviceMemory, balanced, if_new
from latecomer.device.networks import Networks
from latecomer.device.privacy import Privacy, noise_rng
from latecomer.device.release import release
from latecomer.device.training import (
    Plan,
    average_loss,
    local_update,
    loss_rms,
    mixed,
    plan_batches,
    resumed_update,
    task_rng,
)
from latecomer.errors import BadInput

JUDGE_STREAM = 3  # beside those of batches and noise
LEDGER = "ledger"  # its place in the device's memory

# The examples that a device has at a moment.
Stream = Callable[[float], tuple[Tensor, Tensor]]
# After how many passes over its data a device goes on from which of the models it was sent.
Rebases = tuple[tuple[int, int], ...]


class Client:
    """Trains the network of each task on the examples of one device.

    With `privacy`, nothing leaves the device that is not noised and in its ledger, whatever a task
    may ask for. With a `stream` the data change: it gives them for the moment at which a task
    began, and `x` and `y` are only the most there ever are.
    """

    def __init__(
        self,
        device: int,
        model: FlatModel | Networks,
        x: Tensor,
        y: Tensor,
        seed: int,
        privacy: Privacy | None = None,
        stream: Stream | None = None,
    ) -> None:
        if len(x) != len(y) or not len(x):
            raise BadInput(
                f"device {device}: {len(x)} examples and {len(y)} labels; "
                f"needs as many of each, and at least one"
            )
        self.device = device
        self.networks = model if isinstance(model, Networks) else Networks(model)
        self.x = x
        self.y = y
        self.seed = seed
        self.privacy = privacy
        self.stream = stream
        self.num_examples = len(y)

    def data(self, task: Task) -> tuple[Tensor, Tensor]:
        """The examples of this task."""
        return (self.x, self.y) if self.stream is None else self.stream(task.began)

    def network(self, submodel: Submodel | None) -> FlatModel:
        """What this device trains where it carries `submodel`."""
        found = self.networks(submodel)
        if found is None:
            raise BadInput(f"device {self.device}: no network for '{name_of(submodel)}'")
        return found

    def remembers(self, task: Task) -> bool:
        """Whether this task needs what the device kept of earlier ones: they must run in order."""
        return task.spec.remembers or self.privacy is not None

    def plan(self, task: Task) -> Plan:
        """The mini-batches of this task, whenever and wherever it is executed."""
        rng, n = task_rng(self.seed, self.device, task.number), len(self.data(task)[1])
        if not _holds_back(task.spec):
            return plan_batches(n, task.spec, rng)
        kept, _ = self.parts(n)
        plan = plan_batches(len(kept), task.spec, rng)
        return Plan(kept[plan.order], plan.mask)

    def parts(self, n: int) -> tuple[Tensor, Tensor]:
        """Which of n examples it trains on and which it judges models by, where it does: 4 to 1.

        A model would be judged too well by what it has been trained on. With fewer than five
        examples all are used for both.
        """
        rng = torch.Generator().manual_seed(mixed(self.seed, JUDGE_STREAM, self.device))
        shuffled = torch.randperm(self.num_examples, generator=rng)
        here = shuffled < n  # while data grow, nobody changes sides
        side = torch.arange(self.num_examples) < self.num_examples // 5
        kept, held = shuffled[here & ~side], shuffled[here & side]
        return (kept, held) if len(held) and len(kept) else (shuffled[here], shuffled[here])

    def judged_by(self, task: Task) -> tuple[Tensor, Tensor]:
        """The examples by which models are judged and chosen."""
        x, y = self.data(task)
        if not _holds_back(task.spec):
            return x, y
        _, held = self.parts(len(y))
        return x[held], y[held]

    def examples(self, task: Task) -> float:
        """How many examples this task passes through, in units of work on the whole network.

        Every pass is counted. Looking at an example, to choose among models or to judge one, takes
        a third of training on it.
        """
        looks = (1 + len(task.offers) if task.offers else 0) + task.spec.feedback
        trained = judged = len(self.data(task)[1])
        if self.privacy is not None:
            looks = 0  # what it saw could not be told
        elif _holds_back(task.spec):
            trained, judged = map(len, self.parts(trained))
        passes = trained * task.spec.local_epochs + judged * looks / 3
        return passes * self.networks.work(task.submodel)

    def choose(self, task: Task) -> int:
        """The number of the model with the least loss on this device's examples."""
        losses = self.fits(task)
        return losses.index(min(losses)) if losses else 0

    def fits(self, task: Task) -> list[float]:
        """The loss of each model there is to choose from; none if there is no choice."""
        if not task.offers:
            return []
        network = self.network(task.submodel)
        models = [task.params, *(offer.params for offer in task.offers)]
        x, y = self.judged_by(task)
        return [average_loss(network, params, x, y) for params in models]

    def perform(
        self, task: Task, memory: DeviceMemory | None = None, rebases: Rebases = ()
    ) -> Update:
        """Train as the task says; the same task always gives the same update.

        A task whose spec asks for it reads and renews what the device keeps in `memory`; without
        one it is treated as the device's first. `rebases` are for broadcasts that came meanwhile.
        """
        memory = {} if memory is None else memory
        if self.privacy is not None:
            return self._perform_privately(task, memory, self.privacy)
        training = self.start(task)
        for passes, number in rebases:
            newer = task.chosen(number)
            if training.accepts(task.offer_of(newer.lineage)):
                self.advance(task, training, passes)
                training.rebase(number, newer.params)
        self.advance(task, training, task.spec.local_epochs)
        return self.answer(task, training.delta, training.choice, memory)

    def start(self, task: Task) -> LocalTraining:
        """The training of this task before its first step, from the model with the least loss."""
        choice = self.choose(task)
        base = task.chosen(choice).params
        return LocalTraining(choice, choice, base, base, base)

    def advance(self, task: Task, training: LocalTraining, until: int) -> None:
        """Train up to `until` passes over the data; in one call or several, the same bits."""
        if until <= training.passes:
            return
        plan, network = self.plan(task), self.network(task.submodel)
        steps = len(plan.order) // task.spec.local_epochs
        part = Plan(*(rows[training.passes * steps : until * steps] for rows in plan))
        training.params, training.optimizer = resumed_update(
            network, training.params, training.anchor, training.optimizer, *self.data(task),
            task.spec, part,
        )  # fmt: skip
        training.passes = until

    def answer(
        self, task: Task, delta: Tensor, choice: int = 0, memory: DeviceMemory | None = None
    ) -> Update:
        """What the device sends back once it has trained from the model of number `choice`."""
        sent = self._worth_sending(task.chosen(choice), delta, {} if memory is None else memory)
        metrics = {}
        network, base = self.network(task.submodel), task.chosen(choice).params
        x, y = self.data(task)
        if task.spec.report_loss:
            metrics["loss_rms"] = loss_rms(network, base, x, y)
        if task.spec.feedback:
            metrics |= feedback(network, base, *self.judged_by(task), task.spec.prior_correction)
            metrics |= {f"loss_{i}": loss for i, loss in enumerate(self.fits(task))}
        return release(Update(task.id, sent, len(y), metrics, choice=choice))

    def _worth_sending(self, task: Task, delta: Tensor, memory: DeviceMemory) -> Tensor | None:
        if task.spec.balance:
            delta = balanced(delta, task.spec, memory)
        return if_new(delta, task, memory) if task.spec.lazy else delta

    def _perform_privately(self, task: Task, memory: DeviceMemory, privacy: Privacy) -> Update:
        """As `perform`; the choice among models and the loss would tell of the data un-noised."""
        ledger = Ledger.from_tensor(memory[LEDGER]) if LEDGER in memory else Ledger()
        x, y = self.data(task)
        spec, n = privacy.enforced(task.spec), len(y)
        if not privacy.may_release(ledger, n, spec):
            silent = Update(task.id, None, n, epsilon=privacy.epsilon(ledger), last=True)
            return release(silent, private=True)
        plan = privacy.plan(n, spec, task_rng(self.seed, self.device, task.number))
        noise = noise_rng(self.seed, self.device, task.number)
        sizes = [int(size) for size in plan.mask.sum(1).tolist()]
        network = self.network(task.submodel)
        hook = privacy.on_gradient(sizes, n, spec, noise)
        trained = local_update(network, task.params, x, y, spec, plan, hook)
        delta = trained.sub_(task.params)
        trained_part = network.head if spec.last_layer_only else slice(None)
        delta[trained_part] = privacy.noised_update(delta[trained_part], noise)
        # Charged even if it is not sent: that it is not tells something, too.
        privacy.charge(ledger, n, spec)
        memory[LEDGER] = ledger.to_tensor()
        update = Update(
            task.id,
            self._worth_sending(task, delta, memory),
            n,
            noise_std=privacy.noise_std(n, sizes, spec),
            epsilon=privacy.epsilon(ledger),
            last=not privacy.may_release(ledger, n, spec),
        )
        return release(update, private=True)


def _holds_back(spec: TrainSpec) -> bool:
    return spec.feedback and spec.hold_back
