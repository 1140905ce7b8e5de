"""A dataset laid out on devices: split, scaled, augmented, with a central test set."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from latecomer.data.augment import AUGMENTATIONS, Augmentation, by_class, replicate
from latecomer.data.dataset import Dataset
from latecomer.data.exclusive_classes import ExclusiveClasses
from latecomer.data.partition import PARTITIONS, Indices
from latecomer.data.scaling import impute, moments, pool, standardise
from latecomer.errors import BadInput, unknown

TESTS = ("fair", "held-out-clients", "official")
SCALES = ("global", "local", "none")

# One random stream per purpose (and device), so that no choice moves another.
PARTITION_STREAM, HELD_OUT_STREAM, SPLIT_STREAM, AUGMENT_STREAM, SECOND_STREAM = range(5)

MAX_LISTED = 10


class Examples(NamedTuple):
    """Inputs (float32) and their labels (int64)."""

    x: Tensor
    y: Tensor


def _no_rows() -> Tensor:
    return torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class ClientData:
    """What one device holds; any part may be empty."""

    train: Examples
    validation: Examples
    test: Examples
    # Which row of the data each example is: later rows were recorded later.
    train_rows: Tensor = field(default_factory=_no_rows)
    validation_rows: Tensor = field(default_factory=_no_rows)
    test_rows: Tensor = field(default_factory=_no_rows)


@dataclass(frozen=True)
class FederatedDataset:
    """All devices, indexed by device id, and what the server measures on."""

    clients: tuple[ClientData, ...]
    test: Examples
    validation: Examples
    num_classes: int
    class_names: tuple[str, ...]
    input_shape: tuple[int, ...]
    notes: tuple[str, ...]
    held_out: tuple[int, ...] = ()
    holders: tuple[int, ...] = ()  # of reserved classes
    second_domain: tuple[ClientData, ...] = ()  # each example's counterpart in a second domain

    def class_counts(self) -> Tensor:
        """Training examples (replicas included) of each class on each device."""
        return torch.stack(
            [torch.bincount(c.train.y, minlength=self.num_classes) for c in self.clients]
        )

    def pooled(self) -> Examples:
        """All training examples in one place, for the centralised reference."""
        return _union(client.train for client in self.clients)


class _Parts(NamedTuple):
    """The rows of one device."""

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
    """Lay `dataset` out on devices; the same arguments give the same federation.

    `alpha` is for partition dirichlet only, `window` for time-window, `replicas` (by name of the
    class) for augment base. With `per_device` no device has more training
    examples than that, replicas of augmentation apart. The central test set is, by `test`: "fair"
    the test share of every device; "held-out-clients" all data of a test share of the devices,
    which stay as ids without training data; "official" the rows that the dataset marks. `second`
    holds the same classes in another domain. Examples of `reserved` classes are left out where
    others than their holders would have them.
    """
    _known("partition", partition, PARTITIONS)
    _known("test", test, TESTS)
    _known("scale", scale, SCALES)
    _known("augment", augment, AUGMENTATIONS)
    _check_numbers(devices, split, seed)

    official = _official_rows(dataset) if test == "official" else None
    augmentation = _augmentation(augment, replicas or {}, dataset.class_names)
    shares = _shares(dataset, official, partition, devices, alpha, window, seed)
    held_out = _held_out(shares, split[2], seed) if test == "held-out-clients" else []
    placed = sum(map(len, shares))
    holders: tuple[int, ...] = ()
    if exclusive:
        shares, holders = exclusive.restrict(shares, dataset.y, dataset.num_classes, held_out)
    nothing = np.empty(0, dtype=np.int64)
    parts = [
        _Parts(nothing, nothing, share)
        if device in held_out
        else _split(share, split, np.random.default_rng([seed, SPLIT_STREAM, device]))
        for device, share in enumerate(shares)
    ]
    if per_device:
        parts = [rows._replace(train=rows.train[:per_device]) for rows in parts]
    if exclusive:
        _check_exclusive(exclusive, dataset, parts)

    scaler = _Scaler(dataset.x, parts, scale)
    clients = []
    for device, rows in enumerate(parts):
        rescale = scaler.of(device)
        rng = np.random.default_rng([seed, AUGMENT_STREAM, device])
        labels = dataset.y[rows.train]
        times = augmentation(labels)
        x, y = replicate(rescale(rows.train), labels, times, rng)
        clients.append(
            ClientData(
                train=_examples(x, y),
                validation=_examples(rescale(rows.validation), dataset.y[rows.validation]),
                test=_examples(rescale(rows.test), dataset.y[rows.test]),
                train_rows=torch.from_numpy(np.concatenate([rows.train, rows.train.repeat(times)])),
                validation_rows=torch.from_numpy(rows.validation),
                test_rows=torch.from_numpy(rows.test),
            )
        )

    if official is not None:
        central = _examples(scaler.pooled(official), dataset.y[official])
    elif held_out:
        central = _union(clients[device].test for device in held_out)
    else:
        central = _union(client.test for client in clients)
    if len(central.y) == 0:
        raise BadInput(
            f"test {test!r} leaves no example for the central test set "
            f"({len(dataset)} examples on {len(shares)} devices); "
            "use fewer devices or a larger test share"
        )
    return FederatedDataset(
        clients=tuple(clients),
        test=central,
        validation=_union(client.validation for client in clients),
        num_classes=dataset.num_classes,
        class_names=dataset.class_names,
        input_shape=tuple(dataset.x.shape[1:]),
        held_out=tuple(held_out),
        holders=holders,
        second_domain=()
        if second_domain is None
        else tuple(
            _counterpart(
                client, second_domain, dataset, scaler.like(device), [seed, SECOND_STREAM, device]
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
                outside=len(dataset) - placed - (0 if official is None else len(official)),
                reserved=placed - sum(map(len, shares)),
                holders=holders,
            )
        ),
    )


def _known(option: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise unknown(option, value, allowed)


def _check_numbers(devices: int, split: tuple[float, float, float], seed: int) -> None:
    if devices < 1:
        raise BadInput(f"devices is {devices}; expected at least 1")
    if seed < 0:
        raise BadInput(f"seed is {seed}; expected 0 or more")
    if not (
        len(split) == 3
        and split[0] > 0
        and all(share >= 0 for share in split)
        and abs(sum(split) - 1) < 1e-6
    ):
        raise BadInput(
            f"split is {split}; expected three shares (train, validation, test) that add up to 1, "
            "with train above 0"
        )


def _check_exclusive(
    exclusive: ExclusiveClasses, dataset: Dataset, parts: Sequence[_Parts]
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
        _known("data.replicas", label, classes)
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


def _shares(
    dataset: Dataset,
    official: Indices | None,
    partition: str,
    devices: int,
    alpha: float,
    window: int,
    seed: int,
) -> list[Indices]:
    rows = np.arange(len(dataset))
    if official is not None:
        rows = np.delete(rows, official)
    return [
        rows[share]
        for share in PARTITIONS[partition](
            dataset.y[rows],
            devices,
            np.random.default_rng([seed, PARTITION_STREAM]),
            alpha=alpha,
            subject=None if dataset.subject is None else dataset.subject[rows],
            window=window,
        )
    ]


def _held_out(shares: Sequence[Indices], fraction: float, seed: int) -> list[int]:
    holders = [device for device, share in enumerate(shares) if len(share)]
    if len(holders) < 2:
        raise BadInput("test 'held-out-clients' needs at least 2 devices with data; there is 1")
    count = min(max(1, round(fraction * len(holders))), len(holders) - 1)
    rng = np.random.default_rng([seed, HELD_OUT_STREAM])
    return sorted(rng.choice(holders, size=count, replace=False).tolist())


def _split(share: Indices, split: tuple[float, float, float], rng: np.random.Generator) -> _Parts:
    """A shuffled device in three; training comes first when there is not enough for all."""
    size = len(share)
    test = int(split[2] * size + 0.5)
    if size > 1 and split[2] > 0:
        test = max(test, 1)
    test = min(test, max(size - 1, 0))
    validation = min(int(split[1] * size + 0.5), max(size - 1 - test, 0))
    shuffled = rng.permutation(share)
    train = size - validation - test
    return _Parts(*np.split(shuffled, [train, train + validation]))


class _Scaler:
    """Rows of the data, scaled for a device or by the statistics of all devices.

    Only moments of training parts are pooled, as they would be in a real federation.
    """

    def __init__(self, x: NDArray[np.float32], parts: Sequence[_Parts], scale: str) -> None:
        self._x = x
        self._scale = scale
        own = [moments(x[rows.train]) for rows in parts]
        self._all = pool(own)
        # A held-out device has no training part, and scales by what it has.
        self._own = [
            mine if len(rows.train) else moments(x[rows.test])
            for mine, rows in zip(own, parts, strict=True)
        ]

    def of(self, device: int) -> Callable[[Indices], NDArray[np.float32]]:
        """How this device scales its rows."""
        scaled = self.like(device)
        return lambda rows: scaled(self._x[rows])

    def like(self, device: int) -> Callable[[NDArray[np.float32]], NDArray[np.float32]]:
        """How this device scales values, also such as are not among the data."""
        if self._scale != "local":
            return self._by_all
        by = self._own[device].where_unobserved(self._all)
        return lambda x: standardise(x, by)

    def pooled(self, rows: Indices) -> NDArray[np.float32]:
        """Rows scaled (or only imputed) by the pooled moments."""
        return self._by_all(self._x[rows])

    def _by_all(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        transform = impute if self._scale == "none" else standardise
        return transform(x, self._all)


def _counterpart(
    client: ClientData,
    second: Dataset,
    first: Dataset,
    scaled: Callable[[NDArray[np.float32]], NDArray[np.float32]],
    stream: Sequence[int],
) -> ClientData:
    """For each example one of the same class of the second domain, scaled as this device scales.

    Test and validation parts draw from other rows than training parts do.
    """
    if second.x.shape[1:] != first.x.shape[1:]:
        raise BadInput(
            f"data.drift: the second domain has examples of shape {second.x.shape[1:]}, the first "
            f"of {first.x.shape[1:]}; they must be alike"
        )
    rng = np.random.default_rng(stream)
    held_back = np.zeros(len(second), dtype=np.bool_)
    for label in range(second.num_classes):
        # The same fifth of each class for every device, drawn without its stream.
        there = np.random.default_rng(label).permutation(np.flatnonzero(second.y == label))
        held_back[there[: -(-len(there) // 5)]] = True

    def matched(part: Examples, kept: NDArray[np.bool_]) -> Examples:
        rows = np.empty(len(part.y), dtype=np.int64)
        for label in np.unique(part.y.numpy()).tolist():
            there = np.flatnonzero((second.y == label) & kept)
            if not len(there):
                name = first.class_names[label]
                raise BadInput(f"data.drift: the second domain has too few examples of {name!r}")
            asked = np.flatnonzero(part.y.numpy() == label)
            rows[asked] = np.resize(rng.permutation(there), len(asked))
        return Examples(torch.from_numpy(scaled(second.x[rows])), part.y)

    return ClientData(
        matched(client.train, ~held_back),
        matched(client.validation, held_back),
        matched(client.test, held_back),
    )


def _examples(x: NDArray[np.float32], y: NDArray[np.int64]) -> Examples:
    return Examples(torch.from_numpy(x), torch.from_numpy(y))


def _union(parts: Iterable[Examples]) -> Examples:
    xs, ys = zip(*parts, strict=True)
    return Examples(torch.cat(xs), torch.cat(ys))


def _notes(
    dataset: Dataset,
    devices: int,
    shares: Sequence[Indices],
    held_out: Sequence[int],
    central: Examples,
    outside: int,
    reserved: int,
    holders: Sequence[int],
) -> Iterable[str]:
    yield from dataset.notes
    if len(shares) != devices:
        yield f"partition by-subject makes {len(shares)} devices, one per subject, not {devices}"
    if outside:
        yield f"{outside} of {len(dataset)} examples lie in no device's window"
    if holders:
        left_out = f"{reserved} of {len(dataset)} examples are left out"
        yield f"{left_out}: fleet.late.only leaves their class to {len(holders)} devices"
    if empty := [device for device, share in enumerate(shares) if not len(share)]:
        yield f"{_count(empty)} no data, hence no task: {_listed(empty)}"
    if held_out:
        yield f"{_count(held_out)} the central test set, hence no task: {_listed(held_out)}"
    if missing := int(np.isnan(dataset.x).sum()):
        yield f"{missing} missing values ({missing / dataset.x.size:.2%}) are set to the mean"
    present = set(central.y.tolist())
    absent = [name for label, name in enumerate(dataset.class_names) if label not in present]
    if absent:
        yield f"classes absent from the central test set: {_listed(absent)}"


def _count(devices: Sequence[int]) -> str:
    return f"{len(devices)} {'device holds' if len(devices) == 1 else 'devices hold'}"


def _listed(items: Sequence[object]) -> str:
    shown = ", ".join(str(item) for item in items[:MAX_LISTED])
    more = len(items) - MAX_LISTED
    return f"{shown} and {more} more" if more > 0 else shown
