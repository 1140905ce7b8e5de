"""Messages: tasks and updates, the events the server gets and the commands it returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from latecomer.core.outcomes import Note, Outcome
from latecomer.core.submodel import Submodel

MAIN = "main"

# Messages that a run makes by the million are not frozen, only never changed: a frozen dataclass
# takes four times as long to make.


@dataclass(frozen=True, slots=True)
class TrainSpec:
    """The local training program of a task, on which the device and the server agree."""

    local_epochs: int = 2
    batch_size: int = 32
    lr: float = 0.01
    momentum: float = 0.5
    optimizer: str = "sgd"
    weight_decay: float = 0.0
    prox: float = 0.0
    clip: float = 0.0  # per-example L2 bound on the gradient; 0 = off
    last_layer_only: bool = False
    lr_scale: float = 1.0
    # Report how well the model fits a fifth of the local data, held back (device/feedback.py)
    feedback: bool = False
    report_shares: bool = False  # send the class shares of the local data as "share_0" ...
    report_loss: bool = False  # send the loss before training as the metric "loss_rms"
    balance: float = 0.0  # decay of the average with the device's earlier gradients; 0 = off
    clip_norm: int = 2  # the norm that `clip` bounds: L2, or L1 with Laplace noise
    lazy: float = 0.0  # deltas smaller than this times the model's movement are not sent; 0 = off
    accumulate_residual: bool = False  # a delta that stays unsent is added to the next one
    local_steps: int = 0  # mini-batches of a local epoch; 0: as many as a pass over the data has

    def epoch_steps(self, n: int) -> int:
        """Mini-batches of a local epoch on n examples."""
        return self.local_steps or -(-n // min(self.batch_size, max(n, 1)))

    def epoch_examples(self, n: int) -> int:
        """Examples that a local epoch on n examples processes."""
        return self.local_steps * min(self.batch_size, n) if self.local_steps else n

    @property
    def needs_memory(self) -> bool:
        """Whether a task needs state of the device's earlier tasks, so that their order matters."""
        return self.balance > 0 or self.lazy > 0


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """How a device personalises the model of a task (`device.personalisation`).

    `prior`: whether the logits are corrected for the device's class prior, by log(p_device /
    p_model). `class_prior`: p_model, one value per class; empty = uniform. `finetune_epochs`: local
    epochs on the device's training examples.
    """

    prior: bool = False
    finetune_epochs: int = 0
    class_prior: tuple[float, ...] = ()


@dataclass(slots=True, eq=False)
class Offer:
    """A further model sent with a task, from which the device may start."""

    lineage: str
    version: int
    params: Tensor


@dataclass(slots=True, eq=False)
class Task:
    """An order to train `params`, version `version` of `lineage`, by the program `spec`.

    `number` counts the tasks of this device: with the run's seed it names the random stream, so
    that results do not depend on the order in which tasks are executed. With `offers` the device
    starts from the model with the least loss on its data and reports which. `broadcasts` are newer
    models sent while it trains; it may continue from the last one it received; an entry is None
    once the device can no longer use that model. `began` is the time of dispatch, set by the
    engine: a device whose data change trains on those of that time. `unaveraged` are arrays of the
    model that are not floats (`core.arrays`): those of the last accepted update.
    """

    id: int
    device: int
    number: int
    lineage: str
    version: int
    spec: TrainSpec
    params: Tensor
    submodel: Submodel | None = None
    offers: tuple[Offer, ...] = ()
    broadcasts: tuple[Offer | None, ...] = ()
    began: float = 0.0
    unaveraged: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def versions(self) -> tuple[int, ...]:
        """All versions that may be the base of its delta."""
        return (self.version, *(o.version for o in self.offers + self.broadcasts if o is not None))

    def was_sent(self, choice: int) -> bool:
        """Whether the model with this number may be the base of its delta."""
        others = self.offers + self.broadcasts
        return choice == 0 or (0 < choice <= len(others) and others[choice - 1] is not None)

    def offer_of(self, lineage: str) -> int:
        """The number of the offer of this lineage, from 1; 0 if there is none."""
        lineages = [offer.lineage for offer in self.offers]
        return lineages.index(lineage) + 1 if lineage in lineages else 0

    @property
    def bytes_down(self) -> int:
        return (1 + len(self.offers)) * wire_bytes(self.params)

    def chosen(self, choice: int) -> "Task":
        """The task as if only the model with this number (0: its own) had been sent."""
        if not self.offers and not self.broadcasts:
            return self
        own = Offer(self.lineage, self.version, self.params)
        taken = (own, *self.offers, *self.broadcasts)[choice]
        if taken is None:
            raise ValueError(f"task {self.id}: model {choice} was not kept")
        return replace(
            self,
            lineage=taken.lineage,
            version=taken.version,
            params=taken.params,
            offers=(),
            broadcasts=(),
        )


