"""What travels: tasks and updates, the server's events and its commands."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from latecomer.core.outcomes import Note, Outcome
from latecomer.core.submodel import Submodel

MAIN = "main"

# What a run makes by the million is read-only by agreement alone: a frozen dataclass takes four
# times as long to make.


@dataclass(frozen=True, slots=True)
class TrainSpec:
    """The local training program of a task: everything the device and the server must agree on."""

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
    feedback: bool = False  # send how well the model fits, see device/feedback.py
    hold_back: bool = True  # what is judged by is not trained on
    # With `feedback`: factor on the label-shift correction of predictions behind "error"; 0 = off
    prior_correction: float = 0.0
    report_loss: bool = False  # send the loss before training as the metric "loss_rms"
    balance: float = 0.0  # decay of the mix with the device's earlier gradients; 0 = off
    clip_norm: int = 2  # the norm that `clip` bounds: L2, or L1 with Laplace noise
    lazy: float = 0.0  # how small a change stays unsent, beside the model's movement; 0 = none
    accumulate_residual: bool = False  # a delta that stays unsent is added to the next one

    @property
    def remembers(self) -> bool:
        """Whether the device needs what it kept of earlier tasks: they must run in order."""
        return self.balance > 0 or self.lazy > 0


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """How a device personalises the model of a task (`device.personalisation`).

    `interpolation`: largest share, 0 to 1, of the device's last update that is added to the model.
    `prior_correction`: factor, 0 to 1, on the label-shift correction log(p_device / p_model) of
    the logits. `class_prior`: p_model, one value per class; empty = uniform. `output_bias`: added
    to the logits, one value per class; empty = zero.
    """

    interpolation: float = 0.0
    prior_correction: float = 0.0
    class_prior: tuple[float, ...] = ()
    output_bias: tuple[float, ...] = ()


@dataclass(slots=True, eq=False)
class Offer:
    """A further model that a device may start from."""

    lineage: str
    version: int
    params: Tensor


@dataclass(slots=True, eq=False)
class Task:
    """Train `params` (version `version` of `lineage`) on the device's data as `spec` says.

    `number` counts the tasks of this device: with the run's seed it names the random stream, so
    that results do not depend on the order in which tasks are executed. Where there are `offers`,
    the device starts from whichever model has the least loss on its data, and says which.
    `broadcasts` are newer models sent while it works; it may go on from the last it has received,
    and None stands for one that it never will.
    `began` is when it was sent, put in by the engine; a device whose data change trains on what it
    had then.
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

    @property
    def versions(self) -> tuple[int, ...]:
        """All versions that its delta may be from."""
        return (self.version, *(o.version for o in self.offers + self.broadcasts if o is not None))

    def was_sent(self, choice: int) -> bool:
        """Whether a delta may be from the model of this number."""
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
        """The task as if the model of this number (0: its own) had been the only one."""
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
    """What a vector weighs on its way."""
    return vector.numel() * vector.element_size()


@dataclass(slots=True, eq=False)
class Update:
    """What a device sends back: `delta` = trained - base, in device coordinates.

    `choice` is the number of the model that delta is from (0: the task's own, then its offers,
    then the broadcasts in the order they were sent).
    `epsilon` is what the device has spent of its privacy so far, by its own ledger; with `last`
    it will send no more, because the next release would exceed its budget.
    """

    task_id: int
    delta: Tensor | None
    num_examples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    noise_std: float = 0.0
    choice: int = 0
    epsilon: float = 0.0
    last: bool = False


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
        """The same contribution made fresh: as if trained from `base`, staleness 0."""
        return replace(self, base=base, delta=delta, staleness=0)

    def weighed(self, weight: float) -> "Contribution":
        # On every update's way: spelled out, it takes a quarter of the time of `replace`.
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


# Events: what the engine tells the server.


@dataclass(frozen=True, slots=True)
class Joined:
    """The device can take a task (again). Late uploads of its earlier tasks may be under way."""

    device: int
    submodel: Submodel | None = None


@dataclass(frozen=True, slots=True)
class Left:
    """The device waits no longer; its open task may still come in.

    It waits again after `Joined`, and after the arrival of the task it was busy with: an engine
    that knows better says `Left` once more.
    """

    device: int


@dataclass(slots=True, eq=False)
class Arrived:
    """An update as it came off the wire: nothing in it has been checked yet.

    `seconds` is how long it took since the task was sent, by the engine's clock.
    """

    device: int
    update: Update
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Failed:
    """The task will never come back."""

    task_id: int
    reason: str


@dataclass(slots=True, eq=False)
class Ready:
    """A compensation that took time is over: it is finished, and goes on at *weigh*."""

    contribution: Contribution


@dataclass(frozen=True, slots=True)
class TimerExpired:
    """A timer that the server set for itself with `Later`."""

    name: str
    version: int


@dataclass(frozen=True, slots=True)
class Received:
    """Of each task, by its id, the numbers of the broadcasts that its device may still go on from.

    The others came too late or have been overtaken: nobody needs to keep them.
    """

    usable: tuple[tuple[int, tuple[int, ...]], ...]


Event = Joined | Left | Arrived | Failed | Ready | TimerExpired | Received


# Commands: what the server asks of the engine.


class Send(NamedTuple):
    """Give the task to its device."""

    task: Task


class Broadcast(NamedTuple):
    """Send the newest of their `broadcasts` to the devices that work on these tasks."""

    tasks: tuple[Task, ...]


class Later(NamedTuple):
    """Hand `event` back after `seconds`; the server goes on meanwhile."""

    seconds: float
    event: Ready | TimerExpired


class Stop(NamedTuple):
    """The strategy has nothing more to do."""

    reason: str


Command = Send | Broadcast | Later | Stop | Outcome | Note
