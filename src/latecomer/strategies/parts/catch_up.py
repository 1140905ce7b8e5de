"""A part for the *weigh* slot: extra weight for devices that were absent for long.

Beyond the papers. A compensated update is what the device would send for the present model; but the
model was trained without the device for many epochs, and one update per epoch takes as long again
to change that. So the commits missed in the longest absence of a device are made up for by counting
its compensated updates up to 1 + `max_extra` times, until the extra weights add up to the missed
commits.
"""

from latecomer.core.messages import Contribution
from latecomer.core.strategy import ServerView, Stateful, Weigh


class CatchUp(Stateful):
    """Weigh: `weigh` * (1 + extra), extra = min(`max_extra`, commits still to be made up for).

    Only compensated contributions have extra weight.
    """

    kept = ("_last", "_missed")

    def __init__(self, weigh: Weigh, max_extra: float) -> None:
        self.weigh, self.max_extra = weigh, max_extra
        self._last: dict[int, int] = {}  # device -> the head when its last update was merged
        self._missed: dict[int, float] = {}  # device -> commits still to be made up for

    def __call__(self, contribution: Contribution, view: ServerView) -> float:
        weight = self.weigh(contribution, view)
        if not self.max_extra:
            return weight
        device, lineage = contribution.task.device, contribution.lineage
        version, store = contribution.task.version, view.store
        absence = store.staleness(self._last.get(device, version), lineage) - 1
        self._last[device] = store.head(lineage)
        if contribution.staleness >= store.staleness(version, lineage):
            return weight  # on time, or not compensated
        missed = max(self._missed.get(device, 0.0), absence)
        extra = min(self.max_extra, missed)
        self._missed[device] = missed - extra
        return weight * (1.0 + extra)
