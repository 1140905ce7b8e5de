"""The *compensate* slot of FedDC: late updates are replaced by estimates for the present model.

An update is compensated if it is late (`_is_late`), differs from the updates on time
(`uniqueness`), and compensation has not ended for its staleness (`switch_off`). Its inversion gives
examples whose local training reproduces it, and training the present head on these examples gives
the estimate. If the device's earlier examples reproduce the update too, they are used again without
an inversion; otherwise the inversion takes server time (`Later`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Any, cast

import torch
from torch import Tensor

from latecomer.core.codec import portable
from latecomer.core.messages import MAIN, Contribution, Later, Ready, Task
from latecomer.core.outcomes import Note
from latecomer.core.strategy import Action, Compensated, Observer, ServerView
from latecomer.core.submodel import name_of, take
from latecomer.device.flat import FlatModel
from latecomer.strategies.parts.inversion import (
    Effort,
    Estimate,
    InversionTarget,
    inversion_program,
    invert,
    misfit,
    reason_not_to_invert,
    replay,
    top_mask,
)
from latecomer.strategies.parts.switch_off import SwitchOff, switch_note
from latecomer.strategies.parts.uniqueness import Gate, Peers, is_unique, sketch
from latecomer.strategies.parts.validation import EstimateValidation

# Differentiating through one training step costs about nine forward passes: forward and backward
# are three, and each of them has a backward of its own.
PASSES = 9
MAX_NOISE_SHARE = 0.5  # of a delta's squared norm; with more, inversion would fit noise
STALENESS_WINDOW = 1000  # updates over which the mean staleness is averaged, at most


@portable
@dataclass(frozen=True, slots=True, eq=False)
class LastUpdate:
    """A late device's last update, `delta` from `base`, and its last estimated examples.

    After compensation has ended, the examples are those of an earlier update.
    """

    estimate: Estimate
    num_examples: int
    base: Tensor
    delta: Tensor
    staleness: int
    noise_std: float = 0.0


class InversionCompensator(Observer):
    """Compensate: replaces late updates by estimates from gradient inversion.

    An update is late from `min_staleness` commits on; with `min_ratio` it must also be that many
    times as stale as the mean of updates that were not late, which keeps fully asynchronous modes
    from compensating everything. The device's earlier examples are used again if their misfit on
    the new update is at most `reuse` times that on the update they were found for (0: never). The
    examples of an inversion are not used if their misfit is 1 or more. If it is above `max_misfit`,
    no update of that device is compensated any more. `gflops` is the
    speed of the server, for the virtual time of inversions; 0 makes them free. Without
    `keep_estimates` they are left out of checkpoints, and a resumed run starts its inversions cold.
    """

    inverts = True
    kept = (
        "last",
        "_found",
        "_waiting",
        "_cost",
        "_given_up",
        "_seen",
        "_mean_staleness",
        "_warned",
    )

    def __init__(
        self,
        effort: Effort,
        gate: Gate = "mean",
        switch: SwitchOff | None = None,
        min_staleness: int = 1,
        min_ratio: float = 0.0,
        reuse: float = 1.25,
        max_misfit: float = inf,
        gflops: float = 10.0,
        keep_estimates: bool = True,
    ) -> None:
        self.effort, self.gate = effort, gate
        self.validation = EstimateValidation(switch or SwitchOff(), keep_estimates)
        self.min_staleness, self.min_ratio, self.reuse = min_staleness, min_ratio, reuse
        self.max_misfit, self.gflops = max_misfit, gflops
        self.keep_estimates = keep_estimates
        self._peers = Peers()
        self.last: dict[int, LastUpdate] = {}  # by device
        self._waiting: dict[int, Contribution] = {}  # by task: to be inverted
        self._cost: dict[int, float] = {}  # by task: seconds charged for it
        self._given_up: set[int] = set()  # devices whose updates cannot be reproduced
        self._found: dict[int, Estimate] = {}  # by task: inverted, to be replayed
        self._seen, self._mean_staleness = 0, 0.0  # of updates that were not late
        self._flops: dict[int, float] = {}  # by parameters of the network
        self._warned = False
        self._notes: list[Note] = []

    def __call__(
        self, contribution: Contribution, view: ServerView
    ) -> Contribution | Compensated | Later:
        network = view.network(contribution.task.submodel)
        if network is None and contribution.task.submodel is None:
            self._warn_once("the server has no network to invert updates with")
        if network is None or not self._is_invertible(cast(FlatModel, network)):
            return contribution
        if self._is_mostly_noise(contribution):
            return contribution
        model = cast(FlatModel, network)
        self.validation.validate(model, contribution, view.store.commits)
        if not self._is_late(contribution, view):
            self._peers.add(contribution, view)
            return contribution
        if not self._gamma(contribution, view):
            self._remember_delta(contribution)
            return contribution
        if contribution.task.device in self._given_up or not self._is_unique(contribution):
            return contribution
        estimate = self._reusable(model, contribution)
        if estimate is not None:
            return self._compensated(model, contribution, estimate, view, 0.0)
        task = contribution.task
        # One inversion at a time per device: its next updates wait for it and share its result.
        shared = any(c.task.device == task.device for c in self._waiting.values())
        self._waiting[task.id] = contribution
        self._cost[task.id] = 0.0 if shared else self._seconds(model, contribution)
        return Later(self._cost[task.id], Ready(contribution))

    def finish(self, contribution: Contribution, view: ServerView) -> Compensated:
        """Compensate for the present head.

        The first call inverts all waiting contributions with the same network in one batch.
        """
        model = cast(FlatModel, view.network(contribution.task.submodel))
        task = contribution.task
        if task.id not in self._found:
            self._waiting[task.id] = contribution
            self._invert_waiting(contribution, model, view)
        estimate = self._found.pop(task.id)
        seconds = self._cost.pop(task.id)
        if estimate.fit > self.max_misfit:
            self._given_up.add(task.device)
            self.last.pop(task.device, None)  # no surrogates either
            return Compensated(contribution, 0.0, seconds)
        if not estimate.fit < 1.0:
            # The estimate is no better than a delta of 0: keep the stale update.
            return Compensated(contribution, 0.0, seconds)
        return self._compensated(model, contribution, estimate, view, seconds)

    def _remember_delta(self, contribution: Contribution) -> None:
        last = self.last.get(contribution.task.device)
        if last is not None and last.delta.numel() == contribution.delta.numel():
            self.last[contribution.task.device] = replace(
                last,
                num_examples=contribution.update.num_examples,
                base=contribution.base,
                delta=contribution.delta,
                staleness=contribution.staleness,
                noise_std=contribution.update.noise_std,
            )

    def _is_invertible(self, model: FlatModel) -> bool:
        reason = reason_not_to_invert(model)
        if reason is not None:
            self._warn_once(reason)
        return reason is None

    def _is_mostly_noise(self, contribution: Contribution) -> bool:
        """Whether privacy noise makes up most of the update, so that inversion would fit noise."""
        delta, noise = contribution.delta, contribution.update.noise_std
        if not noise:
            # With Adam the noise of a private update is unknown: it counts as mostly noise.
            if contribution.update.epsilon:
                self._warn_once("the privacy noise in updates is unknown: they are not compensated")
            return bool(contribution.update.epsilon)
        noisy = noise**2 * delta.numel() > MAX_NOISE_SHARE * delta.square().sum().item()
        if noisy:
            self._warn_once("some updates are mostly privacy noise: these are not compensated")
        return noisy

    def _warn_once(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            self._notes.append(switch_note(reason, 0, MAIN))

    def _is_late(self, contribution: Contribution, view: ServerView) -> bool:
        """Whether it is late; if not, its staleness enters the mean.

        With `min_ratio`, no update is late before there were two updates per present device.
        """
        staleness = contribution.staleness
        late = staleness >= self.min_staleness
        if self.min_ratio:
            warm = self._seen >= 2 * (len(view.idle) + len(view.working))
            late = late and warm and staleness >= self.min_ratio * max(self._mean_staleness, 1.0)
        if not late:
            self._seen += 1
            change = staleness - self._mean_staleness
            self._mean_staleness += change / min(self._seen, STALENESS_WINDOW)
        return late

    def _is_unique(self, contribution: Contribution) -> bool:
        """Whether it differs from its peers; always, once the device has been compensated."""
        if contribution.task.device in self.last:
            return True
        return is_unique(sketch(contribution.delta), self._peers.of(contribution), self.gate)

    def _gamma(self, contribution: Contribution, view: ServerView) -> float:
        switch, staleness = self.validation.switch, contribution.staleness
        return switch.gamma(contribution.lineage, view.store.commits, staleness)

    def _reusable(self, model: FlatModel, contribution: Contribution) -> Estimate | None:
        """The device's earlier estimate, if it reproduces this update (selective computation)."""
        estimate = self._start(contribution)
        if estimate is None or not self.reuse:
            return None
        replayed = replay(model, contribution.base, estimate)
        mask = top_mask(contribution.delta[None], self.effort.mask)
        delta = contribution.delta
        if mask is not None:
            replayed, delta = replayed * mask[0], delta * mask[0]
        return estimate if misfit(replayed, delta) <= self.reuse * estimate.fit else None

    def _start(self, contribution: Contribution) -> Estimate | None:
        """The device's last estimate, if its training program is still the same."""
        last = self.last.get(contribution.task.device)
        if last is None:
            return None
        estimate, count = last.estimate, contribution.update.num_examples
        program = inversion_program(contribution.task.spec, count, self.effort.steps)
        same = program == (estimate.spec, estimate.steps)
        return estimate if same and len(estimate.x) == self.effort.size(count) else None

    def _invert_waiting(
        self, contribution: Contribution, model: FlatModel, view: ServerView
    ) -> None:
        """Invert the last waiting update of each device with the same network as this one."""
        name = name_of(contribution.task.submodel)
        waiting = [c for c in self._waiting.values() if name_of(c.task.submodel) == name]
        group = list({c.task.device: c for c in waiting}.values())
        targets = [
            InversionTarget(
                base=c.base,
                delta=c.delta,
                spec=c.task.spec,
                num_examples=c.update.num_examples,
                seed=_stream(view.seed, c.task),
                start=self._start(c),
            )
            for c in group
        ]
        inverted = zip(group, invert(model, targets, self.effort), strict=True)
        found = {c.task.device: estimate for c, estimate in inverted}
        for c in waiting:
            del self._waiting[c.task.id]
            self._found[c.task.id] = found[c.task.device]

    def _compensated(
        self,
        model: FlatModel,
        contribution: Contribution,
        estimate: Estimate,
        view: ServerView,
        seconds: float,
    ) -> Compensated:
        """gamma * estimate + (1 - gamma) * stale update, with the present head as base."""
        head = take(view.store.head_params(contribution.lineage), contribution.task.submodel)
        fresh = replay(model, head, estimate)
        gamma = self._gamma(contribution, view) if torch.isfinite(fresh).all() else 0.0
        details = {"fit": estimate.fit}
        count, stale = contribution.update.num_examples, contribution.delta
        noise = contribution.update.noise_std
        self.last[contribution.task.device] = LastUpdate(
            estimate, count, contribution.base, stale, contribution.staleness, noise
        )
        if not gamma:
            return Compensated(contribution, gamma, seconds, details)
        version = view.store.head(contribution.lineage)
        self.validation.keep(contribution, estimate, version, view.store.commits)
        delta = fresh if gamma == 1.0 else torch.lerp(stale, fresh, gamma)
        # It is weighed like an update that was not late; in asynchronous modes these are stale too.
        staleness = round(gamma * self._mean_staleness + (1.0 - gamma) * contribution.staleness)
        rebased = replace(contribution.rebase(head, delta), staleness=staleness)
        return Compensated(rebased, gamma, seconds, details)

    def _seconds(self, model: FlatModel, contribution: Contribution) -> float:
        if not self.gflops:
            return 0.0
        count = contribution.update.num_examples
        warm = self._start(contribution) is not None
        iterations = self.effort.warm_iterations if warm else self.effort.iterations
        steps = inversion_program(contribution.task.spec, count, self.effort.steps)[1]
        work = PASSES * self._forward_flops(model) * self.effort.size(count) * steps * iterations
        return work / (1e9 * self.gflops)

    def _forward_flops(self, model: FlatModel) -> float:
        size = model.layout.size
        if size not in self._flops:
            from torch.utils.flop_counter import FlopCounterMode

            params, x = model.init(0), model.example(1)
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                model.logits(params, x)
            self._flops[size] = float(counter.get_total_flops())
        return self._flops[size]

    def act(self, view: ServerView) -> Iterable[Action]:
        notes, self._notes = self._notes, []
        return notes

    def state(self) -> dict[str, Any]:
        found = super().state()
        return found if self.keep_estimates else {**found, "last": {}, "found": {}}


def _stream(seed: int, task: Task) -> int:
    """A seed per task, far enough apart for a few restarts."""
    return ((seed * 1_000_003 + task.device) * 1_000_003 + 10 * task.number) % 2**62
