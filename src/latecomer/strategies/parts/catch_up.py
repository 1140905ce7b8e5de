"""A part for the *weigh* slot: who was silent for long counts more until that is made up for.

Past the papers. A repaired update tells what the device would send today; but the model has gone
on without the device for many epochs, and has to unlearn before it learns. Counted as one among
many, the device takes as long again to be heard. So its longest silence is a debt, paid back by
counting up to 1 + `most` fold. The weight is never carried over; only the debt is, and it shrinks.
"""

from collections.abc import Mapping
from typing import Any

from latecomer.core.messages import Contribution
from latecomer.core.strategy import ServerView, Weigh


class CatchUp:
    """Weigh: `weigh`, and more for repaired contributions of devices that have been silent."""

    def __init__(self, weigh: Weigh, most: float) -> None:
        self.weigh, self.most = weigh, most
        self._heard: dict[int, int] = {}  # device -> the version to which it last had a word
        self._debt: dict[int, float] = {}

    def __call__(self, contribution: Contribution, view: ServerView) -> float:
        weight = self.weigh(contribution, view)
        if not self.most:
            return weight
        device, lineage = contribution.task.device, contribution.lineage
        version, store = contribution.task.version, view.store
        silence = store.staleness(self._heard.get(device, version), lineage) - 1
        self._heard[device] = store.head(lineage)
        if contribution.staleness >= store.staleness(version, lineage):
            return weight  # in time, or as stale as it came
        debt = max(self._debt.get(device, 0.0), silence)
        extra = min(self.most, debt)
        self._debt[device] = debt - extra
        return weight * (1.0 + extra)

    def state(self) -> dict[str, Any]:
        return {"heard": dict(self._heard), "debt": dict(self._debt)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._heard, self._debt = dict(state["heard"]), dict(state["debt"])
