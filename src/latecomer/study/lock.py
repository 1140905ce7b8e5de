"""One process at a time works on the folder of a run."""

import os
from pathlib import Path
from types import TracebackType

from latecomer.errors import BadInput


class FolderLock:
    """Held until it is closed or the process ends, however it ends; there is no file to tidy up.

    Where folders cannot be locked (some network drives, Windows), nothing is held.
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
            raise BadInput(f"{folder}: another process is at work on this run") from None
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
