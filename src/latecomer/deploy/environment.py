"""Where Flower's commands are, and the environment they run in."""

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
    """Of the Flower that is installed; BadInput if there is none."""
    try:
        return version("flwr")
    except PackageNotFoundError:
        raise BadInput("`latecomer deploy` needs Flower: pip install 'latecomer[flower]'") from None


def flower_command(name: str) -> str:
    """The path of one of Flower's commands: beside this Python, else wherever PATH says."""
    flower_version()
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise BadInput(f"the command '{name}' of Flower is not on PATH")
    return found


def flower_environment(own: Mapping[str, str]) -> dict[str, str]:
    """The environment of this process, offline, with `own` added.

    Flower starts its other commands by name: PATH begins with the folder where they are.
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return {**os.environ, **OFFLINE, "PATH": path, "PYTHONUNBUFFERED": "1", **own}
