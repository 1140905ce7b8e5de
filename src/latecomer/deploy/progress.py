"""How far a deployed run is, read from the files that its server writes."""

import csv
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Progress:
    """What the files of a run tell so far."""

    updates: int = 0
    versions: int = 0
    accuracy: float | None = None
    lost: int = 0  # refused updates and tasks without an answer
    reason: str = ""  # of the last loss
    staleness: Counter[int] = field(default_factory=Counter)
    by_device: Counter[str] = field(default_factory=Counter)

    def line(self) -> str:
        shown = [f"{self.versions} versions", f"{self.updates} updates"]
        if self.accuracy is not None:
            shown.append(f"accuracy {self.accuracy:.3f}")
        if self.lost:
            shown.append(f"{self.lost} lost")
        return ", ".join(shown)

    def mean_staleness(self) -> float:
        total = sum(self.staleness.values())
        return sum(k * n for k, n in self.staleness.items()) / total if total else 0.0


class RunReader:
    """Reads what has been added to events.jsonl and metrics.csv since the last look."""

    def __init__(self, folder: Path) -> None:
        self.events, self.metrics = folder / "events.jsonl", folder / "metrics.csv"
        self._forget()

    def read(self) -> Progress:
        try:
            if self.events.stat().st_size < self._read:
                self._forget()  # a resumed run has cut the log back
            with self.events.open("rb") as file:
                file.seek(self._read)
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # it is being written
                    self._read += len(line)
                    self._take(line)
        except FileNotFoundError:
            pass
        self.progress.accuracy = self._accuracy()
        return self.progress

    def _forget(self) -> None:
        self._read, self._names = 0, dict[int, str]()
        self.progress = Progress()

    def _take(self, line: bytes) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            return
        told, device = self.progress, event.get("device")
        match event.get("event"):
            case "introduction":
                self._names[device] = str(event.get("name", device))
            case "arrival":
                told.updates += 1
                told.staleness[int(event.get("staleness") or 0)] += 1
                told.by_device[self._names.get(device, str(device))] += 1
            case "commit":
                told.versions = max(told.versions, int(event.get("version", 0)))
            case "drop" | "refusal":
                told.lost += 1
                name = self._names.get(device, str(device))
                told.reason = f"{name}: {event.get('reason', 'no reason given')}"

    def _accuracy(self) -> float | None:
        try:
            with self.metrics.open(encoding="utf-8", newline="") as file:
                last = [row.get("accuracy") for row in csv.DictReader(file)][-1:]
            return float(last[0] or "") if last else None
        except (OSError, ValueError):
            return None