def wire_bytes(vector: Tensor) -> int:
    """Bytes of a vector in a message."""
    return vector.numel() * vector.element_size()


@dataclass(slots=True, eq=False)
class Update:
    """A device's answer: `delta` = trained - base, in the coordinates of its sub-model.

    `choice` is the number of the model that is the base (0: the task's own, then its offers, then
    the broadcasts in the order they were sent). `epsilon` is the privacy spent so far by the
    device's ledger; with `last` it sends no more, because the next release would exceed its budget.
    `unaveraged` are the trained model's arrays that are not floats; empty if it has none.
    """

    task_id: int
    delta: Tensor | None
    num_examples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    noise_std: float = 0.0
    choice: int = 0
    epsilon: float = 0.0
    last: bool = False
    unaveraged: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Contribution:
    """An accepted update on its way through the slots."""

    task: Task
    update: Update
    base: Tensor
    delta: Tensor
    lineage: str
    staleness: int
    weight: float = 1.0
    seconds: float = 0.0

    def rebase(self, base: Tensor, delta: Tensor) -> "Contribution":
        """The contribution with another base and delta, and staleness 0."""
        return replace(self, base=base, delta=delta, staleness=0)

    def weighed(self, weight: float) -> "Contribution":
        # Runs for every update: spelled out, it takes a quarter of the time of `replace`.
        return Contribution(
            self.task,
            self.update,
            self.base,
            self.delta,
            self.lineage,
            self.staleness,
            weight,
            self.seconds,
        )


# Events, from the engine to the server.


@dataclass(frozen=True, slots=True)
class Joined:
    """The device is reachable and becomes idle; its earlier tasks stay open until they end."""

    device: int
    submodel: Submodel | None = None


@dataclass(frozen=True, slots=True)
class Left:
    """The device is unreachable and no longer idle; the update of its open task may still arrive.

    The server makes a device idle at `Joined` and when the update of its task arrives. If the
    device is unreachable at that time, the engine adds `Left` right after that event.
    """

    device: int


@dataclass(slots=True, eq=False)
class Arrived:
    """An unchecked update. `seconds` is the time since its task was sent, by the engine's clock."""

    device: int
    update: Update
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Failed:
    """The task will get no answer."""

    task_id: int
    reason: str


@dataclass(slots=True, eq=False)
class Ready:
    """The server time of a compensation is over: it is finished, then weighed and merged."""

    contribution: Contribution


@dataclass(frozen=True, slots=True)
class TimerExpired:
    """A timer set with `Later` has expired; `version` is the head when it was set."""

    name: str
    version: int


@dataclass(frozen=True, slots=True)
class Received:
    """Task id -> numbers of the broadcasts that its device can still continue from.

    The other models sent to that task arrived too late or were overtaken.
    """

    usable: tuple[tuple[int, tuple[int, ...]], ...]


Event = Joined | Left | Arrived | Failed | Ready | TimerExpired | Received


# Commands, from the server to the engine.


class Send(NamedTuple):
    """Give the task to its device."""

    task: Task


class Broadcast(NamedTuple):
    """Send the last of the `broadcasts` of each of these tasks to its device."""

    tasks: tuple[Task, ...]


class Later(NamedTuple):
    """Return `event` to the server after `seconds`."""

    seconds: float
    event: Ready | TimerExpired


Command = Send | Broadcast | Later | Outcome | Note
