"""The file in a federation's folder that tells other terminals which processes are its own."""

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from latecomer.deploy.processes import Process, process
from latecomer.errors import BadInput

SUPERVISOR = "supervisor"


class PidFile:
    """Names and processes, rewritten in one step whenever one of them changes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self.is_ours = False

    def read(self) -> dict[str, Process]:
        """What is written there, alive or not; nothing if the file is missing or damaged."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            return {str(k): Process(int(pid), str(began)) for k, (pid, began) in found.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def alive(self) -> dict[str, Process]:
        """Those that are the very processes that were written down."""
        return {name: one for name, one in self.read().items() if one.is_alive()}

    def claim(self) -> None:
        """This process supervises the federation from now on; BadInput if another one does."""
        if other := {name: one for name, one in self.alive().items() if one.pid != os.getpid()}:
            pids = ", ".join(f"{name} {one.pid}" for name, one in other.items())
            raise BadInput(
                f"{self.path.parent}: a federation runs there ({pids}); "
                f"end it with `latecomer deploy down --dir {self.path.parent}`"
            )
        self.is_ours = True
        self.write({})

    def write(self, processes: Mapping[str, Process]) -> None:
        """The processes of the federation, beside this one."""
        with self._lock:
            if not self.is_ours:
                return
            me = process(os.getpid())
            known = {**({SUPERVISOR: me} if me else {}), **processes}
            text = json.dumps({name: [one.pid, one.began] for name, one in known.items()}, indent=1)
            new = self.path.with_name(self.path.name + ".new")
            new.write_text(text + "\n", encoding="utf-8")
            new.replace(self.path)

    def release(self) -> None:
        """Nothing runs any more."""
        with self._lock:
            if self.is_ours:
                self.is_ours = False
                self.path.unlink(missing_ok=True)
