"""Environment of commands of Flower in tests, and the processes that they leave running."""

from pathlib import Path

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}


def of_our_own(home):
    """The processes that were started with this FLWR_HOME; none where there is no /proc."""
    mark = f"FLWR_HOME={home}".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes().split(b"\0"):
                yield int(process.name)
        except OSError:
            continue
