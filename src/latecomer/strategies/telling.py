"""Broadcasts for those who are far behind, as long as they make use of them.

After Li et al. 2024 (EchoPFL), section 5.2, who tell a whole cluster at once. Most devices are back
before a broadcast could help; only those at work for longer than a turn of the fleet are told.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from latecomer.core.messages import Contribution, Note
from latecomer.core.strategy import Commit, Drop, Merge, ServerView, Spread
from latecomer.strategies.fitting import Around

RECENT = 40  # answers of devices that were told
USED = 0.5  # of them: with fewer that went on from what they were told, it does not pay


class Telling(Around[Merge]):
    """Merge: as the inner part does; whoever is `behind` commits late is told of each new head."""

    def __init__(self, inner: Merge, behind: int) -> None:
        super().__init__(inner)
        self.behind = behind
        self._told: set[int] = set()  # open tasks
        self._used: list[bool] = []
        self._changed: list[str] = []
        self._off = False
        self._notes: list[Note] = []

    def add(self, contribution: Contribution, view: ServerView) -> Commit | Drop | None:
        if contribution.task.id in self._told:
            self._told.discard(contribution.task.id)
            self._learn(contribution.update.choice > 0, view)
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
        if self._off or len(self._used) < RECENT or sum(self._used) >= USED * RECENT:
            return
        self._off = True
        reason = f"broadcasts end: {sum(self._used)} of the last {RECENT} were of use"
        self._notes.append(
            Note("switch", {"lineage": "", "version": view.store.commits, "reason": reason})
        )

    def refine(self, view: ServerView) -> Iterable[Any]:
        changed, self._changed = dict.fromkeys(self._changed), []
        for lineage in changed:
            if self._off or lineage not in view.store:
                continue
            far = [task for task in view.working.values() if self._is_far(task, lineage, view)]
            if far:
                self._told.update(far)
                yield Spread(lineage, self.behind)
        self._told &= view.open_tasks.keys()
        yield from super().refine(view)

    def _is_far(self, task_id: int, lineage: str, view: ServerView) -> bool:
        task = view.open_tasks.get(task_id)
        if task is None or view.home(task.device) != lineage:
            return False
        return view.store.staleness(task.versions[-1], lineage) >= self.behind

    def tell(self, view: ServerView) -> Iterable[Note]:
        notes, self._notes = self._notes, []
        return [*notes, *super().tell(view)]

    def state(self) -> dict[str, Any]:
        own = {"told": sorted(self._told), "used": list(self._used), "off": self._off}
        return {**super().state(), **own}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._told, self._used = set(state["told"]), list(state["used"])
        self._off = state["off"]
