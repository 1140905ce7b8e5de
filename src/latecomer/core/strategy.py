"""The five slots of an algorithm, with plain defaults."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from latecomer.core.messages import (
    MAIN,
    Contribution,
    Later,
    Note,
    ServingSettings,
    Stop,
    Task,
    TimerExpired,
    TrainSpec,
)
from latecomer.core.params import CHUNK, chunks
from latecomer.core.pool import Pool
from latecomer.core.store import ModelStore
from latecomer.core.submodel import Submodel


class ServerView(Protocol):
    """What a slot may look at. Nothing here may be changed by it."""

    @property
    def store(self) -> ModelStore: ...
    @property
    def idle(self) -> Pool: ...
    @property
    def open_tasks(self) -> Mapping[int, Task]: ...
    @property
    def working(self) -> Mapping[int, int]: ...
    @property
    def spec(self) -> TrainSpec: ...
    @property
    def seed(self) -> int: ...
    @property
    def tasks_given(self) -> int: ...
    def home(self, device: int) -> str: ...
    def network(self, submodel: Submodel | None) -> object | None:
        """What a device with this sub-model trains, if the server can run it too."""


class Commit(NamedTuple):
    """A new head for a lineage, made of so many contributions, and so many stand-ins.

    A lineage that does not exist yet is opened as a fork of the main one.
    """

    lineage: str
    params: Tensor
    contributions: int
    surrogates: int = 0


class Drop(NamedTuple):
    """The merge does not want this contribution."""

    reason: str


class Compensated(NamedTuple):
    """A compensated contribution, and what its line in the log tells of the repair."""

    contribution: Contribution
    told: Mapping[str, float]


class Assignment(NamedTuple):
    """Give `device` a task from the head of `lineage`.

    A lineage that does not exist yet is opened as a fork of the device's present one. The heads of
    `offers` go with it, and the device starts from the one that fits its data best. `carry` is the
    sub-model it gets; "own" is what it declared when it joined.
    """

    device: int
    lineage: str = MAIN
    spec: TrainSpec | None = None
    offers: tuple[str, ...] = ()
    carry: Submodel | Literal["own"] | None = "own"


class Split(NamedTuple):
    """Open the lineage `child` on the head of `parent`; these devices use it from now on."""

    parent: str
    child: str
    devices: tuple[int, ...]


class Absorb(NamedTuple):
    """Commit `params` to `into` and close `gone`, whose devices follow; the log may tell why."""

    into: str
    gone: str
    params: Tensor
    reason: str = ""


class BroadcastHead(NamedTuple):
    """Broadcast the head of a lineage to those who work on an older version: all, or these."""

    lineage: str
    devices: frozenset[int] | None = None


Route = Callable[[Contribution, ServerView], str]
Compensate = Callable[[Contribution, ServerView], Contribution | Compensated | Later]
Weigh = Callable[[Contribution, ServerView], float]
Dispatch = Callable[[ServerView], Iterable[Assignment | Later | Stop]]


class Merge(Protocol):
    """Turns contributions into commits."""

    def add(self, contribution: Contribution, view: ServerView) -> Commit | Drop | None:
        """Take one contribution in; a commit here happens at once, before the next event."""

    def settle(self, view: ServerView) -> Iterable[Commit]:
        """Called once after all events of one moment: the commits that are due now."""


@runtime_checkable
class Stateful(Protocol):
    """A part whose state belongs in a checkpoint."""

    def state(self) -> dict[str, Any]: ...
    def restore(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class WaitsForTimer(Protocol):
    """A part that set a timer with `Later(seconds, TimerExpired(...))`."""

    def on_timer(self, due: TimerExpired, view: ServerView) -> None: ...


@runtime_checkable
class DelayedCompensation(Protocol):
    """A compensation that took time: brings the contribution to the head of the moment it ends."""

    def finish(self, contribution: Contribution, view: ServerView) -> Compensated: ...


@runtime_checkable
class Tells(Protocol):
    """A part with something to say in the log; asked after all events of one moment."""

    def tell(self, view: ServerView) -> Iterable[Note]: ...


@runtime_checkable
class Refines(Protocol):
    """A part that opens and closes lineages, or broadcasts; asked after all events of a moment.

    One that never broadcasts says so with `broadcasts = False`.
    """

    def refine(self, view: ServerView) -> Iterable[Split | Absorb | BroadcastHead]: ...


@runtime_checkable
class FollowsLineages(Protocol):
    """A part that keeps something per lineage."""

    def on_fork(self, parent: str, child: str) -> None: ...
    def on_absorb(self, into: str, gone: str) -> None: ...


class Personalises(Protocol):
    """How a model is made fit for use, and devices make it their own (`device.personal`).

    `calibrated` is the newest model of a lineage as it is to be used; it is trained as it is.
    `as_sent` is what devices have of it, who are sent the one that is trained.
    `use` is what devices are told with it.
    """

    @property
    def keep(self) -> float: ...
    @property
    def mix(self) -> float: ...
    def change(self, device: int) -> Tensor | None: ...
    def calibrated(self, lineage: str, view: ServerView) -> Tensor: ...
    def as_sent(self, lineage: str, view: ServerView) -> Tensor: ...
    def use(self, lineage: str, view: ServerView) -> ServingSettings: ...
    def expected(self, devices: Sequence[int], classes: int) -> Tensor | None: ...


# The plain defaults.


def same_lineage(contribution: Contribution, view: ServerView) -> str:
    """Route: the lineage the device was sent a model of, or what has absorbed it."""
    return contribution.lineage


def no_compensation(contribution: Contribution, view: ServerView) -> Contribution:
    """Compensate: not at all."""
    return contribution


def full_weight(contribution: Contribution, view: ServerView) -> float:
    """Weigh: 1 for everybody."""
    return 1.0


def same_spec(spec: TrainSpec) -> TrainSpec:
    """Train as the run's config says."""
    return spec


