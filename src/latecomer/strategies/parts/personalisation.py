"""Personalisation for any strategy: the settings with which devices use a model between tasks."""

from collections.abc import Callable
from dataclasses import replace

import torch

from latecomer.core.messages import Contribution, ServingSettings, TrainSpec
from latecomer.core.strategy import Observer, ServerView, Strategy
from latecomer.strategies.parts.cluster_state import is_distribution, per_class


class Personalisation(Observer):
    """Observer: devices correct for their class prior (`prior`) and fine-tune the model.

    The class prior of a model is the mean of the class shares that the devices of its lineage
    report, each weighed by its number of examples; uniform if none reports them.
    """

    kept = ("_shares",)

    def __init__(self, prior: bool, finetune_epochs: int) -> None:
        self.prior, self.finetune_epochs = prior, finetune_epochs
        self._shares: dict[int, tuple[int, list[float]]] = {}  # device -> examples, class shares

    def on_contribution(self, contribution: Contribution, view: ServerView) -> None:
        update = contribution.update
        shares = per_class(update.metrics, "share")
        if self.prior and is_distribution(shares):
            self._shares[contribution.task.device] = (update.num_examples, shares)

    def serving(self, settings: ServingSettings, lineage: str, view: ServerView) -> ServingSettings:
        return replace(
            settings,
            prior=self.prior,
            finetune_epochs=self.finetune_epochs,
            class_prior=self._class_prior(lineage, view),
        )

    def _class_prior(self, lineage: str, view: ServerView) -> tuple[float, ...]:
        here = [of for device, of in self._shares.items() if view.lineage_of(device) == lineage]
        if not here or len({len(shares) for _, shares in here}) > 1:
            return ()
        counts = torch.tensor([float(n) for n, _ in here], dtype=torch.float64)
        shares = torch.tensor([shares for _, shares in here], dtype=torch.float64)
        return tuple((counts @ shares / counts.sum()).tolist())


def personalised(strategy: Strategy, prior: bool = False, finetune_epochs: int = 0) -> Strategy:
    """The strategy with `Personalisation`; with `prior` devices also report their class shares."""
    if not prior and not finetune_epochs:
        return strategy
    observers = (*strategy.observers, Personalisation(prior, finetune_epochs))
    prepare = reporting(strategy.prepare) if prior else strategy.prepare
    return replace(strategy, observers=observers, prepare=prepare)


def reporting(prepare: Callable[[TrainSpec], TrainSpec]) -> Callable[[TrainSpec], TrainSpec]:
    """`prepare`, with class shares reported."""
    return lambda spec: replace(prepare(spec), report_shares=True)
