"""Calibration of the output bias for classes that few devices hold.

Devices that lack a class unlearn it in every local training, so the merged model predicts classes
of few devices too seldom, most of all those of late devices. Devices report, per class, the share
in their data and the model's mean prediction; one Newton step on the output bias closes the gap
("calibration in the large"; Luo et al. 2021 calibrate classifiers after federated training).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import cast

import torch
from torch import Tensor

from latecomer.core.messages import Contribution, ServingSettings
from latecomer.core.strategy import Action, Observer, ServerView
from latecomer.device.flat import FlatModel
from latecomer.strategies.latecomer.cached_aggregation import FORGET_AFTER_PASSES
from latecomer.strategies.parts.clustering import Clustering
from latecomer.strategies.parts.labels import output_bias
from latecomer.strategies.parts.switch_off import switch_note

# Label-skew index of a class: calibration begins at the second and ends below the first.
EVEN, SKEWED = 0.3, 0.4
MIN_ARRIVALS = 20  # contributions between two decisions, at least
EXAMPLES_CAP = 2.0  # times the median number of examples of a device
PRIOR_EXAMPLES = 5.0  # weight of the present outputs, in examples
MAX_SHIFT = 2.0  # nats
TINY = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class LabelReport:
    """A device's report about a model on its `examples`, one value per class."""

    examples: float
    mean_prediction: Tensor  # mean soft label p
    class_share: Tensor
    variance: Tensor  # mean of p (1 - p): the change of the mean prediction per nat of bias


class Calibration(Observer):
    """Observer: shifts the output bias so that skewed classes are predicted as often as they occur.

    `strength` is the share of the correction that is applied. The reports are those that
    `clustering` keeps.
    """

    kept = ("_examples", "_contributions", "_since", "_reported", "_skew")

    def __init__(self, strength: float, clustering: Clustering) -> None:
        self.strength, self.clustering = strength, clustering
        self._examples: dict[int, int] = {}  # by device
        self._contributions, self._since = 0, 0
        # device -> lineage and version of its last report, and the contribution it came with
        self._reported: dict[int, tuple[str, int, int]] = {}
        self._skew: Tensor | None = None  # label-skew index of calibrated classes, 0 of others

    def on_contribution(self, contribution: Contribution, view: ServerView) -> None:
        task, update = contribution.task, contribution.update
        self._since += 1
        self._contributions += 1
        self._examples[task.device] = update.num_examples
        if "soft_0" in update.metrics:  # class shares alone come with every update
            self._reported[task.device] = (task.lineage, task.version, self._contributions)

    def deployed(self, params: Tensor, lineage: str, view: ServerView) -> Tensor:
        """`params` with the correction added to the output bias, if the network has one."""
        shift = self.shift(lineage, view)
        if shift is None:
            return params
        moved = params.clone()
        moved[_bias(view)] += shift.to(params.dtype)
        return moved

    def serving(self, settings: ServingSettings, lineage: str, view: ServerView) -> ServingSettings:
        shift = self.shift(lineage, view)
        return settings if shift is None else replace(settings, output_bias=tuple(shift.tolist()))

    def shift(self, lineage: str, view: ServerView) -> Tensor | None:
        """The correction of the output bias of a lineage, in nats; None for no correction."""
        if self._skew is None or _bias(view) is None:
            return None
        reports = self._reports(view, lineage)
        return bias_shift(reports, self.strength * self._skew) if len(reports) > 1 else None

    def _reports(self, view: ServerView, lineage: str | None = None) -> list[LabelReport]:
        """The devices' reports about the model of a lineage, or about any.

        Reports about the initial model are left out, and those of devices that have been away for
        several fleet passes.
        """
        network, oldest = (
            network_of(view),
            self._contributions - FORGET_AFTER_PASSES * len(self._examples),
        )
        if network is None:
            return []
        devices = [
            device
            for device, (of, version, at) in self._reported.items()
            if version > 0
            and lineage in (None, of)
            and (at >= oldest or device in view.working or device in view.idle)
        ]
        reported = self.clustering.label_statistics(devices, network.num_classes)
        return [LabelReport(self._examples[device], *of) for device, of in reported.items()]

    def act(self, view: ServerView) -> Iterable[Action]:
        """Decide once per fleet pass which classes are calibrated; a log line if that changes."""
        if self._since < max(MIN_ARRIVALS, len(self._examples)):
            return
        self._since = 0
        reports = self._reports(view) if self.strength and _bias(view) is not None else []
        if len(reports) < 2:
            return
        found = label_skew(reports)
        before = torch.zeros_like(found) if self._skew is None else self._skew
        skewed = found >= torch.where(before > 0, EVEN, SKEWED)
        self._skew = torch.where(skewed, found, 0.0) if skewed.any() else None
        if skewed.equal(before > 0):
            return
        if self._skew is None:
            reason = "calibration ends: all classes are spread over the devices"
        else:
            which = ", ".join(str(j) for j in skewed.nonzero().flatten().tolist())
            reason = (
                f"calibration of classes {which}: few devices hold them"
                f" (label-skew index up to {found.max().item():.2f})"
            )
        yield switch_note(reason, view.store.commits)


