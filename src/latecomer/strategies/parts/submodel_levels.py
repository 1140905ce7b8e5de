"""How wide a model each device is given: as declared, or by how long its tasks take.

PrivaAsyncFed, section III.A: devices report their hardware, or the server estimates their speed
from tasks, and the pruning level is chosen by it. The paper gives no rule; this one is ours.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from statistics import median
from typing import Any, Generic, TypeVar

from latecomer.core.messages import Contribution, Later, Note, Stop, TimerExpired
from latecomer.core.strategy import (
    Absorb,
    Assignment,
    BroadcastHead,
    Dispatch,
    FollowsLineages,
    Refines,
    Route,
    ServerView,
    Split,
    Stateful,
    Strategy,
    Tells,
    WaitsForTimer,
)
from latecomer.core.submodel import Submodel, name_of

Part = TypeVar("Part")

RECENT = 3  # tasks that must agree before a level is given up
MARGIN = 1.2  # and by how much, so that levels do not flap


@dataclass(slots=True)
class Pace:
    """What is known of a device; times are what the whole model would take it.

    `recent` are its last tasks, `usual` their median; `width` is None until it is assigned one.
    """

    recent: list[float] = field(default_factory=list)
    usual: float = 0.0
    width: float | None = None


class SubmodelFitting:
    """The widest model that lets a device keep up: its task takes at most `slack` x the median.

    The median is that of the devices' times for the whole model. Every device carries that one
    until `at_least` devices have been heard. `work` is the relative work of each sub-model, by
    name. A level is given up only when each of the last three tasks says so by a margin of 20%.
    """

    def __init__(
        self,
        submodels: Mapping[float, Submodel | None],
        work: Mapping[str, float],
        slack: float = 1.0,
        at_least: int = 3,
    ) -> None:
        self.slack, self.at_least = slack, at_least
        self._submodels, self._work = submodels, work
        self._widths = sorted(submodels, reverse=True)
        self._paces: dict[int, Pace] = {}
        self._usual: list[float] = []  # of all devices, in order
        self._changes: list[Note] = []

    def level(self, device: int) -> float:
        """The width that this device carries."""
        width = self._paces[device].width if device in self._paces else None
        return self._widths[0] if width is None else width

    def submodel(self, device: int) -> Submodel | None:
        return self._submodels[self.level(device)]

    def hear(self, contribution: Contribution) -> None:
        task, known = contribution.task, len(self._paces)
        self._learn(task.device, contribution.seconds / self._work[name_of(task.submodel)])
        if len(self._paces) >= self.at_least:
            first_time = known < self.at_least
            for device in sorted(self._paces) if first_time else [task.device]:
                self._assign(device)

    def changes(self) -> list[Note]:
        """What has changed since it was last asked."""
        told, self._changes = self._changes, []
        return told

    def _learn(self, device: int, seconds: float) -> None:
        if device in self._paces:
            pace = self._paces[device]
            del self._usual[bisect_left(self._usual, pace.usual)]
        else:
            pace = self._paces[device] = Pace()
        pace.recent = [*pace.recent, seconds][-RECENT:]
        pace.usual = median(pace.recent)
        insort(self._usual, pace.usual)

    def _assign(self, device: int) -> None:
        pace, before = self._paces[device], self.level(device)
        pace.width = self._wanted(pace)
        if pace.width != before:
            fields = {"device": device, "width": pace.width, "seconds": pace.usual}
            self._changes.append(Note("level", fields))

    def _wanted(self, pace: Pace) -> float:
        # The lower median is measured: that device fits, and carries the whole model. A mean with
        # the next one's would not be, and tasks with fixed costs make narrow devices look slow.
        limit = self.slack * self._usual[(len(self._usual) - 1) // 2]
        if pace.width is None:
            return self._widest(pace.usual, limit)
        if len(pace.recent) == RECENT:
            if min(pace.recent) * self._share(pace.width) > MARGIN * limit:
                return self._widest(pace.usual, limit)
            return max(pace.width, self._widest(MARGIN * max(pace.recent), limit))
        return pace.width

    def _widest(self, seconds: float, limit: float) -> float:
        fitting = (width for width in self._widths if seconds * self._share(width) <= limit)
        return next(fitting, self._widths[-1])

    def _share(self, width: float) -> float:
        return self._work[name_of(self._submodels[width])]

    def state(self) -> dict[str, Any]:
        return {"paces": {device: list(astuple(pace)) for device, pace in self._paces.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._paces = {device: Pace(*pace) for device, pace in state["paces"].items()}
        self._usual = sorted(pace.usual for pace in self._paces.values())


class Around(Generic[Part]):
    """Stands in a slot around another part; what a slot is told or asked reaches that one too."""

    def __init__(self, inner: Part) -> None:
        self.inner = inner

    def state(self) -> dict[str, Any]:
        return {"inner": self.inner.state() if isinstance(self.inner, Stateful) else None}

    def restore(self, state: Mapping[str, Any]) -> None:
        if isinstance(self.inner, Stateful):
            self.inner.restore(state["inner"])

    def on_timer(self, due: TimerExpired, view: ServerView) -> None:
        if isinstance(self.inner, WaitsForTimer):
            self.inner.on_timer(due, view)

    def on_fork(self, parent: str, child: str) -> None:
        if isinstance(self.inner, FollowsLineages):
            self.inner.on_fork(parent, child)

    def on_absorb(self, into: str, gone: str) -> None:
        if isinstance(self.inner, FollowsLineages):
            self.inner.on_absorb(into, gone)

    @property
    def broadcasts(self) -> bool:
        return isinstance(self.inner, Refines) and getattr(self.inner, "broadcasts", True)

    def refine(self, view: ServerView) -> Iterable[Split | Absorb | BroadcastHead]:
        return self.inner.refine(view) if isinstance(self.inner, Refines) else ()

    def tell(self, view: ServerView) -> Iterable[Note]:
        return self.inner.tell(view) if isinstance(self.inner, Tells) else ()


class HearAndRoute(Around[Route]):
    """Route: as the inner part does; the fitting hears of every arrival."""

    def __init__(self, inner: Route, fitting: SubmodelFitting) -> None:
        super().__init__(inner)
        self.fitting = fitting

    def __call__(self, contribution: Contribution, view: ServerView) -> str:
        self.fitting.hear(contribution)
        return self.inner(contribution, view)


class Carrying(Around[Dispatch]):
    """Dispatch: as the inner part does; every device carries the sub-model that is its own."""

    def __init__(self, inner: Dispatch, submodel: Callable[[int], Submodel | None]) -> None:
        super().__init__(inner)
        self._submodel = submodel

    def __call__(self, view: ServerView) -> Iterable[Assignment | Later | Stop]:
        return (
            wish._replace(carry=self._submodel(wish.device))
            if isinstance(wish, Assignment)
            else wish
            for wish in self.inner(view)
        )


class CarryingFitted(Carrying):
    """Dispatch: every device carries the sub-model of its level, and the log tells of changes."""

    def __init__(self, inner: Dispatch, fitting: SubmodelFitting) -> None:
        super().__init__(inner, fitting.submodel)
        self.fitting = fitting

    def tell(self, view: ServerView) -> Iterable[Note]:
        return [*self.fitting.changes(), *super().tell(view)]

    def state(self) -> dict[str, Any]:
        return {**super().state(), "fitting": self.fitting.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.fitting.restore(state["fitting"])


def declared_levels(strategy: Strategy, submodels: Sequence[Submodel | None]) -> Strategy:
    """The strategy whose devices carry these sub-models, by their number."""
    return replace(strategy, dispatch=Carrying(strategy.dispatch, submodels.__getitem__))


def fitted(strategy: Strategy, fitting: SubmodelFitting) -> Strategy:
    """The strategy whose devices carry what `fitting` chooses for them."""
    return replace(
        strategy,
        route=HearAndRoute(strategy.route, fitting),
        dispatch=CarryingFitted(strategy.dispatch, fitting),
    )
