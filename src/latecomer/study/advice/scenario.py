"""From an experiment that is ready to run to the facts about it; nothing is trained."""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latecomer.core.strategy import Strategy
from latecomer.device.ledger import spent
from latecomer.fleet.profile import Windows
from latecomer.study.advice.facts import Budget, Scenario
from latecomer.study.advice.rehearsal import Arrivals, Load, loads_of, rehearse
from latecomer.study.experiment import Experiment

# Where nobody is named late, those are behind whose updates are so many times as old as the median
# device's, and at least so many turns. docs/strategies.md: three of four updates that were worth a
# repair came from such devices, the slow ones of the four speeds.
FAR_BEHIND = 3.0
TURNS_BEHIND = 2.0
# A class belongs to those behind if they hold so much of it. docs/studies/feddc.md, heterogeneity:
# at alpha 1 they hold up to 0.79 of it (seeds 1 to 3) and nothing is lost by their lateness, at
# alpha 0.1 they hold 0.90 to 0.92, and an eighth of its accuracy is.
BELONGS = 0.8
DRAWS = 32  # random devices that show how far label mixes differ by chance


def profile(experiment: Experiment) -> Scenario:
    """Data, fleet, lateness and budget of one scenario."""
    fleet, federation = experiment.fleet, experiment.federation
    counts = federation.class_counts().numpy()
    devices = np.flatnonzero(counts.sum(1))
    loads = loads_of(experiment)
    arrivals = rehearse(experiment)
    pace = _Pace(arrivals, devices, experiment.epoch_seconds)
    behind = pace.behind(sorted(set(fleet.late) & set(devices.tolist())))
    seconds, transfer = _task_times(experiment, loads, devices)
    share = _rehearsed(experiment, arrivals)
    drift, profiles = experiment.config.data.drift, [fleet.devices[d] for d in devices]
    answered = len(arrivals.device) + arrivals.lost
    return Scenario(
        devices=len(devices),
        examples=float(np.median(counts[devices].sum(1))),
        epochs=pace.epochs / share,
        skew=label_skew(counts),
        contradicts=drift.renames,
        drift=drift.kind,
        speed_ratio=_ratio(seconds),
        jitter=float(np.median([p.jitter for p in profiles])),
        transfer=float(np.median(transfer)),
        update_bytes=4 * experiment.model.layout.size,
        narrow=float(np.mean([loads[d].width < 1 for d in devices])),
        away=float(np.mean([away_share(p.windows, p.period) for p in profiles])),
        unheard=float(np.mean(pace.tasks == 0)),
        lost=arrivals.lost / answered if answered else 0.0,
        late=len(fleet.late),
        busy=any(how.kind == "busy" for how in fleet.late.values()),
        behind=len(behind),
        age=pace.mean_age(devices.tolist()),
        age_behind=pace.mean_age(behind),
        turns=pace.mean_turns(devices.tolist()),
        turns_behind=pace.mean_turns(behind),
        heard_after=pace.heard_after(behind) * share,
        behind_share=float(counts[behind].sum() / counts.sum()),
        tied=_tied(counts, behind, federation.class_names),
        server_load=experiment.config.server.merge_seconds
        * len(arrivals.device)
        / max(arrivals.seconds, 1e-9),
        budget=_budget(experiment, pace.tasks / share),
    )


def label_skew(counts: NDArray[np.integer[Any]]) -> float:
    """How far the devices' label mixes are from that of all, beyond what chance does.

    Mean total-variation distance; 0 is that of devices that draw as many examples at random, 1
    that of devices with one class each.
    """
    held = counts[counts.sum(1) > 0].astype(float)
    overall = held.sum(0) / held.sum()
    sizes = held.sum(1)
    rng = np.random.default_rng(0)
    chance = {
        n: _distance(rng.multinomial(int(n), overall, DRAWS) / n, overall) for n in set(sizes)
    }
    by_chance = float(np.mean([chance[n] for n in sizes]))
    most = 1 - float((overall**2).sum())
    if most <= by_chance:
        return 0.0
    found = _distance(held / sizes[:, None], overall)
    return float(np.clip((found - by_chance) / (most - by_chance), 0, 1))


def _distance(mixes: NDArray[np.floating[Any]], overall: NDArray[np.floating[Any]]) -> float:
    return float(0.5 * np.abs(mixes - overall).sum(1).mean())


