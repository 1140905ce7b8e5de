"""The sub-model of each device: as declared, or by its measured task times.

PrivaAsyncFed, section III.A: devices report their hardware, or the server estimates their speed
from tasks, and chooses the pruning level by it. The paper gives no rule; this one is ours.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from latecomer.core.codec import portable
from latecomer.core.messages import Contribution, Later
from latecomer.core.outcomes import Note
from latecomer.core.strategy import Action, Assignment, Dispatch, Observer, ServerView, Strategy
from latecomer.core.submodel import Submodel, name_of

RECENT_TASKS = 3  # tasks of a device that decide about a change of its level
MARGIN = 1.2  # factor by which all of them must exceed the limit, against oscillation


@portable
@dataclass(slots=True)
class Pace:
    """The task times of a device, in seconds, converted to those of the whole model."""

    recent: list[float] = field(default_factory=list)  # its last tasks
    median: float = 0.0  # of the last tasks
    width: float | None = None  # None: not assigned yet


class SubmodelFitting(Observer):
    """Assigns each device the widest model whose task takes at most `slack` times the median.

    The median is over the devices' times for the whole model. Every device trains the whole model
    until `min_devices` devices have an update. `work` is the relative work of each sub-model, by
    name. A level changes only if each of the last three tasks differs by a margin of 20%.
    """

    kept = ("_paces", "_medians")

    def __init__(
        self,
        submodels: Mapping[float, Submodel | None],
        work: Mapping[str, float],
        slack: float = 1.0,
        min_devices: int = 3,
    ) -> None:
        self.slack, self.min_devices = slack, min_devices
        self._submodels, self._work = submodels, work
        self._widths = sorted(submodels, reverse=True)
        self._paces: dict[int, Pace] = {}
        self._medians: list[float] = []  # of all devices, sorted
        self._changes: list[Note] = []

    def level(self, device: int) -> float:
        """The width of the device's sub-model."""
        width = self._paces[device].width if device in self._paces else None
        return self._widths[0] if width is None else width

    def submodel(self, device: int) -> Submodel | None:
        return self._submodels[self.level(device)]

    def on_arrival(self, contribution: Contribution, view: ServerView) -> None:
        task, known = contribution.task, len(self._paces)
        self._record(task.device, contribution.seconds / self._work[name_of(task.submodel)])
        if len(self._paces) >= self.min_devices:
            first_time = known < self.min_devices
            for device in sorted(self._paces) if first_time else [task.device]:
                self._assign(device)

    def act(self, view: ServerView) -> Iterable[Action]:
        """Log lines of the levels that have changed."""
        changes, self._changes = self._changes, []
        return changes

    def _record(self, device: int, seconds: float) -> None:
        if device in self._paces:
            pace = self._paces[device]
            del self._medians[bisect_left(self._medians, pace.median)]
        else:
            pace = self._paces[device] = Pace()
        pace.recent = [*pace.recent, seconds][-RECENT_TASKS:]
        pace.median = median(pace.recent)
        insort(self._medians, pace.median)

    def _assign(self, device: int) -> None:
        pace, before = self._paces[device], self.level(device)
        pace.width = self._fitting_width(pace)
        if pace.width != before:
            fields = {"device": device, "width": pace.width, "seconds": pace.median}
            self._changes.append(Note("level", fields))

    def _fitting_width(self, pace: Pace) -> float:
        # The lower median is the time of a device, which then trains the whole model. The mean of
        # the two middle ones is not; fixed costs per task make narrow devices look slow.
        limit = self.slack * self._medians[(len(self._medians) - 1) // 2]
        if pace.width is None:
            return self._widest(pace.median, limit)
        if len(pace.recent) == RECENT_TASKS:
            if min(pace.recent) * self._share(pace.width) > MARGIN * limit:
                return self._widest(pace.median, limit)
            return max(pace.width, self._widest(MARGIN * max(pace.recent), limit))
        return pace.width

    def _widest(self, seconds: float, limit: float) -> float:
        fitting = (width for width in self._widths if seconds * self._share(width) <= limit)
        return next(fitting, self._widths[-1])

    def _share(self, width: float) -> float:
        return self._work[name_of(self._submodels[width])]


class WithSubmodels:
    """Dispatch: the assignments of `inner`, each with the sub-model that `submodel` returns."""

    def __init__(self, inner: Dispatch, submodel: Callable[[int], Submodel | None]) -> None:
        self.inner, self.submodel = inner, submodel

    def __call__(self, view: ServerView) -> Iterable[Assignment | Later]:
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
