"""Mid-task push: newer models for stragglers, while most stragglers use them.

After Li et al. 2024 (EchoPFL), section 5.2, which broadcasts to a whole cluster. Most devices
return before a broadcast could help, so only those get it whose last task took long and which have
not begun the last pass over their data.
"""

from collections.abc import Iterable

from latecomer.core.messages import Contribution, Task
from latecomer.core.strategy import Action, BroadcastHead, Commit, Observer, ServerView
from latecomer.strategies.parts.switch_off import switch_note

RECENT_ANSWERS = 40  # answers of devices that were pushed a model, over which use is measured
MAX_AWAITED = 1000  # tasks whose answers are awaited
MIN_USED = 0.5  # share of the recent answers that must be based on the pushed model


class MidTaskPush(Observer):
    """Observer: pushes the new head to working devices whose model is `behind` or more commits old.

    Pushing ends permanently when fewer than half of the last 40 answers to pushed tasks are based
    on a pushed model.
    """

    kept = ("_awaited", "_used", "_active", "_lasted")

    def __init__(self, behind: int) -> None:
        self.behind = behind
        self._lasted: dict[int, int] = {}  # device -> commits during its last task
        self._awaited: dict[int, int] = {}  # task -> number of models offered with it at the start
        self._used: list[bool] = []  # of the recent answers: based on a pushed model
        self._changed: list[str] = []  # lineages with commits in this moment
        self._active = True
        self._reasons: list[str] = []

    @property
    def broadcasts(self) -> bool:  # type: ignore[override]
        return self._active

    def on_contribution(self, contribution: Contribution, view: ServerView) -> None:
        task, lineage = contribution.task, contribution.lineage
        offers = self._awaited.pop(task.id, None)
        if offers is not None:
            self._count(contribution.update.choice > offers)
        if contribution.update.choice <= (offers or 0):
            self._lasted[task.device] = view.store.staleness(task.version, lineage)

    def on_commit(self, commit: Commit, view: ServerView) -> None:
        self._changed.append(commit.lineage)

    def _count(self, used: bool) -> None:
        self._used = [*self._used, used][-RECENT_ANSWERS:]
        count = sum(self._used)
        if self._active and len(self._used) == RECENT_ANSWERS and count < MIN_USED * RECENT_ANSWERS:
            self._active = False
            self._reasons.append(
                f"mid-task pushes end: {count} of the last {RECENT_ANSWERS} were used"
            )

    def act(self, view: ServerView) -> Iterable[Action]:
        lineages = dict.fromkeys(self._changed) if self._active else {}
        changed, self._changed = [lineage for lineage in lineages if lineage in view.store], []
        open_ones = view.open_tasks
        tasks = [open_ones[t] for t in view.working.values() if t in open_ones] if changed else []
        for lineage in changed:
            behind = [task for task in tasks if self._is_straggler(task, lineage, view)]
            if behind:
                self._awaited |= {task.id: len(task.offers) for task in behind}
                yield BroadcastHead(lineage, frozenset(task.device for task in behind))
        # A compensated update arrives long after its task was closed, a lost one never.
        while len(self._awaited) > MAX_AWAITED:
            del self._awaited[next(iter(self._awaited))]
        yield from (switch_note(reason, view.store.commits) for reason in self._reasons)
        self._reasons.clear()

    def _is_straggler(self, task: Task, lineage: str, view: ServerView) -> bool:
        """Whether its last model is `behind` commits old and, by the length of its previous task,
        its last local epoch has not begun.
        """
        if view.lineage_of(task.device) != lineage:
            return False
        epochs, lasts = task.spec.local_epochs, self._lasted.get(task.device, 0)
        in_time = view.store.staleness(task.version, lineage) < lasts * (epochs - 1) / epochs
        return in_time and view.store.staleness(task.versions[-1], lineage) >= self.behind
