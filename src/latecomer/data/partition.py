"""Which examples lie on which device."""

from typing import Protocol

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from latecomer.errors import BadInput

Labels = NDArray[np.int64]
Indices = NDArray[np.int64]


class Partition(Protocol):
    """One sorted index array per device; no example is on two of them.

    Only `time_window` leaves examples out.
    """

    def __call__(
        self,
        y: Labels,
        devices: int,
        rng: Generator,
        *,
        alpha: float,
        subject: NDArray[np.generic] | None,
        window: int = 0,
    ) -> list[Indices]: ...


def iid(y: Labels, devices: int, rng: Generator) -> list[Indices]:
    """Equal shares of the shuffled examples."""
    _check_devices(devices)
    return [np.sort(share) for share in np.array_split(rng.permutation(len(y)), devices)]


def dirichlet(y: Labels, devices: int, rng: Generator, alpha: float) -> list[Indices]:
    """Equal shares, each filled by its own class mix Dir(alpha * prior), without replacement.

    A class that runs out is dropped from the mix. A small alpha gives devices of one class, a
    large one gives devices like the whole.

    T.-M. H. Hsu, H. Qi, M. Brown. Measuring the effects of non-identical data distribution for
    federated visual classification. arXiv:1909.06335, 2019.
    """
    _check_devices(devices)
    if not 0 < alpha < np.inf:
        raise BadInput(f"alpha is {alpha}; expected a number above 0")
    # Each class is a shuffled stack; `taken` says how much of it is gone.
    stacks = [rng.permutation(np.flatnonzero(y == label)) for label in np.unique(y)]
    sizes = np.array([len(stack) for stack in stacks], dtype=np.int64)
    prior = sizes / max(len(y), 1)
    taken = np.zeros_like(sizes)
    shares = []
    for device in range(devices):
        size = len(y) // devices + (device < len(y) % devices)
        counts = _draw(rng.dirichlet(alpha * prior), prior, sizes - taken, size, rng)
        parts = [s[t : t + c] for s, t, c in zip(stacks, taken, counts, strict=True)]
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
    """How many of each class a device of `size` gets when `left` of each remain."""
    counts = np.zeros_like(left)
    while (short := size - int(counts.sum())) > 0:
        # Every turn fills the share or empties a class, so this ends.
        alive = np.flatnonzero(left > counts)
        weights = mix[alive]
        if not weights.sum() > 0:
            # A tiny alpha puts all weight on one class. When that is gone, the limit of the
            # renormalised mix is again a single class, drawn by the prior.
            weights = np.zeros(len(alive))
            weights[rng.choice(len(alive), p=prior[alive] / prior[alive].sum())] = 1
        drawn = rng.multinomial(short, weights / weights.sum())
        counts[alive] = np.minimum(counts[alive] + drawn, left[alive])
    return counts


def one_class(y: Labels, devices: int, rng: Generator) -> list[Indices]:
    """Each device holds one class, and a class has devices in proportion to its examples.

    The classes take turns along the device ids, so that no stretch of devices is one class.
    """
    _check_devices(devices)
    labels, sizes = np.unique(y, return_counts=True)
    if devices < len(labels):
        raise BadInput(
            f"partition one-class has {devices} devices for {len(labels)} classes; "
            f"expected at least {len(labels)} devices"
        )
    holders = np.ones(len(labels), dtype=np.int64)
    for _ in range(devices - len(labels)):
        # The next device goes where devices are fullest, which keeps the largest share smallest.
        holders[np.argmax(sizes / holders)] += 1
    placed = []
    for label, count in zip(labels, holders, strict=True):
        members = rng.permutation(np.flatnonzero(y == label))
        for turn, share in enumerate(np.array_split(members, count)):
            placed.append((turn, int(label), np.sort(share)))
    return [share for _, _, share in sorted(placed, key=lambda place: place[:2])]


def by_subject(subject: NDArray[np.generic] | None) -> list[Indices]:
    """One device per subject, in sorted order of subject."""
    if subject is None:
        raise BadInput("partition by-subject needs data with a subject for each example")
    _, device = np.unique(subject, return_inverse=True)
    return [np.flatnonzero(device == d) for d in range(int(device.max(initial=-1)) + 1)]


def time_window(
    devices: int, rows: int, subject: NDArray[np.generic] | None, window: int
) -> list[Indices]:
    """Each device sees one stretch of consecutive examples of one recording.

    A subject is a recording (without subjects, all examples are), in the order of the rows; it is
    shared among devices in equal stretches, of which each keeps its first `window` examples, or
    with 0 all. A short window mostly holds one class, a long one many.

    FedDC (MobiCom 2025), section 8.1.
    """
    _check_devices(devices)
    recordings = by_subject(np.zeros(rows, np.int64) if subject is None else subject)
    sizes = np.array([len(recording) for recording in recordings])
    holders = np.zeros(len(recordings), dtype=np.int64)
    for _ in range(devices):
        # The next device goes where stretches are longest.
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
            f"data.window = {window}: {devices} devices leave stretches of {shortest} examples;"
            f" allowed are 1 to {shortest}, or 0 for all of them"
        )
    return [stretch[:window] if window else stretch for stretch in stretches]


def _check_devices(devices: int) -> None:
    if devices < 1:
        raise BadInput(f"devices is {devices}; expected at least 1")


PARTITIONS: dict[str, Partition] = {
    "iid": lambda y, devices, rng, *, alpha, subject, window=0: iid(y, devices, rng),
    "dirichlet": lambda y, devices, rng, *, alpha, subject, window=0: dirichlet(
        y, devices, rng, alpha
    ),
    "one-class": lambda y, devices, rng, *, alpha, subject, window=0: one_class(y, devices, rng),
    "by-subject": lambda y, devices, rng, *, alpha, subject, window=0: by_subject(subject),
    "time-window": lambda y, devices, rng, *, alpha, subject, window=0: time_window(
        devices, len(y), subject, window
    ),
}
