"""Builds the documents of the runs shown on the live page, in a thread of low priority."""

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from latecomer.errors import BadInput
from latecomer.study.results import Result
from latecomer.study.view.history import Follower
from latecomer.study.view.panels import to_json
from latecomer.study.view.run_document import run_document
from latecomer.study.watch.folders import runs_in

EVERY_SECONDS = 1.0
DUTY = 0.04  # largest share of one core that building documents may use
MAX_BYTES_PER_READ = 4 << 20  # of one log, before the next run is refreshed
MAX_SPANS = 20_000  # of a timeline; it is sent again with every document
SILENT_SECONDS = 60.0  # without a written file, after which an unfinished run is not running
SCAN_SECONDS = 2.0


class FollowedRun:
    """One run: its log as far as it was read, and its last document as JSON."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.document = ""
        self.version = 0
        self._log = Follower(folder / "events.jsonl")
        self._seen: tuple[Any, ...] = ()
        self._behind = False
        self._not_before = 0.0

    def state(self) -> str:
        """finished, running or unfinished, from the files and their times."""
        if (self.folder / "summary.json").is_file():
            return "finished"
        moments = [p.stat().st_mtime for p in self._files() if p.is_file()]
        recent = moments and time.time() - max(moments) < SILENT_SECONDS
        return "running" if recent else "unfinished"

    def refresh(self) -> None:
        """Builds a new document if files have changed, at most every EVERY_SECONDS."""
        if time.monotonic() < self._not_before:
            return
        stamps = tuple(_stamp(path) for path in self._files())
        if stamps == self._seen and not self._behind:
            return
        begun = time.thread_time()
        try:
            self._log.catch_up(MAX_BYTES_PER_READ)
            self._behind = self._log.lags
            found = run_document(Result(self.folder), self._log.history, MAX_SPANS)
        except BadInput as error:
            # A new run has no metrics yet, or a row is incomplete.
            self._not_before = time.monotonic() + EVERY_SECONDS
            if not self.document:
                self._publish({"waiting": str(error)})
            return
        self._seen = stamps
        self._publish(to_json(found))
        cost = time.thread_time() - begun
        self._not_before = time.monotonic() + max(EVERY_SECONDS, cost / DUTY)

    def _publish(self, found: dict[str, Any]) -> None:
        self.document = json.dumps(found, separators=(",", ":"), allow_nan=False)
        self.version += 1

    def _files(self) -> list[Path]:
        names = ("metrics.csv", "events.jsonl", "summary.json", "devices.csv")
        return [self.folder / name for name in names]


class RunDocuments:
    """Lists the runs of a folder and keeps the documents of those with viewers up to date."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._runs: dict[str, FollowedRun] = {}
        self.viewers: Counter[str] = Counter()  # run -> streams that show it
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._scanned = float("-inf")
        self.scan()
        self._thread = threading.Thread(target=self._work, name="run documents", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()

    def scan(self) -> None:
        """Looks for new and removed runs, at most every SCAN_SECONDS."""
        if time.monotonic() - self._scanned < SCAN_SECONDS:
            return
        self._scanned = time.monotonic()
        found = runs_in(self.root)
        with self._lock:
            for name, folder in found.items():
                if name not in self._runs:
                    self._runs[name] = FollowedRun(name, folder)
            for name in set(self._runs) - set(found):
                del self._runs[name]

    def runs(self) -> list[FollowedRun]:
        self.scan()
        with self._lock:
            return list(self._runs.values())

    def folder(self, name: str) -> Path | None:
        with self._lock:
            run = self._runs.get(name)
        return run.folder if run else None

    def add_viewers(self, names: Iterable[str], by: int = 1) -> None:
        """Adds `by` to the number of streams that show each of these runs."""
        with self._lock:
            self.viewers.update(dict.fromkeys(names, by))

    def document(self, name: str) -> tuple[int, str]:
        """Version number and JSON of the last document of a run; (0, "") if there is none."""
        with self._lock:
            run = self._runs.get(name)
        return (run.version, run.document) if run else (0, "")

    def _work(self) -> None:
        _lower_priority()
        while not self._ended.wait(0.25):
            with self._lock:
                viewed = [run for name, run in self._runs.items() if self.viewers[name] > 0]
            for run in viewed:
                run.refresh()


def _stamp(path: Path) -> tuple[int, int] | None:
    """Size and modification time; None without the file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _lower_priority() -> None:
    """Gives this thread the lowest priority, which only Linux supports."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    except (AttributeError, OSError):
        return
