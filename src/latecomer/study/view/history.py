"""Collects the events of events.jsonl into columns and totals; can follow a growing file."""

import json
from array import array
from collections.abc import Iterable
from enum import IntEnum
from math import nan
from pathlib import Path
from typing import Any

from latecomer.errors import BadInput

OVERLAP = 256  # bytes before the read position, compared to detect a truncated and rewritten file


class End(IntEnum):
    """How a task ended."""

    ARRIVED = 0
    REFUSED = 1
    LOST = 2


class Tasks:
    """The tasks that have ended, as columns; times in virtual seconds."""

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
    """Tasks, traffic, staleness, clusters, compensation and privacy of a run, from its events."""

    def __init__(self) -> None:
        self.now = 0.0
        self.tasks = Tasks()
        self.open: dict[int, tuple[int, float]] = {}  # task -> device, time sent
        self.devices: set[int] = set()
        self.down = (array("d"), array("q"))  # time, bytes
        self.up = (array("d"), array("q"))
        self.weight_by_staleness = (array("q"), array("d"))  # of each update: staleness, weight
        self.weights: dict[int, float] = {}  # device -> sum of the weights of its updates
        self.staleness: dict[int, int] = {}  # staleness -> number of updates
        self.last_staleness: dict[int, int] = {}  # by device
        self.updates: dict[int, int] = {}  # by device
        self.cluster_of: dict[int, str] = {}  # device -> lineage
        self.moves: list[tuple[float, int, str]] = []  # time, device, its new lineage
        self.cluster_events: list[dict[str, Any]] = []  # splits, merges and broadcasts
        self.compensations: list[dict[str, Any]] = []
        self.validations: list[dict[str, Any]] = []
        self.switch_offs: list[dict[str, Any]] = []
        self.spent: dict[int, float] = {}  # device -> epsilon
        self.spending = (array("d"), array("q"), array("d"))  # time, device, epsilon
        self.retired: set[int] = set()  # devices whose privacy budget is spent
        self.widths: dict[int, float] = {}
        self.names: dict[int, str] = {}  # of deployed devices
        self.overdue: set[int] = set()  # deployed devices whose reply is overdue
        self.lost: set[int] = set()  # devices whose last task was lost
        self.quarantined: set[int] = set()  # devices that got no task since their last refusals
        self.rollbacks = 0
        self.commits = 0
        self.failures = 0  # refused updates and failed tasks
        self.failure = ""  # device and reason of the last one

    def feed(self, lines: Iterable[bytes]) -> None:
        """Takes whole lines of events.jsonl, in order; may be called again with later lines."""
        for line in lines:
            self.take(json.loads(line))

    def take(self, event: dict[str, Any]) -> None:
        """Takes one event."""
        self.now = event["time"]
        match event["event"]:
            case "dispatch":
                self._dispatch(event)
            case "arrival":
                self._arrival(event)
            case "quarantine":
                self.quarantined.add(event["device"])
            case "rollback":
                self.rollbacks += 1
                self.failure = f"the model was rolled back: {event['reason']}"
                self.quarantined.clear()
            case "commit":
                self.commits = max(self.commits, event["version"])
            case "introduction":
                self._introduction(event)
            case "overdue" | "away":
                self.overdue.add(event["device"])
            case "refusal":
                self._refusal(event)
            case "drop":
                self._drop(event)
            case "compensation":
                self._weight(event)
                self.compensations.append(event)
            case "validation":
                self.validations.append(event)
            case "switch":
                self.switch_offs.append(event)
            case "retire":
                self.retired.add(event["device"])
                self._spend(event)
            case "level":
                self.widths[event["device"]] = event["width"]
            case "split" | "merge" | "broadcast":
                self._cluster_event(event)

    def _dispatch(self, event: dict[str, Any]) -> None:
        device = event["device"]
        self.devices.add(device)
        self.lost.discard(device)
        self.quarantined.discard(device)
        self.overdue.discard(device)
        self.open[event["task"]] = (device, self.now)
        self.down[0].append(self.now)
        self.down[1].append(event["bytes"])
        # A device that is offered several models chooses one; its reply names the cluster.
        if not event.get("offers") and self.cluster_of.get(device) != event["lineage"]:
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
        if lineage is not None and self.cluster_of.get(device) != lineage:
            self._move(device, lineage)

    def _introduction(self, event: dict[str, Any]) -> None:
        self.devices.add(event["device"])
        self.names[event["device"]] = str(event["name"])
        if event["width"] < 1:
            self.widths[event["device"]] = event["width"]

    def _fail(self, event: dict[str, Any]) -> None:
        device: Any = event.get("device", event.get("node"))
        self.failures += 1
        self.failure = f"{self.names.get(device, device)}: {event.get('reason', '')}"

    def _refusal(self, event: dict[str, Any]) -> None:
        self._fail(event)
        if event.get("device") is None or event.get("task") is None:
            return  # from a node without a device number, or a reply to no known task
        self._close(event, End.REFUSED)
        self._upload(event)
        self._spend(event)

    def _drop(self, event: dict[str, Any]) -> None:
        self._fail(event)
        # The task is still open if it was lost; it is closed if the merge rejected its update.
        if event["task"] in self.open:
            self.lost.add(event["device"])
            self._close(event, End.LOST)

    def _cluster_event(self, event: dict[str, Any]) -> None:
        self.cluster_events.append(event)
        if event["event"] == "broadcast" and (size := event.get("bytes")):
            self.down[0].append(self.now)
            self.down[1].append(size)
        if (into := event.get("into")) is None:
            return
        members = [d for d, lineage in self.cluster_of.items() if lineage == event["lineage"]]
        for device in members if event["event"] == "merge" else event.get("devices", ()):
            if self.cluster_of.get(device) != into:
                self._move(device, into)

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
            self.weight_by_staleness[0].append(event["staleness"])
            self.weight_by_staleness[1].append(weight)
            self.weights[event["device"]] = self.weights.get(event["device"], 0.0) + weight

    def _spend(self, event: dict[str, Any]) -> None:
        device, epsilon = event["device"], event.get("epsilon")
        # Uploads can arrive out of order: an earlier, smaller total may come last.
        if epsilon is None or epsilon < self.spent.get(device, 0.0):
            return
        self.spent[device] = epsilon
        self.spending[0].append(self.now)
        self.spending[1].append(device)
        self.spending[2].append(epsilon)

    def _move(self, device: int, lineage: str) -> None:
        self.cluster_of[device] = lineage
        self.moves.append((self.now, device, lineage))


class Follower:
    """Reads what is appended to events.jsonl; reads from the start if a resume truncated it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.history = History()
        self.lags = False  # whether the last call left unread bytes
        self._at = 0
        self._before = b""

    def catch_up(self, max_bytes: int = 1 << 62) -> bool:
        """Reads at most `max_bytes` new bytes, whole lines only; False if there was no new line."""
        try:
            with self.path.open("rb") as file:
                if not self._is_continued(file):
                    self.history, self._at, self._before = History(), 0, b""
                file.seek(self._at)
                there = max(0, self.path.stat().st_size - self._at)
                new = file.read(min(max_bytes, there))
            new = new[: new.rfind(b"\n") + 1]
            self.history.feed(new.splitlines())
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise BadInput(f"{self.path}: cannot be read: {error}") from error
        self.lags = there > max_bytes
        self._at += len(new)
        self._before = (self._before + new)[-OVERLAP:]
        return bool(new)

    def _is_continued(self, file: Any) -> bool:
        file.seek(self._at - len(self._before))
        return bool(file.read(len(self._before)) == self._before)


def read_history(path: Path) -> History:
    """The whole log; an incomplete last line is left out."""
    follower = Follower(path)
    while follower.catch_up(1 << 24):
        pass
    return follower.history
