"""Progress of a deployed run, read from the files that its server writes."""

import csv
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Progress:
    """Counts and accuracy of a run so far, from its event log and metrics."""

    updates: int = 0
    versions: int = 0
    accuracy: float | None = None
    lost: int = 0  # refused updates and failed tasks
    reason: str = ""  # of the last loss
    staleness: Counter[int] = field(default_factory=Counter)
    by_device: Counter[str] = field(default_factory=Counter)  # updates

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
    """Reads events.jsonl and metrics.csv of a run; each event is read once."""

    def __init__(self, folder: Path) -> None:
        self.events, self.metrics = folder / "events.jsonl", folder / "metrics.csv"
        self._reset()

    def read(self) -> Progress:
        try:
            if self.events.stat().st_size < self._read:
                self._reset()  # a resumed run has truncated the log
            with self.events.open("rb") as file:
                file.seek(self._read)
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # still being written
                    self._read += len(line)
                    self._add(line)
        except FileNotFoundError:
            pass
        self.progress.accuracy = self._accuracy()
        return self.progress

    def _reset(self) -> None:
        self._read, self._names = 0, dict[int, str]()
        self.progress = Progress()

    def _add(self, line: bytes) -> None:
        try:
            event = json.loads(line)
        except ValueError:
            return
        progress, device = self.progress, event.get("device")
        match event.get("event"):
            case "introduction":
                self._names[device] = str(event.get("name", device))
            case "arrival":
                progress.updates += 1
                progress.staleness[int(event.get("staleness") or 0)] += 1
                progress.by_device[self._names.get(device, str(device))] += 1
            case "commit":
                progress.versions = max(progress.versions, int(event.get("version", 0)))
            case "drop" | "refusal":
                progress.lost += 1
                name = self._names.get(device, str(device))
                progress.reason = f"{name}: {event.get('reason', 'no reason given')}"

    def _accuracy(self) -> float | None:
        try:
            with self.metrics.open(encoding="utf-8", newline="") as file:
                last = [row.get("accuracy") for row in csv.DictReader(file)][-1:]
            return float(last[0] or "") if last else None
        except (OSError, ValueError):
            return None
