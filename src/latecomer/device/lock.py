"""An exclusive lock on the folder of a run or of a device: one process at a time writes to it."""

import os
import time
from pathlib import Path

from latecomer.errors import BadInput

POLL_SECONDS = 0.02


class FolderLock:
    """An flock on the folder itself, held until `close` or the end of the process.

    BadInput if another process still holds it after `wait` seconds. Without effect (`held` is
    False) where folders cannot be locked: some network drives, Windows.
    """

    def __init__(self, folder: Path, what: str = "run", wait: float = 0.0) -> None:
        self._descriptor: int | None = None
        try:
            import fcntl
        except ImportError:
            return
        descriptor, end = os.open(folder, os.O_RDONLY), time.monotonic() + wait
        while self._descriptor is None:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= end:
                    os.close(descriptor)
                    raise BadInput(f"{folder}: another process is using this {what}") from None
                time.sleep(POLL_SECONDS)
            except OSError:
                os.close(descriptor)
                return
            else:
                self._descriptor = descriptor

    @property
    def held(self) -> bool:
        return self._descriptor is not None

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> "FolderLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
