"""A dataset partitioned over devices, split, scaled and augmented, with a central test set."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from latecomer.data.augment import AUGMENTATIONS, Augmentation, by_class, replicate
from latecomer.data.dataset import Dataset, Targets, is_label, need_classes
from latecomer.data.exclusive_classes import ExclusiveClasses
from latecomer.data.partition import split_rows
from latecomer.data.scaling import FeatureMoments, impute, moments, pool, standardise
from latecomer.data.stored import Indices, Inputs, StoredInputs
from latecomer.errors import BadInput, unknown

# One random stream per purpose (and device), so that no option changes the draws of another.
PARTITION_STREAM, HELD_OUT_STREAM, SPLIT_STREAM, AUGMENT_STREAM, SECOND_STREAM = range(5)

MAX_LISTED = 10
RECENT_BYTES = 2**28  # of stored inputs that are kept in memory after they were read


class Examples(Sequence[Tensor]):
    """Inputs (n, ...) in float32, or int64 for tokens; targets (n, ...) as in `Dataset`.

    Unpacks as `x, y`. Stored inputs are given as a function of the indices of some examples, or of
    None for all of them, and are read when `x` is used.
    """

    def __init__(self, x: Tensor | Callable[[Tensor | None], Tensor], y: Tensor) -> None:
        self._x, self.y = x, y

    @property
    def x(self) -> Tensor:
        return self._x if isinstance(self._x, Tensor) else self._x(None)

    @property
    def stored(self) -> bool:
        """Whether inputs are not in memory."""
        return not isinstance(self._x, Tensor)

    def take(self, index: Tensor) -> "Examples":
        """The examples at these indices; of stored inputs only these are read."""
        x = self._x
        return Examples(x[index] if isinstance(x, Tensor) else x(index), self.y[index])

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: Any) -> Any:
        return self.y if index == 1 else (self.x, self.y)[index]

    def __iter__(self) -> Iterator[Tensor]:
        yield from (self.x, self.y)


def concatenate(parts: Iterable[Examples]) -> Examples:
    """The examples of all parts, in order."""
    some = list(parts)
    y = torch.cat([part.y for part in some])
    if not any(part.stored for part in some):
        return Examples(torch.cat([part.x for part in some]), y)
    ends = torch.tensor([len(part.y) for part in some]).cumsum(0)

    def read(index: Tensor | None) -> Tensor:
        if index is None:
            return torch.cat([part.x for part in some])
        of = torch.searchsorted(ends, index, right=True)
        first = some[int(of[0])].take(index[:1] - (ends[of[0]] - len(some[int(of[0])].y))).x
        found = first.new_empty(len(index), *first.shape[1:])
        for number in sorted({*of.tolist()}):
            begin = int(ends[number]) - len(some[number].y)
            found[of == number] = some[number].take(index[of == number] - begin).x
        return found

    return Examples(read, y)


class RecentInputs:
    """The stored inputs that were read last, by key, up to `limit` bytes (at least one)."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[object, Tensor] = OrderedDict()
        self._lock = Lock()

    def get(self, key: object, read: Callable[[], Tensor]) -> Tensor:
        """The inputs of `key`; read unless they are kept."""
        with self._lock:
            found = self._kept.pop(key, None)
            if found is not None:
                self._kept[key] = found
                return found
        found = read()
        with self._lock:
            self._kept[key] = found
            while len(self._kept) > 1 and sum(x.nbytes for x in self._kept.values()) > self._limit:
                self._kept.popitem(last=False)
        return found


def _no_rows() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class ClientData:
    """The training, validation and test part of one device; any part may be empty."""

    train: Examples
    validation: Examples
    test: Examples
    # The row of each example in the dataset; rows are in order of time.
    train_rows: Tensor = field(default_factory=_no_rows)
    validation_rows: Tensor = field(default_factory=_no_rows)
    test_rows: Tensor = field(default_factory=_no_rows)


