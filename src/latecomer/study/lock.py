"""An exclusive lock on the folder of a run, so that one process at a time writes to it."""

import os
from pathlib import Path

from latecomer.errors import BadInput


class FolderLock:
    """An flock on the folder itself, held until `close` or the end of the process.

    BadInput if another process holds it. Without effect where folders cannot be locked (some
    network drives, Windows).
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor: int | None = None
        try:
            import fcntl
        except ImportError:
            return
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise BadInput(f"{folder}: another process is using this run") from None
        except OSError:
            os.close(descriptor)
            return
        self._descriptor = descriptor

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