class _Pace:
    """How often devices were heard in a rehearsal, and how old their updates were."""

    def __init__(self, arrivals: Arrivals, devices: NDArray[np.int64], epoch: float) -> None:
        self.arrivals, self.devices = arrivals, devices
        size = int(devices.max()) + 1
        self.epochs = arrivals.seconds / epoch if epoch else 0.0
        every = np.bincount(arrivals.device, minlength=size).astype(float)
        age = (arrivals.came - arrivals.sent) / epoch if epoch else 0 * arrivals.came
        turns = arrivals.meanwhile() / len(devices)
        self._age = np.bincount(arrivals.device, age, size)
        self._turns = np.bincount(arrivals.device, turns, size)
        self._every = every
        self.tasks = every[devices]

    def behind(self, late: list[int]) -> list[int]:
        """Those named late, else the unheard and those whose updates are far older than usual."""
        if late:
            return late
        silent: list[int] = self.devices[self.tasks == 0].tolist()
        heard = self.devices[self.tasks > 0]
        if not len(heard):
            return silent
        each = self._turns[heard] / self._every[heard]
        usual = float(np.median(each))
        slow = heard[each >= max(TURNS_BEHIND, FAR_BEHIND * usual)]
        return sorted({*slow.tolist(), *silent})

    def mean_age(self, devices: Sequence[int]) -> float:
        """In epochs; of devices that were never heard, at least what was rehearsed."""
        return self._mean(self._age, devices, self.epochs)

    def mean_turns(self, devices: Sequence[int]) -> float:
        return self._mean(self._turns, devices, len(self.arrivals.device) / len(self.devices))

    def _mean(self, total: NDArray[Any], devices: Sequence[int], silent: float) -> float:
        chosen = np.array(devices, dtype=np.int64)
        if not len(chosen):
            return 0.0
        updates = self._every[chosen].sum()
        return float(total[chosen].sum() / updates) if updates else silent

    def heard_after(self, devices: list[int]) -> float:
        """The share of what was rehearsed after which nine tenths of these were heard once."""
        who, first = np.unique(self.arrivals.device, return_index=True)
        times = self.arrivals.came[first][np.isin(who, devices)]
        seconds = self.arrivals.seconds
        return float(np.quantile(times, 0.9) / seconds) if len(times) and seconds else 0.0


def _rehearsed(experiment: Experiment, arrivals: Arrivals) -> float:
    """How much of the run the rehearsal covers."""
    bounds = experiment.bounds(Strategy(name="rehearsal"))
    done = [len(arrivals.device) / bounds.updates] if bounds.updates else []
    if bounds.virtual_seconds:
        done.append(arrivals.seconds / bounds.virtual_seconds)
    return min(1.0, max([*done, 1e-6])) if done else 1.0


def _task_times(
    experiment: Experiment, loads: list[Load], devices: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Nominal seconds of a task on each device, and the share of it that goes over links."""
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


def away_share(windows: Windows, period: float) -> float:
    """The share of time that a device with these windows is out of reach."""
    if not windows:
        return 0.0
    return max(0.0, 1 - sum(end - start for start, end in windows) / period)


def _tied(
    counts: NDArray[np.integer[Any]], behind: list[int], names: tuple[str, ...]
) -> dict[str, float]:
    """Classes of which those behind hold nearly all; nothing if they hold most of everything."""
    total = counts.sum(0)
    share = counts[behind].sum(0) / np.maximum(total, 1)
    if counts[behind].sum() > counts.sum() / 2:
        return {}
    return {
        name: round(float(part), 3)
        for name, part, n in zip(names, share, total, strict=True)
        if n and part >= BELONGS
    }


def _budget(experiment: Experiment, tasks: NDArray[np.float64]) -> Budget | None:
    """What privacy costs a device of the usual size; None without privacy."""
    settings, spec = experiment.config.privacy, experiment.spec
    sizes = [len(c.train.y) for c in experiment.federation.clients if len(c.train.y)]
    examples = int(np.median(sizes))
    privacy = experiment.privacy(examples)
    if privacy is None:
        return None
    release, per_task = privacy.release(examples, spec), privacy.releases(examples, spec)

    def after(number: float) -> float:
        count = max(1, round(number)) * per_task
        return spent(((release, count),), privacy.delta, privacy.accountant)

    mean, most = float(tasks.mean()), float(tasks.max())
    return Budget(
        nominal=settings.epsilon,
        whole_run=settings.mode == "whole-run",
        limit=privacy.budget,
        spent_mean=after(mean),
        spent_most=after(most),
        allowed=_most_within(privacy.budget, after, most),
        planned_mean=mean,
        planned_most=most,
        poisson=settings.sampling == "poisson",
        full_batches=spec.batch_size >= examples,
    )


def _most_within(limit: float, after: Callable[[float], float], planned: float) -> float:
    """How many tasks fit the limit; inf if all that are planned do."""
    if not limit or after(planned) <= limit:
        return inf
    low, high = 0, max(1, round(planned))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if after(middle) <= limit else (low, middle)
    return float(low)
