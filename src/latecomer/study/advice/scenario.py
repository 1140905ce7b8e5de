"""Facts about an experiment before it runs: data, fleet, lateness, privacy; nothing is trained."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latecomer.core.strategy import Strategy
from latecomer.device.ledger import composed_epsilon
from latecomer.fleet.profile import Windows
from latecomer.study.advice.dry_run import Arrivals, Load, dry_run, loads_of
from latecomer.study.advice.facts import Budget, Scenario
from latecomer.study.experiment import Experiment

# Without `fleet.late`, stragglers are the devices whose updates are at least STRAGGLER_RATIO times
# as stale as the median device's and at least STRAGGLER_PASSES fleet passes. docs/strategies.md:
# three of four updates for which compensation paid came from the slowest of the four speeds.
STRAGGLER_RATIO = 3.0
STRAGGLER_PASSES = 2.0
# Share of a class that stragglers must hold for it to count as theirs. docs/studies/feddc.md,
# heterogeneity: at alpha 1 they hold up to 0.79 of it (seeds 1 to 3) and lateness costs nothing; at
# alpha 0.1 they hold 0.90 to 0.92, and an eighth of its accuracy is lost.
STRAGGLER_CLASS_SHARE = 0.8
DRAWS = 32  # random devices of each size, for the label skew of a random partition


def profile(experiment: Experiment) -> Scenario:
    """The facts of a scenario, from its data and a dry run of its fleet."""
    fleet, federation = experiment.fleet, experiment.federation
    counts = federation.class_counts().numpy()
    devices = np.flatnonzero(counts.sum(1))
    loads = loads_of(experiment)
    arrivals = dry_run(experiment)
    stats = _ArrivalStats(arrivals, devices, experiment.epoch_seconds)
    stragglers = stats.stragglers(sorted(set(fleet.late) & set(devices.tolist())))
    seconds, transfer = _task_times(experiment, loads, devices)
    share = _covered_share(experiment, arrivals)
    drift, profiles = experiment.config.data.drift, [fleet.devices[d] for d in devices]
    tasks = len(arrivals.device) + arrivals.lost
    return Scenario(
        devices=len(devices),
        examples=float(np.median(counts[devices].sum(1))),
        epochs=stats.epochs / share,
        skew=label_skew(counts),
        concept_shift=drift.renames,
        drift=drift.kind,
        speed_ratio=_ratio(seconds),
        jitter=float(np.median([p.jitter for p in profiles])),
        transfer=float(np.median(transfer)),
        update_bytes=4 * experiment.model.layout.size,
        narrow=float(np.mean([loads[d].width < 1 for d in devices])),
        offline=float(np.mean([offline_share(p.windows, p.period) for p in profiles])),
        without_update=float(np.mean(stats.tasks == 0)),
        lost=arrivals.lost / tasks if tasks else 0.0,
        late=len(fleet.late),
        busy=any(how.kind == "busy" for how in fleet.late.values()),
        stragglers=len(stragglers),
        age=stats.mean_age(devices.tolist()),
        straggler_age=stats.mean_age(stragglers),
        passes=stats.mean_passes(devices.tolist()),
        straggler_passes=stats.mean_passes(stragglers),
        first_update_after=stats.first_update_after(stragglers) * share,
        straggler_share=float(counts[stragglers].sum() / counts.sum()),
        straggler_classes=_straggler_classes(counts, stragglers, federation.class_names),
        server_load=experiment.config.server.merge_seconds
        * len(arrivals.device)
        / max(arrivals.seconds, 1e-9),
        budget=_budget(experiment, stats.tasks / share),
    )


def label_skew(counts: NDArray[np.integer[Any]]) -> float:
    """Mean total-variation distance between the devices' label distributions and the overall one.

    Scaled so that 0 is the distance of a random partition with the same sizes, and 1 that of
    devices with one class each.
    """
    held = counts[counts.sum(1) > 0].astype(float)
    overall = held.sum(0) / held.sum()
    sizes = held.sum(1)
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


class _ArrivalStats:
    """Number and age of the updates of each device in a dry run."""

    def __init__(self, arrivals: Arrivals, devices: NDArray[np.int64], epoch: float) -> None:
        self.arrivals, self.devices = arrivals, devices
        size = int(devices.max()) + 1
        self.epochs = arrivals.seconds / epoch if epoch else 0.0
        self._updates = np.bincount(arrivals.device, minlength=size).astype(float)
        age = (arrivals.arrived - arrivals.sent) / epoch if epoch else 0 * arrivals.arrived
        passes = arrivals.meanwhile() / len(devices)
        self._age = np.bincount(arrivals.device, age, size)
        self._passes = np.bincount(arrivals.device, passes, size)
        self.tasks = self._updates[devices]

    def stragglers(self, late: list[int]) -> list[int]:
        """The late devices; without any, those without updates or with far staler ones."""
        if late:
            return late
        without: list[int] = self.devices[self.tasks == 0].tolist()
        active = self.devices[self.tasks > 0]
        if not len(active):
            return without
        passes = self._passes[active] / self._updates[active]
        limit = max(STRAGGLER_PASSES, STRAGGLER_RATIO * float(np.median(passes)))
        return sorted({*active[passes >= limit].tolist(), *without})

    def mean_age(self, devices: Sequence[int]) -> float:
        """Mean age in epochs; the length of the dry run if these devices sent no update."""
        return self._mean(self._age, devices, self.epochs)

    def mean_passes(self, devices: Sequence[int]) -> float:
        return self._mean(self._passes, devices, len(self.arrivals.device) / len(self.devices))

    def _mean(self, total: NDArray[Any], devices: Sequence[int], without: float) -> float:
        chosen = np.array(devices, dtype=np.int64)
        if not len(chosen):
            return 0.0
        updates = self._updates[chosen].sum()
        return float(total[chosen].sum() / updates) if updates else without

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
    experiment: Experiment, loads: list[Load], devices: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Nominal seconds of a task on each device, and the share of transfer in them."""
    seconds, transfer = [], []
    for device in devices:
        profile, load = experiment.fleet.devices[device], loads[device]
        links = profile.download_seconds(load.size) + profile.upload_seconds(load.size)
        whole = links + profile.compute_seconds(load.passes)
        seconds.append(whole)
        transfer.append(links / whole if whole else 0.0)
    return np.array(seconds), np.array(transfer)


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
    total = counts.sum(0)
    share = counts[stragglers].sum(0) / np.maximum(total, 1)
    if counts[stragglers].sum() > counts.sum() / 2:
        return {}
    return {
        name: round(float(part), 3)
        for name, part, n in zip(names, share, total, strict=True)
        if n and part >= STRAGGLER_CLASS_SHARE
    }


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
    return Budget(
        nominal=settings.epsilon,
        whole_run=settings.mode == "whole-run",
        limit=privacy.budget,
        spent_mean=after(mean),
        spent_max=after(largest),
        allowed=_allowed_tasks(privacy.budget, after, largest),
        planned_mean=mean,
        planned_max=largest,
        poisson=settings.sampling == "poisson",
        full_batches=spec.batch_size >= examples,
    )


def _allowed_tasks(limit: float, after: Callable[[float], float], planned: float) -> float:
    """The number of tasks whose epsilon is within `limit`; inf if all planned tasks are."""
    if not limit or after(planned) <= limit:
        return inf
    low, high = 0, max(1, round(planned))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if after(middle) <= limit else (low, middle)
    return float(low)
