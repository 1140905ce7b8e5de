"""The file in a federation's folder that lists its processes."""

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from latecomer.deploy.processes import Process, process
from latecomer.errors import BadInput

SUPERVISOR = "supervisor"


class PidFile:
    """Processes by name, written atomically; claimed by at most one supervisor at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self.is_claimed = False  # by this process

    def read(self) -> dict[str, Process]:
        """The listed processes, alive or not; empty if the file is missing or damaged."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            return {str(k): Process(int(pid), str(start)) for k, (pid, start) in found.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def alive(self) -> dict[str, Process]:
        """The listed processes that are alive."""
        return {name: one for name, one in self.read().items() if one.is_alive()}

    def claim(self) -> None:
        """Make this process the supervisor; BadInput if another process is."""
        if other := {name: one for name, one in self.alive().items() if one.pid != os.getpid()}:
            pids = ", ".join(f"{name} {one.pid}" for name, one in other.items())
            raise BadInput(
                f"{self.path.parent}: a federation runs there ({pids}); "
                f"end it with `latecomer deploy down --dir {self.path.parent}`"
            )
        self.is_claimed = True
        self.write({})

    def write(self, processes: Mapping[str, Process]) -> None:
        """Replace the list by this process and `processes`, if this process has claimed it."""
        with self._lock:
            if not self.is_claimed:
                return
            me = process(os.getpid())
            listed = {**({SUPERVISOR: me} if me else {}), **processes}
            text = json.dumps({name: [p.pid, p.started] for name, p in listed.items()}, indent=1)
            new = self.path.with_name(self.path.name + ".new")
            new.write_text(text + "\n", encoding="utf-8")
            new.replace(self.path)

    def release(self) -> None:
        """Remove the file, if this process has claimed it."""
        with self._lock:
            if self.is_claimed:
                self.is_claimed = False
                self.path.unlink(missing_ok=True)
