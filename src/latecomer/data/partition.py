"""Partitions of a dataset over devices: iid, Dirichlet, one class, by subject, time windows."""

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from latecomer.data.stored import Indices
from latecomer.errors import BadInput, unknown

Labels = NDArray[np.int64]

KINDS = ("iid", "dirichlet", "one-class", "by-subject", "time-window")


def split_rows(
    kind: str,
    y: Labels,
    devices: int,
    rng: Generator,
    alpha: float,
    subject: NDArray[np.generic] | None,
    window: int = 0,
) -> list[Indices]:
    """Sorted, disjoint arrays of row indices, one per device; only `time_window` omits rows."""
    match kind:
        case "iid":
            return iid(y, devices, rng)
        case "dirichlet":
            return dirichlet(y, devices, rng, alpha)
        case "one-class":
            return one_class(y, devices, rng)
        case "by-subject":
            return by_subject(subject)
        case "time-window":
            return time_window(devices, len(y), subject, window)
    raise unknown("partition", kind, KINDS)


def iid(y: Labels, devices: int, rng: Generator) -> list[Indices]:
    """Shares of equal size, drawn at random."""
    return [np.sort(share) for share in np.array_split(rng.permutation(len(y)), devices)]


def dirichlet(y: Labels, devices: int, rng: Generator, alpha: float) -> list[Indices]:
    """Shares of equal size; each device draws its class mix from Dir(alpha * prior).

    Examples are drawn without replacement; an exhausted class is removed from the mix. A small
    alpha gives devices with one class, a large alpha devices with the overall class distribution.

    T.-M. H. Hsu, H. Qi, M. Brown. Measuring the effects of non-identical data distribution for
    federated visual classification. arXiv:1909.06335, 2019.
    """
    rows_by_class = [rng.permutation(np.flatnonzero(y == label)) for label in np.unique(y)]
    sizes = np.array([len(rows) for rows in rows_by_class], dtype=np.int64)
    prior = sizes / max(len(y), 1)
    taken = np.zeros_like(sizes)  # rows of each class that are already on a device
    shares = []
    for device in range(devices):
        size = len(y) // devices + (device < len(y) % devices)
        counts = _draw(rng.dirichlet(alpha * prior), prior, sizes - taken, size, rng)
        parts = [r[t : t + c] for r, t, c in zip(rows_by_class, taken, counts, strict=True)]
        taken += counts
        shares.append(np.sort(np.concatenate([np.empty(0, np.int64), *parts])))
    return shares


def _draw(
    mix: NDArray[np.float64],
    prior: NDArray[np.float64],
    left: NDArray[np.int64],
    size: int,
    rng: Generator,
) -> NDArray[np.int64]:
    """Examples per class for a device of `size` with class mix `mix`, when `left` remain."""
    counts = np.zeros_like(left)
    while (missing := size - int(counts.sum())) > 0:
        # Each iteration fills the share or exhausts a class, so the loop ends.
        available = np.flatnonzero(left > counts)
        weights = mix[available]
        if not weights.sum() > 0:
            # A tiny alpha puts all weight on one class. After it is exhausted, the limit of the
            # renormalised mix is again a single class, drawn from the prior.
            weights = np.zeros(len(available))
            weights[rng.choice(len(available), p=prior[available] / prior[available].sum())] = 1
        drawn = rng.multinomial(missing, weights / weights.sum())
        counts[available] = np.minimum(counts[available] + drawn, left[available])
    return counts


def one_class(y: Labels, devices: int, rng: Generator) -> list[Indices]:
    """One class per device; the number of devices of a class is proportional to its examples.

    Device ids cycle through the classes, so that consecutive devices hold different classes.
    """
    labels, sizes = np.unique(y, return_counts=True)
    if devices < len(labels):
        raise BadInput(
            f"partition one-class has {devices} devices for {len(labels)} classes; "
            f"expected at least {len(labels)} devices"
        )
    holders = np.ones(len(labels), dtype=np.int64)
    for _ in range(devices - len(labels)):
        # The class with the most examples per device gets the next one: minimises the maximum.
        holders[np.argmax(sizes / holders)] += 1
    shares = []
    for label, count in zip(labels, holders, strict=True):
        rows = rng.permutation(np.flatnonzero(y == label))
        for cycle, share in enumerate(np.array_split(rows, count)):
            shares.append((cycle, int(label), np.sort(share)))
    return [share for _, _, share in sorted(shares, key=lambda entry: entry[:2])]


def by_subject(subject: NDArray[np.generic] | None) -> list[Indices]:
    """One device per subject, sorted by subject."""
    if subject is None:
        raise BadInput(
            "partition by-subject needs data with a subject for each example;"
            " csv and parquet: name its column with data.subject"
        )
    _, device = np.unique(subject, return_inverse=True)
    return [np.flatnonzero(device == d) for d in range(int(device.max(initial=-1)) + 1)]


def time_window(
    devices: int, rows: int, subject: NDArray[np.generic] | None, window: int
) -> list[Indices]:
    """One stretch of consecutive rows of one recording per device.

    The rows of a subject are one recording (without subjects: all rows). Each recording is cut
    into stretches of equal length, one per device; a device keeps the first `window` examples of
    its stretch, with 0 all of them. A short window mostly holds one class, a long one many.

    FedDC (MobiCom 2025), section 8.1.
    """
    recordings = by_subject(np.zeros(rows, np.int64) if subject is None else subject)
    sizes = np.array([len(recording) for recording in recordings])
    holders = np.zeros(len(recordings), dtype=np.int64)
    for _ in range(devices):
        # The recording with the longest stretches gets the next device.
        holders[np.argmax(sizes / (holders + 1))] += 1
    stretches = [
        stretch
        for recording, count in zip(recordings, holders, strict=True)
        if count
        for stretch in np.array_split(recording, count)
    ]
    shortest = min(len(stretch) for stretch in stretches)
    if not 0 <= window <= shortest:
        raise BadInput(
            f"data.window = {window}: {devices} devices have stretches of {shortest} examples;"
            f" allowed are 1 to {shortest}, or 0 for all of them"
        )
    return [stretch[:window] if window else stretch for stretch in stretches]
