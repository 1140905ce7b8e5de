"""Data drift: the examples of each device as a pure function of virtual time.

All random draws are made when a stream is built, so the data depend neither on the order of
queries nor on a resumption of the run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from latecomer.data.federated_dataset import ClientData, Examples, FederatedDataset, concatenate

# Random streams, distinct from those of `federated_dataset`.
ORDER_STREAM, CHOICE_STREAM = 100, 101


@dataclass(frozen=True)
class Drift:
    """The kind and the times (virtual seconds) of a drift; see `[data.drift]`.

    "grow": the training part grows from the share `first` to the whole. "replace": each device
    replaces `per_second` training examples per second by examples of a second domain.
    "transition": from the earlier half of each device's examples to the later half. "shift": the
    labels of some devices are permuted at `begin`.
    """

    kind: str  # none | grow | replace | transition | shift
    begin: float
    end: float
    first: float = 0.1  # grow: initial share of the training part
    per_second: float = 0.0  # replace: training examples per device and second
    repeat: bool = False  # replace: after all are replaced, replace them back, and so on
    second: str = "rotated"  # replace: second domain, rotated | relabelled | source
    share: float = 0.5  # shift: share of the devices whose labels change

    def progress(self, time: float) -> float:
        """0 until `begin`, 1 from `end` on, linear in between."""
        if time < self.begin or self.end <= self.begin:
            return float(time >= self.begin)
        return min(1.0, (time - self.begin) / (self.end - self.begin))


@dataclass(eq=False)
class DataStream:
    """One part (train, validation or test) of a device's data as a function of virtual time.

    `stage` maps a time to a state; `examples` builds the data of a state. The last one is cached.
    """

    stage: Callable[[float], Any]
    examples: Callable[[Any], Examples]
    _cached: tuple[Any, Examples] | None = field(default=None, init=False)

    def __call__(self, time: float) -> Examples:
        stage = self.stage(time)
        if self._cached is None or self._cached[0] != stage:
            self._cached = (stage, self.examples(stage))
        return self._cached[1]


@dataclass(frozen=True)
class ClientDataStreams:
    """The three parts of one device's data as functions of virtual time."""

    train: DataStream
    validation: DataStream
    test: DataStream


def client_data_streams(
    federation: FederatedDataset, drift: Drift, seed: int
) -> tuple[ClientDataStreams, ...]:
    """The data streams of every device under the drift, by device id."""
    shifted = _random_devices(len(federation.clients), drift.share, seed)
    streams = []
    for device, client in enumerate(federation.clients):
        orders = [
            torch.from_numpy(np.random.default_rng([seed, ORDER_STREAM, device, k]).permutation(n))
            for k, n in enumerate(map(len, (client.train.y, client.validation.y, client.test.y)))
        ]
        match drift.kind:
            case "grow":
                train = _growing_stream(client.train, orders[0], drift)
                parts = [train, _constant_stream(client.validation), _constant_stream(client.test)]
            case "replace":
                second = _second_domain(federation, device, drift.second)
                rates = [len(e.y) / max(len(client.train.y), 1) for e in _parts(client)]
                parts = [
                    _replacement_stream(first, other, order, drift, rate)
                    for first, other, order, rate in zip(
                        _parts(client), _parts(second), orders, rates, strict=True
                    )
                ]
            case "transition":
                rows = (client.train_rows, client.validation_rows, client.test_rows)
                parts = [
                    _transition_stream(part, order, part_rows, drift)
                    for part, order, part_rows in zip(_parts(client), orders, rows, strict=True)
                ]
            case "shift" if device in shifted:
                labels = relabelled(torch.arange(federation.num_classes), federation.num_classes)
                parts = [_label_shift_stream(part, labels, drift) for part in _parts(client)]
            case _:
                parts = [_constant_stream(part) for part in _parts(client)]
        streams.append(ClientDataStreams(*parts))
    return tuple(streams)


def relabelled(y: Tensor, classes: int) -> Tensor:
    """The labels (y + 1) mod classes."""
    return (y + 1) % classes


