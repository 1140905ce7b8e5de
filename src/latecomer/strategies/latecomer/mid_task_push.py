"""Broadcasts for those who are far behind, as long as they make use of them.

After Li et al. 2024 (EchoPFL), section 5.2, who tell a whole cluster at once. Most devices are back
before a broadcast could help: only those are told who, by their last task, are in for a long one
and have not begun its last pass.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from latecomer.core.messages import Contribution, Note, Task
from latecomer.core.strategy import Absorb, BroadcastHead, Commit, Drop, Merge, ServerView, Split
from latecomer.strategies.parts.submodel_levels import Around
from latecomer.strategies.parts.switch_off import switch_note

RECENT = 40  # answers of devices that were told
MOST_TOLD = 1000  # tasks whose answers are awaited
USED = 0.5  # of them: with fewer that went on from what they were told, it does not pay


class MidTaskPush(Around[Merge]):
    """Merge: as the inner part does; a straggler `behind` commits late is told of the new head."""

    def __init__(self, inner: Merge, behind: int) -> None:
        super().__init__(inner)
        self.behind = behind
        self._lasted: dict[int, int] = {}  # device -> commits during its last task
        self._told: dict[int, int] = {}  # task -> the models it could choose from at the start
        self._used: list[bool] = []
        self._changed: list[str] = []
        self._notes: list[Note] = []
        self._on = True  # until it does not pay

    @property
    def broadcasts(self) -> bool:
        return self._on or super().broadcasts

    def add(self, contribution: Contribution, view: ServerView) -> Commit | Drop | None:
        task, lineage = contribution.task, contribution.lineage
        offers = self._told.pop(task.id, None)
        if offers is not None:
            self._learn(contribution.update.choice > offers, view)
        if contribution.update.choice <= (offers or 0):
            self._lasted[task.device] = view.store.staleness(task.version, lineage)
        result = self.inner.add(contribution, view)
        if isinstance(result, Commit):
            self._changed.append(result.lineage)
        return result

    def settle(self, view: ServerView) -> Iterable[Commit]:
        for commit in self.inner.settle(view):
            self._changed.append(commit.lineage)
            yield commit

    def _learn(self, used: bool, view: ServerView) -> None:
        self._used = [*self._used, used][-RECENT:]
        if not self._on or len(self._used) < RECENT or sum(self._used) >= USED * RECENT:
            return
        self._on = False
        reason = f"broadcasts end: {sum(self._used)} of the last {RECENT} were of use"
        self._notes.append(switch_note(reason, view.store.commits))

    def refine(self, view: ServerView) -> Iterable[Split | Absorb | BroadcastHead]:
        told_of = dict.fromkeys(self._changed) if self._on else {}
        changed, self._changed = [lineage for lineage in told_of if lineage in view.store], []
        open_ones = view.open_tasks
        tasks = [open_ones[t] for t in view.working.values() if t in open_ones] if changed else []
        for lineage in changed:
            behind = [task for task in tasks if self._needs(task, lineage, view)]
            if behind:
                self._told |= {task.id: len(task.offers) for task in behind}
                yield BroadcastHead(lineage, frozenset(task.device for task in behind))
        # A repaired update comes long after its task was closed, one that is lost never does.
        while len(self._told) > MOST_TOLD:
            del self._told[next(iter(self._told))]
        yield from super().refine(view)

    def _needs(self, task: Task, lineage: str, view: ServerView) -> bool:
        if view.home(task.device) != lineage:
            return False
        passes, lasts = task.spec.local_epochs, self._lasted.get(task.device, 0)
        in_time = view.store.staleness(task.version, lineage) < lasts * (passes - 1) / passes
        return in_time and view.store.staleness(task.versions[-1], lineage) >= self.behind

    def tell(self, view: ServerView) -> Iterable[Note]:
        notes, self._notes = self._notes, []
        return [*notes, *super().tell(view)]

    def state(self) -> dict[str, Any]:
        own = {"told": dict(self._told), "used": list(self._used), "on": self._on}
        return {**super().state(), **own, "lasted": dict(self._lasted)}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._told, self._used = dict(state["told"]), list(state["used"])
        self._on, self._lasted = state["on"], dict(state["lasted"])
