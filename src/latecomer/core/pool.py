"""The idle devices: a set with random samples in constant time per device."""

from collections.abc import Iterable, Iterator

import numpy as np


class Pool:
    """An ordered set with O(1) add, discard and random choice; the order is deterministic."""

    def __init__(self, devices: Iterable[int] = ()) -> None:
        self._devices: list[int] = []
        self._place: dict[int, int] = {}
        for device in devices:
            self.add(device)

    def __len__(self) -> int:
        return len(self._devices)

    def __iter__(self) -> Iterator[int]:
        return iter(self._devices)

    def __contains__(self, device: int) -> bool:
        return device in self._place

    def add(self, device: int) -> None:
        if device not in self._place:
            self._place[device] = len(self._devices)
            self._devices.append(device)

    def discard(self, device: int) -> None:
        place = self._place.pop(device, None)
        if place is None:
            return
        last = self._devices.pop()
        if last != device:
            self._devices[place] = last
            self._place[last] = place

    def sample(self, count: int, rng: np.random.Generator) -> list[int]:
        """`count` different devices in random order; all, if there are fewer."""
        if count >= len(self._devices):
            return list(self._devices)
        chosen = rng.choice(len(self._devices), size=count, replace=False)
        return [self._devices[i] for i in chosen.tolist()]
