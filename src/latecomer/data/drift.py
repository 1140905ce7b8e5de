"""Data that change while a run goes on: what a device holds is a pure function of virtual time.

Nothing is drawn when it is asked for, so a resumed run and any order of execution see the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from latecomer.data.federated_dataset import ClientData, Examples, FederatedDataset

KINDS = ("none", "grow", "replace", "transition", "shift")
SECONDS = ("rotated", "relabelled", "source")

# Keeps these random streams apart from those of `federation`.
ORDER_STREAM, CHOICE_STREAM = 100, 101


@dataclass(frozen=True)
class Drift:
    """How data change, in virtual seconds. Which values count depends on `kind`."""

    kind: str
    begin: float
    end: float
    first: float = 0.1  # grow: share that a device has in the beginning
    per_second: float = 0.0  # replace: training examples of each device
    repeat: bool = False  # replace: when all are replaced, back again
    second: str = "rotated"  # replace: by what
    share: float = 0.5  # shift: of the devices

    def progress(self, time: float) -> float:
        """0 before it begins, 1 from its end on, linear between."""
        if time < self.begin or self.end <= self.begin:
            return float(time >= self.begin)
        return min(1.0, (time - self.begin) / (self.end - self.begin))


@dataclass(eq=False)
class DataStream:
    """One part of one device's data over time; `stage` names its states, `show` gives one."""

    stage: Callable[[float], Any]
    show: Callable[[Any], Examples]
    _shown: tuple[Any, Examples] | None = field(default=None, init=False)

    def __call__(self, time: float) -> Examples:
        stage = self.stage(time)
        if self._shown is None or self._shown[0] != stage:
            self._shown = (stage, self.show(stage))
        return self._shown[1]


@dataclass(frozen=True)
class ClientDataStreams:
    """What one device holds over time."""

    train: DataStream
    validation: DataStream
    test: DataStream


def client_data_streams(
    federation: FederatedDataset, drift: Drift, seed: int
) -> tuple[ClientDataStreams, ...]:
    """The data of every device over time, by device id."""
    shifted = _chosen(len(federation.clients), drift.share, seed)
    found = []
    for device, client in enumerate(federation.clients):
        orders = [
            torch.from_numpy(np.random.default_rng([seed, ORDER_STREAM, device, k]).permutation(n))
            for k, n in enumerate(map(len, (client.train.y, client.validation.y, client.test.y)))
        ]
        match drift.kind:
            case "grow":
                train = _growing(client.train, orders[0], drift)
                parts = [train, _still(client.validation), _still(client.test)]
            case "replace":
                second = _second_domain(federation, device, drift.second)
                rates = [len(e.y) / max(len(client.train.y), 1) for e in _parts(client)]
                parts = [
                    _replaced(own, other, order, drift, rate)
                    for own, other, order, rate in zip(
                        _parts(client), _parts(second), orders, rates, strict=True
                    )
                ]
            case "transition":
                rows = (client.train_rows, client.validation_rows, client.test_rows)
                parts = [
                    _moving(own, order, number, drift)
                    for own, order, number in zip(_parts(client), orders, rows, strict=True)
                ]
            case "shift" if device in shifted:
                labels = relabelled(torch.arange(federation.num_classes), federation.num_classes)
                parts = [_shifted(own, labels, drift) for own in _parts(client)]
            case _:
                parts = [_still(own) for own in _parts(client)]
        found.append(ClientDataStreams(*parts))
    return tuple(found)


def relabelled(y: Tensor, classes: int) -> Tensor:
    """Each label becomes the next one, the last the first."""
    return (y + 1) % classes


def rotated(x: Tensor) -> Tensor:
    """The same measured another way: images turned by 90 degrees, axes of a sensor swapped.

    A series has its channels moved on by one, a table its columns by half of them.
    """
    if x.ndim == 4:
        return torch.rot90(x, dims=(2, 3))
    return torch.roll(x, 1 if x.ndim == 3 else max(1, x.shape[-1] // 2), dims=-1)


def concatenate_streams(parts: Sequence[DataStream]) -> DataStream:
    """All parts as one, for data in one place."""

    def show(stages: tuple[Any, ...]) -> Examples:
        shown = (part.show(stage) for part, stage in zip(parts, stages, strict=True))
        xs, ys = zip(*shown, strict=True)
        return Examples(torch.cat(xs), torch.cat(ys))

    return DataStream(lambda time: tuple(part.stage(time) for part in parts), show)


def _parts(client: ClientData) -> tuple[Examples, Examples, Examples]:
    return client.train, client.validation, client.test


def _chosen(devices: int, share: float, seed: int) -> set[int]:
    order = np.random.default_rng([seed, CHOICE_STREAM]).permutation(devices)
    return set(order[: round(share * devices)].tolist())


def _still(own: Examples) -> DataStream:
    return DataStream(lambda time: 0, lambda stage: own)


def _growing(own: Examples, order: Tensor, drift: Drift) -> DataStream:
    n = len(own.y)

    def stage(time: float) -> int:
        share = drift.first + (1 - drift.first) * drift.progress(time)
        return min(n, max(1, round(share * n)))

    return DataStream(stage, lambda size: _take(own, order[:size]))


def _replaced(
    own: Examples, other: Examples, order: Tensor, drift: Drift, rate: float
) -> DataStream:
    """Intertwined heterogeneities, section 4.3; `rate` scales to parts other than training."""
    n = len(own.y)

    def stage(time: float) -> int:
        done = int(max(0.0, time - drift.begin) * drift.per_second * rate + 1e-9)
        return done % (2 * n) if drift.repeat and n else min(done, n)

    def show(done: int) -> Examples:
        # The second half of a round trip puts the first domain back, in the same order.
        gone = order[:done] if done <= n else order[done - n :]
        x, y = own.x.clone(), own.y.clone()
        x[gone], y[gone] = other.x[gone], other.y[gone]
        return Examples(x, y)

    return DataStream(stage, show)


def _moving(own: Examples, order: Tensor, rows: Tensor, drift: Drift) -> DataStream:
    """From the earlier half of the device's examples to the later one. FedDC, section 8.4."""
    n = len(own.y)
    if n < 2:
        return _still(own)
    rank = torch.empty(n, dtype=torch.int64)
    rank[torch.argsort(rows, stable=True)] = torch.arange(n)
    early, late = order[rank[order] < n // 2], order[rank[order] >= n // 2]
    size = len(early)

    def show(moved: int) -> Examples:
        # Each in the place of the one that it replaces: what is held back stays held back.
        return _take(own, torch.cat([late[:moved], early[moved:]]))

    def stage(time: float) -> int:
        return round(size * drift.progress(time))

    return DataStream(stage, show)


def _shifted(own: Examples, labels: Tensor, drift: Drift) -> DataStream:
    """EchoPFL, section 7.5: at one moment, the same things are called something else."""
    return DataStream(
        lambda time: int(time >= drift.begin),
        lambda after: Examples(own.x, labels[own.y]) if after else own,
    )


def _second_domain(federation: FederatedDataset, device: int, second: str) -> ClientData:
    client = federation.clients[device]
    if second == "source":
        return federation.second_domain[device]

    def changed(own: Examples) -> Examples:
        if second == "rotated":
            return Examples(rotated(own.x), own.y)
        return Examples(own.x, relabelled(own.y, federation.num_classes))

    return ClientData(changed(client.train), changed(client.validation), changed(client.test))


def _take(own: Examples, index: Tensor) -> Examples:
    return Examples(own.x[index], own.y[index])
