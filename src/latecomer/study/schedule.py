"""Schedules of the learning rate over the versions of the model."""

import math
from collections.abc import Callable

from latecomer.errors import BadInput
from latecomer.loading import first_line, load_callable
from latecomer.study.config import TrainingConfig

Schedule = Callable[[int], float]  # version of the model -> factor on the learning rate


def make_schedule(settings: TrainingConfig) -> Schedule | None:
    """The schedule of the config; None for a constant learning rate.

    step: `schedule_factor` ** (version // `schedule_versions`). cosine: from 1 to `schedule_factor`
    along half a cosine over `schedule_versions`, constant after it.
    """
    name, factor, versions = settings.schedule, settings.schedule_factor, settings.schedule_versions
    if name == "constant":
        return None
    if name == "step":
        return lambda version: float(factor ** (version // max(1, versions)))
    if name == "cosine":

        def cosine(version: int) -> float:
            share = min(1.0, version / max(1, versions))
            return factor + (1 - factor) * (1 + math.cos(math.pi * share)) / 2

        return cosine
    own = load_callable(name, "training.schedule")

    def checked(version: int) -> float:
        try:
            found = float(own(version))
        except Exception as error:
            raise BadInput(
                f"training.schedule = {name!r}: calling it with version {version} failed:"
                f" {first_line(error)}"
            ) from error
        if not (math.isfinite(found) and found >= 0):
            raise BadInput(
                f"training.schedule = {name!r}: gave {found} for version {version}; allowed is a"
                " factor on the learning rate, 0 or more"
            )
        return found

    checked(0)
    return checked
