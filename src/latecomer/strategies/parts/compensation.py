"""The *compensate* slot of FedDC: late updates are replaced by what the device would send today.

arrival: late, unique, not switched off? -> do known examples explain it? yes: replay them
                                            no: `Later`; inversion beside the next epoch; replay
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from latecomer.core.codec import portable
from latecomer.core.messages import MAIN, Contribution, Later, Note, Ready, Task
from latecomer.core.strategy import Compensated, ServerView
from latecomer.core.submodel import name_of, take
from latecomer.device.flat import FlatModel
from latecomer.strategies.parts.inversion import (
    Effort,
    Estimate,
    Sought,
    invert,
    largest,
    misfit,
    reason_not_to_invert,
    replay,
    surrogate,
)
from latecomer.strategies.parts.switch_off import Switch, switch_note
from latecomer.strategies.parts.uniqueness import Peers, Rule, is_unique, sketch
from latecomer.strategies.parts.validation import Judge

# Differentiating through one training step costs about nine forward passes: forward and backward
# are three, and each of them has a backward of its own.
PASSES = 9
DROWNED = 0.5  # of a delta's squared length: with more noise than that there is little to explain
MEMORY = 1000  # updates after which the usual staleness is forgotten


@portable
@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """What is known of a late device: its last word, of `base`, and examples that explain it."""

    estimate: Estimate
    num_examples: int
    base: Tensor
    word: Tensor
    staleness: int
    noise_std: float = 0.0  # of the word


class Compensator:
    """Repairs late updates by gradient inversion.

    `min_staleness` commits make an update late; with `min_ratio` it must also be that many times
    as stale as usual, which keeps fully asynchronous modes from repairing everything.
    An update that the device's known examples explain nearly as well as the one they were made
    for (`reuse` times their fit, 0: never) needs no new inversion. `gflops` is the speed of the
    server, for the virtual time that inversions take; 0 makes them free.
    """

    def __init__(
        self,
        effort: Effort,
        gate: Rule = "mean",
        switch: Switch | None = None,
        min_staleness: int = 1,
        min_ratio: float = 0.0,
        reuse: float = 1.25,
        gflops: float = 10.0,
        keep_estimates: bool = True,
    ) -> None:
        self.effort, self.gate = effort, gate
        self.judge = Judge(switch or Switch())
        self.min_staleness, self.min_ratio, self.reuse = min_staleness, min_ratio, reuse
        self.gflops = gflops
        self.keep_estimates = keep_estimates
        self._peers = Peers()
        self.known: dict[int, Known] = {}
        self._waiting: dict[int, Contribution] = {}  # by task: to be inverted
        self._cost: dict[int, float] = {}  # by task: seconds charged for it
        self._found: dict[int, Estimate] = {}  # by task: inverted, to be replayed
        self._seen, self._usual = 0, 0.0  # updates in time, and their mean staleness
        self._work: dict[int, float] = {}
        self._complained = False
        self._notes: list[Note] = []

    def __call__(
        self, contribution: Contribution, view: ServerView
    ) -> Contribution | Compensated | Later:
        network = view.network(contribution.task.submodel)
        if network is None and contribution.task.submodel is None:
            self._complain("the server has no network to repair updates with")
        if network is None or not self._is_invertible(cast(FlatModel, network)):
            return contribution
        if self._is_drowned(contribution):
            return contribution
        model = cast(FlatModel, network)
        self.judge.hear(model, contribution, view.store.commits)
        if not self._is_late(contribution, view):
            self._peers.add(contribution, view)
            return contribution
        if not self._gamma(contribution, view):
            self._remember_word(contribution)
            return contribution
        if not self._is_unique(contribution):
            return contribution
        estimate = self._reusable(model, contribution)
        if estimate is not None:
            return self._repaired(model, contribution, estimate, view, 0.0)
        task = contribution.task
        # One inversion at a time per device: what comes meanwhile waits for it, and shares it.
        shared = any(c.task.device == task.device for c in self._waiting.values())
        self._waiting[task.id] = contribution
        self._cost[task.id] = 0.0 if shared else self._seconds(model, contribution)
        return Later(self._cost[task.id], Ready(contribution))

    def finish(self, contribution: Contribution, view: ServerView) -> Compensated:
        """Whoever is ready first has everybody who waits inverted with him, in one batch."""
        model = cast(FlatModel, view.network(contribution.task.submodel))
        task = contribution.task
        if task.id not in self._found:
            self._waiting[task.id] = contribution
            self._invert_waiting(contribution, model, view)
        estimate = self._found.pop(task.id)
        seconds = self._cost.pop(task.id)
        if not estimate.fit < 1.0:
            # No better than saying nothing: the stale update is the better word.
            return Compensated(contribution, {"gamma": 0.0, "seconds": seconds})
        return self._repaired(model, contribution, estimate, view, seconds)

    def _remember_word(self, contribution: Contribution) -> None:
        known = self.known.get(contribution.task.device)
        if known is not None and known.word.numel() == contribution.delta.numel():
            self.known[contribution.task.device] = replace(
                known,
                base=contribution.base,
                word=contribution.delta,
                staleness=contribution.staleness,
            )

    def _is_invertible(self, model: FlatModel) -> bool:
        reason = reason_not_to_invert(model)
        if reason is not None:
            self._complain(reason)
        return reason is None

    def _is_drowned(self, contribution: Contribution) -> bool:
        """Whether the update is mostly noise, which examples would be made up to explain."""
        delta, noise = contribution.delta, contribution.update.noise_std
        drowned = (
            noise**2 * delta.numel() > DROWNED * delta.square().sum().item() if noise else False
        )
        if drowned:
            self._complain("updates are mostly noise, which no examples explain: none is repaired")
        return drowned

    def _complain(self, reason: str) -> None:
        if not self._complained:
            self._complained = True
            self._notes.append(switch_note(reason, 0, MAIN))

    def _is_late(self, contribution: Contribution, view: ServerView) -> bool:
        """Later than others usually are; what is usual must have been seen first."""
        staleness = contribution.staleness
        late = staleness >= self.min_staleness
        if self.min_ratio:
            warm = self._seen >= 2 * (len(view.idle) + len(view.working))
            late = late and warm and staleness >= self.min_ratio * max(self._usual, 1.0)
        if not late:
            self._seen += 1
            self._usual += (staleness - self._usual) / min(self._seen, MEMORY)
        return late

    def _is_unique(self, contribution: Contribution) -> bool:
        """Once found unique, a device stays so: stale and repaired updates in turn do harm."""
        if contribution.task.device in self.known:
            return True
        return is_unique(sketch(contribution.delta), self._peers.of(contribution), self.gate)

    def _gamma(self, contribution: Contribution, view: ServerView) -> float:
        switch, staleness = self.judge.switch, contribution.staleness
        return switch.gamma(contribution.lineage, view.store.commits, staleness)

    def _reusable(self, model: FlatModel, contribution: Contribution) -> Estimate | None:
        """What is known of the device, if it explains this update too (selective computation)."""
        known = self._start(contribution)
        if known is None or not self.reuse:
            return None
        explained = replay(model, contribution.base, [known])[0]
        mask = largest(contribution.delta[None], self.effort.keep)
        truth = contribution.delta
        if mask is not None:
            explained, truth = explained * mask[0], truth * mask[0]
        return known if misfit(explained, truth) <= self.reuse * known.fit else None

    def _start(self, contribution: Contribution) -> Estimate | None:
        """The device's last estimate, if its program is still the same."""
        known = self.known.get(contribution.task.device)
        if known is None:
            return None
        count = contribution.update.num_examples
        program = surrogate(contribution.task.spec, count, self.effort.steps)
        same = program == (known.estimate.spec, known.estimate.steps)
        return known.estimate if same and len(known.estimate.x) == self.effort.size(count) else None

    def _invert_waiting(
        self, contribution: Contribution, model: FlatModel, view: ServerView
    ) -> None:
        """Invert all that wait and train the same network as this one; of each device the last."""
        name = name_of(contribution.task.submodel)
        waiting = [c for c in self._waiting.values() if name_of(c.task.submodel) == name]
        group = list({c.task.device: c for c in waiting}.values())
        sought = [
            Sought(
                base=c.base,
                delta=c.delta,
                spec=c.task.spec,
                num_examples=c.update.num_examples,
                seed=_stream(view.seed, c.task),
                start=self._start(c),
            )
            for c in group
        ]
        inverted = zip(group, invert(model, sought, self.effort), strict=True)
        found = {c.task.device: estimate for c, estimate in inverted}
        for c in waiting:
            del self._waiting[c.task.id]
            self._found[c.task.id] = found[c.task.device]

    def _repaired(
        self,
        model: FlatModel,
        contribution: Contribution,
        estimate: Estimate,
        view: ServerView,
        seconds: float,
    ) -> Compensated:
        """gamma * estimate + (1 - gamma) * stale, as if trained from today's head."""
        head = take(view.store.head_params(contribution.lineage), contribution.task.submodel)
        fresh = replay(model, head, [estimate])[0]
        gamma = self._gamma(contribution, view) if torch.isfinite(fresh).all() else 0.0
        told = {"fit": estimate.fit, "gamma": gamma, "seconds": seconds}
        count, stale = contribution.update.num_examples, contribution.delta
        self.known[contribution.task.device] = Known(
            estimate,
            count,
            contribution.base,
            stale,
            contribution.staleness,
            contribution.update.noise_std,
        )
        if not gamma:
            return Compensated(contribution, told)
        version = view.store.head(contribution.lineage)
        self.judge.put_on_trial(contribution, estimate, version, view.store.commits)
        delta = fresh if gamma == 1.0 else torch.lerp(stale, fresh, gamma)
        # It counts as much as one that came in time, which in asynchronous modes is never fresh.
        staleness = round(gamma * self._usual + (1.0 - gamma) * contribution.staleness)
        return Compensated(replace(contribution.rebase(head, delta), staleness=staleness), told)

    def _seconds(self, model: FlatModel, contribution: Contribution) -> float:
        if not self.gflops:
            return 0.0
        count = contribution.update.num_examples
        warm = self._start(contribution) is not None
        iterations = self.effort.warm_iterations if warm else self.effort.iterations
        steps = surrogate(contribution.task.spec, count, self.effort.steps)[1]
        work = PASSES * self._forward_flops(model) * self.effort.size(count) * steps * iterations
        return work / (1e9 * self.gflops)

    def _forward_flops(self, model: FlatModel) -> float:
        size = model.layout.size
        if size not in self._work:
            from torch.utils.flop_counter import FlopCounterMode

            params, x = model.init(0), torch.zeros(1, *model.input_shape)
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                model.logits(params, x)
            self._work[size] = float(counter.get_total_flops())
        return self._work[size]

    def tell(self, view: ServerView) -> Iterable[Note]:
        notes, self._notes = self._notes, []
        return [*notes, *self.judge.tell(view.store.commits)]

    def on_fork(self, parent: str, child: str) -> None:
        self.judge.switch.on_fork(parent, child)

    def on_absorb(self, into: str, gone: str) -> None:
        self.judge.switch.on_absorb(into, gone)

    def state(self) -> dict[str, Any]:
        """Everything; without `keep_estimates` a resumed run starts its inversions cold."""
        kept = self.keep_estimates
        return {
            "peers": self._peers.state(),
            "judge": self.judge.state(with_probes=kept),
            "known": dict(self.known) if kept else {},
            "found": dict(self._found) if kept else {},
            "waiting": dict(self._waiting),
            "cost": dict(self._cost),
            "seen": [self._seen, self._usual],
            "complained": self._complained,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self._peers.restore(state["peers"])
        self.judge.restore(state["judge"])
        self.known = dict(state["known"])
        self._found = dict(state["found"])
        self._waiting = dict(state["waiting"])
        self._cost = dict(state["cost"])
        self._seen, self._usual = state["seen"]
        self._complained = state["complained"]


def _stream(seed: int, task: Task) -> int:
    """A seed of its own for every task, far enough apart for a few restarts."""
    return ((seed * 1_000_003 + task.device) * 1_000_003 + 10 * task.number) % 2**62