def network_of(view: ServerView) -> FlatModel | None:
    """The whole network, if the server has it."""
    return cast(FlatModel | None, view.network(None))


def _bias(view: ServerView) -> slice | None:
    """The place of the output bias in the parameter vector, if there is one."""
    network = network_of(view)
    return output_bias(network) if network else None


def label_skew(reports: Sequence[LabelReport]) -> Tensor:
    """Label-skew index of each class: 0 if shares differ by chance only, 1 if some hold only it.

    Hoover's index, the part of the class that would have to move so that all devices have the same
    share, relative to its maximum and without what sampling few examples causes.
    """
    shares = torch.stack([each.class_share for each in reports]).double()
    counts = torch.tensor([max(1.0, each.examples) for each in reports]).double().floor()
    mean = shares.mean(0)
    found = torch.zeros_like(mean)
    some = (mean > 0) & (mean < 1)
    mean, shares = mean[some], shares[:, some]
    largest = mean * (1 - mean)
    index = (mean - shares).clamp_min(0.0).mean(0) / largest
    drawn = (shortfall_by_chance(counts[:, None], mean) / largest).mean(0)
    # The mean is taken over the same devices, and so is nearer to each of them than the true one.
    chance = drawn * ((len(reports) - 1) / len(reports)) ** 0.5
    over = (index - chance) / (1 - chance).clamp_min(TINY)
    # Devices with one example each give no information.
    found[some] = torch.where(drawn < 1 - TINY, over.clamp(0.0, 1.0), 0.0)
    return found


def shortfall_by_chance(n: Tensor, p: Tensor) -> Tensor:
    """E[(p - share)+] of a class with probability p in n examples: De Moivre 1730, halved."""
    k = (n * p).floor() + 1
    ways = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    return (ways + k.log() + k * p.log() + (n - k + 1) * (1 - p).log()).exp() / n


def bias_shift(reports: Sequence[LabelReport], factors: Tensor) -> Tensor:
    """The shift of the output bias, in nats, that closes the calibration gap of each class.

    Class j is shifted by `factors[j]` of a Newton step with the diagonal of the second derivative,
    as if all K classes were confused evenly; classes with factor 0 stay, the others move relative
    to them. Where most classes are shifted, their mean stays.
    """
    typical = median(each.examples for each in reports)
    weights = torch.tensor(
        [min(each.examples, EXAMPLES_CAP * typical) for each in reports]
    ).double()
    total, classes = weights.sum(), len(factors)
    gaps = torch.stack([each.class_share - each.mean_prediction for each in reports])
    gap = weights @ gaps / total
    variance = weights @ torch.stack([each.variance for each in reports]) / total
    alone, some = gap / (variance + PRIOR_EXAMPLES / total), factors > 0
    moved = int(some.sum())
    against = -alone.mean() if 2 * moved > classes else alone[some].sum() / (classes - moved)
    step = (classes - 1) / classes * (alone + against)
    return factors * step.clamp(-MAX_SHIFT, MAX_SHIFT)
