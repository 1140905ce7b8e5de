"""Wang et al., Tackling the Data Heterogeneity in Asynchronous Federated Learning with Cached
Update Calibration, 2024 (CA2FL).

The server keeps the last delta h_i of every device, at first 0. Every M updates move the model by
v = h + (1/M) sum of (delta_i - h_i), where h is the mean of h_i over all N devices: whoever is not
in the buffer is spoken for by its last word.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from latecomer.core.messages import Contribution
from latecomer.core.strategy import Commit, ImmediateDispatch, ServerView, Strategy
from latecomer.core.submodel import Submodel, take
from latecomer.strategies.options import Count, CountOrOff, Positive
from latecomer.strategies.parts.merging import Buffer, moved, trained_by
from latecomer.strategies.recipe import recipe


@dataclass
class Cache:
    """The last deltas of a lineage's devices, each in its own coordinates, and their sum.

    The sum is in double precision, for it is only ever added to.
    """

    total: Tensor
    last: dict[int, tuple[Tensor, Submodel | None]] = field(default_factory=dict)

    def of(self, device: int, submodel: Submodel | None) -> Tensor | float:
        """h_i in the coordinates of `submodel`; 0 for a device that was not heard yet."""
        if device not in self.last:
            return 0.0
        return take(self._lifted(*self.last[device]), submodel).float()

    def mean(self, devices: int) -> Tensor:
        """h over so many devices; who is known not to train a coordinate does not count in it."""
        narrow = [submodel.index for _, submodel in self.last.values() if submodel is not None]
        counts = torch.full_like(self.total, devices - len(narrow))
        for index in narrow:
            counts[index] += 1
        return self.total / counts.clamp(min=1)

    def hear(self, device: int, delta: Tensor, submodel: Submodel | None) -> None:
        self.forget(device)
        self.last[device] = delta, submodel
        self.total = self.total + self._lifted(delta, submodel)

    def forget(self, device: int) -> None:
        if device in self.last:
            self.total = self.total - self._lifted(*self.last.pop(device))

    def _lifted(self, delta: Tensor, submodel: Submodel | None) -> Tensor:
        if submodel is None:
            return delta
        whole = torch.zeros_like(self.total)
        whole[submodel.index] = delta.double()
        return whole


class Calibrated:
    """Merge: a buffer whose mean is calibrated by the last deltas of all devices.

    It keeps as many deltas as there are devices. N counts those who are there: at least as many as
    were heard, and on a single lineage the most there ever were. A coordinate that nobody in the
    buffer trained keeps its value. A device is heard in one lineage at a time; a fork starts with
    nobody heard, and those of an absorbed lineage are heard anew.
    """

    def __init__(self, size: int, step: float) -> None:
        self.buffer = Buffer(size, step, self._combine)
        self._caches: dict[str, Cache] = {}
        self._devices: dict[str, int] = {}  # lineage -> N

    def add(self, contribution: Contribution, view: ServerView) -> Commit | None:
        lineage = contribution.lineage
        self._devices[lineage] = self._known(lineage, view)
        for name, cache in self._caches.items():
            if name != lineage:
                cache.forget(contribution.task.device)
        return self.buffer.add(contribution, view)

    def _known(self, lineage: str, view: ServerView) -> int:
        if len(view.store.lineages) == 1:
            return max(self._devices.get(lineage, 0), len(view.idle) + len(view.working))
        return sum(view.lineage_of(device) == lineage for device in (*view.idle, *view.working))

    def _combine(
        self, lineage: str, head: Tensor, contributions: Sequence[Contribution], step: float
    ) -> Tensor:
        cache = self._caches.setdefault(lineage, Cache(torch.zeros_like(head).double()))
        news = [
            replace(c, delta=c.delta - cache.of(c.task.device, c.task.submodel))
            for c in contributions
        ]
        h = cache.mean(max(self._devices[lineage], len(cache.last)))
        calibration = moved(torch.zeros_like(head), news, mean=False, step=1.0)
        result = torch.add(head, h.float() + calibration, alpha=step)  # x + eta v
        for c in contributions:
            cache.hear(c.task.device, c.delta, c.task.submodel)
        covered = trained_by(contributions, head)
        return result if covered is None else torch.where(covered, result, head)

    def settle(self, view: ServerView) -> Iterable[Commit]:
        return ()

    def on_absorb(self, into: str, gone: str) -> None:
        self._caches.pop(gone, None)
        self._devices.pop(gone, None)

    def state(self) -> dict[str, Any]:
        caches = {name: [c.total, dict(c.last)] for name, c in self._caches.items()}
        return {"caches": caches, "devices": dict(self._devices)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._caches = {name: Cache(*fields) for name, fields in state["caches"].items()}
        self._devices = dict(state["devices"])


@recipe("ca2fl", "gather M updates, the last ones of all others speak too", "Wang et al. 2024")
def ca2fl(size: Count = 10, server_lr: Positive = 1.0, concurrency: CountOrOff = 0) -> Strategy:
    """Every update counts in full, however stale."""
    return Strategy(
        name="ca2fl", merge=Calibrated(size, server_lr), dispatch=ImmediateDispatch(concurrency)
    )
