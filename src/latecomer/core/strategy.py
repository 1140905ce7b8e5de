"""The five slots of an algorithm and the hooks of its parts, with plain defaults."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from latecomer.core import messages
from latecomer.core.messages import (
    MAIN,
    Contribution,
    Later,
    ServingSettings,
    Task,
    TimerExpired,
    TrainSpec,
)
from latecomer.core.outcomes import CompensationEnded, Note
from latecomer.core.params import CHUNK, chunks
from latecomer.core.pool import Pool
from latecomer.core.store import ModelStore
from latecomer.core.submodel import Submodel


class ServerView(Protocol):
    """The part of the server's state that parts may read; they change nothing in it."""

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
    def lineage_of(self, device: int) -> str:
        """The lineage whose model the device uses: its cluster assignment."""

    def network(self, submodel: Submodel | None) -> object | None:
        """The network that devices with this sub-model train, or None if the server has none."""


# What slots return.


class Commit(NamedTuple):
    """New parameters for the head of a lineage, made of `contributions` and `surrogates`.

    A lineage that does not exist yet is opened as a fork of the main one.
    """

    lineage: str
    params: Tensor
    contributions: int
    surrogates: int = 0


class Drop(NamedTuple):
    """The merge does not take this contribution."""

    reason: str


class Compensated(NamedTuple):
    """A contribution after staleness compensation.

    `gamma` is the share of the estimate in it (0: it was left stale), `seconds` the server time
    charged, `details` further numbers for its log line.
    """

    contribution: Contribution
    gamma: float = 1.0
    seconds: float = 0.0
    details: Mapping[str, float] = {}


class Assignment(NamedTuple):
    """Give `device` a task from the head of `lineage`.

    A lineage that does not exist yet is opened as a fork of the device's present one. The heads of
    `offers` are sent too, and the device starts from the model with the least loss on its data.
    `submodel` is the part of the model it trains; "declared" is what it declared when it joined.
    """

    device: int
    lineage: str = MAIN
    spec: TrainSpec | None = None
    offers: tuple[str, ...] = ()
    submodel: Submodel | Literal["declared"] | None = "declared"


# Actions that a part may ask for after the events of a moment (`act`).


class Split(NamedTuple):
    """Open the lineage `child` on the head of `parent` and assign these devices to it."""

    parent: str
    child: str
    devices: tuple[int, ...]


class Absorb(NamedTuple):
    """Commit `params` to `into`, close `gone` and move its devices to `into`."""

    into: str
    gone: str
    params: Tensor
    reason: str = ""


class BroadcastHead(NamedTuple):
    """Send the head of a lineage to its devices that train an older version: all, or these."""

    lineage: str
    devices: frozenset[int] | None = None


Action = Split | Absorb | BroadcastHead | Later | CompensationEnded | Note

# The slots.

Route = Callable[[Contribution, ServerView], str]
Compensate = Callable[[Contribution, ServerView], Contribution | Compensated | Later]
Weigh = Callable[[Contribution, ServerView], float]
Dispatch = Callable[[ServerView], Iterable[Assignment | Later]]


class Merge(Protocol):
    """Turns contributions into commits."""

    def add(self, contribution: Contribution, view: ServerView) -> Commit | Drop | None:
        """Add one contribution; a commit returned here is made before the next event."""

    def settle(self, view: ServerView) -> Iterable[Commit]:
        """Called once after all events of one moment: the commits to make now."""


@runtime_checkable
class DelayedCompensation(Protocol):
    """A compensate part that may return `Later(seconds, Ready(contribution))`.

    `finish` is called when the seconds are over and compensates for the head of that moment.
    """

    def finish(self, contribution: Contribution, view: ServerView) -> Compensated: ...


