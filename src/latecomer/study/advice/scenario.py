"""Facts about an experiment before it runs: data, fleet, lateness, privacy; nothing is trained."""

from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latecomer.core.strategy import Strategy
from latecomer.device.ledger import composed_epsilon
from latecomer.fleet.profile import Windows
from latecomer.study.advice.dry_run import Arrivals, dry_run, loads_of
from latecomer.study.advice.facts import Budget, Scenario
from latecomer.study.experiment import Experiment

# Without `fleet.late`, stragglers are the devices whose updates are at least this many times as old
# as the median device's.
STRAGGLER_RATIO = 3.0
# Share of a class that stragglers must hold for it to count as theirs. docs/studies/feddc.md,
# heterogeneity: at alpha 1 they hold up to 0.79 of it (seeds 1 to 3), at alpha 0.1 0.90 to 0.92.
STRAGGLER_CLASS_SHARE = 0.8
DRAWS = 32  # random devices of each size, for the label skew of a random partition


def profile(experiment: Experiment) -> Scenario:
    """The facts of a scenario, from its data and a dry run of its fleet."""
    fleet, federation, config = experiment.fleet, experiment.federation, experiment.config
    counts = federation.class_counts().numpy()
    devices = np.flatnonzero(counts.sum(1))
    arrivals = dry_run(experiment)
    ages = _Ages(arrivals, devices, experiment.epoch_seconds)
    stragglers = ages.stragglers(sorted(set(fleet.late) & set(devices.tolist())))
    seconds, transfer = _task_times(experiment, devices)
    share, tasks = _covered_share(experiment, arrivals), len(arrivals.device) + arrivals.lost
    profiles = [fleet.devices[d] for d in devices]
    merging = config.server.merge_seconds * len(arrivals.device)
    return Scenario(
        devices=len(devices),
        examples=float(np.median(counts[devices].sum(1))),
        epochs=ages.epochs / share,
        dry_updates=len(arrivals.device),
        skew=label_skew(counts),
        concept_shift=config.data.drift.renames,
        drift=config.data.drift.kind,
        speed_ratio=_ratio(seconds),
        transfer=float(np.median(transfer)),
        update_bytes=4 * experiment.model.layout.size,
        offline=float(np.mean([offline_share(p.windows, p.period) for p in profiles])),
        without_update=float(np.mean(ages.updates[devices] == 0)),
        lost=arrivals.lost / tasks if tasks else 0.0,
        late=len(fleet.late),
        busy=any(how.kind == "busy" for how in fleet.late.values()),
        stragglers=len(stragglers),
        age=ages.mean(devices.tolist()),
        straggler_age=ages.mean(stragglers),
        first_update_after=ages.first_update_after(stragglers) * share,
        straggler_share=float(counts[stragglers].sum() / counts.sum()),
        straggler_classes=_straggler_classes(counts, stragglers, federation.class_names),
        server_load=merging / max(arrivals.seconds, 1e-9),
        budget=_budget(experiment, ages.updates[devices] / share),
    )


def label_skew(counts: NDArray[np.integer[Any]]) -> float:
    """Mean total-variation distance between the devices' label distributions and the overall one.

    Scaled so that 0 is the distance of a random partition with the same sizes, and 1 that of
    devices with one class each.
    """
    held = counts[counts.sum(1) > 0].astype(float)
    overall, sizes = held.sum(0) / held.sum(), held.sum(1)
    rng = np.random.default_rng(0)
    chance = {
        n: _distance(rng.multinomial(int(n), overall, DRAWS) / n, overall) for n in set(sizes)
    }
    by_chance = float(np.mean([chance[n] for n in sizes]))
    largest = 1 - float((overall**2).sum())
    if largest <= by_chance:
        return 0.0
    found = _distance(held / sizes[:, None], overall)
    return float(np.clip((found - by_chance) / (largest - by_chance), 0, 1))


def _distance(shares: NDArray[np.floating[Any]], overall: NDArray[np.floating[Any]]) -> float:
    return float(0.5 * np.abs(shares - overall).sum(1).mean())


