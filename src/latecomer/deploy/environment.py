"""Paths of Flower's commands, and the environment variables that they run with."""

import os
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from latecomer.errors import BadInput

# By default Flower sends usage figures, looks for a newer version of itself, and installs an app's
# dependencies for every run.
OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def flower_version() -> str:
    """The version of the installed Flower; BadInput if there is none."""
    try:
        return version("flwr")
    except PackageNotFoundError:
        raise BadInput("`latecomer deploy` needs Flower: pip install 'latecomer[flower]'") from None


def flower_command(name: str) -> str:
    """The path of a command of Flower: beside this Python, else from PATH."""
    flower_version()
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise BadInput(f"the command '{name}' of Flower is not on PATH")
    return found


def flower_environment(own: Mapping[str, str]) -> dict[str, str]:
    """The environment of this process, with Flower offline and `own` added.

    PATH begins with the folder of Flower's commands, because Flower starts them by name.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {**os.environ, **OFFLINE, "PATH": path, "PYTHONUNBUFFERED": "1", **own}
