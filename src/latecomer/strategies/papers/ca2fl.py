"""Wang et al., Tackling the Data Heterogeneity in Asynchronous Federated Learning with Cached
Update Calibration, 2024 (CA2FL).

The server caches the last delta h_i of every device, initially 0. Every M updates make a commit
x <- x + eta v with v = h + (1/M) sum of (delta_i - h_i), where h is the mean of h_i over all N
devices: devices that are not in the buffer count with their cached update.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from latecomer.core.codec import portable
from latecomer.core.messages import Contribution
from latecomer.core.strategy import Commit, ImmediateDispatch, ServerView, Strategy
from latecomer.core.submodel import Submodel, take
from latecomer.strategies.options import Count, CountOrOff, Positive
from latecomer.strategies.parts.merging import Buffer, buffers_from, moved, trained_by
from latecomer.strategies.recipe import recipe


@portable
@dataclass
class Cache:
    """The last deltas of a lineage's devices, each in its own coordinates, and their sum.

    The sum is kept in double precision, because rounding errors would add up over a run.
    """

    total: Tensor
    last: dict[int, tuple[Tensor, Submodel | None]] = field(default_factory=dict)

    def last_delta(self, device: int, submodel: Submodel | None) -> Tensor | float:
        """h_i in the coordinates of `submodel`; 0 for a device without a cached update."""
        if device not in self.last:
            return 0.0
        return take(self._lifted(*self.last[device]), submodel).float()

    def mean(self, devices: int) -> Tensor:
        """h over `devices` devices, per coordinate without those whose sub-model lacks it."""
        narrow = [submodel.index for _, submodel in self.last.values() if submodel is not None]
        counts = torch.full_like(self.total, devices - len(narrow))
        for index in narrow:
            counts[index] += 1
        return self.total / counts.clamp(min=1)

    def put(self, device: int, delta: Tensor, submodel: Submodel | None) -> None:
        self.remove(device)
        self.last[device] = delta, submodel
        self.total = self.total + self._lifted(delta, submodel)

    def remove(self, device: int) -> None:
        if device in self.last:
            self.total = self.total - self._lifted(*self.last.pop(device))

    def _lifted(self, delta: Tensor, submodel: Submodel | None) -> Tensor:
        if submodel is None:
            return delta
        whole = torch.zeros_like(self.total)
        whole[submodel.index] = delta.double()
        return whole


class CalibratedBuffer(Buffer):
    """Merge: a buffer whose mean is calibrated by the cached updates of all devices.

    N is the number of devices that are present, at least the number of cached updates; with a
    single lineage the largest number so far. A coordinate that no update in the buffer covers
    keeps its value. A device is cached in one lineage at a time; a new lineage starts with an empty
    cache, and the cache of an absorbed lineage is dropped. Buffers (BatchNorm statistics) become
    the mean of those in the buffer: they are not calibrated.
    """

    kept = (*Buffer.kept, "_caches", "_devices")

    def __init__(self, size: int, step: float) -> None:
        super().__init__(size, step, self._calibrated)
        self._caches: dict[str, Cache] = {}
        self._devices: dict[str, int] = {}  # lineage -> N
        self._trained: int | None = None  # values of the model that are parameters; None: all

    def add(self, contribution: Contribution, view: ServerView) -> Commit | None:
        lineage = contribution.lineage
        self._devices[lineage] = self._count_devices(lineage, view)
        self._trained = buffers_from(view)
        for name, cache in self._caches.items():
            if name != lineage:
                cache.remove(contribution.task.device)
        return super().add(contribution, view)

    def _count_devices(self, lineage: str, view: ServerView) -> int:
        if len(view.store.lineages) == 1:
            return max(self._devices.get(lineage, 0), len(view.idle) + len(view.working))
        return sum(view.lineage_of(device) == lineage for device in (*view.idle, *view.working))

    def _calibrated(
        self, lineage: str, head: Tensor, contributions: Sequence[Contribution], step: float
    ) -> Tensor:
        cache = self._caches.setdefault(lineage, Cache(torch.zeros_like(head).double()))
        changes = [
            replace(c, delta=c.delta - cache.last_delta(c.task.device, c.task.submodel))
            for c in contributions
        ]
        h = cache.mean(max(self._devices[lineage], len(cache.last)))
        calibration = moved(torch.zeros_like(head), changes, mean=False, step=1.0)
        result = torch.add(head, h.float() + calibration, alpha=step)  # x + eta v
        if self._trained is not None:
            average = moved(head, contributions, mean=True, step=1.0)
            result[self._trained :] = average[self._trained :]
        for c in contributions:
            cache.put(c.task.device, c.delta, c.task.submodel)
        covered = trained_by(contributions, head)
        return result if covered is None else torch.where(covered, result, head)

    def on_absorb(self, into: str, gone: str) -> None:
        super().on_absorb(into, gone)
        self._caches.pop(gone, None)
        self._devices.pop(gone, None)


@recipe(
    "ca2fl",
    "buffer of M updates, calibrated by the cached updates of all devices",
    "Wang et al. 2024",
)
def ca2fl(size: Count = 10, server_lr: Positive = 1.0, concurrency: CountOrOff = 0) -> Strategy:
    """Options (staleness is ignored):

    size: M, updates per commit.
    server_lr: eta; about `size` / devices keeps the step per fleet pass that of the mean update.
    concurrency: largest number of devices that work at a time; 0: all.
    """
    return Strategy(
        name="ca2fl",
        merge=CalibratedBuffer(size, server_lr),
        dispatch=ImmediateDispatch(concurrency),
    )
