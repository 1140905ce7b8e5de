"""Validation of compensated updates: a device's next update shows how good an earlier estimate was.

FedDC Algorithm 1, lines 3 to 9, as corrected in docs/papers.md. The estimated examples are replayed
on the base of the device's next update, so both deltas start from the same model.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

import torch
from torch import Tensor

from latecomer.core.codec import portable
from latecomer.core.messages import Contribution
from latecomer.core.outcomes import CompensationEnded, Note
from latecomer.core.strategy import Action, Observer, ServerView
from latecomer.device.flat import FlatModel
from latecomer.strategies.parts.inversion import Estimate, replay
from latecomer.strategies.parts.switch_off import SwitchOff, error

# What had the smallest error against the next update: the estimate, the stale update, or 0.
Nearest = Literal["estimate", "stale", "zero"]

MAX_PENDING = 4  # estimates per device that wait for its next update


@portable
@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """An estimate used at `version` in place of `stale`, a delta `staleness` commits old."""

    version: int
    staleness: int
    stale: Tensor
    noise_std: float
    estimate: Estimate


class EstimateValidation(Observer):
    """Keeps estimates until the device's next update, and passes both errors to the switch."""

    kept = ("nearest", "_pending")

    def __init__(self, switch: SwitchOff, keep_estimates: bool = True) -> None:
        self.switch, self.keep_estimates = switch, keep_estimates
        self.nearest: dict[int, Nearest] = {}  # device -> result of its last validation
        self._pending: dict[int, list[Pending]] = {}
        self._lineages: set[str] = set()  # lineages with validations in this moment
        self._notes: list[Note] = []

    def keep(self, contribution: Contribution, estimate: Estimate, version: int, now: int) -> None:
        """Store an estimate used at `version` in place of the contribution's stale delta.

        At most `MAX_PENDING` per device are stored, at least staleness / `MAX_PENDING` commits
        apart; others are not validated.
        """
        pending = self._pending.setdefault(contribution.task.device, [])
        staleness = contribution.staleness
        apart = max(1, staleness // MAX_PENDING)
        if len(pending) < MAX_PENDING and (not pending or version >= pending[-1].version + apart):
            noise = contribution.update.noise_std
            pending.append(Pending(version, staleness, contribution.delta, noise, estimate))
            self.switch.used(contribution.lineage, contribution.task.device, now, staleness)

    def validate(self, model: FlatModel, update: Contribution, now: int) -> None:
        """Compute the errors of the last estimate used at or before the version of its base.

        Compared with the update: the estimate replayed on its base, the stale delta, and 0.
        """
        device, version = update.task.device, update.task.version
        pending = self._pending.get(device, [])
        past = [each for each in pending if each.version <= version]
        if not past:
            return
        self._pending[device] = pending[len(past) :]
        last = past[-1]
        if last.stale.numel() != update.delta.numel():
            return
        fresh = replay(model, update.base, last.estimate)
        noise, older = update.update.noise_std**2, last.noise_std**2
        estimated = error(fresh, update.delta, noise)
        stale = error(last.stale, update.delta, noise + older)
        zero = error(torch.zeros_like(update.delta), update.delta, noise)
        self.switch.record(update.lineage, device, now, estimated, stale, last.staleness)
        self._lineages.add(update.lineage)
        errors: dict[Nearest, float] = {"estimate": estimated, "stale": stale, "zero": zero}
        self.nearest[device] = min(errors, key=errors.__getitem__)
        fields = {
            "device": device,
            "task": update.task.id,
            "lineage": update.lineage,
            "gap": version - last.version,
            "error_estimate": estimated if isfinite(estimated) else None,
            "error_stale": stale,
        }
        self._notes.append(Note("validation", fields))

    def act(self, view: ServerView) -> Iterable[Action]:
        """Log lines of this moment's validations, and the ends of compensation they cause."""
        notes, self._notes = self._notes, []
        yield from notes
        now = view.store.commits
        for lineage in sorted(self._lineages):
            errors = self.switch.decide(lineage, now)
            if errors is not None:
                below = self.switch.ended_below(lineage)
                for_all = not isfinite(below)
                which = "" if for_all else f" of updates less than {round(below)} commits stale"
                yield CompensationEnded(
                    lineage,
                    now,
                    errors[0] if isfinite(errors[0]) else None,
                    errors[1],
                    None if for_all else below,
                    f"compensation{which} ends: most estimates had a larger error than the stale"
                    " updates they replaced",
                )
        self._lineages.clear()

    def state(self) -> dict[str, Any]:
        found = super().state()
        return found if self.keep_estimates else {**found, "pending": {}}