@dataclass(frozen=True)
class FederatedDataset:
    """The data of every device, and the central test and validation sets of the server."""

    clients: tuple[ClientData, ...]  # by device id
    test: Examples
    validation: Examples
    num_classes: int  # 0 if targets are not classes
    class_names: tuple[str, ...]
    input_shape: tuple[int, ...]
    notes: tuple[str, ...]  # messages to the user
    num_outputs: int  # classes, numbers per example, or different tokens
    held_out: tuple[int, ...] = ()  # test devices without training data
    holders: tuple[int, ...] = ()  # devices that keep the exclusive classes
    second_domain: tuple[ClientData, ...] = ()  # by device: each example's counterpart, for drift

    @property
    def absent_classes(self) -> list[str]:
        """The names of the classes without an example in the central test set."""
        return _absent(self.class_names, self.test.y)

    def class_counts(self) -> Tensor:
        """(devices, classes): numbers of training examples, replicas included.

        (devices, 1) if targets are not classes.
        """
        if not is_label(self.test.y):
            return torch.tensor([[len(client.train.y)] for client in self.clients])
        return torch.stack(
            [torch.bincount(c.train.y, minlength=self.num_classes) for c in self.clients]
        )

    def pooled(self) -> Examples:
        """The training examples of all devices, for centralised training."""
        return concatenate(client.train for client in self.clients)


Transform = Callable[[NDArray[Any]], NDArray[Any]]  # of inputs


class _SplitRows(NamedTuple):
    """The dataset rows of one device, by part."""

    train: Indices
    validation: Indices
    test: Indices


def federate(
    dataset: Dataset,
    *,
    partition: str,
    devices: int,
    alpha: float,
    test: str,
    scale: str,
    augment: str,
    split: tuple[float, float, float] = (0.64, 0.16, 0.2),
    per_device: int = 0,
    window: int = 0,
    replicas: Mapping[str, int] | None = None,
    second_domain: Dataset | None = None,
    exclusive: ExclusiveClasses | None = None,
    seed: int,
) -> FederatedDataset:
    """Partition `dataset` over devices, then split, scale and augment each device's share.

    `alpha` is for partition dirichlet only, `window` for time-window, `replicas` (class name ->
    number) for augment base. `split` has the shares of training, validation and test.
    `per_device`, if not 0, bounds the training examples of a device before augmentation. The
    central test set is, by `test`: "fair" the test parts of all devices; "held-out-clients" all
    data of a random test share of the devices, which keep their ids but have no training data;
    "official" the rows that the dataset marks. `second_domain` has the same classes, for drift.
    Examples of `exclusive` classes are removed from all devices but their holders. The result is a
    deterministic function of the arguments.
    """
    _check_targets(dataset.y, partition, augment, replicas, exclusive, second_domain)
    official = _official_rows(dataset) if test == "official" else None
    augmentation = _augmentation(augment, replicas or {}, dataset.class_names)
    free = np.delete(np.arange(len(dataset)), [] if official is None else official)
    subject = None if dataset.subject is None else dataset.subject[free]
    stream = np.random.default_rng([seed, PARTITION_STREAM])
    parted = split_rows(partition, dataset.y[free], devices, stream, alpha, subject, window)
    shares = [free[share] for share in parted]
    held_out = _held_out(shares, split[2], seed) if test == "held-out-clients" else []
    partitioned = sum(map(len, shares))  # rows before the removal of exclusive classes
    holders: tuple[int, ...] = ()
    if exclusive:
        shares, holders = exclusive.restrict(shares, dataset.y, dataset.num_classes, held_out)
    nothing = np.empty(0, dtype=np.int64)
    parts = [
        _SplitRows(nothing, nothing, share)
        if device in held_out
        else _split(share, split, np.random.default_rng([seed, SPLIT_STREAM, device]))
        for device, share in enumerate(shares)
    ]
    if per_device:
        parts = [rows._replace(train=rows.train[:per_device]) for rows in parts]
    if exclusive:
        _check_exclusive(exclusive, dataset, parts)

    scaler = _Scaler(dataset.x, parts, scale)
    examples = _Reader(dataset)
    clients = []
    for device, rows in enumerate(parts):
        scaled = scaler.for_device(device)
        times = augmentation(dataset.y[rows.train])
        clients.append(
            ClientData(
                train=examples(
                    rows.train, _replicated(scaled, times, [seed, AUGMENT_STREAM, device]), times
                ),
                validation=examples(rows.validation, scaled),
                test=examples(rows.test, scaled),
                train_rows=torch.from_numpy(np.concatenate([rows.train, rows.train.repeat(times)])),
                validation_rows=torch.from_numpy(rows.validation),
                test_rows=torch.from_numpy(rows.test),
            )
        )

    if official is not None:
        central = examples(official, scaler.pooled)
    elif held_out:
        central = concatenate(clients[device].test for device in held_out)
    else:
        central = concatenate(client.test for client in clients)
    if len(central.y) == 0:
        raise BadInput(
            f"test {test!r} gives an empty central test set "
            f"({len(dataset)} examples on {len(shares)} devices); "
            "use fewer devices or a larger test share"
        )
    return FederatedDataset(
        clients=tuple(clients),
        test=central,
        validation=concatenate(client.validation for client in clients),
        num_classes=dataset.num_classes,
        num_outputs=dataset.num_outputs,
        class_names=dataset.class_names,
        input_shape=tuple(dataset.x.shape[1:]),
        held_out=tuple(held_out),
        holders=holders,
        second_domain=()
        if second_domain is None
        else tuple(
            _counterpart(
                client,
                second_domain,
                dataset,
                scaler.for_device(device),
                [seed, SECOND_STREAM, device],
            )
            for device, client in enumerate(clients)
        ),
        notes=tuple(
            _notes(
                dataset,
                devices,
                shares,
                held_out,
                central,
                unassigned=len(dataset) - partitioned - (0 if official is None else len(official)),
                removed=partitioned - sum(map(len, shares)),
                holders=holders,
            )
        ),
    )