def mixed(head: Tensor, contribution: Contribution, weight: float) -> Tensor:
    """(1 - weight) * head + weight * trained, on the coordinates the device trained."""
    submodel = contribution.task.submodel
    if submodel is not None:
        result = head.clone()
        trained = contribution.base + contribution.delta
        result[submodel.index] = torch.lerp(submodel.take(head), trained, weight)
        return result
    if head.numel() <= CHUNK:
        return torch.lerp(head, contribution.base + contribution.delta, weight)
    result = torch.empty_like(head)
    for part in chunks(head.numel()):
        out = result[part]
        torch.add(contribution.base[part], contribution.delta[part], out=out)
        torch.lerp(head[part], out, weight, out=out)
    return result


class Mix:
    """Merge: each contribution at once, w <- (1 - a) w + a w_i with a = its weight."""

    def add(self, contribution: Contribution, view: ServerView) -> Commit:
        head = view.store.head_params(contribution.lineage)
        return Commit(contribution.lineage, mixed(head, contribution, contribution.weight), 1)

    def settle(self, view: ServerView) -> Iterable[Commit]:
        return ()


class ImmediateDispatch:
    """Dispatch: every waiting device gets a task at once, at most `concurrency` working (0: all).

    Which of the waiting go first is random, drawn anew for every version.
    """

    def __init__(self, concurrency: int = 0) -> None:
        self.concurrency = concurrency

    def __call__(self, view: ServerView) -> Iterable[Assignment]:
        if self.concurrency:
            free = min(self.concurrency - len(view.working), len(view.idle))
            devices = view.idle.sample(free, selection_rng(view)) if free > 0 else []
        else:
            devices = list(view.idle)
        return [Assignment(device, view.home(device)) for device in devices]


def selection_rng(view: ServerView) -> np.random.Generator:
    """A random stream for choosing devices; derived, so that a checkpoint need not store it."""
    return np.random.default_rng([view.seed, 0x5E1EC7, view.store.commits, view.tasks_given])


@dataclass(frozen=True)
class Strategy:
    """An algorithm: five slots filled. `prepare` adapts the run's training program to it.

    `has_epochs` tells that a commit on the main lineage closes an epoch of the whole fleet,
    `personal` that devices are gathered in clusters with models of their own. `needs` names what
    devices must tell of their data beside the delta, if it does not work without. With
    `own` the model that is used is not the one that is trained.
    """

    name: str = "custom"
    route: Route = same_lineage
    compensate: Compensate = no_compensation
    weigh: Weigh = full_weight
    merge: Merge = field(default_factory=Mix)
    dispatch: Dispatch = field(default_factory=ImmediateDispatch)
    prepare: Callable[[TrainSpec], TrainSpec] = same_spec
    has_epochs: bool = False
    personal: bool = False
    needs: str = ""
    own: Personalises | None = None

    @property
    def slots(self) -> dict[str, Any]:
        names = ("route", "compensate", "weigh", "merge", "dispatch")
        return {name: getattr(self, name) for name in names}

    @property
    def broadcasts(self) -> bool:
        """Whether devices at work may be sent newer models; parts that refine may say no."""
        refining = (part for part in self.slots.values() if isinstance(part, Refines))
        return any(getattr(part, "broadcasts", True) for part in refining)

    def state(self) -> dict[str, Any]:
        return {n: part.state() for n, part in self.slots.items() if isinstance(part, Stateful)}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name, part_state in state.items():
            getattr(self, name).restore(part_state)