def rotated(x: Tensor) -> Tensor:
    """The inputs of a second domain: images rotated by 90 degrees, else features permuted.

    The channels of a series are rolled by one, the columns of a table by half their number.
    """
    if x.ndim == 4:
        return torch.rot90(x, dims=(2, 3))
    return torch.roll(x, 1 if x.ndim == 3 else max(1, x.shape[-1] // 2), dims=-1)


def concatenate_streams(parts: Sequence[DataStream]) -> DataStream:
    """The stream whose examples are the concatenation of those of `parts`."""

    def examples(stages: tuple[Any, ...]) -> Examples:
        return concatenate(p.examples(stage) for p, stage in zip(parts, stages, strict=True))

    return DataStream(lambda time: tuple(part.stage(time) for part in parts), examples)


def _parts(client: ClientData) -> tuple[Examples, Examples, Examples]:
    return client.train, client.validation, client.test


def _random_devices(devices: int, share: float, seed: int) -> set[int]:
    order = np.random.default_rng([seed, CHOICE_STREAM]).permutation(devices)
    return set(order[: round(share * devices)].tolist())


def _constant_stream(part: Examples) -> DataStream:
    return DataStream(lambda time: 0, lambda stage: part)


def _growing_stream(part: Examples, order: Tensor, drift: Drift) -> DataStream:
    n = len(part.y)

    def stage(time: float) -> int:
        share = drift.first + (1 - drift.first) * drift.progress(time)
        return min(n, max(1, round(share * n)))

    return DataStream(stage, lambda size: _take(part, order[:size]))


def _replacement_stream(
    first: Examples, second: Examples, order: Tensor, drift: Drift, rate: float
) -> DataStream:
    """Examples of the first domain replaced by their counterparts in the second, in `order`.

    `rate` is the size of the part over that of the training part, so that all parts are replaced
    in the same time. Intertwined heterogeneities, section 4.3.
    """
    n = len(first.y)

    def stage(time: float) -> int:
        replaced = int(max(0.0, time - drift.begin) * drift.per_second * rate + 1e-9)
        return replaced % (2 * n) if drift.repeat and n else min(replaced, n)

    def examples(replaced: int) -> Examples:
        # From n to 2n the first domain is restored, in the same order.
        index = order[:replaced] if replaced <= n else order[replaced - n :]
        x, y = first.x.clone(), first.y.clone()
        x[index], y[index] = second.x[index], second.y[index]
        return Examples(x, y)

    return DataStream(stage, examples)


def _transition_stream(part: Examples, order: Tensor, rows: Tensor, drift: Drift) -> DataStream:
    """From the earlier half of the part's examples to the later half. FedDC, section 8.4.

    `rows` are the row numbers of the examples in the dataset, which are in order of time.
    """
    n = len(part.y)
    if n < 2:
        return _constant_stream(part)
    rank = torch.empty(n, dtype=torch.int64)
    rank[torch.argsort(rows, stable=True)] = torch.arange(n)
    early, late = order[rank[order] < n // 2], order[rank[order] >= n // 2]
    size = len(early)

    def examples(moved: int) -> Examples:
        # A later example has the position of the earlier one that it replaces.
        return _take(part, torch.cat([late[:moved], early[moved:]]))

    def stage(time: float) -> int:
        return round(size * drift.progress(time))

    return DataStream(stage, examples)


def _label_shift_stream(part: Examples, labels: Tensor, drift: Drift) -> DataStream:
    """From `drift.begin` on label y becomes `labels[y]`. EchoPFL, section 7.5."""
    return DataStream(
        lambda time: int(time >= drift.begin),
        lambda after: Examples(part.x, labels[part.y]) if after else part,
    )


def _second_domain(federation: FederatedDataset, device: int, second: str) -> ClientData:
    """For each example of the device its counterpart in the second domain."""
    client = federation.clients[device]
    if second == "source":
        return federation.second_domain[device]

    def counterpart(part: Examples) -> Examples:
        if second == "rotated":
            return Examples(rotated(part.x), part.y)
        return Examples(part.x, relabelled(part.y, federation.num_classes))

    train, validation, test = map(counterpart, _parts(client))
    return ClientData(train, validation, test)


def _take(part: Examples, index: Tensor) -> Examples:
    return Examples(part.x[index], part.y[index])