def _check_targets(
    y: Targets,
    partition: str,
    augment: str,
    replicas: Mapping[str, int] | None,
    exclusive: ExclusiveClasses | None,
    second_domain: Dataset | None,
) -> None:
    """BadInput if targets are not classes and a setting needs classes."""
    if partition in ("dirichlet", "one-class"):
        need_classes(
            y, f"data.partition = {partition!r}", "allowed are iid, by-subject and time-window"
        )
    if augment == "balanced" or replicas:
        need_classes(
            y, f"data.augment = {augment!r}", "allowed are none, and base without replicas"
        )
    if exclusive:
        need_classes(y, "fleet.late.only = true", "set it to false")
    if second_domain:
        need_classes(y, "data.drift.second = 'source'", "allowed is rotated")


def _check_exclusive(
    exclusive: ExclusiveClasses, dataset: Dataset, parts: Sequence[_SplitRows]
) -> None:
    trained = np.bincount(
        np.concatenate([dataset.y[rows.train] for rows in parts]), minlength=dataset.num_classes
    )
    for label in exclusive.classes:
        if not trained[label]:
            name = dataset.class_names[label]
            raise BadInput(
                f"fleet.late.only: no training example of {name!r} is left; give fleet.late.devices"
                " or data.per_device more"
            )


def _augmentation(name: str, replicas: Mapping[str, int], classes: Sequence[str]) -> Augmentation:
    for label in replicas:
        if label not in classes:
            raise unknown("data.replicas", label, classes)
    if name != "base" or not replicas:
        return AUGMENTATIONS[name]
    return by_class(np.array([replicas.get(label, 0) for label in classes], dtype=np.int64))


