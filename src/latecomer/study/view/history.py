"""What events.jsonl tells, gathered line by line, so that a growing file can be followed."""

import json
from array import array
from collections.abc import Iterable
from enum import IntEnum
from math import nan
from pathlib import Path
from typing import Any

from latecomer.errors import BadInput

OVERLAP = 256  # bytes before the place reached, by which a file that was cut back is recognised


class End(IntEnum):
    """How a task ended."""

    ARRIVED = 0
    REFUSED = 1
    LOST = 2


class Tasks:
    """The tasks that have ended, as columns."""

    def __init__(self) -> None:
        self.device = array("q")
        self.sent = array("d")
        self.spans = (array("d"), array("d"), array("d"))  # download, training, upload; nan unknown
        self.ended = array("d")
        self.end = array("b")

    def add(self, device: int, sent: float, spans: Iterable[float], ended: float, end: End) -> None:
        self.device.append(device)
        self.sent.append(sent)
        for column, seconds in zip(self.spans, spans, strict=True):
            column.append(seconds)
        self.ended.append(ended)
        self.end.append(end)

    def __len__(self) -> int:
        return len(self.device)


UNKNOWN = (nan, nan, nan)


class History:
    """A run as its log tells it. `feed` takes whole lines, as often as there are new ones."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tasks = Tasks()
        self.open: dict[int, tuple[int, float]] = {}  # task -> device, when it was sent
        self.devices: set[int] = set()
        self.down = (array("d"), array("q"))  # when, bytes
        self.up = (array("d"), array("q"))
        self.weighed = (array("q"), array("d"))  # staleness, weight given
        self.weights: dict[int, float] = {}  # all weight given, by device
        self.staleness: dict[int, int] = {}  # how many arrivals had which
        self.last_staleness: dict[int, int] = {}  # by device
        self.updates: dict[int, int] = {}  # by device
        self.homes: dict[int, str] = {}
        self.moves: list[tuple[float, int, str]] = []  # when, device, lineage it now uses
        self.turns: list[dict[str, Any]] = []  # splits, merges and broadcasts
        self.repairs: list[dict[str, Any]] = []
        self.judgements: list[dict[str, Any]] = []
        self.switches: list[dict[str, Any]] = []
        self.spent: dict[int, float] = {}  # device -> epsilon
        self.spending = (array("d"), array("q"), array("d"))  # when, device, epsilon
        self.retired: dict[int, float] = {}  # device -> when
        self.widths: dict[int, float] = {}
        self.names: dict[int, str] = {}  # of real devices
        self.overdue: set[int] = set()  # real devices whose answer is long in coming
        self.lost: dict[int, float] = {}  # device -> when its last task was lost, if nothing since

    def feed(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self.take(json.loads(line))

    def take(self, event: dict[str, Any]) -> None:
        """One event, as it stands in the log."""
        self.now = event["time"]
        handler = HANDLERS.get(event["event"])
        if handler is not None:
            handler(self, event)

    def _dispatch(self, event: dict[str, Any]) -> None:
        device = event["device"]
        self.devices.add(device)
        self.lost.pop(device, None)
        self.overdue.discard(device)
        self.open[event["task"]] = (device, self.now)
        self.down[0].append(self.now)
        self.down[1].append(event["bytes"])
        # With a choice of models the device says where it is when it answers.
        if not event.get("offers") and self.homes.get(device) != event["lineage"]:
            self._move(device, event["lineage"])

    def _arrival(self, event: dict[str, Any]) -> None:
        device = event["device"]
        self._close(event, End.ARRIVED)
        self.updates[device] = self.updates.get(device, 0) + 1
        if (staleness := event.get("staleness")) is not None:
            self.staleness[staleness] = self.staleness.get(staleness, 0) + 1
            self.last_staleness[device] = staleness
        self._upload(event)
        self._weight(event)
        self._spend(event)
        lineage = event.get("lineage")
        if lineage is not None and self.homes.get(device) != lineage:
            self._move(device, lineage)

    def _introduction(self, event: dict[str, Any]) -> None:
        self.devices.add(event["device"])
        self.names[event["device"]] = str(event["name"])
        if event["width"] < 1:
            self.widths[event["device"]] = event["width"]

    def _late(self, event: dict[str, Any]) -> None:
        self.overdue.add(event["device"])

    def _refusal(self, event: dict[str, Any]) -> None:
        if event.get("device") is None or event.get("task") is None:
            return  # of a node without a name, or an answer that nobody asked for
        self._close(event, End.REFUSED)
        self._upload(event)
        self._spend(event)

    def _drop(self, event: dict[str, Any]) -> None:
        # A task that is still open was lost; one that has arrived was not wanted by the merge.
        if event["task"] in self.open:
            self.lost[event["device"]] = self.now
            self._close(event, End.LOST)

    def _compensation(self, event: dict[str, Any]) -> None:
        self._weight(event)
        self.repairs.append(event)

    def _retire(self, event: dict[str, Any]) -> None:
        self.retired[event["device"]] = self.now
        self._spend(event)

    def _level(self, event: dict[str, Any]) -> None:
        self.widths[event["device"]] = event["width"]

    def _turn(self, event: dict[str, Any]) -> None:
        self.turns.append(event)
        if event["event"] == "broadcast" and (size := event.get("bytes")):
            self.down[0].append(self.now)
            self.down[1].append(size)
        if (into := event.get("into")) is None:
            return
        gone = [d for d, home in self.homes.items() if home == event["lineage"]]
        for device in gone if event["event"] == "merge" else event.get("devices", ()):
            if self.homes.get(device) != into:
                self._move(device, into)

    def _judgement(self, event: dict[str, Any]) -> None:
        self.judgements.append(event)

    def _switch(self, event: dict[str, Any]) -> None:
        self.switches.append(event)

    def _close(self, event: dict[str, Any], end: End) -> None:
        found = self.open.pop(event["task"], None)
        if found is not None:
            device, sent = found
            self.overdue.discard(device)
            self.tasks.add(device, sent, event.get("spans", UNKNOWN), self.now, end)

    def _upload(self, event: dict[str, Any]) -> None:
        if size := event.get("bytes"):
            self.up[0].append(self.now)
            self.up[1].append(size)

    def _weight(self, event: dict[str, Any]) -> None:
        if (weight := event.get("weight")) is not None:
            self.weighed[0].append(event["staleness"])
            self.weighed[1].append(weight)
            self.weights[event["device"]] = self.weights.get(event["device"], 0.0) + weight

    def _spend(self, event: dict[str, Any]) -> None:
        device, epsilon = event["device"], event.get("epsilon")
        # Uploads that overtake each other bring earlier ledgers after later ones.
        if epsilon is None or epsilon < self.spent.get(device, 0.0):
            return
        self.spent[device] = epsilon
        self.spending[0].append(self.now)
        self.spending[1].append(device)
        self.spending[2].append(epsilon)

    def _move(self, device: int, lineage: str) -> None:
        self.homes[device] = lineage
        self.moves.append((self.now, device, lineage))


HANDLERS = {
    "introduction": History._introduction,
    "overdue": History._late,
    "away": History._late,
    "dispatch": History._dispatch,
    "arrival": History._arrival,
    "refusal": History._refusal,
    "drop": History._drop,
    "compensation": History._compensation,
    "judgement": History._judgement,
    "switch": History._switch,
    "retire": History._retire,
    "level": History._level,
    "split": History._turn,
    "merge": History._turn,
    "broadcast": History._turn,
}


class Follower:
    """Reads what is new in events.jsonl; starts anew if a resumed run has cut it back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.history = History()
        self.lags = False  # whether more was there than could be taken in at once
        self._at = 0
        self._before = b""

    def catch_up(self, most: int = 1 << 62) -> bool:
        """Take in at most so many new bytes, whole lines only; tells whether there were any."""
        try:
            with self.path.open("rb") as file:
                if not self._is_where_we_were(file):
                    self.history, self._at, self._before = History(), 0, b""
                file.seek(self._at)
                there = max(0, self.path.stat().st_size - self._at)
                new = file.read(min(most, there))
            new = new[: new.rfind(b"\n") + 1]
            self.history.feed(new.splitlines())
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise BadInput(f"{self.path}: cannot be read: {error}") from error
        self.lags = there > most
        self._at += len(new)
        self._before = (self._before + new)[-OVERLAP:]
        return bool(new)

    def _is_where_we_were(self, file: Any) -> bool:
        file.seek(self._at - len(self._before))
        return bool(file.read(len(self._before)) == self._before)


def read_history(path: Path) -> History:
    """The whole log; a line that a running run has not written to its end is left out."""
    follower = Follower(path)
    while follower.catch_up(1 << 24):
        pass
    return follower.history