class Stateful:
    """Base class of parts with state: the attributes named in `kept` are in the checkpoint."""

    kept: ClassVar[tuple[str, ...]] = ()

    def state(self) -> dict[str, Any]:
        """Everything the part remembers, for the checkpoint."""
        return {name.lstrip("_"): _snapshot(getattr(self, name)) for name in self.kept}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set what `state` returned."""
        for name in self.kept:
            setattr(self, name, _snapshot(state[name.lstrip("_")]))


def _snapshot(value: Any) -> Any:
    """A copy of nested containers and mutable records; tensors and messages are shared."""
    if isinstance(value, dict):
        return {key: _snapshot(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return type(value)(_snapshot(item) for item in value)
    settings = getattr(type(value), "__dataclass_params__", None)
    if settings is None or settings.frozen or type(value).__module__ == messages.__name__:
        return value
    return replace(value, **{f.name: _snapshot(getattr(value, f.name)) for f in fields(value)})


class Observer(Stateful):
    """Base class of parts that follow a run without deciding about single updates.

    Every method may be left out; parts in slots may have the same methods, with or without this
    base class. The server calls each hook of every part that can be reached from the strategy's
    attributes, once (`core.parts`). So no part passes a hook on to another.

    A subclass whose `act` may return `BroadcastHead` must set `broadcasts = True`; otherwise
    working devices do not receive the model. (For parts without this base class it counts as True.)
    """

    broadcasts: bool = False

    def on_arrival(self, contribution: Contribution, view: ServerView) -> None:
        """An update was accepted and routed; it is not compensated or weighed yet."""

    def on_contribution(self, contribution: Contribution, view: ServerView) -> None:
        """A weighed contribution is about to be passed to the merge, which may still drop it.

        Not called for surrogates, nor for answers without a delta.
        """

    def on_commit(self, commit: Commit, view: ServerView) -> None:
        """The merge has made a commit, which is about to be stored. Not called for `Absorb`."""

    def on_fork(self, parent: str, child: str) -> None:
        """The lineage `child` was opened on the head of `parent`."""

    def on_absorb(self, into: str, gone: str) -> None:
        """The lineage `gone` was closed in favour of `into`."""

    def on_timer(self, timer: TimerExpired, view: ServerView) -> None:
        """A timer set with `Later(seconds, TimerExpired(...))` has expired."""

    def deployed(self, params: Tensor, lineage: str, view: ServerView) -> Tensor:
        """The parameters to evaluate and save, made of the head of a lineage."""
        return params

    def serving(self, settings: ServingSettings, lineage: str, view: ServerView) -> ServingSettings:
        """`settings` with what a device must know to use the head of a lineage between tasks."""
        return settings

    def act(self, view: ServerView) -> Iterable[Action]:
        """Called once after all events of one moment, after the merge: actions and log lines."""
        return ()


# The plain defaults.


def same_lineage(contribution: Contribution, view: ServerView) -> str:
    """Route: the lineage of the model the device was sent, or the one that absorbed it."""
    return contribution.lineage


def no_compensation(contribution: Contribution, view: ServerView) -> Contribution:
    """Compensate: return the contribution unchanged."""
    return contribution


def full_weight(contribution: Contribution, view: ServerView) -> float:
    """Weigh: 1."""
    return 1.0


def same_spec(spec: TrainSpec) -> TrainSpec:
    """Prepare: the training program of the config, unchanged."""
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
    """Merge: every contribution makes a commit, w <- (1 - a) w + a w_i with a its weight."""

    def add(self, contribution: Contribution, view: ServerView) -> Commit:
        head = view.store.head_params(contribution.lineage)
        return Commit(contribution.lineage, mixed(head, contribution, contribution.weight), 1)

    def settle(self, view: ServerView) -> Iterable[Commit]:
        return ()


class ImmediateDispatch:
    """Dispatch: every idle device gets a task, at most `concurrency` working at a time (0: all).

    Which idle devices go first is drawn anew for every version.
    """

    def __init__(self, concurrency: int = 0) -> None:
        self.concurrency = concurrency

    def __call__(self, view: ServerView) -> Iterable[Assignment]:
        if self.concurrency:
            free = min(self.concurrency - len(view.working), len(view.idle))
            devices = view.idle.sample(free, selection_rng(view)) if free > 0 else []
        else:
            devices = list(view.idle)
        return [Assignment(device, view.lineage_of(device)) for device in devices]


def selection_rng(view: ServerView) -> np.random.Generator:
    """A random stream for choosing devices, from the seed, the commits and the tasks given."""
    return np.random.default_rng([view.seed, 0x5E1EC7, view.store.commits, view.tasks_given])


@dataclass(frozen=True)
class Strategy:
    """An algorithm: five slots and observers. It is a value: every run works on its own copy.

    `prepare` adapts the run's local training program. `has_epochs`: a commit on the main lineage
    closes an epoch of the whole fleet. `personal`: devices are clustered, each cluster with a model
    of its own. `needs` names what devices must send beside the delta, if the strategy does not work
    without it. `needs_classes`: it works only if networks return class logits. `varies_epochs`: its
    tasks differ in their number of local epochs.
    """

    name: str = "custom"
    route: Route = same_lineage
    compensate: Compensate = no_compensation
    weigh: Weigh = full_weight
    merge: Merge = field(default_factory=Mix)
    dispatch: Dispatch = field(default_factory=ImmediateDispatch)
    observers: tuple[Observer, ...] = ()
    prepare: Callable[[TrainSpec], TrainSpec] = same_spec
    has_epochs: bool = False
    personal: bool = False
    needs: str = ""
    needs_classes: bool = False
    varies_epochs: bool = False

    @property
    def inverts(self) -> bool:
        """Whether late updates are compensated by gradient inversion, as the part declares."""
        return bool(getattr(self.compensate, "inverts", False))

    @property
    def compensates_later(self) -> bool:
        """Whether its compensation takes server time."""
        return isinstance(self.compensate, DelayedCompensation)