def _official_rows(dataset: Dataset) -> Indices:
    if dataset.test is None:
        raise BadInput("test 'official' needs data that mark their test rows; use 'fair' instead")
    rows = np.flatnonzero(dataset.test)
    if len(rows) in (0, len(dataset)):
        raise BadInput(
            f"test 'official': {len(rows)} of {len(dataset)} rows are marked as test; "
            "expected some, but not all"
        )
    return rows


def _held_out(shares: Sequence[Indices], fraction: float, seed: int) -> list[int]:
    """Ascending ids of a random fraction of the devices with data, at least 1, not all."""
    holders = [device for device, share in enumerate(shares) if len(share)]
    if len(holders) < 2:
        raise BadInput("test 'held-out-clients' needs at least 2 devices with data; there is 1")
    count = min(max(1, round(fraction * len(holders))), len(holders) - 1)
    rng = np.random.default_rng([seed, HELD_OUT_STREAM])
    return sorted(rng.choice(holders, size=count, replace=False).tolist())


def _split(
    share: Indices, split: tuple[float, float, float], rng: np.random.Generator
) -> _SplitRows:
    """A random split of a device's rows; of few rows at least one is for training."""
    size = len(share)
    test = int(split[2] * size + 0.5)
    if size > 1 and split[2] > 0:
        test = max(test, 1)
    test = min(test, max(size - 1, 0))
    validation = min(int(split[1] * size + 0.5), max(size - 1 - test, 0))
    shuffled = rng.permutation(share)
    train = size - validation - test
    return _SplitRows(*np.split(shuffled, [train, train + validation]))


class _Scaler:
    """Scaling of inputs by the moments of the devices' training parts, local or pooled.

    Integers are never scaled. Stored inputs are not even imputed with scale "none", which would
    need a pass over all of them.
    """

    def __init__(self, x: Inputs, parts: Sequence[_SplitRows], scale: str) -> None:
        self._scale = scale
        self._pooled: FeatureMoments | None = None
        if x.dtype.kind == "i" or (isinstance(x, StoredInputs) and scale == "none"):
            return
        local = [moments(x[rows.train]) for rows in parts]
        self._pooled = pool(local)
        # A held-out device has no training part; its local moments are those of its test part.
        self._local = [
            device_moments if len(rows.train) or scale != "local" else moments(x[rows.test])
            for device_moments, rows in zip(local, parts, strict=True)
        ]

    def for_device(self, device: int) -> Transform:
        """The scaling that this device applies to inputs."""
        if self._pooled is None or self._scale != "local":
            return self.pooled
        by = self._local[device].filled_from(self._pooled)
        return lambda x: standardise(x, by)

    def pooled(self, x: NDArray[Any]) -> NDArray[Any]:
        """`x` standardised, or with scale "none" only imputed, by the pooled moments."""
        if self._pooled is None:
            return x
        transform = impute if self._scale == "none" else standardise
        return transform(x, self._pooled)


