"""How wide a model each device is given: as declared, or by how long its tasks take.

PrivaAsyncFed, section III.A: devices report their hardware, or the server estimates their speed
from tasks, and the pruning level is chosen by it. The paper gives no rule; this one is ours.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from statistics import median
from typing import Any

from latecomer.core.messages import Contribution, Later, Stop
from latecomer.core.outcomes import Note
from latecomer.core.strategy import Action, Assignment, Dispatch, Observer, ServerView, Strategy
from latecomer.core.submodel import Submodel, name_of

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


class SubmodelFitting(Observer):
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

    def on_arrival(self, contribution: Contribution, view: ServerView) -> None:
        task, known = contribution.task, len(self._paces)
        self._learn(task.device, contribution.seconds / self._work[name_of(task.submodel)])
        if len(self._paces) >= self.at_least:
            first_time = known < self.at_least
            for device in sorted(self._paces) if first_time else [task.device]:
                self._assign(device)

    def act(self, view: ServerView) -> Iterable[Action]:
        """Log lines of the levels that have changed in this moment."""
        changes, self._changes = self._changes, []
        return changes

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


class WithSubmodels:
    """Dispatch: the assignments of `inner`, each with the sub-model that `submodel` returns."""

    def __init__(self, inner: Dispatch, submodel: Callable[[int], Submodel | None]) -> None:
        self.inner, self.submodel = inner, submodel

    def __call__(self, view: ServerView) -> Iterable[Assignment | Later | Stop]:
        return (
            request._replace(submodel=self.submodel(request.device))
            if isinstance(request, Assignment)
            else request
            for request in self.inner(view)
        )


def declared_levels(strategy: Strategy, submodels: Sequence[Submodel | None]) -> Strategy:
    """The strategy in which device i trains `submodels[i]`."""
    return replace(strategy, dispatch=WithSubmodels(strategy.dispatch, submodels.__getitem__))


def measured_levels(strategy: Strategy, fitting: SubmodelFitting) -> Strategy:
    """The strategy in which every device trains the sub-model that `fitting` chooses for it."""
    return replace(
        strategy,
        dispatch=WithSubmodels(strategy.dispatch, fitting.submodel),
        observers=(*strategy.observers, fitting),
    )
