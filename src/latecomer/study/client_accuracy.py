"""Local test scores summarised over devices: mean, worst device, mean of the late devices."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from latecomer.study.metrics import Scores


@dataclass(frozen=True)
class OverDevices:
    """Unweighted mean and minimum of one score over devices; None if there is no device."""

    mean: float | None
    worst: float | None


@dataclass(frozen=True)
class ClientAccuracy:
    """Local test accuracy over devices (each device counts once), and two other local scores.

    `late_mean` is the mean over the late devices, `worst_device` the first device of the lowest
    accuracy, `each` the accuracy by device. None where there is no device to measure.
    """

    mean: float | None
    worst: float | None
    late_mean: float | None
    balanced: OverDevices
    macro_f1: OverDevices
    worst_device: int | None
    each: Mapping[int, float]


def over_devices(found: Mapping[int, Scores], late: Collection[int]) -> ClientAccuracy:
    """Summarise the local test scores of the measured devices."""
    accuracy = {device: each.accuracy for device, each in found.items()}
    return ClientAccuracy(
        mean=_mean(list(accuracy.values())),
        worst=min(accuracy.values(), default=None),
        late_mean=_mean([accuracy[device] for device in late if device in accuracy]),
        balanced=_over([each.balanced_accuracy for each in found.values()]),
        macro_f1=_over([each.macro_f1 for each in found.values()]),
        worst_device=min(accuracy, key=lambda device: accuracy[device], default=None),
        each=accuracy,
    )


def _over(values: Sequence[float]) -> OverDevices:
    return OverDevices(_mean(values), min(values, default=None))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
