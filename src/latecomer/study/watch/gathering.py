"""Follows runs that somebody looks at, and makes their documents, at little cost to the runs."""

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from latecomer.errors import BadInput
from latecomer.study.results import Result
from latecomer.study.view.history import Follower
from latecomer.study.view.run_document import run_document
from latecomer.study.watch.folders import runs_in

EVERY_SECONDS = 1.0
DUTY = 0.04  # at most this part of one core is spent on documents, at the lowest priority
MOST_BYTES = 4 << 20  # of a log, before others have their turn
MOST_SPANS = 20_000  # of a timeline that is sent anew every second
SILENT_SECONDS = 60.0  # after which a run that is not finished does not count as running
SCAN_SECONDS = 2.0


class Followed:
    """One run: what has been read of it, and its last document as JSON."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.document = ""
        self.version = 0
        self._log = Follower(folder / "events.jsonl")
        self._seen: tuple[Any, ...] = ()
        self._behind = False
        self._not_before = 0.0

    def state(self) -> str:
        """finished, running or unfinished, by its files."""
        if (self.folder / "summary.json").is_file():
            return "finished"
        moments = [p.stat().st_mtime for p in self._files() if p.is_file()]
        recent = moments and time.time() - max(moments) < SILENT_SECONDS
        return "running" if recent else "unfinished"

    def refresh(self) -> None:
        """Make a new document if there is something new and the last one was not just made."""
        if time.monotonic() < self._not_before:
            return
        marks = tuple(_mark(path) for path in self._files())
        if marks == self._seen and not self._behind:
            return
        begun = time.thread_time()
        try:
            self._log.catch_up(MOST_BYTES)
            self._behind = self._log.lags
            found = run_document(Result(self.folder), self._log.history, MOST_SPANS).to_json()
        except BadInput as error:
            # A run that has just begun has no metrics yet; a row may be in mid-writing.
            self._not_before = time.monotonic() + EVERY_SECONDS
            if not self.document:
                self._publish({"waiting": str(error)})
            return
        self._seen = marks
        self._publish(found)
        cost = time.thread_time() - begun
        self._not_before = time.monotonic() + max(EVERY_SECONDS, cost / DUTY)

    def _publish(self, found: dict[str, Any]) -> None:
        self.document = json.dumps(found, separators=(",", ":"), allow_nan=False)
        self.version += 1

    def _files(self) -> list[Path]:
        names = ("metrics.csv", "events.jsonl", "summary.json", "devices.csv")
        return [self.folder / name for name in names]


class Gatherer:
    """A thread of low priority that follows what is wanted."""

    def __init__(
        self, root: Path, told: Callable[[Path], str | None] = lambda folder: None
    ) -> None:
        """`told` gives the state of a run that is known better than its files tell."""
        self.root = root
        self._told = told
        self._runs: dict[str, Followed] = {}
        self._wanted: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._scanned = float("-inf")
        self.scan()
        self._thread = threading.Thread(target=self._work, name="gatherer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()

    def scan(self) -> None:
        """Look for new runs, not more often than every other second."""
        if time.monotonic() - self._scanned < SCAN_SECONDS:
            return
        self._scanned = time.monotonic()
        found = runs_in(self.root)
        with self._lock:
            for name, folder in found.items():
                if name not in self._runs:
                    self._runs[name] = Followed(name, folder)
            for name in set(self._runs) - set(found):
                del self._runs[name]

    def states(self) -> list[dict[str, str]]:
        self.scan()
        with self._lock:
            runs = list(self._runs.values())
        return [{"name": run.name, "state": self._told(run.folder) or run.state()} for run in runs]

    def folder(self, name: str) -> Path | None:
        with self._lock:
            run = self._runs.get(name)
        return run.folder if run else None

    def want(self, names: Iterable[str], by: int = 1) -> None:
        """Somebody looks at these runs, or with -1 no longer does."""
        with self._lock:
            self._wanted.update(dict.fromkeys(names, by))

    def document(self, name: str) -> tuple[int, str]:
        """The number of the last document of a run, and its JSON; 0 if there is none."""
        with self._lock:
            run = self._runs.get(name)
        return (run.version, run.document) if run else (0, "")

    def _work(self) -> None:
        _be_modest()
        while not self._ended.wait(0.25):
            with self._lock:
                looked_at = [
                    run for name, run in self._runs.items() if self._wanted.get(name, 0) > 0
                ]
            for run in looked_at:
                run.refresh()


def _mark(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _be_modest() -> None:
    """This thread steps back for whoever computes. Only Linux has priorities of threads."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    except (AttributeError, OSError):
        return
