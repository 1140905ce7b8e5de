"""A part for the *weigh* slot: who was silent for long counts more until that is made up for.

Past the papers. A repaired update tells what the device would send today; but the model has gone
on without the device for many epochs, and has to unlearn before it learns. Counted as one among
many, the device takes as long again to be heard. So it has a debt of one for every epoch without
its word, and pays it back by counting up to 1 + `most` fold.
"""

from collections.abc import Mapping
from typing import Any

from latecomer.core.messages import Contribution
from latecomer.core.strategy import ServerView, Weigh


class CatchUp:
    """Weigh: `weigh`, and more for repaired contributions of devices that have been silent."""

    def __init__(self, weigh: Weigh, most: float) -> None:
        self.weigh, self.most = weigh, most
        self._heard: dict[int, int] = {}  # device -> the commit before which it was last heard
        self._debt: dict[int, float] = {}

    def __call__(self, contribution: Contribution, view: ServerView) -> float:
        weight = self.weigh(contribution, view)
        if not self.most or not self._was_repaired(contribution, view):
            return weight
        device, now = contribution.task.device, view.store.commits
        silent_since = self._heard.get(device, contribution.task.version)
        debt = self._debt.get(device, 0.0) + max(0, now - silent_since - 1)
        extra = min(self.most, debt)
        self._heard[device], self._debt[device] = now, debt - extra
        return weight * (1.0 + extra)

    def _was_repaired(self, contribution: Contribution, view: ServerView) -> bool:
        """It counts as fresher than its task is."""
        age = view.store.staleness(contribution.task.version, contribution.lineage)
        return contribution.staleness < age

    def state(self) -> dict[str, Any]:
        return {"heard": dict(self._heard), "debt": dict(self._debt)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._heard, self._debt = dict(state["heard"]), dict(state["debt"])