class _Ages:
    """Number of updates of each device in a dry run, and their ages in epochs."""

    def __init__(self, arrivals: Arrivals, devices: NDArray[np.int64], epoch: float) -> None:
        self.arrivals, self.devices = arrivals, devices
        size = int(devices.max()) + 1
        self.epochs = arrivals.seconds / epoch if epoch else 0.0
        self.updates = np.bincount(arrivals.device, minlength=size).astype(float)
        age = (arrivals.arrived - arrivals.sent) / epoch if epoch else 0 * arrivals.arrived
        self._sum = np.bincount(arrivals.device, age, size)

    def stragglers(self, late: list[int]) -> list[int]:
        """The late devices; without any, those without updates or with far older ones."""
        if late:
            return late
        updates = self.updates[self.devices]
        age = self._sum[self.devices] / np.maximum(updates, 1)
        usual = float(np.median(age[updates > 0])) if updates.any() else inf
        far = (updates == 0) | ((age >= STRAGGLER_RATIO * usual) & (age > 0))
        return [int(device) for device in self.devices[far]]

    def mean(self, devices: Sequence[int]) -> float:
        """Mean age in epochs; the length of the dry run if these devices sent no update."""
        chosen = np.array(devices, dtype=np.int64)
        if not len(chosen):
            return 0.0
        updates = self.updates[chosen].sum()
        return float(self._sum[chosen].sum() / updates) if updates else self.epochs

    def first_update_after(self, devices: list[int]) -> float:
        """The share of the dry run until 90% of these devices have sent an update."""
        active, first = np.unique(self.arrivals.device, return_index=True)
        times = self.arrivals.arrived[first][np.isin(active, devices)]
        seconds = self.arrivals.seconds
        return float(np.quantile(times, 0.9) / seconds) if len(times) and seconds else 0.0


def _covered_share(experiment: Experiment, arrivals: Arrivals) -> float:
    """The share of the run that the dry run covers."""
    bounds = experiment.bounds(Strategy(name="dry-run"))
    done = [len(arrivals.device) / bounds.updates] if bounds.updates else []
    if bounds.virtual_seconds:
        done.append(arrivals.seconds / bounds.virtual_seconds)
    return min(1.0, max([*done, 1e-6])) if done else 1.0


def _task_times(
    experiment: Experiment, devices: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Nominal seconds of a task on each device, and the share of transfer in them."""
    links, compute, loads = [], [], loads_of(experiment)
    for device in devices:
        profile, load = experiment.fleet.devices[device], loads[device]
        links.append(profile.download_seconds(load.size) + profile.upload_seconds(load.size))
        compute.append(profile.compute_seconds(load.passes))
    seconds = np.array(links) + np.array(compute)
    return seconds, np.array(links) / np.where(seconds > 0, seconds, 1)


def _ratio(seconds: NDArray[np.float64]) -> float:
    low, high = np.quantile(seconds, [0.1, 0.9], method="nearest")
    return float(high / low) if low else inf if high else 1.0


def offline_share(windows: Windows, period: float) -> float:
    """The share of time that a device with these availability windows is offline."""
    if not windows:
        return 0.0
    return max(0.0, 1 - sum(end - start for start, end in windows) / period)


def _straggler_classes(
    counts: NDArray[np.integer[Any]], stragglers: list[int], names: tuple[str, ...]
) -> dict[str, float]:
    """Class -> share that stragglers hold, from STRAGGLER_CLASS_SHARE; empty if they hold most
    examples."""
    held, total = counts[stragglers].sum(0), counts.sum(0)
    if held.sum() > total.sum() / 2:
        return {}
    shares = zip(names, held / np.maximum(total, 1), strict=False)  # no names: not classes
    return {name: round(float(s), 3) for name, s in shares if s >= STRAGGLER_CLASS_SHARE}


def _budget(experiment: Experiment, tasks: NDArray[np.float64]) -> Budget | None:
    """Privacy accounting of a device with the median number of examples; None if not private."""
    settings, spec = experiment.config.privacy, experiment.spec
    sizes = [len(c.train.y) for c in experiment.federation.clients if len(c.train.y)]
    examples = int(np.median(sizes))
    privacy = experiment.privacy(examples)
    if privacy is None:
        return None
    release, per_task = privacy.release(examples, spec), privacy.releases(examples, spec)

    def after(number: float) -> float:
        count = max(1, round(number)) * per_task
        return composed_epsilon(((release, count),), privacy.delta, privacy.accountant)

    mean, largest = float(tasks.mean()), float(tasks.max())
    whole_run = settings.mode == "whole-run"
    return Budget(whole_run, privacy.budget, after(mean), after(largest), mean, largest)
