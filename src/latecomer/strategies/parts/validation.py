"""Estimates on trial: a device's next update is the truth for an earlier estimate.

FedDC Algorithm 1, lines 3 to 9, as corrected in docs/papers.md. The examples of the estimate are
replayed on the very model the truth started from, so the comparison is exact.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

import torch
from torch import Tensor

from latecomer.core.codec import portable
from latecomer.core.messages import Contribution, Note
from latecomer.device.flat import FlatModel
from latecomer.strategies.parts.inversion import Estimate, replay
from latecomer.strategies.parts.switch_off import Switch, error

# What stands nearest to the truth: the estimate, the device's last own word, or nothing at all.
Verdict = Literal["estimate", "word", "silence"]

PROBES = 4  # estimates per device that wait for their truth


@portable
@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """An estimate made for `version` from a delta that was `staleness` commits late."""

    version: int
    staleness: int
    stale: Tensor
    noise_std: float
    estimate: Estimate


class Judge:
    """Keeps probes until the truth comes in, and tells the switch what came out."""

    def __init__(self, switch: Switch) -> None:
        self.switch = switch
        self.verdicts: dict[int, Verdict] = {}  # by device: what was nearest to its last word
        self._probes: dict[int, list[Probe]] = {}
        self._lineages: set[str] = set()  # of which something was judged in this moment
        self._notes: list[Note] = []

    def put_on_trial(
        self, contribution: Contribution, estimate: Estimate, version: int, now: int
    ) -> None:
        """`estimate` was used for `version` in place of the contribution's stale delta."""
        probes = self._probes.setdefault(contribution.task.device, [])
        staleness = contribution.staleness
        apart = max(1, staleness // PROBES)
        if len(probes) < PROBES and (not probes or version >= probes[-1].version + apart):
            noise = contribution.update.noise_std
            probes.append(Probe(version, staleness, contribution.delta, noise, estimate))
            self.switch.tried(contribution.lineage, contribution.task.device, now, staleness)

    def hear(self, model: FlatModel, truth: Contribution, now: int) -> None:
        """Any update of a device, late or not, may be the truth for one of its probes."""
        device, version = truth.task.device, truth.task.version
        probes = self._probes.get(device, [])
        past = [probe for probe in probes if probe.version <= version]
        if not past:
            return
        self._probes[device] = probes[len(past) :]
        probe = past[-1]
        if probe.stale.numel() != truth.delta.numel():
            return
        fresh = replay(model, truth.base, [probe.estimate])[0]
        noise, older = truth.update.noise_std**2, probe.noise_std**2
        estimated = error(fresh, truth.delta, noise)
        stale = error(probe.stale, truth.delta, noise + older)
        silent = error(torch.zeros_like(truth.delta), truth.delta, noise)
        self.switch.judge(truth.lineage, device, now, estimated, stale, probe.staleness)
        self._lineages.add(truth.lineage)
        errors: dict[Verdict, float] = {"estimate": estimated, "word": stale, "silence": silent}
        self.verdicts[device] = min(errors, key=errors.__getitem__)
        fields = {
            "device": device,
            "task": truth.task.id,
            "lineage": truth.lineage,
            "gap": version - probe.version,
            "error_estimate": estimated if isfinite(estimated) else None,
            "error_stale": stale,
        }
        self._notes.append(Note("judgement", fields))

    def tell(self, now: int) -> Iterable[Note]:
        """The judgements of this moment, and the switches they lead to."""
        for lineage in sorted(self._lineages):
            worse = self.switch.decide(lineage, now)
            if worse is not None:
                below = self.switch.ended_below(lineage)
                for_all = not isfinite(below)
                whose = "" if for_all else f" of what is less than {round(below)} stale"
                fields = {
                    "lineage": lineage,
                    "version": now,
                    "error_estimate": worse[0] if isfinite(worse[0]) else None,
                    "error_stale": worse[1],
                    "below": None if for_all else below,
                    "reason": f"repair{whose} ends: most estimates were further from the truth"
                    " than the late updates themselves",
                }
                self._notes.append(Note("switch", fields))
        self._lineages.clear()
        told, self._notes = self._notes, []
        return told

    def state(self, with_probes: bool) -> dict[str, Any]:
        probes = {device: list(some) for device, some in self._probes.items()}
        return {
            "switch": self.switch.state(),
            "verdicts": dict(self.verdicts),
            "probes": probes if with_probes else {},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.switch.restore(state["switch"])
        self.verdicts = dict(state["verdicts"])
        self._probes = {device: list(some) for device, some in state["probes"].items()}
