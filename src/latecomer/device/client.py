"""The client: local training of tasks on the data of one device, with or without privacy."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from latecomer.core.messages import Task, Update
from latecomer.core.submodel import Submodel, name_of
from latecomer.device.checks import check_clipping
from latecomer.device.feedback import feedback
from latecomer.device.flat import FlatModel
from latecomer.device.ledger import Ledger
from latecomer.device.local_training import LocalTraining
from latecomer.device.memory import DeviceMemory, balanced, lazy_upload
from latecomer.device.networks import Networks
from latecomer.device.own_training import Reported, TrainFunction, own_update
from latecomer.device.privacy import Privacy, noise_rng, system_rng
from latecomer.device.release import release
from latecomer.device.training import (
    Plan,
    StepStream,
    average_loss,
    layer_stream,
    local_update,
    loss_rms,
    mixed,
    plan_batches,
    resumed_update,
    task_rng,
)
from latecomer.errors import BadInput

VALIDATION_STREAM = 3  # random stream of the validation split, beside batches and noise
LEDGER = "ledger"  # key of the privacy ledger in the device's memory
BUFFERS = "buffers"  # key of the model's buffers that stay on the device

# The examples of a device at a virtual time.
Stream = Callable[[float], Sequence[Tensor]]
# (passes over the data, number of the broadcast that training is rebased on after them)
Rebases = tuple[tuple[int, int], ...]


class Client:
    """Trains the network of each task on the examples of one device.

    With `privacy`, everything that leaves the device is noised and in its ledger, whatever a task
    asks for; with `system_noise` batches and noise of private tasks are drawn from the operating
    system instead of the seed. With a `stream` the data change: it returns those of the time at
    which a task began; `x` and `y` are then the largest set of them. `train` replaces the built-in
    training (`device.own_training`); `config` is passed on to it.
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
        system_noise: bool = False,
        train: TrainFunction | None = None,
        config: Mapping[str, Any] | None = None,
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
        self.system_noise = system_noise
        self.num_examples = len(y)
        self.train, self.config = train, config or {}
        if privacy is not None and train is not None:
            raise BadInput(
                f"device {device}: a training function of your own cannot promise differential"
                " privacy; use the built-in training, or no privacy"
            )
        if privacy is not None and privacy.where == "step":
            for network in self.networks.models:
                check_clipping(network.traits, "privacy.where = 'step'")

    def data(self, task: Task) -> Sequence[Tensor]:
        """The examples of this task, `x, y`."""
        return (self.x, self.y) if self.stream is None else self.stream(task.began)

    def network(self, submodel: Submodel | None) -> FlatModel:
        """The network of this sub-model; BadInput if there is none."""
        found = self.networks(submodel)
        if found is None:
            raise BadInput(f"device {self.device}: no network for '{name_of(submodel)}'")
        return found

    def needs_memory(self, task: Task) -> bool:
        """Whether the task uses memory of earlier ones, so that tasks must be trained in order."""
        kept = task.spec.needs_memory or self.networks.whole.keeps_buffers
        return kept or self.privacy is not None

    def divisible(self, task: Task) -> bool:
        """Whether training may stop after a local epoch and continue from a newer model."""
        return self.train is None and ":" not in task.spec.optimizer

    def plan(self, task: Task) -> Plan:
        """The mini-batches of this task: a function of seed, device and task number alone."""
        rng, n = task_rng(self.seed, self.device, task.number), len(self.data(task)[1])
        if not task.spec.feedback:
            return plan_batches(n, task.spec, rng)
        train, _ = self.train_validation_split(n)
        plan = plan_batches(len(train), task.spec, rng)
        return Plan(train[plan.order], plan.mask)

    def train_validation_split(self, n: int) -> tuple[Tensor, Tensor]:
        """Indices of the training and validation examples among the first n, 4 to 1.

        With fewer than five examples all of them are used for both.
        """
        rng = torch.Generator().manual_seed(mixed(self.seed, VALIDATION_STREAM, self.device))
        shuffled = torch.randperm(self.num_examples, generator=rng)
        here = shuffled < n  # while data grow, no example changes its part
        held_back = torch.arange(self.num_examples) < self.num_examples // 5
        train, held = shuffled[here & ~held_back], shuffled[here & held_back]
        return (train, held) if len(held) and len(train) else (shuffled[here], shuffled[here])

    def validation_data(self, task: Task) -> tuple[Tensor, Tensor]:
        """The examples on which the losses of models and the feedback are computed."""
        x, y = self.data(task)
        if not task.spec.feedback:
            return x, y
        _, held = self.train_validation_split(len(y))
        return x[held], y[held]

    def examples(self, task: Task) -> float:
        """The work of this task, in examples trained with the whole network.

        Every pass counts. A forward pass over an example, for the loss of a model or the feedback,
        costs a third of training on it.
        """
        classifies = self.networks.whole.objective.classifies
        forward = (1 + len(task.offers) if task.offers else 0) + (task.spec.feedback and classifies)
        trained = validated = len(self.data(task)[1])
        if self.privacy is not None:
            forward = 0  # neither choice nor feedback may be sent
        elif task.spec.feedback:
            trained, validated = map(len, self.train_validation_split(trained))
        trained = task.spec.epoch_examples(trained)
        passes = trained * task.spec.local_epochs + validated * forward / 3
        return passes * self.networks.work(task.submodel)

    def choose(self, task: Task) -> int:
        """The number of the model with the least validation loss: 0, or 1 + index of an offer."""
        losses = self.model_losses(task)
        return losses.index(min(losses)) if losses else 0

    def model_losses(self, task: Task) -> list[float]:
        """Validation loss of the task's model and of each offer; empty without offers."""
        if not task.offers:
            return []
        network = self.network(task.submodel)
        models = [task.params, *(offer.params for offer in task.offers)]
        x, y = self.validation_data(task)
        return [average_loss(network, params, x, y) for params in models]

    def perform(
        self, task: Task, memory: DeviceMemory | None = None, rebases: Rebases = ()
    ) -> Update:
        """The update of this task, a deterministic function of the arguments.

        A spec that needs memory reads and changes `memory`; without one the task counts as the
        device's first. `rebases` are the broadcasts that reached the device during training.
        """
        memory = {} if memory is None else memory
        if self.privacy is not None:
            return self._perform_privately(task, memory, self.privacy)
        training, network = self.start(task), self.network(task.submodel)
        if network.keeps_buffers:
            training.params = network.extended(training.params, memory.get(BUFFERS))
        if self.train is not None:
            x, y = self.data(task)
            training.params, reported = own_update(
                self.train, network, training.params, x, y, task.spec, self.stream_of(task).seed,
                task.number, self.device, self.config,
            )  # fmt: skip
            training.params = _sent_part(network, training.params, memory)
            return self.make_update(task, training.delta, training.choice, memory, reported)
        for passes, number in rebases:
            newer = task.chosen(number)
            if training.accepts(task.offer_of(newer.lineage)):
                self.advance(task, training, passes)
                training.rebase(number, newer.params)
        self.advance(task, training, task.spec.local_epochs)
        training.params = _sent_part(network, training.params, memory)
        return self.make_update(task, training.delta, training.choice, memory)

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
        x, y = self.data(task)
        training.params, training.optimizer = resumed_update(
            network, training.params, training.anchor, training.optimizer, x, y, task.spec, part,
            self.stream_of(task)._replace(done=training.passes * steps),
        )  # fmt: skip
        training.passes = until

    def stream_of(self, task: Task) -> StepStream:
        """The random stream of the network's random layers in this task."""
        return layer_stream(self.seed, self.device, task.number)

    def make_update(
        self,
        task: Task,
        delta: Tensor,
        choice: int = 0,
        memory: DeviceMemory | None = None,
        reported: Reported | None = None,
    ) -> Update:
        """The update of a finished training, `delta` relative to the model of number `choice`.

        `reported` is what a training function of the user's returned.
        """
        sent = self._with_memory(task.chosen(choice), delta, {} if memory is None else memory)
        metrics = dict(reported.metrics) if reported else {}
        network, base = self.network(task.submodel), task.chosen(choice).params
        x, y = self.data(task)
        if task.spec.report_loss:
            metrics["loss_rms"] = loss_rms(network, base, x, y)
        if task.spec.feedback:
            if network.objective.classifies:
                metrics |= feedback(network, base, *self.validation_data(task))
            metrics |= {f"loss_{i}": loss for i, loss in enumerate(self.model_losses(task))}
        if task.spec.report_shares and network.objective.classifies:
            shares = torch.bincount(y, minlength=network.num_classes) / len(y)
            metrics |= {f"share_{j}": share for j, share in enumerate(shares.tolist())}
        count = reported.num_examples if reported else len(y)
        return release(Update(task.id, sent, count, metrics, choice=choice))

    def _with_memory(self, task: Task, delta: Tensor, memory: DeviceMemory) -> Tensor | None:
        """The delta after gradient balancing and lazy upload; None if it is not sent."""
        if task.spec.balance:
            delta = balanced(delta, task.spec, memory)
        return lazy_upload(delta, task, memory) if task.spec.lazy else delta

    def _perform_privately(self, task: Task, memory: DeviceMemory, privacy: Privacy) -> Update:
        """As `perform`, without choice among models and losses, which would leak un-noised."""
        ledger = Ledger.from_tensor(memory[LEDGER]) if LEDGER in memory else Ledger()
        ledger.use(privacy.unit)
        x, y = self.data(task)
        spec, n = privacy.enforced(task.spec), len(y)
        if not privacy.may_release(ledger, n, spec):
            empty = Update(task.id, None, n, epsilon=privacy.epsilon(ledger), last=True)
            return release(empty, private=True)
        stream = (self.seed, self.device, task.number)
        plan = privacy.plan(n, spec, system_rng() if self.system_noise else task_rng(*stream))
        noise = None if self.system_noise else noise_rng(*stream)
        sizes = [int(size) for size in plan.mask.sum(1).tolist()]
        network = self.network(task.submodel)
        hook = privacy.on_gradient(sizes, n, spec, noise)
        start = network.extended(task.params, memory.get(BUFFERS))
        trained = local_update(network, start, x, y, spec, plan, hook, stream=self.stream_of(task))
        delta = _sent_part(network, trained, memory).sub_(task.params)
        trained_part = network.head if spec.last_layer_only else slice(None)
        delta[trained_part] = privacy.noised_update(delta[trained_part], noise)
        # Charged even if lazy upload suppresses it: that depends on the data, too.
        privacy.charge(ledger, n, spec)
        memory[LEDGER] = ledger.to_tensor()
        update = Update(
            task.id,
            self._with_memory(task, delta, memory),
            n,
            noise_std=privacy.noise_std(n, sizes, spec),
            epsilon=privacy.epsilon(ledger),
            last=not privacy.may_release(ledger, n, spec),
        )
        return release(update, private=True)


def _sent_part(network: FlatModel, trained: Tensor, memory: DeviceMemory) -> Tensor:
    """The part of a trained vector that is sent; the buffers in the rest go to the memory."""
    if not network.keeps_buffers:
        return trained
    memory[BUFFERS] = trained[network.layout.size :].clone()
    return trained[: network.layout.size].clone()