def _counterpart(
    client: ClientData,
    second: Dataset,
    first: Dataset,
    scaled: Transform,
    stream: Sequence[int],
) -> ClientData:
    """For each example of the device a random one of the same class in the second domain.

    Validation and test parts draw from a fifth of each class, training parts from the rest.
    """
    if second.x.shape[1:] != first.x.shape[1:]:
        raise BadInput(
            f"data.drift: the second domain has examples of shape {second.x.shape[1:]}, the first "
            f"of {first.x.shape[1:]}; they must be equal"
        )
    rng = np.random.default_rng(stream)
    held_back = np.zeros(len(second), dtype=np.bool_)
    for label in range(second.num_classes):
        # The seed does not depend on the device: the same fifth is held back for every device.
        candidates = np.random.default_rng(label).permutation(np.flatnonzero(second.y == label))
        held_back[candidates[: -(-len(candidates) // 5)]] = True

    def matched(part: Examples, allowed: NDArray[np.bool_]) -> Examples:
        rows = np.empty(len(part.y), dtype=np.int64)
        for label in np.unique(part.y.numpy()).tolist():
            candidates = np.flatnonzero((second.y == label) & allowed)
            if not len(candidates):
                name = first.class_names[label]
                raise BadInput(f"data.drift: the second domain has too few examples of {name!r}")
            index = np.flatnonzero(part.y.numpy() == label)
            rows[index] = np.resize(rng.permutation(candidates), len(index))
        return Examples(torch.from_numpy(scaled(second.x[rows])), part.y)

    return ClientData(
        matched(client.train, ~held_back),
        matched(client.validation, held_back),
        matched(client.test, held_back),
    )


class _Reader:
    """Makes the examples of rows of a dataset: copied at once, or read by row when they are used.

    `transform` is applied to the inputs. `times[i]` copies of target i are appended.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._recent = RecentInputs(RECENT_BYTES)
        self._parts = 0

    def __call__(
        self, rows: Indices, transform: Transform, times: Indices | None = None
    ) -> Examples:
        y = self._dataset.y[rows]
        if times is not None:
            y = np.concatenate([y, y.repeat(times, axis=0)])

        def read() -> Tensor:
            return torch.from_numpy(transform(self._dataset.x[rows]))

        if not isinstance(self._dataset.x, StoredInputs):
            return Examples(read(), torch.from_numpy(y))
        key = self._parts = self._parts + 1

        def read_some(index: Tensor | None) -> Tensor:
            if index is None:
                return self._recent.get(key, read)
            if times is not None:  # replicas are made of all rows together
                return read()[index]
            return torch.from_numpy(transform(self._dataset.x[rows[index.numpy()]]))

        return Examples(read_some, torch.from_numpy(y))


def _replicated(scaled: Transform, times: Indices, stream: Sequence[int]) -> Transform:
    """The scaling, followed by the replicas of augmentation."""
    return lambda x: replicate(scaled(x), times, np.random.default_rng(stream))


def _notes(
    dataset: Dataset,
    devices: int,
    shares: Sequence[Indices],
    held_out: Sequence[int],
    central: Examples,
    unassigned: int,
    removed: int,
    holders: Sequence[int],
) -> Iterable[str]:
    yield from dataset.notes
    if len(shares) != devices:
        yield f"partition by-subject makes {len(shares)} devices, one per subject, not {devices}"
    if unassigned:
        yield f"{unassigned} of {len(dataset)} examples are in no device's window"
    if holders:
        dropped = f"{removed} of {len(dataset)} examples are left out"
        yield f"{dropped}: fleet.late.only restricts their class to {len(holders)} devices"
    if empty := [device for device, share in enumerate(shares) if not len(share)]:
        yield f"{_count(empty)} no data, hence no task: {_listed(empty)}"
    if held_out:
        yield f"{_count(held_out)} the central test set, hence no task: {_listed(held_out)}"
    if missing := missing_values(dataset.x):
        share = missing / np.prod(dataset.x.shape)
        yield f"{missing} missing values ({share:.2%}) are set to the mean"
    if absent := _absent(dataset.class_names, central.y):
        yield f"classes absent from the central test set: {_listed(absent)}"


def _absent(class_names: Sequence[str], y: Tensor) -> list[str]:
    """The names of the classes that do not occur in the labels; none if targets are no labels."""
    if not is_label(y):
        return []
    present = set(y.tolist())
    return [name for label, name in enumerate(class_names) if label not in present]


def _count(devices: Sequence[int]) -> str:
    return f"{len(devices)} {'device holds' if len(devices) == 1 else 'devices hold'}"


def _listed(items: Sequence[object]) -> str:
    shown = ", ".join(str(item) for item in items[:MAX_LISTED])
    more = len(items) - MAX_LISTED
    return f"{shown} and {more} more" if more > 0 else shown


def missing_values(x: Inputs) -> int:
    """The number of NaN in inputs in memory; stored inputs are not read for it."""
    if isinstance(x, StoredInputs) or x.dtype.kind != "f":
        return 0
    return int(np.isnan(x).sum())
